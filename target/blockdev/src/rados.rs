//! Objects of RADOS with compare-and-set: state that several daemons share.
//!
//! All calls block. Reads and updates end within the timeout of the client, as far as the map of the
//! cluster is known; the blocklist as soon as the cluster answers. A thread that waits in a call may be
//! abandoned, with its reference of the client.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use nix::errno::Errno;

use crate::ceph::ClusterConfig;
use crate::ceph_client::connection::{connect, failed, no_pool};
use crate::ceph_client::ffi;
use crate::ceph_client::ffi::Change;
use crate::open_error::OpenError;

/// The objects of a namespace of a pool, through a client of its own.
pub struct ObjectClient {
    client: Arc<ffi::Client>,
    pool: ffi::Pool,
    pool_name: String,
    namespace: String,
    address: String,
}

impl std::fmt::Debug for ObjectClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ObjectClient").field("address", &self.address).finish_non_exhaustive()
    }
}

/// A change of one object: all of it, or nothing.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Update {
    /// Creates the object, if there is none.
    pub create: bool,
    /// The values that these keys must have; none: the key must be missing.
    pub compare: Vec<(String, Option<Vec<u8>>)>,
    /// Keys with their new values, which are not empty.
    pub set: Vec<(String, Vec<u8>)>,
    /// Keys to remove; a missing one is no error.
    pub remove: Vec<String>,
}

/// Why an object was not changed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum UpdateError {
    /// A key has another value than `compare` says.
    #[error("another client has changed the object")]
    Conflict,
    /// ENOENT: there is no such object. ETIMEDOUT: the change may have happened, or happen later.
    #[error("{}", .0.desc())]
    Errno(Errno),
}

impl ObjectClient {
    /// Connects a client. `timeout`, in whole seconds, limits each read, update and command.
    ///
    /// # Errors
    /// One sentence: what was tried, what the cluster answered, what to do.
    pub fn open(
        config: &ClusterConfig,
        pool: &str,
        namespace: &str,
        timeout: Duration,
    ) -> Result<ObjectClient, OpenError> {
        let seconds = timeout.as_secs().max(1).to_string();
        let own = [
            ("rados_osd_op_timeout", seconds.clone()),
            ("rados_mon_op_timeout", seconds),
            // Asks for the map of the cluster each second while an operation has no answer. After a
            // reset the library asks for the next map only: if that is of another change, it asks
            // again for operations older than 10 s, and here none gets that old.
            ("objecter_tick_interval", "1".to_owned()),
            ("objecter_timeout", "0.5".to_owned()),
        ];
        let client = Arc::new(connect(config, &own)?);
        let (pool_name, namespace) = (pool.to_owned(), namespace.to_owned());
        let pool = ffi::Pool::new(&client, &pool_name, &namespace)
            .map_err(|errno| no_pool(config, &pool_name, errno))?;
        let said = |errno| failed(config, "ask the client for its address", errno);
        let address = client.address().map_err(said)?;
        Ok(ObjectClient { client, pool, pool_name, namespace, address })
    }

    /// The address of this client: what others exclude from the cluster.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// All keys of an object, as they were at one time.
    ///
    /// # Errors
    /// ENOENT: there is no such object; else the errno.
    pub fn read(&self, object: &str) -> Result<BTreeMap<String, Vec<u8>>, Errno> {
        self.read_prefixes(object, &[""])
    }

    /// The keys of an object that begin with one of these texts, as they were at one time.
    ///
    /// # Errors
    /// As [`ObjectClient::read`].
    pub fn read_prefixes(
        &self,
        object: &str,
        prefixes: &[&str],
    ) -> Result<BTreeMap<String, Vec<u8>>, Errno> {
        // A handle of its own, because it keeps the version of the last operation.
        let mut pool = self.handle()?;
        loop {
            match read_once(&mut pool, object, prefixes) {
                // The object has changed meanwhile.
                Err(Errno::ERANGE | Errno::EOVERFLOW) => {}
                outcome => return outcome,
            }
        }
    }

    /// Changes an object by one atomic operation, if all comparisons hold.
    ///
    /// # Errors
    /// Nothing has changed, unless it is ETIMEDOUT.
    pub fn update(&self, object: &str, update: &Update) -> Result<(), UpdateError> {
        let Update { create, compare, set, remove } = update;
        // A missing key compares as an empty value, so there are none.
        let is_empty = |value: Option<&Vec<u8>>| value.is_some_and(Vec::is_empty);
        if compare.iter().any(|(_, value)| is_empty(value.as_ref()))
            || set.iter().any(|(_, value)| is_empty(Some(value)))
        {
            return Err(UpdateError::Errno(Errno::EINVAL));
        }
        let change = Change { create: *create, compare, set, remove };
        self.pool.change_omap(object, change).map_err(|errno| match errno {
            Errno::ECANCELED => UpdateError::Conflict,
            errno => UpdateError::Errno(errno),
        })
    }

    /// Removes an object with all its keys.
    ///
    /// # Errors
    /// ENOENT: there is none; else the errno.
    pub fn remove(&self, object: &str) -> Result<(), Errno> {
        self.pool.remove_object(object)
    }

    /// Excludes the client with an address from the cluster for a time, which begins again if it is
    /// excluded already. This client has the map of the cluster that says so when it returns; another
    /// that writes what the excluded one wrote must have that map first.
    ///
    /// # Errors
    /// The errno. ETIMEDOUT: it may be excluded.
    pub fn blocklist_add(&self, address: &str, seconds: u32) -> Result<(), Errno> {
        self.client.blocklist(address, seconds)
    }

    fn handle(&self) -> Result<ffi::Pool, Errno> {
        ffi::Pool::new(&self.client, &self.pool_name, &self.namespace)
    }
}

/// The keys of one version of an object; ERANGE or EOVERFLOW: it has changed between two replies.
/// One operation reads the first keys of all prefixes, which mostly are all: with one for each, an
/// object that changes more often than they take together could not be read.
fn read_once(
    pool: &mut ffi::Pool,
    object: &str,
    prefixes: &[&str],
) -> Result<BTreeMap<String, Vec<u8>>, Errno> {
    let (mut all, mut version) = (BTreeMap::new(), None);
    let mut ranges: Vec<_> = prefixes.iter().map(|prefix| (*prefix, String::new())).collect();
    while !ranges.is_empty() {
        let (pages, read) = pool.read_omap(object, &ranges, version)?;
        version = Some(read);
        let mut rest = Vec::new();
        for ((prefix, _), page) in ranges.into_iter().zip(pages) {
            let last = page.pairs.last().filter(|_| page.more);
            rest.extend(last.map(|(key, _)| (prefix, key.clone())));
            all.extend(page.pairs);
        }
        ranges = rest;
    }
    Ok(all)
}
