//! Both sides of `rping`. One round: the client sends {address, key, length} of its source; the
//! server reads it and answers; the client sends the same of its sink; the server writes the data
//! it has read, and answers. Every message has 16 bytes.

use rdma::{Buf, Fabric, Qp, RemoteRegion, Work};

use crate::{World, message_of, name, named};

/// Port of `rping`.
pub(crate) const PORT: u16 = 7174;

/// Result of one step; an error ends the connection.
type Step = Result<(), String>;

/// Answers `rping -c`.
#[derive(Default)]
pub(crate) struct Server {
    /// Data read in the first half of a round.
    data: Option<Buf>,
    rounds: u32,
    bytes: u64,
}

impl Server {
    pub(crate) fn done(&mut self, world: &mut World, qp: Qp, work: Work, bytes: u32) -> Step {
        match work {
            Work::Recv(buf) => {
                let message = message_of(world, buf, bytes);
                world.receive(qp);
                let remote = named(&message).ok_or("a message that names no memory")?;
                if let Some(from) = self.data.take() {
                    // The write and the answer share one doorbell.
                    world.fabric.post(qp, 0, Work::Write { from, to: remote });
                    world.send(qp, &[0; 16]);
                    return Ok(());
                }
                let into = world.pool.take_data(remote.len).ok_or("no room for its data")?;
                world.fabric.post(qp, 0, Work::Read { into, from: remote });
            }
            Work::Read { into, .. } => {
                let begins = world.pool.bytes(&into).starts_with(b"rdma-ping-");
                self.data = Some(into);
                if !begins {
                    return Err("what was read is not what rping writes".into());
                }
                world.send(qp, &[0; 16]);
            }
            Work::Write { from, .. } => {
                self.rounds += 1;
                self.bytes += u64::from(from.len());
                world.pool.give(from);
            }
            other => world.pool.give(other.into_buf()),
        }
        Ok(())
    }

    pub(crate) fn end(self, world: &mut World) -> (String, bool) {
        self.data.into_iter().for_each(|buf| world.pool.give(buf));
        (format!("rping: {} rounds, {} bytes", self.rounds, self.bytes), true)
    }
}

/// The client: behaves as `rping -c -V` towards `rping -s`.
pub(crate) struct Client {
    rounds: u32,
    bytes: u32,
    finished: u32,
    /// Source and sink.
    memory: Option<(RemoteRegion, RemoteRegion)>,
    /// The server has read the source, and writes the sink next.
    half: bool,
}

impl Client {
    pub(crate) fn new(rounds: u32, bytes: u32) -> Client {
        Client { rounds, bytes, finished: 0, memory: None, half: false }
    }

    pub(crate) fn begin(&mut self, world: &mut World, qp: Qp) {
        self.memory = Some((world.expose(qp, self.bytes), world.expose(qp, self.bytes)));
        self.round(world, qp);
    }

    fn round(&mut self, world: &mut World, qp: Qp) {
        let pattern = self.pattern();
        if let Some((source, sink)) = &mut self.memory {
            world.pool.copy_in(source, 0, &pattern);
            world.pool.copy_in(sink, 0, &vec![0; pattern.len()]);
            let message = name(source.remote());
            world.send(qp, &message);
        }
    }

    /// Data that differ from those of other rounds at every position. A text with a terminating
    /// NUL, because the server writes back a string.
    fn pattern(&self) -> Vec<u8> {
        let message = |at: u32| {
            b'A' + ((at.wrapping_mul(7)).wrapping_add(self.finished.wrapping_mul(31)) % 26) as u8
        };
        (1..self.bytes).map(message).chain([0]).collect()
    }

    pub(crate) fn done(&mut self, world: &mut World, qp: Qp, work: Work, bytes: u32) -> Step {
        let Work::Recv(buf) = work else {
            world.pool.give(work.into_buf());
            return Ok(());
        };
        message_of(world, buf, bytes);
        world.receive(qp);
        let Some((_, sink)) = &self.memory else { return Err("it spoke first".into()) };
        self.half = !self.half;
        if self.half {
            let message = name(sink.remote());
            world.send(qp, &message);
            return Ok(());
        }
        let mut written = vec![0; self.bytes as usize];
        world.pool.copy_out(sink, 0, &mut written);
        if written != self.pattern() {
            return Err(format!("round {}: other bytes came back", self.finished));
        }
        self.finished += 1;
        if self.finished < self.rounds {
            self.round(world, qp);
        } else {
            world.fabric.disconnect(qp);
        }
        Ok(())
    }

    pub(crate) fn end(self, world: &mut World) -> (String, bool) {
        let Client { rounds, bytes, finished, memory, .. } = self;
        for exposed in memory.into_iter().flat_map(<[RemoteRegion; 2]>::from) {
            world.revoke(exposed);
        }
        (format!("rping: {finished} rounds of {bytes} bytes, came back right"), finished == rounds)
    }
}
