//! `nvmfctl ana`.

use clap::Subcommand;
use nvmfd::api::Change;

use crate::change;
use crate::client::Client;
use crate::output::Failure;

#[derive(Subcommand)]
pub(crate) enum Command {
    /// Set the state of groups of namespaces at a listener
    Set {
        /// Select the listener by its port identifier
        listener: u16,
        /// Set optimized, non-optimized, inaccessible, persistent-loss or change
        state: String,
        /// Select the group, 1 to 64; absent: all
        #[arg(long)]
        group: Option<u32>,
    },
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let Command::Set { listener, state, group } = command;
    change::make(Change::SetAna { listener, group, state }, client).await
}
