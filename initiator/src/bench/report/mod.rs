//! Report of a benchmark, in the formats of fio: text and the JSON of `fio --output-format=json`,
//! for tools that parse fio's results.
//!
//! Latencies are from the iteration in which a command was submitted to the iteration in which
//! its completion was found, so no part of it corresponds to fio's submission latency: `slat` is
//! all zeros, and `lat` is `clat`.

mod fio_json;
mod fio_text;
mod options;
mod progress;

use std::io::{ErrorKind, Write};
use std::time::Duration;

use hdrhistogram::Histogram;
use nix::sys::resource::{Usage, UsageWho, getrusage};

use crate::Error;

pub use options::{Format, Output, Printing};
pub use progress::{How, Progress, Rate};

/// Prints to stdout. A closed stdout is not an error.
///
/// # Errors
/// It cannot be written.
pub fn print(output: impl AsRef<[u8]>) -> Result<(), Error> {
    let mut out = std::io::stdout().lock();
    match out.write_all(output.as_ref()).and_then(|()| out.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::Local(format!("the output cannot be written: {error}")))
        }
        _ => Ok(()),
    }
}

/// Larger latencies, in nanoseconds, are recorded as this: 1000 s.
pub(crate) const LONGEST_NS: u64 = 1_000_000_000_000;

/// The percentiles that fio reports.
pub(crate) const PERCENTILES: [f64; 17] = [
    1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5, 99.9, 99.95,
    99.99,
];

/// Results of one direction. Recording does not allocate.
#[derive(Clone, Debug)]
pub struct Side {
    histogram: Histogram<u64>,
    sum_ns: u64,
    sum_squares: u128,
    bytes: u64,
    /// Commands and bytes of the current interval.
    interval: (u64, u64),
    samples: Vec<Sample>,
}

/// Results of one interval, converted to one second.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Sample {
    iops: f64,
    kib_per_s: f64,
}

/// Minimum, maximum, mean and standard deviation of some numbers; zeros if there are none.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Spread {
    /// The smallest.
    pub min: f64,
    /// The largest.
    pub max: f64,
    /// The mean.
    pub mean: f64,
    /// The standard deviation, of the whole population.
    pub stddev: f64,
    /// Number of values.
    pub count: u64,
}

impl Side {
    /// Creates empty results; space for `samples` intervals.
    pub fn new(samples: usize) -> Side {
        let histogram = Histogram::new_with_bounds(1, LONGEST_NS, 3);
        Side {
            histogram: histogram.expect("the bounds are right"),
            sum_ns: 0,
            sum_squares: 0,
            bytes: 0,
            interval: (0, 0),
            samples: Vec::with_capacity(samples),
        }
    }

    /// A command was completed.
    pub fn record(&mut self, latency_ns: u64, bytes: u32) {
        let latency_ns = latency_ns.clamp(1, LONGEST_NS);
        self.histogram.saturating_record(latency_ns);
        self.sum_ns = self.sum_ns.saturating_add(latency_ns);
        self.sum_squares += u128::from(latency_ns) * u128::from(latency_ns);
        self.bytes += u64::from(bytes);
        self.interval.0 += 1;
        self.interval.1 += u64::from(bytes);
    }

    /// An interval has ended; intervals beyond the allocated number are dropped.
    pub fn sample(&mut self, length: Duration) {
        let (ios, bytes) = std::mem::take(&mut self.interval);
        let seconds = length.as_secs_f64();
        if seconds > 0.0 && self.samples.len() < self.samples.capacity() {
            let kib_per_s = bytes as f64 / 1024.0 / seconds;
            self.samples.push(Sample { iops: ios as f64 / seconds, kib_per_s });
        }
    }

    /// Resets everything: the time before was the ramp.
    pub fn reset(&mut self) {
        self.histogram.reset();
        (self.sum_ns, self.sum_squares, self.bytes) = (0, 0, 0);
        self.interval = (0, 0);
        self.samples.clear();
    }

    /// Adds the results of another thread in the same time.
    pub fn merge(&mut self, other: &Side) {
        self.histogram.add(&other.histogram).expect("the same bounds");
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.sum_squares += other.sum_squares;
        self.bytes += other.bytes;
        for (n, theirs) in other.samples.iter().enumerate() {
            match self.samples.get_mut(n) {
                Some(ours) => {
                    ours.iops += theirs.iops;
                    ours.kib_per_s += theirs.kib_per_s;
                }
                None => self.samples.push(*theirs),
            }
        }
    }

    /// Number of commands.
    pub fn ios(&self) -> u64 {
        self.histogram.len()
    }

    /// Number of bytes transferred.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the latency, in nanoseconds, below which `percentile` of 100 commands are. Exact
    /// to one part in a thousand.
    pub fn percentile_ns(&self, percentile: f64) -> u64 {
        match self.histogram.is_empty() {
            true => 0,
            false => self.histogram.value_at_percentile(percentile),
        }
    }

    /// Returns the distribution of latencies in nanoseconds.
    pub(crate) fn latency_ns(&self) -> Spread {
        let count = self.ios();
        if count == 0 {
            return Spread::default();
        }
        let mean = self.sum_ns as f64 / count as f64;
        // Integer arithmetic relative to an integer mean: the difference may be much smaller than the terms.
        let (n, sum) = (u128::from(count), u128::from(self.sum_ns));
        let middle = sum / n;
        let around = (self.sum_squares + n * middle * middle).saturating_sub(2 * middle * sum);
        let variance = (around as f64 / count as f64 - (mean - middle as f64).powi(2)).max(0.0);
        let (min, max) = (self.histogram.min() as f64, self.histogram.max() as f64);
        Spread { min, max, mean, stddev: variance.sqrt(), count }
    }

    fn spread(&self, of: impl Fn(&Sample) -> f64) -> Spread {
        let values = || self.samples.iter().map(&of);
        let count = self.samples.len();
        if count == 0 {
            return Spread::default();
        }
        let mean = values().sum::<f64>() / count as f64;
        let variance = values().map(|value| (value - mean).powi(2)).sum::<f64>() / count as f64;
        Spread {
            min: values().fold(f64::INFINITY, f64::min),
            max: values().fold(0.0, f64::max),
            mean,
            stddev: variance.sqrt(),
            count: count as u64,
        }
    }
}

/// CPU time and context switches of the threads.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Cpu {
    /// Time in user mode.
    pub user: Duration,
    /// Time in the kernel on behalf of the threads.
    pub system: Duration,
    /// Context switches.
    pub switches: i64,
    /// Page faults with I/O.
    pub major_faults: i64,
    /// Page faults without I/O.
    pub minor_faults: i64,
}

impl Cpu {
    /// Returns the usage of the calling thread so far.
    pub(crate) fn of_thread() -> Cpu {
        let Ok(usage) = getrusage(UsageWho::RUSAGE_THREAD) else { return Cpu::default() };
        let time = |time: nix::sys::time::TimeVal| {
            Duration::new(time.tv_sec().unsigned_abs(), time.tv_usec() as u32 * 1000)
        };
        let switches = |usage: &Usage| {
            usage.voluntary_context_switches() + usage.involuntary_context_switches()
        };
        Cpu {
            user: time(usage.user_time()),
            system: time(usage.system_time()),
            switches: switches(&usage),
            major_faults: usage.major_page_faults(),
            minor_faults: usage.minor_page_faults(),
        }
    }

    /// Adds the usage of another thread.
    pub fn add(&mut self, other: &Cpu) {
        self.user += other.user;
        self.system += other.system;
        self.switches += other.switches;
        self.major_faults += other.major_faults;
        self.minor_faults += other.minor_faults;
    }

    /// Returns the usage since `before`.
    pub fn since(&self, before: &Cpu) -> Cpu {
        Cpu {
            user: self.user.saturating_sub(before.user),
            system: self.system.saturating_sub(before.system),
            switches: self.switches - before.switches,
            major_faults: self.major_faults - before.major_faults,
            minor_faults: self.minor_faults - before.minor_faults,
        }
    }
}

/// Numbers of commands in flight, and of those submitted and completed at once: counted in fio's
/// classes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Depths {
    /// In flight when one more was submitted: 1, 2, 4, 8, 16, 32, 64 or more.
    level: [u64; 7],
    /// Submitted in one iteration: none, up to 4, 8, 16, 32, 64, more.
    submit: [u64; 7],
    /// Completed in one iteration, likewise.
    complete: [u64; 7],
}

impl Depths {
    /// An iteration submitted `submitted` commands, with `before` in flight, and found
    /// `completed` completions.
    pub fn turn(&mut self, before: u64, submitted: u64, completed: u64) {
        if submitted > 0 {
            // The last of them represents all.
            let depth = (before + submitted).max(1);
            self.level[(depth.ilog2() as usize).min(6)] += submitted;
            self.submit[batch_class(submitted)] += 1;
        }
        if completed > 0 {
            self.complete[batch_class(completed)] += 1;
        }
    }

    /// Adds those of another thread.
    pub fn merge(&mut self, other: &Depths) {
        for (ours, theirs) in [
            (&mut self.level, &other.level),
            (&mut self.submit, &other.submit),
            (&mut self.complete, &other.complete),
        ] {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                *ours += theirs;
            }
        }
    }
}

fn batch_class(size: u64) -> usize {
    match size {
        0 => 0,
        1..=4 => 1,
        5..=8 => 2,
        9..=16 => 3,
        17..=32 => 4,
        33..=64 => 5,
        _ => 6,
    }
}

/// A benchmark's results.
#[derive(Clone, Debug)]
pub struct Report {
    /// Name of the benchmark.
    pub name: String,
    /// The options: fio's names, and values in fio's syntax.
    pub options: Vec<(&'static str, String)>,
    /// Number of threads.
    pub threads: u32,
    /// Duration of the measurement.
    pub runtime: Duration,
    /// Total duration.
    pub elapsed: Duration,
    /// Results of read commands.
    pub read: Side,
    /// Results of write commands.
    pub write: Side,
    /// CPU usage.
    pub cpu: Cpu,
    /// Distribution of queue depths.
    pub depths: Depths,
    /// Whether it ended early. Then the results are those up to that time.
    pub failed: bool,
}

impl Report {
    fn option(&self, name: &str) -> &str {
        let option = self.options.iter().find(|(it, _)| *it == name);
        option.map_or("", |(_, value)| value)
    }

    fn ios(&self) -> u64 {
        self.read.ios() + self.write.ios()
    }

    /// Returns the CPU time of this host per command, in nanoseconds.
    pub(crate) fn cpu_ns_per_io(&self) -> f64 {
        (self.cpu.user + self.cpu.system).as_nanos() as f64 / self.ios().max(1) as f64
    }

    /// Returns the distribution of latencies over fio's classes.
    fn latency_classes(&self) -> [LatencyClass; 3] {
        let mut classes = LatencyClass::all();
        for side in [&self.read, &self.write] {
            for value in side.histogram.iter_recorded() {
                let latency_ns = side.histogram.lowest_equivalent(value.value_iterated_to());
                let part = 100.0 * value.count_at_value() as f64 / self.ios().max(1) as f64;
                let mut ends = classes.iter_mut().flat_map(|unit| unit.ends.iter_mut());
                if let Some(end) = ends.find(|end| latency_ns <= end.to_ns) {
                    end.percent += part;
                }
            }
        }
        classes
    }
}

/// The classes of latencies in one unit.
struct LatencyClass {
    unit: &'static str,
    ends: Vec<LatencyEnd>,
}

/// One class: from the end of the previous one.
struct LatencyEnd {
    name: String,
    to_ns: u64,
    percent: f64,
}

impl LatencyClass {
    fn all() -> [LatencyClass; 3] {
        let class = |unit, unit_ns: u64| {
            let end =
                |&to: &u64| LatencyEnd { name: to.to_string(), to_ns: to * unit_ns, percent: 0.0 };
            LatencyClass { unit, ends: CLASSES.iter().map(end).collect() }
        };
        let mut all = [class("nsec", 1), class("usec", 1000), class("msec", 1_000_000)];
        for (name, to_ns) in [("2000", 2_000_000_000), (">=2000", u64::MAX)] {
            all[2].ends.push(LatencyEnd { name: name.into(), to_ns, percent: 0.0 });
        }
        all
    }
}

/// Upper ends of fio's classes of latencies, in each unit.
const CLASSES: [u64; 10] = [2, 4, 10, 20, 50, 100, 250, 500, 750, 1000];

/// Returns the percentage of each class.
fn percents(counts: &[u64; 7]) -> [f64; 7] {
    let sum: u64 = counts.iter().sum();
    counts.map(|count| 100.0 * count as f64 / sum.max(1) as f64)
}

#[cfg(test)]
mod tests;
