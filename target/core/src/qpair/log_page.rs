//! Pages: data made for a command, of a log or of a structure. A page of any length is sent in pieces
//! through one small buffer: a host cannot take many data buffers by requesting pages, and the few that
//! are reserved for admin commands suffice when a device holds all others.

use rdma::{Pool, Remote};

use super::request::Request;
use crate::command::Plan;

/// Maximum of bytes of a page that are pushed at once.
pub(super) const AT_ONCE_BYTES: u32 = 16 << 10;

/// Prepares a page, padded with zeros to the length that the host has requested, to be pushed;
/// returns the destination.
pub(super) fn begin(entry: &mut Request, pool: &mut Pool) -> Option<Remote> {
    let Plan::Give { to, .. } = entry.plan else { return None };
    if to.len > AT_ONCE_BYTES {
        entry.make_ext().pieces.cut(to, AT_ONCE_BYTES);
    }
    if !entry.is_scattered() {
        fill(entry, 0, to.len, pool);
    }
    Some(to)
}

/// Copies the part of a page that is pushed next to its buffer: `len` bytes from offset `skip`.
pub(super) fn fill(entry: &mut Request, skip: u32, len: u32, pool: &mut Pool) {
    let (Plan::Give { page, .. }, Some(data)) = (&mut entry.plan, &mut entry.data) else {
        return;
    };
    data.select(0, len);
    let bytes = pool.bytes_mut(data);
    let rest = page.get(skip as usize..).unwrap_or_default();
    let (there, zeros) = bytes.split_at_mut(rest.len().min(bytes.len()));
    there.copy_from_slice(&rest[..there.len()]);
    zeros.fill(0);
    if there.len() == rest.len() {
        // Only zeros follow.
        *page = Vec::new();
    }
}
