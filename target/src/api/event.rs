//! Types of events, as streamed by `/v1/watch`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Controller;

/// An event. `/v1/watch` sends one a line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Seconds since 1970.
    pub at_unix_s: u64,
    /// The event.
    #[serde(flatten)]
    pub what: Happened,
}

/// Kind of an event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Happened {
    /// The stream begins; later events are new.
    Watching,
    /// A controller has connected.
    Connected {
        /// Which.
        controller: Controller,
    },
    /// A controller has changed its state.
    State {
        /// Which.
        controller: Controller,
    },
    /// A controller has disconnected.
    Disconnected {
        /// Its last state.
        controller: Controller,
    },
    /// The configuration has changed.
    Changed {
        /// Differences, a sentence each.
        differences: Vec<String>,
    },
    /// A device is degraded.
    Degraded {
        /// A sentence.
        what: String,
    },
    /// A device has recovered.
    Recovered {
        /// The sentence of the degradation.
        what: String,
    },
}
