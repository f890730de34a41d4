//! Clients of a Ceph cluster: the libraries, and connections.

pub(crate) mod connection;
pub(crate) mod ffi;
#[cfg(test)]
pub(crate) mod tests;
