//! The 16-byte completion queue entry.

use crate::Status;

wire! {
    /// Completion queue entry, 16 bytes.
    ///
    /// On a fabric the phase tag is always 0 and the completion is one Send of exactly these bytes.
    /// Source: NVMe Base Specification 2.0, "Common Completion Queue Entry" and "Fabrics
    /// Responses".
    pub struct Cqe[16] {
        /// Command specific result: dword 0 is the lower half. Property Get uses all 64 bits.
        result: u64 = 0,
        /// Submission queue head pointer, 0 to queue size - 1; FFFFh where the host disabled flow
        /// control.
        sqhd: u16 = 8,
        /// Submission queue id. Reserved on a fabric, where the connection implies it.
        sqid: u16 = 10,
        /// Command id of the command that this completes, all 16 bits.
        cid: u16 = 12,
        /// Outcome.
        status: Status = 14,
    }
}

impl Cqe {
    /// Completion of command `cid` with `status`; the other fields are zero.
    #[inline]
    pub fn new(cid: u16, status: Status) -> Self {
        Self { result: 0, sqhd: 0, sqid: 0, cid, status }
    }

    /// Dword 0 of the result.
    pub const fn dw0(&self) -> u32 {
        self.result as u32
    }
}

#[cfg(test)]
mod tests {
    use crate::cqe::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_completion_round_trips(bytes: [u8; 16]) {
            let mut expected = bytes;
            expected[14] &= 0xFE; // The phase tag is reserved on a fabric.
            prop_assert_eq!(Cqe::parse(&bytes).emit(), expected);
        }
    }
}
