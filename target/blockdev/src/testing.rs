//! For tests, also of other packages.

use tempfile::TempDir;

use crate::IoEngine;

/// A temporary directory on the file system of the source tree, which unlike /tmp is never tmpfs,
/// or where the environment says.
///
/// # Panics
/// It cannot be created.
pub fn directory() -> TempDir {
    let place = std::env::var_os("NVMFD_TEST_DIRECTORY");
    tempfile::tempdir_in(place.unwrap_or(env!("CARGO_MANIFEST_DIR").into())).unwrap()
}

/// What executes the I/O of tests: io_uring, or what the environment says.
///
/// # Panics
/// There is no such engine.
pub fn io_engine() -> IoEngine {
    let name = std::env::var("NVMFD_TEST_IO_ENGINE").unwrap_or("io_uring".into());
    IoEngine::ALL.into_iter().find(|engine| engine.to_string() == name).unwrap()
}
