//! The invariant CRC of a packet (annex A17 of the InfiniBand architecture, "RoCEv2"), and how a
//! UDP socket handles the one covered field that it cannot see.
//!
//! It is CRC-32 of IEEE 802.3 over eight bytes of ones (in place of a link header that RoCE does
//! not have), the IP and UDP headers, and the datagram, with all fields that change on the path
//! replaced by ones: type of service, time to live, both checksums, flow label, and byte 4 of the
//! base transport header. It is stored with its least significant byte first.
//!
//! # The identification field of IPv4
//!
//! A socket knows everything else that is covered: addresses, ports, lengths. (Linux and most
//! adapters set "don't fragment"; a packet with a wrong CRC is checked again without it.) But the
//! 16-bit identification is chosen by the sending kernel and not visible to a receiver.
//!
//! *Sending*: an unconnected socket with `IP_MTU_DISCOVER = IP_PMTUDISC_PROBE` always gets 0, and
//! the segments of one `UDP_SEGMENT` (GSO) call that the kernel segments in software get 0, 1, 2,
//! ..: see [`train_identification`].
//!
//! *Receiving*: a CRC is linear. For two messages of one length that differ in some bits only, the
//! difference (XOR) of their CRCs depends on these bits alone, and is the XOR of the contributions
//! of the single bits. So let `c` be the CRC computed with identification 0, and `r` the received
//! one. If the packet is undamaged, `c ^ r` is the XOR of the contributions of the bits that are
//! set in the sender's identification. A bit contributes
//!
//! ```text
//! x^(8 * bytes after it + ..) mod P        P = the CRC's polynomial, degree 32
//! ```
//!
//! which depends on the length of the packet only. The sixteen contributions span a space of
//! dimension 16 (they are x^k .. x^(k+15) mod P, and a sum of them is x^k times a polynomial of
//! degree below 16, which P, of degree 32 and not divisible by x, cannot divide). So `c ^ r` of an
//! undamaged packet is in that space, and damage gives any value in 32 dimensions: one damaged
//! packet in 2^16 is not detected, so the check is as strong as TCP's. But not at random: some
//! changes of a single byte look like another identification in packets of every length. The
//! solution *is* the identification, so it is compared with those that the sender uses
//! (`soft/ipv4_id.rs`), which detects these changes, and adds seven bits to the check.
//!
//! The basis is kept reduced (each vector has a leading bit that no other vector has), so the check
//! is sixteen conditional XORs; the reduced bases are cached by length. IPv6 has no such field:
//! there the check has all 32 bits.

use std::net::{IpAddr, SocketAddr};

use super::flow_crc::FlowCrc;
use super::header::{Bth, ICRC_BYTES};

/// CRC-32 of eight bytes of ones.
const SEED: u32 = 0x2144_df1c;
/// The polynomial, bits reversed: the most significant bit stands for x^0.
pub(super) const POLYNOMIAL: u32 = 0xedb8_8320;
pub(super) const IPV4_BYTES: usize = 20;
const IPV6_BYTES: usize = 40;
pub(super) const UDP_BYTES: usize = 8;
const PROTOCOL_UDP: u8 = 17;
/// Offset of the identification in the IPv4 header.
pub(super) const IDENTIFICATION_AT: usize = 4;
/// "Don't fragment", as flags and fragment offset of IPv4.
const DONT_FRAGMENT: [u8; 2] = [0x40, 0];

/// Source and destination of a datagram; both of one IP version. (With different versions no CRC is
/// valid; such a flow is checked as IPv6 and fails.)
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flow {
    /// Sender, as the receiver sees it.
    pub source: SocketAddr,
    /// Destination.
    pub destination: SocketAddr,
}

impl Flow {
    #[inline]
    pub(super) fn is_ipv4(&self) -> bool {
        self.source.is_ipv4() && self.destination.is_ipv4()
    }
}

/// The IPv4 identification of datagram number `index` of one send call: 0 for a single one, and
/// counted within a train of equal segments that the kernel segments (`UDP_SEGMENT`).
pub const fn train_identification(index: usize) -> u16 {
    index as u16
}

/// An invariant CRC in progress.
#[derive(Clone, Debug)]
pub struct Icrc(crc32fast::Hasher);

impl Icrc {
    /// Starts with the IP and UDP headers of a datagram of `datagram_bytes` (base transport header
    /// to CRC), and its base transport header. `identification` is that of IPv4; IPv6 has none.
    #[must_use]
    pub fn start(
        flow: &Flow,
        identification: u16,
        datagram_bytes: usize,
        bth: &[u8; Bth::BYTES],
    ) -> Icrc {
        let mut icrc = Icrc::of_headers(flow, identification, datagram_bytes);
        icrc.update(&Icrc::masked(bth));
        icrc
    }

    /// The IP and UDP headers alone.
    pub(super) fn of_headers(flow: &Flow, identification: u16, datagram_bytes: usize) -> Icrc {
        let mut head = [0u8; IPV6_BYTES + UDP_BYTES];
        let udp_bytes = (datagram_bytes + UDP_BYTES) as u16;
        let ip = match (flow.source.ip(), flow.destination.ip()) {
            (IpAddr::V4(source), IpAddr::V4(destination)) => {
                let total = udp_bytes.wrapping_add(IPV4_BYTES as u16).to_be_bytes();
                let id = identification.to_be_bytes();
                head[..4].copy_from_slice(&[0x45, 0xff, total[0], total[1]]);
                head[4..6].copy_from_slice(&id);
                head[6..8].copy_from_slice(&DONT_FRAGMENT);
                head[8..12].copy_from_slice(&[0xff, PROTOCOL_UDP, 0xff, 0xff]);
                head[12..16].copy_from_slice(&source.octets());
                head[16..20].copy_from_slice(&destination.octets());
                IPV4_BYTES
            }
            (source, destination) => {
                head[..4].copy_from_slice(&[0x6f, 0xff, 0xff, 0xff]);
                head[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
                head[6..8].copy_from_slice(&[PROTOCOL_UDP, 0xff]);
                head[8..24].copy_from_slice(&gid(source));
                head[24..40].copy_from_slice(&gid(destination));
                IPV6_BYTES
            }
        };
        let udp = &mut head[ip..ip + UDP_BYTES];
        udp[..2].copy_from_slice(&flow.source.port().to_be_bytes());
        udp[2..4].copy_from_slice(&flow.destination.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_bytes.to_be_bytes());
        udp[6..8].copy_from_slice(&[0xff, 0xff]);
        let mut hasher = crc32fast::Hasher::new_with_initial(SEED);
        hasher.update(&head[..ip + UDP_BYTES]);
        Icrc(hasher)
    }

    /// Continues from a CRC.
    pub(super) fn resume(crc: u32) -> Icrc {
        Icrc(crc32fast::Hasher::new_with_initial(crc))
    }

    /// A base transport header as the CRC covers it: without the fields that change on the path.
    fn masked(bth: &[u8; Bth::BYTES]) -> [u8; Bth::BYTES] {
        let mut masked = *bth;
        masked[4] = 0xff;
        masked
    }

    /// Adds what follows: extended headers, payload, padding, in any pieces.
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// The CRC in wire order.
    #[must_use]
    pub fn finish(self) -> [u8; ICRC_BYTES] {
        self.0.finalize().to_le_bytes()
    }
}

/// An address as a GID: an IPv4 address is mapped into IPv6.
pub(crate) fn gid(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
        IpAddr::V6(v6) => v6.octets(),
    }
}

/// Result of the CRC check of a received datagram.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Valid: a check of all 32 bits.
    Exact,
    /// Valid if the sender's IPv4 identification was this one; a check of 16 bits.
    Solved(u16),
    /// As `Solved`, for a packet that may be fragmented (`DF` is 0), as some adapters send them.
    Fragmentable(u16),
    /// Damaged, or too short to be a packet: to be dropped.
    Wrong,
}

/// Checks received datagrams; caches the reduced contributions of the identification's bits for the
/// lengths in use.
#[derive(Clone, Debug)]
pub struct Checker {
    cache: Box<[Basis; Checker::LENGTHS]>,
}

impl Default for Checker {
    fn default() -> Checker {
        Checker::new()
    }
}

impl Checker {
    /// Number of cached lengths. The place of a length is its remainder in words modulo a prime,
    /// because packets with a whole page of payload and without any differ by a power of two, and
    /// would evict each other.
    const LENGTHS: usize = 97;

    /// With empty caches (of some 41 KiB, which never grow).
    pub fn new() -> Checker {
        Checker { cache: Box::new([Basis::EMPTY; Checker::LENGTHS]) }
    }

    /// Checks a datagram of a flow: base transport header to CRC.
    pub fn check(&mut self, flow: &Flow, datagram: &[u8]) -> Verdict {
        self.check_of(&mut FlowCrc::new(*flow), 0, datagram)
    }

    /// The same, for one of many datagrams of a flow, which probably has this identification of
    /// IPv4: then nothing is to be solved.
    #[inline]
    pub(crate) fn check_of(
        &mut self,
        flow: &mut FlowCrc,
        identification: u16,
        datagram: &[u8],
    ) -> Verdict {
        let Some((body, received)) = datagram.split_last_chunk::<ICRC_BYTES>() else {
            return Verdict::Wrong;
        };
        let Some(bth) = body.first_chunk::<{ Bth::BYTES }>() else { return Verdict::Wrong };
        let mut icrc = flow.begin(identification, datagram.len(), bth[4]);
        icrc.update(body);
        let difference = u32::from_le_bytes(icrc.finish()) ^ u32::from_le_bytes(*received);
        if !flow.flow().is_ipv4() {
            return if difference == 0 { Verdict::Exact } else { Verdict::Wrong };
        }
        if difference == 0 {
            return Verdict::Solved(identification);
        }
        self.solve(identification, datagram.len(), difference)
    }

    /// Solves for the bits in which the identification is another one.
    #[inline(never)]
    fn solve(&mut self, identification: u16, datagram_bytes: usize, difference: u32) -> Verdict {
        let basis = self.basis(datagram_bytes);
        if let Some(bits) = basis.solve(difference) {
            return Verdict::Solved(identification ^ bits);
        }
        let fragmentable = basis.solve(difference ^ basis.dont_fragment);
        fragmentable.map_or(Verdict::Wrong, |bits| Verdict::Fragmentable(identification ^ bits))
    }

    fn place(datagram_bytes: usize) -> usize {
        datagram_bytes / 4 % Checker::LENGTHS
    }

    fn basis(&mut self, datagram_bytes: usize) -> &Basis {
        let slot = &mut self.cache[Checker::place(datagram_bytes)];
        if slot.datagram_bytes != datagram_bytes {
            *slot = Basis::new(datagram_bytes);
        }
        slot
    }
}

/// Contributions of the bits of the identification to the CRC of packets of one length, reduced.
#[derive(Clone, Copy, Debug)]
struct Basis {
    datagram_bytes: usize,
    /// The highest set bit of each vector is set in no other vector.
    vectors: [u32; 16],
    /// That bit of each vector.
    leads: [u32; 16],
    /// The bits of the identification whose sum is each vector.
    origins: [u32; 16],
    /// Contribution of "don't fragment"; not a sum of vectors.
    dont_fragment: u32,
}

impl Basis {
    const EMPTY: Basis = Basis {
        datagram_bytes: 0,
        vectors: [0; 16],
        leads: [0; 16],
        origins: [0; 16],
        dont_fragment: 0,
    };

    fn new(datagram_bytes: usize) -> Basis {
        // The register after a single set bit depends on the number of bytes after it. After the
        // identification follow the rest of the IP header, UDP, and the datagram without CRC.
        let covered = IPV4_BYTES + UDP_BYTES + datagram_bytes.saturating_sub(ICRC_BYTES);
        let after = covered - IDENTIFICATION_AT - 2;
        let shift = power_of_x(8 * after as u64);
        let mut basis = Basis { datagram_bytes, ..Basis::EMPTY };
        for bit in 0..16u8 {
            // In the reversed notation a byte enters the register at its low end, and the CRC of
            // one byte is that byte times x^32 .. which `of_bytes` leaves to the library.
            let alone = crc_of_two(1 << bit);
            basis.insert(multiply(alone, shift), 1 << bit);
        }
        basis.leads = basis.vectors.map(leading);
        // The flags follow the identification, so two bytes less come after them.
        let flags = crc_of_two(u16::from_be_bytes(DONT_FRAGMENT));
        basis.dont_fragment = multiply(flags, power_of_x(8 * (after - 2) as u64));
        basis
    }

    /// Gaussian elimination, one vector at a time.
    fn insert(&mut self, mut vector: u32, mut origin: u32) {
        for (have, from) in self.vectors.iter().zip(self.origins) {
            if *have != 0 && vector & leading(*have) != 0 {
                vector ^= have;
                origin ^= from;
            }
        }
        let lead = leading(vector);
        let mut free = None;
        for (at, have) in self.vectors.iter_mut().enumerate() {
            if *have == 0 {
                free = free.or(Some(at));
            } else if *have & lead != 0 {
                *have ^= vector;
                self.origins[at] ^= origin;
            }
        }
        if let Some(at) = free {
            self.vectors[at] = vector;
            self.origins[at] = origin;
        }
    }

    fn solve(&self, difference: u32) -> Option<u16> {
        let (mut rest, mut identification) = (difference, 0);
        // No other vector has the leading bit of a vector, so each is tested independently: several
        // at a time, and without branches, because the bits are practically random.
        for at in 0..self.leads.len() {
            let hit = if difference & self.leads[at] == 0 { 0 } else { u32::MAX };
            rest ^= self.vectors[at] & hit;
            identification ^= self.origins[at] & hit;
        }
        (rest == 0).then_some(identification as u16)
    }
}

/// The highest set bit; 0 for 0.
const fn leading(vector: u32) -> u32 {
    if vector == 0 { 0 } else { 1 << (31 - vector.leading_zeros()) }
}

/// The register after two bytes, starting from zeros and without the final complement: for the
/// difference of two CRCs, where both cancel out.
fn crc_of_two(bytes: u16) -> u32 {
    crc32fast::hash(&bytes.to_be_bytes()) ^ crc32fast::hash(&[0, 0])
}

/// Product of two polynomials modulo the CRC's, in reversed notation.
fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    for bit in (0..32).rev() {
        if a >> bit & 1 == 1 {
            product ^= b;
        }
        b = if b & 1 == 1 { b >> 1 ^ POLYNOMIAL } else { b >> 1 };
    }
    product
}

/// x^n modulo the CRC's polynomial, in reversed notation.
fn power_of_x(mut n: u64) -> u32 {
    let mut square = 1 << 30;
    let mut product = 1 << 31;
    while n > 0 {
        if n & 1 == 1 {
            product = multiply(product, square);
        }
        square = multiply(square, square);
        n >>= 1;
    }
    product
}

#[cfg(test)]
mod tests {
    use crate::wire::icrc::*;
    use proptest::prelude::*;

    fn flow(v6: bool) -> Flow {
        let (a, b) = if v6 { ("[fd00::1]", "[fd00::2]") } else { ("10.0.0.1", "10.0.0.2") };
        Flow {
            source: format!("{a}:49443").parse().unwrap(),
            destination: format!("{b}:4791").parse().unwrap(),
        }
    }

    fn seal(flow: &Flow, identification: u16, mut datagram: Vec<u8>) -> Vec<u8> {
        let bth = *datagram.first_chunk().unwrap();
        let mut icrc = Icrc::start(flow, identification, datagram.len() + 4, &bth);
        // In two pieces, as header and payload are given.
        let cut = Bth::BYTES + (datagram.len() - Bth::BYTES) / 3;
        icrc.update(&datagram[Bth::BYTES..cut]);
        icrc.update(&datagram[cut..]);
        datagram.extend(icrc.finish());
        datagram
    }

    #[test]
    fn packet_lengths_of_one_mtu_have_distinct_cache_slots() {
        // Acknowledgements, responses with and without a key, capsules, and pages of data in
        // every kind of packet, at every path MTU.
        let mut lengths = vec![20, 32, 36, 80];
        for mtu in [256, 512, 1024, 2048, 4096] {
            lengths.extend([16, 20, 32, 36, 80].map(|headers| mtu + headers));
        }
        for mtu in [256, 512, 1024, 2048, 4096] {
            let together: Vec<usize> = lengths
                .iter()
                .filter(|&&length| length < 256 || (mtu..mtu + 128).contains(&length))
                .map(|&length| Checker::place(length))
                .collect();
            let places: std::collections::HashSet<usize> = together.iter().copied().collect();
            assert_eq!(places.len(), together.len(), "MTU {mtu}");
        }
    }

    #[test]
    fn the_seed_is_eight_bytes_of_ones() {
        assert_eq!(crc32fast::hash(&[0xff; 8]), SEED);
    }

    #[test]
    fn power_of_x_equals_appending_zero_bytes() {
        for zeros in [0usize, 1, 2, 3, 30, 1081, 4150] {
            let (mut a, mut b) = (vec![0xa5], vec![0x00]);
            a.resize(1 + zeros, 0);
            b.resize(1 + zeros, 0);
            let alone = crc32fast::hash(&[0xa5]) ^ crc32fast::hash(&[0]);
            let moved = multiply(alone, power_of_x(8 * zeros as u64));
            assert_eq!(moved, crc32fast::hash(&a) ^ crc32fast::hash(&b), "{zeros} zeros");
        }
    }

    #[test]
    fn identification_space_has_dimension_16_at_every_length() {
        for bytes in (16..4200).step_by(4).chain([9000, 65_507]) {
            let basis = Basis::new(bytes);
            assert!(basis.vectors.iter().all(|v| *v != 0), "{bytes}");
            for (at, vector) in basis.vectors.iter().enumerate() {
                let shared = basis.vectors.iter().filter(|v| **v & leading(*vector) != 0).count();
                assert_eq!(shared, 1, "vector {at} of {bytes}");
            }
        }
    }

    #[test]
    fn false_accept_rate_of_the_icrc_is_two_in_65536() {
        let mut checker = Checker::new();
        let flow = flow(false);
        let good = seal(&flow, 0x1234, (0..60u8).collect());
        let (mut state, mut passed) = (0x9e37_79b9_7f4a_7c15u64, 0);
        for _ in 0..200_000 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            let mut bad = good.clone();
            for (at, byte) in bad[20..40].iter_mut().enumerate() {
                *byte ^= (state >> (at % 7 * 8)) as u8;
            }
            passed += u32::from(checker.check(&flow, &bad) != Verdict::Wrong);
        }
        assert!((1..=18).contains(&passed), "{passed} of 200000, expected about 6");
    }

    /// Computed from the bytes of the headers as on the wire.
    fn seal_as(identification: u16, dont_fragment: bool, body: &[u8]) -> Vec<u8> {
        let (udp_bytes, ip_bytes) = (body.len() + 12, body.len() + 32);
        let mut covered = vec![0xff; 8];
        covered.extend([0x45, 0xff, (ip_bytes >> 8) as u8, ip_bytes as u8]);
        covered.extend(identification.to_be_bytes());
        covered.extend([u8::from(dont_fragment) << 6, 0, 0xff, 17, 0xff, 0xff]);
        let flow = flow(false);
        for end in [flow.source, flow.destination] {
            let IpAddr::V4(v4) = end.ip() else { panic!() };
            covered.extend(v4.octets());
        }
        covered.extend(flow.source.port().to_be_bytes());
        covered.extend(flow.destination.port().to_be_bytes());
        covered.extend([(udp_bytes >> 8) as u8, udp_bytes as u8, 0xff, 0xff]);
        covered.extend(body);
        covered[8 + 28 + 4] = 0xff;
        [body, &crc32fast::hash(&covered).to_le_bytes()].concat()
    }

    #[test]
    fn fragmentable_packets_are_detected_with_identification() {
        let mut checker = Checker::new();
        for len in [12, 28, 60, 1060, 4136] {
            let body: Vec<u8> = (0..len).map(|at| (at * 7) as u8).collect();
            for identification in [0, 1, 0x1234, 0xffff] {
                let set = seal_as(identification, true, &body);
                assert_eq!(checker.check(&flow(false), &set), Verdict::Solved(identification));
                let clear = seal_as(identification, false, &body);
                let verdict = checker.check(&flow(false), &clear);
                assert_eq!(verdict, Verdict::Fragmentable(identification), "{len}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_identification_is_found(
            identification: u16, v6: bool, body in proptest::collection::vec(any::<u8>(), 12..5000),
        ) {
            let (flow, mut checker) = (flow(v6), Checker::new());
            let datagram = seal(&flow, identification, body);
            let right = if v6 { Verdict::Exact } else { Verdict::Solved(identification) };
            prop_assert_eq!(checker.check(&flow, &datagram), right);
        }

        #[test]
        fn a_corrupted_byte_fails_the_icrc_on_ipv6(
            v6: bool, body in proptest::collection::vec(any::<u8>(), 12..300), at: usize, by in 1u8..,
        ) {
            // On IPv4 a few bit flips look like another identification; on IPv6 none does.
            let (flow, mut checker) = (flow(v6), Checker::new());
            let mut datagram = seal(&flow, 7, body);
            let at = at % datagram.len();
            datagram[at] ^= by;
            if at == 4 {
                prop_assert_ne!(checker.check(&flow, &datagram), Verdict::Wrong);
            } else if v6 {
                prop_assert_eq!(checker.check(&flow, &datagram), Verdict::Wrong);
            }
        }

        #[test]
        fn checking_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..40)) {
            let mut checker = Checker::new();
            for v6 in [false, true] {
                let _ = checker.check(&flow(v6), &bytes);
            }
        }
    }
}
