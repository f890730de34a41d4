//! `nvmf bench` and `nvmf verify` against a real target: on good days, and on bad ones.

use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::target::{BLOCKS, HOST, HOSTID, SUBSYSTEM, TestTarget, ended, nvmf, nvmfd};

const BLOCK: u64 = 4096;

#[test]
fn a_benchmark_follows_its_options() {
    let target = TestTarget::start();
    for (args, reads, writes) in [
        (&["--rw", "randread", "--iodepth", "4"][..], true, false),
        (&["--rw", "write", "--bs", "128k", "--iodepth", "3", "-i", "2"], false, true),
        (
            &["--rw", "randrw", "--rwmixread", "60", "--namespace-id", "2", "--bs", "512"],
            true,
            true,
        ),
        (&["--rw", "randwrite", "--fua", "--no-in-capsule", "--spin-us", "0"], false, true),
    ] {
        let measure = |runtime| {
            let often = ["--runtime", runtime, "--ramp-time", "50ms", "-o", "json"];
            target.nvmf("bench", &[args, &often].concat()).good().json()
        };
        let has = |json: &Value, side: &str| json["jobs"][0][side]["total_ios"].as_u64() > Some(0);
        // A busy machine may do nothing at all for a while.
        let json = ["300ms", "3s", "30s"].into_iter().map(measure);
        let json = { json }.find(|json| has(json, "read") == reads && has(json, "write") == writes);
        let json = json.unwrap_or_else(|| panic!("{args:?}: never what was asked for"));
        let job = &json["jobs"][0];
        assert_eq!(job["error"], 0);
        for (side, used) in [("read", reads), ("write", writes)] {
            let side = &job[side];
            let number = |name: &str| side[name].as_u64().expect("a number");
            assert_eq!(number("total_ios") > 0, used, "{args:?}: {side}");
            assert_eq!(side["clat_ns"]["N"], number("total_ios"));
            if !used {
                continue;
            }
            let at = |name| args.iter().position(|it| *it == name).map(|at| args[at + 1]);
            let bytes = match at("--bs") {
                Some("128k") => 131_072,
                Some("512") => 512,
                _ => 4096,
            };
            assert_eq!(number("io_bytes"), number("total_ios") * bytes);
            // The clock of the report is that of the machine; a busy one may be late.
            assert!(number("runtime") >= 250, "{side}");
            let iops = number("total_ios") as f64 / (number("runtime") as f64 / 1000.0);
            assert!((side["iops"].as_f64().expect("a number") / iops - 1.0).abs() < 0.01);
            let percentile = |name: &str| side["clat_ns"]["percentile"][name].as_u64();
            assert!(percentile("1.000000") <= percentile("99.990000"));
            assert!(side["clat_ns"]["min"].as_u64() > Some(1000), "nothing is that fast: {side}");
        }
    }
    // What was written is what is read: a write reached its place, and no other.
    let written = fs::read(target.directory().join("disk1.img")).expect("the store");
    assert!(written[..131_072].iter().any(|byte| *byte != 0));
}

#[test]
fn results_of_benchmark_threads_are_summed() {
    let target = TestTarget::start();
    let args = ["--numjobs", "3", "--runtime", "300ms", "--json", "--progress", "json"];
    let ran = target.nvmf("bench", &args).good();
    let job = &ran.json()["jobs"][0];
    assert_eq!(job["job options"]["numjobs"], "3");
    let runtime = job["read"]["runtime"].as_u64().expect("a number");
    assert_eq!(job["job_runtime"].as_u64(), Some(3 * runtime));
    for line in ran.error().lines() {
        let line: Value = serde_json::from_str(line).expect("JSON");
        assert_eq!((&line["phase"], &line["write"]["iops"]), (&json!("run"), &json!(0.0)));
    }
}

#[test]
fn invalid_benchmark_options_are_reported_before_the_run() {
    let target = TestTarget::start();
    for (args, code, word) in [
        (&["--bs", "512"][..], 2, "multiple"),
        (&["--bs", "2m"], 2, "at most 1048576"),
        (&["--iodepth", "300"], 2, "more queues"),
        (&["--size", "1g"], 2, "67108864"),
        (&["--namespace-id", "7"], 1, "no namespace 7"),
        (&["--bs", "4x"], 2, "4x"),
    ] {
        let ran = target.nvmf("bench", args);
        assert_eq!(ran.code(), code, "{args:?}: {}", ran.error());
        assert!(ran.error().contains(word), "{args:?}: {}", ran.error());
        assert!(ran.out().is_empty());
    }
}

#[test]
fn verify_finds_no_violation_on_a_correct_target() {
    let target = TestTarget::start();
    for args in [
        &["--ops", "1500", "--rounds", "2"][..],
        &["--ops", "1500", "--clients", "3", "--shared", "--bs", "16k", "--fua", "30"],
        &["--ops", "1500", "--clients", "2", "--namespace-id", "2", "--iodepth", "8"],
        &["--ops", "500", "--offset", "1m", "-i", "1", "--flush-every", "3"],
    ] {
        let size = match (args.contains(&"--namespace-id"), args.contains(&"--offset")) {
            (true, _) => "1m",
            (_, true) => "8m",
            _ => "64m",
        };
        let often = ["--size", size, "--runtime", "600", "--json", "--trims-certain"];
        let found = target.nvmf("verify", &[args, &often].concat());
        let found = found.good().json();
        assert_eq!((&found["violations"], &found["failed"]), (&json!(0), &json!(0)), "{args:?}");
        let rounds = if args.contains(&"--rounds") { 2 } else { 1 };
        assert_eq!(found["everything_read"], rounds);
        assert!(found["writes"].as_u64() > Some(200) && found["flushes"].as_u64() > Some(0));
        assert!(found["blocks_checked"].as_u64() >= found["blocks"].as_u64());
    }
    let text = target.nvmf("verify", &["--ops", "100", "--size", "64m"]).good();
    assert!(text.text().starts_with("verify: all blocks match\n"), "{}", text.text());
}

#[test]
fn verify_detects_a_target_that_loses_writes() {
    let mut target = TestTarget::start();
    target.apply(
        "[[subsystem.namespace]]\nnsid = 3\nkind = \"null\"\nsize = \"1MiB\"\nblock_size = 512\n",
    );
    let null = ["--namespace-id", "3", "--size", "1m"];
    let ran = target.nvmf("verify", &[&null[..], &["--trims", "0", "--zeroes", "0"]].concat());
    assert_eq!(ran.code(), 1, "{}", ran.error());
    let text = ran.text();
    assert!(text.contains(": zeros instead of data\n"), "{text}");
    assert!(text.contains("\n  expected  write "), "{text}");
    let often = ["--ops", "300", "--keep-going", "--json"];
    let ran = target.nvmf("verify", &[&null[..], &often].concat());
    assert_eq!((ran.code(), ran.json()["listed"].as_array().map(Vec::len)), (1, Some(10)));
}

#[test]
fn damage_between_two_runs_is_found_in_the_right_blocks() {
    let target = TestTarget::start();
    let state = target.directory().join("state");
    let state = state.to_str().expect("a path");
    let all = ["--size", "64m", "--ops", "800", "--state", state, "--trims", "0"];
    target.nvmf("verify", &all).good();
    let check = ["--check", state, "--keep-going", "--json"];
    for expect in ["all", "durable"] {
        target.nvmf("verify", &[&check[..], &["--expect", expect]].concat()).good();
    }

    let disk = OpenOptions::new().read(true).write(true).open(target.directory().join("disk1.img"));
    let disk = disk.expect("the store");
    let read = |lba: u64| {
        let mut block = vec![0; BLOCK as usize];
        disk.read_exact_at(&mut block, lba * BLOCK).expect("read");
        block
    };
    let stamped: Vec<u64> = (0..BLOCKS).filter(|&lba| read(lba).starts_with(b"nvmf-blk")).collect();
    let [flipped, copied, torn, gone] = stamped[10..14] else { panic!("{stamped:?}") };
    let mut block = read(flipped);
    block[3000] ^= 0x10;
    for (lba, block) in [
        (flipped, block),
        (copied, read(stamped[100])),
        (torn, [&read(torn)[..512], &read(stamped[200])[512..]].concat()),
        (gone, vec![0; BLOCK as usize]),
    ] {
        disk.write_all_at(&block, lba * BLOCK).expect("written");
    }
    disk.sync_all().expect("on the disk");

    let ran = target.nvmf("verify", &check);
    assert_eq!(ran.code(), 1);
    let found = ran.json();
    let listed = found["listed"].as_array().expect("a list").iter();
    let mut listed: Vec<(u64, &str)> = listed
        .map(|it| (it["lba"].as_u64().expect("a number"), it["kind"].as_str().expect("a word")))
        .collect();
    listed.sort_unstable();
    let mut damage =
        vec![(flipped, "damaged"), (copied, "misplaced"), (torn, "torn"), (gone, "zeros")];
    damage.sort_unstable();
    assert_eq!(listed, damage);
    assert_eq!((&found["writes"], &found["violations"]), (&json!(0), &json!(4)), "it only reads");

    // A saved state is for its namespace.
    let ran = target.nvmf("verify", &["--check", state, "--namespace-id", "2"]);
    assert!(
        ran.code() == 1 && ran.error().contains("and not about namespace 2"),
        "{}",
        ran.error()
    );
}

/// A daemon that can be killed. It ends when it is dropped.
pub(crate) struct Daemon(Child);

impl Daemon {
    pub(crate) fn start(config: &std::path::Path) -> Daemon {
        let mut daemon = Command::new(nvmfd());
        let daemon = daemon.arg("--config").arg(config).stderr(Stdio::null()).stdout(Stdio::null());
        Daemon(daemon.spawn().expect("nvmfd starts"))
    }

    /// As the kernel's OOM killer would.
    pub(crate) fn kill(self) {
        drop(self);
    }

    /// Has it read its configuration again.
    fn reload(&self) {
        kill(Pid::from_raw(self.0.id() as i32), Signal::SIGHUP).expect("there");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_killed_daemon_loses_nothing_that_it_acknowledged() {
    let mut target = TestTarget::start();
    let config = target.directory().join("nvmfd.toml");
    fs::write(&config, target.config_text("")).expect("written");
    target.take().stop(Instant::now() + Duration::from_secs(10));

    let mut daemon = Daemon::start(&config);
    let (address, source) = (target.address(), target.source());
    let mut verify = Command::new(nvmf());
    verify
        .args(["verify", "-a", &address, "-w", &source, "-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID])
        .args(["--provider", "soft", "-k", "1", "--size", "16m", "--runtime", "8"])
        .args(["--reconnect", "60", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    // It must be there when the tool first knocks.
    while !target.nvmf("id-ctrl", &[]).text().contains("nvmfd") {
        thread::sleep(Duration::from_millis(100));
    }
    let mut verify = verify.spawn().expect("nvmf runs");
    let store = target.directory().join("disk1.img");
    for kill in 0..2 {
        // While the tool writes, whenever it gets to that.
        let before = fs::read(&store).expect("the store");
        let mut goes_on = true;
        while goes_on && fs::read(&store).expect("the store") == before {
            thread::sleep(Duration::from_millis(50));
            goes_on = verify.try_wait().expect("a child").is_none();
        }
        // Its time may be over where the first kill held it up for long.
        assert!(goes_on || kill > 0);
        daemon.kill();
        daemon = Daemon::start(&config);
    }
    let ran = ended(verify);
    let found = ran.json();
    assert_eq!(ran.code(), 0, "{}{found:#}", ran.error());
    assert_eq!(found["violations"], 0);
    assert!(
        found["reconnects"].as_u64() >= Some(1) && found["lost"].as_u64() > Some(0),
        "{found:#}"
    );
    daemon.kill();
}

/// A command over two paths of a target, and its log.
struct OverPaths(Child, BufReader<ChildStderr>);

impl OverPaths {
    fn start(target: &TestTarget, command: &str, more: &[&str]) -> OverPaths {
        let (address, source) = (target.address(), target.source());
        let mut child = Command::new(nvmf())
            .args([command, "-a", &address, "--paths", &format!("{address}:4421"), "-w", &source])
            .args(["-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID, "--provider", "soft"])
            .args(["-k", "1", "-c", "1", "--log", "info", "--json"])
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nvmf runs");
        let log = BufReader::new(child.stderr.take().expect("a pipe"));
        let mut it = OverPaths(child, log);
        it.says("is live");
        it.says("is live");
        it
    }

    /// Waits for a line with this text.
    fn says(&mut self, text: &str) {
        let mut line = String::new();
        while !line.contains(text) {
            line.clear();
            assert!(self.1.read_line(&mut line).expect("text") > 0, "it has not said {text:?}");
        }
    }

    fn end(mut self) -> Value {
        let mut log = String::new();
        while self.1.read_line(&mut log).expect("text") > 0 {}
        let ran = ended(self.0);
        assert_eq!(ran.code(), 0, "{log}{}", ran.text());
        ran.json()
    }
}

#[test]
fn io_over_two_paths_survives_path_loss_and_daemon_kill() {
    let mut target = TestTarget::start();
    let config = target.directory().join("nvmfd.toml");
    let one = target.config_text("").replace("port = 4420", "port = 4421");
    let second = format!("[[listener]]\naddress = \"{}\"\nport = 4421\n", target.address());
    let both = target.config_text(&second);
    fs::write(&config, &both).expect("written");
    target.take().stop(Instant::now() + Duration::from_secs(10));
    let daemon = Daemon::start(&config);
    while !target.nvmf("id-ctrl", &[]).text().contains("nvmfd") {
        thread::sleep(Duration::from_millis(100));
    }

    let (store, state) = (target.directory().join("disk1.img"), target.directory().join("state"));
    let state = state.to_str().expect("a path");
    let changes = || {
        let before = fs::read(&store).expect("the store");
        while fs::read(&store).expect("the store") == before {
            thread::sleep(Duration::from_millis(50));
        }
    };
    let load = ["--size", "8m", "--iodepth", "8", "--runtime", "600", "--state", state];
    let mut verify = OverPaths::start(&target, "verify", &load);
    changes();
    fs::write(&config, &one).expect("written");
    daemon.reload();
    verify.says(":4420: the target closed the connection");
    changes();
    daemon.kill();
    verify.says("requests wait");
    fs::write(&config, &both).expect("written");
    let daemon = Daemon::start(&config);
    verify.says("is live");
    verify.says("is live");
    changes();
    kill(Pid::from_raw(verify.0.id() as i32), Signal::SIGINT).expect("there");
    let found = verify.end();
    for name in ["violations", "failed", "lost"] {
        assert_eq!(found[name], 0, "{found:#}");
    }
    assert!(found["path_losses"].as_u64() >= Some(2), "{found:#}");
    target.nvmf("verify", &["--check", state]).good();

    let mut bench = OverPaths::start(&target, "bench", &["--iodepth", "8", "--runtime", "3"]);
    daemon.kill();
    let daemon = Daemon::start(&config);
    bench.says("is live");
    let found = bench.end();
    assert_eq!(found["jobs"][0]["error"], 0);
    assert!(found["jobs"][0]["read"]["total_ios"].as_u64() > Some(0), "{found:#}");
    daemon.kill();
}
