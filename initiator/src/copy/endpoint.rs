//! What is copied from or to: a file, or a namespace as `nvme://ADDRESS[:PORT][,..]/NQN[/NSID]`.

use std::path::PathBuf;

use nvme::Nqn;

use crate::path_address::{PathAddress, path};

/// Prefix of the name of a namespace.
const SCHEME: &str = "nvme://";

/// A source or a target.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Endpoint {
    /// A file or a block device of this machine.
    File(PathBuf),
    /// A namespace.
    Namespace {
        /// Its paths.
        paths: Vec<PathAddress>,
        /// The subsystem.
        subnqn: Box<Nqn>,
        /// Its number there.
        nsid: u32,
    },
}

/// Parses the name of a source or target. IPv6 addresses with a port are in brackets.
pub(super) fn endpoint(text: &str) -> Result<Endpoint, String> {
    let Some(rest) = text.strip_prefix(SCHEME) else {
        return match text.is_empty() || text.contains("://") {
            true => Err("a file, or nvme://ADDRESS[:PORT][,ADDRESS…]/NQN[/NSID]".into()),
            false => Ok(Endpoint::File(text.into())),
        };
    };
    let (addresses, name) = rest.split_once('/').ok_or("the NQN is missing")?;
    let paths = addresses.split(',').map(path).collect::<Result<Vec<_>, _>>()?;
    let (nqn, nsid) = match name.rsplit_once('/') {
        Some((nqn, nsid)) => {
            let nsid = nsid.parse().ok().filter(|nsid| (1..nvme::NSID_ALL).contains(nsid));
            (nqn, nsid.ok_or("behind the NQN is the number of the namespace")?)
        }
        None => (name, 1),
    };
    let subnqn = Nqn::new(nqn).map_err(|error| format!("{nqn:?}: {error}"))?;
    Ok(Endpoint::Namespace { paths, subnqn: Box::new(subnqn), nsid })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespace_urls_have_addresses_an_nqn_and_an_nsid() {
        let of = |text: &str| match endpoint(text) {
            Ok(Endpoint::Namespace { paths, subnqn, nsid }) => {
                let paths: Vec<String> = paths.iter().map(|path| path.to.to_string()).collect();
                Some((paths.join(" "), subnqn.to_string(), nsid))
            }
            _ => None,
        };
        let some = |paths: &str, nsid| Some((paths.into(), "nqn.2026-11.x:d".into(), nsid));
        assert_eq!(of("nvme://192.0.2.1/nqn.2026-11.x:d"), some("192.0.2.1:4420", 1));
        let two = of("nvme://192.0.2.1:1,[fd00::1]:2@fd00::2/nqn.2026-11.x:d/7");
        assert_eq!(two, some("192.0.2.1:1 [fd00::1]:2", 7));
        assert_eq!(endpoint("/dev/sdb"), Ok(Endpoint::File("/dev/sdb".into())));
        assert_eq!(endpoint("image:1"), Ok(Endpoint::File("image:1".into())));
        for wrong in [
            "",
            "http://x/y",
            "nvme://",
            "nvme://192.0.2.1",
            "nvme://192.0.2.1/",
            "nvme:///nqn.2026-11.x:d",
            "nvme://192.0.2.1/nqn.2026-11.x:d/0",
            "nvme://192.0.2.1/nqn.2026-11.x:d/x",
            "nvme://host/nqn.2026-11.x:d",
        ] {
            assert!(endpoint(wrong).is_err(), "{wrong}");
        }
    }
}
