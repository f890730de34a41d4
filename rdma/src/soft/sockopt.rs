//! Socket options and control messages that no crate has ready (`linux/udp.h`, ip(7), ipv6(7)).

use std::net::IpAddr;

use libc::c_int;
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

/// Control messages for one datagram to send.
#[derive(Clone, Copy, Debug)]
pub(super) struct Control {
    bytes: [u8; Control::MOST],
    len: usize,
}

impl Control {
    const MOST: usize = 96;
    /// Bytes before the data of a control message: its length, level and type, all aligned.
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

    /// The bytes, as sendmsg(2) wants them.
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
