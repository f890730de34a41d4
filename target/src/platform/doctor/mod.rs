//! Checks this machine for obstacles to a target.
//!
//! Each family of checks is a file. Reading the state and evaluating it are two functions, so that
//! tests can produce every finding on any machine.

mod group;
mod hosts;
mod machine;
mod network;
mod ports;
mod sandbox;
mod storage;
mod unit_user;

use std::fmt;

use serde::Serialize;

use crate::config::{Config, Provider};

pub(crate) use group::examine as examine_group;
pub(crate) use ports::{PortHolder, is_bound, port_holder};
pub use sandbox::examine_sandbox;
pub use unit_user::assume_unit_user;

rdma::named_enum! {
    /// Severity of a finding.
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
    #[serde(rename_all = "lowercase")]
    pub enum Level {
        /// No problem.
        Ok = "ok",
        /// A possible problem, or a state that could not be read.
        Warning = "warning",
        /// A problem that prevents the target, or a host, from working.
        Problem = "problem",
    }
}

/// Result of a check.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Finding {
    /// The check: a short, stable name.
    pub check: &'static str,
    /// Severity.
    pub level: Level,
    /// The finding.
    pub sentence: String,
    /// Remedy; empty if none is needed.
    pub remedy: String,
}

impl Finding {
    fn ok(check: &'static str, sentence: impl Into<String>) -> Finding {
        let (sentence, remedy) = (sentence.into(), String::new());
        Finding { check, level: Level::Ok, sentence, remedy }
    }

    fn warning(
        check: &'static str,
        sentence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        let (sentence, remedy) = (sentence.into(), remedy.into());
        Finding { check, level: Level::Warning, sentence, remedy }
    }

    /// A finding of level `Problem`.
    pub fn problem(
        check: &'static str,
        sentence: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding { level: Level::Problem, ..Finding::warning(check, sentence, remedy) }
    }
}

/// One line, or two with a remedy.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:<8} {:<12} {}", self.level, self.check, self.sentence)?;
        match self.remedy.is_empty() {
            true => Ok(()),
            false => write!(f, "\n{:22}-> {}", "", self.remedy),
        }
    }
}

/// Checks this machine for a configuration. Some of it is visible to root only.
pub fn examine_machine(config: Option<&Config>) -> Vec<Finding> {
    let mut findings = machine::examine(config);
    findings.extend(ports::examine(config));
    findings.extend(network::examine(config));
    findings
}

/// Checks the files, devices, keys and hosts of a configuration, as the user of this process. Serves
/// and changes nothing; creates and removes a file if there is no other way to check that files can be
/// created.
pub fn examine_resources(config: &Config) -> Vec<Finding> {
    let mut findings = storage::examine(config);
    findings.extend(hosts::examine(config));
    findings
}

/// Returns the most severe level; `Ok` if there are no findings.
pub fn worst(findings: &[Finding]) -> Level {
    findings.iter().map(|finding| finding.level).max().unwrap_or(Level::Ok)
}

/// Whether a configuration may be served by the provider `soft`.
fn may_be_soft(config: Option<&Config>) -> bool {
    config.is_none_or(|config| config.provider != Provider::Verbs)
}

#[cfg(test)]
pub(crate) mod tests {
    use crate::platform::doctor::*;

    /// Asserts the level, that there is a remedy exactly if one is needed, and that the sentence
    /// contains these words.
    #[track_caller]
    pub(crate) fn says(finding: &Finding, level: Level, words: &str) {
        assert_eq!(finding.level, level, "{finding}");
        assert_eq!(finding.remedy.is_empty(), level == Level::Ok, "{finding}");
        assert!(finding.sentence.contains(words), "{finding}");
    }

    #[test]
    fn this_very_machine_can_be_examined() {
        let text = "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:d\"\n\
                    allow_any_host = true\n[[subsystem.namespace]]\nnsid = 1\nkind = \"ram\"\nsize = \"1MiB\"\n";
        let config = Config::parse(text).unwrap();
        let (without, mut with) = (examine_machine(None), examine_machine(Some(&config)));
        with.extend(examine_resources(&config));
        assert!(without.len() >= 5 && with.len() > without.len(), "{with:?}");
        for finding in with.iter().chain(&without) {
            assert!(!finding.sentence.is_empty() && !finding.sentence.ends_with('.'), "{finding}");
            assert_eq!(finding.remedy.is_empty(), finding.level == Level::Ok, "{finding}");
        }
        assert_eq!(worst(&[]), Level::Ok);
    }
}
