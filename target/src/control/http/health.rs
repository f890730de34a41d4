//! `/healthz`, `/readyz`: probes of supervisors and monitoring systems.

use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use tokio::time::{Instant, sleep};

use super::ApiError;
use super::status::degraded;
use crate::control::handle::ControlHandle;

/// Time limit of an iteration of a reactor.
const PATIENCE: Duration = Duration::from_secs(5);

/// Interval between two looks at the reactors.
const LOOK: Duration = Duration::from_millis(5);

/// Checks that every reactor iterates: if not, the daemon has to be restarted.
#[utoipa::path(
    get,
    path = "/healthz",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, description = "a reactor has stalled or ended"),
    )
)]
pub(super) async fn healthz(
    State(managed): State<ControlHandle>,
) -> Result<&'static str, ApiError> {
    let view = managed.view();
    let iterations = || view.reactors.iter().map(|stats| stats.iterations.load(Ordering::Relaxed));
    let before: Vec<u64> = iterations().collect();
    // Sleeping reactors iterate once.
    view.registry.wake_reactors();
    let deadline = Instant::now() + PATIENCE;
    loop {
        let ended = view.reactors.iter().any(|stats| stats.ended.load(Ordering::Relaxed));
        let stalled = iterations().zip(&before).position(|(now, before)| now == *before);
        match stalled {
            None if !ended => return Ok("ok\n"),
            Some(_) if !ended && Instant::now() < deadline => sleep(LOOK).await,
            _ => {
                let error = "a reactor has stalled or ended";
                let remedy = "see the log of the daemon, and restart it";
                return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy));
            }
        }
    }
}

/// Checks that everything that is configured is served.
#[utoipa::path(
    get,
    path = "/readyz",
    responses(
        (status = 200, body = String, content_type = "text/plain"),
        (status = 503, description = "something is pending or degraded: `detail` has the sentences"),
    )
)]
pub(super) async fn readyz(State(managed): State<ControlHandle>) -> Result<&'static str, ApiError> {
    let mut sentences = managed.view().pending.list();
    sentences.extend(degraded(&managed));
    if sentences.is_empty() {
        return Ok("ok\n");
    }
    let remedy = "see `nvmfctl status`; what is not named there is served";
    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, sentences.join("; "), remedy))
}
