//! Images of Ceph RBD as backing stores, through librbd.
//!
//! An image is a store beside files: the same state machine ([`crate::uring::pending`]) divides its
//! operations into steps, which go to librbd instead of io_uring. All reactors use one open image.
//!
//! * Nothing is cached here (`rbd_cache` is off): a write is on all replicas when it completes, so
//!   Flush and FUA have nothing to do.
//! * The exclusive lock is taken before an image is served, and the image is not served without it.
//!   The lock alone excludes nobody; a client that broke it has excluded this one from the cluster
//!   (blocklist) before, and everything fails with ESHUTDOWN then.
//! * In a gateway group, images are opened in standby, without the lock, and acquired later. No
//!   operation reaches librbd before: it would take the lock by itself for the first write.
//! * All images of a cluster share one client. Connecting, opening and closing block without a limit
//!   while the cluster does not answer, so all of that is done by tasks that may block.

mod client;
mod created;
pub(crate) mod image;
mod snapshots;

pub use client::DataClient;
pub use created::{MakeError, Removal, examine_pool, remove_made};
pub use image::{Examination, Image, examine, library_version};
pub use snapshots::{ImageError, ImageSnapshot};
