//! SGL descriptors that a command capsule may carry over RDMA.
//!
//! Source: NVMe Base Specification 2.0, "Scatter Gather List (SGL)"; NVMe RDMA Transport
//! Specification, "SGL descriptors".

use core::fmt;

use crate::Status;

/// An unsigned integer of 24 bits: the length of a keyed descriptor.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct U24(u32);

impl U24 {
    /// 16 777 215.
    pub const MAX: Self = Self(0xFF_FFFF);

    /// `value`, if it fits.
    pub const fn new(value: u32) -> Option<Self> {
        if value <= Self::MAX.0 { Some(Self(value)) } else { None }
    }

    /// The value, 0 to 16 777 215.
    pub const fn get(self) -> u32 {
        self.0
    }
}

impl fmt::Display for U24 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for U24 {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

open_enum! {
    /// SGL descriptor type, bits 7:4 of the identifier byte.
    pub struct SglType(u8) {
        DATA_BLOCK = 0x0, "SGL Data Block";
        BIT_BUCKET = 0x1, "SGL Bit Bucket";
        SEGMENT = 0x2, "SGL Segment";
        LAST_SEGMENT = 0x3, "SGL Last Segment";
        KEYED_DATA_BLOCK = 0x4, "Keyed SGL Data Block";
        TRANSPORT_DATA_BLOCK = 0x5, "Transport SGL Data Block";
        VENDOR_SPECIFIC = 0xF, "Vendor Specific";
    }
}

open_enum! {
    /// SGL descriptor sub type, bits 3:0 of the identifier byte.
    pub struct SglSubtype(u8) {
        ADDRESS = 0x0, "Address";
        OFFSET = 0x1, "Offset";
        INVALIDATE_KEY = 0xF, "RDMA Invalidate Remote Key";
    }
}

/// The one descriptor of a command capsule over RDMA, 16 bytes on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Sgl {
    /// Host memory, transferred by RDMA Read or RDMA Write.
    Keyed {
        /// Start, as an address of the memory region.
        addr: u64,
        /// Length in bytes.
        len: U24,
        /// Remote key.
        key: u32,
        /// The host requests Send with Invalidate of `key` as the response.
        invalidate: bool,
    },
    /// Data in the command capsule itself.
    InCapsule {
        /// Start, in bytes from ICDOFF, that is from byte 64 of the capsule when ICDOFF is 0.
        offset: u64,
        /// Length in bytes.
        len: u32,
    },
}

impl Sgl {
    /// No data: the descriptor in commands without data transfer. All zero except for the type.
    pub const NONE: Self = Self::Keyed { addr: 0, len: U24(0), key: 0, invalidate: false };

    /// Creates a keyed descriptor; `None` if `len` needs more than 24 bits.
    pub const fn keyed(addr: u64, len: u32, key: u32, invalidate: bool) -> Option<Self> {
        match U24::new(len) {
            Some(len) => Some(Self::Keyed { addr, len, key, invalidate }),
            None => None,
        }
    }

    /// In-capsule descriptor.
    pub const fn in_capsule(offset: u64, len: u32) -> Self {
        Self::InCapsule { offset, len }
    }

    /// Reads a descriptor. A type or sub type that RDMA capsules cannot use returns SGL Descriptor
    /// Type Invalid, do not retry. Reserved bytes are ignored.
    #[inline(always)]
    pub fn parse(bytes: &[u8; 16]) -> Result<Self, Status> {
        let [address @ .., a, b, c, d, e, f, g, identifier] = *bytes;
        let address = u64::from_le_bytes(address);
        let kind = SglType(identifier >> 4);
        match (kind, SglSubtype(identifier & 0xF)) {
            (
                SglType::KEYED_DATA_BLOCK,
                sub @ (SglSubtype::ADDRESS | SglSubtype::INVALIDATE_KEY),
            ) => Ok(Self::Keyed {
                addr: address,
                len: U24(u32::from_le_bytes([a, b, c, 0])),
                key: u32::from_le_bytes([d, e, f, g]),
                invalidate: sub == SglSubtype::INVALIDATE_KEY,
            }),
            (SglType::DATA_BLOCK, SglSubtype::OFFSET) => {
                Ok(Self::InCapsule { offset: address, len: u32::from_le_bytes([a, b, c, d]) })
            }
            _ => Err(Status::SGL_TYPE_INVALID.with_dnr()),
        }
    }

    /// The descriptor in wire format.
    pub fn emit(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        let [to_address @ .., a, b, c, d, e, f, g, identifier] = &mut bytes;
        match self {
            Self::Keyed { addr, len, key, invalidate } => {
                *to_address = addr.to_le_bytes();
                [*a, *b, *c, _] = len.0.to_le_bytes();
                [*d, *e, *f, *g] = key.to_le_bytes();
                let subtype =
                    if invalidate { SglSubtype::INVALIDATE_KEY } else { SglSubtype::ADDRESS };
                *identifier = SglType::KEYED_DATA_BLOCK.0 << 4 | subtype.0;
            }
            Self::InCapsule { offset, len } => {
                *to_address = offset.to_le_bytes();
                [*a, *b, *c, *d] = len.to_le_bytes();
                *identifier = SglType::DATA_BLOCK.0 << 4 | SglSubtype::OFFSET.0;
            }
        }
        bytes
    }

    /// Length of the data in bytes.
    pub const fn len_bytes(self) -> u32 {
        match self {
            Self::Keyed { len, .. } => len.0,
            Self::InCapsule { len, .. } => len,
        }
    }

    /// The key to invalidate with the response, if the host requested it.
    pub const fn invalidate_key(self) -> Option<u32> {
        match self {
            Self::Keyed { key, invalidate: true, .. } => Some(key),
            _ => None,
        }
    }

    /// The same of a descriptor in wire format, valid or not, of which nothing else is read.
    #[inline]
    pub const fn invalidate_key_of(bytes: &[u8; 16]) -> Option<u32> {
        const INVALIDATING: u8 = SglType::KEYED_DATA_BLOCK.0 << 4 | SglSubtype::INVALIDATE_KEY.0;
        let [.., d, e, f, g, identifier] = *bytes;
        if identifier == INVALIDATING { Some(u32::from_le_bytes([d, e, f, g])) } else { None }
    }
}

/// A Last Segment descriptor of a capsule: the data are described by descriptors in the capsule
/// itself, after the command, 16 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LastSegment {
    /// Offset of the descriptors, in bytes from ICDOFF.
    pub offset: u64,
    /// Length of all descriptors, in bytes.
    pub len: u32,
}

impl LastSegment {
    const IDENTIFIER: u8 = SglType::LAST_SEGMENT.0 << 4 | SglSubtype::OFFSET.0;

    /// Reads a descriptor, if it has this type.
    #[inline]
    pub const fn parse(bytes: &[u8; 16]) -> Option<Self> {
        let [a, b, c, d, e, f, g, h, i, j, k, l, _, _, _, identifier] = *bytes;
        if identifier != Self::IDENTIFIER {
            return None;
        }
        let offset = u64::from_le_bytes([a, b, c, d, e, f, g, h]);
        Some(Self { offset, len: u32::from_le_bytes([i, j, k, l]) })
    }

    /// The descriptor in wire format.
    pub fn emit(self) -> [u8; 16] {
        // The layout is that of data in the capsule.
        let mut bytes = Sgl::in_capsule(self.offset, self.len).emit();
        bytes[15] = Self::IDENTIFIER;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use crate::sgl::*;
    use proptest::prelude::*;

    const INVALID: Result<Sgl, Status> = Err(Status::from_field(0x8000 | 0x011 << 1));

    #[test]
    fn only_the_types_of_rdma_capsules_are_accepted() {
        for identifier in 0..=0xFF {
            let mut bytes = [0; 16];
            bytes[15] = identifier;
            match identifier {
                0x40 | 0x4F | 0x01 => assert!(Sgl::parse(&bytes).is_ok(), "{identifier:#x}"),
                _ => assert_eq!(Sgl::parse(&bytes), INVALID, "{identifier:#x}"),
            }
        }
    }

    #[test]
    fn empty_sgl_is_zero_except_for_the_type() {
        let mut expected = [0; 16];
        expected[15] = 0x40;
        assert_eq!(Sgl::NONE.emit(), expected);
    }

    #[test]
    fn a_length_beyond_24_bits_cannot_be_keyed() {
        assert_eq!(Sgl::keyed(0, 1 << 24, 0, false), None);
        assert_eq!(Sgl::keyed(0, 0xFF_FFFF, 0, false).map(Sgl::len_bytes), Some(0xFF_FFFF));
        assert_eq!(Sgl::in_capsule(0, u32::MAX).len_bytes(), u32::MAX);
    }

    #[test]
    fn only_the_invalidate_sub_type_names_a_key_to_invalidate() {
        let sgl = |invalidate| Sgl::keyed(1, 2, 3, invalidate).expect("fits");
        assert_eq!(sgl(true).invalidate_key(), Some(3));
        assert_eq!(sgl(false).invalidate_key(), None);
        assert_eq!(Sgl::in_capsule(0, 8).invalidate_key(), None);
    }

    proptest! {
        #[test]
        fn last_segment_round_trips_and_other_types_are_refused(offset: u64, len: u32, id: u8) {
            let segment = LastSegment { offset, len };
            let mut bytes = segment.emit();
            prop_assert_eq!(bytes[15], 0x31);
            prop_assert_eq!(LastSegment::parse(&bytes), Some(segment));
            bytes[15] = id;
            prop_assert_eq!(LastSegment::parse(&bytes).is_some(), id == 0x31);
        }

        #[test]
        fn keyed_sgl_round_trips(addr: u64, len in 0u32..1 << 24, key: u32, invalidate: bool) {
            let sgl = Sgl::keyed(addr, len, key, invalidate).expect("24 bits");
            prop_assert_eq!(Sgl::parse(&sgl.emit()), Ok(sgl));
        }

        #[test]
        fn in_capsule_sgl_round_trips(offset: u64, len: u32) {
            let sgl = Sgl::in_capsule(offset, len);
            prop_assert_eq!(Sgl::parse(&sgl.emit()), Ok(sgl));
        }

        #[test]
        fn every_valid_sgl_round_trips(mut bytes: [u8; 16], pick in 0usize..4) {
            bytes[15] = [bytes[15], 0x40, 0x4F, 0x01][pick];
            let key = Sgl::parse(&bytes).ok().and_then(Sgl::invalidate_key);
            prop_assert_eq!(Sgl::invalidate_key_of(&bytes), key);
            if let Ok(sgl) = Sgl::parse(&bytes) {
                if matches!(sgl, Sgl::InCapsule { .. }) {
                    bytes[12..15].fill(0);
                }
                prop_assert_eq!(sgl.emit(), bytes);
            }
        }
    }
}
