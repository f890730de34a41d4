//! `/v1/gateway-group`.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};

use super::ApiError;
use super::changes::Body;
use crate::api::{
    GatewayConfiguration, GatewayGroup, GatewayMember, GatewayMove, GatewayRebalance, GatewayState,
    Outcome, Problem,
};
use crate::control::handle::ControlHandle;
use crate::telemetry::gateway::{GroupRequest, GroupView};

fn view(managed: &ControlHandle) -> Result<Arc<GroupView>, ApiError> {
    let missing =
        || ApiError::not_found("the daemon is no gateway of a group", "see [group] in its manual");
    managed.view().gateway.clone().ok_or_else(missing)
}

/// The group, of a gateway that reaches it: it knows who serves what.
fn reached(managed: &ControlHandle) -> Result<(Arc<GroupView>, GatewayGroup), ApiError> {
    let view = view(managed)?;
    let group = view.group();
    match group.fresh {
        true => Ok((view, group)),
        false => {
            let unknown = || "this gateway has not looked at its group yet".to_owned();
            let what = view.idle().unwrap_or_else(unknown);
            Err(ApiError::conflict(what, "ask another gateway"))
        }
    }
}

/// Describes a move.
fn line(group: &GatewayGroup, GatewayMove { ana_group, to }: &GatewayMove) -> String {
    let owner = owner(group, *ana_group).unwrap_or("nobody");
    format!("~ ANA group {ana_group} moves from gateway {owner} to gateway {to}")
}

fn owner(group: &GatewayGroup, ana_group: u32) -> Option<&str> {
    group.ana_groups.iter().find(|it| it.id == ana_group)?.owner.as_deref()
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
pub(super) async fn show(
    State(managed): State<ControlHandle>,
) -> Result<Json<GatewayGroup>, ApiError> {
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
pub(super) async fn show_configuration(
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
pub(super) async fn move_ana_group(
    State(managed): State<ControlHandle>,
    Body(wanted): Body<GatewayMove>,
) -> Result<Json<Outcome>, ApiError> {
    let (view, group) = reached(&managed)?;
    let GatewayMove { ana_group, to } = &wanted;
    let is_live = |it: &&GatewayMember| it.name == *to && it.state == GatewayState::Live;
    let Some(member) = group.gateways.iter().find(is_live) else {
        let what = format!("{to} is no live gateway of the group {}", group.name);
        return Err(ApiError::conflict(what, "see `nvmfctl gateway list`"));
    };
    // That no host is connected may pass at any time.
    if member.front.is_some_and(|front| front.listeners == 0 && front.hosts == 0) {
        let what = format!("no listener of gateway {to} is open, so no host reaches it");
        return Err(ApiError::conflict(what, "see its listeners and the network of hosts"));
    }
    let newest = group.gateways.iter().filter_map(|it| it.applied).max();
    if member.applied.is_some_and(|applied| Some(applied) < newest) {
        let what =
            format!("the newest version of the shared configuration is not in force at {to}");
        return Err(ApiError::conflict(what, "see `nvmfctl gateway list` for the reason"));
    }
    if owner(&group, *ana_group).is_none_or(|owner| owner == to) {
        let what = format!("no other gateway serves ANA group {ana_group}");
        return Err(ApiError::conflict(what, "see `nvmfctl gateway list`"));
    }
    let lines = vec![line(&group, &wanted)];
    let is_sent = view.request(GroupRequest::Move(wanted.ana_group, wanted.to));
    done(lines, is_sent)
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
pub(super) async fn rebalance(
    State(managed): State<ControlHandle>,
    Body(GatewayRebalance { dry_run }): Body<GatewayRebalance>,
) -> Result<Json<Outcome>, ApiError> {
    let (view, group) = reached(&managed)?;
    let lines: Vec<String> = group.balance.iter().map(|it| line(&group, it)).collect();
    if dry_run {
        return Ok(Json(Outcome::immediate(lines)));
    }
    let request = |GatewayMove { ana_group, to }| view.request(GroupRequest::Move(ana_group, to));
    let is_sent = group.balance.into_iter().all(request);
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
pub(super) async fn exclude(
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
        return Err(ApiError::conflict(what, "see `nvmfctl gateway list`"));
    }
    let line = format!("- gateway {name} is excluded");
    let is_sent = view.request(GroupRequest::Exclude(name));
    done(vec![line], is_sent)
}

fn done(lines: Vec<String>, is_sent: bool) -> Result<Json<Outcome>, ApiError> {
    if !is_sent {
        return Err(ApiError::conflict("the daemon is about to stop", "start it again"));
    }
    lines.iter().for_each(|line| tracing::info!("by request of the administrator: {line}"));
    Ok(Json(Outcome::immediate(lines)))
}
