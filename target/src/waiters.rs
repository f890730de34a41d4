//! Who waits for data buffers on a reactor, in order of arrival. Admin commands have a line of
//! their own: a slow disk must not lock a host out.

use std::collections::VecDeque;

/// A command that waits: its queue's key and its slot.
pub type Waiter = (u32, u16);

/// The two lines. Bounded by the slots of all queues: a queue that closes takes its entries out.
#[derive(Debug, Default)]
pub struct Waiters {
    admin: VecDeque<Waiter>,
    io: VecDeque<Waiter>,
}

impl Waiters {
    /// Whether nobody waits: a new I/O command may then try at once.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.admin.is_empty() && self.io.is_empty()
    }

    /// How many wait.
    #[must_use]
    pub fn len(&self) -> usize {
        self.admin.len() + self.io.len()
    }

    /// Puts a command at the end of its line.
    pub fn push(&mut self, admin: bool, key: u32, slot: u16) {
        if admin { self.admin.push_back((key, slot)) } else { self.io.push_back((key, slot)) }
    }

    /// A queue closes: none of its commands waits any more.
    pub fn forget(&mut self, key: u32) {
        self.admin.retain(|waiter| waiter.0 != key);
        self.io.retain(|waiter| waiter.0 != key);
    }

    /// A command ends before its turn.
    pub fn remove(&mut self, key: u32, slot: u16) {
        self.admin.retain(|waiter| *waiter != (key, slot));
        self.io.retain(|waiter| *waiter != (key, slot));
    }

    /// The command whose turn it is in one of the lines.
    #[must_use]
    pub fn first(&self, admin: bool) -> Option<Waiter> {
        if admin { self.admin.front().copied() } else { self.io.front().copied() }
    }

    /// The first of a line has been served.
    pub fn pop(&mut self, admin: bool) {
        if admin {
            self.admin.pop_front()
        } else {
            self.io.pop_front()
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_that_closes_takes_its_entries_out_of_both_lines() {
        let mut waiters = Waiters::default();
        for (admin, key, slot) in [(false, 1, 0), (false, 2, 0), (false, 1, 1), (true, 1, 2)] {
            waiters.push(admin, key, slot);
        }
        waiters.forget(1);
        assert_eq!(
            (waiters.len(), waiters.first(false), waiters.first(true)),
            (1, Some((2, 0)), None)
        );
        waiters.push(true, 3, 0);
        waiters.pop(false);
        assert!(!waiters.is_empty(), "an admin command that waits keeps I/O from overtaking");
        waiters.pop(true);
        assert!(waiters.is_empty());
    }
}
