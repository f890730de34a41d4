//! Persistent state of a namespace: one record by its UUID, with sections. An empty section is left
//! out; a record without sections is removed.
//!
//! ```text
//! nvmfd namespace 1
//! [format]
//! block_size 512
//! store "/srv/disk1.img"
//! [reservation]
//! generation 7
//! type 3
//! holder 0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a
//! registrant 0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a 00000000000000a1
//! crc32 5f3a9c01
//! ```
//!
//! Earlier versions had a file for each section (`UUID.reservation` and so on): a record whose lines are
//! those of the section. They are read as well, and converted before the first change:
//!
//! ```text
//! UUID.reservation .. ─► UUID.namespace says the same, durably ─► they are removed, durably ─► the change
//! ```
//!
//! So a file of an earlier version beside `UUID.namespace` has the same content. If it differs, it
//! was put there by hand, and only an administrator can decide which is right.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use tracing::error;
use uuid::Uuid;

use crate::blockdev::lock;
use crate::blockdev::record::{self, Record};
use crate::core::subsystem::persistence::{Persist, Section};
use crate::state::record::StateDir;

/// Names of a section, and its file in earlier versions.
struct SectionKind {
    /// Name in brackets; suffix of the earlier file.
    name: &'static str,
    /// Kind and version of the earlier file, if there was one.
    earlier: Option<(&'static str, u32)>,
    thing: &'static str,
    /// Hosts rely on it whatever the UUID is. For a block size there is another rule, and that the
    /// path of a file has led elsewhere is of use under its own UUID only.
    is_relied_on: bool,
}

const KINDS: [SectionKind; 6] = [
    SectionKind {
        name: "format",
        earlier: Some(("format", 2)),
        thing: "a block size",
        is_relied_on: false,
    },
    SectionKind {
        name: "protection",
        earlier: Some(("write protection", 1)),
        thing: "write protection",
        is_relied_on: true,
    },
    SectionKind {
        name: "replaced",
        earlier: None,
        thing: "a file that was replaced",
        is_relied_on: false,
    },
    SectionKind {
        name: "reservation",
        earlier: Some(("reservation", 1)),
        thing: "a reservation",
        is_relied_on: true,
    },
    SectionKind {
        name: "trust",
        earlier: Some(("trust", 1)),
        thing: "a failed flush, or a file that was shortened",
        is_relied_on: true,
    },
    SectionKind {
        name: "uncorrectable",
        earlier: Some(("uncorrectable blocks", 1)),
        thing: "blocks that cannot be read",
        is_relied_on: true,
    },
];

const EXTENSION: &str = "namespace";

/// Serializes changes of sections and conversions of files, so that none is lost.
static CHANGES: Mutex<()> = Mutex::new(());

/// The name of a section, and its lines; none: it is not persisted.
pub(crate) type NamedLines = (&'static str, Option<String>);

/// The lines of each section, by its name.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
struct Sections(BTreeMap<&'static str, String>);

impl Record for Sections {
    const KIND: &'static str = "namespace";
    const REMEDY: &'static str = "remove it if all that it may have said of the namespace is \
                                  needed no more: reservation, write protection, blocks that \
                                  cannot be read, block size, failed flush, a file \
                                  that was replaced";

    fn emit(&self) -> String {
        self.0.iter().map(|(name, body)| format!("[{name}]\n{body}")).collect()
    }

    fn parse(body: &str) -> Option<Sections> {
        let mut sections = BTreeMap::<_, String>::new();
        let mut own = None;
        for line in body.lines() {
            if let Some(head) = line.strip_prefix('[') {
                let kind = KINDS.iter().find(|kind| head.strip_suffix(']') == Some(kind.name))?;
                own = Some(sections.entry(kind.name).or_default());
            } else {
                let own = own.as_mut()?;
                own.push_str(line);
                own.push('\n');
            }
        }
        (!sections.is_empty()).then_some(Sections(sections))
    }
}

/// A record of one section, for a store of values instead of files.
#[derive(PartialEq, Eq, Debug)]
pub(super) struct SectionRecord(Sections);

impl SectionRecord {
    pub(super) fn new(name: &'static str, lines: &str) -> SectionRecord {
        SectionRecord(Sections([(name, lines.to_owned())].into()))
    }

    /// The lines of this section.
    pub(super) fn into_lines(mut self, name: &str) -> Option<String> {
        self.0.0.remove(name)
    }
}

impl Record for SectionRecord {
    const KIND: &'static str = Sections::KIND;
    const REMEDY: &'static str = Sections::REMEDY;

    fn emit(&self) -> String {
        self.0.emit()
    }

    fn parse(body: &str) -> Option<SectionRecord> {
        Sections::parse(body).map(SectionRecord)
    }
}

/// Record of the namespace with one UUID.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceFile {
    directory: PathBuf,
    uuid: Uuid,
}

/// Persisted sections of a namespace.
struct LoadedSections {
    sections: Sections,
    /// The files of earlier versions.
    earlier: Vec<String>,
}

impl NamespaceFile {
    /// Returns the record in `directory`.
    pub fn new(directory: &Path, uuid: Uuid) -> NamespaceFile {
        NamespaceFile { directory: directory.to_owned(), uuid }
    }

    /// The records of all namespaces in `directory`.
    pub(crate) fn all(directory: &Path) -> io::Result<Vec<NamespaceFile>> {
        let names = StateDir(directory).names()?;
        let uuid = |name: &String| {
            let (uuid, end) = name.split_once('.')?;
            let is_ours = end == EXTENSION || KINDS.iter().any(|kind| kind.name == end);
            uuid.parse().ok().filter(|_| is_ours)
        };
        let uuids: BTreeSet<Uuid> = names.iter().filter_map(uuid).collect();
        Ok(uuids.into_iter().map(|uuid| NamespaceFile::new(directory, uuid)).collect())
    }

    /// The UUID.
    pub(crate) fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// Names of the existing files.
    pub(crate) fn files(&self) -> Vec<String> {
        let all = self.earlier().into_iter().chain([self.name()]);
        all.filter(|name| self.directory.join(name).exists()).collect()
    }

    /// A section; `None` if it is not persisted.
    ///
    /// # Errors
    /// As [`Persist::load_lines`].
    pub(crate) fn load<S: Section>(&self) -> Result<Option<S>, String> {
        (self as &dyn Persist).load()
    }

    /// Persisted state that hosts rely on, whatever the UUID is, as named in messages.
    pub(crate) fn relied_on(&self) -> Vec<&'static str> {
        let _alone = lock(&CHANGES);
        let Ok(LoadedSections { sections, .. }) = self.read() else {
            return vec!["what cannot be read"];
        };
        let is_there =
            |kind: &&SectionKind| kind.is_relied_on && sections.0.contains_key(kind.name);
        KINDS.iter().filter(is_there).map(|kind| kind.thing).collect()
    }

    /// Replaces a section, or removes it.
    ///
    /// # Errors
    /// As [`Persist::replace_lines`].
    #[cfg(test)]
    pub(crate) fn replace<S: Section>(
        &self,
        new: Option<&S>,
        before: Option<&S>,
    ) -> io::Result<()> {
        (self as &dyn Persist).replace(new, before)
    }

    /// Replaces sections, or removes them: all or none.
    ///
    /// # Errors
    /// As [`Persist::replace_lines`].
    pub(crate) fn replace_all<const N: usize>(
        &self,
        new: [NamedLines; N],
        before: [NamedLines; N],
    ) -> io::Result<()> {
        let _alone = lock(&CHANGES);
        let names = new.each_ref().map(|(name, _)| format!("[{name}]")).join(", ");
        let found = self.read().map_err(io::Error::other);
        let replaced = found.and_then(|found| {
            self.convert(&found)?;
            let write = |lines| self.write(found.sections.clone(), lines);
            write(new).inspect_err(|_| {
                let is_as_before = |LoadedSections { sections: Sections(now), .. }| {
                    before.iter().all(|(name, lines)| now.get(name) == lines.as_ref())
                };
                if self.read().is_ok_and(is_as_before) {
                    return;
                }
                // The rename has happened. Hosts were reported the previous state, so restore it.
                if let Err(failure) = write(before) {
                    error!("cannot roll back {names}: {failure}");
                }
            })
        });
        replaced.inspect_err(|failure| {
            let shown = self.path();
            error!("cannot persist {names} in {}: {failure}", shown.display());
        })
    }

    /// Removes all state of a deleted namespace.
    pub(crate) fn remove(&self) -> io::Result<()> {
        let _alone = lock(&CHANGES);
        self.files().iter().try_for_each(|name| StateDir(&self.directory).remove(name))
    }

    /// Reads all sections. Earlier files are read first: if one is missing then, it was converted, and the
    /// new file exists.
    fn read(&self) -> Result<LoadedSections, String> {
        let directory = StateDir(&self.directory);
        let mut earlier = Vec::new();
        let mut sections = BTreeMap::new();
        for (kind, name) in KINDS.iter().zip(self.earlier()) {
            let Some((first, version)) = kind.earlier else { continue };
            let remedy = format!("remove it if {} of it is needed no more", kind.thing);
            let body = |text: &[u8]| record::body(text, first, version).map(str::to_owned);
            if let Some(body) = directory.load_as(&name, &remedy, body)? {
                sections.insert(kind.name, body);
                earlier.push(name);
            }
        }
        let Some(Sections(converted)) = directory.load(&self.name())? else {
            return Ok(LoadedSections { sections: Sections(sections), earlier });
        };
        if let Some((name, _)) =
            sections.iter().find(|(name, body)| converted.get(*name) != Some(*body))
        {
            return Err(format!(
                "{} has a file of an earlier version, {}.{name}, beside it that says something \
                 else: keep the one that is right, and remove the other",
                self.path().display(),
                self.uuid
            ));
        }
        Ok(LoadedSections { sections: Sections(converted), earlier })
    }

    /// Converts the files of earlier versions to the one of this version.
    fn convert(&self, found: &LoadedSections) -> io::Result<()> {
        let directory = StateDir(&self.directory);
        if !found.earlier.is_empty() {
            // Also if it exists already: a power loss may revert its name.
            directory.replace(&self.name(), &found.sections)?;
        }
        found.earlier.iter().try_for_each(|name| directory.remove(name))
    }

    /// Writes all sections, including the new values of these.
    fn write<const N: usize>(
        &self,
        Sections(mut all): Sections,
        changed: [NamedLines; N],
    ) -> io::Result<()> {
        for (name, lines) in changed {
            all.remove(name);
            all.extend(lines.map(|lines| (name, lines)));
        }
        match all.is_empty() {
            true => StateDir(&self.directory).remove(&self.name()),
            false => StateDir(&self.directory).replace(&self.name(), &Sections(all)),
        }
    }

    fn name(&self) -> String {
        format!("{}.{EXTENSION}", self.uuid)
    }

    /// The names of all files of earlier versions, in the order of [`KINDS`].
    fn earlier(&self) -> [String; KINDS.len()] {
        KINDS.each_ref().map(|kind| format!("{}.{}", self.uuid, kind.name))
    }
}

impl Persist for NamespaceFile {
    fn load_lines(
        &self,
        name: &'static str,
        valid: &dyn Fn(&str) -> bool,
    ) -> Result<Option<String>, String> {
        let LoadedSections { mut sections, earlier } = {
            let _alone = lock(&CHANGES);
            self.read()?
        };
        let lines = sections.0.remove(name);
        if lines.as_deref().is_none_or(valid) {
            return Ok(lines);
        }
        let files = if earlier.is_empty() { vec![self.name()] } else { earlier };
        Err(format!(
            "{} of {}: [{name}] contradicts itself: restore it, or {}",
            files.join(", "),
            self.directory.display(),
            Sections::REMEDY
        ))
    }

    fn replace_lines(
        &self,
        name: &'static str,
        new: Option<String>,
        before: Option<String>,
    ) -> io::Result<()> {
        self.replace_all([(name, new)], [(name, before)])
    }

    /// Path of the file, which exists after the conversion.
    fn path(&self) -> PathBuf {
        self.directory.join(self.name())
    }
}

#[cfg(test)]
mod tests;
