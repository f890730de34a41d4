//! Many slow hosts against a target on the soft fabric: each has outstanding reads and polls its
//! socket once in a period, so that data, responses and acknowledgements wait in between. Run by
//! `tests/bench/hostile`.

use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use initiator::{Data, Error, Host, HostOptions, Options, Provider, Request};
use nvme::{IoOpcode, Nqn, Sqe};

/// Bytes of a read; the namespace has blocks of 4096 bytes.
const READ_BYTES: u32 = 32 << 10;
/// Threads that the hosts share.
const THREADS: u16 = 8;

/// Slow hosts of a target on the soft fabric.
#[derive(Parser)]
struct Args {
    /// Address and port of the target
    #[arg(long)]
    target: SocketAddrV4,
    /// NQN of the subsystem
    #[arg(long)]
    nqn: Nqn,
    /// First address of the hosts
    #[arg(long, default_value = "127.66.0.1")]
    from: Ipv4Addr,
    /// Number of hosts
    #[arg(long, default_value_t = 1000)]
    hosts: u16,
    /// Reads that each has outstanding
    #[arg(long, default_value_t = 4)]
    depth: u16,
    /// Interval of polling the socket, in milliseconds
    #[arg(long, default_value_t = 1000)]
    period_ms: u64,
    /// Duration in seconds
    #[arg(long, default_value_t = 10)]
    seconds: u64,
}

/// Counts of several hosts.
#[derive(Clone, Copy, Default)]
struct Counts {
    connected: u32,
    /// Associations that ended before the time was up.
    ended: u32,
    reads: u64,
    /// Reads that failed, other than by the end of their association.
    failed: u64,
}

fn main() -> ExitCode {
    let args = Args::parse();
    let end = Instant::now() + Duration::from_secs(args.seconds);
    let counts = thread::scope(|scope| {
        let args = &args;
        let workers: Vec<_> =
            (0..THREADS).map(|worker| scope.spawn(move || run(args, worker, end))).collect();
        let joined = workers.into_iter().filter_map(|worker| worker.join().ok());
        joined.fold(Counts::default(), |sum, part| Counts {
            connected: sum.connected + part.connected,
            ended: sum.ended + part.ended,
            reads: sum.reads + part.reads,
            failed: sum.failed + part.failed,
        })
    });
    let Counts { connected, ended, reads, failed } = counts;
    println!(
        "{connected} of {} hosts connected, {reads} reads, {ended} associations ended",
        args.hosts
    );
    if connected < u32::from(args.hosts) || failed > 0 {
        eprintln!("slow_hosts: {failed} reads failed; all hosts have to connect and to be served");
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// The hosts of one thread.
fn run(args: &Args, worker: u16, end: Instant) -> Counts {
    let mut counts = Counts::default();
    let mut hosts = Vec::new();
    for number in (worker..args.hosts).step_by(THREADS.into()) {
        match connect(args, number) {
            Ok(host) => hosts.push(host),
            Err(error) => eprintln!("slow_hosts: host {number}: {error}"),
        }
    }
    counts.connected = hosts.len() as u32;
    let period = Duration::from_millis(args.period_ms);
    let mut next = Instant::now();
    while next < end {
        hosts.retain_mut(|(host, idle)| {
            let is_served = serve(host, idle, &mut counts);
            counts.ended += u32::from(!is_served);
            is_served
        });
        next += period;
        thread::sleep(next.saturating_duration_since(Instant::now()));
    }
    hosts.into_iter().for_each(|(host, _)| host.disconnect());
    counts
}

fn connect(args: &Args, number: u16) -> Result<(Host, Vec<Data>), Error> {
    let name = format!("nqn.2026-11.io.nvmfd:slow{number}");
    let hostnqn = Nqn::new(&name).map_err(|error| Error::Local(error.to_string()))?;
    let mut hostid = [0x51; 16];
    hostid[..2].copy_from_slice(&number.to_be_bytes());
    let options = Options::new(args.target.into(), args.nqn, hostnqn, hostid);
    let options = Options { io_queues: 1, queue_entries: 8, in_capsule: false, ..options };
    let address = Ipv4Addr::from_bits(u32::from(args.from) + u32::from(number));
    let setup = HostOptions {
        provider: Provider::Soft,
        source: Some(IpAddr::V4(address)),
        data_bytes: u64::from(args.depth + 1) * u64::from(READ_BYTES),
        largest_bytes: READ_BYTES,
    };
    let mut host = Host::connect(options, setup)?;
    let idle = (0..args.depth).map(|_| {
        let memory = host.expose(READ_BYTES)?;
        Ok(Data::Exposed { memory, at: 0, len: READ_BYTES })
    });
    let idle = idle.collect::<Result<_, Error>>()?;
    Ok((host, idle))
}

/// Polls once: takes completed reads and sends as many. Returns false if the association has ended.
fn serve(host: &mut Host, idle: &mut Vec<Data>, counts: &mut Counts) -> bool {
    host.poll();
    while let Some(done) = host.next_done() {
        match done.outcome {
            Ok(answer) if answer.status.is_success() => counts.reads += 1,
            Ok(_) => counts.failed += 1,
            Err(_) => {}
        }
        idle.push(done.data);
    }
    if let Some(reason) = host.session().ended() {
        eprintln!("slow_hosts: {}: {reason}", host.session().options().hostnqn);
        return false;
    }
    for data in idle.drain(..) {
        let blocks_z = (READ_BYTES / 4096 - 1) as u16;
        let sqe = Sqe::io(IoOpcode::READ, 1).with_range(0, blocks_z);
        if host.submit(1, Request { sqe, data, tag: 0 }).is_err() {
            counts.failed += 1;
        }
    }
    host.ring();
    true
}
