//! How much of its throughput a connection keeps in a bad network, on a virtual clock: blocks of
//! 64 KiB at depth 32 over a link that takes a microsecond for every datagram. `cargo run --release
//! --example loss` prints what is kept; what is demanded here is well below that.

#[path = "support/exchange/mod.rs"]
mod exchange;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use rdma::soft::Soft;
use rdma::soft::endpoint::Config;
use rdma::soft::sim::{Faults, Link};
use rdma::soft::stats::datagrams::DatagramOutcome;
use rdma::{Fabric, FabricStats};

use crate::exchange::network::{CLEAN, LINK, Pair};
use crate::exchange::{Job, Kind};

const LOSS_1: Faults = Faults { loss: 10, ..CLEAN };
const LOSS_5: Faults = Faults { loss: 50, ..CLEAN };
const TWICE_5: Faults = Faults { duplicate: 50, ..CLEAN };
const LATE_5: Faults = Faults { reorder: 50, ..CLEAN };
const ALL_1: Faults = Faults { loss: 10, duplicate: 10, reorder: 10, ..CLEAN };

fn job(kind: Kind) -> Job {
    Job { kind, len: 64 << 10, depth: 32 }
}

/// What is kept at least of the clean throughput, in per cent.
fn keeps(selective: bool, demands: &[(Faults, u32)]) {
    for kind in [Kind::Read, Kind::Write] {
        for (mtu, count) in [(1024, 120), (4096, 500)] {
            let config = Config { selective, ..Pair::config(mtu) };
            for seed in [7, 20, 31] {
                let took = |faults| Pair::new(seed, job(kind), config).exchange(faults, count);
                let clean = took(CLEAN).as_secs_f64();
                for (faults, per_cent) in demands {
                    let kept = clean / took(*faults).as_secs_f64() * 100.0;
                    assert!(
                        kept >= f64::from(*per_cent),
                        "{kind:?} at {mtu}, seed {seed}: {kept:.0} % of {faults:?}"
                    );
                }
            }
        }
    }
}

#[test]
fn nvmfd_peers_retain_throughput_on_a_faulty_network() {
    keeps(true, &[(LOSS_1, 75), (LOSS_5, 40), (TWICE_5, 80), (LATE_5, 80), (ALL_1, 75)]);
}

#[test]
fn other_peers_retain_minimum_throughput_on_a_faulty_network() {
    keeps(false, &[(LOSS_1, 45), (LOSS_5, 12), (TWICE_5, 80), (LATE_5, 35), (ALL_1, 40)]);
}

#[test]
fn nvmfd_peers_retransmit_only_missing_packets() {
    for kind in [Kind::Read, Kind::Write] {
        let mut pair = Pair::new(3, job(kind), Pair::config(4096));
        pair.exchange(LOSS_5, 500);
        let [host, target] = pair.ends().map(Soft::counters);
        // Data that were there already, of a read or a write; 5 % were lost.
        let (twice, all) = match kind {
            Kind::Read => {
                (host[DatagramOutcome::Late] + host[DatagramOutcome::Early], host.received)
            }
            Kind::Write => (target[DatagramOutcome::Unasked], target.received),
        };
        assert!(twice * 100 < all * 8, "{kind:?}: {twice} of {all}");
    }
}

fn troubles(end: &Soft) -> Vec<(IpAddr, &'static str, u64)> {
    let mut stats = FabricStats::default();
    end.stats(&mut stats);
    stats.link_errors
}

#[test]
fn only_losses_are_counted_as_link_errors_per_address() {
    for selective in [true, false] {
        let config = Config { selective, ..Pair::config(4096) };
        let mut pair = Pair::new(5, job(Kind::Write), config);
        pair.exchange(CLEAN, 100);
        let [host, target] = pair.ends().map(troubles);
        assert!(host.iter().chain(&target).all(|(_, _, count)| *count == 0), "{host:?}");
        pair.exchange(LOSS_5, 500);
        let [host, target] = pair.ends().map(troubles);
        let of = |all: &[(IpAddr, &'static str, u64)], own: [u8; 4], name| {
            let found: Vec<u64> = all.iter().filter(|t| t.1 == name).map(|t| t.2).collect();
            assert!(found.len() == 1 && all.iter().all(|t| t.0 == IpAddr::from(own)), "{all:?}");
            found[0]
        };
        let host = |name| of(&host, [10, 0, 0, 1], name);
        let target = |name| of(&target, [10, 0, 0, 2], name);
        // A write of the host's is a read here: the host sends data again, the target requests.
        for again in [host("sent_again"), target("sent_again")] {
            assert!(again > 50, "{again}");
        }
        for (sent, received) in [
            (host("nak_sequence_sent"), target("nak_sequence_received")),
            (target("nak_sequence_sent"), host("nak_sequence_received")),
        ] {
            assert!(sent >= received && sent < 5000, "{sent} {received}");
        }
        assert!(host("nak_sequence_sent") + target("nak_sequence_sent") > 0);
        for none in ["nak_error_sent", "nak_error_received"] {
            assert_eq!((host(none), target(none)), (0, 0), "{none}");
        }
    }
}

#[test]
fn gso_is_disabled_for_devices_that_renumber_segments() {
    for kind in [Kind::Read, Kind::Write] {
        for mtu in [1024, 4096] {
            // (Our own kind does not see what a device has done.)
            let config = Config { selective: false, ..Pair::config(mtu) };
            let took = |renumbers| {
                let mut pair = Pair::new(7, job(kind), config);
                pair.air.lock().unwrap().renumbers = renumbers;
                let times = [200, 200].map(|count| pair.exchange(CLEAN, count).as_secs_f64());
                let told = pair.ends().map(troubles).concat();
                (times, told.iter().filter(|t| t.1 == "trains_ended" && t.2 > 0).count())
            };
            let ([first, second], told) = took(false);
            assert_eq!(told, 0, "{kind:?} at {mtu}");
            let ([finding, after], told) = took(true);
            assert!(told > 0, "{kind:?} at {mtu}");
            // Six round trips or timeouts. Then the link is the same, and a packet the same for it in a
            // train or not.
            assert!(finding < first + 0.05, "{kind:?} at {mtu}: {finding} s, not {first} s");
            assert!(after < second * 1.1, "{kind:?} at {mtu}: {after} s, not {second} s");
        }
    }
}

/// How often packets are sent again, and CNP sent, while the queue of the link holds half a window
/// and the switch marks from `marking` on.
fn through_a_short_queue(kind: Kind, selective: bool, marking: u32) -> (u64, u64) {
    let config = Config { selective, ..Pair::config(4096) };
    let mut pair = Pair::new(5, job(kind), config);
    pair.air.lock().unwrap().link = Link { waiting: 64, marking, ..LINK };
    let sum = |pair: &Pair, name| -> u64 {
        pair.ends().map(troubles).iter().flatten().filter(|t| t.1 == name).map(|t| t.2).sum()
    };
    // Nobody knows of the queue before the first window is on its way.
    pair.exchange(CLEAN, 100);
    let before = sum(&pair, "sent_again");
    pair.exchange(CLEAN, 1000);
    let (sent, received) = (sum(&pair, "cnp_sent"), sum(&pair, "cnp_received"));
    assert!(received <= sent && sent <= received + 5, "{sent} {received}");
    (sum(&pair, "sent_again") - before, sent)
}

#[test]
fn ecn_marking_reduces_drops_of_a_congested_switch() {
    // Data of a host's read are the target's requests. (Those of a write are the host's answers,
    // which go at the rate that the target asks for them.)
    let (dropped, untold) = through_a_short_queue(Kind::Read, true, u32::MAX);
    let (marked, told) = through_a_short_queue(Kind::Read, true, 16);
    assert!(dropped > 100 && marked * 10 < dropped, "{dropped} {marked}");
    assert!(untold == 0 && told > 0, "{untold} {told}");
}

#[test]
fn packets_to_peers_without_ecn_are_never_marked() {
    assert_eq!(through_a_short_queue(Kind::Read, false, 0).1, 0);
}

#[test]
fn packets_are_ecn_capable_once_those_of_the_peer_are() {
    let config = Config { selective: false, ..Pair::config(4096) };
    let mut pair = Pair::new(5, job(Kind::Read), config);
    let [before, after] = [false, true].map(|host_is_capable| {
        let (tap, capable) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (all, some) = (Arc::clone(&tap), Arc::clone(&capable));
        pair.air.lock().unwrap().tap = Some(Box::new(move |datagram| {
            let from_host =
                datagram.way.is_some_and(|way| way.0.ip() == IpAddr::from([10, 0, 0, 1]));
            match from_host {
                true if host_is_capable => datagram.tos |= 1,
                true => {}
                false => {
                    all.fetch_add(1, Ordering::Relaxed);
                    some.fetch_add(u64::from(datagram.tos & 3 != 0), Ordering::Relaxed);
                }
            }
            true
        }));
        pair.exchange(CLEAN, 10);
        (tap.load(Ordering::Relaxed), capable.load(Ordering::Relaxed))
    });
    assert!(before.0 > 0 && before.1 == 0, "{before:?}");
    assert!(after.0 > 0 && after.1 == after.0, "{after:?}");
}
