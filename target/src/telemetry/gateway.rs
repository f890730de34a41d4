//! The gateway group of the daemon, for the management interface.

use std::sync::Mutex;
use std::sync::mpsc::Sender;

use crate::api::GatewayGroup;
use crate::blockdev::lock;

/// A request of the administrator, by names.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum GroupRequest {
    /// Moves an ANA group to another gateway, after those moved before.
    Move(u32, String),
    /// Excludes another gateway.
    Exclude(String),
}

/// The state of the group, and where requests go.
#[derive(Debug, Default)]
pub struct GroupView {
    group: Mutex<GatewayGroup>,
    requests: Mutex<Option<Sender<GroupRequest>>>,
}

impl GroupView {
    /// The state of the group.
    pub fn group(&self) -> GatewayGroup {
        lock(&self.group).clone()
    }

    /// Reports a gateway without confirmed heartbeats: it was cut off, or another one has its name or
    /// slot.
    pub fn idle(&self) -> Option<String> {
        let GatewayGroup { name, gateway, fresh, failure, .. } = self.group();
        // Without a name it has not looked at the group yet.
        (!fresh && !name.is_empty()).then(|| {
            let why = failure.unwrap_or_else(|| {
                "see the log, `ceph -s`, and `nvmfctl gateway list` at another gateway".to_owned()
            });
            format!(
                "gateway {gateway} of the group {name} serves nothing: its heartbeats are not \
                 confirmed: {why}"
            )
        })
    }

    /// Replaces the state.
    pub(crate) fn set(&self, group: GatewayGroup) {
        *lock(&self.group) = group;
    }

    /// Names the receiver of requests.
    pub(crate) fn set_requests(&self, requests: Sender<GroupRequest>) {
        *lock(&self.requests) = Some(requests);
    }

    /// Hands a request over; false: nobody receives it.
    pub fn request(&self, request: GroupRequest) -> bool {
        lock(&self.requests).as_ref().is_some_and(|requests| requests.send(request).is_ok())
    }
}
