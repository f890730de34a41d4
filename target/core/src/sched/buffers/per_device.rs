//! Buffers of a reactor held by commands for one backing store, over all hosts and also for closed
//! connections. A device that hangs keeps them, and hosts that give up reconnect.
//!
//! In-capsule data are submitted in the receive in which they arrived. A device that hangs keeps these after
//! the host has given up, so each device gets at most a part of all receives, and all devices a larger part:
//! otherwise no other host could connect. Data in further receives are copied into data buffers.

use nvmfd_blockdev::DeviceId;

/// Number of free buffers of the largest size up to which a share may hold a buffer for a device
/// whose limit others exhaust: so hosts make progress at a device that has lost some operations.
const FREE_FOR_FIRST: u64 = 3;

/// If others hold little for a device, this many times that stays free as well.
const FREE_FOR_LITTLE: u64 = 4;

/// A device may have one in this many receives of a reactor.
const RECEIVES_FOR_ONE: u32 = 4;

/// All devices together may have one in this many receives of a reactor.
const RECEIVES_FOR_ALL: u32 = 2;

/// Backing stores of a reactor, at most.
const DEVICES: usize = DeviceId::COUNT as usize;

/// Bits of a word.
const BITS: u32 = u64::BITS;

/// Index of a backing store in the scheduler.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSlot(u16);

impl DeviceSlot {
    /// Returns the index of a backing store.
    #[inline]
    pub fn of(backing: DeviceId) -> DeviceSlot {
        DeviceSlot((backing.0 % DeviceId::COUNT) as u16)
    }

    #[inline]
    pub(super) fn index(self) -> usize {
        // It is less already: so it is known to be within every table.
        usize::from(self.0) % DEVICES
    }
}

/// All devices of a reactor.
#[derive(Debug)]
pub(super) struct DeviceShares {
    /// Bytes of data buffers that commands hold, by device.
    held_bytes: Box<[u64; DEVICES]>,
    /// Receives that are at devices or will be submitted, by device.
    receives: Box<[u32; DEVICES]>,
    /// The same, of all devices.
    all_receives: u32,
    /// Devices for which commands wait until less is held: a bit each.
    closed: [u64; (DeviceId::COUNT / BITS) as usize],
}

impl Default for DeviceShares {
    fn default() -> DeviceShares {
        DeviceShares {
            held_bytes: Box::new([0; DEVICES]),
            receives: Box::new([0; DEVICES]),
            all_receives: 0,
            closed: [0; (DeviceId::COUNT / BITS) as usize],
        }
    }
}

impl DeviceShares {
    #[inline]
    pub(super) fn charge(&mut self, store: DeviceSlot, bytes: u32) {
        self.held_bytes[store.index()] += u64::from(bytes);
    }

    #[inline]
    pub(super) fn discharge(&mut self, store: DeviceSlot, bytes: u32) {
        let held = &mut self.held_bytes[store.index()];
        *held = held.saturating_sub(bytes.into());
    }

    /// Passes a receive to a device, if the limit for `receives` permits it.
    #[inline]
    pub(super) fn keep_receive(&mut self, store: DeviceSlot, receives: u32) -> bool {
        let kept = &mut self.receives[store.index()];
        let is_let =
            *kept < receives / RECEIVES_FOR_ONE && self.all_receives < receives / RECEIVES_FOR_ALL;
        *kept += u32::from(is_let);
        self.all_receives += u32::from(is_let);
        is_let
    }

    /// Stops counting a receive that was returned, or not submitted.
    pub(super) fn return_receive(&mut self, store: DeviceSlot) {
        let kept = &mut self.receives[store.index()];
        *kept = kept.saturating_sub(1);
        self.all_receives = self.all_receives.saturating_sub(1);
    }

    /// Whether so little is held for a device that any share may hold more.
    #[inline]
    pub(super) fn holds_little(&self, store: DeviceSlot, free_bytes: u64) -> bool {
        let held = self.held_bytes[store.index()];
        held.saturating_mul(1 + FREE_FOR_LITTLE) <= free_bytes
    }

    /// Whether a share, whose commands hold `own_bytes` for a device, may hold more for it.
    ///
    /// Others may hold as much for it as is free, less a buffer of the largest size; if they hold
    /// little, at most four times that is kept free, so that a device whose hosts hold a few small
    /// buffers is not closed when no large one is free. The connected share that holds the most is
    /// not counted: it has a limit of its own, and may be that of an idle host while the device
    /// works. The size of the command does not matter, so that small ones do not keep a large one
    /// waiting for ever.
    pub(super) fn allows(
        &self,
        store: DeviceSlot,
        own_bytes: u64,
        (free_bytes, largest_bytes): (u64, u64),
        most_bytes: impl FnOnce() -> u64,
    ) -> bool {
        let held = self.held_bytes[store.index()];
        let fits = |others: u64| {
            let kept_free = others.saturating_mul(FREE_FOR_LITTLE).min(largest_bytes);
            others.saturating_add(kept_free) <= free_bytes || others == 0
        };
        fits(held.saturating_sub(own_bytes))
            || own_bytes == 0 && FREE_FOR_FIRST.saturating_mul(largest_bytes) <= free_bytes
            || fits(held.saturating_sub(most_bytes()))
    }

    /// Whether a new command for a device waits behind others. May stay true while none waits,
    /// until one does.
    pub(super) fn is_closed(&self, store: DeviceSlot) -> bool {
        self.closed[store.index() / BITS as usize] & bit(store) != 0
    }

    /// Records whether a command that waits for a device may proceed.
    pub(super) fn note(&mut self, store: DeviceSlot, is_open: bool) {
        let word = &mut self.closed[store.index() / BITS as usize];
        match is_open {
            true => *word &= !bit(store),
            false => *word |= bit(store),
        }
    }
}

fn bit(store: DeviceSlot) -> u64 {
    1 << (u32::from(store.0) % BITS)
}
