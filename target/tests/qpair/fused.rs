//! Fused Compare and Write: what each half is answered, and that nobody changes the blocks between
//! the halves, on whatever reactor.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::sqe::{DsmRange, Flags};
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe, Status};
use nvmfd::blockdev::{DeviceId, IoCompletion, IoRequest};
use nvmfd::core::message::mailbox;
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::shared::Shared;
use nvmfd::core::subsystem::reservation::Reservation;
use rdma::{Tag, Work};

use crate::support::{World, end_both, io_queue, keyed, share, subsystem};

const BLOCK: usize = 4096;
const MISSING: u16 = Status::ABORTED_MISSING_FUSED.code();
const FAILED: u16 = Status::ABORTED_FAILED_FUSED.code();

fn half(opcode: IoOpcode, fuse: u8, cid: u16) -> Sqe {
    let flags = Flags::SGL.with_fuse(fuse);
    let sgl = Sgl::in_capsule(0, BLOCK as u32);
    Sqe::io(opcode, 1).with_range(5, 0).with_sgl(sgl).with_flags(flags).with_cid(cid)
}

fn compare(cid: u16) -> Sqe {
    half(IoOpcode::COMPARE, Flags::FUSED_FIRST, cid)
}

fn write(cid: u16) -> Sqe {
    half(IoOpcode::WRITE, Flags::FUSED_SECOND, cid)
}

/// Command id, code, do not retry.
type Answers<'a> = &'a [(u16, u16, bool)];

/// What has been answered.
fn answers(world: &mut World) -> Vec<(u16, u16, bool)> {
    let answers = world.completions.drain(..);
    answers.map(|cqe| (cqe.cid, cqe.status.code(), cqe.status.dnr())).collect()
}

fn block(world: &World) -> Vec<u8> {
    world.disk.blocks[5 * BLOCK..6 * BLOCK].to_vec()
}

/// Another namespace may have taken the number in between. The host has made no mistake.
#[test]
fn fused_halves_for_different_devices_under_one_nsid_fail() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let old = block(&world);
    world.send(&mut queue, &compare(1), &old);
    world.run(&mut queue);
    let mut other = subsystem();
    other.namespaces[0].backing = DeviceId(7);
    queue.on_subsystem(&Arc::new(other), &mut world.io());
    world.send(&mut queue, &write(2), &[0xAA; BLOCK]);
    world.run(&mut queue);
    let gone = Status::INVALID_NAMESPACE.code();
    assert_eq!(answers(&mut world), [(1, gone, true), (2, FAILED, true)]);
    assert_eq!((block(&world), world.disk.backings.len()), (old, 0));
    end_both(world, queue, admin, posted);
}

/// Another daemon may change the blocks between the halves.
#[test]
fn a_shared_namespace_takes_no_fused_command() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let mut shared = subsystem();
    shared.namespaces[0].reservation = Reservation::none(shared.nqn, 1);
    queue.on_subsystem(&Arc::new(shared), &mut world.io());
    let old = block(&world);
    world.send(&mut queue, &compare(1), &old);
    world.send(&mut queue, &write(2), &[0xAA; BLOCK]);
    world.run(&mut queue);
    let refused = Status::INVALID_FIELD.code();
    assert_eq!(answers(&mut world), [(1, refused, true), (2, FAILED, true)]);
    assert_eq!(block(&world), old);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_fused_write_is_executed_only_if_the_compare_succeeds() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let old = block(&world);
    world.send(&mut queue, &compare(1), &old);
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "it waits for the other half");
    world.send(&mut queue, &write(2), &[0xAA; BLOCK]);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(1, 0, false), (2, 0, false)]);
    assert_eq!(block(&world), [0xAA; BLOCK]);
    world.send(&mut queue, &compare(3), &old);
    world.send(&mut queue, &write(4), &[0xBB; BLOCK]);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(3, 0x285, true), (4, FAILED, true)]);
    assert_eq!(block(&world), [0xAA; BLOCK]);
    // The data in the host's memory, pulled at once.
    world.memory[..BLOCK].fill(0xAA);
    world.memory[BLOCK..2 * BLOCK].fill(0xCC);
    world.send(&mut queue, &compare(5).with_sgl(keyed(0, 4096)), &[]);
    world.send(&mut queue, &write(6).with_sgl(keyed(4096, 4096)).with_fua(true), &[]);
    world.trace.clear();
    assert!(world.fabric_step(&mut queue) && world.disk.waiting.is_empty());
    world.run(&mut queue);
    assert_eq!(world.trace, ["pull", "pull", "send", "send"]);
    assert_eq!(answers(&mut world), [(5, 0, false), (6, 0, false)]);
    assert_eq!(block(&world), [0xCC; BLOCK]);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_fused_write_uses_fua_only_if_the_host_requests_it() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for wanted in [true, false] {
        let old = block(&world);
        world.send(&mut queue, &compare(1), &old);
        world.send(&mut queue, &write(2).with_fua(wanted), &[0xAA; BLOCK]);
        let asked = loop {
            match world.disk.waiting.front() {
                Some((_, IoRequest::Write { fua, .. })) => break *fua,
                _ => assert!(world.disk_step(&mut queue) || world.look(&mut queue)),
            }
        };
        assert_eq!(asked, wanted);
        world.run(&mut queue);
        assert_eq!(answers(&mut world), [(1, 0, false), (2, 0, false)]);
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn halves_without_their_other_half_are_aborted() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let before = world.disk.blocks.clone();
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096));
    let cases: [(&[Sqe], Answers<'_>); 6] = [
        (&[write(1)], &[(1, MISSING, true)]),
        (&[compare(1), read.with_cid(2)], &[(1, MISSING, true), (2, 0, false)]),
        (
            &[compare(1), write(2).with_flags(Flags::SGL), write(3)],
            &[(1, MISSING, true), (2, 0, false), (3, MISSING, true)],
        ),
        (
            &[compare(1), compare(2), compare(3), read.with_cid(4)],
            &[(1, MISSING, true), (2, MISSING, true), (3, MISSING, true), (4, 0, false)],
        ),
        (
            &[compare(1), compare(2).with_flags(Flags::SGL.with_fuse(3)), write(3)],
            &[(1, MISSING, true), (2, 0x002, true), (3, MISSING, true)],
        ),
        // Connect, on a queue that is connected.
        (
            &[compare(1), Sqe { opcode: 0x7F, ..read }.with_cid(2)],
            &[(1, MISSING, true), (2, 0x00C, true)],
        ),
    ];
    for (sqes, expected) in cases {
        for sqe in sqes {
            let inline = sqe.opcode != IoOpcode::READ.0;
            let data = before[5 * BLOCK..6 * BLOCK].to_vec();
            world.send(&mut queue, sqe, if inline { &data } else { &[] });
        }
        world.run(&mut queue);
        let mut got = answers(&mut world);
        got.sort();
        assert_eq!(got, expected);
        assert!(world.disk.blocks == before);
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn a_half_that_is_wrong_fails_both() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let before = world.disk.blocks.clone();
    let (beyond, invalid) = (Status::LBA_OUT_OF_RANGE.code(), Status::INVALID_FIELD.code());
    let unit = Status::ATOMIC_WRITE_UNIT_EXCEEDED.code();
    let second = |opcode| half(opcode, Flags::FUSED_SECOND, 2);
    let cases = [
        ("first beyond the end", compare(1).with_range(1 << 20, 0), write(2), beyond, FAILED),
        ("first no Compare", half(IoOpcode::READ, 1, 1), write(2), invalid, FAILED),
        ("first a Write", half(IoOpcode::WRITE, 1, 1), write(2), invalid, FAILED),
        ("first of no namespace", compare(1).with_nsid(9), write(2), 0x00B, FAILED),
        ("second beyond the end", compare(1), write(2).with_range(1 << 20, 0), FAILED, beyond),
        ("second no Write", compare(1), second(IoOpcode::COMPARE), FAILED, invalid),
        (
            "second a Flush",
            compare(1),
            second(IoOpcode::FLUSH).with_sgl(Sgl::NONE),
            FAILED,
            invalid,
        ),
        ("other blocks", compare(1), write(2).with_range(6, 0), invalid, invalid),
        ("second of no namespace", compare(1), write(2).with_nsid(9), FAILED, 0x00B),
        ("second too long", compare(1), write(2).with_range(5, 1), FAILED, 0x00F),
    ];
    for (what, first, second, of_first, of_second) in cases {
        world.send(&mut queue, &first, &before[5 * BLOCK..6 * BLOCK]);
        let flush = second.opcode == IoOpcode::FLUSH.0;
        world.send(&mut queue, &second, if flush { &[] } else { &[7; BLOCK] });
        world.run(&mut queue);
        let mut got = answers(&mut world);
        got.sort();
        assert_eq!(got, [(1, of_first, true), (2, of_second, true)], "{what}");
        assert!(world.disk.blocks == before, "{what}");
    }
    // More than one block exceeds the atomic write unit.
    let long = |sqe: Sqe| sqe.with_range(5, 1).with_sgl(keyed(0, 8192));
    world.send(&mut queue, &long(compare(1)), &[]);
    world.send(&mut queue, &long(write(2)), &[]);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(1, unit, true), (2, FAILED, true)]);
    end_both(world, queue, admin, posted);
    // On the admin queue there are none.
    let (mut world, mut admin, _) = World::with_admin_queue();
    let identify = Sqe::admin(AdminOpcode::IDENTIFY).with_flags(Flags::SGL.with_fuse(1));
    let got = world.ask(&mut admin, &identify, &[]);
    assert!(got.status.is(Status::INVALID_FIELD), "{}", got.status);
    world.end(admin);
}

#[test]
fn device_errors_are_reported_by_each_fused_half() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let old = block(&world);
    let send = |world: &mut World, queue: &mut QueuePair| {
        world.send(queue, &compare(1), &old);
        world.send(queue, &write(2), &[0xAA; BLOCK]);
        while world.disk.waiting.is_empty() {
            assert!(world.look(queue));
        }
    };
    send(&mut world, &mut queue);
    world.disk.fail = Some(Status::UNRECOVERED_READ_ERROR);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(1, 0x281, false), (2, FAILED, true)]);
    world.disk.fail = None;
    send(&mut world, &mut queue);
    assert!(world.disk_step(&mut queue), "compared");
    world.disk.fail = Some(Status::WRITE_FAULT);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(1, 0, false), (2, 0x280, false)]);
    assert_eq!(block(&world), old);
    world.disk.fail = None;
    send(&mut world, &mut queue);
    world.run(&mut queue);
    assert_eq!(answers(&mut world), [(1, 0, false), (2, 0, false)], "nothing is left behind");
    end_both(world, queue, admin, posted);
}

#[test]
fn locked_ranges_are_released_whenever_a_fused_connection_closes() {
    // Another reactor, whose fused command waits behind the first one's.
    for steps in 0..8 {
        let shared = shared(2);
        let [mut one, mut two] = [0, 1].map(|reactor| World::of(Arc::clone(&shared), reactor));
        let (mut queue, admin, posted) = io_queue(&mut one);
        let (mut other, other_admin, other_posted) = io_queue(&mut two);
        one.memory[..BLOCK].copy_from_slice(&block(&two));
        one.send(&mut queue, &compare(1).with_sgl(keyed(0, 4096)), &[]);
        for step in 0..steps {
            match step {
                0 => one.send(&mut queue, &write(2).with_sgl(keyed(0, 4096)), &[]),
                1 | 2 => assert!(one.fabric_step(&mut queue)),
                3 => assert!(!two.look(&mut other) && one.look(&mut queue)),
                4 | 5 => assert!(one.disk_step(&mut queue)),
                _ => assert!(one.fabric_step(&mut queue)),
            }
        }
        let old = block(&two);
        two.send(&mut other, &compare(3), &old);
        two.send(&mut other, &write(4), &[0xEE; BLOCK]);
        one.look(&mut queue);
        two.look(&mut other);
        end_both(one, queue, admin, posted);
        two.look(&mut other);
        if shared.range_locks.round() > 0 && two.disk.waiting.is_empty() {
            // The reactor of the first has ended its queue before it has looked.
            shared.range_locks.settle();
        }
        two.run(&mut other);
        assert_eq!(answers(&mut two), [(3, 0, false), (4, 0, false)], "after {steps} steps");
        end_both(two, other, other_admin, other_posted);
    }
}

#[test]
fn deferred_writes_are_released_when_their_connection_closes() {
    let shared = shared(2);
    let [mut one, mut two] = [0, 1].map(|reactor| World::of(Arc::clone(&shared), reactor));
    let (mut queue, admin, posted) = io_queue(&mut one);
    let (mut other, other_admin, other_posted) = io_queue(&mut two);
    let old = block(&one);
    one.send(&mut queue, &compare(1), &old);
    one.send(&mut queue, &write(2), &[0xAA; BLOCK]);
    two.look(&mut other);
    assert!(one.look(&mut queue), "it begins");
    for (cid, sqe) in (10..).zip([
        write(0).with_flags(Flags::SGL),
        Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(5, 0),
        write(0).with_flags(Flags::SGL).with_sgl(keyed(0, 4096)),
    ]) {
        let inline = sqe.sgl() == Ok(Sgl::in_capsule(0, BLOCK as u32));
        two.send(&mut other, &sqe.with_cid(cid), if inline { &old } else { &[] });
    }
    while two.fabric_step(&mut other) {}
    assert!(two.disk.waiting.is_empty(), "held back");
    end_both(two, other, other_admin, other_posted);
    one.run(&mut queue);
    assert_eq!(answers(&mut one), [(1, 0, false), (2, 0, false)]);
    end_both(one, queue, admin, posted);
}

fn shared(reactors: usize) -> Arc<Shared> {
    let senders = (0..reactors).map(|_| mailbox().unwrap().0).collect();
    let registry = Registry::new(senders, 8, 70);
    registry.publish(Arc::new(subsystem()));
    share(registry)
}

// ---- many hosts on one block

/// A host with a queue on a reactor of its own.
struct Host {
    world: World,
    queue: QueuePair,
    admin: (QueuePair, VecDeque<(Tag, Work)>),
    /// Swaps under way: the id of the Compare, where in memory their data are, what they write.
    swaps: BTreeMap<u16, (usize, u64)>,
    next_cid: u16,
    under_way: usize,
}

/// Several hosts, one disk, and dice.
struct Crowd {
    hosts: Vec<Host>,
    blocks: Vec<u8>,
    state: u64,
    last: u64,
    /// This many plain writes follow.
    calm: usize,
    /// What the last swap that was sent writes.
    latest: u64,
    /// What a swap that writes this value expects to find.
    expects: BTreeMap<u64, u64>,
    swapped: u64,
    missed: u64,
}

fn value(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(*bytes.first_chunk().unwrap())
}

fn filled(value: u64) -> Vec<u8> {
    value.to_le_bytes().repeat(BLOCK / 8)
}

impl Crowd {
    fn new(hosts: usize, seed: u64) -> Crowd {
        let shared = shared(hosts);
        let host = |reactor| {
            let mut world = World::of(Arc::clone(&shared), reactor);
            let (queue, admin, posted) = io_queue(&mut world);
            let (swaps, next_cid, under_way) = (BTreeMap::new(), 0, 0);
            Host { world, queue, admin: (admin, posted), swaps, next_cid, under_way }
        };
        Crowd {
            hosts: (0..hosts).map(host).collect(),
            blocks: vec![0; 16 * BLOCK],
            state: seed,
            last: 0,
            calm: 0,
            latest: 0,
            expects: BTreeMap::new(),
            swapped: 0,
            missed: 0,
        }
    }

    /// The next number below `end` (splitmix64).
    fn below(&mut self, end: usize) -> usize {
        self.state = self.state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.state;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ z >> 31) % end as u64) as usize
    }

    /// A host sends a command: most are swaps of block 0.
    fn send(&mut self, index: usize) {
        let mut kind = self.below(40);
        match self.calm.checked_sub(1) {
            // So many writes, and changes are not watched any more.
            Some(left) => (self.calm, kind) = (left, 0),
            None if self.below(400) == 0 => self.calm = 400,
            None => {}
        }
        self.last += 1;
        let new = self.last;
        let seen = value(&self.blocks);
        // Some ask for what is there, some for what will be when the last one has succeeded.
        let expected = if self.below(2) == 0 { seen } else { self.latest };
        let inline = self.below(4) > 0;
        let host = &mut self.hosts[index];
        host.next_cid = host.next_cid.wrapping_add(2) & 0x0FFF;
        let cid = host.next_cid;
        let range = |sqe: Sqe| sqe.with_range(0, 0).with_cid(cid);
        host.under_way += match kind {
            0..=2 => {
                let sqe = range(write(cid)).with_flags(Flags::SGL);
                host.world.send(&mut host.queue, &sqe, &filled(new));
                1
            }
            3 => {
                let sqe = range(Sqe::io(IoOpcode::WRITE_ZEROES, 1));
                host.world.send(&mut host.queue, &sqe, &[]);
                1
            }
            4 => {
                let sqe = Sqe::deallocation(1, 1).with_sgl(Sgl::in_capsule(0, 32)).with_cid(cid);
                let range = |slba| DsmRange { attributes: 0, blocks: 1, slba }.emit();
                host.world.send(&mut host.queue, &sqe, &[range(3), range(0)].concat());
                1
            }
            5 => {
                let copy = Copy { sdlba: 0, flags: CopyFlags(0) };
                let sqe = copy.emit(1, Sgl::in_capsule(0, 32)).with_cid(cid);
                let range = CopyRange { slba: 1, nlb_z: 0 };
                host.world.send(&mut host.queue, &sqe, &range.emit());
                1
            }
            6 => {
                let other = range(write(cid)).with_flags(Flags::SGL).with_range(2, 0);
                host.world.send(&mut host.queue, &other, &filled(new));
                1
            }
            7 => {
                host.world.send(&mut host.queue, &range(write(cid)), &filled(new));
                1
            }
            _ => {
                self.latest = new;
                self.expects.insert(new, expected);
                let is_taken = |place: &usize| host.swaps.values().any(|(taken, _)| taken == place);
                let place = (0..8).find(|place| !is_taken(place)).expect("few at once");
                host.swaps.insert(cid, (place, new));
                let sgl = |index: usize| match inline {
                    true => Sgl::in_capsule(0, BLOCK as u32),
                    false => keyed(((place * 2 + index) * BLOCK) as u64, 4096),
                };
                let halves = [(compare(cid), expected), (write(cid + 1), new)];
                for (index, (sqe, value)) in halves.into_iter().enumerate() {
                    let sqe = sqe.with_range(0, 0).with_sgl(sgl(index));
                    match sqe.sgl().unwrap() {
                        Sgl::Keyed { addr, .. } => {
                            host.world.memory[addr as usize..][..BLOCK]
                                .copy_from_slice(&filled(value));
                            host.world.send(&mut host.queue, &sqe, &[]);
                        }
                        Sgl::InCapsule { .. } => {
                            host.world.send(&mut host.queue, &sqe, &filled(value));
                        }
                    }
                }
                2
            }
        };
    }

    /// Any of the operations at a disk of a host happens; false when there is none.
    fn disk_step(&mut self, index: usize) -> bool {
        let count = self.hosts[index].world.disk.waiting.len();
        if count == 0 {
            return false;
        }
        let pick = self.below(count);
        let Host { world, queue, .. } = &mut self.hosts[index];
        let (tag, op) = world.disk.waiting.remove(pick).unwrap();
        let range = |at: u64, len: u64| at as usize..(at + len) as usize;
        let buf = match op {
            IoRequest::Read { mut into, at } => {
                let range = range(at, into.len().into());
                world.pool.bytes_mut(&mut into).copy_from_slice(&self.blocks[range]);
                Some(into)
            }
            IoRequest::Write { from, at, .. } => {
                let bytes = world.pool.bytes(&from);
                if let (0, Some(expected)) = (at, self.expects.get(&value(bytes))) {
                    let found = value(&self.blocks);
                    assert_eq!(found, *expected, "swapped, but not what was compared");
                }
                self.blocks[range(at, from.len().into())].copy_from_slice(bytes);
                Some(from)
            }
            IoRequest::Discard { at, len } | IoRequest::Zero { at, len, .. } => {
                self.blocks[range(at, len)].fill(0);
                None
            }
            IoRequest::Flush => None,
        };
        queue.on_disk(tag as u16, IoCompletion { tag, buf, outcome: Ok(()) }, &mut world.io());
        true
    }

    /// Takes the answers of a host.
    fn hear(&mut self, index: usize) {
        let host = &mut self.hosts[index];
        let mut failed = BTreeMap::new();
        for cqe in host.world.completions.drain(..) {
            host.under_way -= 1;
            match cqe.status.code() {
                0 => {
                    if host.swaps.remove(&cqe.cid).is_some() {
                        self.swapped += 1;
                    }
                }
                0x285 => {
                    let (_, new) = host.swaps.remove(&cqe.cid).expect("a swap");
                    assert!(self.expects.remove(&new).is_some());
                    self.missed += 1;
                    failed.insert(cqe.cid + 1, ());
                }
                FAILED | MISSING => {}
                code => panic!("{code:#x}"),
            }
        }
    }

    fn turn(&mut self, may_send: bool) -> bool {
        let index = self.below(self.hosts.len());
        let action = self.below(6);
        let host = &mut self.hosts[index];
        match action {
            0 if may_send && host.under_way < 8 => self.send(index),
            0 | 1 => drop(host.world.look(&mut host.queue)),
            2 | 3 => drop(host.world.fabric_step(&mut host.queue)),
            _ => drop(self.disk_step(index)),
        }
        let host = &mut self.hosts[index];
        host.world.serve_waiters(&mut host.queue);
        self.hear(index);
        self.hosts.iter().any(|host| host.under_way > 0)
    }

    fn end(mut self) {
        while self.turn(false) {}
        for host in self.hosts {
            assert!(host.swaps.is_empty());
            end_both(host.world, host.queue, host.admin.0, host.admin.1);
        }
    }
}

/// `SWAPS` sets how many for each number of hosts: `make sim SWAPS=1000000`.
#[test]
fn concurrent_compare_and_write_loses_no_update_across_reactors() {
    let swaps = std::env::var("SWAPS").ok().and_then(|text| text.parse().ok()).unwrap_or(10_000);
    for hosts in [2, 3, 1] {
        let mut crowd = Crowd::new(hosts, hosts as u64);
        while crowd.swapped + crowd.missed < swaps {
            crowd.turn(true);
        }
        let (swapped, missed) = (crowd.swapped, crowd.missed);
        let rounds = crowd.hosts[0].world.shared.range_locks.round();
        assert!(u64::from(rounds) > swaps / 2000, "{rounds}");
        println!("{hosts} hosts: {swapped} swapped, {missed} found something else");
        assert!(swapped > swaps / 20 && missed > swaps / 20, "{swapped} {missed}");
        crowd.end();
    }
}

/// The halves arrive while all slots wait for their responses to come home. What comes home first
/// is the data of a read, which frees no slot.
#[test]
fn halves_that_wait_for_a_slot_stay_in_their_order() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let old = block(&world);
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096));
    for cid in 0..32 {
        world.send(&mut queue, &read.with_cid(cid), &[]);
        assert!(world.disk_step(&mut queue), "its data and response are posted");
    }
    world.send(&mut queue, &compare(100), &old);
    world.send(&mut queue, &write(101), &[0xAA; BLOCK]);
    world.send(&mut queue, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(102), &[]);
    assert!(world.disk.waiting.is_empty(), "all slots are taken");
    world.run(&mut queue);
    let answers: Vec<_> =
        world.completions.drain(..).map(|cqe| (cqe.cid, cqe.status.code())).collect();
    assert_eq!(answers.len(), 32 + 3);
    for cid in 100..103 {
        assert!(answers.contains(&(cid, 0)), "{answers:?}");
    }
    assert_eq!(block(&world), [0xAA; BLOCK]);
    end_both(world, queue, admin, posted);
}

/// Nothing but the other half has an order to a half: a pair whose data are there overtakes writes
/// that still wait for theirs, and finds what was there before. What was answered before it was
/// sent, it finds. The loop of SPDK's `fused_ordering` expects more on the first round.
#[test]
fn a_pair_may_overtake_writes_that_are_not_answered_and_none_that_are() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let old = block(&world);
    assert_ne!(old, [0; BLOCK]);
    world.memory[..2 * BLOCK].fill(0);
    let zeros = |cid| {
        let flags = Flags::SGL;
        let sqe = Sqe::io(IoOpcode::WRITE, 1).with_range(5, 1).with_flags(flags).with_cid(cid);
        sqe.with_sgl(keyed(0, 2 * BLOCK as u32))
    };
    for answered in [false, true] {
        world.disk.blocks[5 * BLOCK..6 * BLOCK].copy_from_slice(&old);
        (10..18).for_each(|cid| world.send(&mut queue, &zeros(cid), &[]));
        if answered {
            world.run(&mut queue);
            assert_eq!(answers(&mut world).len(), 8);
        }
        world.send(&mut queue, &compare(1), &[0; BLOCK]);
        world.send(&mut queue, &write(2), &[0; BLOCK]);
        // The data of the pair came in the capsules; those of the writes are still to be pulled.
        while world.look(&mut queue) || world.disk_step(&mut queue) {}
        world.run(&mut queue);
        let mut got = answers(&mut world);
        got.sort();
        let (of_first, of_second) = if answered { (0, 0) } else { (0x285, FAILED) };
        let dnr = !answered;
        assert_eq!(got[..2], [(1, of_first, dnr), (2, of_second, dnr)]);
        assert!(got[2..].iter().all(|(_, code, _)| *code == 0), "{got:?}");
        assert_eq!(block(&world), [0; BLOCK], "the writes are carried out all the same");
    }
    end_both(world, queue, admin, posted);
}
