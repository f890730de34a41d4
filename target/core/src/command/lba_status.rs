//! Get LBA Status: which blocks of a namespace are allocated.
//!
//! Source: NVM Command Set Specification 1.1, "Get LBA Status command" and "Return Allocated LBAs (Action
//! Type 02h)". The action types for blocks that may be unreadable need a log page and events that are not
//! supported.
//!
//! A block that is not reported reads as zeros, and was not written before the command began. The reverse
//! does not hold: where nothing is known, all blocks are reported.

use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use nvme::lba_status::{
    ActionType, CompletionCondition, GetLbaStatus, LbaStatusDescriptor, LbaStatusHeader,
};
use nvme::{Sqe, Status};
use rdma::Remote;

use super::{CapsuleInfo, Plan, destination};
use crate::controller::Controller;
use crate::sched::offload::ConnectionWatch;
use crate::subsystem::Extent;
use nvmfd_blockdev::{AllocatedExtents, BackingDevice, ExtentSearch};

/// The bit of OACS.
pub(super) const OACS: u16 = 1 << 9;

/// Descriptors of one response, at most; a host continues behind the last one.
const DESCRIPTORS_MAX: usize = 1023;
/// How long a search may take. What it has not reached by then is reported as allocated.
const SEARCH_TIME: Duration = Duration::from_millis(100);
/// Blocks of a descriptor, at most.
const DESCRIPTOR_BLOCKS: u64 = 1 << 32;

/// A Get LBA Status command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LbaStatusQuery {
    /// The namespace's blocks at the arrival of the command.
    pub extent: Extent,
    /// Where to search.
    pub search: ExtentSearch,
    /// The destination of the list.
    pub to: Remote,
    /// Blocks of the range may be unreadable, which only a read tells: all are reported.
    pub reports_all: bool,
    /// What a worker finds. None: it searches nothing, so all blocks are reported.
    pub probe: Option<AllocationProbe>,
}

/// A search in a backing store, and its result. Two of them are equal when they are the same one.
#[derive(Clone, Debug)]
pub struct AllocationProbe(Arc<Probe>);

#[derive(Debug)]
struct Probe {
    /// It may be closed meanwhile.
    store: Weak<BackingDevice>,
    found: OnceLock<AllocatedExtents>,
}

impl AllocationProbe {
    /// A search that has not begun.
    pub fn new(store: Weak<BackingDevice>) -> AllocationProbe {
        AllocationProbe(Arc::new(Probe { store, found: OnceLock::new() }))
    }

    /// Whether this is the store.
    pub fn is_of(&self, store: Option<&Weak<BackingDevice>>) -> bool {
        store.is_some_and(|store| Weak::ptr_eq(store, &self.0.store))
    }

    /// Searches, unless the connection of the command has closed. May block on the device.
    ///
    /// # Errors
    /// Nobody receives the result; or the store was closed.
    pub fn run(&self, search: &ExtentSearch, connection: &ConnectionWatch) -> Result<(), Status> {
        connection.check()?;
        let found = search.run(&self.0.store, SEARCH_TIME).ok_or(Status::COMMAND_INTERRUPTED)?;
        // A probe runs once.
        let _ = self.0.found.set(found);
        Ok(())
    }
}

impl PartialEq for AllocationProbe {
    fn eq(&self, other: &AllocationProbe) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for AllocationProbe {}

/// Decides on a Get LBA Status command.
///
/// # Errors
/// Invalid Command Opcode of a discovery controller; otherwise the error of the command.
pub(super) fn plan(
    sqe: &Sqe,
    controller: &Controller,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    let get = GetLbaStatus::parse(sqe);
    let (extent, search, reports_all) = range(&get, controller)?;
    let len = u32::try_from(get.len_bytes()).map_err(|_| Status::INVALID_FIELD.with_dnr())?;
    let to = destination(sqe, received, len, false)?;
    let query = LbaStatusQuery { extent, search, to, reports_all, probe: None };
    Ok(Plan::LbaStatus(Box::new(query)))
}

/// Returns the plan that sends the response to a query whose search has ended, or is not needed.
///
/// # Errors
/// The status of the command if it arrived now; Command Interrupted if the namespace has other
/// blocks now.
pub(crate) fn respond(
    sqe: &Sqe,
    query: &LbaStatusQuery,
    controller: &Controller,
) -> Result<Plan, Status> {
    let (now, ..) = range(&GetLbaStatus::parse(sqe), controller)?;
    if (now.backing, now.block_shift) != (query.extent.backing, query.extent.block_shift) {
        return Err(Status::COMMAND_INTERRUPTED);
    }
    let found = query.probe.as_ref().and_then(|probe| probe.0.found.get());
    let page = match found {
        Some(found) => list(found, query),
        None => list(&query.search.all(), query),
    };
    Ok(Plan::Give { page, to: query.to })
}

/// Returns the blocks of the namespace, the range to search, and whether blocks of it may be
/// unreadable.
fn range(
    get: &GetLbaStatus,
    controller: &Controller,
) -> Result<(Extent, ExtentSearch, bool), Status> {
    let subsystem = controller.subsystem().ok_or(Status::INVALID_OPCODE.with_dnr())?;
    let namespace = subsystem.namespace(get.nsid)?;
    controller.association.reach.check(namespace.ana_group)?;
    if get.action != ActionType::ALLOCATED {
        return Err(Status::INVALID_FIELD.with_dnr());
    }
    let count = match get.rl {
        0 => namespace.blocks.saturating_sub(get.slba).max(1),
        count => count.into(),
    };
    let (at, len) = namespace.range(get.slba, count)?;
    if namespace.formatting.is_some() {
        return Err(Status::FORMAT_IN_PROGRESS);
    }
    namespace.health.rejects(false).map_or(Ok(()), Err)?;
    let block_size_bytes = namespace.block_bytes().into();
    let most = (get.len_bytes() as usize).saturating_sub(LbaStatusHeader::BYTES);
    let most = (most / LbaStatusDescriptor::BYTES).min(DESCRIPTORS_MAX);
    let search = ExtentSearch { at, end: at + len, block_size_bytes, most };
    Ok((namespace.extent(), search, namespace.marks.first(at, len).is_some()))
}

/// The LBA Status Descriptor List ("LBA Status Descriptor List").
fn list(found: &AllocatedExtents, query: &LbaStatusQuery) -> Vec<u8> {
    let (shift, most) = (query.extent.block_shift, query.search.most);
    let mut page = vec![0; LbaStatusHeader::BYTES];
    let (mut count, mut has_more) = (0, found.has_more);
    for (at, end) in &found.extents {
        let (mut at, end) = (at >> shift, end >> shift);
        while at < end && count < most {
            let blocks = (end - at).min(DESCRIPTOR_BLOCKS);
            let (nlb_z, status) = ((blocks - 1) as u32, LbaStatusDescriptor::ALLOCATED);
            page.extend(LbaStatusDescriptor { dslba: at, nlb_z, status }.emit());
            (at, count) = (at + blocks, count + 1);
        }
        has_more |= at < end;
    }
    let cmpc = match has_more {
        true => CompletionCondition::INCOMPLETE,
        false => CompletionCondition::COMPLETE,
    };
    let header = LbaStatusHeader { nlsd: count as u32, cmpc }.emit();
    page[..header.len()].copy_from_slice(&header);
    page
}

#[cfg(test)]
mod tests;
