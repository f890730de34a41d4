//! The worker of namespace states: one thread that executes the requests of all hosts about
//! reservations, write protection and bad blocks, one after another. Reactors submit and continue;
//! the worker completes by message. So no reactor waits for a file, and every request finds the
//! state left by the previous one.
//!
//! Its queue needs no bound of its own: a command that was handed over occupies its slot until it
//! is completed, so there are never more commands than slots. Hosts take turns: a change that
//! persists takes the time of several syncs, and one host may have thousands pending.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use tracing::warn;

use crate::core::command::io::writable;
use crate::core::registry::Registry;
use crate::core::sched::fair_queue::FairQueue;
use crate::core::sched::offload::{
    BadBlocksRequest, ReplyTo, ReservationRequest, WriteProtectRequest,
};
use crate::core::sched::{DrainBarrier, DrainScope};
use crate::core::subsystem::Namespace;
use crate::core::subsystem::reservation::{Barred, HostId, Order, Reservation};

/// Messages to the worker.
#[derive(Debug)]
pub enum NamespaceStateMessage {
    /// A reservation request of a host.
    Ask(ReservationRequest),
    /// A request to write-protect namespaces, or to end that.
    Protect(WriteProtectRequest),
    /// A request to make blocks unreadable, or readable again.
    Mark(Box<BadBlocksRequest>),
    /// The last command before a drain barrier has completed.
    Drained(u64),
    /// Stop: there are no more requests.
    Stop,
}

/// Checks a namespace for [`Namespace::check_loaded`], if it is still the one that a request is for.
fn check_loaded(
    registry: &Registry,
    (nqn, nsid): (&Nqn, u32),
    is_it: impl Fn(&Namespace) -> bool,
) -> Result<(), Status> {
    let Some(subsystem) = registry.subsystem(nqn) else { return Ok(()) };
    let namespace = subsystem.namespace(nsid).ok().filter(|it| is_it(it));
    namespace.map_or(Ok(()), Namespace::check_loaded)
}

/// Checks whether blocks may be made unreadable now: earlier requests may have preempted the host,
/// or protected the namespace, and the host may have given up meanwhile.
fn check_marking(request: &BadBlocksRequest, registry: &Registry) -> Result<(), Status> {
    let Some(by) = &request.by else { return Ok(()) };
    by.connection.check()?;
    let gone = || Status::INVALID_NAMESPACE.with_dnr();
    let subsystem = registry.subsystem(&by.subsystem).ok_or_else(gone)?;
    let namespace = subsystem.namespace(request.nsid)?;
    if !Arc::ptr_eq(&namespace.marks, &request.of) {
        return Err(gone());
    }
    if namespace.reservation.barred(&by.host_id).has(Barred::WRITE) {
        return Err(Status::RESERVATION_CONFLICT.with_dnr());
    }
    writable(namespace)
}

/// A worker that has not started, and the sender of its messages.
#[derive(Debug)]
pub struct NamespaceStateWorker {
    messages: Receiver<NamespaceStateMessage>,
    sender: Sender<NamespaceStateMessage>,
    /// Requests by host. The requests without one take turns with the hosts.
    requests: FairQueue<NamespaceStateMessage, Option<HostId>>,
    is_stopped: bool,
    /// That a reservation cannot persist was reported.
    is_persistence_reported: bool,
    /// Requests that wait for drain barriers.
    fenced: HashMap<u64, ReplyTo>,
    next_ticket: u64,
}

impl NamespaceStateWorker {
    /// Creates a worker.
    #[must_use]
    pub fn new() -> NamespaceStateWorker {
        let (sender, messages) = channel();
        let (requests, fenced) = (FairQueue::default(), HashMap::new());
        NamespaceStateWorker {
            messages,
            sender,
            requests,
            is_stopped: false,
            is_persistence_reported: false,
            fenced,
            next_ticket: 0,
        }
    }

    /// Sender of its messages.
    pub fn sender(&self) -> Sender<NamespaceStateMessage> {
        self.sender.clone()
    }

    /// Serves requests until it is stopped.
    pub fn run(mut self, registry: &Registry) {
        while !self.is_stopped
            && let Ok(message) = self.messages.recv()
        {
            self.accept(message, registry);
            self.catch_up(registry);
        }
    }

    /// Serves the requests so far, without a thread.
    pub fn catch_up(&mut self, registry: &Registry) {
        loop {
            while let Ok(message) = self.messages.try_recv() {
                self.accept(message, registry);
            }
            let Some(request) = self.requests.pop() else { return };
            self.handle(request, registry);
        }
    }

    /// Queues a request for the turn of its host, and handles any other message.
    fn accept(&mut self, message: NamespaceStateMessage, registry: &Registry) {
        let host = match &message {
            NamespaceStateMessage::Ask(ask) => Some(ask.host),
            NamespaceStateMessage::Mark(mark) => mark.by.as_ref().map(|by| by.host_id),
            NamespaceStateMessage::Protect(_) => None,
            NamespaceStateMessage::Drained(_) | NamespaceStateMessage::Stop => {
                return self.handle(message, registry);
            }
        };
        self.requests.push(host, message);
    }

    fn handle(&mut self, message: NamespaceStateMessage, registry: &Registry) {
        match message {
            NamespaceStateMessage::Ask(ask) => self.serve(ask, registry),
            NamespaceStateMessage::Protect(request) => self.protect(request, registry),
            NamespaceStateMessage::Mark(mark) => {
                let outcome = check_marking(&mark, registry);
                let outcome = outcome.and_then(|()| mark.of.change(&mark.change));
                answer(registry, &ReplyTo::Reactor(mark.reactor, mark.tag), outcome);
            }
            NamespaceStateMessage::Drained(ticket) => {
                if let Some(asker) = self.fenced.remove(&ticket) {
                    answer(registry, &asker, Ok(()));
                }
            }
            NamespaceStateMessage::Stop => self.is_stopped = true,
        }
    }

    fn serve(&mut self, ask: ReservationRequest, registry: &Registry) {
        let asker = ReplyTo::Reactor(ask.reactor, ask.tag);
        let mut fences = Vec::new();
        for reservation in &ask.of {
            let place = (&reservation.subsystem, reservation.nsid);
            let loaded = check_loaded(registry, place, |it| it.reservation == *reservation);
            match loaded.and_then(|()| reservation.carry_out(&ask.host, &ask.order)) {
                Ok(effect) => {
                    registry.apply_reservation(reservation);
                    registry.notify(reservation, &effect.notices);
                    if !effect.aborted.is_empty() {
                        fences.push((Arc::clone(reservation), effect.aborted));
                    }
                }
                Err(status) => {
                    self.report_refused_persistence(reservation, &ask.order);
                    return answer(registry, &asker, Err(status));
                }
            }
        }
        // Only Preempt and Abort has a drain barrier, for one namespace.
        match fences.pop() {
            None => answer(registry, &asker, Ok(())),
            Some((reservation, hosts)) => {
                let (subsystem, nsids) = (reservation.subsystem, vec![reservation.nsid]);
                let fence = self.fence(subsystem, nsids, DrainScope::Preempted(hosts), asker);
                registry.fence(&fence);
            }
        }
    }

    /// Reports once why a host cannot register, which its error does not say.
    fn report_refused_persistence(&mut self, reservation: &Reservation, order: &Order) {
        if self.is_persistence_reported || !reservation.cannot_persist_for(order) {
            return;
        }
        self.is_persistence_reported = true;
        warn!(
            "namespace {} of {}: a registration or reservation that is to persist (PTPL) is refused, as \
             nothing can be persisted without a `state_directory`; Linux hosts ask for that with each \
             registration (IOC_PR_REGISTER): add one to the configuration, and restart",
            reservation.nsid, reservation.subsystem
        );
    }

    /// Sets the state of all namespaces, and notifies their controllers. A namespace counts as
    /// protected, and the request is completed, when no earlier command can change it any more.
    fn protect(&mut self, request: WriteProtectRequest, registry: &Registry) {
        for protection in &request.of {
            let place = (&protection.subsystem, protection.nsid);
            let loaded = check_loaded(registry, place, |it| it.protection == *protection);
            match loaded.and_then(|()| protection.change(request.state)) {
                Ok(true) => registry.announce(&protection.subsystem, protection.nsid),
                Ok(false) => {}
                Err(status) => return answer(registry, &request.from, Err(status)),
            }
        }
        match request.of.first() {
            Some(first) if request.state != WriteProtectState::NONE => {
                let nsids = request.of.iter().map(|protection| protection.nsid).collect();
                let fence = self.fence(first.subsystem, nsids, DrainScope::Writers, request.from);
                registry.fence(&fence);
            }
            _ => answer(registry, &request.from, Ok(())),
        }
    }

    /// A drain barrier of a request.
    fn fence(
        &mut self,
        subsystem: Nqn,
        nsids: Vec<u32>,
        whose: DrainScope,
        asker: ReplyTo,
    ) -> Arc<DrainBarrier> {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.fenced.insert(ticket, asker);
        let sender = self.sender.clone();
        Arc::new(DrainBarrier::new(subsystem, nsids, whose, move || {
            // A worker that has ended sends no completion.
            let _ = sender.send(NamespaceStateMessage::Drained(ticket));
        }))
    }
}

impl Default for NamespaceStateWorker {
    fn default() -> NamespaceStateWorker {
        NamespaceStateWorker::new()
    }
}

fn answer(registry: &Registry, asker: &ReplyTo, outcome: Result<(), Status>) {
    match asker {
        ReplyTo::Reactor(reactor, tag) => super::answer(registry, *reactor, *tag, outcome),
        // An HTTP request that was closed needs no completion.
        ReplyTo::Caller(sender) => drop(sender.try_send(outcome)),
    }
}

#[cfg(test)]
mod tests;
