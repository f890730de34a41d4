//! Why a host is refused or dropped: written down once a queue, where it is decided.

use std::borrow::Cow;

use nvme::Status;
use nvme::fabrics::ConnectData;
use rdma::Reason;
use tracing::{debug, info};

use super::{Io, Link, QueuePair, QueueRole};
use crate::blockdev::DeviceId;
use crate::core::command::fabrics;
use crate::core::controller::ControllerState;
use crate::core::diag::cause::{Cause, DisconnectRecord};

impl QueuePair {
    /// The queue ends, or is refused, for this cause; what follows from it is not told again.
    pub(super) fn explain(
        &mut self,
        cause: Cause,
        detail: impl Into<Cow<'static, str>>,
        io: &mut Io<'_>,
    ) {
        if !std::mem::replace(&mut self.explained, true) {
            self.tell(cause, detail.into(), io);
        }
    }

    /// A cause that does not end the queue.
    pub(super) fn tell(&self, cause: Cause, detail: Cow<'static, str>, io: &mut Io<'_>) {
        let association = self.association();
        let host = association.map(|association| association.host);
        let subsystem = association.map(|association| association.subsystem);
        let why = DisconnectRecord { host, subsystem, detail, ..self.nameless(cause) };
        io.refusals.tell(why, &io.shared.disconnects, io.now);
    }

    /// The flush of a store has failed when its host shut the controller down.
    pub(super) fn tell_unflushed(
        &self,
        backing: Option<DeviceId>,
        status: Status,
        io: &mut Io<'_>,
    ) {
        let QueueRole::Admin(controller) = &self.serves else { return };
        let namespaces = controller.subsystem().map_or(&[][..], |it| &it.namespaces);
        let of = namespaces.iter().find(|namespace| Some(namespace.backing) == backing);
        let nsid = of.map_or(0, |namespace| namespace.nsid);
        let detail = format!("namespace {nsid}: {status}");
        self.tell(Cause::UnflushedShutdown, detail.into(), io);
    }

    /// Its Connect was refused.
    pub(super) fn explain_connect(
        &mut self,
        refusal: &fabrics::Refusal,
        data: Option<&ConnectData>,
        io: &mut Io<'_>,
    ) {
        let fabrics::Refusal { status, cause, .. } = refusal;
        let host = data.and_then(|data| data.hostnqn().ok());
        let subsystem = data.and_then(|data| data.subnqn().ok());
        let detail = match cause {
            Cause::BadConnect => Cow::Owned(status.to_string()),
            _ => Cow::Borrowed(""),
        };
        let why = DisconnectRecord { host, subsystem, detail, ..self.nameless(*cause) };
        self.explained = true;
        io.refusals.tell(why, &io.shared.disconnects, io.now);
    }

    /// Ends the connection so that another may have its room.
    pub fn displace(&mut self, io: &mut Io<'_>) {
        match self.is_admitted() {
            true => self.explain(Cause::Crowded, "", io),
            false => self.explain(Cause::Displaced, "", io),
        }
        self.close(io);
    }

    /// The first command is not what it must be.
    pub(super) fn explain_first(&mut self, status: Status, io: &mut Io<'_>) {
        self.explain(Cause::BadConnect, status.to_string(), io);
    }

    /// The queue pair is gone, for a reason that the fabric gives.
    pub(super) fn explain_end(&mut self, reason: &Reason, io: &mut Io<'_>) {
        let (remote, qid) = (self.remote, self.request.qid);
        // Of those that nobody has named, anybody can make as many as they like.
        match self.is_connected() {
            true => info!(%remote, qid, ?reason, "queue closed"),
            false => debug!(%remote, ?reason, "queue closed before its Connect"),
        }
        let cause = match reason {
            Reason::Device => Some(Cause::DeviceGone),
            Reason::NotEstablished | Reason::Rejected { .. } if !self.is_connected() => {
                Some(Cause::NotEstablished)
            }
            _ if self.link == Link::Open => self.cause_of_leaving(),
            _ => self.leaving,
        };
        if let Some(cause) = cause {
            self.explain(cause, "", io);
        }
    }

    /// What it is when the host ends this queue now; nothing where that is in order.
    pub(super) fn cause_of_leaving(&self) -> Option<Cause> {
        let Some(association) = self.association() else { return Some(Cause::LeftBeforeConnect) };
        match &self.serves {
            _ if association.is_closed() => None,
            _ if !self.is_admitted() => Some(Cause::NotAuthenticated),
            // Hosts end I/O queues first when they leave in good order, and shut down then.
            QueueRole::Io { .. } | QueueRole::Nothing { .. } => None,
            QueueRole::Admin(controller) => {
                let missed =
                    controller.life() == ControllerState::Ready && !controller.is_discovery();
                missed.then_some(Cause::HostLeft)
            }
        }
    }

    fn nameless(&self, cause: Cause) -> DisconnectRecord {
        let qid = Some(self.request.qid);
        DisconnectRecord { qid, ..DisconnectRecord::nameless(cause, self.remote, self.local) }
    }
}
