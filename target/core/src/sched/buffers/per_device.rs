//! Buffers of a reactor held by commands for one backing store, over all hosts and also for closed
//! connections. A disk that hangs keeps that, and hosts that give up come again.
//!
//! In-capsule data go to the disk in the receive in which they came. Of a host that gives up, a disk
//! that hangs keeps these, so each store gets a part of those that there are, all stores a larger
//! one, and no more: nobody else could connect. What comes in others is copied into data buffers.

use nvmfd_blockdev::DeviceId;

/// A share may hold a buffer for a store that others have filled, as long as this many of the
/// largest size are free: so hosts get something done at a store that has lost some operations.
const FREE_FOR_FIRST: u64 = 3;

/// Where others hold little for a store, this many times that stays free as well.
const FREE_FOR_LITTLE: u64 = 4;

/// Of so many receives of a reactor a store may have one.
const RECEIVES_FOR_ONE: u32 = 4;

/// Of so many receives of a reactor all stores together may have one.
const RECEIVES_FOR_ALL: u32 = 2;

/// Bits of a word.
const BITS: u32 = u64::BITS;

/// A backing store, as those know it who wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DeviceSlot(u16);

impl DeviceSlot {
    /// The one of this number.
    #[must_use]
    pub fn of(backing: DeviceId) -> DeviceSlot {
        DeviceSlot((backing.0 % DeviceId::COUNT) as u16)
    }

    pub(super) fn index(self) -> usize {
        self.0.into()
    }
}

/// All stores of a reactor.
#[derive(Debug)]
pub(super) struct DeviceShares {
    /// Bytes of data buffers that commands hold, by store.
    held_bytes: Box<[u64]>,
    /// Receives that are at disks or on their way there, by store.
    receives: Box<[u32]>,
    /// The same, of all.
    all_receives: u32,
    /// Stores for which somebody waits until less is held: a bit each.
    closed: [u64; (DeviceId::COUNT / BITS) as usize],
}

impl Default for DeviceShares {
    fn default() -> DeviceShares {
        let (held_bytes, receives) =
            (vec![0; DeviceId::COUNT as usize], vec![0; DeviceId::COUNT as usize]);
        DeviceShares {
            held_bytes: held_bytes.into_boxed_slice(),
            receives: receives.into_boxed_slice(),
            all_receives: 0,
            closed: [0; (DeviceId::COUNT / BITS) as usize],
        }
    }
}

impl DeviceShares {
    pub(super) fn charge(&mut self, store: DeviceSlot, bytes: u32) {
        self.held_bytes[store.index()] += u64::from(bytes);
    }

    pub(super) fn discharge(&mut self, store: DeviceSlot, bytes: u32) {
        let held = &mut self.held_bytes[store.index()];
        *held = held.saturating_sub(bytes.into());
    }

    /// Lets a receive go to the disk, of so many that there are, or not.
    #[inline]
    pub(super) fn keep_receive(&mut self, store: DeviceSlot, receives: u32) -> bool {
        let kept = &mut self.receives[store.index()];
        let is_let =
            *kept < receives / RECEIVES_FOR_ONE && self.all_receives < receives / RECEIVES_FOR_ALL;
        *kept += u32::from(is_let);
        self.all_receives += u32::from(is_let);
        is_let
    }

    /// It is home, or has not gone.
    pub(super) fn return_receive(&mut self, store: DeviceSlot) {
        let kept = &mut self.receives[store.index()];
        *kept = kept.saturating_sub(1);
        self.all_receives = self.all_receives.saturating_sub(1);
    }

    /// Whether so little is held for a store that it may have more, whoever holds it.
    #[inline]
    pub(super) fn holds_little(&self, store: DeviceSlot, free_bytes: u64) -> bool {
        let held = self.held_bytes[store.index()];
        held.saturating_mul(1 + FREE_FOR_LITTLE) <= free_bytes
    }

    /// Whether a share, whose commands hold `own_bytes` for a store, may take more for it.
    ///
    /// What others hold for it may be as much as is free, and a buffer of the largest size less; of
    /// little, four times that is kept free at most, so that a store whose hosts hold a few small
    /// buffers is not closed where no large one is free.
    /// What the connected share holds that holds most is left out: it has a limit of its own, and
    /// may be that of a host that has gone quiet while the store does well. How much the command
    /// wants does not matter, so that small ones do not keep a large one waiting for ever.
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

    /// Whether who comes for a store waits behind others. That may be said of one for which nobody
    /// waits any more, until somebody does.
    pub(super) fn is_closed(&self, store: DeviceSlot) -> bool {
        self.closed[store.index() / BITS as usize] & bit(store) != 0
    }

    /// A command that waits for a store may go on, or not.
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
