//! `missing`: policy for addresses, devices and files that are unavailable.

rdma::named_enum! {
    /// Policy for configured addresses and devices that are unavailable.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Missing {
        /// They are pending: the rest is served, and these once they are available.
        #[default]
        Wait = "wait",
        /// The daemon does not start; a reload is rejected.
        Fail = "fail",
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, Missing};

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
        assert!(wrong.contains("write one of \"wait\", \"fail\""), "{wrong}");
        let shown = Config::parse(&text("missing = \"fail\"")).unwrap().to_string();
        assert!(shown.lines().any(|line| line == "missing     fail"), "{shown}");
    }
}
