//! `nvmfctl connect-line`: prints the connect command for a host.

use std::net::{IpAddr, SocketAddr};

use nix::ifaddrs::getifaddrs;
use nvmfd::api::{Host, Listener, Subsystem};
use rdma::zone::is_link_local;
use serde_json::json;

use crate::client::{Client, escaped};
use crate::output::Failure;

pub(crate) async fn run(nqn: &str, host: Option<&str>, client: &Client) -> Result<(), Failure> {
    let path = format!("/v1/subsystems/{}", escaped(nqn));
    let (subsystem, _) = client.get::<Subsystem>(&path).await?;
    let (listeners, _) = client.get::<Vec<Listener>>("/v1/listeners").await?;
    let (hosts, _) = client.get::<Vec<Host>>("/v1/hosts").await?;
    if let Some(host) = host
        && !subsystem.allow_any_host
        && !subsystem.hosts.contains(host)
    {
        let remedy = format!("`nvmfctl host allow {nqn} {host}`");
        return Err(Failure::new(format!("{host} may not use {nqn}: {remedy}")));
    }
    let has_key = host.is_some_and(|host| hosts.iter().any(|h| h.nqn == host && h.has_key));
    let offers =
        |each: &&Listener| subsystem.listeners.is_empty() || subsystem.listeners.contains(&each.id);
    let addresses: Vec<SocketAddr> = (listeners.iter().filter(offers))
        .filter_map(|listener| listener.address.parse().ok())
        .collect();
    if let Some(all) = addresses.iter().find(|at| client.is_remote() && at.ip().is_unspecified()) {
        let what =
            format!("{all} is at all addresses of the target, which this machine does not know");
        return Err(Failure::new(format!("{what}: run `nvmfctl connect-line` there")));
    }
    let own = own_addresses();
    let places: Vec<SocketAddr> =
        addresses.into_iter().flat_map(|at| reachable(at, &own)).collect();
    if places.is_empty() {
        let why = "no listener offers it at an address that others can reach";
        return Err(Failure::new(format!("{why}: see `nvmfctl listener list`")));
    }
    let connect: Vec<String> = places.iter().map(|at| connect(*at, nqn, host, has_key)).collect();
    let discovery: Vec<String> = places.iter().map(|at| discovery(*at, host)).collect();
    let fio = "fio --name=check --filename=/dev/nvmeXnY --readonly --rw=randread --bs=4k \
               --iodepth=32 --ioengine=io_uring --direct=1 --time_based --runtime=10";
    if client.output.json {
        let all = json!({"connect": connect, "discovery_conf": discovery, "fio": fio});
        client.output.print(&format!("{all:#}"));
        return Ok(());
    }
    let mut text = Vec::new();
    if !subsystem.allow_any_host && subsystem.hosts.is_empty() {
        text.push(nobody(nqn));
    }
    text.push("# On the host, as root (`modprobe nvme-rdma` first):".to_owned());
    text.extend(connect);
    text.push("# Or, in /etc/nvme/discovery.conf, and then `nvme connect-all`:".to_owned());
    text.extend(discovery);
    text.push("# Read a little (see `nvme list` for the device):".to_owned());
    text.push(fio.to_owned());
    client.output.print(&text.join("\n"));
    Ok(())
}

/// Comment for a subsystem that no host may use.
fn nobody(nqn: &str) -> String {
    let allow = format!("nvmfctl host allow {} HOSTNQN", quoted(nqn));
    format!(
        "# No host may use it yet. Run here, with the NQN in /etc/nvme/hostnqn of the host: {allow}"
    )
}

fn connect(at: SocketAddr, nqn: &str, host: Option<&str>, has_key: bool) -> String {
    let mut line =
        format!("nvme connect -t rdma -a {} -s {} -n {}", traddr(at), at.port(), quoted(nqn));
    if let Some(host) = host {
        line += &format!(" -q {}", quoted(host));
    }
    if has_key {
        line += " -S \"$(cat KEYFILE)\"";
    }
    line
}

fn discovery(at: SocketAddr, host: Option<&str>) -> String {
    let mut line = format!("-t rdma -a {} -s {}", traddr(at), at.port());
    if let Some(host) = host {
        line += &format!(" -q {host}");
    }
    line
}

/// The address as a host names it: with an interface of its own, if it is link-local.
fn traddr(at: SocketAddr) -> String {
    format!("{}{}", at.ip(), if is_link_local(at.ip()) { "%INTERFACE" } else { "" })
}

/// Replaces a wildcard by all reachable addresses.
fn reachable(at: SocketAddr, own: &[IpAddr]) -> Vec<SocketAddr> {
    if !at.ip().is_unspecified() {
        return vec![at];
    }
    let fits = |ip: &&IpAddr| at.is_ipv6() || ip.is_ipv4();
    own.iter().filter(fits).map(|ip| SocketAddr::new(*ip, at.port())).collect()
}

fn own_addresses() -> Vec<IpAddr> {
    let all = getifaddrs().into_iter().flatten().filter_map(|interface| interface.address);
    let ip = |address: nix::sys::socket::SockaddrStorage| {
        let four = address.as_sockaddr_in().map(|at| IpAddr::from(at.ip()));
        four.or_else(|| address.as_sockaddr_in6().map(|at| IpAddr::from(at.ip())))
    };
    all.filter_map(ip).filter(|ip| !ip.is_loopback() && !is_link_local(*ip)).collect()
}

/// Quotes one word for a shell.
fn quoted(word: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-._:/+@%".contains(&byte);
    match word.bytes().all(plain) {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', "'\\''")),
    }
}

#[cfg(test)]
mod tests {
    use crate::connect::*;

    #[test]
    fn connect_lines_are_valid_nvme_cli_commands() {
        let at: SocketAddr = "192.0.2.1:4420".parse().unwrap();
        let line = connect(at, "nqn.2026-11.io.nvmfd:a b'c", Some("nqn.h"), true);
        let says = "nvme connect -t rdma -a 192.0.2.1 -s 4420 -n 'nqn.2026-11.io.nvmfd:a b'\\''c' \
                    -q nqn.h -S \"$(cat KEYFILE)\"";
        assert_eq!(line, says);
        assert_eq!(discovery(at, None), "-t rdma -a 192.0.2.1 -s 4420");
        let at: SocketAddr = "[2001:db8::1]:4421".parse().unwrap();
        assert_eq!(
            connect(at, "nqn.a", None, false),
            "nvme connect -t rdma -a 2001:db8::1 -s 4421 -n nqn.a"
        );
    }

    #[test]
    fn a_wildcard_listener_expands_to_all_addresses_that_it_covers() {
        let own: Vec<IpAddr> = ["192.0.2.1", "2001:db8::1"].map(|ip| ip.parse().unwrap()).into();
        let of = |text: &str| reachable(text.parse().unwrap(), &own).len();
        assert_eq!((of("0.0.0.0:1"), of("[::]:1"), of("198.51.100.1:1")), (1, 2, 1));
        assert_eq!(reachable("0.0.0.0:9".parse().unwrap(), &own)[0].to_string(), "192.0.2.1:9");
    }
}
