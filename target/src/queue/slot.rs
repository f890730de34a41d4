//! What a queue knows of one command, and of its submission queue.

use std::sync::Arc;

use nvme::{Sqe, Status};
use rdma::{Buf, Pool};

use super::mark::Mend;
use super::turn::Turn;
use crate::command::Plan;
use crate::command::scatter::Pieces;
use crate::disk::{BackingId, Op};
use crate::observe::Clock;
use crate::recall::Errand;
use crate::reservation::Fence;

/// Places for commands for each receive of a queue: as many may wait for the end of their response
/// as are carried out.
pub(super) const SLOTS_PER_RECEIVE: u16 = 2;

/// Work requests that a queue may have posted for each receive: for each place, data of a read or
/// a write, and a response.
pub(crate) const SENDS_PER_RECEIVE: u32 = 2 * SLOTS_PER_RECEIVE as u32;

/// The five states.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    Free,
    Waiting,
    Pulling,
    AtDisk,
    Replying,
}

/// A command, or the place for one.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) state: State,
    pub(super) sqe: Sqe,
    pub(super) plan: Plan,
    /// The key to invalidate with the response.
    pub(super) invalidate: Option<u32>,
    /// The capsule's receive buffer, until it is posted again.
    pub(super) capsule: Option<Buf>,
    /// The data on their way between host and disk.
    pub(super) data: Option<Buf>,
    /// What Compare loads to hold against `data`, and what Copy copies.
    pub(super) second: Option<Buf>,
    /// The response's cell, at home.
    pub(super) cell: Option<Buf>,
    /// Where the host has the data, when that is in several places.
    pub(super) pieces: Pieces,
    /// Progress of plans with several disk operations.
    pub(super) step: u32,
    /// Work requests posted and not home.
    pub(super) posted: u8,
    /// Where its time goes.
    pub(super) clock: Clock,
    /// What it was answered.
    pub(super) status: Status,
    /// Bytes of data buffers that were taken for it.
    pub(super) charged_bytes: u32,
    /// Preemptions that wait for this command.
    pub(super) fences: Vec<Arc<Fence>>,
    /// The Abort commands that want it to end.
    pub(super) errands: Vec<Errand>,
    /// A disk has been asked for its operation, and has not answered yet.
    pub(super) recalling: bool,
    /// How it stands with others who change blocks.
    pub(super) turn: Turn,
    /// What waits for its turn to go to the disk.
    pub(super) held_back: Option<(BackingId, Op)>,
    /// The slot of the other half of a fused command.
    pub(super) mate: Option<u16>,
    /// The other half has failed.
    pub(super) doomed: bool,
    /// What becomes of unreadable blocks that it changes.
    pub(super) mend: Mend,
    /// The block that it failed for, where its own fields do not tell.
    pub(super) culprit: Option<u64>,
}

/// Submission queue head as the host is told.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Head {
    pub(super) at: u16,
    pub(super) size: u16,
    /// Flow control is disabled: the field says FFFFh.
    pub(super) off: bool,
}

impl Slot {
    pub(super) fn new(cell: Option<Buf>) -> Slot {
        Slot {
            state: State::Free,
            sqe: Sqe::default(),
            plan: Plan::Reply(0),
            invalidate: None,
            capsule: None,
            data: None,
            second: None,
            cell,
            pieces: Pieces::default(),
            step: 0,
            posted: 0,
            clock: Clock::default(),
            status: Status::SUCCESS,
            charged_bytes: 0,
            fences: Vec::new(),
            errands: Vec::new(),
            recalling: false,
            turn: Turn::None,
            held_back: None,
            mate: None,
            doomed: false,
            mend: Mend::None,
            culprit: None,
        }
    }

    /// The data that the host sent, wherever they lie.
    pub(super) fn bytes<'a>(&'a self, pool: &'a Pool) -> &'a [u8] {
        match (&self.data, &self.capsule) {
            (Some(buf), _) | (None, Some(buf)) => pool.bytes(buf),
            (None, None) => &[],
        }
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
