//! The simulated administrator: shows and hides namespaces, and the persistence of such changes.
//! Texts, edits, the journal and its steps are the target's own (`nvmfd::overlay`), on a real
//! directory. Before each step the process may be killed; below it is a file system that may lose
//! unsynced data at a power failure.
//!
//! After every start, changes that were acknowledged, or that hosts may have seen, are in effect. A
//! change in progress is in effect completely or not at all.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use nvmfd::api::{Change, Settings};
use nvmfd::blockdev::durable::{Step, observe};
use nvmfd::overlay::EffectiveConfig;
use rdma::soft::sim::Rng;
use tempfile::TempDir;

use super::host::hostnqn;
use super::mutants::SeededBug;
use super::target::SUBNQN;

/// Steps of one change: written, synced, renamed, the directory synced, committed, acknowledged.
const STEPS: u64 = 6;
/// Changes per mille during which the process is killed.
const KILLS: u16 = 250;
/// The file of changes.
const NAME: &str = "changes.json";

/// Hosts that do not see a namespace, by namespace.
pub type Hidden = Vec<BTreeSet<usize>>;

/// Result of persisting a change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PersistOutcome {
    /// Persisted: it can be committed.
    Yes,
    /// The process was killed, possibly by a power failure.
    Killed {
        /// It was a power failure.
        power: bool,
    },
}

/// The simulated administrator; see the module.
pub struct Administrator {
    directory: TempDir,
    /// None while the target is down.
    declared: Option<EffectiveConfig>,
    files: Arc<Mutex<Files>>,
    dice: Rng,
    machines: usize,
    /// What must be in effect after a start.
    hidden: Hidden,
    /// What may be in effect.
    under_way: Option<Hidden>,
    /// Step of the present change before which the process is killed.
    kill: Option<u64>,
    /// Number of changes so far.
    count: u64,
    /// The process is not killed any more.
    spared: bool,
    plant: Option<SeededBug>,
}

impl Administrator {
    /// For a target with this number of namespaces and of hosts.
    ///
    /// # Errors
    /// No directory for its files.
    pub fn new(
        spaces: usize,
        machines: usize,
        seed: u64,
        plant: Option<SeededBug>,
    ) -> Result<Administrator, String> {
        let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mut text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[[listener]]\naddress = \"127.0.0.1\"\n\
             [[subsystem]]\nnqn = \"{SUBNQN}\"\nallow_any_host = true\n",
            directory.path()
        );
        for nsid in 1..=spaces {
            text += "[[subsystem.namespace]]\nkind = \"null\"\nsize = \"1MiB\"\n";
            text += &format!("nsid = {nsid}\n");
        }
        let file = directory.path().join("nvmfd.toml");
        fs::write(file, text).map_err(|error| error.to_string())?;
        let forgets = plant == Some(SeededBug::UnsyncedChange);
        let files = Files { forgets, dice: Rng::new(seed ^ 0xf11e), ..Files::default() };
        Ok(Administrator {
            directory,
            declared: None,
            files: Arc::new(Mutex::new(files)),
            dice: Rng::new(seed ^ 0xad31),
            machines,
            hidden: vec![BTreeSet::new(); spaces],
            under_way: None,
            kill: None,
            count: 0,
            spared: false,
            plant,
        })
    }

    /// Stops killing the process.
    pub fn calm_down(&mut self) {
        self.spared = true;
    }

    /// Starts the target: returns what is in effect.
    ///
    /// # Errors
    /// A change that must be in effect is not.
    pub fn start(&mut self) -> Result<Hidden, String> {
        let file = self.directory.path().join("nvmfd.toml");
        let mut declared = Err(String::new());
        self.kill = None;
        self.on_files(|| {
            let loaded = EffectiveConfig::load_with(&file, None);
            declared = loaded.map_err(|errors| errors.to_string());
            Ok(())
        })?;
        let declared = declared
            .map_err(|errors| format!("what was changed cannot be read any more: {errors}"))?;
        if let Some(aside) = declared.changes().set_aside.first() {
            return Err(format!("a change is set aside: {}", aside.why));
        }
        let masks = declared.config().subsystems.first().map(|it| &it.offer.masks);
        let hidden = |space: usize| {
            let mask = masks.and_then(|masks| masks.get(&(space as u32 + 1)));
            let sees = |machine: &usize| mask.is_none_or(|mask| mask.contains(&hostnqn(*machine)));
            (0..self.machines).filter(|machine| !sees(machine)).collect()
        };
        let found: Hidden = (0..self.hidden.len()).map(hidden).collect();
        let under_way = self.under_way.take();
        if found != self.hidden && under_way.as_ref() != Some(&found) {
            return Err(format!(
                "a change is lost or there by half: after a start {found:?} do not see the \
                 namespaces, and before it {:?}, with {under_way:?} under way",
                self.hidden
            ));
        }
        self.hidden.clone_from(&found);
        self.declared = Some(declared);
        Ok(found)
    }

    /// Whether hosts see a change before it is persisted: a seeded bug.
    pub fn commits_early(&self) -> bool {
        self.plant == Some(SeededBug::EarlyCommit)
    }

    /// Shows or hides a namespace, and persists that. None: no change.
    ///
    /// # Errors
    /// An unexplained failure.
    pub fn keep(
        &mut self,
        space: usize,
        machine: usize,
        shown: bool,
    ) -> Result<Option<PersistOutcome>, String> {
        let mut hidden = self.under_way.take().unwrap_or_else(|| self.hidden.clone());
        let news = match shown {
            true => hidden[space].remove(&machine),
            false => hidden[space].insert(machine),
        };
        let Some(declared) = self.declared.as_ref().filter(|_| news) else { return Ok(None) };
        let sees = (0..self.machines).filter(|machine| !hidden[space].contains(machine));
        let hosts: Vec<String> = sees.map(|machine| hostnqn(machine).to_string()).collect();
        let settings = Settings::from([("hosts".to_owned(), hosts.into())]);
        let (subsystem, nsid) = (SUBNQN.to_owned(), space as u32 + 1);
        let change = Change::SetNamespace { subsystem, nsid, settings };
        self.count += 1;
        let next = declared.with(&[change], (self.count, None));
        let next = next.map_err(|misfit| format!("a change is refused: {misfit}"))?;
        self.under_way = Some(hidden);
        let killed = !self.spared && self.dice.per_mille(KILLS);
        self.kill = killed.then(|| 1 + self.dice.below(STEPS));
        let outcome = self.on_files(|| next.prepare()?.persist(declared));
        match outcome {
            _ if lock(&self.files).dead.is_some() => Ok(Some(self.die())),
            Err(why) => Err(format!("a change cannot be kept: {why}")),
            Ok(()) => {
                self.declared = Some(next);
                Ok(Some(if self.kill == Some(STEPS - 1) {
                    self.die()
                } else {
                    PersistOutcome::Yes
                }))
            }
        }
    }

    /// Hosts may have seen the present change.
    pub fn committed(&mut self) {
        if let Some(hidden) = &self.under_way {
            self.hidden.clone_from(hidden);
        }
    }

    /// Acknowledges the change, unless the process is killed before.
    pub fn acknowledge(&mut self) -> Option<PersistOutcome> {
        self.under_way = None;
        (self.kill.take() == Some(STEPS)).then(|| self.die())
    }

    fn die(&mut self) -> PersistOutcome {
        self.kill = None;
        PersistOutcome::Killed { power: self.dice.per_mille(500) }
    }

    /// The target has crashed, with `power` at a power failure.
    pub fn crash(&mut self, power: bool) {
        self.declared = None;
        lock(&self.files).crash(self.directory.path(), power);
    }

    /// Executes an operation on the simulated file system, during which the process may be killed.
    fn on_files(&self, what: impl FnOnce() -> Result<(), String>) -> Result<(), String> {
        let (files, directory) = (Arc::clone(&self.files), self.directory.path().to_owned());
        lock(&files).kill = self.kill;
        observe(Some(Box::new(move |step| lock(&files).observe(step, &directory))));
        let outcome = what();
        observe(None);
        outcome
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
    /// Steps until the process is killed.
    kill: Option<u64>,
    /// Contents at the time when it was killed.
    dead: Option<BTreeMap<PathBuf, Vec<u8>>>,
    /// A seeded bug: fsync of a file has no effect.
    forgets: bool,
    dice: Rng,
}

impl Default for Files {
    fn default() -> Files {
        Files {
            durable: BTreeMap::new(),
            pending: Vec::new(),
            synced: BTreeSet::new(),
            kill: None,
            dead: None,
            forgets: false,
            dice: Rng::new(0),
        }
    }
}

impl Files {
    /// Called before a step.
    fn observe(&mut self, step: Step<'_>, directory: &Path) -> io::Result<()> {
        let killed = || Err(io::Error::other("the process was killed"));
        if self.dead.is_some() {
            return killed();
        }
        if self.kill == Some(1) {
            let mut files = files_in(directory);
            if let Step::Write(path, bytes) = step {
                files.insert(path.to_owned(), self.part(bytes));
            }
            self.dead = Some(files);
            return killed();
        }
        self.kill = self.kill.map(|steps| steps - 1);
        match step {
            Step::Write(path, _) => {
                self.synced.remove(path);
            }
            Step::Sync(path) | Step::SyncData(path) if !self.forgets => {
                self.synced.insert(path.to_owned());
            }
            Step::Rename(from, to) => {
                let content = (fs::read(from)?, self.synced.remove(from));
                self.pending.push((to.to_owned(), Some(content)));
            }
            Step::Remove(path) => self.pending.push((path.to_owned(), None)),
            Step::SyncDirectory(_) | Step::SyncFileSystem(_) => {
                (0..self.pending.len()).for_each(|_| self.settle());
            }
            Step::Sync(_) | Step::SyncData(_) => {}
        }
        Ok(())
    }

    /// Makes the first pending name durable.
    fn settle(&mut self) {
        match self.pending.remove(0) {
            (path, Some(content)) => self.durable.insert(path, content),
            (path, None) => self.durable.remove(&path),
        };
    }

    /// The process was killed; with `power` also removes what is not durable, or a part of it.
    fn crash(&mut self, directory: &Path, power: bool) {
        let dead = self.dead.take();
        let mut files = dead.unwrap_or_else(|| files_in(directory));
        if power {
            let count = self.dice.below(self.pending.len() as u64 + 1);
            (0..count).for_each(|_| self.settle());
            self.pending.clear();
            let beside = files.into_iter().filter(|(path, _)| !path.ends_with(NAME));
            files = beside.map(|(path, bytes)| (path, self.part(&bytes))).collect();
            for (path, (bytes, synced)) in std::mem::take(&mut self.durable) {
                let bytes = if synced { bytes } else { self.part(&bytes) };
                self.durable.insert(path.clone(), (bytes.clone(), true));
                files.insert(path, bytes);
            }
        }
        for path in files_in(directory).into_keys().filter(|path| !files.contains_key(path)) {
            let _ = fs::remove_file(path);
        }
        for (path, bytes) in files {
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

/// The files of changes in a directory, and those beside them.
fn files_in(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten().map(|entry| entry.path());
    let of_changes = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(NAME))
    };
    entries
        .filter(of_changes)
        .filter_map(|path| Some((path.clone(), fs::read(path).ok()?)))
        .collect()
}

fn lock(files: &Mutex<Files>) -> MutexGuard<'_, Files> {
    files.lock().unwrap_or_else(PoisonError::into_inner)
}
