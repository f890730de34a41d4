//! The scripts that packages run when they are upgraded: programs of the system are replaced by scripts
//! that note their arguments.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("the checkout").canonicalize().expect("the checkout")
}

/// The commands that restart the daemon, in the two kinds of packages.
const RESTARTS: [(&str, &str); 2] = [
    ("configs/debian/postinst", "deb-systemd-invoke try-restart nvmfd.service"),
    ("configs/rpm/nvmfd.spec", "systemctl try-restart nvmfd.service"),
];

/// A script that a package runs during an upgrade.
fn script(file: &str) -> String {
    let text = fs::read_to_string(root().join(file)).expect(file);
    match text.split_once("%postun\n") {
        Some((_, rest)) => rest.split("\n%").next().expect("its end").to_owned(),
        None => text,
    }
}

/// Runs a script on a machine where systemd runs. Returns what it prints, and the programs that it has
/// run.
fn upgrade(file: &str, is_active: bool, is_good: bool) -> (String, String) {
    let machine = TempDir::new().expect("a directory");
    let at = |path: &str| machine.path().join(path);
    for directory in ["bin", "etc/nvmfd", "run/systemd/system"] {
        fs::create_dir_all(at(directory)).expect(directory);
    }
    fs::write(at("etc/nvmfd/nvmfd.toml"), "").expect("a file");
    let log = at("log").display().to_string();
    let program = |name: &str, rest: &str| {
        let text = format!("#!/bin/sh\necho \"${{0##*/}} $*\" >>{log}\n{rest}\n");
        fs::write(at("bin").join(name), text).expect(name);
        fs::set_permissions(at("bin").join(name), fs::Permissions::from_mode(0o755)).expect(name);
    };
    for name in ["systemd-sysusers", "systemd-tmpfiles", "deb-systemd-helper", "deb-systemd-invoke"]
    {
        program(name, "");
    }
    let status = if is_active { "" } else { "case $* in *is-active*) exit 3 ;; esac" };
    program("systemctl", status);
    let refuses = "echo warmth; echo 'ERROR unknown key `warmth`' >&2; exit 1";
    program("nvmfd", if is_good { "" } else { refuses });
    let mut text = script(file);
    for directory in ["/run/", "/etc/"] {
        text = text.replace(directory, &format!("{}{directory}", machine.path().display()));
    }
    // The former version of a Debian package, and the number of RPM packages that stay.
    let arguments = if file.contains("debian") { ["configure", "0.1.0"] } else { ["1", ""] };
    let mut command = Command::new("/bin/sh");
    command.args(["-c", &text, "script"]).args(arguments);
    let path = format!("{}:/usr/bin:/bin", at("bin").display());
    let output = command.env("PATH", path).output().expect("a shell");
    assert!(output.status.success(), "{file}: {}", String::from_utf8_lossy(&output.stderr));
    let printed = String::from_utf8(output.stdout).expect("text");
    (printed, fs::read_to_string(at("log")).expect("a log"))
}

#[test]
fn package_upgrades_keep_a_daemon_whose_configuration_is_refused() {
    for (file, restart) in RESTARTS {
        let (printed, programs) = upgrade(file, true, true);
        assert!(programs.contains(restart) && printed.is_empty(), "{file}: {printed}{programs}");
        let (printed, programs) = upgrade(file, true, false);
        assert!(!programs.contains("restart"), "{file}: {programs}");
        assert!(printed.contains("ERROR unknown key `warmth`\n"), "{file}: {printed}");
        assert!(printed.contains("systemctl restart nvmfd\n"), "{file}: {printed}");
        // There is nothing to lose.
        let (printed, programs) = upgrade(file, false, false);
        assert!(programs.contains(restart) && printed.is_empty(), "{file}: {printed}{programs}");
    }
}
