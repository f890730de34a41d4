//! What a configuration may say and hardly means.

use nvme::log::AnaState;

use super::{AuthenticationConfig, CaptureConfig, Config, NamespaceConfig, NamespaceKind};
use crate::ana::{ANA_GROUPS, ANATT_S};
use crate::disk::Fault;

impl Config {
    /// What is allowed but probably not meant, one sentence each.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        if let Some(CaptureConfig { path, payload: true, .. }) = &self.capture {
            warnings.push(format!(
                "{} will hold what hosts read and write: see who may read it",
                path.display()
            ));
        }
        let AuthenticationConfig { required, discovery, hosts, .. } = &self.authentication;
        if (*required || *discovery) && hosts.is_empty() {
            warnings.push(
                "authentication is required and no host can: add [[host]] with a \
                 `dhchap_key_file`"
                    .to_owned(),
            );
        }
        for listener in &self.listeners {
            if (1..=ANA_GROUPS).any(|group| listener.ana.state(group) == AnaState::CHANGE) {
                warnings.push(format!(
                    "{} has groups in the state \"change\": hosts reset their controllers when that \
                     lasts, so name another state within {ANATT_S} s",
                    listener.address
                ));
            }
        }
        for subsystem in &self.subsystems {
            let nqn = &subsystem.nqn;
            for NamespaceConfig { nsid, fault, .. } in &subsystem.namespaces {
                if *fault != Fault::None {
                    warnings.push(format!(
                        "namespace {nsid} of {nqn} shows the fault \"{fault}\": that is for tests"
                    ));
                }
            }
            if !subsystem.allow_any_host && subsystem.hosts.is_empty() {
                warnings.push(format!(
                    "no host can connect to {nqn}: list `hosts`, or set `allow_any_host = true`"
                ));
            }
            if subsystem.allow_any_host && !subsystem.hosts.is_empty() {
                warnings.push(format!(
                    "every host can connect to {nqn}: with `allow_any_host = true` the list of \
                     hosts says nothing"
                ));
            }
            if let Some(managed) = &subsystem.managed
                && !managed.any_host
                && managed.hosts.is_empty()
            {
                warnings.push(format!(
                    "no host may manage the namespaces of {nqn}: list `hosts` in \
                     [subsystem.managed]"
                ));
            }
            if subsystem.namespaces.is_empty() && subsystem.managed.is_none() {
                warnings.push(format!("{nqn} has no namespace: hosts will find no disk there"));
            }
            for (nsid, hosts) in &subsystem.offer.masks {
                for host in hosts.iter().filter(|host| !subsystem.admits(host)) {
                    warnings.push(format!(
                        "namespace {nsid} of {nqn} is shown to {host}, which may not connect: add \
                         it to `hosts` of the subsystem"
                    ));
                }
            }
            for namespace in &subsystem.namespaces {
                if matches!(namespace.kind, NamespaceKind::Ram { .. }) {
                    warnings.push(format!(
                        "namespace {} of {nqn} is in memory: its data end with the daemon",
                        namespace.nsid
                    ));
                }
            }
        }
        warnings
    }
}
