//! `[group]`: the gateway group that this daemon is a member of.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use serde::Serialize;

use super::schema::bounded;
use super::table_reader::{At, Diagnostics, TableReader};
use super::{Config, NamespaceConfig, NamespaceKind, digest};
use crate::blockdev::ceph::ClusterConfig;
use crate::core::subsystem::AccessPolicy;

/// Controller ids of each gateway of a group.
const CNTLIDS: u16 = 2000;
/// Slots of a group.
const SLOTS: u32 = nvmfd_gateway::SLOTS as u32;

/// A gateway of a group: several daemons that serve the same images.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct GroupConfig {
    /// Name of the group.
    pub name: String,
    /// Pool of its object.
    pub pool: String,
    /// Name of this gateway.
    pub gateway: String,
    /// Its number: 0 to 31.
    pub slot: u8,
    /// Subsystems are those of the shared configuration.
    pub shared: bool,
}

impl GroupConfig {
    /// RADOS namespace of the objects of groups.
    pub const NAMESPACE: &str = "nvmfd";

    /// Name of the object of the group.
    pub fn object(&self) -> String {
        format!("nvmfd.{}", self.name)
    }

    /// What names the shared configuration in messages, as a file.
    pub fn shared_place(&self) -> PathBuf {
        PathBuf::from(format!("rados:{}/{}", self.pool, self.object()))
    }

    /// The controller ids that this gateway gives.
    pub fn cntlids(&self) -> RangeInclusive<u16> {
        let before = u16::from(self.slot) * CNTLIDS;
        before + 1..=before + CNTLIDS
    }
}

pub(super) fn group(root: &mut TableReader<'_>) -> Option<At<GroupConfig>> {
    if !root.has("group") {
        return None;
    }
    let mut section = root.table("group", "[group]");
    let span = section.span().clone();
    let name = field(&mut section, "name", "the name of the group, such as \"g1\"");
    let pool = field(&mut section, "pool", "a pool of the cluster, such as \"rbd\"");
    let form = "the name of this gateway in its group, such as \"a\"";
    let gateway = field(&mut section, "gateway", form);
    if !section.has("slot") {
        let remedy = "give each gateway of the group its own number from 0 to 31";
        section.add(&span, "[group] has no `slot`", remedy);
    }
    let slot = bounded(&mut section, "slot", 0..SLOTS - 1, 0) as u8;
    let shared = section.flag("shared", false);
    section.end();
    let value = GroupConfig { name: name?, pool: pool?, gateway: gateway?, slot, shared };
    Some(At { value, span })
}

fn field(section: &mut TableReader<'_>, key: &'static str, form: &str) -> Option<String> {
    let At { value, span } = section.need::<String>(key, form)?;
    if !nvmfd_gateway::record::is_field(&value) {
        let what = format!("`{key}` is {value:?}");
        section.add(&span, what, format!("write {form}, without spaces"));
    }
    Some(value)
}

impl Config {
    /// Refuses what several gateways cannot serve alike.
    pub(super) fn check_group(&self, group: &At<GroupConfig>, report: &Diagnostics<'_>) {
        for subsystem in &self.subsystems {
            let nqn = &subsystem.nqn;
            if subsystem.managed.is_some() {
                let what = format!("hosts may manage {nqn}, which a gateway group serves");
                let remedy = "remove [subsystem.managed], or [group]: the record of what hosts have \
                              made is in a directory of one gateway, and the others cannot see it";
                report.add(&group.span, what, remedy);
            }
            if subsystem.offer.cntlids != AccessPolicy::default().cntlids {
                let what = format!("{nqn} has `cntlids`, which [group] gives by slot");
                report.add(&group.span, what, "remove `cntlids`");
            }
            let mut namespaces = subsystem.namespaces.iter();
            let other = namespaces.find(|it| !matches!(it.kind, NamespaceKind::Rbd { .. }));
            if let Some(other) = other {
                let what = format!("namespace {} of {nqn} is no image", other.nsid);
                let remedy = "other gateways of the group have no access to it: use kind = \"rbd\", \
                              or another daemon without [group]";
                report.add(&group.span, what, remedy);
            }
        }
    }

    /// Sets what follows from being a member of a group.
    pub(super) fn set_group(&mut self) {
        let Some(group) = &self.group else { return };
        let cntlids = group.cntlids();
        self.discovery.cntlids = cntlids.clone();
        for subsystem in &mut self.subsystems {
            subsystem.offer.cntlids = cntlids.clone();
            for namespace in &mut subsystem.namespaces {
                if let NamespaceKind::Rbd { cluster, .. } = &mut namespace.kind {
                    cluster.standby = true;
                }
            }
        }
    }

    /// How the data client of a gateway reaches the cluster: as its images do.
    pub(crate) fn group_cluster(&self) -> ClusterConfig {
        let addresses = self.client_addresses();
        ClusterConfig { addresses, standby: true, ..self.ceph.cluster() }
    }

    /// Refuses another ANA group for an image that is served: its present owner has the lock, and
    /// is the only one that may change what hosts have persisted.
    pub(crate) fn check_regrouped(&self, next: &Config) -> Result<(), String> {
        if self.group.is_none() {
            return Ok(());
        }
        let served: BTreeMap<_, _> = self.images().collect();
        let moved = next.images().find_map(|(image, it)| {
            let before = served.get(&image).filter(|before| before.ana_group != it.ana_group)?;
            Some((image, before.ana_group))
        });
        moved.map_or(Ok(()), |(image, group)| {
            Err(format!(
                "image {image} is served in ANA group {group}: remove its namespace, reload all \
                 gateways, and add it again in the other group"
            ))
        })
    }

    /// All images, each with its namespace.
    fn images(&self) -> impl Iterator<Item = (String, &NamespaceConfig)> {
        let all = self.subsystems.iter().flat_map(|subsystem| &subsystem.namespaces);
        all.filter_map(|namespace| match &namespace.kind {
            NamespaceKind::Rbd { image, .. } => Some((image.to_string(), namespace)),
            _ => None,
        })
    }

    /// Digest of what all gateways of a group must declare alike: a host sees the same subsystems
    /// and namespaces through each of them.
    pub fn group_digest(&self) -> String {
        let mut text = String::new();
        let mut subsystems: Vec<_> = self.subsystems.iter().collect();
        subsystems.sort_by_key(|subsystem| subsystem.nqn);
        for subsystem in subsystems {
            let _ = writeln!(
                text,
                "{} {:?} {:?} {}",
                subsystem.nqn, subsystem.serial, subsystem.model, subsystem.offer.max_nsid
            );
            let mut namespaces: Vec<_> = subsystem.namespaces.iter().collect();
            namespaces.sort_by_key(|namespace| namespace.nsid);
            for namespace in namespaces {
                let NamespaceKind::Rbd { image, .. } = &namespace.kind else { continue };
                let _ = writeln!(
                    text,
                    "{} {image} {} {} {:02x?} {:02x?} {} {}",
                    namespace.nsid,
                    namespace.block_size_bytes,
                    namespace.uuid,
                    namespace.nguid,
                    namespace.eui64,
                    namespace.read_only,
                    namespace.ana_group
                );
            }
        }
        digest(&text)
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    fn read(group: &str, more: &str) -> Result<Config, String> {
        let text = format!(
            "state_directory = '/state'\n{group}\n[[listener]]\naddress = '127.0.0.1'\n\
             [[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n{more}"
        );
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    const GROUP: &str = "[group]\nname = 'g'\npool = 'rbd'\ngateway = 'b'\nslot = 31";
    const IMAGE: &str = "[[subsystem.namespace]]\nnsid = 1\nkind = 'rbd'\npath = 'rbd/a'\n";

    #[test]
    fn a_gateway_uses_controller_ids_of_its_slot_and_standby_images() {
        let config = read(GROUP, IMAGE).unwrap();
        assert_eq!(config.group.as_ref().unwrap().object(), "nvmfd.g");
        assert_eq!(config.subsystems[0].offer.cntlids, 62_001..=64_000);
        assert_eq!(config.discovery.cntlids, 62_001..=64_000);
        let crate::config::NamespaceKind::Rbd { cluster, .. } =
            &config.subsystems[0].namespaces[0].kind
        else {
            panic!("{config}");
        };
        assert!(cluster.standby);
        assert!(config.to_string().contains("group       name g, pool rbd, gateway b, slot 31"));
    }

    #[test]
    fn group_digest_covers_served_objects_but_not_the_gateway() {
        let digest = |group: &str, more: &str| read(group, more).unwrap().group_digest();
        let own = digest(GROUP, IMAGE);
        assert_eq!(digest(&GROUP.replace("31", "0").replace("'b'", "'a'"), IMAGE), own);
        let other = IMAGE.replace("rbd/a", "rbd/b");
        for more in [other, format!("serial = 'x'\n{IMAGE}"), format!("{IMAGE}ana_group = 2")] {
            assert_ne!(digest(GROUP, &more), own, "{more}");
        }
    }

    #[test]
    fn an_image_that_is_served_stays_in_its_ana_group() {
        let (none, one) = (read(GROUP, "").unwrap(), read(GROUP, IMAGE).unwrap());
        let two = read(GROUP, &format!("{IMAGE}ana_group = 2")).unwrap();
        let said = one.check_regrouped(&two).unwrap_err();
        assert!(said.contains("image rbd/a is served in ANA group 1"), "{said}");
        for (was, is) in [(&one, &one), (&one, &none), (&none, &two), (&two, &two)] {
            assert_eq!(was.check_regrouped(is), Ok(()));
        }
    }

    #[test]
    fn settings_invalid_in_a_gateway_group_are_refused() {
        let null = "[[subsystem.namespace]]\nnsid = 1\nkind = 'null'\nsize = '1MiB'\n";
        let managed = "managed = { directory = '/m', pool = 'rbd', quota = '1GiB' }\n";
        for (group, more, says) in [
            (GROUP, null, "is no image"),
            (GROUP, "cntlids = [1, 100]", "has `cntlids`"),
            (GROUP, managed, "in a directory of one gateway"),
            ("[group]\nname = 'g'\npool = 'rbd'\ngateway = 'b'", IMAGE, "no `slot`"),
            (&GROUP.replace("31", "32"), IMAGE, "`slot` is 32"),
            (&GROUP.replace("'b'", "'b c'"), IMAGE, "without spaces"),
            ("[group]\nslot = 1", IMAGE, "`name`"),
        ] {
            let said = read(group, more).unwrap_err();
            assert!(said.contains(says), "{said}");
        }
    }
}
