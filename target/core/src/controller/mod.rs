//! The controller: its state (CC and CSTS), keep alive, events. One per admin queue, owned by it.
//!
//! ```text
//!            CC.EN 0→1, good settings            CC.SHN = 01b or 10b
//! Disabled ───────────────────────────► Ready ───────────────────────► ShuttingDown
//!     ▲   └── bad settings ──► Failed     │                                 │ flushed
//!     └────────── CC.EN 1→0 ──────────────┴──────── CC.EN = 0 ◄──────── ShutDown, or Unflushed
//! ```
//!
//! Source: NVMe Base Specification 2.0, "Controller Properties", "Keep Alive".

pub mod aer;
pub mod association;
pub mod discovery;
mod features;
mod reservation_view;
mod timestamp;

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use nvme::Status;
use nvme::property::{Cap, Cc, Crto, Csts, Property, Shutdown, ShutdownStatus, Vs};

use crate::sched::Adoption;
use crate::sched::abort::AbortRequest;
use crate::subsystem::ana::AnaLog;
use crate::subsystem::{AccessPolicy, Namespace, Subsystem};
use aer::AsyncEvents;
use association::Association;
use nvmfd_blockdev::DeviceId;

use discovery::DiscoveryLog;

pub use features::Features;
pub use reservation_view::ReservationView;
pub use timestamp::ControllerTimestamp;

/// Maximum of outstanding Abort commands: ACL + 1.
pub(crate) const ABORTS: usize = 4;

/// Command retry delays (CRDT1 to CRDT3) in units of 100 ms: for short conditions, and for those
/// that end by an administrator or another machine; the third is not used.
pub(crate) const RETRY_DELAYS_100MS: [u16; 3] = [10, 50, 0];

/// Keep Alive granularity (KAS), in units of 100 ms.
pub(crate) const KAS_100MS: u16 = 10;

/// Tolerance for a late Keep Alive. A command is seen up to a tick after its arrival, the receipt of
/// a response up to two, and the timeout up to one: with three ticks of 250 ms it is a second at most.
const KEEP_ALIVE_MARGIN: Duration = Duration::from_millis(250);

/// Maximum of the keep alive timeout, in milliseconds: a host that has failed keeps its memory for
/// as long. Equal to the silence that is tolerated without keep alive; hosts use 5 s.
pub(crate) const KEEP_ALIVE_MAX_MS: u32 = 2 * 3600 * 1000;

/// As [`KEEP_ALIVE_MAX_MS`], for a discovery controller, which any host may create; hosts use 30 s.
pub(crate) const KEEP_ALIVE_DISCOVERY_MAX_MS: u32 = 600 * 1000;

/// Time after which a namespace that has replaced another one is reported again: by then a host has
/// removed the former one on all of its paths, which it had the first event on at once.
const REPLACED: Duration = Duration::from_secs(1);

/// Maximum silence of a discovery controller without keep alive.
const DISCOVERY_IDLE: Duration = Duration::from_secs(120);

/// Maximum silence of an I/O controller without keep alive: a host that lost power sends no
/// disconnect, and must not keep its memory for ever. As long as the timeout of TCP.
const IDLE: Duration = Duration::from_secs(2 * 3600);

/// The version that we implement.
pub const VERSION: Vs = Vs::V2_1;
/// Time within which a controller becomes ready, in units of 500 ms (CAP.TO, CRTO.CRWMT).
const READY_TIMEOUT_500MS: u8 = 15;

/// Limits of the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Entries of an I/O queue (MQES + 1).
    pub queue_depth: u16,
    /// I/O queues of a controller.
    pub io_queues: u16,
    /// In-capsule data of an I/O command in bytes; a multiple of 4096.
    pub in_capsule_bytes: u32,
    /// Largest transfer in bytes: 4096 times a power of two.
    pub mdts_bytes: u32,
}

impl Limits {
    /// Reduced to those of a subsystem.
    #[must_use]
    pub fn within(self, offer: &AccessPolicy) -> Limits {
        Limits {
            queue_depth: self.queue_depth.min(offer.queue_depth.unwrap_or(u16::MAX)),
            io_queues: self.io_queues.min(offer.io_queues.unwrap_or(u16::MAX)),
            mdts_bytes: self.mdts_bytes.min(offer.mdts_bytes.unwrap_or(u32::MAX)),
            ..self
        }
    }
}

/// Kind of a controller.
#[derive(Debug)]
pub enum ControllerKind {
    /// An NVM subsystem.
    Nvm(Arc<Subsystem>),
    /// Discovery.
    Discovery(Box<DiscoveryLog>),
}

/// State of a controller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ControllerState {
    /// Connected, not enabled.
    Disabled,
    /// Serving.
    Ready,
    /// CSTS.CFS: enabled with settings that we do not have, or dead.
    Failed,
    /// Flushing.
    ShuttingDown,
    /// CSTS.SHST = 10b.
    ShutDown,
    /// CSTS.CFS, and CSTS.SHST = 01b until a reset: a flush of the shutdown has failed. A host that
    /// read "complete" would consider what it has written as durable.
    Unflushed,
}

/// Effect of a change of Controller Configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum CcEffect {
    /// Nothing more: the command completes.
    Done,
    /// A shutdown has begun: flush, then report that it is complete.
    ShutDown {
        /// Its number among those of the controller.
        number: u32,
        /// The stores, one after another.
        backings: Vec<DeviceId>,
    },
}

/// The controller of one association.
#[derive(Debug)]
pub struct Controller {
    /// State shared with its queues.
    pub association: Arc<Association>,
    /// The subsystem, or the discovery service.
    pub role: ControllerKind,
    /// Limits granted to its host.
    pub limits: Limits,
    /// The address by which the host reached us.
    pub local: SocketAddr,
    /// Feature values.
    pub features: Features,
    /// Value of the Timestamp feature.
    pub timestamp: ControllerTimestamp,
    /// Asynchronous events.
    pub events: AsyncEvents,
    /// Abort commands that wait for their outcome: their slots, oldest first.
    pub aborts: Vec<(u16, AbortRequest)>,
    /// ANA states of groups as reported to the host; empty for a discovery controller.
    pub ana: AnaLog,
    /// Persistent Event log as frozen by the reporting context of its host.
    pub reporting: Option<Arc<[u8]>>,
    /// A backing store was degraded at the last check.
    degraded: bool,
    /// Namespaces that the host was given as not ready: a host may ignore one until an event.
    not_ready: BTreeSet<u32>,
    /// Namespaces that have replaced others of the same id, to be reported once more.
    replaced: BTreeSet<u32>,
    /// When they are reported, once the host has read of them.
    replaced_until: Option<Instant>,
    /// The last change, until every reactor has adopted it and those before.
    adoption: Weak<Adoption>,
    cc: Cc,
    life: ControllerState,
    /// Number of shutdowns that have begun.
    shutdowns: u32,
    kato: Duration,
}

impl Controller {
    /// A new controller. `kato_ms` 0 means no keep alive.
    pub fn new(
        association: Arc<Association>,
        role: ControllerKind,
        limits: Limits,
        local: SocketAddr,
        kato_ms: u32,
        now: Instant,
    ) -> Controller {
        let mut controller = Controller {
            association,
            role,
            limits,
            local,
            features: Features::default(),
            timestamp: ControllerTimestamp::new(now),
            events: AsyncEvents::default(),
            aborts: Vec::with_capacity(ABORTS),
            ana: AnaLog::default(),
            reporting: None,
            degraded: false,
            not_ready: BTreeSet::new(),
            replaced: BTreeSet::new(),
            replaced_until: None,
            adoption: Weak::new(),
            cc: Cc(0),
            life: ControllerState::Disabled,
            shutdowns: 0,
            kato: Duration::ZERO,
        };
        controller.set_kato_ms(kato_ms, now);
        controller.reset_ana();
        controller
    }

    /// Whether this is a discovery controller.
    pub fn is_discovery(&self) -> bool {
        matches!(self.role, ControllerKind::Discovery(_))
    }

    /// The NVM subsystem it serves, if any.
    pub fn subsystem(&self) -> Option<&Arc<Subsystem>> {
        match &self.role {
            ControllerKind::Nvm(subsystem) => Some(subsystem),
            ControllerKind::Discovery(_) => None,
        }
    }

    /// Its state.
    pub fn life(&self) -> ControllerState {
        self.life
    }

    /// Controller capabilities.
    pub fn cap(&self) -> Cap {
        Cap(0)
            .with_mqes_z(self.limits.queue_depth - 1)
            .with_cqr(true)
            .with_to_500ms(READY_TIMEOUT_500MS)
            .with_css(Cap::CSS_NVM)
            .with_crwms(true)
    }

    /// Controller status. RDY is cleared only when the last I/O queue is closed, so a host that
    /// reads 0 knows that no earlier command is in progress.
    pub fn csts(&self) -> Csts {
        let draining = self.life == ControllerState::Disabled && self.association.io_queues() > 0;
        let shst = match self.life {
            ControllerState::ShuttingDown | ControllerState::Unflushed => ShutdownStatus::Occurring,
            ControllerState::ShutDown => ShutdownStatus::Complete,
            _ => ShutdownStatus::Normal,
        };
        Csts(0)
            .with_rdy(self.life == ControllerState::Ready || draining)
            .with_cfs(matches!(self.life, ControllerState::Failed | ControllerState::Unflushed))
            .with_shst(shst)
    }

    /// Property Get: the value of a property of `size_bytes`.
    ///
    /// # Errors
    /// Invalid Field for a property that we do not have or that has another size. Without Do Not
    /// Retry: `nvme show-regs` reads all offsets and accepts no other status for a missing one.
    pub fn property(&self, property: Property, size_bytes: Option<u32>) -> Result<u64, Status> {
        if size_bytes.is_none() || property.size_bytes() != size_bytes {
            return Err(Status::INVALID_FIELD);
        }
        match property {
            Property::CAP => Ok(self.cap().0),
            Property::VS => Ok(VERSION.0.into()),
            Property::CC => Ok(self.cc.0.into()),
            Property::CSTS => Ok(self.csts().0.into()),
            Property::CRTO => Ok(Crto(0).with_crwmt_500ms(READY_TIMEOUT_500MS.into()).0.into()),
            _ => Err(Status::INVALID_FIELD),
        }
    }

    /// Property Set: only Controller Configuration can be set.
    ///
    /// # Errors
    /// Invalid Field for anything else.
    pub fn set_property(
        &mut self,
        property: Property,
        size_bytes: Option<u32>,
        value: u64,
    ) -> Result<CcEffect, Status> {
        if property != Property::CC || size_bytes != Some(4) {
            return Err(Status::INVALID_FIELD.with_dnr());
        }
        Ok(self.configure(Cc(value as u32)))
    }

    /// The flushes of a shutdown are done; `durable`: all have succeeded. One that the host has taken
    /// back, or ended by a reset, completes no later one.
    pub(crate) fn shut_down_complete(&mut self, number: u32, durable: bool) {
        if self.life == ControllerState::ShuttingDown && number == self.shutdowns {
            self.life =
                if durable { ControllerState::ShutDown } else { ControllerState::Unflushed };
        }
    }

    /// Fatal error: CSTS.CFS is set, the host gets an event, and the I/O queues close, until the
    /// host resets the controller ("Controller Status", "Asynchronous Event Information - Error
    /// Status"). Returns false if it serves nothing that could fail.
    pub(crate) fn fail_fatally(&mut self) -> bool {
        if self.life != ControllerState::Ready {
            return false;
        }
        self.life = ControllerState::Failed;
        self.association.next_epoch();
        self.association.set_ready(false);
        self.events.failed();
        true
    }

    /// The connection or the host is lost: no command is served any more.
    pub fn fail(&mut self) {
        self.life = ControllerState::Failed;
        self.association.close();
    }

    /// Maximum of the keep alive timeout for its host, in milliseconds.
    pub(crate) fn keep_alive_max_ms(&self) -> u32 {
        if self.is_discovery() { KEEP_ALIVE_DISCOVERY_MAX_MS } else { KEEP_ALIVE_MAX_MS }
    }

    /// Keep alive timeout in milliseconds as granted; 0 when there is none.
    pub fn kato_ms(&self) -> u32 {
        self.kato.as_millis() as u32
    }

    /// Sets the keep alive timeout: at least what the listener grants, rounded up to the
    /// granularity. 0 stays none.
    pub(crate) fn set_kato_ms(&mut self, kato_ms: u32, now: Instant) {
        let step = u32::from(KAS_100MS) * 100;
        let asked = if kato_ms == 0 { 0 } else { kato_ms.max(self.association.keep_alive_min_ms) };
        let granted = asked.min(self.keep_alive_max_ms()).next_multiple_of(step);
        self.kato = Duration::from_millis(granted.into());
        self.association.start_keep_alive(self.keep_alive_timeout(), now);
    }

    /// Checks the keep alive timeout; returns true if the host has been silent for too long.
    pub fn expired(&mut self, now: Instant) -> bool {
        self.association.restart_keep_alive(now);
        self.association.is_keep_alive_expired(now, now)
    }

    /// Takes a new snapshot of the subsystem and raises the event for what differs.
    pub(crate) fn replace_subsystem(&mut self, new: Arc<Subsystem>) {
        let ControllerKind::Nvm(old) = &mut self.role else { return };
        let differing = |a: &Subsystem, b: &Subsystem| {
            let unlike = |n: &&Namespace| {
                // A namespace in another group is reported by the event of groups, and the start of
                // a format is not a change that is useful to other hosts.
                let same = |m: &Namespace| {
                    let (ana_group, formatting) = (n.ana_group, n.formatting.clone());
                    Namespace { ana_group, formatting, ..m.clone() } == **n
                };
                !b.namespace(n.nsid).is_ok_and(same)
            };
            a.namespaces.iter().filter(unlike).map(|n| n.nsid).collect::<Vec<_>>()
        };
        let mut changed = differing(old, &new);
        changed.extend(differing(&new, old));
        let ids = |n: &Namespace| (n.uuid, n.nguid, n.eui64);
        let replaces = |nsid: &u32| {
            // The host may find both a removal and an addition when it reads of the first.
            let is_other = |n: &Namespace| match old.namespace(*nsid) {
                Ok(old) => ids(old) != ids(n),
                Err(_) => self.events.has_changed(*nsid),
            };
            new.namespace(*nsid).is_ok_and(is_other)
        };
        self.replaced.extend(changed.iter().copied().filter(replaces));
        *old = new;
        if !changed.is_empty() {
            self.events.namespaces_changed(changed);
        }
        self.note_ana();
    }

    /// Events of a change that reactors adopt are sent when all have.
    pub(crate) fn await_adoption(&mut self, adoption: &Arc<Adoption>) {
        self.adoption = Arc::downgrade(adoption);
    }

    /// The next event to send: slot and dword 0.
    pub(crate) fn next_event(&mut self) -> Option<(u16, u32)> {
        let is_adopted = self.adoption.strong_count() == 0;
        is_adopted.then(|| self.events.next(self.features.async_event_config())).flatten()
    }

    /// Checks the health of backing stores, and raises events if one has become degraded, or one
    /// that was reported as not ready is ready.
    pub(crate) fn look_at_stores(&mut self) {
        let ControllerKind::Nvm(subsystem) = &self.role else { return };
        let degraded = subsystem.is_degraded();
        if degraded && !self.degraded {
            self.events.reliability_degraded();
        }
        self.degraded = degraded;
        let ready = |nsid: &u32| subsystem.namespace(*nsid).is_ok_and(|n| !n.health.is_down());
        let (changed, rest) = std::mem::take(&mut self.not_ready).into_iter().partition(ready);
        self.not_ready = rest;
        let changed: BTreeSet<u32> = changed;
        if !changed.is_empty() {
            self.events.namespaces_changed(changed);
        }
    }

    /// Reports namespaces that have replaced others once more, after the host has read of them. Linux
    /// removes a namespace whose identifiers have changed, and adds the new one by its next scan, for
    /// which it needs an event.
    pub(crate) fn look_at_replaced(&mut self, now: Instant) {
        if self.replaced.is_empty() || !self.events.is_up_to_date() {
            self.replaced_until = None;
        } else if now >= *self.replaced_until.get_or_insert(now + REPLACED) {
            self.events.namespaces_changed(std::mem::take(&mut self.replaced));
        }
    }

    /// The host was given this namespace as not ready.
    pub(crate) fn reported_not_ready(&mut self, nsid: u32) {
        self.not_ready.insert(nsid);
    }

    /// Checks the ANA states of groups, and which namespaces are in standby, and raises the event if
    /// that has changed.
    pub(crate) fn look_at_paths(&mut self) {
        let ControllerKind::Nvm(subsystem) = &self.role else { return };
        if !self.ana.is_current(subsystem, &self.association.reach.states()) {
            self.note_ana();
        }
    }

    fn note_ana(&mut self) {
        let ControllerKind::Nvm(subsystem) = &self.role else { return };
        if self.ana.update(subsystem, self.association.reach.states()) {
            self.events.ana_changed();
        }
    }

    fn reset_ana(&mut self) {
        if let ControllerKind::Nvm(subsystem) = &self.role {
            self.ana = AnaLog::new(subsystem, self.association.reach.states());
        }
    }

    fn keep_alive_timeout(&self) -> Duration {
        match (self.kato.is_zero(), self.is_discovery()) {
            (false, _) => self.kato + KEEP_ALIVE_MARGIN,
            (true, true) => DISCOVERY_IDLE,
            (true, false) => IDLE,
        }
    }

    fn configure(&mut self, new: Cc) -> CcEffect {
        let old = std::mem::replace(&mut self.cc, new);
        if old.en() && !new.en() {
            self.life = ControllerState::Disabled;
            self.association.next_epoch();
            self.association.set_ready(false);
            self.features = Features::default();
            self.association.allow_retry_delays(false);
            self.events.reset();
            self.reporting = None;
            self.degraded = false;
            self.not_ready.clear();
            self.replaced.clear();
            self.association.reservations.reset();
            self.reset_ana();
        } else if !old.en() && new.en() {
            self.enable(new);
        }
        let wanted = matches!(new.shn(), Shutdown::Normal | Shutdown::Abrupt);
        match self.life {
            ControllerState::ShuttingDown | ControllerState::ShutDown if !wanted && new.en() => {
                // The host takes the shutdown back: CC.SHN = 00b clears CSTS.SHST.
                self.enable(new);
            }
            ControllerState::Disabled | ControllerState::Ready if wanted => {
                self.life = ControllerState::ShuttingDown;
                self.association.set_ready(false);
                self.shutdowns = self.shutdowns.wrapping_add(1);
                return CcEffect::ShutDown { number: self.shutdowns, backings: self.backings() };
            }
            _ => {}
        }
        CcEffect::Done
    }

    fn enable(&mut self, cc: Cc) {
        let sizes = cc.iosqes() == Cc::SQE_64_BYTES && cc.iocqes() == Cc::CQE_16_BYTES;
        // A discovery controller has no I/O queues, so their entry sizes may be anything.
        let good = (sizes || self.is_discovery())
            && cc.mps() == 0
            && cc.ams() == 0
            && cc.css() == Cc::CSS_NVM;
        self.life = if good { ControllerState::Ready } else { ControllerState::Failed };
        self.association.set_ready(good);
    }

    fn backings(&self) -> Vec<DeviceId> {
        let namespaces = self.subsystem().map_or(&[][..], |s| &s.namespaces);
        namespaces.iter().filter(|n| n.volatile_cache).map(|n| n.backing).collect()
    }
}

#[cfg(test)]
mod tests {
    use nvme::log::AnaState;

    use crate::controller::aer::Event;
    use crate::controller::*;
    use crate::subsystem::ana::AnaStates;
    use crate::subsystem::testing::sample;

    const EN: u64 = 0x0046_0001;

    fn controller() -> Controller {
        let nqn = sample().nqn;
        let association = Arc::new(Association::new(1, 1, nqn, nqn, [0; 16]));
        let limits =
            Limits { queue_depth: 128, io_queues: 4, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };
        let role = ControllerKind::Nvm(Arc::new(sample()));
        let local = "192.0.2.1:4420".parse().unwrap();
        Controller::new(association, role, limits, local, 5000, Instant::now())
    }

    fn set(controller: &mut Controller, value: u64) -> CcEffect {
        controller.set_property(Property::CC, Some(4), value).unwrap()
    }

    fn csts(controller: &Controller) -> u64 {
        controller.property(Property::CSTS, Some(4)).unwrap()
    }

    #[test]
    fn supported_properties_are_read_and_others_are_refused() {
        let mut controller = controller();
        assert_eq!(controller.property(Property::CAP, Some(8)), Ok(0x0800_0020_0F01_007F));
        assert_eq!(controller.property(Property::VS, Some(4)), Ok(0x2_0100));
        assert_eq!(controller.property(Property::CRTO, Some(4)), Ok(15), "as CAP.TO");
        assert_eq!(controller.property(Property::CC, Some(4)), Ok(0));
        for (property, size) in [
            (Property::CAP, Some(4)),
            (Property::VS, Some(8)),
            (Property::VS, None),
            (Property::NSSR, Some(4)),
            (Property::CRTO, Some(8)),
            (Property(0x0C), Some(4)),
            (Property(u32::MAX), Some(8)),
        ] {
            assert_eq!(controller.property(property, size), Err(Status::INVALID_FIELD));
        }
        for (property, size) in [
            (Property::CAP, Some(8)),
            (Property::CSTS, Some(4)),
            (Property::NSSR, Some(4)),
            (Property::CC, Some(8)),
            (Property::CC, None),
        ] {
            let status = controller.set_property(property, size, EN).unwrap_err();
            assert_eq!(status, Status::INVALID_FIELD.with_dnr());
        }
        assert_eq!(csts(&controller), 0, "nothing was set");
    }

    #[test]
    fn a_controller_is_ready_only_with_supported_settings() {
        for (value, ready) in [
            (EN, 1),
            (0x0045_0001, 2), // completion entries of another size
            (0x0036_0001, 2),
            (EN | 1 << 7, 2),  // memory pages of 8 KiB
            (EN | 1 << 11, 2), // another arbitration
            (EN | 6 << 4, 2),  // all command sets
        ] {
            let mut controller = controller();
            assert_eq!(set(&mut controller, value), CcEffect::Done, "status is success");
            assert_eq!(csts(&controller), ready, "CC {value:#x}");
            assert_eq!(controller.association.is_ready(), ready == 1);
            set(&mut controller, 0);
            assert_eq!(csts(&controller), 0, "disabling heals");
        }
    }

    #[test]
    fn a_reset_completes_when_the_last_io_queue_is_removed() {
        let mut controller = controller();
        set(&mut controller, EN);
        controller.association.count_io_queue(true);
        let epoch = controller.association.epoch();
        set(&mut controller, 0);
        assert_ne!(controller.association.epoch(), epoch, "I/O queues are told");
        assert!(!controller.association.is_ready());
        assert_eq!(csts(&controller), 1);
        controller.association.count_io_queue(false);
        assert_eq!(csts(&controller), 0);
    }

    #[test]
    fn shutdown_flushes_devices_with_a_cache_and_completes() {
        for value in [EN | 1 << 14, EN | 2 << 14] {
            let mut controller = controller();
            set(&mut controller, EN);
            let CcEffect::ShutDown { number, backings } = set(&mut controller, value) else {
                panic!()
            };
            assert_eq!(backings, [0, 1, 6].map(DeviceId));
            assert_eq!(csts(&controller) & 0xC, 4, "occurring");
            controller.shut_down_complete(number, true);
            assert_eq!(csts(&controller) & 0xC, 8, "complete");
            assert!(!controller.association.is_ready());
            set(&mut controller, EN);
            assert_eq!(csts(&controller), 1, "taken back");
        }
    }

    #[test]
    fn the_keep_alive_timeout_is_rounded_up_and_bounded() {
        let mut controller = controller();
        let now = Instant::now();
        for (asked, granted) in [(0, 0), (1, 1000), (5000, 5000), (u32::MAX, 7_200_000)] {
            controller.set_kato_ms(asked, now);
            assert_eq!(controller.kato_ms(), granted);
        }
        let mut association = Association::new(1, 1, sample().nqn, sample().nqn, [0; 16]);
        association.keep_alive_min_ms = 15_500;
        controller.association = Arc::new(association);
        for (asked, granted) in [(0, 0), (1, 16_000), (15_500, 16_000), (20_000, 20_000)] {
            controller.set_kato_ms(asked, now);
            assert_eq!(controller.kato_ms(), granted);
        }
    }

    #[test]
    fn controllers_without_keep_alive_expire_after_long_inactivity() {
        let mut controller = controller();
        let now = Instant::now();
        controller.set_kato_ms(0, now);
        assert!(!controller.expired(now + Duration::from_secs(7199)));
        assert!(controller.expired(now + Duration::from_secs(7200)));
        controller.role =
            ControllerKind::Discovery(Box::new(DiscoveryLog::new(nvme::Nqn::DISCOVERY, &[])));
        controller.set_kato_ms(0, now);
        assert!(!controller.expired(now + Duration::from_secs(119)));
        assert!(controller.expired(now + Duration::from_secs(120)));
    }

    #[test]
    fn namespace_changes_between_snapshots_are_reported() {
        let mut controller = controller();
        let mut next = Subsystem::clone(controller.subsystem().unwrap());
        next.namespaces[1].blocks *= 2;
        next.namespaces.pop();
        next.namespaces[0].volatile_cache = true;
        controller.replace_subsystem(Arc::new(next));
        assert_eq!(controller.events.changed().unwrap().collect::<Vec<_>>(), [2, 7]);
    }

    #[test]
    fn each_new_device_failure_raises_one_reliability_event() {
        let mut controller = controller();
        set(&mut controller, EN);
        let health = Arc::clone(&controller.subsystem().unwrap().namespaces[1].health);
        let told = |controller: &mut Controller| {
            controller.look_at_stores();
            controller.events.park(3);
            let told = controller.events.next(1 << 2).map(|(_, dw0)| dw0);
            controller.events.take_parked().for_each(drop);
            told
        };
        assert_eq!(told(&mut controller), None);
        health.fail_sync(Status::WRITE_FAULT);
        assert_eq!(told(&mut controller), Some(0x02_0001));
        controller.events.acknowledge(Event::Reliability);
        assert_eq!(told(&mut controller), None, "no news");
        health.trust();
        assert_eq!(told(&mut controller), None, "good news are none");
        health.set_down();
        assert_eq!(told(&mut controller), Some(0x02_0001));
        set(&mut controller, 0);
        set(&mut controller, EN);
        assert_eq!(told(&mut controller), Some(0x02_0001), "the next host has not heard of it");
    }

    #[test]
    fn a_namespace_reported_as_not_ready_raises_an_event_once_ready() {
        let mut controller = controller();
        set(&mut controller, EN);
        let namespaces = &controller.subsystem().unwrap().namespaces;
        let (nsid, health) = (namespaces[1].nsid, Arc::clone(&namespaces[1].health));
        let changed = |controller: &mut Controller| {
            controller.look_at_stores();
            let changed = controller.events.changed().unwrap().collect::<Vec<_>>();
            controller.events.acknowledge(Event::NamespaceAttribute);
            changed
        };
        let none: [u32; 0] = [];
        health.set_down();
        assert_eq!(changed(&mut controller), none, "the host does not know it");
        controller.reported_not_ready(nsid);
        assert_eq!(changed(&mut controller), none, "it is not ready yet");
        health.set_up();
        assert_eq!(changed(&mut controller), [nsid]);
        assert_eq!(changed(&mut controller), none, "once");
        controller.reported_not_ready(nsid);
        set(&mut controller, 0);
        assert_eq!(changed(&mut controller), none, "the next host has not asked");
    }

    #[test]
    fn a_namespace_that_replaces_another_is_reported_again_after_its_event() {
        let mut controller = controller();
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let whole = Subsystem::clone(controller.subsystem().unwrap());
        let changed = |controller: &mut Controller, now| {
            controller.look_at_replaced(now);
            controller.events.park(1);
            let told = controller.events.next(u32::MAX).is_some();
            controller.events.take_parked().for_each(drop);
            (told, controller.events.changed().unwrap().collect::<Vec<_>>())
        };
        let mut other = whole.clone();
        other.namespaces[1].uuid = [0xEE; 16];
        let mut without = whole.clone();
        without.namespaces.remove(1);
        // At once, and removed and added before the host has read of either.
        for steps in [vec![other.clone()], vec![without.clone(), whole.clone()]] {
            for next in steps {
                controller.replace_subsystem(Arc::new(next));
            }
            assert_eq!(changed(&mut controller, at(0)), (true, vec![2]));
            assert_eq!(changed(&mut controller, at(5000)), (false, vec![2]), "unread");
            controller.events.acknowledge(Event::NamespaceAttribute);
            assert_eq!(changed(&mut controller, at(6000)), (false, vec![]));
            assert_eq!(changed(&mut controller, at(6900)), (false, vec![]));
            assert_eq!(changed(&mut controller, at(7100)), (true, vec![2]));
            controller.events.acknowledge(Event::NamespaceAttribute);
            assert_eq!(changed(&mut controller, at(9900)), (false, vec![]), "once");
            assert_eq!(changed(&mut controller, at(99_000)), (false, vec![]), "once");
        }
        // Where the host has read of the removal, it has removed it.
        for next in [without, whole] {
            controller.replace_subsystem(Arc::new(next));
            assert_eq!(changed(&mut controller, at(0)), (true, vec![2]));
            controller.events.acknowledge(Event::NamespaceAttribute);
            assert_eq!(changed(&mut controller, at(0)), (false, vec![]));
            assert_eq!(changed(&mut controller, at(5000)), (false, vec![]));
        }
        controller.replace_subsystem(Arc::new(other));
        set(&mut controller, EN);
        set(&mut controller, 0);
        assert_eq!(changed(&mut controller, at(0)), (false, vec![]));
        assert_eq!(changed(&mut controller, at(5000)), (false, vec![]), "another host");
    }

    #[test]
    fn ana_group_and_state_changes_are_reported_as_ana_events() {
        let mut controller = controller();
        let told = |controller: &mut Controller| {
            controller.events.park(1);
            controller.events.next(u32::MAX).map(|(_, dw0)| dw0)
        };
        let mut next = Subsystem::clone(controller.subsystem().unwrap());
        next.namespaces[0].ana_group = 2;
        controller.replace_subsystem(Arc::new(next));
        assert_eq!(told(&mut controller), Some(0x0C_03_02));
        assert_eq!(controller.events.changed().unwrap().count(), 0);
        controller.events.acknowledge(Event::Ana);
        controller.look_at_paths();
        assert_eq!(told(&mut controller), None, "nothing has changed");
        let mut states = AnaStates::default();
        states.set(2, AnaState::INACCESSIBLE);
        controller.association.reach.set(&states);
        controller.look_at_paths();
        assert_eq!(told(&mut controller), Some(0x0C_03_02));
        set(&mut controller, EN);
        set(&mut controller, 0);
        assert_eq!(controller.ana.page(1)[..8], [0; 8], "a reset starts to count anew");
    }
}
