//! Keys and values of an object: read as they were at one time, changed by one atomic operation.

use std::ffi::{c_char, c_int};
use std::ptr::{null, null_mut};
use std::slice::from_raw_parts;

use nix::errno::Errno;

use super::load::Text;
use super::{Api, Handle, Pool, c, check};

/// `LIBRADOS_CREATE_IDEMPOTENT`.
const IDEMPOTENT: c_int = 0;
/// `LIBRADOS_CMPXATTR_OP_EQ`.
const EQUAL: u8 = 1;
/// OSDs return at most this many keys at once.
const PAGE_KEYS: u64 = 1024;

/// At most this much of the data of an object is read.
const OBJECT_BYTES: usize = 1024;

/// Keys and values, in the order of keys.
pub(crate) type Pairs = Vec<(String, Vec<u8>)>;

/// Some of the keys of an object.
pub(crate) struct Page {
    pub(crate) pairs: Pairs,
    /// There are more keys after them.
    pub(crate) more: bool,
}

/// What the library writes for one range of keys.
struct Reply {
    iterator: Handle,
    more: u8,
    code: c_int,
}

/// A change of an object: all of it or nothing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Change<'a> {
    pub(crate) create: bool,
    pub(crate) compare: &'a [(String, Option<Vec<u8>>)],
    pub(crate) set: &'a [(String, Vec<u8>)],
    pub(crate) remove: &'a [String],
}

impl Pool {
    /// Of each range, keys that begin with its first text and are after its second one: all as they
    /// were at one time, with the version of the object; of this version, if one is named.
    /// Exclusive, because the library keeps the version in the handle.
    ///
    /// # Errors
    /// ENOENT: there is no such object; ERANGE or EOVERFLOW: it has another version; else the errno.
    pub(crate) fn read_omap(
        &mut self,
        object: &str,
        ranges: &[(&str, String)],
        version: Option<u64>,
    ) -> Result<(Vec<Page>, u64), Errno> {
        let (api, object) = (self.api(), c(object)?);
        let texts = ranges.iter().map(|(prefix, after)| Ok((c(prefix)?, c(after)?)));
        let texts = texts.collect::<Result<Vec<_>, Errno>>()?;
        let none = || Reply { iterator: null_mut(), more: 0, code: 0 };
        let mut replies: Vec<Reply> = ranges.iter().map(|_| none()).collect();
        // SAFETY: the operation and the iterators are live from here to their release; the replies
        // are not moved, and outlive the call that writes them; texts end with a zero.
        unsafe {
            let op = (api.rados_create_read_op)();
            if let Some(version) = version {
                (api.rados_read_op_assert_version)(op, version);
            }
            for ((prefix, after), reply) in texts.iter().zip(&mut replies) {
                (api.rados_read_op_omap_get_vals2)(
                    op,
                    after.as_ptr(),
                    prefix.as_ptr(),
                    PAGE_KEYS,
                    &raw mut reply.iterator,
                    &raw mut reply.more,
                    &raw mut reply.code,
                );
            }
            let outcome = check((api.rados_read_op_operate)(op, self.raw, object.as_ptr(), 0));
            let version = (api.rados_get_last_version)(self.raw);
            let page = |reply: &Reply| {
                check(reply.code)?;
                Ok(Page { pairs: collect(api, reply.iterator)?, more: reply.more != 0 })
            };
            let pages = outcome.and_then(|_| replies.iter().map(page).collect());
            replies.iter().for_each(|reply| (api.rados_omap_get_end)(reply.iterator));
            (api.rados_release_read_op)(op);
            pages.map(|pages| (pages, version))
        }
    }

    /// Changes an object, if all comparisons hold. A missing key compares as an empty value.
    ///
    /// # Errors
    /// ECANCELED: a comparison does not hold; ENOENT: there is no such object, and it is not to be
    /// created; ETIMEDOUT: it may have happened, or happen later; else the errno.
    pub(crate) fn change_omap(&self, object: &str, change: Change<'_>) -> Result<(), Errno> {
        let (api, object) = (self.api(), c(object)?);
        let (keys, key_lengths) = arrays(change.set.iter().map(|(key, _)| key.as_bytes()));
        let (values, lengths) = arrays(change.set.iter().map(|(_, value)| value.as_slice()));
        let (removed, removed_lengths) = arrays(change.remove.iter().map(String::as_bytes));
        // SAFETY: the operation is live from here to its release. Keys and values are counted, not
        // ended by a zero, and borrowed beyond the call that sends them.
        unsafe {
            let op = (api.rados_create_write_op)();
            if change.create {
                (api.rados_write_op_create)(op, IDEMPOTENT, null());
            } else {
                (api.rados_write_op_assert_exists)(op);
            }
            for (key, value) in change.compare {
                let value = value.as_deref().unwrap_or_default();
                (api.rados_write_op_omap_cmp2)(
                    op,
                    key.as_ptr().cast(),
                    EQUAL,
                    value.as_ptr().cast(),
                    key.len(),
                    value.len(),
                    null_mut(),
                );
            }
            if !keys.is_empty() {
                (api.rados_write_op_omap_set2)(
                    op,
                    keys.as_ptr(),
                    values.as_ptr(),
                    key_lengths.as_ptr(),
                    lengths.as_ptr(),
                    keys.len(),
                );
            }
            if !removed.is_empty() {
                (api.rados_write_op_omap_rm_keys2)(
                    op,
                    removed.as_ptr(),
                    removed_lengths.as_ptr(),
                    removed.len(),
                );
            }
            let code = (api.rados_write_op_operate2)(op, self.raw, object.as_ptr(), null_mut(), 0);
            (api.rados_release_write_op)(op);
            check(code).map(drop)
        }
    }

    /// The first bytes of an object. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// ENOENT: there is no such object; else the errno.
    pub(crate) fn read_object(&self, object: &str) -> Result<Vec<u8>, Errno> {
        let (object, mut bytes) = (c(object)?, vec![0; OBJECT_BYTES]);
        // SAFETY: the handle is live, the text ends with a zero, and the library writes at most as
        // many bytes as there are.
        let read = check(unsafe {
            (self.api().rados_read)(
                self.raw,
                object.as_ptr(),
                bytes.as_mut_ptr().cast(),
                bytes.len(),
                0,
            )
        })?;
        bytes.truncate(read as usize);
        Ok(bytes)
    }

    /// Removes an object with all its keys.
    ///
    /// # Errors
    /// ENOENT: there is none; else the errno.
    pub(crate) fn remove_object(&self, object: &str) -> Result<(), Errno> {
        let object = c(object)?;
        // SAFETY: the handle is live, and the text ends with a zero.
        check(unsafe { (self.api().rados_remove)(self.raw, object.as_ptr()) }).map(drop)
    }
}

/// Pointers and lengths.
fn arrays<'a>(parts: impl Iterator<Item = &'a [u8]>) -> (Vec<Text>, Vec<usize>) {
    parts.map(|part| (part.as_ptr().cast(), part.len())).unzip()
}

/// What an iterator has.
///
/// # Safety
/// It is live, and the operation that fills it has succeeded.
unsafe fn collect(api: &Api, iterator: Handle) -> Result<Pairs, Errno> {
    let mut pairs = Vec::new();
    loop {
        let (mut key, mut value, mut key_length, mut length) = (null_mut(), null_mut(), 0, 0);
        // SAFETY: live as the caller says; two pointers and two lengths are written.
        check(unsafe {
            (api.rados_omap_get_next2)(
                iterator,
                &raw mut key,
                &raw mut value,
                &raw mut key_length,
                &raw mut length,
            )
        })?;
        if key.is_null() {
            return Ok(pairs);
        }
        let copy = |at: *mut c_char, length| match at.is_null() || length == 0 {
            true => Vec::new(),
            // SAFETY: the iterator keeps keys and values until it is released.
            false => unsafe { from_raw_parts(at.cast::<u8>(), length) }.to_vec(),
        };
        let key = String::from_utf8(copy(key, key_length)).map_err(|_| Errno::EBADMSG)?;
        pairs.push((key, copy(value, length)));
    }
}
