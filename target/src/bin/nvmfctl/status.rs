//! `nvmfctl status`.

use std::fmt::Write;

use nvmfd::api::Status;

use crate::client::Client;
use crate::derived_stats::bytes;
use crate::listener;
use crate::output::{Failure, Output, duration, joined};

pub(crate) async fn run(client: &Client, output: Output) -> Result<(), Failure> {
    output.answer(&client.get::<Status>("/v1/status").await?, text);
    Ok(())
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
fn text(status: &Status) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    let since = duration(status.uptime_s);
    line("nvmfd", format!("{}, process {}, serving for {since}", status.version, status.pid));
    line("declared in", status.config_file.clone());
    line(
        "fabric",
        format!(
            "{}, {} reactor(s), pool of {}",
            status.provider,
            status.reactors,
            bytes(status.pool_bytes as f64)
        ),
    );
    line(
        "serves",
        format!("{} subsystem(s), {} namespace(s)", status.subsystems, status.namespaces),
    );
    line("listens", joined(status.listeners.iter().map(listener::one), "nowhere"));
    line("controllers", status.controllers.to_string());
    let sentences = [
        ("pending", &status.pending),
        ("degraded", &status.degraded),
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
