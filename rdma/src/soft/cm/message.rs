//! The messages of connection management (IBTA volume 1, chapter 12 "Communication Management",
//! tables 99 and following; annex A11 "RDMA IP CM Service" for the private header of requests).
//!
//! Each message is one list of fields with their places: byte within the management datagram,
//! bit within that byte counted from the most significant, width in bits. Structure, parsing and
//! emission come from that one list. All other bits (reserved, of alternate paths, of datagram
//! services) are ignored on receipt and sent as zero.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::mad::{MAD_BYTES, MAD_HEADER_BYTES, MadHeader, piece};
use crate::wire::psn::{Psn, Qpn};

/// The type of a field.
trait Field: Sized {
    fn get(mad: &[u8; MAD_BYTES], byte: usize, bit: usize, width: usize) -> Self;
    fn put(&self, mad: &mut [u8; MAD_BYTES], byte: usize, bit: usize, width: usize);
}

/// Reads `width` bits (at most 64) that begin `bit` bits into `byte`.
fn get_bits(mad: &[u8; MAD_BYTES], byte: usize, bit: usize, width: usize) -> u64 {
    if bit == 0 && width.is_multiple_of(8) {
        let whole = &mad[byte..byte + width / 8];
        return whole.iter().fold(0, |value, byte| value << 8 | u64::from(*byte));
    }
    (0..width).fold(0, |value, at| {
        let place = byte * 8 + bit + at;
        value << 1 | u64::from(mad[place / 8] >> (7 - place % 8) & 1)
    })
}

/// Writes the low `width` bits of `value`.
fn put_bits(mad: &mut [u8; MAD_BYTES], byte: usize, bit: usize, width: usize, value: u64) {
    if bit == 0 && width.is_multiple_of(8) {
        let bytes = width / 8;
        mad[byte..byte + bytes].copy_from_slice(&value.to_be_bytes()[8 - bytes..]);
        return;
    }
    for at in 0..width {
        let place = byte * 8 + bit + at;
        let mask = 0x80 >> (place % 8);
        if value >> (width - 1 - at) & 1 == 1 {
            mad[place / 8] |= mask;
        } else {
            mad[place / 8] &= !mask;
        }
    }
}

macro_rules! number_fields {
    ($($type:ty: $read:expr, $write:expr;)*) => {$(
        impl Field for $type {
            fn get(mad: &[u8; MAD_BYTES], byte: usize, bit: usize, width: usize) -> Self {
                $read(get_bits(mad, byte, bit, width))
            }
            fn put(&self, mad: &mut [u8; MAD_BYTES], byte: usize, bit: usize, width: usize) {
                put_bits(mad, byte, bit, width, $write(*self));
            }
        }
    )*};
}

number_fields! {
    bool: |v| v != 0, u64::from;
    u8: |v| v as u8, u64::from;
    u16: |v| v as u16, u64::from;
    u32: |v| v as u32, u64::from;
    u64: |v| v, |v| v;
    Psn: |v| Psn::new(v as u32), |v: Psn| u64::from(v.get());
    Qpn: |v| Qpn::new(v as u32), |v: Qpn| u64::from(v.get());
}

impl<const N: usize> Field for [u8; N] {
    fn get(mad: &[u8; MAD_BYTES], byte: usize, _: usize, _: usize) -> Self {
        piece(mad, byte)
    }
    fn put(&self, mad: &mut [u8; MAD_BYTES], byte: usize, _: usize, _: usize) {
        mad[byte..byte + N].copy_from_slice(self);
    }
}

macro_rules! messages {
    ($(
        $(#[$about:meta])*
        $name:ident = $attribute:literal {
            $($(#[$field_about:meta])* $field:ident: $type:ty = $byte:literal . $bit:tt / $width:literal;)*
        }
    )*) => {
        $(
            $(#[$about])*
            #[derive(Clone, Copy, PartialEq, Eq, Debug)]
            pub struct $name { $($(#[$field_about])* pub $field: $type,)* }

            impl $name {
                /// The attribute that names this message in the management header.
                pub const ATTRIBUTE: u16 = $attribute;

                /// Parses the fields; any bytes are valid.
                pub fn parse(mad: &[u8; MAD_BYTES]) -> $name {
                    $name { $($field: Field::get(mad, $byte, $bit, $width),)* }
                }

                /// Writes the fields, leaving all other bytes as they are.
                pub fn emit(&self, mad: &mut [u8; MAD_BYTES]) {
                    $(self.$field.put(mad, $byte, $bit, $width);)*
                }

                /// All fields zero.
                pub fn zeroed() -> $name {
                    $name::parse(&[0; MAD_BYTES])
                }
            }
        )*

        /// A message of connection management.
        #[derive(Clone, Copy, PartialEq, Eq, Debug)]
        pub enum CmMessage { $($(#[$about])* $name($name),)* }

        impl CmMessage {
            /// Parses a management datagram; none if it is not a known message of connection
            /// management.
            pub fn parse(mad: &[u8; MAD_BYTES]) -> Option<(MadHeader, CmMessage)> {
                let header = MadHeader::parse(mad)?;
                let message = match header.attribute {
                    $($attribute => CmMessage::$name($name::parse(mad)),)*
                    _ => return None,
                };
                Some((header, message))
            }

            /// Emits the management datagram. The attribute of `header` is replaced by that of the
            /// message.
            pub fn emit(&self, header: MadHeader) -> [u8; MAD_BYTES] {
                let mut mad = [0; MAD_BYTES];
                MadHeader { attribute: self.attribute(), ..header }.emit(&mut mad);
                match self { $(CmMessage::$name(message) => message.emit(&mut mad),)* }
                mad
            }

            /// The attribute that names the message.
            pub const fn attribute(&self) -> u16 {
                match self { $(CmMessage::$name(_) => $attribute,)* }
            }
        }

        #[cfg(test)]
        const PLACES: &[(&str, &[(usize, usize)])] = &[
            $((stringify!($name), &[$(($byte * 8 + $bit, $width)),*]),)*
        ];
    };
}

/// Whether a management datagram is a REQ, if it is a message of connection management.
pub(crate) fn is_request(mad: &[u8; MAD_BYTES]) -> bool {
    u16::from_be_bytes(piece(mad, 16)) == Request::ATTRIBUTE
}

/// The communication id of the sender, which is at the same place in all messages.
pub(crate) fn local_comm_id(mad: &[u8; MAD_BYTES]) -> u32 {
    u32::from_be_bytes(piece(mad, MAD_HEADER_BYTES))
}

messages! {
    /// REQ: asks for a connection.
    Request = 0x0010 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// The requested service: see [`service_id`].
        service_id: u64 = 32 . 0 / 64;
        /// The sender's adapter; with the comm id the identity of the request.
        ca_guid: u64 = 40 . 0 / 64;
        /// The sender's queue pair.
        qpn: Qpn = 56 . 0 / 24;
        /// Reads and atomics that the sender will answer concurrently.
        responder_resources: u8 = 59 . 0 / 8;
        /// Reads and atomics that the sender wants to have outstanding.
        initiator_depth: u8 = 63 . 0 / 8;
        /// Time code in which the receiver is expected to answer: 4.096 µs * 2^n.
        remote_response_timeout: u8 = 67 . 0 / 5;
        /// 0 reliable connection, 1 unreliable, 2 reliable datagram, 3 see `extended_transport`.
        transport: u8 = 67 . 5 / 2;
        /// The sender's acknowledgements carry credits.
        flow_control: bool = 67 . 7 / 1;
        /// First packet number that the *receiver* of this message is to use.
        starting_psn: Psn = 68 . 0 / 24;
        /// Time code in which the sender will answer: 4.096 µs * 2^n.
        local_response_timeout: u8 = 71 . 0 / 5;
        /// Retries without an answer.
        retry_count: u8 = 71 . 5 / 3;
        /// Partition key.
        pkey: u16 = 72 . 0 / 16;
        /// Path MTU code: 1 = 256 bytes to 5 = 4096.
        path_mtu: u8 = 74 . 0 / 4;
        /// Reliable datagram channel exists.
        rdc_exists: bool = 74 . 4 / 1;
        /// Retries after "receiver not ready"; 7 is endless.
        rnr_retry_count: u8 = 74 . 5 / 3;
        /// Retries of messages of connection management.
        max_cm_retries: u8 = 75 . 0 / 4;
        /// The sender's queue pair has a shared receive queue.
        srq: bool = 75 . 4 / 1;
        /// 1 extended reliable connection.
        extended_transport: u8 = 75 . 5 / 3;
        /// Sender's port (InfiniBand links only).
        primary_local_lid: u16 = 76 . 0 / 16;
        /// Receiver's port (InfiniBand links only).
        primary_remote_lid: u16 = 78 . 0 / 16;
        /// Sender's address; IPv4 is mapped into IPv6.
        primary_local_gid: [u8; 16] = 80 . 0 / 128;
        /// Receiver's address.
        primary_remote_gid: [u8; 16] = 96 . 0 / 128;
        /// Flow label.
        primary_flow_label: u32 = 112 . 0 / 20;
        /// Rate code; 0 is the port's own.
        primary_packet_rate: u8 = 115 . 2 / 6;
        /// Traffic class (type of service).
        primary_traffic_class: u8 = 116 . 0 / 8;
        /// Hop limit.
        primary_hop_limit: u8 = 117 . 0 / 8;
        /// Service level.
        primary_sl: u8 = 118 . 0 / 4;
        /// Both ends are in one subnet.
        primary_subnet_local: bool = 118 . 4 / 1;
        /// Time code of the sender's ack timeout: 4.096 µs * 2^n, 0 means infinite.
        primary_ack_timeout: u8 = 119 . 0 / 5;
        /// Private data; for RDMA-CM a [`CmaHeader`] and 56 bytes of the user.
        private_data: [u8; 92] = 164 . 0 / 736;
    }

    /// MRA: the message has arrived, the answer takes longer.
    MessageReceipt = 0x0011 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// The received message: 0 a request, 1 a reply, 2 another message.
        message: u8 = 32 . 0 / 2;
        /// Time code of the wait: 4.096 µs * 2^n.
        service_timeout: u8 = 33 . 0 / 5;
        /// Private data.
        private_data: [u8; 222] = 34 . 0 / 1776;
    }

    /// REJ: no connection.
    Reject = 0x0012 {
        /// Names the connection at the sender; 0 when it has none.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// 0 a request is rejected, 1 a reply, 2 another message or none.
        message: u8 = 32 . 0 / 2;
        /// Valid bytes of `info`, at most 72.
        info_length: u8 = 33 . 0 / 7;
        /// The reason: see [`RejectReason`].
        reason: RejectReason = 34 . 0 / 16;
        /// Additional reject information.
        info: [u8; 72] = 36 . 0 / 576;
        /// Private data.
        private_data: [u8; 148] = 108 . 0 / 1184;
    }

    /// REP: agrees to a connection.
    Reply = 0x0013 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// The sender's queue pair.
        qpn: Qpn = 36 . 0 / 24;
        /// First packet number that the *receiver* of this message is to use.
        starting_psn: Psn = 44 . 0 / 24;
        /// Reads and atomics that the sender will answer concurrently.
        responder_resources: u8 = 48 . 0 / 8;
        /// Reads and atomics that the sender will have outstanding.
        initiator_depth: u8 = 49 . 0 / 8;
        /// Time code of the sender's slowest acknowledgement: 4.096 µs * 2^n.
        target_ack_delay: u8 = 50 . 0 / 5;
        /// The sender's acknowledgements carry credits.
        flow_control: bool = 50 . 7 / 1;
        /// Retries after "receiver not ready"; 7 is endless.
        rnr_retry_count: u8 = 51 . 0 / 3;
        /// The sender's queue pair has a shared receive queue.
        srq: bool = 51 . 3 / 1;
        /// The sender's adapter.
        ca_guid: u64 = 52 . 0 / 64;
        /// Private data.
        private_data: [u8; 196] = 60 . 0 / 1568;
    }

    /// RTU: the reply has arrived, the connection is established.
    ReadyToUse = 0x0014 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// Private data.
        private_data: [u8; 224] = 32 . 0 / 1792;
    }

    /// DREQ: the connection ends.
    DisconnectRequest = 0x0015 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// The receiver's queue pair.
        remote_qpn: Qpn = 32 . 0 / 24;
        /// Private data.
        private_data: [u8; 220] = 36 . 0 / 1760;
    }

    /// DREP: the reply to a disconnect request.
    DisconnectReply = 0x0016 {
        /// Names the connection at the sender.
        local_comm_id: u32 = 24 . 0 / 32;
        /// Names it at the receiver.
        remote_comm_id: u32 = 28 . 0 / 32;
        /// Private data.
        private_data: [u8; 224] = 32 . 0 / 1792;
    }
}

/// Reason for a rejected request or reply (IBTA volume 1, 12.6.7.2). Open: peers may send any
/// number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct RejectReason(pub u16);

impl RejectReason {
    /// No queue pair available.
    pub const NO_QP: RejectReason = RejectReason(1);
    /// No resources.
    pub const NO_RESOURCES: RejectReason = RejectReason(3);
    /// No answer in time.
    pub const TIMEOUT: RejectReason = RejectReason(4);
    /// No connection with this communication id.
    pub const INVALID_COMM_ID: RejectReason = RejectReason(6);
    /// No listener for this service.
    pub const INVALID_SERVICE: RejectReason = RejectReason(8);
    /// Not a reliable connection.
    pub const INVALID_TRANSPORT: RejectReason = RejectReason(9);
    /// A connection with the same communication id exists from before.
    pub const STALE: RejectReason = RejectReason(10);
    /// The address in the message is not acceptable.
    pub const INVALID_GID: RejectReason = RejectReason(12);
    /// The path MTU is not acceptable.
    pub const INVALID_MTU: RejectReason = RejectReason(26);
    /// The application rejects; its private data contain the reason.
    pub const CONSUMER: RejectReason = RejectReason(28);

    /// Whether its sender has no such connection: "invalid communication id" or "instance".
    pub(crate) fn is_unknown_connection(self) -> bool {
        matches!(self.0, 6 | 7)
    }
}

impl Field for RejectReason {
    fn get(mad: &[u8; MAD_BYTES], byte: usize, bit: usize, width: usize) -> Self {
        RejectReason(u16::get(mad, byte, bit, width))
    }
    fn put(&self, mad: &mut [u8; MAD_BYTES], byte: usize, bit: usize, width: usize) {
        self.0.put(mad, byte, bit, width);
    }
}

/// Port space of RDMA-CM's reliable connections.
const PORT_SPACE_TCP: u64 = 0x0106;

/// The service id of a port of RDMA-CM's reliable connections (annex A11).
pub const fn service_id(port: u16) -> u64 {
    PORT_SPACE_TCP << 16 | port as u64
}

/// The port of a service id; none if it is not of RDMA-CM's reliable connections.
pub const fn service_port(service_id: u64) -> Option<u16> {
    if service_id >> 16 == PORT_SPACE_TCP { Some(service_id as u16) } else { None }
}

/// The header with which RDMA-CM begins the private data of a request: source and destination.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CmaHeader {
    /// Port of the active side.
    pub source_port: u16,
    /// Address of the active side; of the same version as `destination`.
    pub source: IpAddr,
    /// Address of the passive side.
    pub destination: IpAddr,
}

impl CmaHeader {
    /// Its length.
    pub const BYTES: usize = 36;
    /// Bytes of a request's private data that are left to the user.
    pub const USER_BYTES: usize = 92 - CmaHeader::BYTES;

    /// Parses the private data of a request; none if header or IP version are unknown.
    pub fn parse(private: &[u8; 92]) -> Option<(CmaHeader, [u8; CmaHeader::USER_BYTES])> {
        let (head, user) = private.split_first_chunk::<{ CmaHeader::BYTES }>()?;
        let (fixed, rest) = head.split_first_chunk::<4>()?;
        let (source, rest) = rest.split_first_chunk::<16>()?;
        let destination = rest.first_chunk::<16>()?;
        let address = match (fixed[0], fixed[1] >> 4) {
            (0, 4) => |b: &[u8; 16]| IpAddr::V4(Ipv4Addr::new(b[12], b[13], b[14], b[15])),
            (0, 6) => |b: &[u8; 16]| IpAddr::V6(Ipv6Addr::from(*b)),
            _ => return None,
        };
        let header = CmaHeader {
            source_port: u16::from_be_bytes([fixed[2], fixed[3]]),
            source: address(source),
            destination: address(destination),
        };
        Some((header, *user.first_chunk()?))
    }

    /// Emits the private data of a request; the IP version is that of the destination.
    pub fn emit(&self, user: &[u8; CmaHeader::USER_BYTES]) -> [u8; 92] {
        let mut out = [0; 92];
        out[1] = if self.destination.is_ipv4() { 0x40 } else { 0x60 };
        out[2..4].copy_from_slice(&self.source_port.to_be_bytes());
        for (at, address) in [(4, self.source), (20, self.destination)] {
            match address {
                IpAddr::V4(v4) => out[at + 12..at + 16].copy_from_slice(&v4.octets()),
                IpAddr::V6(v6) => out[at..at + 16].copy_from_slice(&v6.octets()),
            }
        }
        out[CmaHeader::BYTES..].copy_from_slice(user);
        out
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::cm::message::*;
    use proptest::prelude::*;

    #[test]
    fn message_fields_never_overlap_and_fit_the_mad() {
        for (name, places) in PLACES {
            let mut taken = [false; MAD_BYTES * 8];
            for (start, width) in *places {
                assert!(*start >= 24 * 8, "{name}: {start} lies in the management header");
                for bit in &mut taken[*start..start + width] {
                    assert!(!std::mem::replace(bit, true), "{name}: a bit after {start} twice");
                }
            }
            assert!(taken[MAD_BYTES * 8 - 1], "{name}: private data reach the end");
        }
    }

    #[test]
    fn ports_and_service_ids_convert_both_ways() {
        assert_eq!(service_id(4420), 0x0000_0000_0106_1144);
        assert_eq!(service_port(0x0106_1f49), Some(8009));
        assert_eq!(service_port(0x0111_1144), None);
        assert_eq!(service_port(0x1_0000_0106_1144), None);
    }

    #[test]
    fn a_private_header_of_another_version_is_unknown() {
        let header = CmaHeader {
            source_port: 1,
            source: "10.0.0.1".parse().unwrap(),
            destination: "10.0.0.2".parse().unwrap(),
        };
        let good = header.emit(&[7; 56]);
        assert_eq!(CmaHeader::parse(&good), Some((header, [7; 56])));
        for (at, value) in [(0, 0x10), (0, 1), (1, 0x50), (1, 0)] {
            let mut other = good;
            other[at] = value;
            assert_eq!(CmaHeader::parse(&other), None);
        }
    }

    proptest! {
        /// Any datagram with a known header is emitted as it was parsed, field by field.
        #[test]
        fn every_cm_message_round_trips(
            bytes in proptest::collection::vec(any::<u8>(), MAD_BYTES), attribute in 0x0fu16..0x18,
            header in any::<(u16, u64, u32)>(),
        ) {
            let mut mad: [u8; MAD_BYTES] = bytes.try_into().unwrap();
            let (status, transaction, modifier) = header;
            MadHeader { status, transaction, attribute, modifier }.emit(&mut mad);
            let Some((header, message)) = CmMessage::parse(&mad) else {
                prop_assert!(!(0x10..=0x16).contains(&attribute));
                return Ok(());
            };
            let again = message.emit(header);
            prop_assert_eq!(CmMessage::parse(&again), Some((header, message)));
        }

        #[test]
        fn arbitrary_private_data_headers_fail_or_round_trip(
            bytes in proptest::collection::vec(any::<u8>(), 92), version in 0u8..3, ip: u8,
        ) {
            let mut private: [u8; 92] = bytes.try_into().unwrap();
            (private[0], private[1]) = (version, ip);
            if let Some((header, user)) = CmaHeader::parse(&private) {
                let again = CmaHeader::parse(&header.emit(&user));
                prop_assert_eq!(again, Some((header, user)));
            }
        }
    }
}
