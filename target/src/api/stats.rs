//! Types of counters, latencies and utilization: `/v1/stats`, `/v1/slow` and `/v1/inflight`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::core::stats::histogram::{BUCKETS, bound_ns, bucket};

/// Bound of the last bucket of a distribution, with all times above 69 s.
const ENDLESS_NS: u64 = 1 << 40;

/// All counts since the daemon started.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Stats {
    /// Microseconds since the daemon started.
    pub at_us: u64,
    /// By subsystem, namespace and host.
    pub rows: Vec<Row>,
    /// Connected controllers, in the order of their connections; without those of discovery.
    #[serde(default)]
    pub controllers: Vec<ControllerStats>,
    /// Reactors.
    pub reactors: Vec<Reactor>,
}

/// I/O commands of one controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct ControllerStats {
    /// Its `id`, as in the list of controllers: unique while the daemon runs.
    pub id: u64,
    /// The subsystem.
    pub subsystem: String,
    /// Controller id.
    pub cntlid: u16,
    /// NQN of the host.
    pub host: String,
    /// Address of the host.
    pub source: String,
    /// Microseconds since the host was admitted.
    pub connected_us: u64,
    /// By kind of command: `read`, `write`, `flush`, `other`. Kinds without a command are left out.
    /// Absent where commands are counted together with those of other controllers: beyond 128 rows
    /// of hosts and namespaces on a reactor.
    pub ops: Option<Vec<Sums>>,
}

/// Completed commands of one kind and controller.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Sums {
    /// The kind.
    pub op: String,
    /// How many.
    pub commands: u64,
    /// Failed commands.
    pub failures: u64,
    /// Bytes read or written by commands that succeeded.
    pub bytes: u64,
    /// Their time, in nanoseconds.
    pub time_ns: u64,
}

/// Counters of one host at one namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Row {
    /// The subsystem; "other" for all without a row of their own, because there are too many.
    pub subsystem: String,
    /// The namespace; 0 with "other".
    pub nsid: u32,
    /// The host, as it calls itself; "other" likewise.
    pub host: String,
    /// By kind of command: `read`, `write`, `flush`, `other`. Kinds without a command are left out.
    pub ops: Vec<Operations>,
}

/// Completed commands of one kind.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Operations {
    /// The kind.
    pub op: String,
    /// How many.
    pub commands: u64,
    /// Failed commands.
    pub failures: u64,
    /// Bytes read or written by commands that succeeded.
    pub bytes: u64,
    /// Their latency.
    pub latency: Latency,
    /// Latency by stage, in the order of a command: `receive`, `wait`, `pull`, `disk`, `push`,
    /// `reply`. The times of all stages add up to that of `latency`.
    pub stages: Vec<StageLatency>,
}

/// The time in one stage.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct StageLatency {
    /// The stage.
    pub stage: String,
    /// Its time, of all commands; 0 for commands that skip it.
    pub latency: Latency,
}

/// Times of commands.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Latency {
    /// Sum, in nanoseconds.
    pub time_ns: u64,
    /// Distribution: pairs of a bound in nanoseconds and the number of commands below it and not
    /// below the bound before. Ascending, without empty buckets; 2^40 is the bound of times above
    /// 69 s.
    pub below: Vec<[u64; 2]>,
}

/// State of a reactor.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Reactor {
    /// Its number.
    pub index: u32,
    /// Iterations of its loop.
    pub iterations: u64,
    /// Idle iterations without sleep.
    pub idle_iterations: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Nanoseconds in busy iterations.
    pub busy_ns: u64,
    /// Queue pairs it serves.
    pub queues: u64,
    /// Free cells for responses.
    pub cells_free: u64,
    /// Free receive buffers.
    pub receives_free: u64,
    /// Free bytes for data.
    pub data_free_bytes: u64,
    /// Bytes for data, free or not.
    pub data_bytes: u64,
    /// Commands that wait for data buffers.
    pub waiting_for_buffer: u64,
    /// Commands that were slow, as `[observe] slow_ms` has it.
    pub slow: u64,
    /// Hosts refused or lost, by cause.
    pub refusals: Vec<Count>,
    /// Datagrams by result (provider `soft`).
    pub datagrams: Vec<Count>,
    /// Work of RDMA devices (provider `verbs`): doorbells and work requests of receive and send
    /// queues, and queue pairs.
    #[serde(default)]
    pub device: Vec<Count>,
    /// Errors of connections, by local address (provider `soft`).
    #[serde(default)]
    pub link_errors: Vec<LinkErrors>,
}

/// Losses, and peers that were not ready, at a local address.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct LinkErrors {
    /// The address.
    pub address: String,
    /// Retransmissions, timeouts, and negative acknowledgements (NAK, RNR NAK), each way.
    pub counts: Vec<Count>,
}

/// A named counter.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Count {
    /// Name.
    pub name: String,
    /// Value.
    pub count: u64,
}

/// Which command it is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct CommandIdentity {
    /// Its reactor.
    pub reactor: u32,
    /// The subsystem.
    pub subsystem: String,
    /// NQN of the host.
    pub host: String,
    /// Its queue; 0 is the admin queue.
    pub qid: u16,
    /// Its id.
    pub cid: u16,
    /// Its opcode.
    pub opcode: u8,
    /// Its namespace.
    pub nsid: u32,
    /// Its first block, if any.
    pub slba: u64,
}

/// A slow command.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SlowCommand {
    /// Completion time, in milliseconds since 1970.
    pub at_ms: u64,
    /// Which.
    #[serde(flatten)]
    pub command: CommandIdentity,
    /// Bytes read or written.
    pub bytes: u64,
    /// Its status.
    pub status: String,
    /// Total time, in nanoseconds.
    pub total_ns: u64,
    /// Time in each stage, in nanoseconds: `receive`, `wait`, `pull`, `disk`, `push`, `reply`.
    pub stages_ns: Vec<Count>,
}

/// A command in progress.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct InFlight {
    /// Which.
    #[serde(flatten)]
    pub command: CommandIdentity,
    /// The stage that it is in: `receive`, `wait`, `pull`, `disk`, `push` or `reply`.
    pub stage: String,
    /// Time since its capsule has arrived, in nanoseconds.
    pub age_ns: u64,
}

impl Latency {
    /// Of a sum and the counts of all buckets.
    pub fn new(time_ns: u64, counts: &[u64; BUCKETS]) -> Latency {
        let bound = |at| bound_ns(at).unwrap_or(ENDLESS_NS);
        let below = counts.iter().enumerate().filter(|(_, count)| **count != 0);
        Latency { time_ns, below: below.map(|(at, count)| [bound(at), *count]).collect() }
    }

    /// How many commands.
    pub fn commands(&self) -> u64 {
        self.below.iter().map(|[_, count]| count).sum()
    }

    /// Mean, in nanoseconds; absent without commands.
    pub fn mean_ns(&self) -> Option<u64> {
        self.time_ns.checked_div(self.commands())
    }

    /// Quantile for a share of the commands (0 to 1), in nanoseconds, as if the times within a
    /// bucket were spread evenly; absent without commands.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a percentile is no more exact than its bucket"
    )]
    pub fn percentile_ns(&self, share: f64) -> Option<u64> {
        let rank = share.clamp(0.0, 1.0) * self.commands() as f64;
        let mut before = 0.0;
        for [bound, count] in &self.below {
            let here = *count as f64;
            if before + here >= rank {
                let at = bucket(bound.saturating_sub(1));
                let lower = at.checked_sub(1).and_then(bound_ns).unwrap_or(0);
                if *bound == ENDLESS_NS {
                    return Some(lower);
                }
                let part = ((rank - before) / here).clamp(0.0, 1.0);
                return Some(lower + ((bound - lower) as f64 * part) as u64);
            }
            before += here;
        }
        None
    }

    /// Adds others.
    pub fn add(&mut self, other: &Latency) {
        self.time_ns = self.time_ns.saturating_add(other.time_ns);
        for [bound, count] in &other.below {
            match self.below.binary_search_by_key(bound, |[bound, _]| *bound) {
                Ok(at) => self.below[at][1] = self.below[at][1].saturating_add(*count),
                Err(at) => self.below.insert(at, [*bound, *count]),
            }
        }
    }

    /// Returns the difference from an earlier snapshot.
    pub fn since(&self, earlier: &Latency) -> Latency {
        let before = |bound: u64| {
            let at = earlier.below.binary_search_by_key(&bound, |[bound, _]| *bound);
            at.map_or(0, |at| earlier.below[at][1])
        };
        let left = self.below.iter().map(|[bound, n]| [*bound, n.saturating_sub(before(*bound))]);
        Latency {
            time_ns: self.time_ns.saturating_sub(earlier.time_ns),
            below: left.filter(|[_, count]| *count != 0).collect(),
        }
    }
}

impl Operations {
    /// An empty entry of this kind.
    pub fn none(op: &str) -> Operations {
        Operations { op: op.to_owned(), ..Operations::default() }
    }

    /// Adds others.
    pub fn add(&mut self, other: &Operations) {
        self.commands = self.commands.saturating_add(other.commands);
        self.failures = self.failures.saturating_add(other.failures);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.latency.add(&other.latency);
        for one in &other.stages {
            match self.stages.iter_mut().find(|own| own.stage == one.stage) {
                Some(own) => own.latency.add(&one.latency),
                None => self.stages.push(one.clone()),
            }
        }
    }

    /// Returns the difference from an earlier snapshot.
    pub fn since(&self, earlier: &Operations) -> Operations {
        let stage = |own: &StageLatency| {
            let before = earlier.stages.iter().find(|one| one.stage == own.stage);
            let latency =
                before.map_or_else(|| own.latency.clone(), |b| own.latency.since(&b.latency));
            StageLatency { stage: own.stage.clone(), latency }
        };
        Operations {
            op: self.op.clone(),
            commands: self.commands.saturating_sub(earlier.commands),
            failures: self.failures.saturating_sub(earlier.failures),
            bytes: self.bytes.saturating_sub(earlier.bytes),
            latency: self.latency.since(&earlier.latency),
            stages: self.stages.iter().map(stage).collect(),
        }
    }
}

impl ControllerStats {
    /// Returns the difference from an earlier snapshot, of the time between or since the connection.
    pub fn since(&self, earlier: Option<&ControllerStats>) -> ControllerStats {
        let Some(earlier) = earlier else { return self.clone() };
        let before = |op: &str| earlier.ops.iter().flatten().find(|own| own.op == op);
        let left = |own: &Sums| match before(&own.op) {
            Some(before) => Sums {
                op: own.op.clone(),
                commands: own.commands.saturating_sub(before.commands),
                failures: own.failures.saturating_sub(before.failures),
                bytes: own.bytes.saturating_sub(before.bytes),
                time_ns: own.time_ns.saturating_sub(before.time_ns),
            },
            None => own.clone(),
        };
        ControllerStats {
            connected_us: self.connected_us.saturating_sub(earlier.connected_us),
            ops: self.ops.as_ref().map(|ops| ops.iter().map(left).collect()),
            ..self.clone()
        }
    }
}

impl Row {
    /// Commands of a kind.
    pub fn op(&self, op: &str) -> Option<&Operations> {
        self.ops.iter().find(|own| own.op == op)
    }

    /// Whether another row has the same subsystem, namespace and host.
    pub fn is_of(&self, other: &Row) -> bool {
        (&self.subsystem, self.nsid, &self.host) == (&other.subsystem, other.nsid, &other.host)
    }
}

impl Stats {
    /// Difference from an earlier snapshot: counts are differences, `at_us` is the period, and
    /// levels (buffers, waiting commands) are current. After a restart of the daemon, totals since
    /// then.
    pub fn since(&self, earlier: &Stats) -> Stats {
        if earlier.at_us > self.at_us {
            return self.clone();
        }
        let op = |own: &Operations, before: Option<&Row>| {
            let before = before.and_then(|row| row.op(&own.op));
            before.map_or_else(|| own.clone(), |before| own.since(before))
        };
        let row = |own: &Row| {
            let before = earlier.rows.iter().find(|row| row.is_of(own));
            Row { ops: own.ops.iter().map(|one| op(one, before)).collect(), ..own.clone() }
        };
        let reactor = |own: &Reactor| {
            let before = earlier.reactors.iter().find(|one| one.index == own.index);
            before.map_or_else(|| own.clone(), |before| own.since(before))
        };
        let controller = |own: &ControllerStats| {
            own.since(earlier.controllers.iter().find(|before| before.id == own.id))
        };
        Stats {
            at_us: self.at_us - earlier.at_us,
            rows: self.rows.iter().map(row).collect(),
            controllers: self.controllers.iter().map(controller).collect(),
            reactors: self.reactors.iter().map(reactor).collect(),
        }
    }
}

impl Reactor {
    fn since(&self, earlier: &Reactor) -> Reactor {
        let counts = |own: &[Count], before: &[Count]| {
            let before = |name: &str| before.iter().find(|b| b.name == name).map_or(0, |b| b.count);
            let left = |c: &Count| c.count.saturating_sub(before(&c.name));
            own.iter().map(|c| Count { name: c.name.clone(), count: left(c) }).collect()
        };
        let link_errors = |own: &LinkErrors| {
            let before = earlier.link_errors.iter().find(|one| one.address == own.address);
            let before = before.map_or(&[][..], |before| &before.counts);
            LinkErrors { address: own.address.clone(), counts: counts(&own.counts, before) }
        };
        Reactor {
            iterations: self.iterations.saturating_sub(earlier.iterations),
            idle_iterations: self.idle_iterations.saturating_sub(earlier.idle_iterations),
            sleeps: self.sleeps.saturating_sub(earlier.sleeps),
            busy_ns: self.busy_ns.saturating_sub(earlier.busy_ns),
            slow: self.slow.saturating_sub(earlier.slow),
            refusals: counts(&self.refusals, &earlier.refusals),
            datagrams: counts(&self.datagrams, &earlier.datagrams),
            device: counts(&self.device, &earlier.device),
            link_errors: self.link_errors.iter().map(link_errors).collect(),
            ..self.clone()
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::api::stats::*;

    fn latency(times_ns: &[u64]) -> Latency {
        let mut counts = [0; BUCKETS];
        times_ns.iter().for_each(|ns| counts[bucket(*ns)] += 1);
        Latency::new(times_ns.iter().sum(), &counts)
    }

    #[test]
    fn percentiles_are_within_a_quarter_of_the_truth() {
        let times: Vec<u64> = (1..=1000).map(|n| n * 10_000).collect();
        let latency = latency(&times);
        assert_eq!((latency.commands(), latency.mean_ns()), (1000, Some(5_005_000)));
        for (share, truth) in [(0.5, 5_000_000.0), (0.99, 9_900_000.0), (0.999, 9_990_000.0)] {
            let told = latency.percentile_ns(share).unwrap() as f64;
            assert!((told / truth - 1.0).abs() < 0.25, "{share}: {told} for {truth}");
        }
        assert_eq!(Latency::default().percentile_ns(0.5), None);
        assert_eq!(Latency::default().mean_ns(), None);
    }

    #[test]
    fn latencies_beyond_the_last_bucket_report_its_lower_bound() {
        let latency = latency(&[100_000_000_000]);
        assert_eq!(latency.below, [[ENDLESS_NS, 1]]);
        assert_eq!(latency.percentile_ns(0.5), Some(1 << 36));
    }

    #[test]
    fn latency_histograms_add_and_subtract_consistently() {
        let (before, since) = (latency(&[5_000, 9_000_000]), latency(&[5_100, 77_000]));
        let mut all = before.clone();
        all.add(&since);
        assert_eq!(all, latency(&[5_000, 9_000_000, 5_100, 77_000]));
        assert_eq!(all.since(&before), since);
        assert_eq!(all.since(&all).commands(), 0);
    }

    #[test]
    fn link_errors_since_a_snapshot_are_reported_by_address() {
        let reactor = |all: &[(&str, u64)]| Reactor {
            link_errors: all
                .iter()
                .map(|(address, count)| LinkErrors {
                    address: (*address).to_owned(),
                    counts: vec![Count { name: "timeout".to_owned(), count: *count }],
                })
                .collect(),
            ..Reactor::default()
        };
        let now = reactor(&[("192.0.2.1", 9), ("192.0.2.2", 4)]);
        let since = now.since(&reactor(&[("192.0.2.2", 3)]));
        assert_eq!(since, reactor(&[("192.0.2.1", 9), ("192.0.2.2", 1)]));
    }

    #[test]
    fn controller_stats_cover_the_period_or_the_time_since_connect() {
        let controller = |id, connected_us, ops: &[(&str, u64)]| ControllerStats {
            id,
            connected_us,
            ops: Some(
                ops.iter()
                    .map(|(op, n)| Sums {
                        op: (*op).to_owned(),
                        commands: *n,
                        failures: *n / 10,
                        bytes: *n * 512,
                        time_ns: *n * 1000,
                    })
                    .collect(),
            ),
            ..ControllerStats::default()
        };
        let stats = |at_us, controllers| Stats { at_us, controllers, ..Stats::default() };
        let before = stats(50, vec![controller(1, 40, &[("read", 10)]), controller(2, 30, &[])]);
        let new = controller(3, 20, &[("write", 5)]);
        let now = stats(100, vec![controller(1, 90, &[("read", 30), ("flush", 1)]), new.clone()]);
        let expected = vec![controller(1, 50, &[("read", 20), ("flush", 1)]), new];
        assert_eq!(now.since(&before).controllers, expected);
        let unknown = ControllerStats { ops: None, ..controller(1, 90, &[]) };
        assert_eq!(unknown.since(before.controllers.first()).ops, None);
    }

    #[test]
    fn stats_after_a_daemon_restart_count_from_its_start() {
        let stats = |at_us, iterations| Stats {
            at_us,
            reactors: vec![Reactor { iterations, ..Reactor::default() }],
            ..Stats::default()
        };
        let since = stats(9, 100).since(&stats(4, 30));
        assert_eq!((since.at_us, since.reactors[0].iterations), (5, 70));
        assert_eq!(stats(3, 20).since(&stats(4, 30)), stats(3, 20));
    }
}
