//! What is durable of a request: at a kill, with a directory that hangs, and after a failed write.

use super::*;
use crate::blockdev::crash_point::testing::{kill_before, killed_process, run_before, run_killed};
use crate::provision::{ns_requests, retry};

/// As a reload does.
fn reload(provisioner: &Mutex<Provisioner>, config: &Config) -> Result<(), String> {
    let mut held = lock(provisioner);
    let next = held.next(config).map_err(|fatal| fatal.0)?.unwrap();
    held.attach_new(&next).unwrap();
    held.set_config(config.clone());
    held.adopt(next, Vec::new());
    Ok(())
}

/// Opening a pipe for writing blocks until there is a reader: so does writing the record into one.
#[test]
fn a_hung_delete_blocks_no_reload_and_its_record_is_restored() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let provisioner = Arc::new(Mutex::new(provisioner(&config)));
    let pipe = directory.path().join("namespaces.new");
    let record = || fs::read(directory.path().join("namespaces")).ok();
    assert_eq!(ns_requests::execute(&provisioner, &order(host(1), create(1))), Ok(1));
    let before = record().unwrap();
    nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
    let own = Arc::clone(&provisioner);
    let deletes = std::thread::spawn(move || {
        ns_requests::execute(&own, &order(host(1), NamespaceRequest::Delete { nsid: 1 }))
    });
    // The thread blocks in the pipe by then, unless it has not begun yet.
    std::thread::sleep(Duration::from_millis(50));
    let mut more = config.clone();
    let like = more.subsystems[0].namespaces[0].clone();
    let uuid = Uuid::from_u128(9);
    more.subsystems[0].namespaces.push(NamespaceConfig { nsid: 9, uuid, ..like });
    reload(&provisioner, &more).unwrap();
    let held = lock(&provisioner);
    assert!(held.registry.subsystem(&NQN.parse().unwrap()).unwrap().namespace(9).is_ok());
    assert!(!deletes.is_finished(), "a reload has not waited for it");
    drop(held);
    // A pipe cannot be synced, neither with the new record nor with the previous one.
    let reader = fs::File::options().read(true).write(true).open(&pipe).unwrap();
    assert_eq!(deletes.join().unwrap(), Err(FAILED));
    drop(reader);
    let mut held = lock(&provisioner);
    assert_eq!(held.unwritten_records().0.len(), 1);
    assert_eq!(found(&held).len(), 1, "it was refused");
    let unwritten_records = held.unwritten_records();
    drop(held);
    fs::remove_file(&pipe).unwrap();
    fs::remove_file(directory.path().join("namespaces")).unwrap();
    retry::rewrite_records(unwritten_records, Instant::now() + Duration::from_secs(60));
    assert_eq!(lock(&provisioner).unwritten_records().0.len(), 0);
    assert_eq!(record(), Some(before), "it is there for the next start");
}

/// Otherwise the next catalog there would complete a delete that was refused.
#[test]
fn a_record_that_cannot_be_restored_is_retried_after_its_catalog_was_closed() {
    for closes_first in [false, true] {
        let directory = tempdir().unwrap();
        let config = config(directory.path());
        let provisioner = Arc::new(Mutex::new(provisioner(&config)));
        let path = |name: &str| directory.path().join(name);
        let (record, beside) = (path("namespaces"), path("namespaces.new"));
        assert_eq!(ns_requests::execute(&provisioner, &order(host(1), create(1))), Ok(1));
        let before = fs::read(&record).unwrap();
        let revoked = {
            let mut revoked = config.clone();
            revoked.subsystems[0].managed = None;
            revoked
        };
        nix::unistd::mkfifo(&beside, nix::sys::stat::Mode::S_IRWXU).unwrap();
        let own = Arc::clone(&provisioner);
        let deletes = std::thread::spawn(move || {
            ns_requests::execute(&own, &order(host(1), NamespaceRequest::Delete { nsid: 1 }))
        });
        // Then it blocks in the pipe, or is about to.
        while lock(&provisioner).catalogs[&NQN.parse().unwrap()].place().is_written() {
            std::thread::yield_now();
        }
        if closes_first {
            reload(&provisioner, &revoked).unwrap();
        }
        // A pipe cannot be synced.
        let reader = fs::File::options().read(true).write(true).open(&beside).unwrap();
        assert_eq!(deletes.join().unwrap(), Err(FAILED));
        drop(reader);
        if !closes_first {
            reload(&provisioner, &revoked).unwrap();
        }
        let unwritten = lock(&provisioner).unwritten_records();
        assert_eq!(unwritten.0.len(), 1);
        assert!(
            reload(&provisioner, &config).unwrap_err().contains("is in use"),
            "until it is restored"
        );
        fs::remove_file(&beside).unwrap();
        fs::remove_file(&record).unwrap();
        let deadline = Instant::now() + Duration::from_secs(60);
        retry::rewrite_records(unwritten, deadline);
        assert_eq!(lock(&provisioner).unwritten_records().0.len(), 0);
        assert_eq!(fs::read(&record).unwrap(), before);
        while reload(&provisioner, &config).is_err() {
            std::thread::yield_now();
        }
        assert_eq!(found(&lock(&provisioner)).len(), 1);
    }
}

/// The file server has executed the rename, and then became unreachable.
#[test]
fn a_delete_that_was_refused_is_not_carried_out_by_the_next_start() {
    let directory = tempdir().unwrap();
    let config = config(directory.path());
    let mut provisioner = provisioner(&config);
    assert_eq!(ask(&mut provisioner, create(1)), Ok(1));
    // Steps of a record: open, write, sync, rename, and the sync of the directory.
    let (path, aside) = (directory.path().to_owned(), directory.path().with_extension("aside"));
    let (from, to) = (path.clone(), aside.clone());
    run_before(5, move || fs::rename(from, to).unwrap());
    let refused = execute(&mut provisioner, &order(host(1), NamespaceRequest::Delete { nsid: 1 }));
    assert_eq!((refused, found(&provisioner).len()), (Err(FAILED), 1));
    fs::rename(&aside, &path).unwrap();
    retry::rewrite_records(
        provisioner.unwritten_records(),
        Instant::now() + Duration::from_secs(60),
    );
    provisioner.monitor.stop(Instant::now() + Duration::from_secs(60));
    drop(provisioner);
    let provisioner = super::provisioner(&config);
    assert_eq!((found(&provisioner).len(), images(&path).len()), (1, 1));
}

/// The requests during the run of the process that is killed.
fn orders() -> Vec<NamespaceRequest> {
    vec![
        create(1),
        attach(1, &[1]),
        create(2),
        attach(3, &[1, 2]),
        detach(3, &[1]),
        NamespaceRequest::Delete { nsid: 1 },
        create(1),
        NamespaceRequest::Delete { nsid: NSID_ALL },
    ]
}

/// Namespaces with their sizes and hosts, independent of the names of their files.
type Found = BTreeMap<u32, (u64, BTreeSet<Nqn>)>;

fn found(provisioner: &Provisioner) -> Found {
    let record = provisioner.catalogs[&NQN.parse().unwrap()].record();
    record.entries.iter().map(|(&nsid, e)| (nsid, (e.bytes, e.hosts.clone()))).collect()
}

/// The process that is killed.
const OWN: &str =
    "provision::ns_requests::tests::durability::child_process_killed_between_two_steps";

/// Not a test by itself. Reports every request that is complete.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_between_two_steps() {
    let (directory, steps) = killed_process();
    let mut provisioner = provisioner(&config(&directory));
    kill_before(steps);
    for (index, what) in orders().into_iter().enumerate() {
        ask(&mut provisioner, what).unwrap();
        println!("done {index}");
    }
}

#[test]
fn a_kill_at_any_step_leaves_a_request_complete_or_undone() {
    let orders = orders();
    let whole = tempdir().unwrap();
    let mut provisioner = provisioner(&config(whole.path()));
    let mut states = vec![found(&provisioner)];
    for what in &orders {
        ask(&mut provisioner, what.clone()).unwrap();
        states.push(found(&provisioner));
    }
    let (mut kills, mut before, mut after) = (0, 0, 0);
    for steps in 1.. {
        let directory = tempdir().unwrap();
        let (done, killed) = run_killed(OWN, directory.path(), steps);
        if !killed {
            assert_eq!(done, orders.len());
            break;
        }
        kills += 1;
        let mut provisioner = super::provisioner(&config(directory.path()));
        let now = found(&provisioner);
        match (now == states[done], now == states[done + 1]) {
            (true, _) => before += 1,
            (_, true) => after += 1,
            _ => panic!("killed at step {steps}, after {done} orders: {now:?}"),
        }
        // There is a file for each namespace, and no other; all of them are served.
        let catalog = &provisioner.catalogs[&NQN.parse().unwrap()];
        let uuids = catalog.record().entries.values().map(|entry| entry.uuid);
        let expected: BTreeSet<PathBuf> = uuids.map(|uuid| catalog.image(uuid)).collect();
        assert_eq!(images(directory.path()).into_iter().collect::<BTreeSet<_>>(), expected);
        assert!(catalog.record().unsettled.is_empty());
        let subsystem = provisioner.registry.subsystem(&NQN.parse().unwrap()).unwrap();
        assert_eq!(subsystem.namespaces.len(), now.len() + 1, "with the one that is declared");
        assert_eq!(ask(&mut provisioner, NamespaceRequest::Delete { nsid: NSID_ALL }), Ok(0));
    }
    println!("{kills} kills: {before} found the namespaces before, {after} those after");
    assert!(kills >= 50 && before > 0 && after > 0, "{kills} kills, {before} + {after}");
}
