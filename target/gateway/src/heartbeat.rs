//! Heartbeats: the own ones, and what is seen of others.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::Timing;
use crate::record::{GroupObject, Key, Membership, Slot};

/// Heartbeats as one gateway knows them.
#[derive(Debug, Default)]
pub(crate) struct Heartbeats {
    /// Counter of the last own one.
    counter: u64,
    /// When the last confirmed one was *sent*: others may have seen it from then on.
    confirmed: Option<Duration>,
    /// When the next one is due.
    pub(crate) next: Duration,
    /// The last value of others, and when it was first read.
    observed: BTreeMap<Slot, (Option<String>, Duration)>,
}

impl Heartbeats {
    /// The value of the next own heartbeat.
    pub(crate) fn beat(&mut self, now: Duration, timing: &Timing, incarnation: u64) -> String {
        self.counter += 1;
        self.next = now + timing.heartbeat;
        format!("{incarnation} {}", self.counter)
    }

    /// An own heartbeat is in the group object. After a time without one nothing is known of
    /// others: their heartbeats may have been stopped by the same cause.
    pub(crate) fn confirm(&mut self, now: Duration, timing: &Timing, sent: Duration) {
        if !self.is_fresh(now, timing) {
            self.observed.clear();
        }
        self.confirmed = self.confirmed.max(Some(sent));
    }

    /// The gateway is no member any more.
    pub(crate) fn reset(&mut self) {
        self.confirmed = None;
        self.observed.clear();
    }

    /// Whether others cannot suspect this gateway yet.
    pub(crate) fn is_fresh(&self, now: Duration, timing: &Timing) -> bool {
        self.doubt_at(timing).is_some_and(|at| now < at)
    }

    /// When it stops to be fresh.
    pub(crate) fn doubt_at(&self, timing: &Timing) -> Option<Duration> {
        self.confirmed.map(|sent| sent + timing.doubt)
    }

    /// Notes the heartbeats of others.
    pub(crate) fn observe(&mut self, now: Duration, object: &GroupObject) {
        self.observed.retain(|slot, _| object.member(*slot).is_some());
        for (slot, _) in object.members() {
            let value = object.text(Key::Heartbeat(slot)).map(str::to_owned);
            let seen = self.observed.entry(slot).or_insert_with(|| (value.clone(), now));
            if seen.0 != value {
                *seen = (value, now);
            }
        }
    }

    /// Whether the heartbeat of a slot was the same for the time of suspicion at least, in a read
    /// that was sent at this time.
    pub(crate) fn is_suspect(&self, slot: Slot, sent: Duration, timing: &Timing) -> bool {
        let seen = self.observed.get(&slot);
        seen.is_some_and(|(_, since)| sent >= *since + timing.suspicion)
    }

    /// Other members whose heartbeats change.
    pub(crate) fn live<'a>(
        &'a self,
        object: &'a GroupObject,
        sent: Duration,
        timing: &'a Timing,
    ) -> impl Iterator<Item = Slot> + 'a {
        let members = object.members();
        let live = members.filter(|(_, member)| member.membership == Membership::Live);
        live.map(|(slot, _)| slot).filter(move |slot| !self.is_suspect(*slot, sent, timing))
    }
}
