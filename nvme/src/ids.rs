//! Identifiers and sizes common to several commands.

/// Entries of a page that lists namespace ids.
pub const NAMESPACES_PER_PAGE: usize = 1024;

open_enum! {
    /// Command Set Identifier.
    pub struct Csi(u8) {
        NVM = 0x00, "NVM Command Set";
        KEY_VALUE = 0x01, "Key Value Command Set";
        ZONED = 0x02, "Zoned Namespace Command Set";
    }
}

open_enum! {
    /// Log page identifier.
    pub struct LogId(u8) {
        SUPPORTED_PAGES = 0x00, "Supported Log Pages";
        ERROR = 0x01, "Error Information";
        SMART = 0x02, "SMART / Health Information";
        FIRMWARE_SLOT = 0x03, "Firmware Slot Information";
        CHANGED_NAMESPACES = 0x04, "Changed Namespace List";
        EFFECTS = 0x05, "Commands Supported and Effects";
        DEVICE_SELF_TEST = 0x06, "Device Self-test";
        TELEMETRY_HOST = 0x07, "Telemetry Host-Initiated";
        TELEMETRY_CONTROLLER = 0x08, "Telemetry Controller-Initiated";
        ENDURANCE_GROUP = 0x09, "Endurance Group Information";
        PREDICTABLE_LATENCY = 0x0A, "Predictable Latency Per NVM Set";
        PREDICTABLE_LATENCY_EVENTS = 0x0B, "Predictable Latency Event Aggregate";
        ANA = 0x0C, "Asymmetric Namespace Access";
        PERSISTENT_EVENT = 0x0D, "Persistent Event Log";
        LBA_STATUS = 0x0E, "LBA Status Information";
        ENDURANCE_GROUP_EVENTS = 0x0F, "Endurance Group Event Aggregate";
        MEDIA_UNIT_STATUS = 0x10, "Media Unit Status";
        SUPPORTED_CAPACITY = 0x11, "Supported Capacity Configuration List";
        FEATURE_EFFECTS = 0x12, "Feature Identifiers Supported and Effects";
        MI_EFFECTS = 0x13, "NVMe-MI Commands Supported and Effects";
        LOCKDOWN = 0x14, "Command and Feature Lockdown";
        BOOT_PARTITION = 0x15, "Boot Partition";
        DISCOVERY = 0x70, "Discovery";
        RESERVATION_NOTIFICATION = 0x80, "Reservation Notification";
        SANITIZE_STATUS = 0x81, "Sanitize Status";
    }
}
