//! Images that hosts have made: how they are made, and removed again.
//!
//! An image is recognised by its id, which no other image of the pool gets. As long as that is not
//! known, because the client that made it was killed meanwhile, nobody has served it: what is
//! removed then has the size that was announced, no block that was ever written, and no snapshot.

use std::sync::Arc;

use nix::errno::Errno;

use super::client::{Client, DataClient};
use crate::ceph::{ClusterConfig, ImageIdentity, ImageName, ImageOrigin};
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
    /// It is removed.
    Removed,
    /// There was none.
    Absent,
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
    client.has_made(name, &origin.cluster)?;
    let pool = client.pool(&name.pool, &name.namespace);
    let pool = pool.map_err(|errno| no_pool(config, &name.pool, errno))?;
    let removed = match &origin.identity {
        ImageIdentity::Id(id) => remove_by_id(&client, &pool, name, id),
        ImageIdentity::Client(address) => {
            remove_announced(&client, &pool, name, address, origin.size_bytes)
        }
    };
    removed.map_err(|errno| {
        if errno == Errno::ESHUTDOWN {
            client.note_fenced();
        }
        not_removed(config, name, errno)
    })
}

/// Removes the image with this id by way of the trash, where images have their id: if another one gets
/// the name meanwhile, that is in the trash at worst, and can be restored from there. An earlier
/// attempt may have ended at any point.
fn remove_by_id(
    client: &Client,
    pool: &ffi::Pool,
    name: &ImageName,
    id: &str,
) -> Result<Removal, Errno> {
    let named = id_of_name(pool, name)?;
    let is_named = named.as_ref().is_some_and(|named| named == id);
    match ffi::Image::open_by_id(client.pool(&name.pool, &name.namespace)?, id) {
        Ok(image) => {
            let watchers = exclude_former(client, &image)?;
            // It keeps its name, by which the administrator finds out why it still exists.
            if is_named && watchers {
                return Err(Errno::EBUSY);
            }
            if is_named && !image.snapshots()?.is_empty() {
                return Err(Errno::ENOTEMPTY);
            }
        }
        Err(Errno::ENOENT) => {}
        Err(errno) => return Err(errno),
    }
    // Exclusion has waited for the cluster.
    let is_another = id_of_name(pool, name)?.is_some_and(|named| named != id);
    let is_moved = match is_another {
        true => false,
        false => found(ffi::move_to_trash(pool, &name.image))?,
    };
    match found(ffi::remove_from_trash(pool, id))? {
        true => Ok(Removal::Removed),
        false if is_another || is_moved => Ok(Removal::NotOwn),
        // A part that is in no directory. As long as it has the name, no other image gets it.
        false if is_named => {
            remove_by_name(pool, name)?;
            Ok(Removal::Removed)
        }
        false => Ok(Removal::Absent),
    }
}

/// Removes the image with a name if it is the one that was announced. Librbd finds by its name, too,
/// what an earlier attempt has left of it.
fn remove_announced(
    client: &Client,
    pool: &ffi::Pool,
    name: &ImageName,
    address: &str,
    size_bytes: u64,
) -> Result<Removal, Errno> {
    // What the network still delivers of a killed client must not make it afterwards.
    if client.was(address) {
        client.exclude(address)?;
    }
    let own = client.pool(&name.pool, &name.namespace)?;
    let opened = match ffi::Image::open(own, &name.image, None, true) {
        Ok(image) => {
            let is_own = image.size_bytes()? == size_bytes
                && image.snapshots()?.is_empty()
                && image.is_unwritten()?;
            if !is_own {
                return Ok(Removal::NotOwn);
            }
            exclude_former(client, &image)?;
            Some(image.id()?)
        }
        Err(Errno::ENOENT) => None,
        Err(errno) => return Err(errno),
    };
    let named = id_of_name(pool, name)?;
    let is_own = match &named {
        // Its parent may be missing.
        Some(named) if opened.is_none() => !has_header(pool, named)?,
        // Another image may have got the name meanwhile.
        Some(named) => opened.is_some_and(|opened| opened == *named),
        None => true,
    };
    if !is_own {
        return Ok(Removal::NotOwn);
    }
    match remove_by_name(pool, name)? || named.is_some() {
        true => Ok(Removal::Removed),
        false => Ok(Removal::Absent),
    }
}

/// Removes the image with a name, or a part of one; false: librbd has found none. It says so of a part,
/// which it has removed, and in a pool whose quota is used up, where it has removed nothing.
fn remove_by_name(pool: &ffi::Pool, name: &ImageName) -> Result<bool, Errno> {
    let is_found = found(ffi::remove_image(pool, &name.image))?;
    match id_of_name(pool, name)? {
        None => Ok(is_found),
        Some(_) => Err(Errno::EDQUOT),
    }
}

/// Excludes those that have an image open and are former clients of this daemon; otherwise they would
/// have it open for another half minute. Returns whether there are others.
fn exclude_former(client: &Client, image: &ffi::Image) -> Result<bool, Errno> {
    let watchers = image.watchers()?;
    let (former, others): (Vec<_>, Vec<_>) = watchers.iter().partition(|it| client.was(it));
    former.iter().try_for_each(|address| client.exclude(address))?;
    Ok(!others.is_empty())
}

/// False: there is none.
fn found(outcome: Result<(), Errno>) -> Result<bool, Errno> {
    match outcome {
        Ok(()) => Ok(true),
        Err(Errno::ENOENT) => Ok(false),
        Err(errno) => Err(errno),
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
        Ok(()) | Err(Errno::ECANCELED) => Ok(()),
        // Nobody has made an image in a new pool. A namespace begins to exist with this object.
        Err(Errno::ENOENT) if image.namespace.is_empty() => Ok(()),
        Err(Errno::ENOENT) => Err(OpenError {
            sentence: format!(
                "the pool {} has no namespace {space}: `rbd namespace create {}/{space}`, or correct \
                 its name",
                image.pool,
                image.pool,
                space = image.namespace
            ),
            may_pass: true,
        }),
        Err(errno) => {
            Err(failed(config, &format!("make images in the pool {}", image.pool), errno))
        }
    }
}

/// The id of the image with a name, also of a part of one: what is written first and, in a removal,
/// removed before the name is free. None: there is none.
fn id_of_name(pool: &ffi::Pool, name: &ImageName) -> Result<Option<String>, Errno> {
    match pool.read_object(&format!("rbd_id.{}", name.image)) {
        // A string after its length. While it is made, the object may be empty.
        Ok(content) => {
            let id = content.get(4..).unwrap_or_default().to_owned();
            Ok(Some(String::from_utf8(id).map_err(|_| Errno::EBADMSG)?))
        }
        Err(Errno::ENOENT) => Ok(None),
        Err(errno) => Err(errno),
    }
}

/// Whether there is an image with this id, and not only a part of one.
fn has_header(pool: &ffi::Pool, id: &str) -> Result<bool, Errno> {
    found(pool.read_object(&format!("rbd_header.{id}")).map(drop))
}

fn not_removed(config: &ClusterConfig, name: &ImageName, errno: Errno) -> OpenError {
    let sentence = match errno {
        Errno::EBUSY => format!(
            "the image {name} cannot be removed: a client has it open (`rbd status {name}`)"
        ),
        Errno::ENOTEMPTY => {
            format!("the image {name} cannot be removed: it has snapshots (`rbd snap ls {name}`)")
        }
        Errno::EPERM => format!(
            "the image {name} cannot be removed: it is in the trash for some time (`rbd trash ls`), or \
             the rights of {} do not suffice",
            config.entity()
        ),
        Errno::EDQUOT => format!(
            "the image {name} cannot be removed as long as the quota of the pool {pool} is used up: \
             raise it (`ceph osd pool set-quota {pool} max_bytes`)",
            pool = name.pool
        ),
        errno => return failed(config, &format!("remove the image {name}"), errno),
    };
    OpenError { sentence, may_pass: true }
}

#[cfg(test)]
mod tests;
