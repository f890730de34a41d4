//! In which order files are written when changes are saved.
//!
//! Several files cannot change at once. Whoever reads between two of them (the daemon at its next
//! start, after the power went) must find a configuration, and the kept changes must make of it
//! what was meant. The number of a listener without `id` is its place through all files, and what
//! goes from one file may come in another, so not every order will do.

use super::{Misfit, after_each, merged};
use crate::api::Changes;
use crate::config::{Config, Source, Sources};

/// What to write, one after the other, to have all kept changes in the files. After each the files
/// are a configuration that the same changes complete, wherever there is such an order. A file may
/// be written twice.
///
/// # Errors
/// The first change that does not fit, or what is wrong with what comes out.
pub fn writes(old: &Sources, changes: &Changes) -> Result<Vec<Source>, Misfit> {
    let new = merged(old, changes)?;
    let holds = |state: &Sources| {
        *state == new
            || Config::of(state).is_ok() && merged(state, changes).is_ok_and(|end| end == new)
    };
    if let Some(writes) = between(old, &new, holds) {
        return Ok(writes);
    }
    let mut state = old.clone();
    let mut writes = Vec::new();
    for next in after_each(old, changes)? {
        match between(&state, &next, holds) {
            Some(more) => writes.extend(more),
            // All changes were made at once, and some of them cannot be without the others.
            None => return Ok(between(old, &new, |_| true).unwrap_or_default()),
        }
        state = next;
    }
    Ok(writes)
}

/// The way from the texts of one configuration to those of another, such that each state on it
/// holds. The last files come first: what is new is in the configuration file, and the numbers of
/// listeners depend on what stands before them.
fn between(from: &Sources, to: &Sources, holds: impl Fn(&Sources) -> bool) -> Option<Vec<Source>> {
    let mut state = from.clone();
    let mut writes = Vec::new();
    while state != *to {
        let with = |at: usize| {
            let mut next = state.clone();
            let wanted = to.iter().nth(at)?;
            let text = next.iter_mut().nth(at)?;
            (*text != *wanted).then(|| text.clone_from(wanted))?;
            Some((next, wanted.clone()))
        };
        let mut files = (0..=to.more.len()).rev().filter_map(with);
        let (next, written) = files.find(|(next, _)| holds(next))?;
        state = next;
        writes.push(written);
    }
    Some(writes)
}
