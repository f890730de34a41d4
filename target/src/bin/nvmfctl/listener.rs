//! `nvmfctl listener`.

use clap::Subcommand;
use nvmfd::api::Listener;

use crate::client::Client;
use crate::output::{Failure, Output, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Where hosts connect
    List,
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    match command {
        Command::List => {
            output.answer(&client.get::<Vec<Listener>>("/v1/listeners").await?, |all| list(all));
        }
    }
    Ok(())
}

/// A listener in few words.
pub(crate) fn one(listener: &Listener) -> String {
    format!("{} (id {})", listener.address, listener.id)
}

fn list(all: &[Listener]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.id.to_string(),
            each.address.clone(),
            ana(each),
            match each.keep_alive_min_ms {
                0 => "as hosts ask".to_owned(),
                least => format!("at least {least} ms"),
            },
            each.controllers.to_string(),
        ]
    });
    table(["ID", "ADDRESS", "ANA", "KEEP ALIVE", "CONTROLLERS"], rows, "there is no listener")
}

fn ana(listener: &Listener) -> String {
    let groups = listener.ana.iter().map(|(group, state)| format!("group {group} {state}"));
    joined(groups, "optimized")
}
