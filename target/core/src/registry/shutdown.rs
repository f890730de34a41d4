//! Drains all hosts before the target stops.

use std::sync::atomic::Ordering;

use nvme::log::AnaState;

use super::Registry;
use crate::diag::cause::Cause;
use crate::subsystem::ListenerConfig;
use crate::subsystem::ana::AnaStates;

impl Registry {
    /// Begins the shutdown towards hosts: every path becomes inaccessible, and discovery reports no
    /// subsystem. Commands in progress continue, and nobody is disconnected.
    pub fn leave(&self) {
        self.halt();
        {
            let mut table = self.lock();
            let leaving = |listener: &ListenerConfig| ListenerConfig {
                ana: AnaStates::all(AnaState::INACCESSIBLE),
                ..*listener
            };
            let listeners: Vec<_> = table.listeners().iter().map(leaving).collect();
            table.move_paths(&listeners, Cause::ListenerRemoved);
            table.leaving = true;
            table.generation += 1;
        }
        self.announce_discovery();
    }

    /// Stops long operations ordered by hosts: the target is about to stop.
    pub fn halt(&self) {
        self.halting.store(true, Ordering::Relaxed);
    }

    /// Whether long operations shall end.
    pub fn is_halting(&self) -> bool {
        self.halting.load(Ordering::Relaxed)
    }

    /// Whether the target is about to stop.
    pub fn is_leaving(&self) -> bool {
        self.lock().leaving
    }

    /// Whether any host has a controller that is not one of discovery.
    pub fn has_hosts(&self) -> bool {
        self.lock().associations.values().any(|entry| entry.view.is_some())
    }
}

#[cfg(test)]
mod tests {
    use nvme::Status;
    use nvme::log::AnaState;

    use crate::registry::tests::{connect_host, records, registry};
    use crate::subsystem::ListenerConfig;
    use crate::subsystem::ana::AnaStates;

    #[test]
    fn a_leaving_target_is_inaccessible_and_disconnects_no_host() {
        let registry = registry();
        assert!(!registry.has_hosts());
        let host = connect_host(&registry);
        assert!(registry.has_hosts());
        assert_eq!(registry.connected(), (1, 1));
        assert_eq!(host.reach.check(1), Ok(()));
        let (before, told) = records(&registry);
        registry.leave();
        assert_eq!(host.reach.check(1).map_err(Status::code), Err(0x302));
        assert!(registry.is_leaving() && registry.is_halting() && !host.is_closed());
        let (after, left) = records(&registry);
        assert!(after > before, "who watches discovery sees that it has changed");
        assert_eq!((told, left), (1, 0), "subsystems");
        // A later host gets the same, and an address that is added later changes nothing.
        registry.set_listeners(vec![ListenerConfig::from(host.local)]);
        assert_eq!(host.reach.check(1).map_err(Status::code), Err(0x302));
        assert_eq!(connect_host(&registry).reach.check(1).map_err(Status::code), Err(0x302));
    }

    #[test]
    fn a_gateway_group_restricts_the_states_of_all_listeners() {
        let registry = registry();
        let before = connect_host(&registry);
        let mut states = AnaStates::all(AnaState::INACCESSIBLE);
        states.set(2, AnaState::OPTIMIZED);
        registry.set_gateway_states(states);
        let after = connect_host(&registry);
        let mut listener = ListenerConfig::from(before.local);
        listener.ana.set(2, AnaState::NON_OPTIMIZED);
        registry.set_listeners(vec![listener]);
        for host in [&before, &after] {
            assert_eq!(host.reach.states().state(1), AnaState::INACCESSIBLE);
            assert_eq!(host.reach.check(2), Ok(()));
        }
        assert_eq!(before.reach.states().state(2), AnaState::NON_OPTIMIZED);
        registry.set_gateway_states(AnaStates::default());
        assert_eq!(before.reach.states(), listener.ana);
    }
}
