//! Memory that peers may read and write: what a host offers to its target.

use std::any::Any;

use crate::{Buf, Remote};

/// A buffer whose window peers may access, made by `Fabric::expose`. While it exists its bytes may
/// change at any time, so they are never borrowed, only copied: `Pool::copy_out` and
/// `Pool::copy_in`.
#[derive(Debug)]
#[must_use = "a buffer that is dropped is lost to its pool: give it to `Fabric::conceal`"]
pub struct Exposed {
    // The access goes before the buffer.
    access: Box<dyn Any + Send>,
    buf: Buf,
    remote: Remote,
}

impl Exposed {
    /// For providers: `access` is what ends the peers' access when it is dropped.
    pub fn new(buf: Buf, remote: Remote, access: Box<dyn Any + Send>) -> Exposed {
        Exposed { access, buf, remote }
    }

    /// The memory as peers must name it.
    #[must_use]
    pub fn remote(&self) -> Remote {
        self.remote
    }

    /// Ends the access and gives the buffer back. `Fabric::conceal` by its own name.
    pub(crate) fn into_buf(self) -> Buf {
        drop(self.access);
        self.buf
    }

    pub(crate) fn buf(&self) -> &Buf {
        &self.buf
    }
}
