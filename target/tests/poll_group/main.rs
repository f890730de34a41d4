//! The queues of a reactor in a flood of connections of hosts that nobody vouches for.

#[path = "../support/half_open.rs"]
mod half_open;
mod many_hosts;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::{AdminOpcode, IoOpcode, Nqn, Sqe, Text, cm};
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::poll_group::PollGroup;
use nvmfd::core::registry::{ConnectContext, Registry};
use nvmfd::core::shared::Shared;
use nvmfd::core::subsystem::Subsystem;
use nvmfd::worker::Workers;
use rdma::{Qp, limits};

use crate::half_open::{LIMITS, World};

/// Where the hosts of a [`World`] ask.
const LOCAL: ([u8; 4], u16) = ([192, 0, 2, 250], 4420);

/// One where nobody listens yet, and a change is about to.
fn preparing() -> World {
    let mut world = World::new();
    world.confirms = false;
    world.registry.set_listeners(vec![SocketAddr::from(([192, 0, 2, 249], 4420)).into()]);
    world.registry.prepare_listener(LOCAL.into());
    world
}

#[test]
fn connection_requests_are_held_until_a_pending_listener_is_active() {
    let mut world = preparing();
    assert_eq!((world.ask(1), world.ask(2)), (None, None));
    world.step(|queues, lent| queues.look(lent));
    assert_eq!((world.fabric.next, world.fabric.rejected), (0, 0), "nothing is decided");
    world.registry.set_listeners(vec![SocketAddr::from(LOCAL).into()]);
    world.step(|queues, lent| queues.look(lent));
    assert_eq!(world.fabric.hosts, [1, 2].map(|last| IpAddr::from([192, 0, 2, last])));
    assert_eq!(world.ask(3), Some(Qp(2)));
    assert_eq!(world.fabric.rejected, 0);
    world.end();
}

#[test]
fn held_requests_are_dropped_when_the_pending_listener_is_withdrawn() {
    let mut world = preparing();
    world.ask(1);
    world.registry.withdraw_listeners(&[LOCAL.into()]);
    world.step(|queues, lent| queues.look(lent));
    world.ask(2);
    let causes: Vec<_> = world.shared.disconnects.list(None).iter().map(|r| r.why.cause).collect();
    assert_eq!(causes, [Cause::NoListener; 2]);
    // They are dropped, and the fabric by which they came knows the answer.
    assert_eq!((world.fabric.next, world.fabric.rejected), (0, 0));
    world.registry.set_listeners(vec![SocketAddr::from(LOCAL).into()]);
    world.step(|queues, lent| queues.look(lent));
    assert_eq!(world.fabric.next, 0, "they are held no longer");
    world.end();
}

#[test]
fn requests_for_a_pending_listener_are_held_for_5_s_at_most() {
    let mut world = preparing();
    world.ask(1);
    for (passed, held) in [(4, true), (1, false)] {
        world.now += Duration::from_secs(passed);
        world.step(|queues, lent| queues.look(lent));
        assert_eq!(world.shared.disconnects.list(None).is_empty(), held, "{passed} s");
    }
    world.registry.set_listeners(vec![SocketAddr::from(LOCAL).into()]);
    world.step(|queues, lent| queues.look(lent));
    assert_eq!(world.fabric.next, 0);
    world.end();
}

#[test]
fn held_connection_requests_are_limited_per_source_and_in_total() {
    let mut world = preparing();
    for _ in 0..limits::HALF_OPEN_PER_SOURCE + 3 {
        world.ask(1);
    }
    assert_eq!(world.fabric.rejected, 3, "its own oldest make room");
    world.ask(2);
    assert_eq!(world.fabric.rejected, 3, "and nobody else's");
    for source in 3..=255 {
        world.ask(source);
    }
    let all = limits::HALF_OPEN_PER_SOURCE + 254 - limits::HALF_OPEN;
    assert_eq!(world.fabric.rejected as usize, 3 + all, "then those of who has most");
    world.end();
}

/// A world with one more reactor, and what that receives.
fn beside_another() -> (World, Mailbox) {
    let mut world = World::new();
    let [(own, _), (other, received)] = [(); 2].map(|()| mailbox().unwrap());
    world.registry = Arc::new(Registry::new(vec![own, other], 8, 70));
    let registry = Arc::clone(&world.registry);
    world.shared = Arc::new(Shared::new(registry, Workers::default(), SystemTime::now));
    (world, received)
}

/// Counted only when it was opened, each of a burst went to the reactor that had the fewest before.
#[test]
fn connection_requests_are_placed_evenly_before_they_are_opened() {
    for deferred in [false, true] {
        let (mut world, received) = beside_another();
        world.fabric.is_busy = deferred;
        for source in 1..=6 {
            world.ask(source);
        }
        let handed_over: Vec<_> = std::iter::from_fn(|| received.take()).collect();
        assert_eq!(handed_over.len(), 3, "deferred: {deferred}");
        assert_eq!(world.queues.count(), if deferred { 0 } else { 3 });
        world.end();
    }
}

/// The other one had nothing left to do.
#[test]
fn a_stopping_reactor_hands_no_request_to_one_that_has_ended() {
    let (mut world, received) = beside_another();
    assert!(world.ask(1).is_some());
    drop(received);
    world.step(|queues, lent| drop(queues.on_message(Message::Stop, lent)));
    world.ask(2);
    let causes: Vec<_> = world.shared.disconnects.list(None).iter().map(|r| r.why.cause).collect();
    assert_eq!((causes, world.fabric.rejected), (vec![Cause::Stopping], 1));
    world.settle();
}

#[test]
fn a_flooding_source_displaces_its_own_oldest_connection() {
    let mut world = World::new();
    // Half of the receives, and then one in place of the oldest each time.
    for number in 0..20 {
        assert_eq!(world.ask(1), Some(Qp(number)));
        let displaced: Vec<u32> = number.checked_sub(4).into_iter().collect();
        assert_eq!(world.settle(), displaced);
    }
    assert_eq!((world.queues.count(), world.fabric.rejected), (4, 0));
    world.end();
}

#[test]
fn the_source_with_most_unidentified_connections_is_displaced_first() {
    let mut world = World::new();
    let sources = [1, 2, 1, 1, 2, 1];
    for (number, source) in (0..).zip(sources) {
        assert_eq!(world.ask(source), Some(Qp(number)));
    }
    assert_eq!(world.settle(), [0; 0]);
    assert_eq!(world.ask(3), Some(Qp(6)), "a third gets in");
    // Buffers of closed queues are not returned yet: no queue may take more than is free.
    assert_eq!((world.ask(4), world.fabric.rejected), (None, 0));
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.settle(), [0], "the first has the most, and this is its oldest");
    // The next one makes room a millisecond after the last.
    let before = world.now;
    world.now = before - Duration::from_micros(500);
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.fabric.next, 7);
    world.now = before;
    world.step(PollGroup::serve_waiters);
    assert_eq!((world.fabric.next, world.settle()), (8, vec![2]));
    assert_eq!(world.ask(5), Some(Qp(8)));
    // The first two have two each, the second has the older.
    assert_eq!(world.settle(), [1]);
    world.end();
}

/// A flood from many sources leaves connections that send no Connect.
#[test]
fn connections_without_connect_are_displaced_before_those_of_other_sources() {
    let mut world = World::new();
    assert_eq!((world.ask(1), world.ask(1)), (Some(Qp(0)), Some(Qp(1))));
    world.now += Duration::from_millis(993);
    for number in 2..6 {
        assert_eq!(world.ask(2), Some(Qp(number)));
    }
    assert_eq!(world.ask(3), Some(Qp(6)));
    assert_eq!(world.settle(), [2], "after 999 ms: the second source has the most");
    assert_eq!(world.ask(4), Some(Qp(7)));
    assert_eq!(world.settle(), [0], "after 1 s");
    world.end();
}

/// What was closed came home while nobody asked. The clock lets the next one in, not something
/// that happens to come.
#[test]
fn waiting_connection_requests_are_served_by_the_timer() {
    let mut world = World::new();
    for (number, source) in (0..).zip([1, 2, 1, 1, 2, 1, 3]) {
        assert_eq!(world.ask(source), Some(Qp(number)));
    }
    assert_eq!(world.ask(4), None);
    let tick = |world: &mut World| {
        let mut worked = false;
        world.step(|queues, lent| {
            worked = queues.tick(lent);
            if worked {
                queues.serve_waiters(lent);
            }
        });
        worked
    };
    assert!(!tick(&mut world), "not before it is time");
    for _ in 0..3 {
        world.now += Duration::from_millis(1);
        assert!(tick(&mut world), "and again each time, for nothing has come home");
    }
    assert_eq!(world.settle(), [0]);
    world.now += Duration::from_millis(1);
    assert!(tick(&mut world));
    assert_eq!(world.fabric.next, 8, "it is in");
    world.now += Duration::from_secs(1);
    assert!(!tick(&mut world), "nobody waits any more");
    world.end();
}

#[test]
fn a_waiting_request_is_not_displaced_by_a_flooding_source() {
    let mut world = World::new();
    for (number, source) in (0..).zip([1, 1, 1, 1, 2, 2, 1]) {
        assert_eq!(world.ask(source), Some(Qp(number)));
    }
    assert_eq!(world.ask(9), None);
    for _ in 0..270 {
        assert_eq!(world.ask(1), None);
    }
    assert_eq!(world.fabric.rejected, 271 - 256);
    world.settle();
    world.step(PollGroup::serve_waiters);
    // The first in line has been let in, and the next found no room again.
    assert_eq!(world.fabric.next, 8);
    assert_eq!(world.ask(9), None);
    world.end();
}

fn nqn(text: &str) -> Nqn {
    text.parse().unwrap()
}

/// Serves a subsystem: what a host of it says with Connect.
fn publish(world: &World, allow_any_host: bool) -> ConnectData {
    publish_to(world, allow_any_host, &[nqn("nqn.2026-11.host:h")])[0]
}

/// The same, for several hosts.
fn publish_to(world: &World, allow_any_host: bool, hosts: &[Nqn]) -> Vec<ConnectData> {
    let subsystem = nqn("nqn.2026-11.io.nvmfd:queues");
    world.registry.publish(Arc::new(Subsystem {
        nqn: subsystem,
        serial: Text::lossy("S"),
        model: Text::lossy("M"),
        allow_any_host,
        hosts: if allow_any_host { Default::default() } else { hosts.iter().copied().collect() },
        offer: Arc::default(),
        namespaces: Vec::new(),
        management: None,
        host_limiters: Arc::default(),
        usage: Arc::default(),
    }));
    let data = |host| ConnectData::new([1; 16], CNTLID_DYNAMIC, &subsystem, host);
    hosts.iter().map(data).collect()
}

/// A request for an admin queue of so many entries.
fn admin(entries: u16) -> cm::Request {
    cm::Request { hrqsize: entries, hsqsize_z: entries - 1, ..cm::Request::default() }
}

/// Otherwise an unidentified source could exclude all hosts without limit.
#[test]
fn hosts_of_discovery_and_of_open_subsystems_leave_room_for_others() {
    let discovery =
        ConnectData::new([1; 16], CNTLID_DYNAMIC, &Nqn::DISCOVERY, &nqn("nqn.2026-11.host:any"));
    for (data, entries) in [(None, 128), (None, 2), (Some(()), 128), (Some(()), 2)] {
        let mut world = World::new();
        world.fabric.queue_pairs = Some(16);
        let data = data.map_or(discovery, |()| publish(&world, true));
        for _ in 0..32 {
            if let Some(qp) = world.ask_for(1, admin(entries), 16) {
                world.connect(qp, &data, 600_000);
            }
            world.settle();
        }
        let other = world.ask(2).expect("a host of another address is heard");
        assert!(world.connect(other, &data, 600_000), "{entries}");
        world.settle();
        let controllers = world.registry.controllers();
        let (own, others): (Vec<_>, Vec<_>) =
            controllers.iter().partition(|c| c.source == IpAddr::from([192, 0, 2, 2]));
        assert_eq!(own.len(), 1);
        assert!(!own[0].association.is_closed(), "and stays");
        assert!(matches!(others.len(), 3..=8), "half of what there is: {}", others.len());
        world.end();
    }
}

/// A connection that is hardly any receives is a queue pair all the same.
#[test]
fn shallow_connections_of_one_address_leave_queue_pairs_for_others() {
    let mut world = World::new();
    world.fabric.queue_pairs = Some(16);
    for _ in 0..64 {
        world.ask_for(1, admin(2), 16);
        world.settle();
    }
    for other in 2..6 {
        assert!(world.ask(other).is_some(), "{other}");
        world.settle();
    }
    world.end();
}

#[test]
fn granted_io_queues_are_not_displaced_by_a_flood_of_many_addresses() {
    let mut world = World::new();
    let data = publish(&world, false);
    let qp = world.ask(1).unwrap();
    assert!(world.connect(qp, &data, 5000));
    world.registry.controllers()[0].association.grant_queues(4);
    let io = |qid| cm::Request { qid, hrqsize: 16, hsqsize_z: 15, ..cm::Request::default() };
    let own: Vec<_> = (1..=4).map(|qid| world.ask_for(1, io(qid), 16).unwrap().0).collect();
    for source in 10..34 {
        world.ask_for(source, admin(12), 16);
        let gone = world.settle();
        assert!(gone.iter().all(|qp| !own.contains(qp)), "{source}: {gone:?}");
    }
    world.end();
}

/// What was promised is bounded by itself. It must not use up the room of those that nobody vouches
/// for, or hosts that start together push each other out.
#[test]
fn granted_queues_do_not_use_up_the_share_of_unidentified_connections() {
    let mut world = World::new();
    let data = publish(&world, false);
    let qp = world.ask(1).unwrap();
    assert!(world.connect(qp, &data, 5000));
    world.registry.controllers()[0].association.grant_queues(8);
    let io = |qid| cm::Request { qid, hrqsize: 16, hsqsize_z: 15, ..cm::Request::default() };
    for number in 0..8 {
        assert!(world.ask_for(1, io(number % 4 + 1), 16).is_some(), "{number}");
    }
    for source in 2..5 {
        assert!(world.ask(source).is_some(), "{source}");
        assert_eq!(world.settle(), [0; 0], "{source}");
    }
    world.end();
}

/// With any fabric: on an adapter each connection costs system calls.
#[test]
fn sources_that_repeatedly_connect_and_disconnect_are_throttled() {
    let mut world = World::new();
    let mut heard = 0;
    while heard < 200
        && let Some(qp) = world.ask(1)
    {
        world.confirm(qp);
        world.leave(qp);
        heard += 1;
    }
    assert!((65..80).contains(&heard), "{heard}");
    assert_eq!(world.fabric.rejected, 1);
    assert!(world.ask(2).is_some(), "another one is heard");
    // What nobody has confirmed is charged to nobody: its address may be forged.
    world.confirms = false;
    for _ in 0..200 {
        let qp = world.ask(3).unwrap();
        world.leave(qp);
    }
    world.now += Duration::from_secs(2);
    assert!(world.ask(1).is_some(), "time has paid");
    world.end();
}

/// Whoever asks from forged addresses confirms nothing, and a fabric keeps what was made for it for as
/// long as it repeats its reply.
#[test]
fn half_open_connections_are_limited_per_source_and_in_total() {
    let mut world = World::with(4096);
    world.confirms = false;
    let half_open = |world: &World| world.queues.count();
    let ask = |world: &mut World, source| {
        // Slow enough for the oldest to have had its time.
        world.now += Duration::from_millis(2);
        let qp = world.ask_for(source, admin(2), 16);
        (qp.expect("the oldest makes room"), world.settle())
    };
    for _ in 0..80 {
        ask(&mut world, 1);
    }
    assert_eq!(half_open(&world), limits::HALF_OPEN_PER_SOURCE);
    for source in 2..250 {
        ask(&mut world, source);
    }
    assert_eq!(half_open(&world), limits::HALF_OPEN);
    // A source that confirms within a round trip is not one of them.
    for _ in 0..8 {
        let (qp, displaced) = ask(&mut world, 250);
        assert!(!displaced.contains(&qp.0));
        world.confirm(qp);
    }
    assert_eq!(half_open(&world), limits::HALF_OPEN + 7);
    world.end();
}

#[test]
fn requests_wait_while_the_fabric_has_no_free_connections() {
    let mut world = World::new();
    world.fabric.is_busy = true;
    assert_eq!((world.ask(1), world.ask(2), world.fabric.rejected), (None, None, 0));
    world.fabric.is_busy = false;
    world.now += Duration::from_millis(1);
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.fabric.next, 2);
    world.end();
}

#[test]
fn many_requests_at_one_moment_are_opened_a_few_at_a_time() {
    let mut world = World::new();
    let began = world.now;
    for source in 0..20 {
        world.now = began;
        world.ask_for(source, admin(2), 16);
    }
    assert_eq!(world.fabric.next, 8);
    for opened in [16, 20] {
        world.now += Duration::from_millis(1);
        world.step(PollGroup::serve_waiters);
        assert_eq!((world.fabric.next, world.fabric.rejected), (opened, 0));
    }
    world.end();
}

/// All others wait while connections are counted.
#[test]
fn connections_are_not_counted_for_every_request_of_a_flood() {
    let mut world = World::new();
    for number in 0..6 {
        world.ask(number % 16);
    }
    assert_eq!(world.ask(20), Some(Qp(6)), "and one is closed");
    let (began, counted) = (world.now, world.fabric.counted.get());
    for number in 0..2000u32 {
        world.now = began;
        world.ask((number % 16) as u8);
        world.now = began;
        world.step(PollGroup::serve_waiters);
    }
    let counted = world.fabric.counted.get() - counted;
    assert!(counted <= 2, "{counted} times");
    // Returned buffers are checked once more, and so is the clock.
    world.settle();
    world.now += Duration::from_millis(1);
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.fabric.next, 8);
    // Sources take turns: the last one does not wait behind all of the flood.
    world.now += Duration::from_millis(1);
    let before = world.fabric.hosts.len();
    assert_eq!(world.ask(40), None);
    for _ in 0..100 {
        world.now += Duration::from_millis(101);
        world.step(PollGroup::serve_waiters);
        world.settle();
    }
    let hosts = &world.fabric.hosts[before..before + 17];
    assert!(hosts.contains(&[192, 0, 2, 40].into()), "{hosts:?}");
    world.end();
}

/// A busy reactor reads late that connections are up, and only those are charged to their sources.
#[test]
fn connections_are_displaced_only_after_confirmation_or_its_timeout() {
    let mut world = World::new();
    world.confirms = false;
    let qps: Vec<_> = (0..4).map(|_| world.ask(1).unwrap()).collect();
    assert_eq!((world.ask(1), world.settle().len()), (None, 0), "none has been confirmed");
    world.confirm(qps[2]);
    world.now += Duration::from_millis(10);
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.settle(), [qps[2].0], "the one that has");
    assert_eq!(world.ask(1), None);
    world.now += Duration::from_millis(100);
    world.step(PollGroup::serve_waiters);
    assert_eq!(world.settle(), [qps[0].0], "the oldest had time");
    world.end();
}

/// Requests with its address were 300 a second, and closed its connection before its Connect arrived.
#[test]
fn a_host_whose_address_is_forged_has_time_for_its_connect() {
    let mut world = World::new();
    world.confirms = false;
    let ask = |world: &mut World| {
        world.now += Duration::from_millis(40);
        let qp = world.ask(1).unwrap();
        (qp, world.settle())
    };
    let forged: Vec<_> = (0..4).map(|_| ask(&mut world).0).collect();
    let (own, displaced) = ask(&mut world);
    assert_eq!(displaced, [forged[0].0]);
    world.confirm(own);
    assert_eq!(ask(&mut world).1, [forged[1].0]);
    assert_eq!(ask(&mut world).1, [forged[2].0]);
    assert_eq!(ask(&mut world).1, [own.0], "it had its time");
    world.end();
}

#[test]
fn the_addresses_of_an_ipv6_subnet_are_one_source() {
    let mut world = World::new();
    for host in 0..20 {
        let source = std::net::Ipv6Addr::new(0x2001, 0xDB8, 0, 7, 0, 0, 0, host);
        assert!(world.ask_from(source.into(), admin(32), 16).is_some());
        world.settle();
    }
    assert_eq!(world.queues.count(), 4, "half of the receives");
    world.end();
}

#[test]
fn a_keep_alive_timeout_that_would_hold_memory_for_weeks_is_refused() {
    let discovery =
        ConnectData::new([1; 16], CNTLID_DYNAMIC, &Nqn::DISCOVERY, &nqn("nqn.2026-11.host:any"));
    let mut world = World::new();
    let open = publish(&world, true);
    for (data, longest) in [(&discovery, 600_000), (&open, 7_200_000)] {
        for (kato_ms, let_in) in [(u32::MAX, false), (longest + 1, false), (longest, true)] {
            let qp = world.ask(1).unwrap();
            assert_eq!(world.connect(qp, data, kato_ms), let_in, "{kato_ms}");
        }
    }
    world.end();
}

#[test]
fn simultaneous_controllers_of_a_host_do_not_displace_each_other() {
    let mut world = World::new();
    let data = publish(&world, true);
    let at = |last| IpAddr::from([192, 0, 2, last]);
    let visit = ConnectContext {
        local: SocketAddr::new(at(250), 4420),
        source: at(1),
        limits: LIMITS,
        held: None,
        now: world.now,
    };
    for _ in 0..2 {
        let admission = world.registry.connect_admin(&data, &visit).unwrap();
        admission.association.grant_queues(4);
    }
    // More than half of the receives, before the first Connect: a flood would have to make room.
    for number in 0..6 {
        assert_eq!(world.ask(1), Some(Qp(number)));
    }
    assert_eq!(world.settle(), [0; 0]);
    assert_eq!(world.ask(1), Some(Qp(6)), "and three quarters are the end");
    assert_eq!(world.settle(), [0]);
    world.end();
}

/// Whichever reactor runs first, that of the admin queue or that of an I/O queue. The host has
/// repeated its commands by another path meanwhile.
#[test]
fn commands_from_before_a_suspension_beyond_the_kato_are_not_executed() {
    let keep_alive = Sqe::admin(AdminOpcode::KEEP_ALIVE).with_cid(1).emit();
    let [first, flush] = [1, 2].map(|cid| Sqe::io(IoOpcode::FLUSH, 1).with_cid(cid).emit());
    for (io_first, suspended, executed) in
        [(false, 5, true), (true, 5, true), (false, 6, false), (true, 6, false)]
    {
        let mut world = World::new();
        let data = publish(&world, false);
        let admin_qp = world.ask(1).unwrap();
        assert!(world.connect(admin_qp, &data, 5000));
        let association = Arc::clone(&world.registry.controllers()[0].association);
        association.grant_queues(1);
        association.set_ready(true);
        // The queues of another reactor.
        let mut other = PollGroup::new(0, LIMITS, world.now);
        std::mem::swap(&mut other, &mut world.queues);
        let io = cm::Request { qid: 1, hrqsize: 16, hsqsize_z: 15, ..cm::Request::default() };
        let io_qp = world.ask_for(1, io, 16).unwrap();
        world.connect_io(io_qp, 1, &ConnectData { cntlid: association.cntlid, ..data });
        assert_eq!(world.deliver(io_qp, &first), 1);
        let tick = |world: &mut World| {
            world.step(|queues, lent| {
                queues.tick(lent);
            });
        };
        for _ in 0..2 {
            tick(&mut world);
            std::mem::swap(&mut other, &mut world.queues);
        }

        world.now += Duration::from_secs(suspended);
        let mut sent = [(io_qp, &flush), (admin_qp, &keep_alive)];
        if !io_first {
            sent.reverse();
            std::mem::swap(&mut other, &mut world.queues);
        }
        for (qp, command) in sent {
            assert_eq!(world.deliver(qp, command) > 0, executed, "{suspended} s, {io_first}");
            tick(&mut world);
            assert_eq!(association.is_closed(), !executed);
            world.settle();
            std::mem::swap(&mut other, &mut world.queues);
        }
        for _ in 0..2 {
            world.step(|queues, lent| drop(queues.on_message(Message::Stop, lent)));
            world.settle();
            std::mem::swap(&mut other, &mut world.queues);
        }
        world.end();
    }
}
