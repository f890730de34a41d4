//! `nvmfctl history`.

use std::fmt::Write as _;

use nvmfd::api::HistoryEntry;

use crate::client::Client;
use crate::output::Failure;
use crate::time::at_s;

pub(crate) async fn run(client: &Client) -> Result<(), Failure> {
    client.list("/v1/history", text).await
}

fn text(all: &[HistoryEntry]) -> String {
    if all.is_empty() {
        return "the configuration was not changed".to_owned();
    }
    let mut text = String::new();
    for HistoryEntry { at_unix_s, uid, by_token, requested, differences } in all {
        let who = match uid {
            Some(uid) => format!("user {uid}"),
            None if *by_token => "by the token".to_owned(),
            None => "unknown user".to_owned(),
        };
        let _ = writeln!(text, "{}, {who}: {}", at_s(*at_unix_s), requested.join("; "));
        for line in differences {
            let _ = writeln!(text, "    {line}");
        }
    }
    text
}
