//! Connection management of an [`Endpoint`]: what its user asks for, what the peers' messages do
//! (IBTA volume 1, 12.9 "Communication management state machines"; annex A11 "RDMA IP CM
//! Service"). Nothing here has been authenticated by anything but addresses and numbers that are
//! hard to guess, so everything is bounded, and a question costs at most a few answers of its own size.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use super::cm_message::{
    CmMessage, CmaHeader, DisconnectRequest, Reject, RejectReason, Reply, service_port,
};
use super::connection::{ConnectRequest, Connection, Phase, Retry, code_time, left, mtu_bytes};
use super::counters::Fate;
use super::endpoint::{Endpoint, Path, Pending, ROCE_PORT};
use super::mad::MAD_BYTES;
use super::psn::{Psn, Qpn};
use super::qp::{QueuePair, Settings};
use super::ticket::{Ticket, Token};
use crate::{Event, FabricError, Incoming, Qp, QpLimits, Reason, Region};

impl Endpoint {
    /// Accepts requests for a port of an address (an unspecified one means all).
    pub fn listen(&mut self, at: SocketAddr) {
        if !self.listeners.contains(&at) {
            self.listeners.push(at);
        }
    }

    /// No longer accepts requests there. Connections stay.
    pub fn unlisten(&mut self, at: SocketAddr) {
        self.listeners.retain(|listener| *listener != at);
    }

    /// Makes the queue pair for a request. Receives may be posted at once.
    ///
    /// # Errors
    /// The request is of another provider, or there are as many queue pairs as there may be; then
    /// it has been rejected.
    pub fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        self.forget_sent();
        let request = Ticket::answer(incoming).ok_or_else(|| {
            FabricError("this request came through another provider and cannot be opened".into())
        })?;
        let message = &request.message;
        let settings = Settings {
            peer: message.qpn,
            mtu: mtu_bytes(message.path_mtu).unwrap_or(256),
            send_psn: message.starting_psn,
            receive_psn: self.random_psn(),
            reads: limits.reads.min(message.responder_resources).max(1),
            answered_reads: self.config.answered_reads.min(message.initiator_depth),
            retries: message.retry_count,
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
            // Without the bits that would promise to heed congestion marks.
            tos: message.primary_traffic_class & 0xfc,
            retry: None,
        };
        let qp = QueuePair::new(limits.receives, limits.sends);
        let number = self.insert(qp, connection, settings).ok_or_else(|| {
            self.pending.retain(|pending| pending.key != request.key());
            self.tell(request.to, request.from, request.reject(RejectReason::NO_QP, &[]));
            FabricError(format!(
                "all {} queue pairs are in use: raise the limit of connections",
                self.config.queue_pairs
            ))
        })?;
        Ok(Qp(number))
    }

    /// Answers the request of an opened queue pair with a reply that carries `private_data` (at
    /// most 196 bytes; more are cut off). Nothing happens at any other queue pair.
    pub fn accept(&mut self, now: Instant, qp: Qp, private_data: &[u8]) {
        self.forget_sent();
        let Some(slot) = self.live(qp).filter(|slot| slot.connection.phase == Phase::Opened) else {
            return;
        };
        slot.qp.ready_to_receive(&slot.settings);
        slot.qp.ready_to_send();
        slot.connection.phase = Phase::ReplySent;
        let settings = slot.settings;
        let offer = self.offer(&settings);
        let Some(slot) = self.live(qp) else { return };
        let mad = slot.connection.reply(&offer, private_data);
        slot.connection.retry = Some(Retry::new(mad, now));
        let (local, remote) = (slot.connection.local, slot.connection.remote);
        self.tell(local, remote, mad);
        self.mark_ready(qp.0);
    }

    /// Refuses a request; the peer gets a consumer-defined reject with `private_data` (at most
    /// 148 bytes; more are cut off). A request of another provider is ignored.
    pub fn reject(&mut self, incoming: Incoming, private_data: &[u8]) {
        self.refuse(incoming, RejectReason::CONSUMER, private_data);
    }

    /// Refuses a request with a reason of connection management.
    pub(super) fn refuse(&mut self, incoming: Incoming, why: RejectReason, private_data: &[u8]) {
        self.forget_sent();
        if let Some(request) = Ticket::answer(incoming) {
            self.pending.retain(|pending| pending.key != request.key());
            self.tell(request.to, request.from, request.reject(why, private_data));
        }
    }

    /// Refuses what its user has lost.
    pub(super) fn refuse_dropped(&mut self) {
        while let Some(at) = self.pending.iter().position(|pending| pending.token.is_dropped()) {
            let Some(pending) = self.pending.remove(at) else { return };
            self.tell(pending.to, pending.from, pending.refusal);
        }
    }

    /// Whether a user still thinks about a request, or has lost it without our having noticed.
    pub(super) fn is_asking(&self) -> bool {
        self.pending.iter().any(|pending| pending.token.is_open() || pending.token.is_dropped())
    }

    /// Asks a listener at `to` for a connection on a path, which is an address of ours or more, with
    /// `private_data` (at most 56 bytes; more are cut off). It comes up with [`Event::Established`], or ends with
    /// [`Event::Gone`]. Of `limits`, `reads` are those of the peer that we answer at once.
    ///
    /// # Errors
    /// There are as many queue pairs as there may be, or the addresses are of different versions.
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
        let mut connection = Connection {
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
            retry: None,
        };
        let offer = self.offer(&settings);
        let mad = connection.request(&offer, to.port(), ROCE_PORT, private_data);
        connection.retry = Some(Retry::new(mad, now));
        let qp = QueuePair::new(limits.receives, limits.sends);
        let number = self.insert(qp, connection, settings).ok_or_else(|| {
            FabricError(format!("all {} queue pairs are in use", self.config.queue_pairs))
        })?;
        self.tell(from, to.ip(), mad);
        Ok(Qp(number))
    }

    /// Ends a connection: all work comes home, then [`Event::Gone`]. Unknown ones are ignored.
    pub fn disconnect(&mut self, now: Instant, qp: Qp, region: &Region) {
        self.forget_sent();
        let Some(slot) = self.live(qp) else { return };
        let connection = &slot.connection;
        let (local, remote) = (connection.local, connection.remote);
        match connection.phase {
            Phase::Established => {
                let (comm, mad) = (connection.local_comm, connection.leave());
                self.farewells.push((comm, local, remote, Retry::new(mad, now)));
                self.tell(local, remote, mad);
            }
            Phase::Opened | Phase::ReplySent => {
                let mad = connection.give_up(RejectReason::CONSUMER);
                self.tell(local, remote, mad);
            }
            Phase::RequestSent => {
                let mad = connection.give_up(RejectReason::TIMEOUT);
                self.tell(local, remote, mad);
            }
        }
        self.remove(now, qp.0, Reason::Local, region);
    }

    /// What all connections of this endpoint have in common.
    fn settings(&self) -> Settings {
        Settings {
            peer: Qpn::default(),
            mtu: self.config.mtu,
            send_psn: Psn::default(),
            receive_psn: Psn::default(),
            window: self.config.window,
            reads: 1,
            read_bytes: self.config.read_bytes,
            answered_reads: 0,
            rights: self.config.rights,
            ack_timeout: Some(self.config.ack_timeout),
            retries: 7,
            rnr_retries: 7,
            rnr_timer: self.config.rnr_timer,
        }
    }

    /// Messages that nobody has answered in time.
    pub(super) fn retry(&mut self, now: Instant, region: &Region) {
        let mut farewells = std::mem::take(&mut self.farewells);
        farewells.retain_mut(|(_, local, remote, retry)| {
            if retry.due > now {
                return true;
            }
            let again = retry.again(now);
            if again {
                self.tell(*local, *remote, retry.mad);
            }
            again
        });
        self.farewells = farewells;
        self.refuse_dropped();
        self.pending.retain(|pending| pending.until > now);
        for number in 0..self.slots.len() as u32 {
            let Some(slot) = self.live(Qp(number)) else { continue };
            let (local, remote) = (slot.connection.local, slot.connection.remote);
            let Some(retry) = slot.connection.retry.as_mut().filter(|r| r.due <= now) else {
                continue;
            };
            if retry.again(now) {
                let mad = retry.mad;
                self.tell(local, remote, mad);
            } else {
                let mad = slot.connection.give_up(RejectReason::TIMEOUT);
                self.tell(local, remote, mad);
                self.remove(now, number, Reason::NotEstablished, region);
            }
        }
    }

    /// Our reply has arrived.
    pub(super) fn establish(&mut self, number: u32) {
        let Some(slot) = self.live(Qp(number)) else { return };
        if slot.connection.phase == Phase::ReplySent {
            slot.connection.phase = Phase::Established;
            slot.connection.retry = None;
            let key = (slot.connection.remote_guid, slot.connection.remote_comm);
            self.pending.retain(|pending| pending.key != key);
            self.events.push_back(Event::Established(Qp(number)));
        }
    }

    /// A message of connection management has come, undamaged.
    pub(super) fn on_message(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        mad: &[u8; MAD_BYTES],
        region: &Region,
    ) -> Fate {
        let Some((header, message)) = CmMessage::parse(mad) else { return Fate::Unknown };
        let find = |this: &mut Endpoint, ours: u32, theirs: u32| {
            let number = *this.by_comm.get(&ours)?;
            let slot = this.live(Qp(number))?;
            let right = slot.connection.local == to && slot.connection.is_of(from, theirs);
            right.then_some(number)
        };
        let number = match message {
            CmMessage::Request(message) => {
                let transaction = header.transaction;
                let request = ConnectRequest { message, transaction, from, to };
                return self.on_request(now, request, region);
            }
            CmMessage::Reply(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                number.inspect(|number| self.on_reply(*number, &message))
            }
            CmMessage::ReadyToUse(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                number.inspect(|number| self.establish(*number))
            }
            CmMessage::Reject(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                number.inspect(|number| self.on_reject(now, *number, &message, region))
            }
            CmMessage::MessageReceipt(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                let slot = number.and_then(|number| self.live(Qp(number)));
                if let Some(retry) = slot.and_then(|slot| slot.connection.retry.as_mut()) {
                    retry.be_patient(now, code_time(message.service_timeout));
                }
                number
            }
            CmMessage::DisconnectRequest(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                self.on_disconnect(now, number, &message, from, to, region);
                if self.is_ours_or_unknown(number, &message) {
                    self.tell(to, from, left(&message, header.transaction));
                }
                number
            }
            CmMessage::DisconnectReply(message) => {
                let before = self.farewells.len();
                self.farewells.retain(|(comm, local, remote, _)| {
                    (*comm, *local, *remote) != (message.remote_comm_id, to, from)
                });
                (self.farewells.len() < before).then_some(0)
            }
        };
        if number.is_some() { Fate::Message } else { Fate::Unknown }
    }

    /// The peer refuses, or has changed its mind.
    fn on_reject(&mut self, now: Instant, number: u32, message: &Reject, region: &Region) {
        let reason = match self.live(Qp(number)).map(|slot| slot.connection.phase) {
            Some(Phase::Established) => Reason::Peer,
            Some(Phase::RequestSent) => Reason::Rejected {
                code: i32::from(message.reason.0),
                private_data: message.private_data.to_vec(),
            },
            _ => Reason::NotEstablished,
        };
        self.remove(now, number, reason, region);
    }

    /// Whether a disconnect request deserves its answer: always, unless it names a connection but
    /// not that one's queue pair.
    fn is_ours_or_unknown(&mut self, number: Option<u32>, message: &DisconnectRequest) -> bool {
        let slot = number.and_then(|number| self.live(Qp(number)));
        slot.is_none_or(|slot| slot.connection.local_qpn == message.remote_qpn)
    }

    fn on_disconnect(
        &mut self,
        now: Instant,
        number: Option<u32>,
        message: &DisconnectRequest,
        from: IpAddr,
        to: IpAddr,
        region: &Region,
    ) {
        // Both may leave at once: then this answers ours as well.
        self.farewells.retain(|(comm, local, remote, _)| {
            (*comm, *local, *remote) != (message.remote_comm_id, to, from)
        });
        let Some(number) = number else { return };
        let slot = self.live(Qp(number));
        if slot.is_some_and(|slot| slot.connection.local_qpn == message.remote_qpn) {
            self.remove(now, number, Reason::Peer, region);
        }
    }

    /// Somebody asks to connect.
    fn on_request(&mut self, now: Instant, request: ConnectRequest, region: &Region) -> Fate {
        if self.is_repeated(&request) {
            return Fate::Repeated;
        }
        let private = match self.check_request(now, &request) {
            Ok(private) => private,
            Err(reason) => {
                self.tell(request.to, request.from, request.reject(reason, &[]));
                return Fate::Rejected;
            }
        };
        if let Some(old) = self.restarted(&request) {
            // The peer has forgotten its connection: it goes, and the peer's next try comes
            // through. (At once would be possible, but then a forged request could do it too
            // without the peer's noticing.)
            self.tell(request.to, request.from, request.reject(RejectReason::STALE, &[]));
            if let Some(slot) = self.live(Qp(old)) {
                let mad = slot.connection.leave();
                self.tell(request.to, request.from, mad);
            }
            self.remove(now, old, Reason::Peer, region);
            return Fate::Rejected;
        }
        let (header, private_data) = private;
        let port = service_port(request.message.service_id).unwrap_or_default();
        let until = now + self.config.patience;
        let token = Token::new();
        self.pending.push_back(Pending {
            key: request.key(),
            from: request.from,
            to: request.to,
            until,
            token: token.clone(),
            refusal: request.reject(RejectReason::CONSUMER, &[]),
        });
        self.events.push_back(Event::Incoming(Incoming::detached(
            SocketAddr::new(request.to, port),
            SocketAddr::new(request.from, header.source_port),
            private_data.to_vec(),
            request.message.responder_resources,
            Box::new(Ticket::new(request, token)),
        )));
        Fate::Message
    }

    /// The same request again: its reply got lost, or has not been made yet.
    fn is_repeated(&mut self, request: &ConnectRequest) -> bool {
        let same = |slot: &&super::endpoint::Slot| {
            let c = &slot.connection;
            (c.remote, c.local) == (request.from, request.to)
                && (c.remote_guid, c.remote_comm) == request.key()
                && matches!(c.phase, Phase::Opened | Phase::ReplySent | Phase::Established)
        };
        let slots = self.by_qpn.values().filter_map(|n| self.slots.get(*n as usize)?.as_ref());
        if let Some(slot) = slots.into_iter().find(same) {
            if let Some(mad) = slot.connection.retry.as_ref().map(|retry| retry.mad) {
                self.tell(request.to, request.from, mad);
            }
            return true;
        }
        self.pending.iter().any(|p| (p.key, p.from) == (request.key(), request.from))
    }

    /// The connection of the very queue pair from which somebody asks for another.
    fn restarted(&self, request: &ConnectRequest) -> Option<u32> {
        let message = &request.message;
        self.by_qpn.values().copied().find(|number| {
            let slot = self.slots.get(*number as usize).and_then(Option::as_ref);
            slot.map(|slot| &slot.connection).is_some_and(|c| {
                (c.remote, c.remote_guid, c.remote_qpn)
                    == (request.from, message.ca_guid, message.qpn)
            })
        })
    }

    /// What a request must be like.
    fn check_request(
        &mut self,
        now: Instant,
        request: &ConnectRequest,
    ) -> Result<(CmaHeader, [u8; CmaHeader::USER_BYTES]), RejectReason> {
        let message = &request.message;
        let port = service_port(message.service_id).ok_or(RejectReason::INVALID_SERVICE)?;
        let heard = self.listeners.iter().any(|listener| {
            listener.port() == port
                && (listener.ip() == request.to
                    || listener.ip().is_unspecified() && listener.is_ipv4() == request.to.is_ipv4())
        });
        let private = CmaHeader::parse(&message.private_data).filter(|_| heard);
        let private = private.ok_or(RejectReason::INVALID_SERVICE)?;
        if message.transport != 0 || message.extended_transport != 0 {
            return Err(RejectReason::INVALID_TRANSPORT);
        }
        if (private.0.source, private.0.destination) != (request.from, request.to) {
            return Err(RejectReason::INVALID_GID);
        }
        if mtu_bytes(message.path_mtu).is_none_or(|mtu| mtu > self.config.mtu) {
            return Err(RejectReason::INVALID_MTU);
        }
        if message.qpn.get() < 2 {
            return Err(RejectReason::NO_QP);
        }
        self.ended.retain(|(_, until)| *until > now);
        if self.ended.iter().any(|(key, _)| *key == request.key()) {
            return Err(RejectReason::STALE);
        }
        self.pending.retain(|pending| pending.until > now);
        let of_source = self.pending.iter().filter(|p| p.from == request.from).count();
        let full = self.pending.len() >= self.config.half_open;
        if full || of_source >= self.config.half_open_per_source {
            return Err(RejectReason::NO_RESOURCES);
        }
        Ok(private)
    }

    /// Our request has been accepted, or our confirmation of that got lost.
    fn on_reply(&mut self, number: u32, message: &Reply) {
        let Some(slot) = self.live(Qp(number)) else { return };
        let connection = &mut slot.connection;
        let first = connection.phase == Phase::RequestSent;
        if first && message.qpn.get() >= 2 {
            connection.phase = Phase::Established;
            connection.retry = None;
            connection.remote_comm = message.local_comm_id;
            connection.remote_guid = message.ca_guid;
            connection.remote_qpn = message.qpn;
            slot.settings = Settings {
                peer: message.qpn,
                send_psn: message.starting_psn,
                reads: slot.settings.reads.min(message.responder_resources).max(1),
                rnr_retries: message.rnr_retry_count,
                ..slot.settings
            };
            slot.qp.ready_to_receive(&slot.settings);
            slot.qp.ready_to_send();
        }
        let mine = slot.connection.phase == Phase::Established
            && slot.connection.remote_comm == message.local_comm_id;
        if mine {
            let (local, remote) = (slot.connection.local, slot.connection.remote);
            let mad = slot.connection.ready();
            self.tell(local, remote, mad);
            self.mark_ready(number);
            if first {
                self.events.push_back(Event::Established(Qp(number)));
            }
        }
    }
}
