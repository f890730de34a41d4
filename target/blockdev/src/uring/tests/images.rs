//! Tests of the ring on images of a real cluster: `make test-cluster`.

use nvme::status::Status;
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};

use super::{Bench, SIZE, STORE, act, agree, every_operation};
use crate::ceph::{ClusterConfig, ImageName};
use crate::ceph_client::tests::{cluster, fill_pool, resume, signal, tool};
use crate::rbd::{DataClient, ImageError, ImageSnapshot, examine};
use crate::uring::*;
use crate::{BackingConfig, BackingKind, Condition, Health, OpenError};

/// A new image of [`SIZE`] bytes.
fn image() -> ImageName {
    static IMAGES: AtomicU32 = AtomicU32::new(0);
    let number = IMAGES.fetch_add(1, Ordering::Relaxed);
    let name = format!("rbd/test-{}-{number}", std::process::id());
    tool(&format!("rbd create --size {SIZE}B {name}"));
    name.parse().unwrap()
}

fn config(image: &ImageName, cluster: &ClusterConfig, block: u32) -> BackingConfig {
    let kind = BackingKind::Rbd { image: image.clone(), cluster: cluster.clone(), made: None };
    BackingConfig { kind, block_size_bytes: block, read_only: false, shared: false }
}

fn open(image: &ImageName, cluster: &ClusterConfig) -> Result<Arc<BackingDevice>, OpenError> {
    BackingDevice::open(&config(image, cluster, 4096)).map(Arc::new)
}

fn with_image(ops: u32) -> (Bench, Arc<BackingDevice>, ImageName) {
    let (mut bench, image) = (Bench::new(ops), image());
    let backing = open(&image, &cluster("nvmfd")).unwrap();
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    (bench, backing, image)
}

fn says(outcome: Result<Arc<BackingDevice>, OpenError>, parts: &[&str]) {
    let said = outcome.expect_err("should be refused").sentence;
    parts.iter().for_each(|part| assert!(said.contains(part), "{said:?} lacks {part:?}"));
}

#[test]
#[ignore = "needs a cluster"]
fn every_operation_works_on_an_rbd_image() {
    for block in [512, 4096] {
        let (mut bench, image) = (Bench::new(8), image());
        let backing =
            Arc::new(BackingDevice::open(&config(&image, &cluster("nvmfd"), block)).unwrap());
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        every_operation(&mut bench, block);
        assert!(backing.can_discard() && !backing.has_volatile_cache());
        assert_eq!((backing.health().failures(), bench.ring.stats().again), (0, 0));
        assert_eq!(backing.geometry().discard_granularity_bytes, 64 << 10);
        let outside = Err(Status::LBA_OUT_OF_RANGE.with_dnr());
        assert_eq!(bench.write(SIZE - u64::from(block), 2 * block, 1, false), outside);
        assert_eq!(backing.inspect(true), Condition::Sound);
    }
}

#[test]
#[ignore = "needs a cluster"]
fn rbd_image_contents_match_a_model_after_any_operations() {
    let mut runner = TestRunner::new(Config::with_cases(6));
    let acts = (proptest::collection::vec(act(), 1..60), any::<bool>());
    let outcome = runner.run(&acts, |(acts, large)| {
        let (mut bench, image) = (Bench::new(8), image());
        let block = if large { 4096 } else { 512 };
        let config = config(&image, &cluster("nvmfd"), block);
        let backing = Arc::new(BackingDevice::open(&config).unwrap());
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        agree(&mut bench, &backing, acts, block).map(drop)
    });
    outcome.unwrap();
}

#[test]
#[ignore = "needs a cluster"]
fn image_operations_wait_for_a_slot_and_ring_drop_waits_for_them() {
    let (mut bench, backing, name) = with_image(3);
    for n in 0..200u64 {
        let from = bench.filled(4096, n as u8);
        bench.submit(IoRequest::Write { from, at: n * 4096, fua: n % 2 == 0 });
    }
    for done in bench.await_done(200) {
        assert_eq!(done.outcome, Ok(()));
        bench.pool.give(done.buf.unwrap());
    }
    for n in 0..200u64 {
        assert_eq!(bench.read(n * 4096, 4096), Ok(vec![n as u8; 4096]));
    }
    for n in 0..3u64 {
        let from = bench.filled(1 << 16, 0x33);
        bench.submit(IoRequest::Write { from, at: n << 16, fua: false });
    }
    bench.ring.submit();
    let region = Arc::downgrade(bench.pool.region());
    let Bench { ring, pool, .. } = bench;
    drop((ring, pool));
    assert!(region.upgrade().is_none(), "the memory is let go");
    drop(backing);
    let backing = open(&name, &cluster("nvmfd")).unwrap();
    let mut bench = Bench::new(8);
    bench.ring.attach(STORE, backing).unwrap();
    assert_eq!(bench.read(2 << 16, 1 << 16), Ok(vec![0x33; 1 << 16]));
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_is_opened_once_and_open_errors_name_the_cause() {
    let (bench, backing, name) = with_image(8);
    let owner = examine(&cluster("admin"), &name, false).unwrap().owner.expect("it is locked");
    says(open(&name, &cluster("admin")), &["in use", &owner, "exclusive lock"]);
    says(open(&name, &cluster("nvmfd")), &["in use", "another namespace"]);
    drop((bench, backing));
    drop(open(&name, &cluster("admin")).unwrap());
    says(
        open(&"rbd/none".parse().unwrap(), &cluster("nvmfd")),
        &["no image rbd/none", "rbd create"],
    );
    says(open(&"none/a".parse().unwrap(), &cluster("nvmfd")), &["no pool none"]);
    says(open(&name, &cluster("nobody")), &["client.nobody", "keyring"]);
    tool(&format!("rbd config image set {name} rbd_cache true"));
    says(open(&name, &cluster("nvmfd")), &["rbd_cache = true", "rbd config image rm"]);
    tool(&format!("rbd config image rm {name} rbd_cache"));
    tool(&format!("rbd feature disable {name} exclusive-lock,object-map,fast-diff"));
    says(open(&name, &cluster("nvmfd")), &["exclusive-lock", "rbd feature enable"]);
}

/// Another process takes an image, writes its first block, and ends without an orderly end.
fn take_and_abort(name: &ImageName, cluster: &ClusterConfig) {
    let addresses = cluster.addresses.as_ref().unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args([
            "--ignored",
            "--exact",
            "uring::tests::images::a_process_writes_to_an_image_and_aborts",
            "--nocapture",
        ])
        .env(LEFTOVER, format!("{name} {}", addresses.display()))
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    assert_eq!(child.wait().unwrap().signal(), Some(libc::SIGABRT));
}

const LEFTOVER: &str = "NVMFD_TEST_LEFTOVER";

#[test]
#[ignore = "needs a cluster"]
fn the_lock_of_a_killed_process_of_the_same_daemon_is_broken() {
    let (name, dir) = (image(), crate::testing::directory());
    let addresses = dir.path().join("ceph-clients");
    let own = ClusterConfig { addresses: Some(addresses), ..cluster("nvmfd") };
    take_and_abort(&name, &own);
    let owner = examine(&cluster("admin"), &name, false).unwrap().owner.expect("a leftover");
    let mut bench = Bench::new(8);
    bench.ring.attach(STORE, open(&name, &own).unwrap()).unwrap();
    assert_eq!(bench.read(0, 4096), Ok(vec![0x55; 4096]));
    assert_eq!(bench.write(0, 4096, 0x66, false), Ok(()));
    assert!(tool("ceph osd blocklist ls").contains(&owner));
}

#[test]
#[ignore = "needs a cluster"]
fn the_lock_of_another_killed_daemon_is_broken_after_watch_timeout() {
    tool("ceph config set osd osd_client_watch_timeout 5");
    let (name, dir) = (image(), crate::testing::directory());
    let other = ClusterConfig { addresses: Some(dir.path().join("a")), ..cluster("nvmfd") };
    take_and_abort(&name, &other);
    let owner = examine(&cluster("admin"), &name, false).unwrap().owner.expect("a leftover");
    says(open(&name, &cluster("admin")), &["in use", &owner]);
    let deadline = Instant::now() + Duration::from_secs(60);
    let backing = loop {
        match open(&name, &cluster("admin")) {
            Ok(backing) => break backing,
            Err(why) => assert!(Instant::now() < deadline && why.may_pass, "{why}"),
        }
    };
    tool("ceph config rm osd osd_client_watch_timeout");
    assert!(tool("ceph osd blocklist ls").contains(&owner), "what it has sent may arrive late");
    let mut bench = Bench::new(8);
    bench.ring.attach(STORE, backing).unwrap();
    assert_eq!(bench.read(0, 4096), Ok(vec![0x55; 4096]));
}

#[test]
#[ignore = "the process of the_lock_of_a_killed_process_of_the_same_daemon_is_broken"]
fn a_process_writes_to_an_image_and_aborts() {
    let Ok(leftover) = std::env::var(LEFTOVER) else { return };
    let (name, addresses) = leftover.split_once(' ').unwrap();
    let own = ClusterConfig { addresses: Some(addresses.into()), ..cluster("nvmfd") };
    let mut bench = Bench::new(8);
    bench.ring.attach(STORE, open(&name.parse().unwrap(), &own).unwrap()).unwrap();
    assert_eq!(bench.write(0, 4096, 0x55, false), Ok(()));
    std::process::abort();
}

/// Another process with a copy of the state directory takes the image, as a daemon does that
/// believes the former one killed.
#[test]
#[ignore = "needs a cluster"]
fn a_blocklisted_client_fails_io_and_reopens_only_with_the_lock() {
    let (name, dir) = (image(), crate::testing::directory());
    let own = ClusterConfig { addresses: Some(dir.path().join("a")), ..cluster("nvmfd") };
    let mut bench = Bench::new(8);
    let backing = open(&name, &own).unwrap();
    bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    assert_eq!(bench.write(4096, 4096, 0x11, false), Ok(()));
    take_and_abort(&name, &own);
    assert_eq!(bench.write(0, 4096, 0x22, false), Err(Health::NOT_READY));
    assert_eq!(bench.read(0, 4096), Err(Health::NOT_READY));
    assert_eq!(backing.inspect(false), Condition::Failing(libc::ESHUTDOWN));
    let config = config(&name, &own, 4096);
    let fresh = Arc::new(backing.open_again(&config, false).unwrap());
    bench.ring.attach(STORE, Arc::clone(&fresh)).unwrap();
    assert_eq!(bench.read(0, 4096), Ok(vec![0x55; 4096]), "nothing was written late");
    assert_eq!(bench.write(0, 4096, 0x33, false), Ok(()));
    says(open(&name, &cluster("admin")), &["in use"]);
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_grows_online_and_a_shrunk_image_is_not_served() {
    let (mut bench, backing, name) = with_image(8);
    let kind = config(&name, &cluster("nvmfd"), 4096).kind;
    assert_eq!(backing.next_size(&kind), Ok(None));
    tool(&format!("rbd resize --size {}B {name}", 2 * SIZE));
    assert_eq!((backing.has_grown(), backing.inspect(false)), (false, Condition::Sound));
    assert!(backing.has_grown());
    assert_eq!(backing.next_size(&kind), Ok(Some(2 * SIZE)));
    assert_eq!(bench.write(SIZE, 4096, 1, false), Err(Status::LBA_OUT_OF_RANGE.with_dnr()));
    backing.resize(2 * SIZE);
    assert!(!backing.has_grown());
    assert_eq!(bench.write(2 * SIZE - 4096, 4096, 1, false), Ok(()));
    tool(&format!("rbd resize --allow-shrink --size {SIZE}B {name}"));
    assert_eq!(backing.next_size(&kind), Ok(None), "never by itself");
    assert_eq!(backing.inspect(false), Condition::Shortened(SIZE));
}

#[test]
#[ignore = "needs a cluster"]
fn a_protected_snapshot_is_served_read_only_as_it_was() {
    let (mut bench, _, name) = with_image(8);
    assert_eq!(bench.write(0, 4096, 0x11, false), Ok(()));
    let snapshot: ImageName = format!("{name}@monday").parse().unwrap();
    tool(&format!("rbd snap create --no-progress {snapshot}"));
    assert_eq!(bench.write(0, 4096, 0x22, false), Ok(()));
    let config = BackingConfig { read_only: true, ..config(&snapshot, &cluster("nvmfd"), 4096) };
    let open = || BackingDevice::open(&config).map(Arc::new);
    says(open(), &["could be removed", &format!("rbd snap protect {snapshot}")]);
    tool(&format!("rbd snap protect {snapshot}"));
    let backing = open().unwrap();
    let mut backup = Bench::new(8);
    backup.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    assert!(backing.is_read_only());
    assert_eq!((backing.size_bytes(), backing.inspect(true)), (SIZE, Condition::Sound));
    assert_eq!(backup.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(bench.read(0, 4096), Ok(vec![0x22; 4096]));
    // The same name, another snapshot.
    tool(&format!("rbd snap unprotect {snapshot}"));
    for act in ["rm --no-progress", "create --no-progress", "protect"] {
        tool(&format!("rbd snap {act} {snapshot}"));
    }
    assert!(matches!(backing.inspect(true), Condition::Failing(_) | Condition::Shortened(_)));
    let said = backing.open_again(&config, false).unwrap_err().sentence;
    assert!(said.contains("another device now"), "{said}");
    let missing = format!("{name}@none").parse().unwrap();
    let missing =
        BackingConfig { read_only: true, ..self::config(&missing, &cluster("nvmfd"), 4096) };
    says(BackingDevice::open(&missing).map(Arc::new), &["no snapshot", "@none"]);
}

#[test]
#[ignore = "needs a cluster"]
fn image_snapshots_are_taken_and_removed_by_the_owner_of_the_lock_alone() {
    let ([(mut bench, owner), (_, other)], name) = with_two_gateways();
    owner.acquire(&[]).unwrap();
    let [owner, other] = [owner, other].map(|it| Arc::clone(it.image().unwrap()));
    let refused = |outcome: Result<(), ImageError>, parts: &[&str]| {
        let said = outcome.expect_err("should be refused").sentence;
        parts.iter().for_each(|part| assert!(said.contains(part), "{said:?} lacks {part:?}"));
    };
    assert_eq!(bench.write(0, 4096, 0x11, false), Ok(()));
    refused(other.create_snapshot("a"), &["not hold the lock of", &name.to_string()]);
    assert_eq!(owner.create_snapshot("a"), Ok(()));
    assert_eq!(bench.write(0, 4096, 0x22, false), Ok(()));
    refused(owner.create_snapshot("a"), &["has a snapshot a already"]);
    refused(other.protect_snapshot("a"), &["not hold the lock"]);
    assert_eq!((owner.protect_snapshot("a"), owner.protect_snapshot("a")), (Ok(()), Ok(())));
    let clone: ImageName = format!("{name}-clone").parse().unwrap();
    refused(other.clone_snapshot("b", &clone), &["no snapshot", "@b"]);
    assert_eq!(other.clone_snapshot("a", &clone), Ok(()));
    refused(owner.clone_snapshot("a", &clone), &[&format!("an image {clone} already")]);
    let elsewhere = "none/clone".parse().unwrap();
    refused(owner.clone_snapshot("a", &elsewhere), &["no such pool"]);
    for image in [&owner, &other] {
        let all = image.snapshots().unwrap();
        let [ImageSnapshot { name, size_bytes: SIZE, is_protected: true, clones, .. }] = &all[..]
        else {
            panic!("{all:?}")
        };
        assert_eq!((name.as_str(), clones), ("a", &Ok(vec![clone.to_string()])));
    }
    let mut copy = Bench::new(8);
    copy.ring.attach(STORE, open(&clone, &cluster("admin")).unwrap()).unwrap();
    assert_eq!(copy.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(copy.write(0, 4096, 0x33, false), Ok(()));
    assert_eq!(bench.read(0, 4096), Ok(vec![0x22; 4096]));
    drop(copy);
    refused(other.check_removal("a"), &["not hold the lock"]);
    refused(other.remove_snapshot("a"), &["not hold the lock"]);
    refused(owner.check_removal("a"), &["@a has clones", &clone.to_string()]);
    refused(owner.check_removal("b"), &["no snapshot", "@b"]);
    tool(&format!("rbd rm --no-progress {clone}"));
    assert_eq!(owner.check_removal("a"), Ok(()));
    assert_eq!(owner.snapshots().unwrap().len(), 1);
    assert_eq!(owner.remove_snapshot("a"), Ok(()));
    assert_eq!(owner.snapshots(), Ok(vec![]));
}

#[test]
#[ignore = "needs a cluster"]
fn writes_to_a_full_pool_fail_with_capacity_exceeded_and_reads_work() {
    let (mut bench, image) = (Bench::new(8), image());
    tool(&format!("rbd resize --size 64M {image}"));
    bench.ring.attach(STORE, open(&image, &cluster("nvmfd")).unwrap()).unwrap();
    assert_eq!(bench.write(0, 1 << 16, 0x44, false), Ok(()));
    fill_pool(true);
    // The first may precede the map that says so; a write that needs no space succeeds.
    let refused =
        (1..16).map(|object| bench.write(object << 22, 4096, 0x45, false)).find(Result::is_err);
    let read = bench.read(0, 4096);
    fill_pool(false);
    assert_eq!(refused, Some(Err(Status::CAPACITY_EXCEEDED.with_dnr())));
    assert_eq!(read, Ok(vec![0x44; 4096]));
    let deadline = Instant::now() + Duration::from_secs(60);
    while bench.write(15 << 22, 4096, 0x46, false).is_err() {
        assert!(Instant::now() < deadline, "writes succeed again");
    }
}

#[test]
#[ignore = "needs a cluster"]
fn a_hanging_cluster_delays_no_other_device_and_its_io_resumes() {
    let (mut bench, _, _) = with_image(2048);
    let config = BackingConfig {
        kind: BackingKind::Ram { size: SIZE },
        block_size_bytes: 4096,
        read_only: false,
        shared: false,
    };
    let ram = DeviceId(2);
    bench.ring.attach(ram, Arc::new(BackingDevice::open(&config).unwrap())).unwrap();
    signal("osd.0", "STOP");
    for n in 0..800u64 {
        let from = bench.filled(4096, 0x77);
        bench.submit(IoRequest::Write { from, at: n % 256 * 4096, fua: false });
    }
    bench.ring.submit();
    let from = bench.filled(4096, 0x78);
    BlockDevice::submit(&mut bench.ring, ram, 1, IoRequest::Write { from, at: 0, fua: true });
    let done = bench.await_done(1);
    resume("osd.0");
    assert_eq!((done.len(), done[0].tag, done[0].outcome), (1, 1, Ok(())));
    done.into_iter().for_each(|done| bench.pool.give(done.buf.unwrap()));
    for done in bench.await_done(800) {
        assert_eq!(done.outcome, Ok(()));
        bench.pool.give(done.buf.unwrap());
    }
    assert_eq!(bench.read(0, 4096), Ok(vec![0x77; 4096]));
}

fn standby(client: &str) -> ClusterConfig {
    ClusterConfig { standby: true, ..cluster(client) }
}

/// An image that two gateways have in standby.
fn with_two_gateways() -> ([(Bench, Arc<BackingDevice>); 2], ImageName) {
    let name = image();
    let gateway = |client| {
        let (mut bench, backing) = (Bench::new(64), open(&name, &standby(client)).unwrap());
        bench.ring.attach(STORE, Arc::clone(&backing)).unwrap();
        (bench, backing)
    };
    (["nvmfd", "admin"].map(gateway), name)
}

fn address(client: &str) -> String {
    DataClient::connect(&standby(client)).unwrap().address().to_owned()
}

const ELSEWHERE: Status = Status::ANA_INACCESSIBLE;

#[test]
#[ignore = "needs a cluster"]
fn a_standby_image_accepts_no_io_and_takes_no_lock() {
    let (mut bench, owner, name) = with_image(8);
    assert_eq!(bench.write(0, 4096, 0x11, false), Ok(()));
    let held = examine(&cluster("admin"), &name, false).unwrap().owner;
    let mut other = Bench::new(8);
    let backing = open(&name, &standby("admin")).unwrap();
    other.ring.attach(STORE, Arc::clone(&backing)).unwrap();
    assert_eq!((backing.size_bytes(), backing.inspect(true)), (SIZE, Condition::Sound));
    for _ in 0..2 {
        assert_eq!(other.write(0, 4096, 0x22, false), Err(ELSEWHERE));
        assert_eq!(other.read(0, 4096), Err(ELSEWHERE));
        assert_eq!(other.run(IoRequest::Flush), Err(ELSEWHERE));
        let said = backing.acquire(&["127.0.0.1:0/1".to_owned()]).unwrap_err().sentence;
        assert!(said.contains("in use") && said.contains(held.as_ref().unwrap()), "{said}");
    }
    assert_eq!(backing.health().failures(), 0);
    assert_eq!(examine(&cluster("admin"), &name, false).unwrap().owner, held);
    assert_eq!(bench.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(owner.inspect(true), Condition::Sound);
    drop((bench, owner));
    // What would be written below the check of health does not reach the image either.
    backing.health().set_standby(false);
    assert_eq!(other.write(0, 4096, 0x22, false), Err(ELSEWHERE));
    assert_eq!(examine(&cluster("admin"), &name, false).unwrap().owner, None);
    backing.acquire(&[]).unwrap();
    assert_eq!(other.read(0, 4096), Ok(vec![0x11; 4096]));
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_is_acquired_from_a_fenced_owner_and_returned_later() {
    let ([(mut one, old), (mut other, new)], name) = with_two_gateways();
    old.acquire(&[]).unwrap();
    assert_eq!(one.write(0, 4096, 0x11, false), Ok(()));
    new.acquire(&[]).expect_err("its owner is not named");
    let former = address("nvmfd");
    new.acquire(std::slice::from_ref(&former)).unwrap();
    assert!(tool("ceph osd blocklist ls").contains(&former));
    assert_eq!(other.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(one.write(0, 4096, 0x22, false), Err(ELSEWHERE));
    assert_eq!(one.read(0, 4096), Err(ELSEWHERE));
    assert!(old.is_fenced_standby() && old.health().is_standby());
    assert!(old.acquire(&[]).unwrap_err().sentence.contains("excluded"));
    let fresh = old.open_again(&config(&name, &standby("nvmfd"), 4096), false).unwrap();
    let fresh = Arc::new(fresh);
    one.ring.attach(STORE, Arc::clone(&fresh)).unwrap();
    assert_ne!(address("nvmfd"), former);
    assert_eq!(one.write(0, 4096, 0x22, false), Err(ELSEWHERE));
    fresh.acquire(&[former]).expect_err("its owner is not named");
    new.release().unwrap();
    new.release().expect("again");
    assert_eq!(other.write(0, 4096, 0x33, false), Err(ELSEWHERE));
    fresh.acquire(&[]).unwrap();
    assert_eq!(one.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(one.write(0, 4096, 0x22, false), Ok(()));
}

/// An image that its former owner had opened first, and that no gateway had when it was replaced.
#[test]
#[ignore = "needs a cluster"]
fn a_standby_image_is_acquired_from_an_owner_that_exists_no_more() {
    let ([(mut one, old), (mut other, new)], _) = with_two_gateways();
    old.acquire(&[]).unwrap();
    assert_eq!(one.write(0, 4096, 0x11, false), Ok(()));
    new.acquire(&[]).expect_err("its owner has it open");
    let former = address("nvmfd");
    tool(&format!("ceph osd blocklist add {former}"));
    let deadline = Instant::now() + Duration::from_secs(60);
    while let Err(error) = new.acquire(&[]) {
        assert!(Instant::now() < deadline, "{error}");
        std::thread::sleep(Duration::from_millis(100));
    }
    assert_eq!(other.read(0, 4096), Ok(vec![0x11; 4096]));
    assert_eq!(one.write(0, 4096, 0x22, false), Err(ELSEWHERE));
}

#[test]
#[ignore = "needs a cluster"]
fn only_writes_started_before_an_image_release_are_executed() {
    let ([(mut one, old), (mut other, new)], _) = with_two_gateways();
    for round in 1..=5u8 {
        old.acquire(&[]).unwrap();
        for block in 0..200u64 {
            let from = one.filled(4096, round);
            one.submit(IoRequest::Write { from, at: block * 4096, fua: false });
        }
        // At most 64 start. librbd refuses those that it has only queued when the lock is released.
        one.ring.submit();
        old.release().unwrap();
        new.acquire(&[]).unwrap();
        let mut landed = 0;
        for done in one.await_done(200) {
            assert!(matches!(done.outcome, Ok(()) | Err(ELSEWHERE)), "{:?}", done.outcome);
            landed += u64::from(done.outcome.is_ok());
            one.pool.give(done.buf.unwrap());
        }
        let found = |other: &mut Bench, block: u64| other.read(block * 4096, 4096).unwrap();
        let written = (0..200).filter(|block| found(&mut other, *block) == [round; 4096]);
        assert_eq!(written.count() as u64, landed);
        assert!((1..=64).contains(&landed), "{landed}");
        new.release().unwrap();
    }
}

#[test]
#[ignore = "needs a cluster"]
fn an_abandoned_client_rejects_new_io_and_completes_started_io() {
    let ([(mut one, old), _], _) = with_two_gateways();
    old.acquire(&[]).unwrap();
    signal("osd.0", "STOP");
    let from = one.filled(4096, 0x44);
    one.submit(IoRequest::Write { from, at: 0, fua: false });
    one.ring.submit();
    DataClient::connect(&standby("nvmfd")).unwrap().abandon();
    let from = one.filled(4096, 0x55);
    one.submit(IoRequest::Write { from, at: 4096, fua: false });
    let refused = one.await_done(1).pop().unwrap();
    resume("osd.0");
    assert_eq!(refused.outcome, Err(ELSEWHERE));
    let landed = one.await_done(1).pop().unwrap();
    assert_eq!(landed.outcome, Ok(()));
    assert!(landed.buf.is_some() && refused.buf.is_some() && old.is_fenced_standby());
}
