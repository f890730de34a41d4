//! Which blocks of the namespace are allocated, as a controller tells.

use nvme::lba_status::{CompletionCondition, LbaStatusDescriptor, LbaStatusHeader};
use rdma::Pool;

use super::BlockDone;

/// The allocated blocks of a range. Others in it were not written before the command was sent, and
/// read as zeros if the namespace says so
/// ([`Namespace::tells_allocation`](super::Namespace::tells_allocation)).
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// First blocks and ends, ascending.
    extents: Vec<(u64, u64)>,
    /// The end of the range that the controller has told about; `None`: that of the namespace, or of
    /// the blocks that were asked for.
    end: Option<u64>,
}

impl Allocation {
    /// Reads what [`Operation::LbaStatus`](super::Operation::LbaStatus) from this block on has
    /// returned. None if it does not say for certain what is not allocated.
    pub fn of(slba: u64, done: BlockDone, pool: &mut Pool) -> Option<Allocation> {
        let list = done.data?;
        let found = done.outcome.ok().and_then(|()| Allocation::parse(slba, pool.bytes(&list)));
        pool.give(list);
        found
    }

    fn parse(slba: u64, list: &[u8]) -> Option<Allocation> {
        let header = LbaStatusHeader::parse(list.first_chunk()?);
        let mut extents: Vec<(u64, u64)> = Vec::new();
        let mut end = slba;
        for descriptor in LbaStatusDescriptor::parse_all(list) {
            let first = descriptor.dslba;
            if first < end {
                return None;
            }
            end = first.checked_add(descriptor.blocks())?;
            extents.push((first, end));
        }
        if extents.len() as u64 != u64::from(header.nlsd) {
            return None;
        }
        // Any other condition does not say what is behind the last descriptor.
        let is_complete = header.cmpc == CompletionCondition::COMPLETE;
        (is_complete || end > slba)
            .then(|| Allocation { extents, end: Some(end).filter(|_| !is_complete) })
    }

    /// Whether a block is allocated, and the end of the blocks of which that holds, too; at most
    /// `end`. Nothing is known of blocks that the controller has not told about.
    pub fn at(&self, block: u64, end: u64) -> Option<(bool, u64)> {
        let end = self.end.map_or(end, |told| told.min(end));
        if block >= end {
            return None;
        }
        let next = self.extents.partition_point(|(_, until)| *until <= block);
        Some(match self.extents.get(next) {
            Some(&(first, until)) if first <= block => (true, until.min(end)),
            Some(&(first, _)) => (false, first.min(end)),
            None => (false, end),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(nlsd: u32, cmpc: u8, entries: &[(u64, u32)]) -> Vec<u8> {
        let cmpc = CompletionCondition(cmpc);
        let mut list = LbaStatusHeader { nlsd, cmpc }.emit().to_vec();
        for &(dslba, nlb_z) in entries {
            list.extend(LbaStatusDescriptor { dslba, nlb_z, status: 2 }.emit());
        }
        list
    }

    #[test]
    fn an_incomplete_list_covers_blocks_up_to_its_last_descriptor() {
        let entries = [(8, 7), (32, 0)];
        let complete = Allocation::parse(8, &list(2, 2, &entries)).expect("valid");
        for (block, end, expected) in [
            (8, 100, Some((true, 16))),
            (15, 100, Some((true, 16))),
            (8, 12, Some((true, 12))),
            (16, 100, Some((false, 32))),
            (16, 20, Some((false, 20))),
            (32, 100, Some((true, 33))),
            (33, 100, Some((false, 100))),
            (100, 100, None),
        ] {
            assert_eq!(complete.at(block, end), expected, "{block} {end}");
        }
        for incomplete in [0, 1, 3] {
            let found = Allocation::parse(8, &list(2, incomplete, &entries)).expect("valid");
            assert_eq!(found.at(16, 100), Some((false, 32)));
            assert_eq!(found.at(33, 100), None, "behind the last descriptor");
        }
        let nothing = Allocation::parse(8, &list(0, 2, &[])).expect("valid");
        assert_eq!(nothing.at(8, 100), Some((false, 100)));
    }

    #[test]
    fn invalid_descriptor_lists_are_ignored() {
        for (what, list) in [
            ("too short", vec![0; 7]),
            ("incomplete without descriptors", list(0, 1, &[])),
            ("no condition and no descriptors", list(0, 0, &[])),
            ("begins before the range", list(1, 2, &[(7, 0)])),
            ("not ascending", list(2, 2, &[(32, 0), (8, 7)])),
            ("overlapping", list(2, 2, &[(8, 7), (15, 7)])),
            ("ends behind all blocks", list(1, 2, &[(u64::MAX, 0)])),
            ("more descriptors than data", list(3, 2, &[(8, 7), (32, 0)])),
            ("as many as possible", list(u32::MAX, 2, &[(8, 7)])),
        ] {
            assert_eq!(Allocation::parse(8, &list), None, "{what}");
        }
    }
}
