//! `nvmfctl gateway`.

use clap::Subcommand;
use hyper::Method;
use nvmfd::api::{GatewayGroup, GatewayMove, Outcome};

use crate::change;
use crate::client::Client;
use crate::output::{Failure, Output, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the gateways of the group, and who serves each ANA group
    List,
    /// Move an ANA group that this gateway serves to another gateway
    Move {
        /// Select the ANA group
        group: u32,
        /// Name the gateway that is to serve it
        to: String,
    },
    /// Exclude another gateway from the cluster, and take its ANA groups: for one that is broken
    Exclude {
        /// Name the gateway
        name: String,
    },
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    let done = match command {
        Command::List => {
            output.answer(&client.get::<GatewayGroup>("/v1/gateway-group").await?, list);
            return Ok(());
        }
        Command::Move { group, to } => {
            let wanted = GatewayMove { ana_group: group, to };
            client.send::<Outcome>(Method::POST, "/v1/gateway-group/move", &wanted).await?
        }
        Command::Exclude { name } => {
            let path = format!("/v1/gateway-group/gateways/{name}/exclude");
            client.send::<Outcome>(Method::POST, &path, &()).await?
        }
    };
    output.answer(&done, change::text);
    Ok(())
}

fn list(group: &GatewayGroup) -> String {
    let rows = group.gateways.iter().map(|each| {
        let owns = group.ana_groups.iter().filter(|it| it.owner.as_ref() == Some(&each.name));
        [
            each.slot.to_string(),
            each.name.clone(),
            each.state.name().to_owned(),
            joined(owns.map(|it| it.id.to_string()), "none"),
            joined(each.listeners.iter().cloned(), "none"),
            each.address.clone(),
        ]
    });
    let heads = ["SLOT", "GATEWAY", "STATE", "ANA GROUPS", "LISTENERS", "RADOS CLIENT"];
    table(heads, rows, "no gateway has registered")
}
