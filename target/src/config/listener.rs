//! `[[listener]]`: addresses that accept connections, and their ANA states.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};

use nvme::log::AnaState;
use rdma::ZonedIp;
use rdma::zone::is_link_local;
use serde::Deserialize;
use serde::de::{Deserializer, Error, MapAccess, Visitor};

use super::schema::bounded;
use super::table_reader::{At, Diagnostics, TableReader};
use crate::core::subsystem::ListenerConfig;
use crate::core::subsystem::ana::{ANA_GROUPS, ANA_STATES, AnaStates};

const ANA_FORM: &str = "a state for all groups, such as \"optimized\", or one for each that is not \
                        optimized, such as { 2 = \"inaccessible\" }";

/// Upper bound of timeouts.
const MIN_MAX_MS: u32 = 600_000;

pub(super) fn listener(mut section: TableReader<'_>, seen: &mut Vec<At<ListenerConfig>>) {
    let form = "an IP address, such as \"192.0.2.1\", \"::1\" or \"0.0.0.0\" for all";
    let address = section.need::<String>("address", form);
    let address = address.and_then(|at| zoned(&at, form, section.report));
    let port = bounded(&mut section, "port", 1..65535, nvme::PORT.into()) as u16;
    let place = seen.len() as u32 + 1;
    let id = bounded(&mut section, "id", 1..65535, place) as u16;
    let ana = section.take::<AnaText>("ana", ANA_FORM);
    let ana = ana.map_or_else(AnaStates::default, |ana| states(&ana, section.report));
    let keep_alive_min_ms = bounded(&mut section, "keep_alive_min_ms", 0..MIN_MAX_MS, 0);
    let span = section.span().clone();
    section.end();
    let Some(address) = address else { return };
    let new = address.value.with_port(port);
    let rival = seen.iter().find(|old| overlap(old.value.address, new));
    if let Some(rival) = rival {
        let place = section.report.shown(&rival.span, &address.span);
        let (at, rival) = (new, rival.value.address);
        let what = format!("the listener {at} overlaps with {rival} of {place}");
        section.add(&address.span, what, "remove one of them, or give it another port");
    }
    if let Some(rival) = seen.iter().find(|old| old.value.id == id) {
        let place = section.report.shown(&rival.span, &span);
        let what = format!("the listener {new} has id {id}, like the one of {place}");
        section.add(&span, what, "give each listener an `id` of its own");
    }
    if address.value.ip.is_multicast() {
        section.add(
            &address.span,
            format!("{new} is a multicast address"),
            format!("write {form}"),
        );
    }
    let value = ListenerConfig { id, address: new, ana, keep_alive_min_ms };
    seen.push(At { value, span });
}

/// The address of a listener: a link-local one with its interface.
fn zoned(at: &At<String>, form: &str, report: &Diagnostics<'_>) -> Option<At<ZonedIp>> {
    let (what, form) = match at.value.parse::<ZonedIp>() {
        Ok(ZonedIp { ip, scope_id: 0 }) if is_link_local(ip) => {
            let what = format!("`address` is {ip}, which is on each link");
            (what, format!("an interface behind it, such as \"{ip}%eth0\""))
        }
        Ok(value) => return Some(At { value, span: at.span.clone() }),
        Err(what) => (format!("`address`: {what}"), form.to_owned()),
    };
    report.add(&at.span, what, format!("write {form}"));
    None
}

/// Whether two addresses conflict. An unspecified address covers every address of its family, and
/// `::` covers IPv4 as well. The same link-local address in two zones is one address to connections.
pub fn overlap(a: SocketAddr, b: SocketAddr) -> bool {
    let covers = |wide: IpAddr, narrow: IpAddr| {
        wide == narrow || wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4())
    };
    a.port() == b.port() && (covers(a.ip(), b.ip()) || covers(b.ip(), a.ip()))
}

fn states(at: &At<AnaText>, report: &Diagnostics<'_>) -> AnaStates {
    let known = |name: &str| {
        let alike = |state: &&AnaState| state.name() == Some(&name.replace('_', "-"));
        let state = ANA_STATES.iter().find(alike).copied();
        if state.is_none() {
            let names: Vec<_> = ANA_STATES.iter().filter_map(|state| state.name()).collect();
            let what = format!("{name:?} is no state of a path");
            report.add(&at.span, what, format!("write one of {}", names.join(", ")));
        }
        state
    };
    let groups = match &at.value {
        AnaText::All(name) => return known(name).map(AnaStates::all).unwrap_or_default(),
        AnaText::Groups(groups) => groups,
    };
    let mut states = AnaStates::default();
    let mut strange = Vec::new();
    for (group, name) in groups {
        let state = known(name);
        match (group.parse(), state) {
            (Ok(group @ 1..=ANA_GROUPS), Some(state)) => states.set(group, state),
            (Ok(1..=ANA_GROUPS), None) => {}
            _ => strange.push(group),
        }
    }
    for group in strange {
        let what = format!("{group:?} is no group of namespaces");
        report.add(&at.span, what, format!("write a number from 1 to {ANA_GROUPS}"));
    }
    states
}

/// `ana` in the text: one state, or a table from groups to states.
enum AnaText {
    All(String),
    Groups(BTreeMap<String, String>),
}

impl<'de> Deserialize<'de> for AnaText {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        struct AsAna;
        impl<'de> Visitor<'de> for AsAna {
            type Value = AnaText;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a state or a table from groups to states")
            }

            fn visit_str<E: Error>(self, value: &str) -> Result<AnaText, E> {
                Ok(AnaText::All(value.to_owned()))
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<AnaText, M::Error> {
                let mut groups = BTreeMap::new();
                while let Some((group, state)) = map.next_entry()? {
                    groups.insert(group, state);
                }
                Ok(AnaText::Groups(groups))
            }
        }
        from.deserialize_any(AsAna)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::listener::*;

    fn config(listeners: &str) -> Result<Config, String> {
        let text = format!(
            "{listeners}\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:x\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \"1MiB\"\nana_group = 2\n"
        );
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    #[test]
    fn ana_groups_have_states_per_listener() {
        let config = config(
            "[[listener]]\naddress = \"192.0.2.1\"\nana = { 1 = \"non-optimized\", 64 = \
             \"persistent_loss\" }\n[[listener]]\naddress = \"192.0.2.2\"\nana = \"inaccessible\"\n\
             [[listener]]\naddress = \"192.0.2.3\"\n",
        );
        let config = config.unwrap();
        let states = |at: usize| [1, 2, 64].map(|group| config.listeners[at].ana.state(group).0);
        assert_eq!([states(0), states(1), states(2)], [[2, 1, 4], [3, 3, 3], [1, 1, 1]]);
        assert_eq!(config.subsystems[0].namespaces[0].ana_group, 2);
        let printed = config.to_string();
        assert!(printed.contains("192.0.2.2:4420 (id 2), all groups inaccessible\n"), "{printed}");
        assert!(printed.contains("null of 1MiB, blocks of 4096, group 2, writable"), "{printed}");
    }

    #[test]
    fn invalid_ana_states_and_groups_are_reported() {
        let says = |ana: &str| {
            config(&format!("[[listener]]\naddress = \"::\"\nana = {ana}")).unwrap_err()
        };
        assert!(says("\"broken\"").contains("one of optimized, non-optimized, inaccessible"));
        assert!(says("{ 1 = \"lost\" }").contains("\"lost\" is no state of a path"));
        for group in ["0", "65", "a", "99999999999"] {
            let said = says(&format!("{{ {group} = \"change\" }}"));
            assert!(said.contains("write a number from 1 to 64"), "{said}");
        }
        assert!(says("7").contains("line 3") && says("{ 1 = 2 }").contains("`ana`"));
    }

    #[test]
    fn a_link_local_address_requires_an_interface() {
        let with = |address: &str, more: &str| {
            config(&format!("[[listener]]\naddress = \"{address}\"\n{more}"))
        };
        // The first interface of every machine is lo.
        let found = with("fe80::1%lo", "").unwrap();
        assert_eq!(found.listeners[0].address, "[fe80::1%1]:4420".parse().unwrap());
        let says = |address: &str, more: &str| with(address, more).unwrap_err();
        assert!(says("fe80::1", "").contains("is on each link: write an interface behind it"));
        assert!(says("fe80::1%none", "").contains("no interface \"none\""));
        assert!(says("2001:db8::1%lo", "").contains("2001:db8::1 has no zone"));
        let again = "[[listener]]\naddress = \"fe80::1%2\"\n";
        assert!(says("fe80::1%1", again).contains("overlaps"));
    }

    #[test]
    fn a_listener_may_have_a_shortest_keep_alive() {
        let text = |ms| format!("[[listener]]\naddress = \"::1\"\nkeep_alive_min_ms = {ms}\n");
        let config = |ms| config(&text(ms));
        let listener = config("15000").unwrap().listeners[0];
        assert_eq!(listener.keep_alive_min_ms, 15_000);
        assert!(listener.to_string().ends_with("(id 1), keep alive of at least 15000 ms"));
        assert_eq!(config("0").unwrap().listeners[0], ListenerConfig::from(listener.address));
        assert!(config("600001").unwrap_err().contains("a number from 0 to 600000"));
    }
}
