//! What goes into a gateway and comes out of it.

use std::collections::BTreeSet;
use std::fmt;

use crate::record::{Applied, Front, GroupObject, KeyedHosts, Slot, Update};

/// What a gateway declares of itself.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Member {
    /// Its slot.
    pub slot: Slot,
    /// Its name.
    pub name: String,
    /// What its configuration declares.
    pub declared: Declaration,
    /// What it has in force of the shared configuration, if it uses it. It does not join before it
    /// has applied or refused the version that the group has.
    pub applied: Option<Applied>,
}

/// What the configuration of a gateway declares. A reload may change it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Declaration {
    /// Digest of what all members must declare alike.
    pub digest: String,
    /// Where hosts reach it.
    pub listeners: Vec<String>,
    /// The ANA groups that its namespaces are in.
    pub groups: BTreeSet<u32>,
    /// The hosts that it has keys of.
    pub keyed: KeyedHosts,
}

/// Number of an operation.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct OperationId(pub(crate) u64);

/// Something that takes time. Each completes exactly once, or never.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Operation {
    /// Connects a data client: [`Outcome::Client`].
    Connect,
    /// Reads the group object: [`Outcome::Object`].
    Read,
    /// Updates the group object: [`Outcome::Done`], or [`Outcome::Conflict`] if it was different.
    Update(Update),
    /// Excludes data clients from the cluster, and waits until the own data client knows it.
    Exclude(Vec<String>),
    /// Opens the images of a group and takes their locks. A lock of one of these former owners is
    /// broken; that of anybody else is a failure.
    Acquire(u32, Vec<String>),
    /// Refuses new operations to the images of a group, waits for those that are under way, and
    /// releases the locks.
    Release(u32),
}

/// Result of an operation.
#[derive(Clone, PartialEq, Eq, Debug)]
#[expect(clippy::large_enum_variant, reason = "it is moved, and two a second have an object")]
pub enum Outcome {
    /// It was done.
    Done,
    /// The address of the connected data client.
    Client(String),
    /// The group object.
    Object(GroupObject),
    /// Nothing was done: a comparison of the update failed.
    Conflict,
    /// Nothing was done, as far as is known.
    Failed,
}

/// Something that happened.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event {
    /// Time has passed.
    Tick,
    /// An operation has completed.
    Completed(OperationId, Outcome),
    /// Somebody has changed the group object.
    Changed,
    /// The configuration of this gateway was reloaded. Groups that are new are served from now on;
    /// those that have gone are released.
    Declared(Declaration),
    /// How hosts reach this gateway; its incarnation is not read.
    Front(Front),
    /// Another version of the shared configuration is in force here, or was refused.
    Applied(Applied),
    /// The data client, the one connected last, was excluded or has lost a lock.
    ClientExcluded,
    /// An administrator moves a group, after those moved before.
    Move(u32, Slot),
    /// An administrator excludes another gateway, which is known to be broken.
    Exclude(Slot),
    /// The gateway leaves in order: it gives its groups to others.
    Leave,
}

/// The state of a group for hosts of this gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Access {
    /// ANA optimized.
    Optimized,
    /// ANA inaccessible.
    Inaccessible,
}

/// What is to be done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Action {
    /// Start an operation.
    Start(OperationId, Operation),
    /// Publish the state of a group to hosts, before anything else.
    Publish(u32, Access),
    /// Use the data client no more, and drop it in the background: images that it has open fail
    /// every operation from now on.
    DropClient(DropReason),
    /// The gateway takes no part any more.
    End(EndReason),
}

/// Why a data client is used no more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum DropReason {
    /// This gateway was excluded, or has lost its membership.
    Excluded,
    /// The images of a group were not released in time: its next owner excludes the client instead.
    Unreleased(u32),
}

/// Why a gateway takes no part any more.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum EndReason {
    /// It has left.
    Left,
    /// A later process has the same slot and name.
    Superseded,
    /// Another gateway has the slot: its name.
    SlotInUse(String),
}

/// What a gateway does with a group.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stage {
    /// Another one serves it, or nobody.
    Standby,
    /// It asks for it.
    Requesting,
    /// It excludes the former owner.
    Excluding,
    /// It takes the locks of the images.
    Acquiring,
    /// It notes that it serves the group.
    Confirming,
    /// It serves the group while its heartbeat is fresh.
    Serving,
    /// It releases the locks, for this slot or for anybody.
    Releasing(Option<Slot>),
    /// It notes that the group is free.
    Giving(Option<Slot>),
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Stage::Standby => "standby",
            Stage::Requesting => "requesting",
            Stage::Excluding => "excluding",
            Stage::Acquiring => "acquiring",
            Stage::Confirming => "confirming",
            Stage::Serving => "serving",
            Stage::Releasing(_) => "releasing",
            Stage::Giving(_) => "giving",
        })
    }
}
