//! Changes: how they are wanted, made, kept and saved.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use hyper::Method;
use nvmfd::api::{Change, Changes, Kept, Outcome, SetAside, Settings, Status, Wanted};
use nvmfd::config::{Config, Saving, Source, Sources};
use nvmfd::declared::{Misfit, merged};
use serde_json::Value;

use crate::client::Client;
use crate::output::{Failure, Output};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// What was changed and is not in the configuration file
    List,
    /// No longer tell of changes that do not fit any more
    Forget,
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    match command {
        Command::List => output.answer(&client.get::<Changes>("/v1/changes").await?, list),
        Command::Forget => {
            let done = client.send::<Outcome>(Method::DELETE, "/v1/changes", &()).await?;
            output.answer(&done, text);
        }
    }
    Ok(())
}

/// Has something changed: all of it, or nothing.
pub(crate) async fn make(
    changes: Vec<Change>,
    client: &Client,
    output: Output,
) -> Result<(), Failure> {
    let wanted = Wanted { changes, dry_run: output.dry_run };
    let done = client.send::<Outcome>(Method::POST, "/v1/changes", &wanted).await?;
    output.answer(&done, |outcome| match output.dry_run {
        true => text(outcome),
        false => text(outcome) + unkept(outcome),
    });
    Ok(())
}

/// What would be different if this were the configuration.
pub(crate) async fn plan(file: &Path, client: &Client, output: Output) -> Result<(), Failure> {
    apply(file, client, Output { dry_run: true, ..output }).await
}

/// Has this be in the place of the configuration file, until somebody changes that.
pub(crate) async fn apply(file: &Path, client: &Client, output: Output) -> Result<(), Failure> {
    let text = fs::read_to_string(file).map_err(|error| cannot("read", file, &error))?;
    // Mistakes with their places, which only this side knows. What the daemon includes may be for
    // its eyes only: then it is the one to judge.
    let (status, _) = client.get::<Status>("/v1/status").await?;
    let stands_for = Some(PathBuf::from(status.config_file));
    if let Ok(mut sources) = Sources::around(Source { file: stands_for, text: text.clone() }) {
        sources.main.file = Some(file.to_owned());
        Config::of(&sources).map_err(|errors| Failure::new(errors.to_string()))?;
    }
    make(vec![Change::Replace { text }], client, output).await
}

/// Has the daemon read its configuration file again.
pub(crate) async fn reload(client: &Client, output: Output) -> Result<(), Failure> {
    let done = client.send::<Outcome>(Method::POST, "/v1/reload", &()).await?;
    output.answer(&done, text);
    Ok(())
}

/// Writes what was changed into the configuration files, and leaves the rest of them as it is.
pub(crate) async fn save(client: &Client, output: Output) -> Result<(), Failure> {
    let (status, _) = client.get::<Status>("/v1/status").await?;
    let file = PathBuf::from(status.config_file);
    let saving = match output.dry_run {
        true => None,
        false => Some(Saving::begin(&file).map_err(Failure::new)?),
    };
    if saving.as_ref().is_some_and(Saving::has_finished_another) {
        output.print("what an interrupted save has left is in its place now");
    }
    let (changes, _) = client.get::<Changes>("/v1/changes").await?;
    if changes.kept.is_empty() {
        output.print("there is nothing to save");
        return Ok(());
    }
    let old = Sources::read(&file).map_err(|errors| Failure::new(errors.to_string()))?;
    let new = merged(&old, &changes).map_err(|misfit: Misfit| {
        let shown = file.display();
        Failure::new(format!("{misfit}: {shown} was changed; `nvmfctl reload` says what fits"))
    })?;
    let changed: Vec<&Source> =
        old.iter().zip(new.iter()).filter(|(old, new)| old.text != new.text).map(|p| p.1).collect();
    let Some(saving) = saving else {
        changed.iter().for_each(|source| would_say(source, &new, output));
        return Ok(());
    };
    saving.write(&old, &new).map_err(Failure::new)?;
    client.send::<Outcome>(Method::POST, "/v1/reload", &()).await?;
    let names = changed.iter().filter_map(|source| source.file.as_deref());
    let written: Vec<String> = names.map(|file| file.display().to_string()).collect();
    let files = if written.is_empty() { "the files".to_owned() } else { written.join(", ") };
    output.print(&format!("{} change(s) are in {files} now", changes.kept.len()));
    Ok(())
}

/// The configuration file as it would be; of others, the name as well.
fn would_say(source: &Source, new: &Sources, output: Output) {
    let name = match &source.file {
        Some(file) if *source != new.main => format!("# {}\n", file.display()),
        _ => String::new(),
    };
    output.print(&format!("{name}{}", source.text));
}

/// Settings from `KEY=VALUE`: the value is TOML, or else a text.
pub(crate) fn settings(all: &[String]) -> Result<Settings, Failure> {
    let one = |each: &String| {
        let (key, value) = each
            .split_once('=')
            .ok_or_else(|| Failure::new(format!("{each:?} is no setting: write KEY=VALUE")))?;
        Ok((key.trim().to_owned(), value_of(value.trim())))
    };
    all.iter().map(one).collect()
}

fn value_of(text: &str) -> Value {
    let wrapped = format!("v = {text}").parse::<toml::Table>().ok();
    let value = wrapped.and_then(|mut table| table.remove("v"));
    value.and_then(|value| serde_json::to_value(value).ok()).unwrap_or_else(|| text.into())
}

fn cannot(what: &str, file: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot {what} {}: {error}", file.display()))
}

pub(crate) fn text(outcome: &Outcome) -> String {
    let mut text = outcome.differences.join("\n");
    for section in &outcome.needs_restart {
        let _ = write!(text, "\n! {section} takes effect after a restart");
    }
    if text.is_empty() { "nothing changes".to_owned() } else { text.trim_start().to_owned() }
}

fn unkept(outcome: &Outcome) -> &'static str {
    match outcome.kept || outcome.differences.is_empty() {
        true => "",
        false => "\n(gone with the daemon, unless saved: there is no `state_directory`)",
    }
}

fn list(changes: &Changes) -> String {
    let mut text = String::new();
    for Kept { change, uid, .. } in &changes.kept {
        let who = uid.map(|uid| format!(" (user {uid})")).unwrap_or_default();
        let _ = writeln!(text, "{change}{who}");
    }
    for SetAside { kept, why } in &changes.set_aside {
        let _ = writeln!(text, "not in force: {}: {why}", kept.change);
    }
    if text.is_empty() { "the configuration file has everything".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_toml_or_else_text() {
        let all = ["a=1", "b = \"x\"", "c=/dev/sda", "d=[1, 2]", "e=true", "f=10GiB"];
        let settings = settings(&all.map(String::from)).unwrap();
        let json = serde_json::to_string(&settings).unwrap();
        let says = r#"{"a":1,"b":"x","c":"/dev/sda","d":[1,2],"e":true,"f":"10GiB"}"#;
        assert_eq!(json, says);
        assert!(super::settings(&["a".to_owned()]).is_err());
    }
}
