//! `nvmfctl save` and `apply`: what is in the files, and what is in force.

use super::*;

#[test]
fn live_changes_survive_a_kill_and_can_be_saved() {
    let mut daemon = Daemon::start("127.0.42.4");
    let disk = daemon.directory.path().join("disk.img");
    let file = daemon.directory.path().join("nvmfd.toml");
    let declared = fs::read_to_string(&file).unwrap() + "# ours\n";
    fs::write(&file, &declared).unwrap();
    let disk = disk.to_str().unwrap();
    let add = ["namespace", "add", NQN, "2", disk, "--size", "1MiB"];

    let told = daemon.says(&["namespace", "add", NQN, "auto", disk, "--size", "1MiB", "--dry-run"]);
    assert!(told.starts_with("+ namespace 2: file "), "{told}");
    let same = daemon.says(&["namespace", "add", NQN, disk, "--size", "1MiB", "--dry-run"]);
    assert_eq!(same, told, "without an nsid");
    assert!(!daemon.says(&["namespace", "list"]).contains(disk), "only told");
    daemon.says(&add);
    daemon.says(&["namespace", "resize", NQN, "1", "2GiB"]);
    let list = daemon.says(&["namespace", "list"]);
    assert!(list.contains(disk) && list.contains("2GiB"), "{list}");
    assert!(daemon.says(&["status"]).contains("2 that the file does not have"));

    let refused = |daemon: &Daemon, arguments: &[&str]| {
        let (code, out, err) = nvmfctl(&daemon.socket(), arguments);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{arguments:?}");
        err
    };
    assert!(refused(&daemon, &add).contains("namespace 2 exists already"));
    let none = ["namespace", "add", NQN, "3", "/nonexistent/disk"];
    assert!(refused(&daemon, &none).contains("(nothing was changed)"));
    let twice = ["namespace", "add", NQN, "/dev/null", disk];
    assert!(refused(&daemon, &twice).contains("two paths"));
    assert!(refused(&daemon, &["host", "deny", NQN, "nqn.a"]).contains("admits any host"));
    assert_eq!(daemon.says(&["changes", "list"]).lines().count(), 2, "what is refused is not kept");

    daemon.process.kill().unwrap();
    daemon.process.wait().unwrap();
    let directory = std::mem::replace(&mut daemon.directory, tempfile::tempdir().unwrap());
    let daemon = Daemon::start_in(directory);
    assert_eq!(daemon.says(&["namespace", "list"]), list, "it outlasts a kill");
    let history = daemon.says(&["history"]);
    let entries: Vec<&str> = history.lines().filter(|line| !line.starts_with(' ')).collect();
    let me = format!(", user {}: ", nix::unistd::getuid());
    assert!(entries.len() == 2 && entries.iter().all(|line| line.contains(&me)), "{history}");
    assert!(history.contains("\n    + namespace 2: file "), "{history}");

    daemon.says(&["save"]);
    let saved = fs::read_to_string(&file).unwrap();
    assert!(saved.contains("# ours") && saved.contains(disk) && saved.contains("2GiB"), "{saved}");
    assert!(daemon.says(&["changes", "list"]).contains("has everything"));
    assert!(!daemon.directory.path().join("changes.json").exists());
    assert!(daemon.says(&["save"]).contains("nothing to save"));
    assert_eq!(daemon.says(&["namespace", "list"]), list);

    // Back to what it was, as a whole.
    let other = daemon.directory.path().join("other.toml");
    fs::write(&other, &declared).unwrap();
    let other = other.to_str().unwrap();
    let plan = daemon.says(&["plan", other]);
    assert!(plan.contains("- namespace 2") && plan.contains("~ namespace 1"), "{plan}");
    assert_eq!(daemon.says(&["namespace", "list"]), list, "a plan changes nothing");
    assert_eq!(daemon.says(&["apply", other]), plan);
    assert!(!daemon.says(&["namespace", "list"]).contains(disk));
    fs::write(other, "colour = 1\n").unwrap();
    assert!(refused(&daemon, &["apply", other]).contains(":1:1: unknown key"));
    daemon.says(&["save"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), declared);
    assert!(daemon.says(&["reload"]).contains("nothing changes"));
    daemon.stop();
}

#[test]
fn changes_to_a_split_configuration_are_saved_to_the_right_file() {
    let daemon = Daemon::start("127.0.42.5");
    let file = daemon.directory.path().join("nvmfd.toml");
    let main = fs::read_to_string(&file).unwrap();
    let more = daemon.directory.path().join("conf.d/guests.toml");
    fs::create_dir(more.parent().unwrap()).unwrap();
    let theirs = "nqn.2026-11.io.nvmfd:guests";
    fs::write(
        &more,
        format!("# guests\n[[subsystem]]\nnqn = \"{theirs}\"\nallow_any_host = true\n"),
    )
    .unwrap();
    assert!(daemon.says(&["reload"]).contains(&format!("+ subsystem {theirs}")));
    daemon.says(&["namespace", "add", theirs, "1", "--kind", "null", "--size", "1MiB"]);
    daemon.says(&["host", "allow", NQN, "nqn.2026-11.org.example:h"]);
    let other = daemon.directory.path().join("other.toml");
    fs::write(&other, &main).unwrap();
    let plan = daemon.says(&["plan", other.to_str().unwrap()]);
    assert!(
        plan.starts_with("- host") && plan.lines().count() == 1,
        "the other file stays: {plan}"
    );
    assert!(
        daemon.says(&["save", "--dry-run"]).contains(&format!("# {}\n# guests", more.display()))
    );
    let said = daemon.says(&["save"]);
    assert!(said.contains("nvmfd.toml") && said.contains("guests.toml"), "{said}");
    let saved = [&file, &more].map(|file| fs::read_to_string(file).unwrap());
    assert!(saved[0].contains("example:h") && !saved[0].contains(theirs), "{}", saved[0]);
    assert!(saved[1].starts_with("# guests") && saved[1].contains("1MiB"), "{}", saved[1]);
    assert!(daemon.says(&["changes", "list"]).contains("has everything"));

    // A mistake in any file has its place, and changes nothing.
    fs::write(&more, format!("{}colour = 1\n", saved[1])).unwrap();
    let (code, _, err) = nvmfctl(&daemon.socket(), &["reload"]);
    assert_eq!(code, Some(1));
    assert!(err.contains("guests.toml:10:1: ") && err.contains("unknown key `colour`"), "{err}");
    assert!(daemon.says(&["subsystem", "list"]).contains(theirs));
    let checked =
        Command::new(env!("CARGO_BIN_EXE_nvmfd")).arg("check").arg(&file).output().unwrap();
    let err = String::from_utf8(checked.stderr).unwrap();
    assert!(!checked.status.success() && err.contains("guests.toml:10:1: "), "{err}");
    daemon.stop();
}

/// A daemon that somebody has taken over could name any file.
#[test]
fn root_saves_a_daemon_of_another_user_only_to_a_known_file() {
    const USER: u32 = 65_534;
    let directory = tempfile::tempdir().unwrap();
    // Only root can start it.
    if chown(directory.path(), Some(USER), Some(USER)).is_err() {
        return;
    }
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let file = directory.path().join("nvmfd.toml");
    let text = format!(
        "provider = \"soft\"\nstate_directory = {:?}\n[management]\nsocket = {:?}\n[reactor]\n\
         io_engine = \"threads\"\n[memory]\nreceives = 192\ndata = \"3MiB\"\n[[listener]]\naddress = \
         \"127.0.42.21\"\n[[subsystem]]\nnqn = \"{NQN}\"\nallow_any_host = true\n",
        directory.path(),
        directory.path().join("s"),
    );
    fs::write(&file, &text).unwrap();
    let daemon = Daemon::start_as(directory, USER);
    daemon.says(&["subsystem", "set", NQN, "model=other"]);
    let (code, _, err) = nvmfctl(&daemon.socket(), &["save"]);
    let named = format!("NVMFD_CONFIG={} nvmfctl save", file.display());
    assert!(code == Some(1) && err.contains(&named), "{err}");
    assert_eq!(fs::read_to_string(&file).unwrap(), text);
    let mut command = Command::new(env!("CARGO_BIN_EXE_nvmfctl"));
    command.env("NVMFD_CONFIG", &file).arg("--socket").arg(daemon.socket()).arg("save");
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(fs::read_to_string(&file).unwrap().contains("model = \"other\""));
    daemon.stop();
}

#[test]
fn a_save_whose_reload_is_refused_reports_the_written_files() {
    let daemon = Daemon::start("127.0.42.19");
    let file = daemon.directory.path().join("nvmfd.toml");
    let key = daemon.directory.path().join("key");
    let secret = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    fs::write(&key, secret).unwrap();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    daemon.says(&["host", "key", "nqn.2026-11.host:a", key.to_str().unwrap()]);
    // Only a reload reads it again.
    fs::remove_file(&key).unwrap();
    let (code, out, err) = nvmfctl(&daemon.socket(), &["save"]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(fs::read_to_string(&file).unwrap().contains("dhchap_key_file"));
    assert!(err.contains("wrote 1 change into") && err.contains("/key cannot be read"), "{err}");
    assert!(!err.contains("nothing was changed"), "{err}");
    daemon.stop();
}

/// It would put the edits into force, which nobody has asked for.
#[test]
fn a_save_of_edited_files_is_refused_until_they_are_reloaded() {
    let daemon = Daemon::start("127.0.42.31");
    let file = daemon.directory.path().join("nvmfd.toml");
    daemon.says(&["subsystem", "set", NQN, "serial=SAVED"]);
    let other = "[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:edited\"\nallow_any_host = true\n";
    let edited = fs::read_to_string(&file).unwrap() + other;
    fs::write(&file, &edited).unwrap();
    for arguments in [&["save"][..], &["--dry-run", "save"]] {
        let (code, out, err) = nvmfctl(&daemon.socket(), arguments);
        assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
        assert!(err.contains("was edited and not reloaded"), "{err}");
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), edited);
    assert!(!daemon.says(&["subsystem", "list"]).contains("edited"));
    daemon.says(&["reload"]);
    daemon.says(&["save"]);
    let saved = fs::read_to_string(&file).unwrap();
    assert!(saved.contains("SAVED") && saved.contains(other), "{saved}");
    daemon.stop();
}

/// Passes requests on to a daemon. `during`: what happens between the response to a first `GET
/// /v1/changes` and its receipt.
fn relay(daemon: &Daemon, during: impl FnOnce() + Send + 'static) -> PathBuf {
    let (real, mut during) = (daemon.socket(), Some(during));
    answering(daemon.directory.path(), move |request| {
        let response = passed_on(&real, request);
        if request.starts_with("GET /v1/changes ") {
            during.take().into_iter().for_each(|during| during());
        }
        response
    })
}

/// At a gateway with a shared configuration the text would replace the file that has the listeners.
#[test]
fn an_apply_fails_if_it_is_unknown_whether_the_configuration_is_shared() {
    let daemon = Daemon::start("127.0.42.33");
    let other = daemon.directory.path().join("other.toml");
    fs::copy(daemon.directory.path().join("nvmfd.toml"), &other).unwrap();
    let real = daemon.socket();
    let path = answering(daemon.directory.path(), move |request| {
        match request.contains("/v1/gateway-group/configuration") {
            true => b"HTTP/1.1 503 \r\ncontent-length: 0\r\n\r\n".to_vec(),
            false => passed_on(&real, request),
        }
    });
    let (code, out, err) = nvmfctl(&path, &["apply", other.to_str().unwrap()]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("the daemon answers 503"), "{err}");
    daemon.stop();
}

/// Restores the text of the files between the list and the reload of a save; there is no unsaved
/// change then.
#[test]
fn an_apply_during_a_save_stays_in_force() {
    let daemon = Daemon::start("127.0.42.23");
    let file = daemon.directory.path().join("nvmfd.toml");
    let declared = fs::read_to_string(&file).unwrap();
    let other = daemon.directory.path().join("other.toml");
    fs::write(&other, &declared).unwrap();
    daemon.says(&["subsystem", "set", NQN, "serial=UNDONE"]);
    let socket = daemon.socket();
    let applied = relay(&daemon, move || {
        assert_eq!(nvmfctl(&socket, &["apply", other.to_str().unwrap()]).0, Some(0));
    });
    let (code, out, err) = nvmfctl(&applied, &["save"]);
    assert_eq!((code, out.as_str()), (Some(1), ""), "{err}");
    assert!(err.contains("changed during the save, and the files are as they were"), "{err}");
    assert_eq!(fs::read_to_string(&file).unwrap(), declared);
    assert!(!daemon.says(&["subsystem", "show", NQN]).contains("UNDONE"));

    // A change meanwhile, which applies to the saved files as well, remains unsaved.
    daemon.says(&["subsystem", "set", NQN, "serial=SAVED"]);
    let socket = daemon.socket();
    fs::remove_file(applied).unwrap();
    let changed = relay(&daemon, move || {
        assert_eq!(nvmfctl(&socket, &["subsystem", "set", NQN, "model=LATER"]).0, Some(0));
    });
    let (code, _, err) = nvmfctl(&changed, &["save"]);
    assert_eq!(code, Some(0), "{err}");
    let saved = fs::read_to_string(&file).unwrap();
    assert!(saved.contains("SAVED") && !saved.contains("LATER"), "{saved}");
    assert!(daemon.says(&["changes", "list"]).contains("LATER"));
    assert!(daemon.says(&["subsystem", "show", NQN]).contains("LATER"));
    daemon.stop();
}

#[test]
fn apply_of_a_directory_replaces_all_files_or_those_in_conf_d() {
    let daemon = Daemon::start("127.0.42.9");
    let file = daemon.directory.path().join("nvmfd.toml");
    let main = fs::read_to_string(&file).unwrap();
    let other = daemon.directory.path().join("other");
    fs::create_dir_all(other.join("conf.d")).unwrap();
    let guests = |name: &str| format!("[[subsystem]]\nnqn = \"{name}\"\nallow_any_host = true\n");
    let [a, b] = ["a", "b"].map(|last| format!("nqn.2026-11.io.nvmfd:{last}"));
    fs::write(other.join("nvmfd.toml"), format!("# new\n{main}")).unwrap();
    fs::write(other.join("conf.d/a.toml"), guests(&a)).unwrap();
    let path = other.to_str().unwrap();
    let plan = daemon.says(&["plan", path]);
    assert_eq!(plan.trim(), format!("+ subsystem {a}"));
    assert_eq!(daemon.says(&["apply", path]), plan);
    let listed = daemon.says(&["changes", "list"]);
    assert!(listed.contains("replace the configuration with all its files"), "{listed}");
    let said = daemon.says(&["save"]);
    assert!(said.contains("nvmfd.toml") && said.contains("conf.d/a.toml"), "{said}");
    assert!(fs::read_to_string(&file).unwrap().starts_with("# new"));

    // Other files in the place of those in conf.d.
    let conf_d = daemon.directory.path().join("more");
    fs::create_dir(&conf_d).unwrap();
    fs::write(conf_d.join("b.toml"), guests(&b)).unwrap();
    let path = conf_d.to_str().unwrap();
    let plan = daemon.says(&["apply", path]);
    assert!(plan.contains(&format!("- subsystem {a}")), "{plan}");
    assert!(plan.contains(&format!("+ subsystem {b}")) && plan.lines().count() == 2, "{plan}");
    let would = daemon.says(&["save", "--dry-run"]);
    assert!(would.contains("conf.d/a.toml is removed") && would.contains(&b), "{would}");
    let said = daemon.says(&["save"]);
    assert!(said.contains("conf.d/a.toml (removed)"), "{said}");
    let left = |directory: &str| -> Vec<String> {
        let entries = fs::read_dir(daemon.directory.path().join(directory)).unwrap();
        entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    };
    assert_eq!(left("conf.d"), ["b.toml"]);

    // Mistakes have their place in the directory that was named, and change nothing.
    let refused = |what: &str| {
        let (code, out, err) = nvmfctl(&daemon.socket(), &["apply", path]);
        assert_eq!((code, out.as_str()), (Some(1), ""));
        assert!(err.contains(what), "{err}");
        assert!(daemon.says(&["subsystem", "list"]).contains(&b));
    };
    fs::write(conf_d.join("b.toml"), format!("{}colour = 1\n", guests(&a))).unwrap();
    refused(&format!("{path}/b.toml:4:1: unknown key `colour`"));
    fs::write(conf_d.join("b.toml"), guests(NQN)).unwrap();
    refused("b.toml:2:7: this NQN is used twice, first in ");
    fs::rename(conf_d.join("b.toml"), conf_d.join("b.conf")).unwrap();
    refused("more has neither nvmfd.toml nor other files whose names end in .toml");

    let new = "nqn.2026-11.io.nvmfd:new";
    daemon.says(&["subsystem", "add", new]);
    let lines = daemon.says(&["connect-line", new]);
    assert!(lines.starts_with("# No host may use it yet."), "{lines}");
    assert!(lines.contains(&format!("nvmfctl host allow {new} HOSTNQN\n# On the host")), "{lines}");
    assert!(!daemon.says(&["connect-line", &b]).contains("No host may"));
    daemon.stop();
}
