//! `[ceph]`: how the cluster of RBD images is reached.

use std::path::PathBuf;

use serde::Serialize;

use super::table_reader::{At, TableReader};
use super::{Config, NamespaceKind};
use crate::blockdev::ceph::{ClusterConfig, ImageName};

/// File in the state directory with the addresses of the RADOS clients of this daemon.
const ADDRESSES: &str = "ceph-clients";

/// How the cluster of RBD images is reached.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct CephConfig {
    /// Configuration file of Ceph; absent: where Ceph looks for it.
    pub conf: Option<PathBuf>,
    /// Name of the client, without its type.
    pub client: String,
    /// File with its key; absent: as the configuration file says.
    pub keyring: Option<PathBuf>,
}

impl Default for CephConfig {
    fn default() -> CephConfig {
        CephConfig { conf: None, client: "nvmfd".to_owned(), keyring: None }
    }
}

impl CephConfig {
    /// For the opening of images.
    pub(super) fn cluster(&self) -> ClusterConfig {
        let CephConfig { conf, client, keyring } = self.clone();
        ClusterConfig { conf, client, keyring, addresses: None, standby: false }
    }
}

pub(super) fn ceph(root: &mut TableReader<'_>) -> CephConfig {
    let mut ceph = CephConfig::default();
    let mut section = root.table("ceph", "[ceph]");
    let mut path = |key, form| {
        let At { value, span } = section.take::<PathBuf>(key, form)?;
        if !value.is_absolute() {
            section.add(&span, "the path is not absolute", format!("write {form}"));
        }
        Some(value)
    };
    ceph.conf = path("conf", "an absolute path, such as \"/etc/ceph/ceph.conf\"");
    ceph.keyring =
        path("keyring", "an absolute path, such as \"/etc/ceph/ceph.client.nvmfd.keyring\"");
    let form = "the name of a client without its type, such as \"nvmfd\" for client.nvmfd";
    if let Some(At { value, span }) = section.take::<String>("client", form) {
        if value.is_empty() || value.starts_with("client.") || value.contains(char::is_control) {
            section.add(&span, format!("`client` is {value:?}"), format!("write {form}"));
        }
        ceph.client = value;
    }
    section.end();
    ceph
}

/// The image of a namespace.
pub(super) fn image(section: &mut TableReader<'_>) -> Option<At<ImageName>> {
    let form = "\"POOL/IMAGE\" or \"POOL/NAMESPACE/IMAGE\", with \"@SNAPSHOT\" for a snapshot";
    let At { value, span } = section.need::<String>("path", form)?;
    match value.parse() {
        Ok(value) => Some(At { value, span }),
        Err(why) => {
            section.add(&span, format!("`path` is {value:?}: {why}"), format!("write {form}"));
            None
        }
    }
}

impl Config {
    /// The file with the addresses of clients.
    pub(super) fn client_addresses(&self) -> Option<PathBuf> {
        self.state_directory.as_ref().map(|directory| directory.join(ADDRESSES))
    }

    /// Names the file with the addresses of clients to all images, also of hosts: after the state
    /// directory is known.
    pub(super) fn set_client_addresses(&mut self) {
        let addresses = self.client_addresses();
        for subsystem in &mut self.subsystems {
            if let Some(managed) = &mut subsystem.managed {
                managed.cluster.addresses.clone_from(&addresses);
            }
            for namespace in &mut subsystem.namespaces {
                if let NamespaceKind::Rbd { cluster, .. } = &mut namespace.kind {
                    cluster.addresses.clone_from(&addresses);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::config::{Config, NamespaceKind};

    fn read(section: &str, namespace: &str) -> Result<Config, String> {
        let text = format!(
            "state_directory = '/state'\n{section}\n[[listener]]\naddress = '127.0.0.1'\n\
             [[subsystem]]\nnqn = 'nqn.2026-11.io.nvmfd:a'\n[[subsystem.namespace]]\nnsid = 1\n\
             kind = 'rbd'\n{namespace}"
        );
        Config::parse(&text).map_err(|errors| errors.to_string())
    }

    #[test]
    fn rbd_images_reference_the_cluster_and_client_address_directory() {
        let ceph = "[ceph]\nconf = '/c'\nkeyring = '/k'\nclient = 'a'";
        let config = read(ceph, "path = 'pool/space/image'").unwrap();
        let NamespaceKind::Rbd { image, cluster, .. } = &config.subsystems[0].namespaces[0].kind
        else {
            panic!("{config}");
        };
        assert_eq!(image.to_string(), "pool/space/image");
        assert_eq!(cluster.entity(), "client.a");
        assert_eq!(cluster.conf.as_deref(), Some("/c".as_ref()));
        assert_eq!(cluster.keyring.as_deref(), Some("/k".as_ref()));
        assert_eq!(cluster.addresses.as_deref(), Some("/state/ceph-clients".as_ref()));
        assert!(config.to_string().contains("ceph        conf /c, client a, keyring /k"));
    }

    #[test]
    fn settings_unsupported_for_rbd_images_are_refused() {
        for (section, namespace, says) in [
            ("", "path = 'image'", "two or three parts"),
            ("", "path = 'pool//image'", "empty"),
            ("", "path = 'pool/image@'", "no name"),
            ("", "path = 'pool/image@a@b'", "no name"),
            ("", "path = 'pool/image@a/b'", "no name"),
            ("", "path = 'pool/image@snap'", "read_only = true"),
            ("", "path = 'pool/image'\nsize = '1GiB'", "rbd resize"),
            ("", "path = 'pool/image'\nshared = true", "its kind"),
            ("", "path = 'pool/image'\nallow_format = true", "allow_format"),
            ("", "path = 'pool/image'\nwrite_uncorrectable = true", "write_uncorrectable"),
            ("[ceph]\nclient = 'client.a'", "path = 'pool/image'", "without its type"),
            ("[ceph]\nconf = 'c'", "path = 'pool/image'", "not absolute"),
        ] {
            let said = read(section, namespace).unwrap_err();
            assert!(said.contains(says), "{said}");
        }
    }
}
