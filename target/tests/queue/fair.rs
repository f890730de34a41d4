//! What one host may hold of the buffers that all hosts share.

use std::mem::take;

use nvme::{IoOpcode, Sqe};

use crate::support::{World, io_queue, keyed};

/// Bytes of each write: too many for a capsule, so they are pulled into a buffer of the pool.
const LEN: u32 = 16 << 10;

fn write(cid: u16) -> Sqe {
    Sqe::io(IoOpcode::WRITE, 1).with_range(0, 3).with_sgl(keyed(0, LEN)).with_cid(cid)
}

#[test]
fn a_host_that_sends_no_data_does_not_keep_others_waiting() {
    let mut world = World::new();
    let (mut silent, silent_admin, silent_admin_posted) = io_queue(&mut world);
    for cid in 0..16 {
        world.send(&mut silent, &write(cid), &[]);
    }
    // 256 KiB for data: it may hold four times of what is free, and the rest of its own waits.
    assert_eq!(world.waiters.len(), 3);
    let silent_posted = take(&mut world.fabric.posted);

    world.key = 1;
    let (mut busy, busy_admin, busy_admin_posted) = io_queue(&mut world);
    for cid in 0..10 {
        let cqe = world.ask(&mut busy, &write(cid), &[]);
        assert!(cqe.status.is_success(), "{}", cqe.status);
    }
    assert_eq!(world.waiters.len(), 3, "the silent one has got nothing more");
    let busy_posted = take(&mut world.fabric.posted);

    // Its data come after all, and so does everything else.
    world.key = 0;
    world.fabric.posted = silent_posted;
    world.run(&mut silent);
    let mut done: Vec<u16> = world.completions.drain(..).map(|cqe| cqe.cid).collect();
    done.sort_unstable();
    assert_eq!(done, (0..16).collect::<Vec<_>>());
    assert!(world.waiters.is_empty());

    let silent_posted = take(&mut world.fabric.posted);
    for (mut queue, posted) in [
        (silent, silent_posted),
        (busy, busy_posted),
        (silent_admin, silent_admin_posted),
        (busy_admin, busy_admin_posted),
    ] {
        world.fabric.posted = posted;
        world.flush_and_go(&mut queue);
        assert!(queue.is_finished());
        queue.finish(&mut world.io());
    }
    assert!(world.pool.is_full(), "{:?}", world.pool.free());
}
