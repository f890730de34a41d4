//! Coalescing of fsync per backing store: the running one, and the operations that wait for the
//! next.
//!
//! The kernel reports a lost writeback to the first fsync of an open file, and to no other. Two
//! concurrent ones could therefore complete as success and failure, in this order, and the success
//! would confirm lost data. So a ring runs one fsync of a store at a time, on a descriptor of its
//! own; flushes that arrive meanwhile share the next one. (That also saves most of them, and
//! prevents a store that hangs from occupying all workers of the kernel.)

/// The fsync operations of one store on one ring, by slot.
#[derive(Debug, Default)]
pub(crate) struct Syncs {
    leader: Option<u32>,
    /// Complete with the leader.
    followers: Vec<u32>,
    /// Arrived after the leader had started.
    waiting: Vec<u32>,
}

impl Syncs {
    /// Adds a slot; returns true if it is to be submitted now.
    pub(crate) fn join(&mut self, slot: u32) -> bool {
        match self.leader {
            None => {
                self.leader = Some(slot);
                true
            }
            Some(leader) if leader == slot => true,
            Some(_) => {
                self.waiting.push(slot);
                false
            }
        }
    }

    /// The leader has completed: appends those that share its outcome to `followers`. If it was
    /// cancelled (`alone`), nobody shares that. Returns the next leader, to be submitted.
    pub(crate) fn end(&mut self, slot: u32, alone: bool, followers: &mut Vec<u32>) -> Option<u32> {
        if self.leader != Some(slot) {
            return None;
        }
        match alone {
            true => self.waiting.append(&mut self.followers),
            false => followers.append(&mut self.followers),
        }
        self.leader = None;
        if self.waiting.is_empty() {
            return None;
        }
        std::mem::swap(&mut self.waiting, &mut self.followers);
        self.leader = self.followers.pop();
        self.leader
    }

    /// Removes a slot that does not lead; returns false if it is not there.
    pub(crate) fn leave(&mut self, slot: u32) -> bool {
        for line in [&mut self.waiting, &mut self.followers] {
            if let Some(at) = line.iter().position(|other| *other == slot) {
                line.swap_remove(at);
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use crate::uring::sync_group::*;

    #[test]
    fn flushes_that_arrive_during_a_sync_share_the_next_sync() {
        let mut syncs = Syncs::default();
        let mut with = Vec::new();
        assert!(syncs.join(3));
        assert!(syncs.join(3), "once more, after an interruption");
        assert!(!syncs.join(4) && !syncs.join(5) && !syncs.join(6));
        assert_eq!(syncs.end(4, false, &mut with), None, "it does not lead");
        let next = syncs.end(3, false, &mut with).unwrap();
        assert!(with.is_empty(), "none had come before it began");
        assert!(!syncs.join(7));
        assert!(syncs.join(next));
        let last = syncs.end(next, false, &mut with);
        with.push(next);
        with.sort_unstable();
        assert_eq!((with, last), (vec![4, 5, 6], Some(7)));
        assert_eq!(syncs.end(7, false, &mut Vec::new()), None);
        assert!(syncs.join(8));
    }

    #[test]
    fn followers_can_leave_a_sync_group_and_leaders_cannot() {
        let mut syncs = Syncs::default();
        assert!(syncs.join(1) && !syncs.join(2) && !syncs.join(3) && !syncs.join(4));
        assert!(syncs.leave(3) && !syncs.leave(3) && !syncs.leave(1));
        let mut with = Vec::new();
        let leader = syncs.end(1, false, &mut with).unwrap();
        let follower = if leader == 2 { 4 } else { 2 };
        assert!(!syncs.join(5) && syncs.leave(follower) && syncs.leave(5));
        assert_eq!((syncs.end(leader, false, &mut with), with.len()), (None, 0));
    }

    #[test]
    fn a_cancelled_sync_leader_does_not_cancel_its_followers() {
        let mut syncs = Syncs::default();
        assert!(syncs.join(1) && !syncs.join(2) && !syncs.join(3));
        let mut with = Vec::new();
        let leader = syncs.end(1, false, &mut with).unwrap();
        assert_eq!(leader, 3);
        assert_eq!((syncs.end(3, true, &mut with), with.len()), (Some(2), 0));
        assert_eq!(syncs.end(2, false, &mut with), None);
        assert!(with.is_empty());
    }
}
