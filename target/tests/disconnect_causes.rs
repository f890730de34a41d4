//! Every cause for which a host is refused or dropped is provoked here, and must then be in the
//! records.

#[path = "support/auth.rs"]
#[expect(dead_code, reason = "shared with tests that need more of it")]
mod auth;
#[path = "support/half_open.rs"]
#[expect(dead_code, reason = "shared with tests that need more of it")]
mod half_open;
#[expect(dead_code, reason = "shared with tests that need more of it")]
mod support;

use std::sync::Arc;
use std::time::Duration;

use nvme::auth::{Challenge, Failure, GroupId, Notice, Reply};
use nvme::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, PropertySet};
use nvme::feature::{FeatureId, SetFeatures};
use nvme::nqn::NqnField;
use nvme::property::Property;
use nvme::{AdminOpcode, Nqn, Sqe, cm};
use nvmfd::config::AuthenticationConfig;
use nvmfd::core::auth::Keyring;
use nvmfd::core::diag::cause::{Cause, Stage};
use nvmfd::core::diag::{RecentDisconnects, Record};
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::subsystem::{AccessPolicy, DuplicateHosts, ListenerConfig, Subsystem};
use rdma::{Completion, Event, Fault, Qp, Reason, Work};

use crate::support::{World, admin, connect_data, keyed, share, subsystem};

const HOST: &str = "nqn.2026-11.host:h";
const GOOD: cm::Request = cm::Request { recfmt: 0, qid: 0, hrqsize: 32, hsqsize_z: 31, cntlid: 0 };

#[test]
fn every_disconnect_cause_is_reproducible_and_recorded_once() {
    for cause in Cause::ALL {
        let records = provoke(*cause);
        let all: Vec<_> = records.iter().map(|record| record.why.cause).collect();
        assert!(all.contains(cause), "{} is not among {all:?}", cause.name());
        let record = records.iter().find(|record| record.why.cause == *cause).unwrap();
        assert_eq!(record.count, 1, "{}", cause.name());
        let why = &record.why;
        assert_eq!(why.remote.ip().to_string().rsplit_once('.').unwrap().0, "192.0.2");
        assert!(why.local.port() == 4420, "{}", cause.name());
        // The host is known if it has sent its NQN.
        let unnamed = [Cause::BadConnect, Cause::BadHostName, Cause::Displaced, Cause::NoConnect];
        let named = cause.stage() != Stage::Request && !unnamed.contains(cause);
        assert_eq!(why.host.is_some(), named, "{}", cause.name());
        let line = why.to_string();
        assert!(line.starts_with(cause.reason()) && line.ends_with(cause.remedy()), "{line}");
    }
}

/// The records after an event with this cause. No cause can be added
/// without a way to provoke it.
fn provoke(cause: Cause) -> Vec<Record> {
    match cause {
        Cause::NotNvme => request(cm::Request { recfmt: 1, ..GOOD }, 16),
        Cause::EmptyQueue => request(cm::Request { hsqsize_z: 0, ..GOOD }, 16),
        Cause::TooManyQueues => request(cm::Request { qid: 5, ..GOOD }, 16),
        Cause::NoReads => request(GOOD, 0),
        Cause::NoReceives => no_receives(),
        Cause::NoQueuePair => no_queue_pair(),
        Cause::NoRoom => no_room(),
        Cause::Displaced => displaced(),
        Cause::NoListener => no_listener(),
        Cause::Overloaded => overloaded(),
        Cause::Stopping => stopping(),
        Cause::NotEstablished => gone_nameless(Reason::NotEstablished),
        Cause::ClosedBeforeConnect => gone_nameless(Reason::Peer),
        Cause::NoConnect => no_connect(),

        Cause::BadConnect => first_command(),
        Cause::BadSubsystemName => bad_name(|data| data.subnqn_field = NqnField([b'n'; 256])),
        Cause::BadHostName => bad_name(|data| data.hostnqn_field = NqnField([b'n'; 256])),
        Cause::UnknownSubsystem => unknown_subsystem(),
        Cause::NotExported => {
            offered(AccessPolicy { listeners: [9].into(), ..AccessPolicy::default() }, 1)
        }
        Cause::HostNotAllowed => host_not_allowed(),
        Cause::NoKey => no_key(),
        Cause::TooManyControllers => too_many_controllers(),
        Cause::SubsystemFull => {
            offered(AccessPolicy { controllers: Some(1), ..AccessPolicy::default() }, 2)
        }
        Cause::TooManyUnauthenticated => too_many_claims(),
        Cause::TooManyUnidentified => too_many_unidentified(),
        Cause::DuplicateHost => coming_twice(DuplicateHosts::Refuse),
        Cause::RollingBack => rolling_back(),
        Cause::NoControllerId => {
            offered(AccessPolicy { cntlids: 1..=1, ..AccessPolicy::default() }, 2)
        }
        Cause::BadControllerId => admin_connect(|_, data| data.cntlid = 5),
        Cause::UnknownController => io_connect(|_, data| data.cntlid = 99),
        Cause::OtherHostId => io_connect(|_, data| data.hostid = [9; 16]),
        Cause::BadQueueId => io_connect(|connect, _| connect.qid = 2),
        Cause::BadQueueSize => io_connect(|connect, _| connect.sqsize_z = 0),
        Cause::KeepAliveTooLong => admin_connect(|connect, _| connect.kato_ms = u32::MAX),
        Cause::QueueInUse => queue_in_use(),

        Cause::Throttled => throttled(),
        Cause::WrongSecret => wrong_secret(),
        Cause::TargetNotTrusted => told_by_the_host(Failure::FAILED),
        Cause::NoControllerKey => no_controller_key(),
        Cause::NoCommonAlgorithm => exchange(GroupId::FFDHE2048, &auth::negotiate()),
        Cause::BadAuthentication => exchange(GroupId::NULL, &[0xFF; 72]),
        Cause::LateAuthentication => late_authentication(),
        Cause::NotAuthenticated => not_authenticated(),

        Cause::KeepAlive => keep_alive(),
        Cause::Unreachable => fault(Fault::Unreachable),
        Cause::NotReady => fault(Fault::NotReady),
        Cause::AccessRefused => fault(Fault::RemoteAccess),
        Cause::OperationRefused => fault(Fault::RemoteOperation),
        Cause::TooLong => fault(Fault::Length),
        Cause::LocalFault => fault(Fault::Local(7)),
        Cause::DeviceGone => running(|world, queue| gone(world, queue, Reason::Device)),
        Cause::HostLeft => running(|world, queue| gone(world, queue, Reason::Peer)),
        Cause::HostReset => running(|world, queue| set_cc(world, queue, 0)),
        Cause::UnflushedShutdown => running(|world, queue| {
            world.disk.fail = Some(nvme::Status::WRITE_FAULT);
            set_cc(world, queue, 0x0046_4001);
        }),
        Cause::SharedHostId => shared_host_id(),
        Cause::BadSettings => bad_settings(),
        Cause::ShortCapsule => running(|world, queue| {
            assert!(world.deliver(queue, &[0; 10]));
        }),
        Cause::CommandIdInUse => running(|world, queue| {
            // Its data are still under way.
            let set = SetFeatures::new(FeatureId::HOST_BEHAVIOR, 0);
            let request = set.emit(keyed(0, 512)).with_cid(5);
            world.send(queue, &request, &[]);
            world.send(queue, &request, &[]);
        }),
        Cause::Disconnected => running(|world, queue| {
            let id = queue.association().unwrap().id;
            assert!(world.registry.disconnect(id).is_some() && queue.is_admitted());
            queue.tick(&mut world.io());
        }),
        Cause::FailedOnPurpose => running(|world, queue| {
            let id = queue.association().unwrap().id;
            assert!(world.registry.fail(id).is_some());
            queue.tick(&mut world.io());
        }),
        Cause::SubsystemRemoved => running(|world, queue| {
            world.registry.withdraw(&subsystem().nqn);
            queue.tick(&mut world.io());
        }),
        Cause::HostRemoved => running(|world, queue| {
            world.registry.publish(Arc::new(Subsystem { allow_any_host: false, ..subsystem() }));
            queue.tick(&mut world.io());
        }),
        Cause::ListenerRemoved => listener_removed(),
        Cause::GatewayCut => running(|world, queue| {
            world.registry.end_paths(1, Cause::GatewayCut);
            queue.tick(&mut world.io());
        }),
        Cause::KeyChanged => running(|world, queue| {
            world.registry.set_keyring(required());
            queue.tick(&mut world.io());
        }),
        Cause::Crowded => running(|world, queue| queue.displace(&mut world.io())),
        Cause::Replaced => coming_twice(DuplicateHosts::Replace),
    }
}

// ---- before the Connect

fn request(request: cm::Request, reads: u8) -> Vec<Record> {
    let mut world = half_open::World::new();
    assert_eq!(world.ask_for(1, request, reads), None);
    the_only(&world.shared.disconnects)
}

fn no_receives() -> Vec<Record> {
    let mut world = half_open::World::new();
    // Somebody else has them: without a queue that could make room.
    let taken: Vec<_> = (0..240).map(|_| world.pool.take_receive().unwrap()).collect();
    assert_eq!(world.ask(1), None);
    taken.into_iter().for_each(|buf| world.pool.give(buf));
    the_only(&world.shared.disconnects)
}

fn no_queue_pair() -> Vec<Record> {
    let mut world = half_open::World::new();
    world.fabric.is_full = true;
    assert_eq!(world.ask(1), None);
    let records = the_only(&world.shared.disconnects);
    assert_eq!(records[0].why.detail, "the device has no queue pairs left");
    records
}

fn no_room() -> Vec<Record> {
    let mut world = half_open::World::new();
    for source in [1, 1, 1, 1, 2, 2, 1] {
        assert!(world.ask(source).is_some());
    }
    while world.fabric.rejected == 0 {
        assert_eq!(world.ask(1), None);
    }
    world.shared.disconnects.list(None)
}

fn displaced() -> Vec<Record> {
    let mut world = half_open::World::new();
    for _ in 0..5 {
        assert!(world.ask(1).is_some());
    }
    assert_eq!(world.settle(), [0]);
    the_only(&world.shared.disconnects)
}

fn no_listener() -> Vec<Record> {
    let mut world = half_open::World::new();
    world.registry.set_listeners(Vec::new());
    assert_eq!(world.ask(1), None);
    the_only(&world.shared.disconnects)
}

fn overloaded() -> Vec<Record> {
    let mut world = half_open::World::new();
    let (first, _own): (_, Mailbox) = mailbox().unwrap();
    let (second, _full) = mailbox().unwrap();
    world.shared = share(Registry::new(vec![first, second], 8, 70));
    world.registry = Arc::clone(&world.shared.registry);
    assert!(world.ask(1).is_some());
    while world.registry.reactor(1).try_send(Message::DiscoveryChanged).is_ok() {}
    assert_eq!(world.ask(1), None);
    the_only(&world.shared.disconnects)
}

fn stopping() -> Vec<Record> {
    let mut world = half_open::World::new();
    world.step(|queues, lent| drop(queues.on_message(Message::Stop, lent)));
    assert_eq!((world.ask(1), world.fabric.rejected), (None, 1));
    the_only(&world.shared.disconnects)
}

fn gone_nameless(reason: Reason) -> Vec<Record> {
    let mut world = half_open::World::new();
    let qp = world.ask(1).unwrap();
    world.step(|queues, lent| queues.on_event(Event::Gone(qp, reason), lent));
    the_only(&world.shared.disconnects)
}

fn no_connect() -> Vec<Record> {
    let mut world = World::new();
    let mut queue = world.open_qid(0);
    world.now += Duration::from_secs(31);
    queue.tick(&mut world.io());
    assert!(world.fabric.disconnected);
    world.flush_and_go(&mut queue);
    the_only(&world.shared.disconnects)
}

// ---- Connect

/// A Connect command on a new queue; whether it was accepted.
fn connect(world: &mut World, connect: Connect, data: &ConnectData) -> (QueuePair, bool) {
    // What earlier queues have posted stays out of the way.
    world.fabric.posted.clear();
    let mut queue = world.open_qid(u16::from(connect.qid > 0));
    world.memory[..1024].copy_from_slice(&data.emit());
    let accepted = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]).status.is_success();
    (queue, accepted)
}

fn admin_connect(spoil: impl FnOnce(&mut Connect, &mut ConnectData)) -> Vec<Record> {
    let mut world = World::new();
    refused_admin(&mut world, spoil)
}

fn refused_admin(
    world: &mut World,
    spoil: impl FnOnce(&mut Connect, &mut ConnectData),
) -> Vec<Record> {
    let mut ask = Connect { sqsize_z: 15, ..Connect::default() };
    let mut data = connect_data(CNTLID_DYNAMIC);
    spoil(&mut ask, &mut data);
    let (mut queue, accepted) = connect(world, ask, &data);
    assert!(!accepted);
    // The host leaves, and that has no record of its own.
    world.flush_and_go(&mut queue);
    the_only(&world.shared.disconnects)
}

fn io_connect(spoil: impl FnOnce(&mut Connect, &mut ConnectData)) -> Vec<Record> {
    let (mut world, _admin, cntlid) = World::with_admin_queue();
    let mut ask = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let mut data = connect_data(cntlid);
    spoil(&mut ask, &mut data);
    let (_queue, accepted) = connect(&mut world, ask, &data);
    assert!(!accepted);
    the_only(&world.shared.disconnects)
}

fn first_command() -> Vec<Record> {
    let mut world = World::new();
    let mut queue = world.open_qid(0);
    let identify = Sqe::admin(AdminOpcode::IDENTIFY).with_sgl(keyed(0, 4096));
    assert!(!world.ask(&mut queue, &identify, &[]).status.is_success());
    the_only(&world.shared.disconnects)
}

fn bad_name(spoil: impl FnOnce(&mut ConnectData)) -> Vec<Record> {
    admin_connect(|_, data| spoil(data))
}

fn unknown_subsystem() -> Vec<Record> {
    let records = admin_connect(|_, data| {
        let name: Nqn = "nqn.2026-11.io.nvmfd:other".parse().unwrap();
        data.subnqn_field = (&name).into();
    });
    assert_eq!(records[0].why.subsystem.unwrap().to_string(), "nqn.2026-11.io.nvmfd:other");
    assert_eq!(records[0].why.host.unwrap().to_string(), HOST);
    records
}

/// A subsystem that offers this; the host connects so often, and is refused the last time.
fn offered(offer: AccessPolicy, times: u16) -> Vec<Record> {
    let mut world = World::new();
    world.registry.publish(Arc::new(Subsystem { offer: Arc::new(offer), ..subsystem() }));
    for time in 1..=times {
        let ask = Connect { sqsize_z: 15, ..Connect::default() };
        let (_, accepted) = connect(&mut world, ask, &connect_data(CNTLID_DYNAMIC));
        assert_eq!(accepted, time < times);
    }
    the_only(&world.shared.disconnects)
}

fn rolling_back() -> Vec<Record> {
    let mut world = World::new();
    let registry = Arc::clone(&world.registry);
    let _exclusion = registry.refuse_connects(&subsystem().nqn, false).unwrap();
    refused_admin(&mut world, |_, _| {})
}

fn host_not_allowed() -> Vec<Record> {
    let mut world = World::new();
    world.registry.publish(Arc::new(Subsystem { allow_any_host: false, ..subsystem() }));
    refused_admin(&mut world, |_, _| {})
}

/// Every host must authenticate, and none has a key.
fn required() -> Keyring {
    let config = AuthenticationConfig { required: true, ..AuthenticationConfig::default() };
    config.keyring().unwrap()
}

fn no_key() -> Vec<Record> {
    let mut world = World::new();
    world.registry.set_keyring(required());
    refused_admin(&mut world, |_, _| {})
}

fn too_many_controllers() -> Vec<Record> {
    let registry = Registry::new(vec![mailbox().unwrap().0], 1, 70);
    registry.publish(Arc::new(subsystem()));
    let mut world = World::of(share(registry), 0);
    let _first = admin(&mut world);
    refused_admin(&mut world, |_, _| {})
}

fn too_many_unidentified() -> Vec<Record> {
    let registry = Registry::new(vec![mailbox().unwrap().0], 8, 70);
    registry.publish(Arc::new(subsystem()));
    let other = "nqn.2026-11.io.nvmfd:other".parse().unwrap();
    let hosts = ["nqn.2026-11.host:friend".parse().unwrap()].into();
    registry.publish(Arc::new(Subsystem { nqn: other, hosts, ..subsystem() }));
    let mut world = World::of(share(registry), 0);
    let _first = [admin(&mut world), admin(&mut world)];
    refused_admin(&mut world, |_, _| {})
}

fn too_many_claims() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    // Four of the eight controllers.
    for _ in 0..4 {
        world.fabric.posted.clear();
        auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    }
    refused_admin(&mut world, |_, _| {})
}

fn coming_twice(duplicates: DuplicateHosts) -> Vec<Record> {
    let mut world = World::new();
    let offer = Arc::new(AccessPolicy { duplicates, ..AccessPolicy::default() });
    world.registry.publish(Arc::new(Subsystem { offer, ..subsystem() }));
    let (mut first, _) = admin(&mut world);
    let ask = Connect { sqsize_z: 15, ..Connect::default() };
    connect(&mut world, ask, &connect_data(CNTLID_DYNAMIC));
    first.tick(&mut world.io());
    the_only(&world.shared.disconnects)
}

fn queue_in_use() -> Vec<Record> {
    let (mut world, queue, ..) = World::with_io_queue();
    let cntlid = queue.association().unwrap().cntlid;
    let again = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let (_, accepted) = connect(&mut world, again, &connect_data(cntlid));
    assert!(!accepted);
    the_only(&world.shared.disconnects)
}

// ---- authentication

fn throttled() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    for _ in 0..8 {
        world.fabric.posted.clear();
        let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
        assert!(auth::say(&mut world, &mut queue, &[0xFF; 72]).is_success());
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
    assert_eq!(world.shared.disconnects.count(Cause::BadAuthentication), 8);
    let ask = Connect { sqsize_z: 15, ..Connect::default() };
    let (_, accepted) = connect(&mut world, ask, &connect_data(CNTLID_DYNAMIC));
    assert!(!accepted);
    world.shared.disconnects.list(None)
}

fn exchange(group: GroupId, first: &[u8]) -> Vec<Record> {
    let (mut world, _directory) = auth::world(group);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(auth::say(&mut world, &mut queue, first).is_success());
    end_failed(world, queue)
}

/// The host was notified, and then time passes.
fn end_failed(mut world: World, mut queue: QueuePair) -> Vec<Record> {
    world.now += Duration::from_secs(3);
    queue.tick(&mut world.io());
    assert!(world.fabric.disconnected);
    world.flush_and_go(&mut queue);
    the_only(&world.shared.disconnects)
}

fn wrong_secret() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(auth::say(&mut world, &mut queue, &auth::negotiate()).is_success());
    let mut wrong = auth::reply(&auth::listen(&mut world, &mut queue));
    wrong[16] ^= 1;
    assert!(auth::say(&mut world, &mut queue, &wrong).is_success());
    end_failed(world, queue)
}

/// The secret is right, and there is none for what the host wants besides.
fn no_controller_key() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(auth::say(&mut world, &mut queue, &auth::negotiate()).is_success());
    let right = auth::reply(&auth::listen(&mut world, &mut queue));
    let both = Reply { challenge: Some(&[9; 32]), ..Reply::parse(&right).unwrap() };
    let mut message = [0; 16 + 64];
    both.emit(&mut message).unwrap();
    assert!(auth::say(&mut world, &mut queue, &message).is_success());
    end_failed(world, queue)
}

/// The reason that a host reports is recorded with its meaning.
#[test]
fn authentication_failures_reported_by_hosts_are_recorded_by_reason() {
    let cause = |failure| told_by_the_host(failure)[0].why.cause;
    for failure in [Failure::HASH_UNUSABLE, Failure::GROUP_UNUSABLE] {
        assert_eq!(cause(failure), Cause::NoCommonAlgorithm);
    }
    assert_eq!(cause(Failure::INCORRECT_PAYLOAD), Cause::BadAuthentication);
}

/// The key of a host is taken away between its Connect and its first message.
#[test]
fn a_host_whose_key_was_removed_is_recorded_with_cause_no_key() {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    world.registry.set_keyring(Keyring::default());
    assert!(auth::say(&mut world, &mut queue, &auth::negotiate()).is_success());
    assert_eq!(end_failed(world, queue)[0].why.cause, Cause::NoKey);
}

fn told_by_the_host(failure: Failure) -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(auth::say(&mut world, &mut queue, &auth::negotiate()).is_success());
    let challenge = auth::listen(&mut world, &mut queue);
    let t_id = Challenge::parse(&challenge).unwrap().t_id;
    let mut message = [0; 8];
    Notice::Failure2(failure).emit(t_id, &mut message).unwrap();
    assert!(auth::say(&mut world, &mut queue, &message).is_success());
    end_failed(world, queue)
}

fn late_authentication() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    world.now += Duration::from_secs(31);
    end_failed(world, queue)
}

fn not_authenticated() -> Vec<Record> {
    let (mut world, _directory) = auth::world(GroupId::NULL);
    let mut queue = auth::connect(&mut world, 0, CNTLID_DYNAMIC);
    world.flush_and_go(&mut queue);
    the_only(&world.shared.disconnects)
}

// ---- connected hosts

/// A host is connected, then an event disconnects it.
fn running(happen: impl FnOnce(&mut World, &mut QueuePair)) -> Vec<Record> {
    let (mut world, mut queue, _) = World::with_admin_queue();
    assert_eq!(world.shared.disconnects.list(None), []);
    happen(&mut world, &mut queue);
    the_only(&world.shared.disconnects)
}

/// A second host has the identifier of the first, as that of a copied machine.
fn shared_host_id() -> Vec<Record> {
    let (mut world, first, _) = World::with_admin_queue();
    let other = |name: &str| ConnectData {
        hostnqn_field: (&name.parse::<Nqn>().unwrap()).into(),
        ..connect_data(CNTLID_DYNAMIC)
    };
    let ask = || Connect { sqsize_z: 15, ..Connect::default() };
    let own_id = ConnectData { hostid: [6; 16], ..other("nqn.2026-11.host:third") };
    for data in [connect_data(CNTLID_DYNAMIC), own_id] {
        assert!(connect(&mut world, ask(), &data).1);
        assert_eq!(world.shared.disconnects.list(None), [], "nothing is wrong with {data:?}");
    }
    assert!(connect(&mut world, ask(), &other("nqn.2026-11.host:copy")).1);
    let records = the_only(&world.shared.disconnects);
    assert!(records[0].why.detail.ends_with(first.association().unwrap().host.as_str()));
    records
}

fn gone(world: &mut World, queue: &mut QueuePair, reason: Reason) {
    // As a fabric does: first all work completes, then the queue pair is reported as removed.
    for (tag, work) in std::mem::take(&mut world.fabric.posted) {
        let outcome = Err(Fault::Flushed);
        let done = Completion::new(Qp(0), tag, work, outcome);
        queue.on_completion(done, &mut world.io());
    }
    queue.on_gone(reason, &mut world.io());
}

fn set_cc(world: &mut World, queue: &mut QueuePair, value: u64) {
    let set = PropertySet::new(Property::CC, value).emit();
    assert!(world.ask(queue, &set, &[]).status.is_success());
}

fn keep_alive() -> Vec<Record> {
    running(|world, queue| {
        queue.tick(&mut world.io());
        world.now += Duration::from_secs(60);
        queue.tick(&mut world.io());
        assert!(world.fabric.disconnected);
        world.flush_and_go(queue);
    })
}

fn fault(fault: Fault) -> Vec<Record> {
    running(|world, queue| {
        let (tag, work) = world.fabric.posted.pop_front().unwrap();
        assert!(matches!(work, Work::Recv(_)));
        let done = Completion::new(Qp(0), tag, work, Err(fault));
        queue.on_completion(done, &mut world.io());
        world.flush_and_go(queue);
    })
}

fn bad_settings() -> Vec<Record> {
    let mut world = World::new();
    let ask = Connect { sqsize_z: 15, ..Connect::default() };
    let (mut queue, accepted) = connect(&mut world, ask, &connect_data(CNTLID_DYNAMIC));
    assert!(accepted);
    set_cc(&mut world, &mut queue, 0x0036_0001);
    the_only(&world.shared.disconnects)
}

fn listener_removed() -> Vec<Record> {
    let mut world = World::new();
    let at: std::net::SocketAddr = "192.0.2.1:4420".parse().unwrap();
    world.registry.set_listeners(vec![ListenerConfig::from(at)]);
    let (mut queue, _) = admin(&mut world);
    world.registry.set_listeners(Vec::new());
    queue.tick(&mut world.io());
    the_only(&world.shared.disconnects)
}

#[test]
fn hosts_that_leave_in_good_order_leave_no_record() {
    let (mut world, mut io, mut admin, posted) = World::with_io_queue();
    world.flush_and_go(&mut io);
    while world.disk_step(&mut io) {}
    io.finish(&mut world.io());
    world.fabric.posted = posted;
    set_cc(&mut world, &mut admin, 0x0046_4001);
    world.flush_and_go(&mut admin);
    assert_eq!(world.shared.disconnects.list(None), []);
}

/// The disconnects's single record.
fn the_only(disconnects: &RecentDisconnects) -> Vec<Record> {
    let records = disconnects.list(None);
    assert_eq!(records.len(), 1, "{records:?}");
    records
}
