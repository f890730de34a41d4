//! The Persistent Event log (0Dh): events in the lifetime of an NVM subsystem.
//!
//! A host establishes a reporting context, which freezes the content of the log; reads it in
//! pieces; and releases the context. The header is followed by the events, the newest first, each
//! with a header of its own.
//!
//! Source: NVMe Base Specification 2.0, "Persistent Event Log (Log Identifier 0Dh)".

use crate::feature::Timestamp;
use crate::log::LogId;
use crate::{NqnField, Text};

open_enum! {
    /// Action on the reporting context: log specific parameter, bits 1:0.
    pub struct Action(u8) {
        READ = 0, "Read Log Data";
        ESTABLISH = 1, "Establish Context and Read Log Data";
        RELEASE = 2, "Release Context";
    }
}

open_enum! {
    /// Kind of event; also its bit in the map of those that are supported.
    pub struct EventType(u8) {
        SMART_SNAPSHOT = 0x01, "SMART / Health Log Snapshot";
        FIRMWARE_COMMIT = 0x02, "Firmware Commit";
        TIMESTAMP_CHANGE = 0x03, "Timestamp Change";
        POWER_ON_OR_RESET = 0x04, "Power-on or Reset";
        HARDWARE_ERROR = 0x05, "NVM Subsystem Hardware Error";
        CHANGE_NAMESPACE = 0x06, "Change Namespace";
        FORMAT_START = 0x07, "Format NVM Start";
        FORMAT_COMPLETION = 0x08, "Format NVM Completion";
        SANITIZE_START = 0x09, "Sanitize Start";
        SANITIZE_COMPLETION = 0x0A, "Sanitize Completion";
        SET_FEATURE = 0x0B, "Set Feature";
        TELEMETRY_CREATED = 0x0C, "Telemetry Log Created";
        THERMAL_EXCURSION = 0x0D, "Thermal Excursion";
    }
}

wire! {
    /// Header of the log, 512 bytes.
    pub struct PersistentEventHeader[512] {
        /// The log: [`LogId::PERSISTENT_EVENT`].
        lid: LogId = 0,
        /// Events that follow.
        events: u32 = 4,
        /// Bytes of header and events.
        total_bytes: u64 = 8,
        /// Revision of the log: 2 in version 2.0 of the documents.
        revision: u8 = 16,
        /// Bytes of this header after this field: 492.
        header_bytes: u16 = 18,
        /// When the context was established.
        timestamp: Timestamp = 20,
        /// Power-on hours.
        power_on_hours: u128 = 28,
        /// Power cycles.
        power_cycles: u64 = 44,
        /// PCI vendor id.
        vid: u16 = 52,
        /// PCI subsystem vendor id.
        ssvid: u16 = 54,
        /// Serial number.
        sn: Text<20> = 56,
        /// Model number.
        mn: Text<40> = 76,
        /// Name of the NVM subsystem.
        subnqn: NqnField = 116,
        /// Incremented with each context that is established.
        generation: u16 = 372,
        /// Whether a context existed before, bit 18, and by which port; 0 for none.
        context: u32 = 374,
        /// The supported kinds, one bit each from bit 0 of byte 0.
        supported: [u8; 32] = 480,
    }
}

impl PersistentEventHeader {
    /// Value of `header_bytes`.
    pub const REST_BYTES: u16 = 492;
}

wire! {
    /// Header of an event, 24 bytes; its data follow.
    pub struct EventHeader[24] {
        /// Kind of the event.
        kind: EventType = 0,
        /// Revision of the event.
        revision: u8 = 1,
        /// Bytes of this header after this field: 21.
        header_bytes: u8 = 2,
        /// Controller that has logged it; FFFFh for none.
        cntlid: u16 = 4,
        /// Time of the event.
        timestamp: Timestamp = 6,
        /// Bytes of vendor specific information before the data.
        vendor_bytes: u16 = 20,
        /// Bytes of vendor specific information and data.
        event_bytes: u16 = 22,
    }
}

impl EventHeader {
    /// Value of `header_bytes`.
    pub const REST_BYTES: u8 = 21;
}

wire! {
    /// Data of a Timestamp Change event.
    pub struct TimestampChange[16] {
        /// The timestamp of the controller immediately before the change, without attributes.
        previous: Timestamp = 0,
        /// Milliseconds since the last Controller Level Reset.
        since_reset_ms: u64 = 8,
    }
}

wire! {
    /// Data of a Power-on or Reset event, with one controller.
    pub struct PowerOnOrReset[44] {
        /// Firmware revision.
        firmware: Text<8> = 0,
        /// Controller; FFFFh for none.
        cntlid: u16 = 8,
        /// A firmware was activated.
        firmware_activated: u8 = 10,
        /// An operation was in progress.
        in_progress: u8 = 11,
        /// Power cycles.
        power_cycles: u32 = 24,
        /// Milliseconds since power was switched on.
        power_on_ms: u64 = 28,
        /// Time of the event.
        timestamp: Timestamp = 36,
    }
}

wire! {
    /// Data of a Change Namespace event: fields of a Namespace Management command.
    pub struct ChangeNamespace[48] {
        /// Dword 10 of the command: 0 created, 1 deleted.
        cdw10: u32 = 0,
        /// Size in logical blocks.
        nsze: u64 = 8,
        /// Capacity in logical blocks.
        ncap: u64 = 24,
        /// Format.
        flbas: u8 = 32,
        /// Data protection.
        dps: u8 = 33,
        /// Multi-path I/O and sharing.
        nmic: u8 = 34,
        /// ANA group.
        anagrpid: u32 = 36,
        /// NVM set.
        nvmsetid: u16 = 40,
        /// Namespace.
        nsid: u32 = 44,
    }
}

wire! {
    /// Data of a Format NVM Start event.
    pub struct FormatStart[12] {
        /// Namespace of the command.
        nsid: u32 = 0,
        /// Format NVM attributes of the controller.
        fna: u8 = 4,
        /// Dword 10 of the command.
        cdw10: u32 = 8,
    }
}

wire! {
    /// Data of a Format NVM Completion event.
    pub struct FormatCompletion[12] {
        /// Namespace of the command.
        nsid: u32 = 0,
        /// The smallest progress indicator that was reported; 0 if none is.
        smallest_progress: u8 = 4,
        /// Bit 0: it failed. Bit 1: it is not complete.
        outcome: u8 = 5,
        /// Vendor specific.
        info: u16 = 6,
        /// Status of the command, in the bits of a completion without its phase.
        status: u32 = 8,
    }
}

#[cfg(test)]
mod tests {
    use crate::persistent_event::*;

    #[test]
    fn the_fields_are_where_nvme_cli_reads_them() {
        let header = PersistentEventHeader {
            lid: LogId::PERSISTENT_EVENT,
            events: 0x0102_0304,
            total_bytes: 0x55,
            header_bytes: PersistentEventHeader::REST_BYTES,
            generation: 0x6677,
            supported: [0xEE; 32],
            ..PersistentEventHeader::default()
        };
        let bytes = header.emit();
        assert_eq!((bytes[0], &bytes[4..9]), (0x0D, &[4, 3, 2, 1, 0x55][..]));
        assert_eq!((&bytes[18..20], &bytes[372..374]), (&[0xEC, 1][..], &[0x77, 0x66][..]));
        assert_eq!((bytes[479], &bytes[480..]), (0, &[0xEE; 32][..]));
        // Both lengths are counted from the end of their own fields.
        assert_eq!(usize::from(PersistentEventHeader::REST_BYTES) + 20, bytes.len());
        assert_eq!(usize::from(EventHeader::REST_BYTES) + 3, EventHeader::BYTES);
        let event = EventHeader { cntlid: 0x0203, event_bytes: 0x0405, ..EventHeader::default() };
        assert_eq!(
            (event.emit()[4..6].to_vec(), event.emit()[22..].to_vec()),
            (vec![3, 2], vec![5, 4])
        );
        let change = TimestampChange { previous: Timestamp::new(0x0203), since_reset_ms: 9 };
        assert_eq!(change.emit(), [3, 2, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(ChangeNamespace { nsid: 7, ..ChangeNamespace::default() }.emit()[44], 7);
    }
}
