//! What decides when a command goes on, and who is asked to carry it out.

mod waker;

pub use waker::Waker;
