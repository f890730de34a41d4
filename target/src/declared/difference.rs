//! What is different between two configurations, in words: `+` comes, `-` goes, `~` changes.

use std::collections::BTreeSet;
use std::fmt::Display;

use crate::config::{Config, ListenerConfig, NamespaceConfig, SubsystemConfig};

/// One sentence for each difference; none where both are the same.
#[must_use]
pub fn differences(old: &Config, new: &Config) -> Vec<String> {
    let mut lines = Vec::new();
    let by_id = |listener: &ListenerConfig| listener.id;
    compare(&mut lines, "listener", (&old.listeners, &new.listeners), by_id, |lines, was, is| {
        lines.push(format!("~ listener {was} becomes {is}"));
    });
    let by_name = |subsystem: &SubsystemConfig| subsystem.nqn;
    let both = (&old.subsystems[..], &new.subsystems[..]);
    for (was, is) in pairs(both, by_name) {
        match (was, is) {
            (Some(was), None) => lines.push(format!("- subsystem {}", was.nqn)),
            (None, Some(is)) => {
                lines.push(format!("+ subsystem {}", is.nqn));
                lines.extend(is.namespaces.iter().map(|n| format!("+ {}", shown(n, is))));
            }
            (Some(was), Some(is)) => subsystem(&mut lines, was, is),
            (None, None) => {}
        }
    }
    if old.discovery != new.discovery {
        lines.push("~ what discovery tells".to_owned());
    }
    let (was, is) = (&old.authentication, &new.authentication);
    for (was, is) in pairs((&was.hosts, &is.hosts), |host| host.nqn) {
        match (was, is) {
            (Some(was), None) => lines.push(format!("- key of host {}", was.nqn)),
            (None, Some(is)) => lines.push(format!("+ key of host {}", is.nqn)),
            (Some(was), Some(is)) if was != is => {
                lines.push(format!("~ key files of host {}", is.nqn));
            }
            _ => {}
        }
    }
    if (was.required, was.discovery, &was.policy) != (is.required, is.discovery, &is.policy) {
        lines.push("~ who must prove itself, and how".to_owned());
    }
    lines
}

fn subsystem(lines: &mut Vec<String>, was: &SubsystemConfig, is: &SubsystemConfig) {
    let nqn = is.nqn;
    if was.allow_any_host != is.allow_any_host {
        let who = if is.allow_any_host { "any host" } else { "only listed hosts" };
        lines.push(format!("~ {nqn} admits {who}"));
    }
    lines.extend(is.hosts.difference(&was.hosts).map(|host| format!("+ host {host} of {nqn}")));
    lines.extend(was.hosts.difference(&is.hosts).map(|host| format!("- host {host} of {nqn}")));
    if (&was.serial, &was.model) != (&is.serial, &is.model) {
        lines.push(format!("~ {nqn} has serial {:?} and model {:?}", is.serial, is.model));
    }
    if was.offer != is.offer {
        lines.push(format!("~ where and with which limits {nqn} is offered"));
    }
    for (was, now) in pairs((&was.namespaces, &is.namespaces), |n| n.nsid) {
        match (was, now) {
            (Some(was), None) => lines.push(format!("- {}", shown(was, is))),
            (None, Some(now)) => lines.push(format!("+ {}", shown(now, is))),
            (Some(was), Some(now)) if was != now => {
                lines.push(format!("~ {} (was {was})", shown(now, is)));
            }
            _ => {}
        }
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

/// What both have under one key, by the order of the keys.
fn pairs<'t, T, K: Ord + Copy>(
    (old, new): (&'t [T], &'t [T]),
    key: impl Fn(&T) -> K,
) -> Vec<(Option<&'t T>, Option<&'t T>)> {
    let keys: BTreeSet<K> = old.iter().chain(new).map(&key).collect();
    let of = |all: &'t [T], wanted: K| all.iter().find(|each| key(each) == wanted);
    keys.into_iter().map(|wanted| (of(old, wanted), of(new, wanted))).collect()
}
