//! Gateways, hosts, cluster, network and faults on one simulated time.

use std::collections::BTreeMap;
use std::time::Duration;

use nvmfd_gateway::record::Slot;
use nvmfd_gateway::{Action, Event, Operation, OperationId, Outcome, Timing};

use crate::SeededBug;
use crate::node::{Command, Input, Node, Request, declaration};
use crate::rados::Rados;
use crate::random::Random;

/// Faults happen until then.
const FAULTS_END: Duration = Duration::from_secs(60);
/// After the last fault every group is served within this time.
const BOUND: Duration = Duration::from_secs(15);
const END: Duration = Duration::from_secs(90);
const HOST_TIMEOUT: Duration = Duration::from_secs(4);
/// A gateway notices after this time that hosts have gone, or have come.
const FRONT_DELAY: Duration = Duration::from_secs(5);

enum Occurrence {
    /// To the process of a gateway.
    Deliver(usize, u64, Input),
    /// To the cluster, by the client of this address; an update that has timed out before.
    Arrive(usize, u64, String, Request, bool),
    Tick(usize, u64),
    HostSend(u32),
    /// The response to an attempt: whether it is a success.
    HostResponse(Command, bool),
    HostTimeout(Command),
    Fault,
    Heal(Fault),
    /// A gateway learns how hosts reach it.
    Front(usize),
}

#[derive(Clone, Copy, Debug)]
enum Fault {
    Kill(usize),
    Cut(usize),
    Suspend(usize),
    HungOsd,
    HungMonitor,
    Slow,
    Move(usize),
    Leave(usize),
    /// Its listeners change, and until it is healed it has no namespace in the last group.
    Reload(usize),
    /// No host reaches it, and its listener is closed, or is not.
    FrontCut(usize, bool),
}

/// A host that writes ascending numbers to the block of its group.
#[derive(Default)]
struct Host {
    value: u64,
    attempt: u64,
    gateway: usize,
    acknowledged: u64,
    last_success: Duration,
}

pub(crate) struct Simulation {
    random: Random,
    now: Duration,
    sequence: u64,
    queue: BTreeMap<(Duration, u64), Occurrence>,
    rados: Rados,
    osd_hangs_until: Duration,
    monitor_hangs_until: Duration,
    latency_max_us: u64,
    nodes: Vec<Node>,
    hosts: BTreeMap<u32, Host>,
    last_arrival: BTreeMap<(usize, u8), Duration>,
    /// Writes that have been submitted and have not reached the block.
    in_flight: BTreeMap<(u32, String), u32>,
    nonce: u64,
    timing: Timing,
    bug: Option<SeededBug>,
    trace: Vec<String>,
    is_faulty: bool,
}

/// What a run has seen.
#[derive(Default, Debug)]
pub(crate) struct Summary {
    pub(crate) writes: u64,
    pub(crate) epochs: u64,
}

impl Simulation {
    pub(crate) fn new(
        seed: u64,
        gateways: usize,
        is_faulty: bool,
        bug: Option<SeededBug>,
    ) -> Simulation {
        let mut random = Random(seed);
        let mut timing = Timing::default();
        if bug == Some(SeededBug::LateDoubt) {
            timing.doubt = timing.suspicion * 2;
        }
        let groups = 1 + random.below(4) as u32;
        let nodes = (0..gateways).map(|slot| Node::new(slot as Slot, &mut random)).collect();
        let mut simulation = Simulation {
            random,
            now: Duration::ZERO,
            sequence: 0,
            queue: BTreeMap::new(),
            rados: Rados::default(),
            osd_hangs_until: Duration::ZERO,
            monitor_hangs_until: Duration::ZERO,
            latency_max_us: 5000,
            nodes,
            hosts: (1..=groups).map(|group| (group, Host::default())).collect(),
            last_arrival: BTreeMap::new(),
            in_flight: BTreeMap::new(),
            nonce: 0,
            timing,
            bug,
            trace: Vec::new(),
            is_faulty,
        };
        for node in 0..gateways {
            simulation.start(node);
        }
        for group in 1..=groups {
            simulation.after_us(1000, Occurrence::HostSend(group));
        }
        if is_faulty {
            simulation.after_us(5_000_000, Occurrence::Fault);
        }
        simulation
    }

    pub(crate) fn run(&mut self) -> Summary {
        while let Some(((at, _), occurrence)) = self.queue.pop_first() {
            if at > END {
                break;
            }
            self.now = at;
            self.happen(occurrence);
            self.check();
        }
        for (group, host) in &self.hosts {
            let served = host.last_success > END - Duration::from_secs(5);
            assert!(served, "group {group} is not served since {:?}", host.last_success);
        }
        let writes = self.hosts.values().map(|host| host.acknowledged).sum();
        Summary { writes, epochs: self.epochs() }
    }

    pub(crate) fn trace(&self) -> &[String] {
        &self.trace
    }

    pub(crate) fn run_until(&mut self, end: Duration) {
        while let Some(((at, _), _)) = self.queue.first_key_value()
            && *at <= end
        {
            let Some(((at, _), occurrence)) = self.queue.pop_first() else { return };
            self.now = at;
            self.happen(occurrence);
            self.check();
        }
    }

    pub(crate) fn owner_of(&self, group: u32) -> Option<usize> {
        self.nodes.iter().position(|node| node.runs() && node.is_optimized(group))
    }

    pub(crate) fn kill(&mut self, node: usize) {
        self.nodes[node].kill();
    }

    pub(crate) fn event(&mut self, node: usize, event: Event) {
        self.input(node, Input::Event(event));
    }

    fn after_us(&mut self, us: u64, occurrence: Occurrence) {
        self.at(self.now + Duration::from_micros(us), occurrence);
    }

    fn at(&mut self, at: Duration, occurrence: Occurrence) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), occurrence);
    }

    fn note(&mut self, line: String) {
        let line = format!("{:>9.3} {}", self.now.as_secs_f64(), line);
        self.trace.push(line);
    }

    fn start(&mut self, node: usize) {
        let groups = self.hosts.len() as u32;
        let (now, timing) = (self.now, self.timing);
        self.nodes[node].start(now, groups, timing);
        self.note(format!("gw{node} starts"));
        self.input(node, Input::Event(Event::Tick));
        self.front_changed(node);
    }

    fn happen(&mut self, occurrence: Occurrence) {
        match occurrence {
            Occurrence::Deliver(node, process, input) => {
                if self.nodes[node].process == process {
                    self.input(node, input);
                }
            }
            Occurrence::Arrive(node, process, address, request, is_late) => {
                self.arrive(node, process, address, request, is_late);
            }
            Occurrence::Tick(node, tick) => {
                if self.nodes[node].tick == tick && self.nodes[node].runs() {
                    self.input(node, Input::Event(Event::Tick));
                }
            }
            Occurrence::HostSend(group) => self.host_send(group),
            Occurrence::HostResponse(command, is_success) => {
                self.host_response(command, is_success);
            }
            Occurrence::HostTimeout(command) => {
                let host = self.hosts.get_mut(&command.group).unwrap();
                if host.attempt == command.attempt {
                    host.gateway = (host.gateway + 1) % self.nodes.len();
                    self.host_send(command.group);
                }
            }
            Occurrence::Fault => self.fault(),
            Occurrence::Heal(fault) => self.heal(fault),
            Occurrence::Front(node) => {
                let front = self.nodes[node].front(self.hosts.len());
                self.input(node, Input::Event(Event::Front(front)));
            }
        }
    }

    /// Something reaches the process of a gateway.
    fn input(&mut self, node: usize, input: Input) {
        let of = &mut self.nodes[node];
        // A process that is not there receives nothing, and its successor none of it.
        if of.gateway.is_none() {
            return;
        }
        if of.is_suspended {
            of.inputs.push(input);
            return;
        }
        match input {
            Input::Event(event) => self.handle(node, event),
            Input::Locked(id, group, address) => {
                if of.client == address {
                    of.images.insert(group);
                    self.handle(node, Event::Completed(id, Outcome::Done));
                }
            }
            Input::Command(command) => {
                if !of.is_optimized(command.group) {
                    self.after_us(300, Occurrence::HostResponse(command, false));
                    return;
                }
                of.last_attempt.insert(command.group, command.attempt);
                let (process, client) = (of.process, of.client.clone());
                // Some wait for buffers.
                let us = if self.random.chance(5) { 3_000_000 } else { 2_000 };
                let us = self.random.below(us);
                let submit = Input::Submit(command, client);
                self.after_us(us, Occurrence::Deliver(node, process, submit));
            }
            Input::Submit(command, client) => {
                // A later attempt waits for this one, or this one was cancelled with its queue.
                let is_last = of.last_attempt.get(&command.group) == Some(&command.attempt);
                if !is_last || of.client != client || !of.images.contains(&command.group) {
                    self.after_us(300, Occurrence::HostResponse(command, false));
                    return;
                }
                *of.flights.entry(command.group).or_default() += 1;
                *self.in_flight.entry((command.group, client)).or_default() += 1;
                self.send(node, Request::Write(command));
            }
            Input::Written(command, client, is_done) => {
                if of.client == client {
                    *of.flights.entry(command.group).or_default() -= 1;
                    self.release(node);
                }
                if is_done || self.nodes[node].client != client {
                    self.after_us(300, Occurrence::HostResponse(command, is_done));
                } else {
                    self.after_us(300, Occurrence::HostResponse(command, false));
                    self.handle(node, Event::ClientExcluded);
                }
            }
        }
    }

    fn handle(&mut self, node: usize, event: Event) {
        let clock = self.nodes[node].clock(self.now);
        let Some(gateway) = &mut self.nodes[node].gateway else { return };
        let actions = gateway.handle(clock, event);
        let deadline = gateway.deadline();
        for action in actions {
            match action {
                Action::Start(id, operation) => self.begin(node, id, operation),
                Action::Publish(group, access) => {
                    self.note(format!("gw{node} group {group} {access:?}"));
                    self.nodes[node].access.insert(group, access);
                }
                Action::DropClient(_) => {
                    self.note(format!("gw{node} drops {}", self.nodes[node].client));
                    self.nodes[node].drop_client();
                }
                Action::End(reason) => {
                    self.note(format!("gw{node} ends: {reason:?}"));
                    self.nodes[node].kill();
                    return;
                }
            }
        }
        let of = &mut self.nodes[node];
        of.tick += 1;
        let (tick, at) = (of.tick, of.time_of(deadline));
        self.at(at.max(self.now + Duration::from_micros(1)), Occurrence::Tick(node, tick));
    }

    fn begin(&mut self, node: usize, id: OperationId, operation: Operation) {
        let request = match operation {
            Operation::Connect => Request::Connect(id),
            Operation::Read => Request::Read(id),
            Operation::Update(update) => Request::Update(id, update),
            Operation::Exclude(addresses) => Request::Exclude(id, addresses),
            Operation::Acquire(group, former) => Request::Lock(id, group, former),
            Operation::Release(group) => {
                self.nodes[node].images.remove(&group);
                self.nodes[node].releasing.push((id, group));
                return self.release(node);
            }
        };
        self.send(node, request);
    }

    /// Releases locks of groups that have no writes under way.
    fn release(&mut self, node: usize) {
        let (of, bug) = (&mut self.nodes[node], self.bug);
        let is_idle = |group: u32| {
            of.flights.get(&group).is_none_or(|flights| *flights == 0)
                || bug == Some(SeededBug::EarlyRelease)
        };
        let (idle, busy): (Vec<_>, Vec<_>) =
            of.releasing.drain(..).partition(|(_, group)| is_idle(*group));
        of.releasing = busy;
        for (id, group) in idle {
            self.send(node, Request::Unlock(id, group));
        }
    }

    fn latency_us(&mut self) -> u64 {
        100 + self.random.below(self.latency_max_us)
    }

    /// Requests to the same place arrive in order.
    fn send(&mut self, node: usize, request: Request) {
        let of = &mut self.nodes[node];
        let (process, client) = (of.process, of.client.clone());
        if of.is_cut {
            of.outgoing.push((process, client, request));
            return;
        }
        let line = line(&request);
        let at = self.now + Duration::from_micros(self.latency_us());
        let last = self.last_arrival.entry((node, line)).or_default();
        *last = at.max(*last);
        let at = *last;
        self.at(at, Occurrence::Arrive(node, process, client, request, false));
    }

    fn arrive(
        &mut self,
        node: usize,
        process: u64,
        client: String,
        request: Request,
        is_late: bool,
    ) {
        let is_of_monitor = matches!(request, Request::Exclude(..) | Request::Connect(_));
        let hangs = if is_of_monitor { self.monitor_hangs_until } else { self.osd_hangs_until };
        if hangs > self.now {
            self.at(hangs, Occurrence::Arrive(node, process, client, request, is_late));
            return;
        }
        let completed = |id, outcome| Input::Event(Event::Completed(id, outcome));
        let is_excluded = self.rados.is_excluded(&client);
        let input = match request {
            Request::Connect(id) => {
                self.nonce += 1;
                let address = format!("10.0.0.{node}:0/{}", self.nonce);
                self.connected(node, process, &address);
                completed(id, Outcome::Client(address))
            }
            Request::Read(id) => completed(id, Outcome::Object(self.rados.read())),
            // Now and then it times out, and happens later.
            Request::Update(id, update) if !is_late && self.has_trouble() => {
                let us = self.random.below(4_000_000);
                let request = Request::Update(id, update);
                self.after_us(us, Occurrence::Arrive(node, process, client, request, true));
                completed(id, Outcome::Failed)
            }
            Request::Update(id, update) => {
                let outcome = self.rados.update(&update, self.bug);
                for (key, text) in update.sets.iter().filter(|_| outcome == Outcome::Done) {
                    if !key.to_string().starts_with("hb") {
                        self.note(format!("gw{node} sets {key} {text}"));
                    }
                }
                // Or it times out, and has happened.
                let is_lost = is_late || self.has_trouble();
                completed(id, if is_lost { Outcome::Failed } else { outcome })
            }
            Request::Exclude(..) | Request::Lock(..) if is_excluded => {
                Input::Event(Event::ClientExcluded)
            }
            Request::Exclude(id, addresses) => {
                if self.bug != Some(SeededBug::SkipExclusion) {
                    self.rados.exclude(&addresses);
                }
                completed(id, Outcome::Done)
            }
            Request::Lock(id, group, former) => match self.rados.lock(group, &client, &former) {
                true => Input::Locked(id, group, client),
                false => completed(id, Outcome::Failed),
            },
            Request::Unlock(id, group) => {
                self.rados.unlock(group, &client);
                completed(id, Outcome::Done)
            }
            Request::Write(command) => {
                self.landed(command.group, &client);
                if !is_excluded {
                    self.rados.write(command.group, command.value);
                }
                Input::Written(command, client, !is_excluded)
            }
        };
        self.reply(node, process, input);
    }

    fn has_trouble(&mut self) -> bool {
        self.is_faulty && self.now < FAULTS_END && self.random.chance(1)
    }

    /// The process uses this client from now on.
    fn connected(&mut self, node: usize, process: u64, address: &str) {
        if self.nodes[node].process == process {
            self.nodes[node].client = address.to_owned();
        }
    }

    fn landed(&mut self, group: u32, client: &str) {
        let key = (group, client.to_owned());
        let count = self.in_flight.get_mut(&key).unwrap();
        *count -= 1;
        if *count == 0 {
            self.in_flight.remove(&key);
        }
    }

    fn reply(&mut self, node: usize, process: u64, input: Input) {
        if self.nodes[node].is_cut {
            self.nodes[node].incoming.push((process, input));
            return;
        }
        let us = self.latency_us();
        self.after_us(us, Occurrence::Deliver(node, process, input));
    }

    fn host_send(&mut self, group: u32) {
        let host = self.hosts.get_mut(&group).unwrap();
        host.attempt += 1;
        let (node, attempt) = (host.gateway, host.attempt);
        let command = Command { group, value: host.value + 1, attempt };
        let process = self.nodes[node].process;
        if !self.nodes[node].is_unreached {
            self.after_us(300, Occurrence::Deliver(node, process, Input::Command(command)));
        }
        self.at(self.now + HOST_TIMEOUT, Occurrence::HostTimeout(command));
    }

    fn host_response(&mut self, command: Command, is_success: bool) {
        let host = self.hosts.get_mut(&command.group).unwrap();
        if is_success {
            let block = self.rados.block(command.group);
            assert!(block >= command.value, "an acknowledged write is lost: {block}");
        }
        if host.attempt != command.attempt {
            return;
        }
        if is_success {
            host.value = command.value;
            host.acknowledged += 1;
            host.last_success = self.now;
            self.after_us(10_000, Occurrence::HostSend(command.group));
        } else {
            host.gateway = (host.gateway + 1) % self.nodes.len();
            self.after_us(50_000, Occurrence::HostSend(command.group));
        }
        // Until the next attempt this one has no timeout.
        self.hosts.get_mut(&command.group).unwrap().attempt += 1;
    }

    fn fault(&mut self) {
        if self.now >= FAULTS_END {
            return;
        }
        let us = 200_000 + self.random.below(6_000_000);
        self.after_us(us, Occurrence::Fault);
        let node = self.random.below(self.nodes.len() as u64) as usize;
        // Known seeds find the seeded bugs: those are of runs without reloads.
        let kinds = if self.bug.is_some() { 13 } else { 17 };
        let (fault, longest_s) = match self.random.below(kinds) {
            0 | 1 => (Fault::Kill(node), 10),
            2 | 3 => (Fault::Cut(node), 15),
            4 | 5 => (Fault::Suspend(node), 20),
            6 => (Fault::HungOsd, 8),
            7 => (Fault::HungMonitor, 15),
            8 => (Fault::Slow, 10),
            9 => (Fault::Leave(node), 3),
            10..=12 => (Fault::Move(node), 1),
            13 | 14 => (Fault::Reload(node), 3),
            _ => (Fault::FrontCut(node, self.random.chance(50)), 60),
        };
        let mut duration_us = 100_000 + self.random.below(longest_s * 1_000_000);
        if matches!(fault, Fault::FrontCut(..)) {
            // Every host reaches the gateways at the end.
            let last = FAULTS_END + BOUND - self.now;
            duration_us = duration_us.min(last.as_micros() as u64);
        }
        self.note(format!("fault: {fault:?} for {} ms", duration_us / 1000));
        let end = self.now + Duration::from_micros(duration_us);
        match fault {
            Fault::Kill(node) => {
                self.nodes[node].kill();
                // What the kernel has to send may be sent, or not.
                if self.random.chance(50) {
                    self.forget_outgoing(node);
                }
            }
            Fault::Cut(node) => self.nodes[node].is_cut = true,
            Fault::Suspend(node) => self.nodes[node].is_suspended = true,
            // A shorter one does not end a longer one: requests would overtake those that wait.
            Fault::HungOsd => self.osd_hangs_until = self.osd_hangs_until.max(end),
            Fault::HungMonitor => self.monitor_hangs_until = self.monitor_hangs_until.max(end),
            Fault::Slow => self.latency_max_us = 600_000,
            Fault::Leave(node) => self.input(node, Input::Event(Event::Leave)),
            Fault::Reload(node) => self.reload(node, self.hosts.len() as u32 - 1),
            Fault::FrontCut(node, is_closed) => self.cut_front(node, is_closed),
            Fault::Move(to) => {
                let group = 1 + self.random.below(self.hosts.len() as u64) as u32;
                let Some(owner) = self.owner_of(group) else { return };
                self.input(owner, Input::Event(Event::Move(group, to as Slot)));
            }
        }
        self.after_us(duration_us, Occurrence::Heal(fault));
    }

    pub(crate) fn cut_front(&mut self, node: usize, is_closed: bool) {
        let of = &mut self.nodes[node];
        (of.is_unreached, of.is_closed) = (true, is_closed);
        self.front_changed(node);
    }

    pub(crate) fn heal_front(&mut self, node: usize) {
        let of = &mut self.nodes[node];
        (of.is_unreached, of.is_closed) = (false, false);
        self.front_changed(node);
    }

    /// That a listener is closed is known at once.
    fn front_changed(&mut self, node: usize) {
        let is_closed = self.nodes[node].is_closed;
        let delay = if is_closed { Duration::ZERO } else { FRONT_DELAY };
        self.at(self.now + delay, Occurrence::Front(node));
    }

    /// How often any group has changed its owner, or was given.
    pub(crate) fn epochs(&self) -> u64 {
        let object = self.rados.read();
        self.hosts.keys().filter_map(|group| object.group(*group)).map(|it| it.epoch).sum()
    }

    fn reload(&mut self, node: usize, groups: u32) {
        let declared = declaration(groups, self.now.as_millis() as u64);
        self.input(node, Input::Event(Event::Declared(declared)));
    }

    fn forget_outgoing(&mut self, node: usize) {
        for (_, client, request) in std::mem::take(&mut self.nodes[node].outgoing) {
            if let Request::Write(command) = request {
                self.landed(command.group, &client);
            }
        }
    }

    fn heal(&mut self, fault: Fault) {
        self.note(format!("healed: {fault:?}"));
        match fault {
            Fault::Kill(node) | Fault::Leave(node) => {
                if self.nodes[node].gateway.is_none() {
                    self.start(node);
                } else if matches!(fault, Fault::Leave(_)) {
                    // It could not leave in time.
                    self.nodes[node].kill();
                    self.start(node);
                }
            }
            Fault::Cut(node) => {
                let of = &mut self.nodes[node];
                of.is_cut = false;
                let outgoing = std::mem::take(&mut of.outgoing);
                let incoming = std::mem::take(&mut of.incoming);
                for (process, client, request) in outgoing {
                    let us = self.latency_us();
                    let line = line(&request);
                    let at = self.now + Duration::from_micros(us);
                    let last = self.last_arrival.entry((node, line)).or_default();
                    *last = at.max(*last);
                    let at = *last;
                    self.at(at, Occurrence::Arrive(node, process, client, request, false));
                }
                for (process, input) in incoming {
                    self.reply(node, process, input);
                }
            }
            Fault::Suspend(node) => {
                if !std::mem::take(&mut self.nodes[node].is_suspended) {
                    return;
                }
                let inputs = std::mem::take(&mut self.nodes[node].inputs);
                // Time first, as the daemon does.
                self.input(node, Input::Event(Event::Tick));
                inputs.into_iter().for_each(|input| self.input(node, input));
            }
            Fault::Slow => self.latency_max_us = 5000,
            Fault::Reload(node) => self.reload(node, self.hosts.len() as u32),
            Fault::FrontCut(node, _) => self.heal_front(node),
            Fault::HungOsd | Fault::HungMonitor | Fault::Move(_) => {}
        }
    }

    /// At each step: who can write to a group, or has writes on their way that can land, is one;
    /// and of the processes that run one serves it.
    fn check(&self) {
        for group in self.hosts.keys() {
            let serves = |node: &&Node| node.gateway.is_some() && node.is_optimized(*group);
            let may_write = self.nodes.iter().filter(serves);
            let may_write = may_write.filter(|node| node.images.contains(group));
            let mut writers: Vec<&String> = may_write.map(|node| &node.client).collect();
            let on_their_way = self.in_flight.keys().filter(|(of, _)| of == group);
            writers.extend(on_their_way.map(|(_, client)| client));
            writers.retain(|client| !self.rados.is_excluded(client));
            writers.sort_unstable();
            writers.dedup();
            assert!(writers.len() <= 1, "group {group} has writers {writers:?}");
            let serving = self.nodes.iter().filter(|node| node.runs() && serves(node)).count();
            assert!(serving <= 1, "group {group} is served by {serving} gateways");
            let is_late = self.now > FAULTS_END + Duration::from_secs(20) + BOUND
                || !self.is_faulty && self.now > BOUND;
            assert!(
                serving == 1 || !is_late || !self.is_undisturbed(),
                "group {group} is not served"
            );
        }
    }

    /// All gateways run with their links.
    fn is_undisturbed(&self) -> bool {
        self.nodes.iter().all(|node| node.runs() && !node.is_cut && !node.is_unreached)
    }
}

/// Where a request goes: to the group object, to headers of images and monitors, or to blocks.
fn line(request: &Request) -> u8 {
    match request {
        Request::Read(_) | Request::Update(..) => 0,
        Request::Write(_) => 1,
        _ => 2,
    }
}
