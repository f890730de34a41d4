//! `ControlHandle`: access of the management interface to the running target.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::{mpsc, oneshot, watch};

use super::change::{ChangeResult, ConfigRequest, Order};
use crate::TargetView;
use crate::config::Config;
use crate::overlay::{EditError, EffectiveConfig};

/// The configuration in force.
#[derive(Clone, Debug)]
pub(crate) struct RunningConfig {
    /// What is served.
    pub(crate) config: Config,
    /// What it comes from.
    pub(crate) declared: EffectiveConfig,
    /// Sections that say something else by now and wait for a restart.
    pub(crate) needs_restart: Vec<&'static str>,
    /// The last reload was refused: what the files say is not what is served.
    pub(crate) reload_refused: Arc<AtomicBool>,
}

impl RunningConfig {
    /// At the start: everything is in force.
    pub(super) fn new(declared: EffectiveConfig) -> RunningConfig {
        let config = declared.config().clone();
        RunningConfig {
            config,
            declared,
            needs_restart: Vec::new(),
            reload_refused: Arc::default(),
        }
    }
}

/// Reason why a change was rejected.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ChangeError {
    /// It does not fit what is there.
    Misfit(EditError),
    /// What comes out cannot be served.
    Unservable(String),
    /// It cannot be kept, and so is not in force.
    Unkept(String),
    /// The daemon is stopping.
    Stopping,
}

/// The running target. Clones are the same one; looking waits for nobody.
#[derive(Clone)]
pub(crate) struct ControlHandle {
    view: Arc<TargetView>,
    running: watch::Receiver<Arc<RunningConfig>>,
    orders: mpsc::Sender<Order>,
}

impl ControlHandle {
    pub(super) fn new(
        view: TargetView,
        running: watch::Receiver<Arc<RunningConfig>>,
        orders: mpsc::Sender<Order>,
    ) -> ControlHandle {
        ControlHandle { view: Arc::new(view), running, orders }
    }

    /// What its parts share.
    pub(crate) fn view(&self) -> &TargetView {
        &self.view
    }

    /// What is in force now.
    pub(crate) fn running(&self) -> Arc<RunningConfig> {
        Arc::clone(&self.running.borrow())
    }

    /// Has something changed, after what others have wanted before. It goes on also when nobody
    /// waits any more.
    pub(crate) async fn order(&self, work: ConfigRequest) -> ChangeResult {
        let (answer, answered) = oneshot::channel();
        let order = Order { work, answer };
        self.orders.send(order).await.map_err(|_| ChangeError::Stopping)?;
        answered.await.map_err(|_| ChangeError::Stopping)?
    }
}
