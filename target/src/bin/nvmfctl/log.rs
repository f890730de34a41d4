//! `nvmfctl log`.

use hyper::Method;
use nvmfd::api::Log;

use crate::client::Client;
use crate::output::{Failure, Output};

pub(crate) async fn run(
    level: Option<String>,
    client: &Client,
    output: Output,
) -> Result<(), Failure> {
    let answer = match level {
        Some(level) => client.send::<Log>(Method::PUT, "/v1/log", &Log { level }).await?,
        None => client.get::<Log>("/v1/log").await?,
    };
    output.answer(&answer, |log| log.level.clone());
    Ok(())
}
