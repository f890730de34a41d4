//! `/v1/why`: recent disconnects.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::Json;
use axum::extract::{Query, State};
use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Why;
use crate::control::handle::ControlHandle;
use crate::core::diag::Record;

#[derive(Deserialize, IntoParams)]
pub(super) struct HostQuery {
    /// NQN or address of a host.
    host: Option<String>,
}

/// Lists reasons why hosts were refused or disconnected, the latest first.
#[utoipa::path(operation_id = "list_disconnects", get, path = "/v1/why", params(HostQuery), responses((status = 200, body = Vec<Why>)))]
pub(super) async fn list(
    State(managed): State<ControlHandle>,
    Query(HostQuery { host }): Query<HostQuery>,
) -> Json<Vec<Why>> {
    let records = managed.view().shared.disconnects.list(None);
    let wanted = |record: &&Record| {
        let Some(host) = &host else { return true };
        let named = record.why.host.is_some_and(|nqn| nqn.to_string() == *host);
        named || record.why.remote.ip().to_string() == *host
    };
    Json(records.iter().filter(wanted).map(api_record).collect())
}

fn api_record(Record { why, count, first, last, number }: &Record) -> Why {
    let seconds = |at: &SystemTime| at.duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    Why {
        number: *number,
        cause: why.cause.name().to_owned(),
        stage: why.cause.stage().name().to_owned(),
        reason: why.cause.reason().to_owned(),
        detail: why.detail.to_string(),
        remedy: why.cause.remedy().to_owned(),
        host: why.host.map(|nqn| nqn.to_string()),
        remote: why.remote.to_string(),
        local: why.local.to_string(),
        subsystem: why.subsystem.map(|nqn| nqn.to_string()),
        qid: why.qid,
        count: *count,
        first_s: seconds(first),
        last_s: seconds(last),
    }
}
