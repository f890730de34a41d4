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
fn data_of_a_read_are_repeated_from_before_the_wrap_and_not_before_they_have_left() {
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
    end.conceal(remote);
}
