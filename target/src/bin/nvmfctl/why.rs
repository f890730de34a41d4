//! `nvmfctl why`.

use std::fmt::Write;

use clap::Args;
use nvmfd::api::Why;

use crate::client::{Client, escaped};
use crate::output::{Failure, Output, duration};
use crate::time::{at_s, now_s};

#[derive(Args)]
pub(crate) struct Command {
    /// Show only the host of this NQN or address
    host: Option<String>,
}

pub(crate) async fn run(command: Command, client: &Client, output: Output) -> Result<(), Failure> {
    let path = match &command.host {
        Some(host) => format!("/v1/why?host={}", escaped(host)),
        None => "/v1/why".to_owned(),
    };
    let answer = client.get::<Vec<Why>>(&path).await?;
    output.answer(&answer, |all| match (all.is_empty(), &command.host) {
        (true, Some(host)) => {
            format!("nothing is recorded of {host}; `nvmfctl why` shows all hosts")
        }
        _ => text(all, now_s()),
    });
    Ok(())
}

/// `now`: seconds since 1970.
fn text(all: &[Why], now_s: u64) -> String {
    if all.is_empty() {
        return "no host was refused or has lost its connection".to_owned();
    }
    let mut text = String::new();
    for why in all {
        let at = at_s(why.last_s);
        let ago = duration(now_s.saturating_sub(why.last_s));
        let who = why.host.as_deref().unwrap_or("a host without a name");
        let times = match why.count {
            1 => String::new(),
            count => {
                format!(", {count} times in {}", duration(why.last_s - why.first_s.min(why.last_s)))
            }
        };
        let asked = why.subsystem.as_ref().map_or(String::new(), |name| format!(" for {name}"));
        let queue = why.qid.map_or(String::new(), |qid| format!(", queue {qid}"));
        let detail = match why.detail.as_str() {
            "" => String::new(),
            detail => format!(" ({detail})"),
        };
        let _ = writeln!(
            text,
            "{at} ({ago} ago{times}): {} [{}]\n    {who} from {} at {}{asked}{queue}\n    {}{detail}\n    -> {}",
            why.cause, why.stage, why.remote, why.local, why.reason, why.remedy
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use crate::why::*;

    #[test]
    fn a_person_reads_who_when_why_and_what_to_do() {
        let why = Why {
            number: 7,
            cause: "host-not-allowed".to_owned(),
            stage: "connect".to_owned(),
            reason: "the host is not admitted".to_owned(),
            detail: "on purpose".to_owned(),
            remedy: "add it".to_owned(),
            host: Some("nqn.2026-11.host:h".to_owned()),
            remote: "192.0.2.9:4000".to_owned(),
            local: "192.0.2.1:4420".to_owned(),
            subsystem: Some("nqn.2026-11.io.nvmfd:disk1".to_owned()),
            qid: Some(0),
            count: 3,
            first_s: 1000,
            last_s: 1065,
        };
        let at = at_s(1065);
        let expected = format!(
            "{at} (5 s ago, 3 times in 1 min 5 s): host-not-allowed [connect]\n    \
                        nqn.2026-11.host:h from 192.0.2.9:4000 at 192.0.2.1:4420 for \
                        nqn.2026-11.io.nvmfd:disk1, queue 0\n    \
                        the host is not admitted (on purpose)\n    -> add it\n"
        );
        assert_eq!(text(std::slice::from_ref(&why), 1070), expected);
        let bare = Why { host: None, subsystem: None, qid: None, count: 1, ..why };
        assert!(text(&[bare], 1070).contains("a host without a name from 192.0.2.9:4000 at"));
        assert_eq!(text(&[], 0), "no host was refused or has lost its connection");
    }
}
