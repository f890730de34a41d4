//! Identify: data structures of the controller and its namespaces.
//!
//! Source: NVMe Base Specification 2.0, "Identify command"; NVM Command Set Specification 1.0,
//! "Identify command" for the pages of the command set.

use nvme::feature::AsyncEventConfig;
use nvme::identify::{
    Cmic, Cns, ControllerType, Csi, Ctratt, Identify, IdentifyController, IdentifyControllerNvm,
    IdentifyNamespace, IdentifyNamespaceIndependent, LbaFormat, Lpa, NamespaceIds, Nsfeat, Oncs,
    REPORTS_ALLOCATED_LBAS, Sgls, Vwc, emit_command_sets, emit_controllers, emit_namespaces,
};
use nvme::{Nqn, PAGE_BYTES, Sqe, Status, Text};

use super::admin::AdminContext;
use super::{
    Plan, SQE_BYTES, copy, destination, format_nvm, io_hints, lba_status, ns_management, sgl,
};
use crate::controller::aer::{Event, REQUESTS};
use crate::controller::association::ERROR_LOG_ENTRIES;
use crate::controller::{
    ABORTS, Controller, ControllerKind, KAS_100MS, RETRY_DELAYS_100MS, VERSION,
};
use crate::subsystem::ana::{ANACAP, ANATT_S, UNACQUIRED_GROUP, reported_group};
use crate::subsystem::event_log::PELS_64K;
use crate::subsystem::{MAX_NSID, Namespace, Subsystem};

/// The highest namespace id (NN). The active list contains the ids that exist, and one page of it
/// holds all of them.
pub const NAMESPACES_MAX: u32 = MAX_NSID;

/// The version reported to hosts (FR, and slot 1 of the Firmware Slot Information log).
pub const FIRMWARE: &str = env!("CARGO_PKG_VERSION");

/// Smallest memory page (CAP.MPSMIN = 0): the unit of MDTS.
const PAGE: u32 = PAGE_BYTES as u32;

/// From this value on a namespace id identifies no namespace and begins no list.
pub(super) const NSID_BEYOND_LISTS: u32 = 0xFFFF_FFFE;

/// Stands for "the controller that processes this command" in CNS 1Ch.
const CNTID_SELF: u16 = 0xFFFF;

/// The namespace exists for several controllers at once (NMIC).
pub const SHARED: u8 = 1;

/// Deallocated blocks read as zeros (001b), and Write Zeroes may deallocate (bit 3): the devices
/// punch holes, and a hole reads as zeros (DLFEAT).
pub(super) const DEALLOCATED_READS_ZEROS: u8 = 0b1001;

/// The content of deallocated blocks is not reported (000b): the device does not deallocate, so
/// they stay as they are. Write Zeroes writes zeros all the same.
const DEALLOCATED_STAYS: u8 = 0b1000;

/// Compare and Write is the supported fused command (FUSES). Its unit, ACWU, is one block: a device
/// writes that atomically also at a power failure.
const COMPARE_AND_WRITE: u16 = 1;

/// Slot 1 is the only one and cannot be written (FRMW).
const ONE_READ_ONLY_SLOT: u8 = 0b0011;

/// NSTAT: the namespace is ready (NRDY).
const READY: u8 = 1 << 0;
/// An I/O queue is deleted by the Disconnect command (OFCS).
const DISCONNECT: u16 = 1;

/// Decides on an Identify command ("Identify command").
///
/// # Errors
/// Invalid Field for an unsupported page, Invalid Namespace or Format for an invalid namespace id,
/// and errors of the SGL.
pub fn plan(
    sqe: &Sqe,
    controller: &mut Controller,
    env: &AdminContext<'_>,
) -> Result<Plan, Status> {
    let identify = Identify::parse(sqe);
    let mut page = [0; PAGE_BYTES];
    let mut not_ready = None;
    match &controller.role {
        ControllerKind::Nvm(subsystem) => {
            fill(&identify, controller, subsystem, env, &mut page)?;
            let asked = identify.cns == Cns::INDEPENDENT_NAMESPACE;
            let is_active = asked && subsystem.namespace(identify.nsid).is_ok();
            let is_ready = IdentifyNamespaceIndependent::parse(&page).nstat & READY != 0;
            not_ready = (is_active && !is_ready).then_some(identify.nsid);
        }
        ControllerKind::Discovery(service) if identify.cns == Cns::CONTROLLER => {
            discovery_controller(controller, service.nqn).emit(&mut page);
        }
        ControllerKind::Discovery(_) => return Err(Status::INVALID_FIELD.with_dnr()),
    }
    let to = destination(sqe, env.received, PAGE, false)?;
    if let Some(nsid) = not_ready {
        controller.reported_not_ready(nsid);
    }
    Ok(Plan::Give { page: page.to_vec(), to })
}

/// Fills the page of an NVM controller, which is all zero before.
fn fill(
    identify: &Identify,
    controller: &Controller,
    subsystem: &Subsystem,
    env: &AdminContext<'_>,
    page: &mut [u8; PAGE_BYTES],
) -> Result<(), Status> {
    let &Identify { cns, nsid, cntid, csi, .. } = identify;
    let cntlid = controller.association.cntlid;
    let unsupported = Status::INVALID_FIELD.with_dnr();
    if let Some(management) = &subsystem.management
        && ns_management::identify(identify, controller, subsystem, management, env, page)?
    {
        return Ok(());
    }
    match cns {
        Cns::NAMESPACE => {
            if let Some(found) = valid(subsystem, nsid)? {
                namespace(found, controller).emit(page);
            }
        }
        Cns::CONTROLLER => nvm_controller(controller, subsystem).emit(page),
        Cns::CSI_NAMESPACE | Cns::CSI_CONTROLLER | Cns::CSI_ACTIVE_NAMESPACES
            if csi != Csi::NVM =>
        {
            return Err(unsupported);
        }
        // All namespaces are of the one command set.
        Cns::ACTIVE_NAMESPACES | Cns::CSI_ACTIVE_NAMESPACES => {
            if nsid >= NSID_BEYOND_LISTS {
                return Err(Status::INVALID_NAMESPACE.with_dnr());
            }
            emit_namespaces(page, nsid, subsystem.namespaces.iter().map(|n| n.nsid));
        }
        Cns::NAMESPACE_DESCRIPTORS => ids(subsystem.namespace(nsid)?).emit(page),
        // No protection information and no extended format: all zero, once the id is valid.
        Cns::CSI_NAMESPACE => drop(valid(subsystem, nsid)?),
        // No limits besides MDTS and the 256 ranges of Dataset Management.
        Cns::CSI_CONTROLLER => {
            IdentifyControllerNvm { aocs: REPORTS_ALLOCATED_LBAS, ..Default::default() }.emit(page);
        }
        Cns::INDEPENDENT_NAMESPACE => {
            if let Some(found) = valid(subsystem, nsid)? {
                independent_namespace(found, controller).emit(page);
            }
        }
        // No other controller is listed: each host has its own, and must not see those of others.
        Cns::NAMESPACE_CONTROLLERS => {
            subsystem.namespace(nsid)?;
            emit_controllers(page, cntid, [cntlid]);
        }
        Cns::CONTROLLERS => emit_controllers(page, cntid, [cntlid]),
        Cns::COMMAND_SETS if cntid == CNTID_SELF || cntid == cntlid => {
            emit_command_sets(page, [1 << Csi::NVM.0]);
        }
        _ => return Err(unsupported),
    }
    Ok(())
}

/// Returns an active namespace; `None` for an id that is valid but inactive, whose pages are zero.
pub(super) fn valid(subsystem: &Subsystem, nsid: u32) -> Result<Option<&Namespace>, Status> {
    match subsystem.namespace(nsid) {
        Ok(namespace) => Ok(Some(namespace)),
        Err(_) if (1..=subsystem.offer.max_nsid).contains(&nsid) => Ok(None),
        Err(status) => Err(status),
    }
}

/// Returns the fields of Identify Controller that both kinds of controller have in common
/// ("Identify Controller data structure").
fn any_controller(controller: &Controller) -> IdentifyController {
    let limits = &controller.limits;
    IdentifyController {
        fr: Text::lossy(FIRMWARE),
        mdts: (limits.mdts_bytes / PAGE).checked_ilog2().unwrap_or(0) as u8,
        cntlid: controller.association.cntlid,
        ver: VERSION,
        ctratt: Ctratt(0).with_host_id_128(true).with_tbkas(true),
        aerl_z: (REQUESTS - 1) as u8,
        kas_100ms: KAS_100MS,
        maxcmd: limits.queue_depth,
        // Keyed descriptors and offsets into the capsule; Linux hosts require the former.
        sgls: Sgls(0).with_support(1).with_keyed(true).with_offset(true),
        msdbd: 1,
        ..IdentifyController::default()
    }
}

/// Returns Identify Controller of an I/O controller.
fn nvm_controller(controller: &Controller, subsystem: &Subsystem) -> IdentifyController {
    let in_capsule = controller.limits.in_capsule_bytes;
    IdentifyController {
        sn: subsystem.serial,
        mn: subsystem.model,
        // There may be several listeners, now or after a reload.
        cmic: Cmic(0).with_multi_port(true).with_multi_controller(true).with_ana(true),
        oaes: AsyncEventConfig(Event::NamespaceAttribute.enable_bit() | Event::Ana.enable_bit()),
        cntrltype: ControllerType::IO,
        oacs: lba_status::OACS
            | if subsystem.allows_format() { format_nvm::OACS } else { 0 }
            | if subsystem.management.is_some() { ns_management::OACS } else { 0 },
        tnvmcap_bytes: subsystem.management.as_ref().map_or(0, |m| m.grant.quota_bytes.into()),
        unvmcap_bytes: subsystem.management.as_ref().map_or(0, |m| m.left_bytes().into()),
        fna: if subsystem.allows_format() { format_nvm::FNA } else { 0 },
        acl_z: (ABORTS - 1) as u8,
        frmw: ONE_READ_ONLY_SLOT,
        lpa: Lpa(0)
            .with_smart_per_namespace(true)
            .with_effects(true)
            .with_extended_data(true)
            .with_persistent_event(subsystem.usage.history().is_some()),
        // An operation that a device has started is not cancelled, and a device may hang: after a
        // loss of communication no time is the worst case.
        cqt_ms: 0,
        pels_64k: if subsystem.usage.history().is_some() { PELS_64K } else { 0 },
        elpe_z: (ERROR_LOG_ENTRIES - 1) as u8,
        sqes: 0x66,
        cqes: 0x44,
        anatt_s: ANATT_S,
        anacap: ANACAP,
        anagrpmax: UNACQUIRED_GROUP,
        nanagrpid: UNACQUIRED_GROUP,
        nn: subsystem.offer.max_nsid,
        mnan: subsystem.offer.max_nsid,
        oncs: Oncs(0)
            .with_compare(true)
            .with_write_uncorrectable(subsystem.takes_write_uncorrectable())
            .with_dataset_management(true)
            .with_write_zeroes(true)
            .with_reservations(true)
            .with_timestamp(true)
            .with_verify(true)
            .with_copy(true),
        cdfs: copy::FORMATS,
        fuses: if subsystem.fuses() { COMPARE_AND_WRITE } else { 0 },
        // Linux reads this once per connection, and never flushes namespaces attached later if no
        // cache was reported: so one is always reported, whatever exists now.
        // (`independent_namespace` reports a namespace without a cache.) Flush of all namespaces at
        // once is not supported (10b): each has its own device.
        vwc: Vwc(0).with_present(true).with_flush_all(2),
        nwpc: subsystem.nwpc(),
        subnqn: subsystem.nqn.into(),
        ioccsz_16: (SQE_BYTES + in_capsule) / 16,
        msdbd: sgl::msdbd(in_capsule),
        iorcsz_16: 1,
        ofcs: DISCONNECT,
        crdt1_100ms: RETRY_DELAYS_100MS[0],
        crdt2_100ms: RETRY_DELAYS_100MS[1],
        crdt3_100ms: RETRY_DELAYS_100MS[2],
        ..any_controller(controller)
    }
}

/// Returns Identify Controller of a discovery controller: no namespaces, no I/O queues.
fn discovery_controller(controller: &Controller, nqn: Nqn) -> IdentifyController {
    IdentifyController {
        sn: Text::lossy("discovery"),
        mn: Text::lossy("nvmfd discovery"),
        oaes: AsyncEventConfig(Event::DiscoveryLog.enable_bit()),
        cntrltype: ControllerType::DISCOVERY,
        lpa: Lpa(0).with_extended_data(true),
        subnqn: nqn.into(),
        ..any_controller(controller)
    }
}

/// Returns Identify Namespace ("Identify Namespace data structure"): formats differ only in the
/// block size, there is no metadata.
pub(super) fn namespace(namespace: &Namespace, controller: &Controller) -> IdentifyNamespace {
    // The utilization is not known on a path without access to the blocks.
    let reached = controller.association.reach.check(namespace.ana_group).is_ok();
    let mdts_bytes = controller.limits.mdts_bytes;
    let copied_blocks = copy::most_blocks(mdts_bytes, namespace.block_shift);
    let mut page = IdentifyNamespace {
        nsze: namespace.blocks,
        ncap: namespace.blocks,
        nuse: if reached { namespace.utilization() } else { 0 },
        nsfeat: Nsfeat(0).with_thin(namespace.is_thin()),
        nmic: SHARED,
        rescap: namespace.reservation.rescap(),
        dlfeat: match namespace.health.keeps_space() {
            true => DEALLOCATED_STAYS,
            false => DEALLOCATED_READS_ZEROS,
        },
        anagrpid: reported_group(namespace, &controller.association.reach.states()),
        nsattr: u8::from(namespace.is_read_only()),
        mssrl: copied_blocks,
        mcl: copied_blocks.into(),
        msrc_z: copy::msrc_z(mdts_bytes),
        flbas: namespace.formats.index(namespace.block_shift),
        fpi: format_nvm::fpi(namespace),
        nguid: namespace.nguid,
        eui64: namespace.eui64.unwrap_or_default(),
        ..IdentifyNamespace::default()
    };
    io_hints::describe(&mut page, namespace.geometry, namespace.block_shift);
    for (to, lbads) in page.lbaf.iter_mut().zip(namespace.formats.shifts()) {
        *to = LbaFormat { lbads, ..LbaFormat::default() };
    }
    page.nlbaf_z = (namespace.formats.shifts().count().saturating_sub(1)) as u8;
    page
}

/// Returns the fields that are independent of the command set ("I/O Command Set Independent
/// Identify Namespace data structure").
fn independent_namespace(
    namespace: &Namespace,
    controller: &Controller,
) -> IdentifyNamespaceIndependent {
    const NO_CACHE: u8 = 1 << 5;
    IdentifyNamespaceIndependent {
        nsfeat: if namespace.volatile_cache { 0 } else { NO_CACHE },
        nmic: SHARED,
        rescap: namespace.reservation.rescap(),
        anagrpid: reported_group(namespace, &controller.association.reach.states()),
        nsattr: u8::from(namespace.is_read_only()),
        // Hosts may ignore one that is not ready until an event.
        nstat: if namespace.health.is_down() { 0 } else { READY },
        ..IdentifyNamespaceIndependent::default()
    }
}

/// Returns the identifiers of a namespace ("Namespace Identification Descriptor list").
fn ids(namespace: &Namespace) -> NamespaceIds {
    NamespaceIds {
        nguid: Some(namespace.nguid),
        uuid: Some(namespace.uuid),
        csi: Some(Csi::NVM),
        eui64: namespace.eui64,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use nvme::identify::{command_sets, controllers, namespaces};
    use nvme::log::AnaState;

    use crate::command::admin::tests::{ask, discovery_controller, given, keyed, nvm, refused};
    use crate::command::identify::*;
    use crate::subsystem::ana::AnaStates;
    use nvmfd_blockdev::{BackingConfig, BackingDevice, BackingKind, Space};

    fn command(cns: u8, nsid: u32) -> Sqe {
        Identify::new(Cns(cns), nsid).emit(keyed(4096))
    }

    fn page(sqe: Sqe) -> [u8; PAGE_BYTES] {
        given(ask(sqe, &mut nvm())).try_into().unwrap()
    }

    const ZERO: [u8; PAGE_BYTES] = [0; PAGE_BYTES];

    #[test]
    fn identify_pages_are_returned_or_refused_as_specified() {
        let with_csi = |cns, csi| Identify { csi: Csi(csi), ..Identify::new(Cns(cns), 1) };
        let refusals = [
            ("unknown namespace FFFFFFFFh", command(0x00, u32::MAX), 0x00B),
            ("namespace 0", command(0x00, 0), 0x00B),
            ("namespace beyond NN", command(0x00, NAMESPACES_MAX + 1), 0x00B),
            ("list after FFFFFFFEh", command(0x02, u32::MAX - 1), 0x00B),
            ("list after FFFFFFFFh", command(0x02, u32::MAX), 0x00B),
            ("descriptors, inactive", command(0x03, 3), 0x00B),
            ("descriptors, 0", command(0x03, 0), 0x00B),
            ("NVM sets", command(0x04, 0), 0x002),
            ("zoned namespace", with_csi(0x05, 2).emit(keyed(4096)), 0x002),
            ("zoned controller", with_csi(0x06, 2).emit(keyed(4096)), 0x002),
            ("command set namespace FFFFFFFFh", command(0x05, u32::MAX), 0x00B),
            ("independent, 0", command(0x08, 0), 0x00B),
            ("independent, beyond NN", command(0x08, 1025), 0x00B),
            ("zoned list", with_csi(0x07, 2).emit(keyed(4096)), 0x002),
            ("NVM list after FFFFFFFFh", command(0x07, u32::MAX), 0x00B),
            ("allocated list", command(0x10, 0), 0x002),
            ("controllers of an inactive namespace", command(0x12, 3), 0x00B),
            ("UUID list", command(0x17, 0), 0x002),
            ("endurance groups", command(0x19, 0), 0x002),
            (
                "command sets of another controller",
                Identify { cntid: 6, ..Identify::new(Cns(0x1C), 0) }.emit(keyed(4096)),
                0x002,
            ),
            ("unknown", command(0xFF, 0), 0x002),
            ("short buffer", Identify::new(Cns(1), 0).emit(keyed(4095)), 0x00F),
        ];
        for (what, sqe, code) in refusals {
            assert_eq!(refused(ask(sqe, &mut nvm())), code, "{what}");
        }
        for (cns, nsid) in [(0x00, 3), (0x00, 1024), (0x05, 1), (0x05, 3), (0x08, 3)] {
            assert!(page(command(cns, nsid)) == ZERO, "CNS {cns:#04x}, namespace {nsid}");
        }
        let limits = page(command(0x06, 0));
        assert_eq!(limits.iter().position(|&byte| byte != 0), Some(18), "AOCS alone");
        let longer = Identify::new(Cns::CONTROLLER, 0).emit(keyed(8192));
        assert_eq!(given(ask(longer, &mut nvm())).len(), PAGE_BYTES);
    }

    #[test]
    fn a_discovery_controller_has_one_page() {
        for cns in (0..=u8::MAX).filter(|cns| *cns != Cns::CONTROLLER.0) {
            assert_eq!(refused(ask(command(cns, 1), &mut discovery_controller())), 0x002);
        }
        let page = given(ask(command(0x01, 0), &mut discovery_controller()));
        let found = IdentifyController::parse(&page.try_into().unwrap());
        assert_eq!(found.cntrltype, ControllerType::DISCOVERY);
        assert_eq!(found.subnqn.nqn(), Ok(Nqn::DISCOVERY));
        assert_eq!((found.oaes.0, found.sgls.0), (1 << 31, 0x0010_0005));
        assert_eq!((found.nn, found.cntlid, found.kas_100ms, found.icdoff_16), (0, 5, 10, 0));
        assert!(found.lpa.extended_data());
    }

    #[test]
    fn fused_commands_are_reported_unless_all_namespaces_are_shared() {
        use crate::subsystem::reservation::Reservation;
        let fuses = |shared: usize, namespaces: usize| {
            let mut subsystem = crate::subsystem::testing::sample();
            let nqn = subsystem.nqn;
            subsystem.namespaces.truncate(namespaces);
            for namespace in &mut subsystem.namespaces[..shared] {
                namespace.reservation = Reservation::none(nqn, namespace.nsid);
            }
            let mut controller = nvm();
            controller.role = ControllerKind::Nvm(Arc::new(subsystem));
            let page: [u8; PAGE_BYTES] =
                given(ask(command(0x01, 0), &mut controller)).try_into().unwrap();
            IdentifyController::parse(&page).fuses
        };
        assert_eq!([fuses(0, 2), fuses(1, 2), fuses(0, 0)], [1; 3], "some may come");
        assert_eq!([fuses(2, 2), fuses(1, 1)], [0; 2]);
    }

    #[test]
    fn identify_controller_reports_the_fields_required_by_linux() {
        let found = IdentifyController::parse(&page(command(0x01, 0)));
        assert_eq!((found.vid, found.cntlid, found.ver), (0, 5, VERSION));
        assert_eq!((found.sn.trimmed(), found.mn.trimmed()), (&b"SERIAL"[..], &b"nvmfd"[..]));
        assert_eq!(found.fr.trimmed(), env!("CARGO_PKG_VERSION").as_bytes());
        let cmic = Cmic(0).with_multi_port(true).with_multi_controller(true).with_ana(true);
        assert_eq!(found.cmic, cmic);
        assert_eq!((found.anatt_s, found.anacap), (10, 0x1F), "all five states");
        assert_eq!((found.anagrpmax, found.nanagrpid), (65, 65));
        assert_eq!(found.mdts, 8, "1 MiB");
        assert_eq!((found.oaes.0, found.ctratt.0), (1 << 8 | 1 << 11, 0x41));
        assert_eq!(found.cntrltype, ControllerType::IO);
        assert_eq!((found.acl_z, found.aerl_z, found.frmw), (3, 3, 3));
        assert_eq!((found.lpa.0, found.elpe_z, found.kas_100ms), (0b00_0111, 63, 10));
        assert_eq!((found.sqes, found.cqes, found.maxcmd, found.nn), (0x66, 0x44, 128, 1024));
        assert_eq!(found.cqt_ms, 0, "not reported");
        assert_eq!((found.oncs.0, found.fuses, found.fna), (0b1_1110_1101, 1, 0));
        assert_eq!((found.nsetidmax, found.endgidmax), (0, 0), "neither is there");
        assert_eq!(found.cdfs, 0b11, "Copy takes formats 0 and 1");
        assert_eq!(found.acwu_z, 0, "one block");
        assert_eq!((found.vwc.0, found.awun_z, found.awupf_z), (0b101, 0, 0));
        assert_eq!((found.sgls.0, found.mnan), (0x0010_0005, 1024));
        assert_eq!(found.subnqn.nqn(), "nqn.2026-11.io.nvmfd:test".parse());
        assert_eq!((found.ioccsz_16, found.iorcsz_16, found.icdoff_16), (516, 1, 0));
        assert_eq!((found.fcatt, found.msdbd, found.oacs, found.rtd3e_us), (0, 4, 1 << 9, 0));
        assert_eq!([found.crdt1_100ms, found.crdt2_100ms, found.crdt3_100ms], [10, 50, 0]);
        assert_eq!(found.ofcs, 1, "Disconnect");
    }

    #[test]
    fn a_namespace_with_a_failed_device_is_not_ready() {
        let mut controller = nvm();
        let health = Arc::clone(&controller.subsystem().unwrap().namespace(1).unwrap().health);
        for (down, nstat) in [(false, 1), (true, 0)] {
            if down {
                health.set_down();
            }
            let page = given(ask(command(0x08, 1), &mut controller));
            let found = IdentifyNamespaceIndependent::parse(&page.try_into().unwrap());
            assert_eq!(found.nstat, nstat);
        }
        controller.look_at_stores();
        assert_eq!(controller.events.changed().unwrap().count(), 0);
        health.set_up();
        controller.look_at_stores();
        assert_eq!(controller.events.changed().unwrap().collect::<Vec<_>>(), [1]);
    }

    #[test]
    fn an_inaccessible_path_reports_zero_utilization() {
        for (state, nuse) in [(1, 1 << 20), (2, 1 << 20), (3, 0), (4, 0), (0xF, 0)] {
            let mut controller = nvm();
            controller.association.reach.set(&AnaStates::all(AnaState(state)));
            let page = given(ask(command(0x00, 1), &mut controller));
            let found = IdentifyNamespace::parse(&page.try_into().unwrap());
            assert_eq!((found.anagrpid, found.nsze, found.nuse), (1, 1 << 20, nuse));
            let page = given(ask(command(0x08, 1), &mut controller));
            let found = IdentifyNamespaceIndependent::parse(&page.try_into().unwrap());
            assert_eq!((found.anagrpid, found.nstat), (1, 1));
        }
    }

    /// A namespace attached later may have a cache, and its host does not read this page again.
    #[test]
    fn a_volatile_write_cache_is_reported_without_namespaces() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        Arc::make_mut(subsystem).namespaces.clear();
        let page = given(ask(command(0x01, 0), &mut controller));
        let found = IdentifyController::parse(&page.try_into().unwrap());
        assert_eq!(found.vwc, Vwc(0).with_present(true).with_flush_all(2));
    }

    #[test]
    fn identify_namespace_describes_one_format() {
        for (nsid, block_bytes) in [(1, 4096), (2, 512), (7, 4096)] {
            let found = IdentifyNamespace::parse(&page(command(0x00, nsid)));
            assert_eq!([found.nsze, found.ncap, found.nuse], [1 << 20; 3]);
            assert_eq!(
                (found.nlbaf_z, found.flbas, found.block_bytes()),
                (0, 0, Some(block_bytes))
            );
            assert_eq!((found.nmic, found.dlfeat, found.nsattr, found.dps), (1, 9, 0, 0));
            assert_eq!((found.nawun_z, found.nawupf_z, found.nacwu_z), (0, 0, 0));
            assert_eq!(page(command(0x00, nsid))[24] & 2, 0, "and they are not said");
            assert_eq!(found.rescap.0, 0xFE, "all types, nothing persists");
            let copied = (1 << 20) / block_bytes;
            assert_eq!((u32::from(found.mssrl), found.mcl, found.msrc_z), (copied, copied, 255));
            assert_eq!((found.nguid, found.eui64), ([nsid as u8; 16], [0; 8]));
            let independent = IdentifyNamespaceIndependent::parse(&page(command(0x08, nsid)));
            assert_eq!((independent.nstat, independent.nmic, independent.nsfeat), (1, 1, 0));
            assert_eq!(independent.rescap, found.rescap);
            let ids = NamespaceIds::parse(&page(command(0x03, nsid)));
            assert_eq!((ids.uuid, ids.csi), (Some([nsid as u8; 16]), Some(Csi::NVM)));
        }
    }

    #[test]
    fn dlfeat_reports_zeros_only_if_the_device_can_deallocate() {
        let backing = BackingKind::Ram { size: 1 << 20 };
        let config =
            BackingConfig { kind: backing, block_size_bytes: 512, read_only: false, shared: false };
        let backing = BackingDevice::open(&config).unwrap();
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        Arc::make_mut(subsystem).namespaces[0].health = Arc::clone(backing.health());
        let mut dlfeat = || {
            let page = given(ask(command(0x00, 1), &mut controller));
            IdentifyNamespace::parse(&page.try_into().unwrap()).dlfeat
        };
        assert_eq!(dlfeat(), 0b1001);
        backing.refuse(Space::Punch);
        assert_eq!(dlfeat(), 0b1000);
    }

    #[test]
    fn utilization_is_the_allocated_size_in_blocks_up_to_the_capacity() {
        for (nsid, block_bytes) in [(1, 4096), (2, 512)] {
            let mut controller = nvm();
            let health =
                Arc::clone(&controller.subsystem().unwrap().namespace(nsid).unwrap().health);
            let mut found = || {
                let page = given(ask(command(0x00, nsid), &mut controller));
                let found = IdentifyNamespace::parse(&page.try_into().unwrap());
                assert_eq!((found.nsze, found.ncap), (1 << 20, 1 << 20));
                (found.nuse, found.nsfeat.thin())
            };
            assert_eq!(found(), (1 << 20, false), "not known");
            for (allocated_bytes, nuse) in [
                (0, 0),
                (512, 1),
                (block_bytes * 3, 3),
                (block_bytes * 3 + 512, 4),
                (block_bytes << 20, 1 << 20),
                ((block_bytes << 20) + 8192, 1 << 20),
                (u64::MAX, 1 << 20),
            ] {
                // A block of 512 bytes more is one more there too.
                health.allocation().set_allocated_bytes(allocated_bytes);
                assert_eq!(found(), (nuse, true), "{allocated_bytes} bytes");
            }
        }
    }

    /// Deallocation reduces the utilization where thin provisioning is reported, and only there.
    #[test]
    fn thin_provisioning_is_not_reported_without_deallocation() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        let size_bytes = 1 << 32;
        let backing = BackingDevice::simulated(size_bytes, 4096).unwrap();
        backing.health().allocation().set_allocated_bytes(size_bytes / 2);
        Arc::make_mut(subsystem).namespaces[0].health = Arc::clone(backing.health());
        let mut found = || {
            let page = given(ask(command(0x00, 1), &mut controller));
            let found = IdentifyNamespace::parse(&page.try_into().unwrap());
            (found.nuse, found.nsfeat.thin())
        };
        assert_eq!(found(), (1 << 19, true));
        backing.refuse(Space::Punch);
        assert_eq!(found(), (1 << 19, false));
    }

    #[test]
    fn configured_namespace_identifiers_are_reported_unchanged() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        let namespace = &mut Arc::make_mut(subsystem).namespaces[0];
        (namespace.nguid, namespace.eui64) = ([9; 16], Some([1, 2, 3, 4, 5, 6, 7, 8]));
        let page = given(ask(command(0x00, 1), &mut controller));
        let found = IdentifyNamespace::parse(&page.try_into().unwrap());
        assert_eq!((found.nguid, found.eui64), ([9; 16], [1, 2, 3, 4, 5, 6, 7, 8]));
        let page = given(ask(command(0x03, 1), &mut controller));
        let ids = NamespaceIds::parse(&page.try_into().unwrap());
        let told = (ids.uuid, ids.nguid, ids.eui64);
        assert_eq!(told, (Some([1; 16]), Some([9; 16]), Some([1, 2, 3, 4, 5, 6, 7, 8])));
    }

    #[test]
    fn a_read_only_namespace_is_reported_as_write_protected() {
        let mut controller = nvm();
        let ControllerKind::Nvm(subsystem) = &mut controller.role else { panic!() };
        Arc::make_mut(subsystem).namespaces[0].read_only = true;
        let page = given(ask(command(0x00, 1), &mut controller));
        assert_eq!(IdentifyNamespace::parse(&page.try_into().unwrap()).nsattr, 1);
        let page = given(ask(command(0x08, 1), &mut controller));
        assert_eq!(IdentifyNamespaceIndependent::parse(&page.try_into().unwrap()).nsattr, 1);
    }

    #[test]
    fn identify_lists_start_at_the_requested_position() {
        for (after, left) in [(0, &[1, 2, 7][..]), (1, &[2, 7]), (2, &[7]), (7, &[])] {
            for cns in [0x02, 0x07] {
                assert_eq!(namespaces(&page(command(cns, after))).collect::<Vec<_>>(), left);
            }
        }
        let from = |cns, cntid| {
            let identify = Identify { cntid, ..Identify::new(Cns(cns), 1) };
            controllers(&page(identify.emit(keyed(4096)))).collect::<Vec<_>>()
        };
        for cns in [0x12, 0x13] {
            assert_eq!((from(cns, 0), from(cns, 5), from(cns, 6)), (vec![5], vec![5], vec![]));
        }
        for cntid in [5, u16::MAX] {
            let identify = Identify { cntid, ..Identify::new(Cns::COMMAND_SETS, 0) };
            let page = page(identify.emit(keyed(4096)));
            assert_eq!(command_sets(&page).collect::<Vec<_>>(), [1]);
        }
    }
}
