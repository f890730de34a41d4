//! Hosts that fail again and again are refused for a while.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use nvme::Status;
use nvme::auth::{GroupId, Notice};
use nvme::fabrics::{Authentication, CNTLID_DYNAMIC, Connect, FabricsType};
use nvmfd::core::diag::cause::Cause;
use nvmfd::core::subsystem::{AccessPolicy, Subsystem};

use super::{io_queue, is_closing, visit};
use crate::auth::{HOST, authenticate, connect, listen, negotiate, say, world};
use crate::support::{connect_data, keyed};

#[test]
fn hosts_with_repeated_authentication_failures_are_throttled() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut busy = 0;
    for _ in 0..12 {
        let mut queue = world.open_qid(0);
        world.memory[..1024].copy_from_slice(&connect_data(CNTLID_DYNAMIC).emit());
        let connect = Connect { sqsize_z: 15, ..Connect::default() };
        let cqe = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]);
        match cqe.status.is_success() {
            true => {
                assert!(say(&mut world, &mut queue, &[0xFF; 72]).is_success());
                assert!(Notice::parse(&listen(&mut world, &mut queue)).is_ok());
            }
            false => {
                assert!(cqe.status.is(Status::CONNECT_CONTROLLER_BUSY) && !cqe.status.dnr());
                busy += 1;
            }
        }
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
    assert_eq!(busy, 4);
    world.now += Duration::from_secs(10);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    authenticate(&mut world, &mut admin);
    world.end(admin);
}

/// Each queue of a controller costs as much to prove as its first one.
#[test]
fn io_connects_of_a_throttled_host_fail_with_controller_busy() {
    let (mut world, _directory) = world(GroupId::NULL);
    let (mut queue, admin, _posted) = io_queue(&mut world);
    assert!(queue.is_connected());
    world.flush_and_go(&mut queue);
    queue.finish(&mut world.io());
    let (host, from) = (HOST.parse().unwrap(), "192.0.2.1".parse().unwrap());
    for _ in 0..8 {
        world.registry.note_failed_proof(from, host, world.now);
    }
    let mut queue = world.open_qid(1);
    world.memory[..1024].copy_from_slice(&connect_data(1).emit());
    let connect = Connect { qid: 1, sqsize_z: 15, ..Connect::default() };
    let status = world.ask(&mut queue, &connect.emit(keyed(0, 1024)), &[]).status;
    assert!(status.is(Status::CONNECT_CONTROLLER_BUSY) && !status.dnr(), "{status}");
    assert!(!admin.association().unwrap().is_closed(), "what there is stays");
}

#[test]
fn hosts_that_repeatedly_abandon_authentication_are_throttled() {
    let (mut world, _directory) = world(GroupId::NULL);
    for _ in 0..8 {
        let mut queue = connect(&mut world, 0, CNTLID_DYNAMIC);
        assert!(say(&mut world, &mut queue, &negotiate()).is_success());
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
    let (host, from) = (HOST.parse().unwrap(), "192.0.2.1".parse().unwrap());
    assert!(world.registry.is_throttled(from, &host, world.now));
}

/// A failure counts even if it cannot be reported.
#[test]
fn unfetched_authentication_failures_count_towards_throttling() {
    let (mut world, _directory) = world(GroupId::NULL);
    for _ in 0..8 {
        let mut queue = connect(&mut world, 0, CNTLID_DYNAMIC);
        let kind = FabricsType::AUTHENTICATION_RECEIVE;
        let status =
            world.ask(&mut queue, &Authentication::new(4).emit(kind, keyed(0, 4)), &[]).status;
        assert!(status.is(Status::INVALID_FIELD), "{status}");
        world.flush_and_go(&mut queue);
        queue.finish(&mut world.io());
    }
    let (host, from) = (HOST.parse().unwrap(), "192.0.2.1".parse().unwrap());
    assert!(world.registry.is_throttled(from, &host, world.now));
    assert_eq!(world.shared.disconnects.list(None)[0].why.cause, Cause::BadAuthentication);
}

/// Failures at other addresses of an IPv6 subnet keep out those, not a host that has authenticated.
#[test]
fn a_host_that_has_authenticated_is_exempt_from_the_limit_of_its_ipv6_subnet() {
    let (world, _directory) = world(GroupId::NULL);
    let (host, from) = (HOST.parse().unwrap(), "2001:db8::1".parse().unwrap());
    let visit = visit("2001:db8::1", world.now);
    let admission = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit).unwrap();
    let fail = |n: u16| {
        let neighbour = IpAddr::from([0x2001, 0xDB8, 0, 0, 0, 0, 1, n]);
        world.registry.note_failed_proof(neighbour, host, world.now);
    };
    (0..64).for_each(fail);
    assert!(world.registry.is_throttled(from, &host, world.now), "it has yet to authenticate");
    world.registry.proved(&admission.association);
    assert!(!world.registry.is_throttled(from, &host, world.now));
    let other = "2001:db8::2".parse().unwrap();
    assert!(world.registry.is_throttled(other, &host, world.now));
}

/// A host that begins, and is displaced by its own next attempt.
#[test]
fn hosts_that_repeatedly_displace_their_own_associations_are_throttled() {
    for (other, throttled) in [("192.0.2.1", true), ("192.0.2.9", false)] {
        let (mut world, _directory) = world(GroupId::NULL);
        let offer = Arc::new(AccessPolicy { controllers: Some(2), ..AccessPolicy::default() });
        world.registry.publish(Arc::new(Subsystem { offer, ..crate::support::subsystem() }));
        for time in 0..8 {
            let mut queue = connect(&mut world, 0, CNTLID_DYNAMIC);
            assert!(say(&mut world, &mut queue, &negotiate()).is_success());
            if time == 0 {
                world.now += Duration::from_secs(5);
            }
            let visit = visit(other, world.now);
            let next = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
            let next = next.unwrap().association;
            let ended_for = queue.association().unwrap().ended_for();
            assert_eq!(ended_for, Some(Cause::TooManyUnauthenticated));
            assert!(is_closing(&mut world, &mut queue));
            world.flush_and_go(&mut queue);
            queue.finish(&mut world.io());
            world.registry.admin_closed(&next);
        }
        let (host, from) = (HOST.parse().unwrap(), "192.0.2.1".parse().unwrap());
        assert_eq!(world.registry.is_throttled(from, &host, world.now), throttled);
    }
}
