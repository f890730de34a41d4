//! A request to connect in the hands of its user: the [`ConnectRequest`], and a token of what becomes
//! of it, which it shares with the endpoint where it arrived. The user may carry the request to the
//! endpoint of another thread and answer it there, or lose it; the latter must reject it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use super::connection::ConnectRequest;
use crate::Incoming;

/// What has become of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(super) enum Stage {
    /// The user still thinks about it.
    Asked,
    /// The user has lost it, and nobody has answered the peer.
    Lost,
    /// The peer has been refused.
    Refused,
    /// There is a queue pair, and perhaps a reply.
    Opened,
    /// The connection is up.
    Up,
    /// It has ended, or never came up.
    Ended,
}

/// What has become of a request, for both endpoints to see.
#[derive(Clone, Debug)]
pub(super) struct Token(Arc<AtomicU8>);

impl Token {
    pub(super) fn new() -> Token {
        Token(Arc::new(AtomicU8::new(Stage::Asked as u8)))
    }

    pub(super) fn set(&self, stage: Stage) {
        self.0.store(stage as u8, Ordering::Relaxed);
    }

    pub(super) fn stage(&self) -> Stage {
        use Stage::{Asked, Ended, Lost, Opened, Refused, Up};
        let known = [Asked, Lost, Refused, Opened, Up];
        let stage = self.0.load(Ordering::Relaxed);
        known.into_iter().find(|known| *known as u8 == stage).unwrap_or(Ended)
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

    /// Takes the request out, to answer it; none when it came through another provider.
    pub(super) fn answer(incoming: Incoming, stage: Stage) -> Option<(ConnectRequest, Token)> {
        let ticket = incoming.into_handle().downcast::<Ticket>().ok()?;
        ticket.token.set(stage);
        Some((ticket.request, ticket.token.clone()))
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        // An answered one has left this stage, and nobody else moves it out.
        if self.token.stage() == Stage::Asked {
            self.token.set(Stage::Lost);
        }
    }
}

impl ConnectRequest {
    /// The request behind an incoming connection, if it came through this provider.
    #[must_use]
    pub fn of(incoming: &Incoming) -> Option<&ConnectRequest> {
        incoming.handle.downcast_ref::<Ticket>().map(|ticket| &ticket.request)
    }
}
