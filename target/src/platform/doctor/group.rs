//! Checks the gateway group: its cluster, its object, the rights of the client, the slot.

use std::thread::sleep;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nvmfd_gateway::Timing;
use nvmfd_gateway::record::{GroupObject, Key, MemberRecord, Membership};

use super::Finding;
use crate::blockdev::blocking::BlockingPool;
use crate::blockdev::ceph::rights_command;
use crate::blockdev::rados::{ObjectClient, Update, UpdateError};
use crate::config::{Config, GroupConfig};

const CHECK: &str = "group";
/// Time limit of each operation.
const TIMEOUT: Duration = Duration::from_secs(2);
/// Time limit of all of them: a client needs eight seconds to find out that no monitor answers.
const PATIENCE: Duration = Duration::from_secs(20);
/// The cluster forgets then what was tried.
const TRIAL_SECONDS: u32 = 1;

/// Examines the gateway group of a configuration, if it has one, within some seconds.
pub(crate) fn examine(config: &Config, opening: &BlockingPool) -> Vec<Finding> {
    let Some(group) = config.group.clone() else { return Vec::new() };
    let (cluster, digest) = (config.group_cluster(), config.group_digest());
    let place = group.shared_place();
    let task = opening.begin(&place, move || {
        let client = ObjectClient::open(&cluster, &group.pool, GroupConfig::NAMESPACE, TIMEOUT)
            .map_err(|error| error.to_string())?;
        Ok(ask(&client, &group, &digest, &cluster.entity()))
    });
    task.by(Instant::now() + PATIENCE).unwrap_or_else(|why| {
        vec![Finding::problem(CHECK, format!("the gateway group: {why}"), "see above")]
    })
}

fn ask(client: &ObjectClient, group: &GroupConfig, digest: &str, entity: &str) -> Vec<Finding> {
    let object = group.object();
    let read = || client.read_prefixes(&object, &Key::PREFIXES);
    let first = read().map(|pairs| parsed(pairs.iter()));
    let mut findings = match first {
        Ok(Ok(first)) => {
            // Two heartbeats later: those of live gateways have changed.
            sleep(Timing::default().heartbeat * 3);
            let second = read().map(|pairs| parsed(pairs.iter()));
            let second = second.ok().and_then(Result::ok).unwrap_or_else(|| first.clone());
            members(group, digest, [&first, &second])
        }
        Ok(Err(damage)) => {
            let sentence = format!("the object {object} of the pool {}: {damage}", group.pool);
            let remedy = "no gateway decides by it: correct the value (rados setomapval)";
            vec![Finding::problem(CHECK, sentence, remedy)]
        }
        Err(Errno::ENOENT) => members(group, digest, [&GroupObject::default(); 2]),
        Err(errno) => vec![refused("read", &object, entity, &group.pool, Some(errno))],
    };
    // The comparison fails, so nothing is changed; without the right it is refused before.
    let key = "nvmfd-doctor".to_owned();
    let compare = vec![(key.clone(), Some(b"-".to_vec()))];
    let update = Update { compare, remove: vec![key], ..Update::default() };
    findings.push(match client.update(&object, &update) {
        Err(UpdateError::Conflict | UpdateError::Errno(Errno::ENOENT)) | Ok(()) => {
            refused("write", &object, entity, &group.pool, None)
        }
        Err(UpdateError::Errno(errno)) => {
            refused("write", &object, entity, &group.pool, Some(errno))
        }
    });
    // Its own client, which is used no more.
    let tried = client.blocklist_add(client.address(), TRIAL_SECONDS).err();
    findings.push(exclusion(entity, tried));
    findings
}

fn parsed<'a>(
    pairs: impl Iterator<Item = (&'a String, &'a Vec<u8>)>,
) -> Result<GroupObject, String> {
    GroupObject::parse(
        pairs.map(|(key, value)| (key.as_str(), str::from_utf8(value).unwrap_or_default())),
    )
}

/// Finding about an access to the object.
fn refused(tried: &str, object: &str, entity: &str, pool: &str, errno: Option<Errno>) -> Finding {
    let what = format!("the object {object} of the pool {pool}");
    match errno {
        None => Finding::ok(CHECK, format!("{entity} may {tried} {what}")),
        Some(errno @ (Errno::EACCES | Errno::EPERM)) => Finding::problem(
            CHECK,
            format!("{entity} may not {tried} {what}: {}", errno.desc()),
            rights_command(entity),
        ),
        Some(errno) => Finding::problem(
            CHECK,
            format!("{entity} cannot {tried} {what}: {}", errno.desc()),
            "see `ceph -s`",
        ),
    }
}

/// Finding about the right to exclude the client of another gateway.
fn exclusion(entity: &str, errno: Option<Errno>) -> Finding {
    match errno {
        None => Finding::ok(CHECK, format!("{entity} may exclude clients from the cluster")),
        Some(errno) => Finding::problem(
            CHECK,
            format!(
                "{entity} cannot exclude clients from the cluster, so it takes over from no gateway \
                 that has failed: {}",
                errno.desc()
            ),
            rights_command(entity),
        ),
    }
}

/// Findings about the gateways, by two readings of the object.
fn members(group: &GroupConfig, digest: &str, [first, second]: [&GroupObject; 2]) -> Vec<Finding> {
    let is_live = |slot: u8| {
        let key = Key::Heartbeat(slot);
        first.text(key) != second.text(key)
            && second.member(slot).is_some_and(|it| it.membership == Membership::Live)
    };
    let named = second.member(group.slot).filter(|it| it.name == group.gateway);
    let is_member = named.is_some() && is_live(group.slot);
    let mut findings = vec![own(group, second.member(group.slot), is_live(group.slot))];
    for (slot, member) in second.members().filter(|(slot, _)| *slot != group.slot) {
        let name = &member.name;
        if *name == group.gateway && is_live(slot) {
            findings.push(Finding::problem(
                CHECK,
                format!("gateway {name} is in slot {slot} of the group {}, and live", group.name),
                "give each gateway of the group another name",
            ));
        }
        let shares = group.shared && second.applied(slot).is_some();
        if is_live(slot) && !shares && member.digest != digest {
            let sentence = format!(
                "gateway {name} of the group {} declares other subsystems or namespaces: this one does \
                 not join while it lives",
                group.name
            );
            let remedy = "declare the same at all gateways";
            // Files are changed at one gateway after the other, and a member stays one meanwhile.
            findings.push(match is_member {
                true => Finding::warning(CHECK, sentence, remedy),
                false => Finding::problem(CHECK, sentence, remedy),
            });
        }
    }
    findings
}

/// Finding about the slot.
fn own(group: &GroupConfig, member: Option<&MemberRecord>, is_live: bool) -> Finding {
    let GroupConfig { name, gateway, slot, .. } = group;
    let place = format!("slot {slot} of the group {name}");
    match member {
        Some(other) if other.name != *gateway && other.membership != Membership::Left => {
            Finding::problem(
                CHECK,
                format!("{place} belongs to gateway {}", other.name),
                format!("give gateway {gateway} another `slot`"),
            )
        }
        Some(_) if is_live => Finding::ok(CHECK, format!("gateway {gateway} in {place} is live")),
        Some(own) if own.name == *gateway && own.membership == Membership::Excluded => {
            Finding::warning(
                CHECK,
                format!("gateway {gateway} in {place} was excluded, and has not come back"),
                "if its daemon runs: see its log, `ceph -s`, and the network to the cluster",
            )
        }
        _ => Finding::ok(CHECK, format!("{place} is free for gateway {gateway}")),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level::{self, Ok as Fine, Problem, Warning};
    use super::super::tests::says;
    use crate::platform::doctor::group::*;

    fn group() -> GroupConfig {
        let (name, pool, gateway) = ("g".to_owned(), "rbd".to_owned(), "a".to_owned());
        GroupConfig { name, pool, gateway, slot: 0, shared: false }
    }

    /// Findings about two readings.
    fn found(readings: [&[(&str, &str)]; 2]) -> Vec<Finding> {
        let [first, second] = readings.map(|it| GroupObject::parse(it.iter().copied()).unwrap());
        members(&group(), "d", [&first, &second])
    }

    #[track_caller]
    fn says_one(readings: [&[(&str, &str)]; 2], level: Level, words: &str) {
        says(&found(readings)[0], level, words);
    }

    #[test]
    fn a_slot_is_free_live_cut_off_or_of_another_gateway() {
        let (own, left) = (("gw.0", "1 a 1 live x:0/1 d -"), ("gw.0", "1 b 1 left x:0/1 d -"));
        let excluded = ("gw.0", "1 a 1 excluded x:0/1 d -");
        let [beat, next] = [("hb.0", "1 1"), ("hb.0", "1 2")];
        says_one([&[], &[]], Fine, "is free");
        says_one([&[left], &[left]], Fine, "is free");
        says_one([&[own, beat], &[own, beat]], Fine, "is free");
        says_one([&[own, beat], &[own, next]], Fine, "is live");
        says_one([&[excluded, beat], &[excluded, beat]], Warning, "was excluded");
        let other = ("gw.0", "1 b 1 live x:0/1 d -");
        says_one([&[other, beat], &[other, beat]], Problem, "belongs to gateway b");
    }

    #[test]
    fn live_gateways_with_the_same_name_or_another_declaration_are_problems() {
        let [beat, next] = [("hb.1", "1 1"), ("hb.1", "1 2")];
        for (other, words) in [
            ("1 a 1 live x:0/1 d -", "gateway a is in slot 1"),
            ("1 b 1 live x:0/1 e -", "gateway b of the group g declares other"),
        ] {
            let other = ("gw.1", other);
            assert_eq!(found([&[other, beat], &[other, beat]]).len(), 1, "it does not run");
            let findings = found([&[other, beat], &[other, next]]);
            says(&findings[1], Problem, words);
        }
        let same = ("gw.1", "1 b 1 live x:0/1 d -");
        assert_eq!(found([&[same, beat], &[same, next]]).len(), 1);
    }

    #[test]
    fn missing_rights_are_problems_with_the_command_that_gives_them() {
        let may = |errno| refused("write", "nvmfd.g", "client.nvmfd", "rbd", errno);
        says(&may(None), Fine, "may write the object nvmfd.g of the pool rbd");
        says(&may(Some(Errno::EACCES)), Problem, "may not write");
        assert!(may(Some(Errno::EACCES)).remedy.starts_with("ceph auth caps client.nvmfd"));
        says(&may(Some(Errno::ETIMEDOUT)), Problem, "cannot write");
        says(&exclusion("client.nvmfd", None), Fine, "may exclude");
        says(
            &exclusion("client.nvmfd", Some(Errno::EACCES)),
            Problem,
            "takes over from no gateway",
        );
    }
}
