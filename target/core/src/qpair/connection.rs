//! The connection of a queue pair: addresses, role, and the cause of its end. A cause is recorded once,
//! where it is decided.

use std::borrow::Cow;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use nvme::fabrics::ConnectData;
use nvme::{Status, cm};
use rdma::{Qp, Reason};
use tracing::{debug, info};

use super::Io;
use super::role::QueueRole;
use crate::command::fabrics;
use crate::controller::{ControllerState, Limits};
use crate::diag::cause::{Cause, DisconnectRecord};
use crate::registry::OpenQueue;
use nvmfd_blockdev::DeviceId;

/// How long a connection may take from its reply to its Connect command. Hosts bring up all
/// connections of a controller before the first Connect, each round trip may take seconds.
const CONNECT_DEADLINE: Duration = Duration::from_secs(30);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Link {
    Open,
    /// Disconnecting: posted work is being returned.
    Closing,
    /// The queue pair is destroyed; only devices still have work.
    Gone,
}

/// The connection of a queue pair.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) qp: Qp,
    pub(super) qid: u16,
    pub(super) link: Link,
    /// Its host has confirmed the connection, so its address is not forged.
    pub(super) confirmed: bool,
    /// The cause of its refusal or end is recorded.
    explained: bool,
    /// The cause found when its work was returned without a disconnect from here.
    end_cause: Option<Cause>,
    pub(super) role: QueueRole,
    pub(super) limits: Limits,
    /// As requested by its host.
    pub(super) hsqsize_z: u16,
    pub(super) local: SocketAddr,
    pub(super) remote: SocketAddr,
    pub(super) opened: Instant,
    /// Resources that the registry counts for a connection that is not admitted.
    pub(super) unadmitted: Option<OpenQueue>,
}

impl Connection {
    /// Returns a connection between these addresses, before its Connect.
    pub(super) fn new(
        qp: Qp,
        request: cm::Request,
        limits: Limits,
        (local, remote): (SocketAddr, SocketAddr),
        now: Instant,
    ) -> Connection {
        Connection {
            qp,
            qid: request.qid,
            link: Link::Open,
            confirmed: false,
            explained: false,
            end_cause: None,
            role: QueueRole::Nothing { deadline: now + CONNECT_DEADLINE },
            limits,
            hsqsize_z: request.hsqsize_z,
            local,
            remote,
            opened: now,
            unadmitted: None,
        }
    }

    /// Whether it is not being closed.
    #[inline]
    pub(super) fn is_open(&self) -> bool {
        self.link == Link::Open
    }

    /// Whether its Connect has succeeded.
    #[inline]
    pub(super) fn is_connected(&self) -> bool {
        !matches!(self.role, QueueRole::Nothing { .. })
    }

    /// Records the cause for which the queue ends or is rejected; its consequences are not
    /// recorded.
    pub(super) fn record_end(
        &mut self,
        cause: Cause,
        detail: impl Into<Cow<'static, str>>,
        io: &mut Io<'_>,
    ) {
        if !std::mem::replace(&mut self.explained, true) {
            self.record(cause, detail.into(), io);
        }
    }

    /// Records a cause that does not end the queue.
    pub(super) fn record(&self, cause: Cause, detail: Cow<'static, str>, io: &mut Io<'_>) {
        let association = self.role.association();
        let host = association.map(|association| association.host);
        let subsystem = association.map(|association| association.subsystem);
        let why = DisconnectRecord { host, subsystem, detail, ..self.nameless(cause) };
        io.refusals.record(why, &io.shared.disconnects, io.now);
    }

    /// Records that the flush of a device has failed while its host shut the controller down.
    pub(super) fn record_failed_flush(
        &self,
        backing: Option<DeviceId>,
        status: Status,
        io: &mut Io<'_>,
    ) {
        let QueueRole::Admin(controller) = &self.role else { return };
        let namespaces = controller.subsystem().map_or(&[][..], |it| &it.namespaces);
        let of = namespaces.iter().find(|namespace| Some(namespace.backing) == backing);
        let nsid = of.map_or(0, |namespace| namespace.nsid);
        let detail = format!("namespace {nsid}: {status}");
        self.record(Cause::UnflushedShutdown, detail.into(), io);
    }

    /// Records another host with the same host identifier. This one is admitted: it may be the
    /// earlier host under another name.
    pub(super) fn record_duplicate_host_id(&self, io: &mut Io<'_>) {
        let QueueRole::Admin(controller) = &self.role else { return };
        if controller.is_discovery() {
            return;
        }
        if let Some(other) = io.shared.registry.twin(&controller.association) {
            self.record(Cause::SharedHostId, format!("the other one is {other}").into(), io);
        }
    }

    /// Allows another cause to be recorded after a successful Connect.
    pub(super) fn reset_end_cause(&mut self) {
        self.explained = false;
    }

    /// Records that its Connect was rejected.
    pub(super) fn record_connect_error(
        &mut self,
        refusal: &fabrics::ConnectError,
        data: Option<&ConnectData>,
        io: &mut Io<'_>,
    ) {
        let fabrics::ConnectError { status, cause, .. } = refusal;
        let host = data.and_then(|data| data.hostnqn().ok());
        let subsystem = data.and_then(|data| data.subnqn().ok());
        let detail = match cause {
            Cause::BadConnect => Cow::Owned(status.to_string()),
            _ => Cow::Borrowed(""),
        };
        let why = DisconnectRecord { host, subsystem, detail, ..self.nameless(*cause) };
        self.explained = true;
        io.refusals.record(why, &io.shared.disconnects, io.now);
    }

    /// Sets the cause of the end, when its work was returned without a disconnect by the target.
    pub(super) fn set_end_cause(&mut self, is_admitted: bool) {
        self.end_cause = self.cause_of_end(is_admitted);
    }

    /// Records that the queue pair is destroyed, for a reason that the fabric gives.
    pub(super) fn record_disconnect(
        &mut self,
        reason: &Reason,
        is_admitted: bool,
        io: &mut Io<'_>,
    ) {
        let (remote, qid) = (self.remote, self.qid);
        // Any peer can make any number of connections without a host name or for discovery, and a host
        // has one admin queue and many others.
        match &self.role {
            QueueRole::Admin(controller) if !controller.is_discovery() => {
                info!(%remote, qid, ?reason, "queue closed");
            }
            _ if self.is_connected() => debug!(%remote, qid, ?reason, "queue closed"),
            _ => debug!(%remote, ?reason, "queue closed before its Connect"),
        }
        let cause = match reason {
            Reason::Device => Some(Cause::DeviceGone),
            Reason::NotEstablished | Reason::Rejected { .. } if !self.is_connected() => {
                Some(Cause::NotEstablished)
            }
            _ if self.is_open() => self.cause_of_end(is_admitted),
            _ => self.end_cause,
        };
        if let Some(cause) = cause {
            self.record_end(cause, "", io);
        }
    }

    /// Returns the cause if the host ends this queue now; none if that is regular.
    fn cause_of_end(&self, is_admitted: bool) -> Option<Cause> {
        let Some(association) = self.role.association() else {
            return Some(Cause::ClosedBeforeConnect);
        };
        match &self.role {
            _ if association.is_closed() => None,
            _ if !is_admitted => Some(Cause::NotAuthenticated),
            // Hosts that disconnect regularly close I/O queues first, and shut down then.
            QueueRole::Io { .. } | QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => {
                let missed =
                    controller.life() == ControllerState::Ready && !controller.is_discovery();
                missed.then_some(Cause::HostLeft)
            }
        }
    }

    fn nameless(&self, cause: Cause) -> DisconnectRecord {
        let qid = Some(self.qid);
        DisconnectRecord { qid, ..DisconnectRecord::nameless(cause, self.remote, self.local) }
    }
}
