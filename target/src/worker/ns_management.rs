//! The worker of namespace management: one thread that carries out what hosts order about
//! namespaces, one order after another. Reactors ask it and go on; it answers by mail. So nobody
//! waits for a file, and a reload and an order never meet: whoever changes what is served holds its
//! lock (`provision/mod.rs`). An order lets it go while it works in the directory of its subsystem,
//! which may hang.
//!
//! Its queue needs no bound of its own: a command that was handed over keeps its slot until it is
//! answered, so there are never more than there are slots.
//!
//! A format takes as long as its store takes to be erased. Each is a task of the blocking pool, so
//! it keeps nobody else waiting.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use nvme::Status;
use rdma::Tag;
use tracing::error;

use crate::blockdev::IoCompletion;
use crate::blockdev::blocking::BlockingPool;
use crate::core::message::Message;
use crate::core::registry::Registry;
use crate::core::sched::offload::NamespaceJob;
use crate::core::shared::Shared;
use crate::core::subsystem::ns_request::{FormatRequest, NamespaceRequest};
use crate::provision::{Provisioner, format_task, ns_requests};

/// Namespaces that are formatted at a time; a host that wants one more is told to try again.
const MOST_FORMATS: usize = 16;

/// What the worker is told.
#[derive(Debug)]
pub enum NamespaceAdminMessage {
    /// An order of a host.
    Order(Box<NamespaceJob>),
    /// No more orders will come.
    Stop,
}

/// A worker that has not begun, and the way to it.
#[derive(Debug)]
pub struct NamespaceAdmin {
    words: Receiver<NamespaceAdminMessage>,
    sender: Sender<NamespaceAdminMessage>,
}

impl NamespaceAdmin {
    /// One that waits for words.
    #[must_use]
    pub fn new() -> NamespaceAdmin {
        let (sender, words) = channel();
        NamespaceAdmin { words, sender }
    }

    /// The way to it.
    #[must_use]
    pub fn sender(&self) -> Sender<NamespaceAdminMessage> {
        self.sender.clone()
    }

    /// Serves until told to stop.
    pub(crate) fn run(
        self,
        provisioner: &Arc<Mutex<Provisioner>>,
        shared: &Arc<Shared>,
        pool: &BlockingPool,
    ) {
        // Whoever formats has one more of these.
        let pass = Arc::new(());
        while let Ok(NamespaceAdminMessage::Order(order)) = self.words.recv() {
            if let NamespaceRequest::Format(wish) = order.what {
                format(wish, &order, &pass, provisioner, shared, pool);
                continue;
            }
            let carried_out = ns_requests::carry_out(provisioner, &order);
            let NamespaceJob { made, reactor, tag, .. } = *order;
            answer(&shared.registry, reactor, tag, carried_out.map(|nsid| made.set(nsid)));
        }
    }
}

/// Has a task format a namespace, and answer.
fn format(
    wish: FormatRequest,
    order: &NamespaceJob,
    pass: &Arc<()>,
    provisioner: &Arc<Mutex<Provisioner>>,
    shared: &Arc<Shared>,
    pool: &BlockingPool,
) {
    let (nqn, reactor, tag) = (order.subsystem, order.reactor, order.tag);
    if Arc::strong_count(pass) > MOST_FORMATS {
        return answer(&shared.registry, reactor, tag, Err(Status::COMMAND_INTERRUPTED));
    }
    let (pass, provisioner, own) = (Arc::clone(pass), Arc::clone(provisioner), Arc::clone(shared));
    let spawned = pool.spawn(move || {
        let outcome = format_task::carry_out(nqn, wish, &provisioner, &own);
        drop(pass);
        // Who stops waits for the answer, and may want to open the stores again then.
        drop(provisioner);
        answer(&own.registry, reactor, tag, outcome);
    });
    if let Err(error) = spawned {
        error!("no thread that formats: {error}");
        answer(&shared.registry, reactor, tag, Err(Status::COMMAND_INTERRUPTED));
    }
}

fn answer(registry: &Registry, reactor: usize, tag: Tag, outcome: Result<(), Status>) {
    // A reactor that has ended waits for nothing.
    let _ =
        registry.reactor(reactor).send(Message::Answer(IoCompletion { tag, buf: None, outcome }));
}

impl Default for NamespaceAdmin {
    fn default() -> NamespaceAdmin {
        NamespaceAdmin::new()
    }
}
