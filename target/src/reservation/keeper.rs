//! The keeper: one thread that carries out the orders of all hosts about all reservations and all
//! write protection, one after another. Reactors ask it and go on; it answers by mail. So nobody
//! waits for a file, and every order finds the state that the one before has left.
//!
//! Its queue needs no bound of its own: a command that was handed over keeps its slot until it is
//! answered, so there are never more than there are slots.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use rdma::Tag;
use tracing::{error, info};

use super::{Barred, Effect, Fence, Fenced, HostId, Order, Reservation};
use crate::association::Association;
use crate::command::io::writable;
use crate::disk::Done;
use crate::mailbox::Mail;
use crate::protection::Protection;
use crate::registry::Registry;
use crate::uncorrectable::{Change, Marks};

/// What the keeper is told.
#[derive(Debug)]
pub enum Word {
    /// An order of a host.
    Ask(Ask),
    /// Somebody wants namespaces protected from writes, or no longer.
    Protect(Protect),
    /// Blocks of a namespace become unreadable, or are readable again.
    Mark(Mark),
    /// The last command behind a fence is home.
    Drained(u64),
    /// No more orders will come.
    Stop,
}

/// An order of a host, and who waits for its outcome.
#[derive(Debug)]
pub struct Ask {
    /// What it is about; one after another, until one fails.
    pub of: Vec<Arc<Reservation>>,
    /// Who orders.
    pub host: HostId,
    /// What.
    pub order: Order,
    /// The reactor to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// A wish about write protection, and who waits for its outcome.
#[derive(Debug)]
pub struct Protect {
    /// Whose; one after another, until one fails.
    pub of: Vec<Arc<Protection>>,
    /// The new state.
    pub state: WriteProtectState,
    /// Whom to answer.
    pub from: Asker,
}

/// Who waits for an outcome.
#[derive(Debug)]
pub enum Asker {
    /// A reactor, whose answer has this tag.
    Reactor(usize, Tag),
    /// Somebody who is no host. The channel has room for the answer.
    Person(SyncSender<Result<(), Status>>),
}

/// A change of the blocks that cannot be read, and who waits for its outcome.
#[derive(Debug)]
pub struct Mark {
    /// Whose.
    pub of: Arc<Marks>,
    /// What.
    pub change: Change,
    /// The host that orders blocks to be unreadable, which must be allowed to still when the order
    /// is carried out. None where they were written: nobody can take that back.
    pub by: Option<Arc<Association>>,
    /// The namespace.
    pub nsid: u32,
    /// The reactor to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

impl Mark {
    /// Whether it may be carried out now: orders before it may have barred its host, or protected
    /// the namespace.
    fn may_begin(&self, registry: &Registry) -> Result<(), Status> {
        let Some(by) = &self.by else { return Ok(()) };
        if by.reservations.barred(self.nsid).has(Barred::WRITE) {
            return Err(Status::RESERVATION_CONFLICT.with_dnr());
        }
        let gone = || Status::INVALID_NAMESPACE.with_dnr();
        let subsystem = registry.subsystem(&by.subsystem).ok_or_else(gone)?;
        let namespace = subsystem.namespace(self.nsid)?;
        match Arc::ptr_eq(&namespace.marks, &self.of) {
            true => writable(namespace),
            false => Err(gone()),
        }
    }
}

/// A keeper that has not begun, and the way to it.
#[derive(Debug)]
pub struct Keeper {
    words: Receiver<Word>,
    sender: Sender<Word>,
    /// Who waits behind which fence.
    fenced: HashMap<u64, Asker>,
    next_ticket: u64,
}

impl Keeper {
    /// One that waits for words.
    #[must_use]
    pub fn new() -> Keeper {
        let (sender, words) = channel();
        Keeper { words, sender, fenced: HashMap::new(), next_ticket: 0 }
    }

    /// The way to it.
    #[must_use]
    pub fn sender(&self) -> Sender<Word> {
        self.sender.clone()
    }

    /// Serves until told to stop.
    pub fn run(mut self, registry: &Registry) {
        while let Ok(word) = self.words.recv()
            && self.hear(word, registry)
        {}
    }

    /// Serves what it has been told so far, for who has no thread for it.
    pub fn catch_up(&mut self, registry: &Registry) {
        while let Ok(word) = self.words.try_recv()
            && self.hear(word, registry)
        {}
    }

    /// Whether there may be more.
    fn hear(&mut self, word: Word, registry: &Registry) -> bool {
        match word {
            Word::Ask(ask) => self.serve(ask, registry),
            Word::Protect(wish) => self.protect(wish, registry),
            Word::Mark(mark) => {
                let outcome = mark.may_begin(registry).and_then(|()| mark.of.change(&mark.change));
                answer(registry, &Asker::Reactor(mark.reactor, mark.tag), outcome);
            }
            Word::Drained(ticket) => {
                if let Some(asker) = self.fenced.remove(&ticket) {
                    answer(registry, &asker, Ok(()));
                }
            }
            Word::Stop => return false,
        }
        true
    }

    fn serve(&mut self, ask: Ask, registry: &Registry) {
        let asker = Asker::Reactor(ask.reactor, ask.tag);
        let mut fences = Vec::new();
        for reservation in &ask.of {
            match reservation.carry_out(&ask.host, &ask.order) {
                Ok(effect) => {
                    registry.apply_reservation(reservation);
                    registry.notify(reservation, &effect.notices);
                    if !effect.aborted.is_empty() {
                        fences.push((Arc::clone(reservation), effect.aborted));
                    }
                }
                Err(status) => return answer(registry, &asker, Err(status)),
            }
        }
        // Only Preempt and Abort has a fence, and it is about one namespace.
        match fences.pop() {
            None => answer(registry, &asker, Ok(())),
            Some((reservation, hosts)) => {
                let (subsystem, nsids) = (reservation.subsystem, vec![reservation.nsid]);
                let fence = self.fence(subsystem, nsids, Fenced::Preempted(hosts), asker);
                registry.fence(&fence);
            }
        }
    }

    /// Sets the state of all, and tells everybody whose controllers have them. What is protected now
    /// is so when nothing that came before can change it any more: only then the host is told.
    fn protect(&mut self, wish: Protect, registry: &Registry) {
        for protection in &wish.of {
            match protection.change(wish.state) {
                Ok(true) => registry.announce(&protection.subsystem, protection.nsid),
                Ok(false) => {}
                Err(status) => return answer(registry, &wish.from, Err(status)),
            }
        }
        match wish.of.first() {
            Some(first) if wish.state != WriteProtectState::NONE => {
                let nsids = wish.of.iter().map(|protection| protection.nsid).collect();
                let fence = self.fence(first.subsystem, nsids, Fenced::Writers, wish.from);
                registry.fence(&fence);
            }
            _ => answer(registry, &wish.from, Ok(())),
        }
    }

    /// A fence behind which somebody waits.
    fn fence(
        &mut self,
        subsystem: Nqn,
        nsids: Vec<u32>,
        whose: Fenced,
        asker: Asker,
    ) -> Arc<Fence> {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.fenced.insert(ticket, asker);
        let sender = self.sender.clone();
        Arc::new(Fence::new(subsystem, nsids, whose, move || {
            // A keeper that has ended answers nobody.
            let _ = sender.send(Word::Drained(ticket));
        }))
    }
}

impl Default for Keeper {
    fn default() -> Keeper {
        Keeper::new()
    }
}

impl Reservation {
    /// Carries out an order: decides, keeps the new state where it shall outlast a power loss, and
    /// only then makes it the state. For the keeper alone: two at once would lose one.
    ///
    /// # Errors
    /// The status to answer with; the state is as before. Format in Progress when it would bar whom
    /// it is held for.
    pub(crate) fn carry_out(&self, host: &HostId, order: &Order) -> Result<Effect, Status> {
        let held = self.held();
        let old = self.state();
        let mut new = old.clone();
        let effect = new.apply(host, order, self.file.is_some())?;
        if held.is_some_and(|eraser| new.barred(&eraser).has(Barred::WRITE)) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if let Some(file) = self.file.as_ref().filter(|_| old.persists || new.persists) {
            file.keep(&new).map_err(|failure| {
                let path = file.path();
                error!("the reservation in {} cannot be kept: {failure}", path.display());
                // The rename may have happened. What hosts are told counts, so put it back.
                if let Err(failure) = file.keep(&old) {
                    error!("nor can the one before be put back: {failure}");
                }
                Status::INTERNAL_ERROR
            })?;
        }
        if new.rtype != old.rtype || new.holder != old.holder {
            info!(subsystem = %self.subsystem, nsid = self.nsid, "reservation is now {}", new.rtype);
        }
        *self.lock() = new;
        Ok(effect)
    }
}

fn answer(registry: &Registry, asker: &Asker, outcome: Result<(), Status>) {
    match asker {
        // A reactor that has ended waits for nothing.
        Asker::Reactor(reactor, tag) => {
            let done = Done { tag: *tag, buf: None, outcome };
            let _ = registry.reactor(*reactor).send(Mail::Answer(done));
        }
        // Nor does somebody who has gone.
        Asker::Person(sender) => drop(sender.try_send(outcome)),
    }
}

#[cfg(test)]
mod tests;
