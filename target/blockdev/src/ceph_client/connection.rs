//! How every client of a cluster is connected.

use std::path::Path;

use nix::errno::Errno;

use super::ffi;
use crate::ceph::{ClusterConfig, rights_command};
use crate::open_error::OpenError;

/// Options of every client. The first group is essential, the second not known to every version.
///
/// * No cache: a completed write is on all replicas.
/// * librbd copies the data of writes. Without the copy, a write that it fails before it sends it
///   (the client was excluded) never completes: its completion waits for the release of the data,
///   and the failed operation is never released (seen with 16.2).
/// * A client may have everything pending that a daemon has buffers for. At the limits of the
///   library (1,024 operations, 100 MiB) one OSD that hangs would stop the images on all others.
/// * Clients are excluded by an explicit blocklist entry only, with its own duration.
const OPTIONS: [(&str, &str); 6] = [
    ("rbd_cache", "false"),
    ("rbd_disable_zero_copy_writes", "true"),
    ("objecter_inflight_ops", "1048576"),
    ("objecter_inflight_op_bytes", "68719476736"),
    ("rbd_blocklist_on_break_lock", "false"),
    ("client_mount_timeout", "8"),
];
const OPTIONAL: [(&str, &str); 1] = [("rbd_persistent_cache_mode", "disabled")];

/// Connects a client. Blocks for some seconds if the monitors do not answer.
/// Options beyond those of all clients are in `own`.
///
/// # Errors
/// One sentence: what was tried, what the cluster answered, what to do.
pub(crate) fn connect(
    config: &ClusterConfig,
    own: &[(&str, String)],
) -> Result<ffi::Client, OpenError> {
    let made = ffi::Client::new(&config.entity()).map_err(OpenError::new)?;
    let raw = made.map_err(|errno| failed(config, "make a client", errno))?;
    let path = |path: &Path| path.display().to_string();
    let conf = config.conf.as_deref().map(path);
    if let Err(errno) = raw.read_conf(conf.as_deref()) {
        let what = conf.as_deref().unwrap_or("/etc/ceph/ceph.conf");
        return Err(failed(config, &format!("read {what}"), errno));
    }
    let keyring = config.keyring.as_deref().map(|keyring| ("keyring", path(keyring)));
    let options = OPTIONS.map(|(option, value)| (option, value.to_owned()));
    for (option, value) in options.into_iter().chain(keyring).chain(own.iter().cloned()) {
        let set = raw.set(option, &value);
        set.map_err(|errno| failed(config, &format!("set {option}"), errno))?;
    }
    for (option, value) in OPTIONAL {
        let _ = raw.set(option, value);
    }
    raw.connect().map_err(|errno| failed(config, "connect to the cluster", errno))?;
    Ok(raw)
}

/// The sentence about a failure of the cluster.
pub(crate) fn failed(config: &ClusterConfig, tried: &str, errno: Errno) -> OpenError {
    let (entity, remedy) = (config.entity(), remedy(config, errno));
    let sentence = format!("cannot {tried} as {entity}: {} ({remedy})", errno.desc());
    OpenError { sentence, may_pass: true }
}

/// What to do about a failure of the cluster.
pub(crate) fn remedy(config: &ClusterConfig, errno: Errno) -> String {
    let entity = config.entity();
    match errno {
        Errno::EACCES | Errno::EPERM => format!(
            "the key or the rights of {entity} do not suffice: `{}`, and its key (`ceph auth get \
             {entity}`) in a keyring that nvmfd can read",
            rights_command(&entity)
        ),
        Errno::ENOENT => {
            format!("no configuration, or no key of {entity}: name `conf` and `keyring` in [ceph]")
        }
        Errno::ETIMEDOUT => "the monitors do not answer: check them and the network".to_owned(),
        Errno::ESHUTDOWN => "this client was excluded from the cluster (blocklist)".to_owned(),
        _ => "see `ceph -s`".to_owned(),
    }
}

/// The sentence about a pool that cannot be opened.
pub(crate) fn no_pool(config: &ClusterConfig, pool: &str, errno: Errno) -> OpenError {
    match errno {
        Errno::ENOENT => OpenError {
            sentence: format!(
                "there is no pool {pool}: `ceph osd pool create {pool}`, `rbd pool init {pool}`, or \
                 correct its name"
            ),
            may_pass: true,
        },
        errno => failed(config, &format!("open the pool {pool}"), errno),
    }
}
