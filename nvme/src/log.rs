//! Log pages, and the Get Log Page command.
//!
//! Source: NVMe Base Specification 2.0, "Get Log Page command" and the log page sections below it.

use byteorder::{ByteOrder, LittleEndian};

pub use crate::ids::LogId;
use crate::ids::{Csi, NAMESPACES_PER_PAGE};
use crate::{AdminOpcode, NSID_ALL, NqnField, PAGE_BYTES, Sgl, Sqe, Status, Text};

command! {
    /// Fields of a Get Log Page command.
    pub struct GetLogPage {
        /// The log.
        lid: LogId = cdw10[0, 8];
        /// Namespace id; [`NSID_ALL`] or 0 for the log of the controller.
        nsid: u32 = nsid[0, 32];
        /// Log specific parameter, 7 bits.
        lsp: u8 = cdw10[8, 7];
        /// Retain asynchronous event: reading does not acknowledge.
        rae: bool = cdw10[15, 1];
        /// Log specific identifier.
        lsi: u16 = cdw11[16, 16];
        /// Number of dwords, minus one, all 32 bits of it.
        numd_z: u32 = cdw10[16, 16] cdw11[0, 16];
        /// Log page offset: bytes, or an index where `offset_is_index`.
        lpo: u64 = cdw12[0, 32] cdw13[0, 32];
        /// The offset is a number of entries rather than bytes.
        offset_is_index: bool = cdw14[23, 1];
        /// Command set.
        csi: Csi = cdw14[24, 8];
        /// UUID index, 7 bits.
        uuid_index: u8 = cdw14[0, 7];
    }
}

impl GetLogPage {
    /// Reads `dwords` dwords (at least 1) of log `lid` from byte `offset`, without acknowledging an
    /// event.
    pub fn new(lid: LogId, offset: u64, dwords: u32) -> Self {
        Self { lid, lpo: offset, numd_z: dwords.saturating_sub(1), rae: true, ..Self::default() }
    }

    /// Returns the command, with its data at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::GET_LOG_PAGE).with_sgl(data))
    }

    /// Requested length in bytes: 4 to 2^34.
    pub const fn len_bytes(&self) -> u64 {
        (self.numd_z as u64 + 1) * 4
    }
}

bits! {
    /// Entry of the Supported Log Pages log.
    pub struct LogSupport(u32) {
        /// The page is supported.
        supported with_supported: bool = 0, 1;
    }
}

wire! {
    /// Supported Log Pages (00h), 1024 bytes.
    pub struct SupportedPages[1024] {
        /// One entry for each log page identifier.
        pages: [LogSupport; 256] = 0,
    }
}

wire! {
    /// Entry of the Error Information log (01h), 64 bytes. The newest is first.
    pub struct ErrorEntry[64] {
        /// Number of the error, from 1 up over the lifetime of the controller; 0 no entry.
        error_count: u64 = 0,
        /// Submission queue of the command; FFFFh for none.
        sqid: u16 = 8,
        /// Id of the command; FFFFh for none.
        cid: u16 = 10,
        /// Its status, in the bits of a completion.
        status: Status = 12,
        /// Location of the invalid parameter: byte in bits 7:0, bit in 10:8; FFFFh for none.
        parameter: u16 = 14,
        /// First logical block concerned.
        lba: u64 = 16,
        /// Namespace.
        nsid: u32 = 24,
        /// Log page with additional information; 0 for none.
        vendor_log: u8 = 28,
        /// Transport type, as in the Discovery log; 0 when the error is not of a transport.
        trtype: TransportType = 29,
        /// Command set.
        csi: Csi = 30,
        /// Opcode.
        opcode: u8 = 31,
        /// Command specific information.
        command_info: u64 = 32,
        /// Transport specific information.
        transport_info: u16 = 40,
        /// Version of the entry: 0 or 1; with 1 `csi` and `opcode` are valid.
        version: u8 = 63,
    }
}

bits! {
    /// Critical warnings of the SMART log.
    pub struct CriticalWarning(u8) {
        /// Reliability is degraded.
        reliability with_reliability: bool = 2, 1;
    }
}

wire! {
    /// SMART / Health Information (02h), 512 bytes.
    pub struct Smart[512] {
        /// Critical warnings.
        critical_warning: CriticalWarning = 0,
        /// Composite temperature in kelvins.
        temperature_k: u16 = 1,
        /// Available spare in percent.
        spare_percent: u8 = 3,
        /// Threshold of available spare in percent.
        spare_threshold_percent: u8 = 4,
        /// Life used in percent; may exceed 100.
        used_percent: u8 = 5,
        /// Endurance group critical warning summary.
        endurance_warning: u8 = 6,
        /// Data read, in thousands of 512-byte units, rounded up.
        data_units_read: u128 = 32,
        /// Data written, in thousands of 512-byte units, rounded up.
        data_units_written: u128 = 48,
        /// Read commands.
        host_reads: u128 = 64,
        /// Write commands.
        host_writes: u128 = 80,
        /// Time with commands outstanding, in minutes.
        busy_min: u128 = 96,
        /// Power cycles.
        power_cycles: u128 = 112,
        /// Power-on hours.
        power_on_hours: u128 = 128,
        /// Unsafe shutdowns.
        unsafe_shutdowns: u128 = 144,
        /// Unrecovered data integrity errors.
        media_errors: u128 = 160,
        /// Total number of entries added to the Error Information log.
        error_entries: u128 = 176,
        /// Time at or above the warning temperature, in minutes.
        warning_temperature_min: u32 = 192,
        /// Time at or above the critical temperature, in minutes.
        critical_temperature_min: u32 = 196,
        /// Temperature sensors 1 to 8, in kelvins; 0 not implemented.
        sensors_k: [u16; 8] = 200,
        /// Transitions to light throttling.
        tmt1_transitions: u32 = 216,
        /// Transitions to heavy throttling.
        tmt2_transitions: u32 = 220,
        /// Time of light throttling in seconds.
        tmt1_s: u32 = 224,
        /// Time of heavy throttling in seconds.
        tmt2_s: u32 = 228,
    }
}

wire! {
    /// Firmware Slot Information (03h), 512 bytes.
    pub struct FirmwareSlots[512] {
        /// Bits 2:0 active slot, 6:4 slot that becomes active with the next reset (0 the same).
        afi: u8 = 0,
        /// Revisions in slots 1 to 7; all zero for an empty one.
        revisions: [Text<8>; 7] = 8,
    }
}

bits! {
    /// Entry of the Commands Supported and Effects log.
    pub struct CommandEffects(u32) {
        /// CSUPP: supported.
        supported with_supported: bool = 0, 1;
        /// LBCC: may change logical block content.
        lbcc with_lbcc: bool = 1, 1;
        /// NCC: may change namespace capabilities.
        ncc with_ncc: bool = 2, 1;
        /// NIC: may change the inventory of namespaces.
        nic with_nic: bool = 3, 1;
        /// CCC: may change controller capabilities.
        ccc with_ccc: bool = 4, 1;
        /// CSE: 0 no restriction, 1 one command at a time per namespace, 2 per controller.
        cse with_cse: u8 = 16, 3;
        /// A UUID may be selected.
        uuid with_uuid: bool = 19, 1;
    }
}

wire! {
    /// Commands Supported and Effects (05h), 4096 bytes.
    pub struct Effects[page 4096] {
        /// Admin commands by opcode.
        admin: [CommandEffects; 256] = 0,
        /// I/O commands by opcode.
        io: [CommandEffects; 256] = 1024,
    }
}

bits! {
    /// Entry of the Feature Identifiers Supported and Effects log.
    pub struct FeatureEffects(u32) {
        /// FSUPP: supported.
        supported with_supported: bool = 0, 1;
        /// NCC: may change namespace capabilities.
        ncc with_ncc: bool = 2, 1;
        /// NIC: may change the inventory of namespaces.
        nic with_nic: bool = 3, 1;
        /// CCC: may change controller capabilities.
        ccc with_ccc: bool = 4, 1;
        /// A UUID may be selected.
        uuid with_uuid: bool = 19, 1;
        /// FSP: its scope is the namespace.
        of_namespace with_of_namespace: bool = 20, 1;
        /// FSP: its scope is the controller.
        of_controller with_of_controller: bool = 21, 1;
    }
}

wire! {
    /// Feature Identifiers Supported and Effects (12h), 1024 bytes.
    pub struct FeaturesSupported[1024] {
        /// One entry for each feature identifier.
        features: [FeatureEffects; 256] = 0,
    }
}

/// Writes a Changed Namespace List (04h): the ids, which must ascend and not be 0; when there are
/// more than 1024, FFFFFFFFh alone.
pub fn emit_changed_namespaces(page: &mut [u8; PAGE_BYTES], sorted: impl IntoIterator<Item = u32>) {
    *page = [0; PAGE_BYTES];
    for (i, id) in sorted.into_iter().enumerate() {
        if i == NAMESPACES_PER_PAGE {
            *page = [0; PAGE_BYTES];
            LittleEndian::write_u32(page, NSID_ALL);
            return;
        }
        if let Some(to) = page.chunks_exact_mut(4).nth(i) {
            LittleEndian::write_u32(to, id);
        }
    }
}

/// The ids of a Changed Namespace List; [`NSID_ALL`] alone when there were too many to list.
pub fn changed_namespaces(page: &[u8; PAGE_BYTES]) -> impl Iterator<Item = u32> + '_ {
    crate::nsids(page)
}

wire! {
    /// Header of the Asymmetric Namespace Access log (0Ch), 16 bytes.
    pub struct AnaHeader[16] {
        /// Change count.
        chgcnt: u64 = 0,
        /// Group descriptors that follow.
        ngrps: u16 = 8,
    }
}

wire! {
    /// Group descriptor of the Asymmetric Namespace Access log, 32 bytes, followed by the group's
    /// namespace ids (4 bytes each, ascending).
    pub struct AnaGroup[32] {
        /// Group id, from 1.
        grpid: u32 = 0,
        /// Namespace ids that follow.
        nnsids: u32 = 4,
        /// Change count.
        chgcnt: u64 = 8,
        /// State, bits 3:0.
        state: AnaState = 16,
    }
}

open_enum! {
    /// Asymmetric namespace access state.
    pub struct AnaState(u8) {
        OPTIMIZED = 0x1, "optimized";
        NON_OPTIMIZED = 0x2, "non-optimized";
        INACCESSIBLE = 0x3, "inaccessible";
        PERSISTENT_LOSS = 0x4, "persistent-loss";
        CHANGE = 0xF, "change";
    }
}

wire! {
    /// Header of the Discovery log (70h), 1024 bytes; the records follow.
    pub struct DiscoveryHeader[1024] {
        /// Generation counter: grows with every change.
        genctr: u64 = 0,
        /// Number of records; may be 0.
        numrec: u64 = 8,
        /// Record format, 0.
        recfmt: u16 = 16,
    }
}

open_enum! {
    /// Transport type.
    pub struct TransportType(u8) {
        UNSPECIFIED = 0x00, "unspecified";
        RDMA = 0x01, "rdma";
        FC = 0x02, "fc";
        TCP = 0x03, "tcp";
        LOOP = 0xFE, "loop";
    }
}

open_enum! {
    /// Address family.
    pub struct AddressFamily(u8) {
        UNSPECIFIED = 0x00, "unspecified";
        IPV4 = 0x01, "ipv4";
        IPV6 = 0x02, "ipv6";
        INFINIBAND = 0x03, "infiniband";
        FC = 0x04, "fibre-channel";
        LOOP = 0xFE, "loop";
    }
}

open_enum! {
    /// Subsystem type of a discovery record.
    pub struct SubsystemType(u8) {
        REFERRAL = 0x01, "discovery subsystem referral";
        NVM = 0x02, "nvme subsystem";
        CURRENT_DISCOVERY = 0x03, "current discovery subsystem";
    }
}

open_enum! {
    /// RDMA QP service type.
    pub struct RdmaQpType(u8) {
        CONNECTED = 0x01, "connected";
        DATAGRAM = 0x02, "datagram";
    }
}

open_enum! {
    /// RDMA provider type.
    pub struct RdmaProvider(u8) {
        UNSPECIFIED = 0x01, "not specified";
        INFINIBAND = 0x02, "infiniband";
        ROCE = 0x03, "roce";
        ROCE_V2 = 0x04, "roce-v2";
        IWARP = 0x05, "iwarp";
    }
}

open_enum! {
    /// RDMA connection management service.
    pub struct RdmaCms(u8) {
        RDMA_CM = 0x01, "rdma-cm";
    }
}

bits! {
    /// Transport requirements.
    pub struct Treq(u8) {
        /// Secure channel: 0 not specified, 1 required, 2 not required.
        secure_channel with_secure_channel: u8 = 0, 2;
        /// The host may disable submission queue flow control.
        sq_flow_control_disable with_sq_flow_control_disable: bool = 2, 1;
    }
}

bits! {
    /// Entry flags.
    pub struct EntryFlags(u16) {
        /// DUPRETINFO: another address returns the same information.
        duplicate with_duplicate: bool = 0, 1;
        /// EPCSD: explicit persistent connections to the discovery service are supported.
        persistent with_persistent: bool = 1, 1;
        /// NCC: no controller of a central discovery service is connected.
        ncc with_ncc: bool = 2, 1;
    }
}

wire! {
    /// Record of the Discovery log, 1024 bytes.
    pub struct DiscoveryEntry[1024] {
        /// Transport.
        trtype: TransportType = 0,
        /// Family of `traddr`.
        adrfam: AddressFamily = 1,
        /// Subsystem type of the record.
        subtype: SubsystemType = 2,
        /// Requirements.
        treq: Treq = 3,
        /// Port of the subsystem, an arbitrary number.
        portid: u16 = 4,
        /// Controller id; FFFFh dynamic, FFFEh static.
        cntlid: u16 = 6,
        /// Largest admin queue in entries, at least 32; not zero-based.
        asqsz: u16 = 8,
        /// Flags.
        eflags: EntryFlags = 10,
        /// Transport service: for RDMA the port number in decimal.
        trsvcid: Text<32> = 32,
        /// Name of the subsystem.
        subnqn: NqnField = 256,
        /// Address, as text.
        traddr: Text<256> = 512,
        /// RDMA: service type.
        rdma_qptype: RdmaQpType = 768,
        /// RDMA: provider.
        rdma_prtype: RdmaProvider = 769,
        /// RDMA: connection management.
        rdma_cms: RdmaCms = 770,
        /// RDMA: partition key; InfiniBand only.
        rdma_pkey: u16 = 776,
    }
}
