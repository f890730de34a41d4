//! What is refused, and what refusals become.

use super::*;

/// Each bad request, the refusal that it gets, and that it ends the connection with all work home.
#[test]
fn bad_requests_are_refused() {
    let full = [0u8; MTU as usize];
    let none = Extended::default();
    let nothing = reth(Remote { addr: 0, key: 0x100, len: 8 });
    let long = reth(Remote { addr: 0, key: 0, len: (1 << 31) + 1 });
    let short_first = reth(Remote { addr: 0, key: 0, len: MTU });
    let (invalid, access) = (Nak::InvalidRequest, Nak::RemoteAccess);
    let cases: [(Opcode, Extended, &[u8], Nak); 12] = [
        (Opcode::SendMiddle, none, &full, invalid),
        (Opcode::SendLast, none, &[1], invalid),
        (Opcode::WriteLast, none, &[1], invalid),
        (Opcode::SendFirst, none, &full[1..], invalid),
        (Opcode::SendOnly, none, &[0; MTU as usize + 1], invalid),
        (Opcode::WriteOnly, nothing, &[0; 8], access),
        (Opcode::WriteOnly, nothing, &[0; 7], invalid),
        (Opcode::WriteOnly, long, &[0; 8], invalid),
        (Opcode::WriteFirst, short_first, &full, invalid),
        (Opcode::ReadRequest, nothing, &[], access),
        (Opcode::FetchAdd, none, &[], access),
        (Opcode::ReadRequest, nothing, &[0; 4], invalid),
    ];
    for (opcode, ext, payload, expected) in cases {
        let mut b = End::new(&settings(4));
        b.recv(1, 4096);
        b.send(2, 64, 0);
        b.request(opcode, 0, ext, payload);
        assert_eq!(b.qp.state(), State::Error, "{opcode:?}");
        assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(expected))], "{opcode:?}");
        assert_eq!(b.completions(), [(2, Err(Fault::Flushed)), (1, Err(Fault::Flushed))]);
        assert!(b.pool.is_full());
    }
}

#[test]
fn wrong_padding_is_refused() {
    let mut b = End::new(&settings(1));
    b.recv(1, 64);
    let bth = Bth { pad: 1, ..Bth::new(Opcode::SendOnly, Qpn::new(3), settings(1).receive_psn) };
    let mut datagram = bth.emit().to_vec();
    datagram.extend([0; 4 + 1 + ICRC_BYTES]);
    b.handle(&datagram);
    assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}

#[test]
fn msn_counts_completed_messages() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(3 * MTU, 0, Rights::ALL);
    b.recv(1, 4 * MTU);
    let msns = |b: &mut End| -> Vec<u32> {
        let of = |d: &Vec<u8>| Packet::parse(d).unwrap().aeth().map(|a| a.msn.get());
        b.transmit_all().iter().filter_map(of).collect()
    };
    let (none, full) = (Extended::default(), vec![0; MTU as usize]);
    b.request(Opcode::SendFirst, 0, none, &full);
    assert_eq!(msns(&mut b), [0], "not before its last packet");
    b.request(Opcode::SendLast, 1, none, &[1]);
    assert_eq!(msns(&mut b), [1]);
    b.request(Opcode::ReadRequest, 2, reth(remote), &[]);
    assert_eq!(msns(&mut b), [2, 2], "first and last response");
    b.request(Opcode::WriteOnly, 5, reth(Remote { len: 4, ..remote }), &[0; 4]);
    assert_eq!(msns(&mut b), [3]);
}

#[test]
fn a_target_refuses_all_access_to_memory() {
    let target = Settings { rights: Rights::NONE, answered_reads: 0, ..settings(4) };
    let somewhere = reth(Remote { addr: 0x1000, key: 1, len: 8 });
    for (opcode, ext, payload) in [
        (Opcode::WriteOnly, somewhere, &[0; 8][..]),
        (Opcode::ReadRequest, somewhere, &[]),
        (Opcode::CompareSwap, Extended::default(), &[]),
    ] {
        let mut b = End::new(&target);
        b.request(opcode, 0, ext, payload);
        assert_eq!(b.answers(), [(0, Opcode::Acknowledge, nak(Nak::RemoteAccess))]);
        assert_eq!(b.qp.state(), State::Error);
    }
}

#[test]
fn a_message_longer_than_its_buffer_ends_the_connection() {
    let (mut a, mut b) = pair();
    b.recv(1, 2 * MTU);
    b.recv(2, 64);
    a.send(3, 2 * MTU + 1, 0);
    a.recv(4, 64);
    settle(&mut a, &mut b);
    assert_eq!(b.completions(), [(1, Err(Fault::Length)), (2, Err(Fault::Flushed))]);
    let refused = [(3, Err(Fault::RemoteOperation)), (4, Err(Fault::Flushed))];
    assert_eq!(a.completions(), refused);
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn more_reads_than_granted_are_refused() {
    let mut b = End::new(&settings(2));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..3 {
        b.request(Opcode::ReadRequest, at, reth(remote), &[]);
    }
    assert_eq!(b.answers(), [(2, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
}

#[test]
fn untransmitted_responses_are_bounded() {
    let mut b = End::new(&settings(4));
    let remote = b.expose(64, 0, Rights::READ);
    for at in 0..64 {
        b.recv(u64::from(at), 64);
        b.request(Opcode::SendOnly, 2 * at, Extended::default(), &[]);
        if at < 4 {
            b.request(Opcode::ReadRequest, 2 * at + 1, reth(remote), &[]);
        } else {
            b.request(Opcode::SendOnly, 2 * at + 1, Extended::default(), &[]);
        }
        b.request(Opcode::ReadRequest, at % 4 * 2 + 1, reth(remote), &[]);
    }
    assert_eq!(b.transmit_all().len(), 4 + 1);
    for at in 0..64 {
        // All four are forgotten by the queue, kept by the memory, and asked for twice.
        b.request(Opcode::ReadRequest, at % 4 * 2 + 1, reth(remote), &[]);
        b.request(Opcode::SendOnly, 0, Extended::default(), &[]);
    }
    assert!(b.transmit_all().len() <= 4 * 4 + 1);
    assert_eq!(b.qp.state(), State::ReadyToSend);
}

#[test]
fn invalid_responses_are_ignored() {
    let mut a = End::new(&settings(2));
    a.send(1, 64, 0);
    let into = a.buf(64, 0);
    a.post(2, Work::Read { into, from: Remote { addr: 0, key: 1, len: 64 } });
    assert_eq!(a.transmit_all().len(), 2);
    a.respond(Opcode::Acknowledge, 2, Syndrome::ACK, &[]);
    a.respond(Opcode::Acknowledge, 0xff_ffff, Syndrome::Nak(Nak::RemoteAccess), &[]);
    a.respond(Opcode::Acknowledge, 0, Syndrome::Reserved(0x40), &[]);
    a.respond(Opcode::ReadResponseOnly, 0, Syndrome::ACK, &[1; 64]);
    a.respond(Opcode::AtomicAcknowledge, 0, Syndrome::ACK, &[]);
    assert!(a.completions().is_empty() && a.transmit().is_none());
    a.respond(Opcode::ReadResponseOnly, 1, Syndrome::ACK, &[1; 63]);
    assert!(a.completions().is_empty(), "too few data");
    a.respond(Opcode::ReadResponseOnly, 1, Syndrome::Ack(Credits::new(0)), &[1; 64]);
    assert_eq!(a.completions(), [(1, Ok(64)), (2, Ok(64))]);
}

#[test]
fn naks_fail_the_work_request_that_they_refer_to() {
    for (refusal, fault) in [
        (Nak::RemoteAccess, Fault::RemoteAccess),
        (Nak::InvalidRequest, Fault::RemoteOperation),
        (Nak::RemoteOperation, Fault::RemoteOperation),
    ] {
        let mut a = End::new(&settings(2));
        for tag in 0..3 {
            a.send(tag, 64, 0);
        }
        assert_eq!(a.transmit_all().len(), 3);
        a.respond(Opcode::Acknowledge, 1, Syndrome::Nak(refusal), &[]);
        let expected = [(0, Ok(64)), (1, Err(fault)), (2, Err(Fault::Flushed))];
        assert_eq!(a.completions(), expected);
        assert_eq!(a.qp.state(), State::Error);
    }
}

/// A peer that says for how many messages it has receives gets no more sends than that; but one
/// when there is nothing else on its way, whose answer tells of new receives.
#[test]
fn sends_wait_for_credits() {
    let mut a = End::new(&settings(0));
    let acknowledge = |a: &mut End, ahead: u32, msn: u32, credits: u8| {
        let syndrome = Syndrome::Ack(Credits::new(credits));
        let aeth = Some(Aeth { syndrome, msn: Msn::new(msn) });
        let bth = Bth::new(Opcode::Acknowledge, Qpn::new(3), settings(0).send_psn.add(ahead));
        a.inject(bth, Extended { aeth, ..Extended::default() }, &[]);
    };
    // How many leave, and whether the last one asks for an answer.
    let leave = |a: &mut End| {
        let all = a.transmit_all();
        let last = all.last().map(|last| Packet::parse(last).unwrap().bth.ack_request);
        (all.len(), last)
    };
    (0..9).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(leave(&mut a), (9, Some(true)), "nothing is known of credits");
    acknowledge(&mut a, 8, 9, 2);
    (9..16).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(leave(&mut a), (2, Some(true)));
    acknowledge(&mut a, 9, 10, 3);
    assert_eq!(leave(&mut a), (2, Some(true)));
    acknowledge(&mut a, 12, 13, 0);
    assert_eq!(leave(&mut a), (1, Some(true)), "nothing else is on its way");
    assert_eq!(leave(&mut a), (0, None));
    acknowledge(&mut a, 13, 14, 31);
    assert_eq!(leave(&mut a), (2, Some(true)), "no limit any more");
}

/// An attacker who knows a queue pair can forge such packets, but must repeat it every round trip.
#[test]
fn notifications_of_congestion_change_nothing_where_nothing_was_sent() {
    let mut a = End::new(&settings(0));
    let bth = Bth::new(Opcode::CongestionNotification, Qpn::new(3), Psn::new(0));
    let packet = Packet::plain(bth, &[0; 16]);
    (0..100).for_each(|_| {
        let outcome = a.with(|qp, now, io| qp.handle(now, &packet, io));
        assert_eq!(outcome, DatagramOutcome::Congestion);
    });
    (0..16).for_each(|tag| a.send(tag, 64, 0));
    assert_eq!(a.transmit_all().len(), 16, "the whole window");
    assert_eq!(a.completions(), []);
}
