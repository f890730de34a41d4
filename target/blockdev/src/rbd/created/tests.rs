//! Tests on images of a real cluster: `make test-cluster`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crate::ceph_client::tests::{cluster, fill_pool, tool};
use crate::rbd::created::*;
use crate::rbd::image::Image;

const SIZE: u64 = 64 << 20;

fn name() -> ImageName {
    static IMAGES: AtomicU32 = AtomicU32::new(0);
    let number = IMAGES.fetch_add(1, Ordering::Relaxed);
    format!("rbd/made-{}-{number}", std::process::id()).parse().unwrap()
}

fn client(name: &ImageName) -> DataClient {
    DataClient::for_pool(&cluster("nvmfd"), name).unwrap()
}

fn remove(name: &ImageName, origin: &ImageOrigin) -> Result<Removal, String> {
    remove_made(&cluster("nvmfd"), name, origin).map_err(|error| error.sentence)
}

fn origin(identity: ImageIdentity) -> ImageOrigin {
    let cluster = tool("ceph fsid").trim().to_owned();
    ImageOrigin { cluster, size_bytes: SIZE, identity }
}

fn announced() -> ImageOrigin {
    origin(ImageIdentity::Client("192.0.2.1:0/1".to_owned()))
}

fn with_id(id: &str) -> ImageOrigin {
    origin(ImageIdentity::Id(id.to_owned()))
}

fn is_listed(name: &ImageName) -> bool {
    tool("rbd ls rbd").lines().any(|line| line == name.image)
}

#[test]
#[ignore = "needs a cluster"]
fn a_made_image_is_removed_by_its_id_only() {
    let name = name();
    let client = client(&name);
    let id = client.make_image(&name, SIZE).unwrap();
    let info = tool(&format!("rbd info {name}"));
    assert!(info.contains("size 64 MiB") && info.contains(&format!("id: {id}")), "{info}");
    assert!(info.contains("features: layering, exclusive-lock, object-map, fast-diff\n"), "{info}");
    let again = client.make_image(&name, SIZE).unwrap_err();
    assert!(matches!(&again, MakeError::Exists(why) if why.contains("has not made")), "{again}");
    let other = with_id("1234");
    assert_eq!(remove(&name, &other), Ok(Removal::NotOwn));
    assert!(is_listed(&name));
    let own = with_id(&id);
    assert_eq!(remove(&name, &own), Ok(Removal::Removed));
    assert!(!is_listed(&name));
    assert_eq!(remove(&name, &own), Ok(Removal::Absent), "there is none");
}

#[test]
#[ignore = "needs a cluster"]
fn an_image_that_somebody_uses_is_not_removed() {
    let name = name();
    let own = with_id(&client(&name).make_image(&name, SIZE).unwrap());
    let open = Image::open(&cluster("admin"), &name, None, false).unwrap();
    let refused = remove(&name, &own).unwrap_err();
    assert!(refused.contains("a client has it open"), "{refused}");
    drop(open);
    tool(&format!("rbd snap create --no-progress {name}@a"));
    let refused = remove(&name, &own).unwrap_err();
    assert!(refused.contains("it has snapshots"), "{refused}");
    tool(&format!("rbd snap purge --no-progress {name}"));
    assert_eq!(remove(&name, &own), Ok(Removal::Removed));
}

/// Its client was killed before its id was in the record.
#[test]
#[ignore = "needs a cluster"]
fn an_image_without_a_known_id_is_removed_only_if_nobody_has_used_it() {
    let make = || {
        let name = name();
        client(&name).make_image(&name, SIZE).unwrap();
        name
    };
    let unused = make();
    assert_eq!(remove(&unused, &announced()), Ok(Removal::Removed));
    assert!(!is_listed(&unused));
    let [written, snapshot, resized] = [make(), make(), make()];
    let write = "bench --io-type write --io-size 4096 --io-threads 1 --io-total 4096";
    tool(&format!("rbd {write} {written}"));
    tool(&format!("rbd snap create --no-progress {snapshot}@a"));
    tool(&format!("rbd resize --no-progress --size 65M {resized}"));
    for name in [written, snapshot, resized] {
        assert_eq!(remove(&name, &announced()), Ok(Removal::NotOwn), "{name}");
        assert!(is_listed(&name));
    }
}

/// If nothing was ever removed in it, librbd removes nothing, and says that there was nothing to remove.
#[test]
#[ignore = "needs a cluster"]
fn in_a_full_pool_no_image_is_made_and_none_counts_as_removed_that_is_there() {
    for has_trash in [false, true] {
        let [written, unwritten, new] = [name(), name(), name()];
        let client = client(&written);
        let id = client.make_image(&written, SIZE).unwrap();
        client.make_image(&unwritten, SIZE).unwrap();
        let write = "bench --io-type write --io-size 4096 --io-threads 1 --io-total 4096";
        tool(&format!("rbd {write} {written}"));
        tool("rados -p rbd touch rbd_trash");
        fill_pool(true);
        // The first may precede the map that says so.
        let refused = (0..50).find_map(|_| match client.make_image(&new, SIZE) {
            Ok(_) => remove(&new, &announced()).map(|_| None).unwrap(),
            Err(refused) => Some(refused),
        });
        let left = remove(&new, &announced());
        if !has_trash {
            tool("rados -p rbd rm rbd_trash --force-full");
        }
        let all = [(&written, with_id(&id)), (&unwritten, announced())];
        let removed = all.each_ref().map(|(name, origin)| remove(name, origin));
        let are_listed = all.each_ref().map(|(name, _)| is_listed(name));
        fill_pool(false);
        assert!(matches!(refused, Some(MakeError::NoSpace(_))), "{refused:?}");
        assert!((left, are_listed) == (Ok(Removal::Absent), [!has_trash; 2]), "{removed:?}");
        let deadline = Instant::now() + Duration::from_secs(60);
        for ((name, origin), removed) in all.iter().zip(removed) {
            match removed {
                Ok(removed) => assert!(has_trash && removed == Removal::Removed),
                Err(why) => assert!(why.contains("the quota of the pool rbd is used up"), "{why}"),
            }
            while !has_trash && remove(name, origin) != Ok(Removal::Removed) {
                assert!(Instant::now() < deadline, "it is removed then");
            }
        }
    }
}

/// What is left is no image, and would keep another one from getting the name.
#[test]
#[ignore = "needs a cluster"]
fn parts_of_an_image_are_removed() {
    let name = name();
    let client = client(&name);
    let objects = || {
        let all = tool("rados -p rbd ls");
        all.lines().filter(|it| it.contains(&name.image)).map(str::to_owned).collect::<Vec<_>>()
    };
    for is_listed_still in [true, false] {
        let id = client.make_image(&name, SIZE).unwrap();
        tool(&format!("rados -p rbd rm rbd_header.{id}"));
        if !is_listed_still {
            tool(&format!("rados -p rbd rmomapkey rbd_directory name_{}", name.image));
            tool(&format!("rados -p rbd rmomapkey rbd_directory id_{id}"));
        }
        assert_eq!(objects(), [format!("rbd_id.{}", name.image)]);
        let origin = if is_listed_still { announced() } else { with_id(&id) };
        assert_eq!(remove(&name, &origin), Ok(Removal::Removed));
        assert_eq!(objects(), Vec::<String>::new());
        assert!(!is_listed(&name));
    }
    let own = with_id(&client.make_image(&name, SIZE).unwrap());
    assert_eq!(remove(&name, &own), Ok(Removal::Removed));
}

#[test]
#[ignore = "needs a cluster"]
fn an_examined_pool_exists_and_can_be_written() {
    let examine = |client: &str, pool: &str| {
        let image = format!("{pool}/image").parse().unwrap();
        examine_pool(&cluster(client), &image).map_err(|error| error.sentence)
    };
    assert_eq!(examine("nvmfd", "rbd"), Ok(()));
    let missing = examine("nvmfd", "rbd/space").unwrap_err();
    assert!(missing.contains("`rbd namespace create rbd/space`"), "{missing}");
    tool("rbd namespace create rbd/space");
    assert_eq!(examine("nvmfd", "rbd/space"), Ok(()));
    tool("rbd namespace remove rbd/space");
    let missing = examine("nvmfd", "none").unwrap_err();
    assert!(missing.contains("no pool none") && missing.contains("rbd pool init"), "{missing}");
    let directory = std::env::temp_dir().join(format!("nvmfd-made-{}", std::process::id()));
    let keyring = directory.display().to_string();
    let rights = "mon|profile rbd|osd|profile rbd-read-only pool=rbd";
    let mut words = vec!["auth", "get-or-create", "client.reader"];
    words.extend(rights.split('|'));
    words.extend(["-o", &keyring]);
    let made = std::process::Command::new("ceph").args(words).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let reader = ClusterConfig { keyring: Some(directory.clone()), ..cluster("reader") };
    let refused = examine_pool(&reader, &"rbd/image".parse().unwrap()).unwrap_err().sentence;
    assert!(refused.contains("ceph auth caps client.reader"), "{refused}");
    let make = DataClient::for_pool(&reader, &name()).unwrap().make_image(&name(), SIZE);
    let refused = make.unwrap_err().to_string();
    assert!(refused.contains("ceph auth caps client.reader"), "{refused}");
    std::fs::remove_file(directory).unwrap();
}

#[test]
#[ignore = "needs a cluster"]
fn only_the_image_that_was_made_is_opened() {
    let name = name();
    let id = client(&name).make_image(&name, SIZE).unwrap();
    let open = |id: &str, size_bytes| {
        let cluster_id = announced().cluster;
        let made = crate::ceph::CreatedImage { cluster: cluster_id, id: id.to_owned(), size_bytes };
        Image::open(&cluster("nvmfd"), &name, Some(&made), false).map_err(|error| error.sentence)
    };
    drop(open(&id, SIZE).unwrap());
    let other = open("1234", SIZE).unwrap_err();
    assert!(other.contains("is another image") && other.contains("rbd trash ls"), "{other}");
    let short = open(&id, SIZE + 4096).unwrap_err();
    assert!(short.contains("fewer than the"), "{short}");
    assert!(tool(&format!("rbd lock ls {name}")).is_empty(), "its lock was not taken");
}

/// The configuration leads to another one since.
#[test]
#[ignore = "needs a cluster"]
fn an_image_of_another_cluster_is_neither_opened_nor_removed() {
    let name = name();
    let id = client(&name).make_image(&name, SIZE).unwrap();
    let cluster_id = "00000000-0000-0000-0000-000000000000".to_owned();
    for origin in [announced(), with_id(&id)] {
        let other = ImageOrigin { cluster: cluster_id.clone(), ..origin };
        let refused = remove(&name, &other).unwrap_err();
        assert!(refused.contains("was made in the cluster 00000000-"), "{refused}");
    }
    let made = crate::ceph::CreatedImage { cluster: cluster_id, id: id.clone(), size_bytes: SIZE };
    let refused = Image::open(&cluster("nvmfd"), &name, Some(&made), false).unwrap_err().sentence;
    assert!(refused.contains("was made in the cluster 00000000-"), "{refused}");
    assert_eq!(remove(&name, &with_id(&id)), Ok(Removal::Removed));
}

/// A client that was killed has left it in the trash, or had just begun to move it there.
#[test]
#[ignore = "needs a cluster"]
fn an_interrupted_removal_is_completed() {
    for is_moved in [true, false] {
        let name = name();
        let id = client(&name).make_image(&name, SIZE).unwrap();
        let write = "bench --io-type write --io-size 4096 --io-threads 1 --io-total 4096";
        tool(&format!("rbd {write} {name}"));
        match is_moved {
            true => tool(&format!("rbd trash mv {name}")),
            false => tool(&format!("rados -p rbd rm rbd_id.{}", name.image)),
        };
        assert_eq!(remove(&name, &with_id(&id)), Ok(Removal::Removed));
        assert!(!is_listed(&name) && !tool("rbd trash ls --all rbd").contains(&id));
        let objects = tool("rados -p rbd ls");
        assert!(!objects.contains(&id) && !objects.contains(&name.image), "{objects}");
    }
}

/// It cannot be opened, and is an image nevertheless.
#[test]
#[ignore = "needs a cluster"]
fn another_image_without_its_parent_is_not_removed() {
    let (parent, name) = (name(), name());
    let id = client(&parent).make_image(&parent, SIZE).unwrap();
    tool(&format!("rbd snap create --no-progress {parent}@a"));
    tool(&format!("rbd snap protect {parent}@a"));
    tool(&format!("rbd clone {parent}@a {name}"));
    let header = format!("rbd_header.{id}");
    tool(&format!("rados -p rbd cp {header} {header}.kept"));
    tool(&format!("rados -p rbd rm {header}"));
    for origin in [announced(), with_id("1234")] {
        assert_eq!(remove(&name, &origin), Ok(Removal::NotOwn));
        assert!(is_listed(&name));
    }
    tool(&format!("rados -p rbd rm {header}.kept"));
}
