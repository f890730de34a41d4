//! The shared configuration of a gateway group: taken before the target starts, applied when another
//! gateway has changed it, and changed by requests at this gateway.

use std::future::pending;
use std::time::{Duration, Instant};

use nvmfd_gateway::record::Applied;
use tokio::task::spawn_blocking;
use tokio::time::sleep;
use tracing::{error, info, warn};

use super::change::{ChangeRequest, ChangeResult, Requester};
use super::handle::ChangeError;
use super::history::now_unix_s;
use super::{RunningDaemon, Serve};
use crate::RunningTarget;
use crate::api::{Change, Outcome, Wanted};
use crate::daemon::AppliedChange;
use crate::error::NotServed;
use crate::overlay::EffectiveConfig;
use crate::overlay::diff::differences;
use crate::state::shared_config::{BaseVersion, SharedConfig, SharedReadError, SharedWriteError};
use crate::worker::gateway::shared::{SharedConfigClient, read_before_start};

/// Interval between looks at the version of the group.
const LOOK: Duration = Duration::from_millis(250);
/// Time until a version that could not be applied is tried again.
const RETRY: Duration = Duration::from_secs(10);

/// A version that could not be applied here.
#[derive(Clone, Debug)]
pub(super) struct FailedVersion {
    version: u64,
    why: String,
    /// When it is tried again.
    retry_at: Instant,
}

impl FailedVersion {
    fn new(version: u64, why: String) -> FailedVersion {
        FailedVersion { version, why, retry_at: Instant::now() + RETRY }
    }
}

/// What a daemon starts with.
struct Beginning {
    declared: EffectiveConfig,
    /// The last version that was in force, if `declared` has a newer one.
    last: Option<EffectiveConfig>,
    refusal: Option<FailedVersion>,
}

/// Starts a target with the newest version of the shared configuration, or with the last that it had
/// if the newest cannot be served. May block.
///
/// # Errors
/// One sentence.
fn start(
    declared: EffectiveConfig,
) -> Result<(RunningTarget, EffectiveConfig, Option<FailedVersion>), String> {
    let Beginning { declared, last, mut refusal } = beginning(declared)?;
    let started = RunningTarget::start(declared.config().clone());
    let (target, declared) = match (started, last) {
        (Ok(target), _) => (target, declared),
        (Err(fatal), Some(last)) => {
            let version = declared.shared().map_or(0, |shared| shared.version.number);
            error!("version {version} of the shared configuration cannot be served: {fatal}");
            refusal = Some(FailedVersion::new(version, fatal.to_string()));
            let target = RunningTarget::start(last.config().clone());
            (target.map_err(|fatal| fatal.to_string())?, last)
        }
        (Err(fatal), None) => return Err(fatal.to_string()),
    };
    keep_copy(&declared);
    if let Some(store) = target.shared() {
        note(&store, &declared, refusal.as_ref());
    }
    Ok((target, declared, refusal))
}

fn beginning(declared: EffectiveConfig) -> Result<Beginning, String> {
    let Some(last) = declared.shared().map(|shared| shared.version.number) else {
        return Ok(Beginning { declared, last: None, refusal: None });
    };
    let without = |why: String| match last {
        0 => Err(format!("{why}; this gateway has no copy of the shared configuration")),
        last => {
            warn!("{why}; version {last} of the shared configuration is in force");
            Ok(why)
        }
    };
    let newest = match read_before_start(declared.config()) {
        Ok(Some(newest)) if newest.version.number >= last => newest,
        Ok(found) => {
            let refusal = lost(&found, last);
            return Ok(Beginning { declared, last: None, refusal });
        }
        Err(error @ SharedReadError::Unreachable(_)) => {
            without(error.to_string())?;
            return Ok(Beginning { declared, last: None, refusal: None });
        }
        Err(error @ SharedReadError::Damaged(_)) => {
            let refusal = Some(FailedVersion::new(last + 1, without(error.to_string())?));
            return Ok(Beginning { declared, last: None, refusal });
        }
    };
    let version = newest.version.number;
    match declared.with_shared(newest) {
        Ok(next) => {
            info!("version {version} of the shared configuration");
            let last = (last > 0 && last < version).then_some(declared);
            Ok(Beginning { declared: next, last, refusal: None })
        }
        Err(mistakes) => {
            let why = without(format!("version {version} is no configuration: {mistakes}"))?;
            let refusal = Some(FailedVersion::new(version, why));
            Ok(Beginning { declared, last: None, refusal })
        }
    }
}

/// The object of the group has an older version than this gateway, or none.
fn lost(found: &Option<SharedConfig>, last: u64) -> Option<FailedVersion> {
    let has = found.as_ref().map_or(0, |found| found.version.number);
    (has < last).then(|| {
        let why = format!(
            "the group has version {has} of the shared configuration, and {last} is in force here: \
             its object was lost or restored; the next change on this gateway writes it again"
        );
        error!("{why}");
        FailedVersion::new(last, why)
    })
}

fn keep_copy(declared: &EffectiveConfig) {
    let Some(shared) = declared.shared().filter(|shared| shared.version.number > 0) else { return };
    let kept = declared.prepare_copy(shared).and_then(|copy| copy.persist());
    if let Err(sentence) = kept {
        warn!("{sentence}");
    }
}

fn note(store: &SharedConfigClient, declared: &EffectiveConfig, refusal: Option<&FailedVersion>) {
    let Some(shared) = declared.shared() else { return };
    let refused = refusal.map(|refusal| (refusal.version, refusal.why.clone()));
    store.note(Applied { version: shared.version.number, refused });
}

impl<T: Serve> RunningDaemon<T> {
    fn version(&self) -> Option<u64> {
        self.declared.shared().map(|shared| shared.version.number)
    }

    fn is_behind(&self) -> bool {
        let (Some(own), Some(store)) = (self.version(), self.target.shared()) else { return false };
        let newest = store.newest();
        let is_refused = self
            .refusal
            .as_ref()
            .is_some_and(|refusal| refusal.version >= newest && Instant::now() < refusal.retry_at);
        newest > own && !is_refused
    }

    /// Waits until the group has a newer version, which is to be applied: for ever, and without a
    /// timer, where there is no shared configuration.
    pub(super) async fn falls_behind(&self) {
        if self.version().is_none() {
            return pending().await;
        }
        loop {
            sleep(LOOK).await;
            if self.is_behind() {
                return;
            }
        }
    }

    /// Applies the newest version of the group. May block.
    pub(super) fn follow(mut self) -> Self {
        let Some(store) = self.target.shared() else { return self };
        let newest = match store.read() {
            Ok(Some(newest)) if Some(newest.version.number) > self.version() => newest,
            Ok(_) => return self,
            // The heartbeats fail as well, and it is read again.
            Err(SharedReadError::Unreachable(_)) => return self,
            Err(damaged @ SharedReadError::Damaged(_)) => {
                self.refuse(&store, store.newest(), damaged.to_string());
                return self;
            }
        };
        let (version, by) = (newest.version.number, newest.version.gateway.clone());
        match self.take(newest) {
            Ok(applied) => {
                info!("version {version} of the shared configuration, applied on gateway {by}");
                applied.log();
                self.refusal = None;
                note(&store, &self.declared, None);
            }
            Err(why) => self.refuse(&store, version, why),
        }
        self
    }

    fn take(&mut self, newest: SharedConfig) -> Result<AppliedChange, String> {
        let (number, by) = (newest.version.number, newest.version.gateway.clone());
        let copy = self.declared.prepare_copy(&newest)?;
        let next = self.declared.with_shared(newest).map_err(|mistakes| mistakes.to_string())?;
        let changed = self.target.change(next.config().clone(), || copy.persist());
        let applied = changed.map_err(|not_served| not_served.to_string())?;
        let differences = differences(self.declared.config(), next.config());
        self.adopt(next);
        let requested = vec![format!("shared configuration {number} of gateway {by}")];
        self.note_in_history(Requester::Unknown, requested, differences);
        Ok(applied)
    }

    fn refuse(&mut self, store: &SharedConfigClient, version: u64, why: String) {
        let is_known = |old: &FailedVersion| old.version == version && old.why == why;
        if !self.refusal.as_ref().is_some_and(is_known) {
            error!("version {version} of the shared configuration is not in force here: {why}");
        }
        self.refusal = Some(FailedVersion::new(version, why));
        note(store, &self.declared, self.refusal.as_ref());
    }

    /// Refuses changes of another version of the shared configuration than is in force.
    pub(super) fn check_base(&self, changes: &[Change]) -> Result<(), ChangeError> {
        let own = self.version();
        let base = |change: &Change| match change {
            Change::ReplaceShared { base, .. } => *base,
            _ => None,
        };
        match changes.iter().filter_map(base).find(|base| own.is_some_and(|own| own != *base)) {
            Some(base) => Err(ChangeError::Outrun(format!(
                "version {} of the shared configuration is in force, and not {base}",
                own.unwrap_or_default()
            ))),
            None => Ok(()),
        }
    }

    /// The version that a change replaces, and its number. A whole text also replaces one that could
    /// not be applied here; an edit is one of the text that is in force.
    fn base(&self, changes: &[Change]) -> (BaseVersion, u64) {
        let own = self.declared.shared().cloned().unwrap_or_else(SharedConfig::none).version;
        let refused = self.refusal.as_ref().map(|refusal| refusal.version);
        let is_whole = changes.iter().any(|change| matches!(change, Change::ReplaceShared { .. }));
        match refused.filter(|refused| is_whole && *refused > own.number) {
            Some(refused) => (BaseVersion::Refused(refused), refused),
            None => (BaseVersion::InForce(own.clone()), own.number),
        }
    }

    /// The text of a request that writes the same again, because the group has it no more, or
    /// damaged.
    pub(super) fn rewritten(&self, wanted: &Wanted) -> Option<String> {
        self.refusal.as_ref()?;
        wanted.changes.iter().find_map(|change| match change {
            Change::ReplaceShared { text, .. } => Some(text.clone()),
            _ => None,
        })
    }

    /// Applies a version of the shared configuration that this gateway makes.
    pub(super) fn share(
        &mut self,
        text: String,
        request: &ChangeRequest,
        outcome: Outcome,
    ) -> ChangeResult {
        let no_group =
            || ChangeError::Unservable("this daemon is no gateway of a group".to_owned());
        let store = self.target.shared().ok_or_else(no_group)?;
        let gateway = self.config.group.as_ref().map(|group| group.gateway.as_str());
        let (base, last) = self.base(&request.wanted.changes);
        let shared = SharedConfig::after(last, text, gateway.unwrap_or("-"), now_unix_s());
        let number = shared.version.number;
        let copy = self.declared.prepare_copy(&shared).map_err(ChangeError::Unkept)?;
        let next = self.declared.with_shared(shared.clone()).map_err(ChangeError::Misfit)?;
        let mut refusal = None;
        let persist = || {
            store.write(&base, &shared).map_err(|error| {
                let sentence = error.to_string();
                refusal = Some(match error {
                    SharedWriteError::Newer(_) => ChangeError::Outrun(sentence.clone()),
                    _ => ChangeError::Unshared(sentence.clone()),
                });
                sentence
            })
        };
        let changed = self.target.change(next.config().clone(), persist);
        let applied = match (changed, refusal) {
            (Err(NotServed::Unkept(_)), Some(refusal)) => return Err(refusal),
            (changed, _) => changed?,
        };
        // The group has it: this gateway finds it there again if the copy is lost.
        if let Err(sentence) = copy.persist() {
            warn!("{sentence}");
        }
        info!("version {number} of the shared configuration, made by {}", request.by);
        applied.log();
        self.adopt(next);
        self.refusal = None;
        note(&store, &self.declared, None);
        let mut requested: Vec<String> = vec![format!("shared configuration {number}")];
        requested.extend(request.wanted.changes.iter().map(ToString::to_string));
        self.note_in_history(request.by, requested, outcome.differences.clone());
        Ok(Outcome { kept: true, ..outcome })
    }
}

/// As [`start`], on a thread that may block.
pub(super) async fn begin(
    declared: EffectiveConfig,
) -> Result<(RunningTarget, EffectiveConfig, Option<FailedVersion>), String> {
    let started = spawn_blocking(move || start(declared)).await;
    started.map_err(|_| "the start has panicked; this is a bug".to_owned())?
}
