//! Announces discovery by multicast DNS: a service `_nvme-disc._udp` for each listener, with the
//! name of the discovery subsystem (`nqn`) and the transport (`p=roce`).
//!
//! The library keeps every record that another machine on the link sends, for as long as that wants,
//! and reads before it heeds a command. So a process of its own announces, which begins anew if it
//! has too much memory. Errors are logged: the target serves without announcements.
//!
//! Source: NVMe TP8009, "Automated Discovery of Ethernet Discovery Controllers".

use std::fmt::Display;
use std::fs;
use std::io;
use std::net::IpAddr;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::telemetry::process;
use mdns_sd::{IfKind, ServiceDaemon, ServiceInfo};
use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tokio::time::interval;
use tracing::{info, warn};

use super::{ControlRequest, block_on, logging, signals};

/// NVMe discovery over UDP, the transport of RoCEv2.
const SERVICE: &str = "_nvme-disc._udp.local.";

/// Time limit for withdrawing a service, and for the end of the library's thread.
const GOODBYE: Duration = Duration::from_millis(500);

/// Time limit for the end of the process.
const END: Duration = Duration::from_secs(2);

/// Memory of the process with which it begins anew: it needs a fifth of that.
const MEMORY_MAX_BYTES: u64 = 64 << 20;

/// How long it pauses before, so that an attacker cannot keep a CPU busy.
const PAUSE: Duration = Duration::from_secs(5);

/// Interval between two looks at its memory.
const LOOK: Duration = Duration::from_millis(250);

/// The file of this program, also after an upgrade has replaced it.
const PROGRAM: &str = "/proc/self/exe";

/// Services to announce.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize)]
struct Announcement {
    /// The name of this machine in them.
    host: String,
    services: Vec<Service>,
}

/// An announced service.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
struct Service {
    /// Its instance name.
    instance: String,
    /// Its address; `None`: every address of the machine.
    address: Option<IpAddr>,
    port: u16,
    /// The discovery subsystem.
    nqn: String,
}

/// The announced services, and the process that announces them while its input is open.
#[derive(Default)]
pub(super) struct Announcer {
    announced: Announcement,
    process: Option<Child>,
}

impl Announcer {
    /// Announces the listeners of a configuration, and withdraws others. After a change all are
    /// announced anew: otherwise the library would treat its earlier announcements as those of
    /// another machine, and choose other names.
    pub(super) fn update(&mut self, config: &Config) {
        let host = host_name(&fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default());
        let wanted = Announcement { services: services(config, &host), host };
        let is_done = match &mut self.process {
            Some(process) => matches!(process.try_wait(), Ok(None)),
            None => wanted.services.is_empty(),
        };
        if is_done && wanted.services == self.announced.services {
            return;
        }
        self.end();
        if !wanted.services.is_empty() {
            match start(&wanted) {
                Ok(process) => self.process = Some(process),
                Err(error) => warn!("{}", cannot(&error)),
            }
        }
        self.announced = wanted;
    }

    /// Withdraws all services.
    fn end(&mut self) {
        self.announced.services.clear();
        let Some(mut process) = self.process.take() else { return };
        drop(process.stdin.take());
        let deadline = Instant::now() + END;
        while matches!(process.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                // It may have ended meanwhile.
                let _ = process.kill();
                let _ = process.wait();
                return;
            }
            sleep(Duration::from_millis(5));
        }
    }
}

/// Withdrawn services must not be queried again.
impl Drop for Announcer {
    fn drop(&mut self) {
        self.end();
    }
}

/// Starts the process, in a group of its own: a terminal interrupts the daemon, which ends it.
fn start(wanted: &Announcement) -> io::Result<Child> {
    let mut command = Command::new(PROGRAM);
    command.args(logging::arguments()).arg("announce").arg(serde_json::to_string(wanted)?);
    command.process_group(0).stdin(Stdio::piped()).stdout(Stdio::null()).spawn()
}

/// The process: announces until its input ends, or a signal requests that. `pauses`: begins later.
///
/// # Errors
/// One sentence: why it cannot announce.
pub fn announce(wanted: &str, pauses: bool) -> Result<(), String> {
    let wanted: Announcement =
        serde_json::from_str(wanted).map_err(|error| format!("no services: {error}"))?;
    block_on(async {
        let mut asks = signals::listen().map_err(|e| format!("signals cannot be received: {e}"))?;
        let mut input = spawn_blocking(|| io::copy(&mut io::stdin(), &mut io::sink()));
        let mut announced = None;
        let mut look = interval(LOOK);
        let start = Instant::now() + if pauses { PAUSE } else { Duration::ZERO };
        loop {
            tokio::select! {
                _ = &mut input => break,
                Some(ControlRequest::Stop) = asks.recv() => break,
                _ = look.tick() => {}
            }
            if announced.is_none() && Instant::now() >= start {
                announced = Some(register(&wanted)?);
            }
            if process::look().resident_bytes.is_some_and(|bytes| bytes > MEMORY_MAX_BYTES) {
                return Err(begin_anew().to_string());
            }
        }
        if let Some((daemon, names)) = announced {
            withdraw(&daemon, &names);
        }
        Ok(())
    })
}

/// Replaces the process by a new one, which has none of the records. Returns an error only.
fn begin_anew() -> io::Error {
    warn!(
        "other machines have sent more than {} MiB of records by multicast DNS: announced again in \
         {} s",
        MEMORY_MAX_BYTES >> 20,
        PAUSE.as_secs()
    );
    let arguments = std::env::args_os().skip(1).filter(|argument| argument != "--pause");
    Command::new(PROGRAM).args(arguments).arg("--pause").exec()
}

/// Announces all services; returns their full names.
fn register(wanted: &Announcement) -> Result<(ServiceDaemon, Vec<String>), String> {
    let daemon = ServiceDaemon::new().map_err(|error| cannot(&error))?;
    let mut names = Vec::new();
    for service in &wanted.services {
        let named = info(service, &wanted.host).and_then(|info| {
            let name = info.get_fullname().to_owned();
            daemon.register(info).map(|()| name)
        });
        match named {
            Ok(name) => {
                info!(name, port = service.port, "announced by multicast DNS");
                names.push(name);
            }
            Err(error) => warn!("{}", cannot(&error)),
        }
    }
    Ok((daemon, names))
}

fn cannot(error: &dyn Display) -> String {
    format!("cannot announce discovery by multicast DNS: {error}")
}

fn withdraw(daemon: &ServiceDaemon, names: &[String]) {
    for name in names {
        if let Ok(done) = daemon.unregister(name) {
            let _ = done.recv_timeout(GOODBYE);
        }
    }
    if let Ok(done) = daemon.shutdown() {
        let _ = done.recv_timeout(GOODBYE);
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
            nqn: config.discovery.nqn.to_string(),
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
