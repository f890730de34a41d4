//! The daemon and its tool, as processes: what `nvmfctl` prints, and its exit codes.

mod saving;

use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

const NQN: &str = "nqn.2026-11.io.nvmfd:manage";

/// A daemon that serves.
struct Daemon {
    process: Child,
    directory: TempDir,
}

impl Daemon {
    /// One at an address of its own.
    fn start(address: &str) -> Daemon {
        let directory = tempfile::tempdir().unwrap();
        let text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[management]\nsocket = {:?}\n\
             [memory]\nreceives = 512\ndata = \"4MiB\"\n\
             [[listener]]\naddress = \"{address}\"\n\
             [[subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \"1GiB\"\n",
            directory.path(),
            directory.path().join("s"),
        );
        fs::write(directory.path().join("nvmfd.toml"), text).unwrap();
        Daemon::start_in(directory)
    }

    /// One with what is in a directory. Whatever a killed one had at work, such as its sockets, may
    /// be in use for a moment more.
    fn start_in(directory: TempDir) -> Daemon {
        Daemon::start_as(directory, nix::unistd::geteuid().as_raw())
    }

    /// One of this user.
    fn start_as(directory: TempDir, user: u32) -> Daemon {
        let mut said = Vec::new();
        for _ in 0..600 {
            let mut process = Command::new(env!("CARGO_BIN_EXE_nvmfd"))
                .uid(user)
                .arg("--config")
                .arg(directory.path().join("nvmfd.toml"))
                .env_remove("NOTIFY_SOCKET")
                .stderr(Stdio::piped())
                .spawn()
                .unwrap();
            let mut log = BufReader::new(process.stderr.take().unwrap()).lines();
            said.clear();
            while let Some(Ok(line)) = log.next() {
                let serving = line.contains("serving ");
                said.push(line);
                if serving {
                    // Somebody must read on: the pipe would fill.
                    std::thread::spawn(move || log.map_while(Result::ok).for_each(drop));
                    return Daemon { process, directory };
                }
            }
            process.wait().unwrap();
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("it does not serve: {said:#?}");
    }

    fn socket(&self) -> PathBuf {
        self.directory.path().join("s")
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

/// Answers requests at a socket in a directory; with nothing, the connection ends.
fn answering(
    directory: &Path,
    mut answer: impl FnMut(&str) -> Vec<u8> + Send + 'static,
) -> PathBuf {
    let path = directory.join("answers");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::spawn(move || {
        for mut client in listener.incoming().map_while(Result::ok) {
            let mut request = vec![0; 64 << 10];
            let length = client.read(&mut request).unwrap();
            let response = answer(&String::from_utf8_lossy(&request[..length]));
            client.write_all(&response).unwrap();
        }
    });
    path
}

/// The response of the daemon at a socket.
fn passed_on(socket: &Path, request: &str) -> Vec<u8> {
    let mut server = UnixStream::connect(socket).unwrap();
    let request = request.replacen("\r\n", "\r\nconnection: close\r\n", 1);
    server.write_all(request.as_bytes()).unwrap();
    let mut response = Vec::new();
    server.read_to_end(&mut response).unwrap();
    response
}

#[test]
fn served_state_is_shown_as_tables_and_as_json() {
    let daemon = Daemon::start("127.0.42.1");
    let status = daemon.says(&["status"]);
    for part in ["soft, 1 reactor,", "1 subsystem, 1 namespace", "127.0.42.1:4420 (id 1)"] {
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

    let lines = daemon.says(&["connect-line", NQN, "--host", "nqn.h"]);
    assert!(
        lines.contains(&format!("nvme connect -t rdma -a 127.0.42.1 -s 4420 -n {NQN} -q nqn.h"))
    );
    assert!(lines.contains("-t rdma -a 127.0.42.1 -s 4420 -q nqn.h"), "{lines}");
    assert_eq!(daemon.says(&["log"]).trim(), "info");
    assert_eq!(daemon.says(&["log", "debug"]).trim(), "debug");
    assert_eq!(daemon.says(&["log"]).trim(), "debug");
    // A monitoring system and a provisioning tool go by exit codes.
    let (code, out, _) = nvmfctl(&daemon.socket(), &["status", "--check"]);
    assert_eq!(code, Some(0), "{out}");
    assert!(
        out.starts_with("NVMFD OK - serving 1 subsystem, 1 namespace | controllers=0"),
        "{out}"
    );
    let file = daemon.directory.path().join("nvmfd.toml");
    let text = fs::read_to_string(&file).unwrap();
    let plan = |text: &str, code| {
        let other = daemon.directory.path().join("other.toml");
        fs::write(&other, text).unwrap();
        let plan = ["plan", "--exit-code", other.to_str().unwrap()];
        let (found, out, err) = nvmfctl(&daemon.socket(), &plan);
        assert_eq!((found, err.as_str()), (Some(code), ""), "{out}");
    };
    plan(&text, 0);
    plan(&text.replace("1GiB", "2GiB"), 3);
    fs::write(&file, "colour = 1\n").unwrap();
    let (code, out, err) = nvmfctl(&daemon.socket(), &["reload", "-o", "json"]);
    let failure: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert!(failure["error"].as_str().unwrap().contains("unknown key `colour`"), "{out}");
    assert!(code == Some(1) && err.contains("unknown key `colour`"), "{err}");
    let (code, out, _) = nvmfctl(&daemon.socket(), &["status", "--check"]);
    assert!(code == Some(1) && out.starts_with("NVMFD WARNING - the last reload was"), "{out}");
    assert!(daemon.says(&["status"]).contains("refused, the files differ"));
    fs::write(&file, &text).unwrap();
    let why = daemon.says(&["why", "192.0.2.9"]);
    assert!(why.starts_with("nothing is recorded of 192.0.2.9"), "{why}");

    let (code, _, err) = nvmfctl(&daemon.socket(), &["log", "loud"]);
    assert!(code == Some(1) && err.contains("there is no level \"loud\""), "{err}");

    let json = daemon.says(&["namespace", "list", "-o", "json"]);
    let namespaces: Vec<nvmfd::api::Namespace> = serde_json::from_str(&json).unwrap();
    assert_eq!((namespaces[0].nsid, namespaces[0].size_bytes), (1, 1 << 30));
    let json = daemon.says(&["status", "--json"]);
    let status: nvmfd::api::Status = serde_json::from_str(&json).unwrap();
    assert_eq!(status.pid, daemon.process.id());
    daemon.stop();
}

#[test]
fn nvmfctl_errors_include_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let (code, out, err) = nvmfctl(&directory.path().join("none"), &["status"]);
    assert_eq!((code, out.as_str()), (Some(1), ""));
    assert!(err.contains("no daemon is at") && err.contains("start nvmfd"), "{err}");
    for wrong in [&[][..], &["subsystem"], &["subsystem", "show"], &["status", "all"]] {
        let (code, out, _) = nvmfctl(directory.path(), wrong);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{wrong:?}");
    }
    let (code, out, err) = nvmfctl(&directory.path().join("none"), &["status", "--check"]);
    assert_eq!((code, err.as_str()), (Some(2), ""));
    assert!(out.starts_with("NVMFD CRITICAL - no daemon is at"), "{out}");
    let daemon = Daemon::start("127.0.42.2");
    let (code, _, err) = nvmfctl(&daemon.socket(), &["subsystem", "show", "nqn.a"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("there is no subsystem \"nqn.a\": see `nvmfctl subsystem list`"), "{err}");
}

#[test]
fn gateway_names_with_separators_of_urls_are_sent_as_names() {
    let daemon = Daemon::start("127.0.42.20");
    for name in ["a/b", "a?b", "a#b", "50%", "../a"] {
        let (code, _, err) = nvmfctl(&daemon.socket(), &["gateway", "exclude", name]);
        assert_eq!(code, Some(1));
        assert!(err.contains("the daemon is no gateway of a group"), "{name}: {err}");
    }
}

#[test]
fn a_stale_socket_of_a_killed_daemon_does_not_prevent_a_restart() {
    let mut daemon = Daemon::start("127.0.42.3");
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    assert!(daemon.socket().exists());
    let (code, _, err) = nvmfctl(&daemon.socket(), &["status"]);
    assert!(code == Some(1) && err.contains("no daemon is at"), "{err}");
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    Daemon::start_in(directory).stop();
}

/// A daemon that ends without a response may have carried the change out.
#[test]
fn a_change_whose_connection_breaks_may_have_taken_effect() {
    let directory = tempfile::tempdir().unwrap();
    let path = answering(directory.path(), |_| Vec::new());
    let (code, _, err) = nvmfctl(&path, &["subsystem", "remove", NQN]);
    assert!(code == Some(1) && err.contains("may have carried this out"), "{err}");
    let (code, _, err) = nvmfctl(&path, &["subsystem", "list"]);
    assert!(code == Some(1) && !err.contains("carried"), "{err}");
}

/// The file remains.
#[test]
fn a_clone_that_is_not_added_is_reported_as_made() {
    let directory = tempfile::tempdir().unwrap();
    let path = answering(directory.path(), |request| {
        let (status, body) = match request.starts_with("POST /v1/changes ") {
            true => (
                "422 Unprocessable Entity",
                "{\"title\":\"\",\"status\":422,\"detail\":\"too many\",\"remedy\":\
                 \"nothing was changed\"}",
            ),
            false => ("200 OK", "{\"differences\":[],\"block_size_bytes\":4096}"),
        };
        let length = body.len();
        format!("HTTP/1.1 {status}\r\ncontent-length: {length}\r\n\r\n{body}").into_bytes()
    });
    let arguments = ["-o", "json", "namespace", "clone", NQN, "1", "/c", "--add", "2"];
    let (code, out, err) = nvmfctl(&path, &arguments);
    assert!(
        code == Some(1) && err.ends_with("clone /c was made, and is not added: too many\n"),
        "{err}"
    );
    assert!(serde_json::from_str::<serde_json::Value>(&out).unwrap()["error"].is_string());
}

#[test]
fn failed_checks_and_saves_print_json_if_asked_to() {
    let daemon = Daemon::start("127.0.42.25");
    let json_at = |socket: &Path, arguments: &[&str], expected| {
        let (code, out, err) = nvmfctl(socket, &[&["-o", "json"], arguments].concat());
        assert_eq!(code, Some(expected), "{err}");
        serde_json::from_str::<serde_json::Value>(&out).unwrap_or_else(|_| panic!("{out}"))
    };
    let json = |arguments: &[&str]| json_at(&daemon.socket(), arguments, 0);
    assert_eq!(json(&["save"])["changes"], 0);
    daemon.says(&["subsystem", "set", NQN, "serial=S"]);
    let file = daemon.directory.path().join("nvmfd.toml").display().to_string();
    for arguments in [&["--dry-run", "save"][..], &["save"]] {
        let saved = json(arguments);
        assert_eq!((&saved["changes"], &saved["written"][0]), (&1.into(), &file.as_str().into()));
    }
    let view = json_at(&daemon.socket(), &["top", "--once"], 1);
    assert!(view["error"].as_str().unwrap().contains("`nvmfctl stats -o json`"), "{view}");
    let absent = json_at(Path::new("/nowhere"), &["status", "--check"], 2);
    assert!(absent["error"].as_str().unwrap().contains("no daemon is at /nowhere"), "{absent}");
    daemon.stop();
}

#[test]
fn a_key_with_two_values_is_refused() {
    let daemon = Daemon::start("127.0.42.27");
    let twice: [&[&str]; 4] = [
        &["listener", "add", "127.0.42.28", "--port", "4420", "--set", "port=4421"],
        &["subsystem", "add", "nqn.2026-11.io.nvmfd:b", "--host", "nqn.h", "--set", "hosts=[]"],
        &["namespace", "add", NQN, "2", "--kind", "ram", "--size", "1MiB", "--set", "size=2MiB"],
        &["subsystem", "set", NQN, "queue_depth=32", "queue_depth=64"],
    ];
    for arguments in twice {
        let (code, _, err) = nvmfctl(&daemon.socket(), arguments);
        assert!(code == Some(1) && err.contains("is given twice"), "{arguments:?}: {err}");
    }
    daemon.says(&["listener", "add", "127.0.42.28", "--set", "port=4421"]);
    assert!(daemon.says(&["listener", "list"]).contains("127.0.42.28:4421"));
    daemon.stop();
}

#[test]
fn output_that_cannot_be_written_is_a_failure() {
    let full = fs::File::options().write(true).open("/dev/full").unwrap();
    let mut nvmfctl = Command::new(env!("CARGO_BIN_EXE_nvmfctl"));
    let Output { status, stderr, .. } =
        nvmfctl.args(["completions", "bash"]).stdout(full).output().unwrap();
    let err = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{err}");
    assert!(err.contains("the output cannot be written: No space left on device"), "{err}");
}

/// A socket of the service manager has clients connect, whatever the configuration says.
#[test]
fn a_disabled_interface_answers_at_a_socket_of_the_service_manager() {
    let directory = tempfile::tempdir().unwrap();
    let (file, socket) = (directory.path().join("nvmfd.toml"), directory.path().join("s"));
    fs::write(&file, "provider = \"soft\"\n[management]\nenabled = false\n").unwrap();
    let listener = UnixListener::bind(&socket).unwrap();
    let script = "exec 3<&0 </dev/null; LISTEN_PID=$$ LISTEN_FDS=1 exec \"$0\" --config \"$1\"";
    let mut process = Command::new("sh")
        .args(["-c", script, env!("CARGO_BIN_EXE_nvmfd")])
        .arg(&file)
        .env_remove("NOTIFY_SOCKET")
        .stdin(std::os::fd::OwnedFd::from(listener))
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let (code, _, err) = nvmfctl(&socket, &["status"]);
    process.kill().unwrap();
    process.wait().unwrap();
    assert!(code == Some(1) && err.contains("`enabled = false` in [management]"), "{err}");
}

#[test]
fn write_protection_survives_a_kill() {
    let mut daemon = Daemon::start("127.0.42.6");
    let protect = ["namespace", "protect", NQN, "1"];
    let told = daemon.says(&protect);
    assert!(told.contains("No Write Protect becomes Write Protect"), "{told}");
    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    let daemon = Daemon::start_in(directory);
    assert!(daemon.says(&["namespace", "list"]).contains("write protected"));
    daemon.says(&["namespace", "unprotect", NQN, "1"]);
    assert!(!daemon.says(&["namespace", "list"]).contains("write protected"));
    daemon.says(&[&protect[..], &["--permanent"]].concat());
    let (code, _, err) = nvmfctl(&daemon.socket(), &["namespace", "unprotect", NQN, "1"]);
    assert!(code == Some(1) && err.contains("Permanent Write Protect, and that does not"), "{err}");
    daemon.stop();
}

#[test]
fn shell_completions_and_manual_pages_are_generated() {
    let directory = tempfile::tempdir().unwrap();
    let (code, out, _) = nvmfctl(directory.path(), &["completions", "bash"]);
    assert!(code == Some(0) && out.contains("complete ") && out.contains("nvmfctl"), "{out}");
    let share = directory.path().to_str().unwrap();
    let (code, _, err) = nvmfctl(directory.path(), &["install-files", share]);
    assert_eq!(code, Some(0), "{err}");
    let pages = directory.path().join("man/man8");
    let page = fs::read_to_string(pages.join("nvmfctl.8")).unwrap();
    assert!(page.contains(".TH") && page.contains(".SH EXAMPLES") && page.contains("NVMFD_SOCKET"));
    assert!(pages.join("nvmfctl-namespace-add.8").exists());
    let zsh = fs::read_to_string(directory.path().join("zsh/vendor-completions/_nvmfctl"));
    assert!(zsh.unwrap().starts_with("#compdef nvmfctl"));
}

/// As an interactive bash does it: the words so far have the NQN with its colons.
#[test]
fn shell_completions_list_served_objects() {
    let daemon = Daemon::start("127.0.42.18");
    let candidates = |socket: &Path, words: &[&str]| {
        let mut shell = Command::new("bash");
        shell.args([
            "-c",
            "eval \"$(nvmfctl completions bash)\"; COMP_WORDS=(nvmfctl \"$@\"); \
            COMP_CWORD=$#; COMP_TYPE=9; _clap_complete_nvmfctl nvmfctl \"${@: -1}\" x; \
            printf '%s\n' \"${COMPREPLY[@]}\"",
            "-",
        ]);
        let program = Path::new(env!("CARGO_BIN_EXE_nvmfctl")).parent().unwrap();
        let path = format!("{}:{}", program.display(), std::env::var("PATH").unwrap());
        let shell = shell.args(words).env("NVMFD_SOCKET", socket).env("PATH", path);
        String::from_utf8(shell.output().unwrap().stdout).unwrap()
    };
    let socket = daemon.socket();
    assert_eq!(candidates(&socket, &["subsystem", "show", "nqn."]).trim(), NQN);
    assert_eq!(candidates(&socket, &["subsystem", "show", "another"]).trim(), "");
    assert!(candidates(&socket, &["namespace", "resize", NQN, ""]).starts_with("1\n"));
    assert_eq!(candidates(&socket, &["listener", "remove", "1"]).trim(), "1");
    assert_eq!(candidates(&socket, &["subsys"]).trim(), "subsystem", "a command");
    daemon.stop();
    assert_eq!(candidates(&socket, &["subsystem", "show", "nqn."]).trim(), "", "nobody answers");
}

#[test]
fn commands_without_a_dry_run_refuse_the_flag_and_change_nothing() {
    let daemon = Daemon::start("127.0.42.7");
    let file = daemon.directory.path().join("nvmfd.toml");
    let refused = |arguments: &[&str]| {
        let (code, out, err) = nvmfctl(&daemon.socket(), &[arguments, &["--dry-run"]].concat());
        assert_eq!((code, out.as_str()), (Some(1), ""), "{arguments:?}");
        assert!(err.contains("has no dry run: `nvmfctl "), "{err}");
    };
    let disk = daemon.directory.path().join("disk.img");
    daemon.says(&["namespace", "add", NQN, "2", disk.to_str().unwrap(), "--size", "1MiB"]);
    // The change that was kept does not fit what the file says by now.
    let own = "[[subsystem.namespace]]\nnsid = 2\nkind = \"ram\"\nsize = \"1MiB\"\n";
    let text = fs::read_to_string(&file).unwrap();
    fs::write(&file, text.clone() + own).unwrap();
    let list = daemon.says(&["namespace", "list"]);
    let plan = daemon.says(&["reload", "--dry-run"]);
    assert!(plan.contains("namespace 2"), "{plan}");
    assert_eq!(daemon.says(&["namespace", "list"]), list);

    daemon.says(&["namespace", "remove", NQN, "2"]);
    daemon.says(&["reload"]);
    let set_aside = daemon.says(&["changes", "list"]);
    assert!(set_aside.contains("not in force: "), "{set_aside}");
    refused(&["changes", "forget"]);
    assert_eq!(daemon.says(&["changes", "list"]), set_aside);
    let forgotten = daemon.says(&["changes", "forget"]);
    assert!(forgotten.contains("namespace 2") && forgotten.contains("(was not in force)"));
    assert_eq!(daemon.says(&["changes", "forget"]), "nothing changes\n");

    let level = daemon.says(&["log"]);
    refused(&["log", "trace"]);
    assert_eq!(daemon.says(&["log", "--dry-run"]), level);
    daemon.stop();
}

/// With `missing = "wait"` a reload succeeds, and serves it when it appears.
#[test]
fn a_reload_reports_what_is_not_served() {
    let daemon = Daemon::start("127.0.42.32");
    let file = daemon.directory.path().join("nvmfd.toml");
    let missing = daemon.directory.path().join("none/disk.img");
    let text = fs::read_to_string(&file).unwrap();
    let namespace = format!("[[subsystem.namespace]]\nnsid = 2\npath = {missing:?}\n");
    fs::write(&file, text + &namespace).unwrap();
    let reloaded = daemon.says(&["reload"]);
    assert!(reloaded.contains("+ namespace 2: file "), "{reloaded}");
    let pending = format!("! pending: namespace 2 of {NQN}");
    assert!(reloaded.contains(&pending) && reloaded.contains("no directory"), "{reloaded}");
    daemon.stop();
}

/// The configuration is the same. An administrator who has replaced a key has to see that it was read.
#[test]
fn a_reload_reports_a_key_that_was_replaced_in_its_file() {
    let daemon = Daemon::start("127.0.42.31");
    let at = |name: &str| daemon.directory.path().join(name);
    let write = |secret: &str| {
        fs::write(at("key"), secret).unwrap();
        fs::set_permissions(at("key"), fs::Permissions::from_mode(0o600)).unwrap();
    };
    write("DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:");
    daemon.says(&["host", "key", "nqn.2026-11.host:a", at("key").to_str().unwrap()]);
    write("DHHC-1:00:DRQbIikwNz5FTFNaYWhvdn2Ei5KZoKeutbzDytHY3+Z2DVP+:");
    let reloaded = daemon.says(&["reload"]);
    assert!(reloaded.contains("the key of host nqn.2026-11.host:a changed"), "{reloaded}");
    assert_eq!(daemon.says(&["reload"]), "nothing changes\n");
    assert!(daemon.says(&["history"]).contains(reloaded.trim_end()));
    daemon.stop();
}

#[test]
fn watch_ends_when_its_reader_closes_the_pipe() {
    let daemon = Daemon::start("127.0.42.8");
    let mut watch = Command::new(env!("CARGO_BIN_EXE_nvmfctl"))
        .arg("--socket")
        .arg(daemon.socket())
        .arg("watch")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert_eq!(line.split_once(' ').map(|(_, event)| event), Some("watching"), "{line}");
    drop(lines);
    // Every reload is something to tell of.
    for _ in 0..3000 {
        daemon.says(&["reload"]);
        if let Some(status) = watch.try_wait().unwrap() {
            assert!(status.success(), "{status}");
            daemon.stop();
            return;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    watch.kill().unwrap();
    panic!("it goes on for nobody");
}
