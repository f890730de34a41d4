//! What reactors share without locks, used by several threads at once. Run under Miri as well
//! (`make miri`), which tries other interleavings and weak memory for each seed.

use std::sync::Barrier;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use nvmfd::blockdev::DeviceId;
use nvmfd::core::message::{Mailbox, mailbox};
use nvmfd::core::sched::range_lock::{RangeLock, RangeLocks};
use nvmfd::core::subsystem::rate_limit::{Limit, Limiter};

const THREADS: u64 = 3;
/// Miri interprets: some thousand times slower.
const ROUNDS: u64 = if cfg!(miri) { 12 } else { 20_000 };

/// Bookings of a thread, which are short: fewer can pass in one time slice, where nothing races.
const BOOKINGS: u64 = if cfg!(miri) { ROUNDS } else { 400_000 };

/// Behind it all threads are there: else the first has ended before the last begins.
fn barrier() -> Barrier {
    Barrier::new(usize::try_from(THREADS).unwrap())
}

#[test]
fn concurrent_bookings_of_a_rate_limit_are_all_counted() {
    let now = Instant::now();
    let limit = Limit { iops: Some(1_000), bandwidth: None, burst_ms: 0 };
    let limiter = Limiter::new(limit, now);
    let start = barrier();
    let starts: Vec<Instant> = thread::scope(|scope| {
        let booking = || {
            start.wait();
            (0..BOOKINGS).map(|_| limiter.book(now, 0).start).collect::<Vec<_>>()
        };
        let threads: Vec<_> = (0..THREADS).map(|_| scope.spawn(booking)).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    let mut starts: Vec<_> = starts.into_iter().map(|start| start - now).collect();
    starts.sort();
    let each: Vec<_> = (0..THREADS * BOOKINGS).map(Duration::from_millis).collect();
    assert_eq!(starts, each, "one command a millisecond, each at a time of its own");
}

#[test]
fn concurrent_refunds_of_a_rate_limit_are_applied_once() {
    let now = Instant::now();
    let limit = Limit { iops: Some(1_000), bandwidth: None, burst_ms: 0 };
    let (limiter, start) = (&Limiter::new(limit, now), &barrier());
    thread::scope(|scope| {
        for thread in 0..THREADS {
            scope.spawn(move || {
                start.wait();
                for _ in 0..ROUNDS {
                    let _ = limiter.book(now, 0);
                    if thread == 0 {
                        limiter.give_back(now, 0);
                    }
                }
            });
        }
    });
    let kept = (THREADS - 1) * ROUNDS;
    assert_eq!(limiter.book(now, 0).start - now, Duration::from_millis(kept));
}

/// A reactor as `target/tests/poll_group.rs` drives it: what it has at the device, claimed or not.
struct Reactor<'a> {
    number: usize,
    exclusion: &'a RangeLocks,
    mailbox: Mailbox,
    round: u32,
    /// A change is at the device, and began without a lock; the ticket, once it is locked.
    is_begun: bool,
    begun: Option<u64>,
}

impl Reactor<'_> {
    /// When somebody has rung.
    fn look(&mut self) {
        if !self.mailbox.hush() {
            return;
        }
        let round = self.exclusion.round();
        if round != self.round {
            self.round = round;
            let begun = self.is_begun && self.begun.is_none();
            let lock = || self.exclusion.claim_begun(self.range(false));
            self.begun = begun.then(lock).or(self.begun);
            self.exclusion.settle();
        }
    }

    fn range(&self, alone: bool) -> RangeLock {
        RangeLock { backing: DeviceId(0), at: 0, len: 512, alone, reactor: self.number }
    }

    fn claim(&mut self, alone: bool) -> u64 {
        let (ticket, mut granted) = self.exclusion.claim(self.range(alone));
        while !granted {
            self.look();
            thread::yield_now();
            granted = self.exclusion.is_granted(ticket);
        }
        ticket
    }

    /// Changes the block, by a claim where one is asked for.
    fn change(&mut self, block: &AtomicU64) {
        self.look();
        if self.exclusion.is_watching(DeviceId(0)) {
            let ticket = self.claim(false);
            block.fetch_add(1 << 32, Ordering::Relaxed);
            self.exclusion.give_up(ticket);
            return;
        }
        self.is_begun = true;
        thread::yield_now();
        // The reactor may look in the time that the device takes.
        self.look();
        block.fetch_add(1 << 32, Ordering::Relaxed);
        self.is_begun = false;
        self.begun.take().into_iter().for_each(|ticket| self.exclusion.give_up(ticket));
    }

    /// Compare and Write, as one step for everybody else.
    fn swap(&mut self, block: &AtomicU64) {
        self.look();
        let ticket = self.claim(true);
        let read = block.load(Ordering::Relaxed);
        thread::yield_now();
        block.store(read + 1, Ordering::Relaxed);
        self.exclusion.give_up(ticket);
    }
}

#[test]
fn no_change_is_lost_between_compare_and_write() {
    let (wakers, mailboxes): (Vec<_>, Vec<_>) = (0..THREADS)
        .map(|_| mailbox().unwrap())
        .map(|(sender, mailbox)| (sender.waker(), mailbox))
        .unzip();
    let (exclusion, start) = (&RangeLocks::new(wakers), &barrier());
    let (block, swaps, done) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU32::new(0));
    thread::scope(|scope| {
        for (number, mailbox) in mailboxes.into_iter().enumerate() {
            let (block, swaps, done) = (&block, &swaps, &done);
            scope.spawn(move || {
                let (round, is_begun, begun) = (0, false, None);
                let mut reactor = Reactor { number, exclusion, mailbox, round, is_begun, begun };
                start.wait();
                for step in 0..ROUNDS {
                    match step % 5 == number as u64 {
                        true => {
                            reactor.swap(block);
                            swaps.fetch_add(1, Ordering::Relaxed);
                        }
                        false => reactor.change(block),
                    }
                }
                // A reactor continues to poll until the others have ended.
                done.fetch_add(1, Ordering::Relaxed);
                while u64::from(done.load(Ordering::Relaxed)) < THREADS {
                    reactor.look();
                    thread::yield_now();
                }
            });
        }
    });
    let swaps = swaps.into_inner();
    let changes = THREADS * ROUNDS - swaps;
    assert_eq!(block.into_inner(), (changes << 32) + swaps);
}
