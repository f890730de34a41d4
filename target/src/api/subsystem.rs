//! Types of subsystems, namespaces, and access of hosts.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An NVM subsystem.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Subsystem {
    /// Its name.
    pub nqn: String,
    /// Serial number.
    pub serial: String,
    /// Model number.
    pub model: String,
    /// Every host may connect; `hosts` is ignored.
    pub allow_any_host: bool,
    /// Hosts that may connect.
    pub hosts: BTreeSet<String>,
    /// Identifiers of the listeners that offer it; empty: all.
    pub listeners: BTreeSet<u16>,
    /// Entries that an I/O queue may have.
    pub queue_depth: u16,
    /// I/O queues that a controller may have.
    pub io_queues: u16,
    /// Data that one command may move, in bytes.
    pub mdts_bytes: u32,
    /// Controllers that it may have at once; absent: only the limit of the whole target counts.
    pub max_controllers: Option<u16>,
    /// Controllers that it has.
    pub controllers: u32,
    /// Its namespaces.
    pub namespaces: Vec<Namespace>,
}

/// A namespace.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Namespace {
    /// The name of its subsystem.
    pub subsystem: String,
    /// Namespace id.
    pub nsid: u32,
    /// Its kind of backing store.
    pub kind: Kind,
    /// Its file, device or image, if any.
    pub path: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes allocated to its file, within the last second: less than the size of a sparse file, and
    /// more where the file system counts metadata; absent: unknown, or no file.
    pub allocated_bytes: Option<u64>,
    /// The file system of its file; absent: not known, or no file.
    pub file_system: Option<FileSystem>,
    /// Bytes of a logical block.
    pub block_size_bytes: u32,
    /// Bytes that file system and device below write atomically in a power failure; absent:
    /// unknown, or volatile. A larger logical block may be torn.
    pub power_fail_atomic_bytes: Option<u32>,
    /// Configured bytes of a logical block, if a host has formatted it differently.
    pub unheeded_block_size_bytes: Option<u32>,
    /// A host is formatting it: remaining percent, 1 to 100. There is no I/O meanwhile.
    pub format_left_percent: Option<u8>,
    /// UUID.
    pub uuid: String,
    /// NGUID: 32 hexadecimal digits.
    pub nguid: String,
    /// EUI-64, where it has one: 16 hexadecimal digits.
    pub eui64: Option<String>,
    /// It is configured as read-only.
    pub read_only: bool,
    /// A host has protected it from writes.
    pub write_protected: bool,
    /// Hosts may format it, which erases it.
    pub allow_format: bool,
    /// Its ANA group, 1 to 64.
    pub ana_group: u32,
    /// The only hosts that see it; absent: all that may connect.
    pub hosts: Option<BTreeSet<String>>,
    /// State of its device.
    pub state: NamespaceState,
    /// State of the path of its device, if it leads elsewhere or nowhere: a later start would serve
    /// that.
    pub detached: Option<Detached>,
    /// Failed operations of its device.
    pub failures: u64,
}

/// The file system of the file of a namespace, as of the last second.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct FileSystem {
    /// Its device number, as in `/proc/self/mountinfo`: `MAJOR:MINOR`. (btrfs has one for each
    /// subvolume.)
    pub device: String,
    /// Its size.
    pub size_bytes: u64,
    /// Bytes that are free.
    pub free_bytes: u64,
    /// Bytes that the files of all served namespaces in it may still allocate, up to their sizes.
    pub unallocated_bytes: u64,
    /// Whether what is free suffices.
    pub state: FileSystemState,
}

/// Whether the free space of a file system suffices for its backing files.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FileSystemState {
    /// Every write finds space.
    Sufficient,
    /// The files may allocate more than is free.
    Overcommitted,
    /// Less than 5 % is free, and a file may allocate more.
    Low,
}

/// Kind of the backing store of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// In a file or on a block device.
    File,
    /// In memory.
    Ram,
    /// Nowhere.
    Null,
    /// In an image of Ceph RBD.
    Rbd,
    /// In a file that a host created (Namespace Management).
    Managed,
}

/// State of the path of a served device that no longer leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Detached {
    /// Nothing: it was unlinked, or renamed.
    Removed,
    /// Another file or device.
    Replaced,
}

rdma::named_enum! {
    /// State of the device of a namespace.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum NamespaceState {
        /// It is served.
        Serving = "serving",
        /// A sync has failed: commands that promise stable storage fail, until `nvmfctl namespace
        /// trust`.
        SyncFailed = "sync_failed",
        /// It is missing or damaged: hosts see no such namespace.
        Pending = "pending",
        /// It is missing or too short: commands fail with a retriable status.
        Down = "down",
        /// Its file was shortened, or replaced by another one: commands fail with a retriable
        /// status, until `nvmfctl namespace trust`.
        Untrusted = "untrusted",
        /// A host has created it and its file is missing: hosts see no such namespace.
        Lost = "lost",
    }
}

/// A configured host.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its name.
    pub nqn: String,
    /// Subsystems that allow it.
    pub subsystems: BTreeSet<String>,
    /// It has a key, and must authenticate.
    pub has_key: bool,
    /// With a key: the hashes that it may use to authenticate, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hashes: Vec<String>,
    /// With a key: the DH groups that it may use to authenticate, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Its controllers, without those of discovery.
    pub controllers: u32,
}
