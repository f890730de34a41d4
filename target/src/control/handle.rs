//! `ControlHandle`: access of the management interface to the running target.

use std::sync::{Arc, Mutex, PoisonError};

use tokio::sync::{mpsc, oneshot, watch};
use tracing::error;

use super::change::{ChangeResult, ConfigRequest, Order};
use super::history::{History, now_unix_s};
use crate::TargetView;
use crate::api::Reload;
use crate::config::{BearerToken, Config};
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
    /// The last reload.
    pub(crate) last_reload: LastReload,
    /// Changes that took effect.
    pub(crate) history: History,
    /// The token of changes at the loopback address.
    pub(crate) token: HttpToken,
}

/// The token of `http_token_file`, as it was read last; without one no change is admitted. Shared by
/// all published configurations.
#[derive(Clone, Debug, Default)]
pub(crate) struct HttpToken(Arc<Mutex<Option<BearerToken>>>);

impl HttpToken {
    pub(super) fn set(&self, token: Option<BearerToken>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = token;
    }

    /// Whether a request with this token may change the target.
    pub(crate) fn admits(&self, presented: &str) -> bool {
        let token = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        token.as_ref().is_some_and(|token| token.is(presented))
    }
}

/// Result of the last reload, shared by all published configurations.
#[derive(Clone, Debug, Default)]
pub(crate) struct LastReload(Arc<Mutex<Option<Reload>>>);

impl LastReload {
    /// Sets the result: without errors it was successful.
    pub(super) fn set(&self, errors: &[String]) {
        let at_unix_s = now_unix_s();
        let reload = Reload { at_unix_s, successful: errors.is_empty(), errors: errors.to_owned() };
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(reload);
    }

    /// The last reload, if there was one.
    pub(crate) fn get(&self) -> Option<Reload> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// It was refused: the files differ from the running configuration.
    pub(super) fn is_refused(&self) -> bool {
        self.get().is_some_and(|last| !last.successful)
    }
}

impl RunningConfig {
    /// The configuration of a start. A token that cannot be read keeps nothing from being served.
    pub(super) fn new(declared: EffectiveConfig) -> RunningConfig {
        let config = declared.config().clone();
        let history = History::open(config.state_directory.as_deref());
        let token = HttpToken::default();
        match config.management.token() {
            Ok(read) => token.set(read),
            Err(sentence) => {
                error!("{sentence}; management.http is read-only until a reload can read it");
            }
        }
        RunningConfig {
            config,
            declared,
            needs_restart: Vec::new(),
            last_reload: LastReload::default(),
            history,
            token,
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
    /// The configuration is not the one that the change was made for.
    Stale,
    /// Another gateway has applied a newer shared configuration.
    Outrun(String),
    /// The shared configuration cannot be written into the cluster.
    Unshared(String),
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

    /// Executes a request after those queued before it. Once it has begun, it continues when the caller
    /// is dropped.
    pub(crate) async fn order(&self, work: ConfigRequest) -> ChangeResult {
        let (answer, answered) = oneshot::channel();
        let order = Order { work, answer };
        self.orders.send(order).await.map_err(|_| ChangeError::Stopping)?;
        answered.await.map_err(|_| ChangeError::Stopping)?
    }
}
