//! What the ring alone can do: random reads or writes through [`nvmfd_blockdev::uring::Ring`], no fabric.
//!
//! ```text
//! ring_bench STORE [read|write] [DEPTH] [BYTES] [SECONDS]
//! ring_bench /var/tmp/bench.img read 32 4096 5
//! ring_bench ram write 32 4096 5
//! ```
//!
//! STORE is an existing file or device, `ram` or `null` (1 GiB each). Compare with
//! `fio --ioengine=io_uring --direct=1 --fixedbufs --registerfiles --rw=randread ..` on the same
//! file. **Writing destroys what the store holds.**

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nvmfd_blockdev::uring::{Ring, RingLimits};
use nvmfd_blockdev::{
    BackingConfig, BackingDevice, BackingKind, BlockDevice, DeviceId, IoEngine, IoRequest,
};
use rdma::{Buf, Pool, PoolPlan};

const MEMORY_STORE_BYTES: u64 = 1 << 30;
const STORE: DeviceId = DeviceId(0);

struct Job {
    store: String,
    write: bool,
    depth: u32,
    bytes: u32,
    seconds: u64,
    engine: IoEngine,
}

fn main() -> ExitCode {
    let Some(job) = job() else {
        eprintln!("usage: ring_bench STORE [read|write] [DEPTH] [BYTES] [SECONDS] [ENGINE]");
        return ExitCode::from(2);
    };
    match run(&job) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("ring_bench: {error}");
            ExitCode::FAILURE
        }
    }
}

fn job() -> Option<Job> {
    let mut words = std::env::args().skip(1);
    let store = words.next()?;
    let write = match words.next().as_deref() {
        None | Some("read") => false,
        Some("write") => true,
        Some(_) => return None,
    };
    let mut number = |default: u64| words.next().map_or(Some(default), |word| word.parse().ok());
    let (depth, bytes, seconds) = (number(32)?, number(4096)?, number(5)?);
    let (depth, bytes) = (u32::try_from(depth).ok()?, u32::try_from(bytes).ok()?);
    let engine = words.next().unwrap_or(IoEngine::IoUring.to_string());
    let engine = IoEngine::ALL.into_iter().find(|known| known.to_string() == engine)?;
    (depth > 0 && bytes >= 4096 && bytes.is_multiple_of(4096)).then_some(Job {
        store,
        write,
        depth,
        bytes,
        seconds,
        engine,
    })
}

fn run(job: &Job) -> Result<(), Box<dyn std::error::Error>> {
    let kind = match job.store.as_str() {
        "ram" => BackingKind::Ram { size: MEMORY_STORE_BYTES },
        "null" => BackingKind::Null { size: MEMORY_STORE_BYTES },
        path => BackingKind::File { path: PathBuf::from(path), size: None },
    };
    let memory = matches!(kind, BackingKind::Ram { .. });
    let config = BackingConfig {
        kind,
        block_size_bytes: 4096,
        read_only: !job.write && !memory,
        shared: false,
    };
    let backing = Arc::new(BackingDevice::open(&config)?);
    let units = backing.size_bytes() / u64::from(job.bytes);
    if units == 0 {
        return Err("the store is smaller than one transfer".into());
    }
    let largest_bytes = job.bytes.next_power_of_two();
    let mut pool = Pool::new(PoolPlan::without_receives(
        0,
        u64::from(job.depth) * u64::from(largest_bytes),
        largest_bytes,
    ))?;
    let limits = RingLimits { ops: job.depth, backings: 1 };
    let mut ring = Ring::new(pool.region().clone(), limits, job.engine)?;
    ring.attach(STORE, backing)?;
    let mut random = 0x9E37_79B9_7F4A_7C15u64;
    let mut submit = |ring: &mut Ring, buf: Buf, write: bool, at: Option<u64>| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = at.unwrap_or(random % units) * u64::from(job.bytes);
        let op = match write {
            true => IoRequest::Write { from: buf, at, fua: false },
            false => IoRequest::Read { into: buf, at },
        };
        BlockDevice::submit(ring, STORE, 0, op);
    };
    let (mut done, mut woken) = (Vec::with_capacity(job.depth as usize), Vec::new());
    let mut turn = |ring: &mut Ring, done: &mut Vec<_>| {
        ring.sleep(None, Instant::now());
        ring.reap(done, &mut woken);
    };
    if memory {
        // Preallocates memory, so that page faults are not measured.
        let mut buf = pool.take_data(job.bytes);
        for unit in 0..units {
            submit(&mut ring, buf.take().ok_or("no buffer")?, true, Some(unit));
            while done.is_empty() {
                turn(&mut ring, &mut done);
            }
            buf = done.pop().and_then(|it: nvmfd_blockdev::IoCompletion| it.buf);
        }
        pool.give(buf.ok_or("no buffer")?);
    }
    while let Some(buf) = pool.take_data(job.bytes) {
        submit(&mut ring, buf, job.write, None);
    }
    let before = ring.stats();
    let start = Instant::now();
    let mut count = 0u64;
    while start.elapsed() < Duration::from_secs(job.seconds) {
        turn(&mut ring, &mut done);
        count += done.len() as u64;
        for it in done.drain(..) {
            it.outcome?;
            submit(&mut ring, it.buf.ok_or("no buffer")?, job.write, None);
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    let rate = count as f64 / seconds;
    println!(
        "{} {} of {} bytes at depth {}: {:.1} k/s, {:.3} GB/s, {:.2} per system call",
        job.store,
        if job.write { "writes" } else { "reads" },
        job.bytes,
        job.depth,
        rate / 1e3,
        rate * f64::from(job.bytes) / 1e9,
        count as f64 / (ring.stats().enters - before.enters) as f64,
    );
    println!("{:?}", ring.stats());
    Ok(())
}
