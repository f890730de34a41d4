//! The back-end's side of the vhost-user protocol, as a codec, and the format of virtio-blk.
//!
//! Documents: "Vhost-user Protocol" of QEMU, and "Virtual I/O Device (VIRTIO)", section "Block Device".
//! A driver of this module moves bytes and descriptors between a Unix socket and [`Message`].

pub mod blk;
mod message;

pub use message::{
    Body, HEADER_BYTES, Header, MemoryRegion, Message, REGIONS, Reply, RequestId, VringAddress,
    config_change,
};

/// Features of the protocol itself, and of the ring, among those of virtio.
pub mod feature {
    /// The device follows version 1 of virtio.
    pub const VERSION_1: u64 = 1 << 32;
    /// Descriptors may be in tables of their own.
    pub const INDIRECT_DESC: u64 = 1 << 28;
    /// Notifications are suppressed by an index.
    pub const EVENT_IDX: u64 = 1 << 29;
    /// The features of [`protocol`](super::protocol) are negotiated.
    pub const PROTOCOL_FEATURES: u64 = 1 << 30;
}

/// Features of the protocol.
pub mod protocol {
    /// Several queues.
    pub const MQ: u64 = 1 << 0;
    /// Every message may ask for an acknowledgement.
    pub const REPLY_ACK: u64 = 1 << 3;
    /// The back-end has a channel for requests of its own.
    pub const BACKEND_REQ: u64 = 1 << 5;
    /// The configuration space is the back-end's.
    pub const CONFIG: u64 = 1 << 9;
}
