//! Our own RoCEv2 reliable connection and InfiniBand connection management, as state machines
//! without a socket, clock or lock (IBTA volume 1, chapters 9, 12 and 13; annex A17 "RoCEv2").
//!
//! Whatever comes from the wire is hostile: it is parsed with checked arithmetic into bounded
//! memory, and nothing that it contains makes this code panic.

pub mod cm_message;
pub mod connection;
pub mod endpoint;
pub mod header;
pub mod icrc;
pub mod mad;
mod manager;
pub mod memory;
pub mod opcode;
pub mod outgoing;
pub mod psn;
pub mod qp;
mod requester;
mod responder;
pub mod sim;
