//! Warnings about valid settings that are probably unintended.

use std::path::Path;

use nvme::log::AnaState;

use super::{
    AuthenticationConfig, CaptureConfig, Config, NamespaceConfig, NamespaceKind, SubsystemConfig,
};
use crate::blockdev::InjectedFault;
use crate::core::subsystem::ana::{ANA_GROUPS, ANATT_S};

impl Config {
    /// Warnings about valid settings, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        nothing_served(self, &mut warnings);
        if let Some(CaptureConfig { path, payload: true, .. }) = &self.capture {
            warnings.push(format!(
                "{} will contain the data of hosts: check its permissions",
                path.display()
            ));
        }
        authentication(&self.authentication, &mut warnings);
        for listener in &self.listeners {
            if (1..=ANA_GROUPS).any(|group| listener.ana.state(group) == AnaState::CHANGE) {
                warnings.push(format!(
                    "{} has groups in the state \"change\": hosts reset their controllers when \
                     that lasts, so name another state within {ANATT_S} s",
                    listener.address
                ));
            }
        }
        for subsystem in &self.subsystems {
            faults(subsystem, &mut warnings);
            admission(subsystem, &mut warnings);
            visibility(subsystem, &mut warnings);
            media(subsystem, &mut warnings);
        }
        warnings
    }
}

/// Missing listeners and subsystems.
fn nothing_served(config: &Config, warnings: &mut Vec<String>) {
    for (is_none, what, section, command) in [
        (config.listeners.is_empty(), "listener", "[[listener]]", "nvmfctl listener add"),
        (config.subsystems.is_empty(), "subsystem", "[[subsystem]]", "nvmfctl subsystem add"),
    ] {
        if is_none {
            warnings.push(format!(
                "there is no {what}, so no host can connect: add {section}, or `{command}` while \
                 the daemon serves"
            ));
        }
    }
}

/// Authentication that no host can pass, and hosts without a key.
fn authentication(config: &AuthenticationConfig, warnings: &mut Vec<String>) {
    let AuthenticationConfig { required, discovery, hosts, exempt, .. } = config;
    if (*required || *discovery) && hosts.is_empty() {
        warnings.push(
            "authentication is required and no host can: add [[host]] with a \
             `dhchap_key_file`"
                .to_owned(),
        );
    }
    for nqn in exempt {
        warnings.push(match required {
            true => format!(
                "{nqn} is refused: it has no key, and `required = true` asks every host for one"
            ),
            false => format!("{nqn} need not authenticate: any host with this name is admitted"),
        });
    }
}

/// Injected faults of namespaces.
fn faults(subsystem: &SubsystemConfig, warnings: &mut Vec<String>) {
    for NamespaceConfig { nsid, fault, .. } in &subsystem.namespaces {
        if *fault != InjectedFault::None {
            warnings.push(format!(
                "namespace {nsid} of {} shows the fault \"{fault}\": that is for tests",
                subsystem.nqn
            ));
        }
    }
}

/// Hosts that may connect and manage namespaces.
fn admission(subsystem: &SubsystemConfig, warnings: &mut Vec<String>) {
    let nqn = &subsystem.nqn;
    if !subsystem.allow_any_host && subsystem.hosts.is_empty() {
        warnings.push(format!(
            "no host can connect to {nqn}: list `hosts`, or set `allow_any_host = true`"
        ));
    }
    if subsystem.allow_any_host && !subsystem.hosts.is_empty() {
        warnings.push(format!(
            "every host can connect to {nqn}: with `allow_any_host = true` its `hosts` are only \
             those for which resources are reserved"
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
}

/// Namespaces that hosts can access.
fn visibility(subsystem: &SubsystemConfig, warnings: &mut Vec<String>) {
    let nqn = &subsystem.nqn;
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
}

/// Devices with names that may change, and volatile data.
fn media(subsystem: &SubsystemConfig, warnings: &mut Vec<String>) {
    let nqn = &subsystem.nqn;
    for NamespaceConfig { nsid, kind, .. } in &subsystem.namespaces {
        match kind {
            NamespaceKind::File { path, .. } if is_fleeting(path) => warnings.push(format!(
                "namespace {nsid} of {nqn}: {} may be another disk after a restart: use its name \
                 in /dev/disk/by-id (and configure its current `uuid`, if it has none)",
                path.display()
            )),
            NamespaceKind::Ram { .. } => warnings.push(format!(
                "namespace {nsid} of {nqn} is in memory: its data end with the daemon"
            )),
            _ => {}
        }
    }
}

/// Whether a path is a kernel name of a disk, which depends on the order of detection.
fn is_fleeting(path: &Path) -> bool {
    let name = path.strip_prefix("/dev").ok().and_then(Path::to_str).unwrap_or_default();
    let by_letter = ["sd", "vd", "xvd", "hd"];
    let by_number = ["nvme", "dm-", "mmcblk", "loop", "rbd", "zd"];
    let follows = |prefixes: &[&str], is_next: fn(&char) -> bool| {
        let rest = prefixes.iter().find_map(|prefix| name.strip_prefix(prefix));
        rest.is_some_and(|rest| rest.chars().next().as_ref().is_some_and(is_next))
    };
    let is_plain = !name.contains('/');
    is_plain
        && (follows(&by_letter, char::is_ascii_lowercase)
            || follows(&by_number, char::is_ascii_digit))
}

#[cfg(test)]
mod tests {
    use crate::config::lints::*;

    #[test]
    fn unstable_kernel_device_names_cause_a_warning() {
        for name in ["sda", "sdab3", "vdb", "nvme0n1", "nvme1n1p2", "dm-3", "loop0"] {
            assert!(is_fleeting(&Path::new("/dev").join(name)), "{name}");
        }
        let lasting = "disk/by-id/wwn-0x5000 mapper/vg-lv vg/sda md0 data nvme-fabrics sd";
        for name in lasting.split(' ') {
            assert!(!is_fleeting(&Path::new("/dev").join(name)), "{name}");
        }
        assert!(!is_fleeting(Path::new("/srv/sda")));
        let text = "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                    \"nqn.2026-11.io.nvmfd:d\"\nallow_any_host = true\n\
                    [[subsystem.namespace]]\nnsid = 1\npath = \"/dev/sdb\"\n";
        let warnings = |text: &str| Config::parse(text).unwrap().warnings();
        assert!(warnings(text)[0].contains("/dev/disk/by-id"));
        assert!(warnings(&text.replace("sdb", "disk/by-id/x")).is_empty());
    }
}
