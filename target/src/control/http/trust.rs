//! `/v1/subsystems/{nqn}/namespaces/{nsid}/trust`: trusts a device again.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use nvme::Nqn;
use tokio::task::spawn_blocking;

use super::ApiError;
use super::changes::Body;
use crate::api::{Outcome, Problem, Trust};
use crate::blockdev::monitor::Untrusted;
use crate::control::handle::ControlHandle;

/// Trusts the device of a namespace again whose flush has failed, or whose file was shortened or
/// replaced, after an administrator has checked the data. The file or device at its path is opened
/// and synced before this answers. The next flush of each host that has written before, and has not
/// received the error, still fails once, also after a restart.
#[utoipa::path(
    post,
    path = "/v1/subsystems/{nqn}/namespaces/{nsid}/trust",
    params(
        ("nqn" = String, Path, description = "the name of the subsystem"),
        ("nsid" = u32, Path, description = "namespace id"),
    ),
    request_body = Trust,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "there is no such namespace"),
        (status = 409, body = Problem, description = "it is trusted, or its store still fails"),
        (status = 504, body = Problem, description = "its store does not answer"),
    )
)]
pub(super) async fn trust(
    State(managed): State<ControlHandle>,
    Path((nqn, nsid)): Path<(String, u32)>,
    Body(wanted): Body<Trust>,
) -> Result<Json<Outcome>, ApiError> {
    let place = format!("namespace {nsid} of {nqn}");
    let missing = || {
        let error = format!("there is no {place} with a file or device");
        ApiError::not_found(error, "see `nvmfctl namespace list` for those that there are")
    };
    let name: Nqn = nqn.parse().map_err(|_| missing())?;
    let monitor = managed.view().monitor.clone().ok_or_else(missing)?;
    let store = monitor.find(&name, nsid).ok_or_else(missing)?;
    let differences = vec![format!("~ {place}: its store is trusted again")];
    if wanted.dry_run && store.is_trusted() {
        return Err(refused(&place, Untrusted::AlreadyTrusted));
    }
    if !wanted.dry_run {
        let registry = Arc::clone(&managed.view().registry);
        let mark_hosts = move || registry.report_lost_writes(&name, nsid);
        let trusted = spawn_blocking(move || monitor.trust(&store, mark_hosts)).await;
        let trusted = trusted.unwrap_or(Err(Untrusted::NoAnswer));
        trusted.map_err(|why| refused(&place, why))?;
    }
    Ok(Json(Outcome::immediate(differences)))
}

fn refused(place: &str, why: Untrusted) -> ApiError {
    match why {
        Untrusted::AlreadyTrusted => ApiError::conflict(
            format!(
                "{place} is trusted: no flush has failed, and what is served is the file that \
                 hosts have written to"
            ),
            "see `nvmfctl namespace list` for how stores are",
        ),
        Untrusted::Failing(why) => ApiError::conflict(
            format!("{place} cannot be trusted: {why}"),
            "repair the device first; see the kernel's log",
        ),
        Untrusted::NoAnswer => ApiError::new(
            StatusCode::GATEWAY_TIMEOUT,
            format!("{place} is not trusted: its store does not answer"),
            "look at the store, then try again",
        ),
    }
}
