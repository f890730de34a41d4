//! State of one queue pair in an endpoint: the queue pair, its connection, and the addresses and
//! ports that its packets must have.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use super::flow;
use super::train::Train;
use crate::Reason;
use crate::soft::clock::Time;
use crate::soft::cm::connection::{Connection, is_marked_guid};
use crate::soft::cm::request_handle::Token;
use crate::soft::config::{Config, ROCE_PORT};
use crate::soft::gso_check::{Arrivals, MOST_SEGMENTS, Places};
use crate::soft::ipv4_id::{Judgement, LastId, Pair, Pairs};
use crate::soft::qp::{Io, QueuePair, Settings, ecn};
use crate::soft::source_port::SourcePort;
use crate::soft::stats::datagrams::DatagramOutcome;
use crate::soft::timer_heap::TimerHeap;
use crate::wire::flow_crc::FlowCrc;
use crate::wire::header::{Bth, Packet};
use crate::wire::icrc::{Checker, Flow, Verdict};
use crate::wire::opcode::Operation;
use crate::wire::tx_packet::TxPacket;

/// Consecutive packets that must contradict the first one about fragmentation before they are
/// accepted.
const CONTRADICTED: u8 = 4;

/// What checks of packets borrow, and the IPv4 identification that the next one probably has.
#[derive(Debug)]
pub(super) struct Checks<'a> {
    pub(super) checker: &'a mut Checker,
    pub(super) pairs: &'a Pairs,
    /// Number of the endpoint among those of its address.
    pub(super) endpoint: u32,
    /// A peer whose identifications cannot be predicted.
    pub(super) erratic: &'a mut Option<IpAddr>,
    pub(super) identification: u16,
}

/// State of one queue pair in an endpoint; see the module.
pub(super) struct QpContext {
    pub(super) qp: QueuePair,
    pub(super) connection: Connection,
    pub(super) settings: Settings,
    /// State of its request, for the endpoint where it arrived.
    pub(super) token: Option<Token>,
    /// The user has admitted the peer.
    pub(super) admitted: bool,
    /// The peer has rejected our reply, or has disconnected instead of a confirmation.
    pub(super) declined: bool,
    /// Time of the last packet of the peer.
    pub(super) heard: Option<Instant>,
    /// State of the identifications of the peer's packets, and of those of this queue pair.
    pair: Arc<Pair>,
    identification: Option<LastId>,
    /// The peer is of this implementation.
    ours: bool,
    /// Whether the peer's packets may be fragmented, which a sender does not change; and how many
    /// consecutive ones have contradicted.
    fragmentable: Option<bool>,
    contradicted: u8,
    /// Places of our requests and read responses in their trains, where their arrival depends on
    /// that.
    requests: Option<Box<Places>>,
    responses: Option<Box<Places>>,
    /// The UDP source port of its packets.
    pub(super) source_port: SourcePort,
    /// Addresses and ports of packets to the peer, and of the last one from it.
    pub(super) tx_crc: FlowCrc,
    rx_crc: FlowCrc,
    /// It is in the list of those that may have something to send.
    pub(super) ready: bool,
    /// It is in the list of those that delay an acknowledgement, or did.
    pub(super) keeping: bool,
    /// It has ended, and `Gone` is not returned yet.
    pub(super) gone: Option<Reason>,
    /// Number of all events up to its last one; set once it has ended.
    pub(super) last_event: u64,
}

impl QpContext {
    /// For a new connection.
    pub(super) fn new(
        qp: QueuePair,
        connection: Connection,
        settings: Settings,
        token: Option<Token>,
        pair: Arc<Pair>,
    ) -> QpContext {
        let (local, remote) = connection.ends();
        QpContext {
            ours: is_marked_guid(connection.remote_guid),
            tx_crc: FlowCrc::new(flow((local, ROCE_PORT), remote)),
            rx_crc: FlowCrc::new(flow((remote, ROCE_PORT), local)),
            qp,
            connection,
            settings,
            token,
            admitted: false,
            declined: false,
            heard: None,
            pair,
            identification: None,
            fragmentable: None,
            contradicted: 0,
            requests: None,
            responses: None,
            source_port: SourcePort::default(),
            ready: false,
            keeping: false,
            gone: None,
            last_event: 0,
        }
    }

    /// Sets the source port of packets to the peer, which depends on both queue pairs.
    pub(super) fn set_source_port(&mut self, config: &Config) {
        let Connection { local, remote, local_qpn, remote_qpn, .. } = self.connection;
        let port = config.source_port(local_qpn, remote_qpn);
        self.tx_crc = FlowCrc::new(flow((local, port), remote));
    }

    /// Whether a flow is from the address of the peer to that of the connection.
    #[inline]
    pub(super) fn is_from_peer(&self, flow: &Flow) -> bool {
        // The last packets came from there, with the same port, as a rule.
        let ends = || (flow.source.ip(), flow.destination.ip());
        self.rx_crc.flow() == flow || ends() == (self.connection.remote, self.connection.local)
    }

    /// Packets of a flow follow, between the addresses of the connection.
    pub(super) fn begin_run(&mut self, flow: &Flow) {
        if self.rx_crc.flow().source.port() != flow.source.port() {
            self.rx_crc = FlowCrc::new(*flow);
        }
    }

    /// Whether the peer checks identifications, on which the CRC of packets depends.
    fn is_particular(&self) -> bool {
        self.connection.remote.is_ipv4() && !self.ours
    }

    /// Whether a packet of the flow of [`QpContext::begin_run`] is undamaged and of the peer;
    /// otherwise the outcome of its datagram.
    #[inline(always)] // for each packet, from one place
    pub(super) fn check(
        &mut self,
        train: &Train<'_>,
        packet: &Packet<'_>,
        datagram: &[u8],
        checks: &mut Checks<'_>,
    ) -> Result<(), DatagramOutcome> {
        if !packet.bth.is_default_partition() {
            return Err(DatagramOutcome::Partition);
        }
        let verdict = checks.checker.check_of(&mut self.rx_crc, checks.identification, datagram);
        if verdict == Verdict::Wrong {
            return Err(DatagramOutcome::Damaged);
        }
        if let Verdict::Solved(id) | Verdict::Fragmentable(id) = verdict {
            // Segments of a train are numbered, and so are datagrams of most other senders.
            checks.identification = id.wrapping_add(1);
        }
        // Adapters send these differently, and nothing in them is lasting.
        if packet.row().operation != Operation::Congestion {
            self.check_port(train.flow.source.port(), packet)?;
            match self.check_identification(verdict, train.now, checks) {
                Judgement::Plausible => {}
                Judgement::Implausible => return Err(DatagramOutcome::Implausible),
                Judgement::Erratic => {
                    *checks.erratic = Some(self.connection.remote);
                    return Err(DatagramOutcome::Implausible);
                }
            }
        }
        if ecn::is_capable(train.tos) {
            self.on_capable(train.time, train.tos, packet);
        }
        if packet.row().operation == Operation::Congestion && !ecn::is_capable(self.connection.tos)
        {
            // None of our packets to it can have been marked.
            return Err(DatagramOutcome::Unasked);
        }
        Ok(())
    }

    /// Handles a checked packet; [`QueuePair::settle`] follows after the last one of a run.
    /// `without_trains` is set if no trains are sent to the peer from now on.
    #[inline(always)] // for each packet, from one place
    pub(super) fn handle(
        &mut self,
        train: &Train<'_>,
        packet: &Packet<'_>,
        io: &mut Io<'_>,
        without_trains: &mut bool,
    ) -> DatagramOutcome {
        // Once it is executed, every request is late.
        let again = self.responses.is_some() && self.is_repeated_read(packet);
        let outcome = self.qp.receive(train.time, packet, io);
        if again {
            *without_trains |= self.note_repeated_read(packet);
        }
        if matches!(
            outcome,
            DatagramOutcome::Executed | DatagramOutcome::Answered | DatagramOutcome::NotReady
        ) {
            self.source_port.learn(train.flow.source.port());
        }
        outcome
    }

    /// Called when a packet leaves at this place of its train.
    pub(super) fn depart(&mut self, outgoing: &TxPacket, place: usize) {
        if !self.is_particular() {
            return;
        }
        let Some(bth) = outgoing.header().first_chunk().and_then(|b| Bth::parse(b).ok()) else {
            return;
        };
        let row = bth.opcode.row();
        let places = match row.operation {
            _ if row.request => &mut self.requests,
            Operation::ReadResponse => &mut self.responses,
            _ => return,
        };
        places.get_or_insert_default().depart(bth.psn, place);
    }

    /// Number of request packets that the peer has executed.
    pub(super) fn executed(&self) -> u64 {
        self.qp.executed()
    }

    /// Called after packets of the peer, or after a timeout: there may be news of which packets
    /// arrived. `before`: what it had executed. Returns true if no trains are sent to it from now
    /// on.
    #[inline]
    pub(super) fn note_arrivals(&mut self, before: u64) -> bool {
        // Places are kept for peers that check identifications only.
        self.requests.is_some() && self.note_new_arrivals(before)
    }

    #[inline(never)]
    fn note_new_arrivals(&mut self, before: u64) -> bool {
        let Some(places) = &mut self.requests else { return false };
        let (end, lacks) = self.qp.next_to_execute();
        let new = self.qp.executed().saturating_sub(before).min(u64::from(u32::MAX));
        let arrivals = places.arrive(end, new as u32, lacks);
        self.note_segments(arrivals)
    }

    /// Whether a packet that was not handled yet requests data again.
    fn is_repeated_read(&self, packet: &Packet<'_>) -> bool {
        packet.row().operation == Operation::ReadRequest && self.qp.is_late(packet)
    }

    /// The same for a packet: a peer that requests data again has received all data before them.
    fn note_repeated_read(&mut self, packet: &Packet<'_>) -> bool {
        let Some(places) = &mut self.responses else { return false };
        let arrivals = places.arrive(packet.bth.psn, u32::MAX, true);
        self.note_segments(arrivals)
    }

    fn note_segments(&mut self, arrivals: Arrivals) -> bool {
        let ended = self.pair.segments.note(arrivals);
        if ended {
            self.qp.note_trains_ended();
        }
        ended
    }

    /// Whether packets to the peer may leave in trains.
    pub(super) fn takes_trains(&self) -> bool {
        self.pair.segments.are_kept()
    }

    /// Time of the next timer of its queue pair; never after its end.
    pub(super) fn deadline(&self) -> Time {
        if self.gone.is_some() { Time::NEVER } else { self.qp.deadline() }
    }

    /// Everything that is to be sent now was sent: sets its deadline in `deadlines`, and lists it
    /// among those that delay an acknowledgement. `number`: its own.
    #[inline(always)] // for each train
    pub(super) fn rest(&mut self, number: u32, deadlines: &mut TimerHeap, keeping: &mut Vec<u32>) {
        deadlines.set(number, self.deadline());
        if self.qp.is_keeping() && !std::mem::replace(&mut self.keeping, true) {
            keeping.push(number);
        }
    }

    /// A packet of an ECN-capable sender has arrived, so ours may be ECN-capable too.
    fn on_capable(&mut self, now: Time, tos: u8, packet: &Packet<'_>) {
        self.connection.tos |= ecn::CAPABLE;
        if ecn::is_marked(tos) && packet.row().operation != Operation::Congestion {
            self.qp.on_mark(now);
        }
    }

    /// Whether the peer's packets may have this value of "may fragment". This implementation
    /// forbids fragmentation; for others the first packet decides. It may have been damaged, so a
    /// value that contradicts it repeatedly is accepted.
    fn may_be(&mut self, fragmentable: bool) -> bool {
        if self.ours {
            return !fragmentable;
        }
        let agrees = *self.fragmentable.get_or_insert(fragmentable) == fragmentable;
        self.contradicted = if agrees { 0 } else { self.contradicted + 1 };
        if self.contradicted == CONTRADICTED {
            (self.fragmentable, self.contradicted) = (Some(fragmentable), 0);
        }
        self.fragmentable == Some(fragmentable)
    }

    /// Whether the peer sends from this port; otherwise the outcome of the packet. Before the port
    /// is known no out-of-order packet is kept.
    #[inline(always)] // for each packet, from one place
    fn check_port(&mut self, port: u16, packet: &Packet<'_>) -> Result<(), DatagramOutcome> {
        if !self.source_port.is_known() && self.qp.is_early(packet) {
            return Err(DatagramOutcome::Early);
        }
        let expected = || self.qp.is_expected(packet);
        let admitted = self.source_port.admits(port, packet.bth.psn, expected);
        if admitted { Ok(()) } else { Err(DatagramOutcome::Port) }
    }

    /// Whether the peer may have sent a packet with this identification.
    #[inline(always)] // for each packet, from one place
    fn check_identification(
        &mut self,
        verdict: Verdict,
        now: Instant,
        checks: &Checks<'_>,
    ) -> Judgement {
        let fragmentable = matches!(verdict, Verdict::Fragmentable(_));
        let id = match verdict {
            Verdict::Solved(id) | Verdict::Fragmentable(id) if self.may_be(fragmentable) => id,
            Verdict::Exact => return Judgement::Plausible,
            _ => return Judgement::Implausible,
        };
        if !self.ours {
            let now_ms = checks.pairs.clock_ms(now);
            let own = &mut self.identification;
            return self.pair.check_identification(checks.endpoint, own, id, now_ms);
        }
        // This implementation: the place in a train.
        let right = usize::from(id) < MOST_SEGMENTS;
        if right { Judgement::Plausible } else { Judgement::Implausible }
    }
}
