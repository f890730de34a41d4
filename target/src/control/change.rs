//! Changes through the management interface: atomic, and persisted before any host sees them.

use std::fmt;

use tokio::sync::oneshot;
use tracing::{error, info, warn};

use super::handle::ChangeError;
use super::history::now_unix_s;
use super::{RunningDaemon, Serve};
use crate::api::{Changes, Outcome, SetAside, Wanted};
use crate::error::NotServed;
use crate::overlay::EffectiveConfig;
use crate::overlay::diff::differences;

/// The most requests in the queue.
pub(super) const MOST_ORDERS: usize = 16;

/// Result of a request.
pub(crate) type ChangeResult = Result<Outcome, ChangeError>;

/// A request to the change worker.
#[derive(Debug)]
pub(crate) enum ConfigRequest {
    /// Changes.
    Change(ChangeRequest),
    /// The configuration file has changed.
    Reload {
        /// Who requests it.
        by: Requester,
        /// As in [`ChangeRequest`].
        if_match: Option<Vec<String>>,
    },
    /// Drop rejected changes.
    Forget,
}

/// Requested changes.
#[derive(Debug)]
pub(crate) struct ChangeRequest {
    /// The changes.
    pub(crate) wanted: Wanted,
    /// Who requests them.
    pub(crate) by: Requester,
    /// Digests of configurations, of which one has to be in force; `None`: whichever is.
    pub(crate) if_match: Option<Vec<String>>,
}

/// A request, and the channel for its result.
#[derive(Debug)]
pub(crate) struct Order {
    pub(super) work: ConfigRequest,
    pub(super) answer: oneshot::Sender<ChangeResult>,
}

impl Order {
    pub(super) fn is_reload(&self) -> bool {
        matches!(self.work, ConfigRequest::Reload { .. })
    }

    /// What is requested, and by whom, for the log.
    pub(super) fn name(&self) -> String {
        match &self.work {
            ConfigRequest::Change(ChangeRequest { wanted, by, .. }) => {
                let first = wanted.changes.first().map_or_else(String::new, ToString::to_string);
                let more = wanted.changes.len().saturating_sub(1);
                let more = if more > 0 { format!(" and {more} more") } else { String::new() };
                format!("the change by {by} ({first}{more})")
            }
            ConfigRequest::Reload { by, .. } => format!("the reload by {by}"),
            ConfigRequest::Forget => "the removal of changes that were set aside".to_owned(),
        }
    }
}

/// Logs unsaved and skipped changes.
pub(super) fn log_unsaved(changes: &Changes) {
    if !changes.kept.is_empty() {
        info!("unsaved changes in force: {}", changes.kept.len());
    }
    for SetAside { kept, why } in &changes.set_aside {
        warn!("skipped a saved change that no longer applies ({}): {why}", kept.change);
    }
}

/// Who has requested a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Requester {
    /// It is not known: a signal, for example.
    #[default]
    Unknown,
    /// The user with this ID.
    User(u32),
    /// Who has the token of `http_token_file`.
    Token,
}

impl Requester {
    /// The ID of the user, if it is known.
    pub(super) fn uid(self) -> Option<u32> {
        match self {
            Requester::User(uid) => Some(uid),
            Requester::Unknown | Requester::Token => None,
        }
    }
}

impl fmt::Display for Requester {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Requester::Unknown => f.write_str("an unknown user"),
            Requester::User(uid) => write!(f, "user {uid}"),
            Requester::Token => f.write_str("the token of `http_token_file`"),
        }
    }
}

impl<T: Serve> RunningDaemon<T> {
    /// Executes a request, unless its client has left: it may have waited for hours, and nobody would
    /// expect it any more. May block.
    pub(super) fn execute(mut self, order: Order) -> Self {
        if order.answer.is_closed() {
            warn!("{} is dropped: its client has left before it began", order.name());
            return self;
        }
        let done = match order.work {
            ConfigRequest::Change(request) => self.change(&request),
            ConfigRequest::Reload { by, if_match } => {
                self.check_match(if_match.as_deref()).and_then(|()| self.reload_and_log(by))
            }
            ConfigRequest::Forget => self.forget(),
        };
        // The client may have disconnected.
        let _ = order.answer.send(done);
        self
    }

    fn change(&mut self, request: &ChangeRequest) -> ChangeResult {
        let ChangeRequest { wanted, by, if_match } = request;
        self.check_match(if_match.as_deref())?;
        let next = self.declared.with(&wanted.changes, (now_unix_s(), by.uid()));
        let next = next.map_err(ChangeError::Misfit)?;
        let outcome = self.outcome(&next);
        self.check_base(&wanted.changes)?;
        if wanted.dry_run {
            return Ok(outcome);
        }
        if let Some(text) = self.declared.next_shared(&next).or_else(|| self.rewritten(wanted)) {
            return self.share(text, request, outcome);
        }
        let prepared = next.prepare().map_err(ChangeError::Unkept)?;
        let persist = || prepared.persist(&self.declared);
        let applied = self.target.change(next.config().clone(), persist)?;
        wanted.changes.iter().for_each(|change| info!("configuration changed by {by}: {change}"));
        applied.log();
        self.adopt(next);
        if !outcome.differences.is_empty() {
            let requested = wanted.changes.iter().map(ToString::to_string).collect();
            self.note_in_history(*by, requested, outcome.differences.clone());
        }
        Ok(outcome)
    }

    /// Checks that one of these digests, if there are any, is that of the configuration in force.
    fn check_match(&self, digests: Option<&[String]>) -> Result<(), ChangeError> {
        let current = self.declared.digest();
        match digests.is_none_or(|digests| digests.contains(&current)) {
            true => Ok(()),
            false => Err(ChangeError::Stale),
        }
    }

    fn reload_and_log(&mut self, by: Requester) -> ChangeResult {
        let renewed = self.renew(by);
        self.note_reload(&renewed);
        match renewed {
            Ok((applied, differences)) => {
                applied.log();
                Ok(Outcome {
                    differences,
                    needs_restart: self.shown.borrow().needs_restart.iter().map(text).collect(),
                    kept: true,
                })
            }
            Err(sentences) => {
                sentences.iter().for_each(|sentence| error!("{sentence}"));
                error!("reload refused: the running configuration is unchanged");
                Err(ChangeError::Unservable(sentences.join("; ")))
            }
        }
    }

    fn forget(&mut self) -> ChangeResult {
        let next = self.declared.without_set_aside();
        let line = |it: &SetAside| format!("- {} (was not in force)", it.kept.change);
        let lines = self.declared.changes().set_aside.iter().map(line).collect();
        next.keep().map_err(ChangeError::Unkept)?;
        self.adopt(next);
        Ok(Outcome::immediate(lines))
    }

    fn outcome(&self, next: &EffectiveConfig) -> Outcome {
        Outcome {
            differences: differences(&self.config, next.config()),
            needs_restart: self.config.needs_restart(next.config()).iter().map(text).collect(),
            kept: next.keeps(),
        }
    }
}

impl From<NotServed> for ChangeError {
    fn from(not_served: NotServed) -> ChangeError {
        match not_served {
            NotServed::Unservable(fatal) => ChangeError::Unservable(fatal.to_string()),
            NotServed::Unkept(sentence) => ChangeError::Unkept(sentence),
        }
    }
}

fn text(word: &&str) -> String {
    (*word).to_owned()
}
