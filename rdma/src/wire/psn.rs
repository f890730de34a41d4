//! 24-bit numbers of the wire: packet sequence numbers and their arithmetic (IBTA volume 1,
//! 9.7.1 "Packet Sequence Numbers"), queue pair numbers and message sequence numbers.

use std::fmt;

/// Bits of a 24-bit field.
const MASK: u32 = 0x00ff_ffff;

/// Reads three bytes, most significant first.
const fn from_wire(bytes: [u8; 3]) -> u32 {
    u32::from_be_bytes([0, bytes[0], bytes[1], bytes[2]])
}

/// Writes the low 24 bits, most significant byte first.
const fn to_wire(value: u32) -> [u8; 3] {
    let b = value.to_be_bytes();
    [b[1], b[2], b[3]]
}

/// A packet sequence number: a serial number modulo 2^24. It has no total order; compare two of
/// them with [`Psn::since`], which is correct as long as they are less than 2^23 apart.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Psn {
        Psn(value & MASK)
    }

    /// The value, 0 to 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// From its three bytes on the wire.
    pub const fn from_wire(bytes: [u8; 3]) -> Psn {
        Psn(from_wire(bytes))
    }

    /// Its three bytes on the wire.
    pub const fn to_wire(self) -> [u8; 3] {
        to_wire(self.0)
    }

    /// The number `count` packets later, modulo 2^24.
    #[must_use]
    pub const fn add(self, count: u32) -> Psn {
        Psn(self.0.wrapping_add(count) & MASK)
    }

    /// The number one packet earlier.
    #[must_use]
    pub const fn previous(self) -> Psn {
        self.add(MASK)
    }

    /// Number of packets from `other` to `self`, negative if `self` is before it: -2^23 to 2^23 -
    /// 1.
    pub const fn since(self, other: Psn) -> i32 {
        ((self.0.wrapping_sub(other.0) << 8) as i32) >> 8
    }

    /// Whether this is one of the `count` numbers that begin with `first` (`count` <= 2^24).
    pub const fn is_within(self, first: Psn, count: u32) -> bool {
        self.0.wrapping_sub(first.0) & MASK < count
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({:#08x})", self.0)
    }
}

/// A queue pair number. 0 is not used, 1 is the one for connection management.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
pub struct Qpn(u32);

impl Qpn {
    /// The general services queue pair, to which connection management is addressed.
    pub const GSI: Qpn = Qpn(1);

    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Qpn {
        Qpn(value & MASK)
    }

    /// The value, 0 to 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// From its three bytes on the wire.
    pub const fn from_wire(bytes: [u8; 3]) -> Qpn {
        Qpn(from_wire(bytes))
    }

    /// Its three bytes on the wire.
    pub const fn to_wire(self) -> [u8; 3] {
        to_wire(self.0)
    }
}

impl fmt::Debug for Qpn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Qpn({:#x})", self.0)
    }
}

/// A message sequence number: the number of messages that a responder has completed, modulo 2^24.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default, Debug)]
pub struct Msn(u32);

impl Msn {
    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Msn {
        Msn(value & MASK)
    }

    /// The value, 0 to 2^24 - 1.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// From its three bytes on the wire.
    pub const fn from_wire(bytes: [u8; 3]) -> Msn {
        Msn(from_wire(bytes))
    }

    /// Its three bytes on the wire.
    pub const fn to_wire(self) -> [u8; 3] {
        to_wire(self.0)
    }

    /// The next number.
    #[must_use]
    pub const fn next(self) -> Msn {
        Msn::new(self.0 + 1)
    }
}

#[cfg(test)]
mod tests {
    use crate::wire::psn::*;
    use proptest::prelude::*;

    #[test]
    fn order_survives_the_wrap() {
        let last = Psn::new(0xff_ffff);
        assert_eq!(last.add(1), Psn::new(0));
        assert_eq!(Psn::new(0).previous(), last);
        assert_eq!(Psn::new(3).since(last), 4);
        assert_eq!(last.since(Psn::new(3)), -4);
        assert_eq!(Psn::new(0x80_0000).since(Psn::new(0)), -(1 << 23));
        assert_eq!(Psn::new(0x7f_ffff).since(Psn::new(0)), (1 << 23) - 1);
        assert!(Psn::new(1).is_within(last, 3));
        assert!(!Psn::new(2).is_within(last, 3));
        assert!(!last.is_within(last, 0));
    }

    #[test]
    fn bytes_are_big_endian() {
        assert_eq!(Psn::new(0x4e_2dc0).to_wire(), [0x4e, 0x2d, 0xc0]);
        assert_eq!(Qpn::from_wire([1, 2, 3]).get(), 0x01_0203);
        assert_eq!(Msn::new(0xff_ffff).next(), Msn::new(0));
    }

    proptest! {
        #[test]
        fn psn_addition_and_distance_agree(start: u32, step in 0u32..1 << 23) {
            let start = Psn::new(start);
            let later = start.add(step);
            prop_assert_eq!(later.since(start), step as i32);
            prop_assert_eq!(start.since(later), -(step as i32));
            prop_assert_eq!(Psn::from_wire(later.to_wire()), later);
            prop_assert!(later.is_within(start, step + 1) && !later.is_within(start, step));
        }
    }
}
