//! The connections of clients: a bounded number, none of which stays in its handshake.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use rdma::Pool;
use tracing::warn;

use super::connection::{Connection, Shared};
use super::operation::RequestTable;
use crate::nbd::Export;

/// Connections at once; more wait to be accepted.
pub(super) const MOST_CONNECTIONS: usize = 16;
/// Time for the handshake of a client, as QEMU gives it.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// The same while there is no place for another client.
const HANDSHAKE_LIMIT_IF_FULL: Duration = Duration::from_secs(1);

/// What the connections use, besides each other.
pub(super) struct ConnectionResources<'a> {
    pub(super) pool: &'a mut Pool,
    pub(super) requests: &'a mut RequestTable,
    pub(super) export: &'a Export,
    pub(super) piece_bytes: u32,
}

/// All connections, and where more arrive.
pub(super) struct ConnectionTable {
    listener: Option<UnixListener>,
    places: Vec<Option<Connection>>,
    /// Connections that wait for memory, in order.
    waiting: VecDeque<usize>,
}

impl ConnectionTable {
    pub(super) fn new(most: usize) -> ConnectionTable {
        let places = (0..most).map(|_| None).collect();
        ConnectionTable { listener: None, places, waiting: VecDeque::with_capacity(most) }
    }

    /// Accepts connections at this listener; without one, no more.
    pub(super) fn listen(&mut self, listener: Option<UnixListener>) {
        self.listener = listener;
    }

    /// Lets each client do something, and forgets those that have left. Returns whether any did.
    pub(super) fn each(
        &mut self,
        r: ConnectionResources<'_>,
        mut act: impl FnMut(&mut Connection, usize, &mut Shared<'_>) -> bool,
    ) -> bool {
        let ConnectionResources { pool, requests, export, piece_bytes } = r;
        let mut s = Shared { pool, requests, waiting: &mut self.waiting, export, piece_bytes };
        let mut any = false;
        for (number, place) in self.places.iter_mut().enumerate() {
            let Some(connection) = place else { continue };
            any |= act(connection, number, &mut s);
            if connection.is_ending() {
                s.waiting.retain(|waiting| *waiting != number);
            }
            if connection.is_over() {
                *place = None;
            }
        }
        any
    }

    /// Closes connections whose handshake takes too long.
    pub(super) fn end_late_handshakes(&mut self, now: Instant, r: ConnectionResources<'_>) {
        let limit = self.handshake_limit();
        self.each(r, |connection, _, s| {
            let since = connection.handshake_since();
            let is_late = since.is_some_and(|since| now.duration_since(since) >= limit);
            if is_late {
                warn!("a client has not ended its handshake in {} s: closed", limit.as_secs());
                connection.abort(s);
            }
            is_late
        });
    }

    /// The next time of that.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let since = self.places.iter().flatten().filter_map(Connection::handshake_since).min()?;
        since.checked_add(self.handshake_limit())
    }

    fn handshake_limit(&self) -> Duration {
        match self.places.iter().all(Option::is_some) {
            true => HANDSHAKE_LIMIT_IF_FULL,
            false => HANDSHAKE_LIMIT,
        }
    }

    /// Accepts those that wait, as long as there are places.
    pub(super) fn accept(&mut self, now: Instant) {
        let Some(listener) = &self.listener else { return };
        for place in self.places.iter_mut().filter(|place| place.is_none()) {
            let Ok((stream, _)) = listener.accept() else { return };
            *place = Connection::new(stream, now).ok();
        }
    }

    /// A request of a connection is answered.
    pub(super) fn reply(&mut self, number: usize, request: u32) {
        // It is there: a connection stays until all its requests are answered.
        if let Some(connection) = self.places.get_mut(number).and_then(Option::as_mut) {
            connection.reply(request);
        }
    }

    /// Returns the listener if there is a place for another client.
    pub(super) fn listener(&self) -> Option<BorrowedFd<'_>> {
        let has_room = self.places.iter().any(Option::is_none);
        self.listener.as_ref().filter(|_| has_room).map(AsFd::as_fd)
    }

    /// Returns the descriptors of clients, and what of each is of interest.
    pub(super) fn descriptors(&self) -> impl Iterator<Item = (BorrowedFd<'_>, PollFlags)> {
        self.places.iter().enumerate().filter_map(|(number, place)| {
            let connection = place.as_ref()?;
            let reads = connection.wants_input() && !self.waiting.contains(&number);
            let mut wanted = PollFlags::empty();
            wanted.set(PollFlags::POLLIN, reads);
            wanted.set(PollFlags::POLLOUT, connection.is_blocked());
            // Of one for which nothing can be done, not even its end is of interest.
            (!wanted.is_empty()).then(|| (connection.descriptor(), wanted))
        })
    }

    /// Returns the sizes that clients know whose handshake is done.
    pub(super) fn sizes_bytes(&self) -> impl Iterator<Item = u64> {
        self.places.iter().flatten().filter_map(Connection::size_bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{ErrorKind, Read, Write};
    use std::os::unix::net::UnixStream;

    use rdma::PoolPlan;

    use super::*;

    struct Lab {
        table: ConnectionTable,
        pool: Pool,
        requests: RequestTable,
        export: Export,
        directory: tempfile::TempDir,
    }

    impl Lab {
        fn new(most: usize) -> Lab {
            let directory = tempfile::tempdir().expect("a directory");
            let listener = UnixListener::bind(directory.path().join("s")).expect("a socket");
            listener.set_nonblocking(true).expect("possible");
            let mut table = ConnectionTable::new(most);
            table.listen(Some(listener));
            let plan = PoolPlan {
                cells: 0,
                receives: 0,
                lead_bytes: 0,
                tail_bytes: 0,
                data_bytes: 64 << 10,
                largest_bytes: 4096,
            };
            let pool = Pool::new(plan).expect("memory");
            let export = Export { size_bytes: 4096, block_bytes: 512, ..Export::default() };
            Lab { table, pool, requests: RequestTable::new(8), export, directory }
        }

        fn connect(&self) -> UnixStream {
            let stream = UnixStream::connect(self.directory.path().join("s")).expect("a place");
            stream.set_nonblocking(true).expect("possible");
            stream
        }

        fn turn(&mut self, now: Instant) {
            self.table.accept(now);
            let Lab { table, pool, requests, export, .. } = self;
            for late in [false, true] {
                let r = ConnectionResources { pool, requests, export, piece_bytes: 4096 };
                match late {
                    true => table.end_late_handshakes(now, r),
                    false => drop(table.each(r, |c, n, s| c.read(n, s) | c.write(s))),
                }
            }
        }
    }

    /// Flags, and Go for the export without a name.
    fn hello(client: &mut UnixStream) {
        let mut bytes = 3u32.to_be_bytes().to_vec();
        bytes.extend(b"IHAVEOPT");
        bytes.extend([7u32.to_be_bytes(), 6u32.to_be_bytes()].concat());
        bytes.extend([0; 6]);
        client.write_all(&bytes).expect("sent");
    }

    fn is_closed(client: &mut UnixStream) -> bool {
        match client.read_to_end(&mut Vec::new()) {
            Err(error) => error.kind() != ErrorKind::WouldBlock,
            Ok(_) => true,
        }
    }

    #[test]
    fn a_client_has_ten_seconds_for_its_handshake_and_all_time_afterwards() {
        let (mut lab, begun) = (Lab::new(3), Instant::now());
        let (mut idle, mut done) = (lab.connect(), lab.connect());
        hello(&mut done);
        lab.turn(begun);
        assert_eq!(lab.table.deadline(), Some(begun + HANDSHAKE_LIMIT));
        lab.turn(begun + HANDSHAKE_LIMIT - Duration::from_millis(1));
        assert!(!is_closed(&mut idle));
        lab.turn(begun + HANDSHAKE_LIMIT);
        assert!(is_closed(&mut idle) && !is_closed(&mut done));
        lab.turn(begun + 100 * HANDSHAKE_LIMIT);
        assert!(!is_closed(&mut done));
        assert_eq!((lab.table.deadline(), lab.table.sizes_bytes().sum()), (None, 4096));
    }

    #[test]
    fn idle_clients_that_take_all_places_make_room_after_a_second() {
        let (mut lab, begun) = (Lab::new(2), Instant::now());
        let mut idle = [lab.connect(), lab.connect()];
        lab.turn(begun);
        let mut third = lab.connect();
        hello(&mut third);
        assert!(lab.table.listener().is_none(), "there is no place");
        assert_eq!(lab.table.deadline(), Some(begun + HANDSHAKE_LIMIT_IF_FULL));
        lab.turn(begun + HANDSHAKE_LIMIT_IF_FULL);
        assert!(idle.iter_mut().all(is_closed));
        lab.turn(begun + HANDSHAKE_LIMIT_IF_FULL);
        assert_eq!(lab.table.sizes_bytes().count(), 1, "the third is served");
    }
}
