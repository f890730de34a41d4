//! Sizes with units:

use std::fmt;
use std::str::FromStr;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Unexpected, Visitor};

/// A number of bytes. Displayed as it may be written: `10GiB`, or plain digits if it is no
/// multiple of a binary unit.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Size(pub u64);

/// Valid forms of a size, as the end of a sentence.
pub(crate) const SIZE_FORM: &str =
    "a size such as \"10GiB\" (1024-based), \"512MB\" (1000-based) or a number of bytes";

const UNITS: [(&str, u64); 11] = [
    ("B", 1),
    ("KIB", 1 << 10),
    ("MIB", 1 << 20),
    ("GIB", 1 << 30),
    ("TIB", 1 << 40),
    ("PIB", 1 << 50),
    ("KB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("PB", 1_000_000_000_000_000),
];

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        let digits = text.bytes().take_while(u8::is_ascii_digit).count();
        let (number, unit) = text.split_at(digits);
        let unit = unit.trim_start().to_ascii_uppercase();
        if number.is_empty() {
            return Err("a size starts with a whole number".to_owned());
        }
        let factor = match UNITS.iter().find(|(name, _)| *name == unit) {
            Some(&(_, factor)) => factor,
            None if unit.is_empty() => 1,
            None if matches!(unit.as_str(), "K" | "M" | "G" | "T" | "P") => {
                return Err(format!("`{unit}` alone may mean {unit}iB or {unit}B"));
            }
            None if unit.starts_with(['.', ',']) => {
                return Err("a size has no decimal places".to_owned());
            }
            None => return Err("this unit of size is not known".to_owned()),
        };
        let bytes = number.parse::<u64>().ok().and_then(|number| number.checked_mul(factor));
        match bytes {
            Some(bytes) if i64::try_from(bytes).is_ok() => Ok(Self(bytes)),
            _ => Err("this size is larger than any file can be".to_owned()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = UNITS[1..6].iter().rev().find(|(_, factor)| self.0.is_multiple_of(*factor));
        match unit {
            Some(&(name, factor)) if self.0 > 0 => {
                write!(f, "{}{}iB", self.0 / factor, &name[..1])
            }
            _ => write!(f, "{}", self.0),
        }
    }
}

impl<'de> Deserialize<'de> for Size {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct AsSize;
        impl Visitor<'_> for AsSize {
            type Value = Size;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a size")
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Size, E> {
                let refused = |_| E::invalid_value(Unexpected::Signed(value), &self);
                u64::try_from(value).map(Size).map_err(refused)
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Size, E> {
                i64::try_from(value).map_err(E::custom).and_then(|value| self.visit_i64(value))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Size, E> {
                value.parse().map_err(E::custom)
            }
        }
        from.deserialize_any(AsSize)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::size::*;
    use proptest::prelude::*;

    #[test]
    fn units_are_binary_or_decimal_as_written() {
        for (text, bytes) in [
            ("0", 0),
            ("4096", 4096),
            ("1B", 1),
            ("10GiB", 10 << 30),
            ("10 gib", 10 << 30),
            ("512MB", 512_000_000),
            (" 4KiB ", 4096),
            ("2TB", 2_000_000_000_000),
            ("7PiB", 7 << 50),
        ] {
            assert_eq!(text.parse(), Ok(Size(bytes)), "{text}");
        }
    }

    #[test]
    fn invalid_or_ambiguous_sizes_are_refused_with_a_reason() {
        for (text, reason) in [
            ("", "starts with a whole number"),
            ("GiB", "starts with a whole number"),
            ("-1", "starts with a whole number"),
            ("10G", "may mean GiB or GB"),
            ("1.5GiB", "no decimal places"),
            ("10 bananas", "not known"),
            ("9223372036854775808", "larger than any file"),
            ("99999999999999999999999", "larger than any file"),
            ("9000PiB", "larger than any file"),
        ] {
            let refusal = text.parse::<Size>().unwrap_err();
            assert!(refusal.contains(reason), "{text}: {refusal}");
        }
    }

    proptest! {
        #[test]
        fn printed_sizes_parse_back(bytes in 0..=i64::MAX as u64, shift in 0u32..63) {
            for size in [Size(bytes), Size(bytes >> shift << shift), Size(1 << shift)] {
                prop_assert_eq!(size.to_string().parse(), Ok(size));
            }
        }

        #[test]
        fn parsing_a_size_never_panics(text: String) {
            let _ = text.parse::<Size>();
        }
    }
}
