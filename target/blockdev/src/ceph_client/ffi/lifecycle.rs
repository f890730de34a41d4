//! Images that are made and removed.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use nix::errno::Errno;

use super::image::{FEATURE_EXCLUSIVE_LOCK, FEATURE_LAYERING};
use super::{Image, Pool, c, check};

/// `RBD_IMAGE_OPTION_FEATURES`.
const FEATURES: c_int = 1;
/// `RBD_FEATURE_OBJECT_MAP`.
const FEATURE_OBJECT_MAP: u64 = 1 << 3;
/// `RBD_FEATURE_FAST_DIFF`.
const FEATURE_FAST_DIFF: u64 = 1 << 4;

/// Makes an image, all of whose blocks read as zeros. Blocks as long as the cluster does not answer.
///
/// # Errors
/// EEXIST: there is an image with this name; else the errno.
pub(crate) fn create_image(pool: &Pool, name: &str, size_bytes: u64) -> Result<(), Errno> {
    let (api, name, mut options) = (pool.api(), c(name)?, null_mut());
    let features =
        FEATURE_LAYERING | FEATURE_EXCLUSIVE_LOCK | FEATURE_OBJECT_MAP | FEATURE_FAST_DIFF;
    // SAFETY: the library makes the options, which are released once; the pool is live, and the name
    // ends with a zero.
    let made = unsafe {
        (api.rbd_image_options_create)(&raw mut options);
        let made = check((api.rbd_image_options_set_uint64)(options, FEATURES, features));
        let made = made
            .and_then(|_| check((api.rbd_create4)(pool.raw, name.as_ptr(), size_bytes, options)));
        (api.rbd_image_options_destroy)(options);
        made
    };
    made.map(drop)
}

/// Removes an image with its data, or what a client that was killed has left of one. Takes as long
/// as it has objects, and blocks as long as the cluster does not answer.
///
/// # Errors
/// ENOENT: there is none; EBUSY: a client has it open; ENOTEMPTY: it has snapshots; else the errno.
pub(crate) fn remove_image(pool: &Pool, name: &str) -> Result<(), Errno> {
    let name = c(name)?;
    // SAFETY: the pool is live, and the name ends with a zero.
    check(unsafe { (pool.api().rbd_remove)(pool.raw, name.as_ptr()) }).map(drop)
}

/// Moves an image to the trash of its pool, or ends a move that a client that was killed has begun.
/// Blocks as long as the cluster does not answer.
///
/// # Errors
/// ENOENT: there is none; else the errno.
pub(crate) fn move_to_trash(pool: &Pool, name: &str) -> Result<(), Errno> {
    let (name, delay_seconds) = (c(name)?, 0);
    // SAFETY: the pool is live, and the name ends with a zero.
    check(unsafe { (pool.api().rbd_trash_move)(pool.raw, name.as_ptr(), delay_seconds) }).map(drop)
}

/// Removes the image with this id, which is in the trash, with its data, or what an earlier removal
/// has left of it. Takes as long as it has objects, and blocks as long as the cluster does not answer.
///
/// # Errors
/// ENOENT: there is none; EPERM: it is kept in the trash for some time; EBUSY: a client has it open;
/// ENOTEMPTY: it has snapshots; else the errno.
pub(crate) fn remove_from_trash(pool: &Pool, id: &str) -> Result<(), Errno> {
    let (id, force) = (c(id)?, false);
    // SAFETY: the pool is live, and the id ends with a zero.
    check(unsafe { (pool.api().rbd_trash_remove)(pool.raw, id.as_ptr(), force) }).map(drop)
}

/// Ends the search for data at the first range that has some.
extern "C" fn end_search(_: u64, _: usize, _: c_int, _: *mut c_void) -> c_int {
    -libc::EEXIST
}

impl Image {
    /// Whether nobody has written to it: no object has data, of itself or of a parent. Blocks as
    /// long as the cluster does not answer.
    pub(crate) fn is_unwritten(&self) -> Result<bool, Errno> {
        let size_bytes = self.size_bytes()?;
        let (with_parent, whole_objects) = (1, 1);
        // SAFETY: the image is live; without a name the search begins with nothing; the callback
        // uses no memory.
        let searched = check(unsafe {
            (self.api().rbd_diff_iterate2)(
                self.raw,
                null(),
                0,
                size_bytes,
                with_parent,
                whole_objects,
                end_search,
                null_mut(),
            )
        });
        match searched {
            Ok(_) => Ok(true),
            Err(Errno::EEXIST) => Ok(false),
            Err(errno) => Err(errno),
        }
    }
}
