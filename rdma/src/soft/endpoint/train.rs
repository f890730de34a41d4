//! Receiving the datagrams of a train: they have one sender, one destination and one type of
//! service, and most of them are packets of one queue pair. Its packets are a *run*. What they have
//! in common is done once, and so is what they acknowledge.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Instant;

use super::qp_context::Checks;
use super::{Endpoint, ROCE_PORT};
use crate::soft::clock::Time;
use crate::soft::cm::connection::Phase;
use crate::soft::cm::mad::MAD_BYTES;
use crate::soft::qp::{Io, ecn};
use crate::soft::stats::datagrams::{DatagramOutcome, OutcomeSet};
use crate::wire::header::{Bth, GSI_QKEY, Packet};
use crate::wire::icrc::{Flow, Verdict};
use crate::wire::opcode::Opcode;
use crate::wire::psn::Qpn;
use crate::{Qp, Region};

/// Whether an address is a broadcast or multicast address: connections are between two hosts.
fn is_broadcast(address: IpAddr) -> bool {
    address.is_multicast() || address == IpAddr::V4(Ipv4Addr::BROADCAST)
}

/// What the datagrams of a train have in common.
#[derive(Clone, Copy, Debug)]
pub(super) struct Train<'a> {
    pub(super) now: Instant,
    pub(super) time: Time,
    pub(super) flow: &'a Flow,
    pub(super) tos: u8,
}

impl Endpoint {
    /// Handles a datagram (the payload of UDP) from a peer to this local address, with the type of
    /// service `tos` of its IP header (0 if unknown).
    pub fn handle(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: SocketAddr,
        tos: u8,
        datagram: &[u8],
        region: &Region,
    ) {
        self.handle_train(now, (from, to, tos), std::iter::once(datagram), region);
    }

    /// Handles datagrams that were received together; see [`Endpoint::handle`].
    #[inline(never)] // so that profiles tell it from the caller
    pub(crate) fn handle_train<'a>(
        &mut self,
        now: Instant,
        (from, to, tos): (SocketAddr, SocketAddr, u8),
        mut datagrams: impl Iterator<Item = &'a [u8]>,
        region: &Region,
    ) {
        self.forget_sent();
        let flow = Flow { source: from, destination: SocketAddr::new(to.ip(), ROCE_PORT) };
        let train = Train { now, time: self.clock.read(now), flow: &flow, tos };
        let mut next = datagrams.next();
        while let Some(datagram) = next {
            let destination = Bth::destination_of(datagram).filter(|_| !is_broadcast(to.ip()));
            let found = match destination {
                Some(qpn) if qpn != Qpn::GSI => self.find(qpn, &flow).map(|number| (qpn, number)),
                _ => Err(DatagramOutcome::Broadcast),
            };
            match found {
                Ok(of) => next = self.handle_run(&train, of, datagram, &mut datagrams, region),
                Err(outcome) => {
                    let outcome = self.handle_other(&train, datagram, outcome, region);
                    self.counters.note_received(1, ecn::is_marked(tos));
                    self.counters.count(outcome);
                    next = datagrams.next();
                }
            }
        }
    }

    /// Handles a datagram that is for no queue pair: `outcome` is why, unless it is no packet or a
    /// message of connection management.
    #[inline(never)]
    fn handle_other(
        &mut self,
        train: &Train<'_>,
        datagram: &[u8],
        outcome: DatagramOutcome,
        region: &Region,
    ) -> DatagramOutcome {
        let Train { now, flow, .. } = *train;
        match Packet::parse(datagram) {
            Err(_) => DatagramOutcome::Malformed,
            Ok(_) if is_broadcast(flow.destination.ip()) => DatagramOutcome::Broadcast,
            Ok(packet) if packet.bth.destination == Qpn::GSI => {
                self.handle_management(now, flow, &packet, datagram, region)
            }
            Ok(_) => outcome,
        }
    }

    /// The queue pair with this number, if that is its flow.
    fn find(&mut self, qpn: Qpn, flow: &Flow) -> Result<u32, DatagramOutcome> {
        let slot = |number: u32| self.slots.get(number as usize).and_then(Option::as_ref);
        let recent = slot(self.recent)
            .filter(|slot| slot.gone.is_none() && slot.connection.local_qpn == qpn);
        let (number, slot) = match recent {
            Some(recent) => (self.recent, recent),
            None => {
                let number = *self.by_qpn.get(&qpn).ok_or(DatagramOutcome::Stray)?;
                (number, slot(number).ok_or(DatagramOutcome::Stray)?)
            }
        };
        self.recent = number;
        if slot.is_from_peer(flow) { Ok(number) } else { Err(DatagramOutcome::Foreign) }
    }

    /// Handles the datagrams for a queue pair, up to the first for another one, which is returned.
    fn handle_run<'a>(
        &mut self,
        train: &Train<'_>,
        (qpn, number): (Qpn, u32),
        mut datagram: &'a [u8],
        datagrams: &mut impl Iterator<Item = &'a [u8]>,
        region: &Region,
    ) -> Option<&'a [u8]> {
        let slot = self.slots.get_mut(number as usize).and_then(Option::as_mut)?;
        let (memory, events, reorder) = (&mut self.memory, &mut self.events, &mut self.reorder);
        let mut io = Io { region, memory, events, reorder, qp: Qp(number) };
        let mut checks = Checks {
            checker: &mut self.checker,
            pairs: &self.pairs,
            endpoint: self.config.steer.1,
            erratic: &mut self.erratic,
            identification: 0,
        };
        let (mut outcomes, mut received, mut without_trains) = (OutcomeSet::default(), 0, false);
        let executed = slot.executed();
        slot.begin_run(train.flow);
        let next = loop {
            let outcome = match Packet::parse(datagram) {
                Ok(packet) => match slot.check(train, &packet, datagram, &mut checks) {
                    Ok(()) => slot.handle(train, &packet, &mut io, &mut without_trains),
                    Err(outcome) => outcome,
                },
                Err(_) => DatagramOutcome::Malformed,
            };
            self.counters.count(outcome);
            outcomes.insert(outcome);
            received += 1;
            let Some(next) = datagrams.next() else { break None };
            if Bth::destination_of(next) != Some(qpn) {
                break Some(next);
            }
            datagram = next;
        };
        self.counters.note_received(received, ecn::is_marked(train.tos));
        slot.qp.settle(train.time, &mut io);
        without_trains |= slot.note_arrivals(executed);
        let waiting =
            slot.connection.phase == Phase::ReplySent && outcomes.has_any(OutcomeSet::CONFIRMING);
        if outcomes.has_any(OutcomeSet::ALIVE) {
            slot.heard = Some(train.now);
        }
        if without_trains {
            self.without_trains = Some((slot.connection.local, slot.connection.remote));
        }
        // Its deadline is updated after all resulting packets have been sent: at once, where the
        // packets of the run result in none before its user has posted work.
        if slot.ready {
        } else if slot.qp.rests(train.time) {
            slot.rest(number, &mut self.deadlines, &mut self.keeping);
        } else {
            slot.ready = true;
            self.ready.push_back(number);
        }
        if waiting {
            // The peer's confirmation was lost or overtaken: this packet is equivalent, because the
            // number of its first packet was in our reply.
            self.establish(number);
        }
        next
    }

    fn handle_management(
        &mut self,
        now: Instant,
        flow: &Flow,
        packet: &Packet<'_>,
        datagram: &[u8],
        region: &Region,
    ) -> DatagramOutcome {
        if !packet.bth.is_default_partition() {
            return DatagramOutcome::Partition;
        }
        let right = packet.bth.opcode == Opcode::UdSendOnly
            && packet.deth().is_some_and(|deth| deth.qkey == GSI_QKEY);
        let Some(mad) = packet.payload.first_chunk::<MAD_BYTES>().filter(|_| right) else {
            return DatagramOutcome::Unfit;
        };
        if self.checker.check(flow, datagram) == Verdict::Wrong {
            return DatagramOutcome::Damaged;
        }
        self.on_message(now, flow.source.ip(), flow.destination.ip(), mad, region)
    }
}
