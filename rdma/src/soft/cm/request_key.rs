//! Identity of a connection request.

use std::net::IpAddr;

use crate::Source;
use crate::source::{PerSourceTable, SourceKey};

/// Identity of a connection request, equal for its repetitions: between the same addresses, from
/// the same adapter, with the same name.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct RequestKey {
    // First what differs most, as they are compared in this order.
    pub(crate) comm: u32,
    pub(crate) guid: u64,
    pub(crate) remote: IpAddr,
    pub(crate) local: IpAddr,
}

impl SourceKey for RequestKey {
    fn source(&self) -> Source {
        self.remote.into()
    }
}

/// What is remembered of connection requests.
pub(crate) type RequestTable<V> = PerSourceTable<RequestKey, V>;
