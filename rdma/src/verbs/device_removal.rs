//! Removal of devices, failures that they report, and addresses that move to another device.
//!
//! A completion queue that has failed never has another completion, so its device is opened again.
//! A queue pair fails alone.
//!
//! For most adapters the system revokes what programs use of them, and reports that. `rdma_rxe` and
//! `siw` stay until the last program has closed them, and their removal (`rdma link delete`, an
//! interface that is removed) is reported by the connection manager only afterwards. Before that,
//! it is visible in sysfs, from which the node of the device is removed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::Verbs;
use super::cm::VerbsConnection;
use super::ffi::{CmId, DeviceKey, EventChannel, QueueKey};
use crate::{Event, Qp, Reason};

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
            self.device_lost(key, "removed");
        }
        self.look_for_failed();
        self.look_for_moved();
    }

    /// Ends the connections of devices and of queue pairs that have failed: their work may never
    /// complete.
    fn look_for_failed(&mut self) {
        let working = self.devices.iter().filter(|d| !d.removed);
        let devices: Vec<_> = working.map(|d| Arc::clone(&d.device)).collect();
        for device in devices {
            let (queues, why) = device.look_for_failures();
            if let Some(why) = why {
                self.device_lost(device.key(), why);
            } else if !queues.is_empty() {
                self.close_failed(&queues);
            }
        }
    }

    fn close_failed(&mut self, queues: &[QueueKey]) {
        let failed = |(index, connection): (usize, &Option<VerbsConnection>)| {
            let pair = connection.as_ref()?.pair.as_ref()?;
            queues.contains(&pair.key()).then_some(Qp(index as u32))
        };
        let all: Vec<Qp> = self.connections.iter().enumerate().filter_map(failed).collect();
        all.into_iter().for_each(|qp| self.close(qp, Reason::Device));
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
