//! Source files of a configuration: the main file, and the files of the directory beside it.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::ops::Range;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::save::{UnfinishedSave, parent};
use super::table_reader::{Diagnostics, one_line};
use super::{ConfigErrors, Diagnostic, renamed_keys};

/// Default name of the directory of more files, beside the configuration file.
const INCLUDE: &str = "conf.d";

/// What the shared configuration of a gateway group has.
const SHARED: [&str; 2] = ["subsystem", "qos"];

/// Maximum number of readings while files change.
const MOST_READINGS: u32 = 8;

/// A text, and its file.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Source {
    /// Path; `None` for a text without a file.
    pub file: Option<PathBuf>,
    /// TOML.
    pub text: String,
}

/// The texts of one configuration, which are merged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ConfigFiles {
    /// The configuration file. New sections are written here.
    pub main: Source,
    /// The files of the directory that it includes, by the order of their names.
    pub more: Vec<Source>,
    /// That directory; it may be missing unless the file names it. `None` for texts without files.
    pub directory: Option<PathBuf>,
    /// The record of an interrupted save, if there is one. The texts are the saved ones.
    pub unfinished: Option<PathBuf>,
    /// The shared configuration of the gateway group, if the daemon uses it.
    pub shared: Option<Source>,
}

/// A file with a new text.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rewritten<'s> {
    /// Path, as the configuration has it.
    pub file: &'s Path,
    /// The old text; `None`: the file does not exist.
    pub old: Option<&'s str>,
    /// The new text; `None`: the file is to be removed.
    pub new: Option<&'s str>,
}

/// A single text.
impl From<&str> for ConfigFiles {
    fn from(text: &str) -> ConfigFiles {
        let main = Source { file: None, text: text.to_owned() };
        ConfigFiles { main, more: Vec::new(), directory: None, unfinished: None, shared: None }
    }
}

impl ConfigFiles {
    /// Reads a file, and those whose names end in `.toml` in the directory that it names as
    /// `include`, else in `conf.d` beside it, if there is one. Hidden files are ignored.
    ///
    /// During a save the result is either all old or all new texts.
    ///
    /// # Errors
    /// A file or the directory cannot be read.
    pub fn read(file: &Path) -> Result<ConfigFiles, ConfigErrors> {
        settled(|| {
            let remedy = "name a TOML file that this user may read";
            let begun = begun(file)?;
            let text = fs::read_to_string(file).map_err(|error| unread(file, &error, remedy))?;
            let text = said(begun.as_ref(), file, Some(text)).unwrap_or_default();
            ConfigFiles::once(Source { file: Some(file.to_owned()), text }, begun)
        })
    }

    /// As [`ConfigFiles::read`], for a text that replaces the file whose name it has.
    ///
    /// # Errors
    /// A file of the directory, or the directory, cannot be read.
    pub fn around(main: Source) -> Result<ConfigFiles, ConfigErrors> {
        settled(|| {
            let begun = main.file.as_deref().map(begun).transpose()?.flatten();
            ConfigFiles::once(main.clone(), begun)
        })
    }

    fn once(main: Source, begun: Option<UnfinishedSave>) -> Result<ConfigFiles, ConfigErrors> {
        let mut more = Vec::new();
        let directory = directory(&main)?;
        let is_there = |directory: &&PathBuf| included(&main.text).is_some() || directory.is_dir();
        if let Some(directory) = directory.as_ref().filter(is_there) {
            let mut files =
                listed(directory).map_err(|error| unread(directory, &error, INCLUDE_REMEDY))?;
            files.extend(begun.iter().flat_map(|begun| begun.of_directory(directory)));
            files.sort();
            files.dedup();
            for file in files {
                let remedy = "let the user of the daemon read it, or take it away";
                let text = match fs::read_to_string(&file) {
                    Ok(text) => Some(text),
                    // It may be a file that an interrupted save has yet to create.
                    Err(error) if error.kind() == ErrorKind::NotFound && begun.is_some() => None,
                    Err(error) => return Err(unread(&file, &error, remedy)),
                };
                if let Some(text) = said(begun.as_ref(), &file, text) {
                    more.push(Source { file: Some(file), text });
                }
            }
        }
        let unfinished = begun.map(|begun| begun.record);
        Ok(ConfigFiles { main, more, directory, unfinished, shared: None })
    }

    /// Reads the files of a directory as if it were included.
    ///
    /// # Errors
    /// A file of the directory, or the directory, cannot be read.
    pub fn of_directory(directory: &Path) -> Result<Vec<Source>, ConfigErrors> {
        let mut files =
            listed(directory).map_err(|error| unread(directory, &error, INCLUDE_REMEDY))?;
        files.sort();
        let read = |file: PathBuf| {
            let remedy = "name a directory of TOML files that this user may read";
            let text = fs::read_to_string(&file).map_err(|error| unread(&file, &error, remedy))?;
            Ok(Source { file: Some(file), text })
        };
        files.into_iter().map(read).collect()
    }

    /// Returns the files to write so that they contain `new`, by name.
    pub fn rewritten<'s>(&'s self, new: &'s ConfigFiles) -> Vec<Rewritten<'s>> {
        let text = |of: &'s ConfigFiles, file: &Path| {
            let found = of.files().find(|source| source.file.as_deref() == Some(file));
            found.map(|source| source.text.as_str())
        };
        let files: BTreeSet<&Path> =
            self.files().chain(new.files()).filter_map(|source| source.file.as_deref()).collect();
        let each = |file| Rewritten { file, old: text(self, file), new: text(new, file) };
        files.into_iter().map(each).filter(|each| each.old != each.new).collect()
    }

    /// The texts of files, the main one first.
    pub fn files(&self) -> impl Iterator<Item = &Source> {
        std::iter::once(&self.main).chain(&self.more)
    }

    /// All texts, the main one first and the shared one last.
    pub fn iter(&self) -> impl Iterator<Item = &Source> {
        self.files().chain(&self.shared)
    }

    /// As [`ConfigFiles::iter`].
    pub fn iter_mut(&mut self) -> impl Iterator<Item = &mut Source> {
        std::iter::once(&mut self.main).chain(&mut self.more).chain(&mut self.shared)
    }

    /// Warnings, a sentence each: files that are writable for all users, and earlier names of keys.
    pub fn warnings(&self) -> Vec<String> {
        let unfinished = self.unfinished.iter().map(|record| {
            let shown = record.display();
            format!("{shown} is of a save that was interrupted: `nvmfctl save` finishes it")
        });
        let directory = self.more.first().and_then(|first| first.file.as_deref()?.parent());
        let files = self.files().filter_map(|source| source.file.as_deref()).chain(directory);
        let everybody = |file: &&Path| {
            fs::metadata(file).is_ok_and(|found| found.permissions().mode() & 0o002 != 0)
        };
        let warning = |file: &Path| {
            let shown = file.display();
            format!(
                "{shown} is writable for all users, who can change the configuration: chmod o-w"
            )
        };
        let renamed = self.iter().flat_map(|Source { file, text }| {
            let place = file.as_ref().map_or_else(String::new, |at| format!("{}: ", at.display()));
            let shown = move |warning| format!("{place}{warning}");
            renamed_keys::warnings(text).into_iter().map(shown)
        });
        unfinished.chain(files.filter(everybody).map(warning)).chain(renamed).collect()
    }
}

/// Reads the files until two consecutive readings are equal. If the files keep changing, returns
/// the last one.
fn settled(
    read: impl Fn() -> Result<ConfigFiles, ConfigErrors>,
) -> Result<ConfigFiles, ConfigErrors> {
    let mut last = read();
    for _ in 0..MOST_READINGS {
        let next = read();
        if next == last {
            break;
        }
        last = next;
    }
    last
}

fn begun(file: &Path) -> Result<Option<UnfinishedSave>, ConfigErrors> {
    UnfinishedSave::beside(file).map_err(|what| {
        let what = format!("a save was interrupted, and its record is lost: {what}");
        let remedy =
            "make that file readable for the user of the daemon; or remove it, and check all files";
        let mistake = Diagnostic { file: None, place: None, what, remedy: remedy.to_owned() };
        ConfigErrors { file: None, mistakes: vec![mistake] }
    })
}

/// Returns the text of a file, also if an interrupted save has not put it in place yet.
fn said(begun: Option<&UnfinishedSave>, file: &Path, text: Option<String>) -> Option<String> {
    begun.map_or_else(|| text.clone(), |begun| begun.text(file, text.clone()))
}

const INCLUDE_REMEDY: &str = "`include` names a directory: make it, and let the user of the daemon read \
                      it; or take `include` out";

/// Returns the directory of more files, whether it exists or not.
fn directory(main: &Source) -> Result<Option<PathBuf>, ConfigErrors> {
    let Some(beside) = main.file.as_deref().map(parent) else { return Ok(None) };
    let directory = match included(&main.text) {
        Some(named) => beside.join(named),
        None => return Ok(Some(beside.join(INCLUDE))),
    };
    // The file would be read twice.
    if fs::canonicalize(&directory).ok() == fs::canonicalize(beside).ok() {
        let error = std::io::Error::new(ErrorKind::InvalidInput, "it is where the file itself is");
        return Err(unread(&directory, &error, "name a directory of its own as `include`"));
    }
    Ok(Some(directory))
}

/// The value of `include`, which is checked with everything else.
fn included(text: &str) -> Option<String> {
    let (table, _) = DeTable::parse_recoverable(text);
    let value = table.get_ref().get("include")?.get_ref().as_str()?.to_owned();
    (!value.is_empty()).then_some(value)
}

fn listed(directory: &Path) -> std::io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory)? {
        let file = entry?.path();
        let hidden = file.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"."));
        if !hidden && file.extension().is_some_and(|extension| extension == "toml") {
            files.push(file);
        }
    }
    Ok(files)
}

fn unread(file: &Path, error: &std::io::Error, remedy: &str) -> ConfigErrors {
    let what = format!("the configuration cannot be read: {error}");
    let mistake = Diagnostic { file: None, place: None, what, remedy: remedy.to_owned() };
    ConfigErrors { file: Some(file.to_owned()), mistakes: vec![mistake] }
}

/// Merges the tables of all texts. Lists of sections are concatenated; any other duplicate is an
/// error.
pub(super) fn merged<'t>(
    sources: &'t ConfigFiles,
    report: &Diagnostics<'t>,
) -> Spanned<DeTable<'t>> {
    let mut all = Vec::new();
    for (index, source) in sources.iter().enumerate() {
        let (table, errors) = DeTable::parse_recoverable(&source.text);
        let base = report.base(index);
        for error in errors {
            let span = moved(error.span().unwrap_or_default(), base);
            report.add(&span, one_line(error.message()), "this is not TOML; see https://toml.io");
        }
        let mut table = shifted(table.into_inner(), base);
        if index > 0
            && let Some((key, _)) = table.remove_entry("include")
        {
            let what = "`include` is for the configuration file alone";
            report.add(&key.span(), what, "take it out here");
        }
        if let Some(shared) = &sources.shared {
            check_shared(&table, std::ptr::eq(source, shared), report);
        }
        all.push(table);
    }
    let mut all = all.into_iter();
    let mut merged = all.next().unwrap_or_default();
    // The meaning of an invalid text is unknown: do not report errors that result from it.
    if report.is_empty() {
        all.for_each(|table| merge(&mut merged, table, report));
    }
    Spanned::new(0..sources.main.text.len(), merged)
}

/// Refuses what is in the shared configuration and differs among gateways, and what is in a file and
/// has to be in the shared configuration.
fn check_shared(table: &DeTable<'_>, is_shared: bool, report: &Diagnostics<'_>) {
    for (key, value) in table {
        let name: &str = key.get_ref().as_ref();
        match (is_shared, SHARED.contains(&name)) {
            (true, false) => {
                let what = format!("`{}` is not shared by gateways", name.escape_debug());
                let remedy = "write it into the file of each gateway: the shared configuration has \
                              [[subsystem]] and [[qos]]";
                report.add(&key.span(), what, remedy);
            }
            (false, true) => {
                let what = format!("`{name}` is part of the shared configuration of the group");
                let remedy = "take it out here, and apply it for all gateways (`nvmfctl apply`)";
                report.add(&key.span(), what, remedy);
            }
            (true, true) => {
                let tables = value.get_ref().as_array().into_iter().flatten();
                let tables = tables.filter_map(|table| table.get_ref().as_table());
                let listeners = tables.filter_map(|table| table.get_key_value("listeners"));
                for (key, _) in listeners {
                    let what = "`listeners` differ among gateways";
                    let remedy = "take it out: a shared subsystem is at all listeners";
                    report.add(&key.span(), what, remedy);
                }
            }
            (false, false) => {}
        }
    }
}

fn merge<'t>(into: &mut DeTable<'t>, from: DeTable<'t>, report: &Diagnostics<'_>) {
    for (key, value) in from {
        let name: &str = key.get_ref().as_ref();
        let Some((first, old)) = into.get_key_value(name).map(|(k, v)| (k.span(), v.get_ref()))
        else {
            into.insert(key, value);
            continue;
        };
        let sections = |value: &DeValue<'_>| {
            value.as_array().is_some_and(|all| all.iter().all(|each| each.get_ref().is_table()))
        };
        let joins = old.is_table() && value.get_ref().is_table()
            || sections(old) && sections(value.get_ref());
        if !joins {
            let first = report.shown(&first, &key.span());
            let what = format!("`{}` is said twice, first in {first}", name.escape_debug());
            report.add(&key.span(), what, "leave it in one of the files");
            continue;
        }
        match (into.get_mut(name).map(Spanned::get_mut), value.into_inner()) {
            (Some(DeValue::Table(old)), DeValue::Table(new)) => merge(old, new, report),
            (Some(DeValue::Array(old)), DeValue::Array(new)) => {
                new.into_iter().for_each(|each| old.push(each));
            }
            _ => {}
        }
    }
}

/// Returns the table with places counted from the beginning of all texts.
fn shifted(table: DeTable<'_>, by: usize) -> DeTable<'_> {
    if by == 0 {
        return table;
    }
    let moved_key = |key: Spanned<_>| Spanned::new(moved(key.span(), by), key.into_inner());
    table.into_iter().map(|(key, value)| (moved_key(key), shifted_value(value, by))).collect()
}

fn shifted_value(value: Spanned<DeValue<'_>>, by: usize) -> Spanned<DeValue<'_>> {
    let span = moved(value.span(), by);
    let value = match value.into_inner() {
        DeValue::Table(table) => DeValue::Table(shifted(table, by)),
        DeValue::Array(array) => {
            DeValue::Array(array.into_iter().map(|each| shifted_value(each, by)).collect())
        }
        plain => plain,
    };
    Spanned::new(span, value)
}

fn moved(span: Range<usize>, by: usize) -> Range<usize> {
    span.start.saturating_add(by)..span.end.saturating_add(by)
}

#[cfg(test)]
mod tests;
