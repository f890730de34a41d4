//! The text form of a secret, and the key derived from it.

use base64ct::{Base64, Encoding};
use zeroize::{Zeroize, ZeroizeOnDrop, Zeroizing};

use super::HashId;
use super::proof::{Digest, keyed};
use crate::Nqn;

/// Suffix of the name in the transformation of a secret.
const PURPOSE: &[u8] = b"NVMe-over-Fabrics";

/// The longest secret with its checksum, in bytes.
const DECODED_MAX_BYTES: usize = Digest::MAX_BYTES + 4;

/// A secret in the text form for administrators: `DHHC-1:hh:base64(secret + CRC-32):`.
#[derive(Clone, Zeroize, ZeroizeOnDrop)]
pub struct Secret {
    transform: u8,
    secret: Digest,
}

impl Secret {
    /// Parses the text form. `hh` is 00 for a secret that is used unchanged, 01 to 03 for one
    /// that is transformed with SHA-256, SHA-384 or SHA-512; the secret has 32, 48 or 64 bytes.
    ///
    /// # Errors
    /// The kind of error; never a part of the secret.
    pub fn parse(text: &str) -> Result<Self, SecretError> {
        let rest = text.strip_prefix("DHHC-1:").ok_or(SecretError::Prefix)?;
        let (transform, rest) = rest.split_once(':').ok_or(SecretError::Transform)?;
        let transform = match transform {
            "00" => 0,
            "01" => 1,
            "02" => 2,
            "03" => 3,
            _ => return Err(SecretError::Transform),
        };
        let encoded = rest.strip_suffix(':').ok_or(SecretError::End)?;
        let mut buffer = Zeroizing::new([0; DECODED_MAX_BYTES]);
        let decoded = Base64::decode(encoded, &mut *buffer).map_err(|_| SecretError::Encoding)?;
        let (secret, crc) = decoded.split_last_chunk::<4>().ok_or(SecretError::Length)?;
        if !matches!(secret.len(), 32 | 48 | 64) {
            return Err(SecretError::Length);
        }
        if crc32fast::hash(secret) != u32::from_le_bytes(*crc) {
            return Err(SecretError::Checksum);
        }
        Ok(Self { transform, secret: Digest::new(secret) })
    }

    /// Returns the key for authentication: with the host's name for the host's secret, the
    /// subsystem's for the controller's.
    pub fn key(&self, name: &Nqn) -> Digest {
        let hash = HashId(self.transform);
        let transformed = keyed(hash, self.secret.as_bytes(), &[name.as_bytes(), PURPOSE]);
        // Only transform 0 has no hash.
        transformed.unwrap_or_else(|| self.secret.clone())
    }

    /// Whether both are the same secret, compared in constant time.
    pub fn is(&self, other: &Self) -> bool {
        self.secret.is(other.secret.as_bytes()) && self.transform == other.transform
    }
}

/// Never displays the secret.
impl core::fmt::Debug for Secret {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// Reason why a text is not a valid secret.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum SecretError {
    /// It does not begin with `DHHC-1:`.
    Prefix,
    /// The transform is not 00 to 03.
    Transform,
    /// It does not end in a colon.
    End,
    /// The middle is not base64.
    Encoding,
    /// The secret has not 32, 48 or 64 bytes.
    Length,
    /// The CRC-32 after the secret is wrong.
    Checksum,
}

impl core::fmt::Display for SecretError {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.write_str(match self {
            Self::Prefix => "it does not begin with `DHHC-1:`",
            Self::Transform => "its transform is not 00, 01, 02 or 03",
            Self::End => "it does not end in a colon",
            Self::Encoding => "its middle part is not base64",
            Self::Length => "it has not 32, 48 or 64 bytes",
            Self::Checksum => "its checksum is wrong: a letter was lost or changed",
        })
    }
}

impl core::error::Error for SecretError {}

#[cfg(test)]
mod tests {
    use super::super::{GroupId, PrivateKey, Transaction, augment};
    use crate::auth::secret::*;
    use proptest::prelude::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    /// The secret of bytes 0, 1, 2 .. in each length, and the key of each transform for `HOST`,
    /// made by another implementation (Python). `nvme gen-dhchap-key` of nvme-cli 2.3 makes the
    /// same of 32 bytes.
    struct Known {
        text: &'static str,
        key: &'static str,
    }

    const SECRETS: &[Known] = include!("secrets.in");

    /// Hash, group, R1 and R2 of one transaction, made by the same.
    const RESPONSES: &[(u8, u8, &str, &str)] = include!("responses.in");

    const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:36ebf5a9-1df9-47b3-a6d0-e9ba32e428a2";
    const SUBSYSTEM: &str = "nqn.2026-11.io.nvmfd:disk1";

    #[test]
    fn secrets_and_their_keys_are_those_of_another_implementation() {
        let host = HOST.parse().unwrap();
        for known in SECRETS {
            let secret = Secret::parse(known.text).unwrap();
            assert_eq!(hex(secret.key(&host).as_bytes()), known.key, "{}", known.text);
            assert!(!format!("{secret:?}").contains(&known.key[..8]));
        }
    }

    #[test]
    fn responses_are_those_of_another_implementation() {
        let (host, subsystem) = (HOST.parse().unwrap(), SUBSYSTEM.parse().unwrap());
        let secret = Secret::parse(SECRETS[0].text).unwrap();
        for &(hash, group, r1, r2) in RESPONSES {
            let (hash, group) = (HashId(hash), GroupId(group));
            let size = hash.digest_bytes().unwrap();
            let challenge: Vec<u8> = (0..size).map(|i| i as u8 ^ 0x5A).collect();
            let challenge = match group {
                GroupId::NULL => Digest::new(&challenge),
                group => {
                    let ours = PrivateKey::new(core::array::from_fn(|i| i as u8 + 1));
                    let peers = PrivateKey::new(core::array::from_fn(|i| 64 - i as u8));
                    let peer = peers.public_value(group).unwrap();
                    let shared = ours.agree(group, peer.as_bytes()).unwrap();
                    augment(hash, &shared, &challenge).unwrap()
                }
            };
            let at = Transaction { hash, t_id: 0x1234, host: &host, subsystem: &subsystem };
            let seqnum = 0x89AB_CDEF;
            let ours = at.host_response(&secret.key(&host), &challenge, seqnum).unwrap();
            assert_eq!(hex(ours.as_bytes()), r1, "{hash} {group}");
            let theirs =
                at.controller_response(&secret.key(&subsystem), &challenge, seqnum).unwrap();
            assert_eq!(hex(theirs.as_bytes()), r2, "{hash} {group}");
            assert!(!ours.is(theirs.as_bytes()) && !ours.is(&ours.as_bytes()[1..]));
        }
    }

    #[test]
    fn malformed_secrets_are_rejected_with_the_reason() {
        let good = SECRETS[0].text;
        let says = |text: &str| Secret::parse(text).unwrap_err();
        assert_eq!(says(""), SecretError::Prefix);
        assert_eq!(says(&good.replace("DHHC-1", "DHHC-2")), SecretError::Prefix);
        assert_eq!(says("DHHC-1:"), SecretError::Transform);
        assert_eq!(says(&good.replace("-1:00", "-1:04")), SecretError::Transform);
        assert_eq!(says(&good.replace("-1:00", "-1:0")), SecretError::Transform);
        assert_eq!(says(good.trim_end_matches(':')), SecretError::End);
        assert_eq!(says(&format!("{good} ")), SecretError::End);
        assert_eq!(says("DHHC-1:00:AA!A:"), SecretError::Encoding);
        assert_eq!(says("DHHC-1:00::"), SecretError::Length);
        assert_eq!(says("DHHC-1:00:AAAAAAAA:"), SecretError::Length);
        let mut changed = good.replace("AAEC", "AAED");
        assert_ne!(changed, good);
        assert_eq!(says(&changed), SecretError::Checksum);
        changed.insert_str(20, &"A".repeat(200));
        assert_eq!(says(&changed), SecretError::Encoding);
        assert!(!Secret::parse(good).unwrap().is(&Secret::parse(SECRETS[1].text).unwrap()));
    }

    proptest! {
        #[test]
        fn parsing_arbitrary_secrets_never_panics(text: String, inner in "[A-Za-z0-9+/=:]{0,120}") {
            let _ = Secret::parse(&text);
            let _ = Secret::parse(&format!("DHHC-1:{inner}"));
            let _ = Secret::parse(&format!("DHHC-1:01:{inner}:"));
        }
    }
}
