//! Numbers that wrap between two packets: those here begin three before that.

use super::*;

#[test]
fn a_newer_acknowledgement_replaces_an_older_one_over_the_wrap() {
    let mut end = End::new(&settings(1));
    (0..5).for_each(|tag| end.recv(tag, 8));
    for ahead in 0..4 {
        end.request(Opcode::SendOnly, ahead, Extended::default(), &[1; 8]);
    }
    assert_eq!(end.answers(), [(3, Opcode::Acknowledge, ACK)]);
    // One that has been executed before is acknowledged with the last.
    end.request(Opcode::SendOnly, 4, Extended::default(), &[1; 8]);
    end.request(Opcode::SendOnly, 1, Extended::default(), &[1; 8]);
    assert_eq!(end.answers(), [(4, Opcode::Acknowledge, ACK)]);
    assert_eq!(end.completions().len(), 5);
}

#[test]
fn only_transmitted_read_data_is_repeated_across_the_wrap() {
    let mut end = End::new(&settings(1));
    let remote = end.expose(5 * MTU, 7, Rights::READ);
    let begin = |ahead: u32| Remote {
        addr: remote.addr + u64::from(ahead * MTU),
        len: remote.len - ahead * MTU,
        ..remote
    };
    end.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    (0..4).for_each(|_| drop(end.transmit().unwrap()));
    // Of what has left, the part from its third packet on: the last before the wrap.
    end.request(Opcode::ReadRequest, 2, reth(begin(2)), &[]);
    let left = |end: &mut End| end.answers().iter().map(|answer| answer.0).collect::<Vec<_>>();
    assert_eq!(left(&mut end), [2, 3, 4]);
    // What has not left is not repeated.
    end.request(Opcode::ReadRequest, 0, reth(remote), &[]);
    (0..2).for_each(|_| drop(end.transmit().unwrap()));
    end.request(Opcode::ReadRequest, 3, reth(begin(3)), &[]);
    assert_eq!(left(&mut end), [2, 3, 4]);
    end.revoke(remote);
}

/// The last that came behind a gap was beyond the wrap, and what comes now is before it: the peer has
/// gone back.
#[test]
fn a_gap_is_reported_again_after_go_back_n_across_the_wrap() {
    let mut end = End::new(&settings(1));
    end.reorder = ReorderBuffer::new(0);
    let mut report = |ahead| {
        end.request(Opcode::SendOnly, ahead, Extended::default(), &[1; 8]);
        end.answers()
    };
    let complaint = [(0, Opcode::Acknowledge, nak(Nak::Sequence))];
    assert_eq!(report(5), complaint);
    assert_eq!(report(6), []);
    assert_eq!(report(2), complaint, "it is the last number before the wrap");
    assert_eq!(report(4), [], "and this is behind it");
}

/// A packet before the last read is acknowledged when it is repeated without that read.
#[test]
fn a_lone_repeat_before_a_read_is_acknowledged_across_the_wrap() {
    let mut end = End::new(&settings(1));
    let remote = end.expose(64, 7, Rights::READ);
    (0..5).for_each(|tag| end.recv(tag, 8));
    for ahead in 0..5 {
        end.request(Opcode::SendOnly, ahead, Extended::default(), &[1; 8]);
    }
    end.request(Opcode::ReadRequest, 5, reth(remote), &[]);
    end.answers();
    let mut repeat = |ahead| {
        end.request(Opcode::SendOnly, ahead, Extended::default(), &[1; 8]);
        end.answers().len()
    };
    // A peer that retransmits repeats them in order, and the read after them.
    assert_eq!([repeat(1), repeat(2), repeat(3), repeat(4)], [0; 4]);
    assert_eq!(repeat(2), 1, "not so one that has gone back to before the wrap");
    end.revoke(remote);
}
