//! Values of features.

use nvme::feature::{AsyncEventConfig, HostBehavior, WriteAtomicity};

/// Feature values of one controller that live nowhere else. They return to their defaults with a
/// controller reset.
#[derive(Clone, Debug, Default)]
pub struct Features {
    pub(crate) write_atomicity: WriteAtomicity,
    pub(crate) async_events: AsyncEventConfig,
    pub(crate) host_behavior: HostBehavior,
}

impl Features {
    /// Asynchronous Event Configuration: the events that
    /// [`crate::controller::aer::AsyncEvents::next`] may report.
    pub fn async_event_config(&self) -> u32 {
        self.async_events.0
    }
}
