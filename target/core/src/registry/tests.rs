//! Tests of the registry.

use nvme::Status;
use nvme::fabrics::{CNTLID_MAX, Connect, ConnectData};
use nvme::log::AnaState;

use crate::auth::{Keys, Rules};
use crate::command::fabrics::ConnectError;
use crate::controller::discovery::{Record, Subtype};
use crate::registry::testing::{at, visit};
use crate::registry::*;
use crate::subsystem::ana::AnaStates;
use crate::subsystem::reservation::Barred;
use crate::subsystem::reservation::testing::reserve;
use crate::subsystem::testing::sample;
use crate::subsystem::{AccessPolicy, Referral};

fn listener(id: u16, address: &str) -> ListenerConfig {
    ListenerConfig { id, ..ListenerConfig::from(address.parse::<SocketAddr>().unwrap()) }
}

/// The sample subsystem, offered like this.
pub(super) fn offered(offer: AccessPolicy) -> Arc<Subsystem> {
    Arc::new(Subsystem { offer: Arc::new(offer), ..sample() })
}

pub(super) fn nqn(name: &str) -> Nqn {
    name.parse().unwrap()
}

pub(crate) fn registry() -> Registry {
    let (sender, _) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 3, 8192);
    registry.publish(Arc::new(sample()));
    let closed = Subsystem {
        nqn: nqn("nqn.2026-11.io.nvmfd:closed"),
        allow_any_host: false,
        hosts: [nqn("nqn.2026-11.host:friend")].into(),
        ..sample()
    };
    registry.publish(Arc::new(closed));
    registry.set_listeners(vec![listener(1, "0.0.0.0:4420")]);
    registry
}

pub(super) fn data(cntlid: u16, subnqn: &str, host: &str) -> ConnectData {
    ConnectData::new([9; 16], cntlid, &nqn(subnqn), &nqn(host))
}

pub(super) const TEST: &str = "nqn.2026-11.io.nvmfd:test";
pub(super) const CLOSED: &str = "nqn.2026-11.io.nvmfd:closed";
pub(super) const HOST: &str = "nqn.2026-11.host:a";
const LOCAL: &str = "192.0.2.1:4420";
pub(super) const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

/// One more controller of a host, at the subsystem that is open to all.
pub(crate) fn connect_host(registry: &Registry) -> Arc<Association> {
    registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap().association
}

/// The generation of the discovery log of that host, and the number of I/O subsystems.
pub(crate) fn records(registry: &Registry) -> (u64, usize) {
    let (generation, records) = registry.discovery(&nqn(HOST), LOCAL.parse().unwrap());
    (generation, records.iter().filter(|record| record.subtype == Subtype::NVM).count())
}

pub(super) fn code(result: Result<Admitted, ConnectError>) -> (u16, u32, bool) {
    let refusal = result.unwrap_err();
    (refusal.status.code(), refusal.dw0, refusal.status.dnr())
}

pub(super) fn promised(registry: &Registry, source: IpAddr, now: Instant) -> u32 {
    registry.reserved_receives(now).get(&source.into()).copied().unwrap_or(0)
}

#[test]
fn admin_connects_succeed_or_fail_with_the_exact_status() {
    let registry = registry();
    let admin = |d: &ConnectData| registry.connect_admin(d, &visit());
    let first = admin(&data(0xFFFF, TEST, HOST)).unwrap().association;
    let second = admin(&data(0xFFFE, TEST, HOST)).unwrap().association;
    assert_ne!(first.cntlid, second.cntlid, "the same host may connect twice");
    assert_eq!(code(admin(&data(1, TEST, HOST))), (0x182, 0x10010, true));
    assert_eq!(
        code(admin(&data(0xFFFF, "nqn.2026-11.io.nvmfd:nosuch", HOST))),
        (0x182, 0x10100, true)
    );
    assert_eq!(code(admin(&data(0xFFFF, CLOSED, HOST))), (0x184, 0x10200, true));
    assert!(admin(&data(0xFFFF, CLOSED, "nqn.2026-11.host:friend")).is_ok());
    let mut nameless = data(0xFFFF, TEST, HOST);
    nameless.hostnqn_field = nvme::NqnField([b'x'; 256]);
    assert_eq!(code(admin(&nameless)), (0x182, 0x10200, true));
    nameless.subnqn_field = nvme::NqnField([b'x'; 256]);
    assert_eq!(code(admin(&nameless)), (0x182, 0x10100, true));
}

#[test]
fn hosts_with_keys_on_other_gateways_are_refused_until_keyed_locally() {
    let registry = registry();
    let connected = connect_host(&registry);
    let hosts = BTreeSet::from([nqn(HOST), nqn("nqn.2026-11.host:exempt")]);
    let rules = Rules { exempt: [nqn("nqn.2026-11.host:exempt")].into(), ..Rules::default() };
    registry.set_keyring(Keyring::default().with_rules(rules));
    assert_eq!(registry.revoke(&hosts), BTreeSet::from([nqn(HOST)]));
    assert_eq!(registry.revoke(&hosts), BTreeSet::new(), "known already");
    assert_eq!(connected.ended_for(), Some(Cause::KeyChanged));
    let ask = |host| registry.connect_admin(&data(0xFFFF, TEST, host), &visit());
    assert_eq!(ask(HOST).unwrap_err().cause, Cause::NoKey);
    assert!(ask("nqn.2026-11.host:exempt").is_ok() && ask("nqn.2026-11.host:other").is_ok());
    assert!(registry.keyed_hosts().contains(&nqn(HOST)), "to be kept");
    let keys = Keys { host: nvme::auth::Secret::parse(SECRET).unwrap(), controller: None };
    registry.set_keyring(Keyring::new(
        [(nqn(HOST), keys)],
        Keyring::default().policy().as_ref().clone(),
    ));
    registry.admin_closed(&connected);
    assert!(ask(HOST).unwrap().authenticate);
    assert_eq!(registry.connected(), (2, 2), "the third one has to authenticate yet");
}

#[test]
fn each_exchange_has_a_challenge_and_a_sequence_number_of_its_own() {
    let (sender, _mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 8, 4032);
    let secret = nvme::auth::Secret::parse(SECRET).unwrap();
    let keys = Keys { host: secret, controller: None };
    let policy = Keyring::default().policy().as_ref().clone();
    registry.set_keyring(Keyring::new([(nqn(HOST), keys)], policy));
    let starts: Vec<_> = (0..4).map(|_| registry.start_exchange(&nqn(HOST)).unwrap()).collect();
    let (mut challenges, mut numbers) = (BTreeSet::new(), BTreeSet::from([0]));
    for start in &starts {
        assert!(challenges.insert(start.challenge), "a challenge comes again");
        assert!(numbers.insert(start.seqnum), "{} comes again", start.seqnum);
    }
}

#[test]
fn a_listener_sets_the_minimum_keep_alive_of_its_hosts() {
    let registry = registry();
    let strict = ListenerConfig { keep_alive_min_ms: 15_000, ..listener(1, "0.0.0.0:4420") };
    registry.set_listeners(vec![strict]);
    let admission = registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap();
    assert_eq!(admission.association.keep_alive_min_ms, 15_000);
}

#[test]
fn an_io_queue_must_belong_to_a_ready_controller_of_the_same_host() {
    let registry = registry();
    let a = registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap().association;
    let io = |qid, d: &ConnectData| {
        let connect = Connect { qid, sqsize_z: 31, ..Connect::default() };
        registry.connect_io(&connect, d, &visit())
    };
    let own = data(a.cntlid, TEST, HOST);
    assert_eq!(code(io(1, &own)), (0x182, 42, false), "not enabled");
    a.set_ready(true);
    a.grant_queues(2);
    assert!(io(1, &own).is_ok());
    assert_eq!(code(io(1, &own)), (0x00C, 0, true), "in use");
    assert_eq!(code(io(3, &own)), (0x182, 42, true), "not granted");
    assert_eq!(code(io(2, &data(a.cntlid + 1, TEST, HOST))), (0x182, 0x10010, false));
    assert_eq!(code(io(2, &data(a.cntlid, TEST, "nqn.2026-11.host:b"))), (0x182, 0x10010, false));
    assert_eq!(code(io(2, &ConnectData { hostid: [1; 16], ..own })), (0x182, 0x10000, true));
    assert_eq!(a.io_queues(), 1);
    registry.io_closed(&a, 1);
    assert_eq!(a.io_queues(), 0);
    assert!(io(1, &own).is_ok(), "the id is free again");
    registry.admin_closed(&a);
    assert_eq!(code(io(2, &own)), (0x182, 0x10010, false));
    let name = Nqn::DISCOVERY.to_string();
    let discovery =
        registry.connect_admin(&data(0xFFFF, &name, HOST), &visit()).unwrap().association;
    discovery.set_ready(true);
    let beside = data(discovery.cntlid, &name, HOST);
    assert_eq!(code(io(1, &beside)), (0x182, 42, true), "discovery has no I/O queues");
    registry.admin_closed(&discovery);
    assert_eq!(registry.associations(), 0);
}

#[test]
fn io_queues_that_get_features_reports_are_admitted_without_set_features() {
    let registry = registry();
    let Admitted { association, limits, .. } =
        registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap();
    association.set_ready(true);
    let io = |qid| {
        let connect = Connect { qid, sqsize_z: 31, ..Connect::default() };
        registry.connect_io(&connect, &data(association.cntlid, TEST, HOST), &visit())
    };
    for qid in 1..=limits.io_queues {
        assert!(io(qid).is_ok(), "{qid}");
    }
    assert_eq!(code(io(limits.io_queues + 1)), (0x182, 42, true));
}

/// A host may be connecting its I/O queues when its controller ends or fails. Linux removes a path
/// for good if one of them is refused with Do Not Retry.
#[test]
fn io_connects_to_an_ended_or_failed_controller_may_be_retried() {
    let registry = registry();
    let io = |a: &Association| {
        let connect = Connect { qid: 1, sqsize_z: 31, ..Connect::default() };
        registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &visit())
    };
    let ready = || {
        let association = connect_host(&registry);
        association.set_ready(true);
        association.grant_queues(1);
        association
    };
    for cause in [Cause::Crowded, Cause::Replaced, Cause::Disconnected, Cause::KeepAlive] {
        let ended = ready();
        ended.end(cause);
        assert_eq!(code(io(&ended)), (0x182, 0x10010, false), "{cause:?}");
        registry.admin_closed(&ended);
        assert_eq!(code(io(&ended)), (0x182, 0x10010, false), "{cause:?}: it is gone");
    }
    let failed = ready();
    failed.set_ready(false);
    assert_eq!(code(io(&failed)), (0x182, 42, false));
}

#[test]
fn discovery_lists_permitted_subsystems_at_the_address_in_use() {
    let registry = registry();
    let local = "192.0.2.1:4420".parse().unwrap();
    let (generation, records) = registry.discovery(&nqn(HOST), local);
    let names: Vec<_> = records.iter().map(|r| r.nqn.to_string()).collect();
    assert_eq!(names, [Nqn::DISCOVERY.to_string(), TEST.to_string()]);
    assert!(records.iter().all(|r| r.address == local));
    let friend = nqn("nqn.2026-11.host:friend");
    let (_, records) = registry.discovery(&friend, local);
    assert_eq!(records.len(), 3);
    assert_eq!(registry.discovery_after(Some(generation), &friend, local), None);
    registry.withdraw(&nqn(CLOSED));
    let (later, records) = registry.discovery(&friend, local);
    assert_eq!(records.len(), 2);
    assert!(later > generation);
    assert_eq!(registry.discovery_after(Some(generation), &friend, local), Some((later, records)));
    // A wildcard of the other family cannot be reached by this host.
    registry.set_listeners(vec![listener(1, "[::]:4420")]);
    assert!(registry.discovery(&nqn(HOST), local).1.is_empty());
}

#[test]
fn link_local_listeners_are_listed_only_to_hosts_connected_there() {
    let registry = registry();
    registry
        .set_listeners(vec![listener(1, "[fe80::1%2]:4420"), listener(2, "[2001:db8::1]:4420")]);
    let found = |local: &str| {
        let (_, records) = registry.discovery(&nqn(HOST), local.parse().unwrap());
        let text = |it: &Record| format!("{} {} {}", it.subtype.0, it.port_id, it.address.ip());
        records.iter().map(text).collect::<Vec<_>>()
    };
    let other = ["3 2 2001:db8::1", "2 2 2001:db8::1"];
    assert_eq!(found("[2001:db8::1]:4420"), other);
    for local in ["[fe80::1]:4420", "[fe80::1%2]:4420"] {
        assert_eq!(found(local), ["3 1 fe80::1", "2 1 fe80::1", "2 2 2001:db8::1"], "{local}");
    }
    let peer = PeerListener { id: 3, address: "[fe80::7%2]:4420".parse().unwrap() };
    registry.set_peer_listeners(vec![peer]);
    assert_eq!(found("[2001:db8::1]:4420"), other);
}

#[test]
fn discovery_lists_peer_gateway_listeners_even_while_leaving() {
    let (sender, mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 3, 0);
    registry.publish(offered(AccessPolicy { listeners: [1, 7].into(), ..AccessPolicy::default() }));
    registry.set_listeners(vec![listener(1, "0.0.0.0:4420")]);
    let peer = |id, text: &str| PeerListener { id, address: text.parse().unwrap() };
    let (other, not_offered) = (peer(7, "192.0.2.2:4420"), peer(8, "192.0.2.3:4420"));
    let found = || {
        let (generation, records) = registry.discovery(&nqn(HOST), LOCAL.parse().unwrap());
        let text = |it: &Record| format!("{} {} {}", it.subtype.0, it.port_id, it.address);
        (generation, records.iter().map(text).collect::<Vec<_>>())
    };
    let (alone, own) = found();
    assert_eq!(own, ["3 1 192.0.2.1:4420", "2 1 192.0.2.1:4420"]);
    while mailbox.take().is_some() {}
    registry.set_peer_listeners(vec![not_offered, other]);
    assert!(matches!(mailbox.take(), Some(Message::DiscoveryChanged)));
    let (both, all) = found();
    assert_eq!((both, &all[2..]), (alone + 1, &["2 7 192.0.2.2:4420".to_owned()][..]));
    registry.set_peer_listeners(vec![other, not_offered]);
    assert!(mailbox.take().is_none() && found() == (both, all), "the same, in another order");
    let by_listener = DiscoveryConfig { by_listener: true, ..DiscoveryConfig::default() };
    let change = |discovery| Change { discovery: Some(discovery), ..Change::default() };
    registry.change(change(by_listener));
    registry.set_listeners(vec![listener(1, LOCAL)]);
    assert_eq!(found().1, own, "a host sees the listener that it uses only");
    registry.change(change(DiscoveryConfig::default()));
    registry.leave();
    assert_eq!(found().1, ["3 1 192.0.2.1:4420", "2 7 192.0.2.2:4420"]);
    registry.set_peer_listeners(vec![peer(7, LOCAL)]);
    assert_eq!(found().1, ["3 1 192.0.2.1:4420"], "an address that this gateway has as well");
}

#[test]
fn new_listeners_raise_a_discovery_change_event() {
    let (sender, mailbox) = crate::message::mailbox().unwrap();
    let registry = Registry::new(vec![sender], 3, 0);
    registry.set_listeners(vec![listener(1, "192.0.2.1:4420")]);
    assert!(matches!(mailbox.take(), Some(Message::DiscoveryChanged)));
}

#[test]
fn a_host_that_is_no_longer_admitted_is_disconnected() {
    let registry = registry();
    let friend = data(0xFFFF, CLOSED, "nqn.2026-11.host:friend");
    let a = registry.connect_admin(&friend, &visit()).unwrap().association;
    let changed = Subsystem {
        hosts: BTreeSet::new(),
        ..Subsystem::clone(&registry.subsystem(&nqn(CLOSED)).unwrap())
    };
    registry.publish(Arc::new(changed));
    assert!(a.is_closed());
}

#[test]
fn a_subsystem_is_accessible_only_through_its_listeners() {
    let registry = registry();
    registry.set_listeners(vec![listener(1, "192.0.2.1:4420"), listener(7, "192.0.2.2:4420")]);
    registry.publish(offered(AccessPolicy { listeners: [7].into(), ..AccessPolicy::default() }));
    let ask = |local| registry.connect_admin(&data(0xFFFF, TEST, HOST), &at(local));
    assert_eq!(code(ask("192.0.2.1:4420")), (0x182, 0x10100, true), "no such subsystem here");
    let (status, _, dnr) = code(ask("192.0.2.3:4420"));
    assert_eq!((status, dnr), (0x181, false), "a listener that is going, or not known yet");
    let a = ask("192.0.2.2:4420").unwrap().association;
    a.set_ready(true);
    a.grant_queues(1);
    let io = |local| {
        let connect = Connect { qid: 1, sqsize_z: 31, ..Connect::default() };
        registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &at(local))
    };
    assert_eq!(code(io("192.0.2.1:4420")), (0x182, 0x10100, true));
    assert!(io("192.0.2.2:4420").is_ok());

    let found = |local: &str| {
        let (_, records) = registry.discovery(&nqn(HOST), local.parse().unwrap());
        let disks = records.into_iter().filter(|r| r.subtype == Subtype::NVM);
        disks.map(|r| (r.port_id, r.address.to_string())).collect::<Vec<_>>()
    };
    let only = [(7, "192.0.2.2:4420".to_owned())];
    assert_eq!((found("192.0.2.1:4420"), found("192.0.2.2:4420")), (only.to_vec(), only.to_vec()));
    let discovery = DiscoveryConfig { by_listener: true, ..DiscoveryConfig::default() };
    registry.change(Change { discovery: Some(discovery), ..Change::default() });
    assert_eq!((found("192.0.2.1:4420"), found("192.0.2.2:4420")), (Vec::new(), only.to_vec()));

    // It moves to the other listener: a host of this one is disconnected.
    registry.publish(offered(AccessPolicy { listeners: [1].into(), ..AccessPolicy::default() }));
    assert!(a.is_closed());
    let b = ask("192.0.2.1:4420").unwrap().association;
    registry.set_listeners(vec![listener(2, "192.0.2.1:4420")]);
    assert!(b.is_closed(), "the listener has another id now");
    registry.publish(offered(AccessPolicy::default()));
    let c = ask("192.0.2.1:4420").unwrap().association;
    registry.change(Change { listeners: Some(Vec::new()), lost: true, ..Change::default() });
    assert_eq!(c.ended_for(), Some(Cause::DeviceGone));
}

/// A connection may have been accepted, and a queue be connecting, while its listener is removed.
#[test]
fn connects_through_a_removed_listener_are_refused() {
    let registry = registry();
    let a = connect_host(&registry);
    a.set_ready(true);
    a.grant_queues(1);
    registry.set_listeners(vec![listener(1, "192.0.2.2:4420")]);
    assert_eq!(a.ended_for(), Some(Cause::ListenerRemoved));
    for name in [TEST, Nqn::DISCOVERY.as_str()] {
        let ask = |local| registry.connect_admin(&data(0xFFFF, name, HOST), &at(local));
        assert_eq!(code(ask(LOCAL)), (0x181, 0, false), "{name}: it may come back");
        assert!(ask("192.0.2.2:4420").is_ok());
    }
    let connect = Connect { qid: 1, sqsize_z: 31, ..Connect::default() };
    let io = registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &visit());
    assert_eq!(code(io), (0x181, 0, false));
    registry.set_listeners(Vec::new());
    assert_eq!(registry.associations(), 3);
    let ask = registry.connect_admin(&data(0xFFFF, TEST, HOST), &at("192.0.2.2:4420"));
    assert_eq!(code(ask), (0x181, 0, false), "there is none at all");
}

#[test]
fn all_queues_of_a_controller_must_use_one_address() {
    let registry = registry();
    let a = registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap().association;
    a.set_ready(true);
    a.grant_queues(1);
    let connect = Connect { qid: 1, sqsize_z: 31, ..Connect::default() };
    let io = |local| registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &at(local));
    assert_eq!(code(io("192.0.2.9:4420")), (0x182, 0x10010, false), "all addresses are ours");
    assert!(io("192.0.2.1:4420").is_ok());
}

#[test]
fn a_subsystem_may_grant_less_than_the_target() {
    let registry = Registry::new(Vec::new(), 8, 1 << 20);
    let offer = AccessPolicy {
        queue_depth: Some(32),
        io_queues: Some(2),
        mdts_bytes: Some(1 << 16),
        controllers: Some(1),
        ..AccessPolicy::default()
    };
    registry.publish(offered(offer));
    let admission = registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).unwrap();
    let Limits { queue_depth, mdts_bytes, in_capsule_bytes, .. } = admission.limits;
    assert_eq!((queue_depth, mdts_bytes, in_capsule_bytes), (32, 1 << 16, 4096));
    let second = registry.connect_admin(&data(0xFFFF, TEST, "nqn.2026-11.host:b"), &visit());
    assert_eq!(code(second), (0x181, 0, false), "one controller at once");
    let a = admission.association;
    a.set_ready(true);
    a.grant_queues(2);
    let io = |sqsize_z| {
        let connect = Connect { qid: 1, sqsize_z, ..Connect::default() };
        registry.connect_io(&connect, &data(a.cntlid, TEST, HOST), &visit())
    };
    assert_eq!(code(io(32)), (0x182, 44, true), "33 entries");
    assert_eq!(io(31).unwrap().limits.mdts_bytes, 1 << 16);
    registry.admin_closed(&a);
    assert!(registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit()).is_ok());
}

#[test]
fn controller_ids_cycle_through_the_range_of_the_subsystem() {
    let registry = Registry::new(Vec::new(), 8, 1 << 20);
    registry.publish(offered(AccessPolicy { cntlids: 100..=102, ..AccessPolicy::default() }));
    let ask = || registry.connect_admin(&data(0xFFFF, TEST, HOST), &visit());
    let ids = || ask().unwrap().association;
    let first = [ids(), ids()];
    assert_eq!(first.each_ref().map(|a| a.cntlid), [100, 101]);
    registry.admin_closed(&first[0]);
    assert_eq!([ids().cntlid, ids().cntlid], [102, 100], "the next, then round");
    assert_eq!(code(ask()), (0x181, 0, false), "all three are in use");
    let name = Nqn::DISCOVERY.to_string();
    let discovery = registry.connect_admin(&data(0xFFFF, &name, HOST), &visit()).unwrap();
    assert!((1..=CNTLID_MAX).contains(&discovery.association.cntlid));
}

#[test]
fn a_duplicate_host_is_admitted_refused_or_replaced_as_configured() {
    let other = "192.0.2.9:4420";
    for (duplicates, outcome) in [
        (DuplicateHosts::Allow, Ok(false)),
        (DuplicateHosts::Refuse, Err((0x181, 0, false))),
        (DuplicateHosts::Replace, Ok(true)),
    ] {
        let registry = Registry::new(Vec::new(), 8, 1 << 20);
        let most = (duplicates == DuplicateHosts::Replace).then_some(2);
        registry.publish(offered(AccessPolicy {
            duplicates,
            controllers: most,
            ..AccessPolicy::default()
        }));
        let own = data(0xFFFF, TEST, HOST);
        let first = registry.connect_admin(&own, &visit()).unwrap().association;
        let path = registry.connect_admin(&own, &at(other)).unwrap().association;
        let again = registry.connect_admin(&own, &visit());
        match outcome {
            Ok(ended) => assert_eq!((again.is_ok(), first.is_closed()), (true, ended)),
            Err(refusal) => assert_eq!(code(again), refusal),
        }
        assert!(!path.is_closed(), "another path of the same host");
        if most.is_none() {
            let stranger = ConnectData { hostid: [8; 16], ..own };
            assert!(registry.connect_admin(&stranger, &visit()).is_ok(), "another host identifier");
        }
        // An association that has ended occupies nothing.
        registry.admin_closed(&first);
        registry.admin_closed(&path);
        assert!(registry.connect_admin(&own, &at(other)).is_ok());
    }
}

#[test]
fn a_host_sees_the_namespaces_that_are_not_masked_from_it() {
    let registry = Registry::new(Vec::new(), 8, 1 << 20);
    let masks = |hosts: &[&str]| {
        let hosts = hosts.iter().map(|name| nqn(name)).collect();
        offered(AccessPolicy { masks: [(2, hosts)].into(), ..AccessPolicy::default() })
    };
    let (friend, other) = ("nqn.2026-11.host:friend", "nqn.2026-11.host:other");
    registry.publish(masks(&[friend]));
    let connect = |host| registry.connect_admin(&data(0xFFFF, TEST, host), &visit()).unwrap();
    let sees = |admission: &Admitted| {
        let view = registry.view(&admission.association).unwrap();
        view.namespaces.iter().map(|n| n.nsid).collect::<Vec<_>>()
    };
    let (a, b, c) = (connect(friend), connect(other), connect(other));
    assert_eq!((sees(&a), sees(&b)), (vec![1, 2, 7], vec![1, 7]));
    let (of_b, of_c) = (b.subsystem.as_ref().unwrap(), c.subsystem.as_ref().unwrap());
    assert!(Arc::ptr_eq(of_b, of_c), "one view for all controllers of a host");
    assert!(of_b.namespace(2).is_err());
    registry.publish(masks(&[other]));
    assert_eq!((sees(&a), sees(&b), sees(&c)), (vec![1, 7], vec![1, 2, 7], vec![1, 2, 7]));
    let gone = registry.view(&a.association).unwrap();
    assert!(gone.namespace(2).is_err());
    registry.publish(masks(&[]));
    assert_eq!((sees(&a), sees(&b)), (vec![1, 7], vec![1, 7]), "nobody's");
    registry.publish(offered(AccessPolicy::default()));
    assert_eq!((sees(&a), sees(&b)), (vec![1, 2, 7], vec![1, 2, 7]));
}

/// A host that may delete namespaces may delete one that it does not see, unless that is reserved.
#[test]
fn reservations_also_restrict_masked_namespaces() {
    let registry = Registry::new(Vec::new(), 8, 1 << 20);
    let masked = AccessPolicy { masks: [(2, BTreeSet::new())].into(), ..AccessPolicy::default() };
    let subsystem = offered(masked);
    reserve(&subsystem.namespace(2).unwrap().reservation, [1; 16]);
    registry.publish(subsystem);
    let late = connect_host(&registry);
    assert!(registry.view(&late).unwrap().namespace(2).is_err());
    assert_eq!([1, 2].map(|nsid| late.reservations.barred(nsid)), [Barred(0), Barred::ALL]);
}

#[test]
fn discovery_has_a_unique_nqn_and_lists_referrals() {
    let registry = registry();
    let (own, other) =
        (nqn("nqn.2026-11.io.nvmfd:discovery"), nqn("nqn.2026-11.io.other:discovery"));
    let referral =
        Referral { nqn: other, address: "192.0.2.77:8009".parse().unwrap(), hosts: None };
    let (referrals, cntlids) = (vec![referral], 2001..=4000);
    let discovery = DiscoveryConfig { nqn: own, referrals, cntlids, ..DiscoveryConfig::default() };
    registry.change(Change { discovery: Some(discovery), ..Change::default() });
    for (name, cntlid) in [(own, 2001), (Nqn::DISCOVERY, 2002)] {
        let asked = data(0xFFFF, name.as_str(), HOST);
        let admission = registry.connect_admin(&asked, &visit()).unwrap();
        assert_eq!(admission.association.cntlid, cntlid);
        assert!(admission.subsystem.is_none());
        assert_eq!((admission.association.subsystem, admission.name), (Nqn::DISCOVERY, name));
    }
    let (_, records) = registry.discovery(&nqn(HOST), "192.0.2.1:4420".parse().unwrap());
    let found: Vec<_> = records.iter().map(|r| (r.subtype, r.nqn, r.address, r.port_id)).collect();
    let at = |address: &str| address.parse().unwrap();
    assert_eq!(
        found,
        [
            (Subtype::CURRENT_DISCOVERY, own, at("192.0.2.1:4420"), 1),
            (Subtype::NVM, nqn(TEST), at("192.0.2.1:4420"), 1),
            (Subtype::REFERRAL, other, at("192.0.2.77:8009"), 0),
        ]
    );
}

#[test]
fn a_referral_with_hosts_is_reported_to_these_only() {
    let registry = registry();
    let other = nqn("nqn.2026-11.host:other");
    let referral = |port: u16, hosts: Option<&[Nqn]>| Referral {
        nqn: Nqn::DISCOVERY,
        address: SocketAddr::new([192, 0, 2, 77].into(), port),
        hosts: hosts.map(|hosts| hosts.iter().copied().collect()),
    };
    let own = [nqn(HOST)];
    let referrals = vec![
        referral(1, None),
        referral(2, Some(&own)),
        referral(3, Some(&[other])),
        referral(4, Some(&[])),
    ];
    let discovery = DiscoveryConfig { referrals, ..DiscoveryConfig::default() };
    registry.change(Change { discovery: Some(discovery), ..Change::default() });
    let ports = |host: Nqn| {
        let (_, records) = registry.discovery(&host, LOCAL.parse().unwrap());
        let referrals = records.iter().filter(|record| record.subtype == Subtype::REFERRAL);
        referrals.map(|record| record.address.port()).collect::<Vec<_>>()
    };
    assert_eq!(ports(nqn(HOST)), [1, 2]);
    assert_eq!(ports(other), [1, 3]);
    assert_eq!(ports(nqn("nqn.2026-11.host:third")), [1]);
}

#[test]
fn a_path_has_the_ana_states_of_its_listener_until_removal() {
    let registry = registry();
    let path = |address, state| {
        let ana = AnaStates::all(state);
        ListenerConfig { ana, ..listener(1, address) }
    };
    let (good, bad) = (AnaState::OPTIMIZED, AnaState::INACCESSIBLE);
    let generation = || registry.discovery(&nqn(HOST), LOCAL.parse().unwrap()).0;
    registry.set_listeners(vec![path(LOCAL, good), path("192.0.2.2:4420", bad)]);
    let connect = |local| registry.connect_admin(&data(0xFFFF, TEST, HOST), &at(local));
    let paths = [LOCAL, "192.0.2.2:4420"];
    let [first, second] = paths.map(|local| connect(local).unwrap().association);
    let codes = || [&first, &second].map(|a| a.reach.check(1).err().map(Status::code));
    assert_eq!(codes(), [None, Some(0x302)]);
    let before = generation();
    registry.set_listeners(vec![path(LOCAL, bad), path("192.0.2.2:4420", good)]);
    assert_eq!(codes(), [Some(0x302), None]);
    assert_eq!(generation(), before, "the same addresses");
    registry.set_listeners(vec![path("0.0.0.0:4420", good)]);
    assert!(!first.is_closed(), "a wildcard serves its address as well");
    registry.set_listeners(vec![path("192.0.2.2:4420", good)]);
    assert!(first.is_closed() && !second.is_closed());
    assert!(generation() > before);
}
