//! The table from errno to [`Status`].

use nix::errno::Errno;
use nvme::status::Status;

use super::health::Health;

/// What was being done when the system failed: the same errno means different things to a
/// reader and to a writer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum OpKind {
    /// Reading data.
    Read,
    /// Writing data, durably or not.
    Write,
    /// Making data durable.
    Flush,
    /// Giving space up.
    Discard,
    /// Making a range read as zeros.
    Zero,
}

impl OpKind {
    /// The word for a log line.
    #[must_use]
    pub fn word(self) -> &'static str {
        match self {
            OpKind::Read => "read",
            OpKind::Write => "write",
            OpKind::Flush => "flush",
            OpKind::Discard => "discard",
            OpKind::Zero => "write of zeros",
        }
    }
}

/// The status for an errno (positive, as `<errno.h>` has it).
///
/// Do Not Retry is set where the very same command would fail again. A media error goes without
/// it, as the specification's media codes do; a passing shortage of the machine is Command
/// Interrupted, whose meaning is "try that again". A store that is gone may come back: Namespace
/// Not Ready, with the first retry delay.
#[must_use]
pub fn status_of(doing: OpKind, errno: i32) -> Status {
    match Errno::from_raw(errno) {
        Errno::ENOSPC | Errno::EDQUOT | Errno::EFBIG => Status::CAPACITY_EXCEEDED.with_dnr(),
        // The block layer says ENODATA for a medium error and EILSEQ for a failed integrity check.
        Errno::EIO | Errno::ENODATA | Errno::EILSEQ => match doing {
            OpKind::Read => Status::UNRECOVERED_READ_ERROR,
            OpKind::Write | OpKind::Flush | OpKind::Discard | OpKind::Zero => Status::WRITE_FAULT,
        },
        Errno::EROFS => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        // A block device that was made read-only after it was opened refuses writers with EPERM.
        Errno::EPERM if doing != OpKind::Read => Status::NAMESPACE_WRITE_PROTECTED.with_dnr(),
        Errno::EOPNOTSUPP => Status::INVALID_OPCODE.with_dnr(),
        // The block layer's word for a reservation that another initiator holds.
        Errno::EBADE => Status::RESERVATION_CONFLICT.with_dnr(),
        Errno::EAGAIN | Errno::EINTR | Errno::ENOMEM => Status::COMMAND_INTERRUPTED,
        // No device, a file of a server that is gone; the block layer's words for a command that
        // timed out and for a path that failed.
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
    fn the_table() {
        let internal = Status::INTERNAL_ERROR.with_dnr();
        let full = Status::CAPACITY_EXCEEDED.with_dnr();
        let protected = Status::NAMESPACE_WRITE_PROTECTED.with_dnr();
        let again = Status::COMMAND_INTERRUPTED;
        let gone = Status::NAMESPACE_NOT_READY.with_crd(1);
        let unread = Status::UNRECOVERED_READ_ERROR;
        let fault = Status::WRITE_FAULT;
        // errno, to a reader, to everyone else
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
