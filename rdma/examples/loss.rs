//! Measures the cost of packet loss for the soft fabric, as a table: blocks of 64 KiB over a
//! simulated network whose link takes a microsecond for every datagram, on a virtual clock. Every
//! block is verified.
//!
//! ```text
//! cargo run --release --example loss
//! ```

#[path = "../tests/support/exchange/mod.rs"]
mod exchange;

use rdma::soft::endpoint::Config;
use rdma::soft::sim::Faults;
use rdma::soft::stats::datagrams::DatagramOutcome;

use crate::exchange::network::{CLEAN, Pair};
use crate::exchange::{Job, Kind};

const BLOCKS: u64 = 2000;

fn conditions() -> [(&'static str, Faults); 7] {
    [
        ("clean", CLEAN),
        ("1 % lost", Faults { loss: 10, ..CLEAN }),
        ("5 % lost", Faults { loss: 50, ..CLEAN }),
        ("5 % twice", Faults { duplicate: 50, ..CLEAN }),
        ("5 % late", Faults { reorder: 50, ..CLEAN }),
        ("1 % of all", Faults { loss: 10, duplicate: 10, reorder: 10, ..CLEAN }),
        ("5 % of all", Faults { loss: 50, duplicate: 50, reorder: 50, ..CLEAN }),
    ]
}

fn main() {
    println!("peers       data   mtu  depth  network       MB/s  kept  packets to host, target");
    for selective in [true, false] {
        for kind in [Kind::Read, Kind::Write] {
            for mtu in [1024, 4096] {
                for depth in [1, 32] {
                    let config = Config { selective, ..Pair::config(mtu) };
                    let job = Job { kind, len: 64 << 10, depth };
                    print(job, config);
                }
            }
        }
    }
}

fn print(job: Job, config: Config) {
    let mut clean = 0.0;
    for (name, faults) in conditions() {
        let mut pair = Pair::new(1, job, config);
        let took = pair.exchange(faults, BLOCKS);
        let rate = BLOCKS as f64 * f64::from(job.len) / took.as_secs_f64() / 1e6;
        if faults == CLEAN {
            clean = rate;
        }
        let [host, target] = pair.ends().map(rdma::soft::Soft::counters);
        let peers = if config.selective { "our kind" } else { "others" };
        println!(
            "{peers:9} {:>6} {:5} {:6}  {name:10} {rate:7.0} {:4.0} %  {} ({} late), {} ({} unasked)",
            format!("{:?}", job.kind),
            config.mtu,
            job.depth,
            rate / clean * 100.0,
            host.received,
            host[DatagramOutcome::Late],
            target.received,
            target[DatagramOutcome::Unasked],
        );
    }
}
