//! Records as earlier versions have written them (43fd4d4; `served` and `keyed-hosts`: 998ade7).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

use nvme::persistent_event::PersistentEventHeader;
use nvme::{Nqn, Text};
use uuid::Uuid;

use super::event_log;
use super::identity::{DeviceIdentities, of_path};
use super::ns_catalog::NamespaceCatalogRecord;
use super::power::PowerLog;
use super::record::StateDir;
use super::revoked_hosts;
use super::served::Served;
use super::usage::UsageStore;
use crate::blockdev::record::seal;
use crate::core::subsystem::event_log::LogHeader;
use crate::core::subsystem::power::{Power, PowerMeter};

const EARLIER: [(&str, &[u8]); 7] = [
    ("names", include_bytes!("earlier/names")),
    ("power", include_bytes!("earlier/power")),
    ("usage", include_bytes!("earlier/usage")),
    ("served", include_bytes!("earlier/served")),
    ("keyed-hosts", include_bytes!("earlier/keyed-hosts")),
    ("namespaces", include_bytes!("earlier/namespaces")),
    (
        "ba290e9a-6cac-57b8-9459-0bb26ac3000f.events",
        include_bytes!("earlier/ba290e9a-6cac-57b8-9459-0bb26ac3000f.events"),
    ),
];

#[test]
fn records_of_earlier_versions_are_read() {
    let directory = tempfile::tempdir().unwrap();
    let at = directory.path();
    EARLIER.iter().for_each(|(name, content)| fs::write(at.join(name), content).unwrap());
    let nqn: Nqn = "nqn.2026-11.io.nvmfd:disk1".parse().unwrap();

    let named = DeviceIdentities::prepare(
        at,
        [(Uuid::from_u128(1), of_path(Path::new("/srv/a b.img")))].into(),
    );
    assert!(named.unwrap().is_none(), "as it is");
    assert!(DeviceIdentities::load(at).is_ok());
    let served = ["/srv/a b.img", "/srv/100%.img"].map(Into::into).into();
    assert_eq!(Served::load(Some(at)), Served::Known(served));
    let hosts = ["nqn.2026-11.host:a", "nqn.2026-11.host:b"].map(|host| host.parse().unwrap());
    assert_eq!(revoked_hosts::read(at), Ok(BTreeSet::from(hosts)));

    let now = Instant::now();
    let power = PowerLog::open(Some(at), now).meter.at(now);
    assert_eq!((power.cycles, power.on_hours, power.unsafe_shutdowns), (8, 24, 3));
    let usage = UsageStore::open(Some(at), PowerMeter::default()).usage(&nqn);
    let read = [usage.whole(), usage.of(1)].map(|own| (own.work.reads, own.work.units_read));
    assert_eq!((usage.errors(), read), (3, [(1000, 8000); 2]));
    let log = event_log::open(at, nqn, sync_channel(1).0);
    let header = LogHeader { nqn, serial: Text::lossy("S"), model: Text::lossy("M") };
    let page = log.report(&header, &Power::default());
    assert_eq!(PersistentEventHeader::parse(page.first_chunk().unwrap()).events, 1);

    let catalog: NamespaceCatalogRecord = StateDir(at).load("namespaces").unwrap().unwrap();
    assert_eq!((catalog.subsystem, catalog.entries[&3].bytes), (nqn, 1 << 20));
    assert_eq!(catalog.unsettled, [Uuid::from_u128(2)].into());
    assert_eq!(seal(&catalog).as_bytes(), EARLIER[5].1, "and written so");
}
