//! Scheduling of commands: buffers, rate limits, range locks, drain barriers, and work handed to other
//! threads.

pub mod abort;
mod adoption;
pub mod buffers;
mod drain;
pub mod fair_queue;
mod interval_index;
pub mod offload;
pub mod range_lock;
pub mod rate_queue;
mod reactor_load;
mod waker;

pub use adoption::Adoption;
pub use drain::{DrainBarrier, DrainScope, IoClass};
pub use offload::Offload;
pub use reactor_load::{ReactorLoads, RequestPlace};
pub use waker::Waker;
