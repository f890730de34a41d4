//! Snapshots and clones of images that are served.
//!
//! A snapshot is protected (`rbd snap protect`) after it was taken, because one that is served has to
//! stay: reads of a removed snapshot return what the image has now, or zeros, before a client that
//! has it open learns of that. All of this blocks as long as the cluster does not answer.

use nix::errno::Errno;

use super::image::Image;
use crate::ceph::ImageName;
use crate::ceph_client::connection::remedy;
use crate::ceph_client::ffi;

/// A snapshot of an image.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ImageSnapshot {
    /// Its name in the image.
    pub name: String,
    /// The size of the image at that time.
    pub size_bytes: u64,
    /// When it was taken, in seconds since 1970.
    pub created_unix_s: u64,
    /// It cannot be removed before its protection is ended.
    pub is_protected: bool,
    /// The images that share blocks with it, or why they are not known.
    pub clones: Result<Vec<String>, String>,
}

/// Why there is no snapshot or clone, or why a snapshot is not removed.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{sentence}")]
pub struct ImageError {
    /// What was tried, and what the cluster answered.
    pub sentence: String,
    /// What to do.
    pub remedy: String,
}

impl ImageError {
    /// An error with this text.
    pub fn new(sentence: impl Into<String>, remedy: impl Into<String>) -> ImageError {
        ImageError { sentence: sentence.into(), remedy: remedy.into() }
    }
}

impl Image {
    /// Waits for an answer of the monitors and of the OSD with the header: while librbd takes a
    /// snapshot it suspends writes until both have answered, without a limit.
    ///
    /// # Errors
    /// Why there could be no snapshot that is protected.
    pub fn prepare_snapshot(&self) -> Result<(), ImageError> {
        let image = self.wait_for_monitors().and_then(|()| self.reopened());
        match image.and_then(|image| image.has_layering()) {
            Ok(true) => Ok(()),
            Ok(false) => Err(ImageError::new(
                format!(
                    "{} lacks the feature `layering`, without which no snapshot can be protected",
                    self.name()
                ),
                "copy it to an image that has it: `rbd deep cp`",
            )),
            Err(errno) => {
                let sentence =
                    format!("cannot read the header of {}: {}", self.name(), errno.desc());
                Err(ImageError::new(sentence, remedy(self.config(), errno)))
            }
        }
    }

    /// Takes a snapshot of an image whose lock this client has; another client would ask that one.
    /// Writes that were started before are in it, later ones wait.
    ///
    /// # Errors
    /// Why there is none.
    pub fn create_snapshot(&self, name: &str) -> Result<(), ImageError> {
        let made = self.owned()?.create_snapshot(name);
        made.map_err(|errno| self.failed("take the snapshot", name, errno))
    }

    /// Protects a snapshot from its removal.
    ///
    /// # Errors
    /// Why it is not protected.
    pub fn protect_snapshot(&self, name: &str) -> Result<(), ImageError> {
        match self.owned()?.protect_snapshot(name) {
            // It is.
            Ok(()) | Err(Errno::EBUSY) => Ok(()),
            Err(errno) => Err(self.failed("protect the snapshot", name, errno)),
        }
    }

    /// Whether a snapshot has no clones, so that it can be removed.
    ///
    /// # Errors
    /// Why it cannot.
    pub fn check_removal(&self, name: &str) -> Result<(), ImageError> {
        self.owned()?;
        let clones = self.reopened().and_then(|image| image.clones_of(name));
        let clones = clones.map_err(|errno| self.failed("read the clones of", name, errno))?;
        if clones.is_empty() {
            return Ok(());
        }
        let sentence = format!("{}@{name} has clones: {}", self.name(), clones.join(", "));
        let remedy = match clones.iter().find(|it| !it.ends_with(ffi::IN_TRASH)) {
            Some(clone) => {
                format!("remove them, or copy what they share with it: `rbd flatten {clone}`")
            }
            None => "remove them from the trash: `rbd trash ls --all`".to_owned(),
        };
        Err(ImageError::new(sentence, remedy))
    }

    /// Removes a snapshot, after [`Image::check_removal`].
    ///
    /// # Errors
    /// Why it is not removed.
    pub fn remove_snapshot(&self, name: &str) -> Result<(), ImageError> {
        let owned = self.owned()?;
        let unprotected = match owned.unprotect_snapshot(name) {
            // It is not protected, or cannot be.
            Err(Errno::EINVAL | Errno::ENOSYS) => Ok(()),
            outcome => outcome,
        };
        let removed = unprotected.and_then(|()| owned.remove_snapshot(name));
        removed.map_err(|errno| self.failed("remove the snapshot", name, errno))
    }

    /// Its snapshots, the oldest first, whoever serves it.
    ///
    /// # Errors
    /// Why they are not known.
    pub fn snapshots(&self) -> Result<Vec<ImageSnapshot>, ImageError> {
        // Read-only, and so without a watch: librbd, which looks up the time of each snapshot of the
        // list, aborts if the image learns meanwhile that one was removed.
        let list = || -> Result<Vec<ImageSnapshot>, Errno> {
            let image = self.reopened()?;
            let describe = |ffi::Snapshot { name, size_bytes, created_unix_s }| {
                let is_protected = image.is_protected(&name)?;
                let clones = image.clones_of(&name).map_err(|errno| errno.desc().to_owned());
                Ok(ImageSnapshot { name, size_bytes, created_unix_s, is_protected, clones })
            };
            let described = image.snapshots()?.into_iter().map(describe);
            // One that was removed meanwhile.
            described.filter(|it| !matches!(it, Err(Errno::ENOENT))).collect()
        };
        list().map_err(|errno| {
            let sentence =
                format!("cannot list the snapshots of {}: {}", self.name(), errno.desc());
            ImageError::new(sentence, remedy(self.config(), errno))
        })
    }

    /// Makes an image of a snapshot, whose blocks it shares, whoever serves that image.
    ///
    /// # Errors
    /// Why there is none.
    pub fn clone_snapshot(&self, name: &str, clone: &ImageName) -> Result<(), ImageError> {
        let make = || {
            let (own, other) = (self.pool(self.name())?, self.pool(clone)?);
            let from = (&own, self.name().image.as_str(), name);
            ffi::clone_snapshot(from, (&other, &clone.image))
        };
        make().map_err(|errno| match errno {
            Errno::EEXIST => {
                let sentence = format!("there is an image {clone} already");
                ImageError::new(sentence, "choose another name")
            }
            errno => self.failed(&format!("make the clone {clone} of the snapshot"), name, errno),
        })
    }

    /// The open image, if this client has its lock.
    fn owned(&self) -> Result<&ffi::Image, ImageError> {
        self.serving().filter(|_| !self.is_read_only()).ok_or_else(|| {
            let sentence = format!("this daemon does not hold the lock of {}", self.name());
            ImageError::new(sentence, "ask the one that serves it for writing")
        })
    }

    /// Opens the image anew, read-only: what is open may not know of the last changes.
    fn reopened(&self) -> Result<ffi::Image, Errno> {
        let pool = self.pool(self.name())?;
        ffi::Image::open(pool, &self.name().image, None, true)
    }

    fn failed(&self, tried: &str, name: &str, errno: Errno) -> ImageError {
        let image = self.name();
        match errno {
            Errno::EEXIST => {
                let sentence = format!("{image} has a snapshot {name} already");
                ImageError::new(sentence, "choose another name, or remove that one")
            }
            Errno::ENOENT => {
                let sentence = format!("there is no snapshot {image}@{name}, or no such pool");
                ImageError::new(sentence, "see `nvmfctl image list` for those that there are")
            }
            errno => {
                if errno == Errno::ESHUTDOWN {
                    self.note_fenced();
                }
                let sentence = format!("cannot {tried} {image}@{name}: {}", errno.desc());
                ImageError::new(sentence, remedy(self.config(), errno))
            }
        }
    }
}
