//! What tests on a real cluster use. They run under `tests/ceph/cluster exec`, which names the cluster
//! in the environment: `make test-cluster`.

use std::process::Command;

use crate::ceph::ClusterConfig;

/// Runs a tool of Ceph, as the administrator.
pub(crate) fn tool(command: &str) -> String {
    let words: Vec<&str> = command.split(' ').collect();
    let output = Command::new(words[0]).args(&words[1..]).output().unwrap();
    let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{command}: {said}");
    said
}

/// Sends a signal to a daemon of the cluster.
pub(crate) fn signal(daemon: &str, signal: &str) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/ceph/cluster");
    tool(&format!("{script} kill {daemon} {signal}"));
}

pub(crate) fn cluster(client: &str) -> ClusterConfig {
    ClusterConfig { client: client.to_owned(), ..ClusterConfig::default() }
}
