//! Limits for connections without an admitted host: their share of a reactor, and eviction.
//!
//! Any peer can hold receives and a queue pair until the Connect deadline, or for as long as it likes as a
//! host of discovery or of a subsystem that admits any host. So what such connections hold of the
//! receives and queue pairs that named hosts leave is bounded: half for one source, three quarters for
//! all. At that limit the oldest connection without a Connect for [`IDLE`] is closed, or else the oldest
//! of the source that holds the most, so that a host that completes its next step within a round trip is
//! served amid a flood, and soon after one.
//!
//! The cost of a request is bounded as well. Connections are counted for one request at a time: the
//! others wait in a fair queue over sources, and the count is repeated only when a connection has closed
//! or a deadline has passed. A connection that its host has confirmed is closed before one that it has
//! not, which has [`CONFIRMATION`] for that: only confirmed connections are charged to their source
//! ([`rdma::source::SourcePenalty`]), and a busy reactor would read the confirmation too late. But one
//! that was confirmed just now is closed last: its host is about to send its Connect, and others may
//! forge its address.
//!
//! The number of connections without confirmation is bounded by [`limits`], whatever they hold.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use nvme::cm;
use rdma::limits::{self, DISPLACEMENT};
use rdma::{FabricHints, Incoming, Qp, Source};

use super::{PollGroup, Resources};
use crate::diag::cause::{Cause, DisconnectRecord};
use crate::message::PlacedRequest;
use crate::qpair::{QueuePair, RECEIVES_FOR_ADMIN};

/// How long a host has to confirm a connection before it may be displaced; and to send its Connect, while
/// others are displaced instead.
const CONFIRMATION: Duration = Duration::from_millis(100);
/// How long a connection without a Connect may hold what others need. What a flood from many sources
/// leaves would otherwise be theirs until the Connect deadline.
const IDLE: Duration = Duration::from_secs(1);
/// Connections that are opened within [`DISPLACEMENT`], at most: on an adapter each costs system
/// calls, and commands of others wait meanwhile.
const MOST_OPENED: u32 = 8;
/// Requests to connect that wait for room, at most.
const MOST_DEFERRED: usize = 256;

/// Resources held by the connections of one source without an admitted host.
#[derive(Default)]
struct Share {
    held: u32,
    /// Those that are not being closed.
    open: u32,
    /// What it holds beyond the promises to its controllers: hosts open all their connections
    /// before the first Connect, which is not a flood.
    excess: u32,
    /// The oldest of them that is open: a confirmed one, if there is any.
    oldest: Option<Oldest>,
    /// The oldest of those without a Connect for [`IDLE`].
    idle: Option<Oldest>,
    /// Number of those that are not confirmed, and the oldest of them.
    half_open: usize,
    oldest_half_open: Option<Oldest>,
}

/// Order in which connections are displaced.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Oldest {
    rank: Rank,
    opened: Instant,
    qp: Qp,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Confirmed,
    Unconfirmed,
    NewConfirmed,
    NewUnconfirmed,
}

impl Rank {
    fn of(queue: &QueuePair, now: Instant) -> Rank {
        match (now < queue.opened() + CONFIRMATION, queue.is_confirmed()) {
            (false, true) => Rank::Confirmed,
            (false, false) => Rank::Unconfirmed,
            (true, true) => Rank::NewConfirmed,
            (true, false) => Rank::NewUnconfirmed,
        }
    }
}

/// Resources of a reactor that connections hold, each counted by the resource of which it holds the
/// larger part: its receives, or its queue pair.
struct Census {
    /// Number of receives.
    most: u32,
    /// Those of identified hosts, and of I/O queues promised to controllers. (The registry bounds
    /// its promises to hosts that are not identified.)
    named: u32,
    /// Those of the others, without connections that are being closed.
    open: u32,
    closing: u32,
    shares: BTreeMap<Source, Share>,
    /// Receives promised to controllers, by source.
    promised: BTreeMap<Source, u32>,
}

impl Census {
    fn take(queues: &PollGroup, queue_pairs_max: u32, lent: &Resources<'_>) -> Census {
        let receives = lent.pool.plan().receives;
        let least = receives.div_ceil(queue_pairs_max.max(1));
        let promised = lent.shared.registry.reserved_receives(lent.now);
        let (named, open, closing, shares) = (0, 0, 0, BTreeMap::new());
        let mut census = Census { most: receives, named, open, closing, shares, promised };
        for queue in queues.queues.iter().flatten() {
            let weight = u32::from(queue.depth()).max(least);
            if !queue.is_anonymous() {
                census.named += weight;
                continue;
            }
            let share = census.shares.entry(queue.source().into()).or_default();
            share.held += weight;
            match queue.is_closing() {
                true => census.closing += weight,
                false => {
                    share.open += weight;
                    let (rank, opened) = (Rank::of(queue, lent.now), queue.opened());
                    let this = Oldest { rank, opened, qp: queue.qp() };
                    let first = |oldest: Option<_>| Some(oldest.map_or(this, |at| this.min(at)));
                    share.oldest = first(share.oldest);
                    if queue.association().is_none() && opened + IDLE <= lent.now {
                        share.idle = first(share.idle);
                    }
                    if queue.is_half_open() {
                        share.half_open += 1;
                        share.oldest_half_open = first(share.oldest_half_open);
                    }
                }
            }
        }
        census.settle_promises();
        census
    }

    fn settle_promises(&mut self) {
        for (source, share) in &mut self.shares {
            let promised = self.promised.get(source).copied().unwrap_or(0);
            share.excess = share.held.saturating_sub(promised);
            let kept = promised.min(share.open);
            self.named += kept;
            self.open += share.open - kept;
        }
    }

    /// Whether the controllers of a source were promised more than it holds.
    fn is_promised_more(&self, source: Source) -> bool {
        let held = self.shares.get(&source).map_or(0, |share| share.held);
        self.promised.get(&source).is_some_and(|promised| held < *promised)
    }

    /// Returns the receives not needed by identified hosts.
    fn left(&self) -> u32 {
        self.most.saturating_sub(self.named)
    }

    /// Returns the half-open connection to close for a further one of a source, if there are too
    /// many, whatever the source was promised: its address may be forged.
    fn oldest_half_open(&self, source: Source) -> Option<Oldest> {
        let all: usize = self.shares.values().map(|share| share.half_open).sum();
        let own = self.shares.get(&source);
        let crowded = match own.is_some_and(|own| own.half_open >= limits::HALF_OPEN_PER_SOURCE) {
            true => own,
            false if all >= limits::HALF_OPEN => {
                self.shares.values().max_by_key(|share| share.half_open)
            }
            false => None,
        };
        crowded.and_then(|share| share.oldest_half_open)
    }

    /// Returns the connection to close for one of another source, of sources that hold more than
    /// they were promised: the oldest without a Connect for [`IDLE`], or else that of the source
    /// which holds the most; of several the one with the oldest connection.
    fn oldest(&self) -> Option<Oldest> {
        let shares = || self.shares.values().filter(|share| share.excess > 0);
        let idle = shares().filter_map(|share| share.idle).min();
        let largest = || {
            let oldest = shares().filter_map(|share| Some((share.excess, share.oldest?)));
            oldest.max_by_key(|(excess, oldest)| (*excess, Reverse(oldest.opened)))
        };
        idle.or_else(|| largest().map(|(_, oldest)| oldest))
    }
}

impl PollGroup {
    /// Makes room for a request, if needed. The error is the time of the next attempt: room was
    /// made just before, closed connections are not destroyed yet, or the oldest may still be
    /// confirmed.
    pub(super) fn look_for_room(
        &mut self,
        incoming: &Incoming,
        lent: &mut Resources<'_>,
    ) -> Result<(), Instant> {
        if lent.now.saturating_duration_since(self.opened.0) >= DISPLACEMENT {
            self.opened = (lent.now, 0);
        }
        if self.opened.1 >= MOST_OPENED {
            return Err(self.opened.0 + DISPLACEMENT);
        }
        let FabricHints { connections_exhausted, queue_pairs_max, .. } = lent.fabric.hints();
        if connections_exhausted {
            return Err(lent.now + DISPLACEMENT);
        }
        let source = Source::from(incoming.remote.ip());
        let census = Census::take(self, queue_pairs_max, lent);
        let left = census.left();
        if census.closing > 0 && census.open + census.closing >= left / 8 * 7 {
            return Err(lent.now + DISPLACEMENT);
        }
        // The promises may exhaust the resources.
        let is_short = census.is_promised_more(source) && self.is_short(queue_pairs_max, lent);
        if is_short && census.closing > 0 {
            return Err(lent.now + DISPLACEMENT);
        }
        let own = census.shares.get(&source);
        let oldest = match own.filter(|own| own.excess > 0 && own.excess >= left / 2) {
            Some(own) => own.oldest,
            None if is_short || census.open >= left / 4 * 3 => census.oldest(),
            None => None,
        };
        let Some(oldest) = oldest.or_else(|| census.oldest_half_open(source)) else {
            return Ok(());
        };
        let is_new = oldest.rank == Rank::NewUnconfirmed;
        let ripe = if is_new { oldest.opened + CONFIRMATION } else { lent.now };
        let until = self.next_displacement.max(ripe);
        if lent.now < until {
            return Err(until);
        }
        self.next_displacement = lent.now + DISPLACEMENT;
        if let Some(key) = self.key(oldest.qp)
            && let Some((queue, mut io)) = self.queue(key, lent)
        {
            queue.displace(&mut io);
        }
        match is_short {
            true => Err(self.next_displacement),
            false => Ok(()),
        }
    }

    /// Whether there is no room for an I/O queue of the maximum size.
    fn is_short(&self, queue_pairs_max: u32, lent: &Resources<'_>) -> bool {
        let (_, receives, _) = lent.pool.free();
        receives < u32::from(self.limits.queue_depth) + RECEIVES_FOR_ADMIN
            || self.count >= queue_pairs_max as usize
    }

    /// Rejects a request for which there is no room, because others need what becomes free.
    pub(super) fn refuse(
        &mut self,
        PlacedRequest { incoming, .. }: PlacedRequest,
        lent: &mut Resources<'_>,
    ) {
        self.record_refusal(
            DisconnectRecord::nameless(Cause::NoRoom, incoming.remote, incoming.local),
            lent,
        );
        let reject = cm::Reject::new(cm::RejectStatus::NO_RESOURCES);
        lent.fabric.reject(incoming, &reject.emit());
    }

    /// Suspends the search for room until then, unless a connection closes.
    pub(super) fn wait_for_room(&mut self, until: Instant) {
        self.full_until = Some(until);
        self.next_tick = self.next_tick.min(until);
    }

    /// Defers a request until there is room. If there are too many, the oldest of a source that has
    /// its share is rejected.
    pub(super) fn defer(&mut self, request: PlacedRequest, lent: &mut Resources<'_>) {
        let source = Source::from(request.incoming.remote.ip());
        self.deferred.push(source, request);
        if self.deferred.len() > MOST_DEFERRED
            && let Some(refused) = self.deferred.displace(source)
        {
            self.refuse(refused, lent);
        }
    }

    /// Opens deferred connections for which there is room now.
    pub(super) fn admit_deferred(&mut self, lent: &mut Resources<'_>) {
        if self.deferred.is_empty() {
            return;
        }
        if let Some(until) = self.full_until.filter(|until| lent.now < *until) {
            return self.wait_for_room(until);
        }
        while let Some(request) = self.deferred.pop() {
            let source = Source::from(request.incoming.remote.ip());
            if self.penalties.is_blocked(lent.now, source) {
                self.refuse(request, lent);
                continue;
            }
            match self.look_for_room(&request.incoming, lent) {
                Ok(()) => self.open(request, lent),
                Err(until) => {
                    self.deferred.put_back(source, request);
                    return self.wait_for_room(until);
                }
            }
        }
    }
}
