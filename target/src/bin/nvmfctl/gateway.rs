//! `nvmfctl gateway`.

use std::fmt::Write as _;

use clap::Subcommand;
use nvmfd::api::{
    GatewayConfigError, GatewayConfiguration, GatewayGroup, GatewayMember, GatewayMove,
    GatewayRebalance,
};

use crate::change::{self, VERSION_LINE};
use crate::client::{Client, escaped};
use crate::output::{Failure, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List the gateways of the group, and who serves each ANA group
    List,
    /// Print the shared configuration of the group, as it is in force at this gateway
    Config,
    /// Move an ANA group to another gateway
    Move {
        /// Select the ANA group
        group: u32,
        /// Name the gateway that is to serve it
        to: String,
    },
    /// Move ANA groups, one after the other, until all live gateways have as many
    Rebalance,
    /// Exclude another gateway from the cluster, and take its ANA groups: for one that is broken
    Exclude {
        /// Name the gateway
        name: String,
    },
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    match command {
        Command::List => client.show("/v1/gateway-group", list).await,
        Command::Config => client.show("/v1/gateway-group/configuration", config).await,
        Command::Move { group, to } => {
            let wanted = GatewayMove { ana_group: group, to };
            change::post("/v1/gateway-group/move", &wanted, client).await
        }
        Command::Rebalance => {
            let wanted = GatewayRebalance { dry_run: client.output.dry_run };
            change::post("/v1/gateway-group/rebalance", &wanted, client).await
        }
        Command::Exclude { name } => {
            let path = format!("/v1/gateway-group/gateways/{}/exclude", escaped(&name));
            change::post(&path, &(), client).await
        }
    }
}

fn list(group: &GatewayGroup) -> String {
    let rows = group.gateways.iter().map(|each| {
        let owns = group.ana_groups.iter().filter(|it| it.owner.as_ref() == Some(&each.name));
        [
            each.slot.to_string(),
            each.name.clone(),
            each.state.name().to_owned(),
            joined(owns.map(|it| it.id.to_string()), "none"),
            each.front.map_or_else(|| "unknown".to_owned(), |front| front.hosts.to_string()),
            configuration(group, each),
            joined(each.listeners.iter().cloned(), "none"),
            each.address.clone(),
        ]
    });
    let heads = [
        "SLOT",
        "GATEWAY",
        "STATE",
        "ANA GROUPS",
        "HOSTS",
        "CONFIGURATION",
        "LISTENERS",
        "RADOS CLIENT",
    ];
    let mut text = table(heads, rows, "no gateway has registered");
    if let Some(failure) = &group.failure {
        let _ = write!(text, "\nthe heartbeats of this gateway are not confirmed: {failure}");
    }
    for conflict in &group.conflicts {
        let _ = write!(text, "\n{conflict}: give each its own");
    }
    if let Some(GatewayMove { ana_group, to }) = &group.moving {
        let _ = write!(text, "\nANA group {ana_group} is being moved to gateway {to}");
    }
    for GatewayMember { name, refused, unreached, .. } in &group.gateways {
        if let Some(why) = unreached {
            let _ =
                write!(text, "\ngateway {name}: {why}; its ANA groups go to one that hosts reach");
        }
        if let Some(GatewayConfigError { version, why }) = refused {
            let _ = write!(text, "\ngateway {name} refuses version {version}: {why}");
        }
    }
    text
}

/// The version of the shared configuration that is in force at a gateway.
fn configuration(group: &GatewayGroup, member: &GatewayMember) -> String {
    let Some(applied) = member.applied else { return "its own".to_owned() };
    match group.shared.as_ref().map(|shared| shared.version) {
        Some(newest) if newest > applied => format!("{applied} of {newest}"),
        _ => applied.to_string(),
    }
}

/// The text after a line with its version, which can be applied again as it is.
fn config(shared: &GatewayConfiguration) -> String {
    format!("{VERSION_LINE}{}\n{}", shared.version, shared.text.trim_end())
}
