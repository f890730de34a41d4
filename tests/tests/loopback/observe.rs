//! What the target counts of itself is what its host has done: real sockets, real disks.

use std::time::{Duration, Instant};

use initiator::{Host, HostOptions};
use nvmfd::api::stats::{Operations, Stats};
use nvmfd::snapshot;

use super::target::{BLOCKS, HOST, SUBSYSTEM, TestTarget};
use super::{FILE, RAM, at, pattern};

/// The counts once there are so many commands: a host that has disconnected is noticed a moment
/// later.
fn counted(target: &TestTarget, commands: u64) -> Stats {
    let view = target.view();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let stats = snapshot::stats(view.shared.observers(), &view.reactors, view.started);
        let sum: u64 = each(&stats).map(|ops| ops.commands).sum();
        if sum >= commands || Instant::now() > until {
            return stats;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn each(stats: &Stats) -> impl Iterator<Item = &Operations> {
    stats.rows.iter().flat_map(|row| &row.ops)
}

#[test]
fn every_command_is_counted_once_and_its_stages_add_up() {
    let target = TestTarget::start();
    let mut host = target.connect(2);
    let data = pattern(5, 64 << 10);
    let mut back = vec![0; data.len()];
    for round in 0..50 {
        host.write(at(FILE, round * 16), &data, false).expect("written");
        host.read(at(FILE, round * 16), &mut back).expect("read");
        host.write(at(RAM, round), &data[..512], false).expect("written");
    }
    assert_eq!(back, data);
    host.flush(1).expect("flushed");
    host.write_zeroes(FILE, 4, false).expect("zeroed");
    host.read(at(FILE, BLOCKS), &mut back).expect_err("behind the end");
    host.disconnect();
    let stats = counted(&target, 153);
    let of = |nsid, op: &str| {
        let row = stats.rows.iter().find(|row| row.nsid == nsid).expect("a row");
        assert_eq!((row.subsystem.as_str(), row.host.as_str()), (SUBSYSTEM, HOST));
        row.op(op).map(|ops| (ops.commands, ops.failures, ops.bytes))
    };
    let len = data.len() as u64;
    assert_eq!(of(1, "write"), Some((50, 0, 50 * len)));
    assert_eq!(of(1, "read"), Some((51, 1, 50 * len)));
    assert_eq!(of(2, "write"), Some((50, 0, 50 * 512)));
    assert_eq!((of(1, "flush"), of(1, "other")), (Some((1, 0, 0)), Some((1, 0, 0))));
    assert_eq!(stats.rows.len(), 2);
    for ops in each(&stats) {
        assert_eq!(ops.latency.commands(), ops.commands, "each is in the distribution");
        let stages: u64 = ops.stages.iter().map(|stage| stage.latency.time_ns).sum();
        assert_eq!(stages, ops.latency.time_ns, "{}", ops.op);
        for stage in &ops.stages {
            assert_eq!(stage.latency.commands(), ops.commands, "{} {}", ops.op, stage.stage);
        }
    }
    let disk = |op: &str| {
        let row = stats.rows.iter().find(|row| row.nsid == 1).expect("a row");
        let stages = &row.op(op).expect("some").stages;
        let time = |stage: &str| {
            stages.iter().find(|own| own.stage == stage).map_or(0, |own| own.latency.time_ns)
        };
        (time("pull") > 0, time("disk") > 0, time("push") > 0)
    };
    assert_eq!((disk("read"), disk("write")), ((false, true, true), (true, true, false)));
}

/// A kind of command; its commands, failures and bytes.
type KindCounts = (String, u64, u64, u64);

/// The counts of each connected controller, with its controller id.
fn of_controllers(target: &TestTarget) -> Vec<(u16, Vec<KindCounts>)> {
    let view = target.view();
    let all = snapshot::controllers(view.shared.observers(), &view.registry.controllers());
    all.into_iter()
        .map(|of| {
            let ops = of.ops.expect("counted apart").into_iter();
            assert!(ops.clone().all(|ops| ops.time_ns > 0), "its time is told");
            let ops = ops.map(|ops| (ops.op, ops.commands, ops.failures, ops.bytes));
            (of.cntlid, ops.collect())
        })
        .collect()
}

#[test]
fn each_controller_of_a_host_has_its_own_counts_from_its_connect() {
    let target = TestTarget::start();
    let connect = || {
        let setup = HostOptions { source: None, ..target.setup() };
        Host::connect(target.options(1), setup).expect("connected")
    };
    let mut block = [0; 4096];
    let mut gone = connect();
    gone.read(at(FILE, 0), &mut block).expect("read");
    gone.disconnect();
    counted(&target, 1);
    let (mut one, mut two) = (connect(), connect());
    for _ in 0..3 {
        one.read(at(FILE, 1), &mut block).expect("read");
    }
    two.write(at(FILE, 2), &block, false).expect("written");
    two.read(at(FILE, BLOCKS), &mut block).expect_err("behind the end");
    let kind = |op: &str, commands, failures, bytes| (op.to_owned(), commands, failures, bytes);
    let first = (one.session().cntlid(), vec![kind("read", 3, 0, 3 * 4096)]);
    let second = (two.session().cntlid(), vec![kind("read", 1, 1, 0), kind("write", 1, 0, 4096)]);
    let expected = [first, second];
    // A command counts once the transport of its host has acknowledged the response.
    let until = Instant::now() + Duration::from_secs(60);
    while of_controllers(&target) != expected && Instant::now() < until {
        one.turn();
        two.turn();
    }
    assert_eq!(of_controllers(&target), expected);
    let all = counted(&target, 6);
    let sum: u64 = each(&all).map(|ops| ops.commands).sum();
    assert_eq!((sum, all.rows.len()), (6, 2), "a host has one row for each namespace");
    one.disconnect();
    two.disconnect();
}

#[test]
fn a_benchmark_and_the_target_count_the_same_commands() {
    let target = TestTarget::start();
    let (mut reads, mut writes) = (0, 0);
    // A busy machine may do nothing at all for a while.
    let mut runs = 0;
    for runtime in ["400ms", "4s", "40s"] {
        let args = ["--rw", "randrw", "--iodepth", "16", "--runtime", runtime, "-o", "json"];
        let report = target.nvmf("bench", &args).good().json();
        let told = |op: &str| report["jobs"][0][op]["total_ios"].as_u64().expect("a count");
        (reads, writes, runs) = (reads + told("read"), writes + told("write"), runs + 1);
        if reads > 0 && writes > 0 {
            break;
        }
    }
    assert!(reads > 0 && writes > 0);
    let stats = counted(&target, reads + writes);
    let count = |op: &str| {
        let kinds = stats.rows.iter().filter_map(|row| row.op(op));
        kinds.map(|ops| ops.latency.commands()).sum::<u64>()
    };
    // What was under way when the time of a run was over, 16 at most, the benchmark completes and
    // does not tell.
    let counted = (count("read"), count("write"));
    assert!(counted.0 >= reads && counted.1 >= writes, "{counted:?} of {reads} and {writes}");
    assert!(
        counted.0 + counted.1 <= reads + writes + 16 * runs,
        "{counted:?} of {reads} and {writes}"
    );
}

/// What takes longer than the threshold is remembered; a reload changes the threshold.
#[test]
fn slow_commands_beyond_the_threshold_are_recorded() {
    let mut target = TestTarget::start_with("[observe]\nslow_ms = 3600000\n");
    let view = target.view();
    let mut host = target.connect(1);
    let mut block = vec![0; 4096];
    host.read(FILE, &mut block).expect("read");
    host.disconnect();
    counted(&target, 1);
    assert!(snapshot::slow(view.shared.observers()).is_empty());
    // A millisecond is not much for the reading of a megabyte through real sockets; repeated until
    // one takes it.
    target.apply("[observe]\nslow_ms = 1\n");
    let mut host = target.connect(1);
    let mut much = vec![0; 16 << 20];
    let until = Instant::now() + Duration::from_secs(60);
    while snapshot::slow(view.shared.observers()).is_empty() && Instant::now() < until {
        host.read(FILE, &mut much).expect("read");
    }
    let slow = snapshot::slow(view.shared.observers());
    let one = slow.first().expect("a slow command");
    assert_eq!((one.command.host.as_str(), one.command.nsid, one.command.opcode), (HOST, 1, 2));
    assert!(one.total_ns >= 1_000_000 && one.bytes > 0);
    assert_eq!(one.stages_ns.iter().map(|stage| stage.count).sum::<u64>(), one.total_ns);
    host.disconnect();
}
