//! Plan of a benchmark, computed and validated before it starts.

use std::time::Duration;

use rdma::SpinBudget;

use crate::Error;
use crate::namespace_host::NamespaceHost;
use crate::options::OptionDefaults;

use super::Args;
use super::pattern::Access;

/// Default time to poll for completions: about twice the cost of a wake-up.
const SPIN_AUTO: Duration = Duration::from_micros(100);
/// The unit of the pool.
const PAGE_BYTES: u64 = 4096;
/// Space in the pool for other users than the benchmark.
const SPARE_BYTES: u64 = 1 << 20;
/// Maximum size of the buffers of one job, in bytes.
const MOST_BYTES: u64 = 16 << 30;

/// Settings shared by all jobs.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) rw: Access,
    pub(super) mix: u8,
    /// Bytes and blocks of one command.
    pub(super) bytes: u32,
    pub(super) blocks: u32,
    /// The first block, and the number of commands that fit in the range.
    pub(super) first_lba: u64,
    pub(super) places: u64,
    pub(super) depth: u32,
    pub(super) queues: u16,
    pub(super) jobs: u32,
    pub(super) ramp: Duration,
    pub(super) runtime: Duration,
    pub(super) spin: SpinBudget,
    pub(super) seed: u64,
    pub(super) fua: bool,
    /// For the report.
    pub(super) options: Vec<(&'static str, String)>,
}

impl Plan {
    /// Creates a plan from the options and the properties of the target.
    pub(super) fn new(args: &Args, host: &mut NamespaceHost) -> Result<Plan, Error> {
        let namespace = host.properties()?;
        let block_bytes = namespace.block_bytes;
        let range = range(args, block_bytes, namespace.blocks)?;
        let most = namespace.max_transfer_bytes;
        let bytes = u32::try_from(args.bs).ok().filter(|&bytes| bytes <= most);
        let bytes = bytes.ok_or_else(|| {
            Error::Usage(format!("--bs {}: the controller moves at most {most} at once", args.bs))
        })?;
        let (queues, capacity) = host.session().map_or((0, 0), |session| {
            let capacity = (1..=session.io_queues()).map(|queue| session.capacity(queue)).min();
            (session.io_queues(), capacity.unwrap_or(0))
        });
        let per_queue = args.iodepth.div_ceil(u32::from(queues.max(1)));
        if u32::from(capacity) < per_queue {
            return Err(Error::Usage(format!(
                "--iodepth {}: more than fit into the granted I/O queues ({queues} × {capacity}); \
                 request more queues with -i, or fewer commands",
                args.iodepth
            )));
        }
        let spin = match args.spin_us {
            Some(us) => SpinBudget::of(Duration::from_micros(us.into())),
            None => SpinBudget::auto(SPIN_AUTO),
        };
        Ok(Plan {
            rw: args.rw,
            mix: args.rwmixread,
            bytes,
            blocks: bytes / block_bytes,
            first_lba: range.first_lba,
            places: range.places,
            depth: args.iodepth,
            queues,
            jobs: args.numjobs,
            ramp: args.ramp_time,
            runtime: args.runtime,
            spin,
            seed: args.seed,
            fua: args.fua,
            options: options(args, queues, &host.provider().to_string(), range.places),
        })
    }
}

/// A part of a namespace, divided into commands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Range {
    first_lba: u64,
    places: u64,
}

fn range(args: &Args, block_bytes: u32, blocks: u64) -> Result<Range, Error> {
    let block = u64::from(block_bytes);
    let total = blocks.saturating_mul(block);
    for (name, value) in [("bs", args.bs), ("offset", args.offset)] {
        if !value.is_multiple_of(block) || name == "bs" && value == 0 {
            return Err(Error::Usage(format!(
                "--{name} {value}: the namespace has blocks of {block} bytes, so use a multiple"
            )));
        }
    }
    let left = total.saturating_sub(args.offset);
    let size = args.size.unwrap_or(left);
    if size > left {
        return Err(Error::Usage(format!(
            "--size {size}: the namespace has {left} bytes from there on"
        )));
    }
    match size / args.bs {
        0 => Err(Error::Usage(format!("not one command of {} bytes fits into {size}", args.bs))),
        places => Ok(Range { first_lba: args.offset / block, places }),
    }
}

/// Returns the memory of the pool for one command, in bytes.
pub(super) fn piece(bytes: u64) -> Result<u32, Error> {
    let piece = bytes.max(PAGE_BYTES).checked_next_power_of_two();
    let piece = piece.and_then(|piece| u32::try_from(piece).ok()).filter(|_| bytes < 16 << 20);
    piece.ok_or_else(|| Error::Usage(format!("--bs {bytes}: one command moves less than 16 MiB")))
}

/// Returns the defaults for connecting.
pub(super) fn usual(args: &Args, queues: u16, per_queue: u32) -> Result<OptionDefaults, Error> {
    let entries = u16::try_from(per_queue + 1).ok().filter(|&entries| entries <= 4096);
    let entries = entries.ok_or_else(|| {
        Error::Usage(format!(
            "--iodepth {}: more than fit into the I/O queues ({queues})",
            args.iodepth
        ))
    })?;
    let data_bytes = u64::from(piece(args.bs)?) * u64::from(args.iodepth) + SPARE_BYTES;
    if data_bytes > MOST_BYTES {
        let gib = data_bytes >> 30;
        return Err(Error::Usage(format!("--iodepth and --bs together take {gib} GiB of memory")));
    }
    Ok(OptionDefaults { io_queues: queues, queue_entries: entries.max(32), data_bytes })
}

/// Returns the options by fio's names.
fn options(args: &Args, queues: u16, provider: &str, places: u64) -> Vec<(&'static str, String)> {
    let mut options = vec![
        ("name", args.name.clone()),
        ("ioengine", format!("nvmf-{provider}")),
        ("rw", args.rw.name().into()),
        ("bs", args.bs.to_string()),
        ("iodepth", args.iodepth.to_string()),
        ("queues", queues.to_string()),
        ("numjobs", args.numjobs.to_string()),
        ("size", (places * args.bs).to_string()),
        ("offset", args.offset.to_string()),
        ("runtime", args.runtime.as_secs_f64().to_string()),
        ("randseed", args.seed.to_string()),
    ];
    if !args.ramp_time.is_zero() {
        options.push(("ramp_time", args.ramp_time.as_secs_f64().to_string()));
    }
    if matches!(args.rw, Access::Rw | Access::Randrw) {
        options.push(("rwmixread", args.rwmixread.to_string()));
    }
    options
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use crate::bench::plan::*;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        args: Args,
    }

    fn args(line: &str) -> Args {
        let all = ["nvmf", "-a", "127.0.0.1", "-n", "nqn.2014-08.org.example:x"];
        Cli::try_parse_from(all.into_iter().chain(line.split_whitespace())).expect("options").args
    }

    #[test]
    fn ranges_are_truncated_to_commands_and_misaligned_ones_refused() {
        let of = |line: &str| range(&args(line), 4096, 1000).map_err(|error| error.to_string());
        assert_eq!(of(""), Ok(Range { first_lba: 0, places: 1000 }));
        assert_eq!(of("--bs 128k"), Ok(Range { first_lba: 0, places: 31 }));
        assert_eq!(of("--bs 8k --offset 8k --size 100k"), Ok(Range { first_lba: 2, places: 12 }));
        for wrong in ["--bs 512", "--offset 1", "--bs 0", "--size 4m", "--bs 1m --size 512k"] {
            assert!(of(wrong).is_err(), "{wrong}");
        }
        assert!(of("--offset 100m").is_err());
    }

    #[test]
    fn the_pool_has_room_for_every_command() {
        assert_eq!(piece(512).ok(), Some(4096));
        assert_eq!(piece(4097).ok(), Some(8192));
        assert_eq!(piece(1 << 20).ok(), Some(1 << 20));
        assert!(piece(16 << 20).is_err() && piece(u64::MAX).is_err());
        let usual = usual(&args("--bs 100k --iodepth 64"), 2, 32).expect("fits");
        assert_eq!(usual.data_bytes, 64 * (128 << 10) + SPARE_BYTES);
        assert_eq!((usual.io_queues, usual.queue_entries), (2, 33));
        assert!(super::usual(&args("--iodepth 5000"), 1, 5000).is_err());
        assert!(super::usual(&args("--bs 15m --iodepth 2048"), 1, 2048).is_err());
    }

    #[test]
    fn job_options_are_reported_as_in_fio() {
        let args = args("--rw readwrite --bs 8k --ramp_time 2 --runtime 500ms --rwmixread 70");
        assert_eq!(args.runtime, Duration::from_millis(500));
        let options = options(&args, 3, "soft", 10);
        for (name, value) in [
            ("rw", "rw"),
            ("bs", "8192"),
            ("ioengine", "nvmf-soft"),
            ("size", "81920"),
            ("ramp_time", "2"),
            ("runtime", "0.5"),
            ("rwmixread", "70"),
        ] {
            assert!(options.contains(&(name, value.into())), "{name} in {options:?}");
        }
    }
}
