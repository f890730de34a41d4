//! Pages of logs and structures: what hosts get of them, and what they can hold by asking.

use std::mem::{replace, take};

use nvme::fabrics::Connect;
use nvme::log::{GetLogPage, LogId};
use nvme::{AdminOpcode, Cqe, IoOpcode, Sgl, Sqe, Status};
use rdma::Work;

use crate::sgl::scattered;
use crate::support::{KEY, World, admin, connect_data, end_both, io_queue, keyed};

/// As long as a transfer may be.
const LEN: u32 = 1 << 16;

fn get(lid: LogId, len: u32, sgl: Sgl) -> Sqe {
    GetLogPage::new(lid, 0, len / 4).emit(sgl)
}

#[test]
fn log_pages_are_sent_in_pieces_and_zero_padded_to_the_length() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    for len in [512, 1 << 14, (1 << 14) + 4, 60_000, LEN] {
        world.memory.fill(0xEE);
        let cqe = world.ask(&mut queue, &get(LogId::SUPPORTED_PAGES, len, keyed(64, len)), &[]);
        assert!(cqe.status.is_success(), "{}", cqe.status);
        let page = world.memory[64..64 + 512].to_vec();
        assert!(page.iter().any(|byte| *byte != 0) && page.iter().all(|byte| *byte != 0xEE));
        let end = 64 + len as usize;
        assert!(world.memory[64 + 1024.min(len as usize)..end].iter().all(|byte| *byte == 0));
        assert!(world.memory[end..].iter().all(|byte| *byte == 0xEE), "{len}");
        let pieces = (len as usize).div_ceil(1 << 14);
        let trace = take(&mut world.trace);
        let moved = [vec!["push"; pieces], vec!["send"]].concat();
        assert_eq!(trace[trace.len() - moved.len()..], moved, "{len}");
        assert_eq!(world.waiters.behind_sent, 0);
    }
    // The same page in two places, the first of which ends within a piece.
    let whole = world.memory[64..64 + 60_000].to_vec();
    world.memory.fill(0xEE);
    let places = [(8, 20_000), (50_000, 40_000)];
    let log = get(LogId::SUPPORTED_PAGES, 60_000, keyed(0, 60_000));
    let (sqe, list) = scattered(log, &places, 0);
    assert!(world.ask(&mut queue, &sqe, &list).status.is_success());
    let gathered = [&world.memory[8..20_008], &world.memory[50_000..90_000]].concat();
    assert!(gathered == whole && world.memory[90_000..].iter().all(|byte| *byte == 0xEE));
    world.end(queue);
}

/// A host asks for logs of the largest size, and takes none of their data.
#[test]
fn a_host_that_asks_for_pages_keeps_neither_io_nor_admin_commands_waiting() {
    let mut world = World::new();
    let free = |world: &World| world.pool.free().2;
    let (mut queue, mut other, other_posted) = io_queue(&mut world);
    let posted = take(&mut world.fabric.posted);
    world.key = 1;
    let (mut greedy, _) = admin(&mut world);
    let before = free(&world);
    for cid in 0..16 {
        world.send(
            &mut greedy,
            &get(LogId::SUPPORTED_PAGES, LEN, keyed(0, LEN)).with_cid(cid),
            &[],
        );
        world.serve_waiters(&mut greedy);
    }
    assert_eq!(free(&world), before - (1 << 14), "one command has one piece");
    assert!(world.waiters.is_empty() && world.waiters.behind_sent == 16);

    // Others have all the room that they had.
    let greedy_posted = replace(&mut world.fabric.posted, posted);
    world.key = 0;
    let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, LEN));
    for cid in 0..8 {
        assert!(world.ask(&mut queue, &read.with_cid(cid), &[]).status.is_success());
    }
    let posted = replace(&mut world.fabric.posted, other_posted);
    let identify = Sqe { cdw10: 1, ..Sqe::admin(AdminOpcode::IDENTIFY) };
    assert!(world.ask(&mut other, &identify.with_sgl(keyed(0, 4096)), &[]).status.is_success());
    let other_posted = replace(&mut world.fabric.posted, greedy_posted);

    // It takes its data after all: each command is answered, in the order of their arrival.
    world.key = 1;
    world.run(&mut greedy);
    let answered: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
    assert_eq!(answered, (0..16).collect::<Vec<_>>());
    assert_eq!((free(&world), world.waiters.behind_sent), (before, 0));

    // Small ones share what a queue may hold.
    let small = |cid| identify.with_cid(cid).with_sgl(keyed(0, 4096));
    (0..5).for_each(|cid| world.send(&mut greedy, &small(cid), &[]));
    let pushes = world.fabric.posted.iter().filter(|(_, work)| matches!(work, Work::Write { .. }));
    assert_eq!((pushes.count(), world.waiters.behind_sent), (4, 1));
    world.run(&mut greedy);
    assert_eq!((take(&mut world.completions).len(), world.waiters.behind_sent), (5, 0));

    // Its connection ends while one is sent in pieces and others are deferred.
    world.send(&mut greedy, &get(LogId::SUPPORTED_PAGES, LEN, keyed(0, LEN)).with_cid(9), &[]);
    (0..5).for_each(|cid| world.send(&mut greedy, &small(cid), &[]));
    assert_eq!(world.waiters.behind_sent, 6);
    world.flush_and_go(&mut greedy);
    assert!(greedy.is_finished());
    greedy.finish(&mut world.io());
    assert_eq!(world.waiters.behind_sent, 0);
    world.fabric.posted = posted;
    world.key = 0;
    end_both(world, queue, other, other_posted);
}

/// A command that was put off ends at its host's abort as any other.
/// However little it asks for, each command takes a page of the pool.
#[test]
fn small_log_pages_count_as_the_buffers_they_occupy() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let before = world.pool.free().2;
    for cid in 0..12 {
        let sqe = get(LogId::SUPPORTED_PAGES, 4, keyed(64, 4)).with_cid(cid);
        world.send(&mut queue, &sqe, &[]);
    }
    assert_eq!(before - world.pool.free().2, 1 << 14);
    world.run(&mut queue);
    assert_eq!((world.completions.len(), world.waiters.behind_sent), (12, 0));
    world.end(queue);
}

/// One that waited for a buffer as the first one made its way stayed in a line for admin commands.
#[test]
fn a_waiting_connect_fails_once_another_has_succeeded() {
    let (mut world, mut admin, cntlid) = World::with_admin_queue();
    let admin_posted = take(&mut world.fabric.posted);
    let mut queue = world.open_qid(1);
    world.memory[..1024].copy_from_slice(&connect_data(cntlid).emit());
    let mut hoard: Vec<_> = std::iter::from_fn(|| world.pool.take_any(4096)).collect();
    world.pool.give(hoard.pop().expect("there are some"));
    let connect = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    for cid in [1, 2] {
        world.send(&mut queue, &connect.emit(keyed(0, 1024)).with_cid(cid), &[]);
    }
    assert_eq!(world.waiters.len() + world.waiters.behind_sent, 1);
    while world.fabric_step(&mut queue) {}
    assert!(queue.is_connected());
    assert_eq!(world.waiters.len() + world.waiters.behind_sent, 0);
    let told = |cqe: &Cqe| (cqe.cid, cqe.status.code());
    let expected = [(1, 0), (2, Status::COMMAND_SEQUENCE_ERROR.code())];
    assert_eq!(world.completions.iter().map(told).collect::<Vec<_>>(), expected);
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    let posted = replace(&mut world.fabric.posted, admin_posted);
    world.flush_and_go(&mut admin);
    admin.finish(&mut world.io());
    world.fabric.posted = posted;
    world.end(queue);
}

#[test]
fn deferred_log_page_commands_can_be_aborted() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    for cid in 0..3 {
        world.send(&mut queue, &get(LogId::SUPPORTED_PAGES, LEN, keyed(0, LEN)).with_cid(cid), &[]);
    }
    let abort = Sqe { cdw10: 1 << 16, ..Sqe::admin(AdminOpcode::ABORT) };
    world.send(&mut queue, &abort.with_cid(7), &[]);
    world.run(&mut queue);
    let answers: Vec<_> =
        world.completions.drain(..).map(|cqe| (cqe.cid, cqe.status.code())).collect();
    for expected in [(0, 0), (1, 0x007), (2, 0), (7, 0)] {
        assert!(answers.contains(&expected), "{answers:?}");
    }
    assert_eq!((answers.len(), world.waiters.behind_sent), (4, 0));
    world.end(queue);
}

#[test]
fn a_failed_log_page_piece_closes_the_connection_and_leaks_nothing() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let beyond = (1 << 17) - (1 << 14);
    world.send(
        &mut queue,
        &get(LogId::SUPPORTED_PAGES, LEN, Sgl::keyed(beyond, LEN, KEY, true).unwrap()),
        &[],
    );
    while world.fabric_step(&mut queue) && !world.fabric.disconnected {}
    assert!(world.fabric.disconnected && world.completions.is_empty());
    assert_eq!(world.waiters.behind_sent, 0);
    world.end(queue);
}
