//! `[observe]`: recording of slow commands and disconnects.

use serde::Serialize;

use super::schema::bounded;
use super::table_reader::TableReader;

/// Default threshold of slow commands.
const SLOW_MS: u32 = 100;

/// The largest one: an hour.
const MOST_SLOW_MS: u32 = 3_600_000;

/// Recording of slow commands and disconnects.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct ObserveConfig {
    /// Commands that took at least this time are recorded, in milliseconds; 0: none are.
    pub slow_ms: u32,
}

pub(super) fn observe(root: &mut TableReader<'_>) -> ObserveConfig {
    let mut section = root.table("observe", "[observe]");
    let slow_ms = bounded(&mut section, "slow_ms", 0..MOST_SLOW_MS, SLOW_MS);
    section.end();
    ObserveConfig { slow_ms }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn slow_ms(section: &str) -> Result<u32, String> {
        let text = format!(
            "[[listener]]\naddress = '127.0.0.1'\n[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n\
             {section}"
        );
        let config = Config::parse(&text).map_err(|errors| errors.to_string())?;
        Ok(config.observe.slow_ms)
    }

    #[test]
    fn slow_threshold_is_at_most_an_hour_and_may_be_zero() {
        assert_eq!(slow_ms(""), Ok(100));
        assert_eq!(slow_ms("[observe]\n"), Ok(100));
        assert_eq!(slow_ms("[observe]\nslow_ms = 0\n"), Ok(0));
        assert_eq!(slow_ms("[observe]\nslow_ms = 3600000\n"), Ok(3_600_000));
        assert!(slow_ms("[observe]\nslow_ms = 3600001\n").unwrap_err().contains("0 to 3600000"));
        assert!(slow_ms("[observe]\nslow_ms = 'x'\n").is_err());
        assert!(slow_ms("[observe]\nfast_ms = 1\n").unwrap_err().contains("fast_ms"));
    }
}
