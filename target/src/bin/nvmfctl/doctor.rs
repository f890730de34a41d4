//! `nvmfctl doctor`: checks this machine, with or without a running daemon.

use std::path::{Path, PathBuf};

use clap::Args;
use nvmfd::config::DEFAULT_CONFIG;
use nvmfd::control::check::{UnreadChanges, declared};
use nvmfd::count as count_of;
use nvmfd::doctor::{
    Finding, Level, assume_unit_user, examine_machine, examine_resources, examine_sandbox,
};

use crate::output::{Failure, Output};

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
    let file = command.config.or_else(default);
    let declared = file.as_deref().map(declared).transpose().map_err(|errors| {
        Failure::new(format!("{errors}; `nvmfd check` shows what is wrong with it"))
    })?;
    let unread = declared.as_ref().and_then(|(_, unread)| unread.as_ref()).map(unread_changes);
    let config = declared.as_ref().map(|(declared, _)| declared.config());
    let mut findings = examine_machine(config);
    if let (Some(config), Some(file)) = (config, &file) {
        let user = assume_unit_user();
        let is_assumed = user.as_ref().is_some_and(|user| user.level == Level::Ok);
        findings.extend(user);
        findings.extend(examine_resources(config));
        if is_assumed {
            findings.extend(examine_sandbox(config));
        }
        let of_user = || is_assumed.then(|| unreadable(file)).flatten();
        findings.extend(unread.or_else(of_user));
    }
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

/// What root can read of a configuration, and the user of the unit cannot. Other files than that of the
/// unit may be drafts.
fn unreadable(file: &Path) -> Option<Finding> {
    let (sentence, remedy) = match declared(file) {
        Err(errors) if file == Path::new(DEFAULT_CONFIG) => {
            (errors.to_string(), "let the user of nvmfd read it, and the directories above it")
        }
        Ok((_, Some(UnreadChanges { errors, .. }))) => {
            (errors.to_string(), "let the user of nvmfd read it: the daemon does not start")
        }
        _ => return None,
    };
    Some(Finding::problem("config", sentence, remedy))
}

fn text(findings: &[Finding]) -> String {
    findings.iter().map(|finding| format!("{finding}\n")).collect()
}
