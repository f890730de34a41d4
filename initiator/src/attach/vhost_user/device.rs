//! The device of one front-end: what its messages set up, and the requests of its queues.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rdma::Pool;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap};

use super::vring::{Chain, QUEUE_ENTRIES, Vring};
use crate::attach::operation::RequestTable;
use crate::nbd::{Command, Errno, Export, Kind, Negotiated, command_flag, flag};
use crate::vhost_user::blk::{self, CONFIG_BYTES};
use crate::vhost_user::{
    Body, MemoryRegion, Message, Reply, RequestId, VringAddress, feature, protocol,
};

/// Queues that are offered.
pub(super) const QUEUES: u16 = 16;
/// Descriptors with data of a request.
const SEGMENTS: u32 = 126;
/// The longest discard or write of zeroes, in bytes.
const MOST_RANGE_BYTES: u64 = 2 << 30;
/// The number of the device among the connections of the table of requests.
pub(in crate::attach) const CONNECTION: usize = usize::MAX;

/// What the device offers, as of now.
#[derive(Clone, Debug)]
pub(in crate::attach) struct DeviceProperties {
    pub(in crate::attach) export: Export,
    pub(in crate::attach) serial: [u8; blk::ID_BYTES],
    /// A write of zeroes may deallocate.
    pub(in crate::attach) zeroes_deallocate: bool,
}

impl DeviceProperties {
    fn features(&self) -> u64 {
        let mut all = feature::VERSION_1
            | feature::INDIRECT_DESC
            | feature::EVENT_IDX
            | feature::PROTOCOL_FEATURES
            | blk::feature::SEG_MAX
            | blk::feature::BLK_SIZE
            | blk::feature::TOPOLOGY
            | blk::feature::FLUSH
            | blk::feature::MQ;
        for (has, feature) in [
            (flag::READ_ONLY, blk::feature::RO),
            (flag::SEND_TRIM, blk::feature::DISCARD),
            (flag::SEND_WRITE_ZEROES, blk::feature::WRITE_ZEROES),
        ] {
            all |= if self.export.flags & has != 0 { feature } else { 0 };
        }
        all
    }

    fn config(&self) -> [u8; CONFIG_BYTES] {
        let block_bytes = self.export.block_bytes.max(1);
        let sectors = (MOST_RANGE_BYTES / blk::SECTOR_BYTES) as u32;
        blk::Config {
            capacity: self.export.size_bytes / blk::SECTOR_BYTES,
            seg_max: SEGMENTS,
            blk_size: block_bytes,
            opt_io_size: self.export.preferred_bytes / block_bytes,
            num_queues: QUEUES,
            max_discard_sectors: sectors,
            max_write_zeroes_sectors: sectors,
            discard_sector_alignment: block_bytes / blk::SECTOR_BYTES as u32,
            write_zeroes_may_unmap: self.zeroes_deallocate,
        }
        .emit()
    }
}

/// What a device uses while it takes and answers requests.
pub(in crate::attach) struct Resources<'a> {
    pub(in crate::attach) pool: &'a mut Pool,
    pub(in crate::attach) requests: &'a mut RequestTable,
    pub(in crate::attach) piece_bytes: u32,
}

/// A request under way.
#[derive(Default)]
struct InFlight {
    /// `None`: there is none.
    ring: Option<usize>,
    /// Its memory is used again.
    chain: Chain,
}

/// The device.
pub(super) struct Device {
    vrings: Vec<Vring>,
    memory: Option<Arc<GuestMemoryMmap>>,
    regions: Vec<MemoryRegion>,
    features: u64,
    protocol_features: u64,
    /// The channel for requests of ours.
    pub(super) backend_channel: Option<OwnedFd>,
    /// By their number in the table of requests.
    in_flight: Vec<InFlight>,
    count: usize,
    /// Chains that are taken now, and the one that begins.
    heads: Vec<u16>,
    next: Chain,
    /// There is no memory, or no place, for the next request at present.
    is_stalled: bool,
    /// The queue that gets memory first.
    first_ring: usize,
}

impl Device {
    /// For so many requests in the table.
    pub(super) fn new(requests: usize) -> Device {
        Device {
            vrings: (0..QUEUES).filter_map(|_| Vring::new()).collect(),
            memory: None,
            regions: Vec::new(),
            features: 0,
            protocol_features: 0,
            backend_channel: None,
            in_flight: (0..requests).map(|_| InFlight::default()).collect(),
            count: 0,
            heads: Vec::with_capacity(QUEUE_ENTRIES.into()),
            next: Chain::default(),
            is_stalled: false,
            first_ring: 0,
        }
    }

    pub(super) fn vrings(&self) -> &[Vring] {
        &self.vrings
    }

    /// Handles a message; none of the requests is under way. Returns the reply, if there is one.
    pub(super) fn on_message(
        &mut self,
        message: Message,
        mut descriptors: Vec<OwnedFd>,
        properties: &DeviceProperties,
    ) -> Option<Reply> {
        let request = message.header.request;
        if matches!(
            request,
            RequestId::SET_VRING_KICK | RequestId::SET_VRING_CALL | RequestId::SET_BACKEND_REQ_FD
        ) {
            // The thread that reads and writes them drives the paths and all exports: it must not
            // wait for a front-end.
            descriptors.retain(|descriptor| rustix::io::ioctl_fionbio(descriptor, true).is_ok());
        }
        let outcome = match (request, message.body) {
            (RequestId::GET_FEATURES, _) => return Some(Reply::U64(properties.features())),
            (RequestId::GET_PROTOCOL_FEATURES, _) => {
                let all = protocol::MQ | protocol::REPLY_ACK | protocol::BACKEND_REQ;
                return Some(Reply::U64(all | protocol::CONFIG));
            }
            (RequestId::GET_QUEUE_NUM, _) => return Some(Reply::U64(QUEUES.into())),
            (RequestId::GET_VRING_BASE, Body::Vring { index, .. }) => {
                let next = self.vrings.get_mut(index as usize).map_or(0, Vring::stop);
                return Some(Reply::Vring { index, num: next.into() });
            }
            (RequestId::GET_CONFIG, Body::Config { offset, len, flags }) => {
                let mut bytes = vec![0; (offset + len) as usize];
                let known = bytes.len().min(CONFIG_BYTES);
                bytes[..known].copy_from_slice(&properties.config()[..known]);
                bytes.drain(..offset as usize);
                return Some(Reply::Config { offset, flags, bytes });
            }
            (RequestId::SET_FEATURES, Body::U64(features)) => {
                self.set_features(features, properties)
            }
            (RequestId::SET_PROTOCOL_FEATURES, Body::U64(features)) => {
                self.protocol_features = features;
                Some(())
            }
            (RequestId::SET_MEM_TABLE, Body::Memory(regions)) => {
                self.set_memory(regions, descriptors)
            }
            (RequestId::SET_BACKEND_REQ_FD, _) => {
                self.backend_channel = descriptors.pop();
                Some(())
            }
            (RequestId::SET_VRING_ADDR, Body::Address(index, address)) => {
                self.set_addresses(index, address)
            }
            (_, Body::Vring { index, num }) => self.set_vring(request, index, num),
            (_, Body::Descriptor { index, has_descriptor }) => {
                let descriptor = descriptors.pop().filter(|_| has_descriptor);
                self.set_descriptor(request, index, descriptor)
            }
            (RequestId::SET_OWNER | RequestId::RESET_OWNER | RequestId::SET_CONFIG, _) => Some(()),
            _ => None,
        };
        let acknowledges = self.protocol_features & protocol::REPLY_ACK != 0;
        let failed = u64::from(outcome.is_none());
        (message.header.needs_reply && acknowledges).then_some(Reply::U64(failed))
    }

    fn set_features(&mut self, features: u64, properties: &DeviceProperties) -> Option<()> {
        self.features = features;
        // Without the features of the protocol, there is no message that enables a queue.
        let are_enabled = features & feature::PROTOCOL_FEATURES == 0;
        for vring in &mut self.vrings {
            vring.is_enabled |= are_enabled;
            virtio_queue::QueueT::set_event_idx(
                &mut vring.queue,
                features & feature::EVENT_IDX != 0,
            );
        }
        (features & !properties.features() == 0).then_some(())
    }

    fn set_memory(&mut self, regions: Vec<MemoryRegion>, files: Vec<OwnedFd>) -> Option<()> {
        self.memory = None;
        if regions.len() != files.len() {
            return None;
        }
        let range = |(region, file): (&MemoryRegion, OwnedFd)| {
            let (file, size) = (File::from(file), usize::try_from(region.size_bytes).ok()?);
            let end = region.offset.checked_add(region.size_bytes)?;
            // An access behind the end of a file would end the process.
            let metadata = file.metadata().ok()?;
            if metadata.is_file() && metadata.len() < end {
                return None;
            }
            let file = FileOffset::new(file, region.offset);
            Some((GuestAddress(region.guest_address), size, Some(file)))
        };
        let mut ranges = regions.iter().zip(files).map(range).collect::<Option<Vec<_>>>()?;
        ranges.sort_by_key(|(address, ..)| address.0);
        self.memory = Some(Arc::new(GuestMemoryMmap::from_ranges_with_files(ranges).ok()?));
        self.regions = regions;
        Some(())
    }

    /// Returns the address in the guest of one in the front-end.
    fn guest_address(&self, user: u64) -> Option<u64> {
        self.regions.iter().find_map(|region| {
            let offset = user.checked_sub(region.user_address)?;
            let is_inside = offset < region.size_bytes;
            is_inside.then(|| region.guest_address.checked_add(offset))?
        })
    }

    fn set_addresses(&mut self, index: u32, address: VringAddress) -> Option<()> {
        let VringAddress { descriptors, available, used } = address;
        let all = [descriptors, available, used].map(|user| self.guest_address(user));
        let [Some(descriptors), Some(available), Some(used)] = all else { return None };
        let vring = self.vrings.get_mut(index as usize)?;
        vring.set_addresses([descriptors, available, used], self.memory.as_ref()?)
    }

    fn set_vring(&mut self, request: RequestId, index: u32, num: u32) -> Option<()> {
        let vring = self.vrings.get_mut(index as usize)?;
        match request {
            RequestId::SET_VRING_NUM => {
                let entries = u16::try_from(num).ok().filter(|num| *num <= QUEUE_ENTRIES)?;
                vring.queue.try_set_size(entries).ok()?;
            }
            RequestId::SET_VRING_BASE => {
                virtio_queue::QueueT::set_next_avail(&mut vring.queue, num as u16);
            }
            RequestId::SET_VRING_ENABLE => vring.is_enabled = num == 1,
            _ => return None,
        }
        Some(())
    }

    fn set_descriptor(
        &mut self,
        request: RequestId,
        index: u32,
        descriptor: Option<OwnedFd>,
    ) -> Option<()> {
        let vring = self.vrings.get_mut(index as usize)?;
        match request {
            RequestId::SET_VRING_KICK => vring.start(descriptor),
            RequestId::SET_VRING_CALL => vring.set_call(descriptor),
            // Nothing is reported there.
            _ => drop(descriptor),
        }
        Some(())
    }

    /// Takes requests of all queues. Returns whether there were any.
    pub(super) fn take(&mut self, properties: &DeviceProperties, r: &mut Resources<'_>) -> bool {
        self.is_stalled = false;
        let Some(memory) = self.memory.clone() else { return false };
        let mut any = false;
        let (mut heads, mut chain) =
            (std::mem::take(&mut self.heads), std::mem::take(&mut self.next));
        let (first, rings) = (self.first_ring, self.vrings.len());
        for ring in (first..rings).chain(0..first) {
            if self.is_stalled || !self.vrings[ring].is_running() {
                continue;
            }
            self.vrings[ring].take_heads(&memory, &mut heads);
            for (n, head) in heads.iter().enumerate() {
                self.vrings[ring].read(&memory, *head, &mut chain);
                self.begin(ring, &mut chain, &memory, properties, r);
                if self.is_stalled {
                    self.vrings[ring].push_back(heads.len() - n);
                    // One that got none is the first next time, else the one behind it.
                    self.first_ring = (ring + usize::from(n > 0)) % rings;
                    break;
                }
                any = true;
            }
        }
        (self.heads, self.next) = (heads, chain);
        any
    }

    /// Has the guest signal what it makes available. Returns whether something is there already.
    pub(super) fn arm(&mut self) -> bool {
        let Some(memory) = self.memory.clone() else { return false };
        let mut any = false;
        for vring in self.vrings.iter_mut().filter(|vring| vring.is_running()) {
            any |= vring.arm(&memory);
        }
        any && !self.is_stalled
    }

    /// Begins a request, or answers it.
    fn begin(
        &mut self,
        ring: usize,
        chain: &mut Chain,
        memory: &GuestMemoryMmap,
        properties: &DeviceProperties,
        r: &mut Resources<'_>,
    ) {
        let (readable, writable) = chain.lengths();
        let mut header = [0; blk::HEADER_BYTES];
        if writable == 0 || chain.copy_from(memory, 0, &mut header).is_none() {
            // There is no place for a status.
            return self.vrings[ring].add_used(memory, chain, 0);
        }
        let header = blk::Header::parse(&header);
        if header.kind == blk::Kind::Id {
            let len = properties.serial.len().min(writable - 1);
            let copied = chain.copy_to(memory, 0, &properties.serial[..len]);
            let outcome = copied.ok_or(Errno::Io);
            return answer(&mut self.vrings[ring], chain, memory, outcome, len as u32);
        }
        let data_bytes = match header.kind {
            blk::Kind::In => writable - 1,
            blk::Kind::Out => readable - blk::HEADER_BYTES,
            _ => 0,
        };
        let command = match command(chain, memory, header, data_bytes, self.features) {
            Ok(command) => command,
            Err(errno) => {
                return answer(&mut self.vrings[ring], chain, memory, Err(errno), 0);
            }
        };
        let negotiated = Negotiated::default();
        let checked = command.check(&properties.export, negotiated);
        let Resources { pool, requests, piece_bytes } = r;
        let begun = requests.begin(CONNECTION, command, checked, negotiated, pool, *piece_bytes);
        let Some(n) = begun else {
            self.is_stalled = true;
            return;
        };
        let mut at = 0;
        while command.kind == Kind::Write && checked.is_ok() && at < data_bytes {
            let room = requests.room(n, at as u32, pool);
            let len = room.len().min(data_bytes - at);
            let copied = chain.copy_from(memory, blk::HEADER_BYTES + at, &mut room[..len]);
            if copied.is_none() || len == 0 {
                requests.free(n, pool);
                return answer(&mut self.vrings[ring], chain, memory, Err(Errno::Io), 0);
            }
            at += len;
        }
        let slot = &mut self.in_flight[n as usize];
        slot.ring = Some(ring);
        std::mem::swap(&mut slot.chain, chain);
        self.count += 1;
        requests.submit(n);
    }

    /// A request has been carried out: answers it.
    pub(super) fn reply(&mut self, n: u32, r: &mut Resources<'_>) {
        let Device { in_flight, vrings, memory: Some(memory), count, .. } = self else { return };
        let InFlight { ring, chain } = &mut in_flight[n as usize];
        let Some(vring) = ring.take().and_then(|ring| vrings.get_mut(ring)) else { return };
        *count -= 1;
        let request = r.requests.get(n);
        let (mut outcome, mut at) = (request.outcome(), 0);
        for data in request.data(r.pool) {
            if chain.copy_to(memory, at, data).is_none() {
                outcome = Err(Errno::Io);
            }
            at += data.len();
        }
        r.requests.free(n, r.pool);
        answer(vring, chain, memory, outcome, at as u32);
    }

    /// Signals the guest where requests are done.
    pub(super) fn signal(&mut self) {
        let Device { vrings, memory: Some(memory), .. } = self else { return };
        let memory: &GuestMemoryMmap = memory;
        vrings.iter_mut().for_each(|vring| vring.signal(memory));
    }

    /// Whether there was no memory, or no place, for the next request.
    pub(super) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Whether no request is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.count == 0
    }
}

/// Writes the status of a request behind its data, which has so many bytes. It has a place for
/// that.
fn answer(
    vring: &mut Vring,
    chain: &Chain,
    memory: &GuestMemoryMmap,
    outcome: Result<(), Errno>,
    data_bytes: u32,
) {
    let (_, writable) = chain.lengths();
    let written = chain.copy_to(memory, writable - 1, &[blk::status(outcome)]);
    vring.add_used(memory, chain, written.map_or(0, |()| data_bytes + 1));
}

/// Returns the command of a request.
fn command(
    chain: &Chain,
    memory: &GuestMemoryMmap,
    header: blk::Header,
    data_bytes: usize,
    features: u64,
) -> Result<Command, Errno> {
    let offset = |sector: u64| sector.checked_mul(blk::SECTOR_BYTES).ok_or(Errno::Invalid);
    let command = Command { kind: Kind::Flush, flags: 0, cookie: 0, offset: 0, len: 0 };
    // A driver that knows no flush expects that there is no cache.
    let fua = if features & blk::feature::FLUSH == 0 { command_flag::FUA } else { 0 };
    let len = u32::try_from(data_bytes).map_err(|_| Errno::Overflow)?;
    let kind = match header.kind {
        blk::Kind::In => Kind::Read,
        blk::Kind::Out => Kind::Write,
        blk::Kind::Flush => return Ok(command),
        blk::Kind::Discard | blk::Kind::WriteZeroes => {
            let mut bytes = [0; blk::RANGE_BYTES];
            chain.copy_from(memory, blk::HEADER_BYTES, &mut bytes).ok_or(Errno::Invalid)?;
            let range = blk::Range::parse(&bytes).ok_or(Errno::NotSupported)?;
            let len = u64::from(range.sectors) * blk::SECTOR_BYTES;
            let len = u32::try_from(len).map_err(|_| Errno::Invalid)?;
            let (kind, keeps) = match header.kind {
                blk::Kind::Discard if range.unmap => return Err(Errno::NotSupported),
                blk::Kind::Discard => (Kind::Trim, 0),
                _ if range.unmap => (Kind::WriteZeroes, 0),
                _ => (Kind::WriteZeroes, command_flag::NO_HOLE),
            };
            let offset = offset(range.sector)?;
            return Ok(Command { kind, flags: fua | keeps, offset, len, ..command });
        }
        blk::Kind::Id | blk::Kind::Unknown => return Err(Errno::NotSupported),
    };
    let flags = if kind == Kind::Write { fua } else { 0 };
    Ok(Command { kind, flags, offset: offset(header.sector)?, len, ..command })
}
