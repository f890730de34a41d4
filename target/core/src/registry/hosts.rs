//! State of hosts beyond their controllers: unflushed writes.

use std::collections::BTreeMap;
use std::sync::Arc;

use nvme::Nqn;

use crate::controller::association::Association;
use crate::subsystem::unflushed::Unflushed;
use crate::subsystem::{Namespace, Subsystem};

/// Maximum of remembered hosts with unflushed writes and no controller.
const MOST_AWAY: usize = 1024;

/// The name of a host, and the identifier that it gave.
pub type HostKey = (Nqn, [u8; 16]);

/// A subsystem, and a host.
type Key = (Nqn, Nqn, [u8; 16]);

/// State shared by all controllers of a host.
#[derive(Debug, Default)]
pub(super) struct Hosts {
    hosts: BTreeMap<Key, Arc<Unflushed>>,
    /// The UUIDs of the namespaces of which that is the state, also of removed ones.
    namespaces: BTreeMap<(Nqn, u32), [u8; 16]>,
}

impl Hosts {
    /// The state that a new association shares with others of its host, present or past.
    pub(super) fn unflushed(
        &mut self,
        association: &Association,
        subsystem: &Subsystem,
    ) -> Arc<Unflushed> {
        let key = (association.subsystem, association.host, association.host_id);
        if let Some(known) = self.hosts.get(&key) {
            return Arc::clone(known);
        }
        self.make_room();
        let new = Arc::new(Unflushed::default());
        // It may have been there before the daemon was.
        for namespace in &subsystem.namespaces {
            let health = &namespace.health;
            if health.sync_failure().is_some() || health.is_untrusted() {
                new.presume_written(namespace.nsid);
            }
        }
        self.hosts.insert(key, Arc::clone(&new));
        new
    }

    /// Namespaces are served from now on: nothing of another one counts for them.
    pub(super) fn serve(&mut self, subsystem: &Subsystem) {
        for Namespace { nsid, uuid, .. } in &subsystem.namespaces {
            self.serve_one((subsystem.nqn, *nsid), *uuid);
        }
    }

    /// The same of one namespace.
    pub(super) fn serve_one(&mut self, place: (Nqn, u32), uuid: [u8; 16]) {
        if self.namespaces.get(&place) == Some(&uuid) {
            return;
        }
        self.of(&place.0).for_each(|host| host.reset(place.1));
        let mut places = self.namespaces.iter();
        if let Some(former) = places.find(|(_, own)| **own == uuid).map(|(place, _)| *place) {
            self.namespaces.remove(&former);
            self.take_over(former, place);
        }
        self.namespaces.insert(place, uuid);
    }

    /// A namespace has another subsystem or id now.
    fn take_over(&mut self, (former, former_nsid): (Nqn, u32), (nqn, nsid): (Nqn, u32)) {
        let of_former = self.hosts.iter().filter(|((of, ..), _)| *of == former);
        let hosts: Vec<_> =
            of_former.map(|((_, host, id), state)| (*host, *id, Arc::clone(state))).collect();
        for (host, id, state) in hosts {
            for is_trusted in [true, false] {
                if state.is_unreported(former_nsid, is_trusted) {
                    state.reset(former_nsid);
                    self.restore((nqn, nsid), &[(host, id)], is_trusted);
                }
            }
            state.reset(former_nsid);
        }
    }

    /// Restores the persisted hosts of a namespace.
    pub(super) fn restore(&mut self, (nqn, nsid): (Nqn, u32), hosts: &[HostKey], is_trusted: bool) {
        for (host, id) in hosts {
            let known = self.hosts.entry((nqn, *host, *id)).or_default();
            known.restore(nsid, is_trusted);
        }
    }

    /// Hosts to be persisted for a namespace; none if it was never served.
    pub(super) fn unreported(&self, uuid: [u8; 16], is_trusted: bool) -> Option<Vec<HostKey>> {
        let (nqn, nsid) = self.namespaces.iter().find(|(_, own)| **own == uuid)?.0;
        let hosts = self
            .hosts
            .iter()
            .filter(|((of, ..), host)| of == nqn && host.is_unreported(*nsid, is_trusted));
        Some(hosts.map(|((_, host, id), _)| (*host, *id)).collect())
    }

    /// All hosts of a subsystem.
    pub(super) fn of<'a>(&'a self, nqn: &'a Nqn) -> impl Iterator<Item = &'a Unflushed> {
        self.hosts.iter().filter(move |((of, ..), _)| of == nqn).map(|(_, host)| &**host)
    }

    /// Removes hosts without a controller: first those that have flushed everything.
    fn make_room(&mut self) {
        let is_away = |host: &Arc<Unflushed>| Arc::strong_count(host) == 1;
        if self.hosts.values().filter(|host| is_away(host)).count() < MOST_AWAY {
            return;
        }
        self.hosts.retain(|_, host| !is_away(host) || !host.is_clean());
        while self.hosts.values().filter(|host| is_away(host)).count() >= MOST_AWAY {
            let Some(key) = self.hosts.iter().find(|(_, host)| is_away(host)).map(|(key, _)| *key)
            else {
                return;
            };
            self.hosts.remove(&key);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::registry::hosts::*;
    use crate::subsystem::testing::sample;

    fn association(host: u16) -> Association {
        let mut id = [0; 16];
        id[..2].copy_from_slice(&host.to_le_bytes());
        Association::new(1, 1, sample().nqn, sample().nqn, id)
    }

    #[test]
    fn controllers_of_a_host_share_unflushed_state_across_reconnects() {
        let (mut hosts, subsystem) = (Hosts::default(), sample());
        let first = hosts.unflushed(&association(1), &subsystem);
        assert!(Arc::ptr_eq(&first, &hosts.unflushed(&association(1), &subsystem)));
        assert!(!Arc::ptr_eq(&first, &hosts.unflushed(&association(2), &subsystem)));
        first.note_write(1);
        drop(first);
        assert!(!hosts.unflushed(&association(1), &subsystem).is_clean());
    }

    /// Neither a failure that nobody has seen yet, nor one that a host has seen.
    #[test]
    fn unflushed_state_of_another_namespace_under_the_same_id_does_not_count() {
        let (mut hosts, mut subsystem) = (Hosts::default(), sample());
        hosts.serve(&subsystem);
        let [notified, unnotified] =
            [1, 2].map(|host| hosts.unflushed(&association(host), &subsystem));
        notified.end_failed_flush(1, true);
        unnotified.note_write(1);
        unnotified.on_trust(1);
        hosts.serve(&subsystem);
        assert!(!unnotified.is_clean(), "it is the same");
        subsystem.namespaces[0].uuid = [0xEE; 16];
        hosts.serve(&subsystem);
        assert!(unnotified.begin_flush(1).is_some());
        notified.note_write(1);
        notified.on_trust(1);
        assert!(notified.begin_flush(1).is_none());
        // The same under another id.
        for trusts_first in [true, false] {
            notified.note_write(1);
            if trusts_first {
                notified.on_trust(1);
            }
            subsystem.namespaces[0].nsid = 9;
            hosts.serve(&subsystem);
            assert_eq!(
                hosts.unreported([0xEE; 16], !trusts_first).unwrap().is_empty(),
                !trusts_first
            );
            notified.on_trust(9);
            assert!(notified.begin_flush(1).is_some() && notified.begin_flush(9).is_none());
            subsystem.namespaces[0].nsid = 1;
            hosts.serve(&subsystem);
        }
    }

    #[test]
    fn persisted_unflushed_state_fails_the_next_flush_of_its_hosts_only() {
        let (mut hosts, subsystem) = (Hosts::default(), sample());
        let uuid = subsystem.namespaces[0].uuid;
        assert_eq!(hosts.unreported(uuid, true), None);
        hosts.serve(&subsystem);
        let key = |host| (association(host).host, association(host).host_id);
        for (host, is_trusted) in [(1, true), (2, false)] {
            hosts.restore((subsystem.nqn, 1), &[key(host)], is_trusted);
        }
        assert_eq!(hosts.unreported(uuid, true), Some(vec![key(1)]));
        assert_eq!(hosts.unreported(uuid, false), Some(vec![key(1), key(2)]));
        let may_flush = |hosts: &mut Hosts, host| {
            hosts.unflushed(&association(host), &subsystem).begin_flush(1).is_some()
        };
        let outcomes = [1, 2, 3, 1].map(|host| may_flush(&mut hosts, host));
        assert_eq!(outcomes, [false, true, true, true]);
        assert_eq!(hosts.unreported(uuid, true), Some(vec![]));
    }

    #[test]
    fn unflushed_state_of_disconnected_hosts_is_retained_up_to_a_limit() {
        let (mut hosts, subsystem) = (Hosts::default(), sample());
        let here = hosts.unflushed(&association(0), &subsystem);
        hosts.unflushed(&association(1), &subsystem).note_write(1);
        for host in 2..2 * MOST_AWAY as u16 {
            drop(hosts.unflushed(&association(host), &subsystem));
        }
        assert!(hosts.hosts.len() <= MOST_AWAY + 2, "{}", hosts.hosts.len());
        assert!(!hosts.unflushed(&association(1), &subsystem).is_clean());
        for host in 2..2 * MOST_AWAY as u16 {
            hosts.unflushed(&association(host), &subsystem).note_write(1);
        }
        assert!(hosts.hosts.len() <= MOST_AWAY + 2, "{}", hosts.hosts.len());
        assert!(Arc::ptr_eq(&here, &hosts.unflushed(&association(0), &subsystem)));
    }
}
