//! A device with slow operations, while the connections of these operations start and end.

use std::collections::VecDeque;
use std::mem::{replace, take};
use std::time::Duration;

use nvme::{IoOpcode, Sgl, Sqe};
use nvmfd::blockdev::IoRequest;
use nvmfd::core::poll_group::clear;
use nvmfd::core::qpair::{QueuePair, free_for_io, room};
use nvmfd::core::sched::buffers::TryAlloc;
use rdma::{Buf, Tag, Work};

use crate::support::{World, end_both, io_queue, keyed};

#[test]
fn a_stalled_device_holds_only_the_buffers_of_its_own_operations() {
    let mut world = World::new();
    let before = world.pool.free();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let of_admin = 16;
    assert_eq!(queue.receives(), 16);
    let read = Sqe::io(IoOpcode::READ, 1).with_range(1, 0).with_sgl(keyed(0, 4096));
    for cid in 0..3 {
        world.send(&mut queue, &read.with_cid(cid), &[]);
    }
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 0).with_sgl(Sgl::in_capsule(0, 4096));
    for cid in 3..5 {
        world.send(&mut queue, &write.with_cid(cid), &[0xAB; 4096]);
    }
    world.send(&mut queue, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(5), &[]);
    assert_eq!(world.disk.waiting.len(), 6);
    world.flush_and_go(&mut queue);
    assert!(!queue.is_finished(), "the disk has its work");
    // Two capsules are what it writes from; nothing else is missing but what the admin queue has.
    assert_eq!(queue.receives(), 2);
    let (cells, receives, _) = world.pool.free();
    assert_eq!((cells, receives), (before.0 - 2 * of_admin, before.1 - of_admin - 2));
    end_both(world, queue, admin, posted);
}

/// The largest transfer there is here, and a small one.
const LARGE: u32 = 1 << 16;
const SMALL: u32 = 4096;

fn read(cid: u16, len: u32) -> Sqe {
    let sqe = Sqe::io(IoOpcode::READ, 1).with_range(0, (len >> 12) as u16 - 1);
    sqe.with_sgl(keyed(0, len)).with_cid(cid)
}

/// A world with two hosts: what is posted for the one whose turn it is not.
struct Pair {
    world: World,
    queues: [QueuePair; 2],
    admins: [(QueuePair, VecDeque<(Tag, Work)>); 2],
    other_posted: VecDeque<(Tag, Work)>,
}

impl Pair {
    fn new() -> Pair {
        let (mut world, first, admin, posted) = World::with_io_queue();
        let first_posted = take(&mut world.fabric.posted);
        world.key = 1;
        let (second, second_admin, second_admin_posted) = io_queue(&mut world);
        let other_posted = replace(&mut world.fabric.posted, first_posted);
        world.key = 0;
        let admins = [(admin, posted), (second_admin, second_admin_posted)];
        Pair { world, queues: [first, second], admins, other_posted }
    }

    /// From now on the fabric and the lines are those of this one.
    fn turn(&mut self, key: u32) {
        if self.world.key != key {
            self.world.key = key;
            self.other_posted =
                replace(&mut self.world.fabric.posted, take(&mut self.other_posted));
        }
    }

    fn send(&mut self, key: u32, sqe: &Sqe) {
        self.turn(key);
        self.world.send(&mut self.queues[key as usize], sqe, &[]);
        self.serve();
    }

    /// Allocates buffers to waiting commands of both hosts.
    fn serve(&mut self) {
        clear(&mut self.world.waiters, &mut self.world.pool, self.world.now);
        while let Some(turn) = {
            let room = room(&self.world.pool, self.world.now);
            self.world.waiters.next_turn(&room)
        } {
            self.turn(turn.key);
            let queue = &mut self.queues[turn.key as usize];
            let take = queue.on_buffers(turn.slot, turn.aside, &mut self.world.io());
            if !self.world.waiters.settle(turn, take, self.world.now) {
                return;
            }
        }
    }

    /// The disk ends one operation, of this host; the answers to it go out.
    fn end(&mut self, key: u32, at: usize) -> Vec<u16> {
        self.turn(key);
        let (tag, op) = self.world.disk.waiting.remove(at).unwrap();
        assert_eq!((tag >> 32) as u32, key);
        self.world.disk.waiting.push_front((tag, op));
        let queue = &mut self.queues[key as usize];
        assert!(self.world.disk_step(queue));
        while self.world.fabric_step(queue) {}
        let answers = self.world.completions.drain(..).map(|cqe| cqe.cid).collect();
        self.serve();
        answers
    }

    /// All commands are executed, and all connections end.
    fn finish(mut self) {
        self.serve();
        while let Some((tag, _)) = self.world.disk.waiting.front() {
            let key = (tag >> 32) as u32;
            self.end(key, 0);
        }
        assert!(self.world.waiters.is_empty() && self.world.disk.waiting.is_empty());
        self.turn(0);
        let Pair { mut world, queues, admins, other_posted } = self;
        let first_posted = take(&mut world.fabric.posted);
        let posted = [first_posted, other_posted];
        let ends = queues.into_iter().zip(posted).chain(admins);
        for (mut queue, posted) in ends {
            world.fabric.posted = posted;
            world.flush_and_go(&mut queue);
            assert!(queue.is_finished());
            queue.finish(&mut world.io());
        }
        world.pool.put_back();
        assert!(world.pool.is_full(), "{:?}", world.pool.free());
    }
}

/// Takes every fourth page of all blocks of the largest size but one, as a disk that hangs keeps
/// them: most of the pool is free, and one block of it is whole.
fn in_pieces(pair: &mut Pair) -> Vec<Buf> {
    let all: Vec<Buf> = std::iter::from_fn(|| pair.world.pool.take_data(SMALL)).collect();
    let first = all.iter().map(Buf::offset).min().unwrap();
    let (mut kept, mut home) = (Vec::new(), Vec::new());
    for buf in all {
        let (block, page) =
            ((buf.offset() - first) / u64::from(LARGE), (buf.offset() - first) / u64::from(SMALL));
        match block > 0 && page.is_multiple_of(4) {
            true => kept.push(buf),
            false => home.push(buf),
        }
    }
    home.into_iter().for_each(|buf| pair.world.pool.give(buf));
    kept
}

#[test]
fn a_command_lacking_a_large_buffer_neither_blocks_others_nor_starves() {
    let mut pair = Pair::new();
    let kept = in_pieces(&mut pair);
    // The block that could be whole is at a disk that is slow.
    let whole = pair.world.pool.take_data(LARGE).unwrap();
    let start = whole.offset();
    pair.world.pool.give(whole);
    let all: Vec<Buf> = std::iter::from_fn(|| pair.world.pool.take_data(SMALL)).collect();
    let (mut slow, rest): (Vec<_>, Vec<_>) =
        all.into_iter().partition(|buf| (start..start + u64::from(LARGE)).contains(&buf.offset()));
    assert_eq!((slow.len(), rest.len()), (16, 84));
    rest.into_iter().for_each(|buf| pair.world.pool.give(buf));
    assert_eq!(pair.world.pool.whole_bytes(), (2 * u64::from(SMALL), 0));

    pair.send(0, &read(0, LARGE));
    assert_eq!((pair.world.disk.waiting.len(), pair.world.waiters.len()), (0, 1));
    // It is waited for at first, also by another host.
    pair.send(1, &read(1, SMALL));
    assert_eq!((pair.world.disk.waiting.len(), pair.world.waiters.len()), (0, 2));
    pair.world.now += Duration::from_millis(250);
    pair.serve();
    assert_eq!((pair.world.disk.waiting.len(), pair.world.waiters.len()), (1, 1));
    assert_eq!(pair.end(1, 0), [1]);

    // Now everybody goes on, its own host with its own namespace as well, and small commands are
    // under way all the time.
    let is_large = |(_, op): &(Tag, IoRequest)| op.buf().is_some_and(|buf| buf.len() == LARGE);
    let mut steps = 0;
    while !pair.world.disk.waiting.iter().any(is_large) {
        pair.world.now += Duration::from_millis(50);
        for key in [0, 1] {
            pair.send(key, &read(100 + steps, SMALL));
            let newest = pair.world.disk.waiting.iter().rposition(|(tag, op)| {
                (tag >> 32) as u32 == key && op.buf().is_some_and(|buf| buf.len() == SMALL)
            });
            assert_eq!(pair.end(key, newest.expect("it goes on")), [100 + steps]);
        }
        // Operations of the slow device on the block complete eventually.
        if steps % 4 == 0
            && let Some(buf) = slow.pop()
        {
            pair.world.pool.give(buf);
        }
        steps += 1;
        assert!(steps < 1000, "it is served in the end");
    }
    assert!(slow.is_empty() && steps > 20);
    let at = pair.world.disk.waiting.iter().position(is_large).unwrap();
    assert_eq!(pair.end(0, at), [0]);
    kept.into_iter().for_each(|buf| pair.world.pool.give(buf));
    pair.finish();
}

#[test]
fn fragmentation_by_a_hung_device_delays_only_large_commands() {
    let mut pair = Pair::new();
    let mut kept = in_pieces(&mut pair);
    kept.extend(pair.world.pool.take_data(LARGE));
    pair.send(0, &read(0, LARGE));
    for step in 0..400u16 {
        pair.world.now += Duration::from_millis(100);
        pair.send(1, &read(1 + step, SMALL));
        // A quarter of a second once, and never again.
        if step >= 3 {
            let answers: Vec<u16> =
                (0..pair.world.disk.waiting.len()).flat_map(|_| pair.end(1, 0)).collect();
            assert_eq!(answers.last(), Some(&(1 + step)));
            assert_eq!(pair.world.waiters.len(), 1, "step {step}");
        }
    }
    // The disk is back.
    kept.into_iter().for_each(|buf| pair.world.pool.give(buf));
    pair.serve();
    assert_eq!((pair.world.disk.waiting.len(), pair.world.waiters.len()), (1, 0));
    assert_eq!(pair.end(0, 0), [0]);
    pair.finish();
}

/// Others may take everything else, down to what is there for admin commands alone; that it leaves
/// as well.
#[test]
fn memory_set_aside_serves_the_large_command_that_waits_for_it() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let mut hoard = Vec::new();
    while world.pool.free().2 > 320 << 10 {
        hoard.push(world.pool.take_data(4096).unwrap());
    }
    while world.pool.whole_bytes().1 < 64 << 10 {
        world.pool.set_aside(64 << 10);
    }
    assert_eq!(free_for_io(&world.pool), 0, "for anybody else");
    hoard.push(world.pool.take_data(4096).unwrap());
    let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, 64 << 10));
    world.send(&mut queue, &read, &[]);
    assert_eq!((world.waiters.len(), world.disk.waiting.len()), (1, 0));
    let mut resume = |world: &mut World| {
        (0..16).any(|slot| queue.on_buffers(slot, true, &mut world.io()) != TryAlloc::Done)
    };
    assert!(resume(&mut world), "the last page that may go has gone");
    world.pool.give(hoard.pop().unwrap());
    assert!(!resume(&mut world));
    assert_eq!((world.disk.waiting.len(), world.pool.free().2), (1, 256 << 10));
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    world.pool.put_back();
    world.run(&mut queue);
    assert_eq!(world.completions.len(), 1);
    end_both(world, queue, admin, posted);
}
