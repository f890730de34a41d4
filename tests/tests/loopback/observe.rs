//! What the target counts of itself is what its host has done: real sockets, real disks.

use std::time::{Duration, Instant};

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
fn a_slow_disk_is_told_of() {
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
