//! One namespace over two paths in a simulated world: cuts, closed connections, killed targets, ANA
//! changes, statuses, resizes, removals; and an independent checker of what blocks may contain. The
//! paths lead to one target, or to two over the same blocks. Each seed is one run, the same each time.

mod changes;
mod checker;
#[path = "../support/exposed_memory.rs"]
mod exposed_memory;
mod target;
mod two_targets;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use initiator::Options;
use initiator::multipath::{
    Allocation, BlockDone, BlockRequest, Fabrics, Failure, Multipath, MultipathOptions, Notice,
    Operation, PathOptions, PathState, RequestOutcome, Resources,
};
use initiator::rng::Random;
use nvme::feature::AsyncEvent;
use nvme::log::AnaState;
use nvme::{Nqn, Status};
use rdma::{Fabric, Initiator, Pool, PoolPlan, Reason};

use checker::Checker;
use target::{BLOCK_BYTES, BLOCKS, FATAL, KATO_MS, Target, content, stamp};
use two_targets::{GroupAct, SeededBug, World};

/// Requests under way at once.
const DEPTH: usize = 6;
/// Requests of a run, but for the last reads.
const REQUESTS: u64 = 120;

impl Fabrics for Target {
    fn fabric(&mut self, _: usize) -> &mut dyn Initiator {
        self
    }
}

/// What the world does at a time.
#[derive(Clone, Copy, Debug)]
enum Act {
    /// The next fault.
    Fault,
    /// The host notices that a path is cut.
    Notice(usize),
    Heal(usize),
    /// A daemon that was killed is started again.
    Restart(usize),
    /// A gateway does what concerns its group.
    Group(GroupAct, usize),
    Calm,
    Restore,
}

/// A machine and its world.
struct Lab {
    now: Instant,
    random: Random,
    target: Target,
    pool: Pool,
    machine: Multipath,
    checker: Checker,
    acts: Vec<(Instant, Act)>,
    wake: Option<Instant>,
    under_way: BTreeMap<u64, Operation>,
    next_tag: u64,
    fatal_failures: u64,
    notices: Vec<Notice>,
    failures_permitted: bool,
    bug: Option<SeededBug>,
}

fn options(port: usize) -> Options {
    let nqn = |name| Nqn::new(name).expect("valid");
    let to = format!("192.0.2.1:{}", 4420 + port).parse().expect("valid");
    Options {
        io_queues: 2,
        queue_entries: 8,
        kato_ms: KATO_MS,
        connect_timeout: Duration::from_secs(2),
        command_timeout: Duration::from_secs(6),
        ..Options::new(to, nqn("nqn.2026-11.io.nvmfd:t"), nqn("nqn.2026-11.io.nvmfd:h"), [9; 16])
    }
}

fn plan(paths: &[PathOptions]) -> PoolPlan {
    let mut plan = paths[0].session.plan(256 << 10, 8192);
    plan.cells *= paths.len() as u32;
    plan.receives *= paths.len() as u32;
    plan
}

impl Lab {
    fn new(seed: u64, common: MultipathOptions, failures_permitted: bool) -> Lab {
        Lab::in_world(World::OneTarget, seed, common, failures_permitted)
    }

    fn in_world(
        world: World,
        seed: u64,
        common: MultipathOptions,
        failures_permitted: bool,
    ) -> Lab {
        let now = Instant::now();
        let paths: Vec<PathOptions> =
            (0..2).map(|port| PathOptions { session: options(port), fabric: 0 }).collect();
        let mut pool = Pool::new(plan(&paths)).expect("memory");
        let machine = Multipath::new(common, paths, &mut pool);
        let mut target = Target::new(pool.region(), world.daemons(), Random::new(!seed), now);
        if world == World::Group {
            target.group = Some(None);
            target.take(0);
        }
        Lab {
            now,
            random: Random::new(seed),
            target,
            pool,
            machine,
            checker: Checker::default(),
            acts: Vec::new(),
            wake: None,
            under_way: BTreeMap::new(),
            next_tag: 0,
            fatal_failures: 0,
            notices: Vec::new(),
            failures_permitted,
            bug: None,
        }
    }

    fn with<T>(&mut self, act: impl FnOnce(&mut Multipath, &mut Resources<'_>) -> T) -> T {
        let mut r = Resources { pool: &mut self.pool, fabrics: &mut self.target, now: self.now };
        act(&mut self.machine, &mut r)
    }

    /// Delivers everything that has happened, until nothing more does at this time.
    fn settle(&mut self) {
        for round in 0.. {
            assert!(round < 500, "something is repeated without end at one time");
            let mut batch = Vec::new();
            self.target.poll(self.now, &mut batch);
            let quiet = batch.is_empty();
            for event in batch {
                let rest = self.with(|machine, r| machine.on_event(0, event, r));
                assert!(rest.is_none(), "an event of nobody: {rest:?}");
            }
            self.wake = self.with(|machine, r| machine.tick(r));
            while let Some(done) = self.machine.next_done(&mut self.pool) {
                self.on_done(done);
            }
            self.notices.extend(std::iter::from_fn(|| self.machine.next_notice()));
            let quiet = quiet && !self.target.has_events();
            if quiet && self.wake.is_none_or(|at| at > self.now) {
                return;
            }
        }
    }

    /// Goes on to the next time at which anything happens, at most until `end`.
    fn step(&mut self, end: Instant) {
        let acts = self.acts.iter().map(|(at, _)| *at).min();
        let times = [self.target.deadline(), self.wake, acts, Some(end)];
        self.now = times.into_iter().flatten().min().expect("a time").max(self.now);
        self.target.advance(self.now);
        let now = self.now;
        while let Some(n) = self.acts.iter().position(|(at, _)| *at <= now) {
            let (_, act) = self.acts.swap_remove(n);
            self.act(act);
        }
        self.settle();
    }

    fn run_until(&mut self, limit_s: u64, done: impl Fn(&Lab) -> bool) {
        let end = self.now + Duration::from_secs(limit_s);
        self.settle();
        while !done(self) {
            let (under_way, notices) = (&self.under_way, &self.notices);
            assert!(self.now < end, "longer than {limit_s} s: {under_way:?}, {notices:?}");
            self.step(end);
        }
    }

    fn after(&mut self, from_ms: u64, to_ms: u64) -> Instant {
        self.now + Duration::from_millis(from_ms + self.random.below(to_ms - from_ms))
    }

    fn schedule(&mut self, from_ms: u64, to_ms: u64, act: Act) {
        let at = self.after(from_ms, to_ms);
        self.acts.push((at, act));
    }

    /// Submits a request: blocks of a write get a stamp of their own.
    fn submit(&mut self, operation: Operation, slba: u64, blocks: u32) {
        let tag = self.next_tag;
        self.next_tag += 1;
        let range = slba..slba + u64::from(blocks);
        let stamps: Option<Vec<u64>> = match operation {
            Operation::Write { .. } => {
                Some(range.clone().map(|block| (tag + 1) << 8 | block).collect())
            }
            Operation::WriteZeroes { .. } | Operation::Discard => Some(vec![0; blocks as usize]),
            Operation::Read | Operation::Flush | Operation::LbaStatus => None,
        };
        let data = match operation {
            Operation::Read | Operation::Write { .. } => {
                let mut buf = self.pool.take_data(blocks * BLOCK_BYTES as u32).expect("memory");
                let bytes = self.pool.bytes_mut(&mut buf);
                bytes.fill(0xEE);
                for (at, stamp) in bytes.chunks_mut(BLOCK_BYTES).zip(stamps.iter().flatten()) {
                    at.copy_from_slice(&content(*stamp));
                }
                Some(buf)
            }
            _ => None,
        };
        self.checker.begin(tag, range, stamps.as_deref());
        self.under_way.insert(tag, operation);
        let request = BlockRequest { operation, slba, blocks, data, tag };
        self.machine.submit(request, &mut self.pool).expect("accepted");
    }

    fn submit_any(&mut self) {
        let size = self.machine.namespace().expect("live once").blocks;
        let blocks = 1 + self.random.below(3) as u32;
        let slba = self.random.below(size - u64::from(blocks) + 1);
        let fua = self.random.percent(30);
        match self.random.below(100) {
            0..30 => self.submit(Operation::Read, slba, blocks),
            30..35 => self.submit(Operation::LbaStatus, slba, blocks),
            35..80 => self.submit(Operation::Write { fua }, slba, blocks),
            80..90 => self.submit(Operation::Flush, 0, 0),
            90..96 => self.submit(Operation::WriteZeroes { deallocate: true, fua }, slba, blocks),
            _ => self.submit(Operation::Discard, slba, blocks),
        }
    }

    fn on_done(&mut self, done: BlockDone) {
        let operation = self.under_way.remove(&done.tag);
        assert_eq!(operation, Some(done.operation), "request {} is done once", done.tag);
        let begun = self.checker.begun(done.tag);
        let range = self.checker.end(done.tag, done.outcome.is_ok());
        let needs_data = matches!(
            done.operation,
            Operation::Read | Operation::Write { .. } | Operation::LbaStatus
        );
        assert_eq!(done.data.is_some(), needs_data, "the data come back");
        match (done.outcome, done.operation) {
            (Err(why), _) => self.on_failure(why),
            (Ok(()), Operation::Read) => {
                let bytes = self.pool.bytes(done.data.as_ref().expect("data"));
                for (block, bytes) in range.zip(bytes.chunks(BLOCK_BYTES)) {
                    self.checker.expect(block, stamp(bytes), begun);
                }
            }
            (Ok(()), Operation::LbaStatus) => {
                let found = Allocation::of(range.start, done, &mut self.pool).expect("a list");
                let is_hole = |block: &u64| found.at(*block, range.end).is_some_and(|it| !it.0);
                for block in range.clone().filter(is_hole) {
                    self.checker.expect(block, 0, begun);
                }
                return;
            }
            (Ok(()), Operation::Flush) => self.expect_durable(0..BLOCKS, begun),
            (Ok(()), Operation::Write { fua: true } | Operation::WriteZeroes { fua: true, .. }) => {
                self.expect_durable(range, self.checker.now());
            }
            _ => {}
        }
        done.data.into_iter().for_each(|buf| self.pool.give(buf));
    }

    fn expect_durable(&self, blocks: std::ops::Range<u64>, since: u64) {
        for block in blocks {
            self.checker.expect(block, self.target.durable[block as usize], since);
        }
    }

    fn on_failure(&mut self, why: Failure) {
        match why {
            Failure::Status(status) if status == FATAL => self.fatal_failures += 1,
            Failure::Status(status) => {
                // Five repetitions in a row can fail; otherwise there has to be a reason.
                let removed = status == Status::INVALID_NAMESPACE.with_dnr();
                let repeated = status == Status::INTERNAL_ERROR
                    || status == Status::NAMESPACE_NOT_READY.with_crd(2);
                assert!(repeated || removed && self.failures_permitted, "{status}");
            }
            Failure::NoPath => assert!(self.failures_permitted, "there was a path to wait for"),
            Failure::Closed => panic!("nothing is closed yet"),
        }
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Fault => {
                self.fault();
                self.schedule(300, 4_000, Act::Fault);
            }
            Act::Notice(port) => self.target.fail_links(port, &Reason::Device),
            Act::Heal(port) => self.target.ports[port].is_cut = false,
            Act::Restart(daemon) => self.restart(daemon),
            Act::Group(act, daemon) => self.act_of_group(act, daemon),
            Act::Calm => (self.target.transient_percent, self.target.fatal_percent) = (0, 0),
            Act::Restore => {
                self.target.is_removed = false;
                self.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
            }
        }
    }

    fn fault(&mut self) {
        let port = self.random.below(2) as usize;
        match self.random.below(16) {
            7..11 if self.target.group.is_some() => self.fault_of_group(port),
            0..4 => {
                self.target.ports[port].is_cut = true;
                self.schedule(50, 1_500, Act::Notice(port));
                self.schedule(1_500, 6_000, Act::Heal(port));
            }
            // Connections fail that would work: the target does not hear of it at once.
            4..6 => self.target.fail_links(port, &Reason::Device),
            6 => self.target.close_port(port),
            7 => {
                let daemon = port % self.target.daemons.len();
                self.kill(daemon);
                self.schedule(1_000, 3_000, Act::Restart(daemon));
            }
            8..11 => {
                let states = [
                    AnaState::OPTIMIZED,
                    AnaState::NON_OPTIMIZED,
                    AnaState::INACCESSIBLE,
                    AnaState::CHANGE,
                ];
                self.target.ports[port].ana = states[self.random.below(4) as usize];
                self.target.notify(Some(port), AsyncEvent::ANA_CHANGE);
            }
            11 => {
                (self.target.transient_percent, self.target.fatal_percent) = (20, 3);
                self.schedule(200, 2_000, Act::Calm);
            }
            12 => {
                self.target.size_blocks = BLOCKS + self.random.below(BLOCKS);
                self.target.size_blocks = self.target.size_blocks.max(self.known_blocks());
                self.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
            }
            13..15 => {
                self.target.close_queue(port);
                self.schedule(50, 1_500, Act::Notice(port));
                self.schedule(1_500, 6_000, Act::Heal(port));
            }
            _ if self.failures_permitted => {
                self.target.is_removed = true;
                self.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
                self.schedule(200, 2_000, Act::Restore);
            }
            _ => {}
        }
    }

    fn known_blocks(&self) -> u64 {
        self.machine.namespace().map_or(0, |namespace| namespace.blocks)
    }

    /// Everything works again. A cut has lost messages, so the host notices it before that.
    fn heal(&mut self) {
        let is_noticed = |(_, act): &mut (Instant, Act)| matches!(act, Act::Notice(_));
        let noticed = self.acts.extract_if(.., is_noticed).map(|(_, act)| act).collect::<Vec<_>>();
        noticed.into_iter().for_each(|act| self.act(act));
        self.acts.clear();
        [Act::Heal(0), Act::Heal(1), Act::Calm].into_iter().for_each(|act| self.act(act));
        if self.target.group.is_some() {
            self.heal_group();
        } else {
            (0..self.target.daemons.len()).for_each(|daemon| self.restart(daemon));
            for port in 0..2 {
                self.target.ports[port].ana = AnaState::OPTIMIZED;
            }
            self.target.notify(None, AsyncEvent::ANA_CHANGE);
        }
        self.act(Act::Restore);
    }

    /// Shuts down, and checks that nothing is left.
    fn close(mut self) {
        self.with(Multipath::close);
        self.run_until(60, |lab| lab.machine.is_closed());
        self.run_until(60, |lab| lab.target.is_clean());
        assert!(self.pool.is_full(), "a buffer is lost: {:?}", self.pool.free());
    }
}

fn common(seed: u64) -> (MultipathOptions, bool) {
    let failures = seed % 4 == 3;
    let s = Duration::from_secs;
    let options = MultipathOptions {
        reconnect_delay: s(1),
        reconnect_delay_max: s(seed % 3 * 2),
        ctrl_loss_tmo: None,
        fast_io_fail_tmo: failures.then_some(s(2)),
        requests: 64,
        ..MultipathOptions::new(1)
    };
    (options, failures)
}

fn run(world: World, seed: u64, bug: Option<SeededBug>) -> u64 {
    let (mut options, failures_permitted) = common(seed);
    if bug == Some(SeededBug::RepeatAtOnce) {
        options.replay_margin = None;
    }
    let mut lab = Lab::in_world(world, seed, options, failures_permitted);
    lab.bug = bug;
    lab.run_until(10, |lab| lab.machine.namespace().is_some());
    lab.schedule(100, 2_000, Act::Fault);
    while lab.next_tag < REQUESTS {
        while lab.under_way.len() < DEPTH && lab.next_tag < REQUESTS {
            lab.submit_any();
        }
        let pause = lab.after(1, 200);
        lab.settle();
        while lab.now < pause {
            lab.step(pause);
        }
    }
    lab.heal();
    lab.run_until(60, |lab| lab.under_way.is_empty());
    lab.run_until(60, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    let size = lab.target.size_blocks;
    assert_eq!(lab.known_blocks(), size, "a change of the size was missed");
    (0..size).for_each(|block| lab.submit(Operation::Read, block, 1));
    lab.submit(Operation::Flush, 0, 0);
    lab.run_until(60, |lab| lab.under_way.is_empty());
    assert!(lab.fatal_failures <= lab.target.fatal_statuses);
    assert!(lab.target.commands < 40 * REQUESTS, "{} commands", lab.target.commands);
    let commands = lab.target.commands;
    lab.close();
    commands
}

/// `SEEDS=100000` for more, `SEED=7` for one.
fn run_seeds(world: World) {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    if let Some(seed) = number("SEED") {
        run(world, seed, None);
        return;
    }
    let mut repeated = 0;
    for seed in 0..number("SEEDS").unwrap_or(1000) {
        let result = std::panic::catch_unwind(|| run(world, seed, None));
        let commands = result.unwrap_or_else(|_| panic!("seed {seed}: see above"));
        repeated += u64::from(commands > REQUESTS + 2 * BLOCKS + 1);
    }
    assert!(repeated > 0, "no run had anything to repeat");
}

#[test]
fn writes_are_neither_lost_nor_late_and_requests_complete_once() {
    run_seeds(World::OneTarget);
}

fn quiet() -> Lab {
    let mut lab = Lab::new(1, common(0).0, false);
    lab.target.longest_ms = 5;
    lab.run_until(10, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    lab
}

/// Milliseconds until nothing is under way.
fn time_of(lab: &mut Lab) -> u128 {
    let begun = lab.now;
    lab.run_until(60, |lab| lab.under_way.is_empty());
    (lab.now - begun).as_millis()
}

#[test]
fn only_pending_writes_wait_for_the_old_association_to_end() {
    // The connection fails, and the target cannot have heard of it.
    let mut lab = quiet();
    lab.submit(Operation::Write { fua: false }, 0, 1);
    lab.settle();
    lab.target.ports[0].is_cut = true;
    lab.target.fail_links(0, &Reason::Device);
    lab.submit(Operation::Read, 0, 1);
    lab.settle();
    let waited = time_of(&mut lab);
    assert!((4_000..4_000 + 1_500).contains(&waited), "keep alive and margin: {waited} ms");
    // It has closed the connection itself.
    let mut lab = quiet();
    lab.submit(Operation::Write { fua: false }, 0, 1);
    lab.settle();
    lab.target.close_port(0);
    assert!(time_of(&mut lab) < 2_000);
    // It has closed the connection of one queue, and does not hear of the end of the other one.
    let mut lab = quiet();
    lab.submit(Operation::Write { fua: false }, 0, 1);
    lab.submit(Operation::Write { fua: false }, 1, 1);
    lab.settle();
    lab.target.close_queue(0);
    let waited = time_of(&mut lab);
    assert!((4_000..4_000 + 1_500).contains(&waited), "keep alive and margin: {waited} ms");
    // Reads are repeated at once.
    let mut lab = quiet();
    lab.submit(Operation::Read, 0, 1);
    lab.settle();
    lab.target.ports[0].is_cut = true;
    lab.target.fail_links(0, &Reason::Device);
    assert!(time_of(&mut lab) < 2_000);
}

#[test]
fn ctrl_loss_tmo_ends_paths_and_fast_io_fail_tmo_fails_requests() {
    let s = Duration::from_secs;
    let options = MultipathOptions {
        ctrl_loss_tmo: Some(s(20)),
        fast_io_fail_tmo: Some(s(5)),
        ..common(0).0
    };
    let mut lab = Lab::new(1, options, true);
    lab.run_until(10, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    for port in 0..2 {
        lab.target.ports[port].is_cut = true;
        lab.target.fail_links(port, &Reason::Device);
    }
    lab.settle();
    lab.submit(Operation::Read, 0, 1);
    let waited = time_of(&mut lab);
    assert!((4_900..=5_100).contains(&waited), "{waited} ms");
    lab.submit(Operation::Write { fua: false }, 0, 1);
    assert_eq!(time_of(&mut lab), 0, "it does not wait any more");
    lab.run_until(30, |lab| lab.machine.is_lost());
    let expired = |notice: &&Notice| matches!(notice, Notice::Failed { next: None, .. });
    assert_eq!(lab.notices.iter().filter(expired).count(), 2);
    lab.close();
}

/// As many writes as the memory has room for.
fn fill_memory(lab: &mut Lab) {
    while lab.pool.free_for_all_bytes() > 0 {
        lab.submit(Operation::Write { fua: false }, 0, 12);
    }
}

#[test]
fn paths_reconnect_while_requests_hold_all_data_buffers() {
    let mut lab = quiet();
    for port in 0..2 {
        lab.target.ports[port].is_cut = true;
        lab.target.fail_links(port, &Reason::Device);
    }
    lab.settle();
    fill_memory(&mut lab);
    (0..2).for_each(|port| lab.act(Act::Heal(port)));
    time_of(&mut lab);
    lab.close();
}

#[test]
fn discards_are_accepted_while_requests_hold_all_data_buffers() {
    let mut lab = quiet();
    fill_memory(&mut lab);
    lab.submit(Operation::Discard, 0, 12);
    time_of(&mut lab);
    lab.close();
}

/// The caller may write the block again as soon as its write has failed.
#[test]
fn a_pending_write_fails_after_the_end_of_its_association_at_the_target() {
    let options =
        MultipathOptions { fast_io_fail_tmo: Some(Duration::from_millis(500)), ..common(0).0 };
    let mut lab = Lab::new(1, options, true);
    lab.run_until(10, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    lab.submit(Operation::Write { fua: false }, 0, 1);
    lab.settle();
    for port in 0..2 {
        lab.target.ports[port].is_cut = true;
        lab.target.fail_links(port, &Reason::Device);
    }
    lab.settle();
    lab.submit(Operation::Write { fua: false }, 1, 1);
    lab.run_until(1, |lab| lab.under_way.len() == 1);
    let waited = time_of(&mut lab);
    assert!((3_000..4_000).contains(&waited), "keep alive and margin: {waited} ms");
    lab.close();
}

/// Whoever ends before that has to tell the next one.
#[test]
fn changes_are_reported_as_long_as_a_target_may_carry_them_out() {
    let mut lab = quiet();
    lab.submit(Operation::Read, 0, 1);
    lab.settle();
    assert!(!lab.machine.has_sent_changes());
    time_of(&mut lab);
    lab.submit(Operation::Write { fua: false }, 0, 1);
    lab.settle();
    assert!(lab.machine.has_sent_changes());
    for port in 0..2 {
        lab.target.ports[port].is_cut = true;
        lab.target.fail_links(port, &Reason::Device);
    }
    lab.settle();
    let begun = lab.now;
    lab.run_until(6, |lab| !lab.machine.has_sent_changes());
    assert_eq!(((lab.now - begun).as_secs(), lab.under_way.len()), (4, 1), "it is queued");
    (0..2).for_each(|port| lab.act(Act::Heal(port)));
    time_of(&mut lab);
    lab.close();
}

#[test]
fn the_outcome_of_requests_is_reported_before_they_are_submitted() {
    let s = Duration::from_secs;
    let options = MultipathOptions { fast_io_fail_tmo: Some(s(5)), ..common(0).0 };
    let mut lab = Lab::new(1, options, true);
    lab.run_until(10, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    let outcome = |lab: &Lab| lab.machine.request_outcome(lab.now);
    assert_eq!(outcome(&lab), RequestOutcome::CarriedOut);
    // No path has the namespace any more.
    lab.target.is_removed = true;
    lab.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    let removed =
        |lab: &Lab| lab.notices.iter().filter(|n| matches!(n, Notice::Removed { .. })).count();
    lab.run_until(3, |lab| removed(lab) == 2);
    assert_eq!(outcome(&lab), RequestOutcome::Fail);
    lab.notices.clear();
    lab.act(Act::Restore);
    lab.run_until(3, |lab| outcome(lab) == RequestOutcome::CarriedOut);
    assert!(matches!(lab.notices[..], [Notice::Live { .. }, ..]), "{:?}", lab.notices);
    for port in 0..2 {
        lab.target.ports[port].is_cut = true;
        lab.target.fail_links(port, &Reason::Device);
    }
    lab.settle();
    assert_eq!(outcome(&lab), RequestOutcome::Wait);
    lab.submit(Operation::Read, 0, 1);
    time_of(&mut lab);
    assert_eq!(outcome(&lab), RequestOutcome::Fail);
    lab.close();
}

#[test]
fn more_requests_than_agreed_are_refused_with_their_data() {
    let mut lab = Lab::new(1, MultipathOptions { requests: 2, ..common(0).0 }, false);
    let flush =
        || BlockRequest { operation: Operation::Flush, slba: 0, blocks: 0, data: None, tag: 7 };
    let early = lab.machine.submit(flush(), &mut lab.pool);
    assert!(early.is_err(), "there is no namespace yet");
    lab.run_until(10, |lab| lab.machine.namespace().is_some());
    lab.submit(Operation::Flush, 0, 0);
    lab.submit(Operation::Flush, 0, 0);
    assert!(lab.machine.submit(flush(), &mut lab.pool).is_err());
    lab.run_until(10, |lab| lab.under_way.is_empty());
    lab.submit(Operation::Flush, 0, 0);
    lab.run_until(10, |lab| lab.under_way.is_empty());
    lab.close();
}
