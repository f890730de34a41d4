//! A disk that keeps operations for long, while the connections that brought them come and go.

use nvme::{IoOpcode, Sgl, Sqe};

use crate::support::{World, end_both, io_queue, keyed};

#[test]
fn what_a_stalled_disk_keeps_of_a_lost_queue_is_only_what_it_works_on() {
    let mut world = World::new();
    let before = world.pool.free();
    let (mut queue, admin, posted) = io_queue(&mut world);
    let of_admin = 16;
    assert_eq!(queue.receives(), 16);
    let read = Sqe::io(IoOpcode::READ, 1).with_range(1, 0).with_sgl(keyed(0, 4096));
    for cid in 0..3 {
        world.send(&mut queue, &read.with_cid(cid), &[]);
    }
    let write = Sqe::io(IoOpcode::WRITE, 1).with_range(2, 0).with_sgl(Sgl::in_capsule(0, 4096));
    for cid in 3..5 {
        world.send(&mut queue, &write.with_cid(cid), &[0xAB; 4096]);
    }
    world.send(&mut queue, &Sqe::io(IoOpcode::FLUSH, 1).with_cid(5), &[]);
    assert_eq!(world.disk.waiting.len(), 6);
    world.flush_and_go(&mut queue);
    assert!(!queue.is_finished(), "the disk has its work");
    // Two capsules are what it writes from; nothing else is missing but what the admin queue has.
    assert_eq!(queue.receives(), 2);
    let (cells, receives, _) = world.pool.free();
    assert_eq!((cells, receives), (before.0 - 2 * of_admin, before.1 - of_admin - 2));
    end_both(world, queue, admin, posted);
}
