//! What a queue knows of one command, and of its submission queue.

use std::sync::Arc;

use nvme::{Sqe, Status};
use rdma::{Buf, Pool};

use super::bad_blocks::ClearBadBlocks;
use super::range_lock::LockState;
use crate::command::sgl::SglSegments;
use crate::command::{Plan, Source};
use crate::sched::DrainBarrier;
use crate::sched::abort::AbortToken;
use crate::sched::buffers::DeviceSlot;
use crate::stats::StageTimer;
use nvmfd_blockdev::{DeviceId, IoRequest};

/// Places for commands for each receive of a queue: as many may wait for the end of their response
/// as are carried out.
pub(super) const SLOTS_PER_RECEIVE: u16 = 2;

/// Work requests that a queue may have posted for each receive: for each place, data of a read or
/// a write, and a response.
pub const SENDS_PER_RECEIVE: u32 = 2 * SLOTS_PER_RECEIVE as u32;

/// The states of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// There is none.
    Free,
    Waiting(WaitReason),
    /// Its data come from the host, or those of the command that it is fused with.
    Pulling,
    /// A device has an operation of it.
    AtDevice,
    /// Another party executes a part of it, and reports the result.
    Offloaded,
    /// It was answered, and its data or its response are on their way to the host.
    Replying,
}

/// What a command waits for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum WaitReason {
    /// The time at which its rate limits let it begin.
    RateLimit,
    /// Data buffers. Every command begins like this, also one that needs none.
    Buffers,
    /// Other commands of its queue, which hold all that a queue without a share may.
    AdminCap,
    /// The blocks that its operation, which it holds, is about to change.
    RangeLock,
    /// The second half of a fused command; or it is that, and the first waits for both.
    FusedPartner,
    /// Its comparison has succeeded, and the write of the second half is not over.
    FusedWrite,
    /// An event that the host has asked for.
    Event,
}

impl State {
    /// Whether nothing of it was begun: it can end at once.
    pub(super) fn has_not_begun(self) -> bool {
        use WaitReason::{AdminCap, Buffers, Event, FusedPartner, RateLimit};
        matches!(self, State::Waiting(RateLimit | Buffers | AdminCap | FusedPartner | Event))
    }

    /// Whether a command may go from here to there. One that was answered is never carried out
    /// again, and what somebody else still has of it is never given away.
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
            Offloaded => matches!(to, AtDevice),
        }
    }

    /// Where it stands in [`STATES`].
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

/// All states.
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

/// The states that may follow on each, a bit each.
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

/// A command, or the place for one.
///
/// The data of a batch push slots out of the fastest cache between the steps of their commands. So
/// what belongs to one step lies together, and what few commands need is behind everything else and
/// not looked at by the others.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Request {
    state: State,
    /// Work requests posted and not completed.
    pub(super) posted: u8,
    /// It has something that few commands have.
    has_ext: bool,
    /// A disk has been asked for its operation, and has not answered yet.
    pub(super) cancelling: bool,
    /// Its in-capsule data go to the disk in a buffer of their own.
    pub(super) bounces: bool,
    /// They go in the receive in which they came, which is counted among those that its store has.
    pub(super) lends_receive: bool,
    /// What it was answered.
    pub(super) status: Status,
    /// Bytes of data buffers that were taken for it.
    pub(super) charged_bytes: u32,
    /// The store that they were taken for, until it has done what it should.
    pub(super) device: Option<DeviceSlot>,
    /// What completes it, until it was completed.
    reply: Option<Reply>,
    /// The response's cell, while it is not posted.
    pub(super) cell: Option<Buf>,
    /// Time spent in each stage.
    pub(super) clock: StageTimer,
    pub(super) sqe: Sqe,
    /// The data on their way between host and disk.
    pub(super) data: Option<Buf>,
    pub(super) plan: Plan,
    /// Progress of plans with several disk operations.
    pub(super) step: u32,
    /// Its range lock.
    pub(super) lock: LockState,
    /// The capsule's receive buffer, until it is posted again.
    pub(super) capsule: Option<Buf>,
    ext: RequestExt,
}

/// What completes a command: whoever sends a response gives this up for it, and there is one for
/// each command that came.
#[derive(Debug)]
pub(super) struct Reply {
    /// The command.
    pub(super) cid: u16,
    /// The key to invalidate with the response.
    pub(super) invalidate: Option<u32>,
}

/// What few commands have.
#[derive(Debug, Default)]
pub(super) struct RequestExt {
    /// The slot of the other half of a fused command.
    pub(super) fused_with: Option<u16>,
    /// That has failed.
    pub(super) fused_failed: bool,
    /// Its queue is deleted.
    pub(super) is_deleted: bool,
    /// What Compare loads to hold against the data, and what Copy copies.
    pub(super) second: Option<Buf>,
    /// Where the host has the data, when that is in several places.
    pub(super) pieces: SglSegments,
    /// Commands that wait until this one is over.
    pub(super) barriers: Vec<Arc<DrainBarrier>>,
    /// The Abort commands that want it to end.
    pub(super) aborts: Vec<AbortToken>,
    /// The operation that waits for its blocks.
    pub(super) waiting_op: Option<(DeviceId, IoRequest)>,
    /// What becomes of unreadable blocks that it changes.
    pub(super) clears: ClearBadBlocks,
    /// The block that it failed for, where its own fields do not say.
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
            cancelling: false,
            bounces: false,
            lends_receive: false,
            status: Status::SUCCESS,
            charged_bytes: 0,
            device: None,
            reply: None,
            cell,
            clock: StageTimer::default(),
            sqe: Sqe::default(),
            data: None,
            plan: Plan::Reply(0),
            step: 0,
            lock: LockState::None,
            capsule: None,
            ext: RequestExt::default(),
        }
    }

    /// A command begins, whose capsule came at `came_ns`.
    pub(super) fn begin(&mut self, sqe: Sqe, capsule: Buf, came_ns: u64, now_ns: u64) {
        if std::mem::take(&mut self.has_ext) {
            self.ext.forget();
        }
        self.enter(State::Waiting(WaitReason::Buffers));
        self.bounces = false;
        self.clock.start(came_ns, now_ns);
        self.sqe = sqe;
        self.plan = Plan::Reply(0);
        let invalidate = sqe.sgl().ok().and_then(|sgl| sgl.invalidate_key());
        self.reply = Some(Reply { cid: sqe.cid, invalidate });
        self.capsule = Some(capsule);
        self.step = 0;
    }

    /// Where it stands.
    #[inline]
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// Changes to this state.
    ///
    /// # Panics
    /// The state does not follow from the one before: to go on could lose or overwrite data.
    #[inline]
    #[track_caller]
    pub(super) fn enter(&mut self, state: State) {
        let legal = SUCCESSORS[self.state.number()] >> state.number();
        assert!(legal & 1 == 1, "{:?} became {state:?}", self.state);
        self.state = state;
    }

    /// What its completion takes; none when it was completed, or never will be.
    #[inline]
    pub(super) fn take_reply(&mut self) -> Option<Reply> {
        self.reply.take()
    }

    /// Whether it has something that few commands have.
    #[inline]
    pub(super) fn has_ext(&self) -> bool {
        self.has_ext
    }

    /// What it has that few commands have; none: nothing of that.
    #[inline]
    pub(super) fn ext(&self) -> Option<&RequestExt> {
        if self.has_ext { Some(&self.ext) } else { None }
    }

    /// The same, to be changed.
    #[inline]
    pub(super) fn ext_mut(&mut self) -> Option<&mut RequestExt> {
        if self.has_ext { Some(&mut self.ext) } else { None }
    }

    /// It gets something that few commands have.
    pub(super) fn make_ext(&mut self) -> &mut RequestExt {
        self.has_ext = true;
        &mut self.ext
    }

    /// The slot of the other half of a fused command.
    #[inline]
    pub(super) fn fused_with(&self) -> Option<u16> {
        self.ext().and_then(|ext| ext.fused_with)
    }

    /// The host has other keys than its descriptor says: this one is invalidated.
    pub(super) fn set_invalidate(&mut self, key: Option<u32>) {
        if let Some(reply) = &mut self.reply {
            reply.invalidate = key;
        }
    }

    /// Nothing completes it any more.
    pub(super) fn forget_reply(&mut self) {
        self.reply = None;
    }

    /// Why a command has to end before it has done (or gone on with) anything: its host was
    /// preempted, or wants it to, or the namespace was write protected.
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
        match (self.ext.barriers.first(), !self.ext.aborts.is_empty()) {
            (Some(barrier), _) => Some(barrier.status()),
            (None, true) => Some(Status::ABORT_REQUESTED),
            (None, false) => self.ext.is_deleted.then_some(Status::ABORTED_SQ_DELETION),
        }
    }

    /// The buffer of an operation is the command's again.
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

    /// Whether the host has its data in several places.
    #[inline]
    pub(super) fn is_scattered(&self) -> bool {
        self.ext().is_some_and(|ext| !ext.pieces.is_empty())
    }

    /// Whether its data are being pushed in pieces, and the last one is still to come.
    #[inline]
    pub(super) fn is_in_pieces(&self) -> bool {
        self.ext().is_some_and(|ext| ext.pieces.has_more())
    }

    /// All data buffers that it has in hand, for keeps.
    pub(super) fn take_buffers(&mut self) -> impl Iterator<Item = Buf> + use<> {
        let second = self.ext_mut().and_then(|ext| ext.second.take());
        [self.capsule.take(), self.data.take(), second].into_iter().flatten()
    }

    /// The data that the host sent, wherever they lie.
    pub(super) fn bytes<'a>(&'a self, pool: &'a Pool) -> &'a [u8] {
        match (&self.data, &self.capsule) {
            (Some(buf), _) | (None, Some(buf)) => pool.bytes(buf),
            (None, None) => &[],
        }
    }
}

impl RequestExt {
    /// Another command begins in its place. Buffers and the operation have gone by then.
    fn forget(&mut self) {
        self.fused_with = None;
        self.fused_failed = false;
        self.is_deleted = false;
        self.pieces = SglSegments::default();
        self.barriers.clear();
        self.aborts.clear();
        self.clears = ClearBadBlocks::None;
        self.failing_lba = None;
    }
}

impl Head {
    pub(super) fn advance(&mut self) {
        if self.size > 0 {
            self.at = (self.at + 1) % self.size;
        }
    }

    pub(super) fn field(self) -> u16 {
        if self.off { u16::MAX } else { self.at }
    }
}

#[cfg(test)]
mod tests {
    use std::mem::offset_of;
    use std::sync::mpsc::channel;

    use nvme::Nqn;
    use rdma::PoolPlan;

    use crate::message::mailbox;
    use crate::qpair::request::*;
    use crate::sched::abort::AbortRequest;

    /// What every command touches fills so many cache lines; what its response needs comes first.
    #[test]
    fn what_few_commands_have_is_behind_what_all_have() {
        const LINE_BYTES: usize = 64;
        assert!(offset_of!(Request, ext) <= 7 * LINE_BYTES, "{}", offset_of!(Request, ext));
        assert!(offset_of!(Request, sqe) <= 3 * LINE_BYTES, "{}", offset_of!(Request, sqe));
    }

    #[test]
    fn a_command_that_was_answered_is_not_carried_out_and_a_free_slot_is_not_answered() {
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
        // What a device or worker has is returned before the command changes.
        for from in [AtDevice, Offloaded, Waiting(RangeLock), Waiting(FusedWrite)] {
            assert!(!from.has_not_begun(), "{from:?}");
            assert!(!from.may_become(Pulling) && !from.may_become(Waiting(Buffers)), "{from:?}");
        }
        // Nothing leaves the line of a limit without its time, and an event is no operation.
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
    fn a_second_answer_of_a_command_is_refused() {
        Request::new(None).enter(State::Replying);
    }

    #[test]
    fn nothing_of_a_rare_command_is_left_for_the_next_one() {
        let plan = PoolPlan {
            cells: 2,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: 4096,
            largest_bytes: 4096,
        };
        let mut pool = Pool::new(plan).unwrap();
        let mut slot = Request::new(None);
        slot.begin(Sqe::default(), pool.take_cell().unwrap(), 0, 0);
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
        slot.begin(Sqe::default(), pool.take_cell().unwrap(), 0, 0);
        assert!(slot.ext().is_none());
        let fresh = Request::new(None);
        assert_eq!(format!("{:?}", slot.make_ext()), format!("{:?}", fresh.ext), "every field");
        slot.take_buffers().for_each(|buf| pool.give(buf));
        assert!(pool.is_full());
    }
}
