//! Queues of the raw host, and checks that apply to every response.

use std::time::Duration;

use nvme::cm;
use nvme::fabrics::{Connect, ConnectData, ConnectResult, PropertyGet, PropertySet};
use nvme::feature::{FeatureId, SetFeatures};
use nvme::property::Property;
use nvme::{Cqe, Nqn, Sgl, Sqe, Status};
use rdma::Reason;

use crate::host::{Host, Link, PATIENCE};

/// Offset of Connect data in the window, after everything else.
const CONNECT_AT: u32 = 0x18_0000;

/// Enabled, with the supported entry sizes.
pub(crate) const CC_ENABLED: u64 = 0x46_0001;

/// Time to wait for an answer that must not arrive.
pub(crate) const SILENCE: Duration = Duration::from_millis(300);

/// Result of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Got {
    /// A valid completion.
    Answer { status: Status, result: u64 },
    /// The connection has ended instead.
    Dropped,
    /// No answer.
    Silence,
    /// An invalid completion, with the reason.
    Wrong(String),
}

/// Expected result of a command.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Want {
    /// Success, with any result.
    Done,
    /// Success with this result.
    Value(u64),
    /// One of these codes, with Do Not Retry.
    Refused(&'static [u16]),
    /// This code, with or without Do Not Retry.
    Code(u16),
    /// Connect Invalid Parameters with Do Not Retry, and this result.
    Parameter(u32),
    /// The same without Do Not Retry.
    Gone(u32),
    /// Connect Invalid Host with Do Not Retry, and this result.
    Host(u32),
    /// The connection ends.
    Dropped,
    /// No answer, and the connection stays.
    Silence,
}

impl Want {
    pub(crate) fn is_met(&self, got: &Got) -> bool {
        match (self, got) {
            (Want::Dropped, Got::Dropped) | (Want::Silence, Got::Silence) => true,
            (Want::Done, Got::Answer { status, .. }) => status.field() == 0,
            (Want::Value(value), Got::Answer { status, result }) => {
                status.field() == 0 && result == value
            }
            (Want::Refused(codes), Got::Answer { status, .. }) => {
                codes.contains(&status.code()) && status.dnr() && status.crd() == 0
            }
            (Want::Code(code), Got::Answer { status, .. }) => status.code() == *code,
            (Want::Parameter(dw0), Got::Answer { status, result }) => {
                status.code() == 0x182 && status.dnr() && *result == u64::from(*dw0)
            }
            (Want::Gone(dw0), Got::Answer { status, result }) => {
                status.code() == 0x182 && !status.dnr() && *result == u64::from(*dw0)
            }
            (Want::Host(dw0), Got::Answer { status, result }) => {
                status.code() == 0x184 && status.dnr() && *result == u64::from(*dw0)
            }
            _ => false,
        }
    }
}

/// Counts the checks.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    passed: u32,
    failed: u32,
}

impl Tally {
    pub(crate) fn check(&mut self, name: &str, good: bool, got: impl FnOnce() -> String) {
        match good {
            true => {
                self.passed += 1;
                println!("ok   {name}");
            }
            false => {
                self.failed += 1;
                println!("FAIL {name}: got {}", got());
            }
        }
    }

    /// Prints the sum; returns true if nothing failed.
    pub(crate) fn close(&self) -> bool {
        println!("{} passed, {} failed", self.passed, self.failed);
        self.failed == 0 && self.passed > 0
    }
}

/// NQNs of host and subsystem.
#[derive(Clone, Debug)]
pub(crate) struct Names {
    pub(crate) subnqn: Nqn,
    /// An allowed host.
    pub(crate) host: Nqn,
    /// Another allowed host.
    pub(crate) other: Nqn,
}

/// The host identifier of all valid commands.
pub(crate) const HOST_ID: [u8; 16] = *b"raw host number1";

/// An NVMe queue as the host sees it.
#[derive(Debug)]
pub(crate) struct Queue {
    pub(crate) link: Link,
    pub(crate) qid: u16,
    /// Number of entries; 0 before Connect.
    size: u16,
    head: u16,
    /// Submission queue flow control is disabled.
    off: bool,
    next_cid: u16,
    /// What Connect returned.
    pub(crate) cntlid: u16,
}

/// A Connect command, to be modified before it is sent.
#[derive(Clone, Debug)]
pub(crate) struct Attempt {
    pub(crate) request: cm::Request,
    pub(crate) connect: Connect,
    pub(crate) data: ConnectData,
    /// Length in the descriptor.
    pub(crate) len: u32,
    /// In the capsule, of which this number of bytes is sent.
    pub(crate) inline: Option<u32>,
}

pub(crate) struct World {
    pub(crate) host: Host,
    pub(crate) names: Names,
    pub(crate) tally: Tally,
    pub(crate) iwarp: bool,
    /// Keep alive timeout of valid admin queues.
    pub(crate) kato_ms: u32,
}

pub(crate) type Outcome = Result<(), String>;

impl World {
    pub(crate) fn expect(&mut self, name: &str, got: &Got, want: &Want) {
        self.tally.check(name, want.is_met(got), || format!("{got:?} instead of {want:?}"));
    }

    /// Opens a connection for a queue, without Connect.
    pub(crate) fn open(&mut self, request: cm::Request) -> Result<Queue, Reason> {
        let link = self.host.connect(&request.emit())?;
        let qid = request.qid;
        Ok(Queue { link, qid, size: 0, head: 0, off: false, next_cid: 0x1234, cntlid: 0 })
    }

    /// A valid Connect command for an admin queue.
    pub(crate) fn admin_attempt(&self) -> Attempt {
        Attempt {
            request: cm::Request { recfmt: 0, qid: 0, hrqsize: 32, hsqsize_z: 31, cntlid: 0 },
            connect: Connect { sqsize_z: 31, kato_ms: self.kato_ms, ..Connect::default() },
            data: ConnectData::new(HOST_ID, 0xFFFF, &self.names.subnqn, &self.names.host),
            len: 1024,
            inline: None,
        }
    }

    /// A valid Connect command for an I/O queue.
    pub(crate) fn io_attempt(&self, cntlid: u16, qid: u16) -> Attempt {
        let admin = self.admin_attempt();
        Attempt {
            request: cm::Request { qid, cntlid, ..admin.request },
            connect: Connect { qid, ..admin.connect },
            data: ConnectData { cntlid, ..admin.data },
            ..admin
        }
    }

    /// Sends a Connect command on an open connection.
    pub(crate) fn send_connect(&mut self, queue: &mut Queue, attempt: &Attempt) -> Got {
        let data = attempt.data.emit();
        let window = self.host.window();
        self.host.fill(CONNECT_AT, &data);
        let addr = window.addr + u64::from(CONNECT_AT);
        let keyed = Sgl::keyed(addr, attempt.len, window.key, false);
        let sgl = match attempt.inline {
            Some(_) => Sgl::in_capsule(0, attempt.len),
            None => keyed.unwrap_or(Sgl::NONE),
        };
        let mut capsule = attempt.connect.emit(sgl).emit().to_vec();
        capsule.extend(&data[..attempt.inline.unwrap_or(0) as usize]);
        let off = attempt.connect.cattr.disable_sq_flow_control();
        let was = (queue.size, queue.off);
        if queue.size == 0 {
            // The response to Connect itself may have either; see `ask`.
            (queue.size, queue.off) = (attempt.connect.sqsize_z.wrapping_add(1), off);
            queue.head = 0;
        }
        let got = self.ask(queue, &capsule);
        match &got {
            Got::Answer { status, result } if status.is_success() => {
                queue.cntlid = ConnectResult(*result as u32).cntlid();
            }
            _ => (queue.size, queue.off) = was,
        }
        got
    }

    /// Opens a connection and sends a Connect command.
    pub(crate) fn attempt(&mut self, attempt: &Attempt) -> Result<(Queue, Got), String> {
        let opened = self.open(attempt.request);
        let mut queue = opened.map_err(|reason| format!("no connection: {reason:?}"))?;
        let got = self.send_connect(&mut queue, attempt);
        Ok((queue, got))
    }

    fn connected(&mut self, attempt: &Attempt) -> Result<Queue, String> {
        let (queue, got) = self.attempt(attempt)?;
        match &got {
            Got::Answer { status, .. } if status.is_success() => Ok(queue),
            _ => Err(format!("Connect: {got:?}")),
        }
    }

    /// A connected admin queue that is not enabled.
    pub(crate) fn disabled(&mut self) -> Result<Queue, String> {
        self.connected(&self.admin_attempt())
    }

    /// An enabled admin queue, with as many I/O queues granted.
    pub(crate) fn admin(&mut self, io_queues: u16) -> Result<Queue, String> {
        let mut queue = self.disabled()?;
        self.enable(&mut queue)?;
        let both = u32::from(io_queues - 1) * 0x1_0001;
        let sqe = SetFeatures::new(FeatureId::NUMBER_OF_QUEUES, both).emit(Sgl::NONE);
        match self.ask_sqe(&mut queue, &sqe) {
            Got::Answer { status, .. } if status.is_success() => Ok(queue),
            got => Err(format!("Number of Queues: {got:?}")),
        }
    }

    pub(crate) fn enable(&mut self, queue: &mut Queue) -> Outcome {
        self.set(queue, Property::CC, CC_ENABLED)?;
        match self.get(queue, Property::CSTS)? {
            1 => Ok(()),
            csts => Err(format!("CSTS is {csts:#x} after enabling")),
        }
    }

    /// An I/O queue of a controller.
    pub(crate) fn io(&mut self, cntlid: u16, qid: u16) -> Result<Queue, String> {
        self.connected(&self.io_attempt(cntlid, qid))
    }

    pub(crate) fn get(&mut self, queue: &mut Queue, property: Property) -> Result<u64, String> {
        match self.ask_sqe(queue, &PropertyGet::new(property).emit()) {
            Got::Answer { status, result } if status.is_success() => Ok(result),
            got => Err(format!("Property Get {property:?}: {got:?}")),
        }
    }

    pub(crate) fn set(&mut self, queue: &mut Queue, property: Property, value: u64) -> Outcome {
        match self.ask_sqe(queue, &PropertySet::new(property, value).emit()) {
            Got::Answer { status, .. } if status.is_success() => Ok(()),
            got => Err(format!("Property Set {property:?}: {got:?}")),
        }
    }

    /// A keyed descriptor of this length for the start of the window.
    pub(crate) fn keyed(&self, len: u32) -> Sgl {
        let window = self.host.window();
        Sgl::keyed(window.addr, len, window.key, false).unwrap_or(Sgl::NONE)
    }

    pub(crate) fn ask_sqe(&mut self, queue: &mut Queue, sqe: &Sqe) -> Got {
        self.ask(queue, &sqe.emit())
    }

    /// Sends a capsule with a new command id, and waits for the result.
    pub(crate) fn ask(&mut self, queue: &mut Queue, capsule: &[u8]) -> Got {
        let cid = self.tell(queue, capsule);
        self.hear(queue, cid, PATIENCE)
    }

    /// Sends a capsule with a new command id, which is returned.
    pub(crate) fn tell(&mut self, queue: &mut Queue, capsule: &[u8]) -> u16 {
        let (cid, capsule) = numbered(queue, capsule);
        self.host.send(queue.link, &capsule);
        cid
    }

    /// As [`World::ask`], by Send with Immediate.
    pub(crate) fn ask_with_immediate(&mut self, queue: &mut Queue, capsule: &[u8]) -> Got {
        let (cid, capsule) = numbered(queue, capsule);
        self.host.send_with_immediate(queue.link, &capsule, 0xfeed_0000 | u32::from(cid));
        self.hear(queue, cid, PATIENCE)
    }

    /// Sends a capsule unchanged, with its command id.
    pub(crate) fn repeat(&mut self, queue: &mut Queue, capsule: &[u8]) {
        queue.advance();
        self.host.send(queue.link, capsule);
    }

    /// The response to a command, while no other is outstanding.
    pub(crate) fn hear(&mut self, queue: &Queue, cid: u16, limit: Duration) -> Got {
        match self.host.message(queue.link, limit) {
            None if self.host.end(queue.link).is_some() => Got::Dropped,
            None => Got::Silence,
            Some(message) => self.judge(queue, cid, &message),
        }
    }

    fn judge(&mut self, queue: &Queue, cid: u16, message: &[u8]) -> Got {
        let Ok(bytes) = <[u8; 16]>::try_from(message) else {
            return Got::Wrong(format!("{} bytes: {message:02x?}", message.len()));
        };
        let cqe = Cqe::parse(&bytes);
        // Before Connect there is no queue size, so no valid head.
        let head = match (queue.size, queue.off) {
            (0, _) => cqe.sqhd,
            (_, true) => 0xFFFF,
            (_, false) => queue.head,
        };
        let good = cqe.cid == cid && cqe.sqid == queue.qid && bytes[14] & 1 == 0;
        // A rejected Connect leaves no queue whose head could be reported.
        let refused_connect = queue.head <= 1 && !cqe.status.is_success();
        match good && (cqe.sqhd == head || refused_connect) {
            true => Got::Answer { status: cqe.status, result: cqe.result },
            false => Got::Wrong(format!("{cqe:?} for command {cid:#x}, head {head}")),
        }
    }

    pub(crate) fn close(&mut self, queues: impl IntoIterator<Item = Queue>) {
        queues.into_iter().for_each(|queue| self.host.close(queue.link));
    }
}

impl Queue {
    fn advance(&mut self) {
        if self.size > 0 {
            self.head = (self.head + 1) % self.size;
        }
    }
}

/// Data of hosts: all blocks differ.
pub(crate) fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random(seed);
    let mut bytes: Vec<u8> = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// SplitMix64: small, and deterministic for a seed.
#[derive(Debug)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound.max(1)
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len() as u64) as usize]
    }
}

/// A capsule with a new command id, which is also returned.
fn numbered(queue: &mut Queue, capsule: &[u8]) -> (u16, Vec<u8>) {
    let cid = queue.next_cid;
    queue.next_cid = cid.wrapping_add(0x0101);
    let mut capsule = capsule.to_vec();
    if let Some(field) = capsule.get_mut(2..4) {
        field.copy_from_slice(&cid.to_le_bytes());
    }
    queue.advance();
    (cid, capsule)
}
