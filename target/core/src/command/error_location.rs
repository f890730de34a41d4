//! Parameter Error Location of a failed command, for the Error Information log.
//!
//! A status names its field in most cases; if it could be one of several, none is reported.

use nvme::{Sqe, Status};

/// No location, or an unknown one.
pub const NOWHERE: u16 = 0xFFFF;

/// Bytes of a submission queue entry.
const OPCODE: u16 = 0;
const FLAGS: u16 = 1;
const NSID: u16 = 4;
const SGL_OFFSET: u16 = 24;
const SGL_LENGTH: u16 = 32;
const SGL_TYPE: u16 = 39;
const CDW10: u16 = 40;
const CDW12: u16 = 48;

/// Returns byte (bits 7:0) and bit (10:8) of the invalid parameter ("Parameter Error Location").
pub fn of(sqe: &Sqe, status: Status) -> u16 {
    if sqe.check_flags().is_err() {
        return FLAGS;
    }
    match Status::from_code(status.code()) {
        Status::INVALID_OPCODE => OPCODE,
        Status::INVALID_NAMESPACE => NSID,
        Status::SGL_TYPE_INVALID => SGL_TYPE,
        Status::DATA_SGL_LENGTH_INVALID => SGL_LENGTH,
        Status::SGL_OFFSET_INVALID => SGL_OFFSET,
        // Log, feature, the first block: all begin with dword 10.
        Status::INVALID_LOG_PAGE
        | Status::FEATURE_NOT_CHANGEABLE
        | Status::FEATURE_NOT_NAMESPACE_SPECIFIC
        | Status::LBA_OUT_OF_RANGE => CDW10,
        // Save, the highest bit of dword 10.
        Status::FEATURE_NOT_SAVEABLE => 7 << 8 | (CDW10 + 3),
        Status::ATOMIC_WRITE_UNIT_EXCEEDED => CDW12,
        _ => NOWHERE,
    }
}

#[cfg(test)]
mod tests {
    use nvme::sqe::Flags;
    use nvme::{IoOpcode, Sgl};

    use crate::command::error_location::*;

    /// Location of the field of a command that a test changes: the first byte that differs.
    fn first_difference(a: &Sqe, b: &Sqe) -> u16 {
        let (a, b) = (a.emit(), b.emit());
        (0..64).find(|&at| a[at] != b[at]).expect("they differ") as u16
    }

    #[test]
    fn error_location_points_to_the_invalid_field() {
        let sgl = |addr, len| Sgl::keyed(addr, len, 7, true).unwrap();
        let good = Sqe::io(IoOpcode::READ, 1).with_range(5, 0).with_sgl(sgl(0, 4096));
        let table = [
            (Sqe { opcode: 0x7F, ..good }, Status::INVALID_OPCODE),
            (good.with_flags(Flags(0)), Status::INVALID_FIELD),
            (good.with_nsid(9), Status::INVALID_NAMESPACE),
            (good.with_range(6, 0), Status::LBA_OUT_OF_RANGE),
            (good.with_sgl(sgl(0, 512)), Status::DATA_SGL_LENGTH_INVALID),
            (good.with_sgl(sgl(8, 4096)), Status::SGL_OFFSET_INVALID),
            (Sqe { cdw12: 5, ..good }, Status::ATOMIC_WRITE_UNIT_EXCEEDED),
        ];
        for (bad, status) in table {
            let expected = match status {
                // The lowest byte of the length is the same in both.
                Status::DATA_SGL_LENGTH_INVALID => first_difference(&good, &bad) - 1,
                _ => first_difference(&good, &bad),
            };
            assert_eq!(of(&bad, status.with_dnr().with_more(true)), expected, "{status}");
        }
        assert_eq!(of(&good, Status::INVALID_FIELD), NOWHERE, "it may be any");
        assert_eq!(of(&good, Status::FEATURE_NOT_SAVEABLE), 0x72B, "bit 31 of dword 10");
        assert_eq!(of(&good, Status::UNRECOVERED_READ_ERROR), NOWHERE);
    }
}
