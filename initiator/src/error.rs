//! Errors of the host, each displayed as a sentence for the user.

use std::fmt;

use nvme::Status;

use crate::session::EndReason;

/// An error of a call, displayed as a sentence for the user.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Error {
    /// The association has ended.
    #[error("{0}")]
    Ended(EndReason),
    /// The controller rejected the command.
    #[error("{what}: {status}{}", Advice(*status))]
    Status {
        /// The operation.
        what: &'static str,
        /// The status.
        status: Status,
    },
    /// An error of this host.
    #[error("{0}")]
    Local(String),
    /// Invalid arguments of the command line or of a call.
    #[error("{0}")]
    Usage(String),
}

/// Displays a remedy for a status.
struct Advice(Status);

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let status = self.0.without_dnr().with_more(false).with_crd(0);
        let advice = match status {
            Status::COMPARE_FAILURE => "the data on the namespace are others",
            Status::LBA_OUT_OF_RANGE => "the namespace ends before; `nvmf id-ns` shows its size",
            Status::INVALID_NAMESPACE => {
                "there is no such namespace; `nvmf list-ns` lists those that exist"
            }
            Status::NAMESPACE_WRITE_PROTECTED => "the namespace is read only",
            Status::CAPACITY_EXCEEDED => "the store behind the namespace is full",
            Status::INVALID_OPCODE => "the controller does not know this command",
            Status::INVALID_LOG_PAGE => "the controller does not have this log page",
            _ => return Ok(()),
        };
        write!(f, ": {advice}")
    }
}
