//! Buddy allocator for the data section: doubly linked free lists in arrays, so allocation, release
//! and merging take constant time and never allocate.
//!
//! Small allocations may be anywhere, so a large block may never become free again. So some blocks
//! of the largest size can be *set aside*: their free pieces are on lists of their own, which only
//! [`Buddy::take_aside`] uses. Pieces allocated from them are released to these lists and merge
//! there.

use std::ops::Range;

const NIL: u32 = u32::MAX;
const TAKEN: u8 = u8::MAX;

#[derive(Debug)]
pub(super) struct Buddy {
    /// Heads of the free lists by order: general, and set aside.
    heads: [Vec<u32>; 2],
    next: Vec<u32>,
    prev: Vec<u32>,
    /// Order of the free block that begins at this unit, or `TAKEN`.
    free_order: Vec<u8>,
    /// Free units: general, and set aside.
    free_units: [u32; 2],
    /// Units that are set aside.
    aside: Range<u32>,
    /// Start of the next range to set aside.
    next_aside: u32,
}

impl Buddy {
    /// All units are free: `units`, in blocks of 2^`top`, the largest size.
    pub(super) fn new(units: u32, top: u8) -> Buddy {
        let (n, orders) = (units as usize, usize::from(top) + 1);
        let mut buddy = Buddy {
            heads: [vec![NIL; orders], vec![NIL; orders]],
            next: vec![NIL; n],
            prev: vec![NIL; n],
            free_order: vec![TAKEN; n],
            free_units: [0; 2],
            aside: 0..0,
            next_aside: 0,
        };
        for unit in (0..units).step_by(1 << top).rev() {
            buddy.push(unit, top);
        }
        buddy
    }

    pub(super) fn free_units(&self) -> u32 {
        self.free_units[0] + self.free_units[1]
    }

    /// Free units outside of the range set aside.
    #[inline]
    pub(super) fn free_for_all_units(&self) -> u32 {
        self.free_units[0]
    }

    /// Units of the largest free block outside of the range set aside; or of all free blocks of the
    /// largest size, if there are several.
    pub(super) fn largest_units(&self) -> u32 {
        let top = self.heads[0].len() - 1;
        let mut wholes = 0;
        let mut unit = self.heads[0][top];
        while unit != NIL {
            wholes += 1 << top;
            unit = self.next[unit as usize];
        }
        if wholes > 0 { wholes } else { self.largest(0) }
    }

    /// Units of the largest free block in the range set aside; all of the range, if it is free.
    pub(super) fn largest_aside_units(&self) -> u32 {
        let top = self.heads[1].len() - 1;
        let mut blocks = self.aside.clone().step_by(1 << top);
        match blocks.all(|unit| usize::from(self.free_order[unit as usize]) == top) {
            true => self.aside.end - self.aside.start,
            false => self.largest(1),
        }
    }

    /// Allocates a block of 2^`order` units outside of the range set aside.
    pub(super) fn take(&mut self, order: u8) -> Option<u32> {
        self.take_of(0, order)
    }

    /// Allocates one from the range set aside.
    pub(super) fn take_aside(&mut self, order: u8) -> Option<u32> {
        self.take_of(1, order)
    }

    pub(super) fn give(&mut self, unit: u32, order: u8) {
        let (mut unit, mut order) = (unit, order);
        while usize::from(order) + 1 < self.heads[0].len() {
            let buddy = unit ^ (1 << order);
            if self.free_order[buddy as usize] != order {
                break;
            }
            self.unlink(buddy, order);
            unit = unit.min(buddy);
            order += 1;
        }
        self.push(unit, order);
    }

    /// Sets the next `blocks` blocks of the largest size aside, instead of the previous ones. After
    /// the last blocks none is set aside for one round; returns whether this is that round.
    pub(super) fn set_aside(&mut self, blocks: u32) -> bool {
        let start = self.next_aside;
        self.put_back();
        let all = self.free_order.len() as u32;
        let units = blocks.saturating_mul(1 << (self.heads[0].len() - 1)).min(all);
        let end = start.saturating_add(units);
        if end > all || units == 0 {
            self.next_aside = 0;
            return true;
        }
        self.relist(start..end, 0, 1);
        (self.aside, self.next_aside) = (start..end, end);
        false
    }

    /// Sets nothing aside; the last range will be the next one.
    pub(super) fn put_back(&mut self) {
        if !self.aside.is_empty() {
            let aside = std::mem::take(&mut self.aside);
            self.next_aside = aside.start;
            self.relist(aside, 1, 0);
        }
    }

    fn relist(&mut self, units: Range<u32>, from: usize, to: usize) {
        for unit in units {
            let order = self.free_order[unit as usize];
            if order != TAKEN {
                self.unlink_of(from, unit, order);
                self.push_to(to, unit, order);
            }
        }
    }

    fn largest(&self, side: usize) -> u32 {
        self.heads[side].iter().rposition(|head| *head != NIL).map_or(0, |order| 1 << order)
    }

    fn take_of(&mut self, side: usize, order: u8) -> Option<u32> {
        let wanted = usize::from(order);
        let heads = &self.heads[side];
        let from = (wanted..heads.len()).find(|&o| heads[o] != NIL)?;
        let unit = heads[from];
        self.unlink_of(side, unit, from as u8);
        for half in (wanted..from).rev() {
            self.push_to(side, unit + (1 << half), half as u8);
        }
        Some(unit)
    }

    fn side(&self, unit: u32) -> usize {
        usize::from(self.aside.contains(&unit))
    }

    fn push(&mut self, unit: u32, order: u8) {
        self.push_to(self.side(unit), unit, order);
    }

    fn unlink(&mut self, unit: u32, order: u8) {
        self.unlink_of(self.side(unit), unit, order);
    }

    fn push_to(&mut self, side: usize, unit: u32, order: u8) {
        self.free_units[side] += 1 << order;
        let head = std::mem::replace(&mut self.heads[side][usize::from(order)], unit);
        self.next[unit as usize] = head;
        self.prev[unit as usize] = NIL;
        self.free_order[unit as usize] = order;
        if head != NIL {
            self.prev[head as usize] = unit;
        }
    }

    fn unlink_of(&mut self, side: usize, unit: u32, order: u8) {
        self.free_units[side] -= 1 << order;
        let (prev, next) = (self.prev[unit as usize], self.next[unit as usize]);
        match prev {
            NIL => self.heads[side][usize::from(order)] = next,
            _ => self.next[prev as usize] = next,
        }
        if next != NIL {
            self.prev[next as usize] = prev;
        }
        self.free_order[unit as usize] = TAKEN;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::pool::buddy::*;

    #[test]
    fn blocks_set_aside_merge_while_others_allocate() {
        let mut buddy = Buddy::new(16, 2);
        let taken: Vec<u32> = std::iter::from_fn(|| buddy.take(0)).collect();
        assert_eq!(taken.len(), 16);
        taken.iter().filter(|unit| *unit % 2 == 1).for_each(|unit| buddy.give(*unit, 0));
        assert_eq!((buddy.free_units(), buddy.largest_units(), buddy.take(2)), (8, 1, None));
        assert!(!buddy.set_aside(1));
        assert_eq!((buddy.largest_units(), buddy.largest_aside_units()), (1, 1));
        // Other allocations take all the rest, and nothing of this.
        let others: Vec<u32> = std::iter::from_fn(|| buddy.take(0)).collect();
        assert_eq!(others.len(), 6);
        assert!(others.iter().all(|unit| *unit >= 4), "{others:?}");
        [0, 2].into_iter().for_each(|unit| buddy.give(unit, 0));
        assert_eq!((buddy.largest_units(), buddy.largest_aside_units()), (0, 4));
        assert_eq!((buddy.take(2), buddy.take_aside(2)), (None, Some(0)));
        buddy.give(0, 2);
        buddy.put_back();
        assert_eq!((buddy.largest_units(), buddy.largest_aside_units()), (4, 0));
    }

    #[test]
    fn ranges_are_set_aside_in_turn_until_the_end() {
        let mut buddy = Buddy::new(20, 2);
        for _ in 0..2 {
            for start in [0, 8] {
                assert!(!buddy.set_aside(2));
                assert_eq!(buddy.aside, start..start + 8);
            }
            assert!(buddy.set_aside(2), "two do not fit behind these");
            assert_eq!((buddy.aside.len(), buddy.largest_aside_units()), (0, 0));
        }
        assert!(!buddy.set_aside(100));
        assert_eq!((buddy.aside.clone(), buddy.largest_aside_units()), (0..20, 20));
        assert!(buddy.set_aside(100));
    }

    proptest! {
        /// Whatever is set aside and put back, units are conserved, live blocks never overlap, no
        /// general allocation is inside the range set aside, and all blocks merge in the end. And
        /// if a block is free, any blocks whose total is not larger can be allocated.
        #[test]
        fn any_sequence_of_operations_conserves_units(
            steps in prop::collection::vec((0u8..6, 0u8..4, any::<usize>()), 1..200)
        ) {
            let mut buddy = Buddy::new(64, 3);
            let mut live: Vec<(u32, u8)> = Vec::new();
            for (what, order, pick) in steps {
                let taken = match what {
                    0 | 1 => buddy.take(order),
                    2 => buddy.take_aside(order),
                    3 => {
                        buddy.set_aside(pick as u32 % 4);
                        None
                    }
                    4 => {
                        buddy.put_back();
                        None
                    }
                    _ if live.is_empty() => None,
                    _ => {
                        let (unit, order) = live.swap_remove(pick % live.len());
                        buddy.give(unit, order);
                        None
                    }
                };
                if let Some(unit) = taken {
                    let end = unit + (1 << order);
                    prop_assert_eq!(buddy.aside.contains(&unit), what == 2);
                    for (other, order) in &live {
                        prop_assert!(end <= *other || other + (1 << order) <= unit);
                    }
                    live.push((unit, order));
                }
                let held: u32 = live.iter().map(|(_, order)| 1 << order).sum();
                prop_assert_eq!(buddy.free_units() + held, 64);
                let mut tried = Vec::new();
                for aside in [false, true] {
                    let mut left = match aside {
                        true => buddy.largest_aside_units(),
                        false => buddy.largest_units(),
                    };
                    for order in [1u8, 3, 0, 2, 3, 3, 1, 0] {
                        if 1 << order <= left {
                            let unit = buddy.take_of(aside.into(), order);
                            prop_assert!(unit.is_some(), "{} left, {} wanted", left, order);
                            left -= 1 << order;
                            tried.extend(unit.map(|unit| (unit, order)));
                        }
                    }
                }
                tried.into_iter().for_each(|(unit, order)| buddy.give(unit, order));
            }
            live.into_iter().for_each(|(unit, order)| buddy.give(unit, order));
            buddy.put_back();
            prop_assert_eq!((buddy.free_units(), buddy.largest_units()), (64, 64));
            prop_assert_eq!(std::iter::from_fn(|| buddy.take(3)).count(), 8);
        }
    }
}
