//! `/v1/plan`: what a reload would change.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use tokio::sync::Semaphore;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use super::ApiError;
use crate::api::{Outcome, Problem};
use crate::control::handle::{ControlHandle, RunningConfig};
use crate::overlay::diff::differences;

/// Time limit to read the files.
const READ_TIME: Duration = Duration::from_secs(10);

/// Permits one reader of the files at a time on each socket, also if their file system hangs: it
/// has one thread then, and a user of the loopback address keeps no administrator waiting.
#[derive(Clone)]
pub(super) struct Reader(Arc<Semaphore>);

impl Reader {
    pub(super) fn new() -> Reader {
        Reader(Arc::new(Semaphore::new(1)))
    }
}

/// Shows what a reload of the configuration files would change now, or why it would be refused. It
/// opens no device, so a reload may be refused although there is no error here.
#[utoipa::path(
    operation_id = "show_reload_plan",
    get,
    path = "/v1/plan",
    responses(
        (status = 200, body = Outcome),
        (status = 422, body = Problem, description = "the files have errors"),
        (status = 503, body = Problem, description = "the files cannot be read in time"),
    )
)]
pub(super) async fn plan(
    State(managed): State<ControlHandle>,
    Extension(Reader(reader)): Extension<Reader>,
) -> Result<Json<Outcome>, ApiError> {
    let read = async {
        let permit = reader.acquire_owned().await.ok()?;
        let running = managed.running();
        let task = spawn_blocking(move || (of(&running), permit));
        task.await.ok().map(|(plan, _)| plan)
    };
    let late = || {
        let error = "the configuration files cannot be read in time";
        let remedy = "check the file system that has them";
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy)
    };
    timeout(READ_TIME, read).await.ok().flatten().unwrap_or_else(|| Err(late())).map(Json)
}

fn of(running: &RunningConfig) -> Result<Outcome, ApiError> {
    let next = running.declared.reload().map_err(|errors| {
        let errors: Vec<String> = errors.to_string().lines().map(String::from).collect();
        let remedy = "correct the files: until then a reload is refused";
        ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, errors.join("; "), remedy)
    })?;
    let needs_restart = running.config.needs_restart(next.config());
    Ok(Outcome {
        differences: differences(&running.config, next.config()),
        needs_restart: needs_restart.iter().map(ToString::to_string).collect(),
        kept: true,
    })
}
