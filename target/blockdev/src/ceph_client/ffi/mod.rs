//! librados and librbd behind safe handles. The only directory that calls them: `load` has their
//! functions, `cluster` connections, `omap` objects, `image` images, `lifecycle` how they are made
//! and removed, `snapshots` their snapshots and clones, `completions` what is reported by their threads.
//!
//! # How the unsafe code is fenced
//!
//! * Every function is looked up by name in the two libraries when the first handle is made (`Api`),
//!   so the binary has no link dependency on Ceph and starts without it. Neither library is ever
//!   unloaded, because its threads would go on in unmapped code.
//! * One handle per object, with one constructor and one `Drop`. A handle holds its parent: an image
//!   is closed before its pool handle, which is released before its client.
//! * An asynchronous operation owns nothing. [`Image::start`] is unsafe: its caller keeps the memory
//!   mapped and untouched until the operation is in the [`CompletionQueue`], which is exactly when the
//!   library has let go of it.
//! * What a callback points to is counted: each pending operation of an image holds its queue.
//! * Both libraries lock internally: handles may be used by several threads at once.
#![expect(unsafe_code, reason = "calls into librados and librbd")]

mod cluster;
mod completions;
mod image;
mod lifecycle;
mod load;
mod omap;
mod snapshots;

use std::ffi::{CString, c_int};

use nix::errno::Errno;

pub(crate) use cluster::{Client, Pool};
pub(crate) use completions::CompletionQueue;
pub(crate) use image::Image;
pub(crate) use lifecycle::{create_image, move_to_trash, remove_from_trash, remove_image};
use load::{Api, Handle};
pub(crate) use omap::Change;
pub(crate) use snapshots::{IN_TRASH, Snapshot, clone_snapshot};

/// The errno of a call that returns a negative one.
fn check(code: c_int) -> Result<c_int, Errno> {
    if code < 0 { Err(Errno::from_raw(code.saturating_neg())) } else { Ok(code) }
}

/// A string for C. Names are checked for zeros when the configuration is read.
fn c(text: &str) -> Result<CString, Errno> {
    CString::new(text).map_err(|_| Errno::EINVAL)
}
