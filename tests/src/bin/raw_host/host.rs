//! The raw host: connections that carry arbitrary bytes, and their responses.

use std::collections::{HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma::soft::{self, Soft};
use rdma::verbs::{Load, Verbs};
use rdma::{
    Buf, Completion, Event, FabricError, Initiator, Pool, PoolPlan, Qp, QpLimits, Reason, Remote,
    RemoteRegion, Wake, Work,
};

const PLAN: PoolPlan = PoolPlan::without_receives(4096, 8 << 20, 4 << 20);

/// Receives of a connection: more than the outstanding commands of any queue here.
const RECEIVES: u32 = 160;
const SENDS: u32 = 160;

/// Connections of a storm that are being established at once.
const STORMERS: u32 = 16;

/// Outstanding RDMA Reads that we allow the target.
const READS: u8 = 16;

/// Timeout of every step. Generous: a guest has one CPU, which may be busy.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Bytes of the window that the target may access.
pub(crate) const WINDOW_BYTES: u32 = 2 << 20;

/// A connection, identified for the lifetime of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Link(usize);

#[derive(Debug, Default)]
struct State {
    qp: Option<Qp>,
    up: bool,
    inbox: VecDeque<Vec<u8>>,
    end: Option<Reason>,
}

/// A fabric with a descriptor for `poll`.
trait Transport: Initiator + AsFd {}

impl Transport for Verbs {}
impl Transport for Soft {}

/// Memory, a device, and connections. Sleeps when idle.
pub(crate) struct Host {
    to: SocketAddr,
    pool: Pool,
    fabric: Box<dyn Transport>,
    states: Vec<State>,
    by_qp: HashMap<Qp, usize>,
    batch: Vec<Event>,
    window: Option<RemoteRegion>,
    /// The fabric resolves addresses before it sends a connection request.
    resolves: bool,
}

impl Host {
    /// Opens `soft` at the address `source`, or without it the RDMA devices.
    pub(crate) fn new(to: SocketAddr, source: Option<IpAddr>) -> Result<Host, FabricError> {
        let pool = Pool::new(PLAN).map_err(|e| FabricError(format!("no memory: {e}")))?;
        let region = pool.region().clone();
        let fabric: Box<dyn Transport> = match source {
            None => Box::new(Verbs::new(region, Load::default())?),
            source => Box::new(Soft::new(region, soft::Options { source, ..Default::default() })?),
        };
        Ok(Host {
            to,
            pool,
            fabric,
            states: Vec::new(),
            by_qp: HashMap::new(),
            batch: Vec::with_capacity(64),
            window: None,
            resolves: source.is_none(),
        })
    }

    /// Connects with these private data; `reads`: outstanding reads that we allow the target.
    pub(crate) fn connect_with(&mut self, private_data: &[u8], reads: u8) -> Result<Link, Reason> {
        self.connect_to(self.to, private_data, reads)
    }

    /// Connects to a port of the target without a listener.
    pub(crate) fn connect_beside(&mut self, private_data: &[u8]) -> Result<Link, Reason> {
        let mut to = self.to;
        to.set_port(to.port().wrapping_add(1));
        self.connect_to(to, private_data, READS)
    }

    fn connect_to(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        reads: u8,
    ) -> Result<Link, Reason> {
        let limits = QpLimits { receives: RECEIVES, sends: SENDS, reads };
        let qp = match self.fabric.connect(to, private_data, limits) {
            Ok(qp) => qp,
            Err(e) => {
                println!("     {e}");
                return Err(Reason::NotEstablished);
            }
        };
        let index = self.states.len();
        self.states.push(State { qp: Some(qp), ..State::default() });
        self.by_qp.insert(qp, index);
        for _ in 0..RECEIVES {
            self.receive(qp);
        }
        let link = Link(index);
        self.wait(PATIENCE, |host| host.state(link).up || host.state(link).end.is_some());
        let state = &self.states[index];
        match (&state.end, state.up) {
            (None, true) => Ok(link),
            (Some(reason), _) => Err(reason.clone()),
            (None, false) => {
                self.close(link);
                Err(Reason::NotEstablished)
            }
        }
    }

    /// Sends a connection request, and does not wait for the reply.
    ///
    /// # Errors
    /// The device refuses.
    pub(crate) fn request(&mut self, private_data: &[u8]) -> Result<(), FabricError> {
        let limits = QpLimits { receives: RECEIVES, sends: SENDS, reads: READS };
        self.fabric.connect(self.to, private_data, limits)?;
        self.fabric.flush();
        // Devices resolve address and route first, and send the request after two events.
        let turns = if self.resolves { 3 } else { 0 };
        (0..turns).for_each(|_| drop(self.happened()));
        Ok(())
    }

    /// Hands everything queued to the device.
    pub(crate) fn flush(&mut self) {
        self.fabric.flush();
    }

    pub(crate) fn connect(&mut self, private_data: &[u8]) -> Result<Link, Reason> {
        let link = self.connect_with(private_data, READS)?;
        if self.window.is_none() {
            self.window = Some(self.expose(link, WINDOW_BYTES));
        }
        Ok(link)
    }

    fn receive(&mut self, qp: Qp) {
        let buf = self.pool.take_cell().expect("a cell");
        self.fabric.post(qp, 0, Work::Recv(buf));
    }

    fn expose(&mut self, link: Link, len: u32) -> RemoteRegion {
        let qp = self.state(link).qp.expect("an open link");
        let buf = self.pool.take_data(len).expect("memory");
        self.fabric.register_remote(qp, buf).map_err(|(_, e)| e).expect("memory can be exposed")
    }

    /// Memory to which the target has no access any more.
    pub(crate) fn stale(&mut self, link: Link) -> Remote {
        let exposed = self.expose(link, 4096);
        let remote = exposed.remote();
        let buf = self.fabric.deregister_remote(exposed);
        self.pool.give(buf);
        remote
    }

    /// The same window under another key: for commands that request its invalidation.
    pub(crate) fn spare(&mut self, link: Link) -> (RemoteRegion, Remote) {
        let exposed = self.expose(link, 4096);
        let remote = exposed.remote();
        (exposed, remote)
    }

    pub(crate) fn take_back(&mut self, exposed: RemoteRegion) {
        let buf = self.fabric.deregister_remote(exposed);
        self.pool.give(buf);
    }

    /// The window that every command may use.
    pub(crate) fn window(&self) -> Remote {
        self.window.as_ref().expect("after the first connection").remote()
    }

    pub(crate) fn fill(&mut self, at: u32, bytes: &[u8]) {
        let window = self.window.as_mut().expect("after the first connection");
        self.pool.copy_in(window, at, bytes);
    }

    pub(crate) fn look(&self, at: u32, len: u32) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let window = self.window.as_ref().expect("after the first connection");
        self.pool.copy_out(window, at, &mut bytes);
        bytes
    }

    /// Queues one message, which is sent with the next wait.
    pub(crate) fn send(&mut self, link: Link, message: &[u8]) {
        self.post(link, message, |from| Work::Send { from, invalidate: None });
    }

    /// Queues one message with immediate data.
    pub(crate) fn send_with_immediate(&mut self, link: Link, message: &[u8], immediate: u32) {
        self.post(link, message, |from| Work::SendImmediate { from, immediate });
    }

    /// Queues an RDMA Write with immediate data, of as many bytes as `to` has.
    pub(crate) fn write_with_immediate(&mut self, link: Link, to: Remote, immediate: u32) {
        let bytes = vec![0x55; to.len as usize];
        self.post(link, &bytes, |from| Work::WriteImmediate { from, to, immediate });
    }

    fn post(&mut self, link: Link, bytes: &[u8], work: impl FnOnce(Buf) -> Work) {
        let Some(qp) = self.state(link).qp else { return };
        let len = bytes.len() as u32;
        let mut from = self.pool.take_data(len.max(1)).expect("memory");
        from.select(0, len);
        self.pool.bytes_mut(&mut from).copy_from_slice(bytes);
        self.fabric.post(qp, 0, work(from));
    }

    /// The next message of the target. `None` if the connection has ended, or none arrived in time;
    /// [`Host::end`] tells which.
    pub(crate) fn message(&mut self, link: Link, limit: Duration) -> Option<Vec<u8>> {
        let something = |host: &Host| {
            let state = host.state(link);
            !state.inbox.is_empty() || state.end.is_some()
        };
        self.wait(limit, something);
        self.states[link.0].inbox.pop_front()
    }

    /// Why the connection has ended, if it has.
    pub(crate) fn end(&self, link: Link) -> Option<&Reason> {
        self.state(link).end.as_ref()
    }

    /// Whether the connection ends within the time.
    pub(crate) fn ends(&mut self, link: Link, limit: Duration) -> bool {
        self.wait(limit, |host| host.state(link).end.is_some())
    }

    /// Ends a connection, and waits for its end.
    pub(crate) fn close(&mut self, link: Link) {
        if let Some(qp) = self.state(link).qp {
            self.fabric.disconnect(qp);
            self.ends(link, PATIENCE);
        }
    }

    /// Opens connections as fast as possible, some at a time, and closes each when it is
    /// established. Returns how many were established, and how many were not.
    pub(crate) fn storm(&mut self, private_data: &[u8], limit: Duration) -> (u64, u64) {
        let limits = QpLimits { receives: 2, sends: 2, reads: 1 };
        let until = Instant::now() + limit;
        let (mut live, mut up, mut in_vain) = (0, 0, 0);
        while live > 0 || Instant::now() < until {
            while live < STORMERS && Instant::now() < until {
                match self.fabric.connect(self.to, private_data, limits) {
                    Ok(_) => live += 1,
                    Err(_) => break,
                }
            }
            for event in self.happened() {
                match event {
                    Event::Established(qp) => {
                        up += 1;
                        self.fabric.disconnect(qp);
                    }
                    Event::Gone(_, reason) => {
                        live -= 1;
                        in_vain += u64::from(reason != Reason::Local);
                    }
                    Event::Done(done) => self.pool.give(done.work.into_buf()),
                    Event::Incoming(_) | Event::ListenerLost(_) => {}
                }
            }
        }
        (up, in_vain)
    }

    /// Events, now or within a moment.
    fn happened(&mut self) -> Vec<Event> {
        self.fabric.flush();
        let mut batch = Vec::with_capacity(64);
        self.fabric.poll(Instant::now(), &mut batch);
        if batch.is_empty() {
            let deadline = self.fabric.arm(Wake::Any);
            self.fabric.poll(Instant::now(), &mut batch);
            if batch.is_empty() {
                let soon = Instant::now() + Duration::from_millis(10);
                self.sleep(deadline.map_or(soon, |deadline| deadline.min(soon)));
            }
        }
        batch
    }

    /// Checks that every buffer was returned: at the end, when all connections are closed.
    ///
    /// # Errors
    /// The free buffers after the timeout.
    pub(crate) fn is_whole(&mut self) -> Result<(), String> {
        if let Some(window) = self.window.take() {
            self.take_back(window);
        }
        // Connections that the target has just closed may still flush work requests.
        match self.wait(PATIENCE, |host| host.pool.is_full()) {
            true => Ok(()),
            false => Err(format!("free are only {:?}", self.pool.free())),
        }
    }

    fn state(&self, link: Link) -> &State {
        &self.states[link.0]
    }

    fn wait(&mut self, limit: Duration, done: impl Fn(&Host) -> bool) -> bool {
        let until = Instant::now() + limit;
        loop {
            self.fabric.flush();
            let mut idle = !self.turn();
            if done(self) {
                return true;
            }
            if Instant::now() >= until {
                return false;
            }
            if idle {
                let deadline = self.fabric.arm(Wake::Any);
                idle = !self.turn();
                if idle {
                    self.sleep(deadline.map_or(until, |deadline| deadline.min(until)));
                }
            }
        }
    }

    fn sleep(&self, until: Instant) {
        let left = until.saturating_duration_since(Instant::now()).as_millis() + 1;
        let left = PollTimeout::from(u16::try_from(left).unwrap_or(u16::MAX));
        let _ = poll(&mut [PollFd::new(self.fabric.as_fd(), PollFlags::POLLIN)], left);
    }

    fn turn(&mut self) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        self.fabric.poll(Instant::now(), &mut batch);
        let any = !batch.is_empty();
        batch.drain(..).for_each(|event| self.on_event(event));
        self.batch = batch;
        self.fabric.flush();
        any
    }

    fn on_event(&mut self, event: Event) {
        match event {
            Event::Done(done) => self.on_done(done),
            Event::Established(qp) => {
                if let Some(index) = self.by_qp.get(&qp) {
                    self.states[*index].up = true;
                }
            }
            Event::Gone(qp, reason) => {
                if let Some(index) = self.by_qp.remove(&qp) {
                    let state = &mut self.states[index];
                    state.qp = None;
                    state.end = Some(reason);
                }
            }
            Event::Incoming(_) | Event::ListenerLost(_) => {}
        }
    }

    fn on_done(&mut self, Completion { qp, work, outcome, .. }: Completion) {
        let index = self.by_qp.get(&qp).copied();
        match (work, outcome) {
            (Work::Recv(mut buf), Ok(len)) => {
                buf.select(0, len);
                let message = self.pool.bytes(&buf).to_vec();
                self.pool.give(buf);
                if let Some(index) = index {
                    self.states[index].inbox.push_back(message);
                }
                self.receive(qp);
            }
            (work, outcome) => {
                self.pool.give(work.into_buf());
                if outcome.is_err() {
                    self.fabric.disconnect(qp);
                }
            }
        }
    }
}
