//! Tests of opening real files, and of operations without a kernel.

use std::fs;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use nix::fcntl::{FcntlArg, fcntl};
use nvme::status::Status;
use rdma::{Buf, Pool, PoolPlan};

use super::request::{PendingIo, Step, ZEROS_BYTES};
use crate::durable::testing::calls;
use crate::testing::directory;
use crate::*;

fn config(path: &Path, size: Option<u64>, block: u32) -> BackingConfig {
    BackingConfig {
        kind: BackingKind::File { path: path.to_owned(), size },
        block_size_bytes: block,
        read_only: false,
        shared: false,
    }
}

fn refusal(config: &BackingConfig) -> String {
    BackingDevice::open(config).expect_err("should be refused").to_string()
}

fn assert_says(sentence: &str, parts: &[&str]) {
    for part in parts {
        assert!(sentence.contains(part), "{sentence:?} lacks {part:?}");
    }
}

#[test]
fn a_missing_file_is_created_sparse_private_and_of_its_size() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    let backing = BackingDevice::open(&config(&path, Some(64 << 20), 4096)).unwrap();
    let meta = fs::metadata(&path).unwrap();
    assert_eq!((meta.len(), meta.mode() & 0o777), (64 << 20, 0o600));
    assert!(meta.blocks() * 512 < 1 << 20, "not sparse: {} blocks", meta.blocks());
    assert_eq!((backing.blocks(), backing.block_size_bytes()), (16384, 4096));
    assert_eq!(backing.kind(), Kind::File);
    assert!(backing.has_volatile_cache() && !backing.is_read_only());
    assert_eq!(backing.name(), path.display().to_string());
}

#[test]
fn a_file_and_its_name_are_durable_before_it_is_served() {
    let dir = directory();
    let (path, at) = (dir.path().join("disk.img"), dir.path().file_name().unwrap());
    let all = ["sync disk.img".to_owned(), format!("sync directory {}", at.display())];
    for what in ["made by us", "made by somebody else, or before"] {
        let opened = calls(|| BackingDevice::open(&config(&path, Some(1 << 20), 512)).unwrap());
        assert_eq!(opened.1, all, "{what}");
    }
}

#[test]
fn an_existing_file_is_opened_with_its_size() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    drop(BackingDevice::open(&config(&path, Some(1 << 20), 512)).unwrap());
    let again = BackingDevice::open(&config(&path, None, 512)).unwrap();
    assert_eq!(again.blocks(), 2048);
    drop(again);
    let link = dir.path().join("link");
    symlink(&path, &link).unwrap();
    assert_eq!(BackingDevice::open(&config(&link, Some(1 << 20), 4096)).unwrap().blocks(), 256);
}

#[test]
fn invalid_and_mismatched_sizes_are_refused() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    assert_says(&refusal(&config(&path, None, 4096)), &["does not exist", "give a size"]);
    for (size, block, parts) in [
        (4096 * 3 + 512, 4096, &["12800", "not a whole number of blocks of 4096", "= 512"][..]),
        (1000, 512, &["1000 bytes is not a whole number", "use 512 bytes"]),
        (0, 512, &["0 bytes cannot be served"]),
        (u64::MAX - 4095, 4096, &["cannot be served"]),
        (8192, 1024, &["block size 1024 is not supported", "512 or 4096"]),
    ] {
        assert_says(&refusal(&config(&path, Some(size), block)), parts);
        assert!(!path.exists(), "{size} left a file behind");
        for kind in [BackingKind::Ram { size }, BackingKind::Null { size }] {
            let memory =
                BackingConfig { kind, block_size_bytes: block, read_only: false, shared: false };
            assert!(BackingDevice::open(&memory).is_err());
        }
    }
    drop(BackingDevice::open(&config(&path, Some(1 << 20), 4096)).unwrap());
    let other = refusal(&config(&path, Some(2 << 20), 4096));
    assert_says(&other, &["1048576", "2097152", "never grown or shrunk"]);
    // A longer file is served in part, because its namespace may have been made smaller before. The
    // rest of the file is not changed.
    fs::write(&path, vec![0xA5; 1 << 20]).unwrap();
    let part = BackingDevice::open(&config(&path, Some(1 << 19), 4096)).unwrap();
    assert_eq!((part.blocks(), fs::metadata(&path).unwrap().len()), (128, 1 << 20));
    drop(part);
    assert!(fs::read(&path).unwrap().iter().all(|byte| *byte == 0xA5));
    fs::write(&path, [1; 1000]).unwrap();
    assert_says(&refusal(&config(&path, None, 512)), &["1000 bytes is not a whole number"]);
}

#[test]
fn paths_other_than_files_and_block_devices_are_refused() {
    let dir = directory();
    assert_says(&refusal(&config(dir.path(), None, 512)), &["is a directory"]);
    let null = Path::new("/dev/null");
    assert!(fs::metadata(null).unwrap().file_type().is_char_device());
    assert_says(&refusal(&config(null, None, 512)), &["is a character device"]);
    let _socket = std::os::unix::net::UnixListener::bind(dir.path().join("socket")).unwrap();
    assert_says(&refusal(&config(&dir.path().join("socket"), None, 512)), &["is a socket"]);
    let dangling = dir.path().join("dangling");
    symlink(dir.path().join("nowhere"), &dangling).unwrap();
    let sentence = refusal(&config(&dangling, Some(4096), 512));
    assert_says(&sentence, &["symbolic link to", "nowhere", "does not exist"]);
    let orphan = dir.path().join("no/such/directory.img");
    assert_says(&refusal(&config(&orphan, Some(4096), 512)), &["cannot create", "directory first"]);
    let mut read_only = config(&dir.path().join("new"), Some(4096), 512);
    read_only.read_only = true;
    assert_says(&refusal(&read_only), &["read-only namespace is not created"]);
}

/// procfs is a file system without direct I/O that every Linux has.
#[test]
fn an_open_error_names_the_file_system_without_direct_io() {
    let path = Path::new("/proc/version");
    let sentence = refusal(&BackingConfig { read_only: true, ..config(path, None, 512) });
    assert_says(&sentence, &["/proc/version", "O_DIRECT", "file system (proc)", "ext4"]);
}

const LOCK_PATH: &str = "NVMFD_TEST_LOCK_PATH";

#[test]
fn two_daemons_never_serve_one_file() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    let first = BackingDevice::open(&config(&path, Some(1 << 20), 512)).unwrap();
    let second = refusal(&config(&path, None, 512));
    let us = format!("process {}", std::process::id());
    assert_says(&second, &["in use by another nvmfd", &us]);
    let child = std::process::Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "tests::second_daemon_is_refused_a_locked_file",
            "--nocapture",
        ])
        .env(LOCK_PATH, &path)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&child.stdout).into_owned();
    assert_says(&said, &["in use by another nvmfd", &us, "1 passed"]);
    drop(first);
    let reader = BackingConfig { read_only: true, ..config(&path, None, 512) };
    let one = BackingDevice::open(&reader).unwrap();
    let two = BackingDevice::open(&reader).unwrap();
    assert!(refusal(&config(&path, None, 512)).contains("in use"), "a writer beside readers");
    drop((one, two));
    BackingDevice::open(&config(&path, None, 512)).unwrap();
}

/// The kernel's list of locks is read while others take and release locks.
#[test]
fn the_lock_holder_is_reported_despite_concurrent_lock_changes() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    let _first = BackingDevice::open(&config(&path, Some(1 << 20), 512)).unwrap();
    let us = format!("process {}", std::process::id());
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let file = tempfile::tempfile().unwrap();
                while !over.load(Relaxed) {
                    record_lock(&file, libc::F_WRLCK);
                    record_lock(&file, libc::F_UNLCK);
                }
            });
        }
        let missed = (0..4000).find(|_| !refusal(&config(&path, None, 512)).contains(&us));
        over.store(true, Relaxed);
        assert_eq!(missed, None);
    });
}

/// Another kind of lock in the same list.
fn record_lock(file: &fs::File, kind: libc::c_int) {
    let (l_type, l_whence) = (kind as libc::c_short, libc::SEEK_SET as libc::c_short);
    let lock = libc::flock { l_type, l_whence, l_start: 0, l_len: 0, l_pid: 0 };
    fcntl(file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
}

#[test]
#[ignore = "the second process of two_daemons_never_serve_one_file"]
fn second_daemon_is_refused_a_locked_file() {
    if let Some(path) = std::env::var_os(LOCK_PATH) {
        println!("{}", refusal(&config(&PathBuf::from(path), None, 512)));
    }
}

#[test]
fn a_device_with_another_identity_is_no_replacement() {
    let dir = directory();
    let device = |identity: Option<&str>| {
        let mut backing =
            BackingDevice::open(&config(&dir.path().join("a"), Some(4096), 512)).unwrap();
        backing.identity = identity.map(str::to_owned);
        // Its lock is released as well.
        backing.hold = None;
        backing
    };
    let served = device(Some("naa.1"));
    for (found, fits) in [(Some("naa.1"), true), (None, true), (Some("naa.2"), false)] {
        for trusted in [false, true] {
            let outcome = served.may_be_replaced_by(&device(found), trusted);
            assert_eq!(outcome.is_ok(), fits, "{found:?}");
        }
    }
    let refused = served.may_be_replaced_by(&device(Some("naa.2")), true).unwrap_err().to_string();
    assert_says(&refused, &["another device now (naa.2)", "than it was (naa.1)"]);
    assert!(device(None).may_be_replaced_by(&served, false).is_ok(), "nobody knows");
}

struct Stage {
    pool: Pool,
    backing: BackingDevice,
}

impl Stage {
    /// A store on a file that the kernel never operates on.
    fn new() -> (tempfile::TempDir, Stage) {
        let dir = directory();
        let backing =
            BackingDevice::open(&config(&dir.path().join("a"), Some(1 << 20), 512)).unwrap();
        let plan = PoolPlan::without_receives(0, 1 << 20, 1 << 16);
        (dir, Stage { pool: Pool::new(plan).unwrap(), backing })
    }

    fn buf(&mut self, len: u32) -> Buf {
        self.pool.take_data(len).unwrap()
    }

    fn read(&mut self, at: u64, len: u32) -> PendingIo {
        let into = self.buf(len);
        PendingIo::new(0, 0, IoRequest::Read { into, at })
    }

    fn write(&mut self, at: u64, len: u32, fua: bool) -> PendingIo {
        let from = self.buf(len);
        PendingIo::new(0, 0, IoRequest::Write { from, at, fua })
    }
}

fn flight(op: IoRequest) -> PendingIo {
    PendingIo::new(0, 0, op)
}

#[test]
fn short_transfers_go_on_with_the_rest() {
    let (_dir, mut stage) = Stage::new();
    let mut read = stage.read(8192, 4096);
    assert_eq!(read.step(&stage.backing), Step::Read { at: 8192, skip: 0, len: 4096 });
    assert_eq!(read.advance(1024, &stage.backing), None);
    assert_eq!(read.step(&stage.backing), Step::Read { at: 9216, skip: 1024, len: 3072 });
    assert_eq!(read.advance(-libc::EINTR, &stage.backing), None);
    assert_eq!(read.step(&stage.backing), Step::Read { at: 9216, skip: 1024, len: 3072 });
    assert_eq!(read.advance(3072, &stage.backing), Some(Ok(())));
    let mut write = stage.write(0, 4096, true);
    assert_eq!(
        write.step(&stage.backing),
        Step::Write { at: 0, skip: 0, len: 4096, durable: true }
    );
    assert_eq!(write.advance(512, &stage.backing), None);
    assert_eq!(
        write.step(&stage.backing),
        Step::Write { at: 512, skip: 512, len: 3584, durable: true }
    );
}

#[test]
fn impossible_kernel_results_are_internal_errors() {
    let (_dir, mut stage) = Stage::new();
    let internal = Some(Err(Status::INTERNAL_ERROR.with_dnr()));
    assert_eq!(stage.read(0, 4096).advance(4097, &stage.backing), internal);
    assert_eq!(stage.write(0, 4096, false).advance(0, &stage.backing), internal);
    assert_eq!(stage.read(0, 4096).advance(i32::MIN, &stage.backing), internal);
    assert_eq!(stage.backing.health().failures(), 3);
}

#[test]
fn a_file_end_within_the_namespace_takes_the_device_down() {
    let (_dir, mut stage) = Stage::new();
    let not_ready = Some(Err(Status::NAMESPACE_NOT_READY.with_crd(1)));
    assert_eq!(stage.read(0, 4096).immediate_result(&stage.backing), None);
    assert_eq!(stage.read(0, 4096).advance(0, &stage.backing), not_ready);
    assert!(stage.backing.health().is_down() && stage.backing.health().is_suspect());
    // In particular no write, which would extend it again.
    assert_eq!(stage.write(0, 4096, false).immediate_result(&stage.backing), not_ready);
    for op in [
        IoRequest::Flush,
        IoRequest::Discard { at: 0, len: 512 },
        IoRequest::Zero { at: 0, len: 512, deallocate: true },
    ] {
        assert_eq!(flight(op).immediate_result(&stage.backing), not_ready);
    }
}

#[test]
fn writes_are_unsynced_until_a_flush_succeeds() {
    let (_dir, mut stage) = Stage::new();
    let health = std::sync::Arc::clone(stage.backing.health());
    assert!(health.has_unsynced(), "an earlier process may have written something");
    health.begin_sync();
    health.end_sync();
    assert_eq!(stage.write(0, 512, true).advance(512, &stage.backing), Some(Ok(())));
    assert!(!health.has_unsynced(), "it was durable at once");
    assert_eq!(stage.write(0, 512, false).advance(512, &stage.backing), Some(Ok(())));
    assert!(health.has_unsynced());
    let mut flush = flight(IoRequest::Flush);
    assert_eq!(flush.step(&stage.backing), Step::Sync);
    assert!(health.has_unsynced(), "it may have to wait for its turn");
    health.begin_sync();
    assert_eq!(flush.advance(-libc::ECANCELED, &stage.backing), Some(Err(Status::ABORT_REQUESTED)));
    health.end_sync();
    assert!(health.has_unsynced(), "it was taken back");
}

/// A removed device ends at 0, and the kernel returns ENOSPC for a write beyond its end, as for a
/// full file system.
#[test]
fn enospc_of_a_device_is_retryable_and_of_a_file_is_not() {
    let (_dir, mut stage) = Stage::new();
    let full = Status::CAPACITY_EXCEEDED;
    let answer = stage.write(0, 512, false).advance(-libc::ENOSPC, &stage.backing);
    assert_eq!(answer, Some(Err(full.with_dnr())));
    stage.backing.kind = Kind::Device;
    let answer = stage.write(0, 512, false).advance(-libc::ENOSPC, &stage.backing);
    assert_eq!(answer, Some(Err(full.with_crd(1))));
    assert!(stage.backing.health().is_suspect());
}

#[test]
fn eagain_is_retried_a_bounded_number_of_times() {
    let (_dir, mut stage) = Stage::new();
    let mut read = stage.read(0, 512);
    let answers = (0..1000).map_while(|_| match read.advance(-libc::EAGAIN, &stage.backing) {
        None => Some(()),
        Some(outcome) => {
            assert_eq!(outcome, Err(Status::COMMAND_INTERRUPTED));
            None
        }
    });
    assert!(answers.count() < 100);
}

#[test]
fn zeroing_falls_back_to_punch_and_then_to_writes() {
    let (_dir, stage) = Stage::new();
    let backing = &stage.backing;
    let len = 600 * 1024;
    let mut zero = flight(IoRequest::Zero { at: 512, len, deallocate: false });
    assert_eq!(zero.step(backing), Step::Space { how: Space::ZeroRange, at: 512, len });
    assert_eq!(zero.advance(-libc::EOPNOTSUPP, backing), None);
    assert_eq!(zero.step(backing), Step::Space { how: Space::Punch, at: 512, len });
    assert_eq!(zero.advance(-libc::EOPNOTSUPP, backing), None);
    let mut at = 512;
    for piece in [ZEROS_BYTES, ZEROS_BYTES, 600 * 1024 - 2 * ZEROS_BYTES] {
        assert_eq!(zero.step(backing), Step::Zeros { at, len: piece });
        at += u64::from(piece);
        let last = at == 512 + len;
        assert_eq!(zero.advance(piece as i32, backing), last.then_some(Ok(())));
    }
    // A refused mode stays refused, and Deallocate is advisory.
    assert!(!backing.can_discard());
    assert_eq!(flight(IoRequest::Discard { at: 0, len }).immediate_result(backing), Some(Ok(())));
    let mut other = flight(IoRequest::Zero { at: 0, len: 512, deallocate: true });
    assert_eq!(other.step(backing), Step::Zeros { at: 0, len: 512 });
}

#[test]
fn deallocating_write_zeroes_and_discards_punch_holes() {
    let (_dir, stage) = Stage::new();
    let mut zero = flight(IoRequest::Zero { at: 0, len: 512, deallocate: true });
    let punch = Step::Space { how: Space::Punch, at: 0, len: 512 };
    assert_eq!(zero.step(&stage.backing), punch);
    let mut discard = flight(IoRequest::Discard { at: 0, len: 512 });
    assert_eq!(discard.step(&stage.backing), punch);
    assert!(stage.backing.can_discard() && !stage.backing.health().keeps_space());
    assert_eq!(discard.advance(-libc::EOPNOTSUPP, &stage.backing), Some(Ok(())));
    assert!(!stage.backing.can_discard() && stage.backing.health().keeps_space());
}

#[test]
fn a_failed_flush_fails_all_later_flushes_and_fua_writes() {
    for (errno, status) in
        [(libc::EIO, Status::WRITE_FAULT), (libc::ENOSPC, Status::CAPACITY_EXCEEDED.with_dnr())]
    {
        let (_dir, mut stage) = Stage::new();
        // In progress at that time: it may succeed in the kernel, but does not confirm anything.
        let mut beside = flight(IoRequest::Flush);
        assert_eq!(beside.immediate_result(&stage.backing), None);
        assert_eq!(flight(IoRequest::Flush).advance(-errno, &stage.backing), Some(Err(status)));
        assert_eq!(beside.advance(0, &stage.backing), Some(Err(status)));
        assert_eq!(flight(IoRequest::Flush).immediate_result(&stage.backing), Some(Err(status)));
        let fua = stage.write(0, 512, true);
        assert_eq!(fua.immediate_result(&stage.backing), Some(Err(status)));
        let plain = stage.write(0, 512, false);
        assert_eq!(plain.immediate_result(&stage.backing), None);
        // The first failure is the one that is reported.
        stage.backing.fail_sync(Status::INTERNAL_ERROR);
        assert_eq!(stage.backing.sync_failure(), Some(status));
    }
}

#[test]
fn eio_of_a_fua_write_is_sticky_and_enospc_is_not() {
    let (_dir, mut stage) = Stage::new();
    let full = stage.write(0, 512, true).advance(-libc::ENOSPC, &stage.backing);
    assert_eq!(full, Some(Err(Status::CAPACITY_EXCEEDED.with_dnr())));
    let plain = stage.write(0, 512, false).advance(-libc::EIO, &stage.backing);
    assert_eq!(plain, Some(Err(Status::WRITE_FAULT)));
    assert_eq!(stage.backing.sync_failure(), None);
    let lost = stage.write(0, 512, true).advance(-libc::EIO, &stage.backing);
    assert_eq!(lost, Some(Err(Status::WRITE_FAULT)));
    assert_eq!(stage.backing.sync_failure(), Some(Status::WRITE_FAULT));
}

#[test]
fn operations_outside_the_namespace_never_reach_the_kernel() {
    let (_dir, mut stage) = Stage::new();
    let size = stage.backing.size_bytes();
    let outside = Some(Err(Status::LBA_OUT_OF_RANGE.with_dnr()));
    assert_eq!(stage.read(size, 512).immediate_result(&stage.backing), outside);
    assert_eq!(stage.read(size - 512, 1024).immediate_result(&stage.backing), outside);
    assert_eq!(stage.write(u64::MAX, 512, false).immediate_result(&stage.backing), outside);
    let discard = flight(IoRequest::Discard { at: 512, len: u64::MAX });
    assert_eq!(discard.immediate_result(&stage.backing), outside);
    assert_eq!(stage.read(size - 512, 512).immediate_result(&stage.backing), None);
}

#[test]
fn pending_io_beyond_a_reduced_size_is_out_of_range() {
    let (_dir, mut stage) = Stage::new();
    let size = stage.backing.size_bytes();
    let outside = Some(Err(Status::LBA_OUT_OF_RANGE.with_dnr()));
    let mut waits = stage.read(size - 512, 512);
    assert_eq!(waits.immediate_result(&stage.backing), None);
    stage.backing.resize(size - 512);
    // Shortened by the namespace as well, so the kernel found its end.
    assert_eq!(waits.advance(0, &stage.backing), outside);
    assert_eq!(stage.read(size - 512, 512).immediate_result(&stage.backing), outside);
    // Not shortened: what the kernel has done is done.
    let mut done = stage.read(size - 512, 512);
    assert_eq!(done.advance(512, &stage.backing), Some(Ok(())));
    // An early end within the namespace is still an error.
    let mut cut = stage.read(0, 512);
    assert!(!matches!(cut.advance(0, &stage.backing), None | Some(Ok(()))));
    assert!(cut.advance(0, &stage.backing) != outside);
}

/// The monitor has looked at the file before it was extended, or before the namespace was made
/// smaller and the file truncated.
#[test]
fn a_file_that_is_resized_while_it_is_examined_is_not_shortened() {
    let dir = directory();
    let path = dir.path().join("disk.img");
    let backing = BackingDevice::open(&config(&path, Some(1 << 20), 512)).unwrap();
    let hold = backing.hold.as_ref().unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    for (first, then, found) in [(1 << 20, 2 << 20, 1 << 20), (2 << 20, 1 << 20, 1 << 20)] {
        for thorough in [false, true] {
            file.set_len(first).unwrap();
            backing.resize(first);
            let measure = || {
                file.set_len(then)?;
                backing.resize(then);
                Ok(found)
            };
            assert_eq!(backing.condition(hold, thorough, measure), Condition::Sound);
        }
    }
    file.set_len(1 << 19).unwrap();
    assert_eq!(backing.inspect(true), Condition::Shortened(1 << 19));
}

#[test]
fn leftovers_of_an_interrupted_rollback_are_reported() {
    let dir = directory();
    let (path, link) = (dir.path().join("disk.img"), dir.path().join("link"));
    fs::write(&path, [0; 4096]).unwrap();
    symlink(&path, &link).unwrap();
    assert_eq!(hold::interrupted_rollback(&link), None);
    fs::write(dir.path().join(".disk.img.nvmfd-rollback"), "").unwrap();
    let sentence = hold::interrupted_rollback(&link).unwrap();
    assert_says(&sentence, &["/.disk.img.nvmfd-rollback is left", "what", "link had before"]);
}

#[test]
fn a_snapshot_is_served_read_only_and_in_blocks_of_its_namespace() {
    let dir = directory();
    let path = dir.path().join("monday.img");
    let copy = Reflink::create(&path).unwrap();
    copy.mark_as_snapshot(512);
    copy.publish(0o600).unwrap();
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    if hold::snapshot_block_size_bytes(&file).is_none() {
        // A file system without extended attributes.
        return;
    }
    let read_only = |block| BackingConfig { read_only: true, ..config(&path, None, block) };
    assert_says(&refusal(&read_only(4096)), &["snapshot of a namespace", "block_size = 512"]);
    drop(BackingDevice::open(&read_only(512)).unwrap());
    // The administrator has made it writable, and a host may have formatted it.
    drop(BackingDevice::open(&config(&path, None, 4096)).unwrap());
    file.set_permissions(fs::Permissions::from_mode(0o400)).unwrap();
    let refusal = refusal(&config(&path, None, 512));
    // The kernel refuses it to other users than root.
    assert!(["read_only = true", "cannot open"].iter().any(|it| refusal.contains(it)), "{refusal}");
}

#[test]
fn a_file_is_shared_only_if_all_openers_configure_sharing() {
    let directory = directory();
    let kind = BackingKind::File { path: directory.path().join("disk"), size: Some(1 << 20) };
    let alone = BackingConfig { kind, block_size_bytes: 4096, read_only: false, shared: false };
    let shared = BackingConfig { shared: true, ..alone.clone() };
    let first = BackingDevice::open(&shared).unwrap();
    let second = BackingDevice::open(&shared).unwrap();
    let refused = BackingDevice::open(&alone).unwrap_err();
    assert!(refused.may_pass && refused.sentence.contains("`shared = true`"), "{refused}");
    drop((first, second));
    let alone = BackingDevice::open(&alone).unwrap();
    assert!(BackingDevice::open(&shared).is_err());
    drop(alone);
}

#[test]
fn an_image_on_a_shared_file_system_is_opened_by_one_machine() {
    use super::owner_file::tests::{pretend_several_machines, taken_by_another_machine};

    let dir = directory();
    let path = dir.path().join("disk.img");
    let alone = config(&path, Some(1 << 20), 512);
    let shared = BackingConfig { shared: true, ..alone.clone() };
    let mark = dir.path().join("disk.img.nvmfd-owner");
    drop(BackingDevice::open(&alone).unwrap());
    let _pretence = pretend_several_machines();
    let other = taken_by_another_machine(&path);
    for config in [&alone, &shared] {
        let refused = BackingDevice::open(config).unwrap_err();
        assert!(refused.may_pass && refused.sentence.contains("storage2"), "{refused}");
    }
    drop(other);
    // The lock of the refused daemon is released, and the error names this machine.
    let ours = BackingDevice::open(&alone).unwrap();
    assert!(mark.exists());
    drop(ours);
    assert!(!mark.exists());
    let ours = BackingDevice::open(&shared).unwrap();
    assert!(!mark.exists(), "of those that share it any machine may");
    drop(ours);
}
