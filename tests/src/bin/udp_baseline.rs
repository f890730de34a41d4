//! Baseline of UDP on this machine for the packets of an I/O, without any protocol: two threads on
//! two CPUs exchange datagrams of the same sizes over loopback, in trains (`UDP_SEGMENT` and
//! `UDP_GRO`), without reading them.
//!
//! Prints one `name value` per line: `make bench` prints the measurements beside these.

use std::io::{IoSlice, IoSliceMut};
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::AsRawFd;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use clap::Parser;
use nix::cmsg_space;
use nix::errno::Errno;
use nix::sched::{CpuSet, sched_setaffinity};
use nix::sys::socket::{
    ControlMessage, ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, sendmsg, setsockopt,
    sockopt,
};
use nix::unistd::Pid;

/// A command capsule: base transport header, 64 bytes, CRC.
const COMMAND_BYTES: usize = 12 + 64 + 4;
/// 4 KiB of data for the host: base and RDMA header, data, CRC.
const DATA_BYTES: usize = 12 + 16 + 4096 + 4;
/// A response with the key to invalidate.
const RESPONSE_BYTES: usize = 12 + 4 + 16 + 4;
/// Maximum size of one send call.
const TRAIN_BYTES: usize = 65_507;
/// Maximum of segments of one send call.
const TRAIN_SEGMENTS: usize = 64;

/// The limits of UDP on this machine.
#[derive(Parser)]
struct Arguments {
    /// The CPUs of the two ends
    #[arg(long, num_args = 2, default_values_t = [0, 1])]
    cpus: Vec<usize>,
    /// Seconds for each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let time = Duration::from_secs_f64(arguments.seconds.clamp(0.01, 60.0));
    let cpus = [arguments.cpus[0], arguments.cpus[1]];
    match measure(cpus, time) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("udp_limits: {error}");
            ExitCode::FAILURE
        }
    }
}

fn measure(cpus: [usize; 2], time: Duration) -> Result<(), Errno> {
    for depth in [1, 32] {
        let (ios, elapsed) = exchange(cpus, depth, time)?;
        println!("read_4k_qd{depth}_iops {:.0}", ios as f64 / elapsed.as_secs_f64());
        if depth == 1 {
            println!("read_4k_qd1_us {:.2}", elapsed.as_secs_f64() * 1e6 / ios as f64);
        }
    }
    let (bytes, elapsed) = stream(cpus, time)?;
    println!("stream_gb_s {:.3}", bytes as f64 / elapsed.as_secs_f64() / 1e9);
    Ok(())
}

/// Commands in one direction, data and responses in the other, `depth` outstanding: returns the
/// number of I/Os.
fn exchange(cpus: [usize; 2], depth: usize, time: Duration) -> Result<(u64, Duration), Errno> {
    let (host, target) = (End::new()?, End::new()?);
    let stop = Arc::new(AtomicBool::new(false));
    let (to_host, to_target) = (host.address, target.address);
    let serving = thread::spawn({
        let stop = Arc::clone(&stop);
        move || -> Result<(), Errno> {
            pin(cpus[0]);
            let mut target = target;
            while !stop.load(Ordering::Relaxed) {
                let commands = target.receive(|len| len == COMMAND_BYTES)?;
                if commands == 1 {
                    // The shorter last segment may be the response.
                    target.send_mixed(to_host)?;
                } else if commands > 1 {
                    target.send(to_host, DATA_BYTES, commands)?;
                    target.send(to_host, RESPONSE_BYTES, commands)?;
                }
            }
            Ok(())
        }
    });
    let asking = thread::spawn(move || -> Result<(u64, Duration), Errno> {
        pin(cpus[1]);
        let mut host = host;
        host.send(to_target, COMMAND_BYTES, depth)?;
        let (start, mut done) = (Instant::now(), 0);
        let mut heard = start;
        loop {
            let responses = host.receive(|len| len == RESPONSE_BYTES)?;
            if responses > 0 {
                done += responses as u64;
                heard = Instant::now();
                if heard - start >= time {
                    return Ok((done, heard - start));
                }
                host.send(to_target, COMMAND_BYTES, responses)?;
            } else if heard.elapsed() > Duration::from_millis(20) {
                // Lost in a full socket buffer: start again.
                heard = Instant::now();
                host.send(to_target, COMMAND_BYTES, depth)?;
            }
        }
    });
    let result = asking.join().expect("the measuring thread panicked");
    stop.store(true, Ordering::Relaxed);
    serving.join().expect("the serving thread panicked")?;
    result
}

/// Data in one direction at full speed; counted by the receiver.
fn stream(cpus: [usize; 2], time: Duration) -> Result<(u64, Duration), Errno> {
    let (source, sink) = (End::new()?, End::new()?);
    let stop = Arc::new(AtomicBool::new(false));
    let to = sink.address;
    let sending = thread::spawn({
        let stop = Arc::clone(&stop);
        move || -> Result<(), Errno> {
            pin(cpus[0]);
            let mut source = source;
            while !stop.load(Ordering::Relaxed) {
                source.send(to, DATA_BYTES, TRAIN_BYTES / DATA_BYTES)?;
            }
            Ok(())
        }
    });
    pin(cpus[1]);
    let (mut sink, start, mut bytes) = (sink, Instant::now(), 0);
    while start.elapsed() < time {
        bytes += (sink.receive(|len| len == DATA_BYTES)? * 4096) as u64;
    }
    let elapsed = start.elapsed();
    stop.store(true, Ordering::Relaxed);
    sending.join().expect("the sending thread panicked")?;
    Ok((bytes, elapsed))
}

/// One end: a socket that polls.
struct End {
    socket: UdpSocket,
    address: SocketAddr,
    room: Vec<u8>,
    control: Vec<u8>,
    data: Vec<u8>,
}

impl End {
    fn new() -> Result<End, Errno> {
        let system = |error: std::io::Error| Errno::from_raw(error.raw_os_error().unwrap_or(5));
        let socket = UdpSocket::bind("127.0.0.1:0").map_err(system)?;
        let address = socket.local_addr().map_err(system)?;
        setsockopt(&socket, sockopt::UdpGroSegment, &true)?;
        let buffer_bytes = 16 << 20;
        let _ = setsockopt(&socket, sockopt::RcvBufForce, &buffer_bytes)
            .or_else(|_| setsockopt(&socket, sockopt::RcvBuf, &buffer_bytes));
        Ok(End {
            socket,
            address,
            room: vec![0; 1 << 16],
            control: cmsg_space!(i32),
            data: vec![7; 1 << 16],
        })
    }

    /// Sends `count` datagrams of one length.
    fn send(&mut self, to: SocketAddr, len: usize, count: usize) -> Result<(), Errno> {
        let most = (TRAIN_BYTES / len).min(TRAIN_SEGMENTS);
        let mut left = count;
        while left > 0 {
            let now = left.min(most);
            self.train(to, len, &[IoSlice::new(&self.data[..len * now])])?;
            left -= now;
        }
        Ok(())
    }

    /// Sends the data of one command and its response.
    fn send_mixed(&mut self, to: SocketAddr) -> Result<(), Errno> {
        self.train(to, DATA_BYTES, &[IoSlice::new(&self.data[..DATA_BYTES + RESPONSE_BYTES])])
    }

    fn train(&self, to: SocketAddr, len: usize, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        let segment = len as u16;
        let control = [ControlMessage::UdpGsoSegments(&segment)];
        let to = SockaddrStorage::from(to);
        let fd = self.socket.as_raw_fd();
        match sendmsg(fd, parts, &control, MsgFlags::empty(), Some(&to)) {
            Ok(_) | Err(Errno::EAGAIN | Errno::ENOBUFS) => Ok(()),
            Err(errno) => Err(errno),
        }
    }

    /// Receives; returns the number of datagrams of the wanted kind.
    fn receive(&mut self, wanted: impl Fn(usize) -> bool) -> Result<usize, Errno> {
        let fd = self.socket.as_raw_fd();
        let mut parts = [IoSliceMut::new(&mut self.room)];
        let received = recvmsg::<SockaddrStorage>(
            fd,
            &mut parts,
            Some(&mut self.control),
            MsgFlags::MSG_DONTWAIT,
        );
        let received = match received {
            Ok(received) => received,
            Err(Errno::EAGAIN) => {
                std::hint::spin_loop();
                return Ok(0);
            }
            Err(errno) => return Err(errno),
        };
        let mut segment = received.bytes;
        for control in received.cmsgs()? {
            if let ControlMessageOwned::UdpGroSegments(bytes) = control {
                segment = bytes as usize;
            }
        }
        let whole = received.bytes / segment.max(1);
        let rest = received.bytes % segment.max(1);
        Ok(usize::from(wanted(segment)) * whole + usize::from(rest > 0 && wanted(rest)))
    }
}

fn pin(cpu: usize) {
    let mut set = CpuSet::new();
    // A machine without that CPU is measured without pinning.
    let _ = set.set(cpu).and_then(|()| sched_setaffinity(Pid::from_raw(0), &set));
}
