//! From text to validated types: every rule of the configuration.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::ops::Range;
use std::path::{Path, PathBuf};

use nvme::Nqn;

use crate::blockdev::{InjectedFault, IoEngine};
use crate::core::qpair::DATA_FOR_ADMIN_BYTES;
use crate::core::subsystem::ana::ANA_GROUPS;
use crate::core::subsystem::{ListenerConfig, MAX_NSID};
use crate::plural;

use super::access::{discovery, hosts, offer};
use super::authentication::authentication;
use super::ceph::{CephConfig, ceph, image};
use super::derived_ids::{UsedIds, derived_serial, derived_uuid, identity};
use super::files::merged;
use super::group::group;
use super::listener::listener;
use super::management_api::management;
use super::missing::Missing;
use super::ns_management::managed;
use super::shutdown::stop;
use super::size::{SIZE_FORM, Size};
use super::soft::soft;
use super::table_reader::{At, Diagnostics, TableReader};
use super::telemetry::observe;
use super::{
    Auto, CaptureConfig, Config, ConfigErrors, ConfigFiles, Limits, MemoryConfig, NamespaceConfig,
    NamespaceKind, Origins, Provider, ReactorConfig, SubsystemConfig,
};

/// Receives that a reactor reserves for admin queues and for connections that are being established.
const SPARE_RECEIVES: u32 = 64;

/// The largest MDTS.
const MOST_MDTS_BYTES: u32 = 4 << 20;

/// Default size limit of a capture.
const CAPTURE_LIMIT_BYTES: u64 = 1 << 30;

pub(super) const NQN_FORM: &str = "a name such as \"nqn.2026-11.org.example:disk1\"";

/// Reads all texts of a configuration.
pub(super) fn read(sources: &ConfigFiles) -> Result<Config, ConfigErrors> {
    read_with(sources, Diagnostics::new(sources))
}

/// As [`read`], for edited texts: see [`Diagnostics::of_edited`].
pub(super) fn read_edited(
    sources: &ConfigFiles,
    origins: &Origins,
) -> Result<Config, ConfigErrors> {
    read_with(sources, Diagnostics::of_edited(sources, origins))
}

fn read_with<'t>(
    sources: &'t ConfigFiles,
    report: Diagnostics<'t>,
) -> Result<Config, ConfigErrors> {
    let table = merged(sources, &report);
    if !report.is_empty() {
        // The meaning of an invalid text is unknown: do not report errors that result from it.
        return Err(report.finish());
    }
    let span = table.span();
    let config = root(TableReader::new(table.into_inner(), span, "the file", &report));
    if report.is_empty() { Ok(config) } else { Err(report.finish()) }
}

pub(super) fn root(mut section: TableReader<'_>) -> Config {
    let include = include(&mut section);
    let provider = one_of("provider", &Provider::ALL, &mut section);
    let reactor = reactor(section.table("reactor", "[reactor]"));
    let limits = limits(section.table("limits", "[limits]"));
    let memory = memory(section.table("memory", "[memory]"), &limits);

    let mut listeners: Vec<At<ListenerConfig>> = Vec::new();
    for table in section.tables("listener", "[[listener]]") {
        listener(table, &mut listeners);
    }

    let quotas = super::qos::limits(&mut section);
    let mut seen = UsedNames::default();
    let tables = section.tables("subsystem", "[[subsystem]]");
    let names = quotas.iter().map(|quota| quota.name.clone()).collect();
    let ceph = ceph(&mut section);
    let group = group(&mut section);
    let scene = Scene { limits, listeners, names, ceph };
    let subsystems =
        tables.into_iter().filter_map(|each| subsystem(each, &scene, &mut seen)).collect();
    let state_directory = state_directory(&mut section);
    let discovery = discovery(&mut section, &seen.nqns);

    let capture = capture(&mut section);
    let authentication = authentication(&mut section);
    let management = management(&mut section);
    let missing = one_of("missing", &Missing::ALL, &mut section);
    let observe = observe(&mut section);
    let soft = soft(&mut section);
    let stop = stop(&mut section);
    section.end();
    let Scene { limits, listeners, ceph, .. } = scene;
    let listeners = listeners.into_iter().map(|listener| listener.value).collect();
    let mut config = Config {
        include,
        provider,
        reactor,
        memory,
        limits,
        listeners,
        subsystems,
        missing,
        discovery,
        quotas,
        capture,
        state_directory,
        ceph,
        group: None,
        authentication,
        management,
        observe,
        soft,
        stop,
    };
    config.set_client_addresses();
    if let Some(group) = group {
        config.check_group(&group, section.report);
        config.group = Some(group.value);
        config.set_group();
    }
    config
}

/// Checks `include`; the files were selected before (`config/files.rs`).
fn include(section: &mut TableReader<'_>) -> Option<PathBuf> {
    let form = "the path of a directory, such as \"conf.d\", which is beside this file";
    let At { value, span } = section.take::<PathBuf>("include", form)?;
    if value.as_os_str().is_empty() {
        section.add(&span, "`include` names no directory", format!("write {form}"));
    }
    Some(value)
}

fn reactor(mut section: TableReader<'_>) -> ReactorConfig {
    let mut reactor = ReactorConfig::default();
    let form = "a number from 1 to 256, or \"auto\"";
    let is_valid = |threads: &Auto| matches!(threads, Auto::Auto | Auto::Number(1..=256));
    reactor.threads = section.checked("threads", form, is_valid).unwrap_or(reactor.threads);
    let form = "a list of CPU numbers, such as [2, 3]";
    if let Some(cpus) = section.take::<Vec<u32>>("cpus", form) {
        let distinct: BTreeSet<u32> = cpus.value.iter().copied().collect();
        if distinct.len() < cpus.value.len() {
            section.add(&cpus.span, "a CPU is listed twice", "list every CPU once");
        }
        if let Auto::Number(count) = reactor.threads
            && cpus.value.len() < count as usize
        {
            let cpus_listed = plural::count(cpus.value.len(), "CPU");
            let what = format!("{cpus_listed} for {}", plural::count(count, "reactor"));
            section.add(&cpus.span, what, "list at least one CPU a reactor, or leave `cpus` out");
        }
        if cpus.value.iter().any(|cpu| *cpu >= 1024) {
            section.add(&cpus.span, "a CPU number is 1024 or more", format!("write {form}"));
        }
        if cpus.value.is_empty() {
            section.add(&cpus.span, "the list of CPUs is empty", "leave `cpus` out to pin nothing");
        }
        reactor.cpus = cpus.value;
    }
    let form = "microseconds from 0 to 1000000, or \"auto\"";
    let is_valid = |spin: &Auto| matches!(spin, Auto::Auto | Auto::Number(0..=1_000_000));
    reactor.spin = section.checked("spin_us", form, is_valid).unwrap_or(reactor.spin);
    reactor.io_engine = one_of("io_engine", &IoEngine::ALL, &mut section);
    section.end();
    reactor
}

/// Reads a number of the section within its bounds, or returns its default.
pub(super) fn bounded(
    section: &mut TableReader<'_>,
    key: &'static str,
    bounds: Range<u32>,
    default: u32,
) -> u32 {
    let form = format!("a number from {} to {}", bounds.start, bounds.end);
    let is_valid = |value: &u32| (bounds.start..=bounds.end).contains(value);
    section.checked(key, &form, is_valid).unwrap_or(default)
}

fn limits(mut section: TableReader<'_>) -> Limits {
    let defaults = Limits::default();
    let mut small =
        |key, bounds, default: u16| bounded(&mut section, key, bounds, default.into()) as u16;
    let queue_depth = small("queue_depth", 2..1024, defaults.queue_depth);
    let io_queues = small("io_queues", 1..256, defaults.io_queues);
    let controllers = small("controllers", 1..4096, defaults.controllers);

    let form = "0 or a multiple of \"4KiB\", at most \"64KiB\"";
    let is_valid = |Size(bytes): &Size| *bytes <= 65536 && bytes.is_multiple_of(4096);
    let in_capsule = section.checked("in_capsule", form, is_valid);
    let in_capsule_bytes = in_capsule.map_or(defaults.in_capsule_bytes, |Size(bytes)| bytes as u32);
    let mdts_bytes = mdts(&mut section, MOST_MDTS_BYTES).unwrap_or(defaults.mdts_bytes);
    section.end();
    Limits { queue_depth, io_queues, in_capsule_bytes, mdts_bytes, controllers }
}

/// The key `mdts` in bytes, if present.
pub(super) fn mdts(section: &mut TableReader<'_>, most_bytes: u32) -> Option<u32> {
    // 4 KiB would be MDTS 0 on the wire, which means "no limit".
    let form = format!("a power of two from \"8KiB\" to \"{}\"", Size(most_bytes.into()));
    let bounds = 8192..=most_bytes.into();
    let is_valid = |Size(bytes): &Size| bounds.contains(bytes) && bytes.is_power_of_two();
    section.checked("mdts", &form, is_valid).map(|Size(bytes)| bytes as u32)
}

fn memory(mut section: TableReader<'_>, limits: &Limits) -> MemoryConfig {
    let mut memory = MemoryConfig::default();
    let floor = 2 * u64::from(limits.mdts_bytes) + DATA_FOR_ADMIN_BYTES;
    let at = match section.take("data", SIZE_FORM) {
        Some(At { value: Size(bytes), span }) => {
            memory.data_bytes = bytes;
            span
        }
        None => section.span().clone(),
    };
    if memory.data_bytes < floor || memory.data_bytes > 1 << 40 {
        let what = format!("`data` is {}", Size(memory.data_bytes));
        let remedy = format!("write at least {}, which is twice `mdts` and a reserve", Size(floor));
        section.add(&at, what, remedy + "; at most 1TiB");
    }
    let form = "a number of receive buffers, at most 1048576";
    let at = match section.take::<u32>("receives", form) {
        Some(At { value, span }) => {
            memory.receives = value;
            span
        }
        None => section.span().clone(),
    };
    let floor = u32::from(limits.queue_depth) + SPARE_RECEIVES;
    if memory.receives < floor || memory.receives > 1 << 20 {
        let what = format!("`receives` is {}", memory.receives);
        let remedy = format!(
            "write at least {floor} (`queue_depth` and {SPARE_RECEIVES} to spare), at most 1048576"
        );
        section.add(&at, what, remedy);
    }
    section.end();
    memory
}

fn capture(root: &mut TableReader<'_>) -> Option<CaptureConfig> {
    if !root.has("capture") {
        return None;
    }
    let mut section = root.table("capture", "[capture]");
    let form = "an absolute path, such as \"/var/lib/nvmfd/packets.pcapng\"";
    let path = section.need::<PathBuf>("path", form);
    let payload = section.flag("payload", false);
    let limit = section.take::<Size>("limit", SIZE_FORM);
    section.end();
    let path = path?;
    if !path.value.is_absolute() {
        section.add(&path.span, "the path is not absolute", format!("write {form}"));
    }
    let limit_bytes = limit.map_or(CAPTURE_LIMIT_BYTES, |at| at.value.0);
    Some(CaptureConfig { path: path.value, payload, limit_bytes })
}

fn state_directory(root: &mut TableReader<'_>) -> Option<PathBuf> {
    let form = "the absolute path of a directory, such as \"/var/lib/nvmfd\"";
    let path = root.take::<PathBuf>("state_directory", form)?;
    if !path.value.is_absolute() {
        root.add(&path.span, "the path is not absolute", format!("write {form}"));
    }
    Some(path.value)
}

/// Names and listeners that subsystems refer to.
struct Scene {
    limits: Limits,
    listeners: Vec<At<ListenerConfig>>,
    /// Names of `[[qos]]`.
    names: Vec<String>,
    ceph: CephConfig,
}

/// Names that may occur only once, with the place of the first.
#[derive(Default)]
struct UsedNames {
    nqns: Vec<At<Nqn>>,
    paths: Vec<At<PathBuf>>,
    ids: UsedIds,
    serials: Vec<At<String>>,
    directories: Vec<At<PathBuf>>,
}

/// Adds `value` to `seen`, or reports that it is used twice.
pub(super) fn once<T: PartialEq>(
    seen: &mut Vec<At<T>>,
    value: T,
    span: &Range<usize>,
    (what, remedy): (&str, &str),
    report: &Diagnostics<'_>,
) {
    if let Some(first) = seen.iter().find(|old| old.value == value) {
        let first = report.shown(&first.span, span);
        report.add(span, format!("{what} is used twice, first in {first}"), remedy);
    } else {
        seen.push(At { value, span: span.clone() });
    }
}

fn subsystem(
    mut section: TableReader<'_>,
    scene: &Scene,
    seen: &mut UsedNames,
) -> Option<SubsystemConfig> {
    let nqn = section.need::<String>("nqn", NQN_FORM);
    let nqn = nqn.and_then(|at| name(at, section.report));
    if let Some(nqn) = &nqn {
        if nqn.value.is_discovery() {
            let what = "this is the name of the discovery service, which every listener has";
            section.add(&nqn.span, what, format!("write {NQN_FORM}"));
        }
        let words = ("this NQN", "give each [[subsystem]] its own `nqn`");
        once(&mut seen.nqns, nqn.value, &nqn.span, words, section.report);
    }

    let allow_any_host = section.flag("allow_any_host", false);
    let hosts = hosts(&mut section).unwrap_or_default();
    let mut offer = offer(&mut section, &scene.listeners, &scene.limits);

    let serial = printable(&mut section, "serial", 20);
    if let Some(serial) = &serial {
        let words = ("this serial number", "give each subsystem its own, or leave `serial` out");
        once(&mut seen.serials, serial.value.clone(), &serial.span, words, section.report);
    }
    let model = printable(&mut section, "model", 40);

    let mut nsids = Vec::new();
    let mut namespaces = Vec::new();
    for mut table in section.tables("namespace", "[[subsystem.namespace]]") {
        let nqn = nqn.as_ref().map(|nqn| nqn.value);
        let (span, seen_by) = (table.span().clone(), self::hosts(&mut table));
        let Some(new) = namespace(table, nqn.as_ref(), &mut nsids, (scene, seen)) else {
            continue;
        };
        if new.nsid > offer.max_nsid {
            let what = format!("namespace {} is beyond `max_nsid`", new.nsid);
            section.add(&span, what, format!("write an nsid up to {}", offer.max_nsid));
        }
        offer.masks.extend(seen_by.map(|hosts| (new.nsid, hosts)));
        namespaces.push(new);
    }
    let managed = managed(&mut section, &mut seen.directories, &scene.ceph);
    section.end();

    let nqn = nqn?.value;
    Some(SubsystemConfig {
        nqn,
        allow_any_host,
        hosts,
        offer,
        serial: serial.map_or_else(|| derived_serial(&nqn), |serial| serial.value),
        model: model.map_or_else(|| "nvmfd".to_owned(), |model| model.value),
        namespaces,
        managed,
    })
}

pub(super) fn name(at: At<String>, report: &Diagnostics<'_>) -> Option<At<Nqn>> {
    match at.value.parse() {
        Ok(Nqn::UNNAMED) => {
            let what = "the NQN of the nil UUID is that of hosts without a name";
            report.add(&at.span, what.to_owned(), format!("write {NQN_FORM}"));
            None
        }
        Ok(value) => Some(At { value, span: at.span }),
        Err(error) => {
            let error: nvme::NqnError = error;
            report.add(&at.span, format!("not an NQN: {error}"), format!("write {NQN_FORM}"));
            None
        }
    }
}

fn printable(
    section: &mut TableReader<'_>,
    key: &'static str,
    longest: usize,
) -> Option<At<String>> {
    let form = format!("1 to {longest} printable ASCII characters, no space at either end");
    let at = section.take::<String>(key, &form)?;
    let good = |text: &str| {
        (1..=longest).contains(&text.len())
            && text.bytes().all(|byte| byte == b' ' || byte.is_ascii_graphic())
            && text.trim() == text
    };
    if good(&at.value) {
        return Some(at);
    }
    section.add(&at.span, format!("`{key}` does not fit its field"), format!("write {form}"));
    None
}

fn namespace(
    mut section: TableReader<'_>,
    nqn: Option<&Nqn>,
    nsids: &mut Vec<At<u32>>,
    (scene, seen): (&Scene, &mut UsedNames),
) -> Option<NamespaceConfig> {
    let nsid = nsid(&mut section, nsids);
    let block_size_bytes = block_size(&mut section);
    let size = size(&mut section, block_size_bytes);
    let kind = kind(&mut section, size, (scene, seen));
    let read_only = section.flag("read_only", false);
    if let Some(NamespaceKind::Rbd { image, .. }) = &kind
        && image.snapshot.is_some()
        && !read_only
    {
        let what = format!("{image} is a snapshot, which does not change");
        section.add(section.span(), what, "write `read_only = true`, or serve a clone of it");
    }
    let identity = identity(&mut section, &mut seen.ids);
    let ana_group = bounded(&mut section, "ana_group", 1..ANA_GROUPS, 1);
    let allow_format = section.flag("allow_format", false);
    let write_uncorrectable = section.flag("write_uncorrectable", false);
    if matches!(kind, Some(NamespaceKind::Rbd { .. })) && (allow_format || write_uncorrectable) {
        let what = "an RBD image has neither `allow_format` nor `write_uncorrectable`";
        section.add(section.span(), what, "remove it");
    }
    let not_shared = if write_uncorrectable {
        Some("`write_uncorrectable`")
    } else if allow_format {
        Some("`allow_format`")
    } else {
        let is_file = |kind: &NamespaceKind| matches!(kind, NamespaceKind::File { .. });
        kind.as_ref().is_some_and(|kind| !is_file(kind)).then_some("its kind")
    };
    let shared = shared(&mut section, not_shared);
    let (limit, shared_limit) = super::qos::of_namespace(&mut section, &scene.names);
    let fault = one_of("fault", &InjectedFault::ALL, &mut section);
    section.end();

    let (nsid, kind) = (nsid?, kind?);
    let uuid = identity.uuid.unwrap_or_else(|| derived_uuid(nqn, nsid, &kind));
    Some(NamespaceConfig {
        nsid,
        kind,
        block_size_bytes: block_size_bytes?,
        uuid,
        nguid: identity.nguid.unwrap_or(uuid.into_bytes()),
        eui64: identity.eui64,
        read_only,
        ana_group,
        allow_format,
        write_uncorrectable,
        limit,
        shared_limit,
        fault,
        shared,
    })
}

/// The nsid, unique in its subsystem.
fn nsid(section: &mut TableReader<'_>, nsids: &mut Vec<At<u32>>) -> Option<u32> {
    let form = format!("a number from 1 to {MAX_NSID}");
    let At { value, span } = section.need::<u32>("nsid", &form)?;
    if !(1..=MAX_NSID).contains(&value) {
        section.add(&span, format!("{value} cannot be an nsid"), format!("write {form}"));
        return None;
    }
    let words = ("this nsid", "give each namespace of a subsystem its own `nsid`");
    once(nsids, value, &span, words, section.report);
    Some(value)
}

/// The block size; `None` after an error.
fn block_size(section: &mut TableReader<'_>) -> Option<u32> {
    match section.take::<u32>("block_size", "512 or 4096") {
        Some(At { value, span }) if value != 512 && value != 4096 => {
            section.add(&span, format!("blocks of {value} bytes"), "write 512 or 4096");
            None
        }
        block => Some(block.map_or(4096, |block| block.value)),
    }
}

/// The size, a whole number of blocks.
fn size(section: &mut TableReader<'_>, block_size_bytes: Option<u32>) -> Option<At<Size>> {
    let size = section.take::<Size>("size", SIZE_FORM)?;
    let Size(bytes) = size.value;
    if let Some(block) = block_size_bytes
        && (bytes == 0 || !bytes.is_multiple_of(block.into()))
    {
        let what = format!("{} is not a size of whole blocks", size.value);
        let least = bytes.checked_next_multiple_of(block.into()).unwrap_or(bytes);
        let remedy = format!("write a multiple of {block}, such as {}", least.max(block.into()));
        section.add(&size.span, what, remedy);
    }
    Some(size)
}

/// Whether several daemons serve the namespace; reports an error if the setting `not_shared` excludes that.
fn shared(section: &mut TableReader<'_>, not_shared: Option<&str>) -> bool {
    let at = section.take::<bool>("shared", "true or false").filter(|at| at.value);
    if let (Some(At { span, .. }), Some(other)) = (&at, not_shared) {
        let what = format!("no other daemon would know of {other}");
        section.add(span, what, "remove one of the two");
    }
    at.is_some()
}

/// Reads one of `all` by its name.
pub(super) fn one_of<T: Copy + Default + Display>(
    key: &'static str,
    all: &[T],
    section: &mut TableReader<'_>,
) -> T {
    let form: Vec<String> = all.iter().map(|one| format!("\"{one}\"")).collect();
    let form = form.join(", ");
    let Some(At { value, span }) = section.take::<String>(key, &form) else {
        return T::default();
    };
    let one = all.iter().find(|one| one.to_string() == value);
    if one.is_none() {
        section.add(&span, format!("`{key}` is {value:?}"), format!("write one of {form}"));
    }
    one.copied().unwrap_or_default()
}

fn kind(
    section: &mut TableReader<'_>,
    size: Option<At<Size>>,
    (scene, seen): (&Scene, &mut UsedNames),
) -> Option<NamespaceKind> {
    let form = "\"file\" (also for block devices), \"rbd\", \"ram\" or \"null\"";
    let kind = section.take::<String>("kind", form);
    let (kind, kind_span) = match kind {
        Some(At { value, span }) => (value, Some(span)),
        None => ("file".to_owned(), None),
    };
    if let Some(size) = size.as_ref().filter(|_| kind == "rbd") {
        let remedy = "remove `size`; `rbd resize` changes the image";
        section.add(&size.span, "an RBD image is as large as it is", remedy);
    }
    let size = size.map(|size| size.value.0);
    let at = kind_span.unwrap_or_else(|| section.span().clone());
    match kind.as_str() {
        "file" => {
            let form = "the absolute path of a file or block device";
            let path = section.need::<PathBuf>("path", form)?;
            let plain = plain_path(&path.value);
            if !path.value.is_absolute() {
                let what = format!("`path` is {:?}, which depends on a directory", path.value);
                section.add(&path.span, what, format!("write {form}"));
            } else if plain.file_name().is_none() || path.value.to_string_lossy().contains('\0') {
                let what = format!("`path` is {:?}, which names no file", path.value);
                section.add(&path.span, what, format!("write {form}"));
            }
            let words = ("this path", "give each namespace its own file or device");
            once(&mut seen.paths, plain, &path.span, words, section.report);
            Some(NamespaceKind::File { path: path.value, size })
        }
        "rbd" => {
            let At { value: image, span } = image(section)?;
            let words = ("this image", "give each namespace its own image");
            once(&mut seen.paths, image.path(), &span, words, section.report);
            Some(NamespaceKind::Rbd { image, cluster: scene.ceph.cluster(), made: None })
        }
        "ram" | "null" => {
            if let Some(path) = section.take::<PathBuf>("path", "nothing") {
                let what = format!("a namespace of kind \"{kind}\" has no path");
                section.add(&path.span, what, "remove `path`, or write `kind = \"file\"`");
            }
            let Some(size) = size else {
                let what = format!("a namespace of kind \"{kind}\" needs a `size`");
                section.add(&at, what, format!("add `size`, {SIZE_FORM}"));
                return None;
            };
            let ram = kind == "ram";
            Some(if ram { NamespaceKind::Ram { size } } else { NamespaceKind::Null { size } })
        }
        other => {
            section.add(&at, format!("there is no kind {other:?}"), format!("write {form}"));
            let _ = section.take::<PathBuf>("path", "a path");
            None
        }
    }
}

/// Removes `.` and doubled `/`. Only the file system can resolve `..` and links.
fn plain_path(path: &Path) -> PathBuf {
    path.components().collect()
}
