//! The management datagram (MAD) of 256 bytes (IBTA volume 1, 13.4.3 "Management Datagram Format"),
//! sent as one unreliable datagram from queue pair 1 to queue pair 1.

/// Bytes of every management datagram.
pub const MAD_BYTES: usize = 256;
/// Bytes of its common header.
pub const MAD_HEADER_BYTES: usize = 24;

const BASE_VERSION: u8 = 1;
const CLASS_COMMUNICATION: u8 = 7;
const CLASS_VERSION: u8 = 2;
const METHOD_SEND: u8 = 3;

/// The fields of the common header that vary among messages of connection management.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct MadHeader {
    /// Status; 0 in all known messages.
    pub status: u16,
    /// Chosen by the sender of the first message of an exchange, echoed by the other side.
    pub transaction: u64,
    /// Attribute: the kind of message.
    pub attribute: u16,
    /// Opaque (Linux puts the enhanced-connection attribute here, 0 for rxe).
    pub modifier: u32,
}

impl MadHeader {
    /// Parses the header of a communication management message; none if the datagram has another
    /// version, class or method.
    pub fn parse(mad: &[u8; MAD_BYTES]) -> Option<MadHeader> {
        if mad[..4] != [BASE_VERSION, CLASS_COMMUNICATION, CLASS_VERSION, METHOD_SEND] {
            return None;
        }
        Some(MadHeader {
            status: u16::from_be_bytes(piece(mad, 4)),
            transaction: u64::from_be_bytes(piece(mad, 8)),
            attribute: u16::from_be_bytes(piece(mad, 16)),
            modifier: u32::from_be_bytes(piece(mad, 20)),
        })
    }

    /// Writes the header; reserved and class-specific bytes become 0.
    pub fn emit(&self, mad: &mut [u8; MAD_BYTES]) {
        mad[..4].copy_from_slice(&[BASE_VERSION, CLASS_COMMUNICATION, CLASS_VERSION, METHOD_SEND]);
        mad[4..6].copy_from_slice(&self.status.to_be_bytes());
        mad[6..8].fill(0);
        mad[8..16].copy_from_slice(&self.transaction.to_be_bytes());
        mad[16..18].copy_from_slice(&self.attribute.to_be_bytes());
        mad[18..20].fill(0);
        mad[20..24].copy_from_slice(&self.modifier.to_be_bytes());
    }
}

/// `N` bytes from `at`. For every caller the sum of both is a constant below 256.
pub(crate) fn piece<const N: usize>(mad: &[u8; MAD_BYTES], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&mad[at..at + N]);
    out
}

#[cfg(test)]
mod tests {
    use crate::soft::cm::mad::*;
    use proptest::prelude::*;

    #[test]
    fn other_mad_versions_classes_and_methods_are_refused() {
        let mut mad = [0; MAD_BYTES];
        MadHeader::default().emit(&mut mad);
        for at in 0..4 {
            let mut other = mad;
            other[at] ^= 1;
            assert_eq!(MadHeader::parse(&other), None);
        }
        assert_eq!(MadHeader::parse(&mad), Some(MadHeader::default()));
    }

    proptest! {
        #[test]
        fn mad_headers_round_trip(status: u16, transaction: u64, attribute: u16, modifier: u32) {
            let header = MadHeader { status, transaction, attribute, modifier };
            let mut mad = [0xee; MAD_BYTES];
            header.emit(&mut mad);
            prop_assert_eq!(MadHeader::parse(&mad), Some(header));
            prop_assert!(mad[MAD_HEADER_BYTES..].iter().all(|b| *b == 0xee));
        }
    }
}
