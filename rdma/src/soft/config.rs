//! Configuration of an endpoint and of its fabric, and the path to a peer.

use std::net::IpAddr;
use std::time::Duration;

use super::qp::memory_region::Rights;
use crate::limits;
use crate::wire::header::RnrTimer;
use crate::wire::psn::Qpn;

/// The UDP port of RoCEv2, at every endpoint.
pub const ROCE_PORT: u16 = 4791;
/// The first of the UDP source ports that may be derived from queue pairs (annex A17.9.2, "UDP
/// source port"): the dynamic range.
pub const FIRST_SOURCE_PORT: u16 = 0xc000;

/// Configuration of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// GUID of this endpoint, unique on the network and new after every start.
    pub guid: u64,
    /// Number of UDP source ports over which queue pairs are spread, from [`FIRST_SOURCE_PORT`] on,
    /// so that the network's paths and the receive queues of a peer are used evenly; one queue pair
    /// keeps its port. 1: all send from [`ROCE_PORT`], so packets of several may share a train.
    /// (The destination is always [`ROCE_PORT`], and so is the source of connection management.)
    pub source_ports: u16,
    /// The largest path MTU of the link, in bytes (256 to 4096). Requested by connect, and the
    /// maximum that is accepted.
    pub mtu: u32,
    /// Maximum of unacknowledged packets of a queue pair.
    pub window: u32,
    /// Whether to exchange selective acknowledgements with peers of this implementation (recognised
    /// by the GUID), so that only missing packets are sent again.
    pub selective: bool,
    /// Maximum of out-of-order packets that are kept, for all queue pairs together. One may have an
    /// eighth of that.
    pub early: u32,
    /// Bytes requested by one read request.
    pub read_bytes: u32,
    /// Reads of a peer that a queue pair answers concurrently.
    pub answered_reads: u8,
    /// Access rights of peers to remote regions.
    pub rights: Rights,
    /// First ack timeout before a retransmission; it doubles with every retry, so that seven take
    /// 191 times as long.
    pub ack_timeout: Duration,
    /// RNR timer in our RNR NAKs.
    pub rnr_timer: RnrTimer,
    /// Delay of a pure acknowledgement, to be sent with other packets. It must be short compared
    /// with the retransmission timeout of the peer: less than the 100 µs that this implementation
    /// adds to the measured round trip.
    pub ack_delay: Duration,
    /// Maximum of queue pairs.
    pub queue_pairs: u32,
    /// Maximum of connections that peers have requested and not confirmed. A further request evicts
    /// the oldest one of the source that has the most.
    pub half_open: usize,
    /// The same for one source, whose own oldest one is evicted. Also the maximum of challenges that it
    /// is sent without answering one; further ones are sent at sixteen a second.
    pub half_open_per_source: usize,
    /// Connections of one source that may be established, or declined, and end without being admitted
    /// ([`crate::Fabric::admit`]). Above that, requests of the source are ignored until time has
    /// compensated for some, sixteen a second. None: not counted, for a driver that never calls it.
    pub vain_per_source: Option<u32>,
    /// Number of unproven half-open connections above which a request is challenged before anything
    /// is done for it. 0 challenges every request, `usize::MAX` none.
    pub unverified: usize,
    /// Maximum of requests that wait for an answer to a challenge.
    pub challenges: usize,
    /// Time that a peer is asked to wait while the user decides on its request, and maximum of the
    /// memory of an ended connection.
    pub patience: Duration,
    /// Maximum of remote regions.
    pub exposed: u32,
    /// Queue pair numbers and communication ids are `steer.1` modulo `steer.0` (not 0), so that a
    /// packet filter can tell which of several endpoints at one address a datagram is for.
    pub steer: (u32, u32),
}

impl Config {
    /// The UDP source port of the packets between two queue pairs.
    pub(super) fn source_port(&self, local: Qpn, remote: Qpn) -> u16 {
        match self.source_ports {
            0 | 1 => ROCE_PORT,
            count => {
                // Numbers may be assigned in any steps; the upper bits of the product depend on all
                // bits (Fibonacci hashing).
                let both = local.get().rotate_left(8) ^ remote.get();
                let hash = both.wrapping_mul(0x9e37_79b1) >> 16;
                FIRST_SOURCE_PORT + (hash % u32::from(count)) as u16
            }
        }
    }
}

impl Default for Config {
    /// For a target: peers have no access to memory.
    fn default() -> Config {
        Config {
            guid: 0,
            source_ports: 1,
            mtu: 1024,
            window: 128,
            selective: true,
            early: 1024,
            read_bytes: 64 << 10,
            answered_reads: 0,
            rights: Rights::NONE,
            ack_timeout: Duration::from_millis(67),
            rnr_timer: RnrTimer::new(12),
            ack_delay: Duration::ZERO,
            queue_pairs: limits::QUEUE_PAIRS,
            half_open: limits::HALF_OPEN,
            half_open_per_source: limits::HALF_OPEN_PER_SOURCE,
            vain_per_source: None,
            unverified: 16,
            challenges: 2048,
            patience: Duration::from_secs(10),
            exposed: 0,
            steer: (1, 0),
        }
    }
}

/// Options of a fabric.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Options {
    /// Source address of `connect`. Without one the routes decide; for a peer on this machine,
    /// which occupies the port of its address, another local address is used (of 127.0.0.0/8 the
    /// first free one, from 127.0.0.2 on).
    pub source: Option<IpAddr>,
    /// Requested size of a socket's receive buffer.
    pub receive_buffer_bytes: usize,
    /// Requested size of a socket's send buffer.
    pub send_buffer_bytes: usize,
    /// The transport. `guid` is chosen by the fabric.
    pub config: Config,
}

impl Default for Options {
    /// For a target and for a host: peers can access remote regions only, and a target has none, so
    /// every access fails with a remote access error.
    fn default() -> Options {
        Options {
            source: None,
            receive_buffer_bytes: 16 << 20,
            send_buffer_bytes: 4 << 20,
            config: Config {
                mtu: 4096,
                answered_reads: 128,
                rights: Rights::ALL,
                exposed: 1 << 16,
                ack_delay: Duration::from_micros(50),
                ..Config::default()
            },
        }
    }
}

/// Path to a peer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Path {
    /// Local address.
    pub from: IpAddr,
    /// Maximum payload of a packet, in bytes (256 to 4096).
    pub mtu: u32,
}

impl From<IpAddr> for Path {
    /// A path without a limit of its own.
    fn from(from: IpAddr) -> Path {
        Path { from, mtu: 4096 }
    }
}

#[cfg(test)]
mod tests {
    use crate::soft::config::*;

    #[test]
    fn queue_pairs_are_spread_over_source_ports_and_keep_their_own() {
        let one = Config::default();
        assert_eq!(one.source_port(Qpn::new(17), Qpn::new(18)), ROCE_PORT);
        let many = Config { source_ports: 16, ..Config::default() };
        // As a host creates its queues: our numbers are random, its own are consecutive.
        let mut used = [0; 16];
        for number in 0..160u32 {
            let (local, remote) =
                (Qpn::new(number.wrapping_mul(0x9e37_79b9)), Qpn::new(17 + number));
            let port = many.source_port(local, remote);
            assert_eq!(port, many.source_port(local, remote));
            used[usize::from(port - FIRST_SOURCE_PORT)] += 1;
        }
        assert!(used.iter().all(|count| (1..=30).contains(count)), "{used:?}");
    }
}
