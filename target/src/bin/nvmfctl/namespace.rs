//! `nvmfctl namespace`.

use std::path::{Path, PathBuf};
use std::str::FromStr;

use clap::Subcommand;
use hyper::Method;
use nvmfd::api::{
    Change, Detached, FileSystemState, Kind, Namespace, NamespaceState, Protect, RollbackRequest,
    SnapshotOutcome, SnapshotRequest, Subsystem, Trust, WriteProtection,
};
use nvmfd::config::Size;
use nvmfd::core::subsystem::MAX_NSID;
use serde_json::Value;

use crate::change;
use crate::client::{Client, escaped};
use crate::output::{Failure, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the namespaces of all subsystems
    List,
    /// Add a namespace in a file, device or memory
    Add {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Set its nsid; absent or `auto`: the lowest free one
        #[arg(value_name = "NSID")]
        nsid: Option<NsidOrPath>,
        /// Use this file, which is created if a size is given, or block device
        path: Option<PathBuf>,
        /// Set the size, such as 10GiB; absent: that of the file
        #[arg(long)]
        size: Option<String>,
        /// Use "ram" or "null" instead of a path, or "rbd" with --set path=POOL/IMAGE
        #[arg(long, conflicts_with = "path")]
        kind: Option<String>,
        /// Set the block size: 512 or 4096
        #[arg(long, value_name = "BYTES")]
        block_size: Option<u32>,
        /// Make it read-only for hosts
        #[arg(long)]
        read_only: bool,
        /// Set another key of its section; may be repeated
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Change keys of its section
    Set {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Set a key, such as ana_group=2
        #[arg(required = true, value_name = "KEY=VALUE")]
        settings: Vec<String>,
    },
    /// Resize a namespace; enlarge its file or device first
    Resize {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Set the size, such as 20GiB
        size: String,
    },
    /// Write-protect a namespace, as a host does by feature 84h
    Protect {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Protect it until the daemon restarts; it cannot be cleared before
        #[arg(long)]
        until_power_cycle: bool,
        /// Protect it permanently; this cannot be cleared
        #[arg(long, conflicts_with = "until_power_cycle")]
        permanent: bool,
    },
    /// Clear the write protection of a namespace
    Unprotect {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
    },
    /// Trust a device again whose flush has failed or whose file was shortened or replaced, after
    /// its data were checked
    Trust {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
    },
    /// Copy the file of a namespace as it is at one moment (XFS, btrfs); hosts go on
    Snapshot {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Create this file, in the same file system
        path: PathBuf,
    },
    /// The same, for a file that can be written to, and served as another namespace
    Clone {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Create this file, in the same file system
        path: PathBuf,
        /// Add it to the subsystem with this nsid; `auto` is the lowest free one
        #[arg(long, value_name = "NSID")]
        add: Option<Nsid>,
    },
    /// Give a namespace the contents of a snapshot; the contents that it has are lost
    Rollback {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
        /// Use this snapshot, which stays as it is
        path: PathBuf,
        /// Do it also while hosts are connected: nothing of the namespace may be in use
        #[arg(long)]
        force: bool,
    },
    /// Remove a namespace; its file or device stays
    Remove {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the namespace by its nsid
        nsid: u32,
    },
}

/// The nsid of a new namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Nsid {
    /// The lowest one that is free.
    Auto,
    Number(u32),
}

impl FromStr for Nsid {
    type Err = String;

    fn from_str(text: &str) -> Result<Nsid, String> {
        match text {
            "auto" => Ok(Nsid::Auto),
            text => text
                .parse()
                .map(Nsid::Number)
                .map_err(|_| "no number, not auto, and no path with a /".to_owned()),
        }
    }
}

/// The argument after the subsystem: an nsid, or what has a `/` and is a path.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum NsidOrPath {
    Nsid(Nsid),
    Path(PathBuf),
}

impl FromStr for NsidOrPath {
    type Err = String;

    fn from_str(text: &str) -> Result<NsidOrPath, String> {
        if text.contains('/') {
            return Ok(NsidOrPath::Path(text.into()));
        }
        text.parse().map(NsidOrPath::Nsid)
    }
}

/// The arguments after the subsystem, of which the first may be left out.
fn nsid_and_path(
    first: Option<NsidOrPath>,
    path: Option<PathBuf>,
) -> Result<(Nsid, Option<PathBuf>), Failure> {
    match (first, path) {
        (Some(NsidOrPath::Path(_)), Some(_)) => {
            Err(Failure::new("two paths: write NSID, or `auto`, before the path"))
        }
        (Some(NsidOrPath::Path(path)), None) => Ok((Nsid::Auto, Some(path))),
        (Some(NsidOrPath::Nsid(nsid)), path) => Ok((nsid, path)),
        (None, path) => Ok((Nsid::Auto, path)),
    }
}

/// The lowest nsid that no namespace of the subsystem has. If another administrator takes it first,
/// the change is refused.
async fn lowest_free(subsystem: &str, client: &Client) -> Result<u32, Failure> {
    let path = format!("/v1/subsystems/{}", escaped(subsystem));
    let (found, _) = client.get::<Subsystem>(&path).await?;
    let is_free = |nsid: &u32| found.namespaces.iter().all(|namespace| namespace.nsid != *nsid);
    (1..=MAX_NSID).find(is_free).ok_or_else(|| Failure::new("the subsystem has no free nsid"))
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let change = match command {
        Command::List => return client.list("/v1/namespaces", list).await,
        Command::Add { subsystem, nsid, path, size, kind, block_size, read_only, set } => {
            let (nsid, path) = nsid_and_path(nsid, path)?;
            if path.is_some() && kind.is_some() {
                return Err(Failure::new("--kind is instead of a path: leave out one of them"));
            }
            let mut settings = change::settings(&set)?;
            let mut put = |key: &str, value| change::put(&mut settings, key, value);
            put("path", path.map(|path| client.absolute(&path)).transpose()?.map(Value::from))?;
            put("size", size.map(Value::from))?;
            put("kind", kind.map(Value::from))?;
            put("block_size", block_size.map(Value::from))?;
            put("read_only", read_only.then_some(true.into()))?;
            let nsid = match nsid {
                Nsid::Number(nsid) => nsid,
                Nsid::Auto => lowest_free(&subsystem, client).await?,
            };
            Change::AddNamespace { subsystem, nsid, settings }
        }
        Command::Set { subsystem, nsid, settings } => {
            Change::SetNamespace { subsystem, nsid, settings: change::settings(&settings)? }
        }
        Command::Resize { subsystem, nsid, size } => {
            let settings = [("size".to_owned(), Value::from(size))].into();
            Change::SetNamespace { subsystem, nsid, settings }
        }
        Command::Protect { subsystem, nsid, until_power_cycle, permanent } => {
            let state = match (until_power_cycle, permanent) {
                (true, _) => WriteProtection::UntilPowerCycle,
                (_, true) => WriteProtection::Permanent,
                _ => WriteProtection::Protected,
            };
            return protect(&subsystem, nsid, state, client).await;
        }
        Command::Unprotect { subsystem, nsid } => {
            return protect(&subsystem, nsid, WriteProtection::None, client).await;
        }
        Command::Trust { subsystem, nsid } => {
            let wanted = Trust { dry_run: client.output.dry_run };
            return change::post(&action(&subsystem, nsid, "trust"), &wanted, client).await;
        }
        Command::Snapshot { subsystem, nsid, path } => {
            let taken = copy(&subsystem, nsid, &path, false, client).await?;
            client.output.answer(&taken, snapshot_text);
            return Ok(());
        }
        Command::Clone { subsystem, nsid, path, add } => {
            let taken = copy(&subsystem, nsid, &path, true, client).await?;
            let add = add.filter(|_| !client.output.dry_run);
            if add.is_none() || !client.output.json {
                client.output.answer(&taken, snapshot_text);
            }
            let Some(add) = add else { return Ok(()) };
            let block_size_bytes = taken.0.block_size_bytes;
            return add_clone(subsystem, add, &path, block_size_bytes, client).await;
        }
        Command::Rollback { subsystem, nsid, path, force } => {
            let (path, dry_run) = (client.absolute(&path)?, client.output.dry_run);
            let wanted = RollbackRequest { path, force, dry_run };
            return change::post(&action(&subsystem, nsid, "rollback"), &wanted, client).await;
        }
        Command::Remove { subsystem, nsid } => Change::RemoveNamespace { subsystem, nsid },
    };
    change::make(change, client).await
}

/// Serves a clone as another namespace. The file remains if that fails.
async fn add_clone(
    subsystem: String,
    nsid: Nsid,
    path: &Path,
    block_size_bytes: u32,
    client: &Client,
) -> Result<(), Failure> {
    let add = async {
        let nsid = match nsid {
            Nsid::Number(nsid) => nsid,
            Nsid::Auto => lowest_free(&subsystem, client).await?,
        };
        let settings =
            [("path", client.absolute(path)?.into()), ("block_size", block_size_bytes.into())];
        let settings = settings.map(|(key, value)| (key.to_owned(), value)).into();
        let subsystem = subsystem.clone();
        change::make(Change::AddNamespace { subsystem, nsid, settings }, client).await
    };
    let done = format!("the clone {} was made, and is not added", path.display());
    add.await.map_err(|failure: Failure| failure.after(&done))
}

async fn protect(
    subsystem: &str,
    nsid: u32,
    state: WriteProtection,
    client: &Client,
) -> Result<(), Failure> {
    let wanted = Protect { state, dry_run: client.output.dry_run };
    change::post(&action(subsystem, nsid, "protection"), &wanted, client).await
}

async fn copy(
    subsystem: &str,
    nsid: u32,
    path: &Path,
    writable: bool,
    client: &Client,
) -> Result<(SnapshotOutcome, Value), Failure> {
    let (path, dry_run) = (client.absolute(path)?, client.output.dry_run);
    let wanted = SnapshotRequest { path, writable, dry_run };
    client.send(Method::POST, &action(subsystem, nsid, "snapshot"), &wanted).await
}

/// The path of an action on a namespace.
fn action(subsystem: &str, nsid: u32, name: &str) -> String {
    format!("/v1/subsystems/{}/namespaces/{nsid}/{name}", escaped(subsystem))
}

pub(crate) fn snapshot_text(taken: &SnapshotOutcome) -> String {
    let paused = taken.paused_us.map(|us| format!("writes waited for {:.1} ms", us as f64 / 1e3));
    joined(taken.differences.iter().cloned().chain(paused), "")
}

pub(crate) fn list(all: &[Namespace]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.subsystem.clone(),
            each.nsid.to_string(),
            store(each),
            Size(each.size_bytes).to_string(),
            allocated(each),
            each.block_size_bytes.to_string(),
            state(each),
            each.ana_group.to_string(),
            each.uuid.clone(),
        ]
    });
    let heads =
        ["SUBSYSTEM", "NSID", "STORE", "SIZE", "ALLOCATED", "BLOCK", "STATE", "GROUP", "UUID"];
    table(heads, rows, "there is no namespace")
}

/// Percentage of a file that is allocated.
fn allocated(namespace: &Namespace) -> String {
    let percent = |bytes: u64| u128::from(bytes) * 100 / u128::from(namespace.size_bytes.max(1));
    let percent = namespace.allocated_bytes.map(|bytes| percent(bytes).min(100));
    percent.map_or_else(|| "-".to_owned(), |percent| format!("{percent} %"))
}

fn store(namespace: &Namespace) -> String {
    match (&namespace.path, namespace.kind) {
        (Some(image), Kind::Rbd | Kind::Managed) => format!("rbd:{image}"),
        (Some(path), _) => path.clone(),
        (None, Kind::Ram) => "ram".to_owned(),
        (None, Kind::Null) => "null".to_owned(),
        (None, Kind::File) => "file".to_owned(),
        (None, Kind::Rbd) => "rbd".to_owned(),
        (None, Kind::Managed) => "made by a host".to_owned(),
    }
}

fn state(namespace: &Namespace) -> String {
    let state = match namespace.state {
        NamespaceState::Serving => "serving",
        NamespaceState::SyncFailed => "sync failed (see `namespace trust`)",
        NamespaceState::Pending => "pending",
        NamespaceState::Down => "down",
        NamespaceState::Untrusted => "untrusted (see `namespace trust`)",
        NamespaceState::Lost => "lost",
    };
    let flags = [
        (namespace.read_only, "read only"),
        (namespace.write_protected, "write protected"),
        (namespace.hosts.is_some(), "masked"),
    ];
    let detached = namespace.detached.map(|detached| match detached {
        Detached::Removed => "its file was removed".to_owned(),
        Detached::Replaced => "its file was replaced".to_owned(),
    });
    let space = namespace.file_system.as_ref().and_then(|it| match it.state {
        FileSystemState::Sufficient => None,
        FileSystemState::Overcommitted => Some("file system overcommitted".to_owned()),
        FileSystemState::Low => Some("file system almost full".to_owned()),
    });
    let flags = flags.into_iter().filter(|(is, _)| *is).map(|(_, word)| word.to_owned());
    let left = namespace.format_left_percent.map(|left| format!("formatting, {left} % left"));
    let unheeded = namespace.unheeded_block_size_bytes;
    let unheeded = unheeded.map(|bytes| format!("formatted by a host, not {bytes} as configured"));
    let all = std::iter::once(state.to_owned()).chain(detached).chain(space);
    joined(all.chain(flags).chain(left).chain(unheeded), "")
}
