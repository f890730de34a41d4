//! The server side of `rping` (package rdmacm-utils) on the verbs provider: proof that another
//! program's RDMA Reads, Writes and Sends agree with ours, and that every buffer comes home.
//!
//! ```text
//! rping_server ADDRESS:PORT CLIENTS [listen-elsewhere] [reject] [hang-up]
//! rping -c -a ADDRESS -p PORT -C 100 -v -V
//! ```
//!
//! One round: the client sends {address, key, length} of its source; we Read it and answer; it
//! sends the same of its sink; we Write what we have read and answer. All numbers big-endian.
//! `listen-elsewhere` accepts on one fabric and serves on another, `reject` refuses every request,
//! `hang-up` disconnects after ten rounds with receives posted.

use std::collections::HashMap;
use std::error::Error;
use std::net::SocketAddr;
use std::os::fd::AsFd;
use std::process::ExitCode;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma::pool::{Pool, PoolPlan};
use rdma::verbs::{Verbs, owns};
use rdma::{Buf, Completion, Event, Fabric, Fault, Incoming, Qp, QpLimits, Remote, Work};

const MESSAGE: u32 = 16;
const RECEIVES: u32 = 4;
/// The client may answer before we see our own completions, so there is room for two rounds.
const LIMITS: QpLimits = QpLimits { receives: RECEIVES, sends: 8, reads: 16 };

/// One client: what it advertises next, and the data of the round.
#[derive(Default)]
struct Client {
    data: Option<Buf>,
    rounds: u32,
}

struct Server {
    pool: Pool,
    fabric: Verbs,
    clients: HashMap<Qp, Client>,
    served: u32,
    options: Vec<String>,
}

impl Server {
    fn option(&self, name: &str) -> bool {
        self.options.iter().any(|option| option == name)
    }

    fn incoming(&mut self, incoming: Incoming) {
        let (local, remote, reads) = (incoming.local, incoming.remote, incoming.reads);
        if self.option("reject") {
            self.served += 1;
            if self.served == 1 {
                println!(
                    "reject {remote} -> {local}, {reads} reads, private {:02x?}",
                    incoming.private_data
                );
            }
            return self.fabric.reject(incoming, b"not today");
        }
        let qp = match self.fabric.open(incoming, LIMITS) {
            Ok(qp) => qp,
            Err(e) => return println!("refused: {e}"),
        };
        if self.served == 0 {
            println!("first {qp:?} {remote} -> {local}, answers {reads} reads");
        }
        for _ in 0..RECEIVES {
            self.receive(qp);
        }
        self.fabric.accept(qp, b"hello");
        self.clients.insert(qp, Client::default());
    }

    fn receive(&mut self, qp: Qp) {
        if let Some(buf) = self.pool.take_cell() {
            self.fabric.post(qp, 0, Work::Recv(buf));
        }
    }

    fn done(&mut self, done: Completion) {
        let Completion { qp, work, outcome, .. } = done;
        match outcome {
            Ok(len) => self.step(qp, work, len),
            Err(fault) => {
                self.pool.give(work.into_buf());
                if fault != Fault::Flushed {
                    println!("{qp:?}: {fault}");
                    self.fabric.disconnect(qp);
                }
            }
        }
    }

    fn step(&mut self, qp: Qp, work: Work, len: u32) {
        match work {
            Work::Recv(buf) => {
                assert_eq!(len, MESSAGE);
                let m = &self.pool.bytes(&buf)[..16];
                let remote = Remote {
                    addr: u64::from_be_bytes(m[..8].try_into().unwrap()),
                    key: u32::from_be_bytes(m[8..12].try_into().unwrap()),
                    len: u32::from_be_bytes(m[12..].try_into().unwrap()),
                };
                self.pool.give(buf);
                self.receive(qp);
                match self.clients.entry(qp).or_default().data.take() {
                    None => {
                        let into = self.pool.take_data(remote.len).expect("room for the data");
                        self.fabric.post(qp, 1, Work::Read { into, from: remote });
                    }
                    Some(from) => {
                        // Written and answered under one doorbell.
                        self.fabric.post(qp, 2, Work::Write { from, to: remote });
                        self.answer(qp);
                    }
                }
            }
            Work::Read { into, .. } => {
                self.clients.entry(qp).or_default().data = Some(into);
                self.answer(qp);
            }
            Work::Send { from, .. } => self.pool.give(from),
            Work::Write { from, .. } => {
                self.pool.give(from);
                let client = self.clients.entry(qp).or_default();
                client.rounds += 1;
                if client.rounds == 10 && self.option("hang-up") {
                    self.fabric.disconnect(qp);
                }
            }
        }
    }

    fn answer(&mut self, qp: Qp) {
        let mut from = self.pool.take_cell().expect("a cell");
        from.select(0, MESSAGE);
        self.pool.bytes_mut(&mut from).fill(0);
        self.fabric.post(qp, 3, Work::Send { from, invalidate: None });
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done(done) => self.done(done),
            Event::Incoming(incoming) => self.incoming(incoming),
            Event::Established(_) => {}
            Event::Gone(qp, reason) => {
                let client = self.clients.remove(&qp).unwrap_or_default();
                if let Some(data) = client.data {
                    self.pool.give(data);
                }
                self.served += 1;
                let (full, fds) = (self.pool.is_full() || !self.clients.is_empty(), fds());
                assert!(full, "buffers lost: {:?}", self.pool.free());
                if self.served.is_power_of_two() || self.served.is_multiple_of(50) {
                    let (n, rounds) = (self.served, client.rounds);
                    println!("client {n}: {rounds} rounds, {reason:?}, pool full, {fds} fds");
                }
            }
        }
    }
}

fn fds() -> usize {
    std::fs::read_dir("/proc/self/fd").map_or(0, Iterator::count)
}

/// Until something can be polled, or the fabrics' own deadline.
fn sleep(fabrics: &[&Verbs], until: Option<Instant>) {
    let mut fds: Vec<PollFd> =
        fabrics.iter().map(|f| PollFd::new(f.as_fd(), PollFlags::POLLIN)).collect();
    let wait = until.map_or(PollTimeout::NONE, |at| {
        let left = at.saturating_duration_since(Instant::now()).as_millis() as u64 + 1;
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    let _ = poll(&mut fds, wait);
}

fn run(at: SocketAddr, clients: u32, options: Vec<String>) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PoolPlan {
        cells: 64,
        receives: 0,
        lead_bytes: 0,
        tail_bytes: 0,
        data_bytes: 8 << 20,
        largest_bytes: 1 << 20,
    })?;
    let fabric = Verbs::new(pool.region())?;
    println!("devices {:?}, {} owned by one: {}", fabric.devices(), at.ip(), owns(at.ip()));
    let mut door = match options.iter().any(|option| option == "listen-elsewhere") {
        true => Some(Verbs::new(pool.region())?),
        false => None,
    };
    let mut server = Server { pool, fabric, clients: HashMap::new(), served: 0, options };
    match &mut door {
        Some(door) => door.listen(at)?,
        None => server.fabric.listen(at)?,
    }
    println!("listening on {at}, {} fds", fds());
    let mut batch = Vec::with_capacity(32);
    let (mut armed, mut deadline) = (false, None);
    while server.served < clients {
        let now = Instant::now();
        server.fabric.poll(now, &mut batch);
        door.iter_mut().for_each(|door| door.poll(now, &mut batch));
        if !batch.is_empty() {
            batch.drain(..).for_each(|event| server.event(event));
            server.fabric.flush();
            armed = false;
        } else if armed {
            let both: Vec<&Verbs> = door.iter().chain([&server.fabric]).collect();
            sleep(&both, deadline);
            armed = false;
        } else {
            if let Some(door) = &mut door {
                door.arm();
            }
            deadline = server.fabric.arm();
            armed = true;
        }
    }
    println!("done: {:?}, {} fds", server.fabric, fds());
    Ok(())
}

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let at = arguments.next().and_then(|at| at.parse().ok());
    let clients = arguments.next().and_then(|n| n.parse().ok());
    let (Some(at), Some(clients)) = (at, clients) else {
        eprintln!("usage: rping_server ADDRESS:PORT CLIENTS [listen-elsewhere|reject|hang-up]");
        return ExitCode::from(2);
    };
    match run(at, clients, arguments.collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}
