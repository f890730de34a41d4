//! Tests the model against a simulated device that executes operations in any order between
//! submission and completion: a correct device is never reported, and each seeded bug is found.

use std::collections::HashSet;

use crate::rng::Random;
use crate::verify::model::*;
use crate::verify::{CandidateState, Kind as Found};

const BLOCK: usize = 512;
const BLOCKS: u64 = 24;
const FIRST: u64 = 1000;
const RUN: u64 = 0x5EED_0000_0000_0001;

type Block = Vec<u8>;

/// A device with a volatile cache.
struct Disk {
    /// Contents that reads return.
    cache: Vec<Block>,
    /// Possible contents after a loss of power: the durable one, then every later one.
    history: Vec<Vec<Block>>,
}

enum What {
    Write { data: Vec<u8>, durable: bool },
    Trim { keep: bool },
    Read { data: Vec<u8> },
    Flush,
}

/// A command in flight. `left`: the blocks that it has not processed.
struct Job {
    op: Option<Op>,
    what: What,
    first: u64,
    left: Vec<u64>,
}

struct World {
    model: Model,
    disk: Disk,
    jobs: Vec<Job>,
    random: Random,
    violations: Vec<Violation>,
}

impl Disk {
    fn new(random: &mut Random) -> Disk {
        // Old data, among them stamps of another run.
        let block = |i: u64| match random.below(3) {
            0 => vec![0; BLOCK],
            1 => vec![0xA5; BLOCK],
            _ => {
                let mut block = vec![0; BLOCK];
                let (lba, run) = (FIRST + i, 99);
                Stamp { run, sequence: 1, lba, client: 0, generation: 1 }.fill(&mut block);
                block
            }
        };
        let cache: Vec<Block> = (0..BLOCKS).map(block).collect();
        let history = cache.iter().map(|block| vec![block.clone()]).collect();
        Disk { cache, history }
    }

    fn put(&mut self, i: u64, block: &[u8], durable: bool) {
        let i = i as usize;
        self.cache[i] = block.to_vec();
        if durable {
            self.history[i].clear();
        }
        self.history[i].push(block.to_vec());
    }

    fn persist(&mut self, i: u64) {
        let i = i as usize;
        self.history[i] = vec![self.cache[i].clone()];
    }

    fn lose_power(&mut self, random: &mut Random) {
        for (block, history) in self.cache.iter_mut().zip(&mut self.history) {
            *block = history[random.below(history.len() as u64) as usize].clone();
            *history = vec![block.clone()];
        }
    }
}

impl World {
    fn new(seed: u64) -> World {
        let mut random = Random::new(seed);
        let shape = Shape { first_lba: FIRST, blocks: BLOCKS, block_bytes: BLOCK as u32, run: RUN };
        let disk = Disk::new(&mut random);
        let (jobs, violations) = (Vec::new(), Vec::new());
        World { model: Model::new(shape), disk, jobs, random, violations }
    }

    fn range(&mut self) -> (u64, u64) {
        let blocks = 1 + self.random.below(6);
        (self.random.below(BLOCKS - blocks + 1), blocks)
    }

    fn submit(&mut self) {
        let (first, blocks) = self.range();
        match self.random.below(20) {
            0..8 => self.write(first, blocks),
            8..15 => self.read(first, blocks),
            15 => self.flush(),
            16..18 => self.trim(first, blocks, Change::Zeros),
            18 => self.trim(first, blocks, Change::Deallocate { sure: true }),
            _ => self.trim(first, blocks, Change::Deallocate { sure: false }),
        }
    }

    fn write(&mut self, first: u64, blocks: u64) {
        let lbas = FIRST + first..FIRST + first + blocks;
        let durable = self.random.percent(10);
        let client = self.random.below(3) as u16;
        let op = self.model.write(client, lbas, Change::Data, durable);
        let mut data = vec![0; BLOCK * blocks as usize];
        self.model.fill(&op, &mut data);
        self.job(op, What::Write { data, durable }, first, blocks);
    }

    fn trim(&mut self, first: u64, blocks: u64, change: Change) {
        let keep = change == Change::Deallocate { sure: false } && self.random.percent(50);
        let lbas = FIRST + first..FIRST + first + blocks;
        let op = self.model.write(0, lbas, change, false);
        self.job(op, What::Trim { keep }, first, blocks);
    }

    fn read(&mut self, first: u64, blocks: u64) {
        let op = self.model.read(FIRST + first..FIRST + first + blocks);
        let data = vec![0xDD; BLOCK * blocks as usize];
        self.job(op, What::Read { data }, first, blocks);
    }

    fn flush(&mut self) {
        let op = self.model.flush();
        self.job(op, What::Flush, 0, BLOCKS);
    }

    fn job(&mut self, op: Op, what: What, first: u64, blocks: u64) {
        let left = (first..first + blocks).collect();
        self.jobs.push(Job { op: Some(op), what, first, left });
    }

    /// A random command processes one of its blocks, or is completed.
    fn act(&mut self) {
        if self.jobs.is_empty() {
            return;
        }
        let n = self.random.below(self.jobs.len() as u64) as usize;
        let job = &mut self.jobs[n];
        if job.left.is_empty() {
            let job = self.jobs.swap_remove(n);
            self.answer(job);
            return;
        }
        let i = job.left.swap_remove(self.random.below(job.left.len() as u64) as usize);
        let at = (i - job.first) as usize * BLOCK;
        match &mut job.what {
            What::Write { data, durable } => self.disk.put(i, &data[at..at + BLOCK], *durable),
            What::Trim { keep: true } => {}
            What::Trim { keep: false } => self.disk.put(i, &[0; BLOCK], false),
            What::Read { data } => {
                data[at..at + BLOCK].copy_from_slice(&self.disk.cache[i as usize]);
            }
            What::Flush => self.disk.persist(i),
        }
    }

    fn answer(&mut self, mut job: Job) {
        let op = job.op.take().expect("answered once");
        match job.what {
            What::Read { data } => self.violations.extend(self.model.check(op, &data)),
            _ => self.model.done(op),
        }
    }

    /// All commands are completed.
    fn drain(&mut self) {
        while !self.jobs.is_empty() {
            self.act();
        }
    }

    /// The association fails: some commands were executed, some not, some in part.
    fn die(&mut self) {
        for mut job in std::mem::take(&mut self.jobs) {
            let op = job.op.take().expect("answered once");
            self.model.lost(op);
            // A lost flush may have had no effect, or its full effect.
            if !matches!(job.what, What::Read { .. }) {
                self.jobs.push(job);
            }
        }
    }

    /// Lost commands are executed for a while, or never.
    fn land(&mut self) {
        for _ in 0..self.random.below(40) {
            let unfinished = |job: &Job| !job.left.is_empty();
            self.jobs.retain(unfinished);
            self.act();
        }
        self.jobs.clear();
    }

    fn sweep(&mut self) {
        self.read(0, BLOCKS);
        self.drain();
    }

    fn run(&mut self, steps: u64) {
        for _ in 0..steps {
            if self.jobs.len() < 12 && self.random.percent(30) {
                self.submit();
            } else {
                self.act();
            }
        }
    }

    /// Returns a block whose content is exactly known to the model, without outstanding writes.
    fn known_block(&mut self) -> u64 {
        self.drain();
        self.sweep();
        self.write(3, 4);
        self.drain();
        3 + self.random.below(4)
    }

    fn found(&self) -> HashSet<Found> {
        self.violations.iter().map(|violation| violation.kind).collect()
    }

    fn assert_clean(&self, seed: u64) {
        let told: String = self.violations.iter().map(ToString::to_string).collect();
        assert!(self.violations.is_empty(), "seed {seed}: an honest disk is accused:\n{told}");
    }
}

#[test]
fn a_correct_device_causes_no_violation() {
    let mut settled_by_reads = 0;
    for seed in 0..400 {
        let mut world = World::new(seed);
        for _ in 0..4 {
            world.run(300);
            match world.random.below(5) {
                0 => world.drain(),
                1 => {
                    // Lost commands are executed while others are outstanding, until their end is certain.
                    world.die();
                    let zombies = std::mem::take(&mut world.jobs);
                    for zombie in zombies {
                        world.submit();
                        world.jobs.push(zombie);
                        // Nobody waits for it.
                        for _ in 0..20 {
                            world.jobs.retain(|job| job.op.is_some() || !job.left.is_empty());
                            world.act();
                        }
                        world.jobs.retain(|job| job.op.is_some());
                    }
                    world.model.settle();
                }
                2 => {
                    world.die();
                    world.land();
                    world.model.settle();
                }
                3 => {
                    world.die();
                    world.land();
                    world.disk.lose_power(&mut world.random);
                    world.model.crash();
                }
                _ => {}
            }
        }
        world.drain();
        world.sweep();
        world.assert_clean(seed);
        for lba in FIRST..FIRST + BLOCKS {
            let expected = world.model.expected(lba);
            assert_eq!(expected.len(), 1, "seed {seed}: a sweep settles LBA {lba}: {expected:?}");
            settled_by_reads += 1;
        }
        assert_eq!(world.model.counts().violations, 0);
    }
    assert_eq!(settled_by_reads, 400 * BLOCKS);
}

/// Injects a fault after random operations; it must be detected, and classified correctly.
fn plant(names: &[Found], mut fault: impl FnMut(&mut World, u64)) {
    for seed in 0..200 {
        let mut world = World::new(seed);
        world.run(200 + seed);
        let i = world.known_block();
        world.assert_clean(seed);
        fault(&mut world, i);
        world.drain();
        world.sweep();
        let found = world.found();
        assert!(!found.is_empty(), "seed {seed}: the fault was not found");
        let told: String = world.violations.iter().map(ToString::to_string).collect();
        assert!(found.iter().all(|kind| names.contains(kind)), "seed {seed}: {found:?}\n{told}");
    }
}

fn write_one(world: &mut World, i: u64) -> Vec<u8> {
    let op = world.model.write(0, FIRST + i..FIRST + i + 1, Change::Data, false);
    let mut data = vec![0; BLOCK];
    world.model.fill(&op, &mut data);
    world.model.done(op);
    data
}

#[test]
fn a_lost_write_is_found() {
    plant(&[Found::Stale], |world, i| {
        let _ = write_one(world, i);
    });
}

#[test]
fn a_lost_write_of_zeros_is_found() {
    for change in [Change::Zeros, Change::Deallocate { sure: true }] {
        plant(&[Found::Stale], |world, i| {
            let op = world.model.write(0, FIRST + i..FIRST + i + 1, change, false);
            world.model.done(op);
        });
    }
}

#[test]
fn zeros_that_no_client_wrote_are_found() {
    plant(&[Found::Zeros], |world, i| world.disk.put(i, &[0; BLOCK], false));
}

#[test]
fn a_stale_read_is_found() {
    plant(&[Found::Stale], |world, i| {
        let stale = world.disk.cache[i as usize].clone();
        let fresh = write_one(world, i);
        world.disk.put(i, &fresh, false);
        let op = world.model.read(FIRST + i..FIRST + i + 1);
        world.violations.extend(world.model.check(op, &stale));
    });
}

#[test]
fn a_write_applied_after_its_completion_is_found() {
    plant(&[Found::Stale], |world, i| {
        let late = write_one(world, i);
        world.read(i, 1);
        world.drain();
        world.disk.put(i, &late, false);
    });
}

#[test]
fn a_superseded_value_that_returns_is_found() {
    plant(&[Found::Stale], |world, i| {
        // Two concurrent writes: either may win, but the winner is retained.
        let lbas = FIRST + i..FIRST + i + 1;
        let ops = [0, 1].map(|client| world.model.write(client, lbas.clone(), Change::Data, false));
        let [a, b] = ops.map(|op| {
            let mut data = vec![0; BLOCK];
            world.model.fill(&op, &mut data);
            world.model.done(op);
            data
        });
        world.disk.put(i, &b, false);
        world.sweep();
        assert!(world.violations.is_empty(), "either may win");
        world.disk.put(i, &a, false);
    });
}

#[test]
fn a_torn_block_is_found() {
    plant(&[Found::Torn], |world, i| {
        let fresh = write_one(world, i);
        let cut = 64 * (1 + world.random.below(7) as usize);
        let mut torn = world.disk.cache[i as usize].clone();
        if world.random.percent(50) {
            torn[..cut].copy_from_slice(&fresh[..cut]);
        } else {
            torn[cut..].copy_from_slice(&fresh[cut..]);
        }
        world.disk.put(i, &torn, false);
    });
}

#[test]
fn a_misplaced_block_is_found() {
    plant(&[Found::Misplaced, Found::Stale], |world, i| {
        let fresh = write_one(world, i);
        let mut elsewhere = world.random.below(BLOCKS - 1);
        elsewhere += u64::from(elsewhere >= i);
        world.disk.put(elsewhere, &fresh, false);
        world.sweep();
        let kinds = world.found();
        assert_eq!(kinds, HashSet::from([Found::Misplaced, Found::Stale]), "both blocks");
    });
}

#[test]
fn blocks_of_one_write_in_the_wrong_order_are_found() {
    plant(&[Found::Misplaced], |world, _| {
        world.write(3, 2);
        world.drain();
        world.disk.cache.swap(3, 4);
    });
}

#[test]
fn a_failed_write_leaves_old_or_new_data_permanently() {
    for landed in [false, true] {
        let mut world = World::new(7);
        let old = write_one(&mut world, 2);
        world.disk.put(2, &old, false);
        let op = world.model.write(0, FIRST + 2..FIRST + 3, Change::Data, true);
        let mut new = vec![0; BLOCK];
        world.model.fill(&op, &mut new);
        world.model.failed(op);
        assert_eq!(world.model.counts().failed, 1);
        let (now, other) = if landed { (&new, &old) } else { (&old, &new) };
        world.disk.put(2, now, false);
        world.sweep();
        assert!(world.violations.is_empty(), "landed: {landed}");
        world.disk.put(2, other, false);
        world.sweep();
        assert_eq!(world.found(), HashSet::from([Found::Stale]), "landed: {landed}");
    }
}

#[test]
fn a_flipped_bit_is_found() {
    plant(&[Found::Damaged], |world, i| {
        let bit = world.random.below(BLOCK as u64 * 8) as usize;
        let mut block = world.disk.cache[i as usize].clone();
        block[bit / 8] ^= 1 << (bit % 8);
        world.disk.put(i, &block, false);
    });
}

#[test]
fn a_trim_that_clears_a_neighbouring_block_is_found() {
    plant(&[Found::Zeros], |world, _| {
        world.trim(3, 2, Change::Zeros);
        world.drain();
        world.disk.put(5, &[0; BLOCK], false);
    });
}

#[test]
fn changes_of_never_written_blocks_are_found() {
    let mut world = World::new(1);
    world.sweep();
    world.sweep();
    assert!(world.violations.is_empty());
    world.disk.put(7, &[0x11; BLOCK], false);
    world.sweep();
    assert_eq!(world.found(), HashSet::from([Found::Changed]));
}

#[test]
fn a_flush_that_does_nothing_is_found_after_a_crash() {
    plant(&[Found::Stale], |world, i| {
        // The contents after a power loss are as old as possible.
        let old = world.disk.cache[i as usize].clone();
        let fresh = write_one(world, i);
        world.disk.put(i, &fresh, false);
        let op = world.model.flush();
        world.model.done(op);
        world.disk.cache[i as usize] = old;
        world.model.crash();
    });
}

#[test]
fn zeros_older_than_the_durable_data_are_found_after_a_crash() {
    plant(&[Found::Zeros], |world, i| {
        let op = world.model.write(0, FIRST + i..FIRST + i + 1, Change::Zeros, false);
        world.model.done(op);
        let fresh = write_one(world, i);
        world.disk.put(i, &fresh, false);
        let op = world.model.flush();
        world.model.done(op);
        // Not the newest value, so that data can be lost.
        let _ = write_one(world, i);
        world.model.crash();
        world.disk.put(i, &[0; BLOCK], false);
    });
}

#[test]
fn an_ignored_fua_is_found_after_a_crash() {
    plant(&[Found::Stale], |world, i| {
        let old = world.disk.cache[i as usize].clone();
        let op = world.model.write(0, FIRST + i..FIRST + i + 1, Change::Data, true);
        world.model.done(op);
        world.disk.cache[i as usize] = old;
        world.model.crash();
    });
}

#[test]
fn a_flush_that_overtakes_a_write_is_found_after_a_crash() {
    plant(&[Found::Stale], |world, i| {
        let old = world.disk.cache[i as usize].clone();
        // Completed before the flush was submitted, so the flush applies to it: also if the flush
        // is completed long after others have been submitted.
        let first = write_one(world, i);
        let flush = world.model.flush();
        let second = world.model.write(0, FIRST + i..FIRST + i + 1, Change::Data, false);
        let mut data = vec![0; BLOCK];
        world.model.fill(&second, &mut data);
        world.model.done(second);
        world.model.done(flush);
        world.model.crash();
        for survivor in [first, data] {
            let mut model = World::new(0).model;
            std::mem::swap(&mut model, &mut world.model);
            // Either may be the final value: tested on a copy, which is the saved state.
            let records: Vec<_> = (0..BLOCKS as usize).map(|i| (i, model.record(i))).collect();
            let clock = model.clock();
            let mut copy = Model::new(model.shape());
            copy.restore(clock, records.into_iter());
            let op = copy.read(FIRST + i..FIRST + i + 1);
            assert_eq!(copy.check(op, &survivor), []);
            std::mem::swap(&mut model, &mut world.model);
        }
        world.disk.cache[i as usize] = old;
    });
}

/// The contents of unflushed writes after a crash are not known, but their blocks are.
#[test]
fn a_misplaced_block_is_found_after_a_crash() {
    plant(&[Found::Misplaced], |world, i| {
        let _ = write_one(world, i);
        let data = write_one(world, (i + 1) % BLOCKS);
        world.model.crash();
        world.disk.cache[i as usize] = data;
    });
}

#[test]
fn unflushed_writes_may_vanish_in_a_crash_and_only_then() {
    let mut world = World::new(3);
    world.sweep();
    let old = world.disk.cache[5].clone();
    let _ = write_one(&mut world, 5);
    world.model.crash();
    world.sweep();
    assert!(world.violations.is_empty(), "a crash excuses it");
    assert_eq!(world.disk.cache[5], old);

    let _ = write_one(&mut world, 5);
    world.model.settle();
    world.sweep();
    assert_eq!(world.violations.len(), 1, "the end of a process does not");
}

#[test]
fn writes_of_an_ended_association_may_be_applied_until_settled() {
    let mut world = World::new(4);
    let op = world.model.write(0, FIRST..FIRST + 1, Change::Data, false);
    let mut zombie = vec![0; BLOCK];
    world.model.fill(&op, &mut zombie);
    world.model.lost(op);
    let fresh = write_one(&mut world, 0);
    for block in [&fresh, &zombie, &fresh] {
        world.disk.put(0, block, false);
        world.sweep();
    }
    assert!(world.violations.is_empty(), "it may land at any time");
    assert_eq!(world.model.expected(FIRST).len(), 2);
    world.model.settle();
    world.sweep();
    assert_eq!(world.model.expected(FIRST).len(), 1);
    world.disk.put(0, &zombie, false);
    world.sweep();
    assert_eq!(world.found(), HashSet::from([Found::Stale]), "but not after that");
}

#[test]
fn violations_report_found_and_expected_data() {
    let mut world = World::new(5);
    let old = write_one(&mut world, 9);
    world.disk.put(9, &old, false);
    let op = world.model.flush();
    world.model.done(op);
    let fresh = write_one(&mut world, 9);
    let open = world.model.write(2, FIRST + 9..FIRST + 10, Change::Data, false);
    world.sweep();
    let told = world.violations[0].to_string();
    for part in [
        "LBA 1009: an older value: a write is lost, or the read is stale\n",
        "found     write 1 of client 0 to LBA 1009 (its generation 1, run 5eed000000000001)\n",
        "expected  write 7 of client 2 (generation 3), in flight\n",
        "or        write 5 of client 0 (generation 2), not flushed\n",
        "the first difference, from byte 16:\n",
        &format!("found     {:02x}", old[16]),
    ] {
        assert!(told.contains(part), "{part:?} in\n{told}");
    }
    let expected = world.model.expected(FIRST + 9);
    assert_eq!(expected.last().map(|it| it.standing), Some(CandidateState::Settled));
    world.model.lost(open);
    world.disk.put(9, &fresh, false);
}

#[test]
fn memory_stays_bounded_while_reads_overlap_for_ever() {
    let mut world = World::new(6);
    let mut before = world.model.read(FIRST..FIRST + BLOCKS);
    let data: Vec<u8> = world.disk.cache.concat();
    let mut most = 0;
    for n in 0..10_000u64 {
        // There is always an outstanding read, but none for long.
        if n % 50 == 0 {
            let next = world.model.read(FIRST..FIRST + BLOCKS);
            world.model.lost(std::mem::replace(&mut before, next));
        }
        let _ = write_one(&mut world, n % BLOCKS);
        most = most.max(world.model.memory_bytes());
    }
    assert!(most < 64 * 1024, "{most} bytes for {BLOCKS} blocks");
    assert_eq!(data.len(), BLOCK * BLOCKS as usize);
    world.model.lost(before);
}
