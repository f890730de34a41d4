//! Lost packets, duplicates, and receivers that are not ready.

use super::*;

#[test]
fn a_sequence_gap_is_reported_once_and_recovered() {
    let (mut a, mut b) = pair();
    for tag in 0..6 {
        b.recv(tag, 64);
        a.send(tag, 64, tag as u8);
    }
    let packets = a.transmit_all();
    b.handle(&packets[0]);
    for packet in &packets[2..] {
        b.handle(packet);
    }
    // The complaint acknowledges what came before it.
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
    a.respond(Opcode::Acknowledge, 1, Syndrome::Nak(Nak::Sequence), &[]);
    assert_eq!(a.completions(), [(0, Ok(64))]);
    let again = a.transmit_all();
    assert_eq!(again.len(), 5);
    // Lost once more: the same gap is reported again, as the peer has evidently retransmitted.
    b.handle(&again[1]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
    for packet in &again {
        b.handle(packet);
    }
    assert_eq!(b.answers(), [(5, Opcode::Acknowledge, ACK)]);
    assert_eq!(b.completions().len(), 6);
}

/// A packet far ahead of the first loss shows that the peer has retransmitted.
#[test]
fn a_gap_is_reported_again_when_another_part_of_it_is_lost() {
    let mut b = End::new(&Settings { window: 64, ..settings(4) });
    b.reorder = ReorderBuffer::new(1024);
    for first in [41, 1] {
        for ahead in first..64 {
            b.request(Opcode::SendOnly, ahead, Extended::default(), &[1; 16]);
        }
        let report = [(0, Opcode::Acknowledge, nak(Nak::Sequence))];
        assert_eq!(b.answers(), report, "all before {first} are lost");
    }
}

#[test]
fn duplicates_are_acknowledged_and_not_executed() {
    let (mut a, mut b) = pair();
    b.recv(1, 64);
    b.recv(2, 64);
    a.send(1, 64, 1);
    let packet = a.transmit().unwrap();
    b.handle(&packet);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    b.handle(&packet);
    b.handle(&packet);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    assert_eq!(b.completions(), [(1, Ok(64))]);
}

/// A peer might take the number of a read in an acknowledgement for the end of the read, and any
/// acknowledgement amid its packets for nonsense.
#[test]
fn read_requests_are_acknowledged_only_by_their_data() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::ALL);
    (0..4).for_each(|tag| b.recv(tag, 64));
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 1, Extended::default(), &[1; 16]);
    b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
    // The data of a read acknowledge what came before it.
    let opcodes = [Opcode::ReadResponseFirst, Opcode::ReadResponseLast];
    assert_eq!(b.answers(), [(2, opcodes[0], ACK), (3, opcodes[1], ACK)]);
    // The responses were lost, and the peer repeats from the first request.
    for _ in 0..2 {
        for at in 0..2 {
            b.request(Opcode::SendOnly, at, Extended::default(), &[1; 16]);
            assert!(b.answers().is_empty());
        }
        b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
        assert_eq!(b.answers(), [(2, opcodes[0], ACK), (3, opcodes[1], ACK)]);
    }
    // Another peer repeats the first request only.
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert!(b.answers().is_empty());
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    // What was executed after the read is acknowledged after its data.
    b.request(Opcode::SendOnly, 4, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 1, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 4, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, ACK)]);
}

#[test]
fn a_duplicate_request_does_not_suppress_a_sequence_nak() {
    let (_, mut b) = pair();
    (0..4).for_each(|tag| b.recv(tag, 64));
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, ACK)]);
    b.request(Opcode::SendOnly, 2, Extended::default(), &[1; 16]);
    b.request(Opcode::SendOnly, 0, Extended::default(), &[1; 16]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::Sequence))]);
}

#[test]
fn a_missing_receive_makes_the_peer_wait() {
    let (mut a, mut b) = pair();
    a.send(1, 64, 5);
    a.send(2, 64, 6);
    for datagram in a.transmit_all() {
        b.handle(&datagram);
    }
    let wait = Some(Syndrome::Rnr(RnrTimer::new(12)));
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, wait)], "and no complaint of the second");
    a.respond(Opcode::Acknowledge, 0, Syndrome::Rnr(RnrTimer::new(12)), &[]);
    assert!(a.transmit().is_none());
    a.respond(Opcode::Acknowledge, 0, Syndrome::Nak(Nak::Sequence), &[]);
    assert!(a.transmit().is_none());
    assert_eq!(a.qp.poll_timeout(), Some(a.now + Duration::from_micros(640)));
    a.elapse(Duration::from_micros(639));
    assert!(a.transmit().is_none());
    b.recv(1, 64);
    b.recv(2, 64);
    a.elapse(Duration::from_micros(1));
    settle(&mut a, &mut b);
    b.completed(1, 64, 5);
    b.completed(2, 64, 6);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(64))]);
}

/// What a peer without a receive has executed before is done, and it gets its time all the same.
#[test]
fn an_rnr_nak_acknowledges_earlier_packets() {
    let mut a = End::new(&settings(1));
    a.send(1, 64, 0);
    a.send(2, 64, 0);
    assert_eq!(a.transmit_all().len(), 2);
    a.respond(Opcode::Acknowledge, 1, Syndrome::Rnr(RnrTimer::new(12)), &[]);
    assert_eq!(a.completions(), [(1, Ok(64))]);
    assert!(a.transmit().is_none(), "the peer has asked to wait");
    a.elapse(Duration::from_micros(640));
    assert_eq!(a.answers(), [(1, Opcode::SendOnly, None)]);
}

/// The network may bring "not ready" after the acknowledgement of the same packet.
#[test]
fn a_late_rnr_nak_is_ignored() {
    let mut a = End::new(&settings(2));
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 1);
    a.send(2, 16, 0);
    assert_eq!(a.transmit_all().len(), 1);
    a.respond(Opcode::Acknowledge, 1, Syndrome::ACK, &[]);
    a.respond(Opcode::Acknowledge, 1, Syndrome::Rnr(RnrTimer::new(1)), &[]);
    a.elapse(Duration::from_micros(10));
    assert!(a.transmit().is_none());
    a.respond(Opcode::ReadResponseOnly, 0, Syndrome::ACK, &[4; 64]);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(16))]);
    assert!(a.transmit().is_none() && a.qp.poll_timeout().is_none());
}

/// A pause may end with nothing to send again, while the data of a read, asked for once more, are
/// lost.
#[test]
fn a_lost_read_is_requested_again_after_an_rnr_wait() {
    let mut a = End::new(&settings(2));
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 1);
    a.send(2, 16, 0);
    assert_eq!(a.transmit_all().len(), 1);
    a.elapse(Duration::from_micros(1250));
    assert_eq!(a.answers(), [(0, Opcode::ReadRequest, None)]);
    a.respond(Opcode::Acknowledge, 1, Syndrome::Rnr(RnrTimer::new(1)), &[]);
    a.respond(Opcode::Acknowledge, 1, Syndrome::ACK, &[]);
    a.elapse(Duration::from_micros(10));
    assert!(a.transmit().is_none());
    let due = a.qp.poll_timeout().expect("the read would wait for ever");
    a.elapse(due - a.now);
    assert_eq!(a.answers(), [(0, Opcode::ReadRequest, None)]);
}

/// One message at a time is answered after `trip`; how often each was sent.
fn sendings(a: &mut End, messages: std::ops::Range<u32>, trip: Duration) -> Vec<usize> {
    let mut sendings = Vec::new();
    for number in messages {
        let answered = a.now + trip;
        a.send(number.into(), 64, 0);
        let mut count = a.transmit_all().len();
        while let Some(due) = a.qp.poll_timeout().filter(|due| *due < answered) {
            a.elapse(due - a.now);
            count += a.transmit_all().len();
        }
        a.now = answered;
        a.respond(Opcode::Acknowledge, number, Syndrome::ACK, &[]);
        assert_eq!(a.completions(), [(number.into(), Ok(64))]);
        sendings.push(count);
    }
    sendings
}

/// What has been sent twice says nothing of how long an answer takes. So who had to be probed is given
/// more time at the next message as well, or it would be probed at each.
#[test]
fn an_increased_round_trip_time_is_learned() {
    for selective in [false, true] {
        let mut a = End::new(&Settings { selective, ..settings(1) });
        let [short, long] = [100, 3000].map(Duration::from_micros);
        assert_eq!(sendings(&mut a, 0..100, short), [1; 100]);
        let sendings = sendings(&mut a, 100..120, long);
        assert!(sendings[0] > 2 && sendings[2..].iter().all(|count| *count == 1), "{sendings:?}");
    }
}

/// Other peers answer what they have executed before only when they are asked.
#[test]
fn a_retransmission_after_silence_requests_an_ack() {
    let mut a = End::new(&settings(1));
    a.send(1, 20 * MTU, 0);
    assert_eq!(a.transmit_all().len(), 16, "a window, and more waits");
    a.elapse(Duration::from_micros(1250));
    let again = a.transmit_all();
    let asks = |datagram: &Vec<u8>| Packet::parse(datagram).unwrap().bth.ack_request;
    assert_eq!(again.iter().map(asks).collect::<Vec<_>>(), [true]);
}

#[test]
fn a_peer_that_is_never_ready_is_given_up() {
    let mut a = End::new(&Settings { rnr_retries: 2, ..settings(1) });
    a.send(1, 64, 0);
    a.send(2, 64, 0);
    for round in 0..3 {
        assert_eq!(a.transmit_all().len(), 2);
        assert_eq!(a.qp.state(), State::ReadyToSend, "round {round}");
        a.respond(Opcode::Acknowledge, 0, Syndrome::Rnr(RnrTimer::new(1)), &[]);
        a.elapse(Duration::from_micros(10));
    }
    assert_eq!(a.qp.state(), State::Error);
    assert_eq!(a.completions(), [(1, Err(Fault::NotReady)), (2, Err(Fault::Flushed))]);
}

#[test]
fn a_silent_peer_is_given_up_after_the_last_retry() {
    let mut a = End::new(&settings(1));
    a.send(1, 64, 0);
    a.recv(2, 64);
    // The first wait doubles six times; the time is that of seven retries that begin with 10 ms.
    let (mut wait, mut left) = (Duration::from_micros(1250), Duration::from_millis(1910));
    while left > Duration::ZERO {
        assert_eq!(a.transmit_all().len(), 1);
        assert_eq!(a.qp.state(), State::ReadyToSend);
        wait = wait.min(left);
        a.elapse(wait - Duration::from_nanos(1));
        assert!(a.transmit().is_none());
        a.elapse(Duration::from_nanos(1));
        left -= wait;
        wait = (2 * wait).min(Duration::from_millis(80));
    }
    assert_eq!(a.qp.state(), State::Error);
    assert_eq!(a.completions(), [(1, Err(Fault::Unreachable)), (2, Err(Fault::Flushed))]);
    a.send(3, 64, 0);
    a.recv(4, 64);
    assert_eq!(a.completions(), [(3, Err(Fault::Flushed)), (4, Err(Fault::Flushed))]);
    assert!(a.transmit().is_none() && a.qp.poll_timeout().is_none() && a.pool.is_full());
}

/// The timers of a machine that was suspended, or of a process without CPU time, are handled minutes
/// late: that is no silence of the peer.
#[test]
fn a_late_ack_timer_retransmits_before_the_peer_is_given_up() {
    let (mut a, mut b) = pair();
    b.recv(1, 64);
    a.send(2, 64, 0);
    assert_eq!(a.transmit_all().len(), 1, "it is lost");
    a.elapse(Duration::from_secs(300));
    settle(&mut a, &mut b);
    assert_eq!((a.completions(), b.completions()), (vec![(2, Ok(64))], vec![(1, Ok(64))]));

    // The retransmissions that follow have as much time as without that.
    a.send(3, 64, 0);
    assert_eq!(a.transmit_all().len(), 1);
    a.elapse(Duration::from_secs(300));
    for _ in 0..1900 {
        a.elapse(Duration::from_millis(1));
        a.transmit_all();
    }
    assert_eq!(a.qp.state(), State::ReadyToSend);
    a.elapse(Duration::from_millis(100));
    assert_eq!(a.completions(), [(3, Err(Fault::Unreachable))]);
}

#[test]
fn only_missing_read_responses_are_requested_again() {
    let (mut a, mut b) = pair();
    let remote = b.expose(4 * MTU, 3, Rights::READ);
    let into = a.buf(4 * MTU, 0);
    a.post(1, Work::Read { into, from: remote });
    b.handle(&a.transmit().unwrap());
    let data = b.transmit_all();
    assert_eq!(data.len(), 4);
    a.handle(&data[0]);
    a.handle(&data[2]);
    assert!(a.transmit().is_none(), "it may only have been overtaken");
    a.elapse(Duration::from_millis(2));
    let again = a.transmit_all();
    assert_eq!(again.len(), 1, "the gap is noticed");
    a.handle(&data[3]);
    assert!(a.transmit().is_none(), "once");
    let packet = Packet::parse(&again[0]).unwrap();
    let part = packet.reth().unwrap();
    assert_eq!((part.address, part.length), (remote.addr + u64::from(MTU), MTU), "and no more");
    assert_eq!(packet.bth.psn, settings(0).send_psn.add(1));
    b.handle(&again[0]);
    settle(&mut a, &mut b);
    a.completed(1, 4 * MTU, 3);
}

#[test]
fn an_acknowledgement_past_a_read_means_its_data_are_lost() {
    let mut a = End::new(&settings(2));
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 1);
    a.send(2, 16, 0);
    assert_eq!(a.transmit_all().len(), 1);
    a.respond(Opcode::Acknowledge, 1, Syndrome::ACK, &[]);
    assert!(a.completions().is_empty() && a.transmit().is_none());
    a.elapse(Duration::from_millis(2));
    assert_eq!(a.answers(), [(0, Opcode::ReadRequest, None)], "the send has been executed");
    a.respond(Opcode::ReadResponseOnly, 0, Syndrome::ACK, &[4; 64]);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(16))]);
}

#[test]
fn a_revoked_key_is_tolerated_only_for_repeated_reads() {
    let (mut a, mut b) = pair();
    let remote = b.expose(64, 3, Rights::READ);
    let into = a.buf(64, 0);
    a.post(1, Work::Read { into, from: remote });
    let request = a.transmit().unwrap();
    b.handle(&request);
    assert_eq!(b.answers().len(), 1);
    b.revoke(remote);
    b.handle(&request);
    assert!(b.answers().is_empty());
    assert_eq!(b.qp.state(), State::ReadyToSend);
    b.request(Opcode::ReadRequest, 1, reth(remote), &[]);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn memory_taken_away_under_a_read_ends_the_connection() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::READ);
    b.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    assert!(b.transmit().is_some());
    b.revoke(remote);
    assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
    assert_eq!(b.qp.state(), State::Error);
}

#[test]
fn a_read_that_was_never_asked_for_is_not_repeated() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 3, Rights::READ);
    b.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    assert_eq!(b.transmit_all().len(), 2);
    for other in [
        Remote { addr: remote.addr + 1, ..remote },
        Remote { key: remote.key + 1, ..remote },
        Remote { len: 2 * MTU + 1, ..remote },
    ] {
        b.request(Opcode::ReadRequest, 0, reth(other), &[]);
        assert!(b.answers().is_empty());
    }
    // Its second packet alone, and a part of that, are.
    let rest = Remote { addr: remote.addr + u64::from(MTU), key: remote.key, len: 100 };
    b.request(Opcode::ReadRequest, 1, reth(rest), &[]);
    assert_eq!(b.answers(), [(1, Opcode::ReadResponseOnly, ACK)]);
}

#[test]
fn only_the_last_reads_can_be_repeated() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..5 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        assert_eq!(b.answers(), [(at as i32, Opcode::ReadResponseOnly, ACK)]);
    }
    for at in 0..3 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        assert!(b.answers().is_empty(), "{at}");
    }
    b.request(Opcode::ReadRequest, 3, reth(remote), &[]);
    assert_eq!(b.answers(), [(3, Opcode::ReadResponseOnly, ACK)]);
}

#[test]
fn repeated_unanswered_reads_count_towards_the_limit() {
    let mut b = End::new(&settings(4));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..5 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
    }
    assert_eq!(b.answers(), [(4, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}
