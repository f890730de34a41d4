//! The sandbox of the daemon's unit: backing stores that the service manager hides from it, or lets it
//! only read.

use std::path::{Path, PathBuf};

use super::Finding;
use super::ports::said;
use super::unit_user::UNIT;
use crate::blockdev::names_device;
use crate::config::{CATALOG_RECORD, Config, NamespaceKind};
use crate::platform::availability::real;

/// Properties of a unit, as `systemctl show` prints them.
struct Sandbox<'t>(&'t str);

/// Checks the backing stores of a configuration against the sandbox of the unit.
pub fn examine_sandbox(config: &Config) -> Vec<Finding> {
    let properties = "--property=ProtectSystem,ProtectHome,PrivateTmp,ReadWritePaths,BindPaths,\
                      StateDirectory,DevicePolicy,DeviceAllow";
    let unit = said("systemctl", &["show", properties, UNIT]).unwrap_or_default();
    let findings = paths(config).filter_map(|(place, path, writes)| {
        let (why, remedy) = Sandbox(&unit).denial(&path, writes)?;
        let sentence = format!("{place}: {UNIT} {why} {}", path.display());
        Some(Finding::problem("sandbox", sentence, format!("systemctl edit nvmfd: {remedy}")))
    });
    findings.collect()
}

/// Files and devices that the daemon uses: what each belongs to, and whether it is written.
fn paths(config: &Config) -> impl Iterator<Item = (String, PathBuf, bool)> {
    config.subsystems.iter().flat_map(|subsystem| {
        let nqn = subsystem.nqn;
        let stores = subsystem.namespaces.iter().filter_map(move |namespace| {
            let NamespaceKind::File { path, .. } = &namespace.kind else { return None };
            let place = format!("namespace {} of {nqn}", namespace.nsid);
            Some((place, path.clone(), !namespace.read_only))
        });
        let record =
            subsystem.managed.as_ref().map(|managed| managed.directory.join(CATALOG_RECORD));
        let managed = move |record| (format!("managed namespaces of {nqn}"), record, true);
        stores.chain(record.map(managed))
    })
}

impl Sandbox<'_> {
    /// What the unit does to a path, and the line that changes it. None if the daemon may use it.
    fn denial(&self, path: &Path, writes: bool) -> Option<(&'static str, String)> {
        let real = real(path);
        let directory = real.parent().unwrap_or(&real).display();
        let is_below = |all: &[&str]| all.iter().any(|parent| real.starts_with(parent));
        if names_device(&real) {
            let is_closed = ["closed", "strict"].contains(&self.value("DevicePolicy"));
            let remedy = format!("DeviceAllow={} rw", path.display());
            return (is_closed && !self.allows_device(&real)).then_some(("does not allow", remedy));
        }
        if self.value("ProtectHome") == "yes" && is_below(&["/home", "/root", "/run/user"]) {
            return Some(("hides", "ProtectHome=no; or use another directory".to_owned()));
        }
        if self.value("PrivateTmp") == "yes" && is_below(&["/tmp", "/var/tmp"]) {
            return Some(("hides", "PrivateTmp=no; or use another directory".to_owned()));
        }
        let is_read_only = self.value("ProtectSystem") == "strict" && !is_below(&["/dev"]);
        let is_denied = writes && is_read_only && !self.is_writable(&real);
        is_denied.then(|| ("lets the daemon only read", format!("ReadWritePaths={directory}")))
    }

    /// The value of a property that has one.
    fn value(&self, name: &str) -> &str {
        self.values(name).next().unwrap_or_default()
    }

    fn values(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0.lines().filter_map(move |line| line.strip_prefix(name)?.strip_prefix('='))
    }

    fn allows_device(&self, device: &Path) -> bool {
        self.values("DeviceAllow").any(|allowed| {
            let name = allowed.split_whitespace().next().unwrap_or_default();
            // A kind of block devices may be that of this one.
            name.starts_with("block-") || name.starts_with('/') && real(Path::new(name)) == device
        })
    }

    fn is_writable(&self, path: &Path) -> bool {
        let words = |name| self.value(name).split_whitespace();
        let own = words("StateDirectory").map(|name| Path::new("/var/lib").join(name));
        // SOURCE:DESTINATION:OPTIONS
        let bound = words("BindPaths").map(|bind| bind.split(':').nth(1).unwrap_or(bind));
        let named = words("ReadWritePaths").chain(bound);
        let named = named.map(|name| real(Path::new(name.trim_start_matches(['-', '+']))));
        own.chain(named).any(|directory| path.starts_with(directory))
    }
}

#[cfg(test)]
mod tests {
    use crate::platform::doctor::sandbox::*;

    #[test]
    fn directories_of_managed_namespaces_are_compared_with_the_sandbox() {
        let config = Config::parse(
            "[[listener]]\naddress = \"127.0.0.1\"\n[[subsystem]]\nnqn = \
             \"nqn.2026-11.io.nvmfd:a\"\nallow_any_host = true\n[subsystem.managed]\ndirectory = \
             \"/nvmfd-managed\"\nquota = \"1MiB\"\n",
        );
        let all: Vec<_> = paths(&config.unwrap()).collect();
        let (place, path) = ("managed namespaces of nqn.2026-11.io.nvmfd:a", "/nvmfd-managed");
        assert_eq!(all, [(place.to_owned(), Path::new(path).join(CATALOG_RECORD), true)]);
        let denied = Sandbox("ProtectSystem=strict\n").denial(&all[0].1, true).unwrap();
        assert_eq!(denied.1, "ReadWritePaths=/nvmfd-managed");
    }

    #[test]
    fn stores_outside_of_the_sandbox_of_the_unit_are_denied() {
        let strict = "ProtectSystem=strict\nProtectHome=yes\nPrivateTmp=yes\nStateDirectory=nvmfd\n\
                      ReadWritePaths=-/nvmfd-a /nvmfd-b\nBindPaths=/x:/nvmfd-c:rbind\n\
                      DevicePolicy=closed\nDeviceAllow=char-infiniband_verbs rw\n\
                      DeviceAllow=/dev/nvmfd-disk rw\n";
        let of = |unit: &str, path: &str, writes| {
            let denied = Sandbox(unit).denial(Path::new(path), writes);
            denied.map(|(why, remedy)| format!("{why}; {remedy}"))
        };
        for path in
            ["/var/lib/nvmfd/a", "/nvmfd-a/b", "/nvmfd-b/b", "/nvmfd-c/b", "/dev/nvmfd-disk"]
        {
            assert_eq!(of(strict, path, true), None, "{path}");
        }
        for (path, says) in [
            ("/nvmfd-ab/c", "lets the daemon only read; ReadWritePaths=/nvmfd-ab"),
            ("/home/nvmfd/disk", "hides; ProtectHome=no; or use another directory"),
            ("/var/tmp/nvmfd/disk", "hides; PrivateTmp=no; or use another directory"),
            ("/dev/nvmfd-other", "does not allow; DeviceAllow=/dev/nvmfd-other rw"),
        ] {
            assert_eq!(of(strict, path, true).as_deref(), Some(says), "{path}");
            assert_eq!(of("", path, true), None, "{path}, without a sandbox");
        }
        assert_eq!(of(strict, "/nvmfd-ab/c", false), None, "read_only");
        let kind = format!("{strict}DeviceAllow=block-sd rw\n");
        assert_eq!(of(&kind, "/dev/nvmfd-other", true), None);
    }
}
