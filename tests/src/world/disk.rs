//! A simulated disk: it takes its time, fails, moves less than it was asked to, and forgets what
//! was not made durable when the power goes.
//!
//! It stands where the ring stands, below [`Flight`]: short transfers, retries and fallbacks are
//! the target's own. Stores are served as files are, with direct I/O: what was written is read
//! back at once, and is durable after a synchronisation that began when it was complete, or by
//! itself (RWF_DSYNC). A block is never torn; several blocks of one operation take effect at
//! different times.

mod store;

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use nvme::Status;
use nvmfd::disk::flight::{Flight, Step};
use nvmfd::disk::{BackingId, Disk, Done, Op, Space};
use rdma::soft::sim::Dice;
use rdma::{Buf, Region, Tag};

use self::store::Store;
use super::model::SECTOR_BYTES;
use super::trace::Trace;

/// What a disk does wrong. Chances are per thousand system calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DiskFaults {
    /// Fails.
    pub error: u16,
    /// Moves a part.
    pub short: u16,
    /// A synchronisation fails.
    pub sync_error: u16,
    /// Takes as long as `stall`.
    pub slow: u16,
    /// How long everything takes.
    pub latency: Duration,
    /// How much longer it may take.
    pub jitter: Duration,
    /// How long it takes when it is slow, at most.
    pub stall: Duration,
    /// The store can give space up.
    pub punch: bool,
    /// The store can zero a range in place.
    pub zero_range: bool,
}

/// Of each kind that ends in another answer, but those after which a store is no longer served, or
/// that say what hosts may say as well.
const ERRORS: [i32; 11] = [
    libc::EIO,
    libc::ENOSPC,
    libc::EINTR,
    libc::EAGAIN,
    libc::ENOMEM,
    libc::ENODATA,
    libc::EILSEQ,
    libc::EDQUOT,
    libc::EFBIG,
    libc::EINVAL,
    libc::EBADMSG,
];

/// A system call under way.
#[derive(Debug)]
struct Call {
    /// Whose it is.
    ring: usize,
    flight: Flight,
    step: Step,
    answer: i32,
    /// Bytes that took effect at the beginning; the rest of `effective` does so at the end.
    early: u64,
    effective: u64,
    since: u64,
    /// It reads what was durable.
    stale: bool,
}

/// The stores of a target.
#[derive(Debug)]
pub struct SimDisk {
    /// What it does wrong from now on.
    pub faults: DiskFaults,
    /// What is asked for before then takes at least until then.
    pub stalled_until: Instant,
    /// A planted fault: it says that it has made data durable, and has not.
    pub forgets_flushes: bool,
    /// A planted fault: reads into buffers at least so large, and much larger than what is read,
    /// which are those of copies, find what was durable.
    pub stale_copies: Option<u32>,
    /// What the target must not have done.
    pub fault: Option<String>,
    dice: Dice,
    now: Instant,
    /// The memory of each reactor.
    regions: Vec<Arc<Region>>,
    stores: Vec<Store>,
    /// Which store has which number.
    attached: Vec<(BackingId, usize)>,
    calls: Vec<Option<Call>>,
    free: Vec<u32>,
    due: BinaryHeap<Reverse<(Instant, u64, u32)>>,
    number: u64,
    ready: Vec<(usize, Done)>,
    trace: Arc<Trace>,
}

/// What one reactor sees of the stores.
#[derive(Debug)]
pub struct SimRing<'a> {
    /// The stores.
    pub disk: &'a mut SimDisk,
    /// The reactor.
    pub ring: usize,
}

impl SimDisk {
    /// Disks of these sizes, in blocks and bytes of a block, all zeros.
    ///
    /// # Panics
    /// When a size makes no sense.
    #[must_use]
    pub fn new(
        seed: u64,
        faults: DiskFaults,
        shapes: &[(u32, u32)],
        now: Instant,
        trace: Arc<Trace>,
    ) -> SimDisk {
        SimDisk {
            faults,
            stalled_until: now,
            forgets_flushes: false,
            stale_copies: None,
            fault: None,
            dice: Dice::new(seed),
            now,
            regions: Vec::new(),
            stores: shapes.iter().map(|(blocks, bytes)| Store::new(*blocks, *bytes)).collect(),
            attached: Vec::new(),
            calls: Vec::new(),
            free: Vec::new(),
            due: BinaryHeap::new(),
            number: 0,
            ready: Vec::new(),
            trace,
        }
    }

    /// Gives the stores to reactors with this memory.
    pub fn open(&mut self, regions: Vec<Arc<Region>>) {
        self.regions = regions;
    }

    /// Serves a store under a number.
    pub fn attach(&mut self, id: BackingId, store: usize) {
        self.detach(id);
        self.attached.push((id, store));
    }

    /// A new store, of zeros.
    ///
    /// # Panics
    /// When its size makes no sense.
    pub fn add_store(&mut self, blocks: u32, block_bytes: u32) -> usize {
        self.stores.push(Store::new(blocks, block_bytes));
        self.stores.len() - 1
    }

    /// Gives a store another size, at most the one that it was made with.
    pub fn resize(&mut self, store: usize, sectors: u32) {
        self.stores[store].backing.resize(u64::from(sectors) * u64::from(SECTOR_BYTES));
    }

    /// Serves nothing under this number any more. What is under way completes.
    pub fn detach(&mut self, id: BackingId) {
        self.attached.retain(|(other, _)| *other != id);
    }

    /// It is now later.
    pub fn advance(&mut self, now: Instant) {
        self.now = now;
    }

    /// Somebody erases a store from now on, whose blocks nobody else may use meanwhile.
    ///
    /// # Errors
    /// Somebody does.
    pub fn begin_erasing(&mut self, store: usize) -> Result<(), String> {
        self.stores[store].erasing = true;
        let of_store = |call: &&Call| call.flight.attachment as usize == store;
        let mut calls = self.calls.iter().flatten().filter(of_store);
        match calls.find(|call| call.step != Step::Sync) {
            Some(call) => Err(format!("store {store} is erased while it is used: {:?}", call.step)),
            None => Ok(()),
        }
    }

    /// Bytes of a store read as zeros.
    ///
    /// # Errors
    /// The disk fails.
    pub fn erase(&mut self, store: usize, from: u64, to: u64) -> Result<(), Status> {
        if self.dice.per_mille(self.faults.error) {
            return Err(Status::WRITE_FAULT);
        }
        self.stores[store].erase(from, to);
        Ok(())
    }

    /// All of a store is durable.
    ///
    /// # Errors
    /// A synchronisation has failed before.
    pub fn make_durable(&mut self, store: usize) -> Result<(), Status> {
        self.stores[store].backing.sync_failure().map_or(Ok(()), Err)?;
        self.stores[store].make_durable();
        Ok(())
    }

    /// A store has blocks of so many bytes from now on.
    pub fn reformat(&mut self, store: usize, block_bytes: u32) {
        self.stores[store].reformat(block_bytes);
    }

    /// Nobody erases a store any more.
    pub fn end_erasing(&mut self, store: usize) {
        self.stores[store].erasing = false;
    }

    /// When something comes home, besides what has.
    #[must_use]
    pub fn next_due(&self) -> Option<Instant> {
        self.due.peek().map(|Reverse((due, ..))| *due)
    }

    /// Operations that are not home.
    #[must_use]
    pub fn under_way(&self) -> usize {
        self.calls.len() - self.free.len() + self.ready.len()
    }

    /// Whether something has come home to a reactor, after what is due has happened.
    pub fn has_ready(&mut self, ring: usize) -> bool {
        self.run();
        self.ready.iter().any(|(of, _)| *of == ring)
    }

    /// Appends what has come home to a reactor.
    pub fn reap(&mut self, ring: usize, done: &mut Vec<Done>) {
        self.run();
        done.extend(self.ready.extract_if(.., |(of, _)| *of == ring).map(|(_, done)| done));
    }

    /// Lets happen what is due.
    fn run(&mut self) {
        while let Some(Reverse((due, _, slot))) = self.due.peek().copied()
            && due <= self.now
        {
            self.due.pop();
            let home = self.finish(slot);
            self.ready.extend(home);
        }
    }

    /// The target is gone, and everything that it had asked for; with `power` also what was not
    /// durable, or a part of that.
    pub fn crash(&mut self, power: bool) {
        for slot in 0..self.calls.len() as u32 {
            let Some(call) = self.calls[slot as usize].take() else { continue };
            let store = &mut self.stores[call.flight.attachment as usize];
            let block = u64::from(store.block_bytes);
            for from in (call.early..call.effective).step_by(block as usize) {
                if self.dice.per_mille(500) {
                    store.apply(slot, &call, &self.regions[call.ring], from, from + block);
                }
            }
        }
        for store in &mut self.stores {
            store.crash(power, &mut self.dice);
        }
        self.attached.clear();
        self.calls.clear();
        self.free.clear();
        self.due.clear();
        self.ready.clear();
        self.regions.clear();
    }

    /// Whether a store failed to make data durable: it is in no better state than one that has
    /// lost its power.
    #[must_use]
    pub fn is_doomed(&self) -> bool {
        self.stores.iter().any(|store| store.backing.sync_failure().is_some())
    }

    /// Begins the next system call of a flight, in a slot or a new one.
    fn issue(&mut self, ring: usize, mut flight: Flight, slot: Option<u32>) {
        let store = &mut self.stores[flight.attachment as usize];
        let step = flight.step(&store.backing);
        let (faults, dice) = (self.faults, &mut self.dice);
        let block = u64::from(store.block_bytes);
        let (len, unable) = match step {
            Step::Read { len, .. } | Step::Write { len, .. } | Step::Zeros { len, .. } => {
                (u64::from(len), false)
            }
            Step::Space { how: Space::Punch, len, .. } => (len, !faults.punch),
            Step::Space { how: Space::ZeroRange, len, .. } => (len, !faults.zero_range),
            Step::Sync => (0, false),
        };
        let chance = if step == Step::Sync { faults.sync_error } else { faults.error };
        let blocks = len / block;
        let (answer, effective) = if unable {
            (-libc::EOPNOTSUPP, 0)
        } else if dice.per_mille(chance) {
            let error = ERRORS[dice.below(ERRORS.len() as u64) as usize];
            // What can be tried again has not begun. What has failed may have done a part.
            let begun = !matches!(error, libc::EINTR | libc::EAGAIN);
            (-error, if begun { dice.below(blocks + 1) * block } else { 0 })
        } else if matches!(step, Step::Space { .. } | Step::Sync) {
            (0, len)
        } else if blocks > 1 && dice.per_mille(faults.short) {
            let some = (1 + dice.below(blocks - 1)) * block;
            (some as i32, some)
        } else {
            (len as i32, len)
        };
        let early = match dice.below(3) {
            0 => 0,
            1 => effective,
            _ => dice.below(effective / block + 1) * block,
        };
        let mut wait = faults.latency + dice.part(faults.jitter);
        if dice.per_mille(faults.slow) {
            wait += dice.part(faults.stall);
        }
        wait += self.stalled_until.saturating_duration_since(self.now);
        store.order += 1;
        let since = store.order;
        let small = |buf: &&Buf| buf.len() * 2 < buf.capacity();
        let room = flight.buf().filter(small).map_or(0, Buf::capacity);
        let stale = self.stale_copies.is_some_and(|least| room >= least);
        let mut call = Call { ring, flight, step, answer, early, effective, since, stale };
        let slot = slot.or_else(|| self.free.pop()).unwrap_or_else(|| {
            self.calls.push(None);
            self.calls.len() as u32 - 1
        });
        call.run(slot, store, &self.regions[ring], 0, early);
        self.number += 1;
        self.due.push(Reverse((self.now + wait, self.number, slot)));
        self.trace.note([0x10, slot.into(), answer as u64], || {
            format!(
                "disk      call {slot} begins: {:?} on store {}",
                call.step, call.flight.attachment
            )
        });
        self.calls[slot as usize] = Some(call);
    }

    /// A system call returns.
    fn finish(&mut self, slot: u32) -> Option<(usize, Done)> {
        let mut call = self.calls[slot as usize].take()?;
        let store = &mut self.stores[call.flight.attachment as usize];
        let (from, to) = (call.early, call.effective);
        call.run(slot, store, &self.regions[call.ring], from, to);
        if !(self.forgets_flushes && call.step == Step::Sync) {
            store.returned(slot, &call);
        }
        let Call { ring, mut flight, answer, .. } = call;
        let outcome = flight.advance(answer, &store.backing);
        self.trace.note([0x11, slot.into(), answer as u64], || {
            let more = if outcome.is_none() { ", goes on" } else { "" };
            format!("disk      call {slot} returns {answer}{more}")
        });
        match outcome {
            None => {
                self.issue(ring, flight, Some(slot));
                None
            }
            Some(outcome) => {
                self.free.push(slot);
                Some((ring, flight.done(outcome)))
            }
        }
    }
}

impl Disk for SimRing<'_> {
    fn submit(&mut self, backing: BackingId, tag: Tag, op: Op) {
        let SimRing { disk, ring } = self;
        let Some((_, store)) = disk.attached.iter().find(|(id, _)| *id == backing) else {
            let gone = Err(Status::INVALID_NAMESPACE.with_dnr());
            disk.ready.push((*ring, Flight::new(u32::MAX, tag, op).done(gone)));
            return;
        };
        if disk.stores[*store].erasing && !matches!(op, Op::Flush) {
            disk.fault = Some(format!("store {store} is used while it is erased: {op:?}"));
        }
        let flight = Flight::new(*store as u32, tag, op);
        match flight.shortcut(&disk.stores[*store].backing) {
            Some(outcome) => disk.ready.push((*ring, flight.done(outcome))),
            None => disk.issue(*ring, flight, None),
        }
    }

    /// Gives back what has had no effect yet, sometimes.
    fn recall(&mut self, tag: Tag, of: Tag) {
        let SimRing { disk, ring } = self;
        let known = disk.calls.iter_mut().flatten().find(|call| {
            (call.ring, call.flight.tag()) == (*ring, of)
                && (call.early, call.answer < 0) == (0, false)
        });
        let given_back = known.filter(|_| disk.dice.per_mille(500));
        let outcome = match given_back {
            Some(call) => {
                (call.answer, call.effective) = (-libc::ECANCELED, 0);
                Ok(())
            }
            None => Err(Status::ABORT_REQUESTED),
        };
        disk.ready.push((*ring, Done { tag, buf: None, outcome }));
    }
}

impl Call {
    /// Where it changes data.
    fn changes(&self) -> Option<(u64, u64)> {
        match self.step {
            Step::Write { at, len, .. } | Step::Zeros { at, len } => Some((at, len.into())),
            Step::Space { at, len, .. } => Some((at, len)),
            Step::Read { .. } | Step::Sync => None,
        }
    }

    /// Lets bytes `from` to `to` of it take effect.
    fn run(&mut self, slot: u32, store: &mut Store, region: &Region, from: u64, to: u64) {
        if from >= to {
            return;
        }
        if let Step::Read { at, skip, .. } = self.step {
            let Some(buf) = self.flight.buf_mut() else { return };
            let into = &mut region.bytes_mut(buf)[skip as usize..];
            let of = if self.stale { &store.durable } else { &store.live };
            let source = (at + from) as usize..(at + to) as usize;
            into[from as usize..to as usize].copy_from_slice(&of[source]);
        } else {
            store.apply(slot, self, region, from, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rdma::{Pool, PoolPlan};

    const PERFECT: DiskFaults = DiskFaults {
        error: 0,
        short: 0,
        sync_error: 0,
        slow: 0,
        latency: Duration::from_micros(50),
        jitter: Duration::ZERO,
        stall: Duration::ZERO,
        punch: true,
        zero_range: true,
    };
    const ID: BackingId = BackingId(7);

    struct Bench {
        pool: Pool,
        disk: SimDisk,
        now: Instant,
    }

    fn bench(seed: u64, faults: DiskFaults) -> Bench {
        let plan = PoolPlan {
            cells: 0,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: 1 << 20,
            largest_bytes: 1 << 16,
        };
        let (pool, now) = (Pool::new(plan).unwrap(), Instant::now());
        let trace = Arc::new(Trace::new(super::super::trace::Telling::Nothing, now));
        let mut disk = SimDisk::new(seed, faults, &[(64, 512)], now, trace);
        disk.open(vec![pool.region().clone()]);
        disk.attach(ID, 0);
        Bench { pool, disk, now }
    }

    impl Bench {
        fn buf(&mut self, blocks: u32, byte: u8) -> Buf {
            let mut buf = self.pool.take_data(blocks * 512).unwrap();
            self.pool.bytes_mut(&mut buf).fill(byte);
            buf
        }

        fn submit(&mut self, tag: Tag, op: Op) {
            SimRing { disk: &mut self.disk, ring: 0 }.submit(ID, tag, op);
        }

        fn wait(&mut self) -> Done {
            let mut done = Vec::new();
            self.disk.reap(0, &mut done);
            while done.is_empty() {
                self.now = self.disk.next_due().expect("something under way");
                self.disk.advance(self.now);
                self.disk.reap(0, &mut done);
            }
            assert_eq!(done.len(), 1);
            done.remove(0)
        }

        fn ask(&mut self, op: Op) -> Result<(), Status> {
            self.submit(5, op);
            let done = self.wait();
            assert_eq!(done.tag, 5);
            done.buf.into_iter().for_each(|buf| self.pool.give(buf));
            done.outcome
        }

        fn write(&mut self, lba: u64, blocks: u32, byte: u8, fua: bool) {
            let from = self.buf(blocks, byte);
            assert_eq!(self.ask(Op::Write { from, at: lba * 512, fua }), Ok(()));
        }

        /// The first byte of each of so many blocks from the first on.
        fn read(&mut self, blocks: u32) -> Vec<u8> {
            let into = self.buf(blocks, 0xee);
            self.submit(0, Op::Read { into, at: 0 });
            let done = self.wait();
            assert_eq!(done.outcome, Ok(()));
            let buf = done.buf.unwrap();
            let bytes = self.pool.bytes(&buf).chunks(512).map(|block| block[0]).collect();
            self.pool.give(buf);
            bytes
        }

        fn crash(&mut self, power: bool) {
            self.disk.crash(power);
            self.disk.open(vec![self.pool.region().clone()]);
            self.disk.attach(ID, 0);
        }
    }

    #[test]
    fn what_is_written_is_read_in_parts_and_after_failures_that_pass() {
        for seed in 0..50 {
            let faults = DiskFaults { short: 800, ..PERFECT };
            let mut bench = bench(seed, faults);
            bench.write(1, 16, 7, false);
            bench.write(3, 2, 8, true);
            assert_eq!(bench.ask(Op::Zero { at: 2048, len: 512, deallocate: false }), Ok(()));
            assert_eq!(bench.ask(Op::Discard { at: 2560, len: 512 }), Ok(()));
            assert_eq!(bench.read(7), [0, 7, 7, 8, 0, 0, 7]);
            assert!(bench.pool.is_full());
        }
    }

    #[test]
    fn without_power_what_is_durable_stays_and_the_rest_may() {
        let (mut lost, mut kept) = (0, 0);
        for seed in 0..50 {
            let mut bench = bench(seed, PERFECT);
            bench.write(0, 4, 1, false);
            assert_eq!(bench.ask(Op::Flush), Ok(()));
            bench.write(1, 1, 2, true);
            bench.write(2, 2, 3, false);
            bench.crash(false);
            assert_eq!(bench.read(4), [1, 2, 3, 3], "the power was there");
            bench.crash(true);
            let read = bench.read(4);
            assert_eq!(read[..2], [1, 2]);
            assert!(read[2..].iter().all(|byte| [1, 3].contains(byte)), "{read:?}");
            lost += read[2..].iter().filter(|byte| **byte == 1).count();
            kept += read[2..].iter().filter(|byte| **byte == 3).count();
            bench.crash(true);
            assert_eq!(bench.read(4), read, "once is enough");
        }
        assert!(lost > 10 && kept > 10, "{lost} lost, {kept} kept");
    }

    #[test]
    fn a_flush_answers_for_what_was_complete_before_it() {
        let mut lost = 0;
        for seed in 0..50 {
            let mut bench = bench(seed, PERFECT);
            let from = bench.buf(1, 1);
            bench.submit(1, Op::Flush);
            bench.submit(2, Op::Write { from, at: 0, fua: false });
            let mut done = Vec::new();
            bench.disk.advance(bench.now + PERFECT.latency);
            bench.disk.reap(0, &mut done);
            assert_eq!(done.iter().map(|done| done.tag).collect::<Vec<_>>(), [1, 2]);
            done.into_iter().filter_map(|done| done.buf).for_each(|buf| bench.pool.give(buf));
            bench.crash(true);
            lost += usize::from(bench.read(1) == [0]);
        }
        assert!(lost > 10, "{lost}");
    }

    #[test]
    fn a_failed_flush_dooms_what_it_was_for() {
        let faults = DiskFaults { sync_error: 1000, ..PERFECT };
        let mut failed = 0;
        for seed in 0..50 {
            let mut bench = bench(seed, faults);
            bench.write(0, 1, 1, false);
            assert!(bench.ask(Op::Flush).is_err());
            bench.disk.faults = PERFECT;
            if bench.disk.is_doomed() {
                failed += 1;
                assert!(bench.ask(Op::Flush).is_err(), "it sticks");
            }
        }
        assert!(failed > 25);
    }

    #[test]
    fn a_store_that_was_taken_away_says_so() {
        let mut bench = bench(1, PERFECT);
        bench.disk.detach(ID);
        let outcome = bench.ask(Op::Flush);
        assert!(outcome.unwrap_err().is(Status::INVALID_NAMESPACE));
    }
}
