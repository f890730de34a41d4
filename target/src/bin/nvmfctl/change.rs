//! Changes: how they are wanted, made, kept and saved.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, fchown};
use std::path::{Path, PathBuf};

use clap::Subcommand;
use hyper::Method;
use nvmfd::api::{Change, Changes, Kept, Outcome, SetAside, Settings, Status, Wanted};
use nvmfd::config::{Config, Source, Sources};
use nvmfd::declared::{Misfit, merged, writes};
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
    let (changes, _) = client.get::<Changes>("/v1/changes").await?;
    if changes.kept.is_empty() {
        output.print("there is nothing to save");
        return Ok(());
    }
    let file = PathBuf::from(status.config_file);
    let old = Sources::read(&file).map_err(|errors| Failure::new(errors.to_string()))?;
    let unfit = |misfit: Misfit| {
        let shown = file.display();
        Failure::new(format!("{misfit}: {shown} was changed; `nvmfctl reload` says what fits"))
    };
    let new = merged(&old, &changes).map_err(unfit)?;
    let changed: Vec<&Source> =
        old.iter().zip(new.iter()).filter(|(old, new)| old.text != new.text).map(|p| p.1).collect();
    let mut written = Vec::new();
    for Source { file, text } in &changed {
        let Some(file) = file else { continue };
        // A link stays a link.
        let file = fs::canonicalize(file).map_err(|error| cannot("find", file, &error))?;
        if output.dry_run {
            // The configuration file as it would be; of others, the name as well.
            let name = format!("# {}\n", file.display());
            let name = if written.is_empty() && new.main.text == *text { "" } else { &name };
            output.print(&format!("{name}{text}"));
        }
        written.push(file.display().to_string());
    }
    if output.dry_run {
        return Ok(());
    }
    write_all(&writes(&old, &changes).map_err(unfit)?)?;
    client.send::<Outcome>(Method::POST, "/v1/reload", &()).await?;
    let files = if written.is_empty() { "the files".to_owned() } else { written.join(", ") };
    output.print(&format!("{} change(s) are in {files} now", changes.kept.len()));
    Ok(())
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

/// Writes files one after the other: a file means its old text or its new one whenever the power
/// goes, and belongs to whom it belonged. What can fail is done for all of them beforehand.
fn write_all(texts: &[Source]) -> Result<(), Failure> {
    let mut ready = Vec::new();
    for (index, Source { file, text }) in texts.iter().enumerate() {
        let Some(file) = file else { continue };
        let made = fs::canonicalize(file).and_then(|file| {
            let beside = beside(&file, index);
            prepare(&file, &beside, text).inspect_err(|_| drop(fs::remove_file(&beside)))?;
            ready.push((file, beside));
            Ok(())
        });
        if let Err(error) = made {
            ready.iter().for_each(|(_, beside)| drop(fs::remove_file(beside)));
            return Err(cannot("write", file, &error));
        }
    }
    let put = |(file, beside): &(PathBuf, PathBuf)| {
        let renamed = fs::rename(beside, file).and_then(|()| {
            let folder = file.parent().unwrap_or(Path::new("/"));
            File::open(folder)?.sync_all()
        });
        renamed.map_err(|error| cannot("write", file, &error))
    };
    let done = ready.iter().try_for_each(put);
    if done.is_err() {
        ready.iter().for_each(|(_, beside)| drop(fs::remove_file(beside)));
    }
    done
}

/// Where a new text waits: a file may have more than one.
fn beside(file: &Path, index: usize) -> PathBuf {
    let mut name = file.file_name().unwrap_or_default().to_owned();
    name.push(format!(".{index}.new"));
    file.with_file_name(name)
}

fn prepare(file: &Path, beside: &Path, text: &str) -> std::io::Result<()> {
    let was = fs::metadata(file)?;
    // One that was left when the power went.
    let _ = fs::remove_file(beside);
    let mut new = File::options().write(true).create_new(true).mode(0o600).open(beside)?;
    new.write_all(text.as_bytes())?;
    let mine = new.metadata()?;
    if (mine.uid(), mine.gid()) != (was.uid(), was.gid()) {
        fchown(&new, Some(was.uid()), Some(was.gid()))?;
    }
    new.set_permissions(was.permissions())?;
    new.sync_all()
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

    fn source(file: &Path, text: &str) -> Source {
        Source { file: Some(file.to_owned()), text: text.to_owned() }
    }

    #[test]
    fn a_file_keeps_its_mode() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("nvmfd.toml");
        fs::write(&file, "old").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o640)).unwrap();
        // It may be written twice.
        write_all(&[source(&file, "newer"), source(&file, "new")]).unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), "new");
        assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o640);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn where_one_file_cannot_be_written_none_is() {
        let folder = tempfile::tempdir().unwrap();
        let [first, second] = ["a.toml", "b.toml"].map(|name| folder.path().join(name));
        fs::write(&first, "old").unwrap();
        fs::write(&second, "old").unwrap();
        // In the way of the new text of the second.
        let way = beside(&second, 1);
        fs::create_dir(&way).unwrap();
        let both = [source(&first, "new"), source(&second, "new")];
        assert!(write_all(&both).is_err());
        assert_eq!([&first, &second].map(|file| fs::read_to_string(file).unwrap()), ["old"; 2]);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 3, "nothing is left behind");
        fs::remove_dir(&way).unwrap();
        write_all(&both).unwrap();
        assert_eq!([&first, &second].map(|file| fs::read_to_string(file).unwrap()), ["new"; 2]);
    }
}
