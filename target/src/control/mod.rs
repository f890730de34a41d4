//! The control plane: one tokio thread that starts the target, handles signals, and reports to the
//! service manager. Nothing of it is on the way of an I/O.
//!
//! Calls into the target may wait for reactors or for disks, so each runs on tokio's blocking
//! threads, and takes the target along. What stays here is its [`Liveness`](crate::Liveness), which only
//! looks: so the watchdog is fed, a dead reactor noticed and a signal heard also while a reload
//! waits for a disk that does not answer.

mod change;
pub mod check;
mod handle;
mod http;
mod logging;
mod mdns;
mod signals;
mod systemd;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use crate::RunningTarget;
use crate::config::{Config, ConfigErrors};
use crate::error::NotServed;
use crate::overlay::EffectiveConfig;
use tokio::sync::{mpsc, watch};
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{error, info, warn};

use crate::state::lock::StateDirLock;
use change::Order;
use handle::{ControlHandle, RunningConfig};
use http::Server;
use mdns::Announcer;
use systemd::ServiceNotifier;

pub use check::check;
pub use logging::start as start_log;

/// What hosts have in flight may take this long after a stop was asked for.
const STOP_BUDGET: Duration = Duration::from_secs(5);

/// And this is added before the process goes without it.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// A reload that is under way may take this long after a stop was asked for. Only then does the
/// stop begin; both together stay below `TimeoutStopSec` of the unit file.
const RELOAD_GRACE: Duration = Duration::from_secs(5);

/// How often to look whether the target has died.
const LOOK: Duration = Duration::from_secs(1);

/// A request to the daemon by signal.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ControlRequest {
    /// Finish and go.
    Stop,
    /// Read the configuration again.
    Reload,
}

/// What the control plane needs of a target; there is only one, except in tests.
trait Serve: Sized + Send + 'static {
    type Pulse: Pulse;

    fn pulse(&self) -> Self::Pulse;
    fn apply(&mut self, config: Config) -> Result<Vec<String>, String>;
    /// `persist` comes when nothing else can fail any more, and before any host sees a change.
    fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<Vec<String>, NotServed>;
    /// Has hosts go elsewhere, until then.
    fn leave(&self, until: Instant);
    fn stop(self, deadline: Instant);
}

/// Tells whether a target lives, wherever that is. Never waits.
trait Pulse: Send + 'static {
    /// Has every reactor turned since the last call?
    fn alive(&mut self) -> bool;
    /// Why the target has died, once it has.
    fn failed(&self) -> Option<String>;
    /// What is configured and not there yet.
    fn pending(&self) -> Vec<String> {
        Vec::new()
    }
    /// Disconnects every host, also while somebody else has the target. May wait until then.
    fn part(&self, deadline: Instant);
}

impl Serve for RunningTarget {
    type Pulse = crate::Liveness;

    fn pulse(&self) -> crate::Liveness {
        RunningTarget::pulse(self)
    }

    fn apply(&mut self, config: Config) -> Result<Vec<String>, String> {
        RunningTarget::apply(self, config).map_err(|fatal| fatal.to_string())
    }

    fn change(
        &mut self,
        config: Config,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<Vec<String>, NotServed> {
        RunningTarget::change(self, config, persist)
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

    fn part(&self, deadline: Instant) {
        crate::Liveness::part(self, deadline);
    }
}

/// Starts the target and serves until a signal says stop.
///
/// # Errors
/// One sentence: why the target did not start, or died.
pub fn run(declared: EffectiveConfig) -> Result<(), String> {
    block_on(async {
        let asks = signals::listen().map_err(|e| format!("signals cannot be heard: {e}"))?;
        begin(declared, asks).await
    })
}

/// As [`run`], and what others do by signals, `asks` do. Ends also when nobody can ask any more.
///
/// # Errors
/// One sentence: why the target did not start, or died.
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
    // A stop that has overrun its time must not keep the process.
    runtime.shutdown_background();
    outcome
}

async fn begin(
    declared: EffectiveConfig,
    asks: mpsc::Receiver<ControlRequest>,
) -> Result<(), String> {
    let lock = declared.config().state_directory.as_deref().map(StateDirLock::take).transpose()?;
    // What one that has ended just now had still kept when this was read first.
    let declared = declared.reread().map_err(|errors| errors.to_string())?;
    let config = declared.config().clone();
    change::tell(declared.changes());
    for warning in declared.warnings() {
        warn!("{warning}");
    }
    let manager = ServiceNotifier::systemd();
    manager.status("starting");
    let first = config.clone();
    let target = spawn_blocking(move || RunningTarget::start(first)).await;
    let target = target.map_err(|_| "the start has panicked; this is a bug".to_owned())?;
    let target = target.map_err(|fatal| fatal.to_string())?;
    for line in target.summary().lines() {
        info!("{line}");
    }
    // What the file has by now needs no place besides.
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
    let served = RunningDaemon { target, config, declared, announcer, shown, refused: false };
    let outcome = Control::new(manager, watchdog, wanted).serve(served, asks).await;
    drop(server);
    drop(lock);
    outcome
}

/// Logs every mistake of a configuration.
pub fn log_mistakes(errors: &ConfigErrors) {
    for line in errors.to_string().lines() {
        error!("{line}");
    }
}

/// A target and what it serves: whoever has this may change it.
struct RunningDaemon<T> {
    target: T,
    config: Config,
    /// What the configuration comes from.
    declared: EffectiveConfig,
    announcer: Announcer,
    shown: watch::Sender<Arc<RunningConfig>>,
    /// The last reload was: what the file says is not what is served.
    refused: bool,
}

impl<T: Serve> RunningDaemon<T> {
    /// Reads the configuration again and logs what has come of it. Waits for disks.
    fn reload(mut self) -> Self {
        let renewed = self.renew();
        self.note_reload(renewed.is_err());
        match renewed {
            Ok(changes) => {
                changes.iter().for_each(|change| info!("{change}"));
                info!("reload done: {} changes", changes.len());
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
        status(&self.config) + of_refusal(self.refused)
    }

    /// Loads and applies; what changed, or why nothing did.
    fn renew(&mut self) -> Result<Vec<String>, Vec<String>> {
        let next = (self.declared.reload())
            .map_err(|errors| errors.to_string().lines().map(String::from).collect::<Vec<_>>())?;
        change::tell(next.changes());
        for warning in next.warnings() {
            warn!("{warning}");
        }
        let changes =
            self.target.apply(next.config().clone()).map_err(|sentence| vec![sentence])?;
        // What the file has by now needs no place besides. That can wait where it fails.
        if let Err(sentence) = next.keep() {
            warn!("{sentence}");
        }
        self.adopt(next);
        Ok(changes)
    }

    /// What has become of the last reload.
    fn note_reload(&mut self, refused: bool) {
        self.refused = refused;
        self.shown.borrow().reload_refused.store(refused, Ordering::Relaxed);
    }

    /// From now on that is what is served, and shown.
    fn adopt(&mut self, next: EffectiveConfig) {
        let mut config = next.config().clone();
        let needs_restart = self.config.needs_restart(&config);
        config.keep_fixed(&self.config);
        self.config = config;
        self.declared = next;
        let (config, declared) = (self.config.clone(), self.declared.clone());
        let reload_refused = Arc::clone(&self.shown.borrow().reload_refused);
        let running = RunningConfig { config, declared, needs_restart, reload_refused };
        self.shown.send_replace(Arc::new(running));
        self.announcer.update(&self.config);
    }
}

/// A change under way. It goes on also when nobody waits for it any more.
type ChangeTask<T> = JoinHandle<RunningDaemon<T>>;

struct Control {
    manager: ServiceNotifier,
    watchdog: Option<Duration>,
    /// What the management interface wants.
    orders: mpsc::Receiver<Order>,
    /// The last reload was.
    refused: Cell<bool>,
}

impl Control {
    fn new(
        manager: ServiceNotifier,
        watchdog: Option<Duration>,
        orders: mpsc::Receiver<Order>,
    ) -> Control {
        Control { manager, watchdog, orders, refused: Cell::new(false) }
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
            served = self.attend(served, &mut asks, &mut orders) => served?,
        };
        // Who waits for an answer hears that there will be none.
        drop(orders);
        if let Some(served) = served {
            self.stop(served, asks).await;
        }
        Ok(())
    }

    /// Feeds the watchdog while every reactor turns. Ends when the target has died, and says why.
    async fn watch(&self, mut pulse: impl Pulse) -> String {
        let period = self.watchdog.map(|limit| (limit / 2).max(Duration::from_millis(1)));
        let mut tick = interval(period.unwrap_or(Duration::from_secs(3600)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut look = interval(LOOK);
        let (mut stuck, mut told) = (false, Vec::new());
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
                    let pending = pulse.pending();
                    // A reload has told something else meanwhile.
                    if pending != told || !pending.is_empty() {
                        let line = waiting(&pending) + of_refusal(self.refused.get());
                        self.manager.status(&line);
                        told = pending;
                    }
                }
            }
        }
    }

    /// Reloads and changes as often as asked, until a stop is asked for. Returns what is to be
    /// stopped; nothing if there is no more waiting for the change that has it. However often a reload
    /// is asked for during a change, one follows: it reads what is there by then.
    async fn attend<T: Serve>(
        &self,
        mut served: RunningDaemon<T>,
        asks: &mut mpsc::Receiver<ControlRequest>,
        orders: &mut mpsc::Receiver<Order>,
    ) -> Result<Option<RunningDaemon<T>>, String> {
        let mut again = false;
        loop {
            let pulse = served.target.pulse();
            let mut work = match again {
                true => self.reload(served),
                false => tokio::select! {
                    ask = asks.recv() => match ask {
                        Some(ControlRequest::Reload) => self.reload(served),
                        Some(ControlRequest::Stop) | None => return Ok(Some(served)),
                    },
                    Some(order) = orders.recv() => self.carry_out(served, order),
                },
            };
            again = false;
            served = loop {
                tokio::select! {
                    done = &mut work => break done.map_err(|_| panicked())?,
                    ask = asks.recv() => match ask {
                        Some(ControlRequest::Reload) => {
                            info!("a change is in progress: the reload follows");
                            again = true;
                        }
                        Some(ControlRequest::Stop) | None => return self.outwait(work, pulse, asks).await,
                    },
                }
            };
            self.refused.set(served.refused);
            self.manager.ready(&served.status());
        }
    }

    fn reload<T: Serve>(&self, served: RunningDaemon<T>) -> ChangeTask<T> {
        info!("reloading {}", served.declared.file().display());
        self.manager.reloading();
        spawn_blocking(move || served.reload())
    }

    fn carry_out<T: Serve>(&self, served: RunningDaemon<T>, order: Order) -> ChangeTask<T> {
        if order.is_reload() {
            self.manager.reloading();
        }
        spawn_blocking(move || served.carry_out(order))
    }

    /// A stop was asked for during a reload. Waits for the target that the reload has, but not
    /// for long, and not if asked once more. Hosts are disconnected also without it.
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

    /// Stops within the budget, after hosts have had their time to go elsewhere. Whoever asks once
    /// more does not have to wait for that.
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

/// Waits until somebody who has asked to stop asks again.
async fn once_more(asks: &mut mpsc::Receiver<ControlRequest>) {
    while asks.recv().await == Some(ControlRequest::Reload) {}
    warn!("second stop request: exiting");
}

fn panicked() -> String {
    "reload panicked (bug)".to_owned()
}

/// What is added to a line for `systemctl status` while the last reload is one that was refused.
fn of_refusal(refused: bool) -> &'static str {
    if refused { "; the last reload was refused: see the log" } else { "" }
}

/// The same, of what is awaited.
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
    let plural = |count, noun| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    format!(
        "{}, {} on {}",
        plural(config.subsystems.len(), "subsystem"),
        plural(namespaces, "namespace"),
        if listeners.is_empty() { "no address".to_owned() } else { listeners.join(", ") }
    )
}

#[cfg(test)]
mod tests;
