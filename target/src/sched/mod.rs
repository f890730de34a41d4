//! What decides when a command goes on, and who is asked to carry it out.

pub mod offload;
mod waker;

pub use offload::Offload;
pub use waker::Waker;
