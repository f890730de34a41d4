//! Random behaviour of the peer and of the network.

use super::*;

/// A hostile peer: requests, answers and time in any order.
#[derive(Clone, Debug)]
enum Blow {
    Packet { opcode: u8, ahead: i32, len: u32, words: [u32; 4], flags: u8 },
    Transmit(u8),
    Post(u8, u32),
    Time(u32),
}

fn blow() -> impl Strategy<Value = Blow> {
    let codes: Vec<u8> = Opcode::all().map(Opcode::to_wire).collect();
    let len = prop_oneof![0..3u32, Just(MTU), MTU - 1..MTU + 2, 0..2 * MTU];
    let word = prop_oneof![0..4u32, Just(0x101), Just(MTU), any::<u32>()];
    let ahead = prop_oneof![4 => -2..4i32, 1 => any::<i32>()];
    let packet = (
        proptest::sample::select(codes),
        ahead,
        len,
        [word.clone(), word.clone(), word.clone(), word],
        any::<u8>(),
    );
    prop_oneof![
        6 => packet.prop_map(|(opcode, ahead, len, words, flags)| Blow::Packet { opcode, ahead, len, words, flags }),
        2 => (1..20u8).prop_map(Blow::Transmit),
        2 => (0..6u8, 0..5000u32).prop_map(|(kind, len)| Blow::Post(kind, len)),
        1 => (0..20_000u32).prop_map(Blow::Time),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

    /// Random packets of the peer: no panic, and all work completes exactly once.
    #[test]
    fn all_work_completes_once_despite_arbitrary_packets(blows in proptest::collection::vec(blow(), 1..80)) {
        let mut end = End::new(&settings(3));
        let remote = end.expose(3000, 0, Rights::ALL);
        let (mut posted, mut next, mut received) = (0u64, 0u32, 0u32);
        let mut home = Vec::new();
        for blow in blows {
            match blow {
                Blow::Packet { opcode, ahead, len, words, flags } => {
                    let opcode = Opcode::from_wire(opcode).unwrap();
                    let request = opcode.row().request;
                    let base = if request { received } else { next };
                    let psn = settings(0).send_psn.add(base.wrapping_add(ahead as u32));
                    let bth = Bth { ack_request: flags & 1 == 1, ..Bth::new(opcode, Qpn::new(3), psn) };
                    let address = remote.addr.wrapping_add(u64::from(words[0])) & !u64::from(flags & 8);
                    let key = if flags & 2 == 0 { remote.key } else { words[1] };
                    let length = if flags & 4 == 0 { len } else { words[2] };
                    let reth = Reth { address, key, length };
                    let aeth = Aeth { syndrome: Syndrome::from_wire(words[3] as u8), msn: Msn::new(words[2]) };
                    end.inject(bth, Extended {
                        deth: Some(Deth { qkey: 1, source: Qpn::GSI }),
                        reth: Some(reth), aeth: Some(aeth),
                        immediate: Some([0; 4]), invalidate: Some(words[1]), held: Some([flags; 16]),
                    }, &vec![0; len as usize]);
                    if request && ahead == 0 { received += 1 } else if ahead == 0 { next += 1 }
                }
                Blow::Transmit(count) => for _ in 0..count {
                    let _ = end.transmit();
                },
                Blow::Post(kind, len) => if end.pool.free().2 > 1 << 20 {
                    posted += 1;
                    let buf = end.buf(len, 0);
                    let far = Remote { addr: 0, key: 0, len };
                    end.post(posted, match kind {
                        0 => Work::Recv(buf),
                        1 => Work::Send { from: buf, invalidate: None },
                        2 => Work::Read { into: buf, from: far },
                        3 => Work::Write { from: buf, to: far },
                        4 => Work::SendImmediate { from: buf, immediate: 7 },
                        _ => Work::WriteImmediate { from: buf, to: far, immediate: 7 },
                    });
                },
                Blow::Time(micros) => end.elapse(Duration::from_micros(micros.into())),
            }
            home.extend(end.completions().into_iter().map(|(tag, _)| tag));
        }
        end.with(|qp, _, io| qp.close(io));
        let left = end.transmit_all().len();
        prop_assert!(left <= 1, "only a refusal may leave, not {}", left);
        home.extend(end.completions().into_iter().map(|(tag, _)| tag));
        home.sort_unstable();
        prop_assert_eq!(home, (1..=posted).collect::<Vec<_>>());
        end.revoke(remote);
        prop_assert!(end.pool.is_full());
    }

    /// Two ends, all verbs both ways, a network that loses, repeats and swaps datagrams.
    #[test]
    fn data_survive_a_bad_network(
        jobs in proptest::collection::vec((any::<bool>(), 0..5u8, 0..9000u32), 1..24),
        seed in 1..u64::MAX,
        bad in 0..30u8,
        selective: bool,
        starts in [0..100u32, 0..100u32],
    ) {
        // A loss of a third both ways needs more than the usual patience.
        let patient = Settings { retries: 60, selective, ..settings(4) };
        // Both ways wrap at some time, or not at all.
        let [send_psn, receive_psn] = starts.map(|before| Psn::new(0u32.wrapping_sub(before)));
        let there = Settings { send_psn, receive_psn, ..patient };
        let back = Settings { send_psn: receive_psn, receive_psn: send_psn, ..patient };
        let (mut a, mut b) = (End::new(&there), End::new(&back));
        let mut exposed = Vec::new();
        for (tag, (from_a, verb, len)) in jobs.iter().enumerate() {
            let (tag, seed) = (tag as u64, tag as u8);
            let (one, other) = if *from_a { (&mut a, &mut b) } else { (&mut b, &mut a) };
            match verb {
                0 => {
                    other.recv(1000 + tag, (*len).max(1));
                    one.send(tag, *len, seed);
                }
                1 => {
                    let from = other.expose(*len, seed, Rights::READ);
                    let into = one.buf(*len, 0xee);
                    one.post(tag, Work::Read { into, from });
                    exposed.push((!from_a, from, seed));
                }
                2 => {
                    let to = other.expose(*len, 0xee, Rights::WRITE);
                    let from = one.buf(*len, seed);
                    one.post(tag, Work::Write { from, to });
                    exposed.push((!from_a, to, seed));
                }
                3 => {
                    other.recv(1000 + tag, (*len).max(1));
                    let from = one.buf(*len, seed);
                    one.post(tag, Work::SendImmediate { from, immediate: tag as u32 });
                }
                _ => {
                    other.recv(1000 + tag, 64);
                    let to = other.expose(*len, 0xee, Rights::WRITE);
                    let from = one.buf(*len, seed);
                    one.post(tag, Work::WriteImmediate { from, to, immediate: tag as u32 });
                    exposed.push((!from_a, to, seed));
                }
            }
        }
        let mut state = seed;
        let mut roll = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8 % 100
        };
        for _ in 0..3000 {
            let mut quiet = true;
            for forth in [true, false] {
                let (one, other) = if forth { (&mut a, &mut b) } else { (&mut b, &mut a) };
                let mut flight = one.transmit_all();
                quiet &= flight.is_empty();
                for at in 1..flight.len() {
                    if roll() < bad { flight.swap(at - 1, at) }
                }
                for datagram in flight {
                    let outcome = roll();
                    if outcome >= bad { other.handle(&datagram) }
                    if outcome % 7 == 3 { other.handle(&datagram) }
                }
            }
            if quiet {
                let Some(at) = a.qp.poll_timeout().into_iter().chain(b.qp.poll_timeout()).min() else { break };
                for end in [&mut a, &mut b] {
                    let wait = at - end.now;
                    end.elapse(wait);
                }
            }
        }
        prop_assert_eq!((a.qp.state(), b.qp.state()), (State::ReadyToSend, State::ReadyToSend));
        for (at_a, remote, seed) in exposed {
            let end = if at_a { &mut a } else { &mut b };
            let buf = end.concealed(remote);
            let right = end.pool.bytes(&buf).iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed));
            prop_assert!(right, "exposed memory of {}", seed);
            end.pool.give(buf);
        }
        let mut home = 0;
        for end in [&mut a, &mut b] {
            for event in end.events.drain(..) {
                let Event::Done(done) = event else { break };
                let len = done.outcome.unwrap() as usize;
                let seed = (done.tag % 1000) as u8;
                // Of a receive: that of its own job, so receives are consumed in order, each once.
                if let Some(job) = done.tag.checked_sub(1000) {
                    let (_, verb, bytes) = jobs[job as usize];
                    let immediate = job as u32;
                    prop_assert_eq!(done.with, match verb {
                        3 => ReceivedWith::Immediate(immediate),
                        4 => ReceivedWith::Write { immediate, bytes },
                        _ => ReceivedWith::Nothing,
                    });
                }
                let buf = done.work.into_buf();
                let right = end.pool.bytes(&buf)[..len].iter().enumerate().all(|(at, byte)| *byte == pattern(at, seed));
                prop_assert!(right, "work {}", done.tag);
                end.pool.give(buf);
                home += 1;
            }
            prop_assert!(end.pool.is_full());
        }
        let sends = jobs.iter().filter(|(_, verb, _)| [0, 3, 4].contains(verb)).count();
        prop_assert_eq!(home, jobs.len() + sends);
    }
}
