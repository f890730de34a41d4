//! Stale connections: a peer requests a connection from a queue pair that already has one with this
//! endpoint. Either its machine has restarted, or another one forges the request in order to end
//! that connection.
//!
//! Linux accepts the request immediately, sends the peer of the old connection a disconnect
//! request, and rejects the request as stale (`cm_match_req` of its `ib_cm`). Here the old
//! connection gets a short time to show that it is alive, by any packet of its peer. If there is
//! none, its peer is probed: our reply to its request is sent once more. A peer that has the
//! connection repeats its confirmation, as that may have been lost (Linux in `cm_dup_rep_handler`);
//! one that has not is silent. The request waits meanwhile, so that a peer that has restarted need
//! not send it again.
//!
//! A forged request (GUID and queue pair of a Linux host can be guessed) ends a connection only if
//! its host is silent for all of that time: a host that is paused or stalled, which reconnects when
//! it continues, as it would after Linux's answer. The forged address is sent, for each connection,
//! three replies in that time, however many requests there are, and one rejection for each request:
//! at most `MAX_STALE_CANDIDATES` wait at once. Without the rejection a host whose old connection
//! is kept alive by packets of another machine would get no answer.
//!
//! Of several endpoints at one address only the one that receives the request looks among its own
//! connections. An old connection at another endpoint ends as any silent one does: by retries, or
//! by its user's keep alive.

use std::time::{Duration, Instant};

use super::Endpoint;
use crate::soft::cm::StaleCandidate;
use crate::soft::cm::connection::{ConnectRequest, Phase};
use crate::soft::cm::message::RejectReason;
use crate::soft::cm::request_key::RequestKey;
use crate::soft::cm::retransmit::Retry;
use crate::{Qp, Reason, Region};

/// Time for which the old connection may be silent. A peer repeats its request after a longer time,
/// so the first one is still valid.
const PROOF: Duration = Duration::from_millis(700);

impl Endpoint {
    /// Lets a request wait until the connection of the same queue pair has had time to show that it
    /// is alive; returns false if there is no such connection.
    pub(super) fn check_stale(&mut self, now: Instant, request: ConnectRequest) -> bool {
        let message = &request.message;
        let peer = (request.from, message.ca_guid, message.qpn);
        let Some(number) = self.manager.by_peer.get(&peer).copied() else { return false };
        let Some(old) = self.live(Qp(number)).map(|slot| slot.connection.local_comm) else {
            return false;
        };
        let candidate = StaleCandidate { request, old, since: now };
        self.manager.stale_candidates.insert(request.key(), candidate, Some(now + PROOF));
        self.probe(now, number);
        true
    }

    /// Whether a request waits for evidence that an old connection is alive.
    pub(super) fn is_stale_candidate(&self, key: &RequestKey) -> bool {
        self.manager.stale_candidates.get(key).is_some()
    }

    /// Sends our reply once more, unless that is in progress. (The peer of a connection that we
    /// have requested has no confirmation to repeat; only its packets show that it is alive.)
    fn probe(&mut self, now: Instant, number: u32) {
        let Some(slot) = self.live(Qp(number)) else { return };
        let (up, settings) = (slot.connection.phase == Phase::Established, slot.settings);
        let offer = self.offer(&settings);
        let Some(slot) = self.live(Qp(number)) else { return };
        let (ends, comm, key) =
            (slot.connection.ends(), slot.connection.local_comm, slot.connection.key());
        let mad = slot.connection.reply(&offer, &[]);
        let asked_us = self.manager.by_request.get(&key) == Some(&number);
        if up && asked_us && self.manager.retries.get(comm).is_none() {
            self.manager.retries.insert(comm, Retry::question(mad, ends, now));
            self.send_mad(ends.0, ends.1, mad);
        }
    }

    /// A packet of the peer has arrived.
    pub(super) fn on_alive(&mut self, now: Instant, number: u32) {
        let Some(slot) = self.live(Qp(number)) else { return };
        slot.heard = Some(now);
        let (up, comm) = (slot.connection.phase == Phase::Established, slot.connection.local_comm);
        if up {
            self.manager.retries.remove(comm);
        }
    }

    /// Handles old connections that have not shown to be alive in time.
    pub(super) fn expire_candidates(&mut self, now: Instant, region: &Region) {
        while let Some((_, candidate)) = self.manager.stale_candidates.expire(now) {
            let StaleCandidate { request, old, since } = candidate;
            if self.manager.retries.get(old).is_some_and(|question| question.slot.is_none()) {
                self.manager.retries.remove(old);
            }
            let number = self.by_comm.get(&old).copied();
            let slot = number.and_then(|number| self.live(Qp(number)));
            let alive = slot.is_some_and(|slot| slot.heard.is_some_and(|heard| heard > since));
            if alive {
                self.reject_request(&request, RejectReason::STALE);
                continue;
            }
            if let Some(number) = number {
                self.remove(now, number, Reason::Peer, region);
            }
            // It was counted when it came.
            match self.check_request(&request) {
                Ok(private) => self.admit_request(now, request, private),
                Err(reason) => self.reject_request(&request, reason),
            };
        }
    }
}
