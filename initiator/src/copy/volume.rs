//! The two ends of a copy: a file, whose operations are done at once, or a namespace.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::stat::{major, minor};
use nix::unistd::{Whence, lseek};

use crate::multipath::{Allocation, BlockDone, BlockRequest, Operation, Unaccepted};
use crate::verify::model_file::sync_name;
use crate::{Error, MultipathHost};

/// What is done with a part.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Action {
    Read,
    Write,
    /// It reads as zeros afterwards, if possible without occupying space.
    Zero,
    Flush,
}

/// A part of what is copied.
#[derive(Debug)]
pub(super) struct Part {
    pub(super) offset: u64,
    pub(super) len: usize,
    /// What was read, or is to be written.
    pub(super) bytes: Vec<u8>,
}

/// An end.
pub(super) enum Volume {
    File(FileVolume),
    Namespace(Box<NamespaceVolume>),
}

impl Volume {
    pub(super) fn size_bytes(&self) -> u64 {
        match self {
            Volume::File(file) => file.size_bytes,
            Volume::Namespace(namespace) => namespace.size_bytes(),
        }
    }

    /// Offsets and lengths are multiples of this.
    pub(super) fn block_bytes(&self) -> u64 {
        match self {
            Volume::File(_) => 1,
            Volume::Namespace(namespace) => namespace.block_bytes(),
        }
    }

    /// Bytes of a part at most.
    pub(super) fn most_bytes(&self) -> u32 {
        match self {
            Volume::File(_) => u32::MAX,
            Volume::Namespace(namespace) => namespace.most_bytes(),
        }
    }

    /// Whether a target has its size already, as since the first command of a copy.
    pub(super) fn is_prepared(&self) -> bool {
        match self {
            Volume::File(file) => file.found_bytes >= file.size_bytes,
            Volume::Namespace(_) => true,
        }
    }

    /// Before a target is written: a regular file gets its size, and its name is durable.
    pub(super) fn prepare(&self) -> Result<(), Error> {
        match self {
            Volume::File(file) => file.prepare(),
            Volume::Namespace(_) => Ok(()),
        }
    }

    /// Returns what identifies it for the continuation of a copy.
    pub(super) fn identity(&self) -> String {
        match self {
            Volume::File(file) => file.identity.clone(),
            Volume::Namespace(namespace) => namespace.identity(),
        }
    }

    /// Returns the end of the hole that begins at an offset; without a hole that offset. None: the
    /// target is being asked.
    pub(super) fn hole_end(&mut self, offset: u64) -> Option<u64> {
        match self {
            Volume::File(file) => Some(file.hole_end(offset)),
            Volume::Namespace(namespace) => namespace.hole_end(offset),
        }
    }

    /// Forgets what is known of holes.
    pub(super) fn forget_holes(&mut self) {
        if let Volume::Namespace(namespace) = self {
            match &mut namespace.holes {
                Holes::Asked { is_of_use, .. } => *is_of_use = false,
                holes => *holes = Holes::Unknown,
            }
        }
    }

    /// Begins an action. What it is for comes back by [`Volume::next_done`].
    ///
    /// # Errors
    /// There is no room at present: the part.
    pub(super) fn submit(&mut self, action: Action, part: Part) -> Result<(), Part> {
        match self {
            Volume::File(file) => {
                file.act(action, part);
                Ok(())
            }
            Volume::Namespace(namespace) => namespace.submit(action, part),
        }
    }

    /// Returns the next action that is done.
    pub(super) fn next_done(&mut self) -> Option<(Part, Result<(), Error>)> {
        match self {
            Volume::File(file) => file.done.pop_front(),
            Volume::Namespace(namespace) => namespace.next_done(),
        }
    }

    /// Moves what is under way, and sleeps until something happens, at most for `limit`.
    pub(super) fn wait(&mut self, limit: Duration) {
        if let Volume::Namespace(namespace) = self {
            namespace.host.wait(Instant::now() + limit);
            while namespace.host.next_notice().is_some() {}
        }
    }

    pub(super) fn is_namespace(&self) -> bool {
        matches!(self, Volume::Namespace(_))
    }

    pub(super) fn close(&mut self) {
        if let Volume::Namespace(namespace) = self {
            namespace.host.disconnect();
        }
    }
}

/// A file or block device.
pub(super) struct FileVolume {
    file: File,
    path: PathBuf,
    size_bytes: u64,
    /// Its length when it was opened.
    found_bytes: u64,
    is_regular: bool,
    identity: String,
    done: VecDeque<(Part, Result<(), Error>)>,
}

impl FileVolume {
    /// Opens a source, or (`size_bytes`) a target, which will have that size if it is a regular file.
    pub(super) fn open(path: &Path, size_bytes: Option<u64>) -> Result<FileVolume, Error> {
        let failed = |error| local(path, &error);
        let mut options = OpenOptions::new();
        options.read(true);
        if size_bytes.is_some() {
            options.write(true).create(true).truncate(false);
        }
        let mut file = options.open(path).map_err(failed)?;
        let metadata = file.metadata().map_err(failed)?;
        let kind = metadata.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(Error::Usage(format!("{}: no file or block device", path.display())));
        }
        let absolute = std::path::absolute(path).map_err(failed)?;
        let mut identity = format!("file {}", absolute.display());
        if size_bytes.is_none() {
            // A source that was written meanwhile is another one.
            identity += &format!(" of {}.{:09}", metadata.mtime(), metadata.mtime_nsec());
        } else if kind.is_file() {
            // A target that was made anew lacks what an earlier command has copied. A number may be
            // used again, and not every file system knows when a file was made.
            let made = metadata.created().ok().and_then(|at| at.duration_since(UNIX_EPOCH).ok());
            let made = made.unwrap_or_default();
            identity += &format!(", {} made at {}", metadata.ino(), made.as_nanos());
        }
        let found_bytes = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let is_regular = kind.is_file();
        if size_bytes.is_some() && !is_regular {
            // The next start of the machine may give the name to another disk.
            let device = metadata.rdev();
            let directory = format!("/sys/dev/block/{}:{}", major(device), minor(device));
            let disk = disk_id(Path::new(&directory)).unwrap_or_default();
            identity += &format!(", {found_bytes} bytes, {disk}");
        }
        let size_bytes = size_bytes.filter(|_| is_regular).unwrap_or(found_bytes);
        let (path, done) = (path.to_owned(), VecDeque::new());
        Ok(FileVolume { file, path, size_bytes, found_bytes, is_regular, identity, done })
    }

    fn prepare(&self) -> Result<(), Error> {
        if !self.is_regular {
            return Ok(());
        }
        let failed = |error| local(&self.path, &error);
        self.file.set_len(self.size_bytes).map_err(failed)?;
        // Its name has to be as durable as what is noted to be in it.
        sync_name(&self.path).map_err(failed)
    }

    fn hole_end(&self, offset: u64) -> u64 {
        let Ok(at) = i64::try_from(offset) else { return offset };
        match lseek(&self.file, at, Whence::SeekData) {
            Ok(data) => u64::try_from(data).unwrap_or(offset).max(offset),
            // There is none up to the end.
            Err(Errno::ENXIO) => self.size_bytes.max(offset),
            // The file system does not tell.
            Err(_) => offset,
        }
    }

    fn act(&mut self, action: Action, mut part: Part) {
        let (file, offset) = (&self.file, part.offset);
        let outcome = match action {
            Action::Read => {
                // Behind the end of the file there are zeros, up to the end of the block.
                let left = self.size_bytes.saturating_sub(offset).min(part.len as u64) as usize;
                part.bytes.resize(part.len, 0);
                part.bytes[left..].fill(0);
                file.read_exact_at(&mut part.bytes[..left], offset)
            }
            Action::Write => {
                let left = self.size_bytes.saturating_sub(offset).min(part.len as u64) as usize;
                file.write_all_at(&part.bytes[..left], offset)
            }
            Action::Zero => self.zero(offset, part.len as u64),
            Action::Flush => file.sync_all(),
        };
        let outcome = outcome.map_err(|error| local(&self.path, &error));
        self.done.push_back((part, outcome));
    }

    fn zero(&self, offset: u64, len: u64) -> std::io::Result<()> {
        let len = len.min(self.size_bytes.saturating_sub(offset));
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (at, length) = (i64::try_from(offset), i64::try_from(len));
        if let (Ok(at), Ok(length)) = (at, length)
            && fallocate(&self.file, flags, at, length).is_ok()
        {
            return Ok(());
        }
        // The file system has no holes.
        let zeros = vec![0; 1 << 20];
        let mut done = 0;
        while done < len {
            let now = (len - done).min(zeros.len() as u64);
            self.file.write_all_at(&zeros[..now as usize], offset + done)?;
            done += now;
        }
        Ok(())
    }
}

/// What the kernel knows to identify a disk with this directory in sysfs, or that of the partition.
fn disk_id(directory: &Path) -> Option<String> {
    let names = ["wwid", "device/wwid", "dm/uuid", "md/uuid", "serial", "loop/backing_file"];
    let places = [directory.to_owned(), directory.join("..")];
    let mut files = places.iter().flat_map(|place| names.map(|name| place.join(name)));
    let id = files.find_map(|file| std::fs::read_to_string(file).ok());
    id.map(|id| id.trim().to_owned())
}

fn local(path: &Path, error: &std::io::Error) -> Error {
    Error::Local(format!("{}: {error}", path.display()))
}

/// What a target has told of its holes is used for this long.
const HOLES_AGE: Duration = Duration::from_secs(1);
/// Tag of the command that asks for them.
const HOLES_TAG: u64 = u64::MAX;

/// A namespace.
pub(super) struct NamespaceVolume {
    host: MultipathHost,
    /// Parts whose commands are under way, by tag.
    parts: Vec<Option<Part>>,
    holes: Holes,
}

/// What a target tells of its holes.
enum Holes {
    /// It was not asked.
    Unknown,
    /// It is being asked, from this block on; the answer is of use unless all was forgotten since.
    Asked { slba: u64, is_of_use: bool },
    /// It has told, then. None: nothing.
    Told { slba: u64, found: Option<Allocation>, at: Instant },
}

impl NamespaceVolume {
    /// For so many parts at once.
    pub(super) fn new(host: MultipathHost, parts: usize) -> NamespaceVolume {
        NamespaceVolume { host, parts: (0..parts).map(|_| None).collect(), holes: Holes::Unknown }
    }

    fn block_bytes(&self) -> u64 {
        self.host.multipath().namespace().map_or(1, |namespace| namespace.block_bytes.into())
    }

    fn most_bytes(&self) -> u32 {
        self.host.multipath().namespace().map_or(1, |namespace| {
            let zeroes = namespace.max_zeroes_blocks.saturating_mul(namespace.block_bytes);
            namespace.max_transfer_bytes.min(zeroes)
        })
    }

    fn size_bytes(&self) -> u64 {
        let namespace = self.host.multipath().namespace();
        namespace.map_or(0, |namespace| namespace.blocks * u64::from(namespace.block_bytes))
    }

    fn identity(&self) -> String {
        let multipath = self.host.multipath();
        let first = multipath.path_options(0);
        let nqn = first.map(|path| path.session.subnqn.to_string()).unwrap_or_default();
        let ids = multipath.namespace().map(|namespace| namespace.ids);
        format!("namespace {} of {nqn}, {ids:?}", multipath.nsid())
    }

    fn hole_end(&mut self, offset: u64) -> Option<u64> {
        let namespace = *self.host.multipath().namespace()?;
        if !namespace.tells_allocation {
            return Some(offset);
        }
        let block = u64::from(namespace.block_bytes);
        if let Holes::Told { slba, found, at } = &self.holes
            && *slba <= offset / block
        {
            let is_fresh = at.elapsed() < HOLES_AGE;
            match found.as_ref().map(|found| found.at(offset / block, namespace.blocks)) {
                // It does not tell, or this is the end.
                None if is_fresh => return Some(offset),
                // Data are read in any case.
                Some(Some((true, _))) => return Some(offset),
                Some(Some((false, end))) if is_fresh => return Some(end * block),
                _ => {}
            }
        }
        if !matches!(self.holes, Holes::Asked { .. }) {
            self.ask(offset / block);
        }
        None
    }

    fn ask(&mut self, slba: u64) {
        let (operation, blocks, data) = (Operation::LbaStatus, u32::MAX, None);
        let request = BlockRequest { operation, slba, blocks, data, tag: HOLES_TAG };
        if self.host.submit(request).is_ok() {
            self.holes = Holes::Asked { slba, is_of_use: true };
        }
    }

    fn on_told(&mut self, done: BlockDone) {
        let Holes::Asked { slba, is_of_use } = self.holes else { return };
        let found = Allocation::of(slba, done, self.host.pool());
        self.holes = match is_of_use {
            true => Holes::Told { slba, found, at: Instant::now() },
            false => Holes::Unknown,
        };
    }

    fn submit(&mut self, action: Action, part: Part) -> Result<(), Part> {
        let Some(namespace) = self.host.multipath().namespace().copied() else { return Err(part) };
        let Some(tag) = self.parts.iter().position(Option::is_none) else { return Err(part) };
        let block = u64::from(namespace.block_bytes);
        let operation = match action {
            Action::Read => Operation::Read,
            Action::Flush => Operation::Flush,
            Action::Zero if namespace.can_write_zeroes => {
                Operation::WriteZeroes { deallocate: namespace.zeroes_deallocate, fua: false }
            }
            Action::Write | Action::Zero => Operation::Write { fua: false },
        };
        let needs_data = matches!(operation, Operation::Read | Operation::Write { .. });
        let mut data = None;
        if needs_data {
            let Some(mut buf) = self.host.pool().take_data(part.len as u32) else {
                return Err(part);
            };
            let bytes = self.host.pool().bytes_mut(&mut buf);
            match action {
                Action::Write => bytes.copy_from_slice(&part.bytes[..part.len]),
                Action::Zero => bytes.fill(0),
                Action::Read | Action::Flush => {}
            }
            data = Some(buf);
        }
        let request = BlockRequest {
            operation,
            slba: part.offset / block,
            blocks: (part.len as u64 / block) as u32,
            data,
            tag: tag as u64,
        };
        match self.host.submit(request) {
            Ok(()) => {
                self.parts[tag] = Some(part);
                Ok(())
            }
            Err((request, Unaccepted::Full | Unaccepted::NotReady)) => {
                request.data.into_iter().for_each(|buf| self.host.pool().give(buf));
                Err(part)
            }
        }
    }

    fn next_done(&mut self) -> Option<(Part, Result<(), Error>)> {
        let mut done = self.host.next_done()?;
        if done.tag == HOLES_TAG {
            self.on_told(done);
            done = self.host.next_done()?;
        }
        let mut part = self.parts.get_mut(done.tag as usize)?.take()?;
        if let Some(buf) = done.data {
            if done.operation == Operation::Read && done.outcome.is_ok() {
                part.bytes.clear();
                part.bytes.extend_from_slice(self.host.pool().bytes(&buf));
            }
            self.host.pool().give(buf);
        }
        let place = self.host.multipath();
        let outcome = done.outcome.map_err(|why| {
            let name = match place.path_options(0) {
                Some(path) => format!("namespace {} of {}", place.nsid(), path.session.subnqn),
                None => String::new(),
            };
            Error::Local(format!("{name}, at {}: {why}", part.offset))
        });
        Some((part, outcome))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_devices_and_partitions_have_the_id_of_the_device() {
        let directory = tempfile::tempdir().expect("a directory");
        let partition = directory.path().join("sda1");
        std::fs::create_dir(&partition).expect("made");
        assert_eq!(disk_id(directory.path()), None);
        std::fs::create_dir(directory.path().join("device")).expect("made");
        std::fs::write(directory.path().join("device/wwid"), "naa.5000\n").expect("written");
        for of in [directory.path(), &partition] {
            assert_eq!(disk_id(of).as_deref(), Some("naa.5000"));
        }
    }
}
