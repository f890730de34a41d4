//! Time of a command by stage: each moment belongs to exactly one.
//!
//! The times are those at which iterations of the reactor began, so the resolution is the length of
//! an iteration: tens of microseconds under load, less otherwise. Stages entered and left within
//! one iteration take no time; an iteration is counted for the stage at its end. So nothing is lost
//! or counted twice: the stages add up to the total.

rdma::named_enum! {
    /// Stages of a command, in the usual order. One that a command does not need takes no time.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum Stage {
        /// The capsule is there; all slots of its queue are still taken.
        #[default]
        Receive = "receive",
        /// For a data buffer, for the other half of a fused command, or for a range lock.
        Wait = "wait",
        /// Data on their way from the host.
        Pull = "pull",
        /// At the device.
        Disk = "disk",
        /// Data on their way to the host, until its transport has acknowledged them.
        Push = "push",
        /// From the response until its acknowledgement by the host's transport. If an adapter does
        /// not wake a sleeping reactor for that, until the reactor fell asleep. (This is long for
        /// hosts that acknowledge late, as user-space hosts that poll their sockets rarely.)
        Reply = "reply",
    }
}

/// A stage that has not begun.
const NEVER: u64 = u64::MAX;

/// Value of the last stage while a command is in an earlier one again.
const BACK: u8 = u8::MAX;

/// The timer of one command. Times are nanoseconds since any one moment.
///
/// It only records when each stage began, which is the cost for most commands; durations are
/// computed when they are read. A stage lasts until the next one that has begun.
#[derive(Clone, Copy, Debug)]
pub struct StageTimer {
    began_ns: [u64; Stage::ALL.len()],
    /// The last stage, in the order of [`Stage::ALL`], that has begun; or [`BACK`].
    last: u8,
    /// With [`BACK`]: where it is, and since when.
    stage: Stage,
    since_ns: u64,
}

impl Default for StageTimer {
    fn default() -> StageTimer {
        let began_ns = [NEVER; Stage::ALL.len()];
        StageTimer { began_ns, last: 0, stage: Stage::Receive, since_ns: 0 }
    }
}

impl StageTimer {
    /// Starts the timer of a command whose capsule arrived at `came_ns`, and that has a slot now.
    /// It waits.
    #[inline]
    pub fn start(&mut self, came_ns: u64, now_ns: u64) {
        self.began_ns = [came_ns, now_ns, NEVER, NEVER, NEVER, NEVER];
        self.last = Stage::Wait as u8;
    }

    /// Enters another stage, or continues the same one.
    #[inline]
    pub fn enter(&mut self, stage: Stage, now_ns: u64) {
        if stage as u8 > self.last {
            self.began_ns[stage as usize] = now_ns;
            self.last = stage as u8;
        } else {
            self.turn(stage, now_ns);
        }
    }

    /// The stage that it is in.
    pub fn stage(&self) -> Stage {
        Stage::ALL.get(usize::from(self.last)).copied().unwrap_or(self.stage)
    }

    /// Start times of the stages. Commands with equal ones have equal latencies.
    #[inline]
    pub fn began_ns(&self) -> &[u64; Stage::ALL.len()] {
        &self.began_ns
    }

    /// Duration of each stage of a command that was answered, and has ended at `end_ns`, in the
    /// order of [`Stage::ALL`].
    pub fn stages_ns(&self, end_ns: u64) -> [u64; Stage::ALL.len()] {
        let mut stages_ns = [0; Stage::ALL.len()];
        each_stage(&self.began_ns, end_ns, |stage, ns| stages_ns[stage] = ns);
        stages_ns
    }

    /// Time that the host of a command that has ended at `end_ns` took to send its data, and to
    /// acknowledge data and response.
    #[inline]
    pub fn at_host_ns(&self, end_ns: u64) -> u64 {
        let [_, _, pull_ns, disk_ns, push_ns, reply_ns] = self.began_ns;
        let pulled_ns = if disk_ns == NEVER { 0 } else { disk_ns.saturating_sub(pull_ns) };
        pulled_ns.saturating_add(end_ns.saturating_sub(push_ns.min(reply_ns)))
    }

    /// Total duration.
    #[inline]
    pub fn total_ns(&self, end_ns: u64) -> u64 {
        end_ns.saturating_sub(self.began_ns[0])
    }

    /// A stage that is not further than the last one.
    #[cold]
    fn turn(&mut self, stage: Stage, now_ns: u64) {
        if self.last == BACK {
            // The stages behind began later by as much as it was away from them.
            let away_ns = now_ns.saturating_sub(self.since_ns);
            let behind = &mut self.began_ns[self.stage as usize + 1..];
            behind.iter_mut().for_each(|began_ns| *began_ns = began_ns.saturating_add(away_ns));
            let last = self.began_ns.iter().rposition(|began_ns| *began_ns != NEVER);
            self.last = last.unwrap_or_default() as u8;
        }
        let began_ns = &mut self.began_ns[stage as usize..];
        if stage as u8 > self.last {
            began_ns[0] = now_ns;
            self.last = stage as u8;
        } else if (stage as u8) < self.last {
            // One that it had skipped took no time so far.
            began_ns[0] = began_ns.iter().copied().min().unwrap_or(now_ns);
            (self.last, self.stage, self.since_ns) = (BACK, stage, now_ns);
        }
    }
}

/// Passes the stages that took any time, the last one first, and how much: until the next one began,
/// or the end.
#[inline(always)] // for each batch
pub fn each_stage(
    began_ns: &[u64; Stage::ALL.len()],
    end_ns: u64,
    mut act: impl FnMut(usize, u64),
) {
    let mut next_ns = end_ns;
    for (stage, &began_ns) in began_ns.iter().enumerate().rev() {
        // Most of what a command meets it meets within one turn. And a mark may be later than the one
        // behind it, by what `PollGroup::nap` makes of that: then no time has passed either.
        if began_ns < next_ns {
            act(stage, next_ns - began_ns);
            next_ns = began_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::stats::stage_timer::*;

    #[test]
    fn stage_numbers_follow_their_order_and_names_are_unique() {
        for (at, stage) in Stage::ALL.iter().enumerate() {
            assert_eq!(*stage as usize, at);
            assert!(Stage::ALL[..at].iter().all(|other| other.name() != stage.name()));
        }
    }

    fn started(came_ns: u64, now_ns: u64) -> StageTimer {
        let mut clock = StageTimer::default();
        clock.start(came_ns, now_ns);
        clock
    }

    #[test]
    fn the_time_of_a_write_is_split_among_its_stages() {
        let mut clock = started(5, 10);
        clock.enter(Stage::Pull, 10);
        assert_eq!(clock.stage(), Stage::Pull);
        clock.enter(Stage::Wait, 40);
        assert_eq!(clock.stage(), Stage::Wait, "it is in an earlier one again");
        clock.enter(Stage::Disk, 41);
        clock.enter(Stage::Disk, 100);
        clock.enter(Stage::Reply, 141);
        assert_eq!(clock.stages_ns(150), [5, 1, 30, 100, 0, 9]);
        assert_eq!(clock.total_ns(150), 145);
    }

    #[test]
    fn a_reused_slot_starts_with_cleared_stage_times() {
        let mut clock = started(0, 0);
        clock.enter(Stage::Push, 7);
        clock.enter(Stage::Pull, 9);
        clock.start(20, 21);
        clock.enter(Stage::Reply, 23);
        assert_eq!(clock.stages_ns(24), [1, 2, 0, 0, 0, 1]);
    }

    proptest! {
        /// Against a clock that adds up what is spent at every step.
        #[test]
        fn elapsed_time_is_counted_in_the_current_stage(
            came in 0..1u64 << 62,
            steps in prop::collection::vec((0..Stage::ALL.len(), 0..1u64 << 40), 0..20),
            end in 0..1u64 << 40,
        ) {
            let mut now = came + 17;
            let mut clock = started(came, now);
            let (mut stage, mut spent) = (Stage::Wait as usize, [17, 0, 0, 0, 0, 0]);
            for (next, later) in steps.into_iter().chain([(Stage::Reply as usize, end)]) {
                now += later;
                spent[stage] += later;
                stage = next;
                clock.enter(Stage::ALL[stage], now);
            }
            spent[stage] += end;
            prop_assert_eq!(clock.stages_ns(now + end), spent);
            prop_assert_eq!(clock.total_ns(now + end), spent.iter().sum::<u64>());
        }

        #[test]
        fn stage_times_add_up_to_the_total_even_if_time_moves_backwards(
            came in 0..1u64 << 62,
            steps in prop::collection::vec((0..Stage::ALL.len(), 0..1u64 << 40, any::<bool>()), 0..20),
        ) {
            let mut now = came + 17;
            let mut clock = started(came, now);
            for (stage, later, back) in steps {
                now = if back { now.saturating_sub(later).max(came) } else { now + later };
                clock.enter(Stage::ALL[stage], now);
            }
            clock.enter(Stage::Reply, now);
            let sum = clock.stages_ns(now).iter().sum::<u64>();
            prop_assert_eq!(sum, clock.total_ns(now));
        }
    }
}
