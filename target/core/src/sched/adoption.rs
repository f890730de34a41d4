//! A change that the reactors adopt one after another.

use std::sync::Arc;

use super::Waker;

/// Dropped when the last reactor has adopted a change. Events of it are sent then, because a host acts
/// on them by queues that may be on any reactor.
#[derive(Debug)]
pub struct Adoption(Vec<Arc<dyn Waker>>);

impl Adoption {
    /// Of a change that these reactors adopt; they are woken afterwards.
    #[must_use]
    pub fn by(reactors: impl IntoIterator<Item = Arc<dyn Waker>>) -> Arc<Adoption> {
        Arc::new(Adoption(reactors.into_iter().collect()))
    }
}

impl Drop for Adoption {
    fn drop(&mut self) {
        self.0.iter().for_each(|reactor| reactor.wake());
    }
}
