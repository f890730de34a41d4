//! Resizes a backing store in service.
//!
//! The administrator extends or truncates a file or device, never nvmfd: here its current size is
//! read and adopted. A namespace grows when its store has grown. It shrinks only when a smaller
//! size is configured; the file may be truncated afterwards.

use std::io::{self, Seek, SeekFrom};
use std::path::Path;
use std::sync::atomic::Ordering;

use super::backing::{BackingKind, Kind};
use super::device::BackingDevice;
use super::open::check_shape;
use super::open_error::OpenError;
use crate::durable;

impl BackingDevice {
    /// The size in bytes that it should have now, if different; `kind` is its configuration. A
    /// memory file grows here; otherwise nothing changes before [`BackingDevice::resize`]. May
    /// block on the device.
    ///
    /// # Errors
    /// One sentence: the store does not have that size, or cannot have it.
    pub fn next_size(&self, kind: &BackingKind) -> Result<Option<u64>, OpenError> {
        let old = self.size_bytes();
        let new = match *kind {
            BackingKind::File { size, .. } => self.size_of_file(size)?,
            BackingKind::Ram { size } | BackingKind::Null { size } => size,
            BackingKind::Rbd { .. } => self.size_of_file(None)?,
        };
        if new == old {
            return Ok(None);
        }
        check_shape(self.name(), new, self.block_size_bytes())?;
        if let (Kind::Ram, Some(file)) = (self.kind(), &self.file)
            && new > old
        {
            file.set_len(new).map_err(|error| self.refusal(new, &error))?;
        }
        if let (Kind::File, Some(hold)) = (self.kind(), &self.hold) {
            // After a power loss the file must be as long as the configuration then requires.
            // Through a descriptor of its own, because fsync would consume a writeback error that
            // belongs to the flush of a host.
            let file = hold.another(self.name(), true)?;
            durable::sync(&file, Path::new(self.name())).map_err(|error| {
                OpenError::new(format!("cannot make the size of {} durable: {error}", self.name()))
            })?;
        }
        Ok(Some(new))
    }

    /// Sets the served size. Commands beyond it are out of range immediately, also commands in
    /// progress.
    pub fn resize(&self, bytes: u64) {
        self.size_bytes.store(bytes, Ordering::Relaxed);
        self.truncation.end_at(bytes);
        if let (Kind::Ram, Some(file)) = (self.kind(), &self.file) {
            // If memory cannot be freed, no data are affected.
            let _ = file.set_len(bytes);
        }
    }

    fn size_of_file(&self, wanted: Option<u64>) -> Result<u64, OpenError> {
        let old = self.size_bytes();
        if wanted == Some(old) {
            return Ok(old);
        }
        let found = self.measure().map_err(|error| {
            OpenError::new(format!("cannot find out how large {} is: {error}", self.name()))
        })?;
        self.is_long(found);
        match wanted {
            // The current size; but a truncation during service is not intended.
            None => Ok(found.max(old)),
            Some(wanted) if wanted == found || (wanted < old && wanted < found) => Ok(wanted),
            Some(wanted) => Err(OpenError::new(format!(
                "{} has {found} bytes but the configuration says {wanted}; give it that size \
                 first (a file: truncate -s {wanted} {}), then reload or try again",
                self.name(),
                self.name()
            ))),
        }
    }

    /// The current size of the file or device.
    fn measure(&self) -> io::Result<u64> {
        if let Some(image) = &self.image {
            return Ok(image.size_bytes()?);
        }
        match (&self.file, self.kind()) {
            (Some(file), Kind::Device) => (&**file).seek(SeekFrom::End(0)),
            (Some(file), _) => Ok(file.metadata()?.len()),
            (None, _) => Ok(self.size_bytes()),
        }
    }

    fn refusal(&self, bytes: u64, error: &io::Error) -> OpenError {
        OpenError::new(format!(
            "{} cannot get {bytes} bytes: {error}; free memory first",
            self.name()
        ))
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::backing::BackingConfig;
    use crate::durable::testing::calls;
    use crate::resize::*;

    fn open(kind: BackingKind) -> BackingDevice {
        let config =
            BackingConfig { kind, block_size_bytes: 4096, read_only: false, shared: false };
        BackingDevice::open(&config).unwrap()
    }

    #[test]
    fn a_file_grows_only_to_its_actual_size_and_shrinks_by_configuration() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let of = |size: Option<u64>| BackingKind::File { path: path.clone(), size };
        let backing = open(of(Some(8192)));
        let file = File::options().write(true).open(&path).unwrap();
        let says = |size| backing.next_size(&of(Some(size))).unwrap_err().to_string();
        assert_eq!(backing.next_size(&of(Some(8192))), Ok(None));
        assert!(says(16384).contains("has 8192 bytes but the configuration says 16384"));
        file.set_len(16384).unwrap();
        assert_eq!(backing.next_size(&of(Some(8192))), Ok(None), "it says what it said before");
        assert_eq!(backing.next_size(&of(Some(16384))), Ok(Some(16384)));
        assert_eq!(backing.next_size(&of(None)), Ok(Some(16384)));
        assert!(says(12288).contains("has 16384 bytes"), "grown, but not to that");
        assert_eq!(backing.size_bytes(), 8192, "nothing happens before");
        backing.resize(16384);
        assert_eq!((backing.blocks(), backing.contains(12288, 4096)), (4, true));
        // Smaller only by configuration; the file may be truncated before or after.
        assert_eq!(backing.next_size(&of(Some(4096))), Ok(Some(4096)));
        file.set_len(4096).unwrap();
        assert_eq!(backing.next_size(&of(Some(4096))), Ok(Some(4096)));
        assert_eq!(backing.next_size(&of(None)), Ok(None));
        assert!(says(8192).contains("has 4096 bytes"));
        backing.resize(4096);
        assert!(!backing.contains(4096, 1) && backing.contains(0, 4096));
        file.set_len(6000).unwrap();
        assert!(
            backing.next_size(&of(None)).unwrap_err().sentence.contains("whole number of blocks")
        );
    }

    /// The size is saved with the unsaved changes, and a start checks the file against it.
    #[test]
    fn a_new_size_is_durable_before_it_is_taken_over() {
        let directory = crate::testing::directory();
        let path = directory.path().join("disk");
        let of = |size: Option<u64>| BackingKind::File { path: path.clone(), size };
        let backing = open(of(Some(8192)));
        let next = |size| calls(|| backing.next_size(&of(Some(size))).unwrap());
        assert_eq!(next(8192), (None, vec![]));
        File::options().write(true).open(&path).unwrap().set_len(16384).unwrap();
        assert_eq!(next(16384), (Some(16384), vec!["sync disk".to_owned()]));
    }

    #[test]
    fn ram_and_null_devices_are_resized_to_the_configured_size() {
        let backing = open(BackingKind::Ram { size: 8192 });
        let bytes = || backing.file.as_ref().unwrap().metadata().unwrap().len();
        for size in [16384, 4096] {
            assert_eq!(backing.next_size(&BackingKind::Ram { size }), Ok(Some(size)));
            assert!(bytes() >= size, "there before it is served");
            backing.resize(size);
            assert_eq!((bytes(), backing.size_bytes()), (size, size));
        }
        assert!(backing.next_size(&BackingKind::Ram { size: 5000 }).is_err());
        assert!(backing.next_size(&BackingKind::Ram { size: u64::MAX - 4095 }).is_err());
        let backing = open(BackingKind::Null { size: 8192 });
        assert_eq!(backing.next_size(&BackingKind::Null { size: 4096 }), Ok(Some(4096)));
    }
}
