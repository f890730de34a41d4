//! rdma-core.
