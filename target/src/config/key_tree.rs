//! A configuration as a tree of keys and values, named as in the text. Configurations are compared
//! by their trees, without knowledge of the keys.

use std::collections::BTreeSet;
use std::fmt::Display;

use nvme::Nqn;
use serde::{Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::{Config, Size};
use crate::core::auth::Policy;
use crate::core::subsystem::rate_limit::Limit;
use crate::core::subsystem::{AccessPolicy, DiscoveryConfig, Referral};

/// Returns the tree of a configuration. Listeners and keys of hosts are omitted: they are
/// displayed on separate lines.
pub(crate) fn tree(config: &Config) -> Value {
    // Every type in it is serializable: all map keys are strings.
    serde_json::to_value(config).unwrap_or_default()
}

/// Displays the keys of a table that have values.
pub(crate) fn all(table: &Map<String, Value>) -> String {
    let has_value =
        |value: &Value| !value.is_null() && value.as_array().is_none_or(|all| !all.is_empty());
    let given = table.iter().filter(|(_, value)| has_value(value));
    given.map(|(key, value)| format!("{key} {}", text(value))).collect::<Vec<_>>().join(", ")
}

/// Displays a value.
pub(crate) fn text(value: &Value) -> String {
    match value {
        Value::Null => "none".to_owned(),
        Value::String(text) => text.clone(),
        Value::Array(list) => {
            format!("[{}]", list.iter().map(text).collect::<Vec<_>>().join(", "))
        }
        Value::Object(keys) => format!("({})", all(keys)),
        other => other.to_string(),
    }
}

/// Serializes with `Display`.
pub(super) fn shown<S: Serializer>(value: &impl Display, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(value)
}

/// Serializes a list with `Display`.
pub(super) fn each<'a, T, S>(all: &'a T, to: S) -> Result<S::Ok, S::Error>
where
    &'a T: IntoIterator<Item: Display>,
    S: Serializer,
{
    to.collect_seq(all.into_iter().map(|each| each.to_string()))
}

/// Serializes bytes with their unit.
pub(super) fn size<T, S>(bytes: &T, to: S) -> Result<S::Ok, S::Error>
where
    T: Copy + Into<u64>,
    S: Serializer,
{
    shown(&Size((*bytes).into()), to)
}

/// Serializes an optional number of bytes with its unit.
pub(super) fn some_size<T, S>(bytes: &Option<T>, to: S) -> Result<S::Ok, S::Error>
where
    T: Copy + Into<u64>,
    S: Serializer,
{
    bytes.map(|bytes| Size(bytes.into()).to_string()).serialize(to)
}

/// Hexadecimal digits.
pub(super) fn hex<S: Serializer>(id: &[u8; 16], to: S) -> Result<S::Ok, S::Error> {
    digits(id).serialize(to)
}

/// Hexadecimal digits, where there are any.
pub(super) fn some_hex<S: Serializer>(id: &Option<[u8; 8]>, to: S) -> Result<S::Ok, S::Error> {
    id.map(|id| digits(&id)).serialize(to)
}

fn digits(id: &[u8]) -> String {
    id.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Permissions, as `chmod` takes them.
pub(super) fn mode<S: Serializer>(mode: &u32, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{mode:04o}"))
}

/// The keys of a limit.
pub(super) fn limit<S: Serializer>(limit: &Limit, to: S) -> Result<S::Ok, S::Error> {
    let Limit { iops, bandwidth, burst_ms } = *limit;
    let bandwidth = bandwidth.map(|bytes| Size(bytes).to_string());
    let keys = [("iops", iops.into()), ("bandwidth", bandwidth.into())];
    to.collect_map(keys.into_iter().chain([("burst_ms", Value::from(burst_ms))]))
}

/// The keys of hashes and groups.
pub(super) fn policy<S: Serializer>(policy: &Policy, to: S) -> Result<S::Ok, S::Error> {
    let Policy { hashes, groups } = policy;
    let hashes: Vec<String> = hashes.iter().map(ToString::to_string).collect();
    let groups: Vec<String> = groups.iter().map(ToString::to_string).collect();
    to.collect_map([("hashes", hashes), ("groups", groups)])
}

/// The only hosts that see something. An empty list would be left out, as if all did.
fn only(hosts: &BTreeSet<Nqn>) -> Value {
    match hosts.is_empty() {
        true => json!("nobody"),
        false => hosts.iter().map(Nqn::as_str).collect(),
    }
}

/// The keys of access to a subsystem, and of the masks of its namespaces.
pub(super) fn offer<S: Serializer>(offer: &AccessPolicy, to: S) -> Result<S::Ok, S::Error> {
    let AccessPolicy { listeners, queue_depth, io_queues, controllers, max_nsid, masks, .. } =
        offer;
    let AccessPolicy { mdts_bytes, cntlids, duplicates, .. } = offer;
    let keys = [
        ("listeners", json!(listeners)),
        ("queue_depth", json!(queue_depth)),
        ("io_queues", json!(io_queues)),
        ("mdts", json!(mdts_bytes.map(|bytes| Size(bytes.into()).to_string()))),
        ("controllers", json!(controllers)),
        ("max_nsid", json!(max_nsid)),
        ("cntlids", json!([cntlids.start(), cntlids.end()])),
        ("duplicate_hosts", json!(duplicates.name())),
    ];
    let keys = keys.map(|(key, value)| (key.to_owned(), value));
    let masks =
        masks.iter().map(|(nsid, hosts)| (format!("`hosts` of namespace {nsid}"), only(hosts)));
    to.collect_map(keys.into_iter().chain(masks))
}

/// The keys of discovery.
pub(super) fn discovery<S: Serializer>(
    discovery: &DiscoveryConfig,
    to: S,
) -> Result<S::Ok, S::Error> {
    let DiscoveryConfig { nqn, by_listener, mdns, referrals, cntlids: _ } = discovery;
    let referral = |Referral { nqn, address, hosts }: &Referral| {
        let hosts = hosts.as_ref().map(only);
        json!({ "nqn": nqn.as_str(), "address": address, "hosts": hosts })
    };
    let referrals: Vec<Value> = referrals.iter().map(referral).collect();
    let keys = json!({
        "nqn": nqn.as_str(), "by_listener": by_listener, "mdns": mdns, "referral": referrals,
    });
    keys.serialize(to)
}
