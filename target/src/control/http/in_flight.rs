//! `/v1/inflight`: commands in progress.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError, sync_channel};
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::{Extension, Json};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, sleep_until};

use super::ApiError;
use crate::api::Problem;
use crate::api::stats::InFlight;
use crate::control::handle::ControlHandle;
use crate::core::message::Message;
use crate::core::stats::in_flight::InFlight as Described;
use crate::telemetry::snapshot::identity;

/// Time limit for the answer of a reactor, which answers within an iteration.
const LIMIT: Duration = Duration::from_secs(2);

/// Interval between two looks for an answer.
const LOOK: Duration = Duration::from_millis(1);

/// Shortest interval between two requests to the reactors: a response takes a reactor a time in
/// proportion to its queues, in which it serves no host.
const INTERVAL: Duration = Duration::from_millis(100);

/// The commands, and the reactors that do not answer.
type Response = (Vec<InFlight>, Vec<usize>);

/// A request to the reactors.
struct Request {
    /// When it was sent, or its response has arrived.
    at: Instant,
    /// `None`: the client has left before it.
    response: Option<Response>,
}

/// The last request to the reactors, and their response: all clients on a socket share it until the
/// next, so that a user of the loopback address cannot keep reactors from serving hosts.
#[derive(Clone, Default)]
pub(super) struct LastResponse(Arc<Mutex<Option<Request>>>);

/// Lists the oldest commands in progress of each namespace and reactor, the oldest first.
#[utoipa::path(
    operation_id = "list_commands_in_flight",
    get,
    path = "/v1/inflight",
    responses(
        (status = 200, body = Vec<InFlight>),
        (status = 503, body = Problem, description = "a reactor does not answer"),
    )
)]
pub(super) async fn list(
    State(managed): State<ControlHandle>,
    Extension(last): Extension<LastResponse>,
) -> Result<Json<Vec<InFlight>>, ApiError> {
    let (mut all, silent) = in_flight(&managed, &last).await;
    if let Some(reactor) = silent.first() {
        let error = format!("reactor {reactor} does not answer");
        let remedy = "see the log; the watchdog of systemd restarts a daemon that hangs";
        return Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, remedy));
    }
    all.sort_by_key(|command| std::cmp::Reverse(command.age_ns));
    Ok(Json(all))
}

/// Asks all reactors, or returns what they have answered within [`INTERVAL`].
pub(super) async fn in_flight(managed: &ControlHandle, last: &LastResponse) -> Response {
    let mut last = last.0.lock().await;
    if let Some(Request { at, response }) = last.as_ref()
        && let next = *at + INTERVAL
        && Instant::now() < next
    {
        match response {
            Some(response) => return response.clone(),
            None => sleep_until(next).await,
        }
    }
    *last = Some(Request { at: Instant::now(), response: None });
    let response = ask(managed).await;
    *last = Some(Request { at: Instant::now(), response: Some(response.clone()) });
    response
}

async fn ask(managed: &ControlHandle) -> Response {
    let (mut all, mut silent) = (Vec::new(), Vec::new());
    let mut asked = Vec::new();
    for (index, reactor) in managed.view().registry.reactors().iter().enumerate() {
        let (answer, answered) = sync_channel(1);
        match reactor.try_send(Message::InFlight(answer)) {
            Ok(()) => asked.push((index, answered)),
            Err(_) => silent.push(index),
        }
    }
    let until = Instant::now() + LIMIT;
    for (index, answered) in asked {
        match answer(answered, until).await {
            Some(commands) => all.extend(commands.iter().map(|each| described(index, each))),
            None => silent.push(index),
        }
    }
    (all, silent)
}

async fn answer(answered: Receiver<Vec<Described>>, until: Instant) -> Option<Vec<Described>> {
    loop {
        match answered.try_recv() {
            Ok(commands) => return Some(commands),
            Err(TryRecvError::Empty) if Instant::now() < until => sleep(LOOK).await,
            Err(_) => return None,
        }
    }
}

fn described(reactor: usize, of: &Described) -> InFlight {
    InFlight {
        command: identity(u32::try_from(reactor).unwrap_or(u32::MAX), &of.command),
        stage: of.stage.name().to_owned(),
        age_ns: of.age_ns,
    }
}
