//! Fused commands behind writes of the same blocks that are outstanding: the loop of SPDK's `fused_ordering`.
//!
//! Commands of a queue have no order (NVMe Base Specification 2.0, "Command Ordering Requirements"), so the
//! Compare may find what was there before the writes. It must not where a write was answered before the pair
//! was complete.

use std::collections::BTreeSet;
use std::time::Duration;

use nvme::sqe::Flags;
use nvme::{Cqe, IoOpcode, Sgl, Sqe, Status};

use crate::fixture::{Got, Outcome, Queue, Random, World, pattern};
use crate::host::PATIENCE;

/// Writes outstanding before each pair, and bytes of each: too long for a capsule, as SPDK's.
const WRITES: usize = 8;
const WRITE_BYTES: u32 = 64 << 10;
/// Namespaces and the bytes of their blocks.
const NAMESPACES: [(u32, u32); 2] = [(1, 4096), (2, 512)];

/// One pair, and what its host had seen.
struct Pair {
    compare: Status,
    write: Status,
    /// Writes that were answered before the second half was sent.
    answered: usize,
    /// Writes that were answered before the Compare.
    before_compare: usize,
}

/// Findings of all pairs.
#[derive(Default)]
struct Findings {
    equal: u32,
    other: u32,
    first_answered: u32,
}

/// So many pairs, most of them over zeros that nothing but zeros is written to: all succeed. Before each
/// fourth the block is another; then the Compare may fail, unless a write was answered.
pub(crate) fn ordering(world: &mut World, seed: u64, pairs: u32) -> Outcome {
    let mut random = Random(seed);
    let admin = world.admin(1)?;
    let mut queue = world.io(admin.cntlid, 1)?;
    world.host.fill(0, &vec![0; WRITE_BYTES as usize]);
    for namespace in NAMESPACES {
        pair(world, &mut queue, namespace, WRITES)?;
    }
    let (mut zeros, mut changed) = (Findings::default(), Findings::default());
    for n in 0..pairs {
        let namespace = random.pick(&NAMESPACES);
        let is_changed = n % 4 == 3;
        if is_changed {
            change(world, &mut queue, namespace)?;
        }
        let awaited = if random.below(2) == 0 { 0 } else { 1 + random.below(WRITES as u64) };
        let pair = pair(world, &mut queue, namespace, awaited as usize)?;
        let findings = if is_changed { &mut changed } else { &mut zeros };
        findings
            .take(&pair, is_changed)
            .map_err(|why| format!("pair {n} of seed {seed}: {why}"))?;
        let found = block(world, &mut queue, namespace)?;
        if found.iter().any(|byte| *byte != 0) {
            return Err(format!(
                "pair {n} of seed {seed}: zeros were written, there is {found:02x?}"
            ));
        }
    }
    let equal = zeros.equal + zeros.other;
    world.tally.check(
        &format!("{equal} pairs behind writes of the same zeros"),
        zeros.other == 0,
        || format!("{} failed", zeros.other),
    );
    let Findings { equal, other, first_answered } = changed;
    let name = format!(
        "{} pairs behind writes to another block: {equal} found zeros, {other} the block from before the \
         writes, none of which was answered ({first_answered} of these before any write)",
        equal + other
    );
    world.tally.check(&name, equal > 0, || "no pair has found zeros".into());
    world.close([queue, admin]);
    Ok(())
}

impl Findings {
    fn take(&mut self, pair: &Pair, is_changed: bool) -> Outcome {
        let Pair { compare, write, answered, before_compare } = pair;
        let codes = (compare.code(), write.code());
        match codes {
            (0, 0) => self.equal += 1,
            // Compare Failure, and Command Aborted due to Failed Fused Command.
            (0x285, 0x009) if is_changed && *answered == 0 => {
                self.other += 1;
                self.first_answered += u32::from(*before_compare == 0);
            }
            (0x285, 0x009) => {
                return Err(format!("the Compare failed, {answered} writes were answered before"));
            }
            _ => return Err(format!("statuses {codes:03x?}")),
        }
        Ok(())
    }
}

fn half(opcode: IoOpcode, fuse: u8, (nsid, bytes): (u32, u32)) -> Vec<u8> {
    let sqe = Sqe::io(opcode, nsid).with_sgl(Sgl::in_capsule(0, bytes));
    let sqe = sqe.with_flags(Flags::SGL.with_fuse(fuse));
    [&sqe.emit()[..], &vec![0; bytes as usize]].concat()
}

/// Sends the writes and the first half, waits for the answers of as many writes as `awaited`, and sends the
/// second half.
fn pair(
    world: &mut World,
    queue: &mut Queue,
    (nsid, bytes): (u32, u32),
    awaited: usize,
) -> Result<Pair, String> {
    let nlb_z = (WRITE_BYTES / bytes - 1) as u16;
    let sgl = world.keyed(WRITE_BYTES);
    let sqe = Sqe::io(IoOpcode::WRITE, nsid).with_range(0, nlb_z).with_sgl(sgl).emit();
    let mut writes: BTreeSet<u16> = (0..WRITES).map(|_| world.tell(queue, &sqe)).collect();
    let first = world.tell(queue, &half(IoOpcode::COMPARE, Flags::FUSED_FIRST, (nsid, bytes)));
    while WRITES - writes.len() < awaited {
        let (cid, status) = answer(world, queue, PATIENCE)?.ok_or("no answer to a write")?;
        written(&mut writes, cid, status)?;
    }
    // What has arrived by now was answered before, too.
    while let Some((cid, status)) = answer(world, queue, Duration::ZERO)? {
        written(&mut writes, cid, status)?;
    }
    let answered = WRITES - writes.len();
    let second = world.tell(queue, &half(IoOpcode::WRITE, Flags::FUSED_SECOND, (nsid, bytes)));
    let (mut compare, mut write, mut before_compare) = (None, None, 0);
    while compare.is_none() || write.is_none() || !writes.is_empty() {
        let (cid, status) = answer(world, queue, PATIENCE)?.ok_or("no answer")?;
        if cid == first && compare.is_none() {
            before_compare = WRITES - writes.len();
            compare = Some(status);
        } else if cid == second && write.is_none() {
            write = Some(status);
        } else {
            written(&mut writes, cid, status)?;
        }
    }
    let (compare, write) = compare.zip(write).ok_or("no answer to a half")?;
    Ok(Pair { compare, write, answered, before_compare })
}

fn written(writes: &mut BTreeSet<u16>, cid: u16, status: Status) -> Outcome {
    match writes.remove(&cid) && status.is_success() {
        true => Ok(()),
        false => Err(format!("command {cid:#x} was answered with {status}")),
    }
}

fn answer(
    world: &mut World,
    queue: &Queue,
    limit: Duration,
) -> Result<Option<(u16, Status)>, String> {
    let Some(message) = world.host.message(queue.link, limit) else {
        return match world.host.end(queue.link) {
            Some(reason) => Err(format!("the connection has ended: {reason:?}")),
            None => Ok(None),
        };
    };
    let bytes = <[u8; 16]>::try_from(message).map_err(|other| format!("{other:02x?}"))?;
    let cqe = Cqe::parse(&bytes);
    Ok(Some((cqe.cid, cqe.status)))
}

/// Writes other bytes to the first block, and waits for the answer.
fn change(world: &mut World, queue: &mut Queue, (nsid, bytes): (u32, u32)) -> Outcome {
    let sqe = Sqe::io(IoOpcode::WRITE, nsid).with_sgl(Sgl::in_capsule(0, bytes));
    let cid = world.tell(queue, &[&sqe.emit()[..], &pattern(7, bytes as usize)].concat());
    expect_success(world, queue, cid)
}

fn block(
    world: &mut World,
    queue: &mut Queue,
    (nsid, bytes): (u32, u32),
) -> Result<Vec<u8>, String> {
    world.host.fill(0, &vec![0xEE; bytes as usize]);
    let cid = {
        let sqe = Sqe::io(IoOpcode::READ, nsid).with_sgl(world.keyed(bytes));
        world.tell(queue, &sqe.emit())
    };
    expect_success(world, queue, cid)?;
    let found = world.host.look(0, bytes);
    world.host.fill(0, &vec![0; bytes as usize]);
    Ok(found)
}

fn expect_success(world: &mut World, queue: &Queue, cid: u16) -> Outcome {
    match world.hear(queue, cid, PATIENCE) {
        Got::Answer { status, .. } if status.is_success() => Ok(()),
        got => Err(format!("{got:?}")),
    }
}
