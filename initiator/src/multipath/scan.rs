//! What a path asks of its controller before it is used, and again after events: the namespace, its
//! limits, its ANA state. One command at a time.

use std::time::{Duration, Instant};

use nvme::feature::{AsyncEvent, FeatureId, GetFeatures, HostBehavior, Select, SetFeatures};
use nvme::identify::{Cns, Identify, IdentifyControllerNvm, IdentifyNamespace, NamespaceIds};
use nvme::ids::LogId;
use nvme::log::{AnaGroup, AnaHeader, AnaState, GetLogPage};
use nvme::{NSID_ALL, Sgl, Sqe, Status};
use rdma::Buf;

use super::namespace::{IDENTIFY_BYTES, Namespace};
use super::path::{Path, PathLoss, PathState, SCAN_TAG, Shared, buf_of};
use super::{Notice, Resources};
use crate::session::{Data, EndReason, Io, Lost, Request, Response};

/// Time until a command that failed on a live path is sent again.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Time until a command is sent for which there was no room.
const ROOM_AFTER: Duration = Duration::from_millis(10);

/// Longest ANA log that is read, in bytes: 2,047 groups.
const MOST_ANA_BYTES: u32 = 1 << 16;

rdma::named_enum! {
    /// A command of the scan, in the order in which they are sent.
    #[derive(Clone, Copy, PartialEq, Eq, Debug)]
    enum Step {
        /// This host observes Command Retry Delay.
        Behavior = "Set Features (Host Behavior Support)",
        /// It may be longer than what was asked for.
        KeepAlive = "Get Features (Keep Alive Timer)",
        /// It acknowledges its event.
        ChangedList = "Get Log Page (Changed Namespace List)",
        Identify = "Identify (Namespace)",
        Identifiers = "Identify (Namespace Identification Descriptors)",
        Limits = "Identify (Controller, NVM Command Set)",
        Ana = "Get Log Page (Asymmetric Namespace Access)",
    }
}

/// The commands to send. At first, all but the list.
#[derive(Debug)]
pub(super) struct Scan {
    wanted: u8,
    running: Option<Step>,
    retry_at: Option<Instant>,
    /// The namespace as far as it is identified.
    found: Option<Namespace>,
    /// There is something to evaluate when no command is wanted any more.
    is_open: bool,
}

impl Default for Scan {
    fn default() -> Scan {
        let mut scan =
            Scan { wanted: 0, running: None, retry_at: None, found: None, is_open: true };
        Step::ALL.into_iter().filter(|step| *step != Step::ChangedList).for_each(|s| scan.want(s));
        scan
    }
}

impl Scan {
    fn want(&mut self, step: Step) {
        self.wanted |= 1 << step as u8;
    }

    /// The ANA log has to be read.
    pub(super) fn read_ana(&mut self) {
        self.want(Step::Ana);
    }

    /// Whether the namespace may be another one than before.
    pub(super) fn is_open(&self) -> bool {
        self.is_open
    }

    fn next(&self) -> Option<Step> {
        Step::ALL.into_iter().find(|step| self.wanted & 1 << *step as u8 != 0)
    }

    /// When a command is sent again.
    pub(super) fn retry_at(&self) -> Option<Instant> {
        self.retry_at.filter(|_| self.running.is_none())
    }
}

impl Path {
    /// An event of the controller.
    pub(super) fn on_async_event(&mut self, event: AsyncEvent, r: &mut Resources<'_>) {
        match event {
            AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED => {
                for step in
                    [Step::ChangedList, Step::Identify, Step::Identifiers, Step::Limits, Step::Ana]
                {
                    self.scan.want(step);
                }
                self.scan.is_open = true;
            }
            AsyncEvent::ANA_CHANGE => self.scan.read_ana(),
            AsyncEvent::PERSISTENT_INTERNAL_ERROR => {
                self.reset(PathLoss::Ended(EndReason::Fatal), r);
            }
            _ => {}
        }
    }

    /// Sends the next command of the scan, or evaluates it.
    pub(super) fn continue_scan(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) {
        let ended = self.session.as_ref().is_none_or(|session| session.ended().is_some());
        if ended || self.scan.running.is_some() || self.scan.retry_at.is_some_and(|at| at > r.now) {
            return;
        }
        self.scan.retry_at = None;
        while let Some(step) = self.scan.next() {
            self.scan.wanted &= !(1 << step as u8);
            let Some((len, sqe)) = self.scan_command(step, r.pool.plan().largest_bytes) else {
                continue;
            };
            match self.send_scan(len, sqe, step, r) {
                true => self.scan.running = Some(step),
                false => {
                    self.scan.want(step);
                    self.scan.retry_at = r.now.checked_add(ROOM_AFTER);
                }
            }
            return;
        }
        if self.scan.is_open {
            self.scan.is_open = false;
            self.evaluate(s, r);
        }
    }

    /// Returns the command of a step and the length of its data, unless the controller needs none.
    fn scan_command(&self, step: Step, most_bytes: u32) -> Option<(u32, Sqe)> {
        let page = self.session.as_ref()?.controller();
        let nsid = self.common.nsid;
        let identify = |cns, nsid| Some((IDENTIFY_BYTES, Identify::new(cns, nsid).emit(Sgl::NONE)));
        let log = |lid, len: u32, lsp| {
            let read = GetLogPage::new(lid, 0, len / 4);
            Some((len, GetLogPage { nsid: NSID_ALL, lsp, rae: false, ..read }.emit(Sgl::NONE)))
        };
        match step {
            Step::Behavior if page.crdt1_100ms == 0 => None,
            Step::Behavior => {
                let set = SetFeatures::new(FeatureId::HOST_BEHAVIOR, 0);
                Some((HostBehavior::BYTES as u32, set.emit(Sgl::NONE)))
            }
            Step::KeepAlive => {
                let fid = FeatureId::KEEP_ALIVE_TIMER;
                let get = GetFeatures { fid, sel: Select::CURRENT, nsid: 0, cdw11: 0 };
                Some((0, get.emit(Sgl::NONE)))
            }
            Step::ChangedList => log(LogId::CHANGED_NAMESPACES, IDENTIFY_BYTES, 0),
            Step::Identify => identify(Cns::NAMESPACE, nsid),
            _ if step != Step::Ana && self.scan.found.is_none() => None,
            Step::Identifiers => identify(Cns::NAMESPACE_DESCRIPTORS, nsid),
            Step::Limits => identify(Cns::CSI_CONTROLLER, 0),
            Step::Ana => {
                let len = page.nanagrpid.checked_mul(AnaGroup::BYTES as u32)?.checked_add(16)?;
                if !page.cmic.ana() || page.nanagrpid == 0 || len > MOST_ANA_BYTES {
                    return None;
                }
                // With the namespaces of each group, because one may move to another group, which
                // only this log reports. A log that is too long: groups only (RGO), and the group
                // that Identify has reported.
                let namespaces = if page.mnan == 0 { page.nn } else { page.mnan };
                let whole = namespaces.checked_mul(4).and_then(|ids| len.checked_add(ids));
                let most_bytes = most_bytes.min(self.session.as_ref()?.max_transfer_bytes());
                match whole.filter(|whole| *whole <= MOST_ANA_BYTES.min(most_bytes)) {
                    Some(whole) => log(LogId::ANA, whole, 0),
                    None => log(LogId::ANA, len, 1),
                }
            }
        }
    }

    fn send_scan(&mut self, len: u32, sqe: Sqe, step: Step, r: &mut Resources<'_>) -> bool {
        let mut data = match len {
            0 => Data::None,
            len => match r.pool.take_any(len) {
                Some(buf) => Data::Buf(buf),
                None => return false,
            },
        };
        if let (Step::Behavior, Data::Buf(buf)) = (step, &mut data) {
            let behavior = HostBehavior { acre: 1, ..HostBehavior::default() };
            r.pool.bytes_mut(buf).copy_from_slice(&behavior.emit());
        }
        let fabric = r.fabrics.fabric(self.fabric());
        let request = Request { sqe, data, tag: SCAN_TAG };
        let mut io = Io { pool: r.pool, fabric, now: r.now };
        let refused = match self.session.as_mut() {
            Some(session) => session.submit(0, request, &mut io).err().map(|(request, _)| request),
            None => Some(request),
        };
        let is_sent = refused.is_none();
        let data = refused.and_then(|request| buf_of(request.data));
        data.into_iter().for_each(|buf| r.pool.give(buf));
        is_sent
    }

    /// A command of the scan is done.
    pub(super) fn on_scan_done(
        &mut self,
        outcome: Result<Response, Lost>,
        data: Option<Buf>,
        s: &mut Shared<'_>,
        r: &mut Resources<'_>,
    ) {
        let step = self.scan.running.take();
        if let (Ok(Response { status, result }), Some(step)) = (outcome, step) {
            let bytes = data.as_ref().map_or(&[][..], |buf| r.pool.bytes(buf));
            match status.ok() {
                Ok(()) if step == Step::KeepAlive => self.on_keep_alive_timer(result as u32),
                Ok(()) => self.on_scanned(step, bytes, s, r.now),
                Err(status) => self.on_scan_error(step, status, r),
            }
        }
        data.into_iter().for_each(|buf| r.pool.give(buf));
    }

    fn on_scanned(&mut self, step: Step, bytes: &[u8], s: &mut Shared<'_>, now: Instant) {
        let page = bytes.first_chunk();
        match (step, page, self.session.as_ref()) {
            (Step::Identify, Some(page), Some(session)) => {
                let page = IdentifyNamespace::parse(page);
                let most_bytes = session.max_transfer_bytes();
                self.scan.found = Namespace::new(session.controller(), most_bytes, &page);
            }
            (Step::Identifiers, Some(page), _) => {
                let ids = NamespaceIds::parse(page);
                self.scan.found.iter_mut().for_each(|found| found.identify(ids));
            }
            (Step::Limits, Some(page), Some(session)) => {
                let page = IdentifyControllerNvm::parse(page);
                let shift = 12 + u32::from(session.cap().mpsmin());
                self.scan.found.iter_mut().for_each(|found| found.limit(&page, shift));
            }
            (Step::Ana, ..) => self.on_ana_log(bytes, s, now),
            _ => {}
        }
    }

    fn on_scan_error(&mut self, step: Step, status: Status, r: &mut Resources<'_>) {
        match step {
            // Optional: without them, what Identify Namespace says holds, and the usual limits.
            Step::Behavior | Step::KeepAlive | Step::ChangedList | Step::Limits => {}
            // A controller before NVMe 1.3. After any other failure the namespace would seem to be
            // another one than with its UUID.
            Step::Identifiers if status.is(Status::INVALID_FIELD) => {}
            Step::Identify | Step::Identifiers if status.is(Status::INVALID_NAMESPACE) => {
                self.scan.found = None;
            }
            Step::Identify | Step::Identifiers | Step::Ana if self.state() == PathState::Live => {
                self.scan.want(step);
                self.scan.retry_at = r.now.checked_add(RETRY_AFTER);
            }
            Step::Identify | Step::Identifiers | Step::Ana => {
                self.reset(PathLoss::Scan { what: step.name(), status }, r);
            }
        }
    }

    fn on_ana_log(&mut self, bytes: &[u8], s: &mut Shared<'_>, now: Instant) {
        let group = self.scan.found.as_ref().map_or(0, |found| found.anagrpid);
        if group == 0 {
            return;
        }
        // As in Linux, a path whose log lacks the group is not used until an event announces another.
        let nsid = self.common.nsid;
        let state = state_of(nsid, group, bytes).unwrap_or(AnaState::INACCESSIBLE);
        self.is_ana_pending = false;
        let before = self.ana.replace(state);
        match state {
            AnaState::CHANGE => {
                self.change_since.get_or_insert(now);
            }
            _ => self.change_since = None,
        }
        if self.state() == PathState::Live && before != Some(state) {
            s.notices.push_back(Notice::Ana { path: s.number, state });
        }
    }

    /// All is known: compares the namespace with that of the other paths.
    fn evaluate(&mut self, s: &mut Shared<'_>, r: &mut Resources<'_>) {
        let path = s.number;
        let had = self.view.is_some() || self.state() != PathState::Live;
        let is_back = !had && self.scan.found.is_some();
        match (self.scan.found, s.namespace.as_mut()) {
            (None, _) => {
                self.view = None;
                if had {
                    s.notices.push_back(Notice::Removed { path });
                }
            }
            (Some(found), Some(known)) => {
                if let Some(why) = known.difference(&found) {
                    return self.reset(PathLoss::Namespace(why), r);
                }
                if known.blocks != found.blocks {
                    s.notices.push_back(Notice::Resized { blocks: found.blocks });
                }
                let is_on = found.is_write_protected;
                if known.is_write_protected != is_on {
                    s.notices.push_back(Notice::WriteProtection { is_on });
                }
                known.adopt(&found);
                self.view = Some(found);
            }
            (Some(found), None) => {
                *s.namespace = Some(found);
                self.view = Some(found);
            }
        }
        if is_back {
            s.notices.push_back(Notice::Live { path, ana: self.ana });
        }
        self.become_live(s);
    }
}

/// Returns the state of a namespace in an ANA log: that of the group that lists it, or of its `group`
/// where that is without a list; `None` if it is not there.
fn state_of(nsid: u32, group: u32, log: &[u8]) -> Option<AnaState> {
    let header = AnaHeader::parse(log.first_chunk()?);
    let mut rest = log.get(AnaHeader::BYTES..)?;
    let mut unlisted = None;
    for _ in 0..header.ngrps {
        let descriptor = AnaGroup::parse(rest.first_chunk()?);
        let state = AnaState(descriptor.state.0 & 0xF);
        let len = usize::try_from(descriptor.nnsids).ok()?.checked_mul(4)?;
        let (ids, behind) = rest.get(AnaGroup::BYTES..)?.split_at_checked(len)?;
        if ids.chunks_exact(4).any(|id| id == nsid.to_le_bytes()) {
            return Some(state);
        }
        if ids.is_empty() && descriptor.grpid == group {
            unlisted = Some(state);
        }
        rest = behind;
    }
    unlisted
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ana_state_is_found_behind_other_groups() {
        let group = |grpid, nnsids, state| AnaGroup { grpid, nnsids, state, ..AnaGroup::default() };
        // The group that the namespace has left is empty now.
        let mut log = AnaHeader { chgcnt: 1, ngrps: 2 }.emit().to_vec();
        log.extend(group(7, 0, AnaState::OPTIMIZED).emit());
        log.extend(group(1, 1, AnaState::INACCESSIBLE).emit());
        log.extend([2, 0, 0, 0]);
        assert_eq!(state_of(2, 7, &log), Some(AnaState::INACCESSIBLE));
        let mut log = AnaHeader { chgcnt: 1, ngrps: 2 }.emit().to_vec();
        log.extend(group(1, 2, AnaState::INACCESSIBLE).emit());
        log.extend([1, 0, 0, 0, 2, 0, 0, 0]);
        log.extend(group(7, 0, AnaState::NON_OPTIMIZED).emit());
        assert_eq!(state_of(2, 1, &log), Some(AnaState::INACCESSIBLE));
        assert_eq!(state_of(3, 1, &log), None, "it has left");
        assert_eq!(state_of(3, 7, &log), Some(AnaState::NON_OPTIMIZED), "groups only");
        assert_eq!(state_of(3, 2, &log), None);
        // A log that is shorter than it says, or says that a group is endless.
        assert_eq!(state_of(3, 7, &log[..log.len() - 1]), None);
        log[16 + 4..16 + 8].fill(0xFF);
        assert_eq!(state_of(3, 7, &log), None);
    }
}
