//! Data in several places of the host's memory, as a queue moves them.

use nvme::sgl::LastSegment;
use nvme::sqe::DsmRange;
use nvme::{IoOpcode, Sgl, Sqe, Status};
use rdma::Work;

use crate::support::{KEY, World, end_both};

/// Address and length of a piece.
pub(crate) type Places<'a> = &'a [(u64, u32)];

fn descriptors(places: Places<'_>) -> Vec<u8> {
    let emit = |&(addr, len): &(u64, u32)| Sgl::keyed(addr, len, KEY, true).unwrap().emit();
    places.iter().flat_map(emit).collect()
}

/// The command with its descriptors `offset` bytes behind it.
pub(crate) fn scattered(sqe: Sqe, places: Places<'_>, offset: usize) -> (Sqe, Vec<u8>) {
    let list = descriptors(places);
    let segment = LastSegment { offset: offset as u64, len: list.len() as u32 };
    (Sqe { dptr: segment.emit(), ..sqe }, [vec![0xEE; offset], list].concat())
}

fn blocks(world: &World, lba: usize, count: usize) -> Vec<u8> {
    world.disk.blocks[lba * 4096..(lba + count) * 4096].to_vec()
}

#[test]
fn reads_and_writes_transfer_all_sgl_descriptors_in_order() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for (offset, places) in [
        (0, &[(50_000, 4096), (9000, 512), (20_000, 7680)][..]),
        (7, &[(3, 1), (100_000, 4095), (0, 0), (60_000, 8192)][..]),
        (4032, &[(0, 4096), (4096, 4096), (8192, 2048), (30_000, 2048)][..]),
        (16, &[(5, 12288)][..]),
    ] {
        world.trace.clear();
        world.invalidated.clear();
        let moved = places.iter().filter(|(_, len)| *len > 0).count();
        let gathered = |world: &World| -> Vec<u8> {
            let bytes = |&(at, len): &(u64, u32)| &world.memory[at as usize..][..len as usize];
            places.iter().flat_map(bytes).copied().collect()
        };
        let read = Sqe::io(IoOpcode::READ, 1).with_range(5, 2);
        let (sqe, data) = scattered(read, places, offset);
        assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
        assert!(gathered(&world) == blocks(&world, 5, 3));
        assert_eq!(world.trace, [vec!["push"; moved], vec!["send"]].concat());
        assert_eq!(world.invalidated, [Some(KEY)]);

        let write = Sqe::io(IoOpcode::WRITE, 1).with_range(40, 2);
        let (sqe, data) = scattered(write, places, offset);
        world.memory.iter_mut().enumerate().for_each(|(i, byte)| *byte = ((i * 31) >> 3) as u8);
        assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
        assert!(gathered(&world) == blocks(&world, 40, 3));
        let compare = Sqe::io(IoOpcode::COMPARE, 1).with_range(40, 2);
        let (sqe, data) = scattered(compare, places, offset);
        assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn bytes_beyond_the_need_of_a_command_are_not_pulled() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let ranges = [
        DsmRange { attributes: 0, blocks: 1, slba: 3 },
        DsmRange { attributes: 0, blocks: 2, slba: 9 },
    ];
    let bytes: Vec<u8> = ranges.iter().flat_map(DsmRange::emit).collect();
    world.memory[100..120].copy_from_slice(&bytes[..20]);
    world.memory[5000..5012].copy_from_slice(&bytes[20..]);
    let places = [(100, 20), (5000, 4076), (9000, 4096)];
    let (sqe, data) = scattered(Sqe::deallocation(1, 1), &places, 0);
    assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
    assert_eq!(world.trace, ["pull", "pull", "send"]);
    for lba in [3, 9, 10] {
        assert!(blocks(&world, lba, 1).iter().all(|byte| *byte == 0), "{lba}");
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn sgls_with_a_wrong_total_length_or_malformed_lists_are_refused() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let read = Sqe::io(IoOpcode::READ, 1).with_range(5, 1);
    let cases: [(Places<'_>, Status); 4] = [
        (&[(0, 4096)], Status::DATA_SGL_LENGTH_INVALID),
        (&[(0, 4096), (4096, 4095)], Status::DATA_SGL_LENGTH_INVALID),
        (&[(0, 4096), (4096, 4097)], Status::DATA_SGL_LENGTH_INVALID),
        (&[(0, 2048); 5], Status::INVALID_SGL_COUNT),
    ];
    for (places, status) in cases {
        let (sqe, data) = scattered(read, places, 0);
        let got = world.ask(&mut queue, &sqe, &data).status;
        assert!(got.is(status) && got.dnr(), "{got}");
    }
    let (sqe, data) = scattered(read, &[(0, 4096), (4096, 4096)], 0);
    let got = world.ask(&mut queue, &sqe, &data[..31]).status;
    assert!(got.is(Status::INVALID_SGL_LAST_SEGMENT), "one byte less has arrived: {got}");
    assert!(world.ask(&mut queue, &sqe, &data).status.is_success());
    end_both(world, queue, admin, posted);
}

#[test]
fn all_buffers_are_returned_when_a_transfer_ends_between_pieces() {
    for (opcode, steps) in (0..6).flat_map(|steps| {
        [IoOpcode::READ, IoOpcode::WRITE, IoOpcode::COMPARE].map(|opcode| (opcode, steps))
    }) {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        let places = [(0, 4096), (1 << 40, 2048), (8192, 2048)];
        let places = if steps % 2 == 0 { &places[..] } else { &[(0, 4096), (5000, 4096)][..] };
        let (sqe, data) = scattered(Sqe::io(opcode, 1).with_range(5, 1), places, 0);
        world.send(&mut queue, &sqe, &data);
        for _ in 0..steps {
            if !world.fabric_step(&mut queue) {
                let _ = world.disk_step(&mut queue);
            }
        }
        let pieces = world.fabric.posted.iter().filter(|(_, work)| !matches!(work, Work::Recv(_)));
        assert!(pieces.count() <= 2, "one after another, the last with the response");
        end_both(world, queue, admin, posted);
    }
}
