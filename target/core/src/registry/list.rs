//! Lists controllers and hosts, for monitoring.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use nvme::Nqn;

use super::{AssociationEntry, Registry};
use crate::controller::association::Association;
use crate::diag::cause::Cause;
use crate::subsystem::Subsystem;

/// State of one controller, and so of one association.
#[derive(Clone, Debug)]
pub struct Controller {
    /// State shared with its queues.
    pub association: Arc<Association>,
    /// Its source address.
    pub source: IpAddr,
    /// When it was admitted.
    pub since: Instant,
    /// Its host has to authenticate; [`Association::is_proved`] returns whether it has.
    pub authenticate: bool,
    /// It is one of the discovery service.
    pub discovery: bool,
    /// Entries of an I/O queue that it may have.
    pub queue_depth: u16,
}

impl Registry {
    /// All controllers, in the order of their creation.
    pub fn controllers(&self) -> Vec<Controller> {
        let mut all: Vec<_> = self.lock().associations.values().map(Controller::of).collect();
        all.sort_by_key(|controller| controller.association.id);
        all
    }

    /// Number of hosts with a controller that is not one of discovery, and of these controllers.
    /// Those that have to authenticate yet do not count.
    pub fn connected(&self) -> (usize, usize) {
        let table = self.lock();
        let is_host = |entry: &&AssociationEntry| entry.view.is_some() && !entry.is_claim();
        let connected = table.associations.values().filter(is_host);
        let hosts: BTreeSet<Nqn> = connected.clone().map(|entry| entry.association.host).collect();
        (hosts.len(), connected.count())
    }

    /// Ends one association, by its id: its connections close, and its host may connect again.
    /// None when there is none.
    pub fn disconnect(&self, id: u64) -> Option<Controller> {
        let controller = self.controller(id)?;
        controller.association.end(Cause::Disconnected);
        self.wake_reactors();
        Some(controller)
    }

    /// Orders a fatal error for one controller, by the id of its association. None if there is
    /// none.
    pub fn fail(&self, id: u64) -> Option<Controller> {
        let controller = self.controller(id)?;
        controller.association.order_fatal_error();
        self.wake_reactors();
        Some(controller)
    }

    fn controller(&self, id: u64) -> Option<Controller> {
        self.lock().associations.get(&id).map(Controller::of)
    }

    /// All subsystems that are served, by their names.
    pub fn subsystems(&self) -> Vec<Arc<Subsystem>> {
        self.lock().subsystems.values().cloned().collect()
    }

    /// The addresses of listeners, without pending ones.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.lock().listeners().iter().map(|listener| listener.address).collect()
    }
}

impl Controller {
    fn of(entry: &AssociationEntry) -> Controller {
        Controller {
            association: Arc::clone(&entry.association),
            source: entry.source,
            since: entry.since,
            authenticate: entry.authenticate,
            discovery: entry.view.is_none(),
            queue_depth: entry.limits.queue_depth,
        }
    }
}
