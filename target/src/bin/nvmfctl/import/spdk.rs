//! The format of SPDK: RPC calls that create its configuration, as JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use super::builder::{BackingStore, ConfigBuilder, Limit, Namespace, Subsystem};
use super::json::{at, flag, list, number, text};
use super::{BlockSizeOf, ImportError};

/// The call that limits a block device.
const SET_LIMIT: &str = "bdev_set_qos_limit";

/// A block device of SPDK that can be converted.
struct Bdev {
    store: BackingStore,
    block_size_bytes: u64,
    read_only: bool,
    /// UUID of a namespace on it, unless the namespace has its own.
    uuid: Option<String>,
    limit: Limit,
}

/// Objects that calls refer to by name.
#[derive(Default)]
struct Names {
    bdevs: BTreeMap<String, Bdev>,
    /// Block devices without a known block size.
    guessed: BTreeSet<String>,
    /// Objects that cannot be converted, with a description.
    strange: BTreeMap<String, String>,
    /// Files of keys.
    keys: BTreeMap<String, String>,
    /// Calls without a meaning here.
    ignored: BTreeSet<String>,
}

pub(super) fn read(
    saved: &Value,
    look: BlockSizeOf<'_>,
    draft: &mut ConfigBuilder,
) -> Result<(), ImportError> {
    let parts = list(saved, "subsystems");
    if parts.is_empty() || parts.iter().all(|part| text(part, "subsystem").is_none()) {
        return Err(ImportError::NotThis(
            "this is no configuration of SPDK: it has no list `subsystems` with names and calls",
        ));
    }
    let calls = || parts.iter().flat_map(|part| list(part, "config"));
    let mut names = Names::default();
    // Names first, independent of the order in the file.
    for call in calls() {
        define(call, look, &mut names);
    }
    // Then their limits: namespaces are copies of the block devices.
    for call in calls().filter(|call| text(call, "method").is_some_and(|m| m == SET_LIMIT)) {
        limit(at(call, "params"), &mut names, draft);
    }
    for call in calls() {
        let method = text(call, "method").unwrap_or_default();
        serve(&method, at(call, "params"), &mut names, draft);
    }
    if !names.ignored.is_empty() {
        let ignored: Vec<String> = names.ignored.into_iter().collect();
        draft.remark(format_args!("calls without a counterpart here: {}", ignored.join(", ")));
    }
    Ok(())
}

/// Adds block devices and keys.
fn define(call: &Value, look: BlockSizeOf<'_>, names: &mut Names) {
    let params = at(call, "params");
    let Some(method) = text(call, "method") else { return };
    let Some(name) = text(params, "name") else { return };
    match method.as_str() {
        "bdev_aio_create" | "bdev_uring_create" => {
            let path = text(params, "filename").unwrap_or_default();
            let block = number(params, "block_size").filter(|bytes| *bytes > 0);
            let block = block.or_else(|| look(Path::new(&path)).map(u64::from));
            let store = BackingStore::File(path);
            if block.is_none() {
                names.guessed.insert(name.clone());
            }
            let block_size_bytes = block.unwrap_or(512);
            let read_only = flag(params, "readonly");
            let (uuid, limit) = (text(params, "uuid"), Limit::default());
            names.bdevs.insert(name, Bdev { store, block_size_bytes, read_only, uuid, limit });
        }
        "bdev_malloc_create" | "bdev_null_create" => {
            let block_size_bytes = number(params, "block_size").unwrap_or(512);
            let blocks = number(params, "num_blocks").unwrap_or(0);
            let size_bytes = blocks.saturating_mul(block_size_bytes);
            let malloc = method == "bdev_malloc_create";
            let store = if malloc {
                BackingStore::Ram { size_bytes }
            } else {
                BackingStore::Null { size_bytes }
            };
            let (read_only, uuid, limit) = (false, text(params, "uuid"), Limit::default());
            names.bdevs.insert(name, Bdev { store, block_size_bytes, read_only, uuid, limit });
        }
        "bdev_nvme_attach_controller" => {
            let at = text(params, "traddr").unwrap_or_default();
            names.strange.insert(name, format!("the NVMe device at {at}, held by SPDK's driver"));
        }
        "keyring_file_add_key" => {
            names.keys.insert(name, text(params, "path").unwrap_or_default());
        }
        method if method.starts_with("bdev_") && method.ends_with("_create") => {
            names.strange.insert(name, format!("made by {method}"));
        }
        _ => {}
    }
}

/// Sets the limit of all commands of a block device together. Limits of reads or writes alone
/// have no counterpart.
fn limit(params: &Value, names: &mut Names, draft: &mut ConfigBuilder) {
    let name = text(params, "name").unwrap_or_default();
    let given = |key| number(params, key).filter(|most| *most > 0);
    if let Some(bdev) = names.bdevs.get_mut(&name) {
        bdev.limit = Limit {
            iops: given("rw_ios_per_sec"),
            // A megabyte of SPDK has 1024 KiB.
            bandwidth_bytes: given("rw_mbytes_per_sec").map(|mib| mib.saturating_mul(1 << 20)),
        };
    }
    for key in ["r_mbytes_per_sec", "w_mbytes_per_sec"] {
        if given(key).is_some() {
            draft.remark(format_args!(
                "{key} of {name:?} was left out: a limit here is of reads and writes together"
            ));
        }
    }
}

/// Executes a call on the draft.
fn serve(method: &str, params: &Value, names: &mut Names, draft: &mut ConfigBuilder) {
    match method {
        "bdev_aio_create"
        | "bdev_uring_create"
        | "bdev_malloc_create"
        | "bdev_null_create"
        | "bdev_nvme_attach_controller"
        | "bdev_wait_for_examine"
        | SET_LIMIT
        | "keyring_file_add_key" => {}
        "nvmf_create_transport" => transport(params, draft),
        "nvmf_set_config" => {
            let known = ["sha256", "sha384", "sha512"];
            draft.hashes = chosen(params, "dhchap_digests", &known);
            let known = ["null", "ffdhe2048", "ffdhe3072", "ffdhe4096", "ffdhe6144", "ffdhe8192"];
            draft.groups = chosen(params, "dhchap_dhgroups", &known);
        }
        "nvmf_create_subsystem" => subsystem(params, draft),
        "nvmf_subsystem_allow_any_host" => {
            if let Some(subsystem) = of(params, draft) {
                subsystem.allow_any_host = flag(params, "allow_any_host");
            }
        }
        "nvmf_subsystem_add_host" => host(params, names, draft),
        "nvmf_subsystem_add_ns" => namespace(params, names, draft),
        "nvmf_ns_add_host" => mask(params, draft),
        "nvmf_subsystem_add_listener" => listener(params, draft),
        "nvmf_discovery_add_referral" => {
            let address = at(params, "address");
            if is_rdma(address) {
                let (ip, port) = (text(address, "traddr"), text(address, "trsvcid"));
                let nqn = text(params, "subnqn");
                draft.refer(ip.as_deref(), port.as_deref(), nqn.as_deref());
            } else {
                draft.remark("a referral was left out: it is not RDMA");
            }
        }
        method => {
            names.ignored.insert(method.to_owned());
        }
    }
}

/// Returns the known names of a list, each once.
fn chosen(params: &Value, key: &str, known: &[&str]) -> Vec<String> {
    let mut chosen: Vec<String> = Vec::new();
    for name in list(params, key).iter().filter_map(Value::as_str) {
        if known.contains(&name) && chosen.iter().all(|old| old != name) {
            chosen.push(name.to_owned());
        }
    }
    chosen
}

fn is_rdma(address: &Value) -> bool {
    text(address, "trtype").is_some_and(|kind| kind.eq_ignore_ascii_case("rdma"))
}

fn transport(params: &Value, draft: &mut ConfigBuilder) {
    if !is_rdma(params) {
        return;
    }
    let limits = &mut draft.limits;
    limits.queue_depth = number(params, "max_queue_depth");
    limits.in_capsule_bytes = number(params, "in_capsule_data_size");
    limits.mdts_bytes = number(params, "max_io_size");
    // The older key includes the admin queue.
    limits.io_queues = number(params, "max_io_qpairs_per_ctrlr")
        .or_else(|| number(params, "max_qpairs_per_ctrlr").map(|all| all.saturating_sub(1)))
        .filter(|queues| *queues > 0);
}

fn subsystem(params: &Value, draft: &mut ConfigBuilder) {
    let Some(name) = text(params, "nqn") else { return };
    if flag(params, "passthrough") {
        draft.remark(format_args!("{name} handed commands through; nvmfd does not"));
    }
    draft.subsystems.push(Subsystem {
        name,
        allow_any_host: flag(params, "allow_any_host"),
        serial: text(params, "serial_number"),
        model: text(params, "model_number"),
        cntlids: number(params, "min_cntlid").zip(number(params, "max_cntlid")),
        max_nsid: number(params, "max_namespaces"),
        ..Subsystem::default()
    });
}

/// Returns the subsystem that a call refers to.
fn of<'d>(params: &Value, draft: &'d mut ConfigBuilder) -> Option<&'d mut Subsystem> {
    let nqn = text(params, "nqn")?;
    draft.subsystems.iter_mut().find(|subsystem| subsystem.name == nqn)
}

fn host(params: &Value, names: &Names, draft: &mut ConfigBuilder) {
    let Some(host) = text(params, "host") else { return };
    if let Some(subsystem) = of(params, draft) {
        subsystem.hosts.push(host.clone());
    }
    if text(params, "psk").is_some() {
        draft.remark(format_args!("the TLS key of {host} was left out: nvmfd has no TLS"));
    }
    let mut file = |key| {
        let name = text(params, key)?;
        let path = names.keys.get(&name).cloned();
        Some(path.unwrap_or_else(|| {
            draft.remark(format_args!("the key {name:?} of {host} is in no file that is named"));
            "/etc/nvmfd/keys/missing".to_owned()
        }))
    };
    let (key, controller) = (file("dhchap_key"), file("dhchap_ctrlr_key"));
    if let Some(key) = key {
        draft.remark(format_args!("{key}, the key of {host}, must be readable for nvmfd alone"));
        draft.host(&host, key, controller);
    }
}

fn namespace(params: &Value, names: &Names, draft: &mut ConfigBuilder) {
    let from = at(params, "namespace");
    let bdev = text(from, "bdev_name").unwrap_or_default();
    let nqn = text(params, "nqn").unwrap_or_default();
    let Some(found) = names.bdevs.get(&bdev) else {
        // A device gives each of its namespaces a name: Nvme0 becomes Nvme0n1.
        let mut strange = names.strange.iter();
        let strange = strange.find(|(name, _)| bdev.starts_with(name.as_str()));
        let what = strange.map_or("not described in the file", |(_, what)| what);
        draft.remark(format_args!(
            "a namespace of {nqn} was left out: {bdev:?} is {what}; with the kernel's driver on \
             the device, write `path = \"/dev/...\"`"
        ));
        return;
    };
    if names.guessed.contains(&bdev)
        && let BackingStore::File(path) = &found.store
    {
        draft.remark(format_args!(
            "{path} is not on this machine: 512 bytes a block are a guess; compare with what SPDK \
             says of {bdev:?} (`rpc.py bdev_get_bdevs`) before a host uses it"
        ));
    }
    let (store, block_size_bytes) = (found.store.clone(), found.block_size_bytes);
    let (read_only, limit) = (found.read_only, found.limit);
    let uuid = text(from, "uuid").or_else(|| found.uuid.clone());
    let hidden = flag(from, "no_auto_visible");
    let reserved = text(from, "ptpl_file").is_some();
    let Some(subsystem) = of(params, draft) else { return };
    let free = |nsid: &u64| subsystem.namespaces.iter().all(|old| old.nsid != *nsid);
    // Without an id, or with 0, SPDK uses the first free one.
    let nsid = number(from, "nsid").filter(|nsid| *nsid > 0);
    let nsid = nsid.or_else(|| (1..).find(free)).unwrap_or(0);
    subsystem.namespaces.push(Namespace {
        nsid,
        store,
        block_size_bytes,
        read_only,
        uuid,
        nguid: text(from, "nguid"),
        eui64: text(from, "eui64"),
        ana_group: number(from, "anagrpid"),
        hosts: hidden.then(Vec::new),
        limit,
    });
    if reserved {
        draft.remark(format_args!(
            "reservations kept for namespace {nsid} of {nqn} are not copied: hosts register again"
        ));
    }
}

/// Adds a host that sees a namespace with restricted access.
fn mask(params: &Value, draft: &mut ConfigBuilder) {
    let (nsid, host) = (number(params, "nsid"), text(params, "host"));
    let Some(subsystem) = of(params, draft) else { return };
    let namespace = subsystem.namespaces.iter_mut().find(|old| Some(old.nsid) == nsid);
    if let (Some(namespace), Some(host)) = (namespace, host) {
        namespace.hosts.get_or_insert_default().push(host);
    }
}

fn listener(params: &Value, draft: &mut ConfigBuilder) {
    let address = at(params, "listen_address");
    let nqn = text(params, "nqn").unwrap_or_default();
    let kind = text(address, "trtype").unwrap_or_default().to_lowercase();
    let ip = text(address, "traddr");
    let shown = ip.clone().unwrap_or_default();
    if kind == "tcp" {
        draft.remark(format_args!(
            "{nqn} was offered by NVMe/TCP at {shown}; nvmfd speaks RDMA: hosts must connect with \
             `-t rdma`"
        ));
    } else if kind != "rdma" {
        draft.remark(format_args!("a listener of {nqn} was left out: {kind:?} is not RDMA"));
        return;
    }
    if flag(params, "secure_channel") {
        draft.remark(format_args!("{nqn} wanted TLS at {shown}; nvmfd has none"));
    }
    let port = text(address, "trsvcid");
    let Some(id) = draft.listen(None, ip.as_deref(), port.as_deref()) else { return };
    if let Some(subsystem) = of(params, draft) {
        subsystem.listeners.insert(id);
    }
}
