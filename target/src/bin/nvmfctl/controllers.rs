//! `nvmfctl controllers` and `nvmfctl controller`.

use clap::Subcommand;
use nvmfd::api::Controller;

use crate::change;
use crate::client::Client;
use crate::output::{Failure, duration, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List controllers and their hosts
    List,
    /// Disconnect one controller; its host may reconnect, as Linux does by itself
    Disconnect {
        /// Select the controller by its id, the first column of `nvmfctl controllers`
        id: u64,
    },
    /// Set the fatal status of one controller (CSTS.CFS); its host resets it or reconnects
    Fail {
        /// Select the controller by its id, the first column of `nvmfctl controllers`
        id: u64,
    },
}

pub(crate) async fn change(command: Command, client: &Client) -> Result<(), Failure> {
    let path = match command {
        Command::List => return run(client).await,
        Command::Disconnect { id } => format!("/v1/controllers/{id}/disconnect"),
        Command::Fail { id } => format!("/v1/controllers/{id}/fail"),
    };
    change::post(&path, &(), client).await
}

pub(crate) async fn run(client: &Client) -> Result<(), Failure> {
    client.list("/v1/controllers", list).await
}

fn list(all: &[Controller]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.id.to_string(),
            each.host.clone(),
            each.source.clone(),
            each.subsystem.clone(),
            each.cntlid.to_string(),
            format!("{}/{} x {}", each.io_queues, each.granted_io_queues, each.queue_depth),
            duration(each.connected_s),
            state(each),
        ]
    });
    let heads = ["ID", "HOST", "FROM", "SUBSYSTEM", "CNTLID", "QUEUES", "FOR", "STATE"];
    table(heads, rows, "no host is connected")
}

pub(crate) fn state(controller: &Controller) -> String {
    match controller.authenticated {
        true => format!("{}, proved", controller.state),
        false => controller.state.to_string(),
    }
}
