//! Reports configured devices and listeners that are unavailable.

use std::mem::take;
use std::net::SocketAddr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tracing::{error, info, warn};

/// Unavailable devices and listeners, a sentence each.
#[derive(Debug, Default)]
pub struct Pending(Mutex<PendingState>);

#[derive(Debug, Default)]
struct PendingState {
    sentences: Vec<String>,
    /// What is there and cannot be served as it is, until a reload.
    held: Vec<String>,
    /// Why what has come could not be served, as it was last told.
    failure: String,
    /// Addresses that are no longer listened at, as their device is gone.
    lost: Vec<SocketAddr>,
}

impl Pending {
    /// What is awaited or held.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        let state = self.lock();
        state.sentences.iter().chain(&state.held).cloned().collect()
    }

    /// Sets what is awaited, and what is held; what differs is logged.
    pub fn set(&self, sentences: Vec<String>, held: Vec<String>) {
        let mut state = self.lock();
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

    /// This address is no longer listened at, as its device is gone.
    pub(crate) fn add_lost(&self, at: SocketAddr) {
        self.lock().lost.push(at);
    }

    /// This address is no longer to be listened at.
    pub(crate) fn forget(&self, at: SocketAddr) {
        self.lock().lost.retain(|lost| *lost != at);
    }

    /// The addresses that were lost since this was asked last.
    pub(crate) fn take_lost(&self) -> Vec<SocketAddr> {
        take(&mut self.lock().lost)
    }

    /// What has come cannot be served; told once.
    pub fn report_failure(&self, why: String) {
        let mut state = self.lock();
        if state.failure != why {
            warn!("still pending: {why}");
            state.failure = why;
        }
    }

    fn lock(&self) -> MutexGuard<'_, PendingState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
