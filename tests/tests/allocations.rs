//! Once everything is connected, neither target nor host allocates: a counting allocator sees all
//! of both, in one process, over real sockets.

mod pair;

use std::time::{Duration, Instant};

use initiator::{Data, Host, Request};
use nvme::{IoOpcode, Sqe};
use nvmfd::RunningTarget;

#[global_allocator]
static COUNTING: dhat::Alloc = dhat::Alloc;

const NQN: &str = "nqn.2026-11.io.nvmfd:allocations";
/// Commands outstanding at once.
const DEPTH: u16 = 16;
/// Commands of each kind that may still allocate: tables grow to their size.
const WARM_UP: u32 = 2_000;
const MEASURED: u32 = 10_000;

/// Sends `count` commands, `DEPTH` at a time, and waits for all of them.
fn run(host: &mut Host, idle: &mut Vec<Data>, count: u32, command: &dyn Fn(u32) -> Sqe) {
    let (mut sent, mut done) = (0, 0);
    while done < count {
        while sent < count
            && let Some(data) = idle.pop()
        {
            let request = Request { sqe: command(sent), data, tag: sent.into() };
            if let Err((_, why)) = host.submit(1, request) {
                panic!("command {sent}: {why}");
            }
            sent += 1;
        }
        host.wait(Instant::now() + Duration::from_secs(10));
        while let Some(home) = host.next_done() {
            let answer = home.outcome.unwrap();
            assert!(answer.status.is_success(), "{}", answer.status);
            idle.push(home.data);
            done += 1;
        }
    }
}

/// Waits until threads that start with the first look at a device have started: that allocates once.
fn wait_for_threads() {
    let quiet = || {
        let before = dhat::HeapStats::get().total_blocks;
        std::thread::sleep(Duration::from_millis(1500));
        dhat::HeapStats::get().total_blocks == before
    };
    assert!((0..20).any(|_| quiet()), "something allocates all the time");
}

#[test]
fn steady_io_allocates_nothing_at_either_end() {
    let _profiler = dhat::Profiler::builder().testing().build();
    let before = dhat::HeapStats::get().total_blocks;
    std::thread::spawn(|| std::hint::black_box(vec![1])).join().unwrap();
    assert!(dhat::HeapStats::get().total_blocks > before, "the counter sees all threads");
    let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let disk = directory.path().join("disk.img");
    let namespaces = format!(
        "[[subsystem.namespace]]\nnsid = 1\nkind = 'null'\nsize = '1GiB'\nblock_size = 4096\n\
         [[subsystem.namespace]]\nnsid = 2\npath = '{}'\nsize = '64MiB'\nblock_size = 4096\n",
        disk.display()
    );
    let target = RunningTarget::start(pair::config("127.61.0.1", NQN, &namespaces)).unwrap();
    let mut host = pair::host("127.61.0.1", "127.61.0.2", NQN);
    wait_for_threads();
    for (what, nsid, write, blocks) in [
        ("reads of the null namespace", 1, false, 1),
        ("writes in the capsule", 1, true, 1),
        ("large reads", 1, false, 32),
        ("large writes", 1, true, 32),
        ("reads of a file", 2, false, 1),
        ("writes to a file", 2, true, 1),
    ] {
        let len = blocks * 4096;
        let expose =
            |host: &mut Host| Data::Exposed { memory: host.expose(len).unwrap(), at: 0, len };
        let mut idle: Vec<Data> = (0..DEPTH).map(|_| expose(&mut host)).collect();
        let command = |n: u32| {
            let slba = u64::from(n % 512 * blocks);
            let opcode = if write { IoOpcode::WRITE } else { IoOpcode::READ };
            Sqe::io(opcode, nsid).with_range(slba, blocks as u16 - 1)
        };
        run(&mut host, &mut idle, WARM_UP, &command);
        let before = dhat::HeapStats::get().total_blocks;
        run(&mut host, &mut idle, MEASURED, &command);
        let after = dhat::HeapStats::get().total_blocks;
        for data in idle {
            let Data::Exposed { memory, .. } = data else { panic!("other data came home") };
            host.revoke(memory);
        }
        assert_eq!(after - before, 0, "allocations in {MEASURED} commands: {what}");
    }
    host.disconnect();
    // The benchmark itself: a longer run allocates what a shorter one does.
    let (few, some) = bench("250ms");
    // How much a busy machine does in its time is not known before.
    let mut longer = ["1500ms", "6s", "24s"].into_iter().map(bench);
    let found = longer.find(|(_, more)| *more > 2 * some);
    let (many, more) = found.unwrap_or_else(|| panic!("never twice {some} commands"));
    let threads = 8;
    assert!(many <= few + threads, "{few} allocations in {some} commands, {many} in {more}");
    target.stop(Instant::now() + Duration::from_secs(5));
}

/// Measures for so long; returns allocations and commands.
fn bench(runtime: &str) -> (u64, u64) {
    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        args: initiator::bench::Args,
    }
    let line = format!(
        "nvmf -a 127.61.0.1 -w 127.61.0.2 --provider soft -n {NQN} --rw randrw --iodepth 16 \
         -q nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11 \
         -I 2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11 --progress never --runtime {runtime}"
    );
    let cli = <Cli as clap::Parser>::try_parse_from(line.split_whitespace()).unwrap();
    let before = dhat::HeapStats::get().total_blocks;
    let (report, failure) = initiator::bench::measure(&cli.args).unwrap();
    assert_eq!(failure, None);
    let after = dhat::HeapStats::get().total_blocks;
    (after - before, report.read.ios() + report.write.ios())
}
