//! Connection requests, commands before Connect, and Connect.

use std::thread;
use std::time::{Duration, Instant};

use nvme::fabrics::{Connect, ConnectAttributes, FabricsType, PropertyGet, PropertySet};
use nvme::identify::{Cns, Identify};
use nvme::property::Property;
use nvme::sqe::Flags;
use nvme::{AdminOpcode, IoOpcode, Nqn, NqnField, Sqe, cm};
use rdma::Reason;

use crate::fixture::{Attempt, CC_ENABLED, Got, Outcome, Want, World};
use crate::host::PATIENCE;

/// Reject reason of the InfiniBand connection manager: rejected by the application.
const CONSUMER_REJECT: i32 = 28;

/// Reject reason of the InfiniBand connection manager: no listener.
const INVALID_SERVICE: i32 = 8;

/// RDMA Reads offered by a valid request.
const READS: u8 = 16;

pub(crate) fn requests(world: &mut World) -> Outcome {
    let good = world.admin_attempt().request;
    let cases = [
        ("record format 1", cm::Request { recfmt: 1, ..good }, READS, 2),
        ("record format FFFF", cm::Request { recfmt: 0xFFFF, ..good }, READS, 2),
        ("HSQSIZE 0", cm::Request { hsqsize_z: 0, ..good }, READS, 4),
        ("HRQSIZE 0", cm::Request { hrqsize: 0, ..good }, READS, 5),
        ("queue id FFFF", cm::Request { qid: 0xFFFF, ..good }, READS, 3),
        ("no responder resources", good, 0, 7),
    ];
    for (name, request, reads, sts) in cases {
        refused(world, name, &request.emit(), reads, sts);
    }
    if world.iwarp {
        // InfiniBand always delivers 56 bytes.
        for len in [0, 1, 31] {
            refused(world, &format!("{len} bytes"), &good.emit()[..len], READS, 1);
        }
    }
    let got = world.host.connect_beside(&good.emit());
    let refused = match &got {
        Err(Reason::Rejected { code, .. }) => world.iwarp || *code == INVALID_SERVICE,
        // There TCP refuses, before any RDMA.
        Err(Reason::NotEstablished) => world.iwarp,
        _ => false,
    };
    let name = "connection request where nobody listens: refused";
    world.tally.check(name, refused, || format!("{got:?}"));
    let mut padded = good.emit().to_vec();
    padded.resize(56, 0xA5);
    let link = world.host.connect(&padded);
    world.tally.check("connection request with trailing bytes: accepted", link.is_ok(), || {
        format!("{link:?}")
    });
    link.into_iter().for_each(|link| world.host.close(link));
    Ok(())
}

fn refused(world: &mut World, name: &str, private_data: &[u8], reads: u8, sts: u16) {
    let got = world.host.connect_with(private_data, reads);
    let good = match &got {
        Err(Reason::Rejected { code, private_data }) => {
            let status = cm::Reject::from_private_data(private_data);
            let code_good = world.iwarp || *code == CONSUMER_REJECT;
            code_good && status.is_some_and(|s| s.recfmt == 0 && s.status.0 == sts)
        }
        _ => false,
    };
    let name = format!("connection request, {name}: rejected with {sts}");
    world.tally.check(&name, good, || format!("{got:?}"));
    got.into_iter().for_each(|link| world.host.close(link));
}

pub(crate) fn before_connect(world: &mut World) -> Outcome {
    let sequence = Want::Refused(&[0x00C]);
    let identify = Identify::new(Cns::CONTROLLER, 0).emit(world.keyed(4096));
    let read = Sqe::io(IoOpcode::READ, 1).with_sgl(world.keyed(4096));
    let cases = [
        ("Identify", identify, sequence.clone()),
        ("Property Get", PropertyGet::new(Property::CAP).emit(), sequence.clone()),
        ("Property Set", PropertySet::new(Property::CC, CC_ENABLED).emit(), sequence.clone()),
        ("Keep Alive", Sqe::admin(AdminOpcode::KEEP_ALIVE), sequence.clone()),
        ("event request", Sqe::admin(AdminOpcode::ASYNC_EVENT_REQUEST), sequence.clone()),
        ("unknown fabrics command", Sqe::fabrics(FabricsType(0x77)), sequence.clone()),
        ("unknown opcode", Sqe::admin(AdminOpcode(0xFF)), sequence.clone()),
        ("Read", read, sequence.clone()),
        ("Flush", Sqe::io(IoOpcode::FLUSH, 1), sequence),
        ("Identify with PRPs", identify.with_flags(Flags(0)), Want::Refused(&[0x002])),
    ];
    for qid in [0, 1] {
        let request = cm::Request { qid, ..world.admin_attempt().request };
        let mut queue = world.open(request).map_err(|e| format!("no connection: {e:?}"))?;
        for (name, sqe, want) in &cases {
            let got = world.ask_sqe(&mut queue, sqe);
            world.expect(&format!("queue {qid} before Connect, {name}"), &got, want);
        }
        world.close([queue]);
    }
    Ok(())
}

type Edit = (&'static str, fn(&mut Attempt), Want);

/// 256 bytes without a terminator.
fn endless() -> NqnField {
    let mut field = [b'a'; 256];
    field[..20].copy_from_slice(b"nqn.2026-11.io.host:");
    NqnField(field)
}

/// A terminated name.
fn name(text: &[u8]) -> NqnField {
    let mut field = [0; 256];
    field[..text.len()].copy_from_slice(text);
    NqnField(field)
}

const SUBNQN: Want = Want::Parameter(0x1_0100);
const HOSTNQN: Want = Want::Parameter(0x1_0200);
const CNTLID: Want = Want::Parameter(0x1_0010);
/// The controller may have ended meanwhile: a host that connects its queues requests another.
const GONE: Want = Want::Gone(0x1_0010);
const SQSIZE: Want = Want::Parameter(44);
const QID: Want = Want::Parameter(42);
const SHORT: Want = Want::Refused(&[0x00F]);

const ADMIN: [Edit; 30] = [
    ("as a host does", |_| {}, Want::Done),
    ("1023 bytes of data", |a| a.len = 1023, SHORT),
    ("no data", |a| a.len = 0, SHORT),
    ("a longer buffer", |a| a.len = 4096, Want::Done),
    ("data in the capsule", |a| a.inline = Some(1024), Want::Done),
    ("data in the capsule, of which one byte is missing", |a| a.inline = Some(1023), SHORT),
    ("data in the capsule, of which all are missing", |a| a.inline = Some(0), SHORT),
    ("record format 1", |a| a.connect.recfmt = 1, Want::Refused(&[0x180])),
    ("SQSIZE 0", |a| a.connect.sqsize_z = 0, SQSIZE),
    ("SQSIZE beyond HSQSIZE", |a| a.connect.sqsize_z = 32, SQSIZE),
    ("SQSIZE below HSQSIZE", |a| a.connect.sqsize_z = 15, Want::Done),
    ("SQSIZE 4096", |a| (a.request.hsqsize_z, a.connect.sqsize_z) = (0xFFFF, 4096), SQSIZE),
    ("SQSIZE FFFF", |a| (a.request.hsqsize_z, a.connect.sqsize_z) = (0xFFFF, 0xFFFF), SQSIZE),
    ("SQSIZE 4095", |a| (a.request.hsqsize_z, a.connect.sqsize_z) = (0xFFFF, 4095), Want::Done),
    ("queue id unlike the request's", |a| a.connect.qid = 1, QID),
    ("controller id 1", |a| a.data.cntlid = 1, CNTLID),
    ("controller id 0", |a| a.data.cntlid = 0, CNTLID),
    ("controller id FFFE", |a| a.data.cntlid = 0xFFFE, Want::Done),
    ("unknown subsystem", |a| a.data.subnqn_field = name(b"nqn.2026-11.io.nvmfd:no"), SUBNQN),
    ("subsystem name without terminator", |a| a.data.subnqn_field = endless(), SUBNQN),
    ("empty subsystem name", |a| a.data.subnqn_field = name(b""), SUBNQN),
    ("host name without terminator", |a| a.data.hostnqn_field = endless(), HOSTNQN),
    // Some hosts have none: it is not in the list of hosts.
    ("empty host name", |a| a.data.hostnqn_field = name(b""), Want::Host(0x1_0200)),
    ("host name that is no NQN", |a| a.data.hostnqn_field = name(b"iqn.2026-11.io.x:y"), HOSTNQN),
    (
        "host that is not allowed",
        |a| a.data.hostnqn_field = name(b"nqn.2026-11.io.host:stranger"),
        Want::Host(0x1_0200),
    ),
    ("host id 0", |a| a.data.hostid = [0; 16], Want::Done),
    ("unknown attributes", |a| a.connect.cattr = ConnectAttributes(0xF8), Want::Done),
    ("the longest keep alive", |a| a.connect.kato_ms = 7_200_000, Want::Done),
    ("a longer keep alive", |a| a.connect.kato_ms = 7_200_001, Want::Refused(&[0x01A])),
    ("the longest keep alive there is", |a| a.connect.kato_ms = u32::MAX, Want::Refused(&[0x01A])),
];

pub(crate) fn connect_admin(world: &mut World) -> Outcome {
    for (name, edit, want) in ADMIN {
        let mut attempt = world.admin_attempt();
        edit(&mut attempt);
        let (mut queue, got) = world.attempt(&attempt)?;
        world.expect(&format!("Connect, {name}"), &got, &want);
        if want == Want::Done {
            let cap = world.get(&mut queue, Property::CAP);
            world.tally.check(&format!("Connect, {name}: and it serves"), cap.is_ok(), || {
                format!("{cap:?}")
            });
        }
        world.close([queue]);
    }
    let mut attempt = world.admin_attempt();
    attempt.connect.cattr = ConnectAttributes(4);
    let (mut queue, got) = world.attempt(&attempt)?;
    world.expect("Connect without flow control: the head says FFFF", &got, &Want::Done);
    let got = world.ask_sqe(&mut queue, &PropertyGet::new(Property::VS).emit());
    world.expect("and goes on to say FFFF", &got, &Want::Value(0x2_0100));
    world.close([queue]);

    let mut queue = world.disabled()?;
    let again = world.admin_attempt();
    let got = world.send_connect(&mut queue, &again);
    world.expect("Connect twice on the admin queue", &got, &Want::Refused(&[0x00C]));
    world.close([queue]);
    Ok(())
}

const IO: [Edit; 19] = [
    ("1023 bytes of data", |a| a.len = 1023, SHORT),
    ("data in the capsule, of which one byte is missing", |a| a.inline = Some(1023), SHORT),
    ("record format 1", |a| a.connect.recfmt = 1, Want::Refused(&[0x180])),
    ("SQSIZE 0", |a| a.connect.sqsize_z = 0, SQSIZE),
    ("SQSIZE beyond HSQSIZE", |a| a.connect.sqsize_z = 32, SQSIZE),
    ("SQSIZE FFFF", |a| (a.request.hsqsize_z, a.connect.sqsize_z) = (0xFFFF, 0xFFFF), SQSIZE),
    ("queue id unlike the request's", |a| a.connect.qid = 2, QID),
    ("queue id 0 on an I/O connection", |a| a.connect.qid = 0, QID),
    ("queue id that was not granted", |a| (a.request.qid, a.connect.qid) = (3, 3), QID),
    ("unknown controller", |a| a.data.cntlid = 0xFFEF, GONE),
    ("controller id FFFF", |a| a.data.cntlid = 0xFFFF, GONE),
    ("controller id 0", |a| a.data.cntlid = 0, GONE),
    ("another host id", |a| a.data.hostid[15] ^= 1, Want::Parameter(0x1_0000)),
    ("unknown subsystem", |a| a.data.subnqn_field = name(b"nqn.2026-11.io.nvmfd:no"), SUBNQN),
    ("subsystem name without terminator", |a| a.data.subnqn_field = endless(), SUBNQN),
    ("host name without terminator", |a| a.data.hostnqn_field = endless(), HOSTNQN),
    ("host name that is no NQN", |a| a.data.hostnqn_field = name(b"eui.0123"), HOSTNQN),
    (
        "host that is not allowed",
        |a| a.data.hostnqn_field = name(b"nqn.2026-11.io.host:stranger"),
        Want::Host(0x1_0200),
    ),
    ("data in the capsule", |a| a.inline = Some(1024), Want::Done),
];

pub(crate) fn connect_io(world: &mut World) -> Outcome {
    let mut admin = world.disabled()?;
    let cntlid = admin.cntlid;
    let attempt = world.io_attempt(cntlid, 1);
    let (queue, got) = world.attempt(&attempt)?;
    world.expect("I/O Connect before the controller is enabled", &got, &Want::Gone(42));
    world.close([queue, admin]);

    admin = world.admin(2)?;
    let cntlid = admin.cntlid;
    for (name, edit, want) in IO {
        let mut attempt = world.io_attempt(cntlid, 1);
        edit(&mut attempt);
        let (queue, got) = world.attempt(&attempt)?;
        world.expect(&format!("I/O Connect, {name}"), &got, &want);
        world.close([queue]);
    }
    let mut deep = world.io_attempt(cntlid, 1);
    let mqes = world.get(&mut admin, Property::CAP)? as u16;
    (deep.request.hsqsize_z, deep.connect.sqsize_z) = (0xFFFF, mqes + 1);
    let (queue, got) = world.attempt(&deep)?;
    world.expect("I/O Connect, SQSIZE beyond MQES", &got, &SQSIZE);
    world.close([queue]);
    deep.connect.sqsize_z = mqes;
    let (queue, got) = world.attempt(&deep)?;
    world.expect("I/O Connect, SQSIZE as MQES says", &got, &Want::Done);
    world.close([queue]);

    let mut other = world.io_attempt(cntlid, 1);
    other.data.hostnqn_field = NqnField::from(&world.names.other);
    let (queue, got) = world.attempt(&other)?;
    world.expect("I/O Connect, the controller of another host", &got, &GONE);
    world.close([queue]);

    let mut first = world.io(cntlid, 1)?;
    let attempt = world.io_attempt(cntlid, 1);
    let got = world.send_connect(&mut first, &attempt);
    world.expect("Connect twice on an I/O queue", &got, &Want::Refused(&[0x00C]));
    let (second, got) = world.attempt(&attempt)?;
    world.expect("I/O Connect, a queue id in use", &got, &Want::Refused(&[0x00C]));
    let got = world.ask_sqe(&mut first, &Sqe::io(IoOpcode::FLUSH, 1));
    world.expect("and the queue that has it goes on", &got, &Want::Done);
    world.close([first, second]);
    // The target may read the new request before it has processed the end of the connection.
    let start = Instant::now();
    let got = loop {
        let (queue, got) = world.attempt(&attempt)?;
        world.close([queue]);
        if Want::Done.is_met(&got) || start.elapsed() > PATIENCE {
            break got;
        }
        thread::sleep(Duration::from_millis(100));
    };
    world.expect("a queue id is free when its queue has closed", &got, &Want::Done);

    world.set(&mut admin, Property::CC, CC_ENABLED | 1 << 14)?;
    let (queue, got) = world.attempt(&attempt)?;
    world.expect("I/O Connect after shutdown", &got, &Want::Gone(42));
    world.close([queue, admin]);
    discovery(world)
}

fn discovery(world: &mut World) -> Outcome {
    let mut attempt = world.admin_attempt();
    attempt.data.subnqn_field = NqnField::from(&Nqn::DISCOVERY);
    let (mut admin, got) = world.attempt(&attempt)?;
    world.expect("Connect to discovery", &got, &Want::Done);
    world.enable(&mut admin)?;
    let mut attempt = world.io_attempt(admin.cntlid, 1);
    attempt.data.subnqn_field = NqnField::from(&Nqn::DISCOVERY);
    attempt.connect = Connect { qid: 1, ..attempt.connect };
    let (queue, got) = world.attempt(&attempt)?;
    world.expect("I/O Connect to a discovery controller", &got, &QID);
    world.close([queue, admin]);
    Ok(())
}

/// The result of a command that must succeed.
pub(crate) fn value(got: &Got) -> Option<u64> {
    match got {
        Got::Answer { status, result } if status.is_success() => Some(*result),
        _ => None,
    }
}
