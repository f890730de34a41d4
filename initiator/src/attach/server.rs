//! The loop of `nvmf attach`: one thread for paths, connections and signals.

use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use rdma::{AdaptivePoller, SpinBudget};
use tracing::{error, info, warn};

use super::connection::{Connection, MOST_REQUESTS, Shared};
use super::connection_table::{ConnectionTable, MOST_CONNECTIONS};
use super::extend_timeout;
use super::metrics_file::MetricsFile;
use super::operation::RequestTable;
use super::status::{self, Served, Status};
use super::ublk::{self, Ublk};
use super::vhost_user::{self, DeviceProperties, VhostUser};
use crate::bench::report::print;
use crate::host::{CLOSE_LIMIT, notice};
use crate::interrupt::Stop;
use crate::multipath::{BlockRequest, Notice, Operation};
use crate::nbd::{self, Export, flag};
use crate::{Error, MultipathHost};

/// The longest sleep, which limits the effect of a missed wake-up.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);
/// Time for one of the requests that are under way when the end is asked for.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// How long to look for events before sleeping, if none is expected.
const SPIN: Duration = Duration::from_micros(100);
/// Signals and new connections are looked for in one of so many iterations that do not sleep.
const LOOK_EVERY: u32 = 64;
/// Requests of clients and of a guest at once.
const TABLE_REQUESTS: u32 = MOST_CONNECTIONS as u32 * MOST_REQUESTS;
/// Tag of the last Flush; those of requests are below.
const LAST_FLUSH: u64 = u64::MAX;

/// Options of the export.
#[derive(Clone, Debug)]
pub(super) struct ExportOptions {
    pub(super) name: String,
    pub(super) socket: PathBuf,
    pub(super) is_read_only: bool,
    /// The namespace is removed afterwards: a device of the kernel is removed at the end also if it
    /// is in use, because its requests would wait for ever.
    pub(super) is_temporary: bool,
    pub(super) piece_bytes: u32,
}

/// Where clients connect, and those that ask for the state; and the device of the kernel.
pub(super) struct Listeners {
    pub(super) clients: Option<UnixListener>,
    pub(super) vhost_user: Option<UnixListener>,
    pub(super) ublk: Option<Ublk>,
    pub(super) status: UnixListener,
}

/// Where the end is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ending {
    /// Not asked for.
    No,
    /// Requests under way are carried out.
    Draining(Drain),
    /// The last Flush is under way, until then.
    Flushing(Instant),
    /// The controllers are being shut down, until then.
    Closing(Instant),
}

/// The end of the requests that are under way. A device of the kernel has those that write what is
/// cached, which may take any time: it ends when nothing was written for [`DRAIN_LIMIT`].
#[derive(Clone, Copy, PartialEq, Eq)]
struct Drain {
    until: Instant,
    /// Requests other than reads that were answered when it began.
    written: u64,
}

impl Drain {
    fn new(now: Instant, written: u64) -> Drain {
        Drain { until: now + DRAIN_LIMIT, written }
    }

    /// Goes on if something was written in time. Returns whether it does.
    fn goes_on(&mut self, now: Instant, written: u64) -> bool {
        if now >= self.until && written > self.written {
            *self = Drain::new(now, written);
        }
        now < self.until
    }
}

/// Everything.
pub(super) struct Server {
    host: MultipathHost,
    requests: RequestTable,
    connections: ConnectionTable,
    vhost_user: Option<VhostUser>,
    ublk: Option<Ublk>,
    /// The device can be used, and that was reported.
    is_ready: bool,
    status: Option<UnixListener>,
    metrics: Option<MetricsFile>,
    stop: Stop,
    options: ExportOptions,
    /// As of the last notice.
    properties: DeviceProperties,
    ending: Ending,
    /// The target may still carry out changes.
    leaves_changes: bool,
    iterations: u32,
}

impl Server {
    /// For a host with a path that is live.
    pub(super) fn new(
        host: MultipathHost,
        stop: Stop,
        options: ExportOptions,
        metrics: Option<MetricsFile>,
    ) -> Server {
        Server {
            properties: current_properties(&host, &options, None),
            host,
            requests: RequestTable::new(TABLE_REQUESTS),
            connections: ConnectionTable::new(MOST_CONNECTIONS),
            vhost_user: None,
            ublk: None,
            is_ready: false,
            status: None,
            metrics,
            stop,
            options,
            ending: Ending::No,
            leaves_changes: false,
            iterations: 0,
        }
    }

    /// Serves clients until the end is asked for and reached.
    ///
    /// # Errors
    /// All paths are given up, or the device of the kernel cannot be started.
    pub(super) fn serve(&mut self, listeners: Listeners) -> Result<(), Error> {
        let outcome = self.run(listeners);
        self.leaves_changes |= self.host.multipath().has_sent_changes();
        if let Some(device) = self.ublk.take() {
            device.close(outcome.is_err(), self.host.multipath().is_lost());
        }
        outcome
    }

    fn run(&mut self, listeners: Listeners) -> Result<(), Error> {
        self.connections.listen(listeners.clients);
        let of_guest = |listener| VhostUser::new(listener, TABLE_REQUESTS as usize);
        self.vhost_user = listeners.vhost_user.map(of_guest);
        self.ublk = listeners.ublk;
        self.status = Some(listeners.status);
        self.notify_manager();
        let mut poller = AdaptivePoller::new(SpinBudget::auto(SPIN), Instant::now());
        loop {
            let any = self.iterate();
            self.follow_device()?;
            let now = Instant::now();
            if self.has_ended(now)? {
                return Ok(());
            }
            self.write_metrics(now);
            if any {
                poller.worked(now);
            } else if poller.goes_on(now, self.requests.in_use() > 0) {
                std::hint::spin_loop();
            } else {
                self.sleep();
                poller.worked(Instant::now());
            }
        }
    }

    /// Reports that everything can be used. Ends when the device was removed by somebody else.
    fn follow_device(&mut self) -> Result<(), Error> {
        if self.ublk.as_ref().is_some_and(Ublk::has_failed) {
            return Err(Error::Local("the device cannot be started: see above".into()));
        }
        let is_live = self.ublk.as_ref().is_none_or(Ublk::is_live);
        if is_live && !std::mem::replace(&mut self.is_ready, true) {
            if let Some(device) = &self.ublk {
                let (name, provider) = (&self.options.name, self.host.provider());
                info!("{name} is served as {} ({provider})", device.path());
                print(format!("{}\n", device.path()))?;
            }
            let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
        }
        if self.ending == Ending::No && self.ublk.as_ref().is_some_and(Ublk::is_stopped) {
            info!("the device was removed");
            self.end();
        }
        Ok(())
    }

    /// Follows the end. Returns whether it is reached.
    fn has_ended(&mut self, now: Instant) -> Result<bool, Error> {
        if self.host.multipath().is_lost() && self.ending == Ending::No {
            let lost =
                "all paths are given up: requests have failed, and the namespace is detached";
            return Err(Error::Local(lost.into()));
        }
        let device_ended = self.ublk.as_mut().is_none_or(Ublk::has_ended);
        let is_drained = device_ended && self.requests.in_use() == 0;
        match &mut self.ending {
            Ending::Draining(drain) => {
                let until = drain.until;
                let goes_on = drain.goes_on(now, self.requests.counters().written());
                if drain.until > until {
                    extend_timeout(drain.until - now + 2 * CLOSE_LIMIT);
                }
                if is_drained || !goes_on {
                    self.flush(now, until.max(now + CLOSE_LIMIT));
                }
            }
            Ending::Flushing(until) if now >= *until => {
                warn!("the last flush is not done: what was not flushed may not be durable");
                self.close(now);
            }
            Ending::Closing(until) => {
                return Ok(self.host.multipath().is_closed() || now >= *until);
            }
            _ => {}
        }
        Ok(false)
    }

    /// Sends the last Flush.
    fn flush(&mut self, now: Instant, until: Instant) {
        let left = self.requests.in_use();
        if left > 0 {
            warn!("requests of clients that were not executed, and fail: {left}");
        }
        self.ending = Ending::Flushing(until);
        let (operation, tag) = (Operation::Flush, LAST_FLUSH);
        let flush = BlockRequest { operation, slba: 0, blocks: 0, data: None, tag };
        if self.options.is_read_only || self.host.submit(flush).is_err() {
            self.close(now);
        }
    }

    /// Whether the target may still carry out changes after the end.
    pub(super) fn leaves_changes(&self) -> bool {
        self.leaves_changes
    }

    fn close(&mut self, now: Instant) {
        self.leaves_changes = self.host.multipath().has_sent_changes();
        self.ending = Ending::Closing(now + CLOSE_LIMIT);
        self.host.close();
    }

    /// One iteration. Returns whether anything happened.
    fn iterate(&mut self) -> bool {
        self.iterations = self.iterations.wrapping_add(1);
        let mut any = self.iterations.is_multiple_of(LOOK_EVERY) && self.look(Duration::ZERO);
        any |= self.clients(Connection::read);
        any |= self.guest(VhostUser::poll);
        any |= self.device(Ublk::poll);
        any |= self.paths();
        while let Some(notice) = self.host.next_notice() {
            any = true;
            self.on_notice(&notice);
        }
        any |= self.clients(|connection, _, s| connection.write(s));
        self.vhost_user.iter_mut().for_each(VhostUser::signal);
        self.ublk.iter_mut().for_each(Ublk::submit);
        self.host.flush();
        any
    }

    /// Lets the device of the kernel do something, if there is one.
    fn device<T: Default>(
        &mut self,
        act: impl FnOnce(&mut Ublk, &DeviceProperties, &mut vhost_user::Resources<'_>) -> T,
    ) -> T {
        let Server { host, requests, ublk, options, properties, .. } = self;
        let Some(ublk) = ublk else { return T::default() };
        let (pool, piece_bytes) = (host.pool(), options.piece_bytes);
        act(ublk, properties, &mut vhost_user::Resources { pool, requests, piece_bytes })
    }

    /// Lets the export to a guest do something, if there is one.
    fn guest<T: Default>(
        &mut self,
        act: impl FnOnce(&mut VhostUser, &DeviceProperties, &mut vhost_user::Resources<'_>) -> T,
    ) -> T {
        let Server { host, requests, vhost_user, options, properties, .. } = self;
        let Some(vhost_user) = vhost_user else { return T::default() };
        let (pool, piece_bytes) = (host.pool(), options.piece_bytes);
        act(vhost_user, properties, &mut vhost_user::Resources { pool, requests, piece_bytes })
    }

    /// Lets each client do something. Returns whether any did.
    fn clients(
        &mut self,
        act: impl FnMut(&mut Connection, usize, &mut Shared<'_>) -> bool,
    ) -> bool {
        let (connections, r) = self.connections();
        connections.each(r, act)
    }

    fn connections(&mut self) -> (&mut ConnectionTable, Shared<'_>) {
        let Server { host, requests, connections, options, properties, .. } = self;
        let (pool, piece_bytes, export) = (host.pool(), options.piece_bytes, &properties.export);
        (connections, Shared { pool, requests, export, piece_bytes })
    }

    /// Moves what is under way on the paths.
    fn paths(&mut self) -> bool {
        let mut any = self.requests.send(&mut self.host);
        any |= self.host.poll();
        while let Some(done) = self.host.next_done() {
            any = true;
            if done.tag != LAST_FLUSH {
                self.requests.on_done(done, self.host.pool());
                continue;
            }
            if let Err(why) = done.outcome {
                error!("the last flush failed: {why}");
            }
            if let Ending::Flushing(_) = self.ending {
                self.close(Instant::now());
            }
        }
        self.reply();
        any
    }

    fn reply(&mut self) {
        while let Some(request) = self.requests.next_answered() {
            match self.requests.get(request).connection {
                vhost_user::CONNECTION => self.guest(|guest, _, r| guest.reply(request, r)),
                ublk::CONNECTION => self.device(|device, _, r| device.reply(request, r)),
                connection => self.connections.reply(connection, request),
            }
        }
    }

    /// Sleeps until something happens.
    fn sleep(&mut self) {
        self.host.arm();
        let mut any = self.vhost_user.as_mut().is_some_and(VhostUser::arm);
        any |= self.paths();
        self.vhost_user.iter_mut().for_each(VhostUser::signal);
        any |= self.ublk.as_mut().is_some_and(Ublk::arm);
        self.host.flush();
        if any {
            return;
        }
        let now = Instant::now();
        let until = match self.ending {
            Ending::No => None,
            Ending::Draining(Drain { until, .. }) => Some(until),
            Ending::Flushing(at) | Ending::Closing(at) => Some(at),
        };
        let clients = self.connections.deadline();
        let metrics = self.metrics.as_ref().map(MetricsFile::due);
        let longest = Some(now + LONGEST_SLEEP);
        let times = [self.host.deadline(), until, clients, metrics, longest];
        let next = times.into_iter().flatten().min().unwrap_or(now);
        self.look(next.saturating_duration_since(now));
    }

    /// Waits for `limit` until a descriptor is ready; accepts connections, takes signals.
    fn look(&mut self, limit: Duration) -> bool {
        let mut fds = vec![PollFd::new(self.stop.descriptor(), PollFlags::POLLIN)];
        let at_listener = self.connections.listener().map(|listener| {
            fds.push(PollFd::new(listener, PollFlags::POLLIN));
            fds.len() - 1
        });
        let at_status = self.status.as_ref().map(|listener| {
            fds.push(PollFd::new(listener.as_fd(), PollFlags::POLLIN));
            fds.len() - 1
        });
        let guest = self.vhost_user.iter();
        let at_control = guest.clone().find_map(VhostUser::control_descriptor).map(|control| {
            fds.push(PollFd::new(control, PollFlags::POLLIN));
            fds.len() - 1
        });
        let at_kicks = fds.len();
        let kicks = guest.flat_map(VhostUser::kick_descriptors);
        fds.extend(kicks.map(|kick| PollFd::new(kick, PollFlags::POLLIN)));
        let kicks = at_kicks..fds.len();
        let at_device = self.ublk.as_ref().map(|device| {
            fds.push(PollFd::new(device.descriptor(), PollFlags::POLLIN));
            fds.len() - 1
        });
        fds.extend(
            self.connections
                .descriptors(&self.requests)
                .map(|(fd, wanted)| PollFd::new(fd, wanted)),
        );
        if !limit.is_zero() {
            let descriptors = self.host.descriptors();
            fds.extend(descriptors.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        // Signals and failures also end the sleep; then nothing is ready.
        let _ = ppoll(&mut fds, Some(TimeSpec::from_duration(limit)), None);
        let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
        drop(fds);
        let now = Instant::now();
        if at_listener.is_some_and(|at| ready[at]) {
            self.connections.accept(now);
        }
        if let Some(listener) = self.status.as_ref().filter(|_| at_status.is_some_and(|n| ready[n]))
        {
            status::answer(listener, || self.current_status(now));
        }
        if ready[kicks].contains(&true) {
            self.vhost_user.iter().for_each(VhostUser::take_kicks);
        }
        if at_device.is_some_and(|at| ready[at]) {
            self.ublk.iter().for_each(Ublk::take_event);
        }
        if at_control.is_some_and(|at| ready[at]) {
            self.guest(|guest, properties, _| guest.on_control(properties));
        }
        let (connections, r) = self.connections();
        connections.end_late_handshakes(now, r);
        let (connections, r) = self.connections();
        connections.end_stalled(now, r);
        if ready[0] && self.stop.wait(Duration::ZERO) && self.ending == Ending::No {
            self.end();
        }
        ready.contains(&true)
    }

    /// The end is asked for.
    fn end(&mut self) {
        info!("ending: requests under way are carried out first");
        let written = self.requests.counters().written();
        self.ending = Ending::Draining(Drain::new(Instant::now(), written));
        self.connections.listen(None);
        self.vhost_user.iter_mut().for_each(VhostUser::end);
        let force = self.options.is_temporary;
        self.ublk.iter_mut().for_each(|device| device.end(force));
        self.clients(|connection, _, s| {
            connection.end(s);
            true
        });
    }

    fn write_metrics(&mut self, now: Instant) {
        if self.metrics.as_ref().is_some_and(|file| file.due() <= now) {
            let text = self.current_status(now).prometheus();
            self.metrics.iter_mut().for_each(|file| file.write(text.clone(), now));
        }
    }

    /// Has `systemctl status` show the number of live paths.
    fn notify_manager(&self) {
        let line = self.current_status(Instant::now()).line();
        let _ = sd_notify::notify(&[sd_notify::NotifyState::Status(&line)]);
    }

    fn current_status(&self, now: Instant) -> Status {
        let served = Served {
            socket: &self.options.socket,
            provider: self.host.provider().to_string(),
            is_read_only: self.options.is_read_only,
            requests_in_flight: self.requests.in_use(),
            counters: self.requests.counters(),
            sizes_bytes: self
                .connections
                .sizes_bytes()
                .chain(self.vhost_user.iter().filter_map(VhostUser::size_bytes))
                .chain(self.ublk.iter().map(Ublk::size_bytes))
                .collect(),
        };
        Status::new(self.host.multipath(), &served, now)
    }

    /// Something has happened to the namespace or its paths.
    fn on_notice(&mut self, notice: &Notice) {
        self.notify_manager();
        self.properties = current_properties(&self.host, &self.options, Some(&self.properties));
        self.guest(|guest, properties, _| guest.resize(properties));
        self.device(|device, properties, _| device.resize(properties));
        let size_bytes = self.properties.export.size_bytes;
        let stale = self.connections.sizes_bytes().filter(|size| *size != size_bytes).count();
        if let Notice::Resized { .. } = notice
            && stale > 0
        {
            warn!(
                "connections of clients that keep the old size until they connect again: {stale}"
            );
        }
    }
}

/// What is offered now. The serial number is that of the first controller.
pub(super) fn current_properties(
    host: &MultipathHost,
    options: &ExportOptions,
    before: Option<&DeviceProperties>,
) -> DeviceProperties {
    let paths = host.multipath();
    let first = || (0..paths.paths()).find_map(|path| paths.session(path));
    DeviceProperties {
        export: current_export(host, options),
        serial: match before {
            Some(before) => before.serial,
            None => first().map_or([0; 20], |session| session.controller().sn.0),
        },
        zeroes_deallocate: paths.namespace().is_some_and(|it| it.zeroes_deallocate),
    }
}

/// The export as it is now.
fn current_export(host: &MultipathHost, options: &ExportOptions) -> Export {
    let Some(namespace) = host.multipath().namespace() else { return Export::default() };
    let mut flags = flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_DF;
    // A Flush is a command of the namespace, and there is no cache here: it covers the writes of
    // all connections.
    flags |= flag::CAN_MULTI_CONN | flag::SEND_CACHE;
    for (has, flag) in [
        (options.is_read_only || namespace.is_write_protected, flag::READ_ONLY),
        (namespace.can_discard, flag::SEND_TRIM),
        (namespace.can_write_zeroes, flag::SEND_WRITE_ZEROES),
    ] {
        flags |= if has { flag } else { 0 };
    }
    Export {
        name: options.name.clone(),
        description: notice::describe(host.multipath()),
        size_bytes: namespace.blocks * u64::from(namespace.block_bytes),
        flags,
        block_bytes: namespace.block_bytes,
        preferred_bytes: namespace.preferred_bytes.next_power_of_two().clamp(4096, 1 << 20),
        most_bytes: nbd::MOST_BYTES,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_waits_for_requests_as_long_as_something_is_written() {
        let begun = Instant::now();
        let at = |limits: u32| begun + limits * DRAIN_LIMIT;
        let mut drain = Drain::new(begun, 7);
        let just_before = at(1) - Duration::from_millis(1);
        assert!(drain.goes_on(just_before, 7) && drain.goes_on(at(1), 8));
        assert!(drain.goes_on(at(2), 9) && drain.goes_on(at(3) - Duration::from_millis(1), 9));
        assert!(!drain.goes_on(at(3), 9));
    }
}
