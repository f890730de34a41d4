//! Sizes and times on the command line.

use std::time::Duration;

/// Parses a number of bytes: `4096`, `4k`, `4KiB`, `128K`, `1m`, `10GiB`. Prefixes are binary, as in fio.
///
/// # Errors
/// A sentence with the valid forms.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    let wrong = || format!("{text:?} is no size: write a number of bytes, or 4k, 128k, 1m, 10g");
    let lower = text.trim().to_ascii_lowercase();
    let digits = lower.find(|c: char| !c.is_ascii_digit()).unwrap_or(lower.len());
    let (number, unit) = lower.split_at(digits);
    let shift = match unit.trim_start() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return Err(wrong()),
    };
    let number: u64 = number.parse().map_err(|_| wrong())?;
    number.checked_mul(1 << shift).ok_or_else(wrong)
}

/// Parses a time: a number of seconds, or `500ms`, `90s`, `5m`, `1h`.
///
/// # Errors
/// A sentence with the valid forms.
pub(crate) fn seconds(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no time: write a number of seconds, or 500ms, 5m, 1h");
    let text = text.trim();
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let unit = match unit {
        "" | "s" => 1.0,
        "ms" => 0.001,
        "m" => 60.0,
        "h" => 3600.0,
        _ => return Err(wrong()),
    };
    let number: f64 = number.parse().map_err(|_| wrong())?;
    // A year is long enough, and can be added to any time without overflow.
    Duration::try_from_secs_f64(number * unit).map_err(|_| wrong()).and_then(|time| {
        if time <= Duration::from_secs(365 * 86_400) { Ok(time) } else { Err(wrong()) }
    })
}

#[cfg(test)]
mod tests {
    use crate::size::*;

    #[test]
    fn sizes_are_parsed_as_in_fio() {
        for (text, bytes) in [
            ("512", 512),
            ("4k", 4096),
            ("4KiB", 4096),
            ("128K", 131_072),
            ("1m", 1 << 20),
            ("10GiB", 10 << 30),
            ("2 t", 2 << 40),
        ] {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        for text in ["", "k", "-1", "4x", "1.5k", "99999999999t", "4k4"] {
            assert!(size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn times_are_parsed_in_seconds_or_with_a_unit() {
        for (text, ms) in [("10", 10_000), ("0.5", 500), ("500ms", 500), ("5m", 300_000)] {
            assert_eq!(seconds(text), Ok(Duration::from_millis(ms)), "{text}");
        }
        for text in ["", "s", "-1", "1d", "1e9", "99999999999h", ".", "inf"] {
            assert!(seconds(text).is_err(), "{text}");
        }
    }
}
