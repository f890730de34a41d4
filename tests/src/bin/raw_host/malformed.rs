//! Malformed traffic: capsules of impossible length, unknown keys, too many commands, and thousands
//! of random capsules, while another host must be served unaffected.

use std::collections::BTreeSet;
use std::time::Duration;

use nvme::fabrics::PropertyGet;
use nvme::identify::{Cns, Identify};
use nvme::property::Property;
use nvme::{AdminOpcode, Cqe, IoOpcode, Sgl, Sqe, cm};
use rdma::Remote;

use crate::fixture::{Got, Outcome, Queue, Random, Want, World, pattern};
use crate::host::PATIENCE;

/// The namespace and the blocks of the bystander, and its place in the window, which no other
/// command uses.
const NSID: u32 = 2;
const SLBA: u64 = 1024;
const BYTES: u32 = 4096;
const AT: u32 = 0x1C_0000;

/// Random commands use addresses below this; with the longest transfer they end before Connect
/// data.
const RANDOM_BYTES: u64 = 0x8_0000;

/// Time limit for unexpected responses.
const MORE: Duration = Duration::from_millis(3);

/// Another host of the same target, which must be served unaffected.
pub(crate) struct Bystander {
    admin: Queue,
    io: Queue,
    data: Vec<u8>,
    served: u32,
}

impl Bystander {
    pub(crate) fn new(world: &mut World) -> Result<Bystander, String> {
        let admin = world.admin(1)?;
        let mut io = world.io(admin.cntlid, 1)?;
        let data = pattern(99, BYTES as usize);
        world.host.fill(AT, &data);
        let got = world.ask_sqe(&mut io, &command(world, IoOpcode::WRITE));
        match got {
            Got::Answer { status, .. } if status.is_success() => {
                Ok(Bystander { admin, io, data, served: 0 })
            }
            got => Err(format!("the bystander's write: {got:?}")),
        }
    }

    /// Reads its blocks; an error if the data differ from those written.
    pub(crate) fn look(&mut self, world: &mut World) -> Outcome {
        world.host.fill(AT, &[0xEE; BYTES as usize]);
        let got = world.ask_sqe(&mut self.io, &command(world, IoOpcode::READ));
        let found = world.host.look(AT, BYTES);
        match got {
            Got::Answer { status, .. } if status.is_success() && found == self.data => {
                self.served += 1;
                Ok(())
            }
            got => Err(format!("the bystander's read: {got:?}, data {:02x?}..", &found[..16])),
        }
    }

    pub(crate) fn close(self, world: &mut World) {
        world.close([self.io, self.admin]);
    }
}

fn command(world: &World, opcode: IoOpcode) -> Sqe {
    let window = world.host.window();
    let sgl = Sgl::keyed(window.addr + u64::from(AT), BYTES, window.key, false);
    Sqe::io(opcode, NSID)
        .with_range(SLBA, (BYTES / 512 - 1) as u16)
        .with_sgl(sgl.unwrap_or(Sgl::NONE))
}

pub(crate) fn framing(world: &mut World) -> Outcome {
    let mut bystander = Bystander::new(world)?;
    let mut admin = world.admin(4)?;
    let identify = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096));
    world.ask_sqe(&mut admin, &identify);
    let capsule_bytes =
        u32::from_le_bytes(world.host.look(1792, 4).try_into().unwrap_or_default()) * 16;
    let flush = Sqe::io(IoOpcode::FLUSH, 1).emit();
    let long = |len: u32| [&flush[..], &vec![0x77; len as usize - 64]].concat();
    let cases = [
        ("of 0 bytes", Vec::new(), Want::Dropped),
        ("of 1 byte", flush[..1].to_vec(), Want::Dropped),
        ("of 63 bytes", flush[..63].to_vec(), Want::Dropped),
        ("as long as promised", long(capsule_bytes), Want::Done),
        ("one byte longer than promised", long(capsule_bytes + 1), Want::Dropped),
        ("twice as long as promised", long(capsule_bytes * 2), Want::Dropped),
    ];
    for (name, capsule, want) in cases {
        alone(world, admin.cntlid, name, &capsule, &want)?;
        bystander.look(world)?;
    }
    for (name, len) in [("of 63 bytes", 63), ("of 0 bytes", 0)] {
        let mut queue = world.admin(1)?;
        let got = world.ask(&mut queue, &identify.emit()[..len]);
        world.expect(&format!("admin, a capsule {name}"), &got, &Want::Dropped);
        world.close([queue]);
        let request = cm::Request { qid: 1, ..world.admin_attempt().request };
        let mut queue = world.open(request).map_err(|e| format!("{e:?}"))?;
        let got = world.ask(&mut queue, &flush[..len]);
        world.expect(&format!("before Connect, a capsule {name}"), &got, &Want::Dropped);
        world.close([queue]);
    }
    keys(world, &admin, &mut bystander)?;
    orphans(world)?;
    invalidation(world)?;
    flood(world, admin.cntlid, &mut bystander)?;
    same_id(world)?;
    let got = world.ask_sqe(&mut admin, &PropertyGet::new(Property::CSTS).emit());
    world.expect("the admin queue outlives all queues that were dropped", &got, &Want::Value(1));
    world.close([admin]);
    let outcome = bystander.look(world);
    bystander.close(world);
    outcome
}

/// One capsule on an I/O queue of its own.
fn alone(world: &mut World, cntlid: u16, name: &str, capsule: &[u8], want: &Want) -> Outcome {
    let mut queue = again(world, cntlid, 2)?;
    let got = world.ask(&mut queue, capsule);
    world.expect(&format!("I/O, a capsule {name}"), &got, want);
    world.close([queue]);
    Ok(())
}

/// Connects an I/O queue whose id may still belong to one that has just ended.
pub(crate) fn again(world: &mut World, cntlid: u16, qid: u16) -> Result<Queue, String> {
    let mut result = Err(String::new());
    for _ in 0..20 {
        result = world.io(cntlid, qid);
        match &result {
            Err(e) if e.contains("Command Sequence Error") => {}
            _ => break,
        }
    }
    result
}

fn keys(world: &mut World, admin: &Queue, bystander: &mut Bystander) -> Outcome {
    let window = world.host.window();
    let stale = world.host.stale(admin.link);
    let cases = [
        ("a key that nobody has", Remote { key: window.key ^ 0x5A5A_5A00, ..window }),
        ("a key that was taken back", stale),
        ("an address before the window", Remote { addr: window.addr - 4096, ..window }),
        (
            "an address whose end is behind the window",
            Remote { addr: window.addr + u64::from(window.len) - 4095, ..window },
        ),
        ("an address near 2^64", Remote { addr: u64::MAX - 4095, ..window }),
    ];
    for (name, Remote { addr, key, .. }) in cases {
        let sgl = Sgl::keyed(addr, 4096, key, false).unwrap_or(Sgl::NONE);
        for opcode in [IoOpcode::READ, IoOpcode::WRITE] {
            let capsule = Sqe::io(opcode, 1).with_sgl(sgl).emit();
            let what = format!("that is a {opcode} with {name}");
            alone(world, admin.cntlid, &what, &capsule, &Want::Dropped)?;
            bystander.look(world)?;
        }
    }
    Ok(())
}

/// The end of an admin queue ends its I/O queues.
fn orphans(world: &mut World) -> Outcome {
    let mut admin = world.admin(1)?;
    let io = world.io(admin.cntlid, 1)?;
    let bad = Sgl::keyed(0, 4096, 0x1234_5678, false).unwrap_or(Sgl::NONE);
    let got = world.ask_sqe(&mut admin, &Identify::new(Cns::CONTROLLER, 0).emit(bad));
    world.expect("admin, Identify with a key that nobody has", &got, &Want::Dropped);
    let ended = world.host.ends(io.link, PATIENCE);
    world.tally.check("and its I/O queue ends with it", ended, || "it lives".into());
    world.close([io, admin]);
    Ok(())
}

/// A key is invalidated if requested. All other commands show that it is not otherwise, because
/// they use one key.
fn invalidation(world: &mut World) -> Outcome {
    let mut admin = world.admin(1)?;
    let (exposed, remote) = world.host.spare(admin.link);
    let sgl =
        |invalidate| Sgl::keyed(remote.addr, 4096, remote.key, invalidate).unwrap_or(Sgl::NONE);
    let identify = Identify::new(Cns::CONTROLLER, 0);
    let got = world.ask_sqe(&mut admin, &identify.emit(sgl(false)));
    world.expect("invalidation, not asked for", &got, &Want::Done);
    let first = world.ask_sqe(&mut admin, &identify.emit(sgl(true)));
    if world.iwarp {
        // siw's library posts no Send with Invalidate, and a plain one is valid.
        world.expect("invalidation, asked for: answered", &first, &Want::Done);
    } else {
        // A device that cannot invalidate this kind of memory ends the connection immediately.
        let second = match first {
            Got::Answer { .. } => world.ask_sqe(&mut admin, &identify.emit(sgl(false))),
            _ => first,
        };
        let name = "invalidation, asked for: the key is not good any more";
        world.expect(name, &second, &Want::Dropped);
    }
    world.host.take_back(exposed);
    world.close([admin]);
    Ok(())
}

/// More commands at once than the queue has entries: they are served or the connection ends,
/// without a wrong response.
fn flood(world: &mut World, cntlid: u16, bystander: &mut Bystander) -> Outcome {
    for sqsize_z in [1, 3, 31] {
        let mut attempt = world.io_attempt(cntlid, 3);
        attempt.request.hsqsize_z = sqsize_z;
        attempt.connect.sqsize_z = sqsize_z;
        let (mut queue, got) = world.attempt(&attempt)?;
        world.expect(&format!("queue of {} entries", sqsize_z + 1), &got, &Want::Done);
        let read = Sqe::io(IoOpcode::READ, 1).with_sgl(world.keyed(4096)).emit();
        let cids: BTreeSet<u16> = (0..128).map(|_| world.tell(&mut queue, &read)).collect();
        let result = collect(world, &queue, cids, &BTreeSet::new(), MORE);
        bystander.look(world)?;
        let name = format!("128 commands at once on a queue of {} entries", sqsize_z + 1);
        world.tally.check(&name, result.is_ok(), || format!("{result:?}"));
        world.close([queue]);
    }
    Ok(())
}

/// The id of a pending Asynchronous Event Request: the new command replaces it, as SPDK's hosts
/// require.
fn same_id(world: &mut World) -> Outcome {
    let mut admin = world.admin(1)?;
    let cid = world.tell(&mut admin, &Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).emit());
    let second = PropertyGet::new(Property::VS).emit().with_cid(cid);
    world.repeat(&mut admin, &second.emit());
    let got = world.hear(&admin, cid, PATIENCE);
    world.expect("the id of an event request", &got, &Want::Done);
    world.close([admin]);
    Ok(())
}

/// Takes responses until every command of `owed` has one, and further ones until none arrives within
/// `more`, or the connection has ended. Each must be for a command of `owed` or of `held`, once.
/// Returns the number of responses, and whether the connection is alive.
fn collect(
    world: &mut World,
    queue: &Queue,
    mut owed: BTreeSet<u16>,
    held: &BTreeSet<u16>,
    more: Duration,
) -> Result<(usize, bool), String> {
    let mut held = held.clone();
    let mut answered = 0;
    loop {
        let limit = if owed.is_empty() { more } else { PATIENCE };
        let Some(message) = world.host.message(queue.link, limit) else {
            let ended = world.host.end(queue.link).is_some();
            return match owed.is_empty() || ended {
                true => Ok((answered, !ended)),
                false => Err(format!("no answer to {owed:x?}")),
            };
        };
        let bytes: [u8; 16] = message
            .try_into()
            .map_err(|other| format!("an answer of other length: {other:02x?}"))?;
        let cqe = Cqe::parse(&bytes);
        if !(owed.remove(&cqe.cid) || held.remove(&cqe.cid)) {
            return Err(format!("{cqe:?}, which nobody waits for"));
        }
        if cqe.sqid != queue.qid || bytes[14] & 1 != 0 {
            return Err(format!("{cqe:?} on queue {}", queue.qid));
        }
        answered += 1;
    }
}

/// Random capsules on admin and I/O queues, each answered at most once, with a bystander that is
/// served in between.
pub(crate) fn random(world: &mut World, seed: u64, capsules: u32) -> Outcome {
    println!("     seed {seed}, {capsules} capsules");
    let mut random = Random(seed);
    let mut bystander = Bystander::new(world)?;
    let (mut sent, mut answered, mut dropped) = (0, 0, 0);
    while sent < capsules {
        let on_admin = random.below(3) == 0;
        let admin = world.admin(1)?;
        let mut queues = vec![admin];
        if !on_admin {
            let io = world.io(queues[0].cntlid, 1)?;
            queues.insert(0, io);
        }
        let mut held = BTreeSet::new();
        for batch in 0..32 {
            let mut owed = BTreeSet::new();
            let mut log = Vec::new();
            for _ in 0..=random.below(8) {
                let capsule = capsule(&mut random, world.host.window(), on_admin);
                let cid = world.tell(&mut queues[0], &capsule);
                let event_request = on_admin && capsule.first() == Some(&0x0C);
                if event_request {
                    held.insert(cid)
                } else {
                    owed.insert(cid)
                };
                log.push((cid, capsule));
                sent += 1;
            }
            bystander.look(world).map_err(|e| format!("{e}, after {log:02x?}"))?;
            // The next batch finds unexpected responses as well.
            let more = if batch == 31 { MORE } else { Duration::ZERO };
            let outcome = collect(world, &queues[0], owed, &held, more);
            let (count, alive) = outcome.map_err(|e| format!("{e}, after {log:02x?}"))?;
            answered += count;
            if !alive {
                dropped += 1;
                break;
            }
        }
        world.close(queues);
    }
    let name = format!("{sent} random capsules: {answered} answered, {dropped} connections ended");
    world.tally.check(&name, answered > 0 && dropped > 0, || "nothing of one kind".into());
    bystander.look(world)?;
    let served = bystander.served;
    world.tally.check(&format!("a bystander was served {served} times"), served > 1, String::new);
    bystander.close(world);
    Ok(())
}

fn capsule(random: &mut Random, window: Remote, on_admin: bool) -> Vec<u8> {
    const ADMIN: [u8; 9] = [0x02, 0x06, 0x06, 0x08, 0x09, 0x0A, 0x0C, 0x18, 0x7F];
    const IO: [u8; 8] = [0x00, 0x01, 0x02, 0x02, 0x05, 0x08, 0x09, 0x7F];
    let mut bytes = Vec::with_capacity(64 + 4096);
    while bytes.len() < 64 {
        bytes.extend(random.next().to_le_bytes());
    }
    let mut sqe: [u8; 64] = bytes[..64].try_into().unwrap_or([0; 64]);
    if random.below(8) > 0 {
        sqe[0] = if on_admin { random.pick(&ADMIN) } else { random.pick(&IO) };
    }
    if random.below(16) > 0 {
        sqe[1] = 0x40;
    }
    if sqe[1] & 3 == 1 {
        // A first half is not answered before its second has arrived: so only second halves.
        sqe[1] ^= 3;
    }
    let nsid = match random.below(8) {
        0 => random.next() as u32,
        1 => random.pick(&[0, 3, u32::MAX - 1, u32::MAX]),
        _ => 1,
    };
    // The bystander's namespace is excluded.
    let nsid = if nsid == NSID { 1 } else { nsid };
    sqe[4..8].copy_from_slice(&nsid.to_le_bytes());
    if sqe[0] == 0x7F {
        sqe[4] = random.pick(&[0, 1, 4, 4, 4, 5, 6, 8, sqe[60]]);
    }
    // Half of the fields small, so that commands pass the first checks.
    for dword in sqe[40..].chunks_exact_mut(4) {
        if random.below(2) == 0 {
            dword[1..].fill(0);
        }
        if random.below(2) == 0 {
            dword.fill(0);
        }
    }
    let len = match random.below(4) {
        0 => random.next() as u32 & 0xFF_FFFF,
        1 => random.pick(&[0, 16, 512, 1024]),
        _ => random.pick(&[4096, 8192, 65536, 1 << 20]),
    };
    let remote = match random.below(24) {
        0 => (random.next(), random.next() as u32),
        1 => (window.addr, random.next() as u32),
        _ => (window.addr + random.below(RANDOM_BYTES), window.key),
    };
    match random.below(16) {
        0 => {}
        1..=5 => {
            let offset = if random.below(8) == 0 { random.next() } else { random.below(3) * 512 };
            sqe[24..40].copy_from_slice(&Sgl::in_capsule(offset, len & 0x1FFF).emit());
        }
        _ => {
            let sgl = Sgl::keyed(remote.0, len, remote.1, false).unwrap_or(Sgl::NONE);
            sqe[24..40].copy_from_slice(&sgl.emit());
        }
    }
    // Invalidation of the key of the window would end the test, not only the connection.
    if sqe[39] == 0x4F {
        sqe[35..39].copy_from_slice(&(window.key ^ 0x0F0F_0F00).to_le_bytes());
    }
    bytes.splice(..64, sqe);
    let tail = match random.below(32) {
        0 => return bytes[..random.below(64) as usize].to_vec(),
        1 => random.below(9000),
        2..=9 => random.pick(&[16, 512, 1024, 4096]),
        _ => 0,
    };
    bytes.extend(pattern(random.next(), tail as usize));
    bytes
}
