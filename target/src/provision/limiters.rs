//! Rate limiters of a configuration: retained while their limits are unchanged, so that a reload
//! grants no new burst.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use nvme::Nqn;

use crate::config::{LimitConfig, SubsystemConfig};
use crate::core::subsystem::rate_limit::{Limit, Limiter};

/// Rate limiters of namespaces and hosts.
#[derive(Clone, Debug, Default)]
pub(super) struct Limiters {
    of_namespaces: BTreeMap<(Nqn, u32), Arc<Limiter>>,
    /// Limiters of `[[qos]]`, by name.
    named: BTreeMap<String, Arc<Limiter>>,
    of_hosts: Arc<BTreeMap<Nqn, Vec<Arc<Limiter>>>>,
    /// When the first began. All count from then, so that a queue pair reads the time once for all.
    began: Option<Instant>,
}

impl Limiters {
    /// Returns the limiters of the next configuration; unchanged limits keep their state.
    #[must_use]
    pub(super) fn next(&self, limits: &[LimitConfig], subsystems: &[SubsystemConfig]) -> Limiters {
        let began = self.began.unwrap_or_else(Instant::now);
        let mut next = Limiters { began: Some(began), ..Limiters::default() };
        for subsystem in subsystems {
            for namespace in subsystem.namespaces.iter().filter(|n| !n.limit.is_none()) {
                let key = (subsystem.nqn, namespace.nsid);
                let limiter = kept(self.of_namespaces.get(&key), namespace.limit, began);
                next.of_namespaces.insert(key, limiter);
            }
        }
        let mut of_hosts: BTreeMap<Nqn, Vec<Arc<Limiter>>> = BTreeMap::new();
        for LimitConfig { name, limit, hosts } in limits {
            let limiter = kept(self.named.get(name), *limit, began);
            for host in hosts {
                of_hosts.entry(*host).or_default().push(Arc::clone(&limiter));
            }
            next.named.insert(name.clone(), limiter);
        }
        next.of_hosts = match *self.of_hosts == of_hosts {
            true => Arc::clone(&self.of_hosts),
            false => Arc::new(of_hosts),
        };
        next
    }

    /// Returns the limiters of a namespace: its own, and the shared one of this name.
    pub(super) fn of_namespace(
        &self,
        nqn: Nqn,
        nsid: u32,
        shared: Option<&str>,
    ) -> Vec<Arc<Limiter>> {
        let own = self.of_namespaces.get(&(nqn, nsid));
        let shared = shared.and_then(|name| self.named.get(name));
        own.into_iter().chain(shared).cloned().collect()
    }

    pub(super) fn of_hosts(&self) -> &Arc<BTreeMap<Nqn, Vec<Arc<Limiter>>>> {
        &self.of_hosts
    }
}

/// Returns the old limiter if its limit is unchanged; else a new one.
fn kept(old: Option<&Arc<Limiter>>, limit: Limit, began: Instant) -> Arc<Limiter> {
    let same = old.filter(|limiter| limiter.limit() == limit);
    same.map_or_else(|| Arc::new(Limiter::new(limit, began)), Arc::clone)
}

#[cfg(test)]
mod tests {
    use crate::config::Config;
    use crate::provision::limiters::*;

    fn config(own: u32, gold: u32) -> Config {
        let text = format!(
            "[[listener]]\naddress = \"127.0.0.1\"\n\
             [[qos]]\nname = \"gold\"\niops = {gold}\nhosts = [\"nqn.2026-11.host:a\"]\n\
             [[subsystem]]\nnqn = \"nqn.2026-11.io.nvmfd:disk1\"\nallow_any_host = true\n\
             [[subsystem.namespace]]\nnsid = 1\nkind = \"null\"\nsize = \"1GiB\"\n\
             limit = {{ iops = {own}, shared = \"gold\" }}\n"
        );
        Config::parse(&text).unwrap()
    }

    #[test]
    fn unchanged_limiters_retain_their_state_and_changed_ones_restart() {
        let of = |old: &Limiters, config: &Config| old.next(&config.quotas, &config.subsystems);
        let nqn = config(1, 1).subsystems[0].nqn;
        let of_namespace = |limiters: &Limiters| limiters.of_namespace(nqn, 1, Some("gold"));
        let first = of(&Limiters::default(), &config(500, 1000));
        assert_eq!(of_namespace(&first).len(), 2);
        let same = of(&first, &config(500, 1000));
        assert_eq!(of_namespace(&same), of_namespace(&first));
        assert!(Arc::ptr_eq(same.of_hosts(), first.of_hosts()));
        let other = of(&same, &config(501, 1000));
        let [own, gold] = &of_namespace(&other)[..] else { panic!() };
        assert_eq!((own.limit().iops, gold), (Some(501), &of_namespace(&same)[1]));
        let other = of(&other, &config(501, 1001));
        let host = "nqn.2026-11.host:a".parse().unwrap();
        assert_eq!(other.of_hosts()[&host], of_namespace(&other)[1..]);
        assert_ne!(&of_namespace(&other)[1], gold);
    }
}
