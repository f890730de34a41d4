//! `/v1/subsystems/{nqn}/namespaces/{nsid}/protection`: write-protects namespaces, as a host does
//! by feature 84h.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::{Extension, Json};
use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use tokio::task::spawn_blocking;

use super::ApiError;
use super::changes::Body;
use super::file_operations::FileOperations;
use crate::api::{Outcome, Problem, Protect, WriteProtection};
use crate::blockdev::BackingDevice;
use crate::control::handle::ControlHandle;
use crate::core::sched::offload::{Job, ReplyTo, WriteProtectRequest};
use crate::core::subsystem::Namespace;
use crate::core::subsystem::write_protect::Protection;

/// Time limit for writes in flight.
const PATIENCE: Duration = Duration::from_secs(30);

/// Sets or clears the write protection of a namespace. When this answers, no write is in flight,
/// earlier writes are durable, and the state survives a restart.
#[utoipa::path(
    post,
    path = "/v1/subsystems/{nqn}/namespaces/{nsid}/protection",
    params(
        ("nqn" = String, Path, description = "the name of the subsystem"),
        ("nsid" = u32, Path, description = "namespace id"),
    ),
    request_body = Protect,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "there is no such namespace"),
        (status = 409, body = Problem, description = "its state does not change (now)"),
        (status = 422, body = Problem, description = "it cannot be protected"),
        (status = 507, body = Problem, description = "it cannot be kept"),
    )
)]
pub(super) async fn protect(
    State(managed): State<ControlHandle>,
    Extension(operations): Extension<FileOperations>,
    Path((nqn, nsid)): Path<(String, u32)>,
    Body(wanted): Body<Protect>,
) -> Result<Json<Outcome>, ApiError> {
    let (subsystem, namespace) = find(&managed, &nqn, nsid)?;
    if namespace.formatting.is_some() {
        return Err(formatting());
    }
    let protection = Arc::clone(&namespace.protection);
    let (was, is) = (protection.state(), code(wanted.state));
    let name = |state: WriteProtectState| state.name().unwrap_or_default();
    if namespace.read_only {
        let error = format!("namespace {nsid} of {nqn} is read only, which protects it as well");
        let remedy = "to allow writes: `nvmfctl namespace set NQN NSID read_only=false`";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, remedy));
    }
    if namespace.is_shared() {
        let error = "other daemons serve it as well (`shared = true`) and would not know of it";
        let remedy = "set `read_only = true` at each of them";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, remedy));
    }
    if !protection.is_supported() {
        let error = "write protection is kept in the `state_directory`, and there is none";
        let remedy = "add one to the configuration and restart, or set `read_only = true`";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, remedy));
    }
    if is == WriteProtectState::UNTIL_POWER_CYCLE && protection.is_of_group() {
        let error = "a gateway group has no power cycle: the protection would end as soon as another \
                     gateway serves the namespace";
        let remedy = "protect it until `nvmfctl namespace unprotect`: without --until-power-cycle";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, remedy));
    }
    protection.check(is).map_err(|_| settled(name(was)))?;
    let mut differences = Vec::new();
    if was != is {
        let (was, is) = (name(was), name(is));
        differences.push(format!("~ namespace {nsid} of {nqn}: {was} becomes {is}"));
    }
    if !wanted.dry_run {
        let (sender, answer) = sync_channel(1);
        let (of, from) = (vec![Arc::clone(&protection)], ReplyTo::Caller(sender));
        let job = Job::Protect(WriteProtectRequest { of, state: is, from });
        if !managed.view().shared.offload.submit(job) {
            return Err(stopping());
        }
        answered(answer, &protection, (name(was), is)).await?;
        if is != WriteProtectState::NONE {
            let monitor = managed.view().monitor.as_ref();
            if let Some(store) = monitor.and_then(|it| it.find(&subsystem, nsid)) {
                let about = format!("namespace {nsid} of {nqn}");
                let backing = store.backing();
                let synced = operations.run(about, move || durable(&backing)).await;
                let done = "it is protected, and what was written before is not synced";
                synced.map_err(|error| error.after(done))??;
            }
        }
    }
    Ok(Json(Outcome::immediate(differences)))
}

pub(super) fn find(
    managed: &ControlHandle,
    nqn: &str,
    nsid: u32,
) -> Result<(Nqn, Namespace), ApiError> {
    let missing = || {
        let error = format!("there is no namespace {nsid} of {nqn:?}");
        ApiError::not_found(error, "see `nvmfctl namespace list` for those that there are")
    };
    let name: Nqn = nqn.parse().map_err(|_| missing())?;
    let subsystem = managed.view().registry.subsystem(&name).ok_or_else(missing)?;
    let namespace = subsystem.namespace(nsid).cloned().map_err(|_| missing())?;
    Ok((name, namespace))
}

fn code(state: WriteProtection) -> WriteProtectState {
    match state {
        WriteProtection::None => WriteProtectState::NONE,
        WriteProtection::Protected => WriteProtectState::PROTECTED,
        WriteProtection::UntilPowerCycle => WriteProtectState::UNTIL_POWER_CYCLE,
        WriteProtection::Permanent => WriteProtectState::PERMANENT,
    }
}

fn settled(was: &str) -> ApiError {
    let error = format!("the write protection is: {was}, and that does not change");
    ApiError::conflict(error, "only a start of the daemon ends what lasts until a power cycle")
}

fn formatting() -> ApiError {
    let error = "a host is formatting it, and what is being erased cannot be protected";
    ApiError::conflict(error, "see `nvmfctl namespace list`; try again afterwards")
}

pub(super) fn stopping() -> ApiError {
    let status = StatusCode::SERVICE_UNAVAILABLE;
    ApiError::new(status, "the daemon is stopping", "ask again when it serves")
}

/// Waits for the state worker, which waits for the writes in flight.
async fn answered(
    answer: Receiver<Result<(), Status>>,
    protection: &Protection,
    (was, wanted): (&'static str, WriteProtectState),
) -> Result<(), ApiError> {
    use std::sync::mpsc::RecvTimeoutError::Timeout;
    let outcome = spawn_blocking(move || answer.recv_timeout(PATIENCE)).await;
    match outcome {
        Ok(Ok(Ok(()))) => Ok(()),
        Ok(Ok(Err(status))) if status == Status::FORMAT_IN_PROGRESS => Err(formatting()),
        // Another request was earlier.
        Ok(Ok(Err(status))) if status != Status::INTERNAL_ERROR => Err(settled(was)),
        Ok(Ok(Err(_))) => {
            let error = "the state cannot be kept in the `state_directory`; the log says why";
            let remedy = "nothing was changed; make room there";
            Err(ApiError::new(StatusCode::INSUFFICIENT_STORAGE, error, remedy))
        }
        Ok(Err(Timeout)) => Err(late(protection.state() == wanted)),
        Ok(Err(_)) | Err(_) => Err(stopping()),
    }
}

/// There is no answer in time. Before the state is set, this request or an earlier one waits for the
/// `state_directory`; afterwards it waits for the writes in flight.
fn late(is_set: bool) -> ApiError {
    let (error, remedy) = match is_set {
        true => (
            "it is protected, but writes from before are still under way after 30 s",
            "see `nvmfctl namespace list` for the state of its backing store",
        ),
        false => (
            "the state has not changed after 30 s, and may still change: the `state_directory` does \
             not answer",
            "check its device, then see `nvmfctl namespace list` for the state",
        ),
    };
    ApiError::new(StatusCode::GATEWAY_TIMEOUT, error, remedy)
}

/// Syncs earlier writes, as write protection by a host does. A failure counts as that of a host's
/// Flush: it was reported here, and may not be reported to any Flush again. May block.
fn durable(backing: &BackingDevice) -> Result<(), ApiError> {
    backing.make_durable(&|| false).map_err(|failure| {
        let error = format!("it is protected, but what was written before may be lost: {failure}");
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, error, "look at its store")
    })
}

#[cfg(test)]
mod tests {
    use crate::blockdev::{BackingConfig, BackingKind, InjectedFault};
    use crate::control::http::write_protect::*;

    fn open(path: &std::path::Path) -> Arc<BackingDevice> {
        let kind = BackingKind::File { path: path.to_owned(), size: Some(1 << 20) };
        let (block_size_bytes, read_only, shared) = (4096, false, false);
        Arc::new(
            BackingDevice::open(&BackingConfig { kind, block_size_bytes, read_only, shared })
                .unwrap(),
        )
    }

    #[test]
    fn a_failed_sync_fails_every_later_flush() {
        let directory = crate::blockdev::testing::directory();
        let backing = open(&directory.path().join("disk.img"));
        let durable = || durable(&backing).is_ok();
        assert!(durable() && backing.sync_failure().is_none());
        backing.health().set_fault(InjectedFault::Sync);
        assert!(!durable());
        backing.health().set_fault(InjectedFault::None);
        assert!(backing.sync_failure().is_some() && !durable(), "nor is a later one believed");
    }

    /// An earlier request may hang in the state directory.
    #[test]
    fn a_late_answer_reports_protection_only_if_it_is_set() {
        let said = |is_set| format!("{:?}", late(is_set));
        assert!(said(true).contains("it is protected"));
        assert!(!said(false).contains("is protected") && said(false).contains("may still change"));
    }

    #[test]
    fn make_durable_synchronises_earlier_writes() {
        let directory = crate::blockdev::testing::directory();
        let backing = open(&directory.path().join("disk.img"));
        let (written, calls) =
            crate::blockdev::durable::testing::calls(|| backing.make_durable(&|| false));
        assert_eq!((written, calls), (Ok(()), vec!["sync data disk.img".to_owned()]));
    }
}
