//! `nvmfctl doctor`: checks this machine, with or without a running daemon.

use std::path::PathBuf;

use clap::Args;
use nvmfd::config::Config;
use nvmfd::count as count_of;
use nvmfd::doctor::{Finding, Level, examine};

use crate::output::{Failure, Output};

/// Configuration that is checked by default.
const DEFAULT_CONFIG: &str = "/etc/nvmfd/nvmfd.toml";

const NO_CONFIG: &str = "No configuration was looked at: --config FILE has its addresses, disks, \
                         keys and hosts examined too\n";

#[derive(Args)]
pub(crate) struct Command {
    /// Check for this configuration; without it, for that in /etc/nvmfd if there is one
    #[arg(long, value_name = "FILE", env = "NVMFD_CONFIG")]
    config: Option<PathBuf>,
}

pub(crate) fn run(command: Command, output: Output) -> Result<(), Failure> {
    let default = || Some(PathBuf::from(DEFAULT_CONFIG)).filter(|path| path.exists());
    let config = command.config.or_else(default);
    let config = config.as_deref().map(Config::load).transpose().map_err(|errors| {
        Failure::new(format!("{errors}; `nvmfd check` shows what is wrong with it"))
    })?;
    let findings = examine(config.as_ref());
    match output.json {
        true => output.print(&serde_json::to_string_pretty(&findings).unwrap_or_default()),
        false => output.print(&(text(&findings) + if config.is_none() { NO_CONFIG } else { "" })),
    }
    let count = |level| findings.iter().filter(|finding| finding.level == level).count();
    match (count(Level::Problem), count(Level::Warning)) {
        (0, _) => Ok(()),
        (problems, warnings) => {
            let (problems, warnings) =
                (count_of(problems, "problem"), count_of(warnings, "warning"));
            Err(Failure::of_check(format!("{problems} and {warnings}")))
        }
    }
}

fn text(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}
