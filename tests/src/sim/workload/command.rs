//! One command of a simulated host, with its data.

use std::fmt;

use nvme::copy::{Copy, CopyFlags, CopyRange};
use nvme::fabrics::{Disconnect, PropertySet};
use nvme::feature::{FeatureId, SetFeatures};
use nvme::identify::{Cns, Identify};
use nvme::log::{GetLogPage, LogId};
use nvme::property::Property;
use nvme::sqe::DsmRange;
use nvme::{AdminOpcode, IoOpcode, PAGE_BYTES, Sgl, Sqe};

use super::ns_command::NsCommand;
use super::reservation::Order;
use crate::sim::block_stamp;
use crate::sim::oracle::blocks::{Moment, SECTOR_BYTES, Span, Value};

/// Content of a buffer before something is read into it.
const POISON: u8 = 0xee;

/// Operation of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Kind {
    /// Read.
    Read,
    /// Write; without data Write Zeroes.
    Write {
        /// Force Unit Access.
        fua: bool,
    },
    /// Write Zeroes.
    Zeroes {
        /// Force Unit Access.
        fua: bool,
        /// Deallocate as well.
        deallocate: bool,
    },
    /// Dataset Management with deallocate: the span and others.
    Deallocate(Vec<Span>),
    /// Copy of these spans, in this format (0 or 1), to the span.
    Copy {
        /// Sources, of the same namespace.
        from: Vec<Span>,
        /// Descriptor format.
        format: u8,
        /// Force Unit Access.
        fua: bool,
    },
    /// Write Uncorrectable: the span becomes unreadable.
    Spoil,
    /// Flush.
    Flush,
    /// Compare with these values.
    Compare(Vec<Value>),
    /// Reservation Register, Acquire or Release.
    Order(Order),
    /// Set Features 84h: protects the namespace, or removes the protection.
    Protect(bool),
    /// Format NVM.
    Format {
        /// With an erase of user data requested.
        erase: bool,
        /// Index of the format.
        index: u8,
        /// log2 of the sectors in a block of that format.
        shift: u8,
    },
    /// Abort of a command on this queue, with this id.
    Abort(u16, u16),
    /// Disconnect: deletes its queue.
    Leave,
    /// An admin command without effect on namespaces.
    Admin(Question),
    /// Property Set, CC.EN = 0, with commands outstanding.
    Disable,
    /// Namespace Management, or I/O on a host-created namespace. Its span is unused.
    Made(NsCommand),
    /// An invalid command.
    Wrong(Mistake),
}

/// Request of an admin command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Question {
    /// Identify Controller.
    Controller,
    /// Identify Namespace.
    Namespace,
    /// Active namespace list.
    Namespaces,
    /// Changed Namespace List, which acknowledges the event.
    Changed,
    /// ANA log, which acknowledges the event.
    Paths,
    /// Get Features, Number of Queues.
    Queues,
}

/// Deliberate error in a command.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mistake {
    /// Beyond the end.
    Range,
    /// Unknown namespace.
    Namespace,
    /// Unknown opcode.
    Opcode,
}

/// A command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Op {
    /// Operation.
    pub kind: Kind,
    /// Its host.
    pub host: usize,
    /// Unique, not 0: the value in its data.
    pub id: u32,
    /// Blocks.
    pub span: Span,
    /// When it was sent.
    pub began: Moment,
    /// Position in a fused command: 1, 2, or 0 for none.
    pub half: u8,
    /// log2 of the sectors in a block, as known to its host.
    pub shift: u8,
}

impl Op {
    /// Whether it is an admin command.
    pub fn is_admin(&self) -> bool {
        match &self.kind {
            Kind::Admin(_) | Kind::Abort(..) | Kind::Protect(_) | Kind::Disable => true,
            Kind::Format { .. } => true,
            Kind::Made(deed) => deed.is_admin(),
            _ => false,
        }
    }

    /// Whether it is an I/O command on blocks of its namespace.
    pub fn is_for_blocks(&self) -> bool {
        match self.kind {
            Kind::Read | Kind::Compare(_) | Kind::Flush | Kind::Order(_) => true,
            _ => self.changes().is_some() && !self.is_admin(),
        }
    }

    /// The blocks that it changes, if any.
    pub fn changes(&self) -> Option<&[Span]> {
        match &self.kind {
            Kind::Write { .. }
            | Kind::Zeroes { .. }
            | Kind::Copy { .. }
            | Kind::Spoil
            | Kind::Format { .. } => Some(std::slice::from_ref(&self.span)),
            Kind::Deallocate(spans) => Some(spans),
            _ => None,
        }
    }

    /// The new value of the blocks that it changes, if known.
    pub fn value(&self) -> Option<Value> {
        match &self.kind {
            Kind::Write { .. } => Some(Value::Write(self.id)),
            Kind::Zeroes { .. } | Kind::Deallocate(_) => Some(Value::Zeros),
            Kind::Format { .. } => Some(Value::Zeros),
            Kind::Spoil => Some(Value::Unreadable),
            _ => None,
        }
    }

    /// Whether it transfers data of blocks.
    pub fn moves_blocks(&self) -> bool {
        matches!(self.kind, Kind::Read | Kind::Write { .. } | Kind::Compare(_))
    }

    /// Whether it is an I/O command that changes blocks without transferring their data.
    pub fn is_bare(&self) -> bool {
        self.changes().is_some() && !self.moves_blocks() && !self.is_admin()
    }

    /// Whether it queries the block size.
    pub fn asks_shape(&self) -> bool {
        self.kind == Kind::Admin(Question::Namespace)
    }

    /// The blocks that it reads.
    pub fn reads(&self) -> &[Span] {
        match &self.kind {
            Kind::Read | Kind::Compare(_) => std::slice::from_ref(&self.span),
            Kind::Copy { from, .. } => from,
            _ => &[],
        }
    }

    /// Bytes of data.
    pub fn data_bytes(&self) -> u32 {
        match &self.kind {
            Kind::Read | Kind::Write { .. } | Kind::Compare(_) => self.span.blocks * SECTOR_BYTES,
            Kind::Deallocate(spans) => spans.len() as u32 * DsmRange::BYTES as u32,
            Kind::Copy { from, format, .. } => from.len() as u32 * range_bytes(*format),
            Kind::Order(order) => order.data_bytes(),
            Kind::Made(deed) => deed.data_bytes(),
            Kind::Spoil | Kind::Flush | Kind::Zeroes { .. } | Kind::Disable => 0,
            Kind::Abort(..) | Kind::Protect(_) | Kind::Format { .. } | Kind::Leave => 0,
            Kind::Admin(Question::Queues) => 0,
            Kind::Admin(_) => PAGE_BYTES as u32,
            Kind::Wrong(Mistake::Opcode) => 0,
            Kind::Wrong(_) => SECTOR_BYTES << self.shift,
        }
    }

    /// The submission queue entry.
    pub fn sqe(&self) -> Sqe {
        let nsid = self.span.space as u32 + 1;
        let (slba, nlb_z) = self.range(&self.span);
        let io = |opcode| Sqe::io(opcode, nsid).with_range(slba, nlb_z);
        let sqe = match &self.kind {
            Kind::Read => io(IoOpcode::READ),
            Kind::Write { fua } => io(IoOpcode::WRITE).with_fua(*fua),
            Kind::Zeroes { fua, deallocate } => {
                io(IoOpcode::WRITE_ZEROES).with_fua(*fua).with_deac(*deallocate)
            }
            Kind::Deallocate(spans) => Sqe::deallocation(nsid, spans.len() as u8 - 1),
            Kind::Copy { from, format, fua } => {
                let flags = CopyFlags(0).with_nr_z(from.len() as u8 - 1).with_format(*format);
                let flags = flags.with_fua(*fua);
                Copy { sdlba: slba, flags }.emit(nsid, Sgl::NONE)
            }
            Kind::Spoil => io(IoOpcode::WRITE_UNCORRECTABLE),
            Kind::Flush => Sqe::io(IoOpcode::FLUSH, nsid),
            Kind::Compare(_) => io(IoOpcode::COMPARE),
            Kind::Admin(Question::Controller) => Identify::new(Cns::CONTROLLER, 0).emit(Sgl::NONE),
            Kind::Admin(Question::Namespace) => Identify::new(Cns::NAMESPACE, nsid).emit(Sgl::NONE),
            Kind::Admin(Question::Namespaces) => {
                Identify::new(Cns::ACTIVE_NAMESPACES, 0).emit(Sgl::NONE)
            }
            Kind::Admin(Question::Changed) => {
                let dwords = PAGE_BYTES as u32 / 4;
                let log = GetLogPage::new(LogId::CHANGED_NAMESPACES, 0, dwords);
                GetLogPage { rae: false, ..log }.emit(Sgl::NONE)
            }
            Kind::Admin(Question::Paths) => {
                let log = GetLogPage::new(LogId::ANA, 0, PAGE_BYTES as u32 / 4);
                GetLogPage { rae: false, ..log }.emit(Sgl::NONE)
            }
            Kind::Admin(Question::Queues) => {
                Sqe { cdw10: 7, ..Sqe::admin(AdminOpcode::GET_FEATURES) }
            }
            Kind::Order(order) => order.sqe(nsid),
            Kind::Made(deed) => deed.sqe(),
            Kind::Protect(on) => {
                let set = SetFeatures::new(FeatureId::NAMESPACE_WRITE_PROTECT, u32::from(*on));
                SetFeatures { nsid, ..set }.emit(Sgl::NONE)
            }
            Kind::Format { erase, index, .. } => {
                let cdw10 = u32::from(*erase) << 9 | u32::from(*index);
                Sqe { cdw10, ..Sqe::admin(AdminOpcode::FORMAT_NVM).with_nsid(nsid) }
            }
            Kind::Abort(queue, cid) => {
                let cdw10 = u32::from(*cid) << 16 | u32::from(*queue);
                Sqe { cdw10, ..Sqe::admin(AdminOpcode::ABORT) }
            }
            Kind::Leave => Disconnect { recfmt: 0 }.emit(),
            Kind::Disable => PropertySet::new(Property::CC, 0).emit(),
            Kind::Wrong(Mistake::Range) => io(IoOpcode::READ).with_range(1 << 40, 0),
            Kind::Wrong(Mistake::Namespace) => io(IoOpcode::READ).with_nsid(9),
            Kind::Wrong(Mistake::Opcode) => Sqe::io(IoOpcode(0x79), nsid),
        };
        sqe.with_flags(sqe.flags.with_fuse(self.half))
    }

    /// Fills the data to send; or the buffer to read into with `POISON`.
    pub fn fill(&self, bytes: &mut [u8]) {
        let (nsid, block) = (self.span.space as u8 + 1, SECTOR_BYTES as usize);
        match &self.kind {
            Kind::Write { .. } => {
                for (block, lba) in bytes.chunks_exact_mut(block).zip(self.span.lba..) {
                    block_stamp::fill(self.id, nsid, lba, block);
                }
            }
            Kind::Compare(values) => {
                let places = bytes.chunks_exact_mut(block).zip(self.span.lba..);
                for ((block, lba), value) in places.zip(values) {
                    match value {
                        Value::Zeros | Value::Unreadable => block.fill(0),
                        Value::Write(write) => block_stamp::fill(*write, nsid, lba, block),
                        Value::Moved(write, home) => block_stamp::fill(*write, nsid, *home, block),
                    }
                }
            }
            Kind::Deallocate(spans) => {
                for (bytes, span) in bytes.chunks_exact_mut(DsmRange::BYTES).zip(spans) {
                    let (slba, nlb_z) = self.range(span);
                    let blocks = u32::from(nlb_z) + 1;
                    bytes.copy_from_slice(&DsmRange { attributes: 0, blocks, slba }.emit());
                }
            }
            Kind::Copy { from, format, .. } => {
                bytes.fill(0);
                let places = bytes.chunks_exact_mut(range_bytes(*format) as usize);
                for (bytes, span) in places.zip(from) {
                    let (slba, nlb_z) = self.range(span);
                    bytes[..CopyRange::BYTES].copy_from_slice(&CopyRange { slba, nlb_z }.emit());
                }
            }
            Kind::Order(order) => order.fill(self.host, bytes),
            Kind::Made(deed) if deed.fill(self.id, bytes) => {}
            _ => bytes.fill(POISON),
        }
    }

    /// A span in blocks as its host knows them: the first, and the number, minus one.
    fn range(&self, span: &Span) -> (u64, u16) {
        let [first, blocks] = [span.lba, span.blocks].map(|sectors| sectors >> self.shift);
        (first.into(), (blocks - 1) as u16)
    }
}

/// Length of a range of a Copy command.
fn range_bytes(format: u8) -> u32 {
    if format == 0 { 32 } else { 40 }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Span { space, lba, blocks } = self.span;
        let nsid = space + 1;
        if self.half > 0 {
            f.write_str("fused ")?;
        }
        match &self.kind {
            Kind::Read => write!(f, "read of namespace {nsid}, {blocks} from {lba}"),
            Kind::Write { fua } => {
                let fua = if *fua { ", FUA" } else { "" };
                write!(f, "write {} of namespace {nsid}, {blocks} from {lba}{fua}", self.id)
            }
            Kind::Zeroes { fua, .. } => {
                let fua = if *fua { ", FUA" } else { "" };
                write!(f, "zeroes {} of namespace {nsid}, {blocks} from {lba}{fua}", self.id)
            }
            Kind::Deallocate(spans) => {
                write!(f, "deallocation {} of namespace {nsid}:", self.id)?;
                spans.iter().try_for_each(|s| write!(f, " {} from {}", s.blocks, s.lba))
            }
            Kind::Copy { from, format, fua } => {
                let fua = if *fua { ", FUA" } else { "" };
                write!(f, "copy {} in namespace {nsid}, to {lba}, format {format}{fua}:", self.id)?;
                from.iter().try_for_each(|s| write!(f, " {} from {}", s.blocks, s.lba))
            }
            Kind::Spoil => {
                write!(
                    f,
                    "write uncorrectable {} of namespace {nsid}, {blocks} from {lba}",
                    self.id
                )
            }
            Kind::Flush => write!(f, "flush of namespace {nsid}"),
            Kind::Compare(_) => write!(f, "compare of namespace {nsid}, {blocks} from {lba}"),
            Kind::Order(order) => write!(f, "order about namespace {nsid}: {order}"),
            Kind::Abort(queue, cid) => write!(f, "abort of command {cid:04x} on queue {queue}"),
            Kind::Protect(true) => write!(f, "write protection of namespace {nsid}"),
            Kind::Protect(false) => write!(f, "no write protection of namespace {nsid}"),
            Kind::Format { shift, .. } => {
                let bytes = SECTOR_BYTES << shift;
                write!(f, "format {} of namespace {nsid} to blocks of {bytes} bytes", self.id)
            }
            Kind::Leave => f.write_str("deletion of the queue"),
            Kind::Disable => f.write_str("reset"),
            Kind::Made(deed) => write!(f, "{deed}"),
            Kind::Admin(question) => write!(f, "question: {question:?}"),
            Kind::Wrong(mistake) => write!(f, "mistake: {mistake:?}"),
        }
    }
}
