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

impl Registry {
    /// Refuses new hosts of a subsystem until the result is dropped. A host counts from the moment
    /// its Connect is admitted, before it has authenticated, until its admin queue has closed.
    ///
    /// # Errors
    /// There are hosts, unless `with_hosts`: the name of one, and the number of controllers.
    pub fn refuse_connects(
        &self,
        nqn: &Nqn,
        with_hosts: bool,
    ) -> Result<ConnectBarrier<'_>, (Nqn, usize)> {
        let mut table = self.lock();
        let all = table.associations.values().map(|entry| &entry.association);
        let mut present = all.filter(|association| association.subsystem == *nqn);
        if let (false, Some(one)) = (with_hosts, present.next()) {
            return Err((one.host, 1 + present.count()));
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
