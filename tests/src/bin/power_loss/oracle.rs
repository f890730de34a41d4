//! Replays a log and compares the device after every entry with the acknowledged writes.

use std::collections::BTreeMap;
use std::io::{self, Read, Seek};

use initiator::rng::Random;
use initiator::verify::block_stamp::{Content, Stamp};

use crate::acks::{self, Ack, Extent};
use crate::log::{Entry, Log};

/// Bytes of a block that is stamped.
pub(crate) const BLOCK_BYTES: usize = 4096;
/// Maximum of losses that are reported in full.
const TOLD: usize = 10;

/// Layout of the device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Size of the device in bytes.
    pub(crate) store_bytes: u64,
    /// Run number of the load.
    pub(crate) run: u64,
}

/// Findings of a replay.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(crate) struct Found {
    /// Entries replayed.
    pub(crate) entries: u64,
    /// Flushes among them.
    pub(crate) flushes: u64,
    /// Writes with Force Unit Access among them.
    pub(crate) fua_writes: u64,
    /// Number of marks.
    pub(crate) acks: u64,
    /// Number of writes acknowledged by them.
    pub(crate) acknowledged_writes: u64,
    /// Simulated power failures with a part of the volatile writes lost.
    pub(crate) cuts: u64,
    /// Writes lost in these.
    pub(crate) dropped: u64,
    /// Blocks that did not contain what was acknowledged.
    pub(crate) lost: u64,
    /// Description of the first of them.
    pub(crate) told: Vec<String>,
}

/// Applies the data of an entry to an image. Data that the device took before those of another
/// entry for the same block, but logs later because the other one was written with Force Unit
/// Access, do not replace them.
pub(crate) fn apply(
    image: &mut [u8],
    entry: &Entry,
    run: u64,
    mut keeps: impl FnMut(usize) -> bool,
) {
    let start = entry.at_bytes as usize;
    if entry.discarded_bytes > 0 {
        let end = start.saturating_add(entry.discarded_bytes as usize).min(image.len());
        if let Some(range) = image.get_mut(start..end) {
            range.fill(0);
        }
        return;
    }
    let mut at = 0;
    while at < entry.data.len() {
        let to_boundary = BLOCK_BYTES - (start + at) % BLOCK_BYTES;
        let len = to_boundary.min(entry.data.len() - at);
        let Some(place) = image.get_mut(start + at..start + at + len) else { return };
        let new = &entry.data[at..at + len];
        if keeps((start + at) / BLOCK_BYTES) && !(len == BLOCK_BYTES && is_older(new, place, run)) {
            place.copy_from_slice(new);
        }
        at += len;
    }
}

fn is_older(new: &[u8], old: &[u8], run: u64) -> bool {
    match (stamp(new, run), stamp(old, run)) {
        (Some(new), Some(old)) => new.lba == old.lba && new.sequence < old.sequence,
        _ => false,
    }
}

/// Returns the stamp of a complete block of this run.
pub(crate) fn stamp(block: &[u8], run: u64) -> Option<Stamp> {
    // The magic number first: most blocks of a file system have none.
    if !block.starts_with(&initiator::verify::block_stamp::MAGIC) {
        return None;
    }
    match Stamp::read(block, run) {
        Content::Whole(stamp) if stamp.run == run => Some(stamp),
        _ => None,
    }
}

/// The oldest valid sequence number of each block.
#[derive(Clone, Debug, Default)]
pub(crate) struct Floors(BTreeMap<u64, u64>);

impl Floors {
    /// Applies a mark, and returns the blocks to check.
    pub(crate) fn raise(&mut self, ack: &Ack) -> Vec<u64> {
        let Ack::Extents(extents) = ack else { return Vec::new() };
        let mut raised = Vec::new();
        for &Extent { lba, blocks, sequence } in extents {
            for lba in lba..lba.saturating_add(u64::from(blocks)) {
                let floor = self.0.entry(lba).or_insert(0);
                if sequence > *floor {
                    *floor = sequence;
                    raised.push(lba);
                }
            }
        }
        raised
    }

    /// Whether this write of a block, or a later one, was acknowledged.
    pub(crate) fn reach(&self, lba: u64, sequence: u64) -> bool {
        self.0.get(&lba).is_some_and(|floor| *floor >= sequence)
    }

    /// Blocks with an acknowledged write.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = u64> {
        self.0.keys().copied()
    }

    /// Describes an invalid block.
    pub(crate) fn wrong(&self, lba: u64, block: &[u8], run: u64) -> Option<String> {
        let floor = *self.0.get(&lba)?;
        match Stamp::read(block, run) {
            Content::Whole(stamp) if stamp.run == run && stamp.lba == lba => {
                let lost = stamp.sequence < floor;
                lost.then(|| {
                    format!(
                        "block {lba}: write {floor} was acknowledged, {} is there",
                        stamp.sequence
                    )
                })
            }
            other => {
                Some(format!("block {lba}: write {floor} was acknowledged, there is {other:?}"))
            }
        }
    }
}

struct Replay {
    layout: Layout,
    image: Vec<u8>,
    floors: Floors,
    found: Found,
}

impl Replay {
    fn new(layout: Layout) -> Replay {
        let image = vec![0; layout.store_bytes as usize];
        Replay { layout, image, floors: Floors::default(), found: Found::default() }
    }

    fn take(&mut self, entry: &Entry) {
        apply(&mut self.image, entry, self.layout.run, |_| true);
        self.found.entries += 1;
        self.found.flushes += u64::from(entry.flush);
        if let Some(ack) = entry.mark.as_deref().and_then(acks::decode) {
            self.acknowledge(&ack);
        }
        let len = entry.data.len().max(entry.discarded_bytes as usize) as u64;
        let (start, end) = (entry.at_bytes, entry.at_bytes + len);
        self.found.fua_writes += u64::from(entry.fua);
        if start < self.layout.store_bytes && len > 0 {
            let last = (end - 1).min(self.layout.store_bytes - 1) / BLOCK_BYTES as u64;
            self.look(start / BLOCK_BYTES as u64..=last);
        }
    }

    fn acknowledge(&mut self, ack: &Ack) {
        self.found.acks += 1;
        if let Ack::Extents(extents) = ack {
            self.found.acknowledged_writes += extents.len() as u64;
        }
        let raised = self.floors.raise(ack);
        self.look(raised);
    }

    fn look(&mut self, lbas: impl IntoIterator<Item = u64>) {
        for lba in lbas {
            let start = lba as usize * BLOCK_BYTES;
            let block = &self.image[start..start + BLOCK_BYTES];
            if let Some(wrong) = self.floors.wrong(lba, block, self.layout.run) {
                self.found.lost += 1;
                if self.found.told.len() < TOLD {
                    self.found.told.push(format!("after entry {}: {wrong}", self.found.entries));
                }
            }
        }
    }

    /// Simulates a power failure before a flush completes: each volatile block is lost or not.
    fn cut(&mut self, durable: &[u8], volatile: &[Entry], random: &mut Random) {
        let now = std::mem::replace(&mut self.image, durable.to_vec());
        let mut dropped = 0;
        for entry in volatile {
            let run = self.layout.run;
            apply(&mut self.image, entry, run, |_| {
                let keeps = entry.fua || random.percent(50);
                dropped += u64::from(!keeps);
                keeps
            });
        }
        self.found.cuts += 1;
        self.found.dropped += dropped;
        let all: Vec<u64> = self.floors.blocks().collect();
        self.look(all);
        self.image = now;
    }
}

/// Replays a log of a block device. `cut_every`: a power failure before every n-th flush; 0: none.
///
/// # Errors
/// The log is damaged.
pub(crate) fn replay<R: Read + Seek>(
    log: &mut Log<R>,
    layout: Layout,
    cut_every: u64,
    random: &mut Random,
) -> io::Result<Found> {
    let mut replay = Replay::new(layout);
    let (mut durable, mut volatile) = (replay.image.clone(), Vec::new());
    let mut barriers = 0;
    while let Some(entry) = log.next_entry()? {
        if cut_every > 0 && entry.flush {
            let news = volatile.iter().any(|entry: &Entry| !entry.fua);
            barriers += u64::from(news);
            if news && barriers % cut_every == 0 {
                replay.cut(&durable, &volatile, random);
            }
        }
        replay.take(&entry);
        if cut_every > 0 {
            let ends = entry.flush;
            volatile.push(entry);
            if ends {
                for entry in volatile.drain(..) {
                    apply(&mut durable, &entry, layout.run, |_| true);
                }
            }
        }
    }
    let all: Vec<u64> = replay.floors.blocks().collect();
    replay.look(all);
    Ok(replay.found)
}

#[cfg(test)]
mod tests {
    use crate::log::tests::{A_FLUSH, A_FUA, A_MARK, NONE, log_of};
    use crate::oracle::*;

    const LAYOUT: Layout = Layout { store_bytes: 1 << 16, run: 7 };

    fn block(lba: u64, sequence: u64) -> Vec<u8> {
        let mut block = vec![0; BLOCK_BYTES];
        Stamp { run: 7, sequence, lba, client: 0, generation: 1 }.fill(&mut block);
        block
    }

    fn write(lba: u64, sequence: u64, flags: u64) -> (u64, Vec<u8>, u64) {
        (lba * 8, block(lba, sequence), flags)
    }

    fn ack(lba: u64, sequence: u64) -> (u64, Vec<u8>, u64) {
        (0, format!("x={lba}+1@{sequence}").into_bytes(), A_MARK)
    }

    fn found(entries: &[(u64, Vec<u8>, u64)], cut_every: u64) -> Found {
        replay(&mut log_of(entries), LAYOUT, cut_every, &mut Random::new(1)).expect("a log")
    }

    #[test]
    fn writes_flushed_before_their_acknowledgement_are_no_loss() {
        let flush = (0, Vec::new(), A_FLUSH);
        let log =
            [write(3, 1, NONE), flush.clone(), ack(3, 1), write(3, 2, A_FUA), ack(3, 2), flush];
        let found = found(&log, 1);
        assert_eq!(
            (found.lost, found.flushes, found.fua_writes, found.acks),
            (0, 2, 1, 2),
            "{found:?}"
        );
    }

    #[test]
    fn an_acknowledgement_before_the_flush_is_a_loss() {
        let log = [ack(3, 1), write(3, 1, NONE), (0, Vec::new(), A_FLUSH)];
        assert_eq!(found(&log, 0).lost, 1);
    }

    #[test]
    fn stale_cache_writes_are_ignored_and_zeroed_blocks_are_losses() {
        let log = [write(3, 2, A_FUA), ack(3, 2), write(3, 1, NONE), (0, Vec::new(), A_FLUSH)];
        assert_eq!(found(&log, 0).lost, 0);
        let log = [write(3, 2, A_FUA), ack(3, 2), write(3, 9, NONE), (24, vec![0; 4096], NONE)];
        assert_eq!(found(&log, 0).lost, 2, "zeros in its place, seen at once and at the end");
    }

    #[test]
    fn power_cuts_lose_only_unacknowledged_writes() {
        let flush = || (0, Vec::new(), A_FLUSH);
        let mut log = Vec::new();
        for n in 0..8 {
            log.extend([write(n, 1, NONE), flush(), ack(n, 1), write(n, 2, NONE)]);
        }
        log.push(flush());
        let found = found(&log, 1);
        assert_eq!(found.lost, 0, "{found:?}");
        assert!(found.cuts == 9 && found.dropped > 0, "{found:?}");
    }
}
