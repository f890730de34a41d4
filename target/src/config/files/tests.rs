use std::fs::Permissions;

use tempfile::{TempDir, tempdir};

use super::super::Config;
use crate::config::files::*;

const MAIN: &str = r#"provider = "soft"
[[listener]]
address = "127.0.0.1"
[limits]
queue_depth = 64
"#;

const DISK: &str = r#"[[subsystem]]
nqn = "nqn.2026-11.io.nvmfd:a"
allow_any_host = true
"#;

/// A directory with these files.
fn stage(files: &[(&str, &str)]) -> TempDir {
    let directory = tempdir().unwrap();
    for (name, text) in files {
        let file = directory.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    directory
}

fn load(directory: &TempDir) -> Result<Config, String> {
    let read = ConfigFiles::read(&directory.path().join("nvmfd.toml"));
    let root = format!("{}/", directory.path().display());
    let config = read.and_then(|sources| Config::of(&sources));
    config.map_err(|errors| errors.to_string().replace(&root, ""))
}

#[test]
fn configuration_files_are_merged_in_order_of_their_names() {
    let other = DISK.replace(":a", ":b");
    let directory = stage(&[
        ("nvmfd.toml", MAIN),
        ("conf.d/20-a.toml", DISK),
        ("conf.d/10-b.toml", &format!("{other}[[listener]]\naddress = \"127.0.0.2\"\n")),
        (
            "conf.d/30.toml",
            "[limits]\nio_queues = 3\n[[host]]\nnqn = \"nqn.2026-11.org.example:h\"\n\
                            dhchap_key_file = \"/k\"\n",
        ),
        ("conf.d/empty.toml", ""),
        ("conf.d/.hidden.toml", "not TOML"),
        ("conf.d/40.toml.bak", "not TOML"),
        ("conf.d/README", "not TOML"),
    ]);
    let config = load(&directory).unwrap();
    let names: Vec<&str> = config.subsystems.iter().map(|each| each.nqn.as_str()).collect();
    assert_eq!(names, ["nqn.2026-11.io.nvmfd:b", "nqn.2026-11.io.nvmfd:a"]);
    assert_eq!((config.limits.queue_depth, config.limits.io_queues), (64, 3));
    assert_eq!(config.listeners.iter().map(|each| each.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(config.authentication.hosts.len(), 1);
}

#[test]
fn a_configured_include_directory_must_exist() {
    let main = format!("include = \"more/disks\"\n{MAIN}");
    let directory =
        stage(&[("nvmfd.toml", &main), ("more/disks/a.toml", DISK), ("conf.d/x.toml", "?")]);
    assert_eq!(load(&directory).unwrap().subsystems.len(), 1);
    let elsewhere = directory.path().join("more/disks");
    fs::write(directory.path().join("nvmfd.toml"), format!("include = {elsewhere:?}\n{MAIN}"))
        .unwrap();
    assert_eq!(load(&directory).unwrap().subsystems.len(), 1);
    fs::remove_file(directory.path().join("conf.d/x.toml")).unwrap();
    let says = |include: &str, what: &str| {
        let main = format!("include = {include}\n{MAIN}{DISK}");
        fs::write(directory.path().join("nvmfd.toml"), main).unwrap();
        let said = load(&directory).unwrap_err();
        assert!(said.contains(what), "{include}: {said}");
    };
    says("\"none\"", "none: the configuration cannot be read: No such file");
    says("\".\"", "it is where the file itself is: name a directory of its own");
    says("\"\"", "nvmfd.toml:1:11: `include` names no directory");
    says("7", "nvmfd.toml:1:11: `include`");
    // The directory is optional.
    let directory = stage(&[("nvmfd.toml", &format!("{MAIN}{DISK}"))]);
    assert_eq!(load(&directory).unwrap().subsystems.len(), 1);
}

#[test]
fn errors_name_their_file_and_that_of_the_earlier_definition() {
    let twice = |more: &str, says: &[&str]| {
        let main = format!("{MAIN}{DISK}");
        let directory =
            stage(&[("nvmfd.toml", &main), ("conf.d/a.toml", ""), ("conf.d/b.toml", more)]);
        let said = load(&directory).unwrap_err();
        let lines: Vec<&str> = said.lines().collect();
        assert_eq!(lines.len(), says.len(), "{said}");
        lines.iter().zip(says).for_each(|(line, says)| assert!(line.contains(says), "{said}"));
    };
    twice(DISK, &["conf.d/b.toml:2:7: this NQN is used twice, first in nvmfd.toml:7:7: give each"]);
    twice(
        "\nprovider = \"soft\"\n",
        &["conf.d/b.toml:2:1: `provider` is said twice, \
                                         first in nvmfd.toml:1:1: leave it in one"],
    );
    twice(
        "limits.queue_depth = 64",
        &["conf.d/b.toml:1:8: `queue_depth` is said \
                                        twice, first in nvmfd.toml:5:1"],
    );
    twice(
        "[[listener]]\naddress = \"127.0.0.1\"\nid = 9",
        &["conf.d/b.toml:2:11: the listener 127.0.0.1:4420 overlaps with \
         127.0.0.1:4420 of nvmfd.toml:2:1"],
    );
    twice("[[listener]]\naddress = \"127.0.0.2\"\nid = 1", &["like the one of nvmfd.toml:2:1"]);
    twice("subsystem = 7", &["conf.d/b.toml:1:1: `subsystem` is said twice"]);
    twice("include = \"c\"", &["conf.d/b.toml:1:1: `include` is for the configuration"]);
    twice("[[subsystem]", &["conf.d/b.toml:1:"]);
    twice(
        "[[subsystem]]\nnqn = 7\ncolour = 1",
        &["conf.d/b.toml:2:7: `nqn`", "conf.d/b.toml:3:1: unknown key `colour`"],
    );
    // Each file has its own errors.
    let directory = stage(&[("nvmfd.toml", "a = 1"), ("conf.d/b.toml", "b = 1\nc = 1")]);
    let said = load(&directory).unwrap_err();
    for says in ["nvmfd.toml:1:1: unknown key `a`", "b.toml:2:1: unknown"] {
        assert!(said.contains(says), "{said}");
    }
}

#[test]
fn unreadable_files_are_errors_and_world_writable_ones_warnings() {
    let directory = stage(&[("nvmfd.toml", MAIN), ("conf.d/a.toml", DISK)]);
    let file = directory.path().join("conf.d/a.toml");
    let sources = || ConfigFiles::read(&directory.path().join("nvmfd.toml")).unwrap();
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    fs::set_permissions(file.parent().unwrap(), Permissions::from_mode(0o755)).unwrap();
    assert_eq!(sources().warnings(), Vec::<String>::new());
    fs::set_permissions(&file, Permissions::from_mode(0o646)).unwrap();
    let warnings = sources().warnings();
    assert!(warnings.len() == 1 && warnings[0].contains("a.toml is writable for all users"));
    fs::set_permissions(file.parent().unwrap(), Permissions::from_mode(0o777)).unwrap();
    assert_eq!(sources().warnings().len(), 2);

    fs::write(&file, [0xFF]).unwrap();
    let said = load(&directory).unwrap_err();
    assert!(
        said.contains("conf.d/a.toml: the configuration cannot be read: ")
            && said.contains("UTF-8")
    );
    fs::remove_file(&file).unwrap();
    fs::create_dir(&file).unwrap();
    assert!(
        load(&directory).unwrap_err().contains("conf.d/a.toml: the configuration cannot be read")
    );
    fs::remove_dir(&file).unwrap();
    std::os::unix::fs::symlink("/nonexistent", &file).unwrap();
    assert!(
        load(&directory)
            .unwrap_err()
            .contains("let the user of the daemon read it, or take it away")
    );
}
