//! `/v1/stats`, `/v1/slow`, `/metrics`.

use std::collections::HashMap;

use axum::extract::State;
use axum::http::header::{ACCEPT, CONTENT_TYPE};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use nvme::Nqn;

use super::in_flight::{LastResponse, in_flight};
use super::subsystems::all_namespaces;
use crate::api::stats::{InFlight, SlowCommand, Stats};
use crate::control::handle::ControlHandle;
use crate::telemetry::prometheus::{self, Availability};
use crate::telemetry::snapshot;

/// Shows counts and latencies since the daemon started, and counts of each controller since its host
/// was admitted.
#[utoipa::path(operation_id = "show_stats", get, path = "/v1/stats", responses((status = 200, body = Stats)))]
pub(super) async fn stats(State(managed): State<ControlHandle>) -> Json<Stats> {
    let view = managed.view();
    let controllers = snapshot::controllers(view.shared.observers(), &view.registry.controllers());
    Json(Stats { controllers, ..look(&managed) })
}

/// Lists the last slow commands, the latest first.
#[utoipa::path(operation_id = "list_slow_commands", get, path = "/v1/slow", responses((status = 200, body = Vec<SlowCommand>)))]
pub(super) async fn slow(State(managed): State<ControlHandle>) -> Json<Vec<SlowCommand>> {
    Json(snapshot::slow(managed.view().shared.observers()))
}

/// Shows all metrics for Prometheus: as OpenMetrics text if the client accepts it, else in the text
/// format 0.0.4.
#[utoipa::path(operation_id = "show_metrics", get, path = "/metrics",
    responses((status = 200, content(
        (String = prometheus::CONTENT_TYPE),
        (String = prometheus::PLAIN_CONTENT_TYPE),
    ))))]
pub(super) async fn scrape(
    State(managed): State<ControlHandle>,
    Extension(last): Extension<LastResponse>,
    headers: HeaderMap,
) -> Response {
    let accepted = headers.get_all(ACCEPT).iter().filter_map(|types| types.to_str().ok());
    let open = accepted.flat_map(|types| types.split(',')).any(|one| {
        one.split(';').next().is_some_and(|name| name.trim() == "application/openmetrics-text")
    });
    let mut standing = standing(&managed);
    // An admin command, such as Format NVM, may take its time.
    for InFlight { command, age_ns, .. } in in_flight(&managed, &last).await.0 {
        if command.qid != 0 {
            let whose = (command.subsystem, command.nsid);
            let oldest_ns = standing.oldest_ns.entry(whose).or_default();
            *oldest_ns = age_ns.max(*oldest_ns);
        }
    }
    match prometheus::text(look(&managed), standing) {
        Ok(text) if open => ([(CONTENT_TYPE, prometheus::CONTENT_TYPE)], text).into_response(),
        Ok(text) => {
            let kind = [(CONTENT_TYPE, prometheus::PLAIN_CONTENT_TYPE)];
            (kind, prometheus::plain(&text)).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// Availability of configured listeners and directories.
fn standing(managed: &ControlHandle) -> Availability {
    let (running, registry) = (managed.running(), &managed.view().registry);
    let listened = registry.addresses();
    let is_there = |nqn| registry.subsystem(nqn).is_some_and(|s| s.management.is_some());
    let subsystems = running.config.subsystems.iter();
    let mut controllers: HashMap<Nqn, u32> = HashMap::new();
    for controller in registry.controllers().iter().filter(|controller| !controller.discovery) {
        *controllers.entry(controller.association.subsystem).or_default() += 1;
    }
    let controllers_of = |nqn: &Nqn| controllers.get(nqn).copied().unwrap_or_default();
    Availability {
        last_reload: running.last_reload.get(),
        controllers: (running.config.subsystems.iter())
            .map(|subsystem| (subsystem.nqn.to_string(), controllers_of(&subsystem.nqn)))
            .collect(),
        namespaces: all_namespaces(managed),
        oldest_ns: HashMap::new(),
        gateway: managed.view().gateway.as_ref().map(|view| view.group()),
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
