//! Two daemons as gateways of a group: one serves at a time. Before another one does, it excludes the
//! clients of all others from the cluster, which may otherwise carry out their commands at any later time.

use super::*;

/// Longest time for which the cluster has a command of a process that was killed.
const LONGEST_IN_CLUSTER_MS: u64 = 10_000;
/// Of a command that was answered.
const NO_CONTROLLER: u16 = 0;

impl Daemon {
    fn can_serve(&self) -> bool {
        self.is_alive && !self.is_cut_off
    }
}

impl Target {
    /// Whether a command waits until its daemon reaches the cluster again.
    pub(super) fn is_held(&self, pending: &Pending) -> bool {
        self.daemons.iter().any(|daemon| daemon.is_cut_off && daemon.client == pending.client)
    }

    /// Whether a command outlives its association.
    pub(super) fn is_late(&self, pending: &Pending) -> bool {
        let daemon = self.daemon_of(pending.port);
        self.group.is_some() && (!daemon.is_alive || self.is_held(pending))
    }

    /// The process was killed: the cluster has received some of its commands.
    pub(super) fn delay_orphans(&mut self, daemon: usize) {
        let Daemon { client, is_excluded, .. } = self.daemons[daemon];
        (self.daemons[daemon].is_cut_off, self.daemons[daemon].is_excluded) = (false, false);
        let (now, random) = (self.now, &mut self.random);
        self.pending.retain_mut(|pending| {
            if pending.client != client {
                return true;
            }
            pending.at = now + Duration::from_millis(random.below(LONGEST_IN_CLUSTER_MS));
            let is_change = pending.sqe.io_opcode() != IoOpcode::READ;
            is_change && !is_excluded && random.percent(50)
        });
    }

    fn set_ana(&mut self, daemon: usize, state: AnaState) {
        if self.ports[daemon].ana != state {
            self.ports[daemon].ana = state;
            self.notify(Some(daemon), AsyncEvent::ANA_CHANGE);
        }
    }

    fn new_client(&mut self, daemon: usize) {
        self.daemons[daemon].client = self.next_client;
        self.next_client += 1;
    }

    /// The daemon that serves now.
    pub(crate) fn owner(&self) -> Option<usize> {
        self.group.flatten().filter(|daemon| self.daemons[*daemon].can_serve())
    }

    /// A daemon that was killed is there again. It serves nothing yet.
    pub(crate) fn restart(&mut self, daemon: usize) {
        self.new_client(daemon);
        self.daemons[daemon].is_alive = true;
        if self.group.is_some() {
            self.set_ana(daemon, AnaState::INACCESSIBLE);
        }
    }

    /// A daemon that reaches the cluster no more stops to serve, as long as it may be the owner.
    pub(crate) fn suspend(&mut self, daemon: usize) {
        if self.daemons[daemon].is_cut_off {
            self.set_ana(daemon, AnaState::INACCESSIBLE);
        }
    }

    /// As [`Self::suspend`], but what the cluster has not answered fails, although it may be carried out.
    pub(crate) fn suspend_and_fail_commands(&mut self, daemon: usize) {
        let Daemon { client, is_cut_off, .. } = self.daemons[daemon];
        self.suspend(daemon);
        let failed = self.fail_over(|pending| is_cut_off && pending.client == client);
        for pending in failed {
            let after = Duration::from_millis(self.random.below(LONGEST_IN_CLUSTER_MS));
            let at = self.now + after;
            self.pending.push(Pending { at, cntlid: NO_CONTROLLER, ..pending });
        }
    }

    /// A daemon reaches the cluster again, and learns who serves. Commands of associations that have
    /// ended are carried out before others.
    pub(crate) fn reconnect(&mut self, daemon: usize) {
        if !std::mem::take(&mut self.daemons[daemon].is_cut_off) {
            return;
        }
        let client = self.daemons[daemon].client;
        if std::mem::take(&mut self.daemons[daemon].is_excluded) {
            self.fail_over(|pending| pending.client == client);
            self.new_client(daemon);
        }
        let has_ended = |target: &Target, pending: &Pending| {
            let is_over = !target.controllers.contains_key(&pending.cntlid);
            is_over && pending.cntlid != NO_CONTROLLER && pending.client == client
        };
        while let Some(n) = self.pending.iter().position(|pending| has_ended(self, pending)) {
            let Pending { sqe, data, .. } = self.pending.remove(n);
            self.perform(&sqe, &data);
        }
        let is_owner = self.group == Some(Some(daemon));
        self.set_ana(daemon, if is_owner { AnaState::OPTIMIZED } else { AnaState::INACCESSIBLE });
    }

    /// The owner ends what it has begun, and gives the group away.
    pub(crate) fn give(&mut self, owner: usize) {
        let client = self.daemons[owner].client;
        let all = std::mem::take(&mut self.pending).into_iter();
        let (own, rest): (Vec<_>, _) = all.partition(|pending| pending.client == client);
        self.pending = rest;
        own.into_iter().for_each(|pending| self.execute(pending));
        self.set_ana(owner, AnaState::INACCESSIBLE);
        self.group = Some(None);
    }

    /// A daemon becomes the owner if it can be and there is none. Returns whether it has.
    pub(crate) fn take(&mut self, daemon: usize) -> bool {
        let is_free = self.owner().is_none_or(|owner| owner == daemon);
        if !is_free || !self.daemons[daemon].can_serve() {
            return false;
        }
        self.group = Some(Some(daemon));
        self.set_ana(daemon, AnaState::OPTIMIZED);
        if self.daemons[1 - daemon].can_serve() {
            self.set_ana(1 - daemon, AnaState::INACCESSIBLE);
        }
        true
    }

    /// The clients of all but a daemon are excluded: their commands are never carried out. A daemon that
    /// does not reach the cluster learns that later.
    pub(crate) fn exclude_others(&mut self, daemon: usize) {
        let client = self.daemons[daemon].client;
        let other = &mut self.daemons[1 - daemon];
        other.is_excluded = other.is_cut_off;
        let unaware = other.is_cut_off.then_some(other.client);
        self.fail_over(|pending| pending.client != client && Some(pending.client) != unaware);
        if unaware.is_none() {
            self.new_client(1 - daemon);
        }
    }

    /// Commands fail that are carried out no more. Returns them.
    fn fail_over(&mut self, fails: impl Fn(&Pending) -> bool) -> Vec<Pending> {
        let all = std::mem::take(&mut self.pending).into_iter();
        let (failed, rest): (Vec<_>, _) = all.partition(fails);
        self.pending = rest;
        for Pending { qp, cntlid, sqe, .. } in &failed {
            if self.controllers.contains_key(cntlid) {
                self.answer(*qp, sqe.cid, Status::ANA_INACCESSIBLE, 0);
            }
        }
        failed
    }
}
