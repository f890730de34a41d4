//! Hosts that claim a name: what they may hold, and who makes room for whom.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use nvme::Status;
use nvme::auth::GroupId;
use nvme::fabrics::{CNTLID_DYNAMIC, Connect};
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::subsystem::{AccessPolicy, DuplicateHosts, Subsystem};

use super::{is_closing, swap, visit};
use crate::auth::{authenticate, connect, listen, negotiate, reply, say, world};
use crate::support::{World, connect_data, end_both, keyed};

#[test]
fn unauthenticated_hosts_hold_at_most_half_of_the_controllers() {
    let (world, _directory) = world(GroupId::NULL);
    let visit = visit("192.0.2.1", world.now);
    let admit = || world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
    let claims: Vec<_> = (0..4).map(|_| admit().unwrap().association).collect();
    let refusal = admit().unwrap_err();
    assert!(refusal.status.is(Status::CONNECT_CONTROLLER_BUSY) && !refusal.status.dnr());
    claims[0].set_proved();
    assert!(admit().is_ok());
    assert!(admit().is_err());
    world.registry.admin_closed(&claims[1]);
    assert!(admit().is_ok());
}

/// A host that only claims names displaces no host at another address.
#[test]
fn oldest_unauthenticated_association_is_displaced_by_another_address() {
    for controllers in [None, Some(2)] {
        let (world, _directory) = world(GroupId::NULL);
        let offer = Arc::new(AccessPolicy { controllers, ..AccessPolicy::default() });
        world.registry.publish(Arc::new(Subsystem { offer, ..crate::support::subsystem() }));
        let began = world.now;
        let admit = |source: &str, after_ms| {
            let now = began + Duration::from_millis(after_ms);
            let visit = visit(source, now);
            let admission = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
            admission.map(|admission| admission.association)
        };
        let half = controllers.map_or(4, |_| 1);
        let claims: Vec<_> = (0..half).map(|n| admit("192.0.2.66", 10 - n).unwrap()).collect();
        assert!(admit("192.0.2.66", 11).is_err(), "its own are its own affair");
        assert!(claims.iter().all(|claim| !claim.is_closed()));
        // One that is alone of its address may be about to prove itself.
        let at_ms = if controllers.is_some() {
            assert!(admit("192.0.2.1", 12).is_err() && !claims[0].is_closed());
            5_010
        } else {
            12
        };
        let host = admit("192.0.2.1", at_ms).unwrap();
        let gone: Vec<_> = claims.iter().map(|claim| claim.ended_for()).collect();
        let mut expected = vec![None; claims.len()];
        *expected.last_mut().unwrap() = Some(Cause::TooManyUnauthenticated);
        assert_eq!(gone, expected, "the oldest");
        assert!(!host.is_closed());
    }
}

/// A subsystem full of unauthenticated associations has room for a host that authenticates.
#[test]
fn unauthenticated_associations_are_displaced_in_a_full_subsystem() {
    let (world, _directory) = world(GroupId::NULL);
    let offer = Arc::new(AccessPolicy { controllers: Some(2), ..AccessPolicy::default() });
    world.registry.publish(Arc::new(Subsystem { offer, ..crate::support::subsystem() }));
    let admit = |source: &str, after_ms| {
        let now = world.now + Duration::from_millis(after_ms);
        let visit = visit(source, now);
        let admission = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
        admission.map(|admission| admission.association)
    };
    let first = admit("192.0.2.1", 0).unwrap();
    world.registry.proved(&first);
    let claim = admit("192.0.2.66", 1).unwrap();
    let full = admit("192.0.2.1", 2).unwrap_err();
    assert_eq!(full.cause, Cause::SubsystemFull);
    let second = admit("192.0.2.1", 5_001).unwrap();
    assert_eq!(claim.ended_for(), Some(Cause::TooManyUnauthenticated));
    assert!(!first.is_closed() && !second.is_closed());
    world.registry.proved(&second);
    assert!(admit("192.0.2.2", 60_000).is_err(), "who is proved makes no room");
}

/// The ids of a subsystem may be few, where several targets share one.
#[test]
fn unauthenticated_associations_do_not_exhaust_controller_ids() {
    let (world, _directory) = world(GroupId::NULL);
    let offer = Arc::new(AccessPolicy { cntlids: 7..=8, ..AccessPolicy::default() });
    world.registry.publish(Arc::new(Subsystem { offer, ..crate::support::subsystem() }));
    let admit = |source: &str, after_ms| {
        let now = world.now + Duration::from_millis(after_ms);
        let visit = visit(source, now);
        let admission = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
        admission.map(|admission| admission.association)
    };
    let claims = [0, 1].map(|ms| admit("192.0.2.66", ms).unwrap());
    assert_eq!(claims.each_ref().map(|claim| claim.cntlid), [7, 8]);
    assert_eq!(admit("192.0.2.66", 2).unwrap_err().cause, Cause::NoControllerId);
    let first = admit("192.0.2.1", 3).unwrap();
    assert_eq!((claims[0].ended_for(), first.cntlid), (Some(Cause::TooManyUnauthenticated), 7));
    world.registry.proved(&first);
    world.registry.admin_closed(&claims[0]);
    // The other one disconnects and reconnects before its time is over.
    world.registry.admin_closed(&claims[1]);
    let claim = admit("192.0.2.66", 4_999).unwrap();
    assert_eq!(admit("192.0.2.2", 4_999).unwrap_err().cause, Cause::NoControllerId);
    let second = admit("192.0.2.2", 5_000).unwrap();
    assert_eq!((claim.ended_for(), second.cntlid), (Some(Cause::TooManyUnauthenticated), 8));
    world.registry.proved(&second);
    assert!(!first.is_closed() && !second.is_closed());
    assert!(admit("192.0.2.3", 60_000).is_err(), "who is proved makes no room");
}

/// Two reactors find at one moment that the host of two controllers has proved itself.
#[test]
fn duplicates_authenticated_simultaneously_leave_one_controller() {
    let (world, _directory) = world(GroupId::NULL);
    set_duplicates(&world, DuplicateHosts::Replace);
    let visit = visit("192.0.2.1", world.now);
    let admit = || world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
    let both = [admit().unwrap().association, admit().unwrap().association];
    both.iter().for_each(|association| association.set_proved());
    both.iter().for_each(|association| world.registry.proved(association));
    assert_eq!(both.map(|association| association.is_closed()), [false, true]);
}

/// Sets how the subsystem treats duplicate hosts.
fn set_duplicates(world: &World, duplicates: DuplicateHosts) {
    let offer = Arc::new(AccessPolicy { duplicates, ..AccessPolicy::default() });
    world.registry.publish(Arc::new(Subsystem { offer, ..crate::support::subsystem() }));
}

#[test]
fn a_duplicate_host_replaces_its_controller_only_once_authenticated() {
    let (mut world, _directory) = world(GroupId::NULL);
    set_duplicates(&world, DuplicateHosts::Replace);
    let mut first = connect(&mut world, 0, CNTLID_DYNAMIC);
    authenticate(&mut world, &mut first);
    // An impostor gets a controller, because it is only a claim, and cannot prove it.
    let mut others = VecDeque::new();
    swap(&mut world, &mut others);
    let mut impostor = connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(say(&mut world, &mut impostor, &negotiate()).is_success());
    let challenge = listen(&mut world, &mut impostor);
    let mut wrong = reply(&challenge);
    wrong[20] ^= 1;
    say(&mut world, &mut impostor, &wrong);
    assert!(!impostor.is_admitted());
    world.flush_and_go(&mut impostor);
    impostor.finish(&mut world.io());
    world.fabric.disconnected = false;
    assert!(!is_closing(&mut world, &mut first), "a claim ends nobody");

    let mut second = connect(&mut world, 0, CNTLID_DYNAMIC);
    assert!(!is_closing(&mut world, &mut first), "still a claim");
    authenticate(&mut world, &mut second);
    assert!(!is_closing(&mut world, &mut second), "the one that came last stays");
    assert!(is_closing(&mut world, &mut first), "and the one of before ends");
    end_both(world, second, first, others);
}

#[test]
fn first_authenticated_duplicate_wins_under_the_refuse_policy() {
    let (mut world, _directory) = world(GroupId::NULL);
    set_duplicates(&world, DuplicateHosts::Refuse);
    let mut first = connect(&mut world, 0, CNTLID_DYNAMIC);
    let mut others = VecDeque::new();
    swap(&mut world, &mut others);
    // As long as nobody has proved anything, claims are in nobody's way.
    let mut second = connect(&mut world, 0, CNTLID_DYNAMIC);
    authenticate(&mut world, &mut second);
    swap(&mut world, &mut others);
    authenticate(&mut world, &mut first);
    assert!(is_closing(&mut world, &mut first), "it was too late");
    swap(&mut world, &mut others);
    assert!(!is_closing(&mut world, &mut second));
    // From now on the name alone is refused, and may be tried again.
    swap(&mut world, &mut others);
    let mut third = world.open_qid(0);
    world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
    let connect = Connect { sqsize_z: 15, ..Connect::default() };
    let status = world.ask(&mut third, &connect.emit(keyed(0, 1024)), &[]).status;
    assert!(status.is(Status::CONNECT_CONTROLLER_BUSY) && !status.dnr(), "{status}");
    world.flush_and_go(&mut third);
    third.finish(&mut world.io());
    world.flush_and_go(&mut first);
    first.finish(&mut world.io());
    swap(&mut world, &mut others);
    world.end(second);
}
