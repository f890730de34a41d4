//! A peer for RDMA programs on the soft provider: serves `rping` (rdmacm-utils) and the bandwidth
//! tests of perftest (`ib_send_bw -R`, `ib_write_bw -R`, `ib_read_bw -R`), or runs the client of
//! `rping -s`. `tests/vm/guest/flow-peers` runs it against a Linux kernel's Soft-RoCE.
//!
//! ```text
//! soft_peer serve ADDRESS                        until it is killed
//! soft_peer ping ADDRESS:PORT ROUNDS BYTES       as rping -c -V does
//! ```

mod perftest;
mod rping;

use std::collections::HashMap;
use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::process::ExitCode;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rdma::pool::{Pool, PoolPlan};
use rdma::soft::{Options, Soft};
use rdma::{
    Buf, Completion, Event, Fabric, Fault, Incoming, Initiator, Qp, QpLimits, Reason, Remote,
    RemoteRegion, Wake, Work,
};

const PLAN: PoolPlan = PoolPlan::without_receives(1024, 32 << 20, 1 << 20);

/// What every role works with.
struct World {
    pool: Pool,
    fabric: Soft,
}

impl World {
    fn receive(&mut self, qp: Qp) {
        let buf = self.pool.take_cell().expect("a cell");
        self.fabric.post(qp, 0, Work::Recv(buf));
    }

    fn receive_data(&mut self, qp: Qp, bytes: u32) {
        let buf = self.pool.take_data(bytes).expect("room for the data");
        self.fabric.post(qp, 0, Work::Recv(buf));
    }

    fn send(&mut self, qp: Qp, message: &[u8]) {
        let mut from = self.pool.take_cell().expect("a cell");
        from.select(0, message.len() as u32);
        self.pool.bytes_mut(&mut from).copy_from_slice(message);
        self.fabric.post(qp, 0, Work::Send { from, invalidate: None });
    }

    fn expose(&mut self, qp: Qp, bytes: u32) -> RemoteRegion {
        let buf = self.pool.take_data(bytes).expect("room for the data");
        self.fabric.register_remote(qp, buf).expect("the memory is exposed")
    }

    fn revoke(&mut self, exposed: RemoteRegion) {
        let buf = self.fabric.deregister_remote(exposed);
        self.pool.give(buf);
    }
}

/// Role of a connection.
enum Role {
    RpingServer(rping::Server),
    RpingClient(rping::Client),
    Control(perftest::Control),
    Load(perftest::Load),
}

struct Peer {
    world: World,
    connections: HashMap<Qp, (IpAddr, Role)>,
    /// Our own connection has ended, with this result.
    ended: Option<Result<(), String>>,
}

impl Peer {
    fn incoming(&mut self, incoming: Incoming) {
        let from = incoming.remote.ip();
        let role = match incoming.local.port() {
            rping::PORT => Role::RpingServer(rping::Server::default()),
            _ if self.awaits_load(from) => Role::Load(perftest::Load::default()),
            _ => Role::Control(perftest::Control::default()),
        };
        let limits = match &role {
            Role::Load(_) => perftest::LOAD_LIMITS,
            _ => QpLimits { receives: 4, sends: 8, reads: 16 },
        };
        let qp = match self.world.fabric.open(incoming, limits) {
            Ok(qp) => qp,
            Err(e) => return println!("refused {from}: {e}"),
        };
        match &role {
            Role::Load(_) => (0..limits.receives)
                .for_each(|_| self.world.receive_data(qp, perftest::MESSAGE_BYTES)),
            _ => (0..limits.receives).for_each(|_| self.world.receive(qp)),
        }
        self.connections.insert(qp, (from, role));
        self.world.fabric.accept(qp, &[]);
    }

    /// perftest connects twice: first to exchange parameters, then for the test.
    fn awaits_load(&self, from: IpAddr) -> bool {
        let of = |is: fn(&Role) -> bool| {
            self.connections.values().filter(|(peer, role)| *peer == from && is(role)).count()
        };
        of(|role| matches!(role, Role::Control(_))) > of(|role| matches!(role, Role::Load(_)))
    }

    fn connect(&mut self, to: SocketAddr, client: rping::Client) -> Result<(), Box<dyn Error>> {
        let limits = QpLimits { receives: 4, sends: 8, reads: 1 };
        let qp = self.world.fabric.connect(to, &[], limits)?;
        (0..limits.receives).for_each(|_| self.world.receive(qp));
        self.connections.insert(qp, (to.ip(), Role::RpingClient(client)));
        Ok(())
    }

    fn event(&mut self, event: Event) {
        match event {
            Event::Done(done) => self.done(done),
            Event::Incoming(incoming) => self.incoming(incoming),
            Event::Established(qp) => match self.connections.get_mut(&qp) {
                Some((_, Role::Control(control))) => control.begin(&mut self.world, qp),
                Some((_, Role::RpingClient(client))) => client.begin(&mut self.world, qp),
                _ => {}
            },
            Event::Gone(qp, reason) => self.gone(qp, reason),
            Event::ListenerLost(at) => panic!("{at} has no device any more"),
        }
    }

    fn done(&mut self, Completion { qp, work, outcome, .. }: Completion) {
        let Some((peer, role)) = self.connections.get_mut(&qp) else {
            return self.world.pool.give(work.into_buf());
        };
        let bytes = match outcome {
            Ok(bytes) => bytes,
            Err(fault) => {
                self.world.pool.give(work.into_buf());
                if fault != Fault::Flushed {
                    println!("{peer}: {fault}");
                }
                return self.world.fabric.disconnect(qp);
            }
        };
        let world = &mut self.world;
        let ended = match role {
            Role::RpingServer(server) => server.done(world, qp, work, bytes),
            Role::RpingClient(client) => client.done(world, qp, work, bytes),
            Role::Control(control) => control.done(world, qp, work, bytes),
            Role::Load(load) => load.done(world, qp, work, bytes),
        };
        if let Err(sentence) = ended {
            println!("{peer}: {sentence}");
            world.fabric.disconnect(qp);
        }
    }

    fn gone(&mut self, qp: Qp, reason: Reason) {
        let Some((peer, role)) = self.connections.remove(&qp) else { return };
        let (what, right) = match role {
            Role::RpingServer(server) => server.end(&mut self.world),
            Role::RpingClient(client) => client.end(&mut self.world),
            Role::Control(control) => control.end(&mut self.world),
            Role::Load(load) => load.end(),
        };
        println!("{peer}: {what}, {reason:?}");
        if self.connections.is_empty() {
            assert!(self.world.pool.is_full(), "buffers lost: {:?}", self.world.pool.free());
        }
        self.ended = Some(if right { Ok(()) } else { Err(what) });
    }

    /// Serves; ends with our own connection, if there is one.
    fn run(&mut self, serve: bool) -> Result<(), Box<dyn Error>> {
        let (mut batch, mut deadline, mut armed) = (Vec::with_capacity(64), None, false);
        while serve || self.ended.is_none() {
            self.world.fabric.poll(Instant::now(), &mut batch);
            let idle = batch.is_empty();
            batch.drain(..).for_each(|event| self.event(event));
            self.world.fabric.flush();
            if idle && armed {
                sleep(&self.world.fabric, deadline)?;
            } else if idle {
                deadline = self.world.fabric.arm(Wake::Any);
            }
            armed = idle && !armed;
        }
        self.ended.take().unwrap_or(Ok(())).map_err(Into::into)
    }
}

/// Sleeps until there is something to poll, or the fabric's deadline.
fn sleep(fabric: &Soft, until: Option<Instant>) -> nix::Result<()> {
    use std::os::fd::AsFd;
    let left = until.map(|at| at.saturating_duration_since(Instant::now()).as_millis() + 1);
    let left = left.map_or(PollTimeout::NONE, |ms| (ms.min(1000) as u16).into());
    let fd: BorrowedFd<'_> = fabric.as_fd();
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], left).map(drop)
}

fn start(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let pool = Pool::new(PLAN)?;
    let fabric = Soft::new(pool.region().clone(), Options::default())?;
    let world = World { pool, fabric };
    let mut peer = Peer { world, connections: HashMap::new(), ended: None };
    match arguments {
        [job, address] if job == "serve" => {
            let address: IpAddr = address.parse()?;
            for port in [rping::PORT, perftest::PORT] {
                peer.world.fabric.listen(SocketAddr::new(address, port))?;
            }
            println!("listening on {address}");
            peer.run(true)
        }
        [job, to, rounds, bytes] if job == "ping" => {
            let client = rping::Client::new(rounds.parse()?, bytes.parse()?);
            peer.connect(to.parse()?, client)?;
            peer.run(false)
        }
        _ => {
            Err("usage: soft_peer serve ADDRESS | soft_peer ping ADDRESS:PORT ROUNDS BYTES".into())
        }
    }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    start(&arguments).map_or_else(
        |e| {
            eprintln!("soft_peer: {e}");
            ExitCode::FAILURE
        },
        |()| ExitCode::SUCCESS,
    )
}

/// Parses 16 bytes of a message: address, key and length of memory, big-endian.
fn named(message: &[u8]) -> Option<Remote> {
    Some(Remote {
        addr: u64::from_be_bytes(message.get(..8)?.try_into().ok()?),
        key: u32::from_be_bytes(message.get(8..12)?.try_into().ok()?),
        len: u32::from_be_bytes(message.get(12..16)?.try_into().ok()?),
    })
}

/// The message with these.
fn name(remote: Remote) -> [u8; 16] {
    let mut message = [0; 16];
    message[..8].copy_from_slice(&remote.addr.to_be_bytes());
    message[8..12].copy_from_slice(&remote.key.to_be_bytes());
    message[12..].copy_from_slice(&remote.len.to_be_bytes());
    message
}

/// A message that has arrived, and its buffer free again.
fn message_of(world: &mut World, buf: Buf, bytes: u32) -> Vec<u8> {
    let message = world.pool.bytes(&buf)[..bytes as usize].to_vec();
    world.pool.give(buf);
    message
}
