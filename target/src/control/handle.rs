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
    /// The configuration.
    pub(crate) config: Config,
    /// Its sources.
    pub(crate) declared: EffectiveConfig,
    /// Sections with changes that need a restart.
    pub(crate) needs_restart: Vec<&'static str>,
    /// The last reload was rejected: the files differ from the running configuration.
    pub(crate) reload_refused: Arc<AtomicBool>,
}

impl RunningConfig {
    /// The configuration of a start.
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
    /// It cannot be applied to the current configuration.
    Misfit(EditError),
    /// The resulting configuration cannot be served.
    Unservable(String),
    /// It cannot be persisted, and is not in force.
    Unkept(String),
    /// The daemon is stopping.
    Stopping,
}

/// The running target. Clones share it; reading never blocks.
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

    /// Read-only view of the target.
    pub(crate) fn view(&self) -> &TargetView {
        &self.view
    }

    /// The configuration in force.
    pub(crate) fn running(&self) -> Arc<RunningConfig> {
        Arc::clone(&self.running.borrow())
    }

    /// Executes a request after those queued before it. It continues when the caller is dropped.
    pub(crate) async fn order(&self, work: ConfigRequest) -> ChangeResult {
        let (answer, answered) = oneshot::channel();
        let order = Order { work, answer };
        self.orders.send(order).await.map_err(|_| ChangeError::Stopping)?;
        answered.await.map_err(|_| ChangeError::Stopping)?
    }
}
