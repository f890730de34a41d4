//! The loop of one thread: reaps all completions, submits as many commands, rings the doorbell
//! once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use nvme::Status;
use rdma::AdaptivePoller;

use super::pattern::Pattern;
use super::plan::Plan;
use crate::bench::report::{Cpu, Depths, Side};
use crate::multipath::{Failure, Operation};
use crate::namespace_host::{BlockCommand, BlockOutcome, NamespaceHost};
use crate::rng::Random;
use crate::{Data, Error, Refused};

/// Interval of samples of bandwidth and IOPS, as in fio.
const SAMPLE_EVERY: Duration = Duration::from_millis(500);
/// Maximum number of samples: two hours.
const SAMPLES: usize = 2 * 2 * 3600;

/// Progress counters of a job, for the live line.
#[derive(Debug, Default)]
pub(super) struct Live {
    reads: AtomicU64,
    read_bytes: AtomicU64,
    writes: AtomicU64,
    write_bytes: AtomicU64,
}

impl Live {
    /// Returns commands and bytes of all jobs: read, written.
    pub(super) fn sum(all: &[Arc<Live>]) -> ((u64, u64), (u64, u64)) {
        let sum = |of: fn(&Live) -> &AtomicU64| {
            all.iter().map(|live| of(live).load(Ordering::Relaxed)).sum()
        };
        (
            (sum(|live| &live.reads), sum(|live| &live.read_bytes)),
            (sum(|live| &live.writes), sum(|live| &live.write_bytes)),
        )
    }
}

/// Result of a job.
#[derive(Debug)]
pub(super) struct Outcome {
    pub(super) read: Side,
    pub(super) write: Side,
    pub(super) depths: Depths,
    pub(super) cpu: Cpu,
    /// Duration of the measurement.
    pub(super) measured: Duration,
    /// The reason, if it ended early.
    pub(super) failure: Option<Error>,
}

/// Position and memory of one command, reused.
#[derive(Debug)]
struct Slot {
    memory: Option<Data>,
    queue: u16,
    is_read: bool,
    /// Submission time: nanoseconds since the start.
    since_ns: u64,
}

/// A connected job.
pub(super) struct Job {
    host: NamespaceHost,
    plan: Arc<Plan>,
    pattern: Pattern,
    slots: Vec<Slot>,
    /// Slots without a command.
    free: Vec<u32>,
    /// Slots whose queue was full at the last attempt.
    refused: Vec<u32>,
    live: Arc<Live>,
    outcome: Outcome,
    /// Commands and bytes since the start: read, written. Includes the ramp.
    totals: [(u64, u64); 2],
}

impl Job {
    /// Has the memory of every command filled with incompressible bytes.
    pub(super) fn new(mut host: NamespaceHost, plan: Arc<Plan>, n: u32) -> Result<Job, Error> {
        let mut random = Random::new(plan.seed ^ u64::from(n) << 48);
        let mut data = vec![0; plan.bytes as usize];
        let mut slots = Vec::with_capacity(plan.depth as usize);
        for i in 0..plan.depth {
            for word in data.chunks_mut(8) {
                let bytes = random.next().to_le_bytes();
                word.copy_from_slice(&bytes[..word.len()]);
            }
            let memory = host.memory(&data)?;
            let queue = 1 + (i % u32::from(plan.queues)) as u16;
            slots.push(Slot { memory: Some(memory), queue, is_read: false, since_ns: 0 });
        }
        let pattern = Pattern::new(plan.rw, plan.mix, plan.places, plan.seed, n, plan.jobs);
        Ok(Job {
            host,
            pattern,
            free: (0..plan.depth).rev().collect(),
            refused: Vec::with_capacity(plan.depth as usize),
            slots,
            live: Arc::default(),
            outcome: Outcome {
                read: Side::new(SAMPLES),
                write: Side::new(SAMPLES),
                depths: Depths::default(),
                cpu: Cpu::default(),
                measured: Duration::ZERO,
                failure: None,
            },
            totals: [(0, 0); 2],
            plan,
        })
    }

    /// Returns the progress counters.
    pub(super) fn live(&self) -> Arc<Live> {
        Arc::clone(&self.live)
    }

    /// Runs ramp and measurement, then waits for outstanding commands and disconnects.
    pub(super) fn run(mut self, start: Instant, halt: &AtomicBool) -> Outcome {
        let ramp_end = start + self.plan.ramp;
        if !self.plan.ramp.is_zero() {
            self.turns(start, ramp_end, halt);
            self.outcome.read.reset();
            self.outcome.write.reset();
            self.outcome.depths = Depths::default();
        }
        let before = Cpu::of_thread();
        let began = Instant::now();
        let ended = self.turns(start, ramp_end + self.plan.runtime, halt);
        self.outcome.measured = ended.saturating_duration_since(began);
        self.outcome.cpu = Cpu::of_thread().since(&before);
        self.drain();
        self.explain();
        self.host.disconnect();
        self.outcome
    }

    /// Disconnects without a run.
    pub(super) fn leave(self) {
        self.host.disconnect();
    }

    /// Iterates until `end`, a failure or `halt`; returns the time of that.
    fn turns(&mut self, start: Instant, end: Instant, halt: &AtomicBool) -> Instant {
        let mut now = Instant::now();
        let mut spinner = AdaptivePoller::new(self.plan.spin, now);
        let mut sampled = now;
        while now < end && self.outcome.failure.is_none() && !halt.load(Ordering::Relaxed) {
            let before = self.under_way();
            let submitted = self.refill(since(start, now));
            self.host.ring();
            let any = self.host.poll();
            now = Instant::now();
            let mut completed = self.collect(since(start, now));
            if any || completed + submitted > 0 {
                spinner.worked(now);
            } else if spinner.goes_on(now, self.under_way() > 0) {
                std::hint::spin_loop();
            } else {
                self.host.wait(end.min(sampled + SAMPLE_EVERY));
                now = Instant::now();
                completed = self.collect(since(start, now));
                spinner.worked(now);
            }
            self.outcome.depths.turn(before, submitted, completed);
            if completed > 0 {
                self.publish();
            }
            if now >= sampled + SAMPLE_EVERY {
                self.outcome.read.sample(now - sampled);
                self.outcome.write.sample(now - sampled);
                sampled = now;
            }
        }
        now
    }

    fn under_way(&self) -> u64 {
        (self.slots.len() - self.free.len()) as u64
    }

    /// Submits a command for every free slot, and returns the number submitted.
    fn refill(&mut self, now_ns: u64) -> u64 {
        let mut submitted = 0;
        while let Some(i) = self.free.pop() {
            let slot = &mut self.slots[i as usize];
            let Some(memory) = slot.memory.take() else { continue };
            let next = self.pattern.next();
            let command = BlockCommand {
                operation: match next.is_read {
                    true => Operation::Read,
                    false => Operation::Write { fua: self.plan.fua },
                },
                slba: self.plan.first_lba + next.place * u64::from(self.plan.blocks),
                blocks: self.plan.blocks,
                data: memory,
                tag: u64::from(i),
            };
            (slot.is_read, slot.since_ns) = (next.is_read, now_ns);
            match self.host.submit(slot.queue, command) {
                Ok(()) => submitted += 1,
                Err((command, why)) => {
                    slot.memory = Some(command.data);
                    self.refused.push(i);
                    if !matches!(why, Refused::Full | Refused::NoBuffer) {
                        self.fail(why);
                        break;
                    }
                }
            }
        }
        self.free.append(&mut self.refused);
        submitted
    }

    /// Takes all completions.
    fn collect(&mut self, now_ns: u64) -> u64 {
        let mut completed = 0;
        while let Some(BlockOutcome { tag, outcome, data }) = self.host.next_done() {
            let Some(slot) = self.slots.get_mut(tag as usize) else { continue };
            slot.memory = Some(data);
            self.free.push(tag as u32);
            completed += 1;
            match outcome {
                Ok(()) => {
                    let latency_ns = now_ns.saturating_sub(slot.since_ns);
                    let (side, total) = match slot.is_read {
                        true => (&mut self.outcome.read, &mut self.totals[0]),
                        false => (&mut self.outcome.write, &mut self.totals[1]),
                    };
                    side.record(latency_ns, self.plan.bytes);
                    total.0 += 1;
                    total.1 += u64::from(self.plan.bytes);
                }
                Err(Failure::Status(status)) => {
                    let what = if slot.is_read { "Read" } else { "Write" };
                    let _ = self.outcome.failure.get_or_insert(Error::Status { what, status });
                }
                Err(Failure::NoPath | Failure::Closed) => self.fail(Refused::NotReady),
            }
        }
        completed
    }

    fn fail(&mut self, why: Refused) {
        let failure = self.host.ended().unwrap_or_else(|| Error::Local(why.to_string()));
        let _ = self.outcome.failure.get_or_insert(failure);
    }

    /// Adds an explanation for the user if a command was rejected.
    fn explain(&mut self) {
        let Some(Error::Status { status, .. }) = &self.outcome.failure else { return };
        let refused = status.is(Status::FORMAT_IN_PROGRESS);
        if let Some(why) = self.host.was_formatted(self.plan.bytes / self.plan.blocks, refused) {
            self.outcome.failure = Some(why);
        }
    }

    /// Waits for outstanding commands: the session guarantees that this ends.
    fn drain(&mut self) {
        let (read, write) = (self.outcome.read.clone(), self.outcome.write.clone());
        while self.under_way() > 0 {
            self.host.wait(Instant::now() + SAMPLE_EVERY);
            let _ = self.collect(u64::MAX);
        }
        // Commands completed after the end do not count.
        (self.outcome.read, self.outcome.write) = (read, write);
    }

    fn publish(&self) {
        let [read, write] = self.totals;
        self.live.reads.store(read.0, Ordering::Relaxed);
        self.live.read_bytes.store(read.1, Ordering::Relaxed);
        self.live.writes.store(write.0, Ordering::Relaxed);
        self.live.write_bytes.store(write.1, Ordering::Relaxed);
    }
}

fn since(start: Instant, now: Instant) -> u64 {
    now.saturating_duration_since(start).as_nanos() as u64
}
