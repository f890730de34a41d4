use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, ChangePersistence, NotificationType, Register,
    RegisterKeys, ReservationType,
};
use nvme::{Nqn, Status};
use tempfile::{TempDir, tempdir};

use uuid::Uuid;

use crate::blockdev::IoCompletion;
use crate::core::controller::association::Association;
use crate::core::message::Message;
use crate::core::message::{Mailbox, mailbox};
use crate::core::registry::testing::visit;
use crate::core::sched::Offload;
use crate::core::sched::offload::Job;
use crate::core::subsystem::Subsystem;
use crate::core::subsystem::reservation::testing::reserve;
use crate::core::subsystem::reservation::{Barred, HostId, Order, Reservation};
use crate::core::subsystem::testing::sample;
use crate::core::subsystem::write_protect::Protection;
use crate::state::namespace_state::NamespaceFile;
use crate::worker::Workers;
use crate::worker::ns_state::*;

const A: HostId = [0xA; 16];
const B: HostId = [0xB; 16];

/// A worker on its thread, a reactor that consists only of its mailbox, and two connected hosts.
struct Scene {
    registry: Arc<Registry>,
    workers: Workers,
    message: Mailbox,
    messages: mpsc::Sender<NamespaceStateMessage>,
    thread: Option<JoinHandle<()>>,
    reservation: Arc<Reservation>,
    a: Arc<Association>,
    b: Arc<Association>,
    directory: TempDir,
}

fn connect(registry: &Registry, host: HostId) -> Arc<Association> {
    let name: Nqn = "nqn.2026-11.io.nvmfd:host".parse().unwrap();
    let data = ConnectData::new(host, CNTLID_DYNAMIC, &sample().nqn, &name);
    registry.connect_admin(&data, &visit()).unwrap().association
}

impl Scene {
    fn new() -> Scene {
        let directory = tempdir().unwrap();
        let mut subsystem: Subsystem = sample();
        let reservation =
            Reservation::kept(subsystem.nqn, 1, NamespaceFile::new(directory.path(), Uuid::nil()));
        let reservation = reservation.unwrap();
        subsystem.namespaces[0].reservation = Arc::clone(&reservation);
        let (sender, message) = mailbox().unwrap();
        let worker = NamespaceStateWorker::new();
        let messages = worker.sender();
        let registry = Arc::new(Registry::new(vec![sender], 8, 1 << 20));
        let workers = Workers::default().with_ns_state(messages.clone());
        registry.publish(Arc::new(subsystem));
        let (a, b) = (connect(&registry, A), connect(&registry, B));
        let known = Arc::clone(&registry);
        let thread = Some(std::thread::spawn(move || worker.run(&known)));
        let scene =
            Scene { registry, workers, message, messages, thread, reservation, a, b, directory };
        while scene.message.take().is_some() {}
        scene
    }

    fn ask(&self, host: HostId, order: Order) {
        let of = vec![Arc::clone(&self.reservation)];
        let request = ReservationRequest { of, host, order, reactor: 0, tag: 7 };
        assert!(self.workers.submit(Job::Reserve(request)));
    }

    fn message(&self) -> Message {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            if let Some(message) = self.message.take() {
                return message;
            }
            assert!(Instant::now() < deadline, "no letter");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn outcome(&self) -> Result<(), Status> {
        match self.message() {
            Message::Answer(IoCompletion { tag: 7, buf: None, outcome }) => outcome,
            message => panic!("{message:?}"),
        }
    }

    fn does(&self, host: HostId, order: Order) -> Result<(), Status> {
        self.ask(host, order);
        self.outcome()
    }

    fn register(&self, host: HostId, key: u64) {
        let how = Register(0).with_persistence(ChangePersistence::SET);
        let keys = RegisterKeys { current: 0, new: key };
        self.does(host, Order::Register(how, keys)).unwrap();
    }
}

impl Drop for Scene {
    fn drop(&mut self) {
        let _ = self.messages.send(NamespaceStateMessage::Stop);
        if let Some(thread) = self.thread.take() {
            thread.join().unwrap();
        }
    }
}

fn acquire(action: AcquireAction, rtype: ReservationType, current: u64, preempt: u64) -> Order {
    let how = Acquire(0).with_action(action).with_rtype(rtype);
    Order::Acquire(how, AcquireKeys { current, preempt })
}

#[test]
fn a_completed_reservation_is_enforced_and_persisted() {
    let scene = Scene::new();
    scene.register(A, 1);
    let take = acquire(AcquireAction::ACQUIRE, ReservationType::EXCLUSIVE_ACCESS, 1, 0);
    scene.does(A, take).unwrap();
    assert_eq!(scene.a.reservations.barred(1), Barred(0));
    assert_eq!(scene.b.reservations.barred(1), Barred::ALL);
    assert_eq!(scene.b.reservations.barred(2), Barred(0), "another namespace");
    let late = connect(&scene.registry, [0xC; 16]);
    assert_eq!(late.reservations.barred(1), Barred::ALL, "who connects later");
    let again = Reservation::kept(
        scene.reservation.subsystem,
        1,
        NamespaceFile::new(scene.directory.path(), Uuid::nil()),
    );
    assert_eq!(again.unwrap().state(), scene.reservation.state());
    assert!(scene.does(B, take).unwrap_err().is(Status::RESERVATION_CONFLICT));
}

#[test]
fn a_reservation_that_cannot_be_persisted_fails() {
    let scene = Scene::new();
    scene.register(A, 1);
    let before = scene.reservation.state();
    std::fs::remove_dir_all(scene.directory.path()).unwrap();
    let take = acquire(AcquireAction::ACQUIRE, ReservationType::EXCLUSIVE_ACCESS, 1, 0);
    let status = scene.does(A, take).unwrap_err();
    assert!(status.is(Status::INTERNAL_ERROR) && !status.dnr());
    assert_eq!(scene.reservation.state(), before);
    assert_eq!(scene.b.reservations.barred(1), Barred(0));
}

#[test]
fn preempt_and_abort_notifies_hosts_and_waits_for_their_commands() {
    let scene = Scene::new();
    scene.register(A, 1);
    scene.register(B, 2);
    let rtype = ReservationType::WRITE_EXCLUSIVE;
    scene.does(A, acquire(AcquireAction::ACQUIRE, rtype, 1, 0)).unwrap();
    scene.ask(B, acquire(AcquireAction::PREEMPT_AND_ABORT, rtype, 2, 1));
    let Message::Fence(fence) = scene.message() else { panic!("a fence comes first") };
    assert_eq!((&fence.nsids[..], &fence.whose), (&[1][..], &DrainScope::Preempted(vec![A])));
    assert_eq!(scene.a.reservations.barred(1), Barred::WRITE, "no new command gets in behind it");
    assert_eq!(scene.a.reservations.page().kind, NotificationType::REGISTRATION_PREEMPTED);
    assert_eq!(scene.b.reservations.page().kind, NotificationType::EMPTY);
    // A command is in flight at the device. Others are served meanwhile.
    let held = Arc::clone(&fence);
    drop(fence);
    scene.register(A, 1);
    drop(held);
    assert_eq!(scene.outcome(), Ok(()));
}

#[test]
fn a_reservation_that_is_no_longer_served_bars_no_host() {
    let scene = Scene::new();
    scene.register(A, 1);
    let mut without = sample();
    without.namespaces[0].reservation = Reservation::volatile(without.nqn, 1);
    scene.registry.publish(Arc::new(without));
    while scene.message.take().is_some() {}
    let take = acquire(AcquireAction::ACQUIRE, ReservationType::EXCLUSIVE_ACCESS, 1, 0);
    scene.does(A, take).unwrap();
    assert_eq!(scene.b.reservations.barred(1), Barred(0), "the namespace has another one now");
}

/// The gateway that serves the image may have changed both since they were loaded here.
#[test]
fn requests_for_a_namespace_in_standby_change_no_persisted_state() {
    let scene = Scene::new();
    scene.register(A, 1);
    let file = || NamespaceFile::new(scene.directory.path(), Uuid::nil());
    let mut subsystem = sample();
    subsystem.namespaces[0].reservation = Arc::clone(&scene.reservation);
    let protection = Protection::kept(subsystem.nqn, 1, file()).unwrap();
    subsystem.namespaces[0].protection = Arc::clone(&protection);
    let health = Arc::clone(&subsystem.namespaces[0].health);
    scene.registry.publish(Arc::new(subsystem));
    while scene.message.take().is_some() {}
    health.set_standby(true);
    // The other gateway answers B.
    let other = Reservation::kept(sample().nqn, 1, file()).unwrap();
    reserve(&other, B);
    let take = acquire(AcquireAction::ACQUIRE, ReservationType::EXCLUSIVE_ACCESS, 1, 0);
    let protect = || {
        let from = ReplyTo::Reactor(0, 7);
        let (of, state) = (vec![Arc::clone(&protection)], WriteProtectState::PROTECTED);
        let request = WriteProtectRequest { of, state, from };
        assert!(scene.workers.submit(Job::Protect(request)));
        scene.outcome()
    };
    assert_eq!(scene.does(A, take), Err(Status::ANA_INACCESSIBLE));
    assert_eq!(protect(), Err(Status::ANA_INACCESSIBLE));
    let persisted = Reservation::kept(sample().nqn, 1, file()).unwrap();
    assert_eq!(persisted.state(), other.state());
    // This one takes it.
    scene.reservation.reload().unwrap();
    health.set_standby(false);
    assert!(scene.does(A, take).unwrap_err().is(Status::RESERVATION_CONFLICT));
}

/// Each change that persists takes the time of several syncs, and a host may have thousands pending.
#[test]
fn reservation_requests_of_different_hosts_are_served_in_turn() {
    let (sender, message) = mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 1 << 20);
    let mut worker = NamespaceStateWorker::new();
    let workers = Workers::default().with_ns_state(worker.sender());
    let reservation = Reservation::volatile(sample().nqn, 1);
    let ask = |host, tag| {
        let keys = RegisterKeys { current: 0, new: 1 };
        let (of, order) = (vec![Arc::clone(&reservation)], Order::Register(Register(0), keys));
        let request = ReservationRequest { of, host, order, reactor: 0, tag };
        assert!(workers.submit(Job::Reserve(request)));
    };
    (0..100).for_each(|tag| ask(A, tag));
    (100..102).for_each(|tag| ask(B, tag));
    worker.catch_up(&registry);
    let answers = std::iter::from_fn(|| message.take()).filter_map(|message| match message {
        Message::Answer(done) => Some(done.tag),
        _ => None,
    });
    let order: Vec<_> = answers.collect();
    assert_eq!((&order[..6], order.len()), (&[0, 100, 1, 101, 2, 3][..], 102));
}

#[test]
fn a_reservation_request_without_a_worker_is_not_accepted() {
    let (of, order) = (Vec::new(), Order::Persist(false));
    let request = ReservationRequest { of, host: A, order, reactor: 0, tag: 0 };
    assert!(!Workers::default().submit(Job::Reserve(request)));
}
