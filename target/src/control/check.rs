//! `nvmfd check`: the dry run. Reads a configuration and probes the files that it names.

mod resources;

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;

use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::ImageName;
use crate::blockdev::rbd::Examination;
use crate::blockdev::{BackingDevice, Below, OpenError, Torn};
use crate::config::{
    AuthenticationConfig, CATALOG_RECORD, Config, ConfigErrors, KeyReader, ManagementConfig,
    Missing, NamespaceConfig, NamespaceKind, Size, given_state_directory,
};
use crate::overlay::EffectiveConfig;
use crate::platform::availability;
use crate::platform::doctor::{Finding, Level, examine_group};
use crate::platform::probes::{self, Probed, probe_all, probe_directories, probe_pools};
use crate::provision::devices::DeviceTable;
use crate::provision::ns_catalog::Catalog;
use crate::provision::probe::FileId;
use crate::state::record::StateDir;
use crate::state::revoked_hosts;
use crate::state::served::Served;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, Group, access};
use nvme::Nqn;
use tracing::{error, warn};

use crate::state::lock::StateDirLock;

/// The remedy of denied access.
const AS_ROOT: &str = "check as root, or as the user who runs the daemon";

/// Checks a configuration. Prints it to stdout when it is valid, and logs warnings and errors.
/// Returns whether the daemon could serve it.
pub fn check(file: &Path) -> bool {
    let (declared, unread) = match declared(file) {
        Ok(found) => found,
        Err(errors) => {
            super::log_mistakes(&errors);
            return false;
        }
    };
    let mut good = true;
    match unread {
        Some(UnreadChanges { errors, is_denied: true }) => warn!("{errors}: {AS_ROOT}"),
        Some(UnreadChanges { errors, is_denied: false }) => {
            super::log_mistakes(&errors);
            good = false;
        }
        None => {}
    }
    let config = declared.config();
    super::change::log_unsaved(declared.changes());
    for warning in declared.warnings() {
        warn!("{warning}");
    }
    good &= state_directory(config);
    good &= addresses(config);
    good &= backing_stores(config);
    good &= managed_directories(config, &BlockingPool::default());
    good &= managed_pools(config, &BlockingPool::default());
    gateway_group(config);
    good &= management(config);
    good &= capture(config);
    good &= keys(config);
    good &= resources::are_available(config);
    // A closed stdout is no error.
    let _ = write!(io::stdout(), "{config}");
    good
}

/// Checks that the state directory exists; warns if one is needed and none is configured.
fn state_directory(config: &Config) -> bool {
    let mut good = true;
    if let Some(directory) = &config.state_directory
        && !fs::metadata(directory).is_ok_and(|found| found.is_dir())
    {
        error!("state_directory {} is not a usable directory: create it", directory.display());
        good = false;
    }
    let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    if config.state_directory.is_none() && { namespaces }.any(NamespaceConfig::needs_state) {
        warn!(
            "`write_uncorrectable` needs a `state_directory`: from systemd, or named in the file"
        );
    }
    good
}

/// Checks that the addresses of listeners are available, unless they may be pending.
fn addresses(config: &Config) -> bool {
    let mut good = true;
    for at in config.addresses() {
        if let Some(why) = availability::address(at) {
            match config.missing {
                Missing::Wait => warn!("listener {at}: {why}: it would be pending"),
                Missing::Fail => {
                    error!("listener {at}: {why}: give it to one, or correct the [[listener]]");
                    good = false;
                }
            }
        }
    }
    good
}

/// Warns of what a gateway lacks in the cluster of its group. A daemon starts without it, and waits.
fn gateway_group(config: &Config) {
    let findings = examine_group(config, &BlockingPool::default());
    for Finding { sentence, remedy, .. } in findings.iter().filter(|it| it.level != Level::Ok) {
        warn!("{sentence} ({remedy})");
    }
}

/// Checks that files and devices can be opened, and that no persisted state prevents it; warns of
/// devices that do not survive a power loss.
fn backing_stores(config: &Config) -> bool {
    let mut good = true;
    let is_served = is_served(config) == Some(true);
    let checks = look_at_all(config, &BlockingPool::default(), is_served);
    for warning in media_warnings(&checks) {
        warn!("{warning}");
    }
    for PathCheck { place, seen, .. } in checks {
        match seen {
            Ok(None) => {}
            Ok(Some(why)) => warn!("{place}: {why}: it would be pending"),
            Err(sentence) => {
                error!("{place}: {sentence}");
                good = false;
            }
        }
    }
    let directory = usable_state_directory(config).map(Path::to_path_buf);
    for ((nqn, nsid), why) in DeviceTable::new(directory, 0).unusable_records(&config.subsystems) {
        error!("{nqn}, namespace {nsid}: {why}");
        good = false;
    }
    good
}

/// Checks the directories of namespaces that hosts manage: each is there, and has the record of its
/// subsystem, or none yet.
fn managed_directories(config: &Config, opening: &BlockingPool) -> bool {
    let mut good = true;
    for (nqn, outcome, hangs) in probe_directories(config, opening, managed_directory) {
        let place = format!("managed namespaces of {nqn}");
        match (outcome, config.missing) {
            (Ok(None), _) => {}
            (Ok(Some(why)), Missing::Wait) => warn!("{place}: {why}: they would be pending"),
            (Err(why), Missing::Wait) if hangs => {
                warn!("{place}: {why}: they would be pending");
            }
            (Ok(Some(why)) | Err(why), _) => {
                error!("{place}: {why}");
                good = false;
            }
        }
    }
    good
}

/// Checks the pools in which hosts make images.
fn managed_pools(config: &Config, opening: &BlockingPool) -> bool {
    let mut good = true;
    for (nqn, pool, outcome) in probe_pools(config, opening) {
        let Err(OpenError { sentence, may_pass }) = outcome else { continue };
        let place = format!("managed namespaces of {nqn}, pool {pool}");
        match config.missing {
            Missing::Wait if may_pass => warn!("{place}: {sentence}: none can be made until then"),
            _ => {
                error!("{place}: {sentence}");
                good = false;
            }
        }
    }
    good
}

/// Returns the reason why such a directory would be pending, if it would; an error if it cannot be
/// used.
fn managed_directory(nqn: Nqn, directory: &Path) -> Result<Option<String>, String> {
    if let Some(why) = availability::directory(directory) {
        return Ok(Some(why));
    }
    if StateDir(directory).is_denied(CATALOG_RECORD) {
        warn!("{} cannot be read: {AS_ROOT}", directory.join(CATALOG_RECORD).display());
        return Ok(None);
    }
    Catalog::record_in(directory, nqn).map(|_| None)
}

/// Warns of stores that do not survive the machine, and of blocks that a power failure may tear.
fn media_warnings(checks: &[PathCheck]) -> Vec<String> {
    let volatile = checks.iter().filter_map(|check| {
        check.below.volatile.as_ref().map(|why| format!("{}: {why}", check.place))
    });
    let torn = checks.iter().filter_map(|PathCheck { place, below, block_bytes, .. }| {
        Torn::of(place.clone(), *block_bytes, below.power_fail_atomic_bytes)
    });
    volatile.chain(Torn::sentence(&torn.collect::<Vec<_>>())).collect()
}

fn usable_state_directory(config: &Config) -> Option<&Path> {
    config.state_directory.as_deref().filter(|directory| directory.is_dir())
}

/// Whether a daemon has locked the state directory, and so has the files, devices and addresses; none:
/// not known. (The management socket shows nothing: this file may be what changes it, and to connect
/// there starts the daemon where systemd listens.)
fn is_served(config: &Config) -> Option<bool> {
    config.state_directory.as_deref().and_then(StateDirLock::is_held)
}

/// Checks what the management API needs to start: its group, socket and address.
fn management(config: &Config) -> bool {
    let ManagementConfig { enabled: true, socket, group, http, .. } = &config.management else {
        return true;
    };
    let mut mistakes = Vec::new();
    if let Some(name) = group
        && !Group::from_name(name).is_ok_and(|group| group.is_some())
    {
        mistakes.push(format!(
            "`group` in [management]: there is no group {name:?} on this machine: make it, or name \
             another one"
        ));
    }
    if let Some(socket) = socket {
        let shown = socket.display();
        match fs::symlink_metadata(socket) {
            Ok(found) if !found.file_type().is_socket() => mistakes.push(format!(
                "management.socket {shown} is there and is no socket: remove it, or name another"
            )),
            Err(_) if !has_directory(socket) => warn!(
                "management.socket {shown}: its directory does not exist, so the daemon does not \
                 start unless the service manager makes it (RuntimeDirectory=)"
            ),
            _ => {}
        }
    }
    if let Some(at) = http
        && let Err(error) = TcpListener::bind(at)
    {
        match error.kind() {
            ErrorKind::AddrInUse if is_served(config) == Some(true) => {}
            ErrorKind::AddrInUse => warn!(
                "management.http {at} is in use, by this daemon or another program: it is served \
                 when it is free"
            ),
            _ => {
                mistakes.push(format!("management.http {at} cannot be had: {error}: name another"))
            }
        }
    }
    mistakes.iter().for_each(|mistake| error!("{mistake}"));
    mistakes.is_empty()
}

/// Checks that the file of a capture can be made.
fn capture(config: &Config) -> bool {
    let Some(path) = config.capture.as_ref().map(|capture| &capture.path) else { return true };
    let good = has_directory(path) && !path.is_dir();
    if !good {
        error!(
            "[capture] cannot write packets to {}: name a file in a directory that exists",
            path.display()
        );
    }
    if let Err(error) = rdma::capture::check(path) {
        error!("[capture] cannot write packets to {}: {}", path.display(), sentence_of(&error));
        return false;
    }
    good
}

fn has_directory(path: &Path) -> bool {
    path.parent().is_some_and(Path::is_dir)
}

/// Checks the keys of hosts, the token of the interface, and the list of hosts that have had keys.
fn keys(config: &Config) -> bool {
    let reader = KeyReader::of(config.state_directory.as_deref());
    let (mut mistakes, mut doubts) = config.authentication.examine_keys(reader);
    match config.management.examine_token(reader) {
        Ok(doubt) => doubts.extend(doubt),
        Err(mistake) => mistakes.push(mistake),
    }
    doubts.iter().for_each(|doubt| warn!("{doubt}"));
    mistakes.iter().for_each(|mistake| error!("{mistake}"));
    let is_list_good =
        usable_state_directory(config).is_none_or(|directory| keyed(config, directory));
    mistakes.is_empty() && is_list_good
}

/// Checks the list of hosts that have had keys; warns of those that are rejected.
fn keyed(config: &Config, directory: &Path) -> bool {
    let known = match revoked_hosts::read(directory) {
        Ok(known) => known,
        Err(sentence) if revoked_hosts::is_denied(directory) => {
            warn!("{sentence}: {AS_ROOT}");
            return true;
        }
        Err(sentence) => {
            error!("{sentence}");
            return false;
        }
    };
    let AuthenticationConfig { hosts, exempt, .. } = &config.authentication;
    let has_word = |nqn: &Nqn| hosts.iter().any(|host| host.nqn == *nqn) || exempt.contains(nqn);
    for nqn in known.iter().filter(|nqn| !has_word(nqn)) {
        warn!(
            "{nqn} is refused: it has had a key, and no [[host]] says more: give it one again, or \
             write `authenticate = false`"
        );
    }
    true
}

/// Why the unsaved changes of a configuration are left out.
#[derive(Debug)]
pub struct UnreadChanges {
    /// The errors.
    pub errors: ConfigErrors,
    /// Another user may read them.
    pub is_denied: bool,
}

/// Loads the configuration of a start: the files, and the unsaved changes if they can be read.
///
/// # Errors
/// Every error of the files.
pub fn declared(file: &Path) -> Result<(EffectiveConfig, Option<UnreadChanges>), ConfigErrors> {
    let given = given_state_directory(file);
    let alone = EffectiveConfig::without_changes(file, given.clone())?;
    Ok(match EffectiveConfig::load_with(file, given) {
        Ok(declared) => (declared, None),
        Err(errors) => {
            let is_denied = alone.are_changes_denied();
            (alone, Some(UnreadChanges { errors, is_denied }))
        }
    })
}

/// Result of the probe of a namespace.
struct PathCheck {
    /// Its name in messages.
    place: String,
    /// Reason why it would be pending, if any; an error if it cannot be served.
    seen: Result<Option<String>, String>,
    below: Below,
    block_bytes: u32,
    file: Option<FileId>,
    /// Whether other namespaces may have that file.
    shares: bool,
}

impl PathCheck {
    fn excludes(&self, other: &PathCheck) -> bool {
        self.file.is_some() && self.file == other.file && !(self.shares && other.shares)
    }
}

/// Finds namespaces in the file of an earlier one, by another path.
fn exclude_same_files(checks: &mut [PathCheck], missing: Missing) {
    for at in 1..checks.len() {
        let (earlier, later) = checks.split_at_mut(at);
        let first = earlier.iter().find(|earlier| earlier.excludes(&later[0]));
        if let (Some(first), Ok(None)) = (first, &later[0].seen) {
            let why = format!("its file is that of {} too: serve it once", first.place);
            later[0].seen = if missing == Missing::Wait { Ok(Some(why)) } else { Err(why) };
        }
    }
}

/// Probes all namespaces together. `is_served`: a daemon has their files locked.
fn look_at_all(config: &Config, opening: &BlockingPool, is_served: bool) -> Vec<PathCheck> {
    let served = Arc::new(Served::load(config.state_directory.as_deref()));
    let missing = config.missing;
    let probed = probe_all(config, opening, move |_, namespace| {
        let (pending, below) = look_at(namespace, &served, is_served, missing)?;
        let file = match &namespace.kind {
            NamespaceKind::File { path, .. } => Some(FileId::at(path)),
            _ => None,
        };
        Ok((pending, below, file))
    });
    let seen = probed.into_iter().map(|Probed { nqn, namespace, outcome, hangs }| {
        let (seen, below, file) = match outcome {
            Err(why) if hangs && missing == Missing::Wait => {
                (Ok(Some(why)), Below::default(), None)
            }
            Err(why) => (Err(why), Below::default(), None),
            Ok((pending, below, file)) => (Ok(pending), below, file),
        };
        let place = format!("{nqn}, namespace {}", namespace.nsid);
        let shares = namespace.read_only || namespace.shared;
        PathCheck { place, seen, below, block_bytes: namespace.block_size_bytes, file, shares }
    });
    let mut checks: Vec<PathCheck> = seen.collect();
    exclude_same_files(&mut checks, missing);
    checks
}

/// Checks whether the store of a namespace can be served; returns the reason if it would be pending,
/// and the properties of the device below.
fn look_at(
    namespace: &NamespaceConfig,
    served: &Served,
    is_served: bool,
    missing: Missing,
) -> Result<(Option<String>, Below), String> {
    let path = match &namespace.kind {
        NamespaceKind::Rbd { image, cluster, .. } => {
            let found = probes::image(namespace, image, cluster);
            return Ok((of_image(image, found, is_served, missing)?, Below::default()));
        }
        NamespaceKind::File { path, .. } => path,
        NamespaceKind::Ram { .. } | NamespaceKind::Null { .. } => {
            return Ok((None, Below::default()));
        }
    };
    let why = availability::store(namespace, served.before(path).as_deref());
    match why.filter(|_| missing == Missing::Wait) {
        Some(why) => Ok((Some(why), Below::default())),
        None => Ok((pending(examine(namespace, is_served), missing)?, below(namespace))),
    }
}

/// Whether an image can be served; returns the reason if it would be pending.
fn of_image(
    image: &ImageName,
    found: Result<Examination, OpenError>,
    is_served: bool,
    missing: Missing,
) -> Result<Option<String>, String> {
    match found {
        Ok(Examination { owner: Some(owner), .. }) if !is_served => Ok(Some(format!(
            "{image} is in use: the client {owner} holds its lock (a former process of this \
             daemon, or another one)"
        ))),
        found => pending(found.map(drop), missing),
    }
}

/// The reason why a store would be pending, if it would; an error if it cannot be served.
fn pending(found: Result<(), OpenError>, missing: Missing) -> Result<Option<String>, String> {
    match found {
        Ok(()) => Ok(None),
        Err(error) if error.may_pass && missing == Missing::Wait => Ok(Some(error.sentence)),
        Err(error) => Err(error.sentence),
    }
}

/// Properties of the device below a namespace; defaults if hosts may not write.
fn below(namespace: &NamespaceConfig) -> Below {
    let NamespaceKind::File { path, .. } = &namespace.kind else { return Below::default() };
    let directory = path.parent().filter(|directory| !directory.as_os_str().is_empty());
    let opened = File::open(path).or_else(|_| File::open(directory.unwrap_or(Path::new("."))));
    let opened = opened.ok().filter(|_| !namespace.read_only);
    opened.map_or_else(Below::default, |file| Below::of(&file))
}

/// Checks whether a start can open the file of a namespace, or create it. Changes nothing.
fn examine(namespace: &NamespaceConfig, is_served: bool) -> Result<(), OpenError> {
    let NamespaceKind::File { path, size } = &namespace.kind else { return Ok(()) };
    let mut examined = BackingDevice::examine(&namespace.backing(), is_served);
    if let (Ok(true), Some(size)) = (&examined, size) {
        let shown = path.display();
        warn!("{shown} does not exist: it will be created as a sparse file of {}", Size(*size));
    }
    let write = if namespace.read_only { AccessFlags::empty() } else { AccessFlags::W_OK };
    if let Err(OpenError { sentence, .. }) = &mut examined
        && access(path, AccessFlags::R_OK | write) == Err(Errno::EACCES)
    {
        *sentence = format!("{sentence}; or {AS_ROOT}");
    }
    examined.map(drop)
}

/// Formats an error: a file that this user may not open may be accessible to the daemon.
fn sentence_of(error: &io::Error) -> String {
    match error.kind() {
        ErrorKind::PermissionDenied => {
            format!("{error}: {AS_ROOT}")
        }
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::control::check::*;
    use tempfile::tempdir;

    fn namespace(path: &Path, size: Option<u64>) -> NamespaceConfig {
        NamespaceConfig {
            nsid: 1,
            kind: NamespaceKind::File { path: path.to_owned(), size },
            block_size_bytes: 4096,
            uuid: uuid::Uuid::max(),
            nguid: [0xFF; 16],
            eui64: None,
            read_only: false,
            allow_format: false,
            write_uncorrectable: false,
            limit: Default::default(),
            shared_limit: None,
            ana_group: 1,
            fault: crate::blockdev::InjectedFault::None,
            shared: false,
        }
    }

    #[test]
    fn permission_errors_advise_to_check_as_root_or_the_daemons_user() {
        let denied = io::Error::from_raw_os_error(libc::EACCES);
        assert!(
            sentence_of(&denied).ends_with("check as root, or as the user who runs the daemon")
        );
        assert!(!sentence_of(&io::Error::from_raw_os_error(libc::ENOTDIR)).contains("root"));
    }

    #[test]
    fn pending_and_hanging_devices_are_errors_only_with_missing_fail() {
        let directory = tempdir().unwrap();
        let (good, hanging) = (directory.path().join("good"), directory.path().join("hanging"));
        for path in [&good, &hanging] {
            fs::write(path, [0; 8192]).unwrap();
        }
        let text = format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\n[[subsystem.namespace]]\nnsid = 1\npath = {good:?}\n\
             [[subsystem.namespace]]\nnsid = 2\npath = {hanging:?}\n[[subsystem.namespace]]\nnsid \
             = 3\npath = \"/dev/nvmfd-no-such-device\"\n"
        );
        let mut config = Config::parse(&text).unwrap();
        let opening = BlockingPool::default();
        let _go_on = opening.hang_at(&hanging);
        let problems = |config: &Config| -> Vec<_> {
            look_at_all(config, &opening, false).into_iter().map(|look| look.seen).collect()
        };
        let found = problems(&config);
        assert_eq!(found[0], Ok(None));
        assert!(found[1].as_ref().unwrap().as_ref().unwrap().contains("does not answer"));
        assert!(found[2].as_ref().unwrap().as_ref().unwrap().contains("is not there yet"));
        config.missing = Missing::Fail;
        let found = problems(&config);
        assert_eq!(found[0], Ok(None));
        assert!(found[1].as_ref().unwrap_err().contains("does not answer"));
        assert!(found[2].as_ref().unwrap_err().contains("does not exist"));
    }

    /// A start serves the first of them, and the others are pending.
    #[test]
    fn a_file_of_two_namespaces_is_reported_by_whatever_path() {
        let directory = tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("a"), [0; 8192]).unwrap();
        std::os::unix::fs::symlink(at("a"), at("link")).unwrap();
        fs::hard_link(at("a"), at("name")).unwrap();
        let mut config = Config::parse(&format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\n[[subsystem.namespace]]\nnsid = 1\npath = \
             {:?}\n[[subsystem.namespace]]\nnsid = 2\npath = {:?}\n[[subsystem.namespace]]\nnsid \
             = 3\npath = {:?}\n",
            at("a"),
            at("link"),
            at("name")
        ))
        .unwrap();
        let problems = |config: &Config| -> Vec<_> {
            let checks = look_at_all(config, &BlockingPool::default(), false);
            checks.into_iter().map(|look| look.seen).collect()
        };
        let pending = problems(&config);
        assert_eq!(pending[0], Ok(None));
        for later in &pending[1..] {
            let why = later.as_ref().unwrap().as_ref().unwrap();
            assert!(why.contains("is that of nqn.2026-11.io.nvmfd:a, namespace 1 too"), "{why}");
        }
        config.missing = Missing::Fail;
        assert!(problems(&config)[1].is_err());
        config.subsystems[0].namespaces.iter_mut().for_each(|each| each.read_only = true);
        assert_eq!(problems(&config), [Ok(None), Ok(None), Ok(None)]);
    }

    #[test]
    fn directories_of_managed_namespaces_are_checked() {
        let directory = tempdir().unwrap();
        let managed = directory.path().join("managed");
        let mut config = Config::parse(&format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[subsystem.managed]\ndirectory = \
             {managed:?}\nquota = \"1MiB\"\n"
        ))
        .unwrap();
        let is_good = |config: &Config| managed_directories(config, &BlockingPool::default());
        assert!(is_good(&config), "they would be pending");
        config.missing = Missing::Fail;
        assert!(!is_good(&config));
        fs::create_dir(&managed).unwrap();
        assert!(is_good(&config));
        config.missing = Missing::Wait;
        fs::write(managed.join(CATALOG_RECORD), "damaged").unwrap();
        assert!(!is_good(&config), "they would not be served before a reload");
    }

    #[test]
    fn a_pool_of_managed_namespaces_that_cannot_be_used_is_reported() {
        let mut config = Config::parse(
            "[ceph]\nconf = \"/nvmfd-no-such-file\"\n[[listener]]\naddress = \"127.0.0.1\"\n\
             [[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n\
             [subsystem.managed]\ndirectory = \"/m\"\npool = \"rbd\"\nquota = \"1MiB\"\n",
        )
        .unwrap();
        config.missing = Missing::Fail;
        let is_good = |config: &Config| managed_pools(config, &BlockingPool::default());
        assert!(!is_good(&config));
        config.subsystems[0].managed.as_mut().unwrap().pool = None;
        assert!(is_good(&config), "files need none");
    }

    /// On a machine whose root file system is on a device that this user may read.
    #[test]
    fn a_mounted_device_is_reported_as_in_use() {
        let mounts = fs::read_to_string("/proc/mounts").unwrap();
        let sources = mounts.lines().filter_map(|line| line.split(' ').next());
        let mut devices = sources.filter(|source| {
            fs::metadata(source).is_ok_and(|found| found.file_type().is_block_device())
                && File::open(source).is_ok()
        });
        let Some(device) = devices.next() else { return };
        let mounted = NamespaceConfig {
            read_only: true,
            block_size_bytes: 512,
            ..namespace(Path::new(device), None)
        };
        let why = examine(&mounted, false).unwrap_err();
        assert!(why.may_pass && why.sentence.contains("is mounted or in use elsewhere"), "{why}");
        assert_eq!(examine(&mounted, true), Ok(()), "the daemon's own");
        let served = Served::load(None);
        assert_eq!(look_at(&mounted, &served, false, Missing::Fail).unwrap_err(), why.sentence);
    }

    /// Each of them ends a start, and so a restart after a good check.
    #[test]
    fn management_and_capture_settings_that_prevent_a_start_are_errors() {
        let directory = tempdir().unwrap();
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        let held = TcpListener::bind("127.0.0.1:0").unwrap();
        let config = |text: String| {
            let state = directory.path();
            Config::parse(&format!("state_directory = {state:?}\n{text}")).unwrap()
        };
        let http = |at| config(format!("[management]\nhttp = \"{at}\""));
        let socket = |path: &Path| config(format!("[management]\nsocket = {path:?}"));
        let packets = |path: &Path| config(format!("[capture]\npath = {path:?}"));
        let at = held.local_addr().unwrap();
        assert!(management(&http(at)), "a start serves all else");
        drop(held);
        assert!(management(&http(at)));
        assert!(!management(&socket(&file)), "no socket");
        assert!(management(&socket(&directory.path().join("new"))));
        assert!(management(&socket(Path::new("/run/nvmfd-none/s"))), "systemd may make it");
        let capture = |config: Config| super::capture(&config);
        assert!(capture(config(String::new())) && capture(packets(&file)));
        assert!(!capture(packets(Path::new("/nonexistent/packets.pcapng"))));
        assert!(!capture(packets(directory.path())));
        let devices = config(format!("provider = \"verbs\"\n[capture]\npath = {file:?}"));
        assert!(capture(devices), "of a device they are synthesised");
        fs::write(&file, "data").unwrap();
        assert!(!capture(packets(&file)), "a start refuses it");
    }

    #[test]
    fn volatile_storage_is_detected_for_new_and_writable_files() {
        let memory = Path::new("/dev/shm");
        let directory = tempfile::tempdir_in(memory).unwrap();
        let path = directory.path().join("disk.img");
        let is_volatile = |namespace: &NamespaceConfig| below(namespace).volatile.is_some();
        assert!(is_volatile(&namespace(&path, Some(8192))));
        fs::write(&path, [0; 8192]).unwrap();
        assert!(is_volatile(&namespace(&path, None)));
        assert!(!is_volatile(&NamespaceConfig { read_only: true, ..namespace(&path, None) }));
        let disk = crate::blockdev::testing::directory();
        assert!(!is_volatile(&namespace(&disk.path().join("a"), Some(8192))));
    }

    /// Whatever the devices of this machine write whole.
    #[test]
    fn blocks_larger_than_the_atomic_write_size_cause_a_warning() {
        let check = |place: &str, whole| PathCheck {
            place: place.to_owned(),
            seen: Ok(None),
            below: Below { power_fail_atomic_bytes: whole, volatile: None },
            block_bytes: 4096,
            file: None,
            shares: false,
        };
        assert_eq!(media_warnings(&[check("a", Some(4096)), check("b", None)]), [""; 0]);
        let mut checks = [check("a", Some(512)), check("b", Some(4096)), check("c", Some(1024))];
        checks[1].below.volatile = Some("is in memory".to_owned());
        let warnings = media_warnings(&checks);
        assert_eq!((warnings.len(), warnings[0].as_str()), (2, "b: is in memory"));
        assert!(warnings[1].contains(": a (512 of 4096 bytes), c (1024 of 4096 bytes). For"));
    }

    #[test]
    fn backing_files_are_checked_without_side_effects() {
        let directory = tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let look = |namespace: &NamespaceConfig| examine(namespace, false);
        assert_eq!(look(&namespace(&path, Some(8192))), Ok(()), "with a warning");
        let says = |namespace: &NamespaceConfig| look(namespace).unwrap_err().sentence;
        assert!(says(&namespace(&path, None)).contains("give a size"));
        let read_only = NamespaceConfig { read_only: true, ..namespace(&path, Some(8192)) };
        assert!(says(&read_only).contains("a read-only namespace is not created"));
        let none = directory.path().join("none");
        assert!(says(&namespace(&none.join("x"), Some(8192))).contains("create the directory"));
        std::os::unix::fs::symlink(directory.path().join("nothing"), directory.path().join("link"))
            .unwrap();
        let link = namespace(&directory.path().join("link"), Some(8192));
        assert!(says(&link).contains("is a symbolic link"), "a start creates no file through it");
        assert!(says(&namespace(directory.path(), None)).contains("is a directory"));
        assert!(!path.exists() && !none.exists(), "a check creates nothing");

        fs::write(&path, [0; 5000]).unwrap();
        assert!(says(&namespace(&path, None)).contains("5000 bytes"));
        assert!(says(&namespace(&path, Some(8192))).contains("set the size to 5000"));
        fs::write(&path, [0; 8192]).unwrap();
        assert_eq!(look(&namespace(&path, None)), Ok(()));
        assert_eq!(look(&namespace(&path, Some(4096))), Ok(()), "with a warning");
        let other = fs::File::open(&path).unwrap();
        other.lock().unwrap();
        let why = look(&namespace(&path, None)).unwrap_err();
        assert!(why.may_pass && why.sentence.contains("a lock on it is held"), "{why}");
        assert_eq!(examine(&namespace(&path, None), true), Ok(()), "the daemon's own");
        other.unlock().unwrap();
        assert!(says(&namespace(&path.join("x"), None)).contains("cannot look at"));
    }
}
