//! One gateway of a group.

mod front;
mod membership;
mod moves;
mod ownership;

use std::collections::{BTreeMap, BTreeSet};
use std::mem::take;
use std::time::Duration;

use crate::Timing;
use crate::decision::balance;
use crate::heartbeat::Heartbeats;
use crate::interface::{
    Access, Action, DropReason, EndReason, Event, Member, Operation, OperationId, Outcome, Stage,
};
use crate::record::{Applied, Front, GroupObject, GroupRecord, Key, MemberRecord, Slot};
use moves::Moves;

#[derive(Debug)]
struct Group {
    stage: Stage,
    /// When it was entered; of a release: or the heartbeat has become fresh.
    entered: Duration,
    /// The own record, unless in standby.
    record: Option<GroupRecord>,
    /// When `record` was confirmed.
    since: Duration,
    /// When the step is to be repeated that has failed.
    retry_at: Option<Duration>,
    /// Since when it has been free, in what was read.
    vacant_since: Option<Duration>,
    published: Option<Access>,
    /// No namespace is in it any more: it is released.
    is_retired: bool,
}

impl Group {
    fn new(now: Duration) -> Group {
        Group {
            stage: Stage::Standby,
            entered: now,
            record: None,
            since: now,
            retry_at: None,
            vacant_since: None,
            published: None,
            is_retired: false,
        }
    }
}

/// The data client, and the membership that goes with it.
#[derive(Debug)]
enum Client {
    /// None: the next attempt.
    Missing(Duration),
    Connecting,
    /// Its address.
    Connected(String),
    Registering,
    /// The member record, and when it was confirmed.
    Registered(MemberRecord, Duration),
}

#[derive(Debug)]
enum Pending {
    Connect,
    Read(Duration),
    Register(MemberRecord, Duration),
    /// When it was sent, and the member record that goes with it.
    Heartbeat(Duration, Option<MemberRecord>),
    Request(Vec<(u32, GroupRecord)>),
    /// A step of a group.
    Step(u32),
    Leave,
    /// A request to the owner of a group.
    Ask,
}

/// One gateway of a group: what it knows, and what it does next.
#[derive(Debug)]
pub struct Gateway {
    member: Member,
    timing: Timing,
    now: Duration,
    groups: BTreeMap<u32, Group>,
    client: Client,
    /// The last incarnation of this process.
    incarnation: Option<u64>,
    heartbeats: Heartbeats,
    next_read: Duration,
    object: GroupObject,
    /// The next member record, after a reload: until it is known to be in the group object.
    next_record: Option<MemberRecord>,
    /// Members that an administrator excludes, by incarnation.
    condemned: BTreeMap<Slot, u64>,
    /// Groups that an administrator moves.
    moves: Moves,
    /// How hosts reach this gateway; none: it is not known.
    front: Option<Front>,
    /// Since when no host has, while one may reach another gateway.
    unreached_since: Option<Duration>,
    leaving: bool,
    ended: bool,
    pending: BTreeMap<OperationId, Pending>,
    last_id: u64,
    actions: Vec<Action>,
}

impl Gateway {
    /// A gateway that is no member yet.
    pub fn new(member: Member, timing: Timing, now: Duration) -> Gateway {
        let groups = member.declared.groups.iter();
        Gateway {
            groups: groups.map(|id| (*id, Group::new(now))).collect(),
            member,
            timing,
            now,
            client: Client::Missing(now),
            incarnation: None,
            heartbeats: Heartbeats::default(),
            next_read: now,
            object: GroupObject::default(),
            next_record: None,
            condemned: BTreeMap::new(),
            moves: Moves::default(),
            front: None,
            unreached_since: None,
            leaving: false,
            ended: false,
            pending: BTreeMap::new(),
            last_id: 0,
            actions: Vec::new(),
        }
    }

    /// What is to be done after an event. Times are those of a clock of this machine that also
    /// counts while the process is suspended.
    #[must_use]
    pub fn handle(&mut self, now: Duration, event: Event) -> Vec<Action> {
        self.now = self.now.max(now);
        if !self.ended {
            // A process that was suspended has to notice it before it goes on.
            self.publish();
            self.react(event);
            self.advance();
            self.publish();
        }
        take(&mut self.actions)
    }

    /// When the next [`Event::Tick`] is due.
    pub fn deadline(&self) -> Duration {
        let client = match self.client {
            Client::Missing(at) => Some(at),
            Client::Registered(..)
                if !self.is_pending(|it| matches!(it, Pending::Heartbeat(..))) =>
            {
                Some(self.heartbeats.next)
            }
            _ => None,
        };
        let is_reading = self.is_pending(|it| matches!(it, Pending::Read(_)));
        let read = (!is_reading).then_some(self.next_read);
        let doubt = self.heartbeats.doubt_at(&self.timing).filter(|at| *at > self.now);
        let retries = self.groups.values().filter_map(|group| group.retry_at);
        let times = [client, read, doubt].into_iter().flatten().chain(retries);
        times.min().unwrap_or(self.now + self.timing.retry)
    }

    /// The stage of each group.
    pub fn stages(&self) -> impl Iterator<Item = (u32, Stage)> {
        self.groups.iter().map(|(id, group)| (*id, group.stage))
    }

    /// The record of each group that this gateway owns.
    pub fn records(&self) -> impl Iterator<Item = (u32, Option<&GroupRecord>)> {
        self.groups.iter().map(|(id, group)| (*id, group.record.as_ref()))
    }

    /// Whether its own heartbeat is fresh: without it no group is optimized.
    pub fn is_fresh(&self) -> bool {
        self.heartbeats.is_fresh(self.now, &self.timing)
    }

    /// The group object as it was read last.
    pub fn object(&self) -> &GroupObject {
        &self.object
    }

    /// What this gateway has in force of the shared configuration, if it uses it.
    pub fn applied(&self) -> Option<&Applied> {
        self.member.applied.as_ref()
    }

    /// Digest of what it declares.
    pub fn digest(&self) -> &str {
        &self.member.declared.digest
    }

    /// Whether a later version of the shared configuration than here was in force at a gateway: then
    /// this one takes no group.
    pub fn is_outdated(&self) -> bool {
        self.has_outdated(self.member.slot)
    }

    fn has_outdated(&self, slot: Slot) -> bool {
        let applied = match slot == self.member.slot {
            true => self.member.applied.as_ref(),
            false => self.object.applied(slot),
        };
        applied.is_some_and(|applied| self.object.is_outdated(applied))
    }

    /// Whether a live member may take groups.
    fn may_take(&self, slot: Slot) -> bool {
        !self.has_outdated(slot) && !self.is_closed(slot)
    }

    /// The moves that would give each live member that takes groups as many as the others, or one
    /// more.
    pub fn balance(&self) -> Vec<(u32, Slot)> {
        let mut live = self.live_members();
        live.retain(|slot| self.may_take(*slot));
        let owners = self.groups.keys().filter_map(|id| {
            let owner = self.object.group(*id)?.owner()?;
            self.object.live_owner(owner).map(|_| (*id, owner.slot))
        });
        balance(&live, owners)
    }

    /// The move that has begun, or is next.
    pub fn next_move(&self) -> Option<(u32, Slot)> {
        self.moves.next()
    }

    /// Members whose heartbeats change, and this one.
    pub fn live_members(&self) -> BTreeSet<Slot> {
        self.heartbeats.live(&self.object, self.now, &self.timing).collect()
    }

    /// The other members whose heartbeats change, as far as it can tell: while its own are not
    /// confirmed it knows nothing of others.
    pub fn peers(&self) -> Option<Vec<&MemberRecord>> {
        let live = self.heartbeats.live(&self.object, self.now, &self.timing);
        let others = live.filter(|slot| *slot != self.member.slot);
        let can_tell = self.is_fresh() && !self.ended;
        can_tell.then(|| others.filter_map(|slot| self.object.member(slot)).collect())
    }

    /// A live member that declares something else: until it has ended this gateway does not join.
    pub fn differing(&self) -> Option<&MemberRecord> {
        match self.client {
            Client::Connected(_) => self.differing_member(self.now),
            _ => None,
        }
    }

    fn react(&mut self, event: Event) {
        match event {
            Event::Tick => {}
            Event::Changed => self.next_read = self.now,
            Event::ClientExcluded => self.exclude_self(DropReason::Excluded),
            Event::Exclude(slot) if slot != self.member.slot => {
                let member = self.object.member(slot);
                self.condemned.extend(member.map(|member| (slot, member.incarnation)));
                self.next_read = self.now;
            }
            Event::Exclude(_) => {}
            Event::Leave => self.leaving = true,
            Event::Declared(declared) => self.declare(declared),
            Event::Front(front) => self.front = Some(front),
            Event::Applied(applied) => {
                self.member.applied = Some(applied);
                self.next_read = self.now;
            }
            Event::Move(group, to) => {
                self.moves.add(group, to);
                self.continue_moves();
            }
            Event::Completed(id, outcome) => {
                if let Some(pending) = self.pending.remove(&id) {
                    self.complete(pending, outcome);
                }
            }
        }
    }

    fn complete(&mut self, pending: Pending, outcome: Outcome) {
        let is_done = outcome == Outcome::Done;
        if outcome == Outcome::Conflict {
            self.next_read = self.now;
        }
        match pending {
            Pending::Connect => match outcome {
                Outcome::Client(address) => {
                    self.client = Client::Connected(address);
                    self.next_read = self.now;
                }
                _ => self.client = Client::Missing(self.now + self.timing.retry),
            },
            Pending::Read(sent) => match outcome {
                Outcome::Object(object) => self.note_object(sent, object),
                _ => self.next_read = self.now + self.timing.retry,
            },
            Pending::Register(record, sent) => match is_done {
                true => {
                    self.incarnation = Some(record.incarnation);
                    self.client = Client::Registered(record, self.now);
                    self.heartbeats.confirm(self.now, &self.timing, sent);
                }
                false => self.client = Client::Connected(record.address),
            },
            Pending::Heartbeat(sent, record) if is_done => {
                self.heartbeats.confirm(self.now, &self.timing, sent);
                record.into_iter().for_each(|record| self.adopt_record(record));
            }
            Pending::Heartbeat(..) => {}
            Pending::Request(records) => self.complete_request(records, is_done),
            Pending::Step(group) => self.complete_step(group, is_done),
            Pending::Leave if is_done => self.end(EndReason::Left),
            Pending::Leave | Pending::Ask => {}
        }
    }

    /// What is due by time.
    fn advance(&mut self) {
        if self.ended {
            return;
        }
        if let Client::Missing(at) = self.client
            && at <= self.now
            && !self.leaving
        {
            self.client = Client::Connecting;
            self.start(Pending::Connect, Operation::Connect);
        }
        let has_beat = self.is_pending(|it| matches!(it, Pending::Heartbeat(..)));
        if !has_beat
            && self.heartbeats.next <= self.now
            && let Client::Registered(record, _) = &self.client
        {
            let value = self.heartbeats.beat(self.now, &self.timing, record.incarnation);
            let key = Key::Heartbeat(self.member.slot);
            let next = self.next_member_record(record);
            self.next_record.clone_from(&next);
            if let Some(mut update) = self.own_update() {
                update = update.set(key, &value);
                if let Some(next) = &next {
                    update = update.set(Key::Member(self.member.slot), next);
                }
                update = self.note_own(update);
                update = update.note(
                    Key::Front(self.member.slot),
                    self.own_front().as_ref(),
                    &self.object,
                );
                self.start(Pending::Heartbeat(self.now, next), Operation::Update(update));
            }
        }
        if self.next_read <= self.now && !self.is_pending(|it| matches!(it, Pending::Read(_))) {
            self.next_read = self.now + self.timing.heartbeat;
            self.start(Pending::Read(self.now), Operation::Read);
        }
        let now = self.now;
        let is_due = |group: &Group| group.retry_at.is_some_and(|at| at <= now);
        let due = self.groups.iter().filter(|(_, group)| is_due(group));
        let due: Vec<(u32, Stage)> = due.map(|(id, group)| (*id, group.stage)).collect();
        due.into_iter().for_each(|(id, stage)| self.step(id, stage));
        self.abandon_releases();
        self.release_retired();
        if self.leaving {
            self.leave();
        }
    }

    fn publish(&mut self) {
        let is_fresh = self.is_fresh();
        for (id, group) in &mut self.groups {
            let access = match group.stage {
                Stage::Serving if is_fresh => Access::Optimized,
                _ => Access::Inaccessible,
            };
            if group.published.replace(access) != Some(access) {
                self.actions.push(Action::Publish(*id, access));
            }
        }
    }

    fn is_pending(&self, kind: impl Fn(&Pending) -> bool) -> bool {
        self.pending.values().any(kind)
    }

    fn start(&mut self, pending: Pending, operation: Operation) {
        self.last_id += 1;
        let id = OperationId(self.last_id);
        self.pending.insert(id, pending);
        self.actions.push(Action::Start(id, operation));
    }
}

#[cfg(test)]
mod tests;
