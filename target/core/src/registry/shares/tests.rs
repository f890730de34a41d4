//! Tests of the shares of hosts that are not identified.

use nvme::fabrics::Connect;

use crate::command::fabrics::ConnectError;
use crate::diag::cause::Cause;
use crate::registry::connect::Admitted;
use crate::registry::queue_grants::KEPT;
use crate::registry::testing::visit;
use crate::registry::tests::{CLOSED, HOST, TEST, data, nqn};
use crate::registry::*;
use crate::subsystem::testing::sample;

/// Hosts of a subsystem that admits all could otherwise exclude those of the others, by connecting
/// all queues that they are granted.
#[test]
fn unlisted_hosts_leave_a_quarter_of_the_queues_to_listed_hosts() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    // 32 I/O queues.
    let registry = Registry::new(vec![sender], 100, 32 * 128);
    let friend = nqn("nqn.2026-11.host:friend");
    registry.publish(Arc::new(sample()));
    registry.publish(Arc::new(Subsystem {
        nqn: nqn(CLOSED),
        allow_any_host: false,
        hosts: [friend].into(),
        ..sample()
    }));
    let ask = |source: u8, subsystem: &str, host: &str, now| {
        let visit = ConnectContext { now, source: [192, 0, 2, source].into(), ..visit() };
        registry.connect_admin(&data(0xFFFF, subsystem, host), &visit)
    };
    let (now, later) = (visit().now, visit().now + KEPT);
    let open = |a: &Arc<Association>, qid, now| {
        let connect = Connect { qid, sqsize_z: 127, ..Connect::default() };
        let visit = ConnectContext { now, ..visit() };
        registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &visit)
    };
    // 24 queues for hosts in no list: 8 each. One has none of them until its promise has expired.
    let strangers: Vec<_> = (1..=3).map(|n| ask(n, TEST, HOST, now).unwrap()).collect();
    for (number, stranger) in strangers.iter().enumerate() {
        let a = &stranger.association;
        assert_eq!(stranger.limits.io_queues, 8);
        a.grant_queues(8);
        a.set_ready(true);
        (1..=8).filter(|_| number < 2).for_each(|qid| drop(open(a, qid, now).unwrap()));
    }
    let refused = |ask: Result<Admitted, ConnectError>| ask.map(drop).unwrap_err().cause;
    assert_eq!(refused(ask(4, TEST, HOST, now)), Cause::TooManyUnidentified);
    let fourth = ask(4, TEST, HOST, later).unwrap();
    assert_eq!(fourth.limits.io_queues, 8);
    fourth.association.grant_queues(8);
    fourth.association.set_ready(true);
    let late = open(&strangers[2].association, 1, later);
    assert_eq!(refused(late), Cause::TooManyUnidentified, "it is another one's by now");
    assert!(open(&fourth.association, 1, later).is_ok());
    let friend = ask(5, CLOSED, friend.as_str(), later).unwrap();
    assert_eq!(friend.limits.io_queues, 8);
    // Without lists there is nobody to leave anything to.
    registry.change(Change { gone: vec![nqn(CLOSED)], ..Change::default() });
    assert!(ask(4, TEST, HOST, later).is_ok());
}

/// Otherwise one host of a target that admits all could exclude the others, by connecting all queues
/// that its controllers are granted.
#[test]
fn hosts_of_one_source_leave_a_quarter_of_the_queues() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    // 32 I/O queues.
    let registry = Registry::new(vec![sender], 100, 32 * 128);
    registry.publish(Arc::new(sample()));
    let taken = [(); 4].map(|()| take(&registry, 1, 8));
    assert_eq!(taken, [Ok(8), Ok(8), Ok(8), Err(Cause::TooManyUnidentified)]);
    assert_eq!(take(&registry, 2, 8), Ok(8));
}

#[test]
fn hosts_of_one_source_leave_a_quarter_of_the_controllers() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 1 << 20);
    registry.publish(Arc::new(sample()));
    let taken = [(); 7].map(|()| take(&registry, 1, 1).is_ok());
    assert_eq!(taken, [true, true, true, true, true, true, false]);
    assert_eq!([(); 2].map(|()| take(&registry, 2, 1)), [Ok(1), Ok(1)]);
}

/// Connects a controller of a host in no list at 192.0.2.`source` with all I/O queues that it is
/// granted, at most `most`: their number.
fn take(registry: &Registry, source: u8, most: u16) -> Result<u16, Cause> {
    let mut visit = ConnectContext { source: [192, 0, 2, source].into(), ..visit() };
    visit.limits.io_queues = most;
    let admitted = registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit);
    let Admitted { association, limits, .. } = admitted.map_err(|refusal| refusal.cause)?;
    association.grant_queues(limits.io_queues);
    association.set_ready(true);
    for qid in 1..=limits.io_queues {
        registry.queue_opened(OpenQueue { reactor: 0, receives: 128 });
        let connect = Connect { qid, sqsize_z: 127, ..Connect::default() };
        registry.connect_io(&connect, &data(association.cntlid, TEST, HOST), &visit).unwrap();
    }
    Ok(limits.io_queues)
}
