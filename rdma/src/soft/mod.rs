//! RoCEv2 reliable connections and InfiniBand connection management, as state machines without a
//! socket, clock or lock (IBTA volume 1, chapters 9, 12 and 13; annex A17 "RoCEv2").
//!
//! ```text
//! datagram ──► endpoint ──► wire/icrc ──► qp ──► responder ──► receives, remote regions (one copy)
//!                 │                   └───► requester ──► sends, reads, writes
//!                 └──► receive, cm/* (messages of queue pair 1)
//! headers + slice of the pool + CRC ◄── wire/tx_packet ◄── qp
//! ```
//!
//! An [`endpoint::Endpoint`] is driven by code with sockets and a clock; `sim::EndpointNetwork` drives
//! several of them with neither, in tests. In steady state nothing is allocated.
//!
//! Input from the network is hostile: it is parsed with checked arithmetic into bounded memory, and
//! no content makes this code panic.

pub mod clock;
pub mod cm;
mod config;
pub mod endpoint;
mod gso_check;
mod ipv4_id;
mod link_log;
mod lookup;
mod provider;
pub mod qp;
#[cfg(any(test, feature = "testing"))]
pub mod sim;
mod source_port;
pub mod stats;
mod timer_heap;
mod udp;

pub use config::{Options, ROCE_PORT};
pub use provider::{Group, Soft};
pub use udp::SocketBuffers;
