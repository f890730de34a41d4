//! Exchanges that take long to compute: turns of sources, and time limits.

use std::sync::Arc;
use std::time::Duration;

use nvme::auth::GroupId;
use nvme::fabrics::{CNTLID_DYNAMIC, Connect};
use nvmfd::core::auth::exchange::Exchange;
use nvmfd::core::message::{Mailbox, Message, Sender, mailbox};
use nvmfd::core::qpair::QueuePair;
use nvmfd::core::registry::Registry;
use nvmfd::core::sched::offload::{AuthJob, BoxedTask, Job};
use tempfile::TempDir;

use super::{is_closing, send_heavy};
use crate::auth::{HOST, connect, listen, negotiate, reply, say, world};
use crate::support::{World, connect_data, keyed};

/// The thread that computes is busy until the channel is read that it writes to.
struct Busy {
    to: Sender,
    inbox: Mailbox,
}

impl Busy {
    fn new(world: &World) -> Busy {
        let (to, inbox) = mailbox().unwrap();
        while to.try_send(Message::DiscoveryChanged).is_ok() {}
        let busy = Busy { to, inbox };
        assert!(world.shared.offload.submit(busy.task(world, busy.to.clone(), 0)));
        busy
    }

    /// A task of somebody else.
    fn task(&self, world: &World, to: Sender, key: u32) -> Job {
        let (host, subsystem) = (HOST.parse().unwrap(), crate::support::subsystem().nqn);
        let start = || world.registry.start_exchange(&host);
        let mut exchange = Exchange::new(host, subsystem, world.now);
        let job = exchange.on_message(&negotiate(), start, world.now).unwrap();
        let source = std::net::IpAddr::from([192, 0, 2, 77]).into();
        let ticket = u64::MAX;
        let run = Box::new(move || {
            let _ = to.send(Message::Authenticated { key, ticket, worked: job.run() });
        });
        Job::Authenticate(AuthJob { source, ticket, run: BoxedTask(run) })
    }

    fn ends(self) {
        while self.inbox.take().is_some() {}
    }
}

/// A world with both groups, and the messages to its reactor.
fn heavy_world() -> (World, Mailbox, TempDir) {
    let (sender, inbox) = mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 70);
    registry.publish(Arc::new(crate::support::subsystem()));
    let world = World::of(crate::support::share(registry), 0);
    let directory = crate::auth::give_key(&world, vec![GroupId::NULL, GroupId::FFDHE2048]);
    (world, inbox, directory)
}

/// The next task of the reactor that is done: its queue.
fn done(inbox: &Mailbox, admin: &mut QueuePair, world: &mut World) -> u32 {
    loop {
        match inbox.take() {
            Some(Message::Authenticated { key, ticket, worked }) => {
                admin.on_worked(ticket, worked, &mut world.io());
                return key;
            }
            Some(_) => {}
            None => std::thread::yield_now(),
        }
    }
}

/// However many there are of one source, they do not keep that of another waiting.
#[test]
fn dh_computations_are_scheduled_round_robin_by_source() {
    let (mut world, inbox, _directory) = heavy_world();
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    let busy = Busy::new(&world);
    let elsewhere = mailbox().unwrap();
    for _ in 0..100 {
        assert!(world.shared.offload.submit(busy.task(&world, elsewhere.0.clone(), 0)));
    }
    // The last of the many came before the one of another source.
    let home = world.registry.reactor(0).clone();
    assert!(world.shared.offload.submit(busy.task(&world, home, 9)));
    send_heavy(&mut world, &mut admin);
    busy.ends();
    let order = [0, 0].map(|_| done(&inbox, &mut admin, &mut world));
    assert_eq!(order, [world.key, 9]);
    world.run(&mut admin);
    assert!(world.completions.pop().unwrap().status.is_success());
    let challenge = listen(&mut world, &mut admin);
    assert!(nvme::auth::Challenge::parse(&challenge).is_ok());
    world.end(admin);
}

/// The time in our line is ours.
#[test]
fn authentication_timeout_excludes_the_targets_dh_computations() {
    let (mut world, inbox, _directory) = heavy_world();
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    world.now += Duration::from_secs(20);
    let busy = Busy::new(&world);
    send_heavy(&mut world, &mut admin);
    world.now += Duration::from_secs(60);
    assert!(!is_closing(&mut world, &mut admin));
    busy.ends();
    done(&inbox, &mut admin, &mut world);
    world.run(&mut admin);
    assert!(world.completions.pop().unwrap().status.is_success());
    world.now += Duration::from_secs(9);
    assert!(!is_closing(&mut world, &mut admin));
    world.now += Duration::from_secs(1);
    assert!(is_closing(&mut world, &mut admin), "now it has had its 30 s");
    world.end(admin);
}

/// .. and so is a host that disconnects because of it, or has to.
#[test]
fn disconnects_during_dh_computations_do_not_count_as_failures() {
    let (mut world, _inbox, _directory) = heavy_world();
    let busy = Busy::new(&world);
    for number in 0..20 {
        let mut queue = connect(&mut world, 0, CNTLID_DYNAMIC);
        send_heavy(&mut world, &mut queue);
        if number % 2 == 0 {
            queue.displace(&mut world.io());
        }
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
    let (host, from) = (HOST.parse().unwrap(), "192.0.2.1".parse().unwrap());
    assert!(!world.registry.is_throttled(from, &host, world.now));
    busy.ends();
}

/// A guest's 6.12 host needed more than the keep alive timeout for its share of ffdhe8192.
#[test]
fn keep_alive_timeout_is_suspended_during_authentication() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = world.open_qid(0);
    world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
    let connect = Connect { sqsize_z: 15, kato_ms: 5000, ..Connect::default() };
    assert!(world.ask(&mut admin, &connect.emit(keyed(0, 1024)), &[]).status.is_success());
    assert!(say(&mut world, &mut admin, &negotiate()).is_success());
    let challenge = listen(&mut world, &mut admin);
    world.now += Duration::from_secs(20);
    admin.tick(&mut world.io());
    assert!(say(&mut world, &mut admin, &reply(&challenge)).is_success());
    listen(&mut world, &mut admin);
    admin.tick(&mut world.io());
    assert!(!world.fabric.disconnected && admin.is_admitted());
    world.now += Duration::from_secs(29);
    admin.tick(&mut world.io());
    assert!(!world.fabric.disconnected, "it may compute for its next queue");
    world.now += Duration::from_secs(1);
    admin.tick(&mut world.io());
    assert!(world.fabric.disconnected, "from now on it must keep alive");
    world.end(admin);
}
