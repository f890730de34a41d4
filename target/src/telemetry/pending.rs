//! Reports configured devices and listeners that are unavailable.

use std::mem::take;
use std::net::SocketAddr;
use std::sync::Mutex;

use crate::blockdev::lock;
use tracing::{error, info, warn};

/// Unavailable devices and listeners, a sentence each.
#[derive(Debug, Default)]
pub struct Pending(Mutex<PendingState>);

#[derive(Debug, Default)]
struct PendingState {
    sentences: Vec<String>,
    /// Devices that exist and cannot be served until a reload.
    held: Vec<String>,
    /// The last reported error of available devices.
    failure: String,
    /// Addresses of listeners whose device was removed.
    lost: Vec<SocketAddr>,
}

impl Pending {
    /// All pending and held devices and listeners.
    pub fn list(&self) -> Vec<String> {
        let state = lock(&self.0);
        state.sentences.iter().chain(&state.held).cloned().collect()
    }

    /// Sets pending and held devices and listeners; changes are logged.
    pub fn set(&self, sentences: Vec<String>, held: Vec<String>) {
        let mut state = lock(&self.0);
        for sentence in held.iter().filter(|each| !state.held.contains(each)) {
            error!("not served: {sentence}");
        }
        for sentence in sentences.iter().filter(|each| !state.sentences.contains(each)) {
            warn!("pending: {sentence}");
        }
        if sentences.is_empty() && !state.sentences.is_empty() {
            info!("all configured devices and addresses are available");
        }
        let (failure, lost) = (String::new(), take(&mut state.lost));
        *state = PendingState { sentences, held, failure, lost };
    }

    /// Adds the address of a listener whose device was removed.
    pub(crate) fn add_lost(&self, at: SocketAddr) {
        lock(&self.0).lost.push(at);
    }

    /// Removes the address of a listener.
    pub(crate) fn forget(&self, at: SocketAddr) {
        lock(&self.0).lost.retain(|lost| *lost != at);
    }

    /// Takes the addresses that were added since the last call.
    pub(crate) fn take_lost(&self) -> Vec<SocketAddr> {
        take(&mut lock(&self.0).lost)
    }

    /// Logs an error of available devices, once.
    pub(crate) fn report_failure(&self, why: String) {
        let mut state = lock(&self.0);
        if state.failure != why {
            warn!("still pending: {why}");
            state.failure = why;
        }
    }
}
