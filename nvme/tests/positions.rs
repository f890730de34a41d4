//! Position of each field: a second transcription of the tables of the specifications, byte
//! offset and size. For Identify Controller, the SMART log, the error entry and the firmware
//! slots a page with a different value in every field was also read back with tshark 4.0.

use nvme::fabrics::*;
use nvme::feature::*;
use nvme::identify::*;
use nvme::lba_status::*;
use nvme::log::*;
use nvme::property::*;
use nvme::reservation::*;
use nvme::sqe::*;

/// Each field changes with its first and its last byte, and not with the adjacent bytes.
macro_rules! positions {
    ($($test:ident: $name:ident { $($field:ident $offset:literal $size:literal,)* })*) => {$(
        #[test]
        fn $test() {
            let zero = $name::default();
            let with = |at: usize| {
                let mut bytes = [0; $name::BYTES];
                if let Some(byte) = bytes.get_mut(at) {
                    *byte = 0x82;
                }
                $name::parse(&bytes)
            };
            $(
                let name = stringify!($field);
                let (first, after) = ($offset, $offset + $size);
                assert_ne!(with(first).$field, zero.$field, "{name} begins later");
                assert_ne!(with(after - 1).$field, zero.$field, "{name} ends earlier");
                assert_eq!(with(after).$field, zero.$field, "{name} ends later");
                if first > 0 {
                    assert_eq!(with(first - 1).$field, zero.$field, "{name} begins earlier");
                }
            )*
        }
    )*};
}

positions! {
    identify_controller: IdentifyController {
        vid 0 2, ssvid 2 2, sn 4 20, mn 24 40, fr 64 8, rab 72 1, ieee 73 3, cmic 76 1, mdts 77 1,
        cntlid 78 2, ver 80 4, rtd3r_us 84 4, rtd3e_us 88 4, oaes 92 4, ctratt 96 4, rrls 100 2,
        cntrltype 111 1, fguid 112 16, crdt1_100ms 128 2, crdt2_100ms 130 2, crdt3_100ms 132 2,
        nvmsr 253 1, vwci 254 1, mec 255 1, oacs 256 2, acl_z 258 1, aerl_z 259 1, frmw 260 1,
        lpa 261 1, elpe_z 262 1, npss_z 263 1, avscc 264 1, apsta 265 1, wctemp_k 266 2,
        cctemp_k 268 2, mtfa_100ms 270 2, hmpre_4k 272 4, hmmin_4k 276 4, tnvmcap_bytes 280 16,
        unvmcap_bytes 296 16, rpmbs 312 4, edstt_min 316 2, dsto 318 1, fwug_4k 319 1,
        kas_100ms 320 2, hctma 322 2, mntmt_k 324 2, mxtmt_k 326 2, sanicap 328 4, hmminds_4k 332 4,
        hmmaxd 336 2, nsetidmax 338 2, endgidmax 340 2, anatt_s 342 1, anacap 343 1,
        anagrpmax 344 4, nanagrpid 348 4, pels_64k 352 4, domain_id 356 2, megcap_bytes 368 16,
        cqt_ms 386 2,
        sqes 512 1, cqes 513 1, maxcmd 514 2, nn 516 4, oncs 520 2, fuses 522 2, fna 524 1,
        vwc 525 1, awun_z 526 2, awupf_z 528 2, icsvscc 530 1, nwpc 531 1, acwu_z 532 2, cdfs 534 2,
        sgls 536 4, mnan 540 4, maxdna 544 16, maxcna 560 4, subnqn 768 256, ioccsz_16 1792 4,
        iorcsz_16 1796 4, icdoff_16 1800 2, fcatt 1802 1, msdbd 1803 1, ofcs 1804 2, dctype 1806 1,
    }
    lba_status_header: LbaStatusHeader { nlsd 0 4, cmpc 4 1, }
    lba_status_descriptor: LbaStatusDescriptor { dslba 0 8, nlb_z 8 4, status 13 1, }
    power_state: PowerState {
        max_power 0 2, flags 3 1, entry_us 4 4, exit_us 8 4, rrt 12 1, rrl 13 1, rwt 14 1, rwl 15 1,
        idle_power 16 2, idle_scale 18 1, active_power 20 2, active_scale 22 1,
    }
    identify_namespace: IdentifyNamespace {
        nsze 0 8, ncap 8 8, nuse 16 8, nsfeat 24 1, nlbaf_z 25 1, flbas 26 1, mc 27 1, dpc 28 1,
        dps 29 1, nmic 30 1, rescap 31 1, fpi 32 1, dlfeat 33 1, nawun_z 34 2, nawupf_z 36 2,
        nacwu_z 38 2, nabsn_z 40 2, nabo 42 2, nabspf_z 44 2, noiob 46 2, nvmcap_bytes 48 16,
        npwg_z 64 2, npwa_z 66 2, npdg_z 68 2, npda_z 70 2, nows_z 72 2, mssrl 74 2, mcl 76 4,
        msrc_z 80 1, anagrpid 92 4, nsattr 99 1, nvmsetid 100 2, endgid 102 2, nguid 104 16,
        eui64 120 8, lbaf 128 256,
    }
    identify_namespace_independent: IdentifyNamespaceIndependent {
        nsfeat 0 1, nmic 1 1, rescap 2 1, fpi 3 1, anagrpid 4 4, nsattr 8 1, nvmsetid 10 2,
        endgid 12 2, nstat 14 1,
    }
    identify_controller_nvm: IdentifyControllerNvm {
        vsl 0 1, wzsl 1 1, wusl 2 1, dmrl 3 1, dmrsl 4 4, dmsl 8 8, aocs 18 2,
    }
    error_entry: ErrorEntry {
        error_count 0 8, sqid 8 2, cid 10 2, status 12 2, parameter 14 2, lba 16 8, nsid 24 4,
        vendor_log 28 1, trtype 29 1, csi 30 1, opcode 31 1, command_info 32 8, transport_info 40 2,
        version 63 1,
    }
    smart: Smart {
        critical_warning 0 1, temperature_k 1 2, spare_percent 3 1, spare_threshold_percent 4 1,
        used_percent 5 1, endurance_warning 6 1, data_units_read 32 16, data_units_written 48 16,
        host_reads 64 16, host_writes 80 16, busy_min 96 16, power_cycles 112 16,
        power_on_hours 128 16, unsafe_shutdowns 144 16, media_errors 160 16, error_entries 176 16,
        warning_temperature_min 192 4, critical_temperature_min 196 4, sensors_k 200 16,
        tmt1_transitions 216 4, tmt2_transitions 220 4, tmt1_s 224 4, tmt2_s 228 4,
    }
    firmware_slots: FirmwareSlots { afi 0 1, revisions 8 56, }
    effects: Effects { admin 0 1024, io 1024 1024, }
    register_keys: RegisterKeys { current 0 8, new 8 8, }
    acquire_keys: AcquireKeys { current 0 8, preempt 8 8, }
    release_key: ReleaseKey { current 0 8, }
    reservation_status: ReservationStatus { generation 0 4, rtype 4 1, registrants 5 2, ptpls 9 1, }
    extended_registrant: ExtendedRegistrant { cntlid 0 2, rcsts 2 1, key 8 8, hostid 16 16, }
    notification_page: NotificationPage { count 0 8, kind 8 1, waiting 9 1, nsid 12 4, }
    ana_header: AnaHeader { chgcnt 0 8, ngrps 8 2, }
    ana_group: AnaGroup { grpid 0 4, nnsids 4 4, chgcnt 8 8, state 16 1, }
    discovery_header: DiscoveryHeader { genctr 0 8, numrec 8 8, recfmt 16 2, }
    discovery_entry: DiscoveryEntry {
        trtype 0 1, adrfam 1 1, subtype 2 1, treq 3 1, portid 4 2, cntlid 6 2, asqsz 8 2,
        eflags 10 2, trsvcid 32 32, subnqn 256 256, traddr 512 256, rdma_qptype 768 1,
        rdma_prtype 769 1, rdma_cms 770 1, rdma_pkey 776 2,
    }
}

/// Each bit range changes with its lowest and its highest bit, and not with the adjacent bits.
macro_rules! bit_positions {
    ($($test:ident: $name:ident($int:ty) { $($get:ident $low:literal $width:literal,)* })*) => {$(
        #[test]
        fn $test() {
            let zero = $name(0);
            let with = |bit: u32| $name((1 as $int).checked_shl(bit).unwrap_or(0));
            $(
                let name = stringify!($get);
                let (low, above) = ($low, $low + $width);
                assert_ne!(with(low).$get(), zero.$get(), "{name} begins higher");
                assert_ne!(with(above - 1).$get(), zero.$get(), "{name} ends lower");
                assert_eq!(with(above).$get(), zero.$get(), "{name} ends higher");
                if low > 0 {
                    assert_eq!(with(low - 1).$get(), zero.$get(), "{name} begins lower");
                }
            )*
        }
    )*};
}

bit_positions! {
    cap: Cap(u64) {
        mqes_z 0 16, cqr 16 1, ams 17 2, to_500ms 24 8, css 37 8, mpsmin 48 4, crwms 59 1,
        crims 60 1,
    }
    vs: Vs(u32) { tertiary 0 8, minor 8 8, major 16 16, }
    cc: Cc(u32) { en 0 1, css 4 3, mps 7 4, ams 11 3, shn 14 2, iosqes 16 4, iocqes 20 4, }
    csts: Csts(u32) { rdy 0 1, cfs 1 1, shst 2 2, }
    crto: Crto(u32) { crwmt_500ms 0 16, crimt_500ms 16 16, }
    flags: Flags(u8) { fuse 0 2, psdt 6 2, }
    rw_flags: RwFlags(u32) { nlb_z 0 16, dtype 20 4, deac 25 1, fua 30 1, limited_retry 31 1, }
    dsm_attributes: DsmAttributes(u32) { integral_read 0 1, integral_write 1 1, deallocate 2 1, }
    connect_attributes: ConnectAttributes(u8) { disable_sq_flow_control 2 1, }
    connect_result: ConnectResult(u32) { cntlid 0 16, atr 17 1, ascr 18 1, }
    cmic: Cmic(u8) { multi_port 0 1, multi_controller 1 1, ana 3 1, }
    ctratt: Ctratt(u32) { host_id_128 0 1, tbkas 6 1, }
    lpa: Lpa(u8) {
        smart_per_namespace 0 1, effects 1 1, extended_data 2 1, telemetry 3 1,
        persistent_event 4 1,
    }
    oncs: Oncs(u16) {
        compare 0 1, write_uncorrectable 1 1, dataset_management 2 1, write_zeroes 3 1,
        reservations 5 1, timestamp 6 1, verify 7 1, copy 8 1,
    }
    vwc: Vwc(u8) { present 0 1, flush_all 1 2, }
    sgls: Sgls(u32) { support 0 2, keyed 2 1, offset 20 1, }
    nsfeat: Nsfeat(u8) { thin 0 1, atomics 1 1, optimal_io 4 1, }
    log_support: LogSupport(u32) { supported 0 1, }
    critical_warning: CriticalWarning(u8) { reliability 2 1, }
    command_effects: CommandEffects(u32) {
        supported 0 1, lbcc 1 1, ncc 2 1, nic 3 1, ccc 4 1, cse 16 3, uuid 19 1,
    }
    treq: Treq(u8) { secure_channel 0 2, sq_flow_control_disable 2 1, }
    entry_flags: EntryFlags(u16) { duplicate 0 1, persistent 1 1, ncc 2 1, }
    capabilities: Capabilities(u32) { saveable 0 1, namespace_specific 1 1, changeable 2 1, }
    arbitration: Arbitration(u32) { burst 0 3, high_weight_z 24 8, }
    power_management: PowerManagement(u32) { power_state 0 5, workload 5 3, }
    temperature_threshold: TemperatureThreshold(u32) { threshold_k 0 16, sensor 16 4, kind 20 2, }
    error_recovery: ErrorRecovery(u32) { dulbe 16 1, }
    volatile_write_cache: VolatileWriteCache(u32) { wce 0 1, }
    number_of_queues: NumberOfQueues(u32) { submission_z 0 16, completion_z 16 16, }
    interrupt_vector_config: InterruptVectorConfig(u32) { vector 0 16, coalescing_disable 16 1, }
    write_atomicity: WriteAtomicity(u32) { disable_normal 0 1, }
    async_event_config: AsyncEventConfig(u32) {
        smart_warnings 0 8, namespace_attribute 8 1, firmware_activation 9 1, telemetry 10 1,
        ana_change 11 1, discovery_log 31 1,
    }
    keep_alive_timer: KeepAliveTimer(u32) { kato_ms 0 32, }
    host_identifier: HostIdentifier(u32) { extended 0 1, }
    namespace_write_protect: NamespaceWriteProtect(u32) { state 0 3, }
    async_event: AsyncEvent(u32) { kind 0 3, info 8 8, log 16 8, }
}

#[test]
fn power_states_follow_each_other_every_32_bytes() {
    let mut page = [0; IdentifyController::BYTES];
    page[2048 + 31 * 32] = 1;
    assert_eq!(IdentifyController::parse(&page).psd[31].max_power, 1);
}

#[test]
fn effects_have_a_dword_for_each_opcode() {
    let mut page = [0; Effects::BYTES];
    page[4 * 0x18] = 1;
    page[1024 + 4 * 0xFF + 2] = 2;
    let log = Effects::parse(&page);
    assert!(log.admin[0x18].supported());
    assert_eq!(log.io[0xFF].cse(), 2);
}
