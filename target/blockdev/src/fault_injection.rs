//! Fault injection for tests: errors that real devices rarely produce.
//!
//! A fault replaces the result of the kernel and nothing else, so everything after it runs as with
//! a real error. Set by the key `fault` of a namespace, also by a reload.

use super::step::Step;

rdma::named_enum! {
    /// An injected fault.
    #[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
    #[repr(u8)]
    pub enum InjectedFault {
        /// No fault.
        #[default]
        None = "none",
        /// No operation completes until the fault changes.
        Stall = "stall",
        /// Every operation takes 100 ms longer.
        Slow = "slow",
        /// Every operation fails with EIO.
        Error = "error",
        /// Operations that allocate space fail with ENOSPC.
        Full = "full",
        /// fsync fails with EIO.
        Sync = "sync",
        /// Transfers complete after one block (short transfers).
        Short = "short",
    }
}

/// How an injected fault changes a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Not at all: the kernel does it.
    Go,
    /// It waits and is tried again.
    Wait,
    /// It fails with this errno.
    Fail(i32),
}

impl InjectedFault {
    /// The fault with this number; none for other numbers.
    pub(super) fn from_number(number: u8) -> InjectedFault {
        InjectedFault::ALL.into_iter().find(|fault| *fault as u8 == number).unwrap_or_default()
    }

    /// How this fault changes a step that has already waited `waited` times.
    pub fn verdict(self, step: Step, waited: u8) -> Verdict {
        let changes = !matches!(step, Step::Read { .. } | Step::Sync);
        match self {
            InjectedFault::Stall => Verdict::Wait,
            InjectedFault::Slow if waited == 0 => Verdict::Wait,
            InjectedFault::Error => Verdict::Fail(libc::EIO),
            InjectedFault::Full if changes => Verdict::Fail(libc::ENOSPC),
            InjectedFault::Sync if step == Step::Sync => Verdict::Fail(libc::EIO),
            InjectedFault::None
            | InjectedFault::Slow
            | InjectedFault::Full
            | InjectedFault::Sync
            | InjectedFault::Short => Verdict::Go,
        }
    }

    /// The step, shortened by this fault.
    pub fn cut(self, step: Step, block_bytes: u32) -> Step {
        match step {
            Step::Read { at, skip, len } if self == InjectedFault::Short => {
                Step::Read { at, skip, len: len.min(block_bytes) }
            }
            Step::Write { at, skip, len, durable } if self == InjectedFault::Short => {
                Step::Write { at, skip, len: len.min(block_bytes), durable }
            }
            step => step,
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::fault_injection::*;

    #[test]
    fn each_injected_fault_affects_only_its_operations() {
        let read = Step::Read { at: 0, skip: 0, len: 8192 };
        let write = Step::Write { at: 0, skip: 0, len: 8192, durable: false };
        let steps = [read, write, Step::Sync];
        let (go, wait) = (Verdict::Go, Verdict::Wait);
        let (eio, enospc) = (Verdict::Fail(libc::EIO), Verdict::Fail(libc::ENOSPC));
        for (fault, verdicts) in InjectedFault::ALL.into_iter().zip([
            [go, go, go],
            [wait, wait, wait],
            [wait, wait, wait],
            [eio, eio, eio],
            [go, enospc, go],
            [go, go, eio],
            [go, go, go],
        ]) {
            assert_eq!(steps.map(|step| fault.verdict(step, 0)), verdicts, "{fault}");
            assert_eq!(InjectedFault::from_number(fault as u8), fault);
        }
        assert_eq!(InjectedFault::Slow.verdict(read, 1), go, "once");
        assert_eq!(InjectedFault::Stall.verdict(read, 200), wait, "as long as it lasts");
        assert_eq!(InjectedFault::Short.cut(read, 512), Step::Read { at: 0, skip: 0, len: 512 });
        assert_eq!(
            (InjectedFault::None.cut(write, 512), InjectedFault::Short.cut(Step::Sync, 512)),
            (write, Step::Sync)
        );
    }
}
