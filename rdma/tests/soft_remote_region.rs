//! Every way into memory that a peer may not enter, at one queue pair: all operation codes, with
//! keys and addresses around those that are right. What may be done is said here anew, and anything
//! else must leave every byte as it was, show none, and be refused.

use std::time::Duration;

use rdma::soft::clock::Time;
use rdma::soft::qp::memory_region::{Memory, Rights};
use rdma::soft::qp::reorder_buffer::ReorderBuffer;
use rdma::soft::qp::{Io, QueuePair, Settings, State};
use rdma::wire::header::{
    Bth, Extended, HeaderBytes, ICRC_BYTES, MAX_MESSAGE_BYTES, Nak, Packet, Reth, RnrTimer,
    Syndrome, padding,
};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Psn, Qpn};
use rdma::{Buf, Event, Pool, PoolPlan, Qp, RemoteRegion, Work};

const MTU: u32 = 256;
/// Of each buffer of 4096 bytes, what is exposed.
const WINDOW: (u32, u32) = (1024, 2048);
const BEFORE: u8 = 0xa5;
const WRITTEN: u8 = 0x5a;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    /// One packet.
    Write(Opcode),
    /// Several, the last of this code.
    LongWrite(Opcode),
    Read,
}

const WAYS: [Way; 5] = [
    Way::Write(Opcode::WriteOnly),
    Way::Write(Opcode::WriteOnlyImmediate),
    Way::LongWrite(Opcode::WriteLast),
    Way::LongWrite(Opcode::WriteLastImmediate),
    Way::Read,
];

impl Way {
    fn needs(self) -> Rights {
        match self {
            Way::Write(_) | Way::LongWrite(_) => Rights::WRITE,
            Way::Read => Rights::READ,
        }
    }
}

/// What peers may do, as this test knows it.
#[derive(Clone, Copy)]
struct Open {
    key: u32,
    addr: u64,
    rights: Rights,
}

/// Memory, some of it exposed, and what is needed to receive.
struct Prey {
    pool: Pool,
    memory: Memory,
    /// Buffers that nobody may enter, and which are not even exposed.
    closed: Vec<Buf>,
    exposed: Vec<RemoteRegion>,
    open: Vec<Open>,
    /// Keys that open nothing any more.
    stale: Vec<u32>,
    rights: Rights,
}

impl Prey {
    /// With nothing exposed, as at a target; or much, as at a host.
    fn new(host: bool, rights: Rights) -> Prey {
        let plan = PoolPlan::without_receives(4, 16 * 4096, 4096);
        let mut pool = Pool::new(plan).unwrap();
        let mut closed: Vec<Buf> = std::iter::from_fn(|| pool.take_data(4096)).collect();
        assert_eq!(closed.len(), 16);
        closed.iter_mut().for_each(|buf| pool.bytes_mut(buf).fill(BEFORE));
        let mut memory = Memory::new(64);
        let (mut exposed, mut open, mut stale) = (Vec::new(), Vec::new(), Vec::new());
        if host {
            // Every other one is opened, so each has closed neighbours.
            let sets = [Rights::READ, Rights::WRITE, Rights::ALL, Rights::NONE];
            for (at, rights) in sets.into_iter().enumerate() {
                let mut buf = closed.remove(at + 1);
                buf.select(WINDOW.0, WINDOW.1);
                // The slot has had other keys before.
                for _ in 0..at {
                    let old = memory.expose(buf, Rights::ALL).unwrap();
                    stale.push(old.remote().key);
                    buf = memory.revoke(old);
                }
                let new = memory.expose(buf, rights).unwrap();
                open.push(Open { key: new.remote().key, addr: new.remote().addr, rights });
                exposed.push(new);
            }
            // The peer has taken one key back.
            let mut buf = closed.pop().unwrap();
            buf.select(WINDOW.0, WINDOW.1);
            let taken = memory.expose(buf, Rights::ALL).unwrap();
            memory.invalidate(taken.remote().key).unwrap();
            stale.push(taken.remote().key);
            exposed.push(taken);
        }
        Prey { pool, memory, closed, exposed, open, stale, rights }
    }

    /// Whether `len` bytes at `addr` may be accessed so.
    fn may(&self, needs: Rights, key: u32, addr: u64, len: u32) -> bool {
        let end = u128::from(addr) + u128::from(len);
        self.rights.has(needs)
            && self.open.iter().any(|open| {
                let last = u128::from(open.addr) + u128::from(WINDOW.1);
                open.key == key && open.rights.has(needs) && addr >= open.addr && end <= last
            })
    }

    /// Fills all exposed memory again.
    fn refill(&mut self) {
        for exposed in &mut self.exposed {
            self.pool.copy_in(exposed, 0, &[BEFORE; WINDOW.1 as usize]);
        }
    }

    /// How many bytes of all memory have changed.
    fn changed(&self) -> usize {
        const SAME: [u8; 4096] = [BEFORE; 4096];
        let differ = |bytes: &[u8]| bytes.iter().filter(|byte| **byte != BEFORE).count();
        let closed = self.closed.iter().map(|buf| self.pool.bytes(buf));
        let closed: usize = closed.filter(|b| **b != SAME[..b.len()]).map(differ).sum();
        let mut copy = [0; WINDOW.1 as usize];
        let open = self.exposed.iter().map(|exposed| {
            self.pool.copy_out(exposed, 0, &mut copy);
            if copy == SAME[..copy.len()] { 0 } else { differ(&copy) }
        });
        closed + open.sum::<usize>()
    }

    /// Gives datagrams to a queue pair that has two receives: its last answer, the bytes that all
    /// answers show, and whether it lives.
    fn hit(&mut self, datagrams: &[Vec<u8>]) -> (Option<Syndrome>, Vec<u8>, bool) {
        let settings = Settings {
            peer: Qpn::new(0x77),
            mtu: MTU,
            send_psn: Psn::new(0),
            receive_psn: Psn::new(0),
            window: 16,
            selective: false,
            reads: 4,
            read_bytes: 4 * MTU,
            answered_reads: 4,
            rights: self.rights,
            ack_timeout: Some(Duration::from_millis(10)),
            retries: 7,
            silence: Duration::ZERO,
            rnr_retries: 7,
            rnr_timer: RnrTimer::new(12),
            ack_delay: Duration::ZERO,
        };
        let (mut qp, mut reorder, mut events) =
            (QueuePair::new(2, 2), ReorderBuffer::new(8), Vec::new());
        let now = Time::default();
        qp.ready_to_receive(&settings);
        qp.ready_to_send();
        let receives: Vec<Buf> = (0..2).map(|_| self.pool.take_cell().unwrap()).collect();
        let mut io = Io {
            region: self.pool.region(),
            memory: &mut self.memory,
            reorder: &mut reorder,
            events: &mut events,
            qp: Qp(0),
        };
        receives.into_iter().for_each(|buf| qp.post(0, Work::Recv(buf), &mut io));
        for datagram in datagrams {
            // Bytes that are no packet are dropped earlier.
            if let Ok(packet) = Packet::parse(datagram) {
                qp.handle(now, &packet, &mut io);
            }
        }
        let (mut answer, mut shown) = (None, Vec::new());
        while let Some(outgoing) = qp.poll_transmit(now, &mut io) {
            qp.copy_payload(&outgoing, io.region, io.memory, &mut shown);
            let mut bytes = outgoing.header().to_vec();
            bytes.resize(outgoing.datagram_bytes(), 0);
            let packet = Packet::parse(&bytes).unwrap();
            answer = packet.aeth().map(|aeth| aeth.syndrome).or(answer);
        }
        let lives = qp.state() != State::Error;
        qp.close(&mut io);
        for event in events {
            let Event::Done(done) = event else { break };
            self.pool.give(done.work.into_buf());
        }
        assert!(reorder.is_empty());
        (answer, shown, lives)
    }

    /// Tries one way in, and judges. True when it was open.
    fn attempt(&mut self, way: Way, key: u32, address: u64, length: u32) -> bool {
        let (answer, shown, lives) = self.hit(&datagrams(way, key, address, length));
        let changed = self.changed();
        let what = format!("{way:?} key {key:#x} at {address:#x}, {length} bytes: {answer:?}");
        let odd = match way {
            // What the way cannot carry is refused as such.
            Way::Write(_) => length > MTU,
            Way::LongWrite(_) => length <= MTU || length > MAX_MESSAGE_BYTES,
            Way::Read => length > MAX_MESSAGE_BYTES,
        };
        let open = self.may(way.needs(), key, address, length);
        if odd || !open && length > 0 {
            assert_eq!((changed, shown.len(), lives), (0, 0, false), "{what}");
            let nak = |nak| answer == Some(Syndrome::Nak(nak));
            assert!(nak(Nak::RemoteAccess) || odd && nak(Nak::InvalidRequest), "{what}");
            return false;
        }
        if !self.rights.has(way.needs()) {
            assert_eq!((changed, shown.len(), lives), (0, 0, false), "{what}");
            return false;
        }
        // Nothing at all may be read or written anywhere: no key is looked at.
        let (writes, reads) = match way {
            Way::Write(_) | Way::LongWrite(_) => (length as usize, 0),
            Way::Read => (0, length as usize),
        };
        assert!(
            answer == Some(Syndrome::ACK) || matches!(answer, Some(Syndrome::Ack(_))),
            "{what}"
        );
        assert_eq!((changed, shown.len(), lives), (writes, reads, true), "{what}");
        assert!(shown.iter().all(|byte| *byte == BEFORE), "{what}");
        self.refill();
        true
    }
}

/// The packets of a way in.
fn datagrams(way: Way, key: u32, address: u64, length: u32) -> Vec<Vec<u8>> {
    let reth = Extended { reth: Some(Reth { address, key, length }), ..Extended::default() };
    let immediate = Some([1, 2, 3, 4]);
    let none = Extended { immediate, ..Extended::default() };
    let payload = |len: u32| vec![WRITTEN; len.min(2 * MTU) as usize];
    match way {
        Way::Write(opcode) => {
            vec![packet(opcode, 0, Extended { immediate, ..reth }, &payload(length))]
        }
        Way::LongWrite(last) => {
            let mut left = length.min(WINDOW.1 + 1).saturating_sub(MTU);
            let mut packets = vec![packet(Opcode::WriteFirst, 0, reth, &payload(MTU))];
            while left > MTU {
                let number = packets.len() as u32;
                packets.push(packet(Opcode::WriteMiddle, number, none, &payload(MTU)));
                left -= MTU;
            }
            packets.push(packet(last, packets.len() as u32, none, &payload(left)));
            packets
        }
        Way::Read => vec![packet(Opcode::ReadRequest, 0, reth, &[])],
    }
}

fn packet(opcode: Opcode, number: u32, ext: Extended, payload: &[u8]) -> Vec<u8> {
    let mut bth = Bth::new(opcode, Qpn::new(3), Psn::new(number));
    (bth.ack_request, bth.pad) = (true, padding(payload.len()));
    let mut datagram = HeaderBytes::emit(&bth, &ext).as_slice().to_vec();
    datagram.extend(payload);
    datagram.resize(datagram.len() + usize::from(bth.pad) + ICRC_BYTES, 0);
    datagram
}

/// A key and what is like it: each bit changed, the generations and the slots beside it.
fn near(key: u32) -> impl Iterator<Item = u32> {
    let beside = [1, 0x100].into_iter().flat_map(move |step| {
        [key.wrapping_add(step), key.wrapping_sub(step), key.wrapping_add(255 * step)]
    });
    (0..32).map(move |bit| key ^ 1 << bit).chain(beside)
}

/// Where an access of `length` bytes may just begin in a window, may just not, and far away.
fn edges(window: u64, length: u32) -> Vec<u64> {
    let end = window + u64::from(WINDOW.1);
    let mut all = vec![0, 4096, 1 << 63, u64::MAX, 0u64.wrapping_sub(u64::from(length))];
    all.extend([window ^ 1 << 63, window + (1 << 32), window + 4096, window - 4096]);
    for edge in [window, end.wrapping_sub(u64::from(length)), end] {
        all.extend([edge.wrapping_sub(8), edge.wrapping_sub(1), edge, edge + 1, edge + 8]);
    }
    all
}

const LENGTHS: [u32; 10] = [0, 1, 8, 255, 256, 264, 2048, 2049, 1 << 31, u32::MAX];
/// What each way can carry at all.
const FITTING: [u32; 3] = [8, 256, 264];

#[test]
fn no_key_or_address_grants_access_to_a_target() {
    for rights in [Rights::NONE, Rights::ALL] {
        let mut target = Prey::new(false, rights);
        let base = target.pool.region().addr() as u64;
        for way in WAYS {
            for key in [0, 1, 0x100, 0x101, 0x1ff, u32::MAX] {
                for address in [0, 1024, 4096, base, base + 4096, u64::MAX] {
                    for length in LENGTHS {
                        let empty = length == 0 && rights == Rights::ALL;
                        let open = target.attempt(way, key, address, length);
                        assert!(!open || empty, "{way:?} {key} {address} {length}");
                    }
                }
            }
        }
    }
}

#[test]
fn neighbouring_and_stale_keys_grant_no_access() {
    let mut host = Prey::new(true, Rights::ALL);
    let keys: Vec<u32> = host.open.iter().map(|open| open.key).chain(host.stale.clone()).collect();
    let places: Vec<u64> = host.open.iter().map(|open| open.addr).collect();
    let mut opened = 0;
    for way in WAYS {
        for key in keys.iter().flat_map(|key| near(*key).chain([*key])) {
            for address in &places {
                for length in FITTING {
                    opened += usize::from(host.attempt(way, key, *address, length));
                }
            }
        }
    }
    // The judge can also say yes.
    assert!(opened > 0);
}

#[test]
fn addresses_beside_a_window_are_closed() {
    let mut host = Prey::new(true, Rights::ALL);
    let mut opened = [0; WAYS.len()];
    for Open { key, addr, .. } in host.open.clone() {
        for (opened, way) in opened.iter_mut().zip(WAYS) {
            for length in LENGTHS {
                for address in edges(addr, length) {
                    *opened += usize::from(host.attempt(way, key, address, length));
                }
            }
        }
    }
    assert!(opened.iter().all(|opened| *opened > 2), "{opened:?}");
}

/// Live keys and addresses everywhere in packets of all 256 codes: those that are no access to
/// memory are none, in whatever order their headers stand.
#[test]
fn opcodes_without_memory_access_touch_no_memory() {
    let mut host = Prey::new(true, Rights::ALL);
    let Some(all) = host.open.iter().copied().find(|open| open.rights == Rights::ALL) else {
        panic!("nothing is open")
    };
    let accesses = [0x06, 0x0a, 0x0b, 0x0c];
    for code in (0..=u8::MAX).filter(|code| !accesses.contains(code)) {
        for offset in 0..8 {
            for length in [0, 8, 200, 256] {
                let mut datagram = packet(Opcode::SendOnly, 0, Extended::default(), &[]);
                datagram.truncate(12);
                datagram[0] = code;
                datagram.resize(12 + 4 * offset, 0);
                datagram.extend(all.addr.to_be_bytes());
                datagram.extend(all.key.to_be_bytes());
                datagram.extend(8u32.to_be_bytes());
                datagram.resize(datagram.len() + length + ICRC_BYTES, WRITTEN);
                let (_, shown, _) = host.hit(&[datagram]);
                assert_eq!((host.changed(), shown.len()), (0, 0), "{code:#x} {offset} {length}");
            }
        }
    }
}

/// A message that has begun continues, and no other begins within it.
#[test]
fn no_access_begins_within_an_unfinished_write() {
    let mut host = Prey::new(true, Rights::ALL);
    let mut open = host.open.iter().copied();
    let Open { key, addr, .. } = open.find(|open| open.rights == Rights::ALL).expect("one");
    let to = |length| {
        let reth = Some(Reth { address: addr, key, length });
        Extended { reth, ..Extended::default() }
    };
    let full = [WRITTEN; MTU as usize];
    let first = packet(Opcode::WriteFirst, 0, to(2 * MTU), &full);
    for (opcode, length, payload) in [
        (Opcode::WriteOnly, MTU, &full[..]),
        (Opcode::WriteFirst, 2 * MTU, &full),
        (Opcode::ReadRequest, MTU, &[]),
    ] {
        let second = packet(opcode, 1, to(length), payload);
        let (answer, shown, lives) = host.hit(&[first.clone(), second]);
        assert_eq!(answer, Some(Syndrome::Nak(Nak::InvalidRequest)), "{opcode:?}");
        assert_eq!((host.changed(), shown.len(), lives), (MTU as usize, 0, false), "{opcode:?}");
        host.refill();
    }
}
