//! Asymmetric Namespace Access: the state of each ANA group on each path.
//!
//! A listener has a state for every group ([`AnaStates`]), set by the administrator. The queues of
//! a controller read the states of its listener ([`AnaStateTable`]), by one relaxed load. The
//! states that were reported to its host, and the change count, are its [`AnaLog`].
//!
//! Source: NVMe Base Specification 2.0, "Asymmetric Namespace Access Reporting" and "Asymmetric
//! Namespace Access (Log Identifier 0Ch)".

use std::fmt;
use std::sync::atomic::{AtomicU8, Ordering};

use nvme::Status;
use nvme::log::{AnaGroup, AnaHeader, AnaState};

use crate::subsystem::{MAX_NSID, Namespace, Subsystem};

/// The largest group id of a configuration, and how many groups there may be.
pub const ANA_GROUPS: u32 = 64;

/// One more, always inaccessible: of the images that a gateway has not acquired yet, although it serves
/// their group. Hosts take the group of a namespace from the log. With an accessible state there they
/// would repeat at once, and without end, what is refused as inaccessible.
pub(crate) const UNACQUIRED_GROUP: u32 = ANA_GROUPS + 1;

/// Bytes of the longest possible log.
const ANA_LOG_BYTES: usize =
    AnaHeader::BYTES + AnaGroup::BYTES * UNACQUIRED_GROUP as usize + 4 * MAX_NSID as usize;

// Linux reads the log in one command, so it must fit the smallest MDTS.
const _: () = assert!(ANA_LOG_BYTES <= 8192);

/// Longest time in seconds that the state "change" may last (ANATT): hosts that see it twice as
/// long reset the controller.
pub const ANATT_S: u8 = 10;

/// All five states are reported (ANACAP); the group of a namespace may change.
pub(crate) const ANACAP: u8 = 0x1F;

/// LSP of log 0Ch: return groups only.
const RGO: u8 = 1;

/// The states as an administrator writes them.
pub const ANA_STATES: [AnaState; 5] = [
    AnaState::OPTIMIZED,
    AnaState::NON_OPTIMIZED,
    AnaState::INACCESSIBLE,
    AnaState::PERSISTENT_LOSS,
    AnaState::CHANGE,
];

/// The state of every group on one path.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct AnaStates([AnaState; ANA_GROUPS as usize]);

impl AnaStates {
    /// This state for every group.
    pub fn all(state: AnaState) -> AnaStates {
        AnaStates([state; ANA_GROUPS as usize])
    }

    /// The state of a group; optimized for an id that no group has.
    pub fn state(&self, group: u32) -> AnaState {
        index(group).map_or(AnaState::OPTIMIZED, |at| self.0[at])
    }

    /// Sets the state of a group; no effect for an unknown id.
    pub fn set(&mut self, group: u32, state: AnaState) {
        if let Some(at) = index(group) {
            self.0[at] = state;
        }
    }

    /// These states, except of groups that are not optimized in `limit`: those are as there.
    #[must_use]
    pub fn within(mut self, limit: &AnaStates) -> AnaStates {
        for (own, limit) in self.0.iter_mut().zip(limit.0) {
            if limit != AnaState::OPTIMIZED {
                *own = limit;
            }
        }
        self
    }

    /// The groups whose state differs from that in `other`, with their state here.
    pub fn unlike<'a>(
        &'a self,
        other: &'a AnaStates,
    ) -> impl Iterator<Item = (u32, AnaState)> + 'a {
        (1..=ANA_GROUPS)
            .map(|group| (group, self.state(group)))
            .filter(|(group, state)| other.state(*group) != *state)
    }
}

impl Default for AnaStates {
    fn default() -> AnaStates {
        AnaStates::all(AnaState::OPTIMIZED)
    }
}

/// The groups that are not optimized, such as `group 2 inaccessible`; nothing if all are optimized.
impl fmt::Display for AnaStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = |state: AnaState| state.name().unwrap_or("reserved");
        if self.0.iter().all(|state| *state == self.0[0]) {
            return match self.0[0] {
                AnaState::OPTIMIZED => Ok(()),
                state => write!(f, "all groups {}", name(state)),
            };
        }
        for (n, (group, state)) in self.unlike(&AnaStates::default()).enumerate() {
            let comma = if n > 0 { ", " } else { "" };
            write!(f, "{comma}group {group} {}", name(state))?;
        }
        Ok(())
    }
}

impl fmt::Debug for AnaStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AnaStates({self})")
    }
}

/// The states that one controller reaches the groups in, shared by its queues.
#[derive(Debug)]
pub struct AnaStateTable([AtomicU8; ANA_GROUPS as usize]);

impl Default for AnaStateTable {
    fn default() -> AnaStateTable {
        AnaStateTable([const { AtomicU8::new(AnaState::OPTIMIZED.0) }; ANA_GROUPS as usize])
    }
}

impl AnaStateTable {
    /// Sets all states. Commands in progress continue.
    pub fn set(&self, states: &AnaStates) {
        for (to, state) in self.0.iter().zip(states.0) {
            to.store(state.0, Ordering::Relaxed);
        }
    }

    /// All states as they are now.
    pub fn states(&self) -> AnaStates {
        AnaStates(std::array::from_fn(|at| AnaState(self.0[at].load(Ordering::Relaxed))))
    }

    /// Whether commands to a namespace of this group are served.
    ///
    /// # Errors
    /// The path related status of the state, without Do Not Retry: another path may serve it.
    #[inline(always)]
    pub fn check(&self, group: u32) -> Result<(), Status> {
        let Some(at) = index(group) else { return Ok(()) };
        match AnaState(self.0[at].load(Ordering::Relaxed)) {
            AnaState::INACCESSIBLE => Err(Status::ANA_INACCESSIBLE),
            AnaState::PERSISTENT_LOSS => Err(Status::ANA_PERSISTENT_LOSS),
            AnaState::CHANGE => Err(Status::ANA_TRANSITION),
            _ => Ok(()),
        }
    }

    /// As [`AnaStateTable::check`], for the namespace of an I/O command. A missing namespace is
    /// left to the rule of the command.
    ///
    /// # Errors
    /// As [`AnaStateTable::check`].
    #[inline]
    pub(crate) fn check_io(&self, namespace: Result<&Namespace, Status>) -> Result<(), Status> {
        match namespace {
            Ok(namespace) => self.check(namespace.ana_group),
            Err(_) => Ok(()),
        }
    }
}

/// The Asymmetric Namespace Access log of one controller: the groups that its namespaces are in,
/// and the change counts.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct AnaLog {
    states: AnaStates,
    /// The state of each group when it was in the log last, as its host may know it; first, that of
    /// the beginning.
    listed: AnaStates,
    changes: u64,
    /// By ascending id.
    groups: Vec<Group>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
struct Group {
    id: u32,
    state: AnaState,
    /// Ascending.
    nsids: Vec<u32>,
    changes: u64,
}

impl AnaLog {
    /// The log of a new controller, or after a reset: no changes so far.
    pub fn new(subsystem: &Subsystem, states: AnaStates) -> AnaLog {
        AnaLog { states, listed: states, changes: 0, groups: groups(subsystem, &states) }
    }

    /// Whether it has the present states, and namespaces in standby where they belong.
    pub fn is_current(&self, subsystem: &Subsystem, states: &AnaStates) -> bool {
        let last = self.groups.last().filter(|group| group.id == UNACQUIRED_GROUP);
        let listed = last.map_or(&[][..], |group| &group.nsids);
        let is_in_it = |n: &&Namespace| reported_group(n, states) == UNACQUIRED_GROUP;
        let found = subsystem.namespaces.iter().filter(is_in_it).map(|n| &n.nsid);
        self.states == *states && found.eq(listed)
    }

    /// Updates namespaces and states. Returns true if the host is to be notified: a group has
    /// another state, or a namespace is in another group. Added and removed namespaces have an
    /// event of their own.
    pub fn update(&mut self, subsystem: &Subsystem, states: AnaStates) -> bool {
        let old = std::mem::replace(&mut self.groups, groups(subsystem, &states));
        self.states = states;
        let (mut notify, mut changed) = (false, old.len() != self.groups.len());
        for new in &mut self.groups {
            let was = old.iter().find(|group| group.id == new.id);
            let same = was.is_some_and(|was| (was.state, &was.nsids) == (new.state, &new.nsids));
            new.changes = was.map_or(1, |was| was.changes + u64::from(!same));
            changed |= !same;
            // Linux takes the state of an added namespace from the log that it has read last, which may
            // contain a group that was without namespaces since.
            if new.id != UNACQUIRED_GROUP {
                notify |= self.listed.state(new.id) != new.state;
                self.listed.set(new.id, new.state);
            }
            let moved = |nsid: &u32| {
                let of = old.iter().find(|group| group.nsids.binary_search(nsid).is_ok());
                of.is_some_and(|of| of.id != new.id)
            };
            notify |= !same && new.nsids.iter().any(moved);
        }
        self.changes = self.changes.wrapping_add(changed.into());
        notify
    }

    /// The page, in its maximum length: hosts request that much, nvme-cli in pieces. `lsp` is the
    /// log specific parameter of the command: bit 0 omits the namespace ids.
    #[must_use]
    pub fn page(&self, lsp: u8) -> Vec<u8> {
        let header = AnaHeader { chgcnt: self.changes, ngrps: self.groups.len() as u16 };
        let mut page = header.emit().to_vec();
        for group in &self.groups {
            let nsids = if lsp & RGO == 0 { &group.nsids[..] } else { &[] };
            let descriptor = AnaGroup {
                grpid: group.id,
                nnsids: nsids.len() as u32,
                chgcnt: group.changes,
                state: group.state,
            };
            page.extend(descriptor.emit());
            nsids.iter().for_each(|nsid| page.extend(nsid.to_le_bytes()));
        }
        page.resize(page.len().max(ANA_LOG_BYTES), 0);
        page
    }
}

/// The group of a namespace for hosts of a path with these states.
pub(crate) fn reported_group(namespace: &Namespace, states: &AnaStates) -> u32 {
    let is_accessible = || {
        [AnaState::OPTIMIZED, AnaState::NON_OPTIMIZED].contains(&states.state(namespace.ana_group))
    };
    match namespace.health.is_only_standby() && is_accessible() {
        true => UNACQUIRED_GROUP,
        false => namespace.ana_group,
    }
}

/// The groups that have namespaces, both ascending.
fn groups(subsystem: &Subsystem, states: &AnaStates) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    for namespace in &subsystem.namespaces {
        let id = reported_group(namespace, states);
        match groups.binary_search_by_key(&id, |group| group.id) {
            Ok(at) => groups[at].nsids.push(namespace.nsid),
            Err(at) => {
                let state = match id {
                    UNACQUIRED_GROUP => AnaState::INACCESSIBLE,
                    id => states.state(id),
                };
                let nsids = vec![namespace.nsid];
                groups.insert(at, Group { id, state, nsids, changes: 1 });
            }
        }
    }
    groups
}

fn index(group: u32) -> Option<usize> {
    (1..=ANA_GROUPS).contains(&group).then(|| group as usize - 1)
}

#[cfg(test)]
mod tests {
    use crate::subsystem::ana::*;
    use crate::subsystem::testing::sample;

    /// Namespaces 1 and 7 in group 1, namespace 2 in group 3.
    fn split() -> Subsystem {
        let mut subsystem = sample();
        subsystem.namespaces[1].ana_group = 3;
        subsystem
    }

    #[test]
    fn each_ana_state_has_its_status_without_dnr() {
        let table = [
            (AnaState::OPTIMIZED, None),
            (AnaState::NON_OPTIMIZED, None),
            (AnaState::INACCESSIBLE, Some(0x302)),
            (AnaState::PERSISTENT_LOSS, Some(0x301)),
            (AnaState::CHANGE, Some(0x303)),
        ];
        assert_eq!(table.map(|(state, _)| state), ANA_STATES);
        let reach = AnaStateTable::default();
        let subsystem = split();
        for (state, code) in table {
            let mut states = AnaStates::default();
            states.set(3, state);
            reach.set(&states);
            assert_eq!(reach.states(), states);
            for (nsid, code) in [(1, None), (2, code), (7, None), (3, None), (u32::MAX, None)] {
                let result = reach.check_io(subsystem.namespace(nsid));
                assert_eq!(result.err().map(Status::code), code, "{state}, namespace {nsid}");
                assert!(!result.is_err_and(Status::dnr), "{state}");
            }
        }
        assert!(reach.check(0).is_ok() && reach.check(u32::MAX).is_ok(), "no such groups");
    }

    #[test]
    fn the_page_lists_groups_that_have_namespaces() {
        let mut states = AnaStates::default();
        states.set(3, AnaState::INACCESSIBLE);
        states.set(4, AnaState::CHANGE);
        let log = AnaLog::new(&split(), states);
        let page = log.page(0);
        let header = AnaHeader::parse(page.first_chunk().unwrap());
        assert_eq!((header.chgcnt, header.ngrps), (0, 2), "group 4 is empty");
        let group = |at: usize| AnaGroup::parse(page[at..].first_chunk().unwrap());
        let first = AnaGroup { grpid: 1, nnsids: 2, chgcnt: 1, state: AnaState::OPTIMIZED };
        assert_eq!((group(16), &page[48..56]), (first, &[1, 0, 0, 0, 7, 0, 0, 0][..]));
        let second = AnaGroup { grpid: 3, nnsids: 1, chgcnt: 1, state: AnaState::INACCESSIBLE };
        assert_eq!((group(56), &page[88..96]), (second, &[2, 0, 0, 0, 0, 0, 0, 0][..]));
        let short = log.page(RGO);
        assert_eq!((page.len(), short.len(), &short[80..84]), (6192, 6192, &[0; 4][..]));
        let group = AnaGroup::parse(short[48..].first_chunk().unwrap());
        assert_eq!(group, AnaGroup { nnsids: 0, ..second });
    }

    #[test]
    fn ana_changes_are_counted_and_reported_unless_another_event_does() {
        let (mut subsystem, mut states) = (split(), AnaStates::default());
        let mut log = AnaLog::new(&subsystem, states);
        let counts = |log: &AnaLog| {
            (log.changes, log.groups.iter().map(|group| group.changes).collect::<Vec<_>>())
        };
        assert!(!log.update(&subsystem, states));
        states.set(9, AnaState::CHANGE);
        assert!(!log.update(&subsystem, states), "a group that nobody is in");
        assert_eq!(counts(&log), (0, vec![1, 1]));
        states.set(3, AnaState::NON_OPTIMIZED);
        assert!(log.update(&subsystem, states));
        assert_eq!(counts(&log), (1, vec![1, 2]));
        subsystem.namespaces.pop();
        assert!(!log.update(&subsystem, states), "told as a changed namespace");
        assert_eq!(counts(&log), (2, vec![2, 2]));
        subsystem.namespaces[0].ana_group = 2;
        assert!(log.update(&subsystem, states), "in another group");
        assert_eq!(counts(&log), (3, vec![1, 2]));
        subsystem.namespaces[0].ana_group = 3;
        assert!(log.update(&subsystem, states));
        assert_eq!(counts(&log), (4, vec![3]));
    }

    #[test]
    fn a_group_that_has_namespaces_again_is_reported_if_its_state_is_another_one() {
        let (whole, mut states) = (split(), AnaStates::default());
        let mut emptied = whole.clone();
        emptied.namespaces.remove(1);
        states.set(3, AnaState::INACCESSIBLE);
        let mut log = AnaLog::new(&whole, states);
        for (state, is_reported) in [(AnaState::INACCESSIBLE, false), (AnaState::OPTIMIZED, true)] {
            assert!(!log.update(&emptied, states), "its last namespace is removed");
            states.set(3, state);
            assert!(!log.update(&emptied, states), "a group that nobody is in");
            assert_eq!(log.update(&whole, states), is_reported, "{state}");
            assert!(!log.update(&whole, states), "once");
        }
    }

    #[test]
    fn an_image_that_was_not_acquired_is_in_an_inaccessible_group_of_its_own() {
        let (subsystem, mut states) = (split(), AnaStates::default());
        let listed = |log: &AnaLog| -> Vec<_> {
            log.groups.iter().map(|it| (it.id, it.state, it.nsids.clone())).collect()
        };
        let (optimized, inaccessible) = (AnaState::OPTIMIZED, AnaState::INACCESSIBLE);
        let whole = [(1, optimized, vec![1, 7]), (3, optimized, vec![2])];
        let mut log = AnaLog::new(&subsystem, states);
        let health = &subsystem.namespaces[2].health;
        health.set_standby(true);
        assert!(!log.is_current(&subsystem, &states));
        assert!(log.update(&subsystem, states) && log.is_current(&subsystem, &states));
        let apart = [whole[0].clone(), whole[1].clone()];
        let apart = [(1, optimized, vec![1]), apart[1].clone(), (65, inaccessible, vec![7])];
        assert_eq!(listed(&log), apart);
        assert!(!log.update(&subsystem, states), "once");
        let page = log.page(0);
        let last = AnaGroup::parse(page[16 + 36 + 36..].first_chunk().unwrap());
        assert_eq!((last.grpid, last.nnsids, last.state), (65, 1, inaccessible));
        // The group is not served here at all.
        states.set(1, inaccessible);
        assert!(log.update(&subsystem, states));
        assert_eq!(listed(&log)[0], (1, inaccessible, vec![1, 7]));
        states.set(1, optimized);
        assert!(log.update(&subsystem, states));
        assert_eq!(listed(&log), apart);
        health.set_down();
        assert!(log.update(&subsystem, states), "no path leads to it");
        assert_eq!(listed(&log), whole);
        health.set_up();
        assert!(log.update(&subsystem, states));
        health.set_standby(false);
        assert!(!log.is_current(&subsystem, &states) && log.update(&subsystem, states));
        assert_eq!(listed(&log), whole);
    }

    #[test]
    fn ana_states_are_formatted_as_text() {
        let mut states = AnaStates::default();
        assert_eq!(states.to_string(), "");
        states.set(2, AnaState::INACCESSIBLE);
        states.set(64, AnaState::NON_OPTIMIZED);
        assert_eq!(states.to_string(), "group 2 inaccessible, group 64 non-optimized");
        assert_eq!(AnaStates::all(AnaState::CHANGE).to_string(), "all groups change");
    }
}
