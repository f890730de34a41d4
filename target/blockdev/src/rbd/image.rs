//! An image that is served, or examined.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::sleep;
use std::time::Duration;

use nix::errno::Errno;
use tracing::{info, warn};

use super::client::Client;
use crate::backing::{Condition, Geometry};
use crate::ceph::{ClusterConfig, CreatedImage, ImageName};
use crate::ceph_client::connection::{connect, failed, no_pool};
use crate::ceph_client::ffi;
use crate::open_error::OpenError;

/// Discards of less keep their data in other clients; a hint for hosts.
const DISCARD_GRANULARITY_BYTES: u32 = 64 << 10;
/// Allocation unit of the OSDs (bluestore): smaller writes are read-modify-write there. A write
/// inside an object is one transaction on each of them, so this is also written whole.
const ALLOCATION_UNIT_BYTES: u32 = 4096;
/// A lock that is acquired again after a break of the connection is not owned for a moment.
const LOCK_RECHECK: Duration = Duration::from_millis(200);

/// An open image, with its lock unless it is read-only or in standby.
pub struct Image {
    raw: ffi::Image,
    client: Arc<Client>,
    name: ImageName,
    read_only: bool,
    /// Operations may be started: it has its lock, or is read-only.
    is_serving: AtomicBool,
    /// Its stripes, of which an object consists.
    stripe_bytes: u32,
    /// Cluster, pool and id.
    pub(crate) identity: String,
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Image").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Image {
    /// Opens an image and takes its lock. `made`: only if it is this one. Blocks as long as the
    /// cluster does not answer.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub(crate) fn open(
        config: &ClusterConfig,
        name: &ImageName,
        made: Option<&CreatedImage>,
        read_only: bool,
    ) -> Result<Image, OpenError> {
        let client = Client::of(config)?;
        made.map_or(Ok(()), |made| client.has_made(name, &made.cluster))?;
        let pool = client.pool(&name.pool, &name.namespace);
        let pool = pool.map_err(|errno| no_pool(config, &name.pool, errno))?;
        let raw = open(pool, name, read_only).map_err(|errno| {
            if errno == Errno::ESHUTDOWN {
                client.note_fenced();
            }
            no_image(config, name, made.is_some(), errno)
        })?;
        let asked = |errno| failed(config, &format!("read the header of {name}"), errno);
        check_features(&raw, name, read_only, asked)?;
        let stripe_bytes = u32::try_from(raw.stripe_bytes().map_err(asked)?).unwrap_or(0);
        let id = raw.id().map_err(asked)?;
        if let Some(made) = made {
            check_made(name, made, (&id, raw.size_bytes().map_err(asked)?))?;
        }
        let mut identity = format!("{}/{}/{}/{id}", client.cluster, name.pool, name.namespace);
        if let Some(snapshot) = &name.snapshot {
            // Another snapshot may get the name.
            let id = raw.snapshot_id(snapshot).map_err(asked)?;
            identity.push_str(&format!("@{id}"));
        }
        let image = Image {
            raw,
            client,
            name: name.clone(),
            read_only,
            is_serving: AtomicBool::new(read_only),
            stripe_bytes,
            identity,
        };
        if !read_only && !config.standby {
            image.take_lock(|owner| image.client.was(owner))?;
            image.is_serving.store(true, Ordering::Relaxed);
        }
        Ok(image)
    }

    /// Takes the lock. That of a client which does not exist any more is broken, after it was
    /// excluded from the cluster; that of any other is respected. (librbd would break the lock of a
    /// client that has not answered the cluster for half a minute, and not exclude it.)
    fn take_lock(&self, is_former: impl Fn(&str) -> bool) -> Result<(), OpenError> {
        let name = &self.name;
        let refused = |errno| {
            if errno == Errno::ESHUTDOWN {
                self.client.note_fenced();
            }
            failed(&self.client.config, &format!("take the lock of {name}"), errno)
        };
        let owner = self.raw.lock_owner().map_err(refused)?;
        if let Some(owner) = owner.filter(|owner| *owner != self.client.address) {
            let is_there = || self.raw.watchers().map(|all| all.contains(&owner));
            if !is_former(&owner) && is_there().map_err(refused)? {
                return Err(self.is_in_use());
            }
            self.client.exclude(&owner).map_err(refused)?;
            match self.raw.break_lock(&owner) {
                Ok(()) => info!("{name}: the lock of {owner}, which is excluded now, is broken"),
                // It has ended meanwhile.
                Err(Errno::ENOENT) => {}
                Err(errno) => return Err(refused(errno)),
            }
        }
        match self.raw.acquire_lock() {
            Ok(()) => Ok(()),
            Err(Errno::EROFS) => Err(self.is_in_use()),
            Err(errno) => Err(refused(errno)),
        }
    }

    pub(super) fn name(&self) -> &ImageName {
        &self.name
    }

    pub(super) fn config(&self) -> &ClusterConfig {
        &self.client.config
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only
    }

    pub(super) fn wait_for_monitors(&self) -> Result<(), Errno> {
        self.client.wait_for_monitors()
    }

    /// The pool of an image of its cluster.
    pub(super) fn pool(&self, of: &ImageName) -> Result<ffi::Pool, Errno> {
        self.client.pool(&of.pool, &of.namespace)
    }

    /// Whether it was opened to be acquired later.
    pub(crate) fn is_on_demand(&self) -> bool {
        self.client.config.standby && !self.read_only
    }

    /// Takes the lock of an image in standby, if it has at least this size; see
    /// [`Image::take_lock`]. `former` are the addresses of clients that do not exist any more. (There
    /// may be others: of an owner of the group before the last one, which had the image alone.) Blocks
    /// as long as the cluster does not answer.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub(crate) fn acquire(&self, former: &[String], size_bytes: u64) -> Result<(), OpenError> {
        let (config, name) = (&self.client.config, &self.name);
        if self.client.is_fenced() {
            return Err(failed(config, &format!("take the lock of {name}"), Errno::ESHUTDOWN));
        }
        self.take_lock(|owner| former.iter().any(|it| it == owner))?;
        // A write across the end would succeed in part.
        let found = self.size_bytes().map_err(|errno| failed(config, "read its size", errno))?;
        if found < size_bytes {
            self.release()?;
            return Err(OpenError::new(format!(
                "{name} has {found} bytes, fewer than the {size_bytes} that are served: restore its \
                 size (`rbd resize`)"
            )));
        }
        self.is_serving.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// Returns to standby: what has not started is refused, what has started lands, and the lock is
    /// released. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// One sentence. No operation is started any more, but the lock may be held.
    pub(crate) fn release(&self) -> Result<(), OpenError> {
        self.is_serving.store(false, Ordering::Relaxed);
        match self.raw.release_lock() {
            // It has none.
            Ok(()) | Err(Errno::EINVAL) => Ok(()),
            Err(errno) => {
                if errno == Errno::ESHUTDOWN {
                    self.client.note_fenced();
                }
                let tried = format!("release the lock of {}", self.name);
                Err(failed(&self.client.config, &tried, errno))
            }
        }
    }

    /// The image, for an operation; none: it has no lock, or its client was excluded.
    pub(crate) fn serving(&self) -> Option<&ffi::Image> {
        let is_serving = self.is_serving.load(Ordering::Relaxed) && !self.client.is_fenced();
        is_serving.then_some(&self.raw)
    }

    /// Its client was excluded from the cluster, or is not to be used any more.
    pub(crate) fn note_fenced(&self) {
        self.client.note_fenced();
    }

    fn is_in_use(&self) -> OpenError {
        let name = &self.name;
        let owner = self.raw.lock_owner().ok().flatten();
        let who = match owner {
            Some(owner) if owner == self.client.address => {
                "another namespace of this nvmfd, or one \
                 that is being closed"
                    .to_owned()
            }
            Some(owner) => format!("the client {owner}"),
            None => "another client".to_owned(),
        };
        let sentence = format!(
            "{name} is in use: {who} holds its exclusive lock; serve it from one place only (`rbd \
             lock ls {name}` shows the owner, `rbd status {name}` who has it open)"
        );
        OpenError { sentence, may_pass: true }
    }

    /// Whether its client was excluded or has lost a lock: only another client can open it again.
    pub(crate) fn is_fenced(&self) -> bool {
        self.client.is_fenced()
    }

    /// Its size in bytes. librbd watches the header of the image; after a change this blocks until
    /// the cluster answers.
    pub(crate) fn size_bytes(&self) -> Result<u64, Errno> {
        self.raw.size_bytes()
    }

    /// Its I/O hints.
    pub(crate) fn geometry(&self) -> Geometry {
        Geometry {
            physical_block_bytes: ALLOCATION_UNIT_BYTES,
            optimal_io_bytes: self.stripe_bytes,
            discard_granularity_bytes: DISCARD_GRANULARITY_BYTES,
            boundary_bytes: self.stripe_bytes,
            power_fail_atomic_bytes: ALLOCATION_UNIT_BYTES,
        }
    }

    /// Checks that it is still owned, unless it is in standby, and has its size and, if `thorough`, that its first and last
    /// block can be read. Blocks as long as the cluster does not answer.
    /// Returns also its size, or 0.
    pub(crate) fn inspect(
        &self,
        size_bytes: u64,
        block_bytes: u32,
        thorough: bool,
    ) -> (Condition, u64) {
        let is_serving = self.is_serving.load(Ordering::Relaxed);
        let look = || {
            if self.client.is_fenced() || is_serving && !self.read_only && !self.is_owned()? {
                return Err(Errno::ESHUTDOWN);
            }
            let found = self.size_bytes()?;
            if thorough && is_serving && found >= size_bytes {
                let mut block = vec![0; block_bytes as usize];
                for at in [0, size_bytes.saturating_sub(block_bytes.into())] {
                    self.raw.read(at, &mut block)?;
                }
            }
            Ok(found)
        };
        match look() {
            Ok(found) if found < size_bytes => (Condition::Shortened(found), found),
            Ok(found) => (Condition::Sound, found),
            // The client was excluded, or the watch of the lock has failed.
            Err(Errno::ESHUTDOWN | Errno::ENOTCONN) => {
                if !self.client.is_fenced() {
                    warn!(
                        "the RADOS client {} has lost a lock or was excluded",
                        self.client.address
                    );
                }
                self.client.note_fenced();
                (Condition::Failing(libc::ESHUTDOWN), 0)
            }
            Err(errno) => (Condition::Failing(errno as i32), 0),
        }
    }

    fn is_owned(&self) -> Result<bool, Errno> {
        if self.raw.is_lock_owner()? {
            return Ok(true);
        }
        sleep(LOCK_RECHECK);
        self.raw.is_lock_owner()
    }
}

fn open(pool: ffi::Pool, name: &ImageName, read_only: bool) -> Result<ffi::Image, Errno> {
    ffi::Image::open(pool, &name.image, name.snapshot.as_deref(), read_only)
}

/// Refuses an image or snapshot that cannot be served safely.
fn check_features(
    raw: &ffi::Image,
    name: &ImageName,
    read_only: bool,
    asked: impl Fn(Errno) -> OpenError + Copy,
) -> Result<(), OpenError> {
    if let Some(snapshot) = &name.snapshot {
        let is_protected = raw.is_protected(snapshot).map_err(asked)?;
        return is_protected.then_some(()).ok_or_else(|| {
            OpenError::new(format!(
                "{name} is not protected, so that it could be removed, and its blocks read as others: \
                 `rbd snap protect {name}`"
            ))
        });
    }
    if read_only {
        return Ok(());
    }
    if !raw.has_exclusive_lock().map_err(asked)? {
        return Err(OpenError::new(format!(
            "{name} lacks the feature `exclusive-lock`, without which two daemons could write it: \
             `rbd feature enable {name} exclusive-lock`"
        )));
    }
    // Options of a pool or image prevail over those of a client.
    for (option, without) in [("rbd_cache", "false"), ("rbd_persistent_cache_mode", "disabled")] {
        let value = raw.option(option).map_err(asked)?;
        if let Some(value) = value.filter(|value| value != without) {
            return Err(OpenError::new(format!(
                "{name} has {option} = {value}, so that completed writes could be lost: `rbd config \
                 image rm {name} {option}`, or `rbd config pool rm {} {option}`",
                name.pool
            )));
        }
    }
    Ok(())
}

/// Refuses an image that is not the one that a host has made, or a part of that.
fn check_made(
    name: &ImageName,
    made: &CreatedImage,
    (id, size_bytes): (&str, u64),
) -> Result<(), OpenError> {
    if id != made.id {
        return Err(OpenError::new(format!(
            "{name} is another image (id {id}) than the one that a host has made (id {}): rename it, \
             and restore that one (`rbd trash ls`)",
            made.id
        )));
    }
    if size_bytes < made.size_bytes {
        return Err(OpenError::new(format!(
            "{name} has {size_bytes} bytes, fewer than the {} that a host has made: restore its size \
             (`rbd resize`)",
            made.size_bytes
        )));
    }
    Ok(())
}

fn no_image(config: &ClusterConfig, name: &ImageName, is_made: bool, errno: Errno) -> OpenError {
    match errno {
        Errno::ENOENT => {
            let sentence = match &name.snapshot {
                Some(_) => format!("there is no snapshot {name}: correct `path`"),
                None if is_made => format!(
                    "the image {name}, which a host has made, is missing: restore it (`rbd trash ls`, \
                     `rbd mv`), or have a host delete the namespace"
                ),
                None => format!(
                    "there is no image {name}: `rbd create --size 100G {name}`, or correct `path`"
                ),
            };
            OpenError { sentence, may_pass: true }
        }
        errno => failed(config, &format!("open the image {name}"), errno),
    }
}

/// What is found of an image without serving it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Examination {
    /// Its size.
    pub size_bytes: u64,
    /// The address of the client that holds its lock.
    pub owner: Option<String>,
}

/// Looks at an image, without taking its lock: for a check of the configuration. Blocks as long as
/// the cluster does not answer.
///
/// # Errors
/// One sentence: what was tried, what the cluster answered, what to do.
pub fn examine(
    config: &ClusterConfig,
    name: &ImageName,
    read_only: bool,
) -> Result<Examination, OpenError> {
    let client = Arc::new(connect(config, &[])?);
    let pool = ffi::Pool::new(&client, &name.pool, &name.namespace);
    let pool = pool.map_err(|errno| no_pool(config, &name.pool, errno))?;
    // Not read-only: such a handle knows of no lock. It takes none before it writes.
    let raw = open(pool, name, read_only);
    let raw = raw.map_err(|errno| no_image(config, name, false, errno))?;
    let asked = |errno| failed(config, &format!("read the header of {name}"), errno);
    check_features(&raw, name, read_only, asked)?;
    let size_bytes = raw.size_bytes().map_err(asked)?;
    let owner = if read_only { None } else { raw.lock_owner().map_err(asked)? };
    Ok(Examination { size_bytes, owner })
}

/// The version of librados.
///
/// # Errors
/// It is not installed, or too old: a sentence.
pub fn library_version() -> Result<String, String> {
    ffi::Client::library_version()
}
