//! Stale connections: a peer requests a connection from a queue pair that already has one with this
//! endpoint. Its machine has started anew, or somebody else forges the request, who wants that
//! connection to end.
//!
//! Linux believes it at once, tells the peer of the old connection to leave, and refuses the request
//! as stale (`cm_match_req` of its `ib_cm`). Here the old connection gets a little time to show that
//! it lives, by any packet of its peer's. If it is quiet, its peer is asked: our reply to its request
//! is sent once more. Who has the connection repeats its confirmation, as that may have got lost
//! (Linux in `cm_dup_rep_handler`), and who has not is silent. The request waits meanwhile, so that a
//! peer that did start anew need not ask again.
//!
//! Who forges such a request (the GUID and queue pair of a Linux host can be guessed) ends a connection
//! only if its host is silent for all of that time: one that is paused or stalled, which connects anew
//! when it is back, as it would after Linux's answer. And to the forged address go, of one connection,
//! three replies in that time, however many requests there are, and a refusal for each request: at most
//! `MOST_CLAIMS` wait at once. To keep the refusal to ourselves would leave a host without an answer
//! whose old connection lives by somebody else's packets.
//!
//! Of several endpoints on one address only the one where the request arrives looks among its own
//! connections. An old one at another is not found, and ends as any that has fallen silent does: by
//! retries, or by its user's keep alive.

use std::time::{Duration, Instant};

use super::Endpoint;
use crate::soft::cm::StaleCandidate;
use crate::soft::cm::connection::{ConnectRequest, Phase};
use crate::soft::cm::message::RejectReason;
use crate::soft::cm::request_key::RequestKey;
use crate::soft::cm::retransmit::Retry;
use crate::{Qp, Reason, Region};

/// How long the old connection may be silent. A peer's second request comes later than that, so
/// that the first is not wasted.
const PROOF: Duration = Duration::from_millis(700);

impl Endpoint {
    /// Lets a request wait until the connection of the same queue pair has had time to show that it
    /// lives; false when there is no such connection.
    pub(super) fn check_stale(&mut self, now: Instant, request: ConnectRequest) -> bool {
        let message = &request.message;
        let peer = (request.from, message.ca_guid, message.qpn);
        let Some(number) = self.manager.by_peer.get(&peer).copied() else { return false };
        let Some(old) = self.live(Qp(number)).map(|slot| slot.connection.local_comm) else {
            return false;
        };
        let claim = StaleCandidate { request, old, since: now };
        self.manager.claims.insert(request.key(), claim, Some(now + PROOF));
        self.probe(now, number);
        true
    }

    /// Whether a request waits for a sign of life of an old connection.
    pub(super) fn is_stale_candidate(&self, key: &RequestKey) -> bool {
        self.manager.claims.get(key).is_some()
    }

    /// Sends our reply once more, unless that is being done. (The peer of a connection that we have
    /// asked for has none to repeat, and must speak for itself.)
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

    /// The peer of a connection has been heard.
    pub(super) fn on_alive(&mut self, now: Instant, number: u32) {
        let Some(slot) = self.live(Qp(number)) else { return };
        slot.heard = Some(now);
        let (up, comm) = (slot.connection.phase == Phase::Established, slot.connection.local_comm);
        if up {
            self.manager.retries.remove(comm);
        }
    }

    /// Time is up for connections that were to show that they live.
    pub(super) fn expire_candidates(&mut self, now: Instant, region: &Region) {
        while let Some((_, claim)) = self.manager.claims.expire(now) {
            let StaleCandidate { request, old, since } = claim;
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
