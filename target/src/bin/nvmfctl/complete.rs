//! Completions: of the command line, and of what the running daemon serves (names of subsystems and
//! hosts, ids of namespaces, listeners and controllers, gateways).
//!
//! The shell runs `nvmfctl` with `COMPLETE` set for the candidates at a place.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Arg, Command};
use clap_complete::CompletionCandidate;
use clap_complete::engine::ArgValueCompleter;
use clap_complete::env::{CompleteEnv, Shells};
use nvmfd::api::{Controller, GatewayGroup, Host, Listener, Namespace, Subsystem};
use nvmfd::config::DEFAULT_SOCKET;
use nvmfd::count;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use crate::TARGET;
use crate::client::{self, Client, Place};
use crate::output::Output;

/// Environment variable by which a shell asks for candidates.
const VARIABLE: &str = "COMPLETE";
/// A person waits at a prompt.
const PATIENCE: Duration = Duration::from_secs(1);

/// Answers a shell that asks for candidates, and ends the process then.
pub(crate) fn answer(command: fn() -> Command) {
    CompleteEnv::with_factory(|| with_values("", command())).var(VARIABLE).complete();
}

/// The script by which a shell asks; `None` for a shell that is not supported.
pub(crate) fn registration(shell: &str) -> Option<io::Result<String>> {
    let shells = Shells::builtins();
    let shell = shells.completer(shell)?;
    let mut script = Vec::new();
    let written = shell.write_registration(VARIABLE, "nvmfctl", "nvmfctl", "nvmfctl", &mut script);
    Some(written.map(|()| {
        let mut script = String::from_utf8_lossy(&script).into_owned();
        if shell.name() == "bash" {
            script.push_str("# NQNs have colons, at which bash ends a word.\n");
            script.push_str("COMP_WORDBREAKS=${COMP_WORDBREAKS//:/}\n");
        }
        script
    }))
}

/// Names of the shells.
pub(crate) fn shells() -> Vec<&'static str> {
    Shells::builtins().names().collect()
}

/// Writes the scripts to their standard places below a directory such as `/usr/share`.
///
/// # Errors
/// A file cannot be written.
pub(crate) fn install(share: &Path) -> io::Result<()> {
    for (shell, place) in [
        ("bash", "bash-completion/completions/nvmfctl"),
        ("zsh", "zsh/vendor-completions/_nvmfctl"),
        ("fish", "fish/vendor_completions.d/nvmfctl.fish"),
    ] {
        if let Some(script) = registration(shell) {
            fs::write(share.join(place), script?)?;
        }
    }
    Ok(())
}

/// Adds candidates to the arguments of a command of `family` that name something served.
fn with_values(family: &str, command: Command) -> Command {
    let name = command.get_name().to_owned();
    command
        .mut_args(|arg| with_value(family, arg))
        .mut_subcommands(|inner| with_values(&name, inner))
}

fn with_value(family: &str, arg: Arg) -> Arg {
    let values: fn() -> Values = match (family, arg.get_id().as_str()) {
        (_, "subsystem" | "nqn") => subsystems,
        (_, "nsid") => namespaces,
        (_, "host") => hosts,
        (_, "listener") | ("listener", "id") => listeners,
        ("controller", "id") => controllers,
        ("gateway", "to" | "name") => gateways,
        _ => return arg,
    };
    arg.add(ArgValueCompleter::new(move |typed: &OsStr| {
        let typed = typed.to_string_lossy();
        let all = values().into_iter().filter(|(value, _)| value.starts_with(&*typed));
        all.map(|(value, help)| CompletionCandidate::new(value).help(Some(help.into()))).collect()
    }))
}

/// Values, each with what it is.
type Values = BTreeMap<String, String>;

fn subsystems() -> Values {
    let all = get::<Subsystem>("/v1/subsystems");
    all.map(|it| (it.nqn, count(it.namespaces.len(), "namespace"))).collect()
}

fn namespaces() -> Values {
    get::<Namespace>("/v1/namespaces").map(|it| (it.nsid.to_string(), it.subsystem)).collect()
}

fn hosts() -> Values {
    let all = get::<Host>("/v1/hosts");
    all.map(|it| (it.nqn, format!("allowed by {}", count(it.subsystems.len(), "subsystem"))))
        .collect()
}

fn listeners() -> Values {
    get::<Listener>("/v1/listeners").map(|it| (it.id.to_string(), it.address)).collect()
}

fn controllers() -> Values {
    let all = get::<Controller>("/v1/controllers");
    all.map(|it| (it.id.to_string(), format!("{} of {}", it.host, it.subsystem))).collect()
}

fn gateways() -> Values {
    let group = ask::<GatewayGroup>("/v1/gateway-group");
    let all = group.into_iter().flat_map(|group| group.gateways);
    all.map(|it| (it.name, it.listeners.join(", "))).collect()
}

fn get<T: DeserializeOwned>(path: &str) -> impl Iterator<Item = T> {
    ask::<Vec<T>>(path).into_iter().flatten()
}

/// What the daemon answers. A prompt is no place for errors.
fn ask<T: DeserializeOwned>(path: &str) -> Option<T> {
    // Nor for a password, or for what another daemon serves.
    let names_target = |word: String| word.starts_with("-H") || word.starts_with("--target");
    if std::env::var_os(TARGET).is_some() || std::env::args().any(names_target) {
        return None;
    }
    let socket =
        std::env::var_os("NVMFD_SOCKET").map_or_else(|| DEFAULT_SOCKET.into(), PathBuf::from);
    let client = Client::new(Place::Local(socket), Output { json: false, dry_run: false });
    let answer = async { timeout(PATIENCE, client.get::<T>(path)).await };
    let answer = client::runtime().ok()?.block_on(answer);
    answer.ok()?.ok().map(|(answer, _)| answer)
}
