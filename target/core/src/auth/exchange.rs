//! In-band authentication of one queue, the controller's side: a state machine without I/O.
//!
//! ```text
//!        Negotiate            received             Reply                 received
//! Idle ────────────► Challenge ───────► Challenged ──────► Verdict ──────────────────► Idle
//!   ▲                                                         │ with R2     Success2    ▲
//!   │                                                         └──────► Content ─────────┘
//!   └── anything wrong, or late: Failed ──► Over, and the queue closes
//! ```
//!
//! Between a message of the host and what follows from it lies a [`DhComputation`]: the arithmetic, which
//! takes milliseconds in the large groups and is done elsewhere. The command that brought the
//! message is answered when the job is done, so a host that asks in order never waits for nothing.
//!
//! A Negotiate on a queue that is authenticated begins a re-authentication; commands run on
//! meanwhile. When that fails they do not.
//!
//! Source: NVMe Base Specification 2.0, "DH-HMAC-CHAP Protocol".

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvme::auth::{
    Digest, Failure, GroupId, HashId, Kind, MESSAGE_MAX_BYTES, Negotiate, Notice, Reply, Success1,
};
use nvme::{Nqn, Status};

use super::compute::{DhComputation, DhResult, Round, Start};
use super::keys::Keys;

use crate::diag::cause::Cause;

/// Time for which a host may continue that has authenticated with a key that was replaced since:
/// time to set the new key on the host, which then re-authenticates. Otherwise a key rotation would
/// cost a host its connection, and a host whose old key is refused gives the path up.
pub const GRACE: Duration = Duration::from_secs(300);

/// How long an exchange may take, from Connect or from a later Negotiate to its end.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Time of a host to fetch the failure and to disconnect.
const FAREWELL: Duration = Duration::from_secs(2);

/// Exchanges that may be begun before one succeeds: each may cost us milliseconds.
const MOST_ATTEMPTS: u8 = 3;

/// State of the exchange of a queue.
#[derive(Debug)]
enum ExchangeState {
    /// No exchange is in progress; a Negotiate may arrive.
    Idle,
    /// A computation is in progress, or queued.
    Working { since: Instant },
    /// The challenge may be fetched.
    Challenge(Box<Round>),
    /// A Reply is due.
    Challenged(Box<Round>),
    /// The host has authenticated; Success1 may be fetched, with R2 if requested.
    Verdict { t_id: u16, digest_bytes: u8, response: Option<Digest> },
    /// Success2 is due.
    Content { t_id: u16 },
    /// Failure1 may be fetched.
    Failed { t_id: u16, why: Failure },
    /// The host has received the failure.
    Over { t_id: u16, why: Failure },
}

/// The authentication of one queue.
#[derive(Debug)]
pub struct Exchange {
    host: Nqn,
    subsystem: Nqn,
    stage: ExchangeState,
    authenticated: bool,
    /// An exchange has succeeded since the last query.
    succeeded: bool,
    /// The queue was admitted for that.
    admitted: bool,
    attempts: u8,
    deadline: Option<Instant>,
    /// A failure that was not recorded yet.
    news: Option<Failure>,
    /// The cause to record, if it is more specific than the failure sent to the host.
    cause: Option<Cause>,
    /// Further details to record.
    detail: Option<String>,
    /// Negotiated parameters of the last exchange.
    agreed: Option<(HashId, GroupId)>,
    /// The secrets that the last exchange is about.
    keys: Option<Arc<Keys>>,
    /// Which of its host's keys it has proved; none: one that was replaced meanwhile.
    proved: Option<u32>,
    /// End of the time in which the host must authenticate with a new key.
    key_until: Option<Instant>,
}

impl Exchange {
    /// For a queue that has just connected: only authentication commands are accepted on it.
    pub fn new(host: Nqn, subsystem: Nqn, now: Instant) -> Exchange {
        Exchange {
            host,
            subsystem,
            stage: ExchangeState::Idle,
            authenticated: false,
            succeeded: false,
            admitted: false,
            attempts: 0,
            deadline: Some(now + DEADLINE),
            news: None,
            cause: None,
            detail: None,
            agreed: None,
            keys: None,
            proved: None,
            key_until: None,
        }
    }

    /// Whether other commands may run.
    pub(crate) fn is_authenticated(&self) -> bool {
        self.authenticated
    }

    /// The queue was admitted after the authentication of its host.
    pub fn admit(&mut self) {
        self.admitted = true;
    }

    /// The queue is rejected despite authentication: it closes.
    pub fn reject(&mut self, now: Instant) {
        self.excuse();
        self.authenticated = false;
        self.stage = ExchangeState::Idle;
        self.deadline = Some(now);
    }

    /// Ends an unfinished exchange without counting a failure of the host.
    pub fn excuse(&mut self) {
        self.attempts = 0;
    }

    /// Whether it was ever admitted.
    pub(crate) fn was_admitted(&self) -> bool {
        self.admitted
    }

    /// The host, as it calls itself.
    pub fn host(&self) -> &Nqn {
        &self.host
    }

    /// Whether a computation is in progress.
    pub(crate) fn is_working(&self) -> bool {
        matches!(self.stage, ExchangeState::Working { .. })
    }

    /// Whether the queue must close: the host took too long, or the exchange has failed.
    pub(crate) fn is_overdue(&self, now: Instant) -> bool {
        !self.is_working() && self.deadline.is_some_and(|deadline| now >= deadline)
    }

    /// Whether an exchange has started that has neither succeeded nor failed: its computation may
    /// have been useless.
    pub(crate) fn is_unfinished(&self) -> bool {
        let is_reported =
            matches!(self.stage, ExchangeState::Failed { .. } | ExchangeState::Over { .. });
        self.attempts > 0 && !is_reported
    }

    /// Whether an exchange has succeeded since the last call, the first one or a later one.
    pub(crate) fn take_success(&mut self) -> bool {
        std::mem::take(&mut self.succeeded)
    }

    /// The secrets that the last exchange is about: they may have been replaced since.
    pub fn keys(&self) -> Option<&Arc<Keys>> {
        self.keys.as_ref()
    }

    /// The exchange that has succeeded was about the key with this number, or about none that is
    /// still valid.
    pub fn set_proved(&mut self, key: Option<u32>) {
        self.proved = key;
    }

    /// Whether the host has not authenticated with its key of this number in time.
    pub(crate) fn has_outlived_key(&mut self, key: u32, now: Instant) -> bool {
        if !self.authenticated || self.proved == Some(key) {
            self.key_until = None;
            return false;
        }
        now >= *self.key_until.get_or_insert(now + GRACE)
    }

    /// A failure since the last call, to be noted.
    pub(crate) fn take_failure(&mut self) -> Option<Failure> {
        self.news.take()
    }

    /// The recorded cause, if it is more specific than the failure.
    pub fn cause(&self) -> Option<Cause> {
        self.cause
    }

    /// Further details: names of what was offered and what is allowed.
    pub(crate) fn take_detail(&mut self) -> Option<String> {
        self.detail.take()
    }

    /// The hash and the group of the last exchange.
    pub fn agreed(&self) -> Option<(HashId, GroupId)> {
        self.agreed
    }

    /// Handles a message of the host, of exactly its length. `start` returns the inputs of a new
    /// exchange, or nothing if this host has no key (any more). The returned computation must be
    /// executed and its result passed to [`Exchange::on_worked`].
    pub fn on_message(
        &mut self,
        bytes: &[u8],
        start: impl FnOnce() -> Option<Start>,
        now: Instant,
    ) -> Option<DhComputation> {
        let result = match Kind::parse(bytes) {
            _ if matches!(
                self.stage,
                ExchangeState::Failed { .. } | ExchangeState::Over { .. }
            ) =>
            {
                return None;
            }
            // Before the response to the last one; the result of its computation is dropped.
            _ if self.is_working() => Err(Failure::INCORRECT_MESSAGE),
            Ok((Kind::Negotiate, _)) => self.on_negotiate(bytes, start, now),
            Ok((Kind::Reply, t_id)) => self.on_reply(bytes, t_id),
            Ok((Kind::Success2, t_id)) => self.on_success2(bytes, t_id),
            Ok((Kind::Failure2, _)) => Err(failure2(bytes)),
            Ok(_) => Err(Failure::INCORRECT_MESSAGE),
            Err(why) => Err(why),
        };
        match result {
            Ok(job) => {
                if job.is_some() {
                    self.stage = ExchangeState::Working { since: now };
                }
                job
            }
            Err(why) => {
                self.fail(t_id(bytes), why, now);
                None
            }
        }
    }

    /// A job has been done.
    pub fn on_worked(&mut self, worked: DhResult, now: Instant) {
        let ExchangeState::Working { since } = self.stage else { return };
        // The time was ours.
        let took = now.saturating_duration_since(since);
        self.deadline = self.deadline.map(|deadline| deadline + took);
        match worked {
            DhResult::Challenge(round) => self.stage = ExchangeState::Challenge(round),
            DhResult::Verdict { t_id, digest_bytes, response: Ok(response) } => {
                self.stage = ExchangeState::Verdict { t_id, digest_bytes, response };
            }
            DhResult::Verdict { t_id, response: Err(why), .. } => self.fail(t_id, why, now),
        }
    }

    /// The message that is due to the host, and its length. A request out of sequence is a failure.
    ///
    /// # Errors
    /// Invalid Field if the host requests fewer bytes than the message has; it can request again.
    pub(crate) fn fetch(
        &mut self,
        room_bytes: u32,
        to: &mut [u8; MESSAGE_MAX_BYTES],
        now: Instant,
    ) -> Result<usize, Status> {
        let due = matches!(
            self.stage,
            ExchangeState::Challenge(_)
                | ExchangeState::Verdict { .. }
                | ExchangeState::Failed { .. }
                | ExchangeState::Over { .. }
        );
        if !due {
            let t_id = match &self.stage {
                ExchangeState::Challenged(round) => round.t_id,
                ExchangeState::Content { t_id } => *t_id,
                _ => 0,
            };
            self.fail(t_id, Failure::INCORRECT_MESSAGE, now);
        }
        let written = match &self.stage {
            ExchangeState::Challenge(round) => round.challenge().emit(to),
            ExchangeState::Verdict { t_id, digest_bytes, response } => {
                let response = response.as_ref().map(Digest::as_bytes);
                Success1 { t_id: *t_id, digest_bytes: *digest_bytes, response }.emit(to)
            }
            ExchangeState::Failed { t_id, why } | ExchangeState::Over { t_id, why } => {
                Notice::Failure1(*why).emit(*t_id, to)
            }
            _ => None,
        };
        // No message is longer than the longest.
        let len = written.ok_or(Status::INTERNAL_ERROR)?;
        if (room_bytes as usize) < len {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        self.fetched();
        Ok(len)
    }

    /// The pending message was sent.
    fn fetched(&mut self) {
        self.stage = match std::mem::replace(&mut self.stage, ExchangeState::Idle) {
            ExchangeState::Challenge(round) => ExchangeState::Challenged(round),
            ExchangeState::Verdict { t_id, response: Some(_), .. } => {
                ExchangeState::Content { t_id }
            }
            ExchangeState::Verdict { response: None, .. } => {
                self.succeed();
                ExchangeState::Idle
            }
            ExchangeState::Failed { t_id, why } => ExchangeState::Over { t_id, why },
            other => other,
        };
    }

    fn on_negotiate(
        &mut self,
        bytes: &[u8],
        start: impl FnOnce() -> Option<Start>,
        now: Instant,
    ) -> Result<Option<DhComputation>, Failure> {
        let offer = Negotiate::parse(bytes)?;
        if offer.sc_c != 0 {
            return Err(Failure::CHANNEL_MISMATCH);
        }
        if self.attempts >= MOST_ATTEMPTS {
            self.cause = Some(Cause::BadAuthentication);
            return Err(Failure::FAILED);
        }
        self.attempts += 1;
        self.deadline.get_or_insert(now + DEADLINE);
        let Some(start) = start() else {
            self.cause = Some(Cause::NoKey);
            return Err(Failure::FAILED);
        };
        let policy = Arc::clone(&start.policy);
        self.keys = Some(Arc::clone(&start.keys));
        let round = Round::new(&offer, start, self.host, self.subsystem).inspect_err(|why| {
            self.detail = policy.lacks(&offer, *why);
        })?;
        self.agreed = Some(round.agreed());
        Ok(Some(DhComputation::Challenge(Box::new(round))))
    }

    fn on_reply(&mut self, bytes: &[u8], t_id: u16) -> Result<Option<DhComputation>, Failure> {
        let ExchangeState::Challenged(round) = &self.stage else {
            return Err(Failure::INCORRECT_MESSAGE);
        };
        if t_id != round.t_id {
            return Err(Failure::INCORRECT_PAYLOAD);
        }
        let reply = Reply::parse(bytes)?;
        if reply.challenge.is_some() && !round.has_controller_key() {
            self.cause = Some(Cause::NoControllerKey);
        }
        round.check(&reply)?;
        // Used once: a second Reply finds no challenge.
        match std::mem::replace(&mut self.stage, ExchangeState::Idle) {
            ExchangeState::Challenged(round) => Ok(Some(DhComputation::verify(round, &reply)?)),
            _ => Err(Failure::INCORRECT_MESSAGE),
        }
    }

    fn on_success2(&mut self, bytes: &[u8], t_id: u16) -> Result<Option<DhComputation>, Failure> {
        let ExchangeState::Content { t_id: due } = self.stage else {
            return Err(Failure::INCORRECT_MESSAGE);
        };
        if t_id != due || Notice::parse(bytes)? != Notice::Success2 {
            return Err(Failure::INCORRECT_PAYLOAD);
        }
        self.stage = ExchangeState::Idle;
        self.succeed();
        Ok(None)
    }

    fn succeed(&mut self) {
        self.authenticated = true;
        self.succeeded = true;
        self.attempts = 0;
        self.deadline = None;
    }

    fn fail(&mut self, t_id: u16, why: Failure, now: Instant) {
        self.authenticated = false;
        self.stage = ExchangeState::Failed { t_id, why };
        let closing = now + FAREWELL;
        self.deadline = Some(self.deadline.map_or(closing, |deadline| deadline.min(closing)));
        self.news = Some(why);
    }
}

/// What the host fails with.
fn failure2(bytes: &[u8]) -> Failure {
    match Notice::parse(bytes) {
        Ok(Notice::Failure2(why)) => why,
        _ => Failure::INCORRECT_PAYLOAD,
    }
}

/// The transaction identifier of a message, if it has one.
fn t_id(bytes: &[u8]) -> u16 {
    match bytes {
        [_, _, _, _, low, high, ..] => u16::from_le_bytes([*low, *high]),
        _ => 0,
    }
}

#[cfg(test)]
mod tests;
