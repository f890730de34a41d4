//! What a path learns of its namespace by events: ANA states, identifiers, write protection, limits.

use super::*;

#[test]
fn inaccessible_paths_are_unused_and_long_ana_changes_reset_them() {
    let mut lab = quiet();
    for port in 0..2 {
        lab.target.ports[port].ana = AnaState::INACCESSIBLE;
    }
    lab.target.notify(None, AsyncEvent::ANA_CHANGE);
    lab.settle();
    lab.submit(Operation::Read, 0, 1);
    let end = lab.now + Duration::from_secs(30);
    while lab.now < end {
        lab.step(end);
    }
    assert_eq!(lab.under_way.len(), 1, "a live path that is inaccessible makes requests wait");
    lab.target.ports[1].ana = AnaState::NON_OPTIMIZED;
    lab.target.notify(Some(1), AsyncEvent::ANA_CHANGE);
    lab.run_until(3, |lab| lab.under_way.is_empty());
    assert_eq!(lab.machine.ana(1), Some(AnaState::NON_OPTIMIZED));
    // The state change lasts too long: the path is reset after twice ANATT.
    lab.target.ports[0].ana = AnaState::CHANGE;
    lab.target.notify(Some(0), AsyncEvent::ANA_CHANGE);
    lab.run_until(7, |lab| lab.machine.state(0) != PathState::Live);
}

/// The event of a namespace that is in another group now is that of groups.
#[test]
fn a_namespace_that_moves_to_another_ana_group_is_used_there() {
    let mut lab = quiet();
    lab.target.ana_group = 2;
    lab.target.notify(None, AsyncEvent::ANA_CHANGE);
    lab.settle();
    lab.submit(Operation::Read, 0, 1);
    lab.run_until(3, |lab| lab.under_way.is_empty());
    lab.close();
}

#[test]
fn requests_wait_until_a_changed_namespace_is_identified() {
    let mut lab = quiet();
    // Its identifiers cannot be read at first.
    (lab.target.uuid, lab.target.unread_identifiers) = ([6; 16], 2);
    lab.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    lab.settle();
    let sent = lab.target.commands;
    lab.submit(Operation::Write { fua: false }, 0, 1);
    let end = lab.now + Duration::from_secs(5);
    while lab.now < end {
        lab.step(end);
    }
    assert_eq!(lab.target.commands, sent, "it is another namespace");
    lab.target.uuid = [5; 16];
    lab.run_until(30, |lab| lab.under_way.is_empty());
    lab.close();
}

#[test]
fn a_path_whose_identifiers_could_not_be_read_is_connected_again() {
    let mut lab = Lab::new(1, common(0).0, false);
    lab.target.unread_identifiers = 1;
    lab.run_until(10, |lab| (0..2).all(|n| lab.machine.state(n) == PathState::Live));
    let ids = lab.machine.namespace().expect("live").ids;
    assert_eq!(ids.uuid, Some([5; 16]));
    // On a live path the command is repeated.
    let losses = |lab: &Lab| [0, 1].map(|path| lab.machine.counters(path).losses);
    let before = losses(&lab);
    (lab.target.unread_identifiers, lab.target.size_blocks) = (2, BLOCKS + 1);
    lab.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
    lab.run_until(10, |lab| lab.known_blocks() == BLOCKS + 1);
    assert_eq!((losses(&lab), lab.target.unread_identifiers), (before, 0));
    lab.close();
}

#[test]
fn a_change_of_the_write_protection_is_reported() {
    let mut lab = quiet();
    for is_write_protected in [true, false] {
        lab.notices.clear();
        lab.target.is_write_protected = is_write_protected;
        lab.target.notify(None, AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED);
        lab.run_until(3, |lab| {
            let namespace = lab.machine.namespace().expect("live");
            namespace.is_write_protected == is_write_protected
        });
        assert!(!lab.notices.is_empty());
    }
    lab.close();
}

/// A target that was started again with other limits.
#[test]
fn smaller_limits_of_write_zeroes_and_discards_are_adopted_at_a_reconnect() {
    let mut lab = quiet();
    let limits = |lab: &Lab| {
        let namespace = lab.machine.namespace().expect("live");
        (namespace.max_zeroes_blocks, namespace.max_discard_blocks)
    };
    for (wzsl, dmrsl, expected) in [(3, 32, (64, 32)), (5, 64, (64, 32)), (0, 0, (64, 32))] {
        (lab.target.wzsl, lab.target.dmrsl) = (wzsl, dmrsl);
        let before = lab.machine.counters(0).connects;
        lab.target.close_port(0);
        lab.run_until(10, |lab| lab.machine.counters(0).connects > before);
        assert_eq!(limits(&lab), expected, "{wzsl} {dmrsl}");
    }
    lab.close();
}
