//! Asynchronous events of a device: failures that no completion reports, and the state of its
//! ports. The kernel keeps those that nobody reads.

use std::ffi::c_int;
use std::sync::PoisonError;

use nix::errno::Errno;

use super::check;
use super::device::Context;
use super::types::{Element, ibv_async_event, ibv_event_type as t};

/// Maximum of events read at once.
const EVENTS_AT_ONCE: usize = 256;

/// Identifies a queue pair or a completion queue while it exists; never dereferenced.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct QueueKey(pub(super) usize);

/// An asynchronous event (IBTA volume 1, 11.6.3 "Asynchronous Events").
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum AsyncEvent {
    /// A queue pair or a completion queue has failed: its work may never complete.
    QueueFailed(QueueKey),
    /// The device as a whole has failed.
    DeviceFailed,
    /// The port of this number can send and receive, or no longer.
    Port { number: c_int, active: bool },
    /// Any other, by its number. Errors of a queue pair that a request of the peer has caused are
    /// among them: all its work completes as flushed, which ends the connection with its reason.
    Other(u32),
}

impl AsyncEvent {
    fn new(number: u32, object: usize, port: c_int) -> AsyncEvent {
        match number {
            t::IBV_EVENT_QP_FATAL | t::IBV_EVENT_CQ_ERR => {
                AsyncEvent::QueueFailed(QueueKey(object))
            }
            t::IBV_EVENT_DEVICE_FATAL => AsyncEvent::DeviceFailed,
            t::IBV_EVENT_PORT_ACTIVE | t::IBV_EVENT_PORT_ERR => {
                AsyncEvent::Port { number: port, active: number == t::IBV_EVENT_PORT_ACTIVE }
            }
            other => AsyncEvent::Other(other),
        }
    }
}

/// What has failed of a device. All its users read its events, each also those of the others, so
/// failures are kept until the failed object is destroyed.
#[derive(Default, Debug)]
pub(super) struct Failures {
    queues: Vec<QueueKey>,
    /// Number of failures of the device as a whole.
    device: u32,
}

impl Failures {
    fn note(&mut self, event: AsyncEvent) {
        match event {
            AsyncEvent::QueueFailed(key) if !self.queues.contains(&key) => self.queues.push(key),
            AsyncEvent::DeviceFailed => self.device = self.device.wrapping_add(1),
            _ => {}
        }
    }

    fn forget(&mut self, key: QueueKey) {
        self.queues.retain(|failed| *failed != key);
    }
}

impl Context {
    /// Reads events, keeps failures, and passes each event on.
    pub(crate) fn read_events(&self, mut each: impl FnMut(AsyncEvent)) {
        for _ in 0..EVENTS_AT_ONCE {
            // One that cannot be read is of a removed device.
            let Ok(Some(event)) = self.next_event() else { return };
            each(event);
        }
    }

    fn next_event(&self) -> Result<Option<AsyncEvent>, Errno> {
        if !self.has_events {
            return Ok(None);
        }
        let element = Element { object: std::ptr::null_mut() };
        let mut raw = ibv_async_event { element, event_type: u32::MAX };
        // SAFETY: the context is live while the list is; `raw` is a place for one event.
        match check(unsafe { (self.list.api.ibv_get_async_event)(self.raw.as_ptr(), &mut raw) }) {
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            other => other?,
        }
        // SAFETY: all bytes of the union were initialised above; either field is plain bits.
        let (object, port) = unsafe { (raw.element.object as usize, raw.element.port_num) };
        let event = AsyncEvent::new(raw.event_type, object, port);
        // Before the acknowledgement, for which the destruction of the object waits: so nothing is
        // kept of an object that is destroyed.
        self.note(event);
        // SAFETY: the event is unchanged and acknowledged once; its object exists until then.
        unsafe { (self.list.api.ibv_ack_async_event)(&mut raw) };
        Ok(Some(event))
    }

    /// Keeps a failure.
    pub(crate) fn note(&self, event: AsyncEvent) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).note(event);
    }

    /// The object was destroyed: another one may get its key.
    pub(super) fn forget(&self, key: QueueKey) {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner).forget(key);
    }

    /// Queue pairs and completion queues that have failed and exist, and how often the device as a
    /// whole has failed.
    pub(crate) fn failures(&self) -> (Vec<QueueKey>, u32) {
        let failures = self.failures.lock().unwrap_or_else(PoisonError::into_inner);
        (failures.queues.clone(), failures.device)
    }
}

#[cfg(test)]
mod tests {
    use crate::verbs::ffi::async_event::*;

    #[test]
    fn only_failures_without_completions_are_failures_of_queues() {
        let of = |number| AsyncEvent::new(number, 0x1000, 2);
        let failed = AsyncEvent::QueueFailed(QueueKey(0x1000));
        assert_eq!([of(t::IBV_EVENT_CQ_ERR), of(t::IBV_EVENT_QP_FATAL)], [failed; 2]);
        assert_eq!(of(t::IBV_EVENT_DEVICE_FATAL), AsyncEvent::DeviceFailed);
        let port = |active| AsyncEvent::Port { number: 2, active };
        assert_eq!(of(t::IBV_EVENT_PORT_ERR), port(false));
        assert_eq!(of(t::IBV_EVENT_PORT_ACTIVE), port(true));
        for other in [
            t::IBV_EVENT_QP_REQ_ERR,
            t::IBV_EVENT_QP_ACCESS_ERR,
            t::IBV_EVENT_COMM_EST,
            t::IBV_EVENT_GID_CHANGE,
        ] {
            assert_eq!(of(other), AsyncEvent::Other(other));
        }
        assert_eq!(AsyncEvent::new(u32::MAX, 1, 1), AsyncEvent::Other(u32::MAX));
    }

    #[test]
    fn failures_are_kept_once_until_their_object_is_destroyed() {
        let mut failures = Failures::default();
        let [one, other] = [1, 2].map(QueueKey);
        for event in [one, other, one].map(AsyncEvent::QueueFailed) {
            failures.note(event);
        }
        assert_eq!(failures.queues, [one, other]);
        failures.forget(one);
        failures.note(AsyncEvent::Port { number: 1, active: false });
        failures.note(AsyncEvent::Other(4));
        assert_eq!((&*failures.queues, failures.device), (&[other][..], 0));
        failures.note(AsyncEvent::QueueFailed(one));
        failures.note(AsyncEvent::DeviceFailed);
        assert_eq!((&*failures.queues, failures.device), (&[other, one][..], 1));
    }
}
