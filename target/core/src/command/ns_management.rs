//! Namespace Management and Namespace Attachment, for hosts permitted by the configuration.
//!
//! Source: NVMe Base Specification 2.0, "Namespace Management command" and "Namespace Attachment command";
//! NVM Command Set Specification 1.0 for the properties of a new namespace.
//!
//! Free space, free ids and the hosts of controllers are checked when the request is executed
//! (`provision/ns_request_plan.rs`), because several hosts may send requests at once.

use std::collections::BTreeSet;

use nvme::identify::{
    Cns, Csi, Identify, IdentifyNamespace, LbaFormat, controllers, emit_controllers,
    emit_namespaces,
};
use nvme::namespace_management::{
    AttachmentSelect, ManagementSelect, NamespaceAttachment, NamespaceManagement, NewNamespace,
};
use nvme::{AdminOpcode, NSID_ALL, Nqn, PAGE_BYTES, Sqe, Status};

use super::admin::AdminContext;
use super::{CapsuleInfo, Plan, identify, no_data, source};
use crate::controller::Controller;
use crate::subsystem::Subsystem;
use crate::subsystem::ana::ANA_GROUPS;
use crate::subsystem::ns_management::Management;
use crate::subsystem::ns_request::{CreateRequest, CreatedNsid, NamespaceRequest};
use crate::subsystem::reservation::Barred;
use nvmfd_blockdev::SHIFTS;

/// The bit of OACS.
pub(super) const OACS: u16 = 1 << 3;

/// log2 of the block size of each LBA format, in the order of their indices.
pub(super) const FORMATS: [u8; 2] = SHIFTS;

/// Ids in a Controller List, at most.
const CONTROLLERS_MAX: u16 = 2047;

/// Decides on a Namespace Management or Namespace Attachment command.
///
/// # Errors
/// Invalid Command Opcode for a host that may not manage namespaces; otherwise the error of the
/// command.
pub(super) fn plan(
    sqe: &Sqe,
    controller: &Controller,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    let (subsystem, management) = granted(controller)?;
    let invalid = Status::INVALID_FIELD.with_dnr();
    if sqe.admin_opcode() == AdminOpcode::NAMESPACE_ATTACHMENT {
        let attachment = NamespaceAttachment::parse(sqe);
        if !matches!(attachment.sel, AttachmentSelect::ATTACH | AttachmentSelect::DETACH)
            || attachment.nsid == NSID_ALL
        {
            return Err(invalid);
        }
        made_by_a_host(attachment.nsid, subsystem, management)?;
        controller.association.reservations.barred(attachment.nsid).check(Barred::WRITE)?;
    } else {
        let order = NamespaceManagement::parse(sqe);
        match order.sel {
            ManagementSelect::CREATE if order.csi != Csi::NVM => {
                return Err(Status::COMMAND_SET_NOT_SUPPORTED.with_dnr());
            }
            ManagementSelect::CREATE => {}
            ManagementSelect::DELETE => {
                return delete(sqe, order.nsid, controller, subsystem, management);
            }
            _ => return Err(invalid),
        }
    }
    let from = source(sqe, received, PAGE_BYTES as u32, false)?;
    Ok(Plan::Manage { from })
}

/// Returns the request of a command whose data were pulled.
///
/// # Errors
/// The status to answer with.
pub fn order(sqe: &Sqe, data: &[u8], controller: &Controller) -> Result<NamespaceRequest, Status> {
    // A reload may have changed the permissions during the transfer of the data.
    granted(controller)?;
    let data = data.first_chunk().ok_or(Status::INTERNAL_ERROR)?;
    if sqe.admin_opcode() == AdminOpcode::NAMESPACE_MANAGEMENT {
        return creation(&NewNamespace::parse(data)).map(NamespaceRequest::Create);
    }
    let NamespaceAttachment { sel, nsid } = NamespaceAttachment::parse(sqe);
    let count = u16::from_le_bytes([data[0], data[1]]);
    let cntlids: Vec<u16> = controllers(data).collect();
    if !(1..=CONTROLLERS_MAX).contains(&count) || !cntlids.is_sorted_by(|a, b| a < b) {
        return Err(Status::CONTROLLER_LIST_INVALID.with_dnr());
    }
    match sel {
        AttachmentSelect::ATTACH => Ok(NamespaceRequest::Attach { nsid, cntlids }),
        _ => Ok(NamespaceRequest::Detach { nsid, cntlids }),
    }
}

/// Fills a page of Identify that has more contents for a host that may manage namespaces; false for
/// any other page.
///
/// # Errors
/// Invalid Namespace or Format for an invalid namespace id.
pub(super) fn identify(
    asked: &Identify,
    controller: &Controller,
    subsystem: &Subsystem,
    management: &Management,
    env: &AdminContext<'_>,
    page: &mut [u8; PAGE_BYTES],
) -> Result<bool, Status> {
    let &Identify { cns, nsid, cntid, .. } = asked;
    let allocated = management.allocated(nsid);
    match cns {
        // Properties that any namespace can be created with.
        Cns::NAMESPACE if nsid == NSID_ALL => common().emit(page),
        Cns::ALLOCATED_NAMESPACES if nsid >= identify::NSID_BEYOND_LISTS => {
            return Err(Status::INVALID_NAMESPACE.with_dnr());
        }
        Cns::ALLOCATED_NAMESPACES => {
            let made = management.allocated.iter().map(|allocated| allocated.namespace.nsid);
            let seen = subsystem.namespaces.iter().map(|namespace| namespace.nsid);
            let all: BTreeSet<u32> = made.chain(seen).collect();
            emit_namespaces(page, nsid, all);
        }
        Cns::ALLOCATED_NAMESPACE => {
            let made = allocated.map(|allocated| &allocated.namespace);
            let found = made.map_or_else(|| identify::valid(subsystem, nsid), |n| Ok(Some(n)))?;
            if let Some(found) = found {
                identify::namespace(found, controller).emit(page);
            }
        }
        Cns::NAMESPACE_CONTROLLERS if allocated.is_some() => {
            let has = |host: &Nqn| allocated.is_some_and(|a| a.hosts.contains(host));
            let all = (env.controllers)().into_iter();
            emit_controllers(page, cntid, all.filter(|(_, host)| has(host)).map(|(id, _)| id));
        }
        Cns::CONTROLLERS => {
            emit_controllers(page, cntid, (env.controllers)().into_iter().map(|(id, _)| id));
        }
        _ => return Ok(false),
    }
    Ok(true)
}

/// Returns Identify Namespace of no particular namespace.
fn common() -> IdentifyNamespace {
    let mut page = IdentifyNamespace {
        nlbaf_z: (FORMATS.len() - 1) as u8,
        nmic: identify::SHARED,
        dlfeat: identify::DEALLOCATED_READS_ZEROS,
        ..IdentifyNamespace::default()
    };
    for (to, lbads) in page.lbaf.iter_mut().zip(FORMATS) {
        *to = LbaFormat { lbads, ..LbaFormat::default() };
    }
    page
}

/// Returns the namespaces that the host of a controller may manage.
fn granted(controller: &Controller) -> Result<(&Subsystem, &Management), Status> {
    let subsystem = controller.subsystem();
    let granted = subsystem.and_then(|s| Some((&**s, &**s.management.as_ref()?)));
    granted.ok_or(Status::INVALID_OPCODE.with_dnr())
}

fn delete(
    sqe: &Sqe,
    nsid: u32,
    controller: &Controller,
    subsystem: &Subsystem,
    management: &Management,
) -> Result<Plan, Status> {
    no_data(sqe)?;
    // A namespace whose file is missing can only be deleted.
    let is_absent = management.absent.iter().any(|absent| absent.nsid == nsid);
    if nsid != NSID_ALL && !is_absent {
        made_by_a_host(nsid, subsystem, management)?;
    }
    let of = management.allocated.iter().map(|allocated| &allocated.namespace);
    for namespace in of.filter(|n| nsid == NSID_ALL || n.nsid == nsid) {
        if namespace.formatting.is_some() {
            return Err(Status::FORMAT_IN_PROGRESS);
        }
        if namespace.is_read_only() {
            return Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr());
        }
        controller.association.reservations.barred(namespace.nsid).check(Barred::WRITE)?;
    }
    Ok(Plan::Order { what: NamespaceRequest::Delete { nsid }, made: CreatedNsid::default() })
}

/// Checks that a namespace was created by a host: hosts can delete, attach and detach no others.
fn made_by_a_host(nsid: u32, subsystem: &Subsystem, management: &Management) -> Result<(), Status> {
    match management.allocated(nsid) {
        Some(_) => Ok(()),
        // Declared in the configuration.
        None if subsystem.namespace(nsid).is_ok() => Err(Status::OPERATION_DENIED.with_dnr()),
        None => Err(Status::INVALID_NAMESPACE.with_dnr()),
    }
}

/// Returns the request to create a namespace, if its properties are valid.
fn creation(new: &NewNamespace) -> Result<CreateRequest, Status> {
    let invalid = Status::INVALID_FIELD.with_dnr();
    let metadata_in_block = new.flbas >> 4 & 1 == 1;
    let format = FORMATS.get(usize::from(new.format_index())).filter(|_| !metadata_in_block);
    let shift = *format.ok_or(Status::INVALID_FORMAT.with_dnr())?;
    if new.nsze == 0 || new.ncap > new.nsze {
        return Err(invalid);
    }
    if new.ncap < new.nsze {
        return Err(Status::THIN_PROVISIONING_NOT_SUPPORTED.with_dnr());
    }
    // A namespace is attached to all controllers of a host or to none, so a private one (NMIC 0,
    // the default of nvme-cli) belongs to a host, not to a controller.
    if new.dps != 0 || new.nmic & !identify::SHARED != 0 || new.nvmsetid != 0 || new.endgid != 0 {
        return Err(invalid);
    }
    if new.anagrpid > ANA_GROUPS {
        return Err(Status::ANA_GROUP_INVALID.with_dnr());
    }
    let bytes = new.nsze.checked_mul(1 << shift).filter(|bytes| i64::try_from(*bytes).is_ok());
    Ok(CreateRequest {
        bytes: bytes.ok_or(Status::NAMESPACE_INSUFFICIENT_CAPACITY.with_dnr())?,
        block_size_bytes: 1 << shift,
        ana_group: new.anagrpid.max(1),
        private: new.nmic & identify::SHARED == 0,
    })
}

#[cfg(test)]
pub(super) mod tests {
    use std::sync::Arc;

    use nvme::Sgl;
    use nvme::identify::{IdentifyController, namespaces};

    use crate::command::Source;
    use crate::command::admin::tests::{ask, given, keyed, nvm, refused};
    use crate::command::ns_management::*;
    use crate::subsystem::ns_management::{Allocated, Grant};
    use crate::subsystem::testing::sample;

    /// 1 and 2 are declared; hosts have created 7, which is attached to this one, and 9, which is
    /// attached to no host.
    pub(crate) fn granted() -> Controller {
        let mut subsystem = sample();
        let attached = subsystem.namespaces[2].clone();
        let mut detached = attached.clone();
        detached.nsid = 9;
        let mut controller = nvm();
        let hosts: BTreeSet<_> = [controller.association.host].into();
        let grant = Grant { quota_bytes: 100 << 30, any_host: true, hosts: BTreeSet::new() };
        let allocated = vec![
            Allocated { namespace: attached, hosts },
            Allocated { namespace: detached, hosts: BTreeSet::new() },
        ];
        let absent = Vec::new();
        let (used_bytes, images) = (8 << 30, Default::default());
        let management = Management { grant, allocated, absent, used_bytes, images };
        subsystem.management = Some(Arc::new(management));
        controller.replace_subsystem(Arc::new(subsystem));
        controller
    }

    fn delete(nsid: u32) -> Sqe {
        let sel = ManagementSelect::DELETE;
        NamespaceManagement { sel, nsid, csi: Csi::NVM }.emit(Sgl::NONE)
    }

    fn create() -> Sqe {
        NamespaceManagement::default().emit(keyed(4096))
    }

    fn attachment(sel: AttachmentSelect, nsid: u32) -> Sqe {
        NamespaceAttachment { sel, nsid }.emit(keyed(4096))
    }

    #[test]
    fn namespace_management_is_disabled_unless_configured() {
        for sqe in [delete(7), create(), attachment(AttachmentSelect::ATTACH, 7)] {
            assert_eq!(refused(ask(sqe, &mut nvm())), 0x001);
            assert!(ask(sqe, &mut self::granted()).is_ok());
            let late = order(&sqe, &[0; PAGE_BYTES], &nvm());
            assert_eq!(refused(late), 0x001, "taken back meanwhile");
        }
    }

    #[test]
    fn hosts_can_change_only_host_created_namespaces() {
        for sel in [AttachmentSelect::ATTACH, AttachmentSelect::DETACH] {
            for (nsid, code) in [(1, 0x015), (3, 0x00B), (0, 0x00B), (NSID_ALL, 0x002)] {
                assert_eq!(refused(ask(attachment(sel, nsid), &mut self::granted())), code);
            }
            for nsid in [7, 9] {
                let from = Source::Host(rdma::Remote { addr: 0x1000, key: 0x77, len: 4096 });
                let plan = ask(attachment(sel, nsid), &mut self::granted());
                assert_eq!(plan, Ok(Plan::Manage { from }));
            }
        }
        for (nsid, code) in [(1, 0x015), (3, 0x00B), (0, 0x00B), (1025, 0x00B)] {
            assert_eq!(refused(ask(delete(nsid), &mut self::granted())), code);
        }
        for nsid in [7, 9, NSID_ALL] {
            let Ok(Plan::Order { what, .. }) = ask(delete(nsid), &mut self::granted()) else {
                panic!("{nsid}")
            };
            assert_eq!(what, NamespaceRequest::Delete { nsid });
        }
    }

    #[test]
    fn protected_or_reserved_namespaces_are_not_deleted() {
        for nsid in [7, NSID_ALL] {
            let mut controller = self::granted();
            controller.association.reservations.set_barred(7, Barred::WRITE);
            assert_eq!(refused(ask(delete(nsid), &mut controller)), 0x083);
            let mut subsystem = Subsystem::clone(controller.subsystem().unwrap());
            let mut management = Management::clone(subsystem.management.as_ref().unwrap());
            management.allocated[0].namespace.read_only = true;
            subsystem.management = Some(Arc::new(management));
            controller.replace_subsystem(Arc::new(subsystem));
            assert_eq!(refused(ask(delete(nsid), &mut controller)), 0x020);
            assert!(ask(delete(9), &mut controller).is_ok(), "the other one is not concerned");
        }
    }

    #[test]
    fn a_namespace_reserved_by_another_host_is_neither_attached_nor_detached() {
        for sel in [AttachmentSelect::ATTACH, AttachmentSelect::DETACH] {
            let mut controller = self::granted();
            controller.association.reservations.set_barred(7, Barred::WRITE);
            assert_eq!(refused(ask(attachment(sel, 7), &mut controller)), 0x083);
            assert!(ask(attachment(sel, 9), &mut controller).is_ok(), "it is not reserved");
        }
    }

    #[test]
    fn invalid_management_commands_are_refused() {
        let unknown = ManagementSelect(2);
        let management = NamespaceManagement { sel: unknown, ..NamespaceManagement::default() };
        let zoned = NamespaceManagement { csi: Csi::ZONED, ..NamespaceManagement::default() };
        for (what, sqe, code) in [
            ("management of another kind", management.emit(keyed(4096)), 0x002),
            ("attachment of another kind", attachment(AttachmentSelect(2), 7), 0x002),
            ("zoned", zoned.emit(keyed(4096)), 0x129),
            ("delete with data", delete(7).with_sgl(keyed(4096)), 0x00F),
            ("create without data", NamespaceManagement::default().emit(Sgl::NONE), 0x00F),
            ("a short list", attachment(AttachmentSelect::ATTACH, 7).with_sgl(keyed(512)), 0x00F),
        ] {
            assert_eq!(refused(ask(sqe, &mut self::granted())), code, "{what}");
        }
    }

    #[test]
    fn invalid_create_parameters_are_refused_with_their_status() {
        let good = NewNamespace { nsze: 1024, ncap: 1024, nmic: 1, ..NewNamespace::default() };
        let ask = |new: NewNamespace| {
            let mut data = [0; PAGE_BYTES];
            new.emit(&mut data);
            order(&create(), &data, &self::granted())
        };
        let made = |block_size_bytes: u32, ana_group, private| {
            let bytes = 1024 * u64::from(block_size_bytes);
            Ok(NamespaceRequest::Create(CreateRequest {
                bytes,
                block_size_bytes,
                ana_group,
                private,
            }))
        };
        assert_eq!(ask(good), made(512, 1, false));
        assert_eq!(ask(NewNamespace { nmic: 0, ..good }), made(512, 1, true));
        assert_eq!(ask(NewNamespace { flbas: 1, anagrpid: 64, ..good }), made(4096, 64, false));
        for (what, new, code) in [
            ("no size", NewNamespace { nsze: 0, ncap: 0, ..good }, 0x002),
            ("more capacity than size", NewNamespace { ncap: 1025, ..good }, 0x002),
            ("thin", NewNamespace { ncap: 1023, ..good }, 0x11B),
            ("an unknown format", NewNamespace { flbas: 2, ..good }, 0x10A),
            ("a format of the upper half", NewNamespace { flbas: 0x20, ..good }, 0x10A),
            ("metadata", NewNamespace { flbas: 0x10, ..good }, 0x10A),
            ("protection information", NewNamespace { dps: 1, ..good }, 0x002),
            ("sharing of another kind", NewNamespace { nmic: 2, ..good }, 0x002),
            ("an NVM set", NewNamespace { nvmsetid: 1, ..good }, 0x002),
            ("an endurance group", NewNamespace { endgid: 1, ..good }, 0x002),
            ("a group that there is not", NewNamespace { anagrpid: 65, ..good }, 0x124),
            ("too large", NewNamespace { nsze: 1 << 55, ncap: 1 << 55, ..good }, 0x115),
            ("far too large", NewNamespace { nsze: u64::MAX, ncap: u64::MAX, ..good }, 0x115),
        ] {
            assert_eq!(refused(ask(new)), code, "{what}");
        }
    }

    #[test]
    fn management_hosts_see_allocated_namespaces_and_all_controllers() {
        let page = |cns: u8, nsid, controller: &mut Controller| -> [u8; PAGE_BYTES] {
            let sqe = Identify::new(Cns(cns), nsid).emit(keyed(4096));
            given(ask(sqe, controller)).try_into().unwrap()
        };
        let mut manager = self::granted();
        let found = IdentifyController::parse(&page(0x01, 0, &mut manager));
        assert_eq!(found.oacs & OACS, OACS);
        assert_eq!((found.tnvmcap_bytes, found.unvmcap_bytes), (100 << 30, 92 << 30));
        let list = |cns, after, manager: &mut Controller| -> Vec<u32> {
            namespaces(&page(cns, after, manager)).collect()
        };
        assert_eq!(list(0x10, 0, &mut manager), [1, 2, 7, 9]);
        assert_eq!(list(0x10, 2, &mut manager), [7, 9]);
        let mut found = |cns, nsid| IdentifyNamespace::parse(&page(cns, nsid, &mut manager));
        for nsid in [1, 7, 9] {
            assert_eq!(found(0x11, nsid).nsze, 1 << 20, "{nsid}");
        }
        assert_eq!(found(0x11, 3).nsze, 0, "not allocated");
        let common = found(0x00, NSID_ALL);
        let sizes = [common.lbaf[0].lbads, common.lbaf[1].lbads];
        assert_eq!((common.nsze, common.nlbaf_z, common.nmic, sizes), (0, 1, 1, [9, 12]));
        let list = |cns, nsid, manager: &mut Controller| -> Vec<u16> {
            controllers(&page(cns, nsid, manager)).collect()
        };
        assert_eq!(list(0x13, 0, &mut manager), [5, 8], "of all hosts");
        assert_eq!(list(0x12, 7, &mut manager), [5]);
        assert!(list(0x12, 9, &mut manager).is_empty());
        assert_eq!(list(0x12, 1, &mut manager), [5], "declared: each sees itself");
        for nsid in [NSID_ALL - 1, NSID_ALL] {
            let sqe = Identify::new(Cns(0x10), nsid).emit(keyed(4096));
            assert_eq!(refused(ask(sqe, &mut manager)), 0x00B);
        }
        let sqe = Identify::new(Cns(0x11), 1025).emit(keyed(4096));
        assert_eq!(refused(ask(sqe, &mut manager)), 0x00B);
        for cns in [0x10, 0x11] {
            let sqe = Identify::new(Cns(cns), 1).emit(keyed(4096));
            assert_eq!(refused(ask(sqe, &mut nvm())), 0x002);
        }
    }

    #[test]
    fn a_controller_list_must_be_nonempty_and_ascending() {
        let list = |ids: &[u16]| {
            let mut data = [0; PAGE_BYTES];
            emit_controllers(&mut data, 0, ids.iter().copied());
            data
        };
        let attach = attachment(AttachmentSelect::ATTACH, 7);
        let what = order(&attach, &list(&[1, 5]), &self::granted());
        assert_eq!(what, Ok(NamespaceRequest::Attach { nsid: 7, cntlids: vec![1, 5] }));
        let detach = attachment(AttachmentSelect::DETACH, 9);
        let what = order(&detach, &list(&[5]), &self::granted());
        assert_eq!(what, Ok(NamespaceRequest::Detach { nsid: 9, cntlids: vec![5] }));
        let mut long = list(&[5]);
        long[..2].copy_from_slice(&2048u16.to_le_bytes());
        for data in [list(&[]), list(&[5, 5]), list(&[5, 1]), long] {
            assert_eq!(refused(order(&attach, &data, &self::granted())), 0x11C);
        }
    }
}
