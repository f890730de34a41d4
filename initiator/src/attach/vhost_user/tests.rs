//! A guest whose memory is a file, and which may break all rules.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::sync::mpsc;
use std::time::Duration;

use rdma::Pool;
use virtio_queue::QueueT;

use super::channel::Channel;
use super::device::{Device, DeviceProperties, Resources};
use super::vring::Vring;
use super::{FrontEnd, VhostUser};
use crate::attach::operation::RequestTable;
use crate::attach::operation::tests::pool;
use crate::nbd::{Export, flag};
use crate::vhost_user::{
    Body, Header, MemoryRegion, Message, Reply, RequestId, VringAddress, blk, feature,
};

const USER: u64 = 0x7000_0000;
const GUEST: u64 = 0x10_0000;
const MEMORY_BYTES: u64 = 64 << 10;
const ENTRIES: u16 = 16;
/// Offsets in the memory: rings, then the header, the status and the data of a request.
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;
const HEADER: u64 = 0x3000;
const STATUS: u64 = 0x3800;
const DATA: u64 = 0x4000;

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

/// A device, and the guest that uses its first queue.
struct Lab {
    device: Device,
    properties: DeviceProperties,
    pool: Pool,
    requests: RequestTable,
    memory: File,
    available: u16,
}

impl Lab {
    fn new() -> Lab {
        let memory = tempfile::tempfile().expect("a file");
        memory.set_len(MEMORY_BYTES).expect("possible");
        let export = Export {
            size_bytes: 1 << 20,
            block_bytes: 4096,
            most_bytes: 1 << 20,
            flags: flag::HAS_FLAGS | flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_TRIM,
            ..Export::default()
        };
        let mut lab = Lab {
            device: Device::new(8),
            properties: DeviceProperties {
                export,
                serial: *b"serial number of 20.",
                zeroes_deallocate: false,
            },
            pool: pool(4096),
            requests: RequestTable::new(8),
            memory,
            available: 0,
        };
        lab.set_up();
        lab
    }

    fn message(&mut self, request: RequestId, body: Body, files: Vec<OwnedFd>) -> Option<Reply> {
        let header = Header { request, needs_reply: false, payload_bytes: 0 };
        self.device.on_message(Message { header, body }, files, &self.properties)
    }

    fn set_up(&mut self) {
        let region = MemoryRegion {
            guest_address: GUEST,
            size_bytes: MEMORY_BYTES,
            user_address: USER,
            offset: 0,
        };
        let file = self.memory.try_clone().expect("possible").into();
        let features = feature::VERSION_1 | blk::feature::FLUSH;
        self.message(RequestId::SET_FEATURES, Body::U64(features), vec![]);
        self.message(RequestId::SET_MEM_TABLE, Body::Memory(vec![region]), vec![file]);
        self.set_up_queue(0, 0);
    }

    /// Sets a queue up whose rings begin at this offset in the memory.
    fn set_up_queue(&mut self, index: u32, at: u64) {
        let num = ENTRIES.into();
        self.message(RequestId::SET_VRING_NUM, Body::Vring { index, num }, vec![]);
        let descriptors = USER + at;
        let (used, available) = (descriptors + USED, descriptors + AVAILABLE);
        let address = VringAddress { descriptors, used, available };
        self.message(RequestId::SET_VRING_ADDR, Body::Address(index, address), vec![]);
        let kick = Body::Descriptor { index, has_descriptor: false };
        self.message(RequestId::SET_VRING_KICK, kick, vec![]);
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.write_all_at(bytes, at).expect("written");
    }

    fn get<const N: usize>(&self, at: u64) -> [u8; N] {
        let mut bytes = [0; N];
        self.memory.read_exact_at(&mut bytes, at).expect("read");
        bytes
    }

    /// Writes a table of descriptors (address, length, flags), each of which leads to the next.
    fn put_table(&self, at: u64, chain: &[(u64, u32, u16)]) {
        for (n, (address, len, flags)) in chain.iter().enumerate() {
            let next = if n + 1 < chain.len() { NEXT } else { 0 };
            let mut bytes = address.to_le_bytes().to_vec();
            bytes.extend(len.to_le_bytes());
            bytes.extend((flags | next).to_le_bytes());
            bytes.extend((n as u16 + 1).to_le_bytes());
            self.put(at + 16 * n as u64, &bytes);
        }
    }

    /// Makes a chain of these descriptors available.
    fn provide(&mut self, chain: &[(u64, u32, u16)]) {
        self.put_table(0, chain);
        self.put(AVAILABLE + 4 + 2 * u64::from(self.available % ENTRIES), &[0; 2]);
        self.available += 1;
        self.put(AVAILABLE + 2, &self.available.to_le_bytes());
        self.put(STATUS, &[0xFF]);
    }

    /// Takes what is available, and answers what is decided. Returns how many chains are used, the
    /// length of the last, and its status.
    fn turn(&mut self) -> (u16, u32, u8) {
        let Lab { device, properties, pool, requests, .. } = self;
        let mut r = Resources { pool, requests, piece_bytes: 4096 };
        device.take(properties, &mut r);
        while let Some(n) = r.requests.next_answered() {
            device.reply(n, &mut r);
        }
        let used = u16::from_le_bytes(self.get(USED + 2));
        let last = USED + 4 + 8 * u64::from(used.wrapping_sub(1) % ENTRIES);
        (used, u32::from_le_bytes(self.get(last + 4)), self.get::<1>(STATUS)[0])
    }

    fn header(&self, kind: u32, sector: u64) {
        self.put(HEADER, &[&kind.to_le_bytes()[..], &[0; 4], &sector.to_le_bytes()].concat());
    }

    /// A request with data of the device (`flags`: [`WRITE`]) or for it.
    fn request(&mut self, kind: u32, sector: u64, data: (u64, u32), flags: u16) -> (u16, u32, u8) {
        self.header(kind, sector);
        let (header, status) = ((GUEST + HEADER, 16, 0), (GUEST + STATUS, 1, WRITE));
        self.provide(&[header, (data.0, data.1, flags), status]);
        self.turn()
    }
}

#[test]
fn guest_requests_are_executed_or_fail_with_a_status() {
    let mut lab = Lab::new();
    let data = GUEST + DATA;
    assert_eq!(lab.request(8, 0, (data, 20), WRITE), (1, 21, 0));
    assert_eq!(lab.get::<20>(DATA), lab.properties.serial);
    // A range of 8 sectors, without flags; then one with a flag that there is not.
    lab.put(DATA, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0]);
    lab.put(DATA + 64, &[0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 2, 0, 0, 0]);
    for (kind, sector, data, flags, status) in [
        (99, 0, (data, 4096), WRITE, 2),   // no such command
        (0, 1, (data, 4096), WRITE, 1),    // a read within a block
        (0, 0, (data, 512), WRITE, 1),     // of a part of one
        (0, 2048, (data, 4096), WRITE, 1), // behind the end
        (0, u64::MAX, (data, 4096), WRITE, 1),
        (1, 0, (GUEST - 4096, 4096), 0, 1), // data outside of the memory
        (1, 0, (data + MEMORY_BYTES, 4096), 0, 1),
        (13, 0, (data, 16), 0, 1), // zeroes that the namespace does not know
        (11, 0, (data, 8), 0, 1),  // half a range
        (11, 0, (data + 64, 16), 0, 2),
    ] {
        let (used, len, found) = lab.request(kind, sector, data, flags);
        assert_eq!((len, found), (1, status), "{kind} {sector} {data:?}");
        assert_eq!((used, lab.requests.in_use()), (lab.available, 0));
    }
    // A write is in the buffers of its request, in order.
    lab.put(DATA, &[&[1; 2048][..], &[2; 2048], &[3; 4096]].concat());
    lab.header(1, 8);
    let (header, status) = ((GUEST + HEADER, 16, 0), (GUEST + STATUS, 1, WRITE));
    lab.provide(&[header, (data, 2048, 0), (data + 2048, 6144, 0), status]);
    let used = lab.turn().0;
    assert_eq!((used, lab.requests.in_use(), lab.device.is_idle()), (lab.available - 1, 1, false));
    let n = (0..8).find(|n| lab.requests.get(*n).command.len == 8192).expect("the request");
    let command = lab.requests.get(n).command;
    assert_eq!((command.offset, command.is_fua()), (4096, false));
    for (at, value) in [(0, 1), (2048, 2), (4096, 3), (8191, 3)] {
        assert_eq!(lab.requests.room(n, at, &lab.pool)[0], value, "{at}");
    }
}

#[test]
fn requests_that_find_no_memory_are_taken_later() {
    let mut lab = Lab::new();
    let all: Vec<_> = std::iter::from_fn(|| lab.pool.take_data(4096)).collect();
    assert_eq!(lab.request(0, 0, (GUEST + DATA, 4096), WRITE).0, 0);
    assert_eq!(lab.requests.in_use(), 0);
    assert!(!lab.device.arm(), "a sleep ends when there is memory again");
    all.into_iter().for_each(|buf| lab.pool.give(buf));
    lab.turn();
    assert_eq!(lab.requests.in_use(), 1);
}

#[test]
fn queues_of_a_guest_get_memory_in_turn() {
    const OTHER: u64 = 0x8000;
    let mut lab = Lab::new();
    lab.set_up_queue(1, OTHER);
    lab.header(0, 0);
    let (header, status) = ((GUEST + HEADER, 16, 0), (GUEST + STATUS, 1, WRITE));
    let read = [header, (GUEST + DATA, 4096, WRITE), status];
    // The first queue has more requests than there are places for.
    (0..ENTRIES).for_each(|_| lab.provide(&read));
    lab.turn();
    lab.put_table(OTHER, &read);
    lab.put(OTHER + AVAILABLE + 2, &1u16.to_le_bytes());
    lab.turn();
    let taken = |lab: &Lab| [0, 1].map(|n| lab.device.vrings()[n].queue.next_avail());
    assert_eq!(taken(&lab), [8, 0]);
    lab.requests.free(7, &mut lab.pool);
    lab.turn();
    assert_eq!(taken(&lab), [8, 1]);
    lab.requests.free(7, &mut lab.pool);
    lab.turn();
    assert_eq!(taken(&lab), [9, 1]);
}

#[test]
fn an_invalid_ring_stops_its_queue_until_the_next_setup() {
    let mut lab = Lab::new();
    // No place for a status, and no header.
    lab.header(4, 0);
    lab.provide(&[(GUEST + HEADER, 16, 0)]);
    assert_eq!(lab.turn().1, 0);
    lab.provide(&[(GUEST + HEADER, 8, 0), (GUEST + STATUS, 1, WRITE)]);
    assert_eq!(lab.turn().0, 2);
    // A chain that leads back to its beginning.
    lab.provide(&[(GUEST + HEADER, 16, 0), (GUEST + DATA, 16, NEXT)]);
    lab.put(16 + 14, &[0, 0]);
    assert_eq!(lab.turn().0, 3);
    assert!(lab.device.vrings()[0].is_running());
    // More is available than there are entries.
    lab.put(AVAILABLE + 2, &(lab.available + ENTRIES + 1).to_le_bytes());
    lab.turn();
    assert!(!lab.device.vrings()[0].is_running() && !lab.device.arm());
    // The next driver starts anew.
    lab.put(USED + 2, &[0; 2]);
    lab.put(AVAILABLE + 2, &[0; 2]);
    lab.available = 0;
    let base = lab.message(RequestId::GET_VRING_BASE, Body::Vring { index: 0, num: 0 }, vec![]);
    assert_eq!(base, Some(Reply::Vring { index: 0, num: 3 }));
    lab.message(RequestId::SET_VRING_BASE, Body::Vring { index: 0, num: 0 }, vec![]);
    lab.set_up();
    assert_eq!(lab.request(8, 0, (GUEST + DATA, 20), WRITE), (1, 21, 0));
}

#[test]
fn descriptor_chains_are_read_once_and_limited_in_length() {
    let table = GUEST + DATA;
    for (descriptors, used_bytes) in [(1024, 21), (1025, 0)] {
        let mut lab = Lab::new();
        lab.header(8, 0);
        let mut chain = vec![(GUEST + STATUS - 64, 1, WRITE); descriptors];
        chain[0] = (GUEST + HEADER, 16, 0);
        chain[descriptors - 1] = (GUEST + STATUS, 1, WRITE);
        lab.put_table(DATA, &chain);
        lab.provide(&[(table, 16 * descriptors as u32, INDIRECT)]);
        assert_eq!(lab.turn().1, used_bytes, "{descriptors}");
    }
    // What a guest does to the descriptors of a request under way has no effect.
    let mut lab = Lab::new();
    let (used, ..) = lab.request(0, 0, (GUEST + DATA, 4096), WRITE);
    assert_eq!((used, lab.requests.in_use()), (0, 1));
    lab.put(0, &[0xFF; 48]);
    let n = (0..8).find(|n| lab.requests.get(*n).command.len == 4096).expect("the request");
    let Lab { device, pool, requests, .. } = &mut lab;
    device.reply(n, &mut Resources { pool, requests, piece_bytes: 4096 });
    assert_eq!((lab.get::<1>(STATUS), lab.get::<2>(USED + 2)), ([0], [1, 0]));
}

#[test]
fn indirect_tables_and_data_may_span_two_memory_regions() {
    const HALF: u64 = MEMORY_BYTES / 2;
    let mut lab = Lab::new();
    let regions = [0, HALF].map(|offset| MemoryRegion {
        guest_address: GUEST + offset,
        size_bytes: HALF,
        user_address: USER + offset,
        offset,
    });
    let files = regions.iter().map(|_| lab.memory.try_clone().expect("possible").into()).collect();
    lab.message(RequestId::SET_MEM_TABLE, Body::Memory(regions.to_vec()), files);
    let (header, status) = ((GUEST + HEADER, 16, 0), (GUEST + STATUS, 1, WRITE));
    lab.header(8, 0);
    lab.put_table(HALF - 16, &[header, (GUEST + DATA, 20, WRITE), status]);
    lab.provide(&[(GUEST + HALF - 16, 48, INDIRECT)]);
    assert_eq!(lab.turn(), (1, 21, 0));
    assert_eq!(lab.get::<20>(DATA), lab.properties.serial);
    assert_eq!(lab.request(8, 0, (GUEST + HALF - 7, 20), WRITE), (2, 21, 0));
    assert_eq!(lab.get::<20>(HALF - 7), lab.properties.serial);
}

#[test]
fn nested_indirect_tables_and_partial_descriptors_are_rejected() {
    let mut lab = Lab::new();
    let (header, status) = ((GUEST + HEADER, 16, 0), (GUEST + STATUS, 1, WRITE));
    let all = [header, (GUEST + DATA + 0x800, 20, WRITE), status];
    for (flags, len, used_bytes) in [(0, 48, 21), (INDIRECT, 48, 0), (0, 40, 0), (0, 32, 21)] {
        lab.header(8, 0);
        let table = GUEST + DATA + 0x1000;
        lab.put_table(DATA + 0x1000, &[header, (GUEST + DATA, 48, WRITE | flags), status]);
        lab.put_table(DATA, &all);
        lab.provide(&[(table, len, INDIRECT)]);
        assert_eq!(lab.turn().1, used_bytes, "{flags} {len}");
    }
}

#[test]
fn invalid_memory_tables_and_queue_settings_are_refused() {
    let mut lab = Lab::new();
    lab.message(RequestId::SET_PROTOCOL_FEATURES, Body::U64(u64::MAX), vec![]);
    let mut refuses = |request, body, files| {
        let header = Header { request, needs_reply: true, payload_bytes: 0 };
        lab.device.on_message(Message { header, body }, files, &lab.properties)
            == Some(Reply::U64(1))
    };
    let region =
        MemoryRegion { guest_address: 0, size_bytes: 1 << 40, user_address: USER, offset: 0 };
    let file: OwnedFd = tempfile::tempfile().expect("a file").into();
    assert!(refuses(RequestId::SET_MEM_TABLE, Body::Memory(vec![region]), vec![file]));
    assert!(refuses(RequestId::SET_MEM_TABLE, Body::Memory(vec![region]), vec![]));
    for num in [0, 3, 2048, u32::MAX] {
        assert!(refuses(RequestId::SET_VRING_NUM, Body::Vring { index: 0, num }, vec![]), "{num}");
    }
    assert!(refuses(RequestId::SET_VRING_NUM, Body::Vring { index: 99, num: 16 }, vec![]));
    let address = VringAddress { descriptors: 0, used: 0, available: 0 };
    assert!(refuses(RequestId::SET_VRING_ADDR, Body::Address(0, address), vec![]));
    assert!(refuses(RequestId(40), Body::None, vec![]));
}

/// Calls it in a thread. Returns whether it comes to its end within 10 s.
fn ends(act: impl FnOnce() + Send + 'static) -> bool {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        act();
        sender.send(())
    });
    receiver.recv_timeout(Duration::from_secs(10)).is_ok()
}

/// Returns a socket that takes no more bytes, and waits with a writer, and its peer.
fn full_socket() -> (OwnedFd, UnixStream) {
    let (mut stream, peer) = UnixStream::pair().expect("sockets");
    stream.set_nonblocking(true).expect("possible");
    while stream.write(&[0; 4096]).is_ok() {}
    while stream.write(&[0]).is_ok() {}
    stream.set_nonblocking(false).expect("possible");
    (stream.into(), peer)
}

#[test]
fn a_queue_without_a_signal_delays_nothing() {
    assert!(ends(|| {
        let mut lab = Lab::new();
        let (kick, _front_end) = std::io::pipe().expect("a pipe");
        let body = Body::Descriptor { index: 0, has_descriptor: true };
        lab.message(RequestId::SET_VRING_KICK, body, vec![kick.into()]);
        lab.device.vrings().iter().for_each(Vring::take_kick);
        assert_eq!(lab.request(8, 0, (GUEST + DATA, 20), WRITE), (1, 21, 0));
    }));
}

#[test]
fn a_front_end_that_does_not_read_its_signals_delays_nothing() {
    assert!(ends(|| {
        let mut lab = Lab::new();
        let (call, _front_end) = full_socket();
        let body = Body::Descriptor { index: 0, has_descriptor: true };
        lab.message(RequestId::SET_VRING_CALL, body, vec![call]);
        assert_eq!(lab.request(8, 0, (GUEST + DATA, 20), WRITE), (1, 21, 0));
        lab.device.signal();
    }));
}

#[test]
fn a_front_end_that_does_not_read_the_new_size_delays_nothing() {
    assert!(ends(|| {
        let mut lab = Lab::new();
        let (backend_channel, _front_end) = full_socket();
        lab.message(RequestId::SET_BACKEND_REQ_FD, Body::None, vec![backend_channel]);
        let (stream, _peer) = UnixStream::pair().expect("sockets");
        let Lab { device, mut properties, .. } = lab;
        let channel = Channel::new(stream).expect("possible");
        let mut export = VhostUser {
            listener: None,
            front_end: Some(FrontEnd { channel, device, has_message: false }),
            size_bytes: properties.export.size_bytes,
            requests: 8,
            is_ending: false,
        };
        properties.export.size_bytes *= 2;
        export.resize(&properties);
        assert_eq!(export.size_bytes(), Some(properties.export.size_bytes));
    }));
}
