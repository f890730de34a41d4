//! What hosts order that manage namespaces, carried out on what is served. Each order is in the
//! record of its catalog, and known to all reactors, before it is answered. Which steps that takes, and
//! in which order, `managed/undertaking.rs` says; here they are taken.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use nix::sys::statvfs::statvfs;
use nvme::management::ManagementSelect;
use nvme::persistent_event::ChangeNamespace;
use nvme::{Nqn, Status};
use tracing::{error, info, warn};

use super::{Next, PATIENCE, Shelf};
use crate::command::identify::SHARED;
use crate::config::{ManagedConfig, SubsystemConfig};
use crate::disk::Health;
use crate::format::Formats;
use crate::history::Happening;
use crate::mailbox::Mail;
use crate::managed::{Catalog, Entry, Record, Situation, Step, Undertaking};
use crate::protection;
use crate::reservation::{self, HostId};
use crate::steward::{FAILED, Order, What};
use crate::stores::Place;
use crate::target::Fatal;

/// A namespace that is about to go stays as it is.
type Held = (protection::Held, reservation::Held);

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
        let made = self.undertake(order, &subsystem, &managed)?;
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

    /// Takes all steps of an order.
    fn undertake(
        &mut self,
        order: &Order,
        subsystem: &SubsystemConfig,
        managed: &ManagedConfig,
    ) -> Result<u32, Status> {
        let nqn = subsystem.nqn;
        let catalog = self.catalogs.get(&nqn).ok_or(FAILED)?;
        let mut random = [0; 16];
        getrandom::fill(&mut random).map_err(|_| FAILED)?;
        // Until none of them is there any more. Who protects or reserves one comes before this, also
        // while the order has waited, or learns that it goes.
        let held = RefCell::new(Vec::new());
        let may_go = |nsid, entry: &Entry| {
            held.borrow_mut().push(self.may_go((nqn, nsid), entry, &order.host_id)?);
            Ok(())
        };
        let situation = Situation {
            granted: managed,
            declared: &subsystem.namespaces.iter().map(|n| n.nsid).collect(),
            max_nsid: subsystem.offer.max_nsid,
            free_bytes: free_bytes(catalog),
            fresh: uuid::Builder::from_random_bytes(random).into_uuid(),
            controllers: &self.registry.controllers_of(&nqn),
            may_go: &may_go,
        };
        let mut undertaking = Undertaking::new(&order.what, catalog.record(), &situation)?;
        let (mut opened, mut possible) = (None, true);
        loop {
            possible = match undertaking.next(possible) {
                Step::Answer(outcome) => return outcome,
                step => {
                    let serves = step == Step::Serve;
                    let taken = self.take_step(nqn, step, &mut opened);
                    if serves {
                        held.borrow_mut().clear();
                    }
                    taken
                }
            };
        }
    }

    /// Whether a host may delete a namespace. Until what is returned is dropped nobody protects it, or
    /// reserves it against that host.
    ///
    /// # Errors
    /// Somebody has, or it cannot be told.
    fn may_go(&self, place: Place, entry: &Entry, host: &HostId) -> Result<Held, Status> {
        let (nqn, nsid) = place;
        // What is declared under the same id is another one.
        let served = self.stores.store(nqn, nsid).filter(|store| store.uuid() == entry.uuid);
        if served.is_some_and(|store| store.format.under_way().is_some()) {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        let (protection, reservation) = match served {
            Some(store) => (Arc::clone(&store.protection), Arc::clone(&store.reservation)),
            // Its file may be there in a moment, and with it who relies on it.
            None if self.stores.why_awaited(nqn, nsid).is_some() => return Err(Health::NOT_READY),
            None => self.stores.guards(place, entry.uuid).map_err(|why| {
                error!("namespace {nsid} of {nqn} is not deleted: {why}");
                FAILED
            })?,
        };
        Ok((protection.hold()?, reservation.hold(host)?))
    }

    /// Takes a step, which may wait for disks and reactors; false when it is not possible. `opened`:
    /// what is opened, and not served yet.
    fn take_step(&mut self, nqn: Nqn, step: Step, opened: &mut Option<Next>) -> bool {
        let catalog = self.catalogs.get_mut(&nqn);
        match (step, catalog) {
            (Step::Keep(record), Some(catalog)) => keep(catalog, *record),
            (Step::Remove(uuids), Some(catalog)) => {
                let removed = catalog.remove(&uuids);
                if let Err(error) = &removed {
                    warn!("files that are no namespaces of {nqn} cannot be removed yet: {error}");
                }
                removed.is_ok()
            }
            (Step::Open { nsid, entry }, Some(_)) => match self.open(nqn, nsid, &entry) {
                Ok(next) => {
                    *opened = Some(next);
                    true
                }
                Err(why) => {
                    error!("a namespace of {nqn} cannot be made: {why}");
                    false
                }
            },
            (Step::Close, _) => {
                if let Some(next) = opened.take() {
                    next.stores.without(&self.stores).for_each(|store| self.detach(store));
                }
                true
            }
            (Step::Serve, _) => self.serve(nqn, opened.take()),
            (Step::Forget(uuids), _) => {
                self.stores.forget_kept(&uuids);
                true
            }
            (Step::Await, _) => {
                self.wait_for_reactors();
                true
            }
            (Step::Answer(_), _) | (_, None) => false,
        }
    }

    /// Makes the file of a namespace, which the record announces, and opens it on every ring.
    fn open(&self, nqn: Nqn, nsid: u32, entry: &Entry) -> Result<Next, Fatal> {
        let mut subsystems = self.merged();
        let catalog = self.catalogs.get(&nqn).ok_or(Fatal("it has no catalog".to_owned()))?;
        if let Some(subsystem) = subsystems.iter_mut().find(|s| s.nqn == nqn) {
            subsystem.namespaces.push(catalog.namespace(nsid, entry));
            subsystem.offer.masks.insert(nsid, BTreeSet::new());
        }
        let next = Next::of_order(subsystems, &self.stores, self.config.missing)?;
        if let Some(why) = next.stores.why_awaited(nqn, nsid) {
            return Err(Fatal(why.to_owned()));
        }
        self.attach_new(&next)?;
        Ok(next)
    }

    /// Serves what was opened; without that what the record says, in which nothing is new.
    fn serve(&mut self, nqn: Nqn, opened: Option<Next>) -> bool {
        let of_record = || Next::of_order(self.merged(), &self.stores, self.config.missing);
        match opened.map_or_else(of_record, Ok) {
            Ok(next) => {
                self.adopt(next, Vec::new());
                true
            }
            Err(why) => {
                error!("an order about namespaces of {nqn} cannot be carried out: {why}");
                false
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

fn keep(catalog: &mut Catalog, record: Record) -> bool {
    let kept = catalog.keep(record);
    if let Err(error) = &kept {
        let folder = catalog.folder().display();
        error!("the record of managed namespaces in {folder} cannot be kept: {error}");
    }
    kept.is_ok()
}

/// What the file system of a catalog has free, in bytes; much, where it does not say.
fn free_bytes(catalog: &Catalog) -> u64 {
    let found = statvfs(catalog.folder());
    found.map_or(u64::MAX, |found| found.blocks_available().saturating_mul(found.fragment_size()))
}

#[cfg(test)]
mod tests;
