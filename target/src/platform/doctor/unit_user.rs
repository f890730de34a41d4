//! The user of the daemon's unit: root has rights to files, keys and directories that it lacks.

use std::ffi::CString;

use nix::unistd::{Gid, Group, Uid, User, geteuid, getgrouplist, setgid, setgroups, setuid};

use super::Finding;
use super::ports::said;

const CHECK: &str = "user";

/// The unit of the package.
pub(super) const UNIT: &str = "nvmfd.service";

/// A user with the groups that the service manager gives it.
#[derive(Debug)]
struct Credentials {
    user: User,
    gid: Gid,
    groups: Vec<Gid>,
}

/// Continues as the user of the unit, with its groups, if this process is root's and there is such a
/// unit with another user. There is no way back. Returns a finding; of level `Ok` if that was done.
pub fn assume_unit_user() -> Option<Finding> {
    if !geteuid().is_root() {
        return None;
    }
    let properties = "--property=LoadState,User,Group,SupplementaryGroups";
    let unit = said("systemctl", &["show", properties, UNIT])?;
    let found = match Credentials::of_unit(&unit)? {
        Ok(found) => found,
        Err(sentence) => {
            let remedy = "create it (systemd-sysusers), or correct the unit: it does not start";
            return Some(Finding::problem(CHECK, sentence, remedy));
        }
    };
    let Credentials { user, gid, groups } = &found;
    let assumed = setgroups(groups).and_then(|()| setgid(*gid)).and_then(|()| setuid(user.uid));
    Some(match assumed {
        Ok(()) => Finding::ok(CHECK, found.sentence()),
        Err(error) => Finding::warning(
            CHECK,
            format!("cannot continue as user {} of {UNIT}: {error}", user.name),
            format!("make sure that {} may use the files, keys and directories", user.name),
        ),
    })
}

impl Credentials {
    /// The credentials of a unit, from its properties. None if it is not loaded, or root's.
    fn of_unit(properties: &str) -> Option<Result<Credentials, String>> {
        let property = |name: &str| {
            let value =
                |line: &'_ str| Some(line.strip_prefix(name)?.strip_prefix('=')?.to_owned());
            properties.lines().find_map(value).unwrap_or_default()
        };
        let name = property("User");
        if property("LoadState") != "loaded" || ["", "root", "0"].contains(&name.as_str()) {
            return None;
        }
        let groups = property("SupplementaryGroups");
        let groups = groups.split_whitespace();
        Some(Credentials::of(&name, &property("Group"), groups))
    }

    /// The credentials of a user, with a primary group other than its own unless that is empty.
    fn of<'g>(
        name: &str,
        group: &str,
        more: impl Iterator<Item = &'g str>,
    ) -> Result<Credentials, String> {
        let missing = |kind: &str, name: &str| format!("{UNIT}: there is no {kind} {name:?}");
        let by_name = User::from_name(name).ok().flatten();
        let by_id = || User::from_uid(Uid::from_raw(name.parse().ok()?)).ok().flatten();
        let user = by_name.or_else(by_id).ok_or_else(|| missing("user", name))?;
        let gid_of = |name: &str| {
            let by_name = Group::from_name(name).ok().flatten().map(|group| group.gid);
            let by_id = || name.parse().ok().map(Gid::from_raw);
            by_name.or_else(by_id).ok_or_else(|| missing("group", name))
        };
        let gid = if group.is_empty() { user.gid } else { gid_of(group)? };
        let own = CString::new(user.name.as_str()).ok();
        let mut groups = own.and_then(|own| getgrouplist(&own, gid).ok()).unwrap_or_default();
        for name in more {
            groups.push(gid_of(name)?);
        }
        Ok(Credentials { user, gid, groups })
    }

    fn sentence(&self) -> String {
        let name = |gid: &Gid| {
            let group = Group::from_gid(*gid).ok().flatten();
            group.map_or_else(|| gid.to_string(), |group| group.name)
        };
        let groups: Vec<String> = self.groups.iter().map(name).collect();
        format!(
            "files, keys and directories are examined as user {} with the groups {}, as of {UNIT}",
            self.user.name,
            groups.join(", ")
        )
    }
}

#[cfg(test)]
mod tests {
    use crate::platform::doctor::unit_user::*;

    #[test]
    fn the_credentials_of_a_unit_are_those_of_the_service_manager() {
        let of = |text: &str| Credentials::of_unit(&text.replace(' ', "\n"));
        assert!(of("LoadState=not-found User=").is_none());
        assert!(of("LoadState=loaded User=").is_none());
        assert!(of("LoadState=loaded User=root").is_none());
        let nobody = of("LoadState=loaded User=nobody Group=").unwrap().unwrap();
        assert_eq!((nobody.user.name.as_str(), nobody.gid), ("nobody", nobody.user.gid));
        assert!(nobody.groups.contains(&nobody.gid));
        let text = "LoadState=loaded\nUser=65534\nGroup=4711\nSupplementaryGroups=4712 4713\n";
        let other = Credentials::of_unit(text).unwrap().unwrap();
        assert_eq!((other.user.uid, other.gid), (nobody.user.uid, Gid::from_raw(4711)));
        let has = |gid| other.groups.contains(&Gid::from_raw(gid));
        assert!(has(4711) && has(4712) && has(4713), "{other:?}");
        assert!(other.sentence().contains("4712, 4713"), "{}", other.sentence());
        let missing = of("LoadState=loaded User=nvmfd-no-such-user").unwrap().unwrap_err();
        assert!(missing.contains("no user \"nvmfd-no-such-user\""), "{missing}");
        let missing = of("LoadState=loaded User=nobody Group=nvmfd-none").unwrap().unwrap_err();
        assert!(missing.contains("no group \"nvmfd-none\""), "{missing}");
    }
}
