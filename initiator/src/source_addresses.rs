//! Source addresses of several hosts in one process.

use std::net::IpAddr;

use crate::Error;

/// Returns the address `n` after the given one; without one the route determines it, for all.
pub(crate) fn following(address: Option<IpAddr>, n: u32) -> Result<Option<IpAddr>, Error> {
    let Some(address) = address else { return Ok(None) };
    let next = match address {
        IpAddr::V4(address) => address.to_bits().checked_add(n).map(|bits| IpAddr::V4(bits.into())),
        IpAddr::V6(address) => {
            address.to_bits().checked_add(n.into()).map(|bits| IpAddr::V6(bits.into()))
        }
    };
    let none = || Error::Usage(format!("there is no address {n} behind {address}"));
    next.map(Some).ok_or_else(none)
}

#[cfg(test)]
mod tests {
    use crate::source_addresses::*;

    #[test]
    fn hosts_get_consecutive_source_addresses() {
        let behind = |address: &str, n| {
            following(Some(address.parse().expect("an address")), n)
                .map(|it| it.expect("an address").to_string())
        };
        assert_eq!(behind("127.0.0.2", 0), Ok("127.0.0.2".into()));
        assert_eq!(behind("127.0.0.255", 2), Ok("127.0.1.1".into()));
        assert_eq!(behind("fd00::1", 15), Ok("fd00::10".into()));
        assert!(behind("255.255.255.255", 1).is_err());
        assert_eq!(following(None, 3), Ok(None));
    }
}
