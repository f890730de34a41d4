//! The simulated administrator: shows and hides namespaces, and the persistence of such changes.
//! Texts, edits, the journal and its steps are the target's own (`nvmfd::overlay`), in a simulated
//! directory.
//!
//! After every start, changes that were acknowledged, or that hosts may have seen, are in effect. A
//! change in progress is in effect completely or not at all.

use std::collections::BTreeSet;

use nvmfd::api::{Change, Settings};
use nvmfd::overlay::EffectiveConfig;
use rdma::soft::sim::Rng;

use super::directory::{SimDirectory, StepFault};
use super::host::hostnqn;
use super::mutants::SeededBug;
use super::target::SUBNQN;

/// Steps of one change: written, synced, renamed, the directory synced, committed, acknowledged.
const STEPS: u64 = 6;
/// Changes per mille during which the process is killed.
const KILLS: u16 = 250;
/// Name of the configuration file.
const CONFIG: &str = "nvmfd.toml";

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
    directory: SimDirectory,
    /// None while the target is down.
    declared: Option<EffectiveConfig>,
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
        let directory = SimDirectory::new(seed ^ 0xf11e)?;
        let mut text = format!(
            "provider = \"soft\"\nstate_directory = {:?}\n[[listener]]\naddress = \"127.0.0.1\"\n\
             [[subsystem]]\nnqn = \"{SUBNQN}\"\nallow_any_host = true\n",
            directory.path()
        );
        for nsid in 1..=spaces {
            text += "[[subsystem.namespace]]\nkind = \"null\"\nsize = \"1MiB\"\n";
            text += &format!("nsid = {nsid}\n");
        }
        directory.put(CONFIG, text.as_bytes())?;
        if plant == Some(SeededBug::UnsyncedChange) {
            directory.forget_syncs();
        }
        Ok(Administrator {
            directory,
            declared: None,
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
        let file = self.directory.path().join(CONFIG);
        self.kill = None;
        let loaded =
            self.directory.run(StepFault::None, || EffectiveConfig::load_with(&file, None));
        let declared = loaded
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
        let fault = self.kill.map_or(StepFault::None, StepFault::Kill);
        let outcome = self.directory.run(fault, || next.prepare()?.persist(declared));
        match outcome {
            _ if self.directory.is_dead() => Ok(Some(self.die())),
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
        self.directory.crash(power);
    }
}
