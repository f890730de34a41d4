//! Where the state of a namespace is persisted: a section of text for each thing.

use std::fmt::{self, Debug};
use std::io;
use std::path::PathBuf;

use nvme::Status;

/// The state is not persisted here any more: another gateway of the group serves the namespace.
#[derive(Clone, Copy, Debug)]
pub struct NotOwner;

impl std::error::Error for NotOwner {}

impl fmt::Display for NotOwner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("this gateway does not own the ANA group of the namespace any more")
    }
}

/// The status of a command whose change was not persisted: hosts repeat it on another path if that
/// is where it belongs.
pub(crate) fn not_persisted(failure: &io::Error) -> Status {
    let is_elsewhere = failure.get_ref().is_some_and(|cause| cause.is::<NotOwner>());
    if is_elsewhere { Status::ANA_INACCESSIBLE } else { Status::INTERNAL_ERROR }
}

/// A type that can be persisted as a section.
pub trait Section: Sized {
    /// Its name.
    const NAME: &'static str;

    /// Its lines, each with its end. None begins with a bracket.
    fn emit(&self) -> String;

    /// Parses these lines. The caller rejects what [`Section::emit`] would not write.
    fn parse(body: &str) -> Option<Self>;
}

/// Persists the sections of one namespace.
pub trait Persist: Debug + Send + Sync {
    /// The lines of a section; none if nothing is persisted.
    ///
    /// # Errors
    /// One sentence about an unreadable or damaged file, or about lines that are not `valid`.
    fn load_lines(
        &self,
        name: &'static str,
        valid: &dyn Fn(&str) -> bool,
    ) -> Result<Option<String>, String>;

    /// Replaces the lines of a section, or removes it; `before`: its contents as known to hosts.
    /// Durable when this returns.
    ///
    /// # Errors
    /// The error of the system, or that the persisted file cannot be used. The old contents are
    /// valid then, or the log says that they may not be.
    fn replace_lines(
        &self,
        name: &'static str,
        new: Option<String>,
        before: Option<String>,
    ) -> io::Result<()>;

    /// The file, for an administrator.
    fn path(&self) -> PathBuf;

    /// Whether the gateways of a group have it together.
    fn is_of_group(&self) -> bool {
        false
    }
}

impl dyn Persist {
    /// A section; none if nothing is persisted.
    ///
    /// # Errors
    /// One sentence about an unreadable or damaged file. The state of the namespace is unknown
    /// then, and hosts may rely on it.
    pub fn load<S: Section>(&self) -> Result<Option<S>, String> {
        let parse = |lines: &str| S::parse(lines).filter(|section| section.emit() == lines);
        let lines = self.load_lines(S::NAME, &|lines| parse(lines).is_some())?;
        Ok(lines.as_deref().and_then(parse))
    }

    /// Replaces a section, or removes it.
    ///
    /// # Errors
    /// As [`Persist::replace_lines`].
    pub fn replace<S: Section>(&self, new: Option<&S>, before: Option<&S>) -> io::Result<()> {
        self.replace_lines(S::NAME, new.map(S::emit), before.map(S::emit))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::collections::BTreeMap;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::sync::{Arc, Mutex};

    use super::*;

    /// Sections in memory, which exist longer than the objects that use them.
    #[derive(Clone, Debug, Default)]
    pub(crate) struct MemorySections {
        sections: Arc<Mutex<BTreeMap<&'static str, String>>>,
        fails: Arc<AtomicBool>,
        is_of_group: bool,
    }

    impl MemorySections {
        /// Makes every write fail, or not any more.
        pub(crate) fn fail(&self, fails: bool) {
            self.fails.store(fails, Ordering::Relaxed);
        }

        /// Those of a gateway group.
        pub(crate) fn of_group() -> MemorySections {
            MemorySections { is_of_group: true, ..MemorySections::default() }
        }

        pub(crate) fn is_empty(&self) -> bool {
            self.sections.lock().unwrap().is_empty()
        }
    }

    impl Persist for MemorySections {
        fn load_lines(
            &self,
            name: &'static str,
            valid: &dyn Fn(&str) -> bool,
        ) -> Result<Option<String>, String> {
            let lines = self.sections.lock().unwrap().get(name).cloned();
            assert!(lines.as_deref().is_none_or(valid), "[{name}] {lines:?}");
            Ok(lines)
        }

        fn replace_lines(
            &self,
            name: &'static str,
            new: Option<String>,
            before: Option<String>,
        ) -> io::Result<()> {
            if self.fails.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::StorageFull.into());
            }
            let mut sections = self.sections.lock().unwrap();
            assert_eq!(sections.remove(name), before, "[{name}]");
            sections.extend(new.map(|lines| (name, lines)));
            Ok(())
        }

        fn path(&self) -> PathBuf {
            "memory".into()
        }

        fn is_of_group(&self) -> bool {
            self.is_of_group
        }
    }

    #[test]
    fn persistence_failures_of_a_former_owner_return_ana_inaccessible() {
        let other_causes = [
            io::ErrorKind::PermissionDenied.into(),
            io::Error::from_raw_os_error(28),
            io::Error::other("another cause"),
        ];
        for failure in other_causes {
            assert_eq!(not_persisted(&failure), Status::INTERNAL_ERROR, "{failure}");
        }
        assert_eq!(not_persisted(&io::Error::other(NotOwner)), Status::ANA_INACCESSIBLE);
    }
}
