//! Oracle for visibility: the namespaces that a host sees, and their sizes, as set by the
//! administrator. Written from the specifications, not from the implementation.
//!
//! A command that was sent after the last change, and was answered before the next, saw one state:
//! commands for a missing namespace, or beyond the end, must fail, and no others for that reason.

use nvme::Status;
use nvme::identify::IdentifyNamespace;

use super::blocks::Moment;
use crate::sim::workload::command::Op;

/// State of the oracle for visibility.
#[derive(Debug)]
pub struct Scope {
    /// For each host and namespace whether it is visible, and since when.
    there: Vec<Vec<(bool, Moment)>>,
    /// For each namespace its blocks, and since when.
    sizes: Vec<(u32, Moment)>,
    /// For each namespace its NGUID, since when, and the one before.
    names: Vec<([u8; 16], Moment)>,
}

impl Scope {
    /// All visible, for this number of hosts, and of these sizes.
    pub fn new(hosts: usize, blocks: &[u32]) -> Scope {
        Scope {
            there: vec![vec![(true, 0); blocks.len()]; hosts],
            sizes: blocks.iter().map(|blocks| (*blocks, 0)).collect(),
            names: (0..blocks.len()).map(|space| (name(space, 0), 0)).collect(),
        }
    }

    /// Sets the visibility of a namespace for a host; returns false if nothing changes.
    pub fn set_there(&mut self, host: usize, space: usize, there: bool, now: Moment) -> bool {
        let (was, since) = &mut self.there[host][space];
        if *was == there {
            return false;
        }
        (*was, *since) = (there, now);
        true
    }

    /// Sets the size of a namespace; returns false if nothing changes.
    pub fn set_size(&mut self, space: usize, blocks: u32, now: Moment) -> bool {
        let (was, since) = &mut self.sizes[space];
        if *was == blocks {
            return false;
        }
        (*was, *since) = (blocks, now);
        true
    }

    /// Sets the identity of a namespace.
    pub fn set_name(&mut self, space: usize, name: [u8; 16], now: Moment) {
        self.names[space] = (name, now);
    }

    /// Checks the description of a namespace.
    ///
    /// # Errors
    /// It is invalid.
    pub fn check_identity(&self, op: &Op, page: &[u8]) -> Result<(), String> {
        let page = IdentifyNamespace::parse(page.first_chunk().ok_or("the page is short")?);
        let (name, since) = self.names[op.span.space];
        // The page of a missing one is all zeros.
        match since >= op.began || page.nsze == 0 || page.nguid == name {
            true => Ok(()),
            false => Err(format!("it is told as {:x?}, and is {name:x?}", page.nguid)),
        }
    }

    /// Whether a host sees a namespace.
    pub fn is_there(&self, host: usize, space: usize) -> bool {
        self.there[host][space].0
    }

    /// Whether the host does not see the namespace of a command, or did not for a while.
    pub fn is_absent(&self, op: &Op) -> bool {
        let (there, since) = self.there[op.host][op.span.space];
        !there || since > op.began
    }

    /// Checks the response to a command on blocks.
    ///
    /// # Errors
    /// It is invalid.
    pub fn check(&self, op: &Op, status: Status) -> Result<(), String> {
        if !op.is_for_blocks() {
            return Ok(());
        }
        let (there, since) = self.there[op.host][op.span.space];
        if since < op.began && !there && status.is_success() {
            return Err("it was carried out on a namespace that is not there".to_owned());
        }
        let (size, since) = self.sizes[op.span.space];
        let Some(end) = end(op).filter(|_| since < op.began) else { return Ok(()) };
        match (end > size, status.is_success(), status.is(Status::LBA_OUT_OF_RANGE)) {
            (true, true, _) => Err(format!("it was carried out beyond the end, which is {size}")),
            (false, _, true) => Err(format!("it was refused within the end, which is {size}")),
            _ => Ok(()),
        }
    }

    /// The size of the namespace of a command, if it did not change.
    pub fn size_of(&self, op: &Op) -> Option<u32> {
        let (size, since) = self.sizes[op.span.space];
        (since < op.began).then_some(size)
    }

    /// Whether this may explain a failed command; [`Scope::check`] is exact.
    pub fn excuses(&self, op: &Op, status: Status) -> bool {
        let (size, since) = self.sizes[op.span.space];
        let beyond = end(op).is_some_and(|end| end > size) || since >= op.began;
        self.is_absent(op) && status.is(Status::INVALID_NAMESPACE)
            || op.is_for_blocks() && beyond && status.is(Status::LBA_OUT_OF_RANGE)
    }
}

/// The identity of a namespace, with its first backing store or a later one.
pub fn name(space: usize, generation: u8) -> [u8; 16] {
    let mut name = [space as u8 + 1; 16];
    name[15] = name[15].wrapping_add(generation.wrapping_mul(16));
    name
}

/// The end of the blocks of a command, if it has any.
fn end(op: &Op) -> Option<u32> {
    let spans = op.changes().unwrap_or_default().iter().chain(op.reads());
    spans.map(|span| span.lba + span.blocks).max()
}

#[cfg(test)]
mod tests {
    use super::super::blocks::Span;
    use crate::sim::oracle::visibility::*;
    use crate::sim::workload::command::Kind;

    fn read(host: usize, lba: u32, began: Moment) -> Op {
        let span = Span { space: 1, lba, blocks: 2 };
        Op { kind: Kind::Read, host, id: 1, span, began, half: 0, shift: 0 }
    }

    #[test]
    fn only_hosts_that_cannot_see_a_namespace_must_be_refused() {
        let mut scope = Scope::new(2, &[8, 8]);
        assert!(scope.set_there(1, 1, false, 10) && !scope.set_there(1, 1, false, 11));
        let refused = Status::INVALID_NAMESPACE;
        assert!(scope.check(&read(1, 0, 11), Status::SUCCESS).is_err());
        assert!(scope.check(&read(1, 0, 9), Status::SUCCESS).is_ok(), "it was there");
        assert!(scope.check(&read(0, 0, 11), Status::SUCCESS).is_ok());
        assert!(scope.excuses(&read(1, 0, 11), refused) && scope.excuses(&read(1, 0, 9), refused));
        assert!(!scope.excuses(&read(0, 0, 11), refused));
        assert!(scope.set_there(1, 1, true, 20));
        assert!(
            scope.excuses(&read(1, 0, 19), refused) && !scope.excuses(&read(1, 0, 21), refused)
        );
    }

    #[test]
    fn only_lbas_beyond_the_end_must_be_refused() {
        let mut scope = Scope::new(1, &[8, 8]);
        let refused = Status::LBA_OUT_OF_RANGE;
        assert!(scope.set_size(1, 4, 10) && !scope.set_size(1, 4, 11));
        let (inside, outside) = (read(0, 2, 11), read(0, 3, 11));
        assert!(scope.check(&inside, Status::SUCCESS).is_ok());
        assert!(scope.check(&inside, refused).is_err() && !scope.excuses(&inside, refused));
        assert!(scope.check(&outside, Status::SUCCESS).is_err());
        assert!(scope.check(&outside, refused).is_ok() && scope.excuses(&outside, refused));
        assert!(scope.check(&read(0, 3, 9), Status::SUCCESS).is_ok(), "it was there");
        assert!(scope.excuses(&read(0, 2, 9), refused), "it may have been smaller for a while");
    }
}
