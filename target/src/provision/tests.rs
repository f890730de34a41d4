//! What a start restores, on the file system of the tests.

use tempfile::tempdir;

use crate::blockdev::Inode;
use crate::provision::format_task::tests::{config, provisioner};
use crate::state::namespace_state::NamespaceFile;
use crate::state::trust::{LostWrites, ReplacedFile};

/// They fail a flush only once another file is trusted, and those of an earlier failure anyway.
#[test]
fn hosts_of_a_replaced_file_are_restored_with_unflushed_writes() {
    let directory = tempdir().unwrap();
    let config = config(directory.path(), 4096, "");
    let uuid = config.subsystems[0].namespaces[0].uuid;
    let hosts = [1, 2].map(|id| ("nqn.2026-11.host:a".parse().unwrap(), [id; 16]));
    let file = NamespaceFile::new(directory.path(), uuid);
    let lost = LostWrites { hosts: hosts[..1].to_vec(), ..LostWrites::default() };
    file.replace(Some(&lost), None).unwrap();
    let inode = Inode { device: 1, number: 2, born_ns: 3 };
    file.replace(Some(&ReplacedFile { inode, hosts: hosts.to_vec() }), None).unwrap();
    let (provisioner, _) = provisioner(&config);
    let registry = &provisioner.lock().unwrap().registry;
    let unreported = |is_trusted| registry.unreported_hosts(uuid.into_bytes(), is_trusted);
    assert_eq!(unreported(true), Some(hosts[..1].to_vec()));
    assert_eq!(unreported(false), Some(hosts.to_vec()));
}
