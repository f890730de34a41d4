//! The only file with a socket: UDP port 4791 of every address that is listened at or connected
//! from, one non-blocking socket each, watched by one epoll instance.
//!
//! The sockets are never connected and always set the "don't fragment" bit, because only then does
//! Linux send the IPv4 identification 0, which the invariant CRC covers and a UDP socket neither
//! chooses nor sees.
//!
//! They share their port (`SO_REUSEPORT`), so that several reactors can have one each. What
//! otherwise keeps two fabrics off one address is a socket of another family, bound to a name made
//! of that address: the kernel lets nobody else have it, in this network namespace, until we end.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::time::Instant;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg, setsockopt, sockopt as known,
};
use socket2::{Domain, MsgHdr, Protocol, SockAddr, Socket, Type};

use super::capture::{Capture, Direction};
use super::endpoint::{Endpoint, Path, ROCE_PORT, Transmit};
use super::header::{Bth, ICRC_BYTES};
use super::icrc::Flow;
use super::mad::MAD_BYTES;
use super::provider::Options;
use super::sockopt::{Control, MtuDiscover, MtuDiscoverV6, MtuV6, NoCheckV6};
use crate::{FabricError, Region};

/// Datagrams taken from a socket in one poll, at most.
const TAKEN_AT_ONCE: usize = 64;
/// Bytes of the largest datagram.
const DATAGRAM_BYTES: usize = 1 << 16;
/// Bytes before and after a payload in the longest packet with one: UDP header, BTH, RETH,
/// immediate data and CRC.
const OVERHEAD_BYTES: u32 = 8 + Bth::BYTES as u32 + 16 + 4 + ICRC_BYTES as u32;

/// What the system has granted to a socket.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketBuffers {
    /// Where it is bound.
    pub address: IpAddr,
    /// The receive buffer, in bytes as the system counts them (its own overhead included).
    pub receive_bytes: usize,
    /// The send buffer, in the same bytes.
    pub send_bytes: usize,
    /// What one connection's window of packets may take of the receive buffer.
    pub window_bytes: usize,
}

#[derive(Debug)]
struct Bound {
    socket: Socket,
    address: IpAddr,
    buffers: SocketBuffers,
    /// Keeps others off the address.
    _claim: UnixDatagram,
}

/// A datagram that the socket had no room for, as it shall leave.
#[derive(Debug)]
struct Held {
    bytes: Vec<u8>,
    from: IpAddr,
    to: SocketAddr,
    tos: u8,
}

/// The sockets of one fabric.
#[derive(Debug)]
pub(super) struct Udp {
    sockets: Vec<Bound>,
    epoll: Epoll,
    source: Option<IpAddr>,
    receive_buffer_bytes: usize,
    send_buffer_bytes: usize,
    window_packets: usize,
    mtu: u32,
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
    pub(super) fn new(options: &Options) -> Result<Udp, FabricError> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
            .map_err(|e| FabricError(format!("cannot make an epoll instance: {}", e.desc())))?;
        let unspecified = SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0);
        let held = Held {
            bytes: Vec::with_capacity(DATAGRAM_BYTES),
            from: unspecified.ip(),
            to: unspecified,
            tos: 0,
        };
        Ok(Udp {
            sockets: Vec::new(),
            epoll,
            source: options.source,
            receive_buffer_bytes: options.receive_buffer_bytes,
            send_buffer_bytes: options.send_buffer_bytes,
            window_packets: options.config.window as usize,
            mtu: options.config.mtu,
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

    /// Opens the socket of an address, if it is not open.
    pub(super) fn open(&mut self, at: SocketAddr) -> Result<(), FabricError> {
        if self.sockets.iter().any(|bound| bound.address == at.ip()) {
            return Ok(());
        }
        let bound = self.bind(at).map_err(|refusal| FabricError(refusal.sentence(at.ip())))?;
        let SocketBuffers { receive_bytes, send_bytes, window_bytes, .. } = bound.buffers;
        tracing::info!(address = %at.ip(), receive_bytes, send_bytes, "UDP port 4791 opened");
        if receive_bytes < window_bytes {
            tracing::warn!(
                "the receive buffer of {} has {receive_bytes} bytes, but one connection may fill \
                 {window_bytes}: packets will get lost; `sysctl -w net.core.rmem_max={}`",
                at.ip(),
                self.receive_buffer_bytes
            );
        }
        self.sockets.push(bound);
        Ok(())
    }

    /// Closes the sockets of addresses that are not used; true when others are left that nobody
    /// listens at for themselves.
    pub(super) fn retain(&mut self, used: impl Fn(IpAddr) -> bool) -> bool {
        let before = self.sockets.len();
        self.sockets.retain(|bound| used(bound.address));
        self.sockets.len() == before && before > 0
    }

    /// The way to a peer: opens the socket for it.
    pub(super) fn path(&mut self, to: SocketAddr) -> Result<Path, FabricError> {
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
        let (from, _) = route(self.source, to).map_err(failed)?;
        let from = match from.ip() == to.ip() && self.source.is_none() {
            true => self.open_beside(to)?,
            false => {
                if self.socket_for(from.ip()).is_none() {
                    self.open(from)?;
                }
                from
            }
        };
        let (_, link) = route(Some(from.ip()), to).map_err(failed)?;
        let mtu = payload_bytes(link, to.is_ipv6(), self.mtu).ok_or_else(|| {
            FabricError(format!("cannot connect to {to}: the link's MTU of {link} is too small"))
        })?;
        Ok(Path { from: from.ip(), mtu })
    }

    /// The largest payload of a packet on the way to a peer that has found us.
    pub(super) fn path_mtu(&self, from: IpAddr, to: IpAddr) -> Option<u32> {
        let (_, link) = route(Some(from), SocketAddr::new(to, ROCE_PORT)).ok()?;
        payload_bytes(link, to.is_ipv6(), self.mtu)
    }

    /// An address of this machine beside that of the peer, which is one as well.
    fn open_beside(&mut self, to: SocketAddr) -> Result<SocketAddr, FabricError> {
        let mut why = None;
        for address in beside(to.ip()) {
            let at = SocketAddr::new(address, 0);
            if self.sockets.iter().any(|bound| bound.address == address) {
                return Ok(at);
            }
            match self.open(at) {
                Ok(()) => return Ok(at),
                Err(e) => why = Some(e.0),
            }
        }
        Err(FabricError(format!(
            "cannot connect to {to}, an address of this machine itself, for want of another such \
             address with a free UDP port 4791{}",
            why.map(|why| format!(": {why}")).unwrap_or_default()
        )))
    }

    /// The socket that sends from an address: its own, or one for all addresses.
    fn socket_for(&self, from: IpAddr) -> Option<&Bound> {
        let own = self.sockets.iter().find(|bound| bound.address == from);
        own.or_else(|| {
            let all = |bound: &&Bound| {
                bound.address.is_unspecified() && bound.address.is_ipv4() == from.is_ipv4()
            };
            self.sockets.iter().find(all)
        })
    }

    fn bind(&self, at: SocketAddr) -> Result<Bound, Refusal> {
        let address = at.ip();
        let claim = claim(address).map_err(|_| Refusal::Claimed)?;
        let socket =
            Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        socket.set_cloexec(true)?;
        socket.set_reuse_port(true)?;
        let all = address.is_unspecified();
        if address.is_ipv4() {
            setsockopt(&socket, MtuDiscover, &libc::IP_PMTUDISC_DO)?;
            setsockopt(&socket, known::Ipv4PacketInfo, &all)?;
        } else {
            socket.set_only_v6(true)?;
            setsockopt(&socket, MtuDiscoverV6, &libc::IPV6_PMTUDISC_DO)?;
            setsockopt(&socket, known::Ipv6RecvPacketInfo, &all)?;
            // RoCE sends no UDP checksum; its own covers more.
            setsockopt(&socket, NoCheckV6, &true)?;
        }
        // With privilege as much as we ask for, else as much as the system's limit allows.
        let _ = setsockopt(&socket, known::RcvBufForce, &self.receive_buffer_bytes)
            .or_else(|_| setsockopt(&socket, known::RcvBuf, &self.receive_buffer_bytes));
        let _ = setsockopt(&socket, known::SndBufForce, &self.send_buffer_bytes)
            .or_else(|_| setsockopt(&socket, known::SndBuf, &self.send_buffer_bytes));
        let mut local = at;
        local.set_port(ROCE_PORT);
        socket.bind(&local.into())?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, socket.as_raw_fd() as u64);
        self.epoll.add(socket.as_fd(), event)?;
        let buffers = SocketBuffers {
            address,
            receive_bytes: socket.recv_buffer_size()?,
            send_bytes: socket.send_buffer_size()?,
            // The system counts the whole pages that a datagram lies in.
            window_bytes: self.window_packets * (2 * self.mtu as usize + 256),
        };
        Ok(Bound { socket, address, buffers, _claim: claim })
    }

    /// Hands datagrams to the endpoint, until `events` of them wait to be told, or there is none.
    pub(super) fn receive(
        &mut self,
        now: Instant,
        endpoint: &mut Endpoint,
        region: &Region,
        events: usize,
    ) {
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
                endpoint.handle(now, from, to, 0, datagram, region);
            }
        }
    }

    /// Sends what the endpoint has to say, as long as the sockets have room.
    pub(super) fn transmit(&mut self, now: Instant, endpoint: &mut Endpoint, region: &Region) {
        if self.blocked {
            let Held { bytes, from, to, tos } = &self.held;
            let parts = [IoSlice::new(bytes)];
            match self.send(*from, *to, *tos, &parts) {
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
        let Some(bound) = self.socket_for(from) else { return Ok(()) };
        let mut control = Control::NONE;
        if bound.address.is_unspecified() {
            control.source(from);
        }
        if tos != 0 {
            control.type_of_service(tos, to.is_ipv6());
        }
        let to = SockAddr::from(to);
        let message =
            MsgHdr::new().with_addr(&to).with_buffers(parts).with_control(control.as_slice());
        let sent = bound.socket.sendmsg(&message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        sent.map(drop).map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
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
        let mut event =
            EpollEvent::new(EpollFlags::EPOLLIN | room, bound.socket.as_raw_fd() as u64);
        // It can only fail for a descriptor that is not in the set; all of ours are.
        let _ = self.epoll.modify(bound.socket.as_fd(), &mut event);
    }

    pub(super) fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.0.as_fd()
    }
}

impl Bound {
    /// The next datagram: from whom, to which of our addresses, and its length.
    fn receive(&self, into: &mut [u8]) -> Option<(SocketAddr, SocketAddr, usize)> {
        let mut control = [0; 128];
        let wanted = self.address.is_unspecified();
        let control = wanted.then_some(&mut control[..]);
        let mut parts = [IoSliceMut::new(into)];
        let fd = self.socket.as_raw_fd();
        // Errors belong to datagrams that we sent before (an unreachable port, say): the peers'
        // connections find out by themselves. None of them means that nothing more is there.
        let received =
            recvmsg::<SockaddrStorage>(fd, &mut parts, control, MsgFlags::MSG_DONTWAIT).ok()?;
        let from = socket_address(received.address.as_ref()?)?;
        let to = match wanted {
            false => self.address,
            true => received.cmsgs().ok()?.find_map(|message| match message {
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    Some(Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into())
                }
                ControlMessageOwned::Ipv6PacketInfo(info) => {
                    Some(Ipv6Addr::from(info.ipi6_addr.s6_addr).into())
                }
                _ => None,
            })?,
        };
        Some((from, SocketAddr::new(to, ROCE_PORT), received.bytes))
    }
}

/// Why a socket could not be had.
enum Refusal {
    /// Another program of this kind has the address.
    Claimed,
    System(io::Error),
}

impl From<io::Error> for Refusal {
    fn from(e: io::Error) -> Refusal {
        Refusal::System(e)
    }
}

impl From<Errno> for Refusal {
    fn from(e: Errno) -> Refusal {
        Refusal::System(e.into())
    }
}

impl Refusal {
    fn sentence(&self, address: IpAddr) -> String {
        let remedy = match self {
            Refusal::Claimed => {
                "another soft fabric has it: stop that one, or use another address".to_owned()
            }
            Refusal::System(e) if e.kind() == ErrorKind::AddrInUse => taken(),
            Refusal::System(e) if e.kind() == ErrorKind::AddrNotAvailable => {
                "this machine does not have that address (see `ip address`)".to_owned()
            }
            Refusal::System(e) if e.kind() == ErrorKind::PermissionDenied => {
                format!("the system forbids it ({e}): look at its security policy")
            }
            Refusal::System(e) => e.to_string(),
        };
        format!("cannot open UDP port {ROCE_PORT}, that of RoCEv2, at {address}: {remedy}")
    }
}

/// Who has the port, and what to do.
fn taken() -> String {
    let device = std::fs::read_dir("/sys/class/infiniband").ok().and_then(|list| {
        let names = list.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.into_iter().find(|name| name.starts_with("rxe"))
    });
    let elsewhere = "or use another network namespace";
    match device {
        Some(name) => format!(
            "the kernel's rdma_rxe has it in this network namespace: `rdma link delete {name}` and \
             `modprobe -r rdma_rxe`, or use that device with the provider \"verbs\", {elsewhere}"
        ),
        None if std::path::Path::new("/sys/module/rdma_rxe").exists() => format!(
            "the kernel's rdma_rxe has it in this network namespace: `modprobe -r rdma_rxe`, \
             {elsewhere}"
        ),
        None => format!(
            "another program has it (see `ss -lunp sport = :{ROCE_PORT}`): stop it, use another \
             address, {elsewhere}"
        ),
    }
}

/// A name that only one fabric can have at a time.
fn claim(address: IpAddr) -> io::Result<UnixDatagram> {
    UnixDatagram::bind_addr(&UnixAddr::from_abstract_name(format!("nvmfd-rocev2 {address}"))?)
}

/// Which address of ours the routes choose for a peer, and the MTU of that way.
fn route(source: Option<IpAddr>, to: SocketAddr) -> io::Result<(SocketAddr, u32)> {
    let socket = Socket::new(Domain::for_address(to), Type::DGRAM, Some(Protocol::UDP))?;
    if let Some(source) = source {
        socket.bind(&SocketAddr::new(source, 0).into())?;
    }
    // Nothing is sent.
    socket.connect(&to.into())?;
    let local = socket.local_addr()?.as_socket().ok_or(ErrorKind::Unsupported)?;
    let mtu = match to {
        SocketAddr::V4(_) => nix::sys::socket::getsockopt(&socket, known::IpMtu)?,
        SocketAddr::V6(_) => nix::sys::socket::getsockopt(&socket, MtuV6)?,
    };
    Ok((local, u32::try_from(mtu).unwrap_or_default()))
}

/// The largest path MTU, of at most `most` bytes, whose longest packet fits a link; none when not
/// even the smallest or a message of connection management does.
fn payload_bytes(link: u32, v6: bool, most: u32) -> Option<u32> {
    let room = link.checked_sub(OVERHEAD_BYTES + if v6 { 40 } else { 20 })?;
    let mtu = [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| *mtu <= room.min(most));
    mtu.filter(|_| room >= MAD_BYTES as u32)
}

/// Addresses of this machine other than `to`, which is one.
fn beside(to: IpAddr) -> Vec<IpAddr> {
    match to {
        IpAddr::V4(_) => {
            let loopback = (2..=254).map(|last| Ipv4Addr::new(127, 0, 0, last).into());
            loopback.filter(|address| *address != to).collect()
        }
        IpAddr::V6(_) => {
            let list = nix::ifaddrs::getifaddrs().into_iter().flatten();
            let own = list.filter_map(|interface| {
                Some(IpAddr::V6(interface.address?.as_sockaddr_in6()?.ip()))
            });
            let local = |address: &IpAddr| matches!(address, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80);
            own.filter(|address| *address != to && !local(address)).collect()
        }
    }
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| std::net::SocketAddrV4::from(*v4).into());
    v4.or_else(|| Some(std::net::SocketAddrV6::from(*address.as_sockaddr_in6()?).into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_mtu_is_the_largest_that_a_link_carries() {
        for (link, v6, most, payload) in [
            (1500, false, 4096, Some(1024)),
            (1500, true, 4096, Some(1024)),
            (9000, false, 4096, Some(4096)),
            (65536, false, 4096, Some(4096)),
            (65536, false, 1024, Some(1024)),
            (4159, false, 4096, Some(2048)),
            (4160, false, 4096, Some(4096)),
            (4160, true, 4096, Some(2048)),
            (320, false, 4096, Some(256)),
            (319, false, 4096, None),
            (0, true, 4096, None),
        ] {
            assert_eq!(payload_bytes(link, v6, most), payload, "{link} {v6} {most}");
        }
    }
}
