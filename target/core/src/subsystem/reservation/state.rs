//! The reservation of one namespace as a state machine: registrants with their keys, holder, type,
//! and the effect of every command. No clock, file or lock; its driver persists the state and sends
//! the notifications.
//!
//! Source: NVMe Base Specification 2.0, "Reservations". Decisions where it is not specified: a key
//! of 0 cannot be registered, because 0 stands for all registrants in Preempt; a preemption without
//! a matching registrant is a conflict; preempting one's own key, without a reservation,
//! unregisters. Linux's own target answers likewise. Replacing a key by 0 unregisters: the block layer
//! of Linux unregisters hosts like this (`IOC_PR_REGISTER` with a new key of 0).

use std::collections::BTreeMap;

use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, ChangePersistence, EXTENDED_STATUS_BYTES,
    ExtendedRegistrant, NotificationType, Register, RegisterAction, RegisterKeys, Release,
    ReleaseAction, ReleaseKey, ReservationStatus, ReservationType,
};
use nvme::{IoOpcode, Sqe, Status};

/// Host identifier, as Connect gave it. What is registered is the host: all its controllers share
/// one registration.
pub type HostId = [u8; 16];

/// Most registrants of a namespace. The documents name no limit; memory does.
pub(crate) const REGISTRANTS_MAX: usize = 1024;

/// Controller id in a report for an unknown controller: ours are assigned dynamically.
const CNTLID_UNKNOWN: u16 = 0xFFFF;

/// The reservation of one namespace.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct State {
    /// Grows with every Register, Preempt and Clear that succeeds.
    pub generation: u32,
    /// Type of the reservation; none when there is none.
    pub rtype: ReservationType,
    /// The holder. None without a reservation, and when all registrants hold it.
    pub holder: Option<HostId>,
    /// Keys of the registrants; none is 0.
    pub registrants: BTreeMap<HostId, u64>,
    /// Kept through power loss (PTPL).
    pub persists: bool,
}

/// A reservation command of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Reservation Register.
    Register(Register, RegisterKeys),
    /// Reservation Acquire.
    Acquire(Acquire, AcquireKeys),
    /// Reservation Release.
    Release(Release, ReleaseKey),
    /// Feature 83h.
    Persist(bool),
}

impl Order {
    /// Bytes of data that a reservation command has; none for another command.
    pub fn data_bytes(opcode: IoOpcode) -> Option<u32> {
        match opcode {
            IoOpcode::RESERVATION_REGISTER => Some(RegisterKeys::BYTES as u32),
            IoOpcode::RESERVATION_ACQUIRE => Some(AcquireKeys::BYTES as u32),
            IoOpcode::RESERVATION_RELEASE => Some(ReleaseKey::BYTES as u32),
            _ => None,
        }
    }

    /// A reservation command and its data.
    ///
    /// # Errors
    /// Data SGL Length Invalid for too few data, Invalid Opcode for another command.
    pub fn parse(sqe: &Sqe, data: &[u8]) -> Result<Order, Status> {
        let short = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
        match sqe.io_opcode() {
            IoOpcode::RESERVATION_REGISTER => {
                let keys = RegisterKeys::parse(data.first_chunk().ok_or(short)?);
                Ok(Order::Register(Register::parse(sqe), keys))
            }
            IoOpcode::RESERVATION_ACQUIRE => {
                let keys = AcquireKeys::parse(data.first_chunk().ok_or(short)?);
                Ok(Order::Acquire(Acquire::parse(sqe), keys))
            }
            IoOpcode::RESERVATION_RELEASE => {
                let key = ReleaseKey::parse(data.first_chunk().ok_or(short)?);
                Ok(Order::Release(Release::parse(sqe), key))
            }
            _ => Err(Status::INVALID_OPCODE.with_dnr()),
        }
    }
}

/// Effects of a change, besides the new state.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Effect {
    /// Notifications for hosts.
    pub notices: Vec<(HostId, NotificationType)>,
    /// Hosts whose commands must end before the response (Preempt and Abort).
    pub aborted: Vec<HostId>,
}

/// Command groups that a host may not use, a bit each, so that it fits an atomic byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Barred(pub u8);

impl Barred {
    /// The Read command group: Read, Compare, Verify.
    pub const READ: Barred = Barred(1);
    /// The Write command group: Write, Write Zeroes, Flush, Dataset Management.
    pub const WRITE: Barred = Barred(2);
    /// Both; Copy is of both.
    pub const ALL: Barred = Barred(3);

    /// Whether commands of any of these groups are barred.
    #[inline]
    pub fn has(self, groups: Barred) -> bool {
        self.0 & groups.0 != 0
    }

    /// Checks that none of these groups is barred.
    ///
    /// # Errors
    /// Reservation Conflict.
    pub fn check(self, groups: Barred) -> Result<(), Status> {
        if self.has(groups) { Err(conflict()) } else { Ok(()) }
    }
}

impl State {
    /// Commands of `host` that are not allowed ("Command Behavior in the Presence of a
    /// Reservation").
    pub fn barred(&self, host: &HostId) -> Barred {
        let admitted = self.rtype == ReservationType::NONE
            || self.holder.as_ref() == Some(host)
            || (self.rtype.admits_registrants() && self.registrants.contains_key(host));
        match (admitted, self.rtype.excludes_readers()) {
            (true, _) => Barred(0),
            (false, false) => Barred::WRITE,
            (false, true) => Barred::ALL,
        }
    }

    /// Executes a request of `host`. `can_persist`: whether the state can be persisted.
    ///
    /// # Errors
    /// The status for the host; the state is unchanged.
    pub fn apply(
        &mut self,
        host: &HostId,
        order: &Order,
        can_persist: bool,
    ) -> Result<Effect, Status> {
        match order {
            Order::Persist(on) => self.persist(*on, can_persist),
            // A host without an identifier: its registration could not be distinguished from that
            // of others.
            _ if *host == [0; 16] => Err(Status::OPERATION_DENIED.with_dnr()),
            Order::Register(how, keys) => self.register(host, *how, keys, can_persist),
            Order::Acquire(how, keys) => self.acquire(host, *how, keys),
            Order::Release(how, key) => self.release(host, *how, key),
        }
    }

    /// The extended Reservation Status structure.
    pub fn report(&self) -> Vec<u8> {
        let count = self.registrants.len();
        let mut page =
            Vec::with_capacity(EXTENDED_STATUS_BYTES + count * ExtendedRegistrant::BYTES);
        let status = ReservationStatus {
            generation: self.generation,
            rtype: self.rtype,
            registrants: count as u16,
            ptpls: self.persists.into(),
        };
        page.extend(status.emit());
        page.resize(EXTENDED_STATUS_BYTES, 0);
        for (host, &key) in &self.registrants {
            let rcsts = u8::from(self.holds(host));
            let cntlid = CNTLID_UNKNOWN;
            page.extend(ExtendedRegistrant { cntlid, rcsts, key, hostid: *host }.emit());
        }
        page
    }

    /// Whether a registrant holds the reservation.
    pub fn holds(&self, host: &HostId) -> bool {
        match self.rtype.is_held_by_all() {
            true => self.registrants.contains_key(host),
            false => self.holder.as_ref() == Some(host),
        }
    }

    fn persist(&mut self, on: bool, can_persist: bool) -> Result<Effect, Status> {
        if on && !can_persist {
            return Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr());
        }
        self.persists = on;
        Ok(Effect::default())
    }

    fn register(
        &mut self,
        host: &HostId,
        how: Register,
        keys: &RegisterKeys,
        can_persist: bool,
    ) -> Result<Effect, Status> {
        let invalid = Status::INVALID_FIELD.with_dnr();
        let persists = match how.persistence() {
            ChangePersistence::KEEP => self.persists,
            ChangePersistence::CLEAR => false,
            ChangePersistence::SET if can_persist => true,
            _ => return Err(invalid),
        };
        let current = self.registrants.get(host).copied();
        let is_proven = how.ignore_key() || current == Some(keys.current);
        let action = match how.action() {
            RegisterAction::REPLACE if keys.new == 0 => RegisterAction::UNREGISTER,
            action => action,
        };
        let effect = match action {
            RegisterAction::REGISTER if keys.new == 0 => return Err(invalid),
            RegisterAction::REGISTER if current.is_some_and(|key| key != keys.new) => {
                return Err(conflict());
            }
            RegisterAction::UNREGISTER if current.is_none() => return Err(conflict()),
            RegisterAction::UNREGISTER | RegisterAction::REPLACE if !is_proven => {
                return Err(conflict());
            }
            RegisterAction::REGISTER | RegisterAction::REPLACE
                if current.is_none() && self.registrants.len() >= REGISTRANTS_MAX =>
            {
                return Err(Status::INTERNAL_ERROR.with_dnr());
            }
            RegisterAction::REGISTER | RegisterAction::REPLACE => {
                self.registrants.insert(*host, keys.new);
                Effect::default()
            }
            RegisterAction::UNREGISTER => {
                let is_notified = self.rtype.admits_registrants() && !self.rtype.is_held_by_all();
                let released = self.remove(host);
                self.notify_others(
                    host,
                    released && is_notified,
                    NotificationType::RESERVATION_RELEASED,
                )
            }
            _ => return Err(invalid),
        };
        self.persists = persists;
        self.count();
        Ok(effect)
    }

    fn acquire(
        &mut self,
        host: &HostId,
        how: Acquire,
        keys: &AcquireKeys,
    ) -> Result<Effect, Status> {
        if how.ignore_key() || !how.rtype().is_known() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.registrants.get(host) != Some(&keys.current) {
            return Err(conflict());
        }
        match how.action() {
            AcquireAction::ACQUIRE if self.rtype == ReservationType::NONE => {
                self.take(host, how.rtype());
                Ok(Effect::default())
            }
            AcquireAction::ACQUIRE if self.holds(host) && self.rtype == how.rtype() => {
                Ok(Effect::default())
            }
            AcquireAction::ACQUIRE => Err(conflict()),
            AcquireAction::PREEMPT => {
                let effect = self.preempt(host, keys.preempt, how.rtype())?;
                Ok(Effect { aborted: Vec::new(), ..effect })
            }
            AcquireAction::PREEMPT_AND_ABORT => self.preempt(host, keys.preempt, how.rtype()),
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    /// Unregisters the hosts with the key, and takes the reservation over if one of them is the
    /// holder. The key 0 means everybody else, if all registrants hold the reservation.
    fn preempt(
        &mut self,
        host: &HostId,
        key: u64,
        rtype: ReservationType,
    ) -> Result<Effect, Status> {
        let before = self.rtype;
        let held_by_all = before.is_held_by_all();
        if key == 0 && before != ReservationType::NONE && !held_by_all {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        let holders_key = self.holder.and_then(|holder| self.registrants.get(&holder).copied());
        let takes_over = holders_key == Some(key) || (held_by_all && key == 0);
        let all_others = held_by_all && key == 0;
        // The host that takes the reservation over stays, whatever its key.
        let gone: Vec<HostId> = self
            .registrants
            .iter()
            .filter(|&(id, k)| (all_others || *k == key) && !(takes_over && id == host))
            .map(|(id, _)| *id)
            .collect();
        if gone.is_empty() && !takes_over {
            return Err(conflict());
        }
        gone.iter().for_each(|id| {
            self.registrants.remove(id);
        });
        if takes_over {
            self.take(host, rtype);
        } else if self.registrants.is_empty() {
            self.let_go();
        }
        self.count();
        let others: Vec<HostId> = gone.into_iter().filter(|id| id != host).collect();
        let preempted = |id: &HostId| (*id, NotificationType::REGISTRATION_PREEMPTED);
        let mut notices: Vec<_> = others.iter().map(preempted).collect();
        let retyped = takes_over && before != rtype;
        let released = self.notify_others(host, retyped, NotificationType::RESERVATION_RELEASED);
        notices.extend(released.notices);
        Ok(Effect { notices, aborted: others })
    }

    fn release(&mut self, host: &HostId, how: Release, key: &ReleaseKey) -> Result<Effect, Status> {
        if how.ignore_key() {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        if self.registrants.get(host) != Some(&key.current) {
            return Err(conflict());
        }
        match how.action() {
            ReleaseAction::RELEASE if !self.holds(host) => Ok(Effect::default()),
            ReleaseAction::RELEASE if how.rtype() != self.rtype => {
                Err(Status::INVALID_FIELD.with_dnr())
            }
            ReleaseAction::RELEASE => {
                let is_notified = self.rtype.admits_registrants();
                self.let_go();
                Ok(self.notify_others(host, is_notified, NotificationType::RESERVATION_RELEASED))
            }
            ReleaseAction::CLEAR => {
                let effect =
                    self.notify_others(host, true, NotificationType::RESERVATION_PREEMPTED);
                self.let_go();
                self.registrants.clear();
                self.count();
                Ok(effect)
            }
            _ => Err(Status::INVALID_FIELD.with_dnr()),
        }
    }

    fn take(&mut self, host: &HostId, rtype: ReservationType) {
        self.rtype = rtype;
        self.holder = (!rtype.is_held_by_all()).then_some(*host);
    }

    fn let_go(&mut self) {
        self.rtype = ReservationType::NONE;
        self.holder = None;
    }

    /// Unregisters a host; returns true if the reservation ended: it was its own, or no registrant
    /// is left to hold it.
    fn remove(&mut self, host: &HostId) -> bool {
        self.registrants.remove(host);
        let shared = self.rtype.is_held_by_all() && self.registrants.is_empty();
        let released = self.holder.as_ref() == Some(host) || shared;
        if released {
            self.let_go();
        }
        released
    }

    /// Notices to all registrants but `host`.
    fn notify_others(&self, host: &HostId, is_notified: bool, what: NotificationType) -> Effect {
        let others = self.registrants.keys().filter(|id| is_notified && *id != host);
        Effect { notices: others.map(|id| (*id, what)).collect(), aborted: Vec::new() }
    }

    fn count(&mut self) {
        self.generation = self.generation.wrapping_add(1);
    }
}

fn conflict() -> Status {
    Status::RESERVATION_CONFLICT.with_dnr()
}

#[cfg(test)]
mod tests;
