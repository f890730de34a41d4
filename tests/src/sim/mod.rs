//! Simulation of hosts, a network, a target and its devices in one thread, with a virtual clock,
//! from one seed.
//!
//! ```text
//! hosts (initiator) ── fabric (soft) ── network ── fabric (soft) ── target (queues) ── devices
//!        └── oracle: commands sent, responses, valid contents (model)
//! ```
//!
//! The network and the devices are simulated; everything else is the product's own code: sessions,
//! queue pairs, connection management, the rules of NVMe, queues, pending device operations. The
//! network drops, duplicates, reorders, corrupts and delays; devices are slow, fail, transfer
//! partially, and lose what is not durable at a power failure; hosts and target crash and restart.
//!
//! After every step: each command has completed once or its association has ended for a reason, no
//! buffer has two owners or is lost, and data read are valid. At the end everything is read once
//! more, all hosts disconnect, and all pools are full again.

mod admin_actions;
pub mod administrator;
pub mod auth_keys;
pub mod block_stamp;
pub mod device;
pub mod directory;
pub mod host;
pub mod instrument;
pub mod mutants;
pub mod oracle;
pub mod scenario;
pub mod target;
pub mod trace;
pub mod workload;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvme::log::AnaState;
use rdma::soft::endpoint::Config;
use rdma::soft::qp::memory_region::Rights;
use rdma::soft::sim::{Faults, Network, Rng};

use administrator::Administrator;
use device::{DeviceFaults, SimDevice};
use host::Host;
use mutants::SeededBug;
use oracle::blocks::SECTOR_BYTES;
use oracle::{Counts, Oracle, Stage};
use scenario::{Mishap, Profile};
use target::Target;
use trace::{Telling, Trace};

/// Time after a fault for which the end of an association is expected.
const GRACE: Duration = Duration::from_secs(60);
/// Maximum time without progress.
const STUCK: Duration = Duration::from_secs(200);
/// Maximum of iterations at one time of the clock.
const TURNS: u32 = 100_000;

/// Parameters of a run.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Setup {
    /// The seed.
    pub seed: u64,
    /// Commands of all hosts together.
    pub commands: u32,
    /// Verbosity of the trace.
    pub telling: Telling,
    /// A seeded bug that must be found.
    pub plant: Option<SeededBug>,
}

/// Result of a run.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// A hash that is equal for every run of the same setup.
    pub sum: u64,
    /// The first violation.
    pub failure: Option<String>,
    /// Results of commands.
    pub counts: Counts,
    /// Simulated time.
    pub elapsed: Duration,
    /// The last lines of the trace, if kept.
    pub lines: Vec<String>,
}

/// An event at a time.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Timer {
    StartTarget,
    StartHost(usize),
    EndStorm,
    Serve(usize),
    Publish,
    Erase(u64),
    Kill,
    Reach(usize, usize),
    Resize(usize),
    TakeDown(usize),
    Plug(usize),
    Show(usize, usize),
    EndSnapshot,
}

/// One run.
struct Simulation {
    profile: Profile,
    trace: Arc<Trace>,
    air: Arc<Mutex<Network>>,
    disk: SimDevice,
    target: Target,
    administrator: Administrator,
    hosts: Vec<Host>,
    judge: Oracle,
    dice: Rng,
    start: Instant,
    now: Instant,
    timers: BinaryHeap<Reverse<(Instant, u64, Timer)>>,
    number: u64,
    /// Time of the next iteration of each reactor, and then of each host.
    wake: Vec<Option<Instant>>,
    busy_until: Vec<Instant>,
    next_mishap: usize,
    plant: Option<SeededBug>,
    /// Time of the last progress, and its measure.
    progress: (Instant, u64),
    turns: u32,
}

/// Runs a seed.
#[must_use]
pub fn run(setup: Setup) -> Outcome {
    let profile = Profile::new(setup.seed, setup.commands);
    run_profile(setup, profile)
}

/// Runs a seed with another profile than its own.
pub fn run_profile(setup: Setup, profile: Profile) -> Outcome {
    let start = Instant::now();
    let trace = Arc::new(Trace::new(setup.telling, start));
    if trace.is_told() {
        trace.tell(&format!("{profile:?}"));
    }
    let finish = |world: Option<&Simulation>, failure| Outcome {
        sum: trace.sum(),
        failure,
        counts: world.map(|world| world.judge.counts).unwrap_or_default(),
        elapsed: world.map(|world| world.now - world.start).unwrap_or_default(),
        lines: trace.lines(),
    };
    match Simulation::new(setup, profile, Arc::clone(&trace), start) {
        Err(why) => finish(None, Some(why)),
        Ok(mut world) => {
            let failure = world.run().err();
            finish(Some(&world), failure)
        }
    }
}

impl Simulation {
    fn new(
        setup: Setup,
        profile: Profile,
        trace: Arc<Trace>,
        now: Instant,
    ) -> Result<Simulation, String> {
        let mut dice = Rng::new(setup.seed);
        let air = Arc::new(Mutex::new(Network::new(dice.roll(), profile.net)));
        lock(&air).tap = setup.plant.and_then(SeededBug::tap);
        let seed = dice.roll();
        let mut disk = SimDevice::new(seed, profile.disk, &profile.shapes, now, Arc::clone(&trace));
        disk.forgets_flushes = setup.plant == Some(SeededBug::MissingFlush);
        disk.atom_bytes = match setup.plant {
            Some(SeededBug::TornBlock) => SECTOR_BYTES,
            _ => profile.atom_bytes,
        };
        disk.gives_back_what_goes_on = setup.plant == Some(SeededBug::LateWrite);
        disk.forgives_removal = setup.plant == Some(SeededBug::ForgivenRemoval);
        disk.confuses_stores = setup.plant == Some(SeededBug::ConfusedDevices);
        disk.joins_flushes = setup.plant == Some(SeededBug::SharedFlush);
        disk.stale_copies =
            (setup.plant == Some(SeededBug::StaleCopy)).then_some(profile.mdts_bytes);
        let target = Target::new(&profile, &air, setup)?;
        let machines = (0..profile.hosts).map(|host| profile.machine(host) + 1).max().unwrap_or(0);
        let spaces = profile.shapes.len();
        let administrator = Administrator::new(spaces, machines, setup.seed, setup.plant)?;
        let hosts = (0..profile.hosts)
            .map(|index| Host::new(index, &profile, &air, dice.roll(), now))
            .collect::<Result<Vec<_>, _>>()?;
        let judge = Oracle::new(&profile, setup.commands, &trace, now);
        let actors = profile.reactors + profile.hosts;
        let mut world = Simulation {
            trace,
            air,
            disk,
            target,
            administrator,
            hosts,
            judge,
            dice,
            start: now,
            now,
            timers: BinaryHeap::new(),
            number: 0,
            wake: vec![None; actors],
            busy_until: vec![now; actors],
            next_mishap: 0,
            plant: setup.plant,
            progress: (now, 0),
            turns: 0,
            profile,
        };
        world.after(Duration::ZERO, Timer::StartTarget);
        for host in 0..world.hosts.len() {
            world.after(Duration::from_micros(1), Timer::StartHost(host));
        }
        Ok(world)
    }

    /// Runs from the first command to the last disconnect.
    fn run(&mut self) -> Result<(), String> {
        while !(self.judge.sent >= self.judge.commands && self.is_at_rest()) {
            self.step()?;
        }
        self.administrator.calm_down();
        while !self.target.is_up() {
            self.step()?;
        }
        self.calm_down()?;
        self.judge.stage = Stage::Clear;
        self.wake_all();
        while !self.judge.fencing.last_order().1 || self.judge.formats.are_under_way() {
            self.step()?;
        }
        self.judge.stage = Stage::Sweep;
        self.wake_all();
        while !self.judge.is_swept() {
            self.step()?;
        }
        self.judge.stage = Stage::Rest;
        for host in 0..self.hosts.len() {
            self.hosts[host].leave(true, true, self.now);
        }
        self.wake_all();
        let left = |world: &Simulation| {
            world.hosts.iter().any(|host| !host.is_finished())
                || world.target.queues() > 0
                || world.disk.under_way() > 0
                || world.target.ns_admin.is_busy()
        };
        while left(self) {
            self.step()?;
        }
        self.target.leftovers()?;
        self.check_made()?;
        self.hosts.iter().try_for_each(Host::leftovers)
    }

    fn is_at_rest(&self) -> bool {
        self.hosts.iter().all(|host| host.outstanding() == 0)
    }

    /// Ends all faults.
    fn calm_down(&mut self) -> Result<(), String> {
        self.say(|| "the world calms down".to_owned());
        self.judge.excuse(None, self.now + GRACE);
        self.next_mishap = self.profile.mishaps.len();
        for space in 0..self.profile.shapes.len() {
            self.resize(space, u32::MAX);
            (0..self.hosts.len()).try_for_each(|host| self.show(space, host, true))?;
        }
        for path in 0..self.profile.paths {
            for space in 0..self.profile.shapes.len() {
                self.reach(path, space, AnaState::OPTIMIZED);
            }
        }
        {
            let mut air = lock(&self.air);
            air.faults = Faults { delay: self.profile.net.delay, ..Faults::NONE };
            air.heal();
        }
        self.target.ns_admin.errors = 0;
        self.target.spared = true;
        self.disk.plug_all();
        self.disk.faults =
            DeviceFaults { error: 0, short: 0, sync_error: 0, slow: 0, ..self.disk.faults };
        Ok(())
    }

    fn say(&self, line: impl FnOnce() -> String) {
        self.trace.note([0x01, self.number, 0], || format!("world    {}", line()));
    }

    fn after(&mut self, wait: Duration, timer: Timer) {
        self.number += 1;
        self.timers.push(Reverse((self.now + wait, self.number, timer)));
    }

    fn wake_all(&mut self) {
        for actor in 0..self.wake.len() {
            self.rouse(actor);
        }
    }

    /// An actor has something to do.
    fn rouse(&mut self, actor: usize) {
        let at = self.now.max(self.busy_until[actor]);
        self.wake[actor] = Some(self.wake[actor].map_or(at, |wake| wake.min(at)));
    }

    /// Processes the next event.
    fn step(&mut self) -> Result<(), String> {
        let next = lock(&self.air).next_arrival();
        let next = next.into_iter().chain(self.disk.next_due());
        let next = next.chain(self.wake.iter().flatten().copied());
        let next = next.chain(self.timers.peek().map(|Reverse((at, ..))| *at));
        let next = next.chain(self.judge.next_fence());
        let ns_admin = self.target.ns_admin.next_due().filter(|_| !self.target.is_dead());
        let next = next.chain(ns_admin);
        let Some(next) = next.min() else { return Err("nothing will ever happen".to_owned()) };
        if next > self.now {
            (self.now, self.turns) = (next, 0);
            self.trace.advance(next);
            self.disk.advance(next);
        }
        self.judge.fence(self.now);
        while let Some(Reverse((at, _, timer))) = self.timers.peek().copied()
            && at <= self.now
        {
            self.timers.pop();
            self.ring(timer)?;
        }
        loop {
            let arrived = lock(&self.air).arrive(self.now);
            let Some(place) = arrived else { break };
            self.rouse(place);
        }
        for ring in 0..self.target.reactors() {
            if self.disk.has_ready(ring) {
                self.rouse(ring);
            }
        }
        for actor in 0..self.wake.len() {
            if self.wake[actor].is_some_and(|at| at <= self.now) {
                self.turn(actor)?;
            }
        }
        self.manage();
        self.target.look_at_snapshot(&mut self.disk)?;
        self.go_on_formatting()?;
        self.mishaps()?;
        self.check_progress()
    }

    /// One iteration of a reactor or a host.
    fn turn(&mut self, actor: usize) -> Result<(), String> {
        self.wake[actor] = None;
        if self.busy_until[actor] > self.now {
            self.wake[actor] = Some(self.busy_until[actor]);
            return Ok(());
        }
        let reactors = self.profile.reactors;
        let (due, place) = match actor.checked_sub(reactors) {
            None if !self.target.is_up() => return Ok(()),
            None => {
                let was_dead = self.target.is_dead();
                let due = self.target.turn(actor, self.now, &mut self.disk);
                if self.target.is_dead() && !was_dead {
                    self.kill_target();
                    return Ok(());
                }
                self.target.audit(actor)?;
                for other in 0..reactors {
                    if self.target.is_rung(other) || self.disk.has_ready(other) {
                        self.rouse(other);
                    }
                }
                (due, actor)
            }
            Some(host) => {
                self.note_device_errors();
                let due = self.hosts[host].turn(&self.profile, &mut self.judge, self.now);
                self.hosts[host].audit()?;
                (due, actor)
            }
        };
        let cost = self.dice.part(self.profile.turn);
        self.busy_until[actor] = self.busy_until[actor].max(self.now + cost);
        if let Some(due) = due {
            let at = due.max(self.busy_until[actor]);
            self.wake[actor] = Some(self.wake[actor].map_or(at, |wake| wake.min(at)));
        }
        if lock(&self.air).has_mail(place) {
            self.rouse(actor);
        }
        self.judge.failure.take().map_or(Ok(()), Err)
    }

    /// Before a host receives responses and sends commands: the oracle learns of device errors.
    fn note_device_errors(&mut self) {
        for space in 0..self.profile.shapes.len() {
            if self.disk.take_failed(self.target.store(space)) {
                self.judge.device_failed(space);
            }
        }
    }

    fn check_progress(&mut self) -> Result<(), String> {
        self.turns += 1;
        if self.turns > TURNS {
            return Err("everybody is busy and the clock stands still".to_owned());
        }
        let Counts { done, refused, .. } = self.judge.counts;
        if done + refused != self.progress.1 {
            self.progress = (self.now, done + refused);
        }
        if let Some(late) = self.judge.news.overdue(self.now) {
            return Err(late);
        }
        match self.now - self.progress.0 > STUCK {
            true => Err(format!("nothing has been answered for {STUCK:?}")),
            false => Ok(()),
        }
    }

    /// Processes an expired timer.
    fn ring(&mut self, timer: Timer) -> Result<(), String> {
        self.say(|| format!("{timer:?}"));
        match timer {
            Timer::StartTarget => {
                let places: Vec<usize> = self.target.places().collect();
                places.into_iter().for_each(|place| lock(&self.air).set_down(place, false));
                self.target.set_hidden(self.administrator.start()?);
                let (profile, disk) = (&self.profile, &mut self.disk);
                self.target.start(profile, &mut self.dice, disk, &self.trace, self.now)?;
                self.look_at_scope();
                if self.plant == Some(SeededBug::DoubleCompletion) {
                    self.target.plant_echo(60);
                }
                (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            }
            Timer::StartHost(host) => {
                lock(&self.air).set_down(self.hosts[host].place(), false);
                self.hosts[host].start(&self.profile, &self.trace, self.now)?;
                self.rouse(self.profile.reactors + host);
            }
            Timer::EndStorm => lock(&self.air).faults = self.profile.net,
            // Unless a start has done it meanwhile, or will.
            Timer::Serve(space) if self.target.may_serve(space) => {
                self.target.serve(&self.profile, space, &mut self.disk)?;
                self.target.publish(&self.profile);
                self.look_at_scope();
                (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            }
            Timer::Publish if self.target.is_up() && !self.target.is_published() => {
                self.target.publish(&self.profile);
                (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            }
            Timer::Erase(number) => self.erase(number),
            Timer::Kill if self.target.is_dead() => self.kill_target(),
            Timer::TakeDown(store) => self.disk.take_down(store),
            Timer::Plug(store) => self.disk.plug(store),
            Timer::EndSnapshot => {
                self.target.end_snapshot(&mut self.disk);
                (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            }
            Timer::Resize(space) => self.resize(space, u32::MAX),
            Timer::Show(space, host) => self.show(space, host, true)?,
            Timer::Reach(path, space) => self.reach(path, space, AnaState::OPTIMIZED),
            Timer::Kill | Timer::Serve(_) | Timer::Publish => {}
        }
        Ok(())
    }

    /// Injects the faults that are due after this number of commands.
    fn mishaps(&mut self) -> Result<(), String> {
        while let Some((at, mishap)) = self.profile.mishaps.get(self.next_mishap).copied()
            && at <= self.judge.sent
        {
            self.next_mishap += 1;
            self.say(|| format!("{mishap:?}"));
            self.strike(mishap)?;
        }
        Ok(())
    }

    fn strike(&mut self, mishap: Mishap) -> Result<(), String> {
        let (now, target) = (self.now, self.profile.address(None));
        match mishap {
            Mishap::Cut(host, time) => {
                lock(&self.air).cut(self.hosts[host].address(), target, now + time);
                self.judge.excuse(Some(host), now + time + GRACE);
            }
            Mishap::CutAll(time) => {
                for host in &self.hosts {
                    lock(&self.air).cut(host.address(), target, now + time);
                }
                self.judge.excuse(None, now + time + GRACE);
            }
            Mishap::Storm(time) => {
                lock(&self.air).faults = self.profile.storm;
                self.judge.excuse(None, now + time + GRACE);
                self.after(time, Timer::EndStorm);
            }
            Mishap::Kill(time) => self.crash_target(false, time),
            Mishap::PowerFailure(time) => self.crash_target(true, time),
            Mishap::HostCrash(host, time) => {
                if self.hosts[host].is_up() {
                    lock(&self.air).set_down(self.hosts[host].place(), true);
                    self.hosts[host].crash(&self.profile, &mut self.judge, now)?;
                    self.judge.excuse(Some(host), now + time + GRACE);
                    self.after(time, Timer::StartHost(host));
                }
            }
            Mishap::Close(host) | Mishap::Abort(host) => {
                self.judge.excuse(Some(host), now + GRACE);
                self.hosts[host].leave(matches!(mishap, Mishap::Close(_)), false, now);
                self.rouse(self.profile.reactors + host);
            }
            Mishap::Reset(host) => self.judge.reset[host] = true,
            Mishap::Freeze(host, time) => {
                self.busy_until[self.profile.reactors + host] = now + time;
                self.judge.excuse(Some(host), now + time + GRACE);
            }
            Mishap::Remove(space, time) => {
                if !self.target.is_dead()
                    && let Some(id) = self.target.remove(space, &mut self.disk)
                {
                    self.target.publish(&self.profile);
                    self.disk.detach(id);
                    self.look_at_scope();
                    self.after(time, Timer::Serve(space));
                    (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
                }
            }
            Mishap::Exchange(space, time) => {
                if !self.target.is_dead()
                    && let Some(id) = self.target.remove(space, &mut self.disk)
                {
                    // Operations of the old store may still fail.
                    self.judge.device_failed(space);
                    self.exchange(space)?;
                    self.disk.detach(id);
                    self.after(time, Timer::Serve(space));
                }
            }
            Mishap::Unplug(space, time) => {
                let store = self.target.store(space);
                if self.target.is_up() && self.target.is_served(space) && self.disk.unplug(store) {
                    self.judge.model.lose_unsynced(space);
                    let noticed = self.dice.part(time);
                    self.after(noticed, Timer::TakeDown(store));
                    self.after(time, Timer::Plug(store));
                }
            }
            Mishap::Stall(time) => {
                self.disk.stalled_until = now + time;
                self.judge.excuse(None, now + time + GRACE);
            }
            Mishap::Resize(space, blocks, time) => {
                self.resize(space, blocks << self.profile.shift(space));
                self.after(time, Timer::Resize(space));
            }
            Mishap::Hide(space, host, time) => {
                self.show(space, host, false)?;
                self.after(time, Timer::Show(space, host));
            }
            Mishap::Reach(path, space, state, time) => {
                self.reach(path % self.profile.paths, space, state);
                self.after(time, Timer::Reach(path % self.profile.paths, space));
            }
            Mishap::Snapshot(space, time) => {
                self.target.begin_snapshot(space);
                self.after(time, Timer::EndSnapshot);
                (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            }
            Mishap::Withdraw(time) => {
                if self.target.is_up() {
                    self.target.withdraw();
                    self.judge.excuse(None, now + time + GRACE);
                    self.after(time, Timer::Publish);
                    (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
                }
            }
        }
        Ok(())
    }

    fn crash_target(&mut self, power: bool, time: Duration) {
        if !self.target.is_up() {
            return;
        }
        let power = power || self.disk.is_doomed();
        let places: Vec<usize> = self.target.places().collect();
        places.into_iter().for_each(|place| lock(&self.air).set_down(place, true));
        self.target.crash(power);
        self.administrator.crash(power);
        self.target.ns_admin.crash(power, &mut self.disk);
        self.disk.crash(power);
        self.judge.crash(power);
        self.judge.excuse(None, self.now + time + GRACE);
        self.after(time, Timer::StartTarget);
    }
}

/// Configuration of the transport for a profile; for target and hosts.
fn config(profile: &Profile, guid: u64, steer: (u32, u32)) -> Config {
    Config {
        guid,
        mtu: profile.mtu,
        window: profile.window,
        read_bytes: profile.read_bytes,
        answered_reads: 16,
        rights: Rights::ALL,
        ack_timeout: profile.ack_timeout,
        ack_delay: Duration::from_micros(50),
        exposed: 256,
        queue_pairs: 64,
        vain_per_source: Some(64),
        steer,
        ..Config::default()
    }
}

/// Pseudorandom numbers from the seed. Every fourth ends in bits that wrap soon.
fn entropy(seed: u64) -> Box<dyn FnMut() -> u64 + Send> {
    let mut dice = Rng::new(seed);
    Box::new(move || {
        let number = dice.roll();
        let soon = 0x00ff_ffff - dice.below(300);
        if dice.per_mille(250) { number & !0x00ff_ffff | soon } else { number }
    })
}

fn lock(air: &Arc<Mutex<Network>>) -> MutexGuard<'_, Network> {
    air.lock().unwrap_or_else(PoisonError::into_inner)
}
