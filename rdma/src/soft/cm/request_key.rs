//! Identity of a connection request.

use std::net::IpAddr;

use crate::Source;
use crate::source::{PerSourceTable, SourceKey};

/// Identity of a connection request, equal for its repetitions: the addresses, the GUID of the
/// adapter, and the communication id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct RequestKey {
    // The most distinctive field first, because fields are compared in this order.
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

/// A table of connection requests.
pub(crate) type RequestTable<V> = PerSourceTable<RequestKey, V>;
