//! An io_uring for commands of the ublk driver, and the mapped descriptors of requests.
//!
//! # Invariants of the unsafe code
//!
//! * *What the kernel reads or writes stays where it is.* The data of a control command are in
//!   `ControlData`, on the heap, and [`CommandRing::execute`] returns only when the command has
//!   completed; if that cannot be found out, they are leaked. All other commands name no memory.
//! * *Descriptors of files stay open* as long as a command names them: the ring has the control
//!   device, and [`Queues`], which has the other one, is not dropped before the ring of its
//!   commands, except when all of them have completed.
//! * *Descriptors of requests are in the mapping.* Only [`Queues::descriptor`] reads it, after a
//!   check of the bounds. The kernel writes one before the completion that announces it, and not
//!   again before its result is committed. The mapping is read-only, and unmapped once.
#![expect(unsafe_code, reason = "commands name memory and files by number; a mapping is read")]

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr;
use std::time::Duration;

use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode, squeue};
use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::ublk::{Control, DESCRIPTOR_BYTES, QUEUE_ENTRIES_MAX, RequestId};

/// Bytes of data of a control command at most.
const DATA_BYTES: usize = 128;
/// Completion of the command that is waited for.
const EXECUTED: u64 = u64::MAX;

/// Data of a control command.
type ControlData = Box<[u8; DATA_BYTES]>;

/// The ring.
pub(super) struct CommandRing {
    ring: IoUring<squeue::Entry128, cqueue::Entry>,
    /// Signalled when there is something to do. With `DEFER_TASKRUN` the descriptor of the ring is not
    /// (seen with Linux 6.12): a request waits until this thread asks for completions.
    event: EventFd,
    control: File,
    data: ControlData,
    /// Completions that came while another was waited for: user data and result.
    done: VecDeque<(u64, i32)>,
}

impl CommandRing {
    /// A ring with room for so many commands, for this thread, and the control device.
    ///
    /// # Errors
    /// There is no such ring.
    pub(super) fn new(control: File, entries: u32) -> io::Result<CommandRing> {
        let mut builder = IoUring::<squeue::Entry128, cqueue::Entry>::builder();
        // Completions are made when this thread asks for them, and not by an interrupt.
        builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
        let ring = builder.build(entries)?;
        let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
        let event = EventFd::from_flags(flags).map_err(io::Error::from)?;
        ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        let data = Box::new([0; DATA_BYTES]);
        Ok(CommandRing { ring, event, control, data, done: VecDeque::new() })
    }

    /// Executes a control command and waits for it. `data` are its input and its output.
    ///
    /// # Errors
    /// That of the kernel.
    pub(super) fn execute(
        &mut self,
        number: u32,
        command: Control,
        data: &mut [u8],
    ) -> io::Result<()> {
        let len = data.len().min(DATA_BYTES);
        self.data[..len].copy_from_slice(&data[..len]);
        let address = if len == 0 { 0 } else { self.data.as_mut_ptr() as u64 };
        self.push_control(number, &command.emit(address, len as u16), EXECUTED);
        let executed = self.wait(None);
        if executed.as_ref().is_err_and(|error| error.raw_os_error().is_none()) {
            // The command may be under way.
            Box::leak(std::mem::replace(&mut self.data, Box::new([0; DATA_BYTES])));
        }
        executed?;
        data[..len].copy_from_slice(&self.data[..len]);
        Ok(())
    }

    /// Executes a control command without data, for so long.
    ///
    /// # Errors
    /// That of the kernel, or `TimedOut`: then it may end later.
    pub(super) fn execute_for(
        &mut self,
        number: u32,
        command: Control,
        limit: Duration,
    ) -> io::Result<()> {
        self.push_control(number, &command.emit(0, 0), EXECUTED);
        self.wait(Some(limit))
    }

    /// Begins a control command without data: its completion has this user data.
    pub(super) fn begin(&mut self, number: u32, command: Control, user_data: u64) {
        self.push_control(number, &command.emit(0, 0), user_data);
    }

    fn push_control(&mut self, number: u32, bytes: &[u8], user_data: u64) {
        let mut all = [0; 80];
        all[..bytes.len()].copy_from_slice(bytes);
        let fd = Fd(self.control.as_raw_fd());
        self.push(&opcode::UringCmd80::new(fd, number).cmd(all).build().user_data(user_data));
    }

    /// Adds a command for a request, which [`CommandRing::submit`] submits.
    pub(super) fn push_io(&mut self, queues: &Queues, number: u32, id: RequestId, result: i32) {
        let mut all = [0; 80];
        let bytes = id.emit(result);
        all[..bytes.len()].copy_from_slice(&bytes);
        let fd = Fd(queues.device.as_raw_fd());
        self.push(&opcode::UringCmd80::new(fd, number).cmd(all).build().user_data(id.number()));
    }

    fn push(&mut self, entry: &squeue::Entry128) {
        loop {
            // SAFETY: what an entry names is there until it has completed: see the invariants.
            if unsafe { self.ring.submission().push(entry) }.is_ok() {
                return;
            }
            self.submit();
        }
    }

    /// Submits what was added, and has the kernel make completions if there are any to make.
    pub(super) fn submit(&mut self) {
        let (to_submit, to_run) = {
            let queue = self.ring.submission();
            (!queue.is_empty(), queue.taskrun() || queue.cq_overflow())
        };
        if to_submit || to_run {
            // Interrupted or without memory: the caller comes back.
            let _ = self.ring.submit();
        }
    }

    /// Returns the next completion: user data and result.
    pub(super) fn next_done(&mut self) -> Option<(u64, i32)> {
        if let Some(done) = self.done.pop_front() {
            return Some(done);
        }
        let entry = self.ring.completion().next()?;
        Some((entry.user_data(), entry.result()))
    }

    /// Whether there is something to do.
    pub(super) fn is_ready(&mut self) -> bool {
        let ready = !self.done.is_empty() || !self.ring.completion().is_empty();
        ready || self.ring.submission().taskrun()
    }

    /// Returns the descriptor that is readable when there is something to do.
    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// Takes the signal, before it is looked what there is to do.
    pub(super) fn take_event(&self) {
        // There may be none; what it says is looked at in any case.
        let _ = self.event.read();
    }

    fn wait(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let limit = limit.map(Timespec::from);
        loop {
            let waited = match &limit {
                Some(limit) => {
                    let arguments = SubmitArgs::new().timespec(limit);
                    self.ring.submitter().submit_with_args(1, &arguments)
                }
                None => self.ring.submit_and_wait(1),
            };
            for entry in self.ring.completion() {
                if entry.user_data() != EXECUTED {
                    self.done.push_back((entry.user_data(), entry.result()));
                } else if entry.result() < 0 {
                    return Err(io::Error::from_raw_os_error(-entry.result()));
                } else {
                    return Ok(());
                }
            }
            match waited {
                Ok(_) => {}
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) if error.raw_os_error() == Some(libc::ETIME) => {
                    return Err(io::ErrorKind::TimedOut.into());
                }
                Err(error) => return Err(io::Error::other(error)),
            }
        }
    }
}

/// The descriptors of one queue.
struct Mapping {
    base: ptr::NonNull<u8>,
    bytes: usize,
}

impl Mapping {
    fn new(device: &File, queue: u16, entries: u16) -> io::Result<Mapping> {
        let page = rustix::param::page_size();
        let bytes = (usize::from(entries) * DESCRIPTOR_BYTES).next_multiple_of(page);
        let distance = (QUEUE_ENTRIES_MAX * DESCRIPTOR_BYTES).next_multiple_of(page);
        let offset = (usize::from(queue) * distance) as libc::off_t;
        let (protection, fd) = (libc::PROT_READ, device.as_raw_fd());
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping, at an address that the kernel chooses; nothing refers to it yet.
        let base = unsafe { libc::mmap(ptr::null_mut(), bytes, protection, flags, fd, offset) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = ptr::NonNull::new(base.cast()).ok_or(io::ErrorKind::AddrNotAvailable)?;
        Ok(Mapping { base, bytes })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this one's, as a whole, and nothing refers to it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
    }
}

/// The device of requests, and their descriptors.
pub(super) struct Queues {
    pub(super) device: File,
    mappings: Vec<Mapping>,
}

impl Queues {
    /// Maps the descriptors of so many queues with so many entries.
    ///
    /// # Errors
    /// That of the kernel.
    pub(super) fn new(device: File, queues: u16, entries: u16) -> io::Result<Queues> {
        let map = |queue| Mapping::new(&device, queue, entries);
        let mappings = (0..queues).map(map).collect::<io::Result<_>>()?;
        Ok(Queues { device, mappings })
    }

    /// Returns a descriptor; `None`: there is none with this id.
    pub(super) fn descriptor(&self, id: RequestId) -> Option<[u8; DESCRIPTOR_BYTES]> {
        let mapping = self.mappings.get(usize::from(id.queue))?;
        let at = usize::from(id.tag) * DESCRIPTOR_BYTES;
        if at + DESCRIPTOR_BYTES > mapping.bytes {
            return None;
        }
        let mut bytes = [0; DESCRIPTOR_BYTES];
        // SAFETY: the range is in the mapping, and what is copied to does not overlap it.
        unsafe {
            ptr::copy_nonoverlapping(
                mapping.base.as_ptr().add(at),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

    use super::*;

    /// What a request of ublk does, too: another thread adds work for the thread of the ring, which
    /// sleeps in poll.
    #[test]
    fn ring_descriptor_becomes_ready_when_another_thread_adds_work() {
        let control = File::open("/dev/null").expect("there");
        let mut ring = CommandRing::new(control, 4).expect("a ring");
        // Unlike poll, epoll does not look again when its time is over.
        let poll = Epoll::new(EpollCreateFlags::empty()).expect("possible");
        let wanted = EpollEvent::new(EpollFlags::EPOLLIN, 0);
        poll.add(ring.descriptor(), wanted).expect("possible");
        // No eventfd: Linux delays a signal that one eventfd causes at another.
        let (mut reader, mut writer) = io::pipe().expect("a pipe");
        for user_data in 1..=3 {
            let fd = Fd(reader.as_raw_fd());
            let entry = opcode::PollAdd::new(fd, libc::POLLIN as u32).build();
            ring.push(&squeue::Entry128::from(entry.user_data(user_data)));
            ring.submit();
            assert!(!ring.is_ready());
            let thread = std::thread::spawn(move || {
                // The other thread waits by then, as a rule.
                std::thread::sleep(Duration::from_millis(20));
                writer.write_all(&[1]).expect("written");
                writer
            });
            // The completion of the last one may have been signalled, too.
            let done = loop {
                let mut events = [EpollEvent::empty()];
                assert_eq!(poll.wait(&mut events, 10_000u16), Ok(1), "{user_data}");
                ring.take_event();
                ring.submit();
                if let Some(done) = ring.next_done() {
                    break done;
                }
            };
            assert_eq!(done, (user_data, i32::from(libc::POLLIN)));
            writer = thread.join().expect("no panic");
            reader.read_exact(&mut [0]).expect("read");
        }
    }
}
