//! A user-space NVMe over RDMA host. This skeleton fixes the name; the host itself comes with the soft fabric.
