//! Types of configuration changes at run time.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Keys of a section of the configuration with their new values, as in the section; null removes a
/// key.
pub type Settings = BTreeMap<String, Value>;

/// One change, as a named edit of the configuration. The result has to meet every rule of the
/// configuration file.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(tag = "change", rename_all = "snake_case")]
pub enum Change {
    /// A new subsystem.
    AddSubsystem {
        /// Its name.
        nqn: String,
        /// Other keys of `[[subsystem]]`.
        #[serde(default)]
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Changes keys of a subsystem.
    SetSubsystem {
        /// Its name.
        nqn: String,
        /// Keys of `[[subsystem]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Removes a subsystem with its namespaces; its hosts are disconnected.
    RemoveSubsystem {
        /// Its name.
        nqn: String,
    },
    /// A new namespace.
    AddNamespace {
        /// The name of its subsystem.
        subsystem: String,
        /// Namespace id.
        nsid: u32,
        /// Other keys of `[[subsystem.namespace]]`.
        #[serde(default)]
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Changes keys of a namespace.
    SetNamespace {
        /// The name of its subsystem.
        subsystem: String,
        /// Namespace id.
        nsid: u32,
        /// Keys of `[[subsystem.namespace]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Removes a namespace; its file or device stays.
    RemoveNamespace {
        /// The name of its subsystem.
        subsystem: String,
        /// Namespace id.
        nsid: u32,
    },
    /// A new listener.
    AddListener {
        /// Port identifier.
        id: u16,
        /// Other keys of `[[listener]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Changes keys of a listener, such as its ANA states.
    SetListener {
        /// Port identifier.
        id: u16,
        /// Keys of `[[listener]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Removes a listener; its hosts are disconnected.
    RemoveListener {
        /// Port identifier.
        id: u16,
    },
    /// Sets the ANA state of a group of namespaces, or of all, at a listener.
    SetAna {
        /// Port identifier.
        listener: u16,
        /// The group, 1 to 64; absent: all.
        group: Option<u32>,
        /// `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
        state: String,
    },
    /// Allows a host to use a subsystem.
    AllowHost {
        /// The name of the subsystem.
        subsystem: String,
        /// The name of the host.
        host: String,
    },
    /// Disallows a host to use a subsystem, and disconnects it.
    DenyHost {
        /// The name of the subsystem.
        subsystem: String,
        /// The name of the host.
        host: String,
    },
    /// Requires a host to authenticate, with keys from files; or changes its files, hashes or DH
    /// groups.
    SetHost {
        /// The name of the host.
        nqn: String,
        /// Keys of `[[host]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// Exempts a host from authentication, whether it has had a key or not.
    RemoveHost {
        /// Its name.
        nqn: String,
    },
    /// Replaces the configuration file, or the files of the included directory, or both.
    Replace {
        /// The text of the configuration file; absent: unchanged.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The texts of the files of the directory, by name: others are removed. Absent: unchanged.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        files: Option<BTreeMap<String, String>>,
    },
    /// Replaces the shared configuration of the gateway group, on all gateways.
    ReplaceShared {
        /// Its text.
        text: String,
        /// The version that it is made from: another one that is in force is not replaced. Absent:
        /// whichever is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        base: Option<u64>,
    },
}

/// A short description, for logs and messages.
impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let keys = |settings: &Settings| {
            let keys: Vec<String> = settings.iter().map(|(k, v)| format!("{k} = {v}")).collect();
            keys.join(", ")
        };
        match self {
            Change::AddSubsystem { nqn, .. } => write!(f, "add subsystem {nqn}"),
            Change::SetSubsystem { nqn, settings } => {
                write!(f, "set {} of subsystem {nqn}", keys(settings))
            }
            Change::RemoveSubsystem { nqn } => write!(f, "remove subsystem {nqn}"),
            Change::AddNamespace { subsystem, nsid, .. } => {
                write!(f, "add namespace {nsid} to {subsystem}")
            }
            Change::SetNamespace { subsystem, nsid, settings } => {
                write!(f, "set {} of namespace {nsid} of {subsystem}", keys(settings))
            }
            Change::RemoveNamespace { subsystem, nsid } => {
                write!(f, "remove namespace {nsid} from {subsystem}")
            }
            Change::AddListener { id, settings } => {
                write!(f, "add listener {id} with {}", keys(settings))
            }
            Change::SetListener { id, settings } => {
                write!(f, "set {} of listener {id}", keys(settings))
            }
            Change::RemoveListener { id } => write!(f, "remove listener {id}"),
            Change::SetAna { listener, group: Some(group), state } => {
                write!(f, "group {group} is {state} at listener {listener}")
            }
            Change::SetAna { listener, group: None, state } => {
                write!(f, "all groups are {state} at listener {listener}")
            }
            Change::AllowHost { subsystem, host } => write!(f, "let {host} use {subsystem}"),
            Change::DenyHost { subsystem, host } => write!(f, "keep {host} from {subsystem}"),
            Change::SetHost { nqn, settings } => write!(f, "set {} of host {nqn}", keys(settings)),
            Change::RemoveHost { nqn } => write!(f, "take away the key of host {nqn}"),
            Change::Replace { text: None, .. } => {
                f.write_str("replace the files that the configuration includes")
            }
            Change::Replace { files: None, .. } => {
                f.write_str("replace the configuration file as a whole")
            }
            Change::Replace { .. } => f.write_str("replace the configuration with all its files"),
            Change::ReplaceShared { .. } => f.write_str("replace the shared configuration"),
        }
    }
}

/// The remedy where only another request can succeed.
pub const UNCHANGED: &str = "nothing was changed";

/// Requested changes: all of them, or none.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Wanted {
    /// In this order.
    pub changes: Vec<Change>,
    /// Only report the differences.
    #[serde(default)]
    pub dry_run: bool,
}

/// Result of a change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Outcome {
    /// Differences, a sentence each, with `+`, `-` or `~` in front.
    pub differences: Vec<String>,
    /// Sections that take effect only after a restart.
    pub needs_restart: Vec<String>,
    /// It survives a restart; without a state directory only saved changes do.
    pub kept: bool,
}

impl Outcome {
    /// Of what takes effect at once and needs no restart.
    pub fn immediate(differences: Vec<String>) -> Outcome {
        Outcome { differences, needs_restart: Vec::new(), kept: true }
    }
}

/// A change at run time that the configuration file does not contain.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct UnsavedChange {
    /// Seconds since 1970.
    pub at_unix_s: u64,
    /// Number of the requesting user, if known.
    pub uid: Option<u32>,
    /// The change.
    pub change: Change,
    /// The address and port of its listener before the change: a listener without `id` has another
    /// number when others are added or removed. Absent: it is about no existing listener, or was
    /// stored by an older version.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listener: Option<String>,
    /// The same of the listeners of a subsystem, in the order of the change.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offered_at: Vec<String>,
    /// Digest of the configuration file when it was made.
    pub base: String,
    /// Digest of the whole configuration after it.
    pub after: String,
    /// Of a replacement: the digests after the last changes before it. A save that has begun before
    /// it writes one of these configurations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<String>,
}

/// A change that the current configuration file does not allow.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SetAside {
    /// The change.
    pub kept: UnsavedChange,
    /// Reason.
    pub why: String,
}

/// Differences from the configuration file.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// Unsaved changes, in order.
    pub kept: Vec<UnsavedChange>,
    /// Changes that no longer apply, and are not in force.
    pub set_aside: Vec<SetAside>,
}
