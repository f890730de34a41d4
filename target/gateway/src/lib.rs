//! Gateway groups: several daemons serve the same subsystems from images of one Ceph cluster, and
//! one gateway at a time serves an ANA group. This package decides which; it has no thread, clock,
//! socket or file. Time and results of operations are arguments, operations are results.
//!
//! The members agree by an object in RADOS, the [group object](record): atomic updates that compare
//! what they replace. There is no other quorum.
//!
//! # Why no two gateways write to a group
//!
//! * A gateway writes to a group only while its record in the group object names its data client as
//!   the owner.
//! * Who replaces an owner that did not release the group excludes the data client of that owner
//!   from the cluster (blocklist) before its own first write, together with those that the owner
//!   itself had still to exclude ([`Ownership::Taking`](record::Ownership)). The excluded
//!   address is the one in the replaced record. No clock is involved.
//! * A data client that was excluded is never used again. Its gateway gets another one, and another
//!   incarnation: its former ownership is not its own any more.
//! * Every update of a gateway compares its member record. Who suspects it replaces that record, so
//!   its later updates fail, also those that are still on their way.
//!
//! Clocks only keep what is answered from memory (ANA log, reservation report) from contradicting:
//! a gateway stops to serve when its last confirmed heartbeat was sent [`Timing::doubt`] ago, and is
//! suspected after [`Timing::suspicion`], which is longer.

mod decision;
mod gateway;
mod heartbeat;
mod interface;
pub mod record;

use std::time::Duration;

pub use gateway::Gateway;
pub use interface::{
    Access, Action, Declaration, DropReason, EndReason, Event, Member, Operation, OperationId,
    Outcome, Stage,
};

/// Number of slots: gateways of a group.
pub const SLOTS: u8 = 32;

/// Times of a group, the same for all gateways.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Timing {
    /// Time between two heartbeats, and between two reads of the group object.
    pub heartbeat: Duration,
    /// A gateway whose last confirmed heartbeat was sent this long ago serves nothing.
    pub doubt: Duration,
    /// A gateway whose heartbeat has not changed for this long is suspected.
    pub suspicion: Duration,
    /// Each further candidate waits this much longer before it takes a group.
    pub stagger: Duration,
    /// A failed operation is repeated after this time.
    pub retry: Duration,
}

impl Default for Timing {
    fn default() -> Timing {
        let ms = Duration::from_millis;
        Timing {
            heartbeat: ms(500),
            doubt: ms(3000),
            suspicion: ms(5000),
            stagger: ms(1000),
            retry: ms(1000),
        }
    }
}
