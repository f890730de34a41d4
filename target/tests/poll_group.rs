//! The queues of a reactor in a flood of connections of hosts that nobody vouches for.

#[path = "support/half_open.rs"]
mod half_open;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::{Nqn, Text, cm};
use nvmfd::core::controller::Limits;
use nvmfd::core::controller::association::Association;
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::poll_group::PollGroup;
use nvmfd::core::registry::ConnectContext;
use nvmfd::core::subsystem::Subsystem;
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
fn who_asks_before_a_change_is_in_force_is_held_until_it_is() {
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
fn who_asks_before_a_change_that_is_refused_finds_nobody() {
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
fn a_change_that_is_not_decided_holds_nobody_for_long() {
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
fn of_those_who_are_held_there_are_only_so_many() {
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

#[test]
fn who_floods_makes_room_for_its_own_next() {
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
fn of_all_that_nobody_has_named_the_largest_share_makes_room() {
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

/// What was closed came home while nobody asked. The clock lets the next one in, not something
/// that happens to come.
#[test]
fn who_waits_for_room_gets_it_when_the_clock_says_so() {
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
fn who_waits_for_room_is_not_pushed_out_by_who_asks_most() {
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
fn a_host_that_brings_up_what_it_was_promised_is_not_displaced_in_a_flood_of_many_addresses() {
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
fn what_was_promised_takes_no_room_from_those_that_nobody_vouches_for() {
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
fn who_confirms_connections_and_leaves_again_and_again_is_refused_for_a_while() {
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
fn connections_that_nobody_confirms_are_few_for_one_source_and_few_in_all() {
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
fn while_connections_have_had_their_time_requests_wait() {
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
fn a_connection_makes_room_when_it_was_confirmed_or_had_time_to_be() {
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
fn controllers_of_one_host_that_come_together_do_not_push_each_other_out() {
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

/// Numbers that look random, the same for the same seed.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, below: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % below
    }
}

/// Receives that only admin queues may take.
const FOR_ADMIN: u32 = 64;
/// Entries of an I/O queue, and of an admin queue.
const IO: u32 = 16;
const ADMIN: u32 = 32;

/// A host with an address of its own, on its way to all its queues.
struct Guest {
    source: u8,
    data: ConnectData,
    admin: Option<Qp>,
    controller: Option<Arc<Association>>,
    granted: u16,
    /// Its I/O queues, by ids from one on; and how many of those its Connect commands have named.
    io: Vec<Qp>,
    named: usize,
}

impl Guest {
    fn is_up(&self) -> bool {
        self.granted > 0 && self.named == usize::from(self.granted)
    }

    fn has_any_of(&self, qps: &[u32]) -> bool {
        self.admin.iter().chain(&self.io).any(|qp| qps.contains(&qp.0))
    }

    fn has_admitted_any_of(&self, qps: &[u32]) -> bool {
        let admin = self.admin.iter().filter(|_| self.controller.is_some());
        admin.chain(&self.io[..self.named]).any(|qp| qps.contains(&qp.0))
    }

    /// Receives that it holds or was promised, once it has a controller.
    fn claim(&self) -> u32 {
        self.controller.as_ref().map_or(0, |_| ADMIN + IO * u32::from(self.granted))
    }

    /// Takes one step: opens its admin queue, sends Connect, opens an I/O queue or sends Connect on
    /// one. Whether a queue was opened that should be.
    fn step(&mut self, world: &mut World, dice: &mut Dice) -> bool {
        let Some(admin_qp) = self.admin else {
            self.admin = world.ask_for(self.source, admin(ADMIN as u16), 16);
            return self.admin.is_some();
        };
        let Some(controller) = &self.controller else {
            assert!(world.connect(admin_qp, &self.data, 5000));
            let controllers = world.registry.controllers();
            let own = controllers.last().expect("it is there");
            let promised = world.registry.reserved_receives(world.now);
            let promised = promised.get(&own.source.into()).copied().unwrap_or(0);
            self.granted = (promised / IO) as u16;
            own.association.grant_queues(self.granted);
            own.association.set_ready(true);
            self.controller = Some(Arc::clone(&own.association));
            return true;
        };
        let may_open = self.io.len() < usize::from(self.granted);
        if may_open && (self.named == self.io.len() || dice.roll(2) == 0) {
            let (qid, depth) = (self.io.len() as u16 + 1, IO as u16);
            let request =
                cm::Request { qid, hrqsize: depth, hsqsize_z: depth - 1, ..cm::Request::default() };
            let qp = world.ask_for(self.source, request, 16);
            self.io.extend(qp);
            return qp.is_some();
        }
        if self.named < self.io.len() {
            let qp = self.io[self.named];
            self.named += 1;
            let data = ConnectData { cntlid: controller.cntlid, ..self.data };
            world.connect_io(qp, self.named as u16, &data);
            assert_eq!(usize::from(controller.io_queues()), self.named);
        }
        true
    }

    fn leave(&mut self, world: &mut World, dice: &mut Dice) {
        let mut all: Vec<Qp> = self.io.drain(..).chain(self.admin.take()).collect();
        while !all.is_empty() {
            world.leave(all.swap_remove(dice.roll(all.len())));
        }
        (self.controller, self.granted, self.named) = (None, 0, 0);
    }
}

/// A target with room for just so many hosts with so many I/O queues each; and those and some more.
fn crowd_of(hosts: u8, queues: u16, more: u8) -> (World, Vec<Guest>) {
    let limits = Limits { io_queues: queues, ..LIMITS };
    let for_io = u32::from(hosts) * (ADMIN + IO * u32::from(queues));
    let most = u16::from(hosts) + u16::from(more);
    let world = World::sized(for_io + FOR_ADMIN, most, for_io, limits);
    let names: Vec<Nqn> = (0..most).map(|n| nqn(&format!("nqn.2026-11.host:{n}"))).collect();
    let data = publish_to(&world, false, &names);
    let guest = |(source, data)| Guest {
        source,
        data,
        admin: None,
        controller: None,
        granted: 0,
        io: Vec::new(),
        named: 0,
    };
    let guests = (0..).zip(data).map(guest).collect();
    (world, guests)
}

/// All of them come together to a target that is sized for them, in any order.
#[test]
fn hosts_of_a_target_that_is_sized_for_them_get_all_their_queues_in_any_order() {
    let small = (0..100).map(|seed| (seed, 6, 4));
    for (seed, hosts, queues) in small.chain([(1, 64, 16)]) {
        let ((mut world, mut guests), mut dice) = (crowd_of(hosts, queues, 0), Dice(seed));
        while let Some(at) = pick(&guests, &mut dice) {
            assert!(guests[at].step(&mut world, &mut dice), "{seed}: no queue for {at}");
            assert_eq!(world.settle(), [0; 0], "{seed}");
        }
        let granted: Vec<_> = guests.iter().map(|guest| guest.granted).collect();
        assert_eq!(granted, vec![queues; hosts.into()], "{seed}");
        guests.iter_mut().for_each(|guest| guest.leave(&mut world, &mut dice));
        world.end();
    }
}

fn pick(guests: &[Guest], dice: &mut Dice) -> Option<usize> {
    let left: Vec<usize> = (0..guests.len()).filter(|at| !guests[*at].is_up()).collect();
    (!left.is_empty()).then(|| left[dice.roll(left.len())])
}

/// More than fit, who come and go: each queue that was promised or let in counts once, whatever else is
/// connected.
#[test]
fn what_is_promised_is_what_nobody_has_and_nobody_was_promised() {
    let mut fewer = 0;
    for seed in 0..200 {
        let ((mut world, mut guests), mut dice) = (crowd_of(6, 4, 3), Dice(seed));
        let for_io = 6 * (ADMIN + 4 * IO);
        for _ in 0..150 {
            let at = dice.roll(guests.len());
            if guests[at].admin.is_some() && dice.roll(12) == 0 {
                guests[at].leave(&mut world, &mut dice);
                continue;
            }
            let claims = |guests: &[Guest]| guests.iter().map(Guest::claim).sum::<u32>();
            let (before, had_none) = (claims(&guests), guests[at].controller.is_none());
            guests[at].step(&mut world, &mut dice);
            if had_none && guests[at].controller.is_some() {
                let left = for_io.saturating_sub(before + ADMIN) / IO;
                // A controller has one at least; the host may find that it cannot be connected.
                let most = left.clamp(1, 4);
                assert_eq!(u32::from(guests[at].granted), most, "{seed}");
                fewer += u32::from(most < 4);
            }
            // Connections that are not admitted are displaced by promised ones, and reconnect.
            let gone = world.settle();
            for guest in guests.iter_mut().filter(|guest| guest.has_any_of(&gone)) {
                assert!(!guest.has_admitted_any_of(&gone), "{seed}: {gone:?}");
                guest.leave(&mut world, &mut dice);
            }
        }
        guests.iter_mut().for_each(|guest| guest.leave(&mut world, &mut dice));
        world.end();
    }
    assert!(fewer > 100, "{fewer}: they hardly ever met");
}

/// Strangers hold what they may of all that is there. What a host was promised all the same it gets.
#[test]
fn strangers_make_room_for_what_a_host_was_promised() {
    for first in [true, false] {
        let (mut world, mut guests) = crowd_of(1, 16, 0);
        let (guest, mut dice) = (&mut guests[0], Dice(1));
        let flood = |world: &mut World| {
            for source in 100..120 {
                world.ask_for(source, admin(ADMIN as u16), 16);
                world.settle();
            }
        };
        if first {
            flood(&mut world);
        }
        for _ in 0..2 {
            assert!(guest.step(&mut world, &mut dice));
            world.settle();
        }
        assert_eq!(guest.granted, 16);
        if !first {
            flood(&mut world);
        }
        while !guest.is_up() {
            let before = world.fabric.next;
            let was_asked = !guest.step(&mut world, &mut dice);
            // It waits until unidentified connections have ended, and is not refused.
            while was_asked && world.fabric.next == before {
                world.settle();
                world.now += Duration::from_millis(1);
                world.step(PollGroup::serve_waiters);
                assert_eq!(world.fabric.rejected, 0, "{first}: refused");
            }
            if was_asked {
                let qp = Qp(before);
                world.confirm(qp);
                guest.io.push(qp);
            }
            world.settle();
        }
        guest.leave(&mut world, &mut dice);
        world.end();
    }
}
