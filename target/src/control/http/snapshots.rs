//! `/v1/subsystems/{nqn}/namespaces/{nsid}/snapshot` and `.../rollback`: copies of namespaces in
//! files, by reflink.

use std::path::PathBuf;
use std::sync::Arc;

use axum::extract::{Path, State};
use axum::{Extension, Json};
use nvme::Nqn;
use tracing::info;

use super::ApiError;
use super::changes::Body;
use super::file_operations::FileOperations;
use super::write_protect::{find, stopping};
use crate::api::{
    Outcome, Problem, RemoveSnapshot, RollbackRequest, SnapshotOutcome, SnapshotRequest,
};
use crate::blockdev::monitor::{DeviceMonitor, MonitoredDevice};
use crate::blockdev::{ReflinkError, remove_snapshot};
use crate::control::handle::ControlHandle;
use crate::core::shared::Shared;
use crate::provision::snapshot::FileNamespace;

/// Copies the file of a namespace as it is at one moment: with every write that was completed
/// before, and none that was begun after it. Hosts go on; their writes wait while the file system
/// copies. The copy shares its blocks with the file (XFS, btrfs), and is durable when this answers.
#[utoipa::path(
    post,
    path = "/v1/subsystems/{nqn}/namespaces/{nsid}/snapshot",
    params(
        ("nqn" = String, Path, description = "the name of the subsystem"),
        ("nsid" = u32, Path, description = "namespace id"),
    ),
    request_body = SnapshotRequest,
    responses(
        (status = 200, body = SnapshotOutcome),
        (status = 404, body = Problem, description = "there is no such namespace"),
        (status = 409, body = Problem, description = "it cannot be copied, or not to this path"),
    )
)]
pub(super) async fn snapshot(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Path((nqn, nsid)): Path<(String, u32)>,
    Body(wanted): Body<SnapshotRequest>,
) -> Result<Json<SnapshotOutcome>, ApiError> {
    let SnapshotRequest { path, writable, dry_run } = wanted;
    let source = Source::find(&managed, &nqn, nsid)?;
    let block_size_bytes = source.block_size_bytes;
    let kind = if writable { "clone" } else { "snapshot" };
    let differences = vec![format!("+ {path}: a {kind} of namespace {nsid} of {nqn}")];
    let place = format!("no {kind} of namespace {nsid} of {nqn}");
    let paused = source.run(&operations, place, move |file, _| match dry_run {
        true => Ok(None),
        false => file.copy(&PathBuf::from(path), writable).map(Some),
    });
    let paused_us = paused.await?.map(|paused| paused.as_micros() as u64);
    Ok(Json(SnapshotOutcome { differences, block_size_bytes, paused_us }))
}

/// Removes the file of a snapshot that no namespace serves. A file that this interface has not made
/// as a snapshot is never removed.
#[utoipa::path(
    operation_id = "remove_snapshot",
    post,
    path = "/v1/snapshots/remove",
    request_body = RemoveSnapshot,
    responses(
        (status = 200, body = Outcome),
        (status = 409, body = Problem, description = "it is no snapshot, is served, or cannot be removed"),
    )
)]
pub(super) async fn remove(
    Extension(operations): Extension<FileOperations>,
    Body(wanted): Body<RemoveSnapshot>,
) -> Result<Json<Outcome>, ApiError> {
    let RemoveSnapshot { path, dry_run } = wanted;
    let differences = vec![format!("- {path}: a snapshot")];
    let removed = operations.run(path.clone(), move || {
        let removed = remove_snapshot(&PathBuf::from(&path), dry_run);
        if removed.is_ok() && !dry_run {
            info!(path, "snapshot removed");
        }
        removed
    });
    removed.await?.map_err(|why| refused("the snapshot is not removed", &why))?;
    Ok(Json(Outcome::immediate(differences)))
}

/// Serves a copy of a snapshot instead of the file of a namespace, whose contents are lost. Hosts
/// may have earlier contents in memory: it is refused while any controller of the subsystem has a
/// host, unless `force` is set. Hosts that connect meanwhile are refused, and retry.
#[utoipa::path(
    post,
    path = "/v1/subsystems/{nqn}/namespaces/{nsid}/rollback",
    params(
        ("nqn" = String, Path, description = "the name of the subsystem"),
        ("nsid" = u32, Path, description = "namespace id"),
    ),
    request_body = RollbackRequest,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "there is no such namespace"),
        (status = 409, body = Problem, description = "a host uses it, or the snapshot does not fit"),
    )
)]
pub(super) async fn roll_back(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Path((nqn, nsid)): Path<(String, u32)>,
    Body(wanted): Body<RollbackRequest>,
) -> Result<Json<Outcome>, ApiError> {
    let RollbackRequest { path, force, dry_run } = wanted;
    let source = Source::find(&managed, &nqn, nsid)?;
    let place = format!("namespace {nsid} of {nqn} is not rolled back");
    let differences = vec![format!("~ namespace {nsid} of {nqn}: has the contents of {path}")];
    let done = source.run(&operations, place, move |file, monitor| match dry_run {
        true => file.exclude(force).map(drop),
        false => file.roll_back(monitor, &PathBuf::from(path), force),
    });
    done.await?;
    Ok(Json(Outcome::immediate(differences)))
}

/// A namespace with a device.
struct Source {
    nqn: Nqn,
    nsid: u32,
    block_size_bytes: u32,
    device: Arc<MonitoredDevice>,
    monitor: Arc<DeviceMonitor>,
    shared: Arc<Shared>,
}

impl Source {
    fn find(managed: &ControlHandle, nqn: &str, nsid: u32) -> Result<Source, ApiError> {
        let (name, namespace) = find(managed, nqn, nsid)?;
        let monitor = managed.view().monitor.clone().ok_or_else(stopping)?;
        let device = monitor.find(&name, nsid).ok_or_else(|| {
            let why = ReflinkError::new("it has no file", "only namespaces in files have reflinks");
            refused(&format!("no copy of namespace {nsid} of {nqn}"), &why)
        })?;
        let block_size_bytes = namespace.block_bytes();
        let shared = Arc::clone(&managed.view().shared);
        Ok(Source { nqn: name, nsid, block_size_bytes, device, monitor, shared })
    }

    /// Does what may block on the device, where that is allowed.
    async fn run<T: Send + 'static>(
        self,
        operations: &FileOperations,
        place: String,
        act: impl FnOnce(&FileNamespace<'_>, &DeviceMonitor) -> Result<T, ReflinkError> + Send + 'static,
    ) -> Result<T, ApiError> {
        let Source { nqn, nsid, device, monitor, shared, .. } = self;
        let ran = operations.run(format!("namespace {nsid} of {nqn}"), move || {
            let file = FileNamespace::new(&shared, nqn, nsid, device)?;
            act(&file, &monitor)
        });
        ran.await?.map_err(|why| refused(&place, &why))
    }
}

fn refused(place: &str, why: &ReflinkError) -> ApiError {
    ApiError::conflict(format!("{place}: {why}"), why.remedy)
}
