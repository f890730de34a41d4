//! Errors that stop the daemon or reject a change.

/// The daemon cannot serve: one sentence for the user.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{0}")]
pub struct Fatal(pub String);

/// A change is not in force, and no host has seen any part of it.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NotServed {
    /// It cannot be served.
    #[error("{0}")]
    Unservable(#[from] Fatal),
    /// It cannot be persisted.
    #[error("{0}")]
    Unkept(String),
}
