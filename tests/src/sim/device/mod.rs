//! Simulated block devices with their kernel: delays, reorders, fails, transfers partially, cancels
//! operations or reports that they have started, and loses everything that is not durable at a
//! power loss.
//!
//! It replaces io_uring, below [`Flights`]: which operations the kernel has, which wait, which
//! share an fsync, cancellation, short transfers, retries and fallbacks are the target's own code.
//! Operations of a reactor reach the kernel at the end of its iteration; an operation takes effect
//! when the kernel completes it, and the reactor learns of that in its next iteration.
//!
//! Stores behave like files with direct I/O: written data are visible immediately, and durable
//! after an fsync that began when the write was complete, or by RWF_DSYNC. Several blocks of one
//! operation take effect at different times. A block is torn only at a power failure, if it is
//! larger than the power-fail write unit of the device.

mod media;
mod removal;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::libc;
use nvme::Status;
use nvmfd::blockdev::request::{PendingIo, Step};
use nvmfd::blockdev::uring::RingLimits;
use nvmfd::blockdev::uring::pending::{Flights, Submission};
use nvmfd::blockdev::{BlockDevice, CancelRequest, DeviceId, IoCompletion, IoRequest, Space};
use rdma::soft::sim::Rng;
use rdma::{Buf, Region, Tag};

use self::media::Media;
use super::oracle::blocks::SECTOR_BYTES;
use super::trace::Trace;

/// Faults of a simulated device, per mille of system calls.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceFaults {
    /// An error.
    pub error: u16,
    /// A short transfer.
    pub short: u16,
    /// An error of fsync.
    pub sync_error: u16,
    /// A delay of up to `stall`.
    pub slow: u16,
    /// Duration of every operation.
    pub latency: Duration,
    /// Maximum of an additional random duration.
    pub jitter: Duration,
    /// Maximum duration of a slow one.
    pub stall: Duration,
    /// FALLOC_FL_PUNCH_HOLE is supported.
    pub punch: bool,
    /// FALLOC_FL_ZERO_RANGE is supported.
    pub zero_range: bool,
}

/// One errno for each status, except those after which a store is taken out of service, and those
/// with a status that hosts can also cause.
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

/// Duration of a timeout entry.
const PAUSE: Duration = Duration::from_millis(100);

/// A system call that has not returned.
#[derive(Debug)]
struct Call {
    ring: usize,
    slot: u32,
    store: usize,
    /// None for a timeout.
    step: Option<Step>,
    answer: i32,
    /// Bytes that took effect at the beginning; the rest of `effective` does so at the end.
    early: u64,
    effective: u64,
    since: u64,
    /// It reads the durable contents.
    stale: bool,
}

/// A completion that a ring has not taken yet.
#[derive(Clone, Copy, Debug)]
enum Answer {
    /// Of the step of a slot.
    Slot(u32, i32),
    /// Of a cancellation.
    Recall(usize, i32),
}

/// An event at a time.
#[derive(Debug)]
enum Event {
    /// The call with this number returns.
    Return(u64),
    /// A ring gets a completion.
    Tell(usize, Answer),
    /// A seeded bug: bytes are written to a store.
    Land(usize, u64, Vec<u8>),
    /// A ring gets the store that replaces a removed one.
    Replace(usize, usize),
}

/// The backing stores of a target.
#[derive(Debug)]
pub struct SimDevice {
    /// Its faults from now on.
    pub faults: DeviceFaults,
    /// Operations submitted before this time take at least until then.
    pub stalled_until: Instant,
    /// A seeded bug: a flush succeeds without making data durable.
    pub forgets_flushes: bool,
    /// A seeded bug: flushes that arrive during an fsync share its result.
    pub joins_flushes: bool,
    /// A seeded bug: a write is reported as cancelled, and executed later.
    pub gives_back_what_goes_on: bool,
    /// A seeded bug: opening a removed store again clears the failure of its flushes.
    pub forgives_removal: bool,
    /// A seeded bug: after an error of one store, a read of another one fails.
    pub confuses_stores: bool,
    confused: Option<usize>,
    /// A seeded bug: reads into buffers of at least this size, and much larger than the read, which
    /// are those of copies, return the durable contents.
    pub stale_copies: Option<u32>,
    /// Power-fail write unit in bytes.
    pub atom_bytes: u32,
    /// Violation of the interface by the target.
    pub fault: Option<String>,
    dice: Rng,
    now: Instant,
    /// The memory of each reactor.
    regions: Vec<Arc<Region>>,
    stores: Vec<Media>,
    /// The store that has, or had, each id.
    numbers: BTreeMap<DeviceId, usize>,
    /// State of the ring of each reactor.
    rings: Vec<Flights>,
    calls: BTreeMap<u64, Call>,
    due: BTreeMap<(Instant, u64), Event>,
    number: u64,
    answers: Vec<(usize, Answer)>,
    /// The store of this id is being copied: nothing of it may change.
    copied: Option<DeviceId>,
    /// For a seeded bug: the reactor, the shared call, and the tag of each.
    joined: Vec<(usize, u64, Tag)>,
    trace: Arc<Trace>,
}

/// View of one reactor on the simulated devices.
#[derive(Debug)]
pub struct SimRing<'a> {
    /// The stores.
    pub disk: &'a mut SimDevice,
    /// The reactor.
    pub ring: usize,
}

impl SimDevice {
    /// Stores of these sizes (blocks, and bytes of a block), all zeros.
    ///
    /// # Panics
    /// A size is invalid.
    pub fn new(
        seed: u64,
        faults: DeviceFaults,
        shapes: &[(u32, u32)],
        now: Instant,
        trace: Arc<Trace>,
    ) -> SimDevice {
        SimDevice {
            faults,
            stalled_until: now,
            forgets_flushes: false,
            joins_flushes: false,
            gives_back_what_goes_on: false,
            forgives_removal: false,
            confuses_stores: false,
            confused: None,
            copied: None,
            joined: Vec::new(),
            stale_copies: None,
            fault: None,
            dice: Rng::new(seed),
            now,
            regions: Vec::new(),
            stores: shapes.iter().map(|(blocks, bytes)| Media::new(*blocks, *bytes)).collect(),
            atom_bytes: 4096,
            numbers: BTreeMap::new(),
            rings: Vec::new(),
            calls: BTreeMap::new(),
            due: BTreeMap::new(),
            number: 0,
            answers: Vec::new(),
            trace,
        }
    }

    /// Opens the stores for reactors with this memory.
    pub fn open(&mut self, regions: Vec<Arc<Region>>) {
        // Some have so few slots that operations wait for them, some so few workers.
        let ops = [4, 64, 1024][self.dice.below(3) as usize];
        let share = [2, 8, 192][self.dice.below(3) as usize];
        let ring = |_: &_| {
            let mut ring = Flights::new(RingLimits { ops, backings: DeviceId::COUNT });
            ring.set_shares(2 * share, share);
            ring
        };
        self.rings = regions.iter().map(ring).collect();
        self.regions = regions;
    }

    /// Attaches a store under an id.
    ///
    /// # Panics
    /// The id is too large.
    pub fn attach(&mut self, id: DeviceId, store: usize) {
        self.detach(id);
        self.numbers.insert(id, store);
        for ring in &mut self.rings {
            let known = ring.attach(id, Arc::clone(&self.stores[store].backing), false);
            assert!(known, "more than {} backings", DeviceId::COUNT);
        }
    }

    /// Adds a store of zeros.
    ///
    /// # Panics
    /// Its size is invalid.
    pub fn add_store(&mut self, blocks: u32, block_bytes: u32) -> usize {
        self.stores.push(Media::new(blocks, block_bytes));
        self.stores.len() - 1
    }

    /// Resizes a store, at most to its initial size.
    pub fn resize(&mut self, store: usize, sectors: u32) {
        let (store, bytes) = (&self.stores[store], u64::from(sectors) * u64::from(SECTOR_BYTES));
        let replaced = store.replaced.iter().map(|(replaced, _)| replaced);
        replaced.chain([&store.backing]).for_each(|backing| backing.resize(bytes));
    }

    /// Detaches the store of this id. Operations in flight complete.
    pub fn detach(&mut self, id: DeviceId) {
        self.rings.iter_mut().for_each(|ring| ring.detach(id));
    }

    /// Advances the clock.
    pub fn advance(&mut self, now: Instant) {
        self.now = now;
    }

    /// Begins to erase a store, whose blocks nobody else may use meanwhile.
    ///
    /// # Errors
    /// A block is in use.
    pub fn begin_erasing(&mut self, store: usize) -> Result<(), String> {
        self.stores[store].erasing = true;
        let mut calls = self.calls.values().filter(|call| call.store == store);
        match calls.find(|call| call.step != Some(Step::Sync)) {
            Some(call) => Err(format!("store {store} is erased while it is used: {:?}", call.step)),
            None => Ok(()),
        }
    }

    /// Begins to copy the store of this id, of which nobody may change anything meanwhile.
    ///
    /// # Errors
    /// A change is in progress.
    pub fn begin_copy(&mut self, id: DeviceId) -> Result<(), String> {
        self.copied = Some(id);
        let is_of = |call: &&Call| self.rings[call.ring].backing_id(call.slot) == Some(id);
        let goes_on = |call: &&Call| call.changes().is_some() && call.effective > 0;
        match self.calls.values().find(|call| goes_on(call) && is_of(call)) {
            Some(call) => Err(format!("{id:?} is copied while it changes: {:?}", call.step)),
            None => Ok(()),
        }
    }

    /// Ends the copy of a store.
    pub fn end_copy(&mut self) {
        self.copied = None;
    }

    /// Zeros a range of a store.
    ///
    /// # Errors
    /// The device fails.
    pub fn erase(&mut self, store: usize, from: u64, to: u64) -> Result<(), Status> {
        if self.dice.per_mille(self.faults.error) {
            self.stores[store].failed = true;
            return Err(Status::WRITE_FAULT);
        }
        self.stores[store].erase(from, to);
        Ok(())
    }

    /// Makes a store durable.
    ///
    /// # Errors
    /// A sync has failed before.
    pub fn make_durable(&mut self, store: usize) -> Result<(), Status> {
        self.stores[store].backing.sync_failure().map_or(Ok(()), Err)?;
        self.stores[store].make_durable();
        Ok(())
    }

    /// Sets the block size of a store.
    pub fn reformat(&mut self, store: usize, block_bytes: u32) {
        self.stores[store].reformat(block_bytes);
    }

    /// Ends the erasing of a store.
    pub fn end_erasing(&mut self, store: usize) {
        self.stores[store].erasing = false;
    }

    /// Time of the next event, without completions that are ready.
    pub fn next_due(&self) -> Option<Instant> {
        self.due.keys().next().map(|(due, _)| *due)
    }

    /// Operations that have not completed.
    pub fn under_way(&self) -> usize {
        self.rings.iter().map(Flights::in_flight).sum()
    }

    /// Whether a reactor's ring has something to do, after due events were processed.
    pub fn has_ready(&mut self, ring: usize) -> bool {
        self.run();
        self.answers.iter().any(|(of, _)| *of == ring)
            || self.rings.get(ring).is_some_and(Flights::has_work)
    }

    /// Appends completed operations of a reactor.
    pub fn reap(&mut self, ring: usize, done: &mut Vec<IoCompletion>) {
        self.run();
        let (flights, calls) = (&mut self.rings[ring], &self.calls);
        done.extend(flights.take_ready());
        let is_home =
            |(of, call, _): &mut (usize, u64, Tag)| *of == ring && !calls.contains_key(call);
        for (.., tag) in self.joined.extract_if(.., is_home) {
            done.push(IoCompletion { tag, buf: None, outcome: Ok(()) });
        }
        for (_, answer) in self.answers.extract_if(.., |(of, _)| *of == ring) {
            match answer {
                Answer::Slot(slot, answer) => flights.answered(slot, answer, done),
                Answer::Recall(index, answer) => flights.recall_answered(index, answer, done),
            }
        }
    }

    /// End of a reactor's iteration: the kernel gets the submissions of its ring.
    pub fn submit(&mut self, ring: usize) {
        while let Some((index, slot)) = self.rings[ring].next_recall() {
            self.rings[ring].recall_asked();
            self.cancel(ring, index, slot);
        }
        while let Some(ask) = self.rings[ring].next_ask() {
            // The submission queue may be full.
            if self.dice.per_mille(5) {
                return self.rings[ring].not_submitted(ask);
            }
            self.rings[ring].submitted(ask);
            self.begin(ring, ask);
        }
    }

    /// Processes due events.
    fn run(&mut self) {
        while let Some(entry) = self.due.first_entry()
            && entry.key().0 <= self.now
        {
            match entry.remove() {
                Event::Return(number) => self.finish(number),
                Event::Tell(ring, answer) => self.answers.push((ring, answer)),
                Event::Land(store, at, bytes) => self.stores[store].land(at, &bytes),
                Event::Replace(store, ring) => self.replace(store, ring),
            }
        }
    }

    fn after(&mut self, wait: Duration, event: Event) {
        self.number += 1;
        self.due.insert((self.now + wait, self.number), event);
    }

    /// The target has crashed, with everything it had submitted; with `power` also what was not
    /// durable is lost, or a part of it.
    pub fn crash(&mut self, power: bool) {
        for (number, call) in std::mem::take(&mut self.calls) {
            let store = &mut self.stores[call.store];
            let Some(flight) = self.rings[call.ring].flight_mut(call.slot) else { continue };
            let block = u64::from(store.block_bytes);
            for from in (call.early..call.effective).step_by(block as usize) {
                if self.dice.per_mille(500) {
                    let region = &self.regions[call.ring];
                    store.apply(number, &call, (flight.buf(), region), from, from + block);
                }
            }
        }
        for store in &mut self.stores {
            store.crash(power, self.atom_bytes, &mut self.dice);
        }
        self.rings.clear();
        self.copied = None;
        self.joined.clear();
        self.due.clear();
        self.answers.clear();
        self.regions.clear();
    }

    /// Whether a store failed to make data durable, or is removed: it is in the same state as after
    /// a power failure.
    pub fn is_doomed(&self) -> bool {
        self.stores.iter().any(Media::is_doomed)
    }

    /// Whether a store has answered an error since the last call, or answers errors until it is
    /// opened again.
    pub fn take_failed(&mut self, store: usize) -> bool {
        let store = &mut self.stores[store];
        std::mem::take(&mut store.failed) || store.is_doomed()
    }

    /// The kernel starts the step of a slot.
    fn begin(&mut self, ring: usize, ask: Submission) {
        let slot = ask.slot();
        let id = self.rings[ring].backing_id(slot);
        let Some(&place) = id.and_then(|id| self.numbers.get(&id)) else { return };
        let Submission::Step(_, step) = ask else {
            let call = Call { step: None, ..Call::of(ring, slot, place) };
            self.after(PAUSE, Event::Return(self.number + 1));
            self.calls.insert(self.number, call);
            return;
        };
        let store = &mut self.stores[place];
        let present =
            self.rings[ring].store(slot).is_some_and(|it| Arc::ptr_eq(it, &store.backing));
        let is_gone = store.removed || !present;
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
        let (answer, effective) = if is_gone {
            (-libc::ENODEV, 0)
        } else if unable {
            (-libc::EOPNOTSUPP, 0)
        } else if dice.per_mille(chance) {
            let error = ERRORS[dice.below(ERRORS.len() as u64) as usize];
            // An operation that can be retried has not started. One that has failed may be done in
            // part.
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
        let Some(flight) = self.rings[ring].flight_mut(slot) else { return };
        let small = |buf: &&Buf| buf.len() * 2 < buf.capacity();
        let room = flight.buf().filter(small).map_or(0, Buf::capacity);
        let stale = self.stale_copies.is_some_and(|least| room >= least);
        let step = Some(step);
        let call = Call { ring, slot, store: place, step, answer, early, effective, since, stale };
        if self.copied == id && call.changes().is_some() && effective > 0 {
            self.fault = Some(format!("{id:?} is changed while it is copied: {step:?}"));
        }
        call.run(self.number + 1, flight, store, &self.regions[ring], 0, early);
        self.after(wait, Event::Return(self.number + 1));
        self.trace.note([0x10, slot.into(), answer as u64], || {
            format!("disk      ring {ring} slot {slot} begins: {step:?} on store {place}")
        });
        self.calls.insert(self.number, call);
    }

    /// A system call returns.
    fn finish(&mut self, number: u64) {
        // It may have been cancelled.
        let Some(call) = self.calls.remove(&number) else { return };
        let Call { ring, slot, mut answer, .. } = call;
        let store = &mut self.stores[call.store];
        let is_error = answer < 0 && !matches!(-answer, libc::EOPNOTSUPP | libc::ECANCELED);
        store.failed |= is_error;
        if let Some(flight) = self.rings[ring].flight_mut(slot) {
            let (from, to) = (call.early, call.effective);
            call.run(number, flight, store, &self.regions[ring], from, to);
        }
        if !(self.forgets_flushes && call.step == Some(Step::Sync)) {
            store.returned(number, &call);
        }
        if self.confuses_stores && is_error {
            self.confused = Some(call.store);
        } else if matches!(call.step, Some(Step::Read { .. }))
            && self.confused.is_some_and(|store| store != call.store)
        {
            (self.confused, answer) = (None, -libc::EIO);
        }
        self.trace.note([0x11, slot.into(), answer as u64], || {
            format!("disk      ring {ring} slot {slot}: {answer}")
        });
        self.answers.push((ring, Answer::Slot(slot, answer)));
    }

    /// Cancels the step of a slot: one that waits for a worker is cancelled; one that has started
    /// continues, or is interrupted and completes with the errno for that.
    fn cancel(&mut self, ring: usize, index: usize, slot: u32) {
        let is_it = |(_, call): &(&u64, &mut Call)| (call.ring, call.slot) == (ring, slot);
        let found = self.calls.iter_mut().find(is_it);
        let untouched = found.filter(|(_, call)| (call.early, call.answer < 0) == (0, false));
        let (told, ended) = match untouched {
            // It may have completed, and the ring has not seen that yet.
            None => ([-libc::ENOENT, -libc::EALREADY][self.dice.below(2) as usize], None),
            Some((number, _)) => match self.dice.below(4) {
                0 | 1 => (0, Some((*number, -libc::ECANCELED))),
                2 => (-libc::EALREADY, None),
                _ => {
                    let how = [libc::ECANCELED, libc::EINTR][self.dice.below(2) as usize];
                    (-libc::EALREADY, Some((*number, -how)))
                }
            },
        };
        if let Some((number, _)) = ended.filter(|_| self.gives_back_what_goes_on && told == 0) {
            self.let_go_on(number);
        }
        if let Some((number, answer)) = ended
            && let Some(call) = self.calls.get_mut(&number)
        {
            (call.answer, call.effective) = (answer, 0);
            let wait = self.dice.part(self.faults.latency);
            self.after(wait, Event::Return(number));
        }
        let wait = self.dice.part(self.faults.latency);
        self.after(wait, Event::Tell(ring, Answer::Recall(index, told)));
    }
}

impl SimDevice {
    /// A seeded bug: a write that will be reported as cancelled is executed later.
    fn let_go_on(&mut self, number: u64) {
        let Some(call) = self.calls.get(&number) else { return };
        let (Some(Step::Write { at, skip, len, .. }), store) = (call.step, call.store) else {
            return;
        };
        let flight = self.rings[call.ring].flight_mut(call.slot);
        let Some(buf) = flight.as_ref().and_then(|flight| flight.buf()) else { return };
        let bytes = &self.regions[call.ring].bytes(buf)[skip as usize..][..len as usize];
        let event = Event::Land(store, at, bytes.to_vec());
        self.after(self.faults.stall, event);
    }
}

impl BlockDevice for SimRing<'_> {
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest) {
        let SimRing { disk, ring } = self;
        if let Some(store) = disk.numbers.get(&backing)
            && disk.stores[*store].erasing
            && disk.rings[*ring].is_attached(backing)
            && !matches!(op, IoRequest::Flush)
        {
            disk.fault = Some(format!("store {store} is used while it is erased: {op:?}"));
        }
        let store = disk.numbers.get(&backing);
        let syncs = |(_, call): &(&u64, &Call)| {
            (call.ring, Some(&call.store), call.step) == (*ring, store, Some(Step::Sync))
        };
        if disk.joins_flushes
            && matches!(op, IoRequest::Flush)
            && let Some((call, _)) = disk.calls.iter().find(syncs)
        {
            return disk.joined.push((*ring, *call, tag));
        }
        disk.rings[*ring].submit(backing, tag, op, |_, _| None);
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.recall_all(&[CancelRequest { of, tag }]);
    }

    fn recall_all(&mut self, requests: &[CancelRequest]) {
        self.disk.rings[self.ring].cancel_all(requests);
    }
}

impl Call {
    /// Without effect so far, and successful.
    fn of(ring: usize, slot: u32, store: usize) -> Call {
        let (answer, early, effective, since) = (0, 0, 0, 0);
        Call { ring, slot, store, step: None, answer, early, effective, since, stale: false }
    }

    /// The range that it changes, if any.
    fn changes(&self) -> Option<(u64, u64)> {
        match self.step? {
            Step::Write { at, len, .. } | Step::Zeros { at, len } => Some((at, len.into())),
            Step::Space { at, len, .. } => Some((at, len)),
            Step::Read { .. } | Step::Sync => None,
        }
    }

    /// Lets bytes `from` to `to` of it take effect.
    fn run(
        &self,
        number: u64,
        flight: &mut PendingIo,
        store: &mut Media,
        region: &Region,
        from: u64,
        to: u64,
    ) {
        if from >= to {
            return;
        }
        if let Some(Step::Read { at, skip, .. }) = self.step {
            let Some(buf) = flight.buf_mut() else { return };
            let into = &mut region.bytes_mut(buf)[skip as usize..];
            let of = if self.stale { &store.durable } else { &store.live };
            let source = (at + from) as usize..(at + to) as usize;
            into[from as usize..to as usize].copy_from_slice(&of[source]);
        } else {
            store.apply(number, self, (flight.buf(), region), from, to);
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::sim::device::*;
    use rdma::{Pool, PoolPlan};

    const PERFECT: DeviceFaults = DeviceFaults {
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
    const ID: DeviceId = DeviceId(7);

    struct Bench {
        pool: Pool,
        disk: SimDevice,
        now: Instant,
    }

    fn bench(seed: u64, faults: DeviceFaults) -> Bench {
        let plan = PoolPlan::without_receives(0, 1 << 20, 1 << 16);
        let (pool, now) = (Pool::new(plan).unwrap(), Instant::now());
        let trace = Arc::new(Trace::new(super::super::trace::Telling::Nothing, now));
        let mut disk = SimDevice::new(seed, faults, &[(64, 512)], now, trace);
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

        fn submit(&mut self, tag: Tag, op: IoRequest) {
            SimRing { disk: &mut self.disk, ring: 0 }.submit(ID, tag, op);
        }

        fn wait(&mut self) -> IoCompletion {
            let mut done = Vec::new();
            while done.is_empty() {
                self.disk.submit(0);
                if !self.disk.has_ready(0) {
                    self.now = self.disk.next_due().expect("something under way");
                    self.disk.advance(self.now);
                }
                self.disk.reap(0, &mut done);
            }
            assert_eq!(done.len(), 1);
            done.remove(0)
        }

        fn ask(&mut self, op: IoRequest) -> Result<(), Status> {
            self.submit(5, op);
            let done = self.wait();
            assert_eq!(done.tag, 5);
            done.buf.into_iter().for_each(|buf| self.pool.give(buf));
            done.outcome
        }

        fn write(&mut self, lba: u64, blocks: u32, byte: u8, fua: bool) {
            let from = self.buf(blocks, byte);
            assert_eq!(self.ask(IoRequest::Write { from, at: lba * 512, fua }), Ok(()));
        }

        /// The first byte of each of the first `blocks` blocks.
        fn read(&mut self, blocks: u32) -> Vec<u8> {
            let into = self.buf(blocks, 0xee);
            self.submit(0, IoRequest::Read { into, at: 0 });
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
    fn writes_read_back_despite_short_transfers() {
        for seed in 0..50 {
            let faults = DeviceFaults { short: 800, ..PERFECT };
            let mut bench = bench(seed, faults);
            bench.write(1, 16, 7, false);
            bench.write(3, 2, 8, true);
            assert_eq!(
                bench.ask(IoRequest::Zero { at: 2048, len: 512, deallocate: false }),
                Ok(())
            );
            assert_eq!(bench.ask(IoRequest::Discard { at: 2560, len: 512 }), Ok(()));
            assert_eq!(bench.read(7), [0, 7, 7, 8, 0, 0, 7]);
            assert!(bench.pool.is_full());
        }
    }

    #[test]
    fn power_loss_preserves_durable_data_and_may_lose_the_rest() {
        let (mut lost, mut kept) = (0, 0);
        for seed in 0..50 {
            let mut bench = bench(seed, PERFECT);
            bench.write(0, 4, 1, false);
            assert_eq!(bench.ask(IoRequest::Flush), Ok(()));
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
    fn a_flush_covers_only_writes_completed_before_it() {
        let mut lost = 0;
        for seed in 0..50 {
            let mut bench = bench(seed, PERFECT);
            let from = bench.buf(1, 1);
            bench.submit(1, IoRequest::Flush);
            bench.submit(2, IoRequest::Write { from, at: 0, fua: false });
            let mut done = Vec::new();
            // Again, if there was no room.
            (0..3).for_each(|_| bench.disk.submit(0));
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
    fn a_flush_failure_that_loses_data_is_permanent() {
        let faults = DeviceFaults { sync_error: 1000, ..PERFECT };
        let mut failed = 0;
        for seed in 0..50 {
            let mut bench = bench(seed, faults);
            bench.write(0, 1, 1, false);
            assert!(bench.ask(IoRequest::Flush).is_err());
            bench.disk.faults = PERFECT;
            if bench.disk.is_doomed() {
                failed += 1;
                assert!(bench.ask(IoRequest::Flush).is_err(), "it sticks");
            }
        }
        assert!(failed > 25);
    }

    #[test]
    fn io_of_a_detached_device_fails_with_invalid_namespace() {
        let mut bench = bench(1, PERFECT);
        bench.disk.detach(ID);
        let outcome = bench.ask(IoRequest::Flush);
        assert!(outcome.unwrap_err().is(Status::INVALID_NAMESPACE));
    }
}
