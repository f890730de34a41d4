//! Worker threads for jobs of poll groups that may block.

mod auth;
pub(crate) mod gateway;
pub mod ns_management;
pub mod ns_state;
mod search;

use std::sync::mpsc::Sender;

use nvme::Status;
use rdma::Tag;

use crate::blockdev::IoCompletion;
use crate::core::message::Message;
use crate::core::registry::Registry;
use crate::core::sched::Offload;
use crate::core::sched::offload::Job;
use auth::AuthWorker;
use ns_management::NamespaceAdminMessage;
use ns_state::NamespaceStateMessage;
use search::SearchWorker;

/// Senders of jobs to the worker threads. The one for authentication starts with the first job;
/// jobs of a missing worker are rejected.
#[derive(Debug, Default)]
pub struct Workers {
    ns_state: Option<Sender<NamespaceStateMessage>>,
    ns_management: Option<Sender<NamespaceAdminMessage>>,
    search: SearchWorker,
    auth: AuthWorker,
}

impl Workers {
    /// With a worker for reservations, write protection and unreadable blocks.
    #[must_use]
    pub fn with_ns_state(self, worker: Sender<NamespaceStateMessage>) -> Workers {
        Workers { ns_state: Some(worker), ..self }
    }

    /// With a worker for requests that concern whole namespaces.
    #[must_use]
    pub fn with_ns_management(self, worker: Sender<NamespaceAdminMessage>) -> Workers {
        Workers { ns_management: Some(worker), ..self }
    }

    fn send_ns_state(&self, message: NamespaceStateMessage) -> bool {
        self.ns_state.as_ref().is_some_and(|worker| worker.send(message).is_ok())
    }
}

impl Offload for Workers {
    fn submit(&self, job: Job) -> bool {
        match job {
            Job::Reserve(request) => self.send_ns_state(NamespaceStateMessage::Ask(request)),
            Job::Protect(request) => self.send_ns_state(NamespaceStateMessage::Protect(request)),
            Job::MarkBlocks(request) => self.send_ns_state(NamespaceStateMessage::Mark(request)),
            Job::Namespace(job) => {
                let message = NamespaceAdminMessage::Order(job);
                self.ns_management.as_ref().is_some_and(|worker| worker.send(message).is_ok())
            }
            Job::Search(job) => self.search.submit(job),
            Job::Authenticate(job) => self.auth.submit(job),
        }
    }

    fn cancel(&self, ticket: u64) -> bool {
        self.auth.cancel(ticket)
    }
}

/// Completes a request of a reactor; one that has ended needs no completion.
pub fn answer(registry: &Registry, reactor: usize, tag: Tag, outcome: Result<(), Status>) {
    let done = IoCompletion { tag, buf: None, outcome };
    let _ = registry.reactor(reactor).send(Message::Answer(done));
}
