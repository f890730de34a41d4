//! `/v1/images`: snapshots and clones of images of Ceph RBD that are served.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};

use super::ApiError;
use super::changes::Body;
use super::file_operations::FileOperations;
use super::write_protect::stopping;
use crate::api::{
    ImageCloneRequest, ImageSnapshot, ImageSnapshotRequest, ImageSnapshots, Outcome, Problem,
    SnapshotOutcome,
};
use crate::blockdev::ceph::ImageName;
use crate::config::{Config, NamespaceConfig, NamespaceKind, SubsystemConfig};
use crate::control::handle::ControlHandle;
use crate::provision::image_snapshot::{ImageFailure, ImageNamespace, list_snapshots};

/// Lists the snapshots of all images that are served for writing, and their clones. Where these are
/// not known, the answer says why.
#[utoipa::path(
    operation_id = "list_image_snapshots",
    get,
    path = "/v1/images/snapshots",
    responses(
        (status = 200, body = ImageSnapshots),
        (status = 503, body = Problem, description = "the daemon stops, or has too many of these"),
    )
)]
pub(super) async fn list(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
) -> Result<Json<ImageSnapshots>, ApiError> {
    let running = managed.running();
    let (mut asked, mut places) = (Vec::new(), Vec::new());
    for (name, subsystem, namespace) in images(&running.config) {
        if name.snapshot.is_none()
            && !namespace.read_only
            && let Ok(source) = source(&managed, subsystem, namespace)
        {
            asked.push((name.clone(), source));
            places.push((name, subsystem, namespace));
        }
    }
    let listed =
        operations.run("the snapshots of all images".to_owned(), move || list_snapshots(&asked));
    let (mut snapshots, mut errors) = (Vec::new(), Vec::new());
    for ((name, subsystem, namespace), listed) in places.into_iter().zip(listed.await?) {
        let listed = match listed {
            Ok(listed) => listed,
            Err(ImageFailure::Refused(why)) => {
                errors.push(format!("{why}: {}", why.remedy));
                continue;
            }
            Err(ImageFailure::NoAnswer) => {
                errors.push(format!(
                    "cannot list the snapshots of {name}: the cluster does not answer"
                ));
                continue;
            }
        };
        for it in listed {
            let snapshot = format!("{name}@{}", it.name);
            let why = it.clones.as_ref().err();
            errors.extend(why.map(|why| format!("cannot list the clones of {snapshot}: {why}")));
            snapshots.push(ImageSnapshot {
                snapshot,
                subsystem: subsystem.nqn.to_string(),
                nsid: namespace.nsid,
                size_bytes: it.size_bytes,
                created_unix_s: it.created_unix_s,
                protected: it.is_protected,
                clones: it.clones.ok(),
            });
        }
    }
    Ok(Json(ImageSnapshots { snapshots, errors }))
}

/// Takes a snapshot of an image as it is at one moment: with every write that was completed before,
/// and none that was begun after it. Hosts go on; their writes wait for at most some seconds. Only
/// the gateway that serves the image can take it.
#[utoipa::path(
    operation_id = "take_image_snapshot",
    post,
    path = "/v1/images/snapshots",
    request_body = ImageSnapshotRequest,
    responses(
        (status = 200, body = SnapshotOutcome),
        (status = 404, body = Problem, description = "no namespace is this image"),
        (status = 409, body = Problem, description = "another gateway serves it, or the cluster refuses that"),
        (status = 504, body = Problem, description = "the cluster does not answer: there may be a snapshot, or be one later"),
    )
)]
pub(super) async fn snapshot(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Body(wanted): Body<ImageSnapshotRequest>,
) -> Result<Json<SnapshotOutcome>, ApiError> {
    let name = snapshot_name(&wanted.snapshot)?;
    let Found { source, .. } = find_owned(&managed, &name)?;
    let differences = vec![format!("+ {name}: a snapshot")];
    let block_size_bytes = source.device.backing().block_size_bytes();
    let shared = Arc::clone(&managed.view().shared);
    let own = name.clone();
    let taken = operations.run(image_of(&name).to_string(), move || match wanted.dry_run {
        true => source.check(&own).map(|()| None).map_err(ImageFailure::from),
        false => source.snapshot(&shared, &own).map(Some),
    });
    let paused = taken.await?.map_err(|why| failed(&name, why))?;
    let paused_us = paused.map(|paused| paused.as_micros() as u64);
    Ok(Json(SnapshotOutcome { differences, block_size_bytes, paused_us }))
}

/// Removes a snapshot that has no clones, and that no namespace serves.
#[utoipa::path(
    operation_id = "remove_image_snapshot",
    post,
    path = "/v1/images/snapshots/remove",
    request_body = ImageSnapshotRequest,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "no namespace is this image"),
        (status = 409, body = Problem, description = "it has clones, is served, or another gateway serves its image"),
        (status = 504, body = Problem, description = "the cluster does not answer: it may be removed, or be later"),
    )
)]
pub(super) async fn remove(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Body(wanted): Body<ImageSnapshotRequest>,
) -> Result<Json<Outcome>, ApiError> {
    let name = snapshot_name(&wanted.snapshot)?;
    let Found { source, .. } = find_owned(&managed, &name)?;
    let running = managed.running();
    if let Some((_, subsystem, namespace)) = images(&running.config).find(|it| *it.0 == name) {
        let what = format!("namespace {} of {} serves {name}", namespace.nsid, subsystem.nqn);
        return Err(ApiError::conflict(what, "`nvmfctl namespace remove` it first"));
    }
    let own = name.clone();
    let removed =
        operations.run(image_of(&name).to_string(), move || source.remove(&own, wanted.dry_run));
    removed.await?.map_err(|why| failed(&name, why))?;
    Ok(Json(Outcome::immediate(vec![format!("- {name}: a snapshot")])))
}

/// Makes an image of a snapshot, whose blocks it shares. It has the features of that image, and can
/// be served as a namespace.
#[utoipa::path(
    operation_id = "clone_image_snapshot",
    post,
    path = "/v1/images/clones",
    request_body = ImageCloneRequest,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "no namespace is this image"),
        (status = 409, body = Problem, description = "the cluster refuses that"),
        (status = 504, body = Problem, description = "the cluster does not answer: there may be a clone, or be one later"),
    )
)]
pub(super) async fn make_clone(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Body(wanted): Body<ImageCloneRequest>,
) -> Result<Json<Outcome>, ApiError> {
    let (name, clone) = (snapshot_name(&wanted.snapshot)?, image_name(&wanted.clone)?);
    if clone.snapshot.is_some() {
        return Err(misnamed(format!("{clone} is a snapshot"), "name an image: POOL/IMAGE"));
    }
    let Found { source, .. } = find(&managed, &name)?;
    let line = format!("+ {clone}: a clone of {name}");
    if !wanted.dry_run {
        let (own, to) = (name.clone(), clone.clone());
        let made =
            operations.run(image_of(&name).to_string(), move || source.clone_snapshot(&own, &to));
        made.await?.map_err(|why| failed(&name, why))?;
    }
    Ok(Json(Outcome::immediate(vec![line])))
}

/// The images of a configuration, and their namespaces.
fn images(
    config: &Config,
) -> impl Iterator<Item = (&ImageName, &SubsystemConfig, &NamespaceConfig)> {
    let all = config.subsystems.iter().flat_map(|it| it.namespaces.iter().map(move |n| (it, n)));
    all.filter_map(|(subsystem, namespace)| match &namespace.kind {
        NamespaceKind::Rbd { image, .. } => Some((image, subsystem, namespace)),
        _ => None,
    })
}

/// The image of a snapshot.
fn image_of(name: &ImageName) -> ImageName {
    ImageName { snapshot: None, ..name.clone() }
}

fn image_name(text: &str) -> Result<ImageName, ApiError> {
    text.parse().map_err(|why| {
        let remedy = "write POOL/IMAGE or POOL/NAMESPACE/IMAGE, with @SNAPSHOT for a snapshot";
        misnamed(format!("{text:?} names no image: {why}"), remedy)
    })
}

fn snapshot_name(text: &str) -> Result<ImageName, ApiError> {
    let name = image_name(text)?;
    match name.snapshot.is_some() {
        true => Ok(name),
        false => Err(misnamed(format!("{name} is no snapshot"), "write POOL/IMAGE@SNAPSHOT")),
    }
}

fn misnamed(what: String, remedy: &str) -> ApiError {
    ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, what, remedy)
}

/// A namespace in an image.
struct Found {
    source: ImageNamespace,
    ana_group: u32,
}

fn source(
    managed: &ControlHandle,
    subsystem: &SubsystemConfig,
    namespace: &NamespaceConfig,
) -> Result<ImageNamespace, ApiError> {
    let (nqn, nsid) = (subsystem.nqn, namespace.nsid);
    let monitor = managed.view().monitor.clone().ok_or_else(stopping)?;
    let device = monitor.find(&nqn, nsid);
    let image = device.as_ref().and_then(|it| it.backing().image().cloned());
    let (Some(device), Some(image)) = (device, image) else {
        let what = format!("namespace {nsid} of {nqn} is not served");
        return Err(ApiError::conflict(what, "see `nvmfctl namespace list`"));
    };
    Ok(ImageNamespace { nqn, nsid, device, image, monitor })
}

/// The namespace in the image of a snapshot.
fn find(managed: &ControlHandle, name: &ImageName) -> Result<Found, ApiError> {
    let (running, image) = (managed.running(), image_of(name));
    let found = images(&running.config).find(|it| *it.0 == image);
    let (_, subsystem, namespace) = found.ok_or_else(|| {
        let what = format!("no namespace is the image {image}");
        ApiError::not_found(what, "see `nvmfctl namespace list` for those that there are")
    })?;
    let source = source(managed, subsystem, namespace)?;
    Ok(Found { source, ana_group: namespace.ana_group })
}

/// The same, unless another gateway serves it.
fn find_owned(managed: &ControlHandle, name: &ImageName) -> Result<Found, ApiError> {
    let found = find(managed, name)?;
    if !found.source.device.health().is_standby() {
        return Ok(found);
    }
    let (image, ana_group) = (image_of(name), found.ana_group);
    let group = managed.view().gateway.as_ref().map(|view| view.group()).unwrap_or_default();
    let of = group.ana_groups.iter().find(|it| it.id == ana_group);
    Err(match of.and_then(|it| it.owner.as_ref()) {
        Some(owner) if *owner != group.gateway => ApiError::conflict(
            format!("gateway {owner} serves {image}, which is in ANA group {ana_group}"),
            format!("ask gateway {owner}, or `nvmfctl gateway move {ana_group} {}`", group.gateway),
        ),
        _ => ApiError::conflict(format!("{image} is not served yet"), "see `nvmfctl gateway list`"),
    })
}

fn failed(name: &ImageName, failure: ImageFailure) -> ApiError {
    match failure {
        ImageFailure::Refused(why) => ApiError::conflict(format!("{name}: {why}"), why.remedy),
        ImageFailure::NoAnswer => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            format!(
                "the cluster does not answer, and may do later what was asked of {name}; nvmfd does \
                 not hold writes of hosts any more"
            ),
            "see `ceph -s`; then `nvmfctl image list` for what there is",
        ),
    }
}
