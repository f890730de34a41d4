//! Checks storage: direct I/O, the state directory, key files.

use std::fmt;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicU32, Ordering};

use nvme::Nqn;

use super::{Finding, group};
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::ImageName;
use crate::blockdev::rbd::{self, Examination};
use crate::blockdev::{BackingDevice, OpenError, names_device};
use crate::config::{Config, KeyReader, NamespaceConfig, NamespaceKind};
use crate::platform::availability;
use crate::platform::probes::{self, Probed, probe_all, probe_directories, probe_pools};
use crate::plural::count;

/// Remedy for a path that does not answer.
const HANGS: &str = "the kernel log may name the device that hangs";

pub(super) fn examine(config: &Config) -> Vec<Finding> {
    let opening = BlockingPool::default();
    let mut findings = stores(config, &opening);
    findings.extend(managed_directories(config, &opening));
    findings.extend(managed_pools(config, &opening));
    findings.extend(group::examine(config, &opening));
    if let Some(directory) = &config.state_directory {
        findings.push(writable("state", "state_directory", directory, try_writing(directory)));
    }
    let reader = || KeyReader::of(config.state_directory.as_deref());
    if !config.authentication.hosts.is_empty() {
        let keys = config.authentication.hosts.len();
        findings.extend(key_files(keys, config.authentication.examine_keys(reader())));
    }
    if config.management.http_token_file.is_some() {
        findings.push(token_file(config.management.examine_token(reader())));
    }
    findings
}

/// Checks all stores concurrently.
fn stores(config: &Config, opening: &BlockingPool) -> Vec<Finding> {
    let place = |nqn: Nqn, nsid: u32| format!("namespace {nsid} of {nqn}");
    let probed = probe_all(config, opening, move |nqn, namespace| {
        Ok(store(&place(nqn, namespace.nsid), namespace))
    });
    let findings = probed.into_iter().map(|Probed { nqn, namespace, outcome, .. }| {
        let sentence = |why| format!("{}: {why}", place(nqn, namespace.nsid));
        outcome.unwrap_or_else(|why| Finding::problem("storage", sentence(why), HANGS))
    });
    findings.collect()
}

/// Checks the directories of namespaces that hosts manage.
fn managed_directories(config: &Config, opening: &BlockingPool) -> Vec<Finding> {
    let name = |nqn: Nqn| format!("managed namespaces of {nqn}: directory");
    let probed = probe_directories(config, opening, move |nqn, directory| {
        Ok(managed_directory(&name(nqn), directory))
    });
    let findings = probed.into_iter().map(|(nqn, outcome, _)| {
        let sentence = |why| format!("{}: {why}", name(nqn));
        outcome.unwrap_or_else(|why| Finding::problem("storage", sentence(why), HANGS))
    });
    findings.collect()
}

/// Checks the pools in which hosts make images.
fn managed_pools(config: &Config, opening: &BlockingPool) -> Vec<Finding> {
    let finding = |(nqn, pool, outcome): (Nqn, String, Result<(), OpenError>)| {
        let name = format!("managed namespaces of {nqn}: pool {pool}");
        match outcome {
            Ok(()) => Finding::ok("storage", format!("{name}: images can be made")),
            Err(why) => {
                Finding::problem("storage", format!("{name}: {why}"), "see docs/src/managed.md")
            }
        }
    };
    probe_pools(config, opening).into_iter().map(finding).collect()
}

fn managed_directory(name: &str, directory: &Path) -> Finding {
    match availability::directory(directory) {
        None => writable("storage", name, directory, try_writing(directory)),
        Some(why) => {
            let remedy = "make it, or mount its file system; or correct the path";
            Finding::problem("storage", format!("{name}: {why}"), remedy)
        }
    }
}

fn store(place: &str, namespace: &NamespaceConfig) -> Finding {
    match &namespace.kind {
        NamespaceKind::Rbd { image, cluster, .. } => {
            of_image(place, image, probes::image(namespace, image, cluster))
        }
        // A daemon that serves it has its lock.
        NamespaceKind::File { path, .. } => {
            match BackingDevice::examine(&namespace.backing(), true) {
                Ok(false) => direct(place, path, Ok(())),
                Ok(true) => direct(place, path, try_creating(path)),
                Err(error) => unusable("storage", place, &error),
            }
        }
        NamespaceKind::Ram { .. } | NamespaceKind::Null { .. } => {
            Finding::ok("storage", format!("{place} has no store"))
        }
    }
}

/// Creates and removes a file beside the path of a missing one, with direct I/O.
fn try_creating(path: &Path) -> io::Result<()> {
    // Nothing is made among the devices.
    if names_device(path) {
        return Err(io::Error::from_raw_os_error(libc::ENOENT));
    }
    trial(path.parent().unwrap_or(path), |probe| {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true).mode(0o600);
        options.custom_flags(libc::O_DIRECT).open(probe).map(drop)
    })
}

fn try_writing(directory: &Path) -> io::Result<()> {
    trial(directory, |probe| OpenOptions::new().write(true).create_new(true).open(probe).map(drop))
}

/// Creates a file with an unused name in a directory, and removes it. Other checks may run in the
/// same directory concurrently.
fn trial(directory: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    static TRIALS: AtomicU32 = AtomicU32::new(0);
    let number = TRIALS.fetch_add(1, Ordering::Relaxed);
    let probe = directory.join(format!(".nvmfd-doctor-{}-{number}", std::process::id()));
    let made = make(&probe);
    // Some file systems create the file first and reject direct I/O afterwards.
    let _ = fs::remove_file(&probe);
    made
}

/// Finding about an image: library, configuration, rights, pool, features.
fn of_image(place: &str, image: &ImageName, found: Result<Examination, OpenError>) -> Finding {
    let check = "ceph";
    match (found, rbd::library_version()) {
        (Ok(Examination { size_bytes, owner }), Ok(version)) => {
            let owner = owner.map_or("nobody".to_owned(), |owner| format!("client {owner}"));
            Finding::ok(
                check,
                format!(
                    "{place}: image {image} of {size_bytes} bytes can be served (librados \
                     {version}); {owner} holds its lock"
                ),
            )
        }
        (Err(error), _) => unusable(check, place, &error),
        (_, Err(sentence)) => unusable(check, place, &sentence),
    }
}

/// Finding about a store that a start cannot open. The sentence has its remedy.
fn unusable(check: &'static str, place: &str, sentence: &dyn fmt::Display) -> Finding {
    Finding::problem(check, format!("{place}: {sentence}"), "see above")
}

fn direct(place: &str, path: &Path, tried: io::Result<()>) -> Finding {
    let check = "storage";
    let shown = path.display();
    let Err(error) = tried else {
        return Finding::ok(check, format!("{place}: {shown} supports direct I/O"));
    };
    let sentence = format!("{place}: {shown}: {error}");
    let remedy = match error.raw_os_error() {
        Some(libc::EINVAL | libc::EOPNOTSUPP) => {
            "its file system has no direct I/O (O_DIRECT): use ext4, XFS or btrfs, or a block \
             device"
        }
        Some(libc::ENOENT | libc::ENOTDIR) => {
            "make the directory, attach the device or mount the file system; or correct the path"
        }
        Some(libc::EACCES | libc::EPERM) => {
            "give the user of nvmfd the right to it and to its directories (where `user` names none, \
             this was tried as the user who runs this)"
        }
        Some(libc::EROFS) => "its file system is mounted read-only: mount it for writing",
        Some(libc::ENXIO | libc::ENODEV) => "there is no device behind it: attach it",
        _ => "see the kernel log",
    };
    Finding::problem(check, sentence, remedy)
}

/// Finding about a directory, by its name in sentences, that the daemon has to write.
fn writable(check: &'static str, name: &str, directory: &Path, tried: io::Result<()>) -> Finding {
    let shown = directory.display();
    let Err(error) = tried else {
        return Finding::ok(check, format!("{name} {shown} can be written"));
    };
    let sentence = format!("{name} {shown} cannot be written: {error}");
    let remedy = match error.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => {
            format!("make it: install -d -m 700 {shown}")
        }
        io::ErrorKind::StorageFull => format!("free space below {shown}"),
        _ => format!(
            "give it to the user of nvmfd: chown USER {shown} (where `user` names none, this was \
             tried as the user who runs this)"
        ),
    };
    Finding::problem(check, sentence, remedy)
}

/// Returns the findings about this number of key files.
fn key_files(keys: usize, (mistakes, doubts): (Vec<String>, Vec<String>)) -> Vec<Finding> {
    let check = "keys";
    if mistakes.is_empty() && doubts.is_empty() {
        return vec![Finding::ok(
            check,
            format!("checked the key files of {}", count(keys, "host")),
        )];
    }
    let remedy = "only their owner, the user of nvmfd, may have access (chmod 600), and they \
                  contain the output of `nvme gen-dhchap-key`";
    let problems = mistakes.into_iter().map(|mistake| Finding::problem(check, mistake, remedy));
    problems.chain(doubts.into_iter().map(|doubt| Finding::warning(check, doubt, remedy))).collect()
}

fn token_file(examined: Result<Option<String>, String>) -> Finding {
    let remedy = "only its owner, the user of nvmfd, may have access (chmod 600), and it contains the \
                  output of `openssl rand -hex 32`";
    match examined {
        Ok(None) => Finding::ok("keys", "checked the file of the token".to_owned()),
        Ok(Some(doubt)) => Finding::warning("keys", doubt, remedy),
        Err(mistake) => Finding::problem("keys", mistake, remedy),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level::{Ok as Fine, Problem};
    use super::super::tests::says;
    use crate::platform::doctor::storage::*;
    use std::fs::Permissions;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn direct_io_is_tried_on_real_files() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = directory.path().join("disk.img");
        let found = |path: &Path, more: &str| {
            let text = format!(
                "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                 \"nqn.2026-11.io.nvmfd:a\"\n[[subsystem.namespace]]\nnsid = 1\npath = {path:?}\n{more}"
            );
            stores(&Config::parse(&text).unwrap(), &BlockingPool::default()).remove(0)
        };
        let (size, read_only) = ("size = \"4KiB\"", "read_only = true");
        says(&found(&path, ""), Problem, "does not exist; correct the path, or give a size");
        says(&found(&path, size), Fine, "supports direct I/O");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
        fs::write(&path, [0; 4096]).unwrap();
        says(&found(&path, size), Fine, "supports direct I/O");
        says(&found(&path, "size = \"8KiB\""), Problem, "has 4096 bytes but");
        says(&found(&path.join("x"), size), Problem, "disk.img/x");
        says(&found(&directory.path().join("no/disk.img"), size), Problem, "create the directory");
        let device = Path::new("/dev/nvmfd-no-such-device");
        says(&found(device, size), Problem, "no-such-device");
        assert!(!device.exists(), "nothing is made among the devices");
        // procfs has no direct I/O.
        says(&found(Path::new("/proc/version"), read_only), Problem, "O_DIRECT");
        // Nobody, not even root, may write to a program that runs.
        let busy = std::env::current_exe().unwrap();
        says(&found(&busy, &format!("{read_only}\n{size}")), Fine, "supports direct I/O");
        says(&found(&busy, ""), Problem, "busy");
        for errno in [libc::EACCES, libc::EROFS, libc::ENXIO, libc::EIO, libc::EINVAL] {
            let failed = Err(io::Error::from_raw_os_error(errno));
            says(&direct("namespace 1", &path, failed), Problem, "disk.img");
        }
    }

    #[test]
    fn a_hung_path_is_a_problem_and_other_paths_are_examined() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let (good, hanging) = (directory.path().join("good"), directory.path().join("hanging"));
        fs::write(&good, [0; 4096]).unwrap();
        let text = format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\n[[subsystem.namespace]]\nnsid = 1\npath = \
             {hanging:?}\n[[subsystem.namespace]]\nnsid = 2\npath = {good:?}\n"
        );
        let config = Config::parse(&text).unwrap();
        let opening = BlockingPool::default();
        let _go_on = opening.hang_at(&hanging);
        let findings = stores(&config, &opening);
        says(&findings[0], Problem, "hanging does not answer");
        says(&findings[1], Fine, "supports direct I/O");
    }

    #[test]
    fn files_in_the_same_directory_can_be_probed_concurrently() {
        let directory = tempfile::tempdir_in("/var/tmp").unwrap();
        let made = |number: u32| {
            trial(directory.path(), |probe| {
                OpenOptions::new().write(true).create_new(true).open(probe)?;
                // The next trial while this file exists.
                if number > 0 {
                    trial(directory.path(), |probe| fs::File::create_new(probe).map(drop))
                } else {
                    Ok(())
                }
            })
        };
        made(0).unwrap();
        made(1).unwrap();
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn an_unwritable_state_directory_is_a_problem() {
        let directory = tempfile::tempdir().unwrap();
        let state = |path: &Path, tried| writable("state", "state_directory", path, tried);
        says(&state(directory.path(), try_writing(directory.path())), Fine, "can be written");
        let missing = directory.path().join("missing");
        let finding = state(&missing, try_writing(&missing));
        says(&finding, Problem, "cannot be written");
        assert!(finding.remedy.contains("install -d"), "{finding}");
        for errno in [libc::EACCES, libc::ENOSPC, libc::EROFS] {
            let failed = Err(io::Error::from_raw_os_error(errno));
            says(&state(directory.path(), failed), Problem, "cannot be written");
        }
    }

    #[test]
    fn a_missing_directory_of_managed_namespaces_is_a_problem() {
        let directory = tempfile::tempdir().unwrap();
        let managed = directory.path().join("managed");
        let config = Config::parse(&format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[subsystem.managed]\ndirectory = \
             {managed:?}\nquota = \"1MiB\"\n"
        ))
        .unwrap();
        says(&examine(&config)[0], Problem, "there is no directory");
        fs::create_dir(&managed).unwrap();
        says(&examine(&config)[0], Fine, "can be written");
    }

    #[test]
    fn key_files_that_others_may_read_are_problems() {
        let directory = tempfile::tempdir().unwrap();
        let key_file = directory.path().join("key");
        let secret = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        fs::write(&key_file, secret).unwrap();
        let nqn = "nqn.2026-11.host:h".parse().unwrap();
        let hosts = vec![crate::config::HostConfig {
            nqn,
            key_file: key_file.clone(),
            controller_key_file: None,
            hashes: None,
            groups: None,
        }];
        let config = crate::config::AuthenticationConfig { hosts, ..Default::default() };
        for (mode, level) in [(0o600, Fine), (0o644, Problem)] {
            fs::set_permissions(&key_file, Permissions::from_mode(mode)).unwrap();
            let findings = key_files(1, config.examine_keys(KeyReader::This));
            says(&findings[0], level, "key");
        }
    }
}
