//! Connections of an [`Endpoint`]: calls of its user, and timers. For received messages see
//! `receive`.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::Endpoint;
use crate::soft::cm::HalfOpen;
use crate::soft::cm::connection::{
    ConnectRequest, Connection, LocalParameters, Phase, is_marked_guid, mtu_bytes, silence,
};
use crate::soft::cm::mad::MAD_BYTES;
use crate::soft::cm::message::RejectReason;
use crate::soft::cm::request_handle::{RequestHandle, RequestState, Token};
use crate::soft::cm::request_key::RequestKey;
use crate::soft::cm::retransmit::{Due, Retry};
use crate::soft::config::{Path, ROCE_PORT};
use crate::soft::qp::{QueuePair, Settings, ecn};
use crate::source::SourceKey;
use crate::wire::psn::{Psn, Qpn};
use crate::{FabricError, Incoming, Qp, QpLimits, Reason, Region};

/// Maximum of disconnect requests that are repeated until answered; further ones are sent once.
const MOST_FAREWELLS: usize = 1024;

impl Endpoint {
    /// Accepts requests for a port of an address (an unspecified one means all).
    pub fn listen(&mut self, at: SocketAddr) {
        if !self.manager.listeners.contains(&at) {
            self.manager.listeners.push(at);
        }
    }

    /// Replaces the listening addresses.
    pub(crate) fn set_listeners(&mut self, listeners: &[SocketAddr]) {
        self.manager.listeners.clear();
        self.manager.listeners.extend_from_slice(listeners);
    }

    /// Stops accepting requests there. Connections stay.
    pub fn unlisten(&mut self, at: SocketAddr) {
        self.manager.listeners.retain(|listener| *listener != at);
    }

    /// Creates the queue pair for a request. Receives may be posted immediately.
    ///
    /// # Errors
    /// The request is of another provider, or the maximum of queue pairs is reached; then it has
    /// been rejected.
    pub fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        self.forget_sent();
        let (request, token) =
            RequestHandle::answer(incoming, RequestState::Opened).ok_or_else(|| {
                FabricError(
                    "this request came through another provider and cannot be opened".into(),
                )
            })?;
        let message = &request.message;
        let settings = Settings {
            peer: message.qpn,
            mtu: mtu_bytes(message.path_mtu).unwrap_or(256),
            send_psn: message.starting_psn,
            receive_psn: self.random_psn(),
            selective: self.config.selective && is_marked_guid(message.ca_guid),
            reads: limits.reads.min(message.responder_resources).max(1),
            answered_reads: self.config.answered_reads.min(message.initiator_depth),
            retries: message.retry_count,
            silence: silence(message.primary_ack_timeout, message.retry_count),
            rnr_retries: message.rnr_retry_count,
            ..self.settings()
        };
        let connection = Connection {
            phase: Phase::Opened,
            local: request.to,
            remote: request.from,
            local_comm: self.random_comm(),
            remote_comm: message.local_comm_id,
            remote_guid: message.ca_guid,
            local_qpn: self.random_qpn(),
            remote_qpn: message.qpn,
            transaction: request.transaction,
            tos: message.primary_traffic_class & 0xfc
                | if settings.selective { ecn::CAPABLE } else { 0 },
        };
        let comm = connection.local_comm;
        let qp = QueuePair::new(limits.receives, limits.sends);
        let inserted = self.insert(qp, connection, settings, Some(token.clone()));
        let number = inserted.ok_or_else(|| {
            token.set(RequestState::Refused);
            self.refuse_request(&request, RejectReason::NO_QP, &[]);
            FabricError(format!(
                "all {} queue pairs are in use: raise the limit of connections",
                self.config.queue_pairs
            ))
        })?;
        self.set_queue_pair(&request, token, comm);
        Ok(Qp(number))
    }

    /// The half-open connection of a request has a queue pair now. If it was evicted meanwhile, or
    /// arrived at another endpoint, it is added here, which may evict another one.
    fn set_queue_pair(&mut self, request: &ConnectRequest, token: Token, comm: u32) {
        let key = request.key();
        match self.manager.half_open.get_mut(&key) {
            Some(half) => {
                half.comm = Some(comm);
                self.manager.half_open.keep(&key);
            }
            None => {
                let new = HalfOpen::new(request, true, &self.manager.updates);
                let half = HalfOpen { comm: Some(comm), token, ..new };
                self.add_half_open(key, half, None);
            }
        }
    }

    /// Answers the request of an opened queue pair with a reply that carries `private_data` (at
    /// most 196 bytes; more are truncated). No effect on any other queue pair.
    pub fn accept(&mut self, now: Instant, qp: Qp, private_data: &[u8]) {
        self.forget_sent();
        let Some(slot) = self.live(qp).filter(|slot| slot.connection.phase == Phase::Opened) else {
            return;
        };
        // It sends responses only before the peer has confirmed: until then the peer's address is
        // not proven, and requests would go to the owner of a forged one.
        slot.qp.ready_to_receive(&slot.settings);
        slot.connection.phase = Phase::ReplySent;
        let settings = slot.settings;
        let offer = self.offer(&settings);
        let Some(slot) = self.live(qp) else { return };
        let mad = slot.connection.reply(&offer, private_data);
        if let Some(token) = &slot.token {
            token.set_reply(mad);
        }
        let (ends, comm, key) =
            (slot.connection.ends(), slot.connection.local_comm, slot.connection.key());
        let retry = Retry::new(mad, ends, Some(qp.0), now);
        // In a flood of forged requests, a real peer is expected to confirm immediately.
        let flooded = self.manager.flood_until.is_some();
        self.manager.retries.insert(comm, if flooded { retry.hurried() } else { retry });
        if let Some(half) = self.manager.half_open.get_mut(&key) {
            half.since = half.since.or(Some(now));
        }
        self.answer(&key, ends, mad);
        self.mark_ready(qp.0);
    }

    /// Rejects a request; the peer gets a consumer-defined reject with `private_data` (at most 148
    /// bytes; more are truncated). A request of another provider is ignored.
    pub fn reject(&mut self, incoming: Incoming, private_data: &[u8]) {
        self.refuse(incoming, RejectReason::CONSUMER, private_data);
    }

    /// Rejects a request with a reason of connection management.
    pub(crate) fn refuse(&mut self, incoming: Incoming, why: RejectReason, private_data: &[u8]) {
        self.forget_sent();
        if let Some((request, _)) = RequestHandle::answer(incoming, RequestState::Refused) {
            self.refuse_request(&request, why, private_data);
        }
    }

    fn refuse_request(&mut self, request: &ConnectRequest, why: RejectReason, private: &[u8]) {
        self.manager.forget_half_open(&request.key());
        self.send_mad(request.to, request.from, request.reject(why, private));
    }

    /// Applies the decisions of users and of other endpoints on requests that arrived here. Rejects
    /// those that were dropped.
    #[inline]
    pub(crate) fn apply_updates(&mut self, now: Instant) {
        while let Some((key, charged)) = self.manager.updates.next() {
            self.apply_update(key, charged, now);
        }
    }

    #[inline(never)]
    fn apply_update(&mut self, key: RequestKey, charged: bool, now: Instant) {
        if charged {
            self.manager.penalties.penalize(now, key.source());
        }
        if let Some(lost) = self.manager.apply_updates(key, now, self.config.patience) {
            // Its user may have dropped it because the listener was removed.
            let reason = match self.is_listening(&lost.request) {
                true => RejectReason::CONSUMER,
                false => RejectReason::INVALID_SERVICE,
            };
            self.send_mad(key.local, key.remote, lost.request.reject(reason, &[]));
        }
    }

    /// An address whose requests were ignored since the last call.
    pub(crate) fn take_barred(&mut self) -> Option<IpAddr> {
        self.manager.barred.take()
    }

    /// Whether users hold requests, whose state may change without an event.
    pub(crate) fn is_asking(&self) -> bool {
        self.manager.half_open.has_expiring()
    }

    /// Requests a connection from a listener at `to` on a path, with `private_data` (at most 56
    /// bytes; more are truncated). [`crate::Event::Established`] or [`crate::Event::Gone`] follows.
    /// `reads` in `limits` is the number of reads of the peer that we answer concurrently.
    ///
    /// # Errors
    /// The maximum of queue pairs is reached, or the addresses are of different versions.
    pub fn connect(
        &mut self,
        now: Instant,
        path: impl Into<Path>,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        self.forget_sent();
        let Path { from, mtu } = path.into();
        if from.is_ipv4() != to.is_ipv4() {
            let text = format!("no way from {from} to {to}: use addresses of one IP version");
            return Err(FabricError(text));
        }
        let settings = Settings {
            mtu: self.config.mtu.min(mtu),
            receive_psn: self.random_psn(),
            reads: limits.reads,
            answered_reads: self.config.answered_reads.min(limits.reads),
            ..self.settings()
        };
        let connection = Connection {
            phase: Phase::RequestSent,
            local: from,
            remote: to.ip(),
            local_comm: self.random_comm(),
            remote_comm: 0,
            remote_guid: 0,
            local_qpn: self.random_qpn(),
            remote_qpn: Qpn::default(),
            transaction: self.random_transaction(),
            tos: 0,
        };
        let offer = self.offer(&settings);
        let mad = connection.request(&offer, to.port(), ROCE_PORT, private_data);
        let (ends, comm) = (connection.ends(), connection.local_comm);
        let qp = QueuePair::new(limits.receives, limits.sends);
        let number = self.insert(qp, connection, settings, None).ok_or_else(|| {
            FabricError(format!("all {} queue pairs are in use", self.config.queue_pairs))
        })?;
        self.manager.retries.insert(comm, Retry::request(mad, ends, number, now));
        self.send_mad(from, to.ip(), mad);
        Ok(Qp(number))
    }

    /// The user has admitted the peer of a connection.
    pub fn admit(&mut self, qp: Qp) {
        if let Some(slot) = self.live(qp) {
            slot.admitted = true;
        }
    }

    /// Ends a connection: all work completes, then [`crate::Event::Gone`]. Unknown ones are
    /// ignored.
    pub fn disconnect(&mut self, now: Instant, qp: Qp, region: &Region) {
        self.forget_sent();
        let guid = self.config.guid;
        let Some(slot) = self.live(qp) else { return };
        let connection = &slot.connection;
        let (ends, comm, key) = (connection.ends(), connection.local_comm, connection.key());
        let mut disconnect = None;
        match connection.phase {
            Phase::Established => {
                let mad = connection.leave();
                disconnect = Some(Retry::new(mad, ends, None, now));
                self.send_mad(ends.0, ends.1, mad);
            }
            Phase::Opened | Phase::ReplySent => {
                let mad = connection.give_up(RejectReason::CONSUMER, guid);
                self.answer(&key, ends, mad);
            }
            Phase::RequestSent => {
                let mad = connection.give_up(RejectReason::TIMEOUT, guid);
                self.send_mad(ends.0, ends.1, mad);
            }
        }
        self.remove(now, qp.0, Reason::Local, region);
        if let Some(retry) = disconnect
            && self.manager.retries.len() < self.config.queue_pairs as usize + MOST_FAREWELLS
        {
            self.manager.retries.insert(comm, retry);
        }
    }

    /// Our parameters in a request or reply.
    pub(super) fn offer(&self, settings: &Settings) -> LocalParameters {
        LocalParameters {
            guid: self.config.guid,
            receive_psn: settings.receive_psn,
            answered_reads: settings.answered_reads,
            reads: settings.reads,
            mtu: settings.mtu,
            ack_timeout: self.config.ack_timeout,
        }
    }

    /// Settings that all connections of this endpoint have in common.
    fn settings(&self) -> Settings {
        Settings {
            peer: Qpn::default(),
            mtu: self.config.mtu,
            send_psn: Psn::default(),
            receive_psn: Psn::default(),
            window: self.config.window,
            selective: false,
            reads: 1,
            read_bytes: self.config.read_bytes,
            answered_reads: 0,
            rights: self.config.rights,
            ack_timeout: Some(self.config.ack_timeout),
            retries: 7,
            silence: Duration::ZERO,
            rnr_retries: 7,
            rnr_timer: self.config.rnr_timer,
            ack_delay: self.config.ack_delay,
        }
    }

    /// Handles messages that were not answered in time.
    pub(super) fn retry(&mut self, now: Instant, region: &Region) {
        self.apply_updates(now);
        self.manager.expire(now);
        self.expire_candidates(now, region);
        while let Some(due) = self.manager.retries.take_due(now) {
            match due {
                Due::Again(retry) => {
                    let mad = retry.mad;
                    self.send_retry(&retry, mad);
                }
                Due::GivenUp(retry) => {
                    let Some(number) = retry.slot else { continue };
                    let guid = self.config.guid;
                    let Some(slot) = self.live(Qp(number)) else { continue };
                    let mad = slot.connection.give_up(RejectReason::TIMEOUT, guid);
                    self.send_retry(&retry, mad);
                    self.remove(now, number, Reason::NotEstablished, region);
                }
            }
        }
    }

    /// Sends a message that was not solicited, at least not at this moment.
    fn send_retry(&mut self, retry: &Retry, mad: [u8; MAD_BYTES]) {
        let ends = (retry.local, retry.remote);
        let slot = retry.slot.and_then(|number| self.live(Qp(number)));
        match slot.filter(|slot| slot.connection.phase == Phase::ReplySent) {
            Some(slot) => {
                let key = slot.connection.key();
                self.answer(&key, ends, mad);
            }
            None => self.send_mad(ends.0, ends.1, mad),
        }
    }

    /// Sends a message to a peer that has not confirmed its connection, so its address may be
    /// forged: either in answer to a message of at least its size, or within a small rate, and not
    /// in a flood.
    pub(super) fn answer(
        &mut self,
        key: &RequestKey,
        ends: (IpAddr, IpAddr),
        mad: [u8; MAD_BYTES],
    ) {
        let left = if self.manager.flood_until.is_some() { 0 } else { self.manager.unsolicited };
        if let Some(half) = self.manager.half_open.get_mut(key) {
            if half.credit == 0 && left == 0 {
                return;
            }
            self.manager.unsolicited -= u32::from(half.credit == 0);
            half.credit = half.credit.saturating_sub(1);
        }
        self.send_mad(ends.0, ends.1, mad);
    }

    /// Adds a half-open connection, which may evict another one.
    pub(super) fn add_half_open(
        &mut self,
        key: RequestKey,
        half: HalfOpen,
        until: Option<Instant>,
    ) {
        self.manager.unverified += usize::from(!half.proven);
        if let Some((_, displaced)) = self.manager.half_open.insert(key, half, until) {
            self.manager.unverified -= usize::from(!displaced.proven);
            self.manager.displaced.extend(displaced.comm);
        }
    }

    /// Ends evicted connections. Their peers may request new ones immediately.
    pub(super) fn end_displaced(&mut self, now: Instant, region: &Region) {
        while let Some(comm) = self.manager.displaced.pop() {
            let Some(number) = self.by_comm.get(&comm).copied() else { continue };
            let Some(slot) = self.live(Qp(number)) else { continue };
            if slot.connection.phase.is_half_open() {
                self.remove(now, number, Reason::NotEstablished, region);
            }
        }
    }
}
