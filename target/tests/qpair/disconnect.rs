//! Deletion of an I/O queue by Disconnect, retry delays for hosts, and lines of the log.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nvme::fabrics::{CNTLID_DYNAMIC, Connect, ConnectData, Disconnect};
use nvme::feature::HostBehavior;
use nvme::{AdminOpcode, IoOpcode, Nqn, Sqe, Status};
use tracing_subscriber::layer::{Context, SubscriberExt as _};

use crate::sgl::scattered;
use crate::support::{World, connect_data, end_both, keyed, subsystem};

const LEAVE: u16 = 0x70;

fn disconnect() -> Sqe {
    Disconnect::default().emit().with_cid(LEAVE)
}

#[test]
fn disconnect_is_answered_last_and_ends_the_connection() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let before = world.disk.blocks.clone();
    // Three at the disk, one that is pulled, two in line.
    for cid in 0..6 {
        let opcode = if cid == 3 { IoOpcode::WRITE } else { IoOpcode::READ };
        let sqe = Sqe::io(opcode, 1).with_range(0, 15).with_sgl(keyed(0, 1 << 16));
        world.send(&mut queue, &sqe.with_cid(cid), &[]);
    }
    assert_eq!((world.disk.waiting.len(), world.waiters.len()), (3, 2));
    world.send(&mut queue, &disconnect(), &[]);
    world.send(&mut queue, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(9), &[]);
    world.run(&mut queue);
    let answers: Vec<_> = world.completions.drain(..).map(|c| (c.cid, c.status.code())).collect();
    let (last, others) = answers.split_last().unwrap();
    assert_eq!(*last, (LEAVE, 0));
    let with = |code| others.iter().filter(move |(_, c)| *c == code).map(|(cid, _)| *cid);
    assert_eq!(with(0).collect::<Vec<_>>(), [0, 1, 2], "a disk finishes what it has");
    let mut ended: Vec<_> = with(Status::ABORTED_SQ_DELETION.code()).collect();
    ended.sort_unstable();
    assert_eq!(ended, [3, 4, 5], "what had not begun; the flush behind it was not looked at");
    assert!(world.disk.blocks == before && world.fabric.disconnected);
    end_both(world, queue, admin, posted);
}

#[test]
fn disconnect_of_an_idle_io_queue_completes_at_once_and_frees_it() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    world.send(&mut queue, &disconnect(), &[]);
    assert!(!world.fabric.disconnected, "the answer goes first");
    world.run(&mut queue);
    let cqe = world.completions.pop().unwrap();
    assert_eq!((cqe.cid, cqe.status), (LEAVE, Status::SUCCESS));
    assert!(world.fabric.disconnected);
    assert_eq!(admin.association().unwrap().io_queues(), 1);
    let association = std::sync::Arc::clone(admin.association().unwrap());
    end_both(world, queue, admin, posted);
    assert_eq!(association.io_queues(), 0);
}

#[test]
fn disconnect_is_for_io_queues_and_has_one_format() {
    let (mut world, mut queue, admin_queue, posted) = World::with_io_queue();
    let format = Disconnect { recfmt: 1 }.emit();
    let cqe = world.ask(&mut queue, &format, &[]);
    assert_eq!((cqe.status.code(), cqe.status.dnr()), (0x180, true));
    let cqe = world.ask(&mut queue, &disconnect().with_sgl(keyed(0, 16)), &[]);
    assert_eq!((cqe.status.code(), cqe.status.dnr()), (0x00F, true));
    let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096));
    assert!(world.ask(&mut queue, &read, &[]).status.is_success(), "nothing has happened");
    end_both(world, queue, admin_queue, posted);
    let (mut world, mut queue, _) = World::with_admin_queue();
    let cqe = world.ask(&mut queue, &disconnect(), &[]);
    assert_eq!((cqe.status.code(), cqe.status.dnr()), (0x185, true));
    world.end(queue);
}

#[test]
fn command_retry_delay_is_reported_only_to_hosts_with_acre_set() {
    for heeds in [false, true] {
        let (mut world, mut queue, mut admin, mut posted) = World::with_io_queue();
        if heeds {
            std::mem::swap(&mut world.fabric.posted, &mut posted);
            let behavior = HostBehavior { acre: 1, ..HostBehavior::default() };
            world.memory[..512].copy_from_slice(&behavior.emit());
            let set = Sqe { cdw10: 0x16, ..Sqe::admin(AdminOpcode::SET_FEATURES) };
            let set = set.with_sgl(keyed(0, 512));
            assert!(world.ask(&mut admin, &set, &[]).status.is_success());
            std::mem::swap(&mut world.fabric.posted, &mut posted);
        }
        let read = Sqe::io(IoOpcode::READ, 1).with_range(0, 0).with_sgl(keyed(0, 4096));
        let table = [
            (Status::NAMESPACE_NOT_READY, 1),
            (Status::NAMESPACE_NOT_READY.with_crd(2), 2),
            (Status::COMMAND_INTERRUPTED, 1),
            (Status::NAMESPACE_NOT_READY.with_dnr(), 0),
            (Status::UNRECOVERED_READ_ERROR, 0),
        ];
        for (status, delay) in table {
            world.disk.fail = Some(status);
            let cqe = world.ask(&mut queue, &read, &[]);
            assert!(cqe.status.is(status));
            assert_eq!(cqe.status.crd(), if heeds { delay } else { 0 }, "{status}");
        }
        end_both(world, queue, admin, posted);
    }
}

#[test]
fn disconnect_waits_for_a_read_with_a_scattered_sgl() {
    let (mut world, mut queue, admin, posted) = World::with_io_queue();
    let places = [(0, 4096), (10_000, 2048), (20_000, 2048)];
    let (sqe, list) = scattered(Sqe::io(IoOpcode::READ, 1).with_range(5, 1), &places, 0);
    world.send(&mut queue, &sqe.with_cid(1), &list);
    assert!(world.disk_step(&mut queue), "the first piece is posted");
    world.send(&mut queue, &disconnect(), &[]);
    world.run(&mut queue);
    let answers: Vec<_> = world.completions.drain(..).map(|c| (c.cid, c.status.code())).collect();
    assert_eq!(answers, [(1, 0), (LEAVE, 0)]);
    let gathered = [&world.memory[..4096], &world.memory[10_000..12_048]].concat();
    assert!(gathered == world.disk.blocks[5 * 4096..][..6144]);
    assert!(world.memory[20_000..22_048] == world.disk.blocks[5 * 4096 + 6144..7 * 4096]);
    end_both(world, queue, admin, posted);
}

/// Lines of the log with level INFO.
#[derive(Clone, Default)]
struct InfoLines(Arc<AtomicUsize>);

impl<S: tracing::Subscriber> tracing_subscriber::Layer<S> for InfoLines {
    fn on_event(&self, event: &tracing::Event<'_>, _: Context<'_, S>) {
        let is_info = *event.metadata().level() == tracing::Level::INFO;
        self.0.fetch_add(is_info.into(), Ordering::Relaxed);
    }
}

/// Any peer can connect to the discovery service, as often as it likes.
#[test]
fn discovery_connections_write_no_line_of_the_log() {
    // Where it is the only one, a subscriber is not asked for its interest in lines that a thread of
    // another test is the first to write.
    let _second = tracing::Dispatch::new(tracing_subscriber::registry());
    for (nqn, expected) in [(subsystem().nqn, 3), (Nqn::DISCOVERY, 0)] {
        let lines = InfoLines::default();
        let registry = tracing_subscriber::registry().with(lines.clone());
        tracing::subscriber::with_default(registry, || {
            let mut world = World::new();
            let mut queue = world.open_qid(0);
            let data = ConnectData { subnqn_field: (&nqn).into(), ..connect_data(CNTLID_DYNAMIC) };
            world.memory[..1024].copy_from_slice(&data.emit());
            let connect = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
            let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
            assert!(cqe.status.is_success(), "{}", cqe.status);
            world.end(queue);
        });
        assert_eq!(lines.0.load(Ordering::Relaxed), expected, "{nqn}");
    }
}
