//! A simulated directory: the product reads and writes real files in it. Before each step
//! (`nvmfd::blockdev::durable`) the process may be killed, or the step may fail; below is a file
//! system that may lose unsynced data and names at a power failure.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvmfd::blockdev::durable::{Step, observe};
use rdma::soft::sim::Rng;
use tempfile::TempDir;

/// Fault of a step; steps are counted from 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StepFault {
    /// No fault.
    None,
    /// The process is killed before the step.
    Kill(u64),
    /// The step fails; later ones do not.
    Error(u64),
}

/// A simulated directory; see the module.
#[derive(Debug)]
pub struct SimDirectory {
    directory: TempDir,
    files: Arc<Mutex<Files>>,
}

impl SimDirectory {
    /// Creates an empty directory.
    ///
    /// # Errors
    /// It cannot be created.
    pub fn new(seed: u64) -> Result<SimDirectory, String> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let files = Files {
            durable: BTreeMap::new(),
            pending: Vec::new(),
            synced: BTreeSet::new(),
            fault: StepFault::None,
            dead: None,
            forgets: false,
            dice: Rng::new(seed),
        };
        Ok(SimDirectory { directory, files: Arc::new(Mutex::new(files)) })
    }

    /// Its path.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// A seeded bug: fsync has no effect.
    pub fn forget_syncs(&self) {
        lock(&self.files).forgets = true;
    }

    /// Adds a file that is durable.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn put(&self, name: &str, content: &[u8]) -> Result<(), String> {
        let path = self.path().join(name);
        fs::write(&path, content).map_err(|error| error.to_string())?;
        lock(&self.files).durable.insert(path, (content.to_vec(), true));
        Ok(())
    }

    /// Executes an operation on the simulated file system.
    pub fn run<T>(&self, fault: StepFault, what: impl FnOnce() -> T) -> T {
        let (files, directory) = (Arc::clone(&self.files), self.path().to_owned());
        lock(&files).fault = fault;
        observe(Some(Box::new(move |step| lock(&files).observe(step, &directory))));
        let outcome = what();
        observe(None);
        outcome
    }

    /// Whether the process was killed in an operation.
    pub fn is_dead(&self) -> bool {
        lock(&self.files).dead.is_some()
    }

    /// The process has ended; with `power` also removes what is not durable, or a part of it.
    pub fn crash(&self, power: bool) {
        lock(&self.files).crash(self.path(), power);
    }
}

/// Content, and whether it is synced.
type Content = (Vec<u8>, bool);

/// State of the file system: what is durable of the files of the directory.
#[derive(Debug)]
struct Files {
    /// Contents after a power failure.
    durable: BTreeMap<PathBuf, Content>,
    /// Names added or removed since the directory was synced, in order.
    pending: Vec<(PathBuf, Option<Content>)>,
    /// Files whose content is synced.
    synced: BTreeSet<PathBuf>,
    fault: StepFault,
    /// Contents at the time when the process was killed.
    dead: Option<BTreeMap<PathBuf, Vec<u8>>>,
    /// A seeded bug.
    forgets: bool,
    dice: Rng,
}

impl Files {
    /// Called before a step.
    fn observe(&mut self, step: Step<'_>, directory: &Path) -> io::Result<()> {
        if self.dead.is_none() && self.fault == StepFault::Kill(1) {
            let mut files = files_in(directory);
            if let Step::Write(path, bytes) = step {
                files.insert(path.to_owned(), self.part(bytes));
            }
            self.dead = Some(files);
        }
        if self.dead.is_some() {
            return Err(io::Error::other("the process was killed"));
        }
        self.fault = match self.fault {
            StepFault::Kill(steps) => StepFault::Kill(steps.saturating_sub(1)),
            StepFault::Error(1) => {
                self.fault = StepFault::None;
                return Err(io::Error::other("the device fails"));
            }
            StepFault::Error(steps) => StepFault::Error(steps.saturating_sub(1)),
            StepFault::None => StepFault::None,
        };
        match step {
            Step::Write(path, _) => {
                self.synced.remove(path);
            }
            Step::Sync(path) | Step::SyncData(path) if !self.forgets => self.sync(path)?,
            Step::Rename(from, to) => {
                let content = (fs::read(from)?, self.synced.remove(from));
                self.pending.push((to.to_owned(), Some(content)));
                self.pending.push((from.to_owned(), None));
            }
            Step::Remove(path) => self.pending.push((path.to_owned(), None)),
            Step::SyncDirectory(_) | Step::SyncFileSystem(_) if !self.forgets => {
                for (path, content) in std::mem::take(&mut self.pending) {
                    self.settle(path, content);
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// A file is synced, whose name may be new.
    fn sync(&mut self, path: &Path) -> io::Result<()> {
        self.synced.insert(path.to_owned());
        self.pending.push((path.to_owned(), Some((fs::read(path)?, true))));
        Ok(())
    }

    /// Makes a name durable, or its removal.
    fn settle(&mut self, path: PathBuf, content: Option<Content>) {
        match content {
            Some(content) => self.durable.insert(path, content),
            None => self.durable.remove(&path),
        };
    }

    /// The process has ended; with `power` also removes what is not durable, or a part of it: of each
    /// unsynced name either state remains.
    fn crash(&mut self, directory: &Path, power: bool) {
        let dead = self.dead.take();
        let mut files = dead.unwrap_or_else(|| files_in(directory));
        if power {
            let mut stuck = BTreeSet::new();
            for (path, content) in std::mem::take(&mut self.pending) {
                if !stuck.contains(&path) && self.dice.per_mille(500) {
                    self.settle(path, content);
                } else {
                    stuck.insert(path);
                }
            }
            files.clear();
            for (path, (bytes, synced)) in std::mem::take(&mut self.durable) {
                let bytes = if synced { bytes } else { self.part(&bytes) };
                self.durable.insert(path.clone(), (bytes.clone(), true));
                files.insert(path, bytes);
            }
        }
        let found = files_in(directory);
        for path in found.keys().filter(|path| !files.contains_key(*path)) {
            let _ = fs::remove_file(path);
        }
        for (path, bytes) in
            files.into_iter().filter(|(path, bytes)| found.get(path) != Some(bytes))
        {
            let _ = fs::write(path, bytes);
        }
        self.synced.clear();
    }

    /// The part of unsynced content that has reached the file.
    fn part(&mut self, bytes: &[u8]) -> Vec<u8> {
        let len = self.dice.below(bytes.len() as u64 + 1);
        bytes[..len as usize].to_vec()
    }
}

fn files_in(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let paths = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    paths.filter_map(|path| Some((path.clone(), fs::read(path).ok()?))).collect()
}

fn lock(files: &Mutex<Files>) -> MutexGuard<'_, Files> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}
