//! Executes Format NVM on the devices: stops I/O, erases, and changes the block size. See
//! [`crate::core::subsystem::lba_format`] for the steps and the state after a kill; this thread waits and
//! erases between them.
//!
//! The provisioner is locked at the beginning and at the end only: a reload is possible during the erase.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nvme::{Nqn, Status};
use tracing::{error, info, warn};

use super::{PATIENCE, Provisioner};
use crate::blockdev::{BackingDevice, Health};
use crate::core::registry::Registry;
use crate::core::sched::DrainBarrier;
use crate::core::shared::Shared;
use crate::core::subsystem::event_log::PersistentEvent;
use crate::core::subsystem::format_job::FormatJob;
use crate::core::subsystem::ns_request::FormatRequest;
use crate::provision::devices::ServedDevice;

/// A format in progress.
struct StartedFormat {
    store: ServedDevice,
    /// The device that is erased, also after the namespace was given another one.
    backing: Arc<BackingDevice>,
    bytes: u64,
    course: FormatJob,
}

/// Formats a namespace; returns when the format is complete on every reactor. May take long.
///
/// # Errors
/// The status of the completion; the block size is unchanged, and data may have been erased.
pub(crate) fn execute(
    nqn: Nqn,
    wish: FormatRequest,
    provisioner: &Mutex<Provisioner>,
    shared: &Shared,
) -> Result<(), Status> {
    let outcome = format(nqn, wish, provisioner, &shared.registry);
    let FormatRequest { nsid, block_size_bytes, cntlid, .. } = wish;
    match outcome {
        Ok(()) => info!(subsystem = %nqn, nsid, block_size_bytes, "namespace formatted"),
        Err(status) => warn!(subsystem = %nqn, nsid, %status, "namespace not formatted"),
    }
    let subsystem = shared.registry.subsystem(&nqn);
    if let Some(history) = subsystem.as_ref().and_then(|subsystem| subsystem.usage.history()) {
        let status = outcome.err().unwrap_or(Status::SUCCESS);
        let happening = PersistentEvent::FormatCompletion { cntlid, nsid, status };
        history.note(happening, &shared.power.at(Instant::now()));
    }
    outcome
}

/// Ends formats of removed devices before their removal is reported, since their owner may reuse
/// them then. Waits at most [`PATIENCE`] for devices that hang.
pub(super) fn interrupt<'a>(gone: impl Iterator<Item = &'a ServedDevice>) {
    let under_way: Vec<_> = gone.filter_map(|store| store.format.under_way()).collect();
    under_way.iter().for_each(|progress| progress.stop());
    let deadline = Instant::now() + PATIENCE;
    let left = || deadline.saturating_duration_since(Instant::now());
    if !under_way.iter().all(|progress| progress.wait_until_idle(left())) {
        warn!("a removed namespace is still being erased: its device does not respond");
    }
}

fn format(
    nqn: Nqn,
    wish: FormatRequest,
    provisioner: &Mutex<Provisioner>,
    registry: &Registry,
) -> Result<(), Status> {
    let (waiting, drained) = channel();
    let mut begun = lock(provisioner).begin(nqn, wish, waiting)?;
    // The channel carries no message: it closes when the last user of the blocks drops it.
    let _ = drained.recv();
    let erased = begun.course.hold().and_then(|()| {
        let progress = &**begun.course.progress();
        let _erasing = progress.erasing();
        let stop = || progress.is_stopped() || registry.is_halting();
        begun.backing.erase(stop, |done, of| progress.set(done, of))
    });
    let mut provisioner = lock(provisioner);
    let outcome = provisioner.finish(nqn, wish.nsid, begun, erased);
    provisioner.publish_again(&nqn);
    provisioner.wait_for_reactors();
    outcome
}

impl Provisioner {
    /// Stops I/O of all hosts; `waiting` closes when earlier commands have completed.
    fn begin(
        &mut self,
        nqn: Nqn,
        wish: FormatRequest,
        waiting: Sender<()>,
    ) -> Result<StartedFormat, Status> {
        let nsid = wish.nsid;
        let gone = Status::INVALID_NAMESPACE.with_dnr();
        let subsystem = self.registry.subsystem(&nqn).ok_or(gone)?;
        let store = self.stores.store(nqn, nsid).ok_or(gone)?.clone();
        // A reload may have changed all of this since the request. A host-created namespace that is
        // attached to no host is only in the list of allocated ones.
        let made = subsystem.management.as_ref().and_then(|m| m.allocated(nsid));
        let served = subsystem.namespace(nsid).ok().or(made.map(|made| &made.namespace));
        let namespace = served.ok_or(gone)?;
        let course = FormatJob::begin(wish, namespace, &store.format)?;
        info!(subsystem = %nqn, nsid, "format started by a host");
        self.publish_again(&nqn);
        // After the new snapshot: later commands are refused.
        self.registry.fence(&Arc::new(DrainBarrier::around(nqn, nsid, waiting)));
        let backing = store.monitored.backing();
        let bytes = backing.size_bytes();
        Ok(StartedFormat { store, backing, bytes, course })
    }

    /// Sets the requested block size after a complete erase, once it is persisted.
    fn finish(
        &mut self,
        nqn: Nqn,
        nsid: u32,
        begun: StartedFormat,
        erased: Result<(), Status>,
    ) -> Result<(), Status> {
        let StartedFormat { store, backing, bytes, course } = begun;
        let is_it = |other: &ServedDevice| Arc::ptr_eq(&other.monitored, &store.monitored);
        let gone = !self.stores.store(nqn, nsid).is_some_and(is_it);
        let erased = if gone { Err(Status::INVALID_NAMESPACE.with_dnr()) } else { erased };
        course.finish(erased, |block_size_bytes| {
            let same = backing.size_bytes() == bytes;
            if same && store.monitored.reformat(&backing, block_size_bytes) {
                return Ok(());
            }
            error!(
                subsystem = %nqn, nsid,
                "its backing device was replaced during the erase: format it again"
            );
            Err(Health::NOT_READY)
        })
    }
}

fn lock(provisioner: &Mutex<Provisioner>) -> MutexGuard<'_, Provisioner> {
    provisioner.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
