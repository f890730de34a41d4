//! Differences between two configurations, as text: `+` added, `-` removed, `~` changed.
//!
//! Named objects (listeners, subsystems, their namespaces and hosts, keys of hosts) are compared as objects.
//! Everything else is compared key by key in the trees of both, so that no key can be missed.

use std::collections::BTreeSet;
use std::fmt::Display;

use serde_json::{Map, Value};

use crate::config::{
    AuthenticationConfig, Config, HostConfig, NamespaceConfig, SubsystemConfig, all, text, tree,
};
use crate::core::subsystem::ListenerConfig;

/// Returns one sentence for each difference.
pub fn differences(old: &Config, new: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    let by_id = |listener: &ListenerConfig| listener.id;
    compare(&mut lines, "listener", (&old.listeners, &new.listeners), by_id, |lines, was, is| {
        lines.push(format!("~ listener {was} becomes {is}"));
    });
    let (mut was, mut is) = (members(tree(old)), members(tree(new)));
    let trees = (list(&mut was, "subsystem"), list(&mut is, "subsystem"));
    subsystems(&mut lines, (&old.subsystems, &trees.0), (&new.subsystems, &trees.1));
    let before = lines.len();
    keys(&mut lines, "", &was, &is);
    for line in lines.iter_mut().skip(before) {
        if ON_PROOF.iter().any(|key| line.starts_with(key)) {
            line.push_str(NEXT);
        }
    }
    hosts_with_keys(&mut lines, &old.authentication, &new.authentication);
    hosts_without_keys(&mut lines, &old.authentication, &new.authentication);
    lines
}

fn subsystems(
    lines: &mut Vec<String>,
    (old, old_trees): (&[SubsystemConfig], &[Value]),
    (new, new_trees): (&[SubsystemConfig], &[Value]),
) {
    for (was, is) in pairs((old, new), |subsystem| subsystem.nqn) {
        match (was, is) {
            (Some(was), None) => lines.push(format!("- subsystem {}", was.nqn)),
            (None, Some(is)) => {
                lines.push(format!("+ subsystem {}", is.nqn));
                lines.extend(is.namespaces.iter().map(|n| format!("+ {}", shown(n, is))));
            }
            (Some(was), Some(is)) if was != is => {
                let of = |all: &[Value]| {
                    let named = |each: &&Value| each["nqn"] == is.nqn.as_str();
                    all.iter().find(named).cloned().map(members).unwrap_or_default()
                };
                subsystem(lines, (was, of(old_trees)), (is, of(new_trees)));
            }
            _ => {}
        }
    }
}

/// Keys of hosts, and their hashes and groups.
fn hosts_with_keys(
    lines: &mut Vec<String>,
    old: &AuthenticationConfig,
    new: &AuthenticationConfig,
) {
    for (was, is) in pairs((&old.hosts, &new.hosts), |host| host.nqn) {
        match (was, is) {
            (Some(was), None) if new.exempt.contains(&was.nqn) => {
                lines.push(format!("- key of host {}: authenticate = false", was.nqn));
            }
            (None, Some(is)) if old.exempt.contains(&is.nqn) => {
                lines.push(format!("+ key of host {}: authenticate = true", is.nqn));
            }
            (Some(was), None) => lines.push(format!("- key of host {}", was.nqn)),
            (None, Some(is)) => lines.push(format!("+ key of host {}", is.nqn)),
            (Some(was), Some(is)) => {
                let files =
                    |host: &HostConfig| (host.key_file.clone(), host.controller_key_file.clone());
                if files(was) != files(is) {
                    lines.push(format!("~ key files of host {}", is.nqn));
                }
                if (&was.hashes, &was.groups) != (&is.hashes, &is.groups) {
                    let policy = is.policy(&new.policy);
                    lines.push(format!("~ host {} may use {policy}{NEXT}", is.nqn));
                }
            }
            (None, None) => {}
        }
    }
}

/// Hosts that are exempt from authentication. For hosts whose key is added or removed, the line of
/// the key includes it.
fn hosts_without_keys(
    lines: &mut Vec<String>,
    old: &AuthenticationConfig,
    new: &AuthenticationConfig,
) {
    let has_key = |hosts: &[HostConfig], nqn: nvme::Nqn| hosts.iter().any(|host| host.nqn == nqn);
    for (was, is) in pairs((&old.exempt, &new.exempt), |nqn| *nqn) {
        match (was, is) {
            (Some(nqn), None) if !has_key(&new.hosts, *nqn) => {
                lines.push(format!("- authenticate = false of host {nqn}"));
            }
            (None, Some(nqn)) if !has_key(&old.hosts, *nqn) => {
                lines.push(format!("+ authenticate = false of host {nqn}"));
            }
            _ => {}
        }
    }
}

/// Keys that concern later authentications only.
const ON_PROOF: [&str; 2] = ["~ authentication hashes ", "~ authentication groups "];

/// Suffix with the time when the change takes effect.
const NEXT: &str = " (from the next authentication on)";

type Tree = Map<String, Value>;

/// Keys of a subsystem that take effect when a host connects.
const ON_CONNECT: [&str; 3] = ["queue_depth", "io_queues", "mdts"];

fn subsystem(
    lines: &mut Vec<String>,
    (was, mut old): (&SubsystemConfig, Tree),
    (is, mut new): (&SubsystemConfig, Tree),
) {
    let nqn = is.nqn;
    if was.allow_any_host != is.allow_any_host {
        let who = if is.allow_any_host { "any host" } else { "only listed hosts" };
        lines.push(format!("~ {nqn} admits {who}"));
    }
    lines.extend(is.hosts.difference(&was.hosts).map(|host| format!("+ host {host} of {nqn}")));
    lines.extend(was.hosts.difference(&is.hosts).map(|host| format!("- host {host} of {nqn}")));
    let trees = (list(&mut old, "namespace"), list(&mut new, "namespace"));
    for key in ["allow_any_host", "hosts"] {
        old.remove(key);
        new.remove(key);
    }
    let before = lines.len();
    keys(lines, nqn.as_str(), &old, &new);
    for line in lines.iter_mut().skip(before) {
        if ON_CONNECT.iter().any(|key| line.starts_with(&format!("~ {nqn} {key} "))) {
            line.push_str(" (for hosts that connect from now on; others when they connect again)");
        }
    }
    for (was, now) in pairs((&was.namespaces, &is.namespaces), |n| n.nsid) {
        match (was, now) {
            (Some(was), None) => lines.push(format!("- {}", shown(was, is))),
            (None, Some(now)) => lines.push(format!("+ {}", shown(now, is))),
            (Some(was), Some(now)) if was != now => {
                let of = |all: &[Value]| {
                    let named = |each: &&Value| each["nsid"] == now.nsid;
                    all.iter().find(named).cloned().map(members).unwrap_or_default()
                };
                let mut changed = Vec::new();
                keys(&mut changed, "", &of(&trees.0), &of(&trees.1));
                let changed: Vec<&str> =
                    changed.iter().map(|line| line.trim_start_matches("~ ")).collect();
                lines.push(format!("~ {} ({})", shown(now, is), changed.join("; ")));
            }
            _ => {}
        }
    }
}

/// Adds a line for each key that differs; `of` names the owner of the keys.
fn keys(lines: &mut Vec<String>, of: &str, old: &Tree, new: &Tree) {
    let names = old.keys().chain(new.keys().filter(|key| !old.contains_key(*key)));
    let nothing = Value::Null;
    for key in names {
        let was = old.get(key).unwrap_or(&nothing);
        let is = new.get(key).unwrap_or(&nothing);
        let name = if of.is_empty() { key.clone() } else { format!("{of} {key}") };
        match (was, is) {
            _ if was == is => {}
            (Value::Object(was), Value::Object(is)) => keys(lines, &name, was, is),
            (Value::Object(was), Value::Null) => {
                lines.push(format!("- {name} ({})", all(was)));
            }
            (Value::Null, Value::Object(is)) => lines.push(format!("+ {name} ({})", all(is))),
            (Value::Array(was), Value::Array(is)) if of_sections(was, is) => {
                sections(lines, &name, (was, is));
            }
            _ => lines.push(format!("~ {name} {} becomes {}", text(was), text(is))),
        }
    }
}

fn of_sections(was: &[Value], is: &[Value]) -> bool {
    was.iter().chain(is).all(Value::is_object)
}

/// Sections of one title, identified by their names if any.
fn sections(lines: &mut Vec<String>, title: &str, (was, is): (&[Value], &[Value])) {
    let name = |each: &Value| each["name"].as_str().map(str::to_owned);
    let same = |a: &Value, b: &Value| a == b || name(a).is_some() && name(a) == name(b);
    let shown = |each: &Value| each.as_object().map(all).unwrap_or_default();
    let before = lines.len();
    for old in was {
        match is.iter().find(|new| same(old, new)) {
            Some(new) => {
                let of = format!("{title} {}", name(new).unwrap_or_default());
                keys(lines, &of, &members(old.clone()), &members(new.clone()));
            }
            None => lines.push(format!("- {title} ({})", shown(old))),
        }
    }
    let came = is.iter().filter(|new| !was.iter().any(|old| same(old, new)));
    lines.extend(came.map(|new| format!("+ {title} ({})", shown(new))));
    if lines.len() == before {
        lines.push(format!("~ the order of {title}"));
    }
}

fn members(value: Value) -> Tree {
    match value {
        Value::Object(members) => members,
        _ => Tree::new(),
    }
}

/// Removes a list of sections from a tree, and returns it.
fn list(tree: &mut Tree, key: &str) -> Vec<Value> {
    match tree.remove(key) {
        Some(Value::Array(list)) => list,
        _ => Vec::new(),
    }
}

fn shown(namespace: &NamespaceConfig, of: &SubsystemConfig) -> String {
    format!("namespace {namespace} of {}", of.nqn)
}

fn compare<T: PartialEq + Display, K: Ord + Copy>(
    lines: &mut Vec<String>,
    kind: &str,
    both: (&[T], &[T]),
    key: impl Fn(&T) -> K,
    changed: impl Fn(&mut Vec<String>, &T, &T),
) {
    for pair in pairs(both, key) {
        match pair {
            (Some(was), None) => lines.push(format!("- {kind} {was}")),
            (None, Some(is)) => lines.push(format!("+ {kind} {is}")),
            (Some(was), Some(is)) if was != is => changed(lines, was, is),
            _ => {}
        }
    }
}

/// Pairs of both sides, in the order of their keys.
fn pairs<'t, T, K: Ord + Copy>(
    (old, new): (&'t [T], &'t [T]),
    key: impl Fn(&T) -> K,
) -> Vec<(Option<&'t T>, Option<&'t T>)> {
    let keys: BTreeSet<K> = old.iter().chain(new).map(&key).collect();
    let of = |all: &'t [T], wanted: K| all.iter().find(|each| key(each) == wanted);
    keys.into_iter().map(|wanted| (of(old, wanted), of(new, wanted))).collect()
}

#[cfg(test)]
mod tests;
