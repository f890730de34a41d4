//! The file of kept changes: the whole of it is written anew for each, so that whenever the power
//! goes it is as before or as after.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::api::Changes;
use crate::kept;

/// Its name in the state directory.
const NAME: &str = "changes.json";

/// What its form is called.
const FORM: u32 = 1;

/// The longest file, in bytes.
const MOST_BYTES: usize = 1 << 20;

#[derive(Serialize, Deserialize)]
struct Content {
    form: u32,
    #[serde(flatten)]
    changes: Changes,
}

/// Where changes are kept, if anywhere.
pub(super) struct Journal<'d> {
    folder: Option<&'d Path>,
}

impl<'d> Journal<'d> {
    pub(super) fn new(folder: Option<&'d Path>) -> Journal<'d> {
        Journal { folder }
    }

    /// What was kept.
    pub(super) fn read(&self) -> Result<Changes, String> {
        let Some(folder) = self.folder else { return Ok(Changes::default()) };
        let path = folder.join(NAME);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Changes::default()),
            Err(error) => return Err(format!("{}: {error}", path.display())),
        };
        match serde_json::from_slice(&bytes) {
            Ok(Content { form: FORM, changes }) => Ok(changes),
            Ok(Content { form, .. }) => Err(format!("{} has form {form}", path.display())),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }

    pub(super) fn write(&self, changes: &Changes) -> Result<(), String> {
        let Some(folder) = self.folder else { return Ok(()) };
        let path = folder.join(NAME);
        let failed = |error: &dyn std::fmt::Display| {
            format!("{} cannot be written: {error}", path.display())
        };
        if *changes == Changes::default() {
            return match path.exists() {
                true => kept::remove(folder, NAME).map_err(|error| failed(&error)),
                false => Ok(()),
            };
        }
        let content = Content { form: FORM, changes: changes.clone() };
        let bytes = serde_json::to_vec_pretty(&content).map_err(|error| failed(&error))?;
        if bytes.len() > MOST_BYTES {
            return Err("there are too many changes that no file has: `nvmfctl save`".to_owned());
        }
        kept::write(folder, NAME, &bytes).map_err(|error| failed(&error))
    }
}
