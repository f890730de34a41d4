//! The stages of a command, and that every command is counted once.

use std::sync::atomic::Ordering;

use nvme::{IoOpcode, Sgl, Sqe, Status};
use nvmfd::core::qpair::{self, QueuePair};
use nvmfd::core::stats::in_flight::InFlight;
use nvmfd::core::stats::{Kind, Stage};

use crate::fairness::two_namespaces;
use crate::support::{World, end_both, io_queue, keyed};

/// Nanoseconds in each stage, and in all, of the commands of a kind; how many there were, how many
/// failed, and their bytes.
fn counted(world: &World, kind: Kind) -> ([u64; 6], u64, [u64; 3]) {
    let rows = world.shared.observer(0).expect("one reactor").all_rows();
    let tallies: Vec<_> = rows.iter().map(|row| &row.kinds[kind as usize]).collect();
    let sum = |of: &dyn Fn(usize) -> u64| (0..tallies.len()).map(of).sum::<u64>();
    let commands = sum(&|at| tallies[at].total.read().iter().sum());
    let stages = Stage::ALL.map(|stage| {
        let counts = sum(&|at| {
            let commands = tallies[at].total.read().iter().sum();
            tallies[at].stage(stage, commands).1.iter().sum()
        });
        assert_eq!(counts, commands, "each stage tells of every command: {}", stage.name());
        sum(&|at| tallies[at].stage(stage, 0).0)
    });
    let total = stages.iter().sum::<u64>();
    let failures = sum(&|at| tallies[at].failures.load(Ordering::Relaxed));
    let bytes = sum(&|at| tallies[at].bytes.load(Ordering::Relaxed));
    (stages, total, [commands, failures, bytes])
}

/// Lets time pass, then one thing happen.
fn after(ns: u64, world: &mut World, queue: &mut QueuePair) {
    world.now_ns += ns;
    world.serve_waiters(queue);
    assert!(world.fabric_step(queue) || world.disk_step(queue));
}

#[test]
fn stage_times_of_a_write_are_recorded() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 1).with_sgl(keyed(0, 8192));
    world.send(&mut queue, &write, &[]);
    [10_000, 200_000, 3_000].iter().for_each(|ns| after(*ns, &mut world, &mut queue));
    let expected = ([0, 0, 10_000, 200_000, 0, 3_000], 213_000, [1, 0, 8192]);
    assert_eq!(counted(&world, Kind::Write), expected);
    // In the capsule: nothing is pulled.
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(1, 0).with_sgl(Sgl::in_capsule(0, 4096));
    world.send(&mut queue, &write, &[0; 4096]);
    [40_000, 5_000].iter().for_each(|ns| after(*ns, &mut world, &mut queue));
    let expected = ([0, 0, 10_000, 240_000, 0, 8_000], 258_000, [2, 0, 12288]);
    assert_eq!(counted(&world, Kind::Write), expected);
    assert_eq!(counted(&world, Kind::Read).2, [0; 3]);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_command_in_progress_is_described_with_its_stage_and_age() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let described = |queue: &QueuePair, world: &World| {
        let of = |it: InFlight| {
            let c = it.command;
            ((c.qid, c.cid, c.opcode, c.nsid, c.slba), it.stage, it.age_ns)
        };
        qpair::in_flight(queue, world.now_ns).map(of).collect::<Vec<_>>()
    };
    assert_eq!(described(&queue, &world), []);
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 1).with_sgl(keyed(0, 8192)).with_cid(7);
    let whose = (1, 7, IoOpcode::WRITE.0, 1, 2);
    world.send(&mut queue, &write, &[]);
    for (stage, age_ns) in [(Stage::Pull, 0), (Stage::Disk, 10_000), (Stage::Reply, 15_000)] {
        world.now_ns += 500;
        assert_eq!(described(&queue, &world), [(whose, stage, age_ns + 500)]);
        world.now_ns -= 500;
        after(if age_ns == 0 { 10_000 } else { 5_000 }, &mut world, &mut queue);
    }
    assert_eq!(described(&queue, &world), []);
    end_both(world, queue, admin, posted);
}

#[test]
fn stage_times_of_a_read_are_recorded_and_failures_counted() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096));
    world.send(&mut queue, &read.with_range(0, 0), &[]);
    [70_000, 8_000, 1_000].iter().for_each(|ns| after(*ns, &mut world, &mut queue));
    let good = ([0, 0, 0, 70_000, 8_000, 1_000], 79_000, [1, 0, 4096]);
    assert_eq!(counted(&world, Kind::Read), good);
    // Behind the end: answered at once.
    world.send(&mut queue, &read.with_range(1 << 40, 0), &[]);
    after(500, &mut world, &mut queue);
    let both = ([0, 0, 0, 70_000, 8_000, 1_500], 79_500, [2, 1, 4096]);
    assert_eq!(counted(&world, Kind::Read), both);
    // Of a namespace that there is not: with the others.
    world.send(&mut queue, &Sqe::io(IoOpcode::FLUSH, 9), &[]);
    after(0, &mut world, &mut queue);
    assert_eq!(counted(&world, Kind::Flush).2, [1, 1, 0]);
    let rows = world.shared.observer(0).unwrap().all_rows();
    assert_eq!(rows[1].kinds[Kind::Flush as usize].failures.load(Ordering::Relaxed), 1);
    assert_eq!(counted(&world, Kind::Other).2, [0; 3], "Connect is none of them");
    end_both(world, queue, admin, posted);
}

#[test]
fn time_waiting_for_a_buffer_is_recorded_as_wait() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for cid in 0..6 {
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16));
        world.send(&mut queue, &read.with_cid(cid), &[]);
    }
    assert!(!world.waiters.is_empty());
    world.now_ns += 1_000_000;
    world.run(&mut queue);
    let ([receive, wait, pull, disk, push, reply], _, [commands, ..]) = counted(&world, Kind::Read);
    assert_eq!((receive, pull, push, reply, commands), (0, 0, 0, 0, 6));
    assert!(wait >= 2_000_000 && wait + disk == 6_000_000, "{wait} {disk}");
    end_both(world, queue, admin, posted);
}

#[test]
fn only_commands_at_or_above_the_slow_threshold_are_recorded() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let observer = std::sync::Arc::clone(world.shared.observer(0).unwrap());
    let read = Sqe::io(IoOpcode::READ, 1).with_range(3, 0).with_sgl(keyed(0, 4096));
    let run = |ns, cid, world: &mut World, queue: &mut QueuePair| {
        world.send(queue, &read.with_cid(cid), &[]);
        [ns, 0, 0].iter().for_each(|ns| after(*ns, world, queue));
    };
    run(9_000_000_000, 1, &mut world, &mut queue);
    assert_eq!(observer.slow().1, 0, "not asked for");
    observer.set_slow_ns(100_000_000);
    run(99_999_999, 2, &mut world, &mut queue);
    run(100_000_000, 3, &mut world, &mut queue);
    let (slow, count) = observer.slow();
    assert_eq!((slow.len(), count), (1, 1));
    let one = slow[0];
    let command = one.command;
    assert_eq!((command.cid, command.qid, command.nsid, command.slba), (3, 1, 1, 3));
    assert_eq!(one.bytes, 4096);
    assert_eq!((one.total_ns, one.stages_ns[Stage::Disk as usize]), (100_000_000, 100_000_000));
    assert_eq!(command.host.to_string(), "nqn.2026-11.host:h");
    end_both(world, queue, admin, posted);
}

/// Reads of two namespaces in turn, which complete together: some after 70 us at the device and
/// some after 90 us, one without success.
#[test]
fn commands_that_complete_together_are_counted_in_their_own_rows() {
    let mut world = two_namespaces();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let observer = std::sync::Arc::clone(world.shared.observer(0).unwrap());
    observer.set_slow_ns(95_000);
    for (cid, nsid) in [1, 2, 1, 2, 2, 2, 1, 2, 1, 1].into_iter().enumerate() {
        let read = Sqe::io(IoOpcode::READ, nsid).with_range(0, 0).with_sgl(keyed(0, 4096));
        world.send(&mut queue, &read.with_cid(cid as u16), &[]);
    }
    world.now_ns += 70_000;
    (0..6).for_each(|_| assert!(world.disk_step(&mut queue)));
    world.now_ns += 20_000;
    world.disk.fail = Some(Status::NAMESPACE_NOT_READY);
    assert!(world.disk_step(&mut queue));
    world.disk.fail = None;
    while world.disk_step(&mut queue) {}
    world.now_ns += 8_000;
    while world.fabric_event(&mut queue) {}
    world.over.end();
    let rows = observer.all_rows();
    let of_row = |nsid: u32| {
        let own = rows.iter().find(|row| row.pair.is_some_and(|pair| pair.nsid == nsid)).unwrap();
        let reads = &own.kinds[Kind::Read as usize];
        let disk_ns = reads.spent_ns[Stage::Disk as usize].load(Ordering::Relaxed);
        let failures = reads.failures.load(Ordering::Relaxed);
        let bytes = reads.bytes.load(Ordering::Relaxed);
        (reads.total.read().iter().sum::<u64>(), disk_ns, failures, bytes)
    };
    assert_eq!(of_row(1), (5, 2 * 70_000 + 3 * 90_000, 1, 4 * 4096));
    assert_eq!(of_row(2), (5, 4 * 70_000 + 90_000, 0, 5 * 4096));
    assert_eq!(observer.slow().1, 10, "each of 98 us");
    end_both(world, queue, admin, posted);
}

/// A host may have its answer, and have ended the connection without an acknowledgement.
#[test]
fn a_command_is_counted_when_it_was_answered_and_not_otherwise() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let read = Sqe::io(IoOpcode::READ, 1).with_range(3, 0).with_sgl(keyed(0, 4096));
    world.send(&mut queue, &read.with_cid(1), &[]);
    assert!(world.disk_step(&mut queue));
    world.send(&mut queue, &read.with_cid(2), &[]);
    let shared = std::sync::Arc::clone(&world.shared);
    end_both(world, queue, admin, posted);
    let row = &shared.observer(0).unwrap().all_rows()[0];
    assert_eq!(row.kinds[0].total.read().iter().sum::<u64>(), 1);
}
