//! One RDMA device as used by one fabric: a protection domain, the registered region and two
//! completion queues on one channel, one for receives and one for everything else, so that a
//! sleeping driver can defer completions of responses.

use std::fs::{self, File};
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use super::ffi::{
    Ability, Access, AsyncEvent, CompChannel, Context, Cq, DeviceKey, Mr, Pd, QueueKey,
};
use crate::{FabricError, QpLimits, Region, Wake};

/// Maximum of work posted by all queue pairs of a fabric together. There is an entry of a
/// completion queue for each, 64 or 128 bytes with most devices, allocated once at full size: siw
/// cannot resize, and the adapters that can do it do so while completions arrive.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Load {
    /// Receives.
    pub receives: u32,
    /// Sends, reads and writes.
    pub sends: u32,
}

impl Default for Load {
    /// For callers without better knowledge.
    fn default() -> Load {
        Load { receives: 32768, sends: 32768 }
    }
}

impl Load {
    pub(super) const NONE: Load = Load { receives: 0, sends: 0 };

    /// With the work of one more queue pair.
    pub(super) fn and(self, limits: QpLimits) -> Load {
        Load {
            receives: self.receives.saturating_add(limits.receives),
            sends: self.sends.saturating_add(limits.sends),
        }
    }
}

/// An open device.
///
/// Receives are posted on each queue pair, not on a shared receive queue: a shared queue would let
/// one host use up the receives of all others, and iWARP devices and `siw` limit it differently.
pub(super) struct Device {
    pub(super) ability: Ability,
    pub(super) mr: Mr,
    pub(super) received: Arc<Cq>,
    pub(super) sent: Arc<Cq>,
    pub(super) pd: Arc<Pd>,
    channel: Arc<CompChannel>,
    pub(super) context: Arc<Context>,
    /// How often it had failed as a whole when it was opened.
    failures: u32,
}

impl Device {
    /// Registers the region, for local access only, and creates completion queues for this load.
    pub(super) fn new(
        context: &Arc<Context>,
        region: &Arc<Region>,
        load: Load,
    ) -> Result<Device, FabricError> {
        let failed = |what: &str, e: Errno| FabricError(format!("cannot {what}: {}", e.desc()));
        let ability = context.ability().map_err(|e| failed("query an RDMA device", e))?;
        let name = &ability.name;
        let failed = |what: &str, e| failed(&format!("{what} on {name}"), e);
        let pd = Pd::new(context).map_err(|e| failed("allocate a protection domain", e))?;
        let mr = Mr::new(&pd, region, 0, region.len() as u64, Access::Local)
            .map_err(|e| registration_error(name, region.len(), e))?;
        let channel =
            CompChannel::new(context).map_err(|e| failed("create a completion channel", e))?;
        let vector = context.next_vector();
        let make = |work| {
            let entries = entries_to_ask_for(work, ability.completion_entries);
            Cq::new(&channel, entries, vector)
                .map_err(|e| failed(&format!("create a completion queue of {entries} entries"), e))
        };
        let (received, sent) = (make(load.receives)?, make(load.sends)?);
        let entries = (received.entries(), sent.entries());
        tracing::debug!(device = %name, iwarp = ability.iwarp, ?entries, "opened");
        let (context, (_, failures)) = (Arc::clone(context), context.failures());
        Ok(Device { mr, received, sent, pd, channel, context, ability, failures })
    }

    pub(super) fn key(&self) -> DeviceKey {
        self.context.key()
    }

    /// Whether the system has removed it, or waits for its last user.
    pub(super) fn is_gone(&self) -> bool {
        self.context.is_gone()
    }

    /// Reads its asynchronous events. Returns the queues that have failed, some of them perhaps of
    /// other fabrics, and why the device cannot be used any more, if so.
    pub(super) fn look_for_failures(&self) -> (Vec<QueueKey>, Option<&'static str>) {
        let device = &self.ability.name;
        self.context.read_events(|event| match event {
            AsyncEvent::Port { number, active: true } => {
                tracing::info!(%device, port = number, "RDMA port is active");
            }
            AsyncEvent::Port { number, active: false } => {
                tracing::warn!(%device, port = number, "RDMA port is down: no host reaches it");
            }
            AsyncEvent::QueueFailed(_) => tracing::debug!(%device, "a queue has failed"),
            // Those that use it say so.
            AsyncEvent::DeviceFailed => {}
            AsyncEvent::Other(number) => tracing::debug!(%device, number, "device event ignored"),
        });
        let (queues, failures) = self.context.failures();
        let completions_lost =
            [&self.sent, &self.received].iter().any(|cq| queues.contains(&cq.key()));
        let why = match completions_lost {
            _ if failures != self.failures => Some("the device reports a fatal error"),
            true => Some("a completion queue failed"),
            false => None,
        };
        (queues, why)
    }

    /// Whether each work request has a completion of its own. On iWARP a completion says only that
    /// TCP has the data, and for work without one `siw` passes TCP the pages of a Write instead of
    /// copying them: a buffer that is used again would change data that are not sent yet.
    pub(super) fn reports_all(&self) -> bool {
        self.ability.iwarp
    }

    /// Takes a notification from the channel.
    pub(super) fn take_announcement(&self) -> Result<(), Errno> {
        self.channel.take()
    }

    /// Requests a notification for the next completion: of a receive, or of any work.
    pub(super) fn request_notify(&self, wake: Wake) -> Result<(), Errno> {
        self.received.request_notify()?;
        match wake {
            Wake::Any => self.sent.request_notify(),
            Wake::Needed => Ok(()),
        }
    }

    /// Readable when there is a notification.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// Whether a queue pair of this size fits: on the device, and in the completion queues beside
    /// the `promised` entries. So no completion queue can overflow.
    pub(super) fn admit(&self, limits: QpLimits, promised: Load) -> Result<(), FabricError> {
        let (name, most) = (&self.ability.name, self.ability.queue_entries);
        if limits.receives > most || limits.sends > most || self.ability.segments == 0 {
            return Err(FabricError(format!(
                "{name} holds {most} work requests a queue, but {} sends and {} receives are \
                 needed: lower the queue depth",
                limits.sends, limits.receives
            )));
        }
        let all = promised.and(limits);
        let queues = [
            ("receives", limits.receives, all.receives, self.received.entries()),
            ("sends", limits.sends, all.sends, self.sent.entries()),
        ];
        match queues.into_iter().find(|(.., all, entries)| all > entries) {
            None => Ok(()),
            Some((what, needed, all, entries)) => Err(FabricError(format!(
                "the completion queue of {what} on {name} has room for {} of {entries} entries and \
                 the connection needs {needed}: lower the queue depth or use more reactors",
                entries.saturating_sub(all - needed)
            ))),
        }
    }

    /// Reads that one connection may have outstanding: the minimum of what the peer answers, the
    /// device issues and the caller wants, and at least one.
    pub(super) fn reads(&self, offered: u8, wanted: u8) -> u8 {
        offered.min(self.ability.reads).min(wanted).max(1)
    }

    /// Reads of a peer that a connection of ours offers to answer concurrently.
    pub(super) fn answers(&self, wanted: u8) -> u8 {
        wanted.min(self.ability.answers)
    }
}

/// Entries to request for this work, from a device with at most `most`. Drivers take one more and
/// round up to a power of two, so a round number would cost twice its memory: then one less is
/// requested, and the last queue pair that would fill it is rejected.
fn entries_to_ask_for(work: u32, most: u32) -> u32 {
    let entries = if work.is_power_of_two() { work - 1 } else { work };
    entries.clamp(1, most.max(1))
}

/// Minimum of descriptors that the libraries open to find and use a device.
const DESCRIPTORS: usize = 8;

/// Whether there are too few descriptors to find a device: the libraries then close what they have
/// opened, and report that there is none.
pub(super) fn too_few_descriptors() -> Option<String> {
    let opened: Result<Vec<File>, _> = (0..DESCRIPTORS).map(|_| File::open("/dev/null")).collect();
    let error = opened.err()?.raw_os_error();
    (error == Some(Errno::EMFILE as i32))
        .then(|| format!("cannot open an RDMA device: {}", crate::descriptor_remedy()))
}

/// Which device cannot be opened: librdmacm does not report it.
pub(super) fn closed_node() -> Option<String> {
    closed_node_of(Path::new("/sys/class/infiniband_verbs"), Path::new("/dev/infiniband"))
}

fn closed_node_of(devices: &Path, nodes: &Path) -> Option<String> {
    let entries = fs::read_dir(devices).ok()?.flatten();
    let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
    names.retain(|name| name.as_encoded_bytes().starts_with(b"uverbs"));
    names.sort();
    names.iter().find_map(|name| {
        let node = nodes.join(name);
        let error = File::options().read(true).write(true).open(&node).err()?;
        Some(format!(
            "no RDMA device can be used: {}: {error}; give this user, container or unit access to it",
            node.display()
        ))
    })
}

fn registration_error(name: &str, bytes: usize, e: Errno) -> FabricError {
    let remedy = match e {
        Errno::ENOMEM | Errno::EPERM | Errno::EAGAIN => {
            let limit = match getrlimit(Resource::RLIMIT_MEMLOCK) {
                Ok((nix::libc::RLIM_INFINITY, _)) => "unlimited".to_string(),
                Ok((soft, _)) => format!("{soft} bytes"),
                Err(_) => "unknown".to_string(),
            };
            format!(
                "; the memory must stay locked, and RLIMIT_MEMLOCK is {limit}: raise it \
                 (LimitMEMLOCK=infinity in the systemd unit, ulimit -l unlimited in a shell) or \
                 make the pool smaller"
            )
        }
        _ => String::new(),
    };
    FabricError(format!("cannot register {bytes} bytes with {name}: {}{remedy}", e.desc()))
}

#[cfg(test)]
mod tests {
    use crate::verbs::device::*;

    #[test]
    fn completion_queue_sizes_allow_for_driver_rounding() {
        // The size after the rounding of a driver.
        let slots = |work, most| (entries_to_ask_for(work, most) + 1).next_power_of_two();
        assert_eq!(slots(4096, u32::MAX), 4096);
        assert_eq!(slots(4095, u32::MAX), 4096);
        assert_eq!(slots(4097, u32::MAX), 8192);
        assert_eq!(slots(1 << 20, 32767), 32768);
        assert_eq!(entries_to_ask_for(5000, u32::MAX), 5000);
        assert_eq!((entries_to_ask_for(0, 100), entries_to_ask_for(1, 0)), (1, 1));
    }

    #[test]
    fn promised_work_adds_up_and_never_overflows() {
        let limits = QpLimits { receives: 128, sends: 512, reads: 16 };
        let two = Load::NONE.and(limits).and(limits);
        assert_eq!(two, Load { receives: 256, sends: 1024 });
        let most = QpLimits { receives: u32::MAX, sends: u32::MAX, reads: 0 };
        assert_eq!(two.and(most), Load { receives: u32::MAX, sends: u32::MAX });
    }

    #[test]
    fn a_process_with_enough_descriptors_lacks_none() {
        assert_eq!(too_few_descriptors(), None);
    }

    #[test]
    fn a_device_that_cannot_be_opened_is_reported_with_its_node() {
        let directory = tempfile::tempdir().unwrap();
        let [devices, nodes] = ["class", "dev"].map(|name| directory.path().join(name));
        let of = || closed_node_of(&devices, &nodes);
        assert_eq!(of(), None, "no device");
        fs::create_dir_all(&nodes).unwrap();
        for name in ["uverbs0", "uverbs1", "abi_version"] {
            fs::create_dir_all(devices.join(name)).unwrap();
        }
        fs::write(nodes.join("uverbs0"), "").unwrap();
        let text = of().unwrap();
        for part in ["/dev/uverbs1: No such file or directory", "access to it"] {
            assert!(text.contains(part), "{text}");
        }
        fs::write(nodes.join("uverbs1"), "").unwrap();
        assert_eq!(of(), None);
    }

    #[test]
    fn a_refused_registration_names_the_limit_and_the_remedy() {
        let text = registration_error("rxe0", 12_345, Errno::ENOMEM).0;
        for part in ["12345 bytes", "rxe0", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!registration_error("rxe0", 1, Errno::EINVAL).0.contains("LimitMEMLOCK"));
    }
}
