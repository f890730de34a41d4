//! Reads secrets from files that only their owner may read.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use nix::unistd::{User, geteuid};
use nvme::auth::Secret;
use zeroize::Zeroizing;

use crate::core::auth::{Keyring, Keys, Rules};

use super::AuthenticationConfig;

/// Bytes of the longest key file that is read.
const MOST_BYTES: u64 = 4096;

/// The user that the package creates for the daemon.
const USER: &str = "nvmfd";

impl AuthenticationConfig {
    /// Reads every key file.
    ///
    /// # Errors
    /// One sentence for each file that cannot be used. None contains a part of a secret.
    pub fn keyring(&self) -> Result<Keyring, Vec<String>> {
        match self.usable_keyring() {
            (keyring, mistakes) if mistakes.is_empty() => Ok(keyring),
            (_, mistakes) => Err(mistakes),
        }
    }

    /// Reads every key file. Hosts with one that cannot be used must authenticate, and cannot: they
    /// are refused. Returns one sentence for each such file, as [`AuthenticationConfig::keyring`].
    pub(crate) fn usable_keyring(&self) -> (Keyring, Vec<String>) {
        let (mut hosts, mut refused, mut mistakes) = (HashMap::new(), Vec::new(), Vec::new());
        for host in &self.hosts {
            let mut read = |path| read_secret(path).map_err(|what| mistakes.push(what)).ok();
            let secret = read(&host.key_file);
            match (secret, host.controller_key_file.as_deref().map(&mut read)) {
                (Some(host_secret), controller @ (None | Some(Some(_)))) => {
                    let keys = Keys { host: host_secret, controller: controller.flatten() };
                    hosts.insert(host.nqn, keys);
                }
                _ => refused.push(host.nqn),
            }
        }
        let own = self.hosts.iter().filter(|host| host.has_own_policy());
        let policies = own.map(|host| (host.nqn, Arc::new(host.policy(&self.policy)))).collect();
        let (required, discovery) = (self.required, self.discovery);
        let exempt = self.exempt.iter().copied().collect();
        let rules = Rules { required, discovery, exempt, policies };
        let mut keyring = Keyring::new(hosts, self.policy.clone()).with_rules(rules);
        keyring.revoke(refused);
        (keyring, mistakes)
    }

    /// Returns the errors of the key files, one sentence each, and warnings about access by the
    /// daemon if it runs as another user and root checks.
    #[must_use]
    pub(crate) fn examine_keys(&self, reader: KeyReader) -> (Vec<String>, Vec<String>) {
        let (mut mistakes, mut doubts) = (Vec::new(), Vec::new());
        let hosts = self.hosts.iter();
        for path in hosts.flat_map(|h| [Some(&h.key_file), h.controller_key_file.as_ref()]) {
            match path.map(|path| read_secret_for(path, reader)) {
                Some(Ok((_, doubt))) => doubts.extend(doubt),
                Some(Err(mistake)) => mistakes.push(mistake),
                None => {}
            }
        }
        (mistakes, doubts)
    }
}

/// The reader of a secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum KeyReader {
    /// This process.
    This,
    /// The daemon, checked by root: its user ID, if known.
    Daemon(Option<u32>),
}

impl KeyReader {
    /// The reader for a daemon: the owner of its state directory, or the user of its package.
    pub fn of(state_directory: Option<&Path>) -> KeyReader {
        if !geteuid().is_root() {
            return KeyReader::This;
        }
        let owner = state_directory.and_then(|directory| Some(directory.metadata().ok()?.uid()));
        let package = || Some(User::from_name(USER).ok()??.uid.as_raw());
        KeyReader::Daemon(owner.filter(|uid| *uid != 0).or_else(package))
    }
}

/// Reads a secret from a file that only its owner can read: this user, or root.
///
/// # Errors
/// One sentence with the path and a remedy; never a part of the secret.
fn read_secret(path: &Path) -> Result<Secret, String> {
    read_secret_for(path, KeyReader::This).map(|(secret, _)| secret)
}

/// As [`read_secret`], for a reader; with a warning if it may not be able to read the file.
fn read_secret_for(path: &Path, reader: KeyReader) -> Result<(Secret, Option<String>), String> {
    let (text, doubt) = read_private(path, reader)?;
    let secret = Secret::parse(text.trim()).map_err(|error| {
        format!("{} holds no secret: {error}; `nvme gen-dhchap-key` makes one", path.display())
    })?;
    Ok((secret, doubt))
}

/// Reads the text of a file that only its owner can read, for a reader; with a warning if it may not
/// be able to read the file.
pub(super) fn read_private(
    path: &Path,
    reader: KeyReader,
) -> Result<(Zeroizing<String>, Option<String>), String> {
    let shown = path.display();
    let us = geteuid().as_raw();
    // Opening a pipe could block for ever.
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
    let mut text = Zeroizing::new(String::with_capacity(MOST_BYTES as usize));
    file.take(MOST_BYTES)
        .read_to_string(&mut text)
        .map_err(|error| format!("{shown} cannot be read: {error}"))?;
    Ok((text, doubt))
}

/// Checks the owner of a file; a warning if its reader may be another user.
fn owned(path: &Path, owner: u32, us: u32, reader: KeyReader) -> Result<Option<String>, String> {
    let shown = path.display();
    let wrong =
        |reader: u32| format!("{shown} belongs to user {owner}: run `chown {reader} {shown}`");
    match reader {
        KeyReader::This if owner != us && owner != 0 => Err(wrong(us)),
        KeyReader::Daemon(Some(daemon)) if owner == 0 && daemon != 0 => Ok(Some(format!(
            "{shown} belongs to root: a daemon that runs as user {daemon} cannot read it; run \
             `chown {daemon} {shown}`"
        ))),
        KeyReader::Daemon(Some(daemon)) if owner != daemon => Err(wrong(daemon)),
        _ => Ok(None),
    }
}

fn unreadable(path: &Path, us: u32, error: &io::Error) -> String {
    let shown = path.display();
    match error.kind() {
        io::ErrorKind::PermissionDenied if us != 0 => {
            format!(
                "{shown} cannot be read by user {us}: `chown {us} {shown}`; see its directory too"
            )
        }
        _ => format!("{shown} cannot be read: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::HostConfig;
    use crate::config::key_files::*;
    use crate::core::auth::Requirement;
    use nvme::Nqn;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;
    use tempfile::tempdir;

    const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n";

    #[test]
    fn key_files_accessible_to_other_users_are_refused() {
        let directory = tempdir().unwrap();
        let path = directory.path().join("key");
        assert!(read_secret(&path).unwrap_err().contains("cannot be read"));
        assert!(read_secret(directory.path()).unwrap_err().contains("is not a file"));
        let pipe = directory.path().join("pipe");
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
    fn key_file_ownership_is_checked_for_the_daemons_user() {
        let path = Path::new("/key");
        let says = |owner, us, reader| owned(path, owner, us, reader);
        let daemon = KeyReader::Daemon(Some(997));
        assert_eq!(says(997, 0, daemon), Ok(None));
        assert_eq!(says(997, 0, KeyReader::Daemon(None)), Ok(None));
        assert_eq!(says(0, 0, KeyReader::Daemon(None)), Ok(None));
        let doubt = says(0, 0, daemon).unwrap().unwrap();
        assert!(doubt.contains("user 997 cannot read it; run `chown 997 /key`"), "{doubt}");
        assert!(says(998, 0, daemon).unwrap_err().contains("chown 997 /key"));
        // A user that reads the file for itself.
        assert_eq!(
            (says(997, 997, KeyReader::This), says(0, 997, KeyReader::This)),
            (Ok(None), Ok(None))
        );
        assert!(says(998, 997, KeyReader::This).unwrap_err().contains("chown 997 /key"));
        assert!(says(997, 0, KeyReader::This).is_err(), "a daemon that runs as root");
        let denied = unreadable(path, 0, &io::ErrorKind::PermissionDenied.into());
        assert!(!denied.contains("chown"), "{denied}");
    }

    #[test]
    fn the_daemons_user_is_the_owner_of_its_state_directory() {
        use std::os::unix::fs::chown;

        let directory = tempdir().unwrap();
        // Only root can change the owner of files.
        if chown(directory.path(), Some(65_534), None).is_err() {
            assert_eq!(KeyReader::of(Some(directory.path())), KeyReader::This);
            return;
        }
        let reader = KeyReader::of(Some(directory.path()));
        assert_eq!(reader, KeyReader::Daemon(Some(65_534)));
        let path = directory.path().join("key");
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
        let found = || config.examine_keys(reader);
        assert_eq!((found().0.len(), found().1.len()), (0, 1), "root's");
        chown(&path, Some(65_534), None).unwrap();
        assert_eq!(found(), (vec![], vec![]));
        chown(&path, Some(65_533), None).unwrap();
        assert_eq!((found().0.len(), found().1.len()), (1, 0), "somebody else's");
    }

    #[test]
    fn authentication_requirements_follow_from_keys_and_policy() {
        let directory = tempdir().unwrap();
        let path = directory.path().join("key");
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
            let keyring = config.keyring().unwrap();
            assert_eq!((keyring.len(), keyring.is_empty()), (1, false));
            [(known, disk), (other, disk), (known, Nqn::DISCOVERY), (other, Nqn::DISCOVERY)]
                .map(|(host, subsystem)| keyring.demand(&host, &subsystem))
        };
        use Requirement::{Impossible, Nothing, Proof};
        assert_eq!(demands(false, false), [Proof, Nothing, Nothing, Nothing]);
        assert_eq!(demands(true, false), [Proof, Impossible, Nothing, Nothing]);
        assert_eq!(demands(false, true), [Proof, Nothing, Proof, Impossible]);
        assert_eq!(demands(true, true), [Proof, Impossible, Proof, Impossible]);
    }

    #[test]
    fn every_unreadable_key_file_is_reported() {
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
        let mistakes = config.keyring().unwrap_err();
        assert_eq!(mistakes.len(), 2);
        let (keyring, _) = config.usable_keyring();
        let disk = "nqn.2026-11.io.nvmfd:disk".parse().unwrap();
        assert_eq!(keyring.demand(&config.hosts[0].nqn, &disk), Requirement::Impossible);
        assert!(mistakes[0].contains("/nonexistent/a") && mistakes[1].contains("/nonexistent/b"));
    }
}
