//! Reservations: which hosts may use a namespace, as the hosts themselves have settled it.
//!
//! * [`state`] decides: a pure state machine per namespace.
//! * [`keeper`] is the thread that carries orders out, one after another. It keeps what shall
//!   outlast a power loss ([`file`](StateFile)) before it answers, and it alone changes a state.
//! * [`standing`](Standing) is what I/O looks at: a byte per controller and namespace, one relaxed
//!   load a command. The registry writes it when a reservation changes and when a host connects.
//! * [`fence`](Fence) is how Preempt and Abort waits for commands that are under way.

mod fence;
mod file;
pub mod keeper;
mod standing;
pub mod state;

pub use fence::{Fence, Fenced};
pub use file::StateFile;
pub use standing::Standing;
pub use state::{Barred, Effect, HostId, Order, State};

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvme::Nqn;
use nvme::reservation::Rescap;

/// The reservation of one namespace, as everybody shares it: queues report it, the keeper changes
/// it. Two of them are equal when they are the same one.
#[derive(Debug)]
pub struct Reservation {
    /// The subsystem.
    pub subsystem: Nqn,
    /// The namespace in it.
    pub nsid: u32,
    file: Option<StateFile>,
    state: Mutex<State>,
}

impl Reservation {
    /// One that ends with the daemon.
    #[must_use]
    pub fn volatile(subsystem: Nqn, nsid: u32) -> Arc<Reservation> {
        Arc::new(Reservation { subsystem, nsid, file: None, state: Mutex::default() })
    }

    /// One that can be kept in `folder`, under the UUID of its namespace; as it was left there.
    ///
    /// # Errors
    /// One sentence about a file that cannot be read or makes no sense.
    pub fn kept(
        subsystem: Nqn,
        nsid: u32,
        folder: &Path,
        uuid: [u8; 16],
    ) -> Result<Arc<Reservation>, String> {
        let file = StateFile::new(folder, uuid);
        let state = Mutex::new(file.load()?);
        Ok(Arc::new(Reservation { subsystem, nsid, file: Some(file), state }))
    }

    /// What the namespace can do (RESCAP).
    #[must_use]
    pub fn rescap(&self) -> Rescap {
        Rescap::VOLATILE.with_ptpl(self.file.is_some())
    }

    /// The state as it is now.
    #[must_use]
    pub fn state(&self) -> State {
        self.lock().clone()
    }

    /// The extended Reservation Status structure as it is now.
    #[must_use]
    pub fn report(&self) -> Vec<u8> {
        self.lock().report()
    }

    /// Whether it is kept through power loss.
    #[must_use]
    pub fn persists(&self) -> bool {
        self.lock().persists
    }

    /// What `host` may not do now.
    #[must_use]
    pub fn barred(&self, host: &HostId) -> Barred {
        self.lock().barred(host)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Reservation {
    fn eq(&self, other: &Reservation) -> bool {
        std::ptr::eq(self, other)
    }
}

impl Eq for Reservation {}
