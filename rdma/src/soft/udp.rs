//! UDP sockets, and what comes and goes through them: port 4791 of every address that is listened
//! at or connected from, watched by one epoll instance.

mod group;
mod option;
mod path;
mod socket;

use std::io::{self, ErrorKind, IoSlice};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use super::capture::{Capture, Direction};
use super::endpoint::{Endpoint, Path, ROCE_PORT, Transmit};
use super::icrc::Flow;
use super::psn::Qpn;
use crate::{FabricError, Region};
pub(crate) use group::Shared;
use path::{beside, payload_bytes, route};
use socket::Bound;
pub use socket::SocketBuffers;

/// Datagrams taken from a socket in one poll, at most.
const TAKEN_AT_ONCE: usize = 64;
/// Bytes of the largest datagram.
const DATAGRAM_BYTES: usize = 1 << 16;

/// A datagram that the socket had no room for, as it shall leave.
#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    from: IpAddr,
    to: SocketAddr,
    tos: u8,
}

/// An address where nobody listens any more.
#[derive(Debug)]
struct Retired {
    ip: IpAddr,
    /// This fabric has said that it does not need its socket.
    idle: bool,
    /// No fabric does.
    closing: bool,
}

/// The sockets of one fabric.
#[derive(Debug)]
pub(super) struct Udp {
    shared: Arc<Shared>,
    index: u32,
    /// Changes of what is shared that this fabric knows of.
    seen: u64,
    sockets: Vec<Arc<Bound>>,
    /// The addresses of those where nobody listens any more.
    retired: Vec<Retired>,
    epoll: Epoll,
    scratch: Vec<u8>,
    held: Held,
    /// Something waits in `held`.
    blocked: bool,
    /// The last trouble with sending that was told.
    trouble: Option<Errno>,
    /// Everything is written down there.
    pub(super) capture: Option<Capture>,
}

impl Udp {
    /// The sockets of the fabric with this index among those that share them.
    pub(super) fn new(shared: Arc<Shared>, index: u32) -> Result<Udp, FabricError> {
        let failed = |e: Errno| FabricError(format!("cannot make an epoll instance: {}", e.desc()));
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(failed)?;
        let bell = shared.bell(index);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, bell.as_raw_fd() as u64);
        epoll.add(bell, event).map_err(failed)?;
        let unspecified = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        let held = Held {
            bytes: Vec::with_capacity(DATAGRAM_BYTES),
            from: unspecified.ip(),
            to: unspecified,
            tos: 0,
        };
        Ok(Udp {
            shared,
            index,
            seen: 0,
            sockets: Vec::new(),
            retired: Vec::new(),
            epoll,
            scratch: vec![0; DATAGRAM_BYTES],
            held,
            blocked: false,
            trouble: None,
            capture: None,
        })
    }

    /// What the system has granted.
    pub(super) fn buffers(&self) -> impl Iterator<Item = SocketBuffers> {
        self.sockets.iter().map(|bound| bound.buffers)
    }

    pub(super) fn listen(
        &mut self,
        at: SocketAddr,
        endpoint: &mut Endpoint,
    ) -> Result<(), FabricError> {
        self.shared.listen(at)?;
        self.follow(endpoint);
        Ok(())
    }

    pub(super) fn unlisten(&mut self, at: SocketAddr, endpoint: &mut Endpoint) {
        self.shared.unlisten(at);
        self.follow(endpoint);
    }

    /// Takes over what any of the fabrics has changed.
    pub(super) fn follow(&mut self, endpoint: &mut Endpoint) {
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
        let event = EpollEvent::new(EpollFlags::EPOLLIN, socket.as_fd().as_raw_fd() as u64);
        if let Err(e) = self.epoll.add(&*socket, event) {
            tracing::error!("cannot watch a socket, its connections will fail: {}", e.desc());
        }
        self.sockets.push(socket);
    }

    /// Says which retired addresses are not used here any more, and gives back the sockets of those
    /// that no fabric uses.
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
            if let Err(socket) = self.shared.give_back(self.index, socket) {
                self.adopt(socket);
            }
        }
    }

    /// Before sleep: the others may ring from now on.
    pub(super) fn arm(&mut self) {
        self.shared.hush(self.index);
    }

    /// The way to a peer: opens the socket for it.
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
        let from = match from.ip() == to.ip() && source.is_none() {
            true => self.open_beside(to)?,
            false => {
                if self.socket_for(from.ip()).is_none() {
                    self.shared.open_source(from)?;
                }
                from.ip()
            }
        };
        self.follow(endpoint);
        let (_, link) = route(Some(from), to).map_err(failed)?;
        let mtu = payload_bytes(link, to.is_ipv6(), most).ok_or_else(|| {
            FabricError(format!("cannot connect to {to}: the link's MTU of {link} is too small"))
        })?;
        Ok(Path { from, mtu })
    }

    /// Whether there is a socket for an address of ours.
    pub(super) fn has(&self, address: IpAddr) -> bool {
        self.socket_for(address).is_some()
    }

    /// The largest payload of a packet on the way to a peer that has found us.
    pub(super) fn path_mtu(&self, from: IpAddr, to: IpAddr) -> Option<u32> {
        let (_, link) = route(Some(from), SocketAddr::new(to, ROCE_PORT)).ok()?;
        payload_bytes(link, to.is_ipv6(), self.shared.options().config.mtu)
    }

    /// An address of this machine beside that of the peer, which is one as well.
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

    /// Hands datagrams to the endpoint, until `events` of them wait to be told, or there is none.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
        events: usize,
    ) {
        if self.shared.is_called(self.index) {
            self.receive_strays(now, endpoint, region);
        }
        for index in 0..self.sockets.len() {
            for _ in 0..TAKEN_AT_ONCE {
                if endpoint.waiting_events() >= events {
                    return;
                }
                let Some((from, to, len)) = self.sockets[index].receive(&mut self.scratch) else {
                    break;
                };
                let datagram = &self.scratch[..len];
                if let Some(capture) = &self.capture {
                    let flow =
                        Flow { source: from, destination: SocketAddr::new(to.ip(), ROCE_PORT) };
                    capture.add(Direction::Received, &flow, 0, 0, [datagram, &[], &[]]);
                }
                match self.elsewhere(datagram) {
                    Some(other) => self.shared.forward(other, from, to, datagram),
                    None => endpoint.handle(now, from, to, 0, datagram, region),
                }
            }
        }
    }

    /// The fabric that a packet is for, when that is another. The kernel's program does not bring
    /// such here, unless a device has merged several packets into one: it decides by the first.
    fn elsewhere(&self, datagram: &[u8]) -> Option<u32> {
        let count = self.shared.count();
        if count == 1 {
            return None;
        }
        let number = datagram.get(5..8)?.first_chunk::<3>()?;
        let qpn = Qpn::from_wire(*number);
        let owner = qpn.get() % count;
        (qpn != Qpn::GSI && owner != self.index).then_some(owner)
    }

    fn receive_strays(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        let mut used = None;
        while let Some(stray) = self.shared.stray(self.index, used.take()) {
            endpoint.handle(now, stray.from, stray.to, 0, &stray.bytes, region);
            used = Some(stray.bytes);
        }
    }

    /// Sends what the endpoint has to say, as long as the sockets have room.
    pub(super) fn transmit(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        if self.blocked {
            let Held { bytes, from, to, tos } = &self.held;
            match self.send(*from, *to, *tos, &[IoSlice::new(bytes)]) {
                Err(Errno::EAGAIN) => return,
                sent => {
                    self.set_blocked(false);
                    self.note(sent);
                }
            }
        }
        while let Some(transmit) = endpoint.poll_transmit(now, region) {
            let Transmit { flow, outgoing, tos, .. } = &transmit;
            let payload = endpoint.payload(&transmit, region);
            let trailer = outgoing.seal(flow, 0, payload);
            let parts = [outgoing.header(), payload, trailer.as_slice()];
            if let Some(capture) = &self.capture {
                capture.add(Direction::Sent, flow, *tos, 0, parts);
            }
            let (from, to) = (flow.source.ip(), flow.destination);
            match self.send(from, to, *tos, &parts.map(IoSlice::new)) {
                Err(Errno::EAGAIN) => {
                    self.held.bytes.clear();
                    parts.iter().for_each(|part| self.held.bytes.extend_from_slice(part));
                    (self.held.from, self.held.to, self.held.tos) = (from, to, *tos);
                    self.set_blocked(true);
                    return;
                }
                sent => self.note(sent),
            }
        }
    }

    fn send(
        &self,
        from: IpAddr,
        to: SocketAddr,
        tos: u8,
        parts: &[IoSlice<'_>],
    ) -> Result<(), Errno> {
        match self.socket_for(from) {
            Some(bound) => bound.send(from, to, tos, parts),
            None => Err(Errno::EADDRNOTAVAIL),
        }
    }

    /// A datagram that cannot be sent is lost, as others are on the way: once is worth a line.
    fn note(&mut self, sent: Result<(), Errno>) {
        match sent {
            Ok(()) => {}
            Err(errno) if self.trouble == Some(errno) => {}
            Err(errno) => {
                self.trouble = Some(errno);
                tracing::warn!("a datagram was not sent: {}", errno.desc());
            }
        }
    }

    /// Whether a datagram waits for room in its socket.
    pub(super) fn is_blocked(&self) -> bool {
        self.blocked
    }

    /// Whether room in the socket of the datagram held back shall end a sleep.
    fn set_blocked(&mut self, blocked: bool) {
        self.blocked = blocked;
        let Some(bound) = self.socket_for(self.held.from) else { return };
        let room = if blocked { EpollFlags::EPOLLOUT } else { EpollFlags::empty() };
        let flags = EpollFlags::EPOLLIN | room;
        let mut event = EpollEvent::new(flags, bound.as_fd().as_raw_fd() as u64);
        // It can only fail for a descriptor that is not in the set; all of ours are.
        let _ = self.epoll.modify(bound, &mut event);
    }
}

impl AsFd for Udp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}
