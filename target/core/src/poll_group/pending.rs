//! Connection requests through a listener that is not active yet.
//!
//! A change of the configuration listens at its new addresses before it is committed, because that may
//! fail. A request that arrives meanwhile is held: when the change is in force it is handled as if it had
//! just arrived; when the change is refused, or not decided in time, it is dropped, and the provider
//! rejects it as at an address without listener. As many requests are held as there may be half-open
//! connections ([`limits`]).

use std::time::{Duration, Instant};

use rdma::{Source, limits};

use super::{PollGroup, Resources};
use crate::diag::cause::{Cause, DisconnectRecord};
use crate::message::PlacedRequest;
use crate::registry::Reached;

/// How long a request is held. `soft` asks its host to wait for 10 seconds.
pub(super) const DECISION_LIMIT: Duration = Duration::from_secs(5);

impl PollGroup {
    /// Admits a connection request, or holds it until its listener is active.
    pub(super) fn ask_listener(
        &mut self,
        request: PlacedRequest,
        until: Instant,
        lent: &mut Resources<'_>,
    ) {
        let incoming = &request.incoming;
        match lent.shared.registry.reached(incoming.local) {
            Reached::InForce => self.admit(request, lent),
            Reached::Prepared if lent.now < until => self.hold(request, until, lent),
            Reached::Prepared | Reached::Nobody => {
                let why =
                    DisconnectRecord::nameless(Cause::NoListener, incoming.remote, incoming.local);
                self.record_refusal(why, lent);
                // Only the fabric that received it can reject it as at an address without listener.
                drop(request);
            }
        }
    }

    /// Checks the held requests again: the change may have been decided, or their time is over.
    pub(super) fn release_pending(&mut self, lent: &mut Resources<'_>) {
        let mut pending = std::mem::take(&mut self.pending);
        while let Some((request, until)) = pending.pop() {
            self.ask_listener(request, until, lent);
        }
    }

    /// Holds a request. If there are too many, the oldest of a source that has its share is
    /// rejected.
    fn hold(&mut self, request: PlacedRequest, until: Instant, lent: &mut Resources<'_>) {
        let source = Source::from(request.incoming.remote.ip());
        self.pending.push(source, (request, until));
        let crowded = self.pending.count_of(source) > limits::HALF_OPEN_PER_SOURCE
            || self.pending.len() > limits::HALF_OPEN;
        if crowded && let Some((refused, _)) = self.pending.displace(source) {
            self.refuse(refused, lent);
        }
    }
}
