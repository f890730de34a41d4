//! Our own RoCEv2 reliable connection and InfiniBand connection management, as state machines
//! without a socket, clock or lock (IBTA volume 1, chapters 9, 12 and 13; annex A17 "RoCEv2").
//!
//! ```text
//! datagram ──► endpoint ──► icrc ──► qp ──► responder ──► receives, exposed memory (one copy)
//!                 │                   └───► requester ──► sends, reads, writes
//!                 └──► peers, manager, connection (messages of queue pair 1)
//! headers + slice of the pool + CRC ◄── outgoing ◄── qp
//! ```
//!
//! An [`endpoint::Endpoint`] is driven by whoever has a socket and a clock; [`sim::Network`]
//! drives several of them with neither. In steady state nothing is allocated.
//!
//! Whatever comes from the wire is hostile: it is parsed with checked arithmetic into bounded
//! memory, and nothing that it contains makes this code panic.

mod air;
pub mod capture;
pub mod cm_message;
mod config;
mod congestion;
pub mod connection;
pub mod counters;
mod crowd;
mod deadlines;
mod debts;
pub mod endpoint;
pub mod header;
pub mod icrc;
mod identification;
pub mod mad;
mod manager;
pub mod memory;
mod numbers;
pub mod opcode;
pub mod outgoing;
mod peers;
mod provider;
pub mod psn;
pub mod qp;
mod requester;
mod responder;
mod restarts;
mod retries;
mod segments;
pub mod shelf;
pub mod sim;
mod slot;
mod source_port;
mod table;
mod ticket;
mod train;
pub mod troubles;
mod udp;

pub use debts::Debts;
pub use provider::{Group, Options, Soft};
pub use udp::SocketBuffers;
