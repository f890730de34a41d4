//! Refuses Connects to a subsystem while the contents of a namespace are replaced.

use nvme::Nqn;

use super::Registry;

/// While it exists, every Connect of an admin queue to its subsystem is refused with Connect
/// Controller Busy, which hosts retry.
#[derive(Debug)]
pub struct ConnectBarrier<'a> {
    registry: &'a Registry,
    nqn: Nqn,
}

/// Hosts of a subsystem.
#[derive(Debug)]
pub struct ConnectedHosts {
    /// One of them.
    pub one: Nqn,
    /// Number of their controllers.
    pub controllers: usize,
    /// Whether one of these is ready: a host that disconnects shuts its controller down before.
    pub any_ready: bool,
}

impl Registry {
    /// Refuses new hosts of a subsystem until the result is dropped. A host counts from the moment
    /// its Connect is admitted, before it has authenticated, until its admin queue has closed.
    ///
    /// # Errors
    /// There are hosts, unless `with_hosts`.
    pub fn refuse_connects(
        &self,
        nqn: &Nqn,
        with_hosts: bool,
    ) -> Result<ConnectBarrier<'_>, ConnectedHosts> {
        let mut table = self.lock();
        let all = table.associations.values().map(|entry| &entry.association);
        let mut present = all.filter(|association| association.subsystem == *nqn);
        if let (false, Some(one)) = (with_hosts, present.next()) {
            let (controllers, any_ready) =
                present.fold((1, one.is_ready()), |(n, any), it| (n + 1, any || it.is_ready()));
            return Err(ConnectedHosts { one: one.host, controllers, any_ready });
        }
        *table.refusing.entry(*nqn).or_insert(0) += 1;
        Ok(ConnectBarrier { registry: self, nqn: *nqn })
    }
}

impl Drop for ConnectBarrier<'_> {
    fn drop(&mut self) {
        let mut table = self.registry.lock();
        if let Some(count) = table.refusing.get_mut(&self.nqn) {
            *count -= 1;
            if *count == 0 {
                table.refusing.remove(&self.nqn);
            }
        }
    }
}
