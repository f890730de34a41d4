//! Oracle for Namespace Management: written from the specifications, not from the implementation.
//!
//! There is a set of possible cases: which namespaces exist, which hosts have them, and which of
//! the outstanding requests have already taken effect. A request may take effect at any moment
//! between its command and its response, atomically; its response excludes cases. A request without
//! a response may take effect until the target has nothing of it, or crashes, and leaves both
//! cases, until a host queries them. If no case is left, there is a violation.
//!
//! So a namespace whose creation was completed exists, whatever happens to the target, with its
//! size and identity; a deleted one never returns, and neither do its blocks; no id is assigned
//! twice; and the quota is what the existing ones leave.

use std::collections::{BTreeMap, BTreeSet};

use nvme::identify::{IdentifyNamespace, namespaces};
use nvme::{NSID_ALL, Status};
use rdma::soft::sim::Rng;

use super::blocks::Moment;
use super::ns_blocks::Blocks;
use crate::sim::block_stamp;
use crate::sim::scenario::Profile;

use crate::sim::workload::ns_command::{NsCommand, Place};

/// Ids of configured namespaces.
pub const DECLARED: [u32; 2] = [1, 2];
/// Limits of hosts: namespaces, and bytes of all together.
pub const MOST: usize = 4;
/// See [`MOST`].
pub const QUOTA_BYTES: u64 = 96 << 10;
/// Their ANA group, which is optimized on every path.
pub const GROUP: u32 = 3;
/// Number of cases above which no request is sent before a query.
const CROWD: usize = 8;

/// A namespace.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
struct Space {
    /// The command that created it.
    birth: u32,
    blocks: u32,
    shift: u8,
    private: bool,
    /// Hosts that have it.
    machines: BTreeSet<usize>,
}

/// Result of a request: the id that it created, or 0; or the code of its status.
type Ending = Result<u32, u16>;

/// A possible case.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
struct Case {
    spaces: BTreeMap<u32, Space>,
    /// Outstanding requests that have taken effect.
    done: BTreeMap<u32, Ending>,
}

/// A request without a response.
#[derive(Debug)]
struct Pending {
    deed: NsCommand,
    machine: usize,
    /// The target has crashed since it was sent.
    dead: bool,
}

/// Possible state for a query, a read or a write.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum View {
    Ids(Vec<u32>),
    Space(Option<(u32, u32, u8)>),
    Reached(Option<u32>),
}

/// An outstanding query, read or write.
#[derive(Debug)]
struct Watch {
    deed: NsCommand,
    machine: usize,
    began: Moment,
    seen: BTreeSet<View>,
    /// No request was outstanding meanwhile.
    quiet: bool,
}

/// The oracle for Namespace Management; see the module.
#[derive(Debug)]
pub struct NsManagementOracle {
    /// Namespace commands per mille of commands.
    chance: u16,
    disk_fails: bool,
    possible: BTreeSet<Case>,
    pending: BTreeMap<u32, Pending>,
    watches: BTreeMap<u32, Watch>,
    blocks: Blocks,
    /// Identity of each namespace, by the command that created it.
    names: BTreeMap<u32, [u8; 16]>,
    /// The controller of each host.
    pub cntlids: Vec<u16>,
    /// The machine of each host.
    machines: Vec<usize>,
}

/// A response.
#[derive(Clone, Copy, Debug)]
pub struct Outcome<'a> {
    /// Its status.
    pub status: Status,
    /// Its first dword.
    pub result: u32,
    /// Data read.
    pub data: &'a [u8],
    /// Its controller serves nothing more, or it may have been aborted.
    pub excused: bool,
}

impl NsManagementOracle {
    /// Without namespaces.
    pub fn new(profile: &Profile) -> NsManagementOracle {
        let hosts = 0..profile.hosts;
        NsManagementOracle {
            chance: profile.managing,
            disk_fails: profile.disk.error > 0 || profile.disk.sync_error > 0,
            possible: [Case::default()].into(),
            pending: BTreeMap::new(),
            watches: BTreeMap::new(),
            blocks: Blocks::default(),
            names: BTreeMap::new(),
            cntlids: vec![0; profile.hosts],
            machines: hosts.map(|host| profile.machine(host)).collect(),
        }
    }

    /// The next namespace command of a host, if any.
    pub fn next_deed(&self, host: usize, dice: &mut Rng) -> Option<NsCommand> {
        let machine = self.machines[host];
        if self.chance == 0 || !dice.per_mille(self.chance) {
            return None;
        }
        let quiet = !self.pending.values().any(|pending| !pending.dead);
        if quiet && self.possible.len() > 1 && dice.per_mille(600) {
            return Some(if dice.per_mille(500) { NsCommand::List } else { NsCommand::Active });
        }
        let spaces = self.possible.first().map(|case| &case.spaces)?;
        let nsid = match dice.below(8) {
            0 => 3 + dice.below(MOST as u64) as u32,
            which => *spaces.keys().nth(which as usize % spaces.len().max(1)).unwrap_or(&3),
        };
        let cntlid = self.cntlids[host];
        let deed = match dice.below(100) {
            0..15 => NsCommand::Create {
                blocks: 4 + dice.below(9) as u32,
                shift: if dice.per_mille(500) { 9 } else { 12 },
                private: dice.per_mille(300),
            },
            15 => NsCommand::Delete { nsid: NSID_ALL },
            16..24 => NsCommand::Delete { nsid },
            24..42 => NsCommand::Attach { nsid, cntlid },
            42..48 => NsCommand::Detach { nsid, cntlid },
            48..54 => NsCommand::List,
            54..60 => NsCommand::Active,
            60..66 => NsCommand::Look { nsid },
            which => {
                let space = spaces.get(&nsid);
                let block_bytes = space.map_or(512, |space| 1 << space.shift);
                let lba = dice.below(space.map_or(4, |space| space.blocks.min(4).into())) as u32;
                let birth = space.map_or(0, |space| space.birth);
                let place = Place { nsid, birth, lba, block_bytes };
                // A host without it gets an error, which is tested once in a while.
                let has = space.is_some_and(|space| space.machines.contains(&machine));
                return (has || dice.per_mille(150)).then_some(match which {
                    66..84 => NsCommand::Put(place),
                    _ => NsCommand::Get(place),
                });
            }
        };
        let live = self.pending.values().filter(|pending| !pending.dead).count();
        let room = live < 3 && self.possible.len() <= CROWD;
        (room || !deed.is_order()).then_some(deed)
    }

    /// A command is sent.
    pub fn leaves(&mut self, op: u32, deed: NsCommand, host: usize, began: Moment) {
        let machine = self.machines[host];
        if deed.is_order() {
            self.pending.insert(op, Pending { deed, machine, dead: false });
            self.watches.values_mut().for_each(|watch| watch.quiet = false);
            self.expand();
        } else {
            let quiet = !self.pending.values().any(|pending| !pending.dead);
            let watch = Watch { deed, machine, began, seen: BTreeSet::new(), quiet };
            self.watches.insert(op, watch);
        }
        self.look();
    }

    /// A command was answered.
    ///
    /// # Errors
    /// The response is invalid.
    pub fn answered(
        &mut self,
        op: u32,
        deed: NsCommand,
        outcome: Outcome<'_>,
        now: Moment,
    ) -> Result<(), String> {
        match deed.is_order() {
            true => self.order_answered(op, deed, outcome),
            false => match self.watches.remove(&op) {
                Some(watch) => self.watch_answered(op, &watch, outcome, now),
                // The target has crashed since it was sent.
                None => Ok(()),
            },
        }
    }

    /// The association of a command has ended before its response.
    pub fn lost(&mut self, op: u32, deed: NsCommand) {
        match deed {
            NsCommand::Put(_) => {}
            _ if deed.is_order() => {
                if self.pending.get(&op).is_some_and(|pending| pending.dead) {
                    self.forget(op);
                }
            }
            _ => drop(self.watches.remove(&op)),
        }
    }

    /// The target has nothing of a lost command any more.
    pub fn is_over(&mut self, op: u32, deed: NsCommand, now: Moment) {
        self.watches.remove(&op);
        if let NsCommand::Put(place) = deed {
            self.blocks.ended(op, place.lba, false, now);
        }
        if deed.is_order() {
            self.forget(op);
        }
    }

    /// The target has crashed: requests without effect never have one.
    pub fn crash(&mut self, now: Moment) {
        self.pending.values_mut().for_each(|pending| pending.dead = true);
        self.watches.clear();
        self.blocks.crash(now);
    }

    /// Checks the record in the end: id, blocks, log2 of their size, hosts.
    ///
    /// # Errors
    /// It is invalid.
    pub fn check_record(
        &self,
        found: &BTreeMap<u32, (u32, u8, BTreeSet<usize>)>,
    ) -> Result<(), String> {
        let is = |case: &Case| {
            let spaces = case.spaces.iter();
            spaces
                .map(|(nsid, s)| (*nsid, (s.blocks, s.shift, s.machines.clone())))
                .eq(found.iter().map(|(nsid, found)| (*nsid, found.clone())))
        };
        match self.possible.iter().any(is) {
            true => Ok(()),
            false => Err(format!("in the end there are {found:?}, {}", self.known())),
        }
    }

    fn known(&self) -> String {
        let cases: BTreeSet<_> = self.possible.iter().map(|case| &case.spaces).collect();
        let cases: Vec<String> = cases.iter().map(|spaces| format!("{spaces:?}")).collect();
        format!("and possible was: {}", cases.join(" or "))
    }

    fn order_answered(
        &mut self,
        op: u32,
        deed: NsCommand,
        outcome: Outcome<'_>,
    ) -> Result<(), String> {
        let Outcome { status, result, excused, .. } = outcome;
        if !self.pending.contains_key(&op) {
            return Ok(());
        }
        let ending = match status.is_success() {
            true => Ok(if matches!(deed, NsCommand::Create { .. }) { result } else { 0 }),
            false => Err(kind(status)),
        };
        let by_rule = RULES.iter().any(|rule| status.is(*rule));
        let failed = self.disk_fails && status.is(Status::INTERNAL_ERROR);
        if status.is_success() || by_rule {
            let known = self.known();
            self.possible.retain(|case| case.done.get(&op) == Some(&ending));
            if self.possible.is_empty() {
                return Err(format!("it was answered with {ending:x?}, {known}"));
            }
        } else if failed {
            // Nothing has changed.
            self.possible.retain(|case| !case.done.contains_key(&op));
        } else if !excused {
            return Err(format!("it was refused: {status}"));
        }
        self.forget(op);
        Ok(())
    }

    fn watch_answered(
        &mut self,
        op: u32,
        watch: &Watch,
        outcome: Outcome<'_>,
        now: Moment,
    ) -> Result<(), String> {
        let Outcome { status, data, excused, .. } = outcome;
        let births = watch.births();
        if let NsCommand::Put(place) = watch.deed {
            let surely = status.is_success() && births.len() == 1;
            self.blocks.ended(op, place.lba, surely, now);
        }
        if !status.is_success() {
            return match watch.deed {
                _ if excused => Ok(()),
                NsCommand::Put(place) | NsCommand::Get(place) => {
                    let absent = watch.seen.contains(&View::Reached(None));
                    // Its block size may differ.
                    let other = births.iter().any(|birth| *birth != place.birth);
                    let gone = absent && status.is(Status::INVALID_NAMESPACE);
                    let of_disk = self.disk_fails && OF_DISK.iter().any(|each| status.is(*each));
                    match gone || other || of_disk {
                        true => Ok(()),
                        false => Err(format!("it was refused: {status}, {}", self.known())),
                    }
                }
                _ => Err(format!("it was refused: {status}")),
            };
        }
        let found = match watch.deed {
            NsCommand::List | NsCommand::Active => {
                let page = data.first_chunk().ok_or("the page is short")?;
                View::Ids(namespaces(page).filter(|nsid| !DECLARED.contains(nsid)).collect())
            }
            NsCommand::Look { .. } => return self.looked(watch, data),
            NsCommand::Get(place) => {
                let value = block_stamp::identify(place.nsid as u8, place.lba, data);
                let value = value.map_err(|spoilt| spoilt.to_string())?;
                let fits = |birth: &u32| self.blocks.may_be(*birth, place.lba, value, watch.began);
                return match births.iter().any(fits) {
                    true => Ok(()),
                    false => Err(format!("it found {value:?}, which cannot be")),
                };
            }
            _ if births.is_empty() => {
                return Err(format!("it was carried out, {}", self.known()));
            }
            _ => return Ok(()),
        };
        self.saw(watch, &found)
    }

    /// A query has returned this, if it is certain for which state.
    fn saw(&mut self, watch: &Watch, found: &View) -> Result<(), String> {
        if !watch.seen.contains(found) {
            return Err(format!("it found {found:?}, {}", self.known()));
        }
        if watch.quiet {
            self.possible.retain(|case| case.view(watch.deed, watch.machine) == *found);
            self.tidy();
        }
        Ok(())
    }

    /// A host has read the properties of a namespace.
    fn looked(&mut self, watch: &Watch, data: &[u8]) -> Result<(), String> {
        let page = IdentifyNamespace::parse(data.first_chunk().ok_or("the page is short")?);
        let shift = page.lbaf[usize::from(page.flbas & 0xf)].lbads;
        let is = |view: &&View| match view {
            View::Space(Some((_, blocks, own))) => (u64::from(*blocks), *own) == (page.nsze, shift),
            _ => page.nsze == 0,
        };
        let fitting: Vec<View> = watch.seen.iter().filter(is).cloned().collect();
        match &fitting[..] {
            [] => Err(format!("it found {} blocks, {}", page.nsze, self.known())),
            [View::Space(Some((birth, ..)))] => {
                let (birth, name) = (*birth, page.nguid);
                let other = self.names.iter().find(|(of, own)| **own == name && **of != birth);
                if let Some((other, _)) = other {
                    return Err(format!("it has the name of the one that command {other} made"));
                }
                match *self.names.entry(birth).or_insert(name) == name {
                    true => self.saw(watch, &fitting[0]),
                    false => Err("it has another name than before".to_owned()),
                }
            }
            [one] => self.saw(watch, one),
            _ => Ok(()),
        }
    }

    /// Adds the cases of requests that may have taken effect.
    fn expand(&mut self) {
        let mut left: Vec<Case> = std::mem::take(&mut self.possible).into_iter().collect();
        while let Some(case) = left.pop() {
            for (op, pending) in self.pending.iter().filter(|(_, pending)| !pending.dead) {
                if !case.done.contains_key(op) {
                    left.push(case.after(*op, pending));
                }
            }
            self.possible.insert(case);
        }
    }

    /// Nothing more will be known of a request.
    fn forget(&mut self, op: u32) {
        self.pending.remove(&op);
        self.tidy();
    }

    fn tidy(&mut self) {
        let cases = std::mem::take(&mut self.possible).into_iter();
        let pending = &self.pending;
        self.possible = cases
            .map(|mut case| {
                case.done.retain(|op, _| pending.contains_key(op));
                case
            })
            .collect();
    }

    /// Adds the present cases to outstanding queries.
    fn look(&mut self) {
        for (op, watch) in &mut self.watches {
            for case in &self.possible {
                let view = case.view(watch.deed, watch.machine);
                if let (NsCommand::Put(place), View::Reached(Some(birth))) = (watch.deed, &view) {
                    self.blocks.may_reach((*birth, place.lba), *op, watch.began);
                }
                watch.seen.insert(view);
            }
        }
    }
}

impl Watch {
    /// The namespaces that it may concern.
    fn births(&self) -> BTreeSet<u32> {
        let birth = |view: &View| match view {
            View::Reached(birth) => *birth,
            _ => None,
        };
        self.seen.iter().filter_map(birth).collect()
    }
}

impl Case {
    /// The case after a request, with its result.
    fn after(&self, op: u32, pending: &Pending) -> Case {
        let mut case = self.clone();
        let ending = case.carry_out(op, pending);
        case.done.insert(op, ending);
        case
    }

    fn carry_out(&mut self, op: u32, pending: &Pending) -> Ending {
        let machine = pending.machine;
        match pending.deed {
            NsCommand::Create { blocks, shift, private } => {
                if self.spaces.len() >= MOST {
                    return Err(kind(Status::NAMESPACE_ID_UNAVAILABLE));
                }
                let used: u64 = self.spaces.values().map(Space::bytes).sum();
                let machines = BTreeSet::new();
                let space = Space { birth: op, blocks, shift, private, machines };
                if used + space.bytes() > QUOTA_BYTES {
                    return Err(kind(Status::NAMESPACE_INSUFFICIENT_CAPACITY));
                }
                // The lowest free one.
                let free = |id: &u32| !DECLARED.contains(id) && !self.spaces.contains_key(id);
                let nsid = (1..).find(free).unwrap_or(0);
                self.spaces.insert(nsid, space);
                Ok(nsid)
            }
            NsCommand::Delete { nsid: NSID_ALL } => {
                self.spaces.clear();
                Ok(0)
            }
            NsCommand::Delete { nsid } => match self.spaces.remove(&nsid) {
                Some(_) => Ok(0),
                None => Err(kind(Status::INVALID_NAMESPACE)),
            },
            NsCommand::Attach { nsid, .. } => match self.spaces.get_mut(&nsid) {
                None => Err(kind(Status::INVALID_NAMESPACE)),
                Some(space) if space.machines.contains(&machine) => {
                    Err(kind(Status::NAMESPACE_ALREADY_ATTACHED))
                }
                Some(space) if space.private && !space.machines.is_empty() => {
                    Err(kind(Status::NAMESPACE_IS_PRIVATE))
                }
                Some(space) => {
                    space.machines.insert(machine);
                    Ok(0)
                }
            },
            NsCommand::Detach { nsid, .. } => match self.spaces.get_mut(&nsid) {
                None => Err(kind(Status::INVALID_NAMESPACE)),
                Some(space) => match space.machines.remove(&machine) {
                    true => Ok(0),
                    false => Err(kind(Status::NAMESPACE_NOT_ATTACHED)),
                },
            },
            _ => Ok(0),
        }
    }

    /// The state for a query, read or write.
    fn view(&self, deed: NsCommand, machine: usize) -> View {
        let has = |space: &Space| space.machines.contains(&machine);
        match deed {
            NsCommand::Active => {
                let own = self.spaces.iter().filter(|(_, space)| has(space));
                View::Ids(own.map(|(nsid, _)| *nsid).collect())
            }
            NsCommand::Look { nsid } => {
                let space = self.spaces.get(&nsid);
                View::Space(space.map(|space| (space.birth, space.blocks, space.shift)))
            }
            NsCommand::Put(place) | NsCommand::Get(place) => {
                let space = self.spaces.get(&place.nsid).filter(|space| has(space));
                View::Reached(space.map(|space| space.birth))
            }
            _ => View::Ids(self.spaces.keys().copied().collect()),
        }
    }
}

impl Space {
    fn bytes(&self) -> u64 {
        u64::from(self.blocks) << self.shift
    }
}

/// Statuses of requests that the rules reject.
const RULES: [Status; 6] = [
    Status::NAMESPACE_ID_UNAVAILABLE,
    Status::NAMESPACE_INSUFFICIENT_CAPACITY,
    Status::INVALID_NAMESPACE,
    Status::NAMESPACE_ALREADY_ATTACHED,
    Status::NAMESPACE_IS_PRIVATE,
    Status::NAMESPACE_NOT_ATTACHED,
];

/// Statuses of requests after a device error.
const OF_DISK: [Status; 5] = [
    Status::WRITE_FAULT,
    Status::UNRECOVERED_READ_ERROR,
    Status::CAPACITY_EXCEEDED,
    Status::COMMAND_INTERRUPTED,
    Status::INTERNAL_ERROR,
];

/// Type and code of a status.
fn kind(status: Status) -> u16 {
    status.code()
}

#[cfg(test)]
mod tests;
