//! In which order, in how many packets, and when things are sent.

use super::*;

#[test]
fn messages_of_all_lengths_arrive() {
    let (mut a, mut b) = pair();
    for (tag, len) in [0, 1, 64, MTU - 1, MTU, MTU + 1, 4160, 40 * MTU].into_iter().enumerate() {
        let (tag, seed) = (tag as u64, len as u8);
        b.recv(tag, len.max(64));
        a.send(tag, len, seed);
        settle(&mut a, &mut b);
        b.completed(tag, len, seed);
        a.completed(tag, len, seed);
    }
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn reads_and_writes_move_data_and_send_invalidates_the_key() {
    let (mut a, mut b) = pair();
    let remote = b.expose(100_000, 7, Rights::READ.and(Rights::WRITE));
    let into = a.buf(100_000, 0);
    a.post(1, Work::Read { into, from: remote });
    settle(&mut a, &mut b);
    a.completed(1, 100_000, 7);

    let from = a.buf(50_001, 9);
    let to = Remote { addr: remote.addr + 3, ..remote };
    a.post(2, Work::Write { from, to });
    let cqe = a.buf(16, 1);
    a.post(3, Work::Send { from: cqe, invalidate: Some(remote.key) });
    b.recv(4, 64);
    settle(&mut a, &mut b);
    assert_eq!(a.completions(), [(2, Ok(50_001)), (3, Ok(16))]);
    let Some(Event::Done(done)) = b.events.first() else { panic!("none") };
    assert_eq!(done.with, ReceivedWith::Invalidate(remote.key));
    b.completed(4, 16, 1);
    assert!(b.memory.place(remote.key, remote.addr, 1, Rights::READ).is_err());
    let buf = b.concealed(remote);
    let bytes = b.pool.bytes(&buf);
    assert!((0..50_001).all(|at| bytes[at + 3] == pattern(at, 9)));
    assert!(bytes[2] == pattern(2, 7) && bytes[50_004] == pattern(50_004, 7));
    b.pool.give(buf);
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn equal_write_segments_and_their_send_request_one_ack() {
    let mut a = End::new(&Settings { window: 128, ..settings(1) });
    let from = a.buf(16 * MTU, 0);
    a.post(1, Work::Write { from, to: Remote { addr: 0x1000, key: 5, len: 16 * MTU } });
    a.send(2, 16, 0);
    let train = a.transmit_all();
    let (cqe, push) = train.split_last().unwrap();
    assert_eq!(push.len(), 16);
    for (at, datagram) in push.iter().enumerate() {
        let packet = Packet::parse(datagram).unwrap();
        assert_eq!((packet.bth.opcode, packet.bth.ack_request), (Opcode::WriteOnly, false));
        assert_eq!(packet.reth().unwrap().address, 0x1000 + at as u64 * u64::from(MTU));
        assert_eq!(datagram.len(), push[0].len());
    }
    let cqe = Packet::parse(cqe).unwrap();
    assert_eq!((cqe.bth.opcode, cqe.bth.ack_request), (Opcode::SendOnly, true));
    a.respond(Opcode::Acknowledge, 16, Syndrome::ACK, &[]);
    assert_eq!(a.completions(), [(1, Ok(16 * MTU)), (2, Ok(16))]);
}

#[test]
fn a_long_train_asks_for_acknowledgements_on_the_way() {
    let mut a = End::new(&Settings { window: 128, ..settings(1) });
    a.send(1, 100 * MTU, 0);
    let asked: Vec<usize> = a
        .transmit_all()
        .iter()
        .enumerate()
        .filter(|(_, datagram)| Packet::parse(datagram).unwrap().bth.ack_request)
        .map(|(at, _)| at)
        .collect();
    assert_eq!(asked, [31, 63, 95, 99]);
}

/// One that keeps mere acknowledgements back, with receives posted, and how long it does.
fn patient(selective: bool) -> (End, Duration) {
    let ack_delay = Duration::from_micros(50);
    let mut end = End::new(&Settings { ack_delay, selective, ..settings(4) });
    (0..64).for_each(|tag| end.recv(tag, 64));
    (end, ack_delay)
}

#[test]
fn pure_acknowledgements_are_delayed_for_a_bounded_time() {
    let (mut b, delay) = patient(false);
    let message = |b: &mut End, at| b.request(Opcode::SendOnly, at, Extended::default(), &[0; 64]);
    message(&mut b, 0);
    assert_eq!(b.answers(), []);
    assert_eq!(b.qp.poll_timeout(), Some(b.now + delay));
    b.send(100, 16, 0);
    let left = b.answers();
    assert_eq!((left[0].1, left[1]), (Opcode::SendOnly, (0, Opcode::Acknowledge, ACK)));
    b.respond(Opcode::Acknowledge, 0, Syndrome::ACK, &[]);
    assert_eq!(b.qp.poll_timeout(), None);
    // No other packet arrives.
    message(&mut b, 1);
    assert_eq!(b.answers(), []);
    b.elapse(delay - Duration::from_nanos(1));
    assert_eq!(b.answers(), []);
    b.elapse(Duration::from_nanos(1));
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, ACK)]);
    // A long silence is ahead.
    message(&mut b, 2);
    assert_eq!((b.answers(), b.qp.is_keeping()), (vec![], true));
    let now = b.now;
    b.qp.hasten(now);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    assert_eq!((b.qp.is_keeping(), b.qp.poll_timeout()), (false, None));
    // The peer has not heard of it, and says so.
    message(&mut b, 1);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    // Data say the same.
    let remote = b.expose(64, 7, Rights::READ);
    message(&mut b, 3);
    assert_eq!(b.answers(), []);
    b.request(Opcode::ReadRequest, 4, reth(remote), &[]);
    assert_eq!(b.answers(), [(4, Opcode::ReadResponseOnly, ACK)]);
    b.elapse(delay);
    assert_eq!((b.answers(), b.qp.poll_timeout()), (vec![], None));
    b.revoke(remote);
    // Many have arrived.
    (5..36).for_each(|at| message(&mut b, at));
    assert_eq!(b.answers(), []);
    message(&mut b, 36);
    assert_eq!(b.answers(), [(36, Opcode::Acknowledge, ACK)]);
}

/// Its socket may have no room when it is to leave. It leaves when there is some, and nobody need look
/// at the clock for that.
#[test]
fn an_overdue_acknowledgement_arms_no_timer() {
    let (mut b, delay) = patient(false);
    let message = |b: &mut End, at| b.request(Opcode::SendOnly, at, Extended::default(), &[0; 64]);
    for at in 0..2 {
        message(&mut b, at);
        assert_eq!(b.answers(), []);
        assert_eq!(b.qp.poll_timeout(), Some(b.now + delay));
        b.elapse(delay);
        assert_eq!((b.qp.poll_timeout(), b.qp.is_keeping()), (None, true));
        assert_eq!(b.answers(), [(at as i32, Opcode::Acknowledge, ACK)]);
    }
}

#[test]
fn nvmfd_peers_get_one_acknowledgement_for_several_packets() {
    let (mut b, delay) = patient(true);
    for at in 0..4 {
        b.request(Opcode::SendOnly, at, Extended::default(), &[0; 64]);
        b.send(100, 16, 0);
        let left: Vec<Opcode> = b.answers().into_iter().map(|(_, opcode, _)| opcode).collect();
        let alone = [Opcode::SendOnly, Opcode::Acknowledge];
        assert_eq!(left, alone[..if at < 3 { 1 } else { 2 }], "{at}");
    }
    let remote = b.expose(4 * MTU, 7, Rights::WRITE);
    // Much data, whose sender soon has no place left in its window.
    for at in 4..12 {
        let packet = Remote { len: MTU, ..remote };
        assert_eq!(b.answers(), []);
        b.request(Opcode::WriteOnly, at, reth(packet), &[1; MTU as usize]);
    }
    assert_eq!(b.answers(), [(11, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 12, Extended::default(), &[0; 64]);
    assert_eq!(b.answers(), []);
    b.elapse(delay);
    assert_eq!(b.answers(), [(12, Opcode::Acknowledge, ACK)]);
}

#[test]
fn a_batch_costs_one_acknowledgement() {
    let (mut a, mut b) = pair();
    for tag in 0..8 {
        b.recv(tag, 64);
        a.send(tag, 64, 1);
    }
    for datagram in a.transmit_all() {
        b.handle(&datagram);
    }
    assert_eq!(b.answers(), [(7, Opcode::Acknowledge, ACK)]);
}

#[test]
fn window_and_read_depth_limits_are_respected() {
    let mut a = End::new(&settings(2));
    a.send(1, 100 * MTU, 0);
    assert_eq!(a.transmit_all().len(), 16);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(a.transmit_all().len(), 4);

    let mut a = End::new(&settings(2));
    let into = a.buf(64 * MTU, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 * MTU } });
    let sent = a.answers();
    assert_eq!(sent, [(0, Opcode::ReadRequest, None), (4, Opcode::ReadRequest, None)]);
    let data = [0; MTU as usize];
    for at in 0..3 {
        a.respond(Opcode::ReadResponseMiddle, at, Syndrome::ACK, &data);
    }
    assert!(a.answers().is_empty());
    a.respond(Opcode::ReadResponseLast, 3, Syndrome::ACK, &data);
    assert_eq!(a.answers(), [(8, Opcode::ReadRequest, None)]);
}

/// Packets of equal length form trains; a send still follows the writes before it.
#[test]
fn batched_work_is_sent_writes_first_then_sends_then_reads() {
    let mut a = End::new(&settings(2));
    let remote = |len| Remote { addr: 0, key: 1, len };
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: remote(64) });
    for tag in [2, 4] {
        let from = a.buf(MTU, 0);
        a.post(tag, Work::Write { from, to: remote(MTU) });
        a.send(tag + 1, 16, 0);
    }
    use Opcode::{ReadRequest, SendOnly, WriteOnly};
    let order = [WriteOnly, WriteOnly, SendOnly, SendOnly, ReadRequest];
    let sent = a.answers();
    let expected: Vec<_> = (0i32..).zip(order).map(|(psn, opcode)| (psn, opcode, None)).collect();
    assert_eq!(sent, expected);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(
        a.completions(),
        [2, 4, 3, 5].map(|tag| (tag, Ok(if tag % 2 == 0 { MTU } else { 16 })))
    );
    a.respond(Opcode::ReadResponseOnly, 4, Syndrome::ACK, &[0; 64]);
    assert_eq!(a.completions(), [(1, Ok(64))]);
}

#[test]
fn a_send_does_not_wait_for_many_writes_that_were_posted_behind_it() {
    const LEN: u32 = 128 << 10;
    let mut a = End::new(&Settings { window: 1024, ..settings(2) });
    for tag in [1, 3, 5] {
        let from = a.buf(LEN, 0);
        a.post(tag, Work::Write { from, to: Remote { addr: 0, key: 1, len: LEN } });
        a.send(tag + 1, 16, 0);
    }
    let packets = (LEN / MTU) as usize;
    let sends: Vec<usize> = a
        .answers()
        .iter()
        .enumerate()
        .filter(|(_, (_, opcode, _))| *opcode == Opcode::SendOnly)
        .map(|(at, _)| at)
        .collect();
    assert_eq!(sends, [packets, 2 * packets + 1, 3 * packets + 2]);
}

#[test]
fn reads_from_nvmfd_peers_request_two_packets_each() {
    let asked = |selective, reads| {
        let mut a = End::new(&Settings { selective, window: 64, ..settings(reads) });
        let into = a.buf(7 * MTU, 0);
        a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 7 * MTU } });
        let length =
            |datagram: &Vec<u8>| Packet::parse(datagram).unwrap().reth().unwrap().length / MTU;
        a.transmit_all().iter().map(length).collect::<Vec<_>>()
    };
    assert_eq!(asked(true, 16), [2, 2, 2, 1]);
    assert_eq!(asked(false, 16), [4, 3]);
    // So few could not fill the window.
    assert_eq!(asked(true, 15), [4, 3]);
}

#[test]
fn multi_packet_writes_of_other_peers_are_executed() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(3 * MTU, 0, Rights::WRITE);
    let all = Remote { len: 2 * MTU + 5, ..remote };
    let full = |seed: u8| vec![seed; MTU as usize];
    b.request(Opcode::WriteFirst, 0, reth(all), &full(1));
    b.request(Opcode::WriteMiddle, 1, Extended::default(), &full(2));
    b.request(Opcode::WriteLast, 2, Extended::default(), &[3; 5]);
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, ACK)]);
    let buf = b.concealed(remote);
    let bytes = b.pool.bytes(&buf);
    let at = |n: u32| bytes[n as usize];
    assert_eq!([at(0), at(MTU), at(2 * MTU), at(2 * MTU + 4)], [1, 2, 3, 3]);
    assert_eq!(at(2 * MTU + 5), pattern(2 * MTU as usize + 5, 0));
}

#[test]
fn work_posted_early_waits_for_the_connection() {
    let mut a = End::new(&settings(1));
    a.qp = QueuePair::new(4, 4);
    a.send(1, 3 * MTU, 1);
    a.send(2, 16, 1);
    assert!(a.transmit().is_none());
    a.qp.ready_to_receive(&settings(1));
    assert!(a.transmit().is_none());
    a.qp.ready_to_send();
    assert_eq!(a.transmit_all().len(), 4);
    a.respond(Opcode::Acknowledge, 3, Syndrome::ACK, &[]);
    assert_eq!(a.completions(), [(1, Ok(3 * MTU)), (2, Ok(16))]);
}
