//! Listeners of a change that is not committed yet. Listening may fail, so it precedes the commit:
//! a host that requests a connection there meanwhile is held, and then served under the new
//! configuration, or rejected.

use std::net::SocketAddr;

use crate::subsystem::ListenerConfig;

use super::{ControllerTable, Registry};

/// State of the listener of a connection request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Reached {
    /// It is in force.
    InForce,
    /// It is prepared; the commit is not decided.
    Prepared,
    /// There is none, or no longer.
    Nobody,
}

impl Registry {
    /// Prepares a listener at an address: until a change has it, or this is withdrawn, connection
    /// requests there are to be held.
    pub fn prepare_listener(&self, at: SocketAddr) {
        let mut table = self.lock();
        if !table.prepared.iter().any(|listener| listener.address == at) {
            table.prepared.push(at.into());
        }
    }

    /// Withdraws prepared listeners at these addresses.
    pub fn withdraw_listeners(&self, at: &[SocketAddr]) {
        self.lock().prepared.retain(|listener| !at.contains(&listener.address));
        self.wake_reactors();
    }

    /// The listener state for a connection request at `local`.
    pub fn reached(&self, local: SocketAddr) -> Reached {
        let table = self.lock();
        if table.listeners.is_none() || table.listener(local).is_some() {
            return Reached::InForce;
        }
        match ListenerConfig::of(&table.prepared, local) {
            Some(_) => Reached::Prepared,
            None => Reached::Nobody,
        }
    }
}

impl ControllerTable {
    /// Removes prepared listeners that are active now.
    pub(super) fn settle_prepared(&mut self, listeners: &[ListenerConfig]) {
        let is_in_force = |at| listeners.iter().any(|listener| listener.address == at);
        self.prepared.retain(|listener| !is_in_force(listener.address));
    }
}

#[cfg(test)]
mod tests {
    use crate::registry::prepared::*;
    use crate::registry::tests::registry;

    #[test]
    fn a_prepared_listener_is_activated_by_a_change_or_withdrawn() {
        let registry = registry();
        let at = |text: &str| -> SocketAddr { text.parse().unwrap() };
        let [old, new, other] = ["192.0.2.1:4420", "192.0.2.2:4420", "192.0.2.3:4420"].map(at);
        registry.set_listeners(vec![old.into()]);
        let all = || [old, new, other].map(|local| registry.reached(local));
        registry.prepare_listener(at("0.0.0.0:4420"));
        assert_eq!(all(), [Reached::InForce, Reached::Prepared, Reached::Prepared]);
        registry.withdraw_listeners(&[at("0.0.0.0:4420")]);
        assert_eq!(all(), [Reached::InForce, Reached::Nobody, Reached::Nobody]);

        [new, new, other].into_iter().for_each(|at| registry.prepare_listener(at));
        assert_eq!(registry.addresses(), [old], "nobody is told");
        registry.set_listeners(vec![old.into(), new.into()]);
        assert_eq!(all(), [Reached::InForce, Reached::InForce, Reached::Prepared]);
        registry.set_listeners(vec![old.into()]);
        assert_eq!(all(), [Reached::InForce, Reached::Nobody, Reached::Prepared]);
    }
}
