//! State machine of one connection in connection management (IBTA volume 1, chapter 12), both
//! roles, without queue pair and I/O: which message to send, how long to repeat it, and how to
//! handle one from the peer.
//!
//! ```text
//! passive: Opened ──accept──► ReplySent ──RTU, or any packet──► Established ──► (ended)
//! active:  RequestSent ──REP, answered by RTU──────────────────► Established ──► (ended)
//! ```

use std::net::IpAddr;
use std::time::Duration;

use super::mad::{MAD_BYTES, MadHeader};
use super::message::{
    CmMessage, CmaHeader, DisconnectReply, DisconnectRequest, MessageReceipt, ReadyToUse, Reject,
    RejectReason, Reply, Request, service_id,
};
use super::request_key::RequestKey;
use crate::wire::header::DEFAULT_PKEY;
use crate::wire::icrc::gid;
use crate::wire::psn::{Psn, Qpn};

/// Our response time in messages: 4.096 µs * 2^20, as Linux.
const RESPONSE_CODE: u8 = 20;
/// Our longest acknowledgement delay in messages: 4.096 µs * 2^12, 17 ms.
const ACK_DELAY_CODE: u8 = 12;

/// First three bytes of our GUIDs, in place of a vendor's: locally administered, so not used by
/// others.
const KIN: u64 = 0x0e_6e_76;
/// Bits of a GUID after these.
const NAME_BITS: u32 = 40;

/// A GUID of this implementation, made from a random number.
pub(crate) const fn marked_guid(random: u64) -> u64 {
    KIN << NAME_BITS | random & ((1 << NAME_BITS) - 1)
}

/// Whether a GUID is of this implementation, which supports its extensions.
pub(crate) const fn is_marked_guid(guid: u64) -> bool {
    guid >> NAME_BITS == KIN
}

/// The time of a time code of connection management (0 to 31): 4.096 µs * 2^code.
pub const fn code_time(code: u8) -> Duration {
    Duration::from_nanos(4096 << (code & 31))
}

/// The smallest time code for at least `time`.
pub fn time_code(time: Duration) -> u8 {
    (1..31).find(|code| code_time(*code) >= time).unwrap_or(31)
}

/// Maximum time of silence that a peer can request.
const MOST_SILENCE: Duration = Duration::from_secs(30);

/// Time for which a peer may be silent by its request: its ack timeout, and once more for each retry.
/// None is requested by code 0, which means infinite.
pub fn silence(ack_timeout: u8, retry_count: u8) -> Duration {
    match ack_timeout {
        0 => Duration::ZERO,
        code => (code_time(code) * (u32::from(retry_count) + 1)).min(MOST_SILENCE),
    }
}

/// Bytes of a path MTU code, 1 = 256 to 5 = 4096; none for another code.
pub const fn mtu_bytes(code: u8) -> Option<u32> {
    match code {
        1..=5 => Some(128 << code),
        _ => None,
    }
}

/// Code of the largest path MTU of at most `bytes`, at least that of 256.
pub const fn mtu_code(bytes: u32) -> u8 {
    let mut code = 5;
    while code > 1 && 128 << code > bytes {
        code -= 1;
    }
    code
}

/// A connection request, with all that any endpoint needs to answer it: the content of
/// [`crate::Incoming`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ConnectRequest {
    /// The message.
    pub message: Request,
    /// To be echoed.
    pub transaction: u64,
    /// Source address of the packet.
    pub from: IpAddr,
    /// Destination address of the packet.
    pub to: IpAddr,
}

impl ConnectRequest {
    /// Its identity, equal for repetitions of the request.
    pub(crate) fn key(&self) -> RequestKey {
        let Request { ca_guid: guid, local_comm_id: comm, .. } = self.message;
        RequestKey { remote: self.from, local: self.to, guid, comm }
    }

    /// An address challenge for the sender of the request: a request to disconnect a connection
    /// that does not exist. Every connection manager confirms it, with the same `names` and without
    /// effect, so the answer proves that the sender receives packets at its address. It has the
    /// length of the request.
    pub(crate) fn challenge(&self, names: (u32, u32)) -> [u8; MAD_BYTES] {
        let message = DisconnectRequest {
            local_comm_id: names.0,
            remote_comm_id: names.1,
            ..DisconnectRequest::zeroed()
        };
        emit(CmMessage::DisconnectRequest(message), self.transaction)
    }

    /// An MRA: asks the peer to wait for `time` while the user decides.
    pub(crate) fn wait(&self, time: Duration) -> [u8; MAD_BYTES] {
        let message = MessageReceipt {
            remote_comm_id: self.message.local_comm_id,
            service_timeout: time_code(time),
            ..MessageReceipt::zeroed()
        };
        emit(CmMessage::MessageReceipt(message), self.transaction)
    }

    /// The REJ for it.
    pub fn reject(&self, reason: RejectReason, private_data: &[u8]) -> [u8; MAD_BYTES] {
        let mut message =
            Reject { remote_comm_id: self.message.local_comm_id, reason, ..Reject::zeroed() };
        fill(&mut message.private_data, private_data);
        emit(CmMessage::Reject(message), self.transaction)
    }
}

/// Phase of a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Phase {
    /// The user has the request and a queue pair, and has not accepted it.
    Opened,
    /// Our reply was sent.
    ReplySent,
    /// Our request was sent.
    RequestSent,
    /// Up.
    Established,
}

impl Phase {
    /// Whether the peer has requested the connection, and not confirmed it.
    pub(crate) fn is_half_open(self) -> bool {
        matches!(self, Phase::Opened | Phase::ReplySent)
    }
}

/// Parameters of this side in a request or reply.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalParameters {
    pub(crate) guid: u64,
    pub(crate) receive_psn: Psn,
    /// Reads of the peer that we answer concurrently.
    pub(crate) answered_reads: u8,
    /// Reads of ours that the peer answers concurrently.
    pub(crate) reads: u8,
    pub(crate) mtu: u32,
    pub(crate) ack_timeout: Duration,
}

#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) phase: Phase,
    pub(crate) local: IpAddr,
    pub(crate) remote: IpAddr,
    pub(crate) local_comm: u32,
    pub(crate) remote_comm: u32,
    /// GUID of the peer's adapter; 0 until it has replied.
    pub(crate) remote_guid: u64,
    pub(crate) local_qpn: Qpn,
    pub(crate) remote_qpn: Qpn,
    pub(crate) transaction: u64,
    /// Type of service of our packets.
    pub(crate) tos: u8,
}

impl Connection {
    /// Our address and the peer's.
    pub(crate) fn ends(&self) -> (IpAddr, IpAddr) {
        (self.local, self.remote)
    }

    /// Key of the peer's request, for the passive side.
    pub(crate) fn key(&self) -> RequestKey {
        let Connection { remote, local, remote_guid: guid, remote_comm: comm, .. } = *self;
        RequestKey { remote, local, guid, comm }
    }

    /// Identity of the peer's queue pair.
    pub(crate) fn peer(&self) -> (IpAddr, u64, Qpn) {
        (self.remote, self.remote_guid, self.remote_qpn)
    }

    /// The reply that accepts a request.
    pub(crate) fn reply(&self, offer: &LocalParameters, private_data: &[u8]) -> [u8; MAD_BYTES] {
        let mut message = Reply {
            local_comm_id: self.local_comm,
            remote_comm_id: self.remote_comm,
            qpn: self.local_qpn,
            starting_psn: offer.receive_psn,
            responder_resources: offer.answered_reads,
            initiator_depth: offer.reads,
            target_ack_delay: ACK_DELAY_CODE,
            rnr_retry_count: 7,
            ca_guid: offer.guid,
            ..Reply::zeroed()
        };
        fill(&mut message.private_data, private_data);
        emit(CmMessage::Reply(message), self.transaction)
    }

    /// The request to a listener at `port`.
    pub(crate) fn request(
        &self,
        offer: &LocalParameters,
        port: u16,
        source_port: u16,
        private_data: &[u8],
    ) -> [u8; MAD_BYTES] {
        let mut user = [0; CmaHeader::USER_BYTES];
        fill(&mut user, private_data);
        let header = CmaHeader { source_port, source: self.local, destination: self.remote };
        let message = Request {
            local_comm_id: self.local_comm,
            service_id: service_id(port),
            ca_guid: offer.guid,
            qpn: self.local_qpn,
            responder_resources: offer.answered_reads,
            initiator_depth: offer.reads,
            remote_response_timeout: RESPONSE_CODE,
            starting_psn: offer.receive_psn,
            local_response_timeout: RESPONSE_CODE,
            retry_count: 7,
            pkey: DEFAULT_PKEY,
            path_mtu: mtu_code(offer.mtu),
            rnr_retry_count: 7,
            max_cm_retries: 15,
            primary_local_lid: 0xffff,
            primary_remote_lid: 0xffff,
            primary_local_gid: gid(self.local),
            primary_remote_gid: gid(self.remote),
            primary_hop_limit: 64,
            primary_ack_timeout: time_code(offer.ack_timeout),
            private_data: header.emit(&user),
            ..Request::zeroed()
        };
        emit(CmMessage::Request(message), self.transaction)
    }

    /// The confirmation (RTU) of a reply.
    pub(crate) fn ready(&self) -> [u8; MAD_BYTES] {
        let message = ReadyToUse {
            local_comm_id: self.local_comm,
            remote_comm_id: self.remote_comm,
            ..ReadyToUse::zeroed()
        };
        emit(CmMessage::ReadyToUse(message), self.transaction)
    }

    /// The disconnect request.
    pub(crate) fn leave(&self) -> [u8; MAD_BYTES] {
        let message = DisconnectRequest {
            local_comm_id: self.local_comm,
            remote_comm_id: self.remote_comm,
            remote_qpn: self.remote_qpn,
            ..DisconnectRequest::zeroed()
        };
        emit(CmMessage::DisconnectRequest(message), self.transaction)
    }

    /// The REJ that withdraws a request or reply which the peer has not answered. With reason
    /// timeout, Linux finds the connection by the GUID of our adapter in the additional reject
    /// information (IBTA volume 1, 12.6.7 "REJ", its reasons in 12.6.7.2; in Linux
    /// `cm_acquire_rejected_id`).
    pub(crate) fn give_up(&self, reason: RejectReason, guid: u64) -> [u8; MAD_BYTES] {
        let (mut info, mut info_length) = ([0; 72], 0);
        if reason == RejectReason::TIMEOUT {
            info[..8].copy_from_slice(&guid.to_be_bytes());
            info_length = 8;
        }
        let message = Reject {
            info,
            info_length,
            local_comm_id: self.local_comm,
            remote_comm_id: self.remote_comm,
            message: u8::from(self.phase == Phase::RequestSent) * 2,
            reason,
            ..Reject::zeroed()
        };
        emit(CmMessage::Reject(message), self.transaction)
    }

    /// Whether a message of the peer with these ids belongs to this connection. The peer's id is
    /// unknown while our request is pending, and 0 in a REJ without a connection.
    pub(crate) fn is_of(&self, from: IpAddr, their_comm: u32) -> bool {
        let known = self.phase != Phase::RequestSent;
        self.remote == from && (!known || self.remote_comm == their_comm)
    }
}

/// The REJ for a peer that confirms a connection which does not exist: it was evicted, or has timed
/// out.
pub(crate) fn unknown(ready: &ReadyToUse, transaction: u64) -> [u8; MAD_BYTES] {
    let message = Reject {
        local_comm_id: ready.remote_comm_id,
        remote_comm_id: ready.local_comm_id,
        message: 2,
        reason: RejectReason::INVALID_COMM_ID,
        ..Reject::zeroed()
    };
    emit(CmMessage::Reject(message), transaction)
}

/// The reply to a disconnect request, made from that request alone.
pub(crate) fn left(request: &DisconnectRequest, transaction: u64) -> [u8; MAD_BYTES] {
    let message = DisconnectReply {
        local_comm_id: request.remote_comm_id,
        remote_comm_id: request.local_comm_id,
        ..DisconnectReply::zeroed()
    };
    emit(CmMessage::DisconnectReply(message), transaction)
}

fn emit(message: CmMessage, transaction: u64) -> [u8; MAD_BYTES] {
    message.emit(MadHeader { transaction, ..MadHeader::default() })
}

/// Copies as much private data as there is room for.
fn fill(room: &mut [u8], data: &[u8]) {
    let len = data.len().min(room.len());
    room[..len].copy_from_slice(&data[..len]);
}

#[cfg(test)]
mod tests {
    use crate::soft::cm::connection::*;

    #[test]
    fn marked_guids_identify_nvmfd_peers() {
        assert!([0, 1, u64::MAX].map(marked_guid).into_iter().all(is_marked_guid));
        assert!(![0, 1, u64::MAX, 0x0e6e_7500_0000_0001].into_iter().any(is_marked_guid));
        assert_ne!(marked_guid(1), marked_guid(2));
    }

    #[test]
    fn timeout_reject_carries_the_guid_of_the_adapter() {
        let connection = Connection {
            phase: Phase::ReplySent,
            local: [192, 0, 2, 20].into(),
            remote: [192, 0, 2, 10].into(),
            local_comm: 7,
            remote_comm: 9,
            remote_guid: 0,
            local_qpn: Qpn::default(),
            remote_qpn: Qpn::default(),
            transaction: 0,
            tos: 0,
        };
        let guid = 0x0102_0304_0506_0708;
        let mad = connection.give_up(RejectReason::TIMEOUT, guid);
        // After the 24 bytes of the header: the length in 7 bits, the reason, the information.
        assert_eq!(mad[33..46], [8 << 1, 0, 4, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]);
        let mad = connection.give_up(RejectReason::CONSUMER, guid);
        assert_eq!(mad[33..46], [0, 0, 28, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn timeout_and_mtu_codes_convert_both_ways() {
        assert_eq!(code_time(0), Duration::from_nanos(4096));
        assert_eq!(code_time(14), Duration::from_nanos(67_108_864));
        assert_eq!((time_code(code_time(17)), time_code(code_time(17) + code_time(0))), (17, 18));
        assert_eq!(time_code(Duration::MAX), 31);
        // An SPDK host on Linux 6.1, and the most and the least that can be requested.
        assert_eq!(silence(19, 4).as_millis(), 10_737);
        assert_eq!([silence(31, 7), silence(1, 0)], [MOST_SILENCE, code_time(1)]);
        assert_eq!(silence(0, 7), Duration::ZERO);
        assert_eq!(
            [1, 2, 3, 4, 5].map(mtu_bytes).map(Option::unwrap),
            [256, 512, 1024, 2048, 4096]
        );
        assert_eq!((mtu_bytes(0), mtu_bytes(6)), (None, None));
        assert_eq!([0, 256, 1023, 1024, 4095, 9000].map(mtu_code), [1, 1, 2, 3, 4, 5]);
    }
}
