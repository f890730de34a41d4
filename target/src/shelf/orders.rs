//! What hosts order that manage namespaces, carried out on what is served. Each order is in the
//! record of its catalog, and known to all reactors, before it is answered.

use std::collections::BTreeSet;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use nix::sys::statvfs::statvfs;
use nvme::management::ManagementSelect;
use nvme::persistent_event::ChangeNamespace;
use nvme::{NSID_ALL, Nqn, Status};
use tracing::{error, info, warn};
use uuid::Uuid;

use super::{Next, PATIENCE, Shelf};
use crate::command::identify::SHARED;
use crate::config::{ManagedConfig, SubsystemConfig};
use crate::format::Formats;
use crate::history::Happening;
use crate::mailbox::Mail;
use crate::managed::{Catalog, Entry, HOSTS_MAX, Record};
use crate::steward::{Creation, FAILED, Order, What};
use crate::target::Fatal;

impl Shelf {
    /// Carries out an order. Returns the id of the namespace that was made, or 0.
    ///
    /// # Errors
    /// The status to answer with; everything is as before.
    pub(crate) fn carry_out(&mut self, order: &Order) -> Result<u32, Status> {
        let nqn = order.subsystem;
        let subsystem = self.config.subsystems.iter().find(|s| s.nqn == nqn).cloned();
        let granted = subsystem.and_then(|s| Some((s.managed.clone()?, s)));
        // A reload may have taken it back since the order was given.
        let granted = granted.filter(|(managed, _)| managed.admits(&order.host));
        let (managed, subsystem) = granted.ok_or(Status::INVALID_OPCODE.with_dnr())?;
        // What is deleted cannot be told of afterwards.
        let told = self.change_of(order);
        let made = match &order.what {
            What::Create(new) => self.create(&subsystem, &managed, *new)?,
            What::Delete { nsid } => self.delete(nqn, *nsid).map(|()| 0)?,
            What::Attach { nsid, cntlids } => {
                self.change_hosts(nqn, *nsid, cntlids, true).map(|()| 0)?
            }
            What::Detach { nsid, cntlids } => {
                self.change_hosts(nqn, *nsid, cntlids, false).map(|()| 0)?
            }
            // Takes long, and is nobody's who has the shelf: `formatting.rs`.
            What::Format(_) => return Err(FAILED),
        };
        self.wait_for_reactors();
        self.note(order, told, made);
        let host = order.host;
        match &order.what {
            What::Create(_) => info!(subsystem = %nqn, nsid = made, %host, "namespace created"),
            What::Delete { nsid } => info!(subsystem = %nqn, nsid, %host, "namespace deleted"),
            What::Attach { nsid, cntlids } => {
                info!(subsystem = %nqn, nsid, ?cntlids, %host, "namespace attached");
            }
            What::Detach { nsid, cntlids } => {
                info!(subsystem = %nqn, nsid, ?cntlids, %host, "namespace detached");
            }
            What::Format(_) => {}
        }
        Ok(made)
    }

    /// What the Persistent Event log will tell of an order, as far as that is known before.
    fn change_of(&self, order: &Order) -> Option<ChangeNamespace> {
        let sel = |sel: ManagementSelect| u32::from(sel.0);
        match order.what {
            What::Create(new) => {
                let shift = new.block_size_bytes.trailing_zeros() as u8;
                let blocks = new.bytes >> shift;
                Some(ChangeNamespace {
                    cdw10: sel(ManagementSelect::CREATE),
                    nsze: blocks,
                    ncap: blocks,
                    flbas: Formats::those(|_| true).index(shift),
                    nmic: u8::from(!new.private) * SHARED,
                    anagrpid: new.ana_group,
                    ..ChangeNamespace::default()
                })
            }
            What::Delete { nsid } => {
                // Of all at once nothing is said but that.
                let store = self.stores.store(order.subsystem, nsid);
                let entry = self.catalogs.get(&order.subsystem);
                let entry = entry.and_then(|catalog| catalog.record().entries.get(&nsid));
                let backing = store.map(|store| store.tended.backing());
                let blocks = backing.as_ref().map_or(0, |backing| backing.blocks());
                let index = |shift| Formats::those(|_| true).index(shift);
                Some(ChangeNamespace {
                    cdw10: sel(ManagementSelect::DELETE),
                    nsze: blocks,
                    ncap: blocks,
                    flbas: backing
                        .map_or(0, |b| index(b.block_size_bytes().trailing_zeros() as u8)),
                    nmic: entry.map_or(0, |entry| u8::from(!entry.private) * SHARED),
                    anagrpid: entry.map_or(0, |entry| entry.ana_group),
                    nsid,
                    ..ChangeNamespace::default()
                })
            }
            _ => None,
        }
    }

    /// Notes what an order has done, in the Persistent Event log.
    fn note(&self, order: &Order, told: Option<ChangeNamespace>, made: u32) {
        let subsystem = self.registry.subsystem(&order.subsystem);
        let history = subsystem.as_ref().and_then(|subsystem| subsystem.usage.history());
        if let (Some(history), Some(change)) = (history, told) {
            let nsid = if made == 0 { change.nsid } else { made };
            let happening =
                Happening::ChangeNamespace(order.cntlid, ChangeNamespace { nsid, ..change });
            history.note(happening, &self.registry.power.at(Instant::now()));
        }
    }

    fn create(
        &mut self,
        subsystem: &SubsystemConfig,
        managed: &ManagedConfig,
        new: Creation,
    ) -> Result<u32, Status> {
        let nqn = subsystem.nqn;
        let catalog = self.catalogs.get_mut(&nqn).ok_or(FAILED)?;
        let record = catalog.record().clone();
        if record.entries.len() >= managed.namespaces as usize {
            return Err(Status::NAMESPACE_ID_UNAVAILABLE.with_dnr());
        }
        let left_bytes = managed.quota_bytes.saturating_sub(record.used_bytes());
        if new.bytes > left_bytes.min(free_bytes(catalog)) {
            return Err(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr());
        }
        let declared: BTreeSet<u32> = subsystem.namespaces.iter().map(|n| n.nsid).collect();
        let is_free = |id: &u32| !declared.contains(id) && !record.entries.contains_key(id);
        let nsid = (1..=subsystem.offer.max_nsid).find(is_free);
        let nsid = nsid.ok_or(Status::NAMESPACE_ID_UNAVAILABLE.with_dnr())?;
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|_| FAILED)?;
        let uuid = uuid::Builder::from_random_bytes(random).into_uuid();
        let entry = Entry {
            uuid,
            bytes: new.bytes,
            block_size_bytes: new.block_size_bytes,
            ana_group: new.ana_group,
            private: new.private,
            hosts: BTreeSet::new(),
        };
        let mut making = record;
        making.unsettled.insert(uuid);
        keep(catalog, making)?;
        let made = self.make(nqn, nsid, &entry);
        if let Err(why) = made {
            error!("a namespace of {nqn} cannot be made: {why}");
            if let Some(Err(error)) = self.catalogs.get_mut(&nqn).map(Catalog::settle) {
                warn!("nor can its file be removed now: {error}");
            }
            return Err(FAILED);
        }
        Ok(nsid)
    }

    /// Makes the file of a namespace, which the record announces, and serves it.
    fn make(&mut self, nqn: Nqn, nsid: u32, entry: &Entry) -> Result<(), Fatal> {
        let mut subsystems = self.merged();
        let catalog = self.catalogs.get(&nqn).ok_or(Fatal("it has no catalog".to_owned()))?;
        if let Some(subsystem) = subsystems.iter_mut().find(|s| s.nqn == nqn) {
            subsystem.namespaces.push(catalog.namespace(nsid, entry));
            subsystem.offer.masks.insert(nsid, BTreeSet::new());
        }
        let mut record = catalog.record().clone();
        record.unsettled.remove(&entry.uuid);
        record.entries.insert(nsid, entry.clone());
        let next = Next::of_order(subsystems, &self.stores, self.config.missing)?;
        if let Some(why) = next.stores.why_awaited(nqn, nsid) {
            return Err(Fatal(why.to_owned()));
        }
        self.attach_new(&next)?;
        let kept = self.catalogs.get_mut(&nqn).map(|catalog| catalog.keep(record));
        if let Some(Err(error)) = kept {
            next.stores.without(&self.stores).for_each(|store| self.detach(store));
            return Err(Fatal(format!("its record cannot be kept: {error}")));
        }
        self.adopt(next, Vec::new());
        Ok(())
    }

    fn delete(&mut self, nqn: Nqn, nsid: u32) -> Result<(), Status> {
        let catalog = self.catalogs.get_mut(&nqn).ok_or(FAILED)?;
        let mut record = catalog.record().clone();
        let goes = |id: &u32| nsid == NSID_ALL || *id == nsid;
        let gone: Vec<Uuid> =
            record.entries.iter().filter(|(id, _)| goes(id)).map(|(_, e)| e.uuid).collect();
        if gone.is_empty() && nsid != NSID_ALL {
            return Err(Status::INVALID_NAMESPACE.with_dnr());
        }
        let mut stores = record
            .entries
            .keys()
            .filter(|id| goes(id))
            .filter_map(|id| self.stores.store(nqn, *id));
        if stores.any(|store| store.format.under_way().is_some()) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        record.entries.retain(|id, _| !goes(id));
        record.unsettled.extend(&gone);
        self.change_record(nqn, record)?;
        // It is none any more, whatever becomes of its file.
        if let Some(Err(error)) = self.catalogs.get_mut(&nqn).map(Catalog::settle) {
            warn!("the file of a deleted namespace of {nqn} cannot be removed yet: {error}");
        }
        self.stores.forget_kept(&gone);
        Ok(())
    }

    /// Attaches a namespace to the hosts of controllers, or detaches it: all or none.
    fn change_hosts(
        &mut self,
        nqn: Nqn,
        nsid: u32,
        cntlids: &[u16],
        attach: bool,
    ) -> Result<(), Status> {
        let live = self.registry.controllers_of(&nqn);
        let host_of = |id: &u16| live.iter().find(|(cntlid, _)| cntlid == id).map(|(_, h)| *h);
        let hosts: Option<BTreeSet<Nqn>> = cntlids.iter().map(host_of).collect();
        let hosts = hosts.ok_or(Status::CONTROLLER_LIST_INVALID.with_dnr())?;
        let catalog = self.catalogs.get(&nqn).ok_or(FAILED)?;
        let mut record = catalog.record().clone();
        let entry = record.entries.get_mut(&nsid);
        let entry = entry.ok_or(Status::INVALID_NAMESPACE.with_dnr())?;
        match attach {
            true if !entry.hosts.is_disjoint(&hosts) => {
                return Err(Status::NAMESPACE_ALREADY_ATTACHED.with_dnr());
            }
            true if entry.private && entry.hosts.len() + hosts.len() > 1 => {
                return Err(Status::NAMESPACE_IS_PRIVATE.with_dnr());
            }
            true => entry.hosts.extend(&hosts),
            false if !entry.hosts.is_superset(&hosts) => {
                return Err(Status::NAMESPACE_NOT_ATTACHED.with_dnr());
            }
            false => entry.hosts.retain(|host| !hosts.contains(host)),
        }
        if entry.hosts.len() > HOSTS_MAX {
            return Err(Status::ATTACHMENT_LIMIT_EXCEEDED.with_dnr());
        }
        self.change_record(nqn, record)
    }

    /// Keeps a record, and serves what it says: nothing in it is new.
    fn change_record(&mut self, nqn: Nqn, record: Record) -> Result<(), Status> {
        let catalog = self.catalogs.get_mut(&nqn).ok_or(FAILED)?;
        let before = catalog.record().clone();
        keep(catalog, record)?;
        match Next::of_order(self.merged(), &self.stores, self.config.missing) {
            Ok(next) => {
                self.adopt(next, Vec::new());
                Ok(())
            }
            Err(why) => {
                error!("an order about namespaces of {nqn} cannot be carried out: {why}");
                if let Some(catalog) = self.catalogs.get_mut(&nqn) {
                    keep(catalog, before)?;
                }
                Err(FAILED)
            }
        }
    }

    /// Returns when every reactor knows what has been published: what a host is told then, no
    /// queue contradicts.
    pub(super) fn wait_for_reactors(&self) {
        for (index, reactor) in self.registry.reactors().iter().enumerate() {
            let (answer, answered) = sync_channel(1);
            if reactor.send(Mail::Caught(answer)) && answered.recv_timeout(PATIENCE).is_err() {
                warn!(reactor = index, "does not answer");
            }
        }
    }
}

fn keep(catalog: &mut Catalog, record: Record) -> Result<(), Status> {
    catalog.keep(record).map_err(|error| {
        let folder = catalog.folder().display();
        error!("the record of managed namespaces in {folder} cannot be kept: {error}");
        FAILED
    })
}

/// What the file system of a catalog has free, in bytes; much, where it does not say.
fn free_bytes(catalog: &Catalog) -> u64 {
    let found = statvfs(catalog.folder());
    found.map_or(u64::MAX, |found| found.blocks_available().saturating_mul(found.fragment_size()))
}

#[cfg(test)]
mod tests;
