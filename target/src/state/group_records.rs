//! State of namespaces in the object of a gateway group, instead of a directory: a record of the same
//! text for each section, under the key `ns.UUID.SECTION`. All gateways of the group see it.
//!
//! ```text
//! this gateway takes the ANA group ─► refresh ─► reservation and write protection are loaded again
//!       ─► hosts see them ─► each change is one operation that compares the owner of the group
//! ```
//!
//! The operation that writes a section compares the record of the ANA group with that of this gateway
//! as its owner, so a former owner changes nothing, even if it is not excluded from the cluster yet.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use nix::errno::Errno;
use tracing::error;
use uuid::Uuid;

use super::namespace_state::SectionRecord;
use crate::blockdev::lock;
use crate::blockdev::rados::{ObjectClient, Update, UpdateError};
use crate::blockdev::record::{Record, seal, unseal};
use crate::core::subsystem::persistence::{NotOwner, Persist};

/// First part of the keys.
const PREFIX: &str = "ns.";

/// The sections of all namespaces of a gateway group.
#[derive(Debug, Default)]
pub struct GroupRecords(Mutex<Records>);

#[derive(Debug, Default)]
struct Records {
    object: Option<(Arc<ObjectClient>, String)>,
    /// The records of the ANA groups that this gateway owns: key and value.
    owned: BTreeMap<u32, (String, Vec<u8>)>,
    /// The sections as they were read last.
    sections: BTreeMap<String, Vec<u8>>,
}

impl GroupRecords {
    /// The client and the object. Before, there are no sections, and none can be written.
    pub fn connect(&self, client: Arc<ObjectClient>, object: &str) {
        lock(&self.0).object = Some((client, object.to_owned()));
    }

    /// The ANA groups that this gateway owns now, each with the key and the value of its record.
    pub fn set_owned(&self, owned: BTreeMap<u32, (String, Vec<u8>)>) {
        lock(&self.0).owned = owned;
    }

    /// Reads all sections. After it, reservations and write protection of namespaces that this
    /// gateway takes are loaded again. Blocks.
    ///
    /// # Errors
    /// One sentence.
    pub fn refresh(&self) -> Result<(), String> {
        let Some((client, object)) = lock(&self.0).object.clone() else {
            return Err("the cluster of the gateway group is not connected".to_owned());
        };
        let read = client.read_prefixes(&object, &[PREFIX]);
        let all = read.map_err(|errno| format!("cannot read {object}: {}", errno.desc()))?;
        lock(&self.0).sections = all;
        Ok(())
    }

    /// The record of a namespace in an ANA group.
    pub fn namespace(self: &Arc<Self>, ana_group: u32, uuid: Uuid) -> NamespaceObject {
        NamespaceObject { records: Arc::clone(self), ana_group, uuid }
    }
}

/// The sections of one namespace in a gateway group.
#[derive(Clone, Debug)]
pub struct NamespaceObject {
    records: Arc<GroupRecords>,
    ana_group: u32,
    uuid: Uuid,
}

impl NamespaceObject {
    fn key(&self, name: &str) -> String {
        format!("{PREFIX}{}.{name}", self.uuid)
    }

    /// Writes a section, if this gateway still owns the ANA group.
    fn write(&self, name: &'static str, lines: Option<&String>) -> io::Result<()> {
        let (object, owned) = {
            let records = lock(&self.records.0);
            (records.object.clone(), records.owned.get(&self.ana_group).cloned())
        };
        let (Some((client, object)), Some((owner, value))) = (object, owned) else {
            return Err(not_owned());
        };
        let key = self.key(name);
        let text = lines.map(|lines| seal(&SectionRecord::new(name, lines)).into_bytes());
        let update = Update {
            compare: vec![(owner, Some(value))],
            set: text.iter().map(|text| (key.clone(), text.clone())).collect(),
            remove: if text.is_none() { vec![key.clone()] } else { Vec::new() },
            ..Update::default()
        };
        client.update(&object, &update).map_err(|error| match error {
            UpdateError::Conflict => not_owned(),
            UpdateError::Errno(errno) => io::Error::from(errno),
        })?;
        let mut records = lock(&self.records.0);
        match text {
            Some(text) => drop(records.sections.insert(key, text)),
            None => drop(records.sections.remove(&key)),
        }
        Ok(())
    }
}

fn not_owned() -> io::Error {
    io::Error::other(NotOwner)
}

impl Persist for NamespaceObject {
    fn load_lines(
        &self,
        name: &'static str,
        valid: &dyn Fn(&str) -> bool,
    ) -> Result<Option<String>, String> {
        let Some(text) = lock(&self.records.0).sections.get(&self.key(name)).cloned() else {
            return Ok(None);
        };
        let section = unseal::<SectionRecord>(&text).and_then(|record| {
            record.into_lines(name).filter(|lines| valid(lines)).ok_or("it contradicts itself")
        });
        section.map(Some).map_err(|why| {
            format!(
                "{} is no record that nvmfd has written ({why}): {}",
                self.path().display(),
                SectionRecord::REMEDY
            )
        })
    }

    fn replace_lines(
        &self,
        name: &'static str,
        new: Option<String>,
        before: Option<String>,
    ) -> io::Result<()> {
        let written = self.write(name, new.as_ref());
        written.inspect_err(|failure| {
            let shown = self.path();
            error!("cannot persist [{name}] in {}: {failure}", shown.display());
            // It may have been written. Hosts were reported the previous state, so restore it.
            if failure.raw_os_error() == Some(Errno::ETIMEDOUT as i32)
                && let Err(failure) = self.write(name, before.as_ref())
            {
                error!("cannot roll back [{name}]: {failure}");
            }
        })
    }

    /// Its object and the beginning of its keys.
    fn path(&self) -> PathBuf {
        let object = lock(&self.records.0).object.as_ref().map(|(_, object)| object.clone());
        PathBuf::from(format!("{}/{}", object.unwrap_or_default(), self.key("*")))
    }

    fn is_of_group(&self) -> bool {
        true
    }
}

#[cfg(test)]
mod tests;
