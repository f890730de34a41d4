//! `/v1/gateway-group`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::ApiError;
use super::changes::Body;
use crate::api::{
    GatewayConfiguration, GatewayGroup, GatewayMember, GatewayMove, GatewayRebalance, GatewayState,
    Outcome, Problem,
};
use crate::control::handle::ControlHandle;
use crate::telemetry::gateway::{GroupRequest, GroupView};

pub(super) fn routes() -> OpenApiRouter<ControlHandle> {
    OpenApiRouter::new().routes(routes!(show)).routes(routes!(show_configuration))
}

pub(super) fn changing() -> OpenApiRouter<ControlHandle> {
    OpenApiRouter::new()
        .routes(routes!(move_ana_group))
        .routes(routes!(rebalance))
        .routes(routes!(exclude))
}

fn view(managed: &ControlHandle) -> Result<Arc<GroupView>, ApiError> {
    let missing =
        || ApiError::not_found("the daemon is no gateway of a group", "see [group] in its manual");
    managed.view().gateway.clone().ok_or_else(missing)
}

/// Shows the gateway group: its gateways, and who serves each ANA group.
#[utoipa::path(
    operation_id = "show_gateway_group",
    get,
    path = "/v1/gateway-group",
    responses(
        (status = 200, body = GatewayGroup),
        (status = 404, body = Problem, description = "the daemon is no gateway of a group"),
    )
)]
async fn show(State(managed): State<ControlHandle>) -> Result<Json<GatewayGroup>, ApiError> {
    Ok(Json(view(&managed)?.group()))
}

/// Shows the shared configuration of the gateway group, as it is in force at this gateway.
#[utoipa::path(
    operation_id = "show_gateway_configuration",
    get,
    path = "/v1/gateway-group/configuration",
    responses(
        (status = 200, body = GatewayConfiguration),
        (status = 404, body = Problem, description = "the daemon uses no shared configuration"),
    )
)]
async fn show_configuration(
    State(managed): State<ControlHandle>,
) -> Result<Json<GatewayConfiguration>, ApiError> {
    let running = managed.running();
    let what = "the daemon uses no shared configuration";
    let missing = || ApiError::not_found(what, "see `shared` of [group] in its manual");
    let shared = running.declared.shared().ok_or_else(missing)?;
    let (version, text) = (shared.version.number, shared.text.clone());
    Ok(Json(GatewayConfiguration { version, text }))
}

/// Moves an ANA group to another gateway. Returns before it is done.
#[utoipa::path(
    operation_id = "move_ana_group",
    post,
    path = "/v1/gateway-group/move",
    request_body = GatewayMove,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "the daemon is no gateway of a group"),
        (status = 409, body = Problem, description = "no gateway serves the ANA group, or the other one is not live"),
    )
)]
async fn move_ana_group(
    State(managed): State<ControlHandle>,
    Body(GatewayMove { ana_group, to }): Body<GatewayMove>,
) -> Result<Json<Outcome>, ApiError> {
    let view = view(&managed)?;
    let group = view.group();
    let conflict = |what: String, remedy: &str| ApiError::new(StatusCode::CONFLICT, what, remedy);
    let is_live = |it: &GatewayMember| it.name == to && it.state == GatewayState::Live;
    if !group.fresh {
        let what =
            format!("{} does not reach the cluster of the group {}", group.gateway, group.name);
        return Err(conflict(what, "ask another gateway"));
    }
    if !group.gateways.iter().any(is_live) {
        let what = format!("{to} is no live gateway of the group {}", group.name);
        return Err(conflict(what, "see `nvmfctl gateway list`"));
    }
    let owned = group.ana_groups.iter().find(|it| it.id == ana_group);
    let Some(owner) = owned.and_then(|it| it.owner.as_ref()).filter(|owner| **owner != to) else {
        let what = format!("no other gateway serves ANA group {ana_group}");
        return Err(conflict(what, "see `nvmfctl gateway list`"));
    };
    let line = format!("~ ANA group {ana_group} moves from gateway {owner} to gateway {to}");
    let is_sent = view.request(GroupRequest::Move(ana_group, to));
    done(vec![line], is_sent)
}

/// Moves ANA groups, one after the other, until each live gateway has as many as the others, or one
/// more. Returns before it is done.
#[utoipa::path(
    operation_id = "rebalance_gateway_group",
    post,
    path = "/v1/gateway-group/rebalance",
    request_body = GatewayRebalance,
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "the daemon is no gateway of a group"),
        (status = 409, body = Problem, description = "this gateway does not reach the cluster"),
    )
)]
async fn rebalance(
    State(managed): State<ControlHandle>,
    Body(GatewayRebalance { dry_run }): Body<GatewayRebalance>,
) -> Result<Json<Outcome>, ApiError> {
    let view = view(&managed)?;
    let group = view.group();
    if !group.fresh {
        let what =
            format!("{} does not reach the cluster of the group {}", group.gateway, group.name);
        return Err(ApiError::new(StatusCode::CONFLICT, what, "ask another gateway"));
    }
    let line = |GatewayMove { ana_group, to }: &GatewayMove| {
        let owned = group.ana_groups.iter().find(|it| it.id == *ana_group);
        let owner = owned.and_then(|it| it.owner.as_deref()).unwrap_or("nobody");
        format!("~ ANA group {ana_group} moves from gateway {owner} to gateway {to}")
    };
    let lines: Vec<String> = group.balance.iter().map(line).collect();
    if dry_run {
        return Ok(Json(Outcome::immediate(lines)));
    }
    let request = |GatewayMove { ana_group, to }| view.request(GroupRequest::Move(ana_group, to));
    let is_sent = group.balance.iter().cloned().all(request);
    done(lines, is_sent)
}

/// Excludes another gateway from the cluster, and takes its ANA groups: for one that is broken and
/// still has heartbeats.
#[utoipa::path(
    operation_id = "exclude_gateway",
    post,
    path = "/v1/gateway-group/gateways/{name}/exclude",
    params(("name" = String, Path, description = "the name of the gateway")),
    responses(
        (status = 200, body = Outcome),
        (status = 404, body = Problem, description = "the daemon is no gateway of a group"),
        (status = 409, body = Problem, description = "it is no other gateway that is live"),
    )
)]
async fn exclude(
    State(managed): State<ControlHandle>,
    Path(name): Path<String>,
) -> Result<Json<Outcome>, ApiError> {
    let view = view(&managed)?;
    let group = view.group();
    let takes_part = |it: &GatewayMember| {
        it.name == name && matches!(it.state, GatewayState::Live | GatewayState::Silent)
    };
    if name == group.gateway || !group.gateways.iter().any(takes_part) {
        let what = format!("{name} is no other gateway of the group that takes part");
        return Err(ApiError::new(StatusCode::CONFLICT, what, "see `nvmfctl gateway list`"));
    }
    let line = format!("- gateway {name} is excluded");
    let is_sent = view.request(GroupRequest::Exclude(name));
    done(vec![line], is_sent)
}

fn done(lines: Vec<String>, is_sent: bool) -> Result<Json<Outcome>, ApiError> {
    if !is_sent {
        let what = "the daemon is about to stop";
        return Err(ApiError::new(StatusCode::CONFLICT, what, "start it again"));
    }
    lines.iter().for_each(|line| tracing::info!("by request of the administrator: {line}"));
    Ok(Json(Outcome::immediate(lines)))
}
