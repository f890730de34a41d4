//! A user-space NVMe over RDMA host: library and the tool `nvmf`.
//!
//! * [`session`] is one association with a controller as a state machine: an admin queue and I/O
//!   queues, one queue pair each, on a pool and a fabric that it borrows. It has no thread, clock
//!   or socket, so a simulator can drive it.
//! * [`multipath`] is one namespace over several paths: it reconnects, queues meanwhile and fails
//!   over. It is a state machine too.
//! * [`host`] adds a pool and a fabric to a session and blocks until operations are done.
//! * [`crate::verify::block_stamp`] is the content that `nvmf verify` writes into every block, and
//!   `verify::model` the contents that it then expects. Both are independent of a target.
//! * [`nbd`], [`vhost_user`] and [`ublk`] are the protocols of `nvmf attach` as codecs.
//! * [`options`] is the part of the command line that selects the target.

pub mod attach;
pub mod bench;
pub mod copy;
mod error;
mod fabric;
pub mod host;
mod host_identity;
mod interrupt;
pub mod link;
pub mod multipath;
mod namespace_host;
pub mod nbd;
pub mod options;
pub mod path_address;
pub mod rng;
pub mod session;
mod size;
mod source_addresses;
pub mod ublk;
pub mod verify;
pub mod vhost_user;

pub use error::Error;
pub use fabric::Provider;
pub use host::{Host, HostOptions, MultipathHost, MultipathSetup};
pub use session::{
    Data, Done, EndReason, Io, Lost, Options, Phase, Refused, Request, Response, Session,
};
