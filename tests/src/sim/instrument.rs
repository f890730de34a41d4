//! Instrumentation between a state machine and its provider: tracks the owner of each buffer, so
//! that a buffer with two owners is found immediately, and adds each call to the trace.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nvme::{Cqe, Sqe};
use nvmfd::blockdev::{BlockDevice, CancelRequest, DeviceId, IoCompletion, IoRequest};
use rdma::{
    Buf, Completion, Event, Fabric, FabricError, FabricHints, FabricStats, Incoming, Initiator,
    PoolPlan, Qp, QpLimits, Region, RemoteRegion, Tag, Wake, Work,
};

use super::trace::Trace;

/// The smallest buffer.
const GRAIN_BYTES: u64 = 64;

/// Buffers of one pool that are owned by a provider.
#[derive(Debug)]
pub struct BufferTracker {
    grains: Vec<bool>,
    bytes: u64,
    fault: Option<String>,
}

impl BufferTracker {
    /// For a pool.
    pub fn new(plan: &PoolPlan) -> BufferTracker {
        let grains = plan.total_bytes() / GRAIN_BYTES;
        BufferTracker { grains: vec![false; grains as usize], bytes: 0, fault: None }
    }

    /// Bytes of all buffers owned by the provider.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The first violation, if any.
    pub fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    fn range(buf: &Buf) -> std::ops::Range<usize> {
        let base = buf.offset() - u64::from(buf.start());
        let end = base + u64::from(buf.capacity());
        (base / GRAIN_BYTES) as usize..(end / GRAIN_BYTES) as usize
    }

    /// A buffer is passed to the provider.
    fn leaves(&mut self, buf: &Buf, to: &str) {
        let grains = &mut self.grains[BufferTracker::range(buf)];
        if grains.contains(&true) {
            let text = format!("a buffer is given to the {to} that somebody else has: {buf:?}");
            self.fault.get_or_insert(text);
        }
        grains.fill(true);
        self.bytes += u64::from(buf.capacity());
    }

    /// A buffer is returned.
    fn returns(&mut self, buf: &Buf, from: &str) {
        let grains = &mut self.grains[BufferTracker::range(buf)];
        if grains.contains(&false) {
            let text = format!("the {from} gives a buffer that it does not have: {buf:?}");
            self.fault.get_or_insert(text);
        }
        grains.fill(false);
        self.bytes = self.bytes.saturating_sub(u64::from(buf.capacity()));
    }
}

/// A tracker with several users on one thread.
pub type SharedBufferTracker = Arc<Mutex<BufferTracker>>;

/// Locks a tracker.
pub fn lock(buffers: &SharedBufferTracker) -> MutexGuard<'_, BufferTracker> {
    buffers.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A seeded bug: a response is sent twice.
#[derive(Debug)]
pub struct Echo {
    /// Number of responses before that.
    pub after: u32,
    /// A buffer for the second one.
    pub spare: Option<Buf>,
}

const ECHO: Tag = Tag::MAX;

/// An instrumented fabric.
pub struct InstrumentedFabric<F> {
    /// The fabric itself.
    pub fabric: F,
    /// A seeded bug.
    pub echo: Option<Echo>,
    /// Name and number of its owner, for the trace.
    name: &'static str,
    number: u64,
    region: Arc<Region>,
    buffers: SharedBufferTracker,
    trace: Arc<Trace>,
}

impl<F: Fabric> InstrumentedFabric<F> {
    /// Instruments a fabric whose buffers are those of `region`.
    pub fn new(
        fabric: F,
        (name, number): (&'static str, u64),
        region: Arc<Region>,
        buffers: SharedBufferTracker,
        trace: Arc<Trace>,
    ) -> InstrumentedFabric<F> {
        InstrumentedFabric { fabric, echo: None, name, number, region, buffers, trace }
    }

    fn note(&self, qp: Qp, what: u64, more: u64, line: impl FnOnce() -> String) {
        let words = [self.number << 8 | what, u64::from(qp.0), more];
        self.trace
            .note(words, || format!("{:6} {} qp {:2} {}", self.name, self.number, qp.0, line()));
    }

    /// Describes a message.
    fn message(&self, buf: &Buf, len: u32) -> String {
        let bytes = self.region.bytes(buf);
        match (len, bytes.first_chunk(), bytes.first_chunk()) {
            (16, Some(bytes), _) => {
                let Cqe { cid, status, result, .. } = Cqe::parse(bytes);
                format!("answer to {cid:04x}: {status}, {result:#x}")
            }
            (64.., _, Some(bytes)) => {
                let sqe = Sqe::parse(bytes);
                let (cid, opcode, nsid) = (sqe.cid, sqe.opcode, sqe.nsid);
                let words = [sqe.cdw10, sqe.cdw11, sqe.cdw12];
                format!("command {cid:04x}: opcode {opcode:02x}, namespace {nsid}, {words:x?}")
            }
            _ => format!("a message of {len} bytes"),
        }
    }

    /// Sends the same response again, when it is due.
    fn echo(&mut self, qp: Qp, from: &Buf) {
        let Some(echo) = &mut self.echo else { return };
        if from.len() != Cqe::BYTES as u32 {
            return;
        }
        echo.after = echo.after.saturating_sub(1);
        if echo.after == 0
            && let Some(mut spare) = echo.spare.take()
        {
            spare.select(0, from.len());
            self.region.bytes_mut(&mut spare).copy_from_slice(self.region.bytes(from));
            self.fabric.post(qp, ECHO, Work::Send { from: spare, invalidate: None });
        }
    }

    fn on_done(&mut self, done: &Completion) {
        lock(&self.buffers).returns(done.work.buf(), "fabric");
        let outcome = done.outcome.map_or(u64::MAX, u64::from);
        let kind = match &done.work {
            Work::Recv(_) => 1,
            Work::Send { .. } => 2,
            Work::Read { .. } => 3,
            Work::Write { .. } => 4,
            Work::SendImmediate { .. } | Work::WriteImmediate { .. } => 5,
        };
        self.note(done.qp, 0x20 | kind, outcome, || match (&done.work, done.outcome) {
            (Work::Recv(buf), Ok(len)) => format!("receives {}", self.message(buf, len)),
            (Work::Recv(_), Err(fault)) => format!("a receive comes home: {fault}"),
            (Work::Send { .. }, Ok(_)) => "sent".to_owned(),
            (Work::Read { .. }, Ok(len)) => format!("{len} bytes pulled"),
            (Work::Write { .. }, Ok(len)) => format!("{len} bytes pushed"),
            (Work::SendImmediate { .. } | Work::WriteImmediate { .. }, Ok(_)) => {
                "sent with immediate data".to_owned()
            }
            (_, Err(fault)) => format!("work comes home: {fault}"),
        });
    }
}

impl<F: Fabric> Fabric for InstrumentedFabric<F> {
    fn listen(&mut self, at: SocketAddr) -> Result<(), FabricError> {
        self.fabric.listen(at)
    }

    fn unlisten(&mut self, at: SocketAddr) {
        self.fabric.unlisten(at);
    }

    fn open(&mut self, incoming: Incoming, limits: QpLimits) -> Result<Qp, FabricError> {
        let qp = self.fabric.open(incoming, limits)?;
        self.note(qp, 0x30, 0, || "opens".to_owned());
        Ok(qp)
    }

    fn accept(&mut self, qp: Qp, private_data: &[u8]) {
        self.note(qp, 0x31, 0, || "accepts".to_owned());
        self.fabric.accept(qp, private_data);
    }

    fn reject(&mut self, incoming: Incoming, private_data: &[u8]) {
        self.note(Qp(u32::MAX), 0x32, 0, || format!("rejects {}", incoming.remote));
        self.fabric.reject(incoming, private_data);
    }

    fn hints(&self) -> FabricHints {
        self.fabric.hints()
    }

    fn is_batch_full(&self) -> bool {
        self.fabric.is_batch_full()
    }

    fn stats(&self, stats: &mut FabricStats) {
        self.fabric.stats(stats);
    }

    fn admit(&mut self, qp: Qp) {
        self.note(qp, 0x35, 0, || "lets in".to_owned());
        self.fabric.admit(qp);
    }

    fn disconnect(&mut self, qp: Qp) {
        self.note(qp, 0x34, 0, || "disconnects".to_owned());
        self.fabric.disconnect(qp);
    }

    fn post(&mut self, qp: Qp, tag: Tag, work: Work) {
        lock(&self.buffers).leaves(work.buf(), "fabric");
        match &work {
            Work::Recv(_) => {}
            Work::Send { from, .. } => {
                let len = from.len();
                self.note(qp, 0x42, len.into(), || format!("sends {}", self.message(from, len)));
                self.echo(qp, from);
            }
            Work::Read { into, from } => {
                self.note(qp, 0x43, into.len().into(), || format!("pulls {from:x?}"));
            }
            Work::Write { from, to } => {
                self.note(qp, 0x44, from.len().into(), || format!("pushes {to:x?}"));
            }
            // Neither target nor host of NVMe posts any.
            Work::SendImmediate { immediate, .. } | Work::WriteImmediate { immediate, .. } => {
                self.note(qp, 0x45, (*immediate).into(), || "sends immediate data".to_owned());
            }
        }
        self.fabric.post(qp, tag, work);
    }

    fn flush(&mut self) {
        self.fabric.flush();
    }

    fn poll(&mut self, now: Instant, batch: &mut Vec<Event>) {
        let before = batch.len();
        self.fabric.poll(now, batch);
        if let Some(echo) = &mut self.echo {
            // The buffer of the second response is kept until the end.
            let of_echo = |event: &mut Event| matches!(event, Event::Done(d) if d.tag == ECHO);
            for event in batch.extract_if(before.., of_echo) {
                if let Event::Done(done) = event {
                    *echo = Echo { after: u32::MAX, spare: Some(done.work.into_buf()) };
                }
            }
        }
        for event in &batch[before..] {
            match event {
                Event::Done(done) => self.on_done(done),
                Event::Established(qp) => self.note(*qp, 0x50, 0, || "is up".to_owned()),
                Event::Gone(qp, reason) => {
                    self.note(*qp, 0x51, 0, || format!("is gone: {reason:?}"));
                }
                Event::Incoming(incoming) => {
                    let line = || format!("is asked for a connection by {}", incoming.remote);
                    self.note(Qp(u32::MAX), 0x52, 0, line);
                }
                Event::ListenerLost(at) => {
                    self.note(Qp(u32::MAX), 0x53, 0, || format!("listens no more at {at}"));
                }
            }
        }
    }

    fn arm(&mut self, wake: Wake) -> Option<Instant> {
        self.fabric.arm(wake)
    }

    fn deadline(&self) -> Option<Instant> {
        self.fabric.deadline()
    }

    fn fd(&self) -> RawFd {
        self.fabric.fd()
    }
}

impl<F: Initiator> Initiator for InstrumentedFabric<F> {
    fn connect(
        &mut self,
        to: SocketAddr,
        private_data: &[u8],
        limits: QpLimits,
    ) -> Result<Qp, FabricError> {
        let qp = self.fabric.connect(to, private_data, limits)?;
        self.note(qp, 0x33, 0, || format!("asks {to} for a connection"));
        Ok(qp)
    }

    fn register_remote(&mut self, qp: Qp, buf: Buf) -> Result<RemoteRegion, (Buf, FabricError)> {
        lock(&self.buffers).leaves(&buf, "fabric, exposed");
        let exposed = self.fabric.register_remote(qp, buf);
        if let Err((buf, _)) = &exposed {
            lock(&self.buffers).returns(buf, "fabric");
        }
        exposed
    }

    fn deregister_remote(&mut self, region: RemoteRegion) -> Buf {
        let buf = self.fabric.deregister_remote(region);
        lock(&self.buffers).returns(&buf, "fabric, exposed");
        buf
    }

    fn short_message_bytes(&self, qp: Qp) -> u32 {
        self.fabric.short_message_bytes(qp)
    }
}

/// An instrumented device.
pub struct InstrumentedDevice<'a, D> {
    /// The disk itself.
    pub disk: D,
    /// Tracker of the pool whose buffers it uses.
    pub buffers: &'a SharedBufferTracker,
}

impl<D: BlockDevice> BlockDevice for InstrumentedDevice<'_, D> {
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest) {
        if let IoRequest::Read { into: buf, .. } | IoRequest::Write { from: buf, .. } = &op {
            lock(self.buffers).leaves(buf, "disk");
        }
        self.disk.submit(backing, tag, op);
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.disk.recall(tag, of);
    }

    fn recall_all(&mut self, requests: &[CancelRequest]) {
        self.disk.recall_all(requests);
    }
}

impl<D> InstrumentedDevice<'_, D> {
    /// Completions of the device.
    pub fn returned(buffers: &SharedBufferTracker, done: &[IoCompletion]) {
        let mut buffers = lock(buffers);
        done.iter()
            .filter_map(|done| done.buf.as_ref())
            .for_each(|buf| buffers.returns(buf, "disk"));
    }
}
