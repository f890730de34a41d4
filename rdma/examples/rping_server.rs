//! The server side of `rping` (package rdmacm-utils) on the verbs provider: shows that the RDMA
//! Reads, Writes and Sends of another program interoperate with ours, and that every buffer is
//! returned. `rping_guest.sh` in this directory runs all its modes.
//!
//! One round: the client sends {address, key, length} of its source; the server Reads it and
//! answers; the client sends the same of its sink; the server Writes what it has read and answers.
//! All numbers are big-endian.
//!
//! Options: `elsewhere` accepts on one fabric and serves on another, `reject` refuses every
//! request, `hang-up` disconnects after ten rounds, `slow` delays before it accepts, `deep`
//! requests queues of 2000.

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma::pool::{Pool, PoolPlan};
use rdma::verbs::{Load, Verbs, owns};
use rdma::{Buf, Completion, Event, Fabric, Fault, Incoming, Qp, QpLimits, Remote, Wake, Work};

const MESSAGE: u32 = 16;
/// The client may answer before we see our own completions, so there is room for two rounds.
const LIMITS: QpLimits = QpLimits { receives: 4, sends: 8, reads: 16 };
const DEEP: QpLimits = QpLimits { receives: 2000, sends: 2000, reads: 16 };
const PLAN: PoolPlan = PoolPlan::without_receives(256, 8 << 20, 1 << 20);

struct Server {
    pool: Pool,
    fabric: Verbs,
    /// Data of the current round and number of rounds, by client.
    clients: HashMap<Qp, (Option<Buf>, u32)>,
    served: u32,
    options: Vec<String>,
}

impl Server {
    fn option(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }

    fn incoming(&mut self, incoming: Incoming) {
        let Incoming { local, remote, reads, .. } = incoming;
        if self.served == 0 && self.clients.is_empty() {
            let private: u32 = incoming.private_data.iter().map(|byte| u32::from(*byte)).sum();
            println!("{remote} -> {local}, answers {reads} reads, private data sum {private}");
        }
        if self.option("reject") {
            self.served += 1;
            return self.fabric.reject(incoming, b"not today");
        }
        if self.option("slow") {
            std::thread::sleep(Duration::from_secs(1));
        }
        let limits = if self.option("deep") { DEEP } else { LIMITS };
        match self.fabric.open(incoming, limits) {
            Ok(qp) => {
                self.clients.insert(qp, (None, 0));
                (0..LIMITS.receives).for_each(|_| self.receive(qp));
                self.fabric.accept(qp, b"hello");
            }
            Err(e) => {
                self.served += 1;
                println!("refused: {e}");
            }
        }
    }

    fn receive(&mut self, qp: Qp) {
        let buf = self.pool.take_cell().expect("a cell");
        self.fabric.post(qp, 0, Work::Recv(buf));
    }

    fn answer(&mut self, qp: Qp) {
        let mut from = self.pool.take_cell().expect("a cell");
        from.select(0, MESSAGE);
        self.pool.bytes_mut(&mut from).fill(0);
        self.fabric.post(qp, 3, Work::Send { from, invalidate: None });
    }

    fn done(&mut self, Completion { qp, work, outcome, .. }: Completion) {
        if let Err(fault) = outcome {
            self.pool.give(work.into_buf());
            if fault != Fault::Flushed {
                println!("{qp:?}: {fault}");
            }
            return self.fabric.disconnect(qp);
        }
        let client = self.clients.entry(qp).or_default();
        match work {
            Work::Recv(buf) => {
                let m = &self.pool.bytes(&buf)[..16];
                let remote = Remote {
                    addr: u64::from_be_bytes(m[..8].try_into().unwrap()),
                    key: u32::from_be_bytes(m[8..12].try_into().unwrap()),
                    len: u32::from_be_bytes(m[12..].try_into().unwrap()),
                };
                self.pool.give(buf);
                let data = client.0.take();
                self.receive(qp);
                if let Some(from) = data {
                    // The write and the answer share one doorbell.
                    self.fabric.post(qp, 2, Work::Write { from, to: remote });
                    return self.answer(qp);
                }
                let into = self.pool.take_data(remote.len).expect("room for the data");
                self.fabric.post(qp, 1, Work::Read { into, from: remote });
            }
            Work::Read { into, .. } => {
                client.0 = Some(into);
                self.answer(qp);
            }
            Work::Send { from, .. }
            | Work::SendImmediate { from, .. }
            | Work::WriteImmediate { from, .. } => self.pool.give(from),
            Work::Write { from, .. } => {
                self.pool.give(from);
                client.1 += 1;
                if client.1 == 10 && self.option("hang-up") {
                    self.fabric.disconnect(qp);
                }
            }
        }
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done(done) => self.done(done),
            Event::Incoming(incoming) => self.incoming(incoming),
            Event::Established(_) => {}
            Event::ListenerLost(at) => panic!("{at} has no device any more"),
            Event::Gone(qp, reason) => {
                let (data, rounds) = self.clients.remove(&qp).unwrap_or_default();
                data.into_iter().for_each(|buf| self.pool.give(buf));
                self.served += 1;
                let home = !self.clients.is_empty() || self.pool.is_full();
                assert!(home, "buffers lost: {:?}", self.pool.free());
                if self.served < 9 || self.served.is_multiple_of(50) {
                    let n = self.served;
                    println!("client {n}: {rounds} rounds, {reason:?}, {} fds", fds());
                }
            }
        }
    }
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Sleeps until there is something to poll, or until the deadline of a fabric.
fn sleep(fabrics: &[&Verbs], until: Option<Instant>) {
    let fds = fabrics.iter().map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN));
    let left = until.map(|at| at.saturating_duration_since(Instant::now()).as_millis() as u16 + 1);
    let _ = poll(&mut fds.collect::<Vec<_>>(), left.map_or(PollTimeout::NONE, PollTimeout::from));
}

fn run(at: SocketAddr, clients: u32, options: Vec<String>) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PLAN)?;
    let fabric = Verbs::new(pool.region().clone(), Load::default())?;
    println!("devices {:?}, {} owned by one: {}", fabric.devices(), at.ip(), owns(at));
    let mut server = Server { pool, fabric, clients: HashMap::new(), served: 0, options };
    let elsewhere = server
        .option("elsewhere")
        .then(|| Verbs::new(server.pool.region().clone(), Load::default()));
    let mut door = elsewhere.transpose()?;
    door.as_mut().unwrap_or(&mut server.fabric).listen(at)?;
    println!("listening on {at}, {} fds", fds());
    let (mut batch, mut deadline, mut armed) = (Vec::with_capacity(32), None, false);
    while server.served < clients {
        let now = Instant::now();
        server.fabric.poll(now, &mut batch);
        door.iter_mut().for_each(|door| door.poll(now, &mut batch));
        let idle = batch.is_empty();
        batch.drain(..).for_each(|event| server.event(event));
        server.fabric.flush();
        if idle && armed {
            sleep(&door.iter().chain([&server.fabric]).collect::<Vec<_>>(), deadline);
        } else if idle {
            deadline = door
                .iter_mut()
                .chain([&mut server.fabric])
                .filter_map(|fabric| fabric.arm(Wake::Any))
                .min();
        }
        armed = idle && !armed;
    }
    println!("done: {:?}, {} fds", server.fabric, fds());
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let at = arguments.next().and_then(|at| at.parse().ok());
    let clients = arguments.next().and_then(|n| n.parse().ok());
    let (Some(at), Some(clients)) = (at, clients) else {
        eprintln!("usage: rping_server ADDRESS:PORT CLIENTS [elsewhere|reject|hang-up|slow|deep]");
        return ExitCode::from(2);
    };
    run(at, clients, arguments.collect()).map_or_else(
        |e| {
            eprintln!("{e}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}
