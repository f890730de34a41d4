//! `nvmfctl doctor` as a process, without a daemon.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::tempdir;

fn doctor(config: &Path, more: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfctl"));
    command.args(["doctor", "--config"]).arg(config).args(more).output().unwrap()
}

fn level<'a>(findings: &'a Value, check: &str) -> &'a str {
    let found = findings.as_array().unwrap().iter().find(|finding| finding["check"] == check);
    found.unwrap_or_else(|| panic!("no {check} in {findings}"))["level"].as_str().unwrap()
}

#[test]
fn doctor_reports_configuration_problems_and_exits_with_code_1() {
    let directory = tempdir().unwrap();
    let config = directory.path().join("nvmfd.toml");
    let state = directory.path().join("state");
    let text = format!(
        "provider = \"soft\"\nstate_directory = {state:?}\n[[listener]]\naddress = \
         \"192.0.2.77\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:d\"\n[[subsystem.namespace]]\n\
         nsid = 1\npath = \"/nvmfd-no-such-directory/disk.img\"\nsize = \"1GiB\"\n"
    );
    fs::write(&config, text).unwrap();
    let sick = doctor(&config, &["--json"]);
    assert_eq!(sick.status.code(), Some(1));
    let findings: Value = serde_json::from_slice(&sick.stdout).unwrap();
    for check in ["state", "address", "storage", "hosts"] {
        assert_eq!(level(&findings, check), "problem", "{check}");
    }
    // Each is healed, and only the others are left.
    fs::create_dir(&state).unwrap();
    let text = fs::read_to_string(&config).unwrap();
    fs::write(&config, text.replace("192.0.2.77", "127.0.0.1")).unwrap();
    let healed: Value = serde_json::from_slice(&doctor(&config, &["--json"]).stdout).unwrap();
    assert_eq!((level(&healed, "state"), level(&healed, "address")), ("ok", "ok"));
    assert_eq!(level(&healed, "storage"), "problem");
    let told = String::from_utf8(doctor(&config, &[]).stdout).unwrap();
    assert!(told.contains("create the directory first, or correct the path"), "{told}");
    assert!(!told.contains("No configuration was looked at"), "{told}");
    // A file that is not created must exist; a directory that supports direct I/O is not enough.
    let disk = directory.path().join("disk.img");
    let text = fs::read_to_string(&config).unwrap();
    let text = text.replace("\"/nvmfd-no-such-directory/disk.img\"", &format!("{disk:?}"));
    fs::write(&config, text.replace("size = \"1GiB\"\n", "")).unwrap();
    let told = String::from_utf8(doctor(&config, &[]).stdout).unwrap();
    assert!(told.contains("disk.img does not exist; correct the path, or give a size"), "{told}");
}

/// As `nvmfd check` and a start do.
#[test]
fn doctor_examines_the_size_of_files_and_unsaved_changes() {
    let directory = tempdir().unwrap();
    let [config, disk] = ["nvmfd.toml", "disk.img"].map(|name| directory.path().join(name));
    let text = format!(
        "provider = \"soft\"\nstate_directory = {:?}\n[[listener]]\naddress = \"127.0.0.1\"\n\
         [[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:d\"\nallow_any_host = true\n\
         [[subsystem.namespace]]\nnsid = 1\npath = {disk:?}\nsize = \"16KiB\"\n",
        directory.path()
    );
    fs::write(&config, text).unwrap();
    let storage = || {
        let findings: Value = serde_json::from_slice(&doctor(&config, &["--json"]).stdout).unwrap();
        (level(&findings, "storage").to_owned(), findings.to_string())
    };
    assert_eq!(storage().0, "ok", "it will be made");
    fs::write(&disk, [0; 8192]).unwrap();
    let (level, findings) = storage();
    assert!(
        level == "problem" && findings.contains("has 8192 bytes but the configuration says 16384"),
        "{findings}"
    );

    // The namespace is removed by a change that no file has.
    let change = r#"{"form": 1, "kept": [{"at_unix_s": 1, "uid": null, "change": {"change":
        "remove_namespace", "subsystem": "nqn.2026-11.io.nvmfd:d", "nsid": 1}, "base": "",
        "after": "", "replaced": []}], "set_aside": []}"#;
    let changes = directory.path().join("changes.json");
    fs::write(&changes, change).unwrap();
    let findings = String::from_utf8(doctor(&config, &["--json"]).stdout).unwrap();
    assert!(!findings.contains("disk.img") && !findings.contains("\"changes\""), "{findings}");
    fs::write(&changes, "damaged").unwrap();
    let damaged = doctor(&config, &[]);
    assert_eq!(damaged.status.code(), Some(1));
    let sentences = String::from_utf8(damaged.stdout).unwrap();
    assert!(sentences.contains("changes.json"), "{sentences}");
}

/// What root may read and write is no promise for the daemon of the unit.
#[test]
fn doctor_examines_paths_as_the_user_and_groups_of_the_unit() {
    const NOBODY: u32 = 65_534;
    let directory = tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let [config, disk, key, state] = ["nvmfd.toml", "disk.img", "key", "state"].map(at);
    fs::set_permissions(directory.path(), Permissions::from_mode(0o755)).unwrap();
    fs::write(&disk, [0; 8192]).unwrap();
    fs::write(&key, "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:\n").unwrap();
    fs::create_dir(&state).unwrap();
    let text = format!(
        "provider = \"soft\"\nstate_directory = {state:?}\n[[listener]]\naddress = \"127.0.0.1\"\n\
         [[host]]\nnqn = \"nqn.2026-11.host:h\"\ndhchap_key_file = {key:?}\n[[subsystem]]\nnqn = \
         \"nqn.2026-11.io.nvmfd:d\"\nallow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\npath = \
         {disk:?}\n"
    );
    fs::write(&config, text).unwrap();
    let mode = |path: &Path, mode| fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    mode(&disk, 0o660);
    mode(&key, 0o600);
    mode(&state, 0o700);
    // Only root can continue as another user.
    if chown(&disk, Some(0), Some(4711)).is_err() {
        return;
    }
    let unit = at("systemctl");
    let examined = |groups: &str| -> Value {
        let said = format!("LoadState=loaded\nUser=nobody\nSupplementaryGroups={groups}");
        fs::write(&unit, format!("#!/bin/sh\necho '{said}'\n")).unwrap();
        mode(&unit, 0o755);
        let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfctl"));
        command.args(["doctor", "--json", "--config"]).arg(&config);
        let path = format!("{}:{}", directory.path().display(), std::env::var("PATH").unwrap());
        let output = command.env("PATH", path).output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let levels = |groups: &str| {
        let findings = examined(groups);
        ["user", "storage", "keys", "state"].map(|check| level(&findings, check).to_owned())
    };
    assert_eq!(levels(""), ["ok", "problem", "problem", "problem"]);
    assert_eq!(levels("4711"), ["ok", "ok", "problem", "problem"]);
    chown(&key, Some(NOBODY), None).unwrap();
    chown(&state, Some(NOBODY), None).unwrap();
    assert_eq!(levels("4711"), ["ok"; 4]);
    let changes = state.join("changes.json");
    fs::write(&changes, r#"{"form": 1, "kept": [], "set_aside": []}"#).unwrap();
    mode(&changes, 0o600);
    assert_eq!(level(&examined("4711"), "config"), "problem");
    assert_eq!(level(&examined("nvmfd-no-such-group"), "user"), "problem");
}

#[test]
fn doctor_exit_code_is_correct_when_stdout_is_closed() {
    let directory = tempdir().unwrap();
    let config = directory.path().join("nvmfd.toml");
    let text = "provider = \"soft\"\n[[listener]]\naddress = \"192.0.2.77\"\n";
    fs::write(&config, text).unwrap();
    let (read, write) = std::io::pipe().unwrap();
    drop(read);
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfctl"));
    let status = command.args(["doctor", "--config"]).arg(&config).stdout(write).status().unwrap();
    assert_eq!(status.code(), Some(1));
}

#[test]
fn doctor_refers_to_nvmfd_check_for_an_invalid_configuration() {
    let directory = tempdir().unwrap();
    let config = directory.path().join("nvmfd.toml");
    fs::write(&config, "provider = 7\n").unwrap();
    let output = doctor(&config, &[]);
    assert_eq!(output.status.code(), Some(1));
    let told = String::from_utf8(output.stderr).unwrap();
    assert!(told.contains("nvmfd check"), "{told}");
    assert!(!told.contains(&format!("{0}: {0}", config.display())), "{told}");
}
