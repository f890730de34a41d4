//! Tests of the entries that the kernel is given.

use super::{Bench, flags_of};
use crate::uring::*;

/// The next submission for a slot, and its entry.
fn next_entry(ring: &mut Ring, slot: u32) -> (Step, squeue::Entry) {
    let Some(Submission::Step(slot, step)) = ring.flights.next_submission(slot) else {
        panic!("nothing")
    };
    let (call, file) = ring.call(slot, step).unwrap();
    (step, entry_for(&call, file))
}

#[test]
fn only_fua_writes_are_submitted_with_rwf_dsync() {
    let (mut bench, _) = Bench::with_file(512);
    for (fixed, registered) in [(true, true), (false, true), (true, false), (false, false)] {
        bench.ring.flights.attachments[0].as_mut().unwrap().fixed &= fixed;
        bench.ring.memory.registered &= registered;
        let code = if registered { opcode::WriteFixed::CODE } else { opcode::Write::CODE };
        for (fua, flags) in [(true, libc::RWF_DSYNC), (false, 0)] {
            let from = bench.filled(8192, 1);
            bench.submit(IoRequest::Write { from, at: 0, fua });
            let slot = bench.ring.flights.take_slot().unwrap();
            for len in [8192, 4096] {
                let (step, entry) = next_entry(&mut bench.ring, slot);
                assert!(matches!(step, Step::Write { len: left, .. } if left == len), "{step:?}");
                assert_eq!(flags_of(&entry), (code, flags as u32), "{fixed} {registered}");
                // The kernel has done half of it: the rest has the same durability.
                let flight = bench.ring.flights.slots[slot as usize].as_mut().unwrap();
                let backing = &bench.ring.flights.attachments[0].as_ref().unwrap().backing;
                assert_eq!(flight.advance(4096, backing).is_some(), len == 4096);
            }
            let done = bench.ring.flights.complete(slot, Ok(())).unwrap();
            bench.pool.give(done.buf.unwrap());
        }
        bench.ring.flights.attachments[0].as_mut().unwrap().fixed = true;
        bench.ring.memory.registered = true;
    }
}

#[test]
fn a_flush_is_submitted_as_fdatasync() {
    let (mut bench, backing) = Bench::with_file(512);
    bench.submit(IoRequest::Flush);
    let slot = bench.ring.flights.take_slot().unwrap();
    let (step, entry) = next_entry(&mut bench.ring, slot);
    assert_eq!(step, Step::Sync);
    let datasync = io_uring::types::FsyncFlags::DATASYNC.bits();
    assert_eq!(flags_of(&entry), (opcode::Fsync::CODE, datasync));
    bench.ring.flights.not_submitted(Submission::Step(slot, step));
    assert_eq!(bench.await_done(1)[0].outcome, Ok(()));
    assert_eq!(bench.ring.stats().syncs, 1);
    assert_eq!(backing.health().failures(), 0);
}
