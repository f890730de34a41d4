//! Commands on an I/O queue: namespaces, ranges, descriptors, data in the capsule.

use nvme::fabrics::{Disconnect, FabricsType, PropertyGet, PropertySet};
use nvme::identify::{Cns, Identify};
use nvme::property::Property;
use nvme::sgl::LastSegment;
use nvme::sqe::{DsmRange, Flags};
use nvme::{IoOpcode, Sgl, Sqe};

use crate::admin::{
    FIELD, FUSED, LENGTH, NAMESPACE, OPCODE, SEGMENT, SEQUENCE, TYPE, TYPES, mdts_bytes,
};
use crate::fixture::{CC_ENABLED, Got, Outcome, Queue, Want, World, pattern};

/// The namespace with blocks of 4096 bytes, and the one with 512.
const NSID: u32 = 1;
const SMALL: u32 = 2;

const RANGE: Want = Want::Refused(&[0x080]);

/// An invalid key: a target that reads with it loses the connection.
fn poisoned(len: u32) -> Sgl {
    Sgl::keyed(0xDEAD_0000, len, 0xDEAD_BEEF, false).unwrap_or(Sgl::NONE)
}

fn with_data(sqe: Sqe, data: &[u8]) -> Vec<u8> {
    [&sqe.emit(), data].concat()
}

pub(crate) fn commands(world: &mut World) -> Outcome {
    let mut admin = world.admin(1)?;
    let mdts = mdts_bytes(world, &mut admin)?;
    let blocks = blocks(world, &mut admin, NSID)?;
    let small = self::blocks(world, &mut admin, SMALL)?;
    let mut queue = world.io(admin.cntlid, 1)?;
    let (block, page) = (world.keyed(4096), world.keyed(512));
    let read = Sqe::io(IoOpcode::READ, NSID).with_sgl(block);
    let write = Sqe::io(IoOpcode::WRITE, NSID).with_sgl(poisoned(4096));
    let compare = Sqe::io(IoOpcode::COMPARE, NSID).with_sgl(poisoned(4096));
    let zeroes = Sqe::io(IoOpcode::WRITE_ZEROES, NSID);
    let flush = Sqe::io(IoOpcode::FLUSH, NSID);
    let beyond = mdts / 4096;
    let mut cases = vec![
        ("Flush".to_owned(), flush, Want::Done),
        ("Flush of all namespaces".into(), flush.with_nsid(u32::MAX), NAMESPACE),
        ("Flush with data".into(), flush.with_sgl(block), LENGTH),
        ("PRPs".into(), read.with_flags(Flags(0)), FIELD),
        ("a metadata SGL".into(), read.with_flags(Flags(0x80)), FIELD),
        ("reserved PSDT".into(), read.with_flags(Flags(0xC0)), FIELD),
        // A target with fused commands reports a missing half, one without rejects the flag.
        ("fused, second alone".into(), write.with_flags(Flags(0x42)), FUSED),
        ("fused, reserved".into(), write.with_flags(Flags(0x43)), FIELD),
        ("fused, first no Compare".into(), read.with_flags(Flags(0x41)), FIELD),
        ("fused, second of a failed first".into(), write.with_flags(Flags(0x42)), FUSED),
        ("Property Get".into(), PropertyGet::new(Property::CAP).emit(), OPCODE),
        ("Property Set".into(), PropertySet::new(Property::CC, 0).emit(), OPCODE),
        (
            "Disconnect of another format".into(),
            Disconnect { recfmt: 1 }.emit(),
            Want::Refused(&[0x180]),
        ),
        ("unknown fabrics command".into(), Sqe::fabrics(FabricsType(0x66)), OPCODE),
        ("Read".into(), read, Want::Done),
        ("Read of the last block".into(), read.with_range(blocks - 1, 0), Want::Done),
        ("Read, 0 bytes".into(), read.with_sgl(world.keyed(0)), LENGTH),
        ("Read, shorter".into(), read.with_sgl(world.keyed(4095)), LENGTH),
        ("Read, longer".into(), read.with_sgl(world.keyed(4097)), LENGTH),
        ("Read, 2^24 - 1 bytes".into(), read.with_sgl(world.keyed(0xFF_FFFF)), LENGTH),
        ("Read, a small block".into(), read.with_nsid(SMALL).with_sgl(page), Want::Done),
        ("Read, in the capsule".into(), read.with_sgl(Sgl::in_capsule(0, 4096)), FIELD),
        ("Write, 0 bytes".into(), write.with_sgl(poisoned(0)), LENGTH),
        ("Write, shorter".into(), write.with_sgl(poisoned(512)), LENGTH),
        ("Write, longer".into(), write.with_sgl(poisoned(8192)), LENGTH),
        ("Compare, shorter".into(), compare.with_sgl(poisoned(512)), LENGTH),
        ("Write Zeroes with data".into(), zeroes.with_sgl(block), LENGTH),
        (
            "Read, more than MDTS".into(),
            read.with_range(0, beyond as u16).with_sgl(world.keyed(mdts + 4096)),
            FIELD,
        ),
        (
            "Write, more than MDTS".into(),
            write.with_range(0, beyond as u16).with_sgl(poisoned(mdts + 4096)),
            FIELD,
        ),
        (
            "Read, 65536 blocks".into(),
            read.with_nsid(SMALL).with_range(0, 0xFFFF).with_sgl(world.keyed(0xFF_FFFF)),
            FIELD,
        ),
        ("Read, metadata pointer is ignored".into(), Sqe { mptr: 77, ..read }, Want::Done),
        ("Write Uncorrectable".into(), Sqe { opcode: 0x04, ..flush }, OPCODE),
    ];
    for (name, sqe) in
        [("Read", read), ("Write", write), ("Compare", compare), ("Write Zeroes", zeroes)]
    {
        let (two, most) = match name {
            "Write Zeroes" => (Sgl::NONE, u64::MAX),
            _ => (poisoned(8192), u64::MAX),
        };
        for (where_, slba, nlb_z, sgl) in [
            ("past the end", blocks, 0, None),
            ("across the end", blocks - 1, 1, Some(two)),
            ("at the last number", most, 0, None),
            ("over the last number", most, 1, Some(two)),
            ("that wraps in bytes", 1 << 52, 0, None),
        ] {
            let sqe = sgl.map_or(sqe, |sgl| sqe.with_sgl(sgl)).with_range(slba, nlb_z);
            cases.push((format!("{name} {where_}"), sqe, RANGE));
        }
        for nsid in [0, 3, 77, 0xFFFF_FFFE, u32::MAX] {
            cases.push((format!("{name}, namespace {nsid:x}"), sqe.with_nsid(nsid), NAMESPACE));
        }
    }
    let last = read.with_nsid(SMALL).with_sgl(page);
    cases.push(("Read, the last small block".into(), last.with_range(small - 1, 0), Want::Done));
    cases.push(("Read, after the last small block".into(), last.with_range(small, 0), RANGE));
    // Without Verify, Copy and reservations: newer kernels may have them, as we do.
    for opcode in [0x03, 0x12, 0x1D, 0x79, 0x7A, 0x7D, 0x80, 0xFF] {
        cases.push((format!("opcode {opcode:#04x}"), Sqe { opcode, ..read }, OPCODE));
    }
    for (name, kind) in TYPES {
        let mut sqe = read;
        sqe.dptr[15] = kind;
        cases.push((format!("data described by {name}"), sqe, TYPE));
    }
    let mut nowhere = read;
    nowhere.dptr[15] = 0x31;
    cases.push(("data described by a last segment".into(), nowhere, SEGMENT));
    for (name, sqe, want) in cases {
        let got = world.ask_sqe(&mut queue, &sqe);
        world.expect(&format!("I/O, {name}"), &got, &want);
    }
    in_capsule(world, &mut queue);
    if most_descriptors(world, &mut admin) >= 3 {
        scattered(world, &mut queue);
    }
    dataset(world, &mut queue, blocks);
    compared(world, &mut queue);
    not_ready(world, &mut admin, &mut queue)?;
    world.close([queue, admin]);
    Ok(())
}

fn in_capsule(world: &mut World, queue: &mut Queue) {
    let write = Sqe::io(IoOpcode::WRITE, SMALL).with_range(8, 0);
    let data = pattern(3, 4096);
    let at = |offset, len| write.with_sgl(Sgl::in_capsule(offset, len));
    let offset = Want::Refused(&[0x016]);
    let cases = [
        ("as long as it says", with_data(at(0, 512), &data[..512]), Want::Done),
        ("behind 100 bytes", with_data(at(100, 512), &data[..612]), Want::Done),
        ("at the end", with_data(at(3584, 512), &data), Want::Done),
        ("of which nothing came", with_data(at(0, 512), &[]), LENGTH),
        ("of which all but a byte came", with_data(at(0, 512), &data[..511]), LENGTH),
        ("behind 100 bytes, cut", with_data(at(100, 512), &data[..611]), LENGTH),
        ("that reach over the promised size", with_data(at(3585, 512), &data), LENGTH),
        // Nothing was received there, but capsules may be that long: both are valid.
        (
            "that begin behind what came",
            with_data(at(2048, 512), &data[..1024]),
            Want::Refused(&[0x00F, 0x016]),
        ),
        ("that begin behind the promised size", with_data(at(4097, 512), &data), offset.clone()),
        ("at an offset near 2^64", with_data(at(u64::MAX, 512), &data), offset.clone()),
        ("whose end wraps to 0", with_data(at(u64::MAX - 511, 512), &data), offset.clone()),
        ("whose end wraps to 64", with_data(at(u64::MAX - 447, 512), &data), offset),
        ("of 2^32 - 1 bytes", with_data(at(0, u32::MAX), &data), LENGTH),
        ("shorter than the block", with_data(at(0, 511), &data[..511]), LENGTH),
        ("longer than the block", with_data(at(0, 513), &data[..513]), LENGTH),
        ("of 0 bytes", with_data(at(0, 0), &[]), LENGTH),
    ];
    for (name, capsule, want) in cases {
        let got = world.ask(queue, &capsule);
        world.expect(&format!("I/O, data in the capsule {name}"), &got, &want);
    }
    // Data of the last accepted write.
    let read = Sqe::io(IoOpcode::READ, SMALL).with_range(8, 0).with_sgl(world.keyed(512));
    world.ask_sqe(queue, &read);
    let found = world.host.look(0, 512);
    world.tally.check("I/O, and only what came is on the disk", found == data[3584..], || {
        format!("{:02x?}..", &found[..16])
    });
    let got = world.ask(queue, &with_data(read, &data));
    world.expect("I/O, a capsule with bytes that nobody needs", &got, &Want::Done);
}

/// Maximum number of descriptors of a command (MSDBD).
fn most_descriptors(world: &mut World, admin: &mut Queue) -> u8 {
    let sqe = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096));
    world.ask_sqe(admin, &sqe);
    world.host.look(1803, 1)[0]
}

/// Data in several places, with their descriptors in the capsule.
fn scattered(world: &mut World, queue: &mut Queue) {
    let window = world.host.window();
    let places: [(u32, u32); 3] = [(5000, 512), (100, 3000), (9001, 584)];
    let list = |places: &[(u32, u32)]| {
        let place = |&(at, len): &(u32, u32)| {
            Sgl::keyed(window.addr + u64::from(at), len, window.key, false).unwrap_or(Sgl::NONE)
        };
        places.iter().flat_map(|at| place(at).emit()).collect::<Vec<u8>>()
    };
    let capsule = |opcode, slba, len: u32, list: &[u8]| {
        let sqe = Sqe::io(opcode, NSID).with_range(slba, 0);
        with_data(Sqe { dptr: LastSegment { offset: 0, len }.emit(), ..sqe }, list)
    };
    let data = pattern(6, 4096);
    let good = list(&places);
    let mut at = 0;
    for (place, len) in places {
        world.host.fill(place, &data[at..at + len as usize]);
        at += len as usize;
    }
    for opcode in [IoOpcode::WRITE, IoOpcode::COMPARE] {
        let got = world.ask(queue, &capsule(opcode, 28, 48, &good));
        world.expect(&format!("I/O, {opcode} of three descriptors"), &got, &Want::Done);
    }
    let same = read(world, queue, 28, 4096) == data;
    world.tally.check("I/O, and all of it is there in its order", same, || "other data".into());
    world.host.fill(0, &[0; 12288]);
    let got = world.ask(queue, &capsule(IoOpcode::READ, 28, 48, &good));
    world.expect("I/O, Read of three descriptors", &got, &Want::Done);
    let found: Vec<u8> = places.iter().flat_map(|&(at, len)| world.host.look(at, len)).collect();
    world.tally.check("I/O, and it is in its places", found == data, || "other data".into());
    let mut nested = good.clone();
    nested[47] = 0x31;
    let mut inline = good.clone();
    inline[31] = 0x01;
    for (name, len, list, want) in [
        ("no descriptor", 0, good.clone(), Want::Refused(&[0x00D])),
        ("two and a half", 40, good.clone(), Want::Refused(&[0x00D])),
        ("three of which two came", 48, good[..32].to_vec(), Want::Refused(&[0x00D])),
        ("nine", 144, good.repeat(3), Want::Refused(&[0x00E])),
        ("two of three", 32, good, LENGTH),
        ("a segment in the segment", 48, nested, Want::Refused(&[0x00D])),
        ("data in the capsule in the segment", 48, inline, TYPE),
    ] {
        let got = world.ask(queue, &capsule(IoOpcode::READ, 28, len, &list));
        world.expect(&format!("I/O, a segment of {name}"), &got, &want);
    }
}

fn write(world: &mut World, queue: &mut Queue, slba: u64, data: &[u8]) -> Got {
    world.host.fill(0, data);
    let sgl = world.keyed(data.len() as u32);
    let nlb_z = (data.len() / 4096 - 1) as u16;
    world.ask_sqe(queue, &Sqe::io(IoOpcode::WRITE, NSID).with_range(slba, nlb_z).with_sgl(sgl))
}

fn read(world: &mut World, queue: &mut Queue, slba: u64, len: u32) -> Vec<u8> {
    world.host.fill(0, &vec![0xEE; len as usize]);
    let sgl = world.keyed(len);
    let nlb_z = (len / 4096 - 1) as u16;
    let got =
        world.ask_sqe(queue, &Sqe::io(IoOpcode::READ, NSID).with_range(slba, nlb_z).with_sgl(sgl));
    world.expect("I/O, Read", &got, &Want::Done);
    world.host.look(0, len)
}

fn dataset(world: &mut World, queue: &mut Queue, blocks: u64) {
    let data = pattern(4, 8192);
    let got = write(world, queue, 16, &data);
    world.expect("I/O, Write", &got, &Want::Done);
    let range = |slba, blocks| DsmRange { attributes: 0, blocks, slba }.emit();
    let command = |nr_z, len, ranges: &[[u8; 16]]| {
        let sqe = Sqe::deallocation(NSID, nr_z).with_sgl(Sgl::in_capsule(0, len));
        let mut data = ranges.concat();
        data.resize(len as usize, 0x5A);
        with_data(sqe, &data)
    };
    let good = range(16, 1);
    let mut hint = command(0, 16, &[range(blocks, 1)]);
    hint[44] = 0;
    let cases = [
        ("a range past the end", command(0, 16, &[range(blocks, 1)]), RANGE),
        ("a range across the end", command(0, 16, &[range(blocks - 1, 2)]), RANGE),
        ("a range that wraps", command(0, 16, &[range(u64::MAX, u32::MAX)]), RANGE),
        ("the second range past the end", command(1, 32, &[good, range(blocks, 1)]), RANGE),
        ("a buffer of 15 bytes", command(0, 15, &[good]), LENGTH),
        ("two ranges in 16 bytes", command(1, 16, &[good]), LENGTH),
        ("256 ranges in 16 bytes", command(255, 16, &[good]), LENGTH),
        ("without deallocation", hint, Want::Done),
    ];
    for (name, capsule, want) in cases {
        let got = world.ask(queue, &capsule);
        world.expect(&format!("I/O, Dataset Management, {name}"), &got, &want);
    }
    let same = read(world, queue, 16, 8192) == data;
    world.tally.check("I/O, and nothing is gone after these", same, || "other data".into());
    let got = world.ask(queue, &command(0, 4096, &[good]));
    world.expect("I/O, Dataset Management, a longer buffer", &got, &Want::Done);
    let found = read(world, queue, 16, 8192);
    let gone = found[..4096].iter().all(|byte| *byte == 0) && found[4096..] == data[4096..];
    world.tally.check("I/O, and exactly its range is gone", gone, || "other data".into());
}

fn compared(world: &mut World, queue: &mut Queue) {
    let data = pattern(5, 4096);
    write(world, queue, 24, &data);
    let sgl = world.keyed(4096);
    let compare = Sqe::io(IoOpcode::COMPARE, NSID).with_range(24, 0).with_sgl(sgl);
    let got = world.ask_sqe(queue, &compare);
    world.expect("I/O, Compare with the same", &got, &Want::Done);
    world.host.fill(4095, &[data[4095] ^ 1]);
    let got = world.ask_sqe(queue, &compare);
    world.expect("I/O, Compare with another", &got, &Want::Refused(&[0x285]));
}

/// The controller is disabled while its I/O queue is open.
fn not_ready(world: &mut World, admin: &mut Queue, queue: &mut Queue) -> Outcome {
    world.set(admin, Property::CC, CC_ENABLED | 1 << 14)?;
    let read = Sqe::io(IoOpcode::READ, NSID).with_sgl(poisoned(4096));
    for (name, sqe) in [
        ("Read", read),
        ("Flush", Sqe::io(IoOpcode::FLUSH, NSID)),
        ("unknown opcode", Sqe { opcode: 0xFE, ..read }),
    ] {
        let got = world.ask_sqe(queue, &sqe);
        world.expect(&format!("I/O after shutdown, {name}"), &got, &SEQUENCE);
    }
    Ok(())
}

/// Number of blocks of a namespace.
fn blocks(world: &mut World, admin: &mut Queue, nsid: u32) -> Result<u64, String> {
    use nvme::identify::{Cns, Identify};
    let sqe = Identify::new(Cns::NAMESPACE, nsid).emit(world.keyed(4096));
    let got = world.ask_sqe(admin, &sqe);
    let mut nsze = [0; 8];
    nsze.copy_from_slice(&world.host.look(0, 8));
    match (got, u64::from_le_bytes(nsze)) {
        (Got::Answer { status, .. }, nsze @ 64..) if status.is_success() => Ok(nsze),
        (got, nsze) => Err(format!("Identify Namespace {nsid}: {got:?}, {nsze} blocks")),
    }
}
