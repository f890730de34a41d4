//! A connection of a client: reads requests and sends replies, without blocking.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rdma::Pool;

use super::operation::RequestTable;
use crate::nbd::{self, Command, Export, Handshake, Kind, Negotiated, Progress, REQUEST_BYTES};

/// Requests of a connection at once; a client that sends more waits.
pub(super) const MOST_REQUESTS: u32 = 128;
/// Bytes that are read at once; an option of the handshake fits.
const INPUT_BYTES: usize = 128 << 10;
/// Data of a write that are that long are read into their buffer, without a copy.
const DIRECT_BYTES: u32 = 16 << 10;
/// Replies of the handshake that a client may leave unread.
const MOST_UNREAD: usize = 64 << 10;
/// Parts of replies that are sent at once.
const PARTS: usize = 64;

/// What connections use together.
pub(super) struct Shared<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) requests: &'a mut RequestTable,
    /// The export of a handshake that ends now.
    pub(super) export: &'a Export,
    pub(super) piece_bytes: u32,
}

enum Stage {
    Handshake(Handshake),
    Transmission(Negotiated, Box<Export>),
}

/// A write whose data are being received.
struct Receiving {
    request: u32,
    received: u32,
    total: u32,
    /// The data are needed: the request is valid.
    is_valid: bool,
}

/// A connection.
pub(super) struct Connection {
    stream: UnixStream,
    since: Instant,
    input: Box<[u8]>,
    /// Where in it what was read and not used begins and ends.
    unused: Range<usize>,
    stage: Stage,
    receiving: Option<Receiving>,
    /// Replies of the handshake.
    greeting: Vec<u8>,
    replies: VecDeque<u32>,
    /// Bytes of the first of both that are sent.
    sent: usize,
    /// Requests that are not answered.
    requests: u32,
    /// There may be something to read.
    is_readable: bool,
    /// Nothing more is read.
    is_ending: bool,
    /// That was noted.
    has_left: bool,
    /// Nothing can be sent any more.
    is_broken: bool,
    /// The last write did not take all.
    is_blocked: bool,
    /// The data of a write were received, or a reply was sent, since [`Connection::stalled_since`].
    has_finished: bool,
    stalled_since: Option<Instant>,
}

impl Connection {
    pub(super) fn new(stream: UnixStream, since: Instant) -> io::Result<Connection> {
        stream.set_nonblocking(true)?;
        Ok(Connection {
            stream,
            since,
            input: vec![0; INPUT_BYTES].into_boxed_slice(),
            unused: 0..0,
            stage: Stage::Handshake(Handshake::default()),
            receiving: None,
            greeting: Handshake::greeting().to_vec(),
            replies: VecDeque::with_capacity(MOST_REQUESTS as usize),
            sent: 0,
            requests: 0,
            is_readable: true,
            is_ending: false,
            has_left: false,
            is_broken: false,
            is_blocked: false,
            has_finished: false,
            stalled_since: None,
        })
    }

    pub(super) fn descriptor(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Whether it would read if there were something.
    pub(super) fn wants_input(&self) -> bool {
        !self.is_ending && self.requests < MOST_REQUESTS && self.greeting.len() < MOST_UNREAD
    }

    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked
    }

    /// Since when it is in its handshake, if it is.
    pub(super) fn handshake_since(&self) -> Option<Instant> {
        match self.stage {
            Stage::Handshake(_) => Some(self.since),
            Stage::Transmission(..) => None,
        }
    }

    /// Since when it keeps a request because the client neither sends the rest of its data nor reads
    /// its reply, if it does.
    pub(super) fn stalled_since(&mut self, now: Instant) -> Option<Instant> {
        let keeps = self.receiving.is_some() || (self.is_blocked && !self.replies.is_empty());
        if std::mem::take(&mut self.has_finished) || !keeps {
            self.stalled_since = None;
        }
        keeps.then(|| *self.stalled_since.get_or_insert(now))
    }

    /// The size that the client knows, after its handshake.
    pub(super) fn size_bytes(&self) -> Option<u64> {
        match &self.stage {
            Stage::Handshake(_) => None,
            Stage::Transmission(_, export) => Some(export.size_bytes),
        }
    }

    /// Nothing is left to do.
    pub(super) fn is_over(&self) -> bool {
        self.is_ending && self.requests == 0 && (self.is_broken || !self.has_output())
    }

    fn has_output(&self) -> bool {
        !self.greeting.is_empty() || !self.replies.is_empty()
    }

    /// Reads no more. A write whose data are not all there is forgotten.
    pub(super) fn end(&mut self, s: &mut Shared<'_>) {
        self.is_ending = true;
        if let Some(Receiving { request, .. }) = self.receiving.take() {
            s.requests.free(request, s.pool);
            self.requests -= 1;
        }
    }

    /// Whether nothing more is read: once.
    pub(super) fn leaves(&mut self) -> bool {
        self.is_ending && !std::mem::replace(&mut self.has_left, true)
    }

    #[cfg(test)]
    pub(super) fn is_ending(&self) -> bool {
        self.is_ending
    }

    /// A reply is ready. If nobody is there to send it to, the next write forgets it.
    pub(super) fn reply(&mut self, request: u32) {
        self.replies.push_back(request);
    }

    /// Reads and begins requests, as many as possible. Returns whether there was anything.
    pub(super) fn read(&mut self, number: usize, s: &mut Shared<'_>) -> bool {
        let mut any = false;
        self.is_readable = true;
        loop {
            while self.wants_input() && self.step(number, s) {
                any = true;
            }
            let stuck = s.requests.waiting.contains(&number) || !self.wants_input();
            if stuck || !self.is_readable {
                return any;
            }
            match self.fill(s) {
                Ok(0) => self.end(s),
                Ok(_) => any = true,
                Err(error) if error.kind() == ErrorKind::WouldBlock => self.is_readable = false,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.abort(s),
            }
        }
    }

    /// Ends it without sending what is left.
    pub(super) fn abort(&mut self, s: &mut Shared<'_>) {
        self.is_broken = true;
        self.end(s);
        self.drop_replies(s);
    }

    /// Reads from the socket: long data into their buffer, anything else into the input.
    fn fill(&mut self, s: &mut Shared<'_>) -> io::Result<usize> {
        if let Some(receiving) = &mut self.receiving
            && receiving.is_valid
            && self.unused.is_empty()
            && receiving.total - receiving.received >= DIRECT_BYTES
        {
            let room = s.requests.room(receiving.request, receiving.received, s.pool);
            let n = self.stream.read(room)?;
            receiving.received += n as u32;
            return Ok(n);
        }
        let Range { start, end } = self.unused.clone();
        self.input.copy_within(start..end, 0);
        self.unused = 0..end - start;
        let n = self.stream.read(&mut self.input[self.unused.end..])?;
        self.unused.end += n;
        // What did not fill the buffer was all.
        self.is_readable = self.unused.end == self.input.len();
        Ok(n)
    }

    /// Uses what was read: a message of the handshake, data, or a request. Returns whether it did.
    fn step(&mut self, number: usize, s: &mut Shared<'_>) -> bool {
        if self.receiving.is_some() {
            return self.receive(s);
        }
        let input = &self.input[self.unused.clone()];
        match &mut self.stage {
            Stage::Handshake(handshake) => {
                let (used, progress) = handshake.advance(input, s.export, &mut self.greeting);
                self.unused.start += used;
                match progress {
                    Progress::More => {}
                    Progress::End => self.is_ending = true,
                    Progress::Transmission(negotiated) => {
                        self.stage = Stage::Transmission(negotiated, Box::new(s.export.clone()));
                    }
                }
                used > 0
            }
            Stage::Transmission(negotiated, export) => {
                let Some(bytes) = input.first_chunk::<REQUEST_BYTES>() else { return false };
                let command = nbd::parse(bytes);
                let is_possible = |command: &Command| command.data_bytes() <= 2 * export.most_bytes;
                let Some(command) = command.filter(is_possible) else {
                    // After that, no request can be found.
                    self.end(s);
                    return false;
                };
                if command.kind == Kind::Disconnect {
                    self.is_ending = true;
                    return false;
                }
                let checked = command.check(export, *negotiated);
                let negotiated = *negotiated;
                let (pool, piece_bytes) = (&mut *s.pool, s.piece_bytes);
                let begun =
                    s.requests.begin(number, command, checked, negotiated, pool, piece_bytes);
                let Some(request) = begun else { return false };
                self.unused.start += REQUEST_BYTES;
                self.requests += 1;
                match command.data_bytes() {
                    0 => s.requests.submit(request),
                    total => {
                        let is_valid = checked.is_ok();
                        self.receiving = Some(Receiving { request, received: 0, total, is_valid });
                    }
                }
                true
            }
        }
    }

    /// Copies data of a write from the input.
    fn receive(&mut self, s: &mut Shared<'_>) -> bool {
        let Some(receiving) = &mut self.receiving else { return false };
        let input = &self.input[self.unused.clone()];
        let left = receiving.total - receiving.received;
        let mut n = input.len().min(left as usize);
        if receiving.is_valid && n > 0 {
            let room = s.requests.room(receiving.request, receiving.received, s.pool);
            n = n.min(room.len());
            room[..n].copy_from_slice(&input[..n]);
        }
        receiving.received += n as u32;
        self.unused.start += n;
        let is_complete = receiving.received == receiving.total;
        if is_complete {
            s.requests.submit(receiving.request);
            self.receiving = None;
            self.has_finished = true;
        }
        n > 0 || is_complete
    }

    /// Sends as much as the socket takes. Returns whether it took anything.
    pub(super) fn write(&mut self, s: &mut Shared<'_>) -> bool {
        let mut any = false;
        self.is_blocked = false;
        while !self.is_broken && self.has_output() {
            match self.send(s) {
                Ok(n) => {
                    any = true;
                    self.advance(n, s);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.is_blocked = true;
                    break;
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.abort(s),
            }
        }
        if self.is_broken {
            self.drop_replies(s);
        }
        any
    }

    fn send(&self, s: &Shared<'_>) -> io::Result<usize> {
        let (requests, pool) = (&*s.requests, &*s.pool);
        let replies = self.replies.iter().flat_map(|n| requests.get(*n).parts(pool));
        let mut skip = self.sent;
        let mut slices = [IoSlice::new(&[]); PARTS];
        let mut count = 0;
        for part in std::iter::once(&self.greeting[..]).chain(replies) {
            let skipped = skip.min(part.len());
            skip -= skipped;
            if skipped < part.len() {
                slices[count] = IoSlice::new(&part[skipped..]);
                count += 1;
                if count == PARTS {
                    break;
                }
            }
        }
        (&self.stream).write_vectored(&slices[..count])
    }

    /// So many bytes more are sent: frees what is sent as a whole.
    fn advance(&mut self, n: usize, s: &mut Shared<'_>) {
        self.sent += n;
        if self.sent >= self.greeting.len() {
            self.sent -= self.greeting.len();
            self.greeting.clear();
        }
        while self.greeting.is_empty()
            && let Some(&first) = self.replies.front()
        {
            let len: usize = s.requests.get(first).parts(s.pool).map(<[u8]>::len).sum();
            if self.sent < len {
                return;
            }
            self.sent -= len;
            self.replies.pop_front();
            self.requests -= 1;
            self.has_finished = true;
            s.requests.free(first, s.pool);
        }
    }

    fn drop_replies(&mut self, s: &mut Shared<'_>) {
        while let Some(request) = self.replies.pop_front() {
            s.requests.free(request, s.pool);
            self.requests -= 1;
        }
        self.greeting.clear();
    }
}

#[cfg(test)]
mod tests;
