//! What was checked when a command came is checked again when it begins: it may have waited for
//! long.

use std::sync::Arc;
use std::time::Duration;

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::log::AnaState;
use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, Register, RegisterKeys, ReservationType,
};
use nvme::sqe::{DsmRange, Flags};
use nvme::{IoOpcode, Sgl, Sqe, Status};
use nvmfd::blockdev::DeviceId;
use nvmfd::core::message::{Message, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::offload::{Job, ReservationRequest};
use nvmfd::core::sched::range_lock::RangeLock;
use nvmfd::core::subsystem::Subsystem;
use nvmfd::core::subsystem::ana::AnaStates;
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::lba_format::Progress;
use nvmfd::core::subsystem::rate_limit::{Limit, Limiter};
use nvmfd::core::subsystem::reservation::{Barred, Order};
use nvmfd::worker::Workers;
use nvmfd::worker::ns_state::NamespaceStateWorker;

use crate::sgl::scattered;
use crate::support::{SIZE, World, end_both, io_queue, keyed, subsystem};

const OWN: [u8; 16] = [5; 16];
const OTHER: [u8; 16] = [6; 16];
const FIRST: u16 = 0x40;
const SECOND: u16 = 0x41;

/// The subsystem with a limit of 1,000 commands a second on its namespace.
fn limited(world: &World) -> Subsystem {
    let limit = Limit { iops: Some(1000), bandwidth: None, burst_ms: 0 };
    let mut subsystem = subsystem();
    subsystem.namespaces[0].limiters = vec![Arc::new(Limiter::new(limit, world.now))];
    subsystem
}

/// Advances the time and starts permitted commands.
fn later(world: &mut World, queue: &mut QueuePair, time: Duration) {
    world.now += time;
    let now = world.now;
    while let Some((_, slot)) = world.waiters.rate_limits.next(now, |_, slot| queue.book(slot, now))
    {
        queue.on_rate_limit(slot, &mut world.io());
    }
    world.run(queue);
    // Commands that were refused at their turn.
    world.run(queue);
}

#[test]
fn rate_limited_writes_are_not_executed_after_a_completed_preempt() {
    let (sender, message) = mailbox().unwrap();
    let mut worker = NamespaceStateWorker::new();
    let mut world = World::new();
    let subsystem = limited(&world);
    let reservation = Arc::clone(&subsystem.namespaces[0].reservation);
    let workers = Workers::default().with_ns_state(worker.sender());
    world.replace(Registry::new(vec![sender], 8, 70), workers);
    world.registry.publish(Arc::new(subsystem));
    let (mut queue, admin, posted) = io_queue(&mut world);
    let mut order = |world: &World, host, order| {
        let of = vec![Arc::clone(&reservation)];
        let request = ReservationRequest { of, host, order, reactor: 0, tag: 0 };
        assert!(world.shared.offload.submit(Job::Reserve(request)));
        worker.catch_up(&world.registry);
        // The answers: none of them is for a queue of this world.
        while message.take().is_some() {}
    };
    let how = Acquire(0).with_rtype(ReservationType::WRITE_EXCLUSIVE);
    let register = |key| Order::Register(Register(0), RegisterKeys { current: 0, new: key });
    order(&world, OWN, register(1));
    order(&world, OWN, Order::Acquire(how, AcquireKeys { current: 1, preempt: 0 }));
    for cid in 0..12 {
        let write = Sqe::io(IoOpcode::WRITE, 1).with_range(3, 0).with_sgl(keyed(0, 4096));
        world.send(&mut queue, &write.with_cid(cid), &[]);
    }
    later(&mut world, &mut queue, Duration::ZERO);
    assert_eq!(world.disk.trace, ["store"], "the limit lets one begin");
    order(&world, OTHER, register(2));
    let preempt = how.with_action(AcquireAction::PREEMPT);
    order(&world, OTHER, Order::Acquire(preempt, AcquireKeys { current: 2, preempt: 1 }));
    assert_eq!(reservation.state().registrants, [(OTHER, 2)].into());
    for _ in 0..11 {
        later(&mut world, &mut queue, Duration::from_millis(1));
    }
    assert_eq!(world.disk.trace, ["store"], "nothing is written after the Preempt was answered");
    let (first, rest) = world.completions.split_first().unwrap();
    assert!(first.status.is_success() && rest.len() == 11);
    assert!(rest.iter().all(|cqe| cqe.status.is(Status::RESERVATION_CONFLICT) && cqe.status.dnr()));
    world.completions.clear();
    end_both(world, queue, admin, posted);
}

/// What a command waits for.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Wait {
    Limit,
    Buffer,
    Pull,
    /// A fused command has the blocks.
    Claim,
}

/// Events in between.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Change {
    Reserved,
    Protected,
    Removed,
    Replaced,
    Formatted,
    Inaccessible,
    Shrunk,
}

impl Change {
    const ALL: [Change; 7] = [
        Change::Reserved,
        Change::Protected,
        Change::Removed,
        Change::Replaced,
        Change::Formatted,
        Change::Inaccessible,
        Change::Shrunk,
    ];

    fn happens(self, old: &Subsystem, world: &mut World, queue: &mut QueuePair) {
        let association = Arc::clone(queue.association().unwrap());
        let mut new = old.clone();
        match self {
            Change::Reserved => association.reservations.set_barred(1, Barred::ALL),
            Change::Inaccessible => {
                association.reach.set(&AnaStates::all(AnaState::INACCESSIBLE));
            }
            Change::Protected => new.namespaces[0].read_only = true,
            Change::Removed => new.namespaces.clear(),
            Change::Replaced => {
                new.namespaces[0] = {
                    let backing = DeviceId(7);
                    let marks = BadBlocks::volatile();
                    nvmfd::core::subsystem::Namespace {
                        backing,
                        marks,
                        uuid: [9; 16],
                        ..new.namespaces[0].clone()
                    }
                }
            }
            Change::Formatted => new.namespaces[0].formatting = Some(Arc::new(Progress::none())),
            Change::Shrunk => new.namespaces[0].blocks = 1,
        }
        queue.on_subsystem(&Arc::new(new), &mut world.io());
    }

    /// Status of a command that is not executed because of it.
    fn status(self) -> Status {
        match self {
            Change::Reserved => Status::RESERVATION_CONFLICT.with_dnr(),
            Change::Protected => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
            Change::Removed | Change::Replaced => Status::INVALID_NAMESPACE.with_dnr(),
            Change::Formatted => Status::FORMAT_IN_PROGRESS,
            Change::Inaccessible => Status::ANA_INACCESSIBLE,
            Change::Shrunk => Status::LBA_OUT_OF_RANGE.with_dnr(),
        }
    }
}

/// Capsules of one command, two for a fused one.
type Capsules = Vec<(Sqe, Vec<u8>)>;

struct Case {
    name: &'static str,
    capsules: Capsules,
    waits: &'static [Wait],
    writes: bool,
    /// It names a range that can be cut off.
    ranged: bool,
}

fn cases() -> Vec<Case> {
    use Wait::{Buffer, Claim, Limit, Pull};
    let io = |opcode| Sqe::io(opcode, 1).with_range(3, 0).with_cid(FIRST);
    let pulled = |opcode| io(opcode).with_sgl(keyed(0, 4096));
    let alone = |sqe| vec![(sqe, Vec::new())];
    let half = |opcode, fuse, cid| {
        let sqe: Sqe = pulled(opcode);
        (sqe.with_flags(Flags::SGL.with_fuse(fuse)).with_cid(cid), Vec::new())
    };
    let copy = Copy { sdlba: 40, flags: CopyFlags(0) }.emit(1, Sgl::in_capsule(0, 32));
    let trim = Sqe::deallocation(1, 0).with_sgl(Sgl::in_capsule(0, 16)).with_cid(FIRST);
    let range = DsmRange { slba: 3, blocks: 1, ..DsmRange::default() };
    let places = [(0, 2048), (9000, 2048)];
    let in_capsule = io(IoOpcode::WRITE).with_sgl(Sgl::in_capsule(0, 4096));
    let case =
        |name, capsules, waits, writes, ranged| Case { name, capsules, waits, writes, ranged };
    vec![
        case("read", alone(pulled(IoOpcode::READ)), &[Limit, Buffer], false, true),
        case("verify", alone(io(IoOpcode::VERIFY)), &[Limit, Buffer], false, true),
        case("compare", alone(pulled(IoOpcode::COMPARE)), &[Limit, Buffer, Pull], false, true),
        case("flush", alone(Sqe::io(IoOpcode::FLUSH, 1).with_cid(FIRST)), &[Limit], false, false),
        case("write", alone(pulled(IoOpcode::WRITE)), &[Limit, Buffer, Pull, Claim], true, true),
        case("write in capsule", vec![(in_capsule, vec![1; 4096])], &[Limit, Claim], true, true),
        case(
            "scattered write",
            vec![scattered(io(IoOpcode::WRITE), &places, 0)],
            &[Limit, Buffer, Pull, Claim],
            true,
            true,
        ),
        case("zeroes", alone(io(IoOpcode::WRITE_ZEROES)), &[Limit, Claim], true, true),
        case("deallocate", vec![(trim, range.emit().to_vec())], &[Limit, Claim], true, true),
        case(
            "copy",
            vec![(copy.with_cid(FIRST), CopyRange { slba: 1, nlb_z: 7 }.emit().to_vec())],
            &[Limit, Buffer],
            true,
            true,
        ),
        case(
            "fused",
            vec![
                half(IoOpcode::COMPARE, Flags::FUSED_FIRST, FIRST),
                half(IoOpcode::WRITE, Flags::FUSED_SECOND, SECOND),
            ],
            &[Limit, Buffer, Pull, Claim],
            true,
            true,
        ),
        case("uncorrectable", alone(io(IoOpcode::WRITE_UNCORRECTABLE)), &[Limit], true, false),
    ]
}

/// Status of a command whose conditions change while it waits.
fn outcome(case: &Case, wait: Wait, change: Change) -> Vec<(u16, Status)> {
    let mut world = World::new();
    let mut old = if wait == Wait::Limit { limited(&world) } else { subsystem() };
    old.namespaces[0].write_uncorrectable = true;
    world.registry.publish(Arc::new(old.clone()));
    let (mut queue, admin, posted) = io_queue(&mut world);
    let shared = Arc::clone(&world.shared);
    let exclusion = &shared.range_locks;
    let mut hoard = Vec::new();
    let mut ticket = None;
    match wait {
        Wait::Limit => {
            let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096));
            assert!(world.ask(&mut queue, &read, &[]).status.is_success());
        }
        Wait::Buffer => hoard.extend(std::iter::from_fn(|| world.pool.take_data(4096))),
        Wait::Pull => {}
        Wait::Claim => {
            let (at, len) = (0, SIZE as u64);
            let claim = RangeLock { backing: DeviceId(0), at, len, alone: true, reactor: 0 };
            ticket = Some(exclusion.claim(claim).0);
        }
    }
    // What is compared is there.
    world.memory[..4096].copy_from_slice(&world.disk.blocks[3 * 4096..4 * 4096]);
    world.disk.backings.clear();
    for (sqe, data) in &case.capsules {
        world.send(&mut queue, sqe, data);
    }
    if wait != Wait::Pull {
        world.run(&mut queue);
    }
    assert!(world.completions.is_empty() && world.disk.backings.is_empty(), "it waits");
    change.happens(&old, &mut world, &mut queue);
    hoard.into_iter().for_each(|buf| world.pool.give(buf));
    ticket.into_iter().for_each(|ticket| exclusion.give_up(ticket));
    later(&mut world, &mut queue, Duration::from_millis(10));
    let told: Vec<_> = world.completions.drain(..).map(|cqe| (cqe.cid, cqe.status)).collect();
    let done = told.iter().any(|(_, status)| status.is_success());
    assert_eq!(world.disk.backings.is_empty(), !done, "{} {wait:?} {change:?}", case.name);
    end_both(world, queue, admin, posted);
    told
}

#[test]
fn waiting_commands_are_rechecked_against_changes_before_they_start() {
    for case in cases() {
        for &wait in case.waits {
            for change in Change::ALL {
                let what = format!("{} waits for {wait:?}: {change:?}", case.name);
                let told = outcome(&case, wait, change);
                assert_eq!(told.len(), case.capsules.len(), "{what}: {told:?}");
                let is_stopped = match change {
                    Change::Protected => case.writes,
                    Change::Shrunk if !case.ranged => continue,
                    _ => true,
                };
                if !is_stopped {
                    assert!(told[0].1.is_success(), "{what}: {told:?}");
                    continue;
                }
                let status = change.status();
                let is_it = |told: &Status| told.is(status) && told.dnr() == status.dnr();
                let rest: Vec<_> = told.iter().filter(|(_, told)| !is_it(told)).collect();
                assert_eq!(rest.len(), case.capsules.len() - 1, "{what}: {told:?}");
                assert!(rest.iter().all(|(_, s)| s.is(Status::ABORTED_FAILED_FUSED)), "{what}");
            }
        }
    }
}

/// The registry does not apply reservations to an association whose admin queue is gone, and an I/O
/// queue on another reactor closes later.
#[test]
fn writes_of_an_ended_association_are_not_executed_after_a_reservation() {
    for wait in [Wait::Pull, Wait::Claim] {
        let (sender, message) = mailbox().unwrap();
        let mut worker = NamespaceStateWorker::new();
        let mut world = World::new();
        let subsystem = subsystem();
        let reservation = Arc::clone(&subsystem.namespaces[0].reservation);
        let workers = Workers::default().with_ns_state(worker.sender());
        world.replace(Registry::new(vec![sender], 8, 70), workers);
        world.registry.publish(Arc::new(subsystem));
        let (mut queue, admin, posted) = io_queue(&mut world);
        let shared = Arc::clone(&world.shared);
        let ticket = (wait == Wait::Claim).then(|| {
            let (at, len) = (0, SIZE as u64);
            let claim = RangeLock { backing: DeviceId(0), at, len, alone: true, reactor: 0 };
            shared.range_locks.claim(claim).0
        });
        let write = Sqe::io(IoOpcode::WRITE, 1).with_range(3, 0).with_sgl(keyed(0, 4096));
        world.send(&mut queue, &write.with_cid(FIRST), &[]);
        if wait == Wait::Claim {
            assert!(world.fabric_step(&mut queue), "pulled");
        }
        world.registry.admin_closed(queue.association().unwrap());
        let how = Acquire(0).with_rtype(ReservationType::WRITE_EXCLUSIVE);
        for order in [
            Order::Register(Register(0), RegisterKeys { current: 0, new: 1 }),
            Order::Acquire(how, AcquireKeys { current: 1, preempt: 0 }),
        ] {
            let of = vec![Arc::clone(&reservation)];
            let request = ReservationRequest { of, host: OTHER, order, reactor: 0, tag: 0 };
            assert!(world.shared.offload.submit(Job::Reserve(request)));
            worker.catch_up(&world.registry);
        }
        let answers = std::iter::from_fn(|| message.take());
        let answers = answers.filter(|it| matches!(it, Message::Answer(it) if it.outcome.is_ok()));
        assert_eq!((answers.count(), reservation.state().holds(&OTHER)), (2, true));
        ticket.into_iter().for_each(|ticket| shared.range_locks.give_up(ticket));
        world.fabric_step(&mut queue);
        queue.tick(&mut world.io());
        assert!(world.disk.backings.is_empty(), "{wait:?}: stored after the Acquire was answered");
        while world.fabric_step(&mut queue) {}
        // Without Do Not Retry, so that it reaches no file system.
        let told: Vec<_> = world.completions.drain(..).map(|cqe| (cqe.cid, cqe.status)).collect();
        assert_eq!(told, [(FIRST, Status::ABORTED_SQ_DELETION.with_more(true))], "{wait:?}");
        end_both(world, queue, admin, posted);
    }
}
