//! `nvmfctl controllers`.

use nvmfd::api::{Controller, ControllerState};

use crate::client::Client;
use crate::output::{Failure, Output, duration, table};

pub(crate) async fn run(client: &Client, output: Output) -> Result<(), Failure> {
    output.answer(&client.get::<Vec<Controller>>("/v1/controllers").await?, |all| list(all));
    Ok(())
}

fn list(all: &[Controller]) -> String {
    let rows = all.iter().map(|each| {
        [
            each.host.clone(),
            each.source.clone(),
            each.subsystem.clone(),
            each.cntlid.to_string(),
            format!("{}/{} x {}", each.io_queues, each.granted_io_queues, each.queue_depth),
            duration(each.connected_s),
            state(each),
        ]
    });
    let heads = ["HOST", "FROM", "SUBSYSTEM", "CNTLID", "QUEUES", "FOR", "STATE"];
    table(heads, rows, "no host is connected")
}

pub(crate) fn state(controller: &Controller) -> String {
    let state = match controller.state {
        ControllerState::Authenticating => "authenticating",
        ControllerState::Disabled => "disabled",
        ControllerState::Live => "live",
        ControllerState::Closing => "closing",
    };
    match controller.authenticated {
        true => format!("{state}, proved"),
        false => state.to_owned(),
    }
}
