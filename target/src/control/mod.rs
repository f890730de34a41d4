//! The control plane: one tokio thread that starts the target, listens to signals, and reports to
//! the service manager. Nothing of it is on the way of an I/O.
//!
//! Calls into the target may wait for reactors or for disks, so each runs on tokio's blocking
//! threads; the exceptions are [`Serve::alive`] and [`Serve::failed`], which only look.

pub(crate) mod check;
pub(crate) mod log;
mod manager;
mod signals;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nvmfd::Target;
use nvmfd::config::{Config, ConfigErrors};
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tracing::{error, info, warn};

use manager::Manager;

/// What hosts have in flight may take this long after a stop was asked for.
const STOP_BUDGET: Duration = Duration::from_secs(5);

/// And this is added before the process goes without it.
const STOP_GRACE: Duration = Duration::from_millis(500);

/// How often to look whether the target has died.
const LOOK: Duration = Duration::from_secs(1);

/// What somebody wants from the daemon.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Ask {
    /// Finish and go.
    Stop,
    /// Read the configuration again.
    Reload,
}

/// What the control plane needs of a target; there is only one, except in tests.
trait Serve: Sized + Send + 'static {
    fn apply(&mut self, config: Config) -> Result<Vec<String>, String>;
    /// Has every reactor turned since the last call?
    fn alive(&mut self) -> bool;
    /// Why the target has died, once it has.
    fn failed(&self) -> Option<String>;
    fn stop(self, deadline: Instant);
}

impl Serve for Target {
    fn apply(&mut self, config: Config) -> Result<Vec<String>, String> {
        Target::apply(self, config).map_err(|fatal| fatal.to_string())
    }

    fn alive(&mut self) -> bool {
        Target::alive(self)
    }

    fn failed(&self) -> Option<String> {
        Target::failed(self).map(|fatal| fatal.to_string())
    }

    fn stop(self, deadline: Instant) {
        Target::stop(self, deadline);
    }
}

/// Starts the target and serves until a signal says stop.
///
/// # Errors
/// One sentence: why the target did not start, or died.
pub(crate) async fn run(file: PathBuf, config: Config) -> Result<(), String> {
    let asks = signals::listen().map_err(|error| format!("signals cannot be heard: {error}"))?;
    for warning in config.warnings() {
        warn!("{warning}");
    }
    let manager = Manager::systemd();
    manager.status("starting");
    let first = config.clone();
    let target = spawn_blocking(move || Target::start(first)).await;
    let target = target.map_err(|_| "the start has panicked; this is a bug".to_owned())?;
    let target = target.map_err(|fatal| fatal.to_string())?;
    for line in target.summary().lines() {
        info!("{line}");
    }
    let watchdog = sd_notify::watchdog_enabled();
    Control { file, config, target, manager, watchdog }.serve(asks).await
}

/// Logs every mistake of a configuration.
pub(crate) fn log_mistakes(errors: &ConfigErrors) {
    for line in errors.to_string().lines() {
        error!("{line}");
    }
}

struct Control<T> {
    file: PathBuf,
    config: Config,
    target: T,
    manager: Manager,
    watchdog: Option<Duration>,
}

impl<T: Serve> Control<T> {
    async fn serve(mut self, mut asks: mpsc::Receiver<Ask>) -> Result<(), String> {
        let period = self.watchdog.map(|limit| (limit / 2).max(Duration::from_millis(1)));
        let mut tick = interval(period.unwrap_or(Duration::from_secs(3600)));
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        self.manager.ready(&status(&self.config));
        info!("serving {}", status(&self.config));
        let mut look = interval(LOOK);
        let mut stuck = false;
        loop {
            tokio::select! {
                ask = asks.recv() => match ask {
                    Some(Ask::Reload) => self = self.reload().await?,
                    Some(Ask::Stop) | None => break,
                },
                _ = tick.tick(), if period.is_some() => {
                    let alive = self.target.alive();
                    if alive {
                        self.manager.watchdog();
                    } else if !stuck {
                        error!("a reactor has not turned since the last look");
                    }
                    stuck = !alive;
                }
                _ = look.tick() => if let Some(sentence) = self.target.failed() {
                    self.manager.stopping(&sentence);
                    return Err(sentence);
                },
            }
        }
        self.stop(asks).await;
        Ok(())
    }

    /// Reads the configuration again. A text with mistakes changes nothing.
    async fn reload(mut self) -> Result<Self, String> {
        info!("reading {} again", self.file.display());
        self.manager.reloading();
        let file = self.file.clone();
        let work = spawn_blocking(move || {
            let outcome = renew(&mut self.target, &self.config, &file);
            (self, outcome)
        });
        let (mut this, outcome) =
            work.await.map_err(|_| "the reload has panicked; this is a bug".to_owned())?;
        match outcome {
            Ok((config, changes)) => {
                changes.iter().for_each(|change| info!("{change}"));
                info!("reload done: {} changes", changes.len());
                this.config = config;
            }
            Err(sentences) => {
                sentences.iter().for_each(|sentence| error!("{sentence}"));
                error!("reload refused: everything stays as it was");
            }
        }
        this.manager.ready(&status(&this.config));
        Ok(this)
    }

    /// Stops within the budget. Whoever asks once more does not have to wait for that.
    async fn stop(self, mut asks: mpsc::Receiver<Ask>) {
        info!("stopping: what is in flight has {} s", STOP_BUDGET.as_secs());
        self.manager.stopping("stopping");
        let deadline = Instant::now() + STOP_BUDGET;
        let target = self.target;
        let work = spawn_blocking(move || target.stop(deadline));
        let again = async { while asks.recv().await == Some(Ask::Reload) {} };
        tokio::select! {
            done = timeout(STOP_BUDGET + STOP_GRACE, work) => match done {
                Ok(Ok(())) => info!("stopped"),
                Ok(Err(_)) => error!("the stop has panicked; this is a bug"),
                Err(_) => warn!("the stop takes too long: leaving now"),
            },
            () = again => warn!("asked to stop once more: leaving now"),
        }
    }
}

/// Loads and applies; what changed, or why nothing did.
fn renew<T: Serve>(
    target: &mut T,
    old: &Config,
    file: &Path,
) -> Result<(Config, Vec<String>), Vec<String>> {
    let mut next = Config::load(file)
        .map_err(|errors| errors.to_string().lines().map(String::from).collect::<Vec<_>>())?;
    for warning in next.warnings() {
        warn!("{warning}");
    }
    let changes = target.apply(next.clone()).map_err(|sentence| vec![sentence])?;
    next.keep_fixed(old);
    Ok((next, changes))
}

/// One line for `systemctl status`.
fn status(config: &Config) -> String {
    let namespaces: usize = config.subsystems.iter().map(|each| each.namespaces.len()).sum();
    let listeners: Vec<String> = config.listeners.iter().map(ToString::to_string).collect();
    let plural = |count, noun| format!("{count} {noun}{}", if count == 1 { "" } else { "s" });
    format!(
        "{}, {} on {}",
        plural(config.subsystems.len(), "subsystem"),
        plural(namespaces, "namespace"),
        listeners.join(", ")
    )
}

#[cfg(test)]
mod tests;
