//! The format of nvmetcli: directories and files below `/sys/kernel/config/nvmet`, as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::builder::{BackingStore, ConfigBuilder, Namespace, Subsystem};
use super::json::{at, flag, list, number, text};
use super::{BlockSizeOf, ImportError};

/// Default number of I/O queues of the kernel's target.
const DEFAULT_QID_MAX: u64 = 128;

pub(super) fn read(
    saved: &Value,
    look: BlockSizeOf<'_>,
    draft: &mut ConfigBuilder,
) -> Result<(), ImportError> {
    if !at(saved, "ports").is_array() || !at(saved, "subsystems").is_array() {
        return Err(ImportError::NotThis(
            "this is no file of nvmetcli: it has no lists `ports` and `subsystems`",
        ));
    }
    let mut offered: BTreeMap<String, BTreeSet<u16>> = BTreeMap::new();
    for saved in list(saved, "ports") {
        let Some(id) = port(saved, draft) else { continue };
        for name in list(saved, "subsystems").iter().filter_map(Value::as_str) {
            offered.entry(name.to_owned()).or_default().insert(id);
        }
    }
    for saved in list(saved, "hosts") {
        host(saved, draft);
    }
    for saved in list(saved, "subsystems") {
        let Some(name) = text(saved, "nqn") else {
            draft.remark("a subsystem without a name was left out");
            continue;
        };
        let listeners = offered.remove(&name).unwrap_or_default();
        subsystem(saved, Subsystem { name, listeners, ..Subsystem::default() }, look, draft);
    }
    for name in offered.keys() {
        draft.remark(format_args!("a port offers {name:?}, which the file does not describe"));
    }
    Ok(())
}

/// Reads a port; returns the id of its listener.
fn port(saved: &Value, draft: &mut ConfigBuilder) -> Option<u16> {
    let (address, param) = (at(saved, "addr"), at(saved, "param"));
    let id = number(saved, "portid");
    let name = id.map_or("a port".to_owned(), |id| format!("port {id}"));
    let transport = text(address, "trtype").unwrap_or_default().to_lowercase();
    match transport.as_str() {
        "rdma" => {}
        "tcp" => draft.remark(format_args!(
            "{name} was NVMe/TCP; nvmfd speaks RDMA: hosts must connect with `-t rdma`"
        )),
        _ => {
            draft.remark(format_args!(
                "{name} was left out: its transport is {transport:?}, and nvmfd speaks RDMA"
            ));
            return None;
        }
    }
    let (ip, service) = (text(address, "traddr"), text(address, "trsvcid"));
    let listener = draft.listen(id, ip.as_deref(), service.as_deref())?;
    if text(address, "treq").is_some_and(|treq| treq == "required") {
        draft.remark(format_args!("{name} required a secure channel (TLS); nvmfd has none"));
    }
    if text(address, "tsas").is_some_and(|tsas| tsas.starts_with("tls")) {
        draft.remark(format_args!("{name} used TLS; nvmfd has none"));
    }
    if flag(param, "pi_enable") {
        draft.remark(format_args!("{name} had protection information on; nvmfd has none"));
    }
    // The sizes for TCP are not appropriate for RDMA.
    if transport == "rdma" {
        let limits = &mut draft.limits;
        limits.in_capsule_bytes =
            limits.in_capsule_bytes.max(number(param, "inline_data_size").filter(|n| *n > 0));
        limits.queue_depth =
            limits.queue_depth.max(number(param, "max_queue_size").filter(|n| *n > 0));
    }
    for group in list(saved, "ana_groups") {
        let state = text(at(group, "ana"), "state");
        if let (Some(group), Some(state)) = (number(group, "grpid"), state) {
            draft.ana(listener, group, &state);
        }
    }
    for referral in list(saved, "referrals") {
        refer(referral, draft);
    }
    Some(listener)
}

fn refer(saved: &Value, draft: &mut ConfigBuilder) {
    let address = at(saved, "addr");
    let transport = text(address, "trtype").unwrap_or_default();
    if transport != "rdma" || !flag(saved, "enable") {
        let what = if transport == "rdma" { "is not enabled" } else { "is not RDMA" };
        let to = text(address, "traddr").unwrap_or_default();
        draft.remark(format_args!("the referral to {to} was left out: it {what}"));
        return;
    }
    let (ip, service) = (text(address, "traddr"), text(address, "trsvcid"));
    draft.refer(ip.as_deref(), service.as_deref(), None);
}

/// A host that has a key there must have one here; the key itself has to be copied to a file by hand.
fn host(saved: &Value, draft: &mut ConfigBuilder) {
    let keys = [saved, at(saved, "dhchap")];
    let has = |names: [&str; 2]| {
        keys.iter().any(|keys| names.iter().any(|name| text(keys, name).is_some()))
    };
    let Some(nqn) = text(saved, "nqn") else { return };
    if !has(["dhchap_key", "key"]) {
        return;
    }
    let file = key_file(&nqn);
    draft.remark(format_args!("the key of {nqn} is not copied: write it into {file}, mode 600"));
    let controller = has(["dhchap_ctrl_key", "ctrl_key"]).then(|| format!("{file}-ctrl"));
    if let Some(controller) = &controller {
        draft.remark(format_args!("so its controller key: {controller}"));
    }
    draft.host(&nqn, file, controller);
}

fn key_file(nqn: &str) -> String {
    let plain = |c: char| if c.is_ascii_alphanumeric() || "-.".contains(c) { c } else { '_' };
    let name: String = nqn.chars().map(plain).collect();
    format!("/etc/nvmfd/keys/{name}")
}

fn subsystem(saved: &Value, mut into: Subsystem, look: BlockSizeOf<'_>, draft: &mut ConfigBuilder) {
    let attributes = at(saved, "attr");
    into.allow_any_host = flag(attributes, "allow_any_host");
    into.hosts = list(saved, "allowed_hosts")
        .iter()
        .filter_map(|host| host.as_str().map(str::to_owned))
        .collect();
    into.serial = text(attributes, "serial");
    into.model = text(attributes, "model");
    into.cntlids = number(attributes, "cntlid_min").zip(number(attributes, "cntlid_max"));
    into.io_queues =
        number(attributes, "qid_max").filter(|most| *most > 0 && *most != DEFAULT_QID_MAX);
    if flag(attributes, "pi_enable") {
        draft.remark(format_args!("{} had protection information on; nvmfd has none", into.name));
    }
    if flag(at(saved, "passthru"), "enable") {
        draft.remark(format_args!(
            "{} handed a whole controller through; nvmfd serves block devices and files",
            into.name
        ));
    }
    for namespace in list(saved, "namespaces") {
        into.namespaces.extend(self::namespace(namespace, &into.name, look, draft));
    }
    draft.subsystems.push(into);
}

fn namespace(
    saved: &Value,
    subsystem: &str,
    look: BlockSizeOf<'_>,
    draft: &mut ConfigBuilder,
) -> Option<Namespace> {
    let device = at(saved, "device");
    let nsid = number(saved, "nsid").unwrap_or(0);
    let path = text(device, "path").unwrap_or_default();
    if !flag(saved, "enable") {
        draft.remark(format_args!(
            "namespace {nsid} of {subsystem} ({path}) was left out: it is not enabled"
        ));
        return None;
    }
    let block_size_bytes = match look(Path::new(&path)) {
        Some(bytes) => bytes,
        None if path.starts_with("/dev/") => {
            draft.remark(format_args!(
                "{path} is not on this machine: 512 bytes a block are a guess; compare with \
                 `blockdev --getss {path}` before a host uses it"
            ));
            512
        }
        // For a file the kernel's target uses the block size of the file system, at most 4096.
        None => 4096,
    };
    Some(Namespace {
        nsid,
        store: BackingStore::File(path),
        block_size_bytes: block_size_bytes.into(),
        uuid: text(device, "uuid"),
        nguid: text(device, "nguid"),
        ana_group: number(saved, "ana_grpid"),
        ..Namespace::default()
    })
}
