//! What hosts that are not identified may have of the receives, queue pairs and controllers: hosts
//! that are in no `hosts` list and do not authenticate.
//!
//! All of them together have three quarters while there is a `hosts` list, whose hosts have the rest;
//! those of one source have three quarters of what all of them have.

use std::ops::AddAssign;
use std::time::Instant;

use rdma::Source;

use super::{AssociationEntry, ControllerTable, Registry};
use crate::command::fabrics::ConnectError;
use crate::controller::association::Association;
use crate::diag::cause::Cause;

/// Amounts of what connections use.
#[derive(Clone, Copy, Default)]
struct Resources {
    /// Of I/O queues.
    receives: u32,
    queue_pairs: u32,
    /// Those with I/O queues: others are evicted where all are taken.
    controllers: u32,
}

impl Resources {
    fn map(self, other: Resources, of: impl Fn(u32, u32) -> u32) -> Resources {
        Resources {
            receives: of(self.receives, other.receives),
            queue_pairs: of(self.queue_pairs, other.queue_pairs),
            controllers: of(self.controllers, other.controllers),
        }
    }

    /// At least one of what there is one of.
    fn three_quarters(self) -> Resources {
        self.map(self, |all, _| all - all / 4)
    }

    fn without(self, used: Resources) -> Resources {
        self.map(used, u32::saturating_sub)
    }

    /// I/O queues of `depth` entries of one more controller.
    fn queues(self, depth: u32) -> u32 {
        (self.receives / depth).min(self.queue_pairs.saturating_sub(1))
    }
}

impl AddAssign for Resources {
    fn add_assign(&mut self, other: Resources) {
        *self = self.map(other, u32::saturating_add);
    }
}

/// What the hosts that are not identified use: all of them, and those of one source.
struct Used {
    together: Resources,
    of_source: Resources,
    /// Without I/O queues that were promised and are not connected.
    connected: Resources,
}

impl Registry {
    /// I/O queues of `depth` entries that such hosts of `source` may have beside those that they have
    /// or were promised.
    pub(super) fn left_for_unidentified(
        &self,
        table: &ControllerTable,
        source: Source,
        depth: u32,
        now: Instant,
    ) -> u32 {
        let used = table.used(source, now);
        let (share, rest) = self.shares(table);
        let own = own_share(share, used.of_source).queues(depth);
        own.min(rest.without(used.together).queues(depth))
    }

    /// Refuses one more controller, or one more I/O queue, to a host that is not identified, whose
    /// share is used. `promised`: the queue was, and counts among those of all.
    ///
    /// # Errors
    /// There is nothing left for it.
    pub(super) fn check_share(
        &self,
        table: &ControllerTable,
        association: &Association,
        (source, depth): (Source, u16),
        promised: bool,
        now: Instant,
    ) -> Result<(), ConnectError> {
        if !association.anonymous || association.subsystem.is_discovery() {
            return Ok(());
        }
        let depth = depth.max(1).into();
        let used = table.used(source, now);
        let (share, rest) = self.shares(table);
        let rest = rest.without(used.together);
        // What other controllers of its source were promised may be taken by none of them.
        let own = own_share(share, used.connected);
        let has_queue = own.queues(depth) > 0 && (promised || rest.queues(depth) > 0);
        let is_counted = association.io_queues() > 0;
        match has_queue && (is_counted || own.controllers.min(rest.controllers) > 0) {
            true => Ok(()),
            false => Err(ConnectError::busy(Cause::TooManyUnidentified)),
        }
    }

    /// What all such hosts may have, of which a source has its share; and the same without any limit
    /// where there is no `hosts` list, and so nobody to leave anything to.
    fn shares(&self, table: &ControllerTable) -> (Resources, Resources) {
        let all = Resources {
            receives: self.receives.saturating_mul(self.loads.count()),
            queue_pairs: self.queue_pairs(),
            controllers: self.controllers.try_into().unwrap_or(u32::MAX),
        };
        let without_limit =
            Resources { receives: u32::MAX, queue_pairs: u32::MAX, controllers: u32::MAX };
        match table.subsystems.values().any(|subsystem| !subsystem.hosts.is_empty()) {
            true => (all.three_quarters(), all.three_quarters()),
            false => (all, without_limit),
        }
    }
}

/// What is left for a source. Three quarters of a small target may be less than one queue, so they
/// do not limit the first.
fn own_share(share: Resources, used: Resources) -> Resources {
    match used.receives {
        0 => share,
        _ => share.three_quarters().without(used),
    }
}

impl ControllerTable {
    fn used(&self, source: Source, now: Instant) -> Used {
        let none = Resources::default();
        let mut used = Used { together: none, of_source: none, connected: none };
        let entries = self.associations.values();
        for entry in entries.filter(|e| e.association.anonymous && !e.association.is_closed()) {
            let connected = 1 + u32::from(entry.association.io_queues());
            let own = entry.resources(entry.queue_pairs(now));
            used.together += own;
            if entry.source() == source {
                used.of_source += own;
                used.connected += entry.resources(connected);
            }
        }
        used
    }
}

impl AssociationEntry {
    /// What its queue pairs use.
    fn resources(&self, queue_pairs: u32) -> Resources {
        Resources {
            receives: (queue_pairs - 1) * u32::from(self.limits.queue_depth),
            queue_pairs,
            controllers: (self.association.io_queues() > 0).into(),
        }
    }
}

#[cfg(test)]
mod tests;
