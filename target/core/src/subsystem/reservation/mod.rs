//! Reservations: access of hosts to a namespace, as set by hosts.
//!
//! * [`state`] decides: a pure state machine per namespace.
//! * One worker executes requests, one after another. It persists what has to survive a power loss
//!   ([`Persist`]) before it answers, and it alone changes a state.
//! * [`ReservationView`](crate::controller::ReservationView) is what I/O reads: a byte per
//!   controller and namespace, one relaxed load a command. The registry writes it when a
//!   reservation changes and when a host connects.
//! * A [`DrainBarrier`](crate::sched::DrainBarrier) is how Preempt and Abort waits for commands in
//!   progress.

mod section;
pub mod state;

use crate::subsystem::persistence::{Persist, not_persisted};
pub use state::{Barred, Effect, HostId, Order, State};

use std::sync::{Arc, Mutex};

use nvme::reservation::{ChangePersistence, Rescap};
use nvme::{Nqn, Status};
use nvmfd_blockdev::lock;
use tracing::info;

/// The reservation of one namespace, shared by all its users: queues report it, the state worker
/// changes it. Compared by identity.
#[derive(Debug)]
pub struct Reservation {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace in it.
    pub nsid: u32,
    /// Hosts can have one.
    is_supported: bool,
    file: Option<Box<dyn Persist>>,
    state: Mutex<State>,
    /// The host for which the namespace is being formatted: no other host may restrict its access
    /// meanwhile.
    held: Mutex<Option<HostId>>,
}

impl Reservation {
    /// One that ends with the daemon.
    pub fn volatile(subsystem: Nqn, nsid: u32) -> Arc<Reservation> {
        let (state, held) = (Mutex::default(), Mutex::default());
        let is_supported = true;
        Arc::new(Reservation { subsystem, nsid, is_supported, file: None, state, held })
    }

    /// None: other daemons serve the same blocks, and would not respect it.
    pub fn none(subsystem: Nqn, nsid: u32) -> Arc<Reservation> {
        let (state, held) = (Mutex::default(), Mutex::default());
        let is_supported = false;
        Arc::new(Reservation { subsystem, nsid, is_supported, file: None, state, held })
    }

    /// Whether hosts can use reservations.
    pub fn is_supported(&self) -> bool {
        self.is_supported
    }

    /// One that can be persisted in `file`, with its present contents.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is invalid.
    pub fn kept(
        subsystem: Nqn,
        nsid: u32,
        file: impl Persist + 'static,
    ) -> Result<Arc<Reservation>, String> {
        let file: Box<dyn Persist> = Box::new(file);
        let (state, held) = (Mutex::new(file.load()?.unwrap_or_default()), Mutex::default());
        let (is_supported, file) = (true, Some(file));
        Ok(Arc::new(Reservation { subsystem, nsid, is_supported, file, state, held }))
    }

    /// Whether a request asks for a reservation that persists, and it cannot be persisted. Linux asks
    /// for that with every registration (IOC_PR_REGISTER).
    #[must_use]
    pub fn cannot_persist_for(&self, order: &Order) -> bool {
        let asks = match order {
            Order::Register(how, _) => how.persistence() == ChangePersistence::SET,
            Order::Persist(on) => *on,
            Order::Acquire(..) | Order::Release(..) => false,
        };
        asks && self.is_supported && self.file.is_none()
    }

    /// Supported reservation capabilities (RESCAP).
    pub fn rescap(&self) -> Rescap {
        match self.is_supported {
            true => Rescap::VOLATILE.with_ptpl(self.file.is_some()),
            false => Rescap(0),
        }
    }

    /// The present state.
    pub fn state(&self) -> State {
        lock(&self.state).clone()
    }

    /// The present extended Reservation Status structure.
    pub fn report(&self) -> Vec<u8> {
        lock(&self.state).report()
    }

    /// Whether it persists through power loss.
    pub fn persists(&self) -> bool {
        lock(&self.state).persists
    }

    /// Commands of `host` that are not allowed now.
    pub fn barred(&self, host: &HostId) -> Barred {
        lock(&self.state).barred(host)
    }

    /// Everything is erased here, for `host`: what would bar it from writing is refused until what
    /// is returned is dropped. For one at a time.
    ///
    /// # Errors
    /// Reservation Conflict.
    pub fn hold(self: &Arc<Self>, host: &HostId) -> Result<ReservationGuard, Status> {
        let mut held = lock(&self.held);
        self.barred(host).check(Barred::WRITE)?;
        *held = Some(*host);
        Ok(ReservationGuard(Arc::clone(self)))
    }

    /// Executes a request: decides, persists the new state if it has to survive a power loss, and
    /// only then publishes it. For one worker only: concurrent calls would lose changes.
    ///
    /// # Errors
    /// The status for the host; the state is unchanged. Format in Progress if it would restrict the
    /// host that it is held for.
    pub fn carry_out(&self, host: &HostId, order: &Order) -> Result<Effect, Status> {
        let held = lock(&self.held);
        let old = self.state();
        let mut new = old.clone();
        let effect = new.apply(host, order, self.file.is_some())?;
        if held.is_some_and(|eraser| new.barred(&eraser).has(Barred::WRITE)) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if let Some(file) = self.file.as_ref().filter(|_| old.persists || new.persists) {
            let section = |state| Some(state).filter(|state: &&State| state.persists);
            file.replace(section(&new), section(&old))
                .map_err(|failure| not_persisted(&failure))?;
        }
        if new.rtype != old.rtype || new.holder != old.holder {
            info!(subsystem = %self.subsystem, nsid = self.nsid, "reservation is now {}", new.rtype);
        }
        *lock(&self.state) = new;
        Ok(effect)
    }

    /// Loads what is persisted: another daemon has changed it, and this one takes the namespace.
    ///
    /// # Errors
    /// As [`Reservation::kept`]; the state is unchanged.
    pub fn reload(&self) -> Result<(), String> {
        let _unchanged = lock(&self.held);
        if let Some(file) = &self.file {
            let state = file.load()?.unwrap_or_default();
            *lock(&self.state) = state;
        }
        Ok(())
    }
}

/// A reservation that does not bar a host.
#[derive(Debug)]
pub struct ReservationGuard(Arc<Reservation>);

impl Drop for ReservationGuard {
    fn drop(&mut self) {
        *lock(&self.0.held) = None;
    }
}

impl PartialEq for Reservation {
    fn eq(&self, other: &Reservation) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Reservation {}

/// For tests, also of other packages.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use nvme::reservation::{
        Acquire, AcquireAction, AcquireKeys, Register, RegisterKeys, Release, ReleaseAction,
        ReleaseKey, ReservationType,
    };

    use crate::subsystem::reservation::*;

    const KEY: u64 = 7;

    /// A registration.
    pub fn registered() -> Order {
        Order::Register(Register(0), RegisterKeys { current: 0, new: KEY })
    }

    /// An acquisition of the exclusive access.
    pub fn acquired() -> Order {
        let how = Acquire(0).with_action(AcquireAction::ACQUIRE);
        let how = how.with_rtype(ReservationType::EXCLUSIVE_ACCESS);
        Order::Acquire(how, AcquireKeys { current: KEY, preempt: 0 })
    }

    pub(super) fn cleared() -> Order {
        let how = Release(0).with_action(ReleaseAction::CLEAR);
        Order::Release(how, ReleaseKey { current: KEY })
    }

    /// A host has the exclusive access.
    ///
    /// # Panics
    /// It may not have it.
    pub fn reserve(reservation: &Reservation, host: HostId) {
        for order in [registered(), acquired()] {
            reservation.carry_out(&host, &order).unwrap();
        }
    }

    /// A host ends all of it.
    ///
    /// # Panics
    /// It may not.
    pub fn clear(reservation: &Reservation, host: HostId) {
        reservation.carry_out(&host, &cleared()).unwrap();
    }
}

#[cfg(test)]
mod tests {
    use super::testing::*;
    use super::*;
    use crate::subsystem::persistence::tests::MemorySections;

    /// Those of Linux hosts are all refused then.
    #[test]
    fn registrations_that_are_to_persist_are_recognised_where_they_cannot() {
        let nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let how = nvme::reservation::Register(0).with_persistence(ChangePersistence::SET);
        let keys = nvme::reservation::RegisterKeys { current: 0, new: 7 };
        let persistent = [Order::Register(how, keys), Order::Persist(true)];
        let others = [registered(), acquired(), cleared(), Order::Persist(false)];
        let volatile = Reservation::volatile(nqn, 1);
        assert!(persistent.iter().all(|order| volatile.cannot_persist_for(order)));
        assert!(!others.iter().any(|order| volatile.cannot_persist_for(order)));
        assert!(volatile.carry_out(&[1; 16], &persistent[0]).is_err());
        let none = Reservation::none(nqn, 1);
        assert!(!none.cannot_persist_for(&persistent[0]), "there are no reservations");
        let kept = Reservation::kept(nqn, 1, MemorySections::default()).unwrap();
        assert!(!kept.cannot_persist_for(&persistent[0]));
    }

    #[test]
    fn a_host_cannot_lose_access_while_erasing_a_namespace() {
        let (own, other) = ([1; 16], [2; 16]);
        let reservation = Reservation::volatile("nqn.2026-11.io.nvmfd:a".parse().unwrap(), 1);
        let held = reservation.hold(&own).unwrap();
        reservation.carry_out(&other, &registered()).unwrap();
        let refused = reservation.carry_out(&other, &acquired());
        assert_eq!(refused, Err(Status::FORMAT_IN_PROGRESS));
        assert_eq!(reservation.barred(&own), Barred(0));
        reserve(&reservation, own);
        let cleared = reservation.carry_out(&own, &cleared());
        assert!(cleared.is_ok(), "his own affair: {cleared:?}");
        drop(held);
        reserve(&reservation, other);
        let refused = reservation.hold(&own).map(drop);
        assert_eq!(refused, Err(Status::RESERVATION_CONFLICT.with_dnr()));
        assert!(reservation.hold(&other).is_ok());
    }
}
