//! Command status: type, code, retry advice.
//!
//! Source: NVMe Base Specification 2.0, "Status Field Definition" and the status code tables;
//! NVM Command Set Specification 1.0 for the codes from 80h of each type; NVMe over Fabrics for
//! command specific codes from 80h of fabrics commands.

use core::fmt;

use crate::Field;

/// The outcome of a command: the only error of command code.
///
/// `code` is `SCT << 8 | SC`, 11 bits: status code type 0 to 7, status code 0 to FFh. In addition
/// there are Command Retry Delay (0 to 3), More and Do Not Retry. Equality compares all of them;
/// compare `code()`, or use `is`, for the code alone.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Status {
    code: u16,
    crd: u8,
    more: bool,
    dnr: bool,
}

impl Status {
    /// From status code type (the lowest 3 bits count) and status code.
    pub const fn new(sct: u8, sc: u8) -> Self {
        Self::from_code((sct as u16) << 8 | sc as u16)
    }

    /// From `SCT << 8 | SC`; the lowest 11 bits count.
    pub const fn from_code(code: u16) -> Self {
        Self { code: code & 0x7FF, crd: 0, more: false, dnr: false }
    }

    /// From bytes 14 and 15 of a completion; the phase tag (bit 0) is dropped.
    pub const fn from_field(field: u16) -> Self {
        Self {
            code: field >> 1 & 0x7FF,
            crd: (field >> 12 & 3) as u8,
            more: field >> 14 & 1 == 1,
            dnr: field >> 15 == 1,
        }
    }

    /// Bytes 14 and 15 of a completion: phase tag 0 (bit 0), SC (8:1), SCT (11:9), CRD (13:12),
    /// M (14), DNR (15).
    pub const fn field(self) -> u16 {
        self.code << 1
            | (self.crd as u16) << 12
            | (self.more as u16) << 14
            | (self.dnr as u16) << 15
    }

    /// `SCT << 8 | SC`.
    pub const fn code(self) -> u16 {
        self.code
    }

    /// Status code type, 0 to 7: 0 generic, 1 command specific, 2 media and data integrity, 3 path
    /// related, 7 vendor specific.
    pub const fn sct(self) -> u8 {
        (self.code >> 8) as u8
    }

    /// Status code within its type.
    pub const fn sc(self) -> u8 {
        self.code as u8
    }

    /// Whether type and code are equal, whatever the retry advice.
    pub const fn is(self, other: Self) -> bool {
        self.code == other.code
    }

    /// Type 0, code 0.
    pub const fn is_success(self) -> bool {
        self.code == 0
    }

    /// Do Not Retry.
    pub const fn dnr(self) -> bool {
        self.dnr
    }

    /// More: the Error Information log has an entry about this command.
    pub const fn more(self) -> bool {
        self.more
    }

    /// Command Retry Delay: 0 none, 1 to 3 the controller's CRDT1 to CRDT3.
    pub const fn crd(self) -> u8 {
        self.crd
    }

    /// With Do Not Retry: the same command would fail again.
    #[must_use]
    pub const fn with_dnr(self) -> Self {
        Self { dnr: true, ..self }
    }

    /// Without Do Not Retry: the failure may be transient.
    #[must_use]
    pub const fn without_dnr(self) -> Self {
        Self { dnr: false, ..self }
    }

    /// With the More bit as given.
    #[must_use]
    pub const fn with_more(self, more: bool) -> Self {
        Self { more, ..self }
    }

    /// With a Command Retry Delay; the lowest 2 bits count.
    #[must_use]
    pub const fn with_crd(self, crd: u8) -> Self {
        Self { crd: crd & 3, ..self }
    }

    /// `Ok` on success, else `self` as the error.
    pub const fn ok(self) -> Result<(), Self> {
        if self.is_success() { Ok(()) } else { Err(self) }
    }
}

/// Name and numbers, as `Invalid Field in Command (sct 0h, sc 02h), do not retry`.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.name().unwrap_or(match self.sct() {
            0 => "Unknown Generic Command Status",
            1 => "Unknown Command Specific Status",
            2 => "Unknown Media or Data Integrity Error",
            3 => "Unknown Path Related Status",
            7 => "Vendor Specific Status",
            _ => "Reserved Status",
        });
        write!(f, "{name} (sct {:x}h, sc {:02x}h)", self.sct(), self.sc())?;
        if self.crd != 0 {
            write!(f, ", retry delay {}", self.crd)?;
        }
        if self.more {
            f.write_str(", more")?;
        }
        if self.dnr {
            f.write_str(", do not retry")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Status({self})")
    }
}

impl core::error::Error for Status {}

/// As `field`: a status field within a log page.
impl Field for Status {
    const BYTES: usize = 2;
    #[inline]
    fn get(from: &[u8]) -> Self {
        Self::from_field(Field::get(from))
    }
    #[inline]
    fn put(&self, to: &mut [u8]) {
        self.field().put(to);
    }
}

/// Codes and names. A second name on one code, used by another command, follows after `also`.
macro_rules! codes {
    ($( $name:ident = $code:literal, $text:literal $(, also $alias:ident $what:literal)?; )*) => {
        impl Status {
            $(
                #[doc = $text]
                pub const $name: Self = Self::from_code($code);
                $(
                    #[doc = $what]
                    pub const $alias: Self = Self::from_code($code);
                )?
            )*

            /// Every code that has a name here.
            pub const NAMED: &'static [Self] = &[$( Self::$name, )*];

            /// The name of the code in the specifications; if two commands use one code, both.
            pub const fn name(self) -> Option<&'static str> {
                match self.code {
                    $( $code => Some(concat!($text $(, " or ", $what)?)), )*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    // Generic command status.
    SUCCESS = 0x000, "Successful Completion";
    INVALID_OPCODE = 0x001, "Invalid Command Opcode";
    INVALID_FIELD = 0x002, "Invalid Field in Command";
    CID_CONFLICT = 0x003, "Command ID Conflict";
    DATA_TRANSFER_ERROR = 0x004, "Data Transfer Error";
    ABORTED_POWER_LOSS = 0x005, "Commands Aborted due to Power Loss Notification";
    INTERNAL_ERROR = 0x006, "Internal Error";
    ABORT_REQUESTED = 0x007, "Command Abort Requested";
    ABORTED_SQ_DELETION = 0x008, "Command Aborted due to SQ Deletion";
    ABORTED_FAILED_FUSED = 0x009, "Command Aborted due to Failed Fused Command";
    ABORTED_MISSING_FUSED = 0x00A, "Command Aborted due to Missing Fused Command";
    INVALID_NAMESPACE = 0x00B, "Invalid Namespace or Format";
    COMMAND_SEQUENCE_ERROR = 0x00C, "Command Sequence Error";
    INVALID_SGL_LAST_SEGMENT = 0x00D, "Invalid SGL Segment Descriptor";
    INVALID_SGL_COUNT = 0x00E, "Invalid Number of SGL Descriptors";
    DATA_SGL_LENGTH_INVALID = 0x00F, "Data SGL Length Invalid";
    METADATA_SGL_LENGTH_INVALID = 0x010, "Metadata SGL Length Invalid";
    SGL_TYPE_INVALID = 0x011, "SGL Descriptor Type Invalid";
    INVALID_CMB_USE = 0x012, "Invalid Use of Controller Memory Buffer";
    PRP_OFFSET_INVALID = 0x013, "PRP Offset Invalid";
    ATOMIC_WRITE_UNIT_EXCEEDED = 0x014, "Atomic Write Unit Exceeded";
    OPERATION_DENIED = 0x015, "Operation Denied";
    SGL_OFFSET_INVALID = 0x016, "SGL Offset Invalid";
    HOST_ID_INCONSISTENT = 0x018, "Host Identifier Inconsistent Format";
    KEEP_ALIVE_EXPIRED = 0x019, "Keep Alive Timer Expired";
    KEEP_ALIVE_INVALID = 0x01A, "Keep Alive Timeout Invalid";
    ABORTED_PREEMPT = 0x01B, "Command Aborted due to Preempt and Abort";
    SANITIZE_FAILED = 0x01C, "Sanitize Failed";
    SANITIZE_IN_PROGRESS = 0x01D, "Sanitize In Progress";
    SGL_GRANULARITY_INVALID = 0x01E, "SGL Data Block Granularity Invalid";
    NAMESPACE_WRITE_PROTECTED = 0x020, "Namespace is Write Protected";
    COMMAND_INTERRUPTED = 0x021, "Command Interrupted";
    TRANSIENT_TRANSPORT_ERROR = 0x022, "Transient Transport Error";
    ADMIN_MEDIA_NOT_READY = 0x024, "Admin Command Media Not Ready";
    // As Linux numbers it; see 12Ch.
    INVALID_IO_COMMAND_SET = 0x02C, "Invalid I/O Command Set";
    LBA_OUT_OF_RANGE = 0x080, "LBA Out of Range";
    CAPACITY_EXCEEDED = 0x081, "Capacity Exceeded";
    NAMESPACE_NOT_READY = 0x082, "Namespace Not Ready";
    RESERVATION_CONFLICT = 0x083, "Reservation Conflict";
    FORMAT_IN_PROGRESS = 0x084, "Format In Progress";
    // Command specific status.
    CQ_INVALID = 0x100, "Completion Queue Invalid";
    INVALID_QUEUE_ID = 0x101, "Invalid Queue Identifier";
    INVALID_QUEUE_SIZE = 0x102, "Invalid Queue Size";
    ABORT_LIMIT_EXCEEDED = 0x103, "Abort Command Limit Exceeded";
    AER_LIMIT_EXCEEDED = 0x105, "Asynchronous Event Request Limit Exceeded";
    INVALID_FIRMWARE_SLOT = 0x106, "Invalid Firmware Slot";
    INVALID_FIRMWARE_IMAGE = 0x107, "Invalid Firmware Image";
    INVALID_LOG_PAGE = 0x109, "Invalid Log Page";
    INVALID_FORMAT = 0x10A, "Invalid Format";
    INVALID_QUEUE_DELETION = 0x10C, "Invalid Queue Deletion";
    FEATURE_NOT_SAVEABLE = 0x10D, "Feature Identifier Not Saveable";
    FEATURE_NOT_CHANGEABLE = 0x10E, "Feature Not Changeable";
    FEATURE_NOT_NAMESPACE_SPECIFIC = 0x10F, "Feature Not Namespace Specific";
    NAMESPACE_INSUFFICIENT_CAPACITY = 0x115, "Namespace Insufficient Capacity";
    NAMESPACE_ID_UNAVAILABLE = 0x116, "Namespace Identifier Unavailable";
    NAMESPACE_ALREADY_ATTACHED = 0x118, "Namespace Already Attached";
    NAMESPACE_IS_PRIVATE = 0x119, "Namespace Is Private";
    NAMESPACE_NOT_ATTACHED = 0x11A, "Namespace Not Attached";
    THIN_PROVISIONING_NOT_SUPPORTED = 0x11B, "Thin Provisioning Not Supported";
    CONTROLLER_LIST_INVALID = 0x11C, "Controller List Invalid";
    ANA_GROUP_INVALID = 0x124, "ANA Group Identifier Invalid";
    ATTACHMENT_LIMIT_EXCEEDED = 0x127, "Namespace Attachment Limit Exceeded";
    COMMAND_SET_NOT_SUPPORTED = 0x129, "I/O Command Set Not Supported";
    COMMAND_SET_NOT_ENABLED = 0x12A, "I/O Command Set Not Enabled";
    COMMAND_SETS_REJECTED = 0x12B, "I/O Command Set Combination Rejected";
    COMMAND_SET_INVALID = 0x12C, "Invalid I/O Command Set";
    CONFLICTING_ATTRIBUTES = 0x180, "Conflicting Attributes",
        also CONNECT_INCOMPATIBLE_FORMAT "Connect Incompatible Format";
    INVALID_PROTECTION_INFORMATION = 0x181, "Invalid Protection Information",
        also CONNECT_CONTROLLER_BUSY "Connect Controller Busy";
    WRITE_TO_READ_ONLY_RANGE = 0x182, "Attempted Write to Read Only Range",
        also CONNECT_INVALID_PARAMETERS "Connect Invalid Parameters";
    COMMAND_SIZE_LIMIT_EXCEEDED = 0x183, "Command Size Limit Exceeded",
        also CONNECT_RESTART_DISCOVERY "Connect Restart Discovery";
    CONNECT_INVALID_HOST = 0x184, "Connect Invalid Host";
    INVALID_QUEUE_TYPE = 0x185, "Invalid Queue Type";
    DISCOVER_RESTART = 0x190, "Discover Restart";
    AUTHENTICATION_REQUIRED = 0x191, "Authentication Required";
    ZONE_BOUNDARY_ERROR = 0x1B8, "Zone Boundary Error";
    ZONE_IS_FULL = 0x1B9, "Zone Is Full";
    ZONE_IS_READ_ONLY = 0x1BA, "Zone Is Read Only";
    ZONE_IS_OFFLINE = 0x1BB, "Zone Is Offline";
    ZONE_INVALID_WRITE = 0x1BC, "Zone Invalid Write";
    TOO_MANY_ACTIVE_ZONES = 0x1BD, "Too Many Active Zones";
    TOO_MANY_OPEN_ZONES = 0x1BE, "Too Many Open Zones";
    INVALID_ZONE_STATE_TRANSITION = 0x1BF, "Invalid Zone State Transition";
    // Media and data integrity errors.
    WRITE_FAULT = 0x280, "Write Fault";
    UNRECOVERED_READ_ERROR = 0x281, "Unrecovered Read Error";
    GUARD_CHECK_ERROR = 0x282, "End-to-end Guard Check Error";
    APPLICATION_TAG_CHECK_ERROR = 0x283, "End-to-end Application Tag Check Error";
    REFERENCE_TAG_CHECK_ERROR = 0x284, "End-to-end Reference Tag Check Error";
    COMPARE_FAILURE = 0x285, "Compare Failure";
    ACCESS_DENIED = 0x286, "Access Denied";
    DEALLOCATED_BLOCK = 0x287, "Deallocated or Unwritten Logical Block";
    // Path related status.
    INTERNAL_PATH_ERROR = 0x300, "Internal Path Error";
    ANA_PERSISTENT_LOSS = 0x301, "Asymmetric Access Persistent Loss";
    ANA_INACCESSIBLE = 0x302, "Asymmetric Access Inaccessible";
    ANA_TRANSITION = 0x303, "Asymmetric Access Transition";
    CONTROLLER_PATH_ERROR = 0x360, "Controller Pathing Error";
    HOST_PATH_ERROR = 0x370, "Host Pathing Error";
    ABORTED_BY_HOST = 0x371, "Command Aborted By Host";
}

#[cfg(test)]
mod tests {
    use crate::status::*;
    use proptest::prelude::*;

    #[test]
    fn field_places_every_bit() {
        assert_eq!(Status::SUCCESS.field(), 0);
        assert_eq!(Status::INVALID_OPCODE.field(), 0x0002);
        assert_eq!(Status::CQ_INVALID.field(), 0x0200);
        assert_eq!(Status::SUCCESS.with_crd(1).field(), 0x1000);
        assert_eq!(Status::SUCCESS.with_more(true).field(), 0x4000);
        assert_eq!(Status::SUCCESS.with_dnr().field(), 0x8000);
        assert_eq!(Status::ABORTED_BY_HOST.field(), 0x371 << 1);
        // linux-6.12-session.pcap frame 572: a read past the end, as completed by nvmet.
        assert_eq!(Status::from_field(0xC00C), Status::INTERNAL_ERROR.with_dnr().with_more(true));
    }

    #[test]
    fn display_names_the_code_and_the_numbers() {
        assert_eq!(
            Status::INVALID_FIELD.with_dnr().to_string(),
            "Invalid Field in Command (sct 0h, sc 02h), do not retry"
        );
        assert_eq!(
            Status::CONNECT_INVALID_PARAMETERS.with_more(true).with_crd(2).to_string(),
            "Attempted Write to Read Only Range or Connect Invalid Parameters \
             (sct 1h, sc 82h), retry delay 2, more"
        );
        assert_eq!(Status::new(7, 0xAB).to_string(), "Vendor Specific Status (sct 7h, sc abh)");
        assert_eq!(Status::new(4, 1).to_string(), "Reserved Status (sct 4h, sc 01h)");
    }

    #[test]
    fn status_codes_compare_without_dnr_and_more() {
        let status = Status::INVALID_FIELD.with_dnr();
        assert!(status.is(Status::INVALID_FIELD));
        assert_ne!(status, Status::INVALID_FIELD);
        assert_eq!(status.without_dnr(), Status::INVALID_FIELD);
        assert_eq!(status.ok(), Err(status));
        assert_eq!(Status::SUCCESS.with_more(true).ok(), Ok(()));
        assert_eq!((Status::ZONE_IS_FULL.sct(), Status::ZONE_IS_FULL.sc()), (1, 0xB9));
    }

    #[test]
    fn every_code_that_a_host_or_target_uses_has_a_name() {
        let ranges = [
            0x000..=0x016,
            0x018..=0x01E,
            0x020..=0x022,
            0x024..=0x024,
            0x02C..=0x02C,
            0x080..=0x084,
            0x100..=0x103,
            0x105..=0x107,
            0x109..=0x10A,
            0x10C..=0x10F,
            0x115..=0x116,
            0x118..=0x11C,
            0x124..=0x124,
            0x127..=0x127,
            0x129..=0x12C,
            0x180..=0x185,
            0x190..=0x191,
            0x1B8..=0x1BF,
            0x280..=0x287,
            0x300..=0x303,
            0x360..=0x360,
            0x370..=0x371,
        ];
        let named = Status::NAMED.iter().map(|status| status.code());
        assert!(named.eq(ranges.into_iter().flatten()));
        let unnamed = (0..0x800).map(Status::from_code).filter(|status| status.name().is_none());
        assert_eq!(unnamed.count(), 0x800 - Status::NAMED.len());
    }

    #[test]
    fn out_of_range_arguments_are_cut() {
        assert_eq!(Status::from_code(0xF801).field(), 0x0002);
        assert_eq!(Status::SUCCESS.with_crd(0xFF).field(), 0x3000);
    }

    proptest! {
        #[test]
        fn every_status_field_round_trips(field: u16) {
            let status = Status::from_field(field);
            prop_assert_eq!(status.field(), field & !1);
            prop_assert_eq!(status.code(), u16::from(status.sct()) << 8 | u16::from(status.sc()));
            prop_assert!(!status.to_string().is_empty());
        }
    }
}
