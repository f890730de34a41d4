//! `nvmf attach --snapshot`: a backup of a namespace in a file while it is written to. It needs a file
//! system with reflinks: root makes an XFS on a loop device; elsewhere nothing is tested.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::{Host, HostOptions, Options, Provider};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvme::Nqn;
use serde_json::{Value, json};

use crate::target::{HOST, SUBSYSTEM, nvmf, nvmfd};

/// The identifier of the host, as that of connections of this process.
const HOSTID: &str = "07070707-0707-0707-0707-070707070707";
/// Bytes of the namespace, and of its blocks.
const BYTES: u64 = 1 << 20;
const BLOCK: u32 = 4096;

/// An XFS on a loop device. It is unmounted when it is dropped.
struct Xfs(tempfile::TempDir);

impl Xfs {
    /// None: this user cannot make one.
    fn new() -> Option<Xfs> {
        let directory = tempfile::tempdir().ok()?;
        let (image, point) = (directory.path().join("image"), directory.path().join("mounted"));
        fs::create_dir(&point).ok()?;
        fs::File::create(&image).ok()?.set_len(600 << 20).ok()?;
        let runs = |command: &mut Command| command.output().is_ok_and(|it| it.status.success());
        let is_made = runs(Command::new("mkfs.xfs").args(["-q", "-m", "reflink=1"]).arg(&image))
            && runs(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point));
        if !is_made {
            println!("no XFS can be mounted here: nothing is tested");
        }
        is_made.then_some(Xfs(directory))
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mounted")
    }
}

impl Drop for Xfs {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// A daemon with a namespace in a file.
struct Daemon<'x> {
    xfs: &'x Xfs,
    process: Child,
}

impl Daemon<'_> {
    fn start(xfs: &Xfs) -> Daemon<'_> {
        let (at, socket) = (xfs.path(), xfs.path().join("socket"));
        let text = format!(
            "provider = \"soft\"\nstate_directory = {at:?}\n[management]\nsocket = {socket:?}\n\
             [memory]\nreceives = 2048\ndata = \"4MiB\"\n[[listener]]\naddress = \"{}\"\n\
             [[subsystem]]\nnqn = \"{SUBSYSTEM}\"\nhosts = [\"{HOST}\", \"{}\"]\n\
             [[subsystem.namespace]]\nnsid = 1\npath = {:?}\nsize = \"1MiB\"\n",
            address(1),
            other_host(),
            at.join("disk1.img"),
        );
        fs::File::create(at.join("disk1.img")).unwrap().set_len(BYTES).unwrap();
        let file = at.join("nvmfd.toml");
        fs::write(&file, text).unwrap();
        let process =
            Command::new(nvmfd()).arg("--config").arg(&file).stderr(Stdio::null()).spawn().unwrap();
        let daemon = Daemon { xfs, process };
        eventually("the daemon serves", || UnixStream::connect(daemon.socket()).is_ok());
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.xfs.path().join("socket")
    }

    fn namespaces(&self) -> Vec<Value> {
        let found = request(&self.socket(), "GET", "/v1/namespaces", "");
        found.as_array().expect("a list").clone()
    }

    /// Files of temporary snapshots.
    fn snapshots(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.xfs.path()).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.to_string_lossy().contains(".attach-")).collect()
    }

    fn connect(&self, host: &str, source: u8) -> Host {
        let to = format!("{}:4420", address(1)).parse().unwrap();
        let nqn = |name: &str| Nqn::new(name).unwrap();
        let options = Options::new(to, nqn(SUBSYSTEM), nqn(host), [7; 16]);
        let source = Some(address(source).parse().unwrap());
        let setup = HostOptions { provider: Provider::Soft, source, ..HostOptions::default() };
        Host::connect(options, setup).expect("connected")
    }

    /// `nvmf attach --snapshot` that serves, and what it has logged.
    fn attach(&self) -> (Attached, String) {
        let mut child = Command::new(nvmf())
            .args(["attach", "--provider", "soft", "-a", &address(1), "-w", &address(2)])
            .args(["-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID, "--snapshot", "--nbd"])
            .arg(self.xfs.path().join("nbd"))
            .env("NVMFD_SOCKET", self.socket())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = String::new();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        while !log.contains("is served at") {
            let line = lines.next().unwrap_or_else(|| panic!("it ends: {log}")).unwrap();
            log += &line;
            log.push('\n');
        }
        // What it logs later goes nowhere, and does not end it.
        std::thread::spawn(move || lines.for_each(drop));
        (Attached(child), log)
    }
}

/// A process that serves a snapshot. It is killed when it is dropped.
struct Attached(Child);

impl Attached {
    /// Ends it by a signal; returns its exit code.
    fn end(mut self, signal: Signal) -> Option<i32> {
        kill(Pid::from_raw(self.0.id() as i32), signal).unwrap();
        self.0.wait().unwrap().code()
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Daemon<'_> {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn other_host() -> String {
    HOST.replace("2d1c", "3e2d")
}

/// An address of this process.
fn address(last: u8) -> String {
    let [high, low] = (std::process::id() as u16).to_be_bytes();
    format!("127.{}.{low}.{last}", 64 + high % 128)
}

fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn request(socket: &Path, method: &str, path: &str, body: &str) -> Value {
    let mut stream = UnixStream::connect(socket).unwrap();
    let length = body.len();
    let head = "Host: x\r\nConnection: close\r\nContent-Type: application/json";
    write!(stream, "{method} {path} HTTP/1.1\r\n{head}\r\nContent-Length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (_, body) = answer.split_once("\r\n\r\n").expect("an answer");
    serde_json::from_str(body).unwrap_or_else(|error| panic!("{error}: {answer}"))
}

fn contents(host: &mut Host, nsid: u32) -> Vec<u8> {
    let mut bytes = vec![0; BYTES as usize];
    host.read(Range { nsid, slba: 0, block_bytes: BLOCK }, &mut bytes).expect("read");
    bytes
}

#[test]
fn snapshots_are_removed_at_exit_and_leftovers_are_reported() {
    let Some(xfs) = Xfs::new() else { return };
    // A host that waits for a build of these would have no keep alive meanwhile.
    let _ = (nvmf(), nvmfd());
    let daemon = Daemon::start(&xfs);
    let mut host = daemon.connect(HOST, 3);
    let disk = Range { nsid: 1, slba: 0, block_bytes: BLOCK };
    let (old, new) = (vec![0x11; BYTES as usize], vec![0x22; BYTES as usize]);
    host.write(disk, &old, false).expect("written");

    let (attached, _) = daemon.attach();
    host.write(disk, &new, false).expect("written");
    let all = daemon.namespaces();
    assert_eq!((all.len(), daemon.snapshots().len()), (2, 1));
    let expected = [json!(2), json!(true), json!([HOST])];
    assert_eq!(
        [&all[1]["nsid"], &all[1]["read_only"], &all[1]["hosts"]].map(Value::clone),
        expected
    );
    // A host that connects sees the contents of that moment, another one no such namespace.
    let mut reader = daemon.connect(HOST, 4);
    assert!(contents(&mut reader, 2) == old && contents(&mut reader, 1) == new);
    reader.disconnect();
    let mut other = daemon.connect(&other_host(), 5);
    let found = other.namespaces(0, None).expect("a list");
    assert_eq!(found, [1]);
    other.disconnect();

    assert_eq!(attached.end(Signal::SIGTERM), Some(0));
    assert_eq!((daemon.namespaces().len(), daemon.snapshots().len()), (1, 0));

    // A kill leaves both, which the next one names.
    let (killed, _) = daemon.attach();
    assert_eq!(killed.end(Signal::SIGKILL), None);
    let left = daemon.snapshots().remove(0);
    let (next, log) = daemon.attach();
    let named = format!("namespace 2 serves {}", left.display());
    assert!(log.contains(&named), "{log}");
    assert_eq!(next.end(Signal::SIGTERM), Some(0));
    assert_eq!(daemon.snapshots(), std::slice::from_ref(&left), "that of the other one stays");
    // What it names removes the rest.
    let remove = json!({"path": left}).to_string();
    let refused = request(&daemon.socket(), "POST", "/v1/snapshots/remove", &remove);
    assert!(refused["detail"].as_str().unwrap().ends_with("is served"), "{refused}");
    let change = json!({"change": "remove_namespace", "subsystem": SUBSYSTEM, "nsid": 2});
    let changes = json!({"changes": [change]}).to_string();
    request(&daemon.socket(), "POST", "/v1/changes", &changes);
    request(&daemon.socket(), "POST", "/v1/snapshots/remove", &remove);
    assert_eq!(daemon.snapshots().len(), 0);
    // The first connection has had no keep alive meanwhile.
    drop(host);
    let mut host = daemon.connect(HOST, 6);
    assert!(contents(&mut host, 1) == new);
    assert_eq!(host.identify_namespace(2).expect("the page").nsze, 0);
    host.disconnect();
}
