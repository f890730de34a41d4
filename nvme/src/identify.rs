//! Identify: controllers, namespaces, their lists and descriptors. Every page has 4096 bytes.
//!
//! Source: NVMe Base Specification 2.0, "Identify command"; NVM Command Set Specification 1.0 for
//! the command set specific pages.

mod namespace;

use byteorder::{ByteOrder, LittleEndian};

use crate::feature::AsyncEventConfig;
use crate::property::Vs;
use crate::{AdminOpcode, NqnField, PAGE_BYTES, Sgl, Sqe, Text};

pub use crate::ids::{Csi, NAMESPACES_PER_PAGE};
pub use namespace::{
    IdentifyNamespace, IdentifyNamespaceIndependent, LbaFormat, NamespaceIds, Nsfeat,
};

open_enum! {
    /// Controller or Namespace Structure: the requested structure.
    pub struct Cns(u8) {
        NAMESPACE = 0x00, "Identify Namespace";
        CONTROLLER = 0x01, "Identify Controller";
        ACTIVE_NAMESPACES = 0x02, "Active Namespace ID list";
        NAMESPACE_DESCRIPTORS = 0x03, "Namespace Identification Descriptor list";
        NVM_SETS = 0x04, "NVM Set List";
        CSI_NAMESPACE = 0x05, "I/O Command Set specific Identify Namespace";
        CSI_CONTROLLER = 0x06, "I/O Command Set specific Identify Controller";
        CSI_ACTIVE_NAMESPACES = 0x07, "I/O Command Set specific Active Namespace ID list";
        INDEPENDENT_NAMESPACE = 0x08, "I/O Command Set Independent Identify Namespace";
        ALLOCATED_NAMESPACES = 0x10, "Allocated Namespace ID list";
        ALLOCATED_NAMESPACE = 0x11, "Identify Namespace for an Allocated Namespace ID";
        NAMESPACE_CONTROLLERS = 0x12, "Controller List of controllers attached to a namespace";
        CONTROLLERS = 0x13, "Controller List of controllers in the NVM subsystem";
        PRIMARY_CAPABILITIES = 0x14, "Primary Controller Capabilities";
        SECONDARY_CONTROLLERS = 0x15, "Secondary Controller list";
        NAMESPACE_GRANULARITY = 0x16, "Namespace Granularity List";
        UUIDS = 0x17, "UUID List";
        DOMAINS = 0x18, "Domain List";
        ENDURANCE_GROUPS = 0x19, "Endurance Group List";
        COMMAND_SETS = 0x1C, "Identify I/O Command Set";
    }
}

command! {
    /// Fields of an Identify command.
    pub struct Identify {
        /// The requested structure.
        cns: Cns = cdw10[0, 8];
        /// Namespace id, if the structure concerns one; the id to start after, for lists of them.
        nsid: u32 = nsid[0, 32];
        /// Controller id, for the lists of controllers: the first to list.
        cntid: u16 = cdw10[16, 16];
        /// CNS specific identifier.
        cnssid: u16 = cdw11[0, 16];
        /// Command set.
        csi: Csi = cdw11[24, 8];
        /// UUID index, 7 bits.
        uuid_index: u8 = cdw14[0, 7];
    }
}

impl Identify {
    /// Creates a request for structure `cns` of namespace `nsid` (0 if the structure concerns none).
    pub fn new(cns: Cns, nsid: u32) -> Self {
        Self { cns, nsid, ..Self::default() }
    }

    /// Returns the command, with its 4096 bytes of data at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::IDENTIFY).with_sgl(data))
    }
}

open_enum! {
    /// Controller type.
    pub struct ControllerType(u8) {
        NOT_REPORTED = 0, "not reported";
        IO = 1, "I/O controller";
        DISCOVERY = 2, "Discovery controller";
        ADMINISTRATIVE = 3, "Administrative controller";
    }
}

bits! {
    /// Controller multi-path I/O and namespace sharing capabilities.
    pub struct Cmic(u8) {
        /// The subsystem may have more than one port.
        multi_port with_multi_port: bool = 0, 1;
        /// The subsystem may have more than one controller. Linux rejects a second path without it.
        multi_controller with_multi_controller: bool = 1, 1;
        /// Asymmetric namespace access reporting.
        ana with_ana: bool = 3, 1;
    }
}

bits! {
    /// Controller attributes.
    pub struct Ctratt(u32) {
        /// Host identifiers of 128 bits.
        host_id_128 with_host_id_128: bool = 0, 1;
        /// Traffic based keep alive: any command restarts the timer.
        tbkas with_tbkas: bool = 6, 1;
    }
}

bits! {
    /// Log page attributes.
    pub struct Lpa(u8) {
        /// SMART log per namespace.
        smart_per_namespace with_smart_per_namespace: bool = 0, 1;
        /// Commands Supported and Effects log.
        effects with_effects: bool = 1, 1;
        /// Extended data for Get Log Page: 32-bit lengths and offsets.
        extended_data with_extended_data: bool = 2, 1;
        /// Telemetry logs.
        telemetry with_telemetry: bool = 3, 1;
        /// Persistent event log.
        persistent_event with_persistent_event: bool = 4, 1;
    }
}

bits! {
    /// Optional NVM command support.
    pub struct Oncs(u16) {
        /// Compare.
        compare with_compare: bool = 0, 1;
        /// Write Uncorrectable.
        write_uncorrectable with_write_uncorrectable: bool = 1, 1;
        /// Dataset Management.
        dataset_management with_dataset_management: bool = 2, 1;
        /// Write Zeroes.
        write_zeroes with_write_zeroes: bool = 3, 1;
        /// Reservations.
        reservations with_reservations: bool = 5, 1;
        /// Timestamp feature.
        timestamp with_timestamp: bool = 6, 1;
        /// Verify.
        verify with_verify: bool = 7, 1;
        /// Copy.
        copy with_copy: bool = 8, 1;
    }
}

bits! {
    /// Volatile write cache.
    pub struct Vwc(u8) {
        /// There is one: hosts send Flush and FUA.
        present with_present: bool = 0, 1;
        /// Flush for all namespaces (nsid FFFFFFFFh): 0 not reported, 2 not supported, 3 supported.
        flush_all with_flush_all: u8 = 1, 2;
    }
}

bits! {
    /// SGL support.
    pub struct Sgls(u32) {
        /// 0 none, 1 supported, 2 supported with dword alignment.
        support with_support: u8 = 0, 2;
        /// Keyed SGL data block descriptors; RDMA hosts require it.
        keyed with_keyed: bool = 2, 1;
        /// Offsets in address fields: in-capsule data.
        offset with_offset: bool = 20, 1;
    }
}

wire! {
    /// Power state descriptor, 32 bytes.
    pub struct PowerState[32] {
        /// Maximum power, in centiwatts, or in units of 0.1 mW when bit 0 of `flags` is set.
        max_power: u16 = 0,
        /// Bit 0: scale of `max_power`; bit 1: non-operational state.
        flags: u8 = 3,
        /// Entry latency in microseconds.
        entry_us: u32 = 4,
        /// Exit latency in microseconds.
        exit_us: u32 = 8,
        /// Relative read throughput.
        rrt: u8 = 12,
        /// Relative read latency.
        rrl: u8 = 13,
        /// Relative write throughput.
        rwt: u8 = 14,
        /// Relative write latency.
        rwl: u8 = 15,
        /// Idle power, in the unit of `idle_scale`.
        idle_power: u16 = 16,
        /// Bits 7:6: 0 not reported, 1 0.1 mW, 2 10 mW.
        idle_scale: u8 = 18,
        /// Active power, in the unit of `active_scale`.
        active_power: u16 = 20,
        /// Bits 7:6 as `idle_scale`; bits 2:0 workload.
        active_scale: u8 = 22,
    }
}

wire! {
    /// Identify Controller (CNS 01h), 4096 bytes.
    pub struct IdentifyController[page 4096] {
        /// PCI vendor id.
        vid: u16 = 0,
        /// PCI subsystem vendor id.
        ssvid: u16 = 2,
        /// Serial number; the same in all controllers of a subsystem.
        sn: Text<20> = 4,
        /// Model number; the same in all controllers of a subsystem.
        mn: Text<40> = 24,
        /// Firmware revision.
        fr: Text<8> = 64,
        /// Recommended arbitration burst: 2^n commands.
        rab: u8 = 72,
        /// IEEE OUI, lowest byte first.
        ieee: [u8; 3] = 73,
        /// Multi-path capabilities.
        cmic: Cmic = 76,
        /// Maximum data transfer size: 2^n minimum memory pages (4 KiB); 0 no limit.
        mdts: u8 = 77,
        /// Controller id: as returned by Connect.
        cntlid: u16 = 78,
        /// Version, as the property.
        ver: Vs = 80,
        /// Runtime D3 resume latency in microseconds.
        rtd3r_us: u32 = 84,
        /// Runtime D3 entry latency in microseconds.
        rtd3e_us: u32 = 88,
        /// Optional asynchronous events supported: the notice bits.
        oaes: AsyncEventConfig = 92,
        /// Controller attributes.
        ctratt: Ctratt = 96,
        /// Read recovery levels supported.
        rrls: u16 = 100,
        /// Controller type.
        cntrltype: ControllerType = 111,
        /// FRU globally unique id.
        fguid: [u8; 16] = 112,
        /// Command retry delay time 1, in units of 100 ms.
        crdt1_100ms: u16 = 128,
        /// Command retry delay time 2, in units of 100 ms.
        crdt2_100ms: u16 = 130,
        /// Command retry delay time 3, in units of 100 ms.
        crdt3_100ms: u16 = 132,
        /// NVM subsystem report (NVMe-MI).
        nvmsr: u8 = 253,
        /// VPD write cycle information (NVMe-MI).
        vwci: u8 = 254,
        /// Management endpoint capabilities (NVMe-MI).
        mec: u8 = 255,
        /// Optional Admin command support.
        oacs: u16 = 256,
        /// Abort command limit, minus one.
        acl_z: u8 = 258,
        /// Asynchronous Event Request limit, minus one.
        aerl_z: u8 = 259,
        /// Firmware updates: bit 0 slot 1 read only, bits 3:1 number of slots, bit 4 activation
        /// without reset.
        frmw: u8 = 260,
        /// Log page attributes.
        lpa: Lpa = 261,
        /// Entries of the Error Information log, minus one.
        elpe_z: u8 = 262,
        /// Number of power states, minus one.
        npss_z: u8 = 263,
        /// Admin vendor specific command configuration.
        avscc: u8 = 264,
        /// Autonomous power state transition attributes.
        apsta: u8 = 265,
        /// Warning composite temperature in kelvins.
        wctemp_k: u16 = 266,
        /// Critical composite temperature in kelvins.
        cctemp_k: u16 = 268,
        /// Maximum time for firmware activation, in units of 100 ms.
        mtfa_100ms: u16 = 270,
        /// Host memory buffer preferred size, in units of 4 KiB.
        hmpre_4k: u32 = 272,
        /// Host memory buffer minimum size, in units of 4 KiB.
        hmmin_4k: u32 = 276,
        /// Total NVM capacity in bytes.
        tnvmcap_bytes: u128 = 280,
        /// Unallocated NVM capacity in bytes.
        unvmcap_bytes: u128 = 296,
        /// Replay protected memory block support.
        rpmbs: u32 = 312,
        /// Extended device self-test time in minutes.
        edstt_min: u16 = 316,
        /// Device self-test options.
        dsto: u8 = 318,
        /// Firmware update granularity, in units of 4 KiB.
        fwug_4k: u8 = 319,
        /// Keep alive granularity, in units of 100 ms; Linux requires that it is not 0.
        kas_100ms: u16 = 320,
        /// Host controlled thermal management attributes.
        hctma: u16 = 322,
        /// Minimum thermal management temperature in kelvins.
        mntmt_k: u16 = 324,
        /// Maximum thermal management temperature in kelvins.
        mxtmt_k: u16 = 326,
        /// Sanitize capabilities.
        sanicap: u32 = 328,
        /// Host memory buffer minimum descriptor entry size, in units of 4 KiB.
        hmminds_4k: u32 = 332,
        /// Host memory buffer maximum descriptor entries.
        hmmaxd: u16 = 336,
        /// NVM set identifier maximum.
        nsetidmax: u16 = 338,
        /// Endurance group identifier maximum.
        endgidmax: u16 = 340,
        /// ANA transition time in seconds.
        anatt_s: u8 = 342,
        /// ANA capabilities: bits 4:0 states reported, 6 group id stable, 7 group id settable.
        anacap: u8 = 343,
        /// ANA group identifier maximum.
        anagrpmax: u32 = 344,
        /// Number of ANA groups.
        nanagrpid: u32 = 348,
        /// Persistent event log size, in units of 64 KiB.
        pels_64k: u32 = 352,
        /// Domain identifier.
        domain_id: u16 = 356,
        /// Maximum endurance group capacity in bytes.
        megcap_bytes: u128 = 368,
        /// Command quiesce time: the worst-case time to end all outstanding commands after a loss
        /// of communication, in milliseconds; 0: not reported.
        cqt_ms: u16 = 386,
        /// Submission queue entry: bits 3:0 required, 7:4 maximum, both as 2^n bytes; 66h.
        sqes: u8 = 512,
        /// Completion queue entry: bits 3:0 required, 7:4 maximum, both as 2^n bytes; 44h.
        cqes: u8 = 513,
        /// Maximum outstanding commands per queue; not zero-based. Linux requires it for fabrics.
        maxcmd: u16 = 514,
        /// Number of namespaces: the highest namespace id.
        nn: u32 = 516,
        /// Optional NVM commands.
        oncs: Oncs = 520,
        /// Fused operations: bit 0 Compare and Write.
        fuses: u16 = 522,
        /// Format NVM attributes.
        fna: u8 = 524,
        /// Volatile write cache.
        vwc: Vwc = 525,
        /// Atomic write unit normal in logical blocks, minus one.
        awun_z: u16 = 526,
        /// Atomic write unit power fail in logical blocks, minus one.
        awupf_z: u16 = 528,
        /// I/O vendor specific command configuration.
        icsvscc: u8 = 530,
        /// Namespace write protection: bit 0 no write protect and write protect states, 1 until
        /// power cycle, 2 permanent.
        nwpc: u8 = 531,
        /// Atomic compare and write unit in logical blocks, minus one.
        acwu_z: u16 = 532,
        /// Copy descriptor formats supported, one bit each.
        cdfs: u16 = 534,
        /// SGL support.
        sgls: Sgls = 536,
        /// Maximum number of allowed namespaces; with ANA not 0, at most `nn`.
        mnan: u32 = 540,
        /// Maximum domain namespace attachments.
        maxdna: u128 = 544,
        /// Maximum I/O controller namespace attachments.
        maxcna: u32 = 560,
        /// Name of the subsystem.
        subnqn: NqnField = 768,
        /// I/O command capsule size, in units of 16 bytes; 64 + in-capsule data.
        ioccsz_16: u32 = 1792,
        /// I/O response capsule size, in units of 16 bytes.
        iorcsz_16: u32 = 1796,
        /// In-capsule data offset, in units of 16 bytes; 0 for RDMA.
        icdoff_16: u16 = 1800,
        /// Fabrics controller attributes: bit 0 static controller model.
        fcatt: u8 = 1802,
        /// Maximum SGL data block descriptors per command; 0 no limit.
        msdbd: u8 = 1803,
        /// Optional fabrics commands support: bit 0 Disconnect.
        ofcs: u16 = 1804,
        /// Discovery controller type: 0 not reported, 1 direct, 2 central.
        dctype: u8 = 1806,
        /// Power states 0 to 31.
        psd: [PowerState; 32] = 2048,
    }
}

wire! {
    /// Identify Controller of the NVM command set (CNS 06h, CSI 0), 4096 bytes.
    pub struct IdentifyControllerNvm[page 4096] {
        /// Verify size limit: 2^n minimum memory pages (4 KiB); 0 none.
        vsl: u8 = 0,
        /// Write Zeroes size limit: 2^n minimum memory pages (4 KiB); 0 none.
        wzsl: u8 = 1,
        /// Write Uncorrectable size limit: 2^n minimum memory pages (4 KiB); 0 none.
        wusl: u8 = 2,
        /// Dataset Management: ranges; 0 no limit.
        dmrl: u8 = 3,
        /// Dataset Management: logical blocks of one range; 0 no limit.
        dmrsl: u32 = 4,
        /// Dataset Management: logical blocks of all ranges; 0 no limit.
        dmsl: u64 = 8,
        /// Admin Optional Command Support: [`REPORTS_ALLOCATED_LBAS`].
        aocs: u16 = 18,
    }
}

/// Bit of AOCS: Get LBA Status reports allocated blocks (RALBAS).
pub const REPORTS_ALLOCATED_LBAS: u16 = 1;

/// Ids of a page that lists controllers.
pub const CONTROLLERS_PER_PAGE: usize = 2047;

/// Writes an Active Namespace ID list (CNS 02h): the first 1024 of `sorted` above `after`. The ids
/// must ascend and not be 0.
pub fn emit_namespaces(
    page: &mut [u8; PAGE_BYTES],
    after: u32,
    sorted: impl IntoIterator<Item = u32>,
) {
    *page = [0; PAGE_BYTES];
    let ids = sorted.into_iter().filter(|&id| id > after);
    for (to, id) in page.chunks_exact_mut(4).zip(ids) {
        LittleEndian::write_u32(to, id);
    }
}

/// The ids of an Active Namespace ID list, in order, up to the first 0.
pub fn namespaces(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u32> + '_ {
    crate::nsids(page)
}

/// Writes a Controller List (CNS 12h, 13h): the first 2047 of `sorted` from `first` on. The ids
/// must ascend.
pub fn emit_controllers(
    page: &mut [u8; PAGE_BYTES],
    first: u16,
    sorted: impl IntoIterator<Item = u16>,
) {
    *page = [0; PAGE_BYTES];
    let (count, list) = page.split_at_mut(2);
    let ids = sorted.into_iter().filter(|&id| id >= first);
    let mut written = 0;
    for (to, id) in list.chunks_exact_mut(2).zip(ids) {
        LittleEndian::write_u16(to, id);
        written += 1;
    }
    LittleEndian::write_u16(count, written);
}

/// The ids of a Controller List: as many as it counts, at most 2047.
pub fn controllers(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u16> + '_ {
    let (count, list) = page.split_at(2);
    list.chunks_exact(2).map(LittleEndian::read_u16).take(LittleEndian::read_u16(count).into())
}

/// Writes an Identify I/O Command Set page (CNS 1Ch): the first 512 of `combinations`, each a bit
/// vector in which bit n stands for command set identifier n.
pub fn emit_command_sets(page: &mut [u8; PAGE_BYTES], combinations: impl IntoIterator<Item = u64>) {
    *page = [0; PAGE_BYTES];
    for (to, vector) in page.chunks_exact_mut(8).zip(combinations) {
        LittleEndian::write_u64(to, vector);
    }
}

/// The combinations of an Identify I/O Command Set page, up to the first 0.
pub fn command_sets(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u64> + '_ {
    page.chunks_exact(8).map(LittleEndian::read_u64).take_while(|&vector| vector != 0)
}
