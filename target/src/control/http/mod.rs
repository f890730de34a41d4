//! The management interface: HTTP/1.1 with JSON on a Unix socket, and optionally on a loopback
//! address, where requests that change need a token, or are refused.
//!
//! Each area has a file with its handlers; their routes are here. Everything is bounded: connections
//! at once, the length of a request, and the time for its arrival.

mod browser;
mod changes;
mod console;
mod controllers;
mod disconnects;
mod error;
mod file_operations;
mod gateway;
mod health;
mod history;
mod images;
mod in_flight;
mod log_level;
mod memory;
mod reload_plan;
mod schema_variants;
mod server;
mod snapshots;
mod stats;
mod status;
mod subsystems;
mod token;
mod trust;
mod watch;
mod write_protect;

use std::time::Duration;

use axum::middleware::map_response;
use axum::routing::get;
use axum::{Extension, Json, Router};
use serde_json::Value;
use utoipa::OpenApi;
use utoipa::openapi::OpenApi as Description;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

pub(crate) use error::ApiError;
pub(super) use server::Server;

use super::handle::ControlHandle;
use crate::api::{ChangeAccess, Event, Problem};

/// The longest body of a request, in bytes.
const MOST_BODY_BYTES: usize = 1 << 20;

/// Time limit for the arrival of the body of a request.
const BODY_TIME: Duration = Duration::from_secs(10);

#[derive(OpenApi)]
#[openapi(
    components(schemas(Problem, Event)),
    info(
        title = "nvmfd",
        description = "Management interface of an NVMe over RDMA target.",
        license(name = "Apache-2.0", identifier = "Apache-2.0")
    )
)]
struct Document;

/// Routes that only read.
fn reading() -> OpenApiRouter<ControlHandle> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(health::healthz))
        .routes(routes!(health::readyz))
        .routes(routes!(status::status))
        .routes(routes!(status::listeners))
        .routes(routes!(subsystems::list))
        .routes(routes!(subsystems::show))
        .routes(routes!(subsystems::namespaces))
        .routes(routes!(subsystems::hosts))
        .routes(routes!(controllers::list))
        .routes(routes!(gateway::show))
        .routes(routes!(gateway::show_configuration))
        .routes(routes!(disconnects::list))
        .routes(routes!(changes::list))
        .routes(routes!(history::list))
        .routes(routes!(stats::stats))
        .routes(routes!(stats::slow))
        .routes(routes!(stats::scrape))
        .routes(routes!(in_flight::list))
        .routes(routes!(log_level::show))
        .routes(routes!(watch::watch))
        .routes(routes!(memory::memory))
        .routes(routes!(reload_plan::plan))
}

/// Routes that change the target: on the Unix socket, and with the token.
fn changing() -> OpenApiRouter<ControlHandle> {
    OpenApiRouter::new()
        .routes(routes!(changes::make, changes::forget))
        .routes(routes!(changes::reload))
        .routes(routes!(controllers::disconnect))
        .routes(routes!(controllers::fail))
        .routes(routes!(gateway::move_ana_group))
        .routes(routes!(gateway::rebalance))
        .routes(routes!(gateway::exclude))
        .routes(routes!(images::list, images::snapshot))
        .routes(routes!(images::remove))
        .routes(routes!(images::make_clone))
        .routes(routes!(log_level::set))
        .routes(routes!(write_protect::protect))
        .routes(routes!(trust::trust))
        .routes(routes!(snapshots::snapshot))
        .routes(routes!(snapshots::remove))
        .routes(routes!(snapshots::roll_back))
}

/// Routes with their description at `/v1/openapi.json`, and the console. The description is
/// generated for each request: it takes megabytes, and is rarely read.
fn router(managed: ControlHandle, access: ChangeAccess, with_console: bool) -> Router {
    let (router, _) = routes(access, &managed);
    let of_description = managed.clone();
    let router = if with_console { router.merge(console::routes()) } else { router };
    router
        .route("/v1/openapi.json", get(async move || Json(description(access, &of_description))))
        .fallback(ApiError::no_such_path)
        .method_not_allowed_fallback(ApiError::no_such_method)
        .layer(map_response(error::refusal_as_problem))
        .layer(Extension(access))
        .layer(Extension(watch::Room::new()))
        .layer(Extension(reload_plan::Reader::new()))
        .layer(Extension(file_operations::FileOperations::default()))
        .layer(Extension(in_flight::LastResponse::default()))
        .with_state(managed)
}

/// The OpenAPI document.
fn description(access: ChangeAccess, managed: &ControlHandle) -> Value {
    let mut document = serde_json::to_value(routes(access, managed).1).unwrap_or_default();
    schema_variants::name(&mut document);
    document
}

fn routes(access: ChangeAccess, managed: &ControlHandle) -> (Router<ControlHandle>, Description) {
    let all = match access {
        ChangeAccess::No => reading(),
        ChangeAccess::WithToken => reading().merge(token::required(changing(), managed)),
        ChangeAccess::Yes => reading().merge(changing()),
    };
    let (router, mut document) = all.split_for_parts();
    error::describe(&mut document);
    (router, document)
}

#[cfg(test)]
mod tests;
