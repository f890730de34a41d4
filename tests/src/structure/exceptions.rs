//! Lists of exceptions from rules of the structure. They may only shrink.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;
use std::{fs, io};

/// Exceptions, one per line.
#[derive(Default)]
pub struct Exceptions(BTreeSet<String>);

impl Exceptions {
    /// Lines of a file that are neither empty nor comments (`#`).
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(file: &Path) -> io::Result<Exceptions> {
        Ok(Exceptions::from(&fs::read_to_string(file)?))
    }

    /// As [`Exceptions::read`], from a text.
    pub fn from(text: &str) -> Exceptions {
        Exceptions(lines(text).map(str::to_owned).collect())
    }

    /// Number of exceptions.
    pub fn count(&self) -> usize {
        self.0.len()
    }

    /// Compares the findings (an exception and its location) with the list.
    ///
    /// # Errors
    /// Instructions: remove what is found and not listed, remove lines that are listed and not
    /// found.
    pub fn check(&self, found: &BTreeMap<String, String>) -> Result<(), String> {
        let mut text = String::new();
        for (line, place) in found.iter().filter(|(line, _)| !self.0.contains(*line)) {
            let _ = writeln!(text, "not allowed: {place}\n  ({line})");
        }
        for line in self.0.iter().filter(|line| !found.contains_key(*line)) {
            let _ = writeln!(text, "gone, remove this line of the list: {line}");
        }
        if text.is_empty() { Ok(()) } else { Err(text) }
    }
}

/// Lines with content, without comments.
pub(super) fn lines(text: &str) -> impl Iterator<Item = &str> {
    text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'))
}

#[cfg(test)]
mod tests {
    use crate::structure::exceptions::*;

    #[test]
    fn new_and_obsolete_lines_are_reported() {
        let list = Exceptions::from("# why\n\na -> b\nc -> d\n");
        assert_eq!(list.count(), 2);
        let found =
            |lines: &[&str]| lines.iter().map(|l| (l.to_string(), "x".to_owned())).collect();
        assert_eq!(list.check(&found(&["a -> b", "c -> d"])), Ok(()));
        let new = list.check(&found(&["a -> b", "c -> d", "e -> f"])).unwrap_err();
        assert_eq!(new, "not allowed: x\n  (e -> f)\n");
        let gone = list.check(&found(&["a -> b"])).unwrap_err();
        assert_eq!(gone, "gone, remove this line of the list: c -> d\n");
    }
}
