//! Addresses of further paths: `ADDRESS[:PORT][@SOURCE]`.

use std::net::{IpAddr, SocketAddr};

use rdma::ZonedIp;

/// A path of the command line.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct PathAddress {
    /// Address of the target.
    pub to: SocketAddr,
    /// Address to connect from; `None`: as for the first path.
    pub source: Option<IpAddr>,
}

/// Parses an address with the port of the first path, 4420 by default. An IPv6 address with a port is in brackets.
pub(crate) fn path(text: &str) -> Result<PathAddress, String> {
    let (to, source) = match text.split_once('@') {
        Some((to, source)) => (to, Some(source)),
        None => (text, None),
    };
    let address = |text: &str| {
        let ip = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
        ip.parse::<ZonedIp>()
    };
    let to = match to.parse::<SocketAddr>() {
        Ok(to) => to,
        // The name of an interface is not understood by the standard library.
        Err(_) => {
            match to.rsplit_once("]:").and_then(|(ip, port)| Some((ip, port.parse().ok()?))) {
                Some((ip, port)) => address(&format!("{ip}]"))?.with_port(port),
                None => address(to)?.with_port(nvme::PORT),
            }
        }
    };
    if to.ip().is_unspecified() || to.ip().is_multicast() || to.port() == 0 {
        return Err(format!("{to} is no address to connect to"));
    }
    Ok(PathAddress { to, source: source.map(address).transpose()?.map(|it| it.ip) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn port_and_source_of_an_address_are_optional() {
        let of = |text| path(text).map(|p| (p.to.to_string(), p.source.map(|s| s.to_string())));
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(of("192.0.2.1"), Ok(("192.0.2.1:4420".into(), None)));
        assert_eq!(of("192.0.2.1:4421"), Ok(("192.0.2.1:4421".into(), None)));
        assert_eq!(of("192.0.2.1:1@192.0.2.9"), Ok(("192.0.2.1:1".into(), some("192.0.2.9"))));
        assert_eq!(of("fd00::1"), Ok(("[fd00::1]:4420".into(), None)));
        assert_eq!(of("[fd00::1]:5@fd00::2"), Ok(("[fd00::1]:5".into(), some("fd00::2"))));
        // The first interface of every machine is lo.
        let link_local = Ok(("[fe80::1%1]:5".to_owned(), some("fe80::2")));
        assert_eq!(of("[fe80::1%lo]:5@fe80::2%lo"), link_local);
        assert_eq!(of("[fe80::1%1]:5@fe80::2"), link_local);
        assert_eq!(of("fe80::1%lo"), Ok(("[fe80::1%1]:4420".into(), None)));
        for wrong in
            ["", "host", "192.0.2.1:0", "0.0.0.0", "192.0.2.1@", "192.0.2.1@x", "1.2.3.4:x"]
        {
            assert!(of(wrong).is_err(), "{wrong}");
        }
    }
}
