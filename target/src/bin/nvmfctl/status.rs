//! `nvmfctl status`.

use std::fmt::Write;

use clap::Args;
use nvmfd::api::Status;
use nvmfd::count;

use crate::client::Client;
use crate::derived_stats::bytes;
use crate::listener;
use crate::output::{Failure, duration, joined};
use crate::time::at_s;

/// Exit code of a plugin of a monitoring system for CRITICAL.
const CRITICAL: u8 = 2;

#[derive(Args)]
pub(crate) struct Command {
    /// Print one line for a monitoring system, with its exit code: 0 OK, 1 WARNING (a refused reload,
    /// changes set aside, a file system that is almost full), 2 CRITICAL (something is not served, or
    /// no daemon answers)
    #[arg(long)]
    check: bool,
}

pub(crate) async fn run(command: &Command, client: &Client) -> Result<(), Failure> {
    let answer = client.get::<Status>("/v1/status").await;
    if !command.check {
        client.output.answer(&answer?, text);
        return Ok(());
    }
    if client.output.json {
        let answer = answer.map_err(|failure| failure.with_code(CRITICAL))?;
        client.output.answer(&answer, text);
        return exit_code(check(&answer.0).1);
    }
    let (line, code) = match answer {
        Ok((status, _)) => check(&status),
        Err(failure) => (format!("CRITICAL - {}", failure.sentence()), CRITICAL),
    };
    client.output.print(&format!("NVMFD {line}"));
    exit_code(code)
}

fn exit_code(code: u8) -> Result<(), Failure> {
    if code == 0 { Ok(()) } else { Err(Failure::code(code)) }
}

/// The line and exit code that plugins of monitoring systems have.
fn check(status: &Status) -> (String, u8) {
    let broken: Vec<&str> =
        status.degraded.iter().chain(&status.pending).map(String::as_str).collect();
    let mut doubts = Vec::new();
    if status.last_reload.as_ref().is_some_and(|last| !last.successful) {
        doubts.push("the last reload was refused".to_owned());
    }
    doubts.extend(status.low_space.iter().cloned());
    if status.set_aside_changes > 0 {
        doubts.push(format!("{} set aside", count(status.set_aside_changes, "change")));
    }
    let (word, code, text) = match (broken.is_empty(), doubts.is_empty()) {
        (false, _) => ("CRITICAL", CRITICAL, broken.join("; ")),
        (true, false) => ("WARNING", 1, doubts.join("; ")),
        (true, true) => ("OK", 0, format!("serving {}", served(status))),
    };
    (format!("{word} - {text} | controllers={}", status.controllers), code)
}

fn served(status: &Status) -> String {
    let namespaces = count(status.namespaces, "namespace");
    format!("{}, {namespaces}", count(status.subsystems, "subsystem"))
}

fn text(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    let since = duration(status.uptime_s);
    line("nvmfd", format!("{}, process {}, serving for {since}", status.version, status.pid));
    line("declared in", status.config_file.clone());
    if let Some(last) = &status.last_reload {
        let outcome = if last.successful { "successful" } else { "refused, the files differ" };
        line("last reload", format!("{}: {outcome}", at_s(last.at_unix_s)));
        last.errors.iter().for_each(|error| line("error", error.clone()));
    }
    let reactors = count(status.reactors, "reactor");
    let pool = bytes(status.pool_bytes as f64);
    line("fabric", format!("{}, {reactors}, pool of {pool}", status.provider));
    line("serves", served(status));
    line("listens", joined(status.listeners.iter().map(listener::one), "nowhere"));
    line("controllers", status.controllers.to_string());
    let sentences = [
        ("pending", &status.pending),
        ("degraded", &status.degraded),
        ("low space", &status.low_space),
        ("warning", &status.warnings),
    ];
    for (name, sentences) in sentences {
        sentences.iter().for_each(|sentence| line(name, sentence.clone()));
    }
    if status.unsaved_changes > 0 {
        let some =
            format!("{} that the file does not have: `nvmfctl save`", status.unsaved_changes);
        line("changes", some);
    }
    if status.set_aside_changes > 0 {
        let some = "set aside, not in force: `nvmfctl changes list`, `nvmfctl changes forget`";
        line("changes", format!("{} {some}", status.set_aside_changes));
    }
    for section in &status.needs_restart {
        line("restart", format!("{section} has changed and takes effect after a restart"));
    }
    text
}

#[cfg(test)]
mod tests {
    use nvmfd::api::{ChangeAccess, Reload};

    use crate::status::*;

    fn status() -> Status {
        Status {
            version: "0.1.0".to_owned(),
            pid: 7,
            uptime_s: 61,
            config_file: "/etc/nvmfd/nvmfd.toml".to_owned(),
            provider: "soft".to_owned(),
            reactors: 1,
            pool_bytes: 1 << 20,
            listeners: Vec::new(),
            subsystems: 1,
            namespaces: 2,
            controllers: 3,
            pending: Vec::new(),
            degraded: Vec::new(),
            low_space: Vec::new(),
            needs_restart: Vec::new(),
            unsaved_changes: 0,
            set_aside_changes: 0,
            warnings: vec!["any host may connect".to_owned()],
            last_reload: None,
            accepts_changes: ChangeAccess::Yes,
        }
    }

    #[test]
    fn status_check_reports_degraded_states_with_exit_codes() {
        let fine = "OK - serving 1 subsystem, 2 namespaces | controllers=3";
        assert_eq!(check(&status()), (fine.to_owned(), 0));
        let errors = vec!["line 1: no".to_owned()];
        let reload = Reload { at_unix_s: 1, successful: false, errors };
        let refused = Status { last_reload: Some(reload), ..status() };
        let line = "WARNING - the last reload was refused | controllers=3";
        assert_eq!(check(&refused), (line.to_owned(), 1));
        assert!(text(&refused).contains("refused, the files differ\nerror        line 1: no\n"));
        let full = Status { low_space: vec!["it is almost full".to_owned()], ..status() };
        let line = "WARNING - it is almost full | controllers=3";
        assert_eq!(check(&full), (line.to_owned(), 1));
        assert!(text(&full).contains("low space    it is almost full\n"));
        let down = Status { pending: vec!["listener a".to_owned()], ..refused };
        assert_eq!(check(&down), ("CRITICAL - listener a | controllers=3".to_owned(), 2));
    }
}
