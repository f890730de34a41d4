//! Diffie-Hellman in the groups of RFC 7919, in time that does not depend on the exponents.

use crypto_bigint::modular::{FixedMontyForm, FixedMontyParams};
use crypto_bigint::{Odd, Uint};
use zeroize::{Zeroize, ZeroizeOnDrop};

use super::{GroupId, prime};

/// Bytes of the largest public value.
const VALUE_MAX_BYTES: usize = 1024;

/// A secret exponent of 512 bits: more than twice the strength of the largest group, as RFC 7919
/// requires.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct PrivateKey([u8; Self::BYTES]);

impl PrivateKey {
    /// Number of random bytes for a key.
    pub const BYTES: usize = 64;

    /// Creates a key from unpredictable bytes.
    pub const fn new(random: [u8; Self::BYTES]) -> Self {
        Self(random)
    }

    /// Returns the public value: takes from a fraction of a millisecond to many. `None` for the
    /// null group and for groups that this crate does not compute.
    pub fn public_value(&self, group: GroupId) -> Option<PublicValue> {
        let size = group.value_bytes().filter(|&size| size > 0)?;
        let mut base = [0; VALUE_MAX_BYTES];
        base[size - 1] = 2;
        let mut value = PublicValue { bytes: [0; VALUE_MAX_BYTES], size };
        power(group, &base[..size], self, &mut value.bytes[..size]);
        Some(value)
    }

    /// Computes the shared secret from the peer's value: takes as long as
    /// [`public_value`](Self::public_value). `None` if the value does not have the group's length
    /// or is not between 2 and the prime less 2: then the secret would not be secret.
    pub fn agree(&self, group: GroupId, peer: &[u8]) -> Option<SharedSecret> {
        let size = group.value_bytes().filter(|&size| size > 0 && size == peer.len())?;
        if !is_acceptable(group, peer) {
            return None;
        }
        let mut shared = SharedSecret { bytes: [0; VALUE_MAX_BYTES], size };
        power(group, peer, self, &mut shared.bytes[..size]);
        Some(shared)
    }
}

impl core::fmt::Debug for PrivateKey {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("PrivateKey(..)")
    }
}

/// A public value, big-endian, as long as the group's prime.
#[derive(Clone)]
pub struct PublicValue {
    bytes: [u8; VALUE_MAX_BYTES],
    size: usize,
}

impl PublicValue {
    /// The value of the null group: none.
    pub const NONE: Self = Self { bytes: [0; VALUE_MAX_BYTES], size: 0 };

    /// The value, big-endian.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.size]
    }

    /// Stores a peer's value as received, if it is not longer than any group's.
    pub fn from_peer(bytes: &[u8]) -> Option<Self> {
        let mut value = Self { size: bytes.len(), ..Self::NONE };
        value.bytes.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(value)
    }
}

impl core::fmt::Debug for PublicValue {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "PublicValue({} bytes)", self.size)
    }
}

/// The shared secret of an exchange of public values, big-endian, as long as the prime.
#[derive(Zeroize, ZeroizeOnDrop)]
pub struct SharedSecret {
    bytes: [u8; VALUE_MAX_BYTES],
    size: usize,
}

impl SharedSecret {
    /// The secret, big-endian.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.size]
    }
}

impl core::fmt::Debug for SharedSecret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("SharedSecret(..)")
    }
}

/// The prime, in hexadecimal digits.
const fn prime(group: GroupId) -> &'static str {
    match group {
        GroupId::FFDHE2048 => prime::FFDHE2048,
        GroupId::FFDHE3072 => prime::FFDHE3072,
        GroupId::FFDHE4096 => prime::FFDHE4096,
        GroupId::FFDHE6144 => prime::FFDHE6144,
        GroupId::FFDHE8192 => prime::FFDHE8192,
        _ => "",
    }
}

/// Whether `2 <= value <= p - 2`. Public values: this may take any time.
fn is_acceptable(group: GroupId, value: &[u8]) -> bool {
    let Some((last, head)) = value.split_last() else { return false };
    if head.iter().all(|&byte| byte == 0) && *last < 2 {
        return false;
    }
    // The prime ends in FFh, so p - 2 differs only in its last byte.
    let mut most = [0; VALUE_MAX_BYTES];
    let digits = prime(group).as_bytes().chunks_exact(2);
    for (to, pair) in most.iter_mut().zip(digits) {
        let digit = |at: usize| char::from(pair[at]).to_digit(16).unwrap_or(0) as u8;
        *to = digit(0) << 4 | digit(1);
    }
    let most = &mut most[..value.len()];
    if let Some(last) = most.last_mut() {
        *last = last.saturating_sub(2);
    }
    value <= &*most
}

fn power(group: GroupId, base: &[u8], key: &PrivateKey, to: &mut [u8]) {
    const WORDS: usize = 64 * 8 / crypto_bigint::Limb::BITS as usize;
    const fn limbs(bytes: usize) -> usize {
        bytes / crypto_bigint::Limb::BYTES
    }
    let exponent = Uint::<WORDS>::from_be_slice(&key.0);
    match group {
        GroupId::FFDHE2048 => power_in::<{ limbs(256) }, WORDS>(group, base, exponent, to),
        GroupId::FFDHE3072 => power_in::<{ limbs(384) }, WORDS>(group, base, exponent, to),
        GroupId::FFDHE4096 => power_in::<{ limbs(512) }, WORDS>(group, base, exponent, to),
        GroupId::FFDHE6144 => power_in::<{ limbs(768) }, WORDS>(group, base, exponent, to),
        GroupId::FFDHE8192 => power_in::<{ limbs(1024) }, WORDS>(group, base, exponent, to),
        _ => {}
    }
}

fn power_in<const LIMBS: usize, const WORDS: usize>(
    group: GroupId,
    base: &[u8],
    mut exponent: Uint<WORDS>,
    to: &mut [u8],
) {
    let prime = Uint::<LIMBS>::from_be_hex(prime(group));
    // The primes are odd.
    let Some(modulus) = Odd::new(prime).into_option() else { return };
    let params = FixedMontyParams::new_vartime(modulus);
    let base = FixedMontyForm::new(&Uint::from_be_slice(base), &params);
    let mut power = base.pow(&exponent);
    let mut value = power.retrieve();
    for (to, word) in to.rchunks_exact_mut(crypto_bigint::Limb::BYTES).zip(value.as_words()) {
        to.copy_from_slice(&word.to_be_bytes());
    }
    exponent.zeroize();
    value.zeroize();
    power.zeroize();
}

#[cfg(test)]
mod tests {
    use crate::auth::group::*;
    use sha2::{Digest, Sha256};

    const GROUPS: [GroupId; 5] = [
        GroupId::FFDHE2048,
        GroupId::FFDHE3072,
        GroupId::FFDHE4096,
        GroupId::FFDHE6144,
        GroupId::FFDHE8192,
    ];

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// Digests of the primes computed from the formula of RFC 7919 with 2590 digits of e, and g^x
    /// mod p for the exponent of bytes 1, 2, .. 64 and for the peer's exponent of bytes 64, 63,
    /// .. 1: computed by another implementation (Python's integers).
    const KNOWN: [[&str; 3]; 5] = include!("known.in");

    #[test]
    fn primes_and_powers_are_those_of_another_implementation() {
        let ours = PrivateKey::new(core::array::from_fn(|i| i as u8 + 1));
        let peers = PrivateKey::new(core::array::from_fn(|i| 64 - i as u8));
        for (group, known) in GROUPS.into_iter().zip(KNOWN) {
            let digits = prime(group);
            let bytes: Vec<u8> = (0..digits.len() / 2)
                .map(|i| u8::from_str_radix(&digits[i * 2..i * 2 + 2], 16).unwrap())
                .collect();
            assert_eq!(hex(&Sha256::digest(&bytes)), known[0], "{group}");
            let public = ours.public_value(group).unwrap();
            assert_eq!(Some(public.as_bytes().len()), group.value_bytes());
            assert_eq!(hex(&Sha256::digest(public.as_bytes())), known[1], "{group}");
            let peer = peers.public_value(group).unwrap();
            let shared = ours.agree(group, peer.as_bytes()).unwrap();
            assert_eq!(hex(&Sha256::digest(shared.as_bytes())), known[2], "{group}");
            let theirs = peers.agree(group, public.as_bytes()).unwrap();
            assert_eq!(theirs.as_bytes(), shared.as_bytes());
        }
    }

    #[test]
    fn values_that_give_the_secret_away_are_refused() {
        let key = PrivateKey::new([7; 64]);
        for group in GROUPS {
            let size = group.value_bytes().unwrap();
            let small = |n: u8| {
                let mut value = vec![0; size];
                value[size - 1] = n;
                value
            };
            let digits = prime(group);
            let mut edge: Vec<u8> = (0..size)
                .map(|i| u8::from_str_radix(&digits[i * 2..i * 2 + 2], 16).unwrap())
                .collect();
            for value in [small(0), small(1), edge.clone(), vec![0xFF; size]] {
                assert!(key.agree(group, &value).is_none(), "{group}");
            }
            edge[size - 1] = 0xFE;
            assert!(key.agree(group, &edge).is_none(), "p - 1");
            assert!(key.agree(group, &small(2)[1..]).is_none(), "too short");
            assert!(key.agree(group, &[&[0], &small(2)[..]].concat()).is_none(), "too long");
            assert!(is_acceptable(group, &small(2)));
            edge[size - 1] = 0xFD;
            assert!(is_acceptable(group, &edge), "p - 2");
        }
        assert!(key.agree(GroupId::NULL, &[]).is_none());
        assert!(key.agree(GroupId(9), &[5; 256]).is_none());
        assert!(key.public_value(GroupId::NULL).is_none());
    }
}
