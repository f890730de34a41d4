//! Route to a peer: the source address, and the path MTU.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use nix::sys::socket::{getsockopt, setsockopt, sockopt as known};
use socket2::{Domain, Protocol, Socket, Type};

use super::super::cm::mad::MAD_BYTES;
use super::sockopt::{MtuDiscover, MtuDiscoverV6, MtuV6};
use crate::ZonedIp;
use crate::wire::header::{Bth, ICRC_BYTES};
use crate::zone::is_link_local;

const UDP_HEADER_BYTES: usize = 8;
/// Bytes before and after a payload in the longest packet with one: UDP header, BTH, RETH,
/// immediate data and CRC.
const OVERHEAD_BYTES: u32 =
    UDP_HEADER_BYTES as u32 + Bth::BYTES as u32 + 16 + 4 + ICRC_BYTES as u32;
/// Minimum interval of warnings that anybody on the network can cause.
pub(crate) const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// The local address that the routes choose for a peer, and the present MTU of the path: that of
/// the route or the link, or a smaller one learned by ICMP.
pub(super) fn route(source: Option<IpAddr>, to: SocketAddr) -> io::Result<(SocketAddr, u32)> {
    let socket = towards(source, to)?;
    let local = socket.local_addr()?.as_socket().ok_or(ErrorKind::Unsupported)?;
    let mtu = match to {
        SocketAddr::V4(_) => getsockopt(&socket, known::IpMtu)?,
        SocketAddr::V6(_) => getsockopt(&socket, MtuV6)?,
    };
    Ok((local, u32::try_from(mtu).unwrap_or_default()))
}

/// Whether the longest packet with this payload can be sent to a peer: whether the link carries it,
/// whatever was learned about the rest of the path. Nothing is sent: the datagram is queued with
/// `MSG_MORE`, which makes the system check its length.
pub(super) fn leaves(from: IpAddr, to: SocketAddr, payload_bytes: u32) -> bool {
    let ask = || -> io::Result<()> {
        let socket = towards(Some(from), to)?;
        // As for the sockets that send packets.
        match to {
            SocketAddr::V4(_) => setsockopt(&socket, MtuDiscover, &libc::IP_PMTUDISC_PROBE)?,
            SocketAddr::V6(_) => setsockopt(&socket, MtuDiscoverV6, &libc::IPV6_PMTUDISC_PROBE)?,
        }
        let datagram = vec![0; (payload_bytes + OVERHEAD_BYTES) as usize - UDP_HEADER_BYTES];
        socket.send_with_flags(&datagram, libc::MSG_MORE).map(drop)
    };
    ask().is_ok()
}

/// A socket that is connected to a peer; it sends nothing.
fn towards(source: Option<IpAddr>, to: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(to), Type::DGRAM, Some(Protocol::UDP))?;
    if let Some(source) = source {
        socket.bind(&ZonedIp::beside(source, to).with_port(0).into())?;
    }
    socket.connect(&to.into())?;
    Ok(socket)
}

/// The largest path MTU, of at most `most` bytes, whose longest packet fits a link; none if not
/// even the smallest or a message of connection management does.
pub(super) fn payload_bytes(link: u32, v6: bool, most: u32) -> Option<u32> {
    let room = link.checked_sub(OVERHEAD_BYTES + if v6 { 40 } else { 20 })?;
    let mtu = [4096, 2048, 1024, 512, 256].into_iter().find(|mtu| *mtu <= room.min(most));
    mtu.filter(|_| room >= MAD_BYTES as u32)
}

/// Addresses of this machine other than `to`, which is one of them.
pub(super) fn beside(to: IpAddr) -> Vec<IpAddr> {
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
            let local = |address: &IpAddr| is_link_local(*address);
            own.filter(|address| *address != to && !local(address)).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::udp::route::*;

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
