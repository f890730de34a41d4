//! The steward: one thread that carries out what hosts order about namespaces, one order after
//! another. Reactors ask it and go on; it answers by mail. So nobody waits for a file, and a reload
//! and an order never meet: whoever changes what is served holds its lock (`shelf.rs`). An order lets
//! it go while it is at work in the folder of its subsystem, which may hang.
//!
//! Its queue needs no bound of its own: a command that was handed over keeps its slot until it is
//! answered, so there are never more than there are slots.
//!
//! A format takes as long as its store takes to be erased. Each has a thread of its own, so it keeps
//! nobody else waiting.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use nvme::{Nqn, Status};
use rdma::Tag;
use tracing::error;

use crate::disk::Done;
use crate::mailbox::Mail;
use crate::ns_request::{CreatedNsid, FormatRequest, NamespaceRequest};
use crate::registry::Registry;
use crate::reservation::HostId;
use crate::shelf::{Shelf, formatting, orders};

/// Namespaces that are formatted at a time; a host that wants one more is told to try again.
const MOST_FORMATS: usize = 16;

/// What the steward is told.
#[derive(Debug)]
pub enum Word {
    /// An order of a host.
    Order(Box<Order>),
    /// No more orders will come.
    Stop,
}

/// An order of a host, and who waits for its outcome.
#[derive(Debug)]
pub struct Order {
    /// The subsystem.
    pub subsystem: Nqn,
    /// Who orders.
    pub host: Nqn,
    /// Its identifier, by which reservations know it.
    pub host_id: HostId,
    /// By which controller.
    pub cntlid: u16,
    /// What.
    pub what: NamespaceRequest,
    /// Where the namespace id of what was made is left, before the answer.
    pub made: CreatedNsid,
    /// The reactor to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// A steward that has not begun, and the way to it.
#[derive(Debug)]
pub struct Steward {
    words: Receiver<Word>,
    sender: Sender<Word>,
}

impl Steward {
    /// One that waits for words.
    #[must_use]
    pub fn new() -> Steward {
        let (sender, words) = channel();
        Steward { words, sender }
    }

    /// The way to it.
    #[must_use]
    pub fn sender(&self) -> Sender<Word> {
        self.sender.clone()
    }

    /// Serves until told to stop.
    pub(crate) fn run(self, shelf: &Arc<Mutex<Shelf>>, registry: &Arc<Registry>) {
        // Whoever formats has one more of these.
        let pass = Arc::new(());
        while let Ok(Word::Order(order)) = self.words.recv() {
            if let NamespaceRequest::Format(wish) = order.what {
                format(wish, &order, &pass, shelf, registry);
                continue;
            }
            let carried_out = orders::carry_out(shelf, &order);
            let Order { made, reactor, tag, .. } = *order;
            answer(registry, reactor, tag, carried_out.map(|nsid| made.set(nsid)));
        }
    }
}

/// Has a thread format a namespace, and answer.
fn format(
    wish: FormatRequest,
    order: &Order,
    pass: &Arc<()>,
    shelf: &Arc<Mutex<Shelf>>,
    registry: &Arc<Registry>,
) {
    let (nqn, reactor, tag) = (order.subsystem, order.reactor, order.tag);
    if Arc::strong_count(pass) > MOST_FORMATS {
        return answer(registry, reactor, tag, Err(Status::COMMAND_INTERRUPTED));
    }
    let (pass, shelf, own) = (Arc::clone(pass), Arc::clone(shelf), Arc::clone(registry));
    let spawned = std::thread::Builder::new().name("format".to_owned()).spawn(move || {
        let outcome = formatting::carry_out(nqn, wish, &shelf, &own);
        drop(pass);
        // Who stops waits for the answer, and may want to open the stores again then.
        drop(shelf);
        answer(&own, reactor, tag, outcome);
    });
    if let Err(error) = spawned {
        error!("no thread that formats: {error}");
        answer(registry, reactor, tag, Err(Status::COMMAND_INTERRUPTED));
    }
}

fn answer(registry: &Registry, reactor: usize, tag: Tag, outcome: Result<(), Status>) {
    // A reactor that has ended waits for nothing.
    let _ = registry.reactor(reactor).send(Mail::Answer(Done { tag, buf: None, outcome }));
}

impl Default for Steward {
    fn default() -> Steward {
        Steward::new()
    }
}
