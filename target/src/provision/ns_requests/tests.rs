use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use nvme::NSID_ALL;
use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::feature::WriteProtectState;
use tempfile::tempdir;

use crate::blockdev::monitor::DeviceMonitor;
use crate::config::{Config, Missing, NamespaceConfig, NamespaceKind};
use crate::core::message::ReactorRings;
use crate::core::registry::Registry;
use crate::core::registry::testing::visit;
use crate::core::sched::offload::OpenConnection;
use crate::core::shared::Shared;
use crate::core::subsystem::ns_management::HOSTS_MAX;
use crate::core::subsystem::ns_request::{CreateRequest, CreatedNsid};
use crate::core::subsystem::power::PowerMeter;
use crate::core::subsystem::reservation::testing::{clear, reserve};
use crate::provision::devices::DeviceTable;
use crate::provision::ns_catalog::Catalogs;
use crate::provision::ns_requests::*;
use crate::state::usage::UsageStore;
use crate::worker::Workers;

mod durability;
mod images;

const NQN: &str = "nqn.2026-11.io.nvmfd:a";
const MIB: u64 = 1 << 20;

fn host(n: u8) -> Nqn {
    format!("nqn.2026-11.io.nvmfd:host{n}").parse().unwrap()
}

/// A subsystem with namespace 2, whose hosts 1 and 2 may manage 4 MiB in 3 namespaces.
fn config(directory: &Path) -> Config {
    let text = format!(
        "[[listener]]\naddress = \"192.0.2.1\"\n[[subsystem]]\nnqn = \"{NQN}\"\n\
         allow_any_host = true\n[[subsystem.namespace]]\nnsid = 2\nkind = \"null\"\nsize = \"1MiB\"\n\
         [subsystem.managed]\ndirectory = {directory:?}\nquota = \"4MiB\"\nnamespaces = 3\n\
         hosts = [\"{}\", \"{}\"]\n",
        host(1),
        host(2)
    );
    Config::parse(&text).unwrap()
}

/// A provisioner without a reactor, with controllers 1 to 3 of hosts 1 to 3.
fn provisioner(config: &Config) -> Provisioner {
    provisioner_with(config, DeviceTable::default())
}

/// A provisioner that serves nothing yet.
fn empty_provisioner(config: &Config, stores: DeviceTable) -> Provisioner {
    let registry = Arc::new(Registry::new(Vec::new(), 8, 1 << 20));
    let shared = Arc::new(Shared::new(registry, Workers::default(), SystemTime::now));
    let monitor = Arc::new(DeviceMonitor::start(ReactorRings(Vec::new()), Arc::default()).unwrap());
    let usage_store = Arc::new(UsageStore::open(None, PowerMeter::default()));
    Provisioner::new(config.clone(), stores, shared, monitor, usage_store, false)
}

/// As [`provisioner`], with these `stores`, which may have a state directory.
fn provisioner_with(config: &Config, stores: DeviceTable) -> Provisioner {
    let next = patiently(|| Transition::open(config, &stores, &Catalogs::new()));
    let mut provisioner = empty_provisioner(config, stores);
    let registry = Arc::clone(&provisioner.registry);
    provisioner.attach_new(&next).unwrap();
    provisioner.adopt(next, Vec::new());
    for n in 1..=3 {
        let data = ConnectData::new([n; 16], CNTLID_DYNAMIC, &NQN.parse().unwrap(), &host(n));
        let admission = registry.connect_admin(&data, &visit()).unwrap();
        assert_eq!(admission.association.cntlid, u16::from(n));
    }
    provisioner
}

/// The lock of a file or directory that was just closed may not be released yet, or a process that
/// another test has started may still have it.
fn patiently(open: impl Fn() -> Result<Transition, Fatal>) -> Transition {
    let held = ["a lock on it is held", "is in use by another nvmfd"];
    let is_held = |why: &str| held.iter().any(|held| why.contains(held));
    loop {
        match open() {
            Ok(next) if next.stores.pending().iter().any(|each| is_held(&each.why)) => {}
            Ok(next) => return next,
            Err(why) => assert!(is_held(&why.0), "{why}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn order(host: Nqn, what: NamespaceRequest) -> NamespaceJob {
    let subsystem = NQN.parse().unwrap();
    let (host_id, made) = ([1; 16], CreatedNsid::default());
    let (open, cntlid, reactor, tag) = (OpenConnection::default(), 1, 0, 0);
    let connection = open.watch();
    std::mem::forget(open);
    NamespaceJob { subsystem, host, host_id, cntlid, connection, what, made, reactor, tag }
}

fn create(mib: u64) -> NamespaceRequest {
    NamespaceRequest::Create(CreateRequest {
        bytes: mib * MIB,
        block_size_bytes: 512,
        ana_group: 1,
        private: false,
    })
}

fn attach(nsid: u32, cntlids: &[u16]) -> NamespaceRequest {
    NamespaceRequest::Attach { nsid, cntlids: cntlids.to_vec() }
}

fn detach(nsid: u32, cntlids: &[u16]) -> NamespaceRequest {
    NamespaceRequest::Detach { nsid, cntlids: cntlids.to_vec() }
}

/// Executing a request releases the lock of the provisioner in between.
fn execute(provisioner: &mut Provisioner, order: &NamespaceJob) -> Result<u32, Status> {
    let (shared, monitor) = (Arc::clone(&provisioner.shared), Arc::clone(&provisioner.monitor));
    let (config, usage_store) = (provisioner.config.clone(), Arc::clone(&provisioner.usage_store));
    let none =
        Provisioner::new(config, DeviceTable::default(), shared, monitor, usage_store, false);
    let own = Mutex::new(std::mem::replace(provisioner, none));
    let outcome = super::execute(&own, order);
    *provisioner = own.into_inner().unwrap();
    outcome
}

fn ask(provisioner: &mut Provisioner, what: NamespaceRequest) -> Result<u32, u16> {
    let outcome = execute(provisioner, &order(host(1), what));
    outcome.map_err(|status| {
        assert!(status.dnr(), "{status}");
        status.code()
    })
}

/// The namespaces that a host sees.
fn seen(provisioner: &Provisioner, n: u8) -> Vec<u32> {
    let subsystem = provisioner.registry.subsystem(&NQN.parse().unwrap()).unwrap();
    subsystem.seen_by(&host(n)).namespaces.iter().map(|n| n.nsid).collect()
}

fn images(directory: &Path) -> Vec<PathBuf> {
    let paths = fs::read_dir(directory).unwrap().map(|file| file.unwrap().path());
    paths.filter(|path| path.extension().is_some_and(|e| e == "img")).collect()
}

#[test]
fn namespaces_are_created_attached_detached_and_deleted() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let mut provisioner = provisioner(&config);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    assert_eq!(ask(&mut provisioner, create(2)), Ok(3), "2 is declared");
    assert_eq!(images(directory.path()).len(), 2);
    assert_eq!(seen(&provisioner, 1), [2], "attached to nobody yet");
    assert_eq!(ask(&mut provisioner, attach(3, &[1, 2])), Ok(0));
    assert_eq!(ask(&mut provisioner, attach(1, &[2])), Ok(0));
    assert_eq!(
        [seen(&provisioner, 1), seen(&provisioner, 2), seen(&provisioner, 3)],
        [vec![2, 3], vec![1, 2, 3], vec![2]]
    );
    assert_eq!(ask(&mut provisioner, detach(3, &[2])), Ok(0));
    assert_eq!(seen(&provisioner, 2), [1, 2]);
    let management = |host_n| {
        let subsystem = provisioner.registry.subsystem(&NQN.parse().unwrap()).unwrap();
        subsystem.seen_by(&host(host_n)).management.clone()
    };
    assert_eq!(management(1).unwrap().used_bytes, 3 * MIB);
    assert!(management(3).is_none(), "who may not manage learns nothing of it");
    // The state that a start of the daemon finds.
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    let mut provisioner = self::provisioner(&config);
    assert_eq!([seen(&provisioner, 1), seen(&provisioner, 2)], [vec![2, 3], vec![1, 2]]);
    assert_eq!(
        ask(&mut provisioner, NamespaceRequest::Delete { nsid: 3 }),
        Ok(0),
        "detached before"
    );
    assert_eq!((seen(&provisioner, 1), images(directory.path()).len()), (vec![2], 1));
    assert_eq!(ask(&mut provisioner, create(3)), Ok(3), "there is room again");
    assert_eq!(ask(&mut provisioner, NamespaceRequest::Delete { nsid: NSID_ALL }), Ok(0));
    assert_eq!(
        (seen(&provisioner, 2), images(directory.path()).len()),
        (vec![2], 0),
        "what is declared stays"
    );
}

/// A request concerns one namespace: no other one is removed, and none prevents it.
#[test]
fn a_request_does_not_remove_namespaces_of_failed_devices() {
    let (directory, elsewhere) = (tempdir().unwrap(), tempdir().unwrap());
    let disk = elsewhere.path().join("disk.img");
    let file = fs::File::create(&disk).unwrap();
    file.set_len(MIB).unwrap();
    let mut config = config(directory.path());
    let kind = NamespaceKind::File { path: disk, size: None };
    let like = config.subsystems[0].namespaces[0].clone();
    config.subsystems[0].namespaces.push(NamespaceConfig { nsid: 9, kind, ..like });
    let mut provisioner = provisioner(&config);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    assert_eq!(ask(&mut provisioner, attach(1, &[1])), Ok(0));
    assert_eq!(seen(&provisioner, 1), [1, 2, 9]);
    // One file has an invalid length for a namespace, the other one is moved away.
    file.set_len(MIB + 100).unwrap();
    let image = images(directory.path()).remove(0);
    fs::rename(&image, elsewhere.path().join("aside")).unwrap();
    assert_eq!(ask(&mut provisioner, create(1)), Ok(3));
    assert_eq!(ask(&mut provisioner, attach(3, &[1])), Ok(0));
    assert_eq!(seen(&provisioner, 1), [1, 2, 3, 9]);
}

#[test]
fn a_missing_managed_directory_is_pending_until_it_appears() {
    let directory = tempdir().unwrap();
    let late = directory.path().join("mount/managed");
    let config = Config { missing: Missing::Wait, ..config(&late) };
    let mut provisioner = provisioner(&config);
    let pending = |provisioner: &Provisioner| provisioner.pending.list();
    let expected = format!(
        "namespaces that hosts make of {NQN}: there is no directory {} yet",
        late.display()
    );
    assert_eq!((seen(&provisioner, 1), pending(&provisioner)), (vec![2], vec![expected]));
    let key = (NQN.parse().unwrap(), 0);
    assert_eq!(provisioner.stores.pending()[0].key(), key);
    assert!(provisioner.pending_probe().available().is_empty());
    let refused = execute(&mut provisioner, &order(host(1), create(1)));
    assert_eq!(refused, Err(FAILED), "nowhere to keep it");
    fs::create_dir_all(&late).unwrap();
    while provisioner.pending_probe().available() != [key] {
        std::thread::yield_now();
    }
    provisioner.on_stores(&[]);
    assert_eq!(pending(&provisioner).len(), 1, "nobody has said that it is due");
    provisioner.on_stores(&[key]);
    assert_eq!(pending(&provisioner), Vec::<String>::new());
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
}

/// Its host has given up, and may have written to the namespace since by another connection.
#[test]
fn a_request_whose_connection_has_closed_is_not_executed() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    assert_eq!(ask(&mut provisioner, create(2)), Ok(1));
    let record = provisioner.catalogs[&NQN.parse().unwrap()].record().clone();
    for what in [create(1), attach(1, &[1]), NamespaceRequest::Delete { nsid: 1 }] {
        let connection = OpenConnection::default().watch();
        let order = NamespaceJob { connection, ..order(host(1), what) };
        assert_eq!(execute(&mut provisioner, &order), Err(Status::ABORTED_SQ_DELETION));
    }
    assert_eq!(*provisioner.catalogs[&NQN.parse().unwrap()].record(), record);
}

#[test]
fn each_refusal_has_its_status_and_changes_nothing() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    assert_eq!(ask(&mut provisioner, create(2)), Ok(1));
    assert_eq!(ask(&mut provisioner, attach(1, &[1])), Ok(0));
    let record = provisioner.catalogs[&NQN.parse().unwrap()].record().clone();
    for (what, outcome) in [
        (create(3), Err(0x115)),
        (attach(1, &[1, 2]), Err(0x118)),
        (attach(1, &[2, 7]), Err(0x11C)),
        (detach(1, &[1, 2]), Err(0x11A)),
        (detach(1, &[9]), Err(0x11C)),
        (attach(2, &[2]), Err(0x00B)),
        (detach(5, &[1]), Err(0x00B)),
        (NamespaceRequest::Delete { nsid: 2 }, Err(0x00B)),
    ] {
        assert_eq!(ask(&mut provisioner, what.clone()), outcome, "{what:?}");
    }
    for stranger in [host(3), host(9)] {
        let status = execute(&mut provisioner, &order(stranger, create(1))).unwrap_err();
        assert_eq!(status.code(), 0x001);
    }
    assert_eq!(*provisioner.catalogs[&NQN.parse().unwrap()].record(), record);
    assert_eq!(images(directory.path()).len(), 1);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(3));
    assert_eq!(ask(&mut provisioner, create(2)), Err(0x115), "the quota");
    assert_eq!(ask(&mut provisioner, NamespaceRequest::Delete { nsid: 1 }), Ok(0));
    assert_eq!(
        (ask(&mut provisioner, create(1)), ask(&mut provisioner, create(1))),
        (Ok(1), Ok(4))
    );
    assert_eq!(ask(&mut provisioner, create(1)), Err(0x116), "as many as may be");
}

/// The request has waited for the lock of the provisioner: the state after the wait applies.
#[test]
fn a_write_protected_or_reserved_namespace_is_not_deleted() {
    let (directory, state) = (tempdir().unwrap(), tempdir().unwrap());
    let stores = DeviceTable::new(Some(state.path().to_owned()), 0);
    let mut provisioner = provisioner_with(&config(directory.path()), stores);
    assert_eq!(
        [ask(&mut provisioner, create(1)), ask(&mut provisioner, create(1))],
        [Ok(1), Ok(3)]
    );
    let store = |provisioner: &Provisioner, nsid| {
        provisioner.stores.store(NQN.parse().unwrap(), nsid).cloned()
    };
    let [one, three] = [1, 3].map(|nsid| store(&provisioner, nsid).unwrap());
    let deletes = [3, NSID_ALL].map(|nsid| NamespaceRequest::Delete { nsid });
    reserve(&three.reservation, [2; 16]);
    for delete in &deletes {
        assert_eq!(ask(&mut provisioner, delete.clone()), Err(0x083), "{delete:?}");
    }
    assert_eq!(one.protection.change(WriteProtectState::PROTECTED), Ok(true), "it is let go");
    clear(&three.reservation, [2; 16]);
    assert_eq!(three.protection.change(WriteProtectState::PERMANENT), Ok(true));
    for delete in deletes {
        assert_eq!(ask(&mut provisioner, delete.clone()), Err(0x020), "{delete:?}");
    }
    assert_eq!(images(directory.path()).len(), 2);
    assert_eq!(one.protection.change(WriteProtectState::NONE), Ok(true));
    reserve(&one.reservation, [1; 16]);
    assert_eq!(
        ask(&mut provisioner, NamespaceRequest::Delete { nsid: 1 }),
        Ok(0),
        "of whoever has it"
    );
    assert_eq!(images(directory.path()).len(), 1);
}

/// Otherwise a host that was preempted could take the namespace from the host that preempted it.
#[test]
fn attachments_of_a_reserved_namespace_conflict_unless_its_host_requests_them() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    assert_eq!(ask(&mut provisioner, attach(1, &[2])), Ok(0));
    let store = provisioner.stores.store(NQN.parse().unwrap(), 1).cloned().unwrap();
    reserve(&store.reservation, [2; 16]);
    for what in [detach(1, &[2]), attach(1, &[1])] {
        assert_eq!(ask(&mut provisioner, what.clone()), Err(0x083), "{what:?}");
    }
    assert_eq!([seen(&provisioner, 1), seen(&provisioner, 2)], [vec![2], vec![1, 2]]);
    let own = NamespaceJob { host_id: [2; 16], ..order(host(2), attach(1, &[1])) };
    assert_eq!(execute(&mut provisioner, &own), Ok(0));
    clear(&store.reservation, [2; 16]);
    assert_eq!(ask(&mut provisioner, detach(1, &[1, 2])), Ok(0));
}

#[test]
fn change_namespace_events_of_creation_and_deletion_agree() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    for (private, nmic) in [(false, 1), (true, 0)] {
        let what = NamespaceRequest::Create(CreateRequest {
            bytes: MIB,
            block_size_bytes: 512,
            ana_group: 1,
            private,
        });
        let made = provisioner.change_of(&order(host(1), what.clone())).unwrap();
        let nsid = ask(&mut provisioner, what).unwrap();
        let gone =
            provisioner.change_of(&order(host(1), NamespaceRequest::Delete { nsid })).unwrap();
        assert_eq!((made.nmic, gone.nmic), (nmic, nmic));
        assert_eq!(gone, ChangeNamespace { cdw10: gone.cdw10, nsid, ..made });
    }
}

#[test]
fn the_number_of_hosts_attached_to_a_namespace_is_limited() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    let catalog = provisioner.catalogs.get_mut(&NQN.parse().unwrap()).unwrap();
    let mut record = catalog.record().clone();
    let names = (0..HOSTS_MAX).map(|n| format!("nqn.2026-11.host:{n}").parse().unwrap());
    record.entries.get_mut(&1).unwrap().hosts = names.collect();
    catalog.keep(record).unwrap();
    assert_eq!(ask(&mut provisioner, attach(1, &[1])), Err(0x127));
}

#[test]
fn a_create_that_cannot_be_persisted_fails_and_leaves_no_file() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    fs::create_dir(directory.path().join("namespaces")).unwrap();
    let status = execute(&mut provisioner, &order(host(1), create(1))).unwrap_err();
    assert_eq!((status.code(), status.dnr()), (0x006, false));
    assert_eq!((seen(&provisioner, 1), images(directory.path()).len()), (vec![2], 0));
    fs::remove_dir(directory.path().join("namespaces")).unwrap();
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
}

#[test]
fn a_reload_that_revokes_management_preserves_the_files() {
    let directory = tempdir().unwrap();
    let granted = config(directory.path());
    let mut provisioner = provisioner(&granted);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    assert_eq!(ask(&mut provisioner, attach(1, &[1])), Ok(0));
    for (config, served) in [(None, vec![2]), (Some(granted.clone()), vec![1, 2])] {
        let mut next_config = granted.clone();
        if config.is_none() {
            next_config.subsystems[0].managed = None;
        }
        let next = patiently(|| provisioner.next(&next_config).map(Option::unwrap));
        provisioner.attach_new(&next).unwrap();
        provisioner.set_config(next_config);
        provisioner.adopt(next, Vec::new());
        assert_eq!((seen(&provisioner, 1), images(directory.path()).len()), (served, 1));
    }
}

#[test]
fn management_reports_missing_and_pending_namespaces() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let mut provisioner = provisioner(&config);
    assert_eq!(
        [ask(&mut provisioner, create(1)), ask(&mut provisioner, create(1))],
        [Ok(1), Ok(3)]
    );
    let absent = |provisioner: &Provisioner| -> Vec<_> {
        let subsystem = provisioner.registry.subsystem(&NQN.parse().unwrap()).unwrap();
        let management = subsystem.management.clone().unwrap();
        management.absent.iter().map(|each| (each.nsid, each.is_pending)).collect()
    };
    assert_eq!(absent(&provisioner), []);
    let catalog = &provisioner.catalogs[&NQN.parse().unwrap()];
    let image = catalog.image(catalog.record().entries[&3].uuid);
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    let aside = directory.path().join("aside");
    fs::rename(&image, &aside).unwrap();
    let provisioner = self::provisioner(&config);
    assert_eq!(absent(&provisioner), [(3, false)], "its file is gone");
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    // Another process holds its lock for a while.
    fs::rename(&aside, &image).unwrap();
    let lock = fs::File::open(&image).unwrap();
    lock.try_lock().unwrap();
    let stores = DeviceTable::default();
    let next = Transition::open(&config, &stores, &Catalogs::new()).unwrap();
    let mut provisioner = empty_provisioner(&config, stores);
    provisioner.adopt(next, Vec::new());
    assert_eq!(absent(&provisioner), [(3, true)], "somebody else has it");
}

/// Write protection and reservations also apply while the device is missing.
#[test]
fn a_missing_namespace_is_not_deleted_if_protected_or_pending() {
    let (directory, state) = (tempdir().unwrap(), tempdir().unwrap());
    let config = config(directory.path());
    let begin = || provisioner_with(&config, DeviceTable::new(Some(state.path().to_owned()), 0));
    let end = |provisioner: Provisioner| {
        provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
        drop(provisioner);
    };
    let mut provisioner = begin();
    assert_eq!(
        [ask(&mut provisioner, create(1)), ask(&mut provisioner, create(1))],
        [Ok(1), Ok(3)]
    );
    let one = provisioner.stores.store(NQN.parse().unwrap(), 1).unwrap().clone();
    assert_eq!(one.protection.change(WriteProtectState::PERMANENT), Ok(true));
    let catalog = &provisioner.catalogs[&NQN.parse().unwrap()];
    let image = |nsid| catalog.image(catalog.record().entries[&nsid].uuid);
    let [one_image, three_image] = [image(1), image(3)];
    drop(one);
    end(provisioner);

    let aside = directory.path().join("aside");
    fs::rename(&one_image, &aside).unwrap();
    fs::remove_file(&three_image).unwrap();
    let mut provisioner = begin();
    for nsid in [1, NSID_ALL] {
        assert_eq!(
            ask(&mut provisioner, NamespaceRequest::Delete { nsid }),
            Err(0x020),
            "{nsid}: it is protected"
        );
    }
    assert_eq!(
        ask(&mut provisioner, NamespaceRequest::Delete { nsid: 3 }),
        Ok(0),
        "nobody relies on it"
    );
    end(provisioner);

    // It exists, and another process holds its lock.
    fs::rename(&aside, &one_image).unwrap();
    let lock = fs::File::open(&one_image).unwrap();
    lock.try_lock().unwrap();
    let stores = DeviceTable::new(Some(state.path().to_owned()), 0).without_linger();
    let next = Transition::open(&config, &stores, &Catalogs::new()).unwrap();
    let mut provisioner = empty_provisioner(&config, stores);
    provisioner.adopt(next, Vec::new());
    let refused =
        execute(&mut provisioner, &order(host(1), NamespaceRequest::Delete { nsid: NSID_ALL }));
    assert_eq!(refused, Err(Health::NOT_READY), "it is awaited");
    assert!(one_image.exists());
}

/// Host-created namespaces stay where they are, whatever requests are made meanwhile.
#[test]
fn requests_fail_while_a_new_managed_directory_is_pending() {
    let (directory, late) = (tempdir().unwrap(), tempdir().unwrap());
    let old = Config { missing: Missing::Wait, ..config(directory.path()) };
    let mut provisioner = provisioner(&old);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    let new = Config { missing: Missing::Wait, ..config(&late.path().join("managed")) };
    let next = provisioner.next(&new).unwrap().unwrap();
    provisioner.set_config(new);
    provisioner.adopt(next, Vec::new());
    assert_eq!(provisioner.stores.pending().len(), 1);
    for what in [NamespaceRequest::Delete { nsid: NSID_ALL }, create(1)] {
        assert_eq!(execute(&mut provisioner, &order(host(1), what)), Err(FAILED));
    }
    assert_eq!(images(directory.path()).len(), 1);
}

#[test]
fn requests_fail_while_the_managed_directory_hangs() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    let go_on = provisioner.stores.opening().hang_at(directory.path());
    for what in [create(1), NamespaceRequest::Delete { nsid: NSID_ALL }] {
        assert_eq!(execute(&mut provisioner, &order(host(1), what)), Err(FAILED));
    }
    drop(go_on);
    while execute(&mut provisioner, &order(host(1), create(1))) != Ok(1) {
        std::thread::yield_now();
    }
}

#[test]
fn a_private_namespace_is_attached_to_at_most_one_host() {
    let directory = tempdir().unwrap();
    let mut provisioner = provisioner(&config(directory.path()));
    let new = CreateRequest { bytes: MIB, block_size_bytes: 512, ana_group: 1, private: true };
    let nsid = ask(&mut provisioner, NamespaceRequest::Create(new)).unwrap();
    assert_eq!(ask(&mut provisioner, attach(nsid, &[1, 2])), Err(0x119), "two hosts");
    assert_eq!(ask(&mut provisioner, attach(nsid, &[1])), Ok(0));
    assert_eq!(ask(&mut provisioner, attach(nsid, &[1])), Err(0x118));
    assert_eq!(ask(&mut provisioner, attach(nsid, &[2])), Err(0x119));
    assert_eq!(seen(&provisioner, 2), [2]);
    assert_eq!(ask(&mut provisioner, detach(nsid, &[1])), Ok(0));
    assert_eq!(ask(&mut provisioner, attach(nsid, &[2])), Ok(0), "to the next one");
    assert_eq!((seen(&provisioner, 1), seen(&provisioner, 2)), (vec![2], vec![nsid, 2]));
}
