//! What the administrator changes in the world, and who is to be told of it.

use nvme::log::AnaState;

use super::World;
use super::model::Moment;
use super::news::Change;

impl World {
    /// A namespace gets so many blocks, or as many as it has at most.
    pub(super) fn resize(&mut self, space: usize, blocks: u32) {
        let blocks = blocks.min(self.profile.shapes[space].0);
        self.target.resize(&self.profile, space, blocks, &mut self.disk);
        let since = self.judge.model.begin();
        if self.judge.scope.set_size(space, blocks, since) {
            for host in 0..self.hosts.len() {
                self.owe_news(host, space, since);
            }
        }
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }

    /// A host sees a namespace from now on, or does not.
    pub(super) fn show(&mut self, space: usize, host: usize, shown: bool) {
        self.target.show(&self.profile, space, self.profile.machine(host), shown);
        self.look_at_scope();
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }

    /// Which namespaces there are now, and for whom.
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

    /// A host that is connected shall hear that a namespace it sees, or saw, has changed.
    fn owe_news(&mut self, host: usize, space: usize, since: Moment) {
        let shown = self.target.is_shown(space, self.profile.machine(host));
        let connected = self.hosts[host].is_ready() && self.target.is_published();
        if connected && (shown || !self.judge.scope.is_there(host, space)) {
            self.judge.news.owe(host, Change::Namespace(space as u32 + 1), since, self.now);
        }
    }

    /// A path to a namespace gets a state, and who is connected there is to be told.
    pub(super) fn reach(&mut self, path: usize, space: usize, state: AnaState) {
        self.target.set_reach(&self.profile, path, space, state);
        let since = self.judge.model.begin();
        if !self.judge.paths.set(path, space, state, since) {
            return;
        }
        for host in 0..self.hosts.len() {
            // Of groups without namespaces nobody is told.
            let sees = self.judge.scope.is_there(host, space);
            if sees && self.profile.path(host) == path && self.hosts[host].is_ready() {
                self.judge.news.owe(host, Change::Path, since, self.now);
            }
        }
        (0..self.profile.reactors).for_each(|reactor| self.rouse(reactor));
    }
}
