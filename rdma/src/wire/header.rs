//! The headers of a packet: base transport header, extended headers, padding and the invariant CRC
//! (IBTA volume 1, chapter 9; annex A17 for RoCEv2). Parsing accepts any bytes, and its only error
//! is [`Malformed`]; reserved bits are ignored on receipt and sent as zero.

use std::time::Duration;

use super::opcode::{Headers, Opcode, Row};
use super::psn::{Msn, Psn, Qpn};

/// The default partition key, the only one on RoCE.
pub const DEFAULT_PKEY: u16 = 0xffff;
/// The queue key of the general services queue pair.
pub const GSI_QKEY: u32 = 0x8001_0000;
/// Bytes of the invariant CRC.
pub const ICRC_BYTES: usize = 4;
/// Bytes of the longest headers before a payload: BTH and AtomicETH.
pub const MAX_HEADER_BYTES: usize = Bth::BYTES + 28;
/// The longest message, in bytes (2^31).
pub const MAX_MESSAGE_BYTES: u32 = 1 << 31;

/// Reason why a datagram is not a valid packet. It is dropped without an answer.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Malformed {
    /// Shorter than its headers, padding and CRC.
    #[error("shorter than its headers say")]
    Short,
    /// The transport version is not 0.
    #[error("unknown transport version")]
    Version,
    /// The operation code is unknown.
    #[error("unknown operation code {0:#04x}")]
    Opcode(u8),
    /// The padding does not fit the payload.
    #[error("padding in a packet without payload to pad")]
    Padding,
}

/// Base transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bth {
    /// Operation code.
    pub opcode: Opcode,
    /// Solicited event: the receiver may use it to notify.
    pub solicited: bool,
    /// Migration state, ignored on receipt. 1 (migrated) is the state of a queue pair without
    /// automatic path migration, and what adapters send; some of them process packets with 0 on a
    /// slow path that drops packets under load.
    pub migrated: bool,
    /// Bytes of padding after the payload, 0 to 3.
    pub pad: u8,
    /// Partition key.
    pub pkey: u16,
    /// Forward congestion notification.
    pub fecn: bool,
    /// Backward congestion notification.
    pub becn: bool,
    /// Destination queue pair.
    pub destination: Qpn,
    /// The requester wants an acknowledgement.
    pub ack_request: bool,
    /// Packet sequence number.
    pub psn: Psn,
}

/// The three words of a header.
#[inline(always)] // for each packet
fn words(b: &[u8; Bth::BYTES]) -> [u32; 3] {
    let word = |at: usize| u32::from_be_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]]);
    [word(0), word(4), word(8)]
}

impl Bth {
    /// Its length.
    pub const BYTES: usize = 12;

    /// A header with the default partition, in migration state "migrated", and no other flags.
    pub const fn new(opcode: Opcode, destination: Qpn, psn: Psn) -> Bth {
        Bth {
            opcode,
            solicited: false,
            migrated: true,
            pad: 0,
            pkey: DEFAULT_PKEY,
            fecn: false,
            becn: false,
            destination,
            ack_request: false,
            psn,
        }
    }

    /// Reads it.
    ///
    /// # Errors
    /// Another transport version, or an unknown operation code.
    #[inline(always)] // for each packet
    pub fn parse(b: &[u8; Bth::BYTES]) -> Result<Bth, Malformed> {
        if b[1] & 0x0f != 0 {
            return Err(Malformed::Version);
        }
        let row = Row::from_wire(b[0]).ok_or(Malformed::Opcode(b[0]))?;
        let [first, second, third] = words(b);
        let has = |word: u32, bit: u32| word >> bit & 1 == 1;
        Ok(Bth {
            opcode: row.opcode,
            solicited: has(first, 23),
            migrated: has(first, 22),
            pad: (first >> 20 & 3) as u8,
            pkey: first as u16,
            fecn: has(second, 31),
            becn: has(second, 30),
            destination: Qpn::new(second),
            ack_request: has(third, 31),
            psn: Psn::new(third),
        })
    }

    /// The queue pair that a datagram is for, whatever else is in it; none if it is too short.
    #[inline(always)] // for each packet
    pub(crate) fn destination_of(datagram: &[u8]) -> Option<Qpn> {
        let [_, second, _] = words(datagram.first_chunk()?);
        Some(Qpn::new(second))
    }

    /// Writes it.
    #[inline]
    pub fn emit(&self) -> [u8; Bth::BYTES] {
        let flag = |on: bool, bit: u32| u32::from(on) << bit;
        let words = [
            u32::from(self.opcode.to_wire()) << 24
                | flag(self.solicited, 23)
                | flag(self.migrated, 22)
                | u32::from(self.pad & 3) << 20
                | u32::from(self.pkey),
            flag(self.fecn, 31) | flag(self.becn, 30) | self.destination.get(),
            flag(self.ack_request, 31) | self.psn.get(),
        ];
        let mut bytes = [0; Bth::BYTES];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&word.to_be_bytes());
        }
        bytes
    }

    /// Whether the partition key is that of the default partition, with at least one of the two
    /// ends a full member (we are one).
    pub const fn is_default_partition(&self) -> bool {
        self.pkey & 0x7fff == 0x7fff
    }
}

/// RDMA extended transport header: the memory of a write or read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reth {
    /// Address, in the address space of its owner.
    pub address: u64,
    /// Remote key.
    pub key: u32,
    /// Bytes of the whole message, at most 2^31.
    pub length: u32,
}

/// Acknowledge extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Aeth {
    /// Kind of acknowledgement.
    pub syndrome: Syndrome,
    /// Messages completed.
    pub msn: Msn,
}

/// Datagram extended transport header.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Deth {
    /// Queue key of the destination.
    pub qkey: u32,
    /// Queue pair of the sender.
    pub source: Qpn,
}

/// The syndrome of an acknowledgement (IBTA volume 1, 9.7.5.2.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Syndrome {
    /// Executed; the code is the number of messages for which the responder has receives.
    Ack(Credits),
    /// No receive posted: try again after the time of the code.
    Rnr(RnrTimer),
    /// Rejected.
    Nak(Nak),
    /// A reserved value; the packet is dropped.
    Reserved(u8),
}

/// Credit code of an acknowledgement, 0 to 31. 31 means that no limit is reported; we send that,
/// and respect others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Credits(u8);

impl Credits {
    /// No limit reported.
    pub const UNLIMITED: Credits = Credits(31);

    /// From a code; bits above the lowest five are ignored.
    pub const fn new(code: u8) -> Credits {
        Credits(code & 31)
    }

    /// The code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// Number of messages that may be sent; none if no limit is reported.
    pub const fn messages(self) -> Option<u32> {
        match self.0 {
            31 => None,
            code @ 0..4 => Some(code as u32),
            // From 4 on, two codes to every doubling: 2^n and 1.5 * 2^n.
            code => Some((2 + (code as u32 & 1)) << (code / 2 - 1)),
        }
    }
}

/// Time code of a receiver-not-ready answer, 0 to 31.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RnrTimer(u8);

impl RnrTimer {
    /// From a code; bits above the lowest five are ignored.
    pub const fn new(code: u8) -> RnrTimer {
        RnrTimer(code & 31)
    }

    /// The code.
    pub const fn code(self) -> u8 {
        self.0
    }

    /// How long the requester waits: 10 µs to 655.36 ms (table 46 of the architecture).
    pub const fn duration(self) -> Duration {
        let hundredths = match self.0 {
            0 => 65536,
            code @ 1..=3 => code as u64,
            code => (2 + (code as u64 & 1)) << (code / 2 - 1),
        };
        Duration::from_micros(hundredths * 10)
    }
}

/// NAK code of a rejected request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Nak {
    /// A packet is missing; the only one that does not end the connection.
    Sequence,
    /// The request is invalid.
    InvalidRequest,
    /// The peer has no access to the memory.
    RemoteAccess,
    /// The responder failed.
    RemoteOperation,
    /// Invalid reliable-datagram request (not used on reliable connections).
    InvalidRd,
}

impl Syndrome {
    /// The acknowledgement that we send: no limit reported.
    pub const ACK: Syndrome = Syndrome::Ack(Credits::UNLIMITED);

    /// From its byte.
    pub const fn from_wire(byte: u8) -> Syndrome {
        match (byte >> 5, byte & 31) {
            (0, code) => Syndrome::Ack(Credits(code)),
            (1, code) => Syndrome::Rnr(RnrTimer(code)),
            (3, 0) => Syndrome::Nak(Nak::Sequence),
            (3, 1) => Syndrome::Nak(Nak::InvalidRequest),
            (3, 2) => Syndrome::Nak(Nak::RemoteAccess),
            (3, 3) => Syndrome::Nak(Nak::RemoteOperation),
            (3, 4) => Syndrome::Nak(Nak::InvalidRd),
            _ => Syndrome::Reserved(byte),
        }
    }

    /// Its byte.
    pub const fn to_wire(self) -> u8 {
        match self {
            Syndrome::Ack(Credits(code)) => code,
            Syndrome::Rnr(RnrTimer(code)) => 0x20 | code,
            Syndrome::Nak(Nak::Sequence) => 0x60,
            Syndrome::Nak(Nak::InvalidRequest) => 0x61,
            Syndrome::Nak(Nak::RemoteAccess) => 0x62,
            Syndrome::Nak(Nak::RemoteOperation) => 0x63,
            Syndrome::Nak(Nak::InvalidRd) => 0x64,
            Syndrome::Reserved(byte) => byte,
        }
    }
}

/// The extended headers of one packet; the operation code determines which there are. Those of
/// atomics, which are not executed, are emitted as zeros.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Extended {
    /// Datagram header.
    pub deth: Option<Deth>,
    /// Memory of a write or read.
    pub reth: Option<Reth>,
    /// Acknowledgement.
    pub aeth: Option<Aeth>,
    /// Immediate data, in wire order.
    pub immediate: Option<[u8; 4]>,
    /// Key to invalidate.
    pub invalidate: Option<u32>,
    /// Bit `n`, counted from the lowest of the first byte: packet `n + 1` after that of the base
    /// transport header was received.
    pub held: Option<[u8; 16]>,
}

/// The bytes before a payload: at most [`MAX_HEADER_BYTES`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HeaderBytes {
    bytes: [u8; MAX_HEADER_BYTES],
    len: u8,
}

/// The extended header of most packets: of a send, write or read, or of a response.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SingleExt {
    /// None.
    None,
    /// Memory of a write or read.
    Memory(Reth),
    /// Key to invalidate.
    Invalidate(u32),
    /// Acknowledgement.
    Acknowledge(Aeth),
}

impl HeaderBytes {
    /// Emits the headers of a packet with at most one extended header, faster than
    /// [`HeaderBytes::emit`].
    pub fn single(bth: &Bth, ext: SingleExt) -> HeaderBytes {
        let mut out = HeaderBytes { bytes: [0; MAX_HEADER_BYTES], len: Bth::BYTES as u8 };
        out.bytes[..Bth::BYTES].copy_from_slice(&bth.emit());
        match ext {
            SingleExt::None => {}
            SingleExt::Memory(reth) => {
                out.bytes[12..20].copy_from_slice(&reth.address.to_be_bytes());
                out.bytes[20..24].copy_from_slice(&reth.key.to_be_bytes());
                out.bytes[24..28].copy_from_slice(&reth.length.to_be_bytes());
                out.len = 28;
            }
            SingleExt::Invalidate(key) => {
                out.bytes[12..16].copy_from_slice(&key.to_be_bytes());
                out.len = 16;
            }
            SingleExt::Acknowledge(aeth) => {
                out.bytes[12] = aeth.syndrome.to_wire();
                out.bytes[13..16].copy_from_slice(&aeth.msn.to_wire());
                out.len = 16;
            }
        }
        out
    }

    /// Emits a base transport header and its extended headers. A header that the operation code
    /// requires and `ext` lacks is omitted; one that it does not have is not written.
    pub fn emit(bth: &Bth, ext: &Extended) -> HeaderBytes {
        let mut out = HeaderBytes { bytes: [0; MAX_HEADER_BYTES], len: Bth::BYTES as u8 };
        let headers = bth.opcode.row().headers;
        out.bytes[..Bth::BYTES].copy_from_slice(&bth.emit());
        if let Some(deth) = ext.deth.filter(|_| headers.has(Headers::DETH)) {
            out.push(&deth.qkey.to_be_bytes());
            out.push(&deth.source.get().to_be_bytes());
        }
        if let Some(reth) = ext.reth.filter(|_| headers.has(Headers::RETH)) {
            out.push(&reth.address.to_be_bytes());
            out.push(&reth.key.to_be_bytes());
            out.push(&reth.length.to_be_bytes());
        }
        if headers.has(Headers::ATOMIC) {
            out.push(&[0; 28]);
        }
        if let Some(aeth) = ext.aeth.filter(|_| headers.has(Headers::AETH)) {
            out.push(&[aeth.syndrome.to_wire()]);
            out.push(&aeth.msn.to_wire());
        }
        if headers.has(Headers::ATOMIC_ACK) {
            out.push(&[0; 8]);
        }
        if let Some(immediate) = ext.immediate.filter(|_| headers.has(Headers::IMMEDIATE)) {
            out.push(&immediate);
        }
        if let Some(key) = ext.invalidate.filter(|_| headers.has(Headers::IETH)) {
            out.push(&key.to_be_bytes());
        }
        if let Some(held) = ext.held.filter(|_| headers.has(Headers::HELD)) {
            out.push(&held);
        }
        out
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    /// Sets the bit of [`Bth::ack_request`].
    #[inline]
    pub(crate) fn request_ack(&mut self) {
        self.bytes[8] |= 0x80;
    }

    /// Appends the bytes. (A copy of constant length is cheaper than one of a variable length.)
    #[inline]
    pub(crate) fn append_to(&self, bytes: &mut Vec<u8>) {
        let end = bytes.len() + usize::from(self.len);
        bytes.extend_from_slice(&self.bytes);
        bytes.truncate(end);
    }

    fn push(&mut self, bytes: &[u8]) {
        let at = usize::from(self.len);
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self.len += bytes.len() as u8;
    }
}

impl std::fmt::Debug for HeaderBytes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:02x?}", self.as_slice())
    }
}

/// A parsed datagram. Its CRC has not been checked. Extended headers are parsed where they are used:
/// most packets have one or none. (Packets are equal if their bytes are, also in reserved bits.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Packet<'a> {
    /// Base transport header.
    pub bth: Bth,
    /// The payload, without padding.
    pub payload: &'a [u8],
    row: &'static Row,
    /// The extended headers: as many bytes as the operation code has.
    headers: &'a [u8],
}

impl<'a> Packet<'a> {
    /// A packet without extended headers.
    pub fn plain(bth: Bth, payload: &'a [u8]) -> Packet<'a> {
        Packet { bth, payload, row: bth.opcode.row(), headers: &[] }
    }

    /// Parses a datagram (the payload of UDP, including the invariant CRC).
    ///
    /// # Errors
    /// It is not a packet of this transport.
    #[inline(always)] // for each packet, so that only what is used is kept
    pub fn parse(datagram: &'a [u8]) -> Result<Packet<'a>, Malformed> {
        let (body, _) = datagram.split_last_chunk::<ICRC_BYTES>().ok_or(Malformed::Short)?;
        let (first, rest) = body.split_first_chunk().ok_or(Malformed::Short)?;
        let bth = Bth::parse(first)?;
        let row = bth.opcode.row();
        let (headers, rest) = rest.split_at_checked(row.header_bytes).ok_or(Malformed::Short)?;
        let len = rest.len().checked_sub(usize::from(bth.pad)).ok_or(Malformed::Padding)?;
        Ok(Packet { bth, payload: &rest[..len], row, headers })
    }

    /// The row of its operation code.
    #[inline]
    pub fn row(&self) -> &'static Row {
        self.row
    }

    /// The bytes of its extended headers.
    pub fn headers(&self) -> &'a [u8] {
        self.headers
    }

    /// All extended headers.
    pub fn ext(&self) -> Extended {
        Extended {
            deth: self.deth(),
            reth: self.reth(),
            aeth: self.aeth(),
            immediate: self.immediate(),
            invalidate: self.invalidate(),
            held: self.held(),
        }
    }

    /// Datagram header.
    pub fn deth(&self) -> Option<Deth> {
        let b: &[u8; 8] = self.find(Headers::DETH, 0)?;
        Some(Deth { qkey: be32(b, 0), source: Qpn::new(be32(b, 4)) })
    }

    /// Memory of a write or read.
    #[inline]
    pub fn reth(&self) -> Option<Reth> {
        let b: &[u8; 16] = self.find(Headers::RETH, 0)?;
        Some(Reth { address: be64(b, 0), key: be32(b, 8), length: be32(b, 12) })
    }

    /// Acknowledgement.
    #[inline]
    pub fn aeth(&self) -> Option<Aeth> {
        let b: &[u8; 4] = self.find(Headers::AETH, 0)?;
        Some(Aeth { syndrome: Syndrome::from_wire(b[0]), msn: Msn::new(be32(b, 0)) })
    }

    /// Key to invalidate.
    #[inline]
    pub fn invalidate(&self) -> Option<u32> {
        self.find(Headers::IETH, 0).map(|b| u32::from_be_bytes(*b))
    }

    /// Immediate data.
    #[inline]
    pub fn immediate(&self) -> Option<[u8; 4]> {
        self.find(Headers::IMMEDIATE, self.headers.len().saturating_sub(4)).copied()
    }

    /// Which packets are there; see [`Extended::held`].
    pub fn held(&self) -> Option<[u8; 16]> {
        self.find(Headers::HELD, 4).copied()
    }

    /// The bytes of one extended header. Where they are follows from the table of operation codes:
    /// no packet has two of those that begin at 0, and immediate data are the last.
    #[inline]
    fn find<const N: usize>(&self, header: Headers, at: usize) -> Option<&'a [u8; N]> {
        if !self.row.headers.has(header) {
            return None;
        }
        self.headers.get(at..)?.first_chunk()
    }
}

fn be32<const N: usize>(bytes: &[u8; N], at: usize) -> u32 {
    u32::from_be_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn be64<const N: usize>(bytes: &[u8; N], at: usize) -> u64 {
    u64::from(be32(bytes, at)) << 32 | u64::from(be32(bytes, at + 4))
}

/// Bytes of padding after a payload of `len` bytes.
pub const fn padding(len: usize) -> u8 {
    (len.wrapping_neg() & 3) as u8
}

#[cfg(test)]
mod tests {
    use crate::wire::header::*;
    use proptest::prelude::*;

    #[test]
    fn single_header_encoding_matches_the_general_one() {
        let reth = Reth { address: 0x0102_0304_0506_0708, key: 0x1112_1314, length: 4096 };
        let aeth = Aeth { syndrome: Syndrome::Nak(Nak::Sequence), msn: Msn::new(0x21_2223) };
        let none = Extended::default();
        for (opcode, single, ext) in [
            (Opcode::SendOnly, SingleExt::None, none),
            (Opcode::WriteOnly, SingleExt::Memory(reth), Extended { reth: Some(reth), ..none }),
            (
                Opcode::SendOnlyInvalidate,
                SingleExt::Invalidate(7),
                Extended { invalidate: Some(7), ..none },
            ),
            (
                Opcode::Acknowledge,
                SingleExt::Acknowledge(aeth),
                Extended { aeth: Some(aeth), ..none },
            ),
        ] {
            let bth = Bth::new(opcode, Qpn::new(7), Psn::new(5));
            assert_eq!(HeaderBytes::single(&bth, single), HeaderBytes::emit(&bth, &ext));
        }
    }

    #[test]
    fn credit_codes_match_the_specification_table() {
        let table = [
            0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024,
            1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
        ];
        for (code, messages) in table.into_iter().enumerate() {
            assert_eq!(Credits::new(code as u8).messages(), Some(messages), "code {code}");
        }
        assert_eq!(Credits::UNLIMITED.messages(), None);
    }

    #[test]
    fn rnr_timer_codes_match_the_specification_table() {
        let table = [
            65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768,
            1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
        ];
        for (code, hundredths) in table.into_iter().enumerate() {
            let wait = RnrTimer::new(code as u8).duration();
            assert_eq!(wait, Duration::from_micros(hundredths * 10), "code {code}");
        }
    }

    #[test]
    fn padding_aligns_the_payload_to_four_bytes() {
        assert_eq!([0, 1, 2, 3, 4, 5].map(padding), [0, 3, 2, 1, 0, 3]);
    }

    #[test]
    fn every_packet_of_ours_is_in_migration_state_migrated() {
        for opcode in Opcode::all() {
            let bytes = Bth::new(opcode, Qpn::new(17), Psn::new(0)).emit();
            assert_eq!(bytes[1] & 0x40, 0x40, "{opcode:?}");
        }
    }

    #[test]
    fn padding_longer_than_the_payload_is_no_packet() {
        let mut bth = Bth::new(Opcode::SendOnly, Qpn::new(17), Psn::new(0));
        bth.pad = 3;
        let mut datagram = bth.emit().to_vec();
        datagram.extend([0; 2 + ICRC_BYTES]);
        assert_eq!(Packet::parse(&datagram), Err(Malformed::Padding));
        datagram.push(0);
        assert_eq!(Packet::parse(&datagram).map(|p| p.payload.len()), Ok(0));
    }

    fn bth() -> impl Strategy<Value = Bth> {
        let codes: Vec<Opcode> = Opcode::all().collect();
        let code = proptest::sample::select(codes);
        (code, any::<(bool, bool, bool, bool, bool)>(), 0u8..4, any::<u16>(), any::<[u32; 2]>())
            .prop_map(|(opcode, flags, pad, pkey, numbers)| Bth {
                opcode,
                solicited: flags.0,
                migrated: flags.1,
                pad,
                pkey,
                fecn: flags.2,
                becn: flags.3,
                destination: Qpn::new(numbers[0]),
                ack_request: flags.4,
                psn: Psn::new(numbers[1]),
            })
    }

    proptest! {
        #[test]
        fn every_syndrome_round_trips(byte: u8) {
            prop_assert_eq!(Syndrome::from_wire(byte).to_wire(), byte);
        }

        #[test]
        fn headers_survive_emission_and_parsing(
            bth in bth(), address: u64, w in any::<[u32; 6]>(), b in any::<[u8; 4]>(),
            payload in proptest::collection::vec(any::<u8>(), 0..64),
        ) {
            let headers = bth.opcode.row().headers;
            let ext = Extended {
                deth: headers.has(Headers::DETH)
                    .then(|| Deth { qkey: w[0], source: Qpn::new(w[1]) }),
                reth: headers.has(Headers::RETH)
                    .then(|| Reth { address, key: w[2], length: w[3] }),
                aeth: headers.has(Headers::AETH)
                    .then(|| Aeth { syndrome: Syndrome::from_wire(b[0]), msn: Msn::new(w[4]) }),
                immediate: headers.has(Headers::IMMEDIATE).then_some(b),
                invalidate: headers.has(Headers::IETH).then_some(w[5]),
                held: headers.has(Headers::HELD).then_some([b[1]; 16]),
            };
            let head = HeaderBytes::emit(&bth, &ext);
            prop_assert_eq!(head.as_slice().len(), Bth::BYTES + bth.opcode.row().header_bytes);
            let mut datagram = head.as_slice().to_vec();
            datagram.extend(&payload);
            datagram.extend(vec![0; usize::from(bth.pad) + ICRC_BYTES]);
            let packet = Packet::parse(&datagram).unwrap();
            prop_assert_eq!((packet.bth, packet.ext(), packet.payload), (bth, ext, &payload[..]));
            prop_assert_eq!(Bth::destination_of(&datagram), Some(bth.destination));
            prop_assert_eq!(Bth::destination_of(&datagram[..Bth::BYTES - 1]), None);
            for cut in 0..head.as_slice().len() {
                prop_assert_eq!(Packet::parse(&datagram[..cut]), Err(Malformed::Short));
            }
        }

        #[test]
        fn arbitrary_bytes_parse_consistently_or_fail(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(packet) = Packet::parse(&bytes) {
                prop_assert!(packet.payload.len() < bytes.len());
                let again = HeaderBytes::emit(&packet.bth, &packet.ext());
                let rest = packet.payload.len() + usize::from(packet.bth.pad) + ICRC_BYTES;
                prop_assert_eq!(again.as_slice().len() + rest, bytes.len());
            }
        }
    }
}
