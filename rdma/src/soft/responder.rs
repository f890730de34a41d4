//! The receive side of a reliable connection (IBTA volume 1, 9.7.4 and 9.7.5; 9.9 "Error
//! detection and handling"). A request passes the steps that Linux's `rdma_rxe` names the same:
//! `check_psn`, `check_op_seq`, `check_op_valid`, `check_resource`, `check_length`, `check_rkey`,
//! `execute` (part of `check_resource` comes last, as `check_answers`).
//!
//! Answers leave in the order of the requests. An acknowledgement that has not left yet is
//! replaced by a newer one, so a batch of requests costs one.
//!
//! The queue of answers is bounded by `depth`, the reads that the peer may have outstanding. At
//! most `depth` first answers are in it. A repeated one is queued only for a read that is kept and
//! has no answer queued; `depth` reads are kept, and one is forgotten only for a new read, whose
//! first answer leaves after all that were queued before it: so there are at most `depth` of
//! these. With an acknowledgement between every two of them that makes `4 * depth + 1`.

use std::collections::VecDeque;

use super::counters::Fate;
use super::header::{
    Aeth, Bth, Extended, MAX_MESSAGE_BYTES, Nak, Packet, Reth, RnrTimer, Syndrome, padding,
};
use super::memory::{Denied, Memory, Rights};
use super::opcode::{Opcode, Operation, Position};
use super::outgoing::{Outgoing, Payload};
use super::psn::{Msn, Psn, Qpn};
use super::qp::{Io, Settings};
use crate::{Buf, Fault, Tag, Work};

/// What is to be done after an answer has left.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Outcome {
    /// Go on.
    Live,
    /// The queue pair is dead; the last answer says so to the peer.
    Dead,
}

/// Why a request is not executed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Refusal {
    /// No receive is posted.
    NotReady,
    /// Refuse it, and end the connection.
    Fatal(Nak),
    /// The posted receive is too short; refuse, and end the connection.
    TooLong,
}

impl From<Denied> for Refusal {
    fn from(_: Denied) -> Refusal {
        Refusal::Fatal(Nak::RemoteAccess)
    }
}

const INVALID: Refusal = Refusal::Fatal(Nak::InvalidRequest);

/// The message whose packets are coming in.
#[derive(Debug)]
enum Current {
    None,
    Send { tag: Tag, buf: Buf, filled: u32 },
    Write { key: u32, address: u64, left: u32 },
}

/// A read or atomic kept for the case that its answer gets lost.
#[derive(Clone, Copy, Debug)]
struct Kept {
    psn: Psn,
    packets: u32,
    reth: Reth,
    /// The result of an atomic.
    atomic: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct ReadAnswer {
    /// The first packet's number.
    psn: Psn,
    packets: u32,
    /// Packets sent.
    sent: u32,
    reth: Reth,
    msn: Msn,
    /// The peer has seen it once, perhaps; so its memory may be gone by right.
    replay: bool,
    /// The first answer has not left whole: the peer counts this read as outstanding.
    counts: bool,
}

#[derive(Clone, Copy, Debug)]
enum Answer {
    Acknowledge { psn: Psn, aeth: Aeth },
    Atomic { psn: Psn, msn: Msn, value: u64, replay: bool },
    Read(ReadAnswer),
}

/// The receive side.
#[derive(Debug)]
pub(crate) struct Responder {
    expected: Psn,
    msn: Msn,
    mtu: u32,
    rights: Rights,
    depth: usize,
    rnr: RnrTimer,
    current: Current,
    receives: VecDeque<(Tag, Buf)>,
    /// A missing packet or receive has been reported; what is ahead of it is dropped in silence.
    reported: Option<Psn>,
    answers: VecDeque<Answer>,
    kept: VecDeque<Kept>,
}

impl Responder {
    pub(crate) fn new(receives: u32) -> Responder {
        Responder {
            expected: Psn::default(),
            msn: Msn::default(),
            mtu: 0,
            rights: Rights::NONE,
            depth: 0,
            rnr: RnrTimer::new(0),
            current: Current::None,
            receives: VecDeque::with_capacity(receives as usize),
            reported: None,
            answers: VecDeque::new(),
            kept: VecDeque::new(),
        }
    }

    /// Settles what the connection has agreed on.
    pub(crate) fn start(&mut self, settings: &Settings) {
        let depth = usize::from(settings.answered_reads);
        self.expected = settings.receive_psn;
        self.mtu = settings.mtu;
        self.rights = settings.rights;
        self.depth = depth;
        self.rnr = settings.rnr_timer;
        self.answers.reserve(4 * depth + 1);
        self.kept.reserve(depth);
    }

    pub(crate) fn post(&mut self, tag: Tag, buf: Buf) {
        self.receives.push_back((tag, buf));
    }

    /// Handles a request. After a fatal one the queue pair is dead; the last answer tells the peer.
    pub(crate) fn handle(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Fate {
        let ahead = packet.bth.psn.since(self.expected);
        let checked = match ahead {
            0 => {
                self.reported = None;
                self.receive(packet, io)
            }
            1.. => {
                self.report_gap(packet.bth.psn);
                return Fate::Early;
            }
            _ => {
                self.duplicate(packet);
                return Fate::Late;
            }
        };
        match checked {
            Ok(()) => Fate::Executed,
            Err(Refusal::NotReady) => {
                self.reported = Some(packet.bth.psn);
                self.acknowledge(packet.bth.psn, Syndrome::Rnr(self.rnr));
                Fate::NotReady
            }
            Err(Refusal::Fatal(nak)) => {
                self.die(packet.bth.psn, nak);
                if nak == Nak::RemoteAccess { Fate::NoAccess } else { Fate::Invalid }
            }
            Err(Refusal::TooLong) => {
                let receive = match std::mem::replace(&mut self.current, Current::None) {
                    Current::Send { tag, buf, .. } => Some((tag, buf)),
                    _ => self.receives.pop_front(),
                };
                if let Some((tag, buf)) = receive {
                    io.done(tag, Work::Recv(buf), Err(Fault::Length));
                }
                self.die(packet.bth.psn, Nak::InvalidRequest);
                Fate::Invalid
            }
        }
    }

    /// `check_psn`, packet from the future: something is missing. That is said once; and again
    /// when the peer has evidently gone back meanwhile and lost the packet another time.
    fn report_gap(&mut self, psn: Psn) {
        let repeat = self.reported.is_none_or(|seen| psn.since(seen) <= 0);
        if repeat {
            self.acknowledge(self.expected, Syndrome::Nak(Nak::Sequence));
        }
        self.reported = Some(psn);
    }

    /// `check_psn`, packet from the past: the peer has not heard the answer.
    fn duplicate(&mut self, packet: &Packet<'_>) {
        let psn = packet.bth.psn;
        match packet.row().operation {
            Operation::Send | Operation::Write => {
                // All that was executed; but only as far as data do not acknowledge. A peer may take
                // the number of a read in an acknowledgement for the end of the read (`rdma_rxe`
                // does, and goes on with what happened to be in its memory).
                let reads_since = self.kept.iter().any(|kept| kept.psn.since(psn) > 0);
                let upto = if reads_since { psn } else { self.expected.previous() };
                self.acknowledge(upto, Syndrome::ACK);
            }
            Operation::Atomic => {
                let kept = self.kept.iter().find(|k| k.psn == psn).and_then(|k| k.atomic);
                let queued =
                    |a: &Answer| matches!(a, Answer::Atomic { psn: queued, .. } if *queued == psn);
                if let Some(value) = kept
                    && !self.answers.iter().any(queued)
                {
                    self.answers.push_back(Answer::Atomic {
                        psn,
                        msn: self.msn,
                        value,
                        replay: true,
                    });
                }
            }
            Operation::ReadRequest => self.replay(packet),
            _ => {}
        }
    }

    /// Answers a read once more, from the packet on that the peer asks for; but not when that
    /// is no part of a read that we remember.
    fn replay(&mut self, packet: &Packet<'_>) {
        let (Some(reth), psn) = (packet.ext.reth, packet.bth.psn) else { return };
        let fits = |kept: &&Kept| {
            let Some(skipped) = u32::try_from(psn.since(kept.psn)).ok() else { return false };
            let skipped = u64::from(skipped) * u64::from(self.mtu);
            kept.atomic.is_none()
                && psn.is_within(kept.psn, kept.packets)
                && reth.key == kept.reth.key
                && kept.reth.address.checked_add(skipped) == Some(reth.address)
                && skipped + u64::from(reth.length) <= u64::from(kept.reth.length)
        };
        let Some(kept) = self.kept.iter().find(fits).copied() else { return };
        let packets = packets_of(reth.length, self.mtu);
        let mut answer =
            ReadAnswer { psn, packets, sent: 0, reth, msn: self.msn, replay: true, counts: false };
        let same = self.answers.iter_mut().find_map(|queued| match queued {
            Answer::Read(read) => Some(read).filter(|r| r.psn.is_within(kept.psn, kept.packets)),
            _ => None,
        });
        match same {
            Some(queued) => {
                answer.counts = queued.counts;
                *queued = answer;
            }
            None => self.answers.push_back(Answer::Read(answer)),
        }
    }

    /// The packet that was waited for.
    fn receive(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        self.check_op_seq(packet)?;
        self.check_op_valid(packet)?;
        self.check_resource(packet)?;
        self.check_length(packet)?;
        self.check_rkey(packet, io.memory)?;
        self.check_answers(packet)?;
        self.execute(packet, io)
    }

    /// A message begins when none is unfinished, and goes on in its own kind.
    fn check_op_seq(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let right = match (&self.current, row.operation) {
            (Current::None, _) => row.position.begins(),
            (Current::Send { .. }, Operation::Send) => !row.position.begins(),
            (Current::Write { .. }, Operation::Write) => !row.position.begins(),
            _ => false,
        };
        if right { Ok(()) } else { Err(INVALID) }
    }

    /// The queue pair lets peers do this. (`rdma_rxe` calls it an invalid request when not; for a
    /// target without open memory it is an access refused, whatever key and address it names.)
    fn check_op_valid(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let needed = rights_for(packet.row().operation);
        if self.rights.has(needed) { Ok(()) } else { Err(Denied.into()) }
    }

    /// There is a receive for a message.
    fn check_resource(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        if row.takes_receive && self.receives.is_empty() {
            return Err(Refusal::NotReady);
        }
        Ok(())
    }

    /// There is room for the answer of a read. The last of all checks, so that whoever has no
    /// business with our memory hears that, and not that it asks too often.
    fn check_answers(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let answered = matches!(row.operation, Operation::ReadRequest | Operation::Atomic);
        let busy = || self.answers.iter().filter(|answer| answer.is_new()).count();
        if answered && busy() >= self.depth { Err(INVALID) } else { Ok(()) }
    }

    /// The payload is as long as its place in the message demands, and fits where it goes.
    fn check_length(&self, packet: &Packet<'_>) -> Result<(), Refusal> {
        let (row, len) = (packet.row(), packet.payload.len());
        if !row.payload.allows(len, self.mtu as usize) {
            return Err(INVALID);
        }
        let ends = row.position.ends();
        let padded = packet.bth.pad == padding(len);
        let total = packet.ext.reth.map_or(0, |reth| reth.length);
        if !padded || total > MAX_MESSAGE_BYTES {
            return Err(INVALID);
        }
        match (row.operation, &self.current) {
            (Operation::Send, Current::Send { buf, filled, .. }) => {
                let room = buf.len().saturating_sub(*filled) as usize;
                if len > room { Err(Refusal::TooLong) } else { Ok(()) }
            }
            (Operation::Send, _) => match self.receives.front() {
                Some((_, buf)) if len > buf.len() as usize => Err(Refusal::TooLong),
                _ => Ok(()),
            },
            (Operation::Write, current) => {
                let left = match current {
                    Current::Write { left, .. } => *left as usize,
                    _ => total as usize,
                };
                // The announced length ends with the last packet, not before and not after.
                if if ends { len == left } else { len < left } { Ok(()) } else { Err(INVALID) }
            }
            _ => Ok(()),
        }
    }

    /// The memory named is there for the peer; all of it, also when its packets come later.
    fn check_rkey(&self, packet: &Packet<'_>, memory: &Memory) -> Result<(), Refusal> {
        let needed = rights_for(packet.row().operation);
        if let Some(reth) = packet.ext.reth.filter(|reth| reth.length > 0) {
            memory.place(reth.key, reth.address, reth.length, needed)?;
        }
        if let Some(atomic) = packet.ext.atomic {
            if !atomic.address.is_multiple_of(8) {
                return Err(INVALID);
            }
            memory.place(atomic.key, atomic.address, 8, needed)?;
        }
        Ok(())
    }

    fn execute(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        match packet.row().operation {
            Operation::Send => self.execute_send(packet, io)?,
            Operation::Write => self.execute_write(packet, io)?,
            Operation::ReadRequest => self.execute_read(packet),
            Operation::Atomic => self.execute_atomic(packet, io)?,
            _ => return Err(INVALID),
        }
        Ok(())
    }

    fn execute_send(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let (tag, mut buf, filled) = match std::mem::replace(&mut self.current, Current::None) {
            Current::Send { tag, buf, filled } => (tag, buf, filled),
            _ => self.receives.pop_front().map(|(t, b)| (t, b, 0)).ok_or(Refusal::NotReady)?,
        };
        let end = filled + packet.payload.len() as u32;
        io.region.bytes_mut(&mut buf)[filled as usize..end as usize]
            .copy_from_slice(packet.payload);
        if row.position.ends() {
            io.received(tag, buf, end, packet.ext.invalidate);
            self.msn = self.msn.next();
        } else {
            self.current = Current::Send { tag, buf, filled: end };
        }
        self.executed(packet, 1);
        // The message has been delivered; a peer that takes away what it does not have is broken.
        match packet.ext.invalidate.map(|key| io.memory.invalidate(key)) {
            Some(Err(Denied)) => Err(INVALID),
            _ => Ok(()),
        }
    }

    fn execute_write(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        let row = packet.row();
        let len = packet.payload.len() as u32;
        let (key, address, left) = match (&self.current, packet.ext.reth) {
            (Current::Write { key, address, left }, _) => (*key, *address, *left),
            (_, Some(reth)) => (reth.key, reth.address, reth.length),
            _ => return Err(INVALID),
        };
        if len > 0 {
            let place = io.memory.place(key, address, len, Rights::WRITE)?;
            io.memory.write(io.region, place, packet.payload);
        }
        self.current = Current::None;
        if row.position.ends() {
            self.msn = self.msn.next();
            if row.takes_receive
                && let Some((tag, buf)) = self.receives.pop_front()
            {
                // The fabric's vocabulary has no place for the immediate data; nobody sends any.
                io.done(tag, Work::Recv(buf), Ok(0));
            }
        } else {
            let address = address.wrapping_add(u64::from(len));
            self.current = Current::Write { key, address, left: left.saturating_sub(len) };
        }
        self.executed(packet, 1);
        Ok(())
    }

    fn execute_read(&mut self, packet: &Packet<'_>) {
        let Some(reth) = packet.ext.reth else { return };
        let (psn, packets) = (packet.bth.psn, packets_of(reth.length, self.mtu));
        self.msn = self.msn.next();
        self.keep(Kept { psn, packets, reth, atomic: None });
        let read =
            ReadAnswer { psn, packets, sent: 0, reth, msn: self.msn, replay: false, counts: true };
        self.answers.push_back(Answer::Read(read));
        // The data acknowledge.
        self.expected = self.expected.add(packets);
    }

    fn execute_atomic(&mut self, packet: &Packet<'_>, io: &mut Io<'_>) -> Result<(), Refusal> {
        let (Some(atomic), psn) = (packet.ext.atomic, packet.bth.psn) else { return Err(INVALID) };
        let place = io.memory.place(atomic.key, atomic.address, 8, Rights::ATOMIC)?;
        let old = io.memory.bytes(io.region, place).first_chunk().map(|b| u64::from_ne_bytes(*b));
        let value = old.ok_or(Denied)?;
        let new = match packet.bth.opcode {
            Opcode::FetchAdd => value.wrapping_add(atomic.swap_add),
            _ if value == atomic.compare => atomic.swap_add,
            _ => value,
        };
        io.memory.write(io.region, place, &new.to_ne_bytes());
        self.msn = self.msn.next();
        let reth = Reth { address: atomic.address, key: atomic.key, length: 8 };
        self.keep(Kept { psn, packets: 1, reth, atomic: Some(value) });
        self.answers.push_back(Answer::Atomic { psn, msn: self.msn, value, replay: false });
        self.expected = self.expected.add(1);
        Ok(())
    }

    fn keep(&mut self, kept: Kept) {
        if self.kept.len() >= self.depth {
            self.kept.pop_front();
        }
        self.kept.push_back(kept);
    }

    fn executed(&mut self, packet: &Packet<'_>, packets: u32) {
        self.expected = self.expected.add(packets);
        if packet.bth.ack_request {
            self.acknowledge(packet.bth.psn, Syndrome::ACK);
        }
    }

    fn die(&mut self, psn: Psn, nak: Nak) {
        self.answers.clear();
        self.acknowledge(psn, Syndrome::Nak(nak));
    }

    /// Queues an acknowledgement. One with a higher number says all that another would have said,
    /// which therefore need not leave any more; but it may not overtake the data of a read.
    fn acknowledge(&mut self, psn: Psn, syndrome: Syndrome) {
        let answer = Answer::Acknowledge { psn, aeth: Aeth { syndrome, msn: self.msn } };
        match self.answers.back_mut() {
            Some(Answer::Acknowledge { psn: last, .. })
                if syndrome == Syndrome::ACK && last.since(psn) > 0 => {}
            Some(last @ Answer::Acknowledge { .. }) => *last = answer,
            _ => self.answers.push_back(answer),
        }
    }

    /// The next answer to send.
    pub(crate) fn transmit(&mut self, peer: Qpn, memory: &Memory) -> Option<(Outgoing, Outcome)> {
        loop {
            let read = match self.answers.front_mut()? {
                Answer::Read(read) => read,
                Answer::Acknowledge { psn, aeth } => {
                    let ext = Extended { aeth: Some(*aeth), ..Extended::default() };
                    let bth = Bth::new(Opcode::Acknowledge, peer, *psn);
                    self.answers.pop_front();
                    return Some((Outgoing::new(bth, &ext, Payload::None, 0), Outcome::Live));
                }
                Answer::Atomic { psn, msn, value, .. } => {
                    let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: *msn });
                    let ext = Extended { aeth, atomic_ack: Some(*value), ..Extended::default() };
                    let bth = Bth::new(Opcode::AtomicAcknowledge, peer, *psn);
                    self.answers.pop_front();
                    return Some((Outgoing::new(bth, &ext, Payload::None, 0), Outcome::Live));
                }
            };
            let made = read.packet(peer, self.mtu, memory);
            let (psn, replay) = (read.psn.add(read.sent), read.replay);
            read.sent += 1;
            if made.is_err() || read.sent >= read.packets {
                self.answers.pop_front();
            }
            match made {
                Ok(outgoing) => return Some((outgoing, Outcome::Live)),
                // The peer has got these data before, and has taken the memory back since.
                Err(Denied) if replay => {}
                Err(Denied) => {
                    self.die(psn, Nak::RemoteAccess);
                    let (outgoing, _) = self.transmit(peer, memory)?;
                    return Some((outgoing, Outcome::Dead));
                }
            }
        }
    }

    /// Whether all that there is to say is that requests have been executed.
    pub(crate) fn only_acknowledges(&self) -> bool {
        let is_plain = |answer: &Answer| {
            matches!(answer, Answer::Acknowledge { aeth, .. }
                if matches!(aeth.syndrome, Syndrome::Ack(_)))
        };
        self.answers.iter().all(is_plain)
    }

    /// Gives every receive back, the unfinished one first, and forgets all answers but a refusal.
    pub(crate) fn flush(&mut self, io: &mut Io<'_>) {
        if let Current::Send { tag, buf, .. } = std::mem::replace(&mut self.current, Current::None)
        {
            io.done(tag, Work::Recv(buf), Err(Fault::Flushed));
        }
        while let Some((tag, buf)) = self.receives.pop_front() {
            io.done(tag, Work::Recv(buf), Err(Fault::Flushed));
        }
        self.answers.retain(|answer| {
            let Answer::Acknowledge { aeth, .. } = answer else { return false };
            matches!(aeth.syndrome, Syndrome::Nak(nak) if nak != Nak::Sequence)
        });
        self.kept.clear();
    }
}

impl Answer {
    /// The unfinished first answer to a read or atomic: one of those that the peer may have outstanding.
    fn is_new(&self) -> bool {
        match self {
            Answer::Acknowledge { .. } => false,
            Answer::Atomic { replay, .. } => !replay,
            Answer::Read(read) => read.counts,
        }
    }
}

impl ReadAnswer {
    /// The packet that is next.
    fn packet(&self, peer: Qpn, mtu: u32, memory: &Memory) -> Result<Outgoing, Denied> {
        let position = match (self.sent == 0, self.sent + 1 >= self.packets) {
            (true, true) => Position::Only,
            (true, false) => Position::First,
            (false, false) => Position::Middle,
            (false, true) => Position::Last,
        };
        let opcode = match position {
            Position::Only => Opcode::ReadResponseOnly,
            Position::First => Opcode::ReadResponseFirst,
            Position::Middle => Opcode::ReadResponseMiddle,
            Position::Last => Opcode::ReadResponseLast,
        };
        let skipped = u64::from(self.sent) * u64::from(mtu);
        let len = u64::from(self.reth.length).saturating_sub(skipped).min(u64::from(mtu)) as u32;
        let payload = if len == 0 {
            Payload::None
        } else {
            let address = self.reth.address.wrapping_add(skipped);
            Payload::Exposed(memory.place(self.reth.key, address, len, Rights::READ)?)
        };
        let aeth = Some(Aeth { syndrome: Syndrome::ACK, msn: self.msn });
        let bth = Bth::new(opcode, peer, self.psn.add(self.sent));
        Ok(Outgoing::new(bth, &Extended { aeth, ..Extended::default() }, payload, len))
    }
}

/// What a peer must be allowed to for an operation.
fn rights_for(operation: Operation) -> Rights {
    match operation {
        Operation::Write => Rights::WRITE,
        Operation::ReadRequest => Rights::READ,
        Operation::Atomic => Rights::ATOMIC,
        _ => Rights::NONE,
    }
}

/// How many packets, hence sequence numbers, `len` bytes take: at least one.
pub(crate) fn packets_of(len: u32, mtu: u32) -> u32 {
    len.div_ceil(mtu.max(1)).max(1)
}
