//! Builder of a configuration from the parts of another target's. Each value of a source is accepted or
//! rejected here, by the rules of nvmfd's configuration, and every rejection adds a remark.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::{Display, Write as _};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use nvme::Nqn;
use toml_edit::Value;
use uuid::Uuid;

use nvmfd::config::{Size, overlap};
use nvmfd::core::subsystem::MAX_NSID;
use nvmfd::core::subsystem::ana::ANA_GROUPS;

/// The most referrals that a configuration may have.
const MOST_REFERRALS: usize = 256;

/// Prefix of names that are not NQNs.
const RENAMED: &str = "nqn.2026-11.io.nvmfd:";

#[derive(Default)]
pub(super) struct ConfigBuilder {
    pub(super) limits: Limits,
    listeners: Vec<Listener>,
    pub(super) subsystems: Vec<Subsystem>,
    referrals: Vec<(SocketAddr, Option<Nqn>)>,
    hosts: Vec<Host>,
    pub(super) hashes: Vec<String>,
    pub(super) groups: Vec<String>,
    remarks: Vec<String>,
}

/// `[limits]`, as found in the source.
#[derive(Default)]
pub(super) struct Limits {
    pub(super) queue_depth: Option<u64>,
    pub(super) io_queues: Option<u64>,
    pub(super) in_capsule_bytes: Option<u64>,
    pub(super) mdts_bytes: Option<u64>,
}

struct Listener {
    id: u16,
    at: SocketAddr,
    /// States of groups that are not optimized.
    ana: BTreeMap<u32, String>,
}

#[derive(Default)]
pub(super) struct Subsystem {
    /// Name by which the source refers to the subsystem.
    pub(super) name: String,
    pub(super) allow_any_host: bool,
    pub(super) hosts: Vec<String>,
    pub(super) serial: Option<String>,
    pub(super) model: Option<String>,
    pub(super) cntlids: Option<(u64, u64)>,
    pub(super) io_queues: Option<u64>,
    pub(super) max_nsid: Option<u64>,
    pub(super) listeners: BTreeSet<u16>,
    pub(super) namespaces: Vec<Namespace>,
}

#[derive(Default)]
pub(super) struct Namespace {
    pub(super) nsid: u64,
    pub(super) store: BackingStore,
    pub(super) block_size_bytes: u64,
    pub(super) read_only: bool,
    pub(super) uuid: Option<String>,
    pub(super) nguid: Option<String>,
    pub(super) eui64: Option<String>,
    pub(super) ana_group: Option<u64>,
    /// The hosts that see it; `None`: all.
    pub(super) hosts: Option<Vec<String>>,
    pub(super) limit: Limit,
}

/// Rate limit of a namespace for all hosts together.
#[derive(Clone, Copy, Default)]
pub(super) struct Limit {
    pub(super) iops: Option<u64>,
    pub(super) bandwidth_bytes: Option<u64>,
}

#[derive(Clone)]
pub(super) enum BackingStore {
    File(String),
    Ram { size_bytes: u64 },
    Null { size_bytes: u64 },
}

impl Default for BackingStore {
    fn default() -> Self {
        BackingStore::File(String::new())
    }
}

struct Host {
    nqn: Nqn,
    key_file: String,
    controller_key_file: Option<String>,
}

/// Identifiers that may occur only once in a configuration.
#[derive(Default)]
struct Seen {
    nqns: HashSet<Nqn>,
    serials: HashSet<String>,
    paths: HashSet<PathBuf>,
    ids: HashSet<String>,
}

impl ConfigBuilder {
    /// Adds a remark about a setting without a counterpart, or one to be checked.
    pub(super) fn remark(&mut self, sentence: impl Display) {
        // Control characters would end the comment that contains the remark.
        let plain = |c: char| if c.is_control() { ' ' } else { c };
        self.remarks.push(sentence.to_string().chars().map(plain).collect());
    }

    /// Adds a listener, or finds the one that has this address already; returns its id.
    pub(super) fn listen(
        &mut self,
        id: Option<u64>,
        address: Option<&str>,
        port: Option<&str>,
    ) -> Option<u16> {
        let at = match socket(address, port) {
            Ok(at) => at,
            Err(sentence) => {
                self.remark(format_args!("a listener was left out: {sentence}"));
                return None;
            }
        };
        if let Some(old) = self.listeners.iter().find(|old| overlap(old.at, at)) {
            let (id, old) = (old.id, old.at);
            if old != at {
                self.remark(format_args!("the listener {at} is a part of {old}, or the reverse"));
            }
            return Some(id);
        }
        let free = |id: &u16| *id > 0 && self.listeners.iter().all(|old| old.id != *id);
        let id = id.and_then(|id| u16::try_from(id).ok()).filter(free);
        let id = id.or_else(|| (1..=u16::MAX).find(free))?;
        self.listeners.push(Listener { id, at, ana: BTreeMap::new() });
        Some(id)
    }

    /// Sets the state of a group of namespaces at a listener.
    pub(super) fn ana(&mut self, id: u16, group: u64, state: &str) {
        let state = state.replace('_', "-").to_lowercase();
        let known = ["non-optimized", "inaccessible", "persistent-loss", "change"];
        let group = u32::try_from(group).ok().filter(|group| (1..=ANA_GROUPS).contains(group));
        match (group, self.listeners.iter_mut().find(|listener| listener.id == id)) {
            _ if state == "optimized" => {}
            (Some(group), Some(listener)) if known.contains(&state.as_str()) => {
                listener.ana.insert(group, state);
            }
            _ => self.remark(format_args!(
                "the state {state:?} of an ANA group at listener {id} was left out: groups are 1 \
                 to {ANA_GROUPS}"
            )),
        }
    }

    /// Adds a referral to another discovery service.
    pub(super) fn refer(&mut self, address: Option<&str>, port: Option<&str>, nqn: Option<&str>) {
        let nqn = nqn.and_then(|nqn| Nqn::new(nqn).ok());
        match socket(address, port) {
            Ok(at) if at.ip().is_unspecified() => {
                self.remark("a referral to no address in particular was left out");
            }
            Ok(_) if self.referrals.len() == MOST_REFERRALS => {
                self.remark(format_args!("a referral beyond {MOST_REFERRALS} was left out"));
            }
            Ok(at) => self.referrals.push((at, nqn)),
            Err(sentence) => self.remark(format_args!("a referral was left out: {sentence}")),
        }
    }

    /// Adds a host that must authenticate with the key in a file.
    pub(super) fn host(&mut self, nqn: &str, key_file: String, controller: Option<String>) {
        let Ok(nqn) = Nqn::new(nqn) else {
            self.remark(format_args!("the key of {nqn:?} was left out: this is no NQN"));
            return;
        };
        let good = |path: &str| path.starts_with('/') && !path.contains('\0');
        if !good(&key_file) || controller.as_deref().is_some_and(|path| !good(path)) {
            self.remark(format_args!(
                "the key file of {nqn} is no absolute path: name it yourself"
            ));
            self.host(nqn.as_str(), "/etc/nvmfd/keys/missing".to_owned(), None);
            return;
        }
        match self.hosts.iter().find(|old| old.nqn == nqn) {
            Some(old) if old.key_file == key_file => {}
            Some(_) => self.remark(format_args!(
                "{nqn} has several keys; here a host has one, whatever subsystem it uses: the \
                 first was taken"
            )),
            None => self.hosts.push(Host { nqn, key_file, controller_key_file: controller }),
        }
    }

    /// Returns the text, if there is anything to serve, and the remarks.
    pub(super) fn finish(mut self, source: &str) -> (Option<String>, Vec<String>) {
        let mut body = String::new();
        let mut seen = Seen::default();
        for subsystem in std::mem::take(&mut self.subsystems) {
            body += &self.subsystem(subsystem, &mut seen).unwrap_or_default();
        }
        if body.is_empty() || self.listeners.is_empty() {
            return (None, self.remarks);
        }
        let mut text = format!(
            "# From a saved configuration of {source}. Read it before use: settings without\n# a \
             counterpart are listed at the end. `nvmfd check FILE` prints it with all \
             defaults.\n\n"
        );
        text += &self.limits();
        for listener in &self.listeners {
            text += &listener.text();
        }
        text += &body;
        text += &self.access();
        if !self.remarks.is_empty() {
            text += "\n# Settings without a counterpart, and points to check:\n";
        }
        for remark in &self.remarks {
            text += &format!("# * {remark}\n");
        }
        (Some(text), self.remarks)
    }

    fn limits(&mut self) -> String {
        let Limits { queue_depth, io_queues, in_capsule_bytes, mdts_bytes } = self.limits;
        let mut lines = String::new();
        let size = |bytes| quoted(&Size(bytes).to_string());
        for (key, wanted, least, most) in
            [("queue_depth", queue_depth, 2, 1024), ("io_queues", io_queues, 1, 256)]
        {
            let Some(wanted) = wanted else { continue };
            lines += &format!("{key} = {}\n", self.within(key, wanted, least, most));
        }
        if let Some(wanted) = in_capsule_bytes {
            let bytes = self.within("in_capsule", wanted, 0, 65536) / 4096 * 4096;
            lines += &format!("in_capsule = {}\n", size(bytes));
        }
        if let Some(wanted) = mdts_bytes {
            let bytes = self.within("mdts", wanted, 8192, 4 << 20);
            lines += &format!("mdts = {}\n", size(1 << bytes.ilog2()));
        }
        if lines.is_empty() { lines } else { format!("[limits]\n{lines}\n") }
    }

    fn within(&mut self, key: &str, wanted: u64, least: u64, most: u64) -> u64 {
        let granted = wanted.clamp(least, most);
        if granted != wanted {
            self.remark(format_args!(
                "`{key}` was {wanted}; here it is at most {most}, at least {least}"
            ));
        }
        granted
    }

    /// Returns the NQN of a subsystem, derived from its name if that is not an NQN.
    fn nqn(&mut self, name: &str) -> Option<Nqn> {
        if let Ok(nqn) = Nqn::new(name) {
            if nqn.is_discovery() {
                self.remark("the discovery subsystem was left out: every listener has one here");
                return None;
            }
            return Some(nqn);
        }
        let nqn = Nqn::new(&format!("{RENAMED}{name}")).ok();
        match nqn {
            Some(nqn) => self.remark(format_args!(
                "the subsystem {name:?} is called {nqn} here: names begin with \"nqn.\""
            )),
            None => self.remark(format_args!("{name:?} was left out: this cannot be a name")),
        }
        nqn
    }

    fn subsystem(&mut self, from: Subsystem, seen: &mut Seen) -> Option<String> {
        let nqn = self.nqn(&from.name)?;
        let known = &from.listeners;
        if known.is_empty() {
            self.remark(format_args!("{nqn} was left out: it is offered at no listener"));
            return None;
        }
        if !seen.nqns.insert(nqn) {
            self.remark(format_args!("{nqn} was there twice: the second was left out"));
            return None;
        }
        let mut text = format!("\n[[subsystem]]\nnqn = {}\n", quoted(nqn.as_str()));
        let hosts = self.names(&from.hosts, nqn);
        if from.allow_any_host {
            text += "allow_any_host = true\n";
        } else {
            text += &format!("hosts = {}\n", hosts_list(&hosts));
            if hosts.is_empty() {
                self.remark(format_args!("{nqn} lists no host: no host may connect to it"));
            }
        }
        if known.len() < self.listeners.len() {
            let ids: Vec<String> = known.iter().map(ToString::to_string).collect();
            let _ = writeln!(text, "listeners = [{}]", ids.join(", "));
        }
        text += &self.marks(&from, nqn, seen);
        let mut nsids = BTreeSet::new();
        let highest = from.namespaces.iter().map(|namespace| namespace.nsid).max().unwrap_or(0);
        if let Some(most) = from.max_nsid.filter(|most| *most >= 1 && *most < MAX_NSID.into()) {
            let _ = writeln!(text, "max_nsid = {}", most.max(highest).min(MAX_NSID.into()));
        }
        for namespace in &from.namespaces {
            match self.namespace(namespace, nqn, &mut nsids, seen) {
                Ok(section) => text += &section,
                Err(why) => self.remark(format_args!(
                    "namespace {} of {nqn} was left out: {why}",
                    namespace.nsid
                )),
            }
        }
        Some(text)
    }

    /// Returns the identity of the subsystem towards hosts, and its own limits.
    fn marks(&mut self, from: &Subsystem, nqn: Nqn, seen: &mut Seen) -> String {
        let mut text = String::new();
        for (key, value, longest) in [("serial", &from.serial, 20), ("model", &from.model, 40)] {
            let Some(value) = value else { continue };
            let fits = value.len() <= longest
                && value.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic());
            if !fits {
                self.remark(format_args!("the {key} of {nqn} does not fit its field"));
            } else if key == "serial" && !seen.serials.insert(value.clone()) {
                self.remark(format_args!(
                    "the serial number {value} of {nqn} is another subsystem's too: it got its own"
                ));
            } else {
                let _ = writeln!(text, "{key} = {}", quoted(value));
            }
        }
        match from.cntlids {
            None | Some((1, 65519)) => {}
            Some((first, last)) if (1..=last).contains(&first) && last <= 65519 => {
                let _ = writeln!(text, "cntlids = [{first}, {last}]");
            }
            Some((first, last)) => self.remark(format_args!(
                "the controller ids {first} to {last} of {nqn} are not possible: all are given"
            )),
        }
        let granted = self.limits.io_queues.unwrap_or(16).clamp(1, 256);
        match from.io_queues {
            Some(most @ 1..) if most < granted => {
                let _ = writeln!(text, "io_queues = {most}");
            }
            _ => {}
        }
        text
    }

    /// Returns the valid names, each once.
    fn names(&mut self, names: &[String], nqn: Nqn) -> BTreeSet<Nqn> {
        let mut hosts = BTreeSet::new();
        for name in names {
            match Nqn::new(name) {
                Ok(host) => {
                    hosts.insert(host);
                }
                Err(why) => {
                    self.remark(format_args!("the host {name:?} of {nqn} was left out: {why}"));
                }
            }
        }
        hosts
    }

    fn namespace(
        &mut self,
        from: &Namespace,
        nqn: Nqn,
        nsids: &mut BTreeSet<u64>,
        seen: &mut Seen,
    ) -> Result<String, String> {
        let nsid = from.nsid;
        if !(1..=u64::from(MAX_NSID)).contains(&nsid) {
            return Err(format!("namespace ids are 1 to {MAX_NSID}"));
        }
        if nsids.contains(&nsid) {
            return Err("the id is used twice".to_owned());
        }
        let block = from.block_size_bytes;
        if block != 512 && block != 4096 {
            return Err(format!("blocks have 512 or 4096 bytes, not {block}"));
        }
        let mut text = format!("\n[[subsystem.namespace]]\nnsid = {nsid}\n");
        text += &store(&from.store, block, seen)?;
        nsids.insert(nsid);
        let _ = writeln!(text, "block_size = {block}");
        if from.read_only {
            text += "read_only = true\n";
        }
        for (key, value) in [("uuid", &from.uuid), ("nguid", &from.nguid), ("eui64", &from.eui64)] {
            text += &self.identity(key, value.as_deref(), (nsid, nqn), seen);
        }
        match from.ana_group {
            None | Some(0 | 1) => {}
            Some(group) if group <= ANA_GROUPS.into() => {
                let _ = writeln!(text, "ana_group = {group}");
            }
            Some(group) => self.remark(format_args!(
                "namespace {nsid} of {nqn} was in ANA group {group}; groups are 1 to {ANA_GROUPS}: \
                 it is in group 1"
            )),
        }
        if let Some(hosts) = &from.hosts {
            let _ = writeln!(text, "hosts = {}", hosts_list(&self.names(hosts, nqn)));
        }
        let Limit { iops, bandwidth_bytes } = from.limit;
        if iops.is_some() || bandwidth_bytes.is_some() {
            text += "[subsystem.namespace.limit]\n";
        }
        if let Some(iops) = iops {
            let _ = writeln!(text, "iops = {}", iops.min(u32::MAX.into()));
        }
        if let Some(bytes) = bandwidth_bytes {
            let bytes = Size(bytes.min(i64::MAX as u64));
            let _ = writeln!(text, "bandwidth = {}", quoted(&bytes.to_string()));
        }
        Ok(text)
    }

    /// Returns a line for an identifier if it is not zero, valid, and unique.
    fn identity(
        &mut self,
        key: &str,
        value: Option<&str>,
        (nsid, nqn): (u64, Nqn),
        seen: &mut Seen,
    ) -> String {
        let Some(value) = value else { return String::new() };
        let digits: String = value.chars().filter(|c| !".-:".contains(*c)).collect();
        let digits = digits.to_lowercase();
        if digits.chars().all(|c| c == '0') {
            return String::new();
        }
        let length = if key == "eui64" { 16 } else { 32 };
        let good = digits.len() == length && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
        let written = match Uuid::try_parse(&digits) {
            Ok(uuid) if key == "uuid" => uuid.to_string(),
            _ => digits.clone(),
        };
        if good && seen.ids.insert(format!("{key} {digits}")) {
            return format!("{key} = {}\n", quoted(&written));
        }
        self.remark(format_args!(
            "the {key} {value:?} of namespace {nsid} of {nqn} is {}: it got another one, by which \
             hosts do not know it",
            if good { "used twice" } else { "not one" }
        ));
        String::new()
    }

    /// Returns referrals, keys, and the parameters of authentication.
    fn access(&self) -> String {
        let mut text = String::new();
        for (at, nqn) in &self.referrals {
            let _ = write!(text, "\n[[discovery.referral]]\naddress = \"{}\"\n", at.ip());
            let _ = writeln!(text, "port = {}", at.port());
            if let Some(nqn) = nqn {
                let _ = writeln!(text, "nqn = {}", quoted(nqn.as_str()));
            }
        }
        for Host { nqn, key_file, controller_key_file } in &self.hosts {
            let _ = write!(text, "\n[[host]]\nnqn = {}\n", quoted(nqn.as_str()));
            let _ = writeln!(text, "dhchap_key_file = {}", quoted(key_file));
            if let Some(file) = controller_key_file {
                let _ = writeln!(text, "dhchap_ctrl_key_file = {}", quoted(file));
            }
        }
        let mut lists = String::new();
        for (key, names) in [("hashes", &self.hashes), ("groups", &self.groups)] {
            let names: Vec<String> = names.iter().map(|name| quoted(name)).collect();
            if !names.is_empty() {
                let _ = writeln!(lists, "{key} = [{}]", names.join(", "));
            }
        }
        if lists.is_empty() { text } else { format!("{text}\n[authentication]\n{lists}") }
    }
}

impl Listener {
    fn text(&self) -> String {
        let (ip, port) = (self.at.ip(), self.at.port());
        let mut text =
            format!("[[listener]]\naddress = \"{ip}\"\nport = {port}\nid = {}\n", self.id);
        if !self.ana.is_empty() {
            let states: Vec<String> =
                self.ana.iter().map(|(group, state)| format!("{group} = \"{state}\"")).collect();
            let _ = writeln!(text, "ana = {{ {} }}", states.join(", "));
        }
        text + "\n"
    }
}

fn store(store: &BackingStore, block_bytes: u64, seen: &mut Seen) -> Result<String, String> {
    let (kind, size_bytes) = match store {
        BackingStore::File(path) => {
            let plain: PathBuf = PathBuf::from(path).components().collect();
            if !plain.is_absolute() || plain.file_name().is_none() || path.contains('\0') {
                return Err(format!("{path:?} is no absolute path of a file or device"));
            }
            if !seen.paths.insert(plain) {
                return Err(format!("{path} is another namespace's too, and here has one only"));
            }
            return Ok(format!("path = {}\n", quoted(path)));
        }
        BackingStore::Ram { size_bytes } => ("ram", *size_bytes),
        BackingStore::Null { size_bytes } => ("null", *size_bytes),
    };
    let possible = size_bytes > 0 && size_bytes <= i64::MAX as u64;
    if !possible || !size_bytes.is_multiple_of(block_bytes) {
        return Err(format!("{size_bytes} bytes are not whole blocks"));
    }
    Ok(format!("kind = \"{kind}\"\nsize = {}\n", quoted(&Size(size_bytes).to_string())))
}

fn socket(address: Option<&str>, port: Option<&str>) -> Result<SocketAddr, String> {
    let address = address.unwrap_or_default();
    let Ok(ip) = address.parse::<IpAddr>() else {
        return Err(format!("{address:?} is no IP address"));
    };
    let port = port.map_or(Ok(nvme::PORT), |port| port.parse().map_err(|_| port));
    match port {
        _ if ip.is_multicast() => Err(format!("{ip} is a multicast address")),
        Ok(0) => Err("port 0 is none".to_owned()),
        Ok(port) => Ok(SocketAddr::new(ip, port)),
        Err(port) => Err(format!("{port:?} is no port")),
    }
}

fn hosts_list(hosts: &BTreeSet<Nqn>) -> String {
    let hosts: Vec<String> = hosts.iter().map(|host| quoted(host.as_str())).collect();
    format!("[{}]", hosts.join(", "))
}

/// Quotes a text as in TOML.
fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
