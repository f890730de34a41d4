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
}

/// A gateway of a group.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct GatewayMember {
    /// Its name.
    pub name: String,
    /// Its slot.
    pub slot: u8,
    /// `live`, `silent`, `excluded` or `left`.
    pub state: String,
    /// The address of its RADOS client.
    pub address: String,
    /// Where hosts reach it: port identifier, address and port.
    pub listeners: Vec<String>,
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
