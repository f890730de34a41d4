//! `nvmfctl host`.

use std::path::PathBuf;

use clap::{ArgGroup, Args, Subcommand};
use nvmfd::api::{Change, Host, Settings};
use serde_json::Value;

use crate::change;
use crate::client::Client;
use crate::output::{Failure, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List configured hosts
    List,
    /// Allow a host to use a subsystem
    Allow {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Name the host by its NQN (there: cat /etc/nvme/hostnqn)
        host: String,
    },
    /// Disallow a host to use a subsystem; it is disconnected. Not with `allow_any_host = true`
    Deny {
        /// Select the subsystem by its NQN
        subsystem: String,
        /// Select the host by its NQN
        host: String,
    },
    /// Require a host to authenticate
    Key {
        /// Select the host by its NQN
        host: String,
        /// Read its secret from this file, as `nvme gen-dhchap-key` prints it; only the daemon may
        /// have access (mode 600)
        file: PathBuf,
        /// Read the secret of the target for this host from this file, likewise
        #[arg(long, value_name = "FILE")]
        controller: Option<PathBuf>,
        #[command(flatten)]
        policy: Policy,
    },
    /// Change the hashes and DH groups of a host with a key, from its next authentication on
    #[command(group(ArgGroup::new("algorithms").args(["hashes", "groups"]).required(true)
        .multiple(true)))]
    Set {
        /// Select the host by its NQN
        host: String,
        #[command(flatten)]
        policy: Policy,
    },
    /// Remove the key of a host: it need not authenticate
    Unkey {
        /// Select the host by its NQN
        host: String,
    },
}

/// Authentication parameters of one host.
#[derive(Args)]
pub(crate) struct Policy {
    /// Set its hashes, best first, such as sha384,sha512; `default`: those of `[authentication]`
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    hashes: Vec<String>,
    /// Set its DH groups, best first, such as ffdhe4096,ffdhe3072; `default`: those of
    /// `[authentication]`
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    groups: Vec<String>,
}

impl Policy {
    fn put(self, settings: &mut Settings) {
        for (key, names) in [("hashes", self.hashes), ("groups", self.groups)] {
            let value = match &names[..] {
                [] => continue,
                [name] if name == "default" => Value::Null,
                _ => names.into(),
            };
            settings.insert(key.to_owned(), value);
        }
    }
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let change = match command {
        Command::List => return client.list("/v1/hosts", list).await,
        Command::Allow { subsystem, host } => Change::AllowHost { subsystem, host },
        Command::Deny { subsystem, host } => Change::DenyHost { subsystem, host },
        Command::Key { host, file, controller, policy } => {
            let mut settings = Settings::new();
            settings.insert("dhchap_key_file".to_owned(), client.absolute(&file)?.into());
            if let Some(file) = controller {
                settings.insert("dhchap_ctrl_key_file".to_owned(), client.absolute(&file)?.into());
            }
            policy.put(&mut settings);
            Change::SetHost { nqn: host, settings }
        }
        Command::Set { host, policy } => {
            let mut settings = Settings::new();
            policy.put(&mut settings);
            Change::SetHost { nqn: host, settings }
        }
        Command::Unkey { host } => Change::RemoveHost { nqn: host },
    };
    change::make(change, client).await
}

fn list(all: &[Host]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.nqn.clone(),
            if each.has_key { "must prove itself" } else { "none" }.to_owned(),
            joined(&each.hashes, "-"),
            joined(&each.groups, "-"),
            each.controllers.to_string(),
            joined(&each.subsystems, "-"),
        ]
    });
    let empty = "the configuration names no host: see `allow_any_host` of each subsystem";
    table(["HOST", "KEY", "HASHES", "DH GROUPS", "CONTROLLERS", "MAY USE"], rows, empty)
}
