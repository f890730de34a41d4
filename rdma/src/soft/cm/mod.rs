//! Connection management: its messages and its state, except for the connections (IBTA volume 1,
//! 12.9 "Communication management state machines"; annex A11 "RDMA IP CM Service"). What moves the
//! state is in `soft/endpoint`.

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
use super::wire::psn::Qpn;
use crate::Source;
use crate::limits::DISPLACEMENT;
use crate::source::SourcePenalty;
use connection::{ConnectRequest, Connection, Phase};
use request_handle::{RequestState, RequestUpdates, Token};
use request_key::{RequestKey, RequestTable};
use retransmit::CmRetransmitter;

/// Requests that wait until an old connection has had time to show that it lives, at most.
const MOST_CLAIMS: usize = 256;
/// Connections whose end is remembered, so that a late request is not taken for a new one.
const MOST_ENDED: usize = 1024;
/// How long a half-open connection is left alone by those that come after it from the same source:
/// several times what a peer in the same building takes to confirm. So no source makes more than
/// some thousands a second.
const UNDISTURBED: Duration = Duration::from_millis(20);
/// Messages that go unasked to peers that have not confirmed, at most, and the time in which there
/// is one more. They may be people who have never asked for a connection, so all of them together
/// get no more than that.
const MOST_UNASKED: u32 = 32;
const UNASKED_INTERVAL: Duration = Duration::from_millis(125);
/// How long after the last sign of a flood nothing is said to unconfirmed peers unasked.
const FLOOD_MEMORY: Duration = Duration::from_secs(10);

/// A connection that a peer has asked for and not confirmed.
#[derive(Debug)]
pub(super) struct HalfOpen {
    /// Our name of it, once the user has made a queue pair.
    pub(super) comm: Option<u32>,
    /// The peer has answered a message of ours: somebody is there.
    pub(super) proven: bool,
    /// When it began here; none before its user has answered, when it came through another
    /// endpoint.
    pub(super) since: Option<Instant>,
    /// Messages of the peer less messages to it. In a flood, nothing is sent that is not covered.
    pub(super) credit: u32,
    /// What the user does with the request.
    pub(super) token: Token,
    /// What is refused when the user has lost it.
    pub(super) request: ConnectRequest,
}

impl HalfOpen {
    /// Of a request, which may be answered. (So may the answer to a question of ours, but that is
    /// spent on the question.)
    pub(super) fn new(request: &ConnectRequest, proven: bool, news: &RequestUpdates) -> HalfOpen {
        HalfOpen {
            comm: None,
            proven,
            since: None,
            credit: 1,
            token: Token::new(request.key(), news.clone()),
            request: *request,
        }
    }
}

/// A request whose sender is asked for a sign of life before it gets any further.
#[derive(Debug)]
pub(super) struct Challenge {
    pub(super) request: ConnectRequest,
    /// The names of the connection, at our side and at the peer's, that we ask about. There is no
    /// such connection, and only who gets the question can know them.
    pub(super) names: (u32, u32),
    /// Its turn to displace another half-open connection is taken: were it taken when the answer
    /// comes, all who are challenged until then would be challenged for nothing.
    pub(super) reserved: bool,
}

/// How a half-open connection finds room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Room {
    /// There is some, or a source with a larger share makes it.
    Free,
    /// In place of another, of a source that has no more than its own.
    Displacing,
}

/// A request from a queue pair that has a connection.
#[derive(Debug)]
pub(super) struct StaleCandidate {
    pub(super) request: ConnectRequest,
    /// Our name of that connection.
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
    /// How many of those are not proven.
    pub(super) unverified: usize,
    pub(super) challenges: RequestTable<Challenge>,
    pub(super) challenges_by_name: BTreeMap<u32, RequestKey>,
    /// Requests from queue pairs that have a connection.
    pub(super) claims: RequestTable<StaleCandidate>,
    /// Our names of connections that have had to make room and still have a queue pair.
    pub(super) displaced: Vec<u32>,
    /// When a half-open connection may make room again for one of a source that has as many.
    next_displacement: Option<Instant>,
    /// Connections that have ended of late.
    pub(super) ended: RequestTable<()>,
    /// Connections that came up of late at another endpoint, their requests having come to us.
    pub(super) elsewhere: RequestTable<()>,
    /// Penalties of sources whose connections were established and never used; their requests came
    /// to us.
    pub(super) penalties: SourcePenalty,
    /// Whose request was passed over last because of that.
    pub(super) barred: Option<IpAddr>,
    pub(super) retries: CmRetransmitter,
    /// Of half-open connections whose requests users have, here or elsewhere.
    pub(super) news: RequestUpdates,
    /// Too many have asked of late.
    pub(super) flood_until: Option<Instant>,
    /// Messages that may still go unasked to peers that have not confirmed, and since when.
    pub(super) unasked: u32,
    unasked_since: Option<Instant>,
}

impl ConnectionManager {
    pub(super) fn new(config: &Config) -> ConnectionManager {
        ConnectionManager {
            listeners: Vec::new(),
            by_request: BTreeMap::new(),
            by_peer: BTreeMap::new(),
            half_open: RequestTable::new(config.half_open),
            unverified: 0,
            challenges: RequestTable::new(config.challenges),
            challenges_by_name: BTreeMap::new(),
            claims: RequestTable::new(MOST_CLAIMS),
            displaced: Vec::new(),
            next_displacement: None,
            ended: RequestTable::new(MOST_ENDED),
            elsewhere: RequestTable::new(MOST_ENDED),
            penalties: SourcePenalty::new(config.vain_per_source),
            barred: None,
            retries: CmRetransmitter::default(),
            news: RequestUpdates::default(),
            flood_until: None,
            unasked: MOST_UNASKED,
            unasked_since: None,
        }
    }

    /// Takes a connection off the list of those that are half open.
    pub(super) fn forget_half_open(&mut self, key: &RequestKey) -> Option<HalfOpen> {
        let half = self.half_open.remove(key)?;
        self.unverified -= usize::from(!half.proven);
        Some(half)
    }

    /// How one more half-open connection of a source finds room, if it does: if need be in place of
    /// its oldest, as somebody may use the source's address, and whose it is comes last. Where one
    /// makes room for another of a source that has as many, that is bounded in time: otherwise a
    /// busy target displaces connections before it reads that they were confirmed, charges none of
    /// them to its source, and is busy with making them.
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
        let oldest = self.half_open.oldest(source).and_then(|(_, half)| half.since);
        self.half_open.count_of(source) < most
            || oldest.is_some_and(|since| since + UNDISTURBED <= now)
    }

    /// Makes room for one more half-open connection of a source, if there may be one. `reserved`:
    /// its turn to displace another was taken when it was challenged.
    pub(super) fn make_room(
        &mut self,
        now: Instant,
        source: Source,
        most: usize,
        reserved: bool,
    ) -> bool {
        let has_share = self.half_open.count_of(source) >= most;
        if !has_share && !self.half_open.is_full() {
            return true;
        }
        self.note_flood(now);
        match self.room(now, source, most) {
            Some(room) => self.reserve(now, room),
            None if reserved && self.may_displace(now, source, most) => {}
            None => return false,
        }
        if has_share && let Some((key, _)) = self.half_open.oldest(source) {
            let comm = self.forget_half_open(&key).and_then(|half| half.comm);
            self.displaced.extend(comm);
        }
        true
    }

    /// Takes a turn to displace a connection, where that is needed: the next one is later.
    pub(super) fn reserve(&mut self, now: Instant, room: Room) {
        if room == Room::Displacing {
            self.next_displacement = Some(now + DISPLACEMENT);
        }
    }

    /// More ask than can be served at once.
    pub(super) fn note_flood(&mut self, now: Instant) {
        self.flood_until = Some(now + FLOOD_MEMORY);
    }

    /// Takes note of what has become of a request that came to us, unless it is ours to know. For
    /// `patience` it is known what a repetition is about. Gives one that its user has lost.
    pub(super) fn apply_updates(
        &mut self,
        key: RequestKey,
        now: Instant,
        patience: Duration,
    ) -> Option<HalfOpen> {
        // Of several with one name, the last is meant; it may be a new one, with no news yet.
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

    /// Whether anything is said from this address of ours, or asked there; of an unspecified one,
    /// from any.
    pub(super) fn uses(&self, covered: impl Fn(IpAddr) -> bool) -> bool {
        self.retries.iter().any(|retry| covered(retry.local))
            || self.half_open.expiring().any(|(key, half)| {
                let open = matches!(half.token.stage(), RequestState::Asked | RequestState::Lost);
                open && covered(key.local)
            })
    }

    /// When something has waited too long that others notice: a message is due, a request keeps its
    /// address in use.
    pub(super) fn deadlines(&self) -> [Option<Instant>; 4] {
        [self.retries.next(), self.claims.next(), self.half_open.next(), self.challenges.next()]
    }

    /// Forgets what has waited too long.
    pub(super) fn expire(&mut self, now: Instant) {
        while let Some((_, half)) = self.half_open.expire(now) {
            self.unverified -= usize::from(!half.proven);
        }
        while let Some((_, challenge)) = self.challenges.expire(now) {
            self.challenges_by_name.remove(&challenge.names.0);
        }
        while self.ended.expire(now).is_some() {}
        while self.elsewhere.expire(now).is_some() {}
        self.flood_until = self.flood_until.filter(|until| *until > now);
        self.allow_unasked(now);
    }

    /// Time allows for more unasked messages.
    fn allow_unasked(&mut self, now: Instant) {
        let since = *self.unasked_since.get_or_insert(now);
        let passed = now.saturating_duration_since(since).as_millis();
        let more = (passed / UNASKED_INTERVAL.as_millis()).min(MOST_UNASKED.into()) as u32;
        if more > 0 {
            self.unasked = (self.unasked + more).min(MOST_UNASKED);
            self.unasked_since = Some(now);
        }
    }

    /// Takes note of a live connection's peer, once it is known.
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
