//! One NVMe queue on one queue pair: slots, command ids, sent capsules, received responses.

use std::time::Instant;

use nvme::{AdminOpcode, Cqe, IoOpcode, Sgl, Sqe, cm};
use rdma::{Buf, FabricError, Qp, QpLimits, Reason, ReceivedWith, RemoteRegion, Tag, Work};

use super::end_reason::{EndReason, Violation};
use super::request::{Data, Io, Options, Refused, Response};

/// RDMA READs of the target that are served concurrently, if the device supports it.
const READS: u8 = 128;

/// With at least this number of outstanding commands, a capsule that is not short leaves its data
/// to be read by the target: the additional round trip costs less than the packets.
const FEW: u16 = 4;

/// Bits of a command id that number the slot; the rest counts its uses, so that a duplicate
/// completion of an earlier command is distinguished from the first one of a later command.
const SLOT_BITS: u32 = 12;

/// The largest queue, in entries.
pub(super) const MOST_ENTRIES: u16 = 1 << SLOT_BITS;

/// Owner of a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Owner {
    /// A command of the caller, with its tag.
    Caller(u64),
    /// The Disconnect by which the caller deletes the queue.
    Leave(u64),
    /// A command of the initialization or of the shutdown.
    Step,
    /// A Keep Alive.
    KeepAlive,
    /// An Asynchronous Event Request.
    Event,
}

/// Data of an outstanding command.
#[derive(Debug)]
enum Held {
    /// As supplied by the caller: already in the capsule, or exposed by the caller.
    Plain(Data),
    /// Exposed for this command.
    Once(RemoteRegion),
}

impl Held {
    /// Returns the key that the completion may invalidate.
    fn key_to_invalidate(&self) -> Option<u32> {
        match self {
            Held::Once(exposed) if exposed.bears_invalidation() => Some(exposed.remote().key),
            _ => None,
        }
    }
}

/// State of the deletion of a queue by the caller.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum CloseState {
    /// The queue is not being deleted.
    Not,
    /// Disconnect was sent: no other command is sent.
    Asked,
    /// Disconnect was completed: the end of the connection is no fault any more.
    Done,
}

#[derive(Debug)]
struct OutstandingCommand {
    owner: Owner,
    what: &'static str,
    held: Held,
    sent: Instant,
    deadline: Option<Instant>,
}

#[derive(Debug)]
struct Slot {
    /// Number of uses, modulo the range in a command id.
    uses: u16,
    command: Option<OutstandingCommand>,
}

/// Result of a command of this queue.
#[derive(Debug)]
pub(super) struct Finished {
    pub(super) owner: Owner,
    pub(super) data: Data,
}

/// A command to send.
pub(super) struct Sending {
    pub(super) owner: Owner,
    pub(super) sqe: Sqe,
    pub(super) data: Data,
    pub(super) deadline: Option<Instant>,
}

/// A command or queue that exceeds its timeout.
#[derive(Clone, Copy, Debug)]
pub(super) struct LateCompletion {
    pub(super) what: &'static str,
    pub(super) sent: Instant,
}

/// An NVMe queue.
#[derive(Debug)]
pub(super) struct Queue {
    qid: u16,
    entries: u16,
    qp: Option<Qp>,
    up: bool,
    /// The target has closed its connection.
    is_closed_by_target: bool,
    leave: CloseState,
    slots: Vec<Slot>,
    free: Vec<u16>,
    /// Number of outstanding commands of the caller.
    callers: u16,
    /// Number of Sends that have not completed.
    sends: u32,
    limits: QpLimits,
    /// Maximum in-capsule data, in bytes.
    in_capsule_bytes: u32,
    /// Maximum size of a message without additional cost, as reported by the fabric.
    short_message_bytes: u32,
    /// The last error of exposing data.
    trouble: Option<FabricError>,
}

impl Queue {
    /// Creates a queue without a connection. All its memory is allocated here.
    pub(super) fn new(qid: u16, entries: u16, in_capsule_bytes: u32) -> Queue {
        let slots = entries - 1;
        Queue {
            qid,
            entries,
            qp: None,
            up: false,
            is_closed_by_target: false,
            leave: CloseState::Not,
            slots: (0..slots).map(|_| Slot { uses: 0, command: None }).collect(),
            free: (0..slots).rev().collect(),
            callers: 0,
            sends: 0,
            limits: QpLimits {
                receives: entries.into(),
                sends: u32::from(entries) * 2,
                reads: READS,
            },
            in_capsule_bytes,
            short_message_bytes: u32::MAX,
            trouble: None,
        }
    }

    /// Requests the connection and posts a receive for every command that can be outstanding.
    pub(super) fn open(
        &mut self,
        options: &Options,
        cntlid: u16,
        io: &mut Io<'_>,
    ) -> Result<(), EndReason> {
        let request = cm::Request {
            recfmt: 0,
            qid: self.qid,
            hrqsize: self.entries,
            hsqsize_z: self.entries - 1,
            cntlid,
        };
        let connected = io.fabric.connect(options.to, &request.emit(), self.limits);
        let qp = connected.map_err(EndReason::Fabric)?;
        self.qp = Some(qp);
        for _ in 0..self.entries {
            let Some(buf) = io.pool.take_cell() else {
                return Err(EndReason::NoMemory);
            };
            io.fabric.post(qp, self.tag(), Work::Recv(buf));
        }
        Ok(())
    }

    pub(super) fn qid(&self) -> u16 {
        self.qid
    }

    pub(super) fn entries(&self) -> u16 {
        self.entries
    }

    pub(super) fn qp(&self) -> Option<Qp> {
        self.qp
    }

    pub(super) fn is_up(&self) -> bool {
        self.up
    }

    pub(super) fn established(&mut self, qp: Qp, io: &Io<'_>) {
        self.up = true;
        self.short_message_bytes = io.fabric.short_message_bytes(qp);
    }

    pub(super) fn gone(&mut self, reason: &Reason) {
        self.qp = None;
        self.is_closed_by_target = self.up && *reason == Reason::Peer;
    }

    pub(super) fn is_closed_by_target(&self) -> bool {
        self.is_closed_by_target
    }

    /// State of the deletion by the caller.
    pub(super) fn leave(&self) -> CloseState {
        self.leave
    }

    pub(super) fn set_leave(&mut self, leave: CloseState) {
        self.leave = leave;
    }

    /// Number of outstanding commands of the caller.
    pub(super) fn callers(&self) -> u16 {
        self.callers
    }

    pub(super) fn is_idle(&self) -> bool {
        self.free.len() == self.slots.len()
    }

    /// Returns the id of the caller's command with this tag.
    pub(super) fn command_id(&self, tag: u64) -> Option<u16> {
        let is_it = |slot: &Slot| slot.command.as_ref().is_some_and(|c| c.owner.tag() == Some(tag));
        let slot = self.slots.iter().position(is_it)?;
        Some(self.slots[slot].uses << SLOT_BITS | slot as u16)
    }

    /// Number of slots.
    pub(super) fn slots(&self) -> u16 {
        self.entries - 1
    }

    /// Whether only Sends that complete free slots.
    pub(super) fn is_waiting_for_sends(&self) -> bool {
        self.sends >= self.limits.sends
    }

    /// Tag of all work of this queue.
    fn tag(&self) -> Tag {
        self.qid.into()
    }

    /// Sends a command; its data are returned with its completion, or with the error.
    pub(super) fn send(
        &mut self,
        sending: Sending,
        io: &mut Io<'_>,
    ) -> Result<(), (Data, Refused)> {
        let Sending { owner, sqe, data, deadline } = sending;
        let Some(qp) = self.qp.filter(|_| self.up) else { return Err((data, Refused::NotReady)) };
        if self.is_waiting_for_sends() {
            return Err((data, Refused::Full));
        }
        let Some(&slot) = self.free.last() else { return Err((data, Refused::Full)) };
        let len = match data.len() {
            Some(len) if nvme::U24::new(len).is_some() => len,
            _ => return Err((data, Refused::Data)),
        };
        let inside = self.qid != 0
            && len > 0
            && len <= self.in_capsule_bytes
            && sqe.direction() == Direction::ToController
            && (self.callers < FEW || Sqe::BYTES as u32 + len <= self.short_message_bytes);
        let mut capsule = match inside.then(|| capsule_with(&data, len, io)).flatten() {
            Some(capsule) => capsule,
            None => match io.pool.take_cell() {
                Some(cell) => cell,
                None => return Err((data, Refused::NoBuffer)),
            },
        };
        let (held, sgl) = match capsule.len() > Sqe::BYTES as u32 {
            true => (Held::Plain(data), Sgl::in_capsule(0, len)),
            false => match expose(qp, data, io) {
                Ok(exposed) => exposed,
                Err((data, why)) => {
                    self.trouble = why;
                    io.pool.give(capsule);
                    return Err((data, Refused::Data));
                }
            },
        };
        self.free.pop();
        let entry = &mut self.slots[usize::from(slot)];
        entry.uses = entry.uses.wrapping_add(1) & (u16::MAX >> SLOT_BITS);
        let cid = entry.uses << SLOT_BITS | slot;
        let what = sqe.name(self.qid);
        entry.command = Some(OutstandingCommand { owner, what, held, sent: io.now, deadline });
        self.callers += u16::from(owner.is_caller());
        self.sends += 1;
        let bytes = sqe.with_cid(cid).with_sgl(sgl).emit();
        io.pool.bytes_mut(&mut capsule)[..Sqe::BYTES].copy_from_slice(&bytes);
        io.fabric.post(qp, self.tag(), Work::Send { from: capsule, invalidate: None });
        Ok(())
    }

    /// Takes the last error of exposing data, if any.
    pub(super) fn trouble(&mut self) -> Option<FabricError> {
        self.trouble.take()
    }

    /// A Send has completed.
    pub(super) fn sent(&mut self) {
        self.sends = self.sends.saturating_sub(1);
    }

    /// Handles a response of `len` bytes at the start of the window of `buf`, which the caller retains. It
    /// may have invalidated a key: that of its own command, if the command requested it. Immediate data
    /// are ignored, as Linux does.
    pub(super) fn response(
        &mut self,
        buf: &Buf,
        len: u32,
        with: ReceivedWith,
        io: &mut Io<'_>,
    ) -> Result<(Finished, Response), Violation> {
        let bytes = io.pool.bytes(buf).first_chunk();
        let cqe = match (len as usize, bytes) {
            (Cqe::BYTES, Some(bytes)) => Cqe::parse(bytes),
            _ => return Err(Violation::Length(len)),
        };
        let unknown = Violation::CommandId(cqe.cid);
        let slot = cqe.cid & (MOST_ENTRIES - 1);
        let entry = self.slots.get(usize::from(slot)).ok_or(unknown)?;
        let command = entry.command.as_ref().ok_or(unknown)?;
        if entry.uses != cqe.cid >> SLOT_BITS {
            return Err(unknown);
        }
        if let ReceivedWith::Invalidate(key) = with
            && command.held.key_to_invalidate() != Some(key)
        {
            return Err(Violation::Key(key));
        }
        let finished = self.finish(slot, io).ok_or(unknown)?;
        Ok((finished, Response { status: cqe.status, result: cqe.result }))
    }

    /// Posts a receive buffer again.
    pub(super) fn receive(&self, mut buf: Buf, io: &mut Io<'_>) {
        match self.qp {
            Some(qp) => {
                let whole = buf.capacity();
                buf.select(0, whole);
                io.fabric.post(qp, self.tag(), Work::Recv(buf));
            }
            None => io.pool.give(buf),
        }
    }

    /// Takes the next command that will not be completed.
    pub(super) fn lose(&mut self, io: &mut Io<'_>) -> Option<Finished> {
        let slot = self.slots.iter().position(|slot| slot.command.is_some())?;
        self.finish(slot as u16, io)
    }

    /// Returns the command that has exceeded its timeout most, and the earliest deadline of the others.
    pub(super) fn late(&self, now: Instant) -> (Option<LateCompletion>, Option<Instant>) {
        let commands = || self.slots.iter().filter_map(|slot| slot.command.as_ref());
        let late = commands()
            .filter(|command| command.deadline.is_some_and(|deadline| deadline <= now))
            .min_by_key(|command| command.sent)
            .map(|command| LateCompletion { what: command.what, sent: command.sent });
        (late, commands().filter_map(|command| command.deadline).min())
    }

    fn finish(&mut self, slot: u16, io: &mut Io<'_>) -> Option<Finished> {
        let command = self.slots.get_mut(usize::from(slot))?.command.take()?;
        self.free.push(slot);
        self.callers -= u16::from(command.owner.is_caller());
        let data = match command.held {
            Held::Plain(data) => data,
            Held::Once(exposed) => Data::Buf(io.fabric.deregister_remote(exposed)),
        };
        Some(Finished { owner: command.owner, data })
    }
}

impl Owner {
    fn is_caller(self) -> bool {
        self.tag().is_some()
    }

    /// Returns the caller's tag.
    pub(super) fn tag(self) -> Option<u64> {
        match self {
            Owner::Caller(tag) | Owner::Leave(tag) => Some(tag),
            Owner::Step | Owner::KeepAlive | Owner::Event => None,
        }
    }
}

impl Data {
    /// Length in bytes; `None` if the data exceed their window.
    fn len(&self) -> Option<u32> {
        match self {
            Data::None => Some(0),
            Data::Buf(buf) => Some(buf.len()),
            Data::Exposed { memory, at, len } => {
                at.checked_add(*len).filter(|end| *end <= memory.remote().len).map(|_| *len)
            }
        }
    }

    /// Returns the buffer of a command of the session itself, which uses no other data.
    pub(super) fn into_buf(self) -> Option<Buf> {
        match self {
            Data::Buf(buf) => Some(buf),
            _ => None,
        }
    }
}

/// Direction of the data transfer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Direction {
    ToController,
    Otherwise,
}

/// Properties of a command to be sent.
trait Outgoing {
    fn direction(&self) -> Direction;
    fn name(&self, qid: u16) -> &'static str;
}

impl Outgoing for Sqe {
    /// Bits 1:0 of the opcode, or of the fabrics command type.
    fn direction(&self) -> Direction {
        let code = if self.is_fabrics() { self.fabrics_type().0 } else { self.opcode };
        if code & 3 == 1 { Direction::ToController } else { Direction::Otherwise }
    }

    fn name(&self, qid: u16) -> &'static str {
        let name = match (self.is_fabrics(), qid) {
            (true, _) => self.fabrics_type().name(),
            (false, 0) => AdminOpcode(self.opcode).name(),
            (false, _) => IoOpcode(self.opcode).name(),
        };
        name.unwrap_or("a command")
    }
}

/// Returns a capsule with a copy of the data after the command; `None` if the pool has none that large.
fn capsule_with(data: &Data, len: u32, io: &mut Io<'_>) -> Option<Buf> {
    let mut capsule = io.pool.take_receive()?;
    let total = Sqe::BYTES as u32 + len;
    if capsule.len() < total {
        io.pool.give(capsule);
        return None;
    }
    let start = capsule.start();
    capsule.select(start, total);
    let into = &mut io.pool.bytes_mut(&mut capsule)[Sqe::BYTES..];
    match data {
        Data::None => {}
        Data::Buf(buf) => into.copy_from_slice(io.pool.bytes(buf)),
        Data::Exposed { memory, at, .. } => io.pool.copy_out(memory, *at, into),
    }
    Some(capsule)
}

/// Exposes the data to the target, for this command alone if they are not exposed already.
fn expose(qp: Qp, data: Data, io: &mut Io<'_>) -> Result<(Held, Sgl), (Data, Option<FabricError>)> {
    match data {
        Data::None => Ok((Held::Plain(Data::None), Sgl::NONE)),
        Data::Buf(buf) => {
            let exposed = io
                .fabric
                .register_remote(qp, buf)
                .map_err(|(buf, why)| (Data::Buf(buf), Some(why)))?;
            let (at, invalidate) = (exposed.remote(), exposed.bears_invalidation());
            let sgl = Sgl::keyed(at.addr, at.len, at.key, invalidate).unwrap_or(Sgl::NONE);
            Ok((Held::Once(exposed), sgl))
        }
        Data::Exposed { memory, at, len } => {
            let window = memory.remote();
            let sgl = window
                .addr
                .checked_add(at.into())
                .and_then(|addr| Sgl::keyed(addr, len, window.key, false));
            let data = Data::Exposed { memory, at, len };
            match sgl {
                Some(sgl) => Ok((Held::Plain(data), sgl)),
                None => Err((data, None)),
            }
        }
    }
}
