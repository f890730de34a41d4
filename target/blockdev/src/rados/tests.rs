//! Tests on objects of a real cluster: `make test-cluster`.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use super::*;
use crate::ceph_client::tests::{cluster, resume, signal, tool};

fn client() -> ObjectClient {
    ObjectClient::open(&cluster("nvmfd"), "rbd", "nvmfd", Duration::from_secs(30)).unwrap()
}

fn object() -> String {
    static OBJECTS: AtomicU32 = AtomicU32::new(0);
    format!("test-{}-{}", std::process::id(), OBJECTS.fetch_add(1, Ordering::Relaxed))
}

fn pairs(pairs: &[(&str, &str)]) -> Vec<(String, Vec<u8>)> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), value.as_bytes().to_vec())).collect()
}

fn compare(pairs: &[(&str, Option<&str>)]) -> Vec<(String, Option<Vec<u8>>)> {
    let bytes = |value: &Option<&str>| value.map(|value| value.as_bytes().to_vec());
    pairs.iter().map(|(key, value)| ((*key).to_owned(), bytes(value))).collect()
}

#[test]
#[ignore = "needs a cluster"]
fn an_update_changes_all_or_nothing() {
    let (client, object) = (client(), object());
    let first = Update { set: pairs(&[("a", "1"), ("b", "2")]), ..Update::default() };
    let missing = Err(UpdateError::Errno(Errno::ENOENT));
    assert_eq!(client.read(&object), Err(Errno::ENOENT));
    assert_eq!(client.update(&object, &first), missing);
    let guarded = Update { compare: compare(&[("a", None)]), ..first.clone() };
    assert_eq!(client.update(&object, &guarded), missing);
    let create = Update { create: true, ..guarded };
    assert_eq!(client.update(&object, &create), Ok(()));
    assert_eq!(client.update(&object, &create), Err(UpdateError::Conflict), "a is there now");
    let both = Update {
        create: false,
        compare: compare(&[("a", Some("1")), ("b", Some("2")), ("c", None)]),
        set: pairs(&[("c", "3"), ("a", "4")]),
        remove: vec!["b".to_owned(), "none".to_owned()],
    };
    let wrong = [
        compare(&[("a", Some("1")), ("b", Some("3"))]),
        compare(&[("a", Some("2")), ("b", Some("2"))]),
        compare(&[("a", Some("1")), ("b", None)]),
        compare(&[("a", Some("1")), ("c", Some("3"))]),
        compare(&[("a", Some("11"))]),
    ];
    for compare in wrong {
        let update = Update { compare, ..both.clone() };
        assert_eq!(client.update(&object, &update), Err(UpdateError::Conflict), "{update:?}");
        assert_eq!(
            client.read(&object).unwrap(),
            pairs(&[("a", "1"), ("b", "2")]).into_iter().collect()
        );
    }
    assert_eq!(client.update(&object, &both), Ok(()));
    assert_eq!(
        client.read(&object).unwrap(),
        pairs(&[("a", "4"), ("c", "3")]).into_iter().collect()
    );
    // An empty value could not be told from a missing key.
    let refused = Err(UpdateError::Errno(Errno::EINVAL));
    let empty = Update { set: pairs(&[("d", "")]), ..Update::default() };
    assert_eq!(client.update(&object, &empty), refused);
    let empty = Update { compare: compare(&[("d", Some(""))]), ..Update::default() };
    assert_eq!(client.update(&object, &empty), refused);
    assert_eq!(client.remove(&object), Ok(()));
    assert_eq!(client.read(&object), Err(Errno::ENOENT));
}

#[test]
#[ignore = "needs a cluster"]
fn concurrent_compare_and_set_updates_lose_no_change() {
    const EACH: u32 = 50;
    let object = object();
    let first = Update { create: true, set: pairs(&[("n", "0")]), ..Update::default() };
    client().update(&object, &first).unwrap();
    let count = |client: ObjectClient| {
        for _ in 0..EACH {
            loop {
                let old = client.read(&object).unwrap()["n"].clone();
                let next = str::from_utf8(&old).unwrap().parse::<u32>().unwrap() + 1;
                let update = Update {
                    compare: vec![("n".to_owned(), Some(old))],
                    set: pairs(&[("n", &next.to_string())]),
                    ..Update::default()
                };
                match client.update(&object, &update) {
                    Ok(()) => break,
                    outcome => assert_eq!(outcome, Err(UpdateError::Conflict)),
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for client in [client(), client()] {
            scope.spawn(|| count(client));
        }
    });
    assert_eq!(client().read(&object).unwrap()["n"], (2 * EACH).to_string().as_bytes());
}

#[test]
#[ignore = "needs a cluster"]
fn reads_of_many_keys_are_consistent_across_replies() {
    let (client, object, done) = (client(), object(), AtomicBool::new(false));
    let generation = |number: u32| {
        let key = |key| (format!("key.{key:04}"), number.to_string().into_bytes());
        Update { create: true, set: (0..2500).map(key).collect(), ..Update::default() }
    };
    client.update(&object, &generation(0)).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for number in 1..=20 {
                client.update(&object, &generation(number)).unwrap();
            }
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let all = client.read(&object).unwrap();
            let first = &all["key.0000"];
            assert_eq!(all.len(), 2500);
            assert!(all.values().all(|value| value == first), "keys of two times");
            let some = client.read_prefixes(&object, &["key.00", "key.12", "none"]).unwrap();
            let first = &some["key.0000"];
            assert_eq!((some.len(), some.contains_key("key.1299")), (200, true));
            assert!(some.values().all(|value| value == first), "keys of two times");
        }
    });
    assert_eq!(client.read(&object).unwrap()["key.2499"], b"20");
}

/// As gateways read the object of their group, which each of them changes twice a second.
#[test]
#[ignore = "needs a cluster"]
fn a_read_of_several_prefixes_ends_while_its_object_changes() {
    let (client, object, done) = (client(), object(), AtomicBool::new(false));
    let number = |number: u32| Update {
        create: true,
        set: pairs(&[("a.0", &number.to_string()), ("g.0", &number.to_string())]),
        ..Update::default()
    };
    client.update(&object, &number(0)).unwrap();
    let mut reads = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            (1..=300).for_each(|each| client.update(&object, &number(each)).unwrap());
            done.store(true, Ordering::Relaxed);
        });
        while !done.load(Ordering::Relaxed) {
            let prefixes = ["a.", "b.", "c.", "d.", "e.", "f.", "g."];
            let all = client.read_prefixes(&object, &prefixes).unwrap();
            assert_eq!((all.len(), &all["a.0"]), (2, &all["g.0"]), "keys of one time");
            reads += 1;
        }
    });
    assert!(reads >= 30, "{reads} reads during 300 changes");
}

#[test]
#[ignore = "needs a cluster"]
fn a_client_on_the_blocklist_changes_nothing() {
    let (one, other, object) = (client(), client(), object());
    let update = Update { create: true, set: pairs(&[("a", "1")]), ..Update::default() };
    other.update(&object, &update).unwrap();
    assert_ne!(one.address(), other.address());
    one.blocklist_add(other.address(), 3600).unwrap();
    assert!(tool("ceph osd blocklist ls").contains(other.address()));
    one.update(&object, &Update { set: pairs(&[("a", "2")]), ..Update::default() }).unwrap();
    assert_eq!(other.update(&object, &update), Err(UpdateError::Errno(Errno::ESHUTDOWN)));
    drop(other);
    assert_eq!(one.read(&object).unwrap()["a"], b"2");
}

#[test]
#[ignore = "needs a cluster"]
fn calls_end_while_an_osd_hangs() {
    let object = object();
    let client = ObjectClient::open(&cluster("nvmfd"), "rbd", "", Duration::from_secs(1)).unwrap();
    let update = Update { create: true, set: pairs(&[("a", "1")]), ..Update::default() };
    client.update(&object, &update).unwrap();
    signal("osd.0", "STOP");
    // The signal may take a moment.
    let read = std::iter::repeat_with(|| client.read(&object)).find_map(Result::err);
    let updated = client.update(&object, &update);
    resume("osd.0");
    assert_eq!(read, Some(Errno::ETIMEDOUT));
    assert_eq!(updated, Err(UpdateError::Errno(Errno::ETIMEDOUT)));
    let deadline = std::time::Instant::now() + Duration::from_secs(60);
    while client.read(&object).is_err() {
        assert!(std::time::Instant::now() < deadline, "the OSD answers again");
    }
}

#[test]
#[ignore = "needs a cluster"]
fn open_errors_include_a_remedy() {
    let open = |client, pool| {
        let opened = ObjectClient::open(&cluster(client), pool, "", Duration::from_secs(5));
        opened.map(drop).expect_err("should be refused").sentence
    };
    assert!(open("nvmfd", "none").contains("ceph osd pool create none"));
    assert!(open("nobody", "rbd").contains("keyring"));
}
