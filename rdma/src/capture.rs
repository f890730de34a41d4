//! Packet capture of the providers: sent and received packets as a pcapng file that Wireshark
//! decodes as RoCEv2 (IETF draft-ietf-opsawg-pcapng). Each interface of the file says where its
//! packets are from.
//!
//! The thread that moves packets only copies the captured bytes and queues them; another thread
//! writes them. If it cannot keep up, packets are missing in the file (their number is stored with
//! the next one), never on the network.
//!
//! The IP and UDP headers are synthesised: a UDP socket does not see those of the real datagram.

use std::borrow::Cow;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Read, Write};
use std::net::{IpAddr, SocketAddr};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use pcap_file::pcapng::blocks::enhanced_packet::{EnhancedPacketBlock, EnhancedPacketOption};
use pcap_file::pcapng::blocks::interface_description::{
    InterfaceDescriptionBlock, InterfaceDescriptionOption,
};
use pcap_file::pcapng::{PcapNgBlock, PcapNgWriter};
use pcap_file::{DataLink, PcapError};
use tracing::{info, warn};

use crate::wire::header::{Bth, ICRC_BYTES};
use crate::wire::icrc::{Flow, gid};
use crate::wire::opcode::{Opcode, Operation};

/// Maximum of packets queued between the two threads.
const QUEUED: usize = 16 << 10;
/// Maximum delay of a packet until it is in the file.
const LATEST: Duration = Duration::from_millis(200);
/// Bytes of a message that count as its header: the command of an NVMe capsule, or all of a
/// response.
const MESSAGE_HEAD_BYTES: usize = 64;
/// Read and write for the owner.
const OWNER_ONLY: u32 = 0o600;
/// The first bytes of a pcapng file: the type of a Section Header Block.
const SECTION_HEADER: [u8; 4] = [0x0a, 0x0d, 0x0d, 0x0a];
/// Maximum size of the headers before the UDP header: version, length, addresses and so on.
const MOST_IP_BYTES: usize = 40;
const UDP_BYTES: usize = 8;
/// The protocol number of UDP.
const UDP: u8 = 17;

/// Captured length of each packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keep {
    /// All headers, all messages of connection management, and the first 64 bytes of messages.
    /// Other payload is replaced by zeros, because Wireshark does not decode truncated packets.
    Headers,
    /// Everything, including the data of hosts.
    All,
}

/// Direction of a packet.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Direction {
    /// To us.
    Received,
    /// From us.
    Sent,
}

impl Direction {
    /// Direction in the lowest bits of the flags of a packet block.
    const fn flags(self) -> u32 {
        match self {
            Direction::Received => 1,
            Direction::Sent => 2,
        }
    }
}

/// Where packets are from: an interface description block of the file.
#[derive(PartialEq, Eq, Default, Debug)]
struct Interface {
    name: String,
    description: String,
}

/// A capture in progress. Clones add to the same file, which is complete when the last of them is
/// dropped.
#[derive(Clone, Debug)]
pub struct Capture {
    packets: SyncSender<Captured>,
    keep: Keep,
    missing: Arc<AtomicU64>,
    interface: Arc<Interface>,
}

#[derive(Debug)]
struct Captured {
    interface: Arc<Interface>,
    at: Duration,
    direction: Direction,
    bytes: Vec<u8>,
    /// Packets that are missing before this one.
    missing: u64,
}

impl Capture {
    /// Starts a capture into a new file at `path`, of at most about `limit_bytes`, readable by its
    /// owner only. An earlier capture is removed; a named pipe or a character device is written to.
    ///
    /// # Errors
    /// The file cannot be created, or the path is that of something else: another file, a block device,
    /// a symbolic link.
    pub fn begin(path: &Path, keep: Keep, limit_bytes: u64) -> io::Result<Capture> {
        let file = create(path)?;
        let mut writer = PcapNgWriter::new(BufWriter::new(file)).map_err(cause)?;
        writer.get_mut().flush()?;
        let (packets, received) = sync_channel(QUEUED);
        let name = path.display().to_string();
        thread::Builder::new().name("capture".into()).spawn(move || {
            match write(writer, &received, limit_bytes) {
                Ok(written) => info!(file = name, packets = written, "capture ended"),
                Err(error) => warn!(file = name, %error, "capture failed"),
            }
        })?;
        Ok(Capture { packets, keep, missing: Arc::default(), interface: Arc::default() })
    }

    /// The same capture for the packets of an interface, which the file has from its first packet on.
    #[must_use]
    pub fn on(&self, name: &str, description: &str) -> Capture {
        let interface = Interface { name: name.into(), description: description.into() };
        Capture { interface: Arc::new(interface), ..self.clone() }
    }

    /// Adds a packet, given in consecutive pieces. `identification` is that of its IPv4 header.
    pub fn add(
        &self,
        direction: Direction,
        flow: &Flow,
        tos: u8,
        identification: u16,
        datagram: [&[u8]; 3],
    ) {
        let length: usize = datagram.iter().map(|piece| piece.len()).sum();
        let mut bytes = Vec::with_capacity(MOST_IP_BYTES + UDP_BYTES + length);
        put_ip_and_udp(&mut bytes, flow, tos, identification, length);
        let begin = bytes.len();
        for piece in datagram {
            bytes.extend_from_slice(piece);
        }
        let payload = begin + self.kept(datagram, length)..bytes.len().saturating_sub(ICRC_BYTES);
        if let Some(payload) = bytes.get_mut(payload) {
            payload.fill(0);
        }
        let captured = Captured {
            interface: Arc::clone(&self.interface),
            at: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            direction,
            bytes,
            missing: self.missing.swap(0, Ordering::Relaxed),
        };
        if let Err(error) = self.packets.try_send(captured) {
            let (TrySendError::Full(lost) | TrySendError::Disconnected(lost)) = error;
            self.missing.fetch_add(lost.missing + 1, Ordering::Relaxed);
        }
    }

    /// Number of bytes at the beginning of a datagram that are captured.
    fn kept(&self, datagram: [&[u8]; 3], length: usize) -> usize {
        if self.keep == Keep::All {
            return length;
        }
        // Headers are never truncated. A datagram that is not a RoCE packet is captured as a whole.
        let code = datagram[0].first().copied();
        let Some(row) = code.and_then(Opcode::from_wire).map(Opcode::row) else { return length };
        let headers = Bth::BYTES + row.header_bytes;
        let kept = match row.operation {
            Operation::Datagram => length,
            Operation::Send if row.position.begins() => headers + MESSAGE_HEAD_BYTES,
            _ => headers,
        };
        kept.min(length)
    }
}

/// Checks whether a capture may be written to a path: a mistaken one costs no data. Changes nothing.
///
/// # Errors
/// There is something else: another file, a block device, a directory or a symbolic link.
pub fn check(path: &Path) -> io::Result<()> {
    let what = match fs::symlink_metadata(path).map(|there| there.file_type()) {
        Ok(there) if there.is_symlink() => "it is a symbolic link; name the file itself",
        Ok(there) if there.is_block_device() => "it is a block device; name a file",
        Ok(there) if there.is_dir() => "it is a directory; name a file in it",
        Ok(there) if there.is_file() && !is_capture(path)? => {
            "it is no capture, and is not replaced; remove it, or name another file"
        }
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(_) | Err(_) => return Ok(()),
    };
    Err(io::Error::other(what))
}

/// Creates a file that nobody else can read: a new one, as another process may have the old one
/// open. A named pipe or a character device is used as it is.
fn create(path: &Path) -> io::Result<File> {
    check(path)?;
    let mut options = OpenOptions::new();
    options.write(true).mode(OWNER_ONLY).custom_flags(libc::O_NOFOLLOW);
    match fs::symlink_metadata(path) {
        Ok(there) if !there.is_file() => {
            let file = options.open(path)?;
            if file.metadata()?.is_file() {
                return Err(io::Error::other("another process has just replaced it"));
            }
            return Ok(file);
        }
        Ok(_) => fs::remove_file(path)
            .map_err(|e| io::Error::new(e.kind(), format!("cannot remove the old file: {e}")))?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    options.create_new(true).open(path)
}

/// Whether a file is empty, or begins as pcapng files do.
fn is_capture(path: &Path) -> io::Result<bool> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let mut begin = Vec::new();
    options.open(path)?.take(SECTION_HEADER.len() as u64).read_to_end(&mut begin)?;
    Ok(begin.is_empty() || begin == SECTION_HEADER)
}

impl Interface {
    fn block(&self) -> InterfaceDescriptionBlock<'_> {
        use InterfaceDescriptionOption as Field;
        let options = vec![
            Field::IfName(Cow::Borrowed(&self.name)),
            Field::IfDescription(Cow::Borrowed(&self.description)),
            Field::IfTsResol(9),
        ];
        InterfaceDescriptionBlock { linktype: DataLink::RAW, snaplen: 0, options }
    }
}

/// Writes packets until all senders are dropped; returns their number.
fn write(
    mut writer: PcapNgWriter<BufWriter<File>>,
    packets: &Receiver<Captured>,
    limit_bytes: u64,
) -> io::Result<u64> {
    let (mut written, mut bytes) = (0, 0);
    let mut interfaces: Vec<Arc<Interface>> = Vec::new();
    loop {
        let captured = match packets.recv_timeout(LATEST) {
            Ok(captured) => captured,
            Err(RecvTimeoutError::Timeout) => {
                writer.get_mut().flush()?;
                continue;
            }
            Err(RecvTimeoutError::Disconnected) => break,
        };
        let known = interfaces.iter().position(|known| *known == captured.interface);
        let interface = known.unwrap_or(interfaces.len());
        if known.is_none() {
            let description = captured.interface.block().into_block();
            bytes += writer.write_block(&description).map_err(cause)? as u64;
            interfaces.push(captured.interface);
        }
        let mut options = vec![EnhancedPacketOption::Flags(captured.direction.flags())];
        if captured.missing > 0 {
            options.push(EnhancedPacketOption::DropCount(captured.missing));
        }
        let block = EnhancedPacketBlock {
            interface_id: interface as u32,
            timestamp: captured.at,
            original_len: captured.bytes.len() as u32,
            data: Cow::Owned(captured.bytes),
            options,
        };
        bytes += writer.write_block(&block.into_block()).map_err(cause)? as u64;
        written += 1;
        if bytes >= limit_bytes {
            writer.get_mut().flush()?;
            return Err(io::Error::other(format!("it has reached its limit of {limit_bytes} B")));
        }
    }
    writer.get_mut().flush()?;
    Ok(written)
}

/// An IP header without options and a UDP header without a checksum, for this length.
fn put_ip_and_udp(bytes: &mut Vec<u8>, flow: &Flow, tos: u8, identification: u16, length: usize) {
    // A datagram that came through a socket fits; a wrong length in the header would have no
    // effect.
    let udp_bytes = u16::try_from(UDP_BYTES + length).unwrap_or(u16::MAX);
    match (flow.source.ip(), flow.destination.ip()) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            bytes.extend([0x45, tos]);
            bytes.extend(udp_bytes.saturating_add(20).to_be_bytes());
            bytes.extend(identification.to_be_bytes());
            // Do not fragment; 64 hops; no checksum.
            bytes.extend([0x40, 0, 64, UDP, 0, 0]);
            bytes.extend(source.octets());
            bytes.extend(destination.octets());
        }
        (source, destination) => {
            bytes.extend([0x60 | tos >> 4, tos << 4, 0, 0]);
            bytes.extend(udp_bytes.to_be_bytes());
            bytes.extend([UDP, 64]);
            bytes.extend(gid(source));
            bytes.extend(gid(destination));
        }
    }
    let port = |at: SocketAddr| at.port().to_be_bytes();
    bytes.extend(port(flow.source));
    bytes.extend(port(flow.destination));
    bytes.extend(udp_bytes.to_be_bytes());
    bytes.extend([0, 0]);
}

fn cause(error: PcapError) -> io::Error {
    match error {
        PcapError::IoError(error) => error,
        other => io::Error::other(other),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt, symlink};
    use std::time::Instant;

    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use pcap_file::pcapng::{Block, PcapNgReader};

    use crate::capture::*;
    use crate::wire::header::{Extended, padding};
    use crate::wire::psn::{Psn, Qpn};
    use crate::wire::tx_packet::{Payload, TxPacket};

    fn flow(source: &str, destination: &str) -> Flow {
        let at = |ip: &str| SocketAddr::new(ip.parse().unwrap(), 4791);
        Flow { source: at(source), destination: at(destination) }
    }

    /// The packets of a capture: flags, kept bytes, original length, drop count.
    fn read(path: &Path) -> Vec<(u32, Vec<u8>, u32, u64)> {
        let mut packets = Vec::new();
        // The writer may be in the middle of the header or of a block, which a later read will see.
        let Ok(mut reader) = PcapNgReader::new(File::open(path).unwrap()) else { return packets };
        while let Some(Ok(block)) = reader.next_block() {
            let Block::EnhancedPacket(packet) = block else { continue };
            let (mut flags, mut dropped) = (0, 0);
            for option in &packet.options {
                match option {
                    EnhancedPacketOption::Flags(value) => flags = *value,
                    EnhancedPacketOption::DropCount(value) => dropped = *value,
                    _ => {}
                }
            }
            packets.push((flags, packet.data.to_vec(), packet.original_len, dropped));
        }
        packets
    }

    /// Contents of the file after the writer has ended.
    fn finished(path: &Path, capture: Capture, packets: usize) -> Vec<(u32, Vec<u8>, u32, u64)> {
        drop(capture);
        awaited(path, packets)
    }

    /// Waits until this number of packets is in the file.
    fn awaited(path: &Path, packets: usize) -> Vec<(u32, Vec<u8>, u32, u64)> {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let found = read(path);
            if found.len() >= packets {
                return found;
            }
            assert!(Instant::now() < deadline, "{} packets of {packets}", found.len());
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn captured_payload_is_blanked_unless_requested() {
        const PACKETS: [(Opcode, usize); 6] = [
            (Opcode::SendOnly, 1000),
            (Opcode::SendFirst, 1000),
            (Opcode::SendMiddle, 1000),
            (Opcode::SendLastInvalidate, 1000),
            (Opcode::WriteOnly, 1000),
            (Opcode::UdSendOnly, 256),
        ];
        const EXPECTED: [(Keep, [usize; 6]); 2] = [
            (Keep::Headers, [64, 64, 0, 0, 0, 256]),
            (Keep::All, [1000, 1000, 1000, 1000, 1000, 256]),
        ];
        let directory = tempfile::tempdir().unwrap();
        let flow = flow("192.0.2.1", "192.0.2.2");
        for (keep, expected) in EXPECTED {
            let path = directory.path().join(format!("{keep:?}.pcapng"));
            let capture = Capture::begin(&path, keep, u64::MAX).unwrap();
            for (opcode, len) in PACKETS {
                let bth = Bth::new(opcode, Qpn::new(17), Psn::new(5));
                let mut headers = bth.emit().to_vec();
                headers.resize(Bth::BYTES + opcode.row().header_bytes, 1);
                let pieces = [&*headers, &*vec![7; len], &[9; 4]];
                capture.add(Direction::Sent, &flow, 0, 9, pieces);
                // As received: in one piece.
                capture.add(Direction::Received, &flow, 0, 9, [&pieces.concat(), &[], &[]]);
            }
            let found = finished(&path, capture, 12);
            for (packet, (_, bytes, original, _)) in found.iter().enumerate() {
                let payload = bytes.iter().filter(|byte| **byte == 7).count();
                assert_eq!(payload, expected[packet / 2], "{keep:?}, packet {packet}");
                assert_eq!(bytes.len(), *original as usize);
                assert!(bytes.ends_with(&[9; 4]), "the CRC is as it was");
            }
        }
    }

    #[test]
    fn capture_file_is_readable_only_by_its_owner() {
        let directory = tempfile::tempdir().unwrap();
        let [old, new] = ["old", "new"].map(|name| directory.path().join(name));
        std::fs::write(&old, [&SECTION_HEADER[..], b"what others could read"].concat()).unwrap();
        std::fs::set_permissions(&old, Permissions::from_mode(0o644)).unwrap();
        for path in [old, new] {
            let _capture = Capture::begin(&path, Keep::Headers, u64::MAX).unwrap();
            let mode = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, 0o600, "{}", path.display());
        }
    }

    #[test]
    fn readers_of_a_replaced_capture_file_see_no_new_data() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.pcapng");
        let old = [&SECTION_HEADER[..], b"old"].concat();
        fs::write(&path, &old).unwrap();
        let mut reader = File::open(&path).unwrap();
        let capture = Capture::begin(&path, Keep::All, u64::MAX).unwrap();
        capture.add(Direction::Sent, &flow("192.0.2.1", "192.0.2.2"), 0, 0, [&[0; 64], &[], &[]]);
        assert_eq!(finished(&path, capture, 1).len(), 1);
        let mut seen = Vec::new();
        reader.read_to_end(&mut seen).unwrap();
        assert_eq!(seen, old);
    }

    #[test]
    fn a_file_that_is_no_capture_is_not_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("disk1.img");
        for text in [&[0; 4096][..], b"x", &SECTION_HEADER[..3]] {
            fs::write(&path, text).unwrap();
            let error = Capture::begin(&path, Keep::All, u64::MAX).unwrap_err();
            assert!(error.to_string().contains("it is no capture, and is not replaced"), "{error}");
            assert_eq!(fs::read(&path).unwrap(), text);
        }
        fs::write(&path, "").unwrap();
        Capture::begin(&path, Keep::All, u64::MAX).unwrap();
    }

    #[test]
    fn a_symbolic_link_is_refused_and_a_pipe_is_written_to() {
        let directory = tempfile::tempdir().unwrap();
        let [file, link, pipe] = ["file", "link", "pipe"].map(|name| directory.path().join(name));
        fs::write(&file, "mine").unwrap();
        symlink(&file, &link).unwrap();
        let error = Capture::begin(&link, Keep::All, u64::MAX).unwrap_err();
        assert!(error.to_string().contains("symbolic link"), "{error}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
        mkfifo(&pipe, Mode::from_bits_truncate(0o600)).unwrap();
        // Opened for reading and writing, so that no open waits for the other end.
        let mut reader = OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        let _capture = Capture::begin(&pipe, Keep::All, u64::MAX).unwrap();
        let mut magic = [0; 4];
        reader.read_exact(&mut magic).unwrap();
        assert_eq!(magic, SECTION_HEADER);
    }

    #[test]
    fn captured_packets_have_exact_bytes_and_direction() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.pcapng");
        let capture = Capture::begin(&path, Keep::All, u64::MAX).unwrap();
        let flow = flow("2001:db8::1", "2001:db8::2");
        let payload = [1, 2, 3, 4, 5];
        let bth = Bth::new(Opcode::SendOnly, Qpn::new(17), Psn::new(5));
        let outgoing = TxPacket::new(bth, &Extended::default(), Payload::None, 5);
        let trailer = outgoing.seal(&flow, 0, &payload);
        let pieces = [outgoing.header(), &payload, trailer.as_slice()];
        capture.add(Direction::Sent, &flow, 0x88, 0, pieces);
        let whole = pieces.concat();
        let flow = Flow { source: flow.destination, destination: flow.source };
        capture.add(Direction::Received, &flow, 0, 0, [&whole, &[], &[]]);
        let found = finished(&path, capture, 2);
        assert_eq!(found.iter().map(|(flags, ..)| *flags).collect::<Vec<_>>(), [2, 1]);
        for (_, bytes, original, dropped) in &found {
            assert_eq!(
                (bytes.len(), *original as usize, *dropped),
                (48 + whole.len(), 48 + whole.len(), 0)
            );
            assert_eq!(bytes[48..], whole);
            assert_eq!(usize::from(u16::from_be_bytes([bytes[4], bytes[5]])), 8 + whole.len());
        }
        assert_eq!((found[0].1[0], found[0].1[1]), (0x68, 0x80));
        assert_eq!(found[0].1[8..24], found[1].1[24..40]);
        assert_eq!(usize::from(padding(5)), whole.len() - 12 - 5 - 4);
    }

    #[test]
    fn each_interface_is_described_once_and_packets_name_theirs() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.pcapng");
        let capture = Capture::begin(&path, Keep::All, u64::MAX).unwrap();
        // Each reactor describes the devices.
        let interfaces = ["a", "b", "a"].map(|name| capture.on(name, "what it has"));
        for interface in &interfaces {
            let flow = flow("192.0.2.1", "192.0.2.2");
            interface.add(Direction::Sent, &flow, 0, 0, [&[0; 64], &[], &[]]);
        }
        drop(interfaces);
        assert_eq!(finished(&path, capture, 3).len(), 3);
        let (mut described, mut used) = (Vec::new(), Vec::new());
        let mut reader = PcapNgReader::new(File::open(&path).unwrap()).unwrap();
        while let Some(Ok(block)) = reader.next_block() {
            match block {
                Block::InterfaceDescription(block) => {
                    described.push(format!("{:?}", block.options))
                }
                Block::EnhancedPacket(packet) => used.push(packet.interface_id),
                _ => {}
            }
        }
        let expected = ["a", "b"].map(|name| {
            format!("[IfName({name:?}), IfDescription(\"what it has\"), IfTsResol(9)]")
        });
        assert_eq!((&described[..], &used[..]), (&expected[..], &[0, 1, 0][..]));
    }

    #[test]
    fn capture_stops_at_its_size_limit_and_counts_missing_packets() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a.pcapng");
        let capture = Capture::begin(&path, Keep::All, 1000).unwrap();
        let flow = flow("192.0.2.1", "192.0.2.2");
        // As long as the writer accepts packets.
        while capture.missing.load(Ordering::Relaxed) == 0 {
            capture.add(Direction::Sent, &flow, 0, 0, [&[0; 500], &[], &[]]);
        }
        // The queue may be full before the writer has started.
        assert_eq!(awaited(&path, 2).len(), 2);
    }
}
