//! Disconnect causes: each has a sentence for the event and a sentence for the remedy.
//!
//! Code that refuses or closes a connection names a [`Cause`] (`diag/log_limiter.rs` records and logs it);
//! `RecentDisconnects` keeps the latest records for `nvmfctl why`. `docs/why.md` is the printed table.

use std::borrow::Cow;
use std::fmt;
use std::net::SocketAddr;

use nvme::Nqn;
use nvme::auth::Failure;
use nvme::cm::RejectStatus;
use rdma::Fault;

rdma::named_enum! {
    /// Progress of a host when it was disconnected.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum Stage {
        /// It requested a connection, and has not sent its Connect command.
        Request = "request",
        /// It sent its Connect command.
        Connect = "connect",
        /// It had to authenticate.
        Authentication = "authentication",
        /// It was connected.
        Running = "running",
    }
}

macro_rules! causes {
    ($($cause:ident, $name:literal, $stage:ident, $reason:literal, $remedy:literal;)*) => {
        /// Cause of a refused or lost connection.
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
        #[repr(u8)]
        pub enum Cause { $(#[doc = concat!("`", $name, "`: ", $reason)] $cause,)* }

        impl Cause {
            /// All there are, by the stage at which they occur.
            pub const ALL: &'static [Cause] = &[$(Cause::$cause),*];

            /// All names, in that order.
            pub const NAMES: [&'static str; Self::COUNT] = [$($name),*];

            /// How many there are.
            pub const COUNT: usize = [$($name),*].len();

            /// Its name for programs; it stays the same from version to version.
            pub const fn name(self) -> &'static str {
                match self { $(Cause::$cause => $name,)* }
            }

            /// Stage of the connection.
            pub const fn stage(self) -> Stage {
                match self { $(Cause::$cause => Stage::$stage,)* }
            }

            /// What happened, as a part of a sentence.
            pub const fn reason(self) -> &'static str {
                match self { $(Cause::$cause => $reason,)* }
            }

            /// What an administrator does next.
            pub const fn remedy(self) -> &'static str {
                match self { $(Cause::$cause => $remedy,)* }
            }
        }
    };
}

causes! {
    NotNvme, "not-nvme", Request,
        "not an NVMe over RDMA connection request",
        "connect with an NVMe over RDMA host; check which other program on the peer uses this port";
    EmptyQueue, "empty-queue", Request,
        "connection request rejected: its queue has no entries",
        "update the host's driver: it requests a queue without entries";
    TooManyQueues, "too-many-queues", Request,
        "connection request rejected: its queue number is above limits.io_queues",
        "connect with fewer queues (nvme connect -i), or raise limits.io_queues and restart";
    NoReads, "no-reads", Request,
        "connection request rejected: the host supports no RDMA Read",
        "check the host's RDMA device and driver: without RDMA Read no data can be fetched";
    NoReceives, "no-receives", Request,
        "connection request rejected: no receive buffers are left",
        "raise memory.receives and restart, or have hosts connect with fewer or shorter queues \
         (nvme connect -i, -Q)";
    NoQueuePair, "no-queue-pair", Request,
        "connection request rejected: no queue pair is left",
        "check the limits of the RDMA device and of locked memory (LimitMEMLOCK); run `nvmfctl \
         doctor`";
    NoRoom, "no-room", Request,
        "too many connections without a Connect command",
        "check which hosts open connections and send nothing; if hosts start together, raise \
         memory.receives and restart";
    Displaced, "displaced", Request,
        "closed before its Connect command, to free its resources for a newer connection",
        "check which hosts open connections and send nothing; if hosts start together, raise \
         memory.receives and restart";
    NoListener, "no-listener", Request,
        "connection request rejected: no listener is active at this address",
        "nothing while listeners are changed; if a change was refused or takes long, its response \
         and the log have the reason";
    Overloaded, "overloaded", Request,
        "a reactor's message queue is full",
        "if this persists, configure more reactors (reactor.threads) and restart";
    Stopping, "stopping", Request,
        "the target is stopping",
        "nothing: the host reconnects when the target is running again";
    NotEstablished, "not-established", Request,
        "the connection was not established: the host did not confirm it",
        "check the route to the host, its firewall (UDP port 4791 for RoCE), and for one MTU along \
         the whole path";
    ClosedBeforeConnect, "closed-before-connect", Request,
        "the host closed the connection before its Connect command",
        "check the host's kernel log; often another of its queues was refused, which has a record \
         of its own";
    NoConnect, "no-connect", Request,
        "no Connect command within 30 s",
        "check the host's kernel log: it opened a connection and sent nothing";

    BadConnect, "bad-connect", Connect,
        "the first command was not a valid Connect",
        "update the host's driver, or check whether something other than an NVMe host connects \
         here";
    BadSubsystemName, "bad-subsystem-name", Connect,
        "the subsystem name is not a valid NQN",
        "correct the name that the host requests (nvme connect -n)";
    BadHostName, "bad-host-name", Connect,
        "the host's name is not a valid NQN",
        "generate a new one on the host: nvme gen-hostnqn > /etc/nvme/hostnqn";
    UnknownSubsystem, "unknown-subsystem", Connect,
        "no subsystem has this name",
        "correct the name that the host requests (nvme connect -n), or add a [[subsystem]] and \
         reload; `nvme discover` lists the subsystems";
    NotExported, "not-exported", Connect,
        "the subsystem is not exported at this listener",
        "connect to another address, or add this listener's id to the subsystem's `listeners` and \
         reload";
    HostNotAllowed, "host-not-allowed", Connect,
        "the host's NQN is not in the subsystem's `hosts` list",
        "add its NQN to the subsystem's `hosts` and reload, or configure a listed NQN on the host \
         (nvme connect -q)";
    NoKey, "no-key", Connect,
        "the host must authenticate, and has no key here, or one that could not be read",
        "add a [[host]] with a dhchap_key_file for its NQN, or correct that file, and reload; to exempt a host that had a \
         key: nvmfctl host unkey; to exempt all hosts: authentication.required = false";
    TooManyControllers, "too-many-controllers", Connect,
        "all controllers of the target are in use",
        "raise limits.controllers and restart, or disconnect hosts that need none; `nvmfctl \
         controllers` lists them";
    SubsystemFull, "subsystem-full", Connect,
        "all controllers of the subsystem are in use",
        "raise the subsystem's `controllers` and reload, or disconnect hosts that need none";
    TooManyUnauthenticated, "too-many-unauthenticated", Connect,
        "too many hosts have not authenticated yet",
        "check which hosts connect and do not authenticate; hosts retry automatically";
    TooManyUnidentified, "too-many-unidentified", Connect,
        "hosts whose NQN is in no `hosts` list have their share of the receives, queue pairs or \
         controllers: three quarters for all of them while there is a list, and three quarters of \
         that for one address",
        "add its NQN to `hosts` of the subsystem, disconnect hosts that need no controller, or \
         raise memory.receives or limits.controllers and restart";
    DuplicateHost, "duplicate-host", Connect,
        "the host already has a controller from this address, and duplicate_hosts is \"refuse\"",
        "disconnect the other one; if two machines have one host NQN and id, give each its own \
         (nvme gen-hostnqn); or set duplicate_hosts to another value and reload";
    RollingBack, "rolling-back", Connect,
        "a namespace of the subsystem is being rolled back",
        "nothing: hosts retry automatically; if it persists, see `nvmfctl namespace list` for a \
         device that hangs";
    NoControllerId, "no-controller-id", Connect,
        "all controller ids of the subsystem are in use",
        "extend the subsystem's `cntlids` and reload";
    BadControllerId, "bad-controller-id", Connect,
        "the host requests a specific controller id, and this target assigns ids dynamically",
        "have the host request a dynamic controller (FFFFh), as stock hosts do";
    UnknownController, "unknown-controller", Connect,
        "an I/O queue names a controller that this host does not have",
        "nothing if the host was just reset: it retries; otherwise check that it reaches only one \
         target at this address";
    OtherHostId, "other-host-id", Connect,
        "an I/O queue has another host identifier than its admin queue",
        "give the host one /etc/nvme/hostid and reconnect";
    BadQueueId, "bad-queue-id", Connect,
        "a queue number that was not granted to the host, or differs from its connection request",
        "connect with fewer queues (nvme connect -i), or raise limits.io_queues; if that does not \
         help, update the host's driver";
    BadQueueSize, "bad-queue-size", Connect,
        "a queue longer than allowed or than in its connection request, or with one entry",
        "connect with shorter queues (nvme connect -Q), or raise limits.queue_depth";
    KeepAliveTooLong, "keep-alive-too-long", Connect,
        "the host requests a keep alive timeout of more than two hours, or ten minutes for \
         discovery",
        "connect with a shorter one (nvme connect -k, in seconds; hosts use 5, and 30 for \
         discovery)";
    QueueInUse, "queue-in-use", Connect,
        "the host already has a queue with this number",
        "nothing if the host was just reset: it retries; otherwise update its driver";

    Throttled, "throttled", Authentication,
        "too many failed authentications",
        "correct the host's secret (nvme connect -S), then wait ten seconds";
    WrongSecret, "wrong-secret", Authentication,
        "authentication failed: the host's secret differs from its dhchap_key_file",
        "give host and target the same secret: nvme connect -S, and the dhchap_key_file of the \
         [[host]]; a secret is valid for one host NQN only";
    TargetNotTrusted, "target-not-trusted", Authentication,
        "authentication failed: the host does not accept the target's proof",
        "give host and target the same controller secret: nvme connect -C, and the \
         dhchap_ctrl_key_file of the [[host]]";
    NoControllerKey, "no-controller-key", Authentication,
        "authentication failed: the host requests authentication of the target, which has no \
         secret for that",
        "add a dhchap_ctrl_key_file to the [[host]] and reload, or connect without it (nvme \
         connect without -C)";
    NoCommonAlgorithm, "no-common-algorithm", Authentication,
        "authentication failed: host and target have no usable hash or group in common",
        "add one that the host supports to `hashes` or `groups` of its [[host]] or of \
         [authentication] (nvmfctl host set), and remove those that its kernel log reports as \
         missing";
    BadAuthentication, "bad-authentication", Authentication,
        "authentication failed: the host violates the protocol",
        "update the host's driver, or check whether an attacker connects here";
    LateAuthentication, "late-authentication", Authentication,
        "the host has not authenticated within 30 s",
        "check the host's kernel log; a slow host needs a smaller group (authentication.groups)";
    NotAuthenticated, "not-authenticated", Authentication,
        "the host disconnected without authenticating",
        "give it its secret (nvme connect -S); if it has one, check its kernel log";

    KeepAlive, "keep-alive", Running,
        "keep alive expired: nothing was received from the host for its timeout",
        "check the host and the network; hosts that are slow at times need a longer timeout (nvme \
         connect -k)";
    Unreachable, "unreachable", Running,
        "connection lost: the host does not respond any more",
        "check cable, switch and the host's address; the host reconnects automatically when it is \
         reachable again";
    NotReady, "not-ready", Running,
        "connection lost: the host has no receive buffers",
        "check the host's kernel log: its driver or its RDMA device hangs";
    AccessRefused, "access-refused", Running,
        "connection lost: the host rejected access to its memory",
        "check the host's kernel log; usually it had aborted the command before, after a timeout";
    OperationRefused, "operation-refused", Running,
        "connection lost: the host rejected or failed an RDMA operation",
        "check the kernel log of the host and the counters of both RDMA devices";
    TooLong, "too-long", Running,
        "connection lost: a message is longer than negotiated",
        "update the host's driver; check for one MTU along the whole path";
    LocalFault, "local-fault", Running,
        "connection lost: the RDMA device of this machine failed the operation",
        "check this machine's kernel log; report a bug if the device works";
    DeviceGone, "device-gone", Running,
        "the RDMA device of this machine failed or was removed",
        "check this machine's kernel log; service resumes within a second after the device is \
         available again";
    HostLeft, "host-left", Running,
        "the host closed the connection without a shutdown",
        "nothing if it was reset or rebooted; otherwise check its kernel log";
    HostReset, "host-reset", Running,
        "the host reset its controller",
        "nothing if an administrator did it (nvme reset); otherwise check the host's kernel log \
         for timeouts";
    UnflushedShutdown, "unflushed-shutdown", Running,
        "the host shut its controller down and a flush failed: data that it has written may be \
         lost, which is reported to it (CSTS.CFS, never \"complete\")",
        "check this machine's kernel log, `nvmfctl namespace list` and the device; the data \
         written last may have to be restored";
    SharedHostId, "shared-host-id", Running,
        "two hosts with different names have the same host identifier: reservations cannot \
         distinguish them",
        "give each host an /etc/nvme/hostid of its own (uuidgen) and reconnect both";
    BadSettings, "bad-settings", Running,
        "the host enabled its controller with unsupported settings (CSTS.CFS)",
        "update the host's driver; this target has 64-byte commands, 16-byte completions and 4 KiB \
         pages";
    ShortCapsule, "short-capsule", Running,
        "a message shorter than a command",
        "update the host's driver, or check whether something other than an NVMe host connects \
         here";
    CommandIdInUse, "command-id-in-use", Running,
        "a command has an id that is in use",
        "update the host's driver: two commands with one id cannot be distinguished";
    Disconnected, "disconnected", Running,
        "disconnected by an administrator (nvmfctl controller disconnect)",
        "nothing: a host may reconnect automatically; to exclude it, remove it from the subsystem \
         (nvmfctl host deny)";
    FailedOnPurpose, "failed-on-purpose", Running,
        "failed by an administrator (nvmfctl controller fail)",
        "nothing: the host resets its controller, or reconnects";
    SubsystemRemoved, "subsystem-removed", Running,
        "its subsystem was removed from the configuration",
        "disconnect it on the host (nvme disconnect -n), or add the subsystem again and reload";
    HostRemoved, "host-removed", Running,
        "the host's NQN was removed from the subsystem's `hosts` list",
        "disconnect it on the host (nvme disconnect -n), or add its NQN to `hosts` again and \
         reload";
    ListenerRemoved, "listener-removed", Running,
        "its listener was removed, or no longer offers the subsystem",
        "connect the host to another address, or add the listener again and reload";
    GatewayCut, "gateway-cut", Running,
        "this gateway of a group does not reach its Ceph cluster, so that another one takes over",
        "check the network to the cluster, and `ceph -s`; the host uses the other gateway, and \
         reconnects automatically";
    KeyChanged, "key-changed", Running,
        "the host has to authenticate now, its key was removed, or it has not used its new key in \
         time",
        "give the host its secret (nvme connect -S) and reconnect";
    Crowded, "crowded", Running,
        "disconnected in favour of another host: it had no I/O queues, its NQN is in no `hosts` \
         list, and its address had the most such controllers",
        "nothing for discovery: the host reconnects; a host that should stay needs its NQN in \
         `hosts` of the subsystem";
    Replaced, "replaced", Running,
        "the host connected again, and duplicate_hosts is \"replace\"",
        "nothing if it was restarted; if two machines have one host NQN and id, give each its own \
         (nvme gen-hostnqn)";
}

impl Cause {
    /// Why a connection request with this refusal was rejected.
    pub(crate) fn of_request(status: RejectStatus) -> Cause {
        match status {
            RejectStatus::INVALID_HSQSIZE | RejectStatus::INVALID_HRQSIZE => Cause::EmptyQueue,
            RejectStatus::INVALID_QID => Cause::TooManyQueues,
            RejectStatus::INVALID_IRD => Cause::NoReads,
            RejectStatus::NO_RESOURCES => Cause::NoReceives,
            _ => Cause::NotNvme,
        }
    }

    /// Cause of a failed exchange; `by_host`: the host reported the failure.
    pub(crate) fn of_exchange(failure: Failure, by_host: bool) -> Cause {
        match failure {
            // Linux finds only then that it has no code for what it offers.
            Failure::HASH_UNUSABLE | Failure::GROUP_UNUSABLE => Cause::NoCommonAlgorithm,
            Failure::FAILED if by_host => Cause::TargetNotTrusted,
            Failure::FAILED => Cause::WrongSecret,
            _ => Cause::BadAuthentication,
        }
    }

    /// Cause of a failed completion; none if it only follows from another failure.
    pub(crate) fn of_fault(fault: Fault) -> Option<Cause> {
        Some(match fault {
            Fault::Flushed => return None,
            Fault::RemoteAccess => Cause::AccessRefused,
            Fault::RemoteOperation => Cause::OperationRefused,
            Fault::Unreachable => Cause::Unreachable,
            Fault::NotReady => Cause::NotReady,
            Fault::Length => Cause::TooLong,
            Fault::Local(_) => Cause::LocalFault,
        })
    }

    /// The cause with this name.
    pub fn named(name: &str) -> Option<Cause> {
        Cause::ALL.iter().copied().find(|cause| cause.name() == name)
    }
}

/// A host that was refused or has lost its connection, and why.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DisconnectRecord {
    /// Why.
    pub cause: Cause,
    /// Further details, such as a status or an error of the system; or empty.
    pub detail: Cow<'static, str>,
    /// Where the host is.
    pub remote: SocketAddr,
    /// The address by which it reached us.
    pub local: SocketAddr,
    /// The host, as it calls itself, once it has.
    pub host: Option<Nqn>,
    /// The requested subsystem, if known.
    pub subsystem: Option<Nqn>,
    /// Its queue, once it has named one.
    pub qid: Option<u16>,
}

impl DisconnectRecord {
    /// For a host of which only the address is known.
    pub fn nameless(cause: Cause, remote: SocketAddr, local: SocketAddr) -> DisconnectRecord {
        let detail = Cow::Borrowed("");
        DisconnectRecord { cause, detail, remote, local, host: None, subsystem: None, qid: None }
    }
}

/// Reason and details, then the remedy: one line.
impl fmt::Display for DisconnectRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.cause.reason())?;
        if !self.detail.is_empty() {
            write!(f, " ({})", self.detail)?;
        }
        write!(f, "; {}", self.cause.remedy())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use crate::diag::cause::*;

    #[test]
    fn every_cause_has_a_unique_name_a_reason_and_a_remedy() {
        let names: BTreeSet<_> = Cause::ALL.iter().map(|cause| cause.name()).collect();
        assert_eq!(names.len(), Cause::ALL.len());
        for (at, cause) in Cause::ALL.iter().enumerate() {
            assert_eq!((*cause as usize, Cause::named(cause.name())), (at, Some(*cause)));
            let (reason, remedy) = (cause.reason(), cause.remedy());
            assert!(reason.split(' ').count() >= 4, "{reason}");
            assert!(remedy.split(' ').count() >= 4, "{remedy}");
            for sentence in [reason, remedy] {
                assert!(!sentence.contains("  ") && !sentence.ends_with('.'), "{sentence}");
            }
            // It begins with an action, or says that none is needed.
            let verb = remedy.split([' ', ':']).next().unwrap();
            let verbs = "add check connect correct disconnect extend generate give have if nothing \
                         raise update";
            assert!(verbs.split_whitespace().any(|each| each == verb), "{remedy}");
        }
        let stages: Vec<_> = Cause::ALL.iter().map(|cause| cause.stage() as u8).collect();
        assert!(stages.is_sorted(), "by stage");
    }

    /// Run with `WRITE_TABLE=1` to write the table anew.
    #[test]
    fn the_documented_table_matches_the_causes() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/why.md");
        let text = std::fs::read_to_string(path).unwrap();
        let row = |cause: &Cause| {
            let (name, stage) = (cause.name(), cause.stage());
            format!("| `{name}` | {stage} | {} | {} |\n", cause.reason(), cause.remedy())
        };
        let head = "| cause | stage | what happened | what to do |\n|---|---|---|---|\n";
        let table = format!("{head}{}", Cause::ALL.iter().map(row).collect::<String>());
        if std::env::var_os("WRITE_TABLE").is_some() {
            let before = text.split(head).next().unwrap();
            std::fs::write(path, format!("{before}{table}")).unwrap();
            return;
        }
        assert!(text.ends_with(&table), "docs/why.md differs: WRITE_TABLE=1 writes it anew");
    }
}
