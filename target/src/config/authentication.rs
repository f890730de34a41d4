//! `[authentication]` and `[[host]]`: hosts that must authenticate, and their key files.

use std::path::PathBuf;

use nvme::Nqn;
use nvme::auth::{GroupId, HashId};
use serde::Serialize;

use super::key_tree;
use super::schema::{NQN_FORM, name};
use super::table_reader::{At, TableReader};
use crate::core::auth::Policy;

/// Authentication of hosts.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct AuthenticationConfig {
    /// Hosts without a key are rejected by every subsystem.
    pub required: bool,
    /// Discovery controllers require authentication as well.
    pub discovery: bool,
    /// Hashes and groups that may be negotiated, best first.
    #[serde(flatten, serialize_with = "key_tree::policy")]
    pub policy: Policy,
    /// The hosts that have keys; each name is unique.
    #[serde(skip)]
    pub hosts: Vec<HostConfig>,
    /// Hosts that are exempt from authentication; none of those with keys.
    #[serde(skip)]
    pub exempt: Vec<Nqn>,
}

/// A host with a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HostConfig {
    /// Its NQN.
    pub nqn: Nqn,
    /// Absolute path of the file of its own secret.
    pub key_file: PathBuf,
    /// Absolute path of the file of the secret that controllers use towards it.
    pub controller_key_file: Option<PathBuf>,
    /// Hashes that may be negotiated with it, best first; empty: those of all hosts.
    pub hashes: Option<Vec<HashId>>,
    /// Groups that may be negotiated with it, best first; empty: those of all hosts.
    pub groups: Option<Vec<GroupId>>,
}

impl HostConfig {
    /// Whether its hashes or groups differ from those of all hosts.
    pub(crate) fn has_own_policy(&self) -> bool {
        self.hashes.is_some() || self.groups.is_some()
    }

    /// Hashes and groups that may be negotiated with it; `all`: those of other hosts.
    pub fn policy(&self, all: &Policy) -> Policy {
        let (hashes, groups) = (self.hashes.clone(), self.groups.clone());
        Policy {
            hashes: hashes.unwrap_or_else(|| all.hashes.clone()),
            groups: groups.unwrap_or_else(|| all.groups.clone()),
        }
    }
}

/// Hashes by their names in the configuration.
const HASHES: [(&str, HashId); 3] =
    [("sha256", HashId::SHA256), ("sha384", HashId::SHA384), ("sha512", HashId::SHA512)];

/// Groups by their names in the configuration.
const GROUPS: [(&str, GroupId); 6] = [
    ("null", GroupId::NULL),
    ("ffdhe2048", GroupId::FFDHE2048),
    ("ffdhe3072", GroupId::FFDHE3072),
    ("ffdhe4096", GroupId::FFDHE4096),
    ("ffdhe6144", GroupId::FFDHE6144),
    ("ffdhe8192", GroupId::FFDHE8192),
];

/// Name of a hash in the configuration.
pub(crate) fn hash_name(hash: HashId) -> &'static str {
    HASHES.iter().find(|(_, known)| *known == hash).map_or("unknown", |(name, _)| name)
}

/// Name of a group in the configuration.
pub(crate) fn group_name(group: GroupId) -> &'static str {
    GROUPS.iter().find(|(_, known)| *known == group).map_or("unknown", |(name, _)| name)
}

/// Content of a `[[host]]`.
enum Named {
    /// It must authenticate.
    Keyed(HostConfig),
    /// It is exempt from authentication.
    Exempt(Nqn),
}

pub(super) fn authentication(root: &mut TableReader<'_>) -> AuthenticationConfig {
    let mut config = AuthenticationConfig::default();
    let mut section = root.table("authentication", "[authentication]");
    config.required = section.flag("required", false);
    config.discovery = section.flag("discovery", false);
    if let Some(chosen) = choice(&mut section, "hashes", &HASHES) {
        config.policy.hashes = chosen;
    }
    if let Some(chosen) = choice(&mut section, "groups", &GROUPS) {
        config.policy.groups = chosen;
    }
    section.end();
    let mut seen: Vec<At<Nqn>> = Vec::new();
    for table in root.tables("host", "[[host]]") {
        match host(table, &mut seen) {
            Some(Named::Keyed(host)) => config.hosts.push(host),
            Some(Named::Exempt(nqn)) => config.exempt.push(nqn),
            None => {}
        }
    }
    config
}

/// A list of names, best first, no name twice and at least one.
fn choice<T: Copy>(
    section: &mut TableReader<'_>,
    key: &'static str,
    known: &[(&str, T)],
) -> Option<Vec<T>> {
    let names: Vec<String> = known.iter().map(|(name, _)| format!("{name:?}")).collect();
    let form = format!("a list of {}, best first", names.join(", "));
    let At { value, span } = section.take::<Vec<String>>(key, &form)?;
    let mut chosen = Vec::new();
    for (n, written) in value.iter().enumerate() {
        match known.iter().find(|(name, _)| name == written) {
            Some(_) if value[..n].contains(written) => {
                section.add(&span, format!("`{key}` lists {written:?} twice"), "list it once");
            }
            Some((_, known)) => chosen.push(*known),
            None => {
                section.add(&span, format!("`{key}` lists {written:?}"), format!("write {form}"))
            }
        }
    }
    if value.is_empty() {
        section.add(&span, format!("`{key}` is empty"), format!("write {form}"));
    }
    Some(chosen)
}

fn host(mut section: TableReader<'_>, seen: &mut Vec<At<Nqn>>) -> Option<Named> {
    let nqn = section.need::<String>("nqn", NQN_FORM);
    let nqn = nqn.and_then(|at| name(at, section.report));
    if let Some(At { value, span }) = &nqn {
        if let Some(first) = seen.iter().find(|old| old.value == *value) {
            let first = section.report.shown(&first.span, span);
            let what = format!("this host was there before, in {first}");
            section.add(span, what, "write one [[host]] for each host");
        }
        seen.push(At { value: *value, span: span.clone() });
    }
    let form = "an absolute path, such as \"/etc/nvmfd/keys/host1\"";
    let authenticate = section.take::<bool>("authenticate", "true or false");
    let exempt = authenticate.filter(|at| !at.value);
    let key = match exempt {
        Some(_) => section.take::<PathBuf>("dhchap_key_file", form),
        None => section.need::<PathBuf>("dhchap_key_file", form),
    };
    let controller = section.take::<PathBuf>("dhchap_ctrl_key_file", form);
    for At { value, span } in [&key, &controller].into_iter().flatten() {
        if !value.is_absolute() {
            section.add(span, "the path is not absolute", format!("write {form}"));
        }
    }
    let hashes = choice(&mut section, "hashes", &HASHES);
    let groups = choice(&mut section, "groups", &GROUPS);
    section.end();
    let nqn = nqn?.value;
    if exempt.is_some() {
        return Some(Named::Exempt(nqn));
    }
    let controller_key_file = controller.map(|at| at.value);
    let key_file = key?.value;
    Some(Named::Keyed(HostConfig { nqn, key_file, controller_key_file, hashes, groups }))
}
