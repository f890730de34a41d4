//! The keys of hosts: which are in force, and the list of hosts that are refused without one.

use std::path::Path;

use tracing::error;

use crate::config::{Config, Missing};
use crate::core::auth::Keyring;
use crate::core::registry::Registry;
use crate::error::Fatal;
use crate::state::revoked_hosts::{self, PreparedHosts};

/// The keys of a start. Hosts whose keys cannot be used, or that may have had one, are refused, and
/// keep no others from being served, as missing devices do.
pub(super) fn first(config: &Config, directory: Option<&Path>) -> Result<Keyring, Fatal> {
    let (mut keyring, mistakes) = config.authentication.usable_keyring();
    if config.missing == Missing::Fail && !mistakes.is_empty() {
        return Err(unusable(mistakes));
    }
    for mistake in mistakes {
        error!("{mistake}; the host is refused until a reload can read it");
    }
    directory.into_iter().for_each(|directory| revoke(&mut keyring, directory));
    if let Some(why) = keyring.unknown() {
        if config.missing == Missing::Fail {
            return Err(Fatal(why.to_owned()));
        }
        error!("{why}; every host without a key is refused, unless `authenticate = false`");
    }
    Ok(keyring)
}

/// Formats the errors of key files as one sentence.
fn unusable(mistakes: Vec<String>) -> Fatal {
    Fatal(mistakes.join("; "))
}

/// The keys of a configuration, and the hosts that are refused without one.
pub(super) fn next(registry: &Registry, config: &Config) -> Result<Keyring, Fatal> {
    let mut keyring = config.authentication.keyring().map_err(unusable)?;
    keyring.revoke(registry.keyed_hosts());
    if registry.unknown_keyed_hosts().is_some()
        && let Some(directory) = &config.state_directory
    {
        revoke(&mut keyring, directory);
    }
    Ok(keyring)
}

/// Prepares to keep the hosts that have had keys. It has been reported already of those in
/// force that they cannot be kept.
pub(super) fn prepare(
    registry: &Registry,
    keyring: &Keyring,
    config: &Config,
) -> Result<PreparedHosts, String> {
    // The damaged list stays for the administrator, and refuses the same hosts after a restart.
    if keyring.unknown().is_some() {
        return Ok(PreparedHosts::default());
    }
    let known = keyring.known();
    let prepared = revoked_hosts::prepare(&known, config.state_directory.as_deref());
    match known.is_subset(&registry.keyed_hosts()) {
        true => Ok(prepared.unwrap_or_default()),
        false => prepared,
    }
}

/// Has hosts refused that have had keys: all without a key, if the list of them is damaged.
fn revoke(keyring: &mut Keyring, directory: &Path) {
    match revoked_hosts::read(directory) {
        Ok(hosts) => keyring.revoke(hosts),
        Err(why) => keyring.revoke_all(&why),
    }
}
