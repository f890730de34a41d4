//! Posted work requests until their completion.

use super::ffi::Mr;
use crate::{Qp, Tag, Work};

const NIL: u32 = u32::MAX;

/// One posted work request.
pub(super) struct Flight {
    pub(super) qp: Qp,
    pub(super) tag: Tag,
    pub(super) work: Work,
    /// The registration for this work request alone (the sink of an iWARP Read).
    pub(super) sink: Option<Box<Mr>>,
}

struct Slot {
    generation: u32,
    next: u32,
    flight: Option<Flight>,
}

/// A slab of posted work requests. An id is the slot's index and its generation, so that a stale
/// completion finds nothing.
#[derive(Default)]
pub(super) struct FlightTable {
    slots: Vec<Slot>,
    free: Fifo,
    used: usize,
    reads: usize,
}

/// A list of slots in order of posting, threaded through the slots themselves.
#[derive(Clone, Copy)]
pub(super) struct Fifo {
    head: u32,
    tail: u32,
}

impl Default for Fifo {
    fn default() -> Fifo {
        Fifo { head: NIL, tail: NIL }
    }
}

impl FlightTable {
    /// Allocates, so that `promised` work requests need no allocation.
    pub(super) fn reserve(&mut self, promised: usize) {
        self.slots.reserve_exact(promised.saturating_sub(self.slots.len()));
        while self.slots.len() < promised {
            self.add();
        }
    }

    /// Adds a work request at the end of `list`.
    pub(super) fn insert(&mut self, list: &mut Fifo, flight: Flight) {
        if self.free.head == NIL {
            self.add();
        }
        let mut free = self.free;
        if let Some(index) = self.shift(&mut free) {
            self.reads += usize::from(matches!(flight.work, Work::Read { .. }));
            self.slots[index as usize].flight = Some(flight);
            self.used += 1;
            self.append(list, index);
        }
        self.free = free;
    }

    /// Removes the first one of a list (not from the table): its id and the work request.
    pub(super) fn next(&mut self, list: &mut Fifo) -> Option<(u64, &mut Flight)> {
        let index = self.shift(list)?;
        let slot = &mut self.slots[index as usize];
        let id = u64::from(slot.generation) << 32 | u64::from(index);
        slot.flight.as_mut().map(|flight| (id, flight))
    }

    /// Adds one that is in no list, by its id, at the end of `list`.
    pub(super) fn enqueue(&mut self, list: &mut Fifo, id: u64) {
        self.append(list, id as u32);
    }

    /// A work request, if the id is not stale.
    pub(super) fn get(&self, id: u64) -> Option<&Flight> {
        let slot = self.slots.get(id as u32 as usize)?;
        slot.flight.as_ref().filter(|_| slot.generation == (id >> 32) as u32)
    }

    /// Removes a completed work request from the table.
    pub(super) fn take(&mut self, id: u64) -> Option<Flight> {
        let (index, generation) = (id as u32, (id >> 32) as u32);
        let slot = self.slots.get_mut(index as usize)?;
        if slot.generation != generation {
            return None;
        }
        let flight = slot.flight.take()?;
        slot.generation = generation.wrapping_add(1);
        self.reads -= usize::from(matches!(flight.work, Work::Read { .. }));
        self.used -= 1;
        let mut free = self.free;
        self.append(&mut free, index);
        self.free = free;
        Some(flight)
    }

    /// Ids of all work requests of some queue pairs, in ascending order. Scans the whole table.
    pub(super) fn of(&self, pairs: &[Qp]) -> Vec<u64> {
        let ours = |slot: &Slot| {
            slot.flight.as_ref().is_some_and(|flight| pairs.binary_search(&flight.qp).is_ok())
        };
        let id = |(i, slot): (usize, &Slot)| u64::from(slot.generation) << 32 | i as u64;
        self.slots.iter().enumerate().filter(|(_, slot)| ours(slot)).map(id).collect()
    }

    /// Number of work requests.
    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Whether an RDMA Read is among them.
    pub(super) fn has_reads(&self) -> bool {
        self.reads > 0
    }

    fn add(&mut self) {
        let index = self.slots.len() as u32;
        self.slots.push(Slot { generation: 0, next: NIL, flight: None });
        let mut free = self.free;
        self.append(&mut free, index);
        self.free = free;
    }

    fn append(&mut self, list: &mut Fifo, index: u32) {
        self.slots[index as usize].next = NIL;
        match list.tail {
            NIL => list.head = index,
            tail => self.slots[tail as usize].next = index,
        }
        list.tail = index;
    }

    fn shift(&mut self, list: &mut Fifo) -> Option<u32> {
        let index = list.head;
        list.head = self.slots.get(index as usize)?.next;
        if list.head == NIL {
            list.tail = NIL;
        }
        Some(index)
    }
}

#[cfg(test)]
mod tests {
    use crate::pool::{Pool, PoolPlan};
    use crate::verbs::work_requests::*;

    fn pool() -> Pool {
        Pool::new(PoolPlan {
            cells: 8,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: 0,
            largest_bytes: 4096,
        })
        .unwrap()
    }

    fn flight(pool: &mut Pool, tag: Tag) -> Flight {
        Flight {
            qp: Qp(tag as u32 % 2),
            tag,
            work: Work::Recv(pool.take_cell().unwrap()),
            sink: None,
        }
    }

    #[test]
    fn work_requests_leave_in_order_and_stale_ids_are_unknown() {
        let (mut pool, mut table, mut list) = (pool(), FlightTable::default(), Fifo::default());
        table.reserve(2);
        for tag in 0..5 {
            let flight = flight(&mut pool, tag);
            table.insert(&mut list, flight);
        }
        let mut ids = Vec::new();
        while let Some((id, flight)) = table.next(&mut list) {
            assert_eq!(flight.tag, ids.len() as u64);
            ids.push(id);
        }
        let count = |pairs: &[Qp]| table.of(pairs).len();
        assert_eq!([&[][..], &[Qp(0)], &[Qp(1), Qp(7)], &[Qp(0), Qp(1)]].map(count), [0, 3, 2, 5]);
        for id in &ids {
            pool.give(table.take(*id).unwrap().work.into_buf());
            assert!(table.take(*id).is_none());
        }
        assert!(pool.is_full());
        assert_eq!(table.len(), 0);
        // The slots are reused under other ids, and the table does not grow.
        for tag in 0..5 {
            let flight = flight(&mut pool, tag);
            table.insert(&mut list, flight);
        }
        assert_eq!(table.slots.len(), 5);
        assert!(ids.iter().all(|id| table.take(*id).is_none()));
        assert!(table.take(u64::MAX).is_none());
    }
}
