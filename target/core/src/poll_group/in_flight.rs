//! Commands in progress of all queue pairs.

use std::collections::HashMap;
use std::time::Instant;

use super::PollGroup;
use crate::qpair::in_flight;
use crate::stats::in_flight::InFlight;

/// The oldest commands of a namespace that are described.
const MOST_OF_NAMESPACE: u32 = 32;

impl PollGroup {
    /// Describes the oldest commands of each namespace, the oldest first. For diagnosis: it takes
    /// memory, and a time in proportion to the slots of all queues with commands.
    pub(super) fn in_flight(&self, now: Instant) -> Vec<InFlight> {
        let now_ns = self.since_ns(now);
        let queues = self.queues.iter().flatten();
        let mut found: Vec<_> = queues.flat_map(|queue| in_flight(queue, now_ns)).collect();
        found.sort_unstable_by_key(|command| std::cmp::Reverse(command.age_ns));
        let mut counts = HashMap::new();
        found.retain(|InFlight { command, .. }| {
            let of_namespace = counts.entry((command.subsystem, command.nsid)).or_insert(0);
            *of_namespace += 1;
            *of_namespace <= MOST_OF_NAMESPACE
        });
        found
    }
}
