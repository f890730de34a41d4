//! I/O commands of the NVM command set: Flush, Write, Read, Compare, Write Zeroes, Dataset Management,
//! Verify, Copy; and reservation commands.
//!
//! Source: NVM Command Set Specification 1.0, "I/O Commands".

use std::sync::Arc;

use nvme::reservation::Report;
use nvme::sqe::DsmRange;
use nvme::{IoOpcode, Sqe, Status};
use nvmfd_blockdev::DeviceId;
use rdma::Remote;

use super::{CapsuleInfo, Plan, Source, copy, destination, no_data, source, write_uncorrectable};
use crate::subsystem::reservation::{Barred, Order};
use crate::subsystem::{Extent, Namespace};

/// Bytes of one Dataset Management range.
pub const RANGE_BYTES: u32 = 16;

/// Maximum of bytes that Verify loads at once: enough to keep a device busy, few enough for a short
/// wait.
const VERIFY_BYTES: u32 = 128 << 10;

/// Decides on an I/O command on a ready controller. The order of checks is: flags, opcode,
/// namespace, format in progress, reservation, write protection, range, SGL. `namespace` is the one
/// that it names, if there is one; `barred` are the accesses that reservations deny this host there.
///
/// # Errors
/// The status to answer with.
#[inline]
pub fn plan(
    sqe: &Sqe,
    namespace: Result<&Namespace, Status>,
    barred: Barred,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    sqe.check_flags()?;
    let opcode = sqe.io_opcode();
    let group = group(opcode).ok_or(Status::INVALID_OPCODE.with_dnr())?;
    let namespace = accessible(namespace, group, barred)?;
    let plan = match opcode {
        IoOpcode::READ => read(sqe, namespace, received),
        IoOpcode::WRITE => write(sqe, namespace, received),
        _ => other(sqe, namespace, received),
    }?;
    match namespace.marks.is_empty() {
        true => Ok(plan),
        false => write_uncorrectable::judge(plan, namespace),
    }
}

/// Decides on a Read as [`plan`] does, without a plan to move: the device, the byte offset there,
/// and the host memory, whose length is that of the transfer. None if it is to be refused or needs
/// more care, as with FUA: [`plan`] decides on that.
#[inline(always)]
pub fn plain_read(
    sqe: &Sqe,
    namespace: &Namespace,
    barred: Barred,
    received: CapsuleInfo,
) -> Option<(DeviceId, u64, Remote)> {
    if sqe.fua() {
        return None;
    }
    let namespace = plain(sqe, namespace, Barred::READ, barred)?;
    let (at, len) = transfer(sqe, namespace, received).ok()?;
    Some((namespace.backing, at, destination(sqe, received, len, true).ok()?))
}

/// The same of a Write, with the location of its data.
#[inline(always)]
pub fn plain_write(
    sqe: &Sqe,
    namespace: &Namespace,
    barred: Barred,
    received: CapsuleInfo,
) -> Option<(DeviceId, u64, Source)> {
    let namespace = plain(sqe, namespace, Barred::WRITE, barred)?;
    writable(namespace).ok()?;
    let (at, len) = transfer(sqe, namespace, received).ok()?;
    Some((namespace.backing, at, source(sqe, received, len, true).ok()?))
}

/// Returns the same namespace for a Read or a Write, if its host may access it like that and no block of
/// it is unreadable.
#[inline(always)]
fn plain<'a>(
    sqe: &Sqe,
    namespace: &'a Namespace,
    group: Barred,
    barred: Barred,
) -> Option<&'a Namespace> {
    sqe.check_flags().ok()?;
    accessible(Ok(namespace), group, barred).ok()?;
    namespace.marks.is_empty().then_some(namespace)
}

/// Applies the rule of a command that is no Read and no Write.
#[inline(never)]
fn other(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    match sqe.io_opcode() {
        IoOpcode::FLUSH => flush(sqe, namespace),
        IoOpcode::COMPARE => compare(sqe, namespace, received),
        IoOpcode::WRITE_ZEROES => write_zeroes(sqe, namespace),
        IoOpcode::DATASET_MANAGEMENT => dataset_management(sqe, namespace, received),
        IoOpcode::VERIFY => verify(sqe, namespace, received),
        IoOpcode::WRITE_UNCORRECTABLE => write_uncorrectable::plan(sqe, namespace),
        IoOpcode::COPY => copy_blocks(sqe, namespace, received),
        IoOpcode::RESERVATION_REPORT => reservation_report(sqe, namespace, received),
        _ => reserve(sqe, namespace, received),
    }
}

/// Decides whether a step of a command that was accepted may begin: it may have waited for long,
/// and the conditions checked on arrival may have changed. `range` is the range that the step
/// accesses, in bytes.
///
/// # Errors
/// The status of the command if it arrived now.
#[inline]
pub fn may_begin(
    sqe: &Sqe,
    plan: &Plan,
    range: Option<(u64, u64)>,
    namespace: Result<&Namespace, Status>,
    barred: Barred,
) -> Result<(), Status> {
    let namespace = accessible(namespace, group(sqe.io_opcode()).unwrap_or(Barred(0)), barred)?;
    let is_the_same = match plan {
        Plan::Mark { of, .. } => Arc::ptr_eq(of, &namespace.marks),
        plan => plan.backing() == Some(namespace.backing),
    };
    if !is_the_same {
        // Another namespace has its NSID now.
        return Err(Status::INVALID_NAMESPACE.with_dnr());
    }
    if plan.changes_blocks() {
        writable(namespace)?;
    }
    let size_bytes = namespace.blocks << namespace.block_shift;
    match range {
        Some((at, len)) if at.checked_add(len).is_none_or(|end| end > size_bytes) => {
            Err(Status::LBA_OUT_OF_RANGE.with_dnr())
        }
        _ => Ok(()),
    }
}

/// Whether a Write of `blocks`, by byte offset and length, may begin: decided as [`may_begin`] does,
/// without the status, which few need.
#[inline(always)]
pub fn may_store(
    backing: DeviceId,
    (at, len): (u64, u32),
    namespace: &Namespace,
    barred: Barred,
) -> bool {
    accessible(Ok(namespace), Barred::WRITE, barred).is_ok()
        && backing == namespace.backing
        && writable(namespace).is_ok()
        && at
            .checked_add(len.into())
            .is_some_and(|end| end <= namespace.blocks << namespace.block_shift)
}

/// Returns the namespace of a command of this group, if its host may access it like that now.
#[inline]
fn accessible(
    namespace: Result<&Namespace, Status>,
    group: Barred,
    barred: Barred,
) -> Result<&Namespace, Status> {
    let namespace = namespace?;
    if namespace.formatting.is_some() {
        return Err(Status::FORMAT_IN_PROGRESS);
    }
    match barred.has(group) {
        true => Err(Status::RESERVATION_CONFLICT.with_dnr()),
        false => Ok(namespace),
    }
}

/// Returns the group of a command ("Command Behavior in the Presence of a Reservation"); none of one
/// that is not supported.
#[inline]
fn group(opcode: IoOpcode) -> Option<Barred> {
    Some(match opcode {
        IoOpcode::READ | IoOpcode::COMPARE | IoOpcode::VERIFY => Barred::READ,
        IoOpcode::COPY => Barred::ALL,
        IoOpcode::FLUSH
        | IoOpcode::WRITE
        | IoOpcode::WRITE_ZEROES
        | IoOpcode::DATASET_MANAGEMENT
        | IoOpcode::WRITE_UNCORRECTABLE => Barred::WRITE,
        IoOpcode::RESERVATION_REPORT
        | IoOpcode::RESERVATION_REGISTER
        | IoOpcode::RESERVATION_ACQUIRE
        | IoOpcode::RESERVATION_RELEASE => Barred(0),
        _ => return None,
    })
}

/// Checks all ranges of a Dataset Management command, before any is deallocated.
///
/// # Errors
/// LBA Out of Range.
pub fn check_ranges(data: &[u8], extent: Extent) -> Result<(), Status> {
    DsmRange::parse_all(data)
        .try_for_each(|range| extent.range(range.slba, range.blocks.into()).map(drop))
}

/// Returns byte offset and length of one of the ranges, counted from 0.
///
/// # Errors
/// LBA Out of Range.
pub fn range_at(data: &[u8], index: u32, extent: Extent) -> Result<(u64, u64), Status> {
    let range = DsmRange::parse_all(data).nth(index as usize).unwrap_or_default();
    extent.range(range.slba, range.blocks.into())
}

fn flush(sqe: &Sqe, namespace: &Namespace) -> Result<Plan, Status> {
    no_data(sqe)?;
    match namespace.volatile_cache {
        true => Ok(Plan::Flush { backing: namespace.backing, covers: 0 }),
        false => Ok(Plan::Reply(0)),
    }
}

#[inline]
fn read(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    let (at, len) = transfer(sqe, namespace, received)?;
    let to = destination(sqe, received, len, true)?;
    Ok(Plan::Load { backing: namespace.backing, at, to })
}

#[inline]
fn write(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    writable(namespace)?;
    let (at, len) = transfer(sqe, namespace, received)?;
    let from = source(sqe, received, len, true)?;
    Ok(Plan::Store { backing: namespace.backing, at, from, fua: sqe.fua() })
}

fn compare(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    let (at, len) = transfer(sqe, namespace, received)?;
    let from = source(sqe, received, len, true)?;
    Ok(Plan::Compare { backing: namespace.backing, at, from })
}

fn write_zeroes(sqe: &Sqe, namespace: &Namespace) -> Result<Plan, Status> {
    writable(namespace)?;
    let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into())?;
    no_data(sqe)?;
    let (deallocate, fua) = (sqe.deac(), sqe.fua());
    Ok(Plan::Zero { backing: namespace.backing, at, len, deallocate, fua })
}

fn dataset_management(
    sqe: &Sqe,
    namespace: &Namespace,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    let nr = sqe.ranges() as u32;
    // Linux describes 4096 bytes whatever the number of ranges: longer is accepted.
    let from = source(sqe, received, nr * RANGE_BYTES, false)?;
    if !sqe.deallocate() {
        return Ok(Plan::Reply(0));
    }
    writable(namespace)?;
    Ok(Plan::Deallocate { extent: namespace.extent(), nr, from })
}

/// Verify transfers no data, so its length has no limit but the namespace (VSL 0).
fn verify(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into())?;
    no_data(sqe)?;
    let piece_bytes = VERIFY_BYTES.min(received.mdts_bytes);
    Ok(Plan::Verify { backing: namespace.backing, at, len, piece_bytes })
}

/// Copy reads and writes: it is barred where either is.
fn copy_blocks(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    writable(namespace)?;
    copy::plan(sqe, namespace, received)
}

/// Register, Acquire, Release: the state worker decides. Linux sends 16 bytes also if 8 are needed.
fn reserve(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<Plan, Status> {
    let invalid = Status::INVALID_OPCODE.with_dnr();
    if namespace.is_shared() {
        return Err(invalid);
    }
    let len = Order::data_bytes(sqe.io_opcode()).ok_or(invalid)?;
    let from = source(sqe, received, len, false)?;
    Ok(Plan::Reserve { of: Arc::clone(&namespace.reservation), from })
}

/// Reservation Report. Host identifiers have 128 bits on a fabric, which do not fit the shorter
/// structures.
fn reservation_report(
    sqe: &Sqe,
    namespace: &Namespace,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    if namespace.is_shared() {
        return Err(Status::INVALID_OPCODE.with_dnr());
    }
    namespace.check_loaded()?;
    let report = Report::parse(sqe);
    if !report.extended {
        return Err(Status::HOST_ID_INCONSISTENT.with_dnr());
    }
    let invalid = Status::INVALID_FIELD.with_dnr();
    let len = u32::try_from(report.len_bytes()).map_err(|_| invalid)?;
    let to = destination(sqe, received, len, false)?;
    Ok(Plan::Give { page: namespace.reservation.report(), to })
}

/// Whether a host may change blocks of a namespace.
///
/// # Errors
/// Namespace is Write Protected.
#[inline]
pub fn writable(namespace: &Namespace) -> Result<(), Status> {
    match namespace.is_read_only() {
        true => Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()),
        false => Ok(()),
    }
}

/// Returns byte offset and length of the data of a command.
#[inline(always)]
fn transfer(sqe: &Sqe, namespace: &Namespace, received: CapsuleInfo) -> Result<(u64, u32), Status> {
    let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into())?;
    match u32::try_from(len) {
        Ok(len) if len <= received.mdts_bytes => Ok((at, len)),
        _ => Err(Status::INVALID_FIELD.with_dnr()),
    }
}

/// As [`plan`], for a command to a subsystem.
///
/// # Errors
/// The status to answer with.
#[cfg(test)]
pub(super) fn plan_in(
    sqe: &Sqe,
    subsystem: &crate::subsystem::Subsystem,
    barred: Barred,
    received: CapsuleInfo,
) -> Result<Plan, Status> {
    plan(sqe, subsystem.namespace(sqe.nsid), barred, received)
}

#[cfg(test)]
mod tests {
    use crate::command::io::*;
    use crate::subsystem::Subsystem;
    use crate::subsystem::bad_blocks::Change;
    use crate::subsystem::persistence::tests::MemorySections;
    use crate::subsystem::reservation::{Reservation, State};
    use crate::subsystem::testing::sample;
    use crate::subsystem::write_protect::Protection;
    use nvme::Sgl;
    use nvme::feature::WriteProtectState;
    use nvme::reservation::{Acquire, Register, Release, ReservationType};
    use nvme::sqe::Flags;
    use proptest::prelude::*;

    const RECEIVED: CapsuleInfo =
        CapsuleInfo { tail_bytes: 4096, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };

    fn keyed(len: u32) -> Sgl {
        Sgl::keyed(0x1000, len, 7, true).unwrap()
    }

    fn ask(sqe: &Sqe) -> Result<Plan, Status> {
        plan_in(sqe, &sample(), Barred(0), RECEIVED)
    }

    fn refused(sqe: &Sqe, status: Status) {
        let got = ask(sqe).unwrap_err();
        assert!(got.is(status) && got.dnr(), "{got} instead of {status}");
    }

    #[test]
    fn reads_and_writes_are_translated_to_device_operations() {
        let backing = DeviceId(0);
        let read = Sqe::io(IoOpcode::READ, 1).with_range(5, 1).with_sgl(keyed(8192));
        let to = Remote { addr: 0x1000, key: 7, len: 8192 };
        assert_eq!(ask(&read), Ok(Plan::Load { backing, at: 5 * 4096, to }));

        let write = Sqe::io(IoOpcode::WRITE, 1).with_range(5, 0).with_fua(true);
        let inline = write.with_sgl(Sgl::in_capsule(0, 4096));
        let from = Source::Capsule { offset: 0, len: 4096 };
        assert_eq!(ask(&inline), Ok(Plan::Store { backing, at: 5 * 4096, from, fua: true }));
        let from = Source::Host(Remote { addr: 0x1000, key: 7, len: 4096 });
        let pulled = Plan::Store { backing, at: 5 * 4096, from, fua: true };
        assert_eq!(ask(&write.with_sgl(keyed(4096))), Ok(pulled));

        let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(5, 0);
        for fua in [true, false] {
            let zero = Plan::Zero { backing, at: 5 * 4096, len: 4096, deallocate: false, fua };
            assert_eq!(ask(&zeroes.with_fua(fua)), Ok(zero));
        }
    }

    #[test]
    fn in_capsule_data_are_limited_to_the_received_bytes() {
        let write = Sqe::io(IoOpcode::WRITE, 2).with_range(0, 7);
        let whole = write.with_sgl(Sgl::in_capsule(0, 4096));
        assert!(ask(&whole).is_ok());
        // One byte less arrived than the descriptor has.
        let short = CapsuleInfo { tail_bytes: 4095, ..RECEIVED };
        let status = plan_in(&whole, &sample(), Barred(0), short).unwrap_err();
        assert!(status.is(Status::DATA_SGL_LENGTH_INVALID) && status.dnr());
        // More arrived than a capsule may hold.
        let long = CapsuleInfo { tail_bytes: 1 << 20, ..RECEIVED };
        let far = write.with_sgl(Sgl::in_capsule(4096, 4096));
        assert!(
            plan_in(&far, &sample(), Barred(0), long)
                .unwrap_err()
                .is(Status::DATA_SGL_LENGTH_INVALID)
        );
        refused(&write.with_sgl(Sgl::in_capsule(4097, 4096)), Status::SGL_OFFSET_INVALID);
        refused(&write.with_sgl(Sgl::in_capsule(u64::MAX, 4096)), Status::SGL_OFFSET_INVALID);
        refused(
            &write.with_sgl(Sgl::in_capsule(u64::MAX - 4095, 4096)),
            Status::SGL_OFFSET_INVALID,
        );
        refused(&write.with_sgl(Sgl::in_capsule(1, 4096)), Status::DATA_SGL_LENGTH_INVALID);
    }

    #[test]
    fn invalid_io_commands_are_refused_with_their_documented_status() {
        let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(4096));
        for nsid in [0, 3, u32::MAX] {
            refused(&read.with_nsid(nsid), Status::INVALID_NAMESPACE);
        }
        refused(&read.with_range(1 << 20, 0), Status::LBA_OUT_OF_RANGE);
        refused(&read.with_range(u64::MAX, 0), Status::LBA_OUT_OF_RANGE);
        refused(&read.with_range((1 << 20) - 1, 1), Status::LBA_OUT_OF_RANGE);
        refused(&read.with_range(0, 1), Status::DATA_SGL_LENGTH_INVALID);
        refused(&read.with_sgl(keyed(0)), Status::DATA_SGL_LENGTH_INVALID);
        refused(&read.with_sgl(keyed(8192)), Status::DATA_SGL_LENGTH_INVALID);
        refused(&read.with_sgl(Sgl::in_capsule(0, 4096)), Status::INVALID_FIELD);
        refused(&read.with_range(0, 256).with_sgl(keyed(257 * 4096)), Status::INVALID_FIELD);
        refused(&Sqe { opcode: 0x79, ..read }, Status::INVALID_OPCODE);
        refused(&Sqe::io(IoOpcode::WRITE_UNCORRECTABLE, 1), Status::INVALID_OPCODE);
        let verify = Sqe::io(IoOpcode::VERIFY, 1);
        refused(&verify.with_sgl(keyed(4096)), Status::DATA_SGL_LENGTH_INVALID);
        refused(&verify.with_range((1 << 20) - 1, 1), Status::LBA_OUT_OF_RANGE);
        refused(&Sqe::io(IoOpcode::COPY, 1), Status::DATA_SGL_LENGTH_INVALID);
        refused(&Sqe { dptr: [0xFF; 16], ..read }, Status::SGL_TYPE_INVALID);
        refused(&read.with_flags(nvme::sqe::Flags(0)), Status::INVALID_FIELD);
        refused(&read.with_flags(nvme::sqe::Flags(0x41)), Status::INVALID_FIELD);
        let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1);
        refused(&zeroes.with_sgl(keyed(4096)), Status::DATA_SGL_LENGTH_INVALID);
        refused(&zeroes.with_range((1 << 20) - 1, 1), Status::LBA_OUT_OF_RANGE);
        refused(&Sqe::io(IoOpcode::FLUSH, u32::MAX), Status::INVALID_NAMESPACE);
    }

    #[test]
    fn a_read_only_namespace_is_not_written() {
        let mut by_configuration = sample();
        by_configuration.namespaces[0].read_only = true;
        let mut by_a_host = sample();
        let protection = Protection::kept(by_a_host.nqn, 1, MemorySections::default()).unwrap();
        protection.change(WriteProtectState::UNTIL_POWER_CYCLE).unwrap();
        by_a_host.namespaces[0].protection = protection;
        for subsystem in [by_configuration, by_a_host] {
            is_not_written(&subsystem);
        }
    }

    fn is_not_written(subsystem: &Subsystem) {
        for opcode in [IoOpcode::WRITE, IoOpcode::WRITE_ZEROES] {
            let status = plan_in(&Sqe::io(opcode, 1), subsystem, Barred(0), RECEIVED).unwrap_err();
            assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED));
        }
        let copy = Sqe::io(IoOpcode::COPY, 1).with_sgl(keyed(4096));
        for sqe in [Sqe::deallocation(1, 0).with_sgl(keyed(4096)), copy] {
            let status = plan_in(&sqe, subsystem, Barred(0), RECEIVED).unwrap_err();
            assert!(status.is(Status::NAMESPACE_WRITE_PROTECTED));
        }
        let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(4096));
        assert!(plan_in(&read, subsystem, Barred(0), RECEIVED).is_ok());
    }

    #[test]
    fn io_fails_with_format_in_progress_during_a_format() {
        let mut subsystem = sample();
        subsystem.namespaces[0].formatting =
            Some(Arc::new(crate::subsystem::lba_format::Progress::none()));
        let opcodes = [
            IoOpcode::FLUSH,
            IoOpcode::WRITE,
            IoOpcode::READ,
            IoOpcode::COMPARE,
            IoOpcode::WRITE_ZEROES,
            IoOpcode::DATASET_MANAGEMENT,
            IoOpcode::VERIFY,
            IoOpcode::COPY,
            IoOpcode::RESERVATION_REPORT,
            IoOpcode::RESERVATION_REGISTER,
        ];
        for opcode in opcodes {
            let status = plan_in(&Sqe::io(opcode, 1), &subsystem, Barred(0), RECEIVED).unwrap_err();
            assert!(status.is(Status::FORMAT_IN_PROGRESS) && !status.dnr(), "{opcode:?}: {status}");
        }
        let read = Sqe::io(IoOpcode::READ, 7).with_sgl(keyed(4096));
        assert!(plan_in(&read, &subsystem, Barred(0), RECEIVED).is_ok(), "others go on");
    }

    #[test]
    fn deallocate_accepts_a_longer_buffer_and_reads_only_its_ranges() {
        let dsm = Sqe::deallocation(1, 1);
        let from = Source::Host(Remote { addr: 0x1000, key: 7, len: 32 });
        let extent = sample().namespaces[0].extent();
        let expected = Plan::Deallocate { extent, nr: 2, from };
        assert_eq!(ask(&dsm.with_sgl(keyed(4096))), Ok(expected));
        refused(&dsm.with_sgl(keyed(31)), Status::DATA_SGL_LENGTH_INVALID);
        let hint = Sqe { cdw11: 0, ..dsm.with_sgl(keyed(32)) };
        assert_eq!(ask(&hint), Ok(Plan::Reply(0)));
    }

    #[test]
    fn verify_accepts_65536_blocks() {
        let verify = Sqe::io(IoOpcode::VERIFY, 1).with_range(3, u16::MAX);
        let expected = |piece_bytes| {
            let (at, len) = (3 * 4096, 65536 * 4096);
            Ok(Plan::Verify { backing: DeviceId(0), at, len, piece_bytes })
        };
        assert_eq!(ask(&verify), expected(128 << 10));
        let small = CapsuleInfo { mdts_bytes: 8192, ..RECEIVED };
        assert_eq!(plan_in(&verify, &sample(), Barred(0), small), expected(8192));
    }

    #[test]
    fn all_ranges_are_checked_before_any_is_used() {
        let subsystem = sample();
        let namespace = subsystem.namespace(1).unwrap().extent();
        let mut data = [0; 32];
        data[..16].copy_from_slice(&DsmRange { attributes: 0, blocks: 8, slba: 1 }.emit());
        data[16..].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba: 1 << 20 }.emit());
        assert!(check_ranges(&data, namespace).unwrap_err().is(Status::LBA_OUT_OF_RANGE));
        assert_eq!(check_ranges(&data[..16], namespace), Ok(()));
        assert_eq!(range_at(&data, 0, namespace), Ok((4096, 8 * 4096)));
    }

    #[test]
    fn reservation_types_restrict_commands_as_specified() {
        // Each type where the holder, another registrant, another host may do all, read, nothing.
        const ALL: &str = "RCVWZFDY";
        const READ: &str = "RCV";
        let table = [
            (ReservationType::WRITE_EXCLUSIVE, [ALL, READ, READ]),
            (ReservationType::EXCLUSIVE_ACCESS, [ALL, "", ""]),
            (ReservationType::WRITE_EXCLUSIVE_REGISTRANTS, [ALL, ALL, READ]),
            (ReservationType::EXCLUSIVE_ACCESS_REGISTRANTS, [ALL, ALL, ""]),
            (ReservationType::WRITE_EXCLUSIVE_ALL, [ALL, ALL, READ]),
            (ReservationType::EXCLUSIVE_ACCESS_ALL, [ALL, ALL, ""]),
        ];
        let commands = [
            ('R', Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(4096))),
            ('C', Sqe::io(IoOpcode::COMPARE, 1).with_sgl(keyed(4096))),
            ('W', Sqe::io(IoOpcode::WRITE, 1).with_sgl(keyed(4096))),
            ('Z', Sqe::io(IoOpcode::WRITE_ZEROES, 1)),
            ('F', Sqe::io(IoOpcode::FLUSH, 1)),
            ('D', Sqe::deallocation(1, 0).with_sgl(keyed(16))),
            ('V', Sqe::io(IoOpcode::VERIFY, 1)),
            ('Y', Sqe::io(IoOpcode::COPY, 1).with_sgl(keyed(32))),
        ];
        let reserved = [
            Register(0).emit(1, keyed(16)),
            Acquire(0).emit(1, keyed(16)),
            Release(0).emit(1, keyed(16)),
            Report { numd_z: 15, extended: true }.emit(1, keyed(64)),
        ];
        for (rtype, rights) in table {
            let mut state = State { rtype, ..State::default() };
            state.holder = (!rtype.is_held_by_all()).then_some([1; 16]);
            state.registrants = [([1; 16], 1), ([2; 16], 2)].into();
            for (host, rights) in (1..).zip(rights) {
                let barred = state.barred(&[host; 16]);
                for (name, sqe) in &commands {
                    let allowed = match plan_in(sqe, &sample(), barred, RECEIVED) {
                        Ok(_) => true,
                        Err(status) => {
                            assert!(status.is(Status::RESERVATION_CONFLICT) && status.dnr());
                            false
                        }
                    };
                    assert_eq!(allowed, rights.contains(*name), "{rtype}, host {host}, {name}");
                }
                for sqe in &reserved {
                    assert!(plan_in(sqe, &sample(), barred, RECEIVED).is_ok(), "{rtype}");
                }
            }
        }
    }

    #[test]
    fn an_invalid_namespace_is_reported_before_a_reservation_conflict() {
        let sqe = Sqe::io(IoOpcode::WRITE, 3).with_sgl(keyed(4096));
        let status = plan_in(&sqe, &sample(), Barred::ALL, RECEIVED).unwrap_err();
        assert!(status.is(Status::INVALID_NAMESPACE));
        let sqe = Sqe::io(IoOpcode(0x0F), 1);
        let status = plan_in(&sqe, &sample(), Barred::ALL, RECEIVED).unwrap_err();
        assert!(status.is(Status::INVALID_OPCODE));
    }

    /// Another daemon serves its blocks, and would not be informed of it.
    #[test]
    fn a_shared_namespace_has_no_reservations() {
        let mut subsystem = sample();
        let namespace = &mut subsystem.namespaces[0];
        namespace.reservation = Reservation::none(subsystem.nqn, namespace.nsid);
        assert_eq!((namespace.is_shared(), namespace.reservation.rescap().0), (true, 0));
        let report = Report { numd_z: 1023, extended: true };
        for sqe in [
            Register(0).emit(1, keyed(16)),
            Acquire(0).emit(1, keyed(16)),
            Release(0).emit(1, keyed(8)),
            report.emit(1, keyed(4096)),
        ] {
            let refused = plan_in(&sqe, &subsystem, Barred(0), RECEIVED);
            assert_eq!(refused, Err(Status::INVALID_OPCODE.with_dnr()));
        }
        let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(4096));
        assert!(plan_in(&read, &subsystem, Barred(0), RECEIVED).is_ok());
    }

    #[test]
    fn reservation_commands_require_their_data_length() {
        let subsystem = sample();
        let of = Arc::clone(&subsystem.namespaces[0].reservation);
        let ask = |sqe: &Sqe| plan_in(sqe, &subsystem, Barred(0), RECEIVED);
        let source = |len| Source::Host(Remote { addr: 0x1000, key: 7, len });
        for (sqe, len) in [
            (Register(0).emit(1, keyed(16)), 16),
            (Acquire(0).emit(1, keyed(16)), 16),
            (Release(0).emit(1, keyed(8)), 8),
            (Release(0).emit(1, keyed(16)), 8),
        ] {
            let plan = Plan::Reserve { of: Arc::clone(&of), from: source(len) };
            assert_eq!(ask(&sqe), Ok(plan));
        }
        refused(&Register(0).emit(1, keyed(15)), Status::DATA_SGL_LENGTH_INVALID);
        refused(&Release(0).emit(1, keyed(7)), Status::DATA_SGL_LENGTH_INVALID);
        let report = Report { numd_z: 1023, extended: true };
        let Ok(Plan::Give { page, to }) = ask(&report.emit(1, keyed(4096))) else { panic!() };
        assert_eq!((page.len(), to.len), (64, 4096));
        refused(&report.emit(1, keyed(4095)), Status::DATA_SGL_LENGTH_INVALID);
        let short = Report { extended: false, ..report };
        refused(&short.emit(1, keyed(4096)), Status::HOST_ID_INCONSISTENT);
        let long = Report { numd_z: u32::MAX, ..report };
        refused(&long.emit(1, keyed(4096)), Status::INVALID_FIELD);
        let long = Report { numd_z: 1 << 18, ..report };
        refused(&long.emit(1, keyed((1 << 20) + 4)), Status::INVALID_FIELD);
        subsystem.namespaces[0].health.set_standby(true);
        assert_eq!(ask(&report.emit(1, keyed(4096))), Err(Status::ANA_INACCESSIBLE));
    }

    /// Of the random commands below few are Writes that are barred for one reason alone.
    #[test]
    fn each_single_restriction_prevents_a_direct_write() {
        let may = |change: &dyn Fn(&mut Namespace), barred| {
            let mut subsystem = sample();
            subsystem.namespaces.iter_mut().for_each(change);
            let namespace = subsystem.namespace(1).unwrap();
            let len = 1 << namespace.block_shift;
            let sqe = Sqe::io(IoOpcode::WRITE, 1).with_range(0, 0).with_sgl(keyed(len));
            let begins = plain_write(&sqe, namespace, barred, RECEIVED).is_some();
            let stores = may_store(namespace.backing, (0, len), namespace, barred);
            assert_eq!(begins, stores);
            stores
        };
        let progress = || Some(Arc::new(crate::subsystem::lba_format::Progress::none()));
        assert!(may(&|_| (), Barred(0)));
        assert!(may(&|_| (), Barred::READ));
        assert!(!may(&|_| (), Barred::WRITE));
        assert!(!may(&|namespace| namespace.read_only = true, Barred(0)));
        assert!(!may(&|namespace| namespace.formatting = progress(), Barred(0)));
        let subsystem = sample();
        let namespace = subsystem.namespace(1).unwrap();
        let stores = |backing, at| may_store(backing, (at, 4096), namespace, Barred(0));
        let end = namespace.blocks << namespace.block_shift;
        assert!(stores(namespace.backing, end - 4096));
        assert!(!stores(namespace.backing, end - 4095));
        assert!(!stores(namespace.backing, u64::MAX));
        assert!(!stores(DeviceId(namespace.backing.0 + 1), 0), "it is another one by now");
    }

    proptest! {
        #[test]
        fn fast_path_reads_and_writes_match_the_general_plan(
            opcode in 0u8..4, nsid in 0u32..4, slba in (1u64 << 20) - 4..(1 << 20) + 2,
            blocks_z in 0u16..4, given in 0u32..5, flags in prop_oneof![9 => Just(0x40u8), 1 => any::<u8>()],
            kind in prop_oneof![Just(0x40u8), Just(0x4F), Just(1), any::<u8>()],
            barred in 0u8..4, read_only: bool, marked: bool, fua: bool
        ) {
            let mut subsystem = sample();
            for namespace in &mut subsystem.namespaces {
                namespace.read_only = read_only;
                if marked {
                    let at = ((1 << 20) - 2) << namespace.block_shift;
                    let mark = Change::Mark { at, len: 4096, most_bytes: 4096 };
                    prop_assert_eq!(namespace.marks.change(&mark), Ok(()));
                }
            }
            let shift = subsystem.namespace(nsid).map_or(12, |namespace| namespace.block_shift);
            let sqe = Sqe::io(IoOpcode(opcode), nsid).with_range(slba, blocks_z).with_fua(fua);
            let mut sqe = sqe.with_sgl(keyed(given << shift)).with_flags(Flags(flags));
            sqe.dptr[15] = kind;
            if kind == 1 {
                sqe = sqe.with_sgl(Sgl::in_capsule(0, given << shift));
            }
            let namespace = subsystem.namespace(nsid);
            let (barred, received) = (Barred(barred), RECEIVED);
            let plan = plan_in(&sqe, &subsystem, barred, received);
            let direct = namespace.ok().and_then(|namespace| match sqe.io_opcode() {
                IoOpcode::READ => plain_read(&sqe, namespace, barred, received)
                    .map(|(backing, at, to)| Plan::Load { backing, at, to }),
                IoOpcode::WRITE => plain_write(&sqe, namespace, barred, received)
                    .map(|(backing, at, from)| Plan::Store { backing, at, from, fua }),
                _ => None,
            });
            match direct {
                Some(direct) => prop_assert_eq!(Ok(direct), plan),
                None => {
                    let is_one = match plan {
                        Ok(Plan::Load { .. }) => !fua,
                        Ok(Plan::Store { .. }) => true,
                        _ => false,
                    };
                    prop_assert!(!is_one || marked, "{plan:?} takes the longer way");
                }
            }
        }

        #[test]
        fn the_recheck_of_a_transferred_write_matches_the_general_check(
            nsid in 1u32..3, was_on in 0u32..3, at in prop_oneof![
                ((1u64 << 32) - 8192)..(1 << 32) + 2, any::<u64>()],
            len in 0u32..8194, barred in 0u8..4, read_only: bool, protected: bool, formatted: bool
        ) {
            let mut subsystem = sample();
            let nqn = subsystem.nqn;
            for namespace in &mut subsystem.namespaces {
                namespace.read_only = read_only;
                if protected {
                    let protection = Protection::kept(nqn, namespace.nsid, MemorySections::default());
                    let protection = protection.unwrap();
                    protection.change(WriteProtectState::UNTIL_POWER_CYCLE).unwrap();
                    namespace.protection = protection;
                }
                namespace.formatting =
                    formatted.then(|| Arc::new(crate::subsystem::lba_format::Progress::none()));
            }
            let (namespace, barred) = (subsystem.namespace(nsid), Barred(barred));
            let (backing, from) = (DeviceId(was_on), Source::Capsule { offset: 0, len });
            let plan = Plan::Store { backing, at, from, fua: false };
            let sqe = Sqe::io(IoOpcode::WRITE, nsid);
            let may_begin = may_begin(&sqe, &plan, Some((at, len.into())), namespace, barred);
            let may_store = may_store(backing, (at, len), namespace.unwrap(), barred);
            prop_assert_eq!(may_store, may_begin.is_ok(), "{:?}", may_begin);
        }

        #[test]
        fn any_command_is_answered_within_bounds(
            bytes: [u8; 64], opcode in 0u8..32, nsid in 0u32..9, flags: bool,
            tail_bytes in 0u32..9000, kind in prop_oneof![Just(0x40u8), Just(0x4F), Just(1), any::<u8>()]
        ) {
            let mut bytes = bytes;
            bytes[0] = opcode;
            bytes[39] = kind;
            if flags { bytes[1] = 0x40; }
            let sqe = Sqe { nsid, ..Sqe::parse(&bytes) };
            let subsystem = sample();
            let received = CapsuleInfo { tail_bytes, ..RECEIVED };
            if let Ok(plan) = plan_in(&sqe, &subsystem, Barred(0), received) {
                let namespace = subsystem.namespace(nsid).unwrap();
                let size = namespace.blocks << namespace.block_shift;
                let (at, len, from) = match plan {
                    Plan::Load { at, to, .. } => (at, u64::from(to.len), None),
                    Plan::Store { at, from, .. } | Plan::Compare { at, from, .. } =>
                        (at, u64::from(from.len_bytes()), Some(from)),
                    Plan::Zero { at, len, .. } | Plan::Verify { at, len, .. } => (at, len, None),
                    Plan::Deallocate { from, .. } | Plan::Copy { from, .. } => (0, 0, Some(from)),
                    _ => (0, 0, None),
                };
                prop_assert!(at + len <= size);
                if let Some(Source::Capsule { offset, len }) = from {
                    prop_assert!(offset + len <= tail_bytes.min(4096));
                }
            }
        }
    }
}
