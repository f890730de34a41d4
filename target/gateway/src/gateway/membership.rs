//! The membership of a gateway: its registration, its end, and what follows from a read.

use std::time::Duration;

use super::moves::Moves;
use super::{Client, Gateway, Pending};
use crate::interface::{Action, Declaration, DropReason, EndReason, Member, Operation, Stage};
use crate::record::{GroupObject, Key, MemberRecord, Membership, Slot, Update};

impl Gateway {
    pub(super) fn note_object(&mut self, sent: Duration, object: GroupObject) {
        self.object = object;
        self.heartbeats.observe(self.now, &self.object);
        self.note_next_record();
        match &self.client {
            Client::Connected(address) => {
                let address = address.clone();
                self.register(sent, address);
            }
            Client::Registered(record, since) if sent >= *since => {
                let text = self.object.text(Key::Member(self.member.slot));
                if text != Some(&record.to_string()) || self.has_lost_group(sent) {
                    self.lose_membership();
                } else {
                    self.note_steps(sent);
                    if self.is_fresh() && !self.leaving {
                        self.request_groups(sent);
                        self.give_requested();
                        self.continue_moves();
                        self.give_unreached();
                    } else {
                        // Nothing is known of the time without confirmed heartbeats.
                        self.unreached_since = None;
                    }
                }
            }
            _ => {}
        }
    }

    /// The member record is another: this incarnation was excluded, or there is a later one.
    pub(super) fn lose_membership(&mut self) {
        let seen = self.object.member(self.member.slot);
        let is_later = |record: &MemberRecord| Some(record.incarnation) > self.incarnation;
        match seen.is_some_and(|record| is_later(record) || record.name != self.member.name) {
            true => {
                self.exclude_self(DropReason::Excluded);
                self.end(EndReason::Superseded);
            }
            false => self.exclude_self(DropReason::Excluded),
        }
    }

    /// Becomes a member: the next incarnation of the slot.
    pub(super) fn register(&mut self, sent: Duration, address: String) {
        let slot = self.member.slot;
        let seen = self.object.member(slot);
        if let Some(other) = seen.filter(|seen| seen.name != self.member.name)
            && other.membership != Membership::Left
        {
            return self.end(EndReason::SlotInUse(other.name.clone()));
        }
        if let Some(own) = seen.filter(|seen| seen.address == address) {
            // A registration that was reported as failed.
            if own.membership == Membership::Live {
                self.incarnation = Some(own.incarnation);
                self.client = Client::Registered(own.clone(), self.now);
            } else {
                self.exclude_self(DropReason::Excluded);
            }
            return;
        }
        let last = seen.map_or(0, |seen| seen.incarnation);
        if self.incarnation.is_some_and(|own| last > own) {
            return self.end(EndReason::Superseded);
        }
        if self.leaving || self.is_behind() || self.differing_member(sent).is_some() {
            return;
        }
        let Member { name, declared: Declaration { digest, listeners, .. }, .. } =
            self.member.clone();
        let membership = Membership::Live;
        let incarnation = last + 1;
        let record = MemberRecord { name, incarnation, membership, address, digest, listeners };
        let value = self.heartbeats.beat(self.now, &self.timing, incarnation);
        let update = Update::default()
            .compare(Key::Member(slot), self.object.text(Key::Member(slot)))
            .set(Key::Member(slot), &record)
            .set(Key::Heartbeat(slot), &value);
        let update = self.note_own(update);
        self.client = Client::Registering;
        self.start(Pending::Register(record, self.now), Operation::Update(update));
    }

    /// The group has a version of the shared configuration that was neither applied nor refused
    /// here.
    fn is_behind(&self) -> bool {
        let newest = self.object.version().map_or(0, |version| version.number);
        self.member.applied.as_ref().is_some_and(|applied| applied.settled() < newest)
    }

    /// The update, which also says what is in force here of the shared configuration, and which
    /// hosts have keys.
    pub(super) fn note_own(&self, update: Update) -> Update {
        let Member { slot, declared, applied, .. } = &self.member;
        let update = match self.is_committing() {
            true => update,
            false => update.note(Key::Applied(*slot), applied.as_ref(), &self.object),
        };
        update.note(Key::Keyed(*slot), Some(&declared.keyed), &self.object)
    }

    /// A change at this gateway has written a version, and by the same operation that it is in force
    /// here. It is before that is known here, so the heartbeats meanwhile do not say otherwise.
    fn is_committing(&self) -> bool {
        let noted = self.object.applied(self.member.slot).map_or(0, |noted| noted.version);
        let newest = self.object.version().map_or(0, |version| version.number);
        let applied = self.member.applied.as_ref();
        noted <= newest && applied.is_some_and(|applied| applied.settled() < noted)
    }

    /// A live member that declares something else: this gateway does not join it. Members that use
    /// the shared configuration differ only until all have applied the same version.
    pub(super) fn differing_member(&self, sent: Duration) -> Option<&MemberRecord> {
        let live = self.heartbeats.live(&self.object, sent, &self.timing);
        let is_other = |slot: &Slot| {
            let shares = self.member.applied.is_some() && self.object.applied(*slot).is_some();
            *slot != self.member.slot && !shares
        };
        let others = live.filter(is_other);
        let mut members = others.filter_map(|slot| self.object.member(slot));
        members.find(|member| member.digest != self.member.declared.digest)
    }

    /// The configuration was reloaded.
    pub(super) fn declare(&mut self, declared: Declaration) {
        self.set_groups(&declared.groups);
        self.member.declared = declared;
    }

    /// The member record that is to replace the own one: the same until it is known whether it has,
    /// so that no former attempt can replace a later one.
    pub(super) fn next_member_record(&self, own: &MemberRecord) -> Option<MemberRecord> {
        let Declaration { digest, listeners, .. } = &self.member.declared;
        let (digest, listeners) = (digest.clone(), listeners.clone());
        let declared = MemberRecord { digest, listeners, ..own.clone() };
        self.next_record.clone().or_else(|| (declared != *own).then_some(declared))
    }

    /// The next member record is in the group object, although that was not reported.
    fn note_next_record(&mut self) {
        let text = self.object.text(Key::Member(self.member.slot));
        let next = self.next_record.clone();
        if let Some(next) = next.filter(|next| text == Some(&next.to_string())) {
            self.adopt_record(next);
        }
    }

    /// The next member record has replaced the own one.
    pub(super) fn adopt_record(&mut self, record: MemberRecord) {
        if self.next_record.as_ref() == Some(&record) {
            self.next_record = None;
            self.client = Client::Registered(record, self.now);
        }
    }

    /// An update that holds only as long as this incarnation is a member.
    pub(super) fn own_update(&self) -> Option<Update> {
        let Client::Registered(record, _) = &self.client else { return None };
        let key = Key::Member(self.member.slot);
        Some(Update::default().compare(key, Some(&record.to_string())))
    }

    /// This incarnation is over: no group is served, its data client is dropped, and another one
    /// is connected. What is under way is forgotten; its updates compare the former record.
    pub(super) fn exclude_self(&mut self, reason: DropReason) {
        self.heartbeats.reset();
        self.next_record = None;
        self.moves = Moves::default();
        self.unreached_since = None;
        for group in self.groups.values_mut() {
            group.stage = Stage::Standby;
            group.record = None;
            group.retry_at = None;
            group.vacant_since = None;
        }
        self.publish();
        self.pending.clear();
        self.actions.push(Action::DropClient(reason));
        self.client = Client::Missing(self.now);
    }

    pub(super) fn end(&mut self, reason: EndReason) {
        self.ended = true;
        self.actions.push(Action::End(reason));
    }
}
