//! The tool `nvmf`.

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser, Debug)]
#[command(name = "nvmf", version, about = "A user-space NVMe over RDMA host")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measure how fast a namespace is
    Bench(initiator::bench::Args),
    /// Write, read back and check that nothing is lost
    Verify(initiator::verify::Args),
}

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Bench(args) => initiator::bench::run(&args),
        Command::Verify(args) => initiator::verify::run(&args),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("nvmf: {error}");
        ExitCode::FAILURE
    })
}
