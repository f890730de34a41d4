//! The wire format of RoCEv2.

pub mod flow_crc;
pub mod header;
pub mod icrc;
pub mod opcode;
pub mod psn;
pub mod tx_packet;
