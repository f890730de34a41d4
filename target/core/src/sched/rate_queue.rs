//! Queue of commands that wait for a rate limit on a reactor, in order of admission.
//!
//! Each association has a queue. Of its commands for one namespace the first ones book, at most a slice of
//! the limited time at once; the next book when those have begun. So the bookings of all associations at a
//! limit alternate in slices: they get equal shares, on whichever reactors they are, as long as each has a
//! slice of commands waiting. At a limit of several namespaces, an association has a slice for each of them.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::subsystem::MAX_NSID;
use crate::subsystem::rate_limit::Grant;

/// Maximum of the limited time that one wait queue may have booked, beyond its first command:
/// enough that a reactor that wakes a little late loses nothing to others, little enough that a few
/// commands fill it. If commands of others take longer, as long as those, so that bytes are shared
/// equally as well.
const SLICE: Duration = Duration::from_micros(200);

/// The wait queues of a reactor. Bounded by the slots of all queue pairs.
#[derive(Debug)]
pub struct RateLimitQueue {
    /// By share ([`crate::sched::buffers::BufferScheduler::join`]).
    lines: Vec<AssociationQueue>,
    /// Index of the next wait queue to serve.
    turn: usize,
    count: usize,
    due: Option<Instant>,
    /// By namespace id.
    bookings: Box<[NamespaceBookings]>,
    /// Number of searches in wait queues so far.
    searches: u64,
}

impl Default for RateLimitQueue {
    fn default() -> RateLimitQueue {
        let bookings = vec![NamespaceBookings::default(); MAX_NSID as usize + 1].into();
        let (lines, turn, count, due, searches) = (Vec::new(), 0, 0, None, 0);
        RateLimitQueue { lines, turn, count, due, bookings, searches }
    }
}

/// The commands of an association that wait.
#[derive(Debug, Default)]
struct AssociationQueue {
    entries: VecDeque<QueueEntry>,
    /// When one of them may begin, or a new one may book. Until then the others are not looked at.
    due: Option<Instant>,
    /// Not all are for one namespace. May stay true after that has ended, until none waits.
    is_mixed: bool,
}

/// The bookings of commands for one namespace.
#[derive(Clone, Copy, Default, Debug)]
struct NamespaceBookings {
    /// Recent time of the longest command.
    longest: Duration,
    /// Time booked by those that the search with this number has passed.
    ahead: Duration,
    search: u64,
}

#[derive(Clone, Copy, Debug)]
struct QueueEntry {
    key: u32,
    slot: u16,
    nsid: u32,
    booked: Option<Grant>,
}

impl RateLimitQueue {
    /// Reserves memory for `commands` of a share to wait at once, so that nothing is allocated when
    /// they do.
    pub fn join(&mut self, share: u32, commands: usize) {
        let at = share as usize;
        if self.lines.len() <= at {
            self.lines.resize_with(at + 1, AssociationQueue::default);
        }
        let line = &mut self.lines[at].entries;
        line.reserve_exact(commands.saturating_sub(line.len()));
    }

    /// Removes a share that is no longer used, of which no command waits.
    pub fn leave(&mut self, share: u32) {
        if let Some(line) = self.lines.get_mut(share as usize) {
            *line = AssociationQueue::default();
        }
    }

    /// Returns when [`RateLimitQueue::next`] may have a command, if any waits.
    #[inline]
    pub fn due(&self) -> Option<Instant> {
        self.due
    }

    /// Whether a command may book before it waits: none for its namespace is queued ahead of it.
    #[inline]
    pub fn may_book(&self, share: u32, nsid: u32) -> bool {
        self.count == 0 || self.is_first(share, nsid)
    }

    #[cold]
    fn is_first(&self, share: u32, nsid: u32) -> bool {
        let is_first = |line: &AssociationQueue| line.entries.iter().all(|e| e.nsid != nsid);
        self.lines.get(share as usize).is_none_or(is_first)
    }

    /// Appends a command to its wait queue, with its booking.
    pub fn push(&mut self, share: u32, (key, slot): (u32, u16), nsid: u32, booked: Option<Grant>) {
        let Some(line) = self.lines.get_mut(share as usize) else { return };
        let is_unlike = |other: &QueueEntry| line.is_mixed || other.nsid != nsid;
        line.is_mixed = line.entries.front().is_some_and(is_unlike);
        line.entries.push_back(QueueEntry { key, slot, nsid, booked });
        self.count += 1;
        // One that has not booked does so at the next search.
        let due = booked.map(|booked| booked.start).or(self.due);
        line.due = earliest(line.due, due);
        self.due = earliest(self.due, due);
    }

    /// Removes the commands of a queue pair that closes. Their bookings are refunded by `refund`.
    pub fn forget(&mut self, key: u32, mut refund: impl FnMut(u16, &Grant)) {
        self.retain(|entry| {
            let stays = entry.key != key;
            if let (false, Some(booking)) = (stays, &entry.booked) {
                refund(entry.slot, booking);
            }
            stays
        });
    }

    /// Removes a command that ends before its turn. Returns its booking, which is to be refunded.
    pub fn remove(&mut self, key: u32, slot: u16) -> Option<Grant> {
        let mut booked = None;
        self.retain(|entry| {
            let stays = (entry.key, entry.slot) != (key, slot);
            if !stays {
                booked = entry.booked;
            }
            stays
        });
        booked
    }

    /// Handles a change of limits: the bookings of commands that have not begun are refunded by
    /// `refund`, under the previous limits, and made again.
    pub fn change(&mut self, now: Instant, mut refund: impl FnMut(u32, u16, &Grant)) {
        for line in &mut self.lines {
            for entry in &mut line.entries {
                if let Some(booking) = entry.booked.take() {
                    refund(entry.key, entry.slot, &booking);
                }
            }
            line.due = (!line.entries.is_empty()).then_some(now);
        }
        self.due = (self.count > 0).then_some(now);
    }

    /// Removes and returns the next command that may begin now. `book` books for a command; none:
    /// it is no longer limited.
    pub fn next(
        &mut self,
        now: Instant,
        mut book: impl FnMut(u32, u16) -> Option<Grant>,
    ) -> Option<(u32, u16)> {
        if self.due.is_none_or(|due| due > now) {
            return None;
        }
        let mut due = None;
        for step in 0..self.lines.len() {
            let at = (self.turn + step) % self.lines.len();
            let line = &mut self.lines[at];
            if line.due.is_some_and(|due| due <= now) {
                self.searches += 1;
                let bookings = (&mut *self.bookings, self.searches);
                if let Some((key, slot)) = line.first(now, bookings, &mut book) {
                    self.turn = at + 1;
                    self.count -= 1;
                    return Some((key, slot));
                }
            }
            due = earliest(due, line.due);
        }
        self.due = due;
        None
    }

    /// Returns the capacity of each wait queue.
    #[cfg(test)]
    pub(crate) fn capacities(&self) -> impl Iterator<Item = usize> {
        self.lines.iter().map(|line| line.entries.capacity())
    }

    fn retain(&mut self, mut keep: impl FnMut(&QueueEntry) -> bool) {
        if self.count > 0 {
            self.lines.iter_mut().for_each(|line| line.entries.retain(&mut keep));
            self.count = self.lines.iter().map(|line| line.entries.len()).sum();
        }
    }
}

impl AssociationQueue {
    /// Removes and returns the first command that may begin; books for those that may. Without one,
    /// `due` is when there will be.
    fn first(
        &mut self,
        now: Instant,
        (bookings, search): (&mut [NamespaceBookings], u64),
        book: &mut impl FnMut(u32, u16) -> Option<Grant>,
    ) -> Option<(u32, u16)> {
        let mut due = None;
        for at in 0..self.entries.len() {
            #[cfg(test)]
            tests::LOOKED.set(tests::LOOKED.get() + 1);
            let entry = &mut self.entries[at];
            let of = entry.nsid as usize % bookings.len();
            let NamespaceBookings { longest, ahead, search: last } = &mut bookings[of];
            if std::mem::replace(last, search) != search {
                *ahead = Duration::ZERO;
            }
            let booking = match entry.booked {
                Some(booking) => Some(booking),
                None if *ahead < SLICE.max(*longest) => book(entry.key, entry.slot),
                None if self.is_mixed => continue,
                None => break,
            };
            if let (None, Some(new)) = (entry.booked, booking) {
                // The longest time decays after a while.
                *longest = new.takes.max(*longest - *longest / 1024);
            }
            entry.booked = booking;
            match booking {
                Some(booking) if booking.start > now => {
                    // At least something, so that the first command waits only for itself.
                    *ahead += booking.takes.max(Duration::from_nanos(1));
                    due = earliest(due, Some(booking.start));
                }
                _ => return self.entries.remove(at).map(|entry| (entry.key, entry.slot)),
            }
        }
        self.due = due;
        None
    }
}

/// The earlier of two times, if any.
fn earliest(one: Option<Instant>, other: Option<Instant>) -> Option<Instant> {
    one.into_iter().chain(other).min()
}

#[cfg(test)]
mod tests {
    use crate::sched::rate_queue::*;
    use crate::subsystem::rate_limit::{Limit, Limiter};
    use std::cell::Cell;
    use std::collections::BTreeMap;

    thread_local! {
        /// Entries of wait queues that were looked at.
        pub(super) static LOOKED: Cell<u64> = const { Cell::new(0) };
    }

    /// Reactors with wait queues at one limiter, each woken late by its own time.
    struct Stage {
        now: Instant,
        limiter: Limiter,
        reactors: Vec<(RateLimitQueue, Duration)>,
        begun: BTreeMap<(usize, u32), u32>,
    }

    impl Stage {
        /// The wait queues on each reactor: how many commands each always has waiting.
        fn new(limit: Limit, reactors: &[(&[u16], u64)]) -> Stage {
            let now = Instant::now();
            let mut stage = Stage {
                now,
                limiter: Limiter::new(limit, now),
                reactors: Vec::new(),
                begun: BTreeMap::new(),
            };
            for (lines, late_us) in reactors {
                let mut rate_limits = RateLimitQueue::default();
                for (share, depth) in lines.iter().enumerate() {
                    rate_limits.join(share as u32, 256);
                    (0..*depth).for_each(|slot| {
                        rate_limits.push(share as u32, (share as u32, slot), 1, None)
                    });
                }
                rate_limits.change(now, |_, _, _| {});
                stage.reactors.push((rate_limits, Duration::from_micros(*late_us)));
            }
            stage
        }

        /// Each command is queued again as soon as it has begun, for so long.
        fn run(&mut self, time: Duration, bytes: impl Fn(u32) -> u64) {
            let end = self.now + time;
            loop {
                let next = |(rate_limits, late): &(RateLimitQueue, Duration)| {
                    rate_limits.due().map(|due| due + *late)
                };
                let Some(at) = self.reactors.iter().filter_map(next).min() else { return };
                self.now = self.now.max(at);
                if self.now > end {
                    return;
                }
                for (reactor, (rate_limits, late)) in self.reactors.iter_mut().enumerate() {
                    if rate_limits.due().is_none_or(|due| due + *late > self.now) {
                        continue;
                    }
                    let (now, limiter) = (self.now, &self.limiter);
                    while let Some((key, slot)) =
                        rate_limits.next(now, |key, _| Some(limiter.book(now, bytes(key))))
                    {
                        *self.begun.entry((reactor, key)).or_default() += 1;
                        rate_limits.push(key, (key, slot), 1, None);
                    }
                }
            }
        }

        #[track_caller]
        fn shares(&self, weights: &[((usize, u32), u32)], expected: f64, within: f64) {
            for (line, weight) in weights {
                let got = f64::from(self.begun[line] * weight);
                assert!((got / expected - 1.0).abs() < within, "{line:?}: {:?}", self.begun);
            }
        }
    }

    fn iops(iops: u32) -> Limit {
        Limit { iops: Some(iops), ..Limit::default() }
    }

    #[test]
    fn a_limit_is_held_and_shared_equally_whatever_the_depth() {
        for (rate, shallow) in [(500, 1), (20_000, 4)] {
            let mut stage = Stage::new(iops(rate), &[(&[128, shallow], 50)]);
            stage.run(Duration::from_secs(10), |_| 0);
            // The burst is a hundredth of the time.
            let each = f64::from(rate) * 5.05;
            stage.shares(&[((0, 0), 1), ((0, 1), 1)], each, 0.02);
        }
    }

    #[test]
    fn reactors_share_a_limit_also_when_one_of_them_wakes_late() {
        let limit = Limit { burst_ms: 10, ..iops(50_000) };
        let mut stage = Stage::new(limit, &[(&[128], 5), (&[128], 100)]);
        stage.run(Duration::from_secs(2), |_| 0);
        stage.shares(&[((0, 0), 1), ((1, 0), 1)], 50_250.0, 0.03);
    }

    #[test]
    fn bandwidth_is_shared_by_bytes() {
        let limit = Limit { bandwidth: Some(100 << 20), ..Limit::default() };
        let mut stage = Stage::new(limit, &[(&[64, 64], 50)]);
        stage.run(Duration::from_secs(10), |key| if key == 0 { 4096 } else { 64 << 10 });
        stage.shares(&[((0, 0), 4), ((0, 1), 64)], f64::from(505 << 10), 0.03);
    }

    /// Each with a limit of its own.
    #[test]
    fn namespaces_of_an_association_reach_their_limits_whatever_their_number() {
        let slow_and_fast = [10, 10, 10, 10, 10, 10, 10, 10, 1000];
        for rates in [&[1000; 2][..], &[1000; 40], &slow_and_fast] {
            let start = Instant::now();
            let limiter = |rate: &u32| Limiter::new(Limit { burst_ms: 10, ..iops(*rate) }, start);
            let limiters: Vec<Limiter> = rates.iter().map(limiter).collect();
            let mut rate_limits = RateLimitQueue::default();
            rate_limits.join(0, 4096);
            let push = |rate_limits: &mut RateLimitQueue, namespace: u16| {
                rate_limits.push(0, (0, namespace), u32::from(namespace) + 1, None);
            };
            let all = 0..rates.len() as u16;
            all.for_each(|namespace| (0..64).for_each(|_| push(&mut rate_limits, namespace)));
            rate_limits.change(start, |_, _, _| {});
            let (mut begun, mut now) = (vec![0; rates.len()], start);
            while now < start + Duration::from_secs(1) {
                let book = |_, slot| Some(limiters[usize::from(slot)].book(now, 0));
                while let Some((_, namespace)) = rate_limits.next(now, book) {
                    begun[usize::from(namespace)] += 1;
                    push(&mut rate_limits, namespace);
                }
                now = rate_limits.due().expect("commands wait");
            }
            let reached =
                |(begun, rate): (&u32, &u32)| (*rate..rate + rate / 50 + 2).contains(begun);
            assert!(begun.iter().zip(rates).all(reached), "{begun:?}");
        }
    }

    /// A reactor that looks at all of them for each command has no time for others.
    #[test]
    fn commands_of_other_associations_are_not_searched_for_the_next_one() {
        const ASSOCIATIONS: u32 = 64;
        const DEPTH: u16 = 512;
        let start = Instant::now();
        // Their commands are due at different times.
        let limiter = |of| Limiter::new(Limit { burst_ms: 10, ..iops(1000 + of) }, start);
        let limiters: Vec<Limiter> = (0..ASSOCIATIONS).map(limiter).collect();
        let mut rate_limits = RateLimitQueue::default();
        for of in 0..ASSOCIATIONS {
            rate_limits.join(of, DEPTH.into());
            (0..DEPTH).for_each(|slot| rate_limits.push(of, (of, slot), 1, None));
        }
        rate_limits.change(start, |_, _, _| {});
        let (mut begun, mut now) = (0, start);
        LOOKED.set(0);
        while now < start + Duration::from_millis(100) {
            let book = |key, _| Some(limiters[key as usize].book(now, 0));
            while let Some((of, slot)) = rate_limits.next(now, book) {
                begun += 1;
                rate_limits.push(of, (of, slot), 1, None);
            }
            now = rate_limits.due().expect("commands wait");
        }
        let looked = LOOKED.get() / begun;
        assert!(begun >= u64::from(ASSOCIATIONS) * 100 && looked <= 4, "{begun}: {looked} each");
    }

    #[test]
    fn namespaces_do_not_wait_for_each_other() {
        let now = Instant::now();
        let mut rate_limits = RateLimitQueue::default();
        rate_limits.join(0, 8);
        let second = Duration::from_secs(1);
        let far = Grant { start: now + second, takes: second, bytes: 7 };
        rate_limits.push(0, (0, 0), 1, Some(far));
        assert!(!rate_limits.may_book(0, 1) && rate_limits.may_book(0, 2));
        rate_limits.push(0, (0, 1), 1, None);
        rate_limits.push(0, (0, 2), 2, None);
        let mut refunded = Vec::new();
        rate_limits.change(now, |key, slot, booking| refunded.push((key, slot, *booking)));
        assert_eq!(refunded, [(0, 0, far)]);
        let book = |_, slot| (slot != 2).then_some(far);
        assert_eq!(rate_limits.next(now, book), Some((0, 2)), "of which the limit is gone");
        let mut booked = 0;
        let counted = |_, _| {
            booked += 1;
            Some(far)
        };
        assert_eq!(rate_limits.next(now, counted), None);
        assert_eq!((booked, rate_limits.due()), (0, Some(far.start)), "one slice at a time");
        assert_eq!((rate_limits.remove(0, 0), rate_limits.remove(0, 1)), (Some(far), None));
        rate_limits.push(0, (0, 1), 1, None);
        assert_eq!(rate_limits.next(far.start, book), Some((0, 1)), "the next one books now");
        rate_limits.push(0, (0, 3), 1, Some(far));
        let mut refunded = Vec::new();
        rate_limits.forget(0, |slot, booking| refunded.push((slot, *booking)));
        assert_eq!(refunded, [(3, far)]);
        assert_eq!((rate_limits.count, rate_limits.next(far.start, book)), (0, None));
        assert_eq!(rate_limits.due(), None);
    }
}
