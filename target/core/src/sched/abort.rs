//! Routes an Abort command to the command to abort, which may be on another reactor.
//!
//! The admin queue keeps an [`AbortRequest`]. Each reactor receives an [`AbortToken`]; the queue pair that
//! has the command keeps the token with it. A queue pair that aborts the command says so in the request.
//! When the last token is dropped without that, the command was not found or has completed otherwise. Both
//! wake the reactor on which the Abort command waits: there is no message back that could be lost.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::sched::Waker;

/// State of an Abort command. Cheap to clone.
#[derive(Clone, Debug)]
pub struct AbortRequest(Arc<AbortState>);

#[derive(Debug)]
struct AbortState {
    association: u64,
    sqid: u16,
    cid: u16,
    /// Number of tokens.
    tokens: AtomicU32,
    aborted: AtomicBool,
    home: Arc<dyn Waker>,
}

/// Token in transit to a command, or kept with it.
#[derive(Debug)]
pub struct AbortToken(Arc<AbortState>);

impl AbortRequest {
    /// Returns the request of an association, by its
    /// [`crate::controller::association::Association::id`], to abort command `cid` of queue `sqid`,
    /// and its first token. `home` is the reactor of its admin queue.
    pub fn new(
        association: u64,
        sqid: u16,
        cid: u16,
        home: Arc<dyn Waker>,
    ) -> (AbortRequest, AbortToken) {
        let shared = AbortState {
            association,
            sqid,
            cid,
            tokens: AtomicU32::new(1),
            aborted: AtomicBool::new(false),
            home,
        };
        let shared = Arc::new(shared);
        (AbortRequest(Arc::clone(&shared)), AbortToken(shared))
    }

    /// Whether the command was aborted; none while the outcome is unknown.
    pub fn outcome(&self) -> Option<bool> {
        // Acquire: the outcome was stored before the last token was dropped.
        let open = self.0.tokens.load(Ordering::Acquire) > 0;
        match self.0.aborted.load(Ordering::Relaxed) {
            true => Some(true),
            false if open => None,
            false => Some(false),
        }
    }
}

impl AbortToken {
    /// Whether it is for this queue.
    pub fn is_for(&self, association: u64, sqid: u16) -> bool {
        (self.0.association, self.0.sqid) == (association, sqid)
    }

    /// The command.
    pub fn cid(&self) -> u16 {
        self.0.cid
    }

    /// Records that the command ends with Command Abort Requested.
    pub fn succeed(self) {
        self.0.aborted.store(true, Ordering::Relaxed);
    }
}

impl Clone for AbortToken {
    fn clone(&self) -> AbortToken {
        self.0.tokens.fetch_add(1, Ordering::Relaxed);
        AbortToken(Arc::clone(&self.0))
    }
}

impl Drop for AbortToken {
    fn drop(&mut self) {
        self.0.tokens.fetch_sub(1, Ordering::Release);
        self.0.home.wake();
    }
}

#[cfg(test)]
mod tests {
    use crate::message::mailbox;
    use crate::sched::abort::*;

    #[test]
    fn an_abort_is_pending_until_success_or_drop_of_all_tokens() {
        let (sender, inbox) = mailbox().unwrap();
        let (recall, token) = AbortRequest::new(7, 1, 9, sender.waker());
        assert!(token.is_for(7, 1) && !token.is_for(8, 1) && !token.is_for(7, 2));
        assert_eq!((token.cid(), recall.outcome()), (9, None));
        let kept = token.clone();
        drop(token);
        assert_eq!(recall.outcome(), None);
        assert!(inbox.hush(), "whoever waits looks");
        kept.succeed();
        assert_eq!((recall.outcome(), inbox.hush()), (Some(true), true));

        let (recall, token) = AbortRequest::new(7, 1, 9, sender.waker());
        drop(token);
        assert_eq!((recall.outcome(), inbox.hush()), (Some(false), true));
    }
}
