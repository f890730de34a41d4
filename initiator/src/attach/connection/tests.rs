//! Clients that are slow, leave early or break the protocol: nothing of theirs stays.

use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rdma::Pool;

use super::{Connection, MOST_REQUESTS, Shared};
use crate::attach::operation::RequestTable;
use crate::attach::operation::tests::pool;
use crate::nbd::{Export, flag};

const READ: u16 = 0;
const WRITE: u16 = 1;
const CACHE: u16 = 5;

fn connection(stream: UnixStream) -> Connection {
    Connection::new(stream, Instant::now()).expect("a descriptor")
}

struct Lab {
    pool: Pool,
    requests: RequestTable,
    export: Export,
    connections: Vec<Connection>,
}

impl Lab {
    /// With memory for one request of 64 KiB.
    fn new() -> (Lab, Vec<UnixStream>) {
        let pairs = (0..3).map(|_| UnixStream::pair().expect("sockets"));
        let (clients, servers): (Vec<_>, Vec<_>) = pairs.unzip();
        let lab = Lab {
            pool: pool(16 << 10),
            requests: RequestTable::new(3 * MOST_REQUESTS),
            export: Export {
                size_bytes: 1 << 20,
                flags: flag::HAS_FLAGS | flag::SEND_CACHE,
                block_bytes: 4096,
                most_bytes: 64 << 10,
                ..Export::default()
            },
            connections: servers.into_iter().map(connection).collect(),
        };
        (lab, clients)
    }

    fn with<T>(&mut self, n: usize, act: impl FnOnce(&mut Connection, &mut Shared<'_>) -> T) -> T {
        let Lab { pool, requests, export, connections } = self;
        let mut s = Shared { pool, requests, export, piece_bytes: 16 << 10 };
        act(&mut connections[n], &mut s)
    }

    /// Reads what connection `n` has, answers what needs no namespace, and writes.
    fn turn(&mut self, n: usize) {
        self.with(n, |connection, s| connection.read(n, s));
        while let Some(request) = self.requests.next_answered() {
            let n = self.requests.get(request).connection;
            self.connections[n].reply(request);
        }
        self.with(n, |connection, s| connection.write(s));
    }

    fn expect_nothing_left(&self) {
        assert_eq!(self.requests.in_use(), 0);
        assert!(self.pool.is_full());
    }
}

/// Flags, and Go for the export without a name.
fn hello(client: &mut UnixStream) {
    let mut bytes = 3u32.to_be_bytes().to_vec();
    bytes.extend(b"IHAVEOPT");
    bytes.extend(7u32.to_be_bytes());
    bytes.extend(6u32.to_be_bytes());
    bytes.extend([0; 6]);
    client.write_all(&bytes).expect("sent");
}

fn request(kind: u16, cookie: u64, offset: u64, len: u32) -> Vec<u8> {
    let mut bytes = 0x2560_9513u32.to_be_bytes().to_vec();
    bytes.extend([0, 0]);
    bytes.extend(kind.to_be_bytes());
    bytes.extend(cookie.to_be_bytes());
    bytes.extend(offset.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes
}

/// All bytes that the server has sent, but for those of the handshake: pairs of cookie and error.
fn replies(client: &mut UnixStream) -> Vec<(u64, u32)> {
    client.set_nonblocking(true).expect("possible");
    let mut bytes = Vec::new();
    let _ = client.read_to_end(&mut bytes);
    let magic = 0x6744_6698u32.to_be_bytes();
    let first = bytes.windows(4).position(|window| window == magic).unwrap_or(bytes.len());
    let (all, rest) = bytes[first..].as_chunks::<16>();
    assert!(rest.is_empty());
    all.iter()
        .map(|reply| {
            let error = u32::from_be_bytes(*reply[4..].first_chunk().expect("16 bytes"));
            (u64::from_be_bytes(*reply[8..].first_chunk().expect("16 bytes")), error)
        })
        .collect()
}

#[test]
fn data_of_a_refused_write_are_skipped() {
    let (mut lab, mut clients) = Lab::new();
    hello(&mut clients[0]);
    clients[0].write_all(&request(WRITE, 1, 512, 4096)).expect("sent");
    clients[0].write_all(&[0x25; 4096]).expect("sent");
    clients[0].write_all(&request(CACHE, 2, 0, 4096)).expect("sent");
    lab.turn(0);
    assert_eq!(replies(&mut clients[0]), [(1, 22), (2, 0)]);
    lab.expect_nothing_left();
}

#[test]
fn pipelined_requests_never_exceed_the_request_limit() {
    let (mut lab, mut clients) = Lab::new();
    hello(&mut clients[0]);
    let many = 3 * u64::from(MOST_REQUESTS);
    let all: Vec<u8> = (0..many).flat_map(|cookie| request(CACHE, cookie, 0, 4096)).collect();
    clients[0].write_all(&all).expect("sent");
    let mut answered = Vec::new();
    for _ in 0..4 {
        lab.with(0, |connection, s| connection.read(0, s));
        assert!(lab.requests.in_use() <= MOST_REQUESTS as usize);
        lab.turn(0);
        answered.extend(replies(&mut clients[0]));
    }
    assert!(answered.into_iter().eq((0..many).map(|cookie| (cookie, 0))));
    lab.expect_nothing_left();
}

#[test]
fn memory_is_released_after_a_protocol_error_or_disconnect() {
    let long = request(WRITE, 1, 0, u32::MAX);
    let half = [request(WRITE, 1, 0, 8192), vec![0; 5000]].concat();
    for bytes in [vec![0; 28], long, half, request(READ, 1, 0, 4096)[..27].to_vec()] {
        let (mut lab, mut clients) = Lab::new();
        hello(&mut clients[0]);
        clients[0].write_all(&bytes).expect("sent");
        lab.turn(0);
        drop(clients);
        lab.turn(0);
        assert!(lab.connections[0].is_over(), "{:?}", &bytes[..8]);
        lab.expect_nothing_left();
    }
}

#[test]
fn connections_get_memory_in_the_order_in_which_they_have_asked() {
    let (mut lab, mut clients) = Lab::new();
    for (client, len) in clients.iter_mut().zip([64 << 10, 64 << 10, 4096]) {
        hello(client);
        client.write_all(&request(WRITE, 1, 0, len)).expect("sent");
    }
    (0..3).for_each(|n| lab.turn(n));
    // The third needs less than there may be, and waits all the same.
    assert_eq!((lab.requests.in_use(), &lab.requests.waiting), (1, &VecDeque::from([1, 2])));
    // The first leaves: the second gets what it had, and the third waits on.
    clients[0].shutdown(std::net::Shutdown::Both).expect("possible");
    (0..3).for_each(|n| lab.turn(n));
    assert_eq!((lab.requests.in_use(), &lab.requests.waiting), (1, &VecDeque::from([2])));
    clients[1].shutdown(std::net::Shutdown::Both).expect("possible");
    (0..3).for_each(|n| lab.turn(n));
    assert!(lab.requests.waiting.is_empty());
    drop(clients);
    (0..3).for_each(|n| lab.turn(n));
    lab.expect_nothing_left();
}
