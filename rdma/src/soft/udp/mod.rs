//! UDP sockets of the provider: port 4791 of every address that listens or connects, polled by one
//! epoll instance.

mod gso_fallback;
mod port_users;
mod reuseport_group;
mod route;
mod socket;
mod sockopt;
pub(super) mod train;

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::config::{Path, ROCE_PORT};
use super::endpoint::{Endpoint, QueuedPacket};
use super::udp::train::{MOST_BYTES, MOST_GATHERED, TrainItem, Trains, Way};
use crate::capture::{Capture, Direction};
use crate::log_interval::LogInterval;
use crate::wire::icrc::{Flow, train_identification};
use crate::wire::tx_packet::Payload;
use crate::{FabricError, Region, ZonedIp, explained};
use gso_fallback::Singles;
use reuseport_group::Misdelivered;
pub(crate) use reuseport_group::Shared;
pub(super) use route::WARN_INTERVAL;
use route::{beside, leaves, payload_bytes, route};
pub use socket::SocketBuffers;
use socket::{Bound, Received};
pub(super) use sockopt::steered;

/// Maximum of trains read from a socket in one poll.
const TAKEN_AT_ONCE: usize = 64;
/// Messages of connection management that wait to be sent, after which no more is read in one poll. A
/// train may have 64 requests to connect, which cost several times what packets do.
const ENOUGH_MESSAGES: usize = 64;
/// Maximum of trains that wait for room: those of one batch, or of connection management. Further
/// ones are dropped, as the network may drop them.
const MOST_HELD: usize = 1024;
/// Time for which the system looks for a neighbour, and keeps datagrams to it: three requests, one a
/// second (arp(7)).
const NEIGHBOUR_WAIT: Duration = Duration::from_secs(3);
/// Bytes of the largest datagram.
const DATAGRAM_BYTES: usize = 1 << 16;

/// Datagrams that did not fit into the socket buffer.
#[derive(Debug)]
struct Held {
    way: Way,
    each: Option<u16>,
    bytes: Vec<u8>,
}

/// An address without a listener.
#[derive(Debug)]
struct Retired {
    ip: IpAddr,
    /// This fabric does not need its socket any more.
    idle: bool,
    /// No fabric does.
    closing: bool,
}

/// A received batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Taken {
    pub(super) bytes: usize,
    /// The socket had no more.
    pub(super) all: bool,
}

/// The sockets of one fabric.
#[derive(Debug)]
pub(super) struct Udp {
    shared: Arc<Shared>,
    index: u32,
    /// Number of changes of the shared state that were applied.
    seen: u64,
    sockets: Vec<Arc<Bound>>,
    /// The socket that is read first in the next poll.
    turn: usize,
    /// Addresses without a listener.
    retired: Vec<Retired>,
    epoll: Epoll,
    scratch: Vec<u8>,
    /// Datagrams of the received train for each of the other fabrics.
    strays: Vec<Vec<u8>>,
    /// Datagrams that other fabrics have received for this one.
    brought: VecDeque<Misdelivered>,
    /// Datagrams to send, and their assignment to trains.
    gathered: Vec<QueuedPacket>,
    items: Vec<TrainItem>,
    trains: Trains,
    singles: Singles,
    /// Bytes of the train that is sent.
    train: Vec<u8>,
    /// Trains that must be sent before others of the same socket.
    held: VecDeque<Held>,
    /// Sockets without room: address and port.
    blocked: Vec<(IpAddr, u16)>,
    /// Those whose room ends a sleep.
    watched: Vec<(IpAddr, u16)>,
    /// Messages without a confirmed connection that were sent, and since when.
    unconfirmed: (Option<Instant>, u32),
    /// Errors of sending, and when each was last logged.
    troubles: Vec<(Errno, LogInterval)>,
    /// When a path MTU below the MTU of the link was last logged.
    doubted: LogInterval,
    /// Captures all packets.
    capture: Option<Capture>,
}

impl Udp {
    /// The sockets of the fabric with this index in its group.
    pub(super) fn new(shared: Arc<Shared>, index: u32) -> Result<Udp, FabricError> {
        let failed = |e: Errno| {
            FabricError(format!("cannot make an epoll instance: {}", explained(&e.into())))
        };
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        let eventfd = shared.eventfd(index);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, eventfd.as_raw_fd() as u64);
        epoll.add(eventfd, event).map_err(failed)?;
        let strays = vec![Vec::new(); shared.count() as usize];
        Ok(Udp {
            strays,
            shared,
            index,
            seen: 0,
            sockets: Vec::new(),
            turn: 0,
            retired: Vec::new(),
            epoll,
            scratch: vec![0; DATAGRAM_BYTES],
            brought: VecDeque::new(),
            gathered: Vec::with_capacity(MOST_GATHERED),
            items: Vec::with_capacity(MOST_GATHERED),
            trains: Trains::new(),
            singles: Singles::default(),
            train: Vec::with_capacity(MOST_BYTES),
            held: VecDeque::new(),
            blocked: Vec::new(),
            watched: Vec::new(),
            unconfirmed: (None, 0),
            troubles: Vec::new(),
            doubted: LogInterval::default(),
            capture: None,
        })
    }

    /// Captures everything that is sent and received from now on.
    pub(super) fn capture_to(&mut self, capture: Capture) {
        self.capture = Some(capture);
    }

    /// Buffer sizes of each open socket.
    pub(super) fn buffers(&self) -> impl Iterator<Item = SocketBuffers> {
        self.sockets.iter().map(|bound| bound.buffers)
    }

    pub(super) fn listen(
        &mut self,
        at: SocketAddr,
        endpoint: &mut Endpoint,
    ) -> Result<(), FabricError> {
        self.shared.listen(at)?;
        self.apply_shared_state(endpoint);
        Ok(())
    }

    pub(super) fn unlisten(&mut self, at: SocketAddr, endpoint: &mut Endpoint) {
        self.shared.unlisten(at);
        self.apply_shared_state(endpoint);
    }

    /// Applies changes made by any fabric of the group.
    pub(super) fn apply_shared_state(&mut self, endpoint: &mut Endpoint) {
        self.tidy(endpoint);
        loop {
            let changes = self.shared.changes();
            if self.seen == changes {
                return;
            }
            self.seen = changes;
            let news = self.shared.news(self.index, |ip| self.own(ip).is_some());
            endpoint.set_listeners(&news.listeners);
            for socket in news.sockets {
                self.adopt(socket);
            }
            let retired = news.retired.into_iter();
            self.retired =
                retired.map(|(ip, closing)| Retired { ip, idle: closing, closing }).collect();
            self.tidy(endpoint);
        }
    }

    fn adopt(&mut self, socket: Arc<Bound>) {
        // This socket is polled for reading only so far.
        self.watched.retain(|(address, _)| *address != socket.address);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, socket.as_fd().as_raw_fd() as u64);
        if let Err(e) = self.epoll.add(&*socket, event) {
            tracing::error!("cannot watch a socket, its connections will fail: {}", e.desc());
        }
        for source in socket.sources() {
            let event = EpollEvent::new(EpollFlags::empty(), source.as_raw_fd() as u64);
            // If this fails, room is noticed by the next poll only.
            let _ = self.epoll.add(source, event);
        }
        self.sockets.push(socket);
    }

    /// Reports which addresses without a listener are not used here any more, and returns the
    /// sockets of those that no fabric uses.
    fn tidy(&mut self, endpoint: &Endpoint) {
        for retired in self.retired.iter_mut().filter(|retired| !retired.idle) {
            if !endpoint.uses(retired.ip) {
                retired.idle = true;
                self.shared.resign(self.index, retired.ip);
            }
        }
        while let Some(at) = self.retired.iter().position(|retired| retired.closing) {
            let Retired { ip, .. } = self.retired.swap_remove(at);
            let Some(at) = self.sockets.iter().position(|bound| bound.address == ip) else {
                continue;
            };
            let socket = self.sockets.swap_remove(at);
            let _ = self.epoll.delete(&*socket);
            for source in socket.sources() {
                let _ = self.epoll.delete(source);
            }
            if let Err(socket) = self.shared.give_back(self.index, socket) {
                self.adopt(socket);
            }
        }
        self.watch_for_room();
    }

    /// Prepares for sleep: other fabrics may wake this one from now on.
    pub(super) fn arm(&mut self) {
        self.shared.hush(self.index);
    }

    /// The path to a peer, with an open socket.
    pub(super) fn path(
        &mut self,
        to: SocketAddr,
        endpoint: &mut Endpoint,
    ) -> Result<Path, FabricError> {
        let failed = |e: io::Error| {
            let why = match e.kind() {
                ErrorKind::NetworkUnreachable | ErrorKind::HostUnreachable => {
                    "there is no route (see `ip route get`)".to_owned()
                }
                ErrorKind::AddrNotAvailable => "the source is no address of this machine".into(),
                _ => e.to_string(),
            };
            FabricError(format!("cannot connect to {to}: {why}"))
        };
        let (source, most) = (self.shared.options().source, self.shared.options().config.mtu);
        let (from, _) = route(source, to).map_err(failed)?;
        // Within 127.0.0.0/8 all routes begin at 127.0.0.1, which several hosts cannot share.
        let here = from.ip() == to.ip() || to.ip().is_loopback();
        let from = match here && source.is_none() {
            true => self.open_beside(to)?,
            false => {
                if self.socket_for(from.ip()).is_none() {
                    self.shared.open_source(from)?;
                }
                from.ip()
            }
        };
        self.apply_shared_state(endpoint);
        let (_, link) = route(Some(from), to).map_err(failed)?;
        let mtu = payload_bytes(link, to.is_ipv6(), most).ok_or_else(|| {
            FabricError(format!("cannot connect to {to}: the link's MTU of {link} is too small"))
        })?;
        Ok(Path { from, mtu })
    }

    /// Whether there is a socket for a local address.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.socket_for(address).is_some()
    }

    /// Maximum payload on the path to a peer that has reached us and requests `asked` bytes.
    ///
    /// A path MTU that the system has learned is no reason to reject a peer: anybody can forge the
    /// ICMP message, and the peer would be rejected for as long as the system believes it (ten
    /// minutes). The MTU of the local link is a reason; a smaller one that is set on a route cannot
    /// be distinguished from such a message, and is ignored.
    pub(super) fn path_mtu(&mut self, from: IpAddr, to: IpAddr, asked: u32) -> Option<u32> {
        let zone = self.socket_for(from).map_or(0, |bound| bound.scope_id);
        let to = ZonedIp { ip: to, scope_id: zone }.with_port(ROCE_PORT);
        let most = self.shared.options().config.mtu;
        let (_, route_mtu) = route(Some(from), to).ok()?;
        let carried = payload_bytes(route_mtu, to.is_ipv6(), most);
        let short = (1..asked).contains(&carried.unwrap_or_default());
        if short && asked <= most && leaves(from, to, asked) {
            if self.doubted.is_due(Instant::now(), WARN_INTERVAL) {
                tracing::warn!(
                    "the path MTU to {} is reported as {route_mtu} bytes (see `ip route get`), the link \
                     MTU is larger: packets carry the {asked} bytes requested by the host",
                    to.ip()
                );
            }
            return Some(asked);
        }
        carried
    }

    /// An address of this machine other than that of the peer, which is local as well.
    fn open_beside(&mut self, to: SocketAddr) -> Result<IpAddr, FabricError> {
        let mut why = None;
        for address in beside(to.ip()) {
            match self.shared.open_source(SocketAddr::new(address, 0)) {
                Ok(()) => return Ok(address),
                Err(e) => why = Some(e.0),
            }
        }
        Err(FabricError(format!(
            "cannot connect to {to}, an address of this machine itself, for want of another such \
             address with a free UDP port 4791{}",
            why.map(|why| format!(": {why}")).unwrap_or_default()
        )))
    }

    fn own(&self, address: IpAddr) -> Option<&Bound> {
        self.sockets.iter().map(|bound| &**bound).find(|bound| bound.address == address)
    }

    /// The socket that sends from an address: its own, or one for all addresses.
    fn socket_for(&self, from: IpAddr) -> Option<&Bound> {
        let covers = |bound: &&Arc<Bound>| bound.covers(from);
        self.own(from).or_else(|| self.sockets.iter().find(covers).map(|bound| &**bound))
    }

    /// Passes datagrams to the endpoint, until it has `events` events or enough messages to send, or
    /// there are no more. Continues after the socket where the last call has stopped, so that a
    /// busy socket does not delay the others.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
        events: usize,
    ) -> Taken {
        let mut taken = Taken { bytes: 0, all: true };
        if self.shared.is_called(self.index) {
            self.receive_strays(now, endpoint, region);
        }
        let count = self.sockets.len();
        for _ in 0..count {
            let index = self.turn % count;
            for nth in 0..TAKEN_AT_ONCE {
                if endpoint.waiting_events() >= events
                    || endpoint.waiting_messages() >= ENOUGH_MESSAGES
                {
                    // A socket that was not read yet is still the next.
                    self.turn = index + usize::from(nth > 0);
                    return Taken { all: false, ..taken };
                }
                let Some(received) = self.sockets[index].receive(&mut self.scratch) else {
                    break;
                };
                let Received { from, to, tos, bytes, each } = received;
                taken.bytes += bytes;
                taken.all &= nth + 1 < TAKEN_AT_ONCE;
                if let Some(capture) = &self.capture {
                    let flow =
                        Flow { source: from, destination: SocketAddr::new(to.ip(), ROCE_PORT) };
                    for datagram in self.scratch[..bytes].chunks(each) {
                        capture.add(Direction::Received, &flow, tos, 0, [datagram, &[], &[]]);
                    }
                }
                let Udp { scratch, shared, strays, index: own, .. } = self;
                let is_own = |datagram: &&[u8]| {
                    let other = elsewhere(shared.count(), *own, datagram);
                    let strays = other.and_then(|other| strays.get_mut(other));
                    strays.map(|strays| strays.extend_from_slice(datagram)).is_none()
                };
                let train = scratch[..bytes].chunks(each).filter(is_own);
                endpoint.handle_train(now, (from, to, tos), train, region);
                self.forward_strays((from, to, tos), each);
            }
            self.turn = index + 1;
        }
        taken
    }

    /// Passes datagrams to their fabrics: those of one train together.
    fn forward_strays(&mut self, way: (SocketAddr, SocketAddr, u8), each: usize) {
        for (other, strays) in self.strays.iter_mut().enumerate() {
            if !strays.is_empty() {
                self.shared.forward(other as u32, way, each, strays);
            }
        }
    }

    /// Datagrams that arrive meanwhile wait for the next poll, so that a fabric that receives more
    /// than can be processed does not starve everything else.
    fn receive_strays(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        self.shared.take_strays(self.index, &mut self.brought);
        for stray in &self.brought {
            let way = (stray.from, stray.to, stray.tos);
            endpoint.handle_train(now, way, stray.bytes.chunks(stray.each), region);
        }
    }

    /// Sends all packets of the endpoint, as long as the sockets have room.
    pub(super) fn transmit(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        self.release(|this, held| this.send(held.way, held.each, &held.bytes));
        endpoint.resume();
        while self.gather(now, endpoint, region) {
            let mut trains = std::mem::take(&mut self.trains);
            trains.make(&self.items, usize::MAX);
            for train in trains.iter() {
                self.depart(now, train, endpoint, region);
            }
            self.trains = trains;
        }
        self.watch_for_room();
    }

    /// Sends held trains, as far as the sockets have room. A socket without room does not block
    /// others.
    fn release(&mut self, send: impl Fn(&Udp, &Held) -> Result<(), Errno>) {
        self.blocked.clear();
        let mut held = std::mem::take(&mut self.held);
        held.retain(|held| {
            if self.has_no_room(held.way.from) {
                return true;
            }
            let sent = send(self, held);
            let full = sent == Err(Errno::EAGAIN);
            if full {
                self.block(held.way);
            } else {
                self.note(sent);
            }
            full
        });
        self.held = held;
        self.watch_for_room();
    }

    /// Whether trains from an address have to wait for held ones.
    fn has_no_room(&self, from: IpAddr) -> bool {
        !self.blocked.is_empty()
            && self.socket_for(from).is_some_and(|bound| {
                self.blocked.iter().any(|(address, _)| *address == bound.address)
            })
    }

    fn block(&mut self, way: Way) {
        let address = self.socket_for(way.from).map(|bound| bound.address);
        self.blocked.extend(address.map(|address| (address, way.port)));
    }

    /// Takes packets from the endpoint, as many as are sorted at once.
    fn gather(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) -> bool {
        self.items.clear();
        let mut gathered = std::mem::take(&mut self.gathered);
        gathered.clear();
        let open = |from| !self.has_no_room(from);
        endpoint.gather(now, region, &open, MOST_GATHERED, &mut gathered);
        let any = !gathered.is_empty();
        // Messages of connection management come first.
        if let Some(Payload::Management(_)) = gathered.first().map(|first| first.packet.payload()) {
            self.drop_unconfirmed(now, endpoint, &mut gathered);
        }
        gathered.retain(|queued| {
            let item = TrainItem::of(endpoint, queued);
            self.items.extend(item);
            item.is_some()
        });
        self.gathered = gathered;
        any
    }

    /// Drops messages without a confirmed connection, as the network may drop them: of those beyond
    /// a few in the time that the system looks for a neighbour, what does not fit the half of a send
    /// buffer. Answers to forged addresses, which no neighbour has, would fill it, and delay all
    /// connections.
    #[inline(never)]
    fn drop_unconfirmed(
        &mut self,
        now: Instant,
        endpoint: &Endpoint,
        gathered: &mut Vec<QueuedPacket>,
    ) {
        let (since, mut sent) = self.unconfirmed;
        if since.is_none_or(|since| now.saturating_duration_since(since) >= NEIGHBOUR_WAIT) {
            (self.unconfirmed.0, sent) = (Some(now), 0);
        }
        let (mut address, mut few, mut room) = (None, 0, 0);
        gathered.retain(|queued| {
            let Some(from) = endpoint.unconfirmed(queued) else { return true };
            if address != Some(from) {
                address = Some(from);
                let places = self.socket_for(from).map(Bound::unconfirmed_places);
                (few, room) = places.unwrap_or_default();
            }
            let leaves = sent < few || room > 0;
            (sent, room) = (sent.saturating_add(leaves.into()), room.saturating_sub(1));
            leaves
        });
        self.unconfirmed.1 = sent;
    }

    /// Sends a train, or its datagrams one by one where there are no trains.
    fn depart(&mut self, now: Instant, train: &[u16], endpoint: &mut Endpoint, region: &Region) {
        let Some(first) = train.first() else { return };
        let way = self.items[usize::from(*first)].way;
        let longest = self.socket_for(way.from).map_or(1, Bound::longest_train);
        let longest = longest.min(self.singles.longest_train(now, way.from));
        let longest = longest.min(endpoint.longest_train(&self.gathered[usize::from(*first)]));
        for part in train.chunks(longest) {
            let sent = self.send_train(way, part, endpoint, region);
            if part.len() > 1 && matches!(sent, Err(Errno::EIO | Errno::EINVAL)) {
                if self.depart_singly(way, part, endpoint, region) {
                    self.singles.only(now, way.from);
                }
            } else {
                self.note(sent);
            }
        }
    }

    /// Sends the datagrams of a refused train one by one; returns whether all were sent.
    fn depart_singly(
        &mut self,
        way: Way,
        train: &[u16],
        endpoint: &mut Endpoint,
        region: &Region,
    ) -> bool {
        let mut left = true;
        for one in train.chunks(1) {
            let sent = self.send_train(way, one, endpoint, region);
            left &= sent.is_ok() && !self.has_no_room(way.from);
            self.note(sent);
        }
        left
    }

    /// Sends a train, or holds it if the socket has no room.
    ///
    /// Its bytes are copied to one place first. The kernel copies them in any case, and copying
    /// from one place is so much cheaper than from three for each datagram that a copy of our own,
    /// of bytes that the CRC has loaded into the cache, pays: 7.9 us for fifteen datagrams of 4 KiB
    /// instead of 9.4.
    fn send_train(
        &mut self,
        way: Way,
        train: &[u16],
        endpoint: &mut Endpoint,
        region: &Region,
    ) -> Result<(), Errno> {
        self.train.clear();
        let mut count = 0;
        for index in train {
            let (queued, begin) = (&self.gathered[usize::from(*index)], self.train.len());
            let identification = train_identification(count);
            if !endpoint.append(queued, identification, region, &mut self.train) {
                // Its queue pair has failed while the next ones were gathered. The identifications
                // of the following ones would be wrong, and most of them are of that queue pair.
                break;
            }
            if let Some(capture) = &self.capture
                && let Some((flow, _)) = endpoint.envelope(queued)
            {
                let datagram = [&self.train[begin..], &[], &[]];
                capture.add(Direction::Sent, &flow, way.tos, identification, datagram);
            }
            endpoint.depart(queued, count);
            count += 1;
        }
        if count == 0 {
            return Ok(());
        }
        let each = (count > 1).then_some(self.items[usize::from(train[0])].bytes as u16);
        if !self.has_no_room(way.from) {
            let sent = self.send(way, each, &self.train);
            if sent != Err(Errno::EAGAIN) {
                return sent;
            }
            self.block(way);
        }
        if self.held.len() < MOST_HELD {
            self.held.push_back(Held { way, each, bytes: self.train.clone() });
        }
        Ok(())
    }

    fn send(&self, way: Way, each: Option<u16>, bytes: &[u8]) -> Result<(), Errno> {
        match self.socket_for(way.from) {
            Some(bound) => bound.send(way, each, bytes),
            None => Err(Errno::EADDRNOTAVAIL),
        }
    }

    /// An error of sending counts as loss of the datagram in the network.
    fn note(&mut self, sent: Result<(), Errno>) {
        if let Err(errno) = sent
            && self.is_news(errno, Instant::now())
        {
            tracing::warn!("cannot send a datagram: {}", errno.desc());
        }
    }

    /// Whether an error is to be logged: rate-limited for each errno, as peers may fail in several
    /// ways at once.
    fn is_news(&mut self, errno: Errno, now: Instant) -> bool {
        let known = self.troubles.iter().position(|(known, _)| *known == errno);
        let at = known.unwrap_or(self.troubles.len());
        if known.is_none() {
            self.troubles.push((errno, LogInterval::default()));
        }
        self.troubles[at].1.is_due(now, WARN_INTERVAL)
    }

    /// Whether a datagram waits for room in its socket.
    pub(super) fn is_blocked(&self) -> bool {
        !self.held.is_empty()
    }

    /// Makes room in sockets with held trains end a sleep, and only in those.
    fn watch_for_room(&mut self) {
        if self.blocked == self.watched {
            return;
        }
        for (places, room) in [(&self.watched, false), (&self.blocked, true)] {
            let other = if room { &self.watched } else { &self.blocked };
            for place in places.iter().filter(|place| !other.contains(place)) {
                let (address, port) = *place;
                let Some(bound) = self.own(address) else { continue };
                let socket = bound.sender(port);
                let room = if room { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
                // Only the socket of the RoCE port is read.
                let comes =
                    if port == ROCE_PORT { EpollFlags::EPOLLIN } else { EpollFlags::empty() };
                let mut event = EpollEvent::new(comes | room, socket.as_raw_fd() as u64);
                // It can only fail for a descriptor that is not in the set; all of ours are.
                let _ = self.epoll.modify(socket, &mut event);
            }
        }
        self.watched.clone_from(&self.blocked);
    }
}

/// The fabric of a packet, if it is another one than `own` of `count`. The kernel's program steers
/// such a packet here only as part of a train, because it decides by the first packet.
fn elsewhere(count: u32, own: u32, datagram: &[u8]) -> Option<usize> {
    if count == 1 {
        return None;
    }
    let owner = steered(count, datagram).filter(|owner| *owner != own)?;
    Some(owner as usize)
}

impl AsFd for Udp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};

    use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
    use nix::sys::epoll::EpollTimeout;
    use nix::sys::socket::setsockopt;
    use nix::{setsockopt_impl, sockopt_impl};

    use super::super::cm::mad::MAD_BYTES;
    use super::super::config::{Config, Options};
    use crate::soft::udp::*;
    use crate::{Event, Pool, PoolPlan, QpLimits};

    /// The sockets whose room would end a sleep. (On the loopback interface all have room.)
    fn watched(udp: &Udp) -> Vec<IpAddr> {
        let mut events = [EpollEvent::empty(); 8];
        let count = udp.epoll.wait(&mut events, EpollTimeout::ZERO).unwrap();
        let room = |event: &&EpollEvent| event.events().contains(EpollFlags::EPOLLOUT);
        let bound = |event: &EpollEvent| {
            let of = |bound: &&Arc<Bound>| bound.as_fd().as_raw_fd() as u64 == event.data();
            udp.sockets.iter().find(of).unwrap().address
        };
        events[..count].iter().filter(room).map(bound).collect()
    }

    #[test]
    fn held_datagrams_wait_only_for_their_own_socket() {
        let shared = Arc::new(Shared::new(1, Options::default()).unwrap());
        let mut udp = Udp::new(Arc::clone(&shared), 0).unwrap();
        let [a, b]: [IpAddr; 2] = ["127.0.71.1", "127.0.71.2"].map(|ip| ip.parse().unwrap());
        for ip in [a, b] {
            shared.listen(SocketAddr::new(ip, 4420)).unwrap();
        }
        shared.news(0, |_| false).sockets.into_iter().for_each(|socket| udp.adopt(socket));
        let held = |from, number| {
            let way = Way { from, port: ROCE_PORT, to: b, tos: 0 };
            Held { way, each: None, bytes: vec![number] }
        };
        udp.held.extend([held(a, 0), held(a, 1), held(b, 2), held(a, 3)]);
        let left = |room: fn(&Held) -> bool| {
            move |_: &Udp, held: &Held| if room(held) { Ok(()) } else { Err(Errno::EAGAIN) }
        };
        let waiting = |udp: &Udp| udp.held.iter().map(|held| held.bytes[0]).collect::<Vec<_>>();
        udp.release(left(|_| false));
        assert_eq!((watched(&udp), waiting(&udp)), (vec![a, b], vec![0, 1, 2, 3]));
        // Trains from one address stay in order, and do not wait for others.
        udp.release(left(|held| held.bytes[0] != 1));
        assert_eq!((watched(&udp), waiting(&udp)), (vec![a], vec![1, 3]));
        assert_eq!([a, b].map(|from| udp.has_no_room(from)), [true, false]);
        udp.held.push_back(held(b, 4));
        udp.release(left(|held| held.bytes[0] == 1));
        assert_eq!((watched(&udp), waiting(&udp)), (vec![a, b], vec![3, 4]));
        udp.release(left(|_| true));
        assert_eq!((watched(&udp), waiting(&udp)), (vec![], vec![]));
    }

    #[test]
    fn a_busy_address_does_not_starve_other_addresses() {
        let endpoint = |mut number: u64| {
            let entropy = move || {
                number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
                number
            };
            let config = Config::default();
            Endpoint::new(config, Box::new(entropy))
        };
        let udp = |options| Udp::new(Arc::new(Shared::new(1, options).unwrap()), 0).unwrap();
        let addresses = ["127.0.73.1", "127.0.73.2", "127.0.73.3"];
        let [loud, quiet, source] = addresses.map(|ip| ip.parse().unwrap());
        let (mut target, mut asked) = (udp(Options::default()), endpoint(1));
        let [loud, quiet] = [loud, quiet].map(|ip| SocketAddr::new(ip, 4420));
        for at in [loud, quiet] {
            target.listen(at, &mut asked).unwrap();
        }
        let options = Options { source: Some(source), ..Options::default() };
        let (mut host, mut asking) = (udp(options), endpoint(2));
        let pool = pool();
        let (now, region) = (Instant::now(), pool.region());
        let limits = QpLimits { receives: 1, sends: 1, reads: 1 };
        for to in [quiet, loud, loud, loud, loud, loud, loud, loud] {
            let path = host.path(to, &mut asking).unwrap();
            asking.connect(now, path, to, &[], limits).unwrap();
            // Each separately, so that they arrive as single datagrams.
            host.transmit(now, &mut asking, region);
        }
        let wait = |target: &Udp, addresses: &[SocketAddr]| {
            let fd = |at: &SocketAddr| target.own(at.ip()).unwrap().as_fd();
            let fds = addresses.iter().map(|at| PollFd::new(fd(at), PollFlags::POLLIN));
            let ready = poll(&mut fds.collect::<Vec<_>>(), PollTimeout::from(30_000u16)).unwrap();
            assert!(ready > 0, "nothing has come");
        };
        wait(&target, &[quiet]);
        let mut told = Vec::new();
        while told.len() < 8 {
            target.receive(now, &mut asked, region, 1);
            match asked.next_event() {
                Some(Event::Incoming(incoming)) => told.push(incoming.local),
                None => wait(&target, &[loud, quiet]),
                other => panic!("{other:?}"),
            }
        }
        let place = told.iter().position(|local| *local == quiet);
        assert!(place.is_some_and(|place| place < 2), "{told:?}");
    }

    /// Connection requests from `from`, as of an attacker that keeps a fabric busy.
    fn requests(from: IpAddr, to: SocketAddr, count: usize) -> Vec<Vec<u8>> {
        let mut number = 0u64;
        let entropy = move || {
            number += 1;
            number.wrapping_mul(0x9e37_79b9_7f4a_7c15)
        };
        let mut asking = Endpoint::new(Config::default(), Box::new(entropy));
        let (pool, now) = (pool(), Instant::now());
        let limits = QpLimits { receives: 1, sends: 1, reads: 1 };
        for _ in 0..count {
            asking.connect(now, from, to, &[], limits).unwrap();
        }
        let datagram = || {
            let (mut next, mut bytes) = (Vec::with_capacity(1), Vec::new());
            asking.gather(now, pool.region(), &|_| true, 1, &mut next);
            asking.append(next.first()?, 0, pool.region(), &mut bytes).then_some(bytes)
        };
        std::iter::from_fn(datagram).collect()
    }

    #[test]
    fn tos_and_ecn_bits_of_received_datagrams_are_reported() {
        let options = Options::default();
        // Other tests on this machine use the only other address.
        let lock = UnixAddr::from_abstract_name("nvmfd test of ::1").unwrap();
        let _lock = loop {
            match UnixDatagram::bind_addr(&lock) {
                Ok(lock) => break lock,
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        };
        for addresses in [["127.0.74.3", "127.0.74.4"], ["::1", "::1"]] {
            let [from, to]: [IpAddr; 2] = addresses.map(|ip| ip.parse().unwrap());
            let receiver = Bound::new(SocketAddr::new(to, 0), &options, None).unwrap();
            let sender = match from == to {
                true => &receiver,
                false => &Bound::new(SocketAddr::new(from, 0), &options, None).unwrap(),
            };
            for tos in [0, 0x68, 0x6b] {
                let way = Way { from, port: ROCE_PORT, to, tos };
                sender.send(way, None, b"datagram").unwrap();
                let mut descriptors = [PollFd::new(receiver.as_fd(), PollFlags::POLLIN)];
                poll(&mut descriptors, PollTimeout::from(5000u16)).unwrap();
                let received = receiver.receive(&mut [0; 64]).unwrap();
                assert_eq!((received.from.ip(), received.tos), (from, tos));
            }
        }
    }

    #[test]
    fn a_receive_call_is_bounded_while_packets_are_forwarded() {
        let shared = Arc::new(Shared::new(2, Options::default()).unwrap());
        let mut udp = Udp::new(Arc::clone(&shared), 0).unwrap();
        let [from, to]: [IpAddr; 2] = ["127.0.74.1", "127.0.74.2"].map(|ip| ip.parse().unwrap());
        let to = SocketAddr::new(to, 4420);
        let way = (SocketAddr::new(from, ROCE_PORT), SocketAddr::new(to.ip(), ROCE_PORT), 0);
        let mut left = requests(from, to, 20);
        let mut first = left.pop().unwrap();
        let (bring, mut number) = (Arc::clone(&shared), 0);
        // It takes random numbers for each request: another one has arrived by then.
        let entropy = move || {
            if let Some(mut next) = left.pop() {
                bring.forward(0, way, next.len(), &mut next);
            }
            number += 1;
            number
        };
        let config = Config { unverified: 0, ..Config::default() };
        let mut endpoint = Endpoint::new(config, Box::new(entropy));
        endpoint.listen(to);
        shared.forward(0, way, first.len(), &mut first);
        let pool = pool();
        udp.receive(Instant::now(), &mut endpoint, pool.region(), 1);
        assert_eq!(endpoint.counters().received, 1);
        assert!(shared.is_called(0), "nobody would look for the others");
        while shared.is_called(0) {
            udp.receive(Instant::now(), &mut endpoint, pool.region(), 1);
        }
        assert_eq!(endpoint.counters().received, 20);
    }

    /// Else one call answers 4,096 requests, while I/O waits, and the answers beyond 1,024 are lost.
    #[test]
    fn a_receive_call_is_bounded_while_trains_of_requests_arrive() {
        let [from, to]: [IpAddr; 2] = ["127.0.75.1", "127.0.75.2"].map(|ip| ip.parse().unwrap());
        let options = Options::default();
        let mut udp = Udp::new(Arc::new(Shared::new(1, options).unwrap()), 0).unwrap();
        let mut number = 0u64;
        let entropy = move || {
            number = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
            number
        };
        let config = Config { unverified: 0, half_open_per_source: 1024, ..Config::default() };
        let mut endpoint = Endpoint::new(config, Box::new(entropy));
        let to = SocketAddr::new(to, 4420);
        udp.listen(to, &mut endpoint).unwrap();
        let sender = Bound::new(SocketAddr::new(from, 0), &options, None).unwrap();
        let way = Way { from, port: ROCE_PORT, to: to.ip(), tos: 0 };
        for train in requests(from, to, 240).chunks(60) {
            let each = train[0].len() as u16;
            sender.send(way, Some(each), &train.concat()).unwrap();
        }
        let pool = pool();
        let mut descriptors = [PollFd::new(udp.sockets[0].as_fd(), PollFlags::POLLIN)];
        poll(&mut descriptors, PollTimeout::from(30_000u16)).unwrap();
        let mut rest = 240;
        while rest > 0 {
            let taken = udp.receive(Instant::now(), &mut endpoint, pool.region(), 256);
            let answers = endpoint.waiting_messages();
            assert!((1..ENOUGH_MESSAGES + 60).contains(&answers), "{answers} of {rest}");
            rest -= answers;
            assert!(!taken.all || rest == 0, "{rest} are not read");
            udp.transmit(Instant::now(), &mut endpoint, pool.region());
            endpoint.forget_sent();
        }
    }

    #[test]
    fn each_send_error_is_logged_at_most_once_a_minute() {
        let shared = Arc::new(Shared::new(1, Options::default()).unwrap());
        let mut udp = Udp::new(shared, 0).unwrap();
        let start = Instant::now();
        let kinds = [Errno::ENETUNREACH, Errno::EPERM];
        for (seconds, is_news) in [(0, true), (1, false), (59, false), (60, true), (61, false)] {
            let now = start + Duration::from_secs(seconds);
            assert_eq!(kinds.map(|errno| udp.is_news(errno, now)), [is_news; 2], "{seconds}");
        }
    }

    fn pool() -> Pool {
        let plan = PoolPlan::without_receives(1, 0, 4096);
        Pool::new(plan).unwrap()
    }

    sockopt_impl!(
        /// Without UDP checksums, so that the system refuses trains.
        NoCheck,
        SetOnly,
        libc::SOL_SOCKET,
        libc::SO_NO_CHECK,
        bool
    );

    #[test]
    fn a_refused_train_leaves_one_by_one_and_trains_are_tried_again() {
        let shared = Arc::new(Shared::new(1, Options::default()).unwrap());
        let mut udp = Udp::new(Arc::clone(&shared), 0).unwrap();
        let [a, b]: [IpAddr; 2] = ["127.0.72.1", "127.0.72.2"].map(|ip| ip.parse().unwrap());
        let mut endpoint = Endpoint::new(Config::default(), Box::new(|| 3));
        udp.listen(SocketAddr::new(a, 4420), &mut endpoint).unwrap();
        let peer = UdpSocket::bind(SocketAddr::new(b, ROCE_PORT)).unwrap();
        peer.set_nonblocking(true).unwrap();
        let pool = pool();
        let mut leave = |now, refused| {
            setsockopt(&*udp.sockets[0], NoCheck, &refused).unwrap();
            endpoint.forget_sent();
            (0..4).for_each(|_| endpoint.send_mad(a, b, [0; MAD_BYTES]));
            udp.transmit(now, &mut endpoint, pool.region());
            let arrived = std::iter::from_fn(|| peer.recv(&mut [0; 1024]).ok()).count();
            (arrived, udp.singles.longest_train(now, a))
        };
        let now = Instant::now();
        assert_eq!(leave(now, false), (4, usize::MAX));
        assert_eq!(leave(now, true), (4, 1), "a train that is refused");
        assert_eq!(leave(now, true), (4, 1), "no train");
        let late = now + Duration::from_secs(60);
        assert_eq!(leave(late, false), (4, usize::MAX), "trains once more");
        assert_eq!(leave(late, true), (4, 1), "refused once more");
    }
}
