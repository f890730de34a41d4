//! What the operator has declared: the configuration file, and the changes that were made since
//! while the daemon served.
//!
//! ```text
//! nvmfd.toml ──(kept changes, one after the other)──► a text ──(the rules)──► what is served
//! ```
//!
//! A change is an edit of the text. So there is one set of rules and of mistakes, comments survive,
//! and `nvmfctl save` only has to write the text. Changes are kept in a file of the state directory
//! before they are acknowledged.

pub mod difference;
mod edit;
mod journal;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use uuid::Uuid;

use crate::api::{Change, Changes, Kept, SetAside};
use crate::config::{Config, ConfigErrors, Mistake};
use journal::Journal;

pub use edit::{Misfit, edit};

/// The longest text of a configuration that is taken, in bytes.
pub const MOST_TEXT_BYTES: usize = 512 << 10;

/// Digests of texts are names under this one.
const DIGEST_SPACE: Uuid = Uuid::from_u128(0x6e0f_5f0c_7c0b_4f5e_8a61_6b65_7074_6368);

/// A text that is in force, and where it comes from.
#[derive(Clone, Debug)]
pub struct Declared {
    file: PathBuf,
    /// The digest of what the file says.
    base: String,
    /// The file with all kept changes.
    text: String,
    config: Config,
    changes: Changes,
    state_directory: Option<OsString>,
}

impl Declared {
    /// Reads the file, and the changes that were made since.
    ///
    /// # Errors
    /// Every mistake of the file; or the changes cannot be read.
    pub fn load(file: &Path) -> Result<Declared, ConfigErrors> {
        Declared::load_with(file, std::env::var_os("STATE_DIRECTORY"))
    }

    fn load_with(file: &Path, given: Option<OsString>) -> Result<Declared, ConfigErrors> {
        let mut declared = Declared::read(file, given)?;
        let found = declared.journal().read().map_err(|error| {
            mistake(
                format!("the changes that were made before cannot be read: {error}"),
                "move that file away to start with the configuration file alone",
            )
        })?;
        declared.replay(found);
        Ok(declared)
    }

    /// What the file alone says.
    fn read(file: &Path, given: Option<OsString>) -> Result<Declared, ConfigErrors> {
        let named = |mut errors: ConfigErrors| {
            errors.file = Some(file.to_owned());
            errors
        };
        let text = fs::read_to_string(file).map_err(|error| {
            named(mistake(
                format!("the configuration cannot be read: {error}"),
                "name a TOML file that this user may read",
            ))
        })?;
        let config = Config::parse(&text).map_err(named)?.or_state_directory(given.clone());
        let changes = Changes::default();
        let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let base = digest(&text);
        Ok(Declared { file, base, text, config, changes, state_directory: given })
    }

    /// The same file as it is now, with the changes that were made since.
    ///
    /// # Errors
    /// Every mistake of the file.
    pub fn reload(&self) -> Result<Declared, ConfigErrors> {
        let mut next = Declared::read(&self.file, self.state_directory.clone())?;
        next.replay(self.changes.clone());
        Ok(next)
    }

    /// The configuration file.
    #[must_use]
    pub fn file(&self) -> &Path {
        &self.file
    }

    /// What it comes to.
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What differs from the file.
    #[must_use]
    pub fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Whether changes outlast the daemon.
    #[must_use]
    pub fn keeps(&self) -> bool {
        self.config.state_directory.is_some()
    }

    /// The same with more changes, in order; nothing is written yet. `origin`: when, in seconds
    /// since 1970, and who.
    ///
    /// # Errors
    /// The first change that does not fit, or what is wrong with what comes out.
    pub fn with(&self, more: &[Change], origin: (u64, Option<u32>)) -> Result<Declared, Misfit> {
        let mut next = self.clone();
        for change in more {
            let text = edit(&next.text, change)?;
            let kept = Kept {
                at_unix_s: origin.0,
                uid: origin.1,
                change: change.clone(),
                base: self.base.clone(),
                after: digest(&text),
            };
            // What came before is replaced with everything else.
            if matches!(change, Change::Replace { .. }) {
                next.changes.kept.clear();
            }
            next.changes.kept.push(kept);
            next.text = text;
        }
        next.config = next.parse(&next.text)?;
        if next.config.state_directory != self.config.state_directory {
            let what = "`state_directory` cannot be changed while the daemon serves";
            return Err(Misfit::Wrong(format!("{what}: write it into the file, and restart")));
        }
        Ok(next)
    }

    /// The same, without the changes that do not fit any more.
    #[must_use]
    pub fn without_set_aside(&self) -> Declared {
        let mut next = self.clone();
        next.changes.set_aside.clear();
        next
    }

    /// Has the changes outlast a power loss, where there is a state directory.
    ///
    /// # Errors
    /// What the system says, or that there is no room. What was kept before, is.
    pub fn keep(&self) -> Result<(), String> {
        self.journal().write(&self.changes)
    }

    fn journal(&self) -> Journal<'_> {
        Journal::new(self.config.state_directory.as_deref())
    }

    fn parse(&self, text: &str) -> Result<Config, Misfit> {
        let config = Config::parse(text).map_err(|errors| Misfit::mistakes(&errors))?;
        Ok(config.or_state_directory(self.state_directory.clone()))
    }

    /// Makes the changes again that the file does not have yet.
    fn replay(&mut self, found: Changes) {
        self.changes.set_aside = found.set_aside;
        for mut kept in unsaved(&self.base, found.kept) {
            let redone = edit::again(&self.text, &kept.change);
            let redone = redone.and_then(|text| Ok((self.parse(&text)?, text)));
            let is_old = matches!(kept.change, Change::Replace { .. }) && kept.base != self.base;
            match redone {
                // The file has it.
                Ok((_, text)) if text == self.text => {}
                Ok(_) if is_old => {
                    let why = "the configuration file was changed after that".to_owned();
                    self.set_aside(kept, why);
                }
                Ok((config, text)) if config.state_directory == self.config.state_directory => {
                    kept.after = digest(&text);
                    (self.config, self.text) = (config, text);
                    self.changes.kept.push(kept);
                }
                Ok(_) => self.set_aside(kept, "it names another `state_directory`".to_owned()),
                Err(misfit) => self.set_aside(kept, misfit.to_string()),
            }
        }
    }

    fn set_aside(&mut self, kept: Kept, why: String) {
        self.changes.set_aside.push(SetAside { kept, why });
    }
}

/// The text of a configuration file with all kept changes.
///
/// # Errors
/// The first change that does not fit, or what is wrong with what comes out.
pub fn merged(text: &str, changes: &Changes) -> Result<String, Misfit> {
    let mut merged = text.to_owned();
    for kept in unsaved(&digest(text), changes.kept.clone()) {
        merged = edit::again(&merged, &kept.change)?;
    }
    Config::parse(&merged).map_err(|errors| Misfit::mistakes(&errors))?;
    Ok(merged)
}

/// The changes that a file does not have: it is what it was after one of them when somebody has
/// saved it.
fn unsaved(base: &str, kept: Vec<Kept>) -> impl Iterator<Item = Kept> + use<> {
    let held = kept.iter().rposition(|kept| kept.after == base);
    kept.into_iter().skip(held.map_or(0, |at| at + 1))
}

/// What a text is known by.
fn digest(text: &str) -> String {
    Uuid::new_v5(&DIGEST_SPACE, text.as_bytes()).to_string()
}

fn mistake(what: String, remedy: &str) -> ConfigErrors {
    let mistake = Mistake { place: None, what, remedy: remedy.to_owned() };
    ConfigErrors { file: None, mistakes: vec![mistake] }
}

#[cfg(test)]
mod tests;
