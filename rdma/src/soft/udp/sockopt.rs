//! Socket options and control messages without a wrapper in a crate (`linux/udp.h`, ip(7),
//! ipv6(7)).

use std::net::IpAddr;
use std::os::fd::AsFd;

use libc::c_int;
use nix::sys::socket::setsockopt;
use nix::{getsockopt_impl, setsockopt_impl, sockopt_impl};

sockopt_impl!(
    /// How the "don't fragment" bit is set over IPv4.
    MtuDiscover,
    SetOnly,
    libc::IPPROTO_IP,
    libc::IP_MTU_DISCOVER,
    c_int
);
sockopt_impl!(
    /// The same over IPv6.
    MtuDiscoverV6,
    SetOnly,
    libc::IPPROTO_IPV6,
    libc::IPV6_MTU_DISCOVER,
    c_int
);
sockopt_impl!(
    /// The MTU of the route of a connected socket, over IPv6.
    MtuV6,
    GetOnly,
    libc::IPPROTO_IPV6,
    libc::IPV6_MTU,
    c_int
);
sockopt_impl!(
    /// Accept datagrams without a checksum over IPv6, as RoCE sends them.
    NoCheckV6,
    SetOnly,
    libc::IPPROTO_UDP,
    libc::UDP_NO_CHECK6_RX,
    bool
);

sockopt_impl!(
    /// Memory of a socket, of which the first four numbers are read: bytes in the receive buffer and
    /// its size, bytes in the send buffer and its size (`SK_MEMINFO_*`).
    Memory,
    GetOnly,
    libc::SOL_SOCKET,
    libc::SO_MEMINFO,
    [u32; 4]
);

/// Control messages for one datagram to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Control {
    bytes: [u8; Control::MOST],
    len: usize,
}

impl Control {
    const MOST: usize = 96;
    /// Bytes before the data of a control message: length, level and type, aligned.
    const HEADER: usize = (size_of::<usize>() + 8).next_multiple_of(size_of::<usize>());

    pub(super) const NONE: Control = Control { bytes: [0; Control::MOST], len: 0 };

    /// Sends from this address (for a socket that is bound to all).
    pub(super) fn source(&mut self, address: IpAddr) {
        match address {
            IpAddr::V4(v4) => {
                // struct in_pktinfo: interface, local address, destination address.
                let mut data = [0; 12];
                data[4..8].copy_from_slice(&v4.octets());
                self.push(libc::IPPROTO_IP, libc::IP_PKTINFO, &data);
            }
            IpAddr::V6(v6) => {
                // struct in6_pktinfo: address, interface.
                let mut data = [0; 20];
                data[..16].copy_from_slice(&v6.octets());
                self.push(libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &data);
            }
        }
    }

    /// Sends with this type of service.
    pub(super) fn type_of_service(&mut self, tos: u8, v6: bool) {
        let data = c_int::from(tos).to_ne_bytes();
        match v6 {
            false => self.push(libc::IPPROTO_IP, libc::IP_TOS, &data),
            true => self.push(libc::IPPROTO_IPV6, libc::IPV6_TCLASS, &data),
        }
    }

    /// Sends several datagrams of this length; only the last one is shorter.
    pub(super) fn segments_of(&mut self, bytes: u16) {
        self.push(libc::SOL_UDP, libc::UDP_SEGMENT, &bytes.to_ne_bytes());
    }

    /// The bytes for sendmsg(2).
    pub(super) fn as_slice(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    fn push(&mut self, level: c_int, kind: c_int, data: &[u8]) {
        const WORD: usize = size_of::<usize>();
        let (at, body) = (self.len, self.len + Control::HEADER);
        let end = body + data.len();
        self.bytes[at..at + WORD].copy_from_slice(&(end - at).to_ne_bytes());
        self.bytes[at + WORD..at + WORD + 4].copy_from_slice(&level.to_ne_bytes());
        self.bytes[at + WORD + 4..at + WORD + 8].copy_from_slice(&kind.to_ne_bytes());
        self.bytes[body..end].copy_from_slice(data);
        self.len = end.next_multiple_of(WORD);
    }
}

sockopt_impl!(
    /// A classic BPF program that chooses among the sockets that share a port.
    ReusePortProgram,
    SetOnly,
    libc::SOL_SOCKET,
    libc::SO_ATTACH_REUSEPORT_CBPF,
    libc::sock_fprog
);

/// The program that steers every datagram to its fabric: by the queue pair, and messages of
/// connection management by the communication id. The ids of a fabric are its own index modulo the
/// number of fabrics; a request contains only the id of the peer, so requests are distributed by
/// that, and repetitions reach the same fabric.
///
/// The sockets are numbered in the order in which they were bound.
#[derive(Clone, Debug)]
pub(super) struct Steering([libc::sock_filter; 10]);

/// Offsets in the datagram, without its UDP header.
const DESTINATION: u32 = 4;
const ATTRIBUTE: u32 = 20 + 16;
const THEIR_NAME: u32 = 20 + 24;
const OUR_NAME: u32 = 20 + 28;
/// The attribute of a request to connect.
const REQUEST: u32 = 0x10;

/// The result of the program of [`Steering`] for one datagram; none for one that is too short.
pub(crate) fn steered(fabrics: u32, datagram: &[u8]) -> Option<u32> {
    let word =
        |at: u32| datagram.get(at as usize..)?.first_chunk().copied().map(u32::from_be_bytes);
    let half =
        |at: u32| datagram.get(at as usize..)?.first_chunk().copied().map(u16::from_be_bytes);
    let mut number = word(DESTINATION)? & 0x00ff_ffff;
    if number == 1 {
        let request = u32::from(half(ATTRIBUTE)?) == REQUEST;
        number = word(if request { THEIR_NAME } else { OUR_NAME })?;
    }
    Some(number % fabrics.max(1))
}

impl Steering {
    pub(super) fn new(fabrics: u32) -> Steering {
        let statement = |code, k| libc::sock_filter { code, jt: 0, jf: 0, k };
        let jump = |k, jt, jf| {
            let code = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
            libc::sock_filter { code, jt, jf, k }
        };
        let load = |size, at| statement((libc::BPF_LD | size | libc::BPF_ABS) as u16, at);
        let alu = |op, k| statement((libc::BPF_ALU | op | libc::BPF_K) as u16, k);
        Steering([
            load(libc::BPF_W, DESTINATION),
            alu(libc::BPF_AND, 0x00ff_ffff),
            jump(1, 0, 5),
            load(libc::BPF_H, ATTRIBUTE),
            jump(REQUEST, 0, 2),
            load(libc::BPF_W, THEIR_NAME),
            statement((libc::BPF_JMP | libc::BPF_JA) as u16, 1),
            load(libc::BPF_W, OUR_NAME),
            alu(libc::BPF_MOD, fabrics.max(1)),
            statement((libc::BPF_RET | libc::BPF_A) as u16, 0),
        ])
    }

    /// Attaches the program to the sockets of an address, through the first of them.
    pub(super) fn attach(&self, socket: &impl AsFd) -> nix::Result<()> {
        // The kernel reads the program and does not change it.
        let filter = self.0.as_ptr().cast_mut();
        let program = libc::sock_fprog { len: self.0.len() as u16, filter };
        setsockopt(socket, ReusePortProgram, &program)
    }
}
