//! Commands in progress of all queue pairs.

use std::collections::HashMap;
use std::time::Instant;

use super::PollGroup;
use crate::stats::in_flight::InFlight;

/// The oldest commands of a namespace that are described.
const MOST_OF_NAMESPACE: u32 = 32;

impl PollGroup {
    /// Describes the oldest commands of each namespace, the oldest first. For diagnosis: it takes
    /// memory, and a time in proportion to the slots of all queues with commands.
    pub(super) fn in_flight(&self, now: Instant) -> Vec<InFlight> {
        let now_ns = self.since_ns(now);
        let mut found = Vec::new();
        for queue in self.queues.iter().flatten() {
            found.extend(queue.ages_ns(now_ns).map(|(age_ns, slot)| (age_ns, slot, queue)));
        }
        found.sort_unstable_by_key(|(age_ns, ..)| std::cmp::Reverse(*age_ns));
        let mut counts = HashMap::new();
        let mut kept = Vec::new();
        for (age_ns, slot, queue) in found {
            let Some(described) = queue.in_flight(slot, age_ns) else { continue };
            let whose = (described.command.subsystem, described.command.nsid);
            let of_namespace = counts.entry(whose).or_insert(0);
            if *of_namespace < MOST_OF_NAMESPACE {
                *of_namespace += 1;
                kept.push(described);
            }
        }
        kept
    }
}
