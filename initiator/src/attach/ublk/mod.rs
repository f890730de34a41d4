//! The export to the kernel of this machine: a block device by the ublk driver, `/dev/ublkbN`.
//!
//! The thread that drives the paths takes requests from an io_uring and returns their results there;
//! data are copied once, between the pages of a request and the buffers that the target reads and
//! writes. Whatever may need a request itself runs elsewhere: the start, which reads partitions, in
//! a worker of the kernel, and the end, which writes what is cached, in a thread.
//!
//! A device survives its process. Then its requests wait, those that the process had are repeated,
//! and an `nvmf attach` of the same namespace continues it.

mod ring;
mod setup;

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::thread::JoinHandle;

use rustix::io::{pread, pwrite};
use rustix::process::configure_io_flusher_behavior;
use tracing::{error, info, warn};

use super::vhost_user::{DeviceProperties, Resources};
use crate::interrupt::Stop;
use crate::nbd::{Command, Errno, Kind, Negotiated};
use crate::ublk::{
    ABORTED, Control, Descriptor, RequestId, SECTOR_BYTES, control, feature, io as request, result,
};
use crate::{Error, MultipathHost};

use ring::{CommandRing, Queues};
use setup::{Identity, Prepared, StopError, Wanted};
pub(super) use setup::{detach, number};

/// The number of the device among the connections of the table of requests.
pub(super) const CONNECTION: usize = usize::MAX - 1;
/// Completions of control commands; those of requests are below 2^32.
const STARTED: u64 = 1 << 32;
const RESIZED: u64 = 2 << 32;

/// Where the device is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// The kernel starts or continues it.
    Starting,
    Live,
    /// Requests are not taken any more: they wait for another process.
    Left,
    /// It could not be started.
    Failed,
}

/// The device.
pub(super) struct Ublk {
    // Dropped before what its commands name.
    ring: CommandRing,
    queues: Queues,
    number: u32,
    features: u64,
    /// An earlier process has left it: it may have writes that wait.
    is_left: bool,
    state: State,
    /// The size that the kernel knows, or will know.
    size_bytes: u64,
    /// A resize that the kernel cannot do was reported.
    is_stale: bool,
    /// Requests that are not begun.
    waiting: VecDeque<RequestId>,
    /// Tags that the kernel has taken back, of all.
    aborted: u32,
    tags: u32,
    stopping: Option<JoinHandle<Result<(), StopError>>>,
}

impl Ublk {
    /// Adds a device for the namespace, or takes up the one that it has already; `None`: the end was
    /// asked for meanwhile. It is started by the first iterations.
    ///
    /// # Errors
    /// What is missing.
    pub(super) fn new(
        number: Option<u32>,
        properties: &DeviceProperties,
        host: &mut MultipathHost,
        stop: &mut Stop,
    ) -> Result<Option<Ublk>, Error> {
        let paths = host.multipath();
        let Some(namespace) = paths.namespace() else { return Ok(None) };
        let name = &properties.export.name;
        let hash = setup::namespace_hash(name, paths.nsid(), &namespace.ids);
        let identity = Identity::new(hash, paths.replay_wait());
        let wanted = Wanted { number, identity, export: &properties.export };
        let Some(prepared) = setup::prepare(&wanted, host, stop)? else { return Ok(None) };
        let Prepared { mut ring, queues, info, size_bytes, is_left } = prepared;
        // Memory for this thread must not wait for pages that are written by way of this device.
        if let Err(why) = configure_io_flusher_behavior(true) {
            warn!("without CAP_SYS_RESOURCE the device may hang when memory is short: {why}");
        }
        let start = if is_left { control::END_USER_RECOVERY } else { control::START_DEV };
        ring.begin(
            start,
            Control { device: info.device, data: std::process::id().into() },
            STARTED,
        );
        ring.submit();
        Ok(Some(Ublk {
            ring,
            queues,
            number: info.device,
            features: info.features,
            is_left,
            state: State::Starting,
            size_bytes,
            is_stale: false,
            waiting: VecDeque::new(),
            aborted: 0,
            tags: u32::from(info.queues) * u32::from(info.entries),
            stopping: None,
        }))
    }

    /// Returns its path.
    pub(super) fn path(&self) -> String {
        setup::path(self.number)
    }

    /// Returns the descriptor that is readable when there is something to poll.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.descriptor()
    }

    /// Takes the signal of that descriptor.
    pub(super) fn take_event(&self) {
        self.ring.take_event();
    }

    /// Returns the size that the kernel knows.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// Whether it can be used.
    pub(super) fn is_live(&self) -> bool {
        self.state == State::Live
    }

    /// Whether it could not be started.
    pub(super) fn has_failed(&self) -> bool {
        self.state == State::Failed
    }

    /// Whether the kernel has stopped it: no request can come any more.
    pub(super) fn is_stopped(&self) -> bool {
        self.aborted == self.tags
    }

    /// Takes requests and other completions. Returns whether there were any.
    pub(super) fn poll(&mut self, properties: &DeviceProperties, r: &mut Resources<'_>) -> bool {
        self.ring.submit();
        let mut any = false;
        while let Some((user_data, result)) = self.ring.next_done() {
            any = true;
            match user_data {
                STARTED => self.on_started(result, properties),
                RESIZED => self.on_resized(result),
                id if result == 0 => self.waiting.push_back(RequestId::of(id)),
                id => self.on_aborted(RequestId::of(id), result),
            }
        }
        while self.state != State::Left
            && let Some(id) = self.waiting.front().copied()
            && self.begin(id, properties, r)
        {
            self.waiting.pop_front();
            any = true;
        }
        if self.waiting.is_empty() || self.state == State::Left {
            any |= r.requests.forget(CONNECTION);
        }
        any
    }

    fn on_started(&mut self, result: i32, properties: &DeviceProperties) {
        if result < 0 {
            let why = std::io::Error::from_raw_os_error(-result);
            error!("{} cannot be started: {why}", self.path());
            self.state = State::Failed;
            return;
        }
        self.state = State::Live;
        self.resize(properties);
    }

    fn on_aborted(&mut self, id: RequestId, result: i32) {
        self.aborted += 1;
        if result != ABORTED {
            let why = std::io::Error::from_raw_os_error(-result);
            error!("{}: no more requests of queue {} tag {}: {why}", self.path(), id.queue, id.tag);
        }
    }

    /// Begins a request, or answers it. Returns whether there was memory for that.
    fn begin(
        &mut self,
        id: RequestId,
        properties: &DeviceProperties,
        r: &mut Resources<'_>,
    ) -> bool {
        let descriptor = self.queues.descriptor(id);
        let command = descriptor.map(|bytes| Descriptor::parse(&bytes).command(id));
        let command = match command.unwrap_or(Err(Errno::Invalid)) {
            Ok(command) => command,
            Err(errno) => {
                self.commit(id, -(errno as u32 as i32));
                return true;
            }
        };
        let negotiated = Negotiated::default();
        let checked = command.check(&properties.export, negotiated);
        let Resources { pool, requests, piece_bytes } = r;
        let begun = requests.begin(CONNECTION, command, checked, negotiated, pool, *piece_bytes);
        let Some(n) = begun else { return false };
        let mut at = 0;
        while command.kind == Kind::Write && checked.is_ok() && at < command.len {
            let room = requests.room(n, at, pool);
            let len = room.len().min((command.len - at) as usize);
            match pread(&self.queues.device, &mut room[..len], id.data_offset(at)) {
                Ok(read) if read > 0 => at += read as u32,
                _ => {
                    requests.free(n, pool);
                    self.commit(id, result(&command, Err(Errno::Io)));
                    return true;
                }
            }
        }
        requests.submit(n);
        true
    }

    /// A request is carried out: returns its data and its result.
    pub(super) fn reply(&mut self, n: u32, r: &mut Resources<'_>) {
        let request = r.requests.get(n);
        let command: Command = request.command;
        let id = RequestId::of(command.cookie);
        let (mut outcome, mut at) = (request.outcome(), 0);
        for data in request.data(r.pool) {
            let mut rest = data;
            while outcome.is_ok() && !rest.is_empty() {
                match pwrite(&self.queues.device, rest, id.data_offset(at)) {
                    Ok(written) if written > 0 => {
                        at += written as u32;
                        rest = &rest[written..];
                    }
                    _ => outcome = Err(Errno::Io),
                }
            }
        }
        r.requests.free(n, r.pool);
        self.commit(id, result(&command, outcome));
    }

    fn commit(&mut self, id: RequestId, result: i32) {
        self.ring.push_io(&self.queues, request::COMMIT_AND_FETCH_REQ, id, result);
    }

    /// Submits the results.
    pub(super) fn submit(&mut self) {
        self.ring.submit();
    }

    /// Before a sleep: returns whether there is something to do already.
    pub(super) fn arm(&mut self) -> bool {
        self.ring.submit();
        self.ring.is_ready()
    }

    /// The namespace may have another size: tells the kernel.
    pub(super) fn resize(&mut self, properties: &DeviceProperties) {
        let size_bytes = properties.export.size_bytes;
        if size_bytes == self.size_bytes || !self.is_live() || self.stopping.is_some() {
            return;
        }
        if self.features & feature::UPDATE_SIZE == 0 {
            if !std::mem::replace(&mut self.is_stale, true) {
                warn!(
                    "{} keeps its size: this kernel cannot change it (Linux 6.16 can). Unmount it, \
                     and end and start nvmf attach",
                    self.path()
                );
            }
            return;
        }
        self.size_bytes = size_bytes;
        let command = Control { device: self.number, data: size_bytes / SECTOR_BYTES };
        self.ring.begin(control::UPDATE_SIZE, command, RESIZED);
    }

    fn on_resized(&mut self, result: i32) {
        if result < 0 {
            let why = std::io::Error::from_raw_os_error(-result);
            warn!("{} keeps its size: {why}", self.path());
        }
    }

    /// The end is asked for: writes what is cached and stops the device, which needs requests. With
    /// `force` nothing is written, and a device that is in use is stopped too: its requests fail.
    pub(super) fn end(&mut self, force: bool) {
        if self.stopping.is_some() || self.is_stopped() {
            return;
        }
        let number = self.number;
        let builder = std::thread::Builder::new().name("ublk-stop".into());
        match builder.spawn(move || setup::stop(number, force)) {
            Ok(thread) => self.stopping = Some(thread),
            Err(why) => {
                error!("{} cannot be stopped: {why}", self.path());
                self.state = State::Left;
            }
        }
    }

    /// Whether the end is reached: no more requests are taken.
    pub(super) fn has_ended(&mut self) -> bool {
        if let Some(thread) = self.stopping.take_if(|thread| thread.is_finished())
            && let Ok(Err(why)) = thread.join()
        {
            warn!(
                "{why}: it stays, and its requests wait until nvmf attach is started again; to \
                 remove it: `nvmf attach --detach {}`",
                self.path()
            );
            self.state = State::Left;
        }
        self.state == State::Left || self.is_stopped() && self.stopping.is_none()
    }

    /// Closes it, and removes it if it is stopped. After a failure a device that was added here, and
    /// any without paths, is stopped first: then its requests fail.
    pub(super) fn close(self, has_failed: bool, is_lost: bool) {
        let (number, path, is_stopped) = (self.number, self.path(), self.is_stopped());
        let is_removed = has_failed && is_removed_after_failure(self.is_left, is_lost);
        // Its ring takes back what the kernel has, and the device has to be closed to be removed.
        drop(self);
        match is_stopped {
            true => match setup::remove(number) {
                Ok(()) => info!("{path} is removed"),
                Err(why) => warn!("{why}"),
            },
            false if is_removed => setup::remove_unstarted(number),
            false if has_failed => warn!(
                "{path} stays, and its requests wait until nvmf attach is started again; to lose \
                 them: `nvmf attach --detach {path} --force`"
            ),
            false => {}
        }
    }
}

/// Whether a device is removed after a failure, with its requests. What an earlier process has left may
/// have those of a file system: they wait for the next one, as long as there may be a path.
fn is_removed_after_failure(is_left: bool, is_lost: bool) -> bool {
    is_lost || !is_left
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_recovered_device_stays_after_a_failure_unless_all_paths_are_lost() {
        for (is_left, is_lost, is_removed) in
            [(false, false, true), (true, false, false), (false, true, true), (true, true, true)]
        {
            assert_eq!(
                is_removed_after_failure(is_left, is_lost),
                is_removed,
                "{is_left} {is_lost}"
            );
        }
    }
}
