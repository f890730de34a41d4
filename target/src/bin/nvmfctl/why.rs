//! `nvmfctl why`.

use std::fmt::Write;

use clap::Args;
use nvmfd::api::{GatewayGroup, Why};

use crate::client::{Client, escaped};
use crate::output::{Failure, duration};
use crate::time::{at_s, now_s};

#[derive(Args)]
pub(crate) struct Command {
    /// Show only the host of this NQN or address
    host: Option<String>,
}

pub(crate) async fn run(command: Command, client: &Client) -> Result<(), Failure> {
    let path = match &command.host {
        Some(host) => format!("/v1/why?host={}", escaped(host)),
        None => "/v1/why".to_owned(),
    };
    let answer = client.get::<Vec<Why>>(&path).await?;
    let group = match command.host {
        None => client.get::<GatewayGroup>("/v1/gateway-group").await.ok(),
        Some(_) => None,
    };
    client.output.answer(&answer, |all| match (all.is_empty(), &command.host) {
        (true, Some(host)) => {
            format!("nothing is recorded of {host}; `nvmfctl why` shows all hosts")
        }
        _ => {
            group.map_or_else(String::new, |(group, _)| standby(&group, now_s()))
                + &text(all, now_s())
        }
    });
    Ok(())
}

/// ANA groups that this gateway does not serve, each with the reason.
fn standby(group: &GatewayGroup, now_s: u64) -> String {
    let mut text = String::new();
    for each in group.ana_groups.iter().filter(|it| !it.serving) {
        let id = each.id;
        let _ = write!(text, "namespaces of ANA group {id} are inaccessible at this gateway: ");
        let _ = match (&each.owner, each.since_unix_s) {
            (Some(owner), Some(since)) => {
                let ago = duration(now_s.saturating_sub(since));
                write!(text, "gateway {owner} owns it since {} ({ago} ago)", at_s(since))
            }
            (Some(owner), None) => write!(text, "gateway {owner} owns it"),
            (None, _) => write!(text, "no live gateway owns it"),
        };
        let _ = match &each.pending {
            Some(pending) => writeln!(text, "\n    pending: {pending}"),
            None => writeln!(
                text,
                "\n    -> hosts use the paths to it; `nvmfctl gateway move` moves it"
            ),
        };
    }
    text
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
    use nvmfd::api::GatewayAnaGroup;

    use crate::why::*;

    #[test]
    fn standby_gateway_reports_owner_and_pending_state_of_ana_groups() {
        let ana_group = |id, owner: Option<&str>, pending: Option<&str>| GatewayAnaGroup {
            id,
            owner: owner.map(str::to_owned),
            epoch: 7,
            stage: "standby".to_owned(),
            serving: id == 1,
            since_unix_s: owner.map(|_| 1000),
            pending: pending.map(str::to_owned),
        };
        let ana_groups = vec![
            ana_group(1, Some("a"), None),
            ana_group(2, Some("b"), None),
            ana_group(3, None, Some("a live gateway takes it")),
        ];
        let expected = format!(
            "namespaces of ANA group 2 are inaccessible at this gateway: gateway b owns it since {} \
             (1 min 5 s ago)\n    -> hosts use the paths to it; `nvmfctl gateway move` moves it\n\
             namespaces of ANA group 3 are inaccessible at this gateway: no live gateway owns \
             it\n    pending: a live gateway takes it\n",
            at_s(1000)
        );
        assert_eq!(
            standby(&GatewayGroup { ana_groups, ..GatewayGroup::default() }, 1065),
            expected
        );
    }

    #[test]
    fn disconnect_records_are_printed_with_host_time_cause_and_remedy() {
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
