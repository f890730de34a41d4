//! For tests, also of other packages.

use std::time::Instant;

use super::ConnectContext;
use crate::controller::Limits;

/// A connection from some host.
///
/// # Panics
/// Never.
pub fn visit() -> ConnectContext {
    at("192.0.2.1:4420")
}

#[expect(clippy::disallowed_methods, reason = "tests have no clock to lend")]
pub(super) fn at(local: &str) -> ConnectContext {
    let limits =
        Limits { queue_depth: 128, io_queues: 8, in_capsule_bytes: 4096, mdts_bytes: 1 << 20 };
    let source = [192, 0, 2, 200].into();
    ConnectContext {
        local: local.parse().unwrap(),
        source,
        limits,
        held: None,
        now: Instant::now(),
    }
}
