//! `/v1/controllers`.

use axum::Json;
use axum::extract::{Path, State};

use super::ApiError;
use super::subsystems::digits;
use crate::api::{Controller, ControllerState, Outcome, Problem};
use crate::control::handle::ControlHandle;
use crate::core::registry;

/// Ends the connections of one controller. Its host may connect again, and Linux does so by itself.
#[utoipa::path(
    operation_id = "disconnect_controller",
    post,
    path = "/v1/controllers/{id}/disconnect",
    params(("id" = u64, Path, description = "the `id` of the controller")),
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "there is no such controller"),
    )
)]
pub(super) async fn disconnect(
    State(managed): State<ControlHandle>,
    Path(id): Path<u64>,
) -> Result<Json<Outcome>, ApiError> {
    let of = managed.view().registry.disconnect(id).ok_or_else(|| missing(id))?;
    Ok(done(&of, "-", "is disconnected"))
}

/// Sets the fatal status (CSTS.CFS) of one controller and reports it to its host by an event, as a
/// failed device does. The host resets it, or reconnects.
#[utoipa::path(
    operation_id = "fail_controller",
    post,
    path = "/v1/controllers/{id}/fail",
    params(("id" = u64, Path, description = "the `id` of the controller")),
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "there is no such controller"),
        (status = 409, body = Problem, description = "it does not serve commands"),
    )
)]
pub(super) async fn fail(
    State(managed): State<ControlHandle>,
    Path(id): Path<u64>,
) -> Result<Json<Outcome>, ApiError> {
    let registry = &managed.view().registry;
    let is_live = |of: &&registry::Controller| of.association.id == id && of.association.is_ready();
    if registry.controllers().iter().any(|of| of.association.id == id)
        && !registry.controllers().iter().any(|of| is_live(&of))
    {
        let error = format!("controller {id} does not serve commands");
        let remedy = "see `nvmfctl controllers` for what it is at";
        return Err(ApiError::conflict(error, remedy));
    }
    let of = registry.fail(id).ok_or_else(|| missing(id))?;
    Ok(done(&of, "~", "has a fatal error"))
}

fn missing(id: u64) -> ApiError {
    let error = format!("there is no controller with the id {id}");
    ApiError::not_found(error, "see `nvmfctl controllers` for those that there are")
}

fn done(of: &registry::Controller, sign: &str, what: &str) -> Json<Outcome> {
    let a = &of.association;
    tracing::info!(host = %a.host, subsystem = %a.subsystem, cntlid = a.cntlid,
                   "by request of the administrator, the controller {what}");
    let line = format!("{sign} controller {} of {} for {} {what}", a.cntlid, a.subsystem, a.host);
    Json(Outcome::immediate(vec![line]))
}

/// Lists controllers, also those of discovery, in the order of their connections.
#[utoipa::path(operation_id = "list_controllers", get, path = "/v1/controllers", responses((status = 200, body = Vec<Controller>)))]
pub(super) async fn list(State(managed): State<ControlHandle>) -> Json<Vec<Controller>> {
    Json(all(&managed))
}

/// Returns all controllers, for other requests.
pub(super) fn all(managed: &ControlHandle) -> Vec<Controller> {
    managed.view().registry.controllers().iter().map(controller).collect()
}

fn controller(of: &registry::Controller) -> Controller {
    let a = &of.association;
    let state = match () {
        () if a.is_closed() => ControllerState::Closing,
        () if of.authenticate && !a.is_proved() => ControllerState::Authenticating,
        () if a.is_ready() => ControllerState::Live,
        () => ControllerState::Disabled,
    };
    Controller {
        id: a.id,
        subsystem: a.subsystem.to_string(),
        cntlid: a.cntlid,
        host: a.host.to_string(),
        host_id: digits(&a.host_id),
        source: of.source.to_string(),
        local: a.local.to_string(),
        io_queues: a.io_queues(),
        granted_io_queues: a.granted_queues(),
        queue_depth: of.queue_depth,
        connected_s: of.since.elapsed().as_secs(),
        state,
        authenticated: a.is_proved(),
        errors: a.errors().0,
    }
}
