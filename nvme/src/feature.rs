//! Features: ids, dword layouts, data structures, and asynchronous events.
//!
//! Source: NVMe Base Specification 2.0, "Set Features command", "Get Features command" and
//! "Asynchronous Event Request command".

use crate::log::LogId;
use crate::{AdminOpcode, Sgl, Sqe};

open_enum! {
    /// Feature identifier.
    pub struct FeatureId(u8) {
        ARBITRATION = 0x01, "Arbitration";
        POWER_MANAGEMENT = 0x02, "Power Management";
        LBA_RANGE_TYPE = 0x03, "LBA Range Type";
        TEMPERATURE_THRESHOLD = 0x04, "Temperature Threshold";
        ERROR_RECOVERY = 0x05, "Error Recovery";
        VOLATILE_WRITE_CACHE = 0x06, "Volatile Write Cache";
        NUMBER_OF_QUEUES = 0x07, "Number of Queues";
        INTERRUPT_COALESCING = 0x08, "Interrupt Coalescing";
        INTERRUPT_VECTOR_CONFIG = 0x09, "Interrupt Vector Configuration";
        WRITE_ATOMICITY = 0x0A, "Write Atomicity Normal";
        ASYNC_EVENT_CONFIG = 0x0B, "Asynchronous Event Configuration";
        AUTONOMOUS_POWER_STATE = 0x0C, "Autonomous Power State Transition";
        HOST_MEMORY_BUFFER = 0x0D, "Host Memory Buffer";
        TIMESTAMP = 0x0E, "Timestamp";
        KEEP_ALIVE_TIMER = 0x0F, "Keep Alive Timer";
        HOST_CONTROLLED_THERMAL = 0x10, "Host Controlled Thermal Management";
        NON_OPERATIONAL_POWER_STATE = 0x11, "Non-Operational Power State Config";
        READ_RECOVERY_LEVEL = 0x12, "Read Recovery Level Config";
        PREDICTABLE_LATENCY_CONFIG = 0x13, "Predictable Latency Mode Config";
        PREDICTABLE_LATENCY_WINDOW = 0x14, "Predictable Latency Mode Window";
        LBA_STATUS_REPORT = 0x15, "LBA Status Information Report Interval";
        HOST_BEHAVIOR = 0x16, "Host Behavior Support";
        SANITIZE_CONFIG = 0x17, "Sanitize Config";
        ENDURANCE_GROUP_EVENT = 0x18, "Endurance Group Event Configuration";
        IO_COMMAND_SET_PROFILE = 0x19, "I/O Command Set Profile";
        SOFTWARE_PROGRESS = 0x80, "Software Progress Marker";
        HOST_IDENTIFIER = 0x81, "Host Identifier";
        RESERVATION_NOTIFICATION_MASK = 0x82, "Reservation Notification Mask";
        RESERVATION_PERSISTENCE = 0x83, "Reservation Persistence";
        NAMESPACE_WRITE_PROTECT = 0x84, "Namespace Write Protection Config";
    }
}

open_enum! {
    /// Select field of Get Features, 3 bits.
    pub struct Select(u8) {
        CURRENT = 0, "Current";
        DEFAULT = 1, "Default";
        SAVED = 2, "Saved";
        CAPABILITIES = 3, "Supported Capabilities";
    }
}

bits! {
    /// Result of Get Features with [`Select::CAPABILITIES`].
    pub struct Capabilities(u32) {
        /// The value can be saved.
        saveable with_saveable: bool = 0, 1;
        /// Each namespace has its own value.
        namespace_specific with_namespace_specific: bool = 1, 1;
        /// The value can be changed.
        changeable with_changeable: bool = 2, 1;
    }
}

command! {
    /// Fields of a Get Features command.
    pub struct GetFeatures {
        /// The feature.
        fid: FeatureId = cdw10[0, 8];
        /// The selected value.
        sel: Select = cdw10[8, 3];
        /// Namespace id, for a feature that each namespace has.
        nsid: u32 = nsid[0, 32];
        /// Feature specific value of dword 11.
        cdw11: u32 = cdw11[0, 32];
    }
}

impl GetFeatures {
    /// Returns the command, with its data (if the feature has any) at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::GET_FEATURES).with_sgl(data))
    }
}

command! {
    /// Fields of a Set Features command.
    pub struct SetFeatures {
        /// The feature.
        fid: FeatureId = cdw10[0, 8];
        /// Keep the value through power loss and reset.
        save: bool = cdw10[31, 1];
        /// Namespace id, for a feature that each namespace has.
        nsid: u32 = nsid[0, 32];
        /// The value, or its first dword.
        cdw11: u32 = cdw11[0, 32];
    }
}

impl SetFeatures {
    /// Sets a feature of the controller to a value of one dword, unsaved.
    pub fn new(fid: FeatureId, cdw11: u32) -> Self {
        Self { fid, cdw11, ..Self::default() }
    }

    /// Returns the command, with its data (if the feature has any) at `data`.
    pub fn emit(&self, data: Sgl) -> Sqe {
        self.put(Sqe::admin(AdminOpcode::SET_FEATURES).with_sgl(data))
    }
}

bits! {
    /// 01h Arbitration.
    pub struct Arbitration(u32) {
        /// Burst: 2^n commands; 7 no limit.
        burst with_burst: u8 = 0, 3;
        /// High priority weight, minus one.
        high_weight_z with_high_weight_z: u8 = 24, 8;
    }
}

bits! {
    /// 02h Power Management.
    pub struct PowerManagement(u32) {
        /// Power state, 0 to NPSS.
        power_state with_power_state: u8 = 0, 5;
        /// Workload hint.
        workload with_workload: u8 = 5, 3;
    }
}

bits! {
    /// 04h Temperature Threshold.
    pub struct TemperatureThreshold(u32) {
        /// Threshold in kelvins.
        threshold_k with_threshold_k: u16 = 0, 16;
        /// Sensor: 0 composite, 1 to 8, Fh all.
        sensor with_sensor: u8 = 16, 4;
        /// Kind: 0 over, 1 under.
        kind with_kind: u8 = 20, 2;
    }
}

bits! {
    /// 05h Error Recovery.
    pub struct ErrorRecovery(u32) {
        /// Deallocated or unwritten logical block error enable.
        dulbe with_dulbe: bool = 16, 1;
    }
}

bits! {
    /// 06h Volatile Write Cache.
    pub struct VolatileWriteCache(u32) {
        /// Enabled.
        wce with_wce: bool = 0, 1;
    }
}

bits! {
    /// 07h Number of Queues: the number requested in dword 11, and the number granted in the result.
    pub struct NumberOfQueues(u32) {
        /// I/O submission queues, minus one; FFFFh is invalid.
        submission_z with_submission_z: u16 = 0, 16;
        /// I/O completion queues, minus one; FFFFh is invalid.
        completion_z with_completion_z: u16 = 16, 16;
    }
}

bits! {
    /// 09h Interrupt Vector Configuration.
    pub struct InterruptVectorConfig(u32) {
        /// Vector.
        vector with_vector: u16 = 0, 16;
        /// No coalescing for this vector.
        coalescing_disable with_coalescing_disable: bool = 16, 1;
    }
}

bits! {
    /// 0Ah Write Atomicity Normal.
    pub struct WriteAtomicity(u32) {
        /// Only the power fail atomicity (AWUPF) holds, not AWUN.
        disable_normal with_disable_normal: bool = 0, 1;
    }
}

bits! {
    /// 0Bh Asynchronous Event Configuration; OAES of Identify Controller has the same notice bits.
    pub struct AsyncEventConfig(u32) {
        /// SMART critical warnings, as bits 7:0 of that log.
        smart_warnings with_smart_warnings: u8 = 0, 8;
        /// Namespace attribute notices.
        namespace_attribute with_namespace_attribute: bool = 8, 1;
        /// Firmware activation notices.
        firmware_activation with_firmware_activation: bool = 9, 1;
        /// Telemetry log notices.
        telemetry with_telemetry: bool = 10, 1;
        /// Asymmetric namespace access change notices.
        ana_change with_ana_change: bool = 11, 1;
        /// Discovery log page change notification.
        discovery_log with_discovery_log: bool = 31, 1;
    }
}

bits! {
    /// 0Fh Keep Alive Timer.
    pub struct KeepAliveTimer(u32) {
        /// Timeout in milliseconds; 0 disables.
        kato_ms with_kato_ms: u32 = 0, 32;
    }
}

bits! {
    /// 81h Host Identifier, dword 11; the id itself is data.
    pub struct HostIdentifier(u32) {
        /// The id has 16 bytes rather than 8; always so on a fabric.
        extended with_extended: bool = 0, 1;
    }
}

bits! {
    /// 84h Namespace Write Protection Config.
    pub struct NamespaceWriteProtect(u32) {
        /// State.
        state with_state: WriteProtectState = 0, 3;
    }
}

open_enum! {
    /// Write protection of a namespace, 3 bits.
    pub struct WriteProtectState(u8) {
        NONE = 0, "No Write Protect";
        PROTECTED = 1, "Write Protect";
        UNTIL_POWER_CYCLE = 2, "Write Protect Until Power Cycle";
        PERMANENT = 3, "Permanent Write Protect";
    }
}

wire! {
    /// 0Eh Timestamp, 8 bytes of data.
    pub struct Timestamp[8] {
        /// Milliseconds since 1970-01-01 00:00 UTC, 48 bits, lowest byte first; see
        /// [`ms`](Self::ms).
        timestamp: [u8; 6] = 0,
        /// Bit 0: may have stopped while counting; bits 3:1: see [`origin`](Self::origin).
        attributes: u8 = 6,
    }
}

impl Timestamp {
    /// Origin: counted from 0 since a Controller Level Reset.
    pub const ORIGIN_RESET: u8 = 0;
    /// Origin: counted from a value that a host set.
    pub const ORIGIN_HOST: u8 = 1;

    /// Creates a timestamp that a host sets; bits above 48 are dropped.
    pub const fn new(ms: u64) -> Self {
        let [a, b, c, d, e, f, ..] = ms.to_le_bytes();
        Self { timestamp: [a, b, c, d, e, f], attributes: 0 }
    }

    /// Milliseconds since 1970-01-01 00:00 UTC.
    pub const fn ms(&self) -> u64 {
        let [a, b, c, d, e, f] = self.timestamp;
        u64::from_le_bytes([a, b, c, d, e, f, 0, 0])
    }

    /// Timestamp Origin, 3 bits: [`ORIGIN_RESET`](Self::ORIGIN_RESET) or
    /// [`ORIGIN_HOST`](Self::ORIGIN_HOST).
    pub const fn origin(&self) -> u8 {
        self.attributes >> 1 & 0b111
    }

    /// Synch: the controller may have stopped counting since the value was initialized.
    pub const fn may_have_stopped(&self) -> bool {
        self.attributes & 1 != 0
    }

    /// The same with another origin, 3 bits.
    #[must_use]
    pub const fn with_origin(self, origin: u8) -> Self {
        let attributes = self.attributes & !0b1110 | (origin & 0b111) << 1;
        Self { attributes, ..self }
    }
}

wire! {
    /// 16h Host Behavior Support, 512 bytes of data: features that the host supports, 0 or 1 each.
    pub struct HostBehavior[512] {
        /// Advanced Command Retry: the host observes Command Retry Delay.
        acre: u8 = 0,
        /// Extended Telemetry Data Area 4.
        etdas: u8 = 1,
        /// LBA Format Extension: formats beyond 16.
        lbafee: u8 = 2,
    }
}

open_enum! {
    /// Asynchronous event type, 3 bits.
    pub struct AsyncEventType(u8) {
        ERROR = 0, "Error Status";
        SMART = 1, "SMART / Health Status";
        NOTICE = 2, "Notice";
        IMMEDIATE = 3, "Immediate";
        ONE_SHOT = 4, "One-Shot";
        IO_COMMAND = 6, "I/O Command Specific Status";
        VENDOR = 7, "Vendor Specific";
    }
}

bits! {
    /// Result of an Asynchronous Event Request, dword 0: the event, and the log to read to
    /// acknowledge it.
    pub struct AsyncEvent(u32) {
        /// Type.
        kind with_kind: AsyncEventType = 0, 3;
        /// Information: the event of the type.
        info with_info: u8 = 8, 8;
        /// Log page to read.
        log with_log: LogId = 16, 8;
    }
}

impl AsyncEvent {
    /// Error: persistent internal error; Linux resets the controller.
    pub const PERSISTENT_INTERNAL_ERROR: Self = Self(0x01_03_00);
    /// SMART: reliability of the subsystem degraded.
    pub const SUBSYSTEM_RELIABILITY: Self = Self(0x02_00_01);
    /// Notice: namespace attribute changed.
    pub const NAMESPACE_ATTRIBUTE_CHANGED: Self = Self(0x04_00_02);
    /// Notice: asymmetric namespace access change.
    pub const ANA_CHANGE: Self = Self(0x0C_03_02);
    /// Notice: discovery log page change.
    pub const DISCOVERY_LOG_CHANGE: Self = Self(0x70_F0_02);
    /// I/O command specific: reservation log page available.
    pub const RESERVATION_LOG_AVAILABLE: Self = Self(0x80_00_06);

    /// Event of this type and information, acknowledged by reading `log`.
    pub fn new(kind: AsyncEventType, info: u8, log: LogId) -> Self {
        Self(0).with_kind(kind).with_info(info).with_log(log)
    }
}

#[cfg(test)]
mod tests {
    use crate::feature::*;
    use proptest::prelude::*;

    #[test]
    fn feature_values_encode_their_fields() {
        let asked = NumberOfQueues(0).with_submission_z(3).with_completion_z(4);
        assert_eq!(asked.0, 0x0004_0003);
        let events = AsyncEventConfig(0)
            .with_namespace_attribute(true)
            .with_firmware_activation(true)
            .with_ana_change(true)
            .with_discovery_log(true);
        assert_eq!(events.0, 1 << 8 | 1 << 9 | 1 << 11 | 1 << 31);
        assert_eq!(Arbitration(0).with_burst(7).with_high_weight_z(1).0, 0x0100_0007);
        assert_eq!(PowerManagement(0).with_workload(1).0, 0x20);
        assert_eq!(TemperatureThreshold(0).with_kind(1).with_sensor(0xF).0, 0x001F_0000);
        assert_eq!(ErrorRecovery(0).with_dulbe(true).0, 0x1_0000);
        assert_eq!(VolatileWriteCache(0).with_wce(true).0, 1);
        assert_eq!(InterruptVectorConfig(0).with_coalescing_disable(true).0, 0x1_0000);
        assert_eq!(WriteAtomicity(0).with_disable_normal(true).0, 1);
        assert_eq!(KeepAliveTimer(0).with_kato_ms(5000).0, 5000);
        assert!(HostIdentifier(1).extended());
        assert_eq!(NamespaceWriteProtect(0xA).state(), WriteProtectState::UNTIL_POWER_CYCLE);
        assert_eq!(Capabilities(0).with_changeable(true).0, 4);
    }

    #[test]
    fn async_events_encode_type_information_and_log_page() {
        let new = AsyncEvent::new;
        let notice = AsyncEventType::NOTICE;
        assert_eq!(new(notice, 0, LogId::CHANGED_NAMESPACES).0, 0x0004_0002);
        assert_eq!(AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED, AsyncEvent(0x0004_0002));
        assert_eq!(new(notice, 1, LogId::FIRMWARE_SLOT).0, 0x0003_0102);
        assert_eq!(new(notice, 3, LogId::ANA), AsyncEvent::ANA_CHANGE);
        assert_eq!(AsyncEvent::ANA_CHANGE, AsyncEvent(0x000C_0302));
        assert_eq!(new(notice, 0xF0, LogId::DISCOVERY), AsyncEvent::DISCOVERY_LOG_CHANGE);
        assert_eq!(AsyncEvent::DISCOVERY_LOG_CHANGE, AsyncEvent(0x0070_F002));
        assert_eq!(
            new(AsyncEventType::IO_COMMAND, 0, LogId::RESERVATION_NOTIFICATION),
            AsyncEvent::RESERVATION_LOG_AVAILABLE
        );
        assert_eq!(
            new(AsyncEventType::ERROR, 3, LogId::ERROR),
            AsyncEvent::PERSISTENT_INTERNAL_ERROR
        );
    }

    #[test]
    fn timestamp_is_48_bits() {
        let stamp = Timestamp::new(0xFFFF_0102_0304_0506);
        assert_eq!(stamp.emit(), [6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!(stamp.ms(), 0x0102_0304_0506);
        let stamp = Timestamp { attributes: 0xF1, ..stamp }.with_origin(Timestamp::ORIGIN_HOST);
        assert_eq!((stamp.emit()[6], stamp.origin()), (0xF3, 1));
        assert!(stamp.may_have_stopped() && !Timestamp::new(1).may_have_stopped());
    }

    proptest! {
        #[test]
        fn feature_commands_round_trip(fid: u8, sel in 0u8..8, nsid: u32, cdw11: u32, save: bool) {
            let fid = FeatureId(fid);
            let get = GetFeatures { fid, sel: Select(sel), nsid, cdw11 };
            prop_assert_eq!(GetFeatures::parse(&get.emit(Sgl::NONE)), get);
            let set = SetFeatures { fid, save, nsid, cdw11 };
            prop_assert_eq!(SetFeatures::parse(&set.emit(Sgl::NONE)), set);
        }

        #[test]
        fn feature_data_round_trips(timestamp: [u8; 6], attributes: u8, a: u8, b: u8, c: u8) {
            let stamp = Timestamp { timestamp, attributes };
            prop_assert_eq!(Timestamp::parse(&stamp.emit()), stamp);
            let behavior = HostBehavior { acre: a, etdas: b, lbafee: c };
            prop_assert_eq!(HostBehavior::parse(&behavior.emit()), behavior);
        }
    }
}
