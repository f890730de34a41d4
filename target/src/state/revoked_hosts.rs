//! Hosts that have had keys, here or at another gateway of the group, persisted over restarts: a host
//! whose key is removed while the daemon is stopped, or before a restart, is rejected as well.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Mutex;

use nvme::Nqn;

use crate::blockdev::lock;
use crate::blockdev::record::Record;
use crate::core::registry::Registry;
use crate::state::atomic_file::PreparedFile;
use crate::state::record::StateDir;

/// Its name in the state directory.
const NAME: &str = "keyed-hosts";

struct KeyedHosts(BTreeSet<Nqn>);

impl Record for KeyedHosts {
    const KIND: &'static str = "keyed hosts";
    const REMEDY: &'static str = "remove it if no key has been taken away";

    fn emit(&self) -> String {
        self.0.iter().map(|host| format!("{host}\n")).collect()
    }

    fn parse(body: &str) -> Option<KeyedHosts> {
        body.lines().map(|line| line.parse().ok()).collect::<Option<_>>().map(KeyedHosts)
    }
}

/// Returns the hosts that had keys; empty if there is no file yet.
///
/// # Errors
/// A sentence about a file that cannot be read. It never counts as empty.
pub fn read(directory: &Path) -> Result<BTreeSet<Nqn>, String> {
    let hosts = StateDir(directory).load(NAME).map_err(|why| {
        format!("which hosts have had keys, and are refused without one, is not known: {why}")
    })?;
    Ok(hosts.map_or_else(BTreeSet::new, |KeyedHosts(hosts)| hosts))
}

/// Whether this user may not read it, which does not imply that the daemon may not.
pub(crate) fn is_denied(directory: &Path) -> bool {
    StateDir(directory).is_denied(NAME)
}

/// Serializes the writers, which have one temporary name: the gateway of a group is another one.
static WRITING: Mutex<()> = Mutex::new(());

/// The hosts of a change, synced beside the present list; none if they are the same.
#[derive(Debug, Default)]
#[must_use]
pub(crate) struct PreparedHosts(Option<PreparedFile>);

impl PreparedHosts {
    /// Replaces the list.
    ///
    /// # Errors
    /// The I/O error. The list may then be either.
    pub(crate) fn persist(self) -> io::Result<()> {
        let _alone = lock(&WRITING);
        self.0.map_or(Ok(()), PreparedFile::persist)
    }
}

/// Prepares to keep the hosts that have or had keys, if there is a state directory.
///
/// # Errors
/// A sentence with the I/O error.
pub(crate) fn prepare(
    hosts: &BTreeSet<Nqn>,
    directory: Option<&Path>,
) -> Result<PreparedHosts, String> {
    let Some(directory) = directory.filter(|directory| !is_kept(hosts, directory)) else {
        return Ok(PreparedHosts(None));
    };
    let _alone = lock(&WRITING);
    let prepared = StateDir(directory).prepare(NAME, &KeyedHosts(hosts.clone()));
    prepared.map(|file| PreparedHosts(Some(file))).map_err(|error| {
        format!("{} cannot record which hosts have had keys: {error}", directory.display())
    })
}

/// Keeps the hosts that have or had keys, if there is a state directory, and unless the kept list is
/// damaged. Returns a sentence if that fails: then they are refused until the daemon ends.
pub(crate) fn keep(registry: &Registry, directory: Option<&Path>) -> Option<String> {
    let (hosts, is_known) = (registry.keyed_hosts(), registry.unknown_keyed_hosts().is_none());
    let directory = directory.filter(|directory| is_known && !is_kept(&hosts, directory))?;
    let error = write(directory, &hosts).err()?;
    Some(format!(
        "{} cannot be written: {error}; hosts whose keys were removed are refused until the \
         daemon ends only",
        directory.display()
    ))
}

fn is_kept(hosts: &BTreeSet<Nqn>, directory: &Path) -> bool {
    read(directory).is_ok_and(|kept| kept == *hosts)
}

/// Writes the hosts that have or had keys.
///
/// # Errors
/// The I/O error.
pub fn write(directory: &Path, hosts: &BTreeSet<Nqn>) -> io::Result<()> {
    let _alone = lock(&WRITING);
    StateDir(directory).replace(NAME, &KeyedHosts(hosts.clone()))
}

#[cfg(test)]
mod tests {
    use crate::state::revoked_hosts::*;

    #[test]
    fn revoked_hosts_round_trip_and_a_damaged_list_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(read(directory.path()), Ok(BTreeSet::new()), "the first start");
        let names = ["nqn.2026-11.host:a", "nqn.2026-11.host:b"].map(|name| name.parse().unwrap());
        let hosts = BTreeSet::from(names);
        write(directory.path(), &hosts).unwrap();
        assert_eq!(read(directory.path()), Ok(hosts));
        let path = directory.path().join(NAME);
        for damaged in [String::new(), std::fs::read_to_string(&path).unwrap().replace(":b", ":c")]
        {
            std::fs::write(&path, damaged).unwrap();
            assert!(read(directory.path()).unwrap_err().contains("no record"));
        }
        // Nor is a file that cannot be read at all.
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert!(read(directory.path()).unwrap_err().contains("cannot be read"));
    }
}
