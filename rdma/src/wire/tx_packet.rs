//! An outgoing datagram: headers, payload (in the pool), and padding with the invariant CRC.

use super::flow_crc::FlowCrc;
use super::header::{Bth, Extended, HeaderBytes, ICRC_BYTES, SingleExt, padding};
use super::icrc::{Flow, Icrc};

/// A range of a remote region that a peer may access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    pub(crate) slot: u32,
    pub(crate) at: u32,
    pub(crate) len: u32,
}

/// Location of a payload. Valid until the next mutation of the queue pair it came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Payload {
    /// None.
    None,
    /// In the buffer of posted work: its number, counted by the queue pair, and the first byte.
    Posted {
        /// Number of the work.
        work: u64,
        /// Offset of the first byte in the buffer's window.
        at: u32,
    },
    /// In a remote region.
    Exposed(Place),
    /// The reserved bytes of a congestion notification.
    Reserved,
    /// A message of connection management, by its index among those that are not freed.
    Management(usize),
}

/// One datagram, without its CRC, which depends on its place in a train.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TxPacket {
    header: HeaderBytes,
    payload: Payload,
    payload_bytes: u32,
}

/// Padding and invariant CRC: 4 to 7 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Trailer {
    bytes: [u8; 3 + ICRC_BYTES],
    len: u8,
}

impl Trailer {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl TxPacket {
    /// A datagram with these headers and `payload_bytes` of payload; sets the pad count.
    pub fn new(bth: Bth, ext: &Extended, payload: Payload, payload_bytes: u32) -> TxPacket {
        let bth = Bth { pad: padding(payload_bytes as usize), ..bth };
        TxPacket { header: HeaderBytes::emit(&bth, ext), payload, payload_bytes }
    }

    /// A datagram with at most one extended header.
    pub fn single(bth: Bth, ext: SingleExt, payload: Payload, payload_bytes: u32) -> TxPacket {
        let bth = Bth { pad: padding(payload_bytes as usize), ..bth };
        TxPacket { header: HeaderBytes::single(&bth, ext), payload, payload_bytes }
    }

    /// Requests an acknowledgement.
    #[inline]
    pub(crate) fn request_ack(&mut self) {
        self.header.request_ack();
    }

    /// The headers.
    pub fn header(&self) -> &[u8] {
        self.header.as_slice()
    }

    /// Location of the payload.
    pub fn payload(&self) -> Payload {
        self.payload
    }

    /// Bytes of payload, without padding.
    pub fn payload_bytes(&self) -> u32 {
        self.payload_bytes
    }

    /// Bytes of the whole datagram, base transport header to CRC.
    pub fn datagram_bytes(&self) -> usize {
        let payload = self.payload_bytes as usize;
        self.header().len() + payload + usize::from(padding(payload)) + ICRC_BYTES
    }

    /// Appends the whole datagram to others of its train, for a flow and an IPv4 identification
    /// (see [`super::icrc::train_identification`]). No effect if the payload has another length
    /// than announced, because the queue pair was changed since.
    #[inline]
    pub(crate) fn append(
        &self,
        flow: &mut FlowCrc,
        identification: u16,
        payload: &[u8],
        train: &mut Vec<u8>,
    ) -> bool {
        const PADDING: [u8; 3] = [0; 3];
        if payload.len() != self.payload_bytes as usize {
            return false;
        }
        let (start, pad) = (train.len(), usize::from(padding(payload.len())));
        self.header.append_to(train);
        train.extend_from_slice(payload);
        if pad > 0 {
            train.extend_from_slice(&PADDING[..pad]);
        }
        let written = &train[start..];
        let byte_4 = written.get(4).copied().unwrap_or_default();
        let mut icrc = flow.begin(identification, written.len() + ICRC_BYTES, byte_4);
        // One contiguous range that has just been written: cheaper than piece by piece.
        icrc.update(written);
        train.extend_from_slice(&icrc.finish());
        true
    }

    /// Computes the CRC for a flow, an IPv4 identification (see
    /// [`super::icrc::train_identification`]) and the bytes of the payload.
    pub fn seal(&self, flow: &Flow, identification: u16, payload: &[u8]) -> Trailer {
        let (header, pad) = (self.header(), usize::from(padding(payload.len())));
        let mut bytes = [0; 3 + ICRC_BYTES];
        // Every header begins with a base transport header, written by `new`.
        let Some((bth, rest)) = header.split_first_chunk::<{ Bth::BYTES }>() else {
            return Trailer { bytes, len: 0 };
        };
        let mut icrc = Icrc::start(flow, identification, self.datagram_bytes(), bth);
        icrc.update(rest);
        icrc.update(payload);
        icrc.update(&bytes[..pad]);
        bytes[pad..pad + ICRC_BYTES].copy_from_slice(&icrc.finish());
        Trailer { bytes, len: (pad + ICRC_BYTES) as u8 }
    }
}
