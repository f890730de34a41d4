//! Where the time of a command goes: each moment of its life belongs to one stage.
//!
//! The marks are the times at which a reactor's turns began, so a stage is known to the length of a
//! turn: tens of microseconds under load, less when there is little to do. What a command meets
//! within one turn takes no time; what a turn takes is counted to the stage that lasts over its
//! end. Nothing is lost or counted twice by that: the stages add up to the total.

/// Stages of a command, in the usual order. One that a command does not need takes no time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Stage {
    /// The capsule is there; all slots of its queue are still taken.
    #[default]
    Receive,
    /// For a data buffer, for the other half of a fused command, or for who changes the same
    /// blocks.
    Wait,
    /// Data on their way from the host.
    Pull,
    /// With the disk.
    Disk,
    /// Data on their way to the host, until its transport has acknowledged them.
    Push,
    /// The response on its way, until the host's transport has acknowledged it. Where an adapter
    /// does not wake a sleeping reactor for that, until the reactor fell asleep. (A host that
    /// acknowledges late makes this long, as user-space hosts do that look at their sockets rarely.)
    Reply,
}

impl Stage {
    /// All, in the order of their numbers.
    pub const ALL: [Stage; 6] =
        [Stage::Receive, Stage::Wait, Stage::Pull, Stage::Disk, Stage::Push, Stage::Reply];

    /// A word for it, for labels and tables.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Receive => "receive",
            Stage::Wait => "wait",
            Stage::Pull => "pull",
            Stage::Disk => "disk",
            Stage::Push => "push",
            Stage::Reply => "reply",
        }
    }
}

/// The clock of one command. Times are nanoseconds since any one moment.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Clock {
    began_ns: u64,
    since_ns: u64,
    stage: Stage,
    spent_ns: [u64; Stage::ALL.len()],
}

impl Clock {
    /// Of a command whose capsule came then and has a slot now. It waits.
    #[inline]
    #[must_use]
    pub fn start(came_ns: u64, now_ns: u64) -> Clock {
        let mut spent_ns = [0; Stage::ALL.len()];
        spent_ns[Stage::Receive as usize] = now_ns.wrapping_sub(came_ns);
        Clock { began_ns: came_ns, since_ns: now_ns, stage: Stage::Wait, spent_ns }
    }

    /// Another stage begins, or the same goes on.
    #[inline]
    pub fn enter(&mut self, stage: Stage, now_ns: u64) {
        self.spend(now_ns);
        self.stage = stage;
    }

    /// The command is over: its stages.
    #[inline]
    pub fn end(&mut self, now_ns: u64) -> &[u64; Stage::ALL.len()] {
        self.spend(now_ns);
        &self.spent_ns
    }

    /// How long it was in each stage, up to the last mark, in the order of [`Stage::ALL`].
    #[must_use]
    pub fn stages_ns(&self) -> &[u64; Stage::ALL.len()] {
        &self.spent_ns
    }

    /// The same in all.
    #[must_use]
    pub fn total_ns(&self) -> u64 {
        self.since_ns.saturating_sub(self.began_ns)
    }

    #[inline]
    fn spend(&mut self, now_ns: u64) {
        // Most of what a command meets it meets within one turn. And a mark may be earlier than the
        // one before, by what `Queues::nap` makes of it: then no time has passed either.
        if now_ns > self.since_ns {
            let spent_ns = &mut self.spent_ns[self.stage as usize];
            *spent_ns = spent_ns.wrapping_add(now_ns - self.since_ns);
            self.since_ns = now_ns;
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn stages_have_the_numbers_of_their_order() {
        for (at, stage) in Stage::ALL.iter().enumerate() {
            assert_eq!(*stage as usize, at);
            assert!(Stage::ALL[..at].iter().all(|other| other.name() != stage.name()));
        }
    }

    #[test]
    fn a_write_spends_its_time_where_it_is() {
        let mut clock = Clock::start(5, 10);
        clock.enter(Stage::Pull, 10);
        clock.enter(Stage::Wait, 40);
        clock.enter(Stage::Disk, 41);
        clock.enter(Stage::Disk, 100);
        clock.enter(Stage::Reply, 141);
        assert_eq!(clock.end(150), &[5, 1, 30, 100, 0, 9]);
        assert_eq!((clock.stages_ns(), clock.total_ns()), (&[5, 1, 30, 100, 0, 9], 145));
    }

    proptest! {
        #[test]
        fn stages_add_up_to_the_total_whatever_happens(
            came in 0..1u64 << 62,
            steps in prop::collection::vec((0..Stage::ALL.len(), 0..1u64 << 40, any::<bool>()), 0..20),
        ) {
            let mut now = came + 17;
            let mut clock = Clock::start(came, now);
            for (stage, later, back) in steps {
                now = if back { now.saturating_sub(later) } else { now + later };
                clock.enter(Stage::ALL[stage], now);
            }
            let sum = clock.end(now).iter().sum::<u64>();
            prop_assert_eq!(sum, clock.total_ns());
        }
    }
}
