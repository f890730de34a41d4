//! Which hosts a rollback excludes, on the file system of the tests.

use std::sync::Mutex;

use nvme::Status;
use nvme::fabrics::{CNTLID_DYNAMIC, ConnectData};
use nvme::feature::WriteProtectState;
use tempfile::tempdir;

use crate::blockdev::DeviceId;
use crate::config::NamespaceKind;
use crate::core::registry::testing::visit;
use crate::core::registry::{Admitted, Registry};
use crate::core::sched::range_lock::RangeLock;
use crate::provision::Provisioner;
use crate::provision::format_task::tests::{config, nqn, provisioner};
use crate::provision::snapshot::*;

fn connect(registry: &Registry) -> Result<Admitted, Status> {
    let host = "nqn.2026-11.host:a".parse().unwrap();
    let data = ConnectData::new([9; 16], CNTLID_DYNAMIC, &nqn(), &host);
    registry.connect_admin(&data, &visit()).map_err(|refusal| refusal.status)
}

/// The namespace of a provisioner.
fn served(
    provisioner: &Mutex<Provisioner>,
) -> (Arc<Shared>, Arc<DeviceMonitor>, Arc<MonitoredDevice>) {
    let provisioner = provisioner.lock().unwrap();
    let monitor = Arc::clone(&provisioner.monitor);
    let device = monitor.find(&nqn(), 1).unwrap();
    (Arc::clone(&provisioner.shared), monitor, device)
}

/// A rollback waits for a write of a closed connection, so that a host has time to connect.
#[test]
fn a_host_that_connects_during_a_rollback_is_refused_and_may_retry() {
    let directory = tempdir().unwrap();
    let (provisioner, _) = provisioner(&config(directory.path(), 4096, ""));
    let (shared, monitor, device) = served(&provisioner);
    let file = FileNamespace::new(&shared, nqn(), 1, Arc::clone(&device)).unwrap();
    let snapshot = directory.path().join("missing");
    let block = RangeLock { backing: device.id, at: 0, len: 4096, alone: false, reactor: 0 };
    let late = shared.range_locks.leave(block);
    // Any exclusive lock makes changes of all devices take locks.
    let another = DeviceId(device.id.0 + 1);
    std::thread::scope(|scope| {
        let rolling = scope.spawn(|| file.roll_back(&monitor, &snapshot, false));
        while !shared.range_locks.is_watching(another) {
            assert!(!rolling.is_finished());
            std::thread::yield_now();
        }
        assert_eq!(connect(&shared.registry).unwrap_err(), Status::CONNECT_CONTROLLER_BUSY);
        shared.range_locks.give_up(late);
        let error = rolling.join().unwrap().unwrap_err();
        assert!(error.sentence.contains("missing"), "{error}");
    });
}

/// `nvme disconnect` ends when the controller is shut down, before its connection is closed here.
#[test]
fn a_rollback_is_refused_for_a_host_and_waits_for_one_that_disconnects() {
    let directory = tempdir().unwrap();
    let (provisioner, _) = provisioner(&config(directory.path(), 4096, ""));
    let (shared, monitor, device) = served(&provisioner);
    let file = FileNamespace::new(&shared, nqn(), 1, device).unwrap();
    let snapshot = directory.path().join("missing");
    let roll_back = || file.roll_back(&monitor, &snapshot, false).unwrap_err();
    let host = connect(&shared.registry).unwrap().association;
    host.set_ready(true);
    assert!(roll_back().sentence.starts_with("1 controller of hosts on"));
    host.set_ready(false);
    std::thread::scope(|scope| {
        let rolling = scope.spawn(roll_back);
        sleep(DISCONNECT_POLL_INTERVAL * 3);
        assert!(!rolling.is_finished());
        shared.registry.admin_closed(&host);
        let error = rolling.join().unwrap();
        assert!(error.sentence.contains("missing"), "{error}");
    });
}

/// The new size is that of the file before.
#[test]
fn a_rollback_is_refused_while_the_size_of_the_file_is_being_changed() {
    let directory = tempdir().unwrap();
    let small = config(directory.path(), 4096, "");
    let (provisioner, _) = provisioner(&small);
    let (shared, monitor, device) = served(&provisioner);
    let file = FileNamespace::new(&shared, nqn(), 1, Arc::clone(&device)).unwrap();
    let snapshot = directory.path().join("missing");
    let roll_back = || file.roll_back(&monitor, &snapshot, false).unwrap_err();
    let mut large = small.clone();
    let bytes = device.backing().size_bytes() * 2;
    let path = directory.path().join("disk.img");
    large.subsystems[0].namespaces[0].kind =
        NamespaceKind::File { path: path.clone(), size: Some(bytes) };
    std::fs::File::options().write(true).open(&path).unwrap().set_len(bytes).unwrap();
    let next = || provisioner.lock().unwrap().next(&large).map(Option::unwrap);
    let transition = next().unwrap();
    assert_eq!(roll_back().sentence, "its size is being changed");
    drop(transition);
    assert!(roll_back().sentence.contains("missing"));
    let transition = next().unwrap();
    provisioner.lock().unwrap().adopt(transition, Vec::new());
    assert_eq!(device.backing().size_bytes(), bytes);
    assert!(roll_back().sentence.contains("missing"));
}

/// Whoever protects it, formats it or deletes it does so before or after that.
#[test]
fn a_rollback_excludes_write_protection_and_formats_and_is_refused_after_them() {
    let directory = tempdir().unwrap();
    let (provisioner, _) = provisioner(&config(directory.path(), 4096, ""));
    let (shared, monitor, device) = served(&provisioner);
    let file = FileNamespace::new(&shared, nqn(), 1, device).unwrap();
    let snapshot = directory.path().join("missing");
    let roll_back = || file.roll_back(&monitor, &snapshot, false).unwrap_err().sentence;
    let subsystem = shared.registry.subsystem(&nqn()).unwrap();
    let protection = Arc::clone(&subsystem.namespace(1).unwrap().protection);
    let excluded = file.exclude(false).unwrap();
    assert_eq!(protection.change(WriteProtectState::PROTECTED), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(protection.hold().map(drop), Err(Status::FORMAT_IN_PROGRESS));
    assert_eq!(roll_back(), "a host formats or deletes it, or it is being rolled back");
    drop(excluded);
    assert!(roll_back().contains("missing"));
    for state in [WriteProtectState::PROTECTED, WriteProtectState::PERMANENT] {
        assert_eq!(protection.change(state), Ok(true));
        assert_eq!(roll_back(), "it is write-protected");
    }
}
