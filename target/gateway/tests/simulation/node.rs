//! A simulated gateway: its process, its clock, its link to the cluster, its data client.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use nvmfd_gateway::record::{Front, Slot, Update};
use nvmfd_gateway::{Access, Declaration, Event, Gateway, Member, OperationId, Timing};

use crate::random::Random;

/// What goes to the cluster.
#[derive(Clone, Debug)]
pub(crate) enum Request {
    Connect(OperationId),
    Read(OperationId),
    Update(OperationId, Update),
    Exclude(OperationId, Vec<String>),
    Lock(OperationId, u32, Vec<String>),
    Unlock(OperationId, u32),
    Write(Command),
}

/// A write of a host: its only one that is under way. The attempt counts its repetitions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Command {
    pub(crate) group: u32,
    pub(crate) value: u64,
    pub(crate) attempt: u64,
}

/// What comes to the process.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    Event(Event),
    /// The locks of a group are held by the client of this address.
    Locked(OperationId, u32, String),
    /// A write of the client of this address has ended.
    Written(Command, String, bool),
    Command(Command),
    /// A command that was admitted for the client of this address goes to the device.
    Submit(Command, String),
}

pub(crate) struct Node {
    pub(crate) slot: Slot,
    /// None: it was killed, or has ended.
    pub(crate) gateway: Option<Gateway>,
    /// Counts processes.
    pub(crate) process: u64,
    pub(crate) is_suspended: bool,
    pub(crate) inputs: Vec<Input>,
    pub(crate) is_cut: bool,
    /// No host reaches it.
    pub(crate) is_unreached: bool,
    /// None of its listeners is open.
    pub(crate) is_closed: bool,
    /// What waits for the link: to the cluster, and to the process.
    pub(crate) outgoing: Vec<(u64, String, Request)>,
    pub(crate) incoming: Vec<(u64, Input)>,
    offset: Duration,
    /// Speed of its clock, in thousandths.
    rate: u32,
    pub(crate) client: String,
    /// Groups whose images accept writes.
    pub(crate) images: BTreeSet<u32>,
    /// Releases that wait for writes under way.
    pub(crate) releasing: Vec<(OperationId, u32)>,
    pub(crate) access: BTreeMap<u32, Access>,
    pub(crate) last_attempt: BTreeMap<u32, u64>,
    /// Writes that the data client has under way.
    pub(crate) flights: BTreeMap<u32, u32>,
    /// Only the last tick counts.
    pub(crate) tick: u64,
}

impl Node {
    pub(crate) fn new(slot: Slot, random: &mut Random) -> Node {
        Node {
            slot,
            gateway: None,
            process: 0,
            is_suspended: false,
            inputs: Vec::new(),
            is_cut: false,
            is_unreached: false,
            is_closed: false,
            outgoing: Vec::new(),
            incoming: Vec::new(),
            offset: Duration::from_millis(random.below(1_000_000)),
            rate: 950 + random.below(101) as u32,
            client: String::new(),
            images: BTreeSet::new(),
            releasing: Vec::new(),
            access: BTreeMap::new(),
            last_attempt: BTreeMap::new(),
            flights: BTreeMap::new(),
            tick: 0,
        }
    }

    pub(crate) fn start(&mut self, now: Duration, groups: u32, timing: Timing) {
        self.process += 1;
        self.is_suspended = false;
        let name = format!("gw{}", self.slot);
        let declared = declaration(groups, 0);
        let member = Member { slot: self.slot, name, declared, applied: None };
        self.gateway = Some(Gateway::new(member, timing, self.clock(now)));
    }

    pub(crate) fn kill(&mut self) {
        self.gateway = None;
        self.inputs.clear();
        self.incoming.clear();
        self.drop_client();
        self.access.clear();
        self.last_attempt.clear();
    }

    pub(crate) fn drop_client(&mut self) {
        self.images.clear();
        self.releasing.clear();
        self.flights.clear();
        self.client.clear();
    }

    pub(crate) fn clock(&self, now: Duration) -> Duration {
        self.offset + now * self.rate / 1000
    }

    /// When its clock shows this time, or just after.
    pub(crate) fn time_of(&self, clock: Duration) -> Duration {
        clock.saturating_sub(self.offset) * 1000 / self.rate + Duration::from_micros(1)
    }

    pub(crate) fn runs(&self) -> bool {
        self.gateway.is_some() && !self.is_suspended
    }

    /// What it sees of its hosts.
    pub(crate) fn front(&self, hosts: usize) -> Front {
        let hosts = if self.is_unreached { 0 } else { hosts };
        let listeners = usize::from(!self.is_closed);
        Front { listeners, hosts, associations: hosts, ..Front::default() }
    }

    pub(crate) fn is_optimized(&self, group: u32) -> bool {
        self.access.get(&group) == Some(&Access::Optimized)
    }
}

/// What a gateway declares after some reloads.
pub(crate) fn declaration(groups: u32, reloads: u64) -> Declaration {
    let listeners = vec![format!("1@[::1]:{reloads}")];
    let groups = (1..=groups).collect();
    Declaration { digest: "d".into(), listeners, groups, ..Declaration::default() }
}
