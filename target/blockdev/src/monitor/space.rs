//! The space of file systems with backing files: what is free there, and what the files may still
//! allocate.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tracing::{error, info, warn};

use super::{MonitoredDevice, Shared, lock};
use crate::{BackingDevice, FileSystemSpace, SpaceState};

/// The file systems, by device number.
pub(super) type FileSystems = Mutex<BTreeMap<u64, Examined>>;

/// When a file system was examined last, and the result.
#[derive(Debug)]
pub(super) struct Examined {
    at: Instant,
    state: SpaceState,
}

/// Shortest interval of examinations of one file system, whatever the number of its files.
const INTERVAL: Duration = Duration::from_millis(500);

impl Shared {
    /// Examines the file system of a device, and logs a change of its state. May block on it.
    pub(super) fn look_at_space(&self, device: &MonitoredDevice, backing: &BackingDevice) {
        device.unallocated_bytes.store(backing.unallocated_bytes(), Ordering::Relaxed);
        let mut known = lock(&self.file_systems);
        let (place, now) = (backing.place(), Instant::now());
        let before = known.get(&place);
        if before.is_some_and(|it| now.saturating_duration_since(it.at) < INTERVAL) {
            return;
        }
        let before = before.map_or(SpaceState::default(), |it| it.state);
        // Another file system does not wait for this one.
        drop(known);
        let Some((size_bytes, free_bytes)) = backing.file_system_bytes() else { return };
        let state = lock(&self.state);
        let devices = &state.devices;
        let is_there = |it: &Arc<MonitoredDevice>| it.place_now.load(Ordering::Relaxed) == place;
        let unallocated = |it: &Arc<MonitoredDevice>| it.unallocated_bytes.load(Ordering::Relaxed);
        let unallocated_bytes =
            devices.iter().filter(|it| is_there(it)).map(unallocated).fold(0, u64::saturating_add);
        let state = before.next(size_bytes, free_bytes, unallocated_bytes);
        let space =
            FileSystemSpace { device: place, size_bytes, free_bytes, unallocated_bytes, state };
        devices
            .iter()
            .filter(|it| is_there(it))
            .for_each(|it| it.health.allocation().set_file_system(space));
        known = lock(&self.file_systems);
        known.retain(|other, _| {
            devices.iter().any(|it| it.place_now.load(Ordering::Relaxed) == *other)
        });
        known.insert(place, Examined { at: now, state });
        drop((known, state));
        if state != before {
            log(backing.name(), &space);
        }
    }
}

/// Logs a new state of the file system of a file.
fn log(name: &str, space: &FileSystemSpace) {
    let FileSystemSpace { size_bytes, free_bytes, unallocated_bytes, .. } = *space;
    match space.state.warning(name) {
        None => {
            info!(free_bytes, unallocated_bytes, "the file system of {name} has enough free space");
        }
        Some(warning) if space.state == SpaceState::Low => {
            error!(size_bytes, free_bytes, unallocated_bytes, "{warning}");
        }
        Some(warning) => warn!(size_bytes, free_bytes, unallocated_bytes, "{warning}"),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use crate::monitor::tests::{Bench, SIZE};
    use crate::monitor::*;
    use crate::{BackingConfig, BackingKind, DeviceId, IoRequest};

    #[test]
    fn allocated_bytes_of_a_file_follow_writes_and_discards() {
        let mut bench = Bench::new();
        let health = Arc::clone(bench.device.health());
        let allocated_bytes = || health.allocation().allocated_bytes().expect("a file");
        assert!(allocated_bytes() < SIZE, "it is sparse: {}", allocated_bytes());
        let before = allocated_bytes();
        for at in (0..SIZE).step_by(4096) {
            assert_eq!(bench.write(at, 0x11), Ok(()));
        }
        bench.until("all is allocated", |_| allocated_bytes() >= SIZE);
        assert_eq!(bench.run(IoRequest::Discard { at: 0, len: SIZE }).0, Ok(()));
        if health.keeps_space() {
            return;
        }
        bench.until("nothing is, but metadata", |_| allocated_bytes() <= before + 65536);
        // Preallocated, for which nothing has to be allocated any more.
        let file = OpenOptions::new().write(true).open(bench.path()).unwrap();
        let how = nix::fcntl::FallocateFlags::empty();
        if nix::fcntl::fallocate(&file, how, 0, SIZE as i64).is_ok() {
            bench.until("all is preallocated", |_| allocated_bytes() >= SIZE);
        }
    }

    #[test]
    fn unallocated_bytes_of_files_are_compared_with_free_space() {
        let mut bench = Bench::new();
        let health = Arc::clone(bench.device.health());
        let found = || health.allocation().file_system();
        bench.until("it is examined", |_| found().is_some());
        let first = found().unwrap();
        assert!(first.size_bytes >= first.free_bytes && first.free_bytes > 0, "{first:?}");
        assert!(first.unallocated_bytes <= SIZE, "its own: {first:?}");

        // A sparse file that is larger than what is free, and another that nobody can write to.
        let size = (first.free_bytes + (1 << 30)) & !4095;
        let add = |bench: &Bench, name: &str, read_only: bool| {
            let kind = BackingKind::File { path: bench.dir.join(name), size: Some(size) };
            let config = BackingConfig { kind, ..bench.device.config.clone() };
            let made = BackingDevice::open(&config).unwrap();
            drop(made);
            let config = BackingConfig { read_only, ..config };
            let backing = BackingDevice::open(&config).unwrap();
            let device = MonitoredDevice::new(DeviceId(3), name.to_owned(), config, backing);
            let device = Arc::new(device);
            bench.monitor.add(Arc::clone(&device));
            device
        };
        let snapshot = add(&bench, "snapshot", true);
        bench.until("a read-only file is examined", |_| {
            snapshot.health.allocation().file_system().is_some()
        });
        assert!(found().unwrap().unallocated_bytes <= SIZE, "it allocates nothing");
        let large = add(&bench, "large", false);
        bench.until("more may be allocated than is free", |_| {
            found().is_some_and(|it| {
                it.unallocated_bytes > it.free_bytes && it.state >= crate::SpaceState::Overcommitted
            })
        });
        let other = large.health.allocation().file_system().unwrap();
        assert_eq!(other.device, found().unwrap().device);
        bench.monitor.remove(&large);
        bench.until("it is not counted any more", |_| {
            found().is_some_and(|it| it.unallocated_bytes <= SIZE)
        });
    }
}
