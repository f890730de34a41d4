//! Tests on the object of a gateway group in a real cluster: `make test-cluster`.

use std::time::Duration;

use nvme::feature::WriteProtectState;
use nvme::{Nqn, Status};

use super::*;
use crate::blockdev::ceph::ClusterConfig;
use crate::core::subsystem::reservation::testing::{acquired, registered};
use crate::core::subsystem::reservation::{Order, Reservation};
use crate::core::subsystem::write_protect::Protection;

const UUID: Uuid = Uuid::from_u128(7);

/// What a gateway has of a namespace in ANA group 1.
struct Gateway {
    records: Arc<GroupRecords>,
    reservation: Arc<Reservation>,
    protection: Arc<Protection>,
}

fn client() -> Arc<ObjectClient> {
    let cluster = ClusterConfig { client: "nvmfd".to_owned(), ..ClusterConfig::default() };
    Arc::new(ObjectClient::open(&cluster, "rbd", "nvmfd", Duration::from_secs(30)).unwrap())
}

impl Gateway {
    fn new(object: &str) -> Gateway {
        let records = Arc::new(GroupRecords::default());
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
        let reservation = Reservation::kept(nqn, 1, records.namespace(1, UUID)).unwrap();
        let protection = Protection::kept(nqn, 1, records.namespace(1, UUID)).unwrap();
        records.connect(client(), object);
        Gateway { records, reservation, protection }
    }

    /// Takes the group, as the worker of the gateway does.
    fn take(&self, object: &str, owner: &str) {
        let key = "ana.1".to_owned();
        let set = vec![(key.clone(), owner.as_bytes().to_vec())];
        let update = Update { create: true, set, ..Update::default() };
        client().update(object, &update).unwrap();
        self.records.set_owned([(1, (key, owner.as_bytes().to_vec()))].into());
        self.reload().unwrap();
    }

    fn reload(&self) -> Result<(), String> {
        self.records.refresh()?;
        self.reservation.reload()?;
        self.protection.reload().map(drop)
    }

    fn reserve(&self, host: [u8; 16]) -> Result<(), Status> {
        for order in [Order::Persist(true), registered(), acquired()] {
            self.reservation.carry_out(&host, &order)?;
        }
        Ok(())
    }
}

fn object(name: &str) -> String {
    format!("test-{}-{name}", std::process::id())
}

#[test]
#[ignore = "needs a cluster"]
fn reservations_and_write_protection_survive_a_takeover() {
    let object = object("takeover");
    let [one, other] = [(); 2].map(|()| Gateway::new(&object));
    let empty = other.reservation.report();
    one.take(&object, "one 1");
    one.reserve([1; 16]).unwrap();
    assert_eq!(one.protection.change(WriteProtectState::PROTECTED), Ok(true));
    assert_eq!(other.reservation.report(), empty, "what it does not own it does not follow");
    other.take(&object, "other 2");
    assert_eq!(other.reservation.report(), one.reservation.report());
    assert_ne!(other.reservation.report(), empty);
    assert_eq!(other.protection.state(), WriteProtectState::PROTECTED);
    let conflict = other.reservation.carry_out(&[2; 16], &acquired());
    assert_eq!(conflict, Err(Status::RESERVATION_CONFLICT.with_dnr()));
    // The last persistent state is none, and is gone for the next one.
    assert!(other.reservation.carry_out(&[1; 16], &Order::Persist(false)).is_ok());
    assert_eq!(other.protection.change(WriteProtectState::NONE), Ok(true));
    let keys = client().read(&object).unwrap();
    assert_eq!(keys.keys().collect::<Vec<_>>(), ["ana.1"]);
    one.take(&object, "one 3");
    assert_eq!(one.reservation.report(), empty);
    assert_eq!(one.protection.state(), WriteProtectState::NONE);
}

#[test]
#[ignore = "needs a cluster"]
fn state_changes_by_a_former_owner_are_not_acknowledged() {
    let object = object("former");
    let [one, other] = [(); 2].map(|()| Gateway::new(&object));
    let failed = Err(Status::ANA_INACCESSIBLE);
    assert_eq!(one.reserve([1; 16]), failed, "it owns nothing");
    one.take(&object, "one 1");
    one.reserve([1; 16]).unwrap();
    let (held, kept) = (one.reservation.report(), client().read(&object).unwrap());
    other.take(&object, "other 2");
    // It has not learnt that it is not the owner any more.
    assert_eq!(one.reserve([2; 16]), failed);
    assert_eq!(one.protection.change(WriteProtectState::PROTECTED), failed.map(|()| true));
    assert_eq!(one.reservation.report(), held);
    assert_eq!(one.protection.state(), WriteProtectState::NONE);
    let mut now = client().read(&object).unwrap();
    assert_eq!(now.insert("ana.1".to_owned(), b"one 1".to_vec()).as_deref(), Some(&b"other 2"[..]));
    assert_eq!(now, kept, "nothing else has changed");
    // The same epoch of the same owner is required, not the same owner.
    other.records.set_owned(BTreeMap::new());
    assert_eq!(other.protection.change(WriteProtectState::PROTECTED), failed.map(|()| true));
    other.take(&object, "one 3");
    assert_eq!(one.protection.change(WriteProtectState::PROTECTED), failed.map(|()| true));
}

#[test]
#[ignore = "needs a cluster"]
fn a_damaged_section_is_an_error() {
    let object = object("damaged");
    let gateway = Gateway::new(&object);
    gateway.take(&object, "one 1");
    gateway.reserve([1; 16]).unwrap();
    let held = gateway.reservation.report();
    let key = format!("ns.{UUID}.reservation");
    let good = client().read(&object).unwrap()[&key].clone();
    for bad in [&good[1..], &good[..good.len() - 2], b"x"] {
        let update = Update { set: vec![(key.clone(), bad.to_vec())], ..Update::default() };
        client().update(&object, &update).unwrap();
        let why = gateway.reload().unwrap_err();
        assert!(why.contains("no record that nvmfd has written") && why.contains(&object), "{why}");
        assert_eq!(gateway.reservation.report(), held);
    }
}
