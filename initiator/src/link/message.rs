//! Messages between the two ends. Integers are little-endian.
//!
//! ```text
//! REQ      "nvmflink" | version u16 | operation u8 | 0 u8 | size u32 | depth u32      private data
//! REJ      "nvmflink" | version u16 | refusal u8                                      private data
//! request  address u64 | key u32 | length u32       or, for `send` and `send-immediate`, `size` bytes
//!                                                  of data
//! answer   sequence number u64 | status u32 | 0 u32
//! ```
//!
//! The data of operation `n` begin with `n` as a `u64`. Immediate data are its low 32 bits: of the
//! requests and answers of `send-immediate`, and of the RDMA Writes of `write-immediate`, which has no
//! other answer. Private data may be followed by zeros.

use rdma::Remote;
use rdma::pool::capacity_for;

/// Version of these messages.
const VERSION: u16 = 1;
/// Identifies a link test, among other uses of private data.
const MAGIC: [u8; 8] = *b"nvmflink";

/// Length of a request that names memory, and of each answer, in bytes.
pub(super) const MESSAGE_BYTES: u32 = 16;
/// Minimum of data in bytes: the sequence number.
pub(super) const MIN_BYTES: u32 = 8;
/// Maximum of data in bytes.
pub(super) const MAX_BYTES: u32 = 1 << 20;
/// Maximum of outstanding operations.
pub(super) const MAX_DEPTH: u32 = 256;
/// Maximum of memory for the data of all outstanding operations, in bytes.
pub(super) const MAX_OUTSTANDING_BYTES: u32 = 16 << 20;

rdma::named_enum! {
    /// How data move. As in NVMe over RDMA, the listening end is the one that reads and writes the
    /// memory of the other.
    #[derive(clap::ValueEnum, Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Operation {
        /// A Send with the data, answered: the transfer of an NVMe Write with in-capsule data
        Send = "send",
        /// A request, RDMA Read by the listening end, answer: the transfer of an NVMe Write
        Read = "read",
        /// A request, RDMA Write by the listening end, answer: the transfer of an NVMe Read
        Write = "write",
        /// As send, by Send with Immediate both ways; NVMe does not use this
        SendImmediate = "send-immediate",
        /// A request, RDMA Write with Immediate by the listening end, which is the answer; NVMe
        /// does not use this
        WriteImmediate = "write-immediate",
    }
}

impl Operation {
    /// Those of NVMe over RDMA.
    pub(super) const OF_NVME: [Operation; 3] = [Operation::Send, Operation::Read, Operation::Write];

    /// Its number on the wire.
    fn code(self) -> u8 {
        self as u8 + 1
    }

    /// Whether the data are in the messages of the connecting end; else in its memory.
    pub(super) fn is_send(self) -> bool {
        matches!(self, Operation::Send | Operation::SendImmediate)
    }

    /// Whether the listening end writes the memory of the other.
    pub(super) fn is_write(self) -> bool {
        matches!(self, Operation::Write | Operation::WriteImmediate)
    }
}

/// One measurement, as the connecting end asks for it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Test {
    pub(super) operation: Operation,
    /// Data of one operation, in bytes.
    pub(super) size_bytes: u32,
    /// Maximum of outstanding operations.
    pub(super) depth: u32,
}

impl Test {
    /// Whether size, depth and the memory for both are within the limits.
    pub(super) fn is_within_limits(&self) -> bool {
        (MIN_BYTES..=MAX_BYTES).contains(&self.size_bytes)
            && (1..=MAX_DEPTH).contains(&self.depth)
            && u64::from(capacity_for(self.size_bytes)) * u64::from(self.depth)
                <= u64::from(MAX_OUTSTANDING_BYTES)
    }

    /// Private data of the connection request.
    pub(super) fn emit(&self) -> [u8; 20] {
        let mut bytes = [0; 20];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.operation.code();
        bytes[12..16].copy_from_slice(&self.size_bytes.to_le_bytes());
        bytes[16..].copy_from_slice(&self.depth.to_le_bytes());
        bytes
    }

    /// Parses the private data of a connection request.
    ///
    /// # Errors
    /// The reason to reject it with: not a link test of this version, or outside of the limits.
    pub(super) fn parse(private_data: &[u8]) -> Result<Test, LinkReject> {
        if versioned(private_data) != Some(VERSION) {
            return Err(LinkReject::Version);
        }
        let word = |at| field(private_data, at).map(u32::from_le_bytes);
        let (Some(size_bytes), Some(depth)) = (word(12), word(16)) else {
            return Err(LinkReject::Parameters);
        };
        let operation = Operation::ALL.into_iter().find(|each| each.code() == private_data[10]);
        let test = operation.map(|operation| Test { operation, size_bytes, depth });
        test.filter(Test::is_within_limits).ok_or(LinkReject::Parameters)
    }
}

/// Why the listening end rejects a connection request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum LinkReject {
    /// It is no link test, or one of another version.
    Version,
    /// An unknown operation, or a size or depth outside of the limits.
    Parameters,
    /// As many tests run as there may be at once.
    Busy,
}

impl LinkReject {
    const ALL: [LinkReject; 3] = [LinkReject::Version, LinkReject::Parameters, LinkReject::Busy];

    fn code(self) -> u8 {
        match self {
            LinkReject::Version => 1,
            LinkReject::Parameters => 2,
            LinkReject::Busy => 3,
        }
    }

    /// Private data of the reject.
    pub(super) fn emit(self) -> [u8; 11] {
        let mut bytes = [0; 11];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10] = self.code();
        bytes
    }

    /// Parses the private data of a reject; none if another program has sent it.
    pub(super) fn parse(private_data: &[u8]) -> Option<LinkReject> {
        let version = versioned(private_data)?;
        let code = *private_data.get(10)?;
        match version {
            VERSION => LinkReject::ALL.into_iter().find(|each| each.code() == code),
            _ => Some(LinkReject::Version),
        }
    }

    /// For the user of the connecting end, after "the listening end refused the test: ".
    pub(super) fn sentence(self) -> &'static str {
        match self {
            LinkReject::Version => "it is of another version of nvmf",
            LinkReject::Parameters => "it does not support this operation, --bs or --iodepth",
            LinkReject::Busy => "it serves as many tests as it can at once; repeat this later",
        }
    }
}

/// A request that names memory of the connecting end.
pub(super) fn emit_request(remote: Remote) -> [u8; MESSAGE_BYTES as usize] {
    let mut bytes = [0; MESSAGE_BYTES as usize];
    bytes[..8].copy_from_slice(&remote.addr.to_le_bytes());
    bytes[8..12].copy_from_slice(&remote.key.to_le_bytes());
    bytes[12..].copy_from_slice(&remote.len.to_le_bytes());
    bytes
}

/// Parses a request; none if its length is wrong.
pub(super) fn parse_request(bytes: &[u8]) -> Option<Remote> {
    let bytes: &[u8; MESSAGE_BYTES as usize] = bytes.try_into().ok()?;
    let remote = Remote {
        addr: field(bytes, 0).map(u64::from_le_bytes)?,
        key: field(bytes, 8).map(u32::from_le_bytes)?,
        len: field(bytes, 12).map(u32::from_le_bytes)?,
    };
    Some(remote)
}

/// The immediate data of operation `sequence`.
pub(super) fn immediate_of(sequence: u64) -> u32 {
    sequence as u32
}

/// The answer to operation `sequence`; `is_intact`: its data began with that number.
pub(super) fn emit_answer(sequence: u64, is_intact: bool) -> [u8; MESSAGE_BYTES as usize] {
    let mut bytes = [0; MESSAGE_BYTES as usize];
    bytes[..8].copy_from_slice(&sequence.to_le_bytes());
    bytes[8..12].copy_from_slice(&u32::from(!is_intact).to_le_bytes());
    bytes
}

/// Parses an answer: its sequence number, and whether the data were intact. None if its length is
/// wrong.
pub(super) fn parse_answer(bytes: &[u8]) -> Option<(u64, bool)> {
    let bytes: &[u8; MESSAGE_BYTES as usize] = bytes.try_into().ok()?;
    let status = field(bytes, 8).map(u32::from_le_bytes)?;
    Some((sequence(bytes)?, status == 0))
}

/// The sequence number at the beginning of data.
pub(super) fn sequence(data: &[u8]) -> Option<u64> {
    field(data, 0).map(u64::from_le_bytes)
}

/// The version of private data of a link test.
fn versioned(private_data: &[u8]) -> Option<u16> {
    private_data.strip_prefix(&MAGIC)?;
    field(private_data, 8).map(u16::from_le_bytes)
}

fn field<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEST: Test = Test { operation: Operation::Read, size_bytes: 4096, depth: 32 };

    #[test]
    fn test_requests_round_trip_despite_trailing_zeros() {
        for operation in Operation::ALL {
            let test = Test { operation, ..TEST };
            let mut bytes = test.emit().to_vec();
            assert_eq!(Test::parse(&bytes), Ok(test));
            bytes.resize(56, 0);
            assert_eq!(Test::parse(&bytes), Ok(test));
        }
    }

    #[test]
    fn other_private_data_and_other_versions_are_refused_as_such() {
        let bytes = TEST.emit();
        // The private data of an NVMe host are 32 bytes with a record format of 0.
        for other in [&[][..], &[0; 32], &bytes[..9], b"nvmflinx\x01\0"] {
            assert_eq!(Test::parse(other), Err(LinkReject::Version), "{other:?}");
        }
        let mut later = bytes;
        later[8] = 2;
        assert_eq!(Test::parse(&later), Err(LinkReject::Version));
        for short in 10..bytes.len() {
            assert_eq!(Test::parse(&bytes[..short]), Err(LinkReject::Parameters), "{short}");
        }
    }

    #[test]
    fn tests_beyond_the_limits_are_rejected() {
        let with = |size_bytes, depth| Test { size_bytes, depth, ..TEST };
        for good in [with(8, 1), with(1 << 20, 16), with(64 << 10, 256), with(1 << 17, 128)] {
            assert_eq!(Test::parse(&good.emit()), Ok(good));
        }
        for bad in [
            with(7, 1),
            with((1 << 20) + 1, 1),
            with(1 << 20, 17),
            with(8, 257),
            with(8, 0),
            with(u32::MAX, u32::MAX),
        ] {
            assert_eq!(Test::parse(&bad.emit()), Err(LinkReject::Parameters), "{bad:?}");
        }
        let mut unknown = TEST.emit();
        for code in [0, 6, 255] {
            unknown[10] = code;
            assert_eq!(Test::parse(&unknown), Err(LinkReject::Parameters));
        }
    }

    #[test]
    fn link_rejects_round_trip_and_foreign_rejects_are_ignored() {
        for refusal in LinkReject::ALL {
            assert_eq!(LinkReject::parse(&refusal.emit()), Some(refusal));
        }
        // What an NVMe target rejects with: record format 0, status 1.
        for other in [&[][..], &[0, 0, 1, 0], b"nvmflink\x01\0", b"nvmflink\x01\0\x09"] {
            assert_eq!(LinkReject::parse(other), None, "{other:?}");
        }
        assert_eq!(LinkReject::parse(b"nvmflink\x02\0\x09"), Some(LinkReject::Version));
    }

    #[test]
    fn requests_and_answers_have_sixteen_bytes() {
        let remote = Remote { addr: 0x0123_4567_89ab_cdef, key: 0x1020_3040, len: 4096 };
        assert_eq!(parse_request(&emit_request(remote)), Some(remote));
        for good in [true, false] {
            assert_eq!(parse_answer(&emit_answer(77, good)), Some((77, good)));
        }
        for wrong in [0, 15, 17] {
            assert_eq!(parse_request(&vec![0; wrong]), None);
            assert_eq!(parse_answer(&vec![0; wrong]), None);
        }
    }

    proptest::proptest! {
        #[test]
        fn arbitrary_bytes_neither_panic_nor_exceed_the_limits(
            mut bytes in proptest::collection::vec(0u8.., 0..80),
            is_marked: bool,
        ) {
            if is_marked && bytes.len() >= 10 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
            }
            let test = Test::parse(&bytes);
            proptest::prop_assert!(test.is_err() || test.is_ok_and(|test| test.is_within_limits()));
            let _ = (LinkReject::parse(&bytes), parse_request(&bytes), parse_answer(&bytes));
        }
    }
}
