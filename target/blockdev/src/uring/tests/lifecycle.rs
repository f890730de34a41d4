//! Tests of the ring itself: its kinds, its sleep, watched descriptors, its end.

use std::fs::{self};
use std::os::fd::AsRawFd;

use nix::sys::eventfd::EventFd;

use super::{Bench, STORE, every_operation};
use crate::uring::*;

#[test]
fn ring_drop_waits_for_operations_in_the_kernel() {
    let (mut bench, _) = Bench::with_file(4096);
    for n in 0..8u64 {
        let from = bench.filled(1 << 16, 0x33);
        bench.submit(IoRequest::Write { from, at: n << 16, fua: true });
    }
    bench.ring.submit();
    let event = EventFd::new().unwrap();
    bench.ring.watch(event.as_raw_fd(), 1);
    let (region, path) = (Arc::downgrade(bench.pool.region()), bench.path("disk.img"));
    let Bench { ring, pool, dir, .. } = bench;
    drop(ring);
    drop(pool);
    assert!(region.upgrade().is_none(), "the memory is let go");
    let bytes = fs::read(path).unwrap();
    assert!(bytes[..8 << 16].iter().all(|byte| *byte == 0x33));
    drop(dir);
}

#[test]
fn sleep_ends_at_its_deadline() {
    let mut bench = Bench::new(4);
    let now = Instant::now();
    bench.ring.sleep(Some(now + Duration::from_millis(30)), now);
    assert!(now.elapsed() >= Duration::from_millis(29));
    bench.ring.sleep(Some(now), Instant::now());
    assert!(now.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_watch_reports_once_and_is_armed_again_on_demand() {
    let mut bench = Bench::new(4);
    let event = EventFd::new().unwrap();
    let soon = || Some(Instant::now() + Duration::from_millis(20));
    let turn = |bench: &mut Bench| {
        bench.ring.sleep(soon(), Instant::now());
        bench.ring.reap(&mut bench.done, &mut bench.woken);
        std::mem::take(&mut bench.woken)
    };
    // On a busy machine an iteration may end before it has begun.
    let woken = |bench: &mut Bench| {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let woken = turn(bench);
            if !woken.is_empty() || Instant::now() > deadline {
                return woken;
            }
        }
    };
    for _ in 0..3 {
        bench.ring.watch(event.as_raw_fd(), 7);
        bench.ring.watch(event.as_raw_fd(), 7);
        assert_eq!(turn(&mut bench), [0; 0]);
        event.write(1).unwrap();
        assert_eq!(woken(&mut bench), [7]);
        assert_eq!(turn(&mut bench), [0; 0], "not armed, so not reported");
        event.read().unwrap();
    }
    bench.ring.watch(event.as_raw_fd(), 7);
    assert_eq!(turn(&mut bench), [0; 0]);
    bench.ring.watches.unwatch_all();
    bench.ring.submit();
    event.write(1).unwrap();
    assert_eq!(turn(&mut bench), [0; 0]);
    assert!(bench.ring.watches.is_empty());
    // The same number again, as after close and open.
    bench.ring.watch(event.as_raw_fd(), 8);
    assert_eq!(woken(&mut bench), [8]);
}

/// The kernel holds a polled socket open; ending the poll releases its port.
#[test]
fn an_unwatched_socket_frees_its_port() {
    let mut bench = Bench::new(4);
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    bench.ring.watch(socket.as_raw_fd(), 0);
    bench.ring.submit();
    bench.ring.watches.unwatch_all();
    drop(socket);
    let deadline = Instant::now() + Duration::from_secs(60);
    while std::net::UdpSocket::bind(address).is_err() {
        assert!(Instant::now() < deadline, "the port stays taken");
        let now = Instant::now();
        bench.ring.sleep(Some(now + Duration::from_millis(5)), now);
        bench.ring.reap(&mut bench.done, &mut bench.woken);
    }
}

/// A kernel without room for the region, as with the limit of locked memory of an ordinary user.
#[test]
fn every_operation_works_without_registered_memory() {
    let (mut bench, _) = Bench::with_file(512);
    bench.ring.memory.registered = false;
    every_operation(&mut bench, 512);
    assert_eq!(bench.ring.stats().fixed, 0);
}

/// Forces the configurations for older kernels on this one.
#[test]
fn every_operation_works_with_each_io_uring_setup() {
    for rung in 0..LADDER.len() {
        let mut bench = Bench::new(8);
        let io = set_up(8, &LADDER[rung..=rung]).unwrap();
        let limits = RingLimits { ops: 8, backings: 4 };
        bench.ring = Ring::over(io, bench.pool.region().clone(), limits).unwrap();
        let backing = bench.file("disk.img", 512);
        bench.ring.attach(STORE, backing).unwrap();
        every_operation(&mut bench, 512);
        let event = EventFd::from_value(1).unwrap();
        bench.ring.watch(event.as_raw_fd(), 5);
        while bench.woken.is_empty() {
            let now = Instant::now();
            bench.ring.sleep(Some(now + Duration::from_secs(1)), now);
            bench.ring.reap(&mut bench.done, &mut bench.woken);
        }
        assert_eq!(bench.woken, [5]);
    }
}

/// The largest ring that the limits allow.
#[test]
fn the_largest_ring_can_be_set_up() {
    let bench = Bench::new(u32::MAX);
    assert_eq!(bench.ring.flights.slots.len(), MAX_OPS as usize);
}
