//! For tests, also of other packages.

use tempfile::TempDir;

/// A temporary directory on the file system of the source tree, which unlike /tmp is never tmpfs,
/// or where the environment says.
///
/// # Panics
/// It cannot be created.
#[must_use]
pub fn directory() -> TempDir {
    let place = std::env::var_os("NVMFD_TEST_DIRECTORY");
    tempfile::tempdir_in(place.unwrap_or(env!("CARGO_MANIFEST_DIR").into())).unwrap()
}
