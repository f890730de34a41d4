//! Memory that peers may read and write: buffers that a host registers for its target.

use std::any::Any;
use std::marker::PhantomData;

use super::{Buf, Window};
use crate::Remote;

/// A buffer whose window peers may access, made by `Initiator::register_remote`. While it exists its bytes may
/// change at any time, so they are never borrowed, only copied: `Pool::copy_out` and
/// `Pool::copy_in`. It stays on the thread that made it, for a provider that moves the data itself
/// does so there:
///
/// ```compile_fail,E0277
/// fn goes_elsewhere<T: Send>() {}
/// goes_elsewhere::<rdma::RemoteRegion>();
/// ```
#[derive(Debug)]
#[must_use = "a buffer that is dropped is lost to its pool: give it to `Initiator::deregister_remote`"]
pub struct RemoteRegion {
    // The access ends before the buffer is dropped.
    access: RemoteAccess,
    buf: Buf,
    remote: Remote,
    /// Not `Send`.
    stays: PhantomData<*const ()>,
}

#[derive(Debug)]
enum RemoteAccess {
    /// Access ends when this is dropped.
    Registered { access: Box<dyn Any + Send>, invalidation: bool },
    /// Access ends when the provider has returned the [`Window`].
    Lent,
}

impl RemoteRegion {
    /// For providers whose device moves the data: dropping `access` ends the peers' access.
    pub fn new(buf: Buf, remote: Remote, access: Box<dyn Any + Send>) -> RemoteRegion {
        let access = RemoteAccess::Registered { access, invalidation: false };
        RemoteRegion { access, buf, remote, stays: PhantomData }
    }

    /// For providers that move the data themselves: the window gives access to the bytes, and has
    /// to be returned to [`RemoteRegion::join`].
    pub(crate) fn split(buf: Buf, key: u32) -> (RemoteRegion, Window) {
        let remote = Remote { addr: buf.offset(), key, len: buf.len() };
        let window = Window::of(&buf);
        (RemoteRegion { access: RemoteAccess::Lent, buf, remote, stays: PhantomData }, window)
    }

    /// Takes back the window of [`RemoteRegion::split`].
    ///
    /// # Panics
    /// The window is of another region.
    pub(crate) fn join(self, window: Window) -> Buf {
        assert!(window == Window::of(&self.buf), "exposed by another fabric");
        self.buf
    }

    /// Whether a peer may invalidate the key with its message. Memory that is registered with a
    /// device does not support that: the device would end the connection.
    pub fn bears_invalidation(&self) -> bool {
        match &self.access {
            RemoteAccess::Registered { invalidation, .. } => *invalidation,
            RemoteAccess::Lent => true,
        }
    }

    /// For providers whose device can invalidate this kind of memory.
    pub fn with_invalidation(mut self) -> RemoteRegion {
        if let RemoteAccess::Registered { invalidation, .. } = &mut self.access {
            *invalidation = true;
        }
        self
    }

    /// The memory as peers must name it.
    pub fn remote(&self) -> Remote {
        self.remote
    }

    /// Ends the access and returns the buffer. `Initiator::deregister_remote` is its public name.
    ///
    /// # Panics
    /// The provider moves the data itself, so its peers would still have access.
    pub(crate) fn into_buf(self) -> Buf {
        match self.access {
            RemoteAccess::Registered { access, .. } => drop(access),
            RemoteAccess::Lent => panic!("exposed by another fabric"),
        }
        self.buf
    }

    pub(crate) fn buf(&self) -> &Buf {
        &self.buf
    }
}
