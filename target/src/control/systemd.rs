//! Notifications to the service manager (sd_notify). Without a service manager,
//! every call does nothing.

use std::time::Duration;

use sd_notify::NotifyState;

type Tell = dyn Fn(&[NotifyState<'_>]) + Send;

/// The service manager.
pub(super) struct ServiceNotifier {
    tell: Box<Tell>,
}

impl ServiceNotifier {
    /// The one that the environment names.
    pub(super) fn systemd() -> Self {
        Self::new(|states| {
            // Nobody to tell, or gone away: serving goes on.
            if let Err(error) = sd_notify::notify(states) {
                tracing::debug!("cannot notify the service manager: {error}");
            }
        })
    }

    /// One that gets every message through `tell`.
    pub(super) fn new(tell: impl Fn(&[NotifyState<'_>]) + Send + 'static) -> Self {
        Self { tell: Box::new(tell) }
    }

    pub(super) fn ready(&self, status: &str) {
        (self.tell)(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The time stamp is what lets a newer systemd tell this reload from an earlier one.
    pub(super) fn reloading(&self) {
        let mut states = vec![NotifyState::Reloading];
        states.extend(NotifyState::monotonic_usec_now());
        (self.tell)(&states);
    }

    pub(super) fn stopping(&self, status: &str) {
        (self.tell)(&[NotifyState::Stopping, NotifyState::Status(status)]);
    }

    /// Stopping takes so long, on top of what the unit file says.
    pub(super) fn leaving(&self, takes: Duration) {
        let usec = takes.as_micros().try_into().unwrap_or(u32::MAX);
        (self.tell)(&[
            NotifyState::Stopping,
            NotifyState::ExtendTimeoutUsec(usec),
            NotifyState::Status("leaving: hosts go on by other paths"),
        ]);
    }

    pub(super) fn status(&self, status: &str) {
        (self.tell)(&[NotifyState::Status(status)]);
    }

    pub(super) fn watchdog(&self) {
        (self.tell)(&[NotifyState::Watchdog]);
    }
}
