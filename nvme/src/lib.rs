//! Formats and names of the NVMe specifications: no I/O, no clock, no allocation, no `unsafe`.
//!
//! * **Revisions.** NVM Express Base Specification 2.0 (with the 1.4 fields that hosts still send),
//!   NVM Command Set Specification 1.0, NVMe over Fabrics 1.1 and the NVMe RDMA Transport
//!   Specification 1.0. Sections are cited by name, because their numbers move between revisions.
//! * **Byte order.** Everything is little-endian, except identifiers that are byte strings (EUI-64,
//!   NGUID, UUID, IEEE OUI), which are kept as arrays in wire order.
//! * **Zero-based values.** A field that holds "count minus one" on the wire ends in `_z` and is
//!   never converted silently. Other numbers carry their unit: `_bytes`, `_ms`, `_us`.
//! * **Open enums.** A code is a newtype over its integer with named constants, so every value that
//!   a peer may send is representable, and printable.
//! * **Total parsers.** Input is a fixed array and every content of it parses; only if bytes can
//!   contradict each other a parser returns a `Result`, whose error is the one to send to the peer.
//!
//! A structure of the specifications is one table here: field, type, byte offset. The macros below
//! convert a table to a struct, its `parse` and its `emit`, and check at compile time that fields
//! neither overlap nor exceed the structure.

#![cfg_attr(not(test), no_std)]

/// A value with a fixed place in a structure.
pub(crate) trait Field: Sized {
    /// Size on the wire, in bytes.
    const BYTES: usize;
    /// Reads the value from the first `BYTES` of `from`.
    fn get(from: &[u8]) -> Self;
    /// Writes the value to the first `BYTES` of `to`.
    fn put(&self, to: &mut [u8]);
}

/// A value that fits a bit range.
pub(crate) trait Bits: Sized {
    /// The widest range that the type can hold.
    const WIDTH: u32;
    /// Converts from the bits of the range, at bit 0.
    fn from_bits(bits: u64) -> Self;
    /// Converts to bits, at bit 0.
    fn into_bits(self) -> u64;
}

/// Structure of fixed size: a table of fields with byte offsets, in wire order.
///
/// `[N]` makes `emit` return an array, `[page N]` makes it fill the caller's array, which it clears
/// first.
macro_rules! wire {
    (@emit $name:ident, $size:literal, { $($field:ident = $offset:literal,)* }) => {
        /// The structure on the wire. Bytes that belong to no field are zero.
        #[inline]
        pub fn emit(&self) -> [u8; $size] {
            let mut bytes = [0; $size];
            $( $crate::Field::put(&self.$field, &mut bytes[$offset..]); )*
            bytes
        }
    };
    (@field page $name:ident, $size:literal) => {};
    (@field $name:ident, $size:literal) => {
        /// As a field of a larger structure.
        impl $crate::Field for $name {
            const BYTES: usize = $size;
            #[inline]
            fn get(from: &[u8]) -> Self {
                Self::parse(&$crate::Field::get(from))
            }
            #[inline]
            fn put(&self, to: &mut [u8]) {
                $crate::Field::put(&self.emit(), to);
            }
        }
    };
    (@emit page $name:ident, $size:literal, { $($field:ident = $offset:literal,)* }) => {
        /// Writes the whole structure. Bytes that belong to no field become zero.
        pub fn emit(&self, bytes: &mut [u8; $size]) {
            *bytes = [0; $size];
            $( $crate::Field::put(&self.$field, &mut bytes[$offset..]); )*
        }
    };
    (
        $(#[$meta:meta])*
        pub struct $name:ident [$($page:ident)? $size:literal] {
            $( $(#[$fmeta:meta])* $field:ident: $ty:ty = $offset:literal, )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $( $(#[$fmeta])* pub $field: $ty, )*
        }

        impl $name {
            /// Size on the wire, in bytes.
            pub const BYTES: usize = $size;

            /// Reads the structure. Every content parses; bytes that belong to no field are
            /// ignored.
            #[inline]
            pub fn parse(bytes: &[u8; $size]) -> Self {
                Self { $( $field: $crate::Field::get(&bytes[$offset..]), )* }
            }

            wire!(@emit $($page)? $name, $size, { $($field = $offset,)* });
        }

        /// Every field zero.
        impl Default for $name {
            fn default() -> Self {
                Self::parse(&[0; $size])
            }
        }

        wire!(@field $($page)? $name, $size);

        const _: () = {
            let end = 0;
            $(
                assert!($offset >= end, "fields overlap or are out of order");
                let end = $offset + <$ty as $crate::Field>::BYTES;
            )*
            assert!(end <= $size, "the last field leaves the structure");
        };
    };
}

/// A newtype over an integer is read and written as that, by itself and as a bit field.
macro_rules! integer_field {
    ($name:ident, $int:ty) => {
        impl $crate::Field for $name {
            const BYTES: usize = <$int as $crate::Field>::BYTES;
            #[inline]
            fn get(from: &[u8]) -> Self {
                Self($crate::Field::get(from))
            }
            #[inline]
            fn put(&self, to: &mut [u8]) {
                $crate::Field::put(&self.0, to);
            }
        }

        impl $crate::Bits for $name {
            const WIDTH: u32 = <$int>::BITS;
            fn from_bits(bits: u64) -> Self {
                Self(bits as $int)
            }
            fn into_bits(self) -> u64 {
                u64::from(self.0)
            }
        }
    };
}

/// Open enum: a newtype over the wire integer with named values.
macro_rules! open_enum {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($int:ty) {
            $( $variant:ident = $value:literal, $text:literal; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $int);

        impl $name {
            $( #[doc = $text] pub const $variant: Self = Self($value); )*

            /// The name in the specifications, if the value has one here.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $( $value => Some($text), )*
                    _ => None,
                }
            }
        }

        impl core::fmt::Display for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "{:#04x}", self.0),
                }
            }
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                write!(f, "{}({:#04x}", stringify!($name), self.0)?;
                match self.name() {
                    Some(name) => write!(f, " {name})"),
                    None => f.write_str(")"),
                }
            }
        }

        integer_field!($name, $int);
    };
}

/// Bit fields of one integer: getter, setter, type, lowest bit, width. The integer itself stays
/// public, so reserved bits are preserved.
macro_rules! bits {
    (
        $(#[$meta:meta])*
        pub struct $name:ident($int:ty) {
            $( $(#[$fmeta:meta])* $get:ident $with:ident: $ty:ty = $low:literal, $width:literal; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
        pub struct $name(pub $int);

        impl $name {
            $(
                $(#[$fmeta])*
                #[inline]
                pub fn $get(self) -> $ty {
                    $crate::Bits::from_bits(u64::from(self.0) >> $low & $crate::mask($width))
                }

                #[doc = concat!("With `", stringify!($get), "` changed; what does not fit in ",
                    stringify!($width), " bits is dropped.")]
                #[must_use]
                #[inline]
                pub fn $with(self, value: $ty) -> Self {
                    let mask = $crate::mask($width) << $low;
                    let bits = $crate::Bits::into_bits(value) << $low & mask;
                    Self((u64::from(self.0) & !mask | bits) as $int)
                }
            )*
        }

        impl core::fmt::Debug for $name {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.debug_struct(stringify!($name))
                    .field("raw", &format_args!("{:#x}", self.0))
                    $( .field(stringify!($get), &self.$get()) )*
                    .finish()
            }
        }

        integer_field!($name, $int);

        const _: () = {
            let end = 0;
            $(
                assert!($low >= end, "bit ranges overlap or are out of order");
                assert!($width <= <$ty as $crate::Bits>::WIDTH, "the type is too narrow");
                let end = $low + $width;
            )*
            assert!(end <= <$int>::BITS, "the last bit range leaves the integer");
        };
    };
}

/// Declares the fields of a command: a struct with `parse` and `put`. Each field is at positions
/// `dword[low, width]`, from its least significant bits on.
macro_rules! command {
    (
        $(#[$meta:meta])*
        pub struct $name:ident {
            $( $(#[$fmeta:meta])* $field:ident: $ty:ty =
                $($dword:ident[$low:literal, $width:literal])+; )*
        }
    ) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
        pub struct $name {
            $( $(#[$fmeta])* pub $field: $ty, )*
        }

        impl $name {
            /// Reads the fields of a command.
            pub fn parse(command: &Sqe) -> Self {
                Self { $( $field: $crate::Bits::from_bits($crate::joined([
                    $( (command.$dword, $low, $width) ),+
                ])), )* }
            }

            /// Returns a command whose fields are zero with these.
            fn put(&self, mut command: Sqe) -> Sqe {
                $(
                    let bits = $crate::Bits::into_bits(self.$field);
                    $crate::part(bits, [$( (&mut command.$dword, $low, $width) ),+]);
                )*
                command
            }
        }

        const _: () = {
            $(
                assert!(
                    $crate::fits(&[$( ($low, $width) ),+], <$ty as $crate::Bits>::WIDTH),
                    "a position leaves its dword, or the type is too narrow"
                );
            )*
        };
    };
}

pub mod auth;
pub mod cm;
pub mod copy;
pub mod cqe;
pub mod fabrics;
pub mod feature;
pub mod identify;
pub mod ids;
pub mod lba_status;
pub mod log;
pub mod namespace_management;
pub mod nqn;
pub mod persistent_event;
pub mod property;
pub mod reservation;
pub mod sgl;
pub mod sqe;
pub mod status;

pub use cqe::Cqe;
pub use nqn::{Nqn, NqnError, NqnField};
pub use sgl::{Sgl, U24};
pub use sqe::{AdminOpcode, IoOpcode, Sqe};
pub use status::Status;

use byteorder::{ByteOrder, LittleEndian};

/// UDP, TCP and RDMA_CM port that IANA assigned to NVMe over Fabrics.
pub const PORT: u16 = 4420;

/// Size of an Identify page and of the largest fixed log pages, in bytes.
pub const PAGE_BYTES: usize = 4096;

/// Namespace id that means "all namespaces".
pub const NSID_ALL: u32 = 0xFFFF_FFFF;

/// Text of fixed size: ASCII, left-aligned, padded with spaces.
///
/// Source: NVMe Base Specification 2.0, the ASCII string fields of Identify. A peer may pad with
/// NUL instead or send any bytes, so the raw bytes are kept and only `Display` interprets them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Text<const N: usize>(pub [u8; N]);

impl<const N: usize> Text<N> {
    /// `text`, cut to `N` bytes and padded with spaces; a byte that is not printable ASCII becomes
    /// `?`.
    pub fn lossy(text: &str) -> Self {
        let mut field = [b' '; N];
        for (to, &byte) in field.iter_mut().zip(text.as_bytes()) {
            *to = if byte == b' ' || byte.is_ascii_graphic() { byte } else { b'?' };
        }
        Self(field)
    }

    /// The bytes before the first NUL, without trailing spaces.
    pub fn trimmed(&self) -> &[u8] {
        let text = self.0.split(|&byte| byte == 0).next().unwrap_or_default();
        text.trim_ascii_end()
    }
}

/// Escaped, so that it is safe to print any bytes of the peer.
impl<const N: usize> core::fmt::Display for Text<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "{}", self.trimmed().escape_ascii())
    }
}

impl<const N: usize> core::fmt::Debug for Text<N> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

impl<const N: usize> Field for Text<N> {
    const BYTES: usize = N;
    fn get(from: &[u8]) -> Self {
        Self(Field::get(from))
    }
    fn put(&self, to: &mut [u8]) {
        self.0.put(to);
    }
}

/// The lowest `width` bits, `width` from 1 to 64.
pub(crate) const fn mask(width: u32) -> u64 {
    u64::MAX >> (64 - width)
}

/// Whether these positions, low bit and width, are in dwords, and together in a type of `most` bits.
pub(crate) const fn fits(mut positions: &[(u32, u32)], most: u32) -> bool {
    let mut all = 0;
    while let [(low, width), rest @ ..] = positions {
        if *low + *width > 32 {
            return false;
        }
        (all, positions) = (all + *width, rest);
    }
    all <= most
}

/// The bits at these positions of dwords, the first in the least significant place.
pub(crate) fn joined<const N: usize>(positions: [(u32, u32, u32); N]) -> u64 {
    let join = |bits: u64, (dword, low, width): (u32, u32, u32)| {
        bits << width | u64::from(dword) >> low & mask(width)
    };
    positions.into_iter().rev().fold(0, join)
}

/// Puts bits into these positions of dwords, which are zero; what does not fit is dropped.
pub(crate) fn part<const N: usize>(mut bits: u64, positions: [(&mut u32, u32, u32); N]) {
    for (dword, low, width) in positions {
        *dword |= ((bits & mask(width)) << low) as u32;
        bits >>= width;
    }
}

/// The ids of a list of `u32` that is sorted, starts at byte 0 and ends at the first zero.
pub(crate) fn nsids(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u32> + '_ {
    page.chunks_exact(4).map(LittleEndian::read_u32).take_while(|&id| id != 0)
}

impl Field for u8 {
    const BYTES: usize = 1;
    #[inline]
    fn get(from: &[u8]) -> Self {
        from[0]
    }
    #[inline]
    fn put(&self, to: &mut [u8]) {
        to[0] = *self;
    }
}

macro_rules! integer_fields {
    ($($int:ty, $bytes:literal, $read:ident, $write:ident;)*) => {$(
        impl Field for $int {
            const BYTES: usize = $bytes;
            #[inline]
            fn get(from: &[u8]) -> Self {
                LittleEndian::$read(from)
            }
            #[inline]
            fn put(&self, to: &mut [u8]) {
                LittleEndian::$write(to, *self);
            }
        }
    )*};
}

integer_fields! {
    u16, 2, read_u16, write_u16;
    u32, 4, read_u32, write_u32;
    u64, 8, read_u64, write_u64;
    u128, 16, read_u128, write_u128;
}

impl<T: Field, const N: usize> Field for [T; N] {
    const BYTES: usize = T::BYTES * N;
    #[inline]
    fn get(from: &[u8]) -> Self {
        core::array::from_fn(|i| T::get(&from[i * T::BYTES..]))
    }
    #[inline]
    fn put(&self, to: &mut [u8]) {
        for (i, value) in self.iter().enumerate() {
            value.put(&mut to[i * T::BYTES..]);
        }
    }
}

impl Bits for bool {
    const WIDTH: u32 = 1;
    #[inline]
    fn from_bits(bits: u64) -> Self {
        bits & 1 == 1
    }
    #[inline]
    fn into_bits(self) -> u64 {
        u64::from(self)
    }
}

macro_rules! integer_bits {
    ($($int:ty)*) => {$(
        impl Bits for $int {
            const WIDTH: u32 = <$int>::BITS;
            #[inline]
            fn from_bits(bits: u64) -> Self {
                bits as $int
            }
            #[inline]
            fn into_bits(self) -> u64 {
                u64::from(self)
            }
        }
    )*};
}

integer_bits!(u8 u16 u32 u64);

#[cfg(test)]
mod tests {
    use crate::cm::Request;
    use crate::log::Treq;
    use crate::*;
    use proptest::prelude::*;

    #[test]
    fn positions_of_a_command_are_in_dwords_and_fit_the_type() {
        assert!(fits(&[(0, 32), (0, 32)], 64) && fits(&[(16, 16)], 16));
        assert!(!fits(&[(17, 16)], 16), "it leaves its dword");
        assert!(!fits(&[(0, 16), (0, 1)], 16), "the type is too narrow");
    }

    #[test]
    fn fields_are_emitted_little_endian_and_reserved_bytes_zero() {
        let request = Request { recfmt: 1, qid: 0x0203, cntlid: 0x0405, ..Request::default() };
        let mut expected = [0; 32];
        expected[..10].copy_from_slice(&[1, 0, 3, 2, 0, 0, 0, 0, 5, 4]);
        assert_eq!(request.emit(), expected);
        assert_eq!(Request::default().emit(), [0; 32]);
    }

    #[test]
    fn setting_a_bit_range_touches_nothing_else() {
        assert_eq!(Treq(0xFF).with_secure_channel(0).0, 0xFC, "reserved bits survive");
        assert_eq!(Treq(0).with_secure_channel(0xFF).0, 0x03, "too large a value is cut");
        assert_eq!(Treq(0x80).with_sq_flow_control_disable(true).0, 0x84);
    }

    #[test]
    fn text_is_padded_cut_and_escaped() {
        assert_eq!(Text::<6>::lossy("ab").0, *b"ab    ");
        assert_eq!(Text::<2>::lossy("abc").0, *b"ab");
        assert_eq!(Text::<4>::lossy("a\nbé").0, *b"a?b?");
        assert_eq!(Text(*b"x y \0z").to_string(), "x y");
        assert_eq!(Text([0x1B, b'[', 0x80]).to_string(), "\\x1b[\\x80");
        assert_eq!(Text::<0>::lossy("abc").to_string(), "");
    }

    proptest! {
        #[test]
        fn bit_ranges_round_trip(raw: u8, on: bool, level in 0u8..4) {
            let treq = Treq(raw).with_sq_flow_control_disable(on).with_secure_channel(level);
            prop_assert_eq!((treq.sq_flow_control_disable(), treq.secure_channel()), (on, level));
            prop_assert_eq!(treq.0 & 0xF8, raw & 0xF8);
        }

        #[test]
        fn text_fields_round_trip(text in "[!-~]{0,20}") {
            let field = Text::<20>::lossy(&text);
            prop_assert_eq!(field.trimmed(), text.as_bytes());
        }
    }
}
