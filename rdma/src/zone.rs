//! IPv6 link-local addresses and their zones: each link has its own, so an address names an
//! interface as well.
//!
//! Source: RFC 4007, "IPv6 Scoped Address Architecture", section 11, "Textual Representation".

use std::net::{IpAddr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::str::FromStr;

use nix::net::if_::if_nametoindex;

/// An IP address of this machine, or of a peer as this machine reaches it: `192.0.2.1`,
/// `2001:db8::1`, and `fe80::1%eth0` for a link-local address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ZonedIp {
    /// The address.
    pub ip: IpAddr,
    /// Index of the interface of a link-local IPv6 address; else 0.
    pub scope_id: u32,
}

impl ZonedIp {
    /// With a port.
    #[must_use]
    pub fn with_port(self, port: u16) -> SocketAddr {
        match self.ip {
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, self.scope_id).into(),
            ip => SocketAddr::new(ip, port),
        }
    }

    /// An address that is in the same zone as another one, if it is link-local.
    pub fn beside(ip: IpAddr, other: SocketAddr) -> ZonedIp {
        ZonedIp { ip, scope_id: if is_link_local(ip) { scope_id(other) } else { 0 } }
    }
}

/// Index of the interface of a link-local IPv6 address; else 0.
pub fn scope_id(at: SocketAddr) -> u32 {
    match at {
        SocketAddr::V6(at) => at.scope_id(),
        SocketAddr::V4(_) => 0,
    }
}

/// Whether an address is meaningful on one link only.
pub fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// The zone is the name of an interface, or its index. An error is a part of a sentence.
impl FromStr for ZonedIp {
    type Err = String;

    fn from_str(text: &str) -> Result<ZonedIp, String> {
        let no_address = || format!("{text:?} is no IP address");
        let Some((address, zone)) = text.split_once('%') else {
            return Ok(ZonedIp { ip: text.parse().map_err(|_| no_address())?, scope_id: 0 });
        };
        let ip = IpAddr::V6(address.parse::<Ipv6Addr>().map_err(|_| no_address())?);
        if !is_link_local(ip) {
            return Err(format!("{address} has no zone: only link-local addresses have"));
        }
        let by_name = if_nametoindex(zone).ok();
        match by_name.or_else(|| zone.parse().ok().filter(|index| *index > 0)) {
            Some(scope_id) => Ok(ZonedIp { ip, scope_id }),
            None => Err(format!("this machine has no interface {zone:?}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::zone::*;

    #[test]
    fn a_zone_is_an_interface_by_name_or_index() {
        let loopback = if_nametoindex("lo").unwrap();
        let of = |text: &str| text.parse::<ZonedIp>().map(|it| it.with_port(4420));
        let expected = Ok(SocketAddrV6::new("fe80::1".parse().unwrap(), 4420, 0, loopback).into());
        assert_eq!(of("fe80::1%lo"), expected);
        assert_eq!(of(&format!("fe80::1%{loopback}")), expected);
        for plain in ["192.0.2.1", "2001:db8::1", "fe80::1"] {
            let at = of(plain).unwrap();
            assert_eq!((at.ip().to_string().as_str(), scope_id(at)), (plain, 0));
        }
        for wrong in ["", "%lo", "fe80::1%", "fe80::1%0", "fe80::1%-1", "fe80::1%no-such%", "host"]
        {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        for elsewhere in ["192.0.2.1%lo", "2001:db8::1%lo", "::%lo"] {
            assert!(of(elsewhere).is_err(), "{elsewhere}");
        }
    }

    #[test]
    fn link_local_addresses_inherit_the_zone_of_the_peer() {
        let peer = "[fe80::2%7]:4420".parse().unwrap();
        let beside = |text: &str| ZonedIp::beside(text.parse().unwrap(), peer).scope_id;
        assert_eq!(["fe80::1", "2001:db8::1", "192.0.2.1"].map(beside), [7, 0, 0]);
        assert_eq!(
            ZonedIp::beside("fe80::1".parse().unwrap(), "[::1]:1".parse().unwrap()).scope_id,
            0
        );
    }
}
