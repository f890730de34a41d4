//! Reservations: the four commands, their data, the report, the log page and the two features.
//!
//! Source: NVMe Base Specification 2.0, "Reservation Register command", "Reservation Acquire
//! command", "Reservation Release command", "Reservation Report command", "Reservation Notification
//! log page", "Reservation Notification Mask" and "Reservation Persistence".

use crate::{IoOpcode, Sgl, Sqe};

open_enum! {
    /// Reservation type.
    pub struct ReservationType(u8) {
        NONE = 0, "none";
        WRITE_EXCLUSIVE = 1, "Write Exclusive";
        EXCLUSIVE_ACCESS = 2, "Exclusive Access";
        WRITE_EXCLUSIVE_REGISTRANTS = 3, "Write Exclusive - Registrants Only";
        EXCLUSIVE_ACCESS_REGISTRANTS = 4, "Exclusive Access - Registrants Only";
        WRITE_EXCLUSIVE_ALL = 5, "Write Exclusive - All Registrants";
        EXCLUSIVE_ACCESS_ALL = 6, "Exclusive Access - All Registrants";
    }
}

impl ReservationType {
    /// The six types, in the order of their codes.
    pub const ALL: [Self; 6] = [
        Self::WRITE_EXCLUSIVE,
        Self::EXCLUSIVE_ACCESS,
        Self::WRITE_EXCLUSIVE_REGISTRANTS,
        Self::EXCLUSIVE_ACCESS_REGISTRANTS,
        Self::WRITE_EXCLUSIVE_ALL,
        Self::EXCLUSIVE_ACCESS_ALL,
    ];

    /// Whether it is one of the six types.
    pub const fn is_known(self) -> bool {
        matches!(self.0, 1..=6)
    }

    /// Whether it prevents reads by other hosts, too.
    pub const fn excludes_readers(self) -> bool {
        matches!(self.0, 2 | 4 | 6)
    }

    /// Whether every registrant has the access of the holder.
    pub const fn admits_registrants(self) -> bool {
        matches!(self.0, 3..=6)
    }

    /// Whether every registrant is a holder.
    pub const fn is_held_by_all(self) -> bool {
        matches!(self.0, 5 | 6)
    }
}

bits! {
    /// Reservation capabilities of a namespace (RESCAP).
    pub struct Rescap(u8) {
        /// Persist through power loss.
        ptpl with_ptpl: bool = 0, 1;
        /// Write Exclusive.
        write_exclusive with_write_exclusive: bool = 1, 1;
        /// Exclusive Access.
        exclusive_access with_exclusive_access: bool = 2, 1;
        /// Write Exclusive - Registrants Only.
        write_exclusive_registrants with_write_exclusive_registrants: bool = 3, 1;
        /// Exclusive Access - Registrants Only.
        exclusive_access_registrants with_exclusive_access_registrants: bool = 4, 1;
        /// Write Exclusive - All Registrants.
        write_exclusive_all with_write_exclusive_all: bool = 5, 1;
        /// Exclusive Access - All Registrants.
        exclusive_access_all with_exclusive_access_all: bool = 6, 1;
        /// Ignore Existing Key as revision 1.3 and later define it.
        ignore_existing_key with_ignore_existing_key: bool = 7, 1;
    }
}

impl Rescap {
    /// All six types, and Ignore Existing Key as of 1.3; nothing persists.
    pub const VOLATILE: Self = Self(0xFE);
}

open_enum! {
    /// Reservation Register Action (RREGA), 3 bits.
    pub struct RegisterAction(u8) {
        REGISTER = 0, "Register Reservation Key";
        UNREGISTER = 1, "Unregister Reservation Key";
        REPLACE = 2, "Replace Reservation Key";
    }
}

open_enum! {
    /// Change Persist Through Power Loss State (CPTPL), 2 bits.
    pub struct ChangePersistence(u8) {
        KEEP = 0, "No change";
        CLEAR = 2, "Released and cleared on power on";
        SET = 3, "Persist across power loss";
    }
}

open_enum! {
    /// Reservation Acquire Action (RACQA), 3 bits.
    pub struct AcquireAction(u8) {
        ACQUIRE = 0, "Acquire";
        PREEMPT = 1, "Preempt";
        PREEMPT_AND_ABORT = 2, "Preempt and Abort";
    }
}

open_enum! {
    /// Reservation Release Action (RRELA), 3 bits.
    pub struct ReleaseAction(u8) {
        RELEASE = 0, "Release";
        CLEAR = 1, "Clear";
    }
}

bits! {
    /// Dword 10 of Reservation Register.
    pub struct Register(u32) {
        /// Action.
        action with_action: RegisterAction = 0, 3;
        /// Ignore Existing Key: the current key is not checked.
        ignore_key with_ignore_key: bool = 3, 1;
        /// Change of the persistence.
        persistence with_persistence: ChangePersistence = 30, 2;
    }
}

bits! {
    /// Dword 10 of Reservation Acquire.
    pub struct Acquire(u32) {
        /// Action.
        action with_action: AcquireAction = 0, 3;
        /// Ignore Existing Key: not allowed since 1.3.
        ignore_key with_ignore_key: bool = 3, 1;
        /// Type of the reservation.
        rtype with_rtype: ReservationType = 8, 8;
    }
}

bits! {
    /// Dword 10 of Reservation Release.
    pub struct Release(u32) {
        /// Action.
        action with_action: ReleaseAction = 0, 3;
        /// Ignore Existing Key: not allowed since 1.3.
        ignore_key with_ignore_key: bool = 3, 1;
        /// Type of the reservation.
        rtype with_rtype: ReservationType = 8, 8;
    }
}

wire! {
    /// Data of Reservation Register, 16 bytes.
    pub struct RegisterKeys[16] {
        /// Current key: for Unregister and Replace.
        current: u64 = 0,
        /// New key: for Register and Replace.
        new: u64 = 8,
    }
}

wire! {
    /// Data of Reservation Acquire, 16 bytes.
    pub struct AcquireKeys[16] {
        /// Current key.
        current: u64 = 0,
        /// The key to preempt; ignored by Acquire.
        preempt: u64 = 8,
    }
}

wire! {
    /// Data of Reservation Release, 8 bytes.
    pub struct ReleaseKey[8] {
        /// Current key.
        current: u64 = 0,
    }
}

impl Register {
    /// Reads dword 10.
    pub const fn parse(command: &Sqe) -> Self {
        Self(command.cdw10)
    }

    /// Returns the command for namespace `nsid`, with its 16 bytes of data at `data`.
    pub fn emit(self, nsid: u32, data: Sgl) -> Sqe {
        let command = Sqe::io(IoOpcode::RESERVATION_REGISTER, nsid).with_sgl(data);
        Sqe { cdw10: self.0, ..command }
    }
}

impl Acquire {
    /// Reads dword 10.
    pub const fn parse(command: &Sqe) -> Self {
        Self(command.cdw10)
    }

    /// Returns the command for namespace `nsid`, with its 16 bytes of data at `data`.
    pub fn emit(self, nsid: u32, data: Sgl) -> Sqe {
        let command = Sqe::io(IoOpcode::RESERVATION_ACQUIRE, nsid).with_sgl(data);
        Sqe { cdw10: self.0, ..command }
    }
}

impl Release {
    /// Reads dword 10.
    pub const fn parse(command: &Sqe) -> Self {
        Self(command.cdw10)
    }

    /// Returns the command for namespace `nsid`, with its 8 bytes of data at `data`.
    pub fn emit(self, nsid: u32, data: Sgl) -> Sqe {
        let command = Sqe::io(IoOpcode::RESERVATION_RELEASE, nsid).with_sgl(data);
        Sqe { cdw10: self.0, ..command }
    }
}

command! {
    /// Fields of a Reservation Report command.
    pub struct Report {
        /// Number of dwords, minus one.
        numd_z: u32 = cdw10[0, 32];
        /// The extended structures: host identifiers of 128 bits.
        extended: bool = cdw11[0, 1];
    }
}

impl Report {
    /// Returns the command for namespace `nsid`, with its data at `data`.
    pub fn emit(self, nsid: u32, data: Sgl) -> Sqe {
        self.put(Sqe::io(IoOpcode::RESERVATION_REPORT, nsid).with_sgl(data))
    }

    /// Requested length in bytes: 4 to 2^34.
    pub const fn len_bytes(self) -> u64 {
        (self.numd_z as u64 + 1) * 4
    }
}

wire! {
    /// Beginning of a Reservation Status structure, 24 bytes. The extended one has 40 more reserved
    /// bytes ([`EXTENDED_STATUS_BYTES`]) before its first registrant.
    pub struct ReservationStatus[24] {
        /// Generation: incremented with every change of the registrants.
        generation: u32 = 0,
        /// Type of the reservation.
        rtype: ReservationType = 4,
        /// Number of registrants, including those that did not fit.
        registrants: u16 = 5,
        /// Bit 0: persists through power loss.
        ptpls: u8 = 9,
    }
}

/// Size of the extended Reservation Status structure before its first registrant, in bytes.
pub const EXTENDED_STATUS_BYTES: usize = 64;

wire! {
    /// Registrant of an extended Reservation Status structure, 64 bytes.
    pub struct ExtendedRegistrant[64] {
        /// Controller id; FFFFh when it is not known.
        cntlid: u16 = 0,
        /// Bit 0: holds the reservation.
        rcsts: u8 = 2,
        /// Key.
        key: u64 = 8,
        /// Host identifier, as in Connect.
        hostid: [u8; 16] = 16,
    }
}

open_enum! {
    /// Type of a page of the Reservation Notification log.
    pub struct NotificationType(u8) {
        EMPTY = 0, "Empty Log Page";
        REGISTRATION_PREEMPTED = 1, "Registration Preempted";
        RESERVATION_RELEASED = 2, "Reservation Released";
        RESERVATION_PREEMPTED = 3, "Reservation Preempted";
    }
}

wire! {
    /// Reservation Notification log page (80h), 64 bytes.
    pub struct NotificationPage[64] {
        /// Number of the page: incremented with each, and skips 0, which is an empty page.
        count: u64 = 0,
        /// The event.
        kind: NotificationType = 8,
        /// Number of pages after this one; 255 for that many or more.
        waiting: u8 = 9,
        /// Namespace.
        nsid: u32 = 12,
    }
}

bits! {
    /// 82h Reservation Notification Mask: events that are not reported.
    pub struct NotificationMask(u32) {
        /// REGPRE: registration preempted.
        registration_preempted with_registration_preempted: bool = 1, 1;
        /// RESREL: reservation released.
        reservation_released with_reservation_released: bool = 2, 1;
        /// RESPRE: reservation preempted.
        reservation_preempted with_reservation_preempted: bool = 3, 1;
    }
}

impl NotificationMask {
    /// The bit that masks this type; 0 for other types.
    pub const fn bit(kind: NotificationType) -> u32 {
        match kind.0 {
            kind @ 1..=3 => 1 << kind,
            _ => 0,
        }
    }
}

bits! {
    /// 83h Reservation Persistence.
    pub struct Persistence(u32) {
        /// PTPL: reservations and registrants persist through power loss.
        ptpl with_ptpl: bool = 0, 1;
    }
}

#[cfg(test)]
mod tests {
    use crate::reservation::*;
    use proptest::prelude::*;

    #[test]
    fn reservation_commands_encode_as_linux_sends_them() {
        // As sent by Linux: register with persistence, replace regardless of the old key, preempt
        // and abort with type 4, clear.
        let register = Register(0).with_persistence(ChangePersistence::SET);
        assert_eq!(register.0, 0xC000_0000);
        let replace = Register(0).with_action(RegisterAction::REPLACE).with_ignore_key(true);
        assert_eq!(replace.0, 0x0000_000A);
        let preempt = Acquire(0)
            .with_action(AcquireAction::PREEMPT_AND_ABORT)
            .with_rtype(ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS);
        assert_eq!(preempt.0, 0x0402);
        let clear = Release(0).with_action(ReleaseAction::CLEAR);
        assert_eq!(clear.0, 1);
        let sqe = register.emit(3, Sgl::NONE);
        assert_eq!((sqe.opcode, sqe.nsid, sqe.cdw10), (0x0D, 3, 0xC000_0000));
        assert_eq!(preempt.emit(1, Sgl::NONE).opcode, 0x11);
        assert_eq!(clear.emit(1, Sgl::NONE).opcode, 0x15);
        let report = Report { numd_z: 1023, extended: true };
        let sqe = report.emit(1, Sgl::NONE);
        assert_eq!((sqe.opcode, sqe.cdw10, sqe.cdw11), (0x0E, 1023, 1));
        assert_eq!(report.len_bytes(), 4096);
        assert_eq!(Report { numd_z: u32::MAX, extended: false }.len_bytes(), 1 << 34);
    }

    #[test]
    fn reservation_structure_layouts_match_the_specification() {
        let keys = RegisterKeys { current: 0x0102, new: 0x0304_0000_0000_0000 };
        assert_eq!(keys.emit(), [2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 4, 3]);
        let keys = AcquireKeys { current: 1, preempt: 2 };
        assert_eq!((keys.emit()[0], keys.emit()[8]), (1, 2));
        assert_eq!(ReleaseKey { current: 7 }.emit(), [7, 0, 0, 0, 0, 0, 0, 0]);

        let status = ReservationStatus {
            generation: 0x0403_0201,
            rtype: ReservationType::WRITE_EXCLUSIVE_ALL,
            registrants: 0x0706,
            ptpls: 1,
        };
        let mut expected = [0; 24];
        expected[..10].copy_from_slice(&[1, 2, 3, 4, 5, 6, 7, 0, 0, 1]);
        assert_eq!(status.emit(), expected);

        let long = ExtendedRegistrant { cntlid: 9, rcsts: 0, key: 3, hostid: [5; 16] }.emit();
        assert_eq!((long[0], long[8], &long[16..32]), (9, 3, &[5; 16][..]));
        assert_eq!(long[32..], [0; 32]);

        let page = NotificationPage {
            count: 2,
            kind: NotificationType::RESERVATION_PREEMPTED,
            waiting: 4,
            nsid: 0x0102_0304,
        };
        let bytes = page.emit();
        assert_eq!((bytes[0], &bytes[8..16]), (2, &[3, 4, 0, 0, 4, 3, 2, 1][..]));
    }

    #[test]
    fn reservation_types_define_access_and_holders() {
        use ReservationType as T;
        let known = (0..=u8::MAX).filter(|&code| T(code).is_known());
        assert!(known.eq(T::ALL.map(|rtype| rtype.0)));
        let with = |has: fn(T) -> bool| T::ALL.map(|rtype| u8::from(has(rtype)));
        assert_eq!(with(T::excludes_readers), [0, 1, 0, 1, 0, 1]);
        assert_eq!(with(T::admits_registrants), [0, 0, 1, 1, 1, 1]);
        assert_eq!(with(T::is_held_by_all), [0, 0, 0, 0, 1, 1]);
    }

    #[test]
    fn capabilities_and_features_have_their_bits() {
        let all = Rescap(0)
            .with_write_exclusive(true)
            .with_exclusive_access(true)
            .with_write_exclusive_registrants(true)
            .with_exclusive_access_registrants(true)
            .with_write_exclusive_all(true)
            .with_exclusive_access_all(true)
            .with_ignore_existing_key(true);
        assert_eq!(all, Rescap::VOLATILE);
        assert_eq!(all.with_ptpl(true).0, 0xFF);
        let mask = NotificationMask(0)
            .with_registration_preempted(true)
            .with_reservation_released(true)
            .with_reservation_preempted(true);
        assert_eq!(mask.0, 0b1110);
        let bits = (0..6).map(|kind| NotificationMask::bit(NotificationType(kind)));
        assert!(bits.eq([0, 2, 4, 8, 0, 0]));
        assert_eq!(Persistence(0).with_ptpl(true).0, 1);
    }

    proptest! {
        #[test]
        fn reservation_commands_round_trip(cdw10: u32, cdw11: u32, nsid: u32) {
            let sqe = Register(cdw10).emit(nsid, Sgl::NONE);
            prop_assert_eq!(Register::parse(&sqe), Register(cdw10));
            prop_assert_eq!(Acquire::parse(&Acquire(cdw10).emit(nsid, Sgl::NONE)), Acquire(cdw10));
            prop_assert_eq!(Release::parse(&Release(cdw10).emit(nsid, Sgl::NONE)), Release(cdw10));
            let report = Report { numd_z: cdw10, extended: cdw11 & 1 == 1 };
            prop_assert_eq!(Report::parse(&report.emit(nsid, Sgl::NONE)), report);
        }

        #[test]
        fn reservation_structures_round_trip(bytes: [u8; 64]) {
            let page = NotificationPage::parse(&bytes);
            prop_assert_eq!(NotificationPage::parse(&page.emit()), page);
            let entry = ExtendedRegistrant::parse(&bytes);
            prop_assert_eq!(ExtendedRegistrant::parse(&entry.emit()), entry);
            let begin = *bytes.first_chunk().unwrap();
            let status = ReservationStatus::parse(&begin);
            prop_assert_eq!(ReservationStatus::parse(&status.emit()), status);
            let keys = *bytes.first_chunk().unwrap();
            prop_assert_eq!(RegisterKeys::parse(&keys).emit(), keys);
            prop_assert_eq!(AcquireKeys::parse(&keys).emit(), keys);
        }
    }
}
