//! A device under the monitor, with a real ring, and trust records that survive both.

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};

use rdma::{Buf, Pool, PoolPlan};

use crate::monitor::*;
use crate::uring::{Ring, RingLimits};
use crate::{BackingConfig, BackingKind, BlockDevice, IoCompletion, IoRequest};

pub(in crate::monitor) const STORE: DeviceId = DeviceId(2);
pub(in crate::monitor) const SIZE: u64 = 1 << 20;

/// A message to the reactor: a store to attach, and the sender for the result.
pub(in crate::monitor) type Mail =
    (DeviceId, Arc<BackingDevice>, mpsc::SyncSender<std::io::Result<()>>);

#[derive(Debug)]
struct OneRing(mpsc::Sender<Mail>);

impl Rings for OneRing {
    fn count(&self) -> usize {
        1
    }

    fn attach(
        &self,
        _: usize,
        id: DeviceId,
        backing: &Arc<BackingDevice>,
    ) -> mpsc::Receiver<std::io::Result<()>> {
        let (answer, answered) = mpsc::sync_channel(1);
        let _ = self.0.send((id, Arc::clone(backing), answer));
        answered
    }

    fn wake(&self) {}
}

/// Trust records that exist longer than the objects that use them.
#[derive(Debug, Default)]
pub(in crate::monitor) struct MemoryTrust {
    pub(in crate::monitor) known: Mutex<std::collections::BTreeMap<uuid::Uuid, Distrust>>,
    pub(in crate::monitor) fails: AtomicBool,
    /// A write waits for it, and is counted before.
    pub(in crate::monitor) gate: Mutex<()>,
    pub(in crate::monitor) writes: std::sync::atomic::AtomicU32,
}

impl TrustRecords for MemoryTrust {
    fn is_durable(&self) -> bool {
        true
    }

    fn of(&self, uuid: uuid::Uuid) -> Distrust {
        lock(&self.known).get(&uuid).copied().unwrap_or_default()
    }

    fn set(&self, uuid: uuid::Uuid, distrust: Distrust) -> std::io::Result<()> {
        self.writes.fetch_add(1, Ordering::Relaxed);
        let _open = lock(&self.gate);
        if self.fails.load(Ordering::Relaxed) {
            return Err(std::io::ErrorKind::StorageFull.into());
        }
        lock(&self.known).insert(uuid, distrust);
        Ok(())
    }
}

pub(in crate::monitor) fn place() -> (nvme::Nqn, u32) {
    ("nqn.2026-11.io.nvmfd:test".parse().unwrap(), 1)
}

/// A reactor for tests: it has a ring and processes its messages.
pub(in crate::monitor) struct Bench {
    pub(in crate::monitor) ring: Ring,
    pub(in crate::monitor) pool: Pool,
    pub(in crate::monitor) answers: mpsc::Receiver<Mail>,
    pub(in crate::monitor) monitor: DeviceMonitor,
    pub(in crate::monitor) device: Arc<MonitoredDevice>,
    pub(in crate::monitor) dir: PathBuf,
    pub(in crate::monitor) own: Option<tempfile::TempDir>,
    /// A write completes just before its store is replaced.
    pub(in crate::monitor) late: bool,
}

impl Bench {
    pub(in crate::monitor) fn new() -> Bench {
        let own = crate::testing::directory();
        let mut bench = Bench::at(own.path());
        bench.own = Some(own);
        bench
    }

    /// With the file of a directory.
    pub(in crate::monitor) fn at(directory: &Path) -> Bench {
        Bench::of(directory, directory.join("disk.img"))
    }

    /// With a file or device.
    pub(in crate::monitor) fn of(directory: &Path, path: PathBuf) -> Bench {
        let plan = PoolPlan::without_receives(0, 1 << 20, 1 << 16);
        let pool = Pool::new(plan).unwrap();
        let limits = RingLimits { ops: 16, backings: 4 };
        let engine = crate::testing::io_engine();
        let mut ring = Ring::new(pool.region().clone(), limits, engine).unwrap();
        let (sender, answers) = mpsc::channel();
        let config = BackingConfig {
            kind: BackingKind::File { path, size: Some(SIZE) },
            block_size_bytes: 512,
            read_only: false,
            shared: false,
        };
        let backing = BackingDevice::open(&config).unwrap();
        let device =
            Arc::new(MonitoredDevice::new(STORE, "namespace 1".to_owned(), config, backing));
        ring.attach(STORE, device.backing()).unwrap();
        let monitor = DeviceMonitor::start(OneRing(sender), Arc::default()).unwrap();
        monitor.add(Arc::clone(&device));
        Bench {
            ring,
            pool,
            answers,
            monitor,
            device,
            dir: directory.into(),
            own: None,
            late: false,
        }
    }

    pub(in crate::monitor) fn path(&self) -> PathBuf {
        self.dir.join("disk.img")
    }

    /// Processes messages and completions until `so` returns true.
    pub(in crate::monitor) fn until(&mut self, what: &str, mut so: impl FnMut(&Bench) -> bool) {
        let deadline = Instant::now() + Duration::from_secs(30);
        while !so(self) {
            assert!(Instant::now() < deadline, "not so: {what}");
            self.turn();
        }
    }

    pub(in crate::monitor) fn turn(&mut self) -> Vec<IoCompletion> {
        if let Ok((id, backing, answer)) = self.answers.try_recv() {
            if self.late {
                self.device.health.note_write();
            }
            let _ = answer.send(self.ring.attach(id, backing));
        }
        let (mut done, mut woken, now) = (Vec::new(), Vec::new(), Instant::now());
        self.ring.sleep(Some(now + Duration::from_millis(5)), now);
        self.ring.reap(&mut done, &mut woken);
        done
    }

    pub(in crate::monitor) fn run(&mut self, op: IoRequest) -> (Result<(), Status>, Option<Buf>) {
        BlockDevice::submit(&mut self.ring, STORE, 0, op);
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            assert!(Instant::now() < deadline, "it does not come home");
            if let Some(done) = self.turn().pop() {
                return (done.outcome, done.buf);
            }
        }
    }

    pub(in crate::monitor) fn flush(&mut self) -> Result<(), Status> {
        self.run(IoRequest::Flush).0
    }

    pub(in crate::monitor) fn write(&mut self, at: u64, byte: u8) -> Result<(), Status> {
        let mut from = self.pool.take_data(4096).unwrap();
        self.pool.bytes_mut(&mut from).fill(byte);
        let (outcome, buf) = self.run(IoRequest::Write { from, at, fua: false });
        self.pool.give(buf.unwrap());
        outcome
    }

    pub(in crate::monitor) fn read(&mut self, at: u64) -> Result<u8, Status> {
        let into = self.pool.take_data(4096).unwrap();
        let (outcome, buf) = self.run(IoRequest::Read { into, at });
        let buf = buf.unwrap();
        let byte = self.pool.bytes(&buf)[0];
        self.pool.give(buf);
        outcome.map(|()| byte)
    }

    pub(in crate::monitor) fn shorten(&self) {
        let file = OpenOptions::new().write(true).open(self.path()).unwrap();
        file.set_len(8192).unwrap();
    }

    /// Truncates the served file and fills it again before it is examined.
    pub(in crate::monitor) fn refill(&self, byte: u8) {
        self.postpone();
        fs::write(self.path(), vec![byte; SIZE as usize]).unwrap();
        lock(&self.device.check).next_check = Instant::now();
    }

    /// The device is not examined for an hour unless there is a reason.
    pub(in crate::monitor) fn postpone(&self) {
        loop {
            let state = lock(&self.monitor.shared.state);
            if state.busy.is_empty() {
                lock(&self.device.check).next_check += Duration::from_secs(3600);
                return;
            }
        }
    }

    /// Replaces the served file by another file.
    pub(in crate::monitor) fn exchange(&self, size: u64, byte: u8) {
        let other = self.dir.join("other");
        fs::write(&other, vec![byte; size as usize]).unwrap();
        fs::rename(&other, self.path()).unwrap();
    }

    /// Replaces the served file by another file, as a device replaces itself.
    pub(in crate::monitor) fn replace(&mut self) {
        self.exchange(SIZE, 0x77);
        let (shared, device) = (Arc::clone(&self.monitor.shared), Arc::clone(&self.device));
        let replacing = std::thread::spawn(move || {
            let gone = device.backing();
            let fresh = gone.open_again(&device.config, true).unwrap();
            shared.exchange(&device, &gone, fresh)
        });
        self.until("it is replaced", |_| replacing.is_finished());
        assert_eq!(replacing.join().unwrap(), Ok(()));
    }

    pub(in crate::monitor) fn roll_back(
        &mut self,
        snapshot: &Path,
    ) -> Result<(), crate::ReflinkError> {
        self.roll_back_after(snapshot, || {})
    }

    /// Rolls back on a thread that does something else before.
    pub(in crate::monitor) fn roll_back_after(
        &mut self,
        snapshot: &Path,
        before: impl FnOnce() + Send,
    ) -> Result<(), crate::ReflinkError> {
        let (monitor, device) = (&self.monitor, &self.device);
        let (answers, ring) = (&self.answers, &mut self.ring);
        std::thread::scope(|scope| {
            let rolling = scope.spawn(move || {
                before();
                monitor.roll_back(device, snapshot)
            });
            while !rolling.is_finished() {
                if let Ok((id, backing, answer)) = answers.recv_timeout(Duration::from_millis(2)) {
                    let _ = answer.send(ring.attach(id, backing));
                }
            }
            rolling.join().unwrap()
        })
    }

    /// As a restart of the daemon, with something else in between: opens what is at the path now.
    pub(in crate::monitor) fn restart(&mut self, records: &Arc<MemoryTrust>, between: impl Fn()) {
        let config = self.device.config.clone();
        self.monitor.remove(&self.device);
        between();
        self.ring.detach(STORE);
        let named = |config: &BackingConfig, backing| {
            MonitoredDevice::new(STORE, "namespace 1".to_owned(), config.clone(), backing)
        };
        let none = BackingConfig { kind: BackingKind::Null { size: SIZE }, ..config.clone() };
        self.device = Arc::new(named(&none, BackingDevice::open(&none).unwrap()));
        let mut opened = None;
        self.until("the former one is closed", |_| {
            opened = BackingDevice::open(&config).ok();
            opened.is_some()
        });
        let record = TrustRecord::new(records, uuid::Uuid::from_u128(1));
        self.device = Arc::new(named(&config, opened.unwrap()).recorded(place(), record));
        self.ring.attach(STORE, self.device.backing()).unwrap();
        self.monitor.add(Arc::clone(&self.device));
    }

    /// Result of the request to trust the store, and whether hosts saw a failure before.
    pub(in crate::monitor) fn trust(&mut self) -> (Result<(), Untrusted>, bool) {
        let is_marked = Arc::new(AtomicBool::new(false));
        let marked = Arc::clone(&is_marked);
        let (say, said) = mpsc::channel();
        let (monitor, device) = (&self.monitor, Arc::clone(&self.device));
        let (answers, ring) = (&self.answers, &mut self.ring);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(move || {
                let health = Arc::clone(device.health());
                let is_bad = move || health.sync_failure().is_some() || health.is_down();
                say.send(monitor.trust(&device, move || marked.store(is_bad(), Ordering::Relaxed)))
            });
            loop {
                if let Ok((id, backing, answer)) = answers.try_recv() {
                    let _ = answer.send(ring.attach(id, backing));
                }
                if let Ok(outcome) = said.recv_timeout(Duration::from_millis(2)) {
                    return outcome;
                }
            }
        });
        (outcome, is_marked.load(Ordering::Relaxed))
    }
}
