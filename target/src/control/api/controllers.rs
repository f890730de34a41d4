//! `/v1/controllers`.

use axum::Json;
use axum::extract::State;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::subsystems::digits;
use crate::api::{Controller, ControllerState};
use crate::control::managed::Managed;
use crate::registry;

pub(super) fn routes() -> OpenApiRouter<Managed> {
    OpenApiRouter::new().routes(routes!(list))
}

/// The controllers that hosts have, also those of discovery, in the order in which they came.
#[utoipa::path(get, path = "/v1/controllers", responses((status = 200, body = Vec<Controller>)))]
async fn list(State(managed): State<Managed>) -> Json<Vec<Controller>> {
    Json(all(&managed))
}

/// The same, for others.
pub(super) fn all(managed: &Managed) -> Vec<Controller> {
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
