//! Seeded bugs that the oracles must find. None of them is something that a network or a disk may
//! do; each is what a defect of ours would look like from outside.

use std::collections::HashMap;

use rdma::soft::sim::{Datagram, Hook};
use rdma::soft::wire::header::Bth;
use rdma::soft::wire::icrc::{Flow, Icrc};
use rdma::soft::wire::opcode::Opcode;
use rdma::soft::wire::psn::Psn;

/// A planted fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SeededBug {
    /// Who receives a request again, because its acknowledgement got lost, does not acknowledge it
    /// again.
    LostAck,
    /// The target answers a command twice.
    DoubleCompletion,
    /// The disk says that it has flushed, and has not.
    MissingFlush,
    /// Acknowledgements say one packet more than was received.
    PsnOffByOne,
    /// Reactors do not hear that a host was preempted, and its commands go on.
    MissingFence,
    /// Reactors do not hear that a namespace was protected, and writes of before go on.
    LateShield,
    /// The state of a path is set on the other one.
    WrongPath,
    /// Reactors do not hear that the subsystem has changed.
    StaleView,
    /// Nobody has to prove who it is.
    OpenDoor,
    /// Reactors lose the errand of an Abort command.
    LostAbort,
    /// An Abort command says that it has aborted, whatever becomes of the other command.
    FalseAbort,
    /// Blocks that were made unreadable can be read again after a restart.
    LostMarks,
    /// Copies read what the disk had before.
    StaleCopy,
    /// The record of namespaces that hosts have made is not synced before the answer.
    LostRecord,
    /// A namespace that gets another store keeps the one that it had.
    OldStore,
    /// Reactors do not hear that a namespace is formatted, and its commands go on.
    LateFormat,
    /// A format leaves the last blocks as they were.
    HalfFormat,
    /// The block size that a host has chosen is forgotten by a restart.
    LostFormat,
    /// A flush that comes while the kernel synchronises the store is answered together with the one
    /// that had begun.
    SharedFlush,
    /// The kernel says that it has given a write back, which it carries out later.
    LateWrite,
    /// What connections leave at a disk when they are closed keeps no blocks from later writes.
    OpenBlocks,
    /// The device writes less at once than it says.
    TornBlock,
    /// To synchronise the file of a change does nothing.
    UnsyncedChange,
    /// Hosts see a change before it is kept.
    EarlyCommit,
}

impl SeededBug {
    /// All of them.
    pub const ALL: [SeededBug; 24] = [
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
        }
    }

    /// What does it to datagrams, for those of this kind.
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

/// Makes every tenth acknowledgement one of the packet behind.
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
