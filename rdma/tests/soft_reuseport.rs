//! Several fabrics of the provider `soft` that share their addresses, as reactors do.

#[path = "support/side/mod.rs"]
#[expect(dead_code, reason = "it uses a part of it")]
mod side;

use std::io::IoSlice;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;

use std::thread;
use std::time::{Duration, Instant};

use crate::side::{LIMITS, PATIENCE, PORT, Side, address};
use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};
use rdma::soft::stats::datagrams::DatagramOutcome;
use rdma::soft::{Group, Options};
use rdma::{Event, Fabric, Incoming, Initiator, Qp, Reason, Work};

/// A target of several fabrics, and one host.
struct Scene {
    host: Side,
    target: Vec<Side>,
    at: SocketAddr,
}

/// Where a thing happened: at the host, or at a fabric of the target.
type Place = Option<usize>;

impl Scene {
    fn new(test: u8, count: u32) -> Scene {
        let group = Group::new(count, Options::default()).unwrap();
        let side = |index| Side::of(|region| group.fabric(index, region));
        let mut target: Vec<_> = (0..count).map(side).collect();
        let at = SocketAddr::new(address(test), PORT);
        target[0].fabric.listen(at).unwrap();
        Scene { host: Side::host(address(test + 1)), target, at }
    }

    /// Lets all take turns until something happens at one of them.
    fn next(&mut self) -> (Place, Event) {
        let start = Instant::now();
        loop {
            let all = std::iter::once((None, &mut self.host));
            let all = all.chain(self.target.iter_mut().enumerate().map(|(i, s)| (Some(i), s)));
            for (place, side) in all {
                if let Some(event) = side.events.pop_front() {
                    return (place, event);
                }
                side.turn();
            }
            assert!(start.elapsed() < PATIENCE, "nothing happens");
        }
    }

    fn ask(&mut self) -> Qp {
        let qp = self.host.fabric.connect(self.at, &[], LIMITS).unwrap();
        self.host.receive(qp, 1);
        self.host.fabric.flush();
        qp
    }

    fn incoming(&mut self) -> (usize, Incoming) {
        match self.next() {
            (Some(index), Event::Incoming(incoming)) => (index, incoming),
            other => panic!("{other:?}"),
        }
    }

    /// A connection opened by fabric `owner`, wherever the request came in. Its two queue pairs,
    /// and where the request came in.
    fn connect(&mut self, owner: usize) -> (Qp, Qp, usize) {
        let at_host = self.ask();
        let (arrived, incoming) = self.incoming();
        let side = &mut self.target[owner];
        let at_target = side.fabric.open(incoming, LIMITS).unwrap();
        side.receive(at_target, 2);
        side.fabric.accept(at_target, &[]);
        let mut up = [self.next(), self.next()];
        up.sort_by_key(|(place, _)| *place);
        assert!(matches!(up[0], (None, Event::Established(qp)) if qp == at_host), "{up:?}");
        assert!(
            matches!(up[1], (Some(index), Event::Established(qp)) if (index, qp) == (owner, at_target)),
            "{up:?}"
        );
        (at_host, at_target, arrived)
    }

    /// A message to the target and one back.
    fn echo(&mut self, at_host: Qp, owner: usize, at_target: Qp) {
        let message = self.host.data(10_000, 1);
        self.host.fabric.post(at_host, 5, Work::Send { from: message, invalidate: None });
        let mut told = [false; 4];
        while told != [true; 4] {
            let (place, event) = self.next();
            let Event::Done(done) = event else { panic!("{place:?} {event:?}") };
            assert_eq!(done.outcome, Ok(10_000));
            match (place, done.work) {
                (Some(index), Work::Recv(buf)) => {
                    assert_eq!((index, done.qp, done.tag), (owner, at_target, 2));
                    let side = &mut self.target[owner];
                    side.fabric.post(at_target, 2, Work::Recv(buf));
                    let answer = side.data(10_000, 2);
                    side.fabric.post(at_target, 6, Work::Send { from: answer, invalidate: None });
                    told[0] = true;
                }
                (None, Work::Recv(buf)) => {
                    self.host.fabric.post(at_host, 1, Work::Recv(buf));
                    told[1] = true;
                }
                (None, work) => {
                    self.host.pool.give(work.into_buf());
                    told[2] = true;
                }
                (Some(index), work) => {
                    self.target[index].pool.give(work.into_buf());
                    told[3] = true;
                }
            }
        }
    }

    /// Waits for the ends of queue pairs.
    fn gone<const N: usize>(&mut self, ends: [(Place, Qp); N]) -> [Reason; N] {
        let mut reasons = [const { None }; N];
        while reasons.contains(&None) {
            match self.next() {
                (place, Event::Gone(qp, reason)) => {
                    let at = ends.iter().position(|end| *end == (place, qp)).unwrap();
                    assert_eq!(reasons[at].replace(reason), None);
                }
                (Some(index), Event::Done(done)) => {
                    self.target[index].pool.give(done.work.into_buf());
                }
                (None, Event::Done(done)) => self.host.pool.give(done.work.into_buf()),
                other => panic!("{other:?}"),
            }
        }
        reasons.map(Option::unwrap)
    }

    fn leave(&mut self, at_host: Qp, owner: usize, at_target: Qp) {
        self.host.fabric.disconnect(at_host);
        let reasons = self.gone([(None, at_host), (Some(owner), at_target)]);
        assert_eq!(reasons, [Reason::Local, Reason::Peer]);
    }

    /// Waits until the host has been refused.
    fn refused(&mut self, at_host: Qp, why: i32) {
        let [reason] = self.gone([(None, at_host)]);
        assert!(matches!(reason, Reason::Rejected { code, .. } if code == why), "{reason:?}");
    }
}

/// Every fabric gets requests, opens them for itself and for others, and gets what is for it.
#[test]
fn connections_are_served_by_the_fabric_that_opened_them() {
    for (test, count) in [(20, 2), (22, 3)] {
        let mut scene = Scene::new(test, count);
        let (mut arrived, mut all) = (vec![0; count as usize], Vec::new());
        for number in 0..40 {
            let owner = number % count as usize;
            let (at_host, at_target, at) = scene.connect(owner);
            arrived[at] += 1;
            all.push((at_host, owner, at_target));
        }
        assert!(arrived.iter().all(|requests| *requests > 0), "{arrived:?}");
        for (at_host, owner, at_target) in all.iter().copied() {
            scene.echo(at_host, owner, at_target);
        }
        for (number, (at_host, owner, at_target)) in all.into_iter().enumerate() {
            if number % 2 == 0 {
                scene.leave(at_host, owner, at_target);
            } else {
                scene.target[owner].fabric.disconnect(at_target);
                let reasons = scene.gone([(None, at_host), (Some(owner), at_target)]);
                assert_eq!(reasons, [Reason::Peer, Reason::Local]);
            }
        }
        for side in &mut scene.target {
            side.turn();
            assert!(side.pool.is_full());
            assert_eq!(side.fabric.counters()[DatagramOutcome::Stray], 0);
        }
        assert!(scene.host.pool.is_full());
    }
}

/// A request that another fabric has opened is known again where it arrived.
/// Goodbyes of one turn leave as one train, and the kernel brings that to one fabric.
#[test]
fn disconnects_sent_in_one_train_reach_every_fabric() {
    let mut scene = Scene::new(34, 3);
    let all: Vec<_> = (0..6)
        .map(|n| {
            let owner = n % 3;
            let (at_host, at_target, _) = scene.connect(owner);
            (at_host, owner, at_target)
        })
        .collect();
    for (at_host, ..) in &all {
        scene.host.fabric.disconnect(*at_host);
    }
    let ends: [_; 12] = std::array::from_fn(|n| {
        let (at_host, owner, at_target) = all[n / 2];
        if n % 2 == 0 { (None, at_host) } else { (Some(owner), at_target) }
    });
    let reasons = scene.gone(ends);
    let expected: [_; 12] =
        std::array::from_fn(|n| if n % 2 == 0 { Reason::Local } else { Reason::Peer });
    assert_eq!(reasons, expected);
}

#[test]
fn a_repeated_request_is_reported_once() {
    let mut scene = Scene::new(24, 2);
    for owner in [0, 1] {
        let at_host = scene.ask();
        let (_, incoming) = scene.incoming();
        let at_target = scene.target[owner].fabric.open(incoming, LIMITS).unwrap();
        // The host asks again while the user thinks.
        thread::sleep(Duration::from_millis(250));
        for _ in 0..4 {
            scene.host.turn();
            scene.target.iter_mut().for_each(Side::turn);
        }
        assert!(scene.target.iter().all(|side| side.events.is_empty()));
        scene.target[owner].fabric.accept(at_target, &[]);
        let mut up = 0;
        while up < 2 {
            match scene.next() {
                (_, Event::Established(_)) => up += 1,
                other => panic!("{other:?}"),
            }
        }
        scene.leave(at_host, owner, at_target);
    }
}

#[test]
fn requests_can_be_refused_or_dropped_by_other_fabrics() {
    let mut scene = Scene::new(26, 3);
    for other in 1..3 {
        let at_host = scene.ask();
        let (arrived, incoming) = scene.incoming();
        scene.target[(arrived + other) % 3].fabric.reject(incoming, b"no");
        scene.refused(at_host, 28);
        let at_host = scene.ask();
        let (_, incoming) = scene.incoming();
        thread::spawn(|| drop(incoming)).join().unwrap();
        scene.refused(at_host, 28);
    }
}

/// Listeners are added and removed while fabrics sleep, each on its thread; connections stay.
#[test]
fn listeners_can_be_added_and_removed_with_open_connections() {
    let mut scene = Scene::new(28, 2);
    let (at_host, at_target, _) = scene.connect(1);
    let second = SocketAddr::new(address(30), PORT);
    scene.target[1].fabric.listen(second).unwrap();
    for _ in 0..8 {
        let first = std::mem::replace(&mut scene.at, second);
        let (new_host, new_target, _) = scene.connect(0);
        scene.echo(new_host, 0, new_target);
        scene.leave(new_host, 0, new_target);
        scene.at = first;
    }
    let sockets = |scene: &Scene| -> Vec<usize> {
        scene.target.iter().map(|side| side.fabric.socket_buffers().count()).collect()
    };
    assert_eq!(sockets(&scene), [2, 2]);
    // The address of the remaining connection is removed last.
    let at = scene.at;
    scene.target[0].fabric.unlisten(at);
    for _ in 0..4 {
        scene.host.turn();
        scene.target.iter_mut().for_each(Side::turn);
    }
    assert_eq!(sockets(&scene), [2, 2]);
    scene.echo(at_host, 1, at_target);
    for _ in 0..4 {
        let refused = scene.ask();
        scene.refused(refused, 8);
    }
    // It is not free for others, but for the group, which finds its sockets in order again.
    let mut other = Side::new(Options::default());
    assert!(other.fabric.listen(at).is_err());
    scene.target[1].fabric.listen(at).unwrap();
    for owner in [0, 1, 0, 1] {
        let (new_host, new_target, _) = scene.connect(owner);
        scene.echo(new_host, owner, new_target);
    }
    scene.echo(at_host, 1, at_target);
    for side in &scene.target {
        assert_eq!(side.fabric.counters()[DatagramOutcome::Stray], 0);
    }
    scene.leave(at_host, 1, at_target);
    for side in &mut scene.target {
        (0..32).for_each(|qp| side.fabric.disconnect(Qp(qp)));
    }
    for at in [at, second] {
        scene.target[0].fabric.unlisten(at);
    }
    let start = Instant::now();
    while sockets(&scene) != [0, 0] {
        assert!(start.elapsed() < PATIENCE, "sockets stay open");
        scene.host.turn();
        scene.target.iter_mut().for_each(Side::turn);
    }
    other.fabric.listen(at).unwrap();
}

/// A listener may be withdrawn while a fabric sleeps that has never seen it.
#[test]
fn an_address_is_released_even_if_a_fabric_never_saw_it() {
    let mut scene = Scene::new(36, 2);
    scene.target[0].fabric.unlisten(scene.at);
    let mut other = Side::new(Options::default());
    other.fabric.listen(scene.at).unwrap();
    scene.target.iter_mut().for_each(Side::turn);
    let open: Vec<usize> =
        scene.target.iter().map(|side| side.fabric.socket_buffers().count()).collect();
    assert_eq!(open, [0, 0]);
}

/// What a device has merged into one may hold packets for several fabrics.
#[test]
fn misdirected_packets_are_forwarded_to_their_fabric() {
    let scene = Scene::new(32, 2);
    let Scene { target, at, .. } = scene;
    let socket = std::net::UdpSocket::bind((address(33), 0)).unwrap();
    // Acknowledgements for queue pairs of the one and the other, in one train.
    let mut train = Vec::new();
    for number in 0..10 {
        let mut packet = [0; 20];
        packet[0] = 0x11;
        packet[7] = 0x20 + number;
        train.extend_from_slice(&packet);
    }
    // Only the last one may be shorter.
    train.truncate(train.len() - 4);
    let to: SockaddrStorage = SocketAddr::new(at.ip(), 4791).into();
    let parts = [IoSlice::new(&train)];
    let size = 20;
    let message = [ControlMessage::UdpGsoSegments(&size)];
    sendmsg(socket.as_raw_fd(), &parts, &message, MsgFlags::empty(), Some(&to)).unwrap();
    let mut sides = target;
    let start = Instant::now();
    loop {
        sides.iter_mut().for_each(Side::turn);
        let received: Vec<u64> = sides.iter().map(|s| s.fabric.counters().received).collect();
        if received == [5, 5] {
            let short: Vec<u64> =
                sides.iter().map(|s| s.fabric.counters()[DatagramOutcome::Malformed]).collect();
            assert_eq!(short, [0, 1]);
            break;
        }
        assert!(start.elapsed() < PATIENCE, "{received:?}");
    }
}
