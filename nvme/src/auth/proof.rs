//! Responses of both sides: keyed digests over both names and the challenge.

use hmac::digest::block_api::EagerHash;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256, Sha384, Sha512};
use subtle::ConstantTimeEq;
use zeroize::{Zeroize, ZeroizeOnDrop};

use super::{HashId, SharedSecret};
use crate::Nqn;

/// A digest, or a key of a digest's length. Wiped when it is dropped.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Digest {
    bytes: [u8; Self::MAX_BYTES],
    size: usize,
}

impl Digest {
    /// Bytes of the longest digest.
    pub const MAX_BYTES: usize = 64;

    /// The first [`MAX_BYTES`](Self::MAX_BYTES) of `bytes`.
    pub fn new(bytes: &[u8]) -> Self {
        let size = bytes.len().min(Self::MAX_BYTES);
        let mut digest = Self { bytes: [0; Self::MAX_BYTES], size };
        digest.bytes[..size].copy_from_slice(&bytes[..size]);
        digest
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..self.size]
    }

    /// Whether `other` is equal, in time that does not depend on the position of a difference.
    pub fn is(&self, other: &[u8]) -> bool {
        self.as_bytes().ct_eq(other).into()
    }
}

impl core::fmt::Debug for Digest {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        write!(f, "Digest({} bytes)", self.size)
    }
}

/// Input of a response: both names and the identifiers of the transaction.
#[derive(Clone, Copy, Debug)]
pub struct Transaction<'a> {
    /// The agreed hash.
    pub hash: HashId,
    /// Transaction identifier, chosen by the host.
    pub t_id: u16,
    /// The host.
    pub host: &'a Nqn,
    /// The subsystem.
    pub subsystem: &'a Nqn,
}

impl Transaction<'_> {
    /// Computes R1, by which a host proves that it has the host's `key` ([`Secret::key`]);
    /// `challenge` is C1, augmented if there is a group, and `seqnum` S1.
    ///
    /// [`Secret::key`]: super::Secret::key
    pub fn host_response(&self, key: &Digest, challenge: &Digest, seqnum: u32) -> Option<Digest> {
        self.response(key, challenge, seqnum, b"HostHost", [self.host, self.subsystem])
    }

    /// Computes R2, by which a controller proves that it has the controller's `key`; `challenge`
    /// is C2, augmented if there is a group, and `seqnum` S2.
    pub fn controller_response(
        &self,
        key: &Digest,
        challenge: &Digest,
        seqnum: u32,
    ) -> Option<Digest> {
        self.response(key, challenge, seqnum, b"Controller", [self.subsystem, self.host])
    }

    fn response(
        &self,
        key: &Digest,
        challenge: &Digest,
        seqnum: u32,
        who: &[u8],
        [from, to]: [&Nqn; 2],
    ) -> Option<Digest> {
        let parts: [&[u8]; 8] = [
            challenge.as_bytes(),
            &seqnum.to_le_bytes(),
            &self.t_id.to_le_bytes(),
            // No secure channel is concatenated.
            &[0],
            who,
            from.as_bytes(),
            &[0],
            to.as_bytes(),
        ];
        keyed(self.hash, key.as_bytes(), &parts)
    }
}

/// Returns the augmented challenge, for use with a group: bound to the secret of both sides.
/// `None` for a hash that this crate does not compute.
pub fn augment(hash: HashId, shared: &SharedSecret, challenge: &[u8]) -> Option<Digest> {
    let key = match hash {
        HashId::SHA256 => Digest::new(&Sha256::digest(shared.as_bytes())),
        HashId::SHA384 => Digest::new(&Sha384::digest(shared.as_bytes())),
        HashId::SHA512 => Digest::new(&Sha512::digest(shared.as_bytes())),
        _ => return None,
    };
    keyed(hash, key.as_bytes(), &[challenge])
}

/// Returns the HMAC (RFC 2104) over the concatenated `parts`.
pub(super) fn keyed(hash: HashId, key: &[u8], parts: &[&[u8]]) -> Option<Digest> {
    match hash {
        HashId::SHA256 => hmac_of::<Sha256>(key, parts),
        HashId::SHA384 => hmac_of::<Sha384>(key, parts),
        HashId::SHA512 => hmac_of::<Sha512>(key, parts),
        _ => None,
    }
}

fn hmac_of<H: EagerHash>(key: &[u8], parts: &[&[u8]]) -> Option<Digest>
where
    Hmac<H>: Mac + KeyInit,
{
    let mut mac = <Hmac<H> as KeyInit>::new_from_slice(key).ok()?;
    parts.iter().for_each(|part| mac.update(part));
    Some(Digest::new(&mac.finalize().into_bytes()))
}
