//! Probes of the backing stores and directories of a configuration that nobody serves yet: what
//! `nvmfd check` and `nvmfctl doctor` have in common.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nvme::Nqn;

use crate::blockdev::OpenError;
use crate::blockdev::blocking::{BlockingPool, BlockingTask};
use crate::blockdev::ceph::{ClusterConfig, ImageName};
use crate::blockdev::rbd::{self, Examination};
use crate::config::{Config, NamespaceConfig};

/// Time limit for all probes that run together.
const PATIENCE: Duration = Duration::from_secs(10);

/// Result of the probe of one store.
pub(crate) struct Probed<'c, T> {
    /// Its subsystem.
    pub(crate) nqn: Nqn,
    pub(crate) namespace: &'c NamespaceConfig,
    /// Result of the probe, or a sentence: its error, or that it did not answer in time.
    pub(crate) outcome: Result<T, String>,
    /// Whether the store did not answer.
    pub(crate) hangs: bool,
}

/// Probes the files, devices and images of all namespaces together, within [`PATIENCE`]. `probe`
/// may wait for the store.
pub(crate) fn probe_all<'c, T: Send + 'static>(
    config: &'c Config,
    opening: &BlockingPool,
    probe: impl Fn(Nqn, &NamespaceConfig) -> Result<T, String> + Clone + Send + 'static,
) -> Vec<Probed<'c, T>> {
    let namespaces = config.subsystems.iter().flat_map(|subsystem| {
        subsystem.namespaces.iter().map(|namespace| (subsystem.nqn, namespace))
    });
    let probes: Vec<_> = namespaces
        .filter_map(|(nqn, namespace)| {
            let path = namespace.kind.path()?;
            let (probe, own) = (probe.clone(), namespace.clone());
            let task = opening.begin(&path, move || probe(nqn, &own));
            Some((nqn, namespace, path, task))
        })
        .collect();
    let end = ending(opening);
    let probed = probes.into_iter().map(|(nqn, namespace, path, task)| {
        let (outcome, hangs) = end(&path, task);
        Probed { nqn, namespace, outcome, hangs }
    });
    probed.collect()
}

/// Probes the directories of namespaces that hosts manage, as [`probe_all`] does. Returns the
/// subsystem of each, the outcome, and whether the directory did not answer.
pub(crate) fn probe_directories<T: Send + 'static>(
    config: &Config,
    opening: &BlockingPool,
    probe: impl Fn(Nqn, &Path) -> Result<T, String> + Clone + Send + 'static,
) -> Vec<(Nqn, Result<T, String>, bool)> {
    let all = config.subsystems.iter();
    let all = all.filter_map(|each| Some((each.nqn, each.managed.as_ref()?.directory.clone())));
    let probes: Vec<_> = all
        .map(|(nqn, directory): (Nqn, PathBuf)| {
            let (probe, own) = (probe.clone(), directory.clone());
            let task = opening.begin(&directory, move || probe(nqn, &own));
            (nqn, directory, task)
        })
        .collect();
    let end = ending(opening);
    let probed = probes.into_iter().map(|(nqn, directory, task)| {
        let (outcome, hangs) = end(&directory, task);
        (nqn, outcome, hangs)
    });
    probed.collect()
}

/// Probes the pools in which hosts make images, as [`probe_all`] does. Returns the subsystem and the
/// pool of each, and the outcome.
pub(crate) fn probe_pools(
    config: &Config,
    opening: &BlockingPool,
) -> Vec<(Nqn, String, Result<(), OpenError>)> {
    let all = config.subsystems.iter();
    let all = all.filter_map(|each| Some((each.nqn, each.managed.as_ref()?)));
    let probes: Vec<_> = all
        .filter_map(|(nqn, managed)| {
            let pool = managed.pool.clone()?;
            let image: ImageName = format!("{pool}/image").parse().ok()?;
            let (cluster, path) = (managed.cluster.clone(), image.path());
            let task = opening.begin(&path, move || Ok(rbd::examine_pool(&cluster, &image)));
            Some((nqn, pool, path, task))
        })
        .collect();
    let end = ending(opening);
    let probed = probes.into_iter().map(|(nqn, pool, path, task)| {
        let silent = |sentence| Err(OpenError { sentence, may_pass: true });
        (nqn, pool, end(&path, task).0.unwrap_or_else(silent))
    });
    probed.collect()
}

/// Waits for probes that have begun, [`PATIENCE`] for all of them. Returns the outcome of each, and
/// whether its path did not answer.
fn ending<'p, T>(
    opening: &'p BlockingPool,
) -> impl Fn(&Path, BlockingTask<'p, T>) -> (Result<T, String>, bool) {
    let deadline = Instant::now() + PATIENCE;
    move |path, task| {
        let outcome = task.by(deadline);
        let hangs = outcome.is_err() && opening.hangs_at(path);
        (outcome, hangs)
    }
}

/// Examines an image without its lock. Blocks as long as the cluster does not answer.
///
/// # Errors
/// One sentence: library, configuration, rights, pool, image, features, or a size that is not a
/// number of blocks of the namespace.
pub(crate) fn image(
    namespace: &NamespaceConfig,
    image: &ImageName,
    cluster: &ClusterConfig,
) -> Result<Examination, OpenError> {
    let found = rbd::examine(cluster, image, namespace.read_only)?;
    whole_blocks(image, found.size_bytes, namespace.block_size_bytes)?;
    Ok(found)
}

fn whole_blocks(image: &ImageName, size_bytes: u64, block_bytes: u32) -> Result<(), OpenError> {
    if size_bytes.is_multiple_of(block_bytes.into()) {
        return Ok(());
    }
    let sentence = format!(
        "{image} has {size_bytes} bytes, which is not a number of whole blocks of {block_bytes}: \
         `rbd resize` it, or name another `block_size`"
    );
    Err(OpenError { sentence, may_pass: false })
}

#[cfg(test)]
mod tests {
    use crate::platform::probes::*;

    #[test]
    fn an_image_size_must_be_a_multiple_of_the_block_size() {
        let image: ImageName = "rbd/disk1".parse().unwrap();
        assert_eq!(whole_blocks(&image, 8192, 4096), Ok(()));
        assert_eq!(whole_blocks(&image, 8192 + 512, 512), Ok(()));
        let refused = whole_blocks(&image, 8192 + 512, 4096).unwrap_err();
        assert!(refused.sentence.contains("8704 bytes"), "{refused}");
        assert!(!refused.may_pass, "no wait changes it");
    }
}
