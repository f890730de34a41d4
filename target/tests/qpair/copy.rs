//! Copy and Verify as a queue carries them out.

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::{IoOpcode, Sgl, Sqe, Status};
use nvmfd::blockdev::IoRequest;

use crate::support::{SIZE, World, end_both, keyed};

const BLOCK: usize = 4096;

/// First block and number of blocks, minus one.
type Ranges<'a> = &'a [(u64, u16)];

fn descriptors(ranges: Ranges<'_>, range_bytes: usize) -> Vec<u8> {
    let emit = |&(slba, nlb_z): &(u64, u16)| {
        let mut bytes = vec![0xFF; range_bytes];
        bytes[..32].copy_from_slice(&CopyRange { slba, nlb_z }.emit());
        bytes
    };
    ranges.iter().flat_map(emit).collect()
}

fn copy(sdlba: u64, count: usize, format: u8) -> Copy {
    let flags = CopyFlags(0).with_nr_z((count - 1) as u8).with_format(format);
    Copy { sdlba, flags }
}

fn blocks(world: &World, lba: usize, count: usize) -> Vec<u8> {
    world.disk.blocks[lba * BLOCK..(lba + count) * BLOCK].to_vec()
}

#[test]
fn copy_concatenates_source_ranges_of_both_descriptor_formats() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for (format, bytes, sdlba) in [(0, 32, 100u64), (1, 40, 120)] {
        let ranges = [(9, 0), (3, 3), (12, 1)];
        let data = descriptors(&ranges, bytes);
        let expected: Vec<u8> = [(9, 1), (3, 4), (12, 2)]
            .iter()
            .flat_map(|&(lba, count)| blocks(&world, lba, count))
            .collect();
        // Once in the capsule, once where the host's memory has more than is needed.
        let inline = copy(sdlba, 3, format).emit(1, Sgl::in_capsule(0, data.len() as u32));
        assert!(world.ask(&mut queue, &inline, &data).status.is_success());
        assert_eq!(blocks(&world, sdlba as usize, 7), expected);
        world.memory[..data.len()].copy_from_slice(&data);
        let pulled = copy(sdlba + 8, 3, format).emit(1, keyed(0, 4096));
        assert!(world.ask(&mut queue, &pulled, &[]).status.is_success());
        assert_eq!(blocks(&world, sdlba as usize + 8, 7), expected);
        world.disk.trace.clear();
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn ranges_may_overlap_their_destination() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for (slba, sdlba) in [(10, 12), (12, 10), (10, 10)] {
        let expected = blocks(&world, slba, 8);
        let data = descriptors(&[(slba as u64, 7)], 32);
        let sqe = copy(sdlba as u64, 1, 0).emit(1, Sgl::in_capsule(0, 32));
        assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
        assert_eq!(blocks(&world, sdlba, 8), expected);
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn a_copy_that_is_refused_or_fails_has_changed_nothing() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let before = world.disk.blocks.clone();
    let end = (SIZE / BLOCK) as u64;
    let limit = Status::COMMAND_SIZE_LIMIT_EXCEEDED;
    // 64 KiB is the largest transfer of this world: 16 blocks.
    let cases: [(Ranges<'_>, u64, Status); 5] = [
        (&[(0, 16)], 0, limit),
        (&[(0, 7), (0, 8)], 0, limit),
        (&[(0, 0), (end, 0)], 0, Status::LBA_OUT_OF_RANGE),
        (&[(0, 1)], end - 1, Status::LBA_OUT_OF_RANGE),
        (&[(0, 0)], u64::MAX, Status::LBA_OUT_OF_RANGE),
    ];
    for (ranges, sdlba, status) in cases {
        let data = descriptors(ranges, 32);
        let sgl = Sgl::in_capsule(0, data.len() as u32);
        let got = world.ask(&mut queue, &copy(sdlba, ranges.len(), 0).emit(1, sgl), &data);
        assert!(got.status.is(status) && got.status.dnr(), "{ranges:?}: {}", got.status);
        assert!(world.disk.trace.is_empty(), "nothing was loaded");
    }
    world.disk.fail = Some(Status::UNRECOVERED_READ_ERROR);
    let data = descriptors(&[(1, 0), (2, 0)], 32);
    let sqe = copy(50, 2, 0).emit(1, Sgl::in_capsule(0, 64));
    let got = world.ask(&mut queue, &sqe, &data);
    assert!(got.status.is(Status::UNRECOVERED_READ_ERROR), "{}", got.status);
    assert_eq!((got.result, &world.disk.trace[..]), (0, &["load"][..]), "and no other range");
    assert!(world.disk.blocks == before);
    end_both(world, queue, admin, posted);
}

#[test]
fn copy_honours_force_unit_access() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let mut job = copy(60, 1, 0);
    job.flags = job.flags.with_fua(true);
    world.send(&mut queue, &job.emit(1, Sgl::in_capsule(0, 32)), &descriptors(&[(1, 2)], 32));
    assert!(world.disk_step(&mut queue), "loaded");
    match world.disk.waiting.front() {
        Some((_, IoRequest::Write { from, at, fua: true })) => {
            assert_eq!((*at, from.len()), (60 * BLOCK as u64, 3 * BLOCK as u32));
        }
        other => panic!("{other:?}"),
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn verify_loads_all_of_it_piece_by_piece_and_pushes_nothing() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let verify = Sqe::io(IoOpcode::VERIFY, 1);
    // 40 blocks are 160 KiB, and 64 KiB are loaded at once.
    assert!(world.ask(&mut queue, &verify.with_range(3, 39), &[]).status.is_success());
    assert_eq!(world.disk.trace, ["load"; 3]);
    assert_eq!(world.trace, ["send"]);
    world.disk.fail = Some(Status::UNRECOVERED_READ_ERROR);
    let got = world.ask(&mut queue, &verify.with_range(3, 39), &[]);
    assert!(got.status.is(Status::UNRECOVERED_READ_ERROR), "{}", got.status);
    assert_eq!(world.disk.trace.len(), 4, "the first failure ends it");
    end_both(world, queue, admin, posted);
}

#[test]
fn a_copy_on_a_closed_connection_returns_all_buffers() {
    for steps in 0..4 {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        let data = descriptors(&[(1, 0), (5, 2), (9, 0)], 40);
        world.memory[..data.len()].copy_from_slice(&data);
        world.send(&mut queue, &copy(50, 3, 1).emit(1, keyed(0, 120)), &[]);
        for step in 0..steps {
            let stepped = match step {
                0 => world.fabric_step(&mut queue),
                _ => world.disk_step(&mut queue),
            };
            assert!(stepped);
        }
        end_both(world, queue, admin, posted);
    }
}
