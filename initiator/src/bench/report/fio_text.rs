//! The text report of fio, line by line.

use std::fmt::{self, Write};
use std::time::Duration;

use super::{PERCENTILES, Report, Side, Spread, percents};

impl Report {
    /// Formats the report like fio, with an additional line: the CPU time per command.
    pub fn text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = self.write(&mut out);
        out
    }

    fn write(&self, out: &mut String) -> fmt::Result {
        let (threads, error) = (self.threads, u32::from(self.failed) * libc::EIO.unsigned_abs());
        writeln!(
            out,
            "{}: (groupid=0, jobs={threads}): err={error:2}: {}",
            self.name,
            Asked(self)
        )?;
        let sides = [("read", &self.read), ("write", &self.write)];
        for (name, side) in sides.iter().filter(|(_, side)| side.ios() > 0) {
            write_side(out, name, side, self.runtime)?;
        }
        self.write_classes(out)?;
        let wall = self.runtime.as_secs_f64().max(1e-9);
        let percent = |time: Duration| 100.0 * time.as_secs_f64() / wall;
        let (user, system) = (percent(self.cpu.user), percent(self.cpu.system));
        let (switches, major, minor) =
            (self.cpu.switches, self.cpu.major_faults, self.cpu.minor_faults);
        write!(out, "  cpu          : usr={user:.2}%, sys={system:.2}%, ctx={switches}, ")?;
        writeln!(out, "majf={major}, minf={minor}")?;
        writeln!(out, "  cpu per I/O  : {:.0} nsec", self.cpu_ns_per_io())?;
        let batches = ["0", "4", "8", "16", "32", "64", ">=64"];
        let depths = ["1", "2", "4", "8", "16", "32", ">=64"];
        for (title, names, counts) in [
            ("  IO depths    ", depths, &self.depths.level),
            ("     submit    ", batches, &self.depths.submit),
            ("     complete  ", batches, &self.depths.complete),
        ] {
            let parts = names.iter().zip(percents(counts));
            let parts: Vec<String> = parts.map(|(name, it)| format!("{name}={it:.1}%")).collect();
            writeln!(out, "{title}: {}", parts.join(", "))?;
        }
        let (reads, writes) = (self.read.ios(), self.write.ios());
        writeln!(
            out,
            "     issued rwts: total={reads},{writes},0,0 short=0,0,0,0 dropped=0,0,0,0"
        )?;
        writeln!(out, "\nRun status group 0 (all jobs):")?;
        for (name, side) in sides.iter().filter(|(_, side)| side.ios() > 0) {
            let bandwidth = Bandwidth::of(side, self.runtime);
            let (io, ms) = (Amount(side.bytes() as f64), self.runtime.as_millis());
            let name = name.to_uppercase();
            writeln!(out, "  {name:>5}: bw={bandwidth}, io={io}, run={ms}-{ms}msec")?;
        }
        Ok(())
    }

    /// Writes the distribution of latencies by class.
    fn write_classes(&self, out: &mut String) -> fmt::Result {
        for class in self.latency_classes() {
            let told: Vec<String> = class
                .ends
                .iter()
                .filter(|end| end.percent > 0.0)
                .map(|end| format!("{}={:.2}%", end.name, end.percent.max(0.01)))
                .collect();
            for line in told.chunks(5) {
                writeln!(out, "  lat ({})   : {}", class.unit, line.join(", "))?;
            }
        }
        Ok(())
    }
}

fn write_side(out: &mut String, name: &str, side: &Side, runtime: Duration) -> fmt::Result {
    let iops = side.ios() as f64 / runtime.as_secs_f64().max(1e-9);
    let (io, ms) = (Amount(side.bytes() as f64), runtime.as_millis());
    let bandwidth = Bandwidth::of(side, runtime);
    writeln!(out, "  {name}: IOPS={}, BW={bandwidth}({io}/{ms}msec)", Count(iops))?;
    let latency = side.latency_ns();
    for title in ["   clat", "    lat"] {
        writeln!(out, " {title} {}", Latency(latency))?;
    }
    let unit = Unit::of(side.percentile_ns(99.99) as f64);
    writeln!(out, "    clat percentiles ({}):", unit.name)?;
    let values: Vec<(f64, u64)> = PERCENTILES
        .iter()
        .map(|&it| (it, (side.percentile_ns(it) as f64 / unit.ns).round() as u64))
        .collect();
    let width = values.iter().map(|(_, value)| value.to_string().len()).max().unwrap_or(1).max(4);
    for (n, line) in values.chunks(4).enumerate() {
        let parts: Vec<String> =
            line.iter().map(|(it, value)| format!("{it:5.2}th=[{value:width$}]")).collect();
        let end = if n < 4 { "," } else { "" };
        writeln!(out, "     | {}{end}", parts.join(", "))?;
    }
    let (bw, iops) = (side.spread(|it| it.kib_per_s), side.spread(|it| it.iops));
    writeln!(
        out,
        "   bw (  KiB/s): min={:.0}, max={:.0}, per=100.00%, avg={:.2}, stdev={:.2}, samples={}",
        bw.min, bw.max, bw.mean, bw.stddev, bw.count
    )?;
    writeln!(
        out,
        "   iops        : min={:.0}, max={:.0}, avg={:.2}, stdev={:.2}, samples={}",
        iops.min, iops.max, iops.mean, iops.stddev, iops.count
    )
}

/// The options in short form.
struct Asked<'a>(&'a Report);

impl fmt::Display for Asked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, name) in ["rw", "bs", "ioengine", "iodepth", "queues"].iter().enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}{name}={}", self.0.option(name))?;
        }
        Ok(())
    }
}

/// A unit of time for display.
struct Unit {
    name: &'static str,
    ns: f64,
}

impl Unit {
    /// Returns the unit in which values up to `most_ns` have few digits.
    fn of(most_ns: f64) -> Unit {
        match most_ns {
            ns if ns < 100_000.0 => Unit { name: "nsec", ns: 1.0 },
            ns if ns < 100_000_000.0 => Unit { name: "usec", ns: 1e3 },
            _ => Unit { name: "msec", ns: 1e6 },
        }
    }
}

struct Latency(Spread);

impl fmt::Display for Latency {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Spread { min, max, mean, stddev, .. } = self.0;
        let Unit { name, ns } = Unit::of(mean * 5.0);
        let (min, max) = (Count(min / ns), Count(max / ns));
        let (mean, stddev) = (mean / ns, stddev / ns);
        write!(f, "({name}): min={min}, max={max}, avg={mean:.2}, stdev={stddev:.2}")
    }
}

/// Bytes per second, in binary and in decimal units.
struct Bandwidth(f64);

impl Bandwidth {
    fn of(side: &Side, runtime: Duration) -> Bandwidth {
        Bandwidth(side.bytes() as f64 / runtime.as_secs_f64().max(1e-9))
    }
}

impl fmt::Display for Bandwidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (decimal, prefix) = scale(self.0, 1000.0, &["", "k", "M", "G", "T"]);
        write!(f, "{}/s ({decimal}{prefix}B/s)", Amount(self.0))
    }
}

/// Bytes in binary units.
pub(super) struct Amount(pub(super) f64);

impl fmt::Display for Amount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = scale(self.0, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"]);
        write!(f, "{number}{unit}")
    }
}

/// A number with at most four digits.
pub(super) struct Count(pub(super) f64);

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (number, unit) = scale(self.0, 1000.0, &["", "k", "M", "G", "T"]);
        write!(f, "{number}{unit}")
    }
}

/// Formats numbers like fio: whole below ten thousand, then with a prefix and three digits or four.
fn scale(mut value: f64, step: f64, units: &[&'static str; 5]) -> (String, &'static str) {
    let mut unit = 0;
    while value >= 9999.5 && unit < units.len() - 1
        || unit == 0 && step == 1024.0 && value >= 1024.0
    {
        value /= step;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        value if value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    (format!("{value:.decimals$}"), units[unit])
}
