//! Announces discovery by multicast DNS: a service `_nvme-disc._udp` for each listener, with the
//! name of the discovery subsystem (`nqn`) and the transport (`p=roce`).
//!
//! The thread of the library runs only while services are announced. Errors are logged: the target
//! serves without announcements.
//!
//! Source: NVMe TP8009, "Automated Discovery of Ethernet Discovery Controllers".

use std::fs;
use std::net::IpAddr;
use std::time::Duration;

use crate::config::Config;
use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};
use nvme::Nqn;
use tracing::{info, warn};

/// NVMe discovery over UDP, the transport of RoCEv2.
const SERVICE: &str = "_nvme-disc._udp.local.";

/// Time limit for withdrawing a service, and for the end of the library's thread.
const GOODBYE: Duration = Duration::from_millis(500);

/// An announced service.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Service {
    /// Its instance name.
    instance: String,
    /// Its address; `None`: every address of the machine.
    address: Option<IpAddr>,
    port: u16,
    /// The discovery subsystem.
    nqn: Nqn,
}

/// The announced services.
#[derive(Default)]
pub(super) struct Announcer {
    daemon: Option<ServiceDaemon>,
    services: Vec<Service>,
    /// Their full names.
    names: Vec<String>,
}

impl Announcer {
    /// Announces the listeners of a configuration, and withdraws others. After a change all are
    /// announced anew: otherwise the library would treat its earlier announcements as those of
    /// another machine, and choose other names.
    pub(super) fn update(&mut self, config: &Config) {
        let host = host_name(&fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default());
        let wanted = services(config, &host);
        if wanted == self.services {
            return;
        }
        self.end();
        for service in &wanted {
            match self.announce(service, &host) {
                Ok(name) => {
                    info!(name, port = service.port, "announced by multicast DNS");
                    self.names.push(name);
                }
                Err(error) => warn!("cannot announce discovery by multicast DNS: {error}"),
            }
        }
        self.services = wanted;
    }

    fn announce(&mut self, service: &Service, host: &str) -> mdns_sd::Result<String> {
        let daemon = match self.daemon.take() {
            Some(daemon) => daemon,
            None => ServiceDaemon::new()?,
        };
        let daemon = self.daemon.insert(daemon);
        let info = info(service, host)?;
        let name = info.get_fullname().to_owned();
        daemon.register(info)?;
        Ok(name)
    }

    /// Withdraws all services.
    fn end(&mut self) {
        self.services.clear();
        let Some(daemon) = self.daemon.take() else { return };
        for name in self.names.drain(..) {
            if let Ok(done) = daemon.unregister(&name) {
                let _ = done.recv_timeout(GOODBYE);
            }
        }
        if let Ok(done) = daemon.shutdown() {
            let _ = done.recv_timeout(GOODBYE);
        }
    }
}

/// Withdrawn services must not be queried again.
impl Drop for Announcer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Services of a configuration.
fn services(config: &Config, host: &str) -> Vec<Service> {
    if !config.discovery.mdns {
        return Vec::new();
    }
    let service = |listener: &crate::core::subsystem::ListenerConfig| {
        let ip = listener.address.ip();
        Service {
            instance: format!("{host}-{}", listener.id),
            address: (!ip.is_unspecified()).then_some(ip),
            port: listener.address.port(),
            nqn: config.discovery.nqn,
        }
    };
    config.listeners.iter().map(service).collect()
}

/// The records of a service.
fn info(service: &Service, host: &str) -> mdns_sd::Result<ServiceInfo> {
    let Service { instance, address, port, nqn } = service;
    let properties = [("nqn", nqn.as_str()), ("p", "roce")];
    let host = format!("{host}.local.");
    match address {
        Some(ip) => {
            let mut info = ServiceInfo::new(SERVICE, instance, &host, *ip, *port, &properties[..])?;
            info.set_interfaces(vec![IfKind::Addr(*ip)]);
            Ok(info)
        }
        None => {
            let info = ServiceInfo::new(SERVICE, instance, &host, (), *port, &properties[..])?;
            Ok(info.enable_addr_auto())
        }
    }
}

/// A name for this machine that no other service of it uses: letters, digits and hyphens, short
/// enough for a label with a number behind it.
fn host_name(machine: &str) -> String {
    let known = |c: char| if c.is_ascii_alphanumeric() { c.to_ascii_lowercase() } else { '-' };
    let first = machine.trim().split('.').next().unwrap_or_default();
    let name: String = first.chars().take(48).map(known).collect();
    format!("nvmfd-{}", if name.is_empty() { "target" } else { &name })
}

#[cfg(test)]
mod tests {
    use crate::control::mdns::*;

    fn config(discovery: &str) -> Config {
        let text = format!(
            "{discovery}\n[[listener]]\naddress = '192.0.2.1'\n[[listener]]\naddress = '::1'\n\
             port = 4421\nid = 7\n[[listener]]\naddress = '0.0.0.0'\nport = 4422\n\
             [[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:x'\n"
        );
        Config::parse(&text).unwrap()
    }

    #[test]
    fn mdns_announcement_is_off_by_default() {
        assert!(services(&config(""), "host").is_empty());
    }

    #[test]
    fn each_listener_is_a_service_with_its_port_and_the_name_of_discovery() {
        let nqn = "nqn.2026-11.io.nvmfd:discovery";
        let services = services(&config(&format!("[discovery]\nmdns = true\nnqn = '{nqn}'")), "h");
        let found: Vec<_> = services.iter().map(|s| (s.instance.as_str(), s.port)).collect();
        assert_eq!(found, [("h-1", 4420), ("h-7", 4421), ("h-3", 4422)]);
        let first = info(&services[0], "h").unwrap();
        assert_eq!(first.get_fullname(), "h-1._nvme-disc._udp.local.");
        assert_eq!(first.get_property_val_str("p"), Some("roce"));
        assert_eq!(first.get_property_val_str("nqn"), Some(nqn));
        assert_eq!(first.get_hostname(), "h.local.");
        let addresses = |service| info(service, "h").unwrap().get_addresses().len();
        assert_eq!([0, 1, 2].map(|at: usize| addresses(&services[at])), [1, 1, 0]);
    }

    #[test]
    fn the_name_of_a_machine_becomes_a_label() {
        for (machine, name) in [
            ("Disk_1.example.org\n", "nvmfd-disk-1"),
            ("", "nvmfd-target"),
            (&"a".repeat(99), &format!("nvmfd-{}", "a".repeat(48))),
        ] {
            assert_eq!(host_name(machine), name);
        }
    }
}
