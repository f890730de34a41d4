//! Packets for a capture, synthesised from work requests and completions, because a device shows
//! software none. Of the connections that peers have requested:
//!
//! | event | packets |
//! |---|---|
//! | request, accept, reject, established, end | messages of the connection manager |
//! | Send or Write posted | those of the message |
//! | Read posted | its request |
//! | Read completed | its responses |
//! | receive completed | those of the message |
//!
//! Packets have the path MTU, queue pair numbers and packet sequence numbers that the connection
//! manager has agreed on, so they are those on the wire as long as the peer sends messages only (it
//! cannot do anything else: we have no remote regions). Nobody sees acknowledgements, repetitions,
//! UDP source ports and the invariant CRC, so there are none of the first two and the others are
//! constant. What is posted to a queue pair that has just failed is here, and was not sent.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use super::Verbs;
use super::device::Device;
use super::ffi::{CmId, QueuePairSetup};
use crate::capture::{Capture, Direction};
use crate::soft::ROCE_PORT;
use crate::soft::cm::connection::{ConnectRequest, Connection, LocalParameters, Phase, mtu_bytes};
use crate::soft::cm::mad::MAD_BYTES;
use crate::soft::cm::message::{RejectReason, Request};
use crate::wire::header::{
    Aeth, Bth, Deth, Extended, GSI_QKEY, HeaderBytes, ICRC_BYTES, Reth, Syndrome, padding,
};
use crate::wire::icrc::Flow;
use crate::wire::opcode::{Headers, Opcode, Operation, Position};
use crate::wire::psn::{Msn, Psn, Qpn};
use crate::{Fault, Incoming, ReceivedWith, Region, Work};

/// Path MTU for iWARP, which has none: the largest of InfiniBand.
const IWARP_MTU_BYTES: u32 = 4096;

/// One connection in a capture.
pub(super) struct ConnectionCapture {
    capture: Capture,
    /// The connection as the connection manager of this end knows it, and that of the peer.
    local: Connection,
    remote: Connection,
    mtu_bytes: u32,
    /// Number of the next request that we send, and of the next one of the peer.
    send_psn: Psn,
    receive_psn: Psn,
    /// Posted RDMA Reads by the id of their work request, with the number of their first packet.
    reads: VecDeque<(u64, Psn)>,
}

impl Verbs {
    /// Captures the connections that are requested by peers from now on.
    pub fn capture_to(&mut self, capture: &Capture) {
        self.capture = Some(capture.clone());
    }

    /// A requested connection in the capture, if there is one, with its REQ. `qpn`: of our queue
    /// pair.
    pub(super) fn capture_request(
        &self,
        incoming: &Incoming,
        id: &CmId,
        device: &Device,
        qpn: u32,
    ) -> Option<Box<ConnectionCapture>> {
        let name = &device.ability.name;
        let capture = self.capture.as_ref()?.on(name, &description(name, device.ability.iwarp));
        let setup = id.setup().unwrap_or_default();
        let ends = (incoming.local, incoming.remote);
        let connection = ConnectionCapture::new(capture, ends, setup, qpn);
        connection.requested(incoming);
        Some(Box::new(connection))
    }

    /// Captures a request that is rejected, with the REJ.
    pub(super) fn capture_reject(&self, incoming: &Incoming, id: &CmId, private_data: &[u8]) {
        let of_id = |device: &&super::Attached| Some(device.device.key()) == id.device();
        if self.capture.is_some()
            && let Some(attached) = self.devices.iter().find(of_id)
            && let Some(connection) = self.capture_request(incoming, id, &attached.device, 0)
        {
            connection.rejected(private_data);
        }
    }
}

/// Description of the interface of a device.
fn description(device: &str, iwarp: bool) -> String {
    let iwarp = if iwarp {
        "; the device is iWARP, whose addresses are shown, and not its TCP connections: transport, \
         queue pair numbers of peers and sequence numbers are made up"
    } else {
        ""
    };
    format!(
        "synthesised from work requests and completions of {device}; not what was on the wire: no \
         acknowledgements, no retransmissions, and time stamps are those of posting and \
         completion{iwarp}"
    )
}

impl ConnectionCapture {
    fn new(
        capture: Capture,
        (local, remote): (SocketAddr, SocketAddr),
        setup: QueuePairSetup,
        qpn: u32,
    ) -> ConnectionCapture {
        // On iWARP the peer has no number. Its port tells its connections apart as well.
        let peer = if setup.peer == 0 { remote.port().into() } else { setup.peer };
        let end = |local: SocketAddr, remote: SocketAddr, own: u32, other: u32| Connection {
            phase: Phase::Opened,
            local: local.ip(),
            remote: remote.ip(),
            local_comm: own,
            remote_comm: other,
            remote_guid: 0,
            local_qpn: Qpn::new(own),
            remote_qpn: Qpn::new(other),
            transaction: u64::from(qpn) << 32 | u64::from(peer),
            tos: 0,
        };
        let mtu = u8::try_from(setup.path_mtu).ok().and_then(mtu_bytes);
        ConnectionCapture {
            capture,
            local: end(local, remote, qpn, peer),
            remote: end(remote, local, peer, qpn),
            mtu_bytes: mtu.unwrap_or(IWARP_MTU_BYTES),
            send_psn: Psn::new(setup.send_psn),
            receive_psn: Psn::new(setup.receive_psn),
            reads: VecDeque::new(),
        }
    }

    fn requested(&self, incoming: &Incoming) {
        let offer = self.parameters(self.send_psn, incoming.reads, 0);
        let (to, from) = (incoming.local.port(), incoming.remote.port());
        let mad = self.remote.request(&offer, to, from, &incoming.private_data);
        self.manage(Direction::Received, &mad);
    }

    fn rejected(&self, private_data: &[u8]) {
        let Connection { transaction, local: to, remote: from, remote_comm, .. } = self.local;
        let message = Request { local_comm_id: remote_comm, ..Request::zeroed() };
        let request = ConnectRequest { message, transaction, from, to };
        self.manage(Direction::Sent, &request.reject(RejectReason::CONSUMER, private_data));
    }

    /// We have accepted it. `reads`: that we may have outstanding.
    pub(super) fn accepted(&self, reads: u8, private_data: &[u8]) {
        let offer = self.parameters(self.receive_psn, 0, reads);
        self.manage(Direction::Sent, &self.local.reply(&offer, private_data));
    }

    pub(super) fn established(&self) {
        self.manage(Direction::Received, &self.remote.ready());
    }

    /// The connection ends after it was accepted.
    pub(super) fn ended(&self, by_peer: bool) {
        if by_peer {
            self.manage(Direction::Received, &self.remote.leave());
        } else {
            self.manage(Direction::Sent, &self.local.leave());
        }
    }

    fn parameters(&self, receive_psn: Psn, answered_reads: u8, reads: u8) -> LocalParameters {
        let (mtu, ack_timeout) = (self.mtu_bytes, Duration::ZERO);
        LocalParameters { guid: 0, receive_psn, answered_reads, reads, mtu, ack_timeout }
    }

    /// A device has taken a work request. `invalidates`: the device supports Send with Invalidate.
    pub(super) fn posted(&mut self, id: u64, work: &Work, invalidates: bool, region: &Region) {
        let reth =
            |at: &crate::Remote| Reth { address: at.addr, key: at.key, length: work.buf().len() };
        let mut ext = Extended::default();
        let operation = match work {
            Work::Recv(_) => return,
            Work::Send { invalidate, .. } => {
                ext.invalidate = invalidate.filter(|_| invalidates);
                Operation::Send
            }
            Work::SendImmediate { immediate, .. } => {
                ext.immediate = Some(immediate.to_be_bytes());
                Operation::Send
            }
            Work::Write { to, .. } => {
                ext.reth = Some(reth(to));
                Operation::Write
            }
            Work::WriteImmediate { to, immediate, .. } => {
                (ext.reth, ext.immediate) = (Some(reth(to)), Some(immediate.to_be_bytes()));
                Operation::Write
            }
            Work::Read { from, .. } => {
                ext.reth = Some(reth(from));
                self.reads.push_back((id, self.send_psn));
                self.message(Direction::Sent, Operation::ReadRequest, &ext, &[], self.send_psn);
                // Its responses have these numbers.
                let packets = work.buf().len().div_ceil(self.mtu_bytes).max(1);
                self.send_psn = self.send_psn.add(packets);
                return;
            }
        };
        let bytes = region.bytes(work.buf());
        self.send_psn = self.message(Direction::Sent, operation, &ext, bytes, self.send_psn);
    }

    /// A work request has completed. One that has failed is no packet: a flushed receive has no
    /// message, and a failed Read no data.
    pub(super) fn completed(
        &mut self,
        id: u64,
        work: &Work,
        outcome: Result<u32, Fault>,
        with: ReceivedWith,
        region: &Region,
    ) {
        match (work, outcome) {
            (Work::Read { .. }, _) => {
                let at = self.reads.iter().position(|(read, _)| *read == id);
                let Some((_, psn)) = at.and_then(|at| self.reads.remove(at)) else { return };
                if outcome.is_ok() {
                    let aeth = Aeth { syndrome: Syndrome::ACK, msn: Msn::default() };
                    let ext = Extended { aeth: Some(aeth), ..Extended::default() };
                    let bytes = region.bytes(work.buf());
                    self.message(Direction::Received, Operation::ReadResponse, &ext, bytes, psn);
                }
            }
            (Work::Recv(buf), Ok(len)) => {
                let bytes = region.bytes(buf);
                let bytes = bytes.get(..len as usize).unwrap_or(bytes);
                self.received(bytes, with);
            }
            _ => {}
        }
    }

    fn received(&mut self, bytes: &[u8], with: ReceivedWith) {
        let mut ext = Extended::default();
        let mut operation = Operation::Send;
        match with {
            ReceivedWith::Nothing => {}
            ReceivedWith::Invalidate(key) => ext.invalidate = Some(key),
            ReceivedWith::Immediate(immediate) => ext.immediate = Some(immediate.to_be_bytes()),
            ReceivedWith::Write { immediate, bytes } => {
                operation = Operation::Write;
                ext.immediate = Some(immediate.to_be_bytes());
                ext.reth = Some(Reth { address: 0, key: 0, length: bytes });
            }
        }
        self.receive_psn =
            self.message(Direction::Received, operation, &ext, bytes, self.receive_psn);
    }

    /// Adds the packets of one message, of which `psn` is the first number, and returns the next
    /// number. `ext`: the extended headers of all packets; each has those of its operation code.
    fn message(
        &self,
        direction: Direction,
        operation: Operation,
        ext: &Extended,
        bytes: &[u8],
        mut psn: Psn,
    ) -> Psn {
        let last_header = match (ext.immediate, ext.invalidate) {
            (Some(_), _) => Headers::IMMEDIATE,
            (None, Some(_)) => Headers::IETH,
            (None, None) => Headers::NONE,
        };
        let (mut rest, mut is_first) = (bytes, true);
        loop {
            let (payload, after) = rest.split_at(rest.len().min(self.mtu_bytes as usize));
            let position = match (is_first, after.is_empty()) {
                (true, true) => Position::Only,
                (true, false) => Position::First,
                (false, false) => Position::Middle,
                (false, true) => Position::Last,
            };
            if let Some(opcode) = Opcode::at(operation, position, last_header) {
                let destination = match direction {
                    Direction::Sent => self.local.remote_qpn,
                    Direction::Received => self.local.local_qpn,
                };
                self.packet(direction, Bth::new(opcode, destination, psn), ext, payload);
            }
            (rest, is_first, psn) = (after, false, psn.add(1));
            if rest.is_empty() {
                return psn;
            }
        }
    }

    /// Adds a message of the connection manager.
    fn manage(&self, direction: Direction, mad: &[u8; MAD_BYTES]) {
        let deth = Some(Deth { qkey: GSI_QKEY, source: Qpn::GSI });
        let bth = Bth::new(Opcode::UdSendOnly, Qpn::GSI, Psn::default());
        self.packet(direction, bth, &Extended { deth, ..Extended::default() }, mad);
    }

    fn packet(&self, direction: Direction, bth: Bth, ext: &Extended, payload: &[u8]) {
        let pad = padding(payload.len());
        let header = HeaderBytes::emit(&Bth { pad, ..bth }, ext);
        let trailer = &[0; 3 + ICRC_BYTES][..usize::from(pad) + ICRC_BYTES];
        let [ours, peers] =
            [self.local.local, self.local.remote].map(|ip| SocketAddr::new(ip, ROCE_PORT));
        let flow = match direction {
            Direction::Sent => Flow { source: ours, destination: peers },
            Direction::Received => Flow { source: peers, destination: ours },
        };
        self.capture.add(direction, &flow, 0, 0, [header.as_slice(), payload, trailer]);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::path::Path;
    use std::time::Instant;

    use pcap_file::pcapng::{Block, PcapNgReader};

    use crate::capture::Keep;
    use crate::pool::{Pool, PoolPlan};
    use crate::soft::cm::message::CmMessage;
    use crate::verbs::capture::*;
    use crate::wire::header::Packet;
    use crate::{Buf, Remote};

    /// Path MTU 1024; the numbers of requests wrap.
    const SETUP: QueuePairSetup =
        QueuePairSetup { path_mtu: 3, peer: 0x22, receive_psn: 700, send_psn: 0xff_fffe };
    const OUR_QPN: u32 = 0x11;
    const REMOTE: Remote = Remote { addr: 0x1000, key: 7, len: 1 << 20 };
    /// IP and UDP headers.
    const BEFORE: usize = 28;

    struct Fixture {
        directory: tempfile::TempDir,
        pool: Pool,
        connection: ConnectionCapture,
    }

    fn fixture(keep: Keep, setup: QueuePairSetup) -> Fixture {
        let directory = tempfile::tempdir().unwrap();
        let capture = Capture::begin(&path(&directory), keep, u64::MAX).unwrap();
        let pool = Pool::new(PoolPlan::without_receives(8, 1 << 20, 1 << 16)).unwrap();
        let at = |text: &str| text.parse().unwrap();
        let ends = (at("192.0.2.1:4420"), at("192.0.2.2:50000"));
        let capture = capture.on("rxe0", &description("rxe0", setup.peer == 0));
        let connection = ConnectionCapture::new(capture, ends, setup, OUR_QPN);
        Fixture { directory, pool, connection }
    }

    fn path(directory: &tempfile::TempDir) -> std::path::PathBuf {
        directory.path().join("a.pcapng")
    }

    impl Fixture {
        /// A buffer of this length, full of 7.
        fn buf(&mut self, len: u32) -> Buf {
            let mut buf = self.pool.take_data(len).unwrap();
            self.pool.bytes_mut(&mut buf).fill(7);
            buf
        }

        fn post(&mut self, id: u64, work: Work) -> Work {
            self.connection.posted(id, &work, true, self.pool.region());
            work
        }

        fn complete(&mut self, id: u64, work: Work, outcome: Result<u32, Fault>) {
            let with = ReceivedWith::Nothing;
            self.connection.completed(id, &work, outcome, with, self.pool.region());
            self.pool.give(work.into_buf());
        }

        /// The datagrams in the file, and whether we have sent them.
        fn datagrams(self, expected: usize) -> Vec<(bool, Vec<u8>)> {
            drop(self.connection);
            let deadline = Instant::now() + Duration::from_secs(60);
            loop {
                let found = read(&path(&self.directory));
                assert!(found.len() <= expected, "{} packets", found.len());
                if found.len() == expected && is_complete(&path(&self.directory)) {
                    return found;
                }
                assert!(Instant::now() < deadline, "{} packets of {expected}", found.len());
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Whether no thread of this process has the file open any more.
    fn is_complete(file: &Path) -> bool {
        let file = file.canonicalize().unwrap();
        let mut open = std::fs::read_dir("/proc/self/fd").unwrap();
        !open.any(|each| {
            each.and_then(|each| std::fs::read_link(each.path())).is_ok_and(|to| to == file)
        })
    }

    fn read(path: &Path) -> Vec<(bool, Vec<u8>)> {
        let Ok(mut reader) = PcapNgReader::new(File::open(path).unwrap()) else { return vec![] };
        let mut found = Vec::new();
        while let Some(Ok(block)) = reader.next_block() {
            if let Block::EnhancedPacket(packet) = block {
                let ours = packet.data[12..16] == [192, 0, 2, 1];
                assert_eq!(packet.original_len as usize, packet.data.len());
                found.push((ours, packet.data[BEFORE..].to_vec()));
            }
        }
        found
    }

    type Row = (bool, Opcode, u32, u32, usize);

    /// Whether we have sent it, code, destination, number and payload of each packet.
    fn rows(datagrams: &[(bool, Vec<u8>)]) -> Vec<Row> {
        let row = |(ours, bytes): &(bool, Vec<u8>)| {
            let Packet { bth, payload, .. } = Packet::parse(bytes).unwrap();
            (*ours, bth.opcode, bth.destination.get(), bth.psn.get(), payload.len())
        };
        datagrams.iter().map(row).collect()
    }

    #[test]
    fn messages_are_segmented_by_the_path_mtu_and_numbered_from_what_was_agreed() {
        let mut fixture = fixture(Keep::All, SETUP);
        let [small, large, sink, received] = [64, 2500, 2049, 1025].map(|len| fixture.buf(len));
        let sent = fixture.post(1, Work::Send { from: small, invalidate: Some(5) });
        let written = fixture.post(2, Work::Write { from: large, to: REMOTE });
        let pulled = fixture.post(3, Work::Read { into: sink, from: REMOTE });
        let small = fixture.buf(3);
        let second = fixture.post(4, Work::SendImmediate { from: small, immediate: 9 });
        fixture.complete(5, Work::Recv(received), Ok(1025));
        fixture.complete(3, pulled, Ok(0));
        // What a device reports later, or does not report, is in the file already.
        fixture.complete(2, written, Ok(0));
        [sent, second].into_iter().for_each(|work| fixture.pool.give(work.into_buf()));
        let datagrams = fixture.datagrams(11);
        assert_eq!(
            rows(&datagrams),
            [
                (true, Opcode::SendOnlyInvalidate, 0x22, 0xff_fffe, 64),
                (true, Opcode::WriteFirst, 0x22, 0xff_ffff, 1024),
                (true, Opcode::WriteMiddle, 0x22, 0, 1024),
                (true, Opcode::WriteLast, 0x22, 1, 452),
                (true, Opcode::ReadRequest, 0x22, 2, 0),
                // The three responses of the read have the numbers between.
                (true, Opcode::SendOnlyImmediate, 0x22, 5, 3),
                (false, Opcode::SendFirst, 0x11, 700, 1024),
                (false, Opcode::SendLast, 0x11, 701, 1),
                (false, Opcode::ReadResponseFirst, 0x11, 2, 1024),
                (false, Opcode::ReadResponseMiddle, 0x11, 3, 1024),
                (false, Opcode::ReadResponseLast, 0x11, 4, 1),
            ]
        );
        let parsed = |at: usize| Packet::parse(&datagrams[at].1).unwrap();
        assert_eq!(parsed(0).invalidate(), Some(5));
        assert_eq!(parsed(1).reth(), Some(Reth { address: 0x1000, key: 7, length: 2500 }));
        assert_eq!(parsed(4).reth(), Some(Reth { address: 0x1000, key: 7, length: 2049 }));
        assert!(datagrams.iter().all(|(_, bytes)| bytes.len().is_multiple_of(4)));
    }

    #[test]
    fn flushed_work_requests_are_no_packets_and_take_no_numbers() {
        let mut fixture = fixture(Keep::All, SETUP);
        let [first, second, sink] = [64, 64, 4096].map(|len| fixture.buf(len));
        fixture.complete(1, Work::Recv(first), Err(Fault::Flushed));
        let pulled = fixture.post(2, Work::Read { into: sink, from: REMOTE });
        fixture.complete(2, pulled, Err(Fault::Flushed));
        fixture.complete(3, Work::Recv(second), Ok(16));
        assert_eq!(
            rows(&fixture.datagrams(2)),
            [
                (true, Opcode::ReadRequest, 0x22, 0xff_fffe, 0),
                (false, Opcode::SendOnly, 0x11, 700, 16),
            ]
        );
    }

    #[test]
    fn data_of_hosts_are_blanked_unless_requested() {
        for (keep, expected) in [(Keep::Headers, [64, 0, 0]), (Keep::All, [500; 3])] {
            let mut fixture = fixture(keep, SETUP);
            let [capsule, from, into] = [500; 3].map(|len| fixture.buf(len));
            fixture.complete(1, Work::Recv(capsule), Ok(500));
            let written = fixture.post(2, Work::Write { from, to: REMOTE });
            let pulled = fixture.post(3, Work::Read { into, from: REMOTE });
            fixture.complete(3, pulled, Ok(0));
            fixture.complete(2, written, Ok(0));
            let found = fixture.datagrams(4);
            let with_payload = found.iter().filter_map(|(_, bytes)| {
                let payload = Packet::parse(bytes).unwrap().payload;
                let data = payload.iter().filter(|byte| **byte == 7).count();
                (!payload.is_empty()).then_some(data)
            });
            assert_eq!(with_payload.collect::<Vec<_>>(), expected, "{keep:?}");
        }
    }

    fn incoming() -> Incoming {
        let [local, remote] = ["192.0.2.1:4420", "192.0.2.2:50000"].map(|at| at.parse().unwrap());
        Incoming::detached(local, remote, vec![0xaa; 32], 16, Box::new(()))
    }

    fn managed(datagram: &[u8]) -> (u64, CmMessage) {
        let packet = Packet::parse(datagram).unwrap();
        let (header, message) = CmMessage::parse(packet.payload.try_into().unwrap()).unwrap();
        (header.transaction, message)
    }

    #[test]
    fn messages_of_the_connection_manager_have_the_numbers_of_the_packets() {
        let fixture = fixture(Keep::Headers, SETUP);
        fixture.connection.requested(&incoming());
        fixture.connection.accepted(4, &[0xbb; 32]);
        fixture.connection.established();
        fixture.connection.ended(true);
        fixture.connection.ended(false);
        let datagrams = fixture.datagrams(5);
        let ours: Vec<bool> = datagrams.iter().map(|(ours, _)| *ours).collect();
        assert_eq!(ours, [false, true, false, false, true]);
        let messages: Vec<_> = datagrams.iter().map(|(_, bytes)| managed(bytes)).collect();
        assert!(messages.iter().all(|(transaction, _)| *transaction == messages[0].0));
        let CmMessage::Request(request) = messages[0].1 else { panic!("{messages:?}") };
        assert_eq!((request.qpn.get(), request.starting_psn.get()), (0x22, 0xff_fffe));
        assert_eq!((request.path_mtu, request.service_id as u16), (3, 4420));
        assert_eq!(request.private_data[36..68], [0xaa; 32]);
        let CmMessage::Reply(reply) = messages[1].1 else { panic!("{messages:?}") };
        assert_eq!((reply.qpn.get(), reply.starting_psn.get()), (OUR_QPN, 700));
        assert_eq!((reply.initiator_depth, &reply.private_data[..32]), (4, &[0xbb; 32][..]));
        assert!(matches!(messages[2].1, CmMessage::ReadyToUse(_)));
        let CmMessage::DisconnectRequest(request) = messages[3].1 else { panic!("{messages:?}") };
        assert_eq!((request.local_comm_id, request.remote_qpn.get()), (0x22, OUR_QPN));
    }

    #[test]
    fn a_rejected_request_has_its_private_data() {
        let fixture = fixture(Keep::Headers, SETUP);
        fixture.connection.requested(&incoming());
        fixture.connection.rejected(&[1, 0, 3, 0]);
        let datagrams = fixture.datagrams(2);
        let CmMessage::Reject(reject) = managed(&datagrams[1].1).1 else { panic!("no REJ") };
        assert_eq!(
            (reject.reason, &reject.private_data[..4]),
            (RejectReason(28), &[1, 0, 3, 0][..])
        );
        assert_eq!(reject.remote_comm_id, 0x22);
    }

    #[test]
    fn iwarp_connections_of_a_peer_differ_by_its_port() {
        let mut fixture = fixture(Keep::All, QueuePairSetup::default());
        let large = fixture.buf(5000);
        let sent = fixture.post(1, Work::Send { from: large, invalidate: None });
        fixture.pool.give(sent.into_buf());
        let expected =
            [(true, Opcode::SendFirst, 50000, 0, 4096), (true, Opcode::SendLast, 50000, 1, 904)];
        assert_eq!(rows(&fixture.datagrams(2)), expected);
        assert!(description("siw0", true).contains("siw0; not what was on the wire"));
        assert!(description("siw0", true).contains("made up"));
        assert!(!description("rxe0", false).contains("iWARP"));
    }
}
