//! Types of configuration changes at run time.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// Keys of a section of the configuration with their new values, as the section has them; null
/// takes a key out.
pub type Settings = BTreeMap<String, Value>;

/// One change, as a named edit of the configuration. Every rule of the configuration file holds
/// for what comes out.
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
    /// Other settings for a subsystem.
    SetSubsystem {
        /// Its name.
        nqn: String,
        /// Keys of `[[subsystem]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// A subsystem goes, with its namespaces; its hosts are disconnected.
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
    /// Other settings for a namespace.
    SetNamespace {
        /// The name of its subsystem.
        subsystem: String,
        /// Namespace id.
        nsid: u32,
        /// Keys of `[[subsystem.namespace]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// A namespace goes; its file or device stays.
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
    /// Other settings for a listener, such as its ANA states.
    SetListener {
        /// Port identifier.
        id: u16,
        /// Keys of `[[listener]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// A listener goes; hosts that came through it are disconnected.
    RemoveListener {
        /// Port identifier.
        id: u16,
    },
    /// The state of a group of namespaces, or of all, at a listener.
    SetAna {
        /// Port identifier.
        listener: u16,
        /// The group, 1 to 64; absent: all.
        group: Option<u32>,
        /// `optimized`, `non-optimized`, `inaccessible`, `persistent-loss` or `change`.
        state: String,
    },
    /// A host may use a subsystem.
    AllowHost {
        /// The name of the subsystem.
        subsystem: String,
        /// The name of the host.
        host: String,
    },
    /// A host may no longer use a subsystem, and is disconnected.
    DenyHost {
        /// The name of the subsystem.
        subsystem: String,
        /// The name of the host.
        host: String,
    },
    /// A host must prove who it is, with keys from files; or other files, hashes or DH groups.
    SetHost {
        /// The name of the host.
        nqn: String,
        /// Keys of `[[host]]`.
        #[schema(value_type = Object)]
        settings: Settings,
    },
    /// A host needs to prove nothing any more, whether it has had a key or not.
    RemoveHost {
        /// Its name.
        nqn: String,
    },
    /// Another configuration as a whole, or other files of the directory that it includes, or both.
    Replace {
        /// The text of the configuration file; absent: it stays.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        text: Option<String>,
        /// The texts of the files of the directory, by their names: others go. Absent: all stay.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        files: Option<BTreeMap<String, String>>,
    },
}

/// In few words, for a log and for people.
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
        }
    }
}

/// The remedy of what was refused where there is none but to ask for something else.
pub const UNCHANGED: &str = "everything is as it was";

/// Changes that are wanted: all of them, or none.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Wanted {
    /// In this order.
    pub changes: Vec<Change>,
    /// Only tell what would be different.
    #[serde(default)]
    pub dry_run: bool,
}

/// Result of a change.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct Outcome {
    /// What is different now, a sentence each, with `+`, `-` or `~` in front.
    pub differences: Vec<String>,
    /// Sections that take effect only after a restart.
    pub needs_restart: Vec<String>,
    /// It outlasts the daemon; without a state directory nothing does that is not saved.
    pub kept: bool,
}

/// A change that was made while the daemon served and that the configuration file does not have.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct UnsavedChange {
    /// Seconds since 1970.
    pub at_unix_s: u64,
    /// The user who wanted it, by number, where that is known.
    pub uid: Option<u32>,
    /// What.
    pub change: Change,
    /// The address and port of the listener that it is about, as they were before: a listener
    /// without `id` has another number when others come or go. None: it is about no listener that
    /// was there, or an older version has kept it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub listener: Option<String>,
    /// The same of the listeners at which it offers a subsystem, in the order in which it names
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub offered_at: Vec<String>,
    /// Digest of the configuration file when it was made.
    pub base: String,
    /// Digest of the whole configuration after it.
    pub after: String,
}

/// A change that does not fit what the configuration file says by now.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize, ToSchema)]
pub struct SetAside {
    /// The change.
    pub kept: UnsavedChange,
    /// Why it does not fit.
    pub why: String,
}

/// Differences from the configuration file.
#[derive(Clone, PartialEq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// What was changed since, in order.
    pub kept: Vec<UnsavedChange>,
    /// What does not fit any more, and is not in force.
    pub set_aside: Vec<SetAside>,
}
