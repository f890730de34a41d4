//! Displays a configuration with every default filled in.

use std::fmt;

use serde_json::Value;

use super::key_tree::{self, all, text};
use super::qos::Described;
use super::{
    AuthenticationConfig, Config, HostConfig, NamespaceConfig, NamespaceKind, Size, memory_estimate,
};
use crate::blockdev::InjectedFault;

/// Displays each key, or each table in a line. Namespaces are displayed as in differences.
impl fmt::Display for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Value::Object(keys) = key_tree::tree(self) {
            for (name, value) in &keys {
                match value {
                    Value::Null => {}
                    Value::Array(tables) if name == "subsystem" => subsystems(f, tables, self)?,
                    Value::Array(tables) => {
                        let mut tables = tables.iter().filter_map(Value::as_object);
                        tables.try_for_each(|keys| writeln!(f, "{name:<11} {}", all(keys)))?;
                    }
                    Value::Object(keys) => writeln!(f, "{name:<11} {}", all(keys))?,
                    value => writeln!(f, "{name:<11} {}", text(value))?,
                }
            }
        }
        if self.state_directory.is_none() {
            writeln!(
                f,
                "state       in the directory of systemd (StateDirectory=); without it nothing is \
                 persisted, and reservations end with the daemon"
            )?;
        }
        self.listeners.iter().try_for_each(|listener| writeln!(f, "listener    {listener}"))?;
        let AuthenticationConfig { policy, hosts, exempt, .. } = &self.authentication;
        for host in hosts {
            let HostConfig { nqn, controller_key_file, .. } = host;
            let both = if controller_key_file.is_some() { ", and the controller's" } else { "" };
            writeln!(f, "host        key of {nqn}{both}: {}", host.policy(policy))?;
        }
        exempt.iter().try_for_each(|nqn| writeln!(f, "host        {nqn} need not authenticate"))?;
        let (plan, count) = (self.pool_plan(), self.reactor.count());
        writeln!(
            f,
            "pools       {count} x ({} cells x 64 + {} receives x {} + {} data) = {:.1} MiB",
            plan.cells,
            plan.receives,
            plan.receive_bytes(),
            Size(plan.data_bytes),
            plan.total_bytes().saturating_mul(count as u64) as f64 / f64::from(1 << 20)
        )?;
        writeln!(f, "            {}", memory_estimate::sentence(self))
    }
}

fn subsystems(f: &mut fmt::Formatter<'_>, tables: &[Value], config: &Config) -> fmt::Result {
    for (table, subsystem) in tables.iter().zip(&config.subsystems) {
        let Value::Object(keys) = table else { continue };
        let keys = keys.clone().into_iter().filter(|(key, _)| key != "namespace").collect();
        writeln!(f, "subsystem   {}", all(&keys))?;
        subsystem.namespaces.iter().try_for_each(|each| writeln!(f, "  namespace {each}"))?;
    }
    Ok(())
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
