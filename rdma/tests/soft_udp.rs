//! The provider `soft` over real sockets of the loopback interface: two fabrics in one thread, and
//! in two.

#[path = "support/side/mod.rs"]
mod side;

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr as UnixAddr, UnixDatagram};
use std::thread;
use std::time::{Duration, Instant};

use crate::side::{LIMITS, MIB, PATIENCE, PORT, Side, address};
use rdma::soft::Options;
use rdma::soft::endpoint::Config;
use rdma::soft::stats::link_errors::LinkError;
use rdma::{
    Completion, Event, Fabric, FabricStats, Fault, Initiator, Qp, Reason, Remote, RemoteRegion,
    Wake, Work,
};

/// Two ends in one thread, which take turns.
struct Pair {
    host: Side,
    target: Side,
    /// The queue pairs of host and target.
    qps: [Qp; 2],
}

impl Pair {
    fn new(at: SocketAddr, source: IpAddr) -> Pair {
        Pair::with(at, Options { source: Some(source), ..Options::default() })
    }

    /// A host with these options, and a target with the same but for the source.
    fn with(at: SocketAddr, options: Options) -> Pair {
        let source = options.source.unwrap();
        let mut host = Side::new(options);
        let mut target = Side::new(Options { source: None, ..options });
        target.fabric.listen(at).unwrap();
        let at_host = host.fabric.connect(at, b"ask", LIMITS).unwrap();
        for tag in 0..4 {
            host.receive(at_host, tag);
        }
        host.fabric.flush();
        let (at_target, (local, remote, private_data)) = target.accept(b"yes");
        assert_eq!((local, remote.ip()), (at, source));
        assert_eq!((&private_data[..3], private_data.len()), (&b"ask"[..], 56));
        host.established(at_host);
        host.fabric.flush();
        target.established(at_target);
        Pair { host, target, qps: [at_host, at_target] }
    }

    /// Turns until the target (or the host) has something, which it gives.
    fn done(&mut self, at_target: bool) -> Completion {
        let start = Instant::now();
        loop {
            self.host.turn();
            self.target.turn();
            let side = if at_target { &mut self.target } else { &mut self.host };
            match side.events.pop_front() {
                Some(Event::Done(done)) => return done,
                Some(other) => panic!("{other:?}"),
                None => assert!(start.elapsed() < PATIENCE, "nothing happens"),
            }
        }
    }

    fn send(&mut self, to_target: bool, len: u32, seed: u8) {
        let [at_host, at_target] = self.qps;
        let (from, qp) = match to_target {
            true => (&mut self.host, at_host),
            false => (&mut self.target, at_target),
        };
        let message = from.data(len, seed);
        from.fabric.post(qp, 9, Work::Send { from: message, invalidate: None });
        let mut done = self.done(to_target);
        assert_eq!(done.outcome, Ok(len));
        let Work::Recv(ref mut buf) = done.work else { panic!("{done:?}") };
        buf.select(0, len);
        let (receiver, qp) = match to_target {
            true => (&mut self.target, at_target),
            false => (&mut self.host, at_host),
        };
        receiver.check(buf, seed);
        buf.select(0, MIB);
        receiver.fabric.post(qp, done.tag, done.work);
        let sent = self.done(!to_target);
        assert_eq!((sent.tag, sent.outcome), (9, Ok(len)));
        let pool = if to_target { &mut self.host.pool } else { &mut self.target.pool };
        pool.give(sent.work.into_buf());
    }

    fn expose(&mut self, len: u32, seed: u8) -> RemoteRegion {
        let buf = self.host.data(len, seed);
        self.host.fabric.register_remote(self.qps[0], buf).unwrap()
    }

    /// Lets the target do something with the host's memory.
    fn reach(&mut self, work: Work) -> Completion {
        self.target.fabric.post(self.qps[1], 5, work);
        self.done(true)
    }

    /// The host leaves; everything is home at both ends.
    fn leave(mut self) {
        let [at_host, at_target] = self.qps;
        self.host.fabric.disconnect(at_host);
        self.host.fabric.flush();
        assert_eq!(self.host.gone(at_host), Reason::Local);
        assert_eq!(self.target.gone(at_target), Reason::Peer);
        assert!(self.host.pool.is_full() && self.target.pool.is_full());
    }
}

#[test]
fn messages_and_memory_move_both_ways() {
    let mut pair = Pair::new(SocketAddr::new(address(1), PORT), address(2));
    messages_and_memory_move(&mut pair);
    pair.leave();
}

#[test]
fn transfers_work_with_source_ports_per_queue_pair() {
    let at = SocketAddr::new(address(17), PORT);
    let config = Config { source_ports: 64, ..Options::default().config };
    let options = Options { source: Some(address(18)), config, ..Options::default() };
    let mut pair = Pair::with(at, options);
    messages_and_memory_move(&mut pair);
    pair.leave();
}

fn messages_and_memory_move(pair: &mut Pair) {
    for (number, len) in [1, 64, 4096, 4097, 100_000, MIB].into_iter().enumerate() {
        pair.send(true, len, number as u8);
        pair.send(false, len, 100 + number as u8);
    }
    for (number, len) in [1, 4096, 131_073, MIB].into_iter().enumerate() {
        let seed = number as u8;
        let exposed = pair.expose(len, seed);
        let into = pair.target.data(len, 0xee);
        let done = pair.reach(Work::Read { into, from: exposed.remote() });
        assert_eq!(done.outcome, Ok(len));
        let read = done.work.into_buf();
        pair.target.check(&read, seed);
        pair.target.pool.give(read);

        let from = pair.target.data(len, seed + 50);
        let done = pair.reach(Work::Write { from, to: exposed.remote() });
        assert_eq!(done.outcome, Ok(len));
        pair.target.pool.give(done.work.into_buf());
        let written = pair.host.fabric.deregister_remote(exposed);
        pair.host.check(&written, seed + 50);
        pair.host.pool.give(written);
    }
}

/// Data that lead to no event make it worth to look again; messages are events.
#[test]
fn incoming_rdma_writes_set_the_receiving_hint() {
    let mut pair = Pair::new(SocketAddr::new(address(13), PORT), address(14));
    let [_, at_target] = pair.qps;
    pair.send(true, 64, 1);
    pair.host.turn();
    assert!(!pair.host.fabric.hints().receiving);
    let exposed = pair.expose(MIB, 1);
    let from = pair.target.data(MIB, 2);
    pair.target.fabric.post(at_target, 5, Work::Write { from, to: exposed.remote() });
    pair.target.fabric.flush();
    pair.host.turn();
    assert!(pair.host.fabric.hints().receiving && pair.host.events.is_empty());
    let done = pair.done(true);
    pair.target.pool.give(done.work.into_buf());
    pair.host.turn();
    assert!(!pair.host.fabric.hints().receiving);
    let buf = pair.host.fabric.deregister_remote(exposed);
    pair.host.pool.give(buf);
    pair.leave();
}

/// An answer may lie unread behind other things, and that is not the peer's fault. An excess of those
/// keeps no timer from ending for long.
#[test]
fn received_datagrams_are_processed_before_timeouts() {
    let mut pair = Pair::new(SocketAddr::new(address(15), PORT), address(16));
    let [at_host, at_target] = pair.qps;
    let message = pair.host.data(64, 1);
    pair.host.fabric.post(at_host, 9, Work::Send { from: message, invalidate: None });
    pair.host.fabric.flush();
    assert!(matches!(pair.target.done().work, Work::Recv(_)));
    for _ in 0..3 {
        let from = pair.target.data(64, 2);
        pair.target.fabric.post(at_target, 9, Work::Send { from, invalidate: None });
        pair.target.fabric.flush();
    }
    // Behind them, the acknowledgement leaves.
    pair.target.fabric.arm(Wake::Any);
    let timeouts = |side: &Side| {
        let mut stats = FabricStats::default();
        side.fabric.stats(&mut stats);
        let timeouts =
            stats.link_errors.iter().filter(|(_, name, _)| *name == LinkError::Timeout.name());
        timeouts.map(|(.., count)| count).sum::<u64>()
    };
    let late = Instant::now() + Duration::from_secs(1);
    let mut told = Vec::new();
    for (now, most) in [(late, 0), (late + Duration::from_millis(10), 1)] {
        let mut batch = Vec::with_capacity(1);
        pair.host.fabric.poll(now, &mut batch);
        assert_eq!(timeouts(&pair.host), most);
        told.append(&mut batch);
    }
    let mut batch = Vec::with_capacity(8);
    pair.host.fabric.poll(late, &mut batch);
    told.append(&mut batch);
    let done = |event: &Event| matches!(event, Event::Done(done) if done.outcome == Ok(64));
    assert!(told.len() == 4 && told.iter().all(done), "{told:?}");
}

/// What a timer sends leaves with what the user sends in the same iteration. Before a sleep there is
/// no flush.
#[test]
fn retransmissions_leave_with_the_next_flush_or_before_sleep() {
    let mut pair = Pair::new(SocketAddr::new(address(63), PORT), address(64));
    let [_, at_target] = pair.qps;
    let message = pair.target.data(64, 1);
    pair.target.fabric.post(at_target, 9, Work::Send { from: message, invalidate: None });
    pair.target.fabric.flush();
    // The host reads datagrams and answers none, so each second the message is sent again.
    let start = Instant::now();
    let received = |host: &mut Side| {
        host.poll();
        host.fabric.counters().received
    };
    let poll = |target: &mut Side, seconds| {
        let mut batch = Vec::with_capacity(1);
        target.fabric.poll(start + Duration::from_secs(seconds), &mut batch);
        assert!(batch.is_empty(), "{batch:?}");
    };
    let first = received(&mut pair.host);
    poll(&mut pair.target, 1);
    assert_eq!(received(&mut pair.host), first, "the flush of this iteration follows");
    pair.target.fabric.flush();
    assert_eq!(received(&mut pair.host), first + 1);
    pair.target.fabric.arm(Wake::Any);
    poll(&mut pair.target, 2);
    assert_eq!(received(&mut pair.host), first + 2, "it sleeps now");
    poll(&mut pair.target, 3);
    assert_eq!(received(&mut pair.host), first + 2, "it has slept");
    pair.target.fabric.flush();
    assert_eq!(received(&mut pair.host), first + 3);
}

/// Fifteen packets of 4096 bytes are a train; a flush begins the next one.
#[test]
fn batch_is_full_after_one_gso_train_of_writes() {
    let mut pair = Pair::new(SocketAddr::new(address(61), PORT), address(62));
    let [_, at_target] = pair.qps;
    let exposed = pair.expose(65_536, 1);
    for _ in 0..2 {
        for written in 0..15 {
            assert!(!pair.target.fabric.is_batch_full(), "after {written}");
            let from = pair.target.data(4096, 2);
            let work = Work::Write { from, to: exposed.remote() };
            pair.target.fabric.post(at_target, 5, work);
        }
        assert!(pair.target.fabric.is_batch_full());
        pair.target.fabric.flush();
        for _ in 0..15 {
            let done = pair.done(true);
            assert_eq!(done.outcome, Ok(4096));
            pair.target.pool.give(done.work.into_buf());
        }
    }
    for written in 0..4 {
        assert!(!pair.target.fabric.is_batch_full(), "after {written} large ones");
        let from = pair.target.data(65_536, 2);
        pair.target.fabric.post(at_target, 5, Work::Write { from, to: exposed.remote() });
    }
    assert!(pair.target.fabric.is_batch_full());
    pair.target.fabric.flush();
    for _ in 0..4 {
        let done = pair.done(true);
        assert_eq!(done.outcome, Ok(65_536));
        pair.target.pool.give(done.work.into_buf());
    }
    let written = pair.host.fabric.deregister_remote(exposed);
    pair.host.pool.give(written);
    pair.leave();
}

/// No key gives access to memory that is not exposed; the requester gets an error.
#[test]
fn a_target_denies_all_remote_memory_access() {
    let mut pair = Pair::new(SocketAddr::new(address(3), PORT), address(4));
    let buf = pair.host.data(64, 0);
    let to = Remote { addr: 0, key: 0x101, len: 64 };
    pair.host.fabric.post(pair.qps[0], 3, Work::Write { from: buf, to });
    let done = pair.done(false);
    assert_eq!((done.tag, done.outcome), (3, Err(Fault::RemoteAccess)));
    pair.host.pool.give(done.work.into_buf());
    let [at_host, at_target] = pair.qps;
    pair.target.fabric.disconnect(at_target);
    assert_eq!(pair.target.gone(at_target), Reason::Local);
    pair.target.fabric.flush();
    assert_eq!(pair.host.gone(at_host), Reason::Peer);

    let (at, source) = (SocketAddr::new(address(3), PORT), address(4));
    drop(pair);
    let mut pair = Pair::new(at, source);
    let into = pair.host.data(64, 0);
    pair.host.fabric.post(pair.qps[0], 4, Work::Read { into, from: to });
    let done = pair.done(false);
    assert_eq!((done.tag, done.outcome), (4, Err(Fault::RemoteAccess)));
    pair.host.pool.give(done.work.into_buf());
}

#[test]
fn a_deregistered_key_is_refused() {
    let mut pair = Pair::new(SocketAddr::new(address(5), PORT), address(6));
    let exposed = pair.expose(4096, 1);
    let remote = exposed.remote();
    let buf = pair.host.fabric.deregister_remote(exposed);
    pair.host.pool.give(buf);
    let from = pair.target.data(4096, 2);
    let done = pair.reach(Work::Write { from, to: remote });
    assert_eq!(done.outcome, Err(Fault::RemoteAccess));
    pair.target.pool.give(done.work.into_buf());
}

#[test]
fn refused_dropped_and_unserved_requests_are_rejected() {
    let at = SocketAddr::new(address(7), PORT);
    let (mut host, mut target) = (Side::host(address(8)), Side::target(at));
    let ask = |host: &mut Side, at| {
        let qp = host.fabric.connect(at, &[], LIMITS).unwrap();
        host.fabric.flush();
        qp
    };
    let refused = |host: &mut Side, qp| match host.gone(qp) {
        Reason::Rejected { code, private_data } => (code, private_data[0]),
        other => panic!("{other:?}"),
    };
    let qp = ask(&mut host, at);
    let incoming = target.incoming();
    target.fabric.reject(incoming, &[7]);
    target.fabric.flush();
    assert_eq!(refused(&mut host, qp), (28, 7));

    let qp = ask(&mut host, at);
    drop(target.incoming());
    target.turn();
    assert_eq!(refused(&mut host, qp), (28, 0));

    // On another thread, while the fabric sleeps.
    let qp = ask(&mut host, at);
    let incoming = target.incoming();
    thread::spawn(|| drop(incoming)).join().unwrap();
    target.sleep();
    target.turn();
    assert_eq!(refused(&mut host, qp), (28, 0));

    let qp = ask(&mut host, SocketAddr::new(at.ip(), PORT + 1));
    target.turn();
    assert_eq!(refused(&mut host, qp), (8, 0));
}

#[test]
fn unrelated_sockets_do_not_block_listening() {
    let at = SocketAddr::new(address(70), PORT);
    // The name that nvmfd once had for an address, which anybody may take.
    let name = UnixAddr::from_abstract_name(format!("nvmfd-rocev2 {}", at.ip())).unwrap();
    let _held = UnixDatagram::bind_addr(&name).unwrap();
    let _beside = std::net::UdpSocket::bind((at.ip(), 4790)).unwrap();
    Side::new(Options::default()).fabric.listen(at).unwrap();
}

#[test]
fn an_address_has_one_fabric_and_errors_name_the_cause() {
    let at = SocketAddr::new(address(9), PORT);
    let first = Side::target(at);
    let mut second = Side::new(Options::default());
    let taken = second.fabric.listen(at).unwrap_err().to_string();
    assert!(taken.contains("another program has it"), "{taken}");
    drop(first);
    second.fabric.listen(at).unwrap();
    second.fabric.listen(SocketAddr::new(at.ip(), PORT + 1)).unwrap();
    assert_eq!(second.fabric.socket_buffers().count(), 1, "one socket an address");
    second.fabric.unlisten(at);
    assert_eq!(second.fabric.socket_buffers().count(), 1);
    second.fabric.unlisten(SocketAddr::new(at.ip(), PORT + 1));
    assert_eq!(second.fabric.socket_buffers().count(), 0);

    let foreign = std::net::UdpSocket::bind((at.ip(), 4791)).unwrap();
    let taken = second.fabric.listen(at).unwrap_err().to_string();
    assert!(taken.contains("another program has it"), "{taken}");
    drop(foreign);
    let nowhere = second.fabric.listen("198.51.100.77:4420".parse().unwrap()).unwrap_err();
    assert!(nowhere.to_string().contains("does not have that address"), "{nowhere}");
}

/// Over an address of this machine itself the host finds another one by itself.
#[test]
fn a_host_beside_its_target_takes_another_address() {
    let at = SocketAddr::new(address(10), PORT);
    let (mut host, mut target) = (Side::new(Options::default()), Side::target(at));
    let qp = host.fabric.connect(at, &[], LIMITS).unwrap();
    host.fabric.flush();
    let (at_target, (local, remote, _)) = target.accept(&[]);
    assert_eq!(local, at);
    assert!(remote.ip() != at.ip() && remote.ip().is_loopback(), "{remote}");
    host.established(qp);
    host.fabric.flush();
    target.established(at_target);
    // A second connection takes the same socket.
    host.fabric.connect(at, &[], LIMITS).unwrap();
    assert_eq!(host.fabric.socket_buffers().count(), 1);
}

/// `::1` is the only IPv6 address that every machine has, and each end needs one of its own. So
/// this runs whole only where there is another.
#[test]
fn ipv6_works_as_well() {
    let at = SocketAddr::new(Ipv6Addr::LOCALHOST.into(), PORT);
    // Another run of this test, at the same time on the same machine, has the same addresses.
    let lock = UnixAddr::from_abstract_name("nvmfd test of ::1").unwrap();
    let _lock = loop {
        match UnixDatagram::bind_addr(&lock) {
            Ok(lock) => break lock,
            Err(_) => thread::sleep(Duration::from_millis(10)),
        }
    };
    let mut host = Side::new(Options::default());
    if let Err(e) = host.fabric.connect(at, &[], LIMITS) {
        assert!(e.to_string().contains("for want of another such address"), "{e}");
        return eprintln!("half of it was not run: {e}");
    }
    let source = host.fabric.socket_buffers().next().unwrap().address;
    drop(host);
    let mut pair = Pair::new(at, source);
    pair.send(true, 100_000, 1);
    pair.send(false, 100_000, 2);
    let exposed = pair.expose(65_536, 3);
    let into = pair.target.data(65_536, 0);
    let done = pair.reach(Work::Read { into, from: exposed.remote() });
    assert_eq!(done.outcome, Ok(65_536));
    let read = done.work.into_buf();
    pair.target.check(&read, 3);
    pair.target.pool.give(read);
    let buf = pair.host.fabric.deregister_remote(exposed);
    pair.host.pool.give(buf);
    pair.leave();
}

/// Many reads and writes, each end on its own thread, asleep when there is nothing to do.
#[test]
fn fabrics_on_separate_threads_exchange_reads_and_writes() {
    const ROUNDS: u32 = 200;
    let at = SocketAddr::new(address(11), PORT);
    let mut target = Side::target(at);
    let host = thread::spawn(move || {
        let mut host = Side::host(address(12));
        let qp = host.fabric.connect(at, &[], LIMITS).unwrap();
        for tag in 0..4 {
            host.receive(qp, tag);
        }
        host.established(qp);
        let buf = host.data(131_072, 7);
        let exposed = host.fabric.register_remote(qp, buf).unwrap();
        let Remote { addr, key, len } = exposed.remote();
        let mut tell = host.data(16, 0);
        let bytes = [&addr.to_be_bytes()[..], &key.to_be_bytes(), &len.to_be_bytes()].concat();
        host.pool.bytes_mut(&mut tell).copy_from_slice(&bytes);
        host.fabric.post(qp, 9, Work::Send { from: tell, invalidate: None });
        // One message a round is returned, and the host acknowledges it with one of its own.
        let mut rounds = 0;
        while rounds < ROUNDS {
            let done = host.done();
            assert!(done.outcome.is_ok());
            match done.work {
                Work::Recv(buf) => {
                    host.fabric.post(qp, 0, Work::Recv(buf));
                    let go = host.data(1, 0);
                    host.fabric.post(qp, 9, Work::Send { from: go, invalidate: None });
                    rounds += 1;
                }
                work => host.pool.give(work.into_buf()),
            }
        }
        loop {
            match host.next() {
                Event::Done(done) => host.pool.give(done.work.into_buf()),
                Event::Gone(gone, reason) => {
                    assert_eq!((gone, reason), (qp, Reason::Peer));
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        let mut bytes = vec![0; 131_072];
        host.pool.copy_out(&exposed, 0, &mut bytes);
        let buf = host.fabric.deregister_remote(exposed);
        host.pool.give(buf);
        assert!(host.pool.is_full());
        bytes
    });

    let (qp, _) = target.accept(&[]);
    let (mut from, mut round, mut reading) = (None, 0, true);
    let mut image = target.data(131_072, 7);
    loop {
        match target.next() {
            Event::Established(_) => {}
            Event::Done(Completion { tag, mut work, outcome, .. }) => {
                assert!(outcome.is_ok() || round > ROUNDS, "{outcome:?}");
                match work {
                    Work::Recv(ref mut buf) => {
                        let bytes = target.pool.bytes(buf);
                        let remote = *from.get_or_insert_with(|| Remote {
                            addr: u64::from_be_bytes(bytes[..8].try_into().unwrap()),
                            key: u32::from_be_bytes(bytes[8..12].try_into().unwrap()),
                            len: u32::from_be_bytes(bytes[12..16].try_into().unwrap()),
                        });
                        target.fabric.post(qp, tag, work);
                        if round == ROUNDS {
                            break;
                        }
                        // Read all, check, change, write back, tell.
                        let into = target.data(remote.len, 0);
                        target.fabric.post(qp, 1, Work::Read { into, from: remote });
                        reading = true;
                    }
                    Work::Read { into, from: remote } => {
                        assert!(reading);
                        reading = false;
                        let same = target.pool.bytes(&into) == target.pool.bytes(&image);
                        assert!(same, "round {round}");
                        target.pool.give(into);
                        let at = round as usize * 655;
                        target.pool.bytes_mut(&mut image)[at..at + 655].fill(round as u8);
                        let mut copy = target.data(remote.len, 0);
                        let bytes = target.pool.bytes(&image).to_vec();
                        target.pool.bytes_mut(&mut copy).copy_from_slice(&bytes);
                        target.fabric.post(qp, 2, Work::Write { from: copy, to: remote });
                        let tell = target.data(1, 0);
                        target.fabric.post(qp, 3, Work::Send { from: tell, invalidate: None });
                        round += 1;
                    }
                    other => target.pool.give(other.into_buf()),
                }
            }
            other => panic!("{other:?}"),
        }
    }
    target.fabric.disconnect(qp);
    target.fabric.flush();
    loop {
        match target.next() {
            Event::Done(done) => target.pool.give(done.work.into_buf()),
            Event::Gone(..) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(host.join().unwrap() == target.pool.bytes(&image), "what was written last");
    target.pool.give(image);
    assert!(target.pool.is_full());
}
