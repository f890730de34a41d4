//! Controller initialization in the same order as Linux: admin connection, Connect, CAP, enable,
//! ready, Identify, number of queues, all I/O connections, Connect on each, events.

use std::time::{Duration, Instant};

use nvme::auth::Failure;
use nvme::fabrics::{
    CNTLID_DYNAMIC, Connect, ConnectData, ConnectResult, InvalidParameter, PropertyGet, PropertySet,
};
use nvme::feature::{AsyncEventConfig, FeatureId, NumberOfQueues, SetFeatures};
use nvme::identify::{Cns, ControllerType, Identify, IdentifyController};
use nvme::property::{Cap, Cc, Crto, Csts, Property, Vs};
use nvme::{Sgl, Sqe, Status};
use rdma::{Buf, Qp};

use super::auth::AuthStep;
use super::queue::{MOST_ENTRIES, Owner, Queue, Sending};
use super::{ADMIN_ENTRIES, Data, EndReason, Io, Options, Phase, Response, Session, Violation};

/// Interval of polling whether the controller is ready, or has shut down.
const STATUS_INTERVAL: Duration = Duration::from_millis(5);

/// The pending step of controller initialization.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Step {
    Nothing,
    /// The connection of a queue.
    Connection(u16),
    /// Connect on a queue.
    Connect(u16),
    /// Authentication on a queue.
    Authenticate(u16, AuthStep),
    Capabilities,
    ReadyTimeouts,
    Enable,
    Ready,
    Version,
    Identify,
    NumberOfQueues,
    EventConfiguration,
    Shutdown,
    ShutdownStatus,
}

impl Step {
    pub(super) fn is_shutdown(self) -> bool {
        matches!(self, Step::Shutdown | Step::ShutdownStatus)
    }

    fn name(self) -> &'static str {
        match self {
            Step::Nothing | Step::Connection(_) => "a connection",
            Step::Connect(_) => "Connect",
            Step::Authenticate(_, talk) => talk.name(),
            Step::Capabilities => "Property Get (CAP)",
            Step::ReadyTimeouts => "Property Get (CRTO)",
            Step::Enable | Step::Shutdown => "Property Set (CC)",
            Step::Ready | Step::ShutdownStatus => "Property Get (CSTS)",
            Step::Version => "Property Get (VS)",
            Step::Identify => "Identify Controller",
            Step::NumberOfQueues => "Set Features (Number of Queues)",
            Step::EventConfiguration => "Set Features (Asynchronous Event Configuration)",
        }
    }
}

impl Session {
    /// Starts: requests the connection of the admin queue.
    pub fn start(&mut self, io: &mut Io<'_>) {
        if self.phase != Phase::Idle {
            return;
        }
        self.phase = Phase::Starting;
        self.deadline = io.now.checked_add(self.options.connect_timeout);
        self.open(0, ADMIN_ENTRIES, 0, io);
    }

    pub(super) fn on_established(&mut self, qid: u16, qp: Qp, io: &mut Io<'_>) {
        if let Some(queue) = self.queues.get_mut(usize::from(qid)) {
            queue.established(qp, io);
        }
        if self.ended.is_some() || self.step != Step::Connection(qid) {
            return;
        }
        match qid {
            0 => self.connect(0, io),
            qid if qid < self.granted => self.open_io(qid + 1, io),
            _ => self.connect(1, io),
        }
    }

    /// Handles the completion of the command of the current step, and its page.
    pub(super) fn on_step(&mut self, answer: Response, page: Option<&Buf>, io: &mut Io<'_>) {
        let Response { status, result } = answer;
        match (self.step, status.is_success()) {
            (Step::Connect(qid), false) => self.connect_refused(qid, status, result, io),
            (Step::EventConfiguration, false) => {
                self.wants_events = false;
                self.become_ready(io);
            }
            (Step::Shutdown | Step::ShutdownStatus, false) => self.end(io),
            (step, false) => self.die(EndReason::Refused { what: step.name(), status }, io),
            (Step::Connect(qid), true) => {
                self.demanded(qid, ConnectResult(result as u32), io);
            }
            (Step::Authenticate(qid, talk), true) => self.on_talk(qid, talk, page, io),
            (Step::Capabilities, true) => self.on_capabilities(Cap(result), io),
            (Step::ReadyTimeouts, true) => {
                let waits = Crto(result as u32).crwmt_500ms();
                self.ready_limit_500ms = self.ready_limit_500ms.max(waits);
                self.enable(io);
            }
            (Step::Enable, true) => {
                self.enabled_at = Some(io.now);
                self.get(Step::Ready, Property::CSTS, io);
            }
            (Step::Ready, true) => self.on_status(Csts(result as u32), io),
            (Step::Version, true) => {
                self.vs = Vs(result as u32);
                let sqe = Identify::new(Cns::CONTROLLER, 0).emit(Sgl::NONE);
                self.command(Step::Identify, 0, sqe, Some(nvme::PAGE_BYTES as u32), io);
            }
            (Step::Identify, true) => self.on_identified(page, io),
            (Step::NumberOfQueues, true) => {
                let granted = NumberOfQueues(result as u32);
                let both = granted.submission_z().min(granted.completion_z());
                self.granted = both.saturating_add(1).min(self.options.io_queues.max(1));
                self.open_io(1, io);
            }
            (Step::EventConfiguration, true) => self.become_ready(io),
            (Step::Shutdown | Step::ShutdownStatus, true) => {
                self.on_shutdown(Csts(result as u32), io);
            }
            (Step::Nothing | Step::Connection(_), true) => {}
        }
    }

    /// Polls the controller's status again.
    pub(super) fn look_again(&mut self, io: &mut Io<'_>) {
        let step = self.step;
        if matches!(step, Step::Ready | Step::ShutdownStatus) {
            self.get(step, Property::CSTS, io);
        }
    }

    pub(super) fn poll_later(&mut self, io: &Io<'_>) {
        self.poll_at = io.now.checked_add(STATUS_INTERVAL);
    }

    /// Returns the reason for a time-out of the current step.
    pub(super) fn overdue(&self) -> EndReason {
        let after = self.options.connect_timeout;
        match self.step {
            Step::Connection(0) => EndReason::Unreachable { to: self.options.to },
            Step::Connection(queue) => EndReason::SlowConnection { queue, after },
            Step::Authenticate(queue, talk) => {
                EndReason::Timeout { queue, what: talk.name(), after }
            }
            Step::Connect(queue) => EndReason::Timeout { queue, what: "Connect", after },
            step => EndReason::Timeout { queue: 0, what: step.name(), after },
        }
    }

    pub(super) fn get(&mut self, step: Step, property: Property, io: &mut Io<'_>) {
        self.command(step, 0, PropertyGet::new(property).emit(), None, io);
    }

    /// Sends the command of a step, with a page to read if it has a length.
    pub(super) fn command(
        &mut self,
        step: Step,
        qid: u16,
        sqe: Sqe,
        page: Option<u32>,
        io: &mut Io<'_>,
    ) {
        let data = match page.map(|len| io.pool.take_any(len)) {
            None => Data::None,
            Some(Some(buf)) => Data::Buf(buf),
            Some(None) => return self.die(EndReason::NoMemory, io),
        };
        self.command_with(step, qid, sqe, data, io);
    }

    pub(super) fn command_with(
        &mut self,
        step: Step,
        qid: u16,
        sqe: Sqe,
        data: Data,
        io: &mut Io<'_>,
    ) {
        self.step = step;
        let sending = Sending { owner: Owner::Step, sqe, data, deadline: self.deadline };
        let Some(queue) = self.queues.get_mut(usize::from(qid)) else { return };
        if let Err((data, _)) = queue.send(sending, io) {
            let why = queue.trouble().map_or(EndReason::NoMemory, EndReason::Fabric);
            data.into_buf().into_iter().for_each(|buf| io.pool.give(buf));
            match self.ended {
                None => self.die(why, io),
                Some(_) => self.end(io),
            }
        }
    }

    fn open(&mut self, qid: u16, entries: u16, in_capsule_bytes: u32, io: &mut Io<'_>) {
        self.step = Step::Connection(qid);
        let mut queue = Queue::new(qid, entries, in_capsule_bytes);
        let opened = queue.open(&self.options, self.cntlid, io);
        self.queues.push(queue);
        if let Err(why) = opened {
            self.die(why, io);
        }
    }

    fn open_io(&mut self, qid: u16, io: &mut Io<'_>) {
        let most = match self.controller.maxcmd {
            0 => MOST_ENTRIES,
            maxcmd => maxcmd.min(MOST_ENTRIES),
        };
        let most = most.min(self.cap.mqes_z().saturating_add(1)).max(2);
        self.open(qid, self.options.queue_entries.clamp(2, most), self.in_capsule_bytes(), io);
    }

    fn connect(&mut self, qid: u16, io: &mut Io<'_>) {
        let cntlid = if qid == 0 { CNTLID_DYNAMIC } else { self.cntlid };
        let Options { hostid, subnqn, hostnqn, kato_ms, .. } = &self.options;
        let data = ConnectData::new(*hostid, cntlid, subnqn, hostnqn).emit();
        let entries = self.queues.get(usize::from(qid)).map_or(2, Queue::entries);
        let connect = Connect {
            qid,
            sqsize_z: entries - 1,
            kato_ms: if qid == 0 { *kato_ms } else { 0 },
            ..Connect::default()
        };
        let Some(mut buf) = io.pool.take_any(ConnectData::BYTES as u32) else {
            return self.die(EndReason::NoMemory, io);
        };
        io.pool.bytes_mut(&mut buf).copy_from_slice(&data);
        self.command_with(Step::Connect(qid), qid, connect.emit(Sgl::NONE), Data::Buf(buf), io);
    }

    fn connect_refused(&mut self, queue: u16, status: Status, result: u64, io: &mut Io<'_>) {
        let names = status.is(Status::CONNECT_INVALID_PARAMETERS);
        let ended = EndReason::ConnectRefused {
            queue,
            status,
            parameter: names.then(|| InvalidParameter::parse(result as u32)),
            subnqn: Box::new(self.options.subnqn),
            hostnqn: Box::new(self.options.hostnqn),
        };
        self.die(ended, io);
    }

    /// Connect has succeeded: starts authentication if the target requires it.
    fn demanded(&mut self, qid: u16, result: ConnectResult, io: &mut Io<'_>) {
        if qid == 0 {
            self.cntlid = result.cntlid();
        }
        let expects_proof =
            self.options.controller_secret.is_some() && !self.options.subnqn.is_discovery();
        match (result.ascr(), result.atr()) {
            (true, _) => self.die(EndReason::Unsupported("it demands a secure channel"), io),
            (_, true) => self.authenticate(qid, io),
            _ if expects_proof => {
                self.die(EndReason::Unproved { queue: qid, why: Failure::PROTOCOL_UNUSABLE }, io);
            }
            _ => self.connected_queue(qid, io),
        }
    }

    /// A queue is connected, and authenticated if required.
    pub(super) fn connected_queue(&mut self, qid: u16, io: &mut Io<'_>) {
        match qid {
            0 => self.get(Step::Capabilities, Property::CAP, io),
            qid if qid < self.granted => self.connect(qid + 1, io),
            _ => self.configure_events(io),
        }
    }

    fn on_capabilities(&mut self, cap: Cap, io: &mut Io<'_>) {
        self.cap = cap;
        self.ready_limit_500ms = u16::from(cap.to_500ms());
        match cap.crwms() {
            true => self.get(Step::ReadyTimeouts, Property::CRTO, io),
            false => self.enable(io),
        }
    }

    fn enable(&mut self, io: &mut Io<'_>) {
        let cc = self.configuration().with_en(true);
        let sqe = PropertySet::new(Property::CC, cc.0.into()).emit();
        self.command(Step::Enable, 0, sqe, None, io);
    }

    /// Value of CC for this host, except for the enable bit.
    pub(super) fn configuration(&self) -> Cc {
        let sets = match self.cap.css() & Cap::CSS_MULTIPLE {
            0 => Cc::CSS_NVM,
            _ => Cc::CSS_ALL,
        };
        Cc(0)
            .with_css(sets)
            .with_mps(self.cap.mpsmin())
            .with_iosqes(Cc::SQE_64_BYTES)
            .with_iocqes(Cc::CQE_16_BYTES)
    }

    fn on_status(&mut self, csts: Csts, io: &mut Io<'_>) {
        if csts.cfs() {
            return self.die(EndReason::Fatal, io);
        }
        if csts.rdy() {
            return self.get(Step::Version, Property::VS, io);
        }
        let limit = Duration::from_millis(500) * (u32::from(self.ready_limit_500ms) + 1);
        let since = self.enabled_at.unwrap_or(io.now);
        match io.now.saturating_duration_since(since) >= limit {
            true => self.die(EndReason::NotReady { waited: limit }, io),
            false => self.poll_later(io),
        }
    }

    fn on_identified(&mut self, page: Option<&Buf>, io: &mut Io<'_>) {
        let Some(page) = page.and_then(|page| io.pool.bytes(page).first_chunk()) else { return };
        *self.controller = IdentifyController::parse(page);
        let discovery = self.options.subnqn.is_discovery();
        if let Err(why) = check(&self.controller, self.cntlid, discovery) {
            return self.die(why, io);
        }
        self.begin_keep_alive(io.now);
        if discovery {
            return self.configure_events(io);
        }
        let both = self.options.io_queues.max(1) - 1;
        let wanted = NumberOfQueues(0).with_submission_z(both).with_completion_z(both);
        let sqe = SetFeatures::new(FeatureId::NUMBER_OF_QUEUES, wanted.0).emit(Sgl::NONE);
        self.command(Step::NumberOfQueues, 0, sqe, None, io);
    }

    fn configure_events(&mut self, io: &mut Io<'_>) {
        let wanted = AsyncEventConfig(0)
            .with_namespace_attribute(true)
            .with_firmware_activation(true)
            .with_ana_change(true)
            .with_discovery_log(true);
        let both = self.controller.oaes.0 & wanted.0;
        if both == 0 {
            return self.become_ready(io);
        }
        self.wants_events = true;
        let sqe = SetFeatures::new(FeatureId::ASYNC_EVENT_CONFIG, both).emit(Sgl::NONE);
        self.command(Step::EventConfiguration, 0, sqe, None, io);
    }

    fn become_ready(&mut self, io: &mut Io<'_>) {
        self.step = Step::Nothing;
        self.deadline = None;
        self.phase = Phase::Ready;
        self.room = self.queues.iter().map(|queue| usize::from(queue.slots())).sum();
        // Finished requests may wait for the caller while the same number is outstanding.
        self.done.reserve_exact(self.room * 2);
        self.ask_for_event(io);
    }
}

/// Checks that a controller has the properties that a host over RDMA requires.
fn check(page: &IdentifyController, cntlid: u16, discovery: bool) -> Result<(), EndReason> {
    let need = |good: bool, what| if good { Ok(()) } else { Err(EndReason::Unsupported(what)) };
    need(page.sgls.keyed(), "it takes no keyed SGLs")?;
    need(page.icdoff_16 == 0, "its in-capsule data offset is not 0")?;
    if discovery {
        let kind = page.cntrltype;
        let fits = matches!(kind, ControllerType::DISCOVERY | ControllerType::NOT_REPORTED);
        return need(fits, "it is no discovery controller");
    }
    if page.cntlid != cntlid {
        let what = Violation::ControllerId { connect: cntlid, identify: page.cntlid };
        return Err(EndReason::Violation { queue: 0, what });
    }
    need(page.ioccsz_16 >= 4, "its command capsules are shorter than a command")?;
    need(page.iorcsz_16 >= 1, "its response capsules are shorter than a response")?;
    need(page.cntrltype != ControllerType::DISCOVERY, "it is a discovery controller")
}

/// Returns the earlier of two times, if any.
pub(crate) fn earlier(a: Option<Instant>, b: Option<Instant>) -> Option<Instant> {
    match (a, b) {
        (Some(a), Some(b)) => Some(a.min(b)),
        (a, b) => a.or(b),
    }
}
