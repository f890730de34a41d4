//! `Ring`: io_uring, the one thing a reactor sleeps on.
//!
//! Disk operations, readiness of foreign descriptors (the fabric's, the mailbox's) and the next
//! deadline are all waited for in one place. Data go between the disk and the very buffers that
//! the fabric moves: the pool's region is registered with the ring, so nothing is copied.
//!
//! ```text
//! Disk::submit ─► queue ─► flights (a slot each, at most `ops`) ─► kernel ─► reap ─► Done
//!                             ▲                                      │
//!                             └──── the rest of it, once more ◄──────┘
//! ```
//!
//! What the kernel cannot do at once it gives to threads, a limited number that all stores share in
//! order of arrival; a disk that hangs, or is busy, keeps each that works for it. So no store has all
//! of them: see `ring/share.rs`.
//!
//! # How the unsafe code is fenced
//!
//! The kernel writes into memory behind the compiler's back, so three things must hold for every
//! address it is given, and each is settled in one place:
//!
//! * *It lies in the pool's mapping.* `Memory::locate` (in `disk/entry.rs`) alone makes addresses
//!   of buffers, after a check of the bounds. (Zeros are written from a second, private mapping
//!   that nobody else has.)
//! * *Nobody else looks.* The [`Buf`] moves into the flight and comes out with its completion; a
//!   flight leaves its slot only when the kernel has no part in it.
//! * *It stays mapped.* `Memory` holds the `Arc<Region>`. `Drop` waits for everything that the
//!   kernel still has; should a disk never answer, the mapping is leaked rather than released.
//!
//! Descriptors stay open because each flight's backing is kept until its last flight is home. A
//! slot of the kernel's table of files is given to a new backing only after that, so an operation
//! that a kernel worker picks up late never meets another namespace's file.
//!
//! What needs none of that is in files of its own: `ring/files.rs`, which backings there are,
//! `ring/share.rs`, how much one of them may have, `ring/syncs.rs`, who synchronises it, and
//! `ring/home.rs`, what becomes of the kernel's answers. A test sees that it stays so.
#![expect(unsafe_code, reason = "entries for the kernel name memory and files by number")]

mod files;
mod home;
mod share;
mod syncs;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use nvme::status::Status;
use rdma::{Buf, Pool, PoolPlan, Region, Tag};

use crate::disk::entry::{Attachment, CHUNK_SHIFT, Memory, Place, entry_for, pause_entry};
use crate::disk::fault::Verdict;
use crate::disk::flight::{Flight, Step, ZEROS_BYTES};
use crate::disk::recall::Recalls;
use crate::disk::setup::{LADDER, allow_workers, register_files, set_up};
use crate::disk::watch::{Watches, Wish};
use crate::disk::{self, Backing, BackingId, Disk, Done, Kind, Op};

/// What one io_uring can have under way.
const MAX_OPS: u32 = 32768;
/// How long the end of a ring waits for disks before it gives its memory up.
const FAREWELL: Duration = Duration::from_secs(30);

/// Marks the user data of a watch; the rest is its index. Other user data are flight slots.
const WATCH: u64 = 1 << 63;
/// Marks the user data of a wish to have an operation back; the rest is its index.
const RECALL: u64 = 1 << 62;
/// User data of entries whose completion says nothing.
const NOBODY: u64 = u64::MAX;

/// How large a ring is to be.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLimits {
    /// Operations that the kernel has at once, and for which room is reserved to wait behind
    /// them: the reactor's slots, all queues together. 1 to 32768.
    pub ops: u32,
    /// Backings: every [`BackingId`] is below this.
    pub backings: u32,
}

/// What a ring has done since it was made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingStats {
    /// Reads and writes on registered memory: no copy, no pinning.
    pub fixed: u64,
    /// Reads and writes that named memory by address: the region is not registered (see the log),
    /// a window crosses a 1 GiB boundary, or zeros are written.
    pub plain: u64,
    /// Reads and writes of RAM, copied on the spot.
    pub copied: u64,
    /// Synchronisations.
    pub syncs: u64,
    /// Operations on space.
    pub spaces: u64,
    /// Steps after an operation's first: the rest of short transfers, retries, fallbacks.
    pub again: u64,
    /// System calls.
    pub enters: u64,
}

/// An io_uring of one reactor. It stays on the thread that made it.
pub struct Ring {
    io: IoUring,
    memory: Memory,
    attachments: Vec<Option<Attachment>>,
    /// By [`BackingId`]: index into `attachments`.
    by_id: Vec<Option<u32>>,
    /// Slots in the kernel's table of files.
    files: u32,
    flights: Vec<Option<Flight>>,
    free: Vec<u32>,
    /// Not yet in a slot.
    queue: VecDeque<Flight>,
    /// In a slot, and to be given to the kernel (again).
    again: VecDeque<u32>,
    /// Scratch: slots that come home with another one.
    followers: Vec<u32>,
    /// Home without the kernel's help.
    ready: VecDeque<Done>,
    watches: Watches,
    recalls: Recalls,
    in_kernel: usize,
    /// Flights: in the queue, parked with their store, or in a slot.
    under_way: usize,
    /// How much of one store the kernel may have.
    share: u32,
    /// Attachments, by index, with whom something is parked that may have a slot now.
    resumed: Vec<u32>,
    stats: RingStats,
    complaints: u64,
    /// The kernel accepts entries from the creating thread only.
    _not_send: PhantomData<*const ()>,
}

impl std::fmt::Debug for Ring {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ring").field("stats", &self.stats).finish_non_exhaustive()
    }
}

impl Ring {
    /// Makes a ring for the calling thread, with `region` registered.
    ///
    /// Where the system's limit of locked memory forbids the registration, the ring works without
    /// it, a little slower, and says so in the log.
    ///
    /// # Errors
    /// The system has no io_uring, or forbids it; the text says what to do.
    pub fn new(region: Arc<Region>, limits: RingLimits) -> io::Result<Ring> {
        let io = set_up(limits.ops.clamp(1, MAX_OPS), &LADDER)?;
        Ring::over(io, region, limits)
    }

    fn over(io: IoUring, region: Arc<Region>, limits: RingLimits) -> io::Result<Ring> {
        let registered = register_region(&io, &region)?;
        allow_workers(&io);
        let files = register_files(&io, limits.backings);
        let ops = limits.ops.clamp(1, MAX_OPS);
        let zeros = Pool::new(PoolPlan {
            cells: 0,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: u64::from(ZEROS_BYTES),
            largest_bytes: ZEROS_BYTES,
        })?
        .region()
        .clone();
        let room = ops as usize;
        Ok(Ring {
            io,
            memory: Memory { region, zeros, registered },
            attachments: Vec::with_capacity(limits.backings as usize),
            by_id: vec![None; limits.backings as usize],
            files,
            flights: (0..ops).map(|_| None).collect(),
            free: (0..ops).rev().collect(),
            queue: VecDeque::with_capacity(room),
            again: VecDeque::with_capacity(room),
            followers: Vec::new(),
            ready: VecDeque::with_capacity(room),
            watches: Watches::default(),
            recalls: Recalls::default(),
            in_kernel: 0,
            under_way: 0,
            share: share::of_one(0),
            resumed: Vec::new(),
            stats: RingStats::default(),
            complaints: 0,
            _not_send: PhantomData,
        })
    }

    /// Has the readiness (for reading) of `fd` end the next sleeps and be reported by
    /// [`Ring::reap`] as `token`, once. Call it before each sleep: it acts only when the last
    /// report has been made.
    pub fn watch(&mut self, fd: RawFd, token: u32) {
        self.watches.watch(fd, token);
    }

    /// Ends the watch of `fd`. The kernel lets go of the descriptor with the next submission;
    /// until then a closed socket would keep its port.
    pub fn unwatch(&mut self, fd: RawFd) {
        self.watches.unwatch(fd);
    }

    /// Gives the kernel what is queued: one system call, none when nothing is.
    pub fn submit(&mut self) {
        self.fill();
        if !self.io.submission().is_empty() {
            self.enter(0, None);
        }
    }

    /// Submits, then waits until something has completed or `until` has come. Returns at once
    /// when completions are there already.
    pub fn sleep(&mut self, until: Option<Instant>, now: Instant) {
        self.fill();
        let patience = until.map(|until| until.saturating_duration_since(now));
        let work_left = !self.ready.is_empty() || !self.again.is_empty();
        if !work_left && patience != Some(Duration::ZERO) {
            self.enter(1, patience);
        } else if !self.io.submission().is_empty() {
            self.enter(0, None);
        }
    }

    /// Appends what has come home to `done` and the tokens of what has become readable to `woken`.
    /// Does not block. Reserve room for all slots in both once, and no call allocates.
    pub fn reap(&mut self, done: &mut Vec<Done>, woken: &mut Vec<u32>) {
        done.extend(self.ready.drain(..));
        let submission = self.io.submission();
        let (deferred, overflown) = (submission.taskrun(), submission.cq_overflow());
        drop(submission);
        if deferred || overflown {
            self.enter(0, None);
        }
        let mut batch = [(0u64, 0i32); 32];
        loop {
            let mut count = 0;
            for (place, entry) in batch.iter_mut().zip(self.io.completion()) {
                *place = (entry.user_data(), entry.result());
                count += 1;
            }
            for &(user_data, answer) in &batch[..count] {
                self.on_completion(user_data, answer, done, woken);
            }
            if count < batch.len() {
                return;
            }
        }
    }

    /// Operations submitted and not yet handed back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.under_way + self.ready.len() + self.recalls.len()
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        self.stats
    }

    /// Writes entries for all that is to be done, as long as there is room.
    fn fill(&mut self) {
        while let Some((index, wish)) = self.watches.wish() {
            let user_data = WATCH | index as u64;
            let entry = match wish {
                Wish::Arm(fd) => {
                    opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(user_data)
                }
                Wish::Cancel => opcode::AsyncCancel::new(user_data).build().user_data(NOBODY),
            };
            // SAFETY: these entries name no memory; a descriptor that has been closed meanwhile
            // only makes the poll fail.
            if !unsafe { self.push(&entry) } {
                return;
            }
            self.watches.granted(index);
        }
        // Before any operation: a slot must not have become another one's.
        while let Some((index, recall)) = self.recalls.wish() {
            let flight = self.flights[recall.slot as usize].as_ref();
            if flight.is_none_or(|flight| flight.tag() != recall.of) {
                self.recalls.asked();
                let (home, outcome) = (self.recalls.answered(index), Err(Status::INTERNAL_ERROR));
                self.ready.extend(home.map(|it| Done { tag: it.tag, buf: None, outcome }));
                continue;
            }
            let entry = opcode::AsyncCancel::new(recall.slot.into()).build();
            let entry = entry.user_data(RECALL | index as u64);
            // SAFETY: the entry names no memory.
            if !unsafe { self.push(&entry) } {
                return;
            }
            self.recalls.asked();
        }
        while let Some(slot) = self.again.pop_front() {
            if !self.issue(slot) {
                self.again.push_front(slot);
                return;
            }
        }
        while let Some(slot) = self.take_slot() {
            if !self.issue(slot) {
                self.again.push_back(slot);
                return;
            }
        }
    }

    /// Gives a flight's next step to the kernel; false when there is no room for it now.
    fn issue(&mut self, slot: u32) -> bool {
        let Some((step, entry)) = self.next_entry(slot) else {
            tracing::error!("a buffer that is not of this ring's pool, or an operation astray");
            let done = self.land(slot, Err(Status::INTERNAL_ERROR.with_dnr()));
            self.ready.extend(done);
            return true;
        };
        if step == Step::Sync && !self.leads_sync(slot) {
            return true;
        }
        let (entry, begins) = match self.verdict(slot, step) {
            Verdict::Go => (entry, step == Step::Sync),
            Verdict::Wait => (pause_entry(), false),
            Verdict::Fail(errno) => return self.fail(slot, errno),
        };
        let plain = matches!(entry.get_opcode() as u8, opcode::Read::CODE | opcode::Write::CODE);
        if begins {
            // Not before: one that waits for its turn has begun nothing yet.
            self.begin_sync(slot);
        }
        // SAFETY: the entry's memory is the flight's own Buf (checked by `locate`), the zeros, or
        // a static; mapped while `self.memory` lives, and Drop outwaits the kernel. The Buf stays in
        // the flight, and the flight in its slot, until this entry's completion.
        if !unsafe { self.push(&entry.user_data(u64::from(slot))) } {
            if begins {
                self.take_sync_back(slot);
            }
            return false;
        }
        self.in_kernel += 1;
        match step {
            Step::Sync => self.stats.syncs += 1,
            Step::Space { .. } => self.stats.spaces += 1,
            _ if plain => self.stats.plain += 1,
            _ => self.stats.fixed += 1,
        }
        true
    }

    /// What becomes of a step: the kernel does it, unless the store is told to do wrong.
    fn verdict(&mut self, slot: u32, step: Step) -> Verdict {
        let Some(flight) = self.flights[slot as usize].as_mut() else { return Verdict::Go };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        attachment.map_or(Verdict::Go, |it| flight.verdict(step, &it.backing))
    }

    /// As if the kernel had failed a step.
    fn fail(&mut self, slot: u32, errno: i32) -> bool {
        let Some(flight) = self.flights[slot as usize].as_mut() else { return true };
        let attachment = self.attachments[flight.attachment as usize].as_ref();
        let outcome = attachment.and_then(|it| flight.advance(-errno, &it.backing));
        let done = self.land(slot, outcome.unwrap_or(Err(Status::INTERNAL_ERROR.with_dnr())));
        self.ready.extend(done);
        true
    }

    /// A flight's next step, and the entry that says so to the kernel.
    fn next_entry(&mut self, slot: u32) -> Option<(Step, squeue::Entry)> {
        let flight = self.flights[slot as usize].as_mut()?;
        let attachment = self.attachments[flight.attachment as usize].as_ref()?;
        let step = flight.step(&attachment.backing);
        let backing = &attachment.backing;
        let step = backing.health().fault().cut(step, backing.block_size_bytes());
        let entry = entry_for(step, flight.buf(), attachment, &self.memory)?;
        Some((step, entry))
    }

    /// Queues an entry, making room by a submission when there is none.
    ///
    /// # Safety
    /// The memory that the entry names stays mapped, and untouched by others, until it completes.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        for _ in 0..2 {
            // SAFETY: the caller's promise.
            if unsafe { self.io.submission().push(entry) }.is_ok() {
                return true;
            }
            self.enter(0, None);
        }
        false
    }

    /// One system call: submits everything queued and waits for `want` completions.
    fn enter(&mut self, want: usize, patience: Option<Duration>) {
        self.stats.enters += 1;
        let result = match patience {
            None => self.io.submit_and_wait(want),
            Some(patience) => {
                let until = Timespec::from(patience);
                self.io.submitter().submit_with_args(want, &SubmitArgs::new().timespec(&until))
            }
        };
        let Err(error) = result else { return };
        // Time is up; a signal came; completions must be reaped first; memory is short just now.
        // In all of these what was not submitted stays queued for the next turn.
        let passing = [libc::ETIME, libc::EINTR, libc::EBUSY, libc::EAGAIN];
        if !error.raw_os_error().is_some_and(|errno| passing.contains(&errno)) {
            self.complaints = self.complaints.wrapping_add(1);
            if self.complaints.is_power_of_two() {
                tracing::error!("io_uring_enter: {error}; so far {} times", self.complaints);
            }
        }
    }
}

impl Disk for Ring {
    fn submit(&mut self, backing: BackingId, tag: Tag, op: Op) {
        let index = self.by_id.get(backing.0 as usize).copied().flatten();
        let attached = index
            .and_then(|index| Some((index, self.attachments.get_mut(index as usize)?.as_mut()?)));
        let Some((index, attachment)) = attached else {
            let gone = Err(Status::INVALID_NAMESPACE.with_dnr());
            self.ready.push_back(Flight::new(u32::MAX, tag, op).done(gone));
            return;
        };
        let mut flight = Flight::new(index, tag, op);
        if let Some(outcome) = flight.shortcut(&attachment.backing) {
            if attachment.backing.kind() == Kind::Null
                && flight.is_read()
                && let Some(buf) = flight.buf()
            {
                clear(&self.memory, buf);
            }
            self.ready.push_back(flight.done(outcome));
            return;
        }
        if attachment.backing.kind() == Kind::Ram
            && let Some(outcome) = copy_now(&mut flight, &attachment.backing, &self.memory)
        {
            self.stats.copied += 1;
            self.ready.push_back(flight.done(outcome));
            return;
        }
        attachment.flights += 1;
        self.under_way += 1;
        self.queue.push_back(flight);
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.take_back(&[disk::Wish { of, tag }]);
    }

    fn recall_all(&mut self, wishes: &[disk::Wish]) {
        self.take_back(wishes);
    }
}

impl Drop for Ring {
    /// Takes everything back from the kernel before the memory may go.
    fn drop(&mut self) {
        self.queue.clear();
        self.attachments.iter_mut().flatten().for_each(|it| it.parked.clear());
        self.watches.unwatch_all();
        let (mut done, mut woken) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + FAREWELL;
        loop {
            self.again.clear();
            let now = Instant::now();
            if self.in_kernel == 0 && self.watches.is_empty() {
                return;
            }
            if now >= deadline {
                break;
            }
            self.sleep(Some(now + Duration::from_millis(100)), now);
            self.reap(&mut done, &mut woken);
        }
        tracing::error!(
            "{} disk operations did not come back within {FAREWELL:?}: their memory stays taken",
            self.in_kernel
        );
        std::mem::forget((Arc::clone(&self.memory.region), Arc::clone(&self.memory.zeros)));
        // Their locks stay taken as well: nobody else may serve what may still be written.
        std::mem::forget(std::mem::take(&mut self.attachments));
    }
}

/// Overwrites a buffer's window with zeros.
fn clear(memory: &Memory, buf: &Buf) {
    let Some(place) = memory.locate(buf, 0, buf.len()) else { return };
    // SAFETY: `locate` proved that the window lies in the mapping, which `memory` keeps; the
    // caller owns the Buf that alone may touch these bytes, and no kernel operation has it.
    unsafe { place.addr.write_bytes(0, buf.len() as usize) };
}

/// Serves a read or write of RAM on the spot: the outcome, or none when it is another operation.
///
/// The kernel never performs io_uring transfers of memory files in place but hands each to a
/// worker thread: measured, less than half the rate on twice the processors.
fn copy_now(flight: &mut Flight, backing: &Backing, memory: &Memory) -> Option<Result<(), Status>> {
    let fd = backing.fd()?;
    let mut outcome = None;
    while outcome.is_none() {
        let (at, skip, len, store) = match flight.step(backing) {
            Step::Read { at, skip, len } => (at, skip, len, false),
            Step::Write { at, skip, len, .. } => (at, skip, len, true),
            Step::Zeros { .. } | Step::Space { .. } | Step::Sync => return None,
        };
        let Some(Place { addr, .. }) = memory.locate(flight.buf()?, skip, len) else {
            return Some(Err(Status::INTERNAL_ERROR.with_dnr()));
        };
        let at = libc::off_t::try_from(at).unwrap_or(libc::off_t::MAX);
        let moved = if store {
            // SAFETY: `locate` proved that the `len` bytes lie in the mapping, which `memory`
            // keeps; the flight owns the Buf that alone may touch them, and the kernel is done
            // with them on return.
            unsafe { libc::pwrite(fd, addr.cast(), len as usize, at) }
        } else {
            // SAFETY: as above.
            unsafe { libc::pread(fd, addr.cast(), len as usize, at) }
        };
        let answer = i32::try_from(moved).unwrap_or(i32::MAX);
        let answer = if answer < 0 { -nix::errno::Errno::last_raw() } else { answer };
        outcome = flight.advance(answer, backing);
    }
    outcome
}

/// Registers the region in pieces; false when the limit of locked memory forbids it.
fn register_region(io: &IoUring, region: &Region) -> io::Result<bool> {
    let chunk = 1usize << CHUNK_SHIFT;
    let pieces: Vec<libc::iovec> = (0..region.len())
        .step_by(chunk)
        .map(|start| libc::iovec {
            iov_base: std::ptr::with_exposed_provenance_mut(region.addr() + start),
            iov_len: chunk.min(region.len() - start),
        })
        .collect();
    // SAFETY: the pieces tile the region's mapping, which `Memory` keeps until the ring is closed;
    // bytes in it are touched only through Bufs, which move to whoever may write them.
    match unsafe { io.submitter().register_buffers(&pieces) } {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EPERM)) => {
            tracing::warn!(
                "the pool of {} bytes is not registered with the ring: {error}; disk transfers \
                 cost a little more until the limit of locked memory is raised (ulimit -l, \
                 systemd: LimitMEMLOCK=infinity)",
                region.len()
            );
            Ok(false)
        }
        Err(error) => Err(io::Error::new(
            error.kind(),
            format!("cannot register the pool with the ring: {error}; see the kernel log"),
        )),
    }
}
