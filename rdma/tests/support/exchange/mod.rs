//! A host and a target that exchange blocks of data as NVMe does, without being NVMe: a command is
//! a message of 64 bytes that names memory of the host; the target pushes or pulls the data, and
//! answers with a message of 16 bytes. Every block has a pattern of its own, which is verified.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::sync::Arc;

use rdma::{
    Buf, Event, Initiator, Pool, PoolPlan, Qp, QpLimits, Region, Remote, RemoteRegion, Work,
};

pub(crate) mod network;

/// Direction of the data, in the terms of NVMe.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// To the host: the target writes its memory.
    Read,
    /// To the target, which reads the host's memory.
    Write,
}

/// Parameters of an exchange.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Job {
    pub(crate) kind: Kind,
    /// Bytes of a block.
    pub(crate) len: u32,
    /// Commands at once.
    pub(crate) depth: u32,
}

impl Job {
    fn limits(&self) -> QpLimits {
        QpLimits { receives: 2 * self.depth, sends: 3 * self.depth, reads: 128 }
    }

    fn pool(&self) -> Pool {
        let largest_bytes = self.len.next_power_of_two().max(4096);
        let plan = PoolPlan::without_receives(
            8 * self.depth + 64,
            2 * u64::from(largest_bytes) * u64::from(self.depth),
            largest_bytes,
        );
        Pool::new(plan).unwrap()
    }
}

/// One of the two.
pub(crate) trait Role {
    fn event(&mut self, fabric: &mut dyn Initiator, event: Event);
}

const SEND: u64 = 1 << 32;
const RECEIVE: u64 = 2 << 32;
const DATA: u64 = 3 << 32;

fn fill(bytes: &mut [u8], seed: u64) {
    for (at, word) in bytes.chunks_exact_mut(8).enumerate() {
        word.copy_from_slice(&(seed ^ at as u64).to_ne_bytes());
    }
}

fn verify(bytes: &[u8], seed: u64) {
    for (at, word) in bytes.chunks_exact(8).enumerate() {
        assert_eq!(word, (seed ^ at as u64).to_ne_bytes(), "word {at} of block {seed:#x}");
    }
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
}

/// Sends commands, and offers memory.
pub(crate) struct Host {
    job: Job,
    pool: Pool,
    qp: Option<Qp>,
    /// Commands under way: memory, and the block's seed.
    slots: Vec<Option<(RemoteRegion, u64)>>,
    next: u64,
    /// Commands to start yet.
    left: u64,
    /// Blocks transferred in either direction with the right content.
    pub(crate) done: u64,
    pub(crate) up: bool,
}

impl Host {
    pub(crate) fn new(job: Job) -> Host {
        let slots = (0..job.depth).map(|_| None).collect();
        Host { job, pool: job.pool(), qp: None, slots, next: 1, left: 0, done: 0, up: false }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        self.pool.region()
    }

    pub(crate) fn connect(&mut self, fabric: &mut dyn Initiator, to: SocketAddr) {
        let qp = fabric.connect(to, &[], self.job.limits()).unwrap();
        self.qp = Some(qp);
        for _ in 0..self.job.depth {
            let buf = self.pool.take_cell().unwrap();
            fabric.post(qp, RECEIVE, Work::Recv(buf));
        }
    }

    /// Has `count` more blocks exchanged.
    pub(crate) fn start(&mut self, fabric: &mut dyn Initiator, count: u64) {
        self.left += count;
        for slot in 0..self.slots.len() {
            self.command(fabric, slot);
        }
    }

    fn command(&mut self, fabric: &mut dyn Initiator, slot: usize) {
        let Some(qp) = self.qp.filter(|_| self.left > 0 && self.slots[slot].is_none()) else {
            return;
        };
        let seed = self.next.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (self.left, self.next) = (self.left - 1, self.next + 1);
        let mut data = self.pool.take_data(self.job.len).unwrap();
        if self.job.kind == Kind::Write {
            fill(self.pool.bytes_mut(&mut data), seed);
        }
        let exposed = fabric.register_remote(qp, data).unwrap();
        let Remote { addr, key, len } = exposed.remote();
        self.slots[slot] = Some((exposed, seed));
        let mut from = self.pool.take_cell().unwrap();
        let bytes = self.pool.bytes_mut(&mut from);
        bytes[..8].copy_from_slice(&addr.to_le_bytes());
        bytes[8..12].copy_from_slice(&key.to_le_bytes());
        bytes[12..16].copy_from_slice(&len.to_le_bytes());
        bytes[16..24].copy_from_slice(&seed.to_le_bytes());
        bytes[24..32].copy_from_slice(&(slot as u64).to_le_bytes());
        fabric.post(qp, SEND, Work::Send { from, invalidate: None });
    }

    fn answered(&mut self, fabric: &mut dyn Initiator, buf: Buf) {
        let slot = word(self.pool.bytes(&buf), 0) as usize;
        fabric.post(self.qp.unwrap(), RECEIVE, Work::Recv(buf));
        let (exposed, seed) = self.slots[slot].take().unwrap();
        let data = fabric.deregister_remote(exposed);
        if self.job.kind == Kind::Read {
            verify(self.pool.bytes(&data), seed);
        }
        self.pool.give(data);
        self.done += 1;
        self.command(fabric, slot);
    }
}

impl Role for Host {
    fn event(&mut self, fabric: &mut dyn Initiator, event: Event) {
        match event {
            Event::Established(_) => self.up = true,
            Event::Done(done) => {
                assert!(done.outcome.is_ok(), "{done:?}");
                match done.work {
                    Work::Recv(buf) => self.answered(fabric, buf),
                    work => self.pool.give(work.into_buf()),
                }
            }
            other => panic!("at the host: {other:?}"),
        }
    }
}

/// Answers commands.
pub(crate) struct Target {
    job: Job,
    pool: Pool,
    /// What is pulled: slot of the host, its memory, the block's seed.
    pulls: Vec<Option<(u64, u32, u64)>>,
    /// Commands for which there is no memory just now: slot, memory of the host, seed.
    waiting: VecDeque<(u64, Remote, u64)>,
}

impl Target {
    pub(crate) fn new(job: Job) -> Target {
        let pulls = (0..job.depth).map(|_| None).collect();
        Target { job, pool: job.pool(), pulls, waiting: VecDeque::new() }
    }

    pub(crate) fn region(&self) -> &Arc<Region> {
        self.pool.region()
    }

    fn command(&mut self, fabric: &mut dyn Initiator, qp: Qp, buf: Buf) {
        let bytes = self.pool.bytes(&buf);
        let (addr, both, seed) = (word(bytes, 0), word(bytes, 8), word(bytes, 16));
        let (slot, key, len) = (word(bytes, 24), both as u32, (both >> 32) as u32);
        fabric.post(qp, RECEIVE, Work::Recv(buf));
        self.waiting.push_back((slot, Remote { addr, key, len }, seed));
        self.begin(fabric, qp);
    }

    /// Begins the next command, if there is memory for it.
    fn begin(&mut self, fabric: &mut dyn Initiator, qp: Qp) {
        let Some((slot, remote, seed)) = self.waiting.front().copied() else { return };
        let Some(mut data) = self.pool.take_data(remote.len) else { return };
        self.waiting.pop_front();
        let key = remote.key;
        match self.job.kind {
            Kind::Read => {
                fill(self.pool.bytes_mut(&mut data), seed);
                fabric.post(qp, DATA | slot, Work::Write { from: data, to: remote });
                self.answer(fabric, qp, slot, key);
            }
            Kind::Write => {
                self.pulls[slot as usize] = Some((slot, key, seed));
                fabric.post(qp, DATA | slot, Work::Read { into: data, from: remote });
            }
        }
    }

    fn answer(&mut self, fabric: &mut dyn Initiator, qp: Qp, slot: u64, key: u32) {
        let mut from = self.pool.take_cell().unwrap();
        from.select(0, 16);
        self.pool.bytes_mut(&mut from)[..8].copy_from_slice(&slot.to_le_bytes());
        fabric.post(qp, SEND, Work::Send { from, invalidate: Some(key) });
    }
}

impl Role for Target {
    fn event(&mut self, fabric: &mut dyn Initiator, event: Event) {
        match event {
            Event::Incoming(incoming) => {
                let qp = fabric.open(incoming, self.job.limits()).unwrap();
                for _ in 0..self.job.depth {
                    let buf = self.pool.take_cell().unwrap();
                    fabric.post(qp, RECEIVE, Work::Recv(buf));
                }
                fabric.accept(qp, &[]);
            }
            Event::Established(_) => {}
            Event::Done(done) => {
                assert!(done.outcome.is_ok(), "{done:?}");
                match done.work {
                    Work::Recv(buf) => self.command(fabric, done.qp, buf),
                    Work::Read { into, .. } => {
                        let slot = (done.tag & !DATA) as usize;
                        let (slot, key, seed) = self.pulls[slot].take().unwrap();
                        verify(self.pool.bytes(&into), seed);
                        self.pool.give(into);
                        self.answer(fabric, done.qp, slot, key);
                    }
                    work => self.pool.give(work.into_buf()),
                }
                self.begin(fabric, done.qp);
            }
            Event::Gone(..) | Event::ListenerLost(_) => panic!("at the target: {event:?}"),
        }
    }
}
