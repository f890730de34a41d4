//! A change that cannot be kept is refused before any host sees anything of it.

use std::fs;
use std::path::PathBuf;

use initiator::Host;
use initiator::host::Range;
use serde_json::{Value, json};

use super::{Daemon, HOST, NQN, host_at, range};

const OTHER: &str = "nqn.2026-11.io.nvmfd:other";

/// How often a host looks whether anything has changed.
const LOOKS: usize = 50;

impl Daemon {
    /// With a namespace 2 that is a file, and a second subsystem.
    fn start_with_two(address: &str) -> Daemon {
        let daemon = Daemon::start(address);
        let image = daemon.directory.path().join("2.img");
        daemon.made(json!({"change": "add_namespace", "subsystem": NQN, "nsid": 2,
                           "settings": {"path": image, "size": "1MiB"}}));
        daemon.made(json!({"change": "add_subsystem", "nqn": OTHER,
                           "settings": {"allow_any_host": true}}));
        daemon.made(json!({"change": "add_namespace", "subsystem": OTHER, "nsid": 1,
                           "settings": {"kind": "ram", "size": "1MiB"}}));
        daemon
    }

    fn state(&self) -> PathBuf {
        self.directory.path().join("state")
    }

    /// Asks for a change that cannot be kept: first because there is no state directory, then
    /// because its file cannot take its name.
    fn refused(&self, change: &Value, as_before: &mut dyn FnMut()) {
        let aside = self.directory.path().join("aside");
        let refused = || {
            let (status, problem) = self.change(change.clone());
            assert_eq!(status, 507, "{problem}");
        };
        fs::rename(self.state(), &aside).unwrap();
        refused();
        as_before();
        fs::rename(&aside, self.state()).unwrap();
        let journal = self.state().join("changes.json");
        fs::rename(&journal, &aside).unwrap();
        fs::create_dir(&journal).unwrap();
        refused();
        as_before();
        fs::remove_dir(&journal).unwrap();
        fs::rename(&aside, &journal).unwrap();
        let kept = fs::read(&journal).unwrap();
        self.made(change.clone());
        assert_ne!(fs::read(&journal).unwrap(), kept, "that one is kept");
    }
}

fn reads(host: &mut Host, from: Range, expected: &[u8]) {
    for _ in 0..LOOKS {
        let mut read = vec![0; expected.len()];
        host.read(from, &mut read).expect("served");
        assert_eq!(read, expected, "what was written");
    }
}

#[test]
fn a_namespace_survives_a_removal_that_cannot_be_persisted() {
    let at = "127.0.46.1";
    let daemon = Daemon::start_with_two(at);
    let mut host = host_at(at, "127.0.46.2", super::nqn()).expect("a connection");
    for nsid in [2, 1] {
        let block = vec![0x50 + nsid as u8; 4096];
        host.write(range(nsid), &block, true).expect("written");
        let remove = json!({"change": "remove_namespace", "subsystem": NQN, "nsid": nsid});
        daemon.refused(&remove, &mut || reads(&mut host, range(nsid), &block));
        assert!(host.read(range(nsid), &mut [0; 4096]).is_err(), "it is removed");
    }
    host.disconnect();
    daemon.stop();
}

#[test]
fn a_subsystem_survives_a_removal_that_cannot_be_persisted() {
    let at = "127.0.46.3";
    let daemon = Daemon::start_with_two(at);
    let other = OTHER.parse().expect("a name");
    let mut host = host_at(at, "127.0.46.4", other).expect("a connection");
    let block = vec![0xC3; 4096];
    host.write(range(1), &block, true).expect("written");
    let remove = json!({"change": "remove_subsystem", "nqn": OTHER});
    daemon.refused(&remove, &mut || reads(&mut host, range(1), &block));
    assert!(host_at(at, "127.0.46.5", other).is_err(), "it is removed");
    daemon.stop();
}

#[test]
fn a_host_stays_connected_if_its_denial_cannot_be_persisted() {
    let at = "127.0.46.6";
    let daemon = Daemon::start_with_two(at);
    let mut host = host_at(at, "127.0.46.7", super::nqn()).expect("a connection");
    let block = vec![0x3C; 4096];
    host.write(range(1), &block, true).expect("written");
    let deny = json!({"change": "deny_host", "subsystem": NQN, "host": HOST});
    daemon.refused(&deny, &mut || reads(&mut host, range(1), &block));
    assert!(host_at(at, "127.0.46.8", super::nqn()).is_err(), "it is denied");
    daemon.stop();
}
