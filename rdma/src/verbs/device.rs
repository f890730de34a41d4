//! One RDMA device as one fabric uses it: a protection domain, the registered region and two
//! completion queues on one channel, one for receives and one for everything else: so a sleeper
//! can leave the completions of its responses for later.

use std::os::fd::BorrowedFd;
use std::sync::Arc;

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};

use super::ffi::{Ability, Access, CompChannel, Context, Cq, DeviceKey, Mr, Pd};
use crate::{FabricError, QpLimits, Region, Wake};

/// Entries that we ask for in each completion queue, if the device has as many: 51 queue pairs of
/// depth 128 with 640 work requests each, for 2 MiB of memory a queue. Made once at full size: siw
/// cannot resize, and the adapters that can do it do so while completions arrive.
const COMPLETION_ENTRIES: u32 = 32768;

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
    context: Arc<Context>,
}

impl Device {
    /// Registers the region, for local access only, and makes the completion queue.
    pub(super) fn new(context: &Arc<Context>, region: &Arc<Region>) -> Result<Device, FabricError> {
        let failed = |what: &str, e: Errno| FabricError(format!("cannot {what}: {}", e.desc()));
        let ability = context.ability().map_err(|e| failed("query an RDMA device", e))?;
        let name = &ability.name;
        let failed = |what: &str, e| failed(&format!("{what} on {name}"), e);
        let pd = Pd::new(context).map_err(|e| failed("allocate a protection domain", e))?;
        let mr = Mr::new(&pd, region, 0, region.len() as u64, Access::Local)
            .map_err(|e| registration_error(name, region.len(), e))?;
        let channel =
            CompChannel::new(context).map_err(|e| failed("create a completion channel", e))?;
        let entries = ability.completion_entries.min(COMPLETION_ENTRIES);
        let make = || {
            Cq::new(&channel, entries)
                .map_err(|e| failed(&format!("create a completion queue of {entries} entries"), e))
        };
        let (received, sent) = (make()?, make()?);
        tracing::debug!(device = %name, iwarp = ability.iwarp, entries, "opened");
        Ok(Device { mr, received, sent, pd, channel, context: Arc::clone(context), ability })
    }

    pub(super) fn key(&self) -> DeviceKey {
        self.context.key()
    }

    /// Takes an announcement off the channel.
    pub(super) fn take_announcement(&self) -> Result<(), Errno> {
        self.channel.take()
    }

    /// Asks for the announcement of the next completion: of a receive, or of anything.
    pub(super) fn request_notify(&self, wake: Wake) -> Result<(), Errno> {
        self.received.request_notify()?;
        match wake {
            Wake::Any => self.sent.request_notify(),
            Wake::Needed => Ok(()),
        }
    }

    /// Readable when a completion was announced.
    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.channel.fd()
    }

    /// Whether a queue pair of this size fits: on the device, and in the completion queue beside
    /// those that have been promised their entries. So the completion queue cannot overflow.
    pub(super) fn admit(&self, limits: QpLimits, promised: u32) -> Result<(), FabricError> {
        let (name, most) = (&self.ability.name, self.ability.queue_entries);
        if limits.receives > most || limits.sends > most || self.ability.segments == 0 {
            return Err(FabricError(format!(
                "{name} holds {most} work requests a queue, but {} sends and {} receives are \
                 needed: lower the queue depth",
                limits.sends, limits.receives
            )));
        }
        let (needed, room) = (entries(limits), self.entries().saturating_sub(promised));
        if needed > room {
            return Err(FabricError(format!(
                "the completion queue on {name} has room for {room} of {} entries and the \
                 connection needs {needed}: lower the queue depth or use more reactors",
                self.entries()
            )));
        }
        Ok(())
    }

    /// Entries of the smaller completion queue. A queue pair is held against it with all its work,
    /// though that is spread over both: simple, and never too much.
    fn entries(&self) -> u32 {
        self.received.entries().min(self.sent.entries())
    }

    /// Reads that one connection may have outstanding: what the peer answers, the device issues
    /// and the caller likes, and at least one.
    pub(super) fn reads(&self, offered: u8, wanted: u8) -> u8 {
        offered.min(self.ability.reads).min(wanted).max(1)
    }

    /// Reads of a peer that a connection of ours offers to answer at once.
    pub(super) fn answers(&self, wanted: u8) -> u8 {
        wanted.min(self.ability.answers)
    }
}

/// Completion queue entries that a queue pair can fill.
pub(super) fn entries(limits: QpLimits) -> u32 {
    limits.receives.saturating_add(limits.sends)
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
    use super::*;

    #[test]
    fn a_refused_registration_names_the_limit_and_the_remedy() {
        let text = registration_error("rxe0", 12_345, Errno::ENOMEM).0;
        for part in ["12345 bytes", "rxe0", "RLIMIT_MEMLOCK", "LimitMEMLOCK=infinity"] {
            assert!(text.contains(part), "{text}");
        }
        assert!(!registration_error("rxe0", 1, Errno::EINVAL).0.contains("LimitMEMLOCK"));
    }
}
