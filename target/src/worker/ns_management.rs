//! The worker of namespace management: one thread that executes requests of hosts about namespaces,
//! one after another. Reactors submit and continue; the worker completes by message. So no reactor
//! waits for a file, and a reload and a request never run concurrently: each takes the lock of the
//! provisioner (`provision/mod.rs`). A request releases it while it works in the directory of its
//! subsystem, which may hang.
//!
//! Its queue needs no bound of its own: a command that was handed over occupies its slot until it
//! is completed, so there are never more commands than slots.
//!
//! A format takes as long as the erase of its device. Each is a task of the blocking pool, so it
//! delays no other request.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};

use nvme::Status;
use tracing::error;

use super::answer;
use crate::blockdev::blocking::BlockingPool;
use crate::core::registry::Registry;
use crate::core::sched::offload::NamespaceJob;
use crate::core::shared::Shared;
use crate::core::subsystem::ns_request::{FormatRequest, NamespaceRequest};
use crate::provision::{Provisioner, format_task, ns_requests};

/// Maximum number of concurrent formats; the status of a further one requests a retry by its host.
const MOST_FORMATS: usize = 16;

/// Messages to the worker.
#[derive(Debug)]
pub enum NamespaceAdminMessage {
    /// A request of a host.
    Order(Box<NamespaceJob>),
    /// Stop: there are no more requests.
    Stop,
}

/// A worker that has not started, and the sender of its messages.
#[derive(Debug)]
pub struct NamespaceAdmin {
    messages: Receiver<NamespaceAdminMessage>,
    sender: Sender<NamespaceAdminMessage>,
}

impl NamespaceAdmin {
    /// Creates a worker.
    pub fn new() -> NamespaceAdmin {
        let (sender, messages) = channel();
        NamespaceAdmin { messages, sender }
    }

    /// Sender of its messages.
    pub fn sender(&self) -> Sender<NamespaceAdminMessage> {
        self.sender.clone()
    }

    /// The next request, without a thread.
    #[must_use]
    pub fn take(&self) -> Option<NamespaceJob> {
        match self.messages.try_recv() {
            Ok(NamespaceAdminMessage::Order(order)) => Some(*order),
            _ => None,
        }
    }

    /// Serves requests until it is stopped.
    pub(crate) fn run(
        self,
        provisioner: &Arc<Mutex<Provisioner>>,
        shared: &Arc<Shared>,
        pool: &BlockingPool,
    ) {
        // Each format holds a clone.
        let pass = Arc::new(());
        while let Ok(NamespaceAdminMessage::Order(order)) = self.messages.recv() {
            if let NamespaceRequest::Format(request) = order.what {
                format(request, &order, &pass, provisioner, shared, pool);
                continue;
            }
            complete(&shared.registry, &order, ns_requests::execute(provisioner, &order));
        }
    }
}

/// Completes a request with the id of the created namespace, or 0, or with an error status.
pub fn complete(registry: &Registry, order: &NamespaceJob, outcome: Result<u32, Status>) {
    answer(registry, order.reactor, order.tag, outcome.map(|nsid| order.made.set(nsid)));
}

/// Starts a task that formats a namespace and completes the request.
fn format(
    request: FormatRequest,
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
    let connection = order.connection.clone();
    let spawned = pool.spawn(move || {
        let outcome = format_task::execute(nqn, request, &connection, &provisioner, &own);
        drop(pass);
        // A stop waits for the completion, and may open the devices again afterwards.
        drop(provisioner);
        answer(&own.registry, reactor, tag, outcome);
    });
    if let Err(error) = spawned {
        error!("no thread for a format: {error}");
        answer(&shared.registry, reactor, tag, Err(Status::COMMAND_INTERRUPTED));
    }
}

impl Default for NamespaceAdmin {
    fn default() -> NamespaceAdmin {
        NamespaceAdmin::new()
    }
}
