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
//! Where io_uring is denied, threads take the place of the kernel: `uring/threads.rs`.
//!
//! # Invariants of the unsafe code
//!
//! The kernel writes into memory without knowledge of the compiler, so three invariants must hold
//! for every address it is given. Each is ensured in one place:
//!
//! * *It is in the mapping of the pool.* Only `Memory::locate` (in `uring/sqe.rs`) computes
//!   addresses of buffers, after a check of the bounds. (Zeros are written from a second, private
//!   mapping that nothing else uses.)
//! * *Nothing else accesses it.* The [`Buf`](rdma::Buf) moves into the operation and is returned
//!   with its completion; an operation leaves its slot only when the kernel has finished with it.
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

mod calls;
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
pub(crate) mod tests;
mod threads;
mod worker_quota;

use std::io;
use std::marker::PhantomData;
use std::os::fd::RawFd;
use std::sync::{Arc, Once, Weak};
use std::time::{Duration, Instant};

use io_uring::types::{Fd, Fixed, SubmitArgs, Timespec};
use io_uring::{IoUring, opcode, squeue};
use rdma::{Region, Tag};

use crate::ceph_client::ffi::CompletionQueue;
use crate::request::Step;
use crate::{BackingDevice, BlockDevice, DeviceId, IoCompletion, IoEngine, IoRequest, Kind};
use calls::{CopyQuota, clear, copy_now, copy_step, execute, register_region};
use poll_fd::{PollRequest, PolledFds};
use setup::{LADDER, allow_workers, is_denied, register_files, set_up};
pub use setup::{RingLimits, RingStats};
use sqe::{Call, CallOp, Memory, Place, call_for, entry_for, pause_entry};

use pending::{Flights, Submission, is_faultless};
use threads::Threads;

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
/// The timeout of [`Submission::Pause`].
const PAUSE: Duration = Duration::from_millis(100);

/// The ring of one reactor. It stays on the thread that created it.
pub struct Ring {
    engine: Engine,
    memory: Memory,
    /// Slots in the kernel's table of files.
    files: u32,
    flights: Flights,
    watches: PolledFds,
    /// Completions of librbd, since a store was attached that is an image.
    images: Option<Arc<CompletionQueue>>,
    stats: RingStats,
    complaints: u64,
    /// Scratch: completions of threads.
    taken: Vec<(u64, i32)>,
    quota: CopyQuota,
    /// Scratch: slots whose copy in memory goes on in the next round.
    next_round: Vec<u32>,
    /// The kernel accepts entries from the creating thread only.
    _not_send: PhantomData<*const ()>,
}

/// What executes the steps.
enum Engine {
    Uring(IoUring),
    Threads(Threads),
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
    /// slower, and logs that. Where io_uring is denied and `engine` allows it, threads take its
    /// place, which is logged too.
    ///
    /// # Errors
    /// The system has no io_uring, or forbids it; the text says what to do.
    pub fn new(region: Arc<Region>, limits: RingLimits, engine: IoEngine) -> io::Result<Ring> {
        let denied = match engine {
            IoEngine::Threads => None,
            IoEngine::Auto | IoEngine::IoUring => {
                match set_up(limits.ops.clamp(1, MAX_OPS), &LADDER) {
                    Ok(io) => return Ring::over(io, region, limits),
                    Err(error) if engine == IoEngine::Auto && is_denied(&error) => Some(error),
                    Err(error) => return Err(error),
                }
            }
        };
        if let Some(error) = denied {
            static ONCE: Once = Once::new();
            ONCE.call_once(|| {
                tracing::warn!("{error}; until then threads execute device I/O, which is slower");
            });
        }
        let memory = Memory::new(region, false)?;
        let mut ring = Ring::with(Engine::Threads(Threads::new()?), memory, 0, limits);
        let [alone, beside_others] = threads::SHARES;
        ring.flights.set_shares(alone, beside_others);
        Ok(ring)
    }

    fn over(io: IoUring, region: Arc<Region>, limits: RingLimits) -> io::Result<Ring> {
        let registered = register_region(&io, &region)?;
        allow_workers(&io);
        let files = register_files(&io, limits.backings);
        Ok(Ring::with(Engine::Uring(io), Memory::new(region, registered)?, files, limits))
    }

    fn with(engine: Engine, memory: Memory, files: u32, limits: RingLimits) -> Ring {
        let flights = Flights::new(limits);
        Ring {
            engine,
            memory,
            files,
            quota: CopyQuota::default(),
            next_round: Vec::with_capacity(flights.slot_count() as usize),
            flights,
            watches: PolledFds::default(),
            images: None,
            stats: RingStats::default(),
            complaints: 0,
            taken: Vec::new(),
            _not_send: PhantomData,
        }
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
                self.set_file(id.0, fd).is_ok()
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
            if let Err(error) = self.set_file(id, -1) {
                tracing::warn!(
                    "cannot unregister the file of backing device {id} from io_uring: {error}"
                );
            }
        }
    }

    /// Sets a file of the kernel's table.
    fn set_file(&self, id: u32, fd: RawFd) -> io::Result<()> {
        match &self.engine {
            Engine::Uring(io) => io.submitter().register_files_update(id, &[fd]).map(drop),
            Engine::Threads(_) => Ok(()),
        }
    }

    /// Polls `fd` for reading: readiness ends a sleep and is reported once by [`Ring::reap`] as
    /// `token`. Call it before each sleep: it submits only if the previous poll has completed.
    pub fn watch(&mut self, fd: RawFd, token: u32) {
        self.watches.watch(fd, token);
    }

    /// Submits what is queued: one system call, or none if the queue is empty.
    pub fn submit(&mut self) {
        self.fill();
        if self.has_entries() {
            self.enter(0, None);
        }
    }

    /// Whether entries are queued for the next system call.
    fn has_entries(&mut self) -> bool {
        match &mut self.engine {
            Engine::Uring(io) => !io.submission().is_empty(),
            Engine::Threads(_) => false,
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
        } else if self.has_entries() {
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
        let Engine::Uring(io) = &mut self.engine else { return self.reap_threads(done, woken) };
        let submission = io.submission();
        let (deferred, overflown) = (submission.taskrun(), submission.cq_overflow());
        drop(submission);
        if deferred || overflown {
            self.enter(0, None);
        }
        let mut batch = [(0u64, 0i32); 32];
        while let Engine::Uring(io) = &mut self.engine {
            let mut count = 0;
            for (place, entry) in batch.iter_mut().zip(io.completion()) {
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

    /// As [`Ring::reap`], for threads.
    fn reap_threads(&mut self, done: &mut Vec<IoCompletion>, woken: &mut Vec<u32>) {
        self.enter(0, None);
        let mut batch = std::mem::take(&mut self.taken);
        if let Engine::Threads(threads) = &mut self.engine {
            threads.take(&mut batch);
        }
        for (user_data, answer) in batch.drain(..) {
            self.on_completion(user_data, answer, done, woken);
        }
        self.taken = batch;
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
    pub fn in_flight(&self) -> usize {
        self.flights.in_flight()
    }

    /// Its counters.
    pub fn stats(&self) -> RingStats {
        RingStats { again: self.flights.repeated, ..self.stats }
    }

    /// Hands over all pending work, as long as there is room.
    fn fill(&mut self) {
        while let Some((index, request)) = self.watches.next_request() {
            if !self.poll(WATCH | index as u64, request) {
                return;
            }
            self.watches.granted(index);
        }
        while let Some((index, slot)) = self.flights.next_recall() {
            if !self.cancel(RECALL | index as u64, slot) {
                return;
            }
            self.flights.recall_asked();
        }
        while let Some(ask) = self.flights.next_ask() {
            if self.copy(ask) {
                continue;
            }
            if !self.start(ask) {
                self.flights.not_submitted(ask);
                break;
            }
        }
        self.quota = CopyQuota::default();
        self.flights.again.extend(self.next_round.drain(..));
    }

    /// Executes a step in memory, or leaves it to the next round. Returns false for another one.
    fn copy(&mut self, ask: Submission) -> bool {
        let Submission::Step(slot, step) = ask else { return false };
        let Some((flight, attachment)) = self.flights.parts(slot) else { return false };
        let backing = &attachment.backing;
        if !backing.is_in_memory() || !is_faultless(backing) {
            return false;
        }
        if !self.quota.allows(step) {
            self.next_round.push(slot);
            return true;
        }
        let answer = copy_step(step, flight.buf(), backing, &self.memory, &mut self.quota);
        let Some(answer) = answer else { return false };
        if self.flights.copied(slot, answer) {
            self.stats.copied += 1;
        } else {
            self.flights.again.push_front(slot);
        }
        true
    }

    /// Polls a descriptor, or cancels that. Returns false if there is no room.
    fn poll(&mut self, user_data: u64, request: PollRequest) -> bool {
        if let Engine::Threads(threads) = &mut self.engine {
            threads.poll(user_data, request);
            return true;
        }
        let entry = match request {
            PollRequest::Arm(fd) => {
                opcode::PollAdd::new(Fd(fd), libc::POLLIN as u32).build().user_data(user_data)
            }
            PollRequest::Cancel => opcode::AsyncCancel::new(user_data).build().user_data(IGNORED),
        };
        // SAFETY: these entries name no memory; a descriptor that has been closed meanwhile only
        // makes the poll fail.
        unsafe { self.push(&entry) }
    }

    /// Cancels the operation in `slot`. Returns false if there is no room.
    fn cancel(&mut self, user_data: u64, slot: u32) -> bool {
        if let Engine::Threads(threads) = &mut self.engine {
            threads.cancel(slot, user_data);
            return true;
        }
        let entry = opcode::AsyncCancel::new(slot.into()).build().user_data(user_data);
        // SAFETY: the entry names no memory.
        unsafe { self.push(&entry) }
    }

    /// Starts the next step of an operation. Returns false if there is no room.
    fn start(&mut self, ask: Submission) -> bool {
        let (slot, step) = match ask {
            Submission::Step(slot, step) => (slot, step),
            Submission::Pause(slot) => return self.pause(ask, slot),
        };
        if self.start_at_image(slot, step) {
            self.flights.submitted(ask);
            return true;
        }
        let Some((call, file)) = self.call(slot, step) else {
            self.flights.fail_invalid(slot);
            return true;
        };
        let is_fixed = match &call.op {
            CallOp::Read { into: place, .. } | CallOp::Write { from: place, .. } => {
                place.chunk.is_some()
            }
            CallOp::Allocate { .. } | CallOp::Sync => true,
        };
        if let Engine::Threads(threads) = &mut self.engine {
            // SAFETY: as below; Drop waits for threads as well.
            threads.start(slot, move || unsafe { execute(&call) });
        } else {
            let entry = entry_for(&call, file).user_data(slot.into());
            // SAFETY: the memory of the entry is the Buf of the operation (checked by `locate`), or
            // the zeros; mapped while `self.memory` lives, and Drop waits for the kernel. The Buf
            // stays in the operation, and the operation in its slot, until this entry completes.
            if !unsafe { self.push(&entry) } {
                return false;
            }
        }
        self.flights.submitted(ask);
        match step {
            Step::Sync => self.stats.syncs += 1,
            Step::Space { .. } => self.stats.spaces += 1,
            _ if is_fixed => self.stats.fixed += 1,
            _ => self.stats.plain += 1,
        }
        true
    }

    fn pause(&mut self, ask: Submission, slot: u32) -> bool {
        let is_taken = match &mut self.engine {
            Engine::Threads(threads) => {
                threads.pause(slot);
                true
            }
            // SAFETY: the memory of the entry is a static.
            Engine::Uring(_) => unsafe { self.push(&pause_entry().user_data(slot.into())) },
        };
        if is_taken {
            self.flights.submitted(ask);
        }
        is_taken
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

    /// The call for a step, and the slot of its file in the kernel's table.
    fn call(&self, slot: u32, step: Step) -> Option<(Call, Option<Fixed>)> {
        let (flight, attachment) = self.flights.parts(slot)?;
        let fds = (attachment.backing.fd()?, attachment.sync_fd);
        let is_transfer = !matches!(step, Step::Space { .. } | Step::Sync);
        let file = (attachment.fixed && is_transfer).then_some(Fixed(attachment.id));
        Some((call_for(step, flight.buf(), fds, &self.memory)?, file))
    }

    /// Queues an entry, after a submission if there is no room.
    ///
    /// # Safety
    /// The memory that the entry names stays mapped, and untouched by others, until it completes.
    unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        for _ in 0..2 {
            let Engine::Uring(io) = &mut self.engine else { return false };
            // SAFETY: guaranteed by the caller.
            if unsafe { io.submission().push(entry) }.is_ok() {
                return true;
            }
            self.enter(0, None);
        }
        false
    }

    /// One system call: submits everything queued and waits for `want` completions.
    fn enter(&mut self, want: usize, patience: Option<Duration>) {
        self.stats.enters += 1;
        let io = match &mut self.engine {
            Engine::Uring(io) => io,
            Engine::Threads(threads) if want == 0 => return threads.wait(Some(Duration::ZERO)),
            Engine::Threads(threads) => return threads.wait(patience),
        };
        let result = match patience {
            None => io.submit_and_wait(want),
            Some(patience) => {
                let until = Timespec::from(patience);
                io.submitter().submit_with_args(want, &SubmitArgs::new().timespec(&until))
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
        let Ring { flights, memory, stats, quota, .. } = self;
        flights.submit(backing, tag, op, |flight, backing| match backing.kind() {
            Kind::Null => {
                let buf = flight.buf().filter(|_| flight.is_read());
                buf.into_iter().for_each(|buf| clear(memory, buf));
                None
            }
            _ => copy_now(flight, backing, memory, quota).inspect(|_| stats.copied += 1),
        });
    }

    fn recall(&mut self, tag: Tag, of: Tag) {
        self.recall_all(&[crate::CancelRequest { of, tag }]);
    }

    fn recall_all(&mut self, requests: &[crate::CancelRequest]) {
        self.flights.cancel_all(requests);
        self.vacate();
    }

    fn searchable(&self, backing: DeviceId) -> Option<Weak<BackingDevice>> {
        self.flights.attached(backing).filter(|store| store.may_have_holes()).map(Arc::downgrade)
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
