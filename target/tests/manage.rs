//! The daemon and its tool, as processes: what `nvmfctl` prints, and its exit codes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

const NQN: &str = "nqn.2026-11.io.nvmfd:manage";

/// A daemon that serves.
struct Daemon {
    process: Child,
    folder: TempDir,
}

impl Daemon {
    /// One at an address of its own.
    fn start(address: &str) -> Daemon {
        let folder = tempfile::tempdir().unwrap();
        let text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[management]\nsocket = {:?}\n\
             [memory]\nreceives = 512\ndata = \"4MiB\"\n\
             [[listener]]\naddress = \"{address}\"\n\
             [[subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \"1GiB\"\n",
            folder.path(),
            folder.path().join("s"),
        );
        fs::write(folder.path().join("nvmfd.toml"), text).unwrap();
        Daemon::start_in(folder)
    }

    fn start_in(folder: TempDir) -> Daemon {
        let mut process = Command::new(env!("CARGO_BIN_EXE_nvmfd"))
            .arg("--config")
            .arg(folder.path().join("nvmfd.toml"))
            .env_remove("NOTIFY_SOCKET")
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
        let serving = log.by_ref().map_while(Result::ok).any(|line| line.contains("serving "));
        assert!(serving, "it serves");
        // Nobody may stop to read: the pipe would fill.
        std::thread::spawn(move || log.map_while(Result::ok).for_each(|line| println!("{line}")));
        Daemon { process, folder }
    }

    fn socket(&self) -> PathBuf {
        self.folder.path().join("s")
    }

    fn says(&self, arguments: &[&str]) -> String {
        let (code, out, err) = nvmfctl(&self.socket(), arguments);
        assert_eq!(code, Some(0), "{arguments:?}: {err}");
        out
    }

    /// Stops it in good order.
    fn stop(mut self) {
        kill(Pid::from_raw(self.process.id() as i32), Signal::SIGTERM).unwrap();
        assert!(self.process.wait().unwrap().success());
        assert!(!self.socket().exists(), "the socket goes with it");
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

fn nvmfctl(socket: &Path, arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } = Command::new(env!("CARGO_BIN_EXE_nvmfctl"))
        .arg("--socket")
        .arg(socket)
        .args(arguments)
        .output()
        .expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (status.code(), text(stdout), text(stderr))
}

#[test]
fn what_runs_is_shown_to_people_and_to_programs() {
    let daemon = Daemon::start("127.0.42.1");
    let status = daemon.says(&["status"]);
    for part in ["soft, 1 reactor(s)", "1 subsystem(s), 1 namespace(s)", "127.0.42.1:4420 (id 1)"] {
        assert!(status.contains(part), "{part}: {status}");
    }
    let list = daemon.says(&["subsystem", "list"]);
    assert!(list.starts_with(" NQN") || list.starts_with("NQN"), "{list}");
    assert!(list.contains(NQN) && list.contains("any"), "{list}");
    assert!(daemon.says(&["subsystem", "show", NQN]).contains("queue depth 128"));
    assert!(daemon.says(&["namespace", "list"]).contains("1GiB"));
    assert!(daemon.says(&["listener", "list"]).contains("optimized"));
    assert!(daemon.says(&["host", "list"]).contains("names no host"));
    assert!(daemon.says(&["controllers"]).contains("no host is connected"));

    let json = daemon.says(&["--json", "namespace", "list"]);
    let namespaces: Vec<nvmfd::api::Namespace> = serde_json::from_str(&json).unwrap();
    assert_eq!((namespaces[0].nsid, namespaces[0].size_bytes), (1, 1 << 30));
    let json = daemon.says(&["status", "--json"]);
    let status: nvmfd::api::Status = serde_json::from_str(&json).unwrap();
    assert_eq!(status.pid, daemon.process.id());
    daemon.stop();
}

#[test]
fn failures_say_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    let (code, out, err) = nvmfctl(&folder.path().join("none"), &["status"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("no daemon is at") && err.contains("start nvmfd"), "{err}");
    for wrong in [&[][..], &["subsystem"], &["subsystem", "show"], &["status", "all"]] {
        let (code, out, _) = nvmfctl(folder.path(), wrong);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{wrong:?}");
    }
    let daemon = Daemon::start("127.0.42.2");
    let (code, _, err) = nvmfctl(&daemon.socket(), &["subsystem", "show", "nqn.a"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("there is no subsystem \"nqn.a\": see `nvmfctl subsystem list`"), "{err}");
}

#[test]
fn a_daemon_that_was_killed_leaves_nothing_in_the_way() {
    let mut daemon = Daemon::start("127.0.42.3");
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    assert!(daemon.socket().exists());
    let (code, _, err) = nvmfctl(&daemon.socket(), &["status"]);
    assert!(code == Some(1) && err.contains("no daemon is at"), "{err}");
    let folder = std::mem::replace(&mut daemon.folder, tempfile::tempdir().unwrap());
    Daemon::start_in(folder).stop();
}
