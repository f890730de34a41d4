//! `[soft]`: sending parameters of the provider `soft`.

use serde::Serialize;

use super::schema::bounded;
use super::table_reader::TableReader;

/// The most UDP source ports: each is a socket of every reactor at every address.
const MOST_SOURCE_PORTS: u32 = 64;

/// Sending parameters of the provider `soft`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub struct SoftConfig {
    /// Number of UDP source ports, from 49152 on, that queue pairs are spread over, 1 to 64; 1: all
    /// packets have port 4791.
    pub source_ports: u16,
}

pub(super) fn soft(root: &mut TableReader<'_>) -> SoftConfig {
    let mut section = root.table("soft", "[soft]");
    let source_ports = bounded(&mut section, "source_ports", 1..MOST_SOURCE_PORTS, 1) as u16;
    section.end();
    SoftConfig { source_ports }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn source_ports_are_one_to_sixty_four() {
        let read = |section: &str| {
            let text = format!(
                "[[listener]]\naddress = '127.0.0.1'\n[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n\
                 {section}"
            );
            Config::parse(&text).map_err(|errors| errors.to_string())
        };
        let ports = |section: &str| read(section).map(|config| config.soft.source_ports);
        assert_eq!([ports(""), ports("[soft]\n")], [Ok(1), Ok(1)]);
        assert_eq!(ports("[soft]\nsource_ports = 64\n"), Ok(64));
        for count in [0, 65] {
            let error = ports(&format!("[soft]\nsource_ports = {count}\n")).unwrap_err();
            assert!(error.contains(&format!("`source_ports` is {count}")), "{error}");
        }
        let (one, many) = (read("").unwrap(), read("[soft]\nsource_ports = 16\n").unwrap());
        assert!(many.to_string().contains("soft        source_ports 16\n"), "{many}");
        assert_eq!(one.needs_restart(&many), ["[soft]"]);
    }
}
