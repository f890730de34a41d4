//! The daemon `nvmfd`: arguments, logging, and the choice between serving and checking.

#[cfg(test)]
#[path = "../../tests/src/documented_commands.rs"]
mod documented_commands;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::parser::ValueSource;
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nvmfd::config::DEFAULT_CONFIG;
use nvmfd::control::{self, LogFormat};
use nvmfd::overlay::EffectiveConfig;
use tracing::level_filters::LevelFilter;

const LEVELS: [&str; 6] = ["off", "error", "warn", "info", "debug", "trace"];

/// A user-space NVMe over RDMA storage target.
///
/// Exit codes: 0 done, 1 failed, 2 usage.
#[derive(Parser)]
#[command(version = nvmfd::VERSION)]
struct Arguments {
    /// Serve this configuration [default: /etc/nvmfd/nvmfd.toml, if there is one]
    #[arg(short, long, value_name = "FILE", env = "NVMFD_CONFIG", global = true)]
    config: Option<PathBuf>,
    /// Set the log level
    #[arg(long, value_name = "LEVEL", default_value = "info", global = true,
        value_parser = PossibleValuesParser::new(LEVELS).try_map(|name| name.parse::<LevelFilter>()))]
    log: LevelFilter,
    /// Write log lines as text or JSON
    #[arg(long, value_name = "FORMAT", default_value = "text", global = true)]
    log_format: LogFormat,
    #[command(subcommand)]
    job: Option<Job>,
}

#[derive(Subcommand)]
enum Job {
    /// Check a configuration and print it with the important defaults; serve nothing
    Check {
        /// Check this configuration; absent: that of --config, or the default
        file: Option<PathBuf>,
    },
    /// Announce services by multicast DNS, for the daemon
    #[command(hide = true)]
    Announce {
        /// Announce these: JSON
        services: String,
        /// Begin later
        #[arg(long)]
        pause: bool,
    },
    /// Write manual pages and completions below a directory such as /usr/share
    #[command(hide = true)]
    InstallFiles {
        /// Write below this directory
        share: PathBuf,
    },
}

fn main() -> ExitCode {
    let matches = Arguments::command().get_matches();
    let arguments = Arguments::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    // The command line takes precedence over the environment.
    let is_of_environment = matches.value_source("config") == Some(ValueSource::EnvVariable);
    let is_lasting = matches!(arguments.job, None | Some(Job::Announce { .. }));
    let format = arguments.log_format;
    let format = Some(format).filter(|it| is_lasting || *it == LogFormat::Json);
    control::start_log(arguments.log, format);
    let done = match (arguments.job, arguments.config) {
        (None, config) => match config.or_else(default_config) {
            Some(file) => serve(file),
            None => usage("name a configuration: nvmfd --config FILE, or: nvmfd check FILE"),
        },
        (Some(Job::Check { file: Some(file) }), config)
            if config.is_none() || is_of_environment =>
        {
            check(&file)
        }
        (Some(Job::Check { file: None }), config) => match config.or_else(default_config) {
            Some(file) => check(&file),
            None => usage("name one configuration: nvmfd check FILE"),
        },
        (Some(Job::Announce { services, pause }), _) => logged(control::announce(&services, pause)),
        (Some(Job::InstallFiles { share }), _) => install_files(&share),
        (Some(Job::Check { .. }), _) => usage("name one configuration: nvmfd check FILE"),
    };
    if done { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Checks a configuration, within the limits of a start.
fn check(file: &Path) -> bool {
    raise_limits();
    control::check(file)
}

fn default_config() -> Option<PathBuf> {
    Some(PathBuf::from(DEFAULT_CONFIG)).filter(|file| file.try_exists().unwrap_or(true))
}

/// Serves until a stop is requested. Logs the error if that fails.
fn serve(file: PathBuf) -> bool {
    let declared = match EffectiveConfig::load(&file) {
        Ok(declared) => declared,
        Err(errors) => {
            control::log_mistakes(&errors);
            return false;
        }
    };
    raise_limits();
    logged(control::run(declared))
}

/// Logs the error; returns whether there is none.
fn logged(outcome: Result<(), String>) -> bool {
    if let Err(sentence) = &outcome {
        tracing::error!("{sentence}");
    }
    outcome.is_ok()
}

fn install_files(share: &Path) -> bool {
    let more = include_str!("manpages/nvmfd.roff");
    let written = nvmfd::manpages::write(Arguments::command(), "8", more, share)
        .and_then(|()| nvmfd::config_page::write(share));
    if let Err(error) = &written {
        tracing::error!("cannot write files below {}: {error}", share.display());
    }
    written.is_ok()
}

/// Raises the limits to the maximum: registered memory counts as locked, and registered files as open.
fn raise_limits() {
    for resource in [Resource::RLIMIT_MEMLOCK, Resource::RLIMIT_NOFILE] {
        let raised = getrlimit(resource).and_then(|(_, hard)| setrlimit(resource, hard, hard));
        if let Err(error) = raised {
            tracing::debug!("cannot set {resource:?}: {error}");
        }
    }
}

/// Exits with code 2 and a sentence.
fn usage(sentence: &str) -> ! {
    Arguments::command().error(ErrorKind::MissingRequiredArgument, sentence).exit()
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
        documented_commands::assert_accepted("nvmfd", parse);
    }
}
