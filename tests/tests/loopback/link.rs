//! `nvmf link`: both ends as processes, and peers of the listening end that violate the protocol.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rdma::pool::{Pool, PoolPlan};
use rdma::soft::{Options, Soft};
use rdma::{Completion, Event, Fabric, Initiator, Qp, QpLimits, Reason, Wake, Work};
use serde_json::Value;

use crate::target::{HOST, HOSTID, Ran, SUBSYSTEM, TestTarget, nvmf, run};

const PORT: &str = "18515";
const LIMIT: Duration = Duration::from_secs(60);

/// A listening end at an address of its own.
struct Listener {
    child: Child,
    net: [u8; 2],
    lines: mpsc::Receiver<String>,
}

impl Listener {
    fn start() -> Listener {
        static NEXT: AtomicU8 = AtomicU8::new(0);
        // As the targets of other tests, and beside them.
        let [high, low] = (std::process::id() as u16).to_be_bytes();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let net = [192 + high.wrapping_add(number.wrapping_mul(61)) % 32, low];
        let mut command = Command::new(nvmf());
        let address = format!("127.{}.{}.1", net[0], net[1]);
        command.args(["link", "--listen", &address, "--provider", "soft"]);
        let mut child = command.stderr(Stdio::piped()).spawn().expect("nvmf runs");
        let stderr = child.stderr.take().expect("piped");
        let (tell, lines) = mpsc::channel();
        std::thread::spawn(move || {
            BufReader::new(stderr).lines().map_while(Result::ok).try_for_each(|it| tell.send(it))
        });
        let listener = Listener { child, net, lines };
        listener.says("listening at");
        listener
    }

    fn address(&self) -> String {
        format!("127.{}.{}.1", self.net[0], self.net[1])
    }

    /// Waits for a line with this text.
    fn says(&self, text: &str) -> String {
        let end = Instant::now() + LIMIT;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.lines.recv_timeout(left) {
                Ok(line) if line.contains(text) => return line,
                Ok(_) => {}
                Err(_) => panic!("no line with {text:?}"),
            }
        }
    }

    /// Tests the link from the host with this number.
    fn tested(&self, host: u8, more: &[&str]) -> Ran {
        let source = format!("127.{}.{}.{host}", self.net[0], self.net[1]);
        let to = self.address();
        run(&[&["link", "-a", &to, "-w", &source, "--provider", "soft"], more].concat())
    }

    /// Interrupts it; returns its exit code.
    fn interrupt(mut self) -> Option<i32> {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGINT).expect("it runs");
        self.child.wait().expect("it ends").code()
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn a_link_is_measured_for_each_operation_and_depth() {
    let listener = Listener::start();
    let more = ["--runtime", "100ms", "--bs", "10000", "--iodepth", "8", "-o", "json"];
    let report = listener.tested(2, &more).good().json();
    assert_eq!(report["address"], format!("{}:{PORT}", listener.address()));
    assert_eq!((&report["provider"], &report["size_bytes"]), (&"soft".into(), &10_000.into()));
    let results = report["results"].as_array().expect("a list");
    let kinds: Vec<(&str, u64)> = results.iter().map(kind).collect();
    let expected = ["send", "read", "write"].map(|operation| [(operation, 1), (operation, 8)]);
    assert_eq!(kinds, expected.concat());
    for result in results {
        let number = |key: &str| result[key].as_f64().expect("a number");
        assert!(number("operations") >= 1.0, "{result}");
        assert!(number("median_ns") > 0.0 && number("median_ns") <= number("p99_ns"), "{result}");
        assert!(number("p99_ns") <= number("max_ns"), "{result}");
        assert!(number("runtime_ns") >= 1e8, "{result}");
        let seconds = number("runtime_ns") / 1e9;
        let bytes = number("bytes_per_s") * seconds / number("operations");
        assert!((bytes - 10_000.0).abs() < 1.0, "{result}");
        let (operation, depth) = kind(result);
        // The listening end has answered at least what the other end has counted.
        let line = listener.says(&format!("{operation} of 10000 bytes, depth {depth}; closed"));
        let answered = line.split("operations").next().and_then(|it| it.split(' ').rev().nth(1));
        let answered: f64 = answered.and_then(|it| it.parse().ok()).expect("a number");
        assert!(answered >= number("operations"), "{line}, {result}");
    }
    let text = listener.tested(3, &["--runtime", "50ms", "--operation", "read"]).good();
    assert_eq!(text.text().lines().count(), 4, "{}", text.text());
    assert_eq!(listener.interrupt(), Some(0));
}

/// One packet, and several at every path MTU.
#[test]
fn immediate_data_are_measured_when_asked_for() {
    let listener = Listener::start();
    for (host, bytes) in [(2, "64"), (3, "10000")] {
        let operations = ["send-immediate", "write-immediate"];
        let list = operations.join(",");
        let more = ["--operation", &list, "--bs", bytes, "--iodepth", "8"];
        let more = [&more[..], &["--runtime", "100ms", "-o", "json"]].concat();
        let report = listener.tested(host, &more).good().json();
        let results = report["results"].as_array().expect("a list");
        let kinds: Vec<(&str, u64)> = results.iter().map(kind).collect();
        assert_eq!(kinds, operations.map(|operation| [(operation, 1), (operation, 8)]).concat());
        for result in results {
            assert!(result["operations"].as_u64() > Some(0), "{result}");
            let (operation, depth) = kind(result);
            listener
                .says(&format!("{operation} of {bytes} bytes, depth {depth}; closed by the peer"));
        }
    }
    assert_eq!(listener.interrupt(), Some(0));
}

fn kind(result: &Value) -> (&str, u64) {
    (result["operation"].as_str().expect("text"), result["iodepth"].as_u64().expect("a number"))
}

#[test]
fn a_link_test_reports_the_cause_of_errors() {
    let listener = Listener::start();
    let nothing = listener.tested(2, &["-s", "99"]);
    let failed = |ran: &Ran, code: i32, text: &str| {
        assert_eq!(ran.code(), code);
        assert!(ran.error().contains(text), "{}", ran.error());
    };
    failed(&nothing, 1, "nothing listens on port 99");
    for (option, value) in [("--bs", "7"), ("--bs", "2m"), ("--iodepth", "0"), ("--iodepth", "257")]
    {
        failed(&listener.tested(2, &[option, value]), 2, "--bs is 8 to 1m");
    }
    failed(&listener.tested(2, &["--bs", "1m", "--iodepth", "17"]), 2, "16 MiB");
    let host = ["-n", SUBSYSTEM, "-q", HOST, "-I", HOSTID, "-s", PORT, "--provider", "soft"];
    let source = format!("127.{}.{}.2", listener.net[0], listener.net[1]);
    let to = listener.address();
    let nvme = run(&[&["id-ctrl", "-a", &to, "-w", &source][..], &host].concat());
    failed(&nvme, 1, "what listens there may be no NVMe target");

    let target = TestTarget::start();
    let (at, from) = (target.address(), target.source());
    let link = ["link", "-a", &at, "-s", "4420", "-w", &from, "--provider", "soft"];
    failed(&run(&link), 1, "is no `nvmf link --listen`");
}

/// A peer that speaks as the test tells it to.
struct RawPeer {
    pool: Pool,
    fabric: Soft,
    /// Events that nobody has waited for yet: established, or gone for a reason.
    seen: Vec<(Qp, Option<Reason>)>,
    to: std::net::SocketAddr,
}

impl RawPeer {
    fn new(listener: &Listener, host: u8) -> RawPeer {
        let plan = PoolPlan::without_receives(1024, 1 << 20, 1 << 20);
        let pool = Pool::new(plan).expect("memory");
        let source = Some([127, listener.net[0], listener.net[1], host].into());
        let options = Options { source, ..Options::default() };
        let fabric = Soft::new(pool.region().clone(), options).expect("a fabric");
        let to = format!("{}:{PORT}", listener.address()).parse().expect("an address");
        RawPeer { pool, fabric, seen: Vec::new(), to }
    }

    /// Requests a connection for `read` of 4096 bytes with one outstanding operation.
    fn connect(&mut self) -> Qp {
        let mut test = *b"nvmflink\x01\0\x02\0\0\x10\0\0\x01\0\0\0";
        test[16] = 1;
        let limits = QpLimits { receives: 64, sends: 64, reads: 1 };
        let qp = self.fabric.connect(self.to, &test, limits).expect("a connection");
        for _ in 0..limits.receives {
            let buf = self.pool.take_cell().expect("a cell");
            self.fabric.post(qp, 0, Work::Recv(buf));
        }
        qp
    }

    fn send(&mut self, qp: Qp, message: &[u8]) {
        let mut from = self.pool.take_cell().expect("a cell");
        from.select(0, message.len() as u32);
        self.pool.bytes_mut(&mut from).copy_from_slice(message);
        self.fabric.post(qp, 0, Work::Send { from, invalidate: None });
    }

    /// Polls until there was an event of this queue pair: established, or gone for a reason.
    fn await_event(&mut self, qp: Qp, is_gone: bool) -> Option<Reason> {
        let end = Instant::now() + LIMIT;
        let mut batch = Vec::with_capacity(64);
        while Instant::now() < end {
            let found = |seen: &(Qp, Option<Reason>)| seen.0 == qp && seen.1.is_some() == is_gone;
            if let Some(index) = self.seen.iter().position(found) {
                return self.seen.swap_remove(index).1;
            }
            self.fabric.flush();
            self.fabric.poll(Instant::now(), &mut batch);
            for event in batch.drain(..) {
                match event {
                    Event::Done(Completion { work, .. }) => self.pool.give(work.into_buf()),
                    Event::Established(qp) => self.seen.push((qp, None)),
                    Event::Gone(qp, reason) => self.seen.push((qp, Some(reason))),
                    other => panic!("{other:?}"),
                }
            }
            let _ = self.fabric.arm(Wake::Any);
            std::thread::yield_now();
        }
        panic!("no such event");
    }

    fn established(&mut self, qp: Qp) {
        self.await_event(qp, false);
    }

    fn gone(&mut self, qp: Qp) -> Reason {
        self.await_event(qp, true).expect("a reason")
    }
}

#[test]
fn protocol_violations_close_only_their_connection() {
    let listener = Listener::start();
    let mut peer = RawPeer::new(&listener, 2);
    let request = |len: u32| {
        let mut bytes = [0; 16];
        bytes[12..].copy_from_slice(&len.to_le_bytes());
        bytes
    };
    let cases: [(&[u8], &str); 4] = [
        (&[0; 15], "a message of 15 bytes"),
        (&[0; 64], "a message of 64 bytes"),
        (&request(4097), "memory of 4097 bytes"),
        // No such memory: this end refuses the RDMA Read.
        (&request(4096), "refused access to its memory"),
    ];
    for (message, said) in cases {
        let qp = peer.connect();
        peer.established(qp);
        peer.send(qp, message);
        assert_eq!(peer.gone(qp), Reason::Peer, "{said}");
        listener.says(said);
        listener.says("0 operations read of 4096 bytes, depth 1; closed by this end");
    }
    listener.tested(3, &["--runtime", "20ms", "--operation", "read"]).good();
}

#[test]
fn a_listening_end_serves_four_connections_at_once() {
    let listener = Listener::start();
    let mut peer = RawPeer::new(&listener, 2);
    let open: Vec<Qp> = (0..4)
        .map(|_| {
            let qp = peer.connect();
            peer.established(qp);
            qp
        })
        .collect();
    let ran = listener.tested(3, &["--runtime", "20ms"]);
    assert_eq!(ran.code(), 1);
    assert!(ran.error().contains("serves as many tests as it can at once"), "{}", ran.error());
    peer.fabric.disconnect(open[0]);
    assert_eq!(peer.gone(open[0]), Reason::Local);
    listener.says("closed by the peer");
    // One depth is one connection: a second would need the place before it is free again.
    listener.tested(3, &["--runtime", "20ms", "--operation", "send", "--iodepth", "1"]).good();
    // Interrupted, it closes the others itself.
    assert_eq!(listener.interrupt(), Some(0));
    for qp in &open[1..] {
        assert_eq!(peer.gone(*qp), Reason::Peer);
    }
}
