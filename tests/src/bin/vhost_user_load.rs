//! Load on a vhost-user-blk device, as the driver of a virtual machine makes it: one queue with
//! indirect descriptors and `EVENT_IDX`, and a driver that sleeps until the device signals it.
//!
//! Prints one line of JSON that fio's output has too: operations, their rate and their latency.
//! Every request has to succeed with its whole length; the first failure ends the measurement.
//!
//! Documents: "Vhost-user Protocol" of QEMU; "Virtual I/O Device (VIRTIO)", sections "Split
//! Virtqueues" and "Block Device".

use std::fs::File;
use std::io::{IoSlice, Read};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use clap::{Parser, ValueEnum};
use initiator::rng::Random;
use initiator::vhost_user::{RequestId, blk, feature, protocol};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use nix::unistd::{read, write};
use vm_memory::{
    Bytes, FileOffset, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileMemoryError,
    VolatileSlice,
};

/// Entries of the queue, as in QEMU.
const ENTRIES: u16 = 256;
const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;
/// Offsets in the memory: the rings, what the driver has of each request, and the data.
const AVAILABLE: usize = 0x2000;
const USED: usize = 0x3000;
const SLOTS: usize = 0x4000;
const DATA: usize = SLOTS + ENTRIES as usize * SLOT_BYTES;
/// Offsets behind the indirect table of a request, and its size as a whole.
const HEADER: usize = 0x40;
const STATUS: usize = 0x50;
const SLOT_BYTES: usize = 0x80;
/// The version of a message, and that it is a reply.
const VERSION: u32 = 1;
const REPLY: u32 = 4;
/// Messages are answered in that time.
const REPLY_LIMIT: Duration = Duration::from_secs(10);

/// Load on a vhost-user-blk device
#[derive(Parser)]
struct Arguments {
    /// The socket of the device
    socket: PathBuf,
    /// What to do, at random places
    #[arg(long, value_enum)]
    rw: Access,
    /// Bytes of a request
    #[arg(long, default_value_t = 4096, value_parser = clap::value_parser!(u32).range(512..=1 << 20))]
    bs: u32,
    /// Requests at once
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u16).range(1..=256))]
    iodepth: u16,
    /// Seconds that are measured
    #[arg(long, default_value_t = 2.0)]
    runtime: f64,
    /// Seconds before
    #[arg(long, default_value_t = 0.3)]
    ramp_time: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Access {
    Randread,
    Randwrite,
}

/// Why there is no result.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}")]
    System(#[from] std::io::Error),
    #[error("{0}")]
    Errno(#[from] nix::Error),
    #[error("the memory cannot be used: {0}")]
    Memory(#[from] VolatileMemoryError),
    #[error("the memory cannot be mapped: {0}")]
    Mapping(#[from] vm_memory::GuestMemoryError),
    #[error("the memory cannot be mapped: {0}")]
    Region(#[from] vm_memory::mmap::FromRangesError),
    #[error("the device does not answer as the protocol says: {0}")]
    Protocol(&'static str),
    #[error("request {slot} failed: status {status}, {bytes} bytes")]
    Request { slot: u16, status: u8, bytes: u32 },
}

type Outcome<T> = Result<T, Failure>;

/// The connection to the device.
struct FrontEnd {
    stream: UnixStream,
}

impl FrontEnd {
    fn send(&mut self, request: RequestId, payload: &[u8], fds: &[RawFd]) -> Outcome<()> {
        let mut bytes = Vec::new();
        for word in [request.0, VERSION, payload.len() as u32] {
            bytes.extend(word.to_le_bytes());
        }
        bytes.extend(payload);
        let control = [ControlMessage::ScmRights(fds)];
        let control = if fds.is_empty() { &[][..] } else { &control };
        let slices = [IoSlice::new(&bytes)];
        let sent =
            sendmsg::<()>(self.stream.as_raw_fd(), &slices, control, MsgFlags::empty(), None)?;
        if sent == bytes.len() { Ok(()) } else { Err(Failure::Protocol("a message is cut")) }
    }

    /// Sends words of 64 bits.
    fn set(&mut self, request: RequestId, words: &[u64], fds: &[RawFd]) -> Outcome<()> {
        let payload: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.send(request, &payload, fds)
    }

    /// Sends a number of the first queue.
    fn set_queue(&mut self, request: RequestId, number: u32) -> Outcome<()> {
        self.set(request, &[u64::from(number) << 32], &[])
    }

    fn ask(&mut self, request: RequestId, payload: &[u8]) -> Outcome<Vec<u8>> {
        self.send(request, payload, &[])?;
        let mut header = [0; 12];
        self.stream.read_exact(&mut header)?;
        let word = |at: usize| header[at..].first_chunk().map_or(0, |it| u32::from_le_bytes(*it));
        if word(0) != request.0 || word(4) != VERSION | REPLY || word(8) > 4096 {
            return Err(Failure::Protocol("a reply"));
        }
        let mut payload = vec![0; word(8) as usize];
        self.stream.read_exact(&mut payload)?;
        Ok(payload)
    }

    fn get(&mut self, request: RequestId) -> Outcome<u64> {
        let reply = self.ask(request, &[])?;
        reply.first_chunk().map(|it| u64::from_le_bytes(*it)).ok_or(Failure::Protocol("a number"))
    }
}

/// The driver of one queue.
struct Driver<'a> {
    front_end: FrontEnd,
    memory: VolatileSlice<'a>,
    kick: EventFd,
    call: EventFd,
    access: Access,
    bytes: u32,
    /// Requests that fit into the device.
    places: u64,
    random: Random,
    available: u16,
    used: u16,
    /// Those without a request, and when each of the others was begun.
    free: Vec<u16>,
    begun: Vec<Instant>,
}

/// What was measured.
#[derive(Default)]
struct Totals {
    requests: u64,
    latency: Duration,
}

/// The memory of a guest: one region, of a file that can be shared.
struct Memory {
    file: Arc<File>,
    map: GuestMemoryMmap,
    bytes: usize,
}

impl Memory {
    fn new(arguments: &Arguments) -> Outcome<Memory> {
        let bytes = DATA + page_bytes(arguments.bs) * usize::from(arguments.iodepth);
        let file = Arc::new(File::from(memfd_create("guest", MFdFlags::MFD_CLOEXEC)?));
        file.set_len(bytes as u64)?;
        let offset = FileOffset::from_arc(Arc::clone(&file), 0);
        let range = (GuestAddress(0), bytes, Some(offset));
        let map = GuestMemoryMmap::from_ranges_with_files([range])?;
        Ok(Memory { file, map, bytes })
    }
}

/// Bytes of the pages for the data of one request.
fn page_bytes(data_bytes: u32) -> usize {
    (data_bytes as usize).next_multiple_of(4096)
}

impl<'a> Driver<'a> {
    /// Sets the device up.
    fn new(arguments: &Arguments, memory: &'a Memory) -> Outcome<Driver<'a>> {
        let mut front_end = FrontEnd { stream: UnixStream::connect(&arguments.socket)? };
        front_end.stream.set_read_timeout(Some(REPLY_LIMIT))?;
        let (kick, call) = (EventFd::new()?, EventFd::new()?);
        let wanted = feature::VERSION_1 | feature::INDIRECT_DESC | feature::EVENT_IDX;
        let offered = front_end.get(RequestId::GET_FEATURES)?;
        if offered & wanted != wanted || offered & feature::PROTOCOL_FEATURES == 0 {
            return Err(Failure::Protocol("features are missing"));
        }
        front_end.set(RequestId::SET_OWNER, &[], &[])?;
        front_end.get(RequestId::GET_PROTOCOL_FEATURES)?;
        front_end.set(RequestId::SET_PROTOCOL_FEATURES, &[protocol::CONFIG], &[])?;
        let used = wanted | blk::feature::FLUSH | feature::PROTOCOL_FEATURES;
        front_end.set(RequestId::SET_FEATURES, &[used], &[])?;
        let config = [0u32, 60, 0].into_iter().flat_map(u32::to_le_bytes).chain([0; 60]);
        let config = front_end.ask(RequestId::GET_CONFIG, &config.collect::<Vec<u8>>())?;
        let capacity = config.get(12..).and_then(<[u8]>::first_chunk);
        let sectors = capacity.map_or(0, |bytes| u64::from_le_bytes(*bytes));
        // The addresses of the front-end are those of the guest.
        front_end.set(
            RequestId::SET_MEM_TABLE,
            &[1, 0, memory.bytes as u64, 0, 0],
            &[memory.file.as_raw_fd()],
        )?;
        front_end.set_queue(RequestId::SET_VRING_NUM, ENTRIES.into())?;
        front_end.set_queue(RequestId::SET_VRING_BASE, 0)?;
        front_end.set(RequestId::SET_VRING_ADDR, &[0, 0, USED as u64, AVAILABLE as u64, 0], &[])?;
        front_end.set(RequestId::SET_VRING_CALL, &[0], &[call.as_fd().as_raw_fd()])?;
        front_end.set(RequestId::SET_VRING_KICK, &[0], &[kick.as_fd().as_raw_fd()])?;
        front_end.set_queue(RequestId::SET_VRING_ENABLE, 1)?;
        let driver = Driver {
            front_end,
            memory: memory.map.get_slice(GuestAddress(0), memory.bytes)?,
            kick,
            call,
            access: arguments.rw,
            bytes: arguments.bs,
            places: sectors * blk::SECTOR_BYTES / u64::from(arguments.bs),
            random: Random::new(1),
            available: 0,
            used: 0,
            free: (0..arguments.iodepth).rev().collect(),
            begun: vec![Instant::now(); arguments.iodepth.into()],
        };
        if driver.places == 0 {
            return Err(Failure::Protocol("the device has no room for a request"));
        }
        driver.write_tables()?;
        Ok(driver)
    }

    /// Writes what stays: descriptors, their indirect tables, and incompressible data.
    fn write_tables(&self) -> Outcome<()> {
        let mut random = Random::new(2);
        for slot in 0..self.begun.len() {
            let at = self.slot(slot as u16);
            let data_at = DATA + page_bytes(self.bytes) * slot;
            let data = match self.access {
                Access::Randread => WRITE | NEXT,
                Access::Randwrite => NEXT,
            };
            self.descriptor(16 * slot, at, 3 * 16, INDIRECT, 0)?;
            self.descriptor(at, at + HEADER, 16, NEXT, 1)?;
            self.descriptor(at + 16, data_at, self.bytes, data, 2)?;
            self.descriptor(at + 32, at + STATUS, 1, WRITE, 0)?;
            let words = (0..self.bytes / 8).flat_map(|_| random.next().to_le_bytes());
            let bytes: Vec<u8> = words.collect();
            self.memory.write_slice(&bytes, data_at)?;
        }
        Ok(())
    }

    fn descriptor(
        &self,
        at: usize,
        address: usize,
        len: u32,
        flags: u16,
        next: u16,
    ) -> Outcome<()> {
        let words =
            [address as u64, u64::from(len) | u64::from(flags) << 32 | u64::from(next) << 48];
        Ok(self.memory.write_obj(words, at)?)
    }

    fn slot(&self, slot: u16) -> usize {
        SLOTS + SLOT_BYTES * usize::from(slot)
    }

    /// Makes a request of every slot that has none available, and signals the device if it asks
    /// for that.
    fn submit(&mut self, now: Instant) -> Outcome<()> {
        let before = self.available;
        while let Some(slot) = self.free.pop() {
            let kind = match self.access {
                Access::Randread => 0u64,
                Access::Randwrite => 1,
            };
            let place = self.random.below(self.places);
            let sector = place * (u64::from(self.bytes) / blk::SECTOR_BYTES);
            let at = self.slot(slot);
            self.memory.write_obj([kind, sector], at + HEADER)?;
            self.memory.write_obj(0xFFu8, at + STATUS)?;
            let entry = AVAILABLE + 4 + 2 * usize::from(self.available % ENTRIES);
            self.memory.write_obj(slot, entry)?;
            self.begun[usize::from(slot)] = now;
            self.available = self.available.wrapping_add(1);
        }
        if self.available == before {
            return Ok(());
        }
        self.memory.store(self.available, AVAILABLE + 2, Ordering::Release)?;
        fence(Ordering::SeqCst);
        let event = USED + 4 + 8 * usize::from(ENTRIES);
        let event: u16 = self.memory.load(event, Ordering::Relaxed)?;
        let new = self.available.wrapping_sub(before);
        if self.available.wrapping_sub(event).wrapping_sub(1) < new {
            write(&self.kick, &1u64.to_ne_bytes())?;
        }
        Ok(())
    }

    fn device_used(&self) -> Outcome<u16> {
        Ok(self.memory.load(USED + 2, Ordering::Acquire)?)
    }

    /// Takes what is done; `None` for `totals`: without counting.
    fn reap(&mut self, now: Instant, mut totals: Option<&mut Totals>) -> Outcome<bool> {
        let device = self.device_used()?;
        let any = device != self.used;
        while self.used != device {
            let entry = USED + 4 + 8 * usize::from(self.used % ENTRIES);
            let [slot, bytes]: [u32; 2] = self.memory.read_obj(entry)?;
            let slot = slot as u16;
            let Some(begun) = self.begun.get(usize::from(slot)) else {
                return Err(Failure::Protocol("a request that there is not is done"));
            };
            let status: u8 = self.memory.read_obj(self.slot(slot) + STATUS)?;
            let expected = match self.access {
                Access::Randread => self.bytes + 1,
                Access::Randwrite => 1,
            };
            if status != 0 || bytes != expected {
                return Err(Failure::Request { slot, status, bytes });
            }
            if let Some(totals) = totals.as_deref_mut() {
                totals.requests += 1;
                totals.latency += now.saturating_duration_since(*begun);
            }
            self.free.push(slot);
            self.used = self.used.wrapping_add(1);
        }
        Ok(any)
    }

    /// Sleeps until the device signals that a request is done, if none is yet.
    fn sleep(&mut self) -> Outcome<()> {
        let event = AVAILABLE + 4 + 2 * usize::from(ENTRIES);
        self.memory.store(self.used, event, Ordering::Relaxed)?;
        fence(Ordering::SeqCst);
        if self.device_used()? == self.used {
            // The device has made the descriptor non-blocking.
            let mut signal = [PollFd::new(self.call.as_fd(), PollFlags::POLLIN)];
            poll(&mut signal, PollTimeout::NONE)?;
            read(&self.call, &mut [0; 8])?;
        }
        Ok(())
    }

    /// Keeps all slots busy for so long. Returns how long it took.
    fn run(&mut self, time: Duration, mut totals: Option<&mut Totals>) -> Outcome<Duration> {
        let start = Instant::now();
        let mut now = start;
        while now - start < time {
            self.submit(now)?;
            if !self.reap(now, totals.as_deref_mut())? {
                self.sleep()?;
            }
            now = Instant::now();
        }
        Ok(now - start)
    }

    /// Waits for all requests, and stops the queue.
    fn end(mut self) -> Outcome<()> {
        while self.free.len() < self.begun.len() {
            if !self.reap(Instant::now(), None)? {
                self.sleep()?;
            }
        }
        let reply = self.front_end.ask(RequestId::GET_VRING_BASE, &[0; 8])?;
        let next = reply.get(4..).and_then(<[u8]>::first_chunk);
        match next.map(|bytes| u32::from_le_bytes(*bytes)) {
            Some(next) if next == u32::from(self.available) => Ok(()),
            _ => Err(Failure::Protocol("the next entry of the queue is another")),
        }
    }
}

fn measure(arguments: &Arguments) -> Outcome<String> {
    let seconds = |value: f64| Duration::from_secs_f64(value.clamp(0.0, 3600.0));
    let memory = Memory::new(arguments)?;
    let mut driver = Driver::new(arguments, &memory)?;
    driver.run(seconds(arguments.ramp_time), None)?;
    let mut totals = Totals::default();
    let took = driver.run(seconds(arguments.runtime), Some(&mut totals))?;
    driver.end()?;
    let side = match arguments.rw {
        Access::Randread => "read",
        Access::Randwrite => "write",
    };
    let iops = totals.requests as f64 / took.as_secs_f64();
    let mean_ns = totals.latency.as_nanos() as f64 / totals.requests.max(1) as f64;
    let counts = serde_json::json!({
        "total_ios": totals.requests, "iops": iops, "bw_bytes": iops * f64::from(arguments.bs),
        "clat_ns": { "mean": mean_ns },
    });
    Ok(serde_json::json!({ "jobs": [{ side: counts }] }).to_string())
}

fn main() -> ExitCode {
    match measure(&Arguments::parse()) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(failure) => {
            eprintln!("vhost_user_load: {failure}");
            ExitCode::FAILURE
        }
    }
}
