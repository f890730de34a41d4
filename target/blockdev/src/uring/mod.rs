//! `Ring`: io_uring, the only descriptor that a reactor sleeps on.
//!
//! Device I/O, readiness of other descriptors (of the fabric and of the channel) and the next
//! deadline are waited for in one place. Data move between the device and the buffers that the
//! fabric uses: the region of the pool is registered with the ring, so nothing is copied.
//!
//! ```text
//! BlockDevice::submit ─► queue ─► slots (at most `ops`) ─► kernel ─► reap ─► IoCompletion
//!                                   ▲                        │
//!                                   └── the rest, or retry ◄─┘
//! ```
//!
//! Operations that the kernel cannot do immediately go to io-wq workers, a limited number that all
//! stores share in order of arrival; a device that hangs or is busy occupies one for each
//! operation. So no store may have all of them: see `uring/worker_quota.rs`.
//!
//! # Invariants of the unsafe code
//!
//! The kernel writes into memory without knowledge of the compiler, so three invariants must hold
//! for every address it is given. Each is ensured in one place:
//!
//! * *It is in the mapping of the pool.* Only `Memory::locate` (in `uring/sqe.rs`) computes
//!   addresses of buffers, after a check of the bounds. (Zeros are written from a second, private
//!   mapping that nothing else uses.)
//! * *Nothing else accesses it.* The [`Buf`] moves into the operation and is returned with its
//!   completion; an operation leaves its slot only when the kernel has finished with it.
//! * *It stays mapped.* `Memory` holds the `Arc<Region>`. `Drop` waits for everything that the
//!   kernel still has; if a device never answers, the mapping is leaked rather than released.
//!
//! Descriptors stay open because the store of each operation is kept until its last operation has
//! completed. A slot of the kernel's table of files is given to a new store only after that, so an
//! operation that a worker starts late cannot use the file of another namespace.
//!
//! Code that needs none of that is in other files: `uring/pending.rs`, the operations as a state
//! machine without I/O, with its parts `uring/fixed_files.rs` (attached stores),
//! `uring/worker_quota.rs` (share of a store), `uring/sync_slots.rs` (fsync), and
//! `uring/completions.rs` (results of the kernel). A guard checks that.
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

use crate::ceph_client::ffi::CompletionQueue;
use crate::request::{PendingIo, Step, ZEROS_BYTES};
use crate::{BackingDevice, BlockDevice, DeviceId, IoCompletion, IoRequest, Kind};
use poll_fd::{PollRequest, PolledFds};
use setup::{LADDER, allow_workers, register_files, set_up};
use sqe::{CHUNK_SHIFT, Memory, Place, entry_for, pause_entry};

use pending::{Flights, Submission};

/// Maximum of operations in flight on one io_uring.
const MAX_OPS: u32 = 32768;
/// How long drop waits for devices before it leaks the memory.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);

/// Flag in the user data of a poll; the rest is its index. Other user data are slots.
const WATCH: u64 = 1 << 63;
/// Flag in the user data of a cancellation; the rest is its index.
const RECALL: u64 = 1 << 62;
/// Token of the poll for completions of librbd; no other is as large.
const IMAGES: u32 = u32::MAX;
/// User data of entries whose completion is ignored.
const IGNORED: u64 = u64::MAX;

/// Sizes of a ring.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct RingLimits {
    /// Operations that the kernel has at once, and as many that may be queued behind them: the
    /// command slots of the reactor, all queues together. 1 to 32768.
    pub ops: u32,
    /// Number of ids: every [`DeviceId`] is below this.
    pub backings: u32,
}

/// Counters of a ring since its creation.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct RingStats {
    /// Reads and writes on registered memory: no copy, no pinning.
    pub fixed: u64,
    /// Reads and writes with addresses instead: the region is not registered (see the log), a
    /// window crosses a 1 GiB boundary, or zeros are written.
    pub plain: u64,
    /// Reads and writes in memory, copied by this thread.
    pub copied: u64,
    /// fsync operations.
    pub syncs: u64,
    /// fallocate operations.
    pub spaces: u64,
    /// Steps after the first one of an operation: the rest of short transfers, retries, fallbacks.
    pub again: u64,
    /// System calls.
    pub enters: u64,
}

/// The io_uring of one reactor. It stays on the thread that created it.
pub struct Ring {
    io: IoUring,
    memory: Memory,
    /// Slots in the kernel's table of files.
    files: u32,
    flights: Flights,
    watches: PolledFds,
    /// Completions of librbd, since a store was attached that is an image.
    images: Option<Arc<CompletionQueue>>,
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
    /// Creates a ring for the calling thread, with `region` registered.
    ///
    /// If the limit of locked memory prevents registration, the ring works without it, somewhat
    /// slower, and logs that.
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
            images: None,
            stats: RingStats::default(),
            complaints: 0,
            _not_send: PhantomData,
        })
    }

    /// Attaches a store under `id`; the previous store with this id is detached.
    ///
    /// # Errors
    /// The id is not below [`RingLimits::backings`].
    pub fn attach(&mut self, id: DeviceId, backing: Arc<BackingDevice>) -> io::Result<()> {
        self.detach(id);
        if backing.image().is_some() && self.images.is_none() {
            self.images = Some(CompletionQueue::new(self.flights.slot_count())?);
        }
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

    /// Detaches a store. New operations on `id` fail with Invalid Namespace; those in flight
    /// complete normally, and the ring releases the store after the last of them.
    pub fn detach(&mut self, id: DeviceId) {
        self.flights.detach(id);
        self.vacate();
    }

    /// Removes files of released stores from the kernel's table.
    fn vacate(&mut self) {
        while let Some(id) = self.flights.next_vacated() {
            if let Err(error) = self.io.submitter().register_files_update(id, &[-1]) {
                tracing::warn!(
                    "cannot unregister the file of backing device {id} from io_uring: {error}"
                );
            }
        }
    }

    /// Polls `fd` for reading: readiness ends a sleep and is reported once by [`Ring::reap`] as
    /// `token`. Call it before each sleep: it submits only if the previous poll has completed.
    pub fn watch(&mut self, fd: RawFd, token: u32) {
        self.watches.watch(fd, token);
    }

    /// Ends the poll of `fd`. The kernel releases the descriptor with the next submission; until
    /// then a closed socket would occupy its port.
    pub fn unwatch(&mut self, fd: RawFd) {
        self.watches.unwatch(fd);
    }

    /// Submits what is queued: one system call, or none if the queue is empty.
    pub fn submit(&mut self) {
        self.fill();
        if !self.io.submission().is_empty() {
            self.enter(0, None);
        }
    }

    /// Submits, then waits for a completion or until `until`. Returns immediately if there are
    /// completions.
    pub fn sleep(&mut self, until: Option<Instant>, now: Instant) {
        let images = self.images.clone().filter(|_| self.flights.in_flight() > 0);
        if let Some(images) = &images {
            self.watches.watch(images.fd(), IMAGES);
        }
        self.fill();
        let patience = until.map(|until| until.saturating_duration_since(now));
        let may_wait = !self.flights.has_work()
            && patience != Some(Duration::ZERO)
            && images.as_ref().is_none_or(|images| images.begin_sleep());
        if may_wait {
            self.enter(1, patience);
        } else if !self.io.submission().is_empty() {
            self.enter(0, None);
        }
        if let Some(images) = &images {
            images.end_sleep();
        }
    }

    /// Appends completed operations to `done` and the tokens of readable descriptors to `woken`.
    /// Does not block. With room for all slots reserved in both, no call allocates.
    pub fn reap(&mut self, done: &mut Vec<IoCompletion>, woken: &mut Vec<u32>) {
        done.extend(self.flights.take_ready());
        if let Some(images) = &self.images {
            let flights = &mut self.flights;
            images.take(|slot, answer| flights.answered(slot, answer, done));
        }
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

    /// Processes one completion; `user_data` identifies its entry.
    fn on_completion(
        &mut self,
        user_data: u64,
        answer: i32,
        done: &mut Vec<IoCompletion>,
        woken: &mut Vec<u32>,
    ) {
        if user_data == IGNORED {
        } else if user_data & WATCH != 0 {
            match self.watches.on_completion((user_data & !WATCH) as usize) {
                Some(IMAGES) => self.images.iter().for_each(|images| images.reset()),
                token => woken.extend(token),
            }
        } else if user_data & RECALL != 0 {
            self.flights.recall_answered((user_data & !RECALL) as usize, answer, done);
        } else if let Ok(slot) = u32::try_from(user_data) {
            self.flights.answered(slot, answer, done);
        }
    }

    /// Operations submitted and not yet returned by [`Ring::reap`].
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.flights.in_flight()
    }

    /// Its counters.
    #[must_use]
    pub fn stats(&self) -> RingStats {
        RingStats { again: self.flights.repeated, ..self.stats }
    }

    /// Writes entries for all pending work, as long as there is room.
    fn fill(&mut self) {
        while let Some((index, wish)) = self.watches.next_request() {
            let user_data = WATCH | index as u64;
            let entry = match wish {
                PollRequest::Arm(fd) => {
                    opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(user_data)
                }
                PollRequest::Cancel => {
                    opcode::AsyncCancel::new(user_data).build().user_data(IGNORED)
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
            if let Submission::Step(slot, step) = ask
                && self.start_at_image(slot, step)
            {
                self.flights.submitted(ask);
                continue;
            }
            let entry = match ask {
                Submission::Pause(_) => Some(pause_entry()),
                Submission::Step(slot, step) => self.entry(slot, step),
            };
            let Some(entry) = entry else {
                self.flights.fail_invalid(ask.slot());
                continue;
            };
            let plain =
                matches!(entry.get_opcode() as u8, opcode::Read::CODE | opcode::Write::CODE);
            // SAFETY: the memory of the entry is the Buf of the operation (checked by `locate`),
            // the zeros, or a static; mapped while `self.memory` lives, and Drop waits for the
            // kernel. The Buf stays in the operation, and the operation in its slot, until this
            // entry completes.
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

    /// Starts a step at librbd, if its store is an image. Returns false if it is none, or the step
    /// is invalid.
    fn start_at_image(&self, slot: u32, step: Step) -> bool {
        let Some((flight, attachment)) = self.flights.parts(slot) else { return false };
        let (Some(image), Some(images)) = (attachment.backing.image(), &self.images) else {
            return false;
        };
        let data = match step {
            Step::Read { skip, len, .. } | Step::Write { skip, len, .. } => {
                flight.buf().and_then(|buf| self.memory.locate(buf, skip, len))
            }
            Step::Zeros { .. } | Step::Space { .. } | Step::Sync => {
                Some(Place { addr: std::ptr::null_mut(), chunk: None })
            }
        };
        let Some(Place { addr, .. }) = data else { return false };
        let Some(image) = image.serving() else {
            images.fail(slot, libc::ESHUTDOWN);
            return true;
        };
        // SAFETY: the memory is the Buf of the operation (checked by `locate`), mapped while
        // `self.memory` lives, and Drop waits for librbd as for the kernel. The Buf stays in the
        // operation, and the operation in its slot, until that is taken from the queue.
        unsafe { image.start(step, addr, images, slot) };
        true
    }

    /// The entry for a step.
    fn entry(&self, slot: u32, step: Step) -> Option<squeue::Entry> {
        let (flight, attachment) = self.flights.parts(slot)?;
        entry_for(step, flight.buf(), attachment, &self.memory)
    }

    /// Queues an entry, after a submission if there is no room.
    ///
    /// # Safety
    /// The memory that the entry names stays mapped, and untouched by others, until it completes.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        for _ in 0..2 {
            // SAFETY: guaranteed by the caller.
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
        // Timeout; a signal; completions must be reaped first; temporary lack of memory. In all of
        // these cases what was not submitted stays queued for the next iteration.
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
            Kind::Null => {
                let buf = flight.buf().filter(|_| flight.is_read());
                buf.into_iter().for_each(|buf| clear(memory, buf));
                None
            }
            _ => copy_now(flight, backing, memory).inspect(|_| stats.copied += 1),
        });
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.recall_all(&[crate::CancelRequest { of, tag }]);
    }

    fn recall_all(&mut self, wishes: &[crate::CancelRequest]) {
        self.flights.cancel_all(wishes);
        self.vacate();
    }
}

impl Drop for Ring {
    /// Waits for or cancels everything that the kernel has before the memory is released.
    fn drop(&mut self) {
        self.flights.drop_waiting();
        self.watches.unwatch_all();
        let (mut done, mut woken) = (Vec::new(), Vec::new());
        let deadline = Instant::now() + DRAIN_TIMEOUT;
        loop {
            self.flights.drop_waiting();
            if self.flights.in_kernel() == 0 {
                // That of librbd's completions, which each sleep before arms.
                self.watches.unwatch_all();
            }
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
            "{} device operations did not complete within {DRAIN_TIMEOUT:?}: their buffers stay allocated",
            self.flights.in_kernel()
        );
        std::mem::forget((Arc::clone(&self.memory.region), Arc::clone(&self.memory.zeros)));
        // Their locks stay taken too: a store that may still be written must not be served by
        // others.
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

/// Executes a read or write in memory in this thread: the outcome, or none for another operation.
/// (A file in memory has no device to wait for, also not with FUA.)
///
/// The kernel does not execute io_uring transfers of tmpfs inline but passes each to a worker:
/// measured, less than half the rate on twice the processors.
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
