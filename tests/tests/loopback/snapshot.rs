//! Snapshots, clones and rollbacks of a namespace in a file, and `nvmf attach --snapshot`: a backup while
//! it is written to. They need a file system with reflinks: root makes an XFS or a btrfs on a loop
//! device; elsewhere nothing is tested.

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::{Host, HostOptions, Options, Provider};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvme::Nqn;
use serde_json::{Value, json};

use crate::lba_status::allocated;
use crate::target::{HOST, SUBSYSTEM, nvmf, nvmfd};

/// The identifier of the host, as that of connections of this process.
const HOSTID: &str = "07070707-0707-0707-0707-070707070707";
/// Bytes of the namespace, and of its blocks.
const BYTES: u64 = 1 << 20;
const BLOCK: u32 = 4096;

/// A file system on a loop device. It is unmounted when it is dropped.
struct FileSystem(tempfile::TempDir);

impl FileSystem {
    /// Made by this command. None: this user cannot make one.
    fn new(command: &[&str]) -> Option<FileSystem> {
        let directory = tempfile::tempdir().ok()?;
        let (image, point) = (directory.path().join("image"), directory.path().join("mounted"));
        fs::create_dir(&point).ok()?;
        fs::File::create(&image).ok()?.set_len(600 << 20).ok()?;
        let is_made = runs(Command::new(command[0]).args(&command[1..]).arg(&image))
            && runs(Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&point));
        if !is_made {
            println!("{} makes nothing that can be mounted here: nothing is tested", command[0]);
        }
        is_made.then_some(FileSystem(directory))
    }

    fn xfs() -> Option<FileSystem> {
        FileSystem::new(&["mkfs.xfs", "-q", "-m", "reflink=1"])
    }

    fn btrfs() -> Option<FileSystem> {
        FileSystem::new(&["mkfs.btrfs", "-q"])
    }

    /// No block of an empty file is copied on write from now on, nor of later files in a directory.
    fn set_nocow(&self, path: &str) {
        self.chattr("+C", path);
    }

    fn chattr(&self, change: &str, path: &str) {
        assert!(runs(Command::new("chattr").arg(change).arg(self.path().join(path))), "{path}");
    }

    fn has_cow(&self, path: &Path) -> bool {
        let said = Command::new("lsattr").arg("-d").arg(path).output().unwrap().stdout;
        !String::from_utf8(said).unwrap().split(' ').next().unwrap().contains('C')
    }

    fn path(&self) -> PathBuf {
        self.0.path().join("mounted")
    }
}

fn runs(command: &mut Command) -> bool {
    command.output().is_ok_and(|it| it.status.success())
}

impl Drop for FileSystem {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(self.path()).status();
    }
}

/// A daemon with a namespace in a file.
struct Daemon<'f> {
    system: &'f FileSystem,
    process: Child,
    /// The last byte of its address; those of hosts follow.
    address: u8,
}

impl Daemon<'_> {
    fn start(system: &FileSystem) -> Daemon<'_> {
        let (at, socket) = (system.path(), system.path().join("socket"));
        // Each test of a process has addresses of its own.
        static NEXT: AtomicU8 = AtomicU8::new(1);
        let own = NEXT.fetch_add(16, Ordering::Relaxed);
        let text = format!(
            "provider = \"soft\"\nstate_directory = {at:?}\n[management]\nsocket = {socket:?}\n\
             [memory]\nreceives = 2048\ndata = \"4MiB\"\n[[listener]]\naddress = \"{}\"\n\
             [[subsystem]]\nnqn = \"{SUBSYSTEM}\"\nhosts = [\"{HOST}\", \"{}\"]\n\
             [[subsystem.namespace]]\nnsid = 1\npath = {:?}\nsize = \"1MiB\"\n",
            address(own),
            other_host(),
            at.join("disk1.img"),
        );
        let image = fs::OpenOptions::new().create(true).append(true).open(at.join("disk1.img"));
        image.unwrap().set_len(BYTES).unwrap();
        let file = at.join("nvmfd.toml");
        fs::write(&file, text).unwrap();
        let process =
            Command::new(nvmfd()).arg("--config").arg(&file).stderr(Stdio::null()).spawn().unwrap();
        let daemon = Daemon { system, process, address: own };
        eventually("the daemon serves", || UnixStream::connect(daemon.socket()).is_ok());
        daemon
    }

    fn socket(&self) -> PathBuf {
        self.system.path().join("socket")
    }

    fn namespaces(&self) -> Vec<Value> {
        let found = request(&self.socket(), "GET", "/v1/namespaces", "");
        found.as_array().expect("a list").clone()
    }

    /// Files of temporary snapshots.
    fn snapshots(&self) -> Vec<PathBuf> {
        let all = fs::read_dir(self.system.path()).unwrap().map(|entry| entry.unwrap().path());
        all.filter(|path| path.to_string_lossy().contains(".attach-")).collect()
    }

    fn connect(&self, host: &str, source: u8) -> Host {
        let to = format!("{}:4420", address(self.address)).parse().unwrap();
        let nqn = |name: &str| Nqn::new(name).unwrap();
        let options = Options::new(to, nqn(SUBSYSTEM), nqn(host), [7; 16]);
        let source = Some(address(self.address + source).parse().unwrap());
        let setup = HostOptions { provider: Provider::Soft, source, ..HostOptions::default() };
        Host::connect(options, setup).expect("connected")
    }

    /// `nvmf attach --snapshot` that serves, and what it has logged.
    fn attach(&self) -> (Attached, String) {
        let mut child = Command::new(nvmf())
            .args(["attach", "--provider", "soft", "-a", &address(self.address)])
            .args(["-w", &address(self.address + 1)])
            .args(["-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID, "--snapshot", "--nbd"])
            .arg(self.system.path().join("nbd"))
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

/// `POST` to the namespace.
fn post(daemon: &Daemon<'_>, what: &str, body: &Value) -> Value {
    let path = format!("/v1/subsystems/{SUBSYSTEM}/namespaces/1/{what}");
    request(&daemon.socket(), "POST", &path, &body.to_string())
}

#[test]
fn snapshots_are_removed_at_exit_and_leftovers_are_reported() {
    let Some(xfs) = FileSystem::xfs() else { return };
    check_temporary_snapshots(&xfs);
}

#[test]
fn snapshots_on_btrfs_are_removed_at_exit_and_leftovers_are_reported() {
    let Some(btrfs) = FileSystem::btrfs() else { return };
    fs::File::create(btrfs.path().join("disk1.img")).unwrap();
    btrfs.set_nocow("disk1.img");
    check_temporary_snapshots(&btrfs);
}

fn check_temporary_snapshots(system: &FileSystem) {
    // A host that waits for a build of these would have no keep alive meanwhile.
    let _ = (nvmf(), nvmfd());
    let daemon = Daemon::start(system);
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

/// A file has checksums, and is copied on write, or neither; so may have its directory.
#[test]
fn btrfs_files_with_and_without_nocow_are_cloned_rolled_back_and_resized() {
    for has_cow in [true, false] {
        let Some(btrfs) = FileSystem::btrfs() else { return };
        for name in ["cow", "nocow"] {
            fs::create_dir(btrfs.path().join(name)).unwrap();
        }
        btrfs.set_nocow("nocow");
        let image = btrfs.path().join("disk1.img");
        fs::File::create(&image).unwrap();
        if !has_cow {
            btrfs.set_nocow("disk1.img");
            // Files there are compressed, which excludes that.
            btrfs.chattr("+c", "cow");
        }
        let _ = nvmfd();
        let daemon = Daemon::start(&btrfs);
        let mut host = daemon.connect(HOST, 3);
        let disk = Range { nsid: 1, slba: 0, block_bytes: BLOCK };
        let (old, new) = (vec![0x11; BYTES as usize], vec![0x22; BYTES as usize]);
        host.write(disk, &old[..BYTES as usize / 2], false).expect("written");
        host.write(Range { slba: 128, ..disk }, &old[..BYTES as usize / 2], true).expect("written");
        let copies = ["cow/copy", "nocow/copy"].map(|name| btrfs.path().join(name));
        for (path, writable) in copies.iter().zip([false, true]) {
            let made = post(&daemon, "snapshot", &json!({"path": path, "writable": writable}));
            assert!(made["paused_us"].is_u64(), "{made}");
            assert_eq!(btrfs.has_cow(path), has_cow, "as the file");
        }
        host.write(disk, &new, true).expect("written");
        assert!(contents(&mut host, 1) == new);
        // What is not known is reported as allocated.
        host.deallocate(1, 0, 16).expect("deallocated");
        let blocks = BYTES / u64::from(BLOCK);
        assert_eq!(allocated(&mut host, 1, 0, 4096), (vec![(0, blocks)], true));
        host.disconnect();
        assert!(copies.iter().all(|path| fs::read(path).unwrap() == old));

        let rolled_back = post(&daemon, "rollback", &json!({"path": copies[0]}));
        assert!(rolled_back["differences"].is_array(), "{rolled_back}");
        assert_eq!(btrfs.has_cow(&image), has_cow);
        let mut host = daemon.connect(HOST, 4);
        assert!(contents(&mut host, 1) == old);
        fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(2 * BYTES).unwrap();
        for (size, blocks) in [("2MiB", 2 * blocks), ("1MiB", blocks)] {
            let settings = json!({"size": size});
            let change = json!({"change": "set_namespace", "subsystem": SUBSYSTEM, "nsid": 1, "settings": settings});
            let changes = json!({"changes": [change]}).to_string();
            let changed = request(&daemon.socket(), "POST", "/v1/changes", &changes);
            assert!(changed["differences"].is_array(), "{changed}");
            assert_eq!(host.identify_namespace(1).expect("the page").nsze, blocks);
        }
        assert!(contents(&mut host, 1) == old);
        host.disconnect();
        // Files that are created from now on have no checksums.
        assert!(runs(Command::new("mount").args(["-o", "remount,nodatasum"]).arg(btrfs.path())));
        let made = post(&daemon, "snapshot", &json!({"path": btrfs.path().join("cow/late")}));
        match has_cow {
            true => {
                assert!(made["detail"].as_str().unwrap().contains("shares no blocks"), "{made}")
            }
            false => assert!(made["paused_us"].is_u64(), "{made}"),
        }
    }
}
