//! State of one queue pair in an endpoint: the queue pair, its connection, and the addresses and ports
//! its packets must have.

use std::sync::Arc;
use std::time::Instant;

use crate::Reason;
use crate::soft::cm::connection::{Connection, is_marked_guid};
use crate::soft::cm::request_handle::Token;
use crate::soft::qp::{QueuePair, Settings, ecn};
use crate::soft::stats::datagrams::DatagramOutcome;
use crate::soft::wire::gso_check::{MOST_SEGMENTS, Places};
use crate::soft::wire::header::{Bth, Packet};
use crate::soft::wire::icrc::Verdict;
use crate::soft::wire::ipv4_id::{Judgement, LastId, Pair};
use crate::soft::wire::opcode::Operation;
use crate::soft::wire::source_port::SourcePort;
use crate::soft::wire::tx_packet::TxPacket;

/// Packets in a row that contradict what the first one said of fragmentation, before they are believed.
const CONTRADICTED: u8 = 4;

/// State of one queue pair in an endpoint; see the module.
pub(super) struct QpContext {
    pub(super) qp: QueuePair,
    pub(super) connection: Connection,
    pub(super) settings: Settings,
    /// What the endpoint where the request came in is told.
    pub(super) token: Option<Token>,
    /// Its user has let the peer in.
    pub(super) admitted: bool,
    /// When the peer was heard last.
    pub(super) heard: Option<Instant>,
    /// What is known of the identifications of the peer's packets, and of those of this queue pair.
    pair: Arc<Pair>,
    identification: Option<LastId>,
    /// Whether the peer's packets may be fragmented, which no sender changes; and how many in a row
    /// have said otherwise.
    fragmentable: Option<bool>,
    contradicted: u8,
    /// How our requests, and our data of reads, have left: where it depends on that whether they come.
    requests: Option<Box<Places>>,
    responses: Option<Box<Places>>,
    /// From which UDP port its packets come.
    pub(super) source_port: SourcePort,
    /// In the list of those that may have something to send.
    pub(super) ready: bool,
    /// In the list of those that keep an acknowledgement back, or did.
    pub(super) keeping: bool,
    /// It has ended, and the driver has not been told.
    pub(super) gone: Option<Reason>,
    /// How many events there were in all when the last about it came, as far as that matters:
    /// once it has ended.
    pub(super) last_event: u64,
}

impl QpContext {
    /// A queue pair that has just been made for a connection.
    pub(super) fn new(
        qp: QueuePair,
        connection: Connection,
        settings: Settings,
        token: Option<Token>,
        pair: Arc<Pair>,
    ) -> QpContext {
        QpContext {
            qp,
            connection,
            settings,
            token,
            admitted: false,
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

    /// Whether the peer sees identifications, on which the CRC of what it gets depends.
    fn is_particular(&self) -> bool {
        self.connection.remote.is_ipv4() && !is_marked_guid(self.connection.remote_guid)
    }

    /// A packet leaves at this place of its train.
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

    /// Requests that the peer has executed.
    pub(super) fn executed(&self) -> u64 {
        self.qp.executed()
    }

    /// Something was heard of the peer, or nothing for too long: it may have said what has come of our
    /// packets. `before`: what it had executed. True when there are no trains to it from now on.
    pub(super) fn note_arrivals(&mut self, before: u64, packet: Option<&Packet<'_>>) -> bool {
        let mut ended = false;
        if let Some(places) = &mut self.requests {
            let (end, lacks) = self.qp.next_to_execute();
            let new = self.qp.executed().saturating_sub(before).min(u64::from(u32::MAX));
            ended |= self.pair.segments.note(places.arrive(end, new as u32, lacks));
        }
        // Who asks again for data has all before them.
        let again = |packet: &&Packet<'_>| {
            packet.row().operation == Operation::ReadRequest && self.qp.is_late(packet)
        };
        if let Some((places, packet)) = self.responses.as_mut().zip(packet.filter(again)) {
            ended |= self.pair.segments.note(places.arrive(packet.bth.psn, u32::MAX, true));
        }
        if ended {
            self.qp.note_trains_ended();
        }
        ended
    }

    /// Whether packets to the peer may leave in trains.
    pub(super) fn takes_trains(&self) -> bool {
        self.pair.segments.are_kept()
    }

    /// When its queue pair wants to be looked at: not once it has ended.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.gone.is_some() { None } else { self.qp.poll_timeout() }
    }

    /// A packet has come whose sender heeds marks, so ours may be marked as well.
    pub(super) fn on_capable(&mut self, now: Instant, tos: u8, packet: &Packet<'_>) {
        self.connection.tos |= ecn::CAPABLE;
        if ecn::is_marked(tos) && packet.row().operation != Operation::Congestion {
            self.qp.on_mark(now);
        }
    }

    /// Whether a packet may be the peer's that may be fragmented, or may not. Our own kind forbids it;
    /// of others the first packet says whether they do. It may have been damaged, so who contradicts it
    /// often is believed.
    fn may_be(&mut self, fragmentable: bool) -> bool {
        if is_marked_guid(self.connection.remote_guid) {
            return !fragmentable;
        }
        let agrees = *self.fragmentable.get_or_insert(fragmentable) == fragmentable;
        self.contradicted = if agrees { 0 } else { self.contradicted + 1 };
        if self.contradicted == CONTRADICTED {
            (self.fragmentable, self.contradicted) = (Some(fragmentable), 0);
        }
        self.fragmentable == Some(fragmentable)
    }

    /// Whether the peer sends from this port; or else what becomes of the packet. Before that is known
    /// nothing is kept that is not its turn.
    pub(super) fn check_port(
        &mut self,
        port: u16,
        packet: &Packet<'_>,
    ) -> Result<(), DatagramOutcome> {
        if !self.source_port.is_known() && self.qp.is_early(packet) {
            return Err(DatagramOutcome::Early);
        }
        let expected = self.qp.is_expected(packet);
        let admitted = self.source_port.admits(port, packet.bth.psn, expected);
        if admitted { Ok(()) } else { Err(DatagramOutcome::Port) }
    }

    /// Whether the peer may have sent a packet with this identification.
    pub(super) fn check_identification(
        &mut self,
        endpoint: u32,
        verdict: Verdict,
        now_ms: impl FnOnce() -> u32,
    ) -> Judgement {
        let fragmentable = matches!(verdict, Verdict::Fragmentable(_));
        let id = match verdict {
            Verdict::Solved(id) | Verdict::Fragmentable(id) if self.may_be(fragmentable) => id,
            Verdict::Exact => return Judgement::Plausible,
            _ => return Judgement::Implausible,
        };
        if !is_marked_guid(self.connection.remote_guid) {
            return self.pair.check_identification(
                endpoint,
                &mut self.identification,
                id,
                now_ms(),
            );
        }
        // Our own kind: the place in a train.
        let right = usize::from(id) < MOST_SEGMENTS;
        if right { Judgement::Plausible } else { Judgement::Implausible }
    }
}
