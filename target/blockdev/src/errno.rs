//! The table from errno to [`Status`].

use nix::errno::Errno;
use nvme::status::Status;

use super::health::Health;

rdma::named_enum! {
    /// Operation that failed: one errno means different things for different operations.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum OpKind {
        /// Reading data.
        Read = "read",
        /// Writing data, durably or not.
        Write = "write",
        /// fsync.
        Flush = "flush",
        /// Deallocating.
        Discard = "discard",
        /// Zeroing a range.
        Zero = "write of zeros",
    }
}

/// The status for an errno (positive, as in `<errno.h>`).
///
/// Do Not Retry is set where the same command would fail again. A media error has none, as for the
/// media errors of the specification; a temporary shortage of resources is Command Interrupted,
/// which asks for a retry. A removed store may return: Namespace Not Ready, with the first retry
/// delay.
pub(crate) fn status_of(doing: OpKind, errno: i32) -> Status {
    match Errno::from_raw(errno) {
        Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Status::CAPACITY_EXCEEDED.with_dnr(),
        // The block layer returns ENODATA for a medium error and EILSEQ for a failed integrity
        // check.
        Errno::EIO | Errno::ENODATA | Errno::EILSEQ => match doing {
            OpKind::Read => Status::UNRECOVERED_READ_ERROR,
            OpKind::Write | OpKind::Flush | OpKind::Discard | OpKind::Zero => Status::WRITE_FAULT,
        },
        Errno::EROFS => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        // A block device that became read-only after it was opened returns EPERM for writes.
        Errno::EPERM if doing != OpKind::Read => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        Errno::EOPNOTSUPP => Status::INVALID_OPCODE.with_dnr(),
        // The block layer returns EBADE for a reservation conflict with another initiator.
        Errno::EBADE => Status::RESERVATION_CONFLICT.with_dnr(),
        Errno::EAGAIN | Errno::EINTR | Errno::ENOMEM => Status::COMMAND_INTERRUPTED,
        // Device removed; stale file of a server; the errnos of the block layer for a command that
        // timed out and for a failed path.
        Errno::ENODEV
        | Errno::ENXIO
        | Errno::ENOMEDIUM
        | Errno::ESTALE
        | Errno::ESHUTDOWN
        | Errno::ETIMEDOUT
        | Errno::ENOLINK => Health::NOT_READY,
        _ => Status::INTERNAL_ERROR.with_dnr(),
    }
}

#[cfg(test)]
mod tests {
    use crate::errno::*;

    const ALL: [OpKind; 5] =
        [OpKind::Read, OpKind::Write, OpKind::Flush, OpKind::Discard, OpKind::Zero];

    #[test]
    fn each_errno_maps_to_its_nvme_status() {
        let internal = Status::INTERNAL_ERROR.with_dnr();
        let full = Status::CAPACITY_EXCEEDED.with_dnr();
        let protected = Status::NAMESPACE_WRITE_PROTECTED.with_dnr();
        let again = Status::COMMAND_INTERRUPTED;
        let gone = Status::NAMESPACE_NOT_READY.with_crd(1);
        let unread = Status::UNRECOVERED_READ_ERROR;
        let fault = Status::WRITE_FAULT;
        // errno, status for a read, status for other operations
        let table = [
            (libc::ENOSPC, full, full),
            (libc::EDQUOT, full, full),
            (libc::EFBIG, full, full),
            (libc::EIO, unread, fault),
            (libc::ENODATA, unread, fault),
            (libc::EILSEQ, unread, fault),
            (libc::EROFS, protected, protected),
            (libc::EPERM, internal, protected),
            (
                libc::EOPNOTSUPP,
                Status::INVALID_OPCODE.with_dnr(),
                Status::INVALID_OPCODE.with_dnr(),
            ),
            (
                libc::EBADE,
                Status::RESERVATION_CONFLICT.with_dnr(),
                Status::RESERVATION_CONFLICT.with_dnr(),
            ),
            (libc::EAGAIN, again, again),
            (libc::EINTR, again, again),
            (libc::ENOMEM, again, again),
            (libc::EINVAL, internal, internal),
            (libc::EBADF, internal, internal),
            (libc::EFAULT, internal, internal),
            (libc::ENXIO, gone, gone),
            (libc::ENODEV, gone, gone),
            (libc::ENOMEDIUM, gone, gone),
            (libc::ESTALE, gone, gone),
            (libc::ESHUTDOWN, gone, gone),
            (libc::ETIMEDOUT, gone, gone),
            (libc::ENOLINK, gone, gone),
            (libc::ECANCELED, internal, internal),
        ];
        for (errno, reader, others) in table {
            assert_eq!(status_of(OpKind::Read, errno), reader, "errno {errno}");
            for doing in &ALL[1..] {
                assert_eq!(status_of(*doing, errno), others, "errno {errno} {doing:?}");
            }
        }
    }

    #[test]
    fn no_errno_is_a_success() {
        for doing in ALL {
            for errno in -1..=4096 {
                assert!(!status_of(doing, errno).is_success(), "errno {errno}");
            }
            assert!(!status_of(doing, i32::MIN).is_success());
        }
    }
}
