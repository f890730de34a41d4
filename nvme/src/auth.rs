//! In-band authentication with DH-HMAC-CHAP: messages, secrets, and the responses derived from them.
//!
//! ```text
//! host                                            controller
//!   Negotiate: which hashes and groups  ──────────►
//!   ◄──────────  Challenge: C1, S1, the group's public value
//!   Reply: R1, and perhaps C2, S2; public value  ──────────►
//!   ◄──────────  Success1: perhaps R2
//!   Success2, after an R2  ──────────►
//! ```
//!
//! Both sides have the host's secret; if the controller authenticates itself too, both have the
//! controller's. No secret is transmitted. The messages are transferred as the data of
//! Authentication Send and Receive ([`crate::fabrics::Authentication`]).
//!
//! Source: NVMe Base Specification 2.0, "NVMe In-band Authentication" and "DH-HMAC-CHAP Protocol";
//! RFC 7919 for the groups. A secure channel is never concatenated.

mod group;
mod message;
mod prime;
mod proof;
mod secret;

pub use group::{PrivateKey, PublicValue, SharedSecret};
pub use message::{Challenge, Kind, MESSAGE_MAX_BYTES, Negotiate, Notice, Reply, Success1};
pub use proof::{Digest, Transaction, augment};
pub use secret::{Secret, SecretError};

open_enum! {
    /// Hash function identifier.
    pub struct HashId(u8) {
        SHA256 = 1, "SHA-256";
        SHA384 = 2, "SHA-384";
        SHA512 = 3, "SHA-512";
    }
}

impl HashId {
    /// The hashes that this crate computes.
    pub const ALL: [Self; 3] = [Self::SHA256, Self::SHA384, Self::SHA512];

    /// Bytes of a digest, if this crate computes it.
    pub const fn digest_bytes(self) -> Option<usize> {
        match self {
            Self::SHA256 => Some(32),
            Self::SHA384 => Some(48),
            Self::SHA512 => Some(64),
            _ => None,
        }
    }
}

open_enum! {
    /// Diffie-Hellman group identifier.
    pub struct GroupId(u8) {
        NULL = 0, "NULL";
        FFDHE2048 = 1, "ffdhe2048";
        FFDHE3072 = 2, "ffdhe3072";
        FFDHE4096 = 3, "ffdhe4096";
        FFDHE6144 = 4, "ffdhe6144";
        FFDHE8192 = 5, "ffdhe8192";
    }
}

impl GroupId {
    /// The groups that this crate computes.
    pub const ALL: [Self; 6] = [
        Self::NULL,
        Self::FFDHE2048,
        Self::FFDHE3072,
        Self::FFDHE4096,
        Self::FFDHE6144,
        Self::FFDHE8192,
    ];

    /// Bytes of a public value (0 for the null group), if this crate computes it.
    pub const fn value_bytes(self) -> Option<usize> {
        match self {
            Self::NULL => Some(0),
            Self::FFDHE2048 => Some(256),
            Self::FFDHE3072 => Some(384),
            Self::FFDHE4096 => Some(512),
            Self::FFDHE6144 => Some(768),
            Self::FFDHE8192 => Some(1024),
            _ => None,
        }
    }
}

open_enum! {
    /// Reason code of a failed exchange: the reason code explanation of a failure message.
    pub struct Failure(u8) {
        FAILED = 1, "authentication failed";
        PROTOCOL_UNUSABLE = 2, "authentication protocol not usable";
        CHANNEL_MISMATCH = 3, "secure channel concatenation mismatch";
        HASH_UNUSABLE = 4, "hash function not usable";
        GROUP_UNUSABLE = 5, "Diffie-Hellman group not usable";
        INCORRECT_PAYLOAD = 6, "incorrect payload";
        INCORRECT_MESSAGE = 7, "incorrect protocol message";
    }
}
