//! `/v1/log`: the log level. Not persisted: a restart uses that of the command line.

use axum::Json;
use axum::http::StatusCode;
use tracing::info;
use tracing::level_filters::LevelFilter;

use super::ApiError;
use super::changes::Body;
use crate::api::{Log, Problem};
use crate::control::logging;

/// Shows the log level.
#[utoipa::path(operation_id = "show_log_level", get, path = "/v1/log", responses((status = 200, body = Log)))]
pub(super) async fn show() -> Json<Log> {
    Json(now())
}

/// Sets the log level.
#[utoipa::path(
    operation_id = "set_log_level",
    put,
    path = "/v1/log",
    request_body = Log,
    responses((status = 200, body = Log), (status = 422, body = Problem))
)]
pub(super) async fn set(Body(wanted): Body<Log>) -> Result<Json<Log>, ApiError> {
    let wrong = |error: String| {
        let remedy = "take off, error, warn, info, debug or trace";
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, error, remedy)
    };
    let level = wanted.level.parse::<LevelFilter>();
    let level = level.map_err(|_| wrong(format!("there is no level {:?}", wanted.level)))?;
    if !logging::set_level(level) {
        return Err(wrong("nothing is logged here".to_owned()));
    }
    info!("log level set to {level}");
    Ok(Json(now()))
}

fn now() -> Log {
    Log { level: logging::level().unwrap_or(LevelFilter::OFF).to_string() }
}
