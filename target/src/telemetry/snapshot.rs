//! A snapshot of all counters of the reactors. Not taken on the reactors' threads; holds their locks
//! only while it copies pointers.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use crate::api::stats::{
    CommandIdentity, ControllerStats, Count, Latency, LinkErrors, Operations, Reactor, Row,
    SlowCommand, StageLatency, Stats, Sums,
};
use crate::core::diag::cause::Cause;
use crate::core::registry::Controller;
use crate::core::stats::command_identity;
use crate::core::stats::io_stats::{self, Kind, OpStats};
use crate::core::stats::reactor_stats::{PollStats, ReactorStats};
use crate::core::stats::stage_timer::Stage;

/// Name of the row for all other namespaces and hosts.
const OTHER: &str = "other";

/// All counts of all reactors, of a target that started then; without those of controllers.
pub fn stats(
    observers: &[Arc<ReactorStats>],
    reactors: &[Arc<PollStats>],
    started: Instant,
) -> Stats {
    let mut rows: BTreeMap<_, Vec<Operations>> = BTreeMap::new();
    for row in observers.iter().flat_map(|observer| observer.all_rows()) {
        let ops: Vec<_> = Kind::ALL
            .iter()
            .map(|kind| operations(*kind, &row.kinds[*kind as usize]))
            .filter(|ops| ops.commands > 0)
            .collect();
        if row.pair.is_none() && ops.is_empty() {
            continue;
        }
        let sums = rows.entry(row.pair).or_default();
        for ops in ops {
            match sums.iter_mut().find(|own| own.op == ops.op) {
                Some(own) => own.add(&ops),
                None => sums.push(ops),
            }
        }
    }
    let row = |(pair, ops): (Option<crate::core::stats::io_stats::StatsKey>, _)| match pair {
        Some(pair) => Row {
            subsystem: pair.subsystem.to_string(),
            nsid: pair.nsid,
            host: pair.host.to_string(),
            ops,
        },
        None => Row { subsystem: OTHER.to_owned(), nsid: 0, host: OTHER.to_owned(), ops },
    };
    let each = observers.iter().zip(reactors).enumerate();
    Stats {
        at_us: started.elapsed().as_micros().try_into().unwrap_or(u64::MAX),
        rows: rows.into_iter().map(row).collect(),
        controllers: Vec::new(),
        reactors: each.map(|(index, (observer, stats))| one(index, observer, stats)).collect(),
    }
}

/// The commands of these controllers, without those of discovery, on all reactors.
pub fn controllers(
    observers: &[Arc<ReactorStats>],
    controllers: &[Controller],
) -> Vec<ControllerStats> {
    // Of each association, the sums of its rows: none if one of them is shared.
    let mut found: HashMap<u64, Option<[io_stats::Sums; Kind::ALL.len()]>> = HashMap::new();
    for row in observers.iter().flat_map(|observer| observer.all_rows()) {
        let Some((id, sums)) = row.of_controller() else { continue };
        let all = found.entry(id).or_insert_with(|| Some(Default::default()));
        *all = all.take().zip(sums).map(|(mut all, sums)| {
            all.iter_mut().zip(&sums).for_each(|(all, sums)| all.add(sums));
            all
        });
    }
    let describe = |of: &Controller| {
        let a = &of.association;
        let none = || Some(Default::default());
        let sums = found.get(&a.id).copied().unwrap_or_else(none).filter(|_| a.has_own_stats());
        ControllerStats {
            id: a.id,
            subsystem: a.subsystem.to_string(),
            cntlid: a.cntlid,
            host: a.host.to_string(),
            source: of.source.to_string(),
            connected_us: of.since.elapsed().as_micros().try_into().unwrap_or(u64::MAX),
            ops: sums.map(|sums| by_kind(&sums)),
        }
    };
    controllers.iter().filter(|controller| !controller.discovery).map(describe).collect()
}

fn by_kind(sums: &[io_stats::Sums; Kind::ALL.len()]) -> Vec<Sums> {
    let each = Kind::ALL.iter().zip(sums).filter(|(_, sums)| sums.commands > 0);
    let sums = |(kind, sums): (&Kind, &io_stats::Sums)| Sums {
        op: kind.name().to_owned(),
        commands: sums.commands,
        failures: sums.failures,
        bytes: sums.bytes,
        time_ns: sums.time_ns,
    };
    each.map(sums).collect()
}

/// The recorded slow commands, the latest first.
pub fn slow(observers: &[Arc<ReactorStats>]) -> Vec<SlowCommand> {
    let (now, today) = (Instant::now(), SystemTime::now());
    let today = today.duration_since(UNIX_EPOCH).unwrap_or_default();
    let mut all = Vec::new();
    for (index, observer) in observers.iter().enumerate() {
        all.extend(observer.slow().0.into_iter().map(|command| (index as u32, command)));
    }
    all.sort_by_key(|(_, command)| std::cmp::Reverse(command.at));
    let describe = |(reactor, command): (u32, crate::core::stats::slow_log::SlowCommand)| {
        let ago = now.saturating_duration_since(command.at);
        let stages = Stage::ALL.iter().zip(command.stages_ns);
        SlowCommand {
            at_ms: today.saturating_sub(ago).as_millis().try_into().unwrap_or(u64::MAX),
            command: identity(reactor, &command.command),
            bytes: command.bytes,
            status: command.status.to_string(),
            total_ns: command.total_ns,
            stages_ns: stages.map(|(stage, ns)| count(stage.name(), ns)).collect(),
        }
    };
    all.into_iter().map(describe).collect()
}

/// Identity of a command of a reactor.
pub(crate) fn identity(reactor: u32, of: &command_identity::CommandIdentity) -> CommandIdentity {
    CommandIdentity {
        reactor,
        subsystem: of.subsystem.to_string(),
        host: of.host.to_string(),
        qid: of.qid,
        cid: of.cid,
        opcode: of.opcode,
        nsid: of.nsid,
        slba: of.slba,
    }
}

fn operations(kind: Kind, tally: &OpStats) -> Operations {
    // The distribution is read once, so that its count and that of each stage are equal; and so is
    // the time in each stage, so that the sums match.
    let total = tally.total.read();
    let commands = total.iter().sum();
    let mut total_ns = 0_u64;
    let stage = |stage: &Stage| {
        let (time_ns, counts) = tally.stage(*stage, commands);
        total_ns = total_ns.wrapping_add(time_ns);
        StageLatency { stage: stage.name().to_owned(), latency: Latency::new(time_ns, &counts) }
    };
    let stages = Stage::ALL.iter().map(stage).collect();
    Operations {
        op: kind.name().to_owned(),
        commands,
        failures: tally.failures.load(Ordering::Relaxed),
        bytes: tally.bytes.load(Ordering::Relaxed),
        latency: Latency::new(total_ns, &total),
        stages,
    }
}

fn one(index: usize, observer: &ReactorStats, stats: &PollStats) -> Reactor {
    let gauges = &observer.gauges;
    let refusals = Cause::NAMES.iter().zip(&gauges.refusals);
    let fabric = observer.fabric();
    Reactor {
        index: index as u32,
        iterations: stats.iterations.load(Ordering::Relaxed),
        idle_iterations: stats.idle_iterations.load(Ordering::Relaxed),
        sleeps: stats.sleeps.load(Ordering::Relaxed),
        busy_ns: stats.busy_ns.load(Ordering::Relaxed),
        queues: stats.queues.load(Ordering::Relaxed),
        cells_free: gauges.cells_free.load(Ordering::Relaxed),
        receives_free: gauges.receives_free.load(Ordering::Relaxed),
        data_free_bytes: gauges.data_free_bytes.load(Ordering::Relaxed),
        data_bytes: gauges.data_bytes.load(Ordering::Relaxed),
        waiting_for_buffer: gauges.waiting_for_buffer.load(Ordering::Relaxed),
        slow: observer.slow().1,
        refusals: refusals.map(|(name, n)| count(name, n.load(Ordering::Relaxed))).collect(),
        datagrams: fabric.counters.into_iter().map(|(name, n)| count(name, n)).collect(),
        device: fabric.device.into_iter().map(|(name, n)| count(name, n)).collect(),
        link_errors: link_errors(fabric.link_errors),
    }
}

fn link_errors(link_errors: Vec<(IpAddr, &'static str, u64)>) -> Vec<LinkErrors> {
    let mut all: Vec<LinkErrors> = Vec::new();
    for (at, name, n) in link_errors {
        let address = at.to_string();
        match all.last_mut().filter(|last| last.address == address) {
            Some(last) => last.counts.push(count(name, n)),
            None => all.push(LinkErrors { address, counts: vec![count(name, n)] }),
        }
    }
    all
}

fn count(name: &str, count: u64) -> Count {
    Count { name: name.to_owned(), count }
}
