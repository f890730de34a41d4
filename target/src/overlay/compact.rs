//! Leaves out of a list of unsaved changes what later ones have undone or replaced: programs add and
//! remove objects, and set states, without end and without a save.

use crate::api::{Change, Settings, UnsavedChange};

/// What a change is about.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Object<'a> {
    Subsystem(&'a str),
    Namespace(&'a str, u32),
    /// A host of a subsystem.
    Admission(&'a str, &'a str),
    Listener(u16),
    Host(&'a str),
}

impl Object<'_> {
    /// Whether another one goes with it when it is removed.
    fn contains(self, other: Object<'_>) -> bool {
        match (self, other) {
            (Object::Subsystem(own), Object::Namespace(of, _) | Object::Admission(of, _)) => {
                own == of
            }
            _ => self == other,
        }
    }
}

/// What a change does to its object.
#[derive(Clone, Copy)]
enum Action<'a> {
    Add,
    Set(&'a Settings),
    /// Of one ANA group, or of all.
    SetAna(Option<u32>),
    Remove,
}

impl Action<'_> {
    /// Whether nothing is left of an earlier one of the same object.
    fn replaces(self, earlier: Action<'_>) -> bool {
        match (self, earlier) {
            (Action::Set(new), Action::Set(old)) => old.keys().all(|key| new.contains_key(key)),
            (Action::SetAna(new), Action::SetAna(old)) => new.is_none() || new == old,
            _ => false,
        }
    }
}

/// Returns the changes that make a difference, as far as that can be seen from their names: the
/// caller has to compare the results. `files`: the digest of the files.
pub(super) fn compacted(files: &str, kept: Vec<UnsavedChange>) -> Vec<UnsavedChange> {
    let mut all = without_reverted(files, kept);
    let parts: Vec<_> = all.iter().map(|kept| parts(&kept.change)).collect();
    let mut goes = vec![false; parts.len()];
    for (at, part) in parts.iter().enumerate() {
        let Some((object, action)) = *part else { continue };
        let of_object = |part: &Option<(Object<'_>, _)>| part.is_some_and(|it| it.0 == object);
        let adds = |part: &Option<_>| of_object(part) && matches!(part, Some((_, Action::Add)));
        if matches!(action, Action::Remove)
            && let Some(start) = parts[..at].iter().rposition(adds)
        {
            for each in start..=at {
                goes[each] |= parts[each].is_some_and(|(other, _)| object.contains(other));
            }
        }
        let mut later = parts[at + 1..].iter().flatten();
        goes[at] |= later.any(|(other, later)| *other == object && later.replaces(action));
    }
    let mut goes = goes.into_iter();
    all.retain(|_| goes.next() != Some(true));
    all
}

/// Drops the changes between two equal texts.
fn without_reverted(files: &str, kept: Vec<UnsavedChange>) -> Vec<UnsavedChange> {
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

/// The object of a change, and what it does; none for one that replaces texts.
fn parts(change: &Change) -> Option<(Object<'_>, Action<'_>)> {
    use Action::{Add, Remove, Set, SetAna};
    use Object::{Admission, Host, Listener, Namespace, Subsystem};
    Some(match change {
        Change::AddSubsystem { nqn, .. } => (Subsystem(nqn), Add),
        Change::SetSubsystem { nqn, settings } => (Subsystem(nqn), Set(settings)),
        Change::RemoveSubsystem { nqn } => (Subsystem(nqn), Remove),
        Change::AddNamespace { subsystem, nsid, .. } => (Namespace(subsystem, *nsid), Add),
        Change::SetNamespace { subsystem, nsid, settings } => {
            (Namespace(subsystem, *nsid), Set(settings))
        }
        Change::RemoveNamespace { subsystem, nsid } => (Namespace(subsystem, *nsid), Remove),
        Change::AllowHost { subsystem, host } => (Admission(subsystem, host), Add),
        Change::DenyHost { subsystem, host } => (Admission(subsystem, host), Remove),
        Change::AddListener { id, .. } => (Listener(*id), Add),
        Change::SetListener { id, settings } => (Listener(*id), Set(settings)),
        Change::SetAna { listener, group, .. } => (Listener(*listener), SetAna(*group)),
        Change::RemoveListener { id } => (Listener(*id), Remove),
        Change::SetHost { nqn, settings } => (Host(nqn), Set(settings)),
        Change::RemoveHost { nqn } => (Host(nqn), Remove),
        Change::Replace { .. } | Change::ReplaceShared { .. } => return None,
    })
}
