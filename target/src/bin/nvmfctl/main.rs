//! The tool `nvmfctl`: queries and manages a running `nvmfd` through its management interface.
//!
//! One file for each family of commands. Tables are for users; with `-o json`, the response of the
//! daemon is printed unchanged.

mod ana;
mod change;
mod client;
mod complete;
mod connect;
mod controllers;
mod derived_stats;
mod doctor;
#[cfg(test)]
#[path = "../../../../tests/src/documented_commands.rs"]
mod documented_commands;
mod gateway;
mod history;
mod host;
mod image;
mod import;
mod listener;
mod log;
mod namespace;
mod output;
mod ssh;
mod stats;
mod status;
mod subsystem;
mod time;
mod top;
mod watch;
mod why;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::builder::PossibleValuesParser;
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{ArgMatches, CommandFactory, FromArgMatches, Parser, Subcommand};
use nvmfd::config::DEFAULT_SOCKET;

use crate::client::{Client, Place};
use crate::output::{Failure, Format, Output};
use crate::ssh::Target;

/// Sections of the manual page that the command line does not have.
const MORE: &str = include_str!("../../manpages/nvmfctl.roff");

/// Environment variable with a daemon on another machine.
const TARGET: &str = "NVMFD_HOST";

/// Title of the options that all commands have.
const GLOBAL: &str = "Global options";

/// Queries and changes a running nvmfd.
///
/// For problems: `status` shows the state, `why` refused hosts and remedies, `doctor` obstacles on
/// this machine. Changes are in force at once and persisted; `save` writes them into the
/// configuration files.
///
/// Exit codes: 0 done, 1 failed, 2 usage; those of `plan --exit-code` and `status --check` are in
/// their help.
#[derive(Parser)]
#[command(name = "nvmfctl", version = nvmfd::VERSION, max_term_width = 100)]
struct Arguments {
    /// Connect to the daemon at this socket
    #[arg(long, value_name = "PATH", default_value = DEFAULT_SOCKET, env = "NVMFD_SOCKET",
        global = true, help_heading = GLOBAL)]
    socket: PathBuf,
    // No comment of documentation: rustdoc takes the brackets for links.
    #[arg(short = 'H', long, value_name = "URL", env = TARGET, global = true,
        help_heading = GLOBAL, help = "Connect by SSH to the daemon of another machine, \
        ssh://[USER@]HOST[:PORT][/PATH/OF/SOCKET]")]
    target: Option<Target>,
    /// Print a table, or the response of the daemon as JSON
    #[arg(short, long, value_name = "FORMAT", default_value = "table", global = true,
        help_heading = GLOBAL)]
    output: Format,
    /// The same as `-o json`
    #[arg(long, global = true, help_heading = GLOBAL)]
    json: bool,
    /// Change nothing, and show the differences
    #[arg(long, global = true, help_heading = GLOBAL)]
    dry_run: bool,
    #[command(subcommand)]
    family: Family,
}

/// Each area adds its family of commands here and in [`run`].
#[derive(Subcommand)]
enum Family {
    /// Show the state of the daemon
    Status(status::Command),
    /// Show and change subsystems
    #[command(subcommand)]
    Subsystem(subsystem::Command),
    /// Show and change namespaces
    #[command(subcommand)]
    Namespace(namespace::Command),
    /// Show and take snapshots of images of Ceph RBD, and clone them
    #[command(subcommand)]
    Image(image::Command),
    /// Show and change listeners
    #[command(subcommand)]
    Listener(listener::Command),
    /// Show and change hosts and their keys
    #[command(subcommand)]
    Host(host::Command),
    /// Set ANA states of groups of namespaces
    #[command(subcommand)]
    Ana(ana::Command),
    /// List controllers
    Controllers,
    /// Disconnect a controller, or let it fail
    #[command(subcommand)]
    Controller(controllers::Command),
    /// Show and change who serves the ANA groups of a gateway group
    #[command(subcommand)]
    Gateway(gateway::Command),
    /// Show why hosts were refused or disconnected, the latest first
    Why(why::Command),
    /// Check this machine for obstacles; needs no daemon
    Doctor(doctor::Command),
    /// List unsaved changes
    #[command(subcommand)]
    Changes(change::Command),
    /// Show who has changed the configuration, the latest change first
    History,
    /// Show the differences from this configuration
    Plan(change::Plan),
    /// Replace the configuration, all or nothing; `save` writes it into the configuration files
    Apply(change::Other),
    /// Write unsaved changes into the configuration files
    Save,
    /// Reload the configuration files
    Reload,
    /// Print events until interrupted
    Watch,
    /// Print the commands that connect a host
    ConnectLine {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Name the host by its NQN; absent: that of the host itself
        #[arg(long, value_name = "NQN")]
        host: Option<String>,
    },
    /// Show the log level, or set it until the daemon ends
    Log {
        /// Set off, error, warn, info, debug or trace
        level: Option<String>,
    },
    /// Print the script that completes commands and what is served, for a shell
    Completions {
        /// Select the shell
        #[arg(value_parser = PossibleValuesParser::new(complete::shells()))]
        shell: String,
    },
    /// Show rates and latencies by namespace, host and kind of command
    Stats(stats::StatsArgs),
    /// List the last slow commands, with their times by stage
    Slow,
    /// List the oldest commands in progress of each namespace
    Inflight,
    /// Show hosts, namespaces, latencies and reactors live
    Top(top::TopArgs),
    /// Convert the saved configuration of another target; needs no daemon
    #[command(subcommand)]
    Import(import::Command),
    /// Write manual pages and completions below a directory such as /usr/share
    #[command(hide = true)]
    InstallFiles {
        /// Write below this directory
        share: PathBuf,
    },
}

fn main() -> ExitCode {
    complete::answer(Arguments::command);
    let matches = Arguments::command().get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let json = arguments.json || arguments.output == Format::Json;
    let output = Output { json, dry_run: arguments.dry_run };
    let runtime = match client::runtime() {
        Ok(runtime) => runtime,
        Err(error) => {
            return output.fail(&Failure::new(format!("cannot start the runtime: {error}")));
        }
    };
    let client = Client::new(place(arguments.socket, arguments.target, &matches), output);
    match runtime.block_on(run(arguments.family, &client)) {
        Ok(()) => output.finish(),
        Err(failure) => output.fail(&failure),
    }
}

/// Where the daemon is. What was typed precedes environment variables.
fn place(socket: PathBuf, target: Option<Target>, matches: &ArgMatches) -> Place {
    let is_typed = |id| matches.value_source(id) == Some(ValueSource::CommandLine);
    match (is_typed("socket"), is_typed("target"), target) {
        (true, true, _) => Arguments::command()
            .error(
                ErrorKind::ArgumentConflict,
                "--socket is on this machine: leave out one of them",
            )
            .exit(),
        (false, _, Some(target)) => Place::remote(target),
        _ => Place::Local(socket),
    }
}

async fn run(family: Family, client: &Client) -> Result<(), Failure> {
    let output = client.output;
    if output.dry_run
        && let Some(refusal) = without_dry_run(&family)
    {
        return Err(Failure::new(refusal));
    }
    if client.is_remote()
        && let Some(refusal) = without_remote(&family)
    {
        return Err(Failure::new(refusal));
    }
    match family {
        Family::Status(command) => status::run(&command, client).await,
        Family::Subsystem(command) => subsystem::run(command, client).await,
        Family::Namespace(command) => namespace::run(command, client).await,
        Family::Image(command) => image::run(command, client).await,
        Family::Listener(command) => listener::run(command, client).await,
        Family::Host(command) => host::run(command, client).await,
        Family::Ana(command) => ana::run(command, client).await,
        Family::Changes(command) => change::run(command, client).await,
        Family::History => history::run(client).await,
        Family::Plan(plan) => change::plan(&plan, client).await,
        Family::Apply(other) => change::apply(&other, client).await,
        Family::Save => change::save(client).await,
        Family::Watch => watch::run(client).await,
        Family::ConnectLine { subsystem, host } => {
            connect::run(&subsystem, host.as_deref(), client).await
        }
        Family::Log { level } => log::run(level, client).await,
        Family::Reload => change::reload(client).await,
        Family::Completions { shell } => completions(&shell, output),
        Family::Controllers => controllers::run(client).await,
        Family::Controller(command) => controllers::change(command, client).await,
        Family::Gateway(command) => gateway::run(command, client).await,
        Family::Why(command) => why::run(command, client).await,
        Family::Doctor(command) => doctor::run(command, output),
        Family::Stats(wanted) => stats::run(wanted, client).await,
        Family::Slow => stats::slow(client).await,
        Family::Inflight => stats::in_flight(client).await,
        Family::Top(wanted) => top::run(wanted, client).await,
        Family::Import(command) => import::run(&command, output),
        Family::InstallFiles { share } => {
            nvmfd::manpages::write(Arguments::command(), "8", MORE, &share)
                .and_then(|()| complete::install(&share))
                .map_err(|error| Failure::new(format!("files below {}: {error}", share.display())))
        }
    }
}

/// Reason why a command has no dry run, if it has none.
fn without_dry_run(family: &Family) -> Option<&'static str> {
    match family {
        Family::Changes(change::Command::Forget) => Some(
            "this has no dry run: `nvmfctl changes list` shows the changes that would be dropped",
        ),
        Family::Controller(
            controllers::Command::Disconnect { .. } | controllers::Command::Fail { .. },
        ) => Some("this has no dry run: `nvmfctl controllers` shows the affected controllers"),
        Family::Gateway(gateway::Command::Move { .. } | gateway::Command::Exclude { .. }) => {
            Some("this has no dry run: `nvmfctl gateway list` shows who serves what")
        }
        Family::Log { level: Some(_) } => {
            Some("this has no dry run: `nvmfctl log` shows the current level")
        }
        _ => None,
    }
}

/// Reason why a command is of this machine only, if it is.
fn without_remote(family: &Family) -> Option<&'static str> {
    match family {
        Family::Doctor(_) => {
            Some("this checks the machine where it runs: run `nvmfctl doctor` on the target")
        }
        Family::Save => Some("this writes files where it runs: run `nvmfctl save` on the target"),
        _ => None,
    }
}

fn completions(shell: &str, output: Output) -> Result<(), Failure> {
    if let Some(script) = complete::registration(shell) {
        output.print(&script.map_err(|error| Failure::new(error.to_string()))?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_argument_table_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn command_lines_in_documents_are_accepted() {
        let parse = |words| Arguments::try_parse_from::<Vec<String>, _>(words).map(drop);
        documented_commands::assert_accepted("nvmfctl", parse);
    }
}
