//! `Managed`: the running target in the hands of whoever asks or changes it from outside.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokio::sync::watch;

use crate::View;
use crate::config::Config;

/// What is in force.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    /// What is served.
    pub(crate) config: Config,
    /// Sections that say something else by now and wait for a restart.
    pub(crate) needs_restart: Vec<&'static str>,
}

impl Running {
    /// At the start: everything is in force.
    pub(super) fn new(config: Config) -> Running {
        Running { config, needs_restart: Vec::new() }
    }
}

/// The running target. Clones are the same one; looking waits for nobody.
#[derive(Clone)]
pub(crate) struct Managed {
    view: Arc<View>,
    running: watch::Receiver<Arc<Running>>,
    file: Arc<PathBuf>,
}

impl Managed {
    pub(super) fn new(
        view: View,
        running: watch::Receiver<Arc<Running>>,
        file: PathBuf,
    ) -> Managed {
        Managed { view: Arc::new(view), running, file: Arc::new(file) }
    }

    /// What its parts share.
    pub(crate) fn view(&self) -> &View {
        &self.view
    }

    /// What is in force now.
    pub(crate) fn running(&self) -> Arc<Running> {
        Arc::clone(&self.running.borrow())
    }

    /// The configuration file.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }
}
