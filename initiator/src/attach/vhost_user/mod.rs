//! The export to a virtual machine: virtio-blk by the vhost-user protocol, over a Unix socket.
//!
//! The guest's memory is mapped here, and its queues are polled by the same thread that drives the
//! paths; data are copied once, between the guest's memory and the buffers that the target reads
//! and writes. A message of the front-end is handled when no request is under way: so memory and queues
//! never change below a request, and a queue that is stopped has answered all that it took.

mod channel;
mod device;
#[cfg(test)]
mod tests;
mod vring;

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;

use tracing::{info, warn};

pub(super) use device::{CONNECTION, DeviceProperties, Resources};

use channel::{Channel, ChannelError};
use device::Device;
use vring::Vring;

/// A front-end, and the device that it has set up.
struct FrontEnd {
    channel: Channel,
    device: Device,
    /// There is a message to read.
    has_message: bool,
}

/// The export.
pub(super) struct VhostUser {
    listener: Option<UnixListener>,
    front_end: Option<FrontEnd>,
    /// The size that the front-end may know.
    size_bytes: u64,
    /// Requests of the table.
    requests: usize,
    /// No more requests are taken.
    is_ending: bool,
}

impl VhostUser {
    /// For a socket, and so many requests in the table.
    pub(super) fn new(listener: UnixListener, requests: usize) -> VhostUser {
        VhostUser {
            listener: Some(listener),
            front_end: None,
            size_bytes: 0,
            requests,
            is_ending: false,
        }
    }

    /// Returns the descriptor of the front-end, or of the listener for one.
    pub(super) fn control_descriptor(&self) -> Option<BorrowedFd<'_>> {
        match &self.front_end {
            // What is to be read waits for the requests that are under way.
            Some(it) => Some(it.channel.descriptor()).filter(|_| !it.has_message),
            None => self.listener.as_ref().map(AsFd::as_fd),
        }
    }

    /// Returns what the guest signals.
    pub(super) fn kick_descriptors(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let vrings = self.front_end.iter().flat_map(|it| it.device.vrings());
        vrings.filter_map(Vring::kick_descriptor).filter(move |_| !self.is_ending)
    }

    /// There is a message, or a front-end to accept.
    pub(super) fn on_control(&mut self, properties: &DeviceProperties) {
        match &mut self.front_end {
            Some(front_end) => front_end.has_message = true,
            None => self.accept(properties),
        }
    }

    /// Takes the signals of the guest.
    pub(super) fn take_kicks(&self) {
        self.front_end.iter().flat_map(|it| it.device.vrings()).for_each(Vring::take_kick);
    }

    fn accept(&mut self, properties: &DeviceProperties) {
        let Some(Ok((stream, _))) = self.listener.as_ref().map(UnixListener::accept) else {
            return;
        };
        match Channel::new(stream) {
            Ok(channel) => {
                let device = Device::new(self.requests);
                self.front_end = Some(FrontEnd { channel, device, has_message: true });
                self.size_bytes = properties.export.size_bytes;
                info!("a vhost-user front-end has connected");
            }
            Err(error) => warn!("a vhost-user front-end cannot be served: {error}"),
        }
    }

    /// Handles messages, and takes requests. Returns whether there was anything.
    pub(super) fn poll(&mut self, properties: &DeviceProperties, r: &mut Resources<'_>) -> bool {
        let mut any = self.step(properties, r);
        let waits = |it: &FrontEnd| !it.has_message && it.device.is_stalled();
        // While it takes no requests, nobody has to wait until it gets memory.
        if self.is_ending || !self.front_end.as_ref().is_some_and(waits) {
            any |= r.requests.forget(CONNECTION);
        }
        any
    }

    fn step(&mut self, properties: &DeviceProperties, r: &mut Resources<'_>) -> bool {
        let Some(FrontEnd { channel, device, has_message }) = &mut self.front_end else {
            return false;
        };
        if !*has_message {
            return !self.is_ending && device.take(properties, r);
        }
        if !device.is_idle() {
            return false;
        }
        *has_message = false;
        loop {
            let handled = match channel.receive() {
                Ok(Some((message, descriptors))) => {
                    let request = message.header.request;
                    let reply = device.on_message(message, descriptors, properties);
                    reply.map_or(Ok(()), |reply| channel.reply(request, &reply))
                }
                Ok(None) => return true,
                Err(ended) => Err(ended),
            };
            if let Err(ended) = handled {
                match ended {
                    ChannelError::Closed => info!("{ended}"),
                    ChannelError::Message | ChannelError::Failed(_) => {
                        warn!("{ended}; it is disconnected")
                    }
                }
                self.front_end = None;
                return true;
            }
        }
    }

    /// A request has been carried out.
    pub(super) fn reply(&mut self, request: u32, r: &mut Resources<'_>) {
        if let Some(front_end) = &mut self.front_end {
            front_end.device.reply(request, r);
        }
    }

    /// Signals the guest what is done.
    pub(super) fn signal(&mut self) {
        self.front_end.iter_mut().for_each(|front_end| front_end.device.signal());
    }

    /// Has the guest end a sleep. Returns whether there is something to do already.
    pub(super) fn arm(&mut self) -> bool {
        let Some(FrontEnd { device, has_message, .. }) = &mut self.front_end else { return false };
        if *has_message { device.is_idle() } else { !self.is_ending && device.arm() }
    }

    /// Returns the size that the front-end knows, if there is one.
    pub(super) fn size_bytes(&self) -> Option<u64> {
        self.front_end.as_ref().map(|_| self.size_bytes)
    }

    /// The namespace may have another size: says so to the guest.
    pub(super) fn resize(&mut self, properties: &DeviceProperties) {
        if std::mem::replace(&mut self.size_bytes, properties.export.size_bytes)
            == properties.export.size_bytes
        {
            return;
        }
        let channel = self.front_end.as_ref().and_then(|it| it.device.backend_channel.as_ref());
        if let Some(channel) = channel
            && let Err(error) = rustix::io::write(channel, &crate::vhost_user::config_change())
        {
            warn!("the new size cannot be reported to the guest: {error}");
        }
    }

    /// No more requests are taken.
    pub(super) fn end(&mut self) {
        self.listener = None;
        self.is_ending = true;
    }
}
