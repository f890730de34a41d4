//! Media of one simulated device: the volatile contents, the durable contents, and the states
//! between.

use std::sync::Arc;

use nix::libc;
use nvmfd::blockdev::BackingDevice;
use nvmfd::blockdev::request::Step;
use rdma::soft::sim::Rng;
use rdma::{Buf, Region};

use super::Call;

/// A value of a block that is not durable.
#[derive(Debug)]
struct Version {
    /// When it took effect.
    order: u64,
    /// When its system call returned; `MAX` before.
    done: u64,
    /// The call that writes it.
    call: u64,
    bytes: Box<[u8]>,
}

#[derive(Debug)]
pub(super) struct Media {
    pub(super) backing: Arc<BackingDevice>,
    pub(super) block_bytes: u32,
    /// Contents as read.
    pub(super) live: Vec<u8>,
    /// Contents after a power failure.
    pub(super) durable: Vec<u8>,
    /// For each block the values that are not durable, oldest first.
    versions: Vec<Vec<Version>>,
    /// Blocks that may have versions.
    dirty: Vec<u32>,
    is_dirty: Vec<bool>,
    spare: Vec<Box<[u8]>>,
    pub(super) order: u64,
    /// It is being erased.
    pub(super) erasing: bool,
    /// An operation has failed since the oracle asked.
    pub(super) failed: bool,
    /// A sync has failed: changes that took effect until then never become durable.
    doomed: u64,
    /// The device is removed: it executes nothing.
    pub(super) removed: bool,
    /// What the present store replaces, and the rings that do not have the present one yet.
    pub(super) replaced: Option<(Arc<BackingDevice>, usize)>,
}

impl Media {
    pub(super) fn new(blocks: u32, block_bytes: u32) -> Media {
        let size = u64::from(blocks) * u64::from(block_bytes);
        let opened = BackingDevice::simulated(size, block_bytes);
        Media {
            backing: Arc::new(opened.expect("a store of a possible shape")),
            block_bytes,
            live: vec![0; size as usize],
            durable: vec![0; size as usize],
            versions: (0..blocks).map(|_| Vec::new()).collect(),
            dirty: Vec::new(),
            is_dirty: vec![false; blocks as usize],
            spare: Vec::new(),
            order: 0,
            erasing: false,
            failed: false,
            doomed: 0,
            removed: false,
            replaced: None,
        }
    }

    /// Lets bytes `from` to `to` of a call that changes data take effect.
    pub(super) fn apply(
        &mut self,
        number: u64,
        call: &Call,
        (buf, region): (Option<&Buf>, &Region),
        from: u64,
        to: u64,
    ) {
        let Some((at, _)) = call.changes() else { return };
        let block = u64::from(self.block_bytes);
        for skip in (from..to).step_by(block as usize) {
            let bytes = match (call.step, buf) {
                (Some(Step::Write { skip: done, .. }), Some(buf)) => {
                    Some(&region.bytes(buf)[(u64::from(done) + skip) as usize..][..block as usize])
                }
                _ => None,
            };
            self.set(number, ((at + skip) / block) as usize, bytes);
        }
    }

    /// Gives a block new contents, or zeros.
    fn set(&mut self, call: u64, lba: usize, bytes: Option<&[u8]>) {
        let block = self.block_bytes as usize;
        let into = &mut self.live[lba * block..(lba + 1) * block];
        match bytes {
            Some(bytes) => into.copy_from_slice(bytes),
            None => into.fill(0),
        }
        let mut bytes = self.spare.pop().unwrap_or_else(|| vec![0; block].into_boxed_slice());
        bytes.copy_from_slice(into);
        self.order += 1;
        if !std::mem::replace(&mut self.is_dirty[lba], true) {
            self.dirty.push(lba as u32);
        }
        self.versions[lba].push(Version { order: self.order, done: u64::MAX, call, bytes });
    }

    /// Zeros a range, as far as reads see.
    pub(super) fn erase(&mut self, from: u64, to: u64) {
        let block = u64::from(self.block_bytes);
        for lba in from / block..to / block {
            self.set(u64::MAX, lba as usize, None);
            if let Some(version) = self.versions[lba as usize].last_mut() {
                version.done = self.order;
            }
        }
    }

    /// Writes a range, as far as reads see.
    pub(super) fn land(&mut self, at: u64, bytes: &[u8]) {
        let block = u64::from(self.block_bytes);
        for (lba, bytes) in (at / block..).zip(bytes.chunks_exact(block as usize)) {
            self.set(u64::MAX, lba as usize, Some(bytes));
            if let Some(version) = self.versions[lba as usize].last_mut() {
                version.done = self.order;
            }
        }
    }

    /// Makes everything complete durable.
    pub(super) fn make_durable(&mut self) {
        self.order += 1;
        self.sync(self.order);
    }

    /// Sets the block size. No operation is in flight, and everything is durable, unless a seeded
    /// bug prevents that.
    pub(super) fn reformat(&mut self, block_bytes: u32) {
        if self.block_bytes == block_bytes {
            return;
        }
        let blocks = self.live.len() / block_bytes as usize;
        self.block_bytes = block_bytes;
        self.durable.copy_from_slice(&self.live);
        self.versions = (0..blocks).map(|_| Vec::new()).collect();
        self.is_dirty = vec![false; blocks];
        self.dirty.clear();
        self.spare.clear();
        self.backing.reformat(block_bytes);
    }

    /// Whether it has failed to make data durable, or is removed.
    pub(super) fn is_doomed(&self) -> bool {
        self.removed || self.backing.sync_failure().is_some()
    }

    /// A system call has returned.
    pub(super) fn returned(&mut self, number: u64, call: &Call) {
        self.order += 1;
        if let Some((at, _)) = call.changes() {
            let block = u64::from(self.block_bytes);
            let durable =
                matches!(call.step, Some(Step::Write { durable: true, .. })) && call.answer > 0;
            for lba in at / block..(at + call.effective) / block {
                let (order, versions) = (self.order, &mut self.versions[lba as usize]);
                let own = versions.iter_mut().position(|v| v.call == number && v.done == u64::MAX);
                let Some(own) = own else { continue };
                versions[own].done = order;
                if durable {
                    self.keep(lba as usize, own);
                }
            }
        }
        if call.step == Some(Step::Sync) {
            if call.answer == 0 {
                self.sync(call.since);
            } else if !matches!(-call.answer, libc::EINTR | libc::EAGAIN | libc::ECANCELED) {
                self.doomed = self.order;
            }
        }
    }

    /// Makes everything durable that was complete at `since`.
    fn sync(&mut self, since: u64) {
        let dirty = std::mem::take(&mut self.dirty);
        for lba in dirty {
            let doomed = self.doomed;
            let good = |v: &Version| v.done <= since && v.order > doomed;
            if let Some(last) = self.versions[lba as usize].iter().rposition(good) {
                self.keep(lba as usize, last);
            }
            match self.versions[lba as usize].is_empty() {
                true => self.is_dirty[lba as usize] = false,
                false => self.dirty.push(lba),
            }
        }
    }

    /// Makes one value of a block durable, and drops those before it.
    fn keep(&mut self, lba: usize, index: usize) {
        let block = self.block_bytes as usize;
        let into = &mut self.durable[lba * block..(lba + 1) * block];
        into.copy_from_slice(&self.versions[lba][index].bytes);
        self.spare.extend(self.versions[lba].drain(..=index).map(|version| version.bytes));
    }

    /// Each atomic part of a block gets one of the values that it had since it was last durable.
    fn settle(&mut self, lba: usize, atom_bytes: usize, dice: &mut Rng) {
        let block = self.block_bytes as usize;
        let into = &mut self.durable[lba * block..(lba + 1) * block];
        let versions = &self.versions[lba];
        for (atom, at) in into.chunks_mut(atom_bytes).zip((0..).step_by(atom_bytes)) {
            let count = dice.below(versions.len() as u64 + 1) as usize;
            if let Some(kept) = count.checked_sub(1) {
                atom.copy_from_slice(&versions[kept].bytes[at..at + atom.len()]);
            }
        }
    }

    /// What is not durable is lost, or a part of it.
    pub(super) fn lose_cache(&mut self, atom_bytes: u32, dice: &mut Rng) {
        let dirty = std::mem::take(&mut self.dirty);
        for lba in dirty {
            let lba = lba as usize;
            self.is_dirty[lba] = false;
            self.settle(lba, atom_bytes.min(self.block_bytes) as usize, dice);
            self.spare.extend(self.versions[lba].drain(..).map(|version| version.bytes));
        }
        self.live.copy_from_slice(&self.durable);
    }

    /// The target has crashed; at a power failure what is not durable is lost, or a part of it.
    pub(super) fn crash(&mut self, power: bool, atom_bytes: u32, dice: &mut Rng) {
        self.order += 1;
        self.erasing = false;
        (self.removed, self.replaced) = (false, None);
        if power {
            self.lose_cache(atom_bytes, dice);
            self.doomed = 0;
        } else {
            for lba in &self.dirty {
                for version in &mut self.versions[*lba as usize] {
                    version.done = version.done.min(self.order);
                }
            }
        }
        let opened = BackingDevice::simulated(self.live.len() as u64, self.block_bytes);
        self.backing = Arc::new(opened.expect("it was opened before"));
    }
}
