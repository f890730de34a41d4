//! Commands on the admin queue: properties, allowed sequences, fields, descriptors.

use nvme::fabrics::{Disconnect, FabricsType, PropertyGet, PropertySet};
use nvme::feature::{FeatureId, GetFeatures, Select, SetFeatures};
use nvme::identify::{Cns, Csi, Identify};
use nvme::log::{GetLogPage, LogId};
use nvme::property::Property;
use nvme::sqe::Flags;
use nvme::{AdminOpcode, IoOpcode, Sgl, Sqe};

use crate::fixture::{CC_ENABLED, Outcome, SILENCE, Want, World};

pub(crate) const FIELD: Want = Want::Refused(&[0x002]);
pub(crate) const FUSED: Want = Want::Refused(&[0x002, 0x009, 0x00A]);
pub(crate) const OPCODE: Want = Want::Refused(&[0x001]);
pub(crate) const NAMESPACE: Want = Want::Refused(&[0x00B]);
pub(crate) const SEQUENCE: Want = Want::Refused(&[0x00C]);
pub(crate) const LENGTH: Want = Want::Refused(&[0x00F]);
pub(crate) const TYPE: Want = Want::Refused(&[0x011]);

/// A last segment whose descriptors are missing. A target without segments rejects the descriptor
/// type.
pub(crate) const SEGMENT: Want = Want::Refused(&[0x00D, 0x00E, 0x011, 0x016]);

/// Descriptor types that are not allowed in RDMA capsules: the last byte of the descriptor.
pub(crate) const TYPES: [(&str, u8); 8] = [
    ("an address that is no key", 0x00),
    ("a bit bucket", 0x10),
    ("a segment", 0x21),
    ("a keyed block with an offset", 0x41),
    ("a keyed block of an unknown kind", 0x4A),
    ("a transport block", 0x5A),
    ("a reserved type", 0x70),
    ("a vendor specific type", 0xF0),
];

pub(crate) fn properties(world: &mut World) -> Outcome {
    let mut queue = world.disabled()?;
    let get = |attrib, property| PropertyGet { attrib, property: Property(property) }.emit();
    let set = |attrib, property, value| {
        PropertySet { attrib, property: Property(property), value }.emit()
    };
    // `nvme show-regs` accepts only a plain 002 for a missing property.
    let absent = Want::Code(0x002);
    let cases = [
        ("get VS", get(0, 0x08), Want::Value(0x2_0100)),
        ("get CC", get(0, 0x14), Want::Value(0)),
        ("get CSTS", get(0, 0x1C), Want::Value(0)),
        ("get an unknown offset", get(0, 0x0C), absent.clone()),
        ("get an unknown offset, 8 bytes", get(1, 0x28), absent.clone()),
        ("get an offset near 2^32", get(1, 0xFFFF_FFFC), absent.clone()),
        ("get an offset within a property", get(0, 0x04), absent.clone()),
        ("get 4 bytes of CAP", get(0, 0x00), absent.clone()),
        ("get 8 bytes of VS", get(1, 0x08), absent.clone()),
        ("get, an unknown size", get(7, 0x14), absent),
        ("set CAP", set(1, 0x00, 1), FIELD),
        ("set VS", set(0, 0x08, 1), FIELD),
        ("set CSTS", set(0, 0x1C, 1), FIELD),
        ("set an unknown offset", set(0, 0x1000, 1), FIELD),
        ("set 8 bytes of CC", set(1, 0x14, CC_ENABLED), FIELD),
        ("set, an unknown size", set(5, 0x14, CC_ENABLED), FIELD),
        ("CSTS after all this", get(0, 0x1C), Want::Value(0)),
    ];
    for (name, sqe, want) in cases {
        let got = world.ask_sqe(&mut queue, &sqe);
        world.expect(&format!("property, {name}"), &got, &want);
    }
    let wrong = [
        ("submission entries of 32 bytes", 0x45_0001),
        ("completion entries of 8 bytes", 0x36_0001),
        ("no entry sizes", 1),
        ("pages of 8 KiB", CC_ENABLED | 1 << 7),
        ("weighted arbitration", CC_ENABLED | 1 << 11),
        ("a command set that there is not", CC_ENABLED | 1 << 4),
    ];
    for (name, cc) in wrong {
        let got = world.ask_sqe(&mut queue, &set(0, 0x14, cc));
        world.expect(&format!("enabled with {name}: success"), &got, &Want::Done);
        let got = world.ask_sqe(&mut queue, &get(0, 0x1C));
        world.expect(&format!("enabled with {name}: and CFS"), &got, &Want::Value(2));
        world.set(&mut queue, Property::CC, 0)?;
    }
    world.enable(&mut queue)?;
    world.close([queue]);
    Ok(())
}

pub(crate) fn untimely(world: &mut World) -> Outcome {
    let mut attempt = world.admin_attempt();
    attempt.connect.kato_ms = 60_000;
    let (mut queue, got) = world.attempt(&attempt)?;
    world.expect("Connect with keep alive", &got, &Want::Done);
    let identify = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096));
    let commands = [
        ("Identify", identify),
        ("Get Log Page", GetLogPage::new(LogId::SMART, 0, 128).emit(world.keyed(512))),
        ("Number of Queues", SetFeatures::new(FeatureId::NUMBER_OF_QUEUES, 0).emit(Sgl::NONE)),
        ("event request", Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST)),
        ("Abort", Sqe::admin(AdminOpcode::ABORT)),
    ];
    for (name, sqe) in &commands {
        let got = world.ask_sqe(&mut queue, sqe);
        world.expect(&format!("before enable, {name}"), &got, &SEQUENCE);
    }
    world.enable(&mut queue)?;
    let got = world.ask_sqe(&mut queue, &identify);
    world.expect("after enable, Identify", &got, &Want::Done);
    world.set(&mut queue, Property::CC, CC_ENABLED | 1 << 14)?;
    for (name, sqe) in &commands {
        let got = world.ask_sqe(&mut queue, sqe);
        world.expect(&format!("after shutdown, {name}"), &got, &SEQUENCE);
    }
    let got = world.ask_sqe(&mut queue, &Sqe::admin(AdminOpcode::KEEP_ALIVE));
    world.expect("after shutdown, Keep Alive", &got, &Want::Done);
    let got = world.ask_sqe(&mut queue, &PropertyGet::new(Property::CSTS).emit());
    let complete = super::connecting::value(&got).is_some_and(|csts| csts & 0xC == 8);
    world.tally.check("after shutdown, CSTS says complete", complete, || format!("{got:?}"));
    world.close([queue]);
    Ok(())
}

pub(crate) fn commands(world: &mut World) -> Outcome {
    let mut queue = world.admin(2)?;
    let page = world.keyed(4096);
    let mdts = mdts_bytes(world, &mut queue)?;
    let identify = Identify::new(Cns::CONTROLLER, 0);
    let namespace = |nsid| Identify::new(Cns::NAMESPACE, nsid).emit(page);
    let log = |lid, lpo, dwords: u32| {
        GetLogPage::new(LogId(lid), lpo, dwords)
            .emit(world.keyed(dwords.wrapping_mul(4) & 0xFF_FFFC))
    };
    let get = |fid, sel| {
        GetFeatures { fid: FeatureId(fid), sel: Select(sel), nsid: 0, cdw11: 0 }.emit(Sgl::NONE)
    };
    let set = |fid, cdw11| SetFeatures::new(FeatureId(fid), cdw11);
    let flags = |flags| identify.emit(page).with_flags(Flags(flags));
    let cases = vec![
        ("Identify", identify.emit(page), Want::Done),
        ("PRPs", flags(0x00), FIELD),
        ("a metadata SGL", flags(0x80), FIELD),
        ("reserved PSDT", flags(0xC0), FIELD),
        ("fused, first", flags(0x41), FIELD),
        ("fused, second", flags(0x42), FIELD),
        (
            "Property Get, fused",
            PropertyGet::new(Property::VS).emit().with_flags(Flags(0x41)),
            FIELD,
        ),
        ("unknown fabrics command", Sqe::fabrics(FabricsType(0x77)), OPCODE),
        // The reference and the specification use two status codes for a wrong queue.
        ("Disconnect", Disconnect { recfmt: 0 }.emit(), Want::Refused(&[0x185, 0x10C])),
        ("Identify, unknown page", Identify { cns: Cns(0xEE), ..identify }.emit(page), FIELD),
        ("Identify, namespace FFFFFFFF", namespace(u32::MAX), NAMESPACE),
        ("Identify, namespace 0", namespace(0), NAMESPACE),
        ("Identify, namespace beyond NN", namespace(0xFFFF_0000), NAMESPACE),
        ("Identify, inactive namespace", namespace(77), Want::Done),
        ("descriptors, inactive namespace", Identify::new(Cns(3), 77).emit(page), NAMESPACE),
        ("list after FFFFFFFE", Identify::new(Cns(2), 0xFFFF_FFFE).emit(page), NAMESPACE),
        ("list after FFFFFFFF", Identify::new(Cns(2), u32::MAX).emit(page), NAMESPACE),
        (
            "Identify, unknown command set",
            Identify { csi: Csi(9), ..Identify::new(Cns(6), 0) }.emit(page),
            FIELD,
        ),
        ("Identify, buffer of 4095 bytes", identify.emit(world.keyed(4095)), LENGTH),
        ("Identify, buffer of 0 bytes", identify.emit(world.keyed(0)), LENGTH),
        ("Identify, in the capsule", identify.emit(Sgl::in_capsule(0, 4096)), FIELD),
        ("log, unknown", log(0x7E, 0, 1), Want::Refused(&[0x109])),
        ("log, offset of 2", log(2, 2, 1), FIELD),
        ("log, offset beyond", log(2, 65536, 1), FIELD),
        ("log, offset near 2^64", log(2, u64::MAX - 3, 1), FIELD),
        ("log, up to its end and beyond", log(2, 508, 4), Want::Done),
        ("log, in pieces", log(1, 4, 1), Want::Done),
        ("log, more than MDTS", log(2, 0, mdts / 4 + 1), FIELD),
        (
            "log, 16 GiB",
            GetLogPage { numd_z: u32::MAX, ..GetLogPage::new(LogId(2), 0, 1) }.emit(page),
            FIELD,
        ),
        ("log, buffer too short", GetLogPage::new(LogId(2), 0, 128).emit(world.keyed(508)), LENGTH),
        (
            "effects of another command set",
            GetLogPage { csi: Csi(2), ..GetLogPage::new(LogId(5), 0, 1024) }.emit(page),
            Want::Refused(&[0x109]),
        ),
        ("Get Features, unknown", get(0x7D, 0), FIELD),
        ("Get Features, 0", get(0, 0), FIELD),
        ("Get Features, saved", get(7, 2), FIELD),
        ("Set Features, unknown", set(0x7D, 0).emit(Sgl::NONE), FIELD),
        (
            "Set Features, to be saved",
            SetFeatures { save: true, ..set(0x0B, 0) }.emit(Sgl::NONE),
            Want::Refused(&[0x10D]),
        ),
        (
            "Set Features, of a namespace",
            SetFeatures { nsid: 1, ..set(0x07, 0) }.emit(Sgl::NONE),
            Want::Refused(&[0x10F]),
        ),
        ("Set Features, host id", set(0x81, 1).emit(world.keyed(16)), SEQUENCE),
        ("Set Features, not changeable", set(0x80, 1).emit(Sgl::NONE), Want::Refused(&[0x10E])),
        ("events that there are not", set(0x0B, 1 << 20).emit(Sgl::NONE), FIELD),
        ("Number of Queues FFFF, FFFF", set(7, u32::MAX).emit(Sgl::NONE), FIELD),
        ("Number of Queues FFFF, 0", set(7, 0xFFFF).emit(Sgl::NONE), FIELD),
        ("Number of Queues 0, FFFF", set(7, 0xFFFF_0000).emit(Sgl::NONE), FIELD),
        ("Number of Queues", set(7, 0x1_0001).emit(Sgl::NONE), Want::Value(0x1_0001)),
        (
            "Keep Alive without timeout",
            Sqe::admin(AdminOpcode::KEEP_ALIVE),
            Want::Refused(&[0x01A]),
        ),
        (
            "Abort of what is not there",
            Sqe { cdw10: 0x77_0005, ..Sqe::admin(AdminOpcode::ABORT) },
            Want::Value(1),
        ),
        ("Abort with data", Sqe::admin(AdminOpcode::ABORT).with_sgl(page), LENGTH),
        (
            "reserved fields are ignored",
            Sqe { cdw2: 7, cdw3: 9, mptr: 3, ..identify.emit(page) },
            Want::Done,
        ),
    ];
    for (name, sqe, want) in cases {
        let got = world.ask_sqe(&mut queue, &sqe);
        world.expect(&format!("admin, {name}"), &got, &want);
    }
    const UNKNOWN: [u8; 22] = [
        0x00, 0x01, 0x03, 0x04, 0x05, 0x0D, 0x10, 0x11, 0x14, 0x15, 0x19, 0x1A, 0x1C, 0x20, 0x21,
        0x7C, 0x7E, 0x80, 0x81, 0x82, 0x84, 0xFF,
    ];
    for opcode in UNKNOWN {
        let got = world.ask_sqe(&mut queue, &Sqe::admin(AdminOpcode(opcode)).with_sgl(page));
        world.expect(&format!("admin, opcode {opcode:#04x}"), &got, &OPCODE);
    }
    for (name, kind) in TYPES {
        let mut sqe = identify.emit(page);
        sqe.dptr[15] = kind;
        let got = world.ask_sqe(&mut queue, &sqe);
        world.expect(&format!("admin, data described by {name}"), &got, &TYPE);
    }
    let mut sqe = identify.emit(page);
    sqe.dptr[15] = 0x31;
    let got = world.ask_sqe(&mut queue, &sqe);
    world.expect("admin, data described by a last segment", &got, &SEGMENT);
    longer_buffer(world, &mut queue);
    let mut io = world.io(queue.cntlid, 1)?;
    let sqe = set(7, 0x1_0001).emit(Sgl::NONE);
    let got = world.ask_sqe(&mut queue, &sqe);
    world.expect("admin, Number of Queues after an I/O queue", &got, &SEQUENCE);
    let got = world.ask_sqe(&mut io, &Sqe::io(IoOpcode::FLUSH, 1));
    world.expect("and the I/O queue goes on", &got, &Want::Done);
    world.close([io, queue]);
    Ok(())
}

/// A longer buffer is accepted, and nothing is written beyond the requested length.
fn longer_buffer(world: &mut World, queue: &mut super::fixture::Queue) {
    world.host.fill(0, &[0xA5; 12288]);
    let sqe = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(12288));
    let got = world.ask_sqe(queue, &sqe);
    world.expect("admin, Identify into a longer buffer", &got, &Want::Done);
    let untouched = world.host.look(4096, 8192).iter().all(|byte| *byte == 0xA5);
    let page = world.host.look(0, 4096);
    world.tally.check("and exactly 4096 bytes are written", untouched && page[78] != 0xA5, || {
        format!("untouched: {untouched}")
    });
    world.host.fill(0, &[0xA5; 4096]);
    let log = GetLogPage::new(LogId::SMART, 508, 4).emit(world.keyed(16));
    world.ask_sqe(queue, &log);
    let rest = world.host.look(0, 17);
    world.tally.check("a log ends in zeros", rest[4..] == [&[0; 12][..], &[0xA5]].concat(), || {
        format!("{rest:02x?}")
    });
}

pub(crate) fn events(world: &mut World) -> Outcome {
    let mut queue = world.admin(1)?;
    world.ask_sqe(&mut queue, &Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096)));
    let most = world.host.look(259, 1)[0] + 1;
    let request = Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST).emit();
    let cids: Vec<u16> = (0..most).map(|_| world.tell(&mut queue, &request)).collect();
    let got = world.hear(&queue, cids[0], SILENCE);
    world.expect(&format!("{most} event requests are held"), &got, &Want::Silence);
    let got = world.ask(&mut queue, &request);
    world.expect("one more is refused", &got, &Want::Refused(&[0x105]));
    let got = world.ask_sqe(&mut queue, &PropertyGet::new(Property::VS).emit());
    world.expect("and the queue goes on", &got, &Want::Value(0x2_0100));
    // A reset ends them all: each is answered once, none with success.
    let reset = PropertySet::new(Property::CC, 0).emit().emit();
    let last = world.tell(&mut queue, &reset);
    let mut answered = Vec::new();
    while let Some(message) = world.host.message(queue.link, SILENCE) {
        answered.push(u16::from_le_bytes([message[12], message[13]]));
    }
    answered.sort_unstable();
    let mut expected = [cids, vec![last]].concat();
    expected.sort_unstable();
    world.tally.check("a reset ends the held requests", answered == expected, || {
        format!("{answered:x?} instead of {expected:x?}")
    });
    world.close([queue]);
    Ok(())
}

/// MDTS of Identify Controller; leaves the page in the window.
pub(crate) fn mdts_bytes(
    world: &mut World,
    queue: &mut super::fixture::Queue,
) -> Result<u32, String> {
    let sqe = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096));
    let got = world.ask_sqe(queue, &sqe);
    match world.host.look(77, 1)[0] {
        mdts @ 1..=11 => Ok(4096 << mdts),
        mdts => Err(format!("Identify Controller: {got:?}, MDTS {mdts}")),
    }
}
