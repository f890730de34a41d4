//! Reads a table of the text key by key, so that one pass finds every error.
//!
//! serde converts each value; a whole table is never passed to serde, because that would stop at
//! the first error.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::{DeserializeOwned, Deserializer, Error, Visitor};
use toml::Spanned;
use toml::de::{DeTable, DeValue, ValueDeserializer};

use super::line_origin::Origin;
use super::{Auto, ConfigFiles, Origins, Source, renamed_keys};

/// A value and its range of bytes in the text.
#[derive(Clone, Debug)]
pub(super) struct At<T> {
    pub(super) value: T,
    pub(super) span: Range<usize>,
}

/// One error in a configuration: place, text, and remedy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Diagnostic {
    /// The file, if it differs from that of the whole list.
    pub file: Option<PathBuf>,
    /// Line and column, from 1, if the error has a place.
    pub place: Option<(usize, usize)>,
    /// The error.
    pub what: String,
    /// The remedy.
    pub remedy: String,
}

impl Diagnostic {
    /// The error with its place as compilers write it, which editors find.
    pub(crate) fn in_file(&self, file: &Path) -> String {
        let place =
            self.place.map_or_else(String::new, |(line, column)| format!("{line}:{column}:"));
        format!("{}:{place} {}: {}", file.display(), self.what, self.remedy)
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some((line, column)) = self.place {
            write!(f, "line {line}, column {column}: ")?;
        }
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// All errors of a configuration, in the order of the text. Displays one line per error.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct ConfigErrors {
    /// The configuration file, if any.
    pub file: Option<PathBuf>,
    /// At least one error.
    pub mistakes: Vec<Diagnostic>,
}

impl fmt::Display for ConfigErrors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, mistake) in self.mistakes.iter().enumerate() {
            if n > 0 {
                writeln!(f)?;
            }
            match mistake.file.as_ref().or(self.file.as_ref()) {
                Some(file) => f.write_str(&mistake.in_file(file))?,
                None => write!(f, "{mistake}")?,
            }
        }
        Ok(())
    }
}

impl std::error::Error for ConfigErrors {}

/// The errors found so far in the texts of one configuration. Offsets are counted through all
/// texts.
pub(super) struct Diagnostics<'t> {
    sources: Vec<(usize, &'t Source)>,
    /// Origins of their lines; `None`: unedited files.
    origins: Option<&'t Origins>,
    found: RefCell<Vec<(usize, Diagnostic)>>,
    /// Unknown keys that resemble none of their section: their errors in `found`.
    strangers: RefCell<Vec<(usize, String)>>,
    /// Keys that were read, by title of a section.
    pub(super) known: RefCell<BTreeMap<&'static str, BTreeSet<&'static str>>>,
}

impl<'t> Diagnostics<'t> {
    pub(super) fn new(sources: &'t ConfigFiles) -> Self {
        let mut base = 0;
        let mut all = Vec::new();
        for source in sources.iter() {
            all.push((base, source));
            // The end of a text is a place too.
            base += source.text.len() + 1;
        }
        let (found, strangers, known) = Default::default();
        Self { sources: all, origins: None, found, strangers, known }
    }

    /// As [`Diagnostics::new`], for edited texts: places name the origins of lines.
    pub(super) fn of_edited(sources: &'t ConfigFiles, origins: &'t Origins) -> Self {
        Self { origins: Some(origins), ..Self::new(sources) }
    }

    /// The number of a line in its file; or its text and the change that has written it.
    fn line(&self, index: usize, line: usize) -> Result<usize, String> {
        let Source { file, text } = self.sources[index].1;
        let Some(origins) = self.origins else { return Ok(line) };
        let said = one_line(text.lines().nth(line.saturating_sub(1)).unwrap_or_default());
        match origins.line(file.as_ref(), line) {
            Some(Origin { by: None, line: Some(line) }) => Ok(line),
            Some(Origin { by: Some(by), line: Some(line) }) => {
                Err(format!("`{said}`, line {line} of what this change gave: {by}"))
            }
            Some(Origin { by: Some(by), line: None }) => {
                Err(format!("`{said}`, written by this change: {by}"))
            }
            Some(Origin { by: None, line: None }) | None => Err(format!("`{said}`")),
        }
    }

    /// The offset of a text.
    pub(super) fn base(&self, index: usize) -> usize {
        self.sources[index].0
    }

    /// Adds an error at a place of the text.
    pub(super) fn add(
        &self,
        span: &Range<usize>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        let (index, (line, column)) = self.place(span.start);
        let (mut what, remedy) = (what.into(), remedy.into());
        let line = self.line(index, line);
        if let Err(said) = &line {
            what += &format!(" ({said})");
        }
        let place = line.ok().map(|line| (line, column));
        let file = self.sources[index].1.file.clone().filter(|_| index > 0 && place.is_some());
        let diagnostic = Diagnostic { file, place, what, remedy };
        self.found.borrow_mut().push((span.start, diagnostic));
    }

    /// The place of another value, for an error at `from`: the line alone, if both are in the same
    /// text.
    pub(super) fn shown(&self, other: &Range<usize>, from: &Range<usize>) -> String {
        let ((index, (line, column)), (here, _)) =
            (self.place(other.start), self.place(from.start));
        let line = match self.line(index, line) {
            Ok(line) => line,
            Err(said) => return said,
        };
        match &self.sources[index].1.file {
            Some(file) if index != here => {
                format!("{}:{line}:{column}", file.display())
            }
            _ => format!("line {line}"),
        }
    }

    /// The text, line and column of an offset, counted in characters from 1.
    fn place(&self, at: usize) -> (usize, (usize, usize)) {
        let index = self.sources.partition_point(|(base, _)| *base <= at).saturating_sub(1);
        let (base, Source { text, .. }) = self.sources[index];
        let before = text.get(..(at - base).min(text.len())).unwrap_or(text);
        let line_start = before.rfind('\n').map_or(0, |newline| newline + 1);
        (index, (before.matches('\n').count() + 1, before[line_start..].chars().count() + 1))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.borrow().is_empty()
    }

    pub(super) fn finish(self) -> ConfigErrors {
        let (mut found, known) = (self.found.into_inner(), self.known.into_inner());
        for (at, name) in self.strangers.into_inner() {
            let resembling = known.iter().flat_map(|(title, keys)| {
                let key = keys.iter().find(|known| alike(known, &name));
                key.map(|key| format!("`{key}` of {title}"))
            });
            let resembling: Vec<String> = resembling.collect();
            if !resembling.is_empty() {
                found[at].1.remedy = format!("did you mean {}?", resembling.join(" or "));
            }
        }
        found.sort_by_key(|(at, _)| *at);
        let mistakes = found.into_iter().map(|(_, mistake)| mistake).collect();
        let file = self.sources.first().and_then(|(_, main)| main.file.clone());
        ConfigErrors { file, mistakes }
    }
}

/// A table. Take the known keys, then [`TableReader::end`] reports the others.
pub(super) struct TableReader<'i> {
    pub(super) report: &'i Diagnostics<'i>,
    table: DeTable<'i>,
    known: Vec<&'static str>,
    span: Range<usize>,
    /// Its title in the text: `[[subsystem]]`.
    title: &'static str,
}

impl<'i> TableReader<'i> {
    pub(super) fn new(
        mut table: DeTable<'i>,
        span: Range<usize>,
        title: &'static str,
        report: &'i Diagnostics<'i>,
    ) -> Self {
        renamed_keys::rename(&mut table, title);
        Self { report, table, known: Vec::new(), span, title }
    }

    /// As [`Diagnostics::add`].
    pub(super) fn add(
        &self,
        span: &Range<usize>,
        what: impl Into<String>,
        remedy: impl Into<String>,
    ) {
        self.report.add(span, what, remedy);
    }

    /// Offset of the table.
    pub(super) fn span(&self) -> &Range<usize> {
        &self.span
    }

    /// Whether the table has `key`.
    pub(super) fn has(&mut self, key: &'static str) -> bool {
        self.known.push(key);
        self.table.contains_key(key)
    }

    fn raw(&mut self, key: &'static str) -> Option<Spanned<DeValue<'i>>> {
        self.known.push(key);
        self.table.remove(key)
    }

    /// The value of `key`, if present and of the described `form`.
    pub(super) fn take<T: DeserializeOwned>(
        &mut self,
        key: &'static str,
        form: &str,
    ) -> Option<At<T>> {
        let value = self.raw(key)?;
        let span = value.span();
        match T::deserialize(ValueDeserializer::from(value)) {
            Ok(value) => Some(At { value, span }),
            Err(error) => {
                let span = error.span().unwrap_or(span);
                let what = format!("`{key}`: {}", in_words(&one_line(error.message())));
                self.add(&span, what, format!("write {form}"));
                None
            }
        }
    }

    /// As [`TableReader::take`]; a missing key is an error.
    pub(super) fn need<T: DeserializeOwned>(
        &mut self,
        key: &'static str,
        form: &str,
    ) -> Option<At<T>> {
        if !self.table.contains_key(key) {
            let remedy = format!("add `{key} = ..`, {form}");
            self.add(&self.span, format!("{} has no `{key}`", self.title), remedy);
        }
        self.take(key, form)
    }

    /// The value of `key`, if present and valid; another one is an error.
    pub(super) fn checked<T: DeserializeOwned + fmt::Display>(
        &mut self,
        key: &'static str,
        form: &str,
        is_valid: impl FnOnce(&T) -> bool,
    ) -> Option<T> {
        let At { value, span } = self.take::<T>(key, form)?;
        if !is_valid(&value) {
            self.add(&span, format!("`{key}` is {value}"), format!("write {form}"));
            return None;
        }
        Some(value)
    }

    /// The flag `key`, or its default.
    pub(super) fn flag(&mut self, key: &'static str, default: bool) -> bool {
        self.take(key, "true or false").map_or(default, |at| at.value)
    }

    /// A table inside this one; an empty one if it is missing.
    pub(super) fn table(&mut self, key: &'static str, title: &'static str) -> TableReader<'i> {
        let at = self.span.clone();
        let Some(value) = self.raw(key) else {
            return TableReader::new(DeTable::new(), at, title, self.report);
        };
        let span = value.span();
        match value.into_inner() {
            DeValue::Table(table) => TableReader::new(table, span, title, self.report),
            other => {
                let what = format!("`{key}` is {}", a_kind(&other));
                self.add(&span, what, format!("write a section that begins with {title}"));
                TableReader::new(DeTable::new(), span, title, self.report)
            }
        }
    }

    /// The tables of an array of tables; empty if it is missing.
    pub(super) fn tables(
        &mut self,
        key: &'static str,
        title: &'static str,
    ) -> Vec<TableReader<'i>> {
        let Some(value) = self.raw(key) else { return Vec::new() };
        let span = value.span();
        let remedy = format!("begin each with a line {title}");
        let DeValue::Array(array) = value.into_inner() else {
            self.add(&span, format!("`{key}` is not a list of sections"), remedy);
            return Vec::new();
        };
        let mut tables = Vec::new();
        for value in array {
            let span = value.span();
            match value.into_inner() {
                DeValue::Table(table) => {
                    tables.push(TableReader::new(table, span, title, self.report))
                }
                other => {
                    let what = format!("`{key}` contains {}", a_kind(&other));
                    self.add(&span, what, remedy.clone());
                }
            }
        }
        tables
    }

    /// Reports every key that was not read.
    pub(super) fn end(&self) {
        let report = self.report;
        report.known.borrow_mut().entry(self.title).or_default().extend(&self.known);
        for (key, _) in &self.table {
            let name: &str = key.get_ref().as_ref();
            let closest = self.known.iter().find(|known| alike(known, name));
            let remedy = match closest {
                Some(known) => format!("did you mean `{known}`?"),
                None => {
                    let known: BTreeSet<&str> = self.known.iter().copied().collect();
                    let known: Vec<&str> = known.into_iter().collect();
                    format!("{} may have {}", self.title, known.join(", "))
                }
            };
            if closest.is_none() {
                let at = report.found.borrow().len();
                report.strangers.borrow_mut().push((at, name.to_owned()));
            }
            report.add(&key.span(), format!("unknown key `{}`", name.escape_debug()), remedy);
        }
    }
}

fn a_kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a text",
        DeValue::Integer(_) | DeValue::Float(_) => "a number",
        DeValue::Boolean(_) => "true or false",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a section",
    }
}

/// Puts a message of serde about a type or value into the words of the configuration.
fn in_words(message: &str) -> String {
    let (kind, rest) = message.split_once(": ").unwrap_or_default();
    let Some((found, expected)) = rest.rsplit_once(", expected ") else {
        return message.to_owned();
    };
    let (class, value) = found.split_once(' ').unwrap_or((found, ""));
    let value = value.trim_start_matches("point ").trim_matches('`');
    let found = match class {
        "string" => format!("the text {value}"),
        "integer" | "floating" => format!("the number {value}"),
        "boolean" => value.to_owned(),
        "sequence" => "a list".to_owned(),
        "map" => "a section".to_owned(),
        _ => found.to_owned(),
    };
    let expected = match expected {
        "a string" => "a text",
        "a boolean" => "true or false",
        "a sequence" => "a list",
        "a map" => "a section",
        "u8" | "u16" | "u32" | "u64" | "usize" | "i64" => "a number",
        other => other,
    };
    match kind {
        "invalid value" => format!("{found} is out of range"),
        _ => format!("{found} where {expected} is expected"),
    }
}

/// Converts a message of a library to one line.
pub(super) fn one_line(message: &str) -> String {
    let words: Vec<&str> = message.split_whitespace().collect();
    words.join(" ")
}

/// Whether two words differ by one letter too many, too few, wrong or swapped, or by case and `-`
/// only.
fn alike(known: &str, written: &str) -> bool {
    let written = written.to_lowercase().replace('-', "_");
    let (a, b) = (known.as_bytes(), written.as_bytes());
    if a.len().abs_diff(b.len()) > 1 {
        return false;
    }
    let head = a.iter().zip(b).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[head..], &b[head..]);
    let tail = a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
    let (a, b) = (&a[..a.len() - tail], &b[..b.len() - tail]);
    a.len() <= 1 && b.len() <= 1 || a.len() == 2 && b.len() == 2 && a[0] == b[1] && a[1] == b[0]
}

impl<'de> Deserialize<'de> for Auto {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct AsAuto;
        impl Visitor<'_> for AsAuto {
            type Value = Auto;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a number or \"auto\"")
            }

            fn visit_i64<E: Error>(self, value: i64) -> Result<Auto, E> {
                u32::try_from(value)
                    .map(Auto::Number)
                    .map_err(|_| E::custom(format_args!("{value} is out of range")))
            }

            fn visit_u64<E: Error>(self, value: u64) -> Result<Auto, E> {
                self.visit_i64(i64::try_from(value).unwrap_or(i64::MAX))
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<Auto, E> {
                if value == "auto" {
                    return Ok(Auto::Auto);
                }
                Err(E::custom(format_args!("{value:?} is neither a number nor \"auto\"")))
            }
        }
        from.deserialize_any(AsAuto)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::table_reader::*;

    #[test]
    fn misspelled_keys_are_recognised() {
        for written in ["block_size", "block-size", "Block_Size", "blok_size", "block_siez"] {
            assert!(alike("block_size", written), "{written}");
        }
        for written in ["size", "blocks", "block_count", ""] {
            assert!(!alike("block_size", written), "{written}");
        }
        assert!(alike("nsid", "nsdi") && alike("nsid", "nsidd") && !alike("nsid", "nguid"));
    }

    #[test]
    fn type_errors_are_reported_in_plain_words() {
        for (message, words) in [
            (
                "invalid type: string \"a, b\", expected u32",
                "the text \"a, b\" where a number is expected",
            ),
            (
                "invalid type: floating point `1.5`, expected a string",
                "the number 1.5 where a text is expected",
            ),
            (
                "invalid type: sequence, expected a boolean",
                "a list where true or false is expected",
            ),
            ("invalid value: integer `-1`, expected u16", "the number -1 is out of range"),
            ("7 is neither a number nor \"auto\"", "7 is neither a number nor \"auto\""),
        ] {
            assert_eq!(in_words(message), words);
        }
    }

    #[test]
    fn error_positions_count_lines_and_characters_from_one() {
        let mut sources = ConfigFiles::from("a\nüb\n");
        let report = Diagnostics::new(&sources);
        assert_eq!(report.place(0), (0, (1, 1)));
        assert_eq!(report.place(2), (0, (2, 1)));
        assert_eq!(report.place(4), (0, (2, 2)));
        assert_eq!(report.place(99), (0, (3, 1)));
        let file = Some("/c.toml".into());
        sources.more.push(Source { file, text: "\nx".to_owned() });
        let report = Diagnostics::new(&sources);
        assert_eq!(report.place(6), (0, (3, 1)));
        assert_eq!(report.place(7), (1, (1, 1)));
        assert_eq!(report.place(8), (1, (2, 1)));
        assert_eq!(report.shown(&(8..9), &(7..8)), "line 2");
        assert_eq!(report.shown(&(8..9), &(0..1)), "/c.toml:2:1");
    }
}
