//! Listeners: addresses that accept connections, and their ANA states.

use std::fmt;
use std::net::SocketAddr;

use crate::subsystem::ana::AnaStates;

/// An address that accepts connections.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ListenerConfig {
    /// Port identifier for discovery and for subsystems, from 1. If not configured, its position in
    /// the configuration.
    pub id: u16,
    /// Address and port; the address may be a wildcard.
    pub address: SocketAddr,
    /// ANA states of its path.
    pub ana: AnaStates,
    /// Minimum of the keep alive timeout of its hosts, in milliseconds; 0: none.
    pub keep_alive_min_ms: u32,
}

/// The first, with every group optimized.
impl From<SocketAddr> for ListenerConfig {
    fn from(address: SocketAddr) -> ListenerConfig {
        ListenerConfig { id: 1, address, ana: AnaStates::default(), keep_alive_min_ms: 0 }
    }
}

impl ListenerConfig {
    /// Whether a host that reached us at `local` uses this listener.
    pub fn serves(&self, local: SocketAddr) -> bool {
        let (ip, local_ip) = (self.address.ip().to_canonical(), local.ip().to_canonical());
        let covers = match ip.is_unspecified() {
            // `::` takes IPv4 as well.
            true => ip.is_ipv6() || local_ip.is_ipv4(),
            false => ip == local_ip,
        };
        covers && self.address.port() == local.port()
    }

    /// The listener of a host that reached us at `local`.
    pub fn of(listeners: &[ListenerConfig], local: SocketAddr) -> Option<&ListenerConfig> {
        let serving = listeners.iter().filter(|listener| listener.serves(local));
        serving.min_by_key(|listener| listener.address.ip().is_unspecified())
    }
}

impl fmt::Display for ListenerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (id {})", self.address, self.id)?;
        if self.keep_alive_min_ms > 0 {
            write!(f, ", keep alive of at least {} ms", self.keep_alive_min_ms)?;
        }
        match self.ana.to_string() {
            states if states.is_empty() => Ok(()),
            states => write!(f, ", {states}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::listener::*;

    #[test]
    fn the_most_specific_listener_of_an_address_is_selected() {
        let listener = |text: &str| ListenerConfig::from(text.parse::<SocketAddr>().unwrap());
        let all = ["0.0.0.0:4421", "192.0.2.1:4420", "[::]:4422", "192.0.2.9:4422"].map(listener);
        let of = |local: &str| {
            let found = ListenerConfig::of(&all, local.parse().unwrap());
            found.map(|listener| listener.address.to_string())
        };
        assert_eq!(of("192.0.2.1:4420").as_deref(), Some("192.0.2.1:4420"));
        assert_eq!(of("[::ffff:192.0.2.1]:4420").as_deref(), Some("192.0.2.1:4420"));
        assert_eq!(of("192.0.2.7:4421").as_deref(), Some("0.0.0.0:4421"));
        assert_eq!(of("192.0.2.9:4422").as_deref(), Some("192.0.2.9:4422"));
        assert_eq!(of("192.0.2.8:4422").as_deref(), Some("[::]:4422"));
        assert_eq!((of("192.0.2.2:4420"), of("[2001:db8::1]:4421")), (None, None));
    }
}
