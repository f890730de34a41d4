//! The ANA groups of a gateway: which it asks for, and the steps from one owner to the next.

use std::collections::BTreeSet;
use std::time::Duration;

use super::{Client, Gateway, Group, Pending};
use crate::decision::{Vacancy, vacancy};
use crate::interface::{DropReason, EndReason, Operation, Stage};
use crate::record::{GroupRecord, Key, MemberRecord, Membership, Owner, Ownership};

/// Images that are not released by then never are, as far as is known.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(10);

impl Gateway {
    pub(super) fn complete_request(&mut self, records: Vec<(u32, GroupRecord)>, is_done: bool) {
        for (id, record) in records {
            if !is_done {
                self.step(id, Stage::Standby);
                continue;
            }
            let has_former =
                matches!(&record.ownership, Ownership::Taking(_, former) if !former.is_empty());
            self.set_record(id, Some(record));
            self.step(id, if has_former { Stage::Excluding } else { Stage::Acquiring });
        }
    }

    /// The step of a group has ended: the next one, or the same again later.
    pub(super) fn complete_step(&mut self, id: u32, is_done: bool) {
        let Some(stage) = self.stage(id) else { return };
        if !is_done {
            let at = self.now + self.timing.retry;
            if let Some(group) = self.groups.get_mut(&id) {
                group.retry_at = Some(at);
            }
            return;
        }
        match stage {
            Stage::Excluding => self.step(id, Stage::Acquiring),
            Stage::Acquiring => self.step(id, Stage::Confirming),
            Stage::Confirming => {
                let record = self.next_record(id);
                self.set_record(id, record);
                self.step(id, Stage::Serving);
            }
            Stage::Releasing(to) => self.step(id, Stage::Giving(to)),
            Stage::Giving(_) => {
                self.set_record(id, None);
                self.step(id, Stage::Standby);
            }
            Stage::Standby | Stage::Requesting | Stage::Serving => {}
        }
    }

    /// The record that follows the own one of a group: of one that it serves, or gives.
    pub(super) fn next_record(&self, id: u32) -> Option<GroupRecord> {
        let group = self.groups.get(&id)?;
        let GroupRecord { epoch, ownership } = group.record.as_ref()?;
        match (group.stage, ownership) {
            (Stage::Giving(to), _) => {
                Some(GroupRecord { epoch: epoch + 1, ownership: Ownership::Free(to) })
            }
            (_, Ownership::Taking(owner, _)) => {
                Some(GroupRecord { epoch: *epoch, ownership: Ownership::Serving(owner.clone()) })
            }
            _ => None,
        }
    }

    /// Enters a stage of a group, and starts its operation.
    pub(super) fn step(&mut self, id: u32, stage: Stage) {
        let Some(group) = self.groups.get_mut(&id) else { return };
        if group.stage != stage {
            group.entered = self.now;
        }
        group.stage = stage;
        group.retry_at = None;
        let former = match &group.record {
            Some(GroupRecord { ownership: Ownership::Taking(_, former), .. }) => former.clone(),
            _ => Vec::new(),
        };
        // Hosts see the end of the service before anything is released.
        self.publish();
        let operation = match stage {
            Stage::Standby | Stage::Requesting | Stage::Serving => return,
            Stage::Excluding => Operation::Exclude(former),
            Stage::Acquiring => Operation::Acquire(id, former),
            Stage::Releasing(_) => Operation::Release(id),
            Stage::Confirming | Stage::Giving(_) => {
                let old = self.groups.get(&id).and_then(|group| group.record.as_ref());
                let old = old.map(ToString::to_string);
                let (Some(update), Some(next)) = (self.own_update(), self.next_record(id)) else {
                    return;
                };
                let key = Key::Group(id);
                Operation::Update(update.compare(key, old.as_deref()).set(key, &next))
            }
        };
        self.start(Pending::Step(id), operation);
    }

    pub(super) fn set_record(&mut self, id: u32, record: Option<GroupRecord>) {
        if let Some(group) = self.groups.get_mut(&id) {
            group.record = record;
            group.since = self.now;
        }
    }

    pub(super) fn stage(&self, group: u32) -> Option<Stage> {
        self.groups.get(&group).map(|group| group.stage)
    }

    /// Updates of steps that were reported as failed, and are done. Nobody else replaces the record
    /// of a member: once another one follows that of a group to be given, the group was given, and
    /// may have been taken since.
    pub(super) fn note_steps(&mut self, sent: Duration) {
        let is_done = |id: u32, group: &Group| {
            let next = self.next_record(id).map(|record| record.to_string());
            let own = group.record.as_ref().map(ToString::to_string);
            match (self.object.text(Key::Group(id)), group.stage) {
                (_, _) if next.is_none() || sent < group.since => false,
                (text, Stage::Giving(_)) => text != own.as_deref(),
                (text, _) => text == next.as_deref(),
            }
        };
        let failed = self.groups.iter().filter(|(_, group)| group.retry_at.is_some());
        let done = failed.filter(|(id, group)| is_done(**id, group));
        let done: Vec<u32> = done.map(|(id, _)| *id).collect();
        done.into_iter().for_each(|id| self.complete_step(id, true));
    }

    /// The record of a group that it owns is another: somebody has edited it.
    pub(super) fn has_lost_group(&self, sent: Duration) -> bool {
        self.groups.iter().any(|(id, group)| {
            let is_owned = !matches!(
                group.stage,
                Stage::Standby | Stage::Requesting | Stage::Confirming | Stage::Giving(_)
            );
            let own = group.record.as_ref().map(ToString::to_string);
            is_owned && sent >= group.since && self.object.text(Key::Group(*id)) != own.as_deref()
        })
    }

    /// Asks for the groups that are free and that it is the first candidate for.
    pub(super) fn request_groups(&mut self, sent: Duration) {
        let Client::Registered(own, _) = &self.client else { return };
        let object = &self.object;
        self.condemned.retain(|slot, incarnation| {
            let member = object.member(*slot).filter(|it| it.incarnation == *incarnation);
            member.is_some_and(|it| it.membership == Membership::Live)
        });
        let is_suspect = |slot| {
            let is_other = slot != self.member.slot;
            let is_silent = self.heartbeats.is_suspect(slot, sent, &self.timing);
            is_other && (is_silent || self.condemned.contains_key(&slot))
        };
        let live = self.heartbeats.live(object, sent, &self.timing);
        let may_take = self.may_take(self.member.slot);
        let live = live.filter(|slot| !is_suspect(*slot)).chain([self.member.slot]);
        let live = live.filter(|slot| self.may_take(*slot));
        let mut candidates = self.candidates(live);
        let mut wanted = Vec::new();
        for (id, group) in &mut self.groups {
            let record = object.group(*id);
            // A request that was reported as failed: the own record is no obstacle.
            let is_own = record
                .and_then(GroupRecord::owner)
                .is_some_and(|owner| owner.address == own.address && group.stage == Stage::Standby);
            let vacancy = match is_own {
                true => Some(Vacancy::Open),
                false if !may_take => None,
                false => vacancy(object, *id, is_suspect),
            };
            let Some(vacancy) = vacancy else {
                group.vacant_since = None;
                continue;
            };
            let since = *group.vacant_since.get_or_insert(self.now);
            let meant_for = match record.map(|record| &record.ownership) {
                Some(Ownership::Free(to)) => *to,
                _ => None,
            };
            let before = candidates.assign(self.member.slot, meant_for) as u32;
            let is_due = self.now >= since + self.timing.stagger * before;
            if is_due && group.stage == Stage::Standby {
                wanted.push((*id, vacancy));
            }
        }
        let condemns = !self.is_outdated() && !self.condemned.is_empty();
        if !wanted.is_empty() || condemns {
            let own = Owner {
                slot: self.member.slot,
                incarnation: own.incarnation,
                address: own.address.clone(),
            };
            self.request(&own, &wanted);
        }
    }

    /// One update for all groups: a suspect is excluded with it, unless its heartbeat has changed.
    /// Who is condemned is excluded even if it owns no group, or one that another gateway takes.
    pub(super) fn request(&mut self, own: &Owner, wanted: &[(u32, Vacancy)]) {
        let Some(mut update) = self.own_update() else { return };
        let mut suspects = BTreeSet::new();
        if !self.is_outdated() {
            suspects.extend(self.condemned.keys().copied());
        }
        let mut records = Vec::new();
        for (id, vacancy) in wanted {
            let (key, old) = (Key::Group(*id), self.object.group(*id));
            let epoch = old.map_or(0, |old| old.epoch) + 1;
            let mut former = old.map_or_else(Vec::new, GroupRecord::to_exclude);
            former.retain(|address| *address != own.address);
            let record = GroupRecord { epoch, ownership: Ownership::Taking(own.clone(), former) };
            update = update.compare(key, self.object.text(key)).set(key, &record);
            records.push((*id, record));
            if let Vacancy::Suspect(slot) = vacancy {
                suspects.insert(*slot);
            }
        }
        for slot in suspects {
            let Some(member) = self.object.member(slot) else { continue };
            let excluded = MemberRecord { membership: Membership::Excluded, ..member.clone() };
            let (key, heartbeat) = (Key::Member(slot), Key::Heartbeat(slot));
            update = update.compare(key, self.object.text(key)).set(key, &excluded);
            if !self.condemned.contains_key(&slot) {
                update = update.compare(heartbeat, self.object.text(heartbeat));
            }
        }
        wanted.iter().for_each(|(id, _)| self.step(*id, Stage::Requesting));
        self.start(Pending::Request(records), Operation::Update(update));
    }

    /// Gives up what it does not get released while the cluster answers: one image with an operation
    /// that does not end would keep all of its group from being served by anybody. Who takes the group
    /// excludes this data client.
    pub(super) fn abandon_releases(&mut self) {
        let (now, is_fresh) = (self.now, self.is_fresh());
        let is_releasing = |group: &Group| matches!(group.stage, Stage::Releasing(_));
        let mut releasing = self.groups.iter_mut().filter(|(_, group)| is_releasing(group));
        if !is_fresh {
            releasing.for_each(|(_, group)| group.entered = now);
        } else if let Some((id, _)) =
            releasing.find(|(_, group)| now >= group.entered + RELEASE_TIMEOUT)
        {
            let reason = DropReason::Unreleased(*id);
            self.exclude_self(reason);
        }
    }

    /// The groups that its namespaces are in have changed.
    pub(super) fn set_groups(&mut self, declared: &BTreeSet<u32>) {
        let now = self.now;
        for id in declared {
            self.groups.entry(*id).or_insert_with(|| Group::new(now));
        }
        for (id, group) in &mut self.groups {
            group.is_retired = !declared.contains(id);
        }
    }

    /// Releases the groups that have no namespace here any more, for whoever has some, and forgets
    /// them.
    pub(super) fn release_retired(&mut self) {
        let retired = self.groups.iter().filter(|(_, group)| group.is_retired);
        let serving = retired.filter(|(_, group)| group.stage == Stage::Serving);
        let serving: Vec<u32> = serving.map(|(id, _)| *id).collect();
        serving.into_iter().for_each(|id| self.step(id, Stage::Releasing(None)));
        self.groups.retain(|_, group| !group.is_retired || group.stage != Stage::Standby);
    }

    /// Gives all groups, then notes that this gateway has left.
    pub(super) fn leave(&mut self) {
        let others = self.others();
        self.give_all(others);
        let is_idle = self.groups.values().all(|group| group.stage == Stage::Standby);
        if !is_idle || self.is_pending(|it| matches!(it, Pending::Leave)) {
            return;
        }
        match (&self.client, self.own_update()) {
            (Client::Registered(record, _), Some(update)) => {
                let left = MemberRecord { membership: Membership::Left, ..record.clone() };
                let update = update.set(Key::Member(self.member.slot), &left);
                self.start(Pending::Leave, Operation::Update(update));
            }
            _ => self.end(EndReason::Left),
        }
    }
}
