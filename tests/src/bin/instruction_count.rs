//! Instruction counts of the target per command: a host and a target on one thread, in a simulated
//! network with a virtual clock, so that every run is identical.
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*target_turn*' cost --commands 20000
//! ```
//!
//! The difference between two runs of different lengths is what the commands between them have cost:
//! queues, transport and CRC, without sockets and the ring. `tests/bench/cost` does that.

use std::collections::{BTreeSet, VecDeque};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use clap::Parser;
use initiator::session::{self, Data, Phase, Request, Session};
use nvme::{IoOpcode, Nqn, Sqe, Text};
use nvmfd::blockdev::{BlockDevice, BlockSizes, DeviceId, Geometry, IoCompletion, IoRequest};
use nvmfd::core::controller::Limits;
use nvmfd::core::message::mailbox;
use nvmfd::core::poll_group::{PollGroup, Resources};
use nvmfd::core::registry::Registry;
use nvmfd::core::shared::Shared;
use nvmfd::core::subsystem::ana::AnaStates;
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::reservation::Reservation;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::core::subsystem::{AccessPolicy, ListenerConfig, Namespace, Subsystem};
use nvmfd::worker::Workers;
use rdma::soft::sim::{Faults, Network, NetworkPort, Rng};
use rdma::soft::{Options, Soft};
use rdma::{Event, Fabric, Pool, PoolPlan, Tag, Wake};

const NQN: &str = "nqn.2026-11.io.nvmfd:cost";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";
/// Duration of each iteration of either end.
const TURN: Duration = Duration::from_micros(10);
/// Bytes of each command's data.
const BYTES: u32 = 4096;

/// Sends commands to a target in the same thread.
#[derive(Parser, Debug)]
struct Arguments {
    /// Number of commands
    #[arg(long, default_value_t = 10_000)]
    commands: u64,
    /// Outstanding commands
    #[arg(long, default_value_t = 32)]
    depth: u16,
    /// Writes instead of reads
    #[arg(long)]
    write: bool,
}

/// A device that completes everything by the next iteration.
#[derive(Default)]
struct ImmediateDevice(Vec<IoCompletion>);

impl BlockDevice for ImmediateDevice {
    fn submit(&mut self, _: DeviceId, tag: Tag, op: IoRequest) {
        self.0.push(IoCompletion { tag, buf: op.into_buf(), outcome: Ok(()) });
    }

    fn recall(&mut self, tag: Tag, _: Tag) {
        self.0.push(IoCompletion { tag, buf: None, outcome: Ok(()) });
    }
}

struct Target {
    queues: PollGroup,
    fabric: Soft,
    pool: Pool,
    disk: ImmediateDevice,
    done: VecDeque<IoCompletion>,
    shared: Shared,
    events: Vec<Event>,
}

impl Target {
    fn new(at: SocketAddr, network: &Arc<Mutex<Network>>, now: Instant) -> Target {
        let plan = PoolPlan {
            cells: 1024,
            receives: 512,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: 4 << 20,
            largest_bytes: 1 << 17,
        };
        let pool = Pool::new(plan).expect("memory");
        let (sender, _mailbox) = mailbox().expect("a mailbox");
        let registry = Registry::new(vec![sender], 16, 256);
        registry.publish(Arc::new(subsystem()));
        let listener =
            ListenerConfig { id: 1, address: at, ana: AnaStates::default(), keep_alive_min_ms: 0 };
        registry.set_listeners(vec![listener]);
        let limits =
            Limits { queue_depth: 128, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 17 };
        let mut fabric = fabric(at, network, &pool, 1, now);
        fabric.listen(at).expect("a listener");
        Target {
            queues: PollGroup::new(0, limits, now),
            fabric,
            pool,
            disk: ImmediateDevice::default(),
            done: VecDeque::new(),
            shared: Shared::new(Arc::new(registry), Workers::default(), SystemTime::now),
            events: Vec::with_capacity(64),
        }
    }
}

/// The function that is counted: an iteration of the reactor.
#[inline(never)]
fn target_turn(target: &mut Target, now: Instant) {
    target.done.extend(target.disk.0.drain(..));
    target.fabric.poll(now, &mut target.events);
    let mut lent = Resources {
        pool: &mut target.pool,
        fabric: &mut target.fabric,
        disk: &mut target.disk,
        shared: &target.shared,
        now,
    };
    target.queues.on_events(&mut target.events, &mut lent);
    target.queues.on_disks(&mut target.done, &mut lent);
    target.queues.tick(&mut lent);
    target.queues.serve_waiters(&mut lent);
    target.fabric.flush();
}

fn main() {
    let arguments = Arguments::parse();
    let mut now = Instant::now();
    let network = Arc::new(Mutex::new(Network::new(1, Faults::NONE)));
    let (at, from) = ("192.0.2.1:4420", "192.0.2.2:0");
    let (at, from): (SocketAddr, SocketAddr) =
        (at.parse().expect("an address"), from.parse().expect("an address"));
    let mut target = Target::new(at, &network, now);

    let (nqn, host) = (NQN.parse().expect("a name"), HOST.parse::<Nqn>().expect("a name"));
    let options = session::Options { kato_ms: 0, ..session::Options::new(at, nqn, host, [7; 16]) };
    let mut pool = Pool::new(options.plan(1 << 20, 1 << 17)).expect("memory");
    let mut fabric = fabric(from, &network, &pool, 2, now);
    let mut session = Session::new(options);
    let mut events = Vec::with_capacity(64);
    session.start(&mut session::Io { pool: &mut pool, fabric: &mut fabric, now });

    let mut idle = Vec::new();
    let (mut exposed, mut sent, mut done) = (false, 0, 0);
    while done < arguments.commands {
        now += TURN;
        while network.lock().unwrap_or_else(PoisonError::into_inner).arrive(now).is_some() {}
        target_turn(&mut target, now);
        now += TURN;
        while network.lock().unwrap_or_else(PoisonError::into_inner).arrive(now).is_some() {}
        fabric.poll(now, &mut events);
        let mut io = session::Io { pool: &mut pool, fabric: &mut fabric, now };
        for event in events.drain(..) {
            session.on_event(event, &mut io);
        }
        session.tick(&mut io);
        while let Some(home) = session.next_done() {
            let answer = home.outcome.expect("an answer");
            assert!(answer.status.is_success(), "{}", answer.status);
            done += 1;
            idle.push(home.data);
        }
        assert_ne!(session.phase(), Phase::Ended, "{:?}", session.ended());
        if session.phase() == Phase::Ready {
            if !std::mem::replace(&mut exposed, true) {
                let qp = session.qp(1).expect("a queue");
                for _ in 0..arguments.depth {
                    let buf = io.pool.take_data(BYTES).expect("a buffer");
                    let memory = io.fabric.register_remote(qp, buf).expect("exposed memory");
                    idle.push(Data::Exposed { memory, at: 0, len: BYTES });
                }
            }
            while sent < arguments.commands
                && let Some(data) = idle.pop()
            {
                let opcode = if arguments.write { IoOpcode::WRITE } else { IoOpcode::READ };
                let sqe = Sqe::io(opcode, 1).with_range(sent % 1024, 0);
                let request = Request { sqe, data, tag: sent };
                assert!(session.submit(1, request, &mut io).is_ok());
                sent += 1;
            }
        }
        io.fabric.flush();
        io.fabric.arm(Wake::Any);
    }
    let counted: u64 =
        target.shared.observers().iter().flat_map(|o| o.all_rows()).fold(0, |sum, row| {
            let ops = row.kinds.iter();
            sum + ops.map(|tally| tally.total.read().iter().sum::<u64>()).sum::<u64>()
        });
    println!("{done} commands done, {counted} of them counted so far");
}

fn fabric(
    at: SocketAddr,
    network: &Arc<Mutex<Network>>,
    pool: &Pool,
    seed: u64,
    now: Instant,
) -> Soft {
    let port = NetworkPort::new(network, at.ip(), (1, 0));
    let mut dice = Rng::new(seed);
    let config = Options::default().config;
    let entropy = Box::new(move || dice.roll());
    Soft::in_air(port, config, entropy, now, Arc::clone(pool.region())).expect("a fabric")
}

fn subsystem() -> Subsystem {
    let nqn: Nqn = NQN.parse().expect("a name");
    let namespace = Namespace {
        nsid: 1,
        backing: DeviceId(0),
        health: Arc::default(),
        geometry: Geometry::default(),
        blocks: 1024,
        block_shift: 12,
        read_only: false,
        protection: Protection::none(nqn, 1),
        allow_format: false,
        formats: BlockSizes::only(12),
        formatting: None,
        write_uncorrectable: false,
        marks: BadBlocks::volatile(),
        limiters: Vec::new(),
        ana_group: 1,
        volatile_cache: true,
        uuid: [1; 16],
        nguid: [1; 16],
        eui64: None,
        reservation: Reservation::volatile(nqn, 1),
    };
    Subsystem {
        nqn,
        serial: Text::lossy("COST"),
        model: Text::lossy("nvmfd"),
        allow_any_host: true,
        hosts: BTreeSet::new(),
        offer: Arc::new(AccessPolicy::default()),
        namespaces: vec![namespace],
        management: None,
        host_limiters: Arc::default(),
        usage: Arc::default(),
    }
}
