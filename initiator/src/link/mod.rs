//! `nvmf link`: latency and bandwidth between two ends, without a target or a device.
//!
//! One end listens, the other connects and measures. The roles are those of NVMe over RDMA: the
//! connecting end is the host, and the listening end reads and writes its memory, as a target does.
//! So the difference to `nvmf bench` with the same size and depth is what target and device take.

mod client;
mod message;
mod report;
mod server;

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;
use rdma::pool::{Pool, PoolPlan};
use rdma::{AdaptivePoller, Event, Initiator, SpinBudget, Wake, ZonedIp};

use crate::bench::report::{Format, print};
use crate::fabric::Wire;
use crate::interrupt::Stop;
use crate::size::{seconds, size};
use crate::{Error, Provider};

use client::{Client, Limits, Measured};
pub use message::Operation;
use message::Test;
use report::Report;
use server::Server;

/// The default port, that of perftest.
const PORT: u16 = 18515;
/// Events taken from the fabric at once.
const BATCH: usize = 256;
/// Interval of checks for a signal, while there is always something to do.
const SIGNAL_INTERVAL: Duration = Duration::from_millis(100);
/// How long to poll before sleeping: longer than most round trips, as a wake-up takes longer than a
/// round trip of an adapter.
const SPIN: Duration = Duration::from_millis(1);
/// How long closing the connections at the end may take.
const CLOSING: Duration = Duration::from_secs(5);

/// Options of `nvmf link`.
#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("end").required(true).args(["listen", "traddr"])))]
pub struct Args {
    /// Serve the tests of other ends at this local address, until a signal
    #[arg(long, value_name = "ADDRESS",
        conflicts_with_all = ["operation", "bs", "iodepth", "runtime", "output_format"])]
    pub listen: Option<ZonedIp>,
    /// Test the link to the end that listens at this address
    #[arg(short = 'a', long, value_name = "ADDRESS")]
    pub traddr: Option<String>,
    /// Port of the listening end
    #[arg(short = 's', long, value_name = "PORT", default_value_t = PORT,
        value_parser = clap::value_parser!(u16).range(1..))]
    pub trsvcid: u16,
    /// Source address [default: chosen by the route]
    #[arg(short = 'w', long, value_name = "ADDRESS", conflicts_with = "listen")]
    pub host_traddr: Option<IpAddr>,
    /// Fabric to use
    #[arg(long, value_enum, default_value_t = Provider::Auto)]
    pub provider: Provider,
    /// Operations to measure
    #[arg(long, value_enum, value_name = "OPERATION", value_delimiter = ',',
        default_values_t = Operation::OF_NVME)]
    pub operation: Vec<Operation>,
    /// Bytes of one operation, 8 to 1 MiB
    #[arg(long, value_name = "SIZE", default_value = "4k", value_parser = size)]
    pub bs: u64,
    /// Outstanding operations, 1 to 256, of the second measurement of each operation; the first
    /// has one
    #[arg(long, value_name = "COUNT", default_value_t = 32)]
    pub iodepth: u32,
    /// How long each measurement takes
    #[arg(long, value_name = "SECONDS", default_value = "2", value_parser = seconds)]
    pub runtime: Duration,
    /// How long connecting and each answer may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, conflicts_with = "listen",
        value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub timeout: u32,
    /// How to print the results
    #[arg(short = 'o', long, value_enum, value_name = "FORMAT", default_value_t = Format::Normal)]
    pub output_format: Format,
}

/// The memory and the fabric that a state machine borrows.
struct Io<'a> {
    pool: &'a mut Pool,
    fabric: &'a mut dyn Initiator,
}

/// Runs one end.
///
/// # Errors
/// A sentence for the user.
pub fn run(args: &Args) -> Result<ExitCode, Error> {
    match &args.listen {
        Some(at) => listen(at.with_port(args.trsvcid), args.provider)?,
        None => {
            let report = measure(args)?;
            print(match args.output_format {
                Format::Json => format!("{:#}\n", report.json()),
                Format::Normal => report.text(),
            })?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Pool and fabric of one end, and the loop that drives them.
struct Driver {
    pool: Pool,
    wire: Wire,
    poller: AdaptivePoller,
    stop: Stop,
    batch: Vec<Event>,
    signal_checked: Instant,
    armed: bool,
}

impl Driver {
    fn new(
        plan: PoolPlan,
        provider: Provider,
        source: Option<IpAddr>,
        to: SocketAddr,
    ) -> Result<Driver, Error> {
        let stop = Stop::new()?;
        let pool = Pool::new(plan)
            .map_err(|error| Error::Local(format!("no memory for buffers: {error}")))?;
        let wire = Wire::new(provider, source, to, pool.region())
            .map_err(|error| Error::Local(error.to_string()))?;
        let now = Instant::now();
        Ok(Driver {
            pool,
            wire,
            poller: AdaptivePoller::new(SpinBudget::auto(SPIN), now),
            stop,
            batch: Vec::with_capacity(BATCH),
            signal_checked: now,
            armed: false,
        })
    }

    fn io(&mut self) -> Io<'_> {
        Io { pool: &mut self.pool, fabric: self.wire.fabric() }
    }

    /// One iteration: passes events to `act`, once more with none, then flushes; sleeps until
    /// `deadline` if there were none. Returns whether there was a signal at any time.
    fn turn(
        &mut self,
        deadline: Option<Instant>,
        is_awaiting: bool,
        mut act: impl FnMut(Instant, Option<Event>, &mut Io<'_>),
    ) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        self.wire.fabric().poll(Instant::now(), &mut batch);
        let now = Instant::now();
        let is_idle = batch.is_empty();
        for event in batch.drain(..) {
            act(now, Some(event), &mut self.io());
        }
        act(now, None, &mut self.io());
        self.wire.fabric().flush();
        self.batch = batch;
        if !is_idle {
            self.poller.worked(now);
            self.armed = false;
        } else if self.armed {
            self.armed = false;
            self.sleep(deadline);
            return self.stop.wait(Duration::ZERO);
        } else if !self.wire.fabric().hints().receiving && !self.poller.goes_on(now, is_awaiting) {
            let _ = self.wire.fabric().arm(Wake::Any);
            self.armed = true;
        }
        if now.duration_since(self.signal_checked) < SIGNAL_INTERVAL {
            return false;
        }
        self.signal_checked = now;
        self.stop.wait(Duration::ZERO)
    }

    /// Sleeps until there is an event, a signal or a deadline.
    fn sleep(&mut self, deadline: Option<Instant>) {
        let due = self.wire.fabric().deadline().into_iter().chain(deadline).min();
        let limit = due.map(|due| due.saturating_duration_since(Instant::now()));
        let fds = [self.wire.fd(), self.stop.descriptor()];
        let mut fds = fds.map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        // A failure ends the sleep; then there is nothing to poll.
        let _ = ppoll(&mut fds, limit.map(TimeSpec::from_duration), None);
    }
}

/// Serves tests until a signal.
fn listen(at: SocketAddr, provider: Provider) -> Result<(), Error> {
    let mut driver = Driver::new(server::PLAN, provider, Some(at.ip()), at)?;
    let listening = driver.wire.fabric().listen(at);
    listening.map_err(|error| Error::Local(error.to_string()))?;
    tracing::info!("listening at {at}, provider {}", driver.wire.provider());
    let mut server = Server::default();
    let (mut deadline, mut lost) = (None, None);
    let mut stopped = false;
    while !stopped && lost.is_none() {
        stopped = driver.turn(deadline, false, |now, event, io| match event {
            Some(Event::ListenerLost(at)) => lost = Some(at),
            Some(event) => server.event(now, event, io),
            None => deadline = server.close_silent(now, io),
        });
    }
    driver.wire.fabric().unlisten(at);
    let until = Instant::now() + CLOSING;
    let mut is_closed = false;
    while !is_closed && Instant::now() < until {
        driver.turn(Some(until), false, |now, event, io| {
            if let Some(event) = event {
                server.event(now, event, io);
            }
            is_closed = server.close_all(io);
        });
    }
    match lost {
        Some(at) => Err(Error::Local(format!("the RDMA device of {at} was removed"))),
        None => Ok(()),
    }
}

/// Runs all measurements.
fn measure(args: &Args) -> Result<Report, Error> {
    let to = address(args)?;
    let size_bytes = u32::try_from(args.bs).unwrap_or(u32::MAX);
    let tests = tests(args, size_bytes)?;
    let timeout = Duration::from_secs(args.timeout.into());
    let limits = Limits { runtime: args.runtime, timeout };
    let mut driver = Driver::new(client::PLAN, args.provider, args.host_traddr, to)?;
    let mut results = Vec::with_capacity(tests.len());
    for test in tests {
        results.push(measure_one(&mut driver, to, test, limits)?);
    }
    Ok(Report { to, provider: driver.wire.provider(), size_bytes, results })
}

/// Runs one measurement.
fn measure_one(
    driver: &mut Driver,
    to: SocketAddr,
    test: Test,
    limits: Limits,
) -> Result<Measured, Error> {
    let mut client = Client::connect(Instant::now(), to, test, limits, &mut driver.io())?;
    driver.wire.fabric().flush();
    while !client.has_ended() {
        let stopped = driver.turn(client.deadline(), true, |now, event, io| match event {
            Some(event) => client.event(now, event, io),
            None => client.advance(now, io),
        });
        if stopped {
            client.interrupt(&mut driver.io());
        }
    }
    client.into_measured()
}

/// The measurements: each operation with one outstanding, and with all.
fn tests(args: &Args, size_bytes: u32) -> Result<Vec<Test>, Error> {
    let depths: &[u32] = if args.iodepth == 1 { &[1] } else { &[1, args.iodepth] };
    let of = |&operation: &Operation| {
        depths.iter().map(move |&depth| Test { operation, size_bytes, depth })
    };
    let tests: Vec<Test> = args.operation.iter().flat_map(of).collect();
    if tests.iter().all(Test::is_within_limits) {
        return Ok(tests);
    }
    Err(Error::Usage(
        "--bs is 8 to 1m, --iodepth 1 to 256, and both together have at most 16 MiB outstanding, \
         in pages of 4 KiB"
            .into(),
    ))
}

/// The address of the listening end.
fn address(args: &Args) -> Result<SocketAddr, Error> {
    let traddr = args.traddr.as_deref().unwrap_or_default();
    let failed = |why: String| Error::Usage(format!("--traddr {traddr}: {why}"));
    let found = (traddr, args.trsvcid).to_socket_addrs();
    let mut all = found.map_err(|error| failed(error.to_string()))?;
    let to = all.next().ok_or_else(|| failed("no address has that name".into()))?;
    if to.ip().is_unspecified() || to.ip().is_multicast() {
        return Err(failed(format!("{to} is no address to connect to")));
    }
    Ok(to)
}
