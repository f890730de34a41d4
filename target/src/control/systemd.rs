//! Notifications to the service manager (sd_notify). Without a service manager,
//! every call does nothing.

use std::time::Duration;

use sd_notify::NotifyState;

type Notify = dyn Fn(&[NotifyState<'_>]) + Send;

/// The service manager.
pub(super) struct ServiceNotifier {
    notify: Box<Notify>,
}

impl ServiceNotifier {
    /// The service manager at `$NOTIFY_SOCKET`.
    pub(super) fn systemd() -> Self {
        Self::new(|states| {
            // Without a service manager, or after it has ended, serving continues.
            if let Err(error) = sd_notify::notify(states) {
                tracing::debug!("cannot notify the service manager: {error}");
            }
        })
    }

    /// A service manager for tests, which passes messages to `notify`.
    pub(super) fn new(notify: impl Fn(&[NotifyState<'_>]) + Send + 'static) -> Self {
        Self { notify: Box::new(notify) }
    }

    pub(super) fn ready(&self, status: &str) {
        (self.notify)(&[NotifyState::Ready, NotifyState::Status(status)]);
    }

    /// The time stamp lets a newer systemd distinguish this reload from an earlier one.
    pub(super) fn reloading(&self) {
        let mut states = vec![NotifyState::Reloading];
        states.extend(NotifyState::monotonic_usec_now());
        (self.notify)(&states);
    }

    pub(super) fn stopping(&self, status: &str) {
        (self.notify)(&[NotifyState::Stopping, NotifyState::Status(status)]);
    }

    /// Extends the time limit of the stop beyond that of the unit file.
    pub(super) fn leaving(&self, takes: Duration) {
        let usec = takes.as_micros().try_into().unwrap_or(u32::MAX);
        (self.notify)(&[
            NotifyState::Stopping,
            NotifyState::ExtendTimeoutUsec(usec),
            NotifyState::Status("leaving: hosts go on by other paths"),
        ]);
    }

    pub(super) fn status(&self, status: &str) {
        (self.notify)(&[NotifyState::Status(status)]);
    }

    pub(super) fn watchdog(&self) {
        (self.notify)(&[NotifyState::Watchdog]);
    }
}
