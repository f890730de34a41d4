//! Write protection as a queue serves it, with a worker that the test drives.

use std::path::Path;
use std::sync::Arc;

use nvme::feature::{FeatureId, GetFeatures, SetFeatures, WriteProtectState};
use nvme::{AdminOpcode, Sgl, Sqe, Status};
use nvmfd::blockdev::IoRequest;
use nvmfd::core::message::{Mailbox, Message, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::subsystem::write_protect::Protection;
use nvmfd::state::namespace_state::NamespaceFile;
use nvmfd::worker::Workers;
use nvmfd::worker::ns_state::NamespaceStateWorker;

use uuid::Uuid;

use crate::support::{World, admin, subsystem};

fn world(directory: &Path) -> (World, Mailbox, NamespaceStateWorker, Arc<Protection>) {
    let (sender, message) = mailbox().unwrap();
    let worker = NamespaceStateWorker::new();
    let mut world = World::new();
    let mut subsystem = subsystem();
    let protection =
        Protection::kept(subsystem.nqn, 1, NamespaceFile::new(directory, Uuid::nil())).unwrap();
    subsystem.namespaces[0].protection = Arc::clone(&protection);
    let registry = Registry::new(vec![sender], 8, 70);
    world.replace(registry, Workers::default().with_ns_state(worker.sender()));
    world.registry.publish(Arc::new(subsystem));
    (world, message, worker, protection)
}

fn set(state: WriteProtectState) -> Sqe {
    let set = SetFeatures::new(FeatureId::NAMESPACE_WRITE_PROTECT, state.0.into());
    SetFeatures { nsid: 1, ..set }.emit(Sgl::NONE).with_cid(7)
}

/// Delivers all messages of the state worker.
fn answers(
    world: &mut World,
    queue: &mut QueuePair,
    message: &Mailbox,
    worker: &mut NamespaceStateWorker,
) {
    while let Some(message) = message.take() {
        match message {
            Message::Answer(done) => queue.on_disk(done.tag as u16, done, &mut world.io()),
            Message::Fence(fence) => {
                queue.on_fence(&fence, &mut world.io());
                drop(fence);
                worker.catch_up(&world.registry);
            }
            _ => {}
        }
    }
}

#[test]
fn write_protection_is_persisted_and_flushed_before_completion() {
    let directory = tempfile::tempdir().unwrap();
    let (mut world, message, mut worker, protection) = world(directory.path());
    let (mut queue, _) = admin(&mut world);
    let events = SetFeatures::new(FeatureId::ASYNC_EVENT_CONFIG, 1 << 8).emit(Sgl::NONE);
    assert!(world.ask(&mut queue, &events.with_cid(1), &[]).status.is_success());
    let wait = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).with_cid(2);
    world.send(&mut queue, &wait, &[]);
    while message.take().is_some() {}

    world.send(&mut queue, &set(WriteProtectState::PROTECTED), &[]);
    world.run(&mut queue);
    assert!(world.completions.is_empty() && !protection.is_on(), "nobody has kept it yet");
    worker.catch_up(&world.registry);
    assert!(protection.is_on());
    answers(&mut world, &mut queue, &message, &mut worker);
    assert!(
        matches!(world.disk.waiting.front(), Some((_, IoRequest::Flush))),
        "what was written before"
    );
    let event = world.completions.pop();
    assert!(event.is_none(), "nothing was said so far");
    world.run(&mut queue);
    queue.tick(&mut world.io());
    world.run(&mut queue);
    let told: Vec<(u16, u64)> = world.completions.drain(..).map(|c| (c.cid, c.result)).collect();
    assert_eq!(told.len(), 2);
    assert!(told.contains(&(7, 0)) && told.contains(&(2, 0x04_00_02)), "{told:x?}");

    let get =
        GetFeatures { fid: FeatureId::NAMESPACE_WRITE_PROTECT, nsid: 1, ..Default::default() };
    let cqe = world.ask(&mut queue, &get.emit(Sgl::NONE).with_cid(3), &[]);
    assert_eq!((cqe.status.is_success(), cqe.result), (true, 1));

    // Taken back, there is nothing to flush.
    world.send(&mut queue, &set(WriteProtectState::NONE), &[]);
    worker.catch_up(&world.registry);
    answers(&mut world, &mut queue, &message, &mut worker);
    assert!(world.disk.waiting.is_empty());
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is_success() && !protection.is_on());
    world.end(queue);
}

#[test]
fn write_protection_that_cannot_be_persisted_fails_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let (mut world, message, mut worker, protection) = world(directory.path());
    let (mut queue, _) = admin(&mut world);
    std::fs::remove_dir(directory.path()).unwrap();
    world.send(&mut queue, &set(WriteProtectState::PERMANENT), &[]);
    worker.catch_up(&world.registry);
    answers(&mut world, &mut queue, &message, &mut worker);
    world.run(&mut queue);
    assert!(world.completions.pop().unwrap().status.is(Status::INTERNAL_ERROR));
    assert!(!protection.is_on());
    world.end(queue);
}
