//! Persistent state of namespaces in a simulated state directory, and the product's worker that
//! changes it (`nvmfd::worker::ns_state`).

use std::path::Path;
use std::sync::Arc;

use nvmfd::blockdev::{BlockSizes, DeviceId, Geometry, Health};
use nvmfd::core::subsystem::Namespace;
use nvmfd::core::subsystem::bad_blocks::BadBlocks;
use nvmfd::core::subsystem::reservation::Reservation;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::state::namespace_state::NamespaceFile;
use uuid::Uuid;

use super::{Target, subnqn};
use crate::sim::directory::StepFault;
use crate::sim::mutants::SeededBug;
use crate::sim::oracle::ns_management::GROUP;

/// Steps of a change of a record: write, sync, rename, sync of the directory.
const RECORD_STEPS: u64 = 4;
/// Of a thousand requests that change a record, those during which the process is killed.
const KILLS: u16 = 30;

/// State of a namespace, persisted but for its health.
#[derive(Debug)]
pub(super) struct NamespaceState {
    /// Reported to hosts; the device has its own.
    health: Arc<Health>,
    protection: Arc<Protection>,
    reservation: Arc<Reservation>,
    marks: Arc<BadBlocks>,
}

impl NamespaceState {
    /// The snapshot of the namespace, for a number of blocks and their size in bytes.
    pub(super) fn namespace(
        &self,
        (nsid, uuid): (u32, [u8; 16]),
        backing: DeviceId,
        (blocks, block_bytes): (u64, u32),
    ) -> Namespace {
        let block_shift = block_bytes.trailing_zeros() as u8;
        Namespace {
            nsid,
            backing,
            health: Arc::clone(&self.health),
            geometry: Geometry::default(),
            blocks,
            block_shift,
            read_only: false,
            protection: Arc::clone(&self.protection),
            allow_format: false,
            formats: BlockSizes::only(block_shift),
            formatting: None,
            write_uncorrectable: false,
            marks: Arc::clone(&self.marks),
            limiters: Vec::new(),
            ana_group: GROUP,
            volatile_cache: true,
            uuid,
            nguid: uuid,
            eui64: None,
            reservation: Arc::clone(&self.reservation),
        }
    }
}

impl Target {
    /// Loads the state of a namespace.
    pub(super) fn open_state(&self, space: usize) -> Result<NamespaceState, String> {
        self.state_of(space as u32 + 1, Uuid::from_bytes(self.name(space)))
    }

    /// Loads the state of the namespace with this UUID.
    pub(super) fn state_of(&self, nsid: u32, uuid: Uuid) -> Result<NamespaceState, String> {
        let file = |lost| NamespaceFile::new(self.state_unless(lost), uuid);
        let reservations = file(SeededBug::LostReservation);
        Ok(NamespaceState {
            health: Arc::default(),
            protection: Protection::kept(subnqn(), nsid, file(SeededBug::LostProtection))?,
            reservation: Reservation::kept(subnqn(), nsid, reservations)?,
            marks: BadBlocks::kept(file(SeededBug::LostMarks))?,
        })
    }

    /// The state directory, or with this seeded bug an empty one.
    pub(super) fn state_unless(&self, lost: SeededBug) -> &Path {
        if self.plant == Some(lost) { self.empty.path() } else { self.state.path() }
    }

    /// Whether the process hangs in an operation on files, and will be killed in it.
    pub fn is_dead(&self) -> bool {
        self.state.is_dead()
    }

    /// Where the process is killed in the next change of a record, in `chance` of a thousand cases.
    pub(super) fn next_kill(&mut self, chance: u16) -> StepFault {
        match !self.spared && self.dice.per_mille(chance) {
            true => StepFault::Kill(1 + self.dice.below(RECORD_STEPS)),
            false => StepFault::None,
        }
    }

    /// Lets the worker of namespace states serve its requests.
    pub(super) fn serve_state_requests(&mut self) {
        if !self.is_dead() {
            let (state, fault) = (Arc::clone(&self.state), self.next_kill(KILLS));
            state.run(fault, || self.worker.catch_up(&self.registry));
        }
    }
}
