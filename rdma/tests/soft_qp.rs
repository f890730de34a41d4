//! Two queue pairs of the soft transport against each other, and each against packets made by
//! hand: every rule of requester and responder that has a name.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use rdma::soft::counters::Fate;
use rdma::soft::header::{
    Aeth, AtomicEth, Bth, Credits, Deth, Extended, HeaderBytes, ICRC_BYTES, Nak, Packet, Reth,
    RnrTimer, Syndrome, padding,
};
use rdma::soft::icrc::{Checker, Flow, Verdict};
use rdma::soft::memory::{Memory, Rights};
use rdma::soft::opcode::Opcode;
use rdma::soft::psn::{Msn, Psn, Qpn};
use rdma::soft::qp::{Io, QueuePair, Settings, State};
use rdma::soft::shelf::Shelf;
use rdma::{Buf, Completion, Event, Exposed, Fault, Pool, PoolPlan, Qp, Remote, Work};

const MTU: u32 = 1024;

fn settings(depth: u8) -> Settings {
    Settings {
        peer: Qpn::new(0x77),
        mtu: MTU,
        send_psn: Psn::new(0xff_fffd),
        receive_psn: Psn::new(0xff_fffd),
        window: 16,
        selective: false,
        reads: depth,
        read_bytes: 4 * MTU,
        answered_reads: depth,
        rights: Rights::ALL,
        ack_timeout: Some(Duration::from_millis(10)),
        retries: 7,
        rnr_retries: 7,
        rnr_timer: RnrTimer::new(12),
        ack_delay: Duration::ZERO,
    }
}

/// One end: a queue pair and all it borrows.
struct End {
    pool: Pool,
    memory: Memory,
    shelf: Shelf,
    exposed: Vec<Exposed>,
    events: VecDeque<Event>,
    qp: QueuePair,
    now: Instant,
}

impl End {
    fn new(settings: &Settings) -> End {
        let plan = PoolPlan {
            cells: 64,
            receives: 0,
            lead_bytes: 0,
            tail_bytes: 0,
            data_bytes: 4 << 20,
            largest_bytes: 1 << 20,
        };
        let mut qp = QueuePair::new(16, 16);
        qp.ready_to_receive(settings);
        qp.ready_to_send();
        End {
            pool: Pool::new(plan).unwrap(),
            memory: Memory::new(64),
            shelf: Shelf::new(64),
            exposed: Vec::new(),
            events: VecDeque::new(),
            qp,
            now: Instant::now(),
        }
    }

    fn with<T>(&mut self, step: impl FnOnce(&mut QueuePair, Instant, &mut Io<'_>) -> T) -> T {
        let mut io = Io {
            region: self.pool.region(),
            memory: &mut self.memory,
            shelf: &mut self.shelf,
            events: &mut self.events,
            qp: Qp(3),
        };
        step(&mut self.qp, self.now, &mut io)
    }

    /// A buffer of `len` bytes, filled with a pattern.
    fn buf(&mut self, len: u32, seed: u8) -> Buf {
        let mut buf = self.pool.take_data(len.max(1)).unwrap();
        buf.select(0, len);
        for (at, byte) in self.pool.bytes_mut(&mut buf).iter_mut().enumerate() {
            *byte = pattern(at, seed);
        }
        buf
    }

    fn post(&mut self, tag: u64, work: Work) {
        self.with(|qp, _, io| qp.post(tag, work, io));
    }

    fn recv(&mut self, tag: u64, len: u32) {
        let buf = self.buf(len, 0);
        self.post(tag, Work::Recv(buf));
    }

    fn send(&mut self, tag: u64, len: u32, seed: u8) {
        let from = self.buf(len, seed);
        self.post(tag, Work::Send { from, invalidate: None });
    }

    fn expose(&mut self, len: u32, seed: u8, rights: Rights) -> Remote {
        let buf = self.buf(len, seed);
        self.exposed.push(self.memory.expose(buf, rights).unwrap());
        self.exposed[self.exposed.len() - 1].remote()
    }

    fn conceal(&mut self, remote: Remote) {
        let buf = self.concealed(remote);
        self.pool.give(buf);
    }

    fn concealed(&mut self, remote: Remote) -> Buf {
        let at = self.exposed.iter().position(|exposed| exposed.remote() == remote).unwrap();
        self.memory.conceal(self.exposed.swap_remove(at))
    }

    /// The next datagram, whole; its CRC is made and checked on the way.
    fn transmit(&mut self) -> Option<Vec<u8>> {
        let outgoing = self.with(|qp, now, io| qp.poll_transmit(now, io))?;
        let flow = Flow {
            source: "10.0.0.1:4791".parse().unwrap(),
            destination: "10.0.0.2:4791".parse().unwrap(),
        };
        let mut payload = Vec::new();
        self.qp.copy_payload(&outgoing, self.pool.region(), &self.memory, &mut payload);
        assert_eq!(payload.len(), outgoing.payload_bytes() as usize);
        let mut datagram = outgoing.header().to_vec();
        datagram.extend(&payload);
        datagram.extend(outgoing.seal(&flow, 9, &payload).as_slice());
        assert_eq!(datagram.len(), outgoing.datagram_bytes());
        assert_eq!(Checker::new().check(&flow, &datagram), Verdict::Solved(9));
        Some(datagram)
    }

    fn transmit_all(&mut self) -> Vec<Vec<u8>> {
        std::iter::from_fn(|| self.transmit()).collect()
    }

    fn handle(&mut self, datagram: &[u8]) {
        let packet = Packet::parse(datagram).unwrap();
        self.with(|qp, now, io| qp.handle(now, &packet, io));
    }

    /// Gives a packet made by hand to the queue pair.
    fn inject(&mut self, bth: Bth, ext: Extended, payload: &[u8]) {
        let bth = Bth { pad: padding(payload.len()), ..bth };
        let mut datagram = HeaderBytes::emit(&bth, &ext).as_slice().to_vec();
        datagram.extend(payload);
        datagram.resize(datagram.len() + usize::from(bth.pad) + ICRC_BYTES, 0);
        self.handle(&datagram);
    }

    /// A request, `ahead` of the first number.
    fn request(&mut self, opcode: Opcode, ahead: u32, ext: Extended, payload: &[u8]) {
        let mut bth = Bth::new(opcode, Qpn::new(3), settings(0).receive_psn.add(ahead));
        bth.ack_request = true;
        self.inject(bth, ext, payload);
    }

    /// A response to our request `ahead` of the first number.
    fn respond(&mut self, opcode: Opcode, ahead: u32, syndrome: Syndrome, payload: &[u8]) {
        let aeth = Some(Aeth { syndrome, msn: Msn::default() });
        let bth = Bth::new(opcode, Qpn::new(3), settings(0).send_psn.add(ahead));
        self.inject(bth, Extended { aeth, atomic_ack: Some(1), ..Extended::default() }, payload);
    }

    /// What comes back: (number ahead of the first, operation code, syndrome) of all that leaves.
    fn answers(&mut self) -> Vec<(i32, Opcode, Option<Syndrome>)> {
        let look = |datagram: Vec<u8>| {
            let packet = Packet::parse(&datagram).unwrap();
            let ahead = packet.bth.psn.since(settings(0).receive_psn);
            (ahead, packet.bth.opcode, packet.ext.aeth.map(|a| a.syndrome))
        };
        self.transmit_all().into_iter().map(look).collect()
    }

    /// The completions so far: tag and outcome. Their buffers go back to the pool.
    fn completions(&mut self) -> Vec<(u64, Result<u32, Fault>)> {
        let mut found = Vec::new();
        while let Some(event) = self.events.pop_front() {
            let Event::Done(Completion { qp, tag, work, outcome, .. }) = event else { panic!() };
            assert_eq!(qp, Qp(3));
            self.pool.give(work.into_buf());
            found.push((tag, outcome));
        }
        found
    }

    /// The only completion, whose first bytes must be the pattern of `seed`.
    fn completed(&mut self, tag: u64, len: u32, seed: u8) {
        let Some(Event::Done(done)) = self.events.pop_front() else { panic!("none") };
        assert_eq!((done.tag, done.outcome), (tag, Ok(len)));
        let buf = done.work.into_buf();
        for (at, byte) in self.pool.bytes(&buf)[..len as usize].iter().enumerate() {
            assert_eq!(*byte, pattern(at, seed), "byte {at}");
        }
        self.pool.give(buf);
    }

    fn elapse(&mut self, time: Duration) {
        self.now += time;
        self.with(|qp, now, io| qp.handle_timeout(now, io));
    }
}

fn pattern(at: usize, seed: u8) -> u8 {
    (at as u8).wrapping_mul(31).wrapping_add((at >> 8) as u8).wrapping_add(seed)
}

fn pair() -> (End, End) {
    (End::new(&settings(4)), End::new(&settings(4)))
}

/// Carries datagrams both ways until neither end has any.
fn settle(a: &mut End, b: &mut End) {
    loop {
        let (forth, back) = (a.transmit_all(), b.transmit_all());
        if forth.is_empty() && back.is_empty() {
            return;
        }
        forth.iter().for_each(|datagram| b.handle(datagram));
        back.iter().for_each(|datagram| a.handle(datagram));
    }
}

const ACK: Option<Syndrome> = Some(Syndrome::ACK);

fn nak(nak: Nak) -> Option<Syndrome> {
    Some(Syndrome::Nak(nak))
}

fn reth(remote: Remote) -> Extended {
    let Remote { addr, key, len } = remote;
    Extended { reth: Some(Reth { address: addr, key, length: len }), ..Extended::default() }
}

#[test]
fn messages_of_all_lengths_arrive() {
    let (mut a, mut b) = pair();
    for (tag, len) in [0, 1, 64, MTU - 1, MTU, MTU + 1, 4160, 40 * MTU].into_iter().enumerate() {
        let (tag, seed) = (tag as u64, len as u8);
        b.recv(tag, len.max(64));
        a.send(tag, len, seed);
        settle(&mut a, &mut b);
        b.completed(tag, len, seed);
        a.completed(tag, len, seed);
    }
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn reads_and_writes_move_exposed_memory_and_a_send_takes_the_key_away() {
    let (mut a, mut b) = pair();
    let remote = b.expose(100_000, 7, Rights::READ.and(Rights::WRITE));
    let into = a.buf(100_000, 0);
    a.post(1, Work::Read { into, from: remote });
    settle(&mut a, &mut b);
    a.completed(1, 100_000, 7);

    let from = a.buf(50_001, 9);
    let to = Remote { addr: remote.addr + 3, ..remote };
    a.post(2, Work::Write { from, to });
    let cqe = a.buf(16, 1);
    a.post(3, Work::Send { from: cqe, invalidate: Some(remote.key) });
    b.recv(4, 64);
    settle(&mut a, &mut b);
    assert_eq!(a.completions(), [(2, Ok(50_001)), (3, Ok(16))]);
    let Some(Event::Done(done)) = b.events.front() else { panic!("none") };
    assert_eq!(done.invalidated, Some(remote.key));
    b.completed(4, 16, 1);
    assert!(b.memory.place(remote.key, remote.addr, 1, Rights::READ).is_err());
    let buf = b.concealed(remote);
    let bytes = b.pool.bytes(&buf);
    assert!((0..50_001).all(|at| bytes[at + 3] == pattern(at, 9)));
    assert!(bytes[2] == pattern(2, 7) && bytes[50_004] == pattern(50_004, 7));
    b.pool.give(buf);
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn a_push_is_a_train_of_equal_segments_with_one_request_for_an_acknowledgement() {
    let mut a = End::new(&Settings { window: 128, ..settings(1) });
    let from = a.buf(16 * MTU, 0);
    a.post(1, Work::Write { from, to: Remote { addr: 0x1000, key: 5, len: 16 * MTU } });
    a.send(2, 16, 0);
    let train = a.transmit_all();
    let (cqe, push) = train.split_last().unwrap();
    assert_eq!(push.len(), 16);
    for (at, datagram) in push.iter().enumerate() {
        let packet = Packet::parse(datagram).unwrap();
        assert_eq!((packet.bth.opcode, packet.bth.ack_request), (Opcode::WriteOnly, false));
        assert_eq!(packet.ext.reth.unwrap().address, 0x1000 + at as u64 * u64::from(MTU));
        assert_eq!(datagram.len(), push[0].len());
    }
    let cqe = Packet::parse(cqe).unwrap();
    assert_eq!((cqe.bth.opcode, cqe.bth.ack_request), (Opcode::SendOnly, true));
    a.respond(Opcode::Acknowledge, 16, Syndrome::ACK, &[]);
    assert_eq!(a.completions(), [(1, Ok(16 * MTU)), (2, Ok(16))]);
}

#[test]
fn a_long_train_asks_for_acknowledgements_on_the_way() {
    let mut a = End::new(&Settings { window: 128, ..settings(1) });
    a.send(1, 100 * MTU, 0);
    let asked: Vec<usize> = a
        .transmit_all()
        .iter()
        .enumerate()
        .filter(|(_, datagram)| Packet::parse(datagram).unwrap().bth.ack_request)
        .map(|(at, _)| at)
        .collect();
    assert_eq!(asked, [31, 63, 95, 99]);
}

/// One that keeps mere acknowledgements back, with receives posted, and how long it does.
fn patient(selective: bool) -> (End, Duration) {
    let ack_delay = Duration::from_micros(50);
    let mut end = End::new(&Settings { ack_delay, selective, ..settings(4) });
    (0..64).for_each(|tag| end.recv(tag, 64));
    (end, ack_delay)
}

#[test]
fn a_mere_acknowledgement_waits_for_company_but_not_long() {
    let (mut b, delay) = patient(false);
    let message = |b: &mut End, at| b.request(Opcode::SendOnly, at, Extended::default(), &[0; 64]);
    message(&mut b, 0);
    assert_eq!(b.answers(), []);
    assert_eq!(b.qp.poll_timeout(), Some(b.now + delay));
    b.send(100, 16, 0);
    let left = b.answers();
    assert_eq!((left[0].1, left[1]), (Opcode::SendOnly, (0, Opcode::Acknowledge, ACK)));
    b.respond(Opcode::Acknowledge, 0, Syndrome::ACK, &[]);
    assert_eq!(b.qp.poll_timeout(), None);
    // Nobody comes along.
    message(&mut b, 1);
    assert_eq!(b.answers(), []);
    b.elapse(delay - Duration::from_nanos(1));
    assert_eq!(b.answers(), []);
    b.elapse(Duration::from_nanos(1));
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, ACK)]);
    // A long silence is ahead.
    message(&mut b, 2);
    assert_eq!((b.answers(), b.qp.is_keeping()), (vec![], true));
    let now = b.now;
    b.qp.hasten(now);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    assert_eq!((b.qp.is_keeping(), b.qp.poll_timeout()), (false, None));
    // The peer has not heard of it, and says so.
    message(&mut b, 1);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    // Data say the same.
    let remote = b.expose(64, 7, Rights::READ);
    message(&mut b, 3);
    assert_eq!(b.answers(), []);
    b.request(Opcode::ReadRequest, 4, reth(remote), &[]);
    assert_eq!(b.answers(), [(4, Opcode::ReadResponseOnly, ACK)]);
    b.elapse(delay);
    assert_eq!((b.answers(), b.qp.poll_timeout()), (vec![], None));
    b.conceal(remote);
    // Many have come.
    (5..36).for_each(|at| message(&mut b, at));
    assert_eq!(b.answers(), []);
    message(&mut b, 36);
    assert_eq!(b.answers(), [(36, Opcode::Acknowledge, ACK)]);
}

#[test]
fn one_of_our_own_kind_hears_of_several_packets_at_once() {
    let (mut b, delay) = patient(true);
    for at in 0..4 {
        b.request(Opcode::SendOnly, at, Extended::default(), &[0; 64]);
        b.send(100, 16, 0);
        let left: Vec<Opcode> = b.answers().into_iter().map(|(_, opcode, _)| opcode).collect();
        let alone = [Opcode::SendOnly, Opcode::Acknowledge];
        assert_eq!(left, alone[..if at < 3 { 1 } else { 2 }], "{at}");
    }
    let remote = b.expose(4 * MTU, 7, Rights::WRITE);
    // Much data, whose sender soon has no place left in its window.
    for at in 4..12 {
        let packet = Remote { len: MTU, ..remote };
        assert_eq!(b.answers(), []);
        b.request(Opcode::WriteOnly, at, reth(packet), &[1; MTU as usize]);
    }
    assert_eq!(b.answers(), [(11, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 12, Extended::default(), &[0; 64]);
    assert_eq!(b.answers(), []);
    b.elapse(delay);
    assert_eq!(b.answers(), [(12, Opcode::Acknowledge, ACK)]);
}

#[test]
fn a_batch_costs_one_acknowledgement() {
    let (mut a, mut b) = pair();
    for tag in 0..8 {
        b.recv(tag, 64);
        a.send(tag, 64, 1);
    }
    for datagram in a.transmit_all() {
        b.handle(&datagram);
    }
    assert_eq!(b.answers(), [(7, Opcode::Acknowledge, ACK)]);
}

#[test]
fn the_window_and_the_depth_of_reads_are_kept() {
    let mut a = End::new(&settings(2));
    a.send(1, 100 * MTU, 0);
    assert_eq!(a.transmit_all().len(), 16);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(a.transmit_all().len(), 4);

    let mut a = End::new(&settings(2));
    let into = a.buf(64 * MTU, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 * MTU } });
    let sent = a.answers();
    assert_eq!(sent, [(0, Opcode::ReadRequest, None), (4, Opcode::ReadRequest, None)]);
    let data = [0; MTU as usize];
    for at in 0..3 {
        a.respond(Opcode::ReadResponseMiddle, at, Syndrome::ACK, &data);
    }
    assert!(a.answers().is_empty());
    a.respond(Opcode::ReadResponseLast, 3, Syndrome::ACK, &data);
    assert_eq!(a.answers(), [(8, Opcode::ReadRequest, None)]);
}

#[test]
fn a_gap_is_reported_once_and_healed() {
    let (mut a, mut b) = pair();
    for tag in 0..6 {
        b.recv(tag, 64);
        a.send(tag, 64, tag as u8);
    }
    let packets = a.transmit_all();
    b.handle(&packets[0]);
    for packet in &packets[2..] {
        b.handle(packet);
    }
    // The complaint acknowledges what came before it.
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
    a.respond(Opcode::Acknowledge, 1, Syndrome::Nak(Nak::Sequence), &[]);
    assert_eq!(a.completions(), [(0, Ok(64))]);
    let again = a.transmit_all();
    assert_eq!(again.len(), 5);
    // Lost once more: the same gap is reported again, as the peer has evidently gone back.
    b.handle(&again[1]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
    for packet in &again {
        b.handle(packet);
    }
    assert_eq!(b.answers(), [(5, Opcode::Acknowledge, ACK)]);
    assert_eq!(b.completions().len(), 6);
}

#[test]
fn duplicates_are_acknowledged_and_not_executed() {
    let (mut a, mut b) = pair();
    b.recv(1, 64);
    b.recv(2, 64);
    a.send(1, 64, 1);
    let packet = a.transmit().unwrap();
    b.handle(&packet);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    b.handle(&packet);
    b.handle(&packet);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    assert_eq!(b.completions(), [(1, Ok(64))]);
}

/// A peer might take the number of a read in an acknowledgement for the end of the read, and any
/// acknowledgement amid its packets for nonsense.
#[test]
fn the_data_of_a_read_are_all_that_acknowledges_it() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::ALL);
    (0..4).for_each(|tag| b.recv(tag, 64));
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 1, Extended::default(), &[1; 16]);
    b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
    // The data of a read acknowledge what came before it.
    let opcodes = [Opcode::ReadResponseFirst, Opcode::ReadResponseLast];
    assert_eq!(b.answers(), [(2, opcodes[0], ACK), (3, opcodes[1], ACK)]);
    // The answers got lost, and the peer goes back to the first request.
    for _ in 0..2 {
        for at in 0..2 {
            b.request(Opcode::SendOnly, at, Extended::default(), &[1; 16]);
            assert!(b.answers().is_empty());
        }
        b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
        assert_eq!(b.answers(), [(2, opcodes[0], ACK), (3, opcodes[1], ACK)]);
    }
    // Another goes back to the first request alone.
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert!(b.answers().is_empty());
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    // What was executed after the read is acknowledged after its data.
    b.request(Opcode::SendOnly, 4, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 1, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 4, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, ACK)]);
}

#[test]
fn a_repeated_request_does_not_silence_a_complaint() {
    let (_, mut b) = pair();
    (0..4).for_each(|tag| b.recv(tag, 64));
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 2, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
}

#[test]
fn a_missing_receive_makes_the_peer_wait() {
    let (mut a, mut b) = pair();
    a.send(1, 64, 5);
    a.send(2, 64, 6);
    for datagram in a.transmit_all() {
        b.handle(&datagram);
    }
    let wait = Some(Syndrome::Rnr(RnrTimer::new(12)));
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, wait)], "and no complaint of the second");
    a.respond(Opcode::Acknowledge, 0, Syndrome::Rnr(RnrTimer::new(12)), &[]);
    assert!(a.transmit().is_none());
    a.respond(Opcode::Acknowledge, 0, Syndrome::Nak(Nak::Sequence), &[]);
    assert!(a.transmit().is_none());
    assert_eq!(a.qp.poll_timeout(), Some(a.now + Duration::from_micros(640)));
    a.elapse(Duration::from_micros(639));
    assert!(a.transmit().is_none());
    b.recv(1, 64);
    b.recv(2, 64);
    a.elapse(Duration::from_micros(1));
    settle(&mut a, &mut b);
    b.completed(1, 64, 5);
    b.completed(2, 64, 6);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(64))]);
}

#[test]
fn a_peer_that_is_never_ready_is_given_up() {
    let mut a = End::new(&Settings { rnr_retries: 2, ..settings(1) });
    a.send(1, 64, 0);
    a.send(2, 64, 0);
    for round in 0..3 {
        assert_eq!(a.transmit_all().len(), 2);
        assert_eq!(a.qp.state(), State::ReadyToSend, "round {round}");
        a.respond(Opcode::Acknowledge, 0, Syndrome::Rnr(RnrTimer::new(1)), &[]);
        a.elapse(Duration::from_micros(10));
    }
    assert_eq!(a.qp.state(), State::Error);
    assert_eq!(a.completions(), [(1, Err(Fault::NotReady)), (2, Err(Fault::Flushed))]);
}

#[test]
fn a_silent_peer_is_given_up_after_the_last_retry() {
    let mut a = End::new(&settings(1));
    a.send(1, 64, 0);
    a.recv(2, 64);
    // The first wait doubles six times; the time is that of seven retries that begin with 10 ms.
    let (mut wait, mut left) = (Duration::from_micros(1250), Duration::from_millis(1910));
    while left > Duration::ZERO {
        assert_eq!(a.transmit_all().len(), 1);
        assert_eq!(a.qp.state(), State::ReadyToSend);
        wait = wait.min(left);
        a.elapse(wait - Duration::from_nanos(1));
        assert!(a.transmit().is_none());
        a.elapse(Duration::from_nanos(1));
        left -= wait;
        wait = (2 * wait).min(Duration::from_millis(80));
    }
    assert_eq!(a.qp.state(), State::Error);
    assert_eq!(a.completions(), [(1, Err(Fault::Unreachable)), (2, Err(Fault::Flushed))]);
    a.send(3, 64, 0);
    a.recv(4, 64);
    assert_eq!(a.completions(), [(3, Err(Fault::Flushed)), (4, Err(Fault::Flushed))]);
    assert!(a.transmit().is_none() && a.qp.poll_timeout().is_none() && a.pool.is_full());
}

#[test]
fn a_read_goes_on_where_its_data_got_lost() {
    let (mut a, mut b) = pair();
    let remote = b.expose(4 * MTU, 3, Rights::READ);
    let into = a.buf(4 * MTU, 0);
    a.post(1, Work::Read { into, from: remote });
    b.handle(&a.transmit().unwrap());
    let data = b.transmit_all();
    assert_eq!(data.len(), 4);
    a.handle(&data[0]);
    a.handle(&data[2]);
    assert!(a.transmit().is_none(), "it may only have been overtaken");
    a.elapse(Duration::from_millis(2));
    let again = a.transmit_all();
    assert_eq!(again.len(), 1, "the gap is noticed");
    a.handle(&data[3]);
    assert!(a.transmit().is_none(), "once");
    let packet = Packet::parse(&again[0]).unwrap();
    let part = packet.ext.reth.unwrap();
    assert_eq!((part.address, part.length), (remote.addr + u64::from(MTU), MTU), "and no more");
    assert_eq!(packet.bth.psn, settings(0).send_psn.add(1));
    b.handle(&again[0]);
    settle(&mut a, &mut b);
    a.completed(1, 4 * MTU, 3);
}

/// Equal lengths side by side make trains; a send still comes after the writes before it.
#[test]
fn what_is_posted_together_leaves_writes_first_then_sends_then_reads() {
    let mut a = End::new(&settings(2));
    let remote = |len| Remote { addr: 0, key: 1, len };
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: remote(64) });
    for tag in [2, 4] {
        let from = a.buf(MTU, 0);
        a.post(tag, Work::Write { from, to: remote(MTU) });
        a.send(tag + 1, 16, 0);
    }
    use Opcode::{ReadRequest, SendOnly, WriteOnly};
    let order = [WriteOnly, WriteOnly, SendOnly, SendOnly, ReadRequest];
    let sent = a.answers();
    let expected: Vec<_> = (0i32..).zip(order).map(|(psn, opcode)| (psn, opcode, None)).collect();
    assert_eq!(sent, expected);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(
        a.completions(),
        [2, 4, 3, 5].map(|tag| (tag, Ok(if tag % 2 == 0 { MTU } else { 16 })))
    );
    a.respond(Opcode::ReadResponseOnly, 4, Syndrome::ACK, &[0; 64]);
    assert_eq!(a.completions(), [(1, Ok(64))]);
}

#[test]
fn a_send_does_not_wait_for_many_writes_that_were_posted_behind_it() {
    const LEN: u32 = 128 << 10;
    let mut a = End::new(&Settings { window: 1024, ..settings(2) });
    for tag in [1, 3, 5] {
        let from = a.buf(LEN, 0);
        a.post(tag, Work::Write { from, to: Remote { addr: 0, key: 1, len: LEN } });
        a.send(tag + 1, 16, 0);
    }
    let packets = (LEN / MTU) as usize;
    let sends: Vec<usize> = a
        .answers()
        .iter()
        .enumerate()
        .filter(|(_, (_, opcode, _))| *opcode == Opcode::SendOnly)
        .map(|(at, _)| at)
        .collect();
    assert_eq!(sends, [packets, 2 * packets + 1, 3 * packets + 2]);
}

#[test]
fn our_own_kind_is_asked_for_pairs_of_packets_while_nothing_gets_lost() {
    let asked = |selective, reads| {
        let mut a = End::new(&Settings { selective, window: 64, ..settings(reads) });
        let into = a.buf(7 * MTU, 0);
        a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 7 * MTU } });
        let length =
            |datagram: &Vec<u8>| Packet::parse(datagram).unwrap().ext.reth.unwrap().length / MTU;
        a.transmit_all().iter().map(length).collect::<Vec<_>>()
    };
    assert_eq!(asked(true, 16), [2, 2, 2, 1]);
    assert_eq!(asked(false, 16), [4, 3]);
    // So few could not fill the window.
    assert_eq!(asked(true, 15), [4, 3]);
}

#[test]
fn an_acknowledgement_past_a_read_means_its_data_are_lost() {
    let mut a = End::new(&settings(2));
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 1);
    a.send(2, 16, 0);
    assert_eq!(a.transmit_all().len(), 1);
    a.respond(Opcode::Acknowledge, 1, Syndrome::ACK, &[]);
    assert!(a.completions().is_empty() && a.transmit().is_none());
    a.elapse(Duration::from_millis(2));
    assert_eq!(a.answers(), [(0, Opcode::ReadRequest, None)], "the send has been executed");
    a.respond(Opcode::ReadResponseOnly, 0, Syndrome::ACK, &[4; 64]);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(16))]);
}

#[test]
fn a_forgotten_key_does_not_matter_to_a_repeated_read_but_to_a_new_one() {
    let (mut a, mut b) = pair();
    let remote = b.expose(64, 3, Rights::READ);
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: remote });
    let request = a.transmit().unwrap();
    b.handle(&request);
    assert_eq!(b.answers().len(), 1);
    b.conceal(remote);
    b.handle(&request);
    assert!(b.answers().is_empty());
    assert_eq!(b.qp.state(), State::ReadyToSend);
    b.request(Opcode::ReadRequest, 1, reth(remote), &[]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn memory_taken_away_under_a_read_ends_the_connection() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::READ);
    b.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    assert!(b.transmit().is_some());
    b.conceal(remote);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn a_read_that_was_never_asked_for_is_not_repeated() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::READ);
    b.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    assert_eq!(b.transmit_all().len(), 2);
    for other in [
        Remote { addr: remote.addr + 1, ..remote },
        Remote { key: remote.key + 1, ..remote },
        Remote { len: 2 * MTU + 1, ..remote },
    ] {
        b.request(Opcode::ReadRequest, 0, reth(other), &[]);
        assert!(b.answers().is_empty());
    }
    // Its second packet alone, and a part of that, are.
    let rest = Remote { addr: remote.addr + u64::from(MTU), key: remote.key, len: 100 };
    b.request(Opcode::ReadRequest, 1, reth(rest), &[]);
    assert_eq!(b.answers(), [(1, Opcode::ReadResponseOnly, ACK)]);
}

/// Each bad request, the refusal that it gets, and that it ends the connection with all work home.
#[test]
fn bad_requests_are_refused() {
    let full = [0u8; MTU as usize];
    let none = Extended::default();
    let nothing = reth(Remote { addr: 0, key: 0x100, len: 8 });
    let long = reth(Remote { addr: 0, key: 0, len: (1 << 31) + 1 });
    let short_first = reth(Remote { addr: 0, key: 0, len: MTU });
    let odd = AtomicEth { address: 4, key: 0, swap_add: 0, compare: 0 };
    let odd = Extended { atomic: Some(odd), ..none };
    let (invalid, access) = (Nak::InvalidRequest, Nak::RemoteAccess);
    let cases: [(Opcode, Extended, &[u8], Nak); 12] = [
        (Opcode::SendMiddle, none, &full, invalid),
        (Opcode::SendLast, none, &[1], invalid),
        (Opcode::WriteLast, none, &[1], invalid),
        (Opcode::SendFirst, none, &full[1..], invalid),
        (Opcode::SendOnly, none, &[0; MTU as usize + 1], invalid),
        (Opcode::WriteOnly, nothing, &[0; 8], access),
        (Opcode::WriteOnly, nothing, &[0; 7], invalid),
        (Opcode::WriteOnly, long, &[0; 8], invalid),
        (Opcode::WriteFirst, short_first, &full, invalid),
        (Opcode::ReadRequest, nothing, &[], access),
        (Opcode::FetchAdd, odd, &[], invalid),
        (Opcode::ReadRequest, nothing, &[0; 4], invalid),
    ];
    for (opcode, ext, payload, expected) in cases {
        let mut b = End::new(&settings(4));
        b.recv(1, 4096);
        b.send(2, 64, 0);
        b.request(opcode, 0, ext, payload);
        assert_eq!(b.qp.state(), State::Error, "{opcode:?}");
        assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(expected))], "{opcode:?}");
        assert_eq!(b.completions(), [(2, Err(Fault::Flushed)), (1, Err(Fault::Flushed))]);
        assert!(b.pool.is_full());
    }
}

#[test]
fn wrong_padding_is_refused() {
    let mut b = End::new(&settings(1));
    b.recv(1, 64);
    let bth = Bth { pad: 1, ..Bth::new(Opcode::SendOnly, Qpn::new(3), settings(1).receive_psn) };
    let mut datagram = bth.emit().to_vec();
    datagram.extend([0; 4 + 1 + ICRC_BYTES]);
    b.handle(&datagram);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}

#[test]
fn messages_are_counted() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(3 * MTU, 0, Rights::ALL);
    b.recv(1, 4 * MTU);
    let msns = |b: &mut End| -> Vec<u32> {
        let of = |d: &Vec<u8>| Packet::parse(d).unwrap().ext.aeth.map(|a| a.msn.get());
        b.transmit_all().iter().filter_map(of).collect()
    };
    let (none, full) = (Extended::default(), vec![0; MTU as usize]);
    b.request(Opcode::SendFirst, 0, none, &full);
    assert_eq!(msns(&mut b), [0], "not before its last packet");
    b.request(Opcode::SendLast, 1, none, &[1]);
    assert_eq!(msns(&mut b), [1]);
    b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
    assert_eq!(msns(&mut b), [2, 2], "first and last response");
    b.request(Opcode::WriteOnly, 5, reth(Remote { len: 4, ..remote }), &[0; 4]);
    assert_eq!(msns(&mut b), [3]);
    let atomic = AtomicEth { address: remote.addr, key: remote.key, swap_add: 0, compare: 0 };
    b.request(Opcode::FetchAdd, 6, Extended { atomic: Some(atomic), ..none }, &[]);
    assert_eq!(msns(&mut b), [4]);
}

#[test]
fn only_the_last_reads_are_kept() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..5 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        assert_eq!(b.answers(), [(at as i32, Opcode::ReadResponseOnly, ACK)]);
    }
    for at in 0..3 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        assert!(b.answers().is_empty(), "{at}");
    }
    b.request(Opcode::ReadRequest, 3, reth(remote), &[]);
    assert_eq!(b.answers(), [(3, Opcode::ReadResponseOnly, ACK)]);
}

#[test]
fn a_target_refuses_all_access_to_memory() {
    let target = Settings { rights: Rights::NONE, answered_reads: 0, ..settings(4) };
    let somewhere = reth(Remote { addr: 0x1000, key: 1, len: 8 });
    let atomic = AtomicEth { address: 8, key: 1, swap_add: 0, compare: 0 };
    let atomic = Extended { atomic: Some(atomic), ..Extended::default() };
    for (opcode, ext, payload) in [
        (Opcode::WriteOnly, somewhere, &[0; 8][..]),
        (Opcode::ReadRequest, somewhere, &[]),
        (Opcode::CompareSwap, atomic, &[]),
    ] {
        let mut b = End::new(&target);
        b.request(opcode, 0, ext, payload);
        assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
        assert_eq!(b.qp.state(), State::Error);
    }
}

#[test]
fn a_message_longer_than_its_buffer_ends_the_connection() {
    let (mut a, mut b) = pair();
    b.recv(1, 2 * MTU);
    b.recv(2, 64);
    a.send(3, 2 * MTU + 1, 0);
    a.recv(4, 64);
    settle(&mut a, &mut b);
    assert_eq!(b.completions(), [(1, Err(Fault::Length)), (2, Err(Fault::Flushed))]);
    let refused = [(3, Err(Fault::RemoteOperation)), (4, Err(Fault::Flushed))];
    assert_eq!(a.completions(), refused);
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn more_reads_than_granted_are_refused() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..3 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
    }
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}

#[test]
fn answers_that_are_not_collected_are_bounded() {
    let mut b = End::new(&settings(4));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..64 {
        b.recv(u64::from(at), 64);
        b.request(Opcode::SendOnly, 2 * at, Extended::default(), &[]);
        if at < 4 {
            b.request(Opcode::ReadRequest, 2 * at + 1, reth(remote), &[]);
        } else {
            b.request(Opcode::SendOnly, 2 * at + 1, Extended::default(), &[]);
        }
        b.request(Opcode::ReadRequest, at % 4 * 2 + 1, reth(remote), &[]);
    }
    assert_eq!(b.transmit_all().len(), 4 + 1);
    for at in 0..64 {
        // All four are forgotten by the queue, kept by the memory, and asked for twice.
        b.request(Opcode::ReadRequest, at % 4 * 2 + 1, reth(remote), &[]);
        b.request(Opcode::SendOnly, 0, Extended::default(), &[]);
    }
    assert!(b.transmit_all().len() <= 4 * 4 + 1);
    assert_eq!(b.qp.state(), State::ReadyToSend);
}

#[test]
fn reads_asked_for_again_before_they_left_still_count() {
    let mut b = End::new(&settings(4));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..5 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
    }
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}

#[test]
fn writes_in_many_packets_as_others_send_them() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(3 * MTU, 0, Rights::WRITE);
    let all = Remote { len: 2 * MTU + 5, ..remote };
    let full = |seed: u8| vec![seed; MTU as usize];
    b.request(Opcode::WriteFirst, 0, reth(all), &full(1));
    b.request(Opcode::WriteMiddle, 1, Extended::default(), &full(2));
    b.request(Opcode::WriteLast, 2, Extended::default(), &[3; 5]);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    let buf = b.concealed(remote);
    let bytes = b.pool.bytes(&buf);
    let at = |n: u32| bytes[n as usize];
    assert_eq!([at(0), at(MTU), at(2 * MTU), at(2 * MTU + 4)], [1, 2, 3, 3]);
    assert_eq!(at(2 * MTU + 5), pattern(2 * MTU as usize + 5, 0));
}

#[test]
fn atomics_happen_once() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(16, 0, Rights::ATOMIC);
    let eth = |swap_add, compare| Extended {
        atomic: Some(AtomicEth { address: remote.addr, key: remote.key, swap_add, compare }),
        ..Extended::default()
    };
    let value = |b: &End| {
        let exposed = b.exposed.iter().find(|exposed| exposed.remote() == remote).unwrap();
        let mut value = [0; 8];
        b.pool.copy_out(exposed, 0, &mut value);
        u64::from_ne_bytes(value)
    };
    let first = value(&b);
    b.request(Opcode::FetchAdd, 0, eth(5, 0), &[]);
    assert_eq!(b.answers(), [(0, Opcode::AtomicAcknowledge, ACK)]);
    b.request(Opcode::FetchAdd, 0, eth(5, 0), &[]);
    let again = b.transmit().unwrap();
    assert_eq!(Packet::parse(&again).unwrap().ext.atomic_ack, Some(first));
    assert_eq!(value(&b), first + 5, "a duplicate gets the same answer and changes nothing");
    b.request(Opcode::CompareSwap, 1, eth(1, first), &[]);
    assert_eq!(value(&b), first + 5);
    b.request(Opcode::CompareSwap, 2, eth(1, first + 5), &[]);
    assert_eq!(value(&b), 1);
}

#[test]
fn answers_that_make_no_sense_change_nothing() {
    let mut a = End::new(&settings(2));
    a.send(1, 64, 0);
    let into = a.buf(64, 0);
    a.post(2, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 2);
    a.respond(Opcode::Acknowledge, 2, Syndrome::ACK, &[]);
    a.respond(Opcode::Acknowledge, 0xff_ffff, Syndrome::Nak(Nak::RemoteAccess), &[]);
    a.respond(Opcode::Acknowledge, 0, Syndrome::Reserved(0x40), &[]);
    a.respond(Opcode::ReadResponseOnly, 0, Syndrome::ACK, &[1; 64]);
    a.respond(Opcode::AtomicAcknowledge, 0, Syndrome::ACK, &[]);
    assert!(a.completions().is_empty() && a.transmit().is_none());
    a.respond(Opcode::ReadResponseOnly, 1, Syndrome::ACK, &[1; 63]);
    assert!(a.completions().is_empty(), "too few data");
    a.respond(Opcode::ReadResponseOnly, 1, Syndrome::Ack(Credits::new(0)), &[1; 64]);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(64))]);
}

#[test]
fn refusals_become_faults_of_the_work_they_mean() {
    for (refusal, fault) in [
        (Nak::RemoteAccess, Fault::RemoteAccess),
        (Nak::InvalidRequest, Fault::RemoteOperation),
        (Nak::RemoteOperation, Fault::RemoteOperation),
    ] {
        let mut a = End::new(&settings(2));
        for tag in 0..3 {
            a.send(tag, 64, 0);
        }
        assert_eq!(a.transmit_all().len(), 3);
        a.respond(Opcode::Acknowledge, 1, Syndrome::Nak(refusal), &[]);
        let expected = [(0, Ok(64)), (1, Err(fault)), (2, Err(Fault::Flushed))];
        assert_eq!(a.completions(), expected);
        assert_eq!(a.qp.state(), State::Error);
    }
}

#[test]
fn work_posted_early_waits_for_the_connection() {
    let mut a = End::new(&settings(1));
    a.qp = QueuePair::new(4, 4);
    a.send(1, 3 * MTU, 1);
    a.send(2, 16, 1);
    assert!(a.transmit().is_none());
    a.qp.ready_to_receive(&settings(1));
    assert!(a.transmit().is_none());
    a.qp.ready_to_send();
    assert_eq!(a.transmit_all().len(), 4);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(a.completions(), [(1, Ok(3 * MTU)), (2, Ok(16))]);
}

/// A hostile peer: requests, answers and time in any order.
#[derive(Clone, Debug)]
enum Blow {
    Packet { opcode: u8, ahead: i32, len: u32, words: [u32; 4], flags: u8 },
    Transmit(u8),
    Post(u8, u32),
    Time(u32),
}

fn blow() -> impl Strategy<Value = Blow> {
    let codes: Vec<u8> = Opcode::all().map(Opcode::to_wire).collect();
    let len = prop_oneof![0..3u32, Just(MTU), MTU - 1..MTU + 2, 0..2 * MTU];
    let word = prop_oneof![0..4u32, Just(0x101), Just(MTU), any::<u32>()];
    let ahead = prop_oneof![4 => -2..4i32, 1 => any::<i32>()];
    let packet = (
        proptest::sample::select(codes),
        ahead,
        len,
        [word.clone(), word.clone(), word.clone(), word],
        any::<u8>(),
    );
    prop_oneof![
        6 => packet.prop_map(|(opcode, ahead, len, words, flags)| Blow::Packet { opcode, ahead, len, words, flags }),
        2 => (1..20u8).prop_map(Blow::Transmit),
        2 => (0..4u8, 0..5000u32).prop_map(|(kind, len)| Blow::Post(kind, len)),
        1 => (0..20_000u32).prop_map(Blow::Time),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Whatever the peer sends: no panic, and all work comes home exactly once.
    #[test]
    fn no_peer_can_break_it(blows in proptest::collection::vec(blow(), 1..80)) {
        let mut end = End::new(&settings(3));
        let remote = end.expose(3000, 0, Rights::ALL);
        let (mut posted, mut next, mut received) = (0u64, 0u32, 0u32);
        let mut home = Vec::new();
        for blow in blows {
            match blow {
                Blow::Packet { opcode, ahead, len, words, flags } => {
                    let opcode = Opcode::from_wire(opcode).unwrap();
                    let request = opcode.row().request;
                    let base = if request { received } else { next };
                    let psn = settings(0).send_psn.add(base.wrapping_add(ahead as u32));
                    let bth = Bth { ack_request: flags & 1 == 1, ..Bth::new(opcode, Qpn::new(3), psn) };
                    let address = remote.addr.wrapping_add(u64::from(words[0])) & !u64::from(flags & 8);
                    let key = if flags & 2 == 0 { remote.key } else { words[1] };
                    let length = if flags & 4 == 0 { len } else { words[2] };
                    let reth = Reth { address, key, length };
                    let atomic = AtomicEth { address, key, swap_add: 1, compare: 2 };
                    let aeth = Aeth { syndrome: Syndrome::from_wire(words[3] as u8), msn: Msn::new(words[2]) };
                    end.inject(bth, Extended {
                        deth: Some(Deth { qkey: 1, source: Qpn::GSI }),
                        reth: Some(reth), atomic: Some(atomic), aeth: Some(aeth),
                        atomic_ack: Some(1), immediate: Some([0; 4]), invalidate: Some(words[1]), held: Some([flags; 16]),
                    }, &vec![0; len as usize]);
                    if request && ahead == 0 { received += 1 } else if ahead == 0 { next += 1 }
                }
                Blow::Transmit(count) => for _ in 0..count {
                    let _ = end.transmit();
                },
                Blow::Post(kind, len) => if end.pool.free().2 > 1 << 20 {
                    posted += 1;
                    let buf = end.buf(len, 0);
                    let far = Remote { addr: 0, key: 0, len };
                    end.post(posted, match kind {
                        0 => Work::Recv(buf),
                        1 => Work::Send { from: buf, invalidate: None },
                        2 => Work::Read { into: buf, from: far },
                        _ => Work::Write { from: buf, to: far },
                    });
                },
                Blow::Time(micros) => end.elapse(Duration::from_micros(micros.into())),
            }
            home.extend(end.completions().into_iter().map(|(tag, _)| tag));
        }
        end.with(|qp, _, io| qp.close(io));
        let left = end.transmit_all().len();
        prop_assert!(left <= 1, "only a refusal may leave, not {}", left);
        home.extend(end.completions().into_iter().map(|(tag, _)| tag));
        home.sort_unstable();
        prop_assert_eq!(home, (1..=posted).collect::<Vec<_>>());
        end.conceal(remote);
        prop_assert!(end.pool.is_full());
    }

    /// Two ends, all verbs both ways, a network that loses, repeats and swaps datagrams.
    #[test]
    fn data_survive_a_bad_network(
        jobs in proptest::collection::vec((any::<bool>(), 0..3u8, 0..9000u32), 1..24),
        seed in 1..u64::MAX,
        bad in 0..30u8,
        selective: bool,
    ) {
        // A loss of a third both ways needs more than the usual patience.
        let patient = Settings { retries: 60, selective, ..settings(4) };
        let (mut a, mut b) = (End::new(&patient), End::new(&patient));
        let mut exposed = Vec::new();
        for (tag, (from_a, verb, len)) in jobs.iter().enumerate() {
            let (tag, seed) = (tag as u64, tag as u8);
            let (one, other) = if *from_a { (&mut a, &mut b) } else { (&mut b, &mut a) };
            match verb {
                0 => {
                    other.recv(1000 + tag, (*len).max(1));
                    one.send(tag, *len, seed);
                }
                1 => {
                    let from = other.expose(*len, seed, Rights::READ);
                    let into = one.buf(*len, 0xee);
                    one.post(tag, Work::Read { into, from });
                    exposed.push((!from_a, from, seed));
                }
                _ => {
                    let to = other.expose(*len, 0xee, Rights::WRITE);
                    let from = one.buf(*len, seed);
                    one.post(tag, Work::Write { from, to });
                    exposed.push((!from_a, to, seed));
                }
            }
        }
        let mut state = seed;
        let mut roll = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8 % 100
        };
        for _ in 0..3000 {
            let mut quiet = true;
            for forth in [true, false] {
                let (one, other) = if forth { (&mut a, &mut b) } else { (&mut b, &mut a) };
                let mut flight = one.transmit_all();
                quiet &= flight.is_empty();
                for at in 1..flight.len() {
                    if roll() < bad { flight.swap(at - 1, at) }
                }
                for datagram in flight {
                    let fate = roll();
                    if fate >= bad { other.handle(&datagram) }
                    if fate % 7 == 3 { other.handle(&datagram) }
                }
            }
            if quiet {
                let Some(at) = a.qp.poll_timeout().into_iter().chain(b.qp.poll_timeout()).min() else { break };
                for end in [&mut a, &mut b] {
                    let wait = at.saturating_duration_since(end.now);
                    end.elapse(wait);
                }
            }
        }
        prop_assert_eq!((a.qp.state(), b.qp.state()), (State::ReadyToSend, State::ReadyToSend));
        for (at_a, remote, seed) in exposed {
            let end = if at_a { &mut a } else { &mut b };
            let buf = end.concealed(remote);
            let right = end.pool.bytes(&buf).iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed));
            prop_assert!(right, "exposed memory of {}", seed);
            end.pool.give(buf);
        }
        let mut home = 0;
        for end in [&mut a, &mut b] {
            while let Some(Event::Done(done)) = end.events.pop_front() {
                let len = done.outcome.unwrap() as usize;
                let seed = (done.tag % 1000) as u8;
                let buf = done.work.into_buf();
                let right = end.pool.bytes(&buf)[..len].iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed));
                prop_assert!(right, "work {}", done.tag);
                end.pool.give(buf);
                home += 1;
            }
            prop_assert!(end.pool.is_full());
        }
        let sends = jobs.iter().filter(|(_, verb, _)| *verb == 0).count();
        prop_assert_eq!(home, jobs.len() + sends);
    }
}

/// A peer that says for how many messages it has receives gets no more sends than that; but one
/// when there is nothing else on its way, whose answer tells of new receives.
#[test]
fn sends_wait_for_credits() {
    let mut a = End::new(&settings(0));
    let acknowledge = |a: &mut End, ahead: u32, msn: u32, credits: u8| {
        let syndrome = Syndrome::Ack(Credits::new(credits));
        let aeth = Some(Aeth { syndrome, msn: Msn::new(msn) });
        let bth = Bth::new(Opcode::Acknowledge, Qpn::new(3), settings(0).send_psn.add(ahead));
        a.inject(bth, Extended { aeth, ..Extended::default() }, &[]);
    };
    // How many leave, and whether the last one asks for an answer.
    let leave = |a: &mut End| {
        let all = a.transmit_all();
        let last = all.last().map(|last| Packet::parse(last).unwrap().bth.ack_request);
        (all.len(), last)
    };
    (0..9).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(leave(&mut a), (9, Some(true)), "nothing is known of credits");
    acknowledge(&mut a, 8, 9, 2);
    (9..16).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(leave(&mut a), (2, Some(true)));
    acknowledge(&mut a, 9, 10, 3);
    assert_eq!(leave(&mut a), (2, Some(true)));
    acknowledge(&mut a, 12, 13, 0);
    assert_eq!(leave(&mut a), (1, Some(true)), "nothing else is on its way");
    assert_eq!(leave(&mut a), (0, None));
    acknowledge(&mut a, 13, 14, 31);
    assert_eq!(leave(&mut a), (2, Some(true)), "no limit any more");
}

/// It changes nothing: whoever can name a queue pair could slow it down by such packets.
#[test]
fn a_notification_of_congestion_is_counted() {
    let mut a = End::new(&settings(0));
    let bth = Bth::new(Opcode::CongestionNotification, Qpn::new(3), Psn::new(0));
    let packet = Packet { bth, ext: Extended::default(), payload: &[0; 16] };
    (0..100).for_each(|_| {
        let fate = a.with(|qp, now, io| qp.handle(now, &packet, io));
        assert_eq!(fate, Fate::Congestion);
    });
    (0..16).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(a.transmit_all().len(), 16, "the whole window");
    assert_eq!(a.completions(), []);
}
