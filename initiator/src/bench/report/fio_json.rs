//! The JSON of `fio --output-format=json`: its names, nesting and order.

use serde_json::{Map, Value, json};

use super::{PERCENTILES, Report, Side, Spread, percents};

impl Report {
    /// Formats the report like fio, pretty-printed. `cpu_ns_per_io` is an addition.
    pub fn json(&self, timestamp_ms: u64) -> String {
        let whole = json!({
            "fio version": concat!("nvmf-", env!("CARGO_PKG_VERSION")),
            "timestamp": timestamp_ms / 1000,
            "timestamp_ms": timestamp_ms,
            "jobs": [self.job()],
        });
        format!("{whole:#}")
    }

    fn job(&self) -> Value {
        let wall_s = self.runtime.as_secs_f64().max(1e-9);
        let runtime_ms = self.runtime.as_millis() as u64;
        let [nsec, usec, msec] = self.latency_classes().map(|class| {
            let ends = class.ends.into_iter().map(|end| (end.name, end.percent.into()));
            ends.collect::<Map<_, _>>()
        });
        let options = self.options.iter();
        let options = options.map(|(name, value)| ((*name).to_owned(), value.as_str().into()));
        let batches = ["0", "4", "8", "16", "32", "64", ">=64"];
        json!({
            "jobname": self.name,
            "groupid": 0,
            "error": u32::from(self.failed) * libc::EIO.unsigned_abs(),
            "eta": 0,
            "elapsed": self.elapsed.as_secs_f64().ceil() as u64,
            "job options": options.collect::<Map<_, _>>(),
            "read": direction(&self.read, runtime_ms),
            "write": direction(&self.write, runtime_ms),
            "trim": direction(&Side::new(0), 0),
            "sync": { "total_ios": 0, "lat_ns": latency(Spread::default()) },
            "job_runtime": runtime_ms * u64::from(self.threads),
            "usr_cpu": 100.0 * self.cpu.user.as_secs_f64() / wall_s,
            "sys_cpu": 100.0 * self.cpu.system.as_secs_f64() / wall_s,
            "ctx": self.cpu.switches,
            "majf": self.cpu.major_faults,
            "minf": self.cpu.minor_faults,
            "cpu_ns_per_io": self.cpu_ns_per_io(),
            "iodepth_level": pairs(&["1", "2", "4", "8", "16", "32", ">=64"], &self.depths.level),
            "iodepth_submit": pairs(&batches, &self.depths.submit),
            "iodepth_complete": pairs(&batches, &self.depths.complete),
            "latency_ns": nsec,
            "latency_us": usec,
            "latency_ms": msec,
            "latency_depth": self.option("iodepth").parse::<u32>().unwrap_or(1),
            "latency_target": 0,
            "latency_percentile": 100.0,
            "latency_window": 0,
        })
    }
}

fn pairs(names: &[&str; 7], counts: &[u64; 7]) -> Value {
    names.iter().copied().zip(percents(counts)).collect()
}

fn direction(side: &Side, runtime_ms: u64) -> Value {
    let used = side.ios() > 0;
    let seconds = (runtime_ms as f64 / 1000.0).max(1e-3);
    let bw_bytes = (side.bytes() as f64 / seconds) as u64;
    let no_samples = Spread::default();
    let (bw, iops) = match used {
        true => (side.spread(|it| it.kib_per_s), side.spread(|it| it.iops)),
        false => (no_samples, no_samples),
    };
    let lat_ns = latency(side.latency_ns());
    let mut clat_ns = lat_ns.clone();
    if used {
        let percentile = |&it: &f64| (format!("{it:.6}"), side.percentile_ns(it));
        clat_ns["percentile"] = PERCENTILES.iter().map(percentile).collect();
    }
    json!({
        "io_bytes": side.bytes(),
        "io_kbytes": side.bytes() / 1024,
        "bw_bytes": bw_bytes,
        "bw": bw_bytes / 1024, // KiB/s
        "iops": side.ios() as f64 / seconds,
        "runtime": if used { runtime_ms } else { 0 }, // ms
        "total_ios": side.ios(),
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": latency(no_samples),
        "clat_ns": clat_ns,
        "lat_ns": lat_ns,
        "bw_min": bw.min as u64,
        "bw_max": bw.max as u64,
        "bw_agg": if used { 100.0 } else { 0.0 },
        "bw_mean": bw.mean,
        "bw_dev": bw.stddev,
        "bw_samples": bw.count,
        "iops_min": iops.min as u64,
        "iops_max": iops.max as u64,
        "iops_mean": iops.mean,
        "iops_stddev": iops.stddev,
        "iops_samples": iops.count,
    })
}

fn latency(Spread { min, max, mean, stddev, count }: Spread) -> Value {
    json!({ "min": min as u64, "max": max as u64, "mean": mean, "stddev": stddev, "N": count })
}
