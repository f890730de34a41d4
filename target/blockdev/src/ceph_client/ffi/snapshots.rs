//! Snapshots and clones of an image.

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use nix::errno::Errno;

use super::cluster::copied;
use super::image::FEATURE_LAYERING;
use super::load::{self, LinkedImage};
use super::{Handle, Image, Pool, c, check};

/// `RBD_SNAP_CREATE_SKIP_QUIESCE`: other clients that have the image open are not asked to stop
/// writing. None of them writes, and one that does not answer would take half a minute.
const SKIP_QUIESCE: u32 = 1;
/// `RBD_SNAP_NAMESPACE_TYPE_USER`: a snapshot that was not removed while it had clones.
const OF_USER: c_int = 0;
/// `RBD_IMAGE_OPTION_CLONE_FORMAT`.
const CLONE_FORMAT: c_int = 12;

/// Maximum number of snapshots of an image, and of clones of a snapshot, that are listed.
const LISTED_MAX: usize = 4096;

/// Ends the name of a clone that was moved to the trash.
pub(crate) const IN_TRASH: &str = " (in the trash)";

/// A snapshot of an image.
pub(crate) struct Snapshot {
    pub(crate) name: String,
    pub(crate) size_bytes: u64,
    pub(crate) created_unix_s: u64,
}

extern "C" fn ignore_progress(_: u64, _: u64, _: *mut c_void) -> c_int {
    0
}

impl Image {
    /// Takes a snapshot. Writes that were started before are in it; later ones wait. Blocks as long
    /// as the cluster does not answer, and for five seconds if another client that has the image open
    /// does not; writes go on before that.
    ///
    /// # Errors
    /// EEXIST: there is one with this name; else the errno.
    pub(crate) fn create_snapshot(&self, name: &str) -> Result<(), Errno> {
        let name = c(name)?;
        // SAFETY: the image is live; the name ends with a zero; the callback uses no memory.
        check(unsafe {
            let create = self.api().rbd_snap_create2;
            create(self.raw, name.as_ptr(), SKIP_QUIESCE, ignore_progress, null_mut())
        })
        .map(drop)
    }

    /// Removes a snapshot. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// ENOENT: there is none; EBUSY: it is protected; else the errno.
    pub(crate) fn remove_snapshot(&self, name: &str) -> Result<(), Errno> {
        self.on_snapshot(self.api().rbd_snap_remove, name)
    }

    /// Whether it has the feature `layering`, without which no snapshot can be protected.
    pub(crate) fn has_layering(&self) -> Result<bool, Errno> {
        self.has(FEATURE_LAYERING)
    }

    /// Protects a snapshot from its removal.
    ///
    /// # Errors
    /// EBUSY: it is protected; else the errno.
    pub(crate) fn protect_snapshot(&self, name: &str) -> Result<(), Errno> {
        self.on_snapshot(self.api().rbd_snap_protect, name)
    }

    /// Ends the protection of a snapshot.
    ///
    /// # Errors
    /// EINVAL: it is not protected; else the errno.
    pub(crate) fn unprotect_snapshot(&self, name: &str) -> Result<(), Errno> {
        self.on_snapshot(self.api().rbd_snap_unprotect, name)
    }

    fn on_snapshot(
        &self,
        act: unsafe extern "C" fn(Handle, load::Text) -> c_int,
        name: &str,
    ) -> Result<(), Errno> {
        let name = c(name)?;
        // SAFETY: the image is live, and the name ends with a zero.
        check(unsafe { act(self.raw, name.as_ptr()) }).map(drop)
    }

    /// Whether a snapshot is protected: nobody can remove it before that is ended.
    pub(crate) fn is_protected(&self, name: &str) -> Result<bool, Errno> {
        let (name, mut is_protected) = (c(name)?, 0);
        let place = &raw mut is_protected;
        // SAFETY: the image is live; the name ends with a zero; one number is written.
        check(unsafe { (self.api().rbd_snap_is_protected)(self.raw, name.as_ptr(), place) })?;
        Ok(is_protected != 0)
    }

    /// The id of a snapshot, which no other snapshot of the image gets.
    pub(crate) fn snapshot_id(&self, name: &str) -> Result<u64, Errno> {
        let (name, mut id) = (c(name)?, 0);
        // SAFETY: as above.
        check(unsafe { (self.api().rbd_snap_get_id)(self.raw, name.as_ptr(), &raw mut id) })?;
        Ok(id)
    }

    /// Its snapshots.
    ///
    /// # Errors
    /// The errno; ERANGE: there are too many.
    pub(crate) fn snapshots(&self) -> Result<Vec<Snapshot>, Errno> {
        let none = load::Snapshot { id: 0, size_bytes: 0, name: null() };
        let (mut all, mut count) = (vec![none; LISTED_MAX], LISTED_MAX as c_int);
        // SAFETY: room for `count` snapshots, which the library fills, and ends by one without name.
        let found = check(unsafe {
            (self.api().rbd_snap_list)(self.raw, all.as_mut_ptr(), &raw mut count)
        })?;
        let filled = all.iter().take(usize::try_from(found).unwrap_or(0));
        let snapshots = filled.map(|it| self.snapshot(it)).filter_map(Result::transpose).collect();
        // SAFETY: what the library has allocated for these snapshots is released once.
        unsafe { (self.api().rbd_snap_list_end)(all.as_mut_ptr()) };
        snapshots
    }

    /// A snapshot of the list, unless it was removed while it had clones.
    fn snapshot(&self, listed: &load::Snapshot) -> Result<Option<Snapshot>, Errno> {
        let (api, mut of, mut created) =
            (self.api(), OF_USER, libc::timespec { tv_sec: 0, tv_nsec: 0 });
        // SAFETY: the image is live; a number and a time are written.
        check(unsafe { (api.rbd_snap_get_namespace_type)(self.raw, listed.id, &raw mut of) })?;
        // SAFETY: as above.
        check(unsafe { (api.rbd_snap_get_timestamp)(self.raw, listed.id, &raw mut created) })?;
        Ok((of == OF_USER).then(|| Snapshot {
            // SAFETY: the list is released later.
            name: unsafe { copied(listed.name) },
            size_bytes: listed.size_bytes,
            created_unix_s: created.tv_sec.cast_unsigned(),
        }))
    }

    /// The clones of a snapshot, as the tools of Ceph write them. The image, which is read-only and
    /// serves nobody, reads that snapshot afterwards.
    ///
    /// # Errors
    /// ENOENT: there is no such snapshot, or a clone is being removed; ERANGE: there are too many
    /// clones; else the errno.
    pub(crate) fn clones_of(&self, snapshot: &str) -> Result<Vec<String>, Errno> {
        self.on_snapshot(self.api().rbd_snap_set, snapshot)?;
        let text = null_mut();
        let none = LinkedImage {
            pool_id: 0,
            pool: text,
            namespace: text,
            id: text,
            name: text,
            is_in_trash: false,
        };
        let (mut all, mut count) = (vec![none; LISTED_MAX], LISTED_MAX);
        // SAFETY: room for `count` images, which the library fills and counts.
        check(unsafe {
            (self.api().rbd_list_children3)(self.raw, all.as_mut_ptr(), &raw mut count)
        })?;
        // SAFETY: each of them has three texts, which stay until they are released below.
        let texts =
            |it: &LinkedImage| unsafe { [copied(it.pool), copied(it.namespace), copied(it.name)] };
        let clones = all.iter().take(count).map(|it| {
            let [pool, namespace, name] = texts(it);
            let place = if namespace.is_empty() { pool } else { format!("{pool}/{namespace}") };
            format!("{place}/{name}{}", if it.is_in_trash { IN_TRASH } else { "" })
        });
        let clones = clones.collect();
        // SAFETY: what the library has allocated for these images is released once.
        unsafe { (self.api().rbd_linked_image_spec_list_cleanup)(all.as_mut_ptr(), count) };
        Ok(clones)
    }
}

/// Makes an image of a snapshot, whose blocks it shares; with the features of that image.
///
/// # Errors
/// EEXIST: there is an image with this name; ENOENT: there is no such snapshot; else the errno.
pub(crate) fn clone_snapshot(
    (parent, image, snapshot): (&Pool, &str, &str),
    (pool, clone): (&Pool, &str),
) -> Result<(), Errno> {
    let (api, mut options) = (parent.api(), null_mut());
    let (image, snapshot, clone) = (c(image)?, c(snapshot)?, c(clone)?);
    // SAFETY: the library makes the options, which are released below; both pools are live, and the
    // names end with a zero.
    let made = unsafe {
        (api.rbd_image_options_create)(&raw mut options);
        let made = check((api.rbd_image_options_set_uint64)(options, CLONE_FORMAT, 2));
        let made = made.and_then(|_| {
            let (image, snapshot) = (image.as_ptr(), snapshot.as_ptr());
            let clone =
                (api.rbd_clone3)(parent.raw, image, snapshot, pool.raw, clone.as_ptr(), options);
            check(clone)
        });
        (api.rbd_image_options_destroy)(options);
        made
    };
    made.map(drop)
}
