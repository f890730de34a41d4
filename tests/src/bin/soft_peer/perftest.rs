//! The server side of perftest's bandwidth tests with `-R` (perftest 4.5 and later; over IPv4, the
//! only one supported with `-R`).
//!
//! The client connects once to exchange parameters and then, to the same port, for the test. On the
//! first connection it sends a message, waits for one of the same length, and so on: its version
//! (16 bytes), its sizes of a page and a cache line (4 bytes each), its MTU (2 bytes), all of which
//! may be echoed; and, at every synchronisation point, 56 bytes with the memory for the test.
//! `ib_send_bw` then sends, `ib_write_bw` writes to that memory, `ib_read_bw` reads from it; none
//! expects anything of the server but acknowledgements.

use rdma::{Fabric, Qp, QpLimits, RemoteRegion, Work};

use crate::{World, message_of};

/// Port of perftest.
pub(crate) const PORT: u16 = 18515;
/// The longest message of `ib_send_bw`, and the size of the memory for the others.
pub(crate) const MESSAGE_BYTES: u32 = 1 << 18;
/// perftest has 128 outstanding messages by default.
pub(crate) const LOAD_LIMITS: QpLimits = QpLimits { receives: 64, sends: 4, reads: 1 };

/// Length of the message with an address.
const ADDRESS_BYTES: usize = 56;
/// Initial content of the memory.
const BLANK: u8 = 0xa5;

/// The connection for the exchange of parameters.
#[derive(Default)]
pub(crate) struct Control {
    memory: Option<RemoteRegion>,
}

impl Control {
    pub(crate) fn begin(&mut self, world: &mut World, qp: Qp) {
        if self.memory.is_some() {
            return;
        }
        let mut memory = world.expose(qp, MESSAGE_BYTES);
        world.pool.copy_in(&mut memory, 0, &vec![BLANK; MESSAGE_BYTES as usize]);
        self.memory = Some(memory);
    }

    pub(crate) fn done(
        &mut self,
        world: &mut World,
        qp: Qp,
        work: Work,
        n: u32,
    ) -> Result<(), String> {
        let Work::Recv(buf) = work else {
            world.pool.give(work.into_buf());
            return Ok(());
        };
        // Its message may arrive before our event that the connection is established.
        self.begin(world, qp);
        let mut message = message_of(world, buf, n);
        world.receive(qp);
        if message.len() == ADDRESS_BYTES
            && let Some(memory) = &self.memory
        {
            let remote = memory.remote();
            message[16..20].copy_from_slice(&remote.key.to_be_bytes());
            message[24..32].copy_from_slice(&remote.addr.to_be_bytes());
        }
        world.send(qp, &message);
        Ok(())
    }

    pub(crate) fn end(self, world: &mut World) -> (String, bool) {
        let mut changed = 0;
        if let Some(memory) = self.memory {
            let mut bytes = vec![0; MESSAGE_BYTES as usize];
            world.pool.copy_out(&memory, 0, &mut bytes);
            changed = bytes.iter().filter(|byte| **byte != BLANK).count();
            world.revoke(memory);
        }
        (format!("perftest: {changed} bytes written"), true)
    }
}

/// The connection that is tested.
#[derive(Default)]
pub(crate) struct Load {
    messages: u64,
    bytes: u64,
}

impl Load {
    pub(crate) fn done(
        &mut self,
        world: &mut World,
        qp: Qp,
        work: Work,
        n: u32,
    ) -> Result<(), String> {
        let Work::Recv(buf) = work else {
            world.pool.give(work.into_buf());
            return Ok(());
        };
        self.messages += 1;
        self.bytes += u64::from(n);
        world.fabric.post(qp, 0, Work::Recv(buf));
        Ok(())
    }

    pub(crate) fn end(self) -> (String, bool) {
        (format!("perftest: {} messages, {} bytes", self.messages, self.bytes), true)
    }
}
