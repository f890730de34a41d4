//! The CRC of the IP and UDP headers of a flow. It is the same for all datagrams of one length, except
//! for the identification.
//!
//! The register of a CRC combines with the next four bytes by XOR, and everything is linear. So the
//! identification, and byte 4 of the base transport header, which the CRC takes as ones, are changes
//! of the register before the datagram, whose bytes are then added as they are.

use super::icrc::{Flow, IDENTIFICATION_AT, IPV4_BYTES, Icrc, POLYNOMIAL, UDP_BYTES};

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

/// By byte 4 of the base transport header: the change of the register before the header that has the
/// effect of ones in its place.
const ONES: [u32; 256] = {
    let (mut ones, mut byte) = ([0; 256], 0);
    while byte < ones.len() {
        let (mut register, mut bit) = ((byte ^ 0xff) as u32, 0);
        // Back by the four bytes before it.
        while bit < 32 {
            let set = register >> 31;
            register = (register ^ (set * POLYNOMIAL)) << 1 | set;
            bit += 1;
        }
        ones[byte] = register;
        byte += 1;
    }
    ones
};

/// The CRC of the headers of a flow, for recently used lengths.
#[derive(Clone, Debug)]
pub struct FlowCrc {
    flow: Flow,
    /// Lengths of datagrams, and the CRC of their headers without identification.
    prefixes: [(u32, u32); FlowCrc::LENGTHS],
}

impl FlowCrc {
    /// Number of lengths. With this prime, those of the usual packets of each path MTU have places of
    /// their own.
    const LENGTHS: usize = 19;

    /// An empty cache.
    pub fn new(flow: Flow) -> FlowCrc {
        // No datagram has this length.
        FlowCrc { flow, prefixes: [(0, 0); FlowCrc::LENGTHS] }
    }

    /// Its flow.
    pub fn flow(&self) -> &Flow {
        &self.flow
    }

    /// The CRC of the IP and UDP headers of a datagram (see [`Icrc::start`]), to which the bytes of the
    /// datagram are to be added as they are. `byte_4` is that of its base transport header.
    #[inline]
    #[must_use]
    pub fn begin(&mut self, identification: u16, datagram_bytes: usize, byte_4: u8) -> Icrc {
        let own = &mut self.prefixes[datagram_bytes / 4 % FlowCrc::LENGTHS];
        if own.0 as usize != datagram_bytes {
            *own = prefix(&self.flow, datagram_bytes);
        }
        let mut crc = own.1 ^ ONES[usize::from(byte_4)];
        if identification != 0 && self.flow.is_ipv4() {
            crc ^= changes(identification);
        }
        Icrc::resume(crc)
    }
}

#[cold]
fn prefix(flow: &Flow, datagram_bytes: usize) -> (u32, u32) {
    let crc = Icrc::of_headers(flow, 0, datagram_bytes).finish();
    (datagram_bytes as u32, u32::from_le_bytes(crc))
}

/// The sums of [`CHANGES`] for the places in a train.
const PLACES: [u32; 64] = {
    let (mut places, mut at) = ([0; 64], 0);
    while at < places.len() {
        places[at] = change(at as u16);
        at += 1;
    }
    places
};

fn changes(mut identification: u16) -> u32 {
    if let Some(change) = PLACES.get(usize::from(identification)) {
        return *change;
    }
    let mut sum = 0;
    while identification != 0 {
        sum ^= CHANGES[identification.trailing_zeros() as usize];
        identification &= identification - 1;
    }
    sum
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::net::{IpAddr, Ipv4Addr, SocketAddr};

    use proptest::prelude::*;

    use crate::wire::flow_crc::*;

    fn address() -> impl Strategy<Value = SocketAddr> {
        let v4 = any::<u32>().prop_map(|bits| IpAddr::V4(Ipv4Addr::from_bits(bits)));
        let v6 = any::<u128>().prop_map(|bits| IpAddr::V6(bits.into()));
        (prop_oneof![4 => v4, 1 => v6], any::<u16>()).prop_map(SocketAddr::from)
    }

    #[test]
    fn common_packet_lengths_have_distinct_cache_slots() {
        for mtu in [512, 1024, 2048, 4096] {
            // Acknowledgement, response or request to read, write, middle and end of a read.
            let sent = [20, 32, mtu + 32, mtu + 16, mtu + 20];
            // The same, and a capsule without and with data.
            let received = [20, 32, 80, mtu + 80, mtu + 32, mtu + 16, mtu + 20];
            for lengths in [&sent[..], &received] {
                let places = lengths.iter().map(|bytes| bytes / 4 % FlowCrc::LENGTHS);
                assert_eq!(places.collect::<HashSet<_>>().len(), lengths.len(), "{mtu}");
            }
        }
    }

    proptest! {
        /// Independent of previous entries, the CRC is that which is computed from the start.
        #[test]
        fn cached_crc_prefixes_yield_the_same_crc(
            flow in (address(), address()),
            datagrams in prop::collection::vec(
                (any::<u16>(), 0usize..3, any::<[u8; 12]>(),
                 prop::collection::vec(any::<u8>(), 0..40)),
                1..40,
            ),
        ) {
            let (source, destination) = flow;
            let flow = Flow { source, destination };
            let mut prefixes = FlowCrc::new(flow);
            for (identification, longer, bth, rest) in datagrams {
                // Lengths that share a place are among them.
                let bytes = 16 + rest.len() + longer * 4 * FlowCrc::LENGTHS;
                let mut plain = Icrc::start(&flow, identification, bytes, &bth);
                plain.update(&rest);
                let mut crc = prefixes.begin(identification, bytes, bth[4]);
                crc.update(&bth);
                crc.update(&rest);
                prop_assert_eq!(crc.finish(), plain.finish());
            }
        }
    }
}
