//! Cache of CRC prefixes: the CRC of the IP and UDP headers is the same for all datagrams of one
//! length and direction, except for the identification.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use super::icrc::{Flow, IDENTIFICATION_AT, IPV4_BYTES, Icrc, POLYNOMIAL, UDP_BYTES};
use crate::soft::wire::header::Bth;

/// Change of the register by each bit of the identification, after the headers of IPv4 and UDP.
/// Independent of all other fields.
const CHANGES: [u32; 16] = {
    let (mut changes, mut bit) = ([0; 16], 0);
    while bit < 16 {
        changes[bit] = change(1 << bit);
        bit += 1;
    }
    changes
};

/// The register after an identification and as many zeros as follow until the end of the headers.
const fn change(identification: u16) -> u32 {
    let bytes = identification.to_be_bytes();
    let (mut register, mut at) = (0u32, 0);
    while at < IPV4_BYTES + UDP_BYTES - IDENTIFICATION_AT {
        register ^= if at < bytes.len() { bytes[at] as u32 } else { 0 };
        let mut bit = 0;
        while bit < 8 {
            register = if register & 1 == 1 { register >> 1 ^ POLYNOMIAL } else { register >> 1 };
            bit += 1;
        }
        at += 1;
    }
    register
}

/// The CRC of one kind of headers, without identification.
#[derive(Clone, Debug)]
struct Beginning {
    flow: Flow,
    datagram_bytes: usize,
    crc: Icrc,
}

/// Recently used prefixes.
#[derive(Clone, Debug)]
pub struct PrefixCache(Box<[Beginning; PrefixCache::PLACES]>);

impl Default for PrefixCache {
    fn default() -> PrefixCache {
        let nowhere = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        let flow = Flow { source: nowhere, destination: nowhere };
        // No datagram has this length.
        let none = Beginning { flow, datagram_bytes: 0, crc: Icrc(crc32fast::Hasher::new()) };
        PrefixCache(Box::new(std::array::from_fn(|_| none.clone())))
    }
}

impl Beginning {
    /// Replaces the entry of this place.
    #[cold]
    fn replace(&mut self, flow: &Flow, datagram_bytes: usize) {
        let crc = Icrc::of_headers(flow, 0, datagram_bytes);
        *self = Beginning { flow: *flow, datagram_bytes, crc };
    }
}

impl PrefixCache {
    /// Number of entries. A prime, as in [`super::icrc::Checker`].
    const PLACES: usize = 251;

    /// The CRC of the IP and UDP headers of a datagram (see [`Icrc::start`]), and the bytes to add
    /// next in place of the base transport header.
    #[inline(always)] // once per packet in each direction: a call is half of its cost
    #[must_use]
    pub fn begin(
        &mut self,
        flow: &Flow,
        identification: u16,
        datagram_bytes: usize,
        bth: &[u8; Bth::BYTES],
    ) -> (Icrc, [u8; Bth::BYTES]) {
        let own = &mut self.0[place(flow, datagram_bytes)];
        if own.datagram_bytes != datagram_bytes || own.flow != *flow {
            own.replace(flow, datagram_bytes);
        }
        let mut fed = Icrc::masked(bth);
        if identification != 0 && flow.is_ipv4() {
            // The register combines with the next four bytes by XOR: a change of the register can
            // be made in these bytes instead.
            let first = u32::from_le_bytes([fed[0], fed[1], fed[2], fed[3]]);
            fed[..4].copy_from_slice(&(first ^ changes(identification)).to_le_bytes());
        }
        (own.crc.clone(), fed)
    }
}

fn changes(mut identification: u16) -> u32 {
    let mut sum = 0;
    while identification != 0 {
        sum ^= CHANGES[identification.trailing_zeros() as usize];
        identification &= identification - 1;
    }
    sum
}

/// Peers have adjacent addresses, lengths are multiples of 4, and each queue pair of a host may
/// have a source port of its own.
fn place(flow: &Flow, datagram_bytes: usize) -> usize {
    let last = |at: &SocketAddr| match at.ip() {
        IpAddr::V4(v4) => v4.octets()[3],
        IpAddr::V6(v6) => v6.octets()[15],
    };
    let ends = usize::from(last(&flow.source)) + usize::from(last(&flow.destination));
    let ends = ends + usize::from(flow.source.port()) * 13;
    (datagram_bytes / 4).wrapping_add(ends * 8) % PrefixCache::PLACES
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use crate::soft::wire::icrc_prefix_cache::*;

    fn address() -> impl Strategy<Value = SocketAddr> {
        let v4 = any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits)));
        let v6 = any::<u128>().prop_map(|bits| IpAddr::V6(bits.into()));
        (prop_oneof![4 => v4, 1 => v6], any::<u16>()).prop_map(SocketAddr::from)
    }

    #[test]
    fn queue_pairs_of_one_host_have_their_own_places() {
        let at = |port| SocketAddr::from(([192, 0, 2, 1], port));
        let own = |port| place(&Flow { source: at(port), destination: at(4791) }, 4124);
        let first = 0xc000;
        let places: HashSet<usize> = (first..first + 251).map(own).collect();
        assert_eq!(places.len(), PrefixCache::PLACES);
    }

    proptest! {
        /// Whatever was cached before, the CRC equals that computed from the start.
        #[test]
        fn a_crc_that_began_in_memory_is_the_same(
            flows in prop::collection::vec((address(), address()), 1..4),
            datagrams in prop::collection::vec(
                (any::<prop::sample::Index>(), any::<u16>(), 0usize..3, any::<[u8; 12]>(),
                 prop::collection::vec(any::<u8>(), 0..40)),
                1..40,
            ),
        ) {
            let mut beginnings = PrefixCache::default();
            for (flow, identification, longer, bth, rest) in datagrams {
                let (source, destination) = *flow.get(&flows);
                let flow = Flow { source, destination };
                // Including lengths that share a place.
                let bytes = 16 + rest.len() + longer * 4 * PrefixCache::PLACES;
                let mut plain = Icrc::start(&flow, identification, bytes, &bth);
                plain.update(&rest);
                let (mut crc, fed) = beginnings.begin(&flow, identification, bytes, &bth);
                crc.update(&fed);
                crc.update(&rest);
                prop_assert_eq!(crc.finish(), plain.finish());
            }
        }
    }
}
