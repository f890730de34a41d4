//! `nvmfctl log`.

use hyper::Method;
use nvmfd::api::Log;

use crate::client::Client;
use crate::output::Failure;

pub(crate) async fn run(level: Option<String>, client: &Client) -> Result<(), Failure> {
    let answer = match level {
        Some(level) => client.send::<Log>(Method::PUT, "/v1/log", &Log { level }).await?,
        None => client.get::<Log>("/v1/log").await?,
    };
    client.output.answer(&answer, |log| log.level.clone());
    Ok(())
}
