//! The simulated network between endpoints: drops, duplicates, delays, reorders, corrupts and
//! withholds datagrams, all from one seed. Datagrams keep their buffers: in steady state nothing is
//! allocated.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::Region;
use crate::soft::config::ROCE_PORT;
use crate::soft::endpoint::{Endpoint, QueuedPacket};
use crate::soft::gso_check::MOST_SEGMENTS;
use crate::soft::qp::ecn;
use crate::soft::udp::steered;
use crate::soft::udp::train::{MOST_GATHERED, TrainItem, Trains};
use crate::wire::icrc::train_identification;

/// A small pseudorandom number generator (xorshift64*, Marsaglia and Vigna). Its numbers are
/// predictable.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From a seed, of which all are equally good.
    pub fn new(seed: u64) -> Rng {
        // The generator never leaves the state zero.
        Rng((seed ^ 0x9e37_79b9_7f4a_7c15).max(1))
    }

    /// The next number.
    pub fn roll(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        (self.roll() >> 16) % end.max(1)
    }

    /// True with a probability of `count` per mille.
    pub fn per_mille(&mut self, count: u16) -> bool {
        count > 0 && self.below(1000) < u64::from(count)
    }

    /// A uniformly distributed part of a duration.
    pub fn part(&mut self, whole: Duration) -> Duration {
        Duration::from_nanos(self.below(whole.as_nanos() as u64 + 1))
    }
}

/// Fault probabilities of the network, in per mille.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Faults {
    /// Dropped.
    pub loss: u16,
    /// Delivered twice, at different times.
    pub duplicate: u16,
    /// One to four bytes changed. (An IPv4 endpoint detects all but one of 65536; use IPv6 where
    /// that matters.)
    pub damage: u16,
    /// Delayed, so that later ones overtake.
    pub reorder: u16,
    /// Delay of every datagram.
    pub delay: Duration,
    /// Maximum of the additional delay of a delayed one.
    pub jitter: Duration,
}

impl Faults {
    /// A network without faults, 10 µs each way.
    pub const NONE: Faults = Faults {
        loss: 0,
        duplicate: 0,
        damage: 0,
        reorder: 0,
        delay: Duration::from_micros(10),
        jitter: Duration::from_micros(200),
    };
}

/// Bandwidth and queue of the link to each place. A dropped datagram takes its time as well.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Link {
    /// Transmission time of one datagram.
    pub each: Duration,
    /// Length of the queue; more are dropped, as by a full socket buffer.
    pub waiting: u32,
    /// Length of the queue from which on ECN-capable datagrams are marked.
    pub marking: u32,
}

impl Link {
    /// A link without limits.
    pub const ENDLESS: Link = Link { each: Duration::ZERO, waiting: u32::MAX, marking: u32::MAX };
}

/// A datagram in flight: the payload of UDP, and its addresses.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Datagram {
    /// Sender and receiver; none in an unused one.
    pub way: Option<(SocketAddr, SocketAddr)>,
    /// Type of service.
    pub tos: u8,
    /// Headers, payload, CRC.
    pub bytes: Vec<u8>,
}

/// Called for each datagram that enters, and may change it; false drops it. For faults that no
/// network has.
pub type Hook = Box<dyn FnMut(&mut Datagram) -> bool + Send>;

/// A receiver at an address.
#[derive(Debug)]
struct Nic {
    address: IpAddr,
    /// Number of receivers at the address, and index of this one: see [`steered`].
    steer: (u32, u32),
    /// Switched off: datagrams for it are dropped.
    down: bool,
    /// When its link is idle again.
    free: Option<Instant>,
    /// Indices of received datagrams that were not taken.
    inbox: VecDeque<u32>,
}

/// The network.
pub struct Network {
    /// Its faults from now on.
    pub faults: Faults,
    /// Its link.
    pub link: Link,
    /// Called for each datagram that enters.
    pub tap: Option<Hook>,
    /// Trains are sent, and the sending device gives all segments of one the same identification,
    /// so that receivers which see it (adapters, `rdma_rxe`) find a wrong CRC in all but the first.
    pub renumbers: bool,
    dice: Rng,
    places: Vec<Nic>,
    /// Pairs of addresses that are disconnected until a time.
    cuts: Vec<(IpAddr, IpAddr, Instant)>,
    datagrams: Vec<Datagram>,
    spare: Vec<u32>,
    gathered: Vec<QueuedPacket>,
    /// Arrival, number (the order among those with one arrival time), place, index.
    flights: BinaryHeap<Reverse<(Instant, u64, u32, u32)>>,
    number: u64,
}

impl fmt::Debug for Network {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Air")
            .field("faults", &self.faults)
            .field("places", &self.places)
            .field("flights", &self.flights.len())
            .finish_non_exhaustive()
    }
}

impl Network {
    /// An empty network.
    pub fn new(seed: u64, faults: Faults) -> Network {
        Network {
            faults,
            link: Link::ENDLESS,
            tap: None,
            renumbers: false,
            dice: Rng::new(seed),
            places: Vec::new(),
            cuts: Vec::new(),
            datagrams: Vec::new(),
            spare: Vec::new(),
            gathered: Vec::new(),
            flights: BinaryHeap::new(),
            number: 0,
        }
    }

    /// Adds a place at an address and returns its index. `steer` is the number of places at the
    /// address, and the index of this one: datagrams are steered by the rule that the kernel
    /// applies to sockets.
    pub fn add(&mut self, address: IpAddr, steer: (u32, u32)) -> usize {
        let inbox = VecDeque::new();
        self.places.push(Nic { address, steer, down: false, free: None, inbox });
        self.places.len() - 1
    }

    /// Its random number generator.
    pub fn dice(&mut self) -> &mut Rng {
        &mut self.dice
    }

    /// Switches a place on or off. A place that is off drops what it has received.
    pub fn set_down(&mut self, place: usize, down: bool) {
        self.places[place].down = down;
        if down {
            self.spare.extend(self.places[place].inbox.drain(..));
        }
    }

    /// Disconnects two addresses until a time.
    pub fn cut(&mut self, one: IpAddr, other: IpAddr, until: Instant) {
        self.cuts.push((one, other, until));
    }

    /// Ends all disconnections.
    pub fn heal(&mut self) {
        self.cuts.clear();
    }

    /// Drops all datagrams in flight.
    pub fn lose_flights(&mut self) {
        self.spare.extend(self.flights.drain().map(|Reverse((.., index))| index));
    }

    /// Time of the next arrival.
    pub fn next_arrival(&self) -> Option<Instant> {
        self.flights.peek().map(|Reverse((arrival, ..))| *arrival)
    }

    /// Delivers the next datagram, if it arrives by `now`; returns its place.
    pub fn arrive(&mut self, now: Instant) -> Option<usize> {
        let Reverse((arrival, ..)) = *self.flights.peek()?;
        if arrival > now {
            return None;
        }
        let Reverse((.., place, index)) = self.flights.pop()?;
        let place = place as usize;
        match self.places[place].down {
            true => self.spare.push(index),
            false => self.places[place].inbox.push_back(index),
        }
        Some(place)
    }

    /// Whether a place has received datagrams.
    pub fn has_mail(&self, place: usize) -> bool {
        !self.places[place].inbox.is_empty()
    }

    /// Takes the next received datagram of a place; [`Network::give`] returns its buffer.
    pub fn take(&mut self, place: usize) -> Option<Datagram> {
        let index = self.places[place].inbox.pop_front()?;
        self.spare.push(index);
        Some(std::mem::take(&mut self.datagrams[index as usize]))
    }

    /// Returns the buffer of a datagram.
    pub fn give(&mut self, mut datagram: Datagram) {
        if let Some(index) = self.spare.last() {
            datagram.bytes.clear();
            self.datagrams[*index as usize].bytes = datagram.bytes;
        }
    }

    /// Sends all packets of an endpoint.
    pub fn transmit(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        if self.renumbers {
            return self.transmit_renumbered(now, endpoint, region);
        }
        let mut gathered = std::mem::take(&mut self.gathered);
        while gather(now, endpoint, region, &mut gathered) {
            // As the segments of a train, or as from a kernel that numbers its datagrams.
            let first = self.dice.roll() as usize % MOST_SEGMENTS;
            for (nth, queued) in gathered.iter().enumerate() {
                let place = (first + nth) % MOST_SEGMENTS;
                if let Some(datagram) = self.datagram(endpoint, queued, place, region) {
                    self.enter(now, datagram);
                }
            }
        }
        self.gathered = gathered;
    }

    /// As [`Network::transmit`], in trains, and through a device that renumbers their segments.
    fn transmit_renumbered(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        let (mut gathered, mut trains) = (std::mem::take(&mut self.gathered), Trains::new());
        while gather(now, endpoint, region, &mut gathered) {
            let item = |queued| TrainItem::of(endpoint, queued);
            trains.make(&gathered.iter().filter_map(item).collect::<Vec<_>>(), usize::MAX);
            for train in trains.iter() {
                let longest = endpoint.longest_train(&gathered[usize::from(train[0])]);
                let parts = train.chunks(longest);
                for (place, index) in parts.flat_map(|part| part.iter().enumerate()) {
                    let queued = &gathered[usize::from(*index)];
                    let datagram = self.datagram(endpoint, queued, place, region);
                    endpoint.depart(queued, place);
                    let Some(datagram) = datagram else { continue };
                    if train_identification(place) == train_identification(0) {
                        self.enter(now, datagram);
                    } else {
                        self.forget(datagram);
                    }
                }
            }
        }
        self.gathered = gathered;
    }

    /// The datagram of a packet that leaves at this place of its train.
    fn datagram(
        &mut self,
        endpoint: &mut Endpoint,
        queued: &QueuedPacket,
        place: usize,
        region: &Region,
    ) -> Option<Datagram> {
        let mut datagram = self.blank();
        let (identification, into) = (train_identification(place), &mut datagram.bytes);
        let envelope = endpoint.envelope(queued);
        if let Some((flow, tos)) = envelope
            && endpoint.append(queued, identification, region, into)
        {
            (datagram.way, datagram.tos) = (Some((flow.source, flow.destination)), tos);
            return Some(datagram);
        }
        self.forget(datagram);
        None
    }

    /// Sends one datagram.
    pub fn carry(&mut self, now: Instant, way: (SocketAddr, SocketAddr), parts: [&[u8]; 3]) {
        let mut datagram = self.blank();
        datagram.way = Some(way);
        parts.iter().for_each(|part| datagram.bytes.extend_from_slice(part));
        self.enter(now, datagram);
    }

    /// Applies the faults to a datagram that enters.
    fn enter(&mut self, now: Instant, mut datagram: Datagram) {
        let Some(way) = datagram.way else { return self.forget(datagram) };
        let passes = self.tap.as_mut().is_none_or(|tap| tap(&mut datagram));
        let place = self.place(way.1, &datagram.bytes).filter(|_| passes);
        let Some(place) = place.filter(|_| !self.is_cut(now, way)) else {
            return self.forget(datagram);
        };
        if self.dice.per_mille(self.faults.duplicate) {
            let mut twin = self.blank();
            (twin.way, twin.tos) = (datagram.way, datagram.tos);
            twin.bytes.extend_from_slice(&datagram.bytes);
            self.launch(now, place, twin);
        }
        self.launch(now, place, datagram);
    }

    fn launch(&mut self, now: Instant, place: usize, mut datagram: Datagram) {
        let faults = self.faults;
        let Some((through, long)) = self.queue(now, place) else { return self.forget(datagram) };
        if long && ecn::is_capable(datagram.tos) {
            datagram.tos |= ecn::MARKED;
        }
        if self.dice.per_mille(faults.loss) {
            return self.forget(datagram);
        }
        if self.dice.per_mille(faults.damage) {
            for _ in 0..=self.dice.below(3) {
                let at = self.dice.below(datagram.bytes.len() as u64) as usize;
                datagram.bytes[at] ^= self.dice.below(255) as u8 + 1;
            }
        }
        let mut arrival = through + faults.delay;
        if self.dice.per_mille(faults.reorder) {
            arrival += self.dice.part(faults.jitter);
        }
        let index = self.spare.pop().unwrap_or_else(|| {
            self.datagrams.push(Datagram::default());
            self.datagrams.len() as u32 - 1
        });
        self.datagrams[index as usize] = datagram;
        self.number += 1;
        self.flights.push(Reverse((arrival, self.number, place as u32, index)));
    }

    /// When a datagram that enters now has passed the link, and whether the queue is so long that
    /// it is marked; none if the queue is full.
    fn queue(&mut self, now: Instant, place: usize) -> Option<(Instant, bool)> {
        let Link { each, waiting, marking } = self.link;
        if each.is_zero() {
            return Some((now, false));
        }
        let free = self.places[place].free.map_or(now, |free| free.max(now));
        if free - now > each.saturating_mul(waiting) {
            return None;
        }
        let long = free - now > each.saturating_mul(marking);
        let through = free + each;
        self.places[place].free = Some(through);
        Some((through, long))
    }

    /// An unused datagram, if possible with an allocated buffer.
    fn blank(&mut self) -> Datagram {
        let spare = self.spare.last().map(|index| &mut self.datagrams[*index as usize]);
        let mut datagram = spare.map(std::mem::take).unwrap_or_default();
        datagram.bytes.clear();
        datagram.tos = 0;
        datagram
    }

    fn forget(&mut self, datagram: Datagram) {
        if self.spare.is_empty() {
            self.spare.push(self.datagrams.len() as u32);
            self.datagrams.push(Datagram::default());
        }
        self.give(datagram);
    }

    fn is_cut(&mut self, now: Instant, (from, to): (SocketAddr, SocketAddr)) -> bool {
        self.cuts.retain(|(.., until)| *until > now);
        let ends = (from.ip(), to.ip());
        self.cuts.iter().any(|(a, b, _)| ends == (*a, *b) || ends == (*b, *a))
    }

    fn place(&self, to: SocketAddr, bytes: &[u8]) -> Option<usize> {
        if to.port() != ROCE_PORT {
            return None;
        }
        let here = |place: &Nic| {
            let (count, index) = place.steer;
            place.address == to.ip() && steered(count, bytes).unwrap_or_default() == index
        };
        self.places.iter().position(here)
    }
}

/// A place in a network that is shared by several users on one thread.
#[derive(Clone, Debug)]
pub struct NetworkPort {
    air: Arc<Mutex<Network>>,
    place: usize,
    address: IpAddr,
}

impl NetworkPort {
    /// Adds a place; see [`Network::add`].
    pub fn new(air: &Arc<Mutex<Network>>, address: IpAddr, steer: (u32, u32)) -> NetworkPort {
        let place = lock(air).add(address, steer);
        NetworkPort { air: Arc::clone(air), place, address }
    }

    /// Its index.
    pub fn place(&self) -> usize {
        self.place
    }

    /// Its address.
    pub fn address(&self) -> IpAddr {
        self.address
    }

    /// Passes datagrams to the endpoint, until it has `events` events, or there is none.
    #[inline(never)] // so that profiles tell it from the provider
    pub(crate) fn receive(
        &self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
        events: usize,
    ) {
        let mut air = lock(&self.air);
        let Network { places, datagrams, spare, .. } = &mut *air;
        let inbox = &mut places[self.place].inbox;
        while endpoint.waiting_events() < events
            && let Some(first) = inbox.front().map(|index| &datagrams[*index as usize])
        {
            let is_next = |index: &&u32| {
                let datagram = &datagrams[**index as usize];
                (datagram.way, datagram.tos) == (first.way, first.tos)
            };
            let count = inbox.iter().take(MOST_SEGMENTS).take_while(is_next).count();
            if let Some((from, to)) = first.way {
                let bytes = |index: &u32| &datagrams[*index as usize].bytes[..];
                let train = inbox.iter().take(count).map(bytes);
                endpoint.handle_train(now, (from, to, first.tos), train, region);
            }
            spare.extend(inbox.drain(..count));
        }
    }

    /// Sends all packets of the endpoint, if this place is switched on.
    #[inline(never)] // so that profiles tell it from the provider
    pub(crate) fn transmit(&self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        let mut air = lock(&self.air);
        if !air.places[self.place].down {
            air.transmit(now, endpoint, region);
        }
    }
}

/// Takes what an endpoint has to send; false if that is nothing.
fn gather(
    now: Instant,
    endpoint: &mut Endpoint,
    region: &Region,
    gathered: &mut Vec<QueuedPacket>,
) -> bool {
    gathered.clear();
    endpoint.gather(now, region, &|_| true, MOST_GATHERED, gathered);
    !gathered.is_empty()
}

fn lock(air: &Mutex<Network>) -> MutexGuard<'_, Network> {
    air.lock().unwrap_or_else(PoisonError::into_inner)
}
