//! Each path leads to a target of its own, over the same blocks: both serve, or they are gateways of a
//! group, of which one serves at a time.

use super::*;

/// What is at the end of the paths.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum World {
    /// One target with two ports.
    OneTarget,
    /// A target for each path. What the process of one has begun is over when it is killed.
    TwoTargets,
    /// Two gateways of a group. What one has begun is over when the next owner has excluded it.
    Group,
}

impl World {
    pub(crate) fn daemons(self) -> u32 {
        if self == World::OneTarget { 1 } else { 2 }
    }
}

/// What a gateway does.
#[derive(Clone, Copy, Debug)]
pub(crate) enum GroupAct {
    /// It does not reach the cluster, and stops to serve.
    Suspend,
    /// It reaches the cluster again.
    Reconnect,
    /// It becomes the owner, if there is none.
    Take,
    /// The others are excluded, later than the owner serves.
    ExcludeOthers,
}

/// A defect that the checker has to find.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SeededBug {
    /// The host repeats writes of a lost path at once, as Linux does.
    RepeatAtOnce,
    /// A former owner is not excluded.
    SkipExclusion,
    /// .. or only after the new one serves.
    LateExclusion,
    /// A gateway that does not reach the cluster fails commands that may still be carried out.
    EarlyFailure,
}

impl Lab {
    /// Kills a daemon. Its host hears of that, if the kernel ends the connections, or notices it later.
    pub(crate) fn kill(&mut self, daemon: usize) {
        self.target.kill(daemon);
        let is_told = self.random.percent(30);
        let daemons = self.target.daemons.len();
        for port in (0..2).filter(|port| port % daemons == daemon) {
            match is_told && !self.target.ports[port].is_cut {
                true => self.target.fail_links(port, &Reason::Peer),
                false => self.schedule(50, 1_000, Act::Notice(port)),
            }
        }
    }

    pub(crate) fn restart(&mut self, daemon: usize) {
        if !self.target.daemons[daemon].is_alive {
            self.target.restart(daemon);
            if self.target.group.is_some() {
                self.schedule(100, 1_500, Act::Group(GroupAct::Take, daemon));
            }
        }
    }

    /// A fault of the group, of the owner mostly.
    pub(crate) fn fault_of_group(&mut self, daemon: usize) {
        let owner = self.target.owner();
        let (daemon, is_owner) = match owner {
            Some(owner) if self.random.percent(80) => (owner, true),
            owner => (daemon, owner == Some(daemon)),
        };
        match self.random.below(3) {
            0 if self.target.daemons[daemon].is_alive => {
                self.kill(daemon);
                self.schedule(1_000, 6_000, Act::Restart(daemon));
            }
            1 if self.target.daemons[daemon].is_alive => {
                self.target.daemons[daemon].is_cut_off = true;
                self.schedule(500, 2_000, Act::Group(GroupAct::Suspend, daemon));
                self.schedule(500, 6_000, Act::Group(GroupAct::Reconnect, daemon));
            }
            2 if is_owner => self.target.give(daemon),
            _ => {}
        }
        self.schedule(100, 4_000, Act::Group(GroupAct::Take, 1 - daemon));
    }

    pub(crate) fn act_of_group(&mut self, act: GroupAct, daemon: usize) {
        match act {
            GroupAct::Suspend if self.bug == Some(SeededBug::EarlyFailure) => {
                self.target.suspend_and_fail_commands(daemon);
            }
            GroupAct::Suspend => self.target.suspend(daemon),
            GroupAct::Reconnect => self.target.reconnect(daemon),
            GroupAct::ExcludeOthers => self.target.exclude_others(daemon),
            GroupAct::Take => {
                if self.target.take(daemon) {
                    match self.bug {
                        Some(SeededBug::SkipExclusion) => {}
                        Some(SeededBug::LateExclusion) => {
                            let act = Act::Group(GroupAct::ExcludeOthers, daemon);
                            self.schedule(1_000, 4_000, act);
                        }
                        _ => self.target.exclude_others(daemon),
                    }
                }
            }
        }
    }

    pub(crate) fn heal_group(&mut self) {
        for daemon in 0..2 {
            self.target.reconnect(daemon);
            self.restart(daemon);
        }
        self.acts.clear();
        let next = self.target.owner().unwrap_or(0);
        self.act_of_group(GroupAct::Take, next);
    }
}

#[test]
fn writes_by_two_targets_are_neither_lost_nor_late() {
    run_seeds(World::TwoTargets);
}

#[test]
fn writes_by_gateways_of_a_group_are_neither_lost_nor_late() {
    run_seeds(World::Group);
}

#[test]
fn seeded_bugs_are_found() {
    for (world, bug) in [
        (World::OneTarget, SeededBug::RepeatAtOnce),
        (World::TwoTargets, SeededBug::RepeatAtOnce),
        (World::Group, SeededBug::RepeatAtOnce),
        (World::Group, SeededBug::SkipExclusion),
        (World::Group, SeededBug::LateExclusion),
        (World::Group, SeededBug::EarlyFailure),
    ] {
        let found = (0..1000).find_map(|seed| {
            let why = std::panic::catch_unwind(|| run(world, seed, Some(bug))).err()?;
            Some((seed, *why.downcast::<String>().expect("what the checker says")))
        });
        println!("{bug:?} in {world:?} is found by seed {found:?}");
        assert!(found.is_some_and(|(_, why)| why.contains(" cannot contain ")), "{bug:?}");
    }
}
