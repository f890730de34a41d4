//! `/v1/stats`, `/v1/slow`, `/metrics`.

use std::sync::atomic::Ordering;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::subsystems::all_namespaces;
use crate::api::stats::{SlowCommand, Stats};
use crate::control::handle::ControlHandle;
use crate::telemetry::prometheus::{self, Availability};
use crate::telemetry::snapshot;

pub(super) fn routes() -> OpenApiRouter<ControlHandle> {
    OpenApiRouter::new().routes(routes!(stats)).routes(routes!(slow)).routes(routes!(scrape))
}

/// Shows counts and latencies since the daemon started.
#[utoipa::path(get, path = "/v1/stats", responses((status = 200, body = Stats)))]
async fn stats(State(managed): State<ControlHandle>) -> Json<Stats> {
    Json(look(&managed))
}

/// Lists the last slow commands, the latest first.
#[utoipa::path(get, path = "/v1/slow", responses((status = 200, body = Vec<SlowCommand>)))]
async fn slow(State(managed): State<ControlHandle>) -> Json<Vec<SlowCommand>> {
    Json(snapshot::slow(managed.view().shared.observers()))
}

/// Shows all metrics as OpenMetrics text, for Prometheus.
#[utoipa::path(get, path = "/metrics",
    responses((status = 200, body = String, content_type = prometheus::CONTENT_TYPE)))]
async fn scrape(State(managed): State<ControlHandle>) -> Response {
    match prometheus::text(look(&managed), standing(&managed)) {
        Ok(text) => ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], text).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Availability of configured listeners and directories.
fn standing(managed: &ControlHandle) -> Availability {
    let (running, registry) = (managed.running(), &managed.view().registry);
    let listened = registry.addresses();
    let is_there = |nqn| registry.subsystem(nqn).is_some_and(|s| s.management.is_some());
    let subsystems = running.config.subsystems.iter();
    Availability {
        reload_refused: running.reload_refused.load(Ordering::Relaxed),
        namespaces: all_namespaces(managed),
        listeners: (running.config.addresses().into_iter())
            .map(|at| (at.to_string(), listened.contains(&at)))
            .collect(),
        directories: (subsystems.filter(|subsystem| subsystem.managed.is_some()))
            .map(|subsystem| (subsystem.nqn.to_string(), is_there(&subsystem.nqn)))
            .collect(),
    }
}

fn look(managed: &ControlHandle) -> Stats {
    let view = managed.view();
    snapshot::stats(view.shared.observers(), &view.reactors, view.started)
}
