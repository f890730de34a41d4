//! What is served right now: the configuration and the opened stores, and how both become what the
//! reactors have. Whoever changes it holds its lock and may wait for disks and reactors; reactors
//! never do.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use nvme::Nqn;
use tracing::info;

use crate::config::Config;
use crate::ledger::Ledger;
use crate::mailbox::Mail;
use crate::registry::{Change, Registry};
use crate::stores::{Store, Stores};
use crate::target::Fatal;
use crate::tender::Tender;

/// How long a reactor may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What is served.
pub(crate) struct Shelf {
    config: Config,
    stores: Stores,
    registry: Arc<Registry>,
    tender: Arc<Tender>,
    ledger: Arc<Ledger>,
}

impl Shelf {
    /// Nothing is served yet; `stores` knows where to keep things, and has none.
    pub(crate) fn new(
        config: Config,
        stores: Stores,
        registry: Arc<Registry>,
        tender: Arc<Tender>,
        ledger: Arc<Ledger>,
    ) -> Shelf {
        Shelf { config, stores, registry, tender, ledger }
    }

    /// The configuration that is served.
    pub(crate) fn config(&self) -> &Config {
        &self.config
    }

    /// Has another configuration, and returns the one before. [`Shelf::adopt`] serves it.
    pub(crate) fn set_config(&mut self, config: Config) -> Config {
        std::mem::replace(&mut self.config, config)
    }

    /// Opens what a configuration needs besides what is open.
    ///
    /// # Errors
    /// One sentence about what cannot be served.
    pub(crate) fn next(&self, config: &Config) -> Result<Stores, Fatal> {
        self.stores.next(&config.subsystems).map_err(Fatal)
    }

    /// Opens again the stores that a synchronisation has failed on; a line for each.
    pub(crate) fn renew(&self) -> Vec<String> {
        self.stores.with_failed_sync().map(|store| self.tender.renew(&store.tended)).collect()
    }

    /// Gives every ring the stores of `next` that are new; all or none.
    ///
    /// # Errors
    /// One sentence about the store that a ring does not take.
    pub(crate) fn attach_new(&self, next: &Stores) -> Result<(), Fatal> {
        let added: Vec<_> = next.without(&self.stores).collect();
        for (index, store) in added.iter().enumerate() {
            if let Err(fatal) = self.attach(store) {
                added[..=index].iter().for_each(|store| self.detach(store));
                return Err(fatal);
            }
        }
        Ok(())
    }

    /// Makes `next` the stores in use and publishes what the configuration says. Hosts of what is
    /// gone are disconnected before its stores go. Returns one line for each store that has another
    /// size now.
    pub(crate) fn adopt(&mut self, mut next: Stores, gone: Vec<Nqn>) -> Vec<String> {
        let lines = next.resize();
        next.set_faults(&self.config.subsystems);
        let mut subsystems = Vec::new();
        for config in &self.config.subsystems {
            let running = self.registry.subsystem(&config.nqn);
            let subsystem = next.subsystem(config, self.ledger.usage(&config.nqn));
            if running.is_none_or(|running| *running != subsystem) {
                subsystems.push(Arc::new(subsystem));
            }
        }
        let Config { listeners, discovery, .. } = &self.config;
        let (listeners, discovery) = (Some(listeners.clone()), Some(discovery.clone()));
        self.registry.change(Change { listeners, discovery, subsystems, gone });
        self.registry.set_slow(Duration::from_millis(self.config.observe.slow_ms.into()));
        let old = std::mem::replace(&mut self.stores, next);
        old.without(&self.stores).for_each(|store| self.detach(store));
        lines
    }

    fn attach(&self, store: &Store) -> Result<(), Fatal> {
        let (id, backing) = (store.tended.id, store.tended.backing());
        let name = backing.name();
        for (index, reactor) in self.registry.reactors().iter().enumerate() {
            let (answer, answered) = sync_channel(1);
            reactor.send(Mail::Attach(id, Arc::clone(&backing), answer));
            match answered.recv_timeout(PATIENCE) {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return Err(Fatal(format!("{name} cannot be served: {error}"))),
                Err(_) => return Err(Fatal(format!("reactor {index} does not answer"))),
            }
        }
        info!(store = name, blocks = backing.blocks(), "store opened");
        self.tender.tend(Arc::clone(&store.tended));
        Ok(())
    }

    fn detach(&self, store: &Store) {
        self.tender.forget(&store.tended);
        for reactor in self.registry.reactors() {
            reactor.send(Mail::Detach(store.tended.id));
        }
    }
}
