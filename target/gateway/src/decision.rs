//! Who takes which group: decided by every gateway for itself from what it has read. Comparisons of
//! the update decide between two that want the same group.

use std::collections::{BTreeMap, BTreeSet};

use crate::record::{GroupObject, GroupRecord, Slot};

/// Why a group has no owner, as far as it is free.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Vacancy {
    /// Nobody owns it, or its owner is no member any more.
    Open,
    /// Its owner is suspected: it is excluded by the same update.
    Suspect(Slot),
}

/// Whether a group may be taken. `suspect` says whether a live member is suspected.
pub(crate) fn vacancy(
    object: &GroupObject,
    group: u32,
    suspect: impl Fn(Slot) -> bool,
) -> Option<Vacancy> {
    let owner = object.group(group).and_then(GroupRecord::owner);
    match owner {
        Some(owner) if object.live_owner(owner).is_none() => Some(Vacancy::Open),
        Some(owner) => suspect(owner.slot).then_some(Vacancy::Suspect(owner.slot)),
        None => Some(Vacancy::Open),
    }
}

/// The candidates for free groups: whether hosts reach others instead, and how many groups each
/// has.
#[derive(Debug)]
pub(crate) struct Candidates(BTreeMap<Slot, (bool, usize)>);

impl Candidates {
    /// These slots, with the groups that they own.
    pub(crate) fn new(
        slots: impl IntoIterator<Item = (Slot, bool)>,
        object: &GroupObject,
        groups: impl IntoIterator<Item = u32>,
    ) -> Candidates {
        let slots = slots.into_iter().map(|(slot, is_deserted)| (slot, (is_deserted, 0)));
        let mut loads: BTreeMap<Slot, (bool, usize)> = slots.collect();
        for group in groups {
            let owner = object.group(group).and_then(GroupRecord::owner);
            let live = owner.filter(|owner| object.live_owner(owner).is_some());
            if let Some((_, load)) = live.and_then(|owner| loads.get_mut(&owner.slot)) {
                *load += 1;
            }
        }
        Candidates(loads)
    }

    /// How many others come before a slot for a group, which is counted for the first: the one that
    /// it is meant for, then those that hosts reach, then the least loaded, then the lower slot.
    pub(crate) fn assign(&mut self, slot: Slot, meant_for: Option<Slot>) -> usize {
        let rank = |(of, load): (&Slot, &(bool, usize))| (Some(*of) != meant_for, *load, *of);
        let own = self.0.get(&slot).map(|load| rank((&slot, load)));
        let before = self.0.iter().map(rank).filter(|other| own.is_some_and(|own| *other < own));
        let before = before.count();
        if let Some((_, _, first)) = self.0.iter().map(rank).min() {
            self.0.entry(first).and_modify(|(_, load)| *load += 1);
        }
        before
    }

    /// The least loaded one of those that hosts reach, or of all.
    pub(crate) fn least_loaded(&self) -> Option<Slot> {
        self.0.iter().min_by_key(|(slot, load)| (**load, **slot)).map(|(slot, _)| *slot)
    }
}

/// The moves after which each live gateway has as many groups as the others, or one more: as few as
/// possible. `owners`: groups with their live owners.
pub(crate) fn balance(
    live: &BTreeSet<Slot>,
    owners: impl IntoIterator<Item = (u32, Slot)>,
) -> Vec<(u32, Slot)> {
    let mut groups: BTreeMap<Slot, Vec<u32>> = live.iter().map(|slot| (*slot, vec![])).collect();
    for (group, slot) in owners {
        groups.entry(slot).or_default().push(group);
    }
    let mut moves = Vec::new();
    loop {
        let by_load = |(slot, of): &(&Slot, &Vec<u32>)| (of.len(), **slot);
        let to = groups.iter().filter(|(slot, _)| live.contains(slot)).min_by_key(by_load);
        let from = groups.iter().max_by_key(|(slot, of)| (of.len(), std::cmp::Reverse(**slot)));
        let (Some((to, few)), Some((from, many))) = (to, from) else { return moves };
        if many.len() <= few.len() + 1 {
            return moves;
        }
        let (to, from) = (*to, *from);
        let Some(group) = groups.get_mut(&from).and_then(Vec::pop) else { return moves };
        groups.entry(to).or_default().push(group);
        moves.push((group, to));
    }
}

#[cfg(test)]
mod tests {
    use crate::decision::*;

    fn object() -> GroupObject {
        GroupObject::parse([
            ("gw.0", "1 a 2 live a d -"),
            ("gw.1", "1 b 1 live b d -"),
            ("gw.2", "1 c 1 excluded c d -"),
            ("ana.1", "1 5 serving 0 2 a -"),
            ("ana.2", "1 5 serving 0 1 a -"),
            ("ana.3", "1 5 taking 2 1 c -"),
            ("ana.4", "1 5 free 1"),
            ("ana.6", "1 5 serving 1 1 b -"),
            ("ana.7", "1 5 serving 1 1 b -"),
        ])
        .unwrap()
    }

    #[test]
    fn a_group_is_free_if_its_owner_is_no_member_any_more_or_suspected() {
        let of = |group, suspect: u8| vacancy(&object(), group, |slot| slot == suspect);
        assert_eq!(of(1, 9), None);
        assert_eq!(of(1, 0), Some(Vacancy::Suspect(0)));
        assert_eq!(of(2, 0), Some(Vacancy::Open), "of a former incarnation");
        assert_eq!(of(3, 9), Some(Vacancy::Open), "of an excluded member");
        assert_eq!(of(4, 9), Some(Vacancy::Open));
        assert_eq!(of(5, 9), Some(Vacancy::Open), "never owned");
    }

    #[test]
    fn groups_are_balanced_by_as_few_moves_as_possible() {
        let of = |live: &[Slot], owners: &[(u32, Slot)]| {
            balance(&live.iter().copied().collect(), owners.iter().copied())
        };
        assert_eq!(of(&[0, 1], &[(1, 0), (2, 0), (3, 0)]), [(3, 1)]);
        assert_eq!(of(&[0, 1], &[(1, 0), (2, 1), (3, 0)]), [], "one more is even");
        assert_eq!(of(&[0, 1, 2], &[(1, 1), (2, 1), (3, 1), (4, 1)]), [(4, 0), (3, 2)]);
        assert_eq!(of(&[], &[(1, 1), (2, 1)]), []);
        for gateways in 1..6u8 {
            for groups in 0..20u32 {
                let live: BTreeSet<Slot> = (0..gateways).collect();
                let mut owners: BTreeMap<u32, Slot> =
                    (0..groups).map(|id| (id, (id * id % u32::from(gateways)) as Slot)).collect();
                let moves = balance(&live, owners.clone());
                owners.extend(moves);
                let loads =
                    live.iter().map(|slot| owners.values().filter(|it| *it == slot).count());
                let loads: Vec<usize> = loads.collect();
                assert!(
                    loads.iter().max().unwrap() - loads.iter().min().unwrap() <= 1,
                    "{loads:?}"
                );
            }
        }
    }

    #[test]
    fn groups_are_assigned_to_the_requested_or_least_loaded_gateway() {
        let object = object();
        let mut candidates = Candidates::new([(0, false), (1, false)], &object, 1..=7);
        assert_eq!(candidates.least_loaded(), Some(0), "one group, the other has two");
        assert_eq!(candidates.assign(0, Some(1)), 1, "meant for the other one");
        assert_eq!(candidates.assign(1, None), 1, "1 and 3");
        assert_eq!(candidates.assign(1, None), 1, "2 and 3");
        assert_eq!(candidates.assign(1, None), 1, "3 and 3: the lower slot");
        assert_eq!(candidates.assign(1, None), 0, "4 and 3");
        assert_eq!(candidates.assign(9, None), 0, "no candidate comes before what is none");
        let mut candidates = Candidates::new([(0, true), (1, false)], &object, 1..=7);
        assert_eq!(candidates.least_loaded(), Some(1), "no host is connected to the other one");
        assert_eq!(candidates.assign(0, None), 1);
    }
}
