//! A snapshot as OpenMetrics text, for Prometheus. Computed for each request.
//!
//! The number of series is bounded: a namespace has one per state, rows are limited
//! ([`crate::core::stats::io_stats::MOST_ROWS`] a reactor), each has at most four kinds of
//! commands, and the buckets of a latency are one per power of two.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt;
use std::ops::RangeInclusive;

use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::api::stats::{Count, Latency, Operations, Reactor, Row, Stats};
use crate::api::{FileSystem, GatewayGroup, GatewayState, Namespace, NamespaceState, Reload};
use crate::telemetry::process::{self, Process};

/// Content type of the text.
pub(crate) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Content type of the older text format.
pub(crate) const PLAIN_CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Bounds of the exported buckets are powers of two: from 16 us to 69 s.
const BOUNDS_LOG2_NS: RangeInclusive<u32> = 14..=36;

/// Availability of configured and host-created namespaces.
#[derive(Debug, Default)]
pub(crate) struct Availability {
    /// The last reload.
    pub last_reload: Option<Reload>,
    /// Subsystems, and their controllers.
    pub controllers: Vec<(String, u32)>,
    /// Namespaces.
    pub namespaces: Vec<Namespace>,
    /// Ages of the oldest commands in progress, by subsystem and namespace.
    pub oldest_ns: HashMap<(String, u32), u64>,
    /// The gateway group, if the daemon is a member of one.
    pub gateway: Option<GatewayGroup>,
    /// Addresses of listeners, and whether they are open.
    pub listeners: Vec<(String, bool)>,
    /// Subsystems with namespace management, and whether their directories are available.
    pub directories: Vec<(String, bool)>,
}

/// Returns the text.
///
/// # Errors
/// A name cannot be written; none is known to fail.
pub(crate) fn text(stats: Stats, standing: Availability) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Scrape(stats, standing)));
    let mut text = String::new();
    encode(&mut text, &registry)?;
    Ok(text)
}

/// Converts the text to the format before OpenMetrics: the name of a counter has its suffix in the
/// description too.
pub(crate) fn plain(text: &str) -> String {
    let counters: BTreeSet<&str> = (text.lines())
        .filter_map(|line| line.strip_prefix("# TYPE ")?.strip_suffix(" counter"))
        .collect();
    let mut plain = String::with_capacity(text.len());
    for line in text.lines().filter(|line| !line.starts_with("# EOF")) {
        let mut words = line.splitn(4, ' ');
        match (words.next(), words.next(), words.next(), words.next()) {
            (Some("#"), Some(keyword), Some(name), Some(rest)) if counters.contains(name) => {
                plain += &format!("# {keyword} {name}_total {rest}\n");
            }
            _ => {
                plain += line;
                plain.push('\n');
            }
        }
    }
    plain
}

#[derive(Debug)]
struct Scrape(Stats, Availability);

impl Collector for Scrape {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Scrape(stats, standing) = self;
        let uptime = "Seconds since the daemon started";
        encoder
            .encode_descriptor("nvmfd_uptime_seconds", uptime, None, MetricType::Gauge)?
            .encode_gauge(&(seconds(stats.at_us.saturating_mul(1000))))?;
        let version = "The version of the daemon, as a label of a series that is 1";
        encoder
            .encode_descriptor("nvmfd_build_info", version, None, MetricType::Gauge)?
            .encode_family(&[("version", crate::VERSION)])?
            .encode_gauge(&1_u64)?;
        let refused = standing.last_reload.as_ref().is_some_and(|last| !last.successful);
        let reload =
            "0 if the last reload was refused: the files differ from the running configuration";
        encoder
            .encode_descriptor(
                "nvmfd_config_last_reload_successful",
                reload,
                None,
                MetricType::Gauge,
            )?
            .encode_gauge(&u64::from(!refused))?;
        if let Some(last) = &standing.last_reload {
            let name = "nvmfd_config_last_reload_timestamp_seconds";
            encoder
                .encode_descriptor(name, "Time of the last reload", None, MetricType::Gauge)?
                .encode_gauge(&last.at_unix_s)?;
        }
        process(&process::look(), &mut encoder)?;
        controllers(standing, &mut encoder)?;
        namespaces(standing, &mut encoder)?;
        file_systems(standing, &mut encoder)?;
        if let Some(group) = &standing.gateway {
            gateways(group, &mut encoder)?;
        }
        commands(stats, &mut encoder)?;
        latencies(stats, &mut encoder)?;
        reactors(stats, &mut encoder)
    }
}

/// Exports the resources of the process under the usual names; those that are not known are missing.
fn process(process: &Process, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    if let Some(cpu_s) = process.cpu_s {
        let help = "User and system CPU time";
        encoder
            .encode_descriptor("process_cpu_seconds", help, None, MetricType::Counter)?
            .encode_counter::<NoLabelSet, f64, f64>(&cpu_s, None)?;
    }
    for (name, help, value) in [
        ("process_start_time_seconds", "Start time since 1970", process.start_s),
        ("process_resident_memory_bytes", "Resident memory", process.resident_bytes),
        ("process_virtual_memory_bytes", "Virtual memory", process.virtual_bytes),
        ("process_open_fds", "Open file descriptors", process.open_fds),
        ("process_max_fds", "Limit of open file descriptors", process.max_fds),
    ] {
        if let Some(value) = value {
            encoder.encode_descriptor(name, help, None, MetricType::Gauge)?.encode_gauge(&value)?;
        }
    }
    Ok(())
}

fn controllers(standing: &Availability, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Controllers of connected hosts, without those of discovery";
    let mut metric =
        encoder.encode_descriptor("nvmfd_controllers", help, None, MetricType::Gauge)?;
    for (subsystem, count) in &standing.controllers {
        metric.encode_family(&[("subsystem", subsystem.clone())])?.encode_gauge(count)?;
    }
    Ok(())
}

/// Exports states: each as one series per possible state, of which one is 1, so that each
/// series always exists.
fn namespaces(standing: &Availability, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let name = "nvmfd_namespace_state";
    let help = "1 for the state that a namespace is in: serving, sync_failed, pending, down, \
                untrusted, lost";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for namespace in &standing.namespaces {
        for state in NamespaceState::ALL {
            let labels = [
                ("subsystem", namespace.subsystem.clone()),
                ("nsid", namespace.nsid.to_string()),
                ("state", state.name().to_owned()),
            ];
            let is = u64::from(namespace.state == state);
            metric.encode_family(&labels)?.encode_gauge(&is)?;
        }
    }
    let labels =
        |of: &Namespace| [("subsystem", of.subsystem.clone()), ("nsid", of.nsid.to_string())];
    let help = "Size of a namespace";
    let name = "nvmfd_namespace_size_bytes";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for namespace in &standing.namespaces {
        metric.encode_family(&labels(namespace))?.encode_gauge(&namespace.size_bytes)?;
    }
    let help = "Bytes allocated to the file of a namespace";
    let name = "nvmfd_namespace_allocated_bytes";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for namespace in &standing.namespaces {
        if let Some(bytes) = namespace.allocated_bytes {
            metric.encode_family(&labels(namespace))?.encode_gauge(&bytes)?;
        }
    }
    let help = "Age of the oldest command in progress, 0 without one";
    let name = "nvmfd_oldest_command_seconds";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for namespace in &standing.namespaces {
        let of = (namespace.subsystem.clone(), namespace.nsid);
        let oldest_ns = standing.oldest_ns.get(&of).copied().unwrap_or_default();
        metric.encode_family(&labels(namespace))?.encode_gauge(&seconds(oldest_ns))?;
    }
    let help = "Whether something else than its store is at the path of a namespace, or nothing";
    let name = "nvmfd_namespace_detached";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for namespace in &standing.namespaces {
        let is = u64::from(namespace.detached.is_some());
        metric.encode_family(&labels(namespace))?.encode_gauge(&is)?;
    }
    let directories = "Whether the directory of the namespaces that hosts make is there";
    for (name, help, key, all) in [
        ("nvmfd_listener_up", "Whether a listener listens", "address", &standing.listeners),
        ("nvmfd_managed_directory_up", directories, "subsystem", &standing.directories),
    ] {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (one, is_up) in all {
            metric.encode_family(&[(key, one.clone())])?.encode_gauge(&u64::from(*is_up))?;
        }
    }
    Ok(())
}

/// A value of a file system.
type BytesOf = fn(&FileSystem) -> u64;

/// Exports each file system once, whatever the number of its namespaces.
fn file_systems(standing: &Availability, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let all: BTreeMap<&str, &FileSystem> = (standing.namespaces.iter())
        .filter_map(|namespace| namespace.file_system.as_ref())
        .map(|file_system| (file_system.device.as_str(), file_system))
        .collect();
    let gauges: [(&str, &str, BytesOf); 3] = [
        ("nvmfd_file_system_size_bytes", "Size of a file system of backing files", |it| {
            it.size_bytes
        }),
        ("nvmfd_file_system_free_bytes", "Bytes free in a file system of backing files", |it| {
            it.free_bytes
        }),
        (
            "nvmfd_file_system_unallocated_bytes",
            "Bytes that the backing files in a file system may still allocate",
            |it| it.unallocated_bytes,
        ),
    ];
    for (name, help, of) in gauges {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (device, file_system) in &all {
            let labels = [("file_system", (*device).to_owned())];
            metric.encode_family(&labels)?.encode_gauge(&of(file_system))?;
        }
    }
    Ok(())
}

fn gateways(group: &GatewayGroup, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let labels = [("group", group.name.clone())];
    let name = "nvmfd_gateway_heartbeat_fresh";
    let help = "0 if the heartbeats of this gateway are not confirmed: it serves nothing";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    metric.encode_family(&labels)?.encode_gauge(&u64::from(group.fresh))?;
    let name = "nvmfd_gateways";
    let help = "Gateways of the group by their state: live, silent, excluded, left";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for state in GatewayState::ALL {
        let [group_label] = labels.clone();
        let labels = [group_label, ("state", state.name().to_owned())];
        let count = group.gateways.iter().filter(|it| it.state == state).count() as u64;
        metric.encode_family(&labels)?.encode_gauge(&count)?;
    }
    let name = "nvmfd_ana_group_serving";
    let help = "1 if this gateway serves an ANA group of its gateway group";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for ana_group in &group.ana_groups {
        let [group_label] = labels.clone();
        let labels = [group_label, ("ana_group", ana_group.id.to_string())];
        metric.encode_family(&labels)?.encode_gauge(&u64::from(ana_group.serving))?;
    }
    let Some(shared) = &group.shared else { return Ok(()) };
    for (name, help, version) in [
        (
            "nvmfd_group_configuration_version",
            "The newest version of the shared configuration of the gateway group",
            shared.version,
        ),
        (
            "nvmfd_gateway_configuration_version",
            "The version of the shared configuration that is in force at this gateway",
            shared.applied,
        ),
    ] {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        metric.encode_family(&labels)?.encode_gauge(&version)?;
    }
    Ok(())
}

/// A count of one kind of commands.
type CounterOf = fn(&Operations) -> u64;

fn commands(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counters: [(&str, &str, CounterOf); 3] = [
        ("nvmfd_commands", "Commands completed", |ops| ops.commands),
        ("nvmfd_command_failures", "Commands that failed", |ops| ops.failures),
        ("nvmfd_command_bytes", "Bytes read or written by commands", |ops| ops.bytes),
    ];
    for (name, help, of) in counters {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (row, ops) in each(stats) {
            count(metric.encode_family(&labels(row, ops))?, of(ops))?;
        }
    }
    Ok(())
}

fn latencies(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Time from the capsule to the acknowledged response";
    let name = "nvmfd_command_duration_seconds";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    for (row, ops) in each(stats) {
        histogram(metric.encode_family(&labels(row, ops))?, &ops.latency)?;
    }
    let help = "Time of commands in each stage: receive, wait, pull, disk, push, reply";
    let name = "nvmfd_stage_seconds";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for (row, ops) in each(stats) {
        let [subsystem, nsid, host, op] = labels(row, ops);
        for stage in &ops.stages {
            let labels = [
                subsystem.clone(),
                nsid.clone(),
                host.clone(),
                op.clone(),
                ("stage", stage.stage.clone()),
            ];
            let mut one = metric.encode_family(&labels)?;
            one.encode_counter::<NoLabelSet, f64, f64>(&seconds(stage.latency.time_ns), None)?;
        }
    }
    // By namespace and host this would be six times as many series: exported as a sum.
    let help = "Time of commands in each stage, of all namespaces and hosts";
    let name = "nvmfd_stage_latency_seconds";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Histogram)?;
    let mut sums: Vec<Operations> = Vec::new();
    for (_, ops) in each(stats) {
        match sums.iter_mut().find(|sum| sum.op == ops.op) {
            Some(sum) => sum.add(ops),
            None => sums.push(ops.clone()),
        }
    }
    for ops in &sums {
        for stage in &ops.stages {
            let labels = [("op", ops.op.clone()), ("stage", stage.stage.clone())];
            histogram(metric.encode_family(&labels)?, &stage.latency)?;
        }
    }
    Ok(())
}

/// A figure of a reactor: its name, description and value.
type Figure = (&'static str, &'static str, fn(&Reactor) -> u64);

fn reactors(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let counters: [Figure; 4] = [
        ("nvmfd_reactor_turns", "Turns of a reactor's loop", |r| r.turns),
        ("nvmfd_reactor_spins", "Turns without work after which it looked again", |r| r.spins),
        ("nvmfd_reactor_sleeps", "Times that a reactor slept", |r| r.sleeps),
        ("nvmfd_slow_commands", "Commands that took as long as [observe] slow_ms", |r| r.slow),
    ];
    let gauges: [Figure; 6] = [
        ("nvmfd_reactor_queues", "Queue pairs that a reactor serves", |r| r.queues),
        ("nvmfd_pool_cells_free", "Free cells for responses", |r| r.cells_free),
        ("nvmfd_pool_receives_free", "Free receive buffers", |r| r.receives_free),
        ("nvmfd_pool_data_free_bytes", "Free bytes for data", |r| r.data_free_bytes),
        ("nvmfd_pool_data_bytes", "Bytes for data", |r| r.data_bytes),
        ("nvmfd_commands_waiting_for_buffer", "Commands that wait for data buffers", |r| r.waiters),
    ];
    for (name, help, of) in counters {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
        for reactor in &stats.reactors {
            count(metric.encode_family(&[number(reactor)])?, of(reactor))?;
        }
    }
    for (name, help, of) in gauges {
        let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
        for reactor in &stats.reactors {
            metric.encode_family(&[number(reactor)])?.encode_gauge(&of(reactor))?;
        }
    }
    let name = "nvmfd_reactor_busy_seconds";
    let help = "Time of a reactor in turns that had something to do";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for reactor in &stats.reactors {
        let labels = [number(reactor)];
        let mut one = metric.encode_family(&labels)?;
        one.encode_counter::<NoLabelSet, f64, f64>(&seconds(reactor.busy_ns), None)?;
    }
    let (name, help) = ("nvmfd_refusals", "Hosts refused or lost, by cause");
    named(encoder, (name, help, "cause"), stats, |reactor| &reactor.refusals)?;
    let (name, help) = ("nvmfd_soft_datagrams", "Datagrams of the provider soft, by their result");
    named(encoder, (name, help, "result"), stats, |reactor| &reactor.datagrams)?;
    device(stats, encoder)?;
    troubles(stats, encoder)
}

/// The queues of the provider `verbs`, and the prefix of their counters.
const QUEUES: [(&str, &str); 2] = [("receive", "receive_"), ("send", "send_")];

/// Work of RDMA devices; none with the provider `soft`.
fn device(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let help = "Chains of work requests that devices of the provider verbs were given, by queue";
    of_queues(stats, encoder, ("nvmfd_verbs_doorbells", help), "doorbells")?;
    let help = "Work requests that devices of the provider verbs were given, by queue";
    of_queues(stats, encoder, ("nvmfd_verbs_work_requests", help), "work_requests")?;
    let help = "Queue pairs created and destroyed, and connection setup, of the provider verbs";
    let metric = ("nvmfd_verbs_connection_setup", help);
    let mut metric = encoder.encode_descriptor(metric.0, metric.1, None, MetricType::Counter)?;
    for reactor in &stats.reactors {
        for one in &reactor.device {
            if QUEUES.iter().all(|(_, prefix)| !one.name.starts_with(prefix)) {
                let labels = [number(reactor), ("kind", one.name.clone())];
                count(metric.encode_family(&labels)?, one.count)?;
            }
        }
    }
    Ok(())
}

fn of_queues(
    stats: &Stats,
    encoder: &mut DescriptorEncoder<'_>,
    (name, help): (&'static str, &str),
    what: &str,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for reactor in &stats.reactors {
        for (queue, prefix) in QUEUES {
            let of = |one: &&Count| one.name.strip_prefix(prefix) == Some(what);
            if let Some(one) = reactor.device.iter().find(of) {
                let labels = [number(reactor), ("queue", queue.to_owned())];
                count(metric.encode_family(&labels)?, one.count)?;
            }
        }
    }
    Ok(())
}

fn troubles(stats: &Stats, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let name = "nvmfd_soft_errors";
    let help = "Packets sent again, timeouts, NAK and RNR NAK of the provider soft, by address";
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for reactor in &stats.reactors {
        for at in &reactor.troubles {
            for one in &at.counts {
                let labels =
                    [number(reactor), ("address", at.address.clone()), ("kind", one.name.clone())];
                count(metric.encode_family(&labels)?, one.count)?;
            }
        }
    }
    Ok(())
}

fn named(
    encoder: &mut DescriptorEncoder<'_>,
    (name, help, key): (&'static str, &str, &'static str),
    stats: &Stats,
    of: fn(&Reactor) -> &Vec<Count>,
) -> fmt::Result {
    let mut metric = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
    for reactor in &stats.reactors {
        for one in of(reactor) {
            let labels = [number(reactor), (key, one.name.clone())];
            count(metric.encode_family(&labels)?, one.count)?;
        }
    }
    Ok(())
}

fn each(stats: &Stats) -> impl Iterator<Item = (&Row, &Operations)> {
    stats.rows.iter().flat_map(|row| row.ops.iter().map(move |ops| (row, ops)))
}

fn labels(row: &Row, ops: &Operations) -> [(&'static str, String); 4] {
    [
        ("subsystem", row.subsystem.clone()),
        ("nsid", row.nsid.to_string()),
        ("host", row.host.clone()),
        ("op", ops.op.clone()),
    ]
}

fn number(reactor: &Reactor) -> (&'static str, String) {
    ("reactor", reactor.index.to_string())
}

fn count(mut metric: MetricEncoder<'_>, count: u64) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, u64, f64>(&count, None)
}

fn histogram(mut metric: MetricEncoder<'_>, latency: &Latency) -> fmt::Result {
    let mut from = 0;
    let mut buckets: Vec<(f64, u64)> = Vec::with_capacity(BOUNDS_LOG2_NS.count() + 1);
    for bound in BOUNDS_LOG2_NS.map(|log2| 1 << log2).chain([u64::MAX]) {
        let within = latency.below.iter().filter(|[b, _]| *b > from && *b <= bound);
        let le = if bound == u64::MAX { f64::INFINITY } else { seconds(bound) };
        buckets.push((le, within.map(|[_, n]| n).sum()));
        from = bound;
    }
    let (sum, count) = (seconds(latency.time_ns), latency.commands());
    metric.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
}

#[expect(clippy::cast_precision_loss, reason = "2^53 ns are a hundred days of one command")]
fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use crate::api::stats::{LinkErrors, StageLatency};
    use crate::api::{GatewayAnaGroup, GatewayMember, GatewayShared};
    use crate::telemetry::prometheus::*;

    fn stats() -> Stats {
        let latency =
            Latency { time_ns: 3_000_000, below: vec![[14_336, 1], [163_840, 2], [1 << 40, 1]] };
        let stages = vec![StageLatency { stage: "disk".to_owned(), latency: latency.clone() }];
        let read = Operations {
            op: "read".to_owned(),
            commands: 4,
            failures: 1,
            bytes: 12288,
            latency,
            stages,
        };
        Stats {
            at_us: 2_500_000,
            rows: vec![Row {
                subsystem: "nqn.2026-11.io.nvmfd:disk1".to_owned(),
                nsid: 1,
                host: "nqn.a\"b\\c".to_owned(),
                ops: vec![read],
            }],
            reactors: vec![Reactor {
                busy_ns: 500_000_000,
                data_free_bytes: 7,
                refusals: vec![Count { name: "too many".to_owned(), count: 3 }],
                troubles: vec![LinkErrors {
                    address: "192.0.2.1".to_owned(),
                    counts: vec![Count { name: "sent_again".to_owned(), count: 5 }],
                }],
                device: [
                    ("receive_doorbells", 3),
                    ("receive_work_requests", 20),
                    ("send_doorbells", 7),
                    ("send_work_requests", 21),
                    ("queue_pairs_created", 2),
                ]
                .map(|(name, count)| Count { name: name.to_owned(), count })
                .to_vec(),
                ..Reactor::default()
            }],
            ..Stats::default()
        }
    }

    #[test]
    fn gateway_metrics_report_peers_and_served_ana_groups() {
        let member = |slot, state| GatewayMember {
            name: format!("g{slot}"),
            slot,
            state,
            address: String::new(),
            listeners: Vec::new(),
            applied: None,
            refused: None,
        };
        let ana_group = |id, serving| GatewayAnaGroup {
            id,
            owner: None,
            epoch: 1,
            stage: String::new(),
            serving,
            since_unix_s: None,
            pending: None,
        };
        let gateway = Some(GatewayGroup {
            name: "a".to_owned(),
            gateway: "g0".to_owned(),
            fresh: true,
            gateways: vec![member(0, GatewayState::Live), member(1, GatewayState::Silent)],
            ana_groups: vec![ana_group(1, true), ana_group(2, false)],
            shared: Some(GatewayShared {
                version: 5,
                gateway: None,
                at_unix_s: None,
                applied: 4,
                refused: None,
            }),
            ..GatewayGroup::default()
        });
        let text = text(stats(), Availability { gateway, ..Availability::default() }).unwrap();
        for line in [
            "nvmfd_gateway_heartbeat_fresh{group=\"a\"} 1",
            "nvmfd_gateways{group=\"a\",state=\"live\"} 1",
            "nvmfd_gateways{group=\"a\",state=\"silent\"} 1",
            "nvmfd_gateways{group=\"a\",state=\"left\"} 0",
            "nvmfd_ana_group_serving{group=\"a\",ana_group=\"1\"} 1",
            "nvmfd_ana_group_serving{group=\"a\",ana_group=\"2\"} 0",
            "nvmfd_group_configuration_version{group=\"a\"} 5",
            "nvmfd_gateway_configuration_version{group=\"a\"} 4",
        ] {
            assert!(text.lines().any(|it| it == line), "{line} in {text}");
        }
    }

    #[test]
    fn the_exposition_contains_the_counted_values() {
        let text = text(stats(), Availability::default()).unwrap();
        let of = "subsystem=\"nqn.2026-11.io.nvmfd:disk1\",nsid=\"1\",host=\"nqn.a\\\"b\\\\c\",op=\"read\"";
        for line in [
            "# TYPE nvmfd_commands counter".to_owned(),
            "nvmfd_uptime_seconds 2.5".to_owned(),
            format!("nvmfd_build_info{{version=\"{}\"}} 1", crate::VERSION),
            format!("nvmfd_commands_total{{{of}}} 4"),
            format!("nvmfd_command_failures_total{{{of}}} 1"),
            format!("nvmfd_command_bytes_total{{{of}}} 12288"),
            format!("nvmfd_command_duration_seconds_sum{{{of}}} 0.003"),
            format!("nvmfd_command_duration_seconds_count{{{of}}} 4"),
            format!("nvmfd_command_duration_seconds_bucket{{le=\"0.000016384\",{of}}} 1"),
            format!("nvmfd_command_duration_seconds_bucket{{le=\"0.000131072\",{of}}} 1"),
            format!("nvmfd_command_duration_seconds_bucket{{le=\"0.000262144\",{of}}} 3"),
            format!("nvmfd_command_duration_seconds_bucket{{le=\"68.719476736\",{of}}} 3"),
            format!("nvmfd_command_duration_seconds_bucket{{le=\"+Inf\",{of}}} 4"),
            format!("nvmfd_stage_seconds_total{{{of},stage=\"disk\"}} 0.003"),
            "nvmfd_stage_latency_seconds_count{op=\"read\",stage=\"disk\"} 4".to_owned(),
            "nvmfd_reactor_busy_seconds_total{reactor=\"0\"} 0.5".to_owned(),
            "nvmfd_pool_data_free_bytes{reactor=\"0\"} 7".to_owned(),
            "nvmfd_soft_errors_total{reactor=\"0\",address=\"192.0.2.1\",kind=\"sent_again\"} 5"
                .to_owned(),
            "nvmfd_verbs_doorbells_total{reactor=\"0\",queue=\"receive\"} 3".to_owned(),
            "nvmfd_verbs_doorbells_total{reactor=\"0\",queue=\"send\"} 7".to_owned(),
            "nvmfd_verbs_work_requests_total{reactor=\"0\",queue=\"receive\"} 20".to_owned(),
            "nvmfd_verbs_work_requests_total{reactor=\"0\",queue=\"send\"} 21".to_owned(),
            "nvmfd_verbs_connection_setup_total{reactor=\"0\",kind=\"queue_pairs_created\"} 2"
                .to_owned(),
            "nvmfd_refusals_total{reactor=\"0\",cause=\"too many\"} 3".to_owned(),
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        assert!(text.ends_with("# EOF\n"));
        for name in ["cpu_seconds_total", "start_time_seconds", "resident_memory_bytes", "open_fds"]
        {
            let name = format!("process_{name} ");
            assert!(text.lines().any(|line| line.starts_with(&name)), "{name}\n{text}");
        }
        let plain = plain(&text);
        assert!(plain.contains("\n# TYPE nvmfd_commands_total counter\n"), "{plain}");
        assert!(plain.contains("\n# HELP nvmfd_commands_total Commands completed"), "{plain}");
        assert!(plain.contains("\n# TYPE nvmfd_uptime_seconds gauge\n"), "{plain}");
    }
}
