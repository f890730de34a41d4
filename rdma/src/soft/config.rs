//! Configuration of an endpoint and of the fabric around it, and the path to a peer.

use std::net::IpAddr;
use std::time::Duration;

use super::qp::memory_region::Rights;
use super::wire::header::RnrTimer;
use super::wire::psn::Qpn;
use crate::limits;

/// The UDP port of RoCEv2, at every endpoint.
pub const ROCE_PORT: u16 = 4791;
/// The first of the UDP source ports that may be derived from queue pairs (annex A17.9.2, "UDP source
/// port"): the range that is nobody's.
pub const FIRST_SOURCE_PORT: u16 = 0xc000;

/// Configuration of an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Name of this endpoint, unique on the network and different after every start.
    pub guid: u64,
    /// UDP source ports that queue pairs are spread over, from [`FIRST_SOURCE_PORT`] on, so that the
    /// network's paths and a peer's receive queues are used alike; one queue pair keeps its own. 1:
    /// all send from [`ROCE_PORT`], so packets of several may share a train. (The destination is
    /// always [`ROCE_PORT`], and so is the source of connection management.)
    pub source_ports: u16,
    /// The largest path MTU that the link carries, in bytes (256 to 4096). What connect asks for,
    /// and the most that is accepted.
    pub mtu: u32,
    /// Packets that may be unacknowledged at once, per queue pair.
    pub window: u32,
    /// Peers of our own kind, which we and they tell by the name of the adapter, are told which
    /// packets behind a gap have come, so that they send only those again that have not.
    pub selective: bool,
    /// Packets that came before one that is missing and are kept, at most, of all queue pairs. One
    /// may have an eighth of that.
    pub early: u32,
    /// Bytes asked for in one read request.
    pub read_bytes: u32,
    /// Reads of a peer that a queue pair answers at once.
    pub answered_reads: u8,
    /// What peers may do with exposed memory.
    pub rights: Rights,
    /// The first wait for an acknowledgement before sending again; it doubles with every retry, so
    /// that seven take 191 times as long.
    pub ack_timeout: Duration,
    /// What we ask a peer to wait when we have no receive.
    pub rnr_timer: RnrTimer,
    /// How long a mere acknowledgement waits for something that it can leave with. It must be short
    /// beside the time after which a peer sends again: less than the 100 µs that one of our own kind
    /// allows beyond what it is used to.
    pub ack_delay: Duration,
    /// Queue pairs at once, at most.
    pub queue_pairs: u32,
    /// Connections that peers have asked for and not confirmed, at most. When one more is asked
    /// for, the oldest of whoever has the most makes room.
    pub half_open: usize,
    /// The same, of one source: when one more is asked for, its oldest makes room. And of its requests
    /// that wait for a sign of life of theirs; of these, what is more is dropped until others have come
    /// through.
    pub half_open_per_source: usize,
    /// Connections of one source that may come up and end at once before their peers have been let
    /// in ([`crate::Fabric::admit`]). Of who has had more, requests are passed over until time has
    /// made up for some, sixteen a second. None: they are not counted, as for a user who lets in
    /// everybody and never says so.
    pub vain_per_source: Option<u32>,
    /// Half-open connections of peers that have not shown that they hear us, beyond which others
    /// must do that before anything is done for them. 0 asks everybody, `usize::MAX` nobody.
    pub unverified: usize,
    /// Requests that wait for that, at most.
    pub challenges: usize,
    /// How long the user may think about a request, and how long an ended connection is
    /// remembered.
    pub patience: Duration,
    /// Exposed buffers at once, at most.
    pub exposed: u32,
    /// Numbers of queue pairs and names of connections are `steer.1` modulo `steer.0` (not 0), so
    /// that a packet filter can tell which of several endpoints on one address a datagram is for.
    pub steer: (u32, u32),
}

impl Config {
    /// The UDP source port of the packets between two queue pairs.
    pub(super) fn source_port(&self, local: Qpn, remote: Qpn) -> u16 {
        match self.source_ports {
            0 | 1 => ROCE_PORT,
            count => {
                // Numbers may count up in any steps; the upper bits of a product depend on all of
                // theirs (Fibonacci hashing).
                let both = local.get().rotate_left(8) ^ remote.get();
                let hash = both.wrapping_mul(0x9e37_79b1) >> 16;
                FIRST_SOURCE_PORT + (hash % u32::from(count)) as u16
            }
        }
    }
}

impl Default for Config {
    /// A target: nothing of its memory is open to peers.
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
    /// The address that `connect` uses. Without one the routes decide; towards an address of this
    /// machine itself, whose port is the peer's, another of its addresses is taken (of 127.0.0.0/8
    /// the first that is free, from 127.0.0.2 on).
    pub source: Option<IpAddr>,
    /// Bytes of a socket's receive buffer that are asked for.
    pub receive_buffer_bytes: usize,
    /// Bytes of a socket's send buffer that are asked for.
    pub send_buffer_bytes: usize,
    /// The transport. `guid` is chosen by the fabric.
    pub config: Config,
}

impl Default for Options {
    /// For a target and for a host alike: what peers may access is what is exposed, and a target
    /// exposes nothing, so that every access is answered with a remote access error.
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
    /// Our address.
    pub from: IpAddr,
    /// The largest payload that a packet may have there, in bytes (256 to 4096).
    pub mtu: u32,
}

impl From<IpAddr> for Path {
    /// A path that limits nothing.
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
        // As a host brings up its queues: ours are random, its own count.
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
