//! Configured addresses, devices and files that are unavailable on this machine. They may appear
//! late during boot: meanwhile no file may be created in place of one that is about to appear.

use std::fs;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};

use nix::ifaddrs::InterfaceAddress;
use nix::net::if_::InterfaceFlags;

use super::mounts::{Mount, unmounted};
use crate::blockdev::names_device;
use crate::config::{CATALOG_RECORD, NamespaceConfig, NamespaceKind};

/// Reason why an address is unavailable, whatever the port: no interface has it. Wildcards are
/// always available.
pub(crate) fn address(mut at: SocketAddr) -> Option<String> {
    at.set_port(0);
    let bound = UdpSocket::bind(at);
    let missing = bound.is_err_and(|error| error.kind() == ErrorKind::AddrNotAvailable);
    missing.then(|| "no interface of this machine has the address".to_owned())
}

/// Whether hosts may reach an address: an interface has it whose link is up. A wildcard, and what no
/// interface lists (`127.0.0.2`), is reachable if it is available.
pub(crate) fn is_reachable(at: SocketAddr, interfaces: &[InterfaceAddress]) -> bool {
    let own = interfaces.iter().filter(|interface| ip_of(interface) == Some(at.ip()));
    let mut links = own.map(|interface| interface.flags.contains(InterfaceFlags::IFF_RUNNING));
    match links.next() {
        Some(first) => first || links.any(|is_up| is_up),
        None => address(at).is_none(),
    }
}

fn ip_of(interface: &InterfaceAddress) -> Option<IpAddr> {
    let address = interface.address.as_ref()?;
    let v4 = address.as_sockaddr_in().map(|v4| IpAddr::V4(v4.ip()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| IpAddr::V6(v6.ip())))
}

/// Reason why the device of a namespace is missing; `None` if it exists, or may be created.
/// `served`: text that it was, or may have been, served before.
pub(crate) fn store(namespace: &NamespaceConfig, served: Option<&str>) -> Option<String> {
    let NamespaceKind::File { path, size } = &namespace.kind else { return None };
    let mount = expected(path);
    let shown = path.display();
    let found = fs::metadata(path);
    if let Some(Mount { point, is_automatic }) = mount
        && (found.is_err() || is_automatic)
    {
        return Some(format!("{shown}: {} is not mounted yet", point.display()));
    }
    match found {
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => {}
        // It exists; other errors are reported when it is opened.
        _ => return None,
    }
    let directory = path.parent().unwrap_or(path);
    let is_link = fs::symlink_metadata(path).is_ok();
    if is_link || names_device(path) {
        return Some(format!("{shown} is not there yet"));
    }
    if !fs::metadata(directory).is_ok_and(|found| found.is_dir()) {
        return Some(format!("{shown}: there is no directory {} yet", directory.display()));
    }
    if namespace.read_only {
        return Some(format!("{shown} is not there yet"));
    }
    if size.is_none() {
        return Some(format!("{shown} is not there yet, and is not created without a `size`"));
    }
    let was = served?;
    Some(format!(
        "{shown} {was} and is missing; it is not created anew: restore it, or create an empty one \
         (truncate -s SIZE {shown})"
    ))
}

/// Returns why the directory of host-created namespaces is missing: it, or its file system. If that
/// is mounted by hand, only the record in the directory identifies it.
pub(crate) fn directory(path: &Path) -> Option<String> {
    directory_below(path, expected(path))
}

fn directory_below(path: &Path, unmounted: Option<Mount>) -> Option<String> {
    let shown = path.display();
    let is_missing = !fs::metadata(path).is_ok_and(|found| found.is_dir());
    match unmounted {
        Some(Mount { point, is_automatic })
            if is_missing || is_automatic || !path.join(CATALOG_RECORD).exists() =>
        {
            Some(format!("{shown}: {} is not mounted yet", point.display()))
        }
        _ => is_missing.then(|| format!("there is no directory {shown} yet")),
    }
}

/// Returns the file system of a path that should be mounted but is not. Links on the path may lead
/// into another one.
fn expected(path: &Path) -> Option<Mount> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let (fstab, mountinfo) = (read("/etc/fstab"), read("/proc/self/mountinfo"));
    let unmounted = |path: &Path| unmounted(path, &fstab, &mountinfo);
    unmounted(path).or_else(|| unmounted(&real(path)))
}

/// Resolves all links of a path, or of its directory if the last part is missing.
pub(crate) fn real(path: &Path) -> PathBuf {
    let in_directory = || Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?));
    fs::canonicalize(path).ok().or_else(in_directory).unwrap_or_else(|| path.to_owned())
}

#[cfg(test)]
mod tests {
    use crate::platform::availability::*;
    use tempfile::tempdir;

    fn namespace(path: &Path, size: Option<u64>) -> NamespaceConfig {
        let text = "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
                    \"nqn.2026-11.io.nvmfd:d\"\n[[subsystem.namespace]]\nnsid = 1\nkind = \
                    \"null\"\nsize = \"1MiB\"\n";
        let mut config = crate::config::Config::parse(text).unwrap();
        let mut namespace = config.subsystems.remove(0).namespaces.remove(0);
        namespace.kind = NamespaceKind::File { path: path.to_owned(), size };
        namespace
    }

    #[test]
    fn an_address_is_reachable_while_a_link_of_it_is_up() {
        let interface = |ip: [u8; 4], flags| InterfaceAddress {
            interface_name: "eth0".to_owned(),
            flags,
            address: Some(SocketAddr::from((ip, 0)).into()),
            netmask: None,
            broadcast: None,
            destination: None,
        };
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 4420);
        let (up, down) =
            (InterfaceFlags::IFF_UP | InterfaceFlags::IFF_RUNNING, InterfaceFlags::IFF_UP);
        let own = [192, 0, 2, 1];
        assert!(is_reachable(at("192.0.2.1"), &[interface(own, up)]));
        assert!(!is_reachable(at("192.0.2.1"), &[interface(own, down)]), "no carrier");
        assert!(is_reachable(at("192.0.2.1"), &[interface(own, down), interface(own, up)]));
        assert!(!is_reachable(at("192.0.2.1"), &[]), "it was removed");
        for ip in ["127.0.0.2", "0.0.0.0"] {
            assert!(is_reachable(at(ip), &[interface(own, down)]), "{ip}");
        }
    }

    #[test]
    fn a_missing_file_is_pending_unless_it_may_be_created() {
        let directory = tempdir().unwrap();
        let path = directory.path().join("disk.img");
        let why = |path: &Path, size| store(&namespace(path, size), None);
        assert_eq!(why(&path, Some(4096)), None, "it will be made");
        assert!(why(&path, None).unwrap().contains("not there yet, and is not created without"));
        assert!(why(&path.join("no/disk.img"), Some(4096)).unwrap().contains("no directory"));
        let device = Path::new("/dev/nvmfd-no-such-device");
        assert!(why(device, Some(4096)).unwrap().contains("not there yet"));
        let memory = tempfile::tempdir_in("/dev/shm").unwrap();
        assert_eq!(why(&memory.path().join("disk.img"), Some(4096)), None, "no device");
        let read_only = NamespaceConfig { read_only: true, ..namespace(&path, Some(4096)) };
        assert!(store(&read_only, None).is_some());
        let served = Some("was served before");
        assert!(store(&namespace(&path, Some(4096)), served).unwrap().contains("truncate"));
        std::os::unix::fs::symlink("nowhere", directory.path().join("link")).unwrap();
        assert!(why(&directory.path().join("link"), Some(4096)).is_some());
        fs::write(&path, [0; 4096]).unwrap();
        for size in [None, Some(4096)] {
            assert_eq!(store(&namespace(&path, size), served), None, "it is there");
        }
    }

    #[test]
    fn an_unmounted_directory_is_used_only_with_its_record() {
        let directory = tempdir().unwrap();
        let path = directory.path();
        let below = |is_automatic| {
            directory_below(path, Some(Mount { point: "/srv".into(), is_automatic }))
        };
        assert_eq!(directory_below(path, None), None);
        for is_automatic in [true, false] {
            assert!(below(is_automatic).unwrap().contains("/srv is not mounted yet"));
        }
        fs::write(path.join(CATALOG_RECORD), "").unwrap();
        assert!(below(true).is_some());
        assert_eq!(below(false), None);
        let gone = directory_below(&path.join("gone"), None).unwrap();
        assert!(gone.contains("there is no directory"), "{gone}");
    }

    #[test]
    fn symlinks_are_resolved_even_if_the_file_is_missing() {
        let directory = tempdir().unwrap();
        let path = fs::canonicalize(directory.path()).unwrap();
        fs::create_dir(path.join("disks")).unwrap();
        std::os::unix::fs::symlink("disks", path.join("link")).unwrap();
        assert_eq!(real(&path.join("link/a.img")), path.join("disks/a.img"));
        assert_eq!(real(&path.join("link")), path.join("disks"));
        assert_eq!(real(&path.join("no/a.img")), path.join("no/a.img"));
    }

    #[test]
    fn only_addresses_of_this_machine_are_available() {
        assert_eq!(address(([127, 0, 0, 1], 4420).into()), None);
        assert_eq!(address(([0, 0, 0, 0], 4420).into()), None);
        // Of the range for documentation: unused.
        assert!(address(([192, 0, 2, 77], 4420).into()).is_some());
        assert!(address("[fe80::77%1]:4420".parse().unwrap()).is_some());
    }
}
