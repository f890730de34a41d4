//! Oracles of the simulation: check completions against the commands of all hosts.

pub mod abort;
pub mod ana;
pub mod async_events;
pub mod blocks;
mod copy;
mod device_removal;
mod device_swap;
pub mod disconnect;
pub mod format;
mod ns_blocks;
pub mod ns_management;
pub mod reservation;
pub mod visibility;
pub mod write_protect;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use initiator::session::{EndReason, Lost, Response};
use nvme::Status;
use nvme::cm::RejectStatus;
use nvme::log::LogId;
use nvmfd::core::auth::exchange;

use super::auth_keys::Proofs;
use super::block_stamp;
use super::oracle::abort::Aborts;
use super::oracle::ana::{Paths, is_of_paths};
use super::oracle::async_events::ExpectedEvents;
use super::oracle::blocks::{Ending, Model, Moment, SECTOR_BYTES, Span, Value};
use super::oracle::disconnect::DisconnectOracle;
use super::oracle::format::Formats;
use super::oracle::ns_management::{NsManagementOracle, Outcome};
use super::oracle::reservation::Fencing;
use super::oracle::visibility::Scope;
use super::oracle::write_protect::WriteProtectOracle;
use super::scenario::Profile;
use super::trace::Trace;
use super::workload::command::{Kind, Mistake, Op, Question};
use super::workload::ns_command::NsCommand;

/// With Do Not Retry the status of a read of an unreadable block; without it, of a device error.
const UNREADABLE: Status = Status::UNRECOVERED_READ_ERROR;

/// Results of commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Counts {
    /// Completed with success.
    pub done: u64,
    /// Failed.
    pub refused: u64,
    /// Their association ended before a response.
    pub lost: u64,
    /// Associations that ended.
    pub ended: u64,
}

/// Phase of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Commands and faults.
    Work,
    /// No commands.
    Rest,
    /// Reservations are cleared.
    Clear,
    /// Everything is read once more.
    Sweep,
}

/// The oracle of a run; see the module.
#[derive(Debug)]
pub struct Oracle {
    /// The trace.
    pub trace: Arc<Trace>,
    /// Valid contents of blocks.
    pub model: Model,
    /// Reservations.
    pub fencing: Fencing,
    /// Aborts.
    pub aborts: Aborts,
    /// Write protection.
    pub write_protect: WriteProtectOracle,
    /// Formats.
    pub formats: Formats,
    /// Deleted queues.
    pub departures: DisconnectOracle,
    /// Phase of the run.
    pub stage: Stage,
    /// Commands sent in the phase of work.
    pub sent: u32,
    /// Commands to send in that phase.
    pub commands: u32,
    /// Until when the end of an association is expected, for each host.
    pub excused_until: Vec<Instant>,
    /// Expected events.
    pub news: ExpectedEvents,
    /// ANA states.
    pub paths: Paths,
    /// Visible namespaces.
    pub scope: Scope,
    /// Host-created namespaces.
    pub made: NsManagementOracle,
    spaces: usize,
    /// Hosts that are to reset their controllers.
    pub reset: Vec<bool>,
    /// Hosts that have disabled their controllers, which serve nothing more.
    pub disabled: Vec<bool>,
    /// Results of commands.
    pub counts: Counts,
    /// The first violation.
    pub failure: Option<String>,
    pub(super) next_id: u32,
    /// The last error of the device of each namespace: commands sent later may not fail.
    device_errors: Vec<Moment>,
    loses_devices: bool,
    /// Lost commands, and until when they may take effect.
    unfenced: VecDeque<(Instant, Op)>,
    fence_after: Duration,
    /// For how long the target waits for a host that has authenticated one queue to authenticate the
    /// next one: so long it may serve a lost connection, and have a format wait for its commands.
    proof_margin: Duration,
    /// Lost commands that change blocks, and until when the target may not know that they are lost.
    unordered: VecDeque<(Instant, Op)>,
    order_after: Duration,
    /// Power-fail write unit of the devices, in bytes.
    atom_bytes: u32,
    /// The next span of the sweep: namespace and block.
    pub(super) sweep: (usize, u32),
    pub(super) sweeping: usize,
}

impl Oracle {
    /// Before the first command.
    pub fn new(profile: &Profile, commands: u32, trace: &Arc<Trace>, now: Instant) -> Oracle {
        let sectors = (0..profile.shapes.len()).map(|space| profile.sectors(space));
        let blocks: Vec<u32> = sectors.collect();
        let disk = profile.disk;
        // The granted keep alive timeout, with its margin; then the device, several times.
        let granted = Duration::from_millis(profile.kato_ms.next_multiple_of(1000).into());
        Oracle {
            trace: Arc::clone(trace),
            model: Model::new(&blocks),
            fencing: Fencing::new(blocks.len(), profile.hosts, profile.orders, profile.persistent),
            aborts: Aborts::new(profile.aborts),
            write_protect: WriteProtectOracle::new(profile.shapes.len(), profile.protections),
            formats: Formats::new(profile),
            departures: DisconnectOracle::new(profile.departures),
            stage: Stage::Work,
            sent: 0,
            commands,
            excused_until: vec![now; profile.hosts],
            news: ExpectedEvents::new(profile.hosts),
            paths: Paths::new(profile),
            scope: Scope::new(profile.hosts, &blocks),
            made: NsManagementOracle::new(profile),
            spaces: blocks.len(),
            reset: vec![false; profile.hosts],
            disabled: vec![false; profile.hosts],
            counts: Counts::default(),
            failure: None,
            next_id: 0,
            device_errors: vec![0; blocks.len()],
            loses_devices: profile.loses_devices(),
            unfenced: VecDeque::new(),
            // At the latest one second after the keep alive timeout.
            unordered: VecDeque::new(),
            order_after: granted + Duration::from_millis(1500),
            atom_bytes: profile.atom_bytes,
            fence_after: granted
                + Duration::from_secs(3)
                + 4 * disk.stall
                + profile.longest_stall(),
            proof_margin: match profile.proofs {
                Proofs::None => Duration::ZERO,
                _ => exchange::DEADLINE,
            },
            sweep: (0, 0),
            sweeping: 0,
        }
    }

    /// Records the first violation.
    pub fn fail(&mut self, what: String) {
        self.failure.get_or_insert(what);
    }

    /// A fault was injected for a host, or for all.
    pub fn excuse(&mut self, host: Option<usize>, until: Instant) {
        for (index, excused) in self.excused_until.iter_mut().enumerate() {
            if host.is_none_or(|host| host == index) {
                *excused = until.max(*excused);
            }
        }
    }

    /// The device of a namespace has answered an error, or every operation fails.
    pub fn device_failed(&mut self, space: usize) {
        self.device_errors[space] = self.model.begin();
    }

    /// Whether the device of a command has answered an error since the command was sent.
    fn has_device_failed(&self, op: &Op) -> bool {
        self.device_errors.get(op.span.space).is_some_and(|last| *last > op.began)
    }

    /// Whether the end of an association of a host is expected.
    pub fn excuses(&self, host: usize, profile: &Profile, why: &EndReason, now: Instant) -> bool {
        let bad_luck = match why {
            // An earlier fault must neither admit nor exclude a host.
            EndReason::NotAuthenticated { .. } => {
                return profile.proofs == Proofs::AllBut(host);
            }
            // Interrupted exchanges count as failed, and a host with too many failures is
            // throttled.
            EndReason::ConnectRefused { status, .. }
                if status.is(Status::CONNECT_CONTROLLER_BUSY) =>
            {
                profile.proofs != Proofs::None
            }
            // Three messages of connection management in a row may be lost.
            EndReason::Unreachable { .. } | EndReason::SlowConnection { .. } => {
                profile.net.loss > 0
            }
            EndReason::Rejected { status: RejectStatus::NO_RESOURCES, .. } => profile.is_cramped(),
            // While it opens its queues, its oldest connection may be evicted.
            EndReason::Peer { queue: 0 } => profile.is_cramped(),
            _ => false,
        };
        bad_luck || now <= self.excused_until[host]
    }

    /// Ends commands that can have no further effect, and orders those that the target knows to be
    /// lost before all that begin from now on.
    pub fn fence(&mut self, now: Instant) {
        while self.unordered.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, op)) = self.unordered.pop_front()
        {
            let spans = op.changes().unwrap_or_default();
            spans.iter().for_each(|span| self.model.order(op.id, *span));
        }
        while self.unfenced.front().is_some_and(|(until, _)| *until <= now)
            && let Some((_, op)) = self.unfenced.pop_front()
        {
            if let Some(spans) = op.changes() {
                spans.iter().for_each(|span| self.model.fence(op.id, *span));
            }
            let now = self.model.begin();
            self.fencing.is_over(&op, now);
            self.write_protect.is_over(&op, now);
            if let Kind::Made(deed) = op.kind {
                self.made.is_over(op.id, deed, now);
            }
            self.formats.is_over(&op, now);
        }
    }

    /// The target has crashed, with `power` at a power failure.
    pub fn crash(&mut self, power: bool) {
        self.model.crash(power);
        let now = self.model.begin();
        self.fencing.crash(now);
        self.write_protect.crash(now);
        self.made.crash(now);
        self.formats.crash(now);
    }

    /// Time of the next call of [`Oracle::fence`].
    pub fn next_fence(&self) -> Option<Instant> {
        let first = [self.unfenced.front(), self.unordered.front()];
        first.into_iter().flatten().map(|(until, _)| *until).min()
    }

    /// Whether everything was read once more.
    pub fn is_swept(&self) -> bool {
        self.sweep.0 >= self.spaces && self.sweeping == 0
    }

    /// A command is sent, on this queue and with this id.
    pub fn leaves(&mut self, mut op: Op, queue: u16, cid: u16) -> Op {
        op.began = match (op.changes(), &op.kind) {
            (_, Kind::Copy { from, .. }) => self.model.copy(op.id, from, op.span),
            (Some(spans), _) => {
                let value = op.value().unwrap_or(Value::Zeros);
                let mut began = 0;
                for span in spans {
                    began = self.model.write(op.id, *span, value);
                }
                began
            }
            (None, Kind::Read | Kind::Compare(_)) => self.model.begin_read(),
            _ => self.model.begin(),
        };
        if self.stage == Stage::Work {
            self.sent += 1;
        }
        self.fencing.leaves(&op);
        self.write_protect.leaves(&op);
        if let Kind::Made(deed) = op.kind {
            self.made.leaves(op.id, deed, op.host, op.began);
        }
        self.formats.leaves(&op);
        let names = match op.kind {
            Kind::Abort(queue, cid) => Some((queue, cid)),
            _ => None,
        };
        self.aborts.leaves(op.id, (op.host, queue, cid), names);
        let deletes = matches!(op.kind, Kind::Leave | Kind::Disable);
        self.departures.leaves(op.id, (op.host, queue), deletes);
        op
    }

    /// A command was not sent after all.
    pub fn put_back(&mut self, op: &Op) {
        if self.stage == Stage::Sweep && op.kind == Kind::Read {
            self.sweeping -= 1;
            self.sweep = (op.span.space, op.span.lba);
        }
    }

    /// The association of a command ended before its response.
    pub fn lost(&mut self, op: Op, now: Instant) {
        self.counts.lost += 1;
        self.aborts.forget(op.host);
        self.paths.failed(&op);
        self.formats.lost(&op);
        self.departures.lost(op.id);
        if !op.reads().is_empty() {
            self.model.forget_read(op.began);
        }
        if self.stage == Stage::Sweep && op.kind == Kind::Read {
            // From the beginning of the command.
            self.sweeping -= 1;
            self.sweep = (0, 0);
        }
        if let Kind::Made(deed) = op.kind {
            self.made.lost(op.id, deed);
        }
        let order = matches!(op.kind, Kind::Order(_) | Kind::Protect(_) | Kind::Made(_));
        // Nobody may write what a format still erases; an unreadable block is not a device error.
        let disk = !matches!(op.kind, Kind::Format { .. } | Kind::Spoil);
        if op.changes().is_some() && disk {
            self.unordered.push_back((now + self.order_after, op.clone()));
        }
        if op.changes().is_some() || order {
            let formats = matches!(op.kind, Kind::Format { .. });
            let margin = if formats { self.proof_margin } else { Duration::ZERO };
            let until = now + self.fence_after + margin;
            let place = self.unfenced.partition_point(|(other, _)| *other <= until);
            self.unfenced.insert(place, (until, op));
        }
    }

    /// A command was answered. `data`: read or sent.
    pub fn answered(&mut self, op: Op, answer: Response, data: Option<&[u8]>) {
        let (host, status) = (op.host, answer.status);
        let success = status.is_success();
        if self.stage == Stage::Sweep && op.kind == Kind::Read {
            self.sweeping -= 1;
            if self.formats.excuses(&op, status) {
                // From the beginning of the command.
                self.sweep = (0, 0);
            }
        }
        match success {
            true => self.counts.done += 1,
            false => self.counts.refused += 1,
        }
        let unreadable = status.is(UNREADABLE) && status.dnr();
        if !op.reads().is_empty() && !success && !unreadable {
            self.model.forget_read(op.began);
        }
        match op.kind {
            Kind::Admin(Question::Paths) if !success => self.news.is_to_read(host, LogId::ANA),
            Kind::Admin(Question::Changed) if !success => {
                self.news.is_to_read(host, LogId::CHANGED_NAMESPACES);
            }
            _ if is_of_paths(status) => self.paths.failed(&op),
            _ => {}
        }
        if let Some(spans) = op.changes() {
            let ending = match (&op.kind, success) {
                (Kind::Write { fua } | Kind::Zeroes { fua, .. } | Kind::Copy { fua, .. }, true) => {
                    Ending::Done { fua: *fua }
                }
                // A host relies on it, also after a power failure.
                (Kind::Spoil, true) => Ending::Done { fua: true },
                _ => Ending::Doubtful,
            };
            match (&op.kind, success) {
                (Kind::Format { .. }, true) => self.erased(&op),
                _ => spans.iter().for_each(|span| self.model.wrote(op.id, *span, ending)),
            }
        }
        let verdict = match success {
            _ if let Kind::Made(deed) = op.kind => self.check_made(&op, deed, answer, data),
            true => self.check(&op, data.unwrap_or_default()),
            false if unreadable => self.model.unreadable(op.began, op.reads()).map_err(|v| v.0),
            false if self.is_excusable(host, &op, status) => Ok(()),
            false => Err(format!("it was refused: {status}")),
        };
        let verdict = verdict.and_then(|()| self.check_reservation(&op, status));
        let verdict = verdict.and_then(|()| self.check_protection(&op, status));
        let verdict = verdict.and_then(|()| self.paths.check(&op, status));
        let verdict = match self.formats.excuses(&op, status) {
            true => verdict,
            false => verdict.and_then(|()| self.scope.check(&op, status)),
        };
        let now = self.model.begin();
        let of_format = self.formats.answered(&op, status, now);
        let verdict = verdict.and(of_format);
        let leaves = op.kind == Kind::Leave;
        let verdict = verdict.and(self.departures.answered(op.id, leaves, status));
        let aborted = status.is(Status::ABORT_REQUESTED);
        let says = matches!(op.kind, Kind::Abort(..)).then_some(success && answer.result & 1 == 0);
        let verdict = verdict.and_then(|()| self.aborts.answered(op.id, aborted, says));
        if let Err(why) = verdict {
            self.fail(format!("host {host}: {op}: {why}"));
        }
    }

    /// Checks a response against reservations, and applies its consequences.
    fn check_reservation(&mut self, op: &Op, status: Status) -> Result<(), String> {
        let now = self.model.begin();
        if let Kind::Order(_) = op.kind {
            // A host that formats a namespace may not be excluded from it meanwhile: such a request
            // must fail.
            let held = status.is(Status::RESERVATION_CONFLICT) && self.formats.may_hold(op);
            let status = if held { Status::FORMAT_IN_PROGRESS } else { status };
            let ended = self.fencing.answered(op, status, now)?;
            ended.iter().for_each(|(id, span)| self.model.fence(*id, *span));
            return Ok(());
        }
        let verdict = self.fencing.check(op, status);
        self.fencing.is_over(op, now);
        verdict
    }

    /// Checks a response against write protection, and applies its consequences.
    fn check_protection(&mut self, op: &Op, status: Status) -> Result<(), String> {
        let now = self.model.begin();
        if let Kind::Protect(_) = op.kind {
            let ended = self.write_protect.answered(op, status, now);
            ended.iter().for_each(|(id, span)| self.model.fence(*id, *span));
            return Ok(());
        }
        let verdict = self.write_protect.check(op, status);
        self.write_protect.is_over(op, now);
        verdict
    }

    /// A format has completed with success: all blocks read as zeros, also after a power failure.
    /// Beyond the end nothing is erased.
    fn erased(&mut self, op: &Op) {
        let inside = self.scope.size_of(op).unwrap_or(0);
        let (all, done) = (op.span, Ending::Done { fua: true });
        self.model.wrote(op.id, Span { blocks: inside, ..all }, done);
        let beyond = Span { lba: inside, blocks: all.blocks - inside, ..all };
        self.model.wrote(op.id, beyond, Ending::Doubtful);
    }

    fn check(&mut self, op: &Op, data: &[u8]) -> Result<(), String> {
        let nsid = op.span.space as u8 + 1;
        match &op.kind {
            Kind::Read => {
                let block = data.len() / op.span.blocks as usize;
                let mut found = Vec::with_capacity(op.span.blocks as usize);
                for (bytes, lba) in data.chunks_exact(block).zip(op.span.lba..) {
                    match block_stamp::identify(nsid, lba, bytes) {
                        Ok(value) => found.push(value),
                        Err(spoilt) => return Err(format!("block {lba}: {spoilt}")),
                    }
                }
                self.model.read(op.began, op.span, found.iter().copied()).map_err(|v| v.0)?;
                self.check_whole(op, &found)
            }
            Kind::Compare(values) => {
                let found = values.iter().copied();
                self.model.read(op.began, op.span, found).map_err(|v| v.0)
            }
            Kind::Flush => {
                self.model.flushed(op.began, op.span.space);
                Ok(())
            }
            Kind::Wrong(_) => Err("it was carried out".to_owned()),
            Kind::Write { .. } | Kind::Zeroes { .. } | Kind::Deallocate(_) | Kind::Spoil => Ok(()),
            Kind::Copy { .. } => self.model.copied(op.id, op.began, op.span).map_err(|v| v.0),
            Kind::Admin(Question::Changed) => {
                let changed = self.news.read_changed(op.host, data);
                for nsid in changed {
                    self.formats.doubt(op.host, nsid as usize - 1);
                }
                Ok(())
            }
            Kind::Admin(Question::Paths) => {
                let is_current = self.paths.check_log(op, data)?;
                self.news.read_path(op.host, op.began, is_current);
                Ok(())
            }
            Kind::Admin(Question::Namespace) => {
                self.scope.check_identity(op, data)?;
                self.formats.learns(op, data)
            }
            Kind::Admin(_) | Kind::Abort(..) | Kind::Disable => Ok(()),
            Kind::Order(_) | Kind::Protect(_) | Kind::Format { .. } | Kind::Leave => Ok(()),
            Kind::Made(_) => Ok(()),
        }
    }

    /// Each block is data of one command; but one that is larger than the power-fail write unit of
    /// its device may be torn by a power failure.
    fn check_whole(&self, op: &Op, found: &[Value]) -> Result<(), String> {
        let promised = self.atom_bytes >= SECTOR_BYTES << op.shift;
        let blocks = found.chunks(1 << op.shift).zip((op.span.lba..).step_by(1 << op.shift));
        for (block, lba) in blocks.filter(|(block, _)| !is_whole(block)) {
            let span = Span { lba, blocks: block.len() as u32, ..op.span };
            if promised || !self.model.is_left(span, block) {
                return Err(format!("a block is torn: {block:?}"));
            }
        }
        Ok(())
    }

    /// Checks a response against host-created namespaces.
    fn check_made(
        &mut self,
        op: &Op,
        deed: NsCommand,
        answer: Response,
        data: Option<&[u8]>,
    ) -> Result<(), String> {
        let (status, result) = (answer.status, answer.result as u32);
        let disabled = self.disabled[op.host];
        let of_none = [Status::COMMAND_SEQUENCE_ERROR, Status::CONTROLLER_LIST_INVALID];
        let excused = disabled && of_none.iter().any(|each| status.is(*each))
            || self.aborts.are_there() && status.is(Status::ABORT_REQUESTED)
            || self.departures.excuses(status);
        let outcome = Outcome { status, result, data: data.unwrap_or_default(), excused };
        let now = self.model.begin();
        self.made.answered(op.id, deed, outcome, now)
    }

    /// Whether a command may fail with this status.
    fn is_excusable(&self, host: usize, op: &Op, status: Status) -> bool {
        let absent = self.scope.is_absent(op);
        let of_disk = [
            Status::WRITE_FAULT,
            Status::UNRECOVERED_READ_ERROR,
            Status::CAPACITY_EXCEEDED,
            Status::COMMAND_INTERRUPTED,
            Status::INTERNAL_ERROR,
        ];
        let of_reset = [Status::COMMAND_SEQUENCE_ERROR, Status::ABORTED_SQ_DELETION];
        if self.disabled[host] && of_reset.iter().any(|of_reset| status.is(*of_reset)) {
            return true;
        }
        if self.paths.excuses(op, status) || self.scope.excuses(op, status) {
            return true;
        }
        match op.kind {
            Kind::Wrong(Mistake::Opcode) => return status.is(Status::INVALID_OPCODE),
            Kind::Wrong(Mistake::Namespace) => return status.is(Status::INVALID_NAMESPACE),
            Kind::Wrong(Mistake::Range) if status.is(Status::LBA_OUT_OF_RANGE) => return true,
            Kind::Compare(_) if status.is(Status::COMPARE_FAILURE) => return true,
            _ if op.half > 0 && status.is(Status::ABORTED_FAILED_FUSED) => return true,
            Kind::Order(_) if status.is(Status::INVALID_FIELD) => return true,
            // Without its last namespace the subsystem has no such feature.
            Kind::Protect(_) if absent && status.is(Status::INVALID_FIELD) => return true,
            Kind::Format { .. } if absent && status.is(Status::INVALID_OPCODE) => return true,
            // It was resized meanwhile, or removed.
            Kind::Format { .. } if status.is(Status::NAMESPACE_NOT_READY) => return true,
            Kind::Format { .. } if absent && status.is(Status::COMMAND_INTERRUPTED) => return true,
            Kind::Abort(..) if status.is(Status::ABORT_LIMIT_EXCEEDED) => return true,
            _ => {}
        }
        self.fencing.excuses(status)
            || self.write_protect.excuses(status)
            || self.formats.excuses(op, status)
            || self.departures.excuses(status)
            || self.aborts.are_there() && status.is(Status::ABORT_REQUESTED)
            || self.has_device_failed(op) && of_disk.iter().any(|of_disk| status.is(*of_disk))
            || self.loses_devices && status.is(Status::NAMESPACE_NOT_READY)
    }

    // ---- trace

    /// A command is sent.
    pub fn note_sent(&self, host: usize, queue: u16, op: &Op) {
        let words = [0x70, (host as u64) << 16 | u64::from(queue), op.id.into()];
        self.trace.note(words, || format!("host   {host} queue {queue}: {op}"));
    }

    /// A command has ended.
    pub fn note_done(&self, host: usize, op: &Op, outcome: Result<Response, Lost>) {
        let word = outcome.map_or(u64::MAX, |answer| answer.status.field().into());
        self.trace.note([0x71, (host as u64) << 32 | u64::from(op.id), word], || match outcome {
            Ok(answer) => format!("host   {host} {}: {op}", answer.status),
            Err(Lost) => format!("host   {host} lost: {op}"),
        });
    }

    /// What was expected of the association of a host is not expected any more: it has ended, or
    /// the host has crashed.
    pub fn forget_association(&mut self, host: usize) {
        self.disabled[host] = false;
        self.news.forget(host);
        self.formats.forget(host);
        self.departures.forget(host);
    }

    /// An association has ended.
    pub fn note_ended(&mut self, host: usize, why: &EndReason) {
        self.counts.ended += 1;
        self.forget_association(host);
        self.trace
            .note([0x72, host as u64, 0], || format!("host   {host} association ended: {why}"));
    }
}

/// Whether the sectors of a block are data of one command.
fn is_whole(block: &[Value]) -> bool {
    let follows = |value, at| match value {
        Value::Moved(write, home) => Value::Moved(write, home + at),
        other => other,
    };
    block.iter().zip(0..).all(|(value, at)| *value == follows(block[0], at))
}
