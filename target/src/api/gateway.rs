//! Types of gateway groups.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The gateway group of the daemon, as it was read last.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
pub struct GatewayGroup {
    /// Its name.
    pub name: String,
    /// The name of this gateway.
    pub gateway: String,
    /// The heartbeats of this gateway are confirmed. Otherwise it serves nothing.
    pub fresh: bool,
    /// Its gateways, by slot.
    pub gateways: Vec<GatewayMember>,
    /// Its ANA groups.
    pub ana_groups: Vec<GatewayAnaGroup>,
    /// The shared configuration; absent: this gateway does not use it.
    pub shared: Option<GatewayShared>,
    /// The moves after which each live gateway has as many ANA groups as the others, or one more.
    pub balance: Vec<GatewayMove>,
    /// The move that an administrator has asked this gateway for, and is not done.
    pub moving: Option<GatewayMove>,
    /// Port identifiers and addresses that two live gateways have: hosts take their paths for one.
    pub conflicts: Vec<String>,
    /// Why the heartbeats of this gateway are not confirmed, as far as is known.
    pub failure: Option<String>,
}

/// The shared configuration of a gateway group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayShared {
    /// The newest version; 0: none yet.
    pub version: u64,
    /// The name of the gateway where it was applied first.
    pub gateway: Option<String>,
    /// When, in seconds since 1970.
    pub at_unix_s: Option<u64>,
    /// The version that is in force at this gateway.
    pub applied: u64,
    /// The version that this gateway could not apply.
    pub refused: Option<GatewayConfigError>,
}

/// A version of the shared configuration that a gateway could not apply.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayConfigError {
    /// The version.
    pub version: u64,
    /// Reason.
    pub why: String,
}

/// The text of the shared configuration that is in force.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayConfiguration {
    /// Its version.
    pub version: u64,
    /// TOML.
    pub text: String,
}

rdma::named_enum! {
    /// State of a gateway of a group.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum GatewayState {
        /// It takes part, and has heartbeats.
        Live = "live",
        /// Its heartbeats have stopped.
        Silent = "silent",
        /// It was excluded from the cluster, and has not come back.
        Excluded = "excluded",
        /// It has left in order.
        Left = "left",
    }
}

/// A gateway of a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayMember {
    /// Its name.
    pub name: String,
    /// Its slot.
    pub slot: u8,
    /// Whether it takes part.
    pub state: GatewayState,
    /// The address of its RADOS client.
    pub address: String,
    /// Where hosts reach it: port identifier, address and port.
    pub listeners: Vec<String>,
    /// How hosts reach it; absent: it has not noted it.
    pub front: Option<GatewayFront>,
    /// Why it gives its ANA groups to other gateways: no host reaches it.
    pub unreached: Option<String>,
    /// The version of the shared configuration that is in force there; absent: it uses none.
    pub applied: Option<u64>,
    /// The version that it could not apply.
    pub refused: Option<GatewayConfigError>,
}

/// How hosts reach a gateway.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayFront {
    /// Listeners that are open, at an interface whose link is up.
    pub listeners: u64,
    /// Hosts that are connected to a subsystem.
    pub hosts: u64,
    /// Their associations.
    pub associations: u64,
}

/// An ANA group of a gateway group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayAnaGroup {
    /// Its identifier.
    pub id: u32,
    /// The name of the gateway that owns it, if there is one.
    pub owner: Option<String>,
    /// Changes of the owner.
    pub epoch: u64,
    /// What this gateway does with it, such as `serving` or `standby`.
    pub stage: String,
    /// This gateway serves it.
    pub serving: bool,
    /// When this gateway first saw the present owner, in seconds since 1970.
    pub since_unix_s: Option<u64>,
    /// What is under way, or obstructs it.
    pub pending: Option<String>,
}

/// A request to move an ANA group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GatewayMove {
    /// The ANA group.
    pub ana_group: u32,
    /// The name of the gateway that is to serve it.
    pub to: String,
}

/// A request to move ANA groups until all live gateways have as many.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct GatewayRebalance {
    /// Only report the moves.
    #[serde(default)]
    pub dry_run: bool,
}
