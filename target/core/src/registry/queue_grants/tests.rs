//! Tests of the I/O queues that are granted.

use nvme::fabrics::Connect;

use crate::auth::{Keyring, Keys};
use crate::registry::connect::Admitted;
use crate::registry::queue_grants::*;
use crate::registry::testing::visit;
use crate::registry::tests::{CLOSED, HOST, SECRET, TEST, data, nqn, offered, promised};
use crate::registry::*;
use crate::subsystem::AccessPolicy;
use crate::subsystem::testing::sample;

/// Otherwise two connections every 30 seconds, under a known name, would leave one I/O queue to
/// every other host.
#[test]
fn unauthenticated_hosts_reserve_no_queues() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 4032);
    registry.publish(offered(AccessPolicy::default()));
    let secret = nvme::auth::Secret::parse(SECRET).unwrap();
    let keys = Keys { host: secret, controller: None };
    registry.set_keyring(Keyring::new(
        [(nqn(HOST), keys)],
        Keyring::default().policy().as_ref().clone(),
    ));
    let mut visit = visit();
    visit.limits.io_queues = 20;
    let ask = || registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit).unwrap();
    let claims: Vec<_> = (0..3).map(|_| ask()).collect();
    assert!(claims.iter().all(|claim| claim.authenticate));
    assert_eq!(promised(&registry, visit.source, visit.now), 0);
    let host = &claims[2].association;
    assert_eq!(registry.grant_again(host, visit.now), Some(20));
    registry.proved(host);
    assert_eq!(promised(&registry, visit.source, visit.now), 20 * 128);
    assert_eq!(registry.grant_again(host, visit.now), None, "it proves itself once more");
    // The next one to authenticate gets what is left by then.
    assert_eq!(registry.grant_again(&claims[1].association, visit.now), Some(11));
    registry.proved(&claims[1].association);
    // The reserved number is the one reported then, not the one left at its Connect.
    let late = ask().association;
    claims.iter().for_each(|claim| registry.admin_closed(&claim.association));
    assert_eq!(registry.grant_again(&late, visit.now), Some(20));
    registry.proved(&late);
    assert_eq!(promised(&registry, visit.source, visit.now), 20 * 128);
}

#[test]
fn concurrent_controllers_are_granted_only_remaining_receives() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 4032);
    registry.publish(offered(AccessPolicy::default()));
    let mut visit = visit();
    visit.limits.io_queues = 16;
    let ask =
        |visit: &ConnectContext| registry.connect_admin(&data(0xFFFF, TEST, HOST), visit).unwrap();
    let (first, second) = (ask(&visit), ask(&visit));
    assert_eq!(promised(&registry, visit.source, visit.now), (15 + 8) * 128);
    assert_eq!(promised(&registry, IpAddr::from([192, 0, 2, 1]), visit.now), 0);
    assert_eq!(first.limits.io_queues, 15, "half of the receives may be half open");
    assert_eq!(second.limits.io_queues, 8, "three quarters together");
    // The first takes fewer, so there is more for the next.
    first.association.grant_queues(4);
    assert_eq!(ask(&visit).limits.io_queues, 11);
    // Promised queues that are not connected are not reserved for ever.
    visit.now += Duration::from_secs(31);
    assert_eq!(ask(&visit).limits.io_queues, 15);
}

/// After a power failure all hosts of a target that is sized for them connect at the same time.
#[test]
fn concurrent_listed_hosts_are_granted_all_receives() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 4 * 16 * 128);
    let hosts = (0..4).map(|n| nqn(&format!("nqn.2026-11.host:{n}"))).collect::<BTreeSet<_>>();
    registry.publish(Arc::new(Subsystem { hosts: hosts.clone(), ..sample() }));
    let mut visit = visit();
    visit.limits.io_queues = 16;
    for host in &hosts {
        let admitted = registry.connect_admin(&data(0xFFFF, TEST, host.as_str()), &visit).unwrap();
        assert_eq!(admitted.limits.io_queues, 16, "{host}");
    }
}

/// As above over connections: connected and not admitted ones are the promised ones.
#[test]
fn listed_hosts_get_all_queues_in_any_order_of_connects() {
    const HOSTS: usize = 4;
    const QUEUES: u16 = 3;
    let (admin, io) = (32, 128);
    let each = u32::from(admin) + u32::from(QUEUES * io);
    let mut random = 1_u64;
    for round in 0..200 {
        let (sender, _mailbox) = crate::message::mailbox().unwrap();
        let registry = Registry::new(vec![sender], 8, HOSTS as u32 * each);
        let hosts = (0..HOSTS).map(|n| nqn(&format!("nqn.2026-11.host:{n}"))).collect::<Vec<_>>();
        let named = hosts.iter().copied().collect();
        registry.publish(Arc::new(Subsystem { hosts: named, ..sample() }));
        let connection = |receives| {
            let held = OpenQueue { reactor: 0, receives };
            registry.queue_opened(held);
            let mut visit = ConnectContext { held: Some(held), ..visit() };
            visit.limits.io_queues = QUEUES;
            visit
        };
        // One connection of each host at a time: its admin queue, then all I/O queues, then their
        // Connects.
        let mut steps = [0; HOSTS];
        let mut admitted: [Option<Arc<Association>>; HOSTS] = Default::default();
        let mut open: [Vec<ConnectContext>; HOSTS] = Default::default();
        while steps.iter().any(|step| *step < 2 + 2 * QUEUES) {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let at = (random >> 33) as usize % HOSTS;
            let host = hosts[at].as_str();
            match steps[at] {
                0 => open[at].push(connection(admin)),
                1 => {
                    let visit = open[at].pop().unwrap();
                    let granted = registry.connect_admin(&data(0xFFFF, TEST, host), &visit);
                    let Admitted { association, limits, .. } = granted.unwrap();
                    assert_eq!(limits.io_queues, QUEUES, "{host} in round {round}");
                    association.set_ready(true);
                    association.grant_queues(QUEUES);
                    admitted[at] = Some(association);
                }
                step if step < 2 + QUEUES => open[at].push(connection(io)),
                step if step < 2 + 2 * QUEUES => {
                    let qid = step - 1 - QUEUES;
                    let connect = Connect { qid, sqsize_z: io - 1, ..Connect::default() };
                    let cntlid = admitted[at].as_ref().unwrap().cntlid;
                    let visit = open[at].pop().unwrap();
                    registry.connect_io(&connect, &data(cntlid, TEST, host), &visit).unwrap();
                }
                _ => continue,
            }
            steps[at] += 1;
        }
        let late = nqn("nqn.2026-11.host:0");
        let late = registry.connect_admin(&data(0xFFFF, TEST, late.as_str()), &connection(admin));
        assert_eq!(late.unwrap().limits.io_queues, 1, "nothing is left");
    }
}

/// Shallow queues need few receives, and a queue pair each.
#[test]
fn no_more_queues_are_promised_than_there_are_queue_pairs() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 64, u32::MAX / 2);
    registry.publish(offered(AccessPolicy::default()));
    let ask = |registry: &Registry, host: u8| {
        let mut visit = ConnectContext { source: [192, 0, 2, host].into(), ..visit() };
        visit.limits.io_queues = 100;
        registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit)
    };
    let queue_pairs =
        |admitted: Result<Admitted, _>| Some(1 + u32::from(admitted.ok()?.limits.io_queues));
    let promised: u32 = (0..30).map(|n| queue_pairs(ask(&registry, n)).unwrap()).sum();
    assert!((2000..=rdma::limits::QUEUE_PAIRS + 30).contains(&promised), "{promised}");
    // Of hosts in no list three quarters, where there is a list.
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 64, u32::MAX / 2);
    registry.publish(offered(AccessPolicy::default()));
    let hosts = [nqn("nqn.2026-11.host:friend")].into();
    registry.publish(Arc::new(Subsystem { nqn: nqn(CLOSED), hosts, ..sample() }));
    let promised: u32 = (0..30).map_while(|n| queue_pairs(ask(&registry, n))).sum();
    assert!((1500..=rdma::limits::QUEUE_PAIRS / 4 * 3).contains(&promised), "{promised}");
}

#[test]
fn queues_of_different_depths_are_not_promised_the_same_receives() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 300);
    let hosts = [nqn(HOST)].into();
    registry.publish(Arc::new(Subsystem { hosts, ..sample() }));
    let ask = |queue_depth, io_queues| {
        let limits = Limits { queue_depth, io_queues, ..visit().limits };
        let visit = ConnectContext { limits, ..visit() };
        registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit).unwrap().limits.io_queues
    };
    assert_eq!((ask(100, 1), ask(128, 8)), (1, 1));
}
