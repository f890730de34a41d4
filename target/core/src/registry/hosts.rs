//! State of hosts beyond their controllers: unflushed writes.

use std::collections::BTreeMap;
use std::sync::Arc;

use nvme::Nqn;

use crate::controller::association::Association;
use crate::subsystem::Subsystem;
use crate::subsystem::unflushed::Unflushed;

/// Maximum of remembered hosts with unflushed writes and no controller.
const MOST_AWAY: usize = 1024;

/// A subsystem, the name of a host, and the identifier that it gave.
type Key = (Nqn, Nqn, [u8; 16]);

/// State shared by all controllers of a host.
#[derive(Debug, Default)]
pub(super) struct Hosts(BTreeMap<Key, Arc<Unflushed>>);

impl Hosts {
    /// The state that a new association shares with others of its host, present or past.
    pub(super) fn unflushed(
        &mut self,
        association: &Association,
        subsystem: &Subsystem,
    ) -> Arc<Unflushed> {
        let key = (association.subsystem, association.host, association.host_id);
        if let Some(known) = self.0.get(&key) {
            return Arc::clone(known);
        }
        self.make_room();
        let new = Arc::new(Unflushed::default());
        // It may have been there before the daemon was.
        for namespace in &subsystem.namespaces {
            if namespace.health.sync_failure().is_some() {
                new.presume_written(namespace.nsid);
            }
        }
        self.0.insert(key, Arc::clone(&new));
        new
    }

    /// All hosts of a subsystem.
    pub(super) fn of<'a>(&'a self, nqn: &'a Nqn) -> impl Iterator<Item = &'a Unflushed> {
        self.0.iter().filter(move |((of, ..), _)| of == nqn).map(|(_, host)| &**host)
    }

    /// Removes hosts without a controller: first those that have flushed everything.
    fn make_room(&mut self) {
        let is_away = |host: &Arc<Unflushed>| Arc::strong_count(host) == 1;
        if self.0.values().filter(|host| is_away(host)).count() < MOST_AWAY {
            return;
        }
        self.0.retain(|_, host| !is_away(host) || !host.is_clean());
        while self.0.values().filter(|host| is_away(host)).count() >= MOST_AWAY {
            let Some(key) = self.0.iter().find(|(_, host)| is_away(host)).map(|(key, _)| *key)
            else {
                return;
            };
            self.0.remove(&key);
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

    #[test]
    fn unflushed_state_of_disconnected_hosts_is_retained_up_to_a_limit() {
        let (mut hosts, subsystem) = (Hosts::default(), sample());
        let here = hosts.unflushed(&association(0), &subsystem);
        hosts.unflushed(&association(1), &subsystem).note_write(1);
        for host in 2..2 * MOST_AWAY as u16 {
            drop(hosts.unflushed(&association(host), &subsystem));
        }
        assert!(hosts.0.len() <= MOST_AWAY + 2, "{}", hosts.0.len());
        assert!(!hosts.unflushed(&association(1), &subsystem).is_clean());
        for host in 2..2 * MOST_AWAY as u16 {
            hosts.unflushed(&association(host), &subsystem).note_write(1);
        }
        assert!(hosts.0.len() <= MOST_AWAY + 2, "{}", hosts.0.len());
        assert!(Arc::ptr_eq(&here, &hosts.unflushed(&association(0), &subsystem)));
    }
}
