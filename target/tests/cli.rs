//! The command line of the daemon: what it prints where, and its exit codes.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

fn nvmfd(arguments: &[&str]) -> (Option<i32>, String, String) {
    let Output { status, stdout, stderr } =
        Command::new(env!("CARGO_BIN_EXE_nvmfd")).args(arguments).output().expect("it runs");
    let text = |bytes| String::from_utf8(bytes).expect("text");
    (status.code(), text(stdout), text(stderr))
}

fn example() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/nvmfd.toml")
}

#[test]
fn the_example_configuration_is_good() {
    let config =
        nvmfd::config::Config::load(&example()).unwrap_or_else(|errors| panic!("{errors}"));
    assert!(config.warnings().is_empty(), "{:?}", config.warnings());
}

#[test]
fn the_example_shows_the_defaults() {
    // What the example says about `[reactor]`, `[memory]` and `[limits]` is what one gets without.
    let text = fs::read_to_string(example()).unwrap();
    let config = nvmfd::config::Config::parse(&text).unwrap();
    assert_eq!(config.provider, nvmfd::config::Provider::default());
    assert_eq!(config.reactor, nvmfd::config::ReactorConfig::default());
    assert_eq!(config.memory, nvmfd::config::MemoryConfig::default());
    assert_eq!(config.limits, nvmfd::config::Limits::default());
}

#[test]
fn a_good_configuration_is_printed_with_its_defaults() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvmfd.toml");
    let disk = directory.path().join("disk.img");
    let text = fs::read_to_string(example()).unwrap();
    fs::write(
        &file,
        text.replace("/var/lib/nvmfd/disk1.img", disk.to_str().unwrap())
            .replace("0.0.0.0", "127.98.4.1"),
    )
    .unwrap();
    let file = file.to_str().unwrap();
    for arguments in
        [&["check", file][..], &["check", "--config", file], &["--config", file, "check"]]
    {
        let (code, out, err) = nvmfd(arguments);
        assert_eq!(code, Some(0), "{err}");
        assert!(out.contains("4096 receives"), "{out}");
        assert!(err.contains("it will be created as a sparse file"), "{err}");
    }
    assert!(!disk.exists(), "a check makes nothing");
}

/// An administrator who has set it for the daemon checks a draft.
#[test]
fn a_file_to_check_takes_precedence_over_the_environment() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("draft.toml"), "colour = 1\n").unwrap();
    fs::write(at("nvmfd.toml"), "shape = 1\n").unwrap();
    let says = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfd"));
        command.args(arguments).env("NVMFD_CONFIG", at("nvmfd.toml"));
        let Output { status, stderr, .. } = command.output().unwrap();
        (status.code(), String::from_utf8(stderr).unwrap())
    };
    let (code, err) = says(&["check", at("draft.toml").to_str().unwrap()]);
    assert!(code == Some(1) && err.contains("unknown key `colour`"), "{err}");
    let (code, err) = says(&["check"]);
    assert!(code == Some(1) && err.contains("unknown key `shape`"), "{err}");
}

#[test]
fn all_configuration_errors_are_printed_and_exit_with_code_1() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvmfd.toml");
    fs::write(&file, "provider = \"tcp\"\ncolour = 1\n").unwrap();
    let file = file.to_str().unwrap();
    for arguments in [&["check", file][..], &["--config", file], &["-c", file]] {
        let (code, out, err) = nvmfd(arguments);
        assert_eq!(code, Some(1));
        assert_eq!(out, "");
        assert_eq!(err.lines().count(), 2, "{err}");
        assert!(err.contains(&format!("{file}:2:1: unknown key `colour`")), "{err}");
        assert!(!err.contains('\x1b'), "no colours in a pipe: {err:?}");
    }
    let (code, _, err) = nvmfd(&["check", "/nonexistent/nvmfd.toml"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("cannot be read"), "{err}");
}

#[test]
fn log_lines_have_timestamps_and_json_records_have_fields() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvmfd.toml");
    fs::write(&file, "colour = 1\n").unwrap();
    let file = file.to_str().unwrap();
    let (_, _, text) = nvmfd(&["--config", file]);
    let (time, rest) = text.split_once(' ').unwrap();
    assert!(time.ends_with('Z') && time.contains('T'), "{text}");
    assert!(rest.trim_start().starts_with("ERROR "), "{text}");
    let (_, _, json) = nvmfd(&["--config", file, "--log-format", "json"]);
    let object: serde_json::Value = serde_json::from_str(json.trim()).unwrap();
    assert_eq!(object["level"], "ERROR");
    assert!(object["message"].as_str().unwrap().contains("unknown key `colour`"), "{json}");
    assert!(object["timestamp"].as_str().unwrap().ends_with('Z'), "{json}");
    let (_, _, check) = nvmfd(&["check", file]);
    assert!(check.starts_with("ERROR "), "{check}");
    let (_, _, check) = nvmfd(&["check", file, "--log-format", "json"]);
    let checked: serde_json::Value = serde_json::from_str(check.trim()).unwrap();
    assert_eq!(checked["message"], object["message"]);
}

#[test]
fn a_state_directory_that_is_not_there_is_a_mistake() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("nvmfd.toml");
    let with = |state: &Path| {
        let text = format!(
            "state_directory = {state:?}\n[[listener]]\naddress = \"192.0.2.1\"\n[[subsystem]]\n\
             nqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[[subsystem.namespace]]\n\
             nsid = 1\nkind = \"null\"\nsize = \"1MiB\"\n"
        );
        std::fs::write(&file, text).unwrap();
        nvmfd(&["check", file.to_str().unwrap()])
    };
    let (code, out, err) = with(directory.path());
    assert_eq!(code, Some(0), "{err}");
    assert!(out.contains(&format!("state_directory {}", directory.path().display())), "{out}");
    let missing = directory.path().join("missing");
    let (code, _, err) = with(&missing);
    assert_eq!(code, Some(1));
    assert!(err.contains("missing is not a usable directory: create it"), "{err}");
    let (code, _, err) = with(&file);
    assert!(code == Some(1) && err.contains("is not a usable directory"), "{err}");
}

/// A start serves the changed configuration, and keeps state that hosts rely on.
#[test]
fn check_reports_the_errors_that_a_start_would_report() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    fs::write(at("1.img"), vec![0; 1 << 20]).unwrap();
    let check = |management: &str, uuid: &str, size: &str| {
        let text = format!(
            "state_directory = {:?}\n[management]\n{management}\n[[listener]]\naddress = \
             \"127.98.4.2\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = \
             true\n[[subsystem.namespace]]\nnsid = 1\npath = {:?}\nuuid = \
             \"00000000-0000-4000-8000-{uuid}\"\nsize = {size}\n",
            directory.path(),
            at("1.img")
        );
        fs::write(at("nvmfd.toml"), text).unwrap();
        let (code, _, err) = nvmfd(&["check", at("nvmfd.toml").to_str().unwrap()]);
        (code, err)
    };
    let (one, other, size) = ("000000000001", "000000000002", "1048576");
    assert_eq!(check("", one, size).0, Some(0));
    let (code, err) = check("group = \"nvmfd-no-such-group\"", one, size);
    assert!(code == Some(1) && err.contains("no group \"nvmfd-no-such-group\""), "{err}");
    let (code, err) = check("", one, "2097152");
    assert!(code == Some(1) && err.contains("has 1048576 bytes"), "{err}");
    let (code, err) = check("", one, "524288");
    assert!(code == Some(0) && err.contains("of which 524288 are exported"), "{err}");

    // What a host relies on is damaged.
    let record = at(&format!("00000000-0000-4000-8000-{one}.namespace"));
    fs::write(&record, "nonsense").unwrap();
    let (code, err) = check("", one, size);
    assert!(code == Some(1) && err.contains(".namespace"), "{err}");
    fs::remove_file(record).unwrap();
    // The path was served under another UUID, of which the list of names cannot tell.
    fs::write(at("names"), "nonsense").unwrap();
    assert_eq!(check("", other, size).0, Some(0), "nothing is kept");
    fs::write(at(&format!("00000000-0000-4000-8000-{one}.reservation")), "").unwrap();
    let (code, err) = check("", other, size);
    assert!(code == Some(1) && err.contains("is no record that nvmfd has written"), "{err}");
    fs::remove_file(at("names")).unwrap();
    fs::write(at("changes.json"), "nonsense").unwrap();
    let (code, err) = check("", other, size);
    assert!(code == Some(1) && err.contains("changes that were made before"), "{err}");
}

/// A configuration that serves nothing but zeros; `more`: tables and keys at its beginning.
fn null_config(directory: &Path, address: &str, more: &str) -> PathBuf {
    let file = directory.join("nvmfd.toml");
    let text = format!(
        "provider = \"soft\"\n{more}\n[[listener]]\naddress = \"{address}\"\n[[subsystem]]\nnqn = \
         \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\nkind \
         = \"null\"\nsize = \"1MiB\"\n"
    );
    fs::write(&file, text).unwrap();
    file
}

/// Runs the daemon and its check under a limit of the shell: what each logs.
fn limited(limit: &str, file: &Path) -> [String; 2] {
    let file = file.to_str().unwrap();
    [&["check", file][..], &["--config", file]].map(|arguments| {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("ulimit {limit}; exec \"$@\""), "sh"]);
        let ran = shell.arg(env!("CARGO_BIN_EXE_nvmfd")).args(arguments).output().expect("it runs");
        let log = String::from_utf8(ran.stderr).expect("text");
        assert_eq!(ran.status.code(), Some(1), "{arguments:?}: {log}");
        log
    })
}

#[test]
fn check_and_start_refuse_a_pool_that_cannot_be_mapped() {
    let directory = tempfile::tempdir().unwrap();
    let more = "[management]\nenabled = false\n[memory]\ndata = \"16GiB\"";
    let file = null_config(directory.path(), "127.98.4.11", more);
    for log in limited("-v 8000000", &file) {
        let named = log.contains("lower `data` or `receives` in [memory]");
        assert!(named && log.contains("no memory for the pool of a reactor"), "{log}");
    }
}

#[test]
fn check_and_start_refuse_a_limit_of_too_few_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let more = "[management]\nenabled = false\n[reactor]\nthreads = 4";
    let file = null_config(directory.path(), "127.98.4.12", more);
    for log in limited("-n 24", &file) {
        assert!(log.contains("LimitNOFILE="), "the limit is named: {log}");
    }
}

#[test]
fn check_refuses_a_port_of_another_program() {
    let directory = tempfile::tempdir().unwrap();
    let more = format!("state_directory = {:?}", directory.path());
    let file = null_config(directory.path(), "127.98.4.13", &more);
    let check = || nvmfd(&["check", file.to_str().unwrap()]);
    let (code, _, log) = check();
    assert_eq!((code, log.as_str()), (Some(0), ""));
    let taken = std::net::UdpSocket::bind("127.98.4.13:4791").unwrap();
    let (code, _, log) = check();
    let told = log.contains("UDP port 127.98.4.13:4791 is in use by");
    assert!(code == Some(1) && told && log.contains("[[listener]]"), "{log}");
    drop(taken);
    let wide = null_config(directory.path(), "0.0.0.0", &more);
    let _beside = std::net::UdpSocket::bind("127.98.4.13:4791").unwrap();
    let (_, _, log) = nvmfd(&["check", wide.to_str().unwrap()]);
    assert!(!log.contains("is in use by"), "a socket at one address excludes no other: {log}");
}

/// By its state directory, by its socket, or not at all.
#[test]
fn check_accepts_the_ports_of_the_daemon_of_its_configuration() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let known = format!("state_directory = {:?}", directory.path());
    let reached = format!("[management]\nsocket = {socket:?}");
    for (number, more) in [(14, &*known), (15, &*reached), (16, "[management]\nenabled = false")] {
        let file = null_config(directory.path(), &format!("127.98.4.{number}"), more);
        let mut daemon = Command::new(env!("CARGO_BIN_EXE_nvmfd"));
        daemon.arg("--config").arg(&file).env("RUNTIME_DIRECTORY", directory.path());
        let mut daemon = daemon.stderr(std::process::Stdio::piped()).spawn().unwrap();
        let log = BufReader::new(daemon.stderr.take().unwrap());
        let is_serving = log.lines().any(|line| line.is_ok_and(|line| line.contains(" serving")));
        let (code, _, log) = nvmfd(&["check", file.to_str().unwrap()]);
        kill(Pid::from_raw(daemon.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        daemon.wait().unwrap();
        assert!(is_serving && code == Some(0), "{more}: {log}");
        let warns = log.contains("unless that is the daemon of this configuration");
        assert_eq!(warns, number != 14, "{log}");
    }
}

#[cfg(not(feature = "verbs"))]
#[test]
fn check_refuses_a_provider_that_is_not_built() {
    let directory = tempfile::tempdir().unwrap();
    let file = null_config(directory.path(), "127.98.4.17", "");
    let text = fs::read_to_string(&file).unwrap().replace("\"soft\"", "\"verbs\"");
    fs::write(&file, text).unwrap();
    let (code, _, log) = nvmfd(&["check", file.to_str().unwrap()]);
    assert!(code == Some(1) && log.contains("this build has no provider \"verbs\""), "{log}");
}

/// Data written there do not survive a crash of the machine, or not as whole blocks.
#[test]
fn check_warns_of_volatile_and_non_atomic_backing_file_systems() {
    let directories = [Path::new("/dev/shm"), Path::new(env!("CARGO_MANIFEST_DIR"))];
    let [memory, disk] = directories.map(|at| tempfile::tempdir_in(at).unwrap());
    let file = disk.path().join("nvmfd.toml");
    let check = |directory: &Path, block: u32| {
        let text = format!(
            "[[listener]]\naddress = \"127.98.4.3\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\n\
             path = {:?}\nsize = \"1MiB\"\nblock_size = {block}\n",
            directory.join("disk.img")
        );
        fs::write(&file, text).unwrap();
        let (code, _, err) = nvmfd(&["check", file.to_str().unwrap()]);
        assert_eq!(code, Some(0), "{err}");
        err
    };
    // A missing path below /dev is pending, like a device.
    fs::write(memory.path().join("disk.img"), vec![0; 1 << 20]).unwrap();
    let (is_volatile, is_torn) = ("is in memory", "half old and half new");
    let err = check(memory.path(), 4096);
    assert!(err.contains(is_volatile) && !err.contains(is_torn), "{err}");
    let below = nvmfd::blockdev::Below::of(&fs::File::open(disk.path()).unwrap());
    let whole = below.power_fail_atomic_bytes.unwrap_or(4096);
    for block in [512, 4096] {
        let err = check(disk.path(), block);
        assert_eq!(err.contains(is_torn), whole < block, "{whole} bytes are whole: {err}");
        assert_eq!(err.contains(is_volatile), below.volatile.is_some(), "{err}");
    }
}

#[test]
fn the_journal_gets_priorities_and_nothing_else_does() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("stderr");
    let log = |stream: &str| {
        let stderr = fs::File::create(&file).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfd"));
        command.args(["check", "/nonexistent"]).env("JOURNAL_STREAM", stream);
        assert!(!command.stderr(stderr).status().unwrap().success());
        fs::read_to_string(&file).unwrap()
    };
    assert!(log("1:1").trim_start().starts_with("ERROR /nonexistent: "));
    let stderr = fs::metadata(&file).unwrap();
    let journal = log(&format!("{}:{}", stderr.dev(), stderr.ino()));
    assert!(journal.starts_with("<3>/nonexistent: "), "{journal}");
}

#[test]
fn structured_fields_are_sent_to_journald_once_the_daemon_serves() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let text = format!(
        "provider = \"soft\"\n[management]\nsocket = {:?}\n[memory]\nreceives = 512\n\
         data = \"4MiB\"\n[[listener]]\naddress = \"127.0.43.9\"\n[[subsystem]]\n\
         nqn = \"nqn.2026-11.io.nvmfd:cli\"\nallow_any_host = true\n",
        at("s")
    );
    fs::write(at("nvmfd.toml"), &text).unwrap();
    let listener = UnixDatagram::bind(at("journal")).unwrap();
    let stderr = fs::File::create(at("stderr")).unwrap();
    let place = stderr.metadata().unwrap();
    let mut daemon = Command::new(env!("CARGO_BIN_EXE_nvmfd"))
        .arg("--config")
        .arg(at("nvmfd.toml"))
        .env("JOURNAL_STREAM", format!("{}:{}", place.dev(), place.ino()))
        .env("NVMFD_JOURNAL_SOCKET", at("journal"))
        .env_remove("NOTIFY_SOCKET")
        .stderr(stderr)
        .spawn()
        .unwrap();
    let mut datagram = vec![0; 1 << 16];
    let mut until = |word: &str| {
        loop {
            let length = listener.recv(&mut datagram).unwrap();
            let told = String::from_utf8_lossy(&datagram[..length]).into_owned();
            if told.contains(word) {
                return told;
            }
        }
    };
    let told = until("MESSAGE=serving ");
    assert!(
        told.contains("\nPRIORITY=6\n") && told.contains("\nSYSLOG_IDENTIFIER=nvmfd\n"),
        "{told}"
    );
    let before = fs::read_to_string(at("stderr")).unwrap();
    assert!(before.contains("<6>") && !before.contains("serving 1"), "{before}");
    fs::write(at("nvmfd.toml"), format!("colour = 1\n{text}")).unwrap();
    kill(Pid::from_raw(daemon.id() as i32), Signal::SIGHUP).unwrap();
    let told = until("unknown key `colour`");
    assert!(told.contains("nvmfd.toml:1:1: ") && told.contains("\nPRIORITY=3\n"), "{told}");
    kill(Pid::from_raw(daemon.id() as i32), Signal::SIGTERM).unwrap();
    until("MESSAGE=stopped");
    assert!(daemon.wait().unwrap().success());
}

#[test]
fn usage_errors_exit_with_code_2() {
    // Where there is a default configuration it would be served.
    let has_default = Path::new(nvmfd::config::DEFAULT_CONFIG).exists();
    let unnamed = [&[][..], &["check"]];
    let unnamed = unnamed.into_iter().filter(|_| !has_default);
    for arguments in unnamed.chain([
        &["check", "a", "--config", "b"][..],
        &["--colour"],
        &["serve"],
        &["--log", "loud", "check", "a"],
    ]) {
        let (code, out, err) = nvmfd(arguments);
        assert_eq!((code, out.as_str()), (Some(2), ""), "{arguments:?}");
        assert!(err.contains("Usage:") || err.contains("possible values"), "{arguments:?} {err}");
    }
}

#[test]
fn the_version_is_printed() {
    let (code, out, _) = nvmfd(&["--version"]);
    assert_eq!((code, out.trim()), (Some(0), concat!("nvmfd ", env!("CARGO_PKG_VERSION"))));
}

#[test]
fn a_check_looks_at_the_key_files() {
    use std::os::unix::fs::PermissionsExt;
    let directory = tempfile::tempdir().unwrap();
    let (file, key) = (directory.path().join("nvmfd.toml"), directory.path().join("key"));
    let text = format!(
        "[[listener]]\naddress = \"127.98.4.4\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\n\
         allow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = 4096\n\
         [[host]]\nnqn = \"nqn.2026-11.host:a\"\ndhchap_key_file = \"{}\"\n",
        key.display()
    );
    fs::write(&file, text).unwrap();
    let check = || nvmfd(&["check", file.to_str().unwrap()]);
    let (code, _, log) = check();
    assert_eq!(code, Some(1));
    assert!(log.contains("key cannot be read"), "{log}");
    let secret = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    fs::write(&key, secret).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o640)).unwrap();
    let (code, _, log) = check();
    assert_eq!(code, Some(1));
    assert!(log.contains("chmod 600") && !log.contains("AAEC"), "{log}");
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    let (code, printed, log) = check();
    assert_eq!(code, Some(0), "{log}");
    assert!(printed.contains("key of nqn.2026-11.host:a") && !printed.contains("AAEC"));
}

#[test]
fn check_reads_the_record_of_hosts_with_revoked_keys() {
    let directory = tempfile::tempdir().unwrap();
    let (file, state) = (directory.path().join("nvmfd.toml"), directory.path().join("state"));
    fs::create_dir(&state).unwrap();
    let text = format!(
        "state_directory = {state:?}\n[[listener]]\naddress = \"127.98.4.5\"\n[[subsystem]]\nnqn = \
         \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\n\
         kind = \"null\"\nsize = 4096\n"
    );
    fs::write(&file, &text).unwrap();
    let check = || nvmfd(&["check", file.to_str().unwrap()]);
    let host = "nqn.2026-11.host:a";
    nvmfd::state::revoked_hosts::write(&state, &[host.parse().unwrap()].into()).unwrap();
    let (code, _, log) = check();
    assert_eq!(code, Some(0), "{log}");
    assert!(log.contains(&format!("{host} is refused: it has had a key")), "{log}");
    let exempt = format!("{text}[[host]]\nnqn = \"{host}\"\nauthenticate = false\n");
    fs::write(&file, exempt).unwrap();
    let (code, _, log) = check();
    assert!(code == Some(0) && !log.contains("it has had a key"), "{log}");
    fs::write(state.join("keyed-hosts"), "damaged").unwrap();
    let (code, _, log) = check();
    assert_eq!(code, Some(1), "hosts without a key would be refused: {log}");
    assert!(log.contains("keyed-hosts is no record that nvmfd has written"), "{log}");
}
