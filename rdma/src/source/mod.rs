//! Source of a request, for fair shares and rate limits.

mod penalty;
mod per_source_table;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

pub use penalty::SourcePenalty;
pub use per_source_table::{PerSourceTable, SourceKey};

/// A source in every per-source limit: an IPv4 address, or the first 64 bits of an IPv6 address.
///
/// The owner of one IPv6 address usually has the 2^64 of its subnet (RFC 4291, 2.5.4; RFC 6177),
/// and would count as any number of sources. So hosts of one subnet share a limit; a limit per
/// source evicts older entries rather than reject the newest, wherever it can.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Source {
    /// An IPv4 address, also one in IPv6 notation (::ffff:0:0/96).
    V4(u32),
    /// The subnet of an IPv6 address.
    V6(u64),
}

impl From<IpAddr> for Source {
    fn from(address: IpAddr) -> Source {
        match address.to_canonical() {
            IpAddr::V4(v4) => Source::V4(v4.to_bits()),
            IpAddr::V6(v6) => Source::V6((v6.to_bits() >> 64) as u64),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::V4(v4) => Ipv4Addr::from_bits(*v4).fmt(f),
            Source::V6(subnet) => {
                write!(f, "{}/64", Ipv6Addr::from_bits(u128::from(*subnet) << 64))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::source::*;

    fn source(address: &str) -> Source {
        Source::from(address.parse::<IpAddr>().unwrap())
    }

    #[test]
    fn an_ipv4_address_is_a_source_and_so_is_an_ipv6_subnet() {
        assert_ne!(source("192.0.2.1"), source("192.0.2.2"));
        assert_eq!(source("192.0.2.1"), source("::ffff:192.0.2.1"));
        assert_eq!(source("2001:db8:0:7::1"), source("2001:db8:0:7:ffff:ffff:ffff:ffff"));
        assert_ne!(source("2001:db8:0:7::1"), source("2001:db8:0:8::1"));
    }

    #[test]
    fn a_source_is_displayed_as_a_person_writes_it() {
        assert_eq!(source("192.0.2.1").to_string(), "192.0.2.1");
        assert_eq!(source("::ffff:192.0.2.1").to_string(), "192.0.2.1");
        assert_eq!(source("2001:db8:0:7::1").to_string(), "2001:db8:0:7::/64");
        assert_eq!(source("::1").to_string(), "::/64");
    }
}
