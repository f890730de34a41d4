//! The tool `nvmf`: a user-space NVMe over RDMA host on the command line. Its commands, options
//! and JSON are those of nvme-cli, if it has them; but there is no device, so every command
//! selects its target, connects, acts and disconnects.

mod cli;
#[cfg(test)]
#[path = "../../tests/src/documented_commands.rs"]
mod documented_commands;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, Parser, Subcommand};
use initiator::Error;
use tracing::level_filters::LevelFilter;

use crate::cli::output::Raw;
use crate::cli::{
    With, data_management, discover, feature, identify, list, log_page, manpages, ns_management,
    read_write, reservation, show_regs, supported,
};

/// The version of the package, or `NVMFD_VERSION` at build time.
const VERSION: &str = match option_env!("NVMFD_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

/// Sections of the manual page that the command line does not have.
const MORE: &str = include_str!("cli/nvmf.roff");

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// A user-space NVMe over RDMA host.
///
/// Needs no kernel module, no device and no privilege. Commands, options and JSON follow nvme-cli.
///
/// Exit codes: 0 done, 1 failed, 2 usage.
#[derive(Parser, Debug)]
#[command(name = "nvmf", version = VERSION, max_term_width = 100, args_override_self = true)]
struct Cli {
    /// Set the log level on standard error [default: error; attach and link --listen: info; copy, and bench and verify over --paths: warn]
    #[arg(long, value_name = "LEVEL", global = true,
        value_parser = PossibleValuesParser::new(LEVELS).try_map(|name| name.parse::<LevelFilter>()))]
    log: Option<LevelFilter>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the records of a discovery service
    Discover(With<()>),
    /// List the namespaces that a target offers us
    List(With<()>),
    /// Identify Controller
    IdCtrl(With<Raw>),
    /// Identify Namespace
    IdNs(With<identify::Namespace>),
    /// List the active namespaces of a subsystem
    ListNs(With<identify::List>),
    /// Namespace Identification Descriptors
    NsDescs(With<identify::Namespace>),
    /// SMART / Health Information log
    SmartLog(With<log_page::SmartArgs>),
    /// Error Information log
    ErrorLog(With<log_page::ErrorArgs>),
    /// Commands Supported and Effects log
    EffectsLog(With<Raw>),
    /// Supported Log Pages log
    SupportedLogPages(With<Raw>),
    /// Feature Identifiers Supported and Effects log
    FidSupportEffectsLog(With<Raw>),
    /// Any log page
    GetLog(With<log_page::PageArgs>),
    /// Get Features
    GetFeature(With<feature::GetArgs>),
    /// Set Features
    SetFeature(With<feature::SetArgs>),
    /// Read blocks
    Read(With<read_write::Args>),
    /// Write blocks
    Write(With<read_write::Args>),
    /// Have the controller compare blocks with given data
    Compare(With<read_write::Args>),
    /// Compare blocks and write them when they are alike, as one step
    CompareAndWrite(With<read_write::FusedArgs>),
    /// Flush
    Flush(With<data_management::FlushArgs>),
    /// Write Zeroes
    WriteZeroes(With<data_management::ZeroesArgs>),
    /// Verify: let the controller read blocks without transferring them
    VerifyBlocks(With<data_management::BlocksArgs>),
    /// Write Uncorrectable: blocks that cannot be read until they are written again
    WriteUncor(With<data_management::BlocksArgs>),
    /// Dataset Management
    Dsm(With<data_management::DsmArgs>),
    /// Copy: have the controller copy blocks within a namespace
    CopyBlocks(With<data_management::CopyArgs>),
    /// Create a namespace
    CreateNs(With<ns_management::CreateArgs>),
    /// Delete a namespace
    DeleteNs(With<ns_management::DeleteArgs>),
    /// Attach a namespace to controllers
    AttachNs(With<ns_management::AttachArgs>),
    /// Detach a namespace from controllers
    DetachNs(With<ns_management::AttachArgs>),
    /// Format a namespace: all that is in it is lost
    Format(With<ns_management::FormatArgs>),
    /// Controller properties
    ShowRegs(With<()>),
    /// Reservation Register
    ResvRegister(With<reservation::RegisterArgs>),
    /// Reservation Acquire
    ResvAcquire(With<reservation::AcquireArgs>),
    /// Reservation Release
    ResvRelease(With<reservation::ReleaseArgs>),
    /// Reservation Report
    ResvReport(With<reservation::ReportArgs>),
    /// Reservation Notification log: the oldest page, which is then removed
    ResvNotifLog(With<Raw>),
    /// Measure how fast a namespace is
    Bench(initiator::bench::Args),
    /// Overwrite blocks, read them back and check that no write is lost
    Verify(initiator::verify::Args),
    /// Copy a namespace to a file, a file to a namespace, or a namespace to another
    Copy(initiator::copy::Args),
    /// Serve a namespace to NBD clients or a virtual machine: a block device without kernel module
    /// or root
    Attach(initiator::attach::Args),
    /// Measure latency and bandwidth between two ends, without a target
    Link(initiator::link::Args),
    /// Write manual pages and completions below a directory such as /usr/share
    #[command(hide = true)]
    InstallFiles {
        /// The directory
        share: std::path::PathBuf,
    },
}

impl Command {
    fn run(&self) -> Result<ExitCode, Error> {
        match self {
            Command::Discover(args) => args.run(discover::run),
            Command::List(args) => args.run(list::run),
            Command::IdCtrl(args) => args.run(identify::controller),
            Command::IdNs(args) => args.run(identify::namespace),
            Command::ListNs(args) => args.run(identify::list),
            Command::NsDescs(args) => args.run(identify::descriptors),
            Command::SmartLog(args) => args.run(log_page::smart),
            Command::ErrorLog(args) => args.run(log_page::errors),
            Command::EffectsLog(args) => args.run(supported::effects),
            Command::SupportedLogPages(args) => args.run(supported::supported),
            Command::FidSupportEffectsLog(args) => args.run(supported::features),
            Command::GetLog(args) => args.run(log_page::page),
            Command::GetFeature(args) => args.run(feature::get),
            Command::SetFeature(args) => args.run(feature::set),
            Command::Read(args) => args.run(read_write::read),
            Command::Write(args) => args.run(read_write::write),
            Command::Compare(args) => args.run(read_write::compare),
            Command::CompareAndWrite(args) => args.run(read_write::compare_and_write),
            Command::Flush(args) => args.run(data_management::flush),
            Command::WriteZeroes(args) => args.run(data_management::write_zeroes),
            Command::VerifyBlocks(args) => args.run(data_management::verify),
            Command::WriteUncor(args) => args.run(data_management::write_uncorrectable),
            Command::Dsm(args) => args.run(data_management::dsm),
            Command::CopyBlocks(args) => args.run(data_management::copy),
            Command::CreateNs(args) => args.run(ns_management::create),
            Command::DeleteNs(args) => args.run(ns_management::delete),
            Command::AttachNs(args) => args.run(ns_management::attach),
            Command::DetachNs(args) => args.run(ns_management::detach),
            Command::Format(args) => args.run(ns_management::format),
            Command::ShowRegs(args) => args.run(show_regs::run),
            Command::ResvRegister(args) => args.run(reservation::register),
            Command::ResvAcquire(args) => args.run(reservation::acquire),
            Command::ResvRelease(args) => args.run(reservation::release),
            Command::ResvReport(args) => args.run(reservation::report),
            Command::ResvNotifLog(args) => args.run(reservation::notification),
            Command::Bench(args) => return initiator::bench::run(args),
            Command::Verify(args) => return initiator::verify::run(args),
            Command::Copy(args) => return initiator::copy::run(args),
            Command::Attach(args) => return initiator::attach::run(args),
            Command::Link(args) => return initiator::link::run(args),
            Command::InstallFiles { share } => manpages::write(Cli::command(), "1", MORE, share)
                .map_err(|error| Error::Local(format!("{}: {error}", share.display()))),
        }
        .map(|()| ExitCode::SUCCESS)
    }
}

fn main() -> ExitCode {
    let Cli { log, command } = Cli::parse();
    let lines = tracing_subscriber::fmt().with_writer(std::io::stderr).without_time();
    let usual = match &command {
        Command::Attach(_) | Command::Link(initiator::link::Args { listen: Some(_), .. }) => {
            LevelFilter::INFO
        }
        Command::Copy(_) => LevelFilter::WARN,
        Command::Bench(initiator::bench::Args { paths, .. })
        | Command::Verify(initiator::verify::Args { paths, .. })
            if !paths.paths.is_empty() =>
        {
            LevelFilter::WARN
        }
        _ => LevelFilter::ERROR,
    };
    let lines = lines.with_target(false).with_ansi(std::io::stderr().is_terminal());
    lines.with_max_level(log.unwrap_or(usual)).init();
    command.run().unwrap_or_else(|error| {
        eprintln!("nvmf: {error}");
        match error {
            Error::Usage(_) => ExitCode::from(2),
            _ => ExitCode::FAILURE,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_table_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn command_lines_in_documents_are_accepted() {
        let parse = |words| Cli::try_parse_from::<Vec<String>, _>(words).map(drop);
        documented_commands::assert_accepted("nvmf", parse);
    }
}
