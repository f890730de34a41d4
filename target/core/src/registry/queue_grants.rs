//! I/O queues that were granted to controllers: they take receives and queue pairs before they are
//! connected.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use rdma::{Source, limits};

use super::{AssociationEntry, ControllerTable, Registry};
use crate::controller::Limits;
use crate::controller::association::Association;

/// Time for which receives are reserved for promised I/O queues: as long as a connection may take
/// to its Connect.
pub(super) const KEPT: Duration = Duration::from_secs(30);

impl Registry {
    /// Receives of promised I/O queues that are not connected, by source. Sources without any are
    /// omitted.
    #[must_use]
    pub fn reserved_receives(&self, now: Instant) -> BTreeMap<Source, u32> {
        let table = self.lock();
        let mut promised = BTreeMap::new();
        for entry in table.associations.values() {
            let kept = entry.kept_receives(now);
            if kept > 0 {
                *promised.entry(entry.source()).or_insert(0) += kept;
            }
        }
        promised
    }

    /// Number of I/O queues of one more controller: limited by the available memory; the host
    /// accepts fewer.
    pub(super) fn grant(
        &self,
        table: &ControllerTable,
        limits: Limits,
        unidentified: Option<Source>,
        now: Instant,
    ) -> u16 {
        self.room(table, limits.queue_depth, unidentified, now).clamp(1, limits.io_queues)
    }

    /// Number of I/O queues for the controller of a host that is about to be authenticated. None
    /// were reserved for it before, so it is reported only now. None if it had authenticated
    /// before.
    #[must_use]
    pub(crate) fn grant_again(&self, association: &Association, now: Instant) -> Option<u16> {
        let mut table = self.lock();
        if association.is_proved() {
            return None;
        }
        let entry = table.associations.get(&association.id)?;
        let most = Limits { io_queues: entry.most_io_queues, ..entry.limits };
        let io_queues = self.grant(&table, most, None, now);
        let entry = table.associations.get_mut(&association.id)?;
        entry.limits.io_queues = io_queues;
        entry.kept_until = now + KEPT;
        Some(io_queues)
    }

    /// Number of I/O queues of `depth` entries for one more controller: limited by the memory and
    /// queue pairs that others neither have nor were promised. Hosts that are not identified are
    /// promised half each and three quarters together, so that they cannot exclude others by
    /// connecting. Connections that are not admitted do not count: they are the promised ones, or
    /// are evicted for those. `unidentified`: the source of such a host.
    fn room(
        &self,
        table: &ControllerTable,
        depth: u16,
        unidentified: Option<Source>,
        now: Instant,
    ) -> u16 {
        let depth = u32::from(depth.max(1));
        let kept = |all: bool| -> u32 {
            let entries = table.associations.values();
            let own = entries.filter(|entry| all || entry.association.anonymous);
            own.map(|entry| entry.kept_receives(now)).sum()
        };
        let left = |load: u32| self.receives.saturating_sub(load);
        let free: u32 = self.loads.admitted().map(|load| left(load) / depth).sum();
        let mut queues = free.saturating_sub(kept(true).div_ceil(depth));
        if let Some(source) = unidentified {
            queues = queues.min(self.left_for_unidentified(table, source, depth, now));
            let receives = self.receives.saturating_mul(self.loads.count());
            let left = (receives / 4 * 3).saturating_sub(kept(false));
            queues = queues.min(receives / 2 / depth).min(left / depth);
        }
        let used: u32 = table.associations.values().map(|entry| entry.queue_pairs(now)).sum();
        queues.min(self.queue_pairs().saturating_sub(used + 1)).try_into().unwrap_or(u16::MAX)
    }

    /// Queue pairs of all reactors.
    pub(super) fn queue_pairs(&self) -> u32 {
        limits::QUEUE_PAIRS.saturating_mul(self.loads.count())
    }
}

impl AssociationEntry {
    /// Receives of the I/O queues that it was promised and has not opened.
    fn kept_receives(&self, now: Instant) -> u32 {
        u32::from(self.kept_queues(now)) * u32::from(self.limits.queue_depth)
    }

    /// Its queue pairs, including those of promised I/O queues.
    pub(super) fn queue_pairs(&self, now: Instant) -> u32 {
        1 + u32::from(self.association.io_queues()) + u32::from(self.kept_queues(now))
    }

    /// Promised I/O queues that it has not connected. None are reserved for a host that has yet to
    /// authenticate.
    pub(super) fn kept_queues(&self, now: Instant) -> u16 {
        if self.is_claim() {
            return 0;
        }
        if self.view.is_none() || now >= self.kept_until || self.association.is_closed() {
            return 0;
        }
        self.granted_queues().saturating_sub(self.association.io_queues())
    }

    /// I/O queues that its host may connect: before Set Features, as many as Get Features reports.
    pub(super) fn granted_queues(&self) -> u16 {
        match self.association.granted_queues() {
            0 => self.limits.io_queues,
            granted => granted,
        }
    }
}

#[cfg(test)]
mod tests;
