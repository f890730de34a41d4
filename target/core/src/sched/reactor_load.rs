//! Receives that connections use on each reactor, by which the next one is placed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// The loads of all reactors.
#[derive(Debug)]
pub struct ReactorLoads(Vec<ReactorLoad>);

#[derive(Default, Debug)]
struct ReactorLoad {
    /// Receives in use, or requested.
    receives: AtomicU32,
    /// Those of connections that are not admitted yet, which are evicted for promised ones, or are
    /// promised ones.
    unadmitted: AtomicU32,
}

impl ReactorLoads {
    /// Of this number of reactors, without connections.
    pub fn new(reactors: usize) -> Arc<ReactorLoads> {
        Arc::new(ReactorLoads((0..reactors).map(|_| ReactorLoad::default()).collect()))
    }

    /// Returns the number of reactors, at least one.
    pub fn count(&self) -> u32 {
        self.0.len().max(1) as u32
    }

    /// Chooses the reactor with the fewest receives for a connection request, whose `receives` count
    /// there from now on: a request may wait, and many may arrive before the first is served.
    #[must_use]
    pub fn place(self: &Arc<ReactorLoads>, receives: u16) -> RequestPlace {
        let load = |(_, load): &(usize, &ReactorLoad)| load.receives.load(Ordering::Relaxed);
        let least = self.0.iter().enumerate().min_by_key(load);
        let reactor = least.map_or(0, |(index, _)| index);
        self.open(reactor, receives);
        RequestPlace { loads: Arc::clone(self), reactor, receives }
    }

    /// Counts a connection, which is not admitted yet.
    pub fn open(&self, reactor: usize, receives: u16) {
        let Some(load) = self.0.get(reactor) else { return };
        load.receives.fetch_add(receives.into(), Ordering::Relaxed);
        load.unadmitted.fetch_add(receives.into(), Ordering::Relaxed);
    }

    /// A connection is admitted, or ends without that.
    pub fn admit(&self, reactor: usize, receives: u16) {
        let Some(load) = self.0.get(reactor) else { return };
        load.unadmitted.fetch_sub(receives.into(), Ordering::Relaxed);
    }

    /// Receives are available for the next connection.
    pub fn give_back(&self, reactor: usize, receives: u16) {
        let Some(load) = self.0.get(reactor) else { return };
        load.receives.fetch_sub(receives.into(), Ordering::Relaxed);
    }

    /// Returns the receives of admitted connections on each reactor.
    pub fn admitted(&self) -> impl Iterator<Item = u32> {
        self.0.iter().map(|load| {
            let unadmitted = load.unadmitted.load(Ordering::Relaxed);
            load.receives.load(Ordering::Relaxed).saturating_sub(unadmitted)
        })
    }
}

/// The place of a connection request on its reactor, until it is opened or rejected.
#[derive(Debug)]
pub struct RequestPlace {
    loads: Arc<ReactorLoads>,
    reactor: usize,
    receives: u16,
}

impl RequestPlace {
    /// Returns the reactor.
    pub fn reactor(&self) -> usize {
        self.reactor
    }
}

impl Drop for RequestPlace {
    fn drop(&mut self) {
        self.loads.admit(self.reactor, self.receives);
        self.loads.give_back(self.reactor, self.receives);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_placed_evenly_before_they_are_opened() {
        let loads = ReactorLoads::new(3);
        loads.open(1, 32);
        loads.admit(1, 32);
        let places: Vec<_> = (0..8).map(|_| loads.place(32)).collect();
        let reactors: Vec<_> = places.iter().map(RequestPlace::reactor).collect();
        assert_eq!(reactors, [0, 2, 0, 1, 2, 0, 1, 2]);
        assert_eq!(loads.admitted().collect::<Vec<_>>(), [0, 32, 0], "nothing is admitted by that");
        drop(places);
        loads.give_back(1, 32);
        assert_eq!(loads.place(1).reactor(), 0);
        assert_eq!(loads.place(1).reactor(), 0, "the other one is gone");
    }
}
