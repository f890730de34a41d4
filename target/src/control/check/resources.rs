//! What the reactors of a start take from the machine: takes the same, and returns it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::net::SocketAddr;

use rdma::PoolPlan;
use rdma::soft::ROCE_PORT;
use tracing::{error, warn};

use super::is_served;
use crate::blockdev::uring::RingLimits;
use crate::config::{Config, NamespaceKind};
use crate::daemon::{mailboxes, will_own};
use crate::platform::availability;
use crate::platform::doctor::{PortHolder, is_bound, port_holder};
use crate::reactor::fabric::{Fabrics, choose};
use crate::reactor::{make_ring, map_pool};

/// Descriptors that a start has at least, beside those of reactors, devices and the management socket.
const OTHER_DESCRIPTORS: usize = 8;

/// Checks provider, memory, I/O engine, ports and descriptors. Logs warnings and errors.
pub(super) fn are_available(config: &Config) -> bool {
    let is_served = is_served(config);
    let (provider, _) = choose(config.provider, &config.addresses(), will_own);
    // A capture has a check of its own.
    let fabrics = match provider.fabrics(config.reactor.count(), config.soft, None) {
        Ok(fabrics) => fabrics,
        Err(error) => {
            error!("{error}");
            return false;
        }
    };
    let free = match fabrics.group() {
        Some(_) => ports(config, is_served),
        None => Ok(BTreeSet::new()),
    };
    let opened = free.and_then(|free| descriptors(config, &fabrics, &free));
    let outcomes = [memory(config, is_served), opened];
    outcomes.iter().filter_map(|outcome| outcome.as_ref().err()).for_each(|why| error!("{why}"));
    outcomes.iter().all(Result::is_ok)
}

/// Maps the pools of all reactors. Where the system counts mapped memory strictly, that of a running
/// daemon would count twice.
fn memory(config: &Config, is_served: Option<bool>) -> Result<(), String> {
    let mode = fs::read_to_string("/proc/sys/vm/overcommit_memory");
    if is_served != Some(false) && mode.is_ok_and(|mode| mode.trim() == "2") {
        return Ok(());
    }
    let (plan, count) = (config.pool_plan(), config.reactor.count());
    let pools = (0..count).map(|_| map_pool(plan)).collect::<Result<Vec<_>, _>>();
    pools.map_err(|error| error.to_string())?;
    let needed_bytes = plan.total_bytes().saturating_mul(count as u64);
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    if is_served == Some(false)
        && let Some(available_bytes) = available_bytes(&meminfo).filter(|it| *it < needed_bytes)
    {
        warn!(
            "the pools of all reactors have {} MiB, and {} MiB of memory are available: lower \
             `data` or `receives` in [memory]",
            needed_bytes >> 20,
            available_bytes >> 20
        );
    }
    Ok(())
}

fn available_bytes(meminfo: &str) -> Option<u64> {
    let row = meminfo.lines().find_map(|row| row.strip_prefix("MemAvailable:"))?;
    row.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

/// Checks that no other program has the port of `soft` at an address of the configuration. Returns
/// the addresses that can be opened.
fn ports(config: &Config, is_served: Option<bool>) -> Result<BTreeSet<SocketAddr>, String> {
    let listeners = config.addresses().into_iter();
    let present = listeners.filter(|at| availability::address(*at).is_none());
    let mut free = BTreeSet::new();
    for at in present.map(|at| SocketAddr::new(at.ip(), ROCE_PORT)) {
        let holder = port_holder(at);
        let is_nvmfd = matches!(&holder, Some(PortHolder::Process(_, name)) if name == "nvmfd");
        if !is_bound(at) {
            // A daemon at all addresses would lose packets to this one.
            if !is_nvmfd && is_served == Some(false) {
                free.insert(at);
            }
            continue;
        }
        let sentence = in_use(at, holder.as_ref());
        match is_served {
            Some(true) if is_nvmfd || holder.is_none() => {}
            None if is_nvmfd || holder.is_none() => {
                warn!("{sentence}; a start fails unless that is the daemon of this configuration");
            }
            _ => return Err(sentence),
        }
    }
    Ok(free)
}

fn in_use(at: SocketAddr, holder: Option<&PortHolder>) -> String {
    let who = match holder {
        Some(PortHolder::Kernel) => {
            return format!(
                "UDP port {at} is in use by the kernel's rdma_rxe: remove its device (rdma link \
                 delete NAME), or use it with provider = \"verbs\""
            );
        }
        Some(PortHolder::Process(pid, name)) => format!("{name} (process {pid})"),
        None => format!("another program (see `ss -lunp sport = :{ROCE_PORT}`)"),
    };
    format!("UDP port {at} is in use by {who}: stop it, or use another address in [[listener]]")
}

/// Opens rings, sockets and as many descriptors as the devices and the rest will have, all at once.
/// `free`: addresses at which no socket is open.
fn descriptors(
    config: &Config,
    fabrics: &Fabrics,
    free: &BTreeSet<SocketAddr>,
) -> Result<(), String> {
    // Small: what is registered with a ring is locked.
    let plan = PoolPlan { cells: 1, receives: 1, ..config.pool_plan() };
    let plan = PoolPlan { data_bytes: plan.largest_bytes.into(), ..plan };
    let limits = RingLimits { ops: config.pool_plan().cells, backings: 1 };
    let reactors = config.reactor.count();
    let _mailboxes = mailboxes(reactors).map_err(|error| error.to_string())?;
    let (mut reactors_own, mut sockets) = (Vec::new(), Vec::new());
    for index in 0..reactors {
        let pool = map_pool(plan).map_err(|error| error.to_string())?;
        let ring = make_ring(pool.region().clone(), limits, config.reactor.io_engine)
            .map_err(|error| format!("no ring: {error}"))?;
        let fabric = fabrics.group().map(|group| group.fabric(index as u32, pool.region().clone()));
        let fabric = fabric.transpose().map_err(|error| error.to_string())?;
        reactors_own.push((ring, fabric));
    }
    for at in free {
        let bound = fabrics.group().map(|group| group.reserve(*at)).transpose();
        sockets.push(bound.map_err(|error| error.to_string())?);
    }
    let management = usize::from(config.management.enabled);
    let others = OTHER_DESCRIPTORS + management + device_descriptors(config);
    let open = |_| File::open("/dev/null");
    let opened = (0..others).map(open).collect::<io::Result<Vec<_>>>();
    opened.map(drop).map_err(|error| {
        format!("a start opens too many files and devices: {}", rdma::explained(&error))
    })
}

/// Descriptors of files and devices: each ring has one of its own for flushes.
fn device_descriptors(config: &Config) -> usize {
    let namespaces = config.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
    let files = namespaces.filter_map(|namespace| match &namespace.kind {
        NamespaceKind::File { path, .. } => Some((path, namespace.read_only)),
        _ => None,
    });
    let of = |is_read_only| if is_read_only { 1 } else { 1 + config.reactor.count() };
    files.collect::<BTreeSet<_>>().into_iter().map(|(_, is_read_only)| of(is_read_only)).sum()
}
