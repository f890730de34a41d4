//! The functions of librados and librbd, found in the libraries by name.

use std::ffi::{c_char, c_int, c_void};
use std::sync::OnceLock;

use libloading::Library;

/// `rados_t`, `rados_ioctx_t`, `rbd_image_t` or `rbd_completion_t`: pointers to opaque objects.
pub(super) type Handle = *mut c_void;
/// A C string that the library only reads.
pub(super) type Text = *const c_char;

/// `rbd_config_option_t` of `rbd/librbd.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ConfigOption {
    pub(super) name: *mut c_char,
    pub(super) value: *mut c_char,
    pub(super) source: c_int,
}

/// `rbd_image_watcher_t` of `rbd/librbd.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Watcher {
    pub(super) address: *mut c_char,
    pub(super) id: i64,
    pub(super) cookie: u64,
}

/// `rbd_snap_info_t` of `rbd/librbd.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Snapshot {
    pub(super) id: u64,
    pub(super) size_bytes: u64,
    pub(super) name: Text,
}

/// `rbd_linked_image_spec_t` of `rbd/librbd.h`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct LinkedImage {
    pub(super) pool_id: i64,
    pub(super) pool: *mut c_char,
    pub(super) namespace: *mut c_char,
    pub(super) id: *mut c_char,
    pub(super) name: *mut c_char,
    pub(super) is_in_trash: bool,
}

macro_rules! api {
    ($($library:ident { $(fn $name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)* })*) => {
        /// The entry points of librados and librbd, found at run time, never unloaded.
        pub(super) struct Api {
            $($(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*)*
            $(#[expect(dead_code, reason = "keeps the pointers good")] $library: Library,)*
        }

        impl Api {
            fn load() -> Result<Api, String> {
                $(let $library = open(concat!("lib", stringify!($library)))?;)*
                // SAFETY: the names and types are those of rados/librados.h and rbd/librbd.h, whose
                // libraries keep one binary interface under their file names; the libraries stay
                // loaded with the pointers.
                unsafe {
                    Ok(Api { $($($name: *$library
                        .get(concat!(stringify!($name), "\0").as_bytes())
                        .map_err(|e| format!(
                            "librbd is older than Ceph 16 (pacific): {}; install a later one",
                            reason(&e)
                        ))?,)*)* $($library,)* })
                }
            }
        }
    };
}

type AioCallback = unsafe extern "C" fn(Handle, *mut c_void);
type ProgressCallback = extern "C" fn(u64, u64, *mut c_void) -> c_int;
type DiffCallback = extern "C" fn(u64, usize, c_int, *mut c_void) -> c_int;

api! {
    rados {
        fn rados_version(*mut c_int, *mut c_int, *mut c_int);
        fn rados_create2(*mut Handle, Text, Text, u64) -> c_int;
        fn rados_conf_read_file(Handle, Text) -> c_int;
        fn rados_conf_set(Handle, Text, Text) -> c_int;
        fn rados_connect(Handle) -> c_int;
        fn rados_shutdown(Handle);
        fn rados_cluster_fsid(Handle, *mut c_char, usize) -> c_int;
        fn rados_getaddrs(Handle, *mut *mut c_char) -> c_int;
        fn rados_buffer_free(*mut c_char);
        fn rados_blocklist_add(Handle, *mut c_char, u32) -> c_int;
        fn rados_wait_for_latest_osdmap(Handle) -> c_int;
        fn rados_ioctx_create(Handle, Text, *mut Handle) -> c_int;
        fn rados_ioctx_destroy(Handle);
        fn rados_ioctx_set_namespace(Handle, Text);
        fn rados_set_pool_full_try(Handle);
        fn rados_get_last_version(Handle) -> u64;
        fn rados_remove(Handle, Text) -> c_int;
        fn rados_read(Handle, Text, *mut c_char, usize, u64) -> c_int;
        fn rados_create_read_op() -> Handle;
        fn rados_release_read_op(Handle);
        fn rados_read_op_assert_version(Handle, u64);
        fn rados_read_op_omap_get_vals2(
            Handle, Text, Text, u64, *mut Handle, *mut u8, *mut c_int);
        fn rados_read_op_operate(Handle, Handle, Text, c_int) -> c_int;
        fn rados_omap_get_next2(
            Handle, *mut *mut c_char, *mut *mut c_char, *mut usize, *mut usize) -> c_int;
        fn rados_omap_get_end(Handle);
        fn rados_create_write_op() -> Handle;
        fn rados_release_write_op(Handle);
        fn rados_write_op_create(Handle, c_int, Text);
        fn rados_write_op_assert_exists(Handle);
        fn rados_write_op_omap_cmp2(Handle, Text, u8, Text, usize, usize, *mut c_int);
        fn rados_write_op_omap_set2(
            Handle, *const Text, *const Text, *const usize, *const usize, usize);
        fn rados_write_op_omap_rm_keys2(Handle, *const Text, *const usize, usize);
        fn rados_write_op_operate2(Handle, Handle, Text, *mut libc::timespec, c_int) -> c_int;
    }
    rbd {
        fn rbd_open(Handle, Text, *mut Handle, Text) -> c_int;
        fn rbd_open_read_only(Handle, Text, *mut Handle, Text) -> c_int;
        fn rbd_open_by_id_read_only(Handle, Text, *mut Handle, Text) -> c_int;
        fn rbd_close(Handle) -> c_int;
        fn rbd_create4(Handle, Text, u64, Handle) -> c_int;
        fn rbd_remove(Handle, Text) -> c_int;
        fn rbd_trash_move(Handle, Text, u64) -> c_int;
        fn rbd_trash_remove(Handle, Text, bool) -> c_int;
        fn rbd_diff_iterate2(
            Handle, Text, u64, u64, u8, u8, DiffCallback, *mut c_void) -> c_int;
        fn rbd_get_size(Handle, *mut u64) -> c_int;
        fn rbd_get_features(Handle, *mut u64) -> c_int;
        fn rbd_get_stripe_unit(Handle, *mut u64) -> c_int;
        fn rbd_get_id(Handle, *mut c_char, usize) -> c_int;
        fn rbd_snap_create2(Handle, Text, u32, ProgressCallback, *mut c_void) -> c_int;
        fn rbd_snap_remove(Handle, Text) -> c_int;
        fn rbd_snap_protect(Handle, Text) -> c_int;
        fn rbd_snap_unprotect(Handle, Text) -> c_int;
        fn rbd_snap_set(Handle, Text) -> c_int;
        fn rbd_snap_is_protected(Handle, Text, *mut c_int) -> c_int;
        fn rbd_snap_get_id(Handle, Text, *mut u64) -> c_int;
        fn rbd_snap_get_namespace_type(Handle, u64, *mut c_int) -> c_int;
        fn rbd_snap_get_timestamp(Handle, u64, *mut libc::timespec) -> c_int;
        fn rbd_snap_list(Handle, *mut Snapshot, *mut c_int) -> c_int;
        fn rbd_snap_list_end(*mut Snapshot);
        fn rbd_list_children3(Handle, *mut LinkedImage, *mut usize) -> c_int;
        fn rbd_linked_image_spec_list_cleanup(*mut LinkedImage, usize);
        fn rbd_clone3(Handle, Text, Text, Handle, Text, Handle) -> c_int;
        fn rbd_image_options_create(*mut Handle);
        fn rbd_image_options_set_uint64(Handle, c_int, u64) -> c_int;
        fn rbd_image_options_destroy(Handle);
        fn rbd_config_image_list(Handle, *mut ConfigOption, *mut c_int) -> c_int;
        fn rbd_config_image_list_cleanup(*mut ConfigOption, c_int);
        fn rbd_lock_acquire(Handle, c_int) -> c_int;
        fn rbd_lock_release(Handle) -> c_int;
        fn rbd_lock_get_owners(Handle, *mut c_int, *mut *mut c_char, *mut usize) -> c_int;
        fn rbd_lock_get_owners_cleanup(*mut *mut c_char, usize);
        fn rbd_watchers_list(Handle, *mut Watcher, *mut usize) -> c_int;
        fn rbd_watchers_list_cleanup(*mut Watcher, usize);
        fn rbd_lock_break(Handle, c_int, Text) -> c_int;
        fn rbd_is_exclusive_lock_owner(Handle, *mut c_int) -> c_int;
        fn rbd_aio_create_completion(*mut c_void, Option<AioCallback>, *mut Handle) -> c_int;
        fn rbd_aio_get_return_value(Handle) -> isize;
        fn rbd_aio_wait_for_complete(Handle) -> c_int;
        fn rbd_aio_release(Handle);
        fn rbd_aio_read2(Handle, u64, usize, *mut c_char, Handle, c_int) -> c_int;
        fn rbd_aio_write2(Handle, u64, usize, Text, Handle, c_int) -> c_int;
        fn rbd_aio_write_zeroes(Handle, u64, usize, Handle, c_int, c_int) -> c_int;
        fn rbd_aio_flush(Handle, Handle) -> c_int;
    }
}

fn open(name: &str) -> Result<Library, String> {
    let file = if name == "librados" { "librados.so.2" } else { "librbd.so.1" };
    // SAFETY: initialisers of these libraries register types and nothing else.
    unsafe { Library::new(file) }.map_err(|e| {
        format!(
            "an RBD image needs librbd and librados of Ceph ({}); on Debian and Ubuntu: \
             apt install librbd1 librados2; elsewhere: the packages librbd1 and librados2 of Ceph",
            reason(&e)
        )
    })
}

/// What the dynamic linker said.
fn reason(e: &libloading::Error) -> String {
    std::error::Error::source(e).map_or_else(|| e.to_string(), ToString::to_string)
}

impl Api {
    /// The libraries, loaded on first use.
    pub(super) fn get() -> Result<&'static Api, String> {
        static API: OnceLock<Result<Api, String>> = OnceLock::new();
        API.get_or_init(Api::load).as_ref().map_err(Clone::clone)
    }
}
