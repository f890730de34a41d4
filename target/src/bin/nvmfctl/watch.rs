//! `nvmfctl watch`.

use nvmfd::api::{Controller, Event, Happened};
use serde::Deserialize;
use serde_json::Value;

use crate::client::Client;
use crate::controllers::state;
use crate::output::Failure;
use crate::time::at_s;

pub(crate) async fn run(client: &Client) -> Result<(), Failure> {
    client
        .follow("/v1/watch", |line: &Value| match client.output.json {
            true => client.output.print_on(&line.to_string()),
            false => match Event::deserialize(line) {
                Ok(event) => {
                    client.output.print_on(&format!(
                        "{} {}",
                        at_s(event.at_unix_s),
                        text(&event.what)
                    ));
                }
                Err(_) => client.output.print_on(&line.to_string()),
            },
        })
        .await
}

fn text(what: &Happened) -> String {
    let who = |c: &Controller| format!("{} at {} ({} {})", c.host, c.source, c.subsystem, c.cntlid);
    match what {
        Happened::Watching => "watching".to_owned(),
        Happened::Connected { controller } => format!("+ {}", who(controller)),
        Happened::State { controller } => format!("~ {}: {}", who(controller), state(controller)),
        Happened::Disconnected { controller } => format!("- {}", who(controller)),
        Happened::Changed { differences } if differences.is_empty() => {
            "~ the configuration was read again".to_owned()
        }
        Happened::Changed { differences } => differences.join("\n"),
        Happened::Degraded { what } => format!("! {what}"),
        Happened::Recovered { what } => format!("  no longer: {what}"),
    }
}
