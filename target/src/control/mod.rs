//! The control plane: one tokio thread that starts the target, handles signals, and reports to the
//! service manager. It takes no part in I/O.
//!
//! Calls into the target may wait for reactors or devices, so each runs on tokio's blocking
//! threads, and owns the target meanwhile. This thread retains its [`Liveness`](crate::Liveness),
//! which only reads: so also while a reload waits for a device that does not answer, the watchdog
//! is notified, and a failed reactor or a signal is detected.

mod change;
pub mod check;
mod handle;
mod history;
mod http;
mod logging;
mod mdns;
mod shared;
mod signals;
mod systemd;

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::RunningTarget;
use crate::api::HistoryEntry;
use crate::config::{Config, ConfigErrors};
use crate::daemon::AppliedChange;
use crate::error::NotServed;
use crate::overlay::EffectiveConfig;
use crate::overlay::diff::differences;
use crate::plural::count;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, sleep, timeout};
use tracing::{error, info, warn};

use crate::state::lock::StateDirLock;
use crate::worker::gateway::shared::SharedConfigClient;
use change::{Order, Requester};
use handle::{ControlHandle, RunningConfig};
use history::now_unix_s;
use http::Server;
use mdns::Announcer;
use systemd::ServiceNotifier;

pub use check::check;
pub use logging::{LogFormat, start as start_log};
pub use mdns::announce;

/// Time for commands in flight after a stop was requested.
const STOP_BUDGET: Duration = Duration::from_secs(5);

/// Extra time before the process exits regardless.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// Time for a reload in progress after a stop was requested. The stop begins then; both together
/// stay below `TimeoutStopSec` of the unit file.
const RELOAD_GRACE: Duration = Duration::from_secs(5);

/// Time after which a change that has not ended is reported: opening a device has as long.
const SLOW: Duration = Duration::from_secs(10);

/// Interval between checks of the target's liveness.
const LOOK: Duration = Duration::from_secs(1);

/// A request to the daemon by signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ControlRequest {
    /// Stop the daemon.
    Stop,
    /// Reload the configuration.
    Reload,
}

/// Operations on a target; there is only one implementation, except in tests.
trait Serve: Sized + Send + 'static {
    type Pulse: Pulse;

    fn pulse(&self) -> Self::Pulse;
    fn apply(&mut self, config: Config) -> Result<AppliedChange, String>;
    /// Applies a configuration. `persist` is called when no later step can fail, before any host sees it.
    fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, NotServed>;
    /// The shared configuration of the gateway group, if there is one.
    fn shared(&self) -> Option<SharedConfigClient> {
        None
    }
    /// Reports all paths as inaccessible, and waits until then for hosts to use other paths.
    fn leave(&self, until: Instant);
    fn stop(self, deadline: Instant);
}

/// Liveness of a target, also while it is in use elsewhere. Never blocks.
trait Pulse: Send + 'static {
    /// Whether every reactor has iterated since the last call.
    fn alive(&mut self) -> bool;
    /// The error of a target that has failed.
    fn failed(&self) -> Option<String>;
    /// Pending listeners, devices and directories.
    fn pending(&self) -> Vec<String> {
        Vec::new()
    }
    /// Why it serves nothing, as a gateway of a group.
    fn idle(&self) -> Option<String> {
        None
    }
    /// Disconnects every host, also while the target is in use elsewhere. May block until then.
    fn part(&self, deadline: Instant);
}

impl Serve for RunningTarget {
    type Pulse = crate::Liveness;

    fn pulse(&self) -> crate::Liveness {
        RunningTarget::pulse(self)
    }

    fn apply(&mut self, config: Config) -> Result<AppliedChange, String> {
        RunningTarget::apply(self, config).map_err(|fatal| fatal.to_string())
    }

    fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, NotServed> {
        RunningTarget::change(self, config, persist)
    }

    fn shared(&self) -> Option<SharedConfigClient> {
        RunningTarget::shared(self)
    }

    fn leave(&self, until: Instant) {
        RunningTarget::leave(self, until);
    }

    fn stop(self, deadline: Instant) {
        RunningTarget::stop(self, deadline);
    }
}

impl Pulse for crate::Liveness {
    fn alive(&mut self) -> bool {
        crate::Liveness::alive(self)
    }

    fn failed(&self) -> Option<String> {
        crate::Liveness::failed(self).map(|fatal| fatal.to_string())
    }

    fn pending(&self) -> Vec<String> {
        crate::Liveness::pending(self)
    }

    fn idle(&self) -> Option<String> {
        crate::Liveness::idle(self)
    }

    fn part(&self, deadline: Instant) {
        crate::Liveness::part(self, deadline);
    }
}

/// Starts the target and serves until a signal requests a stop.
///
/// # Errors
/// One sentence: why the target did not start, or failed.
pub fn run(declared: EffectiveConfig) -> Result<(), String> {
    block_on(async {
        let asks = signals::listen().map_err(|e| format!("signals cannot be received: {e}"))?;
        begin(declared, asks).await
    })
}

/// As [`run`], with `asks` instead of signals. Ends also when the channel closes.
///
/// # Errors
/// One sentence: why the target did not start, or failed.
pub fn run_for(declared: EffectiveConfig, asks: Receiver<ControlRequest>) -> Result<(), String> {
    block_on(async {
        let (sender, heard) = mpsc::channel(4);
        spawn_blocking(move || asks.iter().try_for_each(|ask| sender.blocking_send(ask)));
        begin(declared, heard).await
    })
}

fn block_on(work: impl Future<Output = Result<(), String>>) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| format!("the control thread cannot start: {error}"))?;
    let outcome = runtime.block_on(work);
    // A stop beyond its time limit must not keep the process running.
    runtime.shutdown_background();
    outcome
}

async fn begin(
    declared: EffectiveConfig,
    asks: mpsc::Receiver<ControlRequest>,
) -> Result<(), String> {
    let lock = declared.config().state_directory.as_deref().map(StateDirLock::take).transpose()?;
    // A daemon that was just stopping may still have written after the first reading.
    let declared = declared.reread().map_err(|errors| errors.to_string())?;
    change::log_unsaved(declared.changes());
    for warning in declared.warnings() {
        warn!("{warning}");
    }
    let manager = ServiceNotifier::systemd();
    manager.status("starting");
    let (target, declared, refusal) = shared::begin(declared).await?;
    let config = declared.config().clone();
    for line in target.summary().lines() {
        info!("{line}");
    }
    if let Some(sentence) = target.torn() {
        warn!("{sentence}");
    }
    // Changes that the file contains now are dropped.
    if let Err(sentence) = declared.keep() {
        warn!("{sentence}");
    }
    let watchdog = sd_notify::watchdog_enabled();
    let mut announcer = Announcer::default();
    announcer.update(&config);
    let (shown, seen) = watch::channel(Arc::new(RunningConfig::new(declared.clone())));
    let (orders, wanted) = mpsc::channel(change::MOST_ORDERS);
    let managed = ControlHandle::new(target.view(), seen, orders);
    let server = match Server::open(&config.management, &managed) {
        Ok(server) => server,
        Err(sentence) => {
            let deadline = Instant::now() + STOP_BUDGET;
            let _ = spawn_blocking(move || target.stop(deadline)).await;
            return Err(sentence);
        }
    };
    let served = RunningDaemon { target, config, declared, announcer, shown, refusal };
    let outcome = Control::new(manager, watchdog, wanted).serve(served, asks).await;
    drop(server);
    drop(lock);
    outcome
}

/// Logs every error of a configuration.
pub fn log_mistakes(errors: &ConfigErrors) {
    for line in errors.to_string().lines() {
        error!("{line}");
    }
}

/// A target and its configuration. Its owner may change it.
struct RunningDaemon<T> {
    target: T,
    config: Config,
    /// Sources of the configuration.
    declared: EffectiveConfig,
    announcer: Announcer,
    shown: watch::Sender<Arc<RunningConfig>>,
    /// The version of the shared configuration that could not be applied, if there is one.
    refusal: Option<shared::FailedVersion>,
}

impl<T: Serve> RunningDaemon<T> {
    /// Reloads the configuration and logs the result. May block.
    fn reload(mut self) -> Self {
        let renewed = self.renew(Requester::Unknown);
        self.note_reload(&renewed);
        match renewed {
            Ok((applied, _)) => {
                info!("reload done: {}", count(applied.log(), "change"));
            }
            Err(sentences) => {
                sentences.iter().for_each(|sentence| error!("{sentence}"));
                error!("reload refused: the running configuration is unchanged");
            }
        }
        self
    }

    /// One line for `systemctl status`.
    fn status(&self) -> String {
        status(&self.config) + of_refusal(self.is_refused())
    }

    /// Loads and applies the configuration. Returns what that has done, and the differences to report.
    fn renew(&mut self, by: Requester) -> Renewed {
        let next = (self.declared.reload())
            .map_err(|errors| errors.to_string().lines().map(String::from).collect::<Vec<_>>())?;
        change::log_unsaved(next.changes());
        for warning in next.warnings() {
            warn!("{warning}");
        }
        let token = next.config().management.token().map_err(|sentence| vec![sentence])?;
        let applied =
            self.target.apply(next.config().clone()).map_err(|sentence| vec![sentence])?;
        // Changes that the file contains now are dropped. On failure the next reload does so.
        if let Err(sentence) = next.keep() {
            warn!("{sentence}");
        }
        let mut differences = differences(self.declared.config(), next.config());
        differences.extend(applied.others.iter().map(|line| format!("~ {line}")));
        self.adopt(next);
        self.shown.borrow().token.set(token);
        if !differences.is_empty() {
            self.note_in_history(by, vec!["reload".to_owned()], differences.clone());
        }
        Ok((applied, differences))
    }

    /// Appends what has taken effect to the history.
    fn note_in_history(&self, by: Requester, requested: Vec<String>, differences: Vec<String>) {
        let (at_unix_s, uid, by_token) = (now_unix_s(), by.uid(), by == Requester::Token);
        let entry = HistoryEntry { at_unix_s, uid, by_token, requested, differences };
        let directory = self.config.state_directory.as_deref();
        self.shown.borrow().history.note(directory, entry);
    }

    /// Sets the result of the last reload.
    fn note_reload(&self, renewed: &Renewed) {
        let errors = renewed.as_ref().err().map_or(&[][..], Vec::as_slice);
        self.shown.borrow().last_reload.set(errors);
    }

    /// The last reload was rejected: the files differ from the running configuration.
    fn is_refused(&self) -> bool {
        self.shown.borrow().last_reload.is_refused()
    }

    /// Sets the configuration in force, and publishes it.
    fn adopt(&mut self, next: EffectiveConfig) {
        let mut config = next.config().clone();
        let needs_restart = self.config.needs_restart(&config);
        config.keep_fixed(&self.config);
        self.config = config;
        self.declared = next;
        let (config, declared) = (self.config.clone(), self.declared.clone());
        let running = {
            let shown = self.shown.borrow();
            let (last_reload, token) = (shown.last_reload.clone(), shown.token.clone());
            let history = shown.history.clone();
            RunningConfig { config, declared, needs_restart, last_reload, history, token }
        };
        self.shown.send_replace(Arc::new(running));
        self.announcer.update(&self.config);
    }
}

/// What a reload has done, and the differences; or its errors.
type Renewed = Result<(AppliedChange, Vec<String>), Vec<String>>;

/// A change in progress. It continues when its client has disconnected.
type ChangeTask<T> = JoinHandle<RunningDaemon<T>>;

struct Control {
    manager: ServiceNotifier,
    watchdog: Option<Duration>,
    /// Requests of the management interface.
    orders: mpsc::Receiver<Order>,
    /// The last reload was rejected.
    refused: Cell<bool>,
    /// Time after which a change that has not ended is reported.
    slow: Duration,
    /// The sentence about one that has not ended by then, until it ends.
    unended: RefCell<Option<String>>,
}

impl Control {
    fn new(
        manager: ServiceNotifier,
        watchdog: Option<Duration>,
        orders: mpsc::Receiver<Order>,
    ) -> Control {
        let (refused, unended) = (Cell::new(false), RefCell::new(None));
        Control { manager, watchdog, orders, refused, slow: SLOW, unended }
    }

    async fn serve<T: Serve>(
        mut self,
        served: RunningDaemon<T>,
        mut asks: mpsc::Receiver<ControlRequest>,
    ) -> Result<(), String> {
        self.manager.ready(&status(&served.config));
        logging::serving();
        info!("serving {}", status(&served.config));
        let pulse = served.target.pulse();
        let mut orders = std::mem::replace(&mut self.orders, mpsc::channel(1).1);
        let served = tokio::select! {
            sentence = self.watch(pulse) => {
                self.manager.stopping(&sentence);
                return Err(sentence);
            }
            served = self.serve_requests(served, &mut asks, &mut orders) => served?,
        };
        // Pending requests fail: the daemon stops.
        drop(orders);
        if let Some(served) = served {
            self.stop(served, asks).await;
        }
        Ok(())
    }

    /// Notifies the watchdog while every reactor iterates. Ends when the target has failed; returns
    /// the reason.
    async fn watch(&self, mut pulse: impl Pulse) -> String {
        let period = self.watchdog.map(|limit| (limit / 2).max(Duration::from_millis(1)));
        let mut tick = interval(period.unwrap_or(Duration::from_secs(3600)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look = interval(LOOK);
        let (mut stuck, mut reported) = (false, (None, Vec::new()));
        loop {
            tokio::select! {
                _ = tick.tick(), if period.is_some() => {
                    let alive = pulse.alive();
                    if alive {
                        self.manager.watchdog();
                    } else if !stuck {
                        error!("a reactor stalled: no poll iteration since the last watchdog check");
                    }
                    stuck = !alive;
                }
                _ = look.tick() => {
                    if let Some(sentence) = pulse.failed() {
                        return sentence;
                    }
                    let unended = self.unended.borrow().clone();
                    let found = (unended.or_else(|| pulse.idle()), pulse.pending());
                    // A reload has reported another status meanwhile.
                    if found != reported || found.0.is_some() || !found.1.is_empty() {
                        let line = found.0.clone().unwrap_or_else(|| waiting(&found.1));
                        self.manager.status(&(line + of_refusal(self.refused.get())));
                        reported = found;
                    }
                }
            }
        }
    }

    /// Executes reloads and changes until a stop is requested. Returns the target to stop; `None`
    /// if a change still owns it after the time limit. All reloads requested during a change result
    /// in one reload after it.
    async fn serve_requests<T: Serve>(
        &self,
        mut served: RunningDaemon<T>,
        asks: &mut mpsc::Receiver<ControlRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Option<RunningDaemon<T>>, String> {
        let mut again = false;
        loop {
            let pulse = served.target.pulse();
            let (name, mut work) = match again {
                true => self.reload(served),
                false => tokio::select! {
                    ask = asks.recv() => match ask {
                        Some(ControlRequest::Reload) => self.reload(served),
                        Some(ControlRequest::Stop) | None => return Ok(Some(served)),
                    },
                    Some(order) = orders.recv() => self.execute(served, order),
                    () = served.falls_behind() => {
                        let name = "the shared configuration".to_owned();
                        (name, spawn_blocking(move || served.follow()))
                    }
                },
            };
            again = false;
            let mut slow = pin!(sleep(self.slow));
            let mut is_reported = false;
            served = loop {
                tokio::select! {
                    done = &mut work => break done.map_err(|_| panicked())?,
                    () = &mut slow, if !is_reported => {
                        is_reported = true;
                        self.report_slow(&name);
                    }
                    ask = asks.recv() => match ask {
                        Some(ControlRequest::Reload) => {
                            info!("a change is in progress: the reload follows");
                            again = true;
                        }
                        Some(ControlRequest::Stop) | None => return self.outwait(work, pulse, asks).await,
                    },
                }
            };
            self.unended.replace(None);
            self.refused.set(served.is_refused());
            self.manager.ready(&served.status());
        }
    }

    /// Begins a reload. Returns its name for the log, and the task.
    fn reload<T: Serve>(&self, served: RunningDaemon<T>) -> (String, ChangeTask<T>) {
        info!("reloading {}", served.declared.file().display());
        self.manager.reloading();
        ("the reload".to_owned(), spawn_blocking(move || served.reload()))
    }

    fn execute<T: Serve>(&self, served: RunningDaemon<T>, order: Order) -> (String, ChangeTask<T>) {
        if order.is_reload() {
            self.manager.reloading();
        }
        (order.name(), spawn_blocking(move || served.execute(order)))
    }

    /// Reports a change that does not end: a device, directory or reactor does not answer. Other
    /// sentences for the service manager, such as that about a pending device, are less urgent.
    fn report_slow(&self, name: &str) {
        let line = format!("{name} does not end, and all other changes wait for it");
        warn!("{line}: check the devices and directories that it opens, and the state directory");
        self.unended.replace(Some(line));
    }

    /// Handles a stop that was requested during a reload. Waits for the target that the reload owns, for a
    /// limited time, or until another stop is requested. Hosts are disconnected in any case.
    async fn outwait<T>(
        &self,
        reload: ChangeTask<T>,
        pulse: impl Pulse,
        asks: &mut mpsc::Receiver<ControlRequest>,
    ) -> Result<Option<RunningDaemon<T>>, String> {
        info!("shutting down: waiting up to {} s for the reload", RELOAD_GRACE.as_secs());
        self.manager.stopping("stopping after the reload");
        let ending = async {
            match timeout(RELOAD_GRACE, reload).await {
                Ok(Ok(served)) => return Ok(Some(served)),
                Ok(Err(_)) => return Err(panicked()),
                Err(_) => warn!("reload timed out: shutting down without it"),
            }
            let work = spawn_blocking(move || pulse.part(Instant::now() + STOP_BUDGET));
            let _ = timeout(STOP_BUDGET + STOP_GRACE, work).await;
            Ok(None)
        };
        tokio::select! {
            ended = ending => ended,
            () = once_more(asks) => Ok(None),
        }
    }

    /// Stops within the time limit, after hosts had time to use other paths. Another request skips
    /// that time.
    async fn stop<T: Serve>(
        self,
        served: RunningDaemon<T>,
        mut asks: mpsc::Receiver<ControlRequest>,
    ) {
        let RunningDaemon { target, config, .. } = served;
        let notice = Duration::from_millis(config.stop.inaccessible_ms.into());
        if notice.is_zero() {
            self.manager.stopping("stopping");
        } else {
            info!("draining: hosts have {} ms to switch to other paths", notice.as_millis());
            self.manager.leaving(notice + STOP_BUDGET + STOP_GRACE);
        }
        let work = spawn_blocking(move || {
            if !notice.is_zero() {
                target.leave(Instant::now() + notice);
            }
            info!("shutting down: waiting up to {} s for in-flight I/O", STOP_BUDGET.as_secs());
            target.stop(Instant::now() + STOP_BUDGET);
        });
        tokio::select! {
            done = timeout(notice + STOP_BUDGET + STOP_GRACE, work) => match done {
                Ok(Ok(())) => info!("stopped"),
                Ok(Err(_)) => error!("shutdown panicked (bug)"),
                Err(_) => warn!("shutdown timed out: exiting"),
            },
            () = once_more(&mut asks) => {}
        }
    }
}

/// Waits for another request to stop.
async fn once_more(asks: &mut mpsc::Receiver<ControlRequest>) {
    while asks.recv().await == Some(ControlRequest::Reload) {}
    warn!("second stop request: exiting");
}

fn panicked() -> String {
    "reload panicked (bug)".to_owned()
}

/// Suffix of the line for `systemctl status` after a rejected reload.
fn of_refusal(refused: bool) -> &'static str {
    if refused { "; the last reload was refused: see the log" } else { "" }
}

/// Suffix about pending listeners, devices and directories.
fn waiting(pending: &[String]) -> String {
    match pending {
        [] => "serving everything that is configured".to_owned(),
        [one] => format!("serving; waiting for {one}"),
        [first, rest @ ..] => format!("serving; waiting for {first}; and {} more", rest.len()),
    }
}

/// One line for `systemctl status`.
fn status(config: &Config) -> String {
    let namespaces: usize = config.subsystems.iter().map(|each| each.namespaces.len()).sum();
    let listeners: Vec<String> = config.addresses().iter().map(ToString::to_string).collect();
    format!(
        "{}, {} on {}",
        count(config.subsystems.len(), "subsystem"),
        count(namespaces, "namespace"),
        if listeners.is_empty() { "no address".to_owned() } else { listeners.join(", ") }
    )
}

#[cfg(test)]
mod tests;
