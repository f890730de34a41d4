//! Faults that are planted to see that they are found. None of them is something that a network or
//! a disk may do; each is what a defect of ours would look like from outside.

use std::collections::HashMap;

use rdma::soft::sim::{Datagram, Hook};
use rdma::soft::wire::header::Bth;
use rdma::soft::wire::icrc::{Flow, Icrc};
use rdma::soft::wire::opcode::Opcode;
use rdma::soft::wire::psn::Psn;

/// A planted fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Plant {
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

impl Plant {
    /// All of them.
    pub const ALL: [Plant; 24] = [
        Plant::LostAck,
        Plant::DoubleCompletion,
        Plant::MissingFlush,
        Plant::PsnOffByOne,
        Plant::MissingFence,
        Plant::LateShield,
        Plant::WrongPath,
        Plant::StaleView,
        Plant::OpenDoor,
        Plant::LostAbort,
        Plant::FalseAbort,
        Plant::LostMarks,
        Plant::StaleCopy,
        Plant::LostRecord,
        Plant::OldStore,
        Plant::LateFormat,
        Plant::HalfFormat,
        Plant::LostFormat,
        Plant::SharedFlush,
        Plant::LateWrite,
        Plant::OpenBlocks,
        Plant::TornBlock,
        Plant::UnsyncedChange,
        Plant::EarlyCommit,
    ];

    /// Its name on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Plant::LostAck => "lost-ack",
            Plant::DoubleCompletion => "double-completion",
            Plant::MissingFlush => "missing-flush",
            Plant::PsnOffByOne => "psn-off-by-one",
            Plant::MissingFence => "missing-fence",
            Plant::LateShield => "late-shield",
            Plant::WrongPath => "wrong-path",
            Plant::StaleView => "stale-view",
            Plant::OpenDoor => "open-door",
            Plant::LostAbort => "lost-abort",
            Plant::FalseAbort => "false-abort",
            Plant::LostMarks => "lost-marks",
            Plant::StaleCopy => "stale-copy",
            Plant::LostRecord => "lost-record",
            Plant::OldStore => "old-store",
            Plant::LateFormat => "late-format",
            Plant::HalfFormat => "half-format",
            Plant::LostFormat => "lost-format",
            Plant::SharedFlush => "shared-flush",
            Plant::LateWrite => "late-write",
            Plant::OpenBlocks => "open-blocks",
            Plant::TornBlock => "torn-block",
            Plant::UnsyncedChange => "unsynced-change",
            Plant::EarlyCommit => "early-commit",
        }
    }

    /// What does it to datagrams, for those of this kind.
    pub(super) fn tap(self) -> Option<Hook> {
        match self {
            Plant::LostAck => Some(forgetful()),
            Plant::PsnOffByOne => Some(Box::new(one_more)),
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
