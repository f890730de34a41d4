//! The load: stamped writes over an association, some with Force Unit Access, and flushes between
//! them. The guarantee of each completion is recorded as soon as it has arrived.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::time::{Duration, Instant};

use initiator::host::Range;
use initiator::rng::Random;
use initiator::verify::block_stamp::Stamp;
use initiator::{Data, Done, Error, Host, Request};
use nvme::{IoOpcode, Sqe};

use crate::acks::{Extent, Writer};
use crate::oracle::BLOCK_BYTES;

/// Largest write in blocks.
const BLOCKS_LIMIT: u64 = 8;

/// Bits of an LBA; above them a stamp and an acknowledgement have the index of the namespace.
const LBA_BITS: u32 = 32;

/// Range and pattern of the writes.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Namespaces.
    pub(crate) nsids: Vec<u32>,
    /// Number of blocks used in each of them.
    pub(crate) blocks: u64,
    /// Number of the first write.
    pub(crate) first: u64,
    /// Total number of writes.
    pub(crate) writes: u64,
    /// Commands outstanding.
    pub(crate) depth: usize,
    /// Percentage of writes with Force Unit Access.
    pub(crate) fua: u8,
    /// Number of writes between flushes.
    pub(crate) flush_every: u64,
    /// Run number in the stamps.
    pub(crate) run: u64,
}

enum Flight {
    Write {
        extent: Extent,
        fua: bool,
    },
    /// Writes that had completed when it was sent.
    Flush(Vec<Extent>),
}

struct Load<'a> {
    plan: Plan,
    host: &'a mut Host,
    acks: &'a Writer,
    random: &'a mut Random,
    sequence: u64,
    tag: u64,
    busy: BTreeSet<u64>,
    flights: BTreeMap<u64, Flight>,
    /// Completed, and not yet durable.
    answered: Vec<Extent>,
    unflushed: u64,
}

/// Writes, and returns the number of flushes.
///
/// # Errors
/// A command failed, or its guarantee cannot be recorded.
pub(crate) fn run(
    plan: Plan,
    host: &mut Host,
    acks: &Writer,
    random: &mut Random,
) -> Result<u64, Error> {
    let (sequence, tag, unflushed) = (plan.first - 1, 0, 0);
    let last = sequence + plan.writes;
    let (busy, flights, answered) = (BTreeSet::new(), BTreeMap::new(), Vec::new());
    let mut load =
        Load { plan, host, acks, random, sequence, tag, busy, flights, answered, unflushed };
    let mut flushes = 0;
    loop {
        while load.flights.len() < load.plan.depth && load.sequence < last {
            if load.unflushed >= load.plan.flush_every {
                flushes += load.flush()?;
            } else {
                load.write()?;
            }
        }
        if load.flights.is_empty() {
            if load.answered.is_empty() {
                return Ok(flushes);
            }
            flushes += load.flush()?;
        }
        load.host.wait(Instant::now() + Duration::from_secs(1));
        while let Some(done) = load.host.next_done() {
            load.done(done)?;
        }
        if let Some(ended) = load.host.session().ended() {
            return Err(Error::Ended(ended.clone()));
        }
    }
}

impl Load<'_> {
    fn write(&mut self) -> Result<(), Error> {
        let blocks = 1 + self.random.below(BLOCKS_LIMIT);
        let index = self.random.below(self.plan.nsids.len() as u64);
        let slba = self.random.below(self.plan.blocks - blocks);
        let lba = index << LBA_BITS | slba;
        if self.busy.range(lba..lba + blocks).next().is_some() {
            return Ok(()); // two writes of one block at once have no order
        }
        self.sequence += 1;
        self.unflushed += 1;
        self.busy.extend(lba..lba + blocks);
        let len = blocks as usize * BLOCK_BYTES;
        let Some(mut buf) = self.host.pool().take_data(len as u32) else {
            return Err(Error::Local("the pool is too small".into()));
        };
        for (lba, block) in
            (lba..).zip(self.host.pool().bytes_mut(&mut buf).chunks_exact_mut(BLOCK_BYTES))
        {
            let (run, sequence) = (self.plan.run, self.sequence);
            Stamp { run, sequence, lba, client: 0, generation: 1 }.fill(block);
        }
        let fua = self.random.percent(self.plan.fua);
        let sqe = Sqe::io(IoOpcode::WRITE, self.plan.nsids[index as usize]);
        let sqe = sqe.with_range(slba, (blocks - 1) as u16).with_fua(fua);
        let extent = Extent { lba, blocks: blocks as u32, sequence: self.sequence };
        self.send(sqe, Data::Buf(buf), Flight::Write { extent, fua })
    }

    /// Flushes each namespace, and returns their number.
    fn flush(&mut self) -> Result<u64, Error> {
        self.unflushed = 0;
        for index in 0..self.plan.nsids.len() {
            let of_it = |extent: &mut Extent| extent.lba >> LBA_BITS == index as u64;
            let answered = self.answered.extract_if(.., of_it).collect();
            let sqe = Sqe::io(IoOpcode::FLUSH, self.plan.nsids[index]);
            self.send(sqe, Data::None, Flight::Flush(answered))?;
        }
        Ok(self.plan.nsids.len() as u64)
    }

    fn send(&mut self, sqe: Sqe, data: Data, flight: Flight) -> Result<(), Error> {
        self.tag += 1;
        let queues = u64::from(self.host.session().io_queues());
        let queue = 1 + self.random.below(queues) as u16;
        let sent = self.host.submit(queue, Request { sqe, data, tag: self.tag });
        sent.map_err(|(_, why)| Error::Local(why.to_string()))?;
        self.flights.insert(self.tag, flight);
        Ok(())
    }

    fn done(&mut self, done: Done) -> Result<(), Error> {
        if let Data::Buf(buf) = done.data {
            self.host.pool().give(buf);
        }
        let answer = done.outcome.map_err(|_| Error::Local("a command was lost".into()))?;
        if !answer.status.is_success() {
            return Err(Error::Status { what: "a command of the load", status: answer.status });
        }
        match self.flights.remove(&done.tag) {
            None => return Err(Error::Local("an answer to no command".into())),
            Some(Flight::Flush(promised)) => self.promised(&promised)?,
            Some(Flight::Write { extent, fua }) => {
                for lba in extent.lba..extent.lba + u64::from(extent.blocks) {
                    self.busy.remove(&lba);
                }
                match fua {
                    true => self.promised(&[extent])?,
                    false => {
                        recorded(self.acks.completed(&extent))?;
                        self.answered.push(extent);
                    }
                }
            }
        }
        Ok(())
    }

    fn promised(&mut self, extents: &[Extent]) -> Result<(), Error> {
        recorded(self.acks.extents(extents))
    }
}

fn recorded(result: std::io::Result<()>) -> Result<(), Error> {
    result.map_err(|error| Error::Local(format!("the acknowledgements: {error}")))
}

/// Reads the blocks that a load uses; `each` gets the LBA of their stamps.
///
/// # Errors
/// A Read failed.
pub(crate) fn read(
    host: &mut Host,
    nsids: &[u32],
    blocks: u64,
    mut each: impl FnMut(u64, &[u8]),
) -> Result<(), Error> {
    let block_bytes = BLOCK_BYTES as u32;
    let mut bytes = vec![0; 64 * BLOCK_BYTES];
    for (index, nsid) in (0u64..).zip(nsids) {
        for slba in (0..blocks).step_by(64) {
            let count = (blocks - slba).min(64) as usize;
            let bytes = &mut bytes[..count * BLOCK_BYTES];
            host.read(Range { nsid: *nsid, slba, block_bytes }, bytes)?;
            for (slba, block) in (slba..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
                each(index << LBA_BITS | slba, block);
            }
        }
    }
    Ok(())
}

/// Replaces files in a directory of a file system, one after the other, durably: written beside,
/// synced, renamed, and the directory synced.
pub(crate) fn files(
    directory: &Path,
    count: u64,
    run: u64,
    acks: &Writer,
    random: &mut Random,
) -> std::io::Result<()> {
    for sequence in 1..=count {
        let number = random.below(32);
        let blocks = 1 + random.below(16);
        let mut bytes = vec![0; blocks as usize * BLOCK_BYTES];
        for block in bytes.chunks_exact_mut(BLOCK_BYTES) {
            Stamp { run, sequence, lba: number, client: 0, generation: 1 }.fill(block);
        }
        let new = directory.join("new");
        let mut file = File::create(&new)?;
        file.write_all(&bytes)?;
        file.sync_all()?;
        fs::rename(&new, directory.join(format!("file{number}")))?;
        File::open(directory)?.sync_all()?;
        acks.extents(&[Extent { lba: number, blocks: 1, sequence }])?;
    }
    Ok(())
}
