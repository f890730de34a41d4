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
    /// Every host may connect; `hosts` says nothing then.
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
    /// Where its blocks are.
    pub kind: Kind,
    /// The file or device that has them, where one does.
    pub path: Option<String>,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Bytes of a logical block, as it is.
    pub block_size_bytes: u32,
    /// Bytes that file system and device below write whole or not at all when the power fails;
    /// absent: nobody knows, or nothing outlasts that. A logical block that is larger may be torn.
    pub power_fail_atomic_bytes: Option<u32>,
    /// Bytes of a logical block that the configuration says and nobody heeds, because a host has
    /// formatted it to others.
    pub unheeded_block_size_bytes: Option<u32>,
    /// A host is formatting it: percent that are left, 1 to 100. There is no I/O meanwhile.
    pub format_left_percent: Option<u8>,
    /// UUID.
    pub uuid: String,
    /// NGUID: 32 hexadecimal digits.
    pub nguid: String,
    /// EUI-64, where it has one: 16 hexadecimal digits.
    pub eui64: Option<String>,
    /// The configuration says that hosts may not write.
    pub read_only: bool,
    /// A host has protected it from writes.
    pub write_protected: bool,
    /// Hosts may format it, which erases it.
    pub allow_format: bool,
    /// Its ANA group, 1 to 64.
    pub ana_group: u32,
    /// The only hosts that see it; absent: all that may connect.
    pub hosts: Option<BTreeSet<String>>,
    /// How its store fares.
    pub state: NamespaceState,
    /// What is at the path of its store instead of it, which a later start would serve; absent: it
    /// is there.
    pub detached: Option<Detached>,
    /// Operations that its store has failed.
    pub failures: u64,
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
    /// In a file that the daemon made for a host (Namespace Management).
    Managed,
}

/// State of the path of a served backing store that no longer leads to it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum Detached {
    /// Nothing: it was unlinked, or renamed.
    Removed,
    /// Another file or device.
    Replaced,
}

/// State of the backing store of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum NamespaceState {
    /// It serves.
    Serving,
    /// A synchronisation has failed: what promises stable storage is answered with that failure,
    /// until `nvmfctl namespace trust`.
    SyncFailed,
    /// It is not there yet, or damaged: hosts see no such namespace.
    Pending,
    /// It is gone or too short: hosts are told to come again.
    Down,
    /// Its file was shortened, or it is gone and another file is at its path: hosts are told to come
    /// again, until `nvmfctl namespace trust`.
    Untrusted,
    /// A host has made it and its file is gone: hosts see no such namespace.
    Lost,
}

impl NamespaceState {
    /// All of them.
    pub const ALL: [NamespaceState; 6] = [
        NamespaceState::Serving,
        NamespaceState::SyncFailed,
        NamespaceState::Pending,
        NamespaceState::Down,
        NamespaceState::Untrusted,
        NamespaceState::Lost,
    ];

    /// As JSON and metrics call it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            NamespaceState::Serving => "serving",
            NamespaceState::SyncFailed => "sync_failed",
            NamespaceState::Pending => "pending",
            NamespaceState::Down => "down",
            NamespaceState::Untrusted => "untrusted",
            NamespaceState::Lost => "lost",
        }
    }
}

/// A host that the configuration names.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Host {
    /// Its name.
    pub nqn: String,
    /// Subsystems whose list of hosts has it.
    pub subsystems: BTreeSet<String>,
    /// It has a key, and so must prove who it is.
    pub has_key: bool,
    /// With a key: the hashes that it may use to authenticate, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hashes: Vec<String>,
    /// With a key: the DH groups that it may use to authenticate, best first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<String>,
    /// Controllers that it has now, those of discovery not counted.
    pub controllers: u32,
}
