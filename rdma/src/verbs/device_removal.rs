//! Removal of devices, and addresses that move to another device.
//!
//! For most adapters the system revokes what programs use of them, and reports that. `rdma_rxe` and
//! `siw` stay until the last program has closed them, and their removal (`rdma link delete`, an
//! interface that is removed) is reported by the connection manager only afterwards. Before that,
//! it is visible in sysfs, from which the node of the device is removed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Verbs;
use super::ffi::{CmId, DeviceKey, EventChannel};
use crate::Event;

/// Interval of the check.
const INTERVAL: Duration = Duration::from_secs(1);

impl Verbs {
    /// Ends the connections of devices that are being removed; each is closed after its last one.
    pub(super) fn look_for_removed(&mut self) {
        if self.now < self.next_device_check {
            return;
        }
        self.next_device_check = self.now + INTERVAL;
        let working = self.devices.iter().filter(|d| !d.removed);
        let gone = working.filter(|d| d.device.is_gone()).map(|d| d.device.key());
        for key in gone.collect::<Vec<_>>() {
            self.device_lost(key);
        }
        self.look_for_moved();
    }

    /// Ends listeners whose address belongs to another device now: a listener stays with its
    /// device, and requests arrive at the other one.
    fn look_for_moved(&mut self) {
        let channel = &self.channel;
        let moved = self.listeners.extract_if(.., |(at, listener)| {
            let owner = (!at.ip().is_unspecified()).then(|| owner(channel, *at)).flatten();
            owner.is_some_and(|owner| listener.device() != Some(owner))
        });
        for (at, _) in moved {
            tracing::warn!(%at, "another RDMA device has the address of this listener");
            self.ready.push_back(Event::ListenerLost(at));
        }
    }
}

/// The device that has an address now.
fn owner(channel: &Arc<EventChannel>, mut at: SocketAddr) -> Option<DeviceKey> {
    at.set_port(0);
    let id = CmId::new(channel).ok()?;
    id.bind(at).ok()?;
    id.device()
}
