//! What decides when a command goes on, and who is asked to carry it out.

mod drain;
pub mod offload;
mod waker;

pub use drain::{Fence, Fenced, IoClass};
pub use offload::Offload;
pub use waker::Waker;
