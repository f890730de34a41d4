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

/// Progress of a host when it was disconnected.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// It requested a connection, and has not sent its Connect command.
    Request,
    /// It sent its Connect command.
    Connect,
    /// It had to authenticate.
    Authentication,
    /// It was connected.
    Running,
}

impl Stage {
    /// One word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Request => "request",
            Stage::Connect => "connect",
            Stage::Authentication => "authentication",
            Stage::Running => "running",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
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
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Cause::$cause => $name,)* }
            }

            /// Stage of the connection.
            #[must_use]
            pub const fn stage(self) -> Stage {
                match self { $(Cause::$cause => Stage::$stage,)* }
            }

            /// What happened, as a part of a sentence.
            #[must_use]
            pub const fn reason(self) -> &'static str {
                match self { $(Cause::$cause => $reason,)* }
            }

            /// What an administrator does next.
            #[must_use]
            pub const fn remedy(self) -> &'static str {
                match self { $(Cause::$cause => $remedy,)* }
            }
        }
    };
}

causes! {
    NotNvme, "not-nvme", Request,
        "connection request rejected: it is none of NVMe over RDMA",
        "connect with an NVMe over RDMA host; see what else uses this port on the peer";
    EmptyQueue, "empty-queue", Request,
        "connection request rejected: its queue has no entries",
        "update the host's driver: it asks for a queue that nothing fits into";
    TooManyQueues, "too-many-queues", Request,
        "connection request rejected: its queue number is above limits.io_queues",
        "connect with fewer queues (nvme connect -i), or raise limits.io_queues and restart";
    NoReads, "no-reads", Request,
        "connection request rejected: the host answers no RDMA Read",
        "check the host's RDMA device and driver: without RDMA Read no data can be fetched";
    NoReceives, "no-receives", Request,
        "connection request rejected: no receive buffers are left",
        "raise memory.receives and restart, or have hosts connect with fewer or shorter queues \
         (nvme connect -i, -Q)";
    NoQueuePair, "no-queue-pair", Request,
        "no queue pair for a connection request",
        "look at the limits of the RDMA device and of locked memory (LimitMEMLOCK); run \
         `nvmfctl doctor`";
    NoRoom, "no-room", Request,
        "too many connections without a Connect",
        "look who opens connections and sends nothing; if they are hosts that start together, \
         raise memory.receives and restart";
    Displaced, "displaced", Request,
        "closed before its Connect to make room for the next one",
        "look who opens connections and sends nothing; if they are hosts that start together, \
         raise memory.receives and restart";
    NoListener, "no-listener", Request,
        "connection request refused: no listener is in force at this address",
        "nothing while listeners are changed; if a change was refused, or takes long, its answer and the \
         log say why";
    Overloaded, "overloaded", Request,
        "a reactor's mailbox is full",
        "if it lasts, give the target more reactors (reactor.threads) and restart";
    Stopping, "stopping", Request,
        "the target is stopping",
        "nothing: the host connects again when the target is back";
    NotEstablished, "not-established", Request,
        "the connection never came up: the host did not confirm it",
        "check the way back to the host: routes, its firewall (UDP port 4791 for RoCE), and one \
         MTU along the whole path";
    ClosedBeforeConnect, "closed-before-connect", Request,
        "the host closed the connection before its Connect",
        "see the host's kernel log; often another of its queues was refused, and that has a record \
         of its own";
    NoConnect, "no-connect", Request,
        "no Connect within its deadline of 30 s",
        "see the host's kernel log: it opened a connection and then said nothing";

    BadConnect, "bad-connect", Connect,
        "the first command was no Connect in good order",
        "update the host's driver, or look whether something else than an NVMe host connects here";
    BadSubsystemName, "bad-subsystem-name", Connect,
        "the name of the subsystem is no valid NQN",
        "correct the name that the host asks for (nvme connect -n)";
    BadHostName, "bad-host-name", Connect,
        "the host's name is no valid NQN",
        "make a new one on the host: nvme gen-hostnqn > /etc/nvme/hostnqn";
    UnknownSubsystem, "unknown-subsystem", Connect,
        "there is no subsystem of this name",
        "correct the name that the host asks for (nvme connect -n), or add a [[subsystem]] and \
         reload; `nvme discover` lists what there is";
    NotExported, "not-exported", Connect,
        "the subsystem is not exported at this listener",
        "connect to another address, or add this listener's id to the subsystem's `listeners` and \
         reload";
    HostNotAllowed, "host-not-allowed", Connect,
        "the host is not among those that the subsystem admits",
        "add its NQN to the subsystem's `hosts` and reload, or have the host use the NQN that is \
         there (nvme connect -q)";
    NoKey, "no-key", Connect,
        "the host must authenticate, and no key is configured for it",
        "add a [[host]] with a dhchap_key_file for its NQN and reload; if it had a key and shall need \
         none: nvmfctl host unkey; if no host shall need one: authentication.required = false";
    TooManyControllers, "too-many-controllers", Connect,
        "all controllers of the target are in use",
        "raise limits.controllers and restart, or disconnect hosts that need none; see who is \
         connected";
    SubsystemFull, "subsystem-full", Connect,
        "all controllers of the subsystem are in use",
        "raise the subsystem's `controllers` and reload, or disconnect hosts that need none";
    TooManyUnauthenticated, "too-many-unauthenticated", Connect,
        "too many hosts have yet to prove who they are",
        "look who connects and does not authenticate; hosts try again by themselves";
    DuplicateHost, "duplicate-host", Connect,
        "the host has a controller by this address already, and duplicate_hosts is \"refuse\"",
        "disconnect the other one; if two machines have one host NQN and id, give each its own \
         (nvme gen-hostnqn); or set duplicate_hosts to another value and reload";
    NoControllerId, "no-controller-id", Connect,
        "all controller ids of the subsystem are in use",
        "widen the subsystem's `cntlids` and reload";
    BadControllerId, "bad-controller-id", Connect,
        "the host asks for a controller of its own choice, and this target gives them out itself",
        "have the host ask for a dynamic controller (FFFFh), as stock hosts do";
    UnknownController, "unknown-controller", Connect,
        "an I/O queue names a controller that this host does not have here",
        "nothing if the host was just reset: it tries again; else check that it reaches one target \
         by one address";
    OtherHostId, "other-host-id", Connect,
        "an I/O queue has another host identifier than its admin queue",
        "give the host one /etc/nvme/hostid and connect again";
    BadQueueId, "bad-queue-id", Connect,
        "a queue number that the host was not granted, or not the one of its connection request",
        "connect with fewer queues (nvme connect -i), or raise limits.io_queues; if that is no \
         help, update the host's driver";
    BadQueueSize, "bad-queue-size", Connect,
        "a queue longer than allowed or than its connection request said, or of one entry",
        "connect with shorter queues (nvme connect -Q), or raise limits.queue_depth";
    KeepAliveTooLong, "keep-alive-too-long", Connect,
        "the host asks for a keep alive timeout of more than two hours, or ten minutes for discovery",
        "connect with a shorter one (nvme connect -k, in seconds; hosts use 5, and 30 for discovery)";
    QueueInUse, "queue-in-use", Connect,
        "the host has a queue of this number already",
        "nothing if the host was just reset: it tries again; else update its driver";

    Throttled, "throttled", Authentication,
        "too many failed authentications",
        "correct the host's secret (nvme connect -S), then wait ten seconds";
    WrongSecret, "wrong-secret", Authentication,
        "authentication failed: the host's secret is not the one of its dhchap_key_file",
        "give host and target the same secret: nvme connect -S, and the dhchap_key_file of the \
         [[host]]; a secret holds for one host NQN only";
    TargetNotTrusted, "target-not-trusted", Authentication,
        "authentication failed: the host does not accept the target's proof",
        "give host and target the same controller secret: nvme connect -C, and the \
         dhchap_ctrl_key_file of the [[host]]";
    NoControllerKey, "no-controller-key", Authentication,
        "authentication failed: the host wants the target to prove itself, and there is no secret for that",
        "add a dhchap_ctrl_key_file to the [[host]] and reload, or have the host ask for no proof \
         (nvme connect without -C)";
    NoCommonAlgorithm, "no-common-algorithm", Authentication,
        "authentication failed: host and target have no hash or group in common that both can use",
        "add one that the host has to `hashes` or `groups` of its [[host]] or of [authentication] \
         (nvmfctl host set), and take out what the host only offers (see its kernel log)";
    BadAuthentication, "bad-authentication", Authentication,
        "authentication failed: the host does not keep to the protocol",
        "update the host's driver, or look whether somebody tries to get in";
    LateAuthentication, "late-authentication", Authentication,
        "the host has not proved who it is within 30 s",
        "see the host's kernel log; a slow host needs a smaller group (authentication.groups)";
    NotAuthenticated, "not-authenticated", Authentication,
        "the host left without proving who it is",
        "give it its secret (nvme connect -S); if it has one, see its kernel log";

    KeepAlive, "keep-alive", Running,
        "keep alive expired: nothing was heard from the host for its timeout",
        "see whether the host is alive and the network whole; hosts that are slow at times need a \
         longer timeout (nvme connect -k)";
    Unreachable, "unreachable", Running,
        "connection lost: the host no longer answers",
        "check cable, switch and the host's address; the host comes again by itself when the way \
         is back";
    NotReady, "not-ready", Running,
        "connection lost: the host has no receive buffers",
        "see the host's kernel log: its driver or its RDMA device hangs";
    AccessRefused, "access-refused", Running,
        "connection lost: the host refused access to its memory",
        "see the host's kernel log; usually it had given up the command before, after a timeout";
    OperationRefused, "operation-refused", Running,
        "connection lost: the host refused or failed an RDMA operation",
        "see the kernel log of the host and the counters of both RDMA devices";
    TooLong, "too-long", Running,
        "connection lost: a message is longer than what it was agreed to be",
        "update the host's driver; check that one MTU holds along the whole path";
    LocalFault, "local-fault", Running,
        "connection lost: the RDMA device of this machine failed the operation",
        "see this machine's kernel log, and report it if the device is sound";
    DeviceGone, "device-gone", Running,
        "the RDMA device of this machine failed or was removed",
        "see this machine's kernel log; when the device is back, so is the target within a second";
    HostLeft, "host-left", Running,
        "the host closed the connection without a shutdown",
        "nothing if it was reset or rebooted; else see its kernel log";
    HostReset, "host-reset", Running,
        "the host reset its controller",
        "nothing if somebody ordered it (nvme reset); else see the host's kernel log for what \
         timed out";
    UnflushedShutdown, "unflushed-shutdown", Running,
        "the host shut its controller down and a flush failed: what it has written may be lost, and \
         it is told so (CSTS.CFS, never \"complete\")",
        "see this machine's kernel log and nvmfctl namespace list, and look at that disk; what the \
         host wrote last may have to be restored";
    SharedHostId, "shared-host-id", Running,
        "two hosts with different names have one host identifier: reservations take them for one",
        "give each host an /etc/nvme/hostid of its own (uuidgen makes one) and connect both again";
    BadSettings, "bad-settings", Running,
        "the host enabled its controller with settings that it does not have (CSTS.CFS)",
        "update the host's driver; this target has 64-byte commands, 16-byte completions and 4 KiB \
         pages";
    ShortCapsule, "short-capsule", Running,
        "a message too short for a command",
        "update the host's driver, or look whether something else than an NVMe host connects here";
    CommandIdInUse, "command-id-in-use", Running,
        "a command id that is in use",
        "update the host's driver: two commands under one name cannot be told apart";
    Disconnected, "disconnected", Running,
        "an administrator had it disconnected (nvmfctl controller disconnect)",
        "nothing: a host that wants to stay connects again by itself; to keep it out, take it from \
         those that the subsystem admits (nvmfctl host deny)";
    FailedOnPurpose, "failed-on-purpose", Running,
        "an administrator had the controller fail (nvmfctl controller fail)",
        "nothing: the host resets its controller, or connects again";
    SubsystemRemoved, "subsystem-removed", Running,
        "its subsystem was removed from the configuration",
        "disconnect it on the host (nvme disconnect -n), or add the subsystem again and reload";
    HostRemoved, "host-removed", Running,
        "the host was taken from those that the subsystem admits",
        "disconnect it on the host (nvme disconnect -n), or add its NQN to `hosts` again and reload";
    ListenerRemoved, "listener-removed", Running,
        "the listener that it came by was removed, or no longer offers the subsystem",
        "connect the host by another address, or add the listener again and reload";
    KeyChanged, "key-changed", Running,
        "the host must authenticate now, has lost its key, or has not used its new one in time",
        "give the host its secret (nvme connect -S) and connect again";
    Crowded, "crowded", Running,
        "disconnected to make room: it had no I/O queues, nobody has named its host, and its address \
         held the most of that kind",
        "nothing for discovery: the host connects again; a host that is to stay needs its NQN among \
         `hosts` of the subsystem";
    Replaced, "replaced", Running,
        "the host came again, and duplicate_hosts is \"replace\"",
        "nothing if it was restarted; if two machines have one host NQN and id, give each its own \
         (nvme gen-hostnqn)";
}

impl Cause {
    /// Why a connection request with this refusal was rejected.
    #[must_use]
    pub fn of_request(status: RejectStatus) -> Cause {
        match status {
            RejectStatus::INVALID_HSQSIZE | RejectStatus::INVALID_HRQSIZE => Cause::EmptyQueue,
            RejectStatus::INVALID_QID => Cause::TooManyQueues,
            RejectStatus::INVALID_IRD => Cause::NoReads,
            RejectStatus::NO_RESOURCES => Cause::NoReceives,
            _ => Cause::NotNvme,
        }
    }

    /// Cause of a failed exchange; `by_host`: the host reported the failure.
    #[must_use]
    pub fn of_exchange(failure: Failure, by_host: bool) -> Cause {
        match failure {
            // Linux finds only then that it has no code for what it offers.
            Failure::HASH_UNUSABLE | Failure::GROUP_UNUSABLE => Cause::NoCommonAlgorithm,
            Failure::FAILED if by_host => Cause::TargetNotTrusted,
            Failure::FAILED => Cause::WrongSecret,
            _ => Cause::BadAuthentication,
        }
    }

    /// Cause of a failed completion; none if it only follows from another failure.
    #[must_use]
    pub fn of_fault(fault: Fault) -> Option<Cause> {
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
    #[must_use]
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
    #[must_use]
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
    fn every_cause_has_its_own_name_and_says_what_happened_and_what_to_do() {
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
            let verbs = "add check connect correct disconnect give have if look make nothing raise \
                         see update widen";
            assert!(verbs.split_whitespace().any(|each| each == verb), "{remedy}");
        }
        let stages: Vec<_> = Cause::ALL.iter().map(|cause| cause.stage() as u8).collect();
        assert!(stages.is_sorted(), "by stage");
    }

    /// Run with `WRITE_TABLE=1` to write the table anew.
    #[test]
    fn the_printed_table_is_the_one_of_the_program() {
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
