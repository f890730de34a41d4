//! Send and RDMA Write with Immediate: who is told what, once, and in which order.

use super::*;

const VALUE: u32 = 0x0102_03fe;

fn write(a: &mut End, tag: u64, to: Remote, immediate: u32) {
    let from = a.buf(to.len, 9);
    a.post(tag, Work::WriteImmediate { from, to, immediate });
}

fn send(a: &mut End, tag: u64, len: u32, immediate: u32) {
    let from = a.buf(len, 9);
    a.post(tag, Work::SendImmediate { from, immediate });
}

/// The completions so far: tag, outcome, and what came in addition.
fn completed_with(end: &mut End) -> Vec<(u64, Result<u32, Fault>, ReceivedWith)> {
    let mut found = Vec::new();
    for event in end.events.drain(..) {
        let Event::Done(done) = event else { panic!("{event:?}") };
        found.push((done.tag, done.outcome, done.with));
        end.pool.give(done.work.into_buf());
    }
    found
}

fn written(immediate: u32, bytes: u32) -> ReceivedWith {
    ReceivedWith::Write { immediate, bytes }
}

/// Operation code, length of the memory named and immediate data of each packet.
fn headers(datagrams: &[Vec<u8>]) -> Vec<(Opcode, Option<u32>, Option<[u8; 4]>)> {
    let look = |datagram: &Vec<u8>| {
        let packet = Packet::parse(datagram).unwrap();
        (packet.bth.opcode, packet.reth().map(|reth| reth.length), packet.immediate())
    };
    datagrams.iter().map(look).collect()
}

#[test]
fn a_receive_completes_with_immediate_data_and_write_length() {
    let (mut a, mut b) = pair();
    for len in [0, 1, 64, MTU - 1, MTU, MTU + 1, 40 * MTU + 3] {
        let remote = b.expose(len, 7, Rights::WRITE);
        b.recv(1, len.max(64));
        send(&mut a, 2, len, VALUE);
        settle(&mut a, &mut b);
        let Some(Event::Done(done)) = b.events.first() else { panic!("none") };
        assert_eq!(done.with, ReceivedWith::Immediate(VALUE), "{len}");
        b.completed(1, len, 9);

        b.recv(3, 64);
        write(&mut a, 4, remote, !VALUE);
        settle(&mut a, &mut b);
        let Some(Event::Done(done)) = b.events.first() else { panic!("none") };
        assert_eq!(done.with, written(!VALUE, len));
        let untouched = b.pool.bytes(done.work.buf()).iter().enumerate();
        assert!(untouched.into_iter().all(|(at, byte)| *byte == pattern(at, 0)), "{len}");
        b.completed(3, 0, 0);
        let nothing = ReceivedWith::Nothing;
        assert_eq!(completed_with(&mut a), [(2, Ok(len), nothing), (4, Ok(len), nothing)]);
        let buf = b.concealed(remote);
        assert!(b.pool.bytes(&buf).iter().enumerate().all(|(at, byte)| *byte == pattern(at, 9)));
        b.pool.give(buf);
    }
    assert!(a.pool.is_full() && b.pool.is_full());
}

#[test]
fn the_last_packet_has_the_immediate_data_and_a_write_is_one_message() {
    let mut a = End::new(&settings(1));
    let immediate = Some([1, 2, 3, 0xfe]);
    let len = 2 * MTU + 5;
    write(&mut a, 1, Remote { addr: 0x1000, key: 5, len }, VALUE);
    send(&mut a, 2, len, VALUE);
    use Opcode::*;
    let expected = [
        (WriteFirst, Some(len), None),
        (WriteMiddle, None, None),
        (WriteLastImmediate, None, immediate),
        (SendFirst, None, None),
        (SendMiddle, None, None),
        (SendLastImmediate, None, immediate),
    ];
    assert_eq!(headers(&a.transmit_all()), expected);
    write(&mut a, 3, Remote { addr: 0x1000, key: 5, len: MTU }, VALUE);
    send(&mut a, 4, MTU, VALUE);
    let expected =
        [(WriteOnlyImmediate, Some(MTU), immediate), (SendOnlyImmediate, None, immediate)];
    assert_eq!(headers(&a.transmit_all()), expected);
}

/// A write without immediate data may overtake, because nothing reports it to the peer.
#[test]
fn work_that_completes_receives_leaves_in_the_order_of_posting() {
    let mut a = End::new(&settings(1));
    let to = Remote { addr: 0, key: 1, len: 64 };
    a.send(1, 16, 0);
    write(&mut a, 2, to, VALUE);
    send(&mut a, 3, 16, VALUE);
    let from = a.buf(64, 0);
    a.post(4, Work::Write { from, to });
    write(&mut a, 5, to, VALUE);
    use Opcode::*;
    let expected = [WriteOnly, SendOnly, WriteOnlyImmediate, SendOnlyImmediate, WriteOnlyImmediate];
    let sent: Vec<_> = a.answers().into_iter().map(|(_, opcode, _)| opcode).collect();
    assert_eq!(sent, expected);
}

#[test]
fn a_repeated_last_packet_consumes_one_receive() {
    let (_, mut b) = pair();
    let remote = b.expose(2 * MTU, 7, Rights::WRITE);
    (0..4).for_each(|tag| b.recv(tag, 64));
    let immediate = Some(VALUE.to_be_bytes());
    let last = Extended { immediate, ..Extended::default() };
    let full = [1; MTU as usize];
    let short = Extended { immediate, ..reth(Remote { len: 8, ..remote }) };
    b.request(Opcode::WriteFirst, 0, reth(remote), &full);
    for _ in 0..3 {
        b.request(Opcode::WriteLastImmediate, 1, last, &full);
    }
    for _ in 0..3 {
        b.request(Opcode::WriteOnlyImmediate, 2, short, &[1; 8]);
    }
    for _ in 0..3 {
        b.request(Opcode::SendOnlyImmediate, 3, last, &[1; 16]);
    }
    assert_eq!(b.answers(), [(3, Opcode::Acknowledge, ACK)]);
    let with = [written(VALUE, 2 * MTU), written(VALUE, 8), ReceivedWith::Immediate(VALUE)];
    let expected = [(0, Ok(0), with[0]), (1, Ok(0), with[1]), (2, Ok(16), with[2])];
    assert_eq!(completed_with(&mut b), expected);
    b.revoke(remote);
}

#[test]
fn a_write_waits_at_its_last_packet_for_a_receive() {
    for selective in [false, true] {
        let settings = Settings { selective, ..settings(4) };
        let (mut a, mut b) = (End::new(&settings), End::new(&settings));
        let remote = b.expose(3 * MTU, 7, Rights::WRITE);
        write(&mut a, 1, remote, VALUE);
        a.send(2, 16, 3);
        let packets = a.transmit_all();
        packets.iter().for_each(|datagram| b.handle(datagram));
        let wait = Some(Syndrome::Rnr(RnrTimer::new(12)));
        assert_eq!(b.answers(), [(2, Opcode::Acknowledge, wait)]);
        assert_eq!(completed_with(&mut b), []);
        a.respond(Opcode::Acknowledge, 2, Syndrome::Rnr(RnrTimer::new(12)), &[]);
        assert!(a.transmit().is_none());
        b.recv(3, 64);
        b.recv(4, 64);
        a.elapse(Duration::from_micros(640));
        settle(&mut a, &mut b);
        let expected = [(3, Ok(0), written(VALUE, 3 * MTU)), (4, Ok(16), ReceivedWith::Nothing)];
        assert_eq!(completed_with(&mut b), expected, "selective: {selective}");
        assert_eq!(a.completions(), [(1, Ok(3 * MTU)), (2, Ok(16))]);
        b.revoke(remote);
    }
}

#[test]
fn a_write_with_immediate_survives_the_loss_of_any_packet() {
    for (selective, lost) in [false, true].into_iter().flat_map(|s| (0..4).map(move |n| (s, n))) {
        let settings = Settings { selective, ..settings(4) };
        let (mut a, mut b) = (End::new(&settings), End::new(&settings));
        let remote = b.expose(4 * MTU, 7, Rights::WRITE);
        (2..5).for_each(|tag| b.recv(tag, 64));
        write(&mut a, 1, remote, VALUE);
        send(&mut a, 2, 16, !VALUE);
        let packets = a.transmit_all();
        for (_, packet) in packets.iter().enumerate().filter(|(at, _)| *at != lost) {
            b.handle(packet);
        }
        assert_eq!(completed_with(&mut b), [], "{lost}");
        // The last one again, as a network that repeats and reorders may deliver it.
        b.handle(&packets[3 - usize::from(lost == 3)]);
        settle(&mut a, &mut b);
        a.elapse(Duration::from_millis(10));
        settle(&mut a, &mut b);
        let expected =
            [(2, Ok(0), written(VALUE, 4 * MTU)), (3, Ok(16), ReceivedWith::Immediate(!VALUE))];
        assert_eq!(completed_with(&mut b), expected, "selective: {selective}, lost: {lost}");
        let buf = b.concealed(remote);
        assert!(b.pool.bytes(&buf).iter().enumerate().all(|(at, byte)| *byte == pattern(at, 9)));
        b.pool.give(buf);
    }
}

#[test]
fn a_write_that_is_refused_completes_no_receive() {
    let immediate = Some(VALUE.to_be_bytes());
    let denied = nak(Nak::RemoteAccess);
    let with = |remote| Extended { immediate, ..reth(remote) };
    let full = [1; MTU as usize];
    for rights in [Rights::NONE, Rights::ALL] {
        let mut b = End::new(&Settings { rights, ..settings(4) });
        let remote = b.expose(2 * MTU, 7, Rights::WRITE);
        b.recv(1, 64);
        let nowhere = Remote { key: remote.key ^ 0x5a5a, ..remote };
        let (target, flushed) = (rights == Rights::NONE, (1, Err(Fault::Flushed)));
        if target {
            // Not even an empty one, which names no memory.
            b.request(Opcode::WriteOnlyImmediate, 0, with(Remote { len: 0, ..remote }), &[]);
        } else {
            b.request(Opcode::WriteOnlyImmediate, 0, with(Remote { len: MTU, ..nowhere }), &full);
        }
        assert_eq!(b.answers(), [(0, Opcode::Acknowledge, denied)]);
        assert_eq!(b.completions(), [flushed]);
        let buf = b.concealed(remote);
        assert!(b.pool.bytes(&buf).iter().enumerate().all(|(at, byte)| *byte == pattern(at, 7)));
        b.pool.give(buf);
    }
    // A last packet that is longer or shorter than the first one has announced.
    for len in [MTU as usize - 1, 4] {
        let mut b = End::new(&settings(4));
        let remote = b.expose(2 * MTU, 7, Rights::WRITE);
        b.recv(1, 64);
        b.request(Opcode::WriteFirst, 0, reth(remote), &full);
        let last = Extended { immediate, ..Extended::default() };
        b.request(Opcode::WriteLastImmediate, 1, last, &full[..len]);
        assert_eq!(b.answers(), [(1, Opcode::Acknowledge, nak(Nak::InvalidRequest))]);
        assert_eq!(b.completions(), [(1, Err(Fault::Flushed))]);
        b.revoke(remote);
    }
}

#[test]
fn an_empty_write_names_no_memory_and_completes_a_receive() {
    let (mut a, mut b) = pair();
    b.recv(1, 64);
    write(&mut a, 2, Remote { addr: 0, key: 0xdead, len: 0 }, VALUE);
    settle(&mut a, &mut b);
    assert_eq!(completed_with(&mut b), [(1, Ok(0), written(VALUE, 0))]);
    assert_eq!(a.completions(), [(2, Ok(0))]);
}

#[test]
fn immediate_data_need_a_credit_and_a_long_write_is_one_message() {
    for long_write in [false, true] {
        let mut a = End::new(&settings(1));
        let acknowledge = |a: &mut End, ahead: u32, msn: u32, credits: u8| {
            let syndrome = Syndrome::Ack(Credits::new(credits));
            let aeth = Some(Aeth { syndrome, msn: Msn::new(msn) });
            let psn = settings(0).send_psn.add(ahead);
            let bth = Bth::new(Opcode::Acknowledge, Qpn::new(3), psn);
            a.inject(bth, Extended { aeth, ..Extended::default() }, &[]);
        };
        (1..3).for_each(|tag| a.send(tag, 16, 0));
        assert_eq!(a.transmit_all().len(), 2);
        acknowledge(&mut a, 0, 1, 1);
        let len = 3 * MTU;
        match long_write {
            true => write(&mut a, 3, Remote { addr: 0, key: 1, len }, VALUE),
            false => send(&mut a, 3, len, VALUE),
        }
        (4..7).for_each(|tag| a.send(tag, 16, 0));
        assert_eq!(a.transmit_all().len(), 0, "the only receive is that of the second");
        acknowledge(&mut a, 1, 2, 1);
        assert_eq!(a.transmit_all().len(), 3, "one message");
        acknowledge(&mut a, 4, 3, 2);
        assert_eq!(a.transmit_all().len(), 2, "which has taken one receive");
    }
}
