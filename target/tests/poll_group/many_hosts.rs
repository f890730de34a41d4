//! Hosts that connect their queues in any order, and strangers among them.

use std::sync::Arc;
use std::time::Duration;

use nvme::fabrics::ConnectData;
use nvme::{Nqn, cm};
use nvmfd::core::controller::Limits;
use nvmfd::core::controller::association::Association;
use nvmfd::core::poll_group::PollGroup;
use rdma::Qp;

use super::{admin, nqn, publish_to};
use crate::half_open::{LIMITS, World};

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
fn hosts_of_an_adequately_sized_target_get_all_queues_in_any_order() {
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
fn queue_grants_equal_the_capacity_neither_used_nor_granted() {
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
fn unidentified_connections_are_displaced_by_granted_queues() {
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
