//! `nvmfctl host`.

use std::path::PathBuf;

use clap::Subcommand;
use nvmfd::api::{Change, Host, Settings};

use crate::change;
use crate::client::Client;
use crate::namespace::absolute;
use crate::output::{Failure, Output, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// The hosts that the configuration names
    List,
    /// Let a host use a subsystem
    Allow {
        /// The name of the subsystem
        subsystem: String,
        /// The name of the host (there: cat /etc/nvme/hostnqn)
        host: String,
    },
    /// Let a host use a subsystem no longer; it is disconnected
    Deny {
        /// The name of the subsystem
        subsystem: String,
        /// The name of the host
        host: String,
    },
    /// Have a host prove who it is
    Key {
        /// The name of the host
        host: String,
        /// The file of the secret by which it proves itself, as `nvme gen-dhchap-key` prints it;
        /// the daemon reads it, and nobody else may (mode 600)
        file: PathBuf,
        /// The file of the secret by which the target proves itself to it, likewise
        #[arg(long, value_name = "FILE")]
        controller: Option<PathBuf>,
    },
    /// Take the key of a host away: it needs to prove nothing
    Unkey {
        /// The name of the host
        host: String,
    },
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    let change = match command {
        Command::List => {
            output.answer(&client.get::<Vec<Host>>("/v1/hosts").await?, |all| list(all));
            return Ok(());
        }
        Command::Allow { subsystem, host } => Change::AllowHost { subsystem, host },
        Command::Deny { subsystem, host } => Change::DenyHost { subsystem, host },
        Command::Key { host, file, controller } => {
            let mut settings = Settings::new();
            settings.insert("dhchap_key_file".to_owned(), absolute(&file)?);
            if let Some(file) = controller {
                settings.insert("dhchap_ctrl_key_file".to_owned(), absolute(&file)?);
            }
            Change::SetHost { nqn: host, settings }
        }
        Command::Unkey { host } => Change::RemoveHost { nqn: host },
    };
    change::make(vec![change], client, output).await
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
