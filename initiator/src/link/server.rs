//! The listening end: a state machine over a pool and a fabric that it borrows.
//!
//! ```text
//! REQ ──► buffers of the test, receives, accept ──► request ──► (RDMA Read, RDMA Write) ──► answer
//! ```
//!
//! A peer that violates the messages, exceeds its depth or is silent is disconnected. Everything
//! that a connection uses is allocated before it is accepted; as many exist as [`MAX_CONNECTIONS`].

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rdma::pool::PoolPlan;
use rdma::{
    Buf, Completion, Event, Fault, Incoming, Qp, QpLimits, Reason, ReceivedWith, Remote, Work,
};

use super::Io;
use super::message::{
    LinkReject, MAX_BYTES, MAX_DEPTH, MAX_OUTSTANDING_BYTES, MESSAGE_BYTES, Operation, Test,
    emit_answer, immediate_of, parse_request, sequence,
};

/// Maximum of connections at once.
pub(super) const MAX_CONNECTIONS: usize = 4;
/// A connection without a message for this time is closed.
const SILENCE: Duration = Duration::from_secs(30);
/// Work requests of the listening end for each outstanding operation: data and answer of one, and
/// as many of the previous one, whose completions may arrive later than the next request.
const SENDS_PER_OPERATION: u32 = 4;
/// Outstanding RDMA Reads to ask for: what most adapters support.
const READS: u8 = 16;

/// The pool of a listening end: 64 MiB of data, and the messages of all connections.
pub(super) const PLAN: PoolPlan = PoolPlan::without_receives(
    MAX_CONNECTIONS as u32 * MAX_DEPTH * (SENDS_PER_OPERATION + 1),
    MAX_CONNECTIONS as u64 * MAX_OUTSTANDING_BYTES as u64,
    MAX_BYTES,
);

/// The listening end.
#[derive(Default)]
pub(super) struct Server {
    connections: HashMap<Qp, Connection>,
}

/// A connection, that is one measurement.
struct Connection {
    peer: SocketAddr,
    test: Test,
    /// Operations begun, and answered.
    begun: u64,
    answered: u64,
    /// Free buffers: data of `read` and `write`, and answers.
    data: Vec<Buf>,
    answers: Vec<Buf>,
    /// Requests that wait for a buffer or a work request; `send` has no memory.
    waiting: VecDeque<Option<Remote>>,
    /// Whether the data of the request that waits (`send`) were intact.
    is_intact: bool,
    /// Work requests in use or reserved.
    sends: u32,
    last_message: Instant,
    /// `disconnect` was called.
    is_closing: bool,
}

/// What a peer did wrong: its connection ends.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum Violation {
    #[error("a message of {0} bytes")]
    Length(u32),
    #[error("memory of {0} bytes, which differs from the size of the test")]
    Memory(u32),
    #[error("more outstanding requests than the depth of the test")]
    Depth,
}

impl Server {
    /// Handles an event.
    pub(super) fn event(&mut self, now: Instant, event: Event, io: &mut Io<'_>) {
        match event {
            Event::Incoming(incoming) => self.incoming(now, incoming, io),
            Event::Done(done) => self.done(now, done, io),
            Event::Gone(qp, reason) => self.gone(qp, &reason, io),
            Event::Established(_) | Event::ListenerLost(_) => {}
        }
    }

    /// Closes connections without a message for a while. Returns when to call this again, if ever.
    pub(super) fn close_silent(&mut self, now: Instant, io: &mut Io<'_>) -> Option<Instant> {
        let mut next = None::<Instant>;
        for (qp, connection) in &mut self.connections {
            let due = connection.last_message + SILENCE;
            if connection.is_closing {
                continue;
            }
            if due <= now {
                tracing::warn!("{}: no message for {SILENCE:?}", connection.peer);
                connection.close(*qp, io);
            } else {
                next = Some(next.map_or(due, |next| next.min(due)));
            }
        }
        next
    }

    /// Closes all connections; returns whether none is left.
    pub(super) fn close_all(&mut self, io: &mut Io<'_>) -> bool {
        for (qp, connection) in &mut self.connections {
            connection.close(*qp, io);
        }
        self.connections.is_empty()
    }

    fn incoming(&mut self, now: Instant, incoming: Incoming, io: &mut Io<'_>) {
        let peer = incoming.remote;
        let test = match Test::parse(&incoming.private_data) {
            Ok(_) if self.connections.len() >= MAX_CONNECTIONS => Err(LinkReject::Busy),
            parsed => parsed,
        };
        let prepared = test.and_then(|test| {
            let connection = Connection::new(now, peer, test, io).ok_or(LinkReject::Busy)?;
            match connection.take_receives(io) {
                Some(receives) => Ok((connection, receives)),
                None => {
                    connection.release(io);
                    Err(LinkReject::Busy)
                }
            }
        });
        let (connection, receives) = match prepared {
            Ok(prepared) => prepared,
            Err(refusal) => {
                tracing::warn!("{peer}: refused: {refusal:?}");
                return io.fabric.reject(incoming, &refusal.emit());
            }
        };
        let limits = QpLimits {
            receives: connection.test.depth,
            sends: connection.sends_max(),
            reads: READS,
        };
        match io.fabric.open(incoming, limits) {
            Ok(qp) => {
                receives.into_iter().for_each(|buf| io.fabric.post(qp, 0, Work::Recv(buf)));
                io.fabric.accept(qp, &[]);
                self.connections.insert(qp, connection);
            }
            Err(error) => {
                tracing::warn!("{peer}: refused: {error}");
                receives.into_iter().for_each(|buf| io.pool.give(buf));
                connection.release(io);
            }
        }
    }

    fn done(&mut self, now: Instant, done: Completion, io: &mut Io<'_>) {
        let Completion { qp, work, outcome, with, .. } = done;
        let Some(connection) = self.connections.get_mut(&qp) else {
            return io.pool.give(work.into_buf());
        };
        if !matches!(work, Work::Recv(_)) {
            connection.sends -= 1;
        }
        let bytes = match outcome {
            Ok(bytes) if !connection.is_closing => bytes,
            outcome => {
                // A flushed one has a reason that follows: `Gone`.
                if let Err(fault) = outcome
                    && !connection.is_closing
                    && fault != Fault::Flushed
                {
                    tracing::warn!("{}: {fault}", connection.peer);
                }
                io.pool.give(work.into_buf());
                return connection.close(qp, io);
            }
        };
        if let Err(violation) = connection.completed(now, qp, work, (bytes, with), io) {
            tracing::warn!("{}: the peer violates the protocol: {violation}", connection.peer);
            connection.close(qp, io);
        }
    }

    fn gone(&mut self, qp: Qp, reason: &Reason, io: &mut Io<'_>) {
        let Some(connection) = self.connections.remove(&qp) else { return };
        let Connection { peer, test, answered, .. } = &connection;
        tracing::info!(
            "{peer}: {answered} operations {} of {} bytes, depth {}; {}",
            test.operation.name(),
            test.size_bytes,
            test.depth,
            ended_by(reason)
        );
        connection.release(io);
    }
}

impl Connection {
    /// Allocates everything but the receives; none if the pool has too little.
    fn new(now: Instant, peer: SocketAddr, test: Test, io: &mut Io<'_>) -> Option<Connection> {
        let mut connection = Connection {
            peer,
            test,
            begun: 0,
            answered: 0,
            data: Vec::new(),
            answers: Vec::new(),
            waiting: VecDeque::with_capacity(test.depth as usize),
            is_intact: true,
            sends: 0,
            last_message: now,
            is_closing: false,
        };
        let count = if test.operation.is_send() { 0 } else { test.depth };
        connection.data.extend((0..count).map_while(|_| io.pool.take_data(test.size_bytes)));
        let answers = (0..connection.sends_max()).map_while(|_| io.pool.take_cell());
        connection.answers.extend(answers);
        let is_complete = connection.data.len() == count as usize
            && connection.answers.len() == connection.sends_max() as usize;
        if is_complete {
            return Some(connection);
        }
        connection.release(io);
        None
    }

    /// Allocates the receives; none if the pool has too little.
    fn take_receives(&self, io: &mut Io<'_>) -> Option<Vec<Buf>> {
        let Test { operation, size_bytes, depth } = self.test;
        let take = |_| match operation.is_send() {
            true => io.pool.take_data(size_bytes),
            false => io.pool.take_cell(),
        };
        let receives: Vec<Buf> = (0..depth).map_while(take).collect();
        if receives.len() == depth as usize {
            return Some(receives);
        }
        receives.into_iter().for_each(|buf| io.pool.give(buf));
        None
    }

    fn sends_max(&self) -> u32 {
        self.test.depth * SENDS_PER_OPERATION
    }

    fn release(self, io: &mut Io<'_>) {
        self.data.into_iter().chain(self.answers).for_each(|buf| io.pool.give(buf));
    }

    fn close(&mut self, qp: Qp, io: &mut Io<'_>) {
        if !std::mem::replace(&mut self.is_closing, true) {
            io.fabric.disconnect(qp);
        }
    }

    /// Work has succeeded.
    fn completed(
        &mut self,
        now: Instant,
        qp: Qp,
        work: Work,
        (bytes, with): (u32, ReceivedWith),
        io: &mut Io<'_>,
    ) -> Result<(), Violation> {
        match work {
            Work::Recv(buf) => {
                self.last_message = now;
                self.received(qp, buf, (bytes, with), io)?;
            }
            Work::Read { into, .. } => {
                let is_intact = sequence(io.pool.bytes(&into)) == Some(self.answered);
                self.data.push(into);
                self.answer(qp, is_intact, io);
            }
            Work::Write { from, .. } | Work::WriteImmediate { from, .. } => self.data.push(from),
            Work::Send { from, .. } | Work::SendImmediate { from, .. } => self.answers.push(from),
        }
        while self.has_room()
            && let Some(remote) = self.waiting.pop_front()
        {
            self.begin(qp, remote, io);
        }
        Ok(())
    }

    /// A message has arrived. Its receive is posted again before the answer, so that a peer that
    /// keeps to its depth always finds one.
    fn received(
        &mut self,
        qp: Qp,
        buf: Buf,
        (bytes, with): (u32, ReceivedWith),
        io: &mut Io<'_>,
    ) -> Result<(), Violation> {
        let Test { operation, size_bytes, depth } = self.test;
        let content = &io.pool.bytes(&buf)[..bytes as usize];
        let request = match operation {
            Operation::Send | Operation::SendImmediate if bytes == size_bytes => {
                let expected = self.begun + self.waiting.len() as u64;
                self.is_intact &= sequence(content) == Some(expected);
                if operation == Operation::SendImmediate {
                    self.is_intact &= with == ReceivedWith::Immediate(immediate_of(expected));
                }
                Ok(None)
            }
            Operation::Send | Operation::SendImmediate => Err(Violation::Length(bytes)),
            Operation::Read | Operation::Write | Operation::WriteImmediate => {
                match parse_request(content) {
                    Some(remote) if remote.len == size_bytes => Ok(Some(remote)),
                    Some(remote) => Err(Violation::Memory(remote.len)),
                    None => Err(Violation::Length(bytes)),
                }
            }
        };
        io.fabric.post(qp, 0, Work::Recv(buf));
        if self.waiting.len() >= depth as usize {
            return Err(Violation::Depth);
        }
        self.waiting.push_back(request?);
        Ok(())
    }

    /// Whether one more operation can begin: a data buffer, and work requests for data and answer.
    /// Each work request has an answer buffer.
    fn has_room(&self) -> bool {
        let has_data = self.test.operation.is_send() || !self.data.is_empty();
        has_data && self.sends + 2 <= self.sends_max()
    }

    fn begin(&mut self, qp: Qp, remote: Option<Remote>, io: &mut Io<'_>) {
        let number = self.begun;
        self.begun += 1;
        let Some(remote) = remote else {
            self.sends += 1;
            let is_intact = self.is_intact;
            return self.answer(qp, is_intact, io);
        };
        let Some(mut buf) = self.data.pop() else { return };
        if self.test.operation.is_write() {
            let data = io.pool.bytes_mut(&mut buf);
            data[..8].copy_from_slice(&number.to_le_bytes());
        }
        match self.test.operation {
            Operation::WriteImmediate => {
                self.sends += 1;
                self.answered += 1;
                let immediate = immediate_of(number);
                io.fabric.post(qp, 0, Work::WriteImmediate { from: buf, to: remote, immediate });
            }
            Operation::Write => {
                self.sends += 2;
                io.fabric.post(qp, 0, Work::Write { from: buf, to: remote });
                self.answer(qp, true, io);
            }
            _ => {
                self.sends += 2;
                io.fabric.post(qp, 0, Work::Read { into: buf, from: remote });
            }
        }
    }

    /// Answers the next operation; its work request is reserved.
    fn answer(&mut self, qp: Qp, is_intact: bool, io: &mut Io<'_>) {
        let Some(mut from) = self.answers.pop() else { return };
        from.select(0, MESSAGE_BYTES);
        io.pool.bytes_mut(&mut from).copy_from_slice(&emit_answer(self.answered, is_intact));
        let immediate = immediate_of(self.answered);
        self.answered += 1;
        let work = match self.test.operation {
            Operation::SendImmediate => Work::SendImmediate { from, immediate },
            _ => Work::Send { from, invalidate: None },
        };
        io.fabric.post(qp, 0, work);
    }
}

/// Who ended a connection.
fn ended_by(reason: &Reason) -> &'static str {
    match reason {
        Reason::Local => "closed by this end",
        Reason::Peer => "closed by the peer",
        Reason::NotEstablished | Reason::Rejected { .. } => "never established",
        Reason::Device => "the RDMA device failed or was removed",
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;
    use std::sync::{Arc, Mutex};

    use rdma::pool::Pool;
    use rdma::soft::sim::{Faults, Network, NetworkPort, Rng};
    use rdma::soft::{Options, Soft};
    use rdma::{Fabric, Initiator, Wake};

    use super::*;

    /// A listening end and a peer in a simulated network, on a clock of its own.
    struct Net {
        air: Arc<Mutex<Network>>,
        now: Instant,
        server: Server,
        /// Of the listening end, and of the peer.
        ends: [(Pool, Soft); 2],
    }

    impl Net {
        fn new() -> Net {
            let (air, now) = (Network::new(1, Faults::NONE), Instant::now());
            let air = Arc::new(Mutex::new(air));
            let ends = [1, 2].map(|number| {
                let pool = Pool::new(PLAN).expect("memory");
                let port = NetworkPort::new(&air, IpAddr::from([10, 0, 0, number]), (1, 0));
                let mut dice = Rng::new(number.into());
                let config =
                    rdma::soft::endpoint::Config { guid: dice.roll(), ..Options::default().config };
                let entropy = Box::new(move || dice.roll());
                let region = Arc::clone(pool.region());
                let soft = Soft::simulated(port, config, entropy, now, region).expect("a fabric");
                (pool, soft)
            });
            let mut net = Net { air, now, server: Server::default(), ends };
            net.ends[0].1.listen("10.0.0.1:18515".parse().expect("an address")).expect("listens");
            net
        }

        /// Runs until the peer has an event that is no completion.
        fn run(&mut self) -> Event {
            for _ in 0..10_000 {
                let mut batch = Vec::with_capacity(64);
                let [(pool, fabric), (own, peer)] = &mut self.ends;
                fabric.poll(self.now, &mut batch);
                for event in batch.drain(..) {
                    self.server.event(self.now, event, &mut Io { pool, fabric });
                }
                fabric.flush();
                peer.poll(self.now, &mut batch);
                peer.flush();
                for event in batch {
                    match event {
                        Event::Done(done) => own.give(done.work.into_buf()),
                        event => return event,
                    }
                }
                let due = [fabric.arm(Wake::Any), peer.arm(Wake::Any)];
                let mut air = self.air.lock().expect("one thread");
                let next = due.into_iter().flatten().chain(air.next_arrival()).min();
                self.now = self.now.max(next.expect("nothing happens any more"));
                while air.arrive(self.now).is_some() {}
            }
            panic!("no event");
        }
    }

    #[test]
    fn silent_connections_are_closed_and_release_their_memory() {
        let mut net = Net::new();
        for operation in Operation::ALL {
            let test = Test { operation, size_bytes: 4096, depth: 8 };
            let limits = QpLimits { receives: 8, sends: 8, reads: 1 };
            let to = "10.0.0.1:18515".parse().expect("an address");
            let qp = net.ends[1].1.connect(to, &test.emit(), limits).expect("a connection");
            assert!(matches!(net.run(), Event::Established(it) if it == qp));
            assert!(!net.ends[0].0.is_full());
            let [(pool, fabric), _] = &mut net.ends;
            let io = &mut Io { pool, fabric };
            let due = net.server.close_silent(net.now, io).expect("a connection");
            let before = due - Duration::from_millis(1);
            assert_eq!(net.server.close_silent(before, io), Some(due));
            assert!(due - net.now <= SILENCE && due - net.now > SILENCE - Duration::from_secs(1));
            assert_eq!(net.server.close_silent(due, io), None);
            assert!(matches!(net.run(), Event::Gone(it, Reason::Peer) if it == qp));
            // Its end is an event of the listening end, too.
            while !net.server.connections.is_empty() {
                let mut batch = Vec::with_capacity(64);
                let [(pool, fabric), _] = &mut net.ends;
                fabric.poll(net.now, &mut batch);
                for event in batch {
                    net.server.event(net.now, event, &mut Io { pool, fabric });
                }
                net.now += Duration::from_millis(1);
            }
            assert!(net.ends[0].0.is_full(), "{:?}", net.ends[0].0.free());
        }
    }
}
