//! What an endpoint has of one queue pair: the queue pair itself, its connection, and what its packets
//! have to look like to be the peer's.

use std::sync::Arc;
use std::time::Instant;

use super::congestion;
use super::connection::{Connection, is_kin};
use super::counters::Fate;
use super::header::Packet;
use super::icrc::Verdict;
use super::identification::{Judgement, Pair, Seen};
use super::opcode::Operation;
use super::qp::{QueuePair, Settings};
use super::source_port::SourcePort;
use super::ticket::Token;
use super::train::MOST_SEGMENTS;
use crate::Reason;

/// Packets in a row that contradict what the first one said of fragmentation, before they are believed.
const CONTRADICTED: u8 = 4;

/// See the module.
pub(super) struct Slot {
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
    identification: Option<Seen>,
    /// Whether the peer's packets may be fragmented, which no sender changes; and how many in a row
    /// have said otherwise.
    fragmentable: Option<bool>,
    contradicted: u8,
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

impl Slot {
    /// A queue pair that has just been made for a connection.
    pub(super) fn new(
        qp: QueuePair,
        connection: Connection,
        settings: Settings,
        token: Option<Token>,
        pair: Arc<Pair>,
    ) -> Slot {
        Slot {
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
            source_port: SourcePort::default(),
            ready: false,
            keeping: false,
            gone: None,
            last_event: 0,
        }
    }

    /// When its queue pair wants to be looked at: not once it has ended.
    pub(super) fn deadline(&self) -> Option<Instant> {
        if self.gone.is_some() { None } else { self.qp.poll_timeout() }
    }

    /// A packet has come whose sender heeds marks, so ours may be marked as well.
    pub(super) fn on_capable(&mut self, now: Instant, tos: u8, packet: &Packet<'_>) {
        self.connection.tos |= congestion::CAPABLE;
        if congestion::is_marked(tos) && packet.row().operation != Operation::Congestion {
            self.qp.on_mark(now);
        }
    }

    /// Whether a packet may be the peer's that may be fragmented, or may not. Our own kind forbids it;
    /// of others the first packet says whether they do. It may have been damaged, so who contradicts it
    /// often is believed.
    fn may_be(&mut self, fragmentable: bool) -> bool {
        if is_kin(self.connection.remote_guid) {
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
    pub(super) fn check_port(&mut self, port: u16, packet: &Packet<'_>) -> Result<(), Fate> {
        if !self.source_port.is_known() && self.qp.is_early(packet) {
            return Err(Fate::Early);
        }
        let expected = self.qp.is_expected(packet);
        let admitted = self.source_port.admits(port, packet.bth.psn, expected);
        if admitted { Ok(()) } else { Err(Fate::Port) }
    }

    /// Whether the peer may have sent a packet with this identification.
    pub(super) fn judge(&mut self, endpoint: u32, verdict: Verdict, now_ms: u32) -> Judgement {
        let fragmentable = matches!(verdict, Verdict::Fragmentable(_));
        let id = match verdict {
            Verdict::Solved(id) | Verdict::Fragmentable(id) if self.may_be(fragmentable) => id,
            Verdict::Exact => return Judgement::Plausible,
            _ => return Judgement::Implausible,
        };
        if !is_kin(self.connection.remote_guid) {
            return self.pair.judge(endpoint, &mut self.identification, id, now_ms);
        }
        // Our own kind: the place in a train.
        let right = usize::from(id) < MOST_SEGMENTS;
        if right { Judgement::Plausible } else { Judgement::Implausible }
    }
}
