//! The tool `nvmf`: a user-space NVMe over RDMA host on the command line. Its commands, options
//! and JSON are those of nvme-cli, if it has them; but there is no device, so every command
//! selects its target, connects, acts and disconnects.

mod cli;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{CommandFactory, Parser, Subcommand};
use initiator::Error;
use tracing::level_filters::LevelFilter;

use crate::cli::output::Output;
use crate::cli::{
    PlainArgs, RawArgs, data_management, discover, feature, identify, list, log_page, manpages,
    ns_management, read_write, reservation, show_regs, supported,
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
    /// How much to log to the standard error [default: error; attach and link --listen: info; copy, and bench and verify over --paths: warn]
    #[arg(long, value_name = "LEVEL", global = true,
        value_parser = PossibleValuesParser::new(LEVELS).try_map(|name| name.parse::<LevelFilter>()))]
    log: Option<LevelFilter>,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the records of a discovery service
    Discover(PlainArgs),
    /// List the namespaces that a target offers us
    List(PlainArgs),
    /// Identify Controller
    IdCtrl(RawArgs),
    /// Identify Namespace
    IdNs(identify::Namespace),
    /// List the active namespaces of a subsystem
    ListNs(identify::List),
    /// Namespace Identification Descriptors
    NsDescs(identify::Namespace),
    /// SMART / Health Information log
    SmartLog(log_page::SmartArgs),
    /// Error Information log
    ErrorLog(log_page::ErrorArgs),
    /// Commands Supported and Effects log
    EffectsLog(RawArgs),
    /// Supported Log Pages log
    SupportedLogPages(RawArgs),
    /// Feature Identifiers Supported and Effects log
    FidSupportEffectsLog(RawArgs),
    /// Any log page
    GetLog(log_page::PageArgs),
    /// Get Features
    GetFeature(feature::GetArgs),
    /// Set Features
    SetFeature(feature::SetArgs),
    /// Read blocks
    Read(read_write::Args),
    /// Write blocks
    Write(read_write::Args),
    /// Have the controller compare blocks with given data
    Compare(read_write::Args),
    /// Compare blocks and write them when they are alike, as one step
    CompareAndWrite(read_write::FusedArgs),
    /// Flush
    Flush(data_management::FlushArgs),
    /// Write Zeroes
    WriteZeroes(data_management::ZeroesArgs),
    /// Verify: let the controller read blocks without transferring them
    VerifyBlocks(data_management::BlocksArgs),
    /// Write Uncorrectable: blocks that cannot be read until they are written again
    WriteUncor(data_management::BlocksArgs),
    /// Dataset Management
    Dsm(data_management::DsmArgs),
    /// Copy: have the controller copy blocks within a namespace
    CopyBlocks(data_management::CopyArgs),
    /// Create a namespace
    CreateNs(ns_management::CreateArgs),
    /// Delete a namespace
    DeleteNs(ns_management::DeleteArgs),
    /// Attach a namespace to controllers
    AttachNs(ns_management::AttachArgs),
    /// Detach a namespace from controllers
    DetachNs(ns_management::AttachArgs),
    /// Format a namespace: all that is in it is lost
    Format(ns_management::FormatArgs),
    /// Controller properties
    ShowRegs(PlainArgs),
    /// Reservation Register
    ResvRegister(reservation::RegisterArgs),
    /// Reservation Acquire
    ResvAcquire(reservation::AcquireArgs),
    /// Reservation Release
    ResvRelease(reservation::ReleaseArgs),
    /// Reservation Report
    ResvReport(reservation::ReportArgs),
    /// Reservation Notification log: the oldest page, which is then removed
    ResvNotifLog(RawArgs),
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
            Command::Discover(args) => discover::run(args),
            Command::List(args) => list::run(args),
            Command::IdCtrl(args) => identify::controller(args),
            Command::IdNs(args) => identify::namespace(args),
            Command::ListNs(args) => identify::list(args),
            Command::NsDescs(args) => identify::descriptors(args),
            Command::SmartLog(args) => log_page::smart(args),
            Command::ErrorLog(args) => log_page::errors(args),
            Command::EffectsLog(args) => supported::effects(args),
            Command::SupportedLogPages(args) => supported::supported(args),
            Command::FidSupportEffectsLog(args) => supported::features(args),
            Command::GetLog(args) => log_page::page(args),
            Command::GetFeature(args) => feature::get(args),
            Command::SetFeature(args) => feature::set(args),
            Command::Read(args) => read_write::read(args),
            Command::Write(args) => read_write::write(args),
            Command::Compare(args) => read_write::compare(args),
            Command::CompareAndWrite(args) => read_write::compare_and_write(args),
            Command::Flush(args) => data_management::flush(args),
            Command::WriteZeroes(args) => data_management::write_zeroes(args),
            Command::VerifyBlocks(args) => data_management::verify(args),
            Command::WriteUncor(args) => data_management::write_uncorrectable(args),
            Command::Dsm(args) => data_management::dsm(args),
            Command::CopyBlocks(args) => data_management::copy(args),
            Command::CreateNs(args) => ns_management::create(args),
            Command::DeleteNs(args) => ns_management::delete(args),
            Command::AttachNs(args) => ns_management::attach(args),
            Command::DetachNs(args) => ns_management::detach(args),
            Command::Format(args) => ns_management::format(args),
            Command::ShowRegs(args) => show_regs::run(args),
            Command::ResvRegister(args) => reservation::register(args),
            Command::ResvAcquire(args) => reservation::acquire(args),
            Command::ResvRelease(args) => reservation::release(args),
            Command::ResvReport(args) => reservation::report(args),
            Command::ResvNotifLog(args) => reservation::notification(args),
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

    /// Output options of the command, if it has the common ones.
    fn output(&self) -> Option<Output> {
        Some(match self {
            Command::Discover(args) => args.output,
            Command::List(args) => args.output,
            Command::IdCtrl(args) => args.output,
            Command::IdNs(args) | Command::NsDescs(args) => args.output,
            Command::ListNs(args) => args.output,
            Command::SmartLog(args) => args.output,
            Command::ErrorLog(args) => args.output,
            Command::EffectsLog(args)
            | Command::SupportedLogPages(args)
            | Command::FidSupportEffectsLog(args) => args.output,
            Command::GetLog(args) => args.output,
            Command::GetFeature(args) => args.output,
            Command::SetFeature(args) => args.output,
            Command::Read(args) | Command::Write(args) | Command::Compare(args) => args.output,
            Command::CompareAndWrite(args) => args.output,
            Command::Flush(args) => args.output,
            Command::WriteZeroes(args) => args.output,
            Command::VerifyBlocks(args) | Command::WriteUncor(args) => args.output,
            Command::Dsm(args) => args.output,
            Command::CopyBlocks(args) => args.output,
            Command::CreateNs(args) => args.output,
            Command::DeleteNs(args) => args.output,
            Command::AttachNs(args) | Command::DetachNs(args) => args.output,
            Command::Format(args) => args.output,
            Command::ShowRegs(args) => args.output,
            Command::ResvRegister(args) => args.output,
            Command::ResvAcquire(args) => args.output,
            Command::ResvRelease(args) => args.output,
            Command::ResvReport(args) => args.output,
            Command::ResvNotifLog(args) => args.output,
            Command::Attach(_)
            | Command::Bench(_)
            | Command::Copy(_)
            | Command::Link(_)
            | Command::Verify(_)
            | Command::InstallFiles { .. } => return None,
        })
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
    let error = match command.run() {
        Ok(code) => return code,
        Err(error) => error,
    };
    if command.output().is_some_and(Output::is_json) {
        let json = cli::nvme_cli_json::object([("error", error.to_string().into())]);
        // A failure to print the error is ignored.
        let _ = cli::output::print(&format!("{json:#}\n"));
    }
    eprintln!("nvmf: {error}");
    match error {
        Error::Usage(_) => ExitCode::from(2),
        _ => ExitCode::FAILURE,
    }
}
