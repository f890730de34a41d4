//! Leaves out of a list of unsaved changes what later ones have undone or replaced: programs add and
//! remove objects, and set states, without end and without a save.

use std::ops::RangeInclusive;

use crate::api::{Change, Settings, UnsavedChange};

/// Returns the changes that make a difference, as far as that can be seen from their names: the
/// caller has to compare the results. `files`: the digest of the files.
pub(super) fn compacted(files: &str, kept: Vec<UnsavedChange>) -> Vec<UnsavedChange> {
    let mut all = without_detours(files, kept);
    let mut goes = vec![false; all.len()];
    for (at, kept) in all.iter().enumerate() {
        let Some(undone) = undone(&all, at) else { continue };
        let alike = undone.filter(|each| concerns(&all[*each].change, &kept.change));
        alike.for_each(|each| goes[each] = true);
    }
    for at in 0..all.len() {
        let mut later = all[at + 1..].iter();
        goes[at] |= later.any(|later| replaces(&later.change, &all[at].change));
    }
    let mut goes = goes.into_iter();
    all.retain(|_| goes.next() != Some(true));
    all
}

/// Drops the changes between two equal texts.
fn without_detours(files: &str, kept: Vec<UnsavedChange>) -> Vec<UnsavedChange> {
    let mut all: Vec<UnsavedChange> = Vec::new();
    for change in kept {
        let same = all.iter().position(|old| old.after == change.after).map(|at| at + 1);
        match if change.after == files { Some(0) } else { same } {
            Some(length) => all.truncate(length),
            None => all.push(change),
        }
    }
    all
}

/// The changes from the one that has added an object to its removal, which is at `end`.
fn undone(all: &[UnsavedChange], end: usize) -> Option<RangeInclusive<usize>> {
    let adds = |old: &UnsavedChange| match (&old.change, &all[end].change) {
        (Change::AddSubsystem { nqn: old, .. }, Change::RemoveSubsystem { nqn }) => old == nqn,
        (
            Change::AddNamespace { subsystem: of, nsid: old, .. },
            Change::RemoveNamespace { subsystem, nsid },
        ) => (of, old) == (subsystem, nsid),
        (Change::AddListener { id: old, .. }, Change::RemoveListener { id }) => old == id,
        (Change::AllowHost { subsystem: of, host: old }, Change::DenyHost { subsystem, host }) => {
            (of, old) == (subsystem, host)
        }
        _ => false,
    };
    let start = all[..end].iter().rposition(adds)?;
    Some(start..=end)
}

/// Whether a change is one of the object that another removes.
fn concerns(change: &Change, removal: &Change) -> bool {
    match removal {
        Change::RemoveSubsystem { nqn } => subsystem(change) == Some(nqn),
        Change::RemoveNamespace { nsid, .. } => {
            let own = matches!(
                change,
                Change::AddNamespace { nsid: of, .. }
                    | Change::SetNamespace { nsid: of, .. }
                    | Change::RemoveNamespace { nsid: of, .. } if of == nsid
            );
            own && subsystem(change) == subsystem(removal)
        }
        Change::RemoveListener { id } => matches!(
            change,
            Change::AddListener { id: of, .. }
                | Change::SetListener { id: of, .. }
                | Change::RemoveListener { id: of }
                | Change::SetAna { listener: of, .. } if of == id
        ),
        Change::DenyHost { host, .. } => {
            let own = matches!(
                change,
                Change::AllowHost { host: of, .. } | Change::DenyHost { host: of, .. } if of == host
            );
            own && subsystem(change) == subsystem(removal)
        }
        _ => false,
    }
}

/// The subsystem that a change is about.
fn subsystem(change: &Change) -> Option<&String> {
    match change {
        Change::AddSubsystem { nqn, .. }
        | Change::SetSubsystem { nqn, .. }
        | Change::RemoveSubsystem { nqn } => Some(nqn),
        Change::AddNamespace { subsystem, .. }
        | Change::SetNamespace { subsystem, .. }
        | Change::RemoveNamespace { subsystem, .. }
        | Change::AllowHost { subsystem, .. }
        | Change::DenyHost { subsystem, .. } => Some(subsystem),
        _ => None,
    }
}

/// Whether a later change sets all keys of the same object that this one sets.
fn replaces(later: &Change, change: &Change) -> bool {
    let covers =
        |later: &Settings, settings: &Settings| settings.keys().all(|key| later.contains_key(key));
    match (later, change) {
        (
            Change::SetSubsystem { nqn: later, settings: new },
            Change::SetSubsystem { nqn, settings },
        )
        | (Change::SetHost { nqn: later, settings: new }, Change::SetHost { nqn, settings }) => {
            later == nqn && covers(new, settings)
        }
        (
            Change::SetNamespace { subsystem: of, nsid: later, settings: new },
            Change::SetNamespace { subsystem, nsid, settings },
        ) => (of, later) == (subsystem, nsid) && covers(new, settings),
        (
            Change::SetListener { id: later, settings: new },
            Change::SetListener { id, settings },
        ) => later == id && covers(new, settings),
        (
            Change::SetAna { listener: later, group: of, .. },
            Change::SetAna { listener, group, .. },
        ) => later == listener && (of.is_none() || of == group),
        _ => false,
    }
}
