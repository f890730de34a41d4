//! One NVMe queue on one queue pair: its requests, and its connection.
//!
//! ```text
//!         capsule          buffers there        data there            done
//! Free ──────────► Waiting ───────────► Pulling ───────────► AtDevice ─────► Replying ──► Free
//!          └── each step that a command does not need is skipped ──┘              sent
//! ```
//!
//! * *Waiting* has a reason (`WaitReason` in `request.rs`); a command skips it if it needs nothing that one
//!   waits for.
//! * A command that a device cannot execute alone is *Offloaded* instead of, before or after *AtDevice*.
//! * In-capsule data skip *Pulling*: the receive buffer itself is passed to the device.
//! * The receive buffer is posted again before the response is sent, so a host that keeps to its
//!   queue size always finds one.
//!
//! Five files act on a queue pair: a capsule arrives and its plan is decided (`capsule.rs`, by the rules of
//! `command/`), waits for limits and buffers (`admit.rs`), is executed (`execute.rs`) and completed
//! (`complete.rs`); this file opens and closes connections. The state of each feature is a type of its own in
//! a file of its own, which borrows the resources that it needs for a step.

mod abort;
mod admit;
mod auth;
mod bad_blocks;
mod buffers;
mod capsule;
mod complete;
mod connect;
mod connection;
mod event_log;
mod execute;
mod features;
mod fused;
mod in_flight;
mod io;
mod lba_status;
mod log_page;
mod offload;
mod range_lock;
mod rate_limits;
mod request;
mod requests;
mod role;
mod sgl_transfer;
mod stats;
mod unflushed;

use std::collections::VecDeque;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use nvme::Status;
use nvme::cm;
use nvme::fabrics::{Connect, ConnectData, ConnectResult};
use rdma::{Buf, Completion, Fault, Incoming, Qp, QpLimits, Reason, Work};
use tracing::{debug, info};

use crate::auth::DhResult;
use crate::command::{Plan, fabrics};
use crate::controller::association::Association;
use crate::controller::{ControllerKind, Limits};
use crate::diag::cause::{Cause, DisconnectRecord};
use crate::registry::OpenQueue;
use crate::sched::Adoption;
use crate::stats::Stage;
use crate::subsystem::Subsystem;
use auth::Authentication;
use buffers::BufferShare;
pub use buffers::{DATA_FOR_ADMIN_BYTES, free_for_io, room};
pub use connect::RECEIVES_FOR_ADMIN;
pub(crate) use connect::receives_of;
use connection::{Connection, Link};
use fused::FusedState;
pub use in_flight::in_flight;
pub use io::Io;
use range_lock::RangeLockState;
use rate_limits::RateLimits;
pub use request::SENDS_PER_RECEIVE;
use request::{Head, State};
use requests::Requests;
use role::QueueRole;
use stats::QueueStats;

/// RDMA Reads to have outstanding on a queue pair, if the host permits.
const READS: u8 = 64;

/// One NVMe queue.
#[derive(Debug)]
pub struct QueuePair {
    conn: Connection,
    requests: Requests,
    head: Head,
    buffers: BufferShare,
    locks: RangeLockState,
    stats: QueueStats,
    fused: FusedState,
    rate_limits: RateLimits,
    auth: Authentication,
    /// The slot of a Disconnect command: no further command is accepted.
    disconnect_slot: Option<u16>,
    /// Receives that are not available to other queues.
    receives: u16,
    /// Free slots when deadlines were checked.
    free_at_tick: usize,
    /// Capsules that wait for a slot, with the time of their arrival; each holds a receive, so
    /// there are at most as many.
    backlog: VecDeque<(Buf, u32, u64)>,
}

impl QueuePair {
    /// Handles a connection request: checks its private data, opens a queue pair, posts all
    /// receives and accepts. `key` identifies this queue in the tags of devices.
    ///
    /// # Errors
    /// The request was not acceptable, and has been rejected for this cause.
    pub fn open(
        key: u32,
        incoming: Incoming,
        limits: Limits,
        io: &mut Io<'_>,
    ) -> Result<QueuePair, Box<DisconnectRecord>> {
        let (local, remote, reads) = (incoming.local, incoming.remote, incoming.reads);
        let checked = connect::check_request(&incoming.private_data, reads, limits, io.pool);
        let (request, depth) = match checked {
            Ok(checked) => checked,
            Err(status) => {
                io.fabric.reject(incoming, &cm::Reject::new(status).emit());
                let why = DisconnectRecord::nameless(Cause::of_request(status), remote, local);
                let detail = status.to_string().into();
                return Err(Box::new(DisconnectRecord { detail, ..why }));
            }
        };
        let qp_limits = QpLimits {
            receives: u32::from(depth),
            sends: u32::from(depth) * SENDS_PER_RECEIVE,
            reads: READS.min(reads),
        };
        let qp = io.fabric.open(incoming, qp_limits).map_err(|error| {
            let why = DisconnectRecord::nameless(Cause::NoQueuePair, remote, local);
            Box::new(DisconnectRecord { detail: error.0.into(), ..why })
        })?;
        let requests = Requests::new(key, depth, io.pool);
        let queue = QueuePair {
            conn: Connection::new(qp, request, limits, (local, remote), io.now),
            free_at_tick: requests.free_count(),
            requests,
            head: Head::default(),
            buffers: BufferShare::default(),
            locks: RangeLockState::default(),
            stats: QueueStats::default(),
            fused: FusedState::None,
            rate_limits: RateLimits::default(),
            auth: Authentication::default(),
            disconnect_slot: None,
            receives: depth,
            backlog: VecDeque::with_capacity(depth.into()),
        };
        for _ in 0..depth {
            if let Some(buf) = io.pool.take_receive() {
                io.fabric.post(qp, 0, Work::Recv(buf));
            }
        }
        io.waiters.open(depth);
        let accept = cm::Accept { recfmt: 0, crqsize: depth };
        io.fabric.accept(qp, &accept.emit());
        debug!(%remote, qid = request.qid, depth, "connection accepted");
        Ok(queue)
    }

    /// Returns the queue pair.
    pub fn qp(&self) -> Qp {
        self.conn.qp
    }

    /// Returns the address of its host.
    pub fn source(&self) -> IpAddr {
        self.conn.remote.ip()
    }

    /// Returns its association; none before its Connect.
    pub fn association(&self) -> Option<&Arc<Association>> {
        self.conn.role.association()
    }

    /// Returns the number of receives that were posted for it.
    pub fn depth(&self) -> u16 {
        self.requests.count() / 2
    }

    /// Returns the number of receives that are not available to other queues: all of them, and
    /// after its queue pair is destroyed, those that a device still has.
    pub fn receives(&self) -> u16 {
        self.receives
    }

    /// Returns the bytes of all buffers that it owns, without those posted to the fabric or
    /// submitted to a device.
    pub fn held_bytes(&self) -> u64 {
        let waiting = self.backlog.iter().map(|(buf, ..)| u64::from(buf.capacity()));
        buffers::held_bytes(&self.requests) + waiting.sum::<u64>()
    }

    /// Returns the resources that the registry counts for a connection that is not admitted.
    pub(crate) fn unadmitted_mut(&mut self) -> &mut Option<OpenQueue> {
        &mut self.conn.unadmitted
    }

    /// Whether its Connect has succeeded.
    pub fn is_connected(&self) -> bool {
        self.conn.is_connected()
    }

    /// Whether it is connected, and its host has authenticated if it must.
    pub fn is_admitted(&self) -> bool {
        self.is_connected() && self.auth.is_done()
    }

    /// Whether its host is not identified: it is not admitted, or it is the admin queue of an
    /// anonymous host that has no I/O queues.
    pub fn is_anonymous(&self) -> bool {
        match &self.conn.role {
            QueueRole::Admin(controller) if self.is_admitted() => {
                let association = &controller.association;
                association.anonymous && association.io_queues() == 0
            }
            _ => !self.is_admitted(),
        }
    }

    /// Whether it is being closed, or its queue pair is destroyed.
    pub fn is_closing(&self) -> bool {
        !self.conn.is_open()
    }

    /// Records that its host has confirmed the connection.
    pub fn confirm(&mut self) {
        self.conn.confirmed = true;
    }

    /// Whether its host has confirmed the connection.
    pub fn is_confirmed(&self) -> bool {
        self.conn.confirmed
    }

    /// Whether its host has neither confirmed the connection nor been admitted on it.
    pub fn is_half_open(&self) -> bool {
        !self.conn.confirmed && !self.is_admitted()
    }

    /// Whether its host has confirmed the connection and was not admitted: if it ends now, it was
    /// never used.
    pub fn is_in_vain(&self) -> bool {
        self.conn.confirmed && !self.is_admitted()
    }

    /// Returns the time at which it was opened.
    pub fn opened(&self) -> Instant {
        self.conn.opened
    }

    /// Whether the queue pair is destroyed and all device operations have completed.
    pub fn is_finished(&self) -> bool {
        self.conn.link == Link::Gone && self.requests.outstanding == 0
    }

    /// Handles the completion of a work request.
    pub fn on_completion(&mut self, done: Completion, io: &mut Io<'_>) {
        self.on_next_completion(done, io);
        self.raise_events(io);
    }

    /// The same of one of several, after which [`QueuePair::raise_events`] is called.
    #[inline(always)]
    pub(crate) fn on_next_completion(&mut self, done: Completion, io: &mut Io<'_>) {
        let (slot, outcome) = (done.tag as u16, done.outcome);
        let has_ended = match done.work {
            Work::Recv(buf) => match outcome {
                Ok(len) if self.conn.is_open() => {
                    return self.on_capsule(buf, len, io.now_ns, io);
                }
                outcome => {
                    io.pool.give(buf);
                    return self.on_fault(outcome.err(), io);
                }
            },
            Work::Read { into, .. } => return self.on_host_data(slot, into, outcome.err(), io),
            Work::Send { from, .. } => {
                let entry = &mut self.requests[slot];
                entry.cell = Some(from);
                entry.end_post()
            }
            Work::Write { from, .. } => {
                let entry = &mut self.requests[slot];
                if entry.is_in_pieces() {
                    return self.on_piece_pushed(slot, from, outcome.err(), io);
                }
                entry.clock.enter(Stage::Reply, io.sent_ns);
                let has_ended = entry.end_post();
                io.pool.give(from);
                has_ended
            }
            // Never posted here.
            work @ (Work::SendImmediate { .. } | Work::WriteImmediate { .. }) => {
                return self.on_other_work(work, outcome.err(), io);
            }
        };
        self.on_posted(slot, has_ended, outcome.err(), io);
    }

    #[cold]
    fn on_other_work(&mut self, work: Work, fault: Option<Fault>, io: &mut Io<'_>) {
        io.pool.give(work.into_buf());
        self.on_fault(fault, io);
    }

    /// Handles the data of a command that has read them from its host, or has failed to.
    #[inline(never)]
    fn on_host_data(&mut self, slot: u16, into: Buf, fault: Option<Fault>, io: &mut Io<'_>) {
        let entry = &mut self.requests[slot];
        entry.posted -= 1;
        if fault.is_some() || !self.conn.is_open() {
            entry.data = Some(into);
            self.release(slot, io);
            return self.on_fault(fault, io);
        }
        if let Plan::Store { backing, at, fua, .. } = entry.plan
            && !entry.has_ext()
        {
            let len = into.len();
            let begins = self.conn.role.may_store(entry.sqe.nsid, backing, (at, len))
                && range_lock::begin_unlocked(entry, backing, (at, len.into()), io);
            return self.store(slot, (backing, at, fua), into, begins, io);
        }
        entry.data = Some(into);
        if self.on_piece_pulled(slot, io) {
            self.on_pulled(slot, io);
        }
    }

    /// Locks the blocks of all changes in progress that began without a lock: fused commands wait
    /// for them.
    pub fn claim_begun(&mut self, io: &Io<'_>) {
        range_lock::claim_begun(&mut self.requests, io);
    }

    /// Checks deadlines and the state that is shared with other reactors.
    pub fn tick(&mut self, io: &mut Io<'_>) {
        self.stats.note_busy(&self.conn.role, &self.requests, io.now);
        self.submit_granted(io);
        self.look_for_fatal_error(io);
        self.note_acknowledgement();
        // An end that is only a consequence of another has no cause.
        let end = self.look_for_end(io.now);
        let late = || self.auth.is_overdue(io.now).then_some(Some(Cause::LateAuthentication));
        // Reservations of other hosts may have raised events.
        let Some(cause) = end.or_else(late) else { return self.raise_events(io) };
        if self.conn.is_open() {
            match cause {
                Some(cause) => self.conn.record_end(cause, "", io),
                None => {
                    debug!(remote = %self.conn.remote, qid = self.conn.qid, "its controller went")
                }
            }
            self.close(io);
        }
    }

    /// Ends its association if its keep alive timeout has expired, where the last command was
    /// received at this time.
    pub(crate) fn end_expired(&mut self, received: Instant, io: &mut Io<'_>) {
        let Some(association) = self.association().filter(|_| self.is_admitted()) else { return };
        if !self.conn.role.is_io() {
            association.restart_keep_alive(received);
        }
        if association.is_keep_alive_expired(received, io.now) {
            association.end(Cause::KeepAlive);
        }
    }

    /// Returns whether it has to end now, and for which cause.
    fn look_for_end(&mut self, now: Instant) -> Option<Option<Cause>> {
        let admitted = self.is_admitted();
        match &mut self.conn.role {
            QueueRole::Nothing { deadline } => (now >= *deadline).then_some(Some(Cause::NoConnect)),
            QueueRole::Admin(controller) => {
                if controller.association.is_closed() {
                    Some(controller.association.ended_for())
                } else if admitted && controller.expired(now) {
                    // A host that is authenticating sends no Keep Alive; that has a time limit of
                    // its own.
                    Some(Some(Cause::KeepAlive))
                } else if self.auth.has_outlived_key(&controller.association, now) {
                    Some(Some(Cause::KeyChanged))
                } else {
                    controller.look_at_paths();
                    controller.look_at_stores();
                    controller.look_at_replaced(now);
                    None
                }
            }
            QueueRole::Io { association, epoch, .. } => {
                let over = association.is_closed() || association.epoch() != *epoch;
                match over {
                    true => Some(None),
                    false => self
                        .auth
                        .has_outlived_key(association, now)
                        .then_some(Some(Cause::KeyChanged)),
                }
            }
        }
    }

    /// Holds events back until every reactor has adopted a change.
    pub fn await_adoption(&mut self, adoption: &Arc<Adoption>) {
        if let QueueRole::Admin(controller) = &mut self.conn.role {
            controller.await_adoption(adoption);
        }
    }

    /// Handles a change of a subsystem.
    pub fn on_subsystem(&mut self, new: &Arc<Subsystem>, io: &mut Io<'_>) {
        // A view for a single host is created once, for all of its queues.
        let view = |association: &Association| match new.is_the_same_for_all() {
            true => Some(Arc::clone(new)),
            false => io.shared.registry.view(association),
        };
        match &mut self.conn.role {
            QueueRole::Admin(controller) if controller.association.subsystem == new.nqn => {
                if let Some(view) = view(&controller.association) {
                    controller.replace_subsystem(view);
                }
            }
            QueueRole::Io { association, subsystem, .. } if subsystem.nqn == new.nqn => {
                if let Some(view) = view(association) {
                    *subsystem = view;
                    self.stats.find_rows(&self.conn.role, io);
                    self.rate_limits.find(&self.conn.role);
                }
            }
            _ => {}
        }
        self.raise_events(io);
    }

    /// Handles a change of the discovery log of some host.
    pub fn on_discovery_changed(&mut self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.conn.role else { return };
        let ControllerKind::Discovery(service) = &mut controller.role else { return };
        let (_, records) =
            io.shared.registry.discovery(&controller.association.host, controller.local);
        if service.is_news(&records) {
            controller.events.discovery_changed();
            self.raise_events(io);
        }
    }

    // ---- Connect

    /// Executes a Connect command whose data have arrived.
    fn connect(&mut self, slot: u16, io: &mut Io<'_>) {
        if self.is_connected() {
            // Another Connect was in progress at the same time, and has succeeded.
            return self.send_response(slot, connect::LOST, 0, None, io);
        }
        let entry = &self.requests[slot];
        let connect = Connect::parse(&entry.sqe);
        let data = entry.bytes(io.pool).first_chunk().map(ConnectData::parse);
        let outcome = match data {
            Some(ref data) => connect::admit(&connect, data, &mut self.conn, &mut self.auth, io),
            None => {
                let status = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
                Err(fabrics::ConnectError::new(Cause::BadConnect, status))
            }
        };
        match outcome {
            Ok(association) => {
                if self.conn.role.is_io() {
                    self.begin_io(&association, io);
                }
                self.conn.reset_end_cause();
                self.auth.mark_admitted(&self.conn, io);
                let off = connect.cattr.disable_sq_flow_control();
                // The Connect command itself was the first entry.
                self.head = Head { at: 1, size: connect.sqsize_z.saturating_add(1), off };
                let atr = self.auth.is_required();
                let result = ConnectResult(0).with_cntlid(association.cntlid).with_atr(atr).0;
                self.complete(slot, Ok(result.into()), io);
                self.end_other_connects(io);
            }
            Err(refusal) => {
                let fabrics::ConnectError { status, dw0, is_late, .. } = refusal;
                if is_late {
                    // After a restart of the target a host may send many such requests, and must
                    // not be blocked for that when it requests a new controller.
                    io.fabric.admit(self.conn.qp);
                }
                debug!(remote = %self.conn.remote, qid = connect.qid, %status, dw0, "Connect refused");
                self.conn.record_connect_error(&refusal, data.as_ref(), io);
                self.send_response(slot, status, dw0.into(), None, io);
            }
        }
    }

    /// Turns it into an I/O queue.
    fn begin_io(&mut self, association: &Association, io: &mut Io<'_>) {
        let depth = self.depth();
        io.waiters.close(depth);
        let tenant = io.waiters.join(association.id, depth);
        self.buffers.begin(tenant, &mut self.requests, io);
        self.stats.find_rows(&self.conn.role, io);
        self.rate_limits.find(&self.conn.role);
    }

    /// Fails other Connect commands, which wait for buffers. None stays in a wait queue to which
    /// its queue pair no longer belongs.
    fn end_other_connects(&mut self, io: &mut Io<'_>) {
        for slot in 0..self.requests.count() {
            let entry = &self.requests[slot];
            if entry.state().has_not_begun() && matches!(entry.plan, Plan::Connect { .. }) {
                io.waiters.remove(self.requests.key, slot);
                self.send_response(slot, connect::LOST, 0, None, io);
            }
        }
    }

    /// Handles the result of an authentication computation.
    pub fn on_worked(&mut self, ticket: u64, worked: DhResult, io: &mut Io<'_>) {
        if let Some(slot) = self.auth.on_computed(ticket, worked, &mut self.conn, io) {
            self.complete(slot, Ok(0), io);
        }
    }

    // ---- end of the connection

    /// Ends the connection to make room for another.
    pub fn displace(&mut self, io: &mut Io<'_>) {
        let cause = if self.is_admitted() { Cause::Crowded } else { Cause::Displaced };
        self.conn.record_end(cause, "", io);
        self.close(io);
    }

    /// Disconnects. All posted work is returned, then the queue is finished.
    pub fn close(&mut self, io: &mut Io<'_>) {
        if !self.conn.is_open() {
            return;
        }
        self.conn.link = Link::Closing;
        io.fabric.disconnect(self.conn.qp);
        self.leave(io);
        for slot in 0..self.requests.count() {
            if self.requests[slot].state().has_not_begun() {
                self.release(slot, io);
            }
        }
        self.leave_devices(io);
    }

    /// Handles the destruction of the queue pair: all fabric work is returned.
    pub fn on_gone(&mut self, reason: Reason, io: &mut Io<'_>) {
        self.conn.record_disconnect(&reason, self.is_admitted(), io);
        if self.conn.is_open() {
            self.conn.link = Link::Closing;
            self.leave(io);
            self.leave_devices(io);
        }
        self.conn.link = Link::Gone;
        self.drop_backlog(io);
        self.receives = 0;
        for slot in 0..self.requests.count() {
            let entry = &mut self.requests[slot];
            if !matches!(entry.state(), State::AtDevice | State::Offloaded) {
                self.release(slot, io);
                continue;
            }
            // The device may keep its buffers for long, while the host reconnects several times.
            let has_capsule = entry.capsule.is_some();
            entry.take_buffers().for_each(|buf| io.pool.give(buf));
            if !has_capsule && entry.lends_receive {
                self.receives += 1;
            }
        }
        self.give_cells(io);
    }

    /// Releases what a finished queue still holds.
    pub fn finish(mut self, io: &mut Io<'_>) {
        self.give_cells(io);
        match self.buffers.tenant {
            Some(tenant) => {
                self.requests.iter_mut().for_each(|entry| self.buffers.discharge(entry, io));
                io.waiters.leave(tenant, self.depth());
            }
            None => io.waiters.close(self.depth()),
        }
        self.auth.on_finish(&self.conn, io);
        self.stats.note_busy(&self.conn.role, &self.requests, io.now);
        if let QueueRole::Io { association, .. } = &self.conn.role
            && self.auth.was_admitted()
        {
            io.shared.registry.io_closed(association, self.conn.qid);
        }
    }

    /// Fails the controller if an administrator has requested that.
    fn look_for_fatal_error(&mut self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &mut self.conn.role else { return };
        if controller.association.take_fatal_error() && controller.fail_fatally() {
            // Its I/O queues close.
            io.shared.registry.wake_reactors();
            self.conn.record(Cause::FailedOnPurpose, "".into(), io);
        }
    }

    #[cold]
    fn end_for(&mut self, fault: Fault, io: &mut Io<'_>) {
        match Cause::of_fault(fault) {
            Some(cause) => self.conn.record_end(cause, fault.to_string(), io),
            None => self.conn.set_end_cause(self.is_admitted()),
        }
        self.close(io);
    }

    /// Removes the commands of a closing queue from all wait queues, and informs the association.
    fn leave(&mut self, io: &mut Io<'_>) {
        if let Some(slot) = self.auth.cancel(io) {
            self.release(slot, io);
        }
        let now = io.now;
        io.waiters.forget(self.requests.key, |slot, grant| self.give_back(slot, grant, now));
        if let Some(tenant) = self.buffers.tenant {
            io.waiters.abandon(tenant);
        }
        if let QueueRole::Admin(controller) = &mut self.conn.role {
            controller.fail();
            let association = Arc::clone(&controller.association);
            let (host, cntlid) = (&association.host, association.cntlid);
            match controller.is_discovery() {
                true => debug!(%host, cntlid, "host disconnected from discovery"),
                false => {
                    info!(%host, subsystem = %association.subsystem, cntlid, "host disconnected");
                }
            }
            io.shared.registry.admin_closed(&association);
        }
    }

    /// Handles operations when the connection is closed. Those that wait for a range lock never
    /// begin; those at a device keep their blocks locked until they complete, and the device is
    /// requested to return those that it has not begun, with their buffers. A device that hangs
    /// keeps the others. Requests that wait for a worker are withdrawn.
    fn leave_devices(&mut self, io: &mut Io<'_>) {
        for slot in 0..self.requests.count() {
            let entry = &mut self.requests[slot];
            match self.locks.take_waiting(entry) {
                Some((_, op)) => {
                    op.into_buf().into_iter().for_each(|buf| io.pool.give(buf));
                    self.release(slot, io);
                }
                None => {
                    range_lock::orphan(entry, io);
                    entry.unwatch_connection();
                }
            }
        }
        let requests = abort::cancel_all(&mut self.requests);
        if !requests.is_empty() {
            io.disk.recall_all(&requests);
        }
    }

    fn give_cells(&mut self, io: &mut Io<'_>) {
        let cells = self.requests.iter_mut().filter_map(|entry| entry.cell.take());
        cells.for_each(|cell| io.pool.give(cell));
    }
}
