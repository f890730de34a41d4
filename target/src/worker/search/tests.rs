//! Tests of the order of searches.

use std::sync::mpsc::{Receiver, Sender, channel};

use crate::core::sched::offload::BoxedTask;
use crate::worker::search::*;

/// A search that ends when the sender is used or dropped, and tells its number when it begins.
fn job(device: u32, host: u8, number: u32, began: &Sender<u32>) -> (SearchJob, Sender<()>) {
    let (end, ends): (Sender<()>, Receiver<()>) = channel();
    let began = began.clone();
    let run = Box::new(move || {
        began.send(number).unwrap();
        let _ = ends.recv();
    });
    (SearchJob { device: DeviceId(device), host: [host; 16], run: BoxedTask(run) }, end)
}

#[test]
fn a_device_has_one_search_at_a_time_and_hosts_take_turns() {
    let worker = SearchWorker::default();
    let (began, begins) = channel();
    let mut ends = Vec::new();
    for (number, host) in [(0, 1), (1, 1), (2, 1), (3, 2)] {
        let (job, end) = job(7, host, number, &began);
        assert!(worker.submit(job));
        ends.push(Some(end));
    }
    // The first one hangs; another device is searched meanwhile.
    let (other, other_end) = job(8, 1, 9, &began);
    assert!(worker.submit(other));
    let mut two = [begins.recv().unwrap(), begins.recv().unwrap()];
    two.sort_unstable();
    assert_eq!(two, [0, 9]);
    drop(other_end);
    assert!(begins.try_recv().is_err(), "two searches of one device");
    let mut order = Vec::new();
    let mut current = 0;
    for _ in 0..3 {
        drop(ends[current].take());
        current = begins.recv().unwrap() as usize;
        order.push(current);
    }
    assert_eq!(order, [1, 3, 2]);
    drop(ends);
    // A device that is idle again is searched again.
    while !lock(&worker.queues).is_empty() {
        std::thread::yield_now();
    }
    let (again, _end) = job(7, 1, 4, &began);
    assert!(worker.submit(again));
    assert_eq!(begins.recv().unwrap(), 4);
}
