//! Executes Format NVM on the devices: stops I/O, erases, and changes the block size. See
//! [`crate::core::subsystem::lba_format`] for the steps and the state after a kill.
//!
//! [`FormatTask`] has the order of the steps, and borrows the devices ([`FormatDevices`]) where it
//! needs them; whoever drives it waits and erases in between. `execute` does so on a thread, with the
//! provisioner, which is locked at the beginning and at the end only: a reload is possible during
//! the erase.

use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use nvme::{Nqn, Status};
use tracing::{error, info, warn};

use super::{PATIENCE, Provisioner, wait_for_reactors};
use crate::blockdev::{BackingDevice, Health, lock};
use crate::core::message::MessageBarrier;
use crate::core::registry::Registry;
use crate::core::sched::DrainBarrier;
use crate::core::sched::offload::ConnectionWatch;
use crate::core::shared::Shared;
use crate::core::subsystem::event_log::PersistentEvent;
use crate::core::subsystem::format_job::FormatJob;
use crate::core::subsystem::lba_format::{Format, Progress};
use crate::core::subsystem::ns_request::FormatRequest;
use crate::provision::devices::ServedDevice;

/// What a format needs of those who serve the namespaces.
pub trait FormatDevices {
    /// The device of a namespace, as it is at the beginning of a format.
    type Device;

    /// The registry in which subsystems are published.
    fn registry(&self) -> &Registry;

    /// The device of a namespace, and its persisted block size; `None` if it has none.
    fn device(&self, nqn: Nqn, nsid: u32) -> Option<(Self::Device, Arc<Format>)>;

    /// Whether this is the device of the namespace still.
    fn is_served(&self, nqn: Nqn, nsid: u32, device: &Self::Device) -> bool;

    /// Gives the device blocks of this size; false if what is behind it was replaced since the
    /// beginning of the format.
    fn reformat(&mut self, device: &Self::Device, block_size_bytes: u32) -> bool;

    /// Publishes a subsystem, of which a format has begun or ended.
    fn republish(&mut self, nqn: &Nqn);
}

/// A format in progress.
#[derive(Debug)]
pub struct FormatTask<D> {
    nqn: Nqn,
    nsid: u32,
    /// The device that is erased, also after the namespace was given another one.
    device: D,
    job: FormatJob,
    /// Carries no message: it closes when the last user of the blocks drops it.
    drained: Receiver<()>,
}

/// A format that has ended, and whose outcome no reactor contradicts once it has passed the barrier.
#[derive(Debug)]
pub struct FormatCompletion {
    outcome: Result<(), Status>,
    barrier: MessageBarrier,
}

impl<D> FormatTask<D> {
    /// Stops I/O of all hosts.
    ///
    /// # Errors
    /// The status of the completion: nothing has changed.
    pub fn begin(
        nqn: Nqn,
        request: FormatRequest,
        devices: &mut impl FormatDevices<Device = D>,
    ) -> Result<FormatTask<D>, Status> {
        let nsid = request.nsid;
        let gone = Status::INVALID_NAMESPACE.with_dnr();
        let subsystem = devices.registry().subsystem(&nqn).ok_or(gone)?;
        let (device, format) = devices.device(nqn, nsid).ok_or(gone)?;
        // A reload may have changed all of this since the request. A host-created namespace that is
        // attached to no host is only in the list of allocated ones.
        let made = subsystem.management.as_ref().and_then(|m| m.allocated(nsid));
        let served = subsystem.namespace(nsid).ok().or(made.map(|made| &made.namespace));
        let namespace = served.ok_or(gone)?;
        let job = FormatJob::begin(request, namespace, &format)?;
        info!(subsystem = %nqn, nsid, "format started by a host");
        devices.republish(&nqn);
        // After the new snapshot: later commands are refused.
        let (waiting, drained) = channel();
        devices.registry().fence(&Arc::new(DrainBarrier::around(nqn, nsid, waiting)));
        Ok(FormatTask { nqn, nsid, device, job, drained })
    }

    /// Whether all earlier commands have completed.
    pub fn is_drained(&self) -> bool {
        self.drained.try_recv() == Err(TryRecvError::Disconnected)
    }

    /// Once all earlier commands have completed: the erase may begin.
    ///
    /// # Errors
    /// Nothing may be erased; [`FormatTask::finish`] takes the status.
    pub fn hold(&mut self) -> Result<(), Status> {
        debug_assert!(self.is_drained(), "erased under a command of a host");
        self.job.hold()
    }

    /// The device to erase.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The progress that hosts are reported, and whether the erase is to stop.
    pub fn progress(&self) -> &Arc<Progress> {
        self.job.progress()
    }

    /// Whether the namespace has the device still.
    pub fn is_served(&self, devices: &impl FormatDevices<Device = D>) -> bool {
        devices.is_served(self.nqn, self.nsid, &self.device)
    }

    /// Sets the requested block size after a complete erase, once it is persisted, and ends the
    /// format.
    pub fn finish(
        self,
        erased: Result<(), Status>,
        devices: &mut impl FormatDevices<Device = D>,
    ) -> FormatCompletion {
        let gone = !self.is_served(devices);
        let FormatTask { nqn, nsid, device, job, .. } = self;
        let erased = if gone { Err(Status::INVALID_NAMESPACE.with_dnr()) } else { erased };
        let outcome = job.finish(erased, |block_size_bytes| {
            if devices.reformat(&device, block_size_bytes) {
                return Ok(());
            }
            error!(
                subsystem = %nqn, nsid,
                "its backing device was replaced during the erase: format it again"
            );
            Err(Health::NOT_READY)
        });
        devices.republish(&nqn);
        let barrier = MessageBarrier::send(devices.registry().reactors());
        FormatCompletion { outcome, barrier }
    }
}

impl FormatCompletion {
    /// The outcome, once every reactor has the published state.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), Status>> {
        self.barrier.is_passed().then_some(self.outcome)
    }
}

/// Formats a namespace; returns when the format is complete on every reactor. May take long.
///
/// # Errors
/// The status of the completion; the block size is unchanged, and data may have been erased.
pub(crate) fn execute(
    nqn: Nqn,
    request: FormatRequest,
    connection: &ConnectionWatch,
    provisioner: &Mutex<Provisioner>,
    shared: &Shared,
) -> Result<(), Status> {
    let outcome = format(nqn, request, connection, provisioner, &shared.registry);
    let FormatRequest { nsid, block_size_bytes, cntlid, .. } = request;
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
    request: FormatRequest,
    connection: &ConnectionWatch,
    provisioner: &Mutex<Provisioner>,
    registry: &Registry,
) -> Result<(), Status> {
    let mut task = {
        let mut provisioner = lock(provisioner);
        // It may have waited for long.
        connection.check()?;
        FormatTask::begin(nqn, request, &mut *provisioner)?
    };
    let _ = task.drained.recv();
    let erased = task.hold().and_then(|()| {
        let progress = &**task.progress();
        let _erasing = progress.erasing();
        let stop = || progress.is_stopped() || registry.is_halting();
        task.device.backing.erase(stop, |done, of| progress.set(done, of))
    });
    let mut provisioner = lock(provisioner);
    let FormatCompletion { outcome, barrier } = task.finish(erased, &mut *provisioner);
    wait_for_reactors(barrier);
    outcome
}

/// The device of a namespace at the beginning of a format.
#[derive(Debug)]
pub struct FormattedDevice {
    store: ServedDevice,
    backing: Arc<BackingDevice>,
    bytes: u64,
}

impl FormatDevices for Provisioner {
    type Device = FormattedDevice;

    fn registry(&self) -> &Registry {
        &self.registry
    }

    fn device(&self, nqn: Nqn, nsid: u32) -> Option<(FormattedDevice, Arc<Format>)> {
        let store = self.stores.store(nqn, nsid)?.clone();
        let (backing, format) = (store.monitored.backing(), Arc::clone(&store.format));
        let bytes = backing.size_bytes();
        Some((FormattedDevice { store, backing, bytes }, format))
    }

    fn is_served(&self, nqn: Nqn, nsid: u32, device: &FormattedDevice) -> bool {
        let is_it = |other: &ServedDevice| Arc::ptr_eq(&other.monitored, &device.store.monitored);
        self.stores.store(nqn, nsid).is_some_and(is_it)
    }

    fn reformat(&mut self, device: &FormattedDevice, block_size_bytes: u32) -> bool {
        let FormattedDevice { store, backing, bytes } = device;
        backing.size_bytes() == *bytes && store.monitored.reformat(backing, block_size_bytes)
    }

    fn republish(&mut self, nqn: &Nqn) {
        self.publish_again(nqn);
    }
}

#[cfg(test)]
pub(in crate::provision) mod tests;
