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

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use nvme::{Nqn, Status};
use rdma::Tag;
use tracing::error;

use crate::disk::Done;
use crate::mailbox::Mail;
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
    pub what: What,
    /// Where the namespace id of what was made is left, before the answer.
    pub made: Made,
    /// The reactor to answer.
    pub reactor: usize,
    /// What the answer is tagged with.
    pub tag: Tag,
}

/// What a host wants done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum What {
    /// A new namespace, attached to nobody.
    Create(Creation),
    /// A namespace deleted, and detached before; FFFFFFFFh: all that hosts have made.
    Delete {
        /// Namespace id.
        nsid: u32,
    },
    /// A namespace attached to the hosts of controllers.
    Attach {
        /// Namespace id.
        nsid: u32,
        /// Controller ids, ascending.
        cntlids: Vec<u16>,
    },
    /// A namespace erased, with blocks of a size afterwards.
    Format(Formatting),
    /// A namespace detached from the hosts of controllers.
    Detach {
        /// Namespace id.
        nsid: u32,
        /// Controller ids, ascending.
        cntlids: Vec<u16>,
    },
}

/// How a namespace shall be formatted, and for whom.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Formatting {
    /// Namespace id.
    pub nsid: u32,
    /// Bytes of a logical block afterwards: 512 or 4096.
    pub block_size_bytes: u32,
    /// The controller that has the command.
    pub cntlid: u16,
    /// Its host.
    pub host_id: HostId,
}

/// What a namespace shall be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Creation {
    /// Its size: whole blocks.
    pub bytes: u64,
    /// Bytes of a logical block: 512 or 4096.
    pub block_size_bytes: u32,
    /// Its ANA group.
    pub ana_group: u32,
    /// Attached to one host at a time.
    pub private: bool,
}

/// The id of a namespace that was made, once it was. Two of them are equal when they are the same
/// one.
#[derive(Clone, Debug, Default)]
pub struct Made(Arc<AtomicU32>);

impl Made {
    /// The id; 0 when nothing was made.
    #[must_use]
    pub fn nsid(&self) -> u32 {
        self.0.load(Ordering::Acquire)
    }

    /// Leaves the id.
    pub fn set(&self, nsid: u32) {
        self.0.store(nsid, Ordering::Release);
    }
}

impl PartialEq for Made {
    fn eq(&self, other: &Made) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Made {}

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
            if let What::Format(wish) = order.what {
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
    wish: Formatting,
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

/// The status of what could not be kept, or not be made, for a reason that the log has.
pub(crate) const FAILED: Status = Status::INTERNAL_ERROR;
