//! Resources of this process, as the kernel counts them.

use std::fs;

use nix::sys::resource::{Resource, UsageWho, getrlimit, getrusage};
use nix::sys::time::TimeValLike;
use nix::unistd::{SysconfVar, sysconf};

/// Resources of this process; `None`: not known.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    /// CPU time, in seconds.
    pub cpu_s: Option<f64>,
    /// Start, in seconds since 1970.
    pub start_s: Option<u64>,
    /// Resident memory.
    pub resident_bytes: Option<u64>,
    /// Virtual memory.
    pub virtual_bytes: Option<u64>,
    /// Open file descriptors.
    pub open_fds: Option<u64>,
    /// The limit of these.
    pub max_fds: Option<u64>,
}

/// Asks the kernel.
pub(crate) fn look() -> Process {
    let (resident_bytes, virtual_bytes) = memory().unzip();
    Process {
        cpu_s: cpu_s(),
        start_s: start_s(),
        resident_bytes,
        virtual_bytes,
        open_fds: fs::read_dir("/proc/self/fd").ok().map(|fds| fds.count() as u64),
        max_fds: getrlimit(Resource::RLIMIT_NOFILE).ok().map(|(soft, _)| soft),
    }
}

fn cpu_s() -> Option<f64> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).ok()?;
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Some(micros as f64 / 1e6)
}

/// Resident and virtual memory, as in proc_pid_statm(5).
fn memory() -> Option<(u64, u64)> {
    let text = fs::read_to_string("/proc/self/statm").ok()?;
    let mut pages = text.split_whitespace().map_while(|word| word.parse::<u64>().ok());
    let (whole, resident) = (pages.next()?, pages.next()?);
    let page_bytes = positive(SysconfVar::PAGE_SIZE)?;
    Some((resident * page_bytes, whole * page_bytes))
}

/// Field 22 of proc_pid_stat(5), in ticks since the boot.
fn start_s() -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name in the second field may contain anything.
    let (_, after_name) = stat.rsplit_once(") ")?;
    let ticks: u64 = after_name.split(' ').nth(19)?.parse().ok()?;
    let system = fs::read_to_string("/proc/stat").ok()?;
    let boot_s: u64 = system.lines().find_map(|line| line.strip_prefix("btime "))?.parse().ok()?;
    Some(boot_s + ticks / positive(SysconfVar::CLK_TCK)?)
}

fn positive(name: SysconfVar) -> Option<u64> {
    sysconf(name).ok()??.try_into().ok().filter(|value| *value > 0)
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use crate::telemetry::process::*;

    #[test]
    fn process_metrics_are_plausible() {
        let process = look();
        let now_s = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs();
        let start_s = process.start_s.unwrap();
        // In a sandbox the clock of the boot may be off by seconds.
        assert!(start_s <= now_s + 5 && start_s + 86_400 > now_s, "{start_s} of {now_s}");
        assert!(process.resident_bytes.unwrap() >= 1 << 16);
        assert!(process.virtual_bytes >= process.resident_bytes);
        assert!(process.open_fds.unwrap() >= 1 && process.open_fds <= process.max_fds);
        assert!(process.cpu_s.unwrap() >= 0.0);
    }
}
