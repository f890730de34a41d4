//! An image (`rbd_image_t`).

use std::ffi::c_char;
use std::ptr::{null, null_mut};
use std::sync::Arc;

use nix::errno::Errno;

use super::cluster::{copied, read_text};
use super::load::{ConfigOption, Watcher};
use super::{Api, CompletionQueue, Handle, Pool, c, check};
use crate::Space;
use crate::step::Step;

/// `RBD_LOCK_MODE_EXCLUSIVE`.
const EXCLUSIVE: i32 = 0;
/// `RBD_WRITE_ZEROES_FLAG_THICK_PROVISION`: keeps the space of the range.
const THICK_PROVISION: i32 = 1;
/// `RBD_FEATURE_LAYERING`.
pub(super) const FEATURE_LAYERING: u64 = 1 << 0;
/// `RBD_FEATURE_EXCLUSIVE_LOCK`.
pub(super) const FEATURE_EXCLUSIVE_LOCK: u64 = 1 << 2;

/// Maximum number of clients that have an image open.
const WATCHERS_MAX: usize = 256;

/// An open image.
pub(crate) struct Image {
    pool: Pool,
    pub(super) raw: Handle,
}

// SAFETY: an exclusive pointer to an object that locks internally and ties nothing to a thread.
unsafe impl Send for Image {}
// SAFETY: as above; calls on one image from several threads are part of its interface.
unsafe impl Sync for Image {}

impl Image {
    /// Opens an image, or a snapshot of it. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// ENOENT: there is no such image or snapshot; else the errno.
    pub(crate) fn open(
        pool: Pool,
        name: &str,
        snapshot: Option<&str>,
        read_only: bool,
    ) -> Result<Image, Errno> {
        let (api, mut raw) = (pool.api(), null_mut());
        let (name, snapshot) = (c(name)?, snapshot.map(c).transpose()?);
        // Of these two only `rbd_open` watches the image. Without that, reads of a removed snapshot
        // return what the image has now.
        let open = match read_only && snapshot.is_none() {
            true => api.rbd_open_read_only,
            false => api.rbd_open,
        };
        let snapshot = snapshot.as_ref().map_or(null(), |snapshot| snapshot.as_ptr());
        // SAFETY: the pool is live, the library writes the handle, the name ends with a zero, and
        // the snapshot is null or does too.
        check(unsafe { open(pool.raw, name.as_ptr(), &raw mut raw, snapshot) })?;
        Ok(Image { pool, raw })
    }

    /// Opens the image with this id, also in the trash, for reading only and without watching it.
    /// Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// The errno.
    pub(crate) fn open_by_id(pool: Pool, id: &str) -> Result<Image, Errno> {
        let (api, mut raw, id) = (pool.api(), null_mut(), c(id)?);
        // SAFETY: the pool is live, the library writes the handle, and the id ends with a zero.
        check(unsafe {
            (api.rbd_open_by_id_read_only)(pool.raw, id.as_ptr(), &raw mut raw, null())
        })?;
        Ok(Image { pool, raw })
    }

    pub(super) fn api(&self) -> &'static Api {
        self.pool.api()
    }

    /// A number that a function of the library writes.
    fn number(&self, of: unsafe extern "C" fn(Handle, *mut u64) -> i32) -> Result<u64, Errno> {
        let mut number = 0;
        // SAFETY: the image is live; one number is written.
        check(unsafe { of(self.raw, &raw mut number) })?;
        Ok(number)
    }

    /// Its size in bytes. Blocks after a change until the cluster answers.
    pub(crate) fn size_bytes(&self) -> Result<u64, Errno> {
        self.number(self.api().rbd_get_size)
    }

    /// Size of its stripes: of its objects, unless it is striped.
    pub(crate) fn stripe_bytes(&self) -> Result<u64, Errno> {
        self.number(self.api().rbd_get_stripe_unit)
    }

    /// Whether it has the feature `exclusive-lock`.
    pub(crate) fn has_exclusive_lock(&self) -> Result<bool, Errno> {
        self.has(FEATURE_EXCLUSIVE_LOCK)
    }

    pub(super) fn has(&self, feature: u64) -> Result<bool, Errno> {
        Ok(self.number(self.api().rbd_get_features)? & feature != 0)
    }

    /// Its id in the pool, which no other image gets.
    pub(crate) fn id(&self) -> Result<String, Errno> {
        let mut text = [0 as c_char; 128];
        // SAFETY: the library writes at most this many bytes, with a zero at the end.
        check(unsafe { (self.api().rbd_get_id)(self.raw, text.as_mut_ptr(), text.len()) })?;
        Ok(read_text(&text))
    }

    /// An option as it is in effect for this image: of the configuration, the pool or the image.
    pub(crate) fn option(&self, name: &str) -> Result<Option<String>, Errno> {
        let api = self.api();
        let mut options = Vec::new();
        for mut count in [512, 4096] {
            options.resize(
                count as usize,
                ConfigOption { name: null_mut(), value: null_mut(), source: 0 },
            );
            // SAFETY: room for `count` options, which the library fills and counts.
            let code = unsafe {
                (api.rbd_config_image_list)(self.raw, options.as_mut_ptr(), &raw mut count)
            };
            match check(code) {
                Err(Errno::ERANGE) => continue,
                outcome => outcome?,
            };
            let filled = options.iter().take(usize::try_from(count).unwrap_or(0));
            // SAFETY: each of them has two texts, which stay until they are released below.
            let found = { filled }.find(|it| unsafe { copied(it.name) } == name);
            // SAFETY: as above.
            let value = found.map(|it| unsafe { copied(it.value) });
            // SAFETY: what the library has allocated for these options is released once.
            unsafe { (api.rbd_config_image_list_cleanup)(options.as_mut_ptr(), count) };
            return Ok(value);
        }
        Err(Errno::ERANGE)
    }

    /// The address of the client that holds its lock.
    pub(crate) fn lock_owner(&self) -> Result<Option<String>, Errno> {
        let (mut mode, mut owners, mut count) = (0, [null_mut(); 8], 8);
        // SAFETY: room for `count` pointers, which the library fills and counts.
        let code = unsafe {
            (self.api().rbd_lock_get_owners)(
                self.raw,
                &raw mut mode,
                owners.as_mut_ptr(),
                &raw mut count,
            )
        };
        match check(code) {
            Err(Errno::ENOENT) => return Ok(None),
            outcome => outcome?,
        };
        let first = owners.first().filter(|_| count > 0);
        // SAFETY: `count` texts, released once after the first has been copied.
        unsafe {
            let owner = first.map(|owner| copied(*owner));
            (self.api().rbd_lock_get_owners_cleanup)(owners.as_mut_ptr(), count);
            Ok(owner)
        }
    }

    /// The addresses of the clients that have it open, also of those that ended less than half a
    /// minute ago.
    ///
    /// # Errors
    /// The errno; ERANGE: there are too many.
    pub(crate) fn watchers(&self) -> Result<Vec<String>, Errno> {
        let none = Watcher { address: null_mut(), id: 0, cookie: 0 };
        let (mut watchers, mut count) = ([none; WATCHERS_MAX], WATCHERS_MAX);
        // SAFETY: room for `count` watchers, which the library fills and counts.
        check(unsafe {
            (self.api().rbd_watchers_list)(self.raw, watchers.as_mut_ptr(), &raw mut count)
        })?;
        let filled = watchers.iter().take(count);
        // SAFETY: each of them has a text, which stays until it is released below.
        let addresses = filled.map(|it| unsafe { copied(it.address) }).collect();
        // SAFETY: what the library has allocated for these watchers is released once.
        unsafe { (self.api().rbd_watchers_list_cleanup)(watchers.as_mut_ptr(), count) };
        Ok(addresses)
    }

    /// Takes the lock. Blocks for up to half a minute if its owner does not answer.
    ///
    /// # Errors
    /// EROFS: another client holds it.
    pub(crate) fn acquire_lock(&self) -> Result<(), Errno> {
        // SAFETY: the image is live.
        check(unsafe { (self.api().rbd_lock_acquire)(self.raw, EXCLUSIVE) }).map(drop)
    }

    /// Releases the lock, after all operations that were started have completed. Later writes fail
    /// with EROFS. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// EINVAL: it does not hold the lock; else the errno.
    pub(crate) fn release_lock(&self) -> Result<(), Errno> {
        // SAFETY: the image is live.
        check(unsafe { (self.api().rbd_lock_release)(self.raw) }).map(drop)
    }

    /// Removes the lock of a client that has been excluded from the cluster.
    pub(crate) fn break_lock(&self, owner: &str) -> Result<(), Errno> {
        let owner = c(owner)?;
        // SAFETY: the image is live, and the text ends with a zero.
        check(unsafe { (self.api().rbd_lock_break)(self.raw, EXCLUSIVE, owner.as_ptr()) }).map(drop)
    }

    /// Whether this handle holds the lock, as far as its client knows.
    pub(crate) fn is_lock_owner(&self) -> Result<bool, Errno> {
        let mut is_owner = 0;
        // SAFETY: the image is live; one number is written.
        check(unsafe { (self.api().rbd_is_exclusive_lock_owner)(self.raw, &raw mut is_owner) })?;
        Ok(is_owner != 0)
    }

    /// Reads into a buffer. Blocks as long as the cluster does not answer.
    pub(crate) fn read(&self, at: u64, into: &mut [u8]) -> Result<usize, Errno> {
        let (api, mut completion) = (self.api(), null_mut());
        // SAFETY: the library writes the handle; there is no callback.
        check(unsafe { (api.rbd_aio_create_completion)(null_mut(), None, &raw mut completion) })?;
        // SAFETY: the buffer is borrowed until the operation has completed, or was refused.
        let answer = unsafe {
            let data = into.as_mut_ptr().cast();
            let code = (api.rbd_aio_read2)(self.raw, at, into.len(), data, completion, 0);
            let answer = if code < 0 {
                code as isize
            } else {
                (api.rbd_aio_wait_for_complete)(completion);
                (api.rbd_aio_get_return_value)(completion)
            };
            (api.rbd_aio_release)(completion);
            answer
        };
        let errno = || Errno::from_raw(i32::try_from(answer.unsigned_abs()).unwrap_or(libc::EIO));
        usize::try_from(answer).map_err(|_| errno())
    }

    /// Starts the step of the operation in a slot of a ring: its result will be in `queue`. `data`:
    /// the memory of a read or write, else not used. Deallocation goes by Write Zeroes, because
    /// Discard keeps the data of parts of 64 KiB.
    ///
    /// # Safety
    /// `data` stays mapped, and nobody else writes it (or uses it, for a read), until the slot is
    /// taken from the queue. The slot has no other operation until then.
    pub(crate) unsafe fn start(
        &self,
        step: Step,
        data: *mut u8,
        queue: &Arc<CompletionQueue>,
        slot: u32,
    ) {
        let moved = match step {
            Step::Write { len, .. } | Step::Zeros { len, .. } => len,
            Step::Read { .. } | Step::Space { .. } | Step::Sync => 0,
        };
        let moved = i32::try_from(moved).unwrap_or(i32::MAX);
        let Some(completion) = queue.begin(slot, moved) else { return };
        let (api, raw) = (self.api(), self.raw);
        let zero = |at, len: u64, flags| {
            let len = usize::try_from(len).unwrap_or(usize::MAX);
            // SAFETY: the image and the completion are live.
            unsafe { (api.rbd_aio_write_zeroes)(raw, at, len, completion, flags, 0) }
        };
        let code = match step {
            // SAFETY: as above; the memory is as the caller guarantees.
            Step::Read { at, len, .. } => unsafe {
                (api.rbd_aio_read2)(raw, at, len as usize, data.cast(), completion, 0)
            },
            // SAFETY: as above.
            Step::Write { at, len, .. } => unsafe {
                (api.rbd_aio_write2)(raw, at, len as usize, data.cast(), completion, 0)
            },
            Step::Zeros { at, len } => zero(at, len.into(), THICK_PROVISION),
            Step::Space { how: Space::Punch, at, len } => zero(at, len, 0),
            Step::Space { how: Space::ZeroRange, at, len } => zero(at, len, THICK_PROVISION),
            // SAFETY: the image and the completion are live.
            Step::Sync => unsafe { (api.rbd_aio_flush)(raw, completion) },
        };
        if code < 0 {
            queue.refuse(slot, completion, code);
        }
    }
}

impl Drop for Image {
    /// Releases the lock. Blocks until all operations have completed.
    fn drop(&mut self) {
        // SAFETY: nobody else has the handle, and operations hold their image.
        unsafe { (self.api().rbd_close)(self.raw) };
    }
}
