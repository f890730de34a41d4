//! Messages of connection management that an [`Endpoint`] receives. They are authenticated by nothing but
//! addresses and numbers that are hard to guess, so everything is bounded, and a message causes at most one
//! of its own size.
//!
//! # Floods
//!
//! A request to connect is cheap to send, and its source address easy to forge; but it costs the user a
//! queue pair with receives. Its handling depends on the number of half-open connections, which are
//! requested and not confirmed:
//!
//! ```text
//! request ──┬─ few unverified ─────────────────────────► the user ──► reply ──► confirmed
//!           └─ many: address challenge ───answer───────►     (each stage bounded)
//! ```
//!
//! The challenge is a request to disconnect a connection that does not exist. Every connection manager
//! confirms that without further checks; so after one round trip it is known that a peer has the address,
//! and forged addresses get no further. Where there is no more room, the oldest entry of the source with
//! the most entries is displaced (`PerSourceTable`); where a source has its share, its own oldest is, so
//! that forged requests do not keep the owner of an address out. An answer proves that a peer has the
//! address, not that it has sent the request.
//!
//! A source that confirms or declines connections and is not admitted, again and again, is not served
//! for a while (`penalties`). Nor is one that does not answer challenges (`unanswered`): after as many
//! as it may have connections half open, sixteen a second are sent to it until it answers one, which
//! the owner of a forged address does. Both are checked first, as there may be tens of thousands of
//! requests a second.
//!
//! A peer that has not confirmed is never sent more bytes than came from it, with one exception: while
//! there is no flood, a reply is repeated twice unasked, as it may have been lost; eight times a second in
//! all.

use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::Endpoint;
use crate::soft::cm::connection::{
    ConnectRequest, Phase, code_time, is_marked_guid, left, mtu_bytes, unknown,
};
use crate::soft::cm::mad::{MAD_BYTES, MadHeader};
use crate::soft::cm::message::{
    CmMessage, CmaHeader, DisconnectReply, DisconnectRequest, ReadyToUse, Reject, RejectReason,
    Reply, is_request, service_port,
};
use crate::soft::cm::request_handle::{RequestHandle, RequestState};
use crate::soft::cm::{Challenge, HalfOpen, Room};
use crate::soft::qp::Settings;
use crate::soft::stats::datagrams::DatagramOutcome;
use crate::zone::is_link_local;
use crate::{Event, Incoming, Qp, Reason, Region};

/// Time for the answer to a challenge.
const CHALLENGE_TIMEOUT: Duration = Duration::from_secs(2);

impl Endpoint {
    /// Handles an undamaged message of connection management.
    pub(super) fn on_message(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        mad: &[u8; MAD_BYTES],
        region: &Region,
    ) -> DatagramOutcome {
        if let Some(outcome) = self.drops_unread(now, from, mad) {
            return outcome;
        }
        let Some((header, message)) = CmMessage::parse(mad) else {
            return DatagramOutcome::Unknown;
        };
        let MadHeader { transaction, .. } = header;
        let find = |this: &mut Endpoint, ours: u32, theirs: u32| {
            let number = *this.by_comm.get(&ours)?;
            let slot = this.live(Qp(number))?;
            let right = slot.connection.local == to && slot.connection.is_of(from, theirs);
            if right {
                this.on_alive(now, number);
            }
            right.then_some(number)
        };
        let known = match message {
            CmMessage::Request(message) => {
                let request = ConnectRequest { message, transaction, from, to };
                return self.on_request(now, request);
            }
            CmMessage::DisconnectReply(message) => {
                return self.on_disconnect_reply(now, from, to, &message);
            }
            CmMessage::Reply(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                number.map(|number| self.on_reply(number, &message))
            }
            CmMessage::ReadyToUse(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                self.on_ready(number, &message, (to, from), transaction);
                number.map(drop)
            }
            CmMessage::Reject(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                number.map(|number| self.on_reject(now, number, &message, region))
            }
            CmMessage::MessageReceipt(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                let time = code_time(message.service_timeout);
                number.map(|_| self.manager.retries.be_patient(message.remote_comm_id, now, time))
            }
            CmMessage::DisconnectRequest(message) => {
                let number = find(self, message.remote_comm_id, message.local_comm_id);
                let ours = number.and_then(|number| self.live(Qp(number)));
                let forged = ours.is_some_and(|o| o.connection.local_qpn != message.remote_qpn);
                if forged {
                    return DatagramOutcome::Unknown;
                }
                // While the connection is known, whose traffic class it has.
                self.send_mad(to, from, left(&message, transaction));
                self.on_disconnect(now, number, &message, (to, from), region);
                number.map(drop)
            }
        };
        if known.is_some() { DatagramOutcome::Message } else { DatagramOutcome::Unknown }
    }

    /// The outcome of a request to connect whose source is not served now. There may be tens of
    /// thousands of them a second.
    fn drops_unread(
        &mut self,
        now: Instant,
        from: IpAddr,
        mad: &[u8; MAD_BYTES],
    ) -> Option<DatagramOutcome> {
        if !is_request(mad) {
            return None;
        }
        self.apply_updates(now);
        if self.manager.penalties.is_blocked(now, from.into()) {
            self.manager.barred = Some(from);
            return Some(DatagramOutcome::Barred);
        }
        let would_be_challenged = self.manager.unverified >= self.config.unverified;
        if would_be_challenged && self.manager.unanswered.is_blocked(now, from.into()) {
            self.manager.note_flood(now);
            return Some(DatagramOutcome::Crowded);
        }
        None
    }

    /// A disconnect request. It is answered also without a connection, because an earlier answer
    /// may have been lost.
    fn on_disconnect(
        &mut self,
        now: Instant,
        number: Option<u32>,
        message: &DisconnectRequest,
        ends: (IpAddr, IpAddr),
        region: &Region,
    ) {
        // Both may disconnect at once: then this answers ours as well.
        self.end_farewell(message.remote_comm_id, ends);
        if let Some(number) = number {
            self.decline(number);
            self.remove(now, number, Reason::Peer, region);
        }
    }

    /// The peer ends a connection: one that it has not confirmed is charged to it as well, as
    /// only the receiver of our reply knows its ids.
    fn decline(&mut self, number: u32) {
        if let Some(slot) = self.live(Qp(number)) {
            slot.declined = slot.connection.phase == Phase::ReplySent;
        }
    }

    /// The peer has answered our disconnect request, or a challenge.
    fn on_disconnect_reply(
        &mut self,
        now: Instant,
        from: IpAddr,
        to: IpAddr,
        message: &DisconnectReply,
    ) -> DatagramOutcome {
        let names = (message.remote_comm_id, message.local_comm_id);
        let Some(key) = self.manager.challenges_by_name.get(&names.0).copied() else {
            let heard = self.end_farewell(names.0, (to, from));
            return if heard { DatagramOutcome::Message } else { DatagramOutcome::Unknown };
        };
        let challenge = self.manager.challenges.get(&key);
        if (key.remote, key.local) != (from, to) || challenge.is_none_or(|d| d.names != names) {
            return DatagramOutcome::Unknown;
        }
        self.manager.challenges_by_name.remove(&names.0);
        let Some(Challenge { request, room, .. }) = self.manager.challenges.remove(&key) else {
            return DatagramOutcome::Unknown;
        };
        self.manager.unanswered.forgive(from.into());
        match self.check_request(&request) {
            Ok(private) => self.announce(now, request, private, Some(room)),
            Err(reason) => self.reject_request(&request, reason),
        }
    }

    /// Ends the repetition of a disconnect request; returns false if there is none with that id to
    /// that peer.
    fn end_farewell(&mut self, comm: u32, ends: (IpAddr, IpAddr)) -> bool {
        let retry = self.manager.retries.get(comm);
        let found = retry.is_some_and(|r| r.slot.is_none() && (r.local, r.remote) == ends);
        if found {
            self.manager.retries.remove(comm);
        }
        found
    }

    /// The peer rejects, or has changed its mind.
    fn on_reject(&mut self, now: Instant, number: u32, message: &Reject, region: &Region) {
        let reason = match self.live(Qp(number)).map(|slot| slot.connection.phase) {
            Some(Phase::Established) => Reason::Peer,
            Some(Phase::RequestSent) => Reason::Rejected {
                code: i32::from(message.reason.0),
                private_data: message.private_data.to_vec(),
            },
            // Of the owner of a forged address, who knows no such connection. It is not charged for
            // that, nor does it make room for the next request, as if it had said nothing.
            _ if message.reason.is_unknown_connection() => return,
            _ => Reason::NotEstablished,
        };
        self.decline(number);
        self.remove(now, number, reason, region);
    }

    /// The peer confirms a connection. If the connection no longer exists, the peer is notified.
    fn on_ready(
        &mut self,
        number: Option<u32>,
        message: &ReadyToUse,
        ends: (IpAddr, IpAddr),
        transaction: u64,
    ) {
        match number {
            Some(number) => self.establish(number),
            None if self.by_comm.contains_key(&message.remote_comm_id) => {}
            None => self.send_mad(ends.0, ends.1, unknown(message, transaction)),
        }
    }

    /// Our reply has arrived.
    pub(super) fn establish(&mut self, number: u32) {
        let Some(slot) = self.live(Qp(number)) else { return };
        if slot.connection.phase == Phase::ReplySent {
            slot.connection.phase = Phase::Established;
            slot.qp.ready_to_send();
            if let Some(token) = &slot.token {
                token.set(RequestState::Up);
            }
            let (comm, key) = (slot.connection.local_comm, slot.connection.key());
            self.manager.retries.remove(comm);
            self.manager.forget_half_open(&key);
            self.events.push(Event::Established(Qp(number)));
            self.mark_ready(number);
        }
    }

    /// A peer requests a connection.
    fn on_request(&mut self, now: Instant, request: ConnectRequest) -> DatagramOutcome {
        // Only the socket of a link-local listener knows the link of its peers.
        let is_on_link = is_link_local(request.to)
            && self.manager.listeners.iter().any(|listener| listener.ip() == request.to);
        if is_link_local(request.from) && !is_on_link {
            return DatagramOutcome::LinkLocal;
        }
        self.manager.expire(now);
        if self.is_repeated(now, &request) {
            return DatagramOutcome::Repeated;
        }
        let private = match self.check_request(&request) {
            Ok(private) => private,
            Err(reason) => return self.reject_request(&request, reason),
        };
        if self.check_stale(now, request) {
            return DatagramOutcome::Doubted;
        }
        self.admit_request(now, request, private)
    }

    /// Admits, challenges or drops a valid request by the number of others.
    pub(super) fn admit_request(
        &mut self,
        now: Instant,
        request: ConnectRequest,
        private: (CmaHeader, [u8; CmaHeader::USER_BYTES]),
    ) -> DatagramOutcome {
        let (source, most) = (request.from.into(), self.config.half_open_per_source);
        let is_challenged = self.manager.unverified >= self.config.unverified;
        // What a source has not answered yet bounds one that does answer as well.
        let has_too_many = is_challenged && !self.manager.may_challenge(now, source, most);
        let room = self.manager.room(now, source, most).filter(|_| !has_too_many);
        let Some(room) = room else {
            self.manager.note_flood(now);
            return DatagramOutcome::Crowded;
        };
        if is_challenged {
            self.challenge(now, request, room);
            return DatagramOutcome::Doubted;
        }
        self.announce(now, request, private, None)
    }

    pub(super) fn reject_request(
        &mut self,
        request: &ConnectRequest,
        reason: RejectReason,
    ) -> DatagramOutcome {
        self.send_mad(request.to, request.from, request.reject(reason, &[]));
        DatagramOutcome::Rejected
    }

    /// Sends a message that only the owner of the source address can answer.
    fn challenge(&mut self, now: Instant, request: ConnectRequest, room: Room) {
        self.manager.note_flood(now);
        self.manager.reserve(now, room);
        // No connection of the peer has the second one but by chance.
        let names = (self.random_comm(), (self.entropy)() as u32);
        let challenge = Challenge { request, names, room, since: now };
        let most = self.config.half_open_per_source;
        self.manager.add_challenge(challenge, most, now + CHALLENGE_TIMEOUT);
        self.send_challenge(now, &request, names);
    }

    fn send_challenge(&mut self, now: Instant, request: &ConnectRequest, names: (u32, u32)) {
        self.manager.unanswered.penalize(now, request.from.into());
        self.send_mad(request.to, request.from, request.challenge(names));
    }

    /// Reports a request to the user. `reserved`: the room that was reserved with the challenge that its
    /// peer has answered.
    fn announce(
        &mut self,
        now: Instant,
        request: ConnectRequest,
        (header, private_data): (CmaHeader, [u8; CmaHeader::USER_BYTES]),
        reserved: Option<Room>,
    ) -> DatagramOutcome {
        let source = request.from.into();
        if self.manager.penalties.is_blocked(now, source) {
            return DatagramOutcome::Barred;
        }
        if !self.manager.make_room(now, source, self.config.half_open_per_source, reserved) {
            return DatagramOutcome::Crowded;
        }
        let new = HalfOpen::new(&request, reserved.is_some(), &self.manager.updates);
        let half = HalfOpen { since: Some(now), ..new };
        let ticket = RequestHandle::new(request, half.token.clone());
        self.add_half_open(request.key(), half, Some(now + self.config.patience));
        let port = service_port(request.message.service_id).unwrap_or_default();
        self.events.push(Event::Incoming(Incoming::detached(
            SocketAddr::new(request.to, port),
            SocketAddr::new(request.from, header.source_port),
            private_data.to_vec(),
            request.message.responder_resources,
            Box::new(ticket),
        )));
        DatagramOutcome::Message
    }

    /// Handles a repeated request: the answer was lost, or is not ready yet.
    fn is_repeated(&mut self, now: Instant, request: &ConnectRequest) -> bool {
        let (key, ends) = (request.key(), (request.to, request.from));
        let known = self.manager.by_request.get(&key).copied();
        let phase = known.and_then(|n| self.live(Qp(n))).map(|slot| slot.connection.phase);
        if phase == Some(Phase::Established) {
            return true;
        }
        if let Some(half) = self.manager.half_open.get_mut(&key) {
            half.credit = half.credit.saturating_add(1);
            let mad = match half.token.reply() {
                Some(reply) => *reply,
                None => request.wait(self.config.patience),
            };
            self.answer(&key, ends, mad);
            return true;
        }
        if let Some(challenge) = self.manager.challenges.get(&key) {
            self.send_challenge(now, request, challenge.names);
            return true;
        }
        phase.is_some()
            || self.is_stale_candidate(&key)
            || self.manager.elsewhere.get(&key).is_some()
    }

    /// Whether there is a listener for a request.
    pub(super) fn is_listening(&self, request: &ConnectRequest) -> bool {
        let Some(port) = service_port(request.message.service_id) else { return false };
        self.manager.listeners.iter().any(|listener| {
            listener.port() == port
                && (listener.ip() == request.to
                    || listener.ip().is_unspecified() && listener.is_ipv4() == request.to.is_ipv4())
        })
    }

    /// Checks the parameters of a request.
    pub(super) fn check_request(
        &self,
        request: &ConnectRequest,
    ) -> Result<(CmaHeader, [u8; CmaHeader::USER_BYTES]), RejectReason> {
        let message = &request.message;
        let heard = self.is_listening(request);
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
        if self.manager.ended.get(&request.key()).is_some() {
            return Err(RejectReason::STALE);
        }
        Ok(private)
    }

    /// Our request was accepted, or our confirmation of that was lost.
    fn on_reply(&mut self, number: u32, message: &Reply) {
        let config = self.config;
        let selective = config.selective && is_marked_guid(message.ca_guid);
        let Some(slot) = self.live(Qp(number)) else { return };
        let connection = &mut slot.connection;
        let first = connection.phase == Phase::RequestSent;
        if first && message.qpn.get() >= 2 {
            connection.phase = Phase::Established;
            connection.remote_comm = message.local_comm_id;
            connection.remote_guid = message.ca_guid;
            connection.remote_qpn = message.qpn;
            slot.settings = Settings {
                peer: message.qpn,
                send_psn: message.starting_psn,
                selective,
                reads: slot.settings.reads.min(message.responder_resources).max(1),
                rnr_retries: message.rnr_retry_count,
                ..slot.settings
            };
            slot.qp.ready_to_receive(&slot.settings);
            slot.qp.ready_to_send();
            slot.set_source_port(&config);
            let (comm, peer) = (slot.connection.local_comm, slot.connection.peer());
            self.manager.retries.remove(comm);
            self.manager.by_peer.insert(peer, number);
        }
        let Some(slot) = self.live(Qp(number)) else { return };
        let mine = slot.connection.phase == Phase::Established
            && slot.connection.remote_comm == message.local_comm_id;
        if mine {
            let (local, remote) = slot.connection.ends();
            let mad = slot.connection.ready();
            self.send_mad(local, remote, mad);
            self.mark_ready(number);
            if first {
                self.events.push(Event::Established(Qp(number)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::cm::connection::{Connection, LocalParameters};
    use crate::soft::config::Config;
    use crate::soft::endpoint::receive::*;
    use crate::wire::header::{
        Bth, DEFAULT_PKEY, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES,
    };
    use crate::wire::icrc::{Flow, Icrc};
    use crate::wire::opcode::Opcode;
    use crate::wire::psn::{Psn, Qpn};
    use crate::{Pool, PoolPlan, QpLimits};

    fn pool() -> Pool {
        let plan = PoolPlan::without_receives(1, 0, 4096);
        Pool::new(plan).unwrap()
    }

    /// A request to connect, by the name that the host gives to its connection.
    fn request(from: IpAddr, to: IpAddr, comm: u32) -> [u8; MAD_BYTES] {
        let connection = Connection {
            phase: Phase::RequestSent,
            local: from,
            remote: to,
            local_comm: comm,
            remote_comm: 0,
            remote_guid: 0,
            local_qpn: Qpn::new(17 + comm),
            remote_qpn: Qpn::default(),
            transaction: 1,
            tos: 0,
        };
        let offer = LocalParameters {
            guid: 5,
            receive_psn: Psn::default(),
            answered_reads: 1,
            reads: 1,
            mtu: 1024,
            ack_timeout: Duration::from_millis(70),
        };
        connection.request(&offer, 4420, 4791, b"")
    }

    /// The datagram of a message of connection management.
    fn datagram(flow: Flow, mad: &[u8; MAD_BYTES]) -> Vec<u8> {
        keyed_datagram(flow, (DEFAULT_PKEY, GSI_QKEY), mad)
    }

    /// The same with a partition key and a queue key.
    fn keyed_datagram(flow: Flow, (pkey, qkey): (u16, u32), mad: &[u8; MAD_BYTES]) -> Vec<u8> {
        let bth = Bth { pkey, ..Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::default()) };
        let deth = Some(Deth { qkey, source: Qpn::GSI });
        let head = HeaderBytes::emit(&bth, &Extended { deth, ..Extended::default() });
        let mut bytes = [head.as_slice(), mad].concat();
        let first: [u8; Bth::BYTES] = *bytes.first_chunk().unwrap();
        let mut icrc = Icrc::start(&flow, 0, bytes.len() + ICRC_BYTES, &first);
        icrc.update(&bytes[Bth::BYTES..]);
        bytes.extend(icrc.finish());
        bytes
    }

    #[test]
    fn a_request_that_no_answer_can_reach_is_dropped() {
        let pool = pool();
        let mut endpoint = Endpoint::new(Config::default(), Box::new(|| 3));
        endpoint.listen("[::]:4420".parse().unwrap());
        endpoint.listen("[2001:db8::1]:4420".parse().unwrap());
        let mut ask = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|ip| ip.parse::<IpAddr>().unwrap());
            let mad = request(from, to, 7);
            endpoint.on_message(Instant::now(), from, to, &mad, pool.region())
        };
        assert_eq!(ask("fe80::2", "fe80::1"), DatagramOutcome::LinkLocal, "no listener has a link");
        assert_eq!(ask("fe80::2", "2001:db8::1"), DatagramOutcome::LinkLocal);
        assert_eq!(ask("2001:db8::2", "fe80::1"), DatagramOutcome::Message);
        endpoint.listen("[fe80::1%2]:4420".parse().unwrap());
        let mut ask = |from: &str, to: &str| {
            let [from, to] = [from, to].map(|ip| ip.parse::<IpAddr>().unwrap());
            endpoint.on_message(Instant::now(), from, to, &request(from, to, 8), pool.region())
        };
        assert_eq!(ask("fe80::2", "fe80::1"), DatagramOutcome::Message);
        assert_eq!(ask("fe80::2", "2001:db8::1"), DatagramOutcome::LinkLocal);
    }

    #[test]
    fn a_dropped_request_is_rejected_with_the_current_reason() {
        let (pool, now) = (pool(), Instant::now());
        let mut number = 0;
        let entropy = move || {
            number += 1;
            number
        };
        let mut endpoint = Endpoint::new(Config::default(), Box::new(entropy));
        let [from, to] = [[10, 0, 0, 1], [10, 0, 0, 2]].map(IpAddr::from);
        let at = SocketAddr::new(to, 4420);
        endpoint.listen(at);
        for (comm, reason) in [(7, RejectReason::CONSUMER), (8, RejectReason::INVALID_SERVICE)] {
            endpoint.on_message(now, from, to, &request(from, to, comm), pool.region());
            let Some(Event::Incoming(incoming)) = endpoint.poll_event() else { panic!() };
            let asked = *ConnectRequest::of(&incoming).unwrap();
            if comm == 8 {
                endpoint.unlisten(at);
            }
            drop(incoming);
            endpoint.apply_updates(now);
            let said = endpoint.poll_transmit(now, pool.region()).unwrap();
            let mut payload = Vec::new();
            endpoint.copy_payload(&said, pool.region(), &mut payload);
            assert_eq!(payload, asked.reject(reason, &[]));
        }
    }

    /// A challenge costs a target several times what a request does that it drops, and a table of
    /// challenges that is full forgets who has not answered.
    #[test]
    fn sources_that_answer_no_challenge_are_challenged_sixteen_times_a_second() {
        let (pool, start) = (pool(), Instant::now());
        let config =
            Config { unverified: 0, half_open_per_source: 4, challenges: 8, ..Config::default() };
        let mut number = 0;
        let entropy = move || {
            number += 2;
            number
        };
        let mut endpoint = Endpoint::new(config, Box::new(entropy));
        let to = IpAddr::from([10, 0, 0, 1]);
        endpoint.listen(SocketAddr::new(to, 4420));
        let source = |number| IpAddr::from([10, 0, 1, number]);
        let ask = |endpoint: &mut Endpoint, now, from, comm| {
            endpoint.on_message(now, from, to, &request(from, to, comm), pool.region())
        };
        // Eight sources with a thousand requests a second each, for two seconds.
        let mut challenged = [0; 8];
        for tick in 0..2000 {
            for (from, count) in (0..8).zip(&mut challenged) {
                let now = start + Duration::from_millis(tick.into());
                let outcome = ask(&mut endpoint, now, source(from), tick);
                *count += u32::from(outcome == DatagramOutcome::Doubted);
                endpoint.forget_sent();
                while endpoint.poll_transmit(now, pool.region()).is_some() {}
            }
        }
        assert!(challenged.iter().all(|count| (35..=36).contains(count)), "{challenged:?}");

        // A host starts at one of these addresses: with the first answer it is served as any other.
        let now = start + Duration::from_millis(2063);
        let next = (5000..)
            .find(|comm| ask(&mut endpoint, now, source(1), *comm) == DatagramOutcome::Crowded);
        assert!(next.is_some_and(|next| (5001..=5002).contains(&next)), "{next:?}");
        let asked = endpoint.poll_transmit(now, pool.region()).unwrap();
        let mut mad = Vec::new();
        endpoint.copy_payload(&asked, pool.region(), &mut mad);
        let (header, message) = CmMessage::parse(mad.first_chunk().unwrap()).unwrap();
        let CmMessage::DisconnectRequest(asked) = message else { panic!("{message:?}") };
        let answer = left(&asked, header.transaction);
        let outcome = endpoint.on_message(now, source(1), to, &answer, pool.region());
        assert_eq!(outcome, DatagramOutcome::Message);
        let later = now + CHALLENGE_TIMEOUT;
        let asked = (6000..6100).map(|comm| ask(&mut endpoint, later, source(1), comm));
        let challenged = asked.filter(|outcome| *outcome == DatagramOutcome::Doubted).count();
        assert_eq!(challenged, 4, "as many as it may have at once");
    }

    /// Each of many targets would create a queue pair for it.
    #[test]
    fn broadcast_and_multicast_requests_are_dropped() {
        let pool = pool();
        let mut endpoint = Endpoint::new(Config::default(), Box::new(|| 3));
        endpoint.listen("0.0.0.0:4420".parse().unwrap());
        let from = SocketAddr::from(([10, 0, 0, 1], 4791));
        for (to, outcome) in [
            ("10.0.0.3", DatagramOutcome::Message),
            ("255.255.255.255", DatagramOutcome::Broadcast),
            ("224.0.0.1", DatagramOutcome::Broadcast),
        ] {
            let to = SocketAddr::new(to.parse().unwrap(), 4791);
            let mad = request(from.ip(), to.ip(), 7);
            let bytes = datagram(Flow { source: from, destination: to }, &mad);
            endpoint.handle(Instant::now(), from, to, 0, &bytes, pool.region());
            assert_eq!(endpoint.counters()[outcome], 1 + u64::from(to.ip().is_multicast()), "{to}");
        }
        assert!(endpoint.poll_event().is_some() && endpoint.poll_event().is_none());
    }

    /// We are a full member of the default partition, so messages of limited members are handled.
    #[test]
    fn messages_of_another_partition_or_queue_key_are_dropped() {
        let pool = pool();
        let mut endpoint = Endpoint::new(Config::default(), Box::new(|| 3));
        endpoint.listen("10.0.0.1:4420".parse().unwrap());
        let [source, destination] =
            [[10, 0, 0, 2], [10, 0, 0, 1]].map(|ip| SocketAddr::from((ip, 4791)));
        let limited = DEFAULT_PKEY & 0x7fff;
        for (keys, outcome) in [
            ((0x8001, GSI_QKEY), DatagramOutcome::Partition),
            ((0x7ffe, GSI_QKEY), DatagramOutcome::Partition),
            ((DEFAULT_PKEY, GSI_QKEY + 1), DatagramOutcome::Unfit),
            ((DEFAULT_PKEY, 0), DatagramOutcome::Unfit),
            ((limited, GSI_QKEY), DatagramOutcome::Message),
        ] {
            let mad = request(source.ip(), destination.ip(), 7);
            let bytes = keyed_datagram(Flow { source, destination }, keys, &mad);
            let before = endpoint.counters()[outcome];
            endpoint.handle(Instant::now(), source, destination, 0, &bytes, pool.region());
            assert_eq!(endpoint.counters()[outcome], before + 1, "{keys:x?}");
        }
        assert!(endpoint.poll_event().is_some() && endpoint.poll_event().is_none());
    }

    /// A request may be served by another reactor than the one where the next request arrives.
    #[test]
    fn failed_connections_are_charged_to_the_receiving_endpoint() {
        let (pool, now) = (pool(), Instant::now());
        let endpoint = |index| {
            let mut number = 0;
            let entropy = move || {
                number += 1;
                number
            };
            let config =
                Config { vain_per_source: Some(2), steer: (2, index), ..Config::default() };
            Endpoint::new(config, Box::new(entropy))
        };
        let [mut asked, mut owner] = [0, 1].map(endpoint);
        let [from, other, to] = [[10, 0, 0, 1], [10, 0, 0, 2], [10, 0, 0, 3]].map(IpAddr::from);
        asked.listen(SocketAddr::new(to, 4420));
        let ask = |asked: &mut Endpoint, from, comm| {
            asked.on_message(now, from, to, &request(from, to, comm), pool.region())
        };
        let limits = QpLimits { receives: 1, sends: 1, reads: 1 };
        for comm in 0..3 {
            assert_eq!(ask(&mut asked, from, 2 * comm), DatagramOutcome::Message);
            let Some(Event::Incoming(incoming)) = asked.poll_event() else { panic!() };
            let qp = owner.open(incoming, limits).unwrap();
            owner.accept(now, qp, &[]);
            let ready = ReadyToUse {
                local_comm_id: 2 * comm,
                remote_comm_id: owner.live(qp).unwrap().connection.local_comm,
                ..ReadyToUse::zeroed()
            };
            let mad = CmMessage::ReadyToUse(ready).emit(MadHeader::default());
            assert_eq!(
                owner.on_message(now, from, to, &mad, pool.region()),
                DatagramOutcome::Message
            );
            assert!(matches!(owner.poll_event(), Some(Event::Established(_))));
            owner.disconnect(now, qp, pool.region());
            assert!(matches!(owner.poll_event(), Some(Event::Gone(..))));
        }
        assert_eq!(ask(&mut asked, from, 6), DatagramOutcome::Barred);
        assert_eq!(ask(&mut asked, other, 8), DatagramOutcome::Message);
    }
}
