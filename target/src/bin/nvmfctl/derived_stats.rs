//! Rates and percentiles from two snapshots of the daemon's counters.

use nvmfd::api::stats::{ControllerStats, Latency, Operations, Stats, Sums};
use serde::Serialize;

/// Rates of one or several hosts, namespaces and kinds of command.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Rate {
    pub(crate) subsystem: String,
    pub(crate) nsid: u32,
    pub(crate) host: String,
    pub(crate) op: String,
    /// Completed commands, including failed ones.
    pub(crate) commands: u64,
    pub(crate) failures: u64,
    pub(crate) iops: f64,
    pub(crate) bytes_per_s: f64,
    /// Mean number of commands in flight: the sum of their times divided by the period (Little's
    /// law).
    pub(crate) depth: f64,
    pub(crate) latency: Times,
    pub(crate) stages: Vec<Stage>,
}

/// Latencies of a stage.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Stage {
    pub(crate) stage: String,
    /// Share of the total time, from 0 to 1.
    pub(crate) share: f64,
    pub(crate) latency: Times,
}

/// Key figures of a distribution, in microseconds.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub(crate) struct Times {
    pub(crate) mean_us: f64,
    pub(crate) p50_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) p999_us: f64,
}

/// Rates of a controller and a kind of command.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct ControllerRate {
    pub(crate) id: u64,
    pub(crate) host: String,
    pub(crate) source: String,
    pub(crate) subsystem: String,
    pub(crate) cntlid: u16,
    pub(crate) op: String,
    /// Completed commands, including failed ones.
    pub(crate) commands: u64,
    pub(crate) failures: u64,
    pub(crate) bytes: u64,
    pub(crate) iops: f64,
    pub(crate) bytes_per_s: f64,
    pub(crate) mean_us: f64,
}

/// Returns a rate for each controller and kind of command that has any, in the order of their
/// connections: of the period, or since the connection if that is later.
pub(crate) fn by_controller(since: &Stats) -> Vec<ControllerRate> {
    let rate = |of: &ControllerStats, ops: &Sums| {
        let seconds = of.connected_us.clamp(1, since.at_us.max(1)) as f64 / 1e6;
        ControllerRate {
            id: of.id,
            host: of.host.clone(),
            source: of.source.clone(),
            subsystem: of.subsystem.clone(),
            cntlid: of.cntlid,
            op: ops.op.clone(),
            commands: ops.commands,
            failures: ops.failures,
            bytes: ops.bytes,
            iops: ops.commands as f64 / seconds,
            bytes_per_s: ops.bytes as f64 / seconds,
            mean_us: ops.time_ns as f64 / 1e3 / ops.commands as f64,
        }
    };
    let each = since.controllers.iter();
    each.flat_map(|of| of.ops.iter().flatten().map(move |ops| (of, ops)))
        .filter(|(_, ops)| ops.commands > 0)
        .map(|(of, ops)| rate(of, ops))
        .collect()
}

/// Returns a rate for each row and kind of command that has any; the busiest first.
pub(crate) fn rates(since: &Stats) -> Vec<Rate> {
    let seconds = seconds(since);
    let each = since.rows.iter().flat_map(|row| row.ops.iter().map(move |ops| (row, ops)));
    let rate = |(row, ops): (&nvmfd::api::stats::Row, &Operations)| Rate {
        subsystem: row.subsystem.clone(),
        nsid: row.nsid,
        host: row.host.clone(),
        ..of(ops, seconds)
    };
    let mut all: Vec<Rate> = each.filter(|(_, ops)| ops.commands > 0).map(rate).collect();
    all.sort_by(|a, b| b.iops.total_cmp(&a.iops));
    all
}

/// Returns the rate of all rows and kinds together.
pub(crate) fn together(since: &Stats) -> Rate {
    let mut sum = Operations::none("all");
    since.rows.iter().flat_map(|row| &row.ops).for_each(|ops| sum.add(ops));
    of(&sum, seconds(since))
}

/// Returns the rates by kind, of all rows.
pub(crate) fn by_kind(since: &Stats) -> Vec<Rate> {
    let mut sums: Vec<Operations> = Vec::new();
    for ops in since.rows.iter().flat_map(|row| &row.ops).filter(|ops| ops.commands > 0) {
        match sums.iter_mut().find(|sum| sum.op == ops.op) {
            Some(sum) => sum.add(ops),
            None => sums.push(ops.clone()),
        }
    }
    sums.iter().map(|ops| of(ops, seconds(since))).collect()
}

/// Returns the rates by row, of all kinds; the busiest first.
pub(crate) fn by_row(since: &Stats) -> Vec<Rate> {
    let seconds = seconds(since);
    let rate = |row: &nvmfd::api::stats::Row| {
        let mut sum = Operations::none("all");
        row.ops.iter().for_each(|ops| sum.add(ops));
        Rate {
            subsystem: row.subsystem.clone(),
            nsid: row.nsid,
            host: row.host.clone(),
            ..of(&sum, seconds)
        }
    };
    let mut all: Vec<Rate> = since.rows.iter().map(rate).collect();
    all.sort_by(|a, b| b.iops.total_cmp(&a.iops));
    all
}

/// Time between two snapshots.
pub(crate) fn seconds(since: &Stats) -> f64 {
    (since.at_us.max(1) as f64) / 1e6
}

fn of(ops: &Operations, seconds: f64) -> Rate {
    let time_ns = ops.latency.time_ns as f64;
    let stage = |stage: &nvmfd::api::stats::StageLatency| Stage {
        stage: stage.stage.clone(),
        share: if time_ns > 0.0 { stage.latency.time_ns as f64 / time_ns } else { 0.0 },
        latency: times(&stage.latency),
    };
    Rate {
        subsystem: String::new(),
        nsid: 0,
        host: String::new(),
        op: ops.op.clone(),
        commands: ops.commands,
        failures: ops.failures,
        iops: ops.commands as f64 / seconds,
        bytes_per_s: ops.bytes as f64 / seconds,
        depth: time_ns / 1e9 / seconds,
        latency: times(&ops.latency),
        stages: ops.stages.iter().map(stage).collect(),
    }
}

fn times(latency: &Latency) -> Times {
    let us = |ns: Option<u64>| ns.unwrap_or(0) as f64 / 1e3;
    Times {
        mean_us: us(latency.mean_ns()),
        p50_us: us(latency.percentile_ns(0.5)),
        p99_us: us(latency.percentile_ns(0.99)),
        p999_us: us(latency.percentile_ns(0.999)),
    }
}

/// Formats a count with its unit, with three digits.
pub(crate) fn short(count: f64) -> String {
    scaled(count, 1000.0, &["", "k", "M", "G"])
}

/// Formats bytes, likewise.
pub(crate) fn bytes(count: f64) -> String {
    scaled(count, 1024.0, &[" B", " KiB", " MiB", " GiB", " TiB"])
}

/// Formats a time, likewise.
pub(crate) fn time(us: f64) -> String {
    scaled(us, 1000.0, &[" us", " ms", " s"])
}

fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut unit) = (value, 0);
    while value >= step * 0.9995 && unit + 1 < units.len() {
        (value, unit) = (value / step, unit + 1);
    }
    let digits = match value {
        value if value == 0.0 || value >= 99.95 => 0,
        value if value >= 9.995 => 1,
        _ => 2,
    };
    format!("{value:.digits$}{}", units[unit])
}

#[cfg(test)]
pub(crate) mod tests {
    use nvmfd::api::stats::{Count, Reactor, Row, StageLatency};

    use crate::derived_stats::*;

    /// Two hosts on one namespace, in two seconds.
    pub(crate) fn stats() -> Stats {
        let latency = |commands: u64, ns: u64| Latency {
            time_ns: commands * ns,
            below: vec![[
                nvmfd::core::stats::histogram::bound_ns(nvmfd::core::stats::histogram::bucket(ns))
                    .unwrap(),
                commands,
            ]],
        };
        let stage = |stage: &str, commands, ns| StageLatency {
            stage: stage.to_owned(),
            latency: latency(commands, ns),
        };
        let ops = |op: &str, commands: u64, ns: u64| Operations {
            op: op.to_owned(),
            commands,
            failures: commands / 1000,
            bytes: commands * 4096,
            latency: latency(commands, ns),
            stages: vec![stage("disk", commands, ns / 4 * 3), stage("reply", commands, ns / 4)],
        };
        let row = |host: &str, ops| Row {
            subsystem: "nqn.2026-11.io.nvmfd:disk1".to_owned(),
            nsid: 1,
            host: host.to_owned(),
            ops,
        };
        Stats {
            at_us: 2_000_000,
            rows: vec![
                row("nqn.2026-11.host:slow", vec![ops("read", 2_000, 8_000_000)]),
                row(
                    "nqn.2026-11.host:busy",
                    vec![ops("read", 60_000, 100_000), ops("write", 40_000, 200_000)],
                ),
            ],
            controllers: vec![ControllerStats {
                id: 7,
                subsystem: "nqn.2026-11.io.nvmfd:disk1".to_owned(),
                cntlid: 3,
                host: "nqn.2026-11.host:busy".to_owned(),
                source: "192.0.2.9".to_owned(),
                connected_us: 500_000,
                ops: Some(vec![Sums {
                    op: "read".to_owned(),
                    commands: 10_000,
                    failures: 2,
                    bytes: 9_998 * 4096,
                    time_ns: 10_000 * 100_000,
                }]),
            }],
            reactors: vec![Reactor {
                iterations: 200_000,
                sleeps: 500,
                busy_ns: 1_500_000_000,
                queues: 5,
                data_bytes: 32 << 20,
                data_free_bytes: 24 << 20,
                waiting_for_buffer: 3,
                refusals: vec![Count { name: "too many".to_owned(), count: 1 }],
                ..Reactor::default()
            }],
        }
    }

    #[test]
    fn rates_are_computed_over_the_interval_between_snapshots() {
        let all = rates(&stats());
        assert_eq!(all.len(), 3);
        assert_eq!((all[0].op.as_str(), all[0].iops), ("read", 30_000.0), "the busiest first");
        assert_eq!(all[0].bytes_per_s, 30_000.0 * 4096.0);
        assert_eq!((all[0].depth, all[0].latency.mean_us), (3.0, 100.0));
        assert_eq!(all[0].stages[0].share, 0.75);
        assert!((all[0].latency.p99_us / 100.0 - 1.0).abs() < 0.25);
        let sum = together(&stats());
        assert_eq!((sum.iops, sum.depth), (51_000.0, 15.0));
        assert_eq!(by_row(&stats())[0].iops, 50_000.0);
        assert_eq!(by_kind(&stats())[0].commands, 62_000);
    }

    #[test]
    fn figures_have_three_digits_and_a_unit() {
        for (us, says) in [
            (0.0, "0 us"),
            (7.25, "7.25 us"),
            (99.96, "100 us"),
            (999.9, "1.00 ms"),
            (2.5e6, "2.50 s"),
        ] {
            assert_eq!(time(us), says);
        }
        assert_eq!((short(12_345.0), bytes(1_572_864.0)), ("12.3k".into(), "1.50 MiB".into()));
    }
}
