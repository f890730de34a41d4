//! `/v1/subsystems`, `/v1/namespaces`, `/v1/hosts`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use nix::sys::stat::{major, minor};

use nvme::Nqn;
use uuid::Uuid;

use super::ApiError;
use crate::api::{
    Detached, FileSystem, FileSystemState, Host, Kind, Namespace, NamespaceState, Problem,
    Subsystem,
};
use crate::blockdev::{self, Health, SpaceState};
use crate::config::{
    AuthenticationConfig, Limits, NamespaceConfig, NamespaceKind, SubsystemConfig, group_name,
    hash_name,
};
use crate::control::handle::ControlHandle;
use crate::core::auth::Policy;
use crate::core::registry::{Controller, Registry};
use crate::core::subsystem;
use crate::core::subsystem::ns_management::UnavailableNamespace;

/// Lists all subsystems.
#[utoipa::path(operation_id = "list_subsystems", get, path = "/v1/subsystems", responses((status = 200, body = Vec<Subsystem>)))]
pub(super) async fn list(State(managed): State<ControlHandle>) -> Json<Vec<Subsystem>> {
    Json(all(&managed))
}

/// Shows one subsystem.
#[utoipa::path(
    operation_id = "show_subsystem",
    get,
    path = "/v1/subsystems/{nqn}",
    params(("nqn" = String, Path, description = "its name")),
    responses((status = 200, body = Subsystem), (status = 404, body = Problem))
)]
pub(super) async fn show(
    State(managed): State<ControlHandle>,
    Path(nqn): Path<String>,
) -> Result<Json<Subsystem>, ApiError> {
    let found = all(&managed).into_iter().find(|subsystem| subsystem.nqn == nqn);
    found.map(Json).ok_or_else(|| {
        let error = format!("there is no subsystem {nqn:?}");
        ApiError::not_found(error, "see `nvmfctl subsystem list` for those that there are")
    })
}

/// Lists the namespaces of all subsystems.
#[utoipa::path(operation_id = "list_namespaces", get, path = "/v1/namespaces", responses((status = 200, body = Vec<Namespace>)))]
pub(super) async fn namespaces(State(managed): State<ControlHandle>) -> Json<Vec<Namespace>> {
    Json(all_namespaces(&managed))
}

/// Lists the configured hosts.
#[utoipa::path(operation_id = "list_hosts", get, path = "/v1/hosts", responses((status = 200, body = Vec<Host>)))]
pub(super) async fn hosts(State(managed): State<ControlHandle>) -> Json<Vec<Host>> {
    let running = managed.running();
    let controllers = managed.view().registry.controllers();
    let mut found: BTreeMap<Nqn, Host> = BTreeMap::new();
    let host = |nqn: &Nqn| Host {
        nqn: nqn.to_string(),
        subsystems: BTreeSet::new(),
        has_key: false,
        hashes: Vec::new(),
        groups: Vec::new(),
        controllers: (controllers.iter())
            .filter(|c| !c.discovery && c.association.host == *nqn)
            .count() as u32,
    };
    for subsystem in &running.config.subsystems {
        for nqn in &subsystem.hosts {
            let entry = found.entry(*nqn).or_insert_with(|| host(nqn));
            entry.subsystems.insert(subsystem.nqn.to_string());
        }
    }
    let AuthenticationConfig { hosts, policy, .. } = &running.config.authentication;
    for keyed in hosts {
        let entry = found.entry(keyed.nqn).or_insert_with(|| host(&keyed.nqn));
        let Policy { hashes, groups } = keyed.policy(policy);
        entry.has_key = true;
        entry.hashes = hashes.iter().map(|hash| hash_name(*hash).to_owned()).collect();
        entry.groups = groups.iter().map(|group| group_name(*group).to_owned()).collect();
    }
    Json(found.into_values().collect())
}

pub(super) fn all_namespaces(managed: &ControlHandle) -> Vec<Namespace> {
    all(managed).into_iter().flat_map(|subsystem| subsystem.namespaces).collect()
}

fn all(managed: &ControlHandle) -> Vec<Subsystem> {
    let running = managed.running();
    let registry = &managed.view().registry;
    let controllers = registry.controllers();
    let describe = |config| subsystem(config, &running.config.limits, registry, &controllers);
    running.config.subsystems.iter().map(describe).collect()
}

fn subsystem(
    config: &SubsystemConfig,
    limits: &Limits,
    registry: &Registry,
    controllers: &[Controller],
) -> Subsystem {
    let served = registry.subsystem(&config.nqn);
    let live = |nsid| served.as_ref().and_then(|s| s.namespace(nsid).ok());
    let offer = &config.offer;
    let own = |limit: Option<u16>, general: u16| limit.map_or(general, |own| own.min(general));
    Subsystem {
        nqn: config.nqn.to_string(),
        serial: config.serial.clone(),
        model: config.model.clone(),
        allow_any_host: config.allow_any_host,
        hosts: names(&config.hosts),
        listeners: offer.listeners.clone(),
        queue_depth: own(offer.queue_depth, limits.queue_depth),
        io_queues: own(offer.io_queues, limits.io_queues),
        mdts_bytes: offer.mdts_bytes.map_or(limits.mdts_bytes, |own| own.min(limits.mdts_bytes)),
        max_controllers: offer.controllers,
        controllers: (controllers.iter()).filter(|c| c.association.subsystem == config.nqn).count()
            as u32,
        namespaces: (config.namespaces.iter())
            .map(|n| namespace(config, n, live(n.nsid)))
            .chain(served.iter().flat_map(|served| made_by_hosts(config, served)))
            .chain(served.iter().flat_map(|served| absent(config, served)))
            .collect(),
    }
}

fn namespace(
    subsystem: &SubsystemConfig,
    config: &NamespaceConfig,
    live: Option<&subsystem::Namespace>,
) -> Namespace {
    let (kind, path, declared_bytes) = match &config.kind {
        NamespaceKind::File { path, size } => {
            (Kind::File, Some(path.display().to_string()), size.unwrap_or_default())
        }
        NamespaceKind::Ram { size } => (Kind::Ram, None, *size),
        NamespaceKind::Null { size } => (Kind::Null, None, *size),
        NamespaceKind::Rbd { image, .. } => (Kind::Rbd, Some(image.to_string()), 0),
    };
    Namespace {
        subsystem: subsystem.nqn.to_string(),
        nsid: config.nsid,
        kind,
        path,
        size_bytes: live.map_or(declared_bytes, |n| n.blocks << n.block_shift),
        allocated_bytes: live.and_then(|n| n.health.allocation().allocated_bytes()),
        file_system: live.and_then(|n| file_system(&n.health)),
        block_size_bytes: live.map_or(config.block_size_bytes, subsystem::Namespace::block_bytes),
        power_fail_atomic_bytes: live.and_then(subsystem::Namespace::power_fail_atomic_bytes),
        unheeded_block_size_bytes: live
            .is_some_and(|n| n.block_bytes() != config.block_size_bytes)
            .then_some(config.block_size_bytes),
        format_left_percent: live.and_then(left_percent),
        uuid: config.uuid.to_string(),
        nguid: digits(&config.nguid),
        eui64: config.eui64.map(|eui64| digits(&eui64)),
        read_only: config.read_only,
        write_protected: live.is_some_and(|n| n.protection.is_on()),
        allow_format: config.allow_format,
        ana_group: config.ana_group,
        hosts: subsystem.offer.masks.get(&config.nsid).map(names),
        state: state(live.map(|n| &n.health)),
        detached: live.and_then(|n| detached(&n.health)),
        failures: live.map_or(0, |n| n.health.failures()),
    }
}

/// Host-created namespaces.
fn made_by_hosts<'s>(
    config: &'s SubsystemConfig,
    served: &'s subsystem::Subsystem,
) -> impl Iterator<Item = Namespace> + 's {
    let declared = |nsid| config.namespaces.iter().any(|n| n.nsid == nsid);
    served.namespaces.iter().filter(move |n| !declared(n.nsid)).map(|n| Namespace {
        subsystem: config.nqn.to_string(),
        nsid: n.nsid,
        kind: Kind::Managed,
        path: image_of_host(served, n.nsid),
        size_bytes: n.blocks << n.block_shift,
        allocated_bytes: n.health.allocation().allocated_bytes(),
        file_system: file_system(&n.health),
        block_size_bytes: n.block_bytes(),
        power_fail_atomic_bytes: n.power_fail_atomic_bytes(),
        unheeded_block_size_bytes: None,
        format_left_percent: left_percent(n),
        uuid: Uuid::from_bytes(n.uuid).to_string(),
        nguid: digits(&n.nguid),
        eui64: n.eui64.map(|eui64| digits(&eui64)),
        read_only: n.read_only,
        write_protected: n.protection.is_on(),
        allow_format: n.allow_format,
        ana_group: n.ana_group,
        hosts: None,
        state: state(Some(&n.health)),
        detached: detached(&n.health),
        failures: n.health.failures(),
    })
}

/// Host-created namespaces that are not served, because their files are missing.
fn absent<'s>(
    config: &'s SubsystemConfig,
    served: &'s subsystem::Subsystem,
) -> impl Iterator<Item = Namespace> + 's {
    let absent = served.management.iter().flat_map(|management| &management.absent);
    absent.map(move |UnavailableNamespace { nsid, entry, is_pending }| Namespace {
        subsystem: config.nqn.to_string(),
        nsid: *nsid,
        kind: Kind::Managed,
        path: image_of_host(served, *nsid),
        size_bytes: entry.bytes,
        allocated_bytes: None,
        file_system: None,
        block_size_bytes: entry.block_size_bytes,
        power_fail_atomic_bytes: None,
        unheeded_block_size_bytes: None,
        format_left_percent: None,
        uuid: entry.uuid.to_string(),
        nguid: digits(entry.uuid.as_bytes()),
        eui64: None,
        read_only: false,
        write_protected: false,
        allow_format: image_of_host(served, *nsid).is_none(),
        ana_group: entry.ana_group,
        hosts: Some(names(&entry.hosts)),
        state: if *is_pending { NamespaceState::Pending } else { NamespaceState::Lost },
        detached: None,
        failures: 0,
    })
}

/// The image of a namespace that a host has created; none: it is in a file.
fn image_of_host(served: &subsystem::Subsystem, nsid: u32) -> Option<String> {
    served.management.as_ref()?.images.get(&nsid).cloned()
}

fn left_percent(namespace: &subsystem::Namespace) -> Option<u8> {
    namespace.formatting.as_ref().map(|progress| progress.left_percent())
}

fn state(health: Option<&Arc<Health>>) -> NamespaceState {
    match health {
        None => NamespaceState::Pending,
        Some(health) if health.is_untrusted() => NamespaceState::Untrusted,
        Some(health) if health.is_down() => NamespaceState::Down,
        Some(health) if health.sync_failure().is_some() => NamespaceState::SyncFailed,
        _ => NamespaceState::Serving,
    }
}

fn detached(health: &Health) -> Option<Detached> {
    health.detached().map(|detached| match detached {
        blockdev::Detached::Removed => Detached::Removed,
        blockdev::Detached::Replaced => Detached::Replaced,
    })
}

fn file_system(health: &Health) -> Option<FileSystem> {
    let found = health.allocation().file_system()?;
    Some(FileSystem {
        device: format!("{}:{}", major(found.device), minor(found.device)),
        size_bytes: found.size_bytes,
        free_bytes: found.free_bytes,
        unallocated_bytes: found.unallocated_bytes,
        state: match found.state {
            SpaceState::Sufficient => FileSystemState::Sufficient,
            SpaceState::Overcommitted => FileSystemState::Overcommitted,
            SpaceState::Low => FileSystemState::Low,
        },
    })
}

fn names(nqns: &BTreeSet<Nqn>) -> BTreeSet<String> {
    nqns.iter().map(ToString::to_string).collect()
}

/// Bytes in hexadecimal, in their order.
pub(super) fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
