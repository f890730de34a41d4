//! Secrets of hosts, and the parameters that may be negotiated with them.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::sync::Arc;

use nvme::Nqn;
use nvme::auth::{Failure, GroupId, HashId, Negotiate, Secret};

use super::exchange::GRACE;

/// The secrets of one host.
#[derive(Debug)]
pub struct Keys {
    /// Secret of the host.
    pub host: Secret,
    /// Secret of controllers for this host.
    pub controller: Option<Secret>,
}

/// Hashes and groups that may be negotiated, best first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Hashes.
    pub hashes: Vec<HashId>,
    /// Groups.
    pub groups: Vec<GroupId>,
}

impl Default for Policy {
    fn default() -> Policy {
        let hashes = vec![HashId::SHA256, HashId::SHA384, HashId::SHA512];
        // Without the two largest: the host chooses, and for us they take ten times as long.
        let groups =
            vec![GroupId::FFDHE3072, GroupId::FFDHE4096, GroupId::FFDHE2048, GroupId::NULL];
        Policy { hashes, groups }
    }
}

impl Policy {
    /// Describes what the host offers and what is allowed, if its offer has failed.
    pub(super) fn lacks(&self, offer: &Negotiate, why: Failure) -> Option<String> {
        let (kind, offered, allowed) = match why {
            Failure::HASH_UNUSABLE => ("hashes", listed(offer.hashes()), listed(&self.hashes)),
            Failure::GROUP_UNUSABLE => ("groups", listed(offer.groups()), listed(&self.groups)),
            _ => return None,
        };
        Some(format!("of {kind} it offers {offered}, and it may use {allowed}"))
    }
}

/// `sha256, sha384 with ffdhe3072, null`.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with {}", listed(&self.hashes), listed(&self.groups))
    }
}

/// Names, with commas between them.
fn listed<T: fmt::Display>(all: impl IntoIterator<Item = T>) -> String {
    let all: Vec<String> = all.into_iter().map(|each| each.to_string()).collect();
    all.join(", ")
}

/// Authentication requirement of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Requirement {
    /// Not required.
    Nothing,
    /// Required, and possible.
    Proof,
    /// Required, and not possible: there is no key.
    Impossible,
}

/// Keys and rules of authentication; immutable.
#[derive(Clone, Debug, Default)]
pub struct Keyring {
    hosts: HashMap<Nqn, Arc<Keys>>,
    /// Hosts that had a key, or have one at another gateway, and have no entry: refused under these
    /// names.
    revoked: BTreeSet<Nqn>,
    /// Why it is not known which hosts have had keys: each without a key may be one.
    unknown: Option<Arc<str>>,
    /// What is negotiable with every host without settings of its own.
    policy: Arc<Policy>,
    rules: Rules,
}

/// Rules besides the keys of hosts; by default, hosts without a key need not authenticate.
#[derive(Clone, Debug, Default)]
pub struct Rules {
    /// Hosts without a key are refused by every subsystem.
    pub required: bool,
    /// Whether discovery controllers require authentication too.
    pub discovery: bool,
    /// Hosts that are configured to need no key.
    pub exempt: HashSet<Nqn>,
    /// What is negotiable with hosts with settings of their own.
    pub policies: HashMap<Nqn, Arc<Policy>>,
}

impl Keyring {
    /// The keys of hosts that must authenticate; others need not.
    pub fn new(hosts: impl IntoIterator<Item = (Nqn, Keys)>, policy: Policy) -> Keyring {
        let hosts = hosts.into_iter().map(|(nqn, keys)| (nqn, Arc::new(keys))).collect();
        Keyring { hosts, policy: Arc::new(policy), ..Keyring::default() }
    }

    /// Sets the rules.
    #[must_use]
    pub fn with_rules(self, rules: Rules) -> Keyring {
        Keyring { rules, ..self }
    }

    /// Whether `host` must prove itself to a controller of `subsystem`.
    pub fn demand(&self, host: &Nqn, subsystem: &Nqn) -> Requirement {
        let discovery = subsystem.is_discovery();
        match (self.hosts.contains_key(host), discovery) {
            (_, true) if !self.rules.discovery => Requirement::Nothing,
            (true, _) => Requirement::Proof,
            (false, true) => Requirement::Impossible,
            (false, false) if self.rules.required || self.is_revoked(host) => {
                Requirement::Impossible
            }
            (false, false) => Requirement::Nothing,
        }
    }

    /// Adds hosts that have had keys. Those without a key now, and not configured to need none, are
    /// refused: removing the key of a host does not open its name to everybody.
    pub fn revoke(&mut self, hosts: impl IntoIterator<Item = Nqn>) {
        let is_settled =
            |nqn: &Nqn| self.hosts.contains_key(nqn) || self.rules.exempt.contains(nqn);
        let revoked = hosts.into_iter().filter(|nqn| !is_settled(nqn));
        self.revoked = std::mem::take(&mut self.revoked).into_iter().chain(revoked).collect();
    }

    /// It is not known which hosts have had keys, for this reason: all without a key are refused that
    /// are not configured to need none.
    pub fn revoke_all(&mut self, why: &str) {
        self.unknown = Some(why.into());
    }

    /// Why it is not known which hosts have had keys, if it is not.
    pub fn unknown(&self) -> Option<&str> {
        self.unknown.as_deref()
    }

    fn is_revoked(&self, host: &Nqn) -> bool {
        let may_have_had_a_key = self.unknown.is_some() && !self.rules.exempt.contains(host);
        may_have_had_a_key || self.revoked.contains(host)
    }

    /// All hosts that have or have had keys, except those configured to need none.
    pub fn known(&self) -> BTreeSet<Nqn> {
        self.hosts.keys().chain(&self.revoked).copied().collect()
    }

    /// Whether the secret of a host has changed or was removed.
    pub(crate) fn differs_for(&self, host: &Nqn, old: &Keyring) -> bool {
        match (self.hosts.get(host), old.hosts.get(host)) {
            (Some(new), Some(old)) => !new.host.is(&old.host),
            (new, old) => new.is_some() != old.is_some(),
        }
    }

    /// The secrets of a host.
    pub fn keys(&self, host: &Nqn) -> Option<Arc<Keys>> {
        self.hosts.get(host).cloned()
    }

    /// What is negotiable with a host without settings of its own.
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy)
    }

    /// What is negotiable with this host.
    pub(crate) fn policy_of(&self, host: &Nqn) -> Arc<Policy> {
        Arc::clone(self.rules.policies.get(host).unwrap_or(&self.policy))
    }

    /// Number of hosts with keys.
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Whether no host has a key.
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// The differences to `old`, one line each, without secrets.
    pub fn differences(&self, old: &Keyring) -> Vec<String> {
        let mut lines = Vec::new();
        for (nqn, keys) in &self.hosts {
            match old.hosts.get(nqn) {
                None => lines.push(format!("host {nqn} must authenticate")),
                Some(was) if !keys.host.is(&was.host) => lines.push(format!(
                    "the key of host {nqn} changed: controllers admitted by it are disconnected unless \
                     they authenticate with the new one within {} s",
                    GRACE.as_secs()
                )),
                Some(was) if !keys.are(was) => lines.push(format!("keys of host {nqn} changed")),
                Some(_) => {}
            }
        }
        for nqn in old.hosts.keys().filter(|nqn| !self.hosts.contains_key(*nqn)) {
            lines.push(match self.revoked.contains(nqn) {
                true => format!(
                    "the key of host {nqn} was removed: it is refused until it has one again, or \
                     `nvmfctl host unkey` says that it needs none"
                ),
                false if self.rules.required => format!("the key of host {nqn} was removed"),
                false => format!(
                    "host {nqn} need not authenticate any more: any host that uses its name is admitted"
                ),
            });
        }
        let rules = |keyring: &Keyring| (keyring.rules.required, keyring.rules.discovery);
        if rules(self) != rules(old) {
            lines.push("the rules of authentication changed".to_owned());
        }
        if self.unknown.is_none() && old.unknown.is_some() {
            lines.push("it is known again which hosts have had keys".to_owned());
        }
        lines.sort();
        lines
    }
}

impl Keys {
    fn are(&self, other: &Keys) -> bool {
        let same_controller = match (&self.controller, &other.controller) {
            (Some(a), Some(b)) => a.is(b),
            (None, None) => true,
            _ => false,
        };
        self.host.is(&other.host) && same_controller
    }
}

#[cfg(test)]
mod tests {
    use crate::auth::keys::*;

    const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    /// The host chooses among what both know, and for us those two take ten times as long.
    #[test]
    fn the_two_largest_dh_groups_are_not_in_the_default_policy() {
        let groups = Policy::default().groups;
        assert!(!groups.contains(&GroupId::FFDHE6144) && !groups.contains(&GroupId::FFDHE8192));
        assert_eq!(groups.len(), 4);
    }

    #[test]
    fn hosts_without_a_key_are_refused_while_it_is_unknown_which_had_one() {
        let [keyed, exempt, other] = ["keyed", "exempt", "other"]
            .map(|name| format!("nqn.2026-11.host:{name}").parse::<Nqn>().unwrap());
        let disk: Nqn = "nqn.2026-11.io.nvmfd:disk".parse().unwrap();
        let keys = Keys { host: Secret::parse(SECRET).unwrap(), controller: None };
        let rules = Rules { exempt: [exempt].into(), ..Rules::default() };
        let mut keyring = Keyring::new([(keyed, keys)], Policy::default()).with_rules(rules);
        let demands =
            |keyring: &Keyring, at| [keyed, exempt, other].map(|n| keyring.demand(&n, at));
        let known = keyring.clone();
        keyring.revoke_all("the list is damaged");
        let expected = [Requirement::Proof, Requirement::Nothing, Requirement::Impossible];
        assert_eq!(demands(&keyring, &disk), expected);
        assert_eq!(demands(&keyring, &Nqn::DISCOVERY), [Requirement::Nothing; 3]);
        assert_eq!(known.differences(&keyring), ["it is known again which hosts have had keys"]);
    }

    #[test]
    fn a_host_with_a_removed_key_is_refused_unless_exempt() {
        let (known, disk) = ("nqn.2026-11.host:known", "nqn.2026-11.io.nvmfd:disk");
        let [known, disk] = [known, disk].map(|name| name.parse::<Nqn>().unwrap());
        let keys = Keys { host: Secret::parse(SECRET).unwrap(), controller: None };
        let policy = Policy::clone(&Keyring::default().policy());
        let old = Keyring::new([(known, keys)], policy);
        let mut removed = Keyring::default();
        assert_eq!(removed.demand(&known, &disk), Requirement::Nothing);
        removed.revoke(old.known());
        assert_eq!(removed.demand(&known, &disk), Requirement::Impossible);
        assert!(removed.differences(&old)[0].contains("it is refused until"));
        assert!(removed.differs_for(&known, &old) && !removed.differs_for(&disk, &old));
        // It is recorded until it has an entry again.
        let mut later = Keyring::default();
        later.revoke(removed.known());
        assert_eq!(later.demand(&known, &disk), Requirement::Impossible);
        let rules = Rules { exempt: [known].into(), ..Rules::default() };
        let mut exempt = Keyring::default().with_rules(rules);
        exempt.revoke(later.known());
        assert_eq!(exempt.demand(&known, &disk), Requirement::Nothing);
        assert!(exempt.differences(&old)[0].contains("any host that uses its name is admitted"));
        assert!(exempt.known().is_empty());
    }
}
