//! Images that hosts have made: how they are made, and removed again.
//!
//! An image is recognised by its id, which no other image of the pool gets. As long as that is not
//! known, because the client that made it was killed meanwhile, nobody has served it: what is
//! removed then has the size that was announced, no block that was ever written, and no snapshot.

use std::sync::Arc;

use nix::errno::Errno;

use super::client::{Client, DataClient};
use crate::ceph::{ClusterConfig, ImageName, ImageOrigin};
use crate::ceph_client::connection::{connect, failed, no_pool};
use crate::ceph_client::ffi;
use crate::open_error::OpenError;

/// The object that lists the images of a pool.
const DIRECTORY: &str = "rbd_directory";

/// Why no image was made, as one sentence.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum MakeError {
    /// Somebody else has made one with this name.
    #[error("{0}")]
    Exists(String),
    /// The pool is full, or its quota used up.
    #[error("{0}")]
    NoSpace(String),
    /// For another reason. There may be one, or there will be.
    #[error("{0}")]
    Failed(String),
}

/// What an image of that name was when its removal was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removal {
    /// It is removed, or there was none.
    Removed,
    /// It is another one, which was left.
    NotOwn,
}

impl DataClient {
    /// The client that makes images in the pool of an image, which exists. Blocks for some seconds
    /// if the monitors do not answer.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub fn for_pool(config: &ClusterConfig, image: &ImageName) -> Result<DataClient, OpenError> {
        let client = Client::of(config)?;
        let pool = client.pool(&image.pool, &image.namespace);
        pool.map_err(|errno| no_pool(config, &image.pool, errno))?;
        Ok(DataClient::new(client))
    }

    /// Makes an image and returns its id. Blocks as long as the cluster does not answer.
    ///
    /// # Errors
    /// Why there is none.
    pub fn make_image(&self, name: &ImageName, size_bytes: u64) -> Result<String, MakeError> {
        let client = self.client();
        let failed = |tried: &str, errno| {
            if errno == Errno::ESHUTDOWN {
                client.note_fenced();
            }
            let sentence = failed(&client.config, &format!("{tried} {name}"), errno).sentence;
            match errno {
                Errno::ENOSPC | Errno::EDQUOT => MakeError::NoSpace(sentence),
                _ => MakeError::Failed(sentence),
            }
        };
        if client.is_fenced() {
            return Err(failed("make the image", Errno::ESHUTDOWN));
        }
        let pool = client.pool(&name.pool, &name.namespace);
        let pool = pool.map_err(|errno| failed("open the pool of", errno))?;
        ffi::create_image(&pool, &name.image, size_bytes).map_err(|errno| match errno {
            Errno::EEXIST => MakeError::Exists(format!(
                "there is an image {name} that this daemon has not made: it is not used"
            )),
            errno => failed("make the image", errno),
        })?;
        let image = ffi::Image::open(pool, &name.image, None, true);
        image.and_then(|image| image.id()).map_err(|errno| failed("open the new image", errno))
    }
}

/// Removes an image that was made, or announced, unless the one with its name is another. Takes as
/// long as it has objects, and blocks as long as the cluster does not answer.
///
/// # Errors
/// One sentence: what was tried, what the cluster answered, what to do. It may exist.
pub fn remove_made(
    config: &ClusterConfig,
    name: &ImageName,
    origin: &ImageOrigin,
) -> Result<Removal, OpenError> {
    let client = Client::of(config)?;
    let refused = |errno| {
        if errno == Errno::ESHUTDOWN {
            client.note_fenced();
        }
        not_removed(config, name, errno)
    };
    let pool = || client.pool(&name.pool, &name.namespace);
    let opened = pool().map_err(|errno| no_pool(config, &name.pool, errno))?;
    // What the network still delivers of a killed client must not make it afterwards.
    if let ImageOrigin::Client { address, .. } = origin
        && client.was(address)
    {
        client.exclude(address).map_err(refused)?;
    }
    match ffi::Image::open(opened, &name.image, None, true) {
        Ok(image) => {
            if !is_own(&image, origin).map_err(refused)? {
                return Ok(Removal::NotOwn);
            }
            // A client that was killed has it open for another half minute, unless it is excluded.
            let watchers = image.watchers().map_err(refused)?;
            let mut former = watchers.iter().filter(|address| client.was(address));
            former.try_for_each(|address| client.exclude(address)).map_err(refused)?;
        }
        Err(Errno::ENOENT) if !has_part(name, pool().map_err(refused)?).map_err(refused)? => {
            return Ok(Removal::Removed);
        }
        Err(Errno::ENOENT) => {}
        Err(errno) => return Err(refused(errno)),
    }
    let removed = pool().and_then(|pool| ffi::remove_image(&pool, &name.image));
    match removed {
        Ok(()) | Err(Errno::ENOENT) => Ok(Removal::Removed),
        Err(errno) => Err(refused(errno)),
    }
}

/// Whether images can be made in the pool of an image, for a check of the configuration; changes
/// nothing. Blocks as long as the cluster does not answer.
///
/// # Errors
/// One sentence: what was tried, what the cluster answered, what to do.
pub fn examine_pool(config: &ClusterConfig, image: &ImageName) -> Result<(), OpenError> {
    let client = Arc::new(connect(config, &[])?);
    let pool = ffi::Pool::new(&client, &image.pool, &image.namespace);
    let pool = pool.map_err(|errno| no_pool(config, &image.pool, errno))?;
    // The comparison fails; without the right to write, it is refused before.
    let key = "nvmfd-check".to_owned();
    let compare = [(key.clone(), Some(b"-".to_vec()))];
    let change = ffi::Change { create: false, compare: &compare, set: &[], remove: &[key] };
    match pool.change_omap(DIRECTORY, change) {
        Ok(()) | Err(Errno::ECANCELED | Errno::ENOENT) => Ok(()),
        Err(errno) => {
            Err(failed(config, &format!("make images in the pool {}", image.pool), errno))
        }
    }
}

/// Whether there is a part of an image, which is no image and keeps others from getting its name: the
/// object with its id, which is made first and removed last.
fn has_part(name: &ImageName, mut pool: ffi::Pool) -> Result<bool, Errno> {
    match pool.read_omap(&format!("rbd_id.{}", name.image), &[("", String::new())], None) {
        Ok(_) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Whether an image is the one that was made, or announced.
fn is_own(image: &ffi::Image, origin: &ImageOrigin) -> Result<bool, Errno> {
    match origin {
        ImageOrigin::Id(id) => Ok(image.id()? == *id),
        ImageOrigin::Client { size_bytes, .. } => Ok(image.size_bytes()? == *size_bytes
            && image.snapshots()?.is_empty()
            && image.is_unwritten()?),
    }
}

fn not_removed(config: &ClusterConfig, name: &ImageName, errno: Errno) -> OpenError {
    let sentence = match errno {
        Errno::EBUSY => format!(
            "the image {name} cannot be removed: a client has it open (`rbd status {name}`)"
        ),
        Errno::ENOTEMPTY => {
            format!("the image {name} cannot be removed: it has snapshots (`rbd snap ls {name}`)")
        }
        errno => return failed(config, &format!("remove the image {name}"), errno),
    };
    OpenError { sentence, may_pass: true }
}

#[cfg(test)]
mod tests;
