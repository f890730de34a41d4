//! `Ring`: io_uring, the only descriptor that a reactor sleeps on.
//!
//! Disk operations, readiness of foreign descriptors (the fabric's, the channel's) and the next
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
//! of them: see `uring/worker_quota.rs`.
//!
//! # How the unsafe code is fenced
//!
//! The kernel writes into memory behind the compiler's back, so three things must hold for every
//! address it is given, and each is settled in one place:
//!
//! * *It lies in the pool's mapping.* `Memory::locate` (in `uring/sqe.rs`) alone makes addresses
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
//! What needs none of that is in files of its own: `uring/pending.rs`, what is under way, as a state
//! machine without I/O, with its parts: `uring/fixed_files.rs`, which backings there are,
//! `uring/worker_quota.rs`, how much one of them may have, `uring/sync_slots.rs`, who synchronises it, and
//! `uring/completions.rs`, what becomes of the kernel's answers. A test sees that it stays so.
#![expect(unsafe_code, reason = "entries for the kernel name memory and files by number")]

pub mod cancel;
mod completions;
mod fixed_files;
pub mod pending;
pub(crate) mod poll_fd;
pub(crate) mod setup;
pub mod sqe;
pub(crate) mod sync_group;
mod sync_slots;
#[cfg(test)]
mod tests;
mod worker_quota;

use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use nvme::status::Status;
use rdma::{Buf, Pool, PoolPlan, Region, Tag};

use crate::request::{PendingIo, Step, ZEROS_BYTES};
use crate::{BackingDevice, BlockDevice, DeviceId, IoCompletion, IoRequest, Kind};
use poll_fd::{PollRequest, PolledFds};
use setup::{LADDER, allow_workers, register_files, set_up};
use sqe::{CHUNK_SHIFT, Memory, Place, entry_for, pause_entry};

use pending::{Flights, Submission};

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
    /// Backings: every [`DeviceId`] is below this.
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
    /// Slots in the kernel's table of files.
    files: u32,
    flights: Flights,
    watches: PolledFds,
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
        Ok(Ring {
            io,
            memory: Memory { region, zeros, registered },
            files,
            flights: Flights::new(limits),
            watches: PolledFds::default(),
            stats: RingStats::default(),
            complaints: 0,
            _not_send: PhantomData,
        })
    }

    /// Makes a backing known under `id`; one that had this id before is detached.
    ///
    /// # Errors
    /// The id is not below [`RingLimits::backings`].
    pub fn attach(&mut self, id: DeviceId, backing: Arc<BackingDevice>) -> io::Result<()> {
        self.detach(id);
        let fixed = match backing.fd() {
            Some(fd) if id.0 < self.files && self.flights.is_file_vacant(id) => {
                self.io.submitter().register_files_update(id.0, &[fd]).is_ok()
            }
            _ => false,
        };
        if self.flights.attach(id, backing, fixed) {
            return Ok(());
        }
        let text = format!("backing {} is beyond this ring's table", id.0);
        Err(io::Error::new(io::ErrorKind::InvalidInput, text))
    }

    /// Takes a backing out. New operations on `id` come home as Invalid Namespace; those under way
    /// complete normally, and the ring lets the backing go with the last of them.
    pub fn detach(&mut self, id: DeviceId) {
        self.flights.detach(id);
        self.vacate();
    }

    /// Has the kernel let those files go whose backings are.
    fn vacate(&mut self) {
        while let Some(id) = self.flights.next_vacated() {
            if let Err(error) = self.io.submitter().register_files_update(id, &[-1]) {
                tracing::warn!(
                    "cannot unregister the file of backing device {id} from io_uring: {error}"
                );
            }
        }
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
        if !self.flights.has_work() && patience != Some(Duration::ZERO) {
            self.enter(1, patience);
        } else if !self.io.submission().is_empty() {
            self.enter(0, None);
        }
    }

    /// Appends what has come home to `done` and the tokens of what has become readable to `woken`.
    /// Does not block. Reserve room for all slots in both once, and no call allocates.
    pub fn reap(&mut self, done: &mut Vec<IoCompletion>, woken: &mut Vec<u32>) {
        done.extend(self.flights.take_ready());
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
                return self.vacate();
            }
        }
    }

    /// Takes one answer of the kernel: `user_data` says to what.
    fn on_completion(
        &mut self,
        user_data: u64,
        answer: i32,
        done: &mut Vec<IoCompletion>,
        woken: &mut Vec<u32>,
    ) {
        if user_data == NOBODY {
        } else if user_data & WATCH != 0 {
            woken.extend(self.watches.on_completion((user_data & !WATCH) as usize));
        } else if user_data & RECALL != 0 {
            self.flights.recall_answered((user_data & !RECALL) as usize, answer, done);
        } else if let Ok(slot) = u32::try_from(user_data) {
            self.flights.answered(slot, answer, done);
        }
    }

    /// Operations submitted and not yet handed back.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.in_flight()
    }

    /// What it has done so far.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        RingStats { again: self.flights.repeated, ..self.stats }
    }

    /// Writes entries for all that is to be done, as long as there is room.
    fn fill(&mut self) {
        while let Some((index, wish)) = self.watches.next_request() {
            let user_data = WATCH | index as u64;
            let entry = match wish {
                PollRequest::Arm(fd) => {
                    opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(user_data)
                }
                PollRequest::Cancel => {
                    opcode::AsyncCancel::new(user_data).build().user_data(NOBODY)
                }
            };
            // SAFETY: these entries name no memory; a descriptor that has been closed meanwhile
            // only makes the poll fail.
            if !unsafe { self.push(&entry) } {
                return;
            }
            self.watches.granted(index);
        }
        while let Some((index, slot)) = self.flights.next_recall() {
            let entry = opcode::AsyncCancel::new(slot.into()).build();
            let entry = entry.user_data(RECALL | index as u64);
            // SAFETY: the entry names no memory.
            if !unsafe { self.push(&entry) } {
                return;
            }
            self.flights.recall_asked();
        }
        while let Some(ask) = self.flights.next_ask() {
            let entry = match ask {
                Submission::Pause(_) => Some(pause_entry()),
                Submission::Step(slot, step) => self.entry(slot, step),
            };
            let Some(entry) = entry else {
                self.flights.astray(ask.slot());
                continue;
            };
            let plain =
                matches!(entry.get_opcode() as u8, opcode::Read::CODE | opcode::Write::CODE);
            // SAFETY: the entry's memory is the flight's own Buf (checked by `locate`), the zeros, or
            // a static; mapped while `self.memory` lives, and Drop outwaits the kernel. The Buf stays
            // in the flight, and the flight in its slot, until this entry's completion.
            if !unsafe { self.push(&entry.user_data(ask.slot().into())) } {
                return self.flights.not_submitted(ask);
            }
            self.flights.submitted(ask);
            match ask {
                Submission::Pause(_) => {}
                Submission::Step(_, Step::Sync) => self.stats.syncs += 1,
                Submission::Step(_, Step::Space { .. }) => self.stats.spaces += 1,
                Submission::Step(..) if plain => self.stats.plain += 1,
                Submission::Step(..) => self.stats.fixed += 1,
            }
        }
    }

    /// The entry that says a step to the kernel.
    fn entry(&self, slot: u32, step: Step) -> Option<squeue::Entry> {
        let (flight, attachment) = self.flights.parts(slot)?;
        entry_for(step, flight.buf(), attachment, &self.memory)
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

impl BlockDevice for Ring {
    fn submit(&mut self, backing: DeviceId, tag: Tag, op: IoRequest) {
        let Ring { flights, memory, stats, .. } = self;
        flights.submit(backing, tag, op, |flight, backing| match backing.kind() {
            Kind::Ram => copy_now(flight, backing, memory).inspect(|_| stats.copied += 1),
            _ => {
                let buf = flight.buf().filter(|_| flight.is_read());
                buf.into_iter().for_each(|buf| clear(memory, buf));
                None
            }
        });
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.recall_all(&[crate::CancelRequest { of, tag }]);
    }

    fn recall_all(&mut self, wishes: &[crate::CancelRequest]) {
        self.flights.take_back(wishes);
        self.vacate();
    }
}

impl Drop for Ring {
    /// Takes everything back from the kernel before the memory may go.
    fn drop(&mut self) {
        self.flights.begin_nothing();
        self.watches.unwatch_all();
        let (mut done, mut woken) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + FAREWELL;
        loop {
            self.flights.begin_nothing();
            let now = Instant::now();
            if self.flights.in_kernel() == 0 && self.watches.is_empty() {
                return;
            }
            if now >= deadline {
                break;
            }
            self.sleep(Some(now + Duration::from_millis(100)), now);
            self.reap(&mut done, &mut woken);
        }
        tracing::error!(
            "{} device operations did not complete within {FAREWELL:?}: their buffers stay allocated",
            self.flights.in_kernel()
        );
        std::mem::forget((Arc::clone(&self.memory.region), Arc::clone(&self.memory.zeros)));
        // Their locks stay taken as well: nobody else may serve what may still be written.
        self.flights.leak();
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
fn copy_now(
    flight: &mut PendingIo,
    backing: &BackingDevice,
    memory: &Memory,
) -> Option<Result<(), Status>> {
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
                "cannot register the pool of {} bytes with io_uring: {error}; device I/O is \
                 slightly slower until the limit of locked memory is raised (ulimit -l, \
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
