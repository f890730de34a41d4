//! Who changes which blocks: what makes a fused Compare and Write one step for everybody else.
//!
//! As long as nobody sends such a command, whoever changes blocks asks nobody, and only looks at a
//! flag. The first of them raises it. From then on each change claims its blocks before it goes to
//! a disk, and every reactor tells how many changes it has there that have not: when those are
//! home, and nobody else has a claim to its blocks, the fused command has them to itself. After
//! many changes without a fused command the flag comes down again.
//!
//! Claims are served in the order in which they came, so nobody waits for ever; and who has one
//! waits for nothing but its disk, so nobody waits in a circle. A claim that was granted is not
//! told by letter: the bell rings, and the reactor asks. So none can be lost.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::disk::BackingId;
use crate::mailbox::Sender;

/// So many changes without a fused command, and changes are no longer watched.
const CALM: u32 = 256;

/// What a command wants to change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Claim {
    /// The store.
    pub backing: BackingId,
    /// Byte offset.
    pub at: u64,
    /// Bytes.
    pub len: u64,
    /// Nobody else may change any of it meanwhile. Other changes need not keep out of each
    /// other's way.
    pub alone: bool,
    /// Which reactor rings when it is granted.
    pub reactor: usize,
}

/// The book of claims, shared by all reactors.
#[derive(Debug)]
pub struct Exclusion {
    watching: AtomicBool,
    /// How often the flag was raised.
    round: AtomicU32,
    reactors: Vec<Sender>,
    table: Mutex<Table>,
}

#[derive(Debug, Default)]
struct Table {
    /// By ticket, which is the order in which they came; true when granted.
    alone: BTreeMap<u64, (Claim, bool)>,
    shared: BTreeMap<u64, (Claim, bool)>,
    last: u64,
    watched: bool,
    /// Reactors that have not looked yet, and changes without a claim that are not home.
    awaited: u64,
    /// Changes since the last fused command.
    calm: u32,
}

impl Exclusion {
    /// For these reactors; nobody has claimed anything.
    #[must_use]
    pub fn new(reactors: Vec<Sender>) -> Exclusion {
        Exclusion {
            watching: AtomicBool::new(false),
            round: AtomicU32::new(0),
            reactors,
            table: Mutex::default(),
        }
    }

    /// Whether changes must be claimed: one relaxed load.
    #[inline]
    #[must_use]
    pub fn is_watching(&self) -> bool {
        self.watching.load(Ordering::Relaxed)
    }

    /// A number that is another one each time that watching begins. A reactor that finds a new
    /// one calls [`Exclusion::settle`].
    #[must_use]
    pub fn round(&self) -> u32 {
        self.round.load(Ordering::Acquire)
    }

    /// Claims blocks: a ticket, to be given up at the end whatever happens, and whether the claim
    /// is granted at once.
    #[must_use]
    pub fn claim(&self, claim: Claim) -> (u64, bool) {
        let mut table = self.lock();
        if claim.alone {
            self.watch(&mut table);
        } else {
            self.relax(&mut table);
        }
        table.last += 1;
        let ticket = table.last;
        let granted = table.is_free(ticket, &claim);
        let claims = if claim.alone { &mut table.alone } else { &mut table.shared };
        claims.insert(ticket, (claim, granted));
        (ticket, granted)
    }

    /// Whether a claim is granted by now.
    #[must_use]
    pub fn is_granted(&self, ticket: u64) -> bool {
        let table = self.lock();
        let found = table.alone.get(&ticket).or_else(|| table.shared.get(&ticket));
        found.is_some_and(|(_, granted)| *granted)
    }

    /// Gives a claim up, granted or not.
    pub fn give_up(&self, ticket: u64) {
        let mut table = self.lock();
        if table.alone.remove(&ticket).is_none() {
            table.shared.remove(&ticket);
        }
        self.grant(&mut table);
    }

    /// A reactor has looked: from now on it claims whatever it changes, and has so many changes at
    /// its disks that were not claimed. Each of them ends with [`Exclusion::settled`].
    pub fn settle(&self, unclaimed: u32) {
        let mut table = self.lock();
        table.awaited = (table.awaited + u64::from(unclaimed)).saturating_sub(1);
        self.grant(&mut table);
    }

    /// A change that was not claimed is home.
    pub fn settled(&self) {
        let mut table = self.lock();
        table.awaited = table.awaited.saturating_sub(1);
        self.grant(&mut table);
    }

    /// Raises the flag, unless it is up.
    fn watch(&self, table: &mut Table) {
        table.calm = 0;
        if !table.watched {
            table.watched = true;
            table.awaited = self.reactors.len() as u64;
            self.watching.store(true, Ordering::Relaxed);
            self.round.fetch_add(1, Ordering::Release);
            self.reactors.iter().for_each(Sender::ring);
        }
    }

    /// Takes it down when that was long ago.
    fn relax(&self, table: &mut Table) {
        table.calm = table.calm.saturating_add(1);
        if table.calm > CALM && table.watched && table.awaited == 0 && table.alone.is_empty() {
            table.watched = false;
            self.watching.store(false, Ordering::Relaxed);
        }
    }

    /// Grants what nothing is in the way of any more.
    fn grant(&self, table: &mut Table) {
        if table.alone.is_empty() && table.shared.values().all(|(_, granted)| *granted) {
            return;
        }
        let waiting = |claims: &BTreeMap<u64, (Claim, bool)>| {
            let waiting = claims.iter().filter(|(_, (_, granted))| !granted);
            waiting.map(|(ticket, (claim, _))| (*ticket, *claim)).collect::<Vec<_>>()
        };
        for (ticket, claim) in [waiting(&table.alone), waiting(&table.shared)].concat() {
            if table.is_free(ticket, &claim) {
                let claims = if claim.alone { &mut table.alone } else { &mut table.shared };
                claims.insert(ticket, (claim, true));
                if let Some(reactor) = self.reactors.get(claim.reactor) {
                    reactor.ring();
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// Whether no earlier claim, granted or not, is in the way of this one.
    fn is_free(&self, ticket: u64, claim: &Claim) -> bool {
        let meets = |claims: &BTreeMap<u64, (Claim, bool)>| {
            claims.range(..ticket).any(|(_, (earlier, _))| claim.meets(earlier))
        };
        match claim.alone {
            true => self.awaited == 0 && !meets(&self.alone) && !meets(&self.shared),
            false => !meets(&self.alone),
        }
    }
}

impl Claim {
    fn meets(&self, other: &Claim) -> bool {
        let end = |claim: &Claim| claim.at.saturating_add(claim.len);
        self.backing == other.backing && self.at < end(other) && other.at < end(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mailbox::{Mailbox, mailbox};

    fn shared(at: u64) -> Claim {
        Claim { backing: BackingId(0), at, len: 4096, alone: false, reactor: 0 }
    }

    fn alone(at: u64, reactor: usize) -> Claim {
        Claim { alone: true, reactor, ..shared(at) }
    }

    /// For two reactors, watched or not.
    fn exclusion(watched: bool) -> (Exclusion, [Mailbox; 2]) {
        let [(a, to_a), (b, to_b)] = [mailbox().unwrap(), mailbox().unwrap()];
        let exclusion = Exclusion::new(vec![a, b]);
        if watched {
            let (ticket, _) = exclusion.claim(alone(1 << 40, 0));
            exclusion.settle(0);
            exclusion.settle(0);
            exclusion.give_up(ticket);
            to_a.hush();
            to_b.hush();
        }
        (exclusion, [to_a, to_b])
    }

    #[test]
    fn the_first_fused_command_waits_for_all_changes_that_nobody_has_claimed() {
        let (exclusion, mail) = exclusion(false);
        assert!(!exclusion.is_watching());
        let (ticket, granted) = exclusion.claim(alone(0, 1));
        assert!(!granted && exclusion.is_watching() && exclusion.round() == 1);
        assert!(mail.iter().all(Mailbox::hush), "all reactors are asked to look");
        exclusion.settle(2);
        exclusion.settled();
        exclusion.settle(0);
        assert!(!exclusion.is_granted(ticket), "one is still under way");
        assert!(!mail[1].hush());
        exclusion.settled();
        assert!(exclusion.is_granted(ticket) && mail[1].hush() && !mail[0].hush());
        exclusion.give_up(ticket);
        let (ticket, granted) = exclusion.claim(alone(0, 1));
        assert!(granted && exclusion.round() == 1, "changes are watched already");
        exclusion.give_up(ticket);
    }

    #[test]
    fn changes_keep_out_of_the_way_of_fused_commands_and_not_of_each_other() {
        let (exclusion, mail) = exclusion(true);
        let (first, granted) = exclusion.claim(shared(0));
        assert!(granted);
        let (second, granted) = exclusion.claim(shared(0));
        assert!(granted, "two writes of one block are the hosts' affair");
        let (fused, granted) = exclusion.claim(alone(0, 1));
        assert!(!granted);
        let (third, granted) = exclusion.claim(shared(0));
        assert!(!granted, "nobody overtakes");
        let elsewhere = [shared(4096), Claim { backing: BackingId(1), ..shared(0) }];
        for claim in elsewhere {
            let (ticket, granted) = exclusion.claim(claim);
            assert!(granted, "{claim:?}");
            exclusion.give_up(ticket);
        }
        exclusion.give_up(first);
        assert!(!exclusion.is_granted(fused));
        exclusion.give_up(second);
        assert!(exclusion.is_granted(fused) && mail[1].hush());
        assert!(!exclusion.is_granted(third));
        exclusion.give_up(fused);
        assert!(exclusion.is_granted(third) && mail[0].hush());
        exclusion.give_up(third);
    }

    #[test]
    fn fused_commands_have_their_blocks_one_after_another() {
        let (exclusion, _mail) = exclusion(true);
        let tickets: Vec<u64> = (0..4).map(|_| exclusion.claim(alone(0, 0)).0).collect();
        let granted = || tickets.iter().map(|t| exclusion.is_granted(*t)).collect::<Vec<_>>();
        assert_eq!(granted(), [true, false, false, false]);
        // One that waits goes: the others are none the wiser.
        exclusion.give_up(tickets[1]);
        assert_eq!(granted(), [true, false, false, false]);
        exclusion.give_up(tickets[0]);
        assert_eq!(granted(), [false, false, true, false]);
        exclusion.give_up(tickets[2]);
        assert_eq!(granted(), [false, false, false, true]);
    }

    #[test]
    fn after_many_changes_nobody_watches_and_the_next_fused_command_begins_anew() {
        let (exclusion, _mail) = exclusion(true);
        let mut changes = 0;
        while exclusion.is_watching() {
            let (ticket, granted) = exclusion.claim(shared(0));
            assert!(granted);
            exclusion.give_up(ticket);
            changes += 1;
        }
        assert_eq!(changes, CALM + 1);
        let (ticket, granted) = exclusion.claim(alone(0, 0));
        assert!(!granted && exclusion.round() == 2);
        exclusion.settle(0);
        exclusion.settle(0);
        assert!(exclusion.is_granted(ticket));
    }

    #[test]
    fn ranges_at_the_end_of_all_numbers_meet_as_others_do() {
        let at = |at, len| Claim { at, len, ..shared(0) };
        assert!(at(u64::MAX - 1, 4096).meets(&at(u64::MAX - 4096, 4096)));
        assert!(!at(0, 4096).meets(&at(4096, 4096)) && !at(0, 0).meets(&at(0, 4096)));
    }
}
