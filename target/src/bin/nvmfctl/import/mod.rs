//! `nvmfctl import`: converts the saved configuration of another target to one of nvmfd.
//!
//! Pure functions: JSON text in, TOML text out, and a list of settings without a counterpart, which
//! is also at the end of the text, as comments. The result is checked by [`Config::parse`], so it
//! is valid; whether files and addresses exist can only be checked on the machine.
//!
//! Identifiers of namespaces (NQN, serial number, model, nsid, UUID, NGUID, EUI64) are kept, so
//! hosts find the same namespaces. Block sizes must stay the same as well, or a host finds other
//! contents; if the saved file does not contain one, the caller's `look` provides it.

mod builder;
mod command;
mod json;
mod nvmet;
mod spdk;

use std::path::Path;

use thiserror::Error;

use builder::ConfigBuilder;
pub(crate) use command::{Command, run};
use nvmfd::config::{Config, ConfigErrors};

/// The logical block size in bytes of the block device at a path, if there is one.
type BlockSizeOf<'l> = &'l dyn Fn(&Path) -> Option<u32>;

/// An imported configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Imported {
    /// The text of an `nvmfd.toml`, without errors. Ends with `remarks` as comments.
    pub(crate) text: String,
    /// Settings without a counterpart and why, one sentence each, without control characters.
    pub(crate) remarks: Vec<String>,
}

/// Reason why a configuration cannot be imported.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub(crate) enum ImportError {
    /// The text is not JSON; the message of the parser.
    #[error("this is not JSON: {0}")]
    NotJson(String),
    /// JSON, but not a file that the other target saves.
    #[error("{0}")]
    NotThis(&'static str),
    /// None of it can be served here; the remarks contain the reasons.
    #[error("nothing of it can be served here: {}", .0.join("; "))]
    Nothing(Vec<String>),
    /// An internal error: the result is invalid.
    #[error("the result has errors, which is a bug: {errors}")]
    Mistakes {
        /// The errors.
        errors: ConfigErrors,
        /// The invalid text.
        text: String,
    },
}

/// Imports a file of nvmetcli (`nvmetcli save FILE`): the kernel's target.
///
/// `look`: a [`BlockSizeOf`].
///
/// # Errors
/// The text has another format, or nothing in it can be served here.
pub(crate) fn nvmet(
    text: &str,
    look: impl Fn(&Path) -> Option<u32>,
) -> Result<Imported, ImportError> {
    let mut draft = ConfigBuilder::default();
    nvmet::read(&parse(text)?, &look, &mut draft)?;
    finish(draft, "the kernel's target (nvmetcli)")
}

/// Imports the file that SPDK saves (`rpc.py save_config`), or is started with (`--json`).
///
/// `look`: a [`BlockSizeOf`].
///
/// # Errors
/// The text has another format, or nothing in it can be served here.
pub(crate) fn spdk(
    text: &str,
    look: impl Fn(&Path) -> Option<u32>,
) -> Result<Imported, ImportError> {
    let mut draft = ConfigBuilder::default();
    spdk::read(&parse(text)?, &look, &mut draft)?;
    finish(draft, "SPDK")
}

fn parse(text: &str) -> Result<serde_json::Value, ImportError> {
    serde_json::from_str(text).map_err(|error| ImportError::NotJson(error.to_string()))
}

fn finish(draft: ConfigBuilder, source: &str) -> Result<Imported, ImportError> {
    let (text, remarks) = draft.finish(source);
    let Some(text) = text else { return Err(ImportError::Nothing(remarks)) };
    match Config::parse(&text) {
        Ok(_) => Ok(Imported { text, remarks }),
        Err(errors) => Err(ImportError::Mistakes { errors, text }),
    }
}

#[cfg(test)]
mod examples;
#[cfg(test)]
mod tests;
