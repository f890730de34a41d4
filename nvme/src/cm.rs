//! Private data of the RDMA connection manager.
//!
//! Source: NVMe RDMA Transport Specification, "Fabric Dependent Settings" and the RDMA_CM_REQUEST,
//! RDMA_CM_ACCEPT and RDMA_CM_REJECT private data formats. In a request the data follows the 36
//! bytes of the RDMA IP CM header; in a reply or reject it starts at byte 0. The CM pads the data
//! to its own length, so only the first bytes are significant.

wire! {
    /// Private data of a connection request: the NVMe queue and its depth. 32 bytes.
    pub struct Request[32] {
        /// Record format, 0.
        recfmt: u16 = 0,
        /// Queue id: 0 admin, from 1 I/O.
        qid: u16 = 2,
        /// Host receive queue size in entries; **not** zero-based.
        hrqsize: u16 = 4,
        /// Host send queue size in entries, minus one.
        hsqsize_z: u16 = 6,
        /// Controller id of an I/O queue. Linux before 6.12 sends 0, so it must not be relied on.
        cntlid: u16 = 8,
    }
}

wire! {
    /// Private data of an accepted connection, 32 bytes.
    pub struct Accept[32] {
        /// Record format, 0.
        recfmt: u16 = 0,
        /// Controller receive queue size in entries.
        crqsize: u16 = 2,
    }
}

wire! {
    /// Private data of a rejected connection, 4 bytes; the reject reason is 28, consumer defined.
    pub struct Reject[4] {
        /// Record format, 0.
        recfmt: u16 = 0,
        /// Reject status.
        status: RejectStatus = 2,
    }
}

/// Reject reason of the InfiniBand CM under which NVMe targets reject: 28, "Consumer Reject".
pub const CONSUMER_REJECT: u16 = 28;

open_enum! {
    /// Status with which an NVMe target rejects a connection.
    pub struct RejectStatus(u16) {
        INVALID_LENGTH = 1, "Invalid Private Data Length";
        INVALID_RECFMT = 2, "Invalid RECFMT";
        INVALID_QID = 3, "Invalid QID";
        INVALID_HSQSIZE = 4, "Invalid HSQSIZE";
        INVALID_HRQSIZE = 5, "Invalid HRQSIZE";
        NO_RESOURCES = 6, "No Resources";
        INVALID_IRD = 7, "Invalid IRD";
        INVALID_ORD = 8, "Invalid ORD";
        INVALID_CNTLID = 9, "Invalid Controller ID";
    }
}

impl Request {
    /// Parses the request in private data as received, padded to any length. Data that are too
    /// short return the reject status for it; the record format is not checked.
    pub fn from_private_data(data: &[u8]) -> Result<Self, RejectStatus> {
        data.first_chunk().map(Self::parse).ok_or(RejectStatus::INVALID_LENGTH)
    }
}

impl Reject {
    /// Returns private data that reject with `status`.
    pub fn new(status: RejectStatus) -> Self {
        Self { recfmt: 0, status }
    }

    /// Returns the status in private data as received, if they are long enough and of the record
    /// format 0; other programs reject with private data of their own.
    pub fn from_private_data(data: &[u8]) -> Option<Self> {
        data.first_chunk().map(Self::parse).filter(|reject| reject.recfmt == 0)
    }
}

impl core::error::Error for RejectStatus {}

#[cfg(test)]
mod tests {
    use crate::cm::*;
    use proptest::prelude::*;

    #[test]
    fn reject_is_four_bytes_of_format_and_reason() {
        assert_eq!(Reject::new(RejectStatus::INVALID_IRD).emit(), [0, 0, 7, 0]);
        assert_eq!(RejectStatus::NO_RESOURCES.to_string(), "No Resources");
        assert_eq!(RejectStatus(0x123).to_string(), "0x123");
        assert_eq!(format!("{:?}", RejectStatus(3)), "RejectStatus(0x03 Invalid QID)");
    }

    #[test]
    fn short_private_data_is_rejected_as_invalid_length() {
        assert_eq!(Request::from_private_data(&[0; 31]), Err(RejectStatus::INVALID_LENGTH));
        assert!(Request::from_private_data(&[0; 56]).is_ok());
        assert_eq!(Reject::from_private_data(&[0; 3]), None);
        assert_eq!(Reject::from_private_data(b"nvmflink\x01\0\x01"), None, "another protocol");
    }

    proptest! {
        #[test]
        fn connection_messages_round_trip(recfmt: u16, a: u16, b: u16, c: u16, cntlid: u16) {
            let request = Request { recfmt, qid: a, hrqsize: b, hsqsize_z: c, cntlid };
            prop_assert_eq!(Request::parse(&request.emit()), request);
            let accept = Accept { recfmt, crqsize: a };
            prop_assert_eq!(Accept::parse(&accept.emit()), accept);
            let reject = Reject { recfmt, status: RejectStatus(b) };
            prop_assert_eq!(Reject::parse(&reject.emit()), reject);
        }

        #[test]
        fn arbitrary_private_data_is_accepted_by_length_and_format(data: Vec<u8>) {
            prop_assert_eq!(Request::from_private_data(&data).is_ok(), data.len() >= 32);
            let is_reject = data.len() >= 4 && data.starts_with(&[0, 0]);
            prop_assert_eq!(Reject::from_private_data(&data).is_some(), is_reject);
        }
    }
}
