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
        let book = lock(&self.book);
        let devices = &book.devices;
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
        drop((known, book));
        if state != before {
            log(backing.name(), &space);
        }
    }
}

/// Logs a new state of the file system of a file.
fn log(name: &str, space: &FileSystemSpace) {
    let FileSystemSpace { size_bytes, free_bytes, unallocated_bytes, .. } = *space;
    match space.state {
        SpaceState::Sufficient => {
            info!(free_bytes, unallocated_bytes, "the file system of {name} has enough free space");
        }
        SpaceState::Overcommitted => warn!(
            free_bytes,
            unallocated_bytes,
            "the file system of {name} has less free space than its backing files may still \
             allocate: when it is full, writes fail with Capacity Exceeded"
        ),
        SpaceState::Low => error!(
            size_bytes,
            free_bytes,
            unallocated_bytes,
            "the file system of {name} is almost full: writes are about to fail with Capacity \
             Exceeded; extend it, or have hosts deallocate (fstrim)"
        ),
    }
}
