//! Changes by the simulated administrator, and the hosts that must be notified.

use std::time::Duration;

use nvme::Nqn;
use nvme::log::AnaState;

use super::administrator::PersistOutcome;
use super::host::hostnqn;
use super::oracle::async_events::Change;
use super::oracle::blocks::Moment;
use super::target::format_driver::FormatProgress;
use super::{Simulation, Timer};

/// Delay until a killed process is started again, or a failed attempt is repeated.
const SOON: Duration = Duration::from_millis(50);

impl Simulation {
    /// Resizes a namespace to this number of sectors, at most its maximum.
    pub(super) fn resize(&mut self, space: usize, sectors: u32) {
        if self.target.is_dead() {
            // The operation on files that hangs has the lock of the provisioner.
            return self.after(SOON, Timer::Resize(space));
        }
        let blocks = sectors.min(self.profile.sectors(space));
        self.target.resize(&self.profile, space, blocks, &mut self.disk);
        let since = self.judge.model.begin();
        if self.judge.scope.set_size(space, blocks, since) {
            for host in 0..self.hosts.len() {
                self.owe_news(host, space, since);
            }
        }
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }

    /// Marks that a removed namespace will return with another backing store, as another namespace.
    pub(super) fn exchange(&mut self, space: usize) -> Result<(), String> {
        self.target.exchange(&self.profile, space, &mut self.disk)?;
        self.target.publish_again(&self.profile);
        self.look_at_scope();
        self.judge.model.exchange(space);
        let since = self.judge.model.begin();
        self.judge.scope.set_name(space, self.target.name(space), since);
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
        Ok(())
    }

    /// Shows a namespace to a host, or hides it, once that is persisted. An administrator without
    /// effect while the target is down tries again.
    pub(super) fn show(&mut self, space: usize, host: usize, shown: bool) -> Result<(), String> {
        if !self.target.is_up() {
            if shown {
                self.after(SOON, Timer::Show(space, host));
            }
            return Ok(());
        }
        let machine = self.profile.machine(host);
        let early = self.administrator.commits_early();
        let kept = self.administrator.keep(space, machine, shown)?;
        if early || kept == Some(PersistOutcome::Yes) {
            self.target.show(&self.profile, space, machine, shown);
            self.look_at_scope();
            (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
            self.administrator.committed();
        }
        let killed = match kept {
            Some(PersistOutcome::Yes) => self.administrator.acknowledge(),
            other => other,
        };
        if let Some(PersistOutcome::Killed { power }) = killed {
            self.say(|| "in the middle of a change".to_owned());
            self.crash_target(power, SOON);
            if shown {
                self.after(2 * SOON, Timer::Show(space, host));
            }
        }
        Ok(())
    }

    /// Updates the oracle with the present namespaces and their visibility.
    pub(super) fn look_at_scope(&mut self) {
        for (host, space) in (0..self.hosts.len()).flat_map(|host| [(host, 0), (host, 1)]) {
            let machine = self.profile.machine(host);
            let there = self.target.is_served(space) && self.target.is_shown(space, machine);
            let since = self.judge.model.begin();
            if self.judge.scope.set_there(host, space, there, since) {
                self.judge.news.forget_path(host);
                self.owe_news(host, space, since);
            }
        }
    }

    /// Continues format requests of hosts, between iterations.
    pub(super) fn go_on_formatting(&mut self) -> Result<(), String> {
        let news = self.target.go_on(&self.profile, &mut self.disk)?;
        self.look_at_formats(news);
        self.disk.fault.take().map_or(Ok(()), Err)
    }

    /// The next step of a format that erases.
    pub(super) fn erase(&mut self, number: u64) {
        let news = self.target.erase(number, &self.profile, &mut self.disk);
        self.look_at_formats(news);
    }

    fn look_at_formats(&mut self, news: FormatProgress) {
        for number in news.erasing {
            let time = self.profile.disk.latency + self.dice.part(self.profile.disk.stall);
            self.after(time, Timer::Erase(number));
        }
        for space in news.reshaped {
            let since = self.judge.model.begin();
            (0..self.hosts.len()).for_each(|host| self.owe_news(host, space, since));
        }
        if news.told {
            (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
        }
        if news.killed {
            self.say(|| "the target hangs in an operation on files".to_owned());
            let time = self.dice.part(SOON);
            self.after(time, Timer::Kill);
        }
    }

    /// Kills the target in an operation on files, or fails its power.
    pub(super) fn kill_target(&mut self) {
        self.say(|| "the target is killed in an operation on files".to_owned());
        let power = self.dice.per_mille(500);
        self.crash_target(power, SOON);
    }

    /// Records that a connected host must be notified of a change of a namespace that it sees, or
    /// saw.
    fn owe_news(&mut self, host: usize, space: usize, since: Moment) {
        let shown = self.target.is_shown(space, self.profile.machine(host));
        let connected = self.hosts[host].is_ready() && self.target.is_published();
        if connected && (shown || !self.judge.scope.is_there(host, space)) {
            self.judge.news.owe(host, Change::Namespace(space as u32 + 1), since, self.now);
        }
    }

    /// Continues namespace requests of hosts.
    pub(super) fn manage(&mut self) {
        let news = self.target.manage(&self.profile, &mut self.disk, self.now);
        let Some(news) = news else { return };
        self.say(|| format!("the ns_admin goes on, {news:?}"));
        let since = self.judge.model.begin();
        for (nsid, machines) in news {
            for host in 0..self.hosts.len() {
                let told = machines.contains(&hostnqn(self.profile.machine(host)));
                let connected = self.hosts[host].is_ready() && self.target.is_published();
                if told && connected {
                    self.judge.news.owe(host, Change::Namespace(nsid), since, self.now);
                }
            }
        }
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }

    /// Checks that the host-created namespaces in the end are those known to hosts.
    pub(super) fn check_made(&self) -> Result<(), String> {
        self.target.ns_admin.leftovers()?;
        let machine = |nqn: &Nqn| (0..self.hosts.len()).find(|host| hostnqn(*host) == *nqn);
        let entries = self.target.ns_admin.entries().iter();
        let found = entries.map(|(nsid, entry)| {
            let shift = entry.block_size_bytes.trailing_zeros();
            let machines = entry.hosts.iter().filter_map(machine).collect();
            (*nsid, ((entry.bytes >> shift) as u32, shift as u8, machines))
        });
        self.judge.made.check_record(&found.collect())
    }

    /// Sets the ANA state of a namespace on a path; hosts connected there must be notified.
    pub(super) fn reach(&mut self, path: usize, space: usize, state: AnaState) {
        self.target.set_reach(&self.profile, path, space, state);
        let since = self.judge.model.begin();
        if !self.judge.paths.set(path, space, state, since) {
            return;
        }
        for host in 0..self.hosts.len() {
            // Groups without namespaces cause no notification.
            let sees = self.judge.scope.is_there(host, space);
            if sees && self.profile.path(host) == path && self.hosts[host].is_ready() {
                self.judge.news.owe(host, Change::Path, since, self.now);
            }
        }
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }
}
