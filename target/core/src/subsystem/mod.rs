//! Subsystems and their namespaces, as an immutable snapshot that every queue of a subsystem holds.
//! A change of configuration publishes a new snapshot; nothing is locked.

mod access;
pub mod ana;
pub mod bad_blocks;
pub mod event_log;
pub mod format_job;
pub mod lba_format;
mod listener;
pub mod ns_management;
pub mod ns_request;
pub mod persistence;
pub mod power;
pub mod rate_limit;
pub mod reservation;
pub mod unflushed;
pub mod usage;
pub mod work;
pub mod write_protect;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use nvme::{Nqn, Status, Text};

use bad_blocks::BadBlocks;
use lba_format::Progress;
use ns_management::Management;
use nvmfd_blockdev::{BlockSizes, DeviceId, Geometry, Health};
use rate_limit::Limiter;
use reservation::Reservation;
use usage::Usage;
use write_protect::Protection;

pub use access::{AccessPolicy, DiscoveryConfig, DuplicateHosts, Referral};
pub use listener::ListenerConfig;

/// The largest namespace id that there is.
pub const MAX_NSID: u32 = 1024;

/// One namespace, as its hosts see it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Namespace {
    /// Namespace id, from 1.
    pub nsid: u32,
    /// Its backing store.
    pub backing: DeviceId,
    /// Health of its backing store.
    pub health: Arc<Health>,
    /// Sizes that the store works best with.
    pub geometry: Geometry,
    /// Size in logical blocks.
    pub blocks: u64,
    /// log2 of the logical block size in bytes: 9 or 12.
    pub block_shift: u8,
    /// Writes are refused by configuration.
    pub read_only: bool,
    /// Write protection by hosts.
    pub protection: Arc<Protection>,
    /// Hosts may format it, which erases all of it (Format NVM).
    pub allow_format: bool,
    /// Supported LBA formats; only the present one, if hosts may not change it.
    pub formats: BlockSizes,
    /// Progress of a format, during which there is no I/O.
    pub formatting: Option<Arc<Progress>>,
    /// Hosts may make blocks unreadable (Write Uncorrectable).
    pub write_uncorrectable: bool,
    /// The blocks that they have made so.
    pub marks: Arc<BadBlocks>,
    /// Its rate limits.
    pub limiters: Vec<Arc<Limiter>>,
    /// Its ANA group, 1 to [`ana::ANA_GROUPS`].
    pub ana_group: u32,
    /// The backing has a volatile write cache, so Flush matters.
    pub volatile_cache: bool,
    /// UUID (RFC 9562 byte order), stable across restarts.
    pub uuid: [u8; 16],
    /// NGUID, a byte string, as stable.
    pub nguid: [u8; 16],
    /// EUI-64, a byte string, if it has one.
    pub eui64: Option<[u8; 8]>,
    /// Which hosts may use it, as they have settled it.
    pub reservation: Arc<Reservation>,
}

impl Namespace {
    /// Whether writes are refused.
    #[inline]
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.protection.is_on()
    }

    /// Checks that its reservation and its write protection are known. Of an image in standby they are
    /// loaded when this gateway acquires it; until then another one may have changed them.
    ///
    /// # Errors
    /// ANA Inaccessible; Namespace Not Ready if it is down, too.
    pub fn check_loaded(&self) -> Result<(), Status> {
        match self.health.is_standby() {
            true => self.health.rejects(false).map_or(Ok(()), Err),
            false => Ok(()),
        }
    }

    /// Whether other daemons serve its blocks as well. Features that must bind all hosts,
    /// such as reservations and fused commands, are not offered then.
    pub fn is_shared(&self) -> bool {
        !self.reservation.is_supported()
    }

    /// Allocated logical blocks, at most all of them (NUSE); all where the backing store is no file.
    /// The value was read within the last second, while the backing store responds.
    pub fn utilization(&self) -> u64 {
        let allocated_bytes = self.health.allocation().allocated_bytes().unwrap_or(u64::MAX);
        allocated_bytes.div_ceil(self.block_bytes().into()).min(self.blocks)
    }

    /// Whether it is thinly provisioned: what is deallocated is free for others, and reduces the
    /// utilization (NSFEAT bit 0, THINP).
    pub fn is_thin(&self) -> bool {
        self.health.allocation().allocated_bytes().is_some() && !self.health.keeps_space()
    }

    /// Bytes of a logical block.
    pub fn block_bytes(&self) -> u32 {
        1 << self.block_shift
    }

    /// Power-fail write unit, if known.
    pub fn power_fail_atomic_bytes(&self) -> Option<u32> {
        Some(self.geometry.power_fail_atomic_bytes).filter(|bytes| *bytes > 0)
    }

    /// Location of its blocks: carried by commands, so that a reload which puts another backing
    /// store under the same id cannot redirect them.
    pub fn extent(&self) -> Extent {
        Extent { backing: self.backing, blocks: self.blocks, block_shift: self.block_shift }
    }

    /// Byte offset and length of `count` blocks from `slba`.
    ///
    /// # Errors
    /// LBA Out of Range when any of them lies beyond the namespace.
    pub fn range(&self, slba: u64, count: u64) -> Result<(u64, u64), Status> {
        self.extent().range(slba, count)
    }
}

/// The blocks of a namespace.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Extent {
    /// Backing store.
    pub backing: DeviceId,
    /// Number of blocks.
    pub blocks: u64,
    /// log2 of the logical block size in bytes.
    pub block_shift: u8,
}

impl Extent {
    /// Byte offset and length of `count` blocks from `slba`.
    ///
    /// # Errors
    /// LBA Out of Range when any of them lies beyond the namespace.
    pub fn range(&self, slba: u64, count: u64) -> Result<(u64, u64), Status> {
        match slba.checked_add(count) {
            Some(end) if end <= self.blocks => {
                Ok((slba << self.block_shift, count << self.block_shift))
            }
            _ => Err(Status::LBA_OUT_OF_RANGE.with_dnr()),
        }
    }
}

/// One subsystem: an immutable snapshot.
#[derive(Clone, Debug)]
pub struct Subsystem {
    /// Its name.
    pub nqn: Nqn,
    /// Serial number, the same on every controller.
    pub serial: Text<20>,
    /// Model number.
    pub model: Text<40>,
    /// Whether the host list is ignored.
    pub allow_any_host: bool,
    /// Hosts that may connect.
    pub hosts: BTreeSet<Nqn>,
    /// Access policy.
    pub offer: Arc<AccessPolicy>,
    /// Namespaces, by ascending nsid.
    pub namespaces: Vec<Namespace>,
    /// Namespace management by hosts. As seen by a host: none, if it may not.
    pub management: Option<Arc<Management>>,
    /// Rate limits of hosts.
    pub host_limiters: Arc<BTreeMap<Nqn, Vec<Arc<Limiter>>>>,
    /// Counters of its commands, kept across snapshots.
    pub usage: Arc<Usage>,
}

impl Subsystem {
    /// An active namespace.
    ///
    /// # Errors
    /// Invalid Namespace or Format when there is none of that id.
    #[inline(always)]
    pub fn namespace(&self, nsid: u32) -> Result<&Namespace, Status> {
        // Ids are usually 1, 2, 3 ..: this position is tried first.
        let guess = self.namespaces.get((nsid as usize).wrapping_sub(1));
        match guess.filter(|n| n.nsid == nsid) {
            Some(namespace) => Ok(namespace),
            None => self.search(nsid),
        }
    }

    #[inline(never)]
    fn search(&self, nsid: u32) -> Result<&Namespace, Status> {
        match self.namespaces.binary_search_by_key(&nsid, |n| n.nsid) {
            Ok(at) => Ok(&self.namespaces[at]),
            Err(_) => Err(Status::INVALID_NAMESPACE.with_dnr()),
        }
    }

    /// Whether `host` may connect.
    pub fn admits(&self, host: &Nqn) -> bool {
        self.allow_any_host || self.hosts.contains(host)
    }

    /// Whether all hosts see the same namespaces.
    pub(crate) fn is_the_same_for_all(&self) -> bool {
        self.offer.masks.is_empty() && self.management.is_none()
    }

    /// The subsystem as a host sees it: without the namespaces that are masked from it, and with
    /// the management of namespaces only if it may manage them.
    #[must_use]
    pub fn seen_by(self: &Arc<Subsystem>, host: &Nqn) -> Arc<Subsystem> {
        let masks = |n: &Namespace| !self.offer.shows(n.nsid, host);
        let may_not = |m: &Arc<Management>| !m.grant.admits(host);
        let strips = self.management.as_ref().is_some_and(may_not);
        if !strips && !self.namespaces.iter().any(masks) {
            return Arc::clone(self);
        }
        let mut view = Subsystem::clone(self);
        view.namespaces.retain(|n| self.offer.shows(n.nsid, host));
        view.management = view.management.filter(|_| !strips);
        Arc::new(view)
    }

    /// Whether the backing store of any namespace is degraded.
    pub fn is_degraded(&self) -> bool {
        self.namespaces.iter().any(|n| n.health.is_degraded())
    }

    /// Whether hosts can protect namespaces from writes.
    pub fn protects(&self) -> bool {
        self.namespaces.iter().any(|n| n.protection.is_supported())
    }

    /// Namespace Write Protection Capabilities.
    pub(crate) fn nwpc(&self) -> u8 {
        self.namespaces.iter().fold(0, |all, namespace| all | namespace.protection.nwpc())
    }

    /// Whether fused commands may be served: not if other daemons serve all namespaces too.
    pub fn fuses(&self) -> bool {
        self.namespaces.is_empty() || self.namespaces.iter().any(|n| !n.is_shared())
    }

    /// Whether any namespace may be formatted by hosts.
    pub(crate) fn allows_format(&self) -> bool {
        self.namespaces.iter().any(|n| n.allow_format)
    }

    /// Whether blocks of any namespace may be made unreadable by hosts.
    #[must_use]
    pub(crate) fn takes_write_uncorrectable(&self) -> bool {
        self.namespaces.iter().any(|n| n.write_uncorrectable)
    }
}

impl PartialEq for Subsystem {
    /// Same for hosts; what they have done does not count.
    fn eq(&self, other: &Subsystem) -> bool {
        let key = |s: &Subsystem| (s.nqn, s.serial, s.model, s.allow_any_host);
        key(self) == key(other)
            && (&self.hosts, &self.offer, &self.namespaces, &self.management, &self.host_limiters)
                == (
                    &other.hosts,
                    &other.offer,
                    &other.namespaces,
                    &other.management,
                    &other.host_limiters,
                )
    }
}

/// For tests, also of other packages.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    use crate::subsystem::*;

    /// A subsystem with three namespaces.
    ///
    /// # Panics
    /// Never.
    pub fn sample() -> Subsystem {
        let nqn: Nqn = "nqn.2026-11.io.nvmfd:test".parse().unwrap();
        let namespace = |nsid, block_shift| Namespace {
            nsid,
            backing: DeviceId(nsid - 1),
            health: Arc::default(),
            geometry: Geometry::default(),
            blocks: 1 << 20,
            block_shift,
            read_only: false,
            protection: Protection::none(nqn, nsid),
            allow_format: false,
            formats: BlockSizes::only(block_shift),
            formatting: None,
            write_uncorrectable: false,
            marks: BadBlocks::volatile(),
            limiters: Vec::new(),
            ana_group: 1,
            volatile_cache: true,
            uuid: [nsid as u8; 16],
            nguid: [nsid as u8; 16],
            eui64: None,
            reservation: Reservation::volatile(nqn, nsid),
        };
        Subsystem {
            nqn,
            serial: Text::lossy("SERIAL"),
            model: Text::lossy("nvmfd"),
            allow_any_host: true,
            hosts: BTreeSet::new(),
            offer: Arc::default(),
            namespaces: vec![namespace(1, 12), namespace(2, 9), namespace(7, 12)],
            management: None,
            host_limiters: Arc::default(),
            usage: Arc::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::subsystem::testing::sample;
    use crate::subsystem::*;

    #[test]
    fn only_existing_namespace_ids_are_found() {
        let subsystem = sample();
        for nsid in [1, 2, 7] {
            assert_eq!(subsystem.namespace(nsid).unwrap().nsid, nsid);
        }
        for nsid in [0, 3, 6, 8, u32::MAX] {
            let status = subsystem.namespace(nsid).unwrap_err();
            assert!(status.is(Status::INVALID_NAMESPACE) && status.dnr());
        }
    }

    #[test]
    fn a_range_may_touch_the_end_and_not_cross_it() {
        let subsystem = sample();
        let namespace = subsystem.namespace(2).unwrap();
        assert_eq!(namespace.range((1 << 20) - 1, 1), Ok((((1 << 20) - 1) * 512, 512)));
        for (slba, count) in [((1 << 20) - 1, 2), (1 << 20, 1), (u64::MAX, 2), (u64::MAX, 1)] {
            assert!(namespace.range(slba, count).unwrap_err().is(Status::LBA_OUT_OF_RANGE));
        }
    }
}
