//! Handle of a connection request held by its user: the [`ConnectRequest`], and a token for its
//! state that is shared with the endpoint. The user may pass the request to the endpoint of another
//! thread and answer it there, or drop it, which has to reject it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::connection::ConnectRequest;
use super::mad::MAD_BYTES;
use super::request_key::RequestKey;
use crate::Incoming;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum RequestState {
    /// Pending at the user.
    Asked,
    /// Dropped by the user without an answer.
    Lost,
    /// Rejected, or never confirmed: the peer may repeat it.
    Refused,
    /// There is a queue pair, and perhaps a reply.
    Opened,
    /// The connection is established.
    Up,
    /// The connection has ended.
    Ended,
}

/// A request whose state has changed, and whether its connection was established and never used.
type RequestUpdate = (RequestKey, bool);

/// Requests whose state has changed, for the endpoint where they arrived, which therefore does not
/// scan all of its requests. The lock is held to add or remove an entry only, when a connection is
/// set up or ends.
#[derive(Clone, Default, Debug)]
pub(crate) struct RequestUpdates(Arc<(AtomicBool, Mutex<VecDeque<RequestUpdate>>)>);

impl RequestUpdates {
    /// Removes the oldest entry.
    #[inline]
    pub(crate) fn next(&self) -> Option<RequestUpdate> {
        // In every iteration: mostly there is none.
        if self.0.0.load(Ordering::Acquire) { self.take() } else { None }
    }

    #[inline(never)]
    fn take(&self) -> Option<RequestUpdate> {
        let (any, items) = &*self.0;
        let mut items = items.lock().unwrap_or_else(PoisonError::into_inner);
        let item = items.pop_front();
        any.store(!items.is_empty(), Ordering::Release);
        item
    }

    fn send(&self, item: RequestUpdate) {
        let (any, items) = &*self.0;
        let mut items = items.lock().unwrap_or_else(PoisonError::into_inner);
        items.push_back(item);
        any.store(true, Ordering::Release);
    }
}

/// State of a request, shared by both endpoints.
#[derive(Clone, Debug)]
pub(crate) struct Token(Arc<SharedState>);

#[derive(Debug)]
struct SharedState {
    stage: AtomicU8,
    /// The REP, which is sent again where the request is repeated.
    reply: OnceLock<[u8; MAD_BYTES]>,
    key: RequestKey,
    updates: RequestUpdates,
}

impl Token {
    /// For a request whose endpoint reads `updates`.
    pub(crate) fn new(key: RequestKey, updates: RequestUpdates) -> Token {
        Token(Arc::new(SharedState {
            stage: AtomicU8::new(RequestState::Asked as u8),
            reply: OnceLock::new(),
            key,
            updates,
        }))
    }

    pub(crate) fn set(&self, stage: RequestState) {
        self.store(stage, false);
    }

    /// The connection has ended; `unused`: its host was never admitted.
    pub(crate) fn end(&self, unused: bool) {
        self.store(RequestState::Ended, unused);
    }

    fn store(&self, stage: RequestState, unused: bool) {
        self.0.stage.store(stage as u8, Ordering::Relaxed);
        if !matches!(stage, RequestState::Asked | RequestState::Opened) {
            self.0.updates.send((self.0.key, unused));
        }
    }

    /// The request was accepted with this reply.
    pub(crate) fn set_reply(&self, mad: [u8; MAD_BYTES]) {
        // There is one.
        let _ = self.0.reply.set(mad);
    }

    pub(crate) fn reply(&self) -> Option<&[u8; MAD_BYTES]> {
        self.0.reply.get()
    }

    pub(crate) fn stage(&self) -> RequestState {
        use RequestState::{Asked, Ended, Lost, Opened, Refused, Up};
        let known = [Asked, Lost, Refused, Opened, Up];
        let stage = self.0.stage.load(Ordering::Relaxed);
        known.into_iter().find(|known| *known as u8 == stage).unwrap_or(Ended)
    }
}

/// The provider's part of an [`Incoming`].
#[derive(Debug)]
pub(crate) struct RequestHandle {
    request: ConnectRequest,
    token: Token,
}

impl RequestHandle {
    pub(crate) fn new(request: ConnectRequest, token: Token) -> RequestHandle {
        RequestHandle { request, token }
    }

    /// Takes the request, to answer it; none if it belongs to another provider.
    pub(crate) fn answer(
        mut incoming: Incoming,
        stage: RequestState,
    ) -> Option<(ConnectRequest, Token)> {
        let ticket = incoming.take_handle().downcast::<RequestHandle>().ok()?;
        ticket.token.set(stage);
        Some((ticket.request, ticket.token.clone()))
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        // Only an answer ends this state.
        if self.token.stage() == RequestState::Asked {
            self.token.set(RequestState::Lost);
        }
    }
}

impl ConnectRequest {
    /// The request of an incoming connection, if it belongs to this provider.
    pub fn of(incoming: &Incoming) -> Option<&ConnectRequest> {
        incoming.handle.downcast_ref::<RequestHandle>().map(|ticket| &ticket.request)
    }
}
