//! What is served right now: the configuration, the namespaces that hosts have made besides, and
//! the opened stores of all; and how they become what the reactors have. Whoever changes it holds
//! its lock and may wait for disks and reactors; reactors never do.

mod orders;

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use nvme::Nqn;
use tracing::{info, warn};

use crate::config::{Config, SubsystemConfig};
use crate::ledger::Ledger;
use crate::mailbox::Mail;
use crate::managed::{Allocated, Catalog, Catalogs, Management};
use crate::registry::{Change, Registry};
use crate::stores::{Store, Stores};
use crate::subsystem::Subsystem;
use crate::target::Fatal;
use crate::tender::Tender;

/// How long a reactor may take to answer.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// What shall be served instead: opened, and not yet in use.
pub(crate) struct Next {
    /// With the namespaces that hosts have made.
    subsystems: Vec<SubsystemConfig>,
    stores: Stores,
    /// Catalogs that were not open before.
    catalogs: Vec<(Nqn, Catalog)>,
}

impl Next {
    /// Opens what a configuration needs besides what is open.
    ///
    /// # Errors
    /// One sentence about what cannot be served.
    pub(crate) fn open(
        config: &Config,
        stores: &Stores,
        catalogs: &Catalogs,
    ) -> Result<Next, Fatal> {
        let mut opened = Vec::new();
        let mut subsystems = config.subsystems.clone();
        for subsystem in &mut subsystems {
            let (nqn, Some(managed)) = (subsystem.nqn, subsystem.managed.clone()) else { continue };
            let open = catalogs.get(&nqn).filter(|open| open.folder() == managed.directory);
            let catalog = match open {
                Some(open) => open,
                None => {
                    let (catalog, lines) = Catalog::open(&managed.directory, nqn).map_err(Fatal)?;
                    lines.iter().for_each(|line| warn!("{line}"));
                    opened.push((nqn, catalog));
                    let Some((_, catalog)) = opened.last() else { continue };
                    catalog
                }
            };
            catalog.eclipsed(subsystem).for_each(|line| warn!("{line}"));
            catalog.merge_into(subsystem);
        }
        let mut next = Next { catalogs: opened, ..Next::of(subsystems, stores)? };
        next.stores.limit(&config.quotas, &next.subsystems);
        Ok(next)
    }

    /// Opens what subsystems need that are as they shall be served.
    fn of(subsystems: Vec<SubsystemConfig>, stores: &Stores) -> Result<Next, Fatal> {
        let stores = stores.next(&subsystems).map_err(Fatal)?;
        Ok(Next { subsystems, stores, catalogs: Vec::new() })
    }
}

/// What is served.
pub(crate) struct Shelf {
    /// As its file declares it.
    config: Config,
    catalogs: Catalogs,
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
        Shelf { config, catalogs: Catalogs::new(), stores, registry, tender, ledger }
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
    pub(crate) fn next(&self, config: &Config) -> Result<Next, Fatal> {
        Next::open(config, &self.stores, &self.catalogs)
    }

    /// Opens again the stores that a synchronisation has failed on; a line for each.
    pub(crate) fn renew(&self) -> Vec<String> {
        self.stores.with_failed_sync().map(|store| self.tender.renew(&store.tended)).collect()
    }

    /// Gives every ring the stores of `next` that are new; all or none.
    ///
    /// # Errors
    /// One sentence about the store that a ring does not take.
    pub(crate) fn attach_new(&self, next: &Next) -> Result<(), Fatal> {
        let added: Vec<_> = next.stores.without(&self.stores).collect();
        for (index, store) in added.iter().enumerate() {
            if let Err(fatal) = self.attach(store) {
                added[..=index].iter().for_each(|store| self.detach(store));
                return Err(fatal);
            }
        }
        Ok(())
    }

    /// Puts `next` to use and publishes it. Hosts of what is gone are disconnected before its stores
    /// go. Returns one line for each store that has another size now.
    pub(crate) fn adopt(&mut self, next: Next, gone: Vec<Nqn>) -> Vec<String> {
        let Next { subsystems: configs, mut stores, catalogs } = next;
        let managed = |nqn: &Nqn| configs.iter().any(|s| s.nqn == *nqn && s.managed.is_some());
        self.catalogs.retain(|nqn, _| managed(nqn));
        self.catalogs.extend(catalogs);
        let lines = stores.resize();
        stores.set_faults(&configs);
        let mut subsystems = Vec::new();
        for config in &configs {
            let running = self.registry.subsystem(&config.nqn);
            if running.is_none() {
                self.ledger.switched_on(&config.nqn);
            }
            let mut subsystem = stores.subsystem(config, self.ledger.usage(&config.nqn));
            subsystem.management = self.management(config, &subsystem);
            if running.is_none_or(|running| *running != subsystem) {
                subsystems.push(Arc::new(subsystem));
            }
        }
        let Config { listeners, discovery, .. } = &self.config;
        let (listeners, discovery) = (Some(listeners.clone()), Some(discovery.clone()));
        self.registry.change(Change { listeners, discovery, subsystems, gone });
        self.registry.set_slow(Duration::from_millis(self.config.observe.slow_ms.into()));
        let old = std::mem::replace(&mut self.stores, stores);
        old.without(&self.stores).for_each(|store| self.detach(store));
        lines
    }

    /// What is declared, with the namespaces that hosts have made.
    fn merged(&self) -> Vec<SubsystemConfig> {
        let mut subsystems = self.config.subsystems.clone();
        for subsystem in &mut subsystems {
            if let Some(catalog) = self.catalogs.get(&subsystem.nqn) {
                catalog.merge_into(subsystem);
            }
        }
        subsystems
    }

    /// What hosts see that may manage the namespaces of a subsystem.
    fn management(&self, config: &SubsystemConfig, made: &Subsystem) -> Option<Arc<Management>> {
        let record = self.catalogs.get(&config.nqn)?.record();
        let allocated = record.entries.iter().filter_map(|(&nsid, entry)| {
            let namespace = made.namespace(nsid).ok()?;
            let its_own = namespace.uuid == entry.uuid.into_bytes();
            let (namespace, hosts) = (namespace.clone(), entry.hosts.clone());
            its_own.then_some(Allocated { namespace, hosts })
        });
        Some(Arc::new(Management {
            config: config.managed.clone()?,
            allocated: allocated.collect(),
            used_bytes: record.used_bytes(),
        }))
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
