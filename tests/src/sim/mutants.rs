//! Seeded bugs that the oracles must find. None of them is a permitted behaviour of a network or a
//! device; each looks from outside like a defect of the target.

use std::collections::HashMap;

use rdma::soft::sim::{Datagram, Hook};
use rdma::soft::wire::header::Bth;
use rdma::soft::wire::icrc::{Flow, Icrc};
use rdma::soft::wire::opcode::Opcode;
use rdma::soft::wire::psn::Psn;

/// A seeded bug.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeededBug {
    /// A receiver of a repeated request, whose acknowledgement was lost, does not acknowledge it
    /// again.
    LostAck,
    /// The target answers a command twice.
    DoubleCompletion,
    /// The device reports a flush that it has not done.
    MissingFlush,
    /// Acknowledgements contain the number of the next packet.
    PsnOffByOne,
    /// Reactors do not receive the barrier of a preemption, so commands of the preempted host
    /// continue.
    MissingFence,
    /// Reactors do not receive the barrier of a write protection, so earlier writes continue.
    LateShield,
    /// The ANA state of a path is set on the other one.
    WrongPath,
    /// Reactors do not learn that the subsystem has changed.
    StaleView,
    /// No host has to authenticate.
    OpenDoor,
    /// Reactors lose the token of an Abort command.
    LostAbort,
    /// An Abort command reports success, whatever the outcome.
    FalseAbort,
    /// Blocks that were made unreadable can be read after a restart.
    LostMarks,
    /// Copies read earlier contents of the device.
    StaleCopy,
    /// The record of host-created namespaces is not synced before the response.
    LostRecord,
    /// A namespace with another backing store keeps the earlier one.
    OldStore,
    /// Reactors do not receive the barrier of a format, so commands continue.
    LateFormat,
    /// A format leaves the last blocks unchanged.
    HalfFormat,
    /// The block size chosen by a host is lost at a restart.
    LostFormat,
    /// A flush that arrives during an fsync completes together with the one that has begun.
    SharedFlush,
    /// The kernel reports a write as cancelled and executes it later.
    LateWrite,
    /// Operations of closed connections at a device do not lock their blocks.
    OpenBlocks,
    /// The power-fail write unit of the device is smaller than reported.
    TornBlock,
    /// fsync of the file of a change has no effect.
    UnsyncedChange,
    /// Hosts see a change before it is persisted.
    EarlyCommit,
    /// A new block size is published before it is persisted.
    EarlyFormat,
    /// A format is completed before the record of its block size is durable.
    UnsyncedFormat,
    /// Persistent reservations are lost at a restart.
    LostReservation,
    /// Write protection is lost at a restart.
    LostProtection,
    /// Opening a removed device again clears the failure of its flushes.
    ForgivenRemoval,
    /// A store is copied before the changes in progress have completed.
    EarlySnapshot,
}

impl SeededBug {
    /// All of them.
    pub const ALL: [SeededBug; 30] = [
        SeededBug::LostAck,
        SeededBug::DoubleCompletion,
        SeededBug::MissingFlush,
        SeededBug::PsnOffByOne,
        SeededBug::MissingFence,
        SeededBug::LateShield,
        SeededBug::WrongPath,
        SeededBug::StaleView,
        SeededBug::OpenDoor,
        SeededBug::LostAbort,
        SeededBug::FalseAbort,
        SeededBug::LostMarks,
        SeededBug::StaleCopy,
        SeededBug::LostRecord,
        SeededBug::OldStore,
        SeededBug::LateFormat,
        SeededBug::HalfFormat,
        SeededBug::LostFormat,
        SeededBug::SharedFlush,
        SeededBug::LateWrite,
        SeededBug::OpenBlocks,
        SeededBug::TornBlock,
        SeededBug::UnsyncedChange,
        SeededBug::EarlyCommit,
        SeededBug::EarlyFormat,
        SeededBug::UnsyncedFormat,
        SeededBug::LostReservation,
        SeededBug::LostProtection,
        SeededBug::ForgivenRemoval,
        SeededBug::EarlySnapshot,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            SeededBug::LostAck => "lost-ack",
            SeededBug::DoubleCompletion => "double-completion",
            SeededBug::MissingFlush => "missing-flush",
            SeededBug::PsnOffByOne => "psn-off-by-one",
            SeededBug::MissingFence => "missing-fence",
            SeededBug::LateShield => "late-shield",
            SeededBug::WrongPath => "wrong-path",
            SeededBug::StaleView => "stale-view",
            SeededBug::OpenDoor => "open-door",
            SeededBug::LostAbort => "lost-abort",
            SeededBug::FalseAbort => "false-abort",
            SeededBug::LostMarks => "lost-marks",
            SeededBug::StaleCopy => "stale-copy",
            SeededBug::LostRecord => "lost-record",
            SeededBug::OldStore => "old-store",
            SeededBug::LateFormat => "late-format",
            SeededBug::HalfFormat => "half-format",
            SeededBug::LostFormat => "lost-format",
            SeededBug::SharedFlush => "shared-flush",
            SeededBug::LateWrite => "late-write",
            SeededBug::OpenBlocks => "open-blocks",
            SeededBug::TornBlock => "torn-block",
            SeededBug::UnsyncedChange => "unsynced-change",
            SeededBug::EarlyCommit => "early-commit",
            SeededBug::EarlyFormat => "early-format",
            SeededBug::UnsyncedFormat => "unsynced-format",
            SeededBug::LostReservation => "lost-reservation",
            SeededBug::LostProtection => "lost-protection",
            SeededBug::ForgivenRemoval => "forgiven-removal",
            SeededBug::EarlySnapshot => "early-snapshot",
        }
    }

    /// The hook for datagrams, if it is of that kind.
    pub(super) fn tap(self) -> Option<Hook> {
        match self {
            SeededBug::LostAck => Some(forgetful()),
            SeededBug::PsnOffByOne => Some(Box::new(one_more)),
            _ => None,
        }
    }
}

fn header(datagram: &Datagram) -> Option<Bth> {
    let bth = Bth::parse(datagram.bytes.first_chunk()?).ok()?;
    Some(bth)
}

/// Drops the second and every further acknowledgement of one number.
fn forgetful() -> Hook {
    let mut seen: HashMap<u32, Psn> = HashMap::new();
    Box::new(move |datagram| {
        let Some(bth) = header(datagram).filter(|bth| bth.opcode == Opcode::Acknowledge) else {
            return true;
        };
        let last = seen.insert(bth.destination.get(), bth.psn);
        last != Some(bth.psn)
    })
}

/// Increments the number in every tenth acknowledgement.
fn one_more(datagram: &mut Datagram) -> bool {
    let Some(bth) = header(datagram).filter(|bth| bth.opcode == Opcode::Acknowledge) else {
        return true;
    };
    let psn = bth.psn.add(1);
    let end = datagram.bytes.len() - 4;
    if let (Some((source, destination)), true) = (datagram.way, bth.psn.get().is_multiple_of(10)) {
        let changed = Bth { psn, ..bth }.emit();
        datagram.bytes[..Bth::BYTES].copy_from_slice(&changed);
        let flow = Flow { source, destination };
        let mut icrc = Icrc::start(&flow, 0, datagram.bytes.len(), &changed);
        icrc.update(&datagram.bytes[Bth::BYTES..end]);
        datagram.bytes[end..].copy_from_slice(&icrc.finish());
    }
    true
}
