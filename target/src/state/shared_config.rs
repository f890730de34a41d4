//! The shared configuration of a gateway group: one text for all gateways, in versions.
//!
//! ```text
//! apply on one gateway ─► object in RADOS: `version` and `config`, one operation that compares the
//!       former version ─► the other gateways notice the version, and apply the text
//! ```
//!
//! Every gateway keeps the version that it has applied in its state directory, for a start without
//! the cluster. A text that cannot be read is never taken for an empty one.

use std::fmt;
use std::path::Path;

use nix::errno::Errno;
use nvmfd_gateway::record::{Applied, Key, SharedVersion};

use crate::blockdev::rados::{ObjectClient, Update, UpdateError};
use crate::blockdev::record::Record;
use crate::config::{GroupConfig, digest};
use crate::state::atomic_file::PreparedFile;
use crate::state::record::StateDir;

/// Key of the text in the object of the group.
const TEXT_KEY: &str = "config";
/// Name of the copy in the state directory.
const COPY: &str = "shared-configuration";

/// A version of the shared configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SharedConfig {
    /// Its number, with the digest of the text.
    pub version: SharedVersion,
    /// TOML.
    pub text: String,
}

/// Why the shared configuration cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SharedReadError {
    /// The cluster does not answer.
    #[error("the cluster does not answer: {0}")]
    Unreachable(String),
    /// It is not what a gateway has written.
    #[error(
        "the shared configuration in {0} is damaged: apply it again on a gateway (`nvmfctl apply`)"
    )]
    Damaged(String),
}

/// Why the shared configuration was not replaced.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SharedWriteError {
    /// Another gateway has applied a newer version.
    Newer(SharedVersion),
    /// The cluster does not answer: nothing has changed.
    Unreachable(String),
    /// The cluster has not answered in time: the version may be there, now or later.
    Unknown(u64),
}

impl fmt::Display for SharedWriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SharedWriteError::Newer(SharedVersion { number, gateway, .. }) => {
                write!(
                    f,
                    "version {number}, applied on gateway {gateway}, is newer: nothing was changed"
                )
            }
            SharedWriteError::Unreachable(why) => write!(
                f,
                "this gateway cannot share a configuration, and nothing was changed: the cluster \
                 does not answer ({why})"
            ),
            SharedWriteError::Unknown(number) => write!(
                f,
                "the cluster has not answered in time: version {number} may be shared or not; this \
                 gateway applies it if it is"
            ),
        }
    }
}

impl SharedConfig {
    /// That of a group that has none yet: no subsystem.
    pub fn none() -> SharedConfig {
        let (digest, gateway) = (digest(""), "-".to_owned());
        let version = SharedVersion { number: 0, digest, gateway, at_unix_s: 0 };
        SharedConfig { version, text: String::new() }
    }

    /// The version after one with this number.
    #[must_use]
    pub fn after(number: u64, text: String, gateway: &str, at_unix_s: u64) -> SharedConfig {
        let (number, gateway) = (number + 1, gateway.to_owned());
        let version = SharedVersion { number, digest: digest(&text), gateway, at_unix_s };
        SharedConfig { version, text }
    }

    /// Reads the copy in a state directory; none if there is no copy.
    ///
    /// # Errors
    /// One sentence about a copy that cannot be read, or is damaged.
    pub fn load_copy(directory: Option<&Path>) -> Result<SharedConfig, String> {
        let copy = directory.map(|directory| StateDir(directory).load(COPY)).transpose()?;
        Ok(copy.flatten().unwrap_or_else(SharedConfig::none))
    }

    /// Writes and syncs the copy beside the present one.
    ///
    /// # Errors
    /// One sentence.
    pub fn prepare_copy(&self, directory: Option<&Path>) -> Result<PreparedCopy, String> {
        let prepare = |directory: &Path| {
            let failed =
                |error| format!("{} cannot be written: {error}", directory.join(COPY).display());
            StateDir(directory).prepare(COPY, self).map_err(failed)
        };
        directory.map(prepare).transpose().map(PreparedCopy)
    }

    /// Reads the object of a group; none if the group has no shared configuration yet. Blocks.
    ///
    /// # Errors
    /// As it says.
    pub fn read(
        client: &ObjectClient,
        object: &str,
    ) -> Result<Option<SharedConfig>, SharedReadError> {
        let version_key = Key::Version.to_string();
        let pairs = match client.read_prefixes(object, &[&version_key, TEXT_KEY]) {
            Ok(pairs) => pairs,
            Err(Errno::ENOENT) => return Ok(None),
            Err(errno) => return Err(SharedReadError::Unreachable(errno.desc().to_owned())),
        };
        let value = |key: &str| pairs.get(key).map(Vec::as_slice);
        parse(value(&version_key), value(TEXT_KEY))
            .ok_or_else(|| SharedReadError::Damaged(object.to_owned()))
    }

    /// Replaces the version in the object of a group, unless that is a newer one than `base`, for the
    /// gateway of a slot, which commits it then: it is noted as in force there by the same operation,
    /// so that no gateway that lacks it takes over meanwhile. Blocks.
    ///
    /// # Errors
    /// As it says. Nothing has changed, unless it is unknown.
    pub fn write(
        &self,
        base: &BaseVersion,
        client: &ObjectClient,
        group: &GroupConfig,
    ) -> Result<(), SharedWriteError> {
        let object = &group.object();
        let applied = Applied { version: self.version.number, refused: None };
        let current = read_version(client, object)?;
        if let Some(newer) = newer(base, current.as_deref()) {
            return Err(SharedWriteError::Newer(newer));
        }
        let version_key = Key::Version.to_string();
        let update = Update {
            create: true,
            compare: vec![(version_key.clone(), current)],
            set: vec![
                (version_key, self.version.to_string().into_bytes()),
                // A value is not empty.
                (TEXT_KEY.to_owned(), format!("{}\n", self.text).into_bytes()),
                (Key::Applied(group.slot).to_string(), applied.to_string().into_bytes()),
            ],
            remove: Vec::new(),
        };
        match client.update(object, &update) {
            Ok(()) => Ok(()),
            Err(UpdateError::Conflict) => {
                let winner = read_version(client, object)?;
                let unknown = SharedWriteError::Unreachable("its version has changed".to_owned());
                let winner = winner.as_deref().and_then(version);
                Err(winner.map_or(unknown, SharedWriteError::Newer))
            }
            Err(UpdateError::Errno(Errno::ETIMEDOUT)) => {
                Err(SharedWriteError::Unknown(self.version.number))
            }
            Err(UpdateError::Errno(errno)) => {
                Err(SharedWriteError::Unreachable(errno.desc().to_owned()))
            }
        }
    }
}

fn read_version(client: &ObjectClient, object: &str) -> Result<Option<Vec<u8>>, SharedWriteError> {
    let key = Key::Version.to_string();
    match client.read_prefixes(object, &[&key]) {
        Ok(mut pairs) => Ok(pairs.remove(&key)),
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(SharedWriteError::Unreachable(errno.desc().to_owned())),
    }
}

/// The version that another one replaces.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum BaseVersion {
    /// This one, which is in force here.
    InForce(SharedVersion),
    /// The one of this number, which could not be applied here, or an earlier one.
    Refused(u64),
}

/// The version of the group, if it is another than the base, and not an older one: the object was
/// lost or restored, and may be replaced. So may a damaged value.
fn newer(base: &BaseVersion, current: Option<&[u8]>) -> Option<SharedVersion> {
    let current = version(current?)?;
    let is_replaced = match base {
        BaseVersion::InForce(base) => current.number < base.number || current == *base,
        BaseVersion::Refused(number) => current.number <= *number,
    };
    (!is_replaced).then_some(current)
}

fn version(value: &[u8]) -> Option<SharedVersion> {
    str::from_utf8(value).ok()?.parse().ok()
}

/// The two values of the object; the outer option: they fit.
fn parse(version_value: Option<&[u8]>, text: Option<&[u8]>) -> Option<Option<SharedConfig>> {
    let (Some(value), Some(text)) = (version_value, text) else {
        return (version_value.is_none() && text.is_none()).then_some(None);
    };
    let text = str::from_utf8(text).ok()?.strip_suffix('\n')?.to_owned();
    let version = version(value)?;
    (version.digest == digest(&text)).then_some(Some(SharedConfig { version, text }))
}

/// A copy that is ready to replace the present one; none without a state directory.
#[derive(Debug)]
#[must_use]
pub struct PreparedCopy(Option<PreparedFile>);

impl PreparedCopy {
    /// Replaces the copy.
    ///
    /// # Errors
    /// One sentence. Either copy may be there.
    pub fn persist(self) -> Result<(), String> {
        let persisted = self.0.map_or(Ok(()), PreparedFile::persist);
        persisted.map_err(|error| {
            format!("the copy of the shared configuration cannot be written: {error}")
        })
    }
}

impl Record for SharedConfig {
    const KIND: &'static str = "shared-configuration";
    const REMEDY: &'static str = "remove it while the Ceph cluster is reachable";

    fn emit(&self) -> String {
        format!("{}\n{}\n", self.version, self.text)
    }

    fn parse(body: &str) -> Option<SharedConfig> {
        let (version, text) = body.split_once('\n')?;
        let (version, text) = (version.parse::<SharedVersion>().ok()?, text.strip_suffix('\n')?);
        (version.digest == digest(text)).then(|| SharedConfig { version, text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use crate::state::shared_config::*;

    #[test]
    fn a_local_copy_round_trips_and_a_damaged_one_is_an_error() {
        let directory = tempfile::tempdir().unwrap();
        let at = Some(directory.path());
        assert_eq!(SharedConfig::load_copy(at), Ok(SharedConfig::none()));
        for text in ["", "[[subsystem]]\nnqn = 'x' # crc32 7\n", "no end"] {
            let config = SharedConfig::after(4, text.to_owned(), "a", 7);
            config.prepare_copy(at).unwrap().persist().unwrap();
            assert_eq!(SharedConfig::load_copy(at), Ok(config));
        }
        let path = directory.path().join(COPY);
        let good = std::fs::read(&path).unwrap();
        for (byte, bit) in (0..good.len()).flat_map(|at| (0..8).map(move |bit| (at, 1 << bit))) {
            let mut bad = good.clone();
            bad[byte] ^= bit;
            std::fs::write(&path, bad).unwrap();
            assert!(SharedConfig::load_copy(at).is_err(), "byte {byte}, {bit:#x}");
        }
    }

    /// A daemon that is installed later may be a gateway of another group.
    #[test]
    fn a_purge_of_the_debian_package_removes_the_copy() {
        let script = include_str!("../../../configs/debian/postrm");
        let names = script.lines().find_map(|line| line.trim().strip_prefix("for name in "));
        assert!(names.unwrap().split(' ').any(|name| name == COPY), "{names:?}");
    }

    #[test]
    fn a_version_that_does_not_match_the_text_is_rejected() {
        let one = SharedConfig::after(0, "a = 1".to_owned(), "a", 7);
        let (version, text) = (one.version.to_string().into_bytes(), b"a = 1\n".to_vec());
        assert_eq!(super::parse(Some(&version), Some(&text)), Some(Some(one)));
        assert_eq!(super::parse(None, None), Some(None), "the group has none yet");
        for (version, text) in [
            (Some(&version[..]), None),
            (None, Some(&text[..])),
            (Some(&version[..]), Some(&b"a = 2\n"[..])),
            (Some(&version[..]), Some(&b""[..])),
            (Some(&b"2 1 x"[..]), Some(&text[..])),
        ] {
            assert_eq!(super::parse(version, text), None);
        }
    }

    #[test]
    fn a_version_is_replaced_unless_another_gateway_has_a_newer_one() {
        let after = |number, gateway| SharedConfig::after(number, "a".to_owned(), gateway, 7);
        let (one, two, other) = (after(0, "a"), after(1, "a"), after(1, "b"));
        let is_newer = |base: &BaseVersion, current: &SharedConfig| {
            super::newer(base, Some(current.version.to_string().as_bytes())).is_some()
        };
        let in_force = |config: &SharedConfig| BaseVersion::InForce(config.version.clone());
        let newer = |base, current| is_newer(&in_force(base), current);
        assert!(!is_newer(&BaseVersion::Refused(2), &other), "it could not be applied here");
        assert!(is_newer(&BaseVersion::Refused(1), &other));
        assert!(!newer(&one, &one));
        assert!(newer(&one, &two));
        assert!(newer(&two, &other), "the same number of another gateway");
        assert!(!newer(&two, &one), "the object was restored from an older one");
        assert_eq!(super::newer(&in_force(&two), None), None, "the object was lost");
        let said = SharedWriteError::Newer(two.version).to_string();
        assert!(said.contains("version 2, applied on gateway a, is newer"), "{said}");
    }
}
