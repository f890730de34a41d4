//! Origin of each line of an edited text: a line of a file, or the change that added it.

use std::path::PathBuf;
use std::sync::Arc;

use super::{ConfigFiles, Source};

/// The largest number of pairs of lines that are compared for one change.
const MOST_PAIRS: usize = 1 << 20;

/// The longest part of a change's description that is shown.
const MOST_CHARS: usize = 120;

/// Origin of a line.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Origin {
    /// The change that has written it; `None`: the file.
    pub(super) by: Option<Arc<str>>,
    /// Its number in the file, or in the text that the change supplied.
    pub(super) line: Option<usize>,
}

/// Origins of all lines, by file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Origins(Vec<(Option<PathBuf>, Vec<Origin>)>);

impl Origins {
    /// Origins of texts without changes.
    pub(crate) fn of(sources: &ConfigFiles) -> Origins {
        Origins(sources.iter().map(|s| (s.file.clone(), numbered(&s.text, None))).collect())
    }

    /// The text of a file is a new one, without changes.
    pub(crate) fn renew(&mut self, source: &Source) {
        let (file, lines) = (source.file.clone(), numbered(&source.text, None));
        self.0.retain(|(known, _)| *known != file);
        self.0.push((file, lines));
    }

    /// Returns the origins after a change from `self` to `new`. `is_given`: the change supplied whole texts.
    pub(crate) fn after(
        &self,
        old: &ConfigFiles,
        new: &ConfigFiles,
        by: &str,
        is_given: bool,
    ) -> Origins {
        let by: Arc<str> = by.chars().take(MOST_CHARS).collect::<String>().into();
        let each = new.iter().map(|source| {
            let was = old.iter().find(|old| old.file == source.file);
            let known = self.0.iter().find(|(file, _)| *file == source.file);
            let lines = match (was, known) {
                (Some(was), Some((_, known))) if was.text == source.text => known.clone(),
                (Some(was), Some((_, known))) if !is_given => {
                    edited(&was.text, known, &source.text, &by)
                }
                _ => numbered(&source.text, Some(&by)),
            };
            (source.file.clone(), lines)
        });
        Origins(each.collect())
    }

    /// Returns the origins for the client that has just sent whole texts, and refers to their lines.
    pub(crate) fn known_to_giver(&self) -> Origins {
        let mut known = self.clone();
        for origin in known.0.iter_mut().flat_map(|(_, lines)| lines) {
            if origin.line.is_some() {
                origin.by = None;
            }
        }
        known
    }

    /// Origin of a line of the text of `file`; the end of a text belongs to its last line.
    pub(super) fn line(&self, file: Option<&PathBuf>, line: usize) -> Option<Origin> {
        let (_, lines) = self.0.iter().find(|(known, _)| known.as_ref() == file)?;
        if let Some(origin) = lines.get(line.checked_sub(1)?) {
            return Some(origin.clone());
        }
        let last = lines.last().cloned().unwrap_or(Origin { by: None, line: Some(0) });
        Some(Origin { line: last.line.map(|line| line + 1), ..last })
    }
}

/// Origins of the lines of a file.
fn numbered(text: &str, by: Option<&Arc<str>>) -> Vec<Origin> {
    (1..=text.lines().count()).map(|n| Origin { by: by.cloned(), line: Some(n) }).collect()
}

/// Returns the origins of the lines of an edited text: unchanged lines keep theirs.
fn edited(was: &str, known: &[Origin], is: &str, by: &Arc<str>) -> Vec<Origin> {
    let (was, is): (Vec<&str>, Vec<&str>) = (was.lines().collect(), is.lines().collect());
    let head = was.iter().zip(&is).take_while(|(a, b)| a == b).count();
    let (old, new) = (&was[head..], &is[head..]);
    let tail = old.iter().rev().zip(new.iter().rev()).take_while(|(a, b)| a == b).count();
    let (old, new) = (&old[..old.len() - tail], &new[..new.len() - tail]);
    let middle = match old.len().saturating_mul(new.len()) > MOST_PAIRS {
        true => vec![Origin { by: None, line: None }; new.len()],
        false => (pairs(old, new).into_iter())
            .map(|at| match at {
                Some(at) => known[head + at].clone(),
                None => Origin { by: Some(Arc::clone(by)), line: None },
            })
            .collect(),
    };
    [&known[..head], &middle, &known[known.len() - tail..]].concat()
}

/// Returns for each line of `new` the matching line of `old`, along a longest common subsequence.
fn pairs(old: &[&str], new: &[&str]) -> Vec<Option<usize>> {
    let width = new.len() + 1;
    // Length of the longest common subsequence from each pair of positions to the ends.
    let mut longest = vec![0u32; (old.len() + 1) * width];
    for a in (0..old.len()).rev() {
        for b in (0..new.len()).rev() {
            longest[a * width + b] = match old[a] == new[b] {
                true => longest[(a + 1) * width + b + 1] + 1,
                false => longest[(a + 1) * width + b].max(longest[a * width + b + 1]),
            };
        }
    }
    let (mut a, mut pairs) = (0, vec![None; new.len()]);
    for (b, pair) in pairs.iter_mut().enumerate() {
        while a < old.len()
            && old[a] != new[b]
            && longest[(a + 1) * width + b] == longest[a * width + b]
        {
            a += 1;
        }
        if a < old.len() && old[a] == new[b] {
            *pair = Some(a);
            a += 1;
        }
    }
    pairs
}

#[cfg(test)]
mod tests {
    use crate::config::line_origin::*;

    fn said(origins: &Origins, lines: usize) -> Vec<String> {
        let said = |line| {
            let Origin { by, line } = origins.line(None, line).unwrap();
            format!("{} {}", by.as_deref().unwrap_or("file"), line.unwrap_or(0))
        };
        (1..=lines).map(said).collect()
    }

    #[test]
    fn each_line_is_attributed_to_its_file_or_the_change_that_wrote_it() {
        let text = "[[a]]\nn = 1\n[[a]]\nn = 2\n# end\n";
        let first = ConfigFiles::from(text);
        // Each section has a new line, one is removed, and one is added that equals another.
        let next = "[[a]]\nid = 1\nn = 1\n[[a]]\nid = 2\n\n[[a]]\nn = 1\n# end\n";
        let second = ConfigFiles::from(next);
        let origins = Origins::of(&first).after(&first, &second, "edit", false);
        let expected = [
            "file 1", "edit 0", "file 2", "file 3", "edit 0", "edit 0", "edit 0", "edit 0",
            "file 5", "file 6",
        ];
        assert_eq!(said(&origins, 10), expected);
        // A text that is supplied as a whole has line numbers of its own, which the client uses.
        let third = ConfigFiles::from("x = 1\ny = 2\n");
        let given = origins.after(&second, &third, "replace", true);
        assert_eq!(said(&given, 3), ["replace 1", "replace 2", "replace 3"]);
        assert_eq!(said(&given.known_to_giver(), 2), ["file 1", "file 2"]);
        let fourth = ConfigFiles::from("x = 1\nz = 3\ny = 2\n");
        let edited = given.after(&third, &fourth, "edit", false);
        assert_eq!(said(&edited, 3), ["replace 1", "edit 0", "replace 2"]);
        assert_eq!(said(&edited.known_to_giver(), 3), ["file 1", "edit 0", "file 2"]);
    }
}
