//! Checks the machine: io_uring, locked memory, RDMA devices and their modules, the clock.

use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use io_uring::IoUring;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};

use super::{Finding, may_be_soft};
use crate::blockdev::IoEngine;
use crate::config::{Config, Provider};

/// Earlier than any machine on which this program can run: 2026-01-01.
const EARLIEST: Duration = Duration::from_secs(1_767_225_600);

/// What threads cost: docs/src/performance.md has the figures.
const COST: &str =
    "a third fewer small reads at depth 32 than by io_uring, for seven times the CPU";

/// Bit of CAP_IPC_LOCK, which lifts the limit of locked memory.
const CAP_IPC_LOCK: u32 = 14;

pub(super) fn examine(config: Option<&Config>) -> Vec<Finding> {
    let disabled = number("/proc/sys/kernel/io_uring_disabled");
    let engine = config.map_or(IoEngine::Auto, |config| config.reactor.io_engine);
    let mut findings = vec![ring(disabled, IoUring::new(8).map(drop), engine)];
    if let Some(config) = config {
        let needed = config.pool_plan().total_bytes() * config.reactor.count() as u64;
        let limit = getrlimit(Resource::RLIMIT_MEMLOCK).map_or(0, |(_, hard)| hard);
        findings.push(locked(needed, limit, may_lock(&read("/proc/self/status"))));
    }
    let devices = names("/sys/class/infiniband").into_iter().map(|name| {
        let state = read(&format!("/sys/class/infiniband/{name}/ports/1/state"));
        let state = state.rsplit(' ').next().unwrap_or_default().trim().to_owned();
        (name, state)
    });
    let devices: Vec<_> = devices.collect();
    let access = Path::new("/dev/infiniband/rdma_cm").exists();
    let provider = config.map_or(Provider::Auto, |config| config.provider);
    findings.push(rdma(provider, &devices, access));
    if may_be_soft(config) && Path::new("/sys/module/rdma_rxe").exists() {
        let rxe = devices.iter().filter(|(name, _)| is_rxe(name)).map(|(name, _)| name.as_str());
        findings.extend(soft_beside(&rxe.collect::<Vec<_>>()));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    findings.push(clock(now, synchronised()));
    findings
}

/// `disabled`: value of kernel.io_uring_disabled, if it exists.
fn ring(disabled: Option<u64>, tried: io::Result<()>, engine: IoEngine) -> Finding {
    let check = "io_uring";
    let Err(error) = tried else { return Finding::ok(check, "a ring can be made") };
    let sentence = format!("no ring can be made: {error}");
    let remedy = match (disabled, error.raw_os_error()) {
        (Some(2), _) => "allow it: sysctl -w kernel.io_uring_disabled=0 (or 1 and io_uring_group)",
        (Some(1), _) => {
            "run nvmfd in the group that kernel.io_uring_group names, or allow it to all: sysctl \
             -w kernel.io_uring_disabled=0"
        }
        (_, Some(libc::ENOSYS)) => "use a kernel of 6.1 or newer that has io_uring",
        (_, Some(libc::EPERM | libc::EACCES)) => {
            "a seccomp filter forbids it, as containers' do: allow io_uring_setup, io_uring_enter \
             and io_uring_register in its profile"
        }
        (_, Some(libc::ENOMEM)) => "raise the limit of locked memory (ulimit -l, LimitMEMLOCK)",
        _ => "see the kernel log",
    };
    let is_denied = !matches!(error.raw_os_error(), Some(libc::ENOMEM | libc::EMFILE));
    match engine {
        IoEngine::Auto if is_denied => {
            Finding::warning(check, format!("{sentence}: {COST}"), remedy)
        }
        IoEngine::Threads => Finding::ok(check, format!("threads execute device I/O: {COST}")),
        _ => Finding::problem(check, sentence, remedy),
    }
}

fn locked(needed: u64, limit: u64, unlimited: bool) -> Finding {
    let check = "memlock";
    let mib = |bytes: u64| bytes.div_ceil(1 << 20);
    if unlimited || limit == RLIM_INFINITY {
        return Finding::ok(check, format!("{} MiB may be locked", mib(needed)));
    }
    // A device and the ring each account for the pool.
    if limit >= needed * 2 {
        let sentence = format!("{} MiB are needed, {} MiB allowed", mib(needed * 2), mib(limit));
        return Finding::ok(check, sentence);
    }
    let sentence = format!(
        "the configuration locks up to {} MiB, and this session may lock {} MiB",
        mib(needed * 2),
        mib(limit)
    );
    let remedy = format!(
        "start nvmfd by its unit (LimitMEMLOCK=infinity), or raise the limit (ulimit -l {}), or \
         make [memory] smaller",
        (needed * 2).div_ceil(1024)
    );
    match limit >= needed {
        true => Finding::warning(check, sentence, remedy),
        false => Finding::problem(check, sentence, remedy),
    }
}

/// `devices`: their names and port states. `access`: the device node for connections exists.
fn rdma(provider: Provider, devices: &[(String, String)], access: bool) -> Finding {
    let check = "rdma";
    let wanted = provider == Provider::Verbs;
    let list: Vec<String> =
        devices.iter().map(|(name, state)| format!("{name} ({state})")).collect();
    let active = devices.iter().any(|(_, state)| state == "ACTIVE");
    match (devices.is_empty(), active, access) {
        (true, ..) if wanted => Finding::problem(
            check,
            "provider is \"verbs\", and this machine has no RDMA device",
            "load the driver of the adapter (modprobe), or use provider = \"soft\"",
        ),
        (true, ..) => Finding::ok(check, "no RDMA device: \"soft\" will serve over UDP"),
        (false, _, false) if provider != Provider::Soft => {
            let sentence = format!("{}, and no /dev/infiniband/rdma_cm", list.join(", "));
            let remedy = "load the modules that programs need: modprobe -a rdma_ucm ib_uverbs";
            match wanted {
                true => Finding::problem(check, sentence, remedy),
                false => Finding::warning(check, sentence, remedy),
            }
        }
        (false, false, _) if provider != Provider::Soft => Finding::warning(
            check,
            format!("no port is active: {}", list.join(", ")),
            "set its network interface up (ip link set up), and look at cable and switch",
        ),
        _ => Finding::ok(check, list.join(", ")),
    }
}

/// Checks for users of UDP port 4791 in the kernel, which exclude `soft`.
fn soft_beside(devices: &[&str]) -> Option<Finding> {
    (!devices.is_empty()).then(|| {
        Finding::warning(
            "rdma_rxe",
            format!("rdma_rxe holds UDP port 4791 for {}", devices.join(", ")),
            format!(
                "to serve with \"soft\", remove it: rdma link delete {}; or serve with provider = \
                 \"verbs\" on its address",
                devices[0]
            ),
        )
    })
}

pub(super) fn is_rxe(device: &str) -> bool {
    // Soft devices have no parent on a bus in the device tree; their driver identifies them.
    let info = read(&format!("/sys/class/infiniband/{device}/node_desc"));
    info.trim_start().starts_with("rxe") || device.starts_with("rxe")
}

fn clock(since_epoch: Duration, synchronised: Option<bool>) -> Finding {
    let check = "clock";
    if since_epoch < EARLIEST {
        return Finding::problem(
            check,
            "the clock is before 2026, so no record of the log can be placed in time",
            "set it: timedatectl set-ntp true, or date -s",
        );
    }
    match synchronised {
        Some(true) => Finding::ok(check, "the clock is synchronised"),
        Some(false) => Finding::warning(
            check,
            "the clock is not synchronised: times of hosts and target will not match in the logs",
            "timedatectl set-ntp true",
        ),
        None => Finding::ok(check, "the clock is plausible; it is unknown if it is synchronised"),
    }
}

/// State of the clock according to systemd, if it runs.
fn synchronised() -> Option<bool> {
    let ask = ["show", "-p", "NTPSynchronized", "--value"];
    let said = Command::new("timedatectl").args(ask).output().ok()?;
    match said.stdout.trim_ascii() {
        b"yes" => Some(true),
        b"no" => Some(false),
        _ => None,
    }
}

/// Whether a process with this `/proc/self/status` may lock unlimited memory.
fn may_lock(status: &str) -> bool {
    let line = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let set = line.and_then(|text| u64::from_str_radix(text.trim(), 16).ok());
    set.is_some_and(|set| set & 1 << CAP_IPC_LOCK != 0)
}

pub(super) fn read(path: &str) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

pub(super) fn number(path: &str) -> Option<u64> {
    read(path).trim().parse().ok()
}

/// Names of the entries of a directory, sorted.
pub(super) fn names(directory: &str) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::super::Level::{Ok as Fine, Problem, Warning};
    use super::super::tests::says;
    use crate::platform::doctor::machine::*;

    #[test]
    fn an_io_uring_failure_is_reported_with_its_remedy() {
        says(&ring(None, Ok(()), IoEngine::Auto), Fine, "can be made");
        let fails = |errno| Err(io::Error::from_raw_os_error(errno));
        for (disabled, errno, remedy) in [
            (Some(2), libc::EPERM, "io_uring_disabled=0"),
            (Some(1), libc::EPERM, "io_uring_group"),
            (Some(0), libc::EPERM, "seccomp"),
            (None, libc::ENOSYS, "kernel of 6.1"),
            (None, libc::ENOMEM, "LimitMEMLOCK"),
        ] {
            let finding = ring(disabled, fails(errno), IoEngine::IoUring);
            says(&finding, Problem, "no ring");
            assert!(finding.remedy.contains(remedy), "{finding}");
            let is_denied = errno != libc::ENOMEM;
            let level = if is_denied { Warning } else { Problem };
            says(&ring(disabled, fails(errno), IoEngine::Auto), level, "no ring");
            says(&ring(disabled, fails(errno), IoEngine::Threads), Fine, "threads");
        }
    }

    #[test]
    fn the_memlock_limit_is_compared_with_the_pool_size() {
        let need = 64 << 20;
        says(&locked(need, RLIM_INFINITY, false), Fine, "64 MiB");
        says(&locked(need, 0, true), Fine, "64 MiB");
        says(&locked(need, 2 * need, false), Fine, "128 MiB");
        says(&locked(need, need, false), Warning, "up to 128 MiB");
        says(&locked(need, 8 << 20, false), Problem, "may lock 8 MiB");
        assert!(may_lock("Name:\tx\nCapEff:\t0000000000004000\n"));
        assert!(!may_lock("Name:\tx\nCapEff:\t0000000000003fff\n"));
    }

    #[test]
    fn a_missing_rdma_device_is_a_problem_if_the_provider_needs_it() {
        let device = |state: &str| vec![("mlx5_0".to_owned(), state.to_owned())];
        says(&rdma(Provider::Verbs, &[], false), Problem, "no RDMA device");
        says(&rdma(Provider::Auto, &[], false), Fine, "soft");
        says(&rdma(Provider::Verbs, &device("ACTIVE"), false), Problem, "rdma_cm");
        says(&rdma(Provider::Auto, &device("ACTIVE"), false), Warning, "rdma_cm");
        says(&rdma(Provider::Verbs, &device("DOWN"), true), Warning, "mlx5_0 (DOWN)");
        says(&rdma(Provider::Verbs, &device("ACTIVE"), true), Fine, "mlx5_0");
        says(&rdma(Provider::Soft, &device("DOWN"), false), Fine, "mlx5_0");
        says(&soft_beside(&["rxe0"]).unwrap(), Warning, "4791");
        assert_eq!(soft_beside(&[]), None);
    }

    #[test]
    fn an_implausible_or_unsynchronised_clock_is_reported() {
        says(&clock(Duration::ZERO, Some(true)), Problem, "before 2026");
        says(&clock(EARLIEST, Some(false)), Warning, "not synchronised");
        says(&clock(EARLIEST, Some(true)), Fine, "is synchronised");
        says(&clock(EARLIEST, None), Fine, "plausible");
    }
}
