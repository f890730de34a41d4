//! Fuzzes the host's session: a target with arbitrary responses at arbitrary times.

use std::collections::BTreeSet;
use std::time::Duration;

use initiator::rng::Random;
use initiator::{Data, Phase, Request};
use nvme::{IoOpcode, Sqe, Status};
use rdma::Reason;

use super::bytes::Bytes;

#[path = "../../../initiator/tests/support/mod.rs"]
#[expect(dead_code, reason = "the lab of the session's own tests, of which not all is used")]
mod support;

use support::Lab;

/// With any behaviour of the target: each request completes once, and at the end every buffer is
/// returned and no remote region is left.
pub fn session(data: &[u8]) -> bool {
    let mut bytes = Bytes::new(data);
    let mut lab = Lab::new(support::options(), support::controller());
    lab.wire.invalidates = bytes.bool();
    let (mut sent, mut home, mut ready) = (0, BTreeSet::new(), false);
    if bytes.bool() {
        // The first invalid messages reach a host with outstanding requests.
        lab.start();
    } else {
        lab.with(|session, io| session.start(io));
    }
    for _ in 0..128 {
        if bytes.is_empty() {
            break;
        }
        match bytes.u8() % 8 {
            0 => submit(&mut lab, &mut bytes, &mut sent),
            1 if bytes.u8() > 250 => end(&mut lab, &mut bytes),
            2 => {
                lab.now += Duration::from_millis(bytes.u16().into());
                lab.deliver();
            }
            3 | 4 => lab.step(&mut Random::new(bytes.u8().into()), 0),
            _ => lie(&mut lab, &mut bytes),
        }
        ready |= lab.session.phase() == Phase::Ready;
        while let Some(done) = lab.done() {
            assert!(home.insert(done.tag), "request {} came home twice", done.tag);
        }
        lab.session.next_event();
    }
    lab.with(|session, io| session.close(io));
    for _ in 0..100 {
        lab.deliver();
        lab.now += Duration::from_secs(1);
    }
    while let Some(done) = lab.done() {
        assert!(home.insert(done.tag), "request {} came home twice", done.tag);
    }
    assert_eq!(home.len() as u64, sent, "each request comes home");
    lab.wire.capsules.clear();
    lab.expect_whole();
    ready
}

/// A request of the host.
fn submit(lab: &mut Lab, bytes: &mut Bytes<'_>, sent: &mut u64) {
    let (queue, len) = (u16::from(bytes.u8() % 4), bytes.of(&[0, 4096, 8192, 512]));
    let data = lab.pool.take_data(len).map_or(Data::None, Data::Buf);
    let opcode = bytes.of(&[IoOpcode::READ, IoOpcode::WRITE, IoOpcode::FLUSH]);
    let request = Request { sqe: Sqe::io(opcode, 1).with_range(0, 0), data, tag: *sent };
    match lab.with(|session, io| session.submit(queue, request, io)) {
        Ok(()) => *sent += 1,
        Err((Request { data: Data::Buf(buf), .. }, _)) => lab.pool.give(buf),
        Err(_) => {}
    }
}

/// The connection or the association ends.
fn end(lab: &mut Lab, bytes: &mut Bytes<'_>) {
    let qid = u16::from(bytes.u8() % 3);
    let reason = [Reason::Peer, Reason::Device, Reason::NotEstablished];
    match (bytes.u8() % 4, lab.wire.qp(qid)) {
        (0, _) => lab.with(|session, io| session.close(io)),
        (kind, Some(qp)) => lab.wire.end(qp, reason[usize::from(kind) - 1].clone()),
        _ => lab.with(|session, io| session.abort(io)),
    }
}

/// A message that the target should not send.
fn lie(lab: &mut Lab, bytes: &mut Bytes<'_>) {
    lab.deliver();
    let status = if bytes.bool() { Status::SUCCESS } else { Status::from_field(bytes.u16()) };
    let result = if bytes.bool() { u64::from(bytes.u8()) } else { bytes.u64() };
    let at = usize::from(bytes.u8()) % lab.wire.capsules.len().max(1);
    let Some((qid, sqe, _)) = lab.wire.capsules.get(at).cloned() else {
        let len = usize::from(bytes.u8() % 65);
        return lab.wire.message(u16::from(bytes.u8() % 3), bytes.take(len));
    };
    let kind = bytes.u8() % 8;
    match kind {
        0 => lab.wire.answer(qid, bytes.u16(), status, result),
        1 => {
            let len = usize::from(bytes.u8() % 65);
            lab.wire.message(qid, bytes.take(len));
        }
        2 => lab.wire.answer_and_invalidate(qid, sqe.cid, bytes.u32()),
        3 => {
            lab.wire.answer(qid, sqe.cid, status, result);
            lab.wire.answer(qid, sqe.cid, status, result);
        }
        4 => {
            let mut page = [0; 4096];
            lab.target.page.emit(&mut page);
            bytes.patch(&mut page);
            if let Some(memory) = lab.wire.open_memory(&sqe) {
                let len = memory.len().min(page.len());
                memory[..len].copy_from_slice(&page[..len]);
            }
            lab.wire.answer(qid, sqe.cid, status, result);
        }
        _ => lab.wire.answer(qid, sqe.cid, status, result),
    }
    if kind >= 2 {
        // It has a result, of any kind.
        lab.wire.capsules.remove(at);
    }
}
