//! Queues whose host must prove itself: whatever comes before the proof, and in whatever order,
//! nothing but authentication is carried out.

#[path = "../support/auth.rs"]
mod auth;

mod computation;
mod keys;
#[expect(dead_code, reason = "shared with tests that need more of it")]
#[path = "../support/mod.rs"]
mod support;
mod throttle;
mod unauthenticated;

use std::collections::VecDeque;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use nvme::auth::{Failure, GroupId, HashId, Negotiate, Notice, Reply};
use nvme::fabrics::{
    Authentication, CNTLID_DYNAMIC, Connect, FabricsType, PropertyGet, PropertySet,
};
use nvme::property::Property;
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe, Status};
use nvmfd::config::{AuthenticationConfig, HostConfig};
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::message::mailbox;
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::ConnectContext;
use nvmfd::core::sched::abort::AbortRequest;
use nvmfd::core::sched::{DrainBarrier, DrainScope};
use proptest::prelude::*;
use rdma::{Tag, Work};
use tempfile::TempDir;

use crate::auth::{AT, HOST, authenticate, connect, listen, negotiate, reply, say, world};
use crate::support::{World, connect_data, end_both, keyed};

/// A connection of a host with this source address.
fn visit(source: &str, now: Instant) -> ConnectContext {
    let (local, source) = ("192.0.2.1:4420".parse().unwrap(), source.parse().unwrap());
    ConnectContext { local, source, limits: support::LIMITS, held: None, now }
}

/// An unauthenticated I/O queue of an enabled controller, which has proved itself.
fn io_queue(world: &mut World) -> (QueuePair, QueuePair, VecDeque<(Tag, Work)>) {
    let mut admin = connect(world, 0, CNTLID_DYNAMIC);
    authenticate(world, &mut admin);
    enable(world, &mut admin);
    let posted = std::mem::take(&mut world.fabric.posted);
    let cntlid = 1;
    (connect(world, 1, cntlid), admin, posted)
}

fn enable(world: &mut World, admin: &mut QueuePair) {
    let enable = PropertySet::new(Property::CC, 0x0046_0001).emit();
    assert!(world.ask(admin, &enable, &[]).status.is_success());
    let queues = Sqe { cdw10: 7, cdw11: 0x3_0003, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
    assert!(world.ask(admin, &queues, &[]).status.is_success());
}

/// Sends a message whose answer takes long to compute.
fn send_heavy(world: &mut World, queue: &mut QueuePair) {
    let mut message = [0; 72];
    let offer = Negotiate::new(5, &[HashId::SHA256], &[GroupId::FFDHE2048]);
    offer.emit(&mut message).unwrap();
    world.memory[AT..AT + 72].copy_from_slice(&message);
    let sqe = Authentication::new(72).emit(FabricsType::AUTHENTICATION_SEND, keyed(AT as u64, 72));
    world.send(queue, &sqe, &[]);
    world.run(queue);
    assert!(world.completions.is_empty(), "the answer waits for the arithmetic");
}

fn read() -> Sqe {
    Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096))
}

fn refused(status: Status) -> bool {
    status.is(Status::AUTHENTICATION_REQUIRED) && status.dnr()
}

#[test]
fn commands_are_refused_until_each_queue_is_authenticated() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    for opcode in 0..=255 {
        let sqe = Sqe { opcode, ..read() };
        if !sqe.is_fabrics() {
            assert!(refused(world.ask(&mut admin, &sqe, &[]).status), "opcode {opcode:02x}");
        }
    }
    for kind in (0..=255).map(FabricsType) {
        let authentication =
            [FabricsType::AUTHENTICATION_SEND, FabricsType::AUTHENTICATION_RECEIVE];
        if !authentication.contains(&kind) {
            let status = world.ask(&mut admin, &Sqe::fabrics(kind), &[]).status;
            assert!(refused(status), "{kind}");
        }
    }
    world.end(admin);

    let (mut world, _directory) = crate::world(GroupId::NULL);
    let (mut queue, admin, posted) = io_queue(&mut world);
    for opcode in 0..=255 {
        let sqe = Sqe { opcode, ..read() };
        if !sqe.is_fabrics() {
            assert!(refused(world.ask(&mut queue, &sqe, &[]).status), "opcode {opcode:02x}");
        }
    }
    assert!(world.disk.backings.is_empty());
    assert_eq!(world.fabric.admitted, 1, "its controller's admin queue");
    authenticate(&mut world, &mut queue);
    assert_eq!(world.fabric.admitted, 2);
    assert!(world.ask(&mut queue, &read(), &[]).status.is_success());
    assert_eq!(world.disk.backings.len(), 1);
    // Again, on the live queue, with commands in between.
    assert!(say(&mut world, &mut queue, &negotiate()).is_success());
    assert!(world.ask(&mut queue, &read(), &[]).status.is_success());
    let challenge = listen(&mut world, &mut queue);
    assert!(world.ask(&mut queue, &read(), &[]).status.is_success());
    // It fails: no more commands.
    let mut wrong = reply(&challenge);
    wrong[16] ^= 1;
    assert!(say(&mut world, &mut queue, &wrong).is_success());
    assert!(matches!(Notice::parse(&listen(&mut world, &mut queue)), Ok(Notice::Failure1(_))));
    assert!(!world.fabric.disconnected);
    // An answer to what the host has under way would end in its file system.
    world.send(&mut queue, &read(), &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty() && world.fabric.disconnected, "{:?}", world.completions);
    assert_eq!(world.disk.backings.len(), 3);
    end_both(world, queue, admin, posted);
}

#[test]
fn a_queue_that_fails_reauthentication_is_closed() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut queue, admin, posted) = io_queue(&mut world);
    authenticate(&mut world, &mut queue);
    assert!(say(&mut world, &mut queue, &[0xFF; 72]).is_success());
    assert!(!queue.is_admitted());
    queue.tick(&mut world.io());
    assert!(!world.fabric.disconnected, "it may learn why");
    world.now += Duration::from_secs(3);
    queue.tick(&mut world.io());
    assert!(world.fabric.disconnected, "and then no more connection");
    end_both(world, queue, admin, posted);
}

/// Knowledge of a host's names permits neither its commands nor entries in its logs.
#[test]
fn abort_ignores_commands_of_unauthenticated_queues() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut stranger, admin, posted) = io_queue(&mut world);
    let message = negotiate();
    world.memory[AT..AT + message.len()].copy_from_slice(&message);
    let len = message.len() as u32;
    let sqe =
        Authentication::new(len).emit(FabricsType::AUTHENTICATION_SEND, keyed(AT as u64, len));
    world.send(&mut stranger, &sqe.with_cid(0x33), &[]);
    let (home, _inbox) = mailbox().unwrap();
    let (recall, token) = AbortRequest::new(admin.association().unwrap().id, 1, 0x33, home.waker());
    stranger.on_abort(&token, &mut world.io());
    drop(token);
    assert_eq!(recall.outcome(), Some(false), "it goes on, wherever the host has it");
    world.run(&mut stranger);
    assert!(world.completions.pop().unwrap().status.is_success());
    assert!(refused(world.ask(&mut stranger, &read(), &[]).status));
    assert_eq!(admin.association().unwrap().errors().0, 0);
    end_both(world, stranger, admin, posted);
}

/// What is pulled on an unproved queue is held in the name of the host.
#[test]
fn concurrent_authentication_sends_fail_with_command_sequence_error() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut queue, admin, posted) = io_queue(&mut world);
    let send =
        Authentication::new(4096).emit(FabricsType::AUTHENTICATION_SEND, keyed(AT as u64, 4096));
    let before = world.pool.free().2;
    for cid in 0..4 {
        world.send(&mut queue, &send.with_cid(cid), &[]);
    }
    assert_eq!(before - world.pool.free().2, 4096, "one is on its way");
    world.run(&mut queue);
    let answers: Vec<_> = world.completions.drain(..).map(|c| (c.cid, c.status.code())).collect();
    assert_eq!(answers, [(1, 0x00C), (2, 0x00C), (3, 0x00C), (0, 0)]);
    end_both(world, queue, admin, posted);
}

/// Knowledge of a host's names does not reserve resources of that host.
#[test]
fn a_queue_id_belongs_to_the_first_authenticated_connection() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut stranger, admin, posted) = io_queue(&mut world);
    let mut others = VecDeque::new();
    swap(&mut world, &mut others);
    let mut own = connect(&mut world, 1, 1);
    authenticate(&mut world, &mut own);
    assert!(world.ask(&mut own, &read(), &[]).status.is_success());
    let visit = visit("192.0.2.1", world.now);
    let again = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let again = |world: &World| world.registry.connect_io(&again, &connect_data(1), &visit);
    let taken = again(&world).unwrap_err();
    assert!(taken.status.is(Status::COMMAND_SEQUENCE_ERROR), "{}", taken.status);
    // A second authentication is too late.
    swap(&mut world, &mut others);
    assert!(say(&mut world, &mut stranger, &negotiate()).is_success());
    let challenge = listen(&mut world, &mut stranger);
    assert!(say(&mut world, &mut stranger, &reply(&challenge)).is_success());
    listen(&mut world, &mut stranger);
    assert!(!stranger.is_admitted() && is_closing(&mut world, &mut stranger));
    world.flush_and_go(&mut stranger);
    stranger.finish(&mut world.io());
    assert!(again(&world).is_err(), "who was turned away gives nothing back");
    swap(&mut world, &mut others);
    assert!(!is_closing(&mut world, &mut own));
    assert!(world.ask(&mut own, &read(), &[]).status.is_success());
    world.flush_and_go(&mut own);
    own.finish(&mut world.io());
    assert!(again(&world).is_ok(), "now there is nobody");
    world.fabric.posted = posted;
    world.end(admin);
}

/// A queue proves itself to a controller that has been reset since it connected.
#[test]
fn authentication_begun_before_a_controller_reset_admits_no_queue() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut queue, mut admin, mut others) = io_queue(&mut world);
    assert!(say(&mut world, &mut queue, &negotiate()).is_success());
    let challenge = listen(&mut world, &mut queue);
    swap(&mut world, &mut others);
    let disable = PropertySet::new(Property::CC, 0x0046_0000).emit();
    assert!(world.ask(&mut admin, &disable, &[]).status.is_success());
    enable(&mut world, &mut admin);
    swap(&mut world, &mut others);
    // Its reactor has not looked yet.
    let message = reply(&challenge);
    world.memory[AT..AT + message.len()].copy_from_slice(&message);
    let (len, at) = (message.len() as u32, AT as u64);
    let send = Authentication::new(len).emit(FabricsType::AUTHENTICATION_SEND, keyed(at, len));
    let receive =
        Authentication::new(4096).emit(FabricsType::AUTHENTICATION_RECEIVE, keyed(at, 4096));
    for sqe in [send, receive] {
        world.send(&mut queue, &sqe, &[]);
        while world.fabric_step(&mut queue) {}
        assert!(world.completions.pop().unwrap().status.is_success());
    }
    assert!(!queue.is_admitted());
    assert_eq!(admin.association().unwrap().io_queues(), 0, "nothing keeps the next one out");
    assert_eq!(world.shared.disconnects.list(None)[0].why.cause, Cause::UnknownController);
    assert!(is_closing(&mut world, &mut queue));
    end_both(world, queue, admin, others);
}

/// .. or that was removed by another reactor.
#[test]
fn io_queue_authentication_fails_for_a_removed_controller() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    let association = Arc::clone(admin.association().unwrap());
    authenticate(&mut world, &mut admin);
    let prove = |qid, epoch| world.registry.io_proved(&association, qid, epoch, None);
    let causes = |qid, epoch| prove(qid, epoch).map_err(|refusal| refusal.cause);
    assert_eq!((causes(1, 0), causes(2, 0)), (Ok(()), Ok(())));
    assert_eq!(causes(1, 0), Err(Cause::QueueInUse));
    assert_eq!(causes(3, 1), Err(Cause::UnknownController), "of another time");
    association.close();
    assert_eq!(causes(1, 0), Err(Cause::UnknownController), "it is going");
    world.registry.admin_closed(&association);
    assert_eq!(causes(1, 0), Err(Cause::UnknownController), "it is gone");
    world.end(admin);
}

#[test]
fn io_connect_fails_until_the_admin_queue_is_authenticated() {
    let (mut world, _directory) = world(GroupId::NULL);
    let admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    let posted = std::mem::take(&mut world.fabric.posted);
    let mut queue = world.open_qid(1);
    world.memory[..1024].copy_from_slice(&connect_data(1).emit());
    let connect = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
    assert!(cqe.status.is(Status::CONNECT_INVALID_PARAMETERS));
    assert!(!queue.is_connected());
    end_both(world, queue, admin, posted);
}

#[test]
fn malformed_authentication_commands_are_refused_without_side_effects() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    let good = Authentication::new(72);
    let bad = [
        Authentication { secp: 0xEA, ..good },
        Authentication { spsp0: 0, ..good },
        Authentication { spsp1: 2, ..good },
        Authentication { len_bytes: 0, ..good },
    ];
    for kind in [FabricsType::AUTHENTICATION_SEND, FabricsType::AUTHENTICATION_RECEIVE] {
        for fields in bad {
            let status = world.ask(&mut admin, &fields.emit(kind, keyed(0, 72)), &[]).status;
            assert!(status.is(Status::INVALID_FIELD) && status.dnr(), "{fields:?}");
        }
        // The data are not as long as the command says.
        let status = world.ask(&mut admin, &good.emit(kind, keyed(0, 71)), &[]).status;
        assert!(status.is(Status::DATA_SGL_LENGTH_INVALID) && status.dnr());
    }
    for len in [4097, 1 << 20, u32::MAX] {
        let sqe = Authentication::new(len)
            .emit(FabricsType::AUTHENTICATION_SEND, keyed(0, len.min(1 << 20)));
        let status = world.ask(&mut admin, &sqe, &[]).status;
        assert!(status.is(Status::INVALID_FIELD) && status.dnr());
    }
    // In the capsule, but not received.
    let sqe = good.emit(FabricsType::AUTHENTICATION_SEND, Sgl::in_capsule(0, 72));
    assert!(world.ask(&mut admin, &sqe, &[]).status.is(Status::DATA_SGL_LENGTH_INVALID));
    authenticate(&mut world, &mut admin);
    let cap = PropertyGet::new(Property::CAP).emit();
    assert!(world.ask(&mut admin, &cap, &[]).status.is_success());
    world.end(admin);
}

#[test]
fn incomplete_authentication_admits_no_command_and_times_out() {
    for messages in 0..3 {
        let (mut world, _directory) = world(GroupId::NULL);
        let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
        if messages > 0 {
            assert!(say(&mut world, &mut admin, &negotiate()).is_success());
        }
        if messages > 1 {
            let challenge = listen(&mut world, &mut admin);
            assert!(say(&mut world, &mut admin, &reply(&challenge)).is_success());
        }
        let cap = PropertyGet::new(Property::CAP).emit();
        assert!(refused(world.ask(&mut admin, &cap, &[]).status), "Success1 is not fetched yet");
        world.now += Duration::from_secs(29);
        admin.tick(&mut world.io());
        assert!(!world.fabric.disconnected);
        world.now += Duration::from_secs(1);
        admin.tick(&mut world.io());
        assert!(world.fabric.disconnected);
        world.end(admin);
    }
}

/// A host is dead, and an attacker who knows its names has connections to its controller.
#[test]
fn only_authenticated_queues_keep_a_controller_alive() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = world.open_qid(0);
    world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
    let ask = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
    assert!(world.ask(&mut admin, &ask.emit(keyed(0, 1024)), &[]).status.is_success());
    authenticate(&mut world, &mut admin);
    enable(&mut world, &mut admin);
    let mut others = VecDeque::new();
    swap(&mut world, &mut others);
    let mut own = connect(&mut world, 1, 1);
    world.now += Duration::from_secs(29);
    authenticate(&mut world, &mut own);
    admin.tick(&mut world.io());
    world.now += Duration::from_secs(29);
    admin.tick(&mut world.io());
    assert!(!world.fabric.disconnected, "the next queue has as long as the last one");
    assert!(world.ask(&mut own, &read(), &[]).status.is_success());
    admin.tick(&mut world.io());
    world.now += Duration::from_secs(5);
    admin.tick(&mut world.io());
    assert!(!world.fabric.disconnected, "what is read keeps alive");
    world.flush_and_go(&mut own);
    own.finish(&mut world.io());
    world.fabric.disconnected = false;

    let mut stranger = connect(&mut world, 1, 1);
    assert!(say(&mut world, &mut stranger, &negotiate()).is_success());
    assert!(refused(world.ask(&mut stranger, &read(), &[]).status));
    listen(&mut world, &mut stranger);
    admin.tick(&mut world.io());
    assert!(!world.fabric.disconnected);
    world.now += Duration::from_secs(1);
    admin.tick(&mut world.io());
    assert!(world.fabric.disconnected, "6 s after the last command of the host");
    end_both(world, stranger, admin, others);
}

/// Puts one admin queue aside and takes up another.
fn swap(world: &mut World, posted: &mut VecDeque<(Tag, Work)>) {
    std::mem::swap(&mut world.fabric.posted, posted);
    world.fabric.disconnected = false;
}

/// Whether a queue is being closed.
fn is_closing(world: &mut World, queue: &mut QueuePair) -> bool {
    queue.tick(&mut world.io());
    std::mem::take(&mut world.fabric.disconnected)
}

#[test]
fn a_queue_closed_during_a_dh_computation_leaks_nothing() {
    let (mut world, _directory) = world(GroupId::FFDHE2048);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    send_heavy(&mut world, &mut admin);
    // Another one before that: the exchange fails, the queue continues.
    let cap = PropertyGet::new(Property::CAP).emit().with_cid(9);
    assert!(refused(world.ask(&mut admin, &cap, &[]).status));
    world.end(admin);
}

/// The type of a fabrics command lies where others have their namespace: 5, or 0105h with reserved
/// bytes, is none. Ended twice, its slot would answer another command.
#[test]
fn preemption_does_not_end_a_pending_authentication_command() {
    let (mut world, _directory) = auth::world_with(vec![GroupId::NULL, GroupId::FFDHE2048]);
    let (mut queue, admin, posted) = io_queue(&mut world);
    send_heavy(&mut world, &mut queue);
    let (worker, words) = mpsc::channel();
    let hosts = DrainScope::Preempted(vec![connect_data(1).hostid]);
    let subsystem = support::subsystem().nqn;
    let fence =
        Arc::new(DrainBarrier::new(subsystem, vec![5], hosts, move || worker.send(()).unwrap()));
    queue.on_fence(&fence, &mut world.io());
    drop(fence);
    assert!(words.try_recv().is_ok(), "nothing holds it");
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "the arithmetic goes on");
    end_both(world, queue, admin, posted);
}

/// What a host that knows no secret may try.
#[derive(Clone, Debug)]
enum Step {
    Command(Vec<u8>),
    Io(u8, u64),
    Say(Vec<u8>),
    Negotiate,
    Reply(Vec<u8>),
    Success2,
    Listen,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => prop::collection::vec(any::<u8>(), 64).prop_map(Step::Command),
        4 => (0u8..32, 0u64..8).prop_map(|(opcode, slba)| Step::Io(opcode, slba)),
        1 => prop::collection::vec(any::<u8>(), 1..200).prop_map(Step::Say),
        2 => Just(Step::Negotiate),
        2 => prop::collection::vec(any::<u8>(), 32).prop_map(Step::Reply),
        1 => Just(Step::Success2),
        2 => Just(Step::Listen),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    /// No I/O command is executed on an unauthenticated queue, with any commands before or after.
    #[test]
    fn no_io_command_ever_runs_unauthenticated(steps in prop::collection::vec(step(), 1..30)) {
        let (mut world, _directory) = world(GroupId::NULL);
        let (mut queue, admin, posted) = io_queue(&mut world);
        let before = world.disk.blocks.clone();
        for step in steps {
            if world.fabric.disconnected {
                break;
            }
            match step {
                Step::Command(bytes) => {
                    let mut sqe = Sqe::parse(bytes.first_chunk().unwrap());
                    sqe.opcode = if sqe.is_fabrics() { 1 } else { sqe.opcode };
                    let status = world.ask(&mut queue, &sqe, &[]).status;
                    prop_assert!(!status.is_success());
                }
                Step::Io(opcode, slba) => {
                    let sqe = Sqe { opcode, cdw10: slba as u32, ..read() };
                    prop_assert!(refused(world.ask(&mut queue, &sqe, &[]).status));
                }
                Step::Say(bytes) => prop_assert!(say(&mut world, &mut queue, &bytes).is_success()),
                Step::Negotiate => {
                    prop_assert!(say(&mut world, &mut queue, &negotiate()).is_success());
                }
                Step::Reply(response) => {
                    let (t_id, response) = (5, &response[..]);
                    let reply = Reply { t_id, response, challenge: None, seqnum: 0, value: &[] };
                    let mut message = [0; 80];
                    reply.emit(&mut message).unwrap();
                    prop_assert!(say(&mut world, &mut queue, &message).is_success());
                }
                Step::Success2 => {
                    let mut message = [0; 16];
                    Notice::Success2.emit(5, &mut message).unwrap();
                    prop_assert!(say(&mut world, &mut queue, &message).is_success());
                }
                Step::Listen => {
                    listen(&mut world, &mut queue);
                }
            }
            prop_assert!(!queue.is_admitted());
            prop_assert!(world.disk.backings.is_empty());
        }
        prop_assert!(world.disk.blocks == before);
        end_both(world, queue, admin, posted);
    }
}

#[test]
fn hosts_without_an_allowed_hash_or_dh_group_get_a_specific_failure() {
    let allow = |world: &World, directory: &TempDir, hashes: &[HashId], groups: &[GroupId]| {
        let host = HostConfig {
            nqn: HOST.parse().unwrap(),
            key_file: directory.path().join("key"),
            controller_key_file: None,
            hashes: Some(hashes.to_vec()),
            groups: Some(groups.to_vec()),
        };
        let config = AuthenticationConfig { hosts: vec![host], ..Default::default() };
        world.registry.set_keyring(config.keyring().unwrap());
    };
    let null = [GroupId::NULL];
    for (hashes, groups, why) in [
        (&[HashId::SHA384][..], &null[..], Failure::HASH_UNUSABLE),
        (&[HashId::SHA256], &[GroupId::FFDHE2048], Failure::GROUP_UNUSABLE),
    ] {
        let (mut world, directory) = world(GroupId::NULL);
        allow(&world, &directory, hashes, groups);
        let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
        assert!(say(&mut world, &mut admin, &negotiate()).is_success());
        let told = Notice::parse(&listen(&mut world, &mut admin));
        assert!(matches!(&told, Ok(Notice::Failure1(failure)) if *failure == why), "{told:?}");
        assert!(!admin.is_admitted());
        world.end(admin);
    }
    // A session that is there stays when its hash is no longer allowed, until it proves itself anew.
    let (mut world, directory) = world(GroupId::NULL);
    allow(&world, &directory, &[HashId::SHA256], &null);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    authenticate(&mut world, &mut admin);
    allow(&world, &directory, &[HashId::SHA512], &null);
    world.now += Duration::from_secs(1);
    admin.tick(&mut world.io());
    assert!(admin.is_admitted() && !world.fabric.disconnected);
    assert!(say(&mut world, &mut admin, &negotiate()).is_success());
    let told = Notice::parse(&listen(&mut world, &mut admin));
    assert!(matches!(told, Ok(Notice::Failure1(Failure::HASH_UNUSABLE))), "{told:?}");
    world.end(admin);
}
