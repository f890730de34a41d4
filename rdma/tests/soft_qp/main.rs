//! Two queue pairs of the soft transport against each other, and each against packets made by
//! hand: every rule of requester and responder that has a name.

mod immediate;
mod losses;
mod nak;
mod order;
mod random;
mod wrap;

use std::time::Duration;

use proptest::prelude::*;
use rdma::soft::clock::Time;
use rdma::soft::qp::memory_region::{Memory, Rights};
use rdma::soft::qp::reorder_buffer::ReorderBuffer;
use rdma::soft::qp::{Io, QueuePair, Settings, State};
use rdma::soft::stats::datagrams::DatagramOutcome;
use rdma::wire::header::{
    Aeth, Bth, Credits, Deth, Extended, HeaderBytes, ICRC_BYTES, Nak, Packet, Reth, RnrTimer,
    Syndrome, padding,
};
use rdma::wire::icrc::{Checker, Flow, Verdict};
use rdma::wire::opcode::Opcode;
use rdma::wire::psn::{Msn, Psn, Qpn};
use rdma::{
    Buf, Completion, Event, Fault, Pool, PoolPlan, Qp, ReceivedWith, Remote, RemoteRegion, Work,
};

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
        silence: Duration::ZERO,
        rnr_retries: 7,
        rnr_timer: RnrTimer::new(12),
        ack_delay: Duration::ZERO,
    }
}

/// One end: a queue pair and all it borrows.
struct End {
    pool: Pool,
    memory: Memory,
    reorder: ReorderBuffer,
    exposed: Vec<RemoteRegion>,
    events: Vec<Event>,
    qp: QueuePair,
    now: Time,
}

impl End {
    fn new(settings: &Settings) -> End {
        let plan = PoolPlan::without_receives(64, 4 << 20, 1 << 20);
        let mut qp = QueuePair::new(16, 16);
        qp.ready_to_receive(settings);
        qp.ready_to_send();
        End {
            pool: Pool::new(plan).unwrap(),
            memory: Memory::new(64),
            reorder: ReorderBuffer::new(64),
            exposed: Vec::new(),
            events: Vec::new(),
            qp,
            now: Time::default(),
        }
    }

    fn with<T>(&mut self, step: impl FnOnce(&mut QueuePair, Time, &mut Io<'_>) -> T) -> T {
        let mut io = Io {
            region: self.pool.region(),
            memory: &mut self.memory,
            reorder: &mut self.reorder,
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

    fn revoke(&mut self, remote: Remote) {
        let buf = self.concealed(remote);
        self.pool.give(buf);
    }

    fn concealed(&mut self, remote: Remote) -> Buf {
        let at = self.exposed.iter().position(|exposed| exposed.remote() == remote).unwrap();
        self.memory.revoke(self.exposed.swap_remove(at))
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
        self.inject(bth, Extended { aeth, ..Extended::default() }, payload);
    }

    /// Responses: (number ahead of the first, operation code, syndrome) of each.
    fn answers(&mut self) -> Vec<(i32, Opcode, Option<Syndrome>)> {
        let look = |datagram: Vec<u8>| {
            let packet = Packet::parse(&datagram).unwrap();
            let ahead = packet.bth.psn.since(settings(0).receive_psn);
            (ahead, packet.bth.opcode, packet.aeth().map(|a| a.syndrome))
        };
        self.transmit_all().into_iter().map(look).collect()
    }

    /// The completions so far: tag and outcome. Their buffers go back to the pool.
    fn completions(&mut self) -> Vec<(u64, Result<u32, Fault>)> {
        let mut found = Vec::new();
        for event in self.events.drain(..) {
            let Event::Done(Completion { qp, tag, work, outcome, .. }) = event else { panic!() };
            assert_eq!(qp, Qp(3));
            self.pool.give(work.into_buf());
            found.push((tag, outcome));
        }
        found
    }

    /// The only completion, whose first bytes must be the pattern of `seed`.
    fn completed(&mut self, tag: u64, len: u32, seed: u8) {
        let Event::Done(done) = self.events.remove(0) else { panic!("none") };
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
