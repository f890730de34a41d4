//! What tests on a real cluster use. They run under `tests/ceph/cluster exec`, which names the cluster
//! in the environment: `make test-cluster`.

use std::process::Command;
use std::time::{Duration, Instant};

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

/// Ends the hang of a daemon that was sent STOP.
pub(crate) fn resume(daemon: &str) {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/ceph/cluster");
    tool(&format!("{script} resume {daemon}"));
}

/// Uses up the quota of the pool, or removes that. Quotas need a manager.
pub(crate) fn fill_pool(full: bool) {
    tool(&format!("ceph osd pool set-quota rbd max_bytes {}", u8::from(full)));
    let deadline = Instant::now() + Duration::from_secs(60);
    while tool("ceph osd pool ls detail").contains("full_quota") != full {
        assert!(Instant::now() < deadline, "the monitor learns of it");
    }
}

pub(crate) fn cluster(client: &str) -> ClusterConfig {
    ClusterConfig { client: client.to_owned(), ..ClusterConfig::default() }
}
