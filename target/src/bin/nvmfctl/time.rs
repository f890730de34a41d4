//! Points in time for users: local time as in RFC 3339.

use std::time::{SystemTime, UNIX_EPOCH};

use jiff::Timestamp;
use jiff::tz::TimeZone;

/// Now, in seconds since 1970.
pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

/// A point in time: seconds since 1970.
pub(crate) fn at_s(seconds: u64) -> String {
    text(seconds.saturating_mul(1000), &TimeZone::system(), "%Y-%m-%dT%H:%M:%S%:z")
}

/// A point in time: milliseconds since 1970.
pub(crate) fn at_ms(ms: u64) -> String {
    text(ms, &TimeZone::system(), "%Y-%m-%dT%H:%M:%S%.3f%:z")
}

fn text(ms: u64, zone: &TimeZone, format: &str) -> String {
    let at = i64::try_from(ms).ok().and_then(|ms| Timestamp::from_millisecond(ms).ok());
    at.map_or_else(String::new, |at| {
        at.to_zoned_datetime(zone.clone()).strftime(format).to_string()
    })
}

#[cfg(test)]
mod tests {
    use crate::time::*;

    #[test]
    fn a_point_in_time_has_date_and_offset() {
        let east = TimeZone::fixed(jiff::tz::offset(2));
        let of = |ms, format| text(ms, &east, format);
        assert_eq!(
            of(951_782_400_123, "%Y-%m-%dT%H:%M:%S%.3f%:z"),
            "2000-02-29T02:00:00.123+02:00"
        );
        assert_eq!(of(u64::MAX, "%Y"), "");
        assert_eq!(at_s(0).len(), "1970-01-01T00:00:00+00:00".len());
        assert_eq!(at_ms(0).len(), "1970-01-01T00:00:00.000+00:00".len());
    }
}
