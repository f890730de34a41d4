//! A real target on an address of its own in 127.0.0.0/8, and the way to it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use initiator::{Host, Options, Provider, Setup};
use nvme::Nqn;
use nvmfd::Target;
use nvmfd::config::Config;

/// A running target. It stops when it is dropped.
pub(crate) struct TestTarget {
    target: Option<Target>,
    folder: tempfile::TempDir,
    /// Third byte of the addresses: the target is 1, hosts are from 2 on.
    net: u8,
}

pub(crate) const SUBSYSTEM: &str = "nqn.2026-11.io.nvmfd:disk1";
pub(crate) const HOST: &str =
    "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";

impl TestTarget {
    pub(crate) fn start(name: &str) -> TestTarget {
        static NEXT: AtomicU8 = AtomicU8::new(1);
        // Another program of tests may run at the same time.
        let net =
            (std::process::id() as u8).wrapping_mul(31) ^ NEXT.fetch_add(1, Ordering::Relaxed);
        let folder = tempfile::Builder::new().prefix(name).tempdir_in(place()).unwrap();
        let mut target = TestTarget { target: None, folder, net };
        let config = target.config("");
        target.target = Some(Target::start(config).expect("the target starts"));
        target
    }

    pub(crate) fn address(&self) -> String {
        format!("127.91.{}.1", self.net)
    }

    /// The configuration, with `more` behind it.
    pub(crate) fn config(&self, more: &str) -> Config {
        let path = self.folder.path().join("disk1.img");
        let text = format!(
            r#"
provider = "soft"
[[listener]]
address = "{}"
port = 4420
[[subsystem]]
nqn = "{SUBSYSTEM}"
hosts = ["{HOST}"]
[[subsystem.namespace]]
nsid = 1
path = "{}"
size = "64MiB"
block_size = 4096
{more}
"#,
            self.address(),
            path.display()
        );
        Config::parse(&text).expect("a configuration")
    }

    pub(crate) fn options(&self, io_queues: u16) -> Options {
        let to = format!("{}:4420", self.address()).parse().unwrap();
        let nqn = |name| Nqn::new(name).unwrap();
        Options { io_queues, ..Options::new(to, nqn(SUBSYSTEM), nqn(HOST), [7; 16]) }
    }

    pub(crate) fn connect(&self, io_queues: u16) -> Host {
        let setup = Setup { provider: Provider::Soft, ..Setup::default() };
        Host::connect(self.options(io_queues), setup).expect("connected")
    }
}

impl Drop for TestTarget {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            target.stop(Instant::now() + Duration::from_secs(10));
        }
    }
}

/// Where O_DIRECT works: not on every temporary file system.
fn place() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}
