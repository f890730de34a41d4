//! Whether hosts reach a gateway. Its heartbeats prove only that it reaches the cluster: one that no
//! host reaches gives its ANA groups to another gateway.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Client, Gateway};
use crate::decision::Candidates;
use crate::interface::Stage;
use crate::record::{Front, Slot};

/// A gateway without an open listener gives its groups after this time.
const CLOSED: Duration = Duration::from_secs(3);
/// A gateway without a host gives its groups after this time, while another one has hosts. Hosts
/// that return to both after a failure of their own have connected again by then.
const DESERTED: Duration = Duration::from_secs(30);

impl Gateway {
    /// What is known of the front of a live member.
    pub fn front(&self, slot: Slot) -> Option<Front> {
        match slot == self.member.slot {
            true => self.front,
            false => self.object.front(slot),
        }
    }

    /// Whether none of its listeners is open: then it takes no group. One with hosts has an open one,
    /// whatever is said of its link.
    pub fn is_closed(&self, slot: Slot) -> bool {
        self.front(slot).is_some_and(|front| front.listeners == 0 && front.hosts == 0)
    }

    /// Whether no host is connected to it, while a live gateway that takes groups has some.
    pub fn is_deserted(&self, slot: Slot) -> bool {
        let has_hosts = |slot: Slot| self.front(slot).map(|front| front.hosts > 0);
        let serves_hosts = |other: &Slot| has_hosts(*other) == Some(true) && self.may_take(*other);
        has_hosts(slot) == Some(false) && self.live_members().iter().any(serves_hosts)
    }

    /// The candidates among some members: those that hosts reach come first.
    pub(super) fn candidates(&self, slots: impl IntoIterator<Item = Slot>) -> Candidates {
        let slots = slots.into_iter().map(|slot| (slot, self.is_deserted(slot)));
        Candidates::new(slots, &self.object, self.groups.keys().copied())
    }

    /// The other live members that take groups.
    pub(super) fn others(&self) -> BTreeSet<Slot> {
        let mut others = self.live_members();
        others.retain(|slot| *slot != self.member.slot && self.may_take(*slot));
        others
    }

    /// Gives all groups, to the least loaded of these.
    pub(super) fn give_all(&mut self, others: BTreeSet<Slot>) {
        let serving = self.groups.iter().filter(|(_, group)| group.stage == Stage::Serving);
        let serving: Vec<u32> = serving.map(|(id, _)| *id).collect();
        let mut candidates = self.candidates(others);
        for id in serving {
            let to = candidates.least_loaded();
            candidates.assign(self.member.slot, to);
            self.step(id, Stage::Releasing(to));
        }
    }

    /// Gives all groups when no host has reached this gateway for long enough, if hosts may reach
    /// another one.
    pub(super) fn give_unreached(&mut self) {
        let (own, mut others) = (self.member.slot, self.others());
        let is_closed = self.is_closed(own);
        if !is_closed {
            others.retain(|slot| self.front(*slot).is_some_and(|front| front.hosts > 0));
        }
        let is_unreached = is_closed || self.is_deserted(own);
        // What it is given meanwhile stays for the whole time, which begins with the first group.
        let serves = self.groups.values().any(|group| group.stage == Stage::Serving);
        if !is_unreached || !serves || others.is_empty() {
            self.unreached_since = None;
            return;
        }
        let since = *self.unreached_since.get_or_insert(self.now);
        if self.now >= since + if is_closed { CLOSED } else { DESERTED } {
            // Those that it has to take back are given after the same time again.
            self.unreached_since = None;
            self.give_all(others);
        }
    }

    /// The front of this incarnation, as it goes into the group object.
    pub(super) fn own_front(&self) -> Option<Front> {
        let Client::Registered(record, _) = &self.client else { return None };
        self.front.map(|front| Front { incarnation: record.incarnation, ..front })
    }
}
