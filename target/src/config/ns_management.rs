//! `[subsystem.managed]`: permission and quota for namespaces that hosts create and delete.

use std::collections::BTreeSet;
use std::path::PathBuf;

use nvme::Nqn;
use serde::{Deserialize, Serialize};

use crate::blockdev::ceph::{ClusterConfig, ImageName};
use crate::core::subsystem::MAX_NSID;
use crate::core::subsystem::ns_management::Grant;

use super::ceph::CephConfig;
use super::key_tree;
use super::schema::{bounded, name};
use super::size::{SIZE_FORM, Size};
use super::table_reader::{At, TableReader};

/// Name of the record of host-created namespaces, in the directory of their files.
pub(crate) const CATALOG_RECORD: &str = "namespaces";

/// Permission and quota for host-created namespaces.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct ManagedConfig {
    /// Absolute path of the directory of their files and record; used by no other subsystem.
    pub directory: PathBuf,
    /// The pool, or `pool/namespace`, in which new ones are images of Ceph RBD. Absent: they are
    /// files of the directory.
    pub pool: Option<String>,
    /// How the cluster of images is reached.
    #[serde(skip)]
    pub cluster: ClusterConfig,
    /// The maximum size of all namespaces together, in bytes.
    #[serde(rename = "quota", serialize_with = "key_tree::size")]
    pub quota_bytes: u64,
    /// The maximum number of namespaces: 1 to [`MAX_NSID`].
    pub namespaces: u32,
    /// Every host that may connect may manage.
    #[serde(rename = "hosts \"any\"")]
    pub any_host: bool,
    /// Hosts that may manage.
    #[serde(serialize_with = "key_tree::each")]
    pub hosts: BTreeSet<Nqn>,
}

impl ManagedConfig {
    /// Whether a host may manage namespaces. (A host's NQN is a claim; only a host with a key
    /// proves it.)
    pub fn admits(&self, host: &Nqn) -> bool {
        self.any_host || self.hosts.contains(host)
    }

    /// Data for Identify Controller.
    pub fn grant(&self) -> Grant {
        let ManagedConfig { quota_bytes, any_host, hosts, .. } = self;
        Grant { quota_bytes: *quota_bytes, any_host: *any_host, hosts: hosts.clone() }
    }
}

#[derive(Deserialize)]
#[serde(untagged)]
enum Who {
    Word(String),
    List(Vec<String>),
}

/// Reads `[subsystem.managed]`, if present. `seen`: the directories of other subsystems.
pub(super) fn managed(
    subsystem: &mut TableReader<'_>,
    seen: &mut Vec<At<PathBuf>>,
    ceph: &CephConfig,
) -> Option<ManagedConfig> {
    if !subsystem.has("managed") {
        return None;
    }
    let mut section = subsystem.table("managed", "[subsystem.managed]");
    let form = "the absolute path of a directory";
    let directory = section.need::<PathBuf>("directory", form);
    if let Some(At { value, span }) = &directory {
        if !value.is_absolute() {
            let what = format!("`directory` is {value:?}, which depends on a directory");
            section.add(span, what, format!("write {form}"));
        }
        let words = ("this directory", "give each subsystem its own");
        let plain = value.components().collect();
        super::schema::once(seen, plain, span, words, section.report);
    }
    let pool = pool(&mut section);
    let quota = section.need::<Size>("quota", SIZE_FORM);
    let namespaces = bounded(&mut section, "namespaces", 1..MAX_NSID, MAX_NSID);
    let (any_host, hosts) = who(&mut section);
    section.end();
    Some(ManagedConfig {
        directory: directory?.value,
        pool,
        cluster: ceph.cluster(),
        quota_bytes: quota?.value.0,
        namespaces,
        any_host,
        hosts,
    })
}

/// The pool of images, in which each is named by its UUID.
fn pool(section: &mut TableReader<'_>) -> Option<String> {
    let form = "\"POOL\" or \"POOL/NAMESPACE\", where new namespaces are images of Ceph RBD";
    let At { value, span } = section.take::<String>("pool", form)?;
    if let Err(why) = format!("{value}/image").parse::<ImageName>() {
        section.add(&span, format!("`pool` is {value:?}: {why}"), format!("write {form}"));
    }
    Some(value)
}

fn who(section: &mut TableReader<'_>) -> (bool, BTreeSet<Nqn>) {
    let form = "a list of host NQNs, or \"any\" for every host that may connect";
    match section.take::<Who>("hosts", form) {
        None => (false, BTreeSet::new()),
        Some(At { value: Who::Word(word), .. }) if word == "any" => (true, BTreeSet::new()),
        Some(At { value: Who::Word(word), span }) => {
            section.add(&span, format!("`hosts` is {word:?}"), format!("write {form}"));
            (false, BTreeSet::new())
        }
        Some(At { value: Who::List(list), span }) => {
            let host = |value| Some(name(At { value, span: span.clone() }, section.report)?.value);
            (false, list.into_iter().filter_map(host).collect())
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::config::ns_management::*;

    fn read(managed: &str) -> Result<ManagedConfig, String> {
        let text = format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:a\"\n\
             [subsystem.managed]\n{managed}\n"
        );
        let config = Config::parse(&text).map_err(|errors| errors.to_string())?;
        let printed = config.to_string();
        assert!(printed.contains("managed (directory /m, quota 1GiB"), "{printed}");
        Ok(config.subsystems[0].managed.clone().unwrap())
    }

    #[test]
    fn only_listed_hosts_may_manage_namespaces() {
        let host: Nqn = "nqn.2026-11.io.nvmfd:host".parse().unwrap();
        let plain = "directory = \"/m\"\nquota = \"1GiB\"\n";
        let none = read(plain).unwrap();
        assert_eq!((none.quota_bytes, none.namespaces), (1 << 30, MAX_NSID));
        assert!(!none.admits(&host));
        assert!(read(&format!("{plain}hosts = \"any\"")).unwrap().admits(&host));
        let one = read(&format!("{plain}hosts = [\"{host}\"]\nnamespaces = 3")).unwrap();
        assert!(one.admits(&host) && one.namespaces == 3);
        assert!(!one.admits(&"nqn.2026-11.io.nvmfd:other".parse().unwrap()));
    }

    #[test]
    fn namespaces_in_a_pool_are_made_in_the_cluster_of_the_configuration() {
        let text = "state_directory = '/state'\n[ceph]\nclient = 'a'\n[[listener]]\n\
                    address = '127.0.0.1'\n[[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n\
                    [subsystem.managed]\ndirectory = '/m'\nquota = '1GiB'\npool = 'rbd/space'\n";
        let config = Config::parse(text).unwrap();
        let managed = config.subsystems[0].managed.clone().unwrap();
        assert_eq!(managed.pool.as_deref(), Some("rbd/space"));
        assert_eq!(managed.cluster.entity(), "client.a");
        let addresses = managed.cluster.addresses.as_deref();
        assert_eq!(addresses, Some("/state/ceph-clients".as_ref()), "leftovers are recognised");
        assert!(config.to_string().contains("pool rbd/space"), "{config}");
    }

    #[test]
    fn invalid_namespace_management_settings_are_reported() {
        for (text, told) in [
            ("quota = \"1GiB\"", "has no `directory`"),
            ("directory = \"/m\"", "has no `quota`"),
            ("directory = \"m\"\nquota = 1", "depends on a directory"),
            ("directory = \"/m\"\nquota = 1\nhosts = \"all\"", "`hosts` is \"all\""),
            ("directory = \"/m\"\nquota = 1\nhosts = [\"x y\"]", "not an NQN"),
            ("directory = \"/m\"\nquota = 1\nnamespaces = 0", "namespaces"),
            ("directory = \"/m\"\nquota = 1\nqouta = 1", "did you mean `quota`?"),
            ("directory = \"/m\"\nquota = 1\npool = \"\"", "empty"),
            ("directory = \"/m\"\nquota = 1\npool = \"a/b/c\"", "two or three parts"),
            ("directory = \"/m\"\nquota = 1\npool = \"a@b\"", "no name"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(told), "{said}");
        }
    }
}
