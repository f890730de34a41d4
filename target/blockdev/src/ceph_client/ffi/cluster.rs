//! A client of a cluster (`rados_t`) and its handle of one pool (`rados_ioctx_t`).

use std::ffi::{CStr, c_char};
use std::ptr::{null, null_mut};
use std::sync::Arc;

use nix::errno::Errno;

use super::{Api, Handle, c, check};

/// A connection to a cluster: one address and nonce, so it is fenced as a whole.
pub(crate) struct Client {
    api: &'static Api,
    pub(super) raw: Handle,
}

// SAFETY: an exclusive pointer to an object that locks internally and ties nothing to a thread.
unsafe impl Send for Client {}
// SAFETY: as above; calls on one client from several threads are part of its interface.
unsafe impl Sync for Client {}

impl Client {
    /// The version of the library.
    ///
    /// # Errors
    /// It is not installed, or too old: a sentence.
    pub(crate) fn library_version() -> Result<String, String> {
        let api = Api::get()?;
        let (mut major, mut minor, mut extra) = (0, 0, 0);
        // SAFETY: three places for three numbers.
        unsafe { (api.rados_version)(&raw mut major, &raw mut minor, &raw mut extra) };
        Ok(format!("{major}.{minor}.{extra}"))
    }

    /// A client that is not connected yet, by its full name (`client.nvmfd`).
    ///
    /// # Errors
    /// The library is missing: a sentence. Else the errno.
    pub(crate) fn new(name: &str) -> Result<Result<Client, Errno>, String> {
        let api = Api::get()?;
        let make = || {
            let name = c(name)?;
            let mut raw = null_mut();
            // SAFETY: the library writes the handle; both texts end with a zero.
            check(unsafe {
                (api.rados_create2)(&raw mut raw, c"ceph".as_ptr(), name.as_ptr(), 0)
            })?;
            Ok(Client { api, raw })
        };
        Ok(make())
    }

    /// Reads a configuration file; without a path, those that Ceph looks for.
    ///
    /// # Errors
    /// The errno: ENOENT, if there is none.
    pub(crate) fn read_conf(&self, path: Option<&str>) -> Result<(), Errno> {
        let path = path.map(c).transpose()?;
        let path = path.as_ref().map_or(null(), |path| path.as_ptr());
        // SAFETY: the handle is live; the path is null or ends with a zero.
        check(unsafe { (self.api.rados_conf_read_file)(self.raw, path) }).map(drop)
    }

    /// Sets an option, before [`Client::connect`].
    ///
    /// # Errors
    /// ENOENT: this version does not have the option.
    pub(crate) fn set(&self, option: &str, value: &str) -> Result<(), Errno> {
        let (option, value) = (c(option)?, c(value)?);
        // SAFETY: the handle is live; both texts end with a zero.
        check(unsafe { (self.api.rados_conf_set)(self.raw, option.as_ptr(), value.as_ptr()) })
            .map(drop)
    }

    /// Connects. Blocks up to `client_mount_timeout`.
    pub(crate) fn connect(&self) -> Result<(), Errno> {
        // SAFETY: the handle is live.
        check(unsafe { (self.api.rados_connect)(self.raw) }).map(drop)
    }

    pub(crate) fn cluster_id(&self) -> Result<String, Errno> {
        let mut text = [0 as c_char; 64];
        // SAFETY: the library writes at most this many bytes, with a zero at the end.
        check(unsafe { (self.api.rados_cluster_fsid)(self.raw, text.as_mut_ptr(), text.len()) })?;
        Ok(read_text(&text))
    }

    /// Its address and nonce, as the owner of a lock and in a blocklist.
    pub(crate) fn address(&self) -> Result<String, Errno> {
        let mut text = null_mut();
        // SAFETY: the library allocates a text that ends with a zero.
        check(unsafe { (self.api.rados_getaddrs)(self.raw, &raw mut text) })?;
        // SAFETY: as above; it is released after it has been copied.
        unsafe {
            let address = copied(text);
            (self.api.rados_buffer_free)(text);
            Ok(address)
        }
    }

    /// Excludes the client with an address from the cluster, and waits until this client has the
    /// map that says so: its next operations carry the epoch to the OSDs. Blocks.
    pub(crate) fn blocklist(&self, address: &str, seconds: u32) -> Result<(), Errno> {
        let mut address = c(address)?.into_bytes_with_nul();
        // SAFETY: a text that ends with a zero, and that the library may change.
        check(unsafe {
            (self.api.rados_blocklist_add)(self.raw, address.as_mut_ptr().cast(), seconds)
        })?;
        self.wait_for_latest_map()
    }

    /// Waits until this client has the map of the cluster that the monitors have. Blocks.
    pub(crate) fn wait_for_latest_map(&self) -> Result<(), Errno> {
        // SAFETY: the handle is live.
        check(unsafe { (self.api.rados_wait_for_latest_osdmap)(self.raw) }).map(drop)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // SAFETY: pools and images hold the client, so all of them are closed.
        unsafe { (self.api.rados_shutdown)(self.raw) };
    }
}

/// A pool, and a namespace in it.
pub(crate) struct Pool {
    pub(super) client: Arc<Client>,
    pub(super) raw: Handle,
}

// SAFETY: an exclusive pointer to an object that ties nothing to a thread.
unsafe impl Send for Pool {}
// SAFETY: it is changed in its constructor only; the library allows all else from several threads.
unsafe impl Sync for Pool {}

impl Pool {
    /// A pool, with writes to a full one refused instead of held back.
    ///
    /// # Errors
    /// ENOENT: there is no such pool; else the errno.
    pub(crate) fn new(client: &Arc<Client>, name: &str, namespace: &str) -> Result<Pool, Errno> {
        let (api, mut raw) = (client.api, null_mut());
        let (name, namespace) = (c(name)?, c(namespace)?);
        // SAFETY: the client is live, and the library writes the handle.
        check(unsafe { (api.rados_ioctx_create)(client.raw, name.as_ptr(), &raw mut raw) })?;
        // SAFETY: the handle is live and nobody else has it yet.
        unsafe {
            (api.rados_ioctx_set_namespace)(raw, namespace.as_ptr());
            (api.rados_set_pool_full_try)(raw);
        }
        Ok(Pool { client: Arc::clone(client), raw })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.client.api
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: images hold their pool, so all of them are closed.
        unsafe { (self.api().rados_ioctx_destroy)(self.raw) };
    }
}

/// A text in an array, up to its zero.
pub(super) fn read_text(text: &[c_char]) -> String {
    let bytes = text.iter().map(|byte| *byte as u8).take_while(|byte| *byte != 0);
    String::from_utf8_lossy(&bytes.collect::<Vec<u8>>()).into_owned()
}

/// A copy of a text that the library owns.
///
/// # Safety
/// It is null, or ends with a zero and stays during the call.
pub(super) unsafe fn copied(text: *const c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: guaranteed by the caller.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}
