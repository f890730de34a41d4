//! `nvmf attach --nbd` that is killed and started again.

use std::io::{BufRead, BufReader, Lines, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::{Child, ChildStderr, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use nvmfd::core::diag::cause::Cause;

use crate::target::{HOST, HOSTID, SUBSYSTEM, TestTarget, nvmf};

/// Bytes of a block of the namespace in memory: its writes carry their data in the capsule.
const BLOCK: usize = 512;

/// A process that serves the namespace in memory. It is killed when this is dropped.
struct Attached {
    child: Child,
    /// Its log, open as long as it runs.
    _log: Lines<BufReader<ChildStderr>>,
}

impl Attached {
    /// Messages to the service manager go to `nbd.notify`.
    fn start(target: &TestTarget, socket: &Path) -> Attached {
        let mut child = Command::new(nvmf())
            .args(["attach", "--provider", "soft", "-a", &target.address(), "-w", &target.source()])
            .args(["-n", SUBSYSTEM, "--namespace-id", "2", "-q", HOST, "-I", HOSTID, "-k", "3"])
            .arg("--nbd")
            .arg(socket)
            .env("NOTIFY_SOCKET", socket.with_extension("notify"))
            .stderr(Stdio::piped())
            .spawn()
            .expect("nvmf runs");
        let mut lines = BufReader::new(child.stderr.take().expect("a pipe")).lines();
        let is_there = |line: std::io::Result<String>| line.expect("text").contains("is served at");
        assert!(lines.any(is_there), "it has ended");
        Attached { child, _log: lines }
    }
}

impl Drop for Attached {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A client with the export, whose size is not looked at.
fn client(socket: &Path) -> UnixStream {
    let mut client = UnixStream::connect(socket).expect("it listens");
    client.read_exact(&mut [0; 18]).expect("a greeting");
    let flags = 3u32.to_be_bytes();
    let name = [&b"IHAVEOPT"[..], &1u32.to_be_bytes(), &0u32.to_be_bytes()].concat();
    client.write_all(&[&flags[..], &name].concat()).expect("sent");
    client.read_exact(&mut [0; 10]).expect("the export");
    client
}

/// Requests to read (0) or write (1) the first block.
fn request(client: &mut UnixStream, kind: u16, data: &[u8]) {
    let head = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &kind.to_be_bytes(), &[0; 16]].concat();
    let len = (BLOCK as u32).to_be_bytes();
    client.write_all(&[&head[..], &len, data].concat()).expect("sent");
}

fn answered(client: &mut UnixStream) {
    let mut reply = [0; 16];
    client.read_exact(&mut reply).expect("a reply");
    assert_eq!(reply[4..8], [0; 4], "success");
}

/// The writes of the killed process wait in the target for their limit; it is not known to be gone
/// before its keep alive timeout.
#[test]
fn writes_of_a_killed_process_never_follow_those_of_its_successor() {
    let limit = "[[qos]]\nname = 'slow'\niops = 5\nburst_ms = 0\nhosts = ['HOST']\n";
    let target = TestTarget::start_with(&limit.replace("HOST", HOST));
    let socket = target.directory().join("nbd.sock");
    let killed = Attached::start(&target, &socket);
    let mut earlier = client(&socket);
    (0..40).for_each(|_| request(&mut earlier, 1, &[1; BLOCK]));
    answered(&mut earlier);
    drop(killed);

    let manager = UnixDatagram::bind(socket.with_extension("notify")).expect("bound");
    let mut next = Attached::start(&target, &socket);
    let mut message = [0; 64];
    let len = manager.recv(&mut message).expect("a message to the service manager");
    let extended = message[..len].strip_prefix(b"EXTEND_TIMEOUT_USEC=").expect("before all others");
    let extended: u64 = str::from_utf8(extended).unwrap().trim_end().parse().expect("a number");
    // More than the keep alive timeout of three seconds, and the margin.
    assert!(extended > 13_000_000, "{extended}");
    let mut later = client(&socket);
    request(&mut later, 1, &[2; BLOCK]);
    answered(&mut later);
    while target.told(Cause::KeepAlive).is_empty() {
        std::thread::sleep(Duration::from_millis(100));
    }
    let mut block = [0; BLOCK];
    request(&mut later, 0, &[]);
    answered(&mut later);
    later.read_exact(&mut block).expect("data");
    assert_eq!(block, [2; BLOCK], "the last write that was acknowledged");
    kill(Pid::from_raw(next.child.id() as i32), Signal::SIGTERM).expect("there");
    assert!(next.child.wait().expect("it ends").success());
}

/// A client with structured replies and `base:allocation`.
fn client_with_block_status(socket: &Path) -> UnixStream {
    let mut client = UnixStream::connect(socket).expect("it listens");
    client.read_exact(&mut [0; 18]).expect("a greeting");
    client.write_all(&3u32.to_be_bytes()).expect("sent");
    let name = b"base:allocation";
    let contexts = [&[0; 4], &1u32.to_be_bytes(), &15u32.to_be_bytes(), &name[..]].concat();
    for (option, data) in [(8u32, &[][..]), (10, &contexts), (7, &[0; 6])] {
        let head = [&b"IHAVEOPT"[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        client.write_all(&[&head.concat(), data].concat()).expect("sent");
        loop {
            let mut reply = [0; 20];
            client.read_exact(&mut reply).expect("a reply");
            let number = |at: usize| u32::from_be_bytes(*reply[at..].first_chunk().unwrap());
            client.read_exact(&mut vec![0; number(16) as usize]).expect("its data");
            assert!(number(12) < 1 << 31, "refused: {option}");
            if number(12) == 1 {
                break;
            }
        }
    }
    client
}

/// The lengths and flags of the extents of all of the namespace in memory.
fn block_status(client: &mut UnixStream) -> Vec<(u32, u32)> {
    let head = [&0x2560_9513u32.to_be_bytes()[..], &[0; 2], &7u16.to_be_bytes(), &[0; 16]].concat();
    client.write_all(&[&head[..], &(1u32 << 20).to_be_bytes()].concat()).expect("sent");
    let mut reply = [0; 24];
    client.read_exact(&mut reply).expect("a reply");
    let number = |bytes: &[u8]| u32::from_be_bytes(*bytes.first_chunk().expect("4 bytes"));
    assert_eq!((number(&reply[4..]), number(&reply[20..])), (1 << 16 | 5, 1), "{reply:?}");
    let mut extents = vec![0; number(&reply[16..]) as usize - 4];
    client.read_exact(&mut extents).expect("extents");
    extents.chunks(8).map(|it| (number(it), number(&it[4..]))).collect()
}

#[test]
fn block_status_has_the_holes_of_the_target_and_no_block_that_was_written() {
    const DATA: u32 = 0;
    const HOLE: u32 = 3;
    let target = TestTarget::start();
    let socket = target.directory().join("nbd.sock");
    let _attached = Attached::start(&target, &socket);
    let (mut client, mut writer) = (client_with_block_status(&socket), self::client(&socket));
    assert_eq!(block_status(&mut client), [(1 << 20, HOLE)]);
    request(&mut writer, 1, &[1; BLOCK]);
    answered(&mut writer);
    assert_eq!(block_status(&mut client), [(4096, DATA), ((1 << 20) - 4096, HOLE)]);
    let mut host = target.connect_elsewhere(1);
    host.deallocate(2, 0, 8).expect("deallocated");
    assert_eq!(block_status(&mut client), [(1 << 20, HOLE)]);
    host.disconnect();
}
