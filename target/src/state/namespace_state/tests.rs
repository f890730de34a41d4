use std::fs;

use nvme::Status;
use nvme::feature::WriteProtectState;
use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, ChangePersistence, Register, RegisterAction, RegisterKeys,
    Release, ReleaseAction, ReleaseKey, ReservationType,
};
use proptest::prelude::*;
use tempfile::tempdir;

use crate::blockdev::Inode;
use crate::blockdev::crash_point::testing::{kill_before, killed_process, run_before, run_killed};
use crate::blockdev::durable::testing::calls;
use crate::blockdev::monitor::{Distrust, TrustRecords};
use crate::core::subsystem::bad_blocks::{BadBlocks, Change};
use crate::core::subsystem::reservation::{HostId, Order, Reservation, State};
use crate::core::subsystem::write_protect::Protection;
use crate::state::block_size;
use crate::state::namespace_state::*;
use crate::state::record::tests::damage;
use crate::state::trust::{DeviceTrust, LostWrites, ReplacedFile};

const UUID: [u8; 16] = [0x11; 16];

fn some_state() -> State {
    State {
        generation: 7,
        rtype: ReservationType::WRITE_EXCLUSIVE_REGISTRANTS,
        holder: Some([0xA; 16]),
        registrants: [([0xA; 16], 0xA1), ([0; 16], 1), ([0xFF; 16], u64::MAX)].into(),
        persists: true,
    }
}

fn file(directory: &Path) -> NamespaceFile {
    NamespaceFile::new(directory, Uuid::from_bytes(UUID))
}

fn names(directory: &Path) -> Vec<String> {
    let mut names = StateDir(directory).names().unwrap();
    names.sort();
    names
}

const NAME: &str = "11111111-1111-1111-1111-111111111111.namespace";

#[test]
fn sections_are_added_and_removed_independently() {
    let directory = tempdir().unwrap();
    let file = file(directory.path());
    let (reserved, protected) = (some_state(), WriteProtectState::PERMANENT);
    let load = || (file.load::<State>().unwrap(), file.load::<WriteProtectState>().unwrap());
    assert_eq!(load(), (None, None));
    file.replace::<State>(None, None).unwrap();
    assert!(names(directory.path()).is_empty(), "nothing to persist, nothing persisted");
    file.replace(Some(&reserved), None).unwrap();
    file.replace(Some(&protected), None).unwrap();
    assert_eq!(names(directory.path()), [NAME]);
    assert_eq!(load(), (Some(reserved.clone()), Some(protected)));
    let text = fs::read_to_string(file.path()).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let first = ["nvmfd namespace 1", "[protection]", "state 3", "[reservation]", "generation 7"];
    assert_eq!(lines[..5], first);
    let registrant = "registrant 00000000000000000000000000000000 0000000000000001";
    assert_eq!((lines[7], lines.len()), (registrant, 11));
    file.replace::<State>(None, Some(&reserved)).unwrap();
    assert_eq!(load(), (None, Some(protected)));
    file.replace::<WriteProtectState>(None, Some(&protected)).unwrap();
    assert!(names(directory.path()).is_empty());
}

#[test]
fn a_file_that_was_replaced_is_relied_on_under_its_own_uuid_only() {
    let directory = tempdir().unwrap();
    let file = file(directory.path());
    let inode = Inode { device: 1, number: 2, born_ns: 3 };
    let hosts = vec![("nqn.2026-11.host:a".parse().unwrap(), [1; 16])];
    file.replace(Some(&ReplacedFile { inode, hosts: hosts.clone() }), None).unwrap();
    assert!(file.relied_on().is_empty());
    // A failure of which this host has to learn.
    file.replace(Some(&LostWrites { hosts, ..LostWrites::default() }), None).unwrap();
    assert_eq!(file.relied_on().len(), 1);
}

#[test]
fn concurrent_changes_of_two_sections_are_both_persisted() {
    let directory = tempdir().unwrap();
    let file = file(directory.path());
    let lost = |n: u16| LostWrites {
        failed_sync: Some(Status::from_field((0x280 + n) << 1)),
        ..LostWrites::default()
    };
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for generation in 1..=50 {
                file.replace(Some(&State { generation, ..some_state() }), None).unwrap();
            }
        });
        for n in 1..=50 {
            file.replace(Some(&lost(n)), None).unwrap();
        }
    });
    assert_eq!(file.load::<State>().unwrap().unwrap().generation, 50);
    assert_eq!(file.load().unwrap(), Some(lost(50)));
}

#[test]
fn a_damaged_file_is_refused_and_affects_no_other_namespace() {
    let directory = tempdir().unwrap();
    file(directory.path()).replace(Some(&some_state()), None).unwrap();
    damage(directory.path(), || file(directory.path()).load::<WriteProtectState>().err());
    fs::write(file(directory.path()).path(), "nvmfd namespace 1\n").unwrap();
    let other = NamespaceFile::new(directory.path(), Uuid::nil());
    other.replace(Some(&some_state()), None).unwrap();
    assert_eq!(other.load(), Ok(Some(some_state())));
    let bad = file(directory.path());
    assert!(bad.replace(Some(&some_state()), None).is_err(), "it is not written over");
    assert_eq!(bad.relied_on(), ["what cannot be read"]);
    assert_eq!(NamespaceFile::all(directory.path()).unwrap(), [other, bad]);
    let nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
    let kept = Reservation::kept(nqn, 1, self::file(directory.path()));
    assert!(kept.is_err(), "a namespace is not served without its reservation");
}

#[test]
fn a_damaged_file_is_refused_by_each_object_that_has_a_section_in_it() {
    let nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
    let protection = |at: &Path| Protection::kept(nqn, 1, file(at));
    let bad_blocks = |at: &Path| BadBlocks::kept(file(at));
    let format = |at: &Path| block_size::open((nqn, 1), at, UUID, Path::new("/srv/a"), 4096);
    let directory = tempdir().unwrap();
    protection(directory.path()).unwrap().change(WriteProtectState::PROTECTED).unwrap();
    damage(directory.path(), || protection(directory.path()).err());
    let directory = tempdir().unwrap();
    let mark = Change::Mark { at: 4096, len: 512, most_bytes: 1 << 20 };
    bad_blocks(directory.path()).unwrap().change(&mark).unwrap();
    damage(directory.path(), || bad_blocks(directory.path()).err());
    let directory = tempdir().unwrap();
    format(directory.path()).unwrap().choose(4096).unwrap();
    damage(directory.path(), || format(directory.path()).err());
}

#[test]
fn inconsistent_reservation_states_are_rejected() {
    let good = some_state();
    let bad = [
        State { holder: Some([5; 16]), ..good.clone() },
        State { rtype: ReservationType(7), ..good.clone() },
        State { rtype: ReservationType::NONE, ..good.clone() },
        State { holder: None, ..good.clone() },
        State { rtype: ReservationType::WRITE_EXCLUSIVE_ALL, ..good.clone() },
        State { registrants: [([0xA; 16], 0)].into(), ..good.clone() },
    ];
    let directory = tempdir().unwrap();
    let file = file(directory.path());
    for state in bad {
        file.replace(Some(&state), None).unwrap();
        assert!(file.load::<State>().unwrap_err().contains("contradicts itself"), "{state:?}");
    }
    file.replace(Some(&good), None).unwrap();
    assert_eq!(file.load(), Ok(Some(good)));
    for body in ["", "[other]\nstate 1\n", "state 1\n[protection]\n"] {
        assert!(Sections::parse(body).is_none(), "{body:?}");
    }
}

#[test]
fn a_failed_replace_restores_the_previous_file_if_possible() {
    let directory = tempdir().unwrap();
    let file = file(directory.path());
    let (before, after) = (WriteProtectState::PROTECTED, WriteProtectState::PERMANENT);
    file.replace(Some(&before), None).unwrap();
    let path = directory.path().to_owned();
    let away = path.with_extension("away");
    for comes_back in [true, false] {
        // After the rename: the directory cannot be synced.
        let (here, there) = (path.clone(), away.clone());
        run_before(5, move || {
            fs::rename(&here, &there).unwrap();
            if comes_back {
                run_before(1, move || fs::rename(there, here).unwrap());
            }
        });
        assert!(file.replace(Some(&after), Some(&before)).is_err());
        if !comes_back {
            fs::rename(&away, &path).unwrap();
        }
        let left = if comes_back { before } else { after };
        assert_eq!(file.load(), Ok(Some(left)), "put back, where that can be");
    }
    file.replace(Some(&before), Some(&before)).unwrap();
    assert_eq!(file.load(), Ok(Some(before)));
}

/// Files of a namespace as version 43fd4d4 wrote them, and of a failed flush as the next one did.
const EARLIER: [(&str, &[u8]); 5] = [
    ("format", include_bytes!("earlier/UUID.format")),
    ("protection", include_bytes!("earlier/UUID.protection")),
    ("reservation", include_bytes!("earlier/UUID.reservation")),
    ("trust", include_bytes!("earlier/UUID.trust")),
    ("uncorrectable", include_bytes!("earlier/UUID.uncorrectable")),
];

fn earlier(directory: &Path) {
    for (end, content) in EARLIER {
        fs::write(directory.join(NAME.replace("namespace", end)), content).unwrap();
    }
}

type Everything = (State, u8, Option<u32>, Vec<Option<u64>>, Distrust);

/// The complete state, as the served objects have it.
fn found(directory: &Path) -> Result<Everything, String> {
    let nqn = "nqn.2026-11.io.nvmfd:a".parse().unwrap();
    let bad_blocks = BadBlocks::kept(file(directory))?;
    let first = [(0, 1 << 20), (0, 4096), (8192, 4096), (12288, 53248), (12288, 1 << 20)];
    Ok((
        Reservation::kept(nqn, 1, file(directory))?.state(),
        Protection::kept(nqn, 1, file(directory))?.state().0,
        block_size::open((nqn, 1), directory, UUID, Path::new("/srv/one.img"), 4096)?
            .block_size_bytes(),
        first.iter().map(|(at, len)| bad_blocks.first(*at, *len)).collect(),
        DeviceTrust::new(Some(directory.to_owned())).of(Uuid::from_bytes(UUID)),
    ))
}

fn expected() -> Everything {
    let state =
        State { registrants: [([0xA; 16], 0xA1), ([0xB; 16], u64::MAX)].into(), ..some_state() };
    let first = vec![Some(4096), None, Some(8192), None, Some(65536)];
    let distrust =
        Distrust { failed_sync: Some(Status::WRITE_FAULT), shortened: true, replaced: None };
    (state, WriteProtectState::PERMANENT.0, Some(512), first, distrust)
}

#[test]
fn files_of_earlier_versions_are_converted_before_the_first_change() {
    let directory = tempdir().unwrap();
    earlier(directory.path());
    let before = names(directory.path());
    assert_eq!((found(directory.path()), before.len()), (Ok(expected()), 5));
    assert_eq!(names(directory.path()), before, "whoever only reads changes nothing");
    // A directory in place of the temporary file of the conversion.
    let beside = file(directory.path()).path().with_extension("namespace.new");
    fs::create_dir(&beside).unwrap();
    assert!(file(directory.path()).replace::<WriteProtectState>(None, None).is_err());
    fs::remove_dir(&beside).unwrap();
    assert_eq!((found(directory.path()), names(directory.path())), (Ok(expected()), before));
    let Distrust { failed_sync, shortened, .. } = expected().4;
    let lost = LostWrites { failed_sync, shortened, hosts: Vec::new() };
    let (changed, did) = calls(|| file(directory.path()).replace(Some(&lost), None));
    changed.unwrap();
    let durable =
        [format!("write {NAME}.new"), format!("sync {NAME}.new"), format!("rename to {NAME}")];
    assert_eq!(did[..3], durable);
    let synced = &did[3];
    assert!(synced.starts_with("sync directory"));
    for removed in did[4..14].as_chunks::<2>().0 {
        assert!(removed[0].starts_with("remove ") && removed[1] == *synced, "{removed:?}");
    }
    assert_eq!((&did[14..17], &did[17..]), (&durable[..], std::slice::from_ref(synced)));
    assert_eq!(
        (found(directory.path()), names(directory.path())),
        (Ok(expected()), vec![NAME.into()])
    );
    // A remaining earlier file has the same content; a different one was created by hand.
    earlier(directory.path());
    assert_eq!(found(directory.path()), Ok(expected()));
    file(directory.path()).replace::<WriteProtectState>(None, None).unwrap();
    assert_eq!(names(directory.path()), [NAME]);
    earlier(directory.path());
    let said = found(directory.path()).unwrap_err();
    assert!(said.contains(NAME) && said.contains(".protection") && said.contains("remove"));
    file(directory.path()).remove().unwrap();
    assert!(names(directory.path()).is_empty());
}

#[test]
fn a_damaged_file_of_an_earlier_version_is_an_error() {
    for (end, _) in EARLIER {
        let directory = tempdir().unwrap();
        earlier(directory.path());
        let path = directory.path().join(NAME.replace("namespace", end));
        let good = fs::read(&path).unwrap();
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            for bad in [&bad[..], &good[..at]] {
                fs::write(&path, bad).unwrap();
                let said = found(directory.path()).unwrap_err();
                assert!(said.contains("restore it, or remove it"), "{end} {at}: {said}");
            }
        }
        fs::write(&path, good).unwrap();
        assert_eq!(found(directory.path()), Ok(expected()));
    }
}

/// The process that is killed while it converts.
const CONVERTING: &str = "state::namespace_state::tests::child_process_killed_during_a_conversion";

/// Not a test by itself.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_during_a_conversion() {
    let (directory, steps) = killed_process();
    kill_before(steps);
    file(&directory).replace(Some(&WriteProtectState::PROTECTED), None).unwrap();
    println!("done");
}

#[test]
fn a_kill_during_a_conversion_leaves_the_old_or_the_new_state() {
    let after =
        (expected().0, WriteProtectState::PROTECTED.0, expected().2, expected().3, expected().4);
    let (mut kills, mut changed) = (0, 0);
    for steps in 1.. {
        let directory = tempdir().unwrap();
        earlier(directory.path());
        let (_, killed) = run_killed(CONVERTING, directory.path(), steps);
        let state = found(directory.path()).unwrap();
        changed += u32::from(state == after);
        assert!(state == after || state == expected(), "killed at step {steps}: {state:?}");
        assert!(
            state == expected() || names(directory.path()).len() <= 2,
            "what changes is converted"
        );
        if !killed {
            assert_eq!(state, after);
            break;
        }
        kills += 1;
        // The next start continues.
        file(directory.path()).replace::<State>(None, None).unwrap();
        assert_eq!(
            found(directory.path()).unwrap(),
            (State::default(), state.1, state.2, state.3, state.4)
        );
    }
    assert!(kills >= 20 && changed > 1, "{kills} kills, {changed} found the change");
}

/// The requests during the run of the process that is killed: each sets or ends persistence.
fn orders() -> Vec<(HostId, Order)> {
    let keep = Register(0).with_persistence(ChangePersistence::SET);
    let mut orders = vec![([1; 16], Order::Register(keep, RegisterKeys { current: 0, new: 1 }))];
    for n in 2..6u8 {
        let keys = RegisterKeys { current: 0, new: n.into() };
        orders.push(([n; 16], Order::Register(Register(0), keys)));
    }
    let take = |rtype: u8| Acquire(0).with_rtype(ReservationType(rtype));
    let let_go = |rtype: u8| Release(0).with_rtype(ReservationType(rtype));
    for rtype in 1..=6 {
        let keys = AcquireKeys { current: 1, preempt: 0 };
        orders.push(([1; 16], Order::Acquire(take(rtype), keys)));
        orders.push(([1; 16], Order::Release(let_go(rtype), ReleaseKey { current: 1 })));
    }
    let first = AcquireKeys { current: 2, preempt: 0 };
    orders.push(([2; 16], Order::Acquire(take(1), first)));
    let preempt = take(4).with_action(AcquireAction::PREEMPT);
    orders.push(([3; 16], Order::Acquire(preempt, AcquireKeys { current: 3, preempt: 2 })));
    let replace = Register(0).with_action(RegisterAction::REPLACE);
    orders.push(([4; 16], Order::Register(replace, RegisterKeys { current: 4, new: 44 })));
    let drop = Register(0).with_action(RegisterAction::UNREGISTER);
    orders.push(([5; 16], Order::Register(drop, RegisterKeys { current: 5, new: 0 })));
    let clear = let_go(0).with_action(ReleaseAction::CLEAR);
    orders.push(([1; 16], Order::Release(clear, ReleaseKey { current: 1 })));
    orders.push(([1; 16], Order::Persist(false)));
    orders
}

fn reservation(directory: &Path) -> Result<std::sync::Arc<Reservation>, String> {
    Reservation::kept("nqn.2026-11.io.nvmfd:a".parse().unwrap(), 1, file(directory))
}

/// The process that is killed.
const OWN: &str = "state::namespace_state::tests::child_process_killed_between_two_steps";

/// Not a test by itself. Reports every request that is complete.
#[test]
#[ignore = "run by another test, in a process that is killed"]
fn child_process_killed_between_two_steps() {
    let (directory, steps) = killed_process();
    let reservation = reservation(&directory).unwrap();
    kill_before(steps);
    for (index, (host, order)) in orders().iter().enumerate() {
        reservation.carry_out(host, order).unwrap();
        println!("done {index}");
    }
}

#[test]
fn a_kill_at_any_step_leaves_the_old_or_the_new_reservation_state() {
    let orders = orders();
    // All states that exist, as a restart finds them.
    let mut states = vec![State::default()];
    let mut state = State::default();
    for (host, order) in &orders {
        state.apply(host, order, true).unwrap();
        states.push(if state.persists { state.clone() } else { State::default() });
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
        let found = reservation(directory.path()).expect("readable after a kill").state();
        match (found == states[done], found == states[done + 1]) {
            (true, _) => before += 1,
            (_, true) => after += 1,
            _ => panic!("killed at step {steps}, after {done} orders: {found:?}"),
        }
        // Remaining temporary files have no effect.
        file(directory.path()).replace(Some(&some_state()), None).unwrap();
        assert_eq!(reservation(directory.path()).unwrap().state(), some_state());
    }
    println!("{kills} kills: {before} found the state before, {after} the state after");
    assert!(kills >= 50 && before > 0 && after > 0, "{kills} kills, {before} + {after}");
}

proptest! {
    #[test]
    fn arbitrary_section_text_causes_no_panic(lines in "((\\[reservation\\]|\\[trust\\]|type|holder|registrant|generation)[ 0-9a-f]{0,40}\n){0,5}") {
        let _ = (Sections::parse(&lines), State::parse(&lines));
    }
}

/// A full file system: nothing has changed, and a failure to restore that would mislead.
#[test]
fn a_state_whose_write_fails_is_not_written_back() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};

    use crate::blockdev::durable::{Step, observe};

    let directory = tempdir().unwrap();
    let file = file(directory.path());
    let (old, new) = (WriteProtectState::PROTECTED, WriteProtectState::PERMANENT);
    file.replace(Some(&old), None).unwrap();
    let writes = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&writes);
    observe(Some(Box::new(move |step| match step {
        Step::Write(..) => {
            count.fetch_add(1, Ordering::Relaxed);
            Err(io::ErrorKind::StorageFull.into())
        }
        _ => Ok(()),
    })));
    let replaced = file.replace(Some(&new), Some(&old));
    observe(None);
    assert_eq!(replaced.unwrap_err().kind(), io::ErrorKind::StorageFull);
    assert_eq!(writes.load(Ordering::Relaxed), 1);
    assert_eq!(file.load(), Ok(Some(old)));
}
