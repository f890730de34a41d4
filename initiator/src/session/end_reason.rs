//! The reason why an association ended, as a sentence for the user.

use std::fmt;
use std::net::SocketAddr;
use std::time::Duration;

use nvme::auth::Failure;
use nvme::cm::{self, RejectStatus};
use nvme::fabrics::InvalidParameter;
use nvme::{Nqn, Status};
use rdma::{FabricError, Fault, Reason};

/// Reason for the end of an association.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EndReason {
    /// `Session::close` or `Session::abort` was called.
    #[error("the association was closed")]
    Closed,
    /// No connection, and no reject either.
    #[error(
        "no connection to {to}: no response to RDMA connection requests; check the \
         address, the route, and that no firewall drops UDP port 4791"
    )]
    Unreachable {
        /// The address of the target.
        to: SocketAddr,
    },
    /// The machine answers, but no service listens at the port.
    #[error("{} refused the connection: nothing listens on port {} there", to.ip(), to.port())]
    NobodyListens {
        /// The address of the target.
        to: SocketAddr,
    },
    /// The target rejected the connection of a queue.
    #[error(fmt = rejected)]
    Rejected {
        /// The queue.
        queue: u16,
        /// Its reason.
        status: RejectStatus,
    },
    /// The connection was rejected without the private data of an NVMe target.
    #[error(
        "the connection of {} was refused with code {code}: what listens there may be no NVMe \
         target",
        Name(*queue)
    )]
    RejectedOtherwise {
        /// The queue.
        queue: u16,
        /// The connection manager's code.
        code: i32,
    },
    /// The target rejected the Connect command of a queue.
    #[error(fmt = refused)]
    ConnectRefused {
        /// The queue.
        queue: u16,
        /// Its status.
        status: Status,
        /// The invalid parameter, if the target reports it.
        parameter: Option<InvalidParameter>,
        /// The requested subsystem.
        subnqn: Box<Nqn>,
        /// The host NQN that was sent.
        hostnqn: Box<Nqn>,
    },
    /// The target requires authentication, and this host has no secret.
    #[error(
        "the target demands authentication (DH-HMAC-CHAP): give this host's secret with \
         --dhchap-secret"
    )]
    Authentication,
    /// The target did not accept the authentication of this host.
    #[error(
        "the target refuses our authentication on {} ({why}): is --dhchap-secret the secret that \
         the target has for --hostnqn, and does it have the one of --dhchap-ctrl-secret, if given?",
        Name(*queue)
    )]
    NotAuthenticated {
        /// The queue.
        queue: u16,
        /// The target's reason.
        why: Failure,
    },
    /// The target has not authenticated itself, or violated the protocol of authentication.
    #[error("the target did not authenticate itself on {}: {why}", Name(*queue))]
    Unproved {
        /// The queue.
        queue: u16,
        /// The failure.
        why: Failure,
    },
    /// The controller did not become ready.
    #[error("the controller did not become ready within {waited:?}")]
    NotReady {
        /// Time waited.
        waited: Duration,
    },
    /// The controller reports a fatal status.
    #[error("the controller reports a fatal error (CSTS.CFS)")]
    Fatal,
    /// A command of the initialization failed.
    #[error("the target refused {what}, which is required: {status}")]
    Refused {
        /// The command.
        what: &'static str,
        /// Its status.
        status: Status,
    },
    /// The controller lacks a property that every host over RDMA requires.
    #[error("this controller cannot be used: {0}")]
    Unsupported(&'static str),
    /// A command was not completed in time.
    #[error(
        "no answer to {what} on {} within {:?}",
        Name(*queue),
        Duration::from_millis(after.as_millis() as u64)
    )]
    Timeout {
        /// The queue.
        queue: u16,
        /// The command.
        what: &'static str,
        /// The timeout.
        after: Duration,
    },
    /// The connection of a queue was not established in time.
    #[error("the connection of {} did not come up within {after:?}", Name(*queue))]
    SlowConnection {
        /// The queue.
        queue: u16,
        /// The timeout.
        after: Duration,
    },
    /// The target violated the protocol.
    #[error("the target broke the rules on {}: {what}", Name(*queue))]
    Violation {
        /// The queue.
        queue: u16,
        /// The violation.
        what: Violation,
    },
    /// The connection of a queue failed.
    #[error("the connection of {} failed: {fault}", Name(*queue))]
    Fault {
        /// The queue.
        queue: u16,
        /// The fault.
        fault: Fault,
    },
    /// The target closed the connection of a queue.
    #[error("the target closed the connection of {}", Name(*queue))]
    Peer {
        /// The queue.
        queue: u16,
    },
    /// The device failed or was removed.
    #[error("the RDMA device failed or was removed")]
    Device,
    /// An operation of the fabric failed.
    #[error("{0}")]
    Fabric(FabricError),
    /// The pool has no buffers for a queue.
    #[error("too little memory in the pool for these queues")]
    NoMemory,
}

/// A protocol violation by the target.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Violation {
    /// A response that is not 16 bytes long.
    #[error("a response of {0} bytes instead of 16")]
    Length(u32),
    /// A completion for a command that is not outstanding: never sent, or already completed.
    #[error("an answer to command {0:#06x}, which is not outstanding")]
    CommandId(u16),
    /// A key was invalidated that did not belong to the command.
    #[error("it invalidated key {0:#010x}, which is not the command's")]
    Key(u32),
    /// Identify Controller returns another controller id than Connect.
    #[error("Connect returned controller {connect}, and Identify tells of controller {identify}")]
    ControllerId {
        /// What Connect returned.
        connect: u16,
        /// The value in Identify.
        identify: u16,
    },
}

/// Reject reason of the InfiniBand CM: invalid service ID.
const INVALID_SERVICE_ID: i32 = 8;

impl EndReason {
    /// Converts the reason for the end of a connection; `up`: it had been established.
    pub(super) fn from_reason(queue: u16, to: SocketAddr, reason: Reason, up: bool) -> EndReason {
        match reason {
            Reason::Rejected { code, private_data } => match code {
                INVALID_SERVICE_ID => EndReason::NobodyListens { to },
                code if code == -(nix::errno::Errno::ECONNREFUSED as i32) => {
                    EndReason::NobodyListens { to }
                }
                code => match cm::Reject::from_private_data(&private_data) {
                    Some(reject) if code == i32::from(cm::CONSUMER_REJECT) => {
                        EndReason::Rejected { queue, status: reject.status }
                    }
                    _ => EndReason::RejectedOtherwise { queue, code },
                },
            },
            Reason::NotEstablished => EndReason::Unreachable { to },
            Reason::Device => EndReason::Device,
            Reason::Peer | Reason::Local if up => EndReason::Peer { queue },
            Reason::Peer | Reason::Local => EndReason::Unreachable { to },
        }
    }
}

fn rejected(queue: &u16, status: &RejectStatus, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    write!(f, "the target refused the connection of {}: {status}", Name(*queue))?;
    match *status {
        RejectStatus::NO_RESOURCES => {
            f.write_str("; ask for fewer or smaller queues (--nr-io-queues, --queue-size)")
        }
        _ => Ok(()),
    }
}

fn refused(
    queue: &u16,
    status: &Status,
    parameter: &Option<InvalidParameter>,
    subnqn: &Nqn,
    hostnqn: &Nqn,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    match (status.without_dnr(), *parameter) {
        (code, _) if code.is(Status::CONNECT_INVALID_HOST) => write!(
            f,
            "the subsystem {subnqn} does not admit this host: add {hostnqn} to its hosts, or give \
             another name with --hostnqn"
        ),
        (code, Some(InvalidParameter::SUBNQN)) if code.is(Status::CONNECT_INVALID_PARAMETERS) => {
            write!(f, "the target has no subsystem {subnqn}: ask it with `nvmf discover`")
        }
        (code, Some(at)) if code.is(Status::CONNECT_INVALID_PARAMETERS) => write!(
            f,
            "the target refused Connect of {}: it does not like byte {} of the {}",
            Name(*queue),
            at.offset,
            if at.in_data { "data" } else { "command" }
        ),
        (code, _) if code.is(Status::CONNECT_CONTROLLER_BUSY) => {
            f.write_str("the target has no controller left for us (Connect Controller Busy)")
        }
        _ => write!(f, "the target refused Connect of {}: {status}", Name(*queue)),
    }
}

/// Name of a queue for the user.
struct Name(u16);

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => f.write_str("the admin queue"),
            n => write!(f, "I/O queue {n}"),
        }
    }
}
