//! The effective configuration: the files, and the changes applied at run time.
//!
//! ```text
//! nvmfd.toml, conf.d ──(unsaved changes, in order)──► texts ──(rules)──► served configuration
//! ```
//!
//! A change is an edit of the text. So there is one set of rules and errors, comments are
//! preserved, and `nvmfctl save` only has to write the text. Changes are persisted in the state
//! directory before they are acknowledged.

mod change_log;
mod compact;
pub mod diff;
mod edit;
mod listener_refs;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use crate::api::{Change, Changes, SetAside, UnsavedChange};
use crate::config::{Config, ConfigErrors, ConfigFiles, Diagnostic, Origins, Source, digest};
use crate::state::shared_config::{PreparedCopy, SharedConfig};
use change_log::{ChangeLog, PreparedChangeLog};
use listener_refs::ListenerMap;
use tracing::error;

pub use edit::{EditError, edit};

/// Maximum of earlier configurations that a replacement knows of.
const REPLACED_MAX: usize = 64;

/// The longest text of a configuration, in bytes.
pub(crate) const MOST_TEXT_BYTES: usize = 512 << 10;

/// The texts in use, and their origins.
#[derive(Clone, Debug)]
pub struct EffectiveConfig {
    file: PathBuf,
    /// Texts of the files.
    read: ConfigFiles,
    /// Texts of the files with all changes.
    sources: ConfigFiles,
    /// Origins of their lines.
    origins: Origins,
    config: Config,
    changes: Changes,
    state_directory: Option<OsString>,
    /// The state directory in force, which has the changes: a reload may find another one.
    kept_in: Option<PathBuf>,
    /// The shared configuration, if it is used.
    shared: Option<SharedConfig>,
    /// Why the copy of the shared configuration cannot be used.
    damaged_copy: Option<String>,
}

impl EffectiveConfig {
    /// Reads the file, and the unsaved changes.
    ///
    /// # Errors
    /// Every error of the file; or the changes cannot be read.
    pub fn load(file: &Path) -> Result<EffectiveConfig, ConfigErrors> {
        EffectiveConfig::load_with(file, std::env::var_os("STATE_DIRECTORY"))
    }

    /// Loads the files without the unsaved changes.
    pub(crate) fn without_changes(
        file: &Path,
        given: Option<OsString>,
    ) -> Result<EffectiveConfig, ConfigErrors> {
        EffectiveConfig::read(file, given, None)
    }

    /// Whether this user may not read the changes.
    pub(crate) fn are_changes_denied(&self) -> bool {
        self.journal().is_denied()
    }

    /// As [`EffectiveConfig::load`], with the state directory of the service manager.
    ///
    /// # Errors
    /// As [`EffectiveConfig::load`].
    pub fn load_with(
        file: &Path,
        given: Option<OsString>,
    ) -> Result<EffectiveConfig, ConfigErrors> {
        let mut declared = EffectiveConfig::read(file, given, None)?;
        let found = declared.journal().read().map_err(|error| {
            let remedy = match declared.are_changes_denied() {
                true => "give it to the user of the daemon (chown): no other file has them",
                false => "move that file away to start with the configuration file alone",
            };
            mistake(format!("the changes that were made before cannot be read: {error}"), remedy)
        })?;
        declared.replay(found);
        Ok(declared)
    }

    /// Reads the file and the changes again.
    ///
    /// # Errors
    /// As [`EffectiveConfig::load`]; or the files name another `state_directory` now.
    pub(crate) fn reread(&self) -> Result<EffectiveConfig, ConfigErrors> {
        let next = EffectiveConfig::load_with(&self.file, self.state_directory.clone())?;
        if next.config.state_directory != self.config.state_directory {
            return Err(mistake(
                "`state_directory` has changed while the files were read".to_owned(),
                "start again",
            ));
        }
        Ok(next)
    }

    /// Loads the files without the unsaved changes, and with this shared configuration or the copy
    /// of it.
    fn read(
        file: &Path,
        given: Option<OsString>,
        shared: Option<SharedConfig>,
    ) -> Result<EffectiveConfig, ConfigErrors> {
        let mut sources = ConfigFiles::read(file)?;
        let mut config = Config::of(&sources)?.or_state_directory(given.clone());
        let mut damaged_copy = None;
        let shared = config.group.as_ref().filter(|group| group.shared).map(|group| {
            let directory = config.state_directory.as_deref();
            let copy = || {
                SharedConfig::load_copy(directory).unwrap_or_else(|why| {
                    damaged_copy = Some(why);
                    SharedConfig::none()
                })
            };
            (group.shared_place(), shared.unwrap_or_else(copy))
        });
        let shared = match shared {
            Some((place, shared)) => {
                sources.shared = Some(Source { file: Some(place), text: shared.text.clone() });
                config = Config::of(&sources)?.or_state_directory(given.clone());
                Some(shared)
            }
            None => None,
        };
        let changes = Changes::default();
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let (read, origins) = (sources.clone(), Origins::of(&sources));
        let kept_in = config.state_directory.clone();
        Ok(EffectiveConfig {
            file,
            read,
            sources,
            origins,
            config,
            changes,
            state_directory: given,
            kept_in,
            shared,
            damaged_copy,
        })
    }

    /// Reads the files again, with the unsaved changes of `self`.
    ///
    /// # Errors
    /// Every error of the file.
    pub fn reload(&self) -> Result<EffectiveConfig, ConfigErrors> {
        let (given, shared) = (self.state_directory.clone(), self.shared.clone());
        let mut next = EffectiveConfig::read(&self.file, given, shared)?;
        if next.shared.is_some() != self.shared.is_some() {
            return Err(mistake(
                "`shared` of [group] has changed".to_owned(),
                "restart the daemon: a reload would remove or replace all subsystems",
            ));
        }
        // Another daemon may have the other one.
        next.kept_in.clone_from(&self.kept_in);
        next.replay(self.changes.clone());
        Ok(next)
    }

    /// The configuration file.
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// The resulting configuration.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Warnings about valid settings, one sentence each.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = self.read.warnings();
        warnings.extend(self.config.warnings());
        warnings.extend(self.damaged_copy.clone());
        if let Some(directory) = self.kept_in.as_ref().filter(|_| !self.changes.kept.is_empty())
            && self.kept_in != self.config.state_directory
        {
            warnings.push(format!(
                "unsaved changes are in {}, where a restart with another `state_directory` does \
                 not find them: `nvmfctl save`",
                directory.display()
            ));
        }
        warnings
    }

    /// The shared configuration of the gateway group, if it is used.
    pub fn shared(&self) -> Option<&SharedConfig> {
        self.shared.as_ref()
    }

    /// With another version of the shared configuration.
    ///
    /// # Errors
    /// All errors of the result.
    pub(crate) fn with_shared(&self, shared: SharedConfig) -> Result<EffectiveConfig, EditError> {
        let mut next = self.clone();
        if let Some(source) = &mut next.sources.shared {
            source.text.clone_from(&shared.text);
            next.origins.renew(source);
        }
        next.read.shared.clone_from(&next.sources.shared);
        next.shared = Some(shared);
        next.config = next.parse(&next.sources, &next.origins)?;
        Ok(next)
    }

    /// The text of the shared configuration after a change, if that is another.
    pub(crate) fn next_shared(&self, changed: &EffectiveConfig) -> Option<String> {
        let text = &changed.sources.shared.as_ref()?.text;
        let present = self.shared.as_ref()?;
        (present.text != *text).then(|| text.clone())
    }

    /// Writes the copy of the shared configuration beside the present one, which may fail for lack
    /// of space or permission.
    pub(crate) fn prepare_copy(&self, shared: &SharedConfig) -> Result<PreparedCopy, String> {
        shared.prepare_copy(self.kept_in.as_deref())
    }

    /// Unsaved changes.
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Digest of all texts, with the changes.
    pub(crate) fn digest(&self) -> String {
        digest_with_shared(&self.sources)
    }

    /// Whether changes survive a restart.
    pub fn keeps(&self) -> bool {
        self.kept_in.is_some()
    }

    /// Adds changes, in order; nothing is written yet. `origin`: seconds since 1970, and the user.
    ///
    /// # Errors
    /// The first change that cannot be applied, or the errors of the result.
    pub fn with(
        &self,
        more: &[Change],
        origin: (u64, Option<u32>),
    ) -> Result<EffectiveConfig, EditError> {
        let mut next = self.clone();
        let (mut is_local, mut is_shared) = (false, false);
        for change in more {
            let sources = edit(&next.sources, change)?;
            // Also one with the same text, which may be written again.
            let shares = sources.shared != next.sources.shared
                || matches!(change, Change::ReplaceShared { .. });
            is_shared |= shares;
            is_local |= !sources.files().eq(next.sources.files());
            if is_local && is_shared {
                let what = "this changes the shared configuration and this gateway's own: make \
                            the changes separately";
                return Err(EditError::Wrong(what.to_owned()));
            }
            // The files say so already: later edits of them are not to be overridden by that.
            if sources == next.sources && sources == self.read && !replaces(change) {
                continue;
            }
            if shares {
                next.origins = after(&next.origins, &next.sources, &sources, change);
                next.read.shared.clone_from(&sources.shared);
                next.sources = sources;
                continue;
            }
            let (listener, offered_at) = listener_refs::meant(&next.sources, change);
            let kept = UnsavedChange {
                at_unix_s: origin.0,
                uid: origin.1,
                change: change.clone(),
                listener,
                offered_at,
                base: base(&self.read, change),
                after: digest_all(&sources),
                replaced: if replaces(change) { next.changes.digests() } else { Vec::new() },
            };
            if self.replaces_all(change, &next.sources) {
                next.changes.kept.clear();
            }
            next.changes.kept.push(kept);
            next.origins = after(&next.origins, &next.sources, &sources, change);
            next.sources = sources;
            // The result equals the files.
            if replaces(change) && next.sources == self.read {
                next.changes.kept.clear();
                next.origins = Origins::of(&self.read);
            }
        }
        next.config = match more.iter().any(replaces) {
            true => next.parse(&next.sources, &next.origins.known_to_giver())?,
            false => next.parse(&next.sources, &next.origins)?,
        };
        if next.config.state_directory != self.config.state_directory {
            let what = "`state_directory` cannot be changed while the daemon serves";
            return Err(EditError::Wrong(format!("{what}: write it into the file, and restart")));
        }
        if next.config.include != self.config.include {
            let what = "`include` names files to read, which is done at a reload";
            return Err(EditError::Wrong(format!("{what}: write it into the file, and reload")));
        }
        let is_shared = |config: &Config| config.group.as_ref().is_some_and(|group| group.shared);
        if is_shared(&next.config) != is_shared(&self.config) {
            let what = "`shared` of [group] cannot be changed while the daemon serves";
            return Err(EditError::Wrong(format!("{what}: write it into the file, and restart")));
        }
        next.shorten();
        Ok(next)
    }

    /// Leaves out changes that later ones have undone or replaced, if all of them are too long, and
    /// if a restart finds the same configuration without them.
    fn shorten(&mut self) {
        if !self.journal().is_too_long(&self.changes) {
            return;
        }
        let (origins, read) = (Origins::of(&self.read), self.read.clone());
        let Ok(config) = self.parse(&read, &origins) else { return };
        let Changes { kept, set_aside } = self.changes.clone();
        let kept = compact::compacted(&digest_all(&read), kept);
        let mut next = EffectiveConfig {
            sources: read,
            origins,
            config,
            changes: Changes::default(),
            ..self.clone()
        };
        next.replay(Changes { kept, set_aside });
        let is_same = next.config == self.config
            && next.changes.set_aside == self.changes.set_aside
            && !next.journal().is_too_long(&next.changes);
        if is_same {
            *self = next;
        }
    }

    /// Drops the changes that no longer apply.
    #[must_use]
    pub(crate) fn without_set_aside(&self) -> EffectiveConfig {
        let mut next = self.clone();
        next.changes.set_aside.clear();
        next
    }

    /// Persists the changes, if there is a state directory.
    ///
    /// # Errors
    /// The I/O error, or that the changes are too long. The previous changes remain persisted then.
    pub fn keep(&self) -> Result<(), String> {
        self.journal().prepare(&self.changes)?.persist()
    }

    /// Writes the changes beside the persisted ones, which may fail for lack of space or permission.
    ///
    /// # Errors
    /// The I/O error, or that the changes are too long.
    pub fn prepare(&self) -> Result<PreparedChanges, String> {
        self.journal().prepare(&self.changes).map(PreparedChanges)
    }

    fn journal(&self) -> ChangeLog<'_> {
        ChangeLog::new(self.kept_in.as_deref())
    }

    fn parse(&self, sources: &ConfigFiles, origins: &Origins) -> Result<Config, EditError> {
        let config = Config::of_edited(sources, origins);
        let config = config.map_err(|errors| EditError::mistakes(&errors))?;
        Ok(config.or_state_directory(self.state_directory.clone()))
    }

    /// Applies the changes again that the files do not contain. One of several changes made
    /// together may be invalid alone: then it is applied together with the next ones.
    fn replay(&mut self, found: Changes) {
        self.changes.set_aside = found.set_aside;
        let mut left: Vec<UnsavedChange> = unsaved(&digest_all(&self.read), found.kept).collect();
        while let Some(first) = left.first() {
            let at_once =
                |kept: &&UnsavedChange| (kept.at_unix_s, kept.uid) == (first.at_unix_s, first.uid);
            let most = left.iter().take_while(at_once).count();
            let together = || (2..=most).find_map(|count| self.again(&left[..count]).ok());
            let redone = self.again(&left[..1]).or_else(|misfit| together().ok_or(misfit));
            match redone {
                Ok(Redone { config, sources, origins, kept }) => {
                    left.drain(..kept.len());
                    // Changes that the files contain are dropped.
                    if sources != self.sources {
                        (self.config, self.sources) = (config, sources);
                        self.origins = origins;
                        self.changes.kept.extend(kept);
                    }
                }
                Err(misfit) => {
                    let (kept, why) = (left.remove(0), misfit.to_string());
                    self.changes.set_aside.push(SetAside { kept, why });
                }
            }
        }
    }

    /// Whether a change replaces all earlier ones: they have changed no file that it does not replace.
    fn replaces_all(&self, change: &Change, before: &ConfigFiles) -> bool {
        let Change::Replace { text, files } = change else { return false };
        (text.is_some() || before.main == self.read.main)
            && (files.is_some() || before.more == self.read.more)
    }

    /// Applies these changes again, one after the other.
    fn again(&self, run: &[UnsavedChange]) -> Result<Redone, EditError> {
        let (mut sources, mut origins) = (self.sources.clone(), self.origins.clone());
        let mut run = run.to_vec();
        let mut found = ListenerMap::default();
        for kept in &mut run {
            let next = edit::again(&sources, kept, &mut found)?;
            origins = after(&origins, &sources, &next, &kept.change);
            sources = next;
            kept.after = digest_all(&sources);
        }
        let config = self.parse(&sources, &origins)?;
        let wrong = |what: &str| Err(EditError::Wrong(what.to_owned()));
        if sources == self.sources {
            // No other change may depend on it.
        } else if run.iter().any(|kept| is_outdated(&self.read, kept)) {
            return wrong(OUTDATED);
        } else if sources.shared != self.sources.shared {
            return wrong("it is about the shared configuration of the gateway group");
        } else if config.state_directory != self.config.state_directory {
            return wrong("it names another `state_directory`");
        } else if config.include != self.config.include {
            return wrong("it names another directory as `include`");
        }
        Ok(Redone { config, sources, origins, kept: run })
    }
}

/// Result of applying changes again.
struct Redone {
    config: Config,
    sources: ConfigFiles,
    origins: Origins,
    kept: Vec<UnsavedChange>,
}

/// Why a replacement of files is not applied again.
const OUTDATED: &str = "the replaced object was changed afterwards";

/// Whether the texts that a change replaces were edited since.
fn is_outdated(read: &ConfigFiles, kept: &UnsavedChange) -> bool {
    matches!(kept.change, Change::Replace { .. })
        && kept.base != base(read, &kept.change)
        && !kept.replaced.contains(&digest_all(read))
}

/// Returns the digest of the texts that a change replaces.
fn base(read: &ConfigFiles, change: &Change) -> String {
    match change {
        Change::Replace { text, files: Some(_) } => {
            let mut replaced = read.clone();
            if text.is_none() {
                replaced.main.text.clear();
            }
            digest_all(&replaced)
        }
        _ => digest(&read.main.text),
    }
}

impl Changes {
    /// Digests of the configurations after the last changes.
    fn digests(&self) -> Vec<String> {
        let all =
            |kept: &UnsavedChange| [kept.after.clone()].into_iter().chain(kept.replaced.clone());
        self.kept.iter().rev().flat_map(all).take(REPLACED_MAX).collect()
    }
}

fn replaces(change: &Change) -> bool {
    matches!(change, Change::Replace { .. } | Change::ReplaceShared { .. })
}

/// Returns the origins of the lines after a change.
fn after(origins: &Origins, old: &ConfigFiles, new: &ConfigFiles, change: &Change) -> Origins {
    origins.after(old, new, &change.to_string(), replaces(change))
}

/// Changes that are ready to be persisted.
#[derive(Debug)]
#[must_use]
pub struct PreparedChanges(PreparedChangeLog);

impl PreparedChanges {
    /// Persists them in place of those of `before`.
    ///
    /// # Errors
    /// The I/O error; the changes of `before` are persisted again. If that fails as well, the
    /// sentence says so: a restart may find either.
    pub fn persist(self, before: &EffectiveConfig) -> Result<(), String> {
        let Err(mut sentence) = self.0.persist() else { return Ok(()) };
        // The rename may have happened: a rejected change must not take effect at a restart.
        if let Err(worse) = before.keep() {
            error!("a rejected change may take effect after a restart: {worse}");
            sentence += "; it may take effect after a restart";
        }
        Err(sentence)
    }
}

/// Returns the texts of configuration files with all changes.
///
/// # Errors
/// The first change that cannot be applied, or that replaces a text which was edited since; or the
/// errors of the result.
pub fn merged(sources: &ConfigFiles, changes: &Changes) -> Result<ConfigFiles, EditError> {
    let (mut merged, mut origins) = (sources.clone(), Origins::of(sources));
    let mut found = ListenerMap::default();
    for mut kept in unsaved(&digest_all(sources), changes.kept.clone()) {
        let next = edit::again(&merged, &mut kept, &mut found)?;
        if next != merged && is_outdated(sources, &kept) {
            return Err(EditError::Wrong(OUTDATED.to_owned()));
        }
        origins = after(&origins, &merged, &next, &kept.change);
        merged = next;
    }
    Config::of_edited(&merged, &origins).map_err(|errors| EditError::mistakes(&errors))?;
    Ok(merged)
}

/// Returns the changes that the files do not contain: after a save of all changes up to one, the
/// files have the text after that one.
fn unsaved(read: &str, kept: Vec<UnsavedChange>) -> impl Iterator<Item = UnsavedChange> + use<> {
    let held = kept.iter().rposition(|kept| kept.after == read);
    kept.into_iter().skip(held.map_or(0, |at| at + 1))
}

/// Digest of several files with their names; of a single file as by `digest`.
pub fn digest_all(sources: &ConfigFiles) -> String {
    if sources.more.is_empty() {
        return digest(&sources.main.text);
    }
    let mut all = digest(&sources.main.text);
    for source in &sources.more {
        let name = source.file.as_deref().and_then(Path::file_name).unwrap_or_default();
        all = format!("{all} {name:?} {}", digest(&source.text));
    }
    digest(&all)
}

/// As [`digest_all`], with the shared configuration of a gateway group: the entity tag of the
/// configuration in force.
pub fn digest_with_shared(sources: &ConfigFiles) -> String {
    let files = digest_all(sources);
    match &sources.shared {
        Some(shared) => digest(&format!("{files} {}", digest(&shared.text))),
        None => files,
    }
}

fn mistake(what: String, remedy: &str) -> ConfigErrors {
    let mistake = Diagnostic { file: None, place: None, what, remedy: remedy.to_owned() };
    ConfigErrors { file: None, mistakes: vec![mistake] }
}

#[cfg(test)]
mod tests;
