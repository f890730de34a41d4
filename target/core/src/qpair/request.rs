//! State of one command of a queue, and of its submission queue.

use std::mem::offset_of;
use std::sync::Arc;

use nvme::{Cqe, Sqe, Status};
use rdma::{Buf, Pool};

use super::bad_blocks::ClearBadBlocks;
use super::range_lock::LockState;
use crate::command::sgl::SglSegments;
use crate::command::{Plan, Source};
use crate::sched::DrainBarrier;
use crate::sched::abort::AbortToken;
use crate::sched::buffers::DeviceSlot;
use crate::sched::offload::{ConnectionWatch, OpenConnection};
use crate::stats::StageTimer;
use nvmfd_blockdev::{DeviceId, IoRequest};

/// Command slots for each receive of a queue: as many commands may wait for the completion of their
/// response as are executed.
pub(super) const SLOTS_PER_RECEIVE: u16 = 2;

/// Work requests that a queue may have posted for each receive: for each slot, data of a read or a
/// write, and a response.
pub const SENDS_PER_RECEIVE: u32 = 2 * SLOTS_PER_RECEIVE as u32;

/// The states of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Waiting(WaitReason),
    /// There is no command.
    Free,
    /// Its data are read from the host, or those of the other half of a fused command.
    Pulling,
    /// A device has an operation of it.
    AtDevice,
    /// A worker executes a part of it, and reports the result.
    Offloaded,
    /// It was answered; its data or its response are in flight to the host.
    Replying,
}

/// Reason why a command waits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitReason {
    /// The time at which its rate limits let it begin.
    RateLimit,
    /// Data buffers. Every command begins like this, also one that needs none.
    Buffers,
    /// Other commands of its queue, which hold all that a queue without a share may hold.
    AdminCap,
    /// The lock of the blocks that its operation, which it keeps meanwhile, changes.
    RangeLock,
    /// The second half of a fused command; or it is the second half, and the first waits for both.
    FusedPartner,
    /// Its comparison has succeeded, and the write of the second half has not completed.
    FusedWrite,
    /// The event that completes it.
    Event,
}

impl State {
    /// Whether no part of the command has started, so that it can end immediately.
    pub(super) fn has_not_begun(self) -> bool {
        use WaitReason::{AdminCap, Buffers, Event, FusedPartner, RateLimit};
        matches!(self, State::Waiting(RateLimit | Buffers | AdminCap | FusedPartner | Event))
    }

    /// Whether a command may change from this state to another. A command that was answered is
    /// never executed again, and one that a device or worker still has does not return to an
    /// earlier step.
    const fn may_become(self, to: State) -> bool {
        use State::{AtDevice, Free, Offloaded, Pulling, Replying, Waiting};
        use WaitReason::{
            AdminCap, Buffers, Event, FusedPartner, FusedWrite, RangeLock, RateLimit,
        };
        match self {
            Free => matches!(to, Waiting(Buffers)),
            Replying => matches!(to, Replying | Free),
            _ if matches!(to, Replying | Free) => true,
            Waiting(Buffers | AdminCap | FusedPartner) => {
                matches!(to, Pulling | AtDevice | Offloaded | Waiting(_))
                    && !matches!(to, Waiting(FusedWrite))
            }
            Waiting(RateLimit) => matches!(to, Waiting(Buffers)),
            Waiting(RangeLock) => matches!(to, AtDevice),
            Waiting(Event | FusedWrite) => false,
            Pulling => matches!(to, Pulling | AtDevice | Offloaded | Waiting(RangeLock)),
            AtDevice => {
                matches!(to, AtDevice | Offloaded | Waiting(RangeLock | FusedWrite))
            }
            Offloaded => matches!(to, AtDevice | Waiting(Buffers)),
        }
    }

    /// Returns its permitted successors, a bit each.
    #[inline]
    const fn successors(self) -> u16 {
        SUCCESSORS[self.number()]
    }

    /// Returns its index in [`STATES`].
    #[inline]
    const fn number(self) -> usize {
        match self {
            State::Waiting(reason) => reason as usize,
            State::Free => 7,
            State::Pulling => 8,
            State::AtDevice => 9,
            State::Offloaded => 10,
            State::Replying => 11,
        }
    }
}

const STATES: [State; 12] = [
    State::Waiting(WaitReason::RateLimit),
    State::Waiting(WaitReason::Buffers),
    State::Waiting(WaitReason::AdminCap),
    State::Waiting(WaitReason::RangeLock),
    State::Waiting(WaitReason::FusedPartner),
    State::Waiting(WaitReason::FusedWrite),
    State::Waiting(WaitReason::Event),
    State::Free,
    State::Pulling,
    State::AtDevice,
    State::Offloaded,
    State::Replying,
];

/// The permitted successors of each state, a bit each.
const SUCCESSORS: [u16; STATES.len()] = {
    let mut successors = [0; STATES.len()];
    let mut from = 0;
    while from < STATES.len() {
        let mut to = 0;
        while to < STATES.len() {
            if STATES[from].may_become(STATES[to]) {
                successors[STATES[from].number()] |= 1 << STATES[to].number();
            }
            to += 1;
        }
        from += 1;
    }
    successors
};

/// A command, or the slot for one.
///
/// The data of a batch evict slots from the L1 cache between the steps of their commands. So fields
/// used by one step are adjacent, and those that few commands need are behind all others and not
/// accessed for other commands.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Request {
    state: State,
    /// Work requests posted and not completed.
    pub(super) posted: u8,
    /// Whether [`RequestExt`] is in use.
    has_ext: bool,
    /// It may be completed: one response for each command received.
    unanswered: bool,
    /// A device was requested to cancel its operation, and has not answered yet.
    pub(super) cancelling: bool,
    /// Its in-capsule data are copied to a buffer of their own for the device.
    pub(super) bounces: bool,
    /// In-capsule data are submitted in their receive, which is counted among those that its device
    /// has.
    pub(super) lends_receive: bool,
    /// The permitted successors of its state, a bit each.
    successors: u16,
    /// Status of its response.
    pub(super) status: Status,
    /// Bytes of data buffers that are charged for it.
    pub(super) charged_bytes: u32,
    /// The device for which they are charged, until it has done its part.
    pub(super) device: Option<DeviceSlot>,
    /// The key to invalidate with the response.
    pub(super) invalidate: Option<u32>,
    /// The buffer of the response, while it is not posted.
    pub(super) cell: Option<Buf>,
    /// Time spent in each stage.
    pub(super) clock: StageTimer,
    pub(super) sqe: Sqe,
    /// The data in transfer between host and device.
    pub(super) data: Option<Buf>,
    pub(super) plan: Plan,
    /// Progress of plans with several device operations.
    pub(super) step: u32,
    /// Its range lock.
    pub(super) lock: LockState,
    /// The capsule's receive buffer, until it is posted again.
    pub(super) capsule: Option<Buf>,
    /// Allocated when a command in this slot needs it for the first time, and kept.
    ext: Option<Box<RequestExt>>,
}

/// Fields that every command uses fill so many cache lines; those of its response are first.
const _: () = {
    const LINE_BYTES: usize = 64;
    assert!(size_of::<Request>() <= 6 * LINE_BYTES);
    assert!(offset_of!(Request, sqe) <= 3 * LINE_BYTES);
};

/// The right to complete a command: one for each command received, consumed by its completion.
#[derive(Debug)]
pub(super) struct Reply(());

impl Reply {
    /// The completion of its command. `sqhd`, `sqid`: the head and the number of its queue.
    #[inline]
    pub(super) fn cqe(
        self,
        sqe: &Sqe,
        (status, result): (Status, u64),
        (sqhd, sqid): (u16, u16),
    ) -> Cqe {
        Cqe { result, sqhd, sqid, cid: sqe.cid, status }
    }
}

/// State that few commands need.
#[derive(Debug, Default)]
pub(super) struct RequestExt {
    /// The slot of the other half of a fused command.
    pub(super) fused_with: Option<u16>,
    /// The other half has failed.
    pub(super) fused_failed: bool,
    /// Its queue is deleted.
    pub(super) is_deleted: bool,
    /// Blocks that Compare loads to compare them with the data, or that Copy copies.
    pub(super) second: Option<Buf>,
    /// The pieces of the data in host memory, if there are several.
    pub(super) pieces: SglSegments,
    /// Barriers that wait until this command has ended.
    pub(super) barriers: Vec<Arc<DrainBarrier>>,
    /// While its connection is open: a worker does not begin its request afterwards.
    connection: Option<OpenConnection>,
    /// The Abort commands that name it.
    pub(super) aborts: Vec<AbortToken>,
    /// The operation that waits for its range lock.
    pub(super) waiting_op: Option<(DeviceId, IoRequest)>,
    /// Unreadable blocks that it changes.
    pub(super) clears: ClearBadBlocks,
    /// The block at which it failed, if not given by its own fields.
    pub(super) failing_lba: Option<u64>,
}

/// Submission queue head as reported to the host.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Head {
    pub(super) at: u16,
    pub(super) size: u16,
    /// Flow control is disabled: the field says FFFFh.
    pub(super) off: bool,
}

impl Request {
    pub(super) fn new(cell: Option<Buf>) -> Request {
        Request {
            state: State::Free,
            posted: 0,
            has_ext: false,
            unanswered: false,
            cancelling: false,
            bounces: false,
            lends_receive: false,
            successors: State::Free.successors(),
            status: Status::SUCCESS,
            charged_bytes: 0,
            device: None,
            invalidate: None,
            cell,
            clock: StageTimer::default(),
            sqe: Sqe::default(),
            data: None,
            plan: Plan::Reply(0),
            step: 0,
            lock: LockState::None,
            capsule: None,
            ext: None,
        }
    }

    /// Begins the command in `sqe`, whose capsule arrived at `came_ns`.
    #[inline(always)]
    pub(super) fn begin(&mut self, capsule: Buf, came_ns: u64, now_ns: u64) {
        if std::mem::take(&mut self.has_ext) {
            self.ext.iter_mut().for_each(|ext| ext.forget());
        }
        self.enter(State::Waiting(WaitReason::Buffers));
        self.bounces = false;
        self.clock.start(came_ns, now_ns);
        // Whoever looks for commands of a kind by their plans must not find that of an earlier command.
        if !matches!(self.plan, Plan::Load { .. } | Plan::Store { .. }) {
            self.plan = Plan::Reply(0);
        }
        self.unanswered = true;
        self.invalidate = self.sqe.invalidate_key();
        self.capsule = Some(capsule);
        self.step = 0;
    }

    /// Sets the plan of a command that has begun.
    #[inline(always)]
    pub(super) fn set_plan(&mut self, plan: Plan) {
        // What it replaces owns nothing since the command began: nothing is called to drop it.
        debug_assert!(matches!(self.plan, Plan::Reply(_) | Plan::Load { .. } | Plan::Store { .. }));
        std::mem::forget(std::mem::replace(&mut self.plan, plan));
    }

    #[inline]
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Changes to this state.
    ///
    /// # Panics
    /// The state does not follow from the one before: to go on could lose or overwrite data.
    #[inline(always)]
    #[track_caller]
    pub(super) fn enter(&mut self, state: State) {
        // Callers name the state, so that this is a test of one bit and two stores of constants.
        let legal = self.successors >> state.number();
        assert!(legal & 1 == 1, "{:?} became {state:?}", self.state);
        (self.state, self.successors) = (state, state.successors());
    }

    /// Counts a completed work of its data or its response. Returns whether the command has ended:
    /// it was the last one.
    #[inline]
    pub(super) fn end_post(&mut self) -> bool {
        self.posted -= 1;
        self.posted == 0 && self.state == State::Replying
    }

    /// Takes the right to complete it; none if it was completed, or never will be.
    #[inline]
    pub(super) fn take_reply(&mut self) -> Option<Reply> {
        std::mem::take(&mut self.unanswered).then_some(Reply(()))
    }

    /// Whether [`RequestExt`] is in use.
    #[inline]
    pub(super) fn has_ext(&self) -> bool {
        self.has_ext
    }

    /// Returns its [`RequestExt`], if that is in use.
    #[inline]
    pub(super) fn ext(&self) -> Option<&RequestExt> {
        if self.has_ext { self.ext.as_deref() } else { None }
    }

    /// Returns the same, mutable.
    #[inline]
    pub(super) fn ext_mut(&mut self) -> Option<&mut RequestExt> {
        if self.has_ext { self.ext.as_deref_mut() } else { None }
    }

    /// Returns its [`RequestExt`], which is in use from now on.
    pub(super) fn make_ext(&mut self) -> &mut RequestExt {
        self.has_ext = true;
        self.ext.get_or_insert_default()
    }

    /// Returns what its request to a worker takes along, to be withdrawn if it has not begun when the
    /// connection closes.
    pub(super) fn watch_connection(&mut self) -> ConnectionWatch {
        self.make_ext().connection.get_or_insert_default().watch()
    }

    /// Its connection has closed.
    pub(super) fn unwatch_connection(&mut self) {
        if let Some(ext) = self.ext_mut() {
            ext.connection = None;
        }
    }

    /// The slot of the other half of a fused command.
    #[inline]
    pub(super) fn fused_with(&self) -> Option<u16> {
        self.ext().and_then(|ext| ext.fused_with)
    }

    /// Returns the device to flush before the answer, after the other operations of a command with
    /// FUA: it has zeroed blocks, or read some that another command may have written into a volatile
    /// cache. Those of a fused Compare are replaced.
    ///
    /// Source: NVM Command Set Specification 1.0, "Compare command", "Read command", "Verify command".
    pub(super) fn flush_due(&self) -> Option<DeviceId> {
        let (operations, fua) = match self.plan {
            Plan::Zero { fua, .. } => (1, fua),
            Plan::Load { .. } | Plan::Compare { .. } if self.fused_with().is_none() => {
                (1, self.sqe.fua())
            }
            Plan::Verify { len, piece_bytes, .. } => {
                (len.div_ceil(piece_bytes.into()), self.sqe.fua())
            }
            _ => return None,
        };
        self.plan.backing().filter(|_| fua && u64::from(self.step) == operations)
    }

    /// Drops the right to complete it.
    pub(super) fn forget_reply(&mut self) {
        self.unanswered = false;
    }

    /// Returns the status of a command that must end before its first or next step: its host was
    /// preempted, or wants to abort it, or the namespace was write protected.
    #[inline]
    pub(super) fn pending_end(&self) -> Option<Status> {
        if self.has_ext { self.ext_pending_end() } else { None }
    }

    #[cold]
    fn ext_pending_end(&self) -> Option<Status> {
        let more_to_do = matches!(
            self.plan,
            Plan::Deallocate { .. } | Plan::Zero { .. } | Plan::Copy { .. } | Plan::Verify { .. }
        );
        if self.state != State::Pulling && !more_to_do {
            return None;
        }
        let ext = self.ext()?;
        match (ext.barriers.first(), !ext.aborts.is_empty()) {
            (Some(barrier), _) => Some(barrier.status()),
            (None, true) => Some(Status::ABORT_REQUESTED),
            (None, false) => ext.is_deleted.then_some(Status::ABORTED_SQ_DELETION),
        }
    }

    /// Returns the buffer of an operation to the command.
    #[inline(always)]
    pub(super) fn put_back(&mut self, buf: Option<Buf>) {
        match (&self.plan, buf) {
            (_, None) => {}
            (Plan::Store { from: Source::Capsule { .. }, .. }, Some(buf))
                if self.capsule.is_none() =>
            {
                self.capsule = Some(buf);
            }
            (Plan::Compare { .. } | Plan::Copy { .. }, Some(buf)) => {
                self.make_ext().second = Some(buf);
            }
            (_, Some(buf)) => self.data = Some(buf),
        }
    }

    /// Whether its data are in several pieces of host memory.
    #[inline]
    pub(super) fn is_scattered(&self) -> bool {
        self.ext().is_some_and(|ext| !ext.pieces.is_empty())
    }

    /// Whether its data are being transferred in pieces, and the last one is not posted yet.
    #[inline]
    pub(super) fn is_in_pieces(&self) -> bool {
        self.ext().is_some_and(|ext| ext.pieces.has_more())
    }

    /// Takes all data buffers that it owns.
    pub(super) fn take_buffers(&mut self) -> impl Iterator<Item = Buf> + use<> {
        let second = self.ext_mut().and_then(|ext| ext.second.take());
        [self.capsule.take(), self.data.take(), second].into_iter().flatten()
    }

    /// Returns the data that the host sent, in either buffer.
    pub(super) fn bytes<'a>(&'a self, pool: &'a Pool) -> &'a [u8] {
        match (&self.data, &self.capsule) {
            (Some(buf), _) | (None, Some(buf)) => pool.bytes(buf),
            (None, None) => &[],
        }
    }
}

impl RequestExt {
    /// Releases what a command with this response no longer needs.
    #[cold]
    pub(super) fn end(&mut self, status: Status, pool: &mut Pool) {
        self.fused_failed = false;
        self.clears = ClearBadBlocks::None;
        self.barriers.clear();
        if !status.is(Status::ABORT_REQUESTED) {
            self.aborts.clear();
        }
        if let Some(buf) = self.second.take() {
            pool.give(buf);
        }
    }

    /// Resets it for another command in the slot. Buffers and the operation are already removed.
    fn forget(&mut self) {
        self.fused_with = None;
        self.fused_failed = false;
        self.is_deleted = false;
        self.connection = None;
        self.pieces = SglSegments::default();
        self.barriers.clear();
        self.aborts.clear();
        self.clears = ClearBadBlocks::None;
        self.failing_lba = None;
    }
}

impl Head {
    #[inline(always)]
    pub(super) fn advance(&mut self) {
        // A queue without a Connect has no size yet.
        if self.size > 0 {
            self.at = if self.at + 1 < self.size { self.at + 1 } else { 0 };
        }
    }

    #[inline]
    pub(super) fn field(self) -> u16 {
        if self.off { u16::MAX } else { self.at }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use nvme::Nqn;
    use rdma::PoolPlan;

    use crate::message::mailbox;
    use crate::qpair::request::*;
    use crate::sched::abort::AbortRequest;

    #[test]
    fn completed_commands_do_not_execute_and_free_slots_do_not_complete() {
        use State::{AtDevice, Free, Offloaded, Pulling, Replying, Waiting};
        use WaitReason::{
            AdminCap, Buffers, Event, FusedPartner, FusedWrite, RangeLock, RateLimit,
        };
        let reasons = [RateLimit, Buffers, AdminCap, RangeLock, FusedPartner, FusedWrite, Event];
        let waiting = reasons.map(Waiting);
        let under_way = [Pulling, AtDevice, Offloaded];
        let all = || waiting.into_iter().chain(under_way).chain([Free, Replying]);
        for to in all() {
            assert_eq!(Free.may_become(to), to == Waiting(Buffers), "{to:?}");
            assert_eq!(Replying.may_become(to), matches!(to, Replying | Free), "{to:?}");
        }
        for from in waiting.into_iter().chain(under_way) {
            assert!(from.may_become(Replying) && from.may_become(Free), "{from:?}");
        }
        // A device or worker returns its part before the command changes.
        for from in [AtDevice, Offloaded, Waiting(RangeLock), Waiting(FusedWrite)] {
            assert!(!from.has_not_begun(), "{from:?}");
            assert!(!from.may_become(Pulling), "{from:?}");
            // What a worker has found needs a buffer to be sent.
            assert_eq!(from.may_become(Waiting(Buffers)), from == Offloaded, "{from:?}");
        }
        // No command is removed from the queue of a limit before its time, and an event is no
        // operation.
        for to in under_way {
            assert!(!Waiting(RateLimit).may_become(to) && !Waiting(Event).may_become(to), "{to:?}");
        }
        assert_eq!(size_of::<State>(), 1);
        for (number, state) in STATES.into_iter().enumerate() {
            assert_eq!(state.number(), number, "{state:?}");
            for to in STATES {
                let legal = SUCCESSORS[number] >> to.number() & 1 == 1;
                assert_eq!(legal, state.may_become(to), "{state:?} {to:?}");
            }
        }
    }

    #[test]
    #[should_panic(expected = "Free became Replying")]
    fn a_second_completion_of_a_command_panics() {
        Request::new(None).enter(State::Replying);
    }

    #[test]
    fn a_reused_request_slot_has_no_extension_state_of_its_predecessor() {
        let plan = PoolPlan::without_receives(2, 4096, 4096);
        let mut pool = Pool::new(plan).unwrap();
        let mut slot = Request::new(None);
        slot.begin(pool.take_cell().unwrap(), 0, 0);
        assert!(slot.ext().is_none() && slot.ext_mut().is_none() && !slot.is_scattered());
        let (sender, _mailbox) = mailbox().unwrap();
        let (ended, _ends) = channel();
        let (_recall, token) = AbortRequest::new(1, 1, 1, sender.waker());
        let ext = slot.make_ext();
        ext.failing_lba = Some(7);
        ext.second = pool.take_data(4096);
        ext.pieces.begin(4096);
        ext.barriers.push(Arc::new(DrainBarrier::around(Nqn::DISCOVERY, 1, ended)));
        ext.aborts.push(token);
        ext.clears = ClearBadBlocks::UnderWay;
        assert_eq!(slot.ext().and_then(|ext| ext.failing_lba), Some(7));
        slot.take_buffers().for_each(|buf| pool.give(buf));
        assert!(pool.is_full());

        slot.enter(State::Free);
        slot.begin(pool.take_cell().unwrap(), 0, 0);
        assert!(slot.ext().is_none());
        let fresh = format!("{:?}", RequestExt::default());
        assert_eq!(format!("{:?}", slot.make_ext()), fresh, "every field");
        slot.take_buffers().for_each(|buf| pool.give(buf));
        assert!(pool.is_full());
    }
}
