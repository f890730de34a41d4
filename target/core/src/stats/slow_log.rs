//! Log of slow commands of a reactor: the last ones that took longer than `[observe] slow_ms`, with
//! the time of each stage.

use std::collections::VecDeque;
use std::time::Instant;

use nvme::Status;

use super::command_identity::CommandIdentity;
use super::stage_timer::Stage;

/// Commands that are remembered, on each reactor.
pub const KEPT: usize = 64;

/// A command that took long.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SlowCommand {
    /// When it was over.
    pub at: Instant,
    /// Which.
    pub command: CommandIdentity,
    /// Bytes that it read or wrote.
    pub bytes: u64,
    /// Its status.
    pub status: Status,
    /// Time in each stage, in the order of [`Stage::ALL`].
    pub stages_ns: [u64; Stage::ALL.len()],
    /// Time in all.
    pub total_ns: u64,
}

/// The recorder. It allocates all its memory when it is created.
#[derive(Debug)]
pub struct SlowLog {
    last: VecDeque<SlowCommand>,
    /// Total number.
    count: u64,
}

impl Default for SlowLog {
    fn default() -> SlowLog {
        SlowLog { last: VecDeque::with_capacity(KEPT), count: 0 }
    }
}

impl SlowLog {
    /// Records a command; the oldest is removed if there is no room.
    pub fn note(&mut self, command: SlowCommand) {
        self.count += 1;
        if self.last.len() == KEPT {
            self.last.pop_front();
        }
        self.last.push_back(command);
    }

    /// The commands that are remembered, oldest first, and how many there were in all.
    pub fn read(&self) -> (Vec<SlowCommand>, u64) {
        (self.last.iter().copied().collect(), self.count)
    }
}

#[cfg(test)]
mod tests {
    use nvme::Nqn;

    use crate::stats::slow_log::*;

    #[test]
    fn the_latest_slow_commands_are_retained_in_bounded_memory() {
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let mut recorder = SlowLog::default();
        let room = recorder.last.capacity();
        for cid in 0..200 {
            recorder.note(SlowCommand {
                at: Instant::now(),
                command: CommandIdentity {
                    subsystem: nqn,
                    host: nqn,
                    qid: 1,
                    cid,
                    opcode: 2,
                    nsid: 1,
                    slba: 0,
                },
                bytes: 0,
                status: Status::SUCCESS,
                stages_ns: [0; 6],
                total_ns: 1,
            });
        }
        let (last, count) = recorder.read();
        assert_eq!((count, last.len(), recorder.last.capacity()), (200, KEPT, room));
        assert_eq!((last[0].command.cid, last[KEPT - 1].command.cid), (200 - KEPT as u16, 199));
    }
}
