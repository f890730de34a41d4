//! NVMe Qualified Names, validated.
//!
//! Source: NVMe Base Specification 2.0, "NVMe Qualified Names". A name is at most 223 bytes and
//! ends with a NUL in a field of 256 bytes.
//!
//! Names are written to logs, tables and files, and are received from peers before authentication.
//! So this type is narrower than the UTF-8 of the specification: every byte is printable ASCII
//! other than space, and the name begins with `nqn.`. Nothing else is required (Linux hosts do not
//! check either); [`Nqn::form`] returns the format of a name.

use core::{cmp::Ordering, fmt, str::FromStr};

use crate::Field;

/// A validated name, held inline: 5 to 223 bytes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nqn {
    /// Bytes from `len` on are zero.
    bytes: [u8; Nqn::MAX_BYTES],
    len: u8,
}

/// Format of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NqnForm {
    /// The well-known name of the discovery service.
    Discovery,
    /// `nqn.2014-08.org.nvmexpress:uuid:` and a UUID.
    Uuid,
    /// `nqn.yyyy-mm.` and a reversed domain name, then perhaps `:` and any text.
    Domain,
    /// None of the forms in the specification.
    Other,
}

/// Reason why bytes are not a valid name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NqnError {
    /// No bytes before the terminator.
    Empty,
    /// A field of 256 bytes without NUL.
    NoTerminator,
    /// More than 223 bytes.
    TooLong {
        /// Length found, in bytes.
        bytes: usize,
    },
    /// A byte other than printable ASCII, or a space.
    NotPrintable {
        /// Its position, from 0.
        at: usize,
    },
    /// It does not begin with `nqn.` and something after that.
    NoPrefix,
}

impl Nqn {
    /// The longest name, in bytes, without the terminator.
    pub const MAX_BYTES: usize = 223;

    /// Size of a name's field in structures, in bytes.
    pub const FIELD_BYTES: usize = 256;

    /// Well-known name of the discovery service: `nqn.2014-08.org.nvmexpress.discovery`.
    pub const DISCOVERY: Self = Self::literal(b"nqn.2014-08.org.nvmexpress.discovery");

    /// Represents a host that has sent no name: the name of the nil UUID, which is assigned to no host.
    pub const UNNAMED: Self =
        Self::literal(b"nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000000");

    /// Prefix of a name made from a UUID.
    pub const UUID_PREFIX: &'static str = "nqn.2014-08.org.nvmexpress:uuid:";

    /// Validates `name`.
    pub fn new(name: &str) -> Result<Self, NqnError> {
        Self::from_bytes(name.as_bytes())
    }

    /// Validates a name without terminator.
    pub fn from_bytes(name: &[u8]) -> Result<Self, NqnError> {
        if name.is_empty() {
            return Err(NqnError::Empty);
        }
        if let Some(at) = name.iter().position(|byte| !byte.is_ascii_graphic()) {
            return Err(NqnError::NotPrintable { at });
        }
        let mut bytes = [0; Self::MAX_BYTES];
        match (bytes.get_mut(..name.len()), u8::try_from(name.len())) {
            (Some(to), Ok(_)) if !name.starts_with(b"nqn.") || to.len() == 4 => {
                Err(NqnError::NoPrefix)
            }
            (Some(to), Ok(len)) => {
                to.copy_from_slice(name);
                Ok(Self { bytes, len })
            }
            _ => Err(NqnError::TooLong { bytes: name.len() }),
        }
    }

    /// Validates a field: a name and its NUL. Bytes after the NUL are ignored.
    pub fn parse_field(field: &[u8; Self::FIELD_BYTES]) -> Result<Self, NqnError> {
        let len = field.iter().position(|&byte| byte == 0).ok_or(NqnError::NoTerminator)?;
        Self::from_bytes(field.get(..len).unwrap_or_default())
    }

    /// The name, padded with NUL.
    pub fn emit(&self) -> [u8; Self::FIELD_BYTES] {
        let mut field = [0; Self::FIELD_BYTES];
        for (to, from) in field.iter_mut().zip(self.bytes) {
            *to = from;
        }
        field
    }

    /// The name without terminator.
    pub fn as_bytes(&self) -> &[u8] {
        self.bytes.get(..self.len.into()).unwrap_or_default()
    }

    /// The name.
    pub fn as_str(&self) -> &str {
        // Validated as ASCII, so the fallback is never taken.
        core::str::from_utf8(self.as_bytes()).unwrap_or_default()
    }

    /// Whether it is the well-known name of the discovery service.
    pub fn is_discovery(&self) -> bool {
        *self == Self::DISCOVERY
    }

    /// Returns the form of the name in the specification.
    pub fn form(&self) -> NqnForm {
        if self.is_discovery() {
            NqnForm::Discovery
        } else if let Some(uuid) = self.as_str().strip_prefix(Self::UUID_PREFIX) {
            if is_uuid(uuid) { NqnForm::Uuid } else { NqnForm::Other }
        } else if is_domain_form(self.as_bytes()) {
            NqnForm::Domain
        } else {
            NqnForm::Other
        }
    }

    /// Creates a name that is known to be valid, for constants.
    const fn literal(name: &[u8]) -> Self {
        let mut bytes = [0; Self::MAX_BYTES];
        let mut i = 0;
        while i < name.len() {
            bytes[i] = name[i];
            i += 1;
        }
        Self { bytes, len: name.len() as u8 }
    }
}

impl fmt::Display for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

impl fmt::Debug for Nqn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.as_bytes().escape_ascii())
    }
}

impl FromStr for Nqn {
    type Err = NqnError;
    fn from_str(name: &str) -> Result<Self, NqnError> {
        Self::new(name)
    }
}

impl AsRef<str> for Nqn {
    fn as_ref(&self) -> &str {
        self.as_str()
    }
}

/// Ordered by the bytes of the name.
impl Ord for Nqn {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_bytes().cmp(other.as_bytes())
    }
}

impl PartialOrd for Nqn {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl fmt::Display for NqnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("the name is empty"),
            Self::NoTerminator => f.write_str("the name has no terminator within 256 bytes"),
            Self::TooLong { bytes } => {
                write!(f, "the name has {bytes} bytes, {} are allowed", Nqn::MAX_BYTES)
            }
            Self::NotPrintable { at } => {
                write!(f, "byte {at} of the name is not a printable ASCII character")
            }
            Self::NoPrefix => f.write_str("the name does not begin with \"nqn.\" and a date"),
        }
    }
}

impl core::error::Error for NqnError {}

/// A name's field within a structure: 256 bytes as received, validated on demand.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NqnField(pub [u8; Nqn::FIELD_BYTES]);

impl NqnField {
    /// All zero: no name.
    pub const EMPTY: Self = Self([0; Nqn::FIELD_BYTES]);

    /// Returns the name, or why it is invalid.
    pub fn nqn(&self) -> Result<Nqn, NqnError> {
        Nqn::parse_field(&self.0)
    }
}

impl From<Nqn> for NqnField {
    fn from(nqn: Nqn) -> Self {
        Self(nqn.emit())
    }
}

impl From<&Nqn> for NqnField {
    fn from(nqn: &Nqn) -> Self {
        Self(nqn.emit())
    }
}

/// The bytes before the NUL, escaped, whether or not they are a valid name.
impl fmt::Debug for NqnField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.0.split(|&byte| byte == 0).next().unwrap_or_default();
        write!(f, "\"{}\"", name.escape_ascii())
    }
}

impl Field for NqnField {
    const BYTES: usize = Nqn::FIELD_BYTES;
    fn get(from: &[u8]) -> Self {
        Self(Field::get(from))
    }
    fn put(&self, to: &mut [u8]) {
        self.0.put(to);
    }
}

/// 8-4-4-4-12 hexadecimal digits.
fn is_uuid(text: &str) -> bool {
    let mut groups = text.split('-');
    [8, 4, 4, 4, 12].iter().all(|&digits| {
        groups.next().is_some_and(|group| {
            group.len() == digits && group.bytes().all(|byte| byte.is_ascii_hexdigit())
        })
    }) && groups.next().is_none()
}

/// `nqn.yyyy-mm.domain`, month 01 to 12, then perhaps `:` and any text.
fn is_domain_form(name: &[u8]) -> bool {
    let [b'n', b'q', b'n', b'.', y0, y1, y2, y3, b'-', m0, m1, b'.', rest @ ..] = name else {
        return false;
    };
    let month_ok = matches!([m0, m1], [b'0', b'1'..=b'9'] | [b'1', b'0'..=b'2']);
    let domain = rest.split(|&byte| byte == b':').next().unwrap_or_default();
    let label_ok = |label: &[u8]| {
        !label.is_empty() && label.iter().all(|&byte| byte == b'-' || byte.is_ascii_alphanumeric())
    };
    [y0, y1, y2, y3].iter().all(|year| year.is_ascii_digit())
        && month_ok
        && domain.split(|&byte| byte == b'.').all(label_ok)
}

#[cfg(test)]
mod tests {
    use crate::nqn::*;
    use proptest::prelude::*;

    fn field(name: &[u8]) -> [u8; 256] {
        let mut field = [0; 256];
        field[..name.len()].copy_from_slice(name);
        field
    }

    #[test]
    fn length_is_bounded_by_223_and_the_field() {
        let longest = format!("nqn.{}", "x".repeat(219));
        assert_eq!(Nqn::new(&longest).expect("223 bytes").as_str(), longest);
        let long = format!("{longest}x");
        assert_eq!(Nqn::new(&long), Err(NqnError::TooLong { bytes: 224 }));
        assert_eq!(Nqn::parse_field(&field(&[b'x'; 255])), Err(NqnError::TooLong { bytes: 255 }));
        assert_eq!(Nqn::parse_field(&[b'x'; 256]), Err(NqnError::NoTerminator));
        assert_eq!(Nqn::parse_field(&[0; 256]), Err(NqnError::Empty));
        assert_eq!(Nqn::new(&"nqn.".repeat(100)), Err(NqnError::TooLong { bytes: 400 }));
    }

    #[test]
    fn only_printable_names_with_the_prefix_pass() {
        assert_eq!(Nqn::new("nqn.a\u{7f}"), Err(NqnError::NotPrintable { at: 5 }));
        assert_eq!(Nqn::new("nqn.a b"), Err(NqnError::NotPrintable { at: 5 }));
        assert_eq!(Nqn::new("nqn.é"), Err(NqnError::NotPrintable { at: 4 }));
        assert_eq!(Nqn::new("nqn."), Err(NqnError::NoPrefix));
        assert_eq!(Nqn::new("iqn.2014-08.org"), Err(NqnError::NoPrefix));
        assert_eq!(Nqn::new("nqn"), Err(NqnError::NoPrefix));
        assert!(Nqn::new("nqn.x").is_ok());
    }

    #[test]
    fn bytes_after_the_terminator_do_not_matter() {
        let mut dirty = field(b"nqn.x");
        dirty[6..].fill(0xAA);
        let name = Nqn::parse_field(&dirty).expect("valid");
        assert_eq!(name, Nqn::new("nqn.x").expect("valid"));
        assert_eq!(name.emit(), field(b"nqn.x"));
    }

    #[test]
    fn nqn_forms_are_distinguished() {
        let form = |name| Nqn::new(name).expect("valid").form();
        assert_eq!(Nqn::DISCOVERY.form(), NqnForm::Discovery);
        assert_eq!(form("nqn.2014-08.org.nvmexpress.discovery"), NqnForm::Discovery);
        assert_eq!(
            form("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6"),
            NqnForm::Uuid
        );
        assert_eq!(form("nqn.2014-08.org.nvmexpress:uuid:f81d4fae"), NqnForm::Other);
        assert_eq!(
            form("nqn.2014-08.org.nvmexpress:uuid:f81d4fae-7dec-11d0-a765-00a0c91e6bf6-"),
            NqnForm::Other
        );
        assert_eq!(form("nqn.2026-11.io.nvmfd:disk1"), NqnForm::Domain);
        assert_eq!(form("nqn.2026-12.io"), NqnForm::Domain);
        assert_eq!(form("nqn.2026-13.io"), NqnForm::Other);
        assert_eq!(form("nqn.2026-11.io..x"), NqnForm::Other);
        assert_eq!(form("nqn.2026-11.:x"), NqnForm::Other);
        assert_eq!(form("nqn.test"), NqnForm::Other);
    }

    #[test]
    fn names_sort_as_text_and_print_escaped() {
        let name = |name| Nqn::new(name).expect("valid");
        assert!(name("nqn.b") > name("nqn.aa"));
        assert_eq!(format!("{:>8}|", name("nqn.b")), "   nqn.b|");
        assert_eq!(format!("{:?}", name("nqn.\"")), "\"nqn.\\\"\"");
        assert_eq!(format!("{:?}", NqnField(field(b"\x1b[2J"))), "\"\\x1b[2J\"");
    }

    proptest! {
        #[test]
        fn valid_nqns_round_trip(name in "nqn\\.[!-~]{1,219}") {
            let nqn: Nqn = name.parse().expect("valid");
            prop_assert_eq!(nqn.to_string(), name);
            prop_assert_eq!(Nqn::parse_field(&nqn.emit()), Ok(nqn));
            prop_assert_eq!(NqnField::from(nqn).nqn(), Ok(nqn));
        }

        #[test]
        fn arbitrary_nqn_fields_are_valid_or_rejected(mut field: [u8; 256], len in 0usize..256, printable: bool) {
            if printable {
                field.iter_mut().for_each(|byte| *byte = b'!' + *byte % 94);
                field[..4].copy_from_slice(b"nqn.");
            }
            field[len] = 0;
            if let Ok(nqn) = Nqn::parse_field(&field) {
                prop_assert!(nqn.as_bytes().len() <= 223);
                prop_assert_eq!(nqn.as_bytes(), &field[..nqn.as_bytes().len()]);
                prop_assert!(nqn.as_bytes().iter().all(u8::is_ascii_graphic));
                let _: NqnForm = nqn.form();
            } else {
                prop_assert!(!printable || !(5..=223).contains(&len));
            }
        }
    }
}
