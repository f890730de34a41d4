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
use prometheus_client::encoding::{
    DescriptorEncoder, EncodeCounterValue, EncodeGaugeValue, EncodeLabelSet, MetricEncoder,
    NoLabelSet,
};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::Registry;

use crate::api::stats::{Count, Latency, Operations, Reactor, Row, Stats};
use crate::api::{
    FileSystem, GatewayGroup, GatewayMember, GatewayState, Namespace, NamespaceState, Reload,
};
use crate::core::diag::cause::{Cause, Stage};
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
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Scrape(stats, standing) = self;
        let mut to = Metrics(encoder);
        let uptime = "Seconds since the daemon started";
        to.gauge("nvmfd_uptime_seconds", uptime, seconds(stats.at_us.saturating_mul(1000)))?;
        let version = "The version of the daemon, as a label of a series that is 1";
        to.gauges("nvmfd_build_info", version, [([("version", crate::VERSION)], 1_u64)])?;
        let refused = standing.last_reload.as_ref().is_some_and(|last| !last.successful);
        let reload =
            "0 if the last reload was refused: the files differ from the running configuration";
        to.gauge("nvmfd_config_last_reload_successful", reload, u64::from(!refused))?;
        if let Some(last) = &standing.last_reload {
            let name = "nvmfd_config_last_reload_timestamp_seconds";
            to.gauge(name, "Time of the last reload", last.at_unix_s)?;
        }
        process(&process::look(), &mut to)?;
        namespaces(standing, &mut to)?;
        file_systems(standing, &mut to)?;
        if let Some(group) = &standing.gateway {
            gateways(group, &mut to)?;
        }
        commands(stats, &mut to)?;
        reactors(stats, &mut to)
    }
}

/// Writes metrics: each has a name, a description and series, which are labels and a value.
struct Metrics<'e>(DescriptorEncoder<'e>);

impl Metrics<'_> {
    fn of<'s>(
        &'s mut self,
        name: &'s str,
        help: &str,
        kind: MetricType,
    ) -> Result<MetricEncoder<'s>, fmt::Error> {
        self.0.encode_descriptor(name, help, None, kind)
    }

    /// A gauge without labels.
    fn gauge(&mut self, name: &str, help: &str, value: impl EncodeGaugeValue) -> fmt::Result {
        self.of(name, help, MetricType::Gauge)?.encode_gauge(&value)
    }

    fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, impl EncodeGaugeValue)>,
    ) -> fmt::Result {
        let mut metric = self.of(name, help, MetricType::Gauge)?;
        let mut series = series.into_iter();
        series.try_for_each(|(labels, value)| metric.encode_family(&labels)?.encode_gauge(&value))
    }

    fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, impl EncodeCounterValue)>,
    ) -> fmt::Result {
        let mut metric = self.of(name, help, MetricType::Counter)?;
        for (labels, value) in series {
            metric.encode_family(&labels)?.encode_counter::<NoLabelSet, _, f64>(&value, None)?;
        }
        Ok(())
    }

    fn histograms<'l, L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        series: impl IntoIterator<Item = (L, &'l Latency)>,
    ) -> fmt::Result {
        let mut metric = self.of(name, help, MetricType::Histogram)?;
        for (labels, latency) in series {
            histogram(metric.encode_family(&labels)?, latency)?;
        }
        Ok(())
    }
}

/// Exports the resources of the process under the usual names; those that are not known are missing.
fn process(process: &Process, to: &mut Metrics<'_>) -> fmt::Result {
    if let Some(cpu_s) = process.cpu_s {
        let help = "User and system CPU time";
        to.of("process_cpu_seconds", help, MetricType::Counter)?
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
            to.gauge(name, help, value)?;
        }
    }
    Ok(())
}

/// Exports what is served. States are one series per possible state, of which one is 1, so that
/// each series always exists.
fn namespaces(standing: &Availability, to: &mut Metrics<'_>) -> fmt::Result {
    let help = "Controllers of connected hosts, without those of discovery";
    let of_subsystem = |(name, count): &(String, u32)| ([("subsystem", name.clone())], *count);
    to.gauges("nvmfd_controllers", help, standing.controllers.iter().map(of_subsystem))?;
    let labels =
        |of: &Namespace| [("subsystem", of.subsystem.clone()), ("nsid", of.nsid.to_string())];
    let all = || standing.namespaces.iter();
    let states = all().flat_map(|namespace| {
        NamespaceState::ALL.into_iter().map(move |state| {
            let [subsystem, nsid] = labels(namespace);
            let labels = [subsystem, nsid, ("state", state.name().to_owned())];
            (labels, u64::from(namespace.state == state))
        })
    });
    let help = "1 for the state that a namespace is in: serving, sync_failed, pending, down, \
                untrusted, lost";
    to.gauges("nvmfd_namespace_state", help, states)?;
    let sizes = all().map(|namespace| (labels(namespace), namespace.size_bytes));
    to.gauges("nvmfd_namespace_size_bytes", "Size of a namespace", sizes)?;
    let allocated = all().filter_map(|each| Some((labels(each), each.allocated_bytes?)));
    let help = "Bytes allocated to the file of a namespace";
    to.gauges("nvmfd_namespace_allocated_bytes", help, allocated)?;
    let oldest = all().map(|namespace| {
        let of = (namespace.subsystem.clone(), namespace.nsid);
        let oldest_ns = standing.oldest_ns.get(&of).copied().unwrap_or_default();
        (labels(namespace), seconds(oldest_ns))
    });
    let help = "Age of the oldest command in progress, 0 without one";
    to.gauges("nvmfd_oldest_command_seconds", help, oldest)?;
    let detached = all().map(|each| (labels(each), u64::from(each.detached.is_some())));
    let help = "Whether something else than its store is at the path of a namespace, or nothing";
    to.gauges("nvmfd_namespace_detached", help, detached)?;
    let directories = "Whether the directory of the namespaces that hosts make is there";
    for (name, help, key, all) in [
        ("nvmfd_listener_up", "Whether a listener listens", "address", &standing.listeners),
        ("nvmfd_managed_directory_up", directories, "subsystem", &standing.directories),
    ] {
        let each = |(one, is_up): &(String, bool)| ([(key, one.clone())], u64::from(*is_up));
        to.gauges(name, help, all.iter().map(each))?;
    }
    Ok(())
}

/// A value of a file system.
type BytesOf = fn(&FileSystem) -> u64;

/// Exports each file system once, whatever the number of its namespaces.
fn file_systems(standing: &Availability, to: &mut Metrics<'_>) -> fmt::Result {
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
        to.gauges(name, help, all.iter().map(|(at, it)| ([("file_system", *at)], of(it))))?;
    }
    Ok(())
}

fn gateways(group: &GatewayGroup, to: &mut Metrics<'_>) -> fmt::Result {
    let own = ("group", group.name.clone());
    let help = "0 if the heartbeats of this gateway are not confirmed: it serves nothing";
    let fresh = u64::from(group.fresh);
    to.gauges("nvmfd_gateway_heartbeat_fresh", help, [([own.clone()], fresh)])?;
    let help = "Gateways of the group by their state: live, silent, excluded, left";
    let states = GatewayState::ALL.into_iter().map(|state| {
        let count = group.gateways.iter().filter(|it| it.state == state).count() as u64;
        ([own.clone(), ("state", state.name().to_owned())], count)
    });
    to.gauges("nvmfd_gateways", help, states)?;
    let help = "1 if this gateway serves an ANA group of its gateway group";
    let serving = group
        .ana_groups
        .iter()
        .map(|it| ([own.clone(), ("ana_group", it.id.to_string())], u64::from(it.serving)));
    to.gauges("nvmfd_ana_group_serving", help, serving)?;
    let is_own = |it: &&GatewayMember| it.name == group.gateway;
    if let Some(front) = group.gateways.iter().find(is_own).and_then(|it| it.front) {
        let help = "Hosts that are connected to a subsystem of this gateway";
        to.gauges("nvmfd_gateway_hosts", help, [([own.clone()], front.hosts)])?;
        let help = "Associations of hosts with subsystems of this gateway";
        to.gauges("nvmfd_gateway_associations", help, [([own.clone()], front.associations)])?;
        let help = "Listeners of this gateway that are open, at an interface whose link is up";
        to.gauges("nvmfd_gateway_open_listeners", help, [([own.clone()], front.listeners)])?;
    }
    let Some(shared) = &group.shared else { return Ok(()) };
    let help = "The newest version of the shared configuration of the gateway group";
    let newest = [([own.clone()], shared.version)];
    to.gauges("nvmfd_group_configuration_version", help, newest)?;
    let help = "The version of the shared configuration that is in force at this gateway";
    to.gauges("nvmfd_gateway_configuration_version", help, [([own], shared.applied)])
}

/// A count of one kind of commands.
type CounterOf = fn(&Operations) -> u64;

fn commands(stats: &Stats, to: &mut Metrics<'_>) -> fmt::Result {
    let counters: [(&str, &str, CounterOf); 3] = [
        ("nvmfd_commands", "Commands completed", |ops| ops.commands),
        ("nvmfd_command_failures", "Commands that failed", |ops| ops.failures),
        ("nvmfd_command_bytes", "Bytes read or written by commands", |ops| ops.bytes),
    ];
    for (name, help, of) in counters {
        to.counters(name, help, each(stats).map(|(row, ops)| (labels(row, ops), of(ops))))?;
    }
    let help = "Time from the capsule to the acknowledged response";
    let durations = each(stats).map(|(row, ops)| (labels(row, ops), &ops.latency));
    to.histograms("nvmfd_command_duration_seconds", help, durations)?;
    let help = "Time of commands in each stage: receive, wait, pull, disk, push, reply";
    let stages = each(stats).flat_map(|(row, ops)| {
        ops.stages.iter().map(move |stage| {
            let [subsystem, nsid, host, op] = labels(row, ops);
            let labels = [subsystem, nsid, host, op, ("stage", stage.stage.clone())];
            (labels, seconds(stage.latency.time_ns))
        })
    });
    to.counters("nvmfd_stage_seconds", help, stages)?;
    // By namespace and host this would be six times as many series: exported as a sum.
    let help = "Time of commands in each stage, of all namespaces and hosts";
    let mut sums: Vec<Operations> = Vec::new();
    for (_, ops) in each(stats) {
        match sums.iter_mut().find(|sum| sum.op == ops.op) {
            Some(sum) => sum.add(ops),
            None => sums.push(ops.clone()),
        }
    }
    let stages = sums.iter().flat_map(|ops| {
        ops.stages
            .iter()
            .map(|stage| ([("op", ops.op.clone()), ("stage", stage.stage.clone())], &stage.latency))
    });
    to.histograms("nvmfd_stage_latency_seconds", help, stages)
}

/// A figure of a reactor: its name, description and value.
type Figure = (&'static str, &'static str, fn(&Reactor) -> u64);

fn reactors(stats: &Stats, to: &mut Metrics<'_>) -> fmt::Result {
    let counters: [Figure; 4] = [
        ("nvmfd_reactor_iterations", "Iterations of the loop of a reactor", |r| r.iterations),
        ("nvmfd_reactor_idle_iterations", "Iterations without work and without sleep", |r| {
            r.idle_iterations
        }),
        ("nvmfd_reactor_sleeps", "Times that a reactor slept", |r| r.sleeps),
        ("nvmfd_slow_commands", "Commands that took as long as [observe] slow_ms", |r| r.slow),
    ];
    let gauges: [Figure; 6] = [
        ("nvmfd_reactor_queues", "Queue pairs that a reactor serves", |r| r.queues),
        ("nvmfd_pool_cells_free", "Free cells for responses", |r| r.cells_free),
        ("nvmfd_pool_receives_free", "Free receive buffers", |r| r.receives_free),
        ("nvmfd_pool_data_free_bytes", "Free bytes for data", |r| r.data_free_bytes),
        ("nvmfd_pool_data_bytes", "Bytes for data", |r| r.data_bytes),
        ("nvmfd_commands_waiting_for_buffer", "Commands that wait for data buffers", |r| {
            r.waiting_for_buffer
        }),
    ];
    let all = || stats.reactors.iter();
    for (name, help, of) in counters {
        to.counters(name, help, all().map(|each| ([number(each)], of(each))))?;
    }
    for (name, help, of) in gauges {
        to.gauges(name, help, all().map(|each| ([number(each)], of(each))))?;
    }
    let help = "Time of a reactor in iterations that had something to do";
    let busy = all().map(|each| ([number(each)], seconds(each.busy_ns)));
    to.counters("nvmfd_reactor_busy_seconds", help, busy)?;
    let is_lost = |cause: &str| {
        let cause = Cause::ALL.iter().find(|each| each.name() == cause);
        cause.is_some_and(|cause| cause.stage() == Stage::Running)
    };
    let causes = |lost| {
        let all = named(stats, "cause", |reactor| &reactor.refusals);
        all.filter(move |([_, (_, cause)], _)| is_lost(cause) == lost)
    };
    to.counters(
        "nvmfd_refused_hosts",
        "Hosts refused before they were connected, by cause",
        causes(false),
    )?;
    to.counters(
        "nvmfd_lost_connections",
        "Lost connections, and other incidents of connected hosts, by cause",
        causes(true),
    )?;
    let results = named(stats, "result", |reactor| &reactor.datagrams);
    let help = "Datagrams of the provider soft, by their result";
    to.counters("nvmfd_soft_datagrams", help, results)?;
    device(stats, to)?;
    let help = "Packets sent again, timeouts, NAK and RNR NAK of the provider soft, by address";
    let link_errors = all().flat_map(|each| each.link_errors.iter().map(move |at| (each, at)));
    let errors = link_errors.flat_map(|(reactor, at)| {
        at.counts.iter().map(move |one| {
            let address = ("address", at.address.clone());
            ([number(reactor), address, ("kind", one.name.clone())], one.count)
        })
    });
    to.counters("nvmfd_soft_errors", help, errors)
}

/// The queues of the provider `verbs`, and the prefix of their counters.
const QUEUES: [(&str, &str); 2] = [("receive", "receive_"), ("send", "send_")];

/// Work of RDMA devices; none with the provider `soft`.
fn device(stats: &Stats, to: &mut Metrics<'_>) -> fmt::Result {
    let doorbells =
        "Chains of work requests that devices of the provider verbs were given, by queue";
    let requests = "Work requests that devices of the provider verbs were given, by queue";
    for (name, help, what) in [
        ("nvmfd_verbs_doorbells", doorbells, "doorbells"),
        ("nvmfd_verbs_work_requests", requests, "work_requests"),
    ] {
        let each = stats.reactors.iter().flat_map(|it| QUEUES.map(|queue| (it, queue)));
        let of_queues = each.filter_map(|(reactor, (queue, prefix))| {
            let of = |one: &&Count| one.name.strip_prefix(prefix) == Some(what);
            let one = reactor.device.iter().find(of)?;
            Some(([number(reactor), ("queue", queue.to_owned())], one.count))
        });
        to.counters(name, help, of_queues)?;
    }
    let help = "Queue pairs created and destroyed, and connection setup, of the provider verbs";
    let of_no_queue = |([_, (_, kind)], _): &([(&str, String); 2], u64)| {
        QUEUES.iter().all(|(_, prefix)| !kind.starts_with(prefix))
    };
    let setup = named(stats, "kind", |reactor| &reactor.device).filter(of_no_queue);
    to.counters("nvmfd_verbs_connection_setup", help, setup)
}

/// Counts of reactors, with their names as the label `key`.
fn named<'s>(
    stats: &'s Stats,
    key: &'static str,
    of: fn(&Reactor) -> &Vec<Count>,
) -> impl Iterator<Item = ([(&'static str, String); 2], u64)> + 's {
    let each = move |reactor: &'s Reactor| {
        let labels = move |one: &Count| [number(reactor), (key, one.name.clone())];
        of(reactor).iter().map(move |one| (labels(one), one.count))
    };
    stats.reactors.iter().flat_map(each)
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

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use crate::api::stats::{LinkErrors, StageLatency};
    use crate::api::{GatewayAnaGroup, GatewayFront, GatewayShared};
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
                refusals: vec![
                    Count { name: "no-room".to_owned(), count: 3 },
                    Count { name: "keep-alive".to_owned(), count: 4 },
                    Count { name: "shared-host-id".to_owned(), count: 5 },
                ],
                link_errors: vec![LinkErrors {
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
            front: Some(GatewayFront { listeners: 1, hosts: 2, associations: 3 }),
            unreached: None,
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
            "nvmfd_gateway_hosts{group=\"a\"} 2",
            "nvmfd_gateway_associations{group=\"a\"} 3",
            "nvmfd_gateway_open_listeners{group=\"a\"} 1",
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
            "nvmfd_refused_hosts_total{reactor=\"0\",cause=\"no-room\"} 3".to_owned(),
            "nvmfd_lost_connections_total{reactor=\"0\",cause=\"keep-alive\"} 4".to_owned(),
            "nvmfd_lost_connections_total{reactor=\"0\",cause=\"shared-host-id\"} 5".to_owned(),
        ] {
            assert!(text.lines().any(|own| own == line), "{line}\n{text}");
        }
        let both =
            |line: &&str| line.contains("_hosts_total{") || line.contains("_connections_total{");
        assert_eq!(text.lines().filter(both).count(), 3, "a cause is in one of them: {text}");
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
