//! The shared configuration of a group, through the client of its worker.

use std::sync::Arc;
use std::sync::mpsc::Sender;

use nvmfd_gateway::Event;
use nvmfd_gateway::record::Applied;

use super::cluster::{Cluster, open_objects};
use super::{GatewayWorker, Message};
use crate::config::Config;
use crate::state::shared_config::{BaseVersion, SharedConfig, SharedReadError, SharedWriteError};
use crate::telemetry::gateway::GroupView;

/// Reads and replaces the shared configuration of the group.
pub(crate) struct SharedConfigClient {
    cluster: Cluster,
    sender: Sender<Message>,
    view: Arc<GroupView>,
}

impl std::fmt::Debug for SharedConfigClient {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedConfigClient").finish_non_exhaustive()
    }
}

impl GatewayWorker {
    /// The shared configuration of the group.
    pub(crate) fn shared(&self) -> SharedConfigClient {
        let (sender, view) = (self.sender.clone(), self.view());
        SharedConfigClient { cluster: self.cluster.clone(), sender, view }
    }
}

impl SharedConfigClient {
    /// Number of the newest version, as it was read last; 0: none.
    pub(crate) fn newest(&self) -> u64 {
        self.view.group().shared.map_or(0, |shared| shared.version)
    }

    /// Reads the newest version. Blocks for some seconds at most.
    ///
    /// # Errors
    /// As it says.
    pub(crate) fn read(&self) -> Result<Option<SharedConfig>, SharedReadError> {
        let no_client = || SharedReadError::Unreachable("see the log".to_owned());
        let client = self.cluster.objects().ok_or_else(no_client)?;
        SharedConfig::read(&client, &self.cluster.group.object())
    }

    /// Replaces the version of the group, unless it is newer than `base`. Blocks for some seconds at most.
    ///
    /// # Errors
    /// As it says.
    pub(crate) fn write(
        &self,
        base: &BaseVersion,
        next: &SharedConfig,
    ) -> Result<(), SharedWriteError> {
        let no_client = || SharedWriteError::Unreachable("see the log".to_owned());
        let client = self.cluster.objects().ok_or_else(no_client)?;
        next.write(base, &client, &self.cluster.group)
    }

    /// Another version is in force here, or was refused.
    pub(crate) fn note(&self, applied: Applied) {
        let _ = self.sender.send(Message::Event(Event::Applied(applied)));
    }
}

/// Reads the newest version before the target runs. Blocks for some seconds at most.
///
/// # Errors
/// As it says.
pub(crate) fn read_before_start(config: &Config) -> Result<Option<SharedConfig>, SharedReadError> {
    let Some(group) = &config.group else { return Ok(None) };
    let client = open_objects(&config.group_cluster(), group);
    let client = client.map_err(|error| SharedReadError::Unreachable(error.to_string()))?;
    SharedConfig::read(&client, &group.object())
}
