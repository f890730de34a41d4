//! Checks the ports: users of UDP 4791, the kernel's target, and the firewall.

use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::process::Command;

use rdma::soft::ROCE_PORT;

use super::machine::{names, read};
use super::{Finding, may_be_soft};
use crate::config::Config;

pub(super) fn examine(config: Option<&Config>) -> Vec<Finding> {
    let any = || vec![SocketAddr::from(([0, 0, 0, 0], 4420))];
    let listeners = config.map_or_else(any, Config::addresses);
    let mut findings = Vec::new();
    if may_be_soft(config) {
        let refused = listeners.iter().find_map(|at| {
            let at = SocketAddr::new(at.ip(), ROCE_PORT);
            UdpSocket::bind(at).err().filter(is_in_use).map(|_| at)
        });
        findings.push(roce_port(refused, refused.and_then(port_holder)));
    }
    let configfs = "/sys/kernel/config/nvmet/ports";
    let ports = names(configfs).into_iter().map(|port| {
        let text = |what| read(&format!("{configfs}/{port}/addr_{what}")).trim().to_owned();
        (text("trtype"), text("traddr"), text("trsvcid"))
    });
    findings.push(kernel_target(&listeners, &ports.collect::<Vec<_>>()));
    findings.push(match nix::unistd::geteuid().is_root() {
        true => firewall(said("nft", &["list", "ruleset"]), said("iptables", &["-S", "INPUT"])),
        false => Finding::warning(
            "firewall",
            "only root can see the firewall's rules",
            "run this as root, or make sure that UDP port 4791 may come in",
        ),
    });
    findings
}

/// Tables of UDP sockets.
const TABLES: [&str; 2] = ["/proc/net/udp", "/proc/net/udp6"];

fn is_in_use(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::AddrInUse
}

/// A user of the port.
#[derive(PartialEq, Eq, Debug)]
pub(crate) enum PortHolder {
    /// A socket of the kernel.
    Kernel,
    /// Its id and name.
    Process(u32, String),
}

fn roce_port(refused: Option<SocketAddr>, holder: Option<PortHolder>) -> Finding {
    let check = "port 4791";
    let Some(at) = refused else { return Finding::ok(check, "UDP port 4791 is free") };
    match holder {
        Some(PortHolder::Process(pid, name)) if name == "nvmfd" => {
            Finding::ok(check, format!("UDP port 4791 is nvmfd's (process {pid})"))
        }
        Some(PortHolder::Process(pid, name)) => Finding::problem(
            check,
            format!("{at} is in use by {name} (process {pid})"),
            format!("stop it, or have it use another address: see systemctl status {pid}"),
        ),
        Some(PortHolder::Kernel) => Finding::problem(
            check,
            format!("{at} is in use by the kernel: rdma_rxe has a device"),
            "remove it to serve with \"soft\" (rdma link; rdma link delete NAME), or serve with \
             provider = \"verbs\" on its address",
        ),
        None => Finding::problem(
            check,
            format!("{at} is in use by an unknown process"),
            "look as root: ss -lunp sport = :4791; a device of rdma_rxe holds it as well",
        ),
    }
}

/// Whether a socket is bound to exactly this address and UDP port, which excludes a listener there.
pub(crate) fn is_bound(at: SocketAddr) -> bool {
    TABLES.iter().any(|path| sockets(&read(path)).any(|(local, _)| local == at))
}

/// Returns the user of a UDP port that keeps others from this address, as far as it can be determined.
pub(crate) fn port_holder(at: SocketAddr) -> Option<PortHolder> {
    let inode = TABLES.iter().find_map(|path| inode(&read(path), at))?;
    if inode == 0 {
        return Some(PortHolder::Kernel);
    }
    let link = format!("socket:[{inode}]");
    let pids = names("/proc").into_iter().filter_map(|name| name.parse::<u32>().ok());
    pids.into_iter().find_map(|pid| {
        let fds = fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
        let has = fds.flatten().any(|fd| {
            fs::read_link(fd.path()).is_ok_and(|target| target.as_os_str() == link.as_str())
        });
        has.then(|| PortHolder::Process(pid, read(&format!("/proc/{pid}/comm")).trim().to_owned()))
    })
}

/// The inode of a socket in a table of `/proc/net` that excludes another one at this address; 0: the
/// kernel's own.
/// ` 12: 00000000:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  0  0 12345 2 ..`
fn inode(table: &str, at: SocketAddr) -> Option<u64> {
    let excludes = |local: SocketAddr| {
        local.port() == at.port()
            && (local.ip() == at.ip()
                || local.ip().is_unspecified()
                || at.ip().is_unspecified() && at.is_ipv4() == local.is_ipv4())
    };
    sockets(table).find(|(local, _)| excludes(*local)).map(|(_, inode)| inode)
}

/// Addresses and inodes of the sockets in a table.
fn sockets(table: &str) -> impl Iterator<Item = (SocketAddr, u64)> {
    table.lines().filter_map(|row| {
        let mut fields = row.split_whitespace();
        Some((address(fields.nth(1)?)?, fields.nth(7)?.parse().ok()?))
    })
}

/// An address as in `/proc/net`: words of 32 bits in the byte order of the machine.
fn address(text: &str) -> Option<SocketAddr> {
    let (ip, port) = text.split_once(':')?;
    let words = ip.as_bytes().chunks(8).map(|word| {
        let word = u32::from_str_radix(str::from_utf8(word).ok()?, 16).ok()?;
        Some(word.to_ne_bytes())
    });
    let bytes = words.collect::<Option<Vec<[u8; 4]>>>()?.concat();
    let ip = match bytes.len() {
        4 => IpAddr::from(<[u8; 4]>::try_from(bytes).ok()?),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    Some(SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?))
}

/// `ports`: transport, address and service of the ports of the kernel's target.
fn kernel_target(listeners: &[SocketAddr], ports: &[(String, String, String)]) -> Finding {
    let check = "nvmet";
    let same = |(trtype, traddr, trsvcid): &&(String, String, String)| {
        trtype == "rdma"
            && listeners.iter().any(|at| {
                let ip = traddr.parse().ok();
                let meets = ip == Some(at.ip())
                    || at.ip().is_unspecified()
                    || ip.is_some_and(|ip: std::net::IpAddr| ip.is_unspecified());
                meets && trsvcid.parse() == Ok(at.port())
            })
    };
    match ports.iter().find(same) {
        Some((_, traddr, trsvcid)) => Finding::problem(
            check,
            format!("the kernel's own target (nvmet) listens at {traddr}:{trsvcid}"),
            "take its port away (nvmetcli clear), or listen at another address or port",
        ),
        None => Finding::ok(check, "the kernel's own target (nvmet) is not in the way"),
    }
}

/// Returns the output of a program; `None` if it is missing or fails.
pub(super) fn said(program: &str, args: &[&str]) -> Option<String> {
    let output = Command::new(program).args(args).output().ok()?;
    output.status.success().then(|| String::from_utf8_lossy(&output.stdout).into_owned())
}

/// `nft`: all rules; `iptables`: those of its chain INPUT.
fn firewall(nft: Option<String>, iptables: Option<String>) -> Finding {
    let check = "firewall";
    if nft.is_none() && iptables.is_none() {
        return Finding::ok(
            check,
            "neither nft nor iptables is installed: no firewall rules to examine",
        );
    }
    let texts = [nft.unwrap_or_default(), iptables.unwrap_or_default()];
    let lines: Vec<&str> = texts.iter().flat_map(|text| text.lines()).map(str::trim).collect();
    let input = |line: &&&str| line.contains("hook input") || line.starts_with("-P INPUT");
    let drops = lines.iter().filter(input).any(|line| {
        line.contains("policy drop") || line.contains("INPUT DROP") || line.contains("INPUT REJECT")
    });
    let refuses = lines.iter().any(|line| {
        let verdict = ["drop", "reject", "-j DROP", "-j REJECT"];
        let rule = !line.contains("hook ") && !line.starts_with("-P ");
        rule && verdict
            .iter()
            .any(|word| line.ends_with(word) || line.contains(&format!("{word} ")))
    });
    let allows = lines
        .iter()
        .any(|line| line.contains("4791") && (line.contains("accept") || line.contains("ACCEPT")));
    match (allows, drops, refuses) {
        (true, ..) => Finding::ok(check, "a rule lets UDP port 4791 in"),
        (false, false, false) => Finding::ok(check, "no rule keeps anything out"),
        (false, true, _) => Finding::problem(
            check,
            "packets are dropped by default, and no rule names UDP port 4791",
            format!("let it in: {}", admission(&lines)),
        ),
        (false, false, true) => Finding::warning(
            check,
            "some rules drop packets, and none names UDP port 4791",
            format!("make sure that it may come in: {}", admission(&lines)),
        ),
    }
}

/// The command that lets the port in, of what has made the rules. A rule behind one that drops
/// everything has no effect.
fn admission(rules: &[&str]) -> &'static str {
    let has = |word: &str| rules.iter().any(|line| line.contains(word));
    if has("table inet firewalld") {
        "firewall-cmd --permanent --add-port=4791/udp && firewall-cmd --reload"
    } else if has("ufw-") {
        "ufw allow 4791/udp"
    } else if has("table inet filter {") {
        "nft insert rule inet filter input udp dport 4791 accept"
    } else {
        "iptables -I INPUT -p udp --dport 4791 -j ACCEPT"
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level::{Ok as Fine, Problem, Warning};
    use super::super::tests::says;
    use crate::platform::doctor::ports::*;

    #[test]
    fn the_holder_of_the_roce_port_is_reported() {
        let at = Some("192.0.2.1:4791".parse().unwrap());
        says(&roce_port(None, None), Fine, "free");
        let process = |name: &str| Some(PortHolder::Process(77, name.to_owned()));
        says(&roce_port(at, process("nvmfd")), Fine, "nvmfd's (process 77)");
        says(&roce_port(at, process("other")), Problem, "other (process 77)");
        says(&roce_port(at, Some(PortHolder::Kernel)), Problem, "rdma_rxe");
        says(&roce_port(at, None), Problem, "unknown process");
    }

    #[test]
    fn the_inode_of_a_socket_is_read_from_proc_net() {
        let head =
            "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid\n";
        let row = |local: &str, inode| {
            format!(
                " 12: {local} 00000000:0000 07 00000000:00000000 00:00000000 00000000     \
                 0 0 {inode} 2 0000000000000000 0\n"
            )
        };
        let of = |rows: &str, at: &str| inode(&format!("{head}{rows}"), at.parse().unwrap());
        let (dns, roce) = (row("0100007F:0035", 9), row("0100007F:12B7", 4711));
        assert_eq!(of(&format!("{dns}{roce}"), "127.0.0.1:4791"), Some(4711));
        assert_eq!(of(&row("0100007F:12B7", 0), "127.0.0.1:4791"), Some(0));
        assert_eq!(of(&dns, "127.0.0.1:4791"), None);
        // The same port at another address is in nobody's way.
        assert_eq!(of(&roce, "127.0.0.2:4791"), None);
        let all = row("00000000:12B7", 8);
        assert_eq!(of(&format!("{roce}{all}"), "127.0.0.2:4791"), Some(8));
        assert_eq!(of(&roce, "0.0.0.0:4791"), Some(4711));
        let six = row("000080FE00000000FF005450B6AD1DFE:12B7", 6);
        assert_eq!(of(&six, "[fe80::5054:ff:fe1d:adb6]:4791"), Some(6));
        assert_eq!(of(&six, "127.0.0.1:4791"), None);
    }

    /// Actual sockets of this process.
    #[test]
    fn a_port_in_use_at_the_same_address_is_seen() {
        let held = UdpSocket::bind("127.0.0.1:0").unwrap();
        let at = held.local_addr().unwrap();
        assert!(is_in_use(&UdpSocket::bind(at).unwrap_err()));
        let Some(PortHolder::Process(pid, name)) = port_holder(at) else { panic!("nobody has it") };
        assert_eq!((pid, name.is_empty()), (std::process::id(), false));
        assert_eq!(port_holder(SocketAddr::new("127.0.0.2".parse().unwrap(), at.port())), None);
    }

    #[test]
    fn nvmet_at_the_same_address_and_port_is_a_problem() {
        let port = |trtype: &str, traddr: &str, trsvcid: &str| {
            vec![(trtype.to_owned(), traddr.to_owned(), trsvcid.to_owned())]
        };
        let listeners: Vec<SocketAddr> = vec!["192.0.2.1:4420".parse().unwrap()];
        let of = |ports: &[(String, String, String)]| kernel_target(&listeners, ports);
        says(&of(&[]), Fine, "not in the way");
        says(&of(&port("rdma", "192.0.2.1", "4420")), Problem, "192.0.2.1:4420");
        says(&of(&port("rdma", "0.0.0.0", "4420")), Problem, "nvmet");
        for other in [port("tcp", "192.0.2.1", "4420"), port("rdma", "192.0.2.1", "4421")] {
            says(&of(&other), Fine, "not in the way");
        }
    }

    #[test]
    fn firewall_rules_that_drop_the_roce_port_are_reported() {
        let nft = |text: &str| firewall(Some(text.to_owned()), None);
        let chain = "type filter hook input priority filter; policy";
        says(&nft(""), Fine, "no rule keeps");
        says(&nft(&format!("{chain} accept;\n")), Fine, "no rule keeps");
        says(&nft(&format!("{chain} drop;\ntcp dport 22 accept\n")), Problem, "no rule names");
        says(&nft(&format!("{chain} drop;\nudp dport 4791 accept\n")), Fine, "lets UDP port 4791");
        says(&nft(&format!("{chain} accept;\nip saddr 192.0.2.9 drop\n")), Warning, "none names");
        let iptables = |text: &str| firewall(None, Some(text.to_owned()));
        says(
            &iptables("-P INPUT DROP\n-A INPUT -p tcp --dport 22 -j ACCEPT\n"),
            Problem,
            "dropped",
        );
        says(&iptables("-P INPUT ACCEPT\n"), Fine, "no rule keeps");
        says(&iptables("-P INPUT DROP\n-A INPUT -p udp --dport 4791 -j ACCEPT\n"), Fine, "4791");
        says(&firewall(None, None), Fine, "neither");
        for (rules, command) in [
            ("table inet filter {\n", "nft insert rule inet filter input"),
            ("table inet firewalld {\n", "firewall-cmd --permanent --add-port=4791/udp"),
            ("table ip filter {\nchain ufw-user-input {\n", "ufw allow 4791/udp"),
            ("table ip filter {\n", "iptables -I INPUT -p udp --dport 4791 -j ACCEPT"),
        ] {
            let finding = nft(&format!("{rules}{chain} drop;\n"));
            assert!(finding.remedy.contains(command), "{finding}");
        }
    }
}
