//! Log pages.
//!
//! Source: NVMe Base Specification 2.0, "Get Log Page command" and the log page sections below it. Every log
//! supports offset and length: hosts read the longer ones in pieces.

use std::borrow::Cow;

use nvme::identify::Csi;
use nvme::log::{
    CommandEffects, CriticalWarning, Effects, ErrorEntry, FirmwareSlots, GetLogPage, LogId,
    LogSupport, Smart, SupportedPages, emit_changed_namespaces,
};
use nvme::{AdminOpcode, IoOpcode, NSID_ALL, PAGE_BYTES, Sqe, Status, Text};

use super::admin::AdminContext;
use super::{Plan, destination, features, identify, persistent_event};
use crate::controller::aer::{AsyncEvents, Event};
use crate::controller::association::{Association, ERROR_LOG_ENTRIES, ErrorRecord};
use crate::controller::{Controller, ControllerKind};
use crate::subsystem::Subsystem;
use crate::subsystem::ana::AnaLog;
use crate::subsystem::power::Power;
use crate::subsystem::usage::SavedCounters;

/// The logs of an NVM controller, as [`LogId::SUPPORTED_PAGES`] lists them, without the Persistent
/// Event log, which exists only with a state directory.
const LOGS: [LogId; 9] = [
    LogId::SUPPORTED_PAGES,
    LogId::ERROR,
    LogId::SMART,
    LogId::FIRMWARE_SLOT,
    LogId::CHANGED_NAMESPACES,
    LogId::EFFECTS,
    LogId::ANA,
    LogId::FEATURE_EFFECTS,
    LogId::RESERVATION_NOTIFICATION,
];

/// The admin commands that an NVM controller supports, besides the fabrics ones.
const ADMIN: [AdminOpcode; 8] = [
    AdminOpcode::GET_LOG_PAGE,
    AdminOpcode::IDENTIFY,
    AdminOpcode::ABORT,
    AdminOpcode::SET_FEATURES,
    AdminOpcode::GET_FEATURES,
    AdminOpcode::ASYNC_EVENT_REQUEST,
    AdminOpcode::KEEP_ALIVE,
    AdminOpcode::GET_LBA_STATUS,
];

/// The supported I/O commands; true for those that change the content of blocks.
const IO: [(IoOpcode, bool); 12] = [
    (IoOpcode::FLUSH, false),
    (IoOpcode::WRITE, true),
    (IoOpcode::READ, false),
    (IoOpcode::COMPARE, false),
    (IoOpcode::WRITE_ZEROES, true),
    (IoOpcode::DATASET_MANAGEMENT, true),
    (IoOpcode::VERIFY, false),
    (IoOpcode::COPY, true),
    (IoOpcode::RESERVATION_REGISTER, false),
    (IoOpcode::RESERVATION_REPORT, false),
    (IoOpcode::RESERVATION_ACQUIRE, false),
    (IoOpcode::RESERVATION_RELEASE, false),
];

/// Decides on a Get Log Page command ("Get Log Page command").
///
/// # Errors
/// Invalid Log Page for an unsupported one, Invalid Field for an invalid offset or length, and
/// errors of the SGL.
pub fn plan(
    sqe: &Sqe,
    controller: &mut Controller,
    env: &AdminContext<'_>,
) -> Result<Plan, Status> {
    let get = GetLogPage::parse(sqe);
    // A host that asks after a path related status needs the cause.
    controller.look_at_paths();
    if get.lid == LogId::PERSISTENT_EVENT {
        return persistent_event::plan(sqe, &get, controller, env);
    }
    let features = get.lid == LogId::FEATURE_EFFECTS && !controller.is_discovery();
    let features = features.then(|| features::effects(controller));
    let log = match &mut controller.role {
        ControllerKind::Discovery(service) if get.lid == LogId::DISCOVERY => {
            Cow::Borrowed(service.log(get.lpo, env.discovery))
        }
        ControllerKind::Discovery(_) => return Err(Status::INVALID_LOG_PAGE.with_dnr()),
        ControllerKind::Nvm(_) if features.is_some() => Cow::Owned(features.unwrap_or_default()),
        ControllerKind::Nvm(subsystem) => {
            let (association, events) = (&controller.association, &controller.events);
            let (ana, power) = (&controller.ana, env.power);
            Cow::Owned(nvm_log(&get, subsystem, association, events, ana, power)?)
        }
    };
    let page = piece(&get, &log, env.received.mdts_bytes)?;
    // A length that is checked against MDTS (32 bits) fits in 32 bits.
    let to = destination(sqe, env.received, get.len_bytes() as u32, false)?;
    if !get.rae {
        acknowledge(get.lid, controller);
    }
    Ok(Plan::Give { page, to })
}

/// Returns the part of a log that a command requests; shorter at the end of the log. A host may
/// request data beyond the end (the queue pair sends zeros for those), but not begin there.
pub(super) fn piece(get: &GetLogPage, log: &[u8], mdts_bytes: u32) -> Result<Vec<u8>, Status> {
    let invalid = Status::INVALID_FIELD.with_dnr();
    let len = get.len_bytes();
    if len > mdts_bytes.into() || get.offset_is_index || !get.lpo.is_multiple_of(4) {
        return Err(invalid);
    }
    let rest = usize::try_from(get.lpo).ok().and_then(|at| log.get(at..)).ok_or(invalid)?;
    let len = usize::try_from(len).unwrap_or(usize::MAX).min(rest.len());
    Ok(rest[..len].to_vec())
}

/// Acknowledges the event of a log that was read without retaining it ("Asynchronous Event Request
/// command").
fn acknowledge(lid: LogId, controller: &mut Controller) {
    let events = &mut controller.events;
    match lid {
        LogId::CHANGED_NAMESPACES => events.acknowledge(Event::NamespaceAttribute),
        LogId::ANA => events.acknowledge(Event::Ana),
        LogId::SMART => events.acknowledge(Event::Reliability),
        LogId::ERROR => events.acknowledge(Event::Fatal),
        LogId::DISCOVERY => events.acknowledge(Event::DiscoveryLog),
        LogId::RESERVATION_NOTIFICATION => {
            controller.association.reservations.acknowledge();
            events.acknowledge(Event::ReservationLog);
        }
        _ => {}
    }
}

/// Returns a whole log of an NVM controller. All are short, so they are cut afterwards.
fn nvm_log(
    get: &GetLogPage,
    subsystem: &Subsystem,
    association: &Association,
    events: &AsyncEvents,
    ana: &AnaLog,
    power: Power,
) -> Result<Vec<u8>, Status> {
    match get.lid {
        LogId::SUPPORTED_PAGES => Ok(supported_pages(subsystem)),
        LogId::ERROR => Ok(error_log(&association.errors().1)),
        LogId::SMART => smart(get.nsid, subsystem, power),
        LogId::FIRMWARE_SLOT => Ok(firmware_slots()),
        LogId::CHANGED_NAMESPACES => Ok(changed_namespaces(events)),
        LogId::EFFECTS if get.csi == Csi::NVM => Ok(effects(subsystem)),
        LogId::ANA => Ok(ana.page(get.lsp)),
        LogId::RESERVATION_NOTIFICATION => Ok(association.reservations.page().emit().into()),
        _ => Err(Status::INVALID_LOG_PAGE.with_dnr()),
    }
}

/// "Supported Log Pages (Log Identifier 00h)".
fn supported_pages(subsystem: &Subsystem) -> Vec<u8> {
    let mut supported = SupportedPages::default();
    let events = subsystem.usage.history().map(|_| LogId::PERSISTENT_EVENT);
    for lid in LOGS.into_iter().chain(events) {
        supported.pages[usize::from(lid.0)] = LogSupport(0).with_supported(true);
    }
    supported.emit().to_vec()
}

/// "Error Information (Log Identifier 01h)": always [`ERROR_LOG_ENTRIES`] entries, newest first,
/// unused ones all zero.
fn error_log(latest: &[(u64, ErrorRecord)]) -> Vec<u8> {
    /// With `csi` and `opcode`.
    const VERSION: u8 = 1;
    let mut log = Vec::with_capacity(ERROR_LOG_ENTRIES * ErrorEntry::BYTES);
    for (number, record) in latest.iter().take(ERROR_LOG_ENTRIES) {
        let entry = ErrorEntry {
            error_count: *number,
            sqid: record.sqid,
            cid: record.cid,
            status: record.status,
            parameter: record.parameter,
            lba: record.slba,
            nsid: record.nsid,
            csi: Csi::NVM,
            opcode: record.opcode,
            version: VERSION,
            ..ErrorEntry::default()
        };
        log.extend(entry.emit());
    }
    log.resize(ERROR_LOG_ENTRIES * ErrorEntry::BYTES, 0);
    log
}

/// "SMART / Health Information (Log Identifier 02h)".
///
/// With namespace id 0 or FFFFFFFFh of the whole subsystem, because a fabrics controller exists no
/// longer than its connection, and these are lifetime counters; otherwise of one namespace. Both
/// count commands of all hosts. The counters lag by up to a quarter of a second.
///
/// Only known values are reported. Monitoring would believe a plausible temperature; 0 K (shown as
/// -273 °C) is the value of fabrics targets without a sensor, and is not mistaken for a
/// measurement. Wear is reported by the medium below in its own log, so it stays 0 as well; spare
/// capacity is complete. Power is on while the daemon runs.
fn smart(nsid: u32, subsystem: &Subsystem, power: Power) -> Result<Vec<u8>, Status> {
    let usage = &subsystem.usage;
    let smart = match nsid {
        0 | NSID_ALL => health(&usage.whole(), usage.errors(), subsystem.is_degraded(), power),
        nsid => {
            let degraded = subsystem.namespace(nsid)?.health.is_degraded();
            health(&usage.of(nsid), usage.errors(), degraded, power)
        }
    };
    Ok(smart.emit().to_vec())
}

/// Returns the SMART log of these counters.
pub fn health(counters: &SavedCounters, errors: u64, degraded: bool, power: Power) -> Smart {
    let work = counters.work;
    let data_units = |units: u64| u128::from(units.div_ceil(1000));
    Smart {
        critical_warning: CriticalWarning(0).with_reliability(degraded),
        spare_percent: 100,
        data_units_read: data_units(work.units_read),
        data_units_written: data_units(work.units_written),
        host_reads: work.reads.into(),
        host_writes: work.writes.into(),
        busy_min: (counters.busy().as_secs() / 60).into(),
        power_cycles: power.cycles.into(),
        power_on_hours: power.on_hours.into(),
        unsafe_shutdowns: power.unsafe_shutdowns.into(),
        media_errors: work.media_errors.into(),
        error_entries: errors.into(),
        ..Smart::default()
    }
}

/// "Firmware Slot Information (Log Identifier 03h)": slot 1 is active and the only one.
fn firmware_slots() -> Vec<u8> {
    const EMPTY: Text<8> = Text([0; 8]);
    let mut slots = FirmwareSlots { afi: 1, revisions: [EMPTY; 7] };
    slots.revisions[0] = Text::lossy(identify::FIRMWARE);
    slots.emit().to_vec()
}

/// "Changed Namespace List (Log Identifier 04h)".
fn changed_namespaces(events: &AsyncEvents) -> Vec<u8> {
    let mut page = [0; PAGE_BYTES];
    match events.changed() {
        Some(ids) => emit_changed_namespaces(&mut page, ids),
        None => emit_changed_namespaces(&mut page, [NSID_ALL]),
    }
    page.to_vec()
}

/// "Commands Supported and Effects (Log Identifier 05h)".
fn effects(subsystem: &Subsystem) -> Vec<u8> {
    let supported = CommandEffects(0).with_supported(true);
    let mut effects = Effects::default();
    for opcode in ADMIN {
        effects.admin[usize::from(opcode.0)] = supported;
    }
    if subsystem.allows_format() {
        let format = usize::from(AdminOpcode::FORMAT_NVM.0);
        effects.admin[format] = supported.with_lbcc(true).with_ncc(true);
    }
    if subsystem.management.is_some() {
        for opcode in [AdminOpcode::NAMESPACE_MANAGEMENT, AdminOpcode::NAMESPACE_ATTACHMENT] {
            effects.admin[usize::from(opcode.0)] = supported.with_nic(true);
        }
    }
    for (opcode, changes_content) in IO {
        effects.io[usize::from(opcode.0)] = supported.with_lbcc(changes_content);
    }
    if subsystem.takes_write_uncorrectable() {
        let opcode = usize::from(IoOpcode::WRITE_UNCORRECTABLE.0);
        effects.io[opcode] = supported.with_lbcc(true);
    }
    let mut page = [0; PAGE_BYTES];
    effects.emit(&mut page);
    page.to_vec()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::Arc;
    use std::time::{Duration, Instant};

    use nvme::Sgl;
    use nvme::feature::{Capabilities, FeatureId, GetFeatures, Select};
    use nvme::log::{AnaState, DiscoveryHeader, FeaturesSupported, changed_namespaces};
    use nvme::reservation::{NotificationPage, NotificationType};

    use crate::command::admin;
    use crate::command::admin::tests::{
        MDTS, RECEIVED, ask, discovery_controller, given, keyed, nvm, refused,
    };
    use crate::command::log_page::*;
    use crate::controller::discovery::{Record, Subtype};
    use crate::subsystem::ana::AnaStates;
    use crate::subsystem::work::Work;

    fn command(lid: u8, lpo: u64, dwords: u32) -> Sqe {
        GetLogPage::new(LogId(lid), lpo, dwords).emit(keyed((dwords * 4).min(0xFF_FFFC)))
    }

    fn page(lid: LogId, bytes: u32, controller: &mut Controller) -> Vec<u8> {
        given(ask(command(lid.0, 0, bytes / 4), controller))
    }

    #[test]
    fn write_uncorrectable_is_reported_only_if_allowed() {
        for allowed in [false, true] {
            let mut subsystem = crate::subsystem::testing::sample();
            subsystem.namespaces[1].write_uncorrectable = allowed;
            let mut controller = nvm();
            controller.replace_subsystem(Arc::new(subsystem));
            let effects = page(LogId::EFFECTS, 4096, &mut controller);
            let told = CommandEffects(u32::from_le_bytes(effects[1040..1044].try_into().unwrap()));
            assert_eq!((told.supported(), told.lbcc()), (allowed, allowed));
            let identify = nvme::identify::Identify::new(nvme::identify::Cns::CONTROLLER, 0);
            let page = given(ask(identify.emit(keyed(4096)), &mut controller));
            assert_eq!(page[520] & 2 != 0, allowed);
        }
    }

    fn record(cid: u16, status: Status) -> ErrorRecord {
        ErrorRecord { sqid: 3, cid, status, nsid: 2, slba: 77, opcode: 2, parameter: 40 }
    }

    #[test]
    fn log_pages_are_returned_or_refused_as_specified() {
        let mut controller = nvm();
        for lid in 0..=u8::MAX {
            let result = ask(command(lid, 0, 1), &mut controller);
            match lid <= 5 || [0x0C, 0x12, 0x80].contains(&lid) {
                true => assert_eq!(given(result).len(), 4, "{lid:#04x}"),
                false => assert_eq!(refused(result), 0x109, "{lid:#04x}"),
            }
        }
        let smart = GetLogPage::new(LogId::SMART, 0, 128);
        let effects = GetLogPage::new(LogId::EFFECTS, 0, 1024);
        let table = [
            ("offset 2", command(2, 2, 1), 0x002),
            ("offset beyond the page", command(2, 516, 1), 0x002),
            ("offset far beyond", command(2, u64::MAX - 3, 1), 0x002),
            ("index", GetLogPage { offset_is_index: true, ..smart }.emit(keyed(512)), 0x002),
            ("SMART of no namespace", GetLogPage { nsid: 3, ..smart }.emit(keyed(512)), 0x00B),
            ("more than MDTS", command(2, 0, MDTS / 4 + 1), 0x002),
            ("16 GiB", GetLogPage { numd_z: u32::MAX, ..smart }.emit(keyed(4096)), 0x002),
            (
                "effects of another set",
                GetLogPage { csi: Csi(2), ..effects }.emit(keyed(4096)),
                0x109,
            ),
            ("buffer too short", smart.emit(keyed(508)), 0x00F),
        ];
        for (what, sqe, code) in table {
            assert_eq!(refused(ask(sqe, &mut controller)), code, "{what}");
        }
        for nsid in [0, 7, NSID_ALL] {
            assert!(ask(smart.emit(keyed(512)).with_nsid(nsid), &mut controller).is_ok());
        }
    }

    #[test]
    fn every_log_can_be_read_in_pieces_and_beyond_its_end() {
        let mut controller = nvm();
        controller.association.log_error(record(1, Status::INVALID_FIELD));
        controller.events.namespaces_changed([1, 2]);
        let sizes = [1024, 4096, 512, 512, 4096, 4096];
        for (lid, size) in (0u8..).zip(sizes) {
            let whole = page(LogId(lid), size, &mut controller);
            let mut pieces = Vec::new();
            for at in (0..size).step_by(256) {
                pieces.extend(given(ask(command(lid, at.into(), 64), &mut controller)));
            }
            assert!(pieces == whole, "log {lid:#04x}");
            let more = given(ask(command(lid, u64::from(size) - 4, 3), &mut controller));
            assert_eq!((&more[..4], &more[4..]), (&whole[whole.len() - 4..], &[0; 8][..]));
            assert_eq!(given(ask(command(lid, size.into(), 1), &mut controller)), [0; 4]);
            assert_eq!(given(ask(command(lid, 0, MDTS / 4), &mut controller)).len(), MDTS as usize);
        }
    }

    #[test]
    fn the_ana_log_reports_current_group_states() {
        let mut controller = nvm();
        let first = page(LogId::ANA, 60, &mut controller);
        assert_eq!((first[8], first[16], first[20], first[32]), (1, 1, 3, 1), "one group of three");
        assert_eq!(first[48..60], [1, 0, 0, 0, 2, 0, 0, 0, 7, 0, 0, 0]);
        controller.association.reach.set(&AnaStates::all(AnaState::CHANGE));
        let whole = page(LogId::ANA, 60, &mut controller);
        assert_eq!((whole[0], whole[24], whole[32]), (1, 2, 0xF), "counted, and told");
        let groups = GetLogPage { lsp: 1, ..GetLogPage::new(LogId::ANA, 0, 12) };
        let groups = given(ask(groups.emit(keyed(48)), &mut controller));
        assert_eq!((groups[8], groups[20], &groups[24..]), (1, 0, &whole[24..48]));
        // If retained, its event is still pending; if not, it is acknowledged.
        assert!(controller.events.park(3));
        let all = u32::MAX;
        assert_eq!(controller.events.next(all), Some((3, 0x0C_03_02)));
        controller.association.reach.set(&AnaStates::default());
        let read = GetLogPage { rae: false, ..GetLogPage::new(LogId::ANA, 0, 15) };
        assert_eq!(given(ask(read.emit(keyed(60)), &mut controller))[32], 1);
        assert!(controller.events.park(4));
        assert_eq!(controller.events.next(all), None);
    }

    #[test]
    fn the_supported_log_pages_list_matches_the_served_pages() {
        let bytes = page(LogId::SUPPORTED_PAGES, 1024, &mut nvm());
        let found = SupportedPages::parse(&bytes.try_into().unwrap());
        let ids: Vec<_> = (0..256).filter(|&lid| found.pages[lid].supported()).collect();
        assert_eq!(ids, [0, 1, 2, 3, 4, 5, 0x0C, 0x12, 0x80]);
    }

    #[test]
    fn the_error_log_has_the_newest_first() {
        let mut controller = nvm();
        for cid in 0..70 {
            let status = Status::LBA_OUT_OF_RANGE.with_dnr();
            controller.association.log_error(record(cid, status));
        }
        let bytes = page(LogId::ERROR, 4096, &mut controller);
        let entries: Vec<_> = bytes.as_chunks().0.iter().map(ErrorEntry::parse).collect();
        assert_eq!(entries.len(), ERROR_LOG_ENTRIES);
        assert_eq!((entries[0].error_count, entries[0].cid), (70, 69));
        assert_eq!((entries[63].error_count, entries[63].cid), (7, 6));
        assert_eq!((entries[0].sqid, entries[0].nsid, entries[0].lba), (3, 2, 77));
        assert_eq!(entries[0].status, Status::LBA_OUT_OF_RANGE.with_dnr());
        assert_eq!((entries[0].parameter, entries[0].opcode, entries[0].version), (40, 2, 1));
        let smart = page(LogId::SMART, 512, &mut controller);
        assert_eq!(Smart::parse(&smart.try_into().unwrap()).error_entries, 70);
        assert!(page(LogId::ERROR, 4096, &mut nvm()).iter().all(|b| *b == 0));
    }

    #[test]
    fn smart_counts_in_thousands_rounded_up() {
        let mut controller = nvm();
        let work =
            Work { reads: 3, writes: 1, units_read: 2001, units_written: 8, media_errors: 2 };
        let usage = Arc::clone(&controller.subsystem().unwrap().usage);
        usage.add(1, &work);
        for second in (0..150).map(Duration::from_secs) {
            usage.note_busy([1].into_iter(), Instant::now() + second);
        }
        let bytes = page(LogId::SMART, 512, &mut controller);
        let found = Smart::parse(&bytes.try_into().unwrap());
        assert_eq!((found.data_units_read, found.data_units_written), (3, 1));
        assert_eq!((found.host_reads, found.host_writes, found.media_errors), (3, 1, 2));
        assert_eq!((found.critical_warning.0, found.temperature_k), (0, 0));
        assert_eq!((found.spare_percent, found.spare_threshold_percent), (100, 0));
        let power = (found.power_cycles, found.power_on_hours, found.unsafe_shutdowns);
        assert_eq!((power, found.busy_min), ((3, 5, 1), 0), "150 quarters of a second");
    }

    #[test]
    fn smart_counters_cover_the_subsystem_or_one_namespace() {
        let mut controller = nvm();
        let usage = Arc::clone(&controller.subsystem().unwrap().usage);
        let reads = |reads| Work { reads, ..Work::default() };
        // Namespace 9 is removed; its counters remain.
        for (nsid, count) in [(9, 1), (2, 20), (7, 300)] {
            usage.add(nsid, &reads(count));
        }
        let health = Arc::clone(&controller.subsystem().unwrap().namespaces[1].health);
        health.fail_sync(Status::WRITE_FAULT);
        let get = GetLogPage::new(LogId::SMART, 0, 128);
        for (nsid, expected) in [(0, 321), (NSID_ALL, 321), (1, 0), (2, 20), (7, 300)] {
            let bytes = given(ask(GetLogPage { nsid, ..get }.emit(keyed(512)), &mut controller));
            let found = Smart::parse(&bytes.try_into().unwrap());
            assert_eq!(found.host_reads, expected, "{nsid}");
            let degraded = matches!(nsid, 0 | 2 | NSID_ALL);
            assert_eq!(found.critical_warning.reliability(), degraded, "{nsid}");
        }
    }

    #[test]
    fn firmware_slot_1_holds_the_running_version() {
        let bytes = page(LogId::FIRMWARE_SLOT, 512, &mut nvm());
        let found = FirmwareSlots::parse(&bytes.try_into().unwrap());
        assert_eq!((found.afi, found.revisions[1].0), (1, [0; 8]));
        assert_eq!(found.revisions[0].trimmed(), identify::FIRMWARE.as_bytes());
    }

    #[test]
    fn feature_effects_list_supported_features_with_their_scope() {
        let mut controller = nvm();
        let bytes = page(LogId::FEATURE_EFFECTS, 1024, &mut controller);
        let found = FeaturesSupported::parse(&bytes.try_into().unwrap());
        for (fid, entry) in (0..=u8::MAX).zip(found.features) {
            let (fid, sel) = (FeatureId(fid), Select::CAPABILITIES);
            let sqe = GetFeatures { fid, sel, nsid: 1, cdw11: 0 };
            match ask(sqe.emit(Sgl::NONE), &mut controller) {
                Ok(Plan::Reply(capabilities)) => {
                    let specific = Capabilities(capabilities as u32).namespace_specific();
                    assert!(entry.supported(), "{fid}");
                    assert_eq!(
                        (entry.of_namespace(), entry.of_controller()),
                        (specific, !specific)
                    );
                }
                refusal => {
                    assert_eq!(refused(refusal), 0x002);
                    assert_eq!(entry.0, 0, "{fid}");
                }
            }
        }
    }

    #[test]
    fn command_effects_list_exactly_the_supported_commands() {
        let bytes = page(LogId::EFFECTS, 4096, &mut nvm());
        let found = Effects::parse(&bytes.try_into().unwrap());
        let supported = |of: &[CommandEffects; 256]| {
            (0..256).filter(|&o| of[o].supported()).collect::<Vec<_>>()
        };
        assert_eq!(supported(&found.admin), [0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x86]);
        assert_eq!(
            supported(&found.io),
            [0x00, 0x01, 0x02, 0x05, 0x08, 0x09, 0x0C, 0x0D, 0x0E, 0x11, 0x15, 0x19]
        );
        let changing: Vec<_> = (0..256).filter(|&o| found.io[o].lbcc()).collect();
        assert_eq!(changing, [0x01, 0x08, 0x09, 0x19]);
    }

    #[test]
    fn changed_namespaces_are_listed_until_read_without_retaining() {
        let mut controller = nvm();
        controller.events.namespaces_changed([7, 2]);
        let get = GetLogPage::new(LogId::CHANGED_NAMESPACES, 0, 1024);
        let taken = GetLogPage { rae: false, ..get };
        let mut ids = |get: GetLogPage, len| {
            let bytes = given(ask(get.emit(keyed(len)), &mut controller));
            changed_namespaces(&bytes.try_into().unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(ids(get, 4096), [2, 7]);
        assert_eq!(ids(taken, 4096), [2, 7]);
        assert_eq!(ids(get, 4096), [0; 0]);
        controller.events.namespaces_changed(1..=2000);
        assert_eq!(refused(ask(taken.emit(keyed(16)), &mut controller)), 0x00F, "nothing read");
        let bytes = given(ask(taken.emit(keyed(4096)), &mut controller));
        let all: Vec<_> = changed_namespaces(&bytes.try_into().unwrap()).collect();
        assert_eq!(all, [NSID_ALL]);
    }

    #[test]
    fn reservation_notices_are_read_one_by_one() {
        let mut controller = nvm();
        let standing = &controller.association.reservations;
        standing.notify(2, NotificationType::RESERVATION_RELEASED);
        standing.notify(7, NotificationType::REGISTRATION_PREEMPTED);
        let get = GetLogPage::new(LogId::RESERVATION_NOTIFICATION, 0, 16);
        let mut read = |rae| {
            let sqe = GetLogPage { rae, ..get }.emit(keyed(64));
            let bytes = given(ask(sqe, &mut controller));
            let page = NotificationPage::parse(&bytes.try_into().unwrap());
            (page.count, page.kind.0, page.nsid, page.waiting)
        };
        assert_eq!([read(true), read(false)], [(1, 2, 2, 1); 2], "retained, then taken");
        assert_eq!(read(false), (2, 1, 7, 0));
        assert_eq!(read(false), (0, 0, 0, 0), "an empty page");
    }

    fn discover(controller: &mut Controller, count: &Cell<u64>, at: u64, rae: bool) -> Vec<u8> {
        let record = Record {
            subtype: Subtype::NVM,
            nqn: "nqn.2026-11.io.nvmfd:a".parse().unwrap(),
            address: "192.0.2.1:4420".parse().unwrap(),
            port_id: 1,
        };
        let discovery = |_| Some((count.get(), vec![record; count.get() as usize]));
        let (slot, now) = (0, Instant::now());
        let (received, power) = (RECEIVED, Power::default());
        let controllers = &|| Vec::new();
        let env = AdminContext { slot, received, now, power, discovery: &discovery, controllers };
        let get = GetLogPage { rae, ..GetLogPage::new(LogId::DISCOVERY, at, 256) };
        given(admin::plan(&get.emit(keyed(1024)), controller, &env))
    }

    #[test]
    fn a_discovery_log_read_in_pieces_is_of_one_generation() {
        let mut controller = discovery_controller();
        let count = Cell::new(2);
        let header = |bytes: Vec<u8>| DiscoveryHeader::parse(&bytes.try_into().unwrap());
        let found = header(discover(&mut controller, &count, 0, true));
        assert_eq!((found.genctr, found.numrec, found.recfmt), (2, 2, 0));
        count.set(1);
        assert_eq!(discover(&mut controller, &count, 2048, true)[..2], [1, 1], "still there");
        assert_eq!(discover(&mut controller, &count, 3072, true), [0; 1024], "the end");
        assert_eq!(header(discover(&mut controller, &count, 0, true)).genctr, 1);
        // A host may start in the middle.
        assert_eq!(discover(&mut discovery_controller(), &count, 1024, true)[..3], [1, 1, 2]);
    }

    #[test]
    fn reading_the_discovery_log_to_the_end_acknowledges_the_event() {
        let mut controller = discovery_controller();
        let count = Cell::new(1);
        let told = |controller: &mut Controller| {
            controller.events.park(4);
            controller.events.discovery_changed();
            let told = controller.events.next(u32::MAX).is_some();
            controller.events.take_parked().for_each(drop);
            told
        };
        assert!(told(&mut controller) && !told(&mut controller));
        discover(&mut controller, &count, 0, true);
        assert!(!told(&mut controller), "retained");
        discover(&mut controller, &count, 1024, false);
        assert!(told(&mut controller));
    }

    #[test]
    fn a_discovery_controller_has_one_log() {
        let mut controller = discovery_controller();
        for lid in (0..=u8::MAX).filter(|lid| *lid != 0x70) {
            assert_eq!(refused(ask(command(lid, 0, 1), &mut controller)), 0x109, "{lid:#04x}");
        }
        let table = [("offset 2", 2, 0x002), ("beyond", 1028, 0x002)];
        for (what, at, code) in table {
            assert_eq!(refused(ask(command(0x70, at, 1), &mut controller)), code, "{what}");
        }
        assert_eq!(given(ask(command(0x70, 1024, 1), &mut controller)), [0; 4], "at the end");
        let header = given(ask(command(0x70, 0, 5), &mut controller));
        assert_eq!((header.len(), header[0], header[8]), (20, 1, 0));
    }
}
