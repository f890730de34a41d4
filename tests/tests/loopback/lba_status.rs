//! Get LBA Status: which blocks hosts are told to be allocated.

use initiator::Host;
use initiator::host::Range;
use nvme::Sgl;
use nvme::lba_status::{
    ActionType, CompletionCondition, GetLbaStatus, LbaStatusDescriptor, LbaStatusHeader,
};

use crate::target::{BLOCKS, TestTarget};

const FILE: Range = Range { nsid: 1, slba: 0, block_bytes: 4096 };
const RAM: Range = Range { nsid: 2, slba: 0, block_bytes: 512 };

/// First blocks and ends of the allocated blocks from there on, and whether these are all.
pub(crate) fn allocated(
    host: &mut Host,
    nsid: u32,
    slba: u64,
    bytes: usize,
) -> (Vec<(u64, u64)>, bool) {
    let mndw_z = (bytes / 4 - 1) as u32;
    let get = GetLbaStatus { nsid, slba, mndw_z, rl: 0, action: ActionType::ALLOCATED };
    let mut list = vec![0xEE; bytes];
    host.command_in(0, "Get LBA Status", get.emit(Sgl::NONE), &mut list).expect("the list");
    let header = LbaStatusHeader::parse(list.first_chunk().expect("a header"));
    let ends = |it: LbaStatusDescriptor| (it.dslba, it.dslba + it.blocks());
    let extents: Vec<_> = LbaStatusDescriptor::parse_all(&list).map(ends).collect();
    assert_eq!(extents.len(), header.nlsd as usize);
    (extents, header.cmpc == CompletionCondition::COMPLETE)
}

#[test]
fn holes_of_files_and_memory_are_not_reported_as_allocated() {
    let target = TestTarget::start();
    let mut host = target.connect(1);
    // The file system and the memory allocate 4096 bytes.
    for (range, per_page) in [(FILE, 1), (RAM, 8)] {
        let nsid = range.nsid;
        assert_eq!(allocated(&mut host, nsid, 0, 4096), (vec![], true));
        let at = |slba| Range { slba, ..range };
        let block = vec![0x5A; range.block_bytes as usize];
        for slba in [0, 16, 48] {
            host.write(at(slba), &block, false).expect("written");
        }
        let all = [(0, per_page), (16, 16 + per_page), (48, 48 + per_page)];
        assert_eq!(allocated(&mut host, nsid, 0, 4096), (all.to_vec(), true));
        assert_eq!(allocated(&mut host, nsid, 17, 4096).0.last(), Some(&all[2]));
        assert_eq!(allocated(&mut host, nsid, 0, 8 + 32), (all[..2].to_vec(), false));
        host.deallocate(nsid, 16, 8).expect("deallocated");
        assert_eq!(allocated(&mut host, nsid, 0, 4096), (vec![all[0], all[2]], true));
    }
    // Longer than what is sent at once.
    host.write(Range { slba: BLOCKS - 1, ..FILE }, &[1; 4096], false).expect("written");
    let (found, is_complete) = allocated(&mut host, 1, 0, 64 << 10);
    assert_eq!((found.last(), is_complete), (Some(&(BLOCKS - 1, BLOCKS)), true));
    host.disconnect();
}

/// Writes of one host beside the questions of another, in scattered blocks.
#[test]
fn a_block_whose_write_was_acknowledged_is_reported_as_allocated() {
    let target = TestTarget::start();
    let (mut writer, mut asker) = (target.connect(1), target.connect_elsewhere(1));
    for step in 0..500 {
        let slba = step * 4099 % BLOCKS;
        writer.write(Range { slba, ..FILE }, &[0x5A; 4096], false).expect("written");
        let (found, _) = allocated(&mut asker, 1, slba, 8 + 16);
        assert!(found.first().is_some_and(|(from, _)| *from == slba), "{slba}: {found:?}");
    }
    writer.disconnect();
    asker.disconnect();
}
