//! The file that keeps a reservation through power loss.
//!
//! It is written beside its name, synced, renamed, and its folder synced: whenever the power goes,
//! the name means the whole old state or the whole new one. A reservation that shall not persist
//! has no file. The text is for people as well:
//!
//! ```text
//! nvmfd reservation 1
//! generation 7
//! type 3
//! holder 0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a
//! registrant 0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a0a 00000000000000a1
//! crc32 5f3a9c01
//! ```

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use nvme::reservation::ReservationType;

use crate::core::subsystem::reservation::state::REGISTRANTS_MAX;
use crate::core::subsystem::reservation::{HostId, State};
use crate::state::atomic_file;

const FIRST_LINE: &str = "nvmfd reservation 1";

/// Longer files are not ours: 1024 registrants take less.
const BYTES_MAX: u64 = 128 << 10;

/// Where the reservation of one namespace is kept.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct StateFile {
    folder: PathBuf,
    name: String,
}

impl StateFile {
    /// In `folder`, which is there, for the namespace of this UUID.
    #[must_use]
    pub(crate) fn new(folder: &Path, uuid: [u8; 16]) -> StateFile {
        let name = format!("{}.reservation", uuid::Uuid::from_bytes(uuid));
        StateFile { folder: folder.to_owned(), name }
    }

    /// The file itself.
    #[must_use]
    pub(crate) fn path(&self) -> PathBuf {
        self.folder.join(&self.name)
    }

    /// What was kept; nothing reserved where there is no file.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or makes no sense. Such a file is never
    /// passed over: somebody may rely on what it said.
    pub(crate) fn load(&self) -> Result<State, String> {
        let path = self.path();
        let shown = path.display();
        let failed =
            |error: io::Error| format!("the reservation in {shown} cannot be read: {error}");
        match fs::metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(State::default()),
            Err(error) => return Err(failed(error)),
            Ok(found) if found.len() > BYTES_MAX => {
                return Err(format!("{shown} is too long for a reservation: {REMEDY}"));
            }
            Ok(_) => {}
        }
        let text = fs::read(&path).map_err(failed)?;
        parse(&text)
            .map_err(|what| format!("{shown} is no reservation that we wrote: {what}; {REMEDY}"))
    }

    /// Keeps a state, or removes what was kept when it does not persist. When this returns, it is
    /// so also after a power loss.
    ///
    /// # Errors
    /// What the system says. The old state may then be kept or the new one, but no mixture.
    pub(crate) fn keep(&self, state: &State) -> io::Result<()> {
        match state.persists {
            true => atomic_file::write(&self.folder, &self.name, &emit(state)),
            false => atomic_file::remove(&self.folder, &self.name),
        }
    }
}

const REMEDY: &str = "restore it, or remove it if no host relies on that reservation any more";

fn emit(state: &State) -> Vec<u8> {
    let mut text =
        format!("{FIRST_LINE}\ngeneration {}\ntype {}\n", state.generation, state.rtype.0);
    if let Some(holder) = &state.holder {
        text += &format!("holder {}\n", hex(holder));
    }
    for (host, key) in &state.registrants {
        text += &format!("registrant {} {key:016x}\n", hex(host));
    }
    atomic_file::sealed(&text).into_bytes()
}

/// Reads what [`emit`] writes, and nothing else.
fn parse(bytes: &[u8]) -> Result<State, &'static str> {
    let text = str::from_utf8(bytes).map_err(|_| "it is not text")?;
    let lines = atomic_file::unsealed(text, FIRST_LINE)?;
    let mut state = State { persists: true, ..State::default() };
    for line in lines {
        let unknown = "a line of it is not known";
        let (word, rest) = line.split_once(' ').ok_or(unknown)?;
        match word {
            "generation" => state.generation = rest.parse().map_err(|_| unknown)?,
            "type" => state.rtype = ReservationType(rest.parse().map_err(|_| unknown)?),
            "holder" => state.holder = Some(host(rest).ok_or(unknown)?),
            "registrant" => {
                let (id, key) = rest.split_once(' ').ok_or(unknown)?;
                let key = u64::from_str_radix(key, 16).map_err(|_| unknown)?;
                state.registrants.insert(host(id).ok_or(unknown)?, key);
            }
            _ => return Err(unknown),
        }
    }
    // What could not come about by orders is not served, whoever wrote it.
    match is_possible(&state) && emit(&state) == bytes {
        true => Ok(state),
        false => Err("it contradicts itself"),
    }
}

fn is_possible(state: &State) -> bool {
    let count = state.registrants.len();
    let held = match (state.rtype, &state.holder) {
        (ReservationType::NONE, None) => true,
        (rtype, None) => rtype.is_held_by_all() && count > 0,
        (rtype, Some(holder)) => {
            let single = rtype.is_known() && !rtype.is_held_by_all();
            single && state.registrants.contains_key(holder)
        }
    };
    held && count <= REGISTRANTS_MAX && state.registrants.values().all(|key| *key != 0)
}

fn hex(host: &HostId) -> String {
    format!("{:032x}", u128::from_be_bytes(*host))
}

fn host(text: &str) -> Option<HostId> {
    u128::from_str_radix(text, 16).ok().map(u128::to_be_bytes)
}

#[cfg(test)]
mod tests;
