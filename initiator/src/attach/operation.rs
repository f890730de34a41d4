//! NBD requests under way: each is one or more requests to the namespace, its pieces.

use std::collections::VecDeque;

use nvme::Status;
use rdma::{Buf, Pool};

use super::counters::Counters;
use crate::MultipathHost;
use crate::multipath::{
    Allocation, BlockDone, BlockRequest, Failure, Namespace, Operation, Unaccepted,
};
use crate::nbd::{BlockStatus, Command, Errno, Kind, Negotiated, Reply};

/// Bits of a tag that number the piece.
const PIECE_BITS: u32 = 32;
/// The connection of a slot that is free.
const NOBODY: usize = usize::MAX - 2;
/// Commands at once that ask what is allocated; for further requests all blocks count as data. The admin
/// queue has room for these.
const MOST_QUERIES: usize = 8;

/// A request of a client.
#[derive(Debug)]
pub(super) struct Request {
    pub(super) connection: usize,
    pub(super) command: Command,
    negotiated: Negotiated,
    /// The buffers of a Read or Write, in order; empty while a piece is sent.
    bufs: Vec<Option<Buf>>,
    /// Bytes of a piece of these.
    piece_bytes: u32,
    /// Bytes of a block, when it was asked what is allocated.
    block_bytes: u32,
    sent_bytes: u32,
    /// A Flush has been sent.
    has_flushed: bool,
    /// It is in the list of those with pieces to send.
    is_ready: bool,
    outstanding: u32,
    error: Option<Errno>,
    /// The reply to Block Status, behind its head.
    status: BlockStatus,
    reply: Option<Reply>,
}

/// All requests. Slots and their lists are reused.
pub(super) struct RequestTable {
    slots: Vec<Request>,
    free: Vec<u32>,
    /// With pieces to send.
    ready: VecDeque<u32>,
    /// Changes under way of clients that have left.
    abandoned: Vec<u32>,
    /// Changes that wait for one of those, in order.
    pub(super) held: Vec<u32>,
    /// To be answered.
    answered: VecDeque<u32>,
    /// Connections and devices that wait for memory, in order.
    pub(super) waiting: VecDeque<usize>,
    /// Requests that ask what is allocated.
    queries: usize,
    counters: Counters,
}

impl RequestTable {
    pub(super) fn new(most: u32) -> RequestTable {
        let command = Command { kind: Kind::Flush, flags: 0, cookie: 0, offset: 0, len: 0 };
        let slot = |_| Request {
            connection: NOBODY,
            command,
            negotiated: Negotiated::default(),
            bufs: Vec::new(),
            piece_bytes: 1,
            block_bytes: 1,
            sent_bytes: 0,
            has_flushed: false,
            is_ready: false,
            outstanding: 0,
            error: None,
            status: BlockStatus::default(),
            reply: None,
        };
        RequestTable {
            slots: (0..most).map(slot).collect(),
            free: (0..most).rev().collect(),
            ready: VecDeque::with_capacity(most as usize),
            abandoned: Vec::new(),
            held: Vec::new(),
            answered: VecDeque::with_capacity(most as usize),
            waiting: VecDeque::new(),
            queries: 0,
            counters: Counters::default(),
        }
    }

    pub(super) fn in_use(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    pub(super) fn counters(&self) -> &Counters {
        &self.counters
    }

    pub(super) fn get(&self, n: u32) -> &Request {
        &self.slots[n as usize]
    }

    /// Begins a request with its buffers when it is the turn of its connection to get memory; `None`:
    /// it waits for that.
    pub(super) fn begin(
        &mut self,
        connection: usize,
        command: Command,
        checked: Result<(), Errno>,
        negotiated: Negotiated,
        pool: &mut Pool,
        piece_bytes: u32,
    ) -> Option<u32> {
        let begun = match self.waiting.front() {
            Some(first) if *first != connection => None,
            _ => self.take(command, checked, pool, piece_bytes),
        };
        match begun {
            Some(n) => {
                self.waiting.pop_front();
                let slot = &mut self.slots[n as usize];
                (slot.connection, slot.negotiated) = (connection, negotiated);
            }
            None if !self.waiting.contains(&connection) => self.waiting.push_back(connection),
            None => {}
        }
        begun
    }

    /// The client of a connection has left. Its changes are carried out, maybe much later: those of
    /// the same blocks that others submit from now on come after them.
    pub(super) fn abandon(&mut self, connection: usize) {
        self.forget(connection);
        let RequestTable { slots, held, .. } = self;
        let is_its = |n: &mut u32| slots[*n as usize].connection == connection;
        // They were not sent, and nobody waits for them.
        for n in held.extract_if(.., is_its).collect::<Vec<_>>() {
            self.slots[n as usize].error = Some(Errno::Shutdown);
            self.answer(n);
        }
        let is_left = |slot: &Request| {
            slot.connection == connection && slot.is_change() && slot.reply.is_none()
        };
        let left = self.slots.iter().zip(0..).filter(|(slot, _)| is_left(slot));
        self.abandoned.extend(left.map(|(_, n)| n));
    }

    /// A connection or device does not wait any more. Returns whether it did.
    pub(super) fn forget(&mut self, connection: usize) -> bool {
        let before = self.waiting.len();
        self.waiting.retain(|waiting| *waiting != connection);
        self.waiting.len() < before
    }

    /// Takes a slot, and buffers for a request.
    fn take(
        &mut self,
        command: Command,
        checked: Result<(), Errno>,
        pool: &mut Pool,
        piece_bytes: u32,
    ) -> Option<u32> {
        let n = *self.free.last()?;
        let slot = &mut self.slots[n as usize];
        let has_data = matches!(command.kind, Kind::Read | Kind::Write) && checked.is_ok();
        let mut left = if has_data { command.len } else { 0 };
        while left > 0 {
            let len = left.min(piece_bytes);
            let Some(buf) = pool.take_data(len) else {
                slot.bufs.drain(..).flatten().for_each(|buf| pool.give(buf));
                return None;
            };
            slot.bufs.push(Some(buf));
            left -= len;
        }
        self.free.pop();
        slot.command = command;
        (slot.piece_bytes, slot.sent_bytes) = (piece_bytes, 0);
        (slot.has_flushed, slot.outstanding) = (false, 0);
        (slot.error, slot.reply) = (checked.err(), None);
        slot.status.find(&command, |_| None);
        Some(n)
    }

    /// All data of a request are there: it is sent, or answered.
    pub(super) fn submit(&mut self, n: u32) {
        let slot = &self.slots[n as usize];
        match slot.command.kind {
            _ if slot.error.is_some() => self.answer(n),
            Kind::BlockStatus if self.queries < MOST_QUERIES => {
                self.queries += 1;
                self.queue(n);
            }
            // Nothing is cached here.
            Kind::Cache | Kind::BlockStatus | Kind::Disconnect | Kind::Unknown(_) => self.answer(n),
            _ if self.follows_abandoned(n) => self.held.push(n),
            _ => self.queue(n),
        }
    }

    /// Whether it is a change of blocks that a client which has left changes, too.
    fn follows_abandoned(&self, n: u32) -> bool {
        let slot = |n: u32| &self.slots[n as usize];
        slot(n).is_change() && self.abandoned.iter().any(|it| slot(*it).overlaps(slot(n)))
    }

    /// The part of a buffer that receives data from `at` on, of a write whose data are coming.
    pub(super) fn room<'a>(&'a mut self, n: u32, at: u32, pool: &'a Pool) -> &'a mut [u8] {
        let Request { bufs, piece_bytes, .. } = &mut self.slots[n as usize];
        let (piece, at) = (at / *piece_bytes, at % *piece_bytes);
        match bufs.get_mut(piece as usize).and_then(Option::as_mut) {
            Some(buf) => pool.bytes_mut(buf).get_mut(at as usize..).unwrap_or_default(),
            None => &mut [],
        }
    }

    /// Sends pieces to the namespace, as long as it accepts them. Returns whether it did anything.
    pub(super) fn send(&mut self, host: &mut MultipathHost) -> bool {
        let Some(namespace) = host.multipath().namespace().copied() else { return false };
        let mut any = false;
        while let Some(&n) = self.ready.front() {
            let slot = &mut self.slots[n as usize];
            let sent = match slot.error {
                Some(_) => Sent::All,
                None => slot.send(n, &namespace, host),
            };
            match sent {
                Sent::All => {
                    self.ready.pop_front();
                    slot.is_ready = false;
                    let is_query = slot.command.kind == Kind::BlockStatus;
                    if (slot.error.is_some() || is_query) && slot.outstanding == 0 {
                        self.queries -= usize::from(is_query);
                        self.answer(n);
                    }
                }
                Sent::Not if slot.error.is_none() => return any,
                Sent::More | Sent::Not => {}
            }
            any = true;
        }
        any
    }

    /// A piece is done.
    pub(super) fn on_done(&mut self, done: BlockDone, pool: &mut Pool) {
        let (n, piece) = ((done.tag >> PIECE_BITS) as u32, done.tag as u32 as usize);
        let Some(slot) = self.slots.get_mut(n as usize) else { return };
        slot.outstanding -= 1;
        if done.operation == Operation::LbaStatus {
            slot.on_allocation(done, pool);
            self.queries -= 1;
            return self.answer(n);
        }
        if let Some(place) = slot.bufs.get_mut(piece) {
            *place = done.data;
        }
        if let Err(why) = done.outcome {
            slot.error.get_or_insert(errno(why));
        }
        if slot.outstanding > 0 || slot.is_ready {
            return;
        }
        match slot.error.is_some() || slot.is_sent() {
            true => self.answer(n),
            // Pieces without data go one after another.
            false => self.queue(n),
        }
    }

    /// Returns the next request that has a reply.
    pub(super) fn next_answered(&mut self) -> Option<u32> {
        self.answered.pop_front()
    }

    /// Frees a request: its reply is sent, or nobody waits for it.
    pub(super) fn free(&mut self, n: u32, pool: &mut Pool) {
        let slot = &mut self.slots[n as usize];
        slot.bufs.drain(..).flatten().for_each(|buf| pool.give(buf));
        slot.connection = NOBODY;
        self.free.push(n);
    }

    fn queue(&mut self, n: u32) {
        self.slots[n as usize].is_ready = true;
        self.ready.push_back(n);
    }

    fn answer(&mut self, n: u32) {
        let slot = &mut self.slots[n as usize];
        let outcome = slot.outcome();
        self.counters.add(slot.command.kind, slot.command.len, outcome.is_ok());
        let extents_bytes = slot.status.bytes().len();
        slot.reply = Some(Reply::new(&slot.command, outcome, slot.negotiated, extents_bytes));
        self.answered.push_back(n);
        if self.abandoned.extract_if(.., |it| *it == n).count() > 0 {
            std::mem::take(&mut self.held).into_iter().for_each(|n| self.submit(n));
        }
    }
}

/// What became of an attempt to send a piece.
enum Sent {
    /// There is nothing more to send now.
    All,
    More,
    /// The namespace accepts no more requests at present.
    Not,
}

impl Request {
    /// Returns the parts of the reply in order: its head, then its data.
    pub(super) fn parts<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = &'a [u8]> {
        let head = self.reply.as_ref().map_or(&[][..], Reply::bytes);
        let extents = if self.error.is_none() { self.status.bytes() } else { &[] };
        [head, extents].into_iter().chain(self.data(pool))
    }

    /// Returns what a successful Read has read.
    pub(super) fn data<'a>(&'a self, pool: &'a Pool) -> impl Iterator<Item = &'a [u8]> {
        let has_data = self.command.kind == Kind::Read && self.error.is_none();
        self.bufs.iter().flatten().filter(move |_| has_data).map(|buf| pool.bytes(buf))
    }

    pub(super) fn outcome(&self) -> Result<(), Errno> {
        self.error.map_or(Ok(()), Err)
    }

    fn is_change(&self) -> bool {
        matches!(self.command.kind, Kind::Write | Kind::Trim | Kind::WriteZeroes)
    }

    fn overlaps(&self, other: &Request) -> bool {
        let range = |it: &Command| (it.offset, it.offset.saturating_add(it.len.into()));
        let (own, others) = (range(&self.command), range(&other.command));
        own.0 < others.1 && others.0 < own.1
    }

    fn has_data(&self) -> bool {
        matches!(self.command.kind, Kind::Read | Kind::Write)
    }

    fn is_sent(&self) -> bool {
        let needs_flush = match self.command.kind {
            Kind::Flush => true,
            Kind::Trim => self.command.is_fua(),
            _ => false,
        };
        self.sent_bytes == self.command.len && (self.has_flushed || !needs_flush)
    }

    fn send(&mut self, n: u32, namespace: &Namespace, host: &mut MultipathHost) -> Sent {
        if self.command.kind == Kind::BlockStatus {
            return self.ask(n, namespace, host);
        }
        let (operation, len) = self.next(namespace);
        let piece = self.sent_bytes / self.piece_bytes;
        let data = self.bufs.get_mut(piece as usize).and_then(Option::take);
        let request = BlockRequest {
            operation,
            slba: (self.command.offset + u64::from(self.sent_bytes))
                / u64::from(namespace.block_bytes),
            blocks: len / namespace.block_bytes,
            data,
            tag: u64::from(n) << PIECE_BITS | u64::from(piece),
        };
        match host.submit(request) {
            Ok(()) => {
                self.outstanding += 1;
                self.sent_bytes += len;
                self.has_flushed |= operation == Operation::Flush;
                if self.has_data() && !self.is_sent() { Sent::More } else { Sent::All }
            }
            Err((request, why)) => {
                if let Some(place) = self.bufs.get_mut(piece as usize) {
                    *place = request.data;
                }
                if why == Unaccepted::NotReady {
                    self.error.get_or_insert(Errno::Shutdown);
                }
                Sent::Not
            }
        }
    }

    /// Asks the target what is allocated, now: what is written later may count as a hole, and what
    /// was written before does not. If it cannot tell, all blocks count as data.
    fn ask(&mut self, n: u32, namespace: &Namespace, host: &mut MultipathHost) -> Sent {
        let request = BlockRequest {
            operation: Operation::LbaStatus,
            slba: self.command.offset / u64::from(namespace.block_bytes),
            blocks: self.command.len / namespace.block_bytes,
            data: None,
            tag: u64::from(n) << PIECE_BITS,
        };
        self.block_bytes = namespace.block_bytes;
        if namespace.tells_allocation && host.submit(request).is_ok() {
            self.outstanding += 1;
        }
        Sent::All
    }

    /// The target has answered.
    fn on_allocation(&mut self, done: BlockDone, pool: &mut Pool) {
        if let Err(why @ (Failure::NoPath | Failure::Closed)) = done.outcome {
            self.error.get_or_insert(errno(why));
        }
        let block = u64::from(self.block_bytes);
        let end = (self.command.offset + u64::from(self.command.len)) / block;
        if let Some(found) = Allocation::of(self.command.offset / block, done, pool) {
            self.status.find(&self.command, |offset| {
                let (is_data, until) = found.at(offset / block, end)?;
                Some((is_data, until * block))
            });
        }
    }

    /// The next piece: its operation and length. There is one.
    fn next(&self, namespace: &Namespace) -> (Operation, u32) {
        let left = self.command.len - self.sent_bytes;
        let most = |blocks: u32| left.min(blocks.saturating_mul(namespace.block_bytes));
        let fua = self.command.is_fua();
        match self.command.kind {
            Kind::Read => (Operation::Read, left.min(self.piece_bytes)),
            Kind::Write => (Operation::Write { fua }, left.min(self.piece_bytes)),
            Kind::Trim if left > 0 => (Operation::Discard, most(namespace.max_discard_blocks)),
            Kind::WriteZeroes => {
                let deallocate = namespace.zeroes_deallocate && !self.command.keeps_allocation();
                let operation = Operation::WriteZeroes { deallocate, fua };
                (operation, most(namespace.max_zeroes_blocks))
            }
            _ => (Operation::Flush, 0),
        }
    }
}

/// The error of the protocol for a failure.
fn errno(why: Failure) -> Errno {
    let status = match why {
        Failure::Status(status) => status.without_dnr().with_more(false).with_crd(0),
        Failure::NoPath => return Errno::Io,
        Failure::Closed => return Errno::Shutdown,
    };
    match status {
        Status::NAMESPACE_WRITE_PROTECTED => Errno::Perm,
        Status::CAPACITY_EXCEEDED => Errno::NoSpace,
        Status::INVALID_OPCODE => Errno::NotSupported,
        _ => Errno::Io,
    }
}

#[cfg(test)]
pub(super) mod tests {
    use rdma::PoolPlan;

    use super::*;

    /// A pool of 64 KiB for data, in buffers up to this length.
    pub(in crate::attach) fn pool(largest_bytes: u32) -> Pool {
        let plan = PoolPlan {
            cells: 0,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: 64 << 10,
            largest_bytes,
        };
        Pool::new(plan).expect("memory")
    }

    #[test]
    fn a_change_waits_for_those_of_the_same_blocks_of_clients_that_have_left() {
        let mut pool = pool(4096);
        let mut table = RequestTable::new(8);
        let mut begin = |table: &mut RequestTable, connection, kind, offset| {
            let command = Command { kind, flags: 0, cookie: 0, offset, len: 4096 };
            let negotiated = Negotiated::default();
            let n = table.begin(connection, command, Ok(()), negotiated, &mut pool, 4096);
            let n = n.expect("there is memory");
            table.submit(n);
            n
        };
        let old = begin(&mut table, 0, Kind::Write, 4096);
        let same = begin(&mut table, 1, Kind::Write, 4096);
        table.abandon(0);
        let read = begin(&mut table, 1, Kind::Read, 4096);
        let beside = begin(&mut table, 1, Kind::Trim, 8192);
        let new = begin(&mut table, 1, Kind::WriteZeroes, 4096);
        assert_eq!(table.ready, [old, same, read, beside], "clients know the order of their own");
        let of_next = begin(&mut table, 2, Kind::Write, 4096);
        table.abandon(2);
        assert_eq!(table.next_answered(), Some(of_next), "it was not sent, and fails");
        table.answer(old);
        assert_eq!(table.ready, [old, same, read, beside, new]);
        let newest = begin(&mut table, 3, Kind::Write, 4096);
        assert_eq!(table.ready.back(), Some(&newest));
    }

    #[test]
    fn memory_is_given_to_clients_and_devices_in_the_order_of_their_requests() {
        let mut pool = pool(4096);
        let mut table = RequestTable::new(8);
        let (client, other, device) = (0, 1, usize::MAX);
        let begin = |table: &mut RequestTable, pool: &mut Pool, connection, len| {
            let read = Command { kind: Kind::Read, flags: 0, cookie: 0, offset: 0, len };
            table.begin(connection, read, Ok(()), Negotiated::default(), pool, 4096)
        };
        let all = begin(&mut table, &mut pool, client, 64 << 10).expect("there is memory");
        assert_eq!(begin(&mut table, &mut pool, device, 64 << 10), None);
        assert_eq!(begin(&mut table, &mut pool, other, 4096), None);
        table.free(all, &mut pool);
        assert_eq!(begin(&mut table, &mut pool, other, 4096), None, "the device is first");
        let all = begin(&mut table, &mut pool, device, 64 << 10).expect("it is its turn");
        assert_eq!(begin(&mut table, &mut pool, device, 4096), None);
        table.free(all, &mut pool);
        assert_eq!(begin(&mut table, &mut pool, device, 4096), None, "now the client is");
        assert!(begin(&mut table, &mut pool, other, 4096).is_some());
        assert!(begin(&mut table, &mut pool, device, 4096).is_some());
        assert!(begin(&mut table, &mut pool, client, 4096).is_some(), "nobody waits");
    }
}
