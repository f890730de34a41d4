//! Checks the network: addresses of listeners, MTU, and socket buffers.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use nix::ifaddrs::getifaddrs;

use super::machine::{is_rxe, names, number, read};
use super::ports::said;
use super::{Finding, may_be_soft};
use crate::config::Config;

/// Receive buffer that `soft` requests for each of its sockets.
const RECEIVE_BUFFER_BYTES: u64 = 4 << 20;

/// Headers and CRC around the payload of the longest RoCEv2 packet over IPv4 and over IPv6.
const OVERHEAD_BYTES: [u32; 2] = [20 + 8 + 12 + 16 + 4 + 4, 40 + 8 + 12 + 16 + 4 + 4];

pub(super) fn examine(config: Option<&Config>) -> Vec<Finding> {
    let mut findings = Vec::new();
    if may_be_soft(config) {
        findings.push(buffers(number("/proc/sys/net/core/rmem_max")));
    }
    let Some(config) = config else { return findings };
    let interfaces = interfaces();
    for at in config.addresses() {
        findings.extend(listener(at, &interfaces, mtu));
    }
    if may_be_soft(Some(config)) {
        let all = |at: &SocketAddr| at.ip().is_unspecified();
        let addresses = config.addresses();
        let used = |ip: &IpAddr| addresses.iter().any(|at| all(at) || at.ip() == *ip);
        let own = interfaces.iter().filter(|(ip, _)| ip.is_ipv4() && !ip.is_loopback() && used(ip));
        let names: BTreeSet<&String> = own.map(|(_, name)| name).collect();
        findings.extend(names.into_iter().map(|name| trains(name, said("ethtool", &["-k", name]))));
        let adapters = roce_adapters(Path::new("/sys/class/infiniband"));
        findings.extend(
            config.addresses().into_iter().flat_map(|at| steered(at, &interfaces, &adapters)),
        );
    }
    findings
}

/// Network interfaces of adapters with RoCEv2, and the RDMA device of each.
fn roce_adapters(devices: &Path) -> BTreeMap<String, String> {
    let mut found = BTreeMap::new();
    let device_names = names(&devices.to_string_lossy());
    for device in device_names.into_iter().filter(|device| !is_rxe(device)) {
        let ports = devices.join(&device).join("ports");
        for port in names(&ports.to_string_lossy()) {
            let attributes = ports.join(port).join("gid_attrs");
            for gid in names(&attributes.join("types").to_string_lossy()) {
                let of = |what: &str| read(&attributes.join(what).join(&gid).to_string_lossy());
                if of("types").trim() == "RoCE v2" {
                    found.insert(of("ndevs").trim().to_owned(), device.clone());
                }
            }
        }
    }
    found
}

/// Checks for adapters with RoCEv2, which consume the datagrams of its port before any socket.
fn steered(
    at: SocketAddr,
    interfaces: &BTreeMap<IpAddr, String>,
    adapters: &BTreeMap<String, String>,
) -> Vec<Finding> {
    let all = at.ip().is_unspecified();
    let own = interfaces.iter().filter(|(ip, _)| all || **ip == at.ip()).map(|(_, name)| name);
    let own: BTreeSet<&String> = own.collect();
    let finding = |interface: &String| {
        let device = adapters.get(interface)?;
        Some(Finding::warning(
            "adapter",
            format!("{device} may take UDP port 4791 of {interface} away from \"soft\""),
            format!(
                "serve with provider = \"verbs\"; or switch RoCE off in the adapter (mlx5: \
                 devlink dev param set .. name enable_roce value false cmode driverinit, then \
                 devlink dev reload), or use an address of another interface than {interface}"
            ),
        ))
    };
    own.into_iter().filter_map(finding).collect()
}

/// The addresses of this machine, and the interfaces that have them.
fn interfaces() -> BTreeMap<IpAddr, String> {
    let list = getifaddrs().into_iter().flatten();
    let address = |interface: &nix::ifaddrs::InterfaceAddress| {
        let address = interface.address.as_ref()?;
        let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
        v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
    };
    list.filter_map(|each| Some((address(&each)?, each.interface_name.clone()))).collect()
}

fn mtu(interface: &str) -> Option<u32> {
    number(&format!("/sys/class/net/{interface}/mtu"))?.try_into().ok()
}

/// Whether an interface segments trains of datagrams itself: `features` is the output of `ethtool
/// -k`. Interfaces that number the segments differently from the kernel cannot be detected here.
fn trains(interface: &str, features: Option<String>) -> Finding {
    let check = "segments";
    let state = features.as_deref().and_then(|text| {
        let line = text.lines().find_map(|line| line.trim().strip_prefix("tx-udp-segmentation:"));
        line.map(str::trim)
    });
    Finding::ok(
        check,
        match state {
            Some(state) if state.starts_with("on") => format!(
                "{interface} segments UDP itself (tx-udp-segmentation: {state}); should the log of \
                 nvmfd say that of packets that leave together only the first arrives: ethtool -K \
                 {interface} tx-udp-segmentation off"
            ),
            Some(state) => {
                format!("the kernel segments UDP for {interface} (tx-udp-segmentation: {state})")
            }
            None => format!(
                "whether {interface} segments UDP itself cannot be seen (ethtool -k {interface})"
            ),
        },
    )
}

fn buffers(rmem_max: Option<u64>) -> Finding {
    let check = "rmem_max";
    match rmem_max {
        Some(bytes) if bytes >= RECEIVE_BUFFER_BYTES => {
            Finding::ok(check, format!("sockets may buffer {} KiB", bytes >> 10))
        }
        Some(bytes) => Finding::warning(
            check,
            format!("sockets may buffer {} KiB: \"soft\" will lose packets in bursts", bytes >> 10),
            format!(
                "sysctl -w net.core.rmem_max={RECEIVE_BUFFER_BYTES} (or run with CAP_NET_ADMIN)"
            ),
        ),
        None => Finding::warning(
            check,
            "net.core.rmem_max cannot be seen",
            format!("in a container: set it on the host, to {RECEIVE_BUFFER_BYTES} or more"),
        ),
    }
}

fn listener(
    at: SocketAddr,
    interfaces: &BTreeMap<IpAddr, String>,
    mtu: impl Fn(&str) -> Option<u32>,
) -> Vec<Finding> {
    let check = "address";
    let ip = at.ip();
    if ip.is_unspecified() {
        let real = interfaces.iter().filter(|(ip, _)| !ip.is_loopback());
        let used: BTreeMap<&str, IpAddr> = real.map(|(ip, name)| (name.as_str(), *ip)).collect();
        let mut findings = vec![match used.is_empty() {
            false => Finding::ok(check, format!("{at}: every address of this machine")),
            true => Finding::warning(
                check,
                format!("{at}: this machine has no address but those of loopback"),
                "give an interface an address: ip addr add",
            ),
        }];
        findings.extend(used.iter().filter_map(|(name, ip)| length(name, *ip, mtu(name)?)));
        return findings;
    }
    match (interfaces.get(&ip), ip.is_loopback()) {
        (Some(name), _) => {
            let own = Finding::ok(check, format!("{at} is an address of {name}"));
            let length = mtu(name).and_then(|mtu| length(name, ip, mtu));
            [own].into_iter().chain(length).collect()
        }
        (None, true) => vec![Finding::ok(check, format!("{at} is a loopback address"))],
        (None, false) => vec![Finding::problem(
            check,
            format!("{at}: no interface of this machine has the address"),
            format!("give it to one (ip addr add {ip}/.. dev ..), or correct the [[listener]]"),
        )],
    }
}

/// Checks the MTU of an interface for RoCE.
fn length(interface: &str, ip: IpAddr, mtu: u32) -> Option<Finding> {
    let check = "mtu";
    let room = mtu.saturating_sub(OVERHEAD_BYTES[usize::from(ip.is_ipv6())]);
    let payload = [4096, 2048, 1024, 512, 256].into_iter().find(|payload| *payload <= room);
    let larger =
        format!("raise it where switches and hosts bear that: ip link set {interface} mtu 4200");
    Some(match payload {
        _ if ip.is_loopback() => return None,
        Some(payload @ (1024..)) => Finding::ok(
            check,
            format!("{interface} has MTU {mtu}: {payload} bytes of data in a packet"),
        ),
        Some(payload) => Finding::warning(
            check,
            format!("{interface} has MTU {mtu}: only {payload} bytes of data in a packet"),
            larger,
        ),
        None => Finding::problem(
            check,
            format!("{interface} has MTU {mtu}, which no RoCE packet fits into"),
            larger,
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Level::{Ok as Fine, Problem, Warning};
    use super::super::tests::says;
    use crate::platform::doctor::network::*;

    #[test]
    fn short_socket_buffers_are_warned_of() {
        says(&buffers(Some(4 << 20)), Fine, "4096 KiB");
        says(&buffers(Some(212_992)), Warning, "208 KiB");
        says(&buffers(None), Warning, "cannot be seen");
    }

    #[test]
    fn the_state_of_udp_segmentation_is_shown() {
        let of = |state: &str| {
            let text = format!(
                "Features for eth0:\ntx-checksumming: on\n\ttx-udp-segmentation: {state}\n"
            );
            trains("eth0", Some(text))
        };
        says(&of("on"), Fine, "ethtool -K eth0 tx-udp-segmentation off");
        says(&of("off"), Fine, "the kernel segments UDP for eth0");
        says(&of("off [fixed]"), Fine, "off [fixed]");
        says(&trains("eth0", None), Fine, "cannot be seen");
    }

    #[test]
    fn a_listener_address_without_an_interface_is_a_problem() {
        let interfaces = BTreeMap::from([
            ("192.0.2.1".parse().unwrap(), "eth0".to_owned()),
            ("2001:db8::1".parse().unwrap(), "eth0".to_owned()),
            ("127.0.0.1".parse().unwrap(), "lo".to_owned()),
        ]);
        let of = |at: &str, mtu| listener(at.parse().unwrap(), &interfaces, |_| Some(mtu));
        says(&of("192.0.2.2:4420", 1500)[0], Problem, "192.0.2.2");
        says(&of("192.0.2.1:4420", 1500)[0], Fine, "eth0");
        says(&of("127.9.9.9:4420", 65536)[0], Fine, "loopback");
        assert_eq!(of("127.0.0.1:4420", 65536).len(), 1);
        says(&of("0.0.0.0:4420", 9000)[0], Fine, "every address");
        let alone = BTreeMap::from([("127.0.0.1".parse().unwrap(), "lo".to_owned())]);
        let at = "0.0.0.0:4420".parse().unwrap();
        says(&listener(at, &alone, |_| Some(65536))[0], Warning, "but those of loopback");
        // The actual interfaces of this machine.
        assert_eq!(super::interfaces().get(&IpAddr::from([127, 0, 0, 1])), Some(&"lo".to_owned()));
    }

    #[test]
    fn a_soft_listener_on_a_roce_adapter_is_warned_of() {
        let sysfs = tempfile::tempdir().unwrap();
        let gids = [
            ("mlx5_0", "0", "IB/RoCE v1", "eth0"),
            ("mlx5_0", "1", "RoCE v2", "eth0"),
            ("mlx5_1", "0", "IB/RoCE v1", "eth1"),
            ("rxe0", "0", "RoCE v2", "eth2"),
        ];
        for (device, gid, kind, interface) in gids {
            let attributes = sysfs.path().join(device).join("ports/1/gid_attrs");
            for (what, text) in [("types", kind), ("ndevs", interface)] {
                std::fs::create_dir_all(attributes.join(what)).unwrap();
                std::fs::write(attributes.join(what).join(gid), format!("{text}\n")).unwrap();
            }
        }
        let adapters = roce_adapters(sysfs.path());
        assert_eq!(adapters, BTreeMap::from([("eth0".to_owned(), "mlx5_0".to_owned())]));
        let interfaces: BTreeMap<IpAddr, String> = (0..3u8)
            .map(|number| (IpAddr::from([192, 0, 2, number]), format!("eth{number}")))
            .collect();
        let of = |at: &str| steered(at.parse().unwrap(), &interfaces, &adapters);
        says(&of("192.0.2.0:4420")[0], Warning, "mlx5_0 may take UDP port 4791 of eth0");
        assert!(of("192.0.2.1:4420").is_empty() && of("192.0.2.2:4420").is_empty());
        assert_eq!(of("0.0.0.0:4420").len(), 1);
    }

    #[test]
    fn the_roce_mtu_of_an_interface_is_reported() {
        let of = |ip: &str, mtu| length("eth0", ip.parse().unwrap(), mtu).unwrap();
        says(&of("192.0.2.1", 1500), Fine, "1024 bytes");
        says(&of("192.0.2.1", 4160), Fine, "4096 bytes");
        says(&of("2001:db8::1", 4160), Fine, "2048 bytes");
        says(&of("192.0.2.1", 1000), Warning, "only 512 bytes");
        says(&of("192.0.2.1", 300), Problem, "no RoCE packet");
    }
}
