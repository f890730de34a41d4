//! The secrets of hosts, read from files that nobody else may read, and what may be agreed on.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::unistd::{User, geteuid};
use nvme::Nqn;
use nvme::auth::{Failure, GroupId, HashId, Negotiate, Secret};

use super::GRACE;
use crate::config::AuthenticationConfig;

/// Bytes of the longest key file that is read.
const MOST_BYTES: u64 = 4096;

/// The user that the package makes for the daemon.
const USER: &str = "nvmfd";

/// The secrets of one host.
#[derive(Debug)]
pub struct Keys {
    /// By which it proves itself.
    pub host: Secret,
    /// By which controllers prove themselves to it.
    pub controller: Option<Secret>,
}

/// What may be agreed on, best first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Hashes.
    pub hashes: Vec<HashId>,
    /// Groups.
    pub groups: Vec<GroupId>,
}

impl Policy {
    /// What a host offers and what is allowed, where that is why its offer has failed.
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

/// Whether a host must prove itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Demand {
    /// It need not.
    Nothing,
    /// It must, and can.
    Proof,
    /// It would have to and cannot: there is no key.
    Impossible,
}

/// All that authentication needs to know; immutable.
#[derive(Debug)]
pub struct Keyring {
    hosts: HashMap<Nqn, Arc<Keys>>,
    /// Of whom it is said that they need no key.
    exempt: HashSet<Nqn>,
    /// Who had a key, and of whom nothing is said now: nobody is let in under these names.
    revoked: BTreeSet<Nqn>,
    /// What may be agreed on with every host that has nothing of its own.
    policy: Arc<Policy>,
    /// What may be agreed on with each of the others.
    policies: HashMap<Nqn, Arc<Policy>>,
    required: bool,
    discovery: bool,
}

impl Default for Keyring {
    fn default() -> Keyring {
        let config = AuthenticationConfig::default();
        let AuthenticationConfig { policy, required, discovery, .. } = config;
        let (hosts, exempt, revoked, policies) = Default::default();
        let policy = Arc::new(policy);
        Keyring { hosts, exempt, revoked, policy, policies, required, discovery }
    }
}

impl Keyring {
    /// Of these hosts, who must prove themselves; nobody else need.
    #[must_use]
    pub fn new(hosts: impl IntoIterator<Item = (Nqn, Keys)>, policy: Policy) -> Keyring {
        let hosts = hosts.into_iter().map(|(nqn, keys)| (nqn, Arc::new(keys))).collect();
        Keyring { hosts, policy: Arc::new(policy), ..Keyring::default() }
    }

    /// Reads every file that the configuration names.
    ///
    /// # Errors
    /// A sentence for each file that cannot be used. None shows a part of a secret.
    pub fn load(config: &AuthenticationConfig) -> Result<Keyring, Vec<String>> {
        let (mut hosts, mut mistakes) = (HashMap::new(), Vec::new());
        for host in &config.hosts {
            let mut read = |path| read_secret(path).map_err(|what| mistakes.push(what)).ok();
            let secret = read(&host.key_file);
            let controller = host.controller_key_file.as_deref().and_then(&mut read);
            if let Some(secret) = secret {
                hosts.insert(host.nqn, Arc::new(Keys { host: secret, controller }));
            }
        }
        if !mistakes.is_empty() {
            return Err(mistakes);
        }
        let policy = Arc::new(config.policy.clone());
        let (required, discovery) = (config.required, config.discovery);
        let own = config.hosts.iter().filter(|host| host.has_own_policy());
        let policies = own.map(|host| (host.nqn, Arc::new(host.policy(&policy)))).collect();
        let (exempt, revoked) = (config.exempt.iter().copied().collect(), BTreeSet::new());
        Ok(Keyring { hosts, exempt, revoked, policy, policies, required, discovery })
    }

    /// What is wrong with the files that the configuration names, a sentence each, and what may be,
    /// for the daemon: another user than who looks, where root does.
    #[must_use]
    pub fn examine(config: &AuthenticationConfig, reader: Reader) -> (Vec<String>, Vec<String>) {
        let (mut mistakes, mut doubts) = (Vec::new(), Vec::new());
        let hosts = config.hosts.iter();
        for path in hosts.flat_map(|h| [Some(&h.key_file), h.controller_key_file.as_ref()]) {
            match path.map(|path| read_secret_for(path, reader)) {
                Some(Ok((_, doubt))) => doubts.extend(doubt),
                Some(Err(mistake)) => mistakes.push(mistake),
                None => {}
            }
        }
        (mistakes, doubts)
    }

    /// Whether `host` must prove itself to a controller of `subsystem`.
    #[must_use]
    pub fn demand(&self, host: &Nqn, subsystem: &Nqn) -> Demand {
        let discovery = subsystem.is_discovery();
        match (self.hosts.contains_key(host), discovery) {
            (_, true) if !self.discovery => Demand::Nothing,
            (true, _) => Demand::Proof,
            (false, true) => Demand::Impossible,
            (false, false) if self.required || self.revoked.contains(host) => Demand::Impossible,
            (false, false) => Demand::Nothing,
        }
    }

    /// These hosts have had keys. Whoever has none now, and of whom it is not said that it needs none,
    /// is refused: who takes the key of a host away does not mean that anybody may use its name.
    pub fn revoke(&mut self, hosts: impl IntoIterator<Item = Nqn>) {
        let is_settled = |nqn: &Nqn| self.hosts.contains_key(nqn) || self.exempt.contains(nqn);
        let revoked = hosts.into_iter().filter(|nqn| !is_settled(nqn));
        self.revoked = std::mem::take(&mut self.revoked).into_iter().chain(revoked).collect();
    }

    /// All hosts that have or have had keys, but for those of whom it is said that they need none.
    #[must_use]
    pub fn known(&self) -> BTreeSet<Nqn> {
        self.hosts.keys().chain(&self.revoked).copied().collect()
    }

    /// Whether the secret by which a host proves itself is another one than it was, or gone.
    #[must_use]
    pub fn differs_for(&self, host: &Nqn, old: &Keyring) -> bool {
        match (self.hosts.get(host), old.hosts.get(host)) {
            (Some(new), Some(old)) => !new.host.is(&old.host),
            (new, old) => new.is_some() != old.is_some(),
        }
    }

    /// The secrets of a host.
    #[must_use]
    pub fn keys(&self, host: &Nqn) -> Option<Arc<Keys>> {
        self.hosts.get(host).cloned()
    }

    /// What may be agreed on with a host that has nothing of its own.
    #[must_use]
    pub fn policy(&self) -> Arc<Policy> {
        Arc::clone(&self.policy)
    }

    /// What may be agreed on with this host.
    #[must_use]
    pub fn policy_of(&self, host: &Nqn) -> Arc<Policy> {
        Arc::clone(self.policies.get(host).unwrap_or(&self.policy))
    }

    /// How many hosts have keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.hosts.len()
    }

    /// Whether no host has a key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty()
    }

    /// What is different from `old`, one line each, without secrets.
    #[must_use]
    pub fn differences(&self, old: &Keyring) -> Vec<String> {
        let mut lines = Vec::new();
        for (nqn, keys) in &self.hosts {
            match old.hosts.get(nqn) {
                None => lines.push(format!("host {nqn} must authenticate")),
                Some(was) if !keys.host.is(&was.host) => lines.push(format!(
                    "the key of host {nqn} changed: what it let in is disconnected unless it \
                     authenticates with the new one within {} s",
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
                false if self.required => format!("the key of host {nqn} was removed"),
                false => format!(
                    "host {nqn} need not authenticate any more: whoever uses its name is let in"
                ),
            });
        }
        let rules = |keyring: &Keyring| (keyring.required, keyring.discovery);
        if rules(self) != rules(old) {
            lines.push("the rules of authentication changed".to_owned());
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

/// Who is to read a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reader {
    /// This process.
    This,
    /// The daemon, about whom root asks: the number of its user, where that can be told.
    Daemon(Option<u32>),
}

impl Reader {
    /// The daemon, as whoever looks at its configuration may tell who that is: whom its state
    /// directory belongs to, or the user of its package.
    #[must_use]
    pub fn of(state_directory: Option<&Path>) -> Reader {
        if !geteuid().is_root() {
            return Reader::This;
        }
        let owner = state_directory.and_then(|folder| Some(folder.metadata().ok()?.uid()));
        let package = || Some(User::from_name(USER).ok()??.uid.as_raw());
        Reader::Daemon(owner.filter(|uid| *uid != 0).or_else(package))
    }
}

/// Reads a secret from a file that only its owner, who we or root must be, can read.
///
/// # Errors
/// One sentence with the path and a remedy; never a part of the secret.
pub fn read_secret(path: &Path) -> Result<Secret, String> {
    read_secret_for(path, Reader::This).map(|(secret, _)| secret)
}

/// The same, for somebody; and a sentence where that one may not be able to read it.
fn read_secret_for(path: &Path, reader: Reader) -> Result<(Secret, Option<String>), String> {
    let shown = path.display();
    let us = geteuid().as_raw();
    // Of a pipe, nobody may ever open the other end.
    let mut how = File::options();
    how.read(true).custom_flags(libc::O_NONBLOCK);
    let file = how.open(path).map_err(|error| unreadable(path, us, &error))?;
    let metadata = file.metadata().map_err(|error| format!("{shown} cannot be read: {error}"))?;
    if !metadata.is_file() {
        return Err(format!("{shown} is not a file: name one that holds the secret"));
    }
    if metadata.mode() & 0o077 != 0 {
        let mode = metadata.mode() & 0o777;
        return Err(format!("others may use {shown} (mode {mode:03o}): run `chmod 600 {shown}`"));
    }
    let doubt = owned(path, metadata.uid(), us, reader)?;
    let mut text = zeroize::Zeroizing::new(String::with_capacity(MOST_BYTES as usize));
    file.take(MOST_BYTES)
        .read_to_string(&mut text)
        .map_err(|error| format!("{shown} cannot be read: {error}"))?;
    let secret = Secret::parse(text.trim()).map_err(|error| {
        format!("{shown} holds no secret: {error}; `nvme gen-dhchap-key` makes one")
    })?;
    Ok((secret, doubt))
}

/// Whether a file may belong to this user; a sentence where its reader may be somebody else.
fn owned(path: &Path, owner: u32, us: u32, reader: Reader) -> Result<Option<String>, String> {
    let shown = path.display();
    let wrong =
        |reader: u32| format!("{shown} belongs to user {owner}: run `chown {reader} {shown}`");
    match reader {
        Reader::This if owner != us && owner != 0 => Err(wrong(us)),
        Reader::Daemon(Some(daemon)) if owner == 0 && daemon != 0 => Ok(Some(format!(
            "{shown} belongs to root: a daemon that runs as user {daemon} cannot read it; run \
             `chown {daemon} {shown}`"
        ))),
        Reader::Daemon(Some(daemon)) if owner != daemon => Err(wrong(daemon)),
        _ => Ok(None),
    }
}

fn unreadable(path: &Path, us: u32, error: &io::Error) -> String {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::PermissionDenied if us != 0 => {
            format!("{shown} cannot be read by user {us}: `chown {us} {shown}`; see its folder too")
        }
        _ => format!("{shown} cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::HostConfig;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;
    use tempfile::tempdir;

    const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n";

    #[test]
    fn only_files_that_are_ours_alone_are_read() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("key");
        assert!(read_secret(&path).unwrap_err().contains("cannot be read"));
        assert!(read_secret(folder.path()).unwrap_err().contains("is not a file"));
        let pipe = folder.path().join("pipe");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRUSR).unwrap();
        assert!(read_secret(&pipe).unwrap_err().contains("is not a file"), "and nobody waits");
        let says = unreadable(&path, 997, &io::ErrorKind::PermissionDenied.into());
        assert!(says.contains("`chown 997 /"), "{says}");
        write(&path, SECRET).unwrap();
        for mode in [0o644, 0o640, 0o604, 0o620, 0o601] {
            set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            let says = read_secret(&path).unwrap_err();
            assert!(says.contains(&format!("mode {mode:03o}")) && says.contains("chmod 600"));
        }
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        assert!(read_secret(&path).is_ok());
        write(&path, SECRET.replace("AAEC", "AAED")).unwrap();
        let says = read_secret(&path).unwrap_err();
        assert!(says.contains("checksum") && !says.contains("AAED"));
        write(&path, "A".repeat(10_000)).unwrap();
        assert!(read_secret(&path).is_err());
        write(&path, [0xFF; 10]).unwrap();
        assert!(read_secret(&path).is_err());
    }

    #[test]
    fn root_judges_for_the_daemon() {
        let path = Path::new("/key");
        let says = |owner, us, reader| owned(path, owner, us, reader);
        let daemon = Reader::Daemon(Some(997));
        assert_eq!(says(997, 0, daemon), Ok(None));
        assert_eq!(says(997, 0, Reader::Daemon(None)), Ok(None));
        assert_eq!(says(0, 0, Reader::Daemon(None)), Ok(None));
        let doubt = says(0, 0, daemon).unwrap().unwrap();
        assert!(doubt.contains("user 997 cannot read it; run `chown 997 /key`"), "{doubt}");
        assert!(says(998, 0, daemon).unwrap_err().contains("chown 997 /key"));
        // Who reads it for himself.
        assert_eq!(
            (says(997, 997, Reader::This), says(0, 997, Reader::This)),
            (Ok(None), Ok(None))
        );
        assert!(says(998, 997, Reader::This).unwrap_err().contains("chown 997 /key"));
        assert!(says(997, 0, Reader::This).is_err(), "a daemon that runs as root");
        let denied = unreadable(path, 0, &io::ErrorKind::PermissionDenied.into());
        assert!(!denied.contains("chown"), "{denied}");
    }

    #[test]
    fn the_daemon_is_whom_its_state_belongs_to() {
        use std::os::unix::fs::chown;

        let folder = tempdir().unwrap();
        // Only root can give files away.
        if chown(folder.path(), Some(65_534), None).is_err() {
            assert_eq!(Reader::of(Some(folder.path())), Reader::This);
            return;
        }
        let reader = Reader::of(Some(folder.path()));
        assert_eq!(reader, Reader::Daemon(Some(65_534)));
        let path = folder.path().join("key");
        write(&path, SECRET).unwrap();
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let host = HostConfig {
            nqn: "nqn.2026-11.host:a".parse().unwrap(),
            key_file: path.clone(),
            controller_key_file: None,
            hashes: None,
            groups: None,
        };
        let config = AuthenticationConfig { hosts: vec![host], ..Default::default() };
        let found = || Keyring::examine(&config, reader);
        assert_eq!((found().0.len(), found().1.len()), (0, 1), "root's");
        chown(&path, Some(65_534), None).unwrap();
        assert_eq!(found(), (vec![], vec![]));
        chown(&path, Some(65_533), None).unwrap();
        assert_eq!((found().0.len(), found().1.len()), (1, 0), "somebody else's");
    }

    #[test]
    fn what_is_demanded_follows_from_keys_and_rules() {
        let folder = tempdir().unwrap();
        let path = folder.path().join("key");
        write(&path, SECRET).unwrap();
        set_permissions(&path, Permissions::from_mode(0o600)).unwrap();
        let known: Nqn = "nqn.2026-11.host:known".parse().unwrap();
        let other: Nqn = "nqn.2026-11.host:other".parse().unwrap();
        let disk: Nqn = "nqn.2026-11.io.nvmfd:disk".parse().unwrap();
        let demands = |required, discovery| {
            let host = HostConfig {
                nqn: known,
                key_file: path.clone(),
                controller_key_file: None,
                hashes: None,
                groups: None,
            };
            let config = AuthenticationConfig {
                required,
                discovery,
                hosts: vec![host],
                ..AuthenticationConfig::default()
            };
            let keyring = Keyring::load(&config).unwrap();
            assert_eq!((keyring.len(), keyring.is_empty()), (1, false));
            [(known, disk), (other, disk), (known, Nqn::DISCOVERY), (other, Nqn::DISCOVERY)]
                .map(|(host, subsystem)| keyring.demand(&host, &subsystem))
        };
        use Demand::{Impossible, Nothing, Proof};
        assert_eq!(demands(false, false), [Proof, Nothing, Nothing, Nothing]);
        assert_eq!(demands(true, false), [Proof, Impossible, Nothing, Nothing]);
        assert_eq!(demands(false, true), [Proof, Nothing, Proof, Impossible]);
        assert_eq!(demands(true, true), [Proof, Impossible, Proof, Impossible]);
    }

    #[test]
    fn a_name_whose_key_is_removed_is_refused_until_somebody_says_otherwise() {
        let (known, disk) = ("nqn.2026-11.host:known", "nqn.2026-11.io.nvmfd:disk");
        let [known, disk] = [known, disk].map(|name| name.parse::<Nqn>().unwrap());
        let keys = Keys { host: Secret::parse(SECRET.trim()).unwrap(), controller: None };
        let policy = Policy::clone(&Keyring::default().policy());
        let old = Keyring::new([(known, keys)], policy);
        let mut removed = Keyring::default();
        assert_eq!(removed.demand(&known, &disk), Demand::Nothing);
        removed.revoke(old.known());
        assert_eq!(removed.demand(&known, &disk), Demand::Impossible);
        assert!(removed.differences(&old)[0].contains("it is refused until"));
        assert!(removed.differs_for(&known, &old) && !removed.differs_for(&disk, &old));
        // It is known for as long as nothing else is said.
        let mut later = Keyring::default();
        later.revoke(removed.known());
        assert_eq!(later.demand(&known, &disk), Demand::Impossible);
        let exempt = AuthenticationConfig { exempt: vec![known], ..Default::default() };
        let mut exempt = Keyring::load(&exempt).unwrap();
        exempt.revoke(later.known());
        assert_eq!(exempt.demand(&known, &disk), Demand::Nothing);
        assert!(exempt.differences(&old)[0].contains("whoever uses its name is let in"));
        assert!(exempt.known().is_empty());
    }

    #[test]
    fn every_bad_file_is_told() {
        let file = |name: &str| Path::new("/nonexistent").join(name);
        let config = AuthenticationConfig {
            hosts: vec![HostConfig {
                nqn: "nqn.2026-11.host:a".parse().unwrap(),
                key_file: file("a"),
                controller_key_file: Some(file("b")),
                hashes: None,
                groups: None,
            }],
            ..AuthenticationConfig::default()
        };
        let mistakes = Keyring::load(&config).unwrap_err();
        assert_eq!(mistakes.len(), 2);
        assert!(mistakes[0].contains("/nonexistent/a") && mistakes[1].contains("/nonexistent/b"));
    }
}
