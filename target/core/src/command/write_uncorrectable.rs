//! Write Uncorrectable, and its effect on other commands: a read of such blocks fails, a write
//! makes them readable again.
//!
//! Source: NVM Command Set Specification 1.0, "Write Uncorrectable command".

use std::sync::Arc;

use nvme::{Sqe, Status};

use super::io::writable;
use super::{Plan, no_data};
use crate::subsystem::Namespace;
use crate::subsystem::bad_blocks::{Change, MOST_MARKED_BLOCKS};

/// Status of a read of such a block.
pub(crate) const UNREADABLE: Status = Status::UNRECOVERED_READ_ERROR.with_dnr();

/// Decides on a Write Uncorrectable command.
///
/// # Errors
/// Invalid Command Opcode if the namespace does not allow it; otherwise the error of the command.
pub(super) fn plan(sqe: &Sqe, namespace: &Namespace) -> Result<Plan, Status> {
    if !namespace.write_uncorrectable {
        return Err(Status::INVALID_OPCODE.with_dnr());
    }
    writable(namespace)?;
    let (at, len) = namespace.range(sqe.slba(), sqe.blocks().into())?;
    no_data(sqe)?;
    let most_bytes = MOST_MARKED_BLOCKS << namespace.block_shift;
    let change = Change::Mark { at, len, most_bytes };
    Ok(Plan::Mark { of: Arc::clone(&namespace.marks), change })
}

/// Adapts a plan for a namespace that has unreadable blocks. A change of blocks that are or may be
/// among them becomes durable before they can be read again: otherwise a power loss would restore
/// the data from before they were marked.
///
/// # Errors
/// Unrecovered Read Error for a plan that reads one.
pub(super) fn judge(mut plan: Plan, namespace: &Namespace) -> Result<Plan, Status> {
    let marks = &namespace.marks;
    let (read, changed) = match &mut plan {
        Plan::Load { at, to, .. } => (Some((*at, to.len.into())), false),
        Plan::Compare { at, from, .. } => (Some((*at, from.len_bytes().into())), false),
        Plan::Verify { at, len, .. } => (Some((*at, *len)), false),
        Plan::Store { at, from, fua, .. } => {
            let changed = marks.first(*at, from.len_bytes().into()).is_some();
            *fua |= changed;
            (None, changed)
        }
        Plan::Zero { at, len, fua, .. } => {
            let changed = marks.first(*at, *len).is_some();
            *fua |= changed;
            (None, changed)
        }
        // The blocks are given by data that have not arrived yet.
        Plan::Copy { job, .. } => {
            job.fua = true;
            (None, true)
        }
        Plan::Deallocate { .. } => (None, true),
        _ => (None, false),
    };
    if read.is_some_and(|(at, len)| marks.first(at, len).is_some()) {
        return Err(UNREADABLE);
    }
    match changed {
        true => Ok(Plan::Mend { plan: Box::new(plan), of: Arc::clone(marks) }),
        false => Ok(plan),
    }
}

#[cfg(test)]
mod tests {
    use nvme::{IoOpcode, Sgl};

    use crate::command::CapsuleInfo;
    use crate::command::io;
    use crate::command::write_uncorrectable::*;
    use crate::subsystem::Subsystem;
    use crate::subsystem::reservation::Barred;
    use crate::subsystem::testing::sample;

    const RECEIVED: CapsuleInfo =
        CapsuleInfo { tail_bytes: 4096, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };

    /// Blocks 8 to 11 of namespace 1 cannot be read; of 7, any may be marked.
    fn marked() -> Subsystem {
        let mut subsystem = sample();
        subsystem.namespaces[2].write_uncorrectable = true;
        let change = Change::Mark { at: 8 << 12, len: 4 << 12, most_bytes: 1 << 20 };
        subsystem.namespaces[0].marks.change(&change).unwrap();
        subsystem
    }

    fn ask(sqe: &Sqe) -> Result<Plan, Status> {
        io::plan_in(sqe, &marked(), Barred(0), RECEIVED)
    }

    fn with_data(opcode: IoOpcode, slba: u64, nlb_z: u16) -> Sqe {
        let sgl = Sgl::keyed(0x1000, (u32::from(nlb_z) + 1) << 12, 7, true).unwrap();
        Sqe::io(opcode, 1).with_range(slba, nlb_z).with_sgl(sgl)
    }

    #[test]
    fn reads_of_blocks_marked_uncorrectable_fail() {
        for opcode in [IoOpcode::READ, IoOpcode::COMPARE] {
            for (slba, nlb_z, bad) in [(7, 0, false), (7, 1, true), (11, 0, true), (12, 9, false)] {
                let got = ask(&with_data(opcode, slba, nlb_z));
                assert_eq!(got == Err(UNREADABLE), bad, "{opcode} {slba} {nlb_z}");
            }
        }
        let verify = Sqe::io(IoOpcode::VERIFY, 1);
        assert_eq!(ask(&verify.with_range(0, 8)), Err(UNREADABLE));
        assert!(ask(&verify.with_range(0, 7)).is_ok());
        assert!(ask(&with_data(IoOpcode::READ, 8, 0).with_nsid(7)).is_ok(), "another namespace");
    }

    #[test]
    fn writes_to_marked_blocks_are_durable_and_clear_the_mark() {
        let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1);
        for (sqe, mends) in [
            (with_data(IoOpcode::WRITE, 10, 3), true),
            (with_data(IoOpcode::WRITE, 12, 3), false),
            (zeroes.with_range(0, 20), true),
            (zeroes.with_range(0, 7), false),
            (
                Sqe::deallocation(1, 0).with_sgl(with_data(IoOpcode::WRITE, 0, 0).sgl().unwrap()),
                true,
            ),
        ] {
            match ask(&sqe) {
                Ok(Plan::Mend { plan, .. }) => {
                    let durable = match *plan {
                        Plan::Store { fua, .. } | Plan::Zero { fua, .. } => fua,
                        // Flushed at its end.
                        Plan::Deallocate { .. } => true,
                        plan => panic!("{plan:?}"),
                    };
                    assert!(mends && durable, "{sqe:?}");
                }
                Ok(Plan::Store { fua, .. } | Plan::Zero { fua, .. }) => assert!(!mends && !fua),
                got => panic!("{got:?}"),
            }
        }
    }

    #[test]
    fn write_uncorrectable_is_refused_if_disallowed_or_out_of_range() {
        let sqe = Sqe::io(IoOpcode::WRITE_UNCORRECTABLE, 7).with_range(3, 1);
        let Ok(Plan::Mark { change, .. }) = ask(&sqe) else { panic!() };
        let most_bytes = MOST_MARKED_BLOCKS << 12;
        assert_eq!(change, Change::Mark { at: 3 << 12, len: 2 << 12, most_bytes });
        let sgl = Sgl::keyed(0, 4096, 7, true).unwrap();
        for (sqe, status) in [
            (sqe.with_nsid(1), Status::INVALID_OPCODE),
            (sqe.with_nsid(3), Status::INVALID_NAMESPACE),
            (sqe.with_range((1 << 20) - 1, 1), Status::LBA_OUT_OF_RANGE),
            (sqe.with_sgl(sgl), Status::DATA_SGL_LENGTH_INVALID),
        ] {
            assert_eq!(ask(&sqe), Err(status.with_dnr()), "{status}");
        }
        let mut subsystem = marked();
        subsystem.namespaces[2].read_only = true;
        let got = io::plan_in(&sqe, &subsystem, Barred(0), RECEIVED);
        assert_eq!(got, Err(Status::NAMESPACE_WRITE_PROTECTED.with_dnr()));
        let got = io::plan_in(&sqe, &marked(), Barred::WRITE, RECEIVED);
        assert_eq!(got, Err(Status::RESERVATION_CONFLICT.with_dnr()));
    }
}
