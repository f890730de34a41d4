//! `nvmfctl stats`, `nvmfctl slow`, `nvmfctl inflight`.

use std::time::Duration;

use clap::Args;
use nvmfd::api::stats::{InFlight, SlowCommand, Stats};
use nvmfd::count;
use serde_json::json;
use tokio::time::sleep;

use crate::client::Client;
use crate::derived_stats::{
    ControllerRate, Rate, Times, by_controller, bytes, rates, seconds, short, time,
};
use crate::output::{Failure, Output, table};
use crate::time::at_ms;

/// Arguments of `nvmfctl stats`.
#[derive(Args)]
pub(crate) struct StatsArgs {
    /// Show times by stage: receive, wait, pull, disk, push, reply
    #[arg(long)]
    latency: bool,
    /// Show each controller of a host instead of each namespace
    #[arg(long, conflicts_with = "latency")]
    controllers: bool,
    /// Repeat until interrupted
    #[arg(long)]
    watch: bool,
    /// Show totals since the daemon started
    #[arg(long, conflicts_with = "watch")]
    total: bool,
    /// Measure for this number of seconds
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = interval)]
    interval: Duration,
}

/// Parses an interval.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "write seconds, such as 0.5".to_owned())?;
    match seconds {
        0.1..=3600.0 => Ok(Duration::from_secs_f64(seconds)),
        _ => Err("write 0.1 to 3600 seconds".to_owned()),
    }
}

/// Gets the counters of the daemon.
pub(crate) async fn look(client: &Client) -> Result<Stats, Failure> {
    Ok(client.get::<Stats>("/v1/stats").await?.0)
}

pub(crate) async fn run(args: StatsArgs, client: &Client) -> Result<(), Failure> {
    let mut before = look(client).await?;
    if args.total {
        show(&before, &args, client.output);
        return Ok(());
    }
    loop {
        sleep(args.interval).await;
        let now = look(client).await?;
        show(&now.since(&before), &args, client.output);
        if !args.watch {
            return Ok(());
        }
        before = now;
    }
}

pub(crate) async fn slow(client: &Client) -> Result<(), Failure> {
    client.list("/v1/slow", slow_table).await
}

pub(crate) async fn in_flight(client: &Client) -> Result<(), Failure> {
    client.list("/v1/inflight", in_flight_table).await
}

fn show(since: &Stats, args: &StatsArgs, output: Output) {
    if args.controllers {
        return show_controllers(since, args, output);
    }
    let all = rates(since);
    if output.json {
        let document = json!({ "seconds": seconds(since), "rates": all });
        return output.print_on(&document.to_string());
    }
    output.print_on(&rate_table(&all));
    if args.latency && !all.is_empty() {
        output.print_on(&format!("\n{}", stage_table(&all)));
    }
    if args.watch {
        output.print_on("\n");
    }
}

fn show_controllers(since: &Stats, args: &StatsArgs, output: Output) {
    let all = by_controller(since);
    if output.json {
        let document = json!({ "seconds": seconds(since), "controllers": all });
        return output.print_on(&document.to_string());
    }
    output.print_on(&controller_table(&all));
    let together = since.controllers.iter().filter(|of| of.ops.is_none()).count();
    if together > 0 {
        output.print_on(&format!("\nnot counted apart: {}\n", count(together, "controller")));
    }
    if args.watch {
        output.print_on("\n");
    }
}

fn controller_table(all: &[ControllerRate]) -> String {
    let heads = [
        "ID",
        "HOST",
        "FROM",
        "SUBSYSTEM",
        "CNTLID",
        "OP",
        "COMMANDS",
        "BYTES",
        "IOPS",
        "BANDWIDTH",
        "MEAN",
        "FAILED",
    ];
    let rows = all.iter().map(|rate| {
        [
            rate.id.to_string(),
            rate.host.clone(),
            rate.source.clone(),
            rate.subsystem.clone(),
            rate.cntlid.to_string(),
            rate.op.clone(),
            rate.commands.to_string(),
            bytes(rate.bytes as f64),
            short(rate.iops),
            format!("{}/s", bytes(rate.bytes_per_s)),
            time(rate.mean_us),
            rate.failures.to_string(),
        ]
    });
    table(heads, rows, "no command of a connected controller has been completed meanwhile")
}

fn rate_table(all: &[Rate]) -> String {
    let heads = [
        "SUBSYSTEM",
        "NSID",
        "HOST",
        "OP",
        "IOPS",
        "BANDWIDTH",
        "MEAN",
        "P50",
        "P99",
        "P99.9",
        "DEPTH",
        "FAILED",
    ];
    let rows = all.iter().map(|rate| {
        let [mean, p50, p99, p999] = shown(&rate.latency);
        [
            rate.subsystem.clone(),
            rate.nsid.to_string(),
            rate.host.clone(),
            rate.op.clone(),
            short(rate.iops),
            format!("{}/s", bytes(rate.bytes_per_s)),
            mean,
            p50,
            p99,
            p999,
            format!("{:.1}", rate.depth),
            rate.failures.to_string(),
        ]
    });
    table(heads, rows, "no command has been completed meanwhile")
}

fn stage_table(all: &[Rate]) -> String {
    let heads =
        ["SUBSYSTEM", "NSID", "HOST", "OP", "STAGE", "SHARE", "MEAN", "P50", "P99", "P99.9"];
    let each = all.iter().flat_map(|rate| rate.stages.iter().map(move |stage| (rate, stage)));
    let rows = each.filter(|(_, stage)| stage.share > 0.0).map(|(rate, stage)| {
        let [mean, p50, p99, p999] = shown(&stage.latency);
        [
            rate.subsystem.clone(),
            rate.nsid.to_string(),
            rate.host.clone(),
            rate.op.clone(),
            stage.stage.clone(),
            format!("{:.1} %", stage.share * 100.0),
            mean,
            p50,
            p99,
            p999,
        ]
    });
    table(heads, rows, "")
}

fn shown(times: &Times) -> [String; 4] {
    [times.mean_us, times.p50_us, times.p99_us, times.p999_us].map(time)
}

fn slow_table(all: &[SlowCommand]) -> String {
    let heads = ["WHEN", "TOOK", "WHERE", "HOST", "NSID", "COMMAND", "SLBA", "LENGTH", "STATUS"];
    let rows = all.iter().map(|command| {
        let of = &command.command;
        let stages = command.stages_ns.iter().filter(|stage| stage.count >= 1_000_000);
        let stages = stages.map(|s| format!("{} {}", s.name, time(s.count as f64 / 1e3)));
        [
            at_ms(command.at_ms),
            time(command.total_ns as f64 / 1e3),
            stages.collect::<Vec<_>>().join(", "),
            of.host.clone(),
            of.nsid.to_string(),
            command_name(of.opcode),
            of.slba.to_string(),
            bytes(command.bytes as f64),
            command.status.clone(),
        ]
    });
    table(heads, rows, "no command was slow (see `slow_ms` in [observe])")
}

fn in_flight_table(all: &[InFlight]) -> String {
    let heads = ["AGE", "STAGE", "SUBSYSTEM", "NSID", "HOST", "QID", "CID", "COMMAND", "SLBA"];
    let rows = all.iter().map(|InFlight { command, stage, age_ns }| {
        let name = match command.qid {
            0 => nvme::AdminOpcode(command.opcode).to_string(),
            _ => command_name(command.opcode),
        };
        [
            time(*age_ns as f64 / 1e3),
            stage.clone(),
            command.subsystem.clone(),
            command.nsid.to_string(),
            command.host.clone(),
            command.qid.to_string(),
            command.cid.to_string(),
            name,
            command.slba.to_string(),
        ]
    });
    table(heads, rows, "no command is in progress")
}

fn command_name(opcode: u8) -> String {
    nvme::IoOpcode(opcode).to_string()
}

#[cfg(test)]
mod tests {
    use nvmfd::api::stats::{CommandIdentity, Count};

    use crate::derived_stats::tests::stats;
    use crate::stats::*;

    fn identity(qid: u16, opcode: u8) -> CommandIdentity {
        CommandIdentity {
            reactor: 0,
            subsystem: "nqn.2026-11.io.nvmfd:a".to_owned(),
            host: "nqn.2026-11.host:h".to_owned(),
            qid,
            cid: 9,
            opcode,
            nsid: 1,
            slba: 99,
        }
    }

    #[test]
    fn commands_in_progress_are_named_by_the_kind_of_their_queue() {
        let command = |qid, opcode| InFlight {
            command: identity(qid, opcode),
            stage: "disk".to_owned(),
            age_ns: 31_000_000_000,
        };
        let text = in_flight_table(&[command(1, 2), command(0, 6)]);
        for word in ["31.0 s", "disk", "nqn.2026-11.host:h", "Read", "Identify"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert_eq!(in_flight_table(&[]).trim(), "no command is in progress");
    }

    #[test]
    fn stats_tables_show_rates_by_host_and_time_shares_by_stage() {
        let all = rates(&stats());
        let text = rate_table(&all);
        let busy = text.lines().nth(1).unwrap();
        for word in ["nqn.2026-11.host:busy", "read", "30.0k", "117 MiB/s", "100 us", "3.0"] {
            assert!(busy.contains(word), "{word} in {busy}");
        }
        let text = stage_table(&all);
        assert!(
            text.lines().any(|line| line.contains("disk") && line.contains("75.0 %")),
            "{text}"
        );
        assert_eq!(rate_table(&[]), "no command has been completed meanwhile");
    }

    #[test]
    fn controller_table_shows_host_and_rate_since_connect() {
        let text = controller_table(&by_controller(&stats()));
        let line = text.lines().nth(1).unwrap();
        let words = ["7", "192.0.2.9", "nqn.2026-11.host:busy", "read", "10000", "20.0k", "100 us"];
        for word in words {
            assert!(line.contains(word), "{word} in {line}");
        }
        assert!(line.contains("78.1 MiB/s") && line.trim_end().ends_with(" 2"), "{line}");
    }

    #[test]
    fn slow_command_table_shows_time_and_stages() {
        let slow = SlowCommand {
            at_ms: 1_795_270_000_123,
            command: identity(1, 2),
            bytes: 4096,
            status: "Success".to_owned(),
            total_ns: 250_000_000,
            stages_ns: vec![
                Count { name: "wait".to_owned(), count: 5 },
                Count { name: "disk".to_owned(), count: 249_000_000 },
            ],
        };
        let text = slow_table(std::slice::from_ref(&slow));
        for word in [at_ms(slow.at_ms).as_str(), "250 ms", "disk 249 ms", "99", "4.00 KiB"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        assert!(!text.contains("wait"));
    }

    #[test]
    fn an_interval_is_a_tenth_of_a_second_to_an_hour() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        assert!(interval("0").is_err() && interval("nan").is_err() && interval("x").is_err());
    }
}
