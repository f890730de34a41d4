//! The worker of namespace management: one thread that receives the requests of hosts about
//! namespaces. Reactors submit and continue; the completion is a message. So no reactor waits for a
//! file, and a reload and a request never run concurrently: each takes the lock of the provisioner
//! (`provision/mod.rs`). A request releases it while it works in the directory of its subsystem, which
//! may hang.
//!
//! Each request is a task of the blocking pool. Those of one subsystem are executed one after another,
//! so one whose directory hangs delays those of its own subsystem only. A format takes as long as the
//! erase of its device, and delays no other request.
//!
//! The queues need no bound of their own: a command that was handed over occupies its slot until it
//! is completed, so there are never more commands than slots.

use std::collections::{BTreeMap, VecDeque};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nvme::{Nqn, Status};
use tracing::error;

use super::answer;
use crate::blockdev::blocking::BlockingPool;
use crate::config::ManagedConfig;
use crate::core::registry::Registry;
use crate::core::sched::offload::NamespaceJob;
use crate::core::shared::Shared;
use crate::core::subsystem::ns_request::{FAILED, FormatRequest, NamespaceRequest};
use crate::provision::{Provisioner, format_task, ns_requests};

/// Maximum number of concurrent formats; the status of a further one requests a retry by its host.
const MOST_FORMATS: usize = 16;

/// Time after which a request that has not ended is reported.
const SLOW: Duration = Duration::from_secs(10);
/// Interval of checks for such requests.
const LOOK: Duration = Duration::from_secs(1);

/// Messages to the worker.
#[derive(Debug)]
pub enum NamespaceAdminMessage {
    /// A request of a host.
    Order(Box<NamespaceJob>),
    /// The request in progress of a subsystem has ended.
    Ended(Box<Nqn>),
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

    /// Serves requests until it is stopped, and those in progress have ended.
    pub(crate) fn run(
        self,
        provisioner: &Arc<Mutex<Provisioner>>,
        shared: &Arc<Shared>,
        pool: &BlockingPool,
    ) {
        // Each format holds a clone.
        let pass = Arc::new(());
        let mut busy: BTreeMap<Nqn, SubsystemQueue> = BTreeMap::new();
        let mut is_stopped = false;
        while !is_stopped || !busy.is_empty() {
            busy.iter_mut().for_each(|(nqn, queue)| queue.report(nqn, provisioner));
            let (subsystem, requests) = match self.next(busy.is_empty()) {
                Ok(NamespaceAdminMessage::Order(order)) => {
                    if let NamespaceRequest::Format(request) = order.what {
                        format(request, &order, &pass, provisioner, shared, pool);
                        continue;
                    }
                    let nqn = order.subsystem;
                    if let Some(queue) = busy.get_mut(&nqn) {
                        queue.requests.push_back(order);
                        continue;
                    }
                    (nqn, [order].into())
                }
                Ok(NamespaceAdminMessage::Ended(nqn)) => {
                    let queue = busy.remove(&nqn);
                    (*nqn, queue.map(|queue| queue.requests).unwrap_or_default())
                }
                Ok(NamespaceAdminMessage::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    is_stopped = true;
                    busy.values_mut().for_each(|queue| queue.requests.clear());
                    continue;
                }
                Err(RecvTimeoutError::Timeout) => continue,
            };
            if let Some(rest) = self.begin_first(requests, provisioner, shared, pool) {
                busy.insert(subsystem, SubsystemQueue::new(rest));
            }
        }
    }

    fn next(&self, is_idle: bool) -> Result<NamespaceAdminMessage, RecvTimeoutError> {
        match is_idle {
            true => self.messages.recv().map_err(|_| RecvTimeoutError::Disconnected),
            false => self.messages.recv_timeout(LOOK),
        }
    }

    /// Begins the first of these requests, as a task. Returns the others; none if there is none to
    /// begin.
    fn begin_first(
        &self,
        mut requests: VecDeque<Box<NamespaceJob>>,
        provisioner: &Arc<Mutex<Provisioner>>,
        shared: &Arc<Shared>,
        pool: &BlockingPool,
    ) -> Option<VecDeque<Box<NamespaceJob>>> {
        while let Some(order) = requests.pop_front() {
            let (provisioner, own) = (Arc::clone(provisioner), Arc::clone(shared));
            let (ended, order) = (self.sender.clone(), Arc::new(order));
            let request = Arc::clone(&order);
            let spawned = pool.spawn(move || {
                let outcome = ns_requests::execute(&provisioner, &request);
                // A stop waits for the end, and may open the devices again afterwards.
                drop(provisioner);
                complete(&own.registry, &request, outcome);
                let _ = ended.send(NamespaceAdminMessage::Ended(Box::new(request.subsystem)));
            });
            match spawned {
                Ok(_) => return Some(requests),
                Err(error) => {
                    error!("no thread for a namespace request: {error}");
                    complete(&shared.registry, &order, Err(FAILED));
                }
            }
        }
        None
    }
}

/// The requests of a subsystem that wait for the one in progress.
#[derive(Debug)]
struct SubsystemQueue {
    requests: VecDeque<Box<NamespaceJob>>,
    /// When the one in progress has begun.
    since: Instant,
    is_reported: bool,
}

impl SubsystemQueue {
    fn new(requests: VecDeque<Box<NamespaceJob>>) -> SubsystemQueue {
        SubsystemQueue { requests, since: Instant::now(), is_reported: false }
    }

    /// Reports a request that does not end, once.
    fn report(&mut self, nqn: &Nqn, provisioner: &Mutex<Provisioner>) {
        if self.is_reported || self.since.elapsed() < SLOW {
            return;
        }
        // A change that holds the lock for as long is reported itself.
        let Ok(provisioner) = provisioner.try_lock() else { return };
        let subsystems = &provisioner.config().subsystems;
        let managed =
            subsystems.iter().find(|it| it.nqn == *nqn).and_then(|it| it.managed.as_ref());
        error!(
            "a namespace request for {nqn} has not ended after {} s, and later ones for it wait{}",
            SLOW.as_secs(),
            managed.map(unresponsive).unwrap_or_default()
        );
        self.is_reported = true;
    }
}

/// What a request waits for. With a pool, the directory has only the record, and older files.
fn unresponsive(managed: &ManagedConfig) -> String {
    let directory = managed.directory.display();
    match &managed.pool {
        None => format!(": its directory {directory} does not answer: check its device or server"),
        Some(pool) => format!(
            ": its pool {pool} of Ceph RBD does not answer: see `ceph -s`; or its directory \
             {directory} does not: check its device or server"
        ),
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

#[cfg(test)]
mod tests;
