//! Keys that are added, replaced or removed while hosts are connected.

use std::fs::{Permissions, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use nvme::auth::GroupId;
use nvme::fabrics::CNTLID_DYNAMIC;
use nvmfd::config::{AuthenticationConfig, HostConfig};
use nvmfd::core::auth::{Keyring, Keys};
use nvmfd::core::diag::cause::Cause;
use tempfile::tempdir;

use super::{io_queue, visit};
use crate::auth::{HOST, SECRET, authenticate, connect, listen, negotiate, reply, say, world};
use crate::support::{World, connect_data, end_both};

#[test]
fn a_key_added_later_disconnects_unauthenticated_hosts() {
    let (mut world, mut admin, _) = World::with_admin_queue();
    let (directory, nqn) = (tempdir().unwrap(), HOST.parse().unwrap());
    let key_file = directory.path().join("key");
    write(&key_file, SECRET).unwrap();
    set_permissions(&key_file, Permissions::from_mode(0o600)).unwrap();
    let hosts =
        vec![HostConfig { nqn, key_file, controller_key_file: None, hashes: None, groups: None }];
    let config = AuthenticationConfig { hosts, ..AuthenticationConfig::default() };
    world.registry.set_keyring(config.keyring().unwrap());
    admin.tick(&mut world.io());
    assert!(world.fabric.disconnected, "it never proved itself");
    world.end(admin);
}

/// Another secret for the host, or none; the policy stays.
fn replace_key(world: &World, secret: Option<&str>) {
    let policy = nvmfd::core::auth::Policy::clone(&Keyring::default().policy());
    let keys = |text| Keys { host: nvme::auth::Secret::parse(text).unwrap(), controller: None };
    let hosts = secret.map(|text| (HOST.parse().unwrap(), keys(text)));
    world.registry.set_keyring(Keyring::new(hosts, policy));
}

const OTHER_SECRET: &str =
    "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";

#[test]
fn hosts_must_reauthenticate_within_300_s_of_a_key_replacement() {
    for proves in [false, true] {
        let (mut world, _directory) = world(GroupId::NULL);
        let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
        authenticate(&mut world, &mut admin);
        replace_key(&world, Some(OTHER_SECRET));
        admin.tick(&mut world.io());
        if proves {
            // The helper knows the first secret only.
            replace_key(&world, Some(SECRET.trim()));
            authenticate(&mut world, &mut admin);
        }
        world.now += Duration::from_secs(299);
        admin.tick(&mut world.io());
        assert!(!world.fabric.disconnected, "there is time to write the key on the host");
        world.now += Duration::from_secs(1);
        admin.tick(&mut world.io());
        assert_eq!(world.fabric.disconnected, !proves);
        world.end(admin);
    }
}

#[test]
fn a_host_whose_key_is_removed_is_disconnected() {
    let (mut world, _directory) = world(GroupId::NULL);
    let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
    authenticate(&mut world, &mut admin);
    replace_key(&world, None);
    admin.tick(&mut world.io());
    assert!(world.fabric.disconnected, "its key let it in");
    world.end(admin);
}

#[test]
fn connects_of_a_host_whose_key_was_removed_are_refused() {
    let (world, _directory) = world(GroupId::NULL);
    let visit = visit("192.0.2.1", world.now);
    // A second change, of something else, does not make it forgotten.
    for _ in 0..2 {
        replace_key(&world, None);
        let refused = world.registry.connect_admin(&connect_data(CNTLID_DYNAMIC), &visit);
        assert_eq!(refused.unwrap_err().cause, Cause::NoKey);
    }
}

#[test]
fn authentication_begun_with_a_replaced_key_expires_after_300_s() {
    for again in [false, true] {
        let (mut world, _directory) = world(GroupId::NULL);
        let mut admin = connect(&mut world, 0, CNTLID_DYNAMIC);
        if again {
            authenticate(&mut world, &mut admin);
        }
        assert!(say(&mut world, &mut admin, &negotiate()).is_success());
        let challenge = listen(&mut world, &mut admin);
        // The exchange has begun with the key that is replaced now.
        replace_key(&world, Some(OTHER_SECRET));
        assert!(say(&mut world, &mut admin, &reply(&challenge)).is_success());
        listen(&mut world, &mut admin);
        assert!(admin.is_admitted());
        admin.tick(&mut world.io());
        world.now += Duration::from_secs(299);
        admin.tick(&mut world.io());
        assert!(!world.fabric.disconnected, "there is time to write the key on the host");
        world.now += Duration::from_secs(1);
        admin.tick(&mut world.io());
        assert!(world.fabric.disconnected, "again: {again}");
        world.end(admin);
    }
}

#[test]
fn each_queue_reauthenticates_with_the_new_key_or_is_closed() {
    for proves in [false, true] {
        let (mut world, _directory) = world(GroupId::NULL);
        let (mut queue, mut admin, posted) = io_queue(&mut world);
        authenticate(&mut world, &mut queue);
        // The helper knows one secret only: it is the new one, and two replacements ago the old one.
        replace_key(&world, Some(OTHER_SECRET));
        replace_key(&world, Some(SECRET));
        queue.tick(&mut world.io());
        if proves {
            authenticate(&mut world, &mut queue);
        }
        let posted_by_queue = std::mem::replace(&mut world.fabric.posted, posted);
        authenticate(&mut world, &mut admin);
        let posted = std::mem::replace(&mut world.fabric.posted, posted_by_queue);
        world.now += Duration::from_secs(301);
        admin.tick(&mut world.io());
        assert!(!world.fabric.disconnected, "the admin queue has the new key");
        queue.tick(&mut world.io());
        assert_eq!(world.fabric.disconnected, !proves);
        end_both(world, queue, admin, posted);
    }
}
