//! `ControlHandle`: access of the management interface to the running target.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use tokio::sync::{mpsc, oneshot, watch};

use super::change::{ChangeResult, Order, Work};
use crate::TargetView;
use crate::config::Config;
use crate::overlay::{EditError, EffectiveConfig};

/// The configuration in force.
#[derive(Clone, Debug)]
pub(crate) struct Running {
    /// What is served.
    pub(crate) config: Config,
    /// What it comes from.
    pub(crate) declared: EffectiveConfig,
    /// Sections that say something else by now and wait for a restart.
    pub(crate) needs_restart: Vec<&'static str>,
    /// The last reload was refused: what the files say is not what is served.
    pub(crate) reload_refused: Arc<AtomicBool>,
}

impl Running {
    /// At the start: everything is in force.
    pub(super) fn new(declared: EffectiveConfig) -> Running {
        let config = declared.config().clone();
        Running { config, declared, needs_restart: Vec::new(), reload_refused: Arc::default() }
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
    running: watch::Receiver<Arc<Running>>,
    orders: mpsc::Sender<Order>,
}

impl ControlHandle {
    pub(super) fn new(
        view: TargetView,
        running: watch::Receiver<Arc<Running>>,
        orders: mpsc::Sender<Order>,
    ) -> ControlHandle {
        ControlHandle { view: Arc::new(view), running, orders }
    }

    /// What its parts share.
    pub(crate) fn view(&self) -> &TargetView {
        &self.view
    }

    /// What is in force now.
    pub(crate) fn running(&self) -> Arc<Running> {
        Arc::clone(&self.running.borrow())
    }

    /// Has something changed, after what others have wanted before. It goes on also when nobody
    /// waits any more.
    pub(crate) async fn order(&self, work: Work) -> ChangeResult {
        let (answer, answered) = oneshot::channel();
        let order = Order { work, answer };
        self.orders.send(order).await.map_err(|_| ChangeError::Stopping)?;
        answered.await.map_err(|_| ChangeError::Stopping)?
    }
}
