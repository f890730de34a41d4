//! A queue against a fabric and a disk that record: what is posted, in which order, and that every
//! buffer comes home whatever dies when.

mod abort;
mod bad_blocks;
mod controller_failure;
mod copy;
mod disconnect;
mod fairness;
mod format;
mod fused;
mod hung_device;
mod log_pages;
mod negotiated_limits;
mod rate_limits;
mod recheck;
mod reservations;
mod sgl;
mod spdk;
mod stalled_host;
mod stats;
#[path = "../support/mod.rs"]
mod support;
mod timestamp;
mod unflushed;
mod write_protect;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nvme::fabrics::{CNTLID_DYNAMIC, Connect, PropertyGet, PropertySet};
use nvme::property::{Cc, Property};
use nvme::sqe::DsmRange;
use nvme::{AdminOpcode, Cqe, IoOpcode, Sgl, Sqe, Status, cm};
use nvmfd::blockdev::{DeviceId, IoRequest};
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::message::{Message, mailbox};
use nvmfd::core::qpair;
use nvmfd::core::registry::Registry;
use nvmfd::core::subsystem::Namespace;
use nvmfd::worker::Workers;
use rdma::{Completion, Qp, ReceivedWith, Work};

use crate::support::{KEY, World, admin, connect_data, end_both, io_queue, keyed, subsystem};

fn code(cqe: Cqe) -> (u16, bool) {
    (cqe.status.code(), cqe.status.dnr())
}

#[test]
fn connection_requests_are_accepted_with_posted_receives_or_rejected() {
    let good = cm::Request { qid: 0, hrqsize: 32, hsqsize_z: 31, ..cm::Request::default() };
    let cases: [(cm::Request, u8, Option<u16>); 8] = [
        (good, 16, None),
        // Any peer may open an admin queue: it gets no more receives, whatever it asks for.
        (cm::Request { hsqsize_z: 127, hrqsize: 128, ..good }, 16, None),
        (cm::Request { recfmt: 1, ..good }, 16, Some(2)),
        (cm::Request { hsqsize_z: 0, ..good }, 16, Some(4)),
        (cm::Request { hrqsize: 0, ..good }, 16, Some(5)),
        (good, 0, Some(7)),
        (cm::Request { qid: 5, ..good }, 16, Some(3)),
        (cm::Request { qid: 4, ..good }, 1, None),
    ];
    for (request, reads, refused) in cases {
        let mut world = World::new();
        let queue = world.open(&request.emit(), reads);
        match refused {
            Some(reason) => {
                assert!(queue.is_none(), "{request:?} {reads}");
                let reject = cm::Reject::from_private_data(&world.fabric.rejected).unwrap();
                assert_eq!(reject.status.0, reason, "{request:?}");
                assert!(world.pool.is_full());
            }
            None => {
                let depth = if request.qid == 0 { 32 } else { 16 };
                assert_eq!(world.fabric.posted.len(), depth);
                assert_eq!(world.fabric.opened.unwrap().reads, reads.min(16));
                let accept = cm::Accept::parse(world.fabric.accepted[..].first_chunk().unwrap());
                assert_eq!((accept.recfmt, accept.crqsize), (0, depth as u16));
                world.end(queue.unwrap());
            }
        }
    }
    let mut world = World::new();
    assert!(world.open(&good.emit()[..31], 16).is_none(), "too short");
    assert_eq!(world.fabric.rejected[2], 1);
}

#[test]
fn connect_succeeds_once_and_properties_are_readable() {
    let (mut world, mut queue, cntlid) = World::with_admin_queue();
    assert!(cntlid > 0);
    assert_eq!(world.trace[..2], ["pull", "send"], "Connect data are pulled");
    assert_eq!(world.invalidated[0], Some(KEY));
    let csts = world.ask(&mut queue, &PropertyGet::new(Property::CSTS).emit(), &[]);
    assert_eq!(csts.result, 1);
    let again = Connect { sqsize_z: 15, ..Connect::default() }.emit(keyed(0, 1024));
    assert_eq!(code(world.ask(&mut queue, &again, &[])), (0x00C, true));
    world.end(queue);
}

/// The fabric counts connections without admission against their address.
#[test]
fn fabric_is_notified_exactly_once_when_a_host_is_admitted() {
    let mut world = World::new();
    let mut queue = world.open_qid(0);
    let unknown = Connect { sqsize_z: 15, ..Connect::default() }.emit(keyed(0, 1024));
    assert!(!world.ask(&mut queue, &unknown, &[]).status.is_success());
    assert_eq!(world.fabric.admitted, 0);
    world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
    assert!(world.ask(&mut queue, &unknown, &[]).status.is_success());
    assert!(!world.ask(&mut queue, &unknown, &[]).status.is_success());
    assert_eq!(world.fabric.admitted, 1);
    world.end(queue);
}

#[test]
fn no_more_queues_are_granted_than_there_is_memory_for() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    // Room for 70 receives, half of that half open at once, 16 a queue: two, though four were
    // asked for and are allowed.
    let get = Sqe { cdw10: 7, ..Sqe::admin(AdminOpcode::GET_FEATURES) };
    assert_eq!(world.ask(&mut queue, &get, &[]).dw0(), 0x1_0001);
    world.end(queue);
}

#[test]
fn a_write_is_pulled_stored_and_answered_with_the_receive_posted_first() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.memory[..8192].fill(0xAB);
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 1).with_sgl(keyed(0, 8192)).with_cid(9);
    world.send(&mut queue, &write, &[]);
    assert!(matches!(world.fabric.posted.back(), Some((_, Work::Read { .. }))));
    assert!(world.fabric_step(&mut queue), "pulled");
    assert!(!world.fabric_step(&mut queue), "not answered before it is stored");
    assert!(world.disk_step(&mut queue));
    let order: Vec<_> = world.fabric.posted.iter().rev().take(2).collect();
    assert!(matches!(order[..], [(_, Work::Send { .. }), (_, Work::Recv(_))]));
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.sqid, cqe.sqhd), (9, 1, 2));
    assert!(cqe.status.is_success());
    assert_eq!(world.invalidated, [Some(KEY)]);
    assert!(world.disk.blocks[8192..16384].iter().all(|b| *b == 0xAB));
    end_both(world, queue, admin, posted);
}

/// On its way from the capsule, or from the host's memory.
#[test]
fn a_write_uses_fua_only_if_the_host_requests_it() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    for (sgl, data) in [(Sgl::in_capsule(0, 4096), &[1; 4096][..]), (keyed(0, 4096), &[])] {
        for wanted in [true, false] {
            let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 0).with_sgl(sgl);
            world.send(&mut queue, &write.with_fua(wanted), data);
            if data.is_empty() {
                assert!(world.fabric_step(&mut queue), "pulled");
            }
            match world.disk.waiting.front() {
                Some((_, IoRequest::Write { fua, .. })) => assert_eq!(*fua, wanted),
                other => panic!("{other:?}"),
            }
            world.run(&mut queue);
            assert!(world.completions.pop().unwrap().status.is_success());
        }
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn blocks_read_with_fua_are_durable_before_the_answer() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let range = |opcode, blocks_z| Sqe::io(opcode, 1).with_range(1, blocks_z);
    let blocks = world.disk.blocks[4096..8192].to_vec();
    let mut other = blocks.clone();
    other[0] ^= 1;
    let inline = range(IoOpcode::COMPARE, 0).with_sgl(Sgl::in_capsule(0, 4096));
    for (sqe, data, reads, status) in [
        (range(IoOpcode::READ, 0).with_sgl(keyed(0, 4096)), &[][..], 1, 0),
        (inline, &blocks, 1, 0),
        (inline, &other, 1, 0x285),
        (range(IoOpcode::VERIFY, 31), &[], 2, 0),
        (range(IoOpcode::VERIFY, 32), &[], 3, 0),
    ] {
        for fua in [true, false] {
            world.disk.trace.clear();
            assert_eq!(code(world.ask(&mut queue, &sqe.with_fua(fua), data)).0, status);
            let mut wanted = vec!["load"; reads];
            wanted.extend(fua.then_some("flush"));
            assert_eq!(world.disk.trace, wanted, "{sqe:?}");
        }
    }
    end_both(world, queue, admin, posted);
}

#[test]
fn in_capsule_data_is_written_from_the_receive_buffer_without_a_copy() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let free = world.pool.free();
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(1, 0).with_sgl(Sgl::in_capsule(0, 4096));
    let receive = match world.fabric.posted.front() {
        Some((_, Work::Recv(buf))) => buf.offset(),
        other => panic!("{other:?}"),
    };
    world.send(&mut queue, &write, &[0xCD; 4096]);
    match world.disk.waiting.front() {
        Some((_, IoRequest::Write { from, .. })) => {
            assert_eq!(from.offset(), receive + 64, "the very bytes that arrived");
            let addr = world.pool.region().addr() as u64 + from.offset();
            assert_eq!((addr % 4096, from.len()), (0, 4096));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!(world.pool.free(), free, "no buffer was taken");
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success());
    assert!(world.disk.blocks[4096..8192].iter().all(|b| *b == 0xCD));
    assert_eq!(world.trace, ["send"], "nothing was pulled");
    end_both(world, queue, admin, posted);
}

#[test]
fn read_data_and_completion_are_posted_together() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let read = Sqe::io(IoOpcode::READ, 1).with_range(3, 0).with_sgl(keyed(4096, 4096));
    world.send(&mut queue, &read, &[]);
    assert!(world.disk_step(&mut queue));
    let posted_now: Vec<_> = world.fabric.posted.iter().rev().take(2).collect();
    assert!(matches!(posted_now[..], [(_, Work::Send { .. }), (_, Work::Write { .. })]));
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success());
    assert_eq!(world.memory[4096..8192], world.disk.blocks[3 * 4096..4 * 4096]);
    world.disk.fail = Some(Status::UNRECOVERED_READ_ERROR);
    let cqe = world.ask(&mut queue, &read, &[]);
    assert!(cqe.status.is(Status::UNRECOVERED_READ_ERROR) && cqe.status.more());
    assert_eq!(world.trace.last(), Some(&"send"), "nothing is pushed on an error");
    end_both(world, queue, admin, posted);
}

#[test]
fn compare_flush_write_zeroes_and_deallocate_are_executed() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.memory[..8192].copy_from_slice(&world.disk.blocks[4096..12288]);
    let compare = Sqe::io(IoOpcode::COMPARE, 1).with_range(1, 1).with_sgl(keyed(0, 8192));
    assert!(world.ask(&mut queue, &compare, &[]).status.is_success());
    world.memory[8191] ^= 1;
    assert_eq!(code(world.ask(&mut queue, &compare, &[])), (0x285, true));
    let inline = Sqe::io(IoOpcode::COMPARE, 1).with_range(1, 0).with_sgl(Sgl::in_capsule(0, 4096));
    let data = world.disk.blocks[4096..8192].to_vec();
    assert!(world.ask(&mut queue, &inline, &data).status.is_success());

    assert!(world.ask(&mut queue, &Sqe::io(IoOpcode::FLUSH, 1), &[]).status.is_success());
    assert_eq!(world.disk.trace.last(), Some(&"flush"));

    let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, 1).with_range(1, 0);
    assert!(world.ask(&mut queue, &zeroes, &[]).status.is_success());
    assert!(world.disk.blocks[4096..8192].iter().all(|b| *b == 0));
    assert_eq!(world.disk.trace.last(), Some(&"zero"));
    assert!(world.ask(&mut queue, &zeroes.with_fua(true), &[]).status.is_success());
    assert_eq!(world.disk.trace.last(), Some(&"flush"), "forced: durable before the answer");

    let ranges = [(8, 1), (0, 0), (10, 2)];
    let mut data = vec![0; 4096];
    for (i, (slba, blocks)) in ranges.into_iter().enumerate() {
        let range = DsmRange { attributes: 0, blocks, slba };
        data[i * 16..][..16].copy_from_slice(&range.emit());
    }
    let dsm = Sqe::deallocation(1, 2).with_sgl(Sgl::in_capsule(0, 4096));
    assert!(world.ask(&mut queue, &dsm, &data).status.is_success());
    assert!(world.disk.blocks[8 << 12..9 << 12].iter().all(|b| *b == 0));
    assert!(world.disk.blocks[10 << 12..12 << 12].iter().all(|b| *b == 0));
    assert!(world.disk.blocks[9 << 12] != 0);
    // One bad range: none is acted on.
    let before = world.disk.blocks.clone();
    data[32..48].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba: 256 }.emit());
    data[..16].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba: 20 }.emit());
    assert_eq!(code(world.ask(&mut queue, &dsm, &data)), (0x080, true));
    assert!(world.disk.blocks == before);
    end_both(world, queue, admin, posted);
}

#[test]
fn commands_wait_for_buffers_in_arrival_order() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    // 512 KiB of data, a quarter MiB of it for admin: four reads of 64 KiB fit.
    for cid in 0..8 {
        let sgl = keyed(0, 1 << 16);
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(sgl).with_cid(cid);
        world.send(&mut queue, &read, &[]);
    }
    assert_eq!((world.disk.waiting.len(), world.waiters.len()), (4, 4));
    let small = Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096)).with_cid(8);
    world.send(&mut queue, &small, &[]);
    assert_eq!(world.waiters.len(), 5, "a small one does not overtake");
    world.run(&mut queue);
    let order: Vec<u16> = world.completions.drain(..).map(|c| c.cid).collect();
    assert_eq!(order, [0, 1, 2, 3, 4, 5, 6, 7, 8]);
    end_both(world, queue, admin, posted);
}

/// NVMe over RDMA has no immediate data. Those of a message are ignored, as by Linux's target; a write
/// with them completes a receive whose buffer has what an earlier capsule has left there.
#[test]
fn immediate_data_are_ignored_and_a_write_with_them_is_no_capsule() {
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096)).with_cid(7);
    let write = ReceivedWith::Write { immediate: 5, bytes: 64 };
    for (with, len) in [(ReceivedWith::Immediate(5), 64), (write, 0)] {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        let (tag, work) = world.fabric.posted.pop_front().unwrap();
        let mut buf = work.into_buf();
        world.pool.bytes_mut(&mut buf)[..64].copy_from_slice(&read.emit());
        let done = Completion { qp: Qp(0), tag, work: Work::Recv(buf), outcome: Ok(len), with };
        queue.on_completion(done, &mut world.io());
        world.run(&mut queue);
        let answered: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
        let is_capsule = with != write;
        assert_eq!(answered, if is_capsule { vec![7] } else { vec![] });
        assert_eq!(world.fabric.disconnected, !is_capsule);
        end_both(world, queue, admin, posted);
    }
}

#[test]
fn short_capsules_and_duplicate_command_ids_cause_a_disconnect() {
    for len in [0, 63] {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        let (tag, work) = world.fabric.posted.pop_front().unwrap();
        let done = Completion::new(Qp(0), tag, work, Ok(len));
        queue.on_completion(done, &mut world.io());
        assert!(world.fabric.disconnected, "a capsule of {len} bytes");
        end_both(world, queue, admin, posted);
    }
    // A command id in use; free again once it is answered.
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(keyed(0, 4096)).with_cid(0x8001);
    assert!(world.ask(&mut queue, &read, &[]).status.is_success());
    world.send(&mut queue, &read, &[]);
    assert!(world.ask(&mut queue, &read.with_cid(0x8000), &[]).status.is_success());
    world.send(&mut queue, &read, &[]);
    assert!(!world.fabric.disconnected);
    world.send(&mut queue, &read, &[]);
    assert!(world.fabric.disconnected);
    end_both(world, queue, admin, posted);
}

#[test]
fn all_buffers_are_returned_whenever_the_connection_closes() {
    // Stop after each number of steps: capsules received, pulled, at the disk, answered.
    for steps in 0..24 {
        let (mut world, mut queue, admin, posted) = World::with_io_queue();
        for cid in 0..10u16 {
            let sqe = match cid % 5 {
                0 => Sqe::io(IoOpcode::WRITE, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16)),
                1 => Sqe::io(IoOpcode::READ, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16)),
                2 => Sqe::io(IoOpcode::COMPARE, 1).with_range(0, 7).with_sgl(keyed(0, 1 << 15)),
                3 => {
                    Sqe::io(IoOpcode::WRITE, 1).with_range(0, 0).with_sgl(Sgl::in_capsule(0, 4096))
                }
                _ => Sqe::io(IoOpcode::FLUSH, 1),
            };
            let data: &[u8] = if cid % 5 == 3 { &[1; 4096] } else { &[] };
            world.send(&mut queue, &sqe.with_cid(cid), data);
        }
        for step in 0..steps {
            let _ = if step % 2 == 0 {
                world.fabric_step(&mut queue)
            } else {
                world.disk_step(&mut queue)
            };
        }
        end_both(world, queue, admin, posted);
    }
}

/// A host acts on an event by any of its queues.
#[test]
fn an_event_of_namespaces_is_sent_when_every_reactor_has_them() {
    let [(first, mail), (second, other_mail)] = [(); 2].map(|()| mailbox().unwrap());
    let mut world = World::new();
    world.replace(Registry::new(vec![first, second], 8, 70), Workers::default());
    world.registry.publish(Arc::new(subsystem()));
    let (mut queue, _) = admin(&mut world);
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).with_cid(0x1F);
    world.send(&mut queue, &event, &[]);
    let enable = Sqe { cdw10: 0x0B, cdw11: 1 << 8, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
    assert!(world.ask(&mut queue, &enable, &[]).status.is_success());
    let mut less = subsystem();
    less.namespaces.pop();
    world.registry.publish(Arc::new(less));
    while let Some(message) = mail.take() {
        if let Message::Subsystem(new, adoption) = message {
            queue.await_adoption(&adoption);
            queue.on_subsystem(&new, &mut world.io());
        }
    }
    world.run(&mut queue);
    assert!(world.completions.is_empty(), "the other reactor has not read its message");
    mail.hush();
    while other_mail.take().is_some() {}
    assert!(mail.hush(), "it is woken");
    queue.tick(&mut world.io());
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.dw0()), (0x1F, 0x04_0002));
    world.end(queue);
}

#[test]
fn an_event_request_waits_and_a_reset_ends_it() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let event = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).with_cid(0x1F);
    world.send(&mut queue, &event, &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty());
    assert_eq!(qpair::in_flight(&queue, world.now_ns).count(), 0, "it is not in progress");
    let enable = Sqe { cdw10: 0x0B, cdw11: 1 << 8, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
    assert!(world.ask(&mut queue, &enable, &[]).status.is_success());
    let mut more = subsystem();
    let second = Namespace { nsid: 2, uuid: [2; 16], ..more.namespaces[0].clone() };
    more.namespaces.push(second);
    queue.on_subsystem(&Arc::new(more), &mut world.io());
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.dw0()), (0x1F, 0x04_0002));

    world.send(&mut queue, &event, &[]);
    let reset = PropertySet::new(Property::CC, Cc(0x0046_0000).0.into()).emit().with_cid(1);
    world.send(&mut queue, &reset, &[]);
    world.run(&mut queue);
    let answers: BTreeMap<u16, u16> =
        world.completions.drain(..).map(|c| (c.cid, c.status.code())).collect();
    assert_eq!(answers, [(0x1F, 0x007), (1, 0)].into());
    let csts = world.ask(&mut queue, &PropertyGet::new(Property::CSTS).emit(), &[]);
    assert_eq!(csts.result, 0);
    world.end(queue);
}

#[test]
fn shutdown_flushes_before_reporting_completion() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let shutdown = PropertySet::new(Property::CC, 0x0046_4001).emit();
    world.send(&mut queue, &shutdown, &[]);
    assert!(matches!(world.disk.waiting.front(), Some((_, IoRequest::Flush))));
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success());
    let csts = world.ask(&mut queue, &PropertyGet::new(Property::CSTS).emit(), &[]);
    assert_eq!(csts.result & 0xC, 0x8);
    world.end(queue);
}

/// A host that waits too long for a shutdown resets the controller, goes on, and shuts it down again.
#[test]
fn an_earlier_shutdown_does_not_complete_a_later_one() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let values = [0x0046_4001, 0x0046_0000, 0x0046_0001, 0x0046_4001];
    for (cid, value) in (1..).zip(values) {
        let configure = PropertySet::new(Property::CC, value).emit().with_cid(cid);
        world.send(&mut queue, &configure, &[]);
    }
    assert_eq!(world.disk.waiting.len(), 2, "a flush of each");
    let csts = PropertyGet::new(Property::CSTS).emit().with_cid(9);
    for (ended, shst) in [(1, 0x4), (2, 0x8)] {
        assert!(world.disk_step(&mut queue));
        world.send(&mut queue, &csts, &[]);
        while world.fabric_step(&mut queue) {}
        let cqe = world.completions.pop().unwrap();
        assert_eq!((cqe.cid, cqe.result & 0xC), (9, shst), "{ended} flushes have ended");
    }
    world.end(queue);
}

/// A host that reads "complete" powers off, and takes what it has written for durable.
#[test]
fn a_shutdown_whose_flush_failed_is_a_fatal_status_and_never_complete() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let csts = PropertyGet::new(Property::CSTS).emit();
    let configure = |value| PropertySet::new(Property::CC, value).emit();
    world.disk.fail = Some(Status::WRITE_FAULT);
    assert!(world.ask(&mut queue, &configure(0x0046_4001), &[]).status.is_success());
    world.disk.fail = None;
    assert_eq!(world.disk.trace.last(), Some(&"flush"));
    assert_eq!(world.shared.disconnects.count(Cause::UnflushedShutdown), 1);
    // Fatal, and the shutdown occurs for ever.
    assert_eq!(world.ask(&mut queue, &csts, &[]).result, 0b0110);
    // Its host may keep looking, and can only reset it.
    let alive = Sqe::admin(AdminOpcode::KEEP_ALIVE);
    assert!(world.ask(&mut queue, &alive, &[]).status.is_success());
    assert!(world.ask(&mut queue, &configure(0x0046_0001), &[]).status.is_success());
    assert_eq!(world.ask(&mut queue, &csts, &[]).result, 0b0110);
    for (value, status) in [(0x0046_0000, 0), (0x0046_0001, 1), (0x0046_4001, 0b1000)] {
        assert!(world.ask(&mut queue, &configure(value), &[]).status.is_success());
        assert_eq!(world.ask(&mut queue, &csts, &[]).result, status);
    }
    world.end(queue);
}

#[test]
fn keep_alive_timeout_disconnects_silent_hosts_only() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let keep_alive = Sqe::admin(AdminOpcode::KEEP_ALIVE);
    for _ in 0..5 {
        world.now += Duration::from_secs(5);
        assert!(world.ask(&mut queue, &keep_alive, &[]).status.is_success());
        queue.tick(&mut world.io());
        assert!(!world.fabric.disconnected);
    }
    world.now += Duration::from_secs(8);
    queue.tick(&mut world.io());
    assert!(world.fabric.disconnected);
    assert_eq!(world.registry.associations(), 0);
    world.end(queue);
}

/// Whenever its last command has come between two ticks of the reactor, and by whichever queue.
#[test]
fn keep_alive_timeout_expires_within_a_second_and_never_early() {
    const TICK: Duration = Duration::from_millis(250);
    const KATO: Duration = Duration::from_secs(5);
    for (phase_ms, is_traffic) in (0..250).step_by(50).flat_map(|ms| [(ms, true), (ms, false)]) {
        let (mut world, mut queue, _) = World::with_admin_queue();
        let begin = world.now;
        queue.tick(&mut world.io());
        world.now += Duration::from_millis(phase_ms);
        if is_traffic {
            let alive = Sqe::admin(AdminOpcode::KEEP_ALIVE);
            assert!(world.ask(&mut queue, &alive, &[]).status.is_success());
        }
        let last = if is_traffic { world.now } else { begin };
        let ticks = (1..).map(|n| begin + n * TICK);
        let end = ticks.take(60).find(|now| {
            world.now = *now;
            queue.tick(&mut world.io());
            world.fabric.disconnected
        });
        let silent = end.expect("it is given up") - last;
        assert!((KATO..=KATO + Duration::from_secs(1)).contains(&silent), "{silent:?}");
        world.end(queue);
    }
}

/// A host may send no Keep Alive in the half of its timeout that follows a response, whenever it has
/// sent the command: Linux 5.13 to 6.4 do not.
#[test]
fn the_response_to_a_slow_command_restarts_the_keep_alive_timeout() {
    const TICK: Duration = Duration::from_millis(250);
    const KATO: Duration = Duration::from_secs(5);
    let (mut world, mut queue, mut admin, posted) = World::with_io_queue();
    let mut tick = |world: &mut World, queue: &mut qpair::QueuePair| {
        world.now += TICK;
        queue.tick(&mut world.io());
        admin.tick(&mut world.io());
        world.fabric.disconnected
    };
    let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096));
    world.send(&mut queue, &read, &[]);
    for _ in 0..16 {
        assert!(!tick(&mut world, &mut queue));
    }
    assert!(world.disk_step(&mut queue), "the device has taken four seconds");
    while world.fabric_step(&mut queue) {}
    assert!(world.completions.pop().unwrap().status.is_success());
    let received = world.now;
    while !tick(&mut world, &mut queue) {}
    let silent = world.now - received;
    assert!((KATO..=KATO + Duration::from_secs(1)).contains(&silent), "{silent:?}");
    end_both(world, queue, admin, posted);
}

#[test]
fn concurrent_connects_on_one_queue_admit_exactly_one() {
    let mut world = World::new();
    let mut queue = world.open_qid(0);
    world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
    let connect = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
    for cid in 0..8 {
        world.send(&mut queue, &connect.emit(keyed(0, 1024)).with_cid(cid), &[]);
    }
    world.run(&mut queue);
    let codes: Vec<u16> = world.completions.iter().map(|c| c.status.code()).collect();
    assert_eq!(codes, [0, 0xC, 0xC, 0xC, 0xC, 0xC, 0xC, 0xC]);
    world.flush_and_go(&mut queue);
    queue.finish(&mut world.io());
    assert_eq!(world.registry.associations(), 0);
}

#[test]
fn a_host_is_served_also_when_our_own_send_completions_are_late() {
    let (mut world, mut queue, _) = World::with_admin_queue();
    let get = PropertyGet::new(Property::VS).emit();
    // One command outstanding at a time: the host has each answer before it asks again.
    for cid in 0..40 {
        world.send(&mut queue, &get.with_cid(cid), &[]);
        assert!(!world.fabric.disconnected, "after {cid} commands");
    }
    world.run(&mut queue);
    let cids: Vec<u16> = world.completions.drain(..).map(|c| c.cid).collect();
    assert_eq!(cids, (0..40).collect::<Vec<_>>());
    // Commands that still wait for a slot when the connection ends are returned too.
    for cid in 0..40 {
        world.send(&mut queue, &get.with_cid(cid), &[]);
    }
    world.end(queue);
}

#[test]
fn io_on_a_lost_or_reset_controller_is_disconnected_and_never_failed() {
    for reset in [false, true] {
        let (mut world, mut queue, mut admin, admin_posted) = World::with_io_queue();
        let mine = std::mem::replace(&mut world.fabric.posted, admin_posted);
        if reset {
            let disable = PropertySet::new(Property::CC, 0x0046_0000).emit();
            assert!(world.ask(&mut admin, &disable, &[]).status.is_success());
        } else {
            world.now += Duration::from_secs(8);
            admin.tick(&mut world.io());
            world.now += Duration::from_secs(8);
            admin.tick(&mut world.io());
            assert!(std::mem::take(&mut world.fabric.disconnected));
        }
        let admin_posted = std::mem::replace(&mut world.fabric.posted, mine);
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096));
        world.send(&mut queue, &read, &[]);
        world.run(&mut queue);
        assert!(world.completions.is_empty(), "no status that would end in a file system");
        assert!(world.fabric.disconnected);
        end_both(world, queue, admin, admin_posted);
    }
}

/// Any peer can reset a discovery controller as often as it likes.
#[test]
fn a_reset_wakes_the_reactors_only_where_it_closes_io_queues() {
    let disable = PropertySet::new(Property::CC, 0x0046_0000).emit();
    let world_with = || {
        let (sender, mail) = mailbox().unwrap();
        let mut world = World::new();
        world.replace(Registry::new(vec![sender], 8, 70), Workers::default());
        world.registry.publish(Arc::new(subsystem()));
        (world, mail)
    };
    let (mut world, mail) = world_with();
    let (mut queue, _) = admin(&mut world);
    mail.hush();
    assert!(world.ask(&mut queue, &disable, &[]).status.is_success());
    assert!(!mail.hush(), "there are no I/O queues");
    world.end(queue);

    let (mut world, mail) = world_with();
    let (queue, mut admin, admin_posted) = io_queue(&mut world);
    let mine = std::mem::replace(&mut world.fabric.posted, admin_posted);
    mail.hush();
    assert!(world.ask(&mut admin, &disable, &[]).status.is_success());
    assert!(mail.hush());
    let admin_posted = std::mem::replace(&mut world.fabric.posted, mine);
    end_both(world, queue, admin, admin_posted);
}

#[test]
fn a_deallocation_stays_on_its_device_when_the_namespace_changes() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let mut data = [0; 32];
    data[..16].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba: 1 }.emit());
    data[16..].copy_from_slice(&DsmRange { attributes: 0, blocks: 1, slba: 3 }.emit());
    let dsm = Sqe::deallocation(1, 1).with_sgl(Sgl::in_capsule(0, 32));
    world.send(&mut queue, &dsm, &data);
    assert!(world.disk_step(&mut queue), "the first range");
    let mut other = subsystem();
    other.namespaces[0].backing = DeviceId(7);
    queue.on_subsystem(&Arc::new(other), &mut world.io());
    assert_eq!(world.disk.backings, [DeviceId(0), DeviceId(0)]);
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success());
    end_both(world, queue, admin, posted);
}
