//! `nvmfctl namespace`.

use clap::Subcommand;
use nvmfd::api::{Kind, Namespace, NamespaceState};
use nvmfd::config::Size;

use crate::client::Client;
use crate::output::{Failure, Output, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// The namespaces of all subsystems
    List,
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    match command {
        Command::List => {
            output.answer(&client.get::<Vec<Namespace>>("/v1/namespaces").await?, |all| list(all));
        }
    }
    Ok(())
}

pub(crate) fn list(all: &[Namespace]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.subsystem.clone(),
            each.nsid.to_string(),
            store(each),
            Size(each.size_bytes).to_string(),
            each.block_size_bytes.to_string(),
            state(each),
            each.ana_group.to_string(),
            each.uuid.clone(),
        ]
    });
    let heads = ["SUBSYSTEM", "NSID", "STORE", "SIZE", "BLOCK", "STATE", "GROUP", "UUID"];
    table(heads, rows, "there is no namespace")
}

fn store(namespace: &Namespace) -> String {
    match (&namespace.path, namespace.kind) {
        (Some(path), _) => path.clone(),
        (None, Kind::Ram) => "ram".to_owned(),
        (None, Kind::Null) => "null".to_owned(),
        (None, Kind::File) => "file".to_owned(),
    }
}

fn state(namespace: &Namespace) -> String {
    let state = match namespace.state {
        NamespaceState::Serving => "serving",
        NamespaceState::SyncFailed => "sync failed",
        NamespaceState::Down => "down",
    };
    let flags = [
        (namespace.read_only, "read only"),
        (namespace.write_protected, "write protected"),
        (namespace.hosts.is_some(), "masked"),
    ];
    let flags = flags.into_iter().filter_map(|(is, word)| is.then_some(word));
    joined(std::iter::once(state).chain(flags), "")
}
