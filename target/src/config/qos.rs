//! Rate limits of operations and bytes per second: of a namespace, or shared by hosts and
//! namespaces.

use std::fmt;

use nvme::Nqn;
use serde::Serialize;

use super::key_tree;
use super::schema::{NQN_FORM, name};
use super::size::{SIZE_FORM, Size};
use super::table_reader::{At, TableReader};
use crate::core::subsystem::rate_limit::Limit;
use crate::plural::count;

/// The longest burst.
const MOST_BURST_MS: u32 = 10_000;

/// A `[[qos]]`: one limit for all commands of its hosts, and for the commands of all hosts
/// to its namespaces.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct LimitConfig {
    /// Its name.
    pub name: String,
    /// The limit.
    #[serde(flatten, serialize_with = "key_tree::limit")]
    pub limit: Limit,
    /// Its hosts.
    #[serde(serialize_with = "key_tree::each")]
    pub hosts: Vec<Nqn>,
}

pub(super) fn limits(root: &mut TableReader<'_>) -> Vec<LimitConfig> {
    let mut limits: Vec<LimitConfig> = Vec::new();
    let mut seen: Vec<At<String>> = Vec::new();
    for mut section in root.tables("qos", "[[qos]]") {
        let form = "a name such as \"gold\"";
        let called = section.need::<String>("name", form);
        let limit = limit(&mut section);
        if limit.is_none() {
            section.add(section.span(), "[[qos]] limits nothing", "add `iops` or `bandwidth`");
        }
        let mut hosts = Vec::new();
        let form = format!("a list of host names, each {NQN_FORM}");
        if let Some(At { value, span }) = section.take::<Vec<String>>("hosts", &form) {
            let written = value.into_iter().map(|value| At { value, span: span.clone() });
            hosts.extend(written.filter_map(|at| name(at, section.report)).map(|at| at.value));
        }
        section.end();
        let Some(At { value: name, span }) = called else { continue };
        if let Some(first) = seen.iter().find(|other| other.value == name) {
            let first = section.report.shown(&first.span, &span);
            let what = format!("there is another [[qos]] with the name {name:?}, in {first}");
            section.add(&span, what, "give each its own `name`");
        }
        seen.push(At { value: name.clone(), span });
        limits.push(LimitConfig { name, limit, hosts });
    }
    limits
}

/// Reads the limit of a namespace, and the name of a shared one.
pub(super) fn of_namespace(
    section: &mut TableReader<'_>,
    names: &[String],
) -> (Limit, Option<String>) {
    if !section.has("limit") {
        return (Limit::default(), None);
    }
    let mut section = section.table("limit", "[subsystem.namespace.limit]");
    let own = limit(&mut section);
    let form = "the `name` of a [[qos]]";
    let shared = section.take::<String>("shared", form);
    if let Some(At { value, span }) = shared.as_ref().filter(|at| !names.contains(&at.value)) {
        section.add(span, format!("there is no [[qos]] with the name {value:?}"), form);
    }
    if own.is_none() && shared.is_none() {
        let what = "[subsystem.namespace.limit] limits nothing";
        section.add(section.span(), what, "add `iops`, `bandwidth` or `shared`");
    }
    section.end();
    (own, shared.map(|at| at.value))
}

fn limit(section: &mut TableReader<'_>) -> Limit {
    let mut limit = Limit::default();
    let form = "a number of commands a second, at least 1";
    match section.take::<u32>("iops", form) {
        Some(At { value: 0, span }) => section.add(&span, "`iops` is 0", format!("write {form}")),
        found => limit.iops = found.map(|at| at.value),
    }
    match section.take::<Size>("bandwidth", SIZE_FORM) {
        Some(At { value: Size(0), span }) => {
            section.add(&span, "`bandwidth` is 0", "write bytes a second, such as \"200MiB\"");
        }
        found => limit.bandwidth = found.map(|at| at.value.0),
    }
    let form = format!("milliseconds from 0 to {MOST_BURST_MS}");
    let is_valid = |burst_ms: &u32| *burst_ms <= MOST_BURST_MS;
    limit.burst_ms = section.checked("burst_ms", &form, is_valid).unwrap_or(limit.burst_ms);
    limit
}

/// Displays a limit.
pub(crate) struct Described<'a>(pub(crate) &'a Limit);

impl fmt::Display for Described<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Described(limit) = self;
        f.write_str("at most ")?;
        if let Some(iops) = limit.iops {
            f.write_str(&count(iops, "command"))?;
        }
        if let Some(bandwidth) = limit.bandwidth {
            let and = if limit.iops.is_some() { " and " } else { "" };
            write!(f, "{and}{}", Size(bandwidth))?;
        }
        write!(f, " a second, bursts of {} ms", limit.burst_ms)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::core::subsystem::rate_limit::Limit;

    const LEAST: &str = r#"
[[listener]]
address = "0.0.0.0"
[[qos]]
name = "gold"
iops = 1000
bandwidth = "200MiB"
burst_ms = 50
hosts = ["nqn.2026-11.host:a", "nqn.2026-11.host:b"]
[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:disk1"
allow_any_host = true
[[subsystem.namespace]]
nsid = 1
kind = "null"
size = "1GiB"
[subsystem.namespace.limit]
iops = 500
shared = "gold"
"#;

    #[test]
    fn a_namespace_has_a_limit_of_its_own_and_shares_others() {
        let config = Config::parse(LEAST).unwrap();
        let gold = &config.quotas[0];
        let limit = Limit { iops: Some(1000), bandwidth: Some(200 << 20), burst_ms: 50 };
        assert_eq!((&*gold.name, gold.limit, gold.hosts.len()), ("gold", limit, 2));
        let namespace = &config.subsystems[0].namespaces[0];
        let own = Limit { iops: Some(500), ..Limit::default() };
        assert_eq!((namespace.limit, namespace.shared_limit.as_deref()), (own, Some("gold")));
        let text = config.to_string();
        assert!(text.contains("at most 500 commands a second, bursts of 100 ms"), "{text}");
        assert!(text.contains("under the limit \"gold\""), "{text}");
    }

    #[test]
    fn every_mistake_has_a_remedy() {
        for (from, to, said) in [
            ("iops = 500", "iops = 0", "`iops` is 0: write a number of commands"),
            ("\"200MiB\"", "0", "`bandwidth` is 0: write bytes a second"),
            ("burst_ms = 50", "burst_ms = 10001", "`burst_ms` is 10001: write milliseconds"),
            ("shared = \"gold\"", "shared = \"tin\"", "there is no [[qos]] with the name"),
            ("iops = 500\nshared = \"gold\"", "", "limits nothing: add `iops`"),
            ("nqn.2026-11.host:b", "b", "not an NQN"),
            ("name = \"gold\"", "iop = 5", "[[qos]] has no `name`"),
        ] {
            let text = LEAST.replace(from, to);
            assert_ne!(text, LEAST);
            let errors = Config::parse(&text).unwrap_err().to_string();
            assert!(errors.contains(said), "{errors}");
        }
    }
}
