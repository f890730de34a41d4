//! How long changes wait for a snapshot. A file stands for the image: the lock is the same.

use std::sync::mpsc::channel;

use tempfile::tempdir;

use crate::core::sched::range_lock::RangeLock;
use crate::provision::format_task::tests::{config, nqn, provisioner};
use crate::provision::image_snapshot::*;

#[test]
fn changes_wait_for_a_snapshot_and_go_on_while_its_cluster_hangs() {
    let directory = tempdir().unwrap();
    let (provisioner, _) = provisioner(&config(directory.path(), 4096, ""));
    let provisioner = provisioner.lock().unwrap();
    let (shared, monitor) = (&provisioner.shared, &provisioner.monitor);
    let device = monitor.find(&nqn(), 1).unwrap();
    let block =
        RangeLock { backing: device.id, at: 0, len: 4096, alone: false, reactor: usize::MAX };
    let ((begins, begun), (go_on, hangs)) = (channel(), channel());
    std::thread::scope(|scope| {
        let taking = scope.spawn(|| {
            locked(shared, monitor, &device, Path::new("rbd:rbd/a@b"), move || {
                begins.send(()).unwrap();
                hangs.recv_timeout(Duration::from_secs(60)).unwrap();
                Ok(())
            })
        });
        begun.recv().unwrap();
        let (change, is_granted) = shared.range_locks.claim(block);
        assert!(!is_granted, "it waits");
        while !shared.range_locks.is_granted(change) {
            assert!(!taking.is_finished());
            std::thread::yield_now();
        }
        assert!(!taking.is_finished());
        go_on.send(()).unwrap();
        assert!(taking.join().unwrap().is_ok());
    });
}
