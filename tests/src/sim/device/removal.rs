//! Removal and return of a device: what is not durable is lost, operations fail until it is opened
//! again, and each ring gets the new store at another time.

use std::sync::Arc;
use std::time::Duration;

use nix::libc;
use nvmfd::blockdev::DeviceId;
use nvmfd::blockdev::request::Step;

use super::{Event, SimDevice};

/// Maximum time until a ring has the new store.
const REPLACEMENT: Duration = Duration::from_millis(2);

impl SimDevice {
    /// Removes the device of a store. Of the operations that it has, those end well that it has
    /// completed and that promise nothing durable. Returns false if it is removed already, or a
    /// ring still has the store before.
    pub fn unplug(&mut self, store: usize) -> bool {
        let media = &mut self.stores[store];
        if media.removed || media.replaced.is_some() {
            return false;
        }
        for call in self.calls.values_mut().filter(|call| call.store == store) {
            let promises =
                matches!(call.step, Some(Step::Sync | Step::Write { durable: true, .. }) | None);
            let is_complete = call.answer > 0 && call.early == call.effective && !promises;
            if !(is_complete && self.dice.per_mille(500)) {
                (call.answer, call.effective) = (-libc::ENODEV, call.early);
            }
        }
        media.removed = true;
        media.lose_cache(self.atom_bytes, &mut self.dice);
        true
    }

    /// The device monitor has noticed that the device of a store is removed.
    pub fn take_down(&self, store: usize) {
        if self.stores[store].removed {
            self.stores[store].backing.set_down("is gone");
        }
    }

    /// The device of a store is there again, and the device monitor opens it.
    ///
    /// # Panics
    /// The store has no valid shape.
    pub fn plug(&mut self, store: usize) {
        self.take_down(store);
        let media = &mut self.stores[store];
        if !std::mem::take(&mut media.removed) {
            return;
        }
        let fresh = Arc::new(media.backing.simulated_again().expect("it was opened before"));
        let gone = std::mem::replace(&mut media.backing, fresh);
        gone.begin_replacement();
        media.replaced = Some((gone, self.rings.len()));
        for ring in 0..self.rings.len() {
            let wait = self.dice.part(REPLACEMENT);
            self.after(wait, Event::Replace(store, ring));
        }
    }

    /// All removed devices are there again.
    pub fn plug_all(&mut self) {
        (0..self.stores.len()).for_each(|store| self.plug(store));
    }

    /// A ring gets the store that replaces a removed one.
    pub(super) fn replace(&mut self, store: usize, ring: usize) {
        let media = &mut self.stores[store];
        let is_its = |(_, of): &(&DeviceId, &usize)| **of == store;
        for (id, _) in self.numbers.iter().filter(is_its) {
            if self.rings[ring].is_attached(*id) {
                self.rings[ring].detach(*id);
                self.rings[ring].attach(*id, Arc::clone(&media.backing), false);
            }
        }
        let Some((gone, left)) = &mut media.replaced else { return };
        *left -= 1;
        if *left == 0 {
            gone.end_replacement();
            if self.forgives_removal {
                media.backing.health().trust();
            }
            media.replaced = None;
        }
    }
}
