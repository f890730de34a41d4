//! Checks that the IPv4 identification for which a packet's CRC is valid is near the one that its
//! sender currently uses.
//!
//! A socket does not see that field, so the check of the CRC solves for it ([`super::icrc`]) and
//! has 16 bits less. Moreover, the undetected damage is always the same: damage that changes the
//! CRC as another identification would. Some changes of a single byte do so, in packets of every
//! length. The solved identification reveals that, because senders do not choose theirs at random:
//!
//! * this implementation sends 0, and the place in a train of at most 64
//!   ([`super::icrc::train_identification`]);
//! * Linux counts up for each pair of addresses, from a random start (`__ip_select_ident`), and
//!   after a time without packets adds a random number, up to one for each tick of its clock, at
//!   most 1000 a second;
//! * adapters send a constant, or count: for each pair of addresses, or for each queue pair.
//!
//! So an identification is plausible if it follows the last one of its pair of addresses within
//! [`AHEAD`], plus a tick for each millisecond since, or was overtaken by at most [`BEHIND`]; or
//! the same of its queue pair. The differences caused by the known changes of one byte are all
//! larger ([`AHEAD`] documents the smallest). The remaining probability for random damage is 0.4 %
//! for each of the two, so the check has seven bits more.
//!
//! An implausible packet is dropped, which counts as a loss. The sender may have skipped numbers
//! (many packets were lost, or its machine has restarted): when [`AGREED`] consecutive packets
//! agree with each other and none with the previous ones, the last of them is accepted, and its
//! identification is the new reference. If the identifications of a sender cannot be predicted at
//! all (its counter is shared with other traffic, or random), every fifth packet or more would be
//! lost, so its packets are accepted without this check. So are the first 32 plausible packets of
//! every sender.
//!
//! Each endpoint of an address sees a part of what a sender counts, some later than others. So each
//! has a view of its own, in which identifications increase, and may skip those that others have
//! seen meanwhile. Views count beyond sixteen bits, so that the distance between endpoints is
//! known.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Instant;

use super::gso_check::Segments;

/// How much further a sender may have counted, in addition to the ticks of its clock. Less than
/// 231, the smallest difference between an identification and the one it seems to be after a known
/// change of one byte: that of byte 2229 of the longest packets by F9h, which makes it another one
/// by 7F19h. Those of byte 93, in packets of every length, make at least 586 (55h, by FDB6h).
const AHEAD: u32 = 192;
/// How far a packet may be overtaken.
const BEHIND: u32 = 64;
/// Consecutive packets that must agree.
const AGREED: u32 = 4;
/// After this many plausible packets the check applies to a sender.
const PROBATION: u32 = 32;
/// Weight of an implausible packet.
const WEIGHT: u32 = 4;
/// At this weight the check no longer applies to a sender.
const MOST_WEIGHT: u32 = 256;
/// Flag in the weight: the check applies to the sender.
const STRICT: u32 = 1 << 31;
/// The shared state is updated only after a change by this number, or after as many milliseconds,
/// because other endpoints read it for every packet.
const RENEWED: i32 = 32;
const RENEWED_MS: u32 = 8;

/// The last identification, counted beyond its sixteen bits, and its time.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct LastId {
    count: u32,
    at_ms: u32,
}

impl LastId {
    /// Packed in one word, which is never 0, because no time is 0.
    fn pack(self) -> u64 {
        u64::from(self.count) | u64::from(self.at_ms) << 32
    }

    fn unpack(word: u64) -> Option<LastId> {
        let (count, at_ms) = (word as u32, (word >> 32) as u32);
        (at_ms != 0).then_some(LastId { count, at_ms })
    }

    /// The highest count that the sender may have reached by now.
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

/// Whether a count equals or follows another one.
fn is_after(count: u32, other: u32) -> bool {
    count.wrapping_sub(other) as i32 >= 0
}

/// The later of two counts.
fn later(one: u32, other: u32) -> u32 {
    if is_after(one, other) { one } else { other }
}

/// An endpoint's view of a pair; on a cache line of its own.
#[derive(Debug)]
#[repr(align(64))]
struct View {
    last: AtomicU64,
    /// The last implausible one, with which the next ones may agree.
    candidate: AtomicU64,
    /// Number of consecutive ones that agree.
    agreed: AtomicU32,
    /// See [`WEIGHT`] and [`STRICT`].
    weight: AtomicU32,
}

/// State of a pair of addresses. A view is written by its endpoint only, the rest by any, in any
/// order.
#[derive(Debug)]
pub(crate) struct Pair {
    /// The latest one seen by any endpoint.
    latest: AtomicU64,
    views: Box<[View]>,
    /// Whether trains are used on this path.
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

    /// Checks a packet received by this endpoint; `own` is the last one of its queue pair.
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
        // An endpoint without a view starts with that of the others.
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

    /// An implausible one: it may be the first one, or agree with those before.
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
    /// The sender may have chosen that identification.
    Plausible,
    /// The packet is damaged, or its sender has skipped numbers.
    Implausible,
    /// As `Implausible`, for the last time: the check no longer applies to this sender.
    Erratic,
}

/// The pairs of addresses with queue pairs, at all endpoints of a group. At most as many as queue
/// pairs.
#[derive(Debug)]
pub(crate) struct Pairs {
    start: Instant,
    endpoints: u32,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    pairs: BTreeMap<(IpAddr, IpAddr), Weak<Pair>>,
    /// Size at which unused pairs are removed.
    most: usize,
}

impl Pairs {
    /// For this number of endpoints.
    pub(crate) fn new(endpoints: u32) -> Pairs {
        Pairs { start: Instant::now(), endpoints, known: Mutex::default() }
    }

    /// The pair of a new connection; created if needed.
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

    /// The pair of existing connections.
    pub(crate) fn known(&self, from: IpAddr, to: IpAddr) -> Option<Arc<Pair>> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.pairs.get(&(from, to)).and_then(Weak::upgrade)
    }

    /// Milliseconds on the clock of all pairs, never 0. It wraps after 49 days; after such a
    /// silence any identification is accepted.
    pub(crate) fn clock_ms(&self, now: Instant) -> u32 {
        let passed = now.saturating_duration_since(self.start);
        (passed.as_secs() as u32).wrapping_mul(1000).wrapping_add(passed.subsec_millis() + 1).max(1)
    }
}

#[cfg(test)]
mod tests;
