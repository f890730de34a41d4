//! `missing`: policy for addresses, devices and files that are unavailable.

use std::fmt;

use super::table_reader::{At, Diagnostics, TableReader};

/// Policy for configured addresses and devices that are unavailable.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Missing {
    /// They are pending: the rest is served, and these once they are available.
    #[default]
    Wait,
    /// The daemon does not start; a reload is rejected.
    Fail,
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Missing::Wait => "wait",
            Missing::Fail => "fail",
        })
    }
}

pub(super) fn missing(root: &mut TableReader<'_>, report: &mut Diagnostics<'_>) -> Missing {
    let form = "\"wait\" or \"fail\"";
    let Some(At { value, span }) = root.take::<String>("missing", form, report) else {
        return Missing::default();
    };
    match value.as_str() {
        "wait" => Missing::Wait,
        "fail" => Missing::Fail,
        other => {
            let what = format!("{other:?} says nothing about what is missing");
            report.add(&span, what, format!("write {form}"));
            Missing::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::missing::*;

    #[test]
    fn missing_devices_are_waited_for_by_default() {
        let text = |line: &str| {
            format!(
                "{line}\n[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                 \"nqn.2026-11.io.nvmfd:d\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid \
                 = 1\nkind = \"ram\"\nsize = \"1MiB\"\n"
            )
        };
        let said = |line| Config::parse(&text(line)).unwrap().missing;
        assert_eq!((said(""), said("missing = \"wait\"")), (Missing::Wait, Missing::Wait));
        assert_eq!(said("missing = \"fail\""), Missing::Fail);
        let wrong = Config::parse(&text("missing = \"sigh\"")).unwrap_err().to_string();
        assert!(wrong.contains("write \"wait\" or \"fail\""), "{wrong}");
        let shown = Config::parse(&text("missing = \"fail\"")).unwrap().to_string();
        assert!(shown.lines().any(|line| line == "missing     fail"), "{shown}");
    }
}
