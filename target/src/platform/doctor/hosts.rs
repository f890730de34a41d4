//! Checks names of hosts, in which errors have no effect until a host is rejected.

use std::collections::BTreeSet;

use nvme::Nqn;
use uuid::Uuid;

use super::Finding;
use crate::config::Config;
use crate::plural::count;

/// Prefix of the UUID in names by `nvme gen-hostnqn`.
const HOST_PREFIX: &str = "nqn.2014-08.org.nvmexpress:uuid:";

pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let subsystems: BTreeSet<Nqn> = config.subsystems.iter().map(|each| each.nqn).collect();
    let mut findings = Vec::new();
    let mut admitted = BTreeSet::new();
    for subsystem in &config.subsystems {
        if !subsystem.allow_any_host && subsystem.hosts.is_empty() {
            findings.push(Finding::problem(
                "hosts",
                format!("{} admits no host at all", subsystem.nqn),
                "add the hosts' NQNs to `hosts` (on each: cat /etc/nvme/hostnqn), or set \
                 allow_any_host = true",
            ));
        }
        admitted.extend(subsystem.hosts.iter().copied());
    }
    let keys = config.authentication.hosts.iter().map(|host| host.nqn);
    let names: BTreeSet<Nqn> = admitted.iter().copied().chain(keys).collect();
    findings.extend(names.iter().filter_map(|name| host(name.as_ref(), subsystems.contains(name))));
    if findings.is_empty() {
        let sentence = match names.len() {
            0 => "any host may connect".to_owned(),
            names => format!("checked {}", count(names, "host name")),
        };
        findings.push(Finding::ok("hosts", sentence));
    }
    findings
}

/// Returns a possible error in the name of a host.
fn host(name: &str, is_subsystem: bool) -> Option<Finding> {
    let check = "hosts";
    let look =
        "compare it with what the host says: cat /etc/nvme/hostnqn (nvme gen-hostnqn makes one)";
    if is_subsystem {
        return Some(Finding::warning(check, format!("{name} is the name of a subsystem"), look));
    }
    if name == Nqn::DISCOVERY.to_string() {
        return Some(Finding::warning(check, format!("{name} is the name of discovery"), look));
    }
    let Some(uuid) = name.strip_prefix(HOST_PREFIX) else {
        let lower = name.to_ascii_lowercase();
        let nearly = lower.starts_with("nqn.2014-08.org.nvmexpress") || lower.contains(":uuid:");
        return nearly.then(|| {
            let sentence =
                format!("{name} is nearly, but not quite, of the form {HOST_PREFIX}UUID");
            Finding::warning(check, sentence, look)
        });
    };
    let good = Uuid::try_parse(uuid).is_ok_and(|parsed| parsed.hyphenated().to_string() == uuid);
    (!good).then(|| {
        let sentence = format!(
            "{name} has no UUID in the form that hosts have: 36 characters, lower case, with hyphens"
        );
        Finding::warning(check, sentence, look)
    })
}

#[cfg(test)]
mod tests {
    use super::super::Level::{Ok as Fine, Problem, Warning};
    use super::super::tests::says;
    use crate::platform::doctor::hosts::*;

    const GOOD: &str = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";

    #[test]
    fn implausible_host_nqns_are_warned_of() {
        for name in [GOOD, "nqn.2026-11.org.example:host7"] {
            assert_eq!(host(name, false), None, "{name}");
        }
        for name in [
            &GOOD[..GOOD.len() - 1],
            &GOOD.replace("2d1c4be8", "2D1C4BE8"),
            &GOOD.replace("7a80-", "7a80"),
            &GOOD.replace(":uuid:", "uuid:"),
            &GOOD.replace("2014-08", "2014-09"),
        ] {
            says(&host(name, false).unwrap(), Warning, name);
        }
        says(&host("nqn.2026-11.io.nvmfd:disk1", true).unwrap(), Warning, "of a subsystem");
        says(&host(Nqn::DISCOVERY.as_ref(), false).unwrap(), Warning, "of discovery");
    }

    #[test]
    fn a_subsystem_without_allowed_hosts_is_a_problem() {
        let with = |who: &str| {
            let text = format!(
                "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                 \"nqn.2026-11.io.nvmfd:d\"\n{who}\n[[subsystem.namespace]]\nnsid = 1\nkind = \
                 \"ram\"\nsize = \"1MiB\"\n"
            );
            examine(&Config::parse(&text).unwrap())
        };
        says(&with("")[0], Problem, "admits no host");
        says(&with("allow_any_host = true")[0], Fine, "any host");
        says(&with(&format!("hosts = [\"{GOOD}\"]"))[0], Fine, "1 host name");
        says(&with("hosts = [\"nqn.2026-11.io.nvmfd:d\"]")[0], Warning, "of a subsystem");
    }
}
