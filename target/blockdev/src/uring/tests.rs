//! Tests of the ring on real files, with a kernel that completes asynchronously.

mod block_devices;
mod entries;
mod failures;
mod images;
mod lifecycle;
mod memory;
mod quotas;

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Weak;

use nvme::status::Status;
use proptest::prelude::*;
use proptest::test_runner::TestCaseError;
use rdma::{Buf, Pool, PoolPlan};

use crate::uring::sqe::CHUNK_SHIFT;
use crate::uring::*;
use crate::{BackingConfig, BackingKind};

const STORE: DeviceId = DeviceId(1);

const SIZE: u64 = 1 << 20;

/// A ring, a pool and a directory on a file system that is never tmpfs.
struct Bench {
    ring: Ring,
    pool: Pool,
    dir: tempfile::TempDir,
    done: Vec<IoCompletion>,
    woken: Vec<u32>,
}

impl Bench {
    fn new(ops: u32) -> Bench {
        let plan = PoolPlan {
            cells: 0,
            receives: 3,
            lead_bytes: 64,
            tail_bytes: 8192,
            data_bytes: 4 << 20,
            largest_bytes: 1 << 17,
        };
        let pool = Pool::new(plan).unwrap();
        let limits = RingLimits { ops, backings: 4 };
        let engine = crate::testing::io_engine();
        let ring = Ring::new(pool.region().clone(), limits, engine).unwrap();
        let dir = crate::testing::directory();
        Bench { ring, pool, dir, done: Vec::new(), woken: Vec::new() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn file(&self, name: &str, block: u32) -> Arc<BackingDevice> {
        open(&self.path(name), Some(SIZE), block)
    }

    fn with_file(block: u32) -> (Bench, Arc<BackingDevice>) {
        let mut bench = Bench::new(8);
        let backing = bench.file("disk.img", block);
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        (bench, backing)
    }

    fn with_kind(kind: BackingKind) -> (Bench, Arc<BackingDevice>) {
        let mut bench = Bench::new(8);
        let config = BackingConfig { kind, block_size_bytes: 512, read_only: false, shared: false };
        let backing = Arc::new(BackingDevice::open(&config).unwrap());
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        (bench, backing)
    }

    fn submit(&mut self, op: IoRequest) {
        BlockDevice::submit(&mut self.ring, STORE, 0, op);
    }

    /// Sleeps until `count` operations have completed.
    fn await_done(&mut self, count: usize) -> Vec<IoCompletion> {
        let deadline = Instant::now() + Duration::from_secs(60);
        while self.done.len() < count {
            let now = Instant::now();
            assert!(now < deadline, "{} of {count} came home", self.done.len());
            self.ring.sleep(Some(deadline), now);
            self.ring.reap(&mut self.done, &mut self.woken);
        }
        std::mem::take(&mut self.done)
    }

    fn run(&mut self, op: IoRequest) -> Result<(), Status> {
        self.submit(op);
        let mut done = self.await_done(1);
        let done = done.pop().unwrap();
        if let Some(buf) = done.buf {
            self.pool.give(buf);
        }
        done.outcome
    }

    fn filled(&mut self, len: u32, byte: u8) -> Buf {
        let mut buf = self.pool.take_data(len).unwrap();
        self.pool.bytes_mut(&mut buf).fill(byte);
        buf
    }

    fn write(&mut self, at: u64, len: u32, byte: u8, fua: bool) -> Result<(), Status> {
        let from = self.filled(len, byte);
        self.run(IoRequest::Write { from, at, fua })
    }

    fn read(&mut self, at: u64, len: u32) -> Result<Vec<u8>, Status> {
        let into = self.filled(len, 0xEE);
        self.submit(IoRequest::Read { into, at });
        let done = self.await_done(1).pop().unwrap();
        let buf = done.buf.unwrap();
        assert_eq!((buf.start(), buf.len()), (0, len));
        let bytes = self.pool.bytes(&buf).to_vec();
        self.pool.give(buf);
        done.outcome.map(|()| bytes)
    }
}

fn open(path: &Path, size: Option<u64>, block: u32) -> Arc<BackingDevice> {
    let kind = BackingKind::File { path: path.to_owned(), size };
    let config = BackingConfig { kind, block_size_bytes: block, read_only: false, shared: false };
    Arc::new(BackingDevice::open(&config).unwrap())
}

/// Executes every kind of operation, on a store of zeros.
fn every_operation(bench: &mut Bench, block: u32) {
    let b = u64::from(block);
    assert_eq!(bench.read(0, block), Ok(vec![0; block as usize]));
    assert_eq!(bench.write(b, block, 0x11, false), Ok(()));
    assert_eq!(bench.write(2 * b, 4 * block, 0x22, true), Ok(()));
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
    let bytes = bench.read(0, 8 * block).unwrap();
    let at = |n: usize| bytes[n * block as usize];
    assert_eq!([at(0), at(1), at(2), at(5), at(6)], [0, 0x11, 0x22, 0x22, 0]);
    assert_eq!(bench.run(IoRequest::Discard { at: 2 * b, len: b }), Ok(()));
    assert_eq!(bench.run(IoRequest::Zero { at: 3 * b, len: b, deallocate: false }), Ok(()));
    assert_eq!(bench.run(IoRequest::Zero { at: 4 * b, len: b, deallocate: true }), Ok(()));
    let bytes = bench.read(b, 5 * block).unwrap();
    let firsts: Vec<u8> = bytes.chunks(block as usize).map(|block| block[0]).collect();
    assert_eq!(firsts, [0x11, 0, 0, 0, 0x22]);
    assert_eq!(bench.run(IoRequest::Zero { at: 0, len: SIZE, deallocate: true }), Ok(()));
    assert!(bench.read(0, 8 * block).unwrap().iter().all(|byte| *byte == 0));
    assert!(bench.pool.is_full());
    assert_eq!(bench.ring.in_flight(), 0);
}

#[test]
fn every_operation_works_on_a_file() {
    for block in [512, 4096] {
        let (mut bench, backing) = Bench::with_file(block);
        every_operation(&mut bench, block);
        assert_eq!(fs::metadata(bench.path("disk.img")).unwrap().len(), SIZE);
        assert_eq!(backing.health().failures(), 0);
        // No copy, no pinning: every transfer was on the registered memory. (The limit of locked
        // memory of an ordinary user is for all tests that run at the same time.)
        let stats = bench.ring.stats();
        let (fixed, plain) = if bench.ring.memory.registered { (6, 0) } else { (0, 6) };
        assert_eq!((stats.fixed, stats.plain, stats.copied), (fixed, plain, 0));
        // Not every file system can zero a range; a refused mode is not tried again.
        assert_eq!((stats.syncs, stats.spaces), (1, 4 + stats.again));
        assert!(stats.again <= 1);
    }
}

#[test]
fn zeros_are_written_if_zeroing_modes_are_unsupported() {
    let (mut bench, backing) = Bench::with_file(512);
    backing.refuse(crate::Space::Punch);
    backing.refuse(crate::Space::ZeroRange);
    for at in (0..SIZE).step_by(1 << 17) {
        assert_eq!(bench.write(at, 1 << 17, 0x77, false), Ok(()));
    }
    let len = SIZE - 1024;
    assert_eq!(bench.run(IoRequest::Zero { at: 512, len, deallocate: true }), Ok(()));
    let file = fs::read(bench.path("disk.img")).unwrap();
    assert!(file[..512].iter().chain(&file[file.len() - 512..]).all(|byte| *byte == 0x77));
    assert!(file[512..file.len() - 512].iter().all(|byte| *byte == 0));
    let others = if bench.ring.memory.registered { 0 } else { 8 };
    assert_eq!(bench.ring.stats().plain, 4 + others);
    assert_eq!(bench.run(IoRequest::Discard { at: 0, len: 512 }), Ok(()));
    assert_eq!(bench.read(0, 512), Ok(vec![0x77; 512]), "a hint that was not taken");
}

#[test]
fn discards_release_space() {
    let (mut bench, _) = Bench::with_file(4096);
    for at in (0..SIZE).step_by(1 << 17) {
        assert_eq!(bench.write(at, 1 << 17, 0x77, false), Ok(()));
    }
    let blocks = |bench: &Bench| fs::metadata(bench.path("disk.img")).unwrap().blocks();
    let before = blocks(&bench);
    assert_eq!(bench.run(IoRequest::Discard { at: 0, len: SIZE / 2 }), Ok(()));
    assert!(blocks(&bench) * 512 <= before * 512 - SIZE / 2);
}

#[test]
fn a_read_only_device_refuses_every_change() {
    let (mut bench, backing) = Bench::with_file(512);
    bench.ring.detach(STORE);
    drop(backing);
    let kind = BackingKind::File { path: bench.path("disk.img"), size: None };
    let config = BackingConfig { kind, block_size_bytes: 512, read_only: true, shared: false };
    let backing = Arc::new(BackingDevice::open(&config).unwrap());
    bench.ring.attach(STORE, backing).unwrap();
    let denied = Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
    assert_eq!(bench.write(0, 512, 1, false), denied);
    assert_eq!(bench.run(IoRequest::Discard { at: 0, len: 512 }), denied);
    assert_eq!(bench.run(IoRequest::Zero { at: 0, len: 512, deallocate: false }), denied);
    assert_eq!(bench.run(IoRequest::Flush), Ok(()));
    assert_eq!(bench.read(0, 512), Ok(vec![0; 512]));
}

#[test]
fn operations_beyond_the_ring_size_are_queued() {
    let mut bench = Bench::new(3);
    let backing = bench.file("disk.img", 4096);
    bench.ring.attach(STORE, backing).unwrap();
    for n in 0..200u64 {
        let from = bench.filled(4096, n as u8);
        bench.submit(IoRequest::Write { from, at: n * 4096, fua: false });
    }
    assert_eq!(bench.ring.in_flight(), 200);
    for done in bench.await_done(200) {
        assert_eq!(done.outcome, Ok(()));
        bench.pool.give(done.buf.unwrap());
    }
    assert!(bench.pool.is_full());
    for n in 0..200u64 {
        assert_eq!(bench.read(n * 4096, 4096), Ok(vec![n as u8; 4096]));
    }
}

/// As for a Write with in-capsule data: the data behind the command begin on a page boundary.
#[test]
fn a_cancellation_reports_whether_its_operation_was_aborted() {
    const WISH: Tag = 1 << 20;
    let (mut bench, _) = Bench::with_file(4096);
    let mut given_back = 0;
    for round in 0..200u64 {
        for tag in 0..4 {
            let op = match (round + tag) % 4 {
                0 => IoRequest::Flush,
                1 => IoRequest::Zero { at: tag << 12, len: 4096, deallocate: false },
                2 => IoRequest::Write { from: bench.filled(4096, 7), at: tag << 12, fua: true },
                _ => IoRequest::Read { into: bench.filled(4096, 0), at: tag << 12 },
            };
            BlockDevice::submit(&mut bench.ring, STORE, tag, op);
        }
        // Before the kernel has them, while it has them, or after all have completed.
        if !round.is_multiple_of(3) {
            bench.ring.submit();
        }
        if round % 3 == 2 {
            bench.done = bench.await_done(4);
        }
        for tag in 0..4 {
            bench.ring.recall(WISH | tag, tag);
        }
        let home = bench.await_done(8);
        let outcome = |tag| home.iter().find(|done| done.tag == tag).expect("home").outcome;
        for tag in 0..4 {
            let aborted = outcome(tag) == Err(Status::ABORT_REQUESTED);
            assert_eq!(outcome(WISH | tag).is_ok(), aborted, "round {round}, operation {tag}");
            assert!(aborted || outcome(tag).is_ok());
            assert!(aborted || round % 3 != 0, "the kernel did not have it");
            assert!(!aborted || round % 3 != 2, "it was home");
            given_back += u32::from(aborted);
        }
        home.into_iter().filter_map(|done| done.buf).for_each(|buf| bench.pool.give(buf));
    }
    assert!(given_back >= 4 * 67);
    assert!(bench.pool.is_full() && bench.ring.in_flight() == 0);
}

#[test]
fn receive_buffers_are_written_from_registered_memory() {
    let (mut bench, _) = Bench::with_file(4096);
    let mut buf = bench.pool.take_receive().unwrap();
    buf.select(buf.start() + 64, 8192);
    bench.pool.bytes_mut(&mut buf).fill(0x99);
    assert_eq!(bench.run(IoRequest::Write { from: buf, at: 0, fua: false }), Ok(()));
    assert_eq!(bench.read(0, 8192), Ok(vec![0x99; 8192]));
    let plain = if bench.ring.memory.registered { 0 } else { 2 };
    assert_eq!(bench.ring.stats().plain, plain);
}

#[test]
fn addresses_passed_to_the_kernel_are_within_the_pool() {
    let plan = PoolPlan {
        cells: 0,
        receives: 1,
        lead_bytes: 0,
        tail_bytes: 0,
        data_bytes: 1 << 30,
        largest_bytes: 1 << 17,
    };
    // Larger than a chunk; mapped, not touched.
    let mut pool = Pool::new(plan).unwrap();
    let region = pool.region().clone();
    let memory =
        Memory { region: pool.region().clone(), zeros: pool.region().clone(), registered: true };
    let (mut crossing, mut inside) = (0, 0);
    while let Some(buf) = pool.take_data(1 << 17) {
        let place = memory.locate(&buf, 512, 512).unwrap();
        assert_eq!(place.addr as usize, region.addr() + buf.offset() as usize + 512);
        assert_eq!(u64::from(place.chunk.unwrap()), (buf.offset() + 512) >> CHUNK_SHIFT);
        let whole = memory.locate(&buf, 0, buf.len()).unwrap();
        assert!(whole.addr as usize + (1 << 17) <= region.addr() + region.len());
        match whole.chunk {
            None => crossing += 1,
            Some(_) => inside += 1,
        }
        assert!(memory.locate(&buf, 1, 1 << 17).is_none());
        assert!(memory.locate(&buf, u32::MAX, 2).is_none());
    }
    assert_eq!((crossing, inside), (1, 8191));
}

/// The kernel refuses flags and modes that it does not know, and to synchronise a pipe.
#[test]
fn a_call_hands_flags_and_mode_to_the_kernel() {
    let bench = Bench::new(4);
    let file = fs::File::create_new(bench.path("file")).unwrap();
    let (_, pipe) = nix::unistd::pipe().unwrap();
    let mut bytes = [1u8; 8];
    let addr = bytes.as_mut_ptr();
    let place = || Place { addr, chunk: None };
    let write = |flags| CallOp::Write { from: place(), len: 8, at: 0, flags };
    let cases = [
        (file.as_raw_fd(), write(libc::RWF_DSYNC), 8),
        (file.as_raw_fd(), write(1 << 30), -libc::EOPNOTSUPP),
        (file.as_raw_fd(), CallOp::Sync, 0),
        (pipe.as_raw_fd(), CallOp::Sync, -libc::EINVAL),
        (file.as_raw_fd(), CallOp::Allocate { mode: 0, at: 0, len: 16 }, 0),
        (file.as_raw_fd(), CallOp::Allocate { mode: 1 << 30, at: 0, len: 16 }, -libc::EOPNOTSUPP),
        (file.as_raw_fd(), CallOp::Read { into: place(), len: 8, at: 4 }, 8),
        (-1, CallOp::Read { into: place(), len: 8, at: 4 }, -libc::EBADF),
    ];
    for (fd, op, answer) in cases {
        // SAFETY: `bytes` lives longer than the calls, and nothing else uses it meanwhile.
        assert_eq!(unsafe { execute(&Call { fd, op }) }, answer);
    }
    assert_eq!(bytes, [1, 1, 1, 1, 0, 0, 0, 0]);
}

#[test]
fn a_buffer_of_a_larger_pool_is_refused() {
    let (mut bench, _) = Bench::with_file(512);
    let plan = PoolPlan { data_bytes: 64 << 20, ..*bench.pool.plan() };
    let mut other = Pool::new(plan).unwrap();
    let far = std::iter::from_fn(|| other.take_data(1 << 17)).last().unwrap();
    bench.submit(IoRequest::Read { into: far, at: 0 });
    let done = bench.await_done(1).pop().unwrap();
    assert_eq!(done.outcome, Err(Status::INTERNAL_ERROR.with_dnr()));
    other.give(done.buf.unwrap());
}

#[test]
fn io_of_an_unknown_device_fails_with_invalid_namespace() {
    let mut bench = Bench::new(4);
    let gone = Err(Status::INVALID_NAMESPACE.with_dnr());
    assert_eq!(bench.write(0, 512, 1, false), gone);
    let backing = bench.file("disk.img", 512);
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    assert_eq!(bench.write(0, 512, 1, false), Ok(()));
    bench.ring.detach(STORE);
    assert_eq!(bench.write(0, 512, 1, false), gone);
    assert_eq!(Arc::strong_count(&backing), 1);
    assert!(bench.ring.attach(DeviceId(4), Arc::clone(&backing)).is_err());
    assert!(bench.ring.attach(DeviceId(u32::MAX), backing).is_err());
    bench.ring.detach(DeviceId(u32::MAX));
}

/// Operations use the store they were submitted to, even if its id is reused meanwhile.
#[test]
fn a_reused_device_id_never_mixes_data_of_two_devices() {
    for submitted in [false, true] {
        let (mut bench, old) = Bench::with_file(512);
        for n in 0..20u64 {
            let from = bench.filled(4096, 0xAA);
            bench.submit(IoRequest::Write { from, at: n * 4096, fua: true });
        }
        bench.submit(IoRequest::Zero { at: 1 << 19, len: 4096, deallocate: false });
        bench.submit(IoRequest::Flush);
        if submitted {
            bench.ring.submit();
        }
        let new = bench.file("new.img", 512);
        bench.ring.attach(STORE, Arc::clone(&new)).unwrap();
        let from = bench.filled(4096, 0xBB);
        bench.submit(IoRequest::Write { from, at: 0, fua: false });
        let kept: Weak<BackingDevice> = Arc::downgrade(&old);
        drop(old);
        for done in bench.await_done(23) {
            assert_eq!(done.outcome, Ok(()));
            if let Some(buf) = done.buf {
                bench.pool.give(buf);
            }
        }
        assert!(kept.upgrade().is_none(), "the old store is let go");
        assert_eq!(bench.read(0, 4096), Ok(vec![0xBB; 4096]));
        let old = fs::read(bench.path("disk.img")).unwrap();
        assert!(old[..20 * 4096].iter().all(|byte| *byte == 0xAA));
        let new = fs::read(bench.path("new.img")).unwrap();
        assert!(new[4096..].iter().all(|byte| *byte == 0));
        assert!(bench.pool.is_full());
    }
}

/// The kernel's table of files of a ring, as the kernel shows it.
fn table_of_files(bench: &Bench) -> String {
    let Engine::Uring(io) = &bench.ring.engine else { panic!("threads have no table") };
    let info = format!("/proc/self/fdinfo/{}", io.as_raw_fd());
    fs::read_to_string(info).unwrap()
}

/// Two stores get the id of one with operations in flight: they get no slot in the table, and the
/// slot is not vacated when the first of them is detached.
#[test]
fn a_registered_file_slot_is_reused_only_after_its_last_operation() {
    let (mut bench, old) = Bench::with_file(512);
    for n in 0..20u64 {
        let from = bench.filled(4096, 0xAA);
        bench.submit(IoRequest::Write { from, at: n * 4096, fua: false });
    }
    for name in ["second.img", "third.img"] {
        let backing = bench.file(name, 512);
        bench.ring.attach(STORE, backing).unwrap();
        let shown = table_of_files(&bench);
        assert!(shown.contains("disk.img") && !shown.contains(name), "{shown}");
    }
    let from = bench.filled(4096, 0xCC);
    bench.submit(IoRequest::Write { from, at: 0, fua: false });
    for done in bench.await_done(21) {
        assert_eq!(done.outcome, Ok(()));
        bench.pool.give(done.buf.unwrap());
    }
    drop(old);
    let file = |name| fs::read(bench.path(name)).unwrap();
    assert!(file("disk.img")[..20 * 4096].iter().all(|byte| *byte == 0xAA));
    assert!(file("third.img")[..4096].iter().all(|byte| *byte == 0xCC));
    assert!(file("second.img").iter().all(|byte| *byte == 0));
    // The last operation has vacated it for the next store.
    let shown = table_of_files(&bench);
    assert!(!shown.contains("disk.img"), "{shown}");
    let fourth = bench.file("fourth.img", 512);
    bench.ring.attach(STORE, fourth).unwrap();
    assert!(table_of_files(&bench).contains("fourth.img"));
    assert_eq!(bench.write(0, 4096, 0xDD, false), Ok(()));
    assert_eq!(bench.read(0, 4096), Ok(vec![0xDD; 4096]));
}

#[derive(Clone, Debug)]
enum Act {
    Read(u64, u64),
    Write(u64, u64, u8, bool),
    Discard(u64, u64),
    Zero(u64, u64, bool),
    Flush,
}

const BLOCKS: u64 = 64;

fn act() -> impl Strategy<Value = Act> {
    let range = (0..BLOCKS).prop_flat_map(|at| (Just(at), 1..=(BLOCKS - at)));
    prop_oneof![
        range.clone().prop_map(|(at, n)| Act::Read(at, n)),
        (range.clone(), 1u8.., any::<bool>()).prop_map(|((at, n), b, f)| Act::Write(at, n, b, f)),
        range.clone().prop_map(|(at, n)| Act::Discard(at, n)),
        (range, any::<bool>()).prop_map(|((at, n), d)| Act::Zero(at, n, d)),
        Just(Act::Flush),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// After any operations in any order, the store equals a model in memory.
    #[test]
    fn device_contents_match_a_model_after_any_operations(
        acts in proptest::collection::vec(act(), 1..60),
        ram: bool,
        large: bool,
    ) {
        let block = if large { 4096 } else { 512u32 };
        let (mut bench, backing) = match ram {
            true => Bench::with_kind(BackingKind::Ram { size: SIZE }),
            false => Bench::with_file(block),
        };
        let model = agree(&mut bench, &backing, acts, block)?;
        if !ram {
            let mut stored = vec![0; model.len()];
            let file = fs::File::open(bench.path("disk.img")).unwrap();
            file.read_exact_at(&mut stored, 0).unwrap();
            prop_assert!(stored == model);
        }
    }
}

/// Executes operations on a store and on a model in memory, which is returned.
fn agree(
    bench: &mut Bench,
    backing: &BackingDevice,
    acts: Vec<Act>,
    block: u32,
) -> Result<Vec<u8>, TestCaseError> {
    let bytes = |blocks: u64| blocks * u64::from(block);
    // Buffers end at 128 KiB.
    let capped = |blocks: u64| blocks.min((1 << 17) / u64::from(block)) as u32 * block;
    let mut model = vec![0u8; bytes(BLOCKS) as usize];
    for act in acts {
        match act {
            Act::Read(at, n) => {
                let (at, len) = (bytes(at), capped(n));
                let read = bench.read(at, len);
                prop_assert_eq!(read.as_deref(), Ok(&model[at as usize..][..len as usize]));
            }
            Act::Write(at, n, byte, fua) => {
                let (at, len) = (bytes(at), capped(n));
                prop_assert_eq!(bench.write(at, len, byte, fua), Ok(()));
                model[at as usize..][..len as usize].fill(byte);
            }
            Act::Discard(at, n) => {
                let (at, len) = (bytes(at), bytes(n));
                prop_assert_eq!(bench.run(IoRequest::Discard { at, len }), Ok(()));
                if backing.can_discard() {
                    model[at as usize..][..len as usize].fill(0);
                }
            }
            Act::Zero(at, n, deallocate) => {
                let (at, len) = (bytes(at), bytes(n));
                prop_assert_eq!(bench.run(IoRequest::Zero { at, len, deallocate }), Ok(()));
                model[at as usize..][..len as usize].fill(0);
            }
            Act::Flush => prop_assert_eq!(bench.run(IoRequest::Flush), Ok(())),
        }
    }
    prop_assert!(bench.pool.is_full());
    prop_assert_eq!(backing.health().failures(), 0);
    Ok(model)
}

/// A loop device, removed on drop.
pub(crate) struct Loop(pub(crate) String);

impl Loop {
    pub(crate) fn new(image: &Path, sector: u32) -> Loop {
        let made = std::process::Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on", "--sector-size", &sector.to_string()])
            .arg(image)
            .output()
            .unwrap();
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        Loop(String::from_utf8(made.stdout).unwrap().trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = std::process::Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

fn image(bench: &Bench) -> PathBuf {
    let path = bench.path("image");
    fs::File::create(&path).unwrap().set_len(SIZE).unwrap();
    path
}

/// A small ext4 on a loop device, unmounted on drop.
struct Mount(PathBuf);

impl Mount {
    fn new(device: &Loop, at: PathBuf) -> Mount {
        let run = |program: &str, arguments: &[&str]| {
            let output = std::process::Command::new(program).args(arguments).output().unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        };
        fs::create_dir(&at).unwrap();
        run("mkfs.ext4", &["-q", &device.0]);
        run("mount", &[&device.0, at.to_str().unwrap()]);
        Mount(at)
    }

    /// Blocks every change until the returned value is dropped.
    fn freeze(&self) -> Frozen {
        let done = std::process::Command::new("fsfreeze").arg("--freeze").arg(&self.0).status();
        assert!(done.unwrap().success());
        Frozen(self.0.clone())
    }

    /// Makes the file system fail every operation, as after the loss of its device.
    fn shut_down(&self) {
        const EXT4_IOC_SHUTDOWN: libc::c_ulong = 0x8004_587D;
        const WITHOUT_LOG_FLUSH: u32 = 2;
        let directory = fs::File::open(&self.0).unwrap();
        let flags = WITHOUT_LOG_FLUSH;
        // SAFETY: this request reads one u32, which lives until the call returns.
        let result = unsafe { libc::ioctl(directory.as_raw_fd(), EXT4_IOC_SHUTDOWN as _, &flags) };
        assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
    }
}

/// A frozen file system: changes block, as on a device that does not answer.
struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = std::process::Command::new("fsfreeze").arg("--unfreeze").arg(&self.0).status();
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // A kernel may keep a file that a ring had registered for a second.
        for _ in 0..50 {
            let umount = std::process::Command::new("umount").arg(&self.0).output();
            if umount.is_ok_and(|output| output.status.success()) {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// The durability flags of the submitted entry: whether a write has `RWF_DSYNC`, or an fsync is a
/// fdatasync. (`rw_flags` and `fsync_flags` of `struct io_uring_sqe` are the same four bytes.)
fn flags_of(entry: &squeue::Entry) -> (u8, u32) {
    assert_eq!(size_of_val(entry), 64);
    // SAFETY: an entry is 64 plain bytes: the structure that the kernel reads.
    let bytes = unsafe { &*std::ptr::from_ref(entry).cast::<[u8; 64]>() };
    (bytes[0], u32::from_le_bytes([bytes[28], bytes[29], bytes[30], bytes[31]]))
}
