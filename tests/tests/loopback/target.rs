//! A real target on an address of its own in 127.0.0.0/8, and the ways to it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

use initiator::{Host, HostOptions, Options, Provider};
use nvme::Nqn;
use nvmfd::config::Config;
use nvmfd::core::diag::cause::Cause;
use nvmfd::{AppliedChange, RunningTarget};

pub(crate) const SUBSYSTEM: &str = "nqn.2026-11.io.nvmfd:disk1";
pub(crate) const HOST: &str =
    "nqn.2014-08.org.nvmexpress:uuid:2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";
pub(crate) const HOSTID: &str = "2d1c4be8-7a80-4c0f-9d68-0d6c2f3b5a11";

/// Blocks of 4096 bytes of the namespace in a file.
pub(crate) const BLOCKS: u64 = 16384;

/// A running target. It stops when it is dropped.
pub(crate) struct TestTarget {
    target: Option<RunningTarget>,
    directory: tempfile::TempDir,
    /// Its address, and that of the hosts which name one.
    net: [u8; 2],
}

impl TestTarget {
    pub(crate) fn start() -> TestTarget {
        TestTarget::start_with("")
    }

    /// With `more` in its configuration.
    pub(crate) fn start_with(more: &str) -> TestTarget {
        static NEXT: AtomicU8 = AtomicU8::new(0);
        // Tests are processes of their own with some runners, and threads with others.
        // Processes side by side have numbers close to each other, so a second target is far away.
        let [high, low] = (std::process::id() as u16).to_be_bytes();
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let net = [64 + high.wrapping_add(number.wrapping_mul(61)) % 128, low];
        let directory = tempfile::tempdir_in(place()).unwrap();
        let mut target = TestTarget { target: None, directory, net };
        let config = target.config(more);
        target.target = Some(RunningTarget::start(config).expect("the target starts"));
        target
    }

    pub(crate) fn address(&self) -> String {
        let [a, b] = self.net;
        format!("127.{a}.{b}.1")
    }

    /// Where its hosts connect from: with the address that the route would take, tests that run
    /// side by side would be in each other's way.
    pub(crate) fn source(&self) -> String {
        let [a, b] = self.net;
        format!("127.{a}.{b}.2")
    }

    pub(crate) fn setup(&self) -> HostOptions {
        let source = self.source().parse().expect("an address");
        HostOptions { provider: Provider::Soft, source: Some(source), ..HostOptions::default() }
    }

    pub(crate) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The text of a configuration: a file with blocks of 4096 bytes and a memory with blocks of
    /// 512, with `more` behind them.
    pub(crate) fn config_text(&self, more: &str) -> String {
        let path = self.directory.path().join("disk1.img");
        format!(
            r#"
provider = "soft"
state_directory = "{}"
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
[[subsystem.namespace]]
nsid = 2
kind = "ram"
size = "1MiB"
block_size = 512
{more}
"#,
            self.directory.path().display(),
            self.address(),
            path.display()
        )
    }

    fn config(&self, more: &str) -> Config {
        Config::parse(&self.config_text(more)).expect("a configuration")
    }

    /// As a reload: the same, and `more`.
    pub(crate) fn apply(&mut self, more: &str) {
        let config = self.config(more);
        self.target.as_mut().expect("running").apply(config).expect("applied");
    }

    /// As a change by the management interface: the same, and `more`, when it is kept.
    pub(crate) fn change(
        &mut self,
        more: &str,
        persist: impl FnOnce() -> Result<(), String>,
    ) -> Result<AppliedChange, String> {
        let config = self.config(more);
        let target = self.target.as_mut().expect("running");
        target.change(config, persist).map_err(|refused| refused.to_string())
    }

    /// Stops it and starts it again, over the same stores and with the same memory of before, and
    /// with `more`.
    pub(crate) fn restart(&mut self, more: &str) {
        self.restart_after(more, || {});
    }

    /// The same, with something else in between.
    pub(crate) fn restart_after(&mut self, more: &str, between: impl FnOnce()) {
        self.take().stop(Instant::now() + Duration::from_secs(60));
        between();
        self.target =
            Some(RunningTarget::start(self.config(more)).expect("the target starts again"));
    }

    /// What is said of each time that this happened.
    pub(crate) fn told(&self, cause: Cause) -> Vec<String> {
        let records = self.target.as_ref().expect("running").view().shared.disconnects.list(None);
        let of = records.iter().filter(|record| record.why.cause == cause);
        of.map(|record| record.why.to_string()).collect()
    }

    /// What is configured and not there yet.
    pub(crate) fn pending(&self) -> Vec<String> {
        self.target.as_ref().expect("running").pulse().pending()
    }

    /// The causes for which hosts were refused or dropped, the latest first, and which hosts.
    pub(crate) fn causes(&self) -> Vec<(Cause, Option<Nqn>)> {
        let records = self.target.as_ref().expect("running").view().shared.disconnects.list(None);
        records.iter().map(|record| (record.why.cause, record.why.host)).collect()
    }

    /// What may be seen of it.
    pub(crate) fn view(&self) -> nvmfd::TargetView {
        self.target.as_ref().expect("running").view()
    }

    /// What stops it, to be run whenever.
    pub(crate) fn take(&mut self) -> RunningTarget {
        self.target.take().expect("running")
    }

    pub(crate) fn options(&self, io_queues: u16) -> Options {
        let to = format!("{}:4420", self.address()).parse().unwrap();
        let nqn = |name| Nqn::new(name).unwrap();
        Options { io_queues, ..Options::new(to, nqn(SUBSYSTEM), nqn(HOST), [7; 16]) }
    }

    pub(crate) fn connect(&self, io_queues: u16) -> Host {
        Host::connect(self.options(io_queues), self.setup()).expect("connected")
    }

    /// The same from another address than [`TestTarget::source`], for a second host at a time.
    pub(crate) fn connect_elsewhere(&self, io_queues: u16) -> Host {
        let source = self.address().trim_end_matches('1').to_owned() + "10";
        let source = Some(source.parse().expect("an address"));
        let setup = HostOptions { source, ..self.setup() };
        Host::connect(self.options(io_queues), setup).expect("connected")
    }

    /// Runs `nvmf COMMAND` towards this target and its subsystem, as an admitted host.
    pub(crate) fn nvmf(&self, command: &str, args: &[&str]) -> Ran {
        self.nvmf_bare(command, &[&["-n", SUBSYSTEM, "-q", HOST], args].concat())
    }

    /// Runs `nvmf COMMAND` towards this target.
    pub(crate) fn nvmf_bare(&self, command: &str, args: &[&str]) -> Ran {
        let address = self.address();
        let target = ["-t", "rdma", "-a", &address, "-s", "4420", "-I", HOSTID];
        let source = self.source();
        let source = match args.contains(&"-w") {
            true => vec![],
            false => vec!["-w", source.as_str()],
        };
        run(&[&[command][..], &target, &source, &["--provider", "soft"], args].concat())
    }
}

impl Drop for TestTarget {
    fn drop(&mut self) {
        if let Some(target) = self.target.take() {
            target.stop(Instant::now() + Duration::from_secs(10));
        }
    }
}

/// What a run of `nvmf` left.
pub(crate) struct Ran(Output);

impl Ran {
    pub(crate) fn code(&self) -> i32 {
        self.0.status.code().expect("an exit code")
    }

    pub(crate) fn out(&self) -> &[u8] {
        &self.0.stdout
    }

    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.0.stdout).expect("text")
    }

    pub(crate) fn error(&self) -> &str {
        std::str::from_utf8(&self.0.stderr).expect("text")
    }

    /// It went well.
    pub(crate) fn good(self) -> Ran {
        assert_eq!(self.code(), 0, "{}", self.error());
        self
    }

    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.0.stdout).expect("JSON")
    }
}

pub(crate) fn run(args: &[&str]) -> Ran {
    Ran(Command::new(nvmf()).args(args).output().expect("nvmf runs"))
}

/// Waits for a run that was started.
pub(crate) fn ended(child: Child) -> Ran {
    Ran(child.wait_with_output().expect("nvmf runs"))
}

/// The tool, built with this very profile.
pub(crate) fn nvmf() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("initiator", "nvmf"))
}

/// The daemon, likewise.
pub(crate) fn nvmfd() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| built("nvmfd", "nvmfd"))
}

/// With `TEST_PROGRAMS`, that of this directory: `make unit` has built it there with the tests, and
/// cargo would build all of it again, with the features that one package alone needs.
fn built(package: &str, binary: &str) -> PathBuf {
    if let Some(directory) = std::env::var_os("TEST_PROGRAMS") {
        return Path::new(&directory).join(binary);
    }
    let this = std::env::current_exe().expect("this program");
    let profile = this.ancestors().nth(2).expect("a directory of the profile");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--package", package, "--bin", binary]);
    cargo.current_dir(env!("CARGO_MANIFEST_DIR"));
    cargo.arg("--target-dir").arg(profile.parent().expect("the build directory"));
    if !cfg!(feature = "verbs") {
        cargo.arg("--no-default-features");
    }
    if profile.ends_with("release") {
        cargo.arg("--release");
    }
    assert!(cargo.status().expect("cargo").success(), "{binary} builds");
    profile.join(binary)
}

/// Where O_DIRECT works: not on every temporary file system.
fn place() -> PathBuf {
    PathBuf::from(env!("CARGO_TARGET_TMPDIR"))
}
