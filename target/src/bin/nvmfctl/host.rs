//! `nvmfctl host`.

use clap::Subcommand;
use nvmfd::api::Host;

use crate::client::Client;
use crate::output::{Failure, Output, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// The hosts that the configuration names
    List,
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    match command {
        Command::List => {
            output.answer(&client.get::<Vec<Host>>("/v1/hosts").await?, |all| list(all));
        }
    }
    Ok(())
}

fn list(all: &[Host]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.nqn.clone(),
            if each.has_key { "must prove itself" } else { "none" }.to_owned(),
            each.controllers.to_string(),
            joined(&each.subsystems, "-"),
        ]
    });
    let empty = "the configuration names no host: see `allow_any_host` of each subsystem";
    table(["HOST", "KEY", "CONTROLLERS", "MAY USE"], rows, empty)
}
