//! Connection management: its messages and its state, except for the connections (IBTA volume 1,
//! 12.9 "Communication management state machines"; annex A11 "RDMA IP CM Service"). `soft/endpoint`
//! drives it.

pub mod connection;
pub mod mad;
pub mod message;
pub(super) mod request_handle;
pub(super) mod request_key;
pub(super) mod retransmit;

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};

use super::config::Config;
use super::lookup::Table;
use crate::Source;
use crate::limits::DISPLACEMENT;
use crate::source::SourcePenalty;
use crate::wire::psn::Qpn;
use connection::{ConnectRequest, Connection, Phase};
use request_handle::{RequestState, RequestUpdates, Token};
use request_key::{RequestKey, RequestTable};
use retransmit::CmRetransmitter;

/// Maximum of requests that wait for evidence that an old connection is alive.
const MAX_STALE_CANDIDATES: usize = 256;
/// Number of ended connections that are remembered, so that a late request is not taken for a new
/// one. Those that peers never confirmed are not: a peer that misses our reply repeats its request.
const MAX_ENDED: usize = 1024;
/// Time for which a half-open connection is not evicted by later ones of the same source: several
/// round trips of a local network. So no source creates more than some thousands a second.
const UNDISTURBED: Duration = Duration::from_millis(20);
/// Unsolicited messages to unconfirmed peers, at most, and the interval at which one more is allowed.
/// Their addresses may be forged, so the limit is for all of them together.
const MAX_UNSOLICITED: u32 = 32;
const UNSOLICITED_INTERVAL: Duration = Duration::from_millis(125);
/// How long after a flood no unsolicited message is sent to unconfirmed peers.
const FLOOD_MEMORY: Duration = Duration::from_secs(10);

/// A connection that a peer has requested and not confirmed.
#[derive(Debug)]
pub(super) struct HalfOpen {
    /// Our communication id, once the user has created a queue pair.
    pub(super) comm: Option<u32>,
    /// The peer has answered a message, so its address is not forged.
    pub(super) proven: bool,
    /// When it began here; none before its user has answered, when it came through another
    /// endpoint.
    pub(super) since: Option<Instant>,
    /// Messages of the peer less messages to it. In a flood, nothing is sent that exceeds it.
    pub(super) credit: u32,
    /// State of the request at its user.
    pub(super) token: Token,
    /// To be rejected if the user drops it.
    pub(super) request: ConnectRequest,
}

impl HalfOpen {
    /// For a request, whose credit is one message. (An answer to a challenge has the same, as the
    /// challenge was sent for it.)
    pub(super) fn new(
        request: &ConnectRequest,
        proven: bool,
        updates: &RequestUpdates,
    ) -> HalfOpen {
        HalfOpen {
            comm: None,
            proven,
            since: None,
            credit: 1,
            token: Token::new(request.key(), updates.clone()),
            request: *request,
        }
    }
}

/// A request whose sender has to answer a message first.
#[derive(Debug)]
pub(super) struct Challenge {
    pub(super) request: ConnectRequest,
    /// Communication ids, ours and the peer's, of the connection in the challenge. It does not exist, and
    /// only a receiver of the challenge knows them.
    pub(super) names: (u32, u32),
    /// Reserved with the challenge: were the turn to displace a connection taken with the answer, all
    /// requests challenged before the first answer would be challenged for nothing.
    pub(super) room: Room,
    pub(super) since: Instant,
}

/// Room for a half-open connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Room {
    /// The table has room, or displaces an entry of a source with a larger share.
    Free,
    /// In place of a connection of a source that has no larger share.
    Displacing,
}

/// A request from a queue pair that has a connection.
#[derive(Debug)]
pub(super) struct StaleCandidate {
    pub(super) request: ConnectRequest,
    /// Our communication id of that connection.
    pub(super) old: u32,
    pub(super) since: Instant,
}

/// State of connection management, except for the connections.
pub(super) struct ConnectionManager {
    pub(super) listeners: Vec<SocketAddr>,
    /// Live connections that peers have asked for, by their requests.
    pub(super) by_request: BTreeMap<RequestKey, u32>,
    /// Live connections by address, adapter and queue pair of the peer.
    pub(super) by_peer: BTreeMap<(IpAddr, u64, Qpn), u32>,
    pub(super) half_open: RequestTable<HalfOpen>,
    /// Number of those that are not proven.
    pub(super) unverified: usize,
    pub(super) challenges: RequestTable<Challenge>,
    pub(super) challenges_by_name: Table<u32, RequestKey>,
    /// Requests from queue pairs that have a connection.
    pub(super) stale_candidates: RequestTable<StaleCandidate>,
    /// Our communication ids of displaced connections that still have a queue pair.
    pub(super) displaced: Vec<u32>,
    /// When a half-open connection may next be displaced for a source with an equal share.
    next_displacement: Option<Instant>,
    /// Connections that ended recently.
    pub(super) ended: RequestTable<()>,
    /// Connections that were established recently at other endpoints, by requests that arrived here.
    pub(super) elsewhere: RequestTable<()>,
    /// Penalties of sources whose connections were established and never used, by requests that arrived
    /// here.
    pub(super) penalties: SourcePenalty,
    /// Source address of the last request that was dropped because of a penalty.
    pub(super) barred: Option<IpAddr>,
    /// Penalties of sources that were challenged and have not answered since.
    pub(super) unanswered: SourcePenalty,
    pub(super) retries: CmRetransmitter,
    /// Updates of half-open connections whose requests users hold, here or at other endpoints.
    pub(super) updates: RequestUpdates,
    /// End of the flood, at the latest.
    pub(super) flood_until: Option<Instant>,
    /// Unsolicited messages that may still be sent to unconfirmed peers, and since when.
    pub(super) unsolicited: u32,
    unsolicited_since: Option<Instant>,
}

impl ConnectionManager {
    pub(super) fn new(config: &Config) -> ConnectionManager {
        let unanswered = u32::try_from(config.half_open_per_source).ok();
        ConnectionManager {
            listeners: Vec::new(),
            by_request: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            half_open: RequestTable::new(config.half_open),
            unverified: 0,
            challenges: RequestTable::new(config.challenges),
            challenges_by_name: Table::default(),
            stale_candidates: RequestTable::new(MAX_STALE_CANDIDATES),
            displaced: Vec::new(),
            next_displacement: None,
            ended: RequestTable::new(MAX_ENDED),
            elsewhere: RequestTable::new(MAX_ENDED),
            penalties: SourcePenalty::new(config.vain_per_source),
            barred: None,
            unanswered: SourcePenalty::new(unanswered),
            retries: CmRetransmitter::default(),
            updates: RequestUpdates::default(),
            flood_until: None,
            unsolicited: MAX_UNSOLICITED,
            unsolicited_since: None,
        }
    }

    /// Removes a connection from the half-open ones.
    pub(super) fn forget_half_open(&mut self, key: &RequestKey) -> Option<HalfOpen> {
        let half = self.half_open.remove(key)?;
        self.unverified -= usize::from(!half.proven);
        Some(half)
    }

    /// Room for one more half-open connection of a source, if need be in place of its oldest: those
    /// before may be forged, and the owner of the address may be the last to connect. Displacements
    /// among sources with equal shares are bounded in time: otherwise a busy target displaces
    /// connections before it reads their confirmations, and so penalizes none of their sources.
    pub(super) fn room(&self, now: Instant, source: Source, most: usize) -> Option<Room> {
        let own = self.half_open.count_of(source);
        // Another source still has more once one of its connections has made room for this one.
        let is_balancing = own + 1 < self.half_open.largest_share();
        if own < most && (!self.half_open.is_full() || is_balancing) {
            return Some(Room::Free);
        }
        let is_due = self.next_displacement.is_none_or(|next| next <= now);
        (is_due && self.may_displace(now, source, most)).then_some(Room::Displacing)
    }

    fn may_displace(&self, now: Instant, source: Source, most: usize) -> bool {
        may_add(&self.half_open, now, source, most, |half| half.since)
    }

    /// Makes room for one more half-open connection of a source; false when there is none.
    /// `reserved`: the room that was reserved when its request was challenged.
    pub(super) fn make_room(
        &mut self,
        now: Instant,
        source: Source,
        most: usize,
        reserved: Option<Room>,
    ) -> bool {
        let has_share = self.half_open.count_of(source) >= most;
        if !has_share && !self.half_open.is_full() {
            return true;
        }
        self.note_flood(now);
        match self.room(now, source, most) {
            Some(room) => self.reserve(now, room),
            None if reserved == Some(Room::Displacing) && self.may_displace(now, source, most) => {}
            None => return false,
        }
        if has_share && let Some((key, _)) = self.half_open.oldest(source) {
            let comm = self.forget_half_open(&key).and_then(|half| half.comm);
            self.displaced.extend(comm);
        }
        true
    }

    /// Whether a source may be challenged once more. Challenges that were sent before the owner of a
    /// forged address was there stay unanswered, and must not keep it out for their timeout.
    pub(super) fn may_challenge(&self, now: Instant, source: Source, most: usize) -> bool {
        may_add(&self.challenges, now, source, most, |challenge| Some(challenge.since))
    }

    /// Adds a challenge until `until`; a source that has `most` loses its oldest.
    pub(super) fn add_challenge(&mut self, challenge: Challenge, most: usize, until: Instant) {
        let (key, source) = (challenge.request.key(), challenge.request.from.into());
        self.challenges_by_name.insert(challenge.names.0, key);
        let has_share = self.challenges.count_of(source) >= most;
        let own = if has_share { self.challenges.remove_oldest(source) } else { None };
        let other = self.challenges.insert(key, challenge, Some(until));
        for (_, displaced) in own.into_iter().chain(other) {
            self.challenges_by_name.remove(&displaced.names.0);
        }
    }

    /// Takes the turn to displace a connection, if that is needed; the next turn is later.
    pub(super) fn reserve(&mut self, now: Instant, room: Room) {
        if room == Room::Displacing {
            self.next_displacement = Some(now + DISPLACEMENT);
        }
    }

    /// Records that there are more requests than can be served at once.
    pub(super) fn note_flood(&mut self, now: Instant) {
        self.flood_until = Some(now + FLOOD_MEMORY);
    }

    /// Records the new state of a request that arrived here and whose queue pair is elsewhere, for
    /// `patience`, so that repetitions are recognized. Returns a request that its user has dropped.
    pub(super) fn apply_updates(
        &mut self,
        key: RequestKey,
        now: Instant,
        patience: Duration,
    ) -> Option<HalfOpen> {
        // The last of several with one key is valid; it may be new and have no update yet.
        let half = self.half_open.get(&key).filter(|half| half.comm.is_none())?;
        let stage = half.token.stage();
        if matches!(stage, RequestState::Asked | RequestState::Opened) {
            return None;
        }
        let half = self.forget_half_open(&key);
        match stage {
            RequestState::Up => self.elsewhere.insert(key, (), Some(now + patience)),
            RequestState::Ended => self.ended.insert(key, (), Some(now + patience)),
            _ => None,
        };
        half.filter(|_| stage == RequestState::Lost)
    }

    /// Whether a local address is in use: messages are repeated from it, or requests to it are open.
    pub(super) fn uses(&self, covered: impl Fn(IpAddr) -> bool) -> bool {
        self.retries.iter().any(|retry| covered(retry.local))
            || self.half_open.expiring().any(|(key, half)| {
                let open = matches!(half.token.stage(), RequestState::Asked | RequestState::Lost);
                open && covered(key.local)
            })
    }

    /// The next deadline that is visible outside: a message is due, or a request keeps its address in
    /// use.
    #[inline]
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let earlier = |a: Option<Instant>, b: Option<Instant>| match (a, b) {
            (Some(a), Some(b)) => Some(a.min(b)),
            _ => a.or(b),
        };
        let of_messages = earlier(self.retries.next(), self.challenges.next());
        let of_requests = earlier(self.stale_candidates.next(), self.half_open.next());
        earlier(of_messages, of_requests)
    }

    /// Whether that deadline is reached.
    #[inline]
    pub(super) fn is_due(&self, now: Instant) -> bool {
        // Asked in every iteration, mostly without any deadline: not which is the next.
        let is_past = |due: Option<Instant>| due.is_some_and(|due| due <= now);
        is_past(self.retries.next())
            || is_past(self.challenges.next())
            || is_past(self.stale_candidates.next())
            || is_past(self.half_open.next())
    }

    /// Removes expired entries.
    pub(super) fn expire(&mut self, now: Instant) {
        while self.half_open.next().is_some_and(|until| until <= now) {
            let first = self.half_open.expiring().next();
            let Some((key, stage)) = first.map(|(key, half)| (key, half.token.stage())) else {
                break;
            };
            // While its user has the request, a repetition is no other one; the user's answer
            // removes it, or creates its queue pair.
            match stage {
                RequestState::Asked => self.half_open.keep(&key),
                _ => drop(self.forget_half_open(&key)),
            }
        }
        while let Some((_, challenge)) = self.challenges.expire(now) {
            self.challenges_by_name.remove(&challenge.names.0);
        }
        while self.ended.expire(now).is_some() {}
        while self.elsewhere.expire(now).is_some() {}
        self.flood_until = self.flood_until.filter(|until| *until > now);
        self.allow_unsolicited(now);
    }

    /// Allows for more unsolicited messages as time passes.
    fn allow_unsolicited(&mut self, now: Instant) {
        let since = *self.unsolicited_since.get_or_insert(now);
        let passed = now.saturating_duration_since(since).as_millis();
        let more = (passed / UNSOLICITED_INTERVAL.as_millis()).min(MAX_UNSOLICITED.into()) as u32;
        if more > 0 {
            self.unsolicited = (self.unsolicited + more).min(MAX_UNSOLICITED);
            self.unsolicited_since = Some(now);
        }
    }

    /// Records the peer of a live connection, once it is known.
    pub(super) fn index(&mut self, connection: &Connection, number: u32) {
        self.by_peer.insert(connection.peer(), number);
        if connection.phase == Phase::Opened {
            self.by_request.insert(connection.key(), number);
        }
    }

    /// A connection has ended.
    pub(super) fn forget(&mut self, connection: &Connection, number: u32) {
        if self.by_peer.get(&connection.peer()) == Some(&number) {
            self.by_peer.remove(&connection.peer());
        }
        let key = connection.key();
        if self.by_request.get(&key) == Some(&number) {
            self.by_request.remove(&key);
            self.forget_half_open(&key);
        }
        self.retries.remove(connection.local_comm);
    }
}

/// Whether a source may have one more entry of a table, of which each may have `most`: if need be in
/// place of its oldest, since this time, which is [`UNDISTURBED`] for a while.
fn may_add<V>(
    table: &RequestTable<V>,
    now: Instant,
    source: Source,
    most: usize,
    since: impl Fn(&V) -> Option<Instant>,
) -> bool {
    let oldest = table.oldest(source).and_then(|(_, value)| since(value));
    table.count_of(source) < most || oldest.is_some_and(|since| since + UNDISTURBED <= now)
}
