//! The wire format of RoCEv2.

pub mod flow_crc;
pub(super) mod gso_check;
pub mod header;
pub mod icrc;
pub(super) mod ipv4_id;
pub(super) mod lookup;
pub mod opcode;
pub mod psn;
pub(super) mod source_port;
pub mod tx_packet;
