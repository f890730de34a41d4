//! `nvmfctl subsystem`.

use std::fmt::Write;

use clap::Subcommand;
use nvmfd::api::{Change, Subsystem};
use nvmfd::config::Size;

use crate::change;
use crate::client::{Client, escaped};
use crate::namespace;
use crate::output::{Failure, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List all subsystems
    List,
    /// Show one subsystem, with its namespaces
    Show {
        /// Select the subsystem by its NQN
        nqn: String,
    },
    /// Add a subsystem
    Add {
        /// Set its NQN
        nqn: String,
        /// Allow this host to use it; may be repeated
        #[arg(long, value_name = "NQN")]
        host: Vec<String>,
        /// Allow every host to use it
        #[arg(long, conflicts_with = "host")]
        any_host: bool,
        /// Set another key of its section; may be repeated
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Change keys of its section
    Set {
        /// Select the subsystem by its NQN
        nqn: String,
        /// Set a key, such as queue_depth=32
        #[arg(required = true, value_name = "KEY=VALUE")]
        settings: Vec<String>,
    },
    /// Remove a subsystem; its hosts are disconnected, its files stay
    Remove {
        /// Select the subsystem by its NQN
        nqn: String,
    },
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let change = match command {
        Command::List => return client.list("/v1/subsystems", list).await,
        Command::Show { nqn } => {
            return client.show(&format!("/v1/subsystems/{}", escaped(&nqn)), show).await;
        }
        Command::Add { nqn, host, any_host, set } => {
            let mut settings = change::settings(&set)?;
            change::put(&mut settings, "allow_any_host", any_host.then_some(true.into()))?;
            change::put(&mut settings, "hosts", (!host.is_empty()).then(|| host.into()))?;
            Change::AddSubsystem { nqn, settings }
        }
        Command::Set { nqn, settings } => {
            Change::SetSubsystem { nqn, settings: change::settings(&settings)? }
        }
        Command::Remove { nqn } => Change::RemoveSubsystem { nqn },
    };
    change::make(change, client).await
}

fn list(all: &[Subsystem]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.nqn.clone(),
            each.serial.clone(),
            each.namespaces.len().to_string(),
            hosts(each),
            each.controllers.to_string(),
        ]
    });
    let heads = ["NQN", "SERIAL", "NAMESPACES", "HOSTS", "CONTROLLERS"];
    table(heads, rows, "there is no subsystem")
}

fn hosts(subsystem: &Subsystem) -> String {
    match subsystem.allow_any_host {
        true => "any".to_owned(),
        false => subsystem.hosts.len().to_string(),
    }
}

fn show(subsystem: &Subsystem) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12} {value}");
    };
    line("subsystem", subsystem.nqn.clone());
    line("serial", subsystem.serial.clone());
    line("model", subsystem.model.clone());
    match subsystem.allow_any_host {
        true => line("hosts", "any may connect".to_owned()),
        false => line("hosts", joined(&subsystem.hosts, "none may connect")),
    }
    line("listeners", joined(&subsystem.listeners, "all"));
    let most = subsystem.max_controllers.map(|most| format!(" of at most {most}"));
    line("controllers", format!("{}{}", subsystem.controllers, most.unwrap_or_default()));
    line(
        "limits",
        format!(
            "queue depth {}, {} I/O queues, {} a command",
            subsystem.queue_depth,
            subsystem.io_queues,
            Size(subsystem.mdts_bytes.into())
        ),
    );
    text + "\n" + &namespace::list(&subsystem.namespaces)
}
