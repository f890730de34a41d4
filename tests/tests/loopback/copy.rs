//! `nvmf copy`: what arrives is what was there, whatever happens on the way.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::judges::Daemon;
use crate::target::{HOST, HOSTID, Ran, SUBSYSTEM, TestTarget, nvmf, run};

const PART: usize = 256 << 10;

/// A namespace of the target, over a path from the source with this last digit.
fn namespace(target: &TestTarget, nsid: u32, from: u8) -> String {
    let source = target.source();
    let net = source.rsplit_once('.').expect("an address").0;
    format!("nvme://{}@{net}.{from}/{SUBSYSTEM}/{nsid}", target.address())
}

fn arguments<'a>(source: &'a str, target: &'a str) -> Vec<&'a str> {
    let host = ["--provider", "soft", "-q", HOST, "-I", HOSTID, "-k", "1", "-c", "1", "--json"];
    [&["copy", source, target][..], &host].concat()
}

fn copy(source: &str, target: &str, more: &[&str]) -> Ran {
    run(&[&arguments(source, target)[..], more].concat())
}

/// Parts of data, of zeros and of holes in turn, and an end that is no whole block.
fn image(path: &std::path::Path, parts: usize) -> Vec<u8> {
    let file = File::create(path).expect("created");
    let mut bytes = vec![0; parts * PART + 1000];
    let mut random = initiator::rng::Random::new(7);
    for (n, part) in bytes.chunks_mut(PART).enumerate() {
        if n % 3 == 0 {
            part.fill_with(|| random.next() as u8);
        }
        if n % 3 < 2 {
            file.write_all_at(part, (n * PART) as u64).expect("written");
        }
    }
    file.set_len(bytes.len() as u64).expect("possible");
    bytes
}

#[test]
fn copies_between_files_and_namespaces_preserve_holes() {
    let target = TestTarget::start();
    let path = |name: &str| target.directory().join(name).display().to_string();
    let (first, second) = (namespace(&target, 1, 2), namespace(&target, 2, 3));
    let bytes = image(&target.directory().join("image"), 3);
    let small = target.directory().join("small");
    fs::write(&small, &bytes[..3 * PART]).expect("written");

    // All of the namespace has other data before.
    let disk = File::options().write(true).open(target.directory().join("disk1.img"));
    disk.expect("there").write_all_at(&vec![0x5A; 64 << 20], 0).expect("written");
    let json = copy(&path("image"), &first, &["--verify"]).good().json();
    let number = |json: &Value, name: &str| json[name].as_u64().expect("a number");
    assert_eq!(number(&json, "size_bytes"), bytes.len() as u64);
    assert_eq!(number(&json, "data_bytes"), PART as u64 + 1000);
    assert_eq!(number(&json, "zero_bytes"), 2 * PART as u64);
    assert_eq!(number(&json, "compared_bytes"), bytes.len() as u64);
    let store = fs::read(target.directory().join("disk1.img")).expect("there");
    assert!(store[..bytes.len()] == bytes, "the store has other bytes");
    assert!(store[bytes.len().next_multiple_of(4096)..].iter().all(|byte| *byte == 0x5A));

    // 512 bytes to 4096, and back as a whole.
    copy(&path("small"), &second, &["--verify"]).good();
    copy(&second, &first, &["--verify"]).good();
    copy(&first, &path("back"), &["--verify"]).good();
    let back = fs::read(path("back")).expect("there");
    assert_eq!(back.len(), 64 << 20);
    assert!(back[..3 * PART] == bytes[..3 * PART], "other bytes came back");
    copy(&second, &path("sparse"), &[]).good();
    let metadata = fs::metadata(path("sparse")).expect("there");
    assert!(metadata.blocks() * 512 < metadata.len(), "{} sectors", metadata.blocks());

    // Mistakes are told before anything is written.
    for (source, to, code) in [
        (&first, &second, 2),
        (&first, &first, 2),
        (&first, &namespace(&target, 1, 3), 2),
        (&path("image"), &path("other"), 2),
        (&path("none"), &first, 1),
    ] {
        let ran = copy(source, to, &[]);
        assert_eq!(ran.code(), code, "{source} to {to}: {}", ran.error());
    }
}

/// Read commands of all hosts of a namespace, which are counted within a quarter of a second.
fn reads(target: &TestTarget, nsid: &str) -> u64 {
    let json = target.nvmf("smart-log", &["--namespace-id", nsid, "-o", "json"]).good().json();
    let count = json["host_read_commands"].to_string();
    count.trim_matches('"').parse().expect("a number")
}

#[test]
fn a_copy_reads_only_allocated_blocks_of_a_namespace() {
    let target = TestTarget::start();
    let back = target.directory().join("back");
    let source = namespace(&target, 1, 2);
    let mut bytes = vec![0; 64 << 20];
    bytes[9 * PART + 4096..9 * PART + 8192].fill(0x5A);
    bytes[200 * PART..201 * PART].fill(0x5B);
    let mut host = target.connect(1);
    for at in [9 * PART + 4096, 200 * PART] {
        let range = initiator::host::Range { nsid: 1, slba: at as u64 / 4096, block_bytes: 4096 };
        let len = bytes[at..].iter().take_while(|byte| **byte != 0).count();
        host.write(range, &bytes[at..at + len], false).expect("written");
    }
    host.disconnect();
    copy(&source, &back.display().to_string(), &[]).good();
    assert!(fs::read(&back).expect("there") == bytes, "other bytes were copied");
    while reads(&target, "1") < 2 {
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
    assert_eq!(reads(&target, "1"), 2, "parts with data");
    copy(&source, &back.display().to_string(), &["--verify"]).good();
}

/// A copy that says how far it is.
struct Running(Child, BufReader<std::process::ChildStderr>);

impl Running {
    fn start(source: &str, target: &str, state: &str) -> Running {
        let more = ["--state", state, "--progress", "json"];
        let mut child = Command::new(nvmf())
            .args([&arguments(source, target)[..], &more].concat())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("nvmf runs");
        let stderr = BufReader::new(child.stderr.take().expect("a pipe"));
        Running(child, stderr)
    }

    /// Waits until it has done more than so many bytes.
    fn passes(&mut self, bytes: u64) {
        let mut line = String::new();
        while self.1.read_line(&mut line).expect("text") > 0 {
            let json: Value = serde_json::from_str(&line).unwrap_or_default();
            if json["done_bytes"].as_u64() > Some(bytes) {
                return;
            }
            line.clear();
        }
        panic!("it has ended before");
    }

    fn end(mut self) -> Output {
        std::io::copy(&mut self.1, &mut std::io::sink()).expect("read");
        self.0.wait_with_output().expect("it ends")
    }
}

#[test]
fn an_interrupted_copy_resumes_and_survives_a_target_restart() {
    let mut target = TestTarget::start();
    let config = target.directory().join("nvmfd.toml");
    let limit = "[[qos]]\nname = 'slow'\nbandwidth = '2MiB'\nhosts = ['HOST']\n";
    let text = target.config_text(&limit.replace("HOST", HOST));
    fs::write(&config, text).expect("written");
    target.take().stop(std::time::Instant::now() + std::time::Duration::from_secs(10));
    let daemon = Daemon::start(&config);
    while !target.nvmf("id-ctrl", &[]).text().contains("nvmfd") {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let bytes = image(&target.directory().join("image"), 72);
    let path = |name: &str| target.directory().join(name).display().to_string();
    let (image, state) = (path("image"), path("state"));
    let to = namespace(&target, 1, 2);

    let mut running = Running::start(&image, &to, &state);
    running.passes(8 * PART as u64);
    kill(Pid::from_raw(running.0.id() as i32), Signal::SIGINT).expect("there");
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(3));
    let number = |output: &[u8], name: &str| {
        let json: Value = serde_json::from_slice(output).expect("JSON");
        json[name].as_u64().expect("a number")
    };
    let done = number(&ended.stdout, "done_bytes");
    assert!(done > 8 * PART as u64 && done < bytes.len() as u64, "{done}");

    let mut running = Running::start(&image, &to, &state);
    running.passes(done + 8 * PART as u64);
    daemon.kill();
    let daemon = Daemon::start(&config);
    let ended = running.end();
    assert_eq!(ended.status.code(), Some(0));
    assert_eq!(number(&ended.stdout, "resumed_at_bytes"), done);
    let store = fs::read(target.directory().join("disk1.img")).expect("there");
    assert!(store[..bytes.len()] == bytes, "the store has other bytes");
    assert!(fs::metadata(&state).is_err(), "the state is left behind");
    daemon.kill();
}

/// Whatever an earlier command has copied has to be there still.
#[test]
fn a_copy_to_a_file_that_was_made_anew_or_shortened_does_not_continue() {
    let mut target = TestTarget::start();
    let config = target.directory().join("nvmfd.toml");
    let limit = "[[qos]]\nname = 'slow'\nbandwidth = '16MiB'\nhosts = ['HOST']\n";
    fs::write(&config, target.config_text(&limit.replace("HOST", HOST))).expect("written");
    target.take().stop(std::time::Instant::now() + std::time::Duration::from_secs(10));
    // Of a hole nothing is read.
    let disk = File::options().write(true).open(target.directory().join("disk1.img"));
    disk.expect("there").write_all_at(&vec![0x5A; 64 << 20], 0).expect("written");
    let daemon = Daemon::start(&config);
    while !target.nvmf("id-ctrl", &[]).text().contains("nvmfd") {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let path = |name: &str| target.directory().join(name).display().to_string();
    let (from, to, state) = (namespace(&target, 1, 2), path("copy"), path("state"));
    let interrupted = || {
        let mut running = Running::start(&from, &to, &state);
        running.passes(PART as u64);
        kill(Pid::from_raw(running.0.id() as i32), Signal::SIGINT).expect("there");
        assert_eq!(running.end().status.code(), Some(3));
    };
    interrupted();
    interrupted();
    File::options().write(true).open(&to).expect("there").set_len(5).expect("possible");
    let ran = copy(&from, &to, &["--state", &state]);
    assert!(ran.code() == 1 && ran.error().contains("was shortened"), "{}", ran.error());
    fs::remove_file(&to).expect("there");
    let ran = copy(&from, &to, &["--state", &state]);
    assert!(ran.code() == 1 && ran.error().contains("made anew"), "{}", ran.error());
    daemon.kill();
}
