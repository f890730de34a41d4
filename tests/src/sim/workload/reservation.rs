//! Reservation commands of simulated hosts. Every host has one constant key.

use std::fmt;

use nvme::reservation::{
    Acquire, AcquireAction, AcquireKeys, ChangePersistence, Register, RegisterAction, RegisterKeys,
    Release, ReleaseAction, ReleaseKey, ReservationType,
};
use nvme::{Sgl, Sqe};

/// A reservation command of a host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Order {
    /// Register, and whether to set Persist Through Power Loss.
    Register(bool),
    /// Unregister.
    Unregister,
    /// Acquire.
    Acquire(ReservationType),
    /// Preempt and Abort of another host.
    Preempt(usize, ReservationType),
    /// Release.
    Release(ReservationType),
    /// Clear.
    Clear,
}

impl Order {
    /// The command for namespace `nsid`.
    pub fn sqe(self, nsid: u32) -> Sqe {
        let register = |action, how| {
            Register(0).with_action(action).with_persistence(how).emit(nsid, Sgl::NONE)
        };
        let acquire =
            |action, rtype| Acquire(0).with_action(action).with_rtype(rtype).emit(nsid, Sgl::NONE);
        let release =
            |action, rtype| Release(0).with_action(action).with_rtype(rtype).emit(nsid, Sgl::NONE);
        match self {
            Order::Register(persistent) => register(
                RegisterAction::REGISTER,
                match persistent {
                    true => ChangePersistence::SET,
                    false => ChangePersistence::KEEP,
                },
            ),
            Order::Unregister => register(RegisterAction::UNREGISTER, ChangePersistence::KEEP),
            Order::Acquire(rtype) => acquire(AcquireAction::ACQUIRE, rtype),
            Order::Preempt(_, rtype) => acquire(AcquireAction::PREEMPT_AND_ABORT, rtype),
            Order::Release(rtype) => release(ReleaseAction::RELEASE, rtype),
            Order::Clear => release(ReleaseAction::CLEAR, ReservationType::NONE),
        }
    }

    /// Bytes of its data.
    pub fn data_bytes(self) -> u32 {
        match self {
            Order::Release(_) | Order::Clear => ReleaseKey::BYTES as u32,
            _ => AcquireKeys::BYTES as u32,
        }
    }

    /// Its data, from a host.
    pub fn fill(self, host: usize, bytes: &mut [u8]) {
        let current = key(host);
        match self {
            Order::Register(_) => {
                bytes.copy_from_slice(&RegisterKeys { current: 0, new: current }.emit());
            }
            Order::Unregister => bytes.copy_from_slice(&RegisterKeys { current, new: 0 }.emit()),
            Order::Acquire(_) => bytes.copy_from_slice(&AcquireKeys { current, preempt: 0 }.emit()),
            Order::Preempt(victim, _) => {
                bytes.copy_from_slice(&AcquireKeys { current, preempt: key(victim) }.emit());
            }
            Order::Release(_) | Order::Clear => {
                bytes.copy_from_slice(&ReleaseKey { current }.emit());
            }
        }
    }
}

fn key(host: usize) -> u64 {
    host as u64 + 1
}

impl fmt::Display for Order {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Order::Register(true) => f.write_str("register, persistent"),
            Order::Register(false) => f.write_str("register"),
            Order::Unregister => f.write_str("unregister"),
            Order::Acquire(rtype) => write!(f, "acquire {rtype}"),
            Order::Preempt(victim, rtype) => write!(f, "preempt host {victim}, {rtype}, and abort"),
            Order::Release(rtype) => write!(f, "release {rtype}"),
            Order::Clear => f.write_str("clear"),
        }
    }
}
