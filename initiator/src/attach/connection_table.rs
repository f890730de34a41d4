//! The connections of clients: a bounded number, none of which stays in its handshake.

use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use nix::poll::PollFlags;
use tracing::warn;

use super::connection::{Connection, Shared};
use super::operation::RequestTable;

/// Connections at once; more wait to be accepted.
pub(super) const MOST_CONNECTIONS: usize = 16;
/// Time for the handshake of a client, as QEMU gives it.
const HANDSHAKE_LIMIT: Duration = Duration::from_secs(10);
/// The same while there is no place for another client.
const HANDSHAKE_LIMIT_IF_FULL: Duration = Duration::from_secs(1);
/// Time for the data of one write, and for one reply, while somebody else lacks memory.
const STALL_LIMIT: Duration = Duration::from_secs(30);

/// All connections, and where more arrive.
pub(super) struct ConnectionTable {
    listener: Option<UnixListener>,
    places: Vec<Option<Connection>>,
    /// Since when there has always been somebody that waits for memory.
    waiting_since: Option<Instant>,
}

impl ConnectionTable {
    pub(super) fn new(most: usize) -> ConnectionTable {
        let places = (0..most).map(|_| None).collect();
        ConnectionTable { listener: None, places, waiting_since: None }
    }

    /// Accepts connections at this listener; without one, no more.
    pub(super) fn listen(&mut self, listener: Option<UnixListener>) {
        self.listener = listener;
    }

    /// Lets each client do something, and forgets those that have left. Returns whether any did.
    pub(super) fn each(
        &mut self,
        mut s: Shared<'_>,
        mut act: impl FnMut(&mut Connection, usize, &mut Shared<'_>) -> bool,
    ) -> bool {
        let mut any = false;
        for (number, place) in self.places.iter_mut().enumerate() {
            let Some(connection) = place else { continue };
            any |= act(connection, number, &mut s);
            if connection.leaves() {
                s.requests.abandon(number);
            }
            if connection.is_over() {
                *place = None;
            }
        }
        any
    }

    /// Closes connections whose handshake takes too long.
    pub(super) fn end_late_handshakes(&mut self, now: Instant, r: Shared<'_>) {
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

    /// Closes connections that have kept requests for too long while others, or a device, have waited
    /// for memory all the time: nobody else can end that.
    pub(super) fn end_stalled(&mut self, now: Instant, r: Shared<'_>) {
        let somebody_waits = !r.requests.waiting.is_empty();
        let waiting_since = self.waiting_since.take().unwrap_or(now);
        self.waiting_since = somebody_waits.then_some(waiting_since);
        self.each(r, |connection, number, s| {
            let Some(since) = connection.stalled_since(now) else { return false };
            let others_wait = s.requests.waiting.iter().any(|waiting| *waiting != number);
            let since = since.max(waiting_since);
            let is_stalled = others_wait && now.duration_since(since) >= STALL_LIMIT;
            if is_stalled {
                let limit = STALL_LIMIT.as_secs();
                warn!(
                    "a client has sent no data, or read no reply, for {limit} s, while others lack \
                     memory: closed"
                );
                connection.abort(s);
            }
            is_stalled
        });
    }

    /// The next time at which a handshake takes too long.
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
    pub(super) fn descriptors<'a>(
        &'a self,
        requests: &'a RequestTable,
    ) -> impl Iterator<Item = (BorrowedFd<'a>, PollFlags)> {
        self.places.iter().enumerate().filter_map(|(number, place)| {
            let connection = place.as_ref()?;
            let reads = connection.wants_input() && !requests.waiting.contains(&number);
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

    use rdma::Pool;

    use super::*;
    use crate::attach::operation::tests::pool;
    use crate::nbd::Export;

    const DEVICE: usize = usize::MAX;

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
            let pool = pool(4096);
            let export = Export { size_bytes: 4096, block_bytes: 512, ..Export::default() };
            Lab { table, pool, requests: RequestTable::new(8), export, directory }
        }

        fn connect(&self) -> UnixStream {
            let stream = UnixStream::connect(self.directory.path().join("s")).expect("a place");
            stream.set_nonblocking(true).expect("possible");
            stream
        }

        fn with<T>(&mut self, act: impl FnOnce(&mut ConnectionTable, Shared<'_>) -> T) -> T {
            let Lab { table, pool, requests, export, .. } = self;
            act(table, Shared { pool, requests, export, piece_bytes: 4096 })
        }

        /// While the guest waits for memory (`device_waits`), or does not.
        fn turn_beside(&mut self, device_waits: bool, now: Instant) {
            self.table.accept(now);
            self.with(|table, r| table.each(r, |c, n, s| c.read(n, s)));
            while let Some(n) = self.requests.next_answered() {
                self.table.reply(self.requests.get(n).connection, n);
            }
            self.with(|table, r| table.each(r, |c, _, s| c.write(s)));
            self.with(|table, r| table.end_late_handshakes(now, r));
            if device_waits {
                self.requests.waiting.push_back(DEVICE);
            }
            self.with(|table, r| table.end_stalled(now, r));
            self.requests.forget(DEVICE);
        }

        fn turn(&mut self, now: Instant) {
            self.turn_beside(false, now);
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
    fn handshakes_time_out_and_established_connections_do_not() {
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
    fn handshakes_time_out_after_a_second_if_the_table_is_full() {
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

    const ALL_BYTES: u32 = 64 << 10;

    /// A client whose handshake is done, of an export that is as large as the memory.
    fn client(lab: &mut Lab, now: Instant) -> UnixStream {
        lab.export.size_bytes = ALL_BYTES.into();
        lab.export.most_bytes = ALL_BYTES;
        let mut client = lab.connect();
        hello(&mut client);
        lab.turn(now);
        client
    }

    fn send(client: &mut UnixStream, kind: u16, len: u32, data_bytes: usize) {
        let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
        bytes.extend([[0; 2], kind.to_be_bytes()].concat());
        bytes.extend([0; 16]);
        bytes.extend(len.to_be_bytes());
        bytes.resize(bytes.len() + data_bytes, 0);
        client.write_all(&bytes).expect("sent");
    }

    const WRITE: u16 = 1;
    const CACHE: u16 = 5;

    #[test]
    fn a_stalled_client_is_closed_after_30_s_while_others_lack_memory() {
        let (mut lab, begun) = (Lab::new(3), Instant::now());
        let [mut stopped, mut other] = [client(&mut lab, begun), client(&mut lab, begun)];
        send(&mut stopped, WRITE, ALL_BYTES, 4096);
        lab.turn(begun);
        lab.turn(begun + 9 * STALL_LIMIT);
        assert!(!is_closed(&mut stopped), "nobody else needs memory");
        let asked = begun + 10 * STALL_LIMIT;
        send(&mut other, WRITE, 4096, 512);
        lab.turn(asked);
        send(&mut stopped, WRITE, 4096, 0);
        lab.turn(asked + STALL_LIMIT - Duration::from_millis(1));
        assert!(!is_closed(&mut stopped) && lab.requests.waiting == [1]);
        lab.turn(asked + STALL_LIMIT);
        assert!(is_closed(&mut stopped) && !is_closed(&mut other));
        lab.turn(asked + STALL_LIMIT);
        assert!(
            lab.requests.waiting.is_empty() && lab.requests.in_use() == 1,
            "the other is served"
        );
        lab.turn(asked + 9 * STALL_LIMIT);
        assert!(!is_closed(&mut other));
    }

    #[test]
    fn a_client_is_not_closed_as_long_as_writes_are_received() {
        let (mut lab, begun) = (Lab::new(3), Instant::now());
        let mut slow = client(&mut lab, begun);
        let is_ending = |lab: &Lab| lab.table.places[0].as_ref().is_none_or(Connection::is_ending);
        let step = STALL_LIMIT - Duration::from_secs(1);
        for n in 0..8 {
            // The rest of one write, and the beginning of the next.
            slow.write_all(&vec![0; if n > 0 { 3584 } else { 0 }]).expect("sent");
            send(&mut slow, WRITE, 4096, 512);
            lab.turn_beside(true, begun + n * step);
            assert!(!is_ending(&lab), "{n}");
        }
        lab.turn_beside(true, begun + 7 * step + STALL_LIMIT);
        assert!(is_ending(&lab));
    }

    #[test]
    fn a_write_waits_for_that_of_a_client_that_has_left() {
        let (mut lab, now) = (Lab::new(3), Instant::now());
        let [mut killed, mut next] = [client(&mut lab, now), client(&mut lab, now)];
        send(&mut killed, WRITE, 4096, 4096);
        lab.turn(now);
        drop(killed);
        lab.turn(now);
        send(&mut next, WRITE, 4096, 4096);
        lab.turn(now);
        assert_eq!((lab.requests.in_use(), lab.requests.held.len()), (2, 1));
    }

    #[test]
    fn a_client_that_reads_no_replies_is_closed_while_a_device_lacks_memory() {
        let (mut lab, begun) = (Lab::new(3), Instant::now());
        let mut client = client(&mut lab, begun);
        while !lab.table.places.iter().flatten().any(Connection::is_blocked) {
            send(&mut client, CACHE, 512, 0);
            lab.turn_beside(true, begun);
        }
        lab.turn(begun + STALL_LIMIT);
        lab.turn_beside(true, begun + STALL_LIMIT);
        assert_eq!(lab.table.sizes_bytes().count(), 1, "the device has not waited all the time");
        lab.turn_beside(true, begun + 2 * STALL_LIMIT);
        assert_eq!(lab.table.sizes_bytes().count(), 0);
        assert_eq!(lab.requests.in_use(), 0);
    }
}
