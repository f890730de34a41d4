//! Types of events, as streamed by `/v1/watch`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Controller;

/// Something that has happened. `/v1/watch` sends one a line.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Seconds since 1970.
    pub at_unix_s: u64,
    /// What.
    #[serde(flatten)]
    pub what: Happened,
}

/// Kind of an event.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Happened {
    /// Watching begins; what follows is new.
    Watching,
    /// A host has a controller.
    Connected {
        /// Which.
        controller: Controller,
    },
    /// A controller is at something else.
    State {
        /// Which.
        controller: Controller,
    },
    /// A controller is gone.
    Disconnected {
        /// What it was last.
        controller: Controller,
    },
    /// What is served has changed.
    Changed {
        /// What is different, a sentence each.
        differences: Vec<String>,
    },
    /// A store is not well.
    Degraded {
        /// A sentence.
        what: String,
    },
    /// A store is well again.
    Recovered {
        /// What was the matter.
        what: String,
    },
}
