//! One queue of the device: its ring in the guest's memory, and the descriptors that signal.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::Ordering;

use tracing::warn;
use virtio_queue::desc::split::Descriptor;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryMmap, VolatileSlice};

/// Entries of a queue at most.
pub(super) const QUEUE_ENTRIES: u16 = 1024;
/// Bytes of a descriptor.
const DESCRIPTOR_BYTES: u32 = 16;

/// A part of the guest's memory.
#[derive(Clone, Copy, Debug)]
struct Segment {
    address: GuestAddress,
    bytes: usize,
    is_writable: bool,
}

/// A chain of descriptors, read once: what the guest writes to its table afterwards changes nothing.
#[derive(Debug, Default)]
pub(super) struct Chain {
    head: u16,
    segments: Vec<Segment>,
    readable_bytes: usize,
    writable_bytes: usize,
}

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

    /// Takes the heads of all chains that are available, in order.
    pub(super) fn take_heads(&mut self, memory: &GuestMemoryMmap, heads: &mut Vec<u16>) {
        heads.clear();
        if self.is_armed {
            self.is_armed = false;
            if self.check(|queue| queue.disable_notification(memory)).is_none() {
                return;
            }
        }
        let _ = self.check(|queue| {
            heads.extend(queue.iter(memory)?.map(|chain| chain.head_index()));
            Ok(())
        });
    }

    /// Returns the last of them, so many, which are taken again later.
    pub(super) fn push_back(&mut self, heads: usize) {
        (0..heads).for_each(|_| self.queue.go_to_previous_position());
    }

    /// Reads the chain of a head.
    pub(super) fn read(&self, memory: &GuestMemoryMmap, head: u16, chain: &mut Chain) {
        chain.clear(head);
        let mut table = Table::new(memory, self.queue.desc_table(), self.queue.size());
        // A chain may lead back to its beginning.
        let (mut next, mut left, mut is_indirect) = (head, table.entries, false);
        while left > 0
            && let Some(descriptor) = table.get(memory, next)
        {
            let (address, len) = (descriptor.addr(), descriptor.len());
            if descriptor.refers_to_indirect_table() {
                let entries = u16::try_from(len / DESCRIPTOR_BYTES).unwrap_or(0);
                if is_indirect || !len.is_multiple_of(DESCRIPTOR_BYTES) {
                    return;
                }
                table = Table::new(memory, address.0, entries);
                (next, left, is_indirect) = (0, entries, true);
                continue;
            }
            if !chain.push(address, len, descriptor.is_write_only()) || !descriptor.has_next() {
                return;
            }
            next = descriptor.next();
            left -= 1;
        }
    }

    /// Has the guest signal what it makes available. Returns whether something is.
    pub(super) fn arm(&mut self, memory: &GuestMemoryMmap) -> bool {
        self.is_armed = true;
        self.check(|queue| queue.enable_notification(memory)).unwrap_or(false)
    }

    /// A chain is done.
    pub(super) fn add_used(&mut self, memory: &GuestMemoryMmap, chain: &Chain, written: u32) {
        self.is_used = true;
        let _ = self.check(|queue| queue.add_used(memory, chain.head, written));
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

/// A table of descriptors.
struct Table<'a> {
    address: u64,
    entries: u16,
    /// All of it, if one region has it.
    slice: Option<VolatileSlice<'a>>,
}

impl<'a> Table<'a> {
    fn new(memory: &'a GuestMemoryMmap, address: u64, entries: u16) -> Table<'a> {
        let bytes = usize::from(entries) * DESCRIPTOR_BYTES as usize;
        let slice = memory.get_slice(GuestAddress(address), bytes).ok();
        Table { address, entries, slice }
    }

    fn get(&self, memory: &GuestMemoryMmap, n: u16) -> Option<Descriptor> {
        let at = u64::from(n) * u64::from(DESCRIPTOR_BYTES);
        if n >= self.entries {
            return None;
        }
        match &self.slice {
            Some(slice) => slice.read_obj(at as usize).ok(),
            None => memory.read_obj(GuestAddress(self.address.checked_add(at)?)).ok(),
        }
    }
}

impl Chain {
    fn clear(&mut self, head: u16) {
        self.head = head;
        self.segments.clear();
        (self.readable_bytes, self.writable_bytes) = (0, 0);
    }

    /// Adds a descriptor. With more than a queue may have, or than 4 GiB in total, nothing of the
    /// chain is used: returns false.
    fn push(&mut self, address: GuestAddress, len: u32, is_writable: bool) -> bool {
        let bytes = len as usize;
        let total = self.readable_bytes + self.writable_bytes + bytes;
        let is_possible = self.segments.len() < QUEUE_ENTRIES.into() && total <= u32::MAX as usize;
        if !is_possible {
            (self.readable_bytes, self.writable_bytes) = (0, 0);
            return false;
        }
        self.segments.push(Segment { address, bytes, is_writable });
        match is_writable {
            true => self.writable_bytes += bytes,
            false => self.readable_bytes += bytes,
        }
        true
    }

    /// Returns the bytes that the device may read, and those that it may write.
    pub(super) fn lengths(&self) -> (usize, usize) {
        (self.readable_bytes, self.writable_bytes)
    }

    /// Copies from the readable part, behind `skip` bytes; `None` if it is shorter, or outside of
    /// the guest's memory.
    pub(super) fn copy_from(
        &self,
        memory: &GuestMemoryMmap,
        skip: usize,
        into: &mut [u8],
    ) -> Option<()> {
        let mut at = 0;
        for (address, bytes) in self.parts(false, skip, into.len()) {
            let now = into.get_mut(at..at + bytes)?;
            match memory.get_slice(address, bytes) {
                Ok(slice) => drop(slice.copy_to(now)),
                // It continues in another region, or is outside.
                Err(_) => memory.read_slice(now, address).ok()?,
            }
            at += bytes;
        }
        (at == into.len()).then_some(())
    }

    /// Copies to the writable part, behind `skip` bytes; `None` likewise.
    pub(super) fn copy_to(&self, memory: &GuestMemoryMmap, skip: usize, from: &[u8]) -> Option<()> {
        let mut at = 0;
        for (address, bytes) in self.parts(true, skip, from.len()) {
            let now = from.get(at..at + bytes)?;
            match memory.get_slice(address, bytes) {
                Ok(slice) => slice.copy_from(now),
                Err(_) => memory.write_slice(now, address).ok()?,
            }
            at += bytes;
        }
        (at == from.len()).then_some(())
    }

    /// Returns where `left` bytes of a part are, behind `skip` bytes: address and length.
    fn parts(
        &self,
        is_writable: bool,
        mut skip: usize,
        mut left: usize,
    ) -> impl Iterator<Item = (GuestAddress, usize)> {
        let all = self.segments.iter().filter(move |it| it.is_writable == is_writable);
        all.map_while(move |segment| {
            if left == 0 {
                return None;
            }
            let skipped = skip.min(segment.bytes);
            skip -= skipped;
            let bytes = left.min(segment.bytes - skipped);
            left -= bytes;
            let address = segment.address.0.checked_add(skipped as u64)?;
            Some((GuestAddress(address), bytes))
        })
        .filter(|(_, bytes)| *bytes > 0)
    }
}
