//! `/v1/history`: changes of the configuration that took effect.

use axum::Json;
use axum::extract::State;

use crate::api::HistoryEntry;
use crate::control::handle::ControlHandle;

/// Lists changes and reloads that took effect, and who requested them, the latest first.
#[utoipa::path(operation_id = "list_history", get, path = "/v1/history", responses((status = 200, body = Vec<HistoryEntry>)))]
pub(super) async fn list(State(managed): State<ControlHandle>) -> Json<Vec<HistoryEntry>> {
    Json(managed.running().history.list())
}
