//! Log lines about links and peers. Each kind is written once in [`WARN_INTERVAL`]: a peer causes one
//! by every connection that it opens. The counters have all of them.

use std::net::IpAddr;
use std::time::Instant;

use super::udp::WARN_INTERVAL;
use crate::log_interval::LogInterval;

/// What is written about links and peers, and when each line was written last.
#[derive(Debug, Default)]
pub(super) struct LinkLog {
    erratic: LogInterval,
    without_trains: LogInterval,
    barred: LogInterval,
}

impl LinkLog {
    /// The line about a peer whose IPv4 identifications cannot be predicted.
    pub(super) fn erratic(&mut self, now: Instant, peer: IpAddr) -> Option<String> {
        self.erratic.is_due(now, WARN_INTERVAL).then(|| {
            format!(
                "IPv4 identifications of packets from {peer} are not sequential: corruption is \
                 detected by a 16-bit CRC only (IPv6 has no such field)"
            )
        })
    }

    /// The line about a path on which trains are no longer used.
    pub(super) fn without_trains(
        &mut self,
        now: Instant,
        (from, to): (IpAddr, IpAddr),
    ) -> Option<String> {
        self.without_trains.is_due(now, WARN_INTERVAL).then(|| {
            let device = device(from).unwrap_or_else(|| "DEV".to_owned());
            format!(
                "only the first segment of each UDP GSO send to {to} arrives: {device}, or a device \
                 behind it, numbers IPv4 identifications of segments differently from the \
                 kernel. Datagrams to {to} are sent one by one while connections to it exist, which \
                 costs CPU time; `ethtool -K {device} tx-udp-segmentation off` fixes it"
            )
        })
    }

    /// The line about a peer whose requests are ignored.
    pub(super) fn barred(&mut self, now: Instant, peer: IpAddr) -> Option<String> {
        self.barred.is_due(now, WARN_INTERVAL).then(|| {
            format!(
                "connection requests from {peer} are ignored for some seconds: too many \
                 connections from there ended before NVMe Connect"
            )
        })
    }
}

/// The network interface of an address.
fn device(address: IpAddr) -> Option<String> {
    let has = |each: &nix::ifaddrs::InterfaceAddress| {
        let own = each.address.as_ref().and_then(|own| own.as_sockaddr_in());
        own.is_some_and(|own| IpAddr::V4(own.ip()) == address)
    };
    nix::ifaddrs::getifaddrs().ok()?.find(has).map(|each| each.interface_name)
}

#[cfg(test)]
mod tests {
    use crate::soft::link_log::*;

    #[test]
    fn lines_that_connections_cause_are_written_once_in_an_interval() {
        let (mut log, start) = (LinkLog::default(), Instant::now());
        let [here, peer]: [IpAddr; 2] = ["127.0.0.1", "127.0.0.2"].map(|ip| ip.parse().unwrap());
        for (seconds, is_due) in [(0, true), (1, false), (59, false), (60, true), (61, false)] {
            let now = start + std::time::Duration::from_secs(seconds);
            let without_trains = log.without_trains(now, (here, peer));
            assert!(without_trains.as_ref().is_none_or(|line| line.contains("-K lo tx")));
            let lines = [log.erratic(now, peer), without_trains, log.barred(now, peer)];
            assert!(lines.iter().all(|line| line.is_some() == is_due), "{seconds}: {lines:?}");
        }
    }
}
