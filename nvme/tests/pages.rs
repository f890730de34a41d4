//! Identify and log pages as Linux targets sent them, and every structure under arbitrary bytes.

mod support;

use crate::support::bytes;
use nvme::feature::{AsyncEventConfig, HostBehavior, Timestamp};
use nvme::identify::*;
use nvme::log::*;
use nvme::property::Vs;
use nvme::{NSID_ALL, Nqn, PAGE_BYTES, Text};
use proptest::prelude::*;

type Page = [u8; PAGE_BYTES];

#[test]
fn identify_controller_of_linux_6_12_round_trips() {
    let page: Page = bytes(include_str!("vectors/identify-controller.hex"));
    let id = IdentifyController::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    id.emit(&mut again);
    assert_eq!(again, page);

    // The values are those displayed by tshark, if it knows the field.
    assert_eq!((id.sn, id.mn), (Text::lossy("LABSERIAL0001"), Text::lossy("Linux")));
    assert_eq!(id.fr.to_string(), "6.12.117");
    assert_eq!((id.rab, id.mdts, id.cntlid, id.ver), (6, 8, 1, Vs::V1_3));
    assert_eq!(id.cmic, Cmic(0).with_multi_port(true).with_multi_controller(true).with_ana(true));
    let events = AsyncEventConfig(0).with_namespace_attribute(true).with_ana_change(true);
    assert_eq!(id.oaes, events);
    assert_eq!(id.ctratt, Ctratt(0).with_host_id_128(true).with_tbkas(true));
    assert_eq!(id.cntrltype, ControllerType::IO);
    assert_eq!((id.acl_z, id.aerl_z, id.frmw, id.elpe_z, id.npss_z), (3, 3, 3, 127, 0));
    assert_eq!(
        id.lpa,
        Lpa(0).with_smart_per_namespace(true).with_effects(true).with_extended_data(true)
    );
    assert_eq!((id.kas_100ms, id.anatt_s, id.anacap), (10, 10, 0x1F));
    assert_eq!((id.anagrpmax, id.nanagrpid), (128, 128));
    assert_eq!((id.sqes, id.cqes, id.nn, id.mnan), (0x66, 0x44, 1024, 1024));
    assert_eq!(id.oncs, Oncs(0).with_dataset_management(true).with_write_zeroes(true));
    assert_eq!((id.vwc, id.awun_z, id.awupf_z, id.nwpc), (Vwc(0).with_present(true), 0, 0, 1));
    assert_eq!(id.sgls, Sgls(0).with_support(1).with_keyed(true).with_offset(true));
    assert_eq!(id.subnqn.nqn(), Nqn::new("nqn.2024-01.io.test:sub1"));
    assert_eq!((id.ioccsz_16 * 16, id.iorcsz_16, id.icdoff_16, id.msdbd), (4160, 1, 0, 1));
    let state = id.psd[0];
    assert_eq!((state.max_power, state.entry_us, state.exit_us), (2500, 16, 4));
    assert_eq!(id.psd[1], PowerState::default());
}

#[test]
fn identify_controller_of_linux_6_1_round_trips() {
    let page: Page = bytes(include_str!("vectors/identify-controller-6.1.hex"));
    let id = IdentifyController::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    id.emit(&mut again);
    assert_eq!(again, page);
    assert_eq!((id.maxcmd, id.fr.to_string()), (1024, "6.1.0-56".into()));
}

#[test]
fn identify_discovery_controller_of_linux_round_trips() {
    let page: Page = bytes(include_str!("vectors/identify-controller-discovery.hex"));
    let id = IdentifyController::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    id.emit(&mut again);
    assert_eq!(again, page);
    assert_eq!(id.cntrltype, ControllerType::DISCOVERY);
    assert_eq!(id.subnqn.nqn(), Ok(Nqn::DISCOVERY));
    assert_eq!(id.oaes, AsyncEventConfig(0).with_discovery_log(true));
    assert!(id.lpa.extended_data() && id.sgls.keyed());
}

#[test]
fn identify_namespace_of_linux_round_trips() {
    let page: Page = bytes(include_str!("vectors/identify-namespace.hex"));
    let id = IdentifyNamespace::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    id.emit(&mut again);
    assert_eq!(again, page);
    assert_eq!((id.nsze, id.ncap, id.nuse), (65536, 65536, 65536));
    assert_eq!(id.nsfeat, Nsfeat(0).with_atomics(true).with_optimal_io(true));
    assert_eq!((id.nlbaf_z, id.nmic, id.anagrpid), (0, 1, 1));
    assert_eq!(id.lbaf[0], LbaFormat { metadata_bytes: 0, lbads: 12, rp: 0 });
    assert_eq!(id.block_bytes(), Some(4096));
}

#[test]
fn block_size_follows_the_format_in_use() {
    let mut id = IdentifyNamespace { flbas: 0b0110_1111, ..IdentifyNamespace::default() };
    assert_eq!((id.format_index(), id.block_bytes()), (63, None));
    id.lbaf[63].lbads = 9;
    assert_eq!(id.block_bytes(), Some(512));
    id.lbaf[63].lbads = 32;
    assert_eq!(id.block_bytes(), None);
}

#[test]
fn namespace_descriptors_of_linux_round_trip() {
    let page: Page = bytes(include_str!("vectors/namespace-descriptors.hex"));
    let ids = NamespaceIds::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    ids.emit(&mut again);
    assert_eq!(again, page);
    assert_eq!(ids.uuid.map(|uuid| uuid[0]), Some(0xE3));
    assert_eq!((ids.eui64, ids.nguid, ids.csi), (None, None, Some(Csi::NVM)));
}

#[test]
fn malformed_namespace_descriptors_are_skipped() {
    let mut page = [0; PAGE_BYTES];
    // A UUID that is too short, an unknown type, then a good EUI-64 and the end.
    page[..22].copy_from_slice(&[
        3,
        2,
        0,
        0,
        9,
        9,
        77,
        0xFF - 0xFC,
        0,
        0,
        1,
        2,
        3,
        1,
        8,
        0,
        0,
        1,
        2,
        3,
        4,
        5,
    ]);
    let expected =
        NamespaceIds { eui64: Some([1, 2, 3, 4, 5, 0, 0, 0]), ..NamespaceIds::default() };
    assert_eq!(NamespaceIds::parse(&page), expected);
    assert_eq!(NamespaceIds::parse(&[0xFF; PAGE_BYTES]), NamespaceIds::default());
}

#[test]
fn namespace_lists_of_linux_round_trip() {
    let some: Page = bytes(include_str!("vectors/active-namespaces.hex"));
    assert!(namespaces(&some).eq([1]));
    let mut again = [0xAA; PAGE_BYTES];
    emit_namespaces(&mut again, 0, [1]);
    assert_eq!(again, some);
    let none: Page = bytes(include_str!("vectors/active-namespaces-none.hex"));
    assert_eq!(namespaces(&none).count(), 0);
    emit_namespaces(&mut again, 1, [1]);
    assert_eq!(again, none);
    let changed: Page = bytes(include_str!("vectors/changed-namespaces.hex"));
    assert!(changed_namespaces(&changed).eq([1]));
    emit_changed_namespaces(&mut again, [1]);
    assert_eq!(again, changed);
}

#[test]
fn lists_end_where_the_page_does() {
    let mut page = [0xAA; PAGE_BYTES];
    emit_namespaces(&mut page, 5, 1..=5000);
    assert!(namespaces(&page).eq(6..=1029));
    emit_changed_namespaces(&mut page, 1..=1024);
    assert!(changed_namespaces(&page).eq(1..=1024));
    emit_changed_namespaces(&mut page, 1..=1025);
    assert!(changed_namespaces(&page).eq([NSID_ALL]));
    emit_controllers(&mut page, 3, 1..=5000);
    assert!(controllers(&page).eq(3..=2049));
    assert_eq!(page[..4], [0xFF, 0x07, 3, 0]);
    emit_controllers(&mut page, 0, []);
    assert_eq!(page, [0; PAGE_BYTES]);
    assert_eq!(controllers(&[0xFF; PAGE_BYTES]).count(), 2047);
    emit_command_sets(&mut page, [1, 5]);
    assert!(command_sets(&page).eq([1, 5]));
    emit_command_sets(&mut page, 1..=600);
    assert!(command_sets(&page).eq(1..=512));
}

#[test]
fn nvm_command_set_limits_are_encoded_and_zero_on_linux() {
    let page: Page = bytes(include_str!("vectors/identify-controller-nvm.hex"));
    assert_eq!(IdentifyControllerNvm::parse(&page), IdentifyControllerNvm::default());
    let limits =
        IdentifyControllerNvm { vsl: 1, wzsl: 2, wusl: 3, dmrl: 4, dmrsl: 5, dmsl: 6, aocs: 7 };
    let mut again = [0xAA; PAGE_BYTES];
    limits.emit(&mut again);
    assert_eq!(again[..16], [1, 2, 3, 4, 5, 0, 0, 0, 6, 0, 0, 0, 0, 0, 0, 0]);
    assert_eq!(again[16..20], [0, 0, 7, 0]);
    assert_eq!(again[20..], [0; PAGE_BYTES - 20]);
}

#[test]
fn namespace_ready_is_reported_in_byte_14() {
    let ready = IdentifyNamespaceIndependent { nstat: 1, ..Default::default() };
    let mut page = [0xAA; PAGE_BYTES];
    ready.emit(&mut page);
    assert_eq!(page.iter().position(|&byte| byte != 0), Some(14));
}

#[test]
fn effects_log_of_linux_round_trips() {
    let page: Page = bytes(include_str!("vectors/effects-log.hex"));
    let log = Effects::parse(&page);
    let mut again = [0xAA; PAGE_BYTES];
    log.emit(&mut again);
    assert_eq!(again, page);
    let supported = |effects: &[CommandEffects]| -> Vec<usize> {
        (0..effects.len()).filter(|&opcode| effects[opcode].supported()).collect()
    };
    assert_eq!(supported(&log.admin), [0x02, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18]);
    assert_eq!(supported(&log.io), [0x00, 0x01, 0x02, 0x08, 0x09]);
    assert!(log.io[1].lbcc() && !log.io[2].lbcc());
}

#[test]
fn smart_log_of_linux_round_trips() {
    let page: [u8; 512] = bytes(include_str!("vectors/smart-log.hex"));
    let log = Smart::parse(&page);
    assert_eq!(log.emit(), page);
    assert_eq!((log.data_units_read, log.data_units_written), (1, 1));
    assert_eq!((log.host_reads, log.host_writes), (5, 4));
    assert_eq!(log.critical_warning, CriticalWarning(0));
}

#[test]
fn ana_log_of_linux_round_trips() {
    let page: [u8; 52] = bytes(include_str!("vectors/ana-log.hex"));
    let (header, rest) = page.split_first_chunk().expect("16 bytes");
    let (group, nsids) = rest.split_first_chunk().expect("32 bytes");
    let parsed = (AnaHeader::parse(header), AnaGroup::parse(group));
    assert_eq!(parsed.0, AnaHeader { chgcnt: 0, ngrps: 1 });
    let optimized = AnaState::OPTIMIZED;
    assert_eq!(parsed.1, AnaGroup { grpid: 1, nnsids: 1, chgcnt: 0, state: optimized });
    assert_eq!(nsids, [1, 0, 0, 0]);
    assert_eq!((parsed.0.emit(), parsed.1.emit()), (*header, *group));
}

#[test]
fn discovery_log_of_linux_round_trips() {
    let page: [u8; 3072] = bytes(include_str!("vectors/discovery-log.hex"));
    let [header, this, other] = page.as_chunks().0 else { panic!("three times 1024 bytes") };
    let expected = DiscoveryHeader { genctr: 2, numrec: 2, recfmt: 0 };
    assert_eq!((DiscoveryHeader::parse(header), expected.emit()), (expected, *header));

    let entry = DiscoveryEntry::parse(this);
    assert_eq!(entry.emit(), *this);
    assert_eq!((entry.trtype, entry.adrfam), (TransportType::RDMA, AddressFamily::IPV4));
    assert_eq!(entry.subtype, SubsystemType::CURRENT_DISCOVERY);
    assert_eq!(entry.treq, Treq(0).with_sq_flow_control_disable(true));
    assert_eq!((entry.portid, entry.cntlid, entry.asqsz), (1, 0xFFFF, 32));
    assert_eq!(entry.eflags, EntryFlags(0));
    assert_eq!(entry.trsvcid.to_string(), "4420");
    assert_eq!(entry.traddr.to_string(), "10.77.0.1");
    assert_eq!(entry.subnqn.nqn(), Ok(Nqn::DISCOVERY));
    assert_eq!(entry.rdma_qptype, RdmaQpType::CONNECTED);
    assert_eq!(entry.rdma_prtype, RdmaProvider::UNSPECIFIED);
    assert_eq!((entry.rdma_cms, entry.rdma_pkey), (RdmaCms::RDMA_CM, 0));

    let entry = DiscoveryEntry::parse(other);
    assert_eq!(entry.emit(), *other);
    assert_eq!(entry.subtype, SubsystemType::NVM);
    assert_eq!(entry.subnqn.nqn(), Nqn::new("nqn.2024-01.io.test:sub1"));
}

#[test]
fn lengths_and_offsets_of_get_log_page_use_all_their_bits() {
    let most = GetLogPage { numd_z: u32::MAX, lpo: u64::MAX, ..GetLogPage::default() };
    assert_eq!(most.len_bytes(), 1 << 34);
    assert_eq!(GetLogPage::parse(&most.emit(nvme::Sgl::NONE)), most);
    assert_eq!(GetLogPage::new(LogId::ERROR, 4096, 1024).len_bytes(), 4096);
    assert_eq!(GetLogPage::new(LogId::ERROR, 0, 0).len_bytes(), 4);
}

/// `N` bytes from a seed; some of them mostly zero, like real pages.
fn noise<const N: usize>(seed: u64) -> Box<[u8; N]> {
    let mut state = seed | 1;
    let sparse = seed >> 63 == 1;
    let mut page = Box::new([0; N]);
    for byte in page.iter_mut() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        if !sparse || state.is_multiple_of(16) {
            *byte = (state >> 32) as u8;
        }
    }
    page
}

/// Parsing never fails, `emit` sets no other bit, and its output parses to the same.
macro_rules! any_bytes {
    (@emit page $value:ident) => {{
        let mut bytes = [0xAA; _];
        $value.emit(&mut bytes);
        bytes
    }};
    (@emit array $value:ident) => { $value.emit() };
    ($($test:ident: $kind:ident $name:ident;)*) => {
        proptest! {
            #![proptest_config(ProptestConfig::with_cases(64))]
            $(
                #[test]
                fn $test(seed: u64) {
                    let given = noise::<{ $name::BYTES }>(seed);
                    let value = $name::parse(&given);
                    let bytes: [u8; $name::BYTES] = any_bytes!(@emit $kind value);
                    prop_assert!(bytes.iter().zip(given.iter()).all(|(out, put)| out & !put == 0));
                    prop_assert_eq!($name::parse(&bytes), value);
                    prop_assert_ne!(format!("{value:?}"), "");
                }
            )*
        }
    };
}

any_bytes! {
    any_identify_controller: page IdentifyController;
    any_identify_namespace: page IdentifyNamespace;
    any_identify_namespace_independent: page IdentifyNamespaceIndependent;
    any_identify_controller_nvm: page IdentifyControllerNvm;
    any_power_state: array PowerState;
    any_lba_format: array LbaFormat;
    any_supported_pages: array SupportedPages;
    any_error_entry: array ErrorEntry;
    any_smart: array Smart;
    any_firmware_slots: array FirmwareSlots;
    any_effects: page Effects;
    any_ana_header: array AnaHeader;
    any_ana_group: array AnaGroup;
    any_discovery_header: array DiscoveryHeader;
    any_discovery_entry: array DiscoveryEntry;
    any_timestamp: array Timestamp;
    any_host_behavior: array HostBehavior;
}

proptest! {
    #[test]
    fn lists_in_arbitrary_pages_are_bounded(seed: u64) {
        let page = noise(seed);
        let _: NamespaceIds = NamespaceIds::parse(&page);
        prop_assert!(namespaces(&page).count() <= 1024);
        prop_assert!(changed_namespaces(&page).count() <= 1024);
        prop_assert!(controllers(&page).count() <= 2047);
        prop_assert!(command_sets(&page).count() <= 512);
    }

    #[test]
    fn namespace_descriptors_round_trip(
        eui64: Option<[u8; 8]>, nguid: Option<[u8; 16]>, uuid: Option<[u8; 16]>, csi: Option<u8>,
    ) {
        let ids = NamespaceIds { eui64, nguid, uuid, csi: csi.map(Csi) };
        let mut page = [0xAA; PAGE_BYTES];
        ids.emit(&mut page);
        prop_assert_eq!(NamespaceIds::parse(&page), ids);
    }

    #[test]
    fn namespace_and_controller_lists_round_trip(
        ids in prop::collection::btree_set(1u32.., 0..1100), after: u32, first: u16
    ) {
        let mut page = [0xAA; PAGE_BYTES];
        emit_namespaces(&mut page, after, ids.iter().copied());
        let expected = ids.iter().copied().filter(|&id| id > after).take(1024);
        prop_assert!(namespaces(&page).eq(expected));
        emit_changed_namespaces(&mut page, ids.iter().copied());
        if ids.len() > 1024 {
            prop_assert!(changed_namespaces(&page).eq([NSID_ALL]));
        } else {
            prop_assert!(changed_namespaces(&page).eq(ids.iter().copied()));
        }
        let short: std::collections::BTreeSet<u16> = ids.iter().map(|&id| id as u16).collect();
        emit_controllers(&mut page, first, short.iter().copied());
        prop_assert!(controllers(&page).eq(short.iter().copied().filter(|&id| id >= first)));
    }

    #[test]
    fn get_log_page_round_trips(
        lid: u8, nsid: u32, lsp in 0u8..128, rae: bool, lsi: u16, numd_z: u32, lpo: u64,
        offset_is_index: bool, csi: u8, uuid_index in 0u8..128,
    ) {
        let (lid, csi) = (LogId(lid), Csi(csi));
        let log = GetLogPage {
            lid, nsid, lsp, rae, lsi, numd_z, lpo, offset_is_index, csi, uuid_index,
        };
        let data = nvme::Sgl::in_capsule(0, 64);
        prop_assert_eq!(GetLogPage::parse(&log.emit(data)), log);
        prop_assert_eq!(log.len_bytes(), (u64::from(numd_z) + 1) * 4);
    }

    #[test]
    fn identify_round_trips(
        cns: u8, nsid: u32, cntid: u16, cnssid: u16, csi: u8, uuid_index in 0u8..128,
    ) {
        let (cns, csi) = (Cns(cns), Csi(csi));
        let identify = Identify { cns, nsid, cntid, cnssid, csi, uuid_index };
        prop_assert_eq!(Identify::parse(&identify.emit(nvme::Sgl::NONE)), identify);
    }
}
