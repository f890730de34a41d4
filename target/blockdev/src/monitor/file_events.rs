//! Events of served files (inotify): whoever opens a file may have truncated it by that, and whoever
//! closes it may have done so before. It is examined at once then, instead of within a second.

use std::os::fd::AsFd;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify, InotifyEvent, WatchDescriptor};
use tracing::warn;

use super::{MonitorState, MonitoredDevice, RETRY_INTERVAL, Shared, lock};
use crate::{BackingDevice, Kind};

/// Shortest interval of examinations because of events: other devices have the time between.
pub(super) const TOUCH_INTERVAL: Duration = Duration::from_millis(50);

/// The events of files that are served.
#[derive(Debug)]
pub(super) struct FileEvents {
    pub(super) inotify: Inotify,
    stop: EventFd,
    /// That a file is not watched has been logged.
    is_logged: AtomicBool,
}

/// The watch of the file of a device, by which its events are told from others.
#[derive(Debug, Default)]
pub(super) struct Watch {
    pub(super) of: Weak<BackingDevice>,
    pub(super) descriptor: Option<WatchDescriptor>,
}

impl FileEvents {
    /// None where the kernel denies it, which is logged.
    pub(super) fn new() -> Option<FileEvents> {
        let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK);
        let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC);
        match (inotify, stop) {
            (Ok(inotify), Ok(stop)) => {
                Some(FileEvents { inotify, stop, is_logged: AtomicBool::new(false) })
            }
            (inotify, stop) => {
                log_unwatched("files", inotify.err().or(stop.err()).unwrap_or(Errno::EIO));
                None
            }
        }
    }

    /// Ends [`Shared::pass_events`].
    pub(super) fn stop(&self) {
        let _ = self.stop.write(1);
    }

    /// Waits for events; none at the end.
    fn next(&self) -> Option<Vec<InotifyEvent>> {
        let mut fds = [
            PollFd::new(self.inotify.as_fd(), PollFlags::POLLIN),
            PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
        ];
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) if fds[1].any() == Some(false) => self.inotify.read_events().ok(),
            Err(Errno::EINTR) => Some(Vec::new()),
            _ => None,
        }
    }

    /// Has events of the file of a device reported. May block on its file system.
    pub(super) fn watch(&self, device: &MonitoredDevice, backing: &Arc<BackingDevice>) {
        let mut watch = lock(&device.watch);
        if backing.kind() != Kind::File || watch.of.as_ptr() == Arc::as_ptr(backing) {
            return;
        }
        let path = backing.own_path();
        let events = AddWatchFlags::IN_OPEN | AddWatchFlags::IN_CLOSE_WRITE;
        let added = self.inotify.add_watch(Path::new(&path), events);
        if let Err(errno) = added
            && !self.is_logged.swap(true, Ordering::Relaxed)
        {
            log_unwatched(backing.name(), errno);
        }
        *watch = Watch { of: Arc::downgrade(backing), descriptor: added.ok() };
    }
}

fn log_unwatched(what: &str, errno: Errno) {
    warn!(
        "cannot watch {what} with inotify: {}; truncation is noticed within a second instead of at \
         once (`sysctl fs.inotify` has the limits)",
        errno.desc()
    );
}

impl Shared {
    /// Has the devices examined whose files have events, until the monitor stops.
    pub(super) fn pass_events(&self) {
        let Some(events) = &self.events else { return };
        while let Some(all) = events.next() {
            let state = lock(&self.state);
            for event in all {
                let mut is_used = false;
                for device in state.devices.iter().filter(|it| it.may_have(event.wd)) {
                    device.touched.store(true, Ordering::Relaxed);
                    is_used = true;
                }
                if !is_used {
                    // Of a file that is not served any more.
                    let _ = events.inotify.rm_watch(event.wd);
                }
            }
            self.wake.notify_all();
        }
    }
}

impl MonitorState {
    /// How long nothing becomes due that is not reported.
    pub(super) fn longest_wait(&self) -> Duration {
        let is_touched = self.devices.iter().any(|it| it.touched.load(Ordering::Relaxed));
        if is_touched { TOUCH_INTERVAL } else { RETRY_INTERVAL }
    }
}

impl MonitoredDevice {
    /// Whether its file has this watch, or gets one at the moment.
    fn may_have(&self, watch: WatchDescriptor) -> bool {
        self.watch.try_lock().map_or(true, |own| own.descriptor == Some(watch))
    }
}
