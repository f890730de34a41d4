//! `/v1/watch`: streams events, one JSON object per line, until the client disconnects.
//!
//! Two snapshots of the target are compared, so watching has no cost for the target. A controller
//! that connects and disconnects between two snapshots is not reported here; `/v1/why` has it if
//! the disconnect was an error.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::num::NonZeroU64;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use axum::Extension;
use axum::body::{Body, Bytes, HttpBody};
use axum::extract::{Query, State};
use axum::http::StatusCode;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;
use serde::Deserialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{MissedTickBehavior, interval};
use utoipa::IntoParams;

use super::ApiError;
use super::controllers::all;
use super::status::{degraded, low_space};
use crate::api::{Controller, Event, Happened, Problem};
use crate::control::handle::{ControlHandle, RunningConfig};
use crate::overlay::diff::differences;

/// Watchers at once: each uses a connection.
const MOST_WATCHERS: usize = 8;

/// Interval between two snapshots.
const LOOK: Duration = Duration::from_millis(250);

/// Queued events of a slow watcher.
const MOST_BEHIND: usize = 256;

/// Limit of the watchers of one socket: users of the loopback address use none of those of the
/// administrators.
#[derive(Clone)]
pub(super) struct Room(Arc<Semaphore>);

impl Room {
    pub(super) fn new() -> Room {
        Room(Arc::new(Semaphore::new(MOST_WATCHERS)))
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// The response ends after so many events. The first is `watching`, at once. Absent: it does
    /// not end.
    #[param(value_type = Option<u64>, minimum = 1)]
    events: Option<NonZeroU64>,
}

/// Streams events from now on: lines, each with the JSON of an `Event`.
#[utoipa::path(
    get,
    path = "/v1/watch",
    params(WatchQuery),
    responses(
        (status = 200, body = String, content_type = "application/jsonl"),
        (status = 400, body = Problem),
        (status = 503, body = Problem)
    )
)]
pub(super) async fn watch(
    State(managed): State<ControlHandle>,
    Extension(Room(room)): Extension<Room>,
    Query(WatchQuery { events }): Query<WatchQuery>,
) -> Result<Response, ApiError> {
    let permit = room.try_acquire_owned().map_err(|_| {
        let error = format!("{MOST_WATCHERS} are watching already");
        ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error, "end one of them")
    })?;
    let (lines, sent) = mpsc::channel(MOST_BEHIND);
    let events = events.map_or(u64::MAX, NonZeroU64::get);
    tokio::spawn(follow(managed, lines, events, permit));
    Ok(([(CONTENT_TYPE, "application/jsonl")], Body::new(Lines(sent))).into_response())
}

/// Compares snapshots until the client disconnects. A slow client gets events later, but loses
/// none.
async fn follow(
    managed: ControlHandle,
    lines: mpsc::Sender<Bytes>,
    mut events: u64,
    _room: OwnedSemaphorePermit,
) {
    let mut seen = WatchedState::of(&managed);
    let mut happened = vec![Happened::Watching];
    let mut look = interval(LOOK);
    look.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        for what in happened {
            let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
            let event = Event { at_unix_s: since.map_or(0, |since| since.as_secs()), what };
            let Ok(mut line) = serde_json::to_vec(&event) else { continue };
            line.push(b'\n');
            if lines.send(line.into()).await.is_err() {
                return;
            }
            events -= 1;
            if events == 0 {
                return;
            }
        }
        tokio::select! {
            _ = look.tick() => {}
            () = lines.closed() => return,
        }
        let now = WatchedState::of(&managed);
        happened = seen.until(&now);
        seen = now;
    }
}

/// The body of the response: lines as they are sent.
struct Lines(mpsc::Receiver<Bytes>);

impl HttpBody for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}

/// A snapshot of the watched state.
struct WatchedState {
    controllers: BTreeMap<u64, Controller>,
    degraded: BTreeSet<String>,
    running: Arc<RunningConfig>,
}

impl WatchedState {
    fn of(managed: &ControlHandle) -> WatchedState {
        WatchedState {
            controllers: all(managed).into_iter().map(|each| (each.id, each)).collect(),
            degraded: degraded(managed).into_iter().chain(low_space(managed)).collect(),
            running: managed.running(),
        }
    }

    /// Events between this snapshot and a later one.
    fn until(&self, now: &WatchedState) -> Vec<Happened> {
        let mut happened = Vec::new();
        if !Arc::ptr_eq(&self.running, &now.running) {
            let differences = differences(&self.running.config, &now.running.config);
            happened.push(Happened::Changed { differences });
        }
        for (id, old) in &self.controllers {
            if !now.controllers.contains_key(id) {
                happened.push(Happened::Disconnected { controller: old.clone() });
            }
        }
        for (id, new) in &now.controllers {
            let controller = new.clone();
            match self.controllers.get(id) {
                None => happened.push(Happened::Connected { controller }),
                Some(old) if old.state != new.state => {
                    happened.push(Happened::State { controller });
                }
                Some(_) => {}
            }
        }
        let new = now.degraded.difference(&self.degraded).cloned();
        happened.extend(new.map(|what| Happened::Degraded { what }));
        let old = self.degraded.difference(&now.degraded).cloned();
        happened.extend(old.map(|what| Happened::Recovered { what }));
        happened
    }
}
