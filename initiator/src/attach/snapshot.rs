//! `nvmf attach --snapshot`: a snapshot of the namespace, served as a temporary read-only namespace
//! that only this host sees.
//!
//! NVMe has no command for that, so it is asked of the management interface of the daemon. What is
//! made is removed in the opposite order; whatever cannot be removed is named.

use std::path::Path;

use serde_json::{Value, json};
use tracing::{info, warn};

use super::management::{Management, escaped};
use crate::Error;

/// Between the name of a backing file and the number in the name of its temporary snapshots.
const INFIX: &str = ".attach-";

/// A temporary snapshot, and the namespace that serves it.
#[derive(Debug)]
pub(super) struct Snapshot {
    daemon: Management,
    subsystem: String,
    path: String,
    /// Its namespace; none: not added.
    nsid: Option<u32>,
}

impl Snapshot {
    /// Takes a snapshot of a namespace, and adds it to the subsystem for one host.
    ///
    /// # Errors
    /// The daemon refuses it, or cannot be reached. Nothing is left then, or the error names it.
    pub(super) fn take(
        socket: &Path,
        subsystem: &str,
        nsid: u32,
        host: &str,
    ) -> Result<Snapshot, Error> {
        let daemon = Management { socket: socket.to_owned() };
        let found = daemon.get(&format!("/v1/subsystems/{}", escaped(subsystem)))?;
        let namespaces = found["namespaces"].as_array().cloned().unwrap_or_default();
        let file = file_of(&namespaces, subsystem, nsid)?;
        for (left, path) in earlier(&namespaces, &file) {
            warn!(
                "namespace {left} serves {path}, of another `nvmf attach --snapshot`: if that was \
                 killed, `nvmfctl namespace remove {subsystem} {left}`, and remove the file"
            );
        }
        let mut number = [0; 8];
        getrandom::fill(&mut number)
            .map_err(|error| Error::Local(format!("no random number: {error}")))?;
        let path = format!("{file}{INFIX}{:016x}", u64::from_ne_bytes(number));
        let of = format!("/v1/subsystems/{}/namespaces/{nsid}/snapshot", escaped(subsystem));
        let taken = daemon.post(&of, &json!({"path": path}))?;
        let mut snapshot = Snapshot { daemon, subsystem: subsystem.to_owned(), path, nsid: None };
        match snapshot.add(&namespaces, &taken["block_size_bytes"], host) {
            Ok(()) => Ok(snapshot),
            Err(refused) => {
                let removed = snapshot.remove();
                removed.map_err(|left| Error::Local(format!("{refused}; {left}")))?;
                Err(refused)
            }
        }
    }

    /// Its namespace id.
    pub(super) fn nsid(&self) -> u32 {
        self.nsid.unwrap_or_default()
    }

    fn add(&mut self, before: &[Value], block_size: &Value, host: &str) -> Result<(), Error> {
        let used = |nsid: u32| before.iter().any(|it| it["nsid"] == nsid);
        let nsid = (1..=1024).find(|nsid| !used(*nsid));
        let nsid = nsid.ok_or_else(|| Error::Local("the subsystem has no free nsid".into()))?;
        let settings = json!({
            "path": self.path, "block_size": block_size, "read_only": true, "hosts": [host],
        });
        let change = json!({
            "change": "add_namespace", "subsystem": self.subsystem, "nsid": nsid,
            "settings": settings,
        });
        self.daemon.post("/v1/changes", &json!({"changes": [change]}))?;
        self.nsid = Some(nsid);
        info!("namespace {nsid} of {} serves the snapshot {}", self.subsystem, self.path);
        Ok(())
    }

    /// Removes the namespace, then the file.
    ///
    /// # Errors
    /// What is left, why, and how to remove it.
    pub(super) fn remove(mut self) -> Result<(), Error> {
        let Snapshot { daemon, subsystem, path, .. } = &self;
        if let Some(nsid) = self.nsid {
            let change =
                json!({"change": "remove_namespace", "subsystem": subsystem, "nsid": nsid});
            daemon.post("/v1/changes", &json!({"changes": [change]})).map_err(|why| {
                Error::Local(format!(
                    "the snapshot {path} is still served as namespace {nsid}: {why}; `nvmfctl \
                     namespace remove {subsystem} {nsid}`, and remove the file"
                ))
            })?;
        }
        daemon.post("/v1/snapshots/remove", &json!({"path": path})).map_err(|why| {
            Error::Local(format!("the snapshot {path} is left: {why}; remove the file"))
        })?;
        info!("the snapshot {path} is removed");
        self.nsid = None;
        Ok(())
    }
}

/// The path of the file of a namespace.
fn file_of(namespaces: &[Value], subsystem: &str, nsid: u32) -> Result<String, Error> {
    let missing = || Error::Local(format!("{subsystem} has no namespace {nsid}"));
    let namespace = namespaces.iter().find(|it| it["nsid"] == nsid).ok_or_else(missing)?;
    match (namespace["kind"].as_str(), namespace["path"].as_str()) {
        (Some("file"), Some(path)) => Ok(path.to_owned()),
        _ => Err(Error::Local(format!(
            "namespace {nsid} of {subsystem} is in no file that the configuration names: only such \
             namespaces have snapshots"
        ))),
    }
}

/// Namespaces with temporary snapshots of a file, and their paths.
fn earlier<'a>(namespaces: &'a [Value], file: &str) -> impl Iterator<Item = (u64, &'a str)> {
    let prefix = format!("{file}{INFIX}");
    namespaces.iter().filter_map(move |it| {
        let path = it["path"].as_str().filter(|path| path.starts_with(&prefix))?;
        Some((it["nsid"].as_u64()?, path))
    })
}

#[cfg(test)]
mod tests {
    use crate::attach::snapshot::*;

    #[test]
    fn snapshots_need_a_file_and_leftovers_are_found_by_name() {
        let namespaces = [
            json!({"nsid": 1, "kind": "file", "path": "/srv/a"}),
            json!({"nsid": 2, "kind": "ram", "path": null}),
            json!({"nsid": 3, "kind": "file", "path": "/srv/a.attach-00ff"}),
            json!({"nsid": 4, "kind": "file", "path": "/srv/ab"}),
            json!({"nsid": 5, "kind": "rbd", "path": "pool/image"}),
        ];
        assert!(file_of(&namespaces, "s", 1).is_ok_and(|path| path == "/srv/a"));
        for nsid in [2, 5, 6] {
            assert!(file_of(&namespaces, "s", nsid).is_err(), "{nsid}");
        }
        let found: Vec<_> = earlier(&namespaces, "/srv/a").collect();
        assert_eq!(found, [(3, "/srv/a.attach-00ff")]);
    }
}
