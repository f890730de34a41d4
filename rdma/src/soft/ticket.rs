//! A request to connect while it is in its user's hands: the [`ConnectRequest`], and what becomes
//! of it, which the endpoint where it arrived wants to know. The user may carry it to another
//! thread, answer it there, or lose it; the latter must reject it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::connection::ConnectRequest;
use crate::Incoming;

/// What has become of a request.
#[derive(Clone, Debug)]
pub(super) struct Token(Arc<AtomicU8>);

const ASKED: u8 = 0;
const ANSWERED: u8 = 1;
const DROPPED: u8 = 2;

impl Token {
    pub(super) fn new() -> Token {
        Token(Arc::new(AtomicU8::new(ASKED)))
    }

    /// The user still thinks about it.
    pub(super) fn is_open(&self) -> bool {
        self.0.load(Ordering::Relaxed) == ASKED
    }

    /// The user has lost it, and nobody has answered the peer.
    pub(super) fn is_dropped(&self) -> bool {
        self.0.load(Ordering::Relaxed) == DROPPED
    }
}

/// What an [`Incoming`] of this provider carries.
#[derive(Debug)]
pub(super) struct Ticket {
    request: ConnectRequest,
    token: Token,
}

impl Ticket {
    pub(super) fn new(request: ConnectRequest, token: Token) -> Ticket {
        Ticket { request, token }
    }

    /// Takes the request out, to answer it.
    pub(super) fn answer(incoming: Incoming) -> Option<ConnectRequest> {
        let ticket = incoming.into_handle().downcast::<Ticket>().ok()?;
        ticket.token.0.store(ANSWERED, Ordering::Relaxed);
        Some(ticket.request)
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let _ = self.token.0.compare_exchange(ASKED, DROPPED, Ordering::Relaxed, Ordering::Relaxed);
    }
}

impl ConnectRequest {
    /// The request behind an incoming connection, if it came through this provider.
    #[must_use]
    pub fn of(incoming: &Incoming) -> Option<&ConnectRequest> {
        incoming.handle.downcast_ref::<Ticket>().map(|ticket| &ticket.request)
    }
}
