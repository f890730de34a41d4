//! Which associations end for a new one, where there is a limit.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use rdma::Source;

use super::{AssociationEntry, ControllerTable, DuplicateHosts};
use crate::command::fabrics::ConnectError;
use crate::controller::association::Association;
use crate::diag::cause::Cause;
use crate::subsystem::Subsystem;

/// Time of a host to authenticate before its resources are given to others: far longer than the
/// exchange takes.
const PROOF: Duration = Duration::from_secs(5);

/// Associations to be evicted for a new one.
pub(super) struct Evictions {
    /// Those of the same host, which end once it has authenticated.
    pub(super) replaced: Vec<Arc<Association>>,
    /// Those whose hosts have not authenticated in time.
    pub(super) displaced: Vec<Arc<Association>>,
    /// Those of hosts that are not identified, without I/O queues.
    pub(super) crowded: Vec<Arc<Association>>,
}

impl Evictions {
    pub(super) fn is_empty(&self) -> bool {
        self.replaced.is_empty() && self.displaced.is_empty() && self.crowded.is_empty()
    }

    /// Ends them. Duplicates of a host that has yet to authenticate end when it has done that.
    pub(super) fn end(&self, table: &ControllerTable, newcomer: &Candidate) {
        if !newcomer.authenticate {
            self.replaced.iter().for_each(|old| old.end(Cause::Replaced));
        }
        for old in &self.displaced {
            let entry = table.associations.get(&old.id);
            if entry.is_some_and(|entry| entry.source() == newcomer.source) {
                old.blame();
            }
            old.end(Cause::TooManyUnauthenticated);
        }
        self.crowded.iter().for_each(|old| old.end(Cause::Crowded));
    }
}

/// A limit for associations of some kind.
pub(super) struct AssociationLimit {
    most: usize,
    /// Maximum of associations whose hosts have yet to authenticate.
    claims: usize,
    /// Why there is no room.
    full: Cause,
}

/// A request for a new association.
pub(super) struct Candidate {
    pub(super) source: Source,
    pub(super) now: Instant,
    /// It has yet to prove itself.
    pub(super) authenticate: bool,
}

impl AssociationLimit {
    /// At most `most`, and half as many with hosts yet to authenticate.
    fn to(most: usize, full: Cause) -> AssociationLimit {
        AssociationLimit { most, claims: most.div_ceil(2), full }
    }

    fn of(subsystem: &Subsystem) -> impl Iterator<Item = AssociationLimit> {
        let own = subsystem.offer.controllers;
        let own = own.map(|most| AssociationLimit::to(most.into(), Cause::SubsystemFull));
        let ids = subsystem.offer.cntlids.len();
        let ids = AssociationLimit { most: ids, claims: usize::MAX, full: Cause::NoControllerId };
        own.into_iter().chain([ids])
    }
}

impl ControllerTable {
    /// Checks whether there is room for one more association, and collects those to evict for it.
    pub(super) fn check_room(
        &self,
        controllers: usize,
        new: &Association,
        subsystem: Option<&Arc<Subsystem>>,
        newcomer: &Candidate,
    ) -> Result<Evictions, ConnectError> {
        let duplicates = subsystem.map_or(DuplicateHosts::Allow, |s| s.offer.duplicates);
        let replaced: Vec<_> = match duplicates {
            DuplicateHosts::Allow => Vec::new(),
            DuplicateHosts::Replace => self.duplicates(new).cloned().collect(),
            DuplicateHosts::Refuse if self.duplicates(new).next().is_some() => {
                return Err(ConnectError::busy(Cause::DuplicateHost));
            }
            DuplicateHosts::Refuse => Vec::new(),
        };
        let stays = |e: &&AssociationEntry| !replaced.iter().any(|old| old.id == e.association.id);
        // Discovery controllers have a limit of their own: they must not exclude I/O controllers.
        let alike = |e: &&AssociationEntry| e.view.is_none() == subsystem.is_none() && stays(e);
        let mut going: Vec<Arc<Association>> = Vec::new();
        for limit in subsystem.iter().flat_map(|s| AssociationLimit::of(s)) {
            let goes = |e: &&AssociationEntry| going.iter().any(|old| old.id == e.association.id);
            let of = |e: &&AssociationEntry| {
                e.association.subsystem == new.subsystem && stays(e) && !goes(e)
            };
            let more = self.make_room(of, &limit, newcomer)?;
            going.extend(more);
        }
        let goes = |e: &&AssociationEntry| going.iter().any(|old| old.id == e.association.id);
        let rest = |e: &&AssociationEntry| alike(e) && !goes(e);
        let all = AssociationLimit::to(controllers, Cause::TooManyControllers);
        let more = self.make_room(rest, &all, newcomer)?;
        going.extend(more);
        let (crowded, displaced) = going.into_iter().partition(|old| old.anonymous);
        Ok(Evictions { replaced, displaced, crowded })
    }

    /// Applies a limit on associations among `of`, and on those whose hosts have yet to
    /// authenticate. At the limit, one of the latter is evicted, because a claimed name excludes
    /// nobody: the oldest of the address with the most of them. Not one that may be about to
    /// succeed, unless its address has two more than that of the new one: hosts that connect at the
    /// same time would evict each other.
    fn make_room(
        &self,
        of: impl Fn(&&AssociationEntry) -> bool,
        limit: &AssociationLimit,
        newcomer: &Candidate,
    ) -> Result<Option<Arc<Association>>, ConnectError> {
        let AssociationLimit { most, claims: most_claims, full } = *limit;
        // An association that was ended is removed soon.
        let live = self.associations.values().filter(|e| of(e) && !e.association.is_closed());
        let claims: Vec<&AssociationEntry> = live.clone().filter(|e| e.is_claim()).collect();
        let is_full = live.count() >= most;
        let is_crowded = newcomer.authenticate && claims.len() >= most_claims;
        if !is_full && !is_crowded {
            return Ok(None);
        }
        let mut counts = BTreeMap::new();
        for entry in &claims {
            *counts.entry(entry.source()).or_insert(0) += 1;
        }
        let count_of = |source| counts.get(&source).copied().unwrap_or(0);
        let own = count_of(newcomer.source);
        let may_go = |e: &&&AssociationEntry| {
            let is_slow = newcomer.now.saturating_duration_since(e.claimed) >= PROOF;
            count_of(e.source()) > own + 1 || is_slow && count_of(e.source()) >= own
        };
        let goes = claims.iter().filter(may_go);
        let goes = goes.max_by_key(|e| (count_of(e.source()), Reverse(e.since)));
        // The id of another one is not free before it has ended.
        let missed = || match full {
            Cause::NoControllerId => None,
            _ => self.least_missed(&of, most, newcomer),
        };
        match goes.copied().or_else(missed) {
            Some(entry) => Ok(Some(Arc::clone(&entry.association))),
            None => {
                Err(ConnectError::busy(if is_full { full } else { Cause::TooManyUnauthenticated }))
            }
        }
    }

    /// Among `of`, those of hosts that are not identified, without I/O queues: the oldest of the
    /// source with the most of them; of the new one's own source if no other has more. One whose
    /// I/O queues may be about to connect is spared, unless it is of another source that has more
    /// than half of all.
    fn least_missed(
        &self,
        of: impl Fn(&&AssociationEntry) -> bool,
        most: usize,
        newcomer: &Candidate,
    ) -> Option<&AssociationEntry> {
        let live = self.associations.values().filter(|e| of(e) && !e.association.is_closed());
        let idle: Vec<&AssociationEntry> = live.filter(|e| e.is_idle_stranger()).collect();
        let mut counts: BTreeMap<Source, usize> = BTreeMap::new();
        for entry in &idle {
            *counts.entry(entry.source()).or_insert(0) += 1;
        }
        let rank = |source: &Source| (counts.get(source).copied(), *source == newcomer.source);
        let source = counts.keys().max_by_key(|source| rank(source)).copied()?;
        let is_half = counts.get(&source).is_some_and(|count| *count > most / 2);
        let hurries = source != newcomer.source && is_half;
        let may_go = |e: &&AssociationEntry| {
            let has_time = e.view.is_some() && newcomer.now < e.kept_until;
            e.source() == source && (hurries || !has_time)
        };
        idle.into_iter().filter(may_go).min_by_key(|e| e.since)
    }
}

#[cfg(test)]
mod tests {
    use nvme::Nqn;

    use crate::diag::cause::Cause;
    use crate::registry::testing::visit;
    use crate::registry::tests::{CLOSED, HOST, TEST, code, data, registry};
    use crate::registry::*;

    /// A host from another address is admitted, and an association of the source with the most is
    /// evicted.
    #[test]
    fn unidentified_hosts_of_one_address_are_evicted_for_other_hosts() {
        let discovery = Nqn::DISCOVERY.to_string();
        for subsystem in [TEST, &discovery] {
            let registry = registry();
            let ask = |source: [u8; 4]| {
                let visit = ConnectContext { source: source.into(), ..visit() };
                registry
                    .connect_admin(&data(0xFFFF, subsystem, HOST), &visit)
                    .map(|a| a.association)
            };
            let strangers: Vec<_> = (0..3).map(|_| ask([192, 0, 2, 1]).unwrap()).collect();
            let other = ask([192, 0, 2, 2]).unwrap();
            let ended: Vec<_> = strangers.iter().map(|a| a.ended_for()).collect();
            assert_eq!(ended, [Some(Cause::Crowded), None, None], "{subsystem}");
            registry.admin_closed(&strangers[0]);
            // One with I/O queues stays, as does one of an identified host.
            strangers[1..].iter().for_each(|a| a.count_io_queue(true));
            if ask([192, 0, 2, 3]).is_ok() {
                assert!(other.is_closed() && subsystem == discovery);
            }
            assert!(strangers[1..].iter().all(|a| !a.is_closed()));
        }
        let registry = registry();
        let friend = |source: [u8; 4]| {
            let visit = ConnectContext { source: source.into(), ..visit() };
            let data = data(0xFFFF, CLOSED, "nqn.2026-11.host:friend");
            registry.connect_admin(&data, &visit).map(|a| a.association)
        };
        let friends: Vec<_> = (0..3).map(|_| friend([192, 0, 2, 1]).unwrap()).collect();
        assert!(friend([192, 0, 2, 2]).is_err() && friends.iter().all(|a| !a.is_closed()));
    }

    #[test]
    fn controllers_are_bounded_and_freed_on_disconnect() {
        let registry = registry();
        let ask = || registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit());
        let first = ask().unwrap().association;
        assert!(ask().is_ok() && ask().is_ok());
        assert_eq!(code(ask()), (0x181, 0, false), "busy now, perhaps not later");
        let discovery = Nqn::DISCOVERY.to_string();
        assert!(
            registry.connect_admin(&data(0xFFFF, &discovery, HOST), &visit()).is_ok(),
            "its own budget"
        );
        registry.admin_closed(&first);
        assert!(ask().is_ok());
    }
}
