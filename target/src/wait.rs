//! Waiting for addresses and stores that are configured and not there yet, beside what is served.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use tracing::{info, warn};

use crate::absent;
use crate::shelf::Shelf;

/// How often it is looked whether something has come.
const LOOK: Duration = Duration::from_secs(1);

/// What is awaited, for whoever asks: a sentence each.
#[derive(Debug, Default)]
pub struct Awaited(Mutex<Told>);

#[derive(Debug, Default)]
struct Told {
    sentences: Vec<String>,
    /// Why what has come could not be served, as it was last told.
    hindrance: String,
}

impl Awaited {
    /// What is awaited.
    #[must_use]
    pub fn list(&self) -> Vec<String> {
        self.lock().sentences.clone()
    }

    /// Sets what is awaited; what differs is logged.
    pub fn set(&self, sentences: Vec<String>) {
        let mut told = self.lock();
        for sentence in sentences.iter().filter(|each| !told.sentences.contains(each)) {
            warn!("waiting: {sentence}");
        }
        if sentences.is_empty() && !told.sentences.is_empty() {
            info!("everything that was awaited is there");
        }
        *told = Told { sentences, hindrance: String::new() };
    }

    /// What has come cannot be served; told once.
    pub fn hinder(&self, why: String) {
        let mut told = self.lock();
        if told.hindrance != why {
            warn!("still waiting: {why}");
            told.hindrance = why;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Told> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The thread that looks whether something has come.
pub(crate) struct Waiting {
    thread: JoinHandle<()>,
    /// Dropped: it ends.
    stop: Option<Sender<()>>,
}

impl Waiting {
    /// Starts to look.
    ///
    /// # Errors
    /// No thread to be had.
    pub(crate) fn start(shelf: Arc<Mutex<Shelf>>) -> std::io::Result<Waiting> {
        let (stop, stopped) = channel();
        let thread = std::thread::Builder::new().name("waiting".to_owned()).spawn(move || {
            while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                look(&shelf);
            }
        })?;
        Ok(Waiting { thread, stop: Some(stop) })
    }

    /// Has it begin nothing more.
    pub(crate) fn cease(&mut self) {
        self.stop = None;
    }

    /// Ends it; what hangs in a disk is left to itself.
    pub(crate) fn stop(mut self, deadline: Instant) {
        self.cease();
        while !self.thread.is_finished() && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

fn look(shelf: &Mutex<Shelf>) {
    let shelf = || shelf.lock().unwrap_or_else(PoisonError::into_inner);
    let addresses = shelf().awaited_addresses();
    for at in addresses {
        shelf().on_address(at);
    }
    let (stores, folder) = shelf().awaited_stores();
    if stores.is_empty() {
        return;
    }
    // A path may hang for as long as a server does not answer: nobody's lock is held meanwhile.
    let served = absent::served(folder.as_deref());
    if stores.iter().any(|awaited| awaited.has_come(&served)) {
        shelf().on_stores();
    }
}

#[cfg(test)]
impl Waiting {
    /// One that does this instead.
    pub(crate) fn at(work: impl FnOnce() + Send + 'static) -> Waiting {
        Waiting { thread: std::thread::spawn(work), stop: None }
    }
}
