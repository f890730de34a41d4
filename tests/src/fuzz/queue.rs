//! Fuzzes the target's queue pair: an arbitrary host, with a fabric and a device that delay or
//! fail.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use nvme::sqe::Flags;
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe, Status};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::subsystem::Namespace;
use rdma::{Completion, Fault, Qp};

use super::bytes::Bytes;

#[path = "../../../target/tests/support/mod.rs"]
#[expect(dead_code, reason = "shared with tests that need more of it")]
mod support;

use support::World;

/// Each valid command of the host is answered once, no other id is, every buffer is returned, and
/// nothing outside the namespace or the host's memory is accessed.
pub fn queue(data: &[u8]) -> bool {
    let mut bytes = Bytes::new(data);
    let mut world = World::new();
    let answered = if bytes.bool() {
        let (queue, admin, posted) = support::io_queue(&mut world);
        let mut host = Host::new(world, queue, false);
        host.play(&mut bytes);
        support::end_both(host.world, host.queue, admin, posted);
        host.answered
    } else {
        let (queue, _) = support::admin(&mut world);
        let mut host = Host::new(world, queue, true);
        host.play(&mut bytes);
        host.world.end(host.queue);
        host.answered
    };
    answered > 0
}

const ADMIN: [AdminOpcode; 9] = [
    AdminOpcode::FABRICS,
    AdminOpcode::IDENTIFY,
    AdminOpcode::GET_LOG_PAGE,
    AdminOpcode::SET_FEATURES,
    AdminOpcode::GET_FEATURES,
    AdminOpcode::ASYNC_EVENT_REQUEST,
    AdminOpcode::KEEP_ALIVE,
    AdminOpcode::ABORT,
    AdminOpcode(0x55),
];

const IO: [IoOpcode; 14] = [
    IoOpcode::READ,
    IoOpcode::WRITE,
    IoOpcode::COMPARE,
    IoOpcode::FLUSH,
    IoOpcode::WRITE_ZEROES,
    IoOpcode::DATASET_MANAGEMENT,
    IoOpcode::VERIFY,
    IoOpcode::COPY,
    IoOpcode::RESERVATION_REGISTER,
    IoOpcode::RESERVATION_REPORT,
    IoOpcode::RESERVATION_ACQUIRE,
    IoOpcode::RESERVATION_RELEASE,
    IoOpcode(AdminOpcode::FABRICS.0),
    IoOpcode(0x55),
];

struct Host {
    world: World,
    queue: QueuePair,
    admin: bool,
    /// Outstanding commands by id: how many, and whether they may stay outstanding.
    sent: HashMap<u16, (u32, bool)>,
    next: u16,
    answered: u32,
}

impl Host {
    fn new(mut world: World, queue: QueuePair, admin: bool) -> Host {
        world.completions.clear();
        world.memory.fill(0x11);
        Host { world, queue, admin, sent: HashMap::new(), next: 0, answered: 0 }
    }

    fn play(&mut self, bytes: &mut Bytes<'_>) {
        for _ in 0..64 {
            if bytes.is_empty() || self.world.fabric.disconnected {
                break;
            }
            self.act(bytes);
            self.hear();
        }
        self.world.run(&mut self.queue);
        self.hear();
        if !self.world.fabric.disconnected {
            self.sent.retain(|_, (_, patient)| !*patient);
            let waits = &self.sent;
            assert!(waits.is_empty(), "never answered: {waits:x?}");
        }
    }

    fn act(&mut self, bytes: &mut Bytes<'_>) {
        match bytes.u8() % 12 {
            0 => drop(self.world.fabric_step(&mut self.queue)),
            1 => drop(self.world.disk_step(&mut self.queue)),
            2 => self.world.run(&mut self.queue),
            3 => {
                self.world.now += Duration::from_millis(bytes.u16().into());
                self.queue.tick(&mut self.world.io());
            }
            4 => {
                let failures = [
                    None,
                    Some(Status::WRITE_FAULT),
                    Some(Status::UNRECOVERED_READ_ERROR),
                    Some(Status::INTERNAL_ERROR),
                ];
                self.world.disk.fail = bytes.of(&failures);
            }
            5 => self.change(bytes),
            6 => self.short(bytes),
            7 if bytes.u8() > 250 => self.fail(),
            _ => self.command(bytes),
        }
    }

    /// The responses so far.
    fn hear(&mut self) {
        for cqe in self.world.completions.drain(..) {
            let asked = self.sent.get_mut(&cqe.cid).map(|(count, _)| count);
            let count = asked.unwrap_or_else(|| panic!("{:#x} was not asked for", cqe.cid));
            *count -= 1;
            if *count == 0 {
                self.sent.remove(&cqe.cid);
            }
            self.answered += 1;
        }
    }

    fn command(&mut self, bytes: &mut Bytes<'_>) {
        let mut sqe = match self.admin {
            true => Sqe::admin(bytes.of(&ADMIN)),
            false => Sqe::io(bytes.of(&IO), 1),
        };
        if bytes.bool() {
            sqe.nsid = bytes.of(&[0, 1, 2, u32::MAX, 3]);
        }
        let (small, raw) = (bytes.bool(), bytes.bool());
        sqe.cdw10 = if small { bytes.u8().into() } else { bytes.u32() };
        sqe.cdw11 = if small && !self.admin { 0 } else { bytes.u32() };
        sqe.cdw12 = if small { u32::from(bytes.u8() & 31) } else { bytes.u32() };
        let len = bytes.of(&[0, 4096, 512, 8192, 1 << 16, 1024, 16, 0xff_ffff, 4097, 64]);
        let at = bytes.of(&[0, 4096, 1 << 16, (1 << 17) - 512, u64::MAX - 511, 1 << 40]);
        let behind = bytes.of(&[0, 4096, 512, 1024, 16, 4095, 64]);
        sqe = sqe.with_sgl(match bytes.u8() % 4 {
            0 => Sgl::in_capsule(0, behind),
            1 => Sgl::in_capsule(at, len),
            _ => Sgl::keyed(at, len, support::KEY, bytes.bool()).expect("24 bits"),
        });
        if raw {
            let mut all = sqe.emit();
            bytes.patch(&mut all);
            sqe = Sqe::parse(&all);
        }
        let cid = if bytes.u8() == 0xff { bytes.u16() } else { self.next };
        self.next = self.next.wrapping_add(1);
        let mut data = vec![0; behind as usize];
        bytes.patch(&mut data);
        let capsule = [&sqe.with_cid(cid).emit()[..], &data].concat();
        if !self.admin && bytes.u8().is_multiple_of(8) {
            sqe.flags = sqe.flags.with_fuse(bytes.of(&[1, 2, 1, 2, 3]));
        }
        // An event request waits for an event, the first half of a fused command for the second.
        let patient = match self.admin {
            true => sqe.opcode == AdminOpcode::ASYNC_EVENT_REQUEST.0,
            false => sqe.flags.fuse() == Flags::FUSED_FIRST,
        };
        // An id that is reused before its response has arrived counts twice.
        if self.world.deliver(&mut self.queue, &capsule) {
            let (count, waits) = self.sent.entry(cid).or_default();
            *count += 1;
            *waits |= patient;
        }
    }

    /// A message that is too short for a command.
    fn short(&mut self, bytes: &mut Bytes<'_>) {
        let len = usize::from(bytes.u8() % 64);
        let heard = self.world.deliver(&mut self.queue, bytes.take(len));
        assert!(!heard || self.world.fabric.disconnected, "less than a command was taken for one");
    }

    /// The oldest posted work fails, and with it the connection.
    fn fail(&mut self) {
        if let Some((tag, work)) = self.world.fabric.posted.pop_front() {
            let outcome = Err(Fault::Unreachable);
            let done = Completion::new(Qp(0), tag, work, outcome);
            self.queue.on_completion(done, &mut self.world.io());
            assert!(self.world.fabric.disconnected);
        }
    }

    /// The administrator changes the configuration.
    fn change(&mut self, bytes: &mut Bytes<'_>) {
        let mut subsystem = support::subsystem();
        let first = &mut subsystem.namespaces[0];
        first.read_only = bytes.bool();
        first.blocks = if bytes.bool() { 16 } else { first.blocks };
        let second = Namespace { nsid: 2, uuid: [2; 16], ..first.clone() };
        if bytes.bool() {
            subsystem.namespaces.push(second);
        }
        if bytes.u8() == 1 {
            subsystem.namespaces.remove(0);
        }
        self.queue.on_subsystem(&Arc::new(subsystem), &mut self.world.io());
    }
}
