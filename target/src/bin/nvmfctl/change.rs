//! Requests for changes: edit, plan, apply, list and save.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use hyper::Method;
use hyper::header::HeaderValue;
use nix::unistd::geteuid;
use nvmfd::api::{
    Change, Changes, GatewayConfiguration, Outcome, SetAside, Settings, Status, UnsavedChange,
    Wanted,
};
use nvmfd::config::{Config, ConfigErrors, ConfigFiles, Rewritten, Saving, Source};
use nvmfd::count;
use nvmfd::overlay::{EditError, digest_with_shared, merged};
use serde::Serialize;
use serde_json::{Value, json};

use crate::client::Client;
use crate::output::Failure;

/// Begins the first line of a printed shared configuration. `apply` refuses the text if another
/// version is in force, and does not keep the line.
pub(crate) const VERSION_LINE: &str = "# shared configuration, version ";

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List changes that are not in the configuration file
    List,
    /// Drop changes that no longer apply
    Forget,
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    match command {
        Command::List => client.show("/v1/changes", list).await?,
        Command::Forget => {
            let done = client.send::<Outcome>(Method::DELETE, "/v1/changes", &()).await?;
            client.output.answer(&done, text);
        }
    }
    Ok(())
}

/// Sends a request, and prints what it changes.
pub(crate) async fn post(
    path: &str,
    body: &impl Serialize,
    client: &Client,
) -> Result<(), Failure> {
    client.output.answer(&client.send::<Outcome>(Method::POST, path, body).await?, text);
    Ok(())
}

/// Applies a change.
pub(crate) async fn make(change: Change, client: &Client) -> Result<(), Failure> {
    outcome(change, client.output.dry_run, client).await.map(drop)
}

async fn outcome(change: Change, dry_run: bool, client: &Client) -> Result<Outcome, Failure> {
    let wanted = Wanted { changes: vec![change], dry_run };
    let done = client.send::<Outcome>(Method::POST, "/v1/changes", &wanted).await?;
    client.output.answer(&done, |outcome| match dry_run {
        true => text(outcome),
        false => text(outcome) + unkept(outcome),
    });
    Ok(done.0)
}

/// The configuration to apply.
#[derive(Args)]
pub(crate) struct Other {
    /// Use this file in the place of nvmfd.toml; a directory with nvmfd.toml and conf.d in the
    /// place of both; or a directory of other TOML files in the place of those in conf.d. At a
    /// gateway with `shared`: this file in the place of the shared configuration of all gateways
    path: PathBuf,
}

#[derive(Args)]
pub(crate) struct Plan {
    #[command(flatten)]
    other: Other,
    /// End with exit code 3 if there are differences, and 0 if there are none
    #[arg(long)]
    exit_code: bool,
}

/// Exit code of `plan --exit-code` if there are differences.
const DIFFERENT: u8 = 3;

/// Shows the differences from a configuration.
pub(crate) async fn plan(plan: &Plan, client: &Client) -> Result<(), Failure> {
    let outcome = replace(&plan.other, true, client).await?;
    match plan.exit_code && !(outcome.differences.is_empty() && outcome.needs_restart.is_empty()) {
        true => Err(Failure::code(DIFFERENT)),
        false => Ok(()),
    }
}

/// Replaces the configuration files, until they are edited.
pub(crate) async fn apply(other: &Other, client: &Client) -> Result<(), Failure> {
    replace(other, client.output.dry_run, client).await.map(drop)
}

async fn replace(other: &Other, dry_run: bool, client: &Client) -> Result<Outcome, Failure> {
    let (status, _) = client.get::<Status>("/v1/status").await?;
    let change = match shared(client).await? {
        Some(_) => shared_replacement(&other.path)?,
        None => replacement(&other.path, Path::new(&status.config_file), client.is_remote())?,
    };
    outcome(change, dry_run, client).await
}

/// Returns the change that replaces the shared configuration of a gateway group by a file.
fn shared_replacement(path: &Path) -> Result<Change, Failure> {
    let text = fs::read_to_string(path).map_err(|error| cannot_read(path, &error))?;
    let (first, rest) = text.split_once('\n').unwrap_or((&text, ""));
    let base = first.strip_prefix(VERSION_LINE).and_then(|number| number.parse().ok());
    let text = if base.is_some() { rest.to_owned() } else { text };
    Ok(Change::ReplaceShared { text, base })
}

fn cannot_read(path: &Path, error: &std::io::Error) -> Failure {
    Failure::new(format!("cannot read {}: {error}", path.display()))
}

/// Returns the change that replaces configuration files by those at a path. Reports errors
/// with their places in these files if this process can read all of them; otherwise the daemon
/// checks them. `is_remote`: those of the daemon are on another machine.
fn replacement(path: &Path, config: &Path, is_remote: bool) -> Result<Change, Failure> {
    let cannot = |error| cannot_read(path, &error);
    let told = |errors: ConfigErrors| Failure::new(errors.to_string());
    if !fs::metadata(path).map_err(cannot)?.is_dir() {
        let text = fs::read_to_string(path).map_err(cannot)?;
        let stands_for = Source { file: Some(config.to_owned()), text: text.clone() };
        if !is_remote && let Ok(mut sources) = ConfigFiles::around(stands_for) {
            sources.main.file = Some(path.to_owned());
            Config::of(&sources).map_err(told)?;
        }
        return Ok(Change::Replace { text: Some(text), files: None });
    }
    let names = ["nvmfd.toml".as_ref(), config.file_name().unwrap_or_default()];
    if let Some(main) = names.iter().map(|name| path.join(name)).find(|main| main.is_file()) {
        let sources = ConfigFiles::read(&main).map_err(told)?;
        Config::of(&sources).map_err(told)?;
        let files = Some(by_name(&sources.more)?);
        return Ok(Change::Replace { text: Some(sources.main.text), files });
    }
    let more = ConfigFiles::of_directory(path).map_err(told)?;
    if more.is_empty() {
        let what = format!("{} has neither nvmfd.toml nor other files", path.display());
        return Err(Failure::new(format!("{what} whose names end in .toml")));
    }
    let files = Some(by_name(&more)?);
    if !is_remote && let Ok(sources) = ConfigFiles::read(config) {
        Config::of(&ConfigFiles { more, ..sources }).map_err(told)?;
    }
    Ok(Change::Replace { text: None, files })
}

fn by_name(sources: &[Source]) -> Result<BTreeMap<String, String>, Failure> {
    let named = |source: &Source| {
        let file = source.file.as_deref().unwrap_or(Path::new(""));
        let name = file.file_name().and_then(|name| name.to_str());
        let strange = || Failure::new(format!("{} is no name in UTF-8", file.display()));
        Ok((name.ok_or_else(strange)?.to_owned(), source.text.clone()))
    };
    sources.iter().map(named).collect()
}

/// Reloads the configuration file. What is in force and not served, as it is missing, is shown too.
pub(crate) async fn reload(client: &Client) -> Result<(), Failure> {
    if client.output.dry_run {
        return client.show("/v1/plan", text).await;
    }
    let done = client.send::<Outcome>(Method::POST, "/v1/reload", &()).await?;
    let pending = match client.output.json {
        true => Vec::new(),
        // The reload is done, whether this answers or not.
        false => client.get::<Status>("/v1/status").await.map_or(Vec::new(), |it| it.0.pending),
    };
    let pending: String = pending.iter().map(|what| format!("\n! pending: {what}")).collect();
    client.output.answer(&done, |outcome| text(outcome) + &pending);
    Ok(())
}

/// Writes unsaved changes into the configuration files, and keeps the rest of them.
pub(crate) async fn save(client: &Client) -> Result<(), Failure> {
    let (status, _) = client.get::<Status>("/v1/status").await?;
    let file = PathBuf::from(status.config_file);
    let saving = match client.output.dry_run {
        true => None,
        false => {
            check_place(&file, client).await?;
            Some(Saving::begin(&file).map_err(Failure::new)?)
        }
    };
    if saving.as_ref().is_some_and(Saving::has_finished_another) && !client.output.json {
        client.output.print("completed an interrupted save");
    }
    let (changes, tag) = client.get_tagged::<Changes>("/v1/changes").await?;
    if changes.kept.is_empty() {
        client
            .output
            .answer(&((), saved(&changes, &[])), |()| "there is nothing to save".to_owned());
        return Ok(());
    }
    let mut old = ConfigFiles::read(&file).map_err(|errors| Failure::new(errors.to_string()))?;
    old.shared = shared(client).await?;
    let new = merged(&old, &changes).map_err(|misfit: EditError| {
        let shown = file.display();
        Failure::new(format!("{misfit}: {shown} was changed; `nvmfctl reload` says what fits"))
    })?;
    check_reloaded(&file, &new, tag.as_ref())?;
    let rewritten = old.rewritten(&new);
    let Some(saving) = saving else {
        client.output.answer(&((), saved(&changes, &rewritten)), |()| would_be(&rewritten, &new));
        return Ok(());
    };
    saving.write(&old, &new).map_err(Failure::new)?;
    let shown = |file: &Rewritten<'_>| match file.new {
        Some(_) => file.file.display().to_string(),
        None => format!("{} (removed)", file.file.display()),
    };
    let written: Vec<String> = rewritten.iter().map(shown).collect();
    let files = if written.is_empty() { "the files".to_owned() } else { written.join(", ") };
    let wrote = format!("wrote {} into {files}", count(changes.kept.len(), "change"));
    let reloaded = reload_saved(&new, tag, client).await;
    let done = format!("{wrote}, and the daemon has not read them again");
    let is_in_force = reloaded.map_err(|failure| failure.after(&done))?;
    if !is_in_force {
        saving.write(&new, &old).map_err(Failure::new)?;
        let what = "the configuration was changed during the save, and the files are as they were";
        return Err(Failure::new(format!("{what}: `nvmfctl changes list`, and save again")));
    }
    client.output.answer(&((), saved(&changes, &rewritten)), |()| wrote);
    Ok(())
}

/// The shared configuration of the gateway group, if the daemon uses one.
async fn shared(client: &Client) -> Result<Option<Source>, Failure> {
    let path = "/v1/gateway-group/configuration";
    let found = client.find::<GatewayConfiguration>(path).await?;
    Ok(found.map(|found| Source { file: None, text: found.text }))
}

/// Checks that the files with the changes are the configuration in force: a save would put edits of
/// the files into force that nobody has reloaded. `tag`: the entity tag of that configuration.
fn check_reloaded(
    file: &Path,
    new: &ConfigFiles,
    tag: Option<&HeaderValue>,
) -> Result<(), Failure> {
    if tag.is_none_or(|tag| tag.as_bytes() == entity_tag(new).as_bytes()) {
        return Ok(());
    }
    let shown = file.display();
    Err(Failure::new(format!(
        "{shown}, or a file in its `conf.d`, was edited and not reloaded: `nvmfctl reload --dry-run` \
         shows what the edit changes; reload, then save"
    )))
}

fn entity_tag(sources: &ConfigFiles) -> String {
    format!("\"{}\"", digest_with_shared(sources))
}

/// Checks that root may write where the daemon says that its configuration is. A daemon of another
/// user that somebody has taken over could name any file.
async fn check_place(file: &Path, client: &Client) -> Result<(), Failure> {
    let is_named = std::env::var_os("NVMFD_CONFIG").is_some_and(|named| named == file.as_os_str());
    let is_known = is_named || file.parent() == Some(Path::new("/etc/nvmfd"));
    if is_known || !geteuid().is_root() || client.is_of_root().await? {
        return Ok(());
    }
    let shown = file.display();
    Err(Failure::new(format!(
        "root writes no file that only a daemon of another user names: if {shown} is its \
         configuration, NVMFD_CONFIG={shown} nvmfctl save"
    )))
}

/// A save as JSON.
fn saved(changes: &Changes, files: &[Rewritten<'_>]) -> Value {
    let of = |is_removed: bool| -> Vec<String> {
        let files = files.iter().filter(|file| file.new.is_none() == is_removed);
        files.map(|file| file.file.display().to_string()).collect()
    };
    json!({ "changes": changes.kept.len(), "written": of(false), "removed": of(true) })
}

/// Reloads saved files; false if the configuration in force is no longer theirs with the changes
/// that were made since, because another one was applied: a reload would undo that.
async fn reload_saved(
    saved: &ConfigFiles,
    mut tag: Option<HeaderValue>,
    client: &Client,
) -> Result<bool, Failure> {
    while client.send_if::<Outcome>("/v1/reload", &(), tag.as_ref()).await?.is_none() {
        let changes;
        (changes, tag) = client.get_tagged::<Changes>("/v1/changes").await?;
        let expected = merged(saved, &changes).map(|files| entity_tag(&files));
        if expected.ok().map(String::into_bytes).as_deref()
            != tag.as_ref().map(HeaderValue::as_bytes)
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The texts of configuration files after a save; of files besides the main one, with the name.
fn would_be(files: &[Rewritten<'_>], new: &ConfigFiles) -> String {
    let text = |file: &Rewritten<'_>| match (file.file.display(), file.new) {
        (name, None) => format!("# {name} is removed"),
        (_, Some(text)) if Some(file.file) == new.main.file.as_deref() => text.to_owned(),
        (name, Some(text)) => format!("# {name}\n{text}"),
    };
    match files {
        [] => "the files have everything already".to_owned(),
        files => files.iter().map(|file| text(file).trim_end().to_owned() + "\n").collect(),
    }
}

/// Parses settings from `KEY=VALUE`: the value is TOML, or else a text.
pub(crate) fn settings(all: &[String]) -> Result<Settings, Failure> {
    let mut settings = Settings::new();
    for each in all {
        let (key, value) = each
            .split_once('=')
            .ok_or_else(|| Failure::new(format!("{each:?} is no setting: write KEY=VALUE")))?;
        put(&mut settings, key.trim(), Some(value_of(value.trim())))?;
    }
    Ok(settings)
}

/// Adds a setting, if it has a value. Two values for one key are an error: either would be a guess.
pub(crate) fn put(settings: &mut Settings, key: &str, value: Option<Value>) -> Result<(), Failure> {
    match value.and_then(|value| settings.insert(key.to_owned(), value)) {
        None => Ok(()),
        Some(_) => Err(Failure::new(format!("`{key}` is given twice: give it once"))),
    }
}

fn value_of(text: &str) -> Value {
    let wrapped = format!("v = {text}").parse::<toml::Table>().ok();
    let value = wrapped.and_then(|mut table| table.remove("v"));
    value.and_then(|value| serde_json::to_value(value).ok()).unwrap_or_else(|| text.into())
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
        false => "\n(lost at a restart unless saved: there is no `state_directory`)",
    }
}

fn list(changes: &Changes) -> String {
    let mut text = String::new();
    for UnsavedChange { change, uid, .. } in &changes.kept {
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
    use crate::change::*;

    #[test]
    fn settings_are_toml_or_else_text() {
        let all = ["a=1", "b = \"x\"", "c=/dev/sda", "d=[1, 2]", "e=true", "f=10GiB"];
        let settings = settings(&all.map(String::from)).unwrap();
        let json = serde_json::to_string(&settings).unwrap();
        let says = r#"{"a":1,"b":"x","c":"/dev/sda","d":[1,2],"e":true,"f":"10GiB"}"#;
        assert_eq!(json, says);
        assert!(super::settings(&["a".to_owned()]).is_err());
        assert!(super::settings(&["a=1", "b=1", " a = 2"].map(String::from)).is_err());
    }
}
