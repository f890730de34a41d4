//! `[stop]`: how the daemon drains before it stops.

use serde::Serialize;

use super::schema::bounded;
use super::table_reader::TableReader;

/// Longest drain, in milliseconds: the service manager waits for it.
const MOST_MS: u32 = 30_000;

/// Draining of hosts before the daemon stops.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct StopConfig {
    /// All paths are reported as inaccessible, and hosts have this time to switch to others
    /// before they are disconnected, in milliseconds; 0: they are disconnected at once.
    pub inaccessible_ms: u32,
}

pub(super) fn stop(root: &mut TableReader<'_>) -> StopConfig {
    let mut section = root.table("stop", "[stop]");
    let inaccessible_ms = bounded(&mut section, "inaccessible_ms", 0..MOST_MS, 0);
    section.end();
    StopConfig { inaccessible_ms }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn read(section: &str) -> Result<Config, String> {
        let text = format!(
            "[[listener]]\naddress = '127.0.0.1'\n[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n\
             {section}"
        );
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    #[test]
    fn inaccessible_time_before_a_stop_is_at_most_30_s_and_0_by_default() {
        let ms = |section| read(section).map(|config| config.stop.inaccessible_ms);
        assert_eq!(ms(""), Ok(0));
        assert_eq!(ms("[stop]\n"), Ok(0));
        assert_eq!(ms("[stop]\ninaccessible_ms = 30000\n"), Ok(30_000));
        assert!(ms("[stop]\ninaccessible_ms = 30001\n").unwrap_err().contains("0 to 30000"));
        assert!(ms("[stop]\ninaccessible_ms = -1\n").is_err());
        assert!(ms("[stop]\nsoon = 1\n").unwrap_err().contains("soon"));
        let shown = read("[stop]\ninaccessible_ms = 700\n").unwrap().to_string();
        assert!(shown.contains("stop        inaccessible_ms 700\n"), "{shown}");
    }
}
