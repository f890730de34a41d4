//! A device that hangs, hosts that give up and reconnect, and hosts with working devices.

use std::collections::{BTreeMap, VecDeque};
use std::mem::{replace, take};
use std::sync::Arc;

use nvme::fabrics::Disconnect;
use nvme::{IoOpcode, Sgl, Sqe};
use nvmfd::blockdev::DeviceId;
use nvmfd::core::message::mailbox;
use nvmfd::core::poll_group::clear;
use nvmfd::core::qpair::{DATA_FOR_ADMIN_BYTES, QueuePair, free_for_io, room};
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::abort::AbortRequest;
use nvmfd::core::subsystem::{Namespace, Subsystem};
use rdma::{Pool, PoolPlan, Tag, Work};

use crate::support::{World, io_queue, keyed, share, subsystem};

/// The largest transfer there is here.
const LARGE: u32 = 1 << 16;
/// Buffers of that size that there are for I/O.
const ROOM: u64 = 16;
/// Blocks of each store, 4 KiB each.
const BLOCKS: usize = 2048;

fn large(opcode: IoOpcode, cid: u16) -> Sqe {
    let last_z = (LARGE >> 12) as u16 - 1;
    Sqe::io(opcode, 1).with_range(0, last_z).with_sgl(keyed(0, LARGE)).with_cid(cid)
}

/// One connected host: its I/O queue and its admin queue.
struct Host {
    queue: QueuePair,
    posted: VecDeque<(Tag, Work)>,
    admin: QueuePair,
    admin_posted: VecDeque<(Tag, Work)>,
}

/// Hosts of one reactor, by the keys of their queues. There are two subsystems, of a namespace each:
/// the first one's store hangs, the second one's does well.
struct Hosts {
    world: World,
    connected: BTreeMap<u32, Host>,
    /// I/O queues whose connections have ended, while devices execute their operations.
    gone: BTreeMap<u32, QueuePair>,
    next_key: u32,
    next_block: u64,
}

impl Hosts {
    fn new() -> Hosts {
        let namespace = Namespace { blocks: BLOCKS as u64, ..subsystem().namespaces[0].clone() };
        let hung = Subsystem { namespaces: vec![namespace.clone()], ..subsystem() };
        let namespace = Namespace { backing: DeviceId(1), ..namespace };
        let nqn = "nqn.2026-11.io.nvmfd:well".parse().unwrap();
        let well = Subsystem { nqn, namespaces: vec![namespace], ..subsystem() };
        let registry = Registry::new(vec![mailbox().unwrap().0], 64, 1000);
        registry.publish(Arc::new(hung));
        registry.publish(Arc::new(well));
        let mut world = World::of(share(registry), 0);
        world.pool = Pool::new(PoolPlan {
            cells: 4096,
            receives: 1024,
            data_bytes: ROOM * u64::from(LARGE) + DATA_FOR_ADMIN_BYTES,
            ..*world.pool.plan()
        })
        .unwrap();
        world.disk.blocks = vec![0; BLOCKS << 12];
        let (connected, gone) = (BTreeMap::new(), BTreeMap::new());
        Hosts { world, connected, gone, next_key: 0, next_block: 0 }
    }

    /// A host connects to the store that hangs, or to the one that does well.
    fn connect(&mut self, hangs: bool) -> u32 {
        let key = self.next_key;
        self.next_key += 1;
        self.world.subsystem = match hangs {
            true => subsystem().nqn,
            false => "nqn.2026-11.io.nvmfd:well".parse().unwrap(),
        };
        self.world.key = key;
        let at_disk = take(&mut self.world.disk.waiting);
        let (queue, admin, admin_posted) = io_queue(&mut self.world);
        self.world.disk.waiting = at_disk;
        let posted = take(&mut self.world.fabric.posted);
        self.connected.insert(key, Host { queue, posted, admin, admin_posted });
        key
    }

    /// Lets a host do something with its queue.
    fn with<R>(&mut self, key: u32, act: impl FnOnce(&mut World, &mut QueuePair) -> R) -> R {
        let host = self.connected.get_mut(&key).unwrap();
        self.world.key = key;
        let others = replace(&mut self.world.fabric.posted, take(&mut host.posted));
        let outcome = act(&mut self.world, &mut host.queue);
        host.posted = replace(&mut self.world.fabric.posted, others);
        outcome
    }

    fn send(&mut self, key: u32, sqe: &Sqe) {
        self.with(key, |world, queue| world.send(queue, sqe, &[]));
        self.serve();
    }

    /// Sends as many reads as its queue has places.
    fn fill(&mut self, key: u32) {
        (0..16).for_each(|cid| self.send(key, &large(IoOpcode::READ, cid)));
    }

    /// Allocates buffers to waiting commands.
    fn serve(&mut self) {
        clear(&mut self.world.waiters, &mut self.world.pool, self.world.now);
        while let Some(turn) = {
            let room = room(&self.world.pool, self.world.now);
            self.world.waiters.next_turn(&room)
        } {
            let take = self.with(turn.key, |world, queue| {
                queue.on_buffers(turn.slot, turn.aside, &mut world.io())
            });
            if !self.world.waiters.settle(turn, take, self.world.now) {
                return;
            }
        }
    }

    /// The disk ends an operation of this host, and all that follows from it happens.
    fn end_one(&mut self, key: u32) -> bool {
        let at = self.world.disk.waiting.iter().position(|(tag, _)| (tag >> 32) as u32 == key);
        let Some((tag, op)) = at.and_then(|at| self.world.disk.waiting.remove(at)) else {
            return false;
        };
        self.world.disk.waiting.push_front((tag, op));
        match self.gone.get_mut(&key) {
            Some(queue) => assert!(self.world.disk_step(queue)),
            None => self.with(key, |world, queue| {
                assert!(world.disk_step(queue));
                while world.fabric_step(queue) {}
            }),
        }
        self.serve();
        true
    }

    /// The disk ends an operation of this host, which takes nothing of what is sent to it.
    fn load_one(&mut self, key: u32) -> bool {
        let at = self.world.disk.waiting.iter().position(|(tag, _)| (tag >> 32) as u32 == key);
        let Some(taken) = at.and_then(|at| self.world.disk.waiting.remove(at)) else {
            return false;
        };
        self.world.disk.waiting.push_front(taken);
        self.with(key, |world, queue| world.disk_step(queue))
    }

    /// Operations that disks have of a host.
    fn at_disk(&self, key: u32) -> usize {
        self.world.disk.waiting.iter().filter(|(tag, _)| (tag >> 32) as u32 == key).count()
    }

    /// Buffers of the largest size that are free.
    fn free(&self) -> u64 {
        free_for_io(&self.world.pool) / u64::from(LARGE)
    }

    /// A host gives up: its connections are closed. What disks have stays with them, unless they
    /// give it back.
    fn give_up(&mut self, key: u32) {
        let Host { mut queue, posted, mut admin, admin_posted } =
            self.connected.remove(&key).unwrap();
        self.world.key = key;
        self.world.fabric.posted = admin_posted;
        self.world.flush_and_go(&mut admin);
        admin.finish(&mut self.world.io());
        self.world.fabric.posted = posted;
        self.world.flush_and_go(&mut queue);
        let asked = self.world.disk.recalls.len();
        queue.tick(&mut self.world.io());
        assert_eq!((self.at_disk(key), self.world.disk.recalls.len()), (asked, asked), "once");
        for _ in 0..asked {
            assert!(self.world.disk_step(&mut queue));
        }
        match queue.is_finished() {
            true => queue.finish(&mut self.world.io()),
            false => drop(self.gone.insert(key, queue)),
        }
        self.serve();
    }

    /// A host whose disk does well: reads and writes of the largest size are carried out, several of
    /// them at once.
    fn goes_on(&mut self, key: u32) {
        for round in 0..10 {
            for (cid, opcode) in
                [IoOpcode::READ, IoOpcode::WRITE, IoOpcode::READ].iter().enumerate()
            {
                self.send(key, &large(*opcode, round * 3 + cid as u16));
            }
            let mut answered = 0;
            while answered < 3 {
                self.with(key, |world, queue| while world.fabric_step(queue) {});
                assert!(self.end_one(key), "round {round}: {answered} of 3");
                answered += self.world.completions.drain(..).count();
            }
        }
    }

    /// The device responds again, and all connections end.
    fn finish(mut self) {
        while let Some((tag, _)) = self.world.disk.waiting.front() {
            let key = (tag >> 32) as u32;
            assert!(self.end_one(key));
        }
        assert!(self.world.waiters.is_empty());
        for queue in take(&mut self.gone).into_values() {
            assert!(queue.is_finished());
            queue.finish(&mut self.world.io());
        }
        for key in self.connected.keys().copied().collect::<Vec<_>>() {
            self.give_up(key);
        }
        self.world.pool.put_back();
        assert!(self.world.pool.is_full(), "{:?}", self.world.pool.free());
    }
}

#[test]
fn three_hosts_on_a_hung_device_leave_large_buffers_to_others() {
    let mut hosts = Hosts::new();
    let well = hosts.connect(false);
    let hung: Vec<u32> = (0..3).map(|_| hosts.connect(true)).collect();
    hung.iter().for_each(|key| hosts.fill(*key));
    // One alone may have four times of what is free. Then half of what is left is for the others.
    let held: Vec<usize> = hung.iter().map(|key| hosts.at_disk(*key)).collect();
    assert_eq!((held, hosts.free()), (vec![13, 2, 0], 1));
    hosts.goes_on(well);
    let another = hosts.connect(false);
    hosts.goes_on(another);
    assert_eq!(hosts.world.waiters.len(), 3 + 14 + 16, "those on the hung store");
    hosts.finish();
}

#[test]
fn a_reconnecting_host_of_a_hung_device_leaves_large_buffers_to_others() {
    let mut hosts = Hosts::new();
    let well = hosts.connect(false);
    let mut held = Vec::new();
    for _ in 0..6 {
        let key = hosts.connect(true);
        hosts.fill(key);
        held.push(hosts.at_disk(key));
        hosts.give_up(key);
        hosts.goes_on(well);
    }
    // The second one may find out whether the store does something.
    assert_eq!((held, hosts.free()), (vec![13, 1, 0, 0, 0, 0], 2));
    // The device responds again: connected hosts continue.
    let key = hosts.connect(true);
    hosts.fill(key);
    assert_eq!(hosts.at_disk(key), 0);
    for gone in hosts.gone.keys().copied().collect::<Vec<_>>() {
        while hosts.end_one(gone) {}
    }
    assert_eq!(hosts.at_disk(key), 13);
    hosts.finish();
}

/// A host has several paths to a store, and one of them goes quiet: what its commands hold is
/// waiting for their data.
#[test]
fn a_silent_path_does_not_block_other_paths_to_its_device() {
    let mut hosts = Hosts::new();
    let (quiet, path) = (hosts.connect(true), hosts.connect(true));
    (0..16).for_each(|cid| hosts.send(quiet, &large(IoOpcode::WRITE, cid)));
    assert_eq!((hosts.free(), hosts.at_disk(quiet)), (3, 0));
    hosts.goes_on(path);
    // And so does a third one, when the second is busy.
    let third = hosts.connect(true);
    hosts.send(path, &large(IoOpcode::READ, 100));
    hosts.goes_on(third);
    assert!(hosts.end_one(path));
    hosts.world.completions.clear();
    // Its data arrive in the end.
    hosts.with(quiet, |world, queue| while world.fabric_step(queue) {});
    hosts.finish();
}

/// Data that are on their way to hosts, are held for nobody's store: two hosts have lost their power.
#[test]
fn hosts_that_accept_no_data_leave_buffers_to_others_of_their_device() {
    let mut hosts = Hosts::new();
    let quiet = [hosts.connect(true), hosts.connect(true)];
    for key in quiet {
        (0..4).for_each(|cid| hosts.send(key, &large(IoOpcode::READ, cid)));
        (0..4).for_each(|_| assert!(hosts.load_one(key)));
    }
    assert_eq!((hosts.free(), quiet.map(|key| hosts.at_disk(key))), (8, [0, 0]));
    let third = hosts.connect(true);
    hosts.goes_on(third);
    (0..3).for_each(|cid| hosts.send(third, &large(IoOpcode::READ, 100 + cid)));
    assert_eq!(hosts.at_disk(third), 3);
    hosts.finish();
}

fn small(opcode: IoOpcode, block: u64, cid: u16) -> Sqe {
    Sqe::io(opcode, 1).with_range(block, 0).with_sgl(Sgl::in_capsule(0, 4096)).with_cid(cid)
}

impl Hosts {
    /// Writes a block, each time another one, with in-capsule data, which go to the disk at once or
    /// wait.
    fn write(&mut self, key: u32, cid: u16) {
        self.next_block += 1;
        self.write_block(key, cid, self.next_block, 0xAB);
    }

    fn write_block(&mut self, key: u32, cid: u16, block: u64, fill: u8) {
        let sqe = small(IoOpcode::WRITE, block, cid);
        self.with(key, |world, queue| world.send(queue, &sqe, &[fill; 4096]));
        self.serve();
    }

    /// A host's queue looks at what is shared.
    /// The reactor locks the changes that began without a lock.
    fn settle(&mut self) {
        let keys: Vec<u32> = self.connected.keys().copied().collect();
        for key in keys {
            self.with(key, |world, queue| queue.claim_begun(&world.io()));
        }
        self.world.shared.range_locks.settle();
    }

    /// A host sends a fused Compare and Write of a block of zeros.
    fn swap(&mut self, key: u32, block: u64) {
        for (opcode, fuse) in [(IoOpcode::COMPARE, 1), (IoOpcode::WRITE, 2)] {
            let sqe = small(opcode, block, fuse.into());
            let sqe = sqe.with_flags(sqe.flags.with_fuse(fuse));
            self.with(key, |world, queue| world.send(queue, &sqe, &[0; 4096]));
        }
    }

    /// Begins what has been granted its lock.
    fn tick(&mut self, key: u32) {
        self.with(key, |world, queue| queue.tick(&mut world.io()));
    }

    fn look(&mut self, key: u32) {
        self.with(key, |world, queue| world.look(queue));
    }

    /// What a block of the stores begins with, and whether all of it is the same.
    fn block(&self, block: usize) -> Option<u8> {
        let bytes = &self.world.disk.blocks[block << 12..][..4096];
        bytes.iter().all(|byte| *byte == bytes[0]).then_some(bytes[0])
    }

    /// Receive buffers of ended connections that devices hold.
    fn kept_receives(&self) -> u32 {
        self.gone.values().map(|queue| u32::from(queue.receives())).sum()
    }
}

/// In-capsule data go to the disk in the receives in which they came, and those are for everybody.
#[test]
fn a_reconnecting_host_of_a_hung_device_leaves_receives_to_others() {
    let mut hosts = Hosts::new();
    let all = hosts.world.pool.plan().receives;
    let well = hosts.connect(false);
    for _ in 0..40 {
        let key = hosts.connect(true);
        (0..16).for_each(|cid| hosts.write(key, cid));
        hosts.give_up(key);
        // Of what another host writes to another store nothing waits.
        hosts.write(well, 0);
        assert!(hosts.end_one(well) && hosts.world.completions.pop().is_some());
    }
    assert_eq!(hosts.kept_receives(), all / 4);
    hosts.goes_on(well);
    // Another device has its id: it is written, independent of operations of the first one.
    let key = hosts.connect(true);
    hosts.write(key, 7);
    assert_eq!(hosts.at_disk(key), 1);
    let (tag, op) = hosts.world.disk.waiting.back().unwrap();
    assert_eq!((tag >> 32) as u32, key);
    assert!(hosts.world.pool.bytes(op.buf().unwrap()) == [0xAB; 4096]);
    hosts.finish();
}

/// Nothing had been kept when they came.
#[test]
fn simultaneously_disconnecting_hosts_leave_receives_to_others() {
    let mut hosts = Hosts::new();
    let all = hosts.world.pool.plan().receives;
    let keys: Vec<u32> = (0..18).map(|_| hosts.connect(true)).collect();
    for key in &keys {
        (0..16).for_each(|cid| hosts.write(*key, cid));
    }
    keys.iter().for_each(|key| hosts.give_up(*key));
    assert_eq!(hosts.kept_receives(), all / 4);
    let well = hosts.connect(false);
    hosts.goes_on(well);
    hosts.finish();
}

/// What waits for others to be done with its blocks has not gone to the disk, and counts: many begin
/// together.
#[test]
fn receives_of_commands_waiting_for_range_locks_are_counted() {
    let mut hosts = Hosts::new();
    let all = hosts.world.pool.plan().receives;
    let first = hosts.connect(true);
    for (opcode, fuse) in [(IoOpcode::COMPARE, 1), (IoOpcode::WRITE, 2)] {
        let sqe = small(opcode, 0, fuse.into());
        let sqe = sqe.with_flags(sqe.flags.with_fuse(fuse));
        hosts.with(first, |world, queue| world.send(queue, &sqe, &[0; 4096]));
    }
    hosts.look(first);
    assert_eq!(hosts.at_disk(first), 1);
    let keys: Vec<u32> = (0..20).map(|_| hosts.connect(true)).collect();
    for key in &keys {
        (0..15).for_each(|cid| hosts.write_block(*key, cid, 0, 0xAB));
        assert_eq!(hosts.at_disk(*key), 0, "the block is another one's");
    }
    assert!(hosts.end_one(first) && hosts.end_one(first));
    keys.iter().for_each(|key| hosts.look(*key));
    assert!(keys.iter().all(|key| hosts.at_disk(*key) > 0));
    keys.iter().for_each(|key| hosts.give_up(*key));
    assert_eq!(hosts.kept_receives(), all / 4 - 1, "the first host had one");
    hosts.finish();
}

/// What waits in that way and never begins, counts no more when it is over.
#[test]
fn receives_not_yet_at_the_device_are_freed_on_disconnect() {
    let mut hosts = Hosts::new();
    let all = hosts.world.pool.plan().receives;
    let first = hosts.connect(true);
    hosts.write_block(first, 0, 0, 0xAA);
    hosts.give_up(first);
    for _ in 0..all / 4 / 16 * 2 {
        let key = hosts.connect(true);
        (0..16).for_each(|cid| hosts.write_block(key, cid, 0, 0xAB));
        assert_eq!(hosts.at_disk(key), 0);
        hosts.give_up(key);
    }
    assert_eq!(hosts.kept_receives(), 1);
    let key = hosts.connect(true);
    (0..16).for_each(|cid| hosts.write(key, cid));
    hosts.give_up(key);
    assert_eq!(hosts.kept_receives(), 17, "none of them was copied");
    hosts.finish();
}

/// A host has no answer to a write, gives up, comes again, writes the same, is answered, and writes the
/// next. The disk must not come with the first one then.
#[test]
fn a_write_of_a_lost_connection_does_not_overwrite_later_writes() {
    let mut hosts = Hosts::new();
    let old = hosts.connect(true);
    hosts.write_block(old, 0, 5, 0x11);
    hosts.send(old, &Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(8, 3).with_cid(1));
    hosts.give_up(old);
    assert_eq!(hosts.at_disk(old), 2);
    let (new, another) = (hosts.connect(true), hosts.connect(true));
    hosts.write_block(new, 0, 5, 0x22);
    hosts.write_block(another, 0, 11, 0x33);
    assert_eq!((hosts.at_disk(new), hosts.at_disk(another)), (0, 0), "of another host as well");
    // Nothing else waits: other blocks, reads, and the same blocks of another store.
    hosts.write_block(new, 1, 6, 0x22);
    hosts.write_block(another, 1, 12, 0x33);
    let read = Sqe::io(IoOpcode::READ, 1).with_range(5, 0).with_sgl(keyed(0, 4096)).with_cid(2);
    hosts.send(new, &read);
    let well = hosts.connect(false);
    hosts.write_block(well, 0, 5, 0);
    assert_eq!([new, another, well].map(|key| hosts.at_disk(key)), [2, 1, 1]);
    assert!(hosts.end_one(well));
    // A host that gives up while its write waits takes it along.
    let quitter = hosts.connect(true);
    hosts.write_block(quitter, 0, 5, 0x44);
    hosts.give_up(quitter);
    assert_eq!((hosts.at_disk(quitter), hosts.gone.len()), (0, 1));
    // The disk is back.
    assert!(hosts.end_one(old));
    [new, another].iter().for_each(|key| hosts.look(*key));
    assert_eq!((hosts.at_disk(new), hosts.at_disk(another)), (3, 1), "each waits for its own");
    assert!(hosts.end_one(old));
    hosts.look(another);
    assert_eq!(hosts.at_disk(another), 2);
    for key in [new, another] {
        while hosts.end_one(key) {}
    }
    assert_eq!([5, 11, 8].map(|block| hosts.block(block)), [Some(0x22), Some(0x33), Some(0)]);
    // It is not asked about any more.
    let before = hosts.world.disk.waiting.len();
    hosts.write_block(new, 9, 5, 0x55);
    assert_eq!(hosts.world.disk.waiting.len(), before + 1);
    hosts.finish();
}

/// What waits for an old write has done nothing: its host can have it back, and delete its queue.
#[test]
fn writes_waiting_for_one_of_a_lost_connection_can_be_aborted() {
    let mut hosts = Hosts::new();
    let old = hosts.connect(true);
    hosts.write_block(old, 0, 5, 0x11);
    hosts.give_up(old);
    let new = hosts.connect(true);
    (0..2).for_each(|cid| hosts.write_block(new, cid, 5, 0x22));
    let sender = mailbox().unwrap().0;
    let recall = hosts.with(new, |world, queue| {
        let association = queue.association().unwrap().id;
        let (recall, token) = AbortRequest::new(association, 1, 0, sender.waker());
        queue.on_abort(&token, &mut world.io());
        recall
    });
    let disconnect = Disconnect::default().emit().with_cid(2);
    hosts.send(new, &disconnect);
    hosts.with(new, |world, queue| while world.fabric_step(queue) {});
    let answers: Vec<_> =
        hosts.world.completions.drain(..).map(|it| (it.cid, it.status.code())).collect();
    assert_eq!(answers, [(0, 0x007), (1, 0x008), (2, 0)]);
    assert_eq!(recall.outcome(), Some(true));
    assert!(hosts.end_one(old));
    assert_eq!(hosts.block(5), Some(0x11), "they were aborted");
    hosts.finish();
}

/// As fused commands are about, all changes have claimed their blocks.
#[test]
fn a_range_locked_write_of_a_lost_connection_overwrites_no_later_data() {
    let mut hosts = Hosts::new();
    let (old, new) = (hosts.connect(true), hosts.connect(true));
    hosts.write_block(old, 0, 4, 0x11);
    hosts.swap(new, 7);
    hosts.settle();
    hosts.write_block(old, 1, 5, 0x11);
    hosts.tick(new);
    assert_eq!((hosts.at_disk(old), hosts.at_disk(new)), (2, 1));
    hosts.give_up(old);
    hosts.write_block(new, 10, 4, 0x22);
    hosts.write_block(new, 11, 5, 0x22);
    assert_eq!(hosts.at_disk(new), 1);
    while hosts.end_one(old) {}
    hosts.tick(new);
    assert_eq!(hosts.at_disk(new), 3);
    while hosts.end_one(new) {}
    assert_eq!([4, 5].map(|block| hosts.block(block)), [Some(0x22); 2]);
    hosts.finish();
}

/// As the first one is sent, changes are in progress that have not locked their blocks.
#[test]
fn a_fused_pair_waits_for_writes_of_its_blocks_and_not_for_a_hung_device() {
    let mut hosts = Hosts::new();
    let [hung, well, another] = [true, false, false].map(|hangs| hosts.connect(hangs));
    hosts.write_block(hung, 0, 5, 0x11);
    hosts.write_block(well, 0, 6, 0x22);
    hosts.write_block(well, 1, 5, 0);
    hosts.swap(another, 5);
    hosts.settle();
    hosts.tick(another);
    assert_eq!(hosts.at_disk(another), 0, "a write of its block is in progress");
    assert_eq!((hosts.end_one(well), hosts.end_one(well)), (true, true));
    hosts.tick(another);
    assert_eq!((hosts.at_disk(hung), hosts.at_disk(another)), (1, 1));
    while hosts.end_one(another) {}
    assert!(hosts.end_one(hung));
    hosts.finish();
}

/// Operations that a device has not started are cancelled when the connection is closed.
#[test]
fn operations_unstarted_by_the_device_are_cancelled_on_disconnect() {
    let mut hosts = Hosts::new();
    hosts.world.disk.gives_back = true;
    for _ in 0..6 {
        let key = hosts.connect(true);
        hosts.fill(key);
        assert_eq!((hosts.at_disk(key), hosts.free()), (13, 3));
        hosts.give_up(key);
        assert_eq!((hosts.at_disk(key), hosts.free(), hosts.gone.len()), (0, ROOM, 0));
    }
    hosts.finish();
}

/// Two hosts share a store that does well, and no large buffer is free: their small commands go on
/// several at a time.
#[test]
fn hosts_sharing_a_device_proceed_when_few_buffers_are_free() {
    let mut hosts = Hosts::new();
    let keys = [hosts.connect(true), hosts.connect(true)];
    let mut taken = Vec::new();
    (1..ROOM).for_each(|_| taken.extend(hosts.world.pool.take_data(LARGE)));
    taken.extend(hosts.world.pool.take_data(4096));
    assert_eq!(free_for_io(&hosts.world.pool), u64::from(LARGE) - 4096);
    let read =
        |cid| Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096)).with_cid(cid);
    for cid in 0..8 {
        keys.iter().for_each(|key| hosts.send(*key, &read(cid)));
    }
    let held = keys.map(|key| hosts.at_disk(key));
    assert!(held.iter().all(|held| *held >= 2), "{held:?}");
    // A third one asks for no buffer.
    let third = hosts.connect(true);
    hosts.send(third, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(0));
    assert_eq!(hosts.at_disk(third), 1);
    taken.into_iter().for_each(|buf| hosts.world.pool.give(buf));
    hosts.finish();
}

/// Commands without buffers wait neither for a device that holds too many nor behind others.
#[test]
fn a_flush_does_not_wait_for_buffers_held_by_a_hung_device() {
    let mut hosts = Hosts::new();
    let hung: Vec<u32> = (0..3).map(|_| hosts.connect(true)).collect();
    hung.iter().for_each(|key| hosts.fill(*key));
    let another = hosts.connect(true);
    hosts.send(another, &large(IoOpcode::READ, 0));
    assert_eq!((hosts.at_disk(another), hosts.free()), (0, 1), "the store is closed");
    hosts.send(another, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(1));
    hosts.write(another, 2);
    assert_eq!((hosts.at_disk(another), hosts.world.waiters.len()), (2, 3 + 14 + 16 + 1));
    hosts.finish();
}

/// Small commands of others do not take what a large one waits for, for ever.
#[test]
fn a_large_command_is_not_starved_by_small_ones_to_its_device() {
    let mut hosts = Hosts::new();
    let keys: Vec<u32> = (0..4).map(|_| hosts.connect(true)).collect();
    let (large_one, small) = keys.split_last().unwrap();
    let quarter = LARGE / 4;
    let read = |cid| {
        let sqe = Sqe::io(IoOpcode::READ, 1).with_range(0, (quarter >> 12) as u16 - 1);
        sqe.with_sgl(keyed(0, quarter)).with_cid(cid)
    };
    for key in small {
        (0..15).for_each(|cid| hosts.send(*key, &read(cid)));
    }
    (0..3).for_each(|cid| hosts.send(*large_one, &large(IoOpcode::READ, cid)));
    let mut left = 3;
    for step in 0..60u16 {
        for key in small {
            if hosts.end_one(*key) {
                hosts.send(*key, &read(100 + step));
            }
        }
        if hosts.end_one(*large_one) {
            left -= 1;
        }
        hosts.world.completions.clear();
    }
    assert_eq!(left, 0);
    hosts.finish();
}
