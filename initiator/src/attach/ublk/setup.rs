//! Devices of the kernel: adds one, takes one up that a process has left, stops and removes one.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nvme::identify::NamespaceIds;
use tracing::{info, warn};
use uuid::Uuid;

use super::super::outlast;
use super::ring::{CommandRing, Queues};
use crate::interrupt::Stop;
use crate::nbd::{Export, flag};
use crate::ublk::{
    CONTROL_PATH, Control, DEVICE_INFO_BYTES, DeviceInfo, PARAMETERS_BYTES, Parameters, RequestId,
    control, feature, io as request, state,
};
use crate::{Error, MultipathHost};

/// Entries of a queue.
const QUEUE_ENTRIES: u16 = 128;
/// Queues at most: one thread serves them all.
const QUEUES_MAX: usize = 4;
/// The longest read or write, in bytes.
const MOST_BYTES: u32 = 1 << 20;
/// Time for the kernel to notice that a process has ended: it looks every five seconds before 6.7.
const QUIESCE_LIMIT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the last user of a device to close it.
const REMOVE_LIMIT: Duration = Duration::from_secs(5);
/// Entries of a ring for control commands only.
const CONTROL_ENTRIES: u32 = 4;
/// What the driver has to have.
const NEEDED: u64 = feature::USER_COPY
    | feature::USER_RECOVERY
    | feature::USER_RECOVERY_REISSUE
    | feature::CMD_IOCTL_ENCODE;

/// A device that is not started, or not continued, yet: each tag is fetched.
pub(super) struct Prepared {
    pub(super) ring: CommandRing,
    pub(super) queues: Queues,
    pub(super) info: DeviceInfo,
    /// The size that the kernel knows.
    pub(super) size_bytes: u64,
    /// An earlier process has served it.
    pub(super) is_left: bool,
}

/// Why a device is not stopped.
#[derive(Debug, thiserror::Error)]
pub(in crate::attach) enum StopError {
    /// It is mounted, or part of another device.
    #[error("{0} is in use (mounted, or part of another device)")]
    InUse(String),
    /// Nobody serves it, and it may have writes that wait.
    #[error("{0} has requests that wait for an nvmf attach")]
    Left(String),
    /// The system has refused it.
    #[error("{0}")]
    Failed(String),
}

/// Space of the names of [`namespace_hash`].
const HASH_SPACE: Uuid = Uuid::from_u128(0x5d1c_29a6_0b7e_4f4b_9a53_8e0c_6d1f_72b4);
/// Bits of [`DeviceInfo::identity`] that are a time in seconds: see [`Identity`].
const WAIT_BITS: u32 = 16;

/// What the kernel keeps of a device for the next process that serves it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Identity {
    /// Hash of the namespace, without its lower bits.
    namespace: u64,
    /// For how long a target may have changes of the process that has added the device, once that
    /// has ended; rounded up to seconds.
    replay_wait: Duration,
}

impl Identity {
    pub(super) fn new(namespace: u64, replay_wait: Option<Duration>) -> Identity {
        let seconds = replay_wait.unwrap_or_default().as_millis().div_ceil(1000);
        let seconds = u16::try_from(seconds).unwrap_or(u16::MAX);
        Identity {
            namespace: namespace >> WAIT_BITS << WAIT_BITS,
            replay_wait: Duration::from_secs(seconds.into()),
        }
    }

    fn emit(self) -> u64 {
        self.namespace | self.replay_wait.as_secs()
    }

    fn parse(value: u64) -> Identity {
        let seconds = value & ((1 << WAIT_BITS) - 1);
        Identity { namespace: value - seconds, replay_wait: Duration::from_secs(seconds) }
    }
}

/// Which device to serve.
#[derive(Clone, Debug)]
pub(super) struct Wanted<'a> {
    /// Its number; `None`: any.
    pub(super) number: Option<u32>,
    pub(super) identity: Identity,
    pub(super) export: &'a Export,
}

/// Returns what identifies a namespace among the devices of this machine: the first 64 bits of a
/// UUID (version 5) of its subsystem, its number and its identifiers. A later version has to find
/// the devices of this one.
pub(super) fn namespace_hash(subsystem: &str, nsid: u32, ids: &NamespaceIds) -> u64 {
    let mut name = [subsystem.as_bytes(), &[0], &nsid.to_le_bytes()].concat();
    for (kind, id) in [
        (1, ids.uuid.as_ref().map(<[u8; 16]>::as_slice)),
        (2, ids.nguid.as_ref().map(<[u8; 16]>::as_slice)),
        (3, ids.eui64.as_ref().map(<[u8; 8]>::as_slice)),
    ] {
        if let Some(id) = id {
            name.push(kind);
            name.extend(id);
        }
    }
    Uuid::new_v5(&HASH_SPACE, &name).as_u64_pair().0
}

/// Returns the path of a device.
pub(super) fn path(number: u32) -> String {
    format!("/dev/ublkb{number}")
}

/// Returns the number of the device at a path.
///
/// # Errors
/// It is the path of something else.
pub(in crate::attach) fn number(path: &Path) -> Result<u32, Error> {
    let digits = path.to_str().and_then(|text| text.strip_prefix("/dev/ublkb"));
    digits
        .and_then(|digits| digits.parse().ok())
        .ok_or_else(|| Error::Usage(format!("{} is not /dev/ublkb and a number", path.display())))
}

/// Opens the driver. The message of a failure says what is missing.
fn open(entries: u32) -> Result<CommandRing, Error> {
    let control = OpenOptions::new().read(true).write(true).open(CONTROL_PATH);
    let control = control.map_err(|error| {
        let remedy = match error.kind() {
            ErrorKind::NotFound => {
                "load the driver: `modprobe ublk_drv` (Linux 6.5 or later with CONFIG_BLK_DEV_UBLK)"
            }
            ErrorKind::PermissionDenied => "only root may use it",
            _ => "look at the kernel's log",
        };
        Error::Local(format!("cannot open {CONTROL_PATH}: {error}: {remedy}"))
    })?;
    CommandRing::new(control, entries).map_err(|error| {
        let remedy = match error.raw_os_error() {
            Some(libc::ENOSYS | libc::EPERM) => {
                "permit it (sysctl kernel.io_uring_disabled, SystemCallFilter)"
            }
            _ => "it needs Linux 6.5 or later",
        };
        Error::Local(format!("there is no io_uring for ublk: {error}: {remedy}"))
    })
}

/// Adds a device, or takes up the one of the same namespace that another process has left.
/// Meanwhile the paths are kept alive. `None`: the end is asked for.
///
/// # Errors
/// What is missing.
pub(super) fn prepare(
    wanted: &Wanted<'_>,
    host: &mut MultipathHost,
    stop: &mut Stop,
) -> Result<Option<Prepared>, Error> {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let queues = cpus.min(QUEUES_MAX) as u16;
    let mut ring = open(u32::from(queues) * u32::from(QUEUE_ENTRIES))?;
    let features = features(&mut ring)?;
    let left = find(&mut ring, wanted.identity.namespace);
    if let Some(left) = left.filter(|left| left.state != state::DEAD) {
        if wanted.number.is_some_and(|number| number != left.device) {
            let path = path(left.device);
            let text = format!("the namespace is {path} already: use that, or --detach it first");
            return Err(Error::Local(text));
        }
        return take_up(ring, left, wanted, host, stop);
    }
    if let Some(dead) = left {
        let _ = delete(&mut ring, dead.device);
    }
    let info = DeviceInfo {
        queues,
        entries: QUEUE_ENTRIES,
        most_bytes: MOST_BYTES,
        device: wanted.number.unwrap_or(u32::MAX),
        process: -1,
        features: NEEDED | features & feature::UPDATE_SIZE,
        identity: wanted.identity.emit(),
        ..DeviceInfo::default()
    };
    let info = add(&mut ring, info)?;
    let prepared = set_up(&mut ring, &info, wanted.export);
    match prepared {
        Ok(queues) => {
            let size_bytes = wanted.export.size_bytes;
            Ok(Some(Prepared { ring, queues, info, size_bytes, is_left: false }))
        }
        Err(error) => {
            drop(ring);
            remove_unstarted(info.device);
            Err(Error::Local(format!("cannot set up {}: {error}", path(info.device))))
        }
    }
}

/// Returns the features of the driver.
fn features(ring: &mut CommandRing) -> Result<u64, Error> {
    let mut bytes = [0; 8];
    let got =
        ring.execute(control::GET_FEATURES, Control { device: u32::MAX, data: 0 }, &mut bytes);
    let features = u64::from_ne_bytes(bytes);
    match got {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => {
            Err(Error::Local("only root may use ublk (CAP_SYS_ADMIN)".into()))
        }
        Ok(()) if features & NEEDED == NEEDED => Ok(features),
        _ => {
            let text = "the kernel's ublk driver lacks copies by the process (UBLK_F_USER_COPY): \
                        use Linux 6.5 or later, or --nbd";
            Err(Error::Local(text.into()))
        }
    }
}

fn add(ring: &mut CommandRing, info: DeviceInfo) -> Result<DeviceInfo, Error> {
    let mut bytes = info.emit();
    let added =
        ring.execute(control::ADD_DEV, Control { device: info.device, data: 0 }, &mut bytes);
    added.map_err(|error| {
        let text = match error.raw_os_error() {
            Some(libc::EEXIST) => {
                let path = path(info.device);
                format!("{path} exists, and is another namespace: choose another number")
            }
            Some(libc::EPERM) => "only root may add ublk devices (CAP_SYS_ADMIN)".into(),
            _ => format!("cannot add a ublk device: {error}"),
        };
        Error::Local(text)
    })?;
    Ok(DeviceInfo::parse(&bytes))
}

/// Describes a device, and fetches all of its tags.
fn set_up(ring: &mut CommandRing, info: &DeviceInfo, export: &Export) -> io::Result<Queues> {
    let has = |bit: u16| export.flags & bit != 0;
    let parameters = Parameters {
        block_bytes: export.block_bytes,
        preferred_bytes: export.preferred_bytes,
        most_bytes: info.most_bytes,
        size_bytes: export.size_bytes,
        is_read_only: has(flag::READ_ONLY),
        can_discard: has(flag::SEND_TRIM),
        can_write_zeroes: has(flag::SEND_WRITE_ZEROES),
    };
    let command = Control { device: info.device, data: 0 };
    ring.execute(control::SET_PARAMS, command, &mut parameters.emit())?;
    fetch(ring, info)
}

fn fetch(ring: &mut CommandRing, info: &DeviceInfo) -> io::Result<Queues> {
    let path = format!("/dev/ublkc{}", info.device);
    let device = OpenOptions::new().read(true).write(true).open(path)?;
    let queues = Queues::new(device, info.queues, info.entries)?;
    for queue in 0..info.queues {
        for tag in 0..info.entries {
            ring.push_io(&queues, request::FETCH_REQ, RequestId { queue, tag }, 0);
        }
    }
    ring.submit();
    Ok(queues)
}

/// Returns the device of a namespace, if there is one.
fn find(ring: &mut CommandRing, namespace: u64) -> Option<DeviceInfo> {
    let entries = fs::read_dir("/dev").ok()?;
    let number = |name: &str| name.strip_prefix("ublkc")?.parse().ok();
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let numbers: Vec<u32> = names.filter_map(|name| number(&name)).collect();
    let mut infos = numbers.into_iter().filter_map(|number| info(ring, number).ok());
    infos.find(|info| Identity::parse(info.identity).namespace == namespace)
}

fn info(ring: &mut CommandRing, number: u32) -> io::Result<DeviceInfo> {
    let mut bytes = [0; DEVICE_INFO_BYTES];
    ring.execute(control::GET_DEV_INFO, Control { device: number, data: 0 }, &mut bytes)?;
    Ok(DeviceInfo::parse(&bytes))
}

/// Takes up a device whose process has ended.
fn take_up(
    mut ring: CommandRing,
    left: DeviceInfo,
    wanted: &Wanted<'_>,
    host: &mut MultipathHost,
    stop: &mut Stop,
) -> Result<Option<Prepared>, Error> {
    let path = path(left.device);
    let command = Control { device: left.device, data: 0 };
    let failed = |error: io::Error| Error::Local(format!("cannot take up {path}: {error}"));
    let mut bytes = [0; PARAMETERS_BYTES];
    bytes[0..4].copy_from_slice(&(PARAMETERS_BYTES as u32).to_ne_bytes());
    ring.execute(control::GET_PARAMS, command, &mut bytes).map_err(failed)?;
    let (block_bytes, size_bytes) = Parameters::parse_size(&bytes);
    if block_bytes != wanted.export.block_bytes {
        let now = wanted.export.block_bytes;
        let text = format!("{path} has blocks of {block_bytes} bytes, and the namespace of {now}");
        return Err(Error::Local(format!("{text}: `nvmf attach --detach {path}` first")));
    }
    let until = Instant::now() + QUIESCE_LIMIT;
    loop {
        match ring.execute(control::START_USER_RECOVERY, command, &mut []) {
            Ok(()) => break,
            Err(error) if error.raw_os_error() != Some(libc::EBUSY) => return Err(failed(error)),
            Err(_) if Instant::now() >= until => {
                let process = left.process;
                let text =
                    format!("the namespace is served as {path} already, by process {process}");
                return Err(Error::Local(text));
            }
            Err(_) => {}
        }
        if !host.pass_time(Instant::now() + POLL_INTERVAL, || !stop.wait(Duration::ZERO)) {
            return Ok(None);
        }
    }
    let queues = fetch(&mut ring, &left).map_err(failed)?;
    info!("{path} is recovered: process {} has ended", left.process);
    // A target may still carry out writes of that process. What the kernel requests again, and what
    // is written after that, has to come later. That process may have had another keep alive timeout.
    let wait = wanted.identity.replay_wait.max(Identity::parse(left.identity).replay_wait);
    if !wait.is_zero() {
        info!(
            "its requests wait for {} s: so long may the target have earlier ones",
            wait.as_secs()
        );
        if !outlast(wait, host, stop) {
            return Ok(None);
        }
    }
    Ok(Some(Prepared { ring, queues, info: left, size_bytes, is_left: true }))
}

/// Writes what is cached, and stops a device: nobody can use it any more. Blocks while that is
/// written. With `force`, what is cached may be lost.
///
/// # Errors
/// It is as it was.
pub(in crate::attach) fn stop(number: u32, force: bool) -> Result<(), StopError> {
    let path = path(number);
    let failed = |what: &str, error: &dyn std::fmt::Display| {
        StopError::Failed(format!("cannot {what} {path}: {error}"))
    };
    let mut ring = open(CONTROL_ENTRIES).map_err(|error| failed("stop", &error))?;
    let info = info(&mut ring, number).map_err(|error| failed("find", &error))?;
    let is_left = info.state == state::QUIESCED;
    // Nobody can mount it as long as this is open.
    let mut exclusive = None;
    if !force && info.state != state::DEAD {
        if is_left {
            return Err(StopError::Left(path));
        }
        let file =
            open_exclusively(Path::new(&path)).map_err(|error| match error.raw_os_error() {
                Some(libc::EBUSY) => StopError::InUse(path.clone()),
                _ => failed("open", &error),
            })?;
        file.sync_all().map_err(|error| failed("write what is cached of", &error))?;
        exclusive = Some(file);
    }
    let command = Control { device: number, data: 0 };
    let stopped = ring.execute(control::STOP_DEV, command, &mut []);
    drop(exclusive);
    stopped.map_err(|error| failed("stop", &error))
}

fn open_exclusively(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(path)
}

/// Removes a stopped device, when the process that serves it has closed it.
///
/// # Errors
/// What is wrong.
pub(in crate::attach) fn remove(number: u32) -> Result<(), Error> {
    delete(&mut open(CONTROL_ENTRIES)?, number)
}

fn delete(ring: &mut CommandRing, number: u32) -> Result<(), Error> {
    let command = Control { device: number, data: 0 };
    match ring.execute_for(control::DEL_DEV, command, REMOVE_LIMIT) {
        // Another process was faster.
        Err(error) if error.raw_os_error() == Some(Errno::ENODEV as i32) => Ok(()),
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            warn!("{} is removed when its last user closes it", path(number));
            Ok(())
        }
        Err(error) => Err(Error::Local(format!("cannot remove {}: {error}", path(number)))),
        Ok(()) => Ok(()),
    }
}

/// Removes a device that could not be started.
pub(super) fn remove_unstarted(number: u32) {
    let removed = stop(number, true).map_err(|why| why.to_string());
    if let Err(why) = removed.and_then(|()| remove(number).map_err(|why| why.to_string())) {
        warn!("{why}");
    }
}

/// Stops and removes the device at a path, whoever serves it.
///
/// # Errors
/// What is wrong, and what to do.
pub(in crate::attach) fn detach(device: &Path, force: bool) -> Result<(), Error> {
    let number = number(device)?;
    stop(number, force).map_err(|why| {
        let remedy = match &why {
            StopError::InUse(_) => ": unmount it first, or lose what is not written with --force",
            StopError::Left(_) => ": start that again, or lose them with --force",
            StopError::Failed(_) => "",
        };
        Error::Local(format!("{why}{remedy}"))
    })?;
    remove(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_hash_covers_subsystem_nsid_and_identifiers() {
        let ids = NamespaceIds { nguid: Some([1; 16]), ..NamespaceIds::default() };
        let of = |subsystem, nsid, ids: &NamespaceIds| namespace_hash(subsystem, nsid, ids);
        let one = of("nqn.2026-11.x:d", 1, &ids);
        assert_eq!(one, of("nqn.2026-11.x:d", 1, &ids));
        let other = NamespaceIds { nguid: Some([2; 16]), ..NamespaceIds::default() };
        for different in [
            of("nqn.2026-11.x:d", 2, &ids),
            of("nqn.2026-11.x:e", 1, &ids),
            of("nqn.2026-11.x:d", 1, &other),
            of("nqn.2026-11.x:d", 1, &NamespaceIds::default()),
        ] {
            assert_ne!(one, different);
        }
        assert_eq!(one, 0x9e38_6977_55ba_53cd, "devices of earlier versions are found");
    }

    #[test]
    fn replay_wait_round_trips_through_the_device_identity() {
        let of = |ms: u64| Identity::new(u64::MAX, Some(Duration::from_millis(ms)));
        for (ms, seconds) in [(0, 0), (1, 1), (7000, 7), (7001, 8), (u64::MAX, 65535)] {
            let identity = Identity::parse(of(ms).emit());
            assert_eq!(identity, of(ms));
            assert_eq!(identity.replay_wait, Duration::from_secs(seconds));
            assert_eq!(identity.namespace, of(7000).namespace, "the same device");
        }
        assert_ne!(Identity::new(1 << 16, None).emit(), Identity::new(2 << 16, None).emit());
    }

    #[test]
    fn only_ublk_block_device_paths_parse_to_a_number() {
        assert_eq!(number(Path::new(&path(12))), Ok(12));
        for wrong in ["/dev/ublkc1", "/dev/ublkb", "ublkb1", "/dev/ublkb1p1", "/dev/nvme0n1"] {
            assert!(number(Path::new(wrong)).is_err(), "{wrong}");
        }
    }
}
