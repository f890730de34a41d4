//! `IoEngine`: what executes the I/O of backing stores.

rdma::named_enum! {
    /// What executes the I/O of backing stores.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    pub enum IoEngine {
        /// io_uring, or threads where it is denied.
        #[default]
        Auto = "auto",
        /// io_uring alone.
        IoUring = "io_uring",
        /// Threads, whether or not there is an io_uring.
        Threads = "threads",
    }
}
