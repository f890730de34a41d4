//! Checks that the IPv4 identification for which a packet's CRC is valid is near the one that its
//! sender currently uses.
//!
//! A socket does not see that field, so the check of the CRC solves for it ([`super::icrc`]) and has
//! 16 bits less than it should. Worse, what it cannot see is always at the same place: damage that
//! changes the CRC as another identification would. Some changes of a single byte do so, in packets
//! of every length. The solved identification gives that away, as senders do not choose theirs at
//! random:
//!
//! * our own kind sends 0, and the place in a train of at most 64 ([`super::icrc::train_identification`]);
//! * Linux counts up for each pair of addresses, from a random beginning (`__ip_select_ident`), and
//!   for a time without packets adds at random up to one for each tick of its clock, at most 1000 a
//!   second;
//! * adapters send a constant, or count: for each pair of addresses, or for each queue pair.
//!
//! So one is plausible when it follows the last one of its pair of addresses within [`AHEAD`], with a
//! tick for each millisecond since, or was overtaken by at most [`BEHIND`]; or the same of its queue
//! pair. The differences that the known changes of one byte make are all larger ([`AHEAD`] says which
//! is the smallest). What is left of random damage is 0.4 % for each of the two, so the check has
//! seven bits more.
//!
//! A packet that is not plausible is dropped, which is no more than a loss. The sender may have jumped
//! (many packets were lost, or its machine has started anew): when [`AGREED`] in a row agree with each
//! other and none with what was before, the last of them is taken, and what it says is the new truth.
//! Of a sender whose identifications cannot be foretold at all (its counter is shared with much else,
//! or random) every fifth packet or more would be lost, so it is believed, as before there was this
//! check. Everybody is until 32 packets have been plausible.
//!
//! Endpoints that share an address see each a part of what a sender counts, some later than others.
//! So each has a view of its own, in which identifications go up, and from which they may skip what
//! others have seen meanwhile. Counting goes on behind sixteen bits there, so that it is known how far
//! one is behind the others.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::gso_check::Segments;

/// How much further a sender may have counted, beside the ticks of its clock. Less than 231, the least
/// that any known change of one byte puts between an identification and what it seems to be: that of
/// byte 2229 of the longest packets by F9h, which makes it another one by 7F19h. Those of byte 93, in
/// packets of every length, make at least 586 (55h, by FDB6h).
const AHEAD: u32 = 192;
/// How far a packet may be overtaken.
const BEHIND: u32 = 64;
/// How many must agree in a row.
const AGREED: u32 = 4;
/// A sender whose identifications have been plausible so often is held to it.
const PROBATION: u32 = 32;
/// What one weighs that is not plausible.
const WEIGHT: u32 = 4;
/// With so much weight, a sender is not held to it any more.
const MOST_WEIGHT: u32 = 256;
/// Of the weight: the sender is held to it.
const STRICT: u32 = 1 << 31;
/// What all know is renewed only when it has moved so far, or so many milliseconds ago: other endpoints
/// look at it for every packet.
const RENEWED: i32 = 32;
const RENEWED_MS: u32 = 8;

/// The last identification, with what has been counted beyond its sixteen bits, and when it came.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastId {
    count: u32,
    at_ms: u32,
}

impl LastId {
    /// In one word, which is never 0, as no time is.
    fn pack(self) -> u64 {
        u64::from(self.count) | u64::from(self.at_ms) << 32
    }

    fn unpack(word: u64) -> Option<LastId> {
        let (count, at_ms) = (word as u32, (word >> 32) as u32);
        (at_ms != 0).then_some(LastId { count, at_ms })
    }

    /// How far the sender may have counted by now.
    fn limit(self, now_ms: u32) -> u32 {
        // Two ticks more, as both times are rounded down.
        let ticks = now_ms.wrapping_sub(self.at_ms).min(1 << 20) + 2;
        self.count.wrapping_add(AHEAD + ticks)
    }

    /// The highest count for `id` up to a limit, unless that is too far back.
    fn next(self, id: u16, limit: u32) -> Option<u32> {
        let count = limit.wrapping_sub(u32::from((limit as u16).wrapping_sub(id)));
        (is_after(count, self.count.wrapping_sub(BEHIND))).then_some(count)
    }
}

/// Whether one count is another one or comes after it.
fn is_after(count: u32, other: u32) -> bool {
    count.wrapping_sub(other) as i32 >= 0
}

/// The later of two counts.
fn later(one: u32, other: u32) -> u32 {
    if is_after(one, other) { one } else { other }
}

/// What an endpoint has seen of a pair; alone on its line of the cache.
#[derive(Debug)]
#[repr(align(64))]
struct View {
    last: AtomicU64,
    /// It was not plausible, and the next ones may agree with it.
    candidate: AtomicU64,
    /// How many have.
    agreed: AtomicU32,
    /// See [`WEIGHT`] and [`STRICT`].
    weight: AtomicU32,
}

/// State of a pair of addresses. A view is written by its endpoint only, and of the rest it does
/// not matter who writes first.
#[derive(Debug)]
pub(crate) struct Pair {
    /// The latest that any endpoint has seen.
    latest: AtomicU64,
    views: Box<[View]>,
    /// Whether packets to it may leave in trains.
    pub(crate) segments: Segments,
}

impl Pair {
    fn new(endpoints: u32) -> Pair {
        let view = || View {
            last: AtomicU64::new(0),
            candidate: AtomicU64::new(0),
            agreed: AtomicU32::new(0),
            weight: AtomicU32::new(PROBATION),
        };
        let views = (0..endpoints.max(1)).map(|_| view()).collect();
        Pair { latest: AtomicU64::new(0), views, segments: Segments::default() }
    }

    /// Judges a packet that has come to this endpoint, for a queue pair of which `own` was the last.
    pub(crate) fn check_identification(
        &self,
        endpoint: u32,
        own: &mut Option<LastId>,
        id: u16,
        now_ms: u32,
    ) -> Judgement {
        let Some(view) = self.views.get(endpoint as usize % self.views.len()) else {
            return Judgement::Plausible;
        };
        let last = LastId::unpack(view.last.load(Relaxed));
        let latest = LastId::unpack(self.latest.load(Relaxed));
        // Who has seen nothing yet follows the others.
        let last = last.or(latest);
        let count = last.and_then(|last| {
            let limit = last.limit(now_ms);
            last.next(id, latest.map_or(limit, |latest| later(limit, latest.limit(now_ms))))
        });
        let own_count = own.and_then(|own| own.next(id, own.limit(now_ms)));
        if count.is_some() || own_count.is_some() {
            if let (Some(last), Some(count)) = (last, count) {
                let count = later(count, last.count);
                view.last.store(LastId { count, at_ms: now_ms }.pack(), Relaxed);
                self.renew(latest, LastId { count, at_ms: now_ms });
            }
            let before = own.map_or(u32::from(id), |own| own.count);
            let count = own_count.unwrap_or(u32::from(id));
            let count = if own_count.is_some() { later(count, before) } else { count };
            *own = Some(LastId { count, at_ms: now_ms });
            view.note_plausible();
            return Judgement::Plausible;
        }
        let candidate = LastId::unpack(view.candidate.load(Relaxed));
        let agrees = candidate.is_some_and(|c| c.next(id, c.limit(now_ms)).is_some());
        let judgement = view.note_implausible(id, now_ms, agrees, last.is_none());
        if judgement == Judgement::Plausible {
            *own = Some(LastId { count: id.into(), at_ms: now_ms });
            let step = latest.map_or(id, |latest| id.wrapping_sub(latest.count as u16));
            let count = latest.map_or(0, |latest| latest.count).wrapping_add(step.into());
            let seen = LastId { count, at_ms: now_ms };
            view.last.store(seen.pack(), Relaxed);
            self.latest.store(seen.pack(), Relaxed);
        }
        judgement
    }

    fn renew(&self, latest: Option<LastId>, seen: LastId) {
        let stale = latest.is_none_or(|latest| {
            let moved = seen.count.wrapping_sub(latest.count) as i32;
            moved >= RENEWED || moved >= 0 && seen.at_ms.wrapping_sub(latest.at_ms) >= RENEWED_MS
        });
        if stale {
            self.latest.store(seen.pack(), Relaxed);
        }
    }
}

impl View {
    fn note_plausible(&self) {
        if self.candidate.load(Relaxed) != 0 {
            self.candidate.store(0, Relaxed);
        }
        match self.weight.load(Relaxed) {
            STRICT => {}
            0 => self.weight.store(STRICT, Relaxed),
            weight => self.weight.store(weight - 1, Relaxed),
        }
    }

    /// One that follows nothing: it may be the first of all, or agree with the ones before.
    fn note_implausible(&self, id: u16, now_ms: u32, agrees: bool, first: bool) -> Judgement {
        let agreed = if agrees { self.agreed.load(Relaxed) + 1 } else { 1 };
        let weight = self.weight.load(Relaxed);
        let strict = weight & STRICT != 0;
        if !strict || agreed >= AGREED {
            self.candidate.store(0, Relaxed);
            if !strict && !first {
                self.weight.store((weight + WEIGHT).min(MOST_WEIGHT), Relaxed);
            }
            return Judgement::Plausible;
        }
        self.candidate.store(LastId { count: id.into(), at_ms: now_ms }.pack(), Relaxed);
        self.agreed.store(agreed, Relaxed);
        let weight = (weight & !STRICT) + WEIGHT;
        if weight >= MOST_WEIGHT {
            self.weight.store(MOST_WEIGHT, Relaxed);
            return Judgement::Erratic;
        }
        self.weight.store(weight | STRICT, Relaxed);
        Judgement::Implausible
    }
}

/// Result of the check of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Judgement {
    /// Its sender may well have chosen that identification.
    Plausible,
    /// It is damaged, or its sender has jumped.
    Implausible,
    /// The same, and for the last time: its sender cannot be held to anything.
    Erratic,
}

/// The pairs of addresses between which there are queue pairs, at all endpoints of a group. As many
/// as there are queue pairs, at most.
#[derive(Debug)]
pub(crate) struct Pairs {
    start: Instant,
    endpoints: u32,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    pairs: BTreeMap<(IpAddr, IpAddr), Weak<Pair>>,
    /// With so many, those that are not used any more are looked for.
    most: usize,
}

impl Pairs {
    /// For so many endpoints.
    pub(crate) fn new(endpoints: u32) -> Pairs {
        Pairs { start: Instant::now(), endpoints, known: Mutex::default() }
    }

    /// The pair of a new connection.
    pub(crate) fn of(&self, from: IpAddr, to: IpAddr) -> Arc<Pair> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(pair) = known.pairs.get(&(from, to)).and_then(Weak::upgrade) {
            return pair;
        }
        if known.pairs.len() >= known.most {
            known.pairs.retain(|_, pair| pair.strong_count() > 0);
            known.most = known.pairs.len() * 2 + 16;
        }
        let pair = Arc::new(Pair::new(self.endpoints));
        known.pairs.insert((from, to), Arc::downgrade(&pair));
        pair
    }

    /// The pair of connections that there are.
    pub(crate) fn known(&self, from: IpAddr, to: IpAddr) -> Option<Arc<Pair>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.pairs.get(&(from, to)).and_then(Weak::upgrade)
    }

    /// Milliseconds on the clock of all pairs. It comes round after 49 days; who has been silent for
    /// as long is believed anything. It is never 0.
    pub(crate) fn clock_ms(&self, now: Instant) -> u32 {
        let passed = now.saturating_duration_since(self.start);
        (passed.as_secs() as u32).wrapping_mul(1000).wrapping_add(passed.subsec_millis() + 1).max(1)
    }
}

#[cfg(test)]
mod tests;
