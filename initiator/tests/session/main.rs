//! The session against a scripted target: bring-up as hosts do it; every request completes exactly
//! once, whatever fails at any time; and invalid responses of the target are detected.

#[path = "../support/mod.rs"]
mod support;
mod timeouts;

use std::time::Duration;

use initiator::rng::Random;
use initiator::session::Violation;
use initiator::{Data, EndReason, Lost, Options, Phase, Refused, Request, Response};
use nvme::fabrics::{ConnectResult, FabricsType, InvalidParameter};
use nvme::feature::AsyncEvent;
use nvme::identify::{Ctratt, Sgls};
use nvme::property::Csts;
use nvme::{Cqe, IoOpcode, Sgl, Sqe, Status};
use rdma::{Fault, Reason, ReceivedWith, Work};

use crate::support::{CNTLID, Lab, controller, options};

fn read(blocks: u16) -> Sqe {
    Sqe::io(IoOpcode::READ, 1).with_range(0, blocks - 1)
}

fn write(blocks: u16) -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_range(0, blocks - 1)
}

fn good(result: u64) -> Result<Response, Lost> {
    Ok(Response { status: Status::SUCCESS, result })
}

#[test]
fn bring_up_sends_the_usual_host_commands_in_order() {
    let mut lab = Lab::new(options(), controller());
    lab.target.lazy = 2;
    lab.start();
    // Not ready at the first query: queried again after a while.
    assert_eq!(lab.session.phase(), Phase::Starting);
    lab.pass(Duration::from_millis(5));
    lab.pass(Duration::from_millis(5));
    assert_eq!(lab.session.phase(), Phase::Ready);
    let expected = [
        "Connect 0",
        "Get Property(0x00 Controller Capabilities)",
        "Set CC 0x460001",
        "Get Property(0x1c Controller Status)",
        "Get Property(0x08 Version)",
        "Identify",
        "Set Number of Queues",
        "Connect 1",
        "Connect 2",
        "Set Asynchronous Event Configuration",
    ];
    assert_eq!(lab.target.trace, expected);
    assert_eq!((lab.session.cntlid(), lab.session.io_queues()), (CNTLID, 2));
    assert_eq!((lab.session.capacity(0), lab.session.capacity(2)), (29, 7));
    assert_eq!(lab.session.max_transfer_bytes(), 128 << 10);
    let request = lab.wire.request(2);
    assert_eq!((request.recfmt, request.qid, request.cntlid), (0, 2, CNTLID));
    assert_eq!((request.hrqsize, request.hsqsize_z), (8, 7));
    assert_eq!(lab.target.events.len(), 1, "one event request is outstanding");

    lab.with(|session, io| session.close(io));
    lab.run();
    assert_eq!(lab.target.trace[10..], ["Set CC 0x464001", "Get Property(0x1c Controller Status)"]);
    assert_eq!(lab.session.ended(), Some(&EndReason::Closed));
    lab.expect_whole();
}

#[test]
fn discovery_has_no_io_queues() {
    let options = Options { subnqn: nvme::Nqn::DISCOVERY, ..options() };
    let mut target = controller();
    target.page.cntrltype = nvme::identify::ControllerType::DISCOVERY;
    target.page.ioccsz_16 = 0;
    let mut lab = Lab::new(options, target);
    lab.start();
    assert_eq!((lab.session.phase(), lab.session.io_queues()), (Phase::Ready, 0));
    let refused = lab.with(|session, io| {
        let request = Request { sqe: read(1), data: Data::None, tag: 0 };
        session.submit(1, request, io).expect_err("no such queue").1
    });
    assert_eq!(refused, Refused::NotReady);
    lab.with(|session, io| session.close(io));
    lab.expect_whole();
}

#[test]
fn the_controller_decides_how_many_queues_of_which_size() {
    let wanted = Options { io_queues: 9, queue_entries: 1000, ..options() };
    let mut target = controller();
    target.io_queues = 3;
    let mut lab = Lab::new(wanted, target);
    lab.start();
    // MAXCMD is 64, MQES 128.
    assert_eq!((lab.session.io_queues(), lab.session.capacity(3)), (3, 63));
    lab.with(|session, io| session.abort(io));
    lab.expect_whole();
}

#[test]
fn small_writes_use_in_capsule_data_and_others_keyed_sgls() {
    let mut lab = Lab::ready();
    // Small writes in the capsule, a command's bytes in front.
    let mut buf = lab.pool.take_data(4096).expect("memory");
    lab.pool.bytes_mut(&mut buf).fill(0x5A);
    let request = Request { sqe: write(1), data: Data::Buf(buf), tag: 1 };
    lab.with(|session, io| session.submit(1, request, io)).expect("taken");
    let (sqe, data) = lab.capsule(1);
    assert_eq!(sqe.sgl(), Ok(Sgl::in_capsule(0, 4096)));
    assert_eq!(data, [0x5A; 4096]);
    lab.wire.answer(1, sqe.cid, Status::SUCCESS, 0);
    lab.deliver();
    assert_eq!(lab.done().expect("done").outcome, good(0));

    // Larger ones and reads by a key of their own, to be invalidated with the answer.
    for (sqe, len) in [(write(2), 8192), (read(1), 4096)] {
        lab.request(1, sqe, len, 2);
        let (sqe, data) = lab.capsule(1);
        assert!(data.is_empty());
        let Ok(Sgl::Keyed { len: said, invalidate, .. }) = sqe.sgl() else { panic!() };
        assert_eq!((said.get(), invalidate), (len, true));
        lab.wire.memory(&sqe).fill(0xA5);
        lab.wire.answer(1, sqe.cid, Status::SUCCESS, 0);
        lab.deliver();
        let done = lab.session.next_done().expect("done");
        let Data::Buf(buf) = done.data else { panic!("its buffer") };
        assert!(lab.pool.bytes(&buf).iter().all(|&byte| byte == 0xA5));
        lab.pool.give(buf);
    }

    // Without data, no descriptor of any.
    lab.request(2, Sqe::io(IoOpcode::FLUSH, 1), 0, 3);
    let (sqe, _) = lab.capsule(2);
    assert_eq!(sqe.sgl(), Ok(Sgl::NONE));
    lab.with(|session, io| session.abort(io));
    lab.expect_whole();
}

/// A capsule of several packets is sent with its data if few commands are outstanding; otherwise
/// the target reads them.
#[test]
fn long_capsules_are_sent_only_while_few_commands_are_outstanding() {
    for (short_bytes, fifth) in [(64 + 4095, 0), (64 + 4096, 4096)] {
        let mut lab = Lab::new(options(), controller());
        lab.wire.short_bytes = short_bytes;
        lab.start();
        let carried = |tag| {
            lab.request(1, write(1), 4096, tag);
            lab.capsule(1).1.len()
        };
        let lens: Vec<usize> = (0..5).map(carried).collect();
        assert_eq!(lens, [4096, 4096, 4096, 4096, fifth]);
        lab.with(|session, io| session.abort(io));
        lab.expect_whole();
    }
}

/// As by Linux's host. An RDMA Write with them is no answer, whatever the receive has from before.
#[test]
fn immediate_data_of_an_answer_are_ignored() {
    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    let cid = lab.capsule(1).0.cid;
    let cqe = Cqe::new(cid, Status::SUCCESS).emit();
    lab.wire.message_with(1, &cqe, ReceivedWith::Immediate(0xfeed));
    lab.deliver();
    assert_eq!(lab.done().expect("done").outcome, good(0));
    lab.request(1, read(1), 4096, 2);
    assert!(lab.session.ended().is_none());
    lab.wire.message_with(1, &[], ReceivedWith::Write { immediate: 0xfeed, bytes: 16 });
    lab.deliver();
    let what = Violation::Length(0);
    assert_eq!(lab.session.ended(), Some(&EndReason::Violation { queue: 1, what }));
    lab.expect_whole();
}

#[test]
fn responses_may_invalidate_only_the_key_of_their_command() {
    let key = |sqe: &Sqe| match sqe.sgl() {
        Ok(Sgl::Keyed { key, invalidate, .. }) => (key, invalidate),
        other => panic!("{other:?}"),
    };
    // The key of its own command, which requested the invalidation.
    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    let (sqe, _) = lab.capsule(1);
    assert!(key(&sqe).1);
    lab.wire.answer_and_invalidate(1, sqe.cid, key(&sqe).0);
    lab.deliver();
    assert_eq!(lab.done().expect("done").outcome, good(0));
    // That of another command.
    lab.request(1, read(1), 4096, 2);
    lab.request(1, read(1), 4096, 3);
    let (one, other) = (lab.capsule(1).0, lab.capsule(1).0);
    lab.wire.answer_and_invalidate(1, one.cid, key(&other).0);
    lab.deliver();
    let what = Violation::Key(key(&other).0);
    assert_eq!(lab.session.ended(), Some(&EndReason::Violation { queue: 1, what }));
    lab.expect_whole();

    // A device without support is not asked to; a target that does it all the same is in error.
    let mut lab = Lab::new(options(), controller());
    lab.wire.invalidates = false;
    lab.start();
    lab.request(1, read(1), 4096, 1);
    let (sqe, _) = lab.capsule(1);
    assert!(!key(&sqe).1);
    lab.wire.answer_and_invalidate(1, sqe.cid, key(&sqe).0);
    lab.deliver();
    assert!(matches!(
        lab.session.ended(),
        Some(EndReason::Violation { what: Violation::Key(_), .. })
    ));
    lab.expect_whole();
}

#[test]
fn in_capsule_data_are_not_sent_without_controller_support() {
    let mut target = controller();
    target.page.sgls = Sgls(0).with_support(1).with_keyed(true);
    let mut lab = Lab::new(options(), target);
    lab.start();
    lab.request(1, write(1), 4096, 1);
    let (sqe, data) = lab.capsule(1);
    assert!(data.is_empty() && matches!(sqe.sgl(), Ok(Sgl::Keyed { .. })));
    lab.with(|session, io| session.abort(io));
    lab.expect_whole();
}

#[test]
fn requests_beyond_the_queue_size_are_refused() {
    let mut lab = Lab::ready();
    for tag in 0..7 {
        lab.request(1, read(1), 4096, tag);
    }
    assert_eq!(lab.session.outstanding(1), 7);
    let buf = lab.pool.take_data(4096).expect("memory");
    let request = Request { sqe: read(1), data: Data::Buf(buf), tag: 7 };
    let (request, why) =
        lab.with(|session, io| session.submit(1, request, io)).expect_err("the queue is full");
    assert_eq!((why, request.tag), (Refused::Full, 7));
    lab.request(2, read(1), 4096, 8);
    // Responses may arrive in any order; each completes its own request.
    let mut cids: Vec<u16> = (0..7).map(|_| lab.capsule(1).0.cid).collect();
    cids.reverse();
    for (tag, cid) in (0..7).rev().zip(cids) {
        let status = if tag == 3 { Status::LBA_OUT_OF_RANGE.with_dnr() } else { Status::SUCCESS };
        lab.wire.answer(1, cid, status, tag);
        lab.deliver();
        let done = lab.done().expect("done");
        assert_eq!((done.queue, done.tag), (1, tag));
        assert_eq!(done.outcome, Ok(Response { status, result: tag }));
    }
    lab.with(|session, io| session.submit(1, request, io)).expect("there is room again");
    lab.with(|session, io| session.close(io));
    lab.run();
    let lost: Vec<(u64, bool)> =
        std::iter::from_fn(|| lab.done()).map(|d| (d.tag, d.outcome == Err(Lost))).collect();
    assert_eq!(lost, [(7, true), (8, true)]);
    lab.expect_whole();
}

#[test]
fn commands_may_complete_before_their_sends() {
    let mut lab = Lab::ready();
    lab.wire.hold_sends = true;
    for round in 0..2 {
        for tag in 0..7 {
            lab.request(1, read(1), 4096, tag);
        }
        for _ in 0..7 {
            let cid = lab.capsule(1).0.cid;
            lab.wire.answer(1, cid, Status::SUCCESS, 0);
        }
        lab.deliver();
        assert_eq!(std::iter::from_fn(|| lab.done()).count(), 7, "round {round}");
    }
    // 16 Sends may be posted at once; 14 are, and the two of Connect have completed before.
    lab.request(1, read(1), 4096, 0);
    lab.request(1, read(1), 4096, 1);
    assert!(lab.session.waits_for_sends());
    let request = Request { sqe: read(1), data: Data::None, tag: 2 };
    let why = lab.with(|session, io| session.submit(1, request, io)).expect_err("full").1;
    assert_eq!(why, Refused::Full);
    lab.wire.hold_sends = false;
    lab.with(|_, _| ());
    lab.deliver();
    assert!(!lab.session.waits_for_sends());
    lab.request(1, read(1), 4096, 2);
    lab.with(|session, io| session.abort(io));
    lab.expect_whole();
}

#[test]
fn invalid_responses_end_the_association_and_lose_no_request() {
    type Lie = fn(&mut Lab, u16);
    let lies: [(&str, Lie, Violation); 6] = [
        (
            "an unknown id",
            |lab, _| lab.wire.answer(1, 0x0FFF, Status::SUCCESS, 0),
            Violation::CommandId(0x0FFF),
        ),
        (
            "an id of another use",
            |lab, cid| {
                lab.wire.answer(1, cid ^ 0x1000, Status::SUCCESS, 0);
            },
            Violation::CommandId(0),
        ),
        (
            "a second answer",
            |lab, cid| {
                lab.wire.answer(1, cid, Status::SUCCESS, 0);
                lab.wire.answer(1, cid, Status::SUCCESS, 0);
            },
            Violation::CommandId(0),
        ),
        (
            "a short answer",
            |lab, cid| {
                lab.wire.message(1, &Cqe::new(cid, Status::SUCCESS).emit()[..15]);
            },
            Violation::Length(15),
        ),
        ("a long answer", |lab, _| lab.wire.message(1, &[0; 17]), Violation::Length(17)),
        ("an empty answer", |lab, _| lab.wire.message(1, &[]), Violation::Length(0)),
    ];
    for (name, lie, violation) in lies {
        let mut lab = Lab::ready();
        lab.request(1, read(1), 4096, 1);
        lab.request(1, write(1), 4096, 2);
        lab.request(2, read(1), 4096, 3);
        let cid = lab.capsule(1).0.cid;
        lie(&mut lab, cid);
        lab.deliver();
        let Some(EndReason::Violation { queue: 1, what }) = lab.session.ended() else {
            panic!("{name}: {:?}", lab.session.ended())
        };
        match (what, violation) {
            (Violation::CommandId(_), Violation::CommandId(0)) => {}
            (what, violation) => assert_eq!(*what, violation, "{name}"),
        }
        let mut tags: Vec<u64> = std::iter::from_fn(|| lab.done()).map(|done| done.tag).collect();
        tags.sort_unstable();
        assert_eq!(tags, [1, 2, 3], "{name}: each exactly once");
        lab.expect_whole();
    }
}

#[test]
fn disconnecting_a_queue_leaves_the_others_open() {
    // Rejected, all answered before, and one command left without a response.
    for (status, answered) in
        [(Status::INVALID_OPCODE, true), (Status::SUCCESS, true), (Status::SUCCESS, false)]
    {
        let mut lab = Lab::ready();
        lab.request(1, read(1), 4096, 1);
        lab.request(2, read(1), 4096, 2);
        for nobody in [0, 3] {
            let refused = lab.with(|session, io| session.disconnect(nobody, 9, io));
            assert_eq!(refused, Err(Refused::NotReady));
        }
        lab.with(|session, io| session.disconnect(1, 9, io)).expect("asked");
        let again = lab.with(|session, io| session.disconnect(1, 9, io));
        assert_eq!((again, lab.session.is_open(1)), (Err(Refused::NotReady), false));
        let (command, leave) = (lab.capsule(1).0, lab.capsule(1).0);
        assert_eq!((leave.fabrics_type(), leave.cdw10), (FabricsType::DISCONNECT, 0));
        if answered {
            lab.wire.answer(1, command.cid, Status::SUCCESS, 0);
        }
        lab.wire.answer(1, leave.cid, status, 0);
        lab.deliver();
        let gone = status.is_success();
        let mut done: Vec<_> =
            std::iter::from_fn(|| lab.done()).map(|done| (done.tag, done.outcome)).collect();
        done.sort_by_key(|(tag, _)| *tag);
        let first = if answered { good(0) } else { Err(Lost) };
        assert_eq!(done, [(1, first), (9, Ok(Response { status, result: 0 }))]);
        assert_eq!((lab.session.phase(), lab.session.is_open(1)), (Phase::Ready, !gone));
        assert_eq!((lab.session.qp(1).is_none(), lab.session.is_open(2)), (gone, true));
        let cid = lab.capsule(2).0.cid;
        lab.wire.answer(2, cid, Status::SUCCESS, 0);
        lab.deliver();
        assert_eq!(lab.done().expect("done").outcome, good(0));
        lab.with(|session, io| session.abort(io));
        lab.expect_whole();
    }
}

#[test]
fn faults_and_disconnects_return_every_pending_command() {
    // The work completes first, then the end is reported.
    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    lab.request(0, Sqe::admin(nvme::AdminOpcode::GET_LOG_PAGE), 512, 2);
    let qp = lab.wire.qp(2).expect("connected");
    lab.wire.end(qp, Reason::Peer);
    lab.deliver();
    assert_eq!(lab.session.ended(), Some(&EndReason::Peer { queue: 2 }));
    let lost: Vec<_> = std::iter::from_fn(|| lab.done()).map(|d| d.outcome).collect();
    assert_eq!(lost, [Err(Lost), Err(Lost)]);
    let request = Request { sqe: read(1), data: Data::None, tag: 0 };
    let why = lab.with(|session, io| session.submit(1, request, io)).expect_err("dead").1;
    assert_eq!(why, Refused::NotReady);
    // The target may not have ended the others: they are closed when it had time to do so.
    assert_eq!(lab.session.phase(), Phase::Closing);
    lab.pass(Duration::from_millis(99));
    assert_eq!(lab.session.phase(), Phase::Closing);
    lab.pass(Duration::from_millis(1));
    assert!(!lab.session.is_ended_by_target());
    lab.expect_whole();

    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    for queue in [1, 0, 2] {
        assert!(!lab.session.is_ended_by_target());
        let qp = lab.wire.qp(queue).expect("connected");
        lab.wire.end(qp, Reason::Peer);
        lab.deliver();
    }
    assert!(lab.session.is_ended_by_target());
    lab.expect_whole();

    let mut lab = Lab::ready();
    lab.request(1, read(1), 4096, 1);
    let qp = lab.wire.qp(1).expect("connected");
    let from = lab.pool.take_cell().expect("a cell");
    lab.wire.events.push_back(rdma::Event::Done(rdma::Completion::new(
        qp,
        1,
        Work::Send { from, invalidate: None },
        Err(Fault::Unreachable),
    )));
    lab.deliver();
    let expected = EndReason::Fault { queue: 1, fault: Fault::Unreachable };
    assert_eq!(lab.session.ended(), Some(&expected));
    lab.expect_whole();
}

#[test]
fn events_arrive_and_are_asked_for_again() {
    let mut lab = Lab::ready();
    for round in 0..100 {
        let cid = lab.target.events.pop_front().expect("an event request");
        let event = AsyncEvent::NAMESPACE_ATTRIBUTE_CHANGED;
        lab.wire.answer(0, cid, Status::SUCCESS, event.0.into());
        lab.run();
        if round >= 50 {
            assert_eq!(lab.session.next_event(), Some(event));
            assert_eq!(lab.session.next_event(), None);
        } else if lab.target.events.is_empty() {
            // The caller took no events, so the controller is not asked for more.
            assert_eq!(round, 31);
            assert_eq!(std::iter::from_fn(|| lab.session.next_event()).count(), 32);
            lab.run();
        } else if round == 49 {
            assert_eq!(std::iter::from_fn(|| lab.session.next_event()).count(), 18);
        }
    }
    lab.with(|session, io| session.close(io));
    lab.expect_whole();
}

#[test]
fn refused_connects_report_their_cause() {
    let reject = |sts: u16| Reason::Rejected {
        code: 28,
        private_data: [0u16.to_le_bytes(), sts.to_le_bytes()].concat(),
    };
    let other = |code| Reason::Rejected { code, private_data: Vec::new() };
    let cases = [
        (reject(6), "the connection of the admin queue: No Resources; ask for fewer or smaller"),
        (reject(4), "the connection of the admin queue: Invalid HSQSIZE"),
        (other(8), "192.0.2.1 refused the connection: nothing listens on port 4420 there"),
        (other(-111), "192.0.2.1 refused the connection: nothing listens on port 4420 there"),
        (other(28), "refused with code 28: what listens there may be no NVMe target"),
        (
            Reason::NotEstablished,
            "no connection to 192.0.2.1:4420: no response to RDMA connection requests",
        ),
        (Reason::Device, "the RDMA device failed or was removed"),
    ];
    for (reason, text) in cases {
        let mut lab = Lab::new(options(), controller());
        lab.wire.refuse = Some(reason);
        lab.start();
        let ended = lab.session.ended().expect("ended").to_string();
        assert!(ended.contains(text), "{ended}");
        lab.expect_whole();
    }

    let parameter = |at: InvalidParameter| (Status::CONNECT_INVALID_PARAMETERS, at.dw0());
    let cases = [
        (parameter(InvalidParameter::SUBNQN), "no subsystem nqn.2026-11.io.nvmfd:t: ask it with"),
        (
            (Status::CONNECT_INVALID_HOST, InvalidParameter::HOSTNQN.dw0()),
            "does not admit this host: add nqn.2026-11.io.nvmfd:h to its hosts",
        ),
        (parameter(InvalidParameter::SQSIZE), "it does not like byte 44 of the command"),
        ((Status::CONNECT_CONTROLLER_BUSY, 0), "no controller left for us"),
        ((Status::INTERNAL_ERROR, 0), "refused Connect of the admin queue: Internal Error"),
    ];
    for ((status, result), text) in cases {
        let mut target = controller();
        (target.connect, target.connect_result) = (status.with_dnr(), result.into());
        let mut lab = Lab::new(options(), target);
        lab.start();
        let ended = lab.session.ended().expect("ended").to_string();
        assert!(ended.contains(text), "{ended}");
        lab.expect_whole();
    }
}

#[test]
fn unusable_controllers_end_the_session_with_a_reason() {
    type Spoil = fn(&mut support::Controller);
    let cases: [(Spoil, &str); 9] = [
        (|t| t.page.sgls = Sgls(1), "it takes no keyed SGLs"),
        (|t| t.page.icdoff_16 = 1, "in-capsule data offset"),
        (|t| t.page.ioccsz_16 = 3, "command capsules are shorter"),
        (|t| t.page.iorcsz_16 = 0, "response capsules are shorter"),
        (
            |t| t.page.cntlid = 8,
            "Connect returned controller 7, and Identify tells of controller 8",
        ),
        (|t| t.page.cntrltype.0 = 2, "it is a discovery controller"),
        (|t| t.csts = Csts(2), "fatal error"),
        (|t| t.connect_result = ConnectResult(7).with_atr(true).0.into(), "authentication"),
        (|t| t.lazy = u32::MAX, "did not become ready within 2.5s"),
    ];
    for (spoil, text) in cases {
        let mut target = controller();
        spoil(&mut target);
        let mut lab = Lab::new(options(), target);
        lab.start();
        for _ in 0..500 {
            lab.pass(Duration::from_millis(5));
        }
        let ended = lab.session.ended().expect("ended").to_string();
        assert!(ended.contains(text), "{ended}");
        lab.expect_whole();
    }
}

#[test]
fn too_small_a_pool_ends_the_session_without_leaking_buffers() {
    for keep in 0..40 {
        let mut lab = Lab::new(options(), controller());
        let taken: Vec<_> =
            (keep..lab.pool.plan().cells).map(|_| lab.pool.take_cell().expect("a cell")).collect();
        lab.start();
        assert_eq!(lab.session.ended(), Some(&EndReason::NoMemory), "{keep}");
        taken.into_iter().for_each(|cell| lab.pool.give(cell));
        lab.expect_whole();
    }
}

/// A target that sends any response at any time: no panic, each request completes once, and at the
/// end every buffer is returned.
#[test]
fn arbitrary_responses_never_lose_requests_or_buffers() {
    let mut reasons = std::collections::BTreeMap::new();
    for seed in 0..4000 {
        let ended = harass(seed);
        *reasons.entry(ended).or_insert(0) += 1;
    }
    assert!(!reasons.contains_key("NoMemory"), "{reasons:?}");
    // The ways of dying were met, and some associations lived to be closed.
    for kind in ["Closed", "Violation", "Peer", "Device", "Timeout", "Refused", "Unsupported"] {
        assert!(reasons.keys().any(|reason| reason.starts_with(kind)), "{kind}: {reasons:?}");
    }
}

/// Returns the name of the reason for which the association ended.
fn harass(seed: u64) -> String {
    let mut random = Random::new(seed);
    let mut lab = Lab::new(options(), controller());
    lab.wire.invalidates = random.percent(50);
    // How often the target lies, of a hundred times.
    let malice = [0, 1, 10][random.below(3) as usize];
    lab.with(|session, io| session.start(io));
    let (mut sent, mut home) = (0, std::collections::BTreeSet::new());
    for _ in 0..random.below(300) {
        match random.below(10) {
            0..=4 => {
                if lab.wire.events.len() < 200 {
                    lab.step(&mut random, malice);
                }
            }
            5 | 6 => {
                let (queue, len) = (random.below(4) as u16, random.below(3) as u32 * 4096);
                let data = match lab.pool.take_data(len) {
                    Some(buf) => Data::Buf(buf),
                    None => Data::None,
                };
                let sqe =
                    [read(1), write(1), Sqe::io(IoOpcode::FLUSH, 1)][random.below(3) as usize];
                let request = Request { sqe, data, tag: sent };
                match lab.with(|session, io| session.submit(queue, request, io)) {
                    Ok(()) => sent += 1,
                    Err((Request { data: Data::Buf(buf), .. }, _)) => lab.pool.give(buf),
                    Err(_) => {}
                }
            }
            7 => {
                lab.now += Duration::from_millis(random.below(2000));
                lab.deliver();
            }
            8 if random.percent(malice) => lab.with(|session, io| session.close(io)),
            9 if random.percent(malice) => {
                let reasons = [Reason::Peer, Reason::Device, Reason::NotEstablished];
                let (qid, reason) = (random.below(3) as u16, &reasons[random.below(3) as usize]);
                lab.wire.qp(qid).into_iter().for_each(|qp| lab.wire.end(qp, reason.clone()));
            }
            _ => lab.deliver(),
        }
        while let Some(done) = lab.done() {
            assert!(home.insert(done.tag), "seed {seed}: request {} came home twice", done.tag);
        }
        lab.session.next_event();
    }
    lab.with(|session, io| session.close(io));
    for _ in 0..100 {
        lab.deliver();
        lab.now += Duration::from_secs(1);
    }
    while let Some(done) = lab.done() {
        assert!(home.insert(done.tag), "seed {seed}: request {} came home twice", done.tag);
    }
    assert_eq!(home.len() as u64, sent, "seed {seed}: each request comes home");
    lab.wire.capsules.clear();
    lab.expect_whole();
    let ended = format!("{:?}", lab.session.ended().expect("ended"));
    ended.split([' ', '{', '(']).next().unwrap_or_default().to_owned()
}
