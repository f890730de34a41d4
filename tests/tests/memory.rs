//! What connected hosts cost the target beside its pools is what the printed formula says
//! ([`nvmfd::config::memory_estimate`]), and nothing when they are gone: a counting allocator sees all of the target; the
//! hosts are another process.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nvmfd::RunningTarget;
use nvmfd::config::Config;
use nvmfd::config::memory_estimate;

#[global_allocator]
static COUNTING: dhat::Alloc = dhat::Alloc;

const NQN: &str = "nqn.2026-11.io.nvmfd:memory";

/// Hosts, I/O queues of each, and entries of each queue.
type Shape = (u16, u16, u16);

/// Ends with this.
struct HostsProcess(Child);

impl Drop for HostsProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Bytes that the target has taken when so many hosts have connected.
fn taken((hosts, queues, entries): Shape) -> u64 {
    let receives = u32::from(hosts) * (u32::from(queues) * u32::from(entries) + 32) + 4096;
    let text = format!(
        "provider = 'soft'\n[[listener]]\naddress = '127.62.0.1'\n\
         [[subsystem]]\nnqn = '{NQN}'\nallow_any_host = true\n\
         [[subsystem.namespace]]\nnsid = 1\nkind = 'null'\nsize = '1GiB'\n\
         [reactor]\nthreads = 1\n[memory]\nreceives = {receives}\n\
         [limits]\nqueue_depth = {entries}\nio_queues = {queues}\n"
    );
    let target = RunningTarget::start(Config::parse(&text).unwrap()).unwrap();
    let before = dhat::HeapStats::get().curr_bytes;
    let mut process = Command::new(env!("CARGO_BIN_EXE_many_hosts"));
    process.args(["--target", "127.62.0.1:4420", "--nqn", NQN, "--seconds", "3600", "--busy", "0"]);
    for (option, value) in [
        ("--pid", std::process::id()),
        ("--hosts", hosts.into()),
        ("--queues", queues.into()),
        ("--entries", entries.into()),
    ] {
        process.arg(option).arg(value.to_string());
    }
    let mut process = HostsProcess(process.stdout(Stdio::piped()).spawn().unwrap());
    let mut said = String::new();
    let stdout = process.0.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut said).unwrap();
    assert!(said.starts_with("connected"), "{said:?}");
    let after = dhat::HeapStats::get().curr_bytes;
    drop(process);
    target.stop(Instant::now() + Duration::from_secs(5));
    (after - before) as u64
}

#[test]
fn memory_per_host_matches_the_estimate() {
    let _profiler = profiler();
    for shape in [(4, 1, 32), (4, 16, 32), (4, 4, 128), (4, 1, 1024)] {
        let (hosts, queues, entries) = shape;
        let is = taken(shape);
        let said = u64::from(hosts) * memory_estimate::host_bytes(queues, entries);
        println!("{shape:?}: {is} bytes, said {said}");
        assert!(
            is.abs_diff(said) * 20 <= said,
            "{shape:?}: {is} bytes, and the formula says {said}"
        );
    }
}

/// What hosts leave behind fills tables and caches in the first cycles, by 11 to 12 KB each: some
/// rounds of four hosts that read on 20 queues, of which the second half may cost `GROWTH_BYTES`.
#[test]
fn disconnected_hosts_leak_no_memory() {
    const CYCLES: usize = 6;
    const GROWTH_BYTES: u64 = 78_000;
    let _profiler = profiler();
    let text = format!(
        "provider = 'soft'\n[[listener]]\naddress = '127.62.0.2'\n\
         [[subsystem]]\nnqn = '{NQN}'\nallow_any_host = true\n\
         [[subsystem.namespace]]\nnsid = 1\nkind = 'null'\nsize = '1GiB'\n\
         [reactor]\nthreads = 2\n[limits]\nqueue_depth = 32\nio_queues = 4\n"
    );
    let target = RunningTarget::start(Config::parse(&text).unwrap()).unwrap();
    let cycle = || {
        let mut process = Command::new(env!("CARGO_BIN_EXE_many_hosts"));
        process.args([
            "--target",
            "127.62.0.2:4420",
            "--nqn",
            NQN,
            "--seconds",
            "0",
            "--busy",
            "4",
        ]);
        process.args(["--hosts", "4", "--queues", "4", "--entries", "32"]);
        let process = process.arg("--pid").arg(std::process::id().to_string()).output().unwrap();
        assert!(process.status.success(), "{process:?}");
    };
    let live = || dhat::HeapStats::get().curr_bytes as u64;
    (0..CYCLES).for_each(|_| cycle());
    // Until its connections have been closed there is more, so this is what is left at the least.
    let before = settled(&live);
    (0..CYCLES).for_each(|_| cycle());
    let patience = Instant::now() + Duration::from_secs(60);
    let most = before + GROWTH_BYTES;
    while live() > most && Instant::now() < patience {
        std::thread::sleep(Duration::from_millis(50));
    }
    let after = live();
    assert!(after <= most, "{before} bytes after {CYCLES} rounds, {after} after as many more");
    target.stop(Instant::now() + Duration::from_secs(5));
}

/// The least of some looks: what is there for a moment only is not counted.
fn settled(live: &impl Fn() -> u64) -> u64 {
    let looks = (0..40).map(|_| {
        std::thread::sleep(Duration::from_millis(50));
        live()
    });
    looks.min().unwrap_or_default()
}

/// There is one allocator, and one count of it: the tests take turns.
fn profiler() -> (dhat::Profiler, MutexGuard<'static, ()>) {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (dhat::Profiler::builder().testing().build(), turn)
}
