//! One UDP socket on port 4791 of an address.
//!
//! It is never connected and always sets the "don't fragment" bit, because only then does Linux
//! send the IPv4 identification 0, which the invariant CRC covers and a UDP socket neither chooses
//! nor sees. Its path MTU discovery is in the mode "probe": a smaller MTU reported by routers does
//! not change the length of packets that both ends have negotiated, so a forged report cannot stop
//! a connection. (It does change the MTU of later connections.)

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use nix::errno::Errno;
use nix::sys::socket::{
    ControlMessageOwned, MsgFlags, SockaddrStorage, getsockopt, recvmsg, setsockopt,
    sockopt as known,
};
use socket2::{Domain, MsgHdr, Protocol, SockAddr, Socket, Type};

use super::super::config::{FIRST_SOURCE_PORT, Options, ROCE_PORT};
use super::super::udp::train::Way;
use super::sockopt::{Control, Memory, MtuDiscover, MtuDiscoverV6, NoCheckV6, Steering};
use crate::explained;
use crate::zone::scope_id;

/// Memory of a message of connection management in a send buffer, at most, as the kernel counts it:
/// a packet of 308 or 328 bytes, room for headers, and its descriptor.
const MESSAGE_MEMORY_BYTES: u32 = 2048;

/// Buffer sizes granted by the kernel.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SocketBuffers {
    /// Its local address.
    pub address: IpAddr,
    /// The receive buffer, in bytes as the system counts them (with its overhead).
    pub receive_bytes: usize,
    /// The send buffer, in the same bytes.
    pub send_bytes: usize,
    /// The part of the receive buffer that the window of one connection may need.
    pub window_bytes: usize,
}

#[derive(Debug)]
pub(super) struct Bound {
    socket: Socket,
    pub(super) address: IpAddr,
    /// Index of the interface of a link-local address; the system sends there. Else 0.
    pub(super) scope_id: u32,
    pub(super) buffers: SocketBuffers,
    /// The system segments trains.
    cuts: bool,
    /// Sockets for the source ports from [`FIRST_SOURCE_PORT`] on; they receive nothing.
    sources: Vec<Socket>,
}

/// Datagrams received together.
pub(super) struct Received {
    pub(super) from: SocketAddr,
    /// Destination: a local address.
    pub(super) to: SocketAddr,
    /// Their type of service.
    pub(super) tos: u8,
    /// Total bytes.
    pub(super) bytes: usize,
    /// Bytes of each; the last one may be shorter.
    pub(super) each: usize,
}

impl Bound {
    /// Binds a socket; the `first` one of several at one address attaches the steering program.
    pub(super) fn new(
        at: SocketAddr,
        options: &Options,
        first: Option<&Steering>,
    ) -> Result<Bound, SocketError> {
        let address = at.ip();
        let socket =
            Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        socket.set_cloexec(true)?;
        socket.set_reuse_port(true)?;
        let all = address.is_unspecified();
        if address.is_ipv4() {
            setsockopt(&socket, MtuDiscover, &libc::IP_PMTUDISC_PROBE)?;
            setsockopt(&socket, known::Ipv4PacketInfo, &all)?;
            setsockopt(&socket, known::IpRecvTos, &true)?;
        } else {
            socket.set_only_v6(true)?;
            setsockopt(&socket, MtuDiscoverV6, &libc::IPV6_PMTUDISC_PROBE)?;
            setsockopt(&socket, known::Ipv6RecvPacketInfo, &all)?;
            setsockopt(&socket, known::Ipv6RecvTClass, &true)?;
            // RoCE sends no UDP checksum; the invariant CRC covers more.
            setsockopt(&socket, NoCheckV6, &true)?;
        }
        // With privilege as much as requested, otherwise as much as the system's limit allows.
        let (receive, send) = (&options.receive_buffer_bytes, &options.send_buffer_bytes);
        let _ = setsockopt(&socket, known::RcvBufForce, receive)
            .or_else(|_| setsockopt(&socket, known::RcvBuf, receive));
        let _ = setsockopt(&socket, known::SndBufForce, send)
            .or_else(|_| setsockopt(&socket, known::SndBuf, send));
        // Trains arrive whole if nothing on the path has segmented them (on the loopback interface,
        // for example).
        let _ = setsockopt(&socket, known::UdpGroSegment, &true);
        let cuts = setsockopt(&socket, known::UdpGsoSegment, &0).is_ok();
        if let Some(steering) = first {
            steering.attach(&socket)?;
        }
        let mut local = at;
        local.set_port(ROCE_PORT);
        socket.bind(&local.into())?;
        let config = &options.config;
        let buffers = SocketBuffers {
            address,
            receive_bytes: socket.recv_buffer_size()?,
            send_bytes: socket.send_buffer_size()?,
            // The system counts whole pages for a datagram.
            window_bytes: config.window as usize * (2 * config.mtu as usize + 256),
        };
        let sources = match config.source_ports {
            0 | 1 => Vec::new(),
            count => (0..count)
                .map(|index| Bound::source(at, FIRST_SOURCE_PORT.saturating_add(index), options))
                .collect::<Result<Vec<_>, _>>()?,
        };
        Ok(Bound { socket, address, scope_id: scope_id(at), buffers, cuts, sources })
    }

    /// Binds a socket for sending only.
    fn source(mut at: SocketAddr, port: u16, options: &Options) -> Result<Socket, SocketError> {
        let socket =
            Socket::new(Domain::for_address(at), Type::DGRAM.nonblocking(), Some(Protocol::UDP))?;
        socket.set_cloexec(true)?;
        // One for each fabric at this address.
        socket.set_reuse_port(true)?;
        if at.is_ipv4() {
            setsockopt(&socket, MtuDiscover, &libc::IP_PMTUDISC_PROBE)?;
        } else {
            socket.set_only_v6(true)?;
            setsockopt(&socket, MtuDiscoverV6, &libc::IPV6_PMTUDISC_PROBE)?;
        }
        let send = &options.send_buffer_bytes;
        let _ = setsockopt(&socket, known::SndBufForce, send)
            .or_else(|_| setsockopt(&socket, known::SndBuf, send));
        // The minimum: whatever arrives here is unwanted, and stays unread.
        socket.set_recv_buffer_size(0)?;
        at.set_port(port);
        socket.bind(&at.into()).map_err(|error| SocketError::Source(port, error))?;
        Ok(socket)
    }

    /// The sockets for sending only.
    pub(super) fn sources(&self) -> &[Socket] {
        &self.sources
    }

    /// The socket that sends from a port.
    pub(super) fn sender(&self, port: u16) -> &Socket {
        let index = port.checked_sub(FIRST_SOURCE_PORT).map(usize::from);
        index.and_then(|index| self.sources.get(index)).unwrap_or(&self.socket)
    }

    /// Whether it is bound to all addresses of the IP version of this address.
    pub(super) fn covers(&self, address: IpAddr) -> bool {
        self.address.is_unspecified() && self.address.is_ipv4() == address.is_ipv4()
    }

    /// Maximum length of a train; 1: the system does not support trains.
    pub(super) fn longest_train(&self) -> usize {
        if self.cuts { usize::MAX } else { 1 }
    }

    /// Places for messages without a confirmed connection in the send buffer: a quarter of it, and
    /// what is free of its half. Their destinations may be forged, and the system keeps a datagram
    /// to a neighbour that it cannot find for seconds.
    pub(super) fn unconfirmed_places(&self) -> (u32, u32) {
        match getsockopt(&self.socket, Memory) {
            Ok([.., used, size]) => {
                let free = (size / 2).saturating_sub(used);
                (size / 4 / MESSAGE_MEMORY_BYTES, free / MESSAGE_MEMORY_BYTES)
            }
            // Linux before 4.12.
            Err(_) => (u32::MAX, u32::MAX),
        }
    }

    /// The next datagrams.
    pub(super) fn receive(&self, into: &mut [u8]) -> Option<Received> {
        let mut control = [0; 128];
        let mut parts = [IoSliceMut::new(into)];
        let (fd, flags) = (self.socket.as_raw_fd(), MsgFlags::MSG_DONTWAIT);
        // Errors belong to datagrams that we sent before (an unreachable port, for example), whose
        // connections detect the failure. None of them means that there is nothing more to read.
        let received =
            recvmsg::<SockaddrStorage>(fd, &mut parts, Some(&mut control), flags).ok()?;
        let from = socket_address(received.address.as_ref()?)?;
        let (mut to, mut tos, mut each) = (self.address, 0, received.bytes);
        for message in received.cmsgs().ok()? {
            match message {
                ControlMessageOwned::Ipv4PacketInfo(info) => {
                    to = Ipv4Addr::from(u32::from_be(info.ipi_addr.s_addr)).into();
                    // For a unicast datagram both are equal; otherwise it was for all hosts of a
                    // subnet.
                    let ours = info.ipi_spec_dst.s_addr;
                    if ours != 0 && ours != info.ipi_addr.s_addr {
                        to = Ipv4Addr::BROADCAST.into();
                    }
                }
                ControlMessageOwned::Ipv6PacketInfo(info) => {
                    to = Ipv6Addr::from(info.ipi6_addr.s6_addr).into();
                }
                ControlMessageOwned::Ipv4Tos(class) => tos = class,
                ControlMessageOwned::Ipv6TClass(class) => tos = class as u8,
                ControlMessageOwned::UdpGroSegments(bytes) => {
                    each = usize::try_from(bytes).unwrap_or(each);
                }
                _ => {}
            }
        }
        let to = SocketAddr::new(to, ROCE_PORT);
        // A wildcard socket cannot check a datagram without its destination address.
        let known = !to.ip().is_unspecified();
        known.then_some(Received { from, to, tos, bytes: received.bytes, each: each.max(1) })
    }

    /// Sends one datagram, or a train with `each` bytes per datagram.
    pub(super) fn send(&self, way: Way, each: Option<u16>, bytes: &[u8]) -> Result<(), Errno> {
        let Way { from, port, to, tos } = way;
        let to = SocketAddr::new(to, ROCE_PORT);
        let mut control = Control::NONE;
        if let Some(bytes) = each {
            control.segments_of(bytes);
        }
        if self.address.is_unspecified() {
            control.source(from);
        }
        if tos != 0 {
            control.type_of_service(tos, to.is_ipv6());
        }
        let (to, bytes) = (SockAddr::from(to), [IoSlice::new(bytes)]);
        let message =
            MsgHdr::new().with_addr(&to).with_buffers(&bytes).with_control(control.as_slice());
        let sent = self.sender(port).sendmsg(&message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        sent.map(drop).map_err(|e| e.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

fn socket_address(address: &SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| std::net::SocketAddrV4::from(*v4).into());
    v4.or_else(|| Some(std::net::SocketAddrV6::from(*address.as_sockaddr_in6()?).into()))
}

/// Reason why a socket could not be opened.
#[derive(Debug)]
pub(super) enum SocketError {
    /// A source port is in use.
    Source(u16, io::Error),
    System(io::Error),
}

impl From<io::Error> for SocketError {
    fn from(e: io::Error) -> SocketError {
        SocketError::System(e)
    }
}

impl From<Errno> for SocketError {
    fn from(e: Errno) -> SocketError {
        SocketError::System(e.into())
    }
}

impl SocketError {
    pub(super) fn sentence(&self, address: IpAddr) -> String {
        let e = match self {
            SocketError::Source(port, e) => {
                return format!(
                    "cannot send from UDP port {port} at {address}: {e} (see `ss -lunp sport = \
                     :{port}`)"
                );
            }
            SocketError::System(e) => e,
        };
        let remedy = match e.kind() {
            ErrorKind::AddrInUse => taken(),
            ErrorKind::AddrNotAvailable => {
                "this machine does not have that address (see `ip address`)".to_owned()
            }
            ErrorKind::PermissionDenied => {
                format!("the system forbids it ({e}): look at its security policy")
            }
            _ => explained(e),
        };
        format!("cannot open UDP port {ROCE_PORT}, that of RoCEv2, at {address}: {remedy}")
    }
}

/// The process that uses the port, and what to do.
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
            "another program has it, or another soft fabric (see `ss -lunp sport = :{ROCE_PORT}`): stop it, use another \
             address, {elsewhere}"
        ),
    }
}
