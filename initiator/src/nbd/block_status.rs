//! The extents of a reply to Block Status: which blocks are holes, and read as zeros.

use super::command_flag::REQ_ONE;
use super::{Command, Kind};

/// Bytes of an extent.
const EXTENT_BYTES: usize = 8;
/// Flags of `base:allocation`: a hole (1) that reads as zeros (2).
const HOLE: u32 = 3;
const DATA: u32 = 0;

/// The extents of a reply, encoded.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct BlockStatus(Vec<u8>);

impl BlockStatus {
    /// Determines the extents of a command: `at` returns for an offset whether there are data, and the
    /// end of these or of the hole; `None` if that is not known. What is behind that is not in the
    /// reply, unless it is the first extent: then all of it counts as data.
    pub fn find(&mut self, command: &Command, at: impl Fn(u64) -> Option<(bool, u64)>) {
        self.0.clear();
        if command.kind != Kind::BlockStatus {
            return;
        }
        let most = if command.flags & REQ_ONE != 0 { 1 } else { usize::MAX };
        let (mut offset, end) = (command.offset, command.offset.saturating_add(command.len.into()));
        while offset < end
            && self.count() < most
            && let Some((is_data, until)) = at(offset)
        {
            let until = until.clamp(offset, end);
            if until == offset {
                break;
            }
            self.push((until - offset) as u32, if is_data { DATA } else { HOLE });
            offset = until;
        }
        if self.0.is_empty() {
            self.push(command.len, DATA);
        }
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    fn count(&self) -> usize {
        self.0.len() / EXTENT_BYTES
    }

    fn push(&mut self, len: u32, flags: u32) {
        self.0.extend(len.to_be_bytes());
        self.0.extend(flags.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(flags: u16, at: impl Fn(u64) -> Option<(bool, u64)>) -> Vec<(u32, u32)> {
        let command =
            Command { kind: Kind::BlockStatus, flags, cookie: 0, offset: 4096, len: 16384 };
        let mut status = BlockStatus::default();
        status.find(&command, at);
        let number = |bytes: &[u8]| u32::from_be_bytes(*bytes.first_chunk().expect("4 bytes"));
        status.bytes().chunks(8).map(|it| (number(it), number(&it[4..]))).collect()
    }

    #[test]
    fn extents_cover_what_is_known_and_nothing_known_is_data() {
        let alternating =
            |offset: u64| Some(((offset / 8192).is_multiple_of(2), (offset / 8192 + 1) * 8192));
        assert_eq!(found(0, alternating), [(4096, 0), (8192, 3), (4096, 0)]);
        assert_eq!(found(REQ_ONE, alternating), [(4096, 0)]);
        let known = |offset: u64| alternating(offset).filter(|_| offset < 16384);
        assert_eq!(found(0, known), [(4096, 0), (8192, 3)]);
        assert_eq!(found(0, |_| Some((false, u64::MAX))), [(16384, 3)]);
        assert_eq!(found(0, |_| None), [(16384, 0)]);
        assert_eq!(found(0, |_| Some((false, 0))), [(16384, 0)], "an end before the beginning");
    }
}
