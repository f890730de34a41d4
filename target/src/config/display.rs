//! Displays a configuration with every default filled in.

use std::fmt;

use super::qos::Described;
use super::{
    Auto, CaptureConfig, Config, LimitConfig, NamespaceConfig, NamespaceKind, Size,
    SubsystemConfig, access, memory_estimate,
};
use crate::blockdev::InjectedFault;

impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.pool_plan();
        let count = self.reactor.count();
        let total = plan.total_bytes();
        writeln!(f, "provider    {}", self.provider)?;
        write!(f, "reactors    {count} (threads = {}), ", self.reactor.threads)?;
        match self.reactor.spin {
            Auto::Auto => write!(f, "polling adapts to the load")?,
            Auto::Number(0) => write!(f, "each sleeps when it is idle")?,
            Auto::Number(micros) => write!(f, "each spins for {micros} us before it sleeps")?,
        }
        match self.reactor.cpus.as_slice() {
            [] => writeln!(f)?,
            cpus => writeln!(f, ", on CPUs {cpus:?}")?,
        }
        writeln!(
            f,
            "limits      queue_depth {}, io_queues {} a controller, in_capsule {}, mdts {}, \
             controllers {}",
            self.limits.queue_depth,
            self.limits.io_queues,
            Size(self.limits.in_capsule_bytes.into()),
            Size(self.limits.mdts_bytes.into()),
            self.limits.controllers
        )?;
        writeln!(
            f,
            "memory      {} x ({} cells x 64 + {} receives x {} + {} data) = {:.1} MiB",
            count,
            plan.cells,
            plan.receives,
            plan.receive_bytes(),
            Size(plan.data_bytes),
            mib(total.saturating_mul(count as u64))
        )?;
        writeln!(f, "            {}", memory_estimate::sentence(self))?;
        match &self.state_directory {
            Some(path) => writeln!(f, "state       in {}", path.display())?,
            None => writeln!(
                f,
                "state       in the directory of systemd (StateDirectory=); without it nothing is \
                 persisted, and reservations end with the daemon"
            )?,
        }
        writeln!(f, "missing     {}", self.missing)?;
        for listener in &self.listeners {
            writeln!(f, "listener    {listener}")?;
        }
        for subsystem in &self.subsystems {
            write!(f, "{subsystem}")?;
        }
        for LimitConfig { name, limit, hosts } in &self.quotas {
            writeln!(f, "limit       {name}: {}", Described(limit))?;
            hosts.iter().try_for_each(|host| writeln!(f, "            host {host}"))?;
        }
        let Config { discovery, authentication, management, observe, soft, stop, ceph, .. } = self;
        write!(f, "{discovery}{authentication}{management}{observe}{soft}{stop}{ceph}")?;
        if let Some(group) = &self.group {
            write!(f, "{group}")?;
        }
        if let Some(CaptureConfig { path, payload, limit_bytes }) = &self.capture {
            let what = if *payload { "all packets" } else { "all headers" };
            writeln!(
                f,
                "capture     {what} to {}, at most {}",
                path.display(),
                Size(*limit_bytes)
            )?;
        }
        Ok(())
    }
}

impl fmt::Display for SubsystemConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "subsystem   {}", self.nqn)?;
        writeln!(f, "            serial {:?}, model {:?}", self.serial, self.model)?;
        if self.allow_any_host {
            writeln!(f, "            any host may connect")?;
        }
        for host in self.hosts.iter().filter(|_| !self.allow_any_host) {
            writeln!(f, "            host {host}")?;
        }
        access::show(&self.offer, f)?;
        if let Some(managed) = &self.managed {
            write!(f, "{managed}")?;
        }
        for namespace in &self.namespaces {
            writeln!(f, "  namespace {namespace}")?;
        }
        Ok(())
    }
}

impl fmt::Display for NamespaceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}, blocks of {}, ", self.nsid, self.kind, self.block_size_bytes)?;
        if self.allow_format {
            f.write_str("hosts may format it, ")?;
        }
        if self.shared {
            f.write_str("shared with other daemons, ")?;
        }
        if self.write_uncorrectable {
            f.write_str("hosts may make blocks unreadable, ")?;
        }
        if !self.limit.is_none() {
            write!(f, "{}, ", Described(&self.limit))?;
        }
        if let Some(name) = &self.shared_limit {
            write!(f, "under the limit {name:?}, ")?;
        }
        if self.fault != InjectedFault::None {
            write!(f, "fault {}, ", self.fault)?;
        }
        if self.ana_group != 1 {
            write!(f, "group {}, ", self.ana_group)?;
        }
        write!(f, "{}, uuid {}", if self.read_only { "read only" } else { "writable" }, self.uuid)
    }
}

impl fmt::Display for NamespaceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NamespaceKind::File { path, size: Some(size) } => {
                write!(f, "file {} of {}", path.display(), Size(*size))
            }
            NamespaceKind::File { path, size: None } => {
                write!(f, "file {} as large as it is", path.display())
            }
            NamespaceKind::Ram { size } => write!(f, "ram of {}", Size(*size)),
            NamespaceKind::Rbd { image, .. } => write!(f, "rbd image {image}"),
            NamespaceKind::Null { size } => write!(f, "null of {}", Size(*size)),
        }
    }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}
