//! Write protection of namespaces, as set by hosts (feature 84h).
//!
//! All controllers of a subsystem share the state of a namespace, one byte that I/O reads. The
//! worker changes it, one request after another, and persists it in a file before it answers. A
//! power cycle is a start of the daemon: protection until then ends with it. Without a directory
//! for the file there is no such feature, because "permanent" would be untrue. In a gateway group
//! there is no power cycle: the namespace would be writable as soon as another gateway serves it.
//!
//! ```text
//! No Write Protect ◄──► Write Protect
//!         │                   │
//!         └────────┬──────────┘──► Permanent Write Protect          (never changes)
//!                  └─────────────► Write Protect Until Power Cycle  (changes with a start)
//! ```
//!
//! Source: NVMe Base Specification 2.0, "Namespace Write Protection" and "Namespace Write
//! Protection Config (Feature Identifier 84h)".

use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};
use tracing::info;

use crate::subsystem::persistence::{Persist, Section, not_persisted};

/// NWPC: all four states, if they can be persisted.
const NWPC: u8 = 0b111;
/// NWPC in a gateway group: without Write Protect Until Power Cycle.
const NWPC_OF_GROUP: u8 = 0b101;

/// The write protection of one namespace, shared by all its users. Compared by identity.
#[derive(Debug)]
pub struct Protection {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace in it.
    pub nsid: u32,
    state: AtomicU8,
    /// Whether the namespace is being formatted: the state stays.
    held: Mutex<bool>,
    /// Where it is persisted; hosts cannot change one that is not.
    file: Option<Box<dyn Persist>>,
}

impl Protection {
    /// One that hosts cannot change, because it could not be persisted.
    pub fn none(subsystem: Nqn, nsid: u32) -> Arc<Protection> {
        let state = AtomicU8::new(WriteProtectState::NONE.0);
        Arc::new(Protection { subsystem, nsid, state, held: Mutex::default(), file: None })
    }

    /// One that is persisted in `file`, with its present contents.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or is invalid. Such a file is never ignored:
    /// hosts may rely on its contents.
    pub fn kept(
        subsystem: Nqn,
        nsid: u32,
        file: impl Persist + 'static,
    ) -> Result<Arc<Protection>, String> {
        let file: Box<dyn Persist> = Box::new(file);
        let state = file.load()?.unwrap_or(WriteProtectState::NONE);
        let (state, file) = (AtomicU8::new(state.0), Some(file));
        Ok(Arc::new(Protection { subsystem, nsid, state, held: Mutex::default(), file }))
    }

    /// Whether hosts can change it.
    pub fn is_supported(&self) -> bool {
        self.file.is_some()
    }

    /// Whether the namespace is one of a gateway group, and so is not protected until a power cycle.
    pub fn is_of_group(&self) -> bool {
        self.file.as_ref().is_some_and(|file| file.is_of_group())
    }

    /// Namespace Write Protection Capabilities.
    pub(crate) fn nwpc(&self) -> u8 {
        match (self.is_supported(), self.is_of_group()) {
            (false, _) => 0,
            (true, true) => NWPC_OF_GROUP,
            (true, false) => NWPC,
        }
    }

    /// The present state.
    pub fn state(&self) -> WriteProtectState {
        WriteProtectState(self.state.load(Ordering::Acquire))
    }

    /// Whether writes are refused.
    #[inline]
    pub fn is_on(&self) -> bool {
        self.state.load(Ordering::Relaxed) != WriteProtectState::NONE.0
    }

    /// Whether a host may set this state now.
    ///
    /// # Errors
    /// Invalid Field for a state that there is not; Feature Not Changeable for any but the one that
    /// it has, when that is permanent or lasts until a power cycle.
    pub fn check(&self, new: WriteProtectState) -> Result<(), Status> {
        let old = self.state();
        match old {
            _ if new.name().is_none() => Err(Status::INVALID_FIELD.with_dnr()),
            _ if new == WriteProtectState::UNTIL_POWER_CYCLE && self.is_of_group() => {
                Err(Status::INVALID_FIELD.with_dnr())
            }
            WriteProtectState::NONE | WriteProtectState::PROTECTED => Ok(()),
            _ if new == old => Ok(()),
            _ => Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr()),
        }
    }

    /// Sets a state: persists it, and then makes it effective. For the state worker alone. Returns
    /// true if it has changed.
    ///
    /// # Errors
    /// As [`Protection::check`]; Format in Progress while it is held; Internal Error if it cannot
    /// be persisted: it is unchanged then.
    pub fn change(&self, new: WriteProtectState) -> Result<bool, Status> {
        let held = self.held();
        self.check(new)?;
        let old = self.state();
        if old == new || !self.is_supported() {
            return Ok(false);
        }
        if *held {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if let Some(file) = &self.file {
            file.replace(lasting(&new), lasting(&old))
                .map_err(|failure| not_persisted(&failure))?;
        }
        self.state.store(new.0, Ordering::Release);
        drop(held);
        let name = new.name().unwrap_or_default();
        info!(subsystem = %self.subsystem, nsid = self.nsid, "write protection is now: {name}");
        Ok(true)
    }

    /// Loads what is persisted: another daemon has changed it, and this one takes the namespace.
    /// Returns true if the state has changed.
    ///
    /// # Errors
    /// As [`Protection::kept`]; the state is unchanged.
    pub fn reload(&self) -> Result<bool, String> {
        let _unchanged = self.held();
        let Some(file) = &self.file else { return Ok(false) };
        let state = file.load()?.unwrap_or(WriteProtectState::NONE);
        Ok(self.state.swap(state.0, Ordering::AcqRel) != state.0)
    }

    /// Prevents changes of the state while the namespace is formatted, deleted or rolled back, until
    /// the returned value is dropped.
    ///
    /// # Errors
    /// Namespace is Write Protected; Format in Progress while another caller holds it.
    pub fn hold(self: &Arc<Self>) -> Result<WriteProtectGuard, Status> {
        let mut held = self.held();
        if self.is_on() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        if *held {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        *held = true;
        Ok(WriteProtectGuard(Arc::clone(self)))
    }

    fn held(&self) -> MutexGuard<'_, bool> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Prevents changes of a state.
#[derive(Debug)]
pub struct WriteProtectGuard(Arc<Protection>);

impl Drop for WriteProtectGuard {
    fn drop(&mut self) {
        *self.0.held() = false;
    }
}

impl PartialEq for Protection {
    fn eq(&self, other: &Protection) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Protection {}

/// The state after a restart.
fn lasting(state: &WriteProtectState) -> Option<&WriteProtectState> {
    use WriteProtectState as States;
    Some(state).filter(|state| [States::PROTECTED, States::PERMANENT].contains(state))
}

impl Section for WriteProtectState {
    const NAME: &'static str = "protection";

    fn emit(&self) -> String {
        format!("state {}\n", self.0)
    }

    fn parse(body: &str) -> Option<WriteProtectState> {
        let state = body.strip_prefix("state ")?.trim_end().parse().map(WriteProtectState).ok()?;
        lasting(&state).copied()
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::persistence::tests::MemorySections;
    use crate::subsystem::write_protect::*;

    const STATES: [WriteProtectState; 4] = [
        WriteProtectState::NONE,
        WriteProtectState::PROTECTED,
        WriteProtectState::UNTIL_POWER_CYCLE,
        WriteProtectState::PERMANENT,
    ];

    fn made(store: &MemorySections) -> Arc<Protection> {
        let nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        Protection::kept(nqn, 1, store.clone()).unwrap()
    }

    #[test]
    fn write_protect_states_change_and_survive_restarts_as_specified() {
        let refused = Err(Status::FEATURE_NOT_CHANGEABLE.with_dnr());
        for from in STATES {
            for to in STATES {
                let store = MemorySections::default();
                let protection = made(&store);
                assert_eq!(protection.change(from), Ok(from.0 != 0));
                let expected = match (from.0, to.0) {
                    (0 | 1, _) => Ok(from != to),
                    (2 | 3, _) if from == to => Ok(false),
                    _ => refused,
                };
                assert_eq!(protection.change(to), expected, "{from} to {to}");
                let now = if expected.is_ok() { to } else { from };
                assert_eq!((protection.state(), protection.is_on()), (now, now.0 != 0));
                // A start of the daemon is a power cycle.
                let later = if now.0 == 2 { 0 } else { now.0 };
                assert_eq!(made(&store).state().0, later, "{from} to {to}");
            }
        }
    }

    #[test]
    fn a_reload_reports_whether_another_daemon_has_changed_the_state() {
        let store = MemorySections::default();
        let (own, other) = (made(&store), made(&store));
        assert_eq!(own.reload(), Ok(false));
        for state in [WriteProtectState::PROTECTED, WriteProtectState::NONE] {
            other.change(state).unwrap();
            assert_eq!((own.reload(), own.state()), (Ok(true), state));
            assert_eq!(own.reload(), Ok(false));
        }
    }

    /// The start of one gateway, or the service by another, would end it.
    #[test]
    fn namespaces_of_a_gateway_group_are_not_protected_until_a_power_cycle() {
        let protection = made(&MemorySections::of_group());
        let refused = Err(Status::INVALID_FIELD.with_dnr());
        assert_eq!(protection.change(WriteProtectState::UNTIL_POWER_CYCLE), refused);
        assert_eq!(protection.nwpc(), 0b101);
        for state in [WriteProtectState::PROTECTED, WriteProtectState::PERMANENT] {
            assert_eq!(protection.change(state), Ok(true));
        }
        assert_eq!(made(&MemorySections::default()).nwpc(), 0b111);
    }

    #[test]
    fn unknown_write_protect_states_are_refused() {
        let store = MemorySections::default();
        let protection = made(&store);
        for state in 4..8 {
            let refused = protection.change(WriteProtectState(state));
            assert_eq!(refused, Err(Status::INVALID_FIELD.with_dnr()));
        }
    }

    #[test]
    fn erasing_and_write_protection_exclude_each_other() {
        let store = MemorySections::default();
        let protection = made(&store);
        let held = protection.hold().unwrap();
        for state in &STATES[1..] {
            assert_eq!(protection.change(*state), Err(Status::FORMAT_IN_PROGRESS));
        }
        assert!(!protection.is_on());
        drop(held);
        assert_eq!(protection.change(WriteProtectState::PROTECTED), Ok(true));
        let refused = protection.hold().map(drop);
        assert_eq!(refused, Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()));
        assert_eq!(protection.change(WriteProtectState::NONE), Ok(true));
    }

    #[test]
    fn an_unpersisted_write_protect_state_is_not_applied() {
        let store = MemorySections::default();
        let protection = made(&store);
        store.fail(true);
        let failed = protection.change(WriteProtectState::PERMANENT);
        assert_eq!(failed, Err(Status::INTERNAL_ERROR));
        assert!(!protection.is_on());
        store.fail(false);
        assert_eq!(protection.change(WriteProtectState::PROTECTED), Ok(true));
    }
}
