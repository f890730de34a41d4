//! `/v1/status`, `/v1/listeners`.

use std::collections::BTreeMap;
use std::process;

use axum::extract::State;
use axum::{Extension, Json};
use nvme::log::AnaState;

use crate::api::{ChangeAccess, GatewayConfigError, Listener, Status};
use crate::blockdev::{Detached, SpaceState};
use crate::config::Config;
use crate::control::handle::ControlHandle;
use crate::core::registry::Controller;
use crate::core::subsystem::ListenerConfig;
use crate::core::subsystem::ana::AnaStates;
use crate::core::subsystem::ns_management::UnavailableNamespace;
use crate::provision::torn;

/// Shows the state of the daemon.
#[utoipa::path(operation_id = "show_status", get, path = "/v1/status", responses((status = 200, body = Status)))]
pub(super) async fn status(
    State(managed): State<ControlHandle>,
    Extension(accepts_changes): Extension<ChangeAccess>,
) -> Json<Status> {
    let (view, running) = (managed.view(), managed.running());
    let config = &running.config;
    let controllers = view.registry.controllers();
    let count = |count: usize| u32::try_from(count).unwrap_or(u32::MAX);
    let overcommitted = file_systems(&managed, SpaceState::Overcommitted);
    Json(Status {
        version: crate::VERSION.to_owned(),
        pid: process::id(),
        uptime_s: view.started.elapsed().as_secs(),
        config_file: running.declared.file().display().to_string(),
        provider: view.provider.clone(),
        reactors: count(view.reactors.len()),
        pool_bytes: view.pool_bytes,
        listeners: listed(config, &controllers),
        subsystems: count(config.subsystems.len()),
        namespaces: count(config.subsystems.iter().map(|s| s.namespaces.len()).sum()),
        controllers: count(controllers.iter().filter(|c| !c.discovery).count()),
        pending: managed.view().pending.list(),
        degraded: degraded(&managed),
        low_space: low_space(&managed),
        needs_restart: running.needs_restart.iter().map(ToString::to_string).collect(),
        unsaved_changes: count(running.declared.changes().kept.len()),
        set_aside_changes: count(running.declared.changes().set_aside.len()),
        warnings: (config.warnings().into_iter())
            .chain(overcommitted)
            .chain(refused_version(&managed))
            .chain(torn::of_all(&view.registry))
            .collect(),
        last_reload: running.last_reload.get(),
        accepts_changes,
    })
}

/// Lists listeners.
#[utoipa::path(operation_id = "list_listeners", get, path = "/v1/listeners", responses((status = 200, body = Vec<Listener>)))]
pub(super) async fn listeners(State(managed): State<ControlHandle>) -> Json<Vec<Listener>> {
    let controllers = managed.view().registry.controllers();
    Json(listed(&managed.running().config, &controllers))
}

fn listed(config: &Config, controllers: &[Controller]) -> Vec<Listener> {
    let by = |c: &Controller| ListenerConfig::of(&config.listeners, c.association.local);
    let describe = |listener: &ListenerConfig| Listener {
        id: listener.id,
        address: listener.address.to_string(),
        ana: (listener.ana.unlike(&AnaStates::default()))
            .map(|(group, state)| (group, ana_name(state)))
            .collect(),
        keep_alive_min_ms: listener.keep_alive_min_ms,
        controllers: (controllers.iter())
            .filter(|c| !c.discovery && by(c).is_some_and(|its| its.id == listener.id))
            .count() as u32,
    };
    config.listeners.iter().map(describe).collect()
}

fn ana_name(state: AnaState) -> String {
    state.name().unwrap_or("reserved").to_owned()
}

/// File systems that are almost full. The sentence stays the same while the state does.
pub(super) fn low_space(managed: &ControlHandle) -> Vec<String> {
    file_systems(managed, SpaceState::Low)
}

/// File systems in a state, each by its first namespace and the number of the others.
fn file_systems(managed: &ControlHandle, state: SpaceState) -> Vec<String> {
    let mut found: BTreeMap<u64, (String, u32)> = BTreeMap::new();
    for subsystem in managed.view().registry.subsystems() {
        for namespace in &subsystem.namespaces {
            let space = namespace.health.allocation().file_system();
            if let Some(space) = space.filter(|space| space.state == state) {
                let first = || format!("namespace {} of {}", namespace.nsid, subsystem.nqn);
                found.entry(space.device).or_insert_with(|| (first(), 0)).1 += 1;
            }
        }
    }
    let names = |(first, count): (String, u32)| match count {
        1 => first,
        count => format!("{first} (and of {} more)", count - 1),
    };
    found.into_values().filter_map(|found| state.warning(&names(found))).collect()
}

/// A version of the shared configuration that this gateway cannot apply.
fn refused_version(managed: &ControlHandle) -> Option<String> {
    let GatewayConfigError { version, why } =
        managed.view().gateway.as_ref()?.group().shared?.refused?;
    Some(format!("version {version} of the shared configuration is not in force here: {why}"))
}

pub(super) fn degraded(managed: &ControlHandle) -> Vec<String> {
    let idle = managed.view().gateway.as_ref().and_then(|gateway| gateway.idle());
    let mut sentences: Vec<String> = idle.into_iter().collect();
    if managed.view().registry.is_leaving() {
        sentences.push("the daemon is stopping: all its paths are inaccessible".to_owned());
    }
    if let Some(why) = managed.view().registry.unknown_keyed_hosts() {
        sentences.push(format!(
            "every host without a key is refused, unless `authenticate = false`: {why}; then reload"
        ));
    }
    for host in &managed.running().config.authentication.hosts {
        if !managed.view().registry.has_key(&host.nqn) {
            sentences.push(format!(
                "host {} is refused: its key could not be read at the start: correct {} (`nvmfd \
                 check` says what is wrong) and reload",
                host.nqn,
                host.key_file.display()
            ));
        }
    }
    for subsystem in managed.view().registry.subsystems() {
        let absent = subsystem.management.iter().flat_map(|management| &management.absent);
        for UnavailableNamespace { nsid, entry, .. } in absent.filter(|absent| !absent.is_pending) {
            sentences.push(format!(
                "namespace {nsid} of {} is lost: it was created by a host, and its file {}.img is \
                 missing: restore it and reload, or have a host delete the namespace",
                subsystem.nqn, entry.uuid
            ));
        }
        for namespace in &subsystem.namespaces {
            let place = format!("namespace {} of {}", namespace.nsid, subsystem.nqn);
            let health = &namespace.health;
            let trust = format!("`nvmfctl namespace trust {} {}`", subsystem.nqn, namespace.nsid);
            if health.is_untrusted() {
                let cause = match health.is_shortened() {
                    true => "its file was shortened",
                    false => "its file is not known to be the one that hosts have written to",
                };
                sentences.push(format!(
                    "{place} is down: {cause}; when its data have been checked, {trust}"
                ));
            } else if health.is_down() {
                sentences.push(format!("{place} is down: its device is missing or too short"));
            } else if health.sync_failure().is_some() {
                sentences.push(format!(
                    "{place} has failed to synchronise, and every flush fails: check its disk and \
                     the data, then {trust}"
                ));
            }
            if let Some(detached) = health.detached().filter(|_| !health.is_down()) {
                let what = match detached {
                    Detached::Removed => "was unlinked or renamed",
                    Detached::Replaced => "was replaced",
                };
                sentences.push(format!(
                    "{place} is served from a file or device that {what}: the next start will not \
                     find what hosts write; the log says how to save it"
                ));
            }
        }
    }
    sentences
}
