//! Snapshots of an image.

use nix::errno::Errno;

use super::{Image, c, check};

impl Image {
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
}
