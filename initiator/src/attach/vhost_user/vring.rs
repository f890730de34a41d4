//! One queue of the device: its ring in the guest's memory, and the descriptors that signal.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tracing::warn;
use virtio_queue::{DescriptorChain, Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};

/// Entries of a queue at most.
pub(super) const QUEUE_ENTRIES: u16 = 1024;

/// A chain of descriptors, which keeps the memory mapped.
pub(super) type Chain = DescriptorChain<Arc<GuestMemoryMmap>>;

/// A queue.
pub(super) struct Vring {
    pub(super) queue: Queue,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    pub(super) is_enabled: bool,
    /// The guest has been told to signal what it makes available.
    is_armed: bool,
    /// Requests were done since the guest was signalled.
    is_used: bool,
    /// The guest has broken the rules of its ring: it is left alone until it is set up again.
    is_broken: bool,
}

impl Vring {
    pub(super) fn new() -> Option<Vring> {
        let (kick, call) = (None, None);
        Some(Vring {
            queue: Queue::new(QUEUE_ENTRIES).ok()?,
            kick,
            call,
            is_enabled: false,
            is_armed: true,
            is_used: false,
            is_broken: false,
        })
    }

    /// Has it signalled by this from now on: that starts it.
    pub(super) fn start(&mut self, kick: Option<OwnedFd>) {
        self.kick = kick;
        (self.is_armed, self.is_broken) = (true, false);
        self.queue.set_ready(true);
    }

    /// Stops it. Returns its next entry.
    pub(super) fn stop(&mut self) -> u16 {
        self.queue.set_ready(false);
        (self.kick, self.call) = (None, None);
        self.queue.next_avail()
    }

    pub(super) fn set_call(&mut self, call: Option<OwnedFd>) {
        self.call = call;
    }

    /// Its addresses in the guest. The used index is where the guest's driver left it.
    pub(super) fn set_addresses(&mut self, all: [u64; 3], memory: &GuestMemoryMmap) -> Option<()> {
        let [descriptors, available, used] = all.map(GuestAddress);
        self.queue.try_set_desc_table_address(descriptors).ok()?;
        self.queue.try_set_avail_ring_address(available).ok()?;
        self.queue.try_set_used_ring_address(used).ok()?;
        let index = self.queue.used_idx(memory, Ordering::Acquire).ok()?;
        self.queue.set_next_used(index.0);
        Some(())
    }

    /// Whether its entries are to be taken.
    pub(super) fn is_running(&self) -> bool {
        self.is_enabled && self.queue.ready() && !self.is_broken
    }

    /// What the guest signals, while it is running.
    pub(super) fn kick_descriptor(&self) -> Option<BorrowedFd<'_>> {
        self.kick.as_ref().filter(|_| self.is_running()).map(AsFd::as_fd)
    }

    /// Takes the signal.
    pub(super) fn take_kick(&self) {
        if let Some(kick) = &self.kick {
            // It may have been taken already; what it says is looked at in any case.
            let _ = rustix::io::read(kick, &mut [0; 8]);
        }
    }

    /// Takes the next chain.
    pub(super) fn pop(&mut self, memory: &Arc<GuestMemoryMmap>) -> Option<Chain> {
        if self.is_armed {
            self.is_armed = false;
            self.check(|queue| queue.disable_notification(&**memory))?;
        }
        self.check(|queue| queue.iter(Arc::clone(memory)).map(|mut chains| chains.next()))?
    }

    /// Returns the last chain, which is taken again later.
    pub(super) fn push_back(&mut self) {
        self.queue.go_to_previous_position();
    }

    /// Has the guest signal what it makes available. Returns whether something is.
    pub(super) fn arm(&mut self, memory: &GuestMemoryMmap) -> bool {
        self.is_armed = true;
        self.check(|queue| queue.enable_notification(memory)).unwrap_or(false)
    }

    /// A chain is done.
    pub(super) fn add_used(&mut self, memory: &GuestMemoryMmap, head: u16, written: u32) {
        self.is_used = true;
        let _ = self.check(|queue| queue.add_used(memory, head, written));
    }

    /// Signals the guest if chains are done and it wants to know.
    pub(super) fn signal(&mut self, memory: &GuestMemoryMmap) {
        if std::mem::take(&mut self.is_used)
            && self.check(|queue| queue.needs_notification(memory)) == Some(true)
            && let Some(call) = &self.call
        {
            // A counter that is full signals as well.
            let _ = rustix::io::write(call, &1u64.to_ne_bytes());
        }
    }

    fn check<T>(
        &mut self,
        act: impl FnOnce(&mut Queue) -> Result<T, virtio_queue::Error>,
    ) -> Option<T> {
        match act(&mut self.queue) {
            Ok(value) => Some(value),
            Err(error) => {
                if !std::mem::replace(&mut self.is_broken, true) {
                    warn!("a queue of the guest is not served any more: {error}");
                }
                None
            }
        }
    }
}

/// Copies from the readable part of a chain, behind `skip` bytes; `None` if it is shorter, or
/// outside of the guest's memory.
pub(super) fn copy_from(chain: &Chain, mut skip: usize, mut into: &mut [u8]) -> Option<()> {
    for descriptor in chain.clone().readable() {
        let len = descriptor.len() as usize;
        if skip >= len {
            skip -= len;
            continue;
        }
        let count = into.len().min(len - skip);
        let (now, later) = into.split_at_mut(count);
        let address = descriptor.addr().0.checked_add(skip as u64)?;
        chain.memory().read_slice(now, GuestAddress(address)).ok()?;
        (into, skip) = (later, 0);
        if into.is_empty() {
            return Some(());
        }
    }
    into.is_empty().then_some(())
}

/// Copies to the writable part of a chain, behind `skip` bytes; `None` likewise.
pub(super) fn copy_to(chain: &Chain, mut skip: usize, mut from: &[u8]) -> Option<()> {
    for descriptor in chain.clone().writable() {
        let len = descriptor.len() as usize;
        if skip >= len {
            skip -= len;
            continue;
        }
        let (now, later) = from.split_at(from.len().min(len - skip));
        let address = descriptor.addr().0.checked_add(skip as u64)?;
        chain.memory().write_slice(now, GuestAddress(address)).ok()?;
        (from, skip) = (later, 0);
        if from.is_empty() {
            return Some(());
        }
    }
    from.is_empty().then_some(())
}

/// Returns the bytes of a chain that are readable, and those that are writable.
pub(super) fn lengths(chain: &Chain) -> (usize, usize) {
    chain.clone().fold((0, 0), |(readable, writable), descriptor| {
        let len = descriptor.len() as usize;
        match descriptor.is_write_only() {
            true => (readable, writable + len),
            false => (readable + len, writable),
        }
    })
}
