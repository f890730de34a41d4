//! `nvmfctl doctor`: checks this machine, with or without a running daemon.

use std::path::PathBuf;

use clap::Args;
use nvmfd::control::check::{UnreadChanges, declared};
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
    let declared = config.as_deref().map(declared).transpose().map_err(|errors| {
        Failure::new(format!("{errors}; `nvmfd check` shows what is wrong with it"))
    })?;
    let config = declared.as_ref().map(|(declared, _)| declared.config());
    let mut findings = examine(config);
    findings.extend(declared.as_ref().and_then(|(_, unread)| unread.as_ref()).map(unread_changes));
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

/// Changes that were made at run time are part of the configuration of a start.
fn unread_changes(UnreadChanges { errors, is_denied }: &UnreadChanges) -> Finding {
    let (level, remedy) = match is_denied {
        true => (Level::Warning, "run this as root, or as the user who runs the daemon"),
        false => (Level::Problem, "`nvmfd check` shows what is wrong; the daemon does not start"),
    };
    Finding { check: "changes", level, sentence: errors.to_string(), remedy: remedy.to_owned() }
}

fn text(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}
