//! Seeded bugs that the oracles must find. None of them is a permitted behaviour of a network or a
//! device; each looks from outside like a defect of the target.

use std::collections::HashMap;

use rdma::soft::sim::{Datagram, Hook};
use rdma::wire::header::Bth;
use rdma::wire::icrc::{Flow, Icrc};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::Psn;

rdma::named_enum! {
    /// A seeded bug.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    pub enum SeededBug {
        /// A receiver of a repeated request, whose acknowledgement was lost, does not acknowledge
        /// it again.
        LostAck = "lost-ack",
        /// The target answers a command twice.
        DoubleCompletion = "double-completion",
        /// The device reports a flush that it has not done.
        MissingFlush = "missing-flush",
        /// Acknowledgements contain the number of the next packet.
        PsnOffByOne = "psn-off-by-one",
        /// Reactors do not receive the barrier of a preemption, so commands of the preempted host
        /// continue.
        MissingFence = "missing-fence",
        /// Reactors do not receive the barrier of a write protection, so earlier writes continue.
        LateShield = "late-shield",
        /// The ANA state of a path is set on the other one.
        WrongPath = "wrong-path",
        /// Reactors do not learn that the subsystem has changed.
        StaleView = "stale-view",
        /// No host has to authenticate.
        OpenDoor = "open-door",
        /// Reactors lose the token of an Abort command.
        LostAbort = "lost-abort",
        /// An Abort command reports success, whatever the outcome.
        FalseAbort = "false-abort",
        /// Blocks that were made unreadable can be read after a restart.
        LostMarks = "lost-marks",
        /// Copies read earlier contents of the device.
        StaleCopy = "stale-copy",
        /// The record of host-created namespaces is not synced before the response.
        LostRecord = "lost-record",
        /// A namespace with another backing store keeps the earlier one.
        OldStore = "old-store",
        /// Reactors do not receive the barrier of a format, so commands continue.
        LateFormat = "late-format",
        /// A format leaves the last blocks unchanged.
        HalfFormat = "half-format",
        /// The block size chosen by a host is lost at a restart.
        LostFormat = "lost-format",
        /// A flush that arrives during an fsync completes together with the one that has begun.
        SharedFlush = "shared-flush",
        /// The kernel reports a write as cancelled and executes it later.
        LateWrite = "late-write",
        /// Operations of closed connections at a device do not lock their blocks.
        OpenBlocks = "open-blocks",
        /// The power-fail write unit of the device is smaller than reported.
        TornBlock = "torn-block",
        /// fsync of the file of a change has no effect.
        UnsyncedChange = "unsynced-change",
        /// Hosts see a change before it is persisted.
        EarlyCommit = "early-commit",
        /// A new block size is published before it is persisted.
        EarlyFormat = "early-format",
        /// A format is completed before the record of its block size is durable.
        UnsyncedFormat = "unsynced-format",
        /// Persistent reservations are lost at a restart.
        LostReservation = "lost-reservation",
        /// Write protection is lost at a restart.
        LostProtection = "lost-protection",
        /// Opening a removed device again clears the failure of its flushes.
        ForgivenRemoval = "forgiven-removal",
        /// A store is copied before the changes in progress have completed.
        EarlySnapshot = "early-snapshot",
        /// An error of one device fails a read of another one.
        ConfusedDevices = "confused-devices",
    }
}

impl SeededBug {
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
