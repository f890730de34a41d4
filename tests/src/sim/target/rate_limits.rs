//! Rate limits of namespaces and hosts, which change with each publication.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use nvme::Nqn;
use nvmfd::core::subsystem::rate_limit::Limiter;

use crate::sim::host::hostnqn;
use crate::sim::scenario::Profile;

/// The rate limiters of the present publication.
#[derive(Debug, Default)]
pub(super) struct Limiters {
    /// The time of the last iteration.
    pub(super) now: Option<Instant>,
    count: usize,
    namespaces: Vec<Option<Arc<Limiter>>>,
    hosts: Arc<BTreeMap<Nqn, Vec<Arc<Limiter>>>>,
}

impl Limiters {
    /// Sets those of the next publication. Of one that is unlimited, or before the first iteration,
    /// there are none.
    pub(super) fn next(&mut self, profile: &Profile) {
        self.count += 1;
        let (count, now) = (self.count, self.now);
        let limiter = |index: usize| {
            let limits = profile.limits;
            let limit = limits.get((count + index) % limits.len().max(1)).copied().flatten()?;
            Some(Arc::new(Limiter::new(limit, now?)))
        };
        let spaces = profile.shapes.len();
        self.namespaces = (0..spaces).map(limiter).collect();
        let machines = (0..profile.hosts).map(|host| profile.machine(host));
        let hosts = machines
            .filter_map(|machine| Some((hostnqn(machine), vec![limiter(spaces + machine)?])));
        self.hosts = Arc::new(hosts.collect());
    }

    pub(super) fn of_namespace(&self, space: usize) -> Vec<Arc<Limiter>> {
        self.namespaces.get(space).cloned().flatten().into_iter().collect()
    }

    pub(super) fn of_hosts(&self) -> Arc<BTreeMap<Nqn, Vec<Arc<Limiter>>>> {
        Arc::clone(&self.hosts)
    }
}
