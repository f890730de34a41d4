//! A simulated host: an association on a simulated fabric, commands of every kind, and processing
//! of their completions.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use initiator::session::{Data, EndReason, Io, Options, Phase, Request, Session, Violation};
use nvme::feature::{FeatureId, SetFeatures, WriteProtectState};
use nvme::sqe::Flags;
use nvme::{Nqn, Sgl, Sqe};
use rdma::soft::Soft;
use rdma::soft::sim::{Network, NetworkPort, Rng};
use rdma::{Event, Fabric, Pool, Qp, Wake, Work};

use super::auth_keys::{Proofs, secret};
use super::instrument::{BufferTracker, InstrumentedFabric, SharedBufferTracker, lock};
use super::oracle::Oracle;
use super::scenario::Profile;
use super::target::{PORT, subnqn};
use super::trace::Trace;
use super::workload::command::{Kind, Op};
use super::{config, entropy};

/// Maximum of events that a host takes in one iteration.
const BATCH: usize = 64;
/// Delay until a host reconnects.
const BACKOFF: Duration = Duration::from_millis(50);
/// Command id that its session does not use.
const FORGED: u16 = 0xEEEE;
/// Timeout of the bring-up and of a command.
const PATIENCE: Duration = Duration::from_secs(30);

/// A host.
pub struct Host {
    index: usize,
    port: NetworkPort,
    fabric: Option<InstrumentedFabric<Soft>>,
    pool: Pool,
    buffers: SharedBufferTracker,
    session: Option<Session>,
    /// When to connect; none while there is an association, or none is wanted.
    connect_at: Option<Instant>,
    /// Nothing is sent before this.
    pub quiet_until: Instant,
    /// Outstanding commands, by tag.
    ops: Vec<Option<Op>>,
    free: Vec<usize>,
    events: Vec<Event>,
    dice: Rng,
    /// The second half of a fused command, to be sent next, and its queue.
    owed: Option<(u16, Op)>,
    /// An association was ended on purpose.
    leaving: bool,
    /// No further association.
    finished: bool,
    connects: u64,
}

impl Host {
    /// A host that is switched off.
    pub fn new(
        index: usize,
        profile: &Profile,
        air: &Arc<Mutex<Network>>,
        seed: u64,
        now: Instant,
    ) -> Result<Host, String> {
        let port = NetworkPort::new(air, profile.address(Some(index)), (1, 0));
        let options = options(profile, index, true);
        let plan = options.plan(u64::from(profile.mdts_bytes) * 24, profile.mdts_bytes);
        let pool = Pool::new(plan).map_err(|e| e.to_string())?;
        let buffers = Arc::new(Mutex::new(BufferTracker::new(&plan)));
        Ok(Host {
            index,
            port,
            fabric: None,
            pool,
            buffers,
            session: None,
            connect_at: None,
            quiet_until: now,
            ops: Vec::new(),
            free: Vec::new(),
            events: Vec::with_capacity(BATCH),
            dice: Rng::new(seed),
            owed: None,
            leaving: false,
            finished: false,
            connects: 0,
        })
    }

    /// Its place in the simulated network.
    pub fn place(&self) -> usize {
        self.port.place()
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.port.address()
    }

    /// Whether it is switched on.
    pub fn is_up(&self) -> bool {
        self.fabric.is_some()
    }

    /// Whether commands can be sent.
    pub fn is_ready(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.phase() == Phase::Ready)
    }

    /// Number of outstanding commands.
    pub fn outstanding(&self) -> usize {
        self.ops.len() - self.free.len()
    }

    /// Switches it on.
    pub fn start(
        &mut self,
        profile: &Profile,
        trace: &Arc<Trace>,
        now: Instant,
    ) -> Result<(), String> {
        let config = config(profile, self.dice.roll(), (1, 0));
        let entropy = entropy(self.dice.roll());
        let region = Arc::clone(self.pool.region());
        let soft = Soft::simulated(self.port.clone(), config, entropy, now, Arc::clone(&region))
            .map_err(|e| e.to_string())?;
        let name = ("host", self.index as u64);
        let (buffers, trace) = (Arc::clone(&self.buffers), Arc::clone(trace));
        self.fabric = Some(InstrumentedFabric::new(soft, name, region, buffers, trace));
        self.connect_at = (!self.finished).then_some(now);
        Ok(())
    }

    /// Switches it off: only its record of submitted commands is kept.
    pub fn crash(
        &mut self,
        profile: &Profile,
        judge: &mut Oracle,
        now: Instant,
    ) -> Result<(), String> {
        self.session = None;
        self.fabric = None;
        self.connect_at = None;
        self.owed = None;
        self.leaving = false;
        judge.forget_association(self.index);
        for tag in 0..self.ops.len() {
            if let Some(op) = self.ops[tag].take() {
                self.free.push(tag);
                judge.lost(op, now);
            }
        }
        let plan = options(profile, self.index, true)
            .plan(u64::from(profile.mdts_bytes) * 24, profile.mdts_bytes);
        self.pool = Pool::new(plan).map_err(|e| e.to_string())?;
        self.buffers = Arc::new(Mutex::new(BufferTracker::new(&plan)));
        Ok(())
    }

    /// Ends its association, with a shutdown or without. It makes a new one unless it has
    /// `finished`.
    pub fn leave(&mut self, orderly: bool, finished: bool, now: Instant) {
        self.finished |= finished;
        if self.finished {
            self.connect_at = None;
        }
        let (Some(session), Some(fabric)) = (&mut self.session, &mut self.fabric) else { return };
        let mut io = Io { pool: &mut self.pool, fabric, now };
        self.leaving = true;
        match orderly {
            true => session.close(&mut io),
            false => session.abort(&mut io),
        }
    }

    /// Whether it has no association and wants none.
    pub fn is_finished(&self) -> bool {
        self.session.is_none() && self.finished
    }

    /// One iteration. Returns the time of the next one.
    pub fn turn(&mut self, profile: &Profile, judge: &mut Oracle, now: Instant) -> Option<Instant> {
        let fabric = self.fabric.as_mut()?;
        fabric.poll(now, &mut self.events);
        let mut io = Io { pool: &mut self.pool, fabric, now };
        let impostor = profile.proofs == Proofs::AllBut(self.index);
        for event in self.events.drain(..) {
            if let (Event::Established(qp), true) = (&event, impostor && self.dice.per_mille(300)) {
                forge(*qp, &mut io);
            }
            let stray = match &mut self.session {
                Some(session) => session.on_event(event, &mut io),
                None => Some(event),
            };
            if let Some(Event::Done(done)) = stray {
                io.pool.give(done.work.into_buf());
            }
        }
        if self.connect_at.is_some_and(|at| at <= now) && self.session.is_none() {
            self.connect_at = None;
            self.connects += 1;
            let in_capsule = self.dice.per_mille(500);
            let mut session = Session::new(options(profile, self.index, in_capsule));
            session.start(&mut io);
            self.session = Some(session);
        }
        let mut wake = self.connect_at;
        if let Some(session) = &mut self.session {
            wake = session.tick(&mut io);
        }
        self.take_done(judge, now);
        if self.is_ready() && impostor {
            judge.fail(format!("host {}: it was let in without its secret", self.index));
        }
        if self.is_ready() && self.quiet_until <= now {
            self.issue(profile, judge, now);
        } else if self.is_ready() {
            wake = earlier(wake, Some(self.quiet_until));
        }
        self.conclude(profile, judge, now);
        let fabric = self.fabric.as_mut()?;
        fabric.flush();
        wake = earlier(wake, earlier(fabric.arm(Wake::Any), self.connect_at));
        earlier(wake, (self.quiet_until > now).then_some(self.quiet_until))
    }

    fn take_done(&mut self, judge: &mut Oracle, now: Instant) {
        let Some(session) = &mut self.session else { return };
        while let Some(done) = session.next_done() {
            let buf = match done.data {
                Data::Buf(buf) => Some(buf),
                Data::None | Data::Exposed { .. } => None,
            };
            let tag = done.tag as usize;
            match self.ops.get_mut(tag).and_then(Option::take) {
                Some(op) => {
                    self.free.push(tag);
                    judge.note_done(self.index, &op, done.outcome);
                    match done.outcome {
                        Ok(answer) => {
                            let bytes = buf.as_ref().map(|buf| self.pool.bytes(buf));
                            judge.answered(op, answer, bytes);
                        }
                        Err(_) => judge.lost(op, now),
                    }
                }
                None => judge.fail(format!(
                    "host {}: a request comes home that is not under way: tag {tag}",
                    self.index
                )),
            }
            buf.into_iter().for_each(|buf| self.pool.give(buf));
        }
        while let Some(event) = session.next_event() {
            judge.news.is_to_read(self.index, event.log());
            judge.trace.note([0x60, self.index as u64, event.0.into()], || {
                format!("host   {} is told of an event: {event:?}", self.index)
            });
        }
    }

    /// Processes the end of an association.
    fn conclude(&mut self, profile: &Profile, judge: &mut Oracle, now: Instant) {
        let Some(session) = self.session.as_ref().filter(|s| s.phase() == Phase::Ended) else {
            return;
        };
        let why = session.ended().cloned().unwrap_or(EndReason::Closed);
        judge.note_ended(self.index, &why);
        let impostor = profile.proofs == Proofs::AllBut(self.index);
        let unknown = Violation::CommandId(FORGED);
        if matches!(&why, EndReason::Violation { what, .. } if *what == unknown) && impostor {
            // The response to the command that it must not send, unknown to its session.
        } else if let EndReason::Violation { .. } = why {
            judge.fail(format!("host {}: {why}", self.index));
        } else if !self.leaving && !judge.excuses(self.index, profile, &why, now) {
            judge.fail(format!(
                "host {}: the association ended, and nothing had happened that excuses it: {why}",
                self.index
            ));
        }
        self.leaving = false;
        self.owed = None;
        self.session = None;
        if !self.finished {
            self.connect_at = Some(now + BACKOFF + self.dice.part(BACKOFF * 20));
        }
    }

    /// Submits commands up to the queue depth.
    fn issue(&mut self, profile: &Profile, judge: &mut Oracle, now: Instant) {
        loop {
            let (Some(session), Some(fabric)) = (&mut self.session, &mut self.fabric) else {
                return;
            };
            if session.phase() != Phase::Ready {
                return;
            }
            judge.made.cntlids[self.index] = session.cntlid();
            let is_open = |queue: &u16| session.is_open(*queue);
            let open: Vec<u16> = (1..=session.io_queues()).filter(is_open).collect();
            // At least one is kept.
            let queue = open[self.dice.below(open.len() as u64) as usize];
            // No other command is sent between the halves of a fused command.
            let owed = self.owed.take();
            let queue = owed.as_ref().map_or(queue, |(queue, _)| *queue);
            let departs = owed.is_none() && open.len() > 1;
            let room = session.capacity(queue).saturating_sub(session.outstanding(queue));
            if room == 0 {
                self.owed = owed;
                return;
            }
            let next = owed.map(|(_, op)| op);
            let departure = || judge.next_departure(self.index, &mut self.dice);
            let next = next.or_else(|| departs.then(departure).flatten());
            let next = next.or_else(|| judge.next_op(self.index, profile, &mut self.dice));
            let Some(mut op) = next else { return };
            if op.half == Flags::FUSED_FIRST && room < 2 {
                op.half = 0;
            }
            let queue = if op.is_admin() { 0 } else { queue };
            let buf = match op.data_bytes() {
                0 => None,
                len => match self.pool.take_data(len) {
                    Some(buf) => Some(buf),
                    None => return self.keep(queue, op, judge),
                },
            };
            let data = buf.map_or(Data::None, |mut buf| {
                op.fill(self.pool.bytes_mut(&mut buf));
                Data::Buf(buf)
            });
            let sqe = op.sqe();
            let tag = self.free.pop().unwrap_or_else(|| {
                self.ops.push(None);
                self.ops.len() - 1
            });
            let request = Request { sqe, data, tag: tag as u64 };
            let mut io = Io { pool: &mut self.pool, fabric, now };
            let sent = match op.kind {
                Kind::Leave => {
                    session.disconnect(queue, request.tag, &mut io).map_err(|_| Data::None)
                }
                _ => session.submit(queue, request, &mut io).map_err(|(request, _)| request.data),
            };
            match sent {
                Ok(()) => {
                    judge.note_sent(self.index, queue, &op);
                    if op.kind == Kind::Disable {
                        (self.leaving, judge.disabled[self.index]) = (true, true);
                    }
                    let cid = session.command_id(queue, tag as u64).unwrap_or_default();
                    let op = judge.leaves(op, queue, cid);
                    let first = op.half == Flags::FUSED_FIRST;
                    self.owed = first.then(|| (queue, judge.second_half(&op)));
                    self.ops[tag] = Some(op);
                }
                Err(data) => {
                    self.free.push(tag);
                    if let Data::Buf(buf) = data {
                        self.pool.give(buf);
                    }
                    return self.keep(queue, op, judge);
                }
            }
            if self.owed.is_none() && self.dice.per_mille(profile.pause) {
                self.quiet_until = now + self.dice.part(profile.pause_for);
                return;
            }
        }
    }

    /// A command could not be sent now. The second half of a fused one is kept.
    fn keep(&mut self, queue: u16, op: Op, judge: &mut Oracle) {
        judge.put_back(&op);
        if op.half == Flags::FUSED_SECOND {
            self.owed = Some((queue, op));
        }
    }

    /// Checks that no buffer has two owners.
    pub fn audit(&self) -> Result<(), String> {
        match lock(&self.buffers).fault() {
            Some(fault) => Err(format!("host {}: {fault}", self.index)),
            None => Ok(()),
        }
    }

    /// What is left at the end, if anything.
    pub fn leftovers(&self) -> Result<(), String> {
        self.audit()?;
        match self.pool.is_full() && lock(&self.buffers).bytes() == 0 {
            true => Ok(()),
            false => Err(format!(
                "host {}: at rest, and only {:?} are free",
                self.index,
                self.pool.free()
            )),
        }
    }
}

/// Sends a command on a queue that is not authenticated: namespace 1 is write protected. If it is
/// executed, writes are refused without a reason known to the oracle.
fn forge(qp: Qp, io: &mut Io<'_>) {
    let state = WriteProtectState::PROTECTED.0.into();
    let set = SetFeatures::new(FeatureId::NAMESPACE_WRITE_PROTECT, state);
    let sqe = SetFeatures { nsid: 1, ..set }.emit(Sgl::NONE).with_cid(FORGED);
    if let Some(mut capsule) = io.pool.take_cell() {
        capsule.select(0, Sqe::BYTES as u32);
        io.pool.bytes_mut(&mut capsule).copy_from_slice(&sqe.emit());
        io.fabric.post(qp, 0, Work::Send { from: capsule, invalidate: None });
    }
}

fn options(profile: &Profile, index: usize, in_capsule: bool) -> Options {
    let hostnqn = hostnqn(profile.machine(index));
    let to = SocketAddr::new(profile.address(None), PORT + profile.path(index) as u16);
    let machine = profile.machine(index);
    Options {
        io_queues: profile.io_queues,
        queue_entries: profile.entries,
        kato_ms: profile.kato_ms,
        in_capsule,
        connect_timeout: PATIENCE,
        command_timeout: PATIENCE,
        secret: secret(profile, index),
        ..Options::new(to, subnqn(), hostnqn, [machine as u8 + 1; 16])
    }
}

/// The NQN of a host.
pub fn hostnqn(machine: usize) -> Nqn {
    format!("nqn.2026-11.host:{machine}").parse().expect("a name")
}

fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    a.into_iter().chain(b).min()
}
