use std::collections::BTreeMap;

use serde_json::Value;

use crate::bench::report::*;
use crate::rng::Random;

/// Output of `fio --output-format=json` for a mixed job: from fio 3.33 itself.
const FIO: &str = include_str!("fio-3.33.json");

fn report() -> Report {
    let mut random = Random::new(1);
    let (mut read, mut write) = (Side::new(4), Side::new(4));
    for second in 0..2 {
        for _ in 0..5000 {
            read.record(10_000 + random.below(90_000), 4096);
            write.record(1_000_000 + second, 8192);
        }
        for side in [&mut read, &mut write] {
            side.sample(Duration::from_secs(1));
        }
    }
    let mut depths = Depths::default();
    depths.turn(0, 4, 0);
    depths.turn(2, 2, 2);
    Report {
        name: "mix".into(),
        options: vec![("rw", "randrw".into()), ("bs", "4k".into()), ("iodepth", "4".into())],
        threads: 1,
        runtime: Duration::from_secs(2),
        elapsed: Duration::from_millis(2100),
        read,
        write,
        cpu: Cpu {
            user: Duration::from_millis(500),
            system: Duration::from_millis(1000),
            switches: 7,
            major_faults: 0,
            minor_faults: 3,
        },
        depths,
        failed: false,
    }
}

/// Collects every path of a value, with the type of the value there.
fn paths(value: &Value, at: String, into: &mut BTreeMap<String, &'static str>) {
    let kind = match value {
        Value::Object(object) => {
            for (name, value) in object {
                paths(value, format!("{at}.{name}"), into);
            }
            return;
        }
        Value::Array(array) => {
            for value in array {
                paths(value, format!("{at}[]"), into);
            }
            return;
        }
        Value::Number(number) if number.is_f64() => "fraction",
        Value::Number(_) => "whole",
        Value::String(_) => "text",
        _ => "other",
    };
    let _ = into.insert(at, kind);
}

#[test]
fn json_has_every_field_of_fio_with_its_type() {
    let theirs: Value = serde_json::from_str(FIO).expect("JSON");
    let ours: Value = serde_json::from_str(&report().json(1_700_000_000_123)).expect("JSON");
    let (mut want, mut have) = (BTreeMap::new(), BTreeMap::new());
    paths(&theirs, String::new(), &mut want);
    paths(&ours, String::new(), &mut have);
    // The options of the job, the time as text, and device utilization are specific to fio.
    want.retain(|path, _| {
        !path.contains("job options") && !path.starts_with(".disk_util") && path != ".time"
    });
    assert!(want.len() > 150, "{} fields", want.len());
    for (path, kind) in &want {
        assert_eq!(have.get(path), Some(kind), "{path}");
    }
    have.retain(|path, _| !want.contains_key(path) && !path.contains("job options"));
    assert_eq!(have.into_keys().collect::<Vec<_>>(), [".jobs[].cpu_ns_per_io"], "what is ours");
}

#[test]
fn json_reports_the_measured_values() {
    let json: Value = serde_json::from_str(&report().json(5000)).expect("JSON");
    let job = &json["jobs"][0];
    assert_eq!(json["fio version"], concat!("nvmf-", env!("CARGO_PKG_VERSION")));
    assert_eq!(
        (&job["jobname"], &job["error"], &job["elapsed"]),
        (&"mix".into(), &0.into(), &3.into())
    );
    assert_eq!(job["job options"]["rw"], "randrw");
    let (read, write) = (&job["read"], &job["write"]);
    assert_eq!(read["total_ios"], 10_000);
    assert_eq!(read["iops"], 5000.0);
    assert_eq!(read["io_bytes"], 10_000 * 4096);
    assert_eq!(read["bw_bytes"], 5000 * 4096);
    assert_eq!(read["bw"], 5000 * 4);
    assert_eq!((&read["bw_min"], &read["iops_max"]), (&20_000.into(), &5000.into()));
    assert_eq!(read["iops_samples"], 2);
    assert_eq!(write["clat_ns"]["N"], 10_000);
    assert_eq!(write["clat_ns"]["mean"], 1_000_000.5);
    assert_eq!(write["clat_ns"]["stddev"], 0.5);
    let median = read["clat_ns"]["percentile"]["50.000000"].as_u64().expect("a number");
    assert!((53_000..57_000).contains(&median), "{median}");
    assert_eq!(read["slat_ns"]["N"], 0, "nothing of the kind is measured");
    assert_eq!((&job["usr_cpu"], &job["sys_cpu"]), (&25.0.into(), &50.0.into()));
    assert_eq!(job["cpu_ns_per_io"], 75_000.0);
    // Half of the commands are writes of 1 ms, within the precision of the histogram.
    let ms: f64 = ["2", "4"].iter().filter_map(|it| job["latency_ms"][it].as_f64()).sum();
    assert!((49.0..=50.0).contains(&(ms + job["latency_us"]["1000"].as_f64().unwrap_or(0.0))));
    assert_eq!(job["trim"]["total_ios"], 0);
    assert_eq!(job["latency_depth"], 4);
    let sum = |name: &str| -> f64 {
        job[name].as_object().expect("classes").values().filter_map(Value::as_f64).sum()
    };
    for name in ["iodepth_level", "iodepth_submit", "iodepth_complete"] {
        assert!((sum(name) - 100.0).abs() < 1e-9, "{name}");
    }
    let latencies = sum("latency_ns") + sum("latency_us") + sum("latency_ms");
    assert!((latencies - 100.0).abs() < 1e-9, "each command is in one class: {latencies}");
}

#[test]
fn failed_runs_report_an_error_and_empty_ones_no_percentiles() {
    let failed = Report { failed: true, write: Side::new(0), ..report() };
    let json: Value = serde_json::from_str(&failed.json(0)).expect("JSON");
    assert_eq!(json["jobs"][0]["error"], 5);
    assert_eq!(json["jobs"][0]["write"]["runtime"], 0);
    assert!(json["jobs"][0]["write"]["clat_ns"].get("percentile").is_none());
    assert!(failed.text().contains("err= 5"));
    assert!(!failed.text().contains("WRITE:"));
}

#[test]
fn the_text_reads_like_that_of_fio() {
    let text = report().text();
    for line in [
        "mix: (groupid=0, jobs=1): err= 0: rw=randrw, bs=4k, ioengine=, iodepth=4, queues=\n",
        "  read: IOPS=5000, BW=19.5MiB/s (20.5MB/s)(39.1MiB/2000msec)\n",
        "    clat (usec): min=1000, max=1000, avg=1000.00, stdev=0.00\n",
        "    clat percentiles (usec):\n     |  1.00th=[1000],  5.00th=[1000], 10.00th=[1000], ",
        ", 99.95th=[1000],\n     | 99.99th=[1000]\n",
        "   bw (  KiB/s): min=20000, max=20000, per=100.00%, avg=20000.00, stdev=0.00, samples=2\n",
        "   iops        : min=5000, max=5000, avg=5000.00, stdev=0.00, samples=2\n",
        "  cpu          : usr=25.00%, sys=50.00%, ctx=7, majf=0, minf=3\n",
        "  cpu per I/O  : 75000 nsec\n",
        "  IO depths    : 1=0.0%, 2=0.0%, 4=100.0%, 8=0.0%, 16=0.0%, 32=0.0%, >=64=0.0%\n",
        "     issued rwts: total=10000,10000,0,0 short=0,0,0,0 dropped=0,0,0,0\n",
        "   READ: bw=19.5MiB/s (20.5MB/s), io=39.1MiB, run=2000-2000msec\n",
    ] {
        assert!(text.contains(line), "{line:?} in\n{text}");
    }
}

#[test]
fn results_of_threads_are_merged() {
    let (mut sum, other) = (report().read, report().write);
    sum.merge(&other);
    assert_eq!(sum.ios(), 20_000);
    assert_eq!(sum.bytes(), 10_000 * (4096 + 8192));
    assert_eq!(sum.spread(|it| it.iops).min, 10_000.0);
    let spread = sum.latency_ns();
    assert!(spread.min >= 10_000.0 && spread.max >= 1_000_000.0 && spread.count == 20_000);
    let mean = (report().read.latency_ns().mean + other.latency_ns().mean) / 2.0;
    assert!((spread.mean - mean).abs() < 1e-6);
    let mut depths = report().depths;
    depths.merge(&report().depths);
    assert_eq!(depths.level, [0, 0, 12, 0, 0, 0, 0]);
}

#[test]
fn reset_discards_the_results_of_the_ramp() {
    let mut side = report().read;
    side.reset();
    assert_eq!((side.ios(), side.bytes(), side.latency_ns()), (0, 0, Spread::default()));
    side.record(u64::MAX, 1);
    assert_eq!(side.ios(), 1, "what takes for ever is counted as well");
}

#[test]
fn output_format_and_json_exclude_each_other() {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        output: Output,
    }
    let parse = |args: &[&str]| <Cli as clap::Parser>::try_parse_from([&["nvmf"], args].concat());
    assert!(parse(&["--json"]).is_ok_and(|cli| cli.output.is_json()));
    assert!(parse(&["-o", "json"]).is_ok_and(|cli| cli.output.is_json()));
    assert!(parse(&["-o", "normal", "--json"]).is_err());
}
