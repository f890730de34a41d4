//! Many hosts in one process, each with many queues: measures their cost for the target when idle,
//! and fairness when some are busy. Fails if a host cannot connect or is not served to the end, or
//! if they take more memory than `nvmfd check` prints. Run by `tests/bench/scale`.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, SocketAddrV4};
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use clap::Parser;
use initiator::{Data, Error, Host, HostOptions, Options, Provider, Request};
use nvme::{IoOpcode, Nqn, Sqe};
use nvmfd::config::memory_estimate::host_bytes;

/// Bytes of a read.
const BLOCK_BYTES: u32 = 4096;
/// Reads that a busy host has outstanding.
const DEPTH: u16 = 4;
/// Allowance in addition to the formula: pages of the pool that are used for the first time, and
/// memory that an allocator cannot return.
const SLACK_MIB: f64 = 16.0;

#[derive(Parser)]
struct Args {
    /// Address of the target, a.b.c.d: the hosts are at a.b.d.1 and so on, so those of two targets
    /// do not use each other's ports.
    #[arg(long)]
    target: SocketAddrV4,
    /// The subsystem; namespace 1 has blocks of 4096 bytes, at least 1024 of them.
    #[arg(long)]
    nqn: Nqn,
    /// The target's process, whose memory and CPU time are measured.
    #[arg(long)]
    pid: u32,
    /// Number of hosts.
    #[arg(long, default_value_t = 64)]
    hosts: u8,
    /// I/O queues of each.
    #[arg(long, default_value_t = 16)]
    queues: u16,
    /// Entries of each queue.
    #[arg(long, default_value_t = 32)]
    entries: u16,
    /// Hosts that read, when some are busy.
    #[arg(long, default_value_t = 6)]
    busy: u8,
    /// Seconds of idleness, and of reading.
    #[arg(long, default_value_t = 5)]
    seconds: u64,
}

/// Commands for the hosts.
struct Signals {
    connected: Barrier,
    read: Barrier,
    end: AtomicBool,
    /// Hosts that were granted fewer I/O queues than requested.
    fewer: AtomicU32,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("many_hosts: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(args: &Args) -> Result<(), Error> {
    let all = usize::from(args.hosts) + 1;
    let signals = Arc::new(Signals {
        connected: Barrier::new(all),
        read: Barrier::new(all),
        end: AtomicBool::new(false),
        fewer: AtomicU32::new(0),
    });
    let (start, before_mib) = (Instant::now(), resident_mib(args.pid)?);
    let hosts: Vec<_> = (0..args.hosts).map(|number| spawn(number, args, &signals)).collect();
    signals.connected.wait();
    let (seconds, mib) = (start.elapsed().as_secs_f64(), resident_mib(args.pid)?);
    let queues = f64::from(args.hosts) * f64::from(args.queues + 1);
    println!(
        "connected {} hosts x {} queues x {} entries in {seconds:.2} s, target {mib:.1} MiB: {:.0} \
         KiB more for each queue",
        args.hosts,
        args.queues,
        args.entries,
        (mib - before_mib) * 1024.0 / queues
    );
    println!("{} of them were granted fewer I/O queues", signals.fewer.load(Ordering::Relaxed));
    let formula = host_bytes(args.queues, args.entries) * u64::from(args.hosts);
    let most_mib = formula as f64 / f64::from(1 << 20) + SLACK_MIB;
    let (before, start) = (cpu_ticks(args.pid)?, Instant::now());
    std::thread::sleep(Duration::from_secs(args.seconds));
    let percent = (cpu_ticks(args.pid)? - before) as f64 / start.elapsed().as_secs_f64();
    println!("idle {percent:.2} % of a CPU");
    signals.read.wait();
    std::thread::sleep(Duration::from_secs(args.seconds));
    signals.end.store(true, Ordering::Relaxed);
    let outcomes = hosts.into_iter().map(|host| host.join().map_err(|_| local("a host died")));
    let outcomes = outcomes.collect::<Result<Result<Vec<_>, _>, _>>()??;
    let busy = outcomes.into_iter().filter(|latencies| !latencies.is_empty());
    let mut tails: Vec<u32> = busy.map(|latencies| percentile(latencies, 99)).collect();
    tails.sort_unstable();
    if let (Some(median), Some(worst)) = (tails.get(tails.len() / 2), tails.last()) {
        let ratio = f64::from(*worst) / f64::from((*median).max(1));
        println!(
            "busy {} hosts: 99 % of the reads of the median host within {median} us, of the \
             slowest {worst} us: {ratio:.2} x",
            tails.len()
        );
    }
    let end_mib = resident_mib(args.pid)?;
    println!("target {end_mib:.1} MiB at the end");
    let more_mib = mib.max(end_mib) - before_mib;
    if more_mib > most_mib {
        return Err(local(&format!(
            "the hosts take {more_mib:.1} MiB, which should be at most {most_mib:.1} MiB"
        )));
    }
    Ok(())
}

/// A host on its thread; returns the latencies of its reads in microseconds.
fn spawn(number: u8, args: &Args, signals: &Arc<Signals>) -> JoinHandle<Result<Vec<u32>, Error>> {
    let (signals, busy, seconds) = (Arc::clone(signals), number < args.busy, args.seconds);
    let (to, nqn) = (args.target, args.nqn);
    let (io_queues, queue_entries) = (args.queues, args.entries);
    std::thread::spawn(move || {
        let name = format!("nqn.2026-11.io.nvmfd:host{number}");
        let hostnqn = Nqn::new(&name).map_err(|error| local(&error.to_string()))?;
        let options = Options::new(to.into(), nqn, hostnqn, [number + 1; 16]);
        let options = Options { io_queues, queue_entries, in_capsule: false, ..options };
        let source = Some(address(to, number));
        let data_bytes = u64::from(DEPTH + 1) * u64::from(BLOCK_BYTES);
        let setup = HostOptions {
            provider: Provider::Soft,
            source,
            data_bytes,
            largest_bytes: BLOCK_BYTES,
        };
        let host = Host::connect(options, setup);
        if host.as_ref().is_ok_and(|host| host.session().io_queues() < io_queues) {
            signals.fewer.fetch_add(1, Ordering::Relaxed);
        }
        signals.connected.wait();
        let Ok(mut host) = host else {
            signals.read.wait();
            return host.map(|_| Vec::new());
        };
        let idle = Instant::now() + Duration::from_secs(seconds);
        while Instant::now() < idle {
            host.wait(idle.min(Instant::now() + Duration::from_millis(500)));
        }
        signals.read.wait();
        let io_queues = host.session().io_queues();
        let latencies = if busy { read(&mut host, io_queues, &signals)? } else { Vec::new() };
        while !signals.end.load(Ordering::Relaxed) {
            host.wait(Instant::now() + Duration::from_millis(200));
        }
        read_once(&mut host)?;
        host.disconnect();
        Ok(latencies)
    })
}

fn address(target: SocketAddrV4, number: u8) -> IpAddr {
    let [a, b, _, d] = target.ip().octets();
    IpAddr::V4(Ipv4Addr::new(a, b, d, number + 1))
}

/// Reads until the end is signalled.
fn read(host: &mut Host, queues: u16, signals: &Signals) -> Result<Vec<u32>, Error> {
    let mut latencies = Vec::with_capacity(1 << 20);
    let mut idle = Vec::new();
    for _ in 0..DEPTH {
        let memory = host.expose(BLOCK_BYTES)?;
        idle.push(Data::Exposed { memory, at: 0, len: BLOCK_BYTES });
    }
    let (start, mut count) = (Instant::now(), 0_u32);
    while !(signals.end.load(Ordering::Relaxed) && idle.len() == usize::from(DEPTH)) {
        while !signals.end.load(Ordering::Relaxed)
            && let Some(data) = idle.pop()
        {
            count += 1;
            let sqe = Sqe::io(IoOpcode::READ, 1).with_range(u64::from(count % 1024), 0);
            let tag = start.elapsed().as_micros() as u64;
            let queue = (count % u32::from(queues)) as u16 + 1;
            if let Err((_, why)) = host.submit(queue, Request { sqe, data, tag }) {
                return Err(local(&why.to_string()));
            }
        }
        host.wait(Instant::now() + Duration::from_secs(1));
        while let Some(done) = host.next_done() {
            let answer =
                done.outcome.map_err(|lost| local(&format!("a read is lost: {lost:?}")))?;
            if !answer.status.is_success() {
                return Err(Error::Status { what: "a read", status: answer.status });
            }
            latencies.push((start.elapsed().as_micros() as u64 - done.tag) as u32);
            idle.push(done.data);
        }
    }
    Ok(latencies)
}

/// Reads one block, after the idle period.
fn read_once(host: &mut Host) -> Result<(), Error> {
    let data = Data::Exposed { memory: host.expose(BLOCK_BYTES)?, at: 0, len: BLOCK_BYTES };
    let sqe = Sqe::io(IoOpcode::READ, 1).with_range(0, 0);
    let request = Request { sqe, data, tag: 0 };
    host.submit(1, request).map_err(|(_, why)| local(&format!("at the end: {why}")))?;
    let until = Instant::now() + Duration::from_secs(60);
    while Instant::now() < until {
        host.wait(until);
        if let Some(done) = host.next_done() {
            let answer = done.outcome.map_err(|lost| local(&format!("at the end: {lost:?}")))?;
            return match answer.status.is_success() {
                true => Ok(()),
                false => Err(Error::Status { what: "a read at the end", status: answer.status }),
            };
        }
    }
    Err(local("a read at the end is not answered"))
}

fn percentile(mut values: Vec<u32>, percent: usize) -> u32 {
    values.sort_unstable();
    values.get(values.len() * percent / 100).copied().unwrap_or(0)
}

/// Resident memory of a process.
fn resident_mib(pid: u32) -> Result<f64, Error> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    let status = status.map_err(|error| local(&format!("the target is gone: {error}")))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
    kib.map(|kib| kib / 1024.0).ok_or_else(|| local("its memory is not told"))
}

/// CPU time of a process, of all its threads, in hundredths of a second.
fn cpu_ticks(pid: u32) -> Result<u64, Error> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
    let stat = stat.map_err(|error| local(&format!("the target is gone: {error}")))?;
    let fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
    let ticks = fields.skip(11).take(2).filter_map(|field| field.parse::<u64>().ok());
    Ok(ticks.sum())
}

fn local(what: &str) -> Error {
    Error::Local(what.to_owned())
}
