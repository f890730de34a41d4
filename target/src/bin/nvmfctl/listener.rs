//! `nvmfctl listener`.

use clap::Subcommand;
use nvmfd::api::{Change, Listener};
use rdma::ZonedIp;

use crate::change;
use crate::client::Client;
use crate::output::{Failure, joined, table};

#[derive(Subcommand)]
pub(crate) enum Command {
    /// List listeners
    List,
    /// Add a listener
    Add {
        /// Listen at this IP address of the machine; a link-local one with its interface: fe80::1%eth0
        #[arg(value_parser = address)]
        address: String,
        /// Listen at this port; absent: 4420
        #[arg(long)]
        port: Option<u16>,
        /// Set its port identifier; absent: the first that is free
        #[arg(long)]
        id: Option<u16>,
        /// Set another key of its section; may be repeated
        #[arg(long, value_name = "KEY=VALUE")]
        set: Vec<String>,
    },
    /// Change keys of its section
    Set {
        /// Select the listener by its port identifier
        id: u16,
        /// Set a key, such as keep_alive_min_ms=15000
        #[arg(required = true, value_name = "KEY=VALUE")]
        settings: Vec<String>,
    },
    /// Remove a listener; its hosts are disconnected
    Remove {
        /// Select the listener by its port identifier
        id: u16,
    },
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let change = match command {
        Command::List => return client.list("/v1/listeners", list).await,
        Command::Add { address, port, id, set } => {
            let mut settings = change::settings(&set)?;
            change::put(&mut settings, "address", Some(address.into()))?;
            change::put(&mut settings, "port", port.map(Into::into))?;
            settings.entry("port".to_owned()).or_insert_with(|| nvme::PORT.into());
            let id = match id {
                Some(id) => id,
                None => free(&client.get::<Vec<Listener>>("/v1/listeners").await?.0),
            };
            Change::AddListener { id, settings }
        }
        Command::Set { id, settings } => {
            Change::SetListener { id, settings: change::settings(&settings)? }
        }
        Command::Remove { id } => Change::RemoveListener { id },
    };
    change::make(change, client).await
}

/// An address as the configuration has it.
fn address(text: &str) -> Result<String, String> {
    text.parse::<ZonedIp>().map(|_| text.to_owned())
}

/// Returns the first unused identifier.
fn free(all: &[Listener]) -> u16 {
    (1..u16::MAX).find(|id| all.iter().all(|each| each.id != *id)).unwrap_or(u16::MAX)
}

/// Formats a listener as one line.
pub(crate) fn one(listener: &Listener) -> String {
    format!("{} (id {})", listener.address, listener.id)
}

fn list(all: &[Listener]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.id.to_string(),
            each.address.clone(),
            ana(each),
            match each.keep_alive_min_ms {
                0 => "as hosts ask".to_owned(),
                least => format!("at least {least} ms"),
            },
            each.controllers.to_string(),
        ]
    });
    table(["ID", "ADDRESS", "ANA", "KEEP ALIVE", "CONTROLLERS"], rows, "there is no listener")
}

fn ana(listener: &Listener) -> String {
    // Runs of groups with one state: a gateway has up to 64 groups.
    let mut runs: Vec<(u32, u32, &String)> = Vec::new();
    for (&group, state) in &listener.ana {
        match runs.last_mut() {
            Some((_, last, of)) if *of == state && *last + 1 == group => *last = group,
            _ => runs.push((group, group, state)),
        }
    }
    let shown = runs.into_iter().map(|(first, last, state)| match first == last {
        true => format!("group {first} {state}"),
        false => format!("groups {first}-{last} {state}"),
    });
    joined(shown, "optimized")
}

#[cfg(test)]
mod tests {
    use crate::listener::*;

    #[test]
    fn ana_groups_with_one_state_are_listed_as_runs() {
        let listed = |states: &[(u32, &str)]| {
            let ana = states.iter().map(|(group, state)| (*group, (*state).to_owned())).collect();
            let address = String::new();
            super::ana(&Listener { id: 1, address, ana, keep_alive_min_ms: 0, controllers: 0 })
        };
        assert_eq!(listed(&[]), "optimized");
        let (open, closed) = ("non-optimized", "inaccessible");
        let some = [(1, open), (2, open), (3, closed), (5, closed), (6, closed)];
        assert_eq!(
            listed(&some),
            "groups 1-2 non-optimized, group 3 inaccessible, groups 5-6 inaccessible"
        );
        let all: Vec<(u32, &str)> = (1..=64).map(|group| (group, closed)).collect();
        assert_eq!(listed(&all), "groups 1-64 inaccessible");
    }
}
