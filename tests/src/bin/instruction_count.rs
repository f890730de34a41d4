//! Instruction counts of the target per command: a host and a target on one thread, in a simulated
//! network with a virtual clock, so that every run is identical.
//!
//! ```text
//! valgrind --tool=callgrind --toggle-collect='*target_turn*' cost --commands 20000
//! ```
//!
//! The difference between two runs of different lengths is what the commands between them have cost:
//! queues, transport and CRC, without sockets and the ring. `tests/bench/cost` does that. With
//! `--verbs` the fabric is the provider `verbs`, on a device that executes work when it is posted
//! (`tests/bench/null_verbs.c`).

use std::collections::{BTreeMap, VecDeque};
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
use nvmfd::core::subsystem::rate_limit::{Limit, Limiter};
use nvmfd::core::subsystem::reservation::Reservation;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::core::subsystem::{AccessPolicy, ListenerConfig, Namespace, Subsystem};
use nvmfd::worker::Workers;
use rdma::soft::sim::{Faults, Network, NetworkPort, Rng};
use rdma::soft::{Options, Soft};
#[cfg(feature = "verbs")]
use rdma::verbs::{Load, Verbs};
use rdma::{Event, Initiator, Pool, PoolPlan, Tag, Wake};

const NQN: &str = "nqn.2026-11.io.nvmfd:cost";
const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";
/// Duration of each iteration of either end.
const TURN: Duration = Duration::from_micros(10);
/// The same while hosts connect by `verbs`, which limits the time that connection setup really takes.
const SETUP_TURN: Duration = Duration::from_millis(20);
/// Bytes of each command's data.
const BYTES: u32 = 4096;
/// I/O queue pairs of an idle host, and their entries.
const IDLE_QUEUES: u16 = 63;
const IDLE_ENTRIES: u16 = 4;

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
    /// Namespaces of the subsystem; commands go to the last one
    #[arg(long, default_value_t = 1)]
    namespaces: u32,
    /// Commands go to all namespaces in turn
    #[arg(long)]
    spread: bool,
    /// I/O queue pairs that are connected to the target, all but one of them idle
    #[arg(long, default_value_t = 1)]
    queue_pairs: u16,
    /// Rate limits, which delay nothing, of the host and of each namespace
    #[arg(long)]
    qos: bool,
    /// The provider `verbs` instead of `soft`
    #[cfg(feature = "verbs")]
    #[arg(long)]
    verbs: bool,
}

impl Arguments {
    fn is_verbs(&self) -> bool {
        #[cfg(feature = "verbs")]
        return self.verbs;
        #[cfg(not(feature = "verbs"))]
        false
    }
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
    fabric: Box<dyn Initiator>,
    pool: Pool,
    disk: ImmediateDevice,
    done: VecDeque<IoCompletion>,
    shared: Shared,
    events: Vec<Event>,
}

impl Target {
    fn new(
        at: SocketAddr,
        network: &Arc<Mutex<Network>>,
        arguments: &Arguments,
        now: Instant,
    ) -> Target {
        let idle = u32::from(arguments.queue_pairs - 1);
        // The idle hosts share one address, which may hold half of the receives before Connect.
        let idle_receives = 4 * (idle * u32::from(IDLE_ENTRIES) + (idle / 32 + 1) * 64);
        let plan = PoolPlan {
            cells: 1024 + 2 * idle_receives,
            receives: 512 + idle_receives,
            lead_bytes: 64,
            tail_bytes: 4096,
            data_bytes: 4 << 20,
            largest_bytes: 1 << 17,
        };
        let pool = Pool::new(plan).expect("memory");
        let (sender, _mailbox) = mailbox().expect("a mailbox");
        let registry = Registry::new(vec![sender], 64, 256 + idle_receives);
        registry.publish(Arc::new(subsystem(arguments, now)));
        let listener =
            ListenerConfig { id: 1, address: at, ana: AnaStates::default(), keep_alive_min_ms: 0 };
        registry.set_listeners(vec![listener]);
        let limits = Limits {
            queue_depth: 128,
            io_queues: IDLE_QUEUES,
            in_capsule_bytes: 4096,
            mdts_bytes: 1 << 17,
        };
        let mut fabric = fabric(at, network, &pool, 1, now, arguments);
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

    /// Commands that are counted in the statistics.
    fn counted(&self) -> u64 {
        self.shared.observers().iter().flat_map(|o| o.all_rows()).fold(0, |sum, row| {
            let ops = row.kinds.iter();
            sum + ops.map(|tally| tally.total.read().iter().sum::<u64>()).sum::<u64>()
        })
    }
}

/// The function that is counted: an iteration of the reactor.
#[inline(never)]
fn target_turn(target: &mut Target, now: Instant) {
    target.done.extend(target.disk.0.drain(..));
    target.fabric.poll(now, &mut target.events);
    let mut lent = Resources {
        pool: &mut target.pool,
        fabric: &mut *target.fabric,
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

/// Hosts at one address, with a session each.
struct Hosts {
    sessions: Vec<Session>,
    fabric: Box<dyn Initiator>,
    pool: Pool,
    events: Vec<Event>,
    /// Of the provider `verbs`: between two iterations there is no sleep, which `arm` announces.
    is_verbs: bool,
}

impl Hosts {
    fn new(
        from: SocketAddr,
        network: &Arc<Mutex<Network>>,
        plan: PoolPlan,
        seed: u64,
        now: Instant,
        arguments: &Arguments,
    ) -> Hosts {
        let pool = Pool::new(plan).expect("memory");
        let fabric = fabric(from, network, &pool, seed, now, arguments);
        let events = Vec::with_capacity(64);
        Hosts { sessions: Vec::new(), fabric, pool, events, is_verbs: arguments.is_verbs() }
    }

    fn connect(&mut self, options: session::Options, now: Instant) {
        let mut session = Session::new(options);
        session.start(&mut session::Io { pool: &mut self.pool, fabric: &mut *self.fabric, now });
        self.sessions.push(session);
    }

    /// Handles the events of the fabric.
    #[inline(never)]
    fn receive(&mut self, now: Instant) {
        let Hosts { sessions, fabric, pool, events, .. } = self;
        fabric.poll(now, events);
        let mut io = session::Io { pool, fabric: &mut **fabric, now };
        for event in events.drain(..) {
            sessions.iter_mut().try_fold(event, |event, session| session.on_event(event, &mut io));
        }
        for session in sessions {
            session.tick(&mut io);
            assert_ne!(session.phase(), Phase::Ended, "{:?}", session.ended());
        }
    }

    #[inline(never)]
    fn send(&mut self) {
        self.fabric.flush();
        if !self.is_verbs {
            self.fabric.arm(Wake::Any);
        }
    }
}

/// The target, the hosts and the network between them.
struct World {
    network: Arc<Mutex<Network>>,
    target: Target,
    idle: Hosts,
    host: Hosts,
    now: Instant,
    /// Duration of an iteration.
    turn: Duration,
}

impl World {
    /// One iteration of the target and of all hosts. Their datagrams leave with [`Hosts::send`].
    fn turn(&mut self) {
        self.pass();
        target_turn(&mut self.target, self.now);
        self.pass();
        self.idle.receive(self.now);
        self.idle.send();
        self.host.receive(self.now);
    }

    /// Advances the clock by an iteration and delivers datagrams.
    fn pass(&mut self) {
        self.now += self.turn;
        let mut network = self.network.lock().unwrap_or_else(PoisonError::into_inner);
        while network.arrive(self.now).is_some() {}
    }

    /// Connects idle hosts, with this number of I/O queue pairs in total.
    fn connect_idle(&mut self, options: &session::Options, mut queue_pairs: u16) {
        while queue_pairs > 0 {
            let io_queues = queue_pairs.min(IDLE_QUEUES);
            let nth = self.idle.sessions.len();
            let hostnqn = idle_host(nth);
            let hostid = [nth as u8 + 8; 16];
            let queue_entries = IDLE_ENTRIES;
            let more =
                session::Options { hostnqn, hostid, io_queues, queue_entries, ..options.clone() };
            self.idle.connect(more, self.now);
            while self.idle.sessions[nth].phase() != Phase::Ready {
                self.turn();
            }
            assert_eq!(self.idle.sessions[nth].io_queues(), io_queues);
            queue_pairs -= io_queues;
        }
    }
}

fn main() {
    let arguments = Arguments::parse();
    let now = Instant::now();
    let network = Arc::new(Mutex::new(Network::new(1, Faults::NONE)));
    let [at, from, idle_from]: [SocketAddr; 3] =
        ["192.0.2.1:4420", "192.0.2.2:0", "192.0.2.3:0"].map(|it| it.parse().expect("an address"));
    let (nqn, host) = (NQN.parse().expect("a name"), HOST.parse::<Nqn>().expect("a name"));
    let options = session::Options { kato_ms: 0, ..session::Options::new(at, nqn, host, [7; 16]) };
    let idle_entries = IDLE_ENTRIES.saturating_mul(arguments.queue_pairs);
    let idle_plan =
        session::Options { io_queues: 32, queue_entries: idle_entries, ..options.clone() };
    let target = Target::new(at, &network, &arguments, now);
    let host = Hosts::new(from, &network, options.plan(1 << 20, 1 << 17), 2, now, &arguments);
    let idle =
        Hosts::new(idle_from, &network, idle_plan.plan(1 << 20, 1 << 17), 3, now, &arguments);
    let turn = if arguments.is_verbs() { SETUP_TURN } else { TURN };
    let mut world = World { network, target, idle, host, now, turn };
    world.connect_idle(&options, arguments.queue_pairs - 1);
    world.host.connect(options, world.now);

    let mut idle = Vec::new();
    let (mut exposed, mut sent, mut done) = (false, 0, 0);
    while done < arguments.commands {
        world.turn();
        let Hosts { sessions, fabric, pool, .. } = &mut world.host;
        let session = &mut sessions[0];
        let mut io = session::Io { pool, fabric: &mut **fabric, now: world.now };
        while let Some(home) = session.next_done() {
            let answer = home.outcome.expect("an answer");
            assert!(answer.status.is_success(), "{}", answer.status);
            done += 1;
            idle.push(home.data);
        }
        if session.phase() == Phase::Ready {
            world.turn = TURN;
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
                let sqe = command(&arguments, sent);
                let request = Request { sqe, data, tag: sent };
                assert!(session.submit(1, request, &mut io).is_ok());
                sent += 1;
            }
        }
        world.host.send();
    }
    let (counted, queues) = (world.target.counted(), world.target.queues.count());
    println!("{done} commands done, {counted} of them counted so far, {queues} queue pairs");
}

fn command(arguments: &Arguments, number: u64) -> Sqe {
    let opcode = if arguments.write { IoOpcode::WRITE } else { IoOpcode::READ };
    let count = arguments.namespaces;
    let nsid = if arguments.spread { 1 + (number % u64::from(count)) as u32 } else { count };
    Sqe::io(opcode, nsid).with_range(number % 1024, 0)
}

fn fabric(
    at: SocketAddr,
    network: &Arc<Mutex<Network>>,
    pool: &Pool,
    seed: u64,
    now: Instant,
    arguments: &Arguments,
) -> Box<dyn Initiator> {
    #[cfg(feature = "verbs")]
    if arguments.is_verbs() {
        let fabric = Verbs::new(Arc::clone(pool.region()), Load::default()).expect("a fabric");
        return Box::new(fabric.with_source(Some(at)));
    }
    let _ = arguments;
    let port = NetworkPort::new(network, at.ip(), (1, 0));
    let mut dice = Rng::new(seed);
    let config = Options::default().config;
    let entropy = Box::new(move || dice.roll());
    let region = Arc::clone(pool.region());
    Box::new(Soft::simulated(port, config, entropy, now, region).expect("a fabric"))
}

/// Name of the idle host of this number.
fn idle_host(nth: usize) -> Nqn {
    format!("{HOST}.idle{nth}").parse().expect("a name")
}

fn subsystem(arguments: &Arguments, now: Instant) -> Subsystem {
    let nqn: Nqn = NQN.parse().expect("a name");
    let limiters = || -> Vec<Arc<Limiter>> {
        let limit = Limit { iops: Some(5_000_000), bandwidth: Some(100 << 30), ..Limit::default() };
        arguments.qos.then(|| Arc::new(Limiter::new(limit, now))).into_iter().collect()
    };
    let namespace = |nsid: u32| Namespace {
        nsid,
        backing: DeviceId(nsid - 1),
        health: Arc::default(),
        geometry: Geometry::default(),
        blocks: 1024,
        block_shift: 12,
        read_only: false,
        protection: Protection::none(nqn, nsid),
        allow_format: false,
        formats: BlockSizes::only(12),
        formatting: None,
        write_uncorrectable: false,
        marks: BadBlocks::volatile(),
        limiters: limiters(),
        ana_group: 1,
        volatile_cache: true,
        uuid: [1; 16],
        nguid: [1; 16],
        eui64: None,
        reservation: Reservation::volatile(nqn, nsid),
    };
    let host: Nqn = HOST.parse().expect("a name");
    let idle_hosts = usize::from((arguments.queue_pairs - 1).div_ceil(IDLE_QUEUES));
    Subsystem {
        nqn,
        serial: Text::lossy("COST"),
        model: Text::lossy("nvmfd"),
        allow_any_host: false,
        // By name: each I/O queue of a host that is not identified counts with the largest depth of
        // a queue among what one address may have, and most of these have four entries.
        hosts: (0..idle_hosts).map(idle_host).chain([host]).collect(),
        offer: Arc::new(AccessPolicy::default()),
        namespaces: (1..=arguments.namespaces).map(namespace).collect(),
        management: None,
        host_limiters: Arc::new(BTreeMap::from([(host, limiters())])),
        usage: Arc::default(),
    }
}
