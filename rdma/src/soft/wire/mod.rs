//! The wire format of RoCEv2.

pub(super) mod gso_check;
pub mod header;
pub mod icrc;
mod icrc_prefix_cache;
pub(super) mod ipv4_id;
pub(super) mod lookup;
pub mod opcode;
pub mod psn;
pub(super) mod source_port;
pub mod tx_packet;

pub use icrc_prefix_cache::PrefixCache;
