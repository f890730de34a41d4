//! The queues of a reactor in a flood of connections that never send a Connect.

#[path = "support/crowd.rs"]
mod crowd;

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use nvme::Text;
use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvmfd::queues::Queues;
use nvmfd::registry::Visit;
use nvmfd::subsystem::Subsystem;
use rdma::Qp;

use crowd::{LIMITS, World};

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
    // What was closed has not come home: nobody may take more than is there.
    assert_eq!((world.ask(4), world.fabric.rejected), (None, 0));
    world.step(Queues::serve_waiters);
    assert_eq!(world.settle(), [0], "the first has the most, and this is its oldest");
    // The next one makes room a millisecond after the last.
    let before = world.now;
    world.now = before - Duration::from_micros(500);
    world.step(Queues::serve_waiters);
    assert_eq!(world.fabric.next, 7);
    world.now = before;
    world.step(Queues::serve_waiters);
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
    for _ in 0..70 {
        assert_eq!(world.ask(1), None);
    }
    assert_eq!(world.fabric.rejected, 71 - 64);
    world.settle();
    world.step(Queues::serve_waiters);
    // The first in line has been let in, and the next found no room again.
    assert_eq!(world.fabric.next, 8);
    assert_eq!(world.ask(9), None);
    world.end();
}

#[test]
fn controllers_of_one_host_that_come_together_do_not_push_each_other_out() {
    let mut world = World::new();
    let name = |text: &str| text.parse::<nvme::Nqn>().unwrap();
    let nqn = name("nqn.2026-11.io.nvmfd:queues");
    world.registry.publish(Arc::new(Subsystem {
        nqn,
        serial: Text::lossy("S"),
        model: Text::lossy("M"),
        allow_any_host: true,
        hosts: Default::default(),
        offer: Arc::default(),
        namespaces: Vec::new(),
        management: None,
        host_limiters: Arc::default(),
        usage: Arc::default(),
    }));
    let data = ConnectData::new([1; 16], CNTLID_DYNAMIC, &nqn, &name("nqn.2026-11.host:h"));
    let at = |last| IpAddr::from([192, 0, 2, last]);
    let visit = Visit {
        local: SocketAddr::new(at(250), 4420),
        source: at(1),
        limits: LIMITS,
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
