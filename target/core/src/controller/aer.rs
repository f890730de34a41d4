//! Asynchronous events of one controller: pending, masked, and outstanding requests.
//!
//! Source: NVMe Base Specification 2.0, "Asynchronous Event Request command". A reported event
//! stays masked until its log page is read with RAE = 0; events of the same kind in between are
//! reported once after that.

use std::collections::{BTreeSet, VecDeque};

use nvme::feature::AsyncEvent;

/// Maximum of outstanding requests: AERL + 1.
pub(crate) const REQUESTS: usize = 4;

/// Maximum of ids in the Changed Namespace List; above that, it reports "all".
const CHANGED_MAX: usize = 1024;

/// An event that we raise.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Event {
    /// The controller has a fatal error: log page 01h. Before all others.
    Fatal,
    /// A backing store is degraded: log page 02h.
    Reliability,
    /// The namespaces have changed: log page 04h.
    NamespaceAttribute,
    /// Groups of namespaces are reached in another way: log page 0Ch.
    Ana,
    /// The discovery log has changed: log page 70h.
    DiscoveryLog,
    /// The log of reservations has a page: log page 80h.
    ReservationLog,
}

impl Event {
    /// Its bit in Asynchronous Event Configuration (and OAES); 0 for an event that is always
    /// enabled, because it has a mask of its own (feature 82h) or none.
    pub(crate) fn enable_bit(self) -> u32 {
        match self {
            // The critical warning of the same bit.
            Event::Reliability => 1 << 2,
            Event::NamespaceAttribute => 1 << 8,
            Event::Ana => 1 << 11,
            Event::DiscoveryLog => 1 << 31,
            Event::Fatal | Event::ReservationLog => 0,
        }
    }

    /// Dword 0 of the completion: type, information, log page.
    pub fn dw0(self) -> u32 {
        match self {
            Event::Fatal => AsyncEvent::PERSISTENT_INTERNAL_ERROR.0,
            Event::Reliability => AsyncEvent::SUBSYSTEM_RELIABILITY.0,
            Event::NamespaceAttribute => AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED.0,
            Event::Ana => AsyncEvent::ANA_CHANGE.0,
            Event::DiscoveryLog => AsyncEvent::DISCOVERY_LOG_CHANGE.0,
            Event::ReservationLog => AsyncEvent::RESERVATION_LOG_AVAILABLE.0,
        }
    }

    fn is_enabled(self, config: u32) -> bool {
        self.enable_bit() == 0 || config & self.enable_bit() != 0
    }
}

/// The event state of one controller.
#[derive(Debug, Default)]
pub struct AsyncEvents {
    /// Slots of the outstanding requests, oldest first.
    parked: VecDeque<u16>,
    pending: BTreeSet<Event>,
    masked: BTreeSet<Event>,
    changed: BTreeSet<u32>,
}

impl AsyncEvents {
    /// Resets for a controller reset: nothing is pending or masked. Outstanding requests stay
    /// parked until `AsyncEvents::take_parked`.
    pub fn reset(&mut self) {
        *self = AsyncEvents { parked: std::mem::take(&mut self.parked), ..AsyncEvents::default() };
    }

    /// Removes all outstanding requests: their slots, oldest first.
    pub(crate) fn take_parked(&mut self) -> impl Iterator<Item = u16> {
        std::mem::take(&mut self.parked).into_iter()
    }

    /// Keeps a request until there is an event; false when the host has too many outstanding.
    pub(crate) fn park(&mut self, slot: u16) -> bool {
        if self.parked.len() == REQUESTS {
            return false;
        }
        self.parked.push_back(slot);
        true
    }

    /// Takes back a request that ends without an event (aborted); false when it is not parked.
    pub(crate) fn unpark(&mut self, slot: u16) -> bool {
        let before = self.parked.len();
        self.parked.retain(|s| *s != slot);
        self.parked.len() != before
    }

    /// Records changed namespaces and raises the event.
    pub(crate) fn namespaces_changed(&mut self, nsids: impl IntoIterator<Item = u32>) {
        let before = self.changed.len();
        self.changed.extend(nsids);
        if self.changed.len() != before || self.masked.contains(&Event::NamespaceAttribute) {
            self.pending.insert(Event::NamespaceAttribute);
        }
    }

    /// Whether the host was told that this namespace has changed, and has not read so.
    pub(crate) fn has_changed(&self, nsid: u32) -> bool {
        self.changed.contains(&nsid)
    }

    /// Raises the event of groups of namespaces.
    pub(crate) fn ana_changed(&mut self) {
        self.pending.insert(Event::Ana);
    }

    /// Raises the event that a store is no longer as it should be.
    pub(crate) fn reliability_degraded(&mut self) {
        self.pending.insert(Event::Reliability);
    }

    /// Raises the event of a fatal error.
    pub fn failed(&mut self) {
        self.pending.insert(Event::Fatal);
    }

    /// Raises the discovery event.
    pub(crate) fn discovery_changed(&mut self) {
        self.pending.insert(Event::DiscoveryLog);
    }

    /// Raises the event of the reservation log.
    pub(crate) fn reservation_noticed(&mut self) {
        self.pending.insert(Event::ReservationLog);
    }

    /// Whether the host has read of all changed namespaces.
    pub(crate) fn is_up_to_date(&self) -> bool {
        self.changed.is_empty()
    }

    /// Ids for log page 04h, or none when there are too many to name.
    pub fn changed(&self) -> Option<impl Iterator<Item = u32> + '_> {
        (self.changed.len() <= CHANGED_MAX).then(|| self.changed.iter().copied())
    }

    /// The host has read an event's log page with RAE = 0.
    pub fn acknowledge(&mut self, event: Event) {
        self.masked.remove(&event);
        if event == Event::NamespaceAttribute {
            self.changed.clear();
        }
        if matches!(event, Event::NamespaceAttribute | Event::Ana) {
            // The page that was just read contains everything pending.
            self.pending.remove(&event);
        }
    }

    /// The next completion to send: slot and dword 0. `enabled` is the configuration feature.
    pub fn next(&mut self, enabled: u32) -> Option<(u16, u32)> {
        let &slot = self.parked.front()?;
        let event = self
            .pending
            .iter()
            .copied()
            .find(|e| e.is_enabled(enabled) && !self.masked.contains(e))?;
        self.parked.pop_front();
        self.pending.remove(&event);
        self.masked.insert(event);
        Some((slot, event.dw0()))
    }
}

#[cfg(test)]
mod tests {
    use crate::controller::aer::*;

    const ALL: u32 = u32::MAX;

    #[test]
    fn an_event_is_pending_until_requested_and_reported_once() {
        let mut events = AsyncEvents::default();
        events.namespaces_changed([3, 1]);
        assert_eq!(events.next(ALL), None, "nobody asks");
        assert!(events.park(5) && events.park(6));
        assert_eq!(events.next(0), None, "not enabled");
        assert_eq!(events.next(ALL), Some((5, 0x040002)));
        events.namespaces_changed([9]);
        assert_eq!(events.next(ALL), None, "masked until the log is read");
        assert_eq!(events.changed().unwrap().collect::<Vec<_>>(), [1, 3, 9]);
        events.acknowledge(Event::NamespaceAttribute);
        assert_eq!(events.next(ALL), None, "the page that was read told it");
        events.namespaces_changed([2]);
        assert_eq!(events.next(ALL), Some((6, 0x040002)));
    }

    #[test]
    fn a_pending_event_does_not_mask_other_event_types() {
        let mut events = AsyncEvents::default();
        assert!(events.park(1) && events.park(2));
        events.namespaces_changed([1]);
        assert!(events.next(ALL).is_some());
        events.discovery_changed();
        assert_eq!(events.next(ALL), Some((2, 0x70F002)));
        // Reservations have no bit in the configuration.
        assert!(events.park(3) && events.park(4));
        events.reservation_noticed();
        assert_eq!(events.next(0), Some((3, 0x800006)));
        events.reservation_noticed();
        assert_eq!(events.next(0), None, "masked until the log is read");
        events.acknowledge(Event::ReservationLog);
        assert_eq!(events.next(0), Some((4, 0x800006)));
    }

    #[test]
    fn requests_and_changed_ids_are_bounded() {
        let mut events = AsyncEvents::default();
        for slot in 0..REQUESTS {
            assert!(events.park(slot as u16));
        }
        assert!(!events.park(9));
        assert!(events.unpark(0) && !events.unpark(0));
        events.namespaces_changed(1..=1025);
        assert!(events.changed().is_none());
    }
}
