//! The JSON of `fio --output-format=json`: its names, nesting and order.

use serde::Serialize;
use serde::ser::{SerializeMap, Serializer};

use super::{PERCENTILES, Report, Side, Spread, percents};

impl Report {
    /// Formats the report like fio, pretty-printed. `cpu_ns_per_io` is an addition.
    #[must_use]
    pub fn json(&self, timestamp_ms: u64) -> String {
        let whole = Whole {
            version: concat!("nvmf-", env!("CARGO_PKG_VERSION")),
            timestamp: timestamp_ms / 1000,
            timestamp_ms,
            jobs: [self.job()],
        };
        serde_json::to_string_pretty(&whole).unwrap_or_default()
    }

    fn job(&self) -> FioJob<'_> {
        let wall_s = self.runtime.as_secs_f64().max(1e-9);
        let [nsec, usec, msec] = self.latency_classes().map(|class| {
            Pairs(class.ends.into_iter().map(|end| (end.name, end.percent)).collect())
        });
        let batches = ["0", "4", "8", "16", "32", "64", ">=64"];
        FioJob {
            jobname: &self.name,
            groupid: 0,
            error: u32::from(self.failed) * libc::EIO.unsigned_abs(),
            eta: 0,
            elapsed: self.elapsed.as_secs_f64().ceil() as u64,
            options: Pairs(
                self.options.iter().map(|(name, value)| ((*name).into(), value)).collect(),
            ),
            read: FioDirection::new(&self.read, self.runtime.as_millis() as u64),
            write: FioDirection::new(&self.write, self.runtime.as_millis() as u64),
            trim: FioDirection::new(&Side::new(0), 0),
            sync: Sync { total_ios: 0, lat_ns: FioLatency::default() },
            job_runtime: self.runtime.as_millis() as u64 * u64::from(self.threads),
            usr_cpu: 100.0 * self.cpu.user.as_secs_f64() / wall_s,
            sys_cpu: 100.0 * self.cpu.system.as_secs_f64() / wall_s,
            ctx: self.cpu.switches,
            majf: self.cpu.major_faults,
            minf: self.cpu.minor_faults,
            cpu_ns_per_io: self.cpu_ns_per_io(),
            iodepth_level: pairs(&["1", "2", "4", "8", "16", "32", ">=64"], &self.depths.level),
            iodepth_submit: pairs(&batches, &self.depths.submit),
            iodepth_complete: pairs(&batches, &self.depths.complete),
            latency_ns: nsec,
            latency_us: usec,
            latency_ms: msec,
            latency_depth: self.option("iodepth").parse().unwrap_or(1),
            latency_target: 0,
            latency_percentile: 100.0,
            latency_window: 0,
        }
    }
}

fn pairs(names: &[&str; 7], counts: &[u64; 7]) -> Pairs<f64> {
    Pairs(names.iter().map(|name| (*name).to_owned()).zip(percents(counts)).collect())
}

/// An object whose names are known only at run time, in order.
struct Pairs<V>(Vec<(String, V)>);

impl<V: Serialize> Serialize for Pairs<V> {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let mut map = to.serialize_map(Some(self.0.len()))?;
        for (name, value) in &self.0 {
            map.serialize_entry(name, value)?;
        }
        map.end()
    }
}

#[derive(Serialize)]
struct Whole<'a> {
    #[serde(rename = "fio version")]
    version: &'static str,
    timestamp: u64,
    timestamp_ms: u64,
    jobs: [FioJob<'a>; 1],
}

#[derive(Serialize)]
struct FioJob<'a> {
    jobname: &'a str,
    groupid: u32,
    error: u32,
    eta: u32,
    elapsed: u64,
    #[serde(rename = "job options")]
    options: Pairs<&'a String>,
    read: FioDirection,
    write: FioDirection,
    trim: FioDirection,
    sync: Sync,
    job_runtime: u64,
    usr_cpu: f64,
    sys_cpu: f64,
    ctx: i64,
    majf: i64,
    minf: i64,
    cpu_ns_per_io: f64,
    iodepth_level: Pairs<f64>,
    iodepth_submit: Pairs<f64>,
    iodepth_complete: Pairs<f64>,
    latency_ns: Pairs<f64>,
    latency_us: Pairs<f64>,
    latency_ms: Pairs<f64>,
    latency_depth: u32,
    latency_target: u32,
    latency_percentile: f64,
    latency_window: u32,
}

#[derive(Serialize)]
struct Sync {
    total_ios: u64,
    lat_ns: FioLatency,
}

#[derive(Serialize)]
struct FioDirection {
    io_bytes: u64,
    io_kbytes: u64,
    bw_bytes: u64,
    /// KiB/s.
    bw: u64,
    iops: f64,
    /// Milliseconds.
    runtime: u64,
    total_ios: u64,
    short_ios: u64,
    drop_ios: u64,
    slat_ns: FioLatency,
    clat_ns: FioLatency,
    lat_ns: FioLatency,
    bw_min: u64,
    bw_max: u64,
    bw_agg: f64,
    bw_mean: f64,
    bw_dev: f64,
    bw_samples: u64,
    iops_min: u64,
    iops_max: u64,
    iops_mean: f64,
    iops_stddev: f64,
    iops_samples: u64,
}

impl FioDirection {
    fn new(side: &Side, runtime_ms: u64) -> FioDirection {
        let used = side.ios() > 0;
        let seconds = (runtime_ms as f64 / 1000.0).max(1e-3);
        let bw_bytes = (side.bytes() as f64 / seconds) as u64;
        let no_samples = Spread::default();
        let (bw, iops) = match used {
            true => (side.spread(|it| it.kib_per_s), side.spread(|it| it.iops)),
            false => (no_samples, no_samples),
        };
        let latency = FioLatency::new(side.latency_ns());
        let percentile = |&it: &f64| (format!("{it:.6}"), side.percentile_ns(it));
        let percentiles = used.then(|| Pairs(PERCENTILES.iter().map(percentile).collect()));
        FioDirection {
            io_bytes: side.bytes(),
            io_kbytes: side.bytes() / 1024,
            bw_bytes,
            bw: bw_bytes / 1024,
            iops: side.ios() as f64 / seconds,
            runtime: if used { runtime_ms } else { 0 },
            total_ios: side.ios(),
            short_ios: 0,
            drop_ios: 0,
            slat_ns: FioLatency::default(),
            clat_ns: FioLatency { percentile: percentiles, ..FioLatency::new(side.latency_ns()) },
            lat_ns: latency,
            bw_min: bw.min as u64,
            bw_max: bw.max as u64,
            bw_agg: if used { 100.0 } else { 0.0 },
            bw_mean: bw.mean,
            bw_dev: bw.stddev,
            bw_samples: bw.count,
            iops_min: iops.min as u64,
            iops_max: iops.max as u64,
            iops_mean: iops.mean,
            iops_stddev: iops.stddev,
            iops_samples: iops.count,
        }
    }
}

#[derive(Serialize, Default)]
struct FioLatency {
    min: u64,
    max: u64,
    mean: f64,
    stddev: f64,
    #[serde(rename = "N")]
    count: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    percentile: Option<Pairs<u64>>,
}

impl FioLatency {
    fn new(spread: Spread) -> FioLatency {
        let Spread { min, max, mean, stddev, count } = spread;
        FioLatency { min: min as u64, max: max as u64, mean, stddev, count, percentile: None }
    }
}
